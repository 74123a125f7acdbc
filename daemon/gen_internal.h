/* gen_internal: what the files of gen share. gen.c: its life; gen_build.c: a request becomes a seq; gen_message.c: events
 * and the response. */
#pragma once
#include <uv.h>

#include "gen.h"

struct gens {
    struct service *service;
    struct gen *first;
    size_t request_bytes; /* of all of them */
    int n;
    uint64_t last_number;
};

enum gen_state { GEN_BUILDING, GEN_RUNNING };

/* The prompt on its way to tokens; pure, so that a worker may do it. */
struct gen_build {
    const struct pair *pair;
    const struct gen_params *params;
    const struct session *session; /* its tokens come first; NULL: none */
    struct kv_key root;
    uint32_t uid; /* of the namespace */
    int n_restore_points;
    uint64_t seed; /* for a request that gives none */
    int result;    /* 0, PROMPT_E_*, or a negative errno */
    int n_tokens;  /* of the prompt, also with PROMPT_E_TOO_LONG */
    bool in_reasoning;
    struct seq *seq;
    struct report report;
};

struct gen {
    struct gen *next;
    struct service *service;
    struct conn *conn; /* NULL: gone */
    struct request *request;
    const struct gen_params *params;
    uid_t uid;
    uint32_t id;     /* the client's, of its connection */
    uint64_t number; /* the daemon's, from 1 */
    uint64_t n_events;
    enum gen_state state;
    struct session *session;
    uv_work_t work;
    bool is_out;      /* with a worker */
    bool is_unwanted; /* while out: to be refused with `why` when it is back */
    enum proto_code why;
    struct gen_build build;
    struct seq *seq; /* RUNNING: the engine's */
    struct output output;
    struct logprob_row *logprobs; /* of all tokens, if asked for */
    uint32_t n_logprobs_room;
    uint64_t received_us, deadline_us, last_event_us, last_token_us; /* deadline 0: none */
    int n_accepted;                                                  /* tokens of the answer that were drafts */
    int n_queued;                                                    /* that waited for a place before it */
};

void gen_build_run(struct gen_build *build);

/* Events; each goes to the conn if there is one and it streams. */
void gen_send_accepted(struct gen *gen, struct found found);
void gen_send_progress(struct gen *gen, int n_done, int n_total);
void gen_send_notice(struct gen *gen, const char *reason, const char *message);
void gen_send_output(struct gen *gen, const struct output_event *event);
/* The one response. */
void gen_send_result(struct gen *gen, enum proto_finish finish);
void gen_send_error(struct gen *gen, enum proto_code code, const char *message, const struct proto_number *data,
                    uint32_t n_data);
