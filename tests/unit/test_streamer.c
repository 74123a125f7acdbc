/* Attention over pages that come through the ring has the bits of attention over pages on the device: every numeric mode and
 * instruction set that is here, pages absent at random, fences delayed at random, a ring full of NaN. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/kv_elem.h"
#include "streamer.h"

enum {
    N_LAYERS = 2,
    N_PLACES = 3,
    N_HEADS = 4,
    N_KV_HEADS = 2,
    DIM = 16,
    N_PAGES_MAX = 90,
    N_ROWS_MAX = 64,
    ROW = N_HEADS * DIM,
    N_TABLE = N_PLACES * N_PAGES_MAX,
};

/* What a run is to find: who is where, and where its output goes. */
struct setting {
    int32_t table[N_TABLE];
    const void *pages[N_PLACES][N_PAGES_MAX];
    struct streamed_seq seqs[N_PLACES];
    struct streamed streamed;
    float out[N_LAYERS][N_ROWS_MAX * ROW];
};

struct rig {
    const struct backend *backend;
    struct device *device;
    struct stream *compute;
    struct streamer *streamer;
    struct devmem mem;
    struct kv_view kv;
    struct batch batch;
    char *host; /* [N_TABLE] pages */
    float *q, *out;
    struct program *program;
    uint64_t random;
};

static int below(struct rig *rig, int n) {
    rig->random = rig->random * 6364136223846793005u + 1442695040888963407u;
    return (int)((rig->random >> 33) % (uint64_t)n);
}

static float uniform(struct rig *rig) {
    return (float)below(rig, 1 << 20) / (float)(1 << 18) - 2;
}

static void fill_pages(struct rig *rig, enum dtype dtype) {
    const float ones[N_LAYERS] = {1, 1};
    struct kv_view *kv = &rig->kv;

    *kv = (struct kv_view){.dtype = dtype,
                           .n_layers = N_LAYERS,
                           .n_kv_heads = N_KV_HEADS,
                           .head_dim = DIM,
                           .page_bytes = kv_page_bytes(dtype, N_LAYERS, N_KV_HEADS, DIM),
                           .n_pages_max = N_PAGES_MAX};
    kv->arena = devmem_take(&rig->mem, MEM_DEVICE, (N_TABLE + 1) * kv->page_bytes);
    kv->table = devmem_take(&rig->mem, MEM_DEVICE, N_TABLE * sizeof *kv->table);
    kv->k_scale = devmem_upload(&rig->mem, ones, sizeof ones);
    kv->v_scale = devmem_upload(&rig->mem, ones, sizeof ones);
    rig->host = devmem_take(&rig->mem, MEM_HOST, N_TABLE * kv->page_bytes);
    for (size_t at = kv->page_bytes; at < (N_TABLE + 1) * kv->page_bytes; at += dtype_bytes(dtype)) {
        float x = uniform(rig);

        kv_elems_store(dtype, (char *)kv->arena + at, &x, 1, 1);
    }
}

/* A row that decodes, a block that is verified, a chunk of a prompt that begins on a page's last token. */
static void fill_batch(struct rig *rig) {
    static const int rows[N_PLACES] = {1, 9, 50}, pos[N_PLACES] = {5700, 2050, 3327};
    int32_t *ints = devmem_take(&rig->mem, MEM_DEVICE, (3 + 3 * N_PLACES + N_PLACES + 1 + N_ROWS_MAX) * sizeof *ints);

    rig->batch = (struct batch){.n_segs_max = N_PLACES,
                                .n_rows_max = N_ROWS_MAX,
                                .n_segs = ints,
                                .n_rows = ints + 1,
                                .n_outs = ints + 2,
                                .seg_slot = ints + 3,
                                .seg_pos = ints + 3 + N_PLACES,
                                .seg_flags = ints + 3 + 2 * N_PLACES,
                                .seg_row = ints + 3 + 3 * N_PLACES,
                                .row_seg = ints + 4 + 4 * N_PLACES};
    *rig->batch.n_segs = N_PLACES;
    for (int seg = 0; seg < N_PLACES; seg++) {
        rig->batch.seg_slot[seg] = N_PLACES - 1 - seg;
        rig->batch.seg_pos[seg] = pos[seg];
        rig->batch.seg_row[seg + 1] = rig->batch.seg_row[seg] + rows[seg];
        for (int row = rig->batch.seg_row[seg]; row < rig->batch.seg_row[seg + 1]; row++)
            rig->batch.row_seg[row] = seg;
    }
    *rig->batch.n_rows = rig->batch.seg_row[N_PLACES];
    rig->q = devmem_take(&rig->mem, MEM_DEVICE, (size_t)N_ROWS_MAX * ROW * sizeof *rig->q);
    rig->out = devmem_take(&rig->mem, MEM_DEVICE, (size_t)N_LAYERS * N_ROWS_MAX * ROW * sizeof *rig->out);
    for (int i = 0; i < N_ROWS_MAX * ROW; i++)
        rig->q[i] = uniform(rig);
}

