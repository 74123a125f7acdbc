/* The tokenizer and its parts: words, NFC, merges long and short, markup, decoding, and what of a file is refused. The ids
 * of real text are held against the reference by the golden tests. */
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "added.h"
#include "base.h"
#include "bpe.h"
#include "nfc.h"
#include "pretoken.h"
#include "report.h"
#include "tokenizer.h"
#include "unicode.h"

struct fixture {
    struct unicode unicode;
    struct tokenizer *tiny;
};

static int set_up(void **state) {
    struct fixture *f = calloc(1, sizeof *f);
    struct report report = {0};

    if (!f || unicode_init(&f->unicode, &report) != 0 || tokenizer_open(TINY_TOKENIZER, &f->tiny, &report) != 0) {
        fprintf(stderr, "%s\n", report.line);
        return -1;
    }
    *state = f;
    return 0;
}

static int tear_down(void **state) {
    struct fixture *f = *state;

    tokenizer_free(f->tiny);
    unicode_deinit(&f->unicode);
    free(f);
    return 0;
}

/* A copy of exactly n bytes, so that a sanitizer sees an over-read. */
static char *exact(const char *text, size_t n) {
    char *copy = malloc(n ? n : 1);

    assert_non_null(copy);
    memcpy(copy, text, n);
    return copy;
}

/* `words` is the text with a bar between words. */
static void words_are(const struct unicode *unicode, const char *words) {
    char text[256];
    size_t n = 0, at = 0;
    char *copy;

    for (const char *s = words; *s; s++)
        if (*s != '|')
            text[n++] = *s;
    copy = exact(text, n);
    for (const char *s = words; at < n; s++) {
        size_t n_word = pretoken_next(unicode, copy + at, n - at), n_want = strcspn(s, "|");

        if (n_word != n_want)
            fail_msg("%s: a word of %zu bytes at %zu, not %zu", words, n_word, at, n_want);
        at += n_word;
        s += n_want;
        if (!*s)
            break;
    }
    assert_int_equal(at, n);
    free(copy);
}

static void words_are_those_of_the_pattern(void **state) {
    const struct unicode *u = &((struct fixture *)*state)->unicode;

    words_are(u, "Hello| world|!| It|'s|1|2|3");
    words_are(u, "we|'RE| I|'Ll| he|'D| x|'\xC5\xBF"); /* long s */
    words_are(u, "'r|'x| '|s");                        /* no contraction; the space takes the apostrophe first */
    words_are(u, "a| | b|  | c|   ");                  /* the last space belongs to the word */
    words_are(u, "a|\n\n| b| |\tc");                   /* newlines end with their last one */
    words_are(u, "a| \r\n \n|  | b");
}

static void white_space_gives_back_what_it_must(void **state) {
    const struct unicode *u = &((struct fixture *)*state)->unicode;

    words_are(u, "  |\tx");
    words_are(u, " \n|  | x");
    words_are(u, "\n|x");
    words_are(u, "!\r\n\r\n| x");
    words_are(u, " !\n|  ");
    words_are(u, " |1| |2");
    words_are(u, "\xE3\x80\x80x|\xE3\x80\x80|1"); /* ideographic space leads letters, not numbers */
    words_are(u, "\xC2\xA0|\xC2\xA0|!");          /* and other spaces lead no punctuation */
}

static void marks_join_letters(void **state) {
    const struct unicode *u = &((struct fixture *)*state)->unicode;

    words_are(u, "e\xCC\x81t| \xCC\x81\xCC\x82|1|\xCC\x81|1|!\xCC\x81|!");
    words_are(u, "\xE0\xA4\xB9\xE0\xA4\xBF\xE0\xA4\xA8\xE0\xA5\x8D\xE0\xA4\xA6\xE0\xA5\x80| |1");
    words_are(u, "\n|\xCC\x81x");
}

static void nfc_is(const struct unicode *unicode, const char *text, const char *want) {
    struct nfc nfc = {0};
    char *copy = exact(text, strlen(text));
    const char *out;
    size_t n;

    assert_int_equal(nfc_normalize(&nfc, unicode, copy, strlen(text), &out, &n), 0);
    if (n != strlen(want) || memcmp(out, want, n) != 0)
        fail_msg("%s: %.*s, not %s", text, (int)n, out, want);
    nfc_deinit(&nfc);
    free(copy);
}

