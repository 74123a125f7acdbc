/* Any bytes as tokenizer.json: refused with a line, or a tokenizer that turns text into ids and back. The bytes serve as
 * text too. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "tokenizer.h"
#include "utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

#define CHECK(fact)                                                                                                    \
    do {                                                                                                               \
        if (!(fact))                                                                                                   \
            abort();                                                                                                   \
    } while (0)

static void check_text(const struct tokenizer *tokenizer, const char *text, size_t n, unsigned flags) {
    struct tokenizer_ids ids = {0};
    struct tokenizer_text out = {0};

    CHECK(tokenizer_encode(tokenizer, text, n, flags, &ids) == 0);
    for (size_t i = 0; i < ids.n; i++)
        CHECK(tokenizer_has_id(tokenizer, ids.ids[i]) &&
              ((flags & TOKENIZER_MARKUP) || !tokenizer_is_special(tokenizer, ids.ids[i])));
    CHECK(tokenizer_decode(tokenizer, ids.ids, ids.n, flags, &out) == 0);
    for (size_t at = 0; at < out.n;) {
        uint32_t cp;
        int n_char = utf8_decode((const unsigned char *)out.bytes + at, out.n - at, &cp);

        CHECK(n_char > 0);
        at += (size_t)n_char;
    }
    tokenizer_ids_deinit(&ids);
    tokenizer_text_deinit(&out);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    const char text[] = "ab abc  <x> e\xCC\x81\r\n we'll \xE4\xB8\xAD\xE6\x96\x87 123 \xF0\x9F\x98\x80 <|im_end|>";
    struct tokenizer *tokenizer = NULL;
    struct report report;

    if (tokenizer_open_text("fuzz", (const char *)data, n, &tokenizer, &report) != 0) {
        CHECK(!tokenizer && strncmp(report.line, "fuzz: ", 6) == 0);
        return 0;
    }
    check_text(tokenizer, text, sizeof text - 1, 0);
    check_text(tokenizer, text, sizeof text - 1, TOKENIZER_MARKUP | TOKENIZER_SKIP_SPECIAL);
    check_text(tokenizer, (const char *)data, n < 4096 ? n : 4096, TOKENIZER_MARKUP);
    for (int32_t id = -1; id <= tokenizer_n_ids(tokenizer) && id < 1000; id++) {
        size_t n_token;

        CHECK(!tokenizer_bytes(tokenizer, id, &n_token) == !tokenizer_has_id(tokenizer, id));
    }
    tokenizer_free(tokenizer);
    return 0;
}
