#include "figures.h"

#include <assert.h>
#include <string.h>

void figure_add(struct figure *figure, const char *name, double value) {
    assert(figure->n_extras < FIGURE_EXTRAS_MAX);
    figure->extras[figure->n_extras].name = name;
    figure->extras[figure->n_extras++].value = value;
}

/* Seconds; 0: nothing is known of it. */
static double floor_of(const struct figure *f, const struct roof *roof) {
    double read = roof->read > 0 ? f->bytes / roof->read : 0, matrix = roof->matrix > 0 ? f->ops / roof->matrix : 0;

    switch (f->way) {
    case FIGURE_UP:
        return roof->up > 0 ? f->bytes / roof->up : 0;
    case FIGURE_DOWN:
        return roof->down > 0 ? f->bytes / roof->down : 0;
    case FIGURE_DEVICE:
        break;
    }
    return read > matrix ? read : matrix;
}

/* ---- table ---------------------------------------------------------------------------------------------------------- */

static void print_roof(const char *name, const struct roof *roof) {
    printf("%-10s %7.3f TB/s read, %7.2f TFLOP/s in bf16 products, %6.2f GB/s up and %6.2f GB/s down the link\n", name,
           roof->read * 1e-12, roof->matrix * 1e-12, roof->up * 1e-9, roof->down * 1e-9);
}

static void print_head(struct figures *figures, const struct figure *f) {
    bool is_same = figures->group != NULL && strcmp(figures->group, f->group) == 0 && figures->shape == f->shape;

    if (is_same)
        return;
    figures->group = f->group;
    figures->shape = f->shape;
    printf("\n%s%s%-*s | context seqs |        ms |     floor | share%s |       GB |   TFLOP |\n", f->group,
           f->shape ? ", " : "", (int)(38 - strlen(f->group) - (f->shape ? 2 : 0)), f->shape ? f->shape : "",
           figures->documented.read > 0 ? " | documented" : "");
}

static void print_figure(struct figures *figures, const struct figure *f, double floor, double documented) {
    print_head(figures, f);
    printf("  %-36s | %7d %4d | %9.4f | %9.4f |  %4.2f", f->name, f->context, f->batch, f->seconds * 1e3, floor * 1e3,
           floor / f->seconds);
    if (figures->documented.read > 0)
        printf(" |       %4.2f", documented / f->seconds);
    printf(" | %8.4f | %7.4f |", f->bytes * 1e-9, f->ops * 1e-12);
    for (int i = 0; i < f->n_extras; i++)
        printf("%s %s %.4g", i > 0 ? "," : "", f->extras[i].name, f->extras[i].value);
    printf("\n");
    fflush(stdout);
}

/* ---- JSON ----------------------------------------------------------------------------------------------------------- */

static void write_roof(FILE *json, const char *name, const struct roof *roof) {
    fprintf(json, "\"%s\": {\"read_bytes_per_s\": %.0f, \"matrix_ops_per_s\": %.0f, \"up_bytes_per_s\": %.0f, ", name,
            roof->read, roof->matrix, roof->up);
    fprintf(json, "\"down_bytes_per_s\": %.0f}", roof->down);
}

static void write_figure(const struct figures *figures, const struct figure *f, double floor, double documented) {
    FILE *json = figures->json;

    fprintf(json, "%s\n  {\"group\": \"%s\", \"shape\": \"%s\", \"name\": \"%s\", \"context\": %d, \"batch\": %d, ",
            figures->n > 0 ? "," : "", f->group, f->shape ? f->shape : "", f->name, f->context, f->batch);
    fprintf(json, "\"seconds\": %.9f, \"bytes\": %.0f, \"ops\": %.0f, \"floor_s\": %.9f, \"share\": %.6f", f->seconds,
            f->bytes, f->ops, floor, floor / f->seconds);
    if (figures->documented.read > 0)
        fprintf(json, ", \"documented_share\": %.6f", documented / f->seconds);
    for (int i = 0; i < f->n_extras; i++)
        fprintf(json, ", \"%s\": %.6g", f->extras[i].name, f->extras[i].value);
    fprintf(json, "}");
}

/* ---- both ----------------------------------------------------------------------------------------------------------- */

void figures_begin(struct figures *figures, const char *kernel_path) {
    printf("%s\n", kernel_path);
    print_roof("measured", &figures->measured);
    if (figures->documented.read > 0)
        print_roof("documented", &figures->documented);
    if (!figures->json)
        return;
    fprintf(figures->json, "{\"kernel_path\": \"%s\", \"ceilings\": {", kernel_path);
    write_roof(figures->json, "measured", &figures->measured);
    if (figures->documented.read > 0) {
        fprintf(figures->json, ", ");
        write_roof(figures->json, "documented", &figures->documented);
    }
    fprintf(figures->json, "},\n\"figures\": [");
}

void figures_put(struct figures *figures, const struct figure *figure) {
    double floor = floor_of(figure, &figures->measured), documented = floor_of(figure, &figures->documented);

    print_figure(figures, figure, floor, documented);
    if (figures->json)
        write_figure(figures, figure, floor, documented);
    figures->n++;
}

void figures_end(struct figures *figures) {
    if (figures->json)
        fprintf(figures->json, "]}\n");
}
