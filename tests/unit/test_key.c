/* Keys are named by everything before them, are what the formula says, and come out the same from every thread. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "key.h"

enum { N_PAGES = 16 };

static void hex_of(const struct kv_key *key, char text[2 * KV_KEY_BYTES + 1]) {
    for (int i = 0; i < KV_KEY_BYTES; i++) {
        text[2 * i] = "0123456789abcdef"[key->bytes[i] >> 4];
        text[2 * i + 1] = "0123456789abcdef"[key->bytes[i] & 15];
    }
    text[2 * KV_KEY_BYTES] = 0;
}

static struct kv_key root_of(uint32_t uid) {
    uint8_t secret[KV_KEY_BYTES], fingerprint[KV_KEY_BYTES];
    struct kv_key root;

    for (int i = 0; i < KV_KEY_BYTES; i++) {
        secret[i] = (uint8_t)i;
        fingerprint[i] = (uint8_t)(KV_KEY_BYTES + i);
    }
    assert_int_equal(kv_key_root(secret, fingerprint, uid, &root), 0);
    return root;
}

static void tokens_of(int32_t tokens[N_PAGES * PAGE_TOKENS]) {
    for (int i = 0; i < N_PAGES * PAGE_TOKENS; i++)
        tokens[i] = i;
    tokens[0] = -1;
    tokens[1] = 0x01020304;
}

static void chain(const struct kv_key *parent, const int32_t *tokens, uint32_t n_pages, struct kv_key *keys) {
    struct kv_hasher *hasher;

    assert_int_equal(kv_hasher_new(&hasher), 0);
    assert_int_equal(kv_key_chain(hasher, parent, tokens, n_pages, keys), 0);
    kv_hasher_free(hasher);
}

/* Expected values: HMAC and SHA-256 of Python's hashlib over the bytes that key.h names. */
static void keys_are_the_hashes_of_the_formula(void **state) {
    struct kv_key root = root_of(1000), keys[2];
    int32_t tokens[N_PAGES * PAGE_TOKENS];
    char text[2 * KV_KEY_BYTES + 1];

    (void)state;
    tokens_of(tokens);
    chain(&root, tokens, 2, keys);
    hex_of(&root, text);
    assert_string_equal(text, "8d5c81a240faebec230a44c7ad6f7eadad104fd912ddd24495476e7e54e4e649");
    hex_of(&keys[0], text);
    assert_string_equal(text, "1d35dc7f8e8b01f901ec34712620a2e6e1d2069cd51595a5cc1a2d769fdcdcd4");
    hex_of(&keys[1], text);
    assert_string_equal(text, "786218e7c81165264bcc1a2cdb692822b7aa60c6e2b3ae697b100d59f1ab9517");
}

static void a_chain_can_be_continued_at_any_page(void **state) {
    struct kv_key root = root_of(0), whole[N_PAGES], pieces[N_PAGES];
    int32_t tokens[N_PAGES * PAGE_TOKENS];

    (void)state;
    tokens_of(tokens);
    chain(&root, tokens, N_PAGES, whole);
    for (uint32_t cut = 1; cut < N_PAGES; cut++) {
        chain(&root, tokens, cut, pieces);
        chain(&pieces[cut - 1], tokens + cut * PAGE_TOKENS, N_PAGES - cut, pieces + cut);
        assert_memory_equal(whole, pieces, sizeof whole);
    }
}

static void any_token_changes_its_page_and_all_behind_it(void **state) {
    struct kv_key root = root_of(0), before[3], after[3];
    int32_t tokens[N_PAGES * PAGE_TOKENS];

    (void)state;
    tokens_of(tokens);
    chain(&root, tokens, 3, before);
    for (int i = PAGE_TOKENS; i < 2 * PAGE_TOKENS; i++) {
        tokens[i] ^= 1 << 20;
        chain(&root, tokens, 3, after);
        tokens[i] ^= 1 << 20;
        assert_memory_equal(&before[0], &after[0], sizeof before[0]);
        assert_memory_not_equal(&before[1], &after[1], sizeof before[1]);
        assert_memory_not_equal(&before[2], &after[2], sizeof before[2]);
    }
}

static void secret_fingerprint_and_user_each_give_another_root(void **state) {
    uint8_t secret[KV_KEY_BYTES] = {0}, fingerprint[KV_KEY_BYTES] = {0};
    struct kv_key roots[4];

    (void)state;
    assert_int_equal(kv_key_root(secret, fingerprint, 0, &roots[0]), 0);
    assert_int_equal(kv_key_root(secret, fingerprint, UINT32_MAX, &roots[1]), 0);
    fingerprint[KV_KEY_BYTES - 1] = 1;
    assert_int_equal(kv_key_root(secret, fingerprint, 0, &roots[2]), 0);
    fingerprint[KV_KEY_BYTES - 1] = 0;
    secret[0] = 1;
    assert_int_equal(kv_key_root(secret, fingerprint, 0, &roots[3]), 0);
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < i; k++)
            assert_memory_not_equal(&roots[i], &roots[k], sizeof roots[i]);
}

struct worker {
    pthread_t thread;
    const int32_t *tokens;
    struct kv_key root, keys[N_PAGES];
};

static void *hash_often(void *argument) {
    struct worker *worker = argument;

    for (int i = 0; i < 50; i++) {
        worker->root = root_of(7);
        chain(&worker->root, worker->tokens, N_PAGES, worker->keys);
    }
    return NULL;
}

static void threads_with_their_own_hashers_agree(void **state) {
    int32_t tokens[N_PAGES * PAGE_TOKENS];
    struct kv_key root = root_of(7), keys[N_PAGES];
    struct worker workers[4];

    (void)state;
    tokens_of(tokens);
    chain(&root, tokens, N_PAGES, keys);
    for (int i = 0; i < 4; i++) {
        workers[i].tokens = tokens;
        assert_int_equal(pthread_create(&workers[i].thread, NULL, hash_often, &workers[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        assert_int_equal(pthread_join(workers[i].thread, NULL), 0);
        assert_memory_equal(workers[i].keys, keys, sizeof keys);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys_are_the_hashes_of_the_formula),
        cmocka_unit_test(a_chain_can_be_continued_at_any_page),
        cmocka_unit_test(any_token_changes_its_page_and_all_behind_it),
        cmocka_unit_test(secret_fingerprint_and_user_each_give_another_root),
        cmocka_unit_test(threads_with_their_own_hashers_agree),
    };

    return cmocka_run_group_tests_name("key", tests, NULL, NULL);
}
