/* weight: checkpoint tensors to fragments, at load time. Rows go through a pinned buffer to the device in pieces and are
 * laid out there. Every element becomes bf16; FP8 blocks are dequantised (value times block scale, then rounded). */
#include "weight.cuh"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

enum { SCALE_BLOCK = 128 };

struct piece { /* rows of one part, now on the device, tightly packed */
    const void *src;
    enum dtype dtype;
    int n_cols, n_rows;
    int first;           /* row of the part */
    int dst_first, part; /* row of the form (of its half if gate_up) that the part begins with */
    bool is_gate_up;
    const float *scale; /* E4M3: of all of the part, [.., scale_cols] */
    int scale_cols;
    int n_steps;
    char *dst; /* of the matrix */
};

__device__ static float e4m3_value(uint8_t b) {
    uint32_t exp = b >> 3 & 15, man = b & 7;
    float f = exp == 0 ? (float)man * 0x1p-9f : __uint_as_float((exp + 120) << 23 | man << 20);

    if ((b & 0x7f) == 0x7f)
        f = __uint_as_float(0x7fc00000u);
    return b & 0x80 ? -f : f;
}

__global__ static void lay_out(struct piece p) {
    int k = (int)(blockIdx.x * blockDim.x + threadIdx.x), row = (int)blockIdx.y, n = p.dst_first + p.first + row;
    size_t at = (size_t)row * (size_t)p.n_cols + (size_t)k;
    struct packed_row to = p.is_gate_up ? packed_gate_up_row(n, p.part) : packed_row_of(n);
    bf16 *dst;

    if (k >= p.n_cols)
        return;
    dst = (bf16 *)(p.dst + packed_at(to, k, p.n_steps));
    switch (p.dtype) {
    case DTYPE_BF16:
        *dst = ((const bf16 *)p.src)[at];
        break;
    case DTYPE_F32:
        *dst = __float2bfloat16_rn(((const float *)p.src)[at]);
        break;
    case DTYPE_F16: {
        float v;
        unsigned short h = ((const unsigned short *)p.src)[at];
        asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(h));
        *dst = __float2bfloat16_rn(v);
        break;
    }
    case DTYPE_E4M3:
        *dst = __float2bfloat16_rn(
            e4m3_value(((const uint8_t *)p.src)[at]) *
            p.scale[(size_t)((p.first + row) / SCALE_BLOCK) * (size_t)p.scale_cols + (size_t)(k / SCALE_BLOCK)]);
        break;
    case DTYPE_N:
        break;
    }
}

/* ---- upload ------------------------------------------------------------------------------------------------------- */

/* f32 multipliers of an E4M3 part in device memory, which the caller frees. */
static int upload_scale(struct device *device, const struct weight_part *part, float **ret_scale) {
    size_t n = (size_t)div_ceil((uint64_t)part->n_rows, SCALE_BLOCK) * (size_t)part->scale_cols;
    float *host = (float *)malloc(n * sizeof *host), *scale = NULL;
    int r = host == NULL ? -ENOMEM : 0;

    for (size_t i = 0; r == 0 && i < n; i++) {
        uint16_t half;

        if (part->scale_dtype == DTYPE_F32) {
            memcpy(&host[i], (const char *)part->scale + i * sizeof *host, sizeof *host);
        } else {
            memcpy(&half, (const char *)part->scale + i * sizeof half, sizeof half);
            host[i] = bf16_to_f32(half);
        }
    }
    if (r == 0)
        r = cuda_result(device, cudaMalloc((void **)&scale, n * sizeof *scale));
    if (r == 0)
        r = cuda_result(device, cudaMemcpy(scale, host, n * sizeof *scale, cudaMemcpyHostToDevice));
    free(host);
    if (r < 0) {
        cudaFree(scale);
        return r;
    }
    *ret_scale = scale;
    return 0;
}

static int upload_part(struct device *device, const struct weight_part *part, struct piece piece) {
    size_t row_bytes = (size_t)piece.n_cols * dtype_bytes(part->dtype);
    int rows_max = (int)(PACK_BYTES / row_bytes < 65535 ? PACK_BYTES / row_bytes : 65535), r = 0;
    float *scale = NULL;

    if (rows_max == 0)
        return -EINVAL;
    if (part->dtype == DTYPE_E4M3)
        r = upload_scale(device, part, &scale);
    piece.scale = scale;
    piece.src = device->pack_device;
    for (int row = 0; r == 0 && row < part->n_rows; row += rows_max) {
        dim3 grid((unsigned)div_ceil((uint64_t)piece.n_cols, 256), 1);

        piece.first = row;
        piece.n_rows = min_int(rows_max, part->n_rows - row);
        for (int i = 0; i < piece.n_rows; i++)
            memcpy((char *)device->pack_host + (size_t)i * row_bytes,
                   (const char *)part->data + (size_t)(row + i) * part->row_bytes, row_bytes);
        r = cuda_result(device,
                        cudaMemcpyAsync(device->pack_device, device->pack_host, (size_t)piece.n_rows * row_bytes,
                                        cudaMemcpyHostToDevice, device->load));
        grid.y = (unsigned)piece.n_rows;
        lay_out<<<grid, 256, 0, device->load>>>(piece);
        if (r == 0)
            r = cuda_result(device, cudaGetLastError());
        if (r == 0)
            r = cuda_result(device, cudaStreamSynchronize(device->load));
    }
    cudaFree(scale);
    return r;
}

