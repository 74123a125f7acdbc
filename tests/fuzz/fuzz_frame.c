/* Bytes of a client, cut anywhere: the scan finds the same in pieces as in one, and what it lets pass msgpack-c unpacks,
 * with memory that the limits bound. The first byte chooses the limit, the second the cuts. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include <msgpack.h>

#include "frame.h"
#include "report.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

struct outcome {
    int e;
    size_t n_message;
    struct report report;
};

static struct outcome scan_in_pieces(const char *bytes, size_t n, size_t bytes_max, uint32_t cut_seed) {
    struct outcome outcome = {.e = FRAME_E_MORE};
    struct frame_scan scan;
    size_t end = cut_seed ? 0 : n;

    frame_scan_init(&scan, bytes_max);
    for (;;) {
        size_t bytes_min;

        outcome.e = frame_scan(&scan, bytes, end, &outcome.n_message, &outcome.report);
        bytes_min = frame_scan_bytes_min(&scan);
        if (outcome.e == FRAME_E_MORE)
            assert(bytes_min > end && end < bytes_max);
        if (outcome.e != FRAME_E_MORE || end == n)
            return outcome;
        cut_seed = cut_seed * 1664525u + 1013904223u;
        end += 1 + (cut_seed >> 28);
        end = end < n ? end : n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct outcome whole, cut;
    const char *bytes = (const char *)data + 2;
    struct report report = {0};
    msgpack_zone zone;
    msgpack_object message;
    size_t bytes_max;

    if (n < 2)
        return 0;
    bytes_max = data[0] & 1 ? 1 << 16 : 1 + data[0] / 2u;
    whole = scan_in_pieces(bytes, n - 2, bytes_max, 0);
    cut = scan_in_pieces(bytes, n - 2, bytes_max, data[1] | 256u);
    assert(whole.e == cut.e);
    if (whole.e == FRAME_E_BAD && n - 2 < bytes_max) /* at the limit pieces may be refused earlier */
        assert(strcmp(whole.report.line, cut.report.line) == 0);
    frame_peek_id(bytes, n - 2);
    if (whole.e != 0)
        return 0;
    assert(whole.n_message == cut.n_message && whole.n_message <= n - 2 && whole.n_message <= bytes_max);
    if (!msgpack_zone_init(&zone, 8192))
        abort();
    if (frame_unpack(bytes, whole.n_message, &zone, &message, &report) == 0)
        assert(message.type == MSGPACK_OBJECT_ARRAY);
    else
        assert(report.line[0]);
    msgpack_zone_destroy(&zone);
    return 0;
}
