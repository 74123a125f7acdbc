#include "gen.h"

#include <assert.h>
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "conn.h"
#include "durable.h"
#include "gen_internal.h"

enum {
    INLINE_BYTES = 16 * 1024, /* of a request: what is tokenised on the loop, in well under a millisecond */
    HEARTBEAT_US = 4 * 1000 * 1000,
    RETRY_MS = 500,
    PROGRESS_US = 200 * 1000,  /* between two progress events at least */
    TEXT_BYTES_MAX = 64 << 20, /* of an answer */
    CALL_BYTES_MAX = 1 << 20,
    CALLS_BYTES_MAX = 16 << 20,
};

int gens_open(struct service *service, struct gens **ret_gens) {
    struct gens *gens = calloc(1, sizeof *gens);

    if (!gens)
        return -ENOMEM;
    gens->service = service;
    *ret_gens = gens;
    return 0;
}

void gens_close(struct gens *gens) {
    assert(!gens || gens->n == 0);
    free(gens);
}

int gens_count(const struct gens *gens) {
    return gens->n;
}

/* ---- the end -------------------------------------------------------------------------------------------------------- */

static void gen_free(struct gen *gen) {
    struct gens *gens = gen->service->gens;
    struct gen **at = &gens->first;

    while (*at != gen)
        at = &(*at)->next;
    *at = gen->next;
    gens->n--;
    gens->request_bytes -= request_bytes(gen->request);
    if (gen->session)
        gen->session->user = NULL;
    output_deinit(&gen->output);
    seq_free(gen->build.seq);
    request_free(gen->request);
    free(gen->logprobs);
    free(gen);
}

/* Never admitted: an error, and nothing is left of it. */
static void refuse_data(struct gen *gen, enum proto_code code, const char *message, const struct proto_number *data,
                        uint32_t n_data) {
    gen_send_error(gen, code, message, data, n_data);
    gen_free(gen);
}

static void refuse(struct gen *gen, enum proto_code code, const char *message) {
    refuse_data(gen, code, message, NULL, 0);
}

static void count_result(struct gen *gen, enum proto_finish finish) {
    struct metrics *m = &gen->service->metrics;
    const struct seq_stats *s = &gen->seq->stats;
    uint64_t now = service_now_us();

    metrics_add(m, METRIC_REQUESTS, (int)finish, 1);
    metrics_add(m, METRIC_PROMPT_TOKENS, 0, gen->seq->n_prompt);
    metrics_add(m, METRIC_CACHED_TOKENS, METRIC_TIER_DEVICE, s->n_cached - s->n_restored);
    metrics_add(m, METRIC_CACHED_TOKENS, METRIC_TIER_HOST, s->n_restored - s->n_from_disk);
    metrics_add(m, METRIC_CACHED_TOKENS, METRIC_TIER_DISK, s->n_from_disk);
    metrics_add(m, METRIC_RECOMPUTED_TOKENS, 0, s->n_recomputed);
    metrics_add(m, METRIC_DRAFT_STEPS, 0, s->n_steps);
    metrics_add(m, METRIC_DRAFT_PROPOSED, 0, s->n_proposed);
    metrics_add(m, METRIC_DRAFT_ACCEPTED, 0, gen->n_accepted);
    metrics_observe(m, METRIC_REQUEST_TIME, (double)(now - gen->received_us) * 1e-6);
    if (s->admitted_us)
        metrics_observe(m, METRIC_QUEUE_TIME, (double)(s->admitted_us - gen->received_us) * 1e-6);
    if (s->first_token_us) {
        metrics_observe(m, METRIC_TTFT, (double)(s->first_token_us - gen->received_us) * 1e-6);
        metrics_observe(m, METRIC_PREFILL_TIME, (double)(s->first_token_us - s->admitted_us) * 1e-6);
    }
    if (s->n_steps > 0)
        metrics_observe(m, METRIC_ACCEPT_LENGTH, (double)s->n_by_steps / s->n_steps);
    log_line(&gen->service->log, LOG_INFO, "request.done",
             "uid=%u id=%u finish=%s n_prompt=%d n_cached=%d n_completion=%u steps=%d accept_length=%.2f ms=%llu "
             "preempted=%d",
             (unsigned)gen->uid, gen->id, proto_finish_name(finish), gen->seq->n_prompt, s->n_cached,
             gen->output.n_completion, s->n_steps, s->n_steps > 0 ? (double)s->n_by_steps / s->n_steps : 0.0,
             (unsigned long long)(now - gen->received_us) / 1000, s->n_preempted);
}