static void nfc_composes_and_orders(void **state) {
    const struct unicode *u = &((struct fixture *)*state)->unicode;

    nfc_is(u, "", "");
    nfc_is(u, "plain \xC3\xA9", "plain \xC3\xA9");
    nfc_is(u, "ae\xCC\x81z", "a\xC3\xA9z");
    nfc_is(u, "\xCC\x81z", "\xCC\x81z");
    nfc_is(u, "q\xCC\x81\xCC\xA3", "q\xCC\xA3\xCC\x81");               /* ordered by class */
    nfc_is(u, "\xE2\x84\xAB", "\xC3\x85");                             /* a singleton */
    nfc_is(u, "\xE0\xA5\x98", "\xE0\xA4\x95\xE0\xA4\xBC");             /* an exclusion: stays apart */
    nfc_is(u, "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xEA\xB0\x81"); /* Hangul */
    nfc_is(u, "\xEA\xB0\x80\xE1\x86\xA8", "\xEA\xB0\x81");
    nfc_is(u, "\xEA\xB0\x80\xE1\x86\xA7", "\xEA\xB0\x80\xE1\x86\xA7"); /* U+11A7 is no final consonant */
    /* A mark of Unicode 14, which the reference's tables do not have: nothing moves across it. */
    nfc_is(u, "e\xE0\xA2\x98\xCC\x81", "e\xE0\xA2\x98\xCC\x81");
}

static void long_runs_of_marks_are_sorted_in_linear_time(void **state) {
    enum { N = 200000 };
    static const char pair[4] = {'\xCC', '\x81', '\xCC', '\xA3'};
    const struct unicode *u = &((struct fixture *)*state)->unicode;
    char *text = malloc(1 + 4 * N);
    struct nfc nfc = {0};
    const char *out;
    size_t n;

    assert_non_null(text);
    text[0] = 'q';
    for (int i = 0; i < N; i++)
        memcpy(text + 1 + 4 * i, pair, sizeof pair);
    assert_int_equal(nfc_normalize(&nfc, u, text, 1 + 4 * N, &out, &n), 0);
    assert_int_equal(n, 1 + 4 * N);
    for (int i = 0; i < N; i++) {
        assert_memory_equal(out + 1 + 2 * i, "\xCC\xA3", 2);
        assert_memory_equal(out + 1 + 2 * N + 2 * i, "\xCC\x81", 2);
    }
    nfc_deinit(&nfc);
    free(text);
}

/* What both ways to merge must equal: the definition, done slowly. */
static size_t merge_by_definition(const struct bpe *bpe, const int32_t (*merges)[3], int n_merges,
                                  const unsigned char *word, size_t n, int32_t *ids) {
    for (size_t i = 0; i < n; i++)
        ids[i] = bpe->byte_id[word[i]];
    for (;;) {
        int best = n_merges;
        size_t at = 0;

        for (size_t i = 0; i + 1 < n; i++)
            for (int m = 0; m < best; m++)
                if (merges[m][0] == ids[i] && merges[m][1] == ids[i + 1]) {
                    best = m;
                    at = i;
                }
        if (best == n_merges)
            return n;
        ids[at] = merges[best][2];
        memmove(ids + at + 1, ids + at + 2, (n - at - 2) * sizeof *ids);
        n--;
    }
}

static void merging_with_a_heap_equals_the_definition(void **state) {
    /* Tokens over a and b, in an order that makes pairs appear and vanish; ids 0, 1 are a, b. */
    static const int32_t merges[][3] = {{0, 0, 2}, {1, 0, 3}, {2, 2, 4}, {3, 1, 5},  {2, 0, 6},
                                        {4, 2, 7}, {0, 3, 8}, {5, 5, 9}, {4, 4, 10}, {8, 3, 11}};
    struct bpe_scratch scratch = {0};
    unsigned char word[300];
    int32_t got[300], want[300];
    struct bpe bpe;
    uint32_t seed = 1;

    (void)state;
    assert_int_equal(bpe_init(&bpe, ARRAY_LEN(merges)), 0);
    for (int i = 0; i < (int)ARRAY_LEN(merges); i++)
        assert_true(bpe_add(&bpe, merges[i][0], merges[i][1], merges[i][2]));
    for (int byte = 0; byte < 256; byte++)
        bpe.byte_id[byte] = byte == 'b';
    bpe_finish(&bpe);
    for (int round = 0; round < 600; round++) {
        size_t n = 1 + (size_t)round / 2, n_got, n_want;

        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525 + 1013904223;
            word[i] = seed >> 28 < 11 ? 'a' : 'b';
        }
        n_want = merge_by_definition(&bpe, merges, ARRAY_LEN(merges), word, n, want);
        assert_int_equal(bpe_encode(&bpe, &scratch, word, n, got, &n_got), 0);
        assert_int_equal(n_got, n_want);
        assert_memory_equal(got, want, n_want * sizeof *want);
    }
    bpe_scratch_deinit(&scratch);
    bpe_deinit(&bpe);
}

