#include "scrub.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>

enum { PERIOD_US = 1000 * 1000 };
#define ROUND_US (UINT64_C(24) * 3600 * 1000 * 1000)

/* A copy on the shelf that a worker looks at. */
struct sample {
    bool is_out;
    struct kv_work_item work;
    uint32_t record; /* pinned */
    enum kv_group group;
    const void *payload;
    size_t bytes;
    uint64_t checksum;
};

struct kv_scrub {
    struct kv_scrub_options options;
    struct kv_vault_scrub slot;
    bool is_slot_out;
    struct sample sample;
    bool was_disk;                   /* the last one; they take turns */
    bool is_disk_done, is_host_done; /* with this round */
    uint32_t next_record;            /* of the shelf, and its group */
    int next_group;
    int64_t credit_bytes; /* that may be looked at in this period */
    uint64_t period_us;   /* when the next one begins */
    uint64_t round_us;    /* the same of rounds */
    struct kv_scrub_stats stats;
};

static void spend(struct kv_scrub *scrub, size_t bytes) {
    scrub->credit_bytes -= (int64_t)bytes;
    scrub->stats.bytes += bytes;
}

static void on_slot(struct kv_vault_scrub *slot) {
    struct kv_scrub *scrub = container_of(slot, struct kv_scrub, slot);

    scrub->is_slot_out = false;
    scrub->stats.n_disk += !slot->is_unread;
    scrub->stats.n_unread += slot->is_unread;
    scrub->stats.n_disk_damaged += slot->is_damaged;
}

static void on_sample(struct kv_work_item *work) {
    struct sample *sample = container_of(work, struct sample, work);

    sample->checksum = format_checksum(sample->payload, sample->bytes);
}

static void on_sampled(struct kv_work_item *work) {
    struct kv_scrub *scrub = container_of(work, struct kv_scrub, sample.work);
    struct kv_shelf *shelf = scrub->options.shelf;
    struct sample *sample = &scrub->sample;
    bool is_damaged = sample->checksum != kv_shelf_checksum(shelf, sample->record, sample->group);

    sample->is_out = false;
    scrub->stats.n_host++;
    scrub->stats.n_host_damaged += is_damaged;
    if (is_damaged)
        kv_shelf_drop(shelf, sample->record, sample->group);
    kv_shelf_unpin_unused(shelf, sample->record, sample->group);
}

int kv_scrub_open(const struct kv_scrub_options *options, struct kv_scrub **ret_scrub) {
    struct kv_scrub *scrub = calloc(1, sizeof *scrub);

    if (!scrub)
        return -ENOMEM;
    scrub->options = *options;
    scrub->slot.done = on_slot;
    scrub->is_disk_done = !options->vault;
    scrub->period_us = options->now_us() + PERIOD_US;
    scrub->round_us = options->now_us() + ROUND_US;
    *ret_scrub = scrub;
    return 0;
}

void kv_scrub_close(struct kv_scrub *scrub) {
    if (!scrub)
        return;
    assert(!scrub->sample.is_out);
    if (scrub->options.vault)
        kv_vault_scrub_cancel(scrub->options.vault);
    free(scrub);
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

/* These are true if something is out, or another one may be tried at once. */
static bool look_at_host(struct kv_scrub *scrub) {
    struct kv_shelf *shelf = scrub->options.shelf;
    struct sample *sample = &scrub->sample;

    if (!kv_shelf_next_clean(shelf, &scrub->next_record, &scrub->next_group)) {
        scrub->next_record = 0;
        scrub->next_group = 0;
        scrub->is_host_done = true;
        return true;
    }
    sample->record = scrub->next_record;
    sample->group = (enum kv_group)scrub->next_group++;
    sample->bytes = kv_shelf_payload_bytes(shelf, sample->group);
    sample->payload = kv_shelf_pin(shelf, sample->record, sample->group);
    sample->work = (struct kv_work_item){.run = on_sample, .done = on_sampled};
    sample->is_out = scrub->options.work->submit(scrub->options.work->user, &sample->work) == 0;
    if (sample->is_out)
        spend(scrub, sample->bytes);
    else
        kv_shelf_unpin_unused(shelf, sample->record, sample->group);
    return sample->is_out;
}

static bool look_at_disk(struct kv_scrub *scrub) {
    int r = kv_vault_scrub(scrub->options.vault, &scrub->slot, scrub->is_disk_done);

    scrub->is_disk_done = scrub->is_disk_done || r == KV_VAULT_E_NONE;
    scrub->is_slot_out = r == 0;
    if (r == 0)
        spend(scrub, scrub->slot.bytes);
    return r == 0 || r == KV_VAULT_E_NONE;
}

static bool wants_disk(const struct kv_scrub *scrub) {
    return !scrub->is_disk_done || (scrub->options.vault && kv_vault_has_suspects(scrub->options.vault));
}

/* Disk and host take turns. */
static bool look(struct kv_scrub *scrub) {
    scrub->was_disk = wants_disk(scrub) && (!scrub->was_disk || scrub->is_host_done);
    return scrub->was_disk ? look_at_disk(scrub) : look_at_host(scrub);
}

uint64_t kv_scrub_turn(struct kv_scrub *scrub, bool is_idle) {
    uint64_t now = scrub->options.now_us();

    if (scrub->is_host_done && scrub->is_disk_done && now >= scrub->round_us) {
        scrub->stats.n_rounds++;
        scrub->round_us = now + ROUND_US;
        scrub->is_host_done = false;
        scrub->is_disk_done = !scrub->options.vault;
    }
    if (now >= scrub->period_us) { /* what was not used is not saved up */
        scrub->credit_bytes += (int64_t)scrub->options.bytes_per_s;
        if (scrub->credit_bytes > (int64_t)scrub->options.bytes_per_s)
            scrub->credit_bytes = (int64_t)scrub->options.bytes_per_s;
        scrub->period_us = now + PERIOD_US;
    }
    for (;;) {
        if (scrub->sample.is_out || scrub->is_slot_out)
            return 0;
        if (scrub->is_host_done && !wants_disk(scrub))
            return scrub->round_us;
        if (!is_idle || scrub->credit_bytes <= 0 || !look(scrub))
            return scrub->period_us;
    }
}

bool kv_scrub_is_looking(const struct kv_scrub *scrub) {
    return scrub->sample.is_out || scrub->is_slot_out;
}

void kv_scrub_stats(const struct kv_scrub *scrub, struct kv_scrub_stats *ret_stats) {
    *ret_stats = scrub->stats;
}
