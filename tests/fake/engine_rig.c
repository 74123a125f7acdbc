#include "fake/engine_rig.h"

#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "store.h"

enum { STUCK_MS = 60000 };

static const char TARGET[] =
    "{\"architectures\":[\"Qwen3_5ForCausalLM\"],\"vocab_size\":64,\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":4,\"num_attention_heads\":1,\"num_key_value_heads\":1,\"max_position_embeddings\":4096,"
    "\"rms_norm_eps\":1e-6,\"tie_word_embeddings\":true,\"rope_parameters\":{\"rope_type\":\"default\","
    "\"rope_theta\":10000000.0,\"partial_rotary_factor\":0.25,\"mrope_section\":[11,11,10],"
    "\"mrope_interleaved\":true},\"head_dim\":256,\"linear_conv_kernel_dim\":4,\"linear_key_head_dim\":128,"
    "\"linear_value_head_dim\":128,\"linear_num_key_heads\":1,\"linear_num_value_heads\":1,"
    "\"layer_types\":[\"linear_attention\",\"full_attention\",\"linear_attention\",\"full_attention\"],"
    "\"eos_token_id\":1,\"model_type\":\"qwen3_5_text\","
    "\"dtype\":\"bfloat16\"}";

static const char DRAFT[] =
    "{\"architectures\":[\"DFlashDraftModel\"],\"model_type\":\"qwen3\",\"hidden_size\":64,\"intermediate_size\":96,"
    "\"num_hidden_layers\":2,\"num_attention_heads\":1,\"num_key_value_heads\":1,\"head_dim\":128,\"vocab_size\":64,"
    "\"rms_norm_eps\":1e-6,\"hidden_act\":\"silu\",\"attention_bias\":false,\"max_position_embeddings\":4096,"
    "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":10000000.0},"
    "\"layer_types\":[\"sliding_attention\",\"full_attention\"],\"block_size\":8,\"num_target_layers\":4,"
    "\"tie_word_embeddings\":true,\"dtype\":\"bfloat16\",\"dflash_config\":{\"target_layer_ids\":[0,1],"
    "\"mask_token_id\":63},\"sliding_window\":100,\"use_sliding_window\":true}";

static uint64_t stopped_us; /* 0: the clock is the machine's */