static void one_pair_has_one_merge(void **state) {
    struct bpe bpe;

    (void)state;
    assert_int_equal(bpe_init(&bpe, 2), 0);
    assert_true(bpe_add(&bpe, 1, 2, 3));
    assert_false(bpe_add(&bpe, 1, 2, 4));
    assert_true(bpe_add(&bpe, 2, 1, 4));
    bpe_deinit(&bpe);
    assert_int_equal(bpe_init(&bpe, 0), 0);
    bpe_deinit(&bpe);
}

static struct tokenizer_ids encode(const struct tokenizer *tokenizer, const char *text, size_t n, unsigned flags) {
    struct tokenizer_ids ids = {0};
    char *copy = exact(text, n);

    assert_int_equal(tokenizer_encode(tokenizer, copy, n, flags, &ids), 0);
    free(copy);
    return ids;
}

static void same_ids(const struct tokenizer *tokenizer, const char *a, const char *b) {
    struct tokenizer_ids left = encode(tokenizer, a, strlen(a), 0), right = encode(tokenizer, b, strlen(b), 0);

    assert_int_equal(left.n, right.n);
    assert_memory_equal(left.ids, right.ids, left.n * sizeof *left.ids);
    tokenizer_ids_deinit(&left);
    tokenizer_ids_deinit(&right);
}

static void decodes_to(const struct tokenizer *tokenizer, const struct tokenizer_ids *ids, unsigned flags,
                       const char *want) {
    struct tokenizer_text text = {0};

    assert_int_equal(tokenizer_decode(tokenizer, ids->ids, ids->n, flags, &text), 0);
    assert_int_equal(text.n, strlen(want));
    if (text.n > 0)
        assert_memory_equal(text.bytes, want, text.n);
    tokenizer_text_deinit(&text);
}

static void ill_formed_bytes_are_read_as_replacement_characters(void **state) {
    const struct tokenizer *t = ((struct fixture *)*state)->tiny;

#define FFFD "\xEF\xBF\xBD"
    same_ids(t, "a\x80z", "a" FFFD "z");
    same_ids(t, "\xE2\x82", FFFD);      /* cut short: one */
    same_ids(t, "\xE2\x82(", FFFD "("); /* a maximal subpart: one */
    same_ids(t, "\xF0\x90\x80 ", FFFD " ");
    same_ids(t, "\xED\xA0\x80", FFFD FFFD FFFD); /* a surrogate: no prefix of any character */
    same_ids(t, "\xC0\xAF", FFFD FFFD);
    same_ids(t, "\xF4\x90\x80\x80", FFFD FFFD FFFD FFFD);
    same_ids(t, "\xFF<|im_end|>\xFE", FFFD "<|im_end|>" FFFD);
}

static void markup_is_plain_text_unless_allowed(void **state) {
    const struct tokenizer *t = ((struct fixture *)*state)->tiny;
    const char text[] = "<|im_start|>a <think><thin</think>";
    int32_t start = tokenizer_find(t, "<|im_start|>"), think = tokenizer_find(t, "<think>");
    struct tokenizer_ids ids = encode(t, text, sizeof text - 1, TOKENIZER_MARKUP);

    assert_true(start >= 0 && think >= 0);
    assert_true(tokenizer_is_special(t, start));
    assert_false(tokenizer_is_special(t, think));
    assert_false(tokenizer_is_special(t, -1));
    assert_false(tokenizer_is_special(t, tokenizer_n_ids(t)));
    assert_int_equal(ids.ids[0], start);
    assert_int_equal(ids.ids[ids.n - 1], tokenizer_find(t, "</think>"));
    decodes_to(t, &ids, 0, text);
    decodes_to(t, &ids, TOKENIZER_SKIP_SPECIAL, text + strlen("<|im_start|>"));
    tokenizer_ids_deinit(&ids);

    ids = encode(t, text, sizeof text - 1, 0);
    for (size_t i = 0; i < ids.n; i++)
        assert_true(ids.ids[i] != start && ids.ids[i] != think);
    decodes_to(t, &ids, TOKENIZER_SKIP_SPECIAL, text);
    tokenizer_ids_deinit(&ids);
}

