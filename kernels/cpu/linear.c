/* linear: the matrix op of a layer, its norm prologue and its epilogues, and the embedding gather. The prologue runs once
 * into packed rows; each epilogue runs on the worker that computed the panel. */
#include "fast_exp.h"
#include "gemm.h"

#include <assert.h>
#include <errno.h>

/* The rows a program run has to do: 0 for a batch without segs. */
static int batch_rows(const struct batch *batch) {
    int n_rows = *batch->n_segs > 0 ? *batch->n_rows : 0;

    assert(n_rows >= 0 && n_rows <= batch->n_rows_max);
    return n_rows;
}

/* ---- linear ------------------------------------------------------------------------------------------------------- */

struct epilogue {
    const struct device *device;
    const struct linear_out *out;
};

void cpu_swiglu(const struct device *device, const float *gate, const float *up, int n, float *out) {
    if (device->numeric == NUMERIC_FAST) {
        for (int i = 0; i < n; i++)
            out[i] = gate[i] / (1.0f + fast_exp(-gate[i])) * up[i];
    } else {
        for (int i = 0; i < n; i++)
            out[i] = (float)((double)gate[i] / (1.0 + exp(-(double)gate[i])) * (double)up[i]);
    }
}

static void add_bias(const float *bias, const float *acc, int n, float *out) {
    for (int i = 0; i < n; i++)
        out[i] = bias != NULL ? acc[i] + bias[i] : acc[i];
}

static void emit_epilogue(const struct gemm_job *job, int unit, int row, int n_rows, const float (*acc)[PANEL_ROWS],
                          const float (*acc_up)[PANEL_ROWS]) {
    const struct epilogue *epilogue = job->arg;
    const struct linear_out *out = epilogue->out;
    const struct device *device = epilogue->device;
    int n_cols = acc_up != NULL ? job->weight->n_rows / 2 : job->weight->n_rows;
    int first = unit * PANEL_ROWS, n = min_int(PANEL_ROWS, n_cols - first);
    const float *bias = out->bias != NULL ? out->bias + first : NULL;
    const float *bias_up = out->bias != NULL ? out->bias + n_cols + first : NULL;

    for (int i = 0; i < n_rows; i++) {
        float *y = (float *)out->y + (size_t)(row + i) * (size_t)out->y_stride + first;
        float v[PANEL_ROWS], up[PANEL_ROWS];

        add_bias(bias, acc[i], n, v);
        switch (out->epilogue) {
        case LINEAR_STORE:
            for (int j = 0; j < n; j++)
                y[j] = cpu_round_act(device, v[j]);
            break;
        case LINEAR_STORE_F32:
            memcpy(y, v, (size_t)n * sizeof *y);
            break;
        case LINEAR_ADD:
            for (int j = 0; j < n; j++)
                y[j] = cpu_round_act(device, y[j] + v[j]);
            break;
        case LINEAR_ADD_F32:
            for (int j = 0; j < n; j++)
                y[j] += v[j];
            break;
        case LINEAR_SWIGLU:
            assert(acc_up != NULL); /* gate and up are the two parts of this form of weight */
            add_bias(bias_up, acc_up[i], n, up);
            cpu_swiglu(device, v, up, n, v);
            for (int j = 0; j < n; j++)
                y[j] = cpu_round_act(device, v[j]);
            break;
        }
    }
}

struct linear_op {
    struct linear_args args;
    const struct batch *batch;
};

static void run_linear(struct device *device, const void *op_args, void *scratch) {
    const struct linear_op *op = op_args;
    const struct linear_args *args = &op->args;
    int n_rows = batch_rows(op->batch), n_cols = args->out[0].weight->n_cols;
    struct gemm_rows rows = {.x = args->x,
                             .stride = (size_t)args->x_stride,
                             .n_rows = n_rows,
                             .n_cols = n_cols,
                             .norm = args->norm,
                             .eps = args->eps};
    struct epilogue epilogue[2];
    struct gemm_job jobs[2];

    if (n_rows == 0)
        return;
    gemm_pack(device, &rows, scratch, (char *)scratch + gemm_packed_bytes(op->batch->n_rows_max, n_cols));
    for (int i = 0; i < args->n_outs; i++) {
        epilogue[i] = (struct epilogue){device, &args->out[i]};
        jobs[i] = (struct gemm_job){args->out[i].weight, 0, scratch, n_rows, emit_epilogue, &epilogue[i]};
    }
    gemm_run(device, jobs, args->n_outs);
}

int cpu_linear(struct program *program, const struct linear_args *args) {
    const struct device *device = cpu_program_device(program);
    struct linear_op op = {*args, cpu_program_keep(program, args->batch, sizeof *args->batch)};
    int n_cols;

    if (args->n_outs < 1 || args->n_outs > 2 || args->out[0].weight == NULL)
        return -EINVAL;
    n_cols = args->out[0].weight->n_cols;
    if (args->x_stride < n_cols)
        return -EINVAL;
    for (int i = 0; i < args->n_outs; i++) {
        const struct linear_out *out = &args->out[i];
        bool is_swiglu = out->epilogue == LINEAR_SWIGLU;

        if (out->weight == NULL || out->weight->n_cols != n_cols || out->weight->n_stack != 1)
            return -EINVAL;
        if ((out->weight->form == WEIGHT_GATE_UP) != is_swiglu)
            return -EINVAL;
        if (out->y_stride < (is_swiglu ? out->weight->n_rows / 2 : out->weight->n_rows))
            return -EINVAL;
    }
    return cpu_program_add(program, run_linear, &op, sizeof op,
                           gemm_packed_bytes(args->batch->n_rows_max, n_cols) +
                               (size_t)device->caps.n_threads * gemm_row_bytes(n_cols));
}

/* ---- embed -------------------------------------------------------------------------------------------------------- */

struct embed_op {
    struct embed_args args;
    const struct batch *batch;
};

static void run_embed(struct device *device, const void *op_args, void *scratch) {
    const struct embed_op *op = op_args;
    const struct weight *table = op->args.table;
    int n_rows = batch_rows(op->batch);

    (void)scratch;
    for (int row = 0; row < n_rows; row++) {
        int32_t id = op->batch->row_token[row];
        float *x = (float *)op->args.x + (size_t)row * (size_t)table->n_cols;
        const void *panel;
        size_t at;

        if (id < 0 || id >= table->n_rows)
            id = 0;
        panel = weight_panel(table, 0, id / PANEL_ROWS);
        at = (size_t)(id % PANEL_ROWS) * 2;
        for (int k = 0; k < table->n_cols; k++) {
            size_t i = at + (size_t)(k / 2) * 2 * PANEL_ROWS + (size_t)(k % 2);
            float v = table->elem == DTYPE_BF16 ? bf16_to_f32(((const uint16_t *)panel)[i]) : ((const float *)panel)[i];

            x[k] = cpu_round_act(device, v);
        }
    }
}

int cpu_embed(struct program *program, const struct embed_args *args) {
    struct embed_op op = {*args, cpu_program_keep(program, args->batch, sizeof *args->batch)};

    if (args->table == NULL || args->table->form != WEIGHT_ROWS || args->table->n_stack != 1)
        return -EINVAL;
    return cpu_program_add(program, run_embed, &op, sizeof op, 0);
}
