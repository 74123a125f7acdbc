#include "pair.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>

#include "fingerprint.h"
#include "text.h"

enum { STEPS_IN_RING = 8 /* above DEVICE_PLANS_MAX plans of three passes each */ };

static enum dtype dtype_of(int config_dtype, int numeric) {
    switch ((enum config_dtype)config_dtype) {
    case CONFIG_DTYPE_F32:
        return DTYPE_F32;
    case CONFIG_DTYPE_BF16:
        return DTYPE_BF16;
    case CONFIG_DTYPE_FP16:
        return DTYPE_F16;
    case CONFIG_DTYPE_E4M3:
        return DTYPE_E4M3;
    case CONFIG_DTYPE_AUTO:
        break;
    }
    return numeric == CONFIG_NUMERIC_REFERENCE ? DTYPE_F32 : DTYPE_BF16;
}

static struct model_options options_of(const struct config *config) {
    return (struct model_options){
        .target_folder = config->model.path,
        .draft_folder = config->draft.path[0] ? config->draft.path : NULL,
        .dummy = config->model.load_format == CONFIG_LOAD_DUMMY,
        .draft_causal = config->draft.causal == CONFIG_CAUSAL_YES  ? DRAFT_CAUSAL_YES
                        : config->draft.causal == CONFIG_CAUSAL_NO ? DRAFT_CAUSAL_NO
                                                                   : DRAFT_CAUSAL_AUTO,
        .block_size = config->draft.block_size,
        .kv_dtype = dtype_of(config->kv.dtype, config->model.numeric),
        .draft_dtype = dtype_of(config->kv.draft_dtype, config->model.numeric),
        .n_rows_max = max_int(config->sched.max_batch_tokens, config->sched.prefill_chunk),
        .n_steps_max = STEPS_IN_RING,
    };
}

/* auto takes the GPU if this build knows it and one is there; a GPU that was asked for is never replaced in silence. */
static int open_device(const struct config *config, const struct backend **ret_backend, struct device **ret_device,
                       struct report *report) {
    struct backend_options options = {.numeric = config->model.numeric == CONFIG_NUMERIC_BF16        ? NUMERIC_BF16
                                                 : config->model.numeric == CONFIG_NUMERIC_REFERENCE ? NUMERIC_REFERENCE
                                                                                                     : NUMERIC_FAST,
                                      .n_threads = config->model.threads};
    const char *name = config->model.backend == CONFIG_BACKEND_CPU ? "cpu" : "cuda";
    int r = -ENODEV;

    *ret_backend = backend_find(name);
    if (*ret_backend)
        r = (*ret_backend)->open(&options, ret_device);
    if (r == -ENODEV && config->model.backend == CONFIG_BACKEND_AUTO) {
        *ret_backend = backend_find("cpu");
        r = (*ret_backend)->open(&options, ret_device);
    }
    if (r == -ENODEV)
        return report_error(report, r, "model.backend: cuda was asked for, and %s", "this build or machine has no GPU");
    if (r != 0)
        return report_error(report, r, "model.backend: the device cannot be opened: %s", strerror(-r));
    return 0;
}

enum { PAGES_MIN = 32, STATES_MIN = 2 /* of the host tier, for the disk's to pass through it side by side */ };

static int check_host(const struct config *config, const struct memplan_model *model, struct report *report) {
    uint32_t n_slots[KV_GROUP_N];

    memplan_host(model, config->kv.host_bytes, FORMAT_ALIGN_MIN, n_slots);
    if (!config_has_disk(config) || (n_slots[KV_TARGET_FULL] >= PAGES_MIN && n_slots[KV_TARGET_STATE] >= STATES_MIN))
        return 0;
    return report_error(report, -EINVAL,
                        "kv.disk_bytes: what lies on disk comes and goes through host memory, and kv.host_bytes = %llu "
                        "holds %u pages and %u restore points; %d and %d are needed",
                        (unsigned long long)config->kv.host_bytes, n_slots[KV_TARGET_FULL], n_slots[KV_TARGET_STATE],
                        PAGES_MIN, STATES_MIN);
}

