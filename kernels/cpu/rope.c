/* rope: what lies between a projection and attention: head split, q/k norm, RoPE, the K/V write. One code for all
 * numeric modes: it moves few bytes, so double precision costs nothing that shows. */
#include "cpu.h"
#include "kv_elem.h"

#include <errno.h>
#include <math.h>

enum { HEAD_DIM_MAX = 1024 }; /* bounds what a worker keeps on its stack */

/* cos and sin of one position, shared by all heads and layers of the row. */
struct rope_row {
    float cos[HEAD_DIM_MAX / 2], sin[HEAD_DIM_MAX / 2];
};

static void rope_row_init(struct rope_row *row, const struct rope_table *rope, int pos) {
    for (int i = 0; i < rope->rotary_dim / 2; i++) {
        float angle = (float)pos * rope->inv_freq[i];

        row->cos[i] = (float)cos((double)angle);
        row->sin[i] = (float)sin((double)angle);
    }
}

static void rope_apply(const struct rope_row *row, int rotary_dim, float *x) {
    int half = rotary_dim / 2;

    for (int i = 0; i < half; i++) {
        double a = (double)x[i], b = (double)x[i + half];
        double c = (double)row->cos[i], s = (double)row->sin[i];

        x[i] = (float)(a * c - b * s);
        x[i + half] = (float)(b * c + a * s);
    }
}

static bool rope_fits(const struct rope_table *rope, int head_dim) {
    return head_dim > 0 && head_dim <= HEAD_DIM_MAX && rope->rotary_dim >= 0 && rope->rotary_dim % 2 == 0 &&
           rope->rotary_dim <= head_dim;
}

static int row_pos(const struct batch *batch, int row) {
    int seg = batch->row_seg[row];

    return batch->seg_pos[seg] + row - batch->seg_row[seg];
}

static void store_act(const struct device *device, float *dst, const float *src, int n) {
    for (int i = 0; i < n; i++)
        dst[i] = cpu_round_act(device, src[i]);
}

struct qk_job {
    const struct device *device;
    const struct qk_args *args;
};

static void qk_row(const struct device *device, const struct qk_args *a, int row) {
    const int d = a->head_dim, q_step = a->has_gate ? 2 * d : d;
    const float *q = (const float *)a->qkv + (size_t)row * (size_t)a->qkv_stride;
    const float *k = q + (size_t)a->n_heads * (size_t)q_step, *v = k + (size_t)a->n_kv_heads * (size_t)d;
    const int pos = row_pos(a->batch, row), slot = a->batch->seg_slot[a->batch->row_seg[row]];
    const size_t kv_at = (size_t)row * (size_t)a->n_kv_heads * (size_t)d;
    struct rope_row rope;
    float x[HEAD_DIM_MAX];

    rope_row_init(&rope, &a->rope, pos);
    for (int h = 0; h < a->n_heads; h++) {
        float *out = (float *)a->q + ((size_t)row * (size_t)a->n_heads + (size_t)h) * (size_t)d;

        cpu_rms_norm(device, q + (size_t)h * (size_t)q_step, a->q_norm, d, a->eps, x);
        rope_apply(&rope, a->rope.rotary_dim, x);
        store_act(device, out, x, d);
    }
    for (int h = 0; h < a->n_kv_heads; h++) {
        const size_t at = (size_t)h * (size_t)d;

        cpu_rms_norm(device, k + at, a->k_norm, d, a->eps, x);
        rope_apply(&rope, a->rope.rotary_dim, x);
        if (a->kv) {
            kv_write(a->kv, slot, a->layer, KV_K, h, pos, x);
            kv_write(a->kv, slot, a->layer, KV_V, h, pos, v + at);
        } else {
            store_act(device, (float *)a->block_k + kv_at + at, x, d);
            store_act(device, (float *)a->block_v + kv_at + at, v + at, d);
        }
    }
}

static void qk_share(void *arg, int worker, int n_workers) {
    const struct qk_job *job = arg;
    struct cpu_range rows = cpu_share(*job->args->batch->n_rows, 1, worker, n_workers);

    for (int row = rows.begin; row < rows.end; row++)
        qk_row(job->device, job->args, row);
}

