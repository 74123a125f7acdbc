/* tokenizer.json to a tokenizer. Everything in the file is either understood or refused. */
#include "tokenizer.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base.h"
#include "json.h"
#include "nfc.h"
#include "pretoken.h"
#include "report.h"
#include "tokenizer_internal.h"

enum {
    ALPHABET = 256 + 68,                            /* code points below it may stand for bytes */
    NAME_BYTES_MAX = 4 * TOKENIZER_TOKEN_BYTES_MAX, /* two names, in which a character of two bytes is one byte */
};

struct loader {
    const char *path;
    struct report *report;
    struct tokenizer *tokenizer;
    int16_t byte_of[ALPHABET]; /* the byte that a code point in a token's name stands for, or -1 */
    char *name;                /* [NAME_BYTES_MAX] */
    int32_t n_ids_max;
    size_t n_bytes, n_bytes_max;
};

/* ---- what a value may be ---- */

enum {
    IS_NULL = 1,
    IS_FALSE = 2,
    IS_TRUE = 4,
    IS_EMPTY = 8, /* "" */
    IS_STRING = 16,
    IS_NUMBER = 32,
    IS_OBJECT = 64,
    IS_ARRAY = 128,
    MAY_MISS = 256,
    IS_BOOL = IS_FALSE | IS_TRUE,
};

struct rule {
    const char *key;
    unsigned accepts;
    const char *text; /* IS_STRING: only this one, or NULL for any */
};

static bool is_accepted(const struct json_reader *r, const struct rule *rule) {
    switch (r->kind) {
    case JSON_NULL:
        return rule->accepts & IS_NULL;
    case JSON_FALSE:
        return rule->accepts & IS_FALSE;
    case JSON_TRUE:
        return rule->accepts & IS_TRUE;
    case JSON_NUMBER:
        return rule->accepts & IS_NUMBER;
    case JSON_OBJECT:
        return rule->accepts & IS_OBJECT;
    case JSON_ARRAY:
        return rule->accepts & IS_ARRAY;
    case JSON_STRING:
        return (rule->accepts & IS_EMPTY && r->string_bytes == 0) ||
               (rule->accepts & IS_STRING && (!rule->text || json_is(r, rule->text)));
    default:
        return false;
    }
}

/* Where the value whose first token was just read stands in the text, cut short for a message. */
static const char *value_text(const struct json_reader *r, int *ret_n) {
    size_t n = r->kind == JSON_STRING || r->kind == JSON_NUMBER ? r->token_bytes : 0;

    *ret_n = n > 80 ? 80 : (int)n;
    return n > 0 ? r->token : "";
}

/* r has just read the start of an object. Holds every key of it against the rules and leaves r at its end. ret_values,
 * if given, gets a reader standing on each value; of a missing one, of kind JSON_START. */
static int read_object(const struct loader *l, struct json_reader *r, const char *where, const struct rule *rules,
                       int n_rules, struct json_reader *ret_values) {
    const char *keys[16];
    uint64_t seen = 0;

    assert(n_rules <= (int)ARRAY_LEN(keys));
    for (int i = 0; i < n_rules; i++) {
        keys[i] = rules[i].key;
        if (ret_values)
            ret_values[i] = (struct json_reader){0};
    }
    while (json_next(r) == JSON_KEY) {
        int i = json_field(r, keys, n_rules, &seen);

        if (r->kind == JSON_ERROR)
            return json_refuse(r, l->path, l->report);
        if (i < 0) {
            int n = r->token_bytes > 80 ? 80 : (int)r->token_bytes;

            return report_error(l->report, -EINVAL, "%s: byte %zu: %s has the key \"%.*s\", which is not supported",
                                l->path, r->pos, where, n, r->token);
        }
        if (json_next(r) == JSON_ERROR)
            return json_refuse(r, l->path, l->report);
        if (!is_accepted(r, &rules[i])) {
            int n;
            const char *text = value_text(r, &n);

            return report_error(l->report, -EINVAL, "%s: byte %zu: %s.%s is not supported with this value%s%.*s",
                                l->path, r->pos, where, keys[i], n > 0 ? ": " : "", n, text);
        }
        if (ret_values)
            ret_values[i] = *r;
        if ((r->kind == JSON_OBJECT || r->kind == JSON_ARRAY) && json_leave(r) != 0)
            return json_refuse(r, l->path, l->report);
    }
    if (r->kind != JSON_OBJECT_END)
        return json_refuse(r, l->path, l->report);
    for (int i = 0; i < n_rules; i++)
        if (!(seen >> i & 1) && !(rules[i].accepts & MAY_MISS))
            return report_error(l->report, -EINVAL, "%s: %s has no \"%s\"", l->path, where, keys[i]);
    return 0;
}