/* What is wrong within a folder is the model's fault; that there is none is the configuration's. */
static int check_folder(const struct config *config, const char *section, const char *path, struct report *report) {
    struct stat status;
    int r = stat(path, &status) != 0 ? -errno : S_ISDIR(status.st_mode) ? 0 : -ENOTDIR;

    return r == 0
               ? 0
               : report_error(report, r, "%s: %s.path = '%s': %s", report_path(config_origin(config, section, "path")),
                              section, report_path(path), strerror(-r));
}

static int inspect(const struct config *config, const struct model_options *options, const struct backend_caps *caps,
                   struct model_info *ret_info, struct report *report) {
    int r = check_folder(config, "model", config->model.path, report);

    if (r == 0 && config->draft.path[0])
        r = check_folder(config, "draft", config->draft.path, report);
    return r == 0 ? model_inspect(options, caps, ret_info, report) : r;
}

static int make_plan(const struct config *config, const struct model_info *info, struct memplan *ret_plan,
                     struct report *report) {
    struct memplan_model model = memplan_model_of(info);
    struct memplan_limits limits = memplan_limits_of(config);
    int r = check_host(config, &model, report);

    return r == 0 ? memplan_make(&model, &limits, ret_plan, report) : r;
}

int pair_plan(const struct config *config, struct memplan *ret_plan, struct report *report) {
    struct model_options options = options_of(config);
    const struct backend *backend;
    struct device *device;
    struct model_info info;
    int r = open_device(config, &backend, &device, report);

    if (r != 0)
        return r;
    r = inspect(config, &options, backend->caps(device), &info, report);
    if (r == 0)
        r = make_plan(config, &info, ret_plan, report);
    backend->close(device);
    return r;
}

/* ---- loading -------------------------------------------------------------------------------------------------------- */

static void report_progress(struct pair_progress *progress, int percent, const char *what) {
    __atomic_store_n(&progress->what, what, __ATOMIC_RELEASE);
    __atomic_store_n(&progress->percent, percent, __ATOMIC_RELEASE);
}

static int open_tokenizer(struct pair *pair, const struct config *config, struct report *report) {
    char path[4096];
    int r;

    snprintf(path, sizeof path, "%s/tokenizer.json", config->model.path);
    r = tokenizer_open(path, &pair->tokenizer, report);
    if (r == 0)
        output_find_marks(pair->tokenizer, pair->marks);
    return r;
}

static int open_model(struct pair *pair, struct model_options *options, struct report *report) {
    int r;

    options->n_slots = options->n_segs_max = options->n_outs_max = pair->plan.max_seqs;
    options->n_valid = tokenizer_n_ids(pair->tokenizer);
    r = model_open(pair->backend, pair->device, options, &pair->model, report);
    if (r != 0)
        return r;
    pair->info = model_info(pair->model);
    pair->default_thinking = prompt_default_thinking(&pair->info->target);
    r = prompt_rules_init(&pair->rules, pair->tokenizer, pair->info->n_valid);
    return r == 0 ? 0 : report_error(report, r, "%s: out of memory", options->target_folder);
}

/* Pages on disk are found again with the same secret only; where none outlive the process, nor does it. */
static int get_secret(const struct cache_folder *folder, uint8_t ret_secret[KV_KEY_BYTES]) {
    if (folder) {
        memcpy(ret_secret, folder->secret.bytes, KV_KEY_BYTES);
        return 0;
    }
    return getrandom(ret_secret, KV_KEY_BYTES, 0) == KV_KEY_BYTES ? 0 : -EIO;
}

