/* vault_read: pages come up, onto the shelf. */
#include <errno.h>
#include <string.h>

#include "vault_internal.h"

enum { CHECK_BYTES = 1 << 20 /* that one worker is given, at least */ };

int vault_hold_against(const struct kv_vault *vault, enum kv_group group, const void *slot,
                       struct format_slot *ret_header) {
    const struct kv_vault_options *o = &vault->options;
    int r = format_slot_read(slot, ret_header);

    if (r != 0)
        return r;
    if (ret_header->group != group ||
        format_slot_bytes(ret_header->payload_bytes, vault->alignment) != o->group[group].slot_bytes ||
        memcmp(ret_header->store_id, o->store_id, sizeof o->store_id) != 0)
        return FORMAT_E_BAD;
    return format_slot_verify(ret_header, (const char *)slot + FORMAT_BLOCK_BYTES);
}

/* Key and tokens of the page that is wanted, and the models that run. */
static bool is_page(const struct kv_vault *vault, const struct format_slot *header, const struct kv_page_name *name) {
    const struct kv_vault_options *o = &vault->options;

    return memcmp(&header->key, &name->key, sizeof name->key) == 0 && header->page_idx == name->page_idx &&
           memcmp(header->tokens, name->tokens, sizeof header->tokens) == 0 &&
           memcmp(header->fingerprint, o->fingerprint, sizeof o->fingerprint) == 0 &&
           (!kv_group_is_draft(header->group) || memcmp(header->drafter, o->drafter, sizeof o->drafter) == 0);
}

/* ---- waiting -------------------------------------------------------------------------------------------------------- */

static void answer(struct vault_fetch *fetch, int result) {
    struct kv_vault_read *read;

    while ((read = fetch->waiting) != NULL) {
        fetch->waiting = read->next;
        read->fetch = NULL;
        read->done(read, result);
    }
}

void kv_vault_read_cancel(struct kv_vault *vault, struct kv_vault_read *read) {
    struct vault_fetch *fetch = read->fetch;

    (void)vault;
    for (struct kv_vault_read **at = fetch ? &fetch->waiting : NULL; at && *at; at = &(*at)->next)
        if (*at == read) {
            *at = read->next;
            break;
        }
    read->fetch = NULL;
}

/* ---- what came ------------------------------------------------------------------------------------------------------ */

/* Those who are answered may ask for more, also for this page again: the fetch is nobody else's until all have been, and
 * nobody joins it any more. What they ask for does not displace the page before all have seen it. */
static void finish(struct vault_fetch *fetch, int result) {
    struct kv_vault *vault = fetch->vault;
    struct kv_shelf *shelf = vault->options.shelf;
    uint32_t record = fetch->record;

    if (result == 0) {
        kv_shelf_filled(shelf, fetch->shelf_record, fetch->group, fetch->checksum);
        kv_shelf_pin(shelf, fetch->shelf_record, fetch->group);
        vault->stats.n_reads++;
        vault->stats.read_bytes += fetch->op.bytes;
    } else {
        kv_shelf_abandon(shelf, fetch->shelf_record, fetch->group);
    }
    fetch->record = KV_NO_RECORD;
    if (result == -EIO)
        vault_suspect_near(vault, record);
    if (result == -EIO || result == -EBADMSG) /* nobody shall try it again */
        vault_forget(vault, record);
    vault_unpin(vault, record);
    if (!vault->is_closing)
        answer(fetch, result);
    if (result == 0)
        kv_shelf_unpin(shelf, fetch->shelf_record, fetch->group);
    fetch->is_busy = false;
}

static void append(struct vault_fetch_list *list, struct vault_fetch *fetch) {
    fetch->next = NULL;
    *(list->last ? &list->last->next : &list->first) = fetch;
    list->last = fetch;
}

static struct vault_fetch *take_first(struct vault_fetch_list *list) {
    struct vault_fetch *fetch = list->first;

    list->first = fetch ? fetch->next : NULL;
    if (!list->first)
        list->last = NULL;
    return fetch;
}

/* On another thread: the slots are being filled, so nobody else looks at them. */
static void on_check(struct kv_work_item *work) {
    struct vault_check *check = container_of(work, struct vault_check, work);

    for (struct vault_fetch *fetch = check->fetches.first; fetch; fetch = fetch->next) {
        struct kv_page_name name = kv_shelf_name(check->vault->options.shelf, fetch->shelf_record);
        struct format_slot header;

        fetch->result = vault_hold_against(check->vault, fetch->group, fetch->op.buffer, &header);
        if (fetch->result == 0 && !is_page(check->vault, &header, &name))
            fetch->result = FORMAT_E_BAD;
        fetch->checksum = fetch->result == 0 ? header.payload_checksum : 0;
    }
}

static void on_checked(struct kv_work_item *work) {
    struct vault_check *check = container_of(work, struct vault_check, work);
    struct vault_fetch_list fetches = check->fetches;
    struct vault_fetch *fetch;

    check->is_busy = false;
    check->vault->n_work--;
    while ((fetch = take_first(&fetches)) != NULL) {
        check->vault->stats.n_damaged += fetch->result != 0;
        finish(fetch, fetch->result == 0 ? 0 : -EBADMSG);
    }
}

/* Small pages are checked several at a time: to hand one over takes as long as to check it. */
static void check_some(struct kv_vault *vault, struct vault_check *check) {
    const struct kv_work *work = vault->options.work;
    struct vault_fetch *fetch;
    uint64_t bytes = 0;

    check->fetches = (struct vault_fetch_list){NULL, NULL};
    while (bytes < CHECK_BYTES && (fetch = take_first(&vault->to_check)) != NULL) {
        append(&check->fetches, fetch);
        bytes += fetch->op.bytes;
    }
    check->is_busy = work->submit(work->user, &check->work) == 0;
    vault->n_work += check->is_busy;
    while (!check->is_busy && (fetch = take_first(&check->fetches)) != NULL)
        finish(fetch, -EAGAIN);
}

