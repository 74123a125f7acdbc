#include "probe.h"

#include <errno.h>
#include <string.h>

int probe_chunk_rows_max(const struct probe_options *o, int n_ids) {
    int rows = o->n_splits > 0 ? 1 : min_int(PROBE_CHUNK_ROWS, n_ids);

    for (int i = 0; i < o->n_splits; i++)
        rows = max_int(rows, min_int(o->splits[i], n_ids));
    return rows;
}

int probe_open(struct probe *probe, const struct probe_options *o, int n_valid, int n_input_max,
               struct report *report) {
    int n_slots = max_int(o->n_parallel, 1), n_tokens_max = max_int(n_input_max, 1) + o->n_generate, r;
    int rows = max_int(probe_chunk_rows_max(o, n_input_max), 1);
    struct backend_options device = {.numeric = o->numeric, .n_threads = o->n_threads, .isa = o->isa};
    struct model_options model = {.target_folder = o->model,
                                  .draft_folder = o->draft,
                                  .dummy = o->dummy,
                                  .draft_causal = o->draft_causal,
                                  .block_size = o->block_size,
                                  .kv_dtype = o->kv_dtype,
                                  .draft_dtype = o->draft_dtype,
                                  .n_valid = n_valid,
                                  .n_slots = n_slots,
                                  .n_segs_max = n_slots,
                                  .n_rows_max = o->n_generate > 0 ? max_int(rows, PROBE_CHUNK_ROWS) : rows,
                                  .n_outs_max = o->logits_path ? rows : max_int(n_slots, BLOCK_ROWS_MAX),
                                  .n_steps_max = 2};

    *probe = (struct probe){.options = o};
    probe->backend = backend_find(o->backend);
    if (!probe->backend)
        return report_error(report, -EINVAL, "--backend %s: no such backend; this build knows cpu and cuda",
                            o->backend);
    r = probe->backend->open(&device, &probe->device);
    if (r != 0)
        return report_error(report, r, "--backend %s%s%s: the device cannot be opened: %s", o->backend,
                            o->isa ? " --isa " : "", o->isa ? o->isa : "", strerror(-r));
    r = probe->backend->stream_open(probe->device, STREAM_COMPUTE, &probe->stream);
    if (r != 0)
        report_error(report, r, "--backend %s: no compute stream: %s", o->backend, strerror(-r));
    if (r == 0)
        r = model_open(probe->backend, probe->device, &model, &probe->model, report);
    if (r == 0) {
        probe->info = model_info(probe->model);
        r = space_open(&probe->space, probe->backend, probe->device, probe->stream, probe->model, n_slots,
                       n_tokens_max);
        if (r != 0)
            report_error(report, r, "%s: %d seqs of %d tokens do not fit into memory", o->model, n_slots, n_tokens_max);
    }
    if (r != 0)
        probe_close(probe);
    return r;
}

void probe_close(struct probe *probe) {
    space_close(&probe->space);
    model_close(probe->model);
    if (probe->stream)
        probe->backend->stream_close(probe->stream);
    if (probe->device)
        probe->backend->close(probe->device);
    *probe = (struct probe){0};
}

int probe_feed(struct probe *probe, struct model_pass *pass, struct model_batch *input, int slot, const int *ids,
               int pos, int n_rows, int flags, bool all_outs) {
    int r;

    space_fill(input, slot, ids, pos, n_rows, flags, all_outs);
    r = model_pass_run(pass, probe->stream, input, NULL, NULL);
    return r != 0 ? r : backend_stream_wait(probe->backend, probe->stream);
}