static int open_store(struct pair *pair, const struct config *config, const struct model_options *options,
                      const struct cache_folder *folder, struct report *report) {
    const struct memplan *plan = &pair->plan;
    struct kv_store_options store = {.backend = pair->backend,
                                     .device = pair->device,
                                     .sliding_window_tokens = (uint32_t)plan->model.window,
                                     .share_percent = (uint32_t)config->kv.share_per_uid,
                                     .n_records_max = (uint32_t)plan->n_slots[KV_TARGET_FULL]};
    int r;

    r = fingerprint_read(options, pair->backend->name, pair->backend->caps(pair->device), store.fingerprint, report);
    if (r == 0)
        r = fingerprint_read_drafter(options, pair->drafter, report);
    if (r != 0)
        return r;
    memcpy(pair->fingerprint_bytes, store.fingerprint, sizeof pair->fingerprint_bytes);
    for (int i = 0; i < KV_KEY_BYTES; i++)
        snprintf(pair->fingerprint + 2 * i, 3, "%02x", store.fingerprint[i]);
    pair->fingerprint[2 * 16] = '\0'; /* the digest has 128 bits */
    if (get_secret(folder, store.secret) != 0)
        return report_error(report, -EIO, "the kernel gives no random bytes: %s", strerror(errno));
    for (int g = 0; g < KV_GROUP_N; g++) {
        store.group[g].slot_bytes = plan->model.slot_bytes[g];
        store.group[g].n_slots = (uint32_t)plan->n_slots[g];
    }
    r = kv_store_open(&store, &pair->store);
    explicit_bzero(store.secret, sizeof store.secret);
    return r == 0 ? 0
                  : report_error(report, r, "kv.device_bytes: the pools cannot be reserved: %s; --plan prints them",
                                 strerror(-r));
}

/* The host tier, if there is one. */
static int open_tiers(struct pair *pair, const struct config *config, uint64_t (*now_us)(void),
                      const struct kv_work *work, struct report *report) {
    uint32_t n_pages = (uint32_t)div_ceil((uint64_t)pair->plan.max_context, PAGE_TOKENS), n_slots[KV_GROUP_N];
    struct kv_shelf_options shelf = {.backend = pair->backend,
                                     .device = pair->device,
                                     .alignment = pair->alignment,
                                     .share_percent = (uint32_t)config->kv.share_per_uid};
    struct kv_spill_options spill = {
        .store = pair->store, .work = *work, .n_jobs = PAIR_SPILLS, .n_pages_max = n_pages};
    struct kv_restores_options restores = {
        .store = pair->store, .now_us = now_us, .n_restores = PAIR_RESTORES, .n_pages_max = n_pages};
    int r = device_thread_start(pair->backend, pair->device, &pair->thread);

    if (r == 0) {
        pair->copies = calloc(1, sizeof *pair->copies);
        r = pair->copies ? 0 : -ENOMEM;
    }
    if (r != 0)
        return report_error(report, r, "the device thread cannot be started: %s", strerror(-r));
    copies_init(pair->copies, pair->thread);
    if (config->kv.host_bytes == 0)
        return 0;
    memplan_host(&pair->plan.model, config->kv.host_bytes, pair->alignment, n_slots);
    if (n_slots[KV_TARGET_FULL] == 0 || n_slots[KV_TARGET_STATE] == 0)
        return report_error(report, -EINVAL,
                            "kv.host_bytes: %llu bytes hold no page and restore point; a quarter is for restore points "
                            "of %llu bytes each",
                            (unsigned long long)config->kv.host_bytes,
                            (unsigned long long)pair->plan.model.slot_bytes[KV_TARGET_STATE]);
    for (int g = 0; g < KV_GROUP_N; g++) {
        shelf.group[g].payload_bytes = pair->plan.model.slot_bytes[g];
        shelf.group[g].n_slots = n_slots[g];
    }
    r = kv_shelf_open(&shelf, &pair->shelf);
    spill.shelf = restores.shelf = pair->shelf;
    spill.copier = restores.copier = copies_copier(pair->copies);
    if (r == 0)
        r = kv_spill_open(&spill, &pair->spill);
    if (r == 0)
        r = kv_restores_open(&restores, &pair->restores);
    return r == 0 ? 0
                  : report_error(report, r, "kv.host_bytes: %llu bytes cannot be reserved: %s",
                                 (unsigned long long)config->kv.host_bytes, strerror(-r));
}