static void markup_counts_inside_the_marked_ranges_only(void **state) {
    const struct fixture *f = *state;
    static const char text[] = "<|im_start|>user\n<|im_end|>x<|im_end|>\n";
    size_t n = sizeof text - 1;
    const struct added_range all = {0, n}, turn[] = {{0, 17}, {28, n}}, bad[] = {{5, 3}}, outside[] = {{0, n + 1}};
    const struct added_range cut[] = {{0, 11}, {29, n}}; /* one byte short of either token */
    struct tokenizer_ids ids = {0}, plain = {0}, marked = {0};
    int32_t im_start = tokenizer_find(f->tiny, "<|im_start|>"), im_end = tokenizer_find(f->tiny, "<|im_end|>");
    int n_end = 0;

    /* no range: as plain text; one range over all: as text with markup */
    assert_int_equal(tokenizer_encode(f->tiny, text, n, 0, &plain), 0);
    assert_int_equal(tokenizer_encode_marked(f->tiny, text, n, NULL, 0, &ids), 0);
    assert_int_equal(ids.n, plain.n);
    assert_memory_equal(ids.ids, plain.ids, plain.n * sizeof *plain.ids);
    ids.n = 0;
    assert_int_equal(tokenizer_encode_marked(f->tiny, text, n, cut, 2, &ids), 0);
    assert_int_equal(ids.n, plain.n);
    ids.n = 0;
    assert_int_equal(tokenizer_encode(f->tiny, text, n, TOKENIZER_MARKUP, &marked), 0);
    assert_int_equal(tokenizer_encode_marked(f->tiny, text, n, &all, 1, &ids), 0);
    assert_int_equal(ids.n, marked.n);
    assert_memory_equal(ids.ids, marked.ids, marked.n * sizeof *marked.ids);

    /* the template's own turn markers are tokens, what the user spelled is not */
    ids.n = 0;
    assert_int_equal(tokenizer_encode_marked(f->tiny, text, n, turn, 2, &ids), 0);
    assert_int_equal(ids.ids[0], im_start);
    for (size_t i = 0; i < ids.n; i++)
        n_end += ids.ids[i] == im_end;
    assert_int_equal(n_end, 1);

    assert_int_equal(tokenizer_encode_marked(f->tiny, text, n, bad, 1, &ids), -EINVAL);
    assert_int_equal(tokenizer_encode_marked(f->tiny, text, n, outside, 1, &ids), -EINVAL);
    assert_int_equal(tokenizer_encode_marked(f->tiny, "a\xff", 2, &all, 0, &ids), -EINVAL);
    tokenizer_ids_deinit(&ids);
    tokenizer_ids_deinit(&plain);
    tokenizer_ids_deinit(&marked);
}

static void encoding_appends_and_has_a_limit(void **state) {
    const struct tokenizer *t = ((struct fixture *)*state)->tiny;
    struct tokenizer_ids ids = encode(t, "the", 3, 0);
    size_t n = ids.n;

    assert_int_equal(tokenizer_encode(t, "", 0, 0, &ids), 0);
    assert_int_equal(ids.n, n);
    assert_int_equal(tokenizer_encode(t, "the", 3, 0, &ids), 0);
    assert_int_equal(ids.n, 2 * n);
    assert_int_equal(ids.ids[0], ids.ids[n]);
    assert_int_equal(tokenizer_encode(t, "", (size_t)TOKENIZER_TEXT_BYTES_MAX + 1, 0, &ids), -E2BIG);
    assert_int_equal(ids.n, 2 * n);
    tokenizer_ids_deinit(&ids);
}

