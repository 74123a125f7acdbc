/* Group tokenizer: text to ids and back on one core. The texts are made here from a fixed seed: prose and code by Zipf's
 * law from words of the vocabulary itself, so that the share of words met before is that of real text; and what a
 * malicious client would send. */
#include "bench.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "tokenizer.h"
#include "utf8.h"

enum { TEXT_BYTES = 1 << 20, WORDS_MAX = 20000 };

struct maker {
    const struct tokenizer *tokenizer;
    uint64_t seed;
    int32_t words[WORDS_MAX]; /* ids of tokens that are a space and lower-case letters */
    int n_words;
    char *text; /* [TEXT_BYTES] */
    size_t n;
};

static uint32_t draw(struct maker *m, uint32_t below) {
    m->seed = m->seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((m->seed >> 33) * below >> 31);
}

/* 0..n-1 with a probability that falls about as 1 / (i + 1). */
static uint32_t draw_zipf(struct maker *m, uint32_t n) {
    uint32_t width = 1;

    while (width < n && draw(m, 16) != 0) /* every octave is about as likely as the one before */
        width *= 2;
    return draw(m, width < n ? width : n);
}

static void put(struct maker *m, const char *bytes, size_t n) {
    if (n > TEXT_BYTES - m->n)
        n = TEXT_BYTES - m->n;
    memcpy(m->text + m->n, bytes, n);
    m->n += n;
}

static void put_text(struct maker *m, const char *text) {
    put(m, text, strlen(text));
}

static void put_cp(struct maker *m, uint32_t cp) {
    char bytes[UTF8_CHAR_BYTES_MAX];

    put(m, bytes, (size_t)utf8_encode(cp, bytes));
}

static void put_word(struct maker *m, size_t skip) {
    size_t n;
    const char *bytes = tokenizer_bytes(m->tokenizer, m->words[draw_zipf(m, (uint32_t)m->n_words)], &n);

    put(m, bytes + skip, n - skip);
}

static void make_prose(struct maker *m) {
    put_word(m, 0);
    if (draw(m, 8) == 0) /* a word that is no token of its own */
        put_word(m, 1);
    if (draw(m, 10) == 0)
        put_text(m, draw(m, 2) ? "," : ".");
    if (draw(m, 80) == 0)
        put_text(m, "\n\n");
}

static void make_code(struct maker *m) {
    static const char *const between[] = {"->",          "(",        "[i]",  " = ", ", ",   " + ",
                                          ";\n        ", ");\n    ", " {\n", "_",   "0x3f", "/* "};

    put_word(m, 1);
    put_text(m, between[draw(m, sizeof between / sizeof between[0])]);
}

static void make_han(struct maker *m) {
    for (uint32_t n = 4 + draw(m, 16); n > 0; n--)
        put_cp(m, 0x4E00 + draw_zipf(m, 6000) * 3);
    put_cp(m, draw(m, 3) ? 0xFF0C : 0x3002);
}

static void make_hindi(struct maker *m) {
    for (uint32_t n = 2 + draw(m, 8); n > 0; n--)
        put_cp(m, 0x905 + draw(m, 0x4A));
    put_text(m, " ");
}

static void make_one_letter(struct maker *m) {
    put_text(m, "a");
}

static void make_letters(struct maker *m) {
    put_cp(m, 'a' + draw(m, 26));
}

static void make_letters_of_words(struct maker *m) {
    put_word(m, 1);
}

static void make_han_word(struct maker *m) {
    put_cp(m, 0x4E00 + draw(m, 0x5000));
}

static void make_marks(struct maker *m) {
    put_cp(m, draw(m, 2) ? 0x301 : 0x323);
}

static void make_spaces(struct maker *m) {
    put_text(m, " ");
}

static void make_any(struct maker *m) {
    uint32_t cp = draw(m, 0x110000);

    put_cp(m, cp >= 0xD800 && cp <= 0xDFFF ? 0xFFFD : cp);
}

static void make_bytes(struct maker *m) {
    char byte = (char)draw(m, 256);

    put(m, &byte, 1);
}

static void make_brackets(struct maker *m) {
    put_text(m, "<|im_");
}