/* Members of the container whose start was just read. The text below has been read once: it is sound. */
static size_t count_members(struct json_reader r) {
    size_t n = 0;
    int depth = r.depth;

    for (;;) {
        enum json_kind kind = json_next(&r);

        if (r.depth < depth || kind <= JSON_END)
            return n;
        n++;
        if (kind == JSON_KEY)
            json_skip(&r);
        else if (kind == JSON_OBJECT || kind == JSON_ARRAY)
            json_leave(&r);
    }
}

/* ---- names ---- */

/* The byte alphabet: printable bytes of Latin-1 stand for themselves, the others for U+0100 and up, in order. */
static void fill_alphabet(int16_t byte_of[ALPHABET]) {
    int next = 256;

    for (int i = 0; i < ALPHABET; i++)
        byte_of[i] = -1;
    for (int byte = 0; byte < 256; byte++) {
        bool is_printable = (byte > 0x20 && byte < 0x7F) || (byte > 0xA0 && byte != 0xAD);

        byte_of[is_printable ? byte : next++] = (int16_t)byte;
    }
    assert(next == ALPHABET);
}

/* Turns n bytes of a name into the bytes it stands for and writes them to `out`, which may be the name itself. False, and
 * nothing written, if a character is no byte's. */
static bool name_to_bytes(const struct loader *l, const char *name, size_t n, char *out, size_t *ret_n) {
    size_t n_out = 0;
    uint32_t cp = 0;

    for (size_t at = 0; at < n;) {
        at += (size_t)utf8_decode((const unsigned char *)name + at, n - at, &cp);
        if (cp >= ALPHABET || l->byte_of[cp] < 0)
            return false;
    }
    for (size_t at = 0; at < n;) {
        at += (size_t)utf8_decode((const unsigned char *)name + at, n - at, &cp);
        out[n_out++] = (char)l->byte_of[cp];
    }
    *ret_n = n_out;
    return true;
}

static int grow_ids(struct loader *l, int32_t n_ids) {
    struct tokenizer *t = l->tokenizer;
    int32_t max = max_int(n_ids, min_int(2 * l->n_ids_max, BPE_IDS_MAX));
    uint8_t *flags;
    uint32_t *start, *length;

    if (n_ids <= l->n_ids_max)
        return 0;
    flags = realloc(t->flags, (size_t)max);
    if (flags)
        t->flags = flags;
    start = realloc(t->start, (size_t)max * sizeof *start);
    if (start)
        t->start = start;
    length = realloc(t->length, (size_t)max * sizeof *length);
    if (length)
        t->length = length;
    if (!flags || !start || !length)
        return -ENOMEM;
    memset(flags + l->n_ids_max, 0, (size_t)(max - l->n_ids_max));
    l->n_ids_max = max;
    return 0;
}

/* A new token with n bytes, copied. */
static int put_token(struct loader *l, int32_t id, const char *bytes, size_t n, unsigned flags) {
    struct tokenizer *t = l->tokenizer;
    int r = grow_ids(l, id + 1);

    if (r != 0)
        return r;
    assert(!(t->flags[id] & TOKEN_USED));
    if (l->n_bytes_max - l->n_bytes < n) {
        size_t max = 2 * l->n_bytes_max + n + 65536;
        char *grown = realloc(t->bytes, max);

        if (!grown)
            return -ENOMEM;
        t->bytes = grown;
        l->n_bytes_max = max;
    }
    memcpy(t->bytes + l->n_bytes, bytes, n);
    t->start[id] = (uint32_t)l->n_bytes;
    t->length[id] = (uint32_t)n;
    if (t->length_max < t->length[id])
        t->length_max = t->length[id];
    t->flags[id] = (uint8_t)(TOKEN_USED | flags);
    l->n_bytes += n;
    t->n_ids = max_int(t->n_ids, id + 1);
    return 0;
}

