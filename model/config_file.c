#include "config_file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The largest published config.json (a long modules_to_not_convert) is below 100 KB. */
enum { CONFIG_BYTES_MAX = 4 << 20 };

void config_refuse(struct config_file *file, const char *format, ...) {
    char what[400];
    va_list args;

    if (file->error != 0)
        return;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    file->error = report_error(file->report, -EINVAL, "%s: %s", report_path(file->path), what);
}

int config_file_text(const char *path, char **ret_text, size_t *ret_n, struct report *report) {
    const char *name = report_path(path);
    struct stat st;
    char *text = NULL;
    size_t n = 0;
    int r, fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not block before it is refused */

    if (fd < 0)
        return report_error(report, -errno, "%s: %s", name, strerror(errno));
    if (fstat(fd, &st) != 0) {
        r = report_error(report, -errno, "%s: %s", name, strerror(errno));
        goto out;
    }
    if (!S_ISREG(st.st_mode)) {
        r = report_error(report, -EINVAL, "%s: not a regular file", name);
        goto out;
    }
    if (st.st_size > CONFIG_BYTES_MAX) {
        r = report_error(report, -EINVAL, "%s: %lld bytes, more than the %d a configuration may have", name,
                         (long long)st.st_size, CONFIG_BYTES_MAX);
        goto out;
    }
    text = malloc((size_t)st.st_size + 1);
    if (!text) {
        r = report_error(report, -ENOMEM, "%s: out of memory", name);
        goto out;
    }
    while (n < (size_t)st.st_size) {
        ssize_t got = read(fd, text + n, (size_t)st.st_size - n);

        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            r = report_error(report, got < 0 ? -errno : -EIO, "%s: %s", name,
                             got < 0 ? strerror(errno) : "shrank while it was read");
            goto out;
        }
        n += (size_t)got;
    }
    *ret_text = text;
    *ret_n = n;
    text = NULL;
    r = 0;
out:
    free(text);
    close(fd);
    return r;
}

int config_file_parse(struct config_file *file, const char *path, const char *text, size_t n, struct report *report) {
    json_error_t error;

    *file = (struct config_file){.path = path, .report = report};
    if (n > CONFIG_BYTES_MAX) {
        config_refuse(file, "%zu bytes, more than the %d a configuration may have", n, CONFIG_BYTES_MAX);
        return file->error;
    }
    file->root = json_loadb(text, n, JSON_REJECT_DUPLICATES, &error);
    if (!file->root)
        config_refuse(file, "line %d: %s", error.line, error.text);
    else if (!json_is_object(file->root))
        config_refuse(file, "not a JSON object");
    return file->error;
}

void config_file_deinit(struct config_file *file) {
    json_decref(file->root);
    file->root = NULL;
}

struct config_object config_root(struct config_file *file) {
    return (struct config_object){.file = file, .json = file->root, .prefix = ""};
}

json_t *config_get(const struct config_object *o, const char *key) {
    json_t *value = o->json ? json_object_get(o->json, key) : NULL;

    return json_is_null(value) ? NULL : value;
}

struct config_object config_child(const struct config_object *o, const char *key, const char *prefix) {
    json_t *value = config_get(o, key);

    if (value && !json_is_object(value)) {
        config_refuse(o->file, "%s%s must be an object", o->prefix, key);
        value = NULL;
    }
    return (struct config_object){.file = o->file, .json = value, .prefix = prefix};
}

int64_t config_int(const struct config_object *o, const char *key, int64_t min, int64_t max, int64_t fallback) {
    json_t *value = config_get(o, key);
    int64_t n;

    if (!value) {
        if (fallback == CONFIG_REQUIRED) {
            config_refuse(o->file, "%s%s is missing", o->prefix, key);
            return min;
        }
        return fallback;
    }
    if (!json_is_integer(value)) {
        config_refuse(o->file, "%s%s must be an integer", o->prefix, key);
        return min;
    }
    n = json_integer_value(value);
    if (n < min || n > max) {
        config_refuse(o->file, "%s%s is %lld, not in %lld..%lld", o->prefix, key, (long long)n, (long long)min,
                      (long long)max);
        return min;
    }
    return n;
}

double config_real(const struct config_object *o, const char *key, double min, double max, double fallback) {
    json_t *value = config_get(o, key);
    double x;

    if (!value) {
        if (fallback == CONFIG_REQUIRED_REAL) {
            config_refuse(o->file, "%s%s is missing", o->prefix, key);
            return min;
        }
        return fallback;
    }
    if (!json_is_number(value)) {
        config_refuse(o->file, "%s%s must be a number", o->prefix, key);
        return min;
    }
    x = json_number_value(value);
    if (!(x >= min && x <= max)) {
        config_refuse(o->file, "%s%s is %g, not in %g..%g", o->prefix, key, x, min, max);
        return min;
    }
    return x;
}

bool config_bool(const struct config_object *o, const char *key, bool fallback) {
    json_t *value = config_get(o, key);

    if (value && !json_is_boolean(value))
        config_refuse(o->file, "%s%s must be true or false", o->prefix, key);
    return value && json_is_boolean(value) ? json_is_true(value) : fallback;
}

const char *config_string(const struct config_object *o, const char *key) {
    json_t *value = config_get(o, key);

    if (value && !json_is_string(value))
        config_refuse(o->file, "%s%s must be a string", o->prefix, key);
    return json_string_value(value);
}

int config_ints(const struct config_object *o, const char *key, int n_max, int64_t min, int64_t max, int *ret) {
    json_t *value = config_get(o, key), *item;
    size_t i;

    if (!value)
        return 0;
    if (!json_is_array(value)) {
        config_refuse(o->file, "%s%s must be an array of integers", o->prefix, key);
        return 0;
    }
    if (json_array_size(value) > (size_t)n_max) {
        config_refuse(o->file, "%s%s has %zu entries, more than the supported %d", o->prefix, key,
                      json_array_size(value), n_max);
        return 0;
    }
    json_array_foreach(value, i, item) {
        if (!json_is_integer(item)) {
            config_refuse(o->file, "%s%s[%zu] must be an integer", o->prefix, key, i);
            return 0;
        }
        if (json_integer_value(item) < min || json_integer_value(item) > max) {
            config_refuse(o->file, "%s%s[%zu] is %lld, not in %lld..%lld", o->prefix, key, i,
                          (long long)json_integer_value(item), (long long)min, (long long)max);
            return 0;
        }
        ret[i] = (int)json_integer_value(item);
    }
    return (int)i;
}

void config_one_of(const struct config_object *o, const char *key, const char *const *values, const char *meaning) {
    const char *value = config_string(o, key);

    if (!value)
        return;
    for (const char *const *v = values; *v; v++)
        if (strcmp(value, *v) == 0)
            return;
    config_refuse(o->file, "%s%s \"%.100s\": unsupported %s (supported: %s)", o->prefix, key, value, meaning,
                  values[0]);
}
