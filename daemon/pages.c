#include "pages.h"

#include <assert.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>

static const enum kv_group PAGE_GROUPS[] = {KV_TARGET_FULL, KV_DRAFT_FULL, KV_DRAFT_SLIDING};

static bool group_exists(const struct seq_pages *p, enum kv_group group) {
    return p->tables->pages[group] != NULL;
}

int pages_open(struct seq_pages *p, struct kv_store *store, const struct tables *tables, int slot, int sliding_window) {
    int r;

    *p = (struct seq_pages){.store = store,
                            .tables = tables,
                            .slot = slot,
                            .sliding_window = sliding_window,
                            .live = KV_NO_SLOT,
                            .rolling = KV_NO_SLOT,
                            .held = KV_NO_SLOT,
                            .restored = KV_NO_SLOT};
    p->own = calloc((size_t)tables->n_pages_max, 1);
    if (!p->own)
        return -ENOMEM;
    r = kv_lease_init(&p->lease, store, (uint32_t)tables->n_pages_max);
    if (r != 0) {
        free(p->own);
        p->own = NULL;
    }
    return r;
}

int pages_open_streaming(struct seq_pages *p, struct kv_shelf *shelf, struct residency residency) {
    p->shelf = shelf;
    p->residency = residency;
    p->streamed = calloc((size_t)p->tables->n_pages_max, sizeof *p->streamed);
    p->streamed_records = calloc((size_t)p->tables->n_pages_max, sizeof *p->streamed_records);
    return p->streamed && p->streamed_records ? 0 : -ENOMEM;
}

void pages_close(struct seq_pages *p) {
    if (!p->own)
        return;
    kv_lease_deinit(&p->lease);
    free(p->own);
    free(p->streamed);
    free(p->streamed_records);
    p->own = NULL;
}

/* ---- beginning ------------------------------------------------------------------------------------------------------ */

static void give_state(struct seq_pages *p, uint32_t *slot) {
    if (*slot != KV_NO_SLOT)
        kv_store_give(p->store, KV_TARGET_STATE, *slot);
    *slot = KV_NO_SLOT;
}

/* The rows of the tables that a hit at b fills. */
static void use_hit(struct seq_pages *p, int b, struct device_copies *copies) {
    int n = b / PAGE_TOKENS, valid_from = p->draft_valid_from / PAGE_TOKENS;

    for (size_t g = 0; g < ARRAY_LEN(PAGE_GROUPS); g++) {
        enum kv_group group = PAGE_GROUPS[g];
        int32_t *row;
        int first = 0;

        if (!group_exists(p, group))
            continue;
        row = tables_pages(p->tables, group, p->slot);
        if (group != KV_TARGET_FULL)
            first = valid_from;
        if (group == KV_DRAFT_SLIDING) {
            first = max_int(first, (int)kv_window_first_page((uint32_t)p->sliding_window, (uint32_t)n));
            p->first_sliding = first;
        }
        for (int i = 0; i < n; i++)
            row[i] = i < first ? 0 : (int32_t)kv_lease_slot(&p->lease, group, (uint32_t)i);
        p->n_pages[group] = n;
        tables_push_pages(p->tables, copies, group, p->slot, 0, n);
    }
}

static int take_states(struct seq_pages *p) {
    int r = kv_store_take(p->store, KV_TARGET_STATE, &p->live);

    if (r == 0)
        r = kv_store_take(p->store, KV_TARGET_STATE, &p->rolling);
    if (r != 0)
        give_state(p, &p->live);
    return r;
}

static void begin(struct seq_pages *p, const struct kv_match *match, bool is_large, struct device_copies *copies) {
    p->is_large = is_large;
    p->first_sliding = 0;
    p->has_draft = true;
    p->draft_valid_from = (int)match->draft_valid_from;
    memset(p->n_pages, 0, sizeof p->n_pages);
    use_hit(p, (int)match->n_tokens, copies);
    p->tables->live[p->slot] = (int32_t)p->live;
    p->tables->rolling[p->slot] = (int32_t)p->rolling;
    tables_push_states(p->tables, copies, p->slot);
}

