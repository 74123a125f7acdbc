/* vault_save: chains go down, one after the other, their pages side by side. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "vault_internal.h"

#define DAY_US (24.0 * 3600 * 1e6)

/* ---- the queue ------------------------------------------------------------------------------------------------------ */

/* Its record still is what it was, on the shelf. */
static bool is_there(const struct kv_vault *vault, const struct vault_save *save) {
    struct kv_page_name name;

    if (!kv_shelf_has(vault->options.shelf, save->shelf_record, save->is_pages ? KV_TARGET_FULL : KV_TARGET_STATE))
        return false;
    name = kv_shelf_name(vault->options.shelf, save->shelf_record);
    return memcmp(&name.key, &save->key, sizeof name.key) == 0;
}

/* The one that gives its place to one that must be. */
static struct vault_save *last_worth(struct kv_vault *vault) {
    for (uint32_t i = vault->n_queued; i-- > 0;) {
        struct vault_save *save = &vault->queue[(vault->queue_first + i) % VAULT_QUEUE];

        if (save->why == KV_VAULT_SAVE_WORTH)
            return save;
    }
    return NULL;
}

static void enqueue(struct kv_vault *vault, const struct vault_save *new) {
    for (uint32_t i = 0; i < vault->n_queued; i++) {
        struct vault_save *save = &vault->queue[(vault->queue_first + i) % VAULT_QUEUE];

        if (memcmp(&save->key, &new->key, sizeof new->key) != 0)
            continue;
        save->shelf_record = new->shelf_record;
        save->why = save->why == KV_VAULT_SAVE_MUST ? KV_VAULT_SAVE_MUST : new->why;
        save->is_pages = save->is_pages && new->is_pages;
        return;
    }
    if (vault->n_queued == VAULT_QUEUE) {
        struct vault_save *last = new->why == KV_VAULT_SAVE_MUST ? last_worth(vault) : NULL;

        vault->stats.n_skipped_full++;
        if (last)
            *last = *new;
        return;
    }
    vault->queue[(vault->queue_first + vault->n_queued++) % VAULT_QUEUE] = *new;
    vault->n_saves_asked++;
}

void kv_vault_save(struct kv_vault *vault, uint32_t shelf_record, enum kv_vault_save why) {
    struct kv_page_name name = kv_shelf_name(vault->options.shelf, shelf_record);

    if (why == KV_VAULT_SAVE_WORTH && name.page_idx + 1 < vault->options.n_pages_min) {
        vault->stats.n_skipped_short++;
        return;
    }
    enqueue(vault, &(struct vault_save){.key = name.key, .shelf_record = shelf_record, .why = why});
}

uint64_t kv_vault_save_pages(struct kv_vault *vault, uint32_t shelf_record, enum kv_vault_save why) {
    struct kv_page_name name = kv_shelf_name(vault->options.shelf, shelf_record);

    enqueue(vault, &(struct vault_save){.key = name.key, .shelf_record = shelf_record, .why = why, .is_pages = true});
    return vault->n_saves_asked; /* in order: with it, all before it are over */
}

bool kv_vault_has_saved(const struct kv_vault *vault, uint64_t save) {
    return vault->n_saves_done >= save;
}

void kv_vault_save_all(struct kv_vault *vault) {
    vault->next_of_all = 0;
    vault->n_alls_asked++;
}

bool kv_vault_is_saving(const struct kv_vault *vault) {
    return vault->save.is_running || vault->n_queued > 0 || vault->next_of_all != KV_NO_RECORD;
}

/* ---- the chain at hand ---------------------------------------------------------------------------------------------- */

static bool is_kept(const struct kv_vault *vault, uint32_t shelf_record, enum kv_group group) {
    struct kv_page_name name = kv_shelf_name(vault->options.shelf, shelf_record);

    return catalog_knows(vault->catalog, &name.key, name.page_idx, group);
}

/* From the end to the beginning, by the keys of the pages before. Where the shelf has a page no longer, the disk must have
 * it, and then it is taken to have those before it too: what leaves the disk leaves it from the end of a chain. */