int pair_open_disk(struct pair *pair, const struct config *config, const struct cache_folder *folder,
                   const struct kv_work *work, uint64_t (*now_us)(void),
                   void (*on_saved)(void *user, const struct kv_vault_saved *saved), void *user,
                   struct report *report) {
    struct kv_vault_options options = {.folder = &folder->segments,
                                       .work = work,
                                       .shelf = pair->shelf,
                                       .disk_bytes = config->kv.disk_bytes,
                                       .warm_percent = (uint32_t)config->kv.warm_up,
                                       .share_percent = (uint32_t)config->kv.share_per_uid,
                                       .n_pages_max = (uint32_t)div_ceil((uint64_t)pair->plan.max_context, PAGE_TOKENS),
                                       .n_pages_min = (uint32_t)config->kv.disk_min_tokens / PAGE_TOKENS,
                                       .write_bytes_per_day = config->kv.disk_write_bytes_per_day,
                                       .deadline_us = (uint64_t)config->kv.disk_timeout_ms * 1000,
                                       .now_us = now_us,
                                       .on_saved = on_saved,
                                       .user = user};
    uint64_t page_bytes = pair->plan.model.slot_bytes[KV_TARGET_FULL] + pair->plan.model.slot_bytes[KV_DRAFT_FULL];
    struct disk_buffer buffers[KV_GROUP_N];
    int r;

    for (int g = 0; g < KV_GROUP_N; g++) {
        options.group[g].slot_bytes = (uint32_t)kv_shelf_slot_bytes(pair->shelf, (enum kv_group)g);
        options.group[g].share =
            g == KV_TARGET_STATE ? MEMPLAN_DISK_STATES_SHARE
            : g == KV_DRAFT_SLIDING
                ? MEMPLAN_DISK_SLIDING_SHARE
                : (uint32_t)div_ceil(MEMPLAN_DISK_PAGES_SHARE * pair->plan.model.slot_bytes[g], page_bytes);
        if (kv_shelf_memory(pair->shelf, (enum kv_group)g, &buffers[options.n_buffers].start,
                            &buffers[options.n_buffers].bytes))
            options.n_buffers++;
    }
    options.buffers = buffers;
    memcpy(options.store_id, folder->secret.store_id, sizeof options.store_id);
    memcpy(options.fingerprint, pair->fingerprint_bytes, sizeof options.fingerprint);
    memcpy(options.drafter, pair->drafter, sizeof options.drafter);
    r = kv_vault_open(&options, &pair->vault);
    if (r != 0)
        return report_error(report, r, "kv.disk_path: %s: the disk tier cannot be opened: %s", config->kv.disk_path,
                            strerror(-r));
    kv_spill_set_vault(pair->spill, pair->vault);
    if (pair->restores)
        kv_restores_set_vault(pair->restores, pair->vault);
    return 0;
}

int pair_open_scrub(struct pair *pair, const struct config *config, const struct kv_work *work,
                    uint64_t (*now_us)(void)) {
    struct kv_scrub_options options = {.shelf = pair->shelf,
                                       .vault = pair->vault,
                                       .work = work,
                                       .bytes_per_s = config->kv.scrub_bytes_per_second,
                                       .now_us = now_us};

    return !pair->shelf || options.bytes_per_s == 0 ? 0 : kv_scrub_open(&options, &pair->scrub);
}

static int open_engine(struct pair *pair, const struct config *config, uint64_t (*now_us)(void),
                       struct report *report) {
    struct engine_options options = {.backend = pair->backend,
                                     .device = pair->device,
                                     .model = pair->model,
                                     .store = pair->store,
                                     .thread = pair->thread,
                                     .spill = pair->spill,
                                     .restores = config->kv.restore == CONFIG_RESTORE_NEVER ? NULL : pair->restores,
                                     .shelf = pair->plan.region_spans > 0 ? pair->shelf : NULL,
                                     .region_spans = pair->plan.region_spans,
                                     .restore_always = config->kv.restore == CONFIG_RESTORE_ALWAYS,
                                     .n_places = pair->plan.max_seqs,
                                     .n_seqs_max = 2 * pair->plan.max_seqs + 65536, /* sched.queue_max may change */
                                     .n_context = pair->plan.max_context,
                                     .chunk_rows = config->sched.prefill_chunk,
                                     .batch_rows = config->sched.max_batch_tokens,
                                     .draft_min_accept = config->draft.fallback ? -1 : 0,
                                     .now_us = now_us};

    return engine_open(&options, &pair->engine, report);
}

