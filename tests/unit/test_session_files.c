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

#include "base.h"
#include "session_files.h"

enum { RETRY_US = 30000000, UID = 1000, RECORDS_MAX = 8 };

static struct rig {
    char path[64];
    struct disk_folder folder;
    struct session_files *files;
    struct session_names names;
    struct kv_work_item *out; /* with the worker */
    bool takes_no_work;
    uint64_t now_us;
    int n_troubles, trouble; /* told; the last one */
    int n_waits, wait_result;

    /* what a load hands out */
    int n_loaded;
    struct {
        uint32_t uid, n_tokens;
        char name[SESSION_RECORD_NAME_BYTES_MAX + 1];
        int32_t first;
    } loaded[RECORDS_MAX];
    struct session_files_found found;
} rig;

static int submit(void *user, struct kv_work_item *item) {
    (void)user;
    assert_null(rig.out);
    if (rig.takes_no_work)
        return -EAGAIN;
    rig.out = item;
    return 0;
}

/* What is with the worker comes home. */
static void turn(void) {
    struct kv_work_item *item = rig.out;

    assert_non_null(item);
    rig.out = NULL;
    item->run(item);
    item->done(item);
}

static void turn_all(void) {
    while (rig.out)
        turn();
}

static uint64_t now_us(void) {
    return rig.now_us;
}

static void on_trouble(void *user, int error) {
    (void)user;
    rig.n_troubles++;
    rig.trouble = error;
}

static void on_wait(struct session_wait *wait, int result) {
    (void)wait;
    rig.n_waits++;
    rig.wait_result = result;
}

static void open_files(void) {
    struct session_files_options options = {.folder = &rig.folder,
                                            .work = {submit, NULL},
                                            .names = rig.names,
                                            .now_us = now_us,
                                            .retry_us = RETRY_US,
                                            .on_trouble = on_trouble};

    assert_int_equal(session_files_open(&options, &rig.files), 0);
}

static int open_rig(void **state) {
    (void)state;
    rig = (struct rig){.now_us = 5, .names = {.secret = {1}, .vocabulary = {2}}};
    strcpy(rig.path, "/tmp/session_files.XXXXXX");
    assert_non_null(mkdtemp(rig.path));
    assert_int_equal(disk_folder_open(rig.path, &rig.folder), 0);
    open_files();
    return 0;
}

static void remove_file(void *user, const char *name) {
    (void)user;
    unlinkat(rig.folder.fd, name, 0);
    unlinkat(rig.folder.fd, name, AT_REMOVEDIR);
}

static int close_rig(void **state) {
    (void)state;
    turn_all();
    session_files_close(rig.files);
    disk_folder_list(&rig.folder, remove_file, NULL);
    unlinkat(rig.folder.fd, "lock", 0);
    disk_folder_close(&rig.folder);
    assert_int_equal(rmdir(rig.path), 0);
    return 0;
}

static struct session_file *add(uint32_t uid, const char *name) {
    struct session_file *file;

    assert_int_equal(session_files_add(rig.files, uid, span_of(name), &file), 0);
    return file;
}

static void put(struct session_file *file, uint32_t uid, const char *name, uint32_t n_tokens) {
    static int32_t tokens[100];
    struct session_record record = {.uid = uid, .name = span_of(name), .tokens = tokens, .n_tokens = n_tokens};

    tokens[0] = (int32_t)n_tokens;
    assert_int_equal(session_files_put(rig.files, file, &record), 0);
}

static int keep_loaded(void *user, const struct session_record *record) {
    int i = rig.n_loaded++;

    (void)user;
    assert_true(i < RECORDS_MAX);
    rig.loaded[i].uid = record->uid;
    rig.loaded[i].n_tokens = record->n_tokens;
    rig.loaded[i].first = record->n_tokens > 0 ? record->tokens[0] : -1;
    snprintf(rig.loaded[i].name, sizeof rig.loaded[i].name, "%.*s", (int)record->name.n, record->name.bytes);
    return 0;
}

/* Returns how many whole ones there are. */
static int load(void) {
    rig.n_loaded = 0;
    assert_int_equal(session_files_load(&rig.folder, &rig.names, keep_loaded, NULL, &rig.found), 0);
    assert_int_equal(rig.found.n_whole, rig.n_loaded);
    return rig.n_loaded;
}

