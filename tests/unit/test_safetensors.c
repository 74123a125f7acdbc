#include "fixture.h"
#include "safetensors.h"
#include "shard_index.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A file of this header and so many zero bytes of data; exactly as long as it is, so that an over-read is seen. */
static int parse(const char *header, size_t data_bytes, struct safetensors *table, struct report *report) {
    size_t n_header = strlen(header), n = 8 + n_header + data_bytes;
    uint8_t *file = calloc(1, n);
    int r;

    assert_non_null(file);
    for (int i = 0; i < 8; i++)
        file[i] = (uint8_t)(n_header >> 8 * i);
    memcpy(file + 8, header, n_header);
    r = safetensors_parse("dir/x.safetensors", file, n, table, report);
    free(file);
    return r;
}

static void refuse(const char *header, size_t data_bytes, const char *part, const char *other) {
    struct safetensors table = {.n_tensors = 77};
    struct report report = {""};

    if (parse(header, data_bytes, &table, &report) != -EINVAL)
        fail_msg("not refused: %s", header);
    assert_report(&report, "dir/x.safetensors: ", part, other, NULL);
    assert_int_equal(77, table.n_tensors); /* untouched */
}

static void a_table_is_sorted_and_points_into_the_file(void **state) {
    static const char header[] = "{\"__metadata__\":{\"format\":\"pt\",\"a\":\"b\"},"
                                 "\"b\\u002eweight\":{\"data_offsets\":[8,16],\"shape\":[2,2],\"dtype\":\"BF16\"},"
                                 "\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
                                 "\"empty\":{\"dtype\":\"F8_E4M3\",\"shape\":[0,9],\"data_offsets\":[8,8]},"
                                 "\"scalar\":{\"dtype\":\"I64\",\"shape\":[],\"data_offsets\":[16,24]}}   ";
    struct safetensors table;
    struct report report = {""};
    char shape[32];

    (void)state;
    if (parse(header, 24, &table, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(4, table.n_tensors);
    assert_string_equal("a", table.tensors[0].name);
    assert_int_equal(DTYPE_F32, table.tensors[0].dtype);
    assert_int_equal(8 + strlen(header), table.tensors[0].offset);
    assert_string_equal("b.weight", table.tensors[1].name);
    assert_int_equal(DTYPE_BF16, table.tensors[1].dtype);
    assert_int_equal(8 + strlen(header) + 8, table.tensors[1].offset);
    assert_int_equal(8, table.tensors[1].bytes);
    assert_string_equal("[2, 2]",
                        safetensors_shape(table.tensors[1].dims, table.tensors[1].n_dims, shape, sizeof shape));
    assert_int_equal(0, table.tensors[2].bytes);
    assert_int_equal(-1, table.tensors[3].dtype);
    assert_int_equal(0, table.tensors[3].n_dims);
    assert_string_equal("[]", safetensors_shape(NULL, 0, shape, sizeof shape));
    assert_string_equal("[1234", safetensors_shape((const uint64_t[]){123456}, 1, shape, 6));
    safetensors_deinit(&table);
    assert_int_equal(0, parse("{}", 0, &table, &report));
    assert_int_equal(0, table.n_tensors);
    safetensors_deinit(&table);
}

static void lengths_that_lie_are_refused(void **state) {
    uint8_t file[16] = {0};
    struct safetensors table;
    struct report report = {""};

    (void)state;
    for (size_t n = 0; n < 8; n++) {
        assert_int_equal(-EINVAL, safetensors_parse("x", file, n, &table, &report));
        assert_report(&report, "x: ", "too short", NULL);
    }
    file[7] = 0x10; /* 2^60 */
    assert_int_equal(-EINVAL, safetensors_parse("x", file, sizeof file, &table, &report));
    assert_report(&report, "x: ", "header length 1152921504606846976", "limit", NULL);
    memset(file, 0xff, 8);
    assert_int_equal(-EINVAL, safetensors_parse("x", file, sizeof file, &table, &report));
    assert_report(&report, "x: ", "header length 18446744073709551615", NULL);
    memset(file, 0, 8);
    file[0] = 9;
    assert_int_equal(-EINVAL, safetensors_parse("x", file, sizeof file, &table, &report));
    assert_report(&report, "x: ", "header length 9 exceeds the file of 16 bytes", NULL);
    file[0] = 0;
    assert_int_equal(-EINVAL, safetensors_parse("x", file, sizeof file, &table, &report));
    assert_report(&report, "x: header", NULL);
}

#define T(name, dtype, shape, begin, end)                                                                              \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void headers_that_are_no_tables_are_refused(void **state) {
    static const struct {
        const char *header, *part, *other;
    } cases[] = {
        {"[]", "header byte", "object"},
        {"{", "header byte", ""},
        {"{}x", "header byte", ""},
        {"{\"a\":1}", "a: header byte", "object"},
        {"{\"a\":{}}", "a: header byte", "missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", "a: header byte", "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", "a: header byte", "missing"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", "a: header byte", "missing"},
        {"{\"a\":{\"dtype\":\"F32\",\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", "a: header byte", ""},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", "a: header byte", "unknown field"},
        {"{" T("a", "F33", "[1]", 0, 4) "}", "a: header byte", "dtype"},
        {"{\"a\":{\"dtype\":3,\"shape\":[1],\"data_offsets\":[0,4]}}", "a: header byte", "dtype"},
        {"{" T("a", "F32", "1", 0, 4) "}", "a: header byte", "shape"},
        {"{" T("a", "F32", "[1.0]", 0, 4) "}", "a: header byte", "shape"},
        {"{" T("a", "F32", "[-1]", 0, 4) "}", "a: header byte", "shape"},
        {"{" T("a", "F32", "[\"1\"]", 0, 4) "}", "a: header byte", "shape"},
        {"{" T("a", "F32", "[9223372036854775808]", 0, 4) "}", "a: header byte", "shape"},
        {"{" T("a", "F32", "[1,1,1,1,1,1,1,1,1]", 0, 4) "}", "a: header byte", "too many dimensions"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0]}}", "a: header byte", "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", "a: header byte", "data_offsets"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":4}}", "a: header byte", "data_offsets"},
        {"{" T("a", "F32", "[1]", -1, 4) "}", "a: header byte", "data_offsets"},
        {"{" T("", "F32", "[1]", 0, 4) "}", "header byte", "name"},
        {"{" T("a\\nb", "F32", "[1]", 0, 4) "}", "header byte", "not printable"},
        {"{" T("a\\u0000", "F32", "[1]", 0, 4) "}", "header byte", "not printable"},
        {"{" T("\xc3\xa9", "F32", "[1]", 0, 4) "}", "header byte", "not printable"},
        {"{\"__metadata__\":3}", "__metadata__", "object"},
        {"{\"__metadata__\":{\"a\":1}}", "__metadata__", "strings"},
        {"{\"__metadata__\":{\"a\":\"b\",\"\\u0061\":\"c\"}}", "__metadata__", "duplicate"},
        {"{\"__metadata__\":{},\"__metadata__\":{}}", "__metadata__", "duplicate"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        refuse(cases[i].header, 4, cases[i].part, cases[i].other);
}