/* Clients are told it: what is not UTF-8 becomes U+FFFD. */
static char *last_name(const char *path) {
    size_t n = strlen(path), begin;
    struct text name;

    while (n > 1 && path[n - 1] == '/')
        n--;
    for (begin = n; begin > 0 && path[begin - 1] != '/'; begin--)
        ;
    text_init(&name, SIZE_MAX);
    text_add_lossy(&name, (struct span){path + begin, n - begin});
    text_add(&name, "", 1);
    if (name.error == 0)
        return name.bytes;
    text_deinit(&name);
    return NULL;
}

/* A slot is the same bytes in host memory and on disk, so it lies as the disk wants it. */
static uint32_t alignment_of(const struct cache_folder *folder) {
    uint32_t alignment = folder ? disk_folder_alignment(&folder->segments) : 0; /* 0: not direct */

    return alignment > FORMAT_ALIGN_MIN ? alignment : FORMAT_ALIGN_MIN;
}

int pair_open(const struct config *config, uint64_t (*now_us)(void), const struct kv_work *work,
              const struct cache_folder *folder, struct pair_progress *progress, struct pair *ret_pair,
              struct report *report) {
    struct model_options options = options_of(config);
    struct pair pair = {0};
    struct model_info info;
    int r;

    pair.alignment = alignment_of(folder);
    report_progress(progress, 0, "opening the device");
    r = open_device(config, &pair.backend, &pair.device, report);
    if (r == 0)
        r = inspect(config, &options, pair.backend->caps(pair.device), &info, report);
    if (r == 0)
        r = make_plan(config, &info, &pair.plan, report);
    report_progress(progress, 5, "reading the tokenizer");
    if (r == 0)
        r = open_tokenizer(&pair, config, report);
    report_progress(progress, 15, "loading weights");
    if (r == 0)
        r = open_model(&pair, &options, report);
    report_progress(progress, 70, "reserving the cache");
    if (r == 0)
        r = open_store(&pair, config, &options, folder, report);
    if (r == 0)
        r = open_tiers(&pair, config, now_us, work, report);
    report_progress(progress, 85, "warming up");
    if (r == 0)
        r = open_engine(&pair, config, now_us, report);
    if (r == 0) {
        pair.name = last_name(config->model.path);
        pair.draft_name = last_name(config->draft.path);
        if (!pair.name || !pair.draft_name)
            r = report_error(report, -ENOMEM, "out of memory");
    }
    if (r != 0) {
        pair_close(&pair);
        return r;
    }
    report_progress(progress, 100, "ready");
    *ret_pair = pair;
    return 0;
}

void pair_stop(struct pair *pair) {
    device_thread_stop(pair->thread);
    pair->thread = NULL;
}

void pair_close(struct pair *pair) {
    pair_stop(pair);
    engine_close(pair->engine);
    kv_restores_close(pair->restores);
    kv_spill_close(pair->spill);
    kv_scrub_close(pair->scrub);
    if (kv_vault_close(pair->vault) == 0) /* else the kernel still has pages of the shelf */
        kv_shelf_close(pair->shelf);
    free(pair->copies);
    kv_store_close(pair->store);
    prompt_rules_deinit(&pair->rules);
    model_close(pair->model);
    tokenizer_free(pair->tokenizer);
    if (pair->device)
        pair->backend->close(pair->device);
    free(pair->name);
    free(pair->draft_name);
    *pair = (struct pair){0};
}