static const struct {
    const char *name;
    void (*make)(struct maker *m);
    double wanted; /* MB/s that the design asks for */
} texts[] = {
    {"prose", make_prose, 8},
    {"code", make_code, 8},
    {"Chinese", make_han, 1},
    {"Hindi", make_hindi, 1},
    {"a word of one letter", make_one_letter, 1},
    {"a word of random letters", make_letters, 1},
    {"a word of words", make_letters_of_words, 1},
    {"a word of random Han", make_han_word, 1},
    {"marks out of order", make_marks, 1},
    {"white space", make_spaces, 1},
    {"random code points", make_any, 1},
    {"random bytes", make_bytes, 1},
    {"half markup", make_brackets, 1},
};

static void find_words(struct maker *m) {
    for (int32_t id = 0; id < tokenizer_n_ids(m->tokenizer) && m->n_words < WORDS_MAX; id++) {
        size_t n, k = 1;
        const char *bytes = tokenizer_bytes(m->tokenizer, id, &n);

        if (!bytes || n < 3 || bytes[0] != ' ')
            continue;
        while (k < n && bytes[k] >= 'a' && bytes[k] <= 'z')
            k++;
        if (k == n)
            m->words[m->n_words++] = id;
    }
}

static int measure(struct maker *m, const struct bench_options *options, int text_idx, double *samples) {
    struct tokenizer_ids ids = {0};
    struct tokenizer_text back = {0};
    double encode, decode;
    int r = 0;

    for (int i = 0; i < options->n_repeats && r == 0; i++) {
        double start = bench_now();

        ids.n = 0;
        r = tokenizer_encode(m->tokenizer, m->text, m->n, TOKENIZER_MARKUP, &ids);
        samples[i] = bench_now() - start;
    }
    encode = bench_median(samples, options->n_repeats);
    for (int i = 0; i < options->n_repeats && r == 0; i++) {
        double start = bench_now();

        back.n = 0;
        r = tokenizer_decode(m->tokenizer, ids.ids, ids.n, 0, &back);
        samples[i] = bench_now() - start;
    }
    decode = bench_median(samples, options->n_repeats);
    if (r == 0)
        printf("%-26s %8.1f %8.0f %10.2f %10.1f\n", texts[text_idx].name, 1e-6 * (double)m->n / encode,
               texts[text_idx].wanted, (double)m->n / (double)ids.n, 1e-6 * (double)back.n / decode);
    tokenizer_ids_deinit(&ids);
    tokenizer_text_deinit(&back);
    return r;
}

static int run(const struct bench_options *options) {
    const char *path = options->file ? options->file : SHARE "/tiny/target/tokenizer.json";
    struct maker m = {.text = malloc(TEXT_BYTES)};
    double *samples = malloc((size_t)options->n_repeats * sizeof *samples), start = bench_now();
    struct tokenizer *tokenizer = NULL;
    struct report report;
    int r = -ENOMEM;

    if (!m.text || !samples)
        goto out;
    r = tokenizer_open(path, &tokenizer, &report);
    if (r != 0) {
        fprintf(stderr, "%s\n", report.line);
        goto out;
    }
    m.tokenizer = tokenizer;
    printf("%s: %d ids, opened in %.0f ms; texts of 1 MiB, one core\n", path, tokenizer_n_ids(tokenizer),
           1e3 * (bench_now() - start));
    find_words(&m);
    if (m.n_words == 0) {
        fprintf(stderr, "%s: has no words to make text of\n", path);
        r = -EINVAL;
        goto out;
    }
    printf("%-26s %8s %8s %10s %10s\n", "text", "MB/s", "wanted", "bytes/id", "back MB/s");
    for (int i = 0; i < (int)(sizeof texts / sizeof texts[0]) && r == 0; i++) {
        m.seed = 1;
        m.n = 0;
        while (m.n < TEXT_BYTES)
            texts[i].make(&m);
        r = measure(&m, options, i, samples);
    }
out:
    tokenizer_free(tokenizer);
    free(samples);
    free(m.text);
    return r;
}

const struct bench_group bench_tokenizer = {"tokenizer", "text to ids and back, one core; --file TOKENIZER_JSON", run};
