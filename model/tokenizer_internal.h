/* What tokenizer.c and tokenizer_load.c share. */
#pragma once
#include "added.h"
#include "bpe.h"
#include "tokenizer.h"
#include "unicode.h"

enum {
    TOKEN_USED = 1,
    TOKEN_ADDED = 2,
    TOKEN_SPECIAL = 4,
    /* Its name has characters outside the byte alphabet: no text is ever cut into it, and it decodes to its name. */
    TOKEN_RAW = 8,
};

struct tokenizer {
    struct unicode unicode;
    struct bpe bpe;
    struct added raw;        /* added tokens looked for in the text as it is */
    struct added normalized; /* and those looked for after NFC; their contents are normalised too */
    bool ignore_merges;      /* a word that is a token is that token */
    int32_t n_ids;
    uint8_t *flags;   /* [n_ids] */
    uint32_t *start;  /* [n_ids] a token's bytes: bytes[start[id]..start[id] + length[id]) */
    uint32_t *length; /* [n_ids] */
    char *bytes;
    int32_t *words; /* the vocabulary by bytes: open addressing, -1: free */
    uint64_t word_mask;
    uint32_t length_max; /* of all tokens */
    bool swallows;       /* some added token takes white space of any length with it */
};

/* The id of the vocabulary's token with these bytes whose flags under `mask` are `flags`, or -1. *ret_place, if given, is
 * where it stands or would stand in `words`. */
int32_t tokenizer_lookup(const struct tokenizer *tokenizer, const char *bytes, size_t n, unsigned mask, unsigned flags,
                         uint64_t *ret_place);