static void names_and_metadata_are_bounded(void **state) {
    char header[8192], name[TENSOR_NAME_MAX + 2];
    size_t used;

    (void)state;
    memset(name, 'n', sizeof name);
    name[sizeof name - 1] = '\0';
    snprintf(header, sizeof header, "{\"%s\":{}}", name);
    refuse(header, 4, "header byte", "too long");
    used = (size_t)snprintf(header, sizeof header, "{\"__metadata__\":{\"a\":\"\"");
    for (int i = 0; i < 300; i++)
        used += (size_t)snprintf(header + used, sizeof header - used, ",\"%d\":\"\"", i);
    snprintf(header + used, sizeof header - used, "}}");
    refuse(header, 0, "__metadata__", "too many");
    memset(header, '[', 200);
    memcpy(header, "{\"a\":", 5);
    header[200] = '\0';
    refuse(header, 0, "header byte", "");
}

static void data_that_overlaps_misses_or_exceeds_is_refused(void **state) {
    static const struct {
        const char *header;
        size_t data_bytes;
        const char *part, *other;
    } cases[] = {
        {"{" T("a", "F32", "[1]", 0, 4) "," T("a", "F32", "[1]", 4, 8) "}", 8, "a: duplicate key", ""},
        {"{" T("a", "F32", "[1]", 0, 4) "," T("a", "F32", "[1]", 0, 4) "}", 4, "a: duplicate key", ""},
        {"{" T("a", "F32", "[2]", 0, 8) "," T("b", "F32", "[1]", 4, 8) "}", 8, "b: data overlaps", "of a"},
        {"{" T("b", "F32", "[1]", 0, 4) "," T("a", "F32", "[1]", 0, 4) "}", 4, "overlaps", ""},
        {"{" T("a", "F32", "[1]", 0, 4) "," T("b", "F32", "[1]", 8, 12) "}", 12, "b: 4 bytes before", "no tensor"},
        {"{" T("a", "F32", "[1]", 4, 8) "}", 8, "a: 4 bytes before", "no tensor"},
        {"{" T("a", "F32", "[1]", 0, 4) "}", 5, "last 1 bytes", "no tensor"},
        {"{}", 5, "last 5 bytes", "no tensor"},
        {"{" T("a", "F32", "[2]", 0, 8) "}", 7, "a: data ends at byte 8", "truncated"},
        {"{" T("a", "F32", "[1]", 4, 0) "}", 8, "a: data_offsets end at 0", "begin at 4"},
        {"{" T("a", "F32", "[1]", 0, 9223372036854775807) "}", 4, "a: data ends", "only 4 bytes"},
        {"{" T("a", "F32", "[2]", 0, 4) "}", 4, "a: data_offsets span 4 bytes", "F32 [2] needs 8"},
        {"{" T("a", "F32", "[0]", 0, 4) "}", 4, "a: data_offsets span 4 bytes", "needs 0"},
        {"{" T("a", "F4", "[1]", 0, 0) "}", 0, "a: data_offsets span 0 bytes", "F4 [1]"},
        {"{" T("a", "U8", "[4294967296,4294967296,4]", 0, 4) "}", 4, "a: shape", "overflows"},
        {"{" T("a", "F32", "[4611686018427387904]", 0, 0) "}", 0, "a: shape", "overflows"},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++)
        refuse(cases[i].header, cases[i].data_bytes, cases[i].part, cases[i].other);
}

