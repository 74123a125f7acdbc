/* chats: a made-up trace of conversations, replayed against a daemon: each is a session of its own that begins with the same
 * system text, goes on with notes of its own and asks turn after turn, with time to think in between. The same seed gives
 * the same trace, so runs with and without tiers can be compared. One thread. */
#pragma once
#include <stdint.h>

#include "load.h"

enum { CHATS_MAX = 256 };

struct chats_options {
    const char *socket;
    int n_chats, n_turns;
    double think_s; /* on average, between an answer and the next question */
};

struct chats_figures {
    struct load_samples ttft;          /* seconds, of all turns */
    double seconds;                    /* of the whole trace */
    uint64_t n_answers, n_tokens;      /* of the answers */
    uint64_t n_prompt;                 /* tokens of all prompts, with what came before in their sessions */
    uint64_t n_device, n_host, n_disk; /* of them, not computed again */
    uint64_t n_seen;       /* of them, in the turn before of their session; of first ones, what was not computed */
    uint64_t n_recomputed; /* of them, held in some tier and computed again all the same */
};

/* 0, or negative errno after a line on stderr; in both cases the figures are to be freed. */
int chats_run(const struct chats_options *options, struct chats_figures *ret_figures);
void chats_figures_free(struct chats_figures *figures);
