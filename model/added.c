#include "added.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

void added_deinit(struct added *added) {
    for (int i = 0; i < added->n_tokens; i++)
        free(added->tokens[i].content);
    free(added->tokens);
    *added = (struct added){0};
}

int added_add(struct added *added, const struct added_token *token) {
    char *content;

    if (added->n_tokens == added->n_tokens_max) {
        int max = added->n_tokens_max * 2 + 16;
        struct added_token *grown = realloc(added->tokens, (size_t)max * sizeof *grown);

        if (!grown)
            return -ENOMEM;
        added->tokens = grown;
        added->n_tokens_max = max;
    }
    content = malloc(token->n_bytes);
    if (!content)
        return -ENOMEM;
    memcpy(content, token->content, token->n_bytes);
    added->tokens[added->n_tokens] = *token;
    added->tokens[added->n_tokens++].content = content;
    added->first_byte[(unsigned char)content[0]] = true;
    return 0;
}

static int compare(const void *a, const void *b) {
    const struct added_token *left = a, *right = b;
    size_t n = left->n_bytes < right->n_bytes ? left->n_bytes : right->n_bytes;
    int order = memcmp(left->content, right->content, n);

    if (order != 0)
        return order;
    return left->n_bytes < right->n_bytes ? -1 : left->n_bytes > right->n_bytes;
}

const struct added_token *added_sort(struct added *added) {
    if (added->n_tokens > 1)
        qsort(added->tokens, (size_t)added->n_tokens, sizeof *added->tokens, compare);
    for (int i = 1; i < added->n_tokens; i++)
        if (compare(&added->tokens[i - 1], &added->tokens[i]) == 0)
            return &added->tokens[i];
    return NULL;
}

/* The first token in [low, high) whose byte at `depth` is at least `byte`; all of them share what stands before and are
 * sorted, the one that ends there, if any, first. */
static int lower_bound(const struct added *added, int low, int high, size_t depth, int byte) {
    while (low < high) {
        int middle = low + (high - low) / 2;
        const struct added_token *token = &added->tokens[middle];
        int at = token->n_bytes > depth ? (unsigned char)token->content[depth] : -1;

        if (at < byte)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static const struct added_token *longest_at(const struct added *added, const char *text, size_t n) {
    const struct added_token *longest = NULL;
    int low = 0, high = added->n_tokens;

    for (size_t depth = 0; depth < n; depth++) {
        int byte = (unsigned char)text[depth];

        low = lower_bound(added, low, high, depth, byte);
        high = lower_bound(added, low, high, depth, byte + 1);
        if (low == high)
            break;
        if (added->tokens[low].n_bytes == depth + 1)
            longest = &added->tokens[low];
    }
    return longest;
}

static bool is_space_before(const struct unicode *unicode, const char *text, size_t end, size_t *ret_start) {
    size_t start = end - 1;
    int n_char;

    while (start > 0 && ((unsigned char)text[start] & 0xC0) == 0x80)
        start--;
    *ret_start = start;
    return (unicode_at(unicode, text + start, end - start, &n_char) & UNICODE_CLASS_MASK) == UNICODE_SPACE;
}

/* Bytes from `at` on in which a token may lie; 0: none may begin here. */
static size_t room_at(struct added_walk *walk, size_t at) {
    if (!walk->ranges)
        return walk->n - at;
    while (walk->n_ranges > 0 && walk->ranges->end <= at) {
        walk->ranges++;
        walk->n_ranges--;
    }
    return walk->n_ranges > 0 && walk->ranges->begin <= at ? walk->ranges->end - at : 0;
}

bool added_next(const struct added *added, const struct unicode *unicode, struct added_walk *walk,
                struct added_piece *ret_piece) {
    const struct added_token *token = NULL;
    size_t at = walk->searched, start, end;
    int n_char;

    if (added->n_tokens == 0)
        at = walk->n;
    for (; at < walk->n; at++)
        if (added->first_byte[(unsigned char)walk->text[at]] &&
            (token = longest_at(added, walk->text + at, room_at(walk, at))) != NULL)
            break;
    if (!token) {
        walk->searched = walk->n;
        if (walk->taken == walk->n)
            return false;
        *ret_piece = (struct added_piece){.start = walk->taken, .end = walk->n};
        walk->taken = walk->n;
        return true;
    }
    start = at;
    if (token->swallows_left)
        for (size_t before; start > walk->taken && is_space_before(unicode, walk->text, start, &before);)
            start = before;
    if (walk->taken < start) { /* the plain text first; the token is found again by the next call */
        *ret_piece = (struct added_piece){.start = walk->taken, .end = start};
        walk->searched = at;
        walk->taken = start;
        return true;
    }
    end = at + token->n_bytes;
    walk->searched = end;
    if (token->swallows_right)
        while ((unicode_at(unicode, walk->text + end, walk->n - end, &n_char) & UNICODE_CLASS_MASK) == UNICODE_SPACE)
            end += (size_t)n_char;
    /* The reference goes on searching behind the content, so that a token of white space may begin inside the space that
     * this one swallowed; it is then counted twice. */
    *ret_piece = (struct added_piece){.token = token, .start = start, .end = end};
    walk->taken = end;
    return true;
}
