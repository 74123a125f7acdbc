/* nfc: canonical composition as the reference does it. Text that needs no change is not copied. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "unicode.h"

enum {
    NFC_GROWTH_MAX = 3,  /* NFC makes UTF-8 at most this many times longer */
    NFC_SHRINKS_MAX = 4, /* and shorter; the most there is are the 7 bytes of U+1FBE U+0308 U+0301, which become 2 */
};

/* Buffers of one caller, zero at first. */
struct nfc {
    char *out; /* the normalised text */
    size_t n, capacity;
    int32_t *cps, *sorted; /* one run of characters that touch each other; room to sort its marks */
    size_t cps_max, sorted_max;
};

void nfc_deinit(struct nfc *nfc);

/* Normalises n bytes of valid UTF-8. The result is `text` itself or stands in `nfc` until the next call. 0 or -ENOMEM. */
int nfc_normalize(struct nfc *nfc, const struct unicode *unicode, const char *text, size_t n, const char **ret_text,
                  size_t *ret_n);