void vault_read_turn(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_READS && vault->to_check.first; i++)
        if (!vault->checks[i].is_busy)
            check_some(vault, &vault->checks[i]);
}

void vault_read_stop(struct kv_vault *vault) {
    struct vault_fetch *fetch;

    while ((fetch = take_first(&vault->to_check)) != NULL)
        finish(fetch, -ECANCELED);
}

static void on_read(struct disk_op *op) {
    struct vault_fetch *fetch = container_of(op, struct vault_fetch, op);
    struct kv_vault *vault = fetch->vault;

    if (op->result == 0 && !vault->is_closing) {
        vault_report(vault, fetch->ticket, &fetch->is_reported, KV_BREAKER_WORKED);
        fetch->came_us = vault->options.now_us();
        for (struct kv_vault_read *read = fetch->waiting; read; read = read->next)
            read->came_us = fetch->came_us;
        append(&vault->to_check, fetch);
        return;
    }
    if (op->result != -ECANCELED && op->result != 0) {
        vault->stats.n_read_errors++;
        vault_report(vault, fetch->ticket, &fetch->is_reported, KV_BREAKER_FAILED);
    }
    finish(fetch, op->result == 0 ? -ECANCELED : op->result);
}

/* The slot is the kernel's until the reading comes home; those who wait do not wait for that. */
static void on_late_read(struct disk_op *op) {
    struct vault_fetch *fetch = container_of(op, struct vault_fetch, op);

    vault_report(fetch->vault, fetch->ticket, &fetch->is_reported, KV_BREAKER_LATE);
    fetch->vault->stats.n_read_late++;
    answer(fetch, -ETIMEDOUT);
}

void vault_read_init(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_READS; i++) {
        struct vault_fetch *fetch = &vault->fetches[i];

        fetch->vault = vault;
        fetch->op = (struct disk_op){.kind = DISK_READ, .done = on_read, .late = on_late_read};
        vault->checks[i].vault = vault;
        vault->checks[i].work = (struct kv_work_item){.run = on_check, .done = on_checked};
    }
}

/* ---- asking --------------------------------------------------------------------------------------------------------- */

static struct vault_fetch *find_fetch(struct kv_vault *vault, uint32_t record) {
    for (int i = 0; i < VAULT_READS; i++)
        if (vault->fetches[i].is_busy && vault->fetches[i].record == record)
            return &vault->fetches[i];
    return NULL;
}

bool vault_is_reading(const struct kv_vault *vault) {
    for (int i = 0; i < VAULT_READS; i++)
        if (vault->fetches[i].is_busy && !vault->fetches[i].op.is_late)
            return true;
    return false;
}

/* Its place may never come free. */
static bool has_late_fetch(const struct kv_vault *vault) {
    for (int i = 0; i < VAULT_READS; i++)
        if (vault->fetches[i].is_busy && vault->fetches[i].op.is_late)
            return true;
    return false;
}

static struct vault_fetch *free_fetch(struct kv_vault *vault) {
    for (int i = 0; i < VAULT_READS; i++)
        if (!vault->fetches[i].is_busy)
            return &vault->fetches[i];
    return NULL;
}

static void wait_for(struct vault_fetch *fetch, struct kv_vault_read *read) {
    read->fetch = fetch;
    read->came_us = fetch->came_us;
    read->next = fetch->waiting;
    fetch->waiting = read;
}

int kv_vault_read(struct kv_vault *vault, const struct kv_page_name *name, enum kv_group group,
                  struct kv_vault_read *read) {
    uint32_t record = catalog_find(vault->catalog, &name->key, name->page_idx, group);
    struct vault_fetch *fetch = record != KV_NO_RECORD ? find_fetch(vault, record) : NULL;
    struct kv_page_name full = *name;
    struct catalog_view view;
    void *payload;

    if (record == KV_NO_RECORD)
        return KV_VAULT_E_NONE;
    if (vault->breaker.state == KV_BREAKER_OPEN || (fetch && fetch->op.is_late))
        return KV_VAULT_E_OFF;
    if (fetch) {
        wait_for(fetch, read);
        return 0;
    }
    if (!kv_breaker_is_ready(&vault->breaker)) /* one tries whether the disk works again */
        return KV_VAULT_E_BUSY;
    fetch = free_fetch(vault);
    view = catalog_look(vault->catalog, record);
    full.uid = view.uid;
    if (!fetch || kv_shelf_reserve(vault->options.shelf, &full, group, &fetch->shelf_record, &payload) != 0)
        return has_late_fetch(vault) ? KV_VAULT_E_OFF : KV_VAULT_E_BUSY;
    kv_breaker_admits(&vault->breaker, &fetch->ticket); /* it is ready */
    vault_pin(vault, record);
    fetch->is_busy = true;
    fetch->is_reported = false;
    fetch->came_us = 0;
    fetch->record = record;
    fetch->group = group;
    fetch->op.buffer = (char *)payload - FORMAT_BLOCK_BYTES;
    fetch->op.bytes = (uint32_t)kv_shelf_slot_bytes(vault->options.shelf, group);
    fetch->op.is_late = false;
    vault_locate(vault, group, view.slot, &fetch->op);
    wait_for(fetch, read);
    if (disk_submit(vault->disk, &fetch->op, vault->options.now_us()) == 0)
        return 0;
    kv_vault_read_cancel(vault, read);
    vault_report(vault, fetch->ticket, &fetch->is_reported, KV_BREAKER_FAILED);
    finish(fetch, -EAGAIN);
    return KV_VAULT_E_OFF;
}