static void record(struct rig *rig) {
    assert_int_equal(rig->backend->program_begin(rig->device, &rig->program), 0);
    for (int layer = 0; layer < N_LAYERS; layer++) {
        assert_int_equal(rig->backend->program_cut(rig->program), 0);
        assert_int_equal(
            rig->backend->attn(rig->program, &(struct attn_args){.batch = &rig->batch,
                                                                 .q = rig->q,
                                                                 .n_heads = N_HEADS,
                                                                 .n_kv_heads = N_KV_HEADS,
                                                                 .head_dim = DIM,
                                                                 .kv = &rig->kv,
                                                                 .layer = layer,
                                                                 .spans = streamer_spans(rig->streamer),
                                                                 .out = rig->out + layer * N_ROWS_MAX * ROW}),
            0);
        assert_int_equal(rig->backend->program_cut(rig->program), 0);
    }
    assert_int_equal(rig->backend->program_end(rig->program), 0);
}

static struct rig *rig_open(const struct backend_options *options, enum dtype dtype, int region_spans) {
    struct rig *rig = calloc(1, sizeof *rig);
    struct streamer_options streamer = {.n_places = N_PLACES, .n_pages_max = N_PAGES_MAX, .region_spans = region_spans};

    assert_non_null(rig);
    rig->random = 7 + options->delay_seed;
    rig->backend = backend_find("cpu");
    assert_int_equal(rig->backend->open(options, &rig->device), 0);
    assert_int_equal(rig->backend->stream_open(rig->device, STREAM_COMPUTE, &rig->compute), 0);
    devmem_init(&rig->mem, rig->backend, rig->device, rig->compute);
    fill_pages(rig, dtype);
    fill_batch(rig);
    streamer.backend = rig->backend;
    streamer.device = rig->device;
    streamer.upload = rig->compute;
    streamer.layer_bytes = kv_layer_bytes(&rig->kv);
    assert_int_equal(streamer_open(&streamer, &rig->streamer), 0);
    rig->kv.ring = streamer_ring(rig->streamer);
    memset(rig->kv.ring, 0xff, streamer_ring_bytes(N_PLACES, region_spans, streamer.layer_bytes));
    record(rig);
    return rig;
}

static void rig_close(struct rig *rig) {
    assert_int_equal(backend_stream_wait(rig->backend, rig->compute), 0);
    rig->backend->program_free(rig->program);
    streamer_close(rig->streamer);
    devmem_deinit(&rig->mem);
    rig->backend->stream_close(rig->compute);
    rig->backend->close(rig->device);
    free(rig);
}

/* `absent` in 100 of the pages that no row of the batch writes are not on the device. */
static void draw(struct rig *rig, int absent, struct setting *ret) {
    memset(ret, 0, sizeof *ret);
    for (int i = 0; i < N_TABLE; i++)
        ret->table[i] = 1 + i;
    for (int seg = 0; seg < N_PLACES; seg++) {
        int slot = rig->batch.seg_slot[seg], n_stable = rig->batch.seg_pos[seg] / PAGE_TOKENS, first = -1, end = 0;

        for (int page = 0; page < n_stable; page++) {
            int i = slot * N_PAGES_MAX + page;

            if (below(rig, 100) >= absent)
                continue;
            ret->pages[slot][page] = rig->host + (size_t)i * rig->kv.page_bytes;
            ret->table[i] = streamer_entry(rig->streamer, slot, page);
            first = first < 0 ? page : first;
            end = page + 1;
        }
        if (end > 0)
            ret->seqs[ret->streamed.n_seqs++] = (struct streamed_seq){slot, first, end, ret->pages[slot]};
    }
    ret->streamed.seqs = ret->seqs;
}

static void copy(struct rig *rig, void *dst, const void *src, size_t bytes) {
    assert_int_equal(rig->backend->copy(rig->compute, dst, src, bytes), 0);
}