/* Of the session of that name, or -1. */
static int tokens_of(uint32_t uid, const char *name) {
    load();
    for (int i = 0; i < rig.n_loaded; i++)
        if (rig.loaded[i].uid == uid && strcmp(rig.loaded[i].name, name) == 0)
            return (int)rig.loaded[i].n_tokens;
    return -1;
}

static void note_name(void *user, const char *name) {
    snprintf(user, 80, "%s", name);
}

static struct session_files_stats stats(void) {
    struct session_files_stats s;

    session_files_stats(rig.files, &s);
    return s;
}

/* ---- writing ---- */

static void newest_state_is_written_and_those_between_are_not(void **state) {
    struct session_file *file = add(UID, "a");

    (void)state;
    for (uint32_t n = 1; n <= 10; n++)
        put(file, UID, "a", n);
    assert_int_equal(tokens_of(UID, "a"), -1); /* the worker has it, and has not run */
    turn();
    assert_int_equal(tokens_of(UID, "a"), 1);
    turn();
    assert_int_equal(tokens_of(UID, "a"), 10);
    assert_null(rig.out);
    assert_true(session_files_is_idle(rig.files));
    assert_int_equal(stats().n_written, 2);
    assert_int_equal(stats().n_unwritten, 0);
}

static void each_user_and_name_has_a_file_of_its_own(void **state) {
    (void)state;
    put(add(UID, "a"), UID, "a", 1);
    put(add(UID, "b"), UID, "b", 2);
    put(add(UID + 1, "a"), UID + 1, "a", 3);
    put(add(UID, "aa"), UID, "aa", 0);
    turn_all();
    assert_int_equal(load(), 4);
    assert_int_equal(tokens_of(UID, "a"), 1);
    assert_int_equal(tokens_of(UID, "b"), 2);
    assert_int_equal(tokens_of(UID + 1, "a"), 3);
    assert_int_equal(tokens_of(UID, "aa"), 0);
}

static void removed_file_is_gone_also_when_a_write_is_out(void **state) {
    struct session_wait wait = {.done = on_wait};
    struct session_file *file = add(UID, "a");

    (void)state;
    put(file, UID, "a", 1);
    session_files_remove(rig.files, file, &wait);
    turn();
    assert_int_equal(rig.n_waits, 0);
    assert_int_equal(tokens_of(UID, "a"), 1);
    turn();
    assert_int_equal(rig.n_waits, 1);
    assert_int_equal(rig.wait_result, 0);
    assert_int_equal(load(), 0);
    assert_int_equal(stats().n_files, 0);
    session_files_remove(rig.files, add(UID, "never written"), &wait);
    turn_all();
    assert_int_equal(rig.n_waits, 2);
    assert_int_equal(rig.wait_result, 0);
}

static void session_made_again_is_not_removed(void **state) {
    struct session_file *file = add(UID, "a");

    (void)state;
    put(file, UID, "a", 1);
    turn();
    session_files_remove(rig.files, file, NULL);
    put(add(UID, "a"), UID, "a", 7);
    turn_all();
    assert_int_equal(tokens_of(UID, "a"), 7);
}

static void who_waits_is_told_when_its_own_state_is_there(void **state) {
    struct session_wait first = {.done = on_wait}, second = {.done = on_wait};
    struct session_file *file = add(UID, "a");

    (void)state;
    put(file, UID, "a", 1);
    session_files_wait(file, &first);
    put(file, UID, "a", 2);
    session_files_wait(file, &second);
    turn();
    assert_int_equal(rig.n_waits, 1);
    turn();
    assert_int_equal(rig.n_waits, 2);
    assert_int_equal(tokens_of(UID, "a"), 2);
}

/* ---- failing ---- */

