#include "spill.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "format.h"
#include "store_internal.h"

struct item {        /* one copy of a batch */
    uint32_t record; /* of the shelf */
    enum kv_group group;
    uint64_t checksum;
};

struct job {
    struct kv_spill *spill;
    struct kv_lease lease;
    bool is_busy;
    uint32_t uid;
    enum kv_spill_depth depth;
    uint32_t page;            /* next to look at */
    int group;                /* of it */
    uint32_t n_stop, n_saved; /* pages up to the end of the stretch at hand, of the one before */
    bool is_saving;           /* the stretch goes to the disk, as this saving */
    uint64_t save;
    struct kv_copy_batch batch;
    struct kv_work_item work;
    struct item items[KV_COPIES_MAX];
};

struct kv_spill {
    struct kv_spill_options options;
    struct kv_vault *vault;
    struct job *jobs; /* [n_jobs] */
    struct kv_spill_stats stats;
};

static void on_copied(struct kv_copy_batch *batch);
static void on_check(struct kv_work_item *work);
static void on_checked(struct kv_work_item *work);

int kv_spill_open(const struct kv_spill_options *options, struct kv_spill **ret_spill) {
    struct kv_spill *spill = calloc(1, sizeof *spill);
    int r = 0;

    if (!spill)
        return -ENOMEM;
    spill->options = *options;
    spill->jobs = calloc(options->n_jobs, sizeof *spill->jobs);
    if (!spill->jobs)
        r = -ENOMEM;
    for (uint32_t i = 0; r == 0 && i < options->n_jobs; i++) {
        struct job *job = &spill->jobs[i];

        job->spill = spill;
        job->batch = (struct kv_copy_batch){.direction = KV_COPY_SPILL, .done = on_copied};
        job->work = (struct kv_work_item){.run = on_check, .done = on_checked};
        r = kv_lease_init(&job->lease, options->store, options->n_pages_max);
    }
    if (r != 0) {
        kv_spill_close(spill);
        return r;
    }
    *ret_spill = spill;
    return 0;
}

void kv_spill_close(struct kv_spill *spill) {
    if (!spill)
        return;
    for (uint32_t i = 0; spill->jobs && i < spill->options.n_jobs; i++) {
        assert(!spill->jobs[i].is_busy);
        kv_lease_deinit(&spill->jobs[i].lease);
    }
    free(spill->jobs);
    free(spill);
}

/* ---- batches -------------------------------------------------------------------------------------------------------- */

static struct kv_page_name name_of(const struct job *job, uint32_t page) {
    const struct kv_index *index = &job->spill->options.store->index;
    uint32_t record = job->lease.records[page];

    return (struct kv_page_name){.key = index->records[record].key,
                                 .page_idx = page,
                                 .tokens = index->tokens[record],
                                 .parent = page > 0 ? &index->records[job->lease.records[page - 1]].key : NULL,
                                 .uid = job->uid};
}

static void add(struct job *job, const struct kv_page_name *name, enum kv_group group, uint32_t device_slot) {
    struct kv_spill *spill = job->spill;
    struct item *item = &job->items[job->batch.n];
    void *payload;
    int r = kv_shelf_reserve(spill->options.shelf, name, group, &item->record, &payload);

    spill->stats.n_no_slot += r == KV_SHELF_E_FULL;
    if (r != 0)
        return;
    item->group = group;
    job->batch.transfers[job->batch.n++] =
        (struct kv_transfer){payload, kv_store_slot(spill->options.store, group, device_slot),
                             kv_shelf_payload_bytes(spill->options.shelf, group)};
}

/* Fills the batch from where the job is. Sliding pages are wanted in the window of the restore point only. */
static void fill(struct job *job) {
    const struct kv_index *index = &job->spill->options.store->index;
    uint32_t n_pages = job->lease.n_pages;

    job->batch.n = 0;
    for (; job->page < job->n_stop; job->page++, job->group = 0) {
        struct kv_page_name name = name_of(job, job->page);

        for (; job->group < KV_GROUP_N; job->group++) {
            enum kv_group group = (enum kv_group)job->group;
            uint32_t slot = kv_lease_slot(&job->lease, group, job->page);

            if (job->batch.n == KV_COPIES_MAX)
                return;
            if (slot == KV_NO_SLOT || kv_shelf_payload_bytes(job->spill->options.shelf, group) == 0 ||
                (group == KV_DRAFT_SLIDING && job->page < kv_window_first_page(index->window_tokens, n_pages)))
                continue;
            add(job, &name, group, slot);
        }
    }
}

