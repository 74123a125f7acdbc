/* gen_message: what a generation tells its client. */
#include "conn.h"
#include "gen_internal.h"

static void send_event(struct gen *gen) {
    struct service *service = gen->service;

    if (conn_send(gen->conn, &service->out) != 0) {
        log_line(&service->log, LOG_WARN, "gen.event_lost", "conn=%llu id=%u",
                 (unsigned long long)conn_serial(gen->conn), gen->id);
        wire_out_clear(&service->out);
    }
    if (conn_is_congested(gen->conn) && !gen->seq->is_parked)
        gens_conn_congested(service->gens, gen->conn, true);
}

static bool begin_event(struct gen *gen, const char *type, uint32_t n_more) {
    if (!gen->conn || !gen->params->stream)
        return false;
    proto_gen_event_begin(&gen->service->out, gen->id, gen->n_events++, type, n_more);
    gen->last_event_us = service_now_us();
    return true;
}

void gen_send_accepted(struct gen *gen, struct found found) {
    struct wire_out *out = &gen->service->out;

    if (!begin_event(gen, "accepted", 3))
        return;
    wire_key(out, "n_prompt");
    wire_int(out, gen->seq->n_prompt);
    wire_key(out, "cached");
    service_write_tiers(out, found);
    wire_key(out, "queue");
    wire_int(out, gen->n_queued);
    send_event(gen);
}

void gen_send_progress(struct gen *gen, int n_done, int n_total) {
    struct wire_out *out = &gen->service->out;

    if (!begin_event(gen, "progress", 2))
        return;
    wire_key(out, "done");
    wire_int(out, n_done);
    wire_key(out, "total");
    wire_int(out, n_total);
    send_event(gen);
}

void gen_send_notice(struct gen *gen, const char *reason, const char *message) {
    struct wire_out *out = &gen->service->out;

    if (!begin_event(gen, "notice", 2))
        return;
    wire_key(out, "reason");
    wire_cstr(out, reason);
    wire_key(out, "message");
    wire_cstr(out, message);
    send_event(gen);
}

/* ---- tokens --------------------------------------------------------------------------------------------------------- */

static void write_logprob(struct wire_out *out, int32_t id, float logprob) {
    wire_key(out, "id");
    wire_int(out, id);
    wire_key(out, "logprob");
    wire_float(out, (double)logprob);
}

static void write_logprobs(struct wire_out *out, const int32_t *ids, const struct logprob_row *rows, uint32_t n) {
    wire_key(out, "logprobs");
    wire_array(out, n);
    for (uint32_t i = 0; i < n; i++) {
        wire_map(out, 3);
        write_logprob(out, ids[i], rows[i].chosen);
        wire_key(out, "top");
        wire_array(out, (uint32_t)rows[i].n_top);
        for (int k = 0; k < rows[i].n_top; k++) {
            wire_map(out, 2);
            write_logprob(out, rows[i].top_id[k], rows[i].top[k]);
        }
    }
}

static const char *channel_name(enum output_channel channel) {
    return channel == OUTPUT_CONTENT ? "content" : channel == OUTPUT_REASONING ? "reasoning" : "tool";
}

static void send_delta(struct gen *gen, const struct output_event *event) {
    struct wire_out *out = &gen->service->out;
    bool has_ids = gen->params->return_ids, has_logprobs = event->logprobs != NULL;

    if (event->text.n == 0 && (event->n_ids == 0 || (!has_ids && !has_logprobs)))
        return;
    if (!begin_event(gen, "delta", 2 + has_ids + has_logprobs))
        return;
    wire_key(out, "text");
    wire_str(out, event->text);
    wire_key(out, "channel");
    wire_cstr(out, channel_name(event->channel));
    if (has_ids) {
        wire_key(out, "ids");
        wire_ids(out, event->ids, event->n_ids);
    }
    if (has_logprobs)
        write_logprobs(out, event->ids, event->logprobs, event->n_ids);
    send_event(gen);
}

void gen_send_output(struct gen *gen, const struct output_event *event) {
    struct wire_out *out = &gen->service->out;

    if (event->kind == OUTPUT_DELTA) {
        send_delta(gen, event);
        return;
    }
    if (!begin_event(gen, "tool_call", 3))
        return;
    wire_key(out, "index");
    wire_uint(out, event->call_idx);
    wire_key(out, "name");
    wire_str(out, event->text);
    wire_key(out, "arguments");
    wire_value(out, event->arguments);
    send_event(gen);
}

/* ---- the response --------------------------------------------------------------------------------------------------- */