/* The turn becomes part of the session, also one that was cut short: the client has its text. */
static void extend_session(struct gen *gen, enum proto_finish finish) {
    int n = gen->seq->n_prompt + (int)gen->output.n_completion;

    if (!gen->session || finish == PROTO_FINISH_ERROR || !gen->conn)
        return;
    if (sessions_extend(gen->service->sessions, gen->session, gen->seq->tokens, n) != 0) {
        gen_send_notice(gen, "session_not_kept",
                        "there is no memory for this turn; the session is as it was before it");
        return;
    }
    gen->session->is_parked = false;
    durable_keep(gen->service, gen->session, NULL);
}

/* Answers. `is_over`: the engine ended the seq itself. */
static void finish_gen(struct gen *gen, enum proto_finish finish, bool is_over) {
    int r = output_end(&gen->output);

    if (finish == PROTO_FINISH_STOP || finish == PROTO_FINISH_LENGTH || finish == PROTO_FINISH_CONTEXT) {
        if (r == OUTPUT_E_STOPPED)
            finish = PROTO_FINISH_STOP_STRING;
        else if (finish == PROTO_FINISH_STOP && output_calls(&gen->output)->array.n > 0)
            finish = PROTO_FINISH_TOOL_CALLS;
    }
    extend_session(gen, finish);
    gen_send_result(gen, finish);
    count_result(gen, finish);
    if (!is_over)
        engine_end(gen->service->pair.engine, gen->seq);
    gen_free(gen);
}

/* ---- what the engine tells ------------------------------------------------------------------------------------------ */

static void on_admitted(void *user) {
    (void)user;
}

static void on_progress(void *user, int n_done, int n_total) {
    struct gen *gen = user;

    if (n_done == n_total || service_now_us() - gen->last_event_us >= PROGRESS_US)
        gen_send_progress(gen, n_done, n_total);
}

static bool keep_logprobs(struct gen *gen, const struct logprob_row *rows, uint32_t n) {
    uint32_t have = gen->output.n_completion;

    if (have + n > gen->n_logprobs_room) {
        uint32_t n_room = 2 * gen->n_logprobs_room + n + 64;
        struct logprob_row *grown = realloc(gen->logprobs, n_room * sizeof *grown);

        if (!grown)
            return false;
        gen->logprobs = grown;
        gen->n_logprobs_room = n_room;
    }
    memcpy(gen->logprobs + have, rows, n * sizeof *rows);
    return true;
}

static bool is_stop_id(const struct seq *seq, int32_t id) {
    for (int i = 0; i < seq->n_stop_ids; i++)
        if (seq->stop_ids[i] == id)
            return true;
    return false;
}

static void count_tokens(struct gen *gen, uint32_t n) {
    struct metrics *m = &gen->service->metrics;
    uint64_t now = service_now_us();

    metrics_add(m, METRIC_GENERATED_TOKENS, 0, n);
    if (gen->last_token_us && n > 0)
        metrics_observe(m, METRIC_INTER_TOKEN, (double)(now - gen->last_token_us) * 1e-6 / n);
    gen->last_token_us = now;
}

