/* scrub: damage is found before anybody asks for what is damaged. While there is nothing else to do, so many bytes a second
 * of what lies on disk are read, and of what lies on the shelf looked at, and held against their checksums; what does not
 * match is forgotten and counted. A round looks at everything once; the next one begins a day after it did. In between
 * only the neighbours of a slot that could not be read are looked at.
 *
 * Knows when, not how: a slot of the disk is the vault's business. One look is out at a time. */
#pragma once
#include "vault.h"
#include "work.h"

struct kv_scrub;

struct kv_scrub_options {
    struct kv_shelf *shelf;
    struct kv_vault *vault; /* NULL: there is no disk */
    const struct kv_work *work;
    uint64_t bytes_per_s; /* > 0 */
    uint64_t (*now_us)(void);
};

int kv_scrub_open(const struct kv_scrub_options *options, struct kv_scrub **ret_scrub); /* -ENOMEM */
/* Before vault and shelf close; no worker looks at the shelf. NULL is fine. */
void kv_scrub_close(struct kv_scrub *scrub);

/* Once per turn of the loop, after the vault's. is_idle: nobody waits for anything. Returns when to call it next at the
 * latest, on the clock; 0: not before what is out has come home. */
uint64_t kv_scrub_turn(struct kv_scrub *scrub, bool is_idle);

/* A page is held by it, and does not leave. */
bool kv_scrub_is_looking(const struct kv_scrub *scrub);

struct kv_scrub_stats {
    uint64_t n_rounds;                       /* done */
    uint64_t n_disk, n_host, bytes;          /* looked at */
    uint64_t n_disk_damaged, n_host_damaged; /* of them */
    uint64_t n_unread;                       /* on disk: not to be read now */
};
void kv_scrub_stats(const struct kv_scrub *scrub, struct kv_scrub_stats *ret_stats);
