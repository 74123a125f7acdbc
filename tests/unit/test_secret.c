/* A store keeps one secret for life, in a file that nobody else can read, and takes no other for it. */
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "secret.h"

enum { FILE_BYTES = 72 };

struct rig {
    char path[64];
    struct disk_folder folder;
};

static int open_rig(void **state) {
    struct rig *rig = calloc(1, sizeof *rig);

    assert_non_null(rig);
    strcpy(rig->path, "/tmp/test_secret.XXXXXX");
    assert_non_null(mkdtemp(rig->path));
    assert_int_equal(disk_folder_open(rig->path, &rig->folder), 0);
    *state = rig;
    return 0;
}

static int close_rig(void **state) {
    struct rig *rig = *state;

    unlinkat(rig->folder.fd, "secret", 0);
    unlinkat(rig->folder.fd, "elsewhere", 0);
    unlinkat(rig->folder.fd, "lock", 0);
    disk_folder_close(&rig->folder);
    rmdir(rig->path);
    free(rig);
    return 0;
}

static struct secret load(const struct rig *rig, bool is_new) {
    struct secret secret;
    bool was_new = !is_new;

    assert_int_equal(secret_load(&rig->folder, &secret, &was_new), 0);
    assert_int_equal(was_new, is_new);
    return secret;
}

/* Of a refused load, which changes nothing. */
static int refusal(const struct rig *rig) {
    struct secret secret;
    bool is_new = true;
    int r;

    memset(&secret, 0x5a, sizeof secret);
    r = secret_load(&rig->folder, &secret, &is_new);
    assert_true(r != 0 && is_new);
    for (size_t i = 0; i < sizeof secret; i++)
        assert_int_equal(((uint8_t *)&secret)[i], 0x5a);
    return r;
}

static void read_bytes(const struct rig *rig, uint8_t bytes[FILE_BYTES]) {
    size_t n;

    assert_int_equal(disk_folder_read(&rig->folder, "secret", bytes, FILE_BYTES, &n), 0);
    assert_int_equal(n, FILE_BYTES);
}

static void write_bytes(const struct rig *rig, const uint8_t *bytes, size_t n) {
    assert_int_equal(disk_folder_replace(&rig->folder, "secret", bytes, n), 0);
}

static void the_first_load_makes_one_and_later_ones_find_it(void **state) {
    struct rig *rig = *state;
    struct secret secret = load(rig, true), again = load(rig, false);
    struct stat status;

    assert_memory_equal(&secret, &again, sizeof secret);
    assert_int_equal(fstatat(rig->folder.fd, "secret", &status, AT_SYMLINK_NOFOLLOW), 0);
    assert_int_equal(status.st_mode & 07777, 0600);
    assert_int_equal(status.st_size, FILE_BYTES);
}

static void two_stores_have_nothing_in_common(void **state) {
    struct rig *rig = *state;
    struct secret a = load(rig, true), b;

    assert_int_equal(disk_folder_remove(&rig->folder, "secret"), 0);
    b = load(rig, true);
    assert_memory_not_equal(a.store_id, b.store_id, sizeof a.store_id);
    assert_memory_not_equal(a.bytes, b.bytes, sizeof a.bytes);
}

static void every_flipped_bit_is_damage_and_stays_there_to_be_seen(void **state) {
    struct rig *rig = *state;
    uint8_t bytes[FILE_BYTES], now[FILE_BYTES];

    load(rig, true);
    read_bytes(rig, bytes);
    for (int i = 0; i < FILE_BYTES; i++) {
        bytes[i] ^= (uint8_t)(1 << i % 8);
        write_bytes(rig, bytes, sizeof bytes);
        assert_int_equal(refusal(rig), SECRET_E_DAMAGED);
        read_bytes(rig, now);
        assert_memory_equal(now, bytes, sizeof now);
        bytes[i] ^= (uint8_t)(1 << i % 8);
    }
}

static void a_file_of_another_length_is_damage(void **state) {
    struct rig *rig = *state;
    uint8_t bytes[FILE_BYTES + 1] = {0};

    load(rig, true);
    read_bytes(rig, bytes);
    for (size_t n = 0; n <= FILE_BYTES + 1; n++)
        if (n != FILE_BYTES) {
            write_bytes(rig, bytes, n);
            assert_int_equal(refusal(rig), SECRET_E_DAMAGED);
        }
}

static void a_file_that_others_can_read_is_refused(void **state) {
    struct rig *rig = *state;

    load(rig, true);
    for (mode_t bit = 1; bit <= 040; bit <<= 1) {
        assert_int_equal(fchmodat(rig->folder.fd, "secret", 0600 | bit, 0), 0);
        assert_int_equal(refusal(rig), SECRET_E_UNSAFE);
    }
    assert_int_equal(fchmodat(rig->folder.fd, "secret", 0600, 0), 0);
    load(rig, false);
}

static void a_link_or_a_fifo_is_refused(void **state) {
    struct rig *rig = *state;

    load(rig, true);
    assert_int_equal(renameat(rig->folder.fd, "secret", rig->folder.fd, "elsewhere"), 0);
    assert_int_equal(symlinkat("elsewhere", rig->folder.fd, "secret"), 0);
    assert_int_equal(refusal(rig), SECRET_E_UNSAFE);
    assert_int_equal(unlinkat(rig->folder.fd, "secret", 0), 0);
    assert_int_equal(mkfifoat(rig->folder.fd, "secret", 0600), 0);
    assert_int_equal(refusal(rig), SECRET_E_UNSAFE);
}

static void a_folder_that_takes_no_file_is_an_error_and_not_a_secret(void **state) {
    struct rig *rig = *state;

    assert_int_equal(rmdir(rig->path), -1); /* the lock is in it */
    assert_int_equal(unlinkat(rig->folder.fd, "lock", 0), 0);
    assert_int_equal(rmdir(rig->path), 0);
    assert_int_equal(refusal(rig), -ENOENT);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(the_first_load_makes_one_and_later_ones_find_it, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(two_stores_have_nothing_in_common, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(every_flipped_bit_is_damage_and_stays_there_to_be_seen, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(a_file_of_another_length_is_damage, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(a_file_that_others_can_read_is_refused, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(a_link_or_a_fifo_is_refused, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(a_folder_that_takes_no_file_is_an_error_and_not_a_secret, open_rig, close_rig),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
