#include "fixture.h"
#include "checkpoint.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char index_name[] = "model.safetensors.index.json";

/* a, b in one shard, c in another, and an index. */
static void two_shards(struct fixture *f, const char *index) {
    static const uint64_t dims[] = {2, 3, 0};

    fixture_open(f);
    fixture_add(f, "BF16", dims, "a");
    fixture_add(f, "F32", dims, "b");
    fixture_add(f, "F16", dims, "c");
    fixture_save_part(f, "m-1.safetensors", 0, 2, 0);
    fixture_save_part(f, "m-2.safetensors", 2, 1, 0);
    if (!index)
        index = "{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-1.safetensors\",\"c\":\"m-2.safetensors\"}}";
    fixture_write(f, index_name, index, strlen(index));
}

static void refuse(const struct fixture *f, int error, const char *file, const char *tensor, const char *reason) {
    struct checkpoint *checkpoint = NULL;
    struct report report = {""};

    assert_int_equal(error, checkpoint_open(f->folder, &checkpoint, &report));
    assert_null(checkpoint);
    assert_report(&report, file, tensor, reason, NULL);
}

static void shards_make_one_table(void **state) {
    struct checkpoint *checkpoint;
    struct report report = {""};
    struct fixture f;

    (void)state;
    two_shards(&f, NULL);
    if (checkpoint_open(f.folder, &checkpoint, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(3, checkpoint->n_tensors);
    assert_memory_equal(f.tensors[1].data, checkpoint_data(checkpoint_find(checkpoint, "b")), f.tensors[1].bytes);
    assert_memory_equal(f.tensors[2].data, checkpoint_data(checkpoint_find(checkpoint, "c")), f.tensors[2].bytes);
    assert_null(checkpoint_find(checkpoint, "d"));
    checkpoint_close(checkpoint);
    checkpoint_close(NULL);
    fixture_close(&f);
}

static void folders_without_a_checkpoint_are_refused(void **state) {
    struct fixture f;

    (void)state;
    fixture_open(&f);
    refuse(&f, -ENOENT, f.folder, "model.safetensors", "neither");
    fixture_write(&f, "model.safetensors", "", 0);
    refuse(&f, -EINVAL, f.folder, "model.safetensors", "empty");
    fixture_write(&f, "model.safetensors", "abc", 3);
    refuse(&f, -EINVAL, "model.safetensors", "3 bytes", "truncated");
    remove(fixture_path(&f, "model.safetensors"));
    assert_int_equal(0, mkfifo(fixture_path(&f, "model.safetensors"), 0600));
    refuse(&f, -EINVAL, "model.safetensors", "", "not a regular file");
    fixture_close(&f);
}

static void damaged_shards_are_refused(void **state) {
    struct fixture f;
    struct stat st;

    (void)state;
    two_shards(&f, NULL);
    assert_int_equal(0, stat(fixture_path(&f, "m-2.safetensors"), &st));
    assert_int_equal(0, truncate(fixture_path(&f, "m-2.safetensors"), st.st_size - 1));
    refuse(&f, -EINVAL, "m-2.safetensors: ", "c: ", "truncated");
    assert_int_equal(0, truncate(fixture_path(&f, "m-2.safetensors"), st.st_size + 1));
    refuse(&f, -EINVAL, "m-2.safetensors: ", "last 1 bytes", "no tensor");
    remove(fixture_path(&f, "m-2.safetensors"));
    refuse(&f, -ENOENT, f.folder, "m-2.safetensors: missing", index_name);
    fixture_close(&f);
}

static void index_and_shards_must_agree(void **state) {
    static const struct {
        const char *index, *file, *tensor, *reason;
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-2.safetensors\",\"c\":\"m-2.safetensors\"}}",
         "m-2.safetensors: ", "b: ", "not in m-2.safetensors"},
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"c\":\"m-2.safetensors\"}}",
         "m-1.safetensors: ", "b: ", "not in model.safetensors.index.json"},
        {"{\"weight_map\":{\"a\":\"m-1.safetensors\",\"b\":\"m-1.safetensors\",\"c\":\"m-2.safetensors\","
         "\"d\":\"m-2.safetensors\"}}",
         "m-2.safetensors: ", "d: ", "not in m-2.safetensors"},
        {"{\"weight_map\":{\"a\":\"../m-1.safetensors\"}}", "index.json: ", "a: ", "refused"},
        {"{\"weight_map\":", "index.json: ", "byte", ""},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct fixture f;

        two_shards(&f, cases[i].index);
        refuse(&f, -EINVAL, cases[i].file, cases[i].tensor, cases[i].reason);
        fixture_close(&f);
    }
}

