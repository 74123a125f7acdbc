/* tokenizer: text to token ids and back, as tokenizer.json of the Qwen3.5 kind says: NFC, one known pre-tokenizer pattern,
 * byte-level BPE, added tokens. Anything else in the file is refused: a near miss would give other ids in silence. Ids are
 * those of the `tokenizers` library. Read-only after open: any number of threads may use one. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct report;
struct tokenizer;
struct added_range; /* added.h: bytes [begin, end) */

enum {
    TOKENIZER_FILE_BYTES_MAX = 256 << 20,
    /* A word costs about 40 bytes of memory per byte while it is cut up, and nothing bounds a word but its text. */
    TOKENIZER_TEXT_BYTES_MAX = 32 << 20,
    TOKENIZER_TOKEN_BYTES_MAX = 64 << 10,
};

/* -EINVAL with a line: the file is damaged or of another kind; other negative errno with a line: it cannot be read. */
int tokenizer_open(const char *path, struct tokenizer **ret_tokenizer, struct report *report);
/* The same for a file already in memory; `path` is only named in the report. The text is not needed afterwards. */
int tokenizer_open_text(const char *path, const char *text, size_t n, struct tokenizer **ret_tokenizer,
                        struct report *report);
void tokenizer_free(struct tokenizer *tokenizer);

/* The highest id + 1. Ids below it may be unused. */
int32_t tokenizer_n_ids(const struct tokenizer *tokenizer);
bool tokenizer_has_id(const struct tokenizer *tokenizer, int32_t id);
/* A control token of the chat format, not shown to people. Added tokens such as <think> need not be special. */
bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id);
/* The token that stands for exactly this text, added or not, or -1. */
int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text);
/* The bytes of a token, which need not be whole characters; NULL for an unused id. */
const char *tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *ret_n);

/* The fewest ids that n bytes of text can become, whatever they are: to refuse a text without cutting it up. */
size_t tokenizer_ids_min(const struct tokenizer *tokenizer, size_t n);

/* Grows as needed; zero at first. The caller may give it memory of malloc beforehand. */
struct tokenizer_ids {
    int32_t *ids;
    size_t n, capacity;
};
void tokenizer_ids_deinit(struct tokenizer_ids *ids);

enum {
    TOKENIZER_MARKUP = 1,       /* encode: added tokens in the text are recognised; without it they are plain text, and
                                 * no text whatever becomes a special token */
    TOKENIZER_SKIP_SPECIAL = 2, /* decode: special tokens leave no text */
};

/* Appends the ids of n bytes of text. Ill-formed UTF-8 is read as U+FFFD, one for each maximal subpart (utf8.h). -E2BIG
 * above TOKENIZER_TEXT_BYTES_MAX, -ENOMEM; `ids` then holds what it held before. */
int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n, unsigned flags,
                     struct tokenizer_ids *ids);

/* The same for text of which only some ranges are markup, as a rendered chat: added tokens are recognised inside these
 * ranges only (ascending, not overlapping, inside the text); everything else is plain text, whatever it spells. The text
 * must be well-formed UTF-8: -EINVAL if not. */
int tokenizer_encode_marked(const struct tokenizer *tokenizer, const char *text, size_t n,
                            const struct added_range *ranges, size_t n_ranges, struct tokenizer_ids *ids);

struct tokenizer_text {
    char *bytes; /* not ended by a zero */
    size_t n, capacity;
};
void tokenizer_text_deinit(struct tokenizer_text *text);

/* Text of a growing token list. What comes out is always valid UTF-8: a character waits until its last byte is there;
 * bytes that can become none are U+FFFD as soon as that is known. Zero at first. */
struct tokenizer_stream {
    unsigned char waiting[4];
    uint8_t n_waiting;
};

/* Appends what one more token makes known. Unused ids add nothing. 0 or -ENOMEM: nothing was appended. */
int tokenizer_stream_feed(const struct tokenizer *tokenizer, struct tokenizer_stream *stream, int32_t id,
                          unsigned flags, struct tokenizer_text *text);
/* Ends the text: what still waits becomes one U+FFFD. */
int tokenizer_stream_flush(struct tokenizer_stream *stream, struct tokenizer_text *text);

/* Appends the whole text of n ids. */
int tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n, unsigned flags,
                     struct tokenizer_text *text);
