#include "tokenizer.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"
#include "nfc.h"
#include "pretoken.h"
#include "tokenizer_internal.h"

/* Words seen before in the same call and their ids. Most of any text is made of few words. */
enum { MEMO_WORD_BYTES = 26, MEMO_IDS = 4, MEMO_WORDS_MAX = 16384 };

struct memo {
    uint32_t hash;
    uint8_t n_bytes, n_ids; /* n_bytes 0: free */
    char word[MEMO_WORD_BYTES];
    int32_t ids[MEMO_IDS];
};

/* What one call of tokenizer_encode() needs beside the tokenizer. */
struct encoder {
    const struct tokenizer *tokenizer;
    struct tokenizer_ids *ids;
    struct nfc nfc;
    struct bpe_scratch bpe;
    struct memo *memo;
    uint32_t memo_mask;
    bool markup;
};

static const char replacement[3] = "\xEF\xBF\xBD"; /* U+FFFD */

static uint64_t hash_of(const char *bytes, size_t n) {
    uint64_t hash = n * UINT64_C(0x9E3779B97F4A7C15), part;

    for (; n >= 8; n -= 8, bytes += 8) {
        memcpy(&part, bytes, 8);
        hash = (hash ^ part) * UINT64_C(0xD6E8FEB86659FD93);
        hash ^= hash >> 32;
    }
    part = 0;
    for (size_t i = 0; i < n; i++)
        part |= (uint64_t)(unsigned char)bytes[i] << 8 * i;
    hash = (hash ^ part) * UINT64_C(0xD6E8FEB86659FD93);
    return hash ^ hash >> 32;
}

int32_t tokenizer_lookup(const struct tokenizer *tokenizer, const char *bytes, size_t n, unsigned mask, unsigned flags,
                         uint64_t *ret_place) {
    uint64_t at = hash_of(bytes, n) & tokenizer->word_mask;
    int32_t id;

    for (; (id = tokenizer->words[at]) >= 0; at = (at + 1) & tokenizer->word_mask)
        if (tokenizer->length[id] == n && (tokenizer->flags[id] & mask) == flags &&
            memcmp(tokenizer->bytes + tokenizer->start[id], bytes, n) == 0)
            break;
    if (ret_place)
        *ret_place = at;
    return id;
}

/* A token that plain text may become: any of the vocabulary but a special one. */
static int32_t plain_word(const struct tokenizer *tokenizer, const char *bytes, size_t n) {
    return tokenizer_lookup(tokenizer, bytes, n, TOKEN_RAW | TOKEN_SPECIAL, 0, NULL);
}

void tokenizer_free(struct tokenizer *tokenizer) {
    if (!tokenizer)
        return;
    unicode_deinit(&tokenizer->unicode);
    bpe_deinit(&tokenizer->bpe);
    added_deinit(&tokenizer->raw);
    added_deinit(&tokenizer->normalized);
    free(tokenizer->flags);
    free(tokenizer->start);
    free(tokenizer->length);
    free(tokenizer->bytes);
    free(tokenizer->words);
    free(tokenizer);
}

int32_t tokenizer_n_ids(const struct tokenizer *tokenizer) {
    return tokenizer->n_ids;
}

static bool has_flag(const struct tokenizer *tokenizer, int32_t id, unsigned flag) {
    return id >= 0 && id < tokenizer->n_ids && (tokenizer->flags[id] & flag);
}

bool tokenizer_has_id(const struct tokenizer *tokenizer, int32_t id) {
    return has_flag(tokenizer, id, TOKEN_USED);
}

bool tokenizer_is_special(const struct tokenizer *tokenizer, int32_t id) {
    return has_flag(tokenizer, id, TOKEN_SPECIAL);
}

const char *tokenizer_bytes(const struct tokenizer *tokenizer, int32_t id, size_t *ret_n) {
    if (!has_flag(tokenizer, id, TOKEN_USED))
        return NULL;
    *ret_n = tokenizer->length[id];
    return tokenizer->bytes + tokenizer->start[id];
}