int pages_begin(struct seq_pages *p, const struct seq_keys *keys, bool is_large, struct device_copies *copies,
                struct kv_match *ret_match) {
    struct kv_match match = {0};
    const void *state;
    int r;

    assert(!is_large || keys->n_pages <= p->residency.head);
    if (keys->n_pages > 0) /* before the states: they must not push out what is about to be used */
        kv_store_match(p->store, &p->lease, keys->keys, keys->tokens, (uint32_t)keys->n_pages, &match);
    r = take_states(p);
    if (r != 0 && match.n_tokens > 0) { /* unless nothing else can go */
        kv_lease_release(&p->lease);
        match = (struct kv_match){.n_full_tokens = match.n_full_tokens};
        r = take_states(p);
    }
    if (r != 0)
        return r;
    p->lease.uid = keys->uid;
    p->n_published = (int)match.n_tokens / PAGE_TOKENS;
    begin(p, &match, is_large, copies);
    state = match.n_tokens > 0 ? tables_state(p->tables, match.state_slot) : p->tables->zero_state;
    device_copies_add(copies, tables_state(p->tables, p->live), state, p->tables->view.target_state.slot_bytes);
    *ret_match = match;
    return 0;
}

void pages_restored(struct seq_pages *p) {
    kv_lease_drop_state(&p->lease);
}

/* ---- beginning with what is still on its way ------------------------------------------------------------------------ */

static void own(struct seq_pages *p, struct kv_handed handed) {
    if (handed.group == KV_TARGET_STATE) {
        p->restored = handed.slot;
        return;
    }
    p->own[handed.page] |= (uint8_t)(1u << handed.group);
    tables_pages(p->tables, handed.group, p->slot)[handed.page] = (int32_t)handed.slot;
}

int pages_begin_restored(struct seq_pages *p, struct kv_restores *restores, const struct seq_keys *keys, bool is_large,
                         struct device_copies *copies, struct kv_match *ret_match, struct kv_restore **ret_restore) {
    struct kv_handover handover;
    struct kv_match match;
    int r = take_states(p);

    if (r != 0)
        return r;
    r = kv_restore_hand_over(restores, keys->keys, keys->tokens, (uint32_t)keys->n_pages, &p->lease, &handover,
                             ret_restore);
    if (r != 0) {
        give_state(p, &p->live);
        give_state(p, &p->rolling);
        return r;
    }
    match = (struct kv_match){.n_tokens = (uint32_t)keys->n_pages * PAGE_TOKENS,
                              .n_full_tokens = (uint32_t)keys->n_pages * PAGE_TOKENS,
                              .state_slot = KV_NO_SLOT,
                              .draft_valid_from = handover.draft_valid_from};
    p->lease.uid = keys->uid;
    p->n_published = (int)handover.n_held;
    begin(p, &match, is_large, copies);
    p->n_restored = keys->n_pages;
    p->n_handed = (int)handover.n;
    for (int i = 0; i < p->n_handed; i++) /* what begin() put into the tables' mirrors is not on its way yet */
        own(p, kv_restore_handed(*ret_restore, (uint32_t)i));
    assert(p->restored != KV_NO_SLOT);
    *ret_match = match;
    return 0;
}

void pages_add_restore(const struct seq_pages *p, const struct kv_restore *restore, struct device_restore *ret) {
    const struct model_space *view = &p->tables->view;

    for (int pass = 0; pass < 3; pass++) { /* the restore point, the target's pages, the drafter's */
        for (int i = 0; i < p->n_handed; i++) {
            struct kv_handed handed = kv_restore_handed(restore, (uint32_t)i);

            if (pass == (handed.group == KV_TARGET_STATE ? 0 : handed.group == KV_TARGET_FULL ? 1 : 2))
                device_copies_add(&ret->copies, handed.transfer.dst, handed.transfer.src, handed.transfer.bytes);
        }
        if (pass == 1)
            ret->n_pages = ret->copies.n - 1;
    }
    ret->n_layers = view->target_full.n_layers;
    ret->live = (struct device_copy){tables_state(p->tables, p->live), tables_state(p->tables, p->restored),
                                     view->target_state.slot_bytes};
}

void pages_publish_restored(struct seq_pages *p, const struct seq_keys *keys) {
    uint32_t state_slot = p->restored;

    p->restored = KV_NO_SLOT;
    pages_publish(p, keys, p->n_restored * PAGE_TOKENS, state_slot);
}

int pages_n_doubles(const struct seq_pages *p) {
    int n = 0;

    for (int page = 0; page < p->n_published; page++)
        n += (p->own[page] & 1u << KV_TARGET_FULL) != 0;
    return n;
}

/* ---- growing -------------------------------------------------------------------------------------------------------- */