static int upload(struct device *device, const struct weight_desc *desc, struct weight *weight) {
    int r = 0;

    for (int e = 0; r == 0 && e < desc->n_stack; e++) {
        int first = 0;

        for (int i = 0; r == 0 && i < desc->n_parts; i++) {
            const struct weight_part *part = &desc->parts[(size_t)e * (size_t)desc->n_parts + (size_t)i];
            struct piece piece = {};

            piece.dtype = part->dtype;
            piece.n_cols = desc->n_cols;
            piece.is_gate_up = desc->form == WEIGHT_GATE_UP;
            piece.part = i;
            piece.dst_first = piece.is_gate_up ? 0 : first;
            piece.scale_cols = part->scale_cols;
            piece.n_steps = weight->n_steps;
            piece.dst = weight->data + (size_t)e * weight->matrix_bytes;
            r = upload_part(device, part, piece);
            first += part->n_rows;
        }
    }
    return r;
}

/* ---- checks ------------------------------------------------------------------------------------------------------- */

static bool part_is_valid(const struct weight_part *part, int n_cols) {
    if (part->data == NULL || part->n_rows <= 0 || (unsigned)part->dtype >= DTYPE_N)
        return false;
    if (part->row_bytes == 0 || part->row_bytes % dtype_bytes(part->dtype) != 0)
        return false;
    if (part->dtype != DTYPE_E4M3)
        return part->scale == NULL;
    return part->scale != NULL && (part->scale_dtype == DTYPE_F32 || part->scale_dtype == DTYPE_BF16) &&
           part->scale_cols >= (int)div_ceil((uint64_t)n_cols, SCALE_BLOCK);
}

/* Fills the shape of the weight. */
static int check(const struct weight_desc *desc, struct weight *weight) {
    uint64_t n_rows = 0, n_blocks, n_stages;

    if (desc->n_cols <= 0 || desc->n_cols > INT_MAX - 16 || desc->n_stack <= 0 || desc->n_parts <= 0 ||
        desc->parts == NULL)
        return -EINVAL;
    if (desc->form != WEIGHT_ROWS && desc->form != WEIGHT_GATE_UP)
        return -EINVAL;
    for (size_t e = 0; e < (size_t)desc->n_stack; e++)
        for (size_t i = 0; i < (size_t)desc->n_parts; i++) {
            const struct weight_part *part = &desc->parts[e * (size_t)desc->n_parts + i];

            if (!part_is_valid(part, desc->n_cols) || part->n_rows != desc->parts[i].n_rows)
                return -EINVAL;
        }
    for (int i = 0; i < desc->n_parts; i++)
        n_rows += (uint64_t)desc->parts[i].n_rows;
    n_blocks = div_ceil(n_rows, 16);
    if (desc->form == WEIGHT_GATE_UP) {
        if (desc->n_parts != 2 || desc->parts[0].n_rows != desc->parts[1].n_rows)
            return -EINVAL;
        n_blocks = div_ceil(n_rows / 2, 8);
    }
    if (n_rows > INT_MAX || n_blocks > INT_MAX / 32)
        return -EINVAL;
    weight->form = desc->form;
    weight->n_rows = (int)n_rows;
    weight->n_cols = desc->n_cols;
    weight->n_stack = desc->n_stack;
    weight->n_tiles = (int)div_ceil(n_blocks, TILE_BLOCKS);
    weight->n_steps = (int)div_ceil((uint64_t)desc->n_cols, 16);
    n_stages = div_ceil((uint64_t)weight->n_steps, STAGE_STEPS);
    if ((uint64_t)weight->n_tiles * n_stages > INT_MAX)
        return -EINVAL;
    weight->stretches = desc->n_stack == 1 && stretches_may_be_even(weight->n_tiles, (int)n_stages)
                            ? stretches_even(weight->n_tiles, (int)n_stages)
                            : stretches_whole(weight->n_tiles, (int)n_stages);
    weight->matrix_bytes = (size_t)weight->n_tiles * (size_t)weight->n_steps * STEP_BYTES;
    weight->bytes = weight->matrix_bytes * (size_t)desc->n_stack;
    return 0;
}

int cuda_weight_pack(struct device *device, const struct weight_desc *desc, struct weight **ret_weight) {
    struct weight *weight = (struct weight *)calloc(1, sizeof *weight);
    int r;

    if (weight == NULL)
        return -ENOMEM;
    r = check(desc, weight);
    if (r == 0)
        r = cuda_result(device, cudaMalloc((void **)&weight->data, weight->bytes));
    if (r == 0)
        r = cuda_result(device, cudaMemsetAsync(weight->data, 0, weight->bytes, device->load));
    if (r == 0)
        r = upload(device, desc, weight);
    if (r < 0) {
        cuda_weight_free(device, weight);
        return r;
    }
    *ret_weight = weight;
    return 0;
}

void cuda_weight_free(struct device *device, struct weight *weight) {
    (void)device;
    if (weight == NULL)
        return;
    cudaFree(weight->data);
    free(weight);
}

size_t cuda_weight_bytes(const struct weight *weight) {
    return weight->bytes;
}
