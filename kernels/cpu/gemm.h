/* gemm: packed weights and the kernels that multiply them. Internal to weight.c, gemm*.c, linear.c, moe.c and their tests.
 *
 * Layout of a packed matrix: panels of 16 rows, each [k / 2][16][2]: the two elements of a row that belong to one k pair
 * lie together, so that a 512-bit word is one step of a bf16 dot product of 16 rows, and a panel is one sequential stream.
 * Rows beyond N and an odd last k are zero. WEIGHT_GATE_UP alternates: gate panel 0, up panel 0, gate panel 1, ...
 *
 * Order: an output element is one chain of multiply-adds over k ascending, however many rows, panels or workers there
 * are, so a row has the same bits in every batch. */
#pragma once
#include "cpu.h"

enum { PANEL_ROWS = 16, GEMM_TILE_MAX = 16 };

struct weight {
    enum dtype elem; /* BF16, or F32 where the stored values are not exactly bf16 and the numeric mode keeps them */
    enum weight_form form;
    int n_rows, n_cols, n_stack; /* N, K, experts */
    int n_pairs;                 /* ceil(K / 2) */
    int n_panels;                /* of one matrix */
    size_t panel_bytes;
    size_t bytes; /* of data */
    char *data;   /* [n_stack][n_panels][n_pairs][16][2] */
};

static inline const void *weight_panel(const struct weight *weight, int stack_idx, int panel) {
    return weight->data + ((size_t)stack_idx * (size_t)weight->n_panels + (size_t)panel) * weight->panel_bytes;
}

/* ---- kernels: acc[t][r] = sum over k of panel row r times token t. x: a packed tile of n_tokens tokens. */
typedef void gemm_tile_fn(const void *panel, const void *x, int n_pairs, int n_tokens, float (*acc)[PANEL_ROWS]);
/* One token, n_panels panels panel_bytes apart, several streams at once: acc[p][r]. The same bits as the tile's. */
typedef void gemm_vec_fn(const void *panel, size_t panel_bytes, int n_panels, const void *x, int n_pairs,
                         float (*acc)[PANEL_ROWS]);

/* How a tile of x is packed: f32 [k][tokens], bf16 pairs [k / 2][tokens][2], or bf16 rows [tokens][k]. */
enum gemm_x_form { GEMM_X_F32, GEMM_X_PAIRS, GEMM_X_ROWS };

struct gemm_path {
    int tile_max;   /* tokens of a tile */
    int vec_panels; /* panels of a vec call at most */
    enum gemm_x_form x_form;
    gemm_tile_fn *tile_bf16, *tile_f32;
    gemm_vec_fn *vec; /* bf16; NULL: use tiles */
};
extern const struct gemm_path gemm_path_plain, gemm_path_scalar, gemm_path_avx2, gemm_path_avx512bf16, gemm_path_amx;
const struct gemm_path *gemm_path_of(const struct device *device);

/* ---- packed inputs. A row is normalised (norm != NULL), rounded by cpu_round_gemm_in and laid out by tiles. */
struct gemm_rows {
    const float *x; /* row i at x + (index ? index[i] : i) * stride */
    size_t stride;
    const int32_t *index;
    int n_rows, n_cols;
    const float *norm; /* f32 [n_cols] or NULL */
    float eps;
};
size_t gemm_packed_bytes(int n_rows, int n_cols); /* multiple of 64 */
size_t gemm_packed_row_bytes(int n_cols);         /* what n rows take is n times this: groups may lie end to end */
size_t gemm_row_bytes(int n_cols);                /* scratch of one worker for rows with a norm */
/* Runs on all workers. row_scratch: gemm_row_bytes each, for caps.n_threads workers; may be NULL without a norm. */
void gemm_pack(struct device *device, const struct gemm_rows *rows, void *packed, void *row_scratch);
/* On the calling worker alone: for packing many small groups of rows side by side. */
void gemm_pack_alone(const struct device *device, const struct gemm_rows *rows, void *packed, float *row_scratch);

/* ---- products. `emit` gets rows [row, row + n_rows) x 16 outputs of a panel, on the worker that computed them. For
 * WEIGHT_GATE_UP a unit is a pair of panels: acc holds gate, acc_up holds up; else acc_up is NULL. */
struct gemm_job;
typedef void gemm_emit_fn(const struct gemm_job *job, int unit, int row, int n_rows, const float (*acc)[PANEL_ROWS],
                          const float (*acc_up)[PANEL_ROWS]);
struct gemm_job {
    const struct weight *weight;
    int stack_idx;
    const void *packed;
    int n_rows; /* 0: nothing to do */
    gemm_emit_fn *emit;
    const void *arg;
};
static inline int gemm_units(const struct weight *weight) {
    return weight->form == WEIGHT_GATE_UP ? weight->n_panels / 2 : weight->n_panels;
}
/* All jobs in one parallel region; the units are shared out by their cost. */
void gemm_run(struct device *device, const struct gemm_job *jobs, int n_jobs);