static bool collect(struct kv_vault *vault, uint32_t record) {
    const struct kv_shelf *shelf = vault->options.shelf;
    struct kv_page_name name = kv_shelf_name(shelf, record);
    bool has_draft = true;

    vault->save.n = name.page_idx + 1;
    if (vault->save.n > vault->options.n_pages_max)
        return false;
    vault->save.draft_first_page = vault->save.n;
    for (uint32_t page = vault->save.n; page-- > 0;) {
        if (record == KV_NO_RECORD || !kv_shelf_has(shelf, record, KV_TARGET_FULL)) {
            if (!catalog_knows(vault->catalog, &name.key, page, KV_TARGET_FULL))
                return false;
            if (record == KV_NO_RECORD) {
                for (uint32_t before = 0; before <= page; before++)
                    vault->save.records[before] = KV_NO_RECORD;
                return true;
            }
        }
        vault->save.records[page] = record;
        vault->save.keys[page] = name.key;
        has_draft = has_draft &&
                    (kv_shelf_payload_bytes(shelf, KV_DRAFT_FULL) == 0 || kv_shelf_has(shelf, record, KV_DRAFT_FULL));
        if (has_draft)
            vault->save.draft_first_page = page;
        if (page == 0)
            break;
        name.key = *name.parent;
        record = kv_shelf_find_key(shelf, &name.key, page - 1);
        if (record != KV_NO_RECORD)
            name = kv_shelf_name(shelf, record);
    }
    return true;
}

static void begin(struct kv_vault *vault, uint32_t record, enum kv_vault_save why) {
    if (!collect(vault, record)) {
        vault->stats.n_skipped_gone++;
        return;
    }
    vault->save.is_running = true;
    vault->save.is_unwanted = false;
    vault->save.uid = kv_shelf_name(vault->options.shelf, record).uid;
    vault->save.at = 0;
    vault->save.group = 0;
    vault->save.saved = (struct kv_vault_saved){.why = why, .n_tokens = vault->save.n * PAGE_TOKENS, .outcome = "done"};
    vault->save.began_us = vault->options.now_us();
    for (int g = 0; g < KV_GROUP_N; g++)
        vault->save.near[g] = KV_NO_SLOT;
}

/* From its end, so that it leaves from its end: what lies before a page that is gone is found without it, and what lies
 * behind it is not. */
static void touch_chain(struct kv_vault *vault) {
    for (uint32_t page = vault->save.n; page-- > 0;) {
        if (vault->save.records[page] == KV_NO_RECORD)
            continue;
        for (int g = 0; g < KV_GROUP_N; g++) {
            uint32_t record = catalog_find(vault->catalog, &vault->save.keys[page], page, (enum kv_group)g);

            if (record != KV_NO_RECORD)
                catalog_touch(vault->catalog, record);
        }
    }
}

/* Whatever the reason: what is not found now is not found after a restart. */
static void count_unsaved(struct kv_vault *vault) {
    const struct kv_shelf *shelf = vault->options.shelf;
    uint32_t last = vault->save.n - 1, record = vault->save.records[last];

    if (vault->save.saved.why != KV_VAULT_SAVE_MUST || vault->save.is_unwanted)
        return;
    for (uint32_t page = 0; page <= last; page++)
        vault->n_unsaved += vault->save.records[page] != KV_NO_RECORD &&
                            catalog_find(vault->catalog, &vault->save.keys[page], page, KV_TARGET_FULL) == KV_NO_RECORD;
    vault->n_unsaved +=
        kv_shelf_has(shelf, record, KV_TARGET_STATE) &&
        memcmp(kv_shelf_name(shelf, record).key.bytes, vault->save.keys[last].bytes, KV_KEY_BYTES) == 0 &&
        catalog_find(vault->catalog, &vault->save.keys[last], last, KV_TARGET_STATE) == KV_NO_RECORD;
}