/* The chain leaves after all others now, and from its end: without this its own next pages would push it out. */
static void touch_chain(struct job *job) {
    for (uint32_t page = job->lease.n_pages; page-- > 0;) {
        struct kv_page_name name = name_of(job, page);

        kv_shelf_touch(job->spill->options.shelf, &name);
    }
}

static enum kv_vault_save save_of(const struct job *job) {
    return job->depth == KV_SPILL_MUST ? KV_VAULT_SAVE_MUST : KV_VAULT_SAVE_WORTH;
}

static void go_on_to_disk(const struct job *job) {
    struct kv_spill_options *o = &job->spill->options;
    struct kv_page_name name;
    uint32_t record;

    if (!job->spill->vault || job->depth == KV_SPILL_TO_HOST || job->lease.n_pages == 0)
        return;
    name = name_of(job, job->lease.n_pages - 1);
    record = kv_shelf_find(o->shelf, &name);
    if (kv_shelf_has(o->shelf, record, KV_TARGET_STATE))
        kv_vault_save(job->spill->vault, record, save_of(job));
}

static void end(struct job *job) {
    touch_chain(job);
    go_on_to_disk(job);
    kv_lease_release(&job->lease);
    job->is_busy = false;
    job->spill->stats.n_jobs--;
}

static void abandon_batch(struct job *job) {
    for (int i = 0; i < job->batch.n; i++)
        kv_shelf_abandon(job->spill->options.shelf, job->items[i].record, job->items[i].group);
    job->spill->stats.n_failed += (uint64_t)job->batch.n;
}

/* ---- stretches ------------------------------------------------------------------------------------------------------ */

enum { STRETCHES = 4 /* of the shelf: no more of it is a long chain's at a time */ };

static uint32_t n_slots_of(const struct kv_spill *spill) {
    struct kv_shelf_group_stats pages;

    kv_shelf_stats(spill->options.shelf, KV_TARGET_FULL, &pages);
    return pages.n_slots - pages.n_away;
}

static void next_stretch(struct job *job) {
    uint32_t n_slots = n_slots_of(job->spill), n_left = job->lease.n_pages - job->n_stop;

    job->n_saved = job->n_stop;
    job->n_stop += job->lease.n_pages <= n_slots ? n_left : (uint32_t)min_u64(n_left, n_slots / STRETCHES + 1);
}

static bool is_on_disk(const struct job *job, uint32_t page) {
    const struct kv_vault *vault = job->spill->vault;
    struct kv_page_name name = name_of(job, page);

    return vault && kv_vault_has(vault, &name.key, page, KV_TARGET_FULL);
}

/* And the one before it is still there: a disk smaller than the chain would take the place of one for the other. */
static bool has_saved_stretch(const struct job *job) {
    return is_on_disk(job, job->n_stop - 1) && (job->n_saved == 0 || is_on_disk(job, job->n_saved - 1));
}

/* False: its end did not get onto the shelf. */
static bool save_stretch(struct job *job) {
    struct kv_spill *spill = job->spill;
    struct kv_page_name name = name_of(job, job->n_stop - 1);
    uint32_t record = kv_shelf_find(spill->options.shelf, &name);

    if (!spill->vault || record == KV_NO_RECORD || !kv_shelf_has(spill->options.shelf, record, KV_TARGET_FULL))
        return false;
    job->is_saving = true;
    job->save = kv_vault_save_pages(spill->vault, record, save_of(job));
    return true;
}

/* ---- a chain's way -------------------------------------------------------------------------------------------------- */

