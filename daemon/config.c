#include "config.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "config_keys.h"
#include "config_parse.h"

enum { CONF_D_FILES_MAX = 256 };
static const char built_in[] = "built-in"; /* an origin */

/* One file or --set on its way into the configuration. */
struct taking {
    struct config *config;
    int line_of[CONFIG_KEYS_MAX]; /* where this file set the key; 0: not yet */
};

static int set_origin(struct config *config, const struct config_key *key, const char *file, int line) {
    char **origin = &config->origin[key - config_keys];
    char *copy = NULL;

    if (line == 0)
        copy = strdup(file);
    else if (asprintf(&copy, "%s:%d", file, line) < 0)
        copy = NULL;
    if (!copy)
        return -ENOMEM;
    free(*origin);
    *origin = copy;
    return 0;
}

const char *config_origin(const struct config *config, const char *section, const char *name) {
    return config->origin[config_key_find(section, name) - config_keys];
}

/* ---- one value ---------------------------------------------------------------------------------------------------- */

/* "FILE:LINE: " or "--set: " */
static const char *place(const struct config_pair *pair, char *ret_words, size_t n) {
    if (pair->line > 0)
        snprintf(ret_words, n, "%s:%d", report_path(pair->file), pair->line);
    else
        snprintf(ret_words, n, "%s", pair->file);
    return ret_words;
}

static int refuse_section(const struct config_pair *pair, struct report *report) {
    const char *near = config_section_near(pair->section);
    char where[256];

    place(pair, where, sizeof where);
    if (near)
        return report_error(report, -EINVAL, "%s: unknown section [%s]: do you mean [%s]?", where, pair->section, near);
    return report_error(report, -EINVAL, "%s: unknown section [%s]", where, pair->section);
}

static int refuse_key(const struct config_pair *pair, struct report *report) {
    const struct config_key *near = config_key_near(pair->section, pair->key);
    char where[256];

    place(pair, where, sizeof where);
    if (near)
        return report_error(report, -EINVAL, "%s: unknown key %s.%s: do you mean %s.%s?", where, pair->section,
                            pair->key, near->section, near->name);
    return report_error(report, -EINVAL, "%s: unknown key %s.%s; --print-config lists all keys", where, pair->section,
                        pair->key);
}

static int take_pair(void *user, const struct config_pair *pair, struct report *report) {
    const struct config_key *key = NULL;
    struct taking *taking = user;
    char where[256], allowed[160];
    int *line_of, r;

    if (!config_section_is_known(pair->section))
        return refuse_section(pair, report);
    if (!pair->key) /* its keys follow, or none do */
        return 0;
    key = config_key_find(pair->section, pair->key);
    if (!key)
        return refuse_key(pair, report);
    place(pair, where, sizeof where);
    line_of = &taking->line_of[key - config_keys];
    if (*line_of > 0)
        return report_error(report, -EINVAL, "%s: %s.%s is set twice; line %d has it already", where, key->section,
                            key->name, *line_of);
    *line_of = pair->line;
    r = config_value_read(key, pair->value, taking->config);
    if (r == -EINVAL) {
        config_value_allowed(key, allowed, sizeof allowed);
        return report_error(report, r, "%s: %s.%s = '%.80s': expected %s", where, key->section, key->name, pair->value,
                            allowed);
    }
    if (r == 0)
        r = set_origin(taking->config, key, pair->file, pair->line);
    return r == 0 ? 0 : report_error(report, r, "%s: out of memory", where);
}

/* ---- files -------------------------------------------------------------------------------------------------------- */

/* The whole of a file of at most CONFIG_TEXT_MAX bytes. */
static int read_file(const char *path, char **ret_bytes, size_t *ret_n, struct report *report) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK); /* a FIFO must not stop the start */
    size_t n = 0, room;
    struct stat st;
    char *bytes;
    int r = 0;

    if (fd < 0)
        return report_error(report, -errno, "%s: %s", report_path(path), strerror(errno));
    if (fstat(fd, &st) != 0)
        r = report_error(report, -errno, "%s: %s", report_path(path), strerror(errno));
    else if (!S_ISREG(st.st_mode))
        r = report_error(report, -EINVAL, "%s: not a file", report_path(path));
    else if (st.st_size > CONFIG_TEXT_MAX)
        r = report_error(report, -EINVAL, "%s: %lld bytes, at most %d are allowed", report_path(path),
                         (long long)st.st_size, CONFIG_TEXT_MAX);
    if (r != 0) {
        close(fd);
        return r;
    }
    room = (size_t)st.st_size + 1; /* one more, so that a file that grows is seen */
    bytes = malloc(room);
    if (!bytes)
        r = report_error(report, -ENOMEM, "%s: out of memory", report_path(path));
    while (r == 0 && n < room) {
        ssize_t got = read(fd, bytes + n, room - n);

        if (got == 0)
            break;
        if (got > 0)
            n += (size_t)got;
        else if (errno != EINTR)
            r = report_error(report, -errno, "%s: %s", report_path(path), strerror(errno));
    }
    close(fd);
    if (r == 0 && n == room)
        r = report_error(report, -EINVAL, "%s: it grew while it was read; start again", report_path(path));
    if (r != 0) {
        free(bytes);
        return r;
    }
    *ret_bytes = bytes;
    *ret_n = n;
    return 0;
}

