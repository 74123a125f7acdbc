/* fixture: checkpoints for tests: a temporary folder, and safetensors files as lists of tensors that a test may read,
 * bend and write. */
#pragma once
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include "base.h"
#include "weights.h"
#include "report.h"

struct fixture_tensor {
    char name[201];
    char dtype[16];
    int n_dims;
    uint64_t dims[8];
    size_t bytes;
    uint8_t *data;
};

struct fixture {
    char folder[240];
    struct fixture_tensor *tensors; /* [n_tensors] of the file being made */
    int n_tensors, n_tensors_max;
};

void fixture_open(struct fixture *f);
void fixture_close(struct fixture *f); /* removes the folder */

/* "FOLDER/NAME" in one of a few static buffers. */
const char *fixture_path(const struct fixture *f, const char *name);
void fixture_write(const struct fixture *f, const char *name, const void *data, size_t n);
/* The text of a file anywhere, with a zero behind it; free(). */
char *fixture_read(const char *path, size_t *ret_n);

/* Adds every tensor of a safetensors file to the list. */
void fixture_load(struct fixture *f, const char *path);
/* Adds all model*.safetensors of a folder. */
void fixture_load_folder(struct fixture *f, const char *folder);
/* Adds one filled with small values. dims end with 0. */
struct fixture_tensor *fixture_add(struct fixture *f, const char *dtype, const uint64_t *dims, const char *name);
struct fixture_tensor *fixture_find(struct fixture *f, const char *name); /* fails the test if absent */
void fixture_drop(struct fixture *f, const char *name);
void fixture_clear(struct fixture *f);
/* Writes tensors [begin, begin + n) as a safetensors file; pad: extra spaces behind the header. */
void fixture_save_part(const struct fixture *f, const char *file, int begin, int n, int pad);
void fixture_save(const struct fixture *f); /* all, as model.safetensors */

/* Which of the ways of storing one network. */
struct fixture_style {
    const char *dtype;       /* of matrices that are not quantised, and of vectors */
    bool fp8;                /* projections are F8_E4M3 with scales */
    const char *scale_dtype; /* "F32" or "BF16" */
    bool per_expert;         /* experts apart, not fused */
    bool tied;               /* no lm_head.weight */
};
/* Every tensor that such a network has, filled by position. */
void fixture_add_target(struct fixture *f, const struct qwen_config *config, const struct fixture_style *style);

/* A small network of two layers that two ranks can share, with widths that are no multiples of 128. */
struct qwen_config fixture_odd_config(bool moe);

/* Same shape, same values. */
void assert_same_tensor(const struct tensor *a, const struct tensor *b);
/* The report is one line that has every one of the NULL-terminated parts. */
void assert_report(const struct report *report, ...);
