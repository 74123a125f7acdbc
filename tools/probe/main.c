/* spillway-probe: loads a checkpoint and prints what the network computes. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "input.h"
#include "options.h"

enum { EXIT_USAGE = 2, EXIT_UNUSABLE = 77 };

int main(int argc, char **argv) {
    struct report report = {0};
    struct command command;
    struct probe probe;
    struct ids *ids = NULL;
    int n = 0, r, status = 0;

    if (options_parse(argc, argv, &command, &report) != 0) {
        fprintf(stderr, "spillway-probe: %s\n", report.line);
        return EXIT_USAGE;
    }
    if (command.help) {
        fputs(options_usage, stdout);
        return 0;
    }
    r = input_ids_file(command.source_arg, command.source == SOURCE_BATCH, 1 << 20, &ids, &n, &report);
    if (r == 0) {
        int tokens = 0;
        for (int i = 0; i < n; i++)
            tokens = max_int(tokens, ids[i].n + command.probe.n_generate);
        r = probe_open(&probe, &command.probe, 0, tokens, &report);
        status = r ? EXIT_UNUSABLE : 0;
    }
    if (r == 0) {
        if (command.probe.n_generate) {
            struct generation *g = calloc((size_t)n, sizeof *g);
            r = probe_generate(&probe, ids, n, g, &report);
            for (int i = 0; i < n; i++) {
                for (int k = 0; k < g[i].out.n; k++)
                    printf("%d ", g[i].out.id[k]);
                printf("| %d steps %.3f s\n", g[i].n_steps, g[i].decode_s);
            }
        } else
            r = probe_evaluate(&probe, ids, &report);
        probe_close(&probe);
    }
    if (r)
        fprintf(stderr, "spillway-probe: %s\n", report.line);
    return r ? (status ? status : 1) : 0;
}