static void failure_is_told_once_and_tried_again_later(void **state) {
    struct session_file *file = add(UID, "a");
    struct session_wait wait = {.done = on_wait};
    int fd = rig.folder.fd;

    (void)state;
    assert_int_equal(session_files_tick(rig.files), 0);
    rig.folder.fd = -1; /* no folder any more */
    put(file, UID, "a", 1);
    session_files_wait(file, &wait);
    assert_true(session_file_is_durable(file));
    turn();
    assert_false(session_file_is_durable(file));
    assert_int_equal(rig.wait_result, -EBADF);
    put(file, UID, "a", 2);
    assert_false(session_file_is_durable(file)); /* it may not work this time either */
    turn();
    assert_int_equal(rig.n_troubles, 1);
    assert_int_equal(rig.trouble, -EBADF);
    assert_int_equal(session_files_tick(rig.files), 5 + RETRY_US);
    assert_null(rig.out);
    assert_int_equal(stats().n_unwritten, 1);
    rig.now_us += RETRY_US;
    assert_int_equal(session_files_tick(rig.files), 0);
    turn(); /* in vain */
    assert_int_equal(rig.n_troubles, 1);
    rig.folder.fd = fd;
    rig.now_us += RETRY_US;
    session_files_tick(rig.files);
    turn();
    assert_true(session_file_is_durable(file));
    assert_int_equal(rig.n_troubles, 2);
    assert_int_equal(rig.trouble, 0);
    assert_int_equal(tokens_of(UID, "a"), 2);
    assert_int_equal(stats().n_failed, 3);
    assert_int_equal(session_files_tick(rig.files), 0);
}

static void what_failed_is_tried_when_somebody_asks(void **state) {
    struct session_file *file = add(UID, "a");
    int fd = rig.folder.fd;

    (void)state;
    session_files_retry(rig.files);
    assert_null(rig.out); /* there is nothing */
    rig.folder.fd = -1;
    put(file, UID, "a", 1);
    turn();
    session_files_retry(rig.files);
    turn(); /* in vain, and once */
    assert_null(rig.out);
    assert_int_equal(stats().n_failed, 2);
    assert_int_equal(stats().error, -EBADF);
    assert_int_equal(session_files_tick(rig.files), 5 + RETRY_US); /* also by itself */
    rig.folder.fd = fd;
    session_files_retry(rig.files);
    turn();
    assert_true(session_file_is_durable(file));
    assert_int_equal(tokens_of(UID, "a"), 1);
    assert_int_equal(stats().n_unwritten, 0);
}

static void write_that_works_brings_those_that_failed(void **state) {
    struct session_file *a = add(UID, "a"), *b = add(UID, "b"), *gone = add(UID, "gone");
    int fd = rig.folder.fd;

    (void)state;
    put(gone, UID, "gone", 1);
    turn();
    rig.folder.fd = -1;
    put(a, UID, "a", 1);
    session_files_remove(rig.files, gone, NULL);
    turn_all();
    rig.folder.fd = fd;
    put(b, UID, "b", 2);
    turn_all();
    assert_int_equal(load(), 2);
    assert_true(session_file_is_durable(a));
    assert_int_equal(rig.n_troubles, 2);
    assert_int_equal(stats().n_files, 2);
}

static void one_file_that_cannot_be_written_harms_no_other(void **state) {
    struct session_file *a = add(UID, "a"), *b = add(UID, "b");
    char name[80], new_name[90];

    (void)state;
    put(a, UID, "a", 1);
    turn();
    assert_int_equal(disk_folder_list(&rig.folder, note_name, name), 0);
    snprintf(new_name, sizeof new_name, "%s.new", name);
    assert_int_equal(mkdirat(rig.folder.fd, new_name, 0700), 0);
    put(a, UID, "a", 2);
    put(b, UID, "b", 3);
    turn_all();
    assert_int_equal(tokens_of(UID, "a"), 1); /* the one before, whole */
    assert_int_equal(tokens_of(UID, "b"), 3);
    assert_false(session_file_is_durable(a));
    assert_true(session_file_is_durable(b));
    assert_int_equal(rig.n_troubles, 1); /* not over while one is not written */
    assert_int_equal(unlinkat(rig.folder.fd, new_name, AT_REMOVEDIR), 0);
    put(b, UID, "b", 4);
    turn_all();
    assert_int_equal(tokens_of(UID, "a"), 2);
    assert_int_equal(rig.trouble, 0);
}