static void end(struct kv_vault *vault) {
    struct kv_vault_saved *saved = &vault->save.saved;

    count_unsaved(vault);
    touch_chain(vault);
    vault->save.is_running = false;
    saved->us = vault->options.now_us() - vault->save.began_us;
    if (vault->options.on_saved && (saved->n_slots > 0 || strcmp(saved->outcome, "done") != 0))
        vault->options.on_saved(vault->options.user, saved);
    vault->stats.n_saves++;
    vault->n_saves_done += !vault->save.is_of_all;
}

static bool begin_next(struct kv_vault *vault) {
    if (vault->n_queued > 0) {
        struct vault_save save = vault->queue[vault->queue_first];

        vault->queue_first = (vault->queue_first + 1) % VAULT_QUEUE;
        vault->n_queued--;
        vault->save.is_of_all = false;
        if (is_there(vault, &save))
            begin(vault, save.shelf_record, save.why);
        else
            vault->stats.n_skipped_gone++;
        if (!vault->save.is_running)
            vault->n_saves_done++;
        return true;
    }
    if (vault->next_of_all == KV_NO_RECORD)
        return false;
    vault->next_of_all = kv_shelf_next_state(vault->options.shelf, vault->next_of_all);
    if (vault->next_of_all == KV_NO_RECORD) {
        vault->n_alls_done = vault->n_alls_asked;
        return false;
    }
    vault->save.is_of_all = true;
    if (kv_shelf_name(vault->options.shelf, vault->next_of_all).page_idx + 1 >= vault->options.n_pages_min)
        begin(vault, vault->next_of_all, KV_VAULT_SAVE_MUST);
    vault->next_of_all++;
    return true;
}

/* ---- pages ---------------------------------------------------------------------------------------------------------- */

static void on_written(struct disk_op *op) {
    struct vault_write *write = container_of(op, struct vault_write, op);
    struct kv_vault *vault = write->vault;
    struct catalog_view view = catalog_look(vault->catalog, write->record);

    write->is_busy = false;
    vault->save.n_out -= !write->is_given_up;
    kv_shelf_unpin(vault->options.shelf, write->shelf_record, write->group);
    if (op->result == 0) {
        catalog_stored(vault->catalog, write->record, ++vault->tick);
        vault_stored_in(vault, view.segment, op->bytes);
        vault->stats.n_saved_pages++;
        vault->stats.saved_bytes += op->bytes;
        vault->save.saved.n_slots++;
        vault->save.saved.bytes += op->bytes;
        vault_report(vault, write->ticket, &write->is_reported, KV_BREAKER_WORKED);
        if (write->is_unwanted || vault->segment[view.segment].is_leaving)
            vault_forget(vault, write->record);
        return;
    }
    vault_forget(vault, write->record);
    if (op->result == -ECANCELED)
        return;
    vault->save.saved.outcome = "write failed";
    vault_write_failed(vault, op->result);
    vault_report(vault, write->ticket, &write->is_reported,
                 vault_is_no_space(op->result) ? KV_BREAKER_WORKED : KV_BREAKER_FAILED);
    if (op->result == -EIO)
        vault_retire(vault, view.segment); /* the next ones go elsewhere */
}

/* The chain does not wait for it: it may never come. Slot and page are the kernel's until it does. */
static void on_late_write(struct disk_op *op) {
    struct vault_write *write = container_of(op, struct vault_write, op);

    write->is_given_up = true;
    write->vault->save.n_out--;
    vault_report(write->vault, write->ticket, &write->is_reported, KV_BREAKER_LATE);
}

