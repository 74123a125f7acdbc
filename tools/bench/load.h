/* load: clients that keep a daemon busy. One thread; each client is a connection that asks its next question as soon as the
 * last one is answered. Questions are of two kinds, in turn: one fact out of eight notes (a prompt of some 140 tokens, an
 * answer of some 15) and counting (a short prompt, an answer of up to LOAD_ANSWER_TOKENS). No two of a run are alike, so
 * that no prompt is found in the cache. Knows nothing of the daemon but its socket. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { LOAD_CLIENTS_MAX = 256, LOAD_ANSWER_TOKENS = 128 };

struct load_options {
    const char *socket;
    int n_clients;
    double warm_s, seconds; /* what happens in the first warm_s is not measured, then `seconds` are */
    uint32_t first_question;
};

struct load_samples { /* seconds */
    double *values;   /* owned */
    size_t n, n_room;
};

struct load_result {
    /* In the measured time; the first tokens are those of requests sent in it. */
    double tokens_per_s;
    struct load_samples ttft;        /* from sending the request to the first delta */
    struct load_samples inter_token; /* a delta of n tokens after g seconds is n samples of g / n */
    struct load_samples gap;         /* between two deltas: what a reader sees */
    /* Of all requests, from the first to the last answer. */
    uint64_t n_requests, n_tokens, n_prompt, n_cached, n_steps, n_proposed;
    double loop_cpu_s;
    uint32_t next_question;
};

/* 0, or negative errno after a line on stderr; in both cases the result is to be freed. */
int load_run(const struct load_options *options, struct load_result *ret_result);
void load_result_free(struct load_result *result);

int load_add(struct load_samples *samples, double value); /* -ENOMEM */
/* p in [0, 1]; 0 without samples. Sorts. */
double load_percentile(struct load_samples *samples, double p);
