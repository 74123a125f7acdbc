/* Prints what the tokenizer makes of a file, for test_tokenizer_reference.py to hold against the reference.
 *
 *   tokenize_dump TOKENIZER_JSON encode|markup FILE
 *   tokenize_dump TOKENIZER_JSON decode|decode-shown FILE
 *
 * FILE is a list of records, each its length as u32 and that many bytes (decode: that many bytes of i32 ids). So is the
 * output: ids as i32, or text. Little endian, as this machine. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "tokenizer.h"

static void put_record(const void *bytes, size_t n) {
    uint32_t n_bytes = (uint32_t)n;

    fwrite(&n_bytes, sizeof n_bytes, 1, stdout);
    fwrite(bytes, 1, n, stdout);
}

static int encode(const struct tokenizer *tokenizer, const char *record, size_t n, unsigned flags) {
    struct tokenizer_ids ids = {0};
    int r = tokenizer_encode(tokenizer, record, n, flags, &ids);

    if (r == 0)
        put_record(ids.ids, ids.n * sizeof *ids.ids);
    tokenizer_ids_deinit(&ids);
    return r;
}

static int decode(const struct tokenizer *tokenizer, const char *record, size_t n, unsigned flags) {
    struct tokenizer_text text = {0};
    int32_t *ids = malloc(n + 1);
    int r = -1;

    if (ids) {
        memcpy(ids, record, n);
        r = tokenizer_decode(tokenizer, ids, n / sizeof *ids, flags, &text);
    }
    if (r == 0)
        put_record(text.bytes, text.n);
    free(ids);
    tokenizer_text_deinit(&text);
    return r;
}

int main(int argc, char **argv) {
    struct tokenizer *tokenizer;
    struct report report;
    uint32_t n;
    FILE *file;

    if (argc != 4) {
        fprintf(stderr, "usage: %s TOKENIZER_JSON encode|markup|decode|decode-shown FILE\n", argv[0]);
        return 2;
    }
    if (tokenizer_open(argv[1], &tokenizer, &report) != 0) {
        fprintf(stderr, "%s\n", report.line);
        return 1;
    }
    file = fopen(argv[3], "rb");
    if (!file) {
        perror(argv[3]);
        return 1;
    }
    while (fread(&n, sizeof n, 1, file) == 1) {
        char *record = malloc((size_t)n + 1);
        int r = -1;

        if (record && fread(record, 1, n, file) == n) {
            if (argv[2][0] == 'd')
                r = decode(tokenizer, record, n, argv[2][6] ? TOKENIZER_SKIP_SPECIAL : 0);
            else
                r = encode(tokenizer, record, n, argv[2][0] == 'm' ? TOKENIZER_MARKUP : 0);
        }
        free(record);
        if (r != 0) {
            fprintf(stderr, "%s: record not done: %d\n", argv[3], r);
            return 1;
        }
    }
    fclose(file);
    tokenizer_free(tokenizer);
    return 0;
}
