/* Configuration: precedence, origins, refusals with file and line, forms of values, and that conf/spillway.conf is what
 * the table of keys says. With --write it prints that file. */
#include <errno.h>
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

#include "config.h"
#include "config_keys.h"
#include "config_parse.h"
#include "log.h"

static char folder[] = "/tmp/test_conf.XXXXXX";

static const char *path_of(const char *name) {
    static char path[256];

    snprintf(path, sizeof path, "%s/%s", folder, name);
    return path;
}

static void write_file(const char *name, const char *text) {
    FILE *f = fopen(path_of(name), "w");

    assert_non_null(f);
    assert_true(fputs(text, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void remove_file(const char *name) {
    assert_int_equal(unlink(path_of(name)), 0);
}

/* Loads a file with this text and the --set if there is one. */
static int load(const char *text, const char *set, struct config *config, struct report *report) {
    struct config_source source = {.sets = &set, .n_sets = set ? 1 : 0};
    char path[256];
    int r;

    if (text) {
        write_file("a.conf", text);
        snprintf(path, sizeof path, "%s", path_of("a.conf"));
        source.file = path;
    }
    r = config_load(&source, config, report);
    if (text)
        remove_file("a.conf");
    return r;
}

static void refuses(const char *text, const char *words) {
    struct report report = {""};
    struct config config;
    int r;

    memset(&config, 0x5a, sizeof config);
    r = load(text, NULL, &config, &report);
    if (r != -EINVAL)
        fail_msg("accepted: %s", text);
    if (!strstr(report.line, words))
        fail_msg("'%s' does not say '%s'", report.line, words);
    assert_int_equal(*(unsigned char *)&config, 0x5a); /* nothing is returned with a refusal */
}

static void refuses_set(const char *set, const char *words) {
    struct report report = {""};
    struct config config;

    if (load(NULL, set, &config, &report) != -EINVAL)
        fail_msg("accepted: %s", set);
    if (!strstr(report.line, words))
        fail_msg("'%s' does not say '%s'", report.line, words);
}

static struct config accepts(const char *text, const char *set) {
    struct report report = {""};
    struct config config;

    if (load(text, set, &config, &report) != 0)
        fail_msg("%s", report.line);
    return config;
}

static const char *origin(const struct config *config, const char *section, const char *key) {
    return config->origin[config_key_find(section, key) - config_keys];
}

static void every_key_has_a_built_in_value(void **state) {
    struct config config = accepts(NULL, NULL);

    (void)state;
    for (int i = 0; i < config_n_keys; i++)
        assert_string_equal(config.origin[i], "built-in");
    assert_string_equal(config.model.path, SHARE "/tiny/target");
    assert_string_equal(config.draft.path, SHARE "/tiny/draft");
    assert_int_equal(config.kv.device_bytes, UINT64_C(1) << 30);
    assert_int_equal(config.limits.frame_bytes, 16 << 20);
    assert_int_equal(config.server.drain_timeout_ms, 30000);
    assert_int_equal(config.server.socket_mode, 0660);
    assert_int_equal(config.log.level, LOG_INFO);
    assert_false(config.kv.shared_prefixes);
    config_free(&config);
}

static void later_sources_win_and_each_value_knows_its_own(void **state) {
    struct config config;
    char words[320];

    (void)state;
    assert_int_equal(mkdir(path_of("conf.d"), 0700), 0);
    write_file("conf.d/20-b.conf", "[sched]\nmax_seqs = 3\nqueue_max = 3\n");
    write_file("conf.d/10-a.conf", "[sched]\nmax_seqs = 2\nqueue_max = 2\nprefill_chunk = 128\n");
    write_file("conf.d/30-c.conf.off", "[sched]\nmax_seqs = 9\n");
    config = accepts("[sched]\nmax_seqs = 1\nprefill_chunk = 64\n[log]\nlevel = debug\n", "sched.queue_max=4");
    assert_int_equal(config.sched.max_seqs, 3);
    assert_int_equal(config.sched.prefill_chunk, 128);
    assert_int_equal(config.sched.queue_max, 4);
    assert_int_equal(config.log.level, LOG_DEBUG);
    snprintf(words, sizeof words, "%s:2", path_of("conf.d/20-b.conf"));
    assert_string_equal(origin(&config, "sched", "max_seqs"), words);
    snprintf(words, sizeof words, "%s:5", path_of("a.conf"));
    assert_string_equal(origin(&config, "log", "level"), words);
    assert_string_equal(origin(&config, "sched", "queue_max"), "--set");
    assert_string_equal(origin(&config, "sched", "max_batch_tokens"), "built-in");
    config_free(&config);

    write_file("conf.d/20-b.conf", "[sched]\nmax_sequences = 3\n");
    refuses("[sched]\n", "conf.d/20-b.conf:2: unknown key sched.max_sequences");
    remove_file("conf.d/10-a.conf");
    remove_file("conf.d/20-b.conf");
    remove_file("conf.d/30-c.conf.off");
    assert_int_equal(rmdir(path_of("conf.d")), 0);
}

static void unknown_names_get_a_suggestion(void **state) {
    (void)state;
    refuses("[sched]\nmax_seq = 1\n", "a.conf:2: unknown key sched.max_seq: do you mean sched.max_seqs?");
    refuses("[kv]\ndevice_byte = 1\n", "do you mean kv.device_bytes?");
    refuses("[server]\nframe_bytes = 1MiB\n", "do you mean limits.frame_bytes?");
    refuses("[serve]\nsocket = x\n", "a.conf:1: unknown section [serve]: do you mean [server]?");
    refuses("[sched]\nmax_seqs = 1\n\n[limit]\n", "a.conf:4: unknown section [limit]: do you mean [limits]?");
    refuses("[kv]\nzzzzzz = 1\n", "unknown key kv.zzzzzz; --print-config lists all keys");
    refuses("[zzzzzzzzz]\nx = 1\n", "unknown section [zzzzzzzzz]");
    refuses_set("shed.max_seqs=1", "--set: unknown section [shed]: do you mean [sched]?");
}

static void bad_values_are_refused_with_what_is_allowed(void **state) {
    (void)state;
    refuses("[sched]\n\nmax_seqs = 0\n", "a.conf:3: sched.max_seqs = '0': expected a whole number from 1 to 1024");
    refuses("[sched]\nmax_seqs = 1025\n", "from 1 to 1024");
    refuses("[sched]\nmax_seqs = -1\n", "from 1 to 1024");
    refuses("[sched]\nmax_seqs = 1.5\n", "from 1 to 1024");
    refuses("[sched]\nmax_seqs = 99999999999999999999\n", "from 1 to 1024");
    refuses("[sched]\nmax_seqs =\n", "from 1 to 1024");
    refuses("[sched]\nprefill_chunk = 100\n", "a multiple of 64");
    refuses("[kv]\ndevice_bytes = 1GB\n", "expected a size from 1MiB to 64TiB, with KiB, MiB, GiB, TiB or none");
    refuses("[kv]\ndevice_bytes = 99999999TiB\n", "expected a size");
    refuses("[server]\ndrain_timeout = 30\n", "expected a duration from 0 to 24h, with ms, s, min or h");
    refuses("[server]\nsocket_mode = 0688\n", "expected an octal number from 0600 to 0777");
    refuses("[server]\nsocket =\n", "1 to 107 bytes");
    refuses("[model]\nbackend = gpu\n", "expected auto, cpu or cuda");
    refuses("[kv]\nshared_prefixes = yes\n", "expected true or false");
    refuses_set("sched.max_seqs=x", "--set: sched.max_seqs = 'x'");
    refuses_set("server.socket=/a\nmax_seqs = 1", "--set server.socket: byte 3 of the value is 0x0a");
    refuses_set("server.socket=\x7f", "--set server.socket: byte 1 of the value is 0x7f");
}

static void values_have_forms_with_units(void **state) {
    struct config config = accepts("[kv]\ndevice_bytes = 3 GiB\nshared_prefixes = true\n"
                                   "[server]\ndrain_timeout = 2min\nslow_timeout = 1500ms\noutput_low = 0\n"
                                   "socket_mode = 600\nsocket = \"/tmp/a #1\\\"\\\\\"  # a comment\n"
                                   "[limits]\nframe_bytes = 65536 # bytes\n",
                                   NULL);

    (void)state;
    assert_int_equal(config.kv.device_bytes, UINT64_C(3) << 30);
    assert_true(config.kv.shared_prefixes);
    assert_int_equal(config.server.drain_timeout_ms, 120000);
    assert_int_equal(config.server.slow_timeout_ms, 1500);
    assert_int_equal(config.server.socket_mode, 0600);
    assert_string_equal(config.server.socket, "/tmp/a #1\"\\");
    assert_int_equal(config.limits.frame_bytes, 65536);
    config_free(&config);
}

static void a_key_set_twice_in_one_file_is_refused(void **state) {
    (void)state;
    refuses("[log]\nlevel = info\n[kv]\n[log]\nlevel = info\n",
            "a.conf:5: log.level is set twice; line 2 has it already");
}

static void lines_that_are_nothing_are_refused(void **state) {
    (void)state;
    refuses("level = info\n", "a.conf:1: level stands before any [section]");
    refuses("[log\nlevel = info\n", "a.conf:1: not a section");
    refuses("[log] x\n", "a.conf:1: not a section");
    refuses("[]\n", "not a section");
    refuses("[log]\nlevel\n", "a.conf:2: neither [section], nor key = value, nor a comment: 'level'");
    refuses("[log]\nLevel = info\n", "not a key: 'Level'");
    refuses("[log]\n = info\n", "not a key: ''");
    refuses("[log]\nlevel = \"info\n", "must end with a quote");
    refuses("[log]\nlevel = \"in\\fo\"\n", "must end with a quote");
    refuses("[log]\nlevel = \"info\" x\n", "must end with a quote");
    refuses("[log]\n\x01\n", "a.conf:2: byte 1 is 0x01: not a text file?");
    refuses_set("level=info", "expected section.key=value");
    refuses_set("level", "expected section.key=value");
    refuses_set("log.=info", "a name is made of");
    refuses_set("=log.level", "expected section.key=value");
}

static void comments_blanks_and_carriage_returns_are_skipped(void **state) {
    struct config config = accepts("# a\r\n; b\n\n  \t\n [ log ]  # c\r\n\tlevel\t=\twarn \t # d\r\n", NULL);

    (void)state;
    assert_int_equal(config.log.level, LOG_WARN);
    config_free(&config);
}

static void reading_is_bounded(void **state) {
    struct config_source source = {.file = path_of("no-such.conf")};
    char *text = malloc(CONFIG_TEXT_MAX + 2);
    struct report report;
    struct config config;

    (void)state;
    assert_non_null(text);
    assert_int_equal(config_load(&source, &config, &report), -ENOENT);
    assert_non_null(strstr(report.line, "no-such.conf"));
    source.file = folder;
    assert_int_equal(config_load(&source, &config, &report), -EINVAL);
    assert_non_null(strstr(report.line, "not a file"));

    memset(text, '\n', CONFIG_TEXT_MAX + 1);
    text[CONFIG_TEXT_MAX + 1] = '\0';
    refuses(text, "1048577 bytes, at most 1048576 are allowed");
    text[CONFIG_TEXT_MAX] = '\0';
    config = accepts(text, NULL);
    config_free(&config);
    memset(text, 'x', CONFIG_LINE_MAX + 1);
    text[CONFIG_LINE_MAX + 1] = '\0';
    refuses(text, "a.conf:1: the line has 4097 bytes, at most 4096 are allowed");
    free(text);
}

static void a_disk_tier_has_a_folder_and_room_for_32_segments(void **state) {
    struct config config = accepts("[kv]\nhost_bytes = 1GiB\ndisk_path =\n", NULL);

    (void)state;
    assert_false(config_has_disk(&config));
    config_free(&config);
    refuses("[kv]\ndisk_path = /x\n", "a.conf:2: kv.disk_path = '/x' and no kv.disk_bytes");
    refuses("[kv]\ndisk_bytes = 1GiB\n", "a.conf:2: kv.disk_bytes = 1073741824 and no kv.disk_path");
    refuses("[kv]\ndisk_path = /x\ndisk_bytes = 268435455\nhost_bytes = 1GiB\n",
            "a.conf:3: kv.disk_bytes = 268435455 is too little: 32 segments of 8388608 bytes each are 268435456 bytes");
    refuses("[kv]\ndisk_path = /x\ndisk_bytes = 1GiB\n",
            "a.conf:3: kv.disk_bytes = 1073741824 and kv.host_bytes = 0 (built-in)");
    refuses("[kv]\ndisk_timeout = 99ms\n", "a.conf:2: kv.disk_timeout");
    config = accepts("[kv]\ndisk_path = /x\ndisk_bytes = 256MiB\nhost_bytes = 1MiB\ndisk_write_bytes_per_day = 1TiB\n",
                     NULL);
    assert_true(config_has_disk(&config));
    assert_int_equal(config.kv.disk_write_bytes_per_day, UINT64_C(1) << 40);
    assert_int_equal(config.kv.disk_timeout_ms, 10000);
    config_free(&config);
    config = accepts("[kv]\ndisk_path = /x\ndisk_bytes = 256MiB\n", "kv.disk_bytes=0"); /* switched off */
    assert_false(config_has_disk(&config));
    config_free(&config);
}

static void keys_that_contradict_each_other_are_refused(void **state) {
    (void)state;
    refuses("[sched]\nprefill_chunk = 1024\n", "a.conf:2: sched.prefill_chunk = 1024 does not fit");
    refuses("[server]\noutput_low = 1MiB\n", "a.conf:2: server.output_low");
}

static void the_built_in_drafter_is_for_the_built_in_model(void **state) {
    struct config config = accepts("[model]\npath = /models/x\n", NULL);

    (void)state;
    assert_string_equal(config.draft.path, "");
    config_free(&config);
    config = accepts("[model]\npath = /models/x\n", "draft.path=/models/y");
    assert_string_equal(config.draft.path, "/models/y");
    config_free(&config);
}

static void what_is_printed_reads_back_the_same(void **state) {
    struct config config = accepts("[server]\nsocket = \"/tmp/a #b\"\ndrain_timeout = 90s\noutput_low = 1025\n"
                                   "[kv]\nshared_prefixes = true\ndtype = e4m3\n[draft]\npath = \n",
                                   "sched.max_seqs=7");
    struct config_change changes[CONFIG_KEYS_MAX];
    struct config again;
    struct text out;

    (void)state;
    text_init(&out, 1 << 16);
    config_print(&config, &out);
    text_add(&out, "", 1);
    assert_int_equal(out.error, 0);
    assert_non_null(strstr(out.bytes, "max_seqs = 7                            # --set\n"));
    again = accepts(out.bytes, NULL);
    assert_int_equal(config_diff(&config, &again, changes), 0);
    config_free(&again);
    config_free(&config);
    text_deinit(&out);
}

static void a_reload_takes_over_what_may_change(void **state) {
    struct config running = accepts(NULL, NULL), fresh = accepts("[log]\nlevel = debug\n[server]\ndrain_timeout = 1s\n"
                                                                 "[sched]\nmax_seqs = 5\n",
                                                                 NULL);
    struct config_change changes[CONFIG_KEYS_MAX];

    (void)state;
    assert_int_equal(config_diff(&running, &fresh, changes), 3);
    assert_string_equal(changes[0].key, "drain_timeout");
    assert_true(changes[0].at_run_time);
    assert_string_equal(changes[1].key, "max_seqs");
    assert_false(changes[1].at_run_time);
    assert_string_equal(changes[2].section, "log");
    config_adopt(&running, &fresh);
    assert_int_equal(running.log.level, LOG_DEBUG);
    assert_int_equal(running.server.drain_timeout_ms, 1000);
    assert_int_equal(running.sched.max_seqs, 32);
    assert_non_null(strstr(origin(&running, "log", "level"), "a.conf:2"));
    assert_string_equal(origin(&running, "sched", "max_seqs"), "built-in");
    assert_int_equal(config_diff(&running, &fresh, changes), 1);
    config_free(&running);
    config_free(&fresh);
}

/* The file of the repository: its bytes with a zero behind them. */
static char *read_template(void) {
    FILE *f = fopen(SOURCE_ROOT "/conf/spillway.conf", "r");
    char *bytes = calloc(1, 1 << 16);

    assert_non_null(f);
    assert_non_null(bytes);
    assert_true(fread(bytes, 1, (1 << 16) - 1, f) > 0);
    fclose(f);
    return bytes;
}

static void the_commented_file_is_what_the_table_says(void **state) {
    char *bytes = read_template();
    struct text out;

    (void)state;
    text_init(&out, 1 << 16);
    config_print_template(&out);
    if (out.n != strlen(bytes) || memcmp(out.bytes, bytes, out.n) != 0)
        fail_msg("conf/spillway.conf differs from the table of keys; build/tests/unit/test_conf --write prints it");
    text_deinit(&out);
    free(bytes);
}

/* With every "#key = value" made a key, nothing but the folder of the tiny pair differs from the built-in values. */
static void the_commented_values_are_the_built_in_ones(void **state) {
    struct config builtin = accepts(NULL, NULL), config;
    struct config_change changes[CONFIG_KEYS_MAX];
    char *bytes = read_template();
    int n_keys = 0;

    (void)state;
    for (char *line = bytes; line; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (line[0] == '#' && line[1] >= 'a' && line[1] <= 'z')
            line[0] = ' ';
        n_keys += line[0] != '#' && line[0] != '[' && line[0] != '\n' && line[0] != '\0';
    }
    assert_int_equal(n_keys, config_n_keys);
    config = accepts(bytes, NULL);
    assert_int_equal(config_diff(&builtin, &config, changes), 2);
    assert_string_equal(changes[0].key, "path");
    assert_string_equal(config.model.path, "/usr/share/spillway/tiny/target");
    assert_string_equal(config.draft.path, "/usr/share/spillway/tiny/draft");
    config_free(&builtin);
    config_free(&config);
    free(bytes);
}

static void log_levels_are_named_alike_in_log_and_table(void **state) {
    const struct config_key *key = config_key_find("log", "level");

    (void)state;
    for (int i = 0; key->words[i]; i++)
        assert_int_equal(log_level_find(key->words[i]), i);
}

static int make_folder(void **state) {
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state) {
    (void)state;
    return rmdir(folder);
}

static int write_template(void) {
    struct text out;

    text_init(&out, 1 << 20);
    config_print_template(&out);
    if (out.error != 0 || fwrite(out.bytes, 1, out.n, stdout) != out.n)
        return 1;
    text_deinit(&out);
    return 0;
}

int main(int argc, char **argv) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_key_has_a_built_in_value),
        cmocka_unit_test(later_sources_win_and_each_value_knows_its_own),
        cmocka_unit_test(unknown_names_get_a_suggestion),
        cmocka_unit_test(bad_values_are_refused_with_what_is_allowed),
        cmocka_unit_test(values_have_forms_with_units),
        cmocka_unit_test(a_key_set_twice_in_one_file_is_refused),
        cmocka_unit_test(lines_that_are_nothing_are_refused),
        cmocka_unit_test(comments_blanks_and_carriage_returns_are_skipped),
        cmocka_unit_test(reading_is_bounded),
        cmocka_unit_test(a_disk_tier_has_a_folder_and_room_for_32_segments),
        cmocka_unit_test(keys_that_contradict_each_other_are_refused),
        cmocka_unit_test(the_built_in_drafter_is_for_the_built_in_model),
        cmocka_unit_test(what_is_printed_reads_back_the_same),
        cmocka_unit_test(a_reload_takes_over_what_may_change),
        cmocka_unit_test(the_commented_file_is_what_the_table_says),
        cmocka_unit_test(the_commented_values_are_the_built_in_ones),
        cmocka_unit_test(log_levels_are_named_alike_in_log_and_table),
    };

    if (argc == 2 && strcmp(argv[1], "--write") == 0)
        return write_template();
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
