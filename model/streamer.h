/* streamer: runs a pass over pages of target_full that are not all on the device. Owns the ring through which those come,
 * layer by layer, the stream that brings them and the fences between the two. Knows no policy: which pages are where is
 * decided elsewhere.
 *
 * The ring has a region for each place, of an even number of spans; page p of a seq passes through place p % region of it,
 * so its table entry stays the same however often it comes. Half a region is a cell: cell c of all seqs together holds
 * pages [c, c + 1) * cell_pages, in the ring's half c % 2. Where any page of a cell is not on the device:
 *
 *     load:     wait consumed[half] ▸ copy this layer's segments into the ring ▸ record ready[half]
 *     compute:  spans := from where the cell before ended to the end of this one
 *               ▸ wait ready[half] ▸ the part of the program with this layer's attention ▸ record consumed[half]
 *
 * So copies run ahead of compute by one cell, also from layer to layer and from pass to pass, and results have the bits of
 * a pass over pages that are all on the device. */
#pragma once
#include "devmem.h"
#include "gate.h"

struct streamer;

enum { STREAMER_REGION_SPANS_MIN = 2 };

struct streamer_options {
    const struct backend *backend;
    struct device *device;
    struct stream *upload; /* for one small copy while opening */
    int n_places;          /* seqs: rows of the table */
    int n_pages_max;       /* of one seq */
    int region_spans;      /* even */
    size_t layer_bytes;    /* of a page: kv_layer_bytes() */
};

/* Pages of a seq in a pass. The arrays stay as they are until the pass is done. */
struct streamed_seq {
    int slot;                 /* its place */
    int first_page, end_page; /* those before and behind are on the device */
    const void *const *pages; /* [end_page] where a page lies, whole, in MEM_HOST memory; NULL: on the device */
};
struct streamed {
    const struct streamed_seq *seqs;
    int n_seqs; /* 0: all pages are on the device */
};

int streamer_open(const struct streamer_options *options,
                  struct streamer **ret_streamer); /* -ENOMEM, or the backend's */
void streamer_close(struct streamer *streamer);    /* after all its work is done; NULL is fine */

static inline size_t streamer_ring_bytes(int n_places, int region_spans, size_t layer_bytes) {
    return (size_t)n_places * (size_t)region_spans * (SPAN_TOKENS / PAGE_TOKENS) * layer_bytes;
}
void *streamer_ring(const struct streamer *streamer);                        /* kv_view.ring of target_full */
const struct attn_spans *streamer_spans(const struct streamer *streamer);    /* attn_args.spans of all full layers */
int32_t streamer_entry(const struct streamer *streamer, int slot, int page); /* in the table */

/* A program with a gate, over kv; gate: NULL, or another one who waits there. */
int streamer_run(struct streamer *streamer, struct stream *compute, struct program *program, const struct kv_view *kv,
                 const struct streamed *streamed, const struct pass_gate *gate);

/* What is brought from now on is read after what has been enqueued on compute so far: that wrote some of it. */
int streamer_follow(struct streamer *streamer, struct stream *compute);

struct streamer_stats {  /* since open; any thread */
    uint64_t bytes;      /* copied into the ring */
    uint64_t n_passes;   /* that read any */
    uint64_t n_fences;   /* ready fences that passes went through */
    uint64_t n_late;     /* of these, on which compute had to wait */
    uint64_t pass_bytes; /* that the last pass read */
};
void streamer_stats(const struct streamer *streamer, struct streamer_stats *ret_stats);
