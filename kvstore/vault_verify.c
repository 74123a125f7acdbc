/* vault_verify: everything on disk is read once and held against its header, one slot at a time. */
#include <errno.h>

#include "vault_internal.h"

static void on_check(struct kv_work_item *work) {
    struct kv_vault *vault = container_of(work, struct kv_vault, verify.work);

    vault->verify.result = vault_hold_against(vault, vault->verify.group, vault->verify.buffer, &vault->verify.header);
}

static void step_over(struct kv_vault *vault, bool is_damaged, bool is_unread) {
    struct kv_vault_verify *user = vault->verify.user;
    uint32_t record = vault->verify.record++;

    vault->verify.is_out = false;
    if (user && !is_unread)
        user->n_checked++;
    if (user)
        user->n_unread += is_unread;
    if (is_damaged) {
        vault->stats.n_damaged++;
        vault_forget(vault, record);
    }
    if (user && is_damaged)
        user->n_damaged++;
    vault_unguard(vault, record);
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

int kv_vault_verify(struct kv_vault *vault, struct kv_vault_verify *verify) {
    if (vault->verify.user || vault->verify.is_out)
        return -EALREADY;
    verify->n_checked = verify->n_damaged = verify->n_unread = 0;
    vault->verify.user = verify;
    vault->verify.record = 0;
    return 0;
}

void kv_vault_verify_cancel(struct kv_vault *vault) {
    vault->verify.user = NULL;
}

/* A disk that is left alone now is not read; what cannot be read now is counted as such. */
void vault_verify_turn(struct kv_vault *vault) {
    struct kv_vault_verify *user = vault->verify.user;
    struct catalog_view view;

    if (!user || vault->verify.is_out ||
        (vault->scan_state != VAULT_SCAN_DONE && vault->breaker.state != KV_BREAKER_OPEN))
        return;
    vault->verify.record = catalog_next(vault->catalog, vault->verify.record);
    if (vault->verify.record == KV_NO_RECORD || vault->breaker.state == KV_BREAKER_OPEN) {
        vault->verify.user = NULL;
        user->done(user);
        return;
    }
    view = catalog_look(vault->catalog, vault->verify.record);
    catalog_guard(vault->catalog, vault->verify.record);
    vault->verify.is_out = true;
    vault->verify.group = view.group;
    vault->verify.work = (struct kv_work_item){.run = on_check, .done = on_checked};
    vault->verify.op = (struct disk_op){.kind = DISK_READ,
                                        .buffer = vault->verify.buffer,
                                        .bytes = vault->options.group[view.group].slot_bytes,
                                        .done = on_read};
    vault_locate(vault, view.group, view.slot, &vault->verify.op);
    if (disk_submit(vault->disk, &vault->verify.op, vault->options.now_us()) != 0)
        step_over(vault, false, true);
}