/* Enqueued whole, with what brings the host its pages. */
static void enqueue(struct rig *rig, struct setting *setting) {
    for (int i = 0; i < N_TABLE; i++)
        if (setting->table[i] < 0)
            copy(rig, rig->host + (size_t)i * rig->kv.page_bytes,
                 (char *)rig->kv.arena + (size_t)(1 + i) * rig->kv.page_bytes, rig->kv.page_bytes);
    copy(rig, (int32_t *)rig->kv.table, setting->table, sizeof setting->table);
    assert_int_equal(streamer_follow(rig->streamer, rig->compute), 0);
    assert_int_equal(streamer_run(rig->streamer, rig->compute, rig->program, &rig->kv, &setting->streamed, NULL), 0);
    copy(rig, setting->out, rig->out, sizeof setting->out);
}

static void check(const struct backend_options *options, enum dtype dtype, int region_spans) {
    static const int absent[] = {0, 100, 50, 0, 97, 3};
    struct rig *rig = rig_open(options, dtype, region_spans);
    struct setting *settings = calloc(ARRAY_LEN(absent), sizeof *settings);
    size_t n_out = (size_t)*rig->batch.n_rows * ROW;
    struct streamer_stats stats;
    uint64_t n_streamed = 0;

    assert_non_null(settings);
    memset(rig->host, 0xff, N_TABLE * rig->kv.page_bytes);
    for (size_t i = 0; i < ARRAY_LEN(absent); i++) {
        draw(rig, absent[i], &settings[i]);
        for (int k = 0; k < N_TABLE; k++)
            n_streamed += settings[i].table[k] < 0;
        enqueue(rig, &settings[i]);
    }
    assert_int_equal(backend_stream_wait(rig->backend, rig->compute), 0);
    for (size_t i = 0; i < n_out; i++)
        assert_true(isfinite(settings[0].out[0][i]) && isfinite(settings[0].out[1][i]));
    assert_memory_not_equal(settings[0].out[0], settings[0].out[1], n_out * sizeof(float));
    for (size_t i = 1; i < ARRAY_LEN(absent); i++)
        for (int layer = 0; layer < N_LAYERS; layer++)
            assert_memory_equal(settings[i].out[layer], settings[0].out[layer], n_out * sizeof(float));
    streamer_stats(rig->streamer, &stats);
    assert_int_equal(stats.bytes, n_streamed * rig->kv.page_bytes); /* each layer's share of each page once a run */
    assert_true(stats.n_fences > 0);
    free(settings);
    rig_close(rig);
}

static bool is_here(const struct backend_options *options) {
    const struct backend *cpu = backend_find("cpu");
    struct device *device;
    int r = cpu->open(options, &device);

    if (r == 0)
        cpu->close(device);
    return r == 0;
}

static void check_all(uint64_t delay_seed) {
    static const struct {
        enum numeric numeric;
        const char *isa;
        enum dtype dtype;
        int region_spans;
    } paths[] = {
        {NUMERIC_REFERENCE, "scalar", DTYPE_F32, 2}, {NUMERIC_BF16, "scalar", DTYPE_BF16, 4},
        {NUMERIC_FAST, "scalar", DTYPE_E4M3, 2},     {NUMERIC_FAST, "avx2", DTYPE_BF16, 2},
        {NUMERIC_FAST, "avx2", DTYPE_E4M3, 4},       {NUMERIC_FAST, "avx512bf16", DTYPE_F16, 2},
        {NUMERIC_FAST, "amx", DTYPE_BF16, 6},
    };

    for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
        struct backend_options options = {
            .numeric = paths[i].numeric, .n_threads = 2, .isa = paths[i].isa, .delay_seed = delay_seed};

        if (is_here(&options))
            check(&options, paths[i].dtype, paths[i].region_spans);
    }
}

static void where_pages_are_does_not_change_a_bit(void **state) {
    (void)state;
    check_all(0);
}

static void nor_do_delays(void **state) {
    (void)state;
    check_all(99);
}

static void a_ring_of_odd_regions_is_refused(void **state) {
    struct streamer_options options = {.backend = backend_find("cpu"), .n_places = 1, .n_pages_max = 1};
    struct streamer *streamer;

    (void)state;
    for (options.region_spans = -1; options.region_spans <= 3; options.region_spans++)
        if (options.region_spans != 2)
            assert_int_equal(streamer_open(&options, &streamer), -EINVAL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(where_pages_are_does_not_change_a_bit),
        cmocka_unit_test(nor_do_delays),
        cmocka_unit_test(a_ring_of_odd_regions_is_refused),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
