/* A prefix with the geometry of a large model (64 layers, 16 of them with full attention; its bytes are made up), restored by
 * the real store with real files: from host memory and from disk, byte for byte, with the time that each stage took.
 *
 *     fault_restore_large [n_pages [folder]]
 *
 * 48 pages of 64 tokens, and 512 MiB of files in /var/tmp, if not asked otherwise; 1600 pages are 100K tokens, and take 14 GiB of memory
 * and 8 GiB of disk. */
#include <poll.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <time.h>
#include <unistd.h>
#include <cmocka.h>

#include "../fake/kv_rig.h"
#include "restore.h"
#include "spill.h"
#include "workers.h"

#define MIB (UINT64_C(1) << 20)
#define DEADLINE_US (UINT64_C(60) * 1000 * 1000) /* a busy machine is no reason to give a page up */

enum {
    PAGE_BYTES = 16 /* layers */ * 2 /* K, V */ * 4 /* heads */ * 256 /* wide */ * PAGE_TOKENS * 2 /* bf16 */,
    STATE_BYTES = 48 /* layers */ * (48 * 128 * 128 /* heads */ + 3 * 10240 /* columns */) * 4 /* f32 */,
    N_PAGES = 48,
    N_JOBS = 64,
    N_TRIES = 5, /* others use the machine too: the best one counts */
    SLOW_CHECK_US = 20000
};

static uint32_t n_pages = N_PAGES;
static const char *folder = "/var/tmp";

struct rig;

struct job { /* work or a copy that a thread is at */
    struct kv_work_item work, *item;
    struct kv_copy_batch *batch;
    struct rig *rig;
};

struct rig {
    char path[256];
    struct disk_folder folder;
    const struct backend *backend;
    struct device *device;
    struct kv_hasher *hasher;
    struct kv_store *store;
    struct kv_shelf *shelf;
    struct kv_vault *vault;
    struct kv_spill *spill;
    struct kv_restores *restores;
    struct workers *workers, *copiers; /* one copies: the batches of a direction come home in order */
    struct kv_work work;
    uint32_t check_us; /* that a check takes longer than it must */
    struct job jobs[N_JOBS];
    struct kv_key *keys; /* [n_pages] */
    int32_t *tokens;     /* [n_pages * PAGE_TOKENS] */
    struct kv_restored restored;
    uint64_t done_us;
};

