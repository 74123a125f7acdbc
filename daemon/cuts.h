/* cuts: where restore points of a prompt are wanted. A prefill piece ends at each, so that the state there exists exactly.
 * Pure. */
#pragma once

struct cuts_prompt {
    int n;        /* tokens of the prompt */
    int n_system; /* of the turn with system text and tools, shared by many conversations; 0: none */
    int n_head; /* before the head of the assistant's turn: the next turn's prompt has these tokens too; 0: not known */
    int n_max;  /* restore points at most */
};

enum { CUTS_SPACING_TOKENS = 4096 }; /* first distance of the others from the end; each next one is twice as far on */

/* Ascending, each a multiple of 64, in this order of precedence: the last one below n, the one before n_head, the one
 * before n_system, n itself if it is a multiple of 64 (of no use to this prompt again, but to what goes on from it: decoding
 * leaves none before the next multiple), then back from the end at growing distances. Returns how many; ret_cuts has room
 * for n_max. */
int cuts_find(const struct cuts_prompt *prompt, int *ret_cuts);