static void give_up_rest(struct job *job) {
    job->spill->stats.n_no_slot += job->lease.n_pages - job->n_stop;
    end(job);
}

/* The next batch, or the end. A batch that cannot be sent is given up, and with it the rest of the chain: what the shelf
 * has of it already stays. */
static void step(struct job *job) {
    struct kv_copier *copier = &job->spill->options.copier;

    fill(job);
    if (job->batch.n > 0 && copier->submit(copier->user, &job->batch) == 0)
        return;
    abandon_batch(job);
    if (job->batch.n > 0 || job->n_stop == job->lease.n_pages)
        end(job);
    else if (!save_stretch(job))
        give_up_rest(job);
}

static void go_on_after_stretch(struct job *job) {
    job->is_saving = false;
    if (!has_saved_stretch(job)) {
        give_up_rest(job);
        return;
    }
    for (uint32_t page = job->n_saved; page < job->n_stop; page++) {
        struct kv_page_name name = name_of(job, page);

        kv_shelf_let_leave(job->spill->options.shelf, &name);
    }
    next_stretch(job);
    step(job);
}

bool kv_spill_turn(struct kv_spill *spill) {
    bool has_moved = false;

    for (uint32_t i = 0; i < spill->options.n_jobs; i++) {
        struct job *job = &spill->jobs[i];

        if (!job->is_busy || !job->is_saving || (spill->vault && !kv_vault_has_saved(spill->vault, job->save)))
            continue;
        go_on_after_stretch(job);
        has_moved = true;
    }
    return has_moved;
}

void kv_spill_set_vault(struct kv_spill *spill, struct kv_vault *vault) {
    spill->vault = vault;
    kv_spill_turn(spill);
}

static void on_copied(struct kv_copy_batch *batch) {
    struct job *job = container_of(batch, struct job, batch);
    struct kv_work *work = &job->spill->options.work;

    if (batch->result == 0 && work->submit(work->user, &job->work) == 0)
        return;
    abandon_batch(job);
    end(job);
}

/* On another thread: the slots are being filled, so nobody else looks at them. */
static void on_check(struct kv_work_item *work) {
    struct job *job = container_of(work, struct job, work);

    for (int i = 0; i < job->batch.n; i++)
        job->items[i].checksum = format_checksum(job->batch.transfers[i].dst, job->batch.transfers[i].bytes);
}

static void on_checked(struct kv_work_item *work) {
    struct job *job = container_of(work, struct job, work);
    struct kv_spill *spill = job->spill;

    for (int i = 0; i < job->batch.n; i++) {
        kv_shelf_filled(spill->options.shelf, job->items[i].record, job->items[i].group, job->items[i].checksum);
        spill->stats.bytes += job->batch.transfers[i].bytes;
    }
    spill->stats.n_copies += (uint64_t)job->batch.n;
    step(job);
}

/* ---- chains --------------------------------------------------------------------------------------------------------- */

void kv_spill_start(struct kv_spill *spill, const struct kv_lease *lease, uint32_t n_pages, uint32_t uid,
                    enum kv_spill_depth depth) {
    if (n_pages > n_slots_of(spill) && (!spill->vault || depth == KV_SPILL_TO_HOST)) { /* it would push itself out */
        spill->stats.n_no_slot += n_pages;
        return;
    }
    for (uint32_t i = 0; i < spill->options.n_jobs; i++) {
        struct job *job = &spill->jobs[i];

        if (job->is_busy)
            continue;
        job->is_busy = true;
        job->uid = uid;
        job->depth = depth;
        job->page = job->n_stop = 0;
        job->group = 0;
        job->is_saving = false;
        spill->stats.n_jobs++;
        kv_lease_hold_same(&job->lease, lease, n_pages);
        next_stretch(job);
        touch_chain(job);
        step(job);
        return;
    }
    spill->stats.n_no_job++;
}

bool kv_spill_is_idle(const struct kv_spill *spill) {
    return spill->stats.n_jobs == 0;
}

void kv_spill_stats(const struct kv_spill *spill, struct kv_spill_stats *ret_stats) {
    *ret_stats = spill->stats;
}
