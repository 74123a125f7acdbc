/* What the commands print: results for people or machines, errors, tables. */
#include "cli.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- text ---------------------------------------------------------------------------------------------------------- */

/* The next character that a terminal might obey, or the end: C0 but newline and tab, DEL, and C1 in its UTF-8 form. */
static size_t span_of_harmless(const char *bytes, size_t n_bytes) {
    for (size_t i = 0; i < n_bytes; i++) {
        unsigned char c = (unsigned char)bytes[i];

        if ((c < 0x20 && c != '\n' && c != '\t') || c == 0x7F)
            return i;
        if (c == 0xC2 && i + 1 < n_bytes && (unsigned char)bytes[i + 1] < 0xA0)
            return i;
    }
    return n_bytes;
}

void cli_print_text(FILE *out, const char *bytes, size_t n_bytes) {
    if (!isatty(fileno(out))) {
        fwrite(bytes, 1, n_bytes, out);
        return;
    }
    while (n_bytes > 0) {
        size_t n = span_of_harmless(bytes, n_bytes);

        fwrite(bytes, 1, n, out);
        if (n == n_bytes)
            return;
        n += (unsigned char)bytes[n] == 0xC2 ? 2 : 1;
        bytes += n;
        n_bytes -= n;
    }
}

void cli_print_text_of(const struct cli *cli, const json_t *result) {
    const json_t *text = json_object_get(result, "text");

    if (cli->json)
        cli_print_json(result);
    else if (text)
        cli_print_text(stdout, json_string_value(text), json_string_length(text));
}

/* ---- errors -------------------------------------------------------------------------------------------------------- */

void cli_complain_as(struct cli *cli, int status, const json_t *error) {
    const char *code = json_string_value(json_object_get(error, "code"));
    const char *message = json_string_value(json_object_get(error, "message"));

    if (cli->json) {
        json_t *document = json_pack("{s:O}", "error", error);

        cli_print_json(document);
        json_decref(document);
    }
    fflush(stdout);
    fputs("spillway: ", stderr);
    if (code && status != CLI_USAGE) /* what was typed needs no code */
        fprintf(stderr, "%s: ", code);
    if (message)
        cli_print_text(stderr, message, strlen(message));
    fputc('\n', stderr);
}

void cli_complain(struct cli *cli, int status, const char *code, const char *format, ...) {
    char message[1024];
    json_t *error;
    va_list args;

    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    va_end(args);
    error = json_pack("{s:s,s:s}", "code", code, "message", message);
    if (!error) /* a path that is no UTF-8 */
        error = json_pack("{s:s,s:s}", "code", code, "message", "(not UTF-8)");
    cli_complain_as(cli, status, error);
    json_decref(error);
}

/* ---- results ------------------------------------------------------------------------------------------------------- */

void cli_print_json(const json_t *value) {
    json_dumpf(value, stdout, JSON_ENCODE_ANY | JSON_REAL_PRECISION(15));
    putchar('\n');
    fflush(stdout);
}

void cli_format_leaf(const json_t *leaf, char *text, size_t n_room) {
    char *dump;

    if (json_is_string(leaf)) {
        snprintf(text, n_room, "%s", json_string_value(leaf));
        return;
    }
    dump = json_dumps(leaf, JSON_ENCODE_ANY | JSON_REAL_PRECISION(6));
    snprintf(text, n_room, "%s", dump && !json_is_null(leaf) ? dump : "-");
    free(dump);
}

static void visit(const json_t *value, char *path, size_t n_path, size_t n_room, cli_leaf_fn *on_leaf, void *user) {
    const char *key;
    json_t *member;

    if (!json_is_object(value)) { /* a list is a leaf too */
        on_leaf(user, path, value);
        return;
    }
    json_object_foreach((json_t *)value, key, member) {
        int n = snprintf(path + n_path, n_room - n_path, "%s%s", n_path ? "." : "", key);

        if (n >= 0 && (size_t)n < n_room - n_path)
            visit(member, path, n_path + (size_t)n, n_room, on_leaf, user);
    }
    path[n_path] = 0;
}