static void no_text_becomes_fewer_ids_than_said(void **state) {
    static const char *const texts[] = {"",
                                        "a",
                                        "\xE1\xBE\xBE\xCC\x88\xCC\x81",
                                        "<|endoftext|><|endoftext|><|im_start|>",
                                        "                                ",
                                        "the the the the"};
    const struct tokenizer *t = ((struct fixture *)*state)->tiny;

    for (size_t i = 0; i < ARRAY_LEN(texts); i++) {
        struct tokenizer_ids ids = encode(t, texts[i], strlen(texts[i]), TOKENIZER_MARKUP);

        assert_true(tokenizer_ids_min(t, strlen(texts[i])) <= ids.n);
        tokenizer_ids_deinit(&ids);
    }
    assert_int_equal(tokenizer_ids_min(t, 0), 0);
    assert_int_equal(tokenizer_ids_min(t, 1), 1);
    assert_true(tokenizer_ids_min(t, 1 << 20) > 1 << 10);
}

struct worker {
    const struct tokenizer *tokenizer;
    struct tokenizer_ids ids;
    int error;
};

static void *work(void *argument) {
    static const char text[] = "<|im_start|>user\nOne tokenizer, many threads: e\xCC\x81 123<|im_end|>\n";
    struct worker *worker = argument;

    for (int i = 0; i < 50 && worker->error == 0; i++)
        worker->error = tokenizer_encode(worker->tokenizer, text, sizeof text - 1, TOKENIZER_MARKUP, &worker->ids);
    return NULL;
}

static void threads_share_one_tokenizer(void **state) {
    struct worker workers[4] = {0};
    pthread_t threads[ARRAY_LEN(workers)];

    for (size_t i = 0; i < ARRAY_LEN(workers); i++) {
        workers[i].tokenizer = ((struct fixture *)*state)->tiny;
        assert_int_equal(pthread_create(&threads[i], NULL, work, &workers[i]), 0);
    }
    for (size_t i = 0; i < ARRAY_LEN(workers); i++) {
        assert_int_equal(pthread_join(threads[i], NULL), 0);
        assert_int_equal(workers[i].error, 0);
        assert_int_equal(workers[i].ids.n, workers[0].ids.n);
        assert_memory_equal(workers[i].ids.ids, workers[0].ids.ids, workers[0].ids.n * sizeof(int32_t));
    }
    for (size_t i = 0; i < ARRAY_LEN(workers); i++)
        tokenizer_ids_deinit(&workers[i].ids);
}

static void a_stream_never_shows_half_a_character(void **state) {
    const struct tokenizer *t = ((struct fixture *)*state)->tiny;
    const char text[] = "caf\xC3\xA9 \xE2\x82\xAC \xF0\x9F\x98\x80\xE0\xA4\xB9 end";
    struct tokenizer_ids ids = encode(t, text, sizeof text - 1, 0);
    struct tokenizer_stream stream = {0};
    struct tokenizer_text out = {0};

    for (size_t i = 0; i < ids.n; i++) {
        assert_int_equal(tokenizer_stream_feed(t, &stream, ids.ids[i], 0, &out), 0);
        for (size_t at = 0; at < out.n;) {
            uint32_t cp;
            int n_char = utf8_decode((const unsigned char *)out.bytes + at, out.n - at, &cp);

            assert_true(n_char > 0);
            at += (size_t)n_char;
        }
        assert_memory_equal(out.bytes, text, out.n);
    }
    assert_int_equal(tokenizer_stream_flush(&stream, &out), 0);
    assert_int_equal(out.n, sizeof text - 1);
    tokenizer_text_deinit(&out);
    tokenizer_ids_deinit(&ids);
}

/* Feeds single bytes and looks at what is shown after each. */
static void bad_bytes_show_as_soon_as_they_are_known(void **state) {
    static const struct {
        unsigned char byte;
        const char *shown;
    } steps[] = {
        {0xE2, ""},         {0x82, ""},        {'a', FFFD "a"}, {0x80, FFFD},
        {0xF0, ""},         {0x9F, ""},        {0x98, ""},      {0x80, "\xF0\x9F\x98\x80"},
        {0xED, ""},         {0xA0, FFFD FFFD}, {0xC3, ""},      {0xC3, FFFD},
        {0xA9, "\xC3\xA9"}, {0xE2, ""},
    };
    const struct tokenizer *t = ((struct fixture *)*state)->tiny;
    struct tokenizer_stream stream = {0};
    struct tokenizer_text out = {0};

    for (size_t i = 0; i < ARRAY_LEN(steps); i++) {
        int32_t id = -1;
        size_t n = 0;

        for (int32_t k = 0; id < 0; k++) {
            const char *bytes = tokenizer_bytes(t, k, &n);

            if (bytes && n == 1 && (unsigned char)*bytes == steps[i].byte)
                id = k;
        }
        out.n = 0;
        assert_int_equal(tokenizer_stream_feed(t, &stream, id, 0, &out), 0);
        assert_int_equal(out.n, strlen(steps[i].shown));
        assert_memory_equal(out.bytes, steps[i].shown, out.n);
    }
    out.n = 0;
    assert_int_equal(tokenizer_stream_flush(&stream, &out), 0);
    assert_int_equal(out.n, 3);
    assert_memory_equal(out.bytes, FFFD, 3);
    assert_int_equal(tokenizer_stream_flush(&stream, &out), 0);
    assert_int_equal(out.n, 3);
    tokenizer_text_deinit(&out);
}

