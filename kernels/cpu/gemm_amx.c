/* gemm_amx: FAST kernels with AMX tiles (Intel SDM vol. 2, TDPBF16PS). The packed panel is what the instruction wants as
 * its second operand: 16 k pairs of 16 rows are one tile of 1 KiB. The first operand is a tile of token rows. A result row
 * depends on its own token alone and k runs in blocks of 32 in one order, so one token has the same bits as sixteen;
 * subnormal inputs and results count as zero. */
#include "gemm.h"

#include <assert.h>
#include <immintrin.h>

enum {
    TILE = 16, /* tokens: the rows of a tile */
    VEC_PANELS = 4,
    BLOCK_PAIRS = 16, /* k pairs of one tile */
    BLOCK_X_BYTES = BLOCK_PAIRS * 4,
    BLOCK_W_BYTES = BLOCK_PAIRS * PANEL_ROWS * 4,
};

/* Tile registers: 0..3 sums, 4 tokens, 5 panel; 6 and 7 the same for the last, shorter block of k. */
struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t n_rows[16];
};

static void configure(int n_tokens, int n_pairs) {
    _Alignas(64) struct tile_config config = {.palette = 1};
    int n_last = n_pairs % BLOCK_PAIRS;

    for (int i = 0; i < 5; i++) {
        config.n_rows[i] = (uint8_t)n_tokens;
        config.row_bytes[i] = BLOCK_X_BYTES;
    }
    config.n_rows[5] = BLOCK_PAIRS;
    config.row_bytes[5] = PANEL_ROWS * 4;
    if (n_last > 0) {
        config.n_rows[6] = (uint8_t)n_tokens;
        config.row_bytes[6] = (uint16_t)(n_last * 4);
        config.n_rows[7] = (uint8_t)n_last;
        config.row_bytes[7] = PANEL_ROWS * 4;
    }
    /* GCC's intrinsics tell the compiler of the first 8 of the 64 bytes that this one reads, and of none that tile loads
     * read: without a barrier the stores behind them may come late or never (GCC 12 -O2 drops them). */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

/* x: [n_tokens][n_pairs] words of two bf16 */
static void tile_amx(const void *panel, const void *x, int n_pairs, int n_tokens, float (*acc)[PANEL_ROWS]) {
    const char *w = panel, *tokens = x;
    size_t x_bytes = (size_t)n_pairs * 4;

    assert(n_tokens <= TILE);
    configure(n_tokens, n_pairs);
    _tile_zero(0);
    for (int p = 0; p + BLOCK_PAIRS <= n_pairs; p += BLOCK_PAIRS, w += BLOCK_W_BYTES, tokens += BLOCK_X_BYTES) {
        _tile_loadd(4, tokens, x_bytes);
        _tile_loadd(5, w, PANEL_ROWS * 4);
        _tile_dpbf16ps(0, 4, 5);
    }
    if (n_pairs % BLOCK_PAIRS != 0) {
        _tile_loadd(6, tokens, x_bytes);
        _tile_loadd(7, w, PANEL_ROWS * 4);
        _tile_dpbf16ps(0, 6, 7);
    }
    _tile_stored(0, acc, PANEL_ROWS * 4);
    _tile_release();
}

/* Four panels side by side: the product has a long latency, and each panel is a stream for the prefetchers. */
static void vec_amx(const void *panel, size_t panel_bytes, int n_panels, const void *x, int n_pairs,
                    float (*acc)[PANEL_ROWS]) {
    const char *tokens = x, *w0 = panel, *w1 = w0 + panel_bytes, *w2 = w1 + panel_bytes, *w3 = w2 + panel_bytes;

    if (n_panels < VEC_PANELS) {
        for (int i = 0; i < n_panels; i++)
            tile_amx(w0 + (size_t)i * panel_bytes, x, n_pairs, 1, &acc[i]);
        return;
    }
    assert(n_panels == VEC_PANELS);
    configure(1, n_pairs);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int p = 0; p + BLOCK_PAIRS <= n_pairs; p += BLOCK_PAIRS, tokens += BLOCK_X_BYTES) {
        size_t at = (size_t)p * PANEL_ROWS * 4;

        _tile_loadd(4, tokens, BLOCK_X_BYTES);
        _tile_loadd(5, w0 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(0, 4, 5);
        _tile_loadd(5, w1 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(1, 4, 5);
        _tile_loadd(5, w2 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(2, 4, 5);
        _tile_loadd(5, w3 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(3, 4, 5);
    }
    if (n_pairs % BLOCK_PAIRS != 0) {
        size_t at = (size_t)(n_pairs / BLOCK_PAIRS) * BLOCK_W_BYTES;

        _tile_loadd(6, tokens, BLOCK_X_BYTES);
        _tile_loadd(7, w0 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(0, 6, 7);
        _tile_loadd(7, w1 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(1, 6, 7);
        _tile_loadd(7, w2 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(2, 6, 7);
        _tile_loadd(7, w3 + at, PANEL_ROWS * 4);
        _tile_dpbf16ps(3, 6, 7);
    }
    _tile_stored(0, acc[0], PANEL_ROWS * 4);
    _tile_stored(1, acc[1], PANEL_ROWS * 4);
    _tile_stored(2, acc[2], PANEL_ROWS * 4);
    _tile_stored(3, acc[3], PANEL_ROWS * 4);
    _tile_release();
}

const struct gemm_path gemm_path_amx = {
    .tile_max = TILE,
    .vec_panels = VEC_PANELS,
    .x_form = GEMM_X_ROWS,
    .tile_bf16 = tile_amx,
    .vec = vec_amx,
};