static uint64_t now_us(void) {
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* ---- threads --------------------------------------------------------------------------------------------------------- */

static struct job *free_job(struct rig *rig) {
    int i = 0;

    while (rig->jobs[i].rig)
        KV_RIG_CHECK(++i < N_JOBS);
    rig->jobs[i].rig = rig;
    return &rig->jobs[i];
}

static void run_work(struct kv_work_item *work) {
    struct job *job = container_of(work, struct job, work);

    if (job->rig->check_us > 0)
        usleep(job->rig->check_us);
    job->item->run(job->item);
}

static void work_done(struct kv_work_item *work) {
    struct job *job = container_of(work, struct job, work);

    job->rig = NULL;
    job->item->done(job->item);
}

static int submit_work(void *user, struct kv_work_item *item) {
    struct rig *rig = user;
    struct job *job = free_job(rig);
    struct kv_work workers = workers_interface(rig->workers);

    job->work = (struct kv_work_item){.run = run_work, .done = work_done};
    job->item = item;
    return workers.submit(workers.user, &job->work);
}

static void run_copy(struct kv_work_item *work) {
    struct kv_copy_batch *batch = container_of(work, struct job, work)->batch;

    for (int i = 0; i < batch->n; i++)
        memcpy(batch->transfers[i].dst, batch->transfers[i].src, batch->transfers[i].bytes);
}

static void copy_done(struct kv_work_item *work) {
    struct job *job = container_of(work, struct job, work);

    job->rig = NULL;
    job->batch->result = 0;
    job->batch->done(job->batch);
}

static int submit_copy(void *user, struct kv_copy_batch *batch) {
    struct rig *rig = user;
    struct job *job = free_job(rig);
    struct kv_work copiers = workers_interface(rig->copiers);

    job->work = (struct kv_work_item){.run = run_copy, .done = copy_done};
    job->batch = batch;
    return copiers.submit(copiers.user, &job->work);
}

static void turn(struct rig *rig) {
    struct pollfd fds[] = {{.fd = kv_vault_fd(rig->vault), .events = POLLIN},
                           {.fd = workers_fd(rig->workers), .events = POLLIN},
                           {.fd = workers_fd(rig->copiers), .events = POLLIN}};

    poll(fds, ARRAY_LEN(fds), 10);
    kv_vault_dispatch(rig->vault);
    workers_dispatch(rig->workers);
    workers_dispatch(rig->copiers);
    kv_restores_turn(rig->restores);
    do
        kv_vault_turn(rig->vault);
    while (kv_spill_turn(rig->spill));
}

/* ---- open and close -------------------------------------------------------------------------------------------------- */

static void on_ended(void *user, const struct kv_restored *restored) {
    ((struct rig *)user)->restored = *restored;
}

static void open_store(struct rig *rig) {
    struct kv_store_options options = {.backend = rig->backend, .device = rig->device, .n_records_max = n_pages};

    options.group[KV_TARGET_FULL].slot_bytes = PAGE_BYTES;
    options.group[KV_TARGET_FULL].n_slots = n_pages + 1; /* and the null page */
    options.group[KV_TARGET_STATE].slot_bytes = STATE_BYTES;
    options.group[KV_TARGET_STATE].n_slots = 1;
    KV_RIG_CHECK(kv_store_open(&options, &rig->store) == 0);
}

static void open_below(struct rig *rig) {
    uint32_t alignment = disk_folder_alignment(&rig->folder); /* 0: not direct */
    struct kv_shelf_options shelf = {
        .backend = rig->backend, .device = rig->device, .alignment = (uint32_t)max_u64(alignment, FORMAT_ALIGN_MIN)};
    struct disk_buffer buffers[2];
    struct kv_vault_options vault = {.folder = &rig->folder,
                                     .work = &rig->work,
                                     .buffers = buffers,
                                     .n_buffers = 2,
                                     .disk_bytes = max_u64(8192 * MIB, (uint64_t)n_pages * 4 * PAGE_BYTES),
                                     .n_pages_max = n_pages,
                                     .deadline_us = DEADLINE_US,
                                     .now_us = now_us};
    struct kv_spill_options spill = {
        .store = rig->store, .copier = {submit_copy, rig}, .work = rig->work, .n_jobs = 1, .n_pages_max = n_pages};
    struct kv_restores_options restores = {
        .store = rig->store, .copier = {submit_copy, rig}, .now_us = now_us, .n_restores = 1, .n_pages_max = n_pages};

    shelf.group[KV_TARGET_FULL].payload_bytes = PAGE_BYTES;
    shelf.group[KV_TARGET_FULL].n_slots = n_pages;
    shelf.group[KV_TARGET_STATE].payload_bytes = STATE_BYTES;
    shelf.group[KV_TARGET_STATE].n_slots = 1;
    KV_RIG_CHECK(kv_shelf_open(&shelf, &rig->shelf) == 0);
    vault.shelf = spill.shelf = restores.shelf = rig->shelf;
    for (int g = 0; g < 2; g++) {
        vault.group[g].slot_bytes = (uint32_t)kv_shelf_slot_bytes(rig->shelf, (enum kv_group)g);
        vault.group[g].share = g == KV_TARGET_FULL ? 75 : 25;
        KV_RIG_CHECK(kv_shelf_memory(rig->shelf, (enum kv_group)g, &buffers[g].start, &buffers[g].bytes));
    }
    KV_RIG_CHECK(kv_vault_open(&vault, &rig->vault) == 0);
    KV_RIG_CHECK(kv_spill_open(&spill, &rig->spill) == 0);
    KV_RIG_CHECK(kv_restores_open(&restores, &rig->restores) == 0);
    kv_spill_set_vault(rig->spill, rig->vault);
    kv_restores_set_vault(rig->restores, rig->vault);
    kv_restores_set_listener(rig->restores, on_ended, rig);
}

static void open_rig(struct rig *rig) {
    struct kv_key root;

    memset(rig, 0, sizeof *rig);
    snprintf(rig->path, sizeof rig->path - 3, "%s/large-XXXXXX", folder);
    KV_RIG_CHECK(mkdtemp(rig->path) != NULL);
    strcat(rig->path, "/kv"); /* NOLINT: it fits */
    KV_RIG_CHECK(disk_folder_open(rig->path, &rig->folder) == 0);
    rig->workers = workers_new(2);
    rig->copiers = workers_new(1);
    rig->work = (struct kv_work){submit_work, rig};
    rig->backend = backend_find("cpu");
    KV_RIG_CHECK(rig->backend->open(&(struct backend_options){.n_threads = 1}, &rig->device) == 0);
    open_store(rig);
    open_below(rig);
    KV_RIG_CHECK(kv_hasher_new(&rig->hasher) == 0);
    rig->keys = calloc(n_pages, sizeof *rig->keys);
    rig->tokens = calloc((size_t)n_pages * PAGE_TOKENS, sizeof *rig->tokens);
    KV_RIG_CHECK(rig->keys && rig->tokens);
    for (uint32_t i = 0; i < n_pages * PAGE_TOKENS; i++)
        rig->tokens[i] = (int32_t)(i * 2654435761u >> 14);
    KV_RIG_CHECK(kv_store_root(rig->store, 1, &root) == 0);
    KV_RIG_CHECK(kv_key_chain(rig->hasher, &root, rig->tokens, n_pages, rig->keys) == 0);
}

static void remove_file(void *user, const char *name) {
    unlinkat(((struct rig *)user)->folder.fd, name, 0);
}

static void close_rig(struct rig *rig) {
    while (kv_vault_close(rig->vault) > 0) {
        workers_dispatch(rig->workers);
        usleep(1000);
    }
    kv_restores_close(rig->restores);
    kv_spill_close(rig->spill);
    kv_shelf_close(rig->shelf);
    kv_store_close(rig->store);
    kv_hasher_free(rig->hasher);
    rig->backend->close(rig->device);
    workers_free(rig->copiers);
    workers_free(rig->workers);
    free(rig->keys);
    free(rig->tokens);
    disk_folder_list(&rig->folder, remove_file, rig);
    unlinkat(rig->folder.fd, "lock", 0);
    disk_folder_close(&rig->folder);
    KV_RIG_CHECK(rmdir(rig->path) == 0);
    *strrchr(rig->path, '/') = '\0';
    KV_RIG_CHECK(rmdir(rig->path) == 0);
}

/* ---- pages ----------------------------------------------------------------------------------------------------------- */

/* Of page i, and of the state: page n_pages. Words that come again nowhere, so that no disk saves itself their writing. */
static uint64_t first_word(uint32_t page) {
    return (page + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

static void fill(void *slot, uint32_t page, size_t bytes) {
    uint64_t *words = slot, word = first_word(page);

    for (size_t i = 0; i < bytes / sizeof *words; i++)
        words[i] = word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
}

static bool is_filled(const void *slot, uint32_t page, size_t bytes) {
    const uint64_t *words = slot;
    uint64_t word = first_word(page), wrong = 0;

    for (size_t i = 0; i < bytes / sizeof *words; i++) {
        word = word * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        wrong |= words[i] ^ word;
    }
    return wrong == 0;
}

/* As a model would compute them; then they go down to the disk, and leave the device. */
static void make(struct rig *rig) {
    struct kv_lease lease = {0};
    struct kv_store_stats stats;
    bool taken[KV_GROUP_N];
    uint32_t state;

    KV_RIG_CHECK(kv_lease_init(&lease, rig->store, n_pages) == 0);
    lease.uid = 1;
    for (uint32_t page = 0; page < n_pages; page++) {
        uint32_t slots[KV_GROUP_N] = {KV_NO_SLOT, KV_NO_SLOT, KV_NO_SLOT, KV_NO_SLOT};

        KV_RIG_CHECK(kv_store_take(rig->store, KV_TARGET_FULL, &slots[KV_TARGET_FULL]) == 0);
        fill(kv_store_slot(rig->store, KV_TARGET_FULL, slots[KV_TARGET_FULL]), page, PAGE_BYTES);
        KV_RIG_CHECK(kv_lease_publish_page(&lease, page, &rig->keys[page], rig->tokens + (size_t)page * PAGE_TOKENS,
                                           slots, taken) == 0);
    }
    KV_RIG_CHECK(kv_store_take(rig->store, KV_TARGET_STATE, &state) == 0);
    fill(kv_store_slot(rig->store, KV_TARGET_STATE, state), n_pages, STATE_BYTES);
    kv_lease_publish_state(&lease, n_pages, state, &taken[0]);
    kv_spill_start(rig->spill, &lease, n_pages, 1, KV_SPILL_MUST);
    do
        turn(rig);
    while (!kv_spill_is_idle(rig->spill) || !kv_vault_is_quiet(rig->vault));
    kv_lease_deinit(&lease);
    kv_store_evict_all(rig->store);
    kv_store_stats(rig->store, &stats);
    assert_int_equal(stats.n_records, 0);
}

static void expect_every_byte(struct rig *rig) {
    struct kv_lease lease = {0};
    struct kv_match match;

    KV_RIG_CHECK(kv_lease_init(&lease, rig->store, n_pages) == 0);
    kv_store_match(rig->store, &lease, rig->keys, rig->tokens, n_pages, &match);
    assert_int_equal(match.n_tokens, n_pages * PAGE_TOKENS);
    for (uint32_t page = 0; page < n_pages; page++)
        assert_true(is_filled(kv_store_slot(rig->store, KV_TARGET_FULL, kv_lease_slot(&lease, KV_TARGET_FULL, page)),
                              page, PAGE_BYTES));
    assert_true(is_filled(kv_store_slot(rig->store, KV_TARGET_STATE, match.state_slot), n_pages, STATE_BYTES));
    kv_lease_deinit(&lease);
}

/* ---- restores -------------------------------------------------------------------------------------------------------- */

static void on_done(void *user, int result) {
    assert_int_equal(result, 0);
    ((struct rig *)user)->done_us = now_us();
}

static uint64_t largest(const struct kv_restored *restored) {
    uint64_t us = 0;

    for (int i = 0; i < KV_RESTORE_STAGE_N; i++)
        us = max_u64(us, restored->stage_us[i]);
    return us;
}

static double share(const struct kv_restored *restored, enum kv_restore_stage stage) {
    return (double)restored->stage_us[stage] / (double)restored->us;
}

/* All of it, and every byte is right. Returns how much of the time from the outside the stages do not account for. */
static double restore(struct rig *rig, bool from_disk) {
    struct kv_restored *r = &rig->restored;
    struct kv_restore *restore;
    uint64_t began_us, us = 0;

    kv_store_evict_all(rig->store);
    if (from_disk)
        kv_shelf_evict_bytes(rig->shelf, UINT64_MAX);
    rig->done_us = 0;
    began_us = now_us();
    assert_int_equal(
        kv_restore_start(rig->restores, rig->keys, rig->tokens, n_pages, KV_RESTORE_REQUEST, on_done, rig, &restore),
        0);
    while (rig->done_us == 0)
        turn(rig);
    assert_int_equal(r->n_tokens, n_pages * PAGE_TOKENS);
    assert_int_equal(r->n_copies, n_pages + 1);
    assert_int_equal(r->n_disk_pages, from_disk ? n_pages + 1 : 0);
    assert_int_equal(r->bytes, (uint64_t)n_pages * PAGE_BYTES + STATE_BYTES);
    for (int i = 0; i < KV_RESTORE_STAGE_N; i++)
        us += r->stage_us[i];
    assert_int_equal(us, r->us);
    kv_restore_end(restore);
    expect_every_byte(rig);
    printf("%u tokens, %.0f MiB from %s: %.1f ms, %.2f GB/s; reading %.3f, checking %.3f, copying %.3f, waiting %.3f\n",
           r->n_tokens, (double)r->bytes / (double)MIB, from_disk ? "disk" : "host", (double)r->us / 1000,
           (double)r->bytes / (double)r->us / 1000, share(r, KV_RESTORE_READING), share(r, KV_RESTORE_CHECKING),
           share(r, KV_RESTORE_COPYING), share(r, KV_RESTORE_WAITING));
    return 1 - (double)us / (double)(rig->done_us - began_us);
}

static struct rig rig;

static void from_host_memory_it_is_copied_and_nothing_else(void **state) {
    double missing = 1;

    (void)state;
    for (int i = 0; i < N_TRIES && missing > 0.05; i++) {
        missing = restore(&rig, false);
        assert_int_equal(rig.restored.stage_us[KV_RESTORE_READING] + rig.restored.stage_us[KV_RESTORE_CHECKING], 0);
        assert_int_equal(largest(&rig.restored), rig.restored.stage_us[KV_RESTORE_COPYING]);
    }
    assert_true(missing >= 0 && missing <= 0.05);
}

static void from_disk_checking_is_not_what_takes_longest(void **state) {
    bool is_so = false;

    (void)state;
    for (int i = 0; i < N_TRIES && !is_so; i++) {
        double missing = restore(&rig, true);

        assert_true(rig.restored.stage_us[KV_RESTORE_READING] > 0);
        is_so = missing >= 0 && missing <= 0.05 && rig.restored.stage_us[KV_RESTORE_CHECKING] < largest(&rig.restored);
    }
    assert_true(is_so);
}

/* As with a hash that is made for something else. */
static void were_it_slow_it_would_be(void **state) {
    bool is_so = false;

    (void)state;
    rig.check_us = SLOW_CHECK_US;
    for (int i = 0; i < N_TRIES && !is_so; i++) {
        restore(&rig, true);
        is_so = rig.restored.stage_us[KV_RESTORE_CHECKING] == largest(&rig.restored);
    }
    rig.check_us = 0;
    assert_true(is_so);
}

static int set_up(void **state) {
    (void)state;
    open_rig(&rig);
    make(&rig);
    return 0;
}

static int tear_down(void **state) {
    (void)state;
    close_rig(&rig);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(from_host_memory_it_is_copied_and_nothing_else),
        cmocka_unit_test(from_disk_checking_is_not_what_takes_longest),
        cmocka_unit_test(were_it_slow_it_would_be),
    };

    if (argc > 1)
        n_pages = (uint32_t)strtoul(argv[1], NULL, 10);
    if (argc > 2)
        folder = argv[2];
    if (n_pages == 0) {
        fprintf(stderr, "fault_restore_large [n_pages [folder]]\n");
        return 1;
    }
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