static void every_truncation_of_a_real_file_is_refused(void **state) {
    struct safetensors table;
    struct report report = {""};
    size_t n, header_end;
    char *file = fixture_read(SOURCE_ROOT "/tests/golden/dense-a-draft/model.safetensors", &n);
    char *cut;

    (void)state;
    header_end = 8 + ((size_t)(unsigned char)file[0] | (size_t)(unsigned char)file[1] << 8);
    for (size_t to = 0; to < n; to += to < header_end + 16 ? 1 : 30011) {
        cut = malloc(to + 1);
        memcpy(cut, file, to);
        assert_int_equal(-EINVAL, safetensors_parse("x", (uint8_t *)cut, to, &table, &report));
        assert_report(&report, "x: ", "truncated", NULL);
        free(cut);
    }
    free(file);
}

/* ---- the index ---------------------------------------------------------------------------------------------------- */

static void index_maps_tensors_to_numbered_files(void **state) {
    static const char text[] =
        "{\"metadata\":{\"total_size\":1.5,\"x\":[{}]},\"weight_map\":{\"b\":\"m-2.safetensors\","
        "\"c\":\"m-1.safetensors\",\"a\":\"m-2.safetensors\"}}";
    struct shard_index index;
    struct report report = {""};

    (void)state;
    if (shard_index_parse("i.json", text, strlen(text), &index, &report) != 0)
        fail_msg("%s", report.line);
    assert_int_equal(3, index.n_entries);
    assert_int_equal(2, index.n_files);
    assert_string_equal("m-1.safetensors", index.files[0]);
    assert_string_equal("m-2.safetensors", index.files[shard_index_find(&index, "a")->file_idx]);
    assert_string_equal("m-1.safetensors", index.files[shard_index_find(&index, "c")->file_idx]);
    assert_null(shard_index_find(&index, "d"));
    shard_index_deinit(&index);
}