/* ---- files ---- */

/* A small file with a place for each thing that can be wrong; NULL leaves the good text there. */
struct parts {
    const char *normalizer, *pattern, *pretokenizer, *decoder, *model, *added, *vocab, *merges, *top;
};

static char *make_file(const struct parts *p) {
    char vocab[8192], *file = NULL;
    size_t n = 0;
    int next = 256;

    for (int byte = 0; byte < 256; byte++) {
        bool is_printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);
        int cp = is_printable ? byte : next++;

        n += (size_t)sprintf(vocab + n, "\"\\u%04x\":%d,", (unsigned)cp, byte);
    }
    vocab[n - 1] = 0; /* the last comma */
    assert_true(asprintf(&file,
                         "{\"version\":\"1.0\",\"truncation\":null,\"padding\":null,%s\"added_tokens\":[%s],"
                         "\"normalizer\":%s,\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":"
                         "\"Split\",\"pattern\":{\"Regex\":\"%s\"},\"behavior\":\"Isolated\",\"invert\":false},%s]},"
                         "\"post_processor\":null,\"decoder\":%s,"
                         "\"model\":{\"type\":\"BPE\",%s\"vocab\":{%s%s},\"merges\":[%s]}}",
                         p->top ? p->top : "", p->added ? p->added : "",
                         p->normalizer ? p->normalizer : "{\"type\":\"NFC\"}",
                         p->pattern ? p->pattern
                                    : "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\\\r\\\\n\\\\p{L}\\\\p{N}]?[\\\\p{L}\\\\p{M}]+|"
                                      "\\\\p{N}| ?[^\\\\s\\\\p{L}\\\\p{M}\\\\p{N}]+[\\\\r\\\\n]*|\\\\s*[\\\\r\\\\n]+|"
                                      "\\\\s+(?!\\\\S)|\\\\s+",
                         p->pretokenizer ? p->pretokenizer
                                         : "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}",
                         p->decoder ? p->decoder : "{\"type\":\"ByteLevel\"}", p->model ? p->model : "", vocab,
                         p->vocab ? p->vocab : ",\"ab\":300,\"abc\":301",
                         p->merges ? p->merges : "[\"a\",\"b\"],\"ab c\"") > 0);
    return file;
}

static struct tokenizer *opened(const struct parts *parts) {
    struct tokenizer *tokenizer = NULL;
    struct report report;
    char *file = make_file(parts);

    if (tokenizer_open_text("t.json", file, strlen(file), &tokenizer, &report) != 0)
        fail_msg("%s", report.line);
    free(file);
    return tokenizer;
}

static void refused(const struct parts *parts, const char *why) {
    struct tokenizer *tokenizer = NULL;
    struct report report;
    char *file = make_file(parts);

    assert_int_equal(tokenizer_open_text("t.json", file, strlen(file), &tokenizer, &report), -EINVAL);
    assert_null(tokenizer);
    if (strncmp(report.line, "t.json: ", 8) != 0 || !strstr(report.line, why))
        fail_msg("\"%s\" does not say \"%s\"", report.line, why);
    free(file);
}

#define TOKEN(id, content, lstrip, rstrip, normalized, special)                                                        \
    "{\"id\":" id ",\"content\":\"" content "\",\"single_word\":false,\"lstrip\":" lstrip ",\"rstrip\":" rstrip        \
    ",\"normalized\":" normalized ",\"special\":" special "}"