static void on_tokens(void *user, const int32_t *tokens, int n, const struct logprob_row *logprobs) {
    struct gen *gen = user;
    struct output_block block = {.n = (uint32_t)n,
                                 .ids = tokens,
                                 .logprobs = logprobs,
                                 .ends_with_stop_id = is_stop_id(gen->seq, tokens[n - 1])};
    uint32_t n_used = 0;
    int r = 0;

    if (logprobs && !keep_logprobs(gen, logprobs, (uint32_t)n))
        r = -ENOMEM;
    if (r == 0)
        r = output_feed(&gen->output, &block, &n_used);
    gen->n_accepted += min_int(gen->seq->stats.n_accepted_now, (int)n_used);
    count_tokens(gen, n_used);
    if (r == OUTPUT_E_STOPPED)
        finish_gen(gen, PROTO_FINISH_STOP_STRING, false);
    else if (r == OUTPUT_E_FULL)
        finish_gen(gen, PROTO_FINISH_LENGTH, false);
    else if (r != 0)
        finish_gen(gen, PROTO_FINISH_ERROR, false);
}

static void on_end(void *user, enum seq_end why) {
    static const enum proto_finish FINISH[] = {
        [SEQ_END_STOP] = PROTO_FINISH_STOP,       [SEQ_END_LENGTH] = PROTO_FINISH_LENGTH,
        [SEQ_END_CONTEXT] = PROTO_FINISH_CONTEXT, [SEQ_END_NONFINITE] = PROTO_FINISH_ERROR,
        [SEQ_END_NO_SPACE] = PROTO_FINISH_ERROR,  [SEQ_END_DEVICE] = PROTO_FINISH_ERROR};
    struct gen *gen = user;

    if (why == SEQ_END_NONFINITE)
        gen_send_notice(gen, "not_finite", "the model produced no number; its weights or the device are broken");
    if (why == SEQ_END_NO_SPACE)
        gen_send_notice(gen, "no_space", "pinned sessions hold the pages that this request needs");
    finish_gen(gen, FINISH[why], true);
}

static const struct seq_calls CALLS = {on_admitted, on_progress, on_tokens, on_end};

/* ---- the beginning -------------------------------------------------------------------------------------------------- */

static void on_output(void *user, const struct output_event *event) {
    gen_send_output(user, event);
}

static int open_output(struct gen *gen) {
    const struct gen_params *p = gen->params;
    const struct pair *pair = &gen->service->pair;
    bool is_chat = p->prompt_kind == GEN_PROMPT_MESSAGES;
    struct output_config config = {.tokenizer = pair->tokenizer,
                                   .mode = is_chat ? OUTPUT_CHAT : OUTPUT_PLAIN,
                                   .marks = pair->marks,
                                   .in_reasoning = gen->build.in_reasoning,
                                   .tools = p->tools,
                                   .n_stops = p->n_stop,
                                   .stops = p->stop,
                                   .wants_ids = p->return_ids || p->logprobs >= 0,
                                   .text_bytes_max = TEXT_BYTES_MAX,
                                   .call_bytes_max = CALL_BYTES_MAX,
                                   .calls_bytes_max = CALLS_BYTES_MAX,
                                   .on_event = on_output,
                                   .user = gen};

    return output_init(&gen->output, &config);
}

static void refuse_length(struct gen *gen) {
    const struct pair *pair = &gen->service->pair;
    struct proto_number data[] = {{"n_prompt", gen->build.n_tokens}, {"n_context", pair->plan.max_context}};

    refuse_data(gen, PROTO_CONTEXT_LENGTH, gen->build.report.line, data, 2);
}

static void refuse_queue(struct gen *gen, int n_queued) {
    int n_max = gen->service->config.sched.queue_max, retry_ms = 100 + 50 * n_queued;
    struct proto_number data[] = {{"n_waiting", n_queued}, {"retry_ms", retry_ms}};
    struct report report;

    report_line(&report, "all places are taken and %d requests wait for one, sched.queue_max is %d; try again in %d ms",
                n_queued, n_max, retry_ms);
    refuse_data(gen, PROTO_BUSY, report.line, data, 2);
}

/* Of the requests that wait, those for which no place is free: the others are given one in this turn of the loop, or wait
 * for pages. Negative: so many more find a place. */
static int count_queued(const struct engine_view *view) {
    return view->n_waiting - view->n_free_places;
}