int config_take_text(struct config *config, const char *file, const char *bytes, size_t n, struct report *report) {
    struct taking taking = {.config = config};

    return config_parse(file, bytes, n, take_pair, &taking, report);
}

static int take_file(struct config *config, const char *path, struct report *report) {
    char *bytes = NULL;
    size_t n = 0;
    int r = read_file(path, &bytes, &n, report);

    if (r != 0)
        return r;
    r = config_take_text(config, path, bytes, n, report);
    free(bytes);
    return r;
}

static int is_conf(const struct dirent *entry) {
    size_t n = strlen(entry->d_name);

    return entry->d_name[0] != '.' && n > 5 && strcmp(entry->d_name + n - 5, ".conf") == 0;
}

/* By bytes: alphasort would ask the locale. */
static int by_name(const struct dirent **a, const struct dirent **b) {
    return strcmp((*a)->d_name, (*b)->d_name);
}

/* conf.d beside the file. That there is none is fine. */
static int take_folder(struct config *config, const char *file, struct report *report) {
    const char *slash = strrchr(file, '/');
    struct dirent **entries = NULL;
    char folder[4096], path[4096 + 256 + 2];
    int n, r = 0;

    n = snprintf(folder, sizeof folder, "%.*sconf.d", slash ? (int)(slash - file) + 1 : 0, file);
    if (n >= (int)sizeof folder)
        return report_error(report, -ENAMETOOLONG, "%s: the path is too long", report_path(file));
    n = scandir(folder, &entries, is_conf, by_name);
    if (n < 0)
        return errno == ENOENT ? 0 : report_error(report, -errno, "%s: %s", report_path(folder), strerror(errno));
    if (n > CONF_D_FILES_MAX)
        r = report_error(report, -EINVAL, "%s: %d files, at most %d are allowed", report_path(folder), n,
                         CONF_D_FILES_MAX);
    for (int i = 0; i < n; i++) {
        if (r == 0) {
            snprintf(path, sizeof path, "%s/%s", folder, entries[i]->d_name);
            r = take_file(config, path, report);
        }
        free(entries[i]);
    }
    free(entries);
    return r;
}

/* ---- the whole ---------------------------------------------------------------------------------------------------- */

static int take_builtin(struct config *config, struct report *report) {
    for (int i = 0; i < config_n_keys; i++) {
        const struct config_key *key = &config_keys[i];
        int r = config_value_read(key, key->fallback, config);

        if (r == 0)
            r = set_origin(config, key, built_in, 0);
        if (r != 0)
            return report_error(report, r, "%s.%s: its built-in value '%s' cannot be taken: %s", key->section,
                                key->name, key->fallback, strerror(-r));
    }
    return 0;
}

/* The built-in drafter fits the built-in model alone. */
static int drop_draft(struct config *config, const struct config *builtin, struct report *report) {
    const struct config_key *model = config_key_find("model", "path"), *draft = config_key_find("draft", "path");
    int r;

    if (config_value_equal(model, config, builtin) || strcmp(config->origin[draft - config_keys], built_in) != 0)
        return 0;
    r = config_value_read(draft, "", config);
    if (r == 0)
        r = set_origin(config, draft, "built-in for a model.path of yours", 0);
    return r == 0 ? 0 : report_error(report, r, "draft.path: out of memory");
}

/* A disk has at least so many segments, of at least so many bytes. */
enum { DISK_SEGMENTS_MIN = 32, DISK_SEGMENT_BYTES_MIN = 8 << 20 };

