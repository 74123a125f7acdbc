/* input: what the command line names as input -> lists of ids. */
#pragma once
#include "options.h"

/* A file with an array of ids, or (list) an array of such arrays; ids are in [0, n_ids). 0, or a negative errno with a
 * report that names the file. *ret is malloc'd: ids_free_all. */
int input_ids_file(const char *path, bool list, int n_ids, struct ids **ret, int *ret_n, struct report *report);
void ids_free_all(struct ids *ids, int n);

/* Whole file in memory, at most bytes_max; a zero byte follows it. free(*ret). */
int input_read_file(const char *path, size_t bytes_max, char **ret, size_t *ret_bytes, struct report *report);