int32_t tokenizer_find(const struct tokenizer *tokenizer, const char *text) {
    const struct added *sets[] = {&tokenizer->raw, &tokenizer->normalized};
    size_t n = strlen(text);

    for (size_t k = 0; k < ARRAY_LEN(sets); k++)
        for (int i = 0; i < sets[k]->n_tokens; i++)
            if (sets[k]->tokens[i].n_bytes == n && memcmp(sets[k]->tokens[i].content, text, n) == 0)
                return sets[k]->tokens[i].id;
    return plain_word(tokenizer, text, n);
}

size_t tokenizer_ids_min(const struct tokenizer *tokenizer, size_t n) {
    size_t bytes_max = (size_t)NFC_SHRINKS_MAX * tokenizer->length_max;

    if (tokenizer->swallows)
        return n > 0;
    return n / bytes_max + (n % bytes_max > 0);
}

void tokenizer_ids_deinit(struct tokenizer_ids *ids) {
    free(ids->ids);
    *ids = (struct tokenizer_ids){0};
}

static int reserve_ids(struct tokenizer_ids *ids, size_t n) {
    size_t capacity = ids->n + ids->n / 2 + n + 64;
    int32_t *grown;

    if (ids->capacity - ids->n >= n)
        return 0;
    grown = realloc(ids->ids, capacity * sizeof *grown);
    if (!grown)
        return -ENOMEM;
    ids->ids = grown;
    ids->capacity = capacity;
    return 0;
}

static struct memo *memo_of(struct encoder *encoder, const char *word, size_t n, uint32_t *ret_hash) {
    if (n > MEMO_WORD_BYTES)
        return NULL;
    *ret_hash = (uint32_t)hash_of(word, n);
    return &encoder->memo[*ret_hash & encoder->memo_mask];
}

static int encode_word(struct encoder *encoder, const char *word, size_t n) {
    struct tokenizer_ids *ids = encoder->ids;
    uint32_t hash = 0;
    struct memo *memo = memo_of(encoder, word, n, &hash);
    int32_t *out;
    size_t n_ids;
    int r = reserve_ids(ids, n);

    if (r != 0)
        return r;
    out = ids->ids + ids->n;
    if (memo && memo->hash == hash && memo->n_bytes == n && memcmp(memo->word, word, n) == 0) {
        memcpy(out, memo->ids, memo->n_ids * sizeof *out);
        ids->n += memo->n_ids;
        return 0;
    }
    if (encoder->tokenizer->ignore_merges && (*out = plain_word(encoder->tokenizer, word, n)) >= 0) {
        ids->n++;
        return 0;
    }
    r = bpe_encode(&encoder->tokenizer->bpe, &encoder->bpe, (const unsigned char *)word, n, out, &n_ids);
    if (r != 0)
        return r;
    ids->n += n_ids;
    if (memo && n_ids <= MEMO_IDS) {
        memo->hash = hash;
        memo->n_bytes = (uint8_t)n;
        memo->n_ids = (uint8_t)n_ids;
        memcpy(memo->word, word, n);
        memcpy(memo->ids, out, n_ids * sizeof *out);
    }
    return 0;
}

/* Normalised text without added tokens. */
static int encode_plain(struct encoder *encoder, const char *text, size_t n) {
    int r = 0;

    for (size_t at = 0; at < n && r == 0;) {
        size_t n_word = pretoken_next(&encoder->tokenizer->unicode, text + at, n - at);

        r = encode_word(encoder, text + at, n_word);
        at += n_word;
    }
    return r;
}

static int encode_token(struct encoder *encoder, int32_t id) {
    int r = reserve_ids(encoder->ids, 1);

    if (r == 0)
        encoder->ids->ids[encoder->ids->n++] = id;
    return r;
}

/* Text between added tokens that are looked for before NFC. */
static int encode_raw(struct encoder *encoder, const char *text, size_t n) {
    const struct tokenizer *tokenizer = encoder->tokenizer;
    struct added_walk walk = {0};
    struct added_piece piece;
    int r = nfc_normalize(&encoder->nfc, &tokenizer->unicode, text, n, &walk.text, &walk.n);

    if (r != 0)
        return r;
    if (!encoder->markup)
        return encode_plain(encoder, walk.text, walk.n);
    while (r == 0 && added_next(&tokenizer->normalized, &tokenizer->unicode, &walk, &piece))
        r = piece.token ? encode_token(encoder, piece.token->id)
                        : encode_plain(encoder, walk.text + piece.start, piece.end - piece.start);
    return r;
}

