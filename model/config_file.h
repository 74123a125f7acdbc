/* config_file: one JSON configuration file, read key by key with type and range checks. Internal to the config readers;
 * knows JSON, no model. The first refusal sticks: later reads return their fallback and change nothing, so a reader is
 * a plain list of keys followed by one look at `error`. */
#pragma once
#include <jansson.h>
#include "report.h"
#include "base.h"

struct config_file {
    const char *path; /* names the file in reports */
    struct report *report;
    int error; /* 0, or what the report says */
    json_t *root;
};

/* A JSON object of the file, or nothing (json NULL): every key of nothing is absent. */
struct config_object {
    struct config_file *file;
    json_t *json;
    const char *prefix; /* "" or "text_config." for reports */
};

/* A fallback that no checked number equals: an absent key is then refused. */
#define CONFIG_REQUIRED INT64_MIN
#define CONFIG_REQUIRED_REAL (-1e300)

int config_file_parse(struct config_file *file, const char *path, const char *text, size_t n, struct report *report);
void config_file_deinit(struct config_file *file);
/* Reads a whole small file. Returns 0, or the negative errno with a report. free(*ret_text). */
int config_file_text(const char *path, char **ret_text, size_t *ret_n, struct report *report);

struct config_object config_root(struct config_file *file);
/* An absent or null key gives nothing, anything but an object is refused. `prefix` must outlive the result. */
struct config_object config_child(const struct config_object *o, const char *key, const char *prefix);

__attribute__((format(printf, 2, 3))) void config_refuse(struct config_file *file, const char *format, ...);

/* NULL if absent or null. */
json_t *config_get(const struct config_object *o, const char *key);
int64_t config_int(const struct config_object *o, const char *key, int64_t min, int64_t max, int64_t fallback);
double config_real(const struct config_object *o, const char *key, double min, double max, double fallback);
bool config_bool(const struct config_object *o, const char *key, bool fallback);
/* NULL if absent or null. */
const char *config_string(const struct config_object *o, const char *key);
/* An array of n_min..n_max integers; absent or null: 0 entries. */
int config_ints(const struct config_object *o, const char *key, int n_max, int64_t min, int64_t max, int *ret);
/* The key is absent, or one of the NULL-terminated values. */
void config_one_of(const struct config_object *o, const char *key, const char *const *values, const char *meaning);