/* The current string of r, unescaped into l->name and turned into bytes. */
static int read_name(const struct loader *l, const struct json_reader *r, size_t *ret_n, unsigned *ret_flags) {
    if (r->string_bytes == 0 || r->string_bytes > TOKENIZER_TOKEN_BYTES_MAX)
        return report_error(l->report, -EINVAL, "%s: byte %zu: a token has %zu bytes, not 1 to %d", l->path, r->pos,
                            r->string_bytes, TOKENIZER_TOKEN_BYTES_MAX);
    json_unescape(r, l->name);
    *ret_flags = 0;
    if (!name_to_bytes(l, l->name, r->string_bytes, l->name, ret_n)) {
        *ret_n = r->string_bytes;
        *ret_flags = TOKEN_RAW;
    }
    return 0;
}

/* ---- the parts of the file ---- */

static int load_vocab(struct loader *l, struct json_reader r) {
    struct tokenizer *t = l->tokenizer;
    size_t n_tokens = count_members(r);
    uint64_t n_words = 512;

    if (n_tokens > BPE_IDS_MAX)
        return report_error(l->report, -EINVAL, "%s: model.vocab has %zu tokens; at most %d are supported", l->path,
                            n_tokens, BPE_IDS_MAX);
    while (n_words < 2 * n_tokens)
        n_words *= 2;
    t->words = malloc(n_words * sizeof *t->words);
    if (!t->words)
        return -ENOMEM;
    memset(t->words, 0xFF, n_words * sizeof *t->words);
    t->word_mask = n_words - 1;
    while (json_next(&r) == JSON_KEY) {
        uint64_t id, place;
        unsigned flags;
        size_t n;
        int error = read_name(l, &r, &n, &flags);

        if (error != 0)
            return error;
        if (tokenizer_lookup(t, l->name, n, TOKEN_RAW, flags, &place) >= 0) {
            json_fail(&r, "a token is in model.vocab twice");
            break;
        }
        json_next(&r);
        if (!json_u64(&r, BPE_IDS_MAX - 1, &id)) {
            json_fail(&r, "a token's id is not an integer below 1048576");
            break;
        }
        if (tokenizer_has_id(t, (int32_t)id)) {
            json_fail(&r, "two tokens of model.vocab have this id");
            break;
        }
        error = put_token(l, (int32_t)id, l->name, n, flags);
        if (error != 0)
            return error;
        t->words[place] = (int32_t)id;
    }
    if (r.kind != JSON_OBJECT_END)
        return json_refuse(&r, l->path, l->report);
    return 0;
}

/* The token goes to its set; with `normalized`, as NFC leaves it. */
static int add_content(struct loader *l, struct added_token token, bool is_normalized) {
    struct tokenizer *t = l->tokenizer;
    struct nfc nfc = {0};
    const char *content = token.content;
    int r = 0;

    if (is_normalized)
        r = nfc_normalize(&nfc, &t->unicode, token.content, token.n_bytes, &content, &token.n_bytes);
    if (r == 0) {
        token.content = (char *)(uintptr_t)content; /* only copied */
        r = added_add(is_normalized ? &t->normalized : &t->raw, &token);
    }
    nfc_deinit(&nfc);
    return r;
}