static void write_header(struct kv_vault *vault, const struct vault_write *write, void *block) {
    struct kv_page_name name = kv_shelf_name(vault->options.shelf, write->shelf_record);
    uint64_t sequence = ++vault->write_sequence;
    struct format_slot slot = {.write_sequence = sequence,
                               .generation = sequence,
                               .group = write->group,
                               .key = name.key,
                               .page_idx = name.page_idx,
                               .uid = name.uid,
                               .draft_first_page = write->group == KV_TARGET_STATE ? vault->save.draft_first_page : 0,
                               .saved_unix_s = (uint64_t)time(NULL),
                               .payload_bytes = (uint32_t)kv_shelf_payload_bytes(vault->options.shelf, write->group),
                               .payload_checksum =
                                   kv_shelf_checksum(vault->options.shelf, write->shelf_record, write->group)};

    memcpy(slot.store_id, vault->options.store_id, sizeof slot.store_id);
    memcpy(slot.fingerprint, vault->options.fingerprint, sizeof slot.fingerprint);
    if (kv_group_is_draft(write->group))
        memcpy(slot.drafter, vault->options.drafter, sizeof slot.drafter);
    if (name.parent)
        slot.parent = *name.parent;
    memcpy(slot.tokens, name.tokens, sizeof slot.tokens);
    format_slot_write(&slot, block);
}

enum taken { TAKEN, TAKE_LATER, TAKE_NEVER };

static enum taken take_slot(struct kv_vault *vault, enum kv_group group, uint32_t *ret_slot) {
    for (;;) {
        bool has_room = vault_has_room(vault);
        int r = has_room ? segment_take(vault->segments, group, vault->save.near[group], ret_slot) : SEGMENT_E_FULL;
        uint32_t loser;

        if (r == 0)
            return TAKEN;
        if (has_room ? r == SEGMENT_E_BUSY || vault_prepare_segment(vault, group) : vault_is_blanking(vault))
            return TAKE_LATER;
        loser = catalog_oldest_for(vault->catalog, group, vault->save.uid);
        if (loser == KV_NO_RECORD) /* what is to be blanked comes free soon */
            return vault_is_blanking(vault) ? TAKE_LATER : TAKE_NEVER;
        vault_evict(vault, loser);
    }
}

/* A segment that is nearly full is followed by the next before anybody waits for it. */
static void prepare_ahead(struct kv_vault *vault, enum kv_group group) {
    struct segment_stats stats;
    const struct segment_group_stats *g = &stats.group[group];

    segment_stats(vault->segments, &stats);
    if (g->n_segments > 0 && g->n_preparing == 0 && (g->n_slots - g->n_taken) * 4 < g->n_slots / g->n_segments)
        vault_prepare_segment(vault, group);
}

/* While somebody waits for a page to come up, one goes down at a time. */
static struct vault_write *free_write(struct kv_vault *vault) {
    if (vault->save.n_out > 0 && vault_is_reading(vault))
        return NULL;
    for (int i = 0; i < VAULT_WRITES; i++)
        if (!vault->writes[i].is_busy)
            return &vault->writes[i];
    return NULL;
}

/* False: not now. */
static bool write_page(struct kv_vault *vault, uint32_t shelf_record, enum kv_group group) {
    struct kv_shelf *shelf = vault->options.shelf;
    struct kv_page_name name = kv_shelf_name(shelf, shelf_record);
    struct catalog_entry entry = {.key = name.key, .group = group, .page_idx = name.page_idx, .uid = name.uid};
    struct vault_write *write = free_write(vault);
    enum taken taken;
    char *payload;

    if (!write || !kv_breaker_is_ready(&vault->breaker))
        return false;
    taken = take_slot(vault, group, &entry.slot);
    if (taken != TAKEN) {
        if (taken == TAKE_NEVER) {
            vault->stats.n_skipped_full++;
            vault->save.saved.outcome = "disk full";
        }
        return taken == TAKE_NEVER;
    }
    vault_locate(vault, group, entry.slot, &write->op);
    entry.segment = write->op.segment;
    if (!kv_breaker_is_ready(&vault->breaker) || catalog_put(vault->catalog, &entry, &write->record) != 0) {
        segment_give(vault->segments, group, entry.slot);
        return false;
    }
    kv_breaker_admits(&vault->breaker, &write->ticket); /* it is ready */
    write->is_reported = write->is_given_up = write->is_unwanted = false;
    vault->save.near[group] = entry.slot;
    payload = kv_shelf_pin(shelf, shelf_record, group);
    write->is_busy = true;
    write->shelf_record = shelf_record;
    write->group = group;
    write->op.kind = DISK_WRITE;
    write->op.buffer = payload - FORMAT_BLOCK_BYTES;
    write->op.bytes = (uint32_t)kv_shelf_slot_bytes(shelf, group);
    write->op.done = on_written;
    write->op.late = on_late_write;
    write_header(vault, write, write->op.buffer);
    vault->save.n_out++;
    write->op.result = disk_submit(vault->disk, &write->op, vault->options.now_us());
    if (write->op.result != 0) { /* as if it had been sent and failed */
        write->op.result = write->op.result < 0 ? write->op.result : -EAGAIN;
        on_written(&write->op);
        return true;
    }
    vault->budget_bytes -= write->op.bytes;
    prepare_ahead(vault, group);
    return true;
}