static void give_page(struct seq_pages *p, enum kv_group group, int page) {
    int32_t *entry = tables_pages(p->tables, group, p->slot) + page;

    if (p->own[page] & 1u << group)
        kv_store_give(p->store, group, (uint32_t)*entry);
    else if (*entry != 0 && group == KV_DRAFT_SLIDING)
        kv_lease_drop_sliding(&p->lease, (uint32_t)page);
    p->own[page] &= (uint8_t) ~(1u << group);
    *entry = 0;
}

/* Pages before the window of position len go, but for those that the held restore point lists. Work on its way starts
 * at len or later, so none of it reads them. */
static void trim_sliding(struct seq_pages *p, int len, struct device_copies *copies) {
    int end = p->held != KV_NO_SLOT ? min_int(len, p->held_tokens) : len;
    int first = max_int(0, end - p->sliding_window) / PAGE_TOKENS, from = p->first_sliding;

    first = min_int(first, p->n_pages[KV_DRAFT_SLIDING]);
    for (int i = from; i < first; i++)
        give_page(p, KV_DRAFT_SLIDING, i);
    if (first > from) {
        tables_push_pages(p->tables, copies, KV_DRAFT_SLIDING, p->slot, from, first - from);
        p->first_sliding = first;
    }
}

void pages_begin_streaming(struct seq_pages *p, int n_pages) {
    int head = min_int(p->residency.head, n_pages - p->residency.tail);

    assert(p->is_large && p->n_published <= p->residency.head);
    p->streams = true;
    p->first_streamed = p->end_streamed = p->first_steered = max_int(p->n_published, head);
}

/* What names a slot of the shelf that only its owner shall find: no key is like this. */
static struct kv_page_name private_name(const struct seq_pages *p, int page) {
    static const int32_t no_tokens[PAGE_TOKENS];
    struct kv_page_name name = {.page_idx = (uint32_t)page, .tokens = no_tokens, .uid = KV_NO_UID};
    uint32_t number = (uint32_t)page * 0x9e3779b1u;

    memcpy(name.key.bytes, &number, sizeof number);
    memcpy(name.key.bytes + sizeof number, &p->slot, sizeof p->slot);
    return name;
}

/* To host memory: behind all that wrote it, before all that may write its slot. False: host memory is full. */
static bool move_page_out(struct seq_pages *p, int page, struct device_copies *copies, uint32_t *ret_slot) {
    int32_t *row = tables_pages(p->tables, KV_TARGET_FULL, p->slot);
    size_t page_bytes = p->tables->view.target_full.page_bytes;
    struct kv_page_name name = private_name(p, page);
    void *payload;

    if (kv_shelf_reserve(p->shelf, &name, KV_TARGET_FULL, &p->streamed_records[page], &payload) != 0)
        return false;
    assert(p->own[page] & 1u << KV_TARGET_FULL);
    p->streamed[page] = payload;
    *ret_slot = (uint32_t)row[page];
    device_copies_add(copies, payload, (char *)p->tables->view.target_full.arena + *ret_slot * page_bytes, page_bytes);
    p->own[page] &= (uint8_t) ~(1u << KV_TARGET_FULL);
    row[page] = streamer_entry(p->tables->view.streamer, 0, page);
    return true;
}

/* The oldest page that may go; the seq itself fills its slot next. False: none may go, or host memory is full. */
static bool move_out(struct seq_pages *p, int len, struct device_copies *copies, uint32_t *ret_slot) {
    if (!p->streams || p->end_streamed >= len / PAGE_TOKENS || !move_page_out(p, p->end_streamed, copies, ret_slot))
        return false;
    p->end_streamed++;
    return true;
}

enum { STEER_FREE_PAGES_MIN = 2 /* are left to others */ };

static bool move_back_in(struct seq_pages *p, struct device_copies *copies) {
    size_t page_bytes = p->tables->view.target_full.page_bytes;
    int page = p->first_streamed;
    uint32_t slot;

    if (page == p->end_streamed || kv_store_n_available(p->store, KV_TARGET_FULL) <= STEER_FREE_PAGES_MIN ||
        kv_store_take(p->store, KV_TARGET_FULL, &slot) != 0)
        return false;
    device_copies_add(copies, (char *)p->tables->view.target_full.arena + slot * page_bytes, p->streamed[page],
                      page_bytes);
    p->own[page] |= (uint8_t)(1u << KV_TARGET_FULL);
    tables_pages(p->tables, KV_TARGET_FULL, p->slot)[page] = (int32_t)slot;
    p->move_record = p->streamed_records[page];
    p->first_streamed++;
    return true;
}