/* One of disk_path and disk_bytes without the other is a slip, unless the tier was switched off. */
static int check_disk(const struct config *config, struct report *report) {
    const char *bytes_origin = config_origin(config, "kv", "disk_bytes"),
               *path_origin = config_origin(config, "kv", "disk_path");
    uint64_t least = (uint64_t)DISK_SEGMENTS_MIN * DISK_SEGMENT_BYTES_MIN;

    if (config->kv.disk_bytes > 0 && !config->kv.disk_path[0])
        return report_error(report, -EINVAL,
                            "%s: kv.disk_bytes = %llu and no kv.disk_path: name the folder, or set kv.disk_bytes = 0",
                            report_path(bytes_origin), (unsigned long long)config->kv.disk_bytes);
    if (config->kv.disk_path[0] && config->kv.disk_bytes == 0 && strcmp(bytes_origin, built_in) == 0)
        return report_error(
            report, -EINVAL,
            "%s: kv.disk_path = '%.80s' and no kv.disk_bytes: say how much may be filled, or 0 for none",
            report_path(path_origin), config->kv.disk_path);
    if (config->kv.disk_bytes > 0 && config->kv.host_bytes == 0)
        return report_error(report, -EINVAL,
                            "%s: kv.disk_bytes = %llu and kv.host_bytes = 0 (%s): what lies on disk comes and goes "
                            "through host memory; set kv.host_bytes, or kv.disk_bytes = 0",
                            report_path(bytes_origin), (unsigned long long)config->kv.disk_bytes,
                            report_path(config_origin(config, "kv", "host_bytes")));
    if (config->kv.disk_bytes > 0 && config->kv.disk_bytes < least)
        return report_error(report, -EINVAL,
                            "%s: kv.disk_bytes = %llu is too little: %d segments of %d bytes each are %llu bytes; give "
                            "that much, or 0 for no disk tier",
                            report_path(bytes_origin), (unsigned long long)config->kv.disk_bytes, DISK_SEGMENTS_MIN,
                            DISK_SEGMENT_BYTES_MIN, (unsigned long long)least);
    return 0;
}

bool config_has_disk(const struct config *config) {
    return config->kv.disk_bytes > 0; /* then there is a path */
}

/* What no single value can break. */
static int check_together(const struct config *config, struct report *report) {
    if (config->server.output_low >= config->server.output_high)
        return report_error(
            report, -EINVAL, "%s: server.output_low = %llu must be less than server.output_high = %llu (%s)",
            report_path(config_origin(config, "server", "output_low")), (unsigned long long)config->server.output_low,
            (unsigned long long)config->server.output_high,
            report_path(config_origin(config, "server", "output_high")));
    if (config->sched.prefill_chunk > config->sched.max_batch_tokens)
        return report_error(report, -EINVAL,
                            "%s: sched.prefill_chunk = %d does not fit into a pass of sched.max_batch_tokens = %d (%s)",
                            report_path(config_origin(config, "sched", "prefill_chunk")), config->sched.prefill_chunk,
                            config->sched.max_batch_tokens,
                            report_path(config_origin(config, "sched", "max_batch_tokens")));
    return check_disk(config, report);
}

int config_load(const struct config_source *source, struct config *ret_config, struct report *report) {
    struct config builtin = {0}, config = {0};
    int r = take_builtin(&builtin, report);

    if (r == 0)
        r = take_builtin(&config, report);
    if (r == 0 && source->file)
        r = take_file(&config, source->file, report);
    if (r == 0 && source->file)
        r = take_folder(&config, source->file, report);
    for (int i = 0; i < source->n_sets && r == 0; i++) {
        struct taking taking = {.config = &config};

        r = config_parse_set(source->sets[i], take_pair, &taking, report);
    }
    if (r == 0)
        r = drop_draft(&config, &builtin, report);
    if (r == 0)
        r = check_together(&config, report);
    config_free(&builtin);
    if (r != 0) {
        config_free(&config);
        return r;
    }
    *ret_config = config;
    return 0;
}

void config_free(struct config *config) {
    for (int i = 0; i < config_n_keys; i++) {
        if (config_keys[i].type == CONFIG_STRING)
            free(*(char **)((char *)config + config_keys[i].offset));
        free(config->origin[i]);
    }
    *config = (struct config){0};
}

int config_diff(const struct config *running, const struct config *fresh, struct config_change *ret_changes) {
    int n = 0;

    for (int i = 0; i < config_n_keys; i++) {
        const struct config_key *key = &config_keys[i];

        if (!config_value_equal(key, running, fresh))
            ret_changes[n++] = (struct config_change){key->section, key->name, key->at_run_time};
    }
    return n;
}

void config_adopt(struct config *running, struct config *fresh) {
    for (int i = 0; i < config_n_keys; i++) {
        char *origin = running->origin[i];

        if (!config_keys[i].at_run_time)
            continue;
        config_value_copy(&config_keys[i], fresh, running);
        running->origin[i] = fresh->origin[i];
        fresh->origin[i] = origin;
    }
}
