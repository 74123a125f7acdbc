/* vault_verify: what lies on disk is read and held against its header, one slot at a time: all of it because somebody asked,
 * or a slot of those that nobody reads because the disk has nothing else to do. */
#include <errno.h>

#include "vault_internal.h"

static void on_check(struct kv_work_item *work) {
    struct kv_vault *vault = container_of(work, struct kv_vault, verify.work);

    vault->verify.result = vault_hold_against(vault, vault->verify.group, vault->verify.buffer, &vault->verify.header);
}

static void count(struct kv_vault_verify *user, bool is_damaged, bool is_unread) {
    user->n_checked += !is_unread;
    user->n_unread += is_unread;
    user->n_damaged += is_damaged;
}

static void step_over(struct kv_vault *vault, bool is_damaged, bool is_unread) {
    struct kv_vault_scrub *scrub = vault->verify.scrub;
    uint32_t record = vault->verify.record;

    vault->verify.is_out = false;
    vault->verify.scrub = NULL;
    if (is_damaged && is_unread)
        vault_suspect_near(vault, record);
    if (is_damaged) {
        vault->stats.n_damaged++;
        vault_forget(vault, record);
    }
    vault_unguard(vault, record);
    if (vault->verify.is_asked && vault->verify.user)
        count(vault->verify.user, is_damaged, is_unread);
    if (!scrub || vault->is_closing)
        return;
    scrub->is_damaged = is_damaged;
    scrub->is_unread = is_unread;
    scrub->done(scrub);
}

static void on_checked(struct kv_work_item *work) {
    struct kv_vault *vault = container_of(work, struct kv_vault, verify.work);

    const struct format_slot *header = &vault->verify.header;

    vault->n_work--;
    step_over(vault,
              vault->verify.result != 0 ||
                  !catalog_is(vault->catalog, vault->verify.record, &header->key, header->page_idx, header->group),
              false);
}

static void on_read(struct disk_op *op) {
    struct kv_vault *vault = container_of(op, struct kv_vault, verify.op);
    const struct kv_work *work = vault->options.work;

    if (op->result == 0 && !vault->is_closing && work->submit(work->user, &vault->verify.work) == 0) {
        vault->n_work++;
        return;
    }
    step_over(vault, op->result == -EIO, true);
}

/* False: it cannot be read now. */
static bool check(struct kv_vault *vault, uint32_t record, bool is_asked) {
    struct catalog_view view = catalog_look(vault->catalog, record);

    vault->verify.record = record;
    vault->verify.is_asked = is_asked;
    vault->verify.group = view.group;
    vault->verify.work = (struct kv_work_item){.run = on_check, .done = on_checked};
    vault->verify.op = (struct disk_op){.kind = DISK_READ,
                                        .buffer = vault->verify.buffer,
                                        .bytes = vault->options.group[view.group].slot_bytes,
                                        .done = on_read};
    vault_locate(vault, view.group, view.slot, &vault->verify.op);
    if (disk_submit(vault->disk, &vault->verify.op, vault->options.now_us()) != 0)
        return false;
    catalog_guard(vault->catalog, record);
    vault->verify.is_out = true;
    return true;
}

/* ---- all of it ------------------------------------------------------------------------------------------------------ */

int kv_vault_verify(struct kv_vault *vault, struct kv_vault_verify *verify) {
    if (vault->verify.user || (vault->verify.is_out && vault->verify.is_asked))
        return -EALREADY;
    verify->n_checked = verify->n_damaged = verify->n_unread = 0;
    vault->verify.user = verify;
    vault->verify.next = 0;
    return 0;
}

void kv_vault_verify_cancel(struct kv_vault *vault) {
    vault->verify.user = NULL;
}

/* A disk that is left alone now is not read; what cannot be read now is counted as such. */
void vault_verify_turn(struct kv_vault *vault) {
    struct kv_vault_verify *user = vault->verify.user;
    uint32_t record;

    if (!user || vault->verify.is_out ||
        (vault->scan_state != VAULT_SCAN_DONE && vault->breaker.state != KV_BREAKER_OPEN))
        return;
    record = catalog_next(vault->catalog, vault->verify.next);
    if (record == KV_NO_RECORD || vault->breaker.state == KV_BREAKER_OPEN) {
        vault->verify.user = NULL;
        user->done(user);
        return;
    }
    vault->verify.next = record + 1;
    if (!check(vault, record, true))
        count(user, false, true);
}

/* ---- one at a time -------------------------------------------------------------------------------------------------- */

void vault_suspect_near(struct kv_vault *vault, uint32_t record) {
    struct catalog_view bad = catalog_look(vault->catalog, record);

    for (uint32_t r = 0; (r = catalog_next(vault->catalog, r)) != KV_NO_RECORD; r++) {
        struct catalog_view view = catalog_look(vault->catalog, r);

        if (r != record && view.group == bad.group && view.segment == bad.segment &&
            view.slot + VAULT_NEAR_SLOTS >= bad.slot && view.slot <= bad.slot + VAULT_NEAR_SLOTS &&
            vault->verify.n_suspects < VAULT_SUSPECTS)
            vault->verify.suspects[vault->verify.n_suspects++] = r;
    }
}

bool kv_vault_has_suspects(const struct kv_vault *vault) {
    return vault->verify.n_suspects > 0;
}

/* One that left meanwhile, or became another's, is of no interest, and no harm. */
static uint32_t take_suspect(struct kv_vault *vault) {
    while (vault->verify.n_suspects > 0) {
        uint32_t record = vault->verify.suspects[--vault->verify.n_suspects];

        if (catalog_next(vault->catalog, record) == record)
            return record;
    }
    return KV_NO_RECORD;
}

int kv_vault_scrub(struct kv_vault *vault, struct kv_vault_scrub *scrub, bool only_suspects) {
    uint32_t record;

    if (vault->verify.is_out || vault->verify.user || vault->flushes || vault->scan_state != VAULT_SCAN_DONE ||
        vault->breaker.state != KV_BREAKER_CLOSED || vault->n_to_blank > 0 || !kv_vault_is_quiet(vault))
        return KV_VAULT_E_BUSY;
    record = take_suspect(vault);
    if (record == KV_NO_RECORD && !only_suspects) {
        record = catalog_next(vault->catalog, vault->verify.next_cold);
        vault->verify.next_cold = record == KV_NO_RECORD ? 0 : record + 1;
    }
    if (record == KV_NO_RECORD)
        return KV_VAULT_E_NONE;
    if (!check(vault, record, false))
        return KV_VAULT_E_BUSY;
    vault->verify.scrub = scrub;
    scrub->bytes = vault->verify.op.bytes;
    return 0;
}

void kv_vault_scrub_cancel(struct kv_vault *vault) {
    vault->verify.scrub = NULL;
}