/* Its slot may be another's only when the copy is done. */
static bool move_back_out(struct seq_pages *p, struct device_copies *copies) {
    if (!move_page_out(p, p->first_streamed - 1, copies, &p->move_slot))
        return false;
    p->first_streamed--;
    return true;
}

bool pages_steer(struct seq_pages *p, int n_more, struct device_copies *copies) {
    int n = p->first_streamed - p->first_steered, page = p->first_streamed - (n > n_more);

    if (!p->streams || p->move != PAGES_STILL || n == n_more)
        return false;
    if (!(n < n_more ? move_back_in(p, copies) : move_back_out(p, copies)))
        return false;
    p->move = n < n_more ? PAGES_MOVE_IN : PAGES_MOVE_OUT;
    tables_push_pages(p->tables, copies, KV_TARGET_FULL, p->slot, page, 1);
    return true;
}

void pages_steered(struct seq_pages *p) {
    if (p->move == PAGES_MOVE_IN)
        kv_shelf_abandon(p->shelf, p->move_record, KV_TARGET_FULL);
    else if (p->move == PAGES_MOVE_OUT)
        kv_store_give(p->store, KV_TARGET_FULL, p->move_slot);
    p->move = PAGES_STILL;
}

static int take_target(struct seq_pages *p, int len, struct device_copies *copies, uint32_t *ret_slot) {
    bool has_most = p->n_pages[KV_TARGET_FULL] - pages_n_streamed(p) >= p->residency.most;

    if (has_most && move_out(p, len, copies, ret_slot))
        return 0;
    if (kv_store_take(p->store, KV_TARGET_FULL, ret_slot) == 0)
        return 0;
    return move_out(p, len, copies, ret_slot) ? 0 : KV_STORE_E_FULL;
}

static int grow_target(struct seq_pages *p, int len, int n, struct device_copies *copies) {
    int32_t *row = tables_pages(p->tables, KV_TARGET_FULL, p->slot);
    int from = p->n_pages[KV_TARGET_FULL], from_streamed = p->end_streamed, r = 0;

    while (p->n_pages[KV_TARGET_FULL] < n) {
        int page = p->n_pages[KV_TARGET_FULL];
        uint32_t slot;

        r = take_target(p, len, copies, &slot);
        if (r != 0)
            break;
        p->own[page] |= (uint8_t)(1u << KV_TARGET_FULL);
        row[page] = (int32_t)slot;
        p->n_pages[KV_TARGET_FULL]++;
    }
    tables_push_pages(p->tables, copies, KV_TARGET_FULL, p->slot, from_streamed, p->end_streamed - from_streamed);
    tables_push_pages(p->tables, copies, KV_TARGET_FULL, p->slot, from, p->n_pages[KV_TARGET_FULL] - from);
    return r;
}

static void grow_draft(struct seq_pages *p, enum kv_group group, int n, struct device_copies *copies) {
    int32_t *row = tables_pages(p->tables, group, p->slot);
    int from = p->n_pages[group];

    while (p->n_pages[group] < n) {
        int page = p->n_pages[group]++;
        uint32_t slot = 0;
        bool is_wanted = p->has_draft && (group == KV_DRAFT_FULL || page >= p->first_sliding);

        if (is_wanted && kv_store_take(p->store, group, &slot) != 0)
            p->has_draft = false;
        else if (is_wanted)
            p->own[page] |= (uint8_t)(1u << group);
        row[page] = (int32_t)slot;
    }
    tables_push_pages(p->tables, copies, group, p->slot, from, p->n_pages[group] - from);
}

int pages_grow(struct seq_pages *p, int len, int n_tokens, struct device_copies *copies) {
    int n = (int)div_ceil((uint64_t)n_tokens, PAGE_TOKENS), r;

    assert(n <= p->tables->n_pages_max);
    r = grow_target(p, len, n, copies);
    if (r != 0)
        return r;
    if (group_exists(p, KV_DRAFT_FULL))
        grow_draft(p, KV_DRAFT_FULL, n, copies);
    if (group_exists(p, KV_DRAFT_SLIDING)) {
        trim_sliding(p, len, copies);
        grow_draft(p, KV_DRAFT_SLIDING, n, copies);
    }
    return 0;
}

