/* layout: what the page groups are and how long a seq needs them. Pure; the bytes inside a page are the backend's. */
#pragma once
#include "backend.h"

#define KV_NO_SLOT UINT32_MAX

/* Slot 0 of a page group is its null page. States have none. */
static inline bool kv_group_is_paged(enum kv_group group) {
    return group != KV_TARGET_STATE;
}

/* A hit needs the target's groups; the drafter works without its own, only worse. */
static inline bool kv_group_is_draft(enum kv_group group) {
    return group == KV_DRAFT_FULL || group == KV_DRAFT_SLIDING;
}

/* The first page that a sliding window over the tokens before page `n_pages` needs. */
static inline uint32_t kv_window_first_page(uint32_t window_tokens, uint32_t n_pages) {
    uint64_t end = (uint64_t)n_pages * PAGE_TOKENS;

    return end > window_tokens ? (uint32_t)((end - window_tokens) / PAGE_TOKENS) : 0;
}