static int load_added_token(struct loader *l, struct json_reader *r) {
    enum { ID, CONTENT, SINGLE_WORD, LSTRIP, RSTRIP, NORMALIZED, SPECIAL };
    static const struct rule rules[] = {
        [ID] = {"id", IS_NUMBER, NULL},
        [CONTENT] = {"content", IS_STRING, NULL},
        [SINGLE_WORD] = {"single_word", IS_FALSE, NULL}, /* would need the reference's idea of a word */
        [LSTRIP] = {"lstrip", IS_BOOL, NULL},
        [RSTRIP] = {"rstrip", IS_BOOL, NULL},
        [NORMALIZED] = {"normalized", IS_BOOL, NULL},
        [SPECIAL] = {"special", IS_BOOL, NULL},
    };
    struct json_reader values[ARRAY_LEN(rules)];
    struct tokenizer *t = l->tokenizer;
    struct added_token token;
    char content[ADDED_BYTES_MAX];
    unsigned raw;
    uint64_t id;
    int32_t known;
    size_t n;
    int error = read_object(l, r, "added_tokens[]", rules, ARRAY_LEN(rules), values);

    if (error != 0)
        return error;
    if (!json_u64(&values[ID], BPE_IDS_MAX - 1, &id)) {
        json_fail(&values[ID], "a token's id is not an integer below 1048576");
        return json_refuse(&values[ID], l->path, l->report);
    }
    if (values[CONTENT].string_bytes == 0 || values[CONTENT].string_bytes > ADDED_BYTES_MAX) {
        json_fail(&values[CONTENT], "an added token does not have 1 to 256 bytes");
        return json_refuse(&values[CONTENT], l->path, l->report);
    }
    json_unescape(&values[CONTENT], content);
    error = read_name(l, &values[CONTENT], &n, &raw);
    if (error != 0)
        return error;
    known = tokenizer_lookup(t, l->name, n, TOKEN_RAW, raw, NULL);
    if (known >= 0 ? known != (int32_t)id || (t->flags[known] & TOKEN_ADDED) : tokenizer_has_id(t, (int32_t)id)) {
        json_fail(&values[ID], known >= 0 ? "an added token is there twice or has another id than in model.vocab"
                                          : "an added token has the id of another token");
        return json_refuse(&values[ID], l->path, l->report);
    }
    if (known < 0)
        error = put_token(l, (int32_t)id, l->name, n, raw);
    if (error != 0)
        return error;
    t->flags[id] |= values[SPECIAL].kind == JSON_TRUE ? TOKEN_ADDED | TOKEN_SPECIAL : TOKEN_ADDED;
    token = (struct added_token){
        .content = content,
        .n_bytes = values[CONTENT].string_bytes,
        .id = (int32_t)id,
        .swallows_left = values[LSTRIP].kind == JSON_TRUE,
        .swallows_right = values[RSTRIP].kind == JSON_TRUE,
    };
    t->swallows |= token.swallows_left || token.swallows_right;
    return add_content(l, token, values[NORMALIZED].kind == JSON_TRUE);
}

static int load_added(struct loader *l, struct json_reader r) {
    struct tokenizer *t = l->tokenizer;
    size_t n_tokens = count_members(r);
    const struct added_token *twice;

    if (n_tokens > ADDED_TOKENS_MAX)
        return report_error(l->report, -EINVAL, "%s: added_tokens has %zu tokens; at most %d are supported", l->path,
                            n_tokens, ADDED_TOKENS_MAX);
    while (json_next(&r) == JSON_OBJECT) {
        int error = load_added_token(l, &r);

        if (error != 0)
            return error;
    }
    if (r.kind != JSON_ARRAY_END)
        return json_refuse(&r, l->path, l->report);
    twice = added_sort(&t->raw);
    if (!twice)
        twice = added_sort(&t->normalized);
    if (twice)
        return report_error(l->report, -EINVAL, "%s: added_tokens has a token twice: id %d", l->path, twice->id);
    return 0;
}

/* Reads one merge into l->name: the left token's bytes, then the right one's. The current token of r is its string or the
 * start of its pair. False: r says what is wrong. */