static void bad_indexes_are_refused(void **state) {
    static const struct {
        const char *text, *part, *other;
    } cases[] = {
        {"", "byte 0", ""},
        {"[]", "object", ""},
        {"{}", "weight_map is missing", ""},
        {"{\"weight_map\":{}}", "weight_map is missing or empty", ""},
        {"{\"weight_map\":[]}", "weight_map must be an object", ""},
        {"{\"weight_map\":{\"a\":1}}", "a: byte", "must name a file"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\",\"a\":\"x.safetensors\"}}", "a: duplicate key", ""},
        {"{\"weight_map\":{\"a\":\"x.safetensors\"},\"weight_map\":{\"b\":\"x.safetensors\"}}", "byte", ""},
        {"{\"weight_map\":{\"a\":\"../x.safetensors\"}}", "a: file name \"../x.safetensors\"", "refused"},
        {"{\"weight_map\":{\"a\":\"/etc/x.safetensors\"}}", "a: file name \"/etc/x.safetensors\"", "refused"},
        {"{\"weight_map\":{\"a\":\"sub/x.safetensors\"}}", "a: file name \"sub/x.safetensors\"", "refused"},
        {"{\"weight_map\":{\"a\":\"..safetensors\"}}", "a: file name", "refused"},
        {"{\"weight_map\":{\"a\":\".safetensors\"}}", "a: file name", "refused"},
        {"{\"weight_map\":{\"a\":\"\"}}", "a: file name", "refused"},
        {"{\"weight_map\":{\"a\":\"x.bin\"}}", "a: file name \"x.bin\"", "refused"},
        {"{\"weight_map\":{\"a\":\"x\\u0000.safetensors\"}}", "a: file name", "refused"},
        {"{\"weight_map\":{\"a\":\"x\\u000a.safetensors\"}}", "a: file name", "refused"},
        {"{\"weight_map\":{\"\\u0000\":\"x.safetensors\"}}", "byte", "name"},
        {"{\"weight_map\":{\"a\":\"x.safetensors\"}} 1", "byte", ""},
        {"{\"weight_map\":{\"a\":\"x.safetensors\"", "byte", ""},
    };

    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
        struct shard_index index = {.n_files = 77};
        struct report report = {""};

        if (shard_index_parse("d/i.json", cases[i].text, strlen(cases[i].text), &index, &report) != -EINVAL)
            fail_msg("not refused: %s", cases[i].text);
        assert_report(&report, "d/i.json: ", cases[i].part, cases[i].other, NULL);
        assert_int_equal(77, index.n_files);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_table_is_sorted_and_points_into_the_file),
        cmocka_unit_test(lengths_that_lie_are_refused),
        cmocka_unit_test(headers_that_are_no_tables_are_refused),
        cmocka_unit_test(names_and_metadata_are_bounded),
        cmocka_unit_test(data_that_overlaps_misses_or_exceeds_is_refused),
        cmocka_unit_test(every_truncation_of_a_real_file_is_refused),
        cmocka_unit_test(index_maps_tensors_to_numbered_files),
        cmocka_unit_test(bad_indexes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