static void a_small_file_opens(void **state) {
    static const int32_t want[] = {301, ' ', 300, 'd'};
    struct tokenizer *t = opened(&(struct parts){0});
    struct tokenizer_ids ids = encode(t, "abc abd", 7, 0);

    (void)state;
    assert_int_equal(tokenizer_n_ids(t), 302);
    assert_false(tokenizer_has_id(t, 299)); /* holes are allowed */
    assert_false(tokenizer_has_id(t, 302));
    assert_int_equal(ids.n, ARRAY_LEN(want));
    assert_memory_equal(ids.ids, want, sizeof want);
    assert_int_equal(tokenizer_find(t, "abc"), 301);
    assert_int_equal(tokenizer_find(t, "abcd"), -1);
    tokenizer_ids_deinit(&ids);
    tokenizer_free(t);
}

static void ignore_merges_takes_whole_words_but_no_special_ones(void **state) {
    struct tokenizer *t = opened(&(struct parts){.model = "\"ignore_merges\":true,",
                                                 .vocab = ",\"ab\":300,\"abc\":301,\"xyz\":302,\"!!\":303",
                                                 .added = TOKEN("303", "!!", "false", "false", "false", "true")});
    struct tokenizer_ids ids = encode(t, "xyz!!", 5, 0);

    (void)state;
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.ids[0], 302);
    assert_int_equal(ids.ids[1], '!');
    tokenizer_ids_deinit(&ids);
    ids = encode(t, "xyz!!", 5, TOKENIZER_MARKUP);
    assert_int_equal(ids.n, 2);
    assert_int_equal(ids.ids[1], 303);
    tokenizer_ids_deinit(&ids);
    tokenizer_free(t);
}

static void added_tokens_match_longest_and_may_swallow_space(void **state) {
    static const char text[] = "a <l> <ll>  <r> \xE3\x80\x80\nb e\xCC\x81!";
    static const int32_t want[] = {'a', 400, ' ', 401, ' ', ' ', 402, 'b', ' ', 403};
    struct tokenizer *t = opened(&(struct parts){.added = TOKEN("400", "<l>", "true", "false", "false", "false") "," //
                                                 TOKEN("401", "<ll>", "false", "false", "false", "false") ","        //
                                                 TOKEN("402", "<r>", "false", "true", "false", "true") ","           //
                                                 TOKEN("403", "\\u00e9!", "false", "false", "true", "false")});
    struct tokenizer_ids ids = encode(t, text, sizeof text - 1, TOKENIZER_MARKUP);

    (void)state;
    assert_int_equal(ids.n, ARRAY_LEN(want));
    assert_memory_equal(ids.ids, want, sizeof want);
    assert_int_equal(tokenizer_ids_min(t, 1 << 20), 1); /* white space of any length goes into one */
    tokenizer_ids_deinit(&ids);
    tokenizer_free(t);
}