/* The page left the shelf meanwhile, and is not on disk either: what comes after it would be found by nobody. */
static bool is_gone(const struct kv_vault *vault, uint32_t page) {
    const struct kv_shelf *shelf = vault->options.shelf;
    struct kv_page_name name = kv_shelf_name(shelf, vault->save.records[page]);

    return (memcmp(&name.key, &vault->save.keys[page], sizeof name.key) != 0 ||
            !kv_shelf_has(shelf, vault->save.records[page], KV_TARGET_FULL)) &&
           !catalog_knows(vault->catalog, &vault->save.keys[page], page, KV_TARGET_FULL);
}

/* The state goes last, and of the last page only. False: not now. */
static bool write_next(struct kv_vault *vault) {
    static const enum kv_group ORDER[] = {KV_TARGET_FULL, KV_DRAFT_FULL, KV_DRAFT_SLIDING, KV_TARGET_STATE};
    uint32_t record = vault->save.records[vault->save.at];
    struct kv_page_name name = kv_shelf_name(vault->options.shelf, record);
    bool is_same = memcmp(&name.key, &vault->save.keys[vault->save.at], sizeof name.key) == 0;

    if (is_gone(vault, vault->save.at)) {
        vault->stats.n_skipped_gone++;
        vault->save.at = vault->save.n;
        return true;
    }
    for (; vault->save.group < KV_GROUP_N; vault->save.group++) {
        enum kv_group group = ORDER[vault->save.group];

        if (!is_same || !kv_shelf_has(vault->options.shelf, record, group) ||
            vault->options.group[group].slot_bytes == 0 ||
            (group == KV_TARGET_STATE && vault->save.at + 1 < vault->save.n) || is_kept(vault, record, group))
            continue;
        if (!write_page(vault, record, group))
            return false;
    }
    vault->save.group = 0;
    vault->save.at++;
    return true;
}

static void refill_budget(struct kv_vault *vault) {
    uint64_t now = vault->options.now_us();
    double per_day = (double)vault->options.write_bytes_per_day;

    vault->budget_bytes += (double)(now - vault->budget_us) * per_day / DAY_US;
    if (vault->budget_bytes > per_day)
        vault->budget_bytes = per_day;
    vault->budget_us = now;
}

/* Whether the chain at hand is to be gone on with. */
static bool is_wanted(struct kv_vault *vault) {
    if (!vault_may_write(vault) || vault->breaker.state == KV_BREAKER_OPEN) {
        vault->stats.n_skipped_off++;
        vault->save.saved.outcome = "disk off";
        return false;
    }
    if (vault->save.saved.why == KV_VAULT_SAVE_WORTH && vault->options.write_bytes_per_day > 0 &&
        vault->budget_bytes <= 0) {
        vault->stats.n_skipped_budget++;
        vault->save.saved.outcome = "day's bytes used up";
        return false;
    }
    return true;
}

/* ---- flushes -------------------------------------------------------------------------------------------------------- */