static void a_tensor_in_two_shards_is_refused(void **state) {
    struct fixture f;

    (void)state;
    two_shards(&f, NULL);
    fixture_save_part(&f, "m-2.safetensors", 1, 2, 0);
    refuse(&f, -EINVAL, "b: also in", "m-1.safetensors", "m-2.safetensors");
    fixture_close(&f);
}

static void single_file_beside_a_foreign_index_is_refused(void **state) {
    static const char index[] = "{\"weight_map\":{\"a\":\"model.safetensors\",\"b\":\"model.safetensors\","
                                "\"c\":\"model.safetensors\"}}";
    struct checkpoint *checkpoint;
    struct report report = {""};
    struct fixture f;

    (void)state;
    two_shards(&f, NULL);
    fixture_save(&f);
    refuse(&f, -EINVAL, "model.safetensors: ", index_name, "remove one of the two");
    fixture_write(&f, index_name, index, strlen(index)); /* an index over one file is fine */
    assert_int_equal(0, checkpoint_open(f.folder, &checkpoint, &report));
    assert_int_equal(1, checkpoint->n_files);
    checkpoint_close(checkpoint);
    fixture_close(&f);
}

static void data_at_odd_addresses_is_copied(void **state) {
    static const uint64_t dims[] = {2, 3, 0};

    (void)state;
    for (int pad = 0; pad < 8; pad++) {
        struct checkpoint *checkpoint;
        struct report report = {""};
        struct fixture f;

        fixture_open(&f);
        fixture_add(&f, "F32", dims, "a");
        fixture_add(&f, "BF16", dims, "b");
        fixture_save_part(&f, "model.safetensors", 0, 2, pad);
        assert_int_equal(0, checkpoint_open(f.folder, &checkpoint, &report));
        for (int i = 0; i < 2; i++) {
            const void *data = checkpoint_data(checkpoint_find(checkpoint, f.tensors[i].name));

            assert_memory_equal(f.tensors[i].data, data, f.tensors[i].bytes);
            assert_int_equal(0, (uintptr_t)data % (i ? 2 : 4));
        }
        checkpoint_close(checkpoint);
        fixture_close(&f);
    }
}

static void a_long_path_leaves_room_for_the_reason(void **state) {
    static const uint64_t dims[] = {1, 0};
    struct fixture f, deep;
    struct checkpoint *checkpoint;
    char name[TENSOR_NAME_MAX + 1], *file;
    struct report report = {""};
    size_t n;

    (void)state;
    memset(name, 'x', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    fixture_open(&f);
    deep = (struct fixture){0};
    snprintf(deep.folder, sizeof deep.folder, "%.60s/%.170s", f.folder, name);
    assert_int_equal(0, mkdir(deep.folder, 0700));
    fixture_add(&f, "F32", dims, name);
    fixture_save(&f);
    file = fixture_read(fixture_path(&f, "model.safetensors"), &n);
    fixture_write(&deep, "model.safetensors", file, n - 1);
    free(file);
    assert_int_equal(-EINVAL, checkpoint_open(deep.folder, &checkpoint, &report));
    assert_report(&report, "model.safetensors: ", name, "truncated?", NULL);
    fixture_close(&deep);
    fixture_close(&f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_make_one_table),
        cmocka_unit_test(folders_without_a_checkpoint_are_refused),
        cmocka_unit_test(damaged_shards_are_refused),
        cmocka_unit_test(index_and_shards_must_agree),
        cmocka_unit_test(a_tensor_in_two_shards_is_refused),
        cmocka_unit_test(single_file_beside_a_foreign_index_is_refused),
        cmocka_unit_test(data_at_odd_addresses_is_copied),
        cmocka_unit_test(a_long_path_leaves_room_for_the_reason),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
