#include "fixture.h"
#include "weights.h"
#include "checkpoint.h"
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct shard_of whole = {0, 1};

static const char *reference(const char *folder, const char *file) {
    static char path[2][512];
    static int next;
    char *p = path[next++ % 2];

    snprintf(p, sizeof path[0], "%s/%s%s%s", SOURCE_ROOT, folder, *file ? "/" : "", file);
    return p;
}

static const char *const targets[] = {"tests/golden/dense-a", "tests/golden/moe-a", "tests/golden/fp8-a",
                                      "share/tiny/target"};
static const char *const drafts[] = {"tests/golden/dense-a-draft", "tests/golden/dense-a-draft-sliding",
                                     "tests/golden/dense-a-draft-unsorted-bias", "share/tiny/draft"};

static void read_target(const char *folder, struct qwen_config *config) {
    struct report report = {""};

    if (qwen_config_read(reference(folder, "config.json"), config, &report) != 0)
        fail_msg("%s", report.line);
}

static void read_draft(const char *folder, struct draft_config *config) {
    struct report report = {""};

    if (draft_config_read(reference(folder, "config.json"), DRAFT_CAUSAL_AUTO, config, &report) != 0)
        fail_msg("%s", report.line);
}

static int load_target(const char *folder, const struct qwen_config *config, struct shard_of shard,
                       struct report *report) {
    struct checkpoint *checkpoint = NULL;
    struct qwen_weights weights = {0};
    int r = checkpoint_open(folder, &checkpoint, report);

    if (r != 0)
        return r;
    r = qwen_weights_load(checkpoint, config, shard, &weights, report);
    if (r == 0)
        qwen_weights_deinit(&weights);
    checkpoint_close(checkpoint);
    return r;
}

static int load_draft(const char *folder, const struct draft_config *config, struct report *report) {
    struct checkpoint *checkpoint = NULL;
    struct draft_weights weights = {0};
    int r = checkpoint_open(folder, &checkpoint, report);

    if (r != 0)
        return r;
    r = draft_weights_load(checkpoint, config, whole, &weights, report);
    if (r == 0)
        draft_weights_deinit(&weights);
    checkpoint_close(checkpoint);
    return r;
}

static void reference_checkpoints_load(void **state) {
    (void)state;
    for (size_t i = 0; i < ARRAY_LEN(targets); i++) {
        struct report report = {""};
        struct qwen_config config;

        read_target(targets[i], &config);
        if (load_target(reference(targets[i], ""), &config, whole, &report) != 0)
            fail_msg("%s", report.line);
    }
    for (size_t i = 0; i < ARRAY_LEN(drafts); i++) {
        struct report report = {""};
        struct draft_config config;

        read_draft(drafts[i], &config);
        if (load_draft(reference(drafts[i], ""), &config, &report) != 0)
            fail_msg("%s", report.line);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(reference_checkpoints_load),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