static void run_qk(struct device *device, const void *args, void *scratch) {
    struct qk_job job = {device, args};

    (void)scratch;
    if (*job.args->batch->n_rows > 0)
        cpu_parallel(device, qk_share, &job);
}

int cpu_qk(struct program *program, const struct qk_args *args) {
    struct qk_args a = *args;

    if (!rope_fits(&a.rope, a.head_dim) || (a.kv && a.kv->head_dim != a.head_dim))
        return -EINVAL;
    a.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    a.kv = cpu_program_keep(program, args->kv, sizeof *args->kv);
    return cpu_program_add(program, run_qk, &a, sizeof a, 0);
}

struct draft_kv_job {
    const struct device *device;
    const struct draft_kv_args *args;
};

/* Rejected rows never reach the cache: what lies in a draft group is committed context and nothing else. */
static bool draft_kv_row_stands(const struct draft_kv_args *a, int row) {
    int seg = a->batch->row_seg[row];

    return a->batch->seg_flags[seg] & SEG_PREFILL || row - a->batch->seg_row[seg] < a->seg_commit[seg];
}

static void draft_kv_row(const struct device *device, const struct draft_kv_args *a, int row) {
    const int d = a->head_dim, pos = row_pos(a->batch, row), slot = a->batch->seg_slot[a->batch->row_seg[row]];
    const size_t half_width = (size_t)a->n_kv_heads * (size_t)d;
    const float *x = a->kv_rows + (size_t)row * (size_t)a->n_layers * 2 * half_width;
    struct rope_row rope;
    float k[HEAD_DIM_MAX];

    rope_row_init(&rope, &a->rope, pos);
    for (int l = 0; l < a->n_layers; l++, x += 2 * half_width)
        for (int h = 0; h < a->n_kv_heads; h++) {
            const struct draft_kv_layer *layer = &a->layers[l];
            const size_t at = (size_t)h * (size_t)d;

            cpu_rms_norm(device, x + at, layer->k_norm, d, a->eps, k);
            rope_apply(&rope, a->rope.rotary_dim, k);
            kv_write(layer->kv, slot, layer->layer, KV_K, h, pos, k);
            kv_write(layer->kv, slot, layer->layer, KV_V, h, pos, x + half_width + at);
        }
}

static void draft_kv_share(void *arg, int worker, int n_workers) {
    const struct draft_kv_job *job = arg;
    struct cpu_range rows = cpu_share(*job->args->batch->n_rows, 1, worker, n_workers);

    for (int row = rows.begin; row < rows.end; row++)
        if (draft_kv_row_stands(job->args, row))
            draft_kv_row(job->device, job->args, row);
}

static void run_draft_kv(struct device *device, const void *args, void *scratch) {
    struct draft_kv_job job = {device, args};

    (void)scratch;
    if (*job.args->batch->n_rows > 0)
        cpu_parallel(device, draft_kv_share, &job);
}

int cpu_draft_kv(struct program *program, const struct draft_kv_args *args) {
    enum { N_LAYERS_MAX = 128 };
    struct draft_kv_layer layers[N_LAYERS_MAX];
    struct draft_kv_args a = *args;

    if (!rope_fits(&a.rope, a.head_dim) || a.n_layers < 1 || a.n_layers > N_LAYERS_MAX)
        return -EINVAL;
    for (int l = 0; l < a.n_layers; l++) {
        layers[l] = args->layers[l];
        if (layers[l].kv->head_dim != a.head_dim)
            return -EINVAL;
        layers[l].kv = cpu_program_keep(program, args->layers[l].kv, sizeof *args->layers[l].kv);
    }
    a.batch = cpu_program_keep(program, args->batch, sizeof *args->batch);
    a.layers = cpu_program_keep(program, layers, (size_t)a.n_layers * sizeof *layers);
    return cpu_program_add(program, run_draft_kv, &a, sizeof a, 0);
}
