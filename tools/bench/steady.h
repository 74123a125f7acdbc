/* steady: one seq that decodes without drafts, one token a step, while nothing else is done and while pages are written to
 * disk as fast as that goes, in turn. The writing needs no computing: what lies in host memory is written, forgotten and
 * written again. */
#pragma once

struct bench_options;

struct steady_figures {
    int n_windows;             /* of each kind, in turn */
    int n_idle, n_busy;        /* steps */
    double idle_p50, idle_p99; /* seconds from token to token */
    double busy_p50, busy_p99;
    double ratio_p50, ratio_p99; /* medians over pairs of windows side by side */
    double written_bytes_per_s;  /* while it is written */
};

int steady_measure(const struct bench_options *options, struct steady_figures *ret_figures);