static bool read_merge(const struct loader *l, struct json_reader *r, size_t *ret_n_left, size_t *ret_n_right) {
    static const char wrong[] = "a merge is neither \"left right\" nor [\"left\", \"right\"]";
    const char *space;
    size_t n = r->string_bytes;

    if (r->kind == JSON_STRING && n <= NAME_BYTES_MAX) {
        json_unescape(r, l->name);
        space = memchr(l->name, ' ', n);
        if (space) {
            size_t n_name = (size_t)(space - l->name);

            /* The bytes of the left name fit into it, so that the right one is still whole behind them. */
            if (name_to_bytes(l, l->name, n_name, l->name, ret_n_left) &&
                name_to_bytes(l, space + 1, n - n_name - 1, l->name + *ret_n_left, ret_n_right))
                return true;
            json_fail(r, "a merge names a token that text cannot become");
            return false;
        }
    } else if (r->kind == JSON_ARRAY) {
        size_t n_bytes[2] = {0}, at = 0;

        for (int i = 0; i < 2; i++) {
            if (json_next(r) != JSON_STRING || r->string_bytes > NAME_BYTES_MAX / 2) {
                json_fail(r, wrong);
                return false;
            }
            json_unescape(r, l->name + at);
            if (!name_to_bytes(l, l->name + at, r->string_bytes, l->name + at, &n_bytes[i])) {
                json_fail(r, "a merge names a token that text cannot become");
                return false;
            }
            at += n_bytes[i];
        }
        *ret_n_left = n_bytes[0];
        *ret_n_right = n_bytes[1];
        if (json_next(r) == JSON_ARRAY_END)
            return true;
    }
    json_fail(r, wrong);
    return false;
}

static int load_merges(struct loader *l, struct json_reader r) {
    static const char version[] = "#version"; /* the reference passes over such a line of old merges files */
    struct tokenizer *t = l->tokenizer;
    size_t n_merges = count_members(r);
    int error;

    if (n_merges > BPE_MERGES_MAX)
        return report_error(l->report, -EINVAL, "%s: model.merges has %zu merges; at most %d are supported", l->path,
                            n_merges, BPE_MERGES_MAX);
    error = bpe_init(&t->bpe, (int32_t)n_merges);
    if (error != 0)
        return error;
    while (json_next(&r) == JSON_STRING || r.kind == JSON_ARRAY) {
        size_t n_left, n_right;
        int32_t left, right, merged;

        if (r.kind == JSON_STRING && r.token_bytes >= sizeof version - 1 &&
            memcmp(r.token, version, sizeof version - 1) == 0)
            continue;
        if (!read_merge(l, &r, &n_left, &n_right))
            break;
        left = tokenizer_lookup(t, l->name, n_left, TOKEN_RAW, 0, NULL);
        right = tokenizer_lookup(t, l->name + n_left, n_right, TOKEN_RAW, 0, NULL);
        merged = tokenizer_lookup(t, l->name, n_left + n_right, TOKEN_RAW, 0, NULL);
        if (left < 0 || right < 0 || merged < 0)
            json_fail(&r, "a merge names or makes a token that is not in model.vocab");
        else if (tokenizer_is_special(t, merged))
            json_fail(&r, "a merge makes a special token out of plain text");
        else if (!bpe_add(&t->bpe, left, right, merged))
            json_fail(&r, "this merge is there twice");
        if (r.kind == JSON_ERROR)
            break;
    }
    if (r.kind != JSON_ARRAY_END)
        return json_refuse(&r, l->path, l->report);
    for (int byte = 0; byte < 256; byte++) {
        char c = (char)byte;
        int32_t id = tokenizer_lookup(t, &c, 1, TOKEN_RAW, 0, NULL);

        if (id < 0 || tokenizer_is_special(t, id))
            return report_error(l->report, -EINVAL, "%s: model.vocab has no plain token for byte 0x%02X", l->path,
                                byte);
        t->bpe.byte_id[byte] = id;
    }
    bpe_finish(&t->bpe);
    return 0;
}

