/* costs: whether bringing a prefix back is faster than computing it again, by what both took lately. Pure numbers. */
#pragma once
#include <stdbool.h>
#include <stdint.h>

struct costs {
    double us_per_token;     /* of prompts that were computed alone */
    double us_per_host_byte; /* of restores, waiting included */
    double us_per_disk_byte; /* of what was read from disk first, on its whole way */
};

struct costs_bytes {
    uint64_t host, disk; /* where they lie */
};

/* us_per_token: a first guess. Restores are first taken to reach 1 GB/s from either. */
void costs_init(struct costs *costs, double us_per_token);
void costs_fed(struct costs *costs, int n_tokens, uint64_t us);
void costs_restored(struct costs *costs, struct costs_bytes bytes, uint64_t us);
/* Each refusal makes restores look a little cheaper, so that they are measured again some day. */
bool costs_prefer_restore(struct costs *costs, int n_tokens, struct costs_bytes bytes);
double costs_restore_us(const struct costs *costs, struct costs_bytes bytes);
/* Of a restore that has been on its way for so long and come so far (0 to 1): computing would be done sooner, and what was
 * planned is off by more than a factor of two. */
bool costs_give_up(const struct costs *costs, int n_tokens, struct costs_bytes bytes, double progress, uint64_t us);
/* Whether reading so much back would save a good part of the time to compute it. Refusals count here too: where nothing is
 * written, nothing is read that would tell how fast the disk is by now. */
bool costs_worth_saving(struct costs *costs, int n_tokens, uint64_t bytes);