/* False: it was refused. What the turn generates is kept whole: it counts for the next one. */
static bool check_session_room(struct gen *gen) {
    const struct sessions *sessions = gen->service->sessions;
    int n_max = gen->service->config.limits.session_tokens_per_uid;
    struct proto_number data[] = {{"n_session_tokens", 0}, {"session_tokens_per_uid", n_max}};

    if (!gen->session || sessions_have_room(sessions, gen->uid, gen->build.seq->n_prompt - gen->session->n, n_max))
        return true;
    data[0].number = sessions_tokens(sessions, gen->uid);
    refuse_data(gen, PROTO_QUOTA,
                "with this turn the sessions of this user have more tokens than limits.session_tokens_per_uid allows; "
                "close one",
                data, 2);
    return false;
}

static void submit(struct gen *gen) {
    struct service *service = gen->service;
    struct seq *seq = gen->build.seq;
    struct engine_view view;
    struct found found = {0};
    int n_queued, r;

    if (!check_session_room(gen))
        return;
    engine_look(service->pair.engine, &view);
    n_queued = count_queued(&view);
    if (n_queued >= service->config.sched.queue_max) {
        refuse_queue(gen, max_int(n_queued, 0));
        return;
    }
    if (open_output(gen) != 0) {
        refuse(gen, PROTO_INTERNAL, "out of memory");
        return;
    }
    seq->is_parked = gen->conn && conn_is_congested(gen->conn);
    seq->calls = &CALLS;
    seq->user = gen;
    r = engine_submit(service->pair.engine, seq);
    if (r == ENGINE_E_BUSY) {
        refuse_queue(gen, max_int(n_queued, 0));
        return;
    }
    if (r != 0) {
        report_line(&gen->build.report,
                    "%d tokens of prompt and up to %d of answer need more pages than the %u of the device and %u of "
                    "host memory",
                    seq->n_prompt, seq->max_tokens, view.n_device_pages, view.n_host_pages);
        refuse_length(gen);
        return;
    }
    gen->build.seq = NULL;
    gen->seq = seq;
    gen->state = GEN_RUNNING;
    gen->n_queued = max_int(n_queued, 0);
    if (seq->cache != SEQ_CACHE_BYPASS)
        found = service_find(service, seq->keys, seq->tokens, min_int(seq->n_keys, (seq->n_prompt - 1) / PAGE_TOKENS));
    gen_send_accepted(gen, found);
}

/* The prompt is tokens now, or is refused. */
static void on_built(struct gen *gen) {
    struct gen_build *build = &gen->build;

    if (gen->is_unwanted)
        refuse(gen, gen->why, "ended before its prompt was cut into tokens");
    else if (build->result == PROMPT_E_TOO_LONG)
        refuse_length(gen);
    else if (build->result == PROMPT_E_REFUSED)
        refuse(gen, PROTO_BAD_PARAM, build->report.line);
    else if (build->result != 0)
        refuse(gen, PROTO_INTERNAL, strerror(-build->result));
    else if (gen->service->phase == SERVICE_DRAINING)
        refuse(gen, PROTO_SHUTTING_DOWN, "the daemon is stopping");
    else
        submit(gen);
}

static void on_work(uv_work_t *work) {
    struct gen *gen = work->data;

    gen_build_run(&gen->build);
}

static void on_worked(uv_work_t *work, int status) {
    struct gen *gen = work->data;

    (void)status; /* nobody calls uv_cancel */
    gen->is_out = false;
    on_built(gen);
}

/* Finds its session. False: it was refused. */
static bool take_session(struct gen *gen) {
    const struct gen_params *p = gen->params;
    struct sessions *sessions = gen->service->sessions;
    struct session *session;
    struct report report;

    gen->build.uid = sessions_namespace(sessions, gen->uid);
    if (p->session.n == 0)
        return sessions_root(sessions, gen->uid, &gen->build.root) == 0;
    session = sessions_find(sessions, gen->uid, p->session);
    if (!session) {
        enum proto_code code = durable_missing(gen->service, gen->uid, p->session, &report);

        refuse(gen, code, report.line);
        return false;
    }
    if (session->is_moving) {
        refuse(gen, PROTO_BUSY, "this session is being parked now; ask again when that is done");
        return false;
    }
    if (session->user) {
        refuse(gen, PROTO_BUSY, "another request uses this session; its turns come one after the other");
        return false;
    }
    session->user = gen;
    gen->session = session;
    gen->build.session = session;
    gen->build.root = session->root;
    return true;
}

