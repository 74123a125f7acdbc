#include "costs.h"

static const double WEIGHT = 0.2;      /* of the newest measurement */
static const double FORGET = 0.95;     /* of the price of a restore, with each refusal to read or to write */
static const double WORTH_SHARE = 0.7; /* of the time to compute it that reading may take, to be worth writing */
static const uint64_t GIVE_UP_AFTER_US = 500 * 1000;
static const double FIRST_US_PER_BYTE = 1e-3;

void costs_init(struct costs *costs, double us_per_token) {
    *costs = (struct costs){
        .us_per_token = us_per_token, .us_per_host_byte = FIRST_US_PER_BYTE, .us_per_disk_byte = FIRST_US_PER_BYTE};
}

static void approach(double *average, double us, double n) {
    if (n > 0)
        *average += WEIGHT * (us / n - *average);
}

void costs_fed(struct costs *costs, int n_tokens, uint64_t us) {
    approach(&costs->us_per_token, (double)us, n_tokens);
}

/* Of a restore from both what the host's share should have taken says nothing new. */
void costs_restored(struct costs *costs, struct costs_bytes bytes, uint64_t us) {
    double host_us = (double)bytes.host * costs->us_per_host_byte;

    if (bytes.disk == 0)
        approach(&costs->us_per_host_byte, (double)us, (double)bytes.host);
    else
        approach(&costs->us_per_disk_byte, (double)us > host_us ? (double)us - host_us : 0, (double)bytes.disk);
}

double costs_restore_us(const struct costs *costs, struct costs_bytes bytes) {
    return (double)bytes.host * costs->us_per_host_byte + (double)bytes.disk * costs->us_per_disk_byte;
}

bool costs_give_up(const struct costs *costs, int n_tokens, struct costs_bytes bytes, double progress, uint64_t us) {
    double planned = (double)us / costs_restore_us(costs, bytes); /* progress by now */

    if (us < GIVE_UP_AFTER_US || progress * 2 >= planned)
        return false;
    return progress == 0 || (double)us * (1 - progress) / progress > n_tokens * costs->us_per_token;
}

bool costs_prefer_restore(struct costs *costs, int n_tokens, struct costs_bytes bytes) {
    bool is_cheaper = costs_restore_us(costs, bytes) < n_tokens * costs->us_per_token;

    if (is_cheaper)
        return true;
    *(bytes.disk > 0 ? &costs->us_per_disk_byte : &costs->us_per_host_byte) *= FORGET;
    return false;
}

bool costs_worth_saving(struct costs *costs, int n_tokens, uint64_t bytes) {
    if ((double)bytes * costs->us_per_disk_byte < WORTH_SHARE * n_tokens * costs->us_per_token)
        return true;
    costs->us_per_disk_byte *= FORGET;
    return false;
}