/* Where the text stops being valid UTF-8. */
static size_t valid_bytes(const char *text, size_t n) {
    size_t at = 0;

    while (at < n) {
        uint64_t eight;
        uint32_t cp;
        int n_char;

        if (n - at >= 8 && (memcpy(&eight, text + at, 8), (eight & UINT64_C(0x8080808080808080)) == 0)) {
            at += 8;
            continue;
        }
        n_char = utf8_decode((const unsigned char *)text + at, n - at, &cp);
        if (n_char <= 0)
            return at;
        at += (size_t)n_char;
    }
    return at;
}

/* Copies n > 0 bytes with U+FFFD in the place of what is ill-formed. `out` has room for 3 n. */
static size_t repair(const char *text, size_t n, char *out) {
    size_t at = 0, n_out = 0;

    while (at < n) {
        uint32_t cp;
        int n_char = utf8_decode((const unsigned char *)text + at, n - at, &cp);

        if (n_char > 0) {
            memcpy(out + n_out, text + at, (size_t)n_char);
            n_out += (size_t)n_char;
            at += (size_t)n_char;
        } else {
            memcpy(out + n_out, replacement, sizeof replacement);
            n_out += sizeof replacement;
            at += n_char < 0 ? (size_t)-n_char : n - at;
        }
    }
    return n_out;
}

/* The walk says where the text lies and where markup may be. */
static int encode_walk(const struct tokenizer *tokenizer, struct added_walk *walk, bool markup,
                       struct tokenizer_ids *ids) {
    struct encoder encoder = {.tokenizer = tokenizer, .ids = ids, .markup = markup};
    struct added_piece piece;
    size_t n_before = ids->n, n_memo = 16;
    int r = 0;

    while (n_memo < MEMO_WORDS_MAX && n_memo < walk->n / 4) /* a short text need not pay for clearing a large table */
        n_memo *= 2;
    encoder.memo = calloc(n_memo, sizeof *encoder.memo);
    encoder.memo_mask = (uint32_t)n_memo - 1;
    if (!encoder.memo)
        return -ENOMEM;
    if (!markup)
        r = encode_raw(&encoder, walk->text, walk->n);
    else
        while (r == 0 && added_next(&tokenizer->raw, &tokenizer->unicode, walk, &piece))
            r = piece.token ? encode_token(&encoder, piece.token->id)
                            : encode_raw(&encoder, walk->text + piece.start, piece.end - piece.start);
    if (r != 0)
        ids->n = n_before;
    free(encoder.memo);
    nfc_deinit(&encoder.nfc);
    bpe_scratch_deinit(&encoder.bpe);
    return r;
}

int tokenizer_encode(const struct tokenizer *tokenizer, const char *text, size_t n, unsigned flags,
                     struct tokenizer_ids *ids) {
    struct added_walk walk = {.text = text, .n = n};
    char *repaired = NULL;
    int r;

    if (n > TOKENIZER_TEXT_BYTES_MAX)
        return -E2BIG;
    if (n == 0)
        return 0;
    if (valid_bytes(text, n) < n) {
        repaired = malloc(3 * n);
        if (!repaired)
            return -ENOMEM;
        walk.text = repaired;
        walk.n = repair(text, n, repaired);
    }
    r = encode_walk(tokenizer, &walk, flags & TOKENIZER_MARKUP, ids);
    free(repaired);
    return r;
}

