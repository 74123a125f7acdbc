#include "costs.h"

static const double WEIGHT = 0.2;  /* of the newest measurement */
static const double FORGET = 0.95; /* of the price of a restore, with each refusal */
static const double FIRST_US_PER_BYTE = 1e-3;

void costs_init(struct costs *costs, double us_per_token) {
    *costs = (struct costs){.us_per_token = us_per_token, .us_per_byte = FIRST_US_PER_BYTE};
}

static void approach(double *average, uint64_t us, double n) {
    if (n > 0)
        *average += WEIGHT * ((double)us / n - *average);
}

void costs_fed(struct costs *costs, int n_tokens, uint64_t us) {
    approach(&costs->us_per_token, us, n_tokens);
}

void costs_restored(struct costs *costs, uint64_t bytes, uint64_t us) {
    approach(&costs->us_per_byte, us, (double)bytes);
}

bool costs_prefer_restore(struct costs *costs, int n_tokens, uint64_t bytes) {
    bool is_cheaper = (double)bytes * costs->us_per_byte < n_tokens * costs->us_per_token;

    if (!is_cheaper)
        costs->us_per_byte *= FORGET;
    return is_cheaper;
}