static uint64_t now_us(void) {
    struct timespec t;

    if (stopped_us != 0)
        return stopped_us;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

void engine_rig_stop_clock(bool stop) {
    stopped_us = stop ? now_us() : 0;
}

void engine_rig_pass(uint64_t us) {
    ENGINE_RIG_CHECK(stopped_us != 0);
    stopped_us += us;
}

static void write_config(char *folder, const char *text) {
    char path[64];
    FILE *file;

    ENGINE_RIG_CHECK(mkdtemp(folder) != NULL);
    snprintf(path, sizeof path, "%s/config.json", folder);
    file = fopen(path, "w");
    ENGINE_RIG_CHECK(file != NULL && fputs(text, file) >= 0 && fclose(file) == 0);
}

static void remove_config(const char *folder) {
    char path[64];

    snprintf(path, sizeof path, "%s/config.json", folder);
    ENGINE_RIG_CHECK(unlink(path) == 0 && rmdir(folder) == 0);
}

void engine_rig_pair_open(struct engine_rig_pair *pair, const struct backend *backend,
                          const struct backend_options *options, int n_places_max, int n_rows_max) {
    char target[] = "/tmp/spillway-test-XXXXXX", draft[] = "/tmp/spillway-test-XXXXXX";
    struct model_options model = {.target_folder = target,
                                  .draft_folder = draft,
                                  .dummy = true,
                                  .kv_dtype = DTYPE_F32,
                                  .draft_dtype = DTYPE_F32,
                                  .n_valid = ENGINE_RIG_IDS,
                                  .n_slots = n_places_max,
                                  .n_segs_max = n_places_max,
                                  .n_outs_max = n_places_max,
                                  .n_rows_max = n_rows_max,
                                  .n_steps_max = 8};
    struct report report = {""};

    *pair = (struct engine_rig_pair){.backend = backend};
    ENGINE_RIG_CHECK(backend->open(options, &pair->device) == 0);
    write_config(target, TARGET);
    write_config(draft, DRAFT);
    if (model_open(backend, pair->device, &model, &pair->model, &report) != 0)
        fprintf(stderr, "%s\n", report.line);
    ENGINE_RIG_CHECK(pair->model != NULL);
    remove_config(target);
    remove_config(draft);
}

void engine_rig_pair_close(struct engine_rig_pair *pair) {
    model_close(pair->model);
    pair->backend->close(pair->device);
}

struct engine_rig_options engine_rig_roomy(int n_places, int n_context) {
    int n_pages = n_places * (n_context / PAGE_TOKENS + 1) * 2;

    return (struct engine_rig_options){.n_places = n_places,
                                       .n_context = n_context,
                                       .chunk_rows = 128,
                                       .batch_rows = 256,
                                       .n_seqs_max = 64,
                                       .n_slots = {[KV_TARGET_FULL] = n_pages,
                                                   [KV_TARGET_STATE] = 8 * n_places,
                                                   [KV_DRAFT_FULL] = n_pages,
                                                   [KV_DRAFT_SLIDING] = n_pages}};
}

struct kv_store *engine_rig_store_open(const struct engine_rig_pair *pair, const struct engine_rig_options *options) {
    const struct model_info *info = model_info(pair->model);
    struct kv_store_options store = {.backend = pair->backend,
                                     .device = pair->device,
                                     .sliding_window_tokens = ENGINE_RIG_WINDOW,
                                     .n_records_max = (uint32_t)options->n_slots[KV_TARGET_FULL]};
    struct kv_store *opened;

    for (int g = 0; g < KV_GROUP_N; g++) {
        store.group[g].slot_bytes = g == KV_TARGET_STATE ? info->state.slot_bytes : info->groups[g].page_bytes;
        store.group[g].n_slots = (uint32_t)options->n_slots[g] + (g != KV_TARGET_STATE);
    }
    ENGINE_RIG_CHECK(kv_store_open(&store, &opened) == 0);
    return opened;
}

static int put_work(void *user, struct kv_work_item *item) {
    struct engine_rig *rig = user;

    ENGINE_RIG_CHECK(rig->n_works < ENGINE_RIG_WORKS_MAX);
    rig->works[rig->n_works++] = item;
    return 0;
}

static void open_below(struct engine_rig *rig) {
    const struct model_info *info = model_info(rig->pair->model);
    uint32_t n_pages_max = (uint32_t)div_ceil((uint64_t)rig->options.n_context, PAGE_TOKENS);
    struct kv_shelf_options shelf = {
        .backend = rig->pair->backend, .device = rig->pair->device, .alignment = FORMAT_ALIGN_MIN};
    struct kv_spill_options spill = {
        .store = rig->store, .work = {put_work, rig}, .n_jobs = ENGINE_RIG_WORKS_MAX, .n_pages_max = n_pages_max};
    struct kv_restores_options restores = {
        .store = rig->store, .now_us = now_us, .n_restores = 3, .n_pages_max = n_pages_max};

    copies_init(&rig->copies, rig->thread);
    if (rig->options.n_below[KV_TARGET_FULL] == 0)
        return;
    for (int g = 0; g < KV_GROUP_N; g++) {
        shelf.group[g].payload_bytes = g == KV_TARGET_STATE ? info->state.slot_bytes : info->groups[g].page_bytes;
        shelf.group[g].n_slots = (uint32_t)rig->options.n_below[g];
    }
    ENGINE_RIG_CHECK(kv_shelf_open(&shelf, &rig->shelf) == 0);
    spill.shelf = restores.shelf = rig->shelf;
    spill.copier = restores.copier = copies_copier(&rig->copies);
    ENGINE_RIG_CHECK(kv_spill_open(&spill, &rig->spill) == 0);
    ENGINE_RIG_CHECK(kv_restores_open(&restores, &rig->restores) == 0);
}

/* ---- the disk tier ---- */

enum { DISK_SHARE = 25, DISK_DEADLINE_US = 60 * 1000 * 1000 };

static void open_vault(struct engine_rig *rig) {
    struct kv_vault_options options = {.folder = &rig->disk.folder,
                                       .work = &rig->disk.work,
                                       .shelf = rig->shelf,
                                       .store_id = {7},
                                       .disk_bytes = rig->options.disk_bytes,
                                       .n_pages_max = (uint32_t)div_ceil((uint64_t)rig->options.n_context, PAGE_TOKENS),
                                       .n_pages_min = 1,
                                       .deadline_us =
                                           rig->options.deadline_us ? rig->options.deadline_us : DISK_DEADLINE_US,
                                       .now_us = now_us,
                                       .wrap = disk_faults_wrap,
                                       .wrap_user = rig->disk.faults};

    for (int g = 0; g < KV_GROUP_N; g++) {
        options.group[g].slot_bytes = (uint32_t)kv_shelf_slot_bytes(rig->shelf, (enum kv_group)g);
        options.group[g].share = DISK_SHARE;
    }
    ENGINE_RIG_CHECK(kv_vault_open(&options, &rig->disk.vault) == 0);
    kv_spill_set_vault(rig->spill, rig->disk.vault);
    kv_restores_set_vault(rig->restores, rig->disk.vault);
}

static void open_disk(struct engine_rig *rig) {
    if (rig->options.disk_bytes == 0)
        return;
    if (rig->options.disk_path) {
        snprintf(rig->disk.path, sizeof rig->disk.path, "%s", rig->options.disk_path);
    } else {
        strcpy(rig->disk.path, "/tmp/spillway-disk-XXXXXX"); /* NOLINT: it fits */
        ENGINE_RIG_CHECK(mkdtemp(rig->disk.path) != NULL);
    }
    ENGINE_RIG_CHECK(disk_folder_open(rig->disk.path, &rig->disk.folder) == 0);
    rig->disk.workers = workers_new(2);
    rig->disk.work = workers_interface(rig->disk.workers);
    rig->disk.faults = disk_faults_new();
    open_vault(rig);
}

static void close_vault(struct engine_rig *rig) {
    for (int i = 0; kv_vault_close(rig->disk.vault) > 0; i++) {
        ENGINE_RIG_CHECK(i < STUCK_MS);
        workers_dispatch(rig->disk.workers);
        usleep(1000);
    }
    rig->disk.vault = NULL;
}

static void remove_file(void *user, const char *name) {
    struct engine_rig *rig = user;

    ENGINE_RIG_CHECK(unlinkat(rig->disk.folder.fd, name, 0) == 0);
}

static void close_disk(struct engine_rig *rig) {
    if (rig->options.disk_bytes == 0)
        return;
    close_vault(rig);
    disk_faults_free(rig->disk.faults);
    workers_free(rig->disk.workers);
    if (!rig->options.disk_path) {
        disk_folder_list(&rig->disk.folder, remove_file, rig);
        unlinkat(rig->disk.folder.fd, "lock", 0);
        ENGINE_RIG_CHECK(rmdir(rig->disk.path) == 0);
    }
    disk_folder_close(&rig->disk.folder);
}

/* True: something is on its way, or was. */
static bool dispatch_disk(struct engine_rig *rig, bool wait) {
    struct pollfd pollfd;

    if (!rig->disk.vault || kv_vault_is_quiet(rig->disk.vault))
        return false;
    pollfd = (struct pollfd){.fd = kv_vault_fd(rig->disk.vault), .events = POLLIN};
    if (workers_dispatch(rig->disk.workers) == 0)
        poll(&pollfd, 1, wait ? 1 : 0); /* workers and faults do not show there */
    kv_vault_dispatch(rig->disk.vault);
    return true;
}

void engine_rig_reopen_disk(struct engine_rig *rig) {
    close_vault(rig);
    disk_faults_free(rig->disk.faults);
    rig->disk.faults = disk_faults_new();
    open_vault(rig);
    do {
        kv_vault_turn(rig->disk.vault);
        dispatch_disk(rig, true);
    } while (kv_vault_is_scanning(rig->disk.vault));
}

void engine_rig_open(struct engine_rig *rig, struct engine_rig_pair *pair, const struct engine_rig_options *options) {
    struct engine_options engine = {.backend = pair->backend,
                                    .device = pair->device,
                                    .model = pair->model,
                                    .n_places = options->n_places,
                                    .n_seqs_max = options->n_seqs_max,
                                    .n_context = options->n_context,
                                    .chunk_rows = options->chunk_rows,
                                    .batch_rows = options->batch_rows,
                                    .draft_min_accept = options->draft_min_accept,
                                    .now_us = now_us};
    struct report report = {""};

    *rig = (struct engine_rig){.pair = pair, .options = *options};
    engine.store = rig->store = engine_rig_store_open(pair, options);
    ENGINE_RIG_CHECK(device_thread_start(pair->backend, pair->device, &rig->thread) == 0);
    engine.thread = rig->thread;
    open_below(rig);
    open_disk(rig);
    engine.spill = rig->spill;
    engine.restores = rig->restores;
    engine.shelf = options->region_spans > 0 ? rig->shelf : NULL;
    engine.region_spans = options->region_spans;
    engine.restore_always = !options->restores_by_cost;
    ENGINE_RIG_CHECK(engine_open(&engine, &rig->engine, &report) == 0);
}

void engine_rig_remove_disk(struct engine_rig *rig) {
    rig->options.disk_path = NULL;
}

void engine_rig_close(struct engine_rig *rig) {
    while (engine_rig_dispatch_copies(rig, true))
        continue;
    device_thread_stop(rig->thread);
    engine_close(rig->engine);
    engine_rig_check(rig);
    kv_restores_close(rig->restores);
    kv_spill_close(rig->spill);
    close_disk(rig);
    kv_shelf_close(rig->shelf);
    kv_store_close(rig->store);
}

bool engine_rig_dispatch(struct engine_rig *rig) {
    struct pollfd pollfd = {.fd = engine_fd(rig->engine), .events = POLLIN};
    struct engine_view view;

    engine_look(rig->engine, &view);
    if (view.n_in_flight == 0)
        return false;
    ENGINE_RIG_CHECK(poll(&pollfd, 1, STUCK_MS) == 1);
    engine_dispatch(rig->engine);
    return true;
}

bool engine_rig_dispatch_copies(struct engine_rig *rig, bool wait) {
    struct pollfd pollfds[KV_COPY_DIRECTION_N];
    bool any = rig->n_works > 0, are_out = false;

    if (rig->n_works > 0) {
        struct kv_work_item *item = rig->works[--rig->n_works];

        item->run(item);
        item->done(item);
    }
    for (int d = 0; d < KV_COPY_DIRECTION_N; d++) {
        pollfds[d] =
            (struct pollfd){.fd = device_thread_copied_fd(rig->thread, (enum kv_copy_direction)d), .events = POLLIN};
        are_out |= rig->copies.out[d].n > 0;
    }
    if (are_out)
        ENGINE_RIG_CHECK(poll(pollfds, KV_COPY_DIRECTION_N, wait ? STUCK_MS : 0) >= wait);
    for (int d = 0; d < KV_COPY_DIRECTION_N && are_out && rig->fails_copies; d++)
        if (pollfds[d].revents & POLLIN) {
            eventfd_t n; /* reading it is what makes the device thread's result ours to change */

            ENGINE_RIG_CHECK(eventfd_read(pollfds[d].fd, &n) == 0 && eventfd_write(pollfds[d].fd, n) == 0);
            rig->copies.out[d].first->result = -EIO;
        }
    copies_dispatch(&rig->copies);
    any |= dispatch_disk(rig, wait && !any && !are_out);
    if (rig->restores)
        any |= kv_restores_turn(rig->restores);
    if (rig->disk.vault)
        kv_vault_turn(rig->disk.vault);
    if (rig->spill)
        any |= kv_spill_turn(rig->spill);
    return any || are_out;
}

bool engine_rig_turn(struct engine_rig *rig) {
    bool any;

    engine_turn(rig->engine);
    any = engine_rig_dispatch(rig);
    return engine_rig_dispatch_copies(rig, !any) || any;
}

void engine_rig_check(const struct engine_rig *rig) {
    char line[200];

    if (kv_store_check(rig->store, line, sizeof line) != 0) {
        fprintf(stderr, "%s\n", line);
        abort();
    }
    if (rig->shelf)
        ENGINE_RIG_CHECK(kv_shelf_check(rig->shelf) == NULL);
    if (rig->disk.vault)
        ENGINE_RIG_CHECK(kv_vault_check(rig->disk.vault) == NULL);
}

void engine_rig_check_is_idle(const struct engine_rig *rig) {
    struct kv_store_stats stats;
    struct engine_view view;

    engine_look(rig->engine, &view);
    ENGINE_RIG_CHECK(view.n_waiting == 0 && view.n_running == 0 && view.n_leaving == 0 && view.n_in_flight == 0);
    kv_store_stats(rig->store, &stats);
    for (int g = 0; g < KV_GROUP_N; g++)
        ENGINE_RIG_CHECK(stats.group[g].n_private == 0 && stats.group[g].n_pinned == 0);
    for (int g = 0; rig->shelf && g < KV_GROUP_N; g++) {
        struct kv_shelf_group_stats below;

        kv_shelf_stats(rig->shelf, (enum kv_group)g, &below);
        ENGINE_RIG_CHECK(below.n_filling == 0 && below.n_pinned == 0);
    }
}