static int count_of(const struct gens *gens, uid_t uid) {
    int n = 0;

    for (const struct gen *gen = gens->first; gen; gen = gen->next)
        n += gen->uid == uid;
    return n;
}

void gens_start(struct service *service, struct conn *conn, struct request *request) {
    struct gen *gen = calloc(1, sizeof *gen);
    struct gens *gens = service->gens;
    int quota = service->config.limits.requests_per_uid;

    if (!gen) {
        proto_error(&service->out, request->id, PROTO_INTERNAL, "out of memory");
        conn_respond(conn, &service->out);
        request_free(request);
        return;
    }
    gen->service = service;
    gen->conn = conn;
    gen->request = request;
    gen->params = request->gen;
    gen->uid = conn_uid(conn);
    gen->id = request->id;
    gen->received_us = gen->last_event_us = service_now_us();
    gen->deadline_us =
        request->gen->deadline_ms > 0 ? gen->received_us + (uint64_t)request->gen->deadline_ms * 1000 : 0;
    gen->next = gens->first;
    gen->number = ++gens->last_number;
    gens->first = gen;
    gens->n++;
    gens->request_bytes += request_bytes(request);
    gen->build.pair = &service->pair;
    gen->build.params = gen->params;
    gen->build.n_restore_points = service->config.kv.restore_points;
    if (getrandom(&gen->build.seed, sizeof gen->build.seed, GRND_NONBLOCK) < 0)
        gen->build.seed = gen->received_us;
    if (service->phase == SERVICE_DRAINING) {
        refuse(gen, PROTO_SHUTTING_DOWN, "the daemon is stopping");
        return;
    }
    if (quota > 0 && count_of(gens, gen->uid) > quota) {
        struct proto_number data[] = {{"requests_per_uid", quota}};

        refuse_data(gen, PROTO_QUOTA, "this user has as many requests running and waiting as one may have", data, 1);
        return;
    }
    if (gens->request_bytes > service->config.limits.pending_bytes && gens->n > 1) {
        struct proto_number data[] = {{"pending_bytes", (int64_t)service->config.limits.pending_bytes},
                                      {"retry_ms", RETRY_MS}};

        refuse_data(gen, PROTO_BUSY, "the requests that run and wait hold as much memory as they may; try again", data,
                    2);
        return;
    }
    if (!take_session(gen))
        return;
    if (request_bytes(request) <= INLINE_BYTES) {
        gen_build_run(&gen->build);
        on_built(gen);
        return;
    }
    gen->work.data = gen;
    gen->is_out = uv_queue_work(service->loop, &gen->work, on_work, on_worked) == 0;
    if (!gen->is_out)
        refuse(gen, PROTO_INTERNAL, "no worker takes the prompt");
}

/* ---- from outside --------------------------------------------------------------------------------------------------- */

/* `why_not`: the code for one that was never admitted. */
static void end_gen(struct gen *gen, enum proto_finish finish, enum proto_code why_not) {
    if (gen->state == GEN_RUNNING) {
        finish_gen(gen, finish, false);
    } else if (!gen->is_unwanted) { /* refused when it is back from its worker */
        gen->is_unwanted = true;
        gen->why = why_not;
    }
}

bool gens_cancel(struct gens *gens, struct conn *conn, uint32_t id) {
    for (struct gen *gen = gens->first; gen; gen = gen->next)
        if (gen->conn == conn && gen->id == id && !gen->is_unwanted) {
            end_gen(gen, PROTO_FINISH_CANCELLED, PROTO_CANCELLED);
            return true;
        }
    return false;
}