static int load_pretokenizer(const struct loader *l, struct json_reader *r) {
    static const struct rule sequence[] = {{"type", IS_STRING, "Sequence"}, {"pretokenizers", IS_ARRAY, NULL}};
    static const struct rule split[] = {
        {"type", IS_STRING, "Split"},
        {"pattern", IS_OBJECT, NULL},
        {"behavior", IS_STRING, "Isolated"},
        {"invert", IS_FALSE, NULL},
    };
    static const struct rule pattern[] = {{"Regex", IS_STRING, pretoken_pattern}};
    static const struct rule byte_level[] = {
        {"type", IS_STRING, "ByteLevel"},
        {"add_prefix_space", IS_FALSE, NULL},
        {"trim_offsets", IS_BOOL | MAY_MISS, NULL}, /* offsets are not our business */
        {"use_regex", IS_FALSE, NULL},
    };
    struct json_reader values[ARRAY_LEN(split)], list;
    int error = read_object(l, r, "pre_tokenizer", sequence, ARRAY_LEN(sequence), values);

    if (error != 0)
        return error;
    list = values[1];
    if (json_next(&list) != JSON_OBJECT)
        return json_refuse(&list, l->path, l->report);
    error = read_object(l, &list, "pre_tokenizer.pretokenizers[0]", split, ARRAY_LEN(split), values);
    if (error == 0)
        error = read_object(l, &values[1], "pre_tokenizer.pretokenizers[0].pattern", pattern, ARRAY_LEN(pattern), NULL);
    if (error != 0)
        return error;
    if (json_next(&list) != JSON_OBJECT)
        return json_refuse(&list, l->path, l->report);
    error = read_object(l, &list, "pre_tokenizer.pretokenizers[1]", byte_level, ARRAY_LEN(byte_level), NULL);
    if (error == 0 && json_next(&list) != JSON_ARRAY_END)
        error = json_refuse(&list, l->path, l->report);
    return error;
}

static int load_model(struct loader *l, struct json_reader *r, struct json_reader *ret_vocab,
                      struct json_reader *ret_merges) {
    enum { VOCAB, MERGES, IGNORE_MERGES };
    static const struct rule rules[] = {
        [VOCAB] = {"vocab", IS_OBJECT, NULL},
        [MERGES] = {"merges", IS_ARRAY, NULL},
        [IGNORE_MERGES] = {"ignore_merges", IS_BOOL | MAY_MISS, NULL},
        {"type", IS_STRING, "BPE"},
        {"dropout", IS_NULL | MAY_MISS, NULL},
        {"unk_token", IS_NULL | MAY_MISS, NULL},
        {"continuing_subword_prefix", IS_NULL | IS_EMPTY | MAY_MISS, NULL},
        {"end_of_word_suffix", IS_NULL | IS_EMPTY | MAY_MISS, NULL},
        {"fuse_unk", IS_BOOL | MAY_MISS, NULL}, /* there is no unknown token to fuse */
        {"byte_fallback", IS_FALSE | MAY_MISS, NULL},
    };
    struct json_reader values[ARRAY_LEN(rules)];
    int error = read_object(l, r, "model", rules, ARRAY_LEN(rules), values);

    if (error != 0)
        return error;
    l->tokenizer->ignore_merges = values[IGNORE_MERGES].kind == JSON_TRUE;
    *ret_vocab = values[VOCAB];
    *ret_merges = values[MERGES];
    return 0;
}