static void write_message(struct wire_out *out, const struct output *output) {
    const struct value *calls = output_calls(output);
    struct span reasoning = output_reasoning(output);
    bool has_calls = calls->array.n > 0;

    wire_key(out, "message");
    wire_map(out, 1 + (reasoning.n > 0) + has_calls);
    wire_key(out, "content");
    wire_str(out, output_content(output));
    if (reasoning.n > 0) {
        wire_key(out, "reasoning");
        wire_str(out, reasoning);
    }
    if (has_calls) {
        wire_key(out, "tool_calls");
        wire_value(out, calls);
    }
}

static void write_usage(struct wire_out *out, const struct gen *gen) {
    const struct seq_stats *stats = &gen->seq->stats;

    wire_key(out, "usage");
    wire_map(out, 6);
    wire_key(out, "prompt");
    wire_int(out, gen->seq->n_prompt);
    wire_key(out, "completion");
    wire_uint(out, gen->output.n_completion);
    wire_key(out, "reasoning");
    wire_uint(out, gen->output.n_reasoning);
    wire_key(out, "cached");
    service_write_tiers(out, (struct found){stats->n_cached - stats->n_restored, stats->n_restored - stats->n_from_disk,
                                            stats->n_from_disk});
    wire_key(out, "recomputed");
    wire_int(out, stats->n_recomputed);
    wire_key(out, "draft");
    wire_map(out, 3);
    wire_key(out, "steps");
    wire_int(out, stats->n_steps);
    wire_key(out, "proposed");
    wire_int(out, stats->n_proposed);
    wire_key(out, "accepted");
    wire_int(out, gen->n_accepted);
}

static void write_ms(struct wire_out *out, const char *key, uint64_t from_us, uint64_t to_us) {
    wire_key(out, key);
    wire_float(out, to_us > from_us ? (double)(to_us - from_us) / 1000 : 0);
}

/* A stage that was never reached took no time; one that was not left lasted until now. */
static void write_timings(struct wire_out *out, const struct gen *gen) {
    const struct seq_stats *s = &gen->seq->stats;
    uint64_t now = service_now_us();
    uint64_t admitted = s->admitted_us ? s->admitted_us : now, first = s->first_token_us ? s->first_token_us : now;

    wire_key(out, "timings");
    wire_map(out, 5);
    write_ms(out, "queue_ms", gen->received_us, admitted);
    write_ms(out, "restore_ms", s->restore_us, s->restored_us);
    write_ms(out, "prefill_ms", admitted, first);
    write_ms(out, "decode_ms", first, now);
    write_ms(out, "ttft_ms", gen->received_us, first);
}

static void respond(struct gen *gen) {
    if (conn_respond(gen->conn, &gen->service->out) == 0)
        return;
    /* An answer that is too large or has no memory: the client still gets its one response. */
    wire_out_clear(&gen->service->out);
    proto_error(&gen->service->out, gen->id, PROTO_INTERNAL, "the response could not be built: out of memory");
    conn_respond(gen->conn, &gen->service->out);
}

void gen_send_result(struct gen *gen, enum proto_finish finish) {
    struct wire_out *out = &gen->service->out;
    const struct output *o = &gen->output;
    bool has_ids = gen->params->return_ids, has_match = finish == PROTO_FINISH_STOP_STRING;
    bool has_logprobs = gen->params->logprobs >= 0;

    if (!gen->conn)
        return;
    proto_result_begin(out, gen->id);
    wire_map(out, 5 + has_ids + has_match + has_logprobs);
    wire_key(out, "text");
    wire_str(out, output_content(o));
    write_message(out, o);
    if (has_ids) {
        wire_key(out, "ids");
        wire_ids(out, o->ids.ids, o->n_completion);
    }
    if (has_logprobs)
        write_logprobs(out, o->ids.ids, gen->logprobs, o->n_completion);
    wire_key(out, "finish_reason");
    wire_cstr(out, proto_finish_name(finish));
    if (has_match) {
        wire_key(out, "stop_match");
        wire_str(out, gen->params->stop[o->stop_idx]);
    }
    write_usage(out, gen);
    write_timings(out, gen);
    respond(gen);
}

void gen_send_error(struct gen *gen, enum proto_code code, const char *message, const struct proto_number *data,
                    uint32_t n_data) {
    metrics_add(&gen->service->metrics, METRIC_ERRORS, (int)code, 1);
    if (!gen->conn)
        return;
    proto_error_data(&gen->service->out, gen->id, code, message, data, n_data);
    respond(gen);
}