bool gens_cancel_number(struct gens *gens, uid_t uid, bool of_all, uint64_t number) {
    for (struct gen *gen = gens->first; gen; gen = gen->next)
        if (gen->number == number && (of_all || gen->uid == uid) && !gen->is_unwanted) {
            end_gen(gen, PROTO_FINISH_CANCELLED, PROTO_CANCELLED);
            return true;
        }
    return false;
}

void gens_conn_slow(struct gens *gens, struct conn *conn) {
    for (struct gen *gen = gens->first, *next; gen; gen = next) {
        next = gen->next;
        if (gen->conn == conn)
            end_gen(gen, PROTO_FINISH_SLOW_CLIENT, PROTO_SLOW_CLIENT);
    }
}

void gens_conn_congested(struct gens *gens, struct conn *conn, bool is_congested) {
    for (struct gen *gen = gens->first; gen; gen = gen->next)
        if (gen->conn == conn && gen->state == GEN_RUNNING)
            gen->seq->is_parked = is_congested;
}

void gens_conn_closed(struct gens *gens, struct conn *conn) {
    for (struct gen *gen = gens->first, *next; gen; gen = next) {
        next = gen->next;
        if (gen->conn != conn)
            continue;
        gen->conn = NULL;
        end_gen(gen, PROTO_FINISH_CANCELLED, PROTO_CANCELLED);
    }
}

void gens_tick(struct gens *gens) {
    uint64_t now = service_now_us();

    for (struct gen *gen = gens->first, *next; gen; gen = next) {
        next = gen->next;
        if (gen->deadline_us && now >= gen->deadline_us)
            end_gen(gen, PROTO_FINISH_DEADLINE, PROTO_DEADLINE);
        else if (gen->state == GEN_RUNNING && !gen->last_token_us && now - gen->last_event_us >= HEARTBEAT_US)
            gen_send_progress(gen, min_int(gen->seq->len, gen->seq->n_prompt), gen->seq->n_prompt);
    }
}

void gens_end_all(struct gens *gens, enum proto_finish why) {
    for (struct gen *gen = gens->first, *next; gen; gen = next) {
        next = gen->next;
        end_gen(gen, why, PROTO_SHUTTING_DOWN);
    }
}

static const char *state_name(const struct gen *gen) {
    if (gen->state == GEN_BUILDING)
        return "tokenize";
    if (gen->seq->is_parked && gen->seq->state != SEQ_FEEDING)
        return "parked"; /* with its place and pages, or without them when others need them */
    switch (gen->seq->state) {
    case SEQ_FEEDING:
        return "prefill";
    case SEQ_DECODING:
        return "decode";
    case SEQ_WAITING:
    case SEQ_PREEMPTED:
    case SEQ_LEAVING:
        break;
    }
    return gen->seq->is_restoring ? "restore" : "waiting";
}

void gens_write_list(const struct gens *gens, uid_t uid, bool of_all, struct wire_out *out) {
    uint32_t n = 0;

    for (const struct gen *gen = gens->first; gen; gen = gen->next)
        n += of_all || gen->uid == uid;
    wire_array(out, n);
    for (const struct gen *gen = gens->first; gen; gen = gen->next) {
        if (!of_all && gen->uid != uid)
            continue;
        wire_map(out, 8);
        wire_key(out, "gen");
        wire_uint(out, gen->number);
        wire_key(out, "id");
        wire_uint(out, gen->id);
        wire_key(out, "uid");
        wire_uint(out, gen->uid);
        wire_key(out, "state");
        wire_cstr(out, state_name(gen));
        wire_key(out, "session");
        wire_str(out, gen->params->session);
        wire_key(out, "n_prompt");
        wire_int(out, gen->seq ? gen->seq->n_prompt : 0);
        wire_key(out, "n_tokens");
        wire_uint(out, gen->output.n_completion);
        wire_key(out, "age_ms");
        wire_uint(out, (service_now_us() - gen->received_us) / 1000);
    }
}