static void files_of_another_kind_are_refused_by_name(void **state) {
    (void)state;
    refused(&(struct parts){.normalizer = "{\"type\":\"NFKC\"}"},
            "normalizer.type is not supported with this value: NFKC");
    refused(&(struct parts){.normalizer = "null"}, "normalizer is not supported");
    refused(&(struct parts){.pattern = "\\\\w+"}, "pattern.Regex is not supported with this value: \\\\w+");
    refused(&(struct parts){.pretokenizer = "{\"type\":\"Digits\"}"}, "pretokenizers[1].type");
    refused(&(struct parts){.pretokenizer = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"},
            "has no \"use_regex\"");
    refused(&(struct parts){.decoder = "{\"type\":\"WordPiece\"}"}, "decoder.type");
    refused(&(struct parts){.model = "\"byte_fallback\":true,"}, "model.byte_fallback");
    refused(&(struct parts){.model = "\"dropout\":0.1,"}, "model.dropout");
    refused(&(struct parts){.model = "\"colour\":1,"}, "model has the key \"colour\"");
    refused(&(struct parts){.model = "\"type\":\"BPE\","}, "the same key again");
    refused(&(struct parts){.top = "\"post\":1,"}, "the file has the key \"post\"");
    refused(&(struct parts){.added = "{\"id\":400,\"content\":\"x\",\"single_word\":true,\"lstrip\":false,"
                                     "\"rstrip\":false,\"normalized\":false,\"special\":true}"},
            "added_tokens[].single_word");
}

static void damaged_vocabularies_are_refused(void **state) {
    (void)state;
    refused(&(struct parts){.vocab = ",\"a\":300"}, "twice");
    refused(&(struct parts){.vocab = ",\"ab\":97"}, "two tokens of model.vocab have this id");
    refused(&(struct parts){.vocab = ",\"ab\":1048576"}, "not an integer below");
    refused(&(struct parts){.vocab = ",\"ab\":-1"}, "not an integer below");
    refused(&(struct parts){.vocab = ",\"\":300"}, "not 1 to");
    refused(&(struct parts){.merges = "[\"a\",\"x\"]"}, "not in model.vocab");
    refused(&(struct parts){.merges = "[\"a\",\"xx\"]"}, "not in model.vocab");
    refused(&(struct parts){.merges = "[\"a\",\"b\"],\"a b\""}, "there twice");
    refused(&(struct parts){.merges = "\"ab\""}, "neither");
    refused(&(struct parts){.merges = "\"a b c\""}, "cannot become");
    refused(&(struct parts){.merges = "[\"a\"]"}, "neither");
    refused(&(struct parts){.merges = "[\"a\",\"b\",\"c\"]"}, "neither");
    refused(&(struct parts){.merges = "7"}, "not what should be here");
    refused(&(struct parts){.added = TOKEN("97", "x!", "false", "false", "false", "true")}, "id of another token");
    refused(&(struct parts){.added = TOKEN("400", "ab", "false", "false", "false", "true")}, "another id");
    refused(&(struct parts){.added = TOKEN("300", "ab", "false", "false", "false", "true")},
            "special token out of plain");
    refused(&(struct parts){.added = TOKEN("97", "a", "false", "false", "false", "true")},
            "no plain token for byte 0x61");
    refused(&(struct parts){.added = TOKEN("400", "<x>", "false", "false", "false", "true") "," //
                            TOKEN("401", "<x>", "false", "false", "false", "true")},
            "twice");
}

static void a_file_cut_anywhere_is_refused(void **state) {
    char *file = make_file(&(struct parts){.added = TOKEN("400", "<x>", "true", "true", "true", "true")});
    size_t n = strlen(file);
    struct tokenizer *t;
    struct report report;

    (void)state;
    for (size_t cut = 0; cut < n; cut += cut < n - 300 ? 61 : 1) {
        char *copy = exact(file, cut);

        assert_int_equal(tokenizer_open_text("t.json", copy, cut, &t, &report), -EINVAL);
        free(copy);
    }
    free(file);
    assert_int_equal(tokenizer_open("/nowhere/tokenizer.json", &t, &report), -ENOENT);
    assert_string_equal(report.line, "/nowhere/tokenizer.json: No such file or directory");
    assert_int_equal(tokenizer_open("/dev/null", &t, &report), -EINVAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_are_those_of_the_pattern),
        cmocka_unit_test(white_space_gives_back_what_it_must),
        cmocka_unit_test(marks_join_letters),
        cmocka_unit_test(nfc_composes_and_orders),
        cmocka_unit_test(long_runs_of_marks_are_sorted_in_linear_time),
        cmocka_unit_test(merging_with_a_heap_equals_the_definition),
        cmocka_unit_test(one_pair_has_one_merge),
        cmocka_unit_test(ill_formed_bytes_are_read_as_replacement_characters),
        cmocka_unit_test(markup_is_plain_text_unless_allowed),
        cmocka_unit_test(markup_counts_inside_the_marked_ranges_only),
        cmocka_unit_test(encoding_appends_and_has_a_limit),
        cmocka_unit_test(no_text_becomes_fewer_ids_than_said),
        cmocka_unit_test(threads_share_one_tokenizer),
        cmocka_unit_test(a_stream_never_shows_half_a_character),
        cmocka_unit_test(bad_bytes_show_as_soon_as_they_are_known),
        cmocka_unit_test(a_small_file_opens),
        cmocka_unit_test(ignore_merges_takes_whole_words_but_no_special_ones),
        cmocka_unit_test(added_tokens_match_longest_and_may_swallow_space),
        cmocka_unit_test(files_of_another_kind_are_refused_by_name),
        cmocka_unit_test(damaged_vocabularies_are_refused),
        cmocka_unit_test(a_file_cut_anywhere_is_refused),
    };

    return cmocka_run_group_tests(tests, set_up, tear_down);
}