static void work_that_nobody_takes_is_done_later(void **state) {
    struct session_file *file = add(UID, "a");

    (void)state;
    rig.takes_no_work = true;
    put(file, UID, "a", 1);
    put(file, UID, "a", 2);
    assert_null(rig.out);
    assert_false(session_files_is_idle(rig.files));
    rig.takes_no_work = false;
    rig.now_us = session_files_tick(rig.files);
    session_files_tick(rig.files);
    turn_all();
    assert_int_equal(tokens_of(UID, "a"), 2);
}

/* ---- loading ---- */

static void write_file(const char *name, const void *bytes, size_t n) {
    assert_int_equal(disk_folder_replace(&rig.folder, name, bytes, n), 0);
}

static void damaged_and_foreign_records_are_counted_and_left(void **state) {
    char name[80], copy[80], bytes[4096];
    size_t n;
    int fd;

    (void)state;
    put(add(UID, "a"), UID, "a", 10);
    turn_all();
    assert_int_equal(disk_folder_list(&rig.folder, note_name, name), 0);
    assert_int_equal(disk_folder_read(&rig.folder, name, bytes, sizeof bytes, &n), 0);

    snprintf(copy, sizeof copy, "%s", name); /* a whole one under another name */
    copy[0] = copy[0] == '0' ? '1' : '0';
    write_file(copy, bytes, n);
    write_file("notes.txt", "mine", 4);
    assert_int_equal(load(), 1);
    assert_int_equal(rig.found.n_damaged, 1);
    assert_string_equal(rig.found.bad[0].name, copy);
    assert_int_equal(rig.found.bad[0].error, 0);
    assert_int_equal(disk_folder_remove(&rig.folder, copy), 0);

    bytes[60] ^= 1;
    write_file(name, bytes, n);
    assert_int_equal(load(), 0);
    assert_int_equal(rig.found.n_damaged, 1);
    write_file(name, bytes, 0);
    assert_int_equal(load(), 0);
    assert_int_equal(rig.found.n_damaged, 1);
    bytes[60] ^= 1;

    write_file(name, bytes, n);
    rig.names.vocabulary[0]++; /* another model */
    assert_int_equal(load(), 0);
    assert_int_equal(rig.found.n_foreign, 1);
    assert_int_equal(rig.found.n_bad, 0);
    rig.names.vocabulary[0]--;

    fd = openat(rig.folder.fd, name, O_RDONLY);
    assert_int_equal(fchmod(fd, 0644), 0);
    close(fd);
    assert_int_equal(load(), 0);
    assert_int_equal(rig.found.n_unreadable, 1);
    assert_int_equal(rig.found.bad[0].error, -EPERM);
}

static void names_of_files_tell_nothing_without_the_secret(void **state) {
    char name[80] = "", other[80] = "";

    (void)state;
    put(add(UID, "a"), UID, "a", 1);
    turn_all();
    disk_folder_list(&rig.folder, note_name, name);
    assert_int_equal(strlen(name), 64);
    session_files_close(rig.files);
    assert_int_equal(disk_folder_remove(&rig.folder, name), 0);
    rig.names.secret[5]++;
    open_files();
    put(add(UID, "a"), UID, "a", 1);
    turn_all();
    disk_folder_list(&rig.folder, note_name, other);
    assert_string_not_equal(name, other);
}

int main(void) {
#define CASE(claim) cmocka_unit_test_setup_teardown(claim, open_rig, close_rig)
    const struct CMUnitTest tests[] = {
        CASE(newest_state_is_written_and_those_between_are_not), CASE(each_user_and_name_has_a_file_of_its_own),
        CASE(removed_file_is_gone_also_when_a_write_is_out),     CASE(session_made_again_is_not_removed),
        CASE(who_waits_is_told_when_its_own_state_is_there),     CASE(failure_is_told_once_and_tried_again_later),
        CASE(what_failed_is_tried_when_somebody_asks),           CASE(write_that_works_brings_those_that_failed),
        CASE(one_file_that_cannot_be_written_harms_no_other),    CASE(work_that_nobody_takes_is_done_later),
        CASE(damaged_and_foreign_records_are_counted_and_left),  CASE(names_of_files_tell_nothing_without_the_secret),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