void kv_vault_flush(struct kv_vault *vault, struct kv_vault_flush *flush) {
    flush->n_saves = vault->n_saves_asked;
    flush->n_alls = vault->n_alls_asked;
    flush->n_failed_syncs = vault->n_failed_syncs;
    flush->n_unsaved = vault->n_unsaved; /* before it */
    flush->is_written = false;
    flush->next = vault->flushes;
    vault->flushes = flush;
}

void kv_vault_flush_cancel(struct kv_vault *vault, struct kv_vault_flush *flush) {
    for (struct kv_vault_flush **at = &vault->flushes; *at; at = &(*at)->next)
        if (*at == flush) {
            *at = flush->next;
            return;
        }
}

/* True: it is answered. */
static bool step_flush(struct kv_vault *vault, struct kv_vault_flush *flush, bool has_failed) {
    if (!flush->is_written && vault->n_saves_done >= flush->n_saves && vault->n_alls_done >= flush->n_alls &&
        !vault_is_blanking(vault) && !vault_is_forgetting(vault)) {
        flush->is_written = true;
        flush->tick = vault->tick;
    }
    if (vault->breaker.state == KV_BREAKER_OPEN) /* what is out may never come home */
        return true;
    if (flush->is_written && !has_failed && !vault_is_synced(vault, flush->tick)) {
        vault->must_sync = true;
        return false;
    }
    return flush->is_written;
}

static void flush_turn(struct kv_vault *vault) {
    vault->must_sync = false;
    for (struct kv_vault_flush **at = &vault->flushes; *at;) {
        struct kv_vault_flush *flush = *at;
        bool has_failed = vault->n_failed_syncs != flush->n_failed_syncs || vault->breaker.state == KV_BREAKER_OPEN ||
                          vault->write_off_until_us != 0 || vault_has_late_sync(vault) || vault_cannot_remove(vault) ||
                          (!vault_is_blanking(vault) && vault_n_to_blank(vault) > 0);

        if (!step_flush(vault, flush, has_failed)) {
            at = &flush->next;
            continue;
        }
        *at = flush->next;
        flush->n_unsaved = vault->n_unsaved - flush->n_unsaved;
        flush->done(flush, has_failed ? -EIO : 0);
        at = &vault->flushes; /* the call may have changed the list */
    }
}

/* ---- one user's ------------------------------------------------------------------------------------------------------ */

void vault_purge_saves(struct kv_vault *vault, uint32_t uid) {
    for (int i = 0; i < VAULT_WRITES; i++)
        if (vault->writes[i].is_busy && catalog_look(vault->catalog, vault->writes[i].record).uid == uid)
            vault->writes[i].is_unwanted = true;
    if (vault->save.is_running && vault->save.uid == uid) {
        vault->save.at = vault->save.n;
        vault->save.is_unwanted = true;
    }
    for (uint32_t i = 0; i < vault->n_queued; i++) {
        struct vault_save *save = &vault->queue[(vault->queue_first + i) % VAULT_QUEUE];

        if (is_there(vault, save) && kv_shelf_name(vault->options.shelf, save->shelf_record).uid == uid)
            save->shelf_record = KV_NO_RECORD;
    }
}

/* ---- a turn --------------------------------------------------------------------------------------------------------- */

void vault_save_turn(struct kv_vault *vault) {
    refill_budget(vault);
    vault_may_write(vault); /* the time when it could not may be over */
    while (vault->scan_state != VAULT_SCAN_HEADS) {
        if (!vault->save.is_running && !begin_next(vault))
            break;
        while (vault->save.is_running && vault->save.at < vault->save.n) {
            if (!is_wanted(vault)) {
                vault->save.at = vault->save.n;
            } else if (vault->save.records[vault->save.at] == KV_NO_RECORD) {
                vault->save.at++;
            } else if (!write_next(vault)) {
                break;
            }
        }
        if (vault->save.is_running && (vault->save.at < vault->save.n || vault->save.n_out > 0))
            break;
        if (vault->save.is_running)
            end(vault);
    }
    flush_turn(vault);
}