int tokenizer_encode_marked(const struct tokenizer *tokenizer, const char *text, size_t n,
                            const struct added_range *ranges, size_t n_ranges, struct tokenizer_ids *ids) {
    static const struct added_range nowhere[1];
    struct added_walk walk = {.text = text, .n = n, .ranges = n_ranges ? ranges : nowhere, .n_ranges = n_ranges};
    size_t at = 0;

    if (n > TOKENIZER_TEXT_BYTES_MAX)
        return -E2BIG;
    for (size_t i = 0; i < n_ranges; at = ranges[i++].end)
        if (ranges[i].begin < at || ranges[i].end < ranges[i].begin || ranges[i].end > n)
            return -EINVAL;
    if (valid_bytes(text, n) < n)
        return -EINVAL;
    return n == 0 ? 0 : encode_walk(tokenizer, &walk, true, ids);
}

void tokenizer_text_deinit(struct tokenizer_text *text) {
    free(text->bytes);
    *text = (struct tokenizer_text){0};
}

static int reserve_text(struct tokenizer_text *text, size_t n) {
    size_t capacity = text->n + text->n / 2 + n + 64;
    char *grown;

    if (text->capacity - text->n >= n)
        return 0;
    grown = realloc(text->bytes, capacity);
    if (!grown)
        return -ENOMEM;
    text->bytes = grown;
    text->capacity = capacity;
    return 0;
}

static void put(struct tokenizer_text *text, const void *bytes, size_t n) {
    memcpy(text->bytes + text->n, bytes, n);
    text->n += n;
}

static int feed_bytes(struct tokenizer_stream *stream, const char *bytes, size_t n, struct tokenizer_text *text) {
    int r = reserve_text(text, 3 * (n + stream->n_waiting));
    size_t at = 0;

    if (r != 0)
        return r;
    while (at < n || stream->n_waiting > 0) {
        const unsigned char *next = (const unsigned char *)bytes + at;
        uint32_t cp;
        int n_char;

        if (stream->n_waiting == 0) { /* the common case: straight from the token */
            n_char = utf8_decode(next, n - at, &cp);
            if (n_char > 0) {
                put(text, next, (size_t)n_char);
                at += (size_t)n_char;
                continue;
            }
        } else {
            n_char = utf8_decode(stream->waiting, stream->n_waiting, &cp);
        }
        if (n_char == 0 && at < n && stream->n_waiting < sizeof stream->waiting) {
            stream->waiting[stream->n_waiting++] = *next;
            at++;
            continue;
        }
        if (n_char == 0)
            return 0;
        if (n_char > 0) {
            put(text, stream->waiting, (size_t)n_char);
            stream->n_waiting = 0;
        } else if (stream->n_waiting == 0) {
            put(text, replacement, sizeof replacement);
            at += (size_t)-n_char;
        } else { /* what was bad is dropped; the byte that showed it begins anew */
            put(text, replacement, sizeof replacement);
            stream->n_waiting = (uint8_t)(stream->n_waiting + n_char);
            memmove(stream->waiting, stream->waiting - n_char, stream->n_waiting);
        }
    }
    return 0;
}

int tokenizer_stream_feed(const struct tokenizer *tokenizer, struct tokenizer_stream *stream, int32_t id,
                          unsigned flags, struct tokenizer_text *text) {
    size_t n;
    const char *bytes = tokenizer_bytes(tokenizer, id, &n);

    if (!bytes || ((flags & TOKENIZER_SKIP_SPECIAL) && tokenizer_is_special(tokenizer, id)))
        return 0;
    return feed_bytes(stream, bytes, n, text);
}

int tokenizer_stream_flush(struct tokenizer_stream *stream, struct tokenizer_text *text) {
    int r = 0;

    if (stream->n_waiting > 0) {
        r = reserve_text(text, sizeof replacement);
        if (r == 0)
            put(text, replacement, sizeof replacement);
    }
    if (r == 0)
        stream->n_waiting = 0;
    return r;
}

int tokenizer_decode(const struct tokenizer *tokenizer, const int32_t *ids, size_t n, unsigned flags,
                     struct tokenizer_text *text) {
    struct tokenizer_stream stream = {0};
    size_t n_before = text->n;
    int r = 0;

    for (size_t i = 0; i < n && r == 0; i++)
        r = tokenizer_stream_feed(tokenizer, &stream, ids[i], flags, text);
    if (r == 0)
        r = tokenizer_stream_flush(&stream, text);
    if (r != 0)
        text->n = n_before;
    return r;
}