/* ---- restore points ------------------------------------------------------------------------------------------------- */

bool pages_hold_rolling(struct seq_pages *p, int n_tokens, struct device_copies *copies) {
    uint32_t next = p->held;

    if (next == KV_NO_SLOT && kv_store_take(p->store, KV_TARGET_STATE, &next) != 0)
        return false;
    p->held = p->rolling;
    p->held_tokens = n_tokens;
    p->rolling = next;
    p->tables->rolling[p->slot] = (int32_t)next;
    tables_push_states(p->tables, copies, p->slot);
    return true;
}

void pages_keep_rolling(struct seq_pages *p, int n_tokens) {
    give_state(p, &p->held);
    p->held = p->rolling;
    p->held_tokens = n_tokens;
    p->rolling = KV_NO_SLOT;
}

uint32_t pages_take_state(struct seq_pages *p) {
    uint32_t slot;

    return kv_store_take(p->store, KV_TARGET_STATE, &slot) == 0 ? slot : KV_NO_SLOT;
}

void pages_give_state(struct seq_pages *p, uint32_t state_slot) {
    give_state(p, &state_slot);
}

/* Sliding pages are findable where a restore point needs them: in its window. */
static bool publishes(const struct seq_pages *p, enum kv_group group, int page, int n_tokens) {
    int32_t entry;

    if (!group_exists(p, group) || !(p->own[page] & 1u << group))
        return false;
    entry = tables_pages(p->tables, group, p->slot)[page];
    if (group != KV_TARGET_FULL && page * PAGE_TOKENS < p->draft_valid_from)
        return false;
    return entry != 0 && (group != KV_DRAFT_SLIDING || page >= max_int(0, n_tokens - p->sliding_window) / PAGE_TOKENS);
}

static bool publish_page(struct seq_pages *p, const struct seq_keys *keys, int page, int n_tokens) {
    uint32_t slots[KV_GROUP_N];
    bool taken[KV_GROUP_N] = {false};

    for (int g = 0; g < KV_GROUP_N; g++)
        slots[g] = KV_NO_SLOT;
    for (size_t g = 0; g < ARRAY_LEN(PAGE_GROUPS); g++)
        if (publishes(p, PAGE_GROUPS[g], page, n_tokens))
            slots[PAGE_GROUPS[g]] = (uint32_t)tables_pages(p->tables, PAGE_GROUPS[g], p->slot)[page];
    if (kv_lease_publish_page(&p->lease, (uint32_t)page, &keys->keys[page], keys->tokens + page * PAGE_TOKENS, slots,
                              taken) != 0)
        return false;
    for (int g = 0; g < KV_GROUP_N; g++)
        if (taken[g])
            p->own[page] &= (uint8_t) ~(1u << g);
    return true;
}

void pages_publish(struct seq_pages *p, const struct seq_keys *keys, int n_tokens, uint32_t state_slot) {
    int n = n_tokens / PAGE_TOKENS, n_most = p->streams ? p->first_steered : p->is_large ? p->residency.head : n;
    bool taken = false;

    assert(n <= keys->n_pages);
    while (p->n_published < min_int(n, n_most) && publish_page(p, keys, p->n_published, n_tokens))
        p->n_published++;
    if (state_slot == KV_NO_SLOT)
        return;
    assert(n_tokens % PAGE_TOKENS == 0 && n > 0);
    if (p->n_published >= n)
        kv_lease_publish_state(&p->lease, (uint32_t)n, state_slot, &taken);
    if (!taken)
        give_state(p, &state_slot);
}

void pages_end(struct seq_pages *p) {
    for (size_t g = 0; g < ARRAY_LEN(PAGE_GROUPS); g++) {
        enum kv_group group = PAGE_GROUPS[g];

        for (int i = 0; i < p->n_pages[group]; i++)
            if (p->own[i] & 1u << group)
                give_page(p, group, i);
        p->n_pages[group] = 0;
    }
    pages_steered(p);
    for (int i = p->first_streamed; i < p->end_streamed; i++)
        kv_shelf_abandon(p->shelf, p->streamed_records[i], KV_TARGET_FULL);
    p->streams = false;
    p->first_streamed = p->end_streamed = p->first_steered = 0;
    give_state(p, &p->live);
    give_state(p, &p->rolling);
    give_state(p, &p->held);
    give_state(p, &p->restored);
    kv_lease_release(&p->lease);
    p->n_published = 0;
}
