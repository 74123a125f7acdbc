#include "input.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "json.h"

enum { IDS_FILE_BYTES_MAX = 256 << 20, IDS_LISTS_MAX = 1 << 16 };

int input_read_file(const char *path, size_t bytes_max, char **ret, size_t *ret_bytes, struct report *report) {
    FILE *file = fopen(path, "rb");
    char *text = NULL;
    size_t n = 0, room = 0;
    int r = 0;

    if (!file)
        return report_error(report, -errno, "%s: cannot be read: %s", path, strerror(errno));
    do {
        if (room - n < 65536) {
            size_t more = room ? room * 2 : 1 << 17;
            char *grown = more <= 2 * bytes_max ? realloc(text, more + 1) : NULL;

            if (!grown) {
                r = report_error(report, -EFBIG, "%s: larger than %zu MiB", path, bytes_max >> 20);
                break;
            }
            text = grown;
            room = more;
        }
        n += fread(text + n, 1, room - n, file);
    } while (!feof(file) && !ferror(file));
    if (r == 0 && ferror(file))
        r = report_error(report, -EIO, "%s: reading failed", path);
    if (r == 0 && n > bytes_max)
        r = report_error(report, -EFBIG, "%s: larger than %zu MiB", path, bytes_max >> 20);
    fclose(file);
    if (r != 0) {
        free(text);
        return r;
    }
    text[n] = '\0';
    *ret = text;
    *ret_bytes = n;
    return 0;
}

void ids_free_all(struct ids *ids, int n) {
    for (int i = 0; ids && i < n; i++)
        free(ids[i].id);
    free(ids);
}

/* Reader stands on the opening bracket. */
static int read_list(struct json_reader *r, const char *path, int n_ids, struct ids *ret, struct report *report) {
    int room = 0;

    while (json_next(r) == JSON_NUMBER) {
        uint64_t id;

        if (!json_u64(r, (uint64_t)n_ids - 1, &id))
            return report_error(report, -EINVAL, "%s: '%.*s' is no id in 0..%d", path,
                                (int)min_int((int)r->token_bytes, 40), r->token, n_ids - 1);
        if (ret->n == room) {
            int *grown = realloc(ret->id, (size_t)(room = room ? 2 * room : 256) * sizeof *grown);

            if (!grown)
                return report_error(report, -ENOMEM, "%s: out of memory for %d ids", path, room);
            ret->id = grown;
        }
        ret->id[ret->n++] = (int)id;
    }
    if (r->kind != JSON_ARRAY_END)
        return report_error(report, -EINVAL, "%s: an array of ids is needed (byte %zu)", path, r->pos);
    if (ret->n == 0)
        return report_error(report, -EINVAL, "%s: an empty list of ids", path);
    return 0;
}

static int read_lists(struct json_reader *r, const char *path, bool list, int n_ids, struct ids **lists, int *n,
                      struct report *report) {
    struct ids *grown;
    int room = 0, error;

    if (json_next(r) != JSON_ARRAY)
        return report_error(report, -EINVAL, "%s: an array is needed", path);
    while (!list || json_next(r) == JSON_ARRAY) {
        if (*n == room) {
            grown = *n < IDS_LISTS_MAX ? realloc(*lists, (size_t)(room = room ? 2 * room : 16) * sizeof *grown) : NULL;
            if (!grown)
                return report_error(report, -ENOMEM, "%s: too many lists", path);
            *lists = grown;
        }
        (*lists)[*n] = (struct ids){0};
        error = read_list(r, path, n_ids, &(*lists)[(*n)++], report);
        if (error != 0 || !list)
            return error;
    }
    if (r->kind != JSON_ARRAY_END || *n == 0)
        return report_error(report, -EINVAL, "%s: an array of arrays of ids is needed (byte %zu)", path, r->pos);
    return 0;
}

int input_ids_file(const char *path, bool list, int n_ids, struct ids **ret, int *ret_n, struct report *report) {
    struct json_reader reader;
    struct ids *lists = NULL;
    int n = 0, r;
    size_t bytes = 0;
    char *text = NULL;

    r = input_read_file(path, IDS_FILE_BYTES_MAX, &text, &bytes, report);
    if (r != 0)
        return r;
    json_init(&reader, text, bytes);
    r = read_lists(&reader, path, list, n_ids, &lists, &n, report);
    if (r == 0 && json_next(&reader) != JSON_END)
        r = report_error(report, -EINVAL, "%s: something follows the array (byte %zu)", path, reader.pos);
    free(text);
    if (r != 0) {
        ids_free_all(lists, n);
        return r;
    }
    *ret = lists;
    *ret_n = n;
    return 0;
}
