/* spillway.conf and --set: refused with one line that names a place, or values within the bounds of the table, which
 * print and read back the same. */
#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "config.h"
#include "config_keys.h"
#include "config_parse.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n);

static void built_in(struct config *ret_config) {
    struct report report;

    if (config_load(&(struct config_source){0}, ret_config, &report) != 0)
        abort();
}

static void check_bounds(const struct config *c) {
    assert(c->sched.max_seqs >= 1 && c->sched.max_seqs <= 1024);
    assert(c->sched.prefill_chunk >= 64 && c->sched.prefill_chunk % 64 == 0);
    assert(c->server.socket_mode >= 0600 && c->server.socket_mode <= 0777);
    assert(strlen(c->server.socket) >= 1 && strlen(c->server.socket) <= 107);
    assert(c->kv.device_bytes >= 1 << 20 && c->kv.device_bytes <= UINT64_C(1) << 46);
    assert(c->server.drain_timeout_ms >= 0 && c->server.drain_timeout_ms <= 86400000);
    assert(c->model.backend >= CONFIG_BACKEND_AUTO && c->model.backend <= CONFIG_BACKEND_CUDA);
}

static void check_print(const struct config *config) {
    struct config_change changes[CONFIG_KEYS_MAX];
    struct report report = {""};
    struct config again;
    struct text out;

    text_init(&out, 1 << 20);
    config_print(config, &out);
    assert(out.error == 0);
    built_in(&again);
    if (config_take_text(&again, "again", out.bytes, out.n, &report) != 0)
        abort();
    assert(config_diff(config, &again, changes) == 0);
    config_free(&again);
    text_deinit(&out);
}

static void check_refusal(const struct report *report, const char *place) {
    assert(strstr(report->line, place) && !strchr(report->line, '\n'));
}

static int take_nothing(void *user, const struct config_pair *pair, struct report *report) {
    (void)user, (void)report;
    assert(strlen(pair->section) >= 1 && strlen(pair->section) <= CONFIG_NAME_MAX);
    assert(strlen(pair->key) >= 1 && strlen(pair->key) <= CONFIG_NAME_MAX);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n) {
    struct report report = {""};
    struct config config;
    char *set;

    built_in(&config);
    if (config_take_text(&config, "file.conf", (const char *)data, n, &report) == 0) {
        check_bounds(&config);
        check_print(&config);
    } else {
        check_refusal(&report, "file.conf:");
    }
    config_free(&config);

    set = strndup((const char *)data, n);
    if (!set)
        abort();
    if (config_parse_set(set, take_nothing, NULL, &report) != 0)
        check_refusal(&report, "--set ");
    free(set);
    return 0;
}