void cli_for_each_leaf(const json_t *value, cli_leaf_fn *on_leaf, void *user) {
    char path[512] = "";

    visit(value, path, 0, sizeof path, on_leaf, user);
}

static void widen(void *user, const char *path, const json_t *leaf) {
    int *width = user;

    (void)leaf;
    if ((int)strlen(path) > *width)
        *width = (int)strlen(path);
}

static void print_leaf(void *user, const char *path, const json_t *leaf) {
    const int *width = user;

    printf("%-*s  ", *width, path);
    if (json_is_string(leaf)) { /* of any length */
        cli_print_text(stdout, json_string_value(leaf), json_string_length(leaf));
    } else {
        char text[4096];

        cli_format_leaf(leaf, text, sizeof text);
        cli_print_text(stdout, text, strlen(text));
    }
    putchar('\n');
}

int cli_print_result(struct cli *cli, const json_t *result) {
    int width = 0;

    if (cli->json) {
        cli_print_json(result);
        return CLI_OK;
    }
    cli_for_each_leaf(result, widen, &width);
    if (json_object_size(result) > 0)
        cli_for_each_leaf(result, print_leaf, &width);
    return CLI_OK;
}

/* ---- tables -------------------------------------------------------------------------------------------------------- */

enum { COLUMNS_MAX = 32, CELL_BYTES = 64 };

struct columns { /* of the first row that has them, in its order */
    char name[COLUMNS_MAX][CELL_BYTES];
    int width[COLUMNS_MAX];
    int n;
};

static int find_column(const struct columns *columns, const char *path) {
    for (int i = 0; i < columns->n; i++)
        if (strcmp(columns->name[i], path) == 0)
            return i;
    return -1;
}

static void measure_cell(void *user, const char *path, const json_t *leaf) {
    struct columns *columns = user;
    int i = find_column(columns, path);
    char text[CELL_BYTES];

    if (i < 0) {
        if (columns->n == COLUMNS_MAX || strlen(path) >= CELL_BYTES)
            return;
        i = columns->n++;
        snprintf(columns->name[i], CELL_BYTES, "%s", path);
        columns->width[i] = (int)strlen(path);
    }
    cli_format_leaf(leaf, text, sizeof text);
    if ((int)strlen(text) > columns->width[i])
        columns->width[i] = (int)strlen(text);
}

struct row {
    const struct columns *columns;
    char cell[COLUMNS_MAX][CELL_BYTES];
};

static void fill_cell(void *user, const char *path, const json_t *leaf) {
    struct row *row = user;
    int i = find_column(row->columns, path);

    if (i >= 0)
        cli_format_leaf(leaf, row->cell[i], CELL_BYTES);
}

static void print_row(const struct columns *columns, const char (*cell)[CELL_BYTES]) {
    for (int i = 0; i < columns->n; i++) {
        cli_print_text(stdout, cell[i], strlen(cell[i]));
        if (i + 1 < columns->n)
            printf("%*s", columns->width[i] - (int)strlen(cell[i]) + 2, "");
    }
    putchar('\n');
}

void cli_print_table(const json_t *rows) {
    struct columns columns = {.n = 0};

    for (size_t i = 0; i < json_array_size(rows); i++)
        cli_for_each_leaf(json_array_get(rows, i), measure_cell, &columns);
    if (columns.n == 0)
        return;
    print_row(&columns, (const char(*)[CELL_BYTES])columns.name);
    for (size_t i = 0; i < json_array_size(rows); i++) {
        struct row row = {.columns = &columns};

        cli_for_each_leaf(json_array_get(rows, i), fill_cell, &row);
        print_row(&columns, (const char(*)[CELL_BYTES])row.cell);
    }
}