static int load(struct loader *l, const char *text, size_t n) {
    enum { MODEL, ADDED, NORMALIZER, PRETOKENIZER, POSTPROCESSOR, DECODER };
    static const struct rule rules[] = {
        [MODEL] = {"model", IS_OBJECT, NULL},
        [ADDED] = {"added_tokens", IS_ARRAY, NULL},
        [NORMALIZER] = {"normalizer", IS_OBJECT, NULL},
        [PRETOKENIZER] = {"pre_tokenizer", IS_OBJECT, NULL},
        [POSTPROCESSOR] = {"post_processor", IS_OBJECT | IS_NULL | MAY_MISS, NULL},
        [DECODER] = {"decoder", IS_OBJECT, NULL},
        {"version", IS_STRING, "1.0"},
        {"truncation", IS_NULL | MAY_MISS, NULL},
        {"padding", IS_NULL | MAY_MISS, NULL},
    };
    static const struct rule nfc[] = {{"type", IS_STRING, "NFC"}};
    static const struct rule byte_level[] = {
        {"type", IS_STRING, "ByteLevel"},
        /* As decoder and as post-processor it looks at none of these for text and ids. */
        {"add_prefix_space", IS_BOOL | MAY_MISS, NULL},
        {"trim_offsets", IS_BOOL | MAY_MISS, NULL},
        {"use_regex", IS_BOOL | MAY_MISS, NULL},
    };
    struct json_reader r, values[ARRAY_LEN(rules)], vocab, merges;
    int error;

    json_init(&r, text, n);
    if (json_next(&r) != JSON_OBJECT)
        return json_refuse(&r, l->path, l->report);
    error = read_object(l, &r, "the file", rules, ARRAY_LEN(rules), values);
    if (error == 0 && json_next(&r) != JSON_END)
        error = json_refuse(&r, l->path, l->report);
    /* The kind of file first, so that a file of another kind is told so. */
    if (error == 0)
        error = load_model(l, &values[MODEL], &vocab, &merges);
    if (error == 0)
        error = read_object(l, &values[NORMALIZER], "normalizer", nfc, ARRAY_LEN(nfc), NULL);
    if (error == 0)
        error = load_pretokenizer(l, &values[PRETOKENIZER]);
    if (error == 0)
        error = read_object(l, &values[DECODER], "decoder", byte_level, ARRAY_LEN(byte_level), NULL);
    if (error == 0 && values[POSTPROCESSOR].kind == JSON_OBJECT)
        error = read_object(l, &values[POSTPROCESSOR], "post_processor", byte_level, ARRAY_LEN(byte_level), NULL);
    if (error == 0)
        error = load_vocab(l, vocab);
    if (error == 0) /* takes longer than to refuse a file, and only NFC of added tokens needs it here */
        error = unicode_init(&l->tokenizer->unicode, l->report);
    if (error == 0)
        error = load_added(l, values[ADDED]);
    if (error == 0)
        error = load_merges(l, merges);
    return error;
}

int tokenizer_open_text(const char *path, const char *text, size_t n, struct tokenizer **ret_tokenizer,
                        struct report *report) {
    struct loader l = {.path = path, .report = report};
    int r;

    if (n > TOKENIZER_FILE_BYTES_MAX)
        return report_error(report, -EINVAL, "%s: larger than %d MiB", path, TOKENIZER_FILE_BYTES_MAX >> 20);
    report->line[0] = 0;
    fill_alphabet(l.byte_of);
    l.name = malloc(NAME_BYTES_MAX);
    l.tokenizer = calloc(1, sizeof *l.tokenizer);
    r = l.name && l.tokenizer ? load(&l, text, n) : -ENOMEM;
    if (r == -ENOMEM)
        report_error(report, r, "%s: no memory for the tokenizer", path);
    free(l.name);
    if (r != 0) {
        tokenizer_free(l.tokenizer);
        return r;
    }
    *ret_tokenizer = l.tokenizer;
    return 0;
}

static int read_all(int fd, const char *path, char **ret_text, size_t *ret_n, struct report *report) {
    struct stat stat;
    size_t n = 0;
    char *text;

    if (fstat(fd, &stat) != 0)
        return report_error(report, -errno, "%s: %s", path, strerror(errno));
    if (!S_ISREG(stat.st_mode) || stat.st_size > TOKENIZER_FILE_BYTES_MAX)
        return report_error(report, -EINVAL, "%s: not a file of at most %d MiB", path, TOKENIZER_FILE_BYTES_MAX >> 20);
    text = malloc((size_t)stat.st_size + 1);
    if (!text)
        return report_error(report, -ENOMEM, "%s: no memory to read it", path);
    while (n < (size_t)stat.st_size) {
        ssize_t got = read(fd, text + n, (size_t)stat.st_size - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0) {
            int error = errno;

            free(text);
            return report_error(report, -error, "%s: %s", path, strerror(error));
        }
        if (got == 0) /* it has become shorter; the reader will say where it ends */
            break;
        n += (size_t)got;
    }
    *ret_text = text;
    *ret_n = n;
    return 0;
}

int tokenizer_open(const char *path, struct tokenizer **ret_tokenizer, struct report *report) {
    int fd = open(path, O_RDONLY | O_CLOEXEC), r;
    char *text = NULL;
    size_t n = 0;

    if (fd < 0)
        return report_error(report, -errno, "%s: %s", path, strerror(errno));
    r = read_all(fd, path, &text, &n, report);
    close(fd);
    if (r == 0)
        r = tokenizer_open_text(path, text, n, ret_tokenizer, report);
    free(text);
    return r;
}
