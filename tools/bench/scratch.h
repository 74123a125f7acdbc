/* scratch: a temporary folder on a real disk, that is gone with all that is in it when it is over. */
#pragma once
#include <stddef.h>

enum { SCRATCH_PATH_BYTES = 512 };

/* Made in `under`. 0, or negative errno after a line on stderr: also -EINVAL for a file system in memory. */
int scratch_make(const char *under, char ret_path[SCRATCH_PATH_BYTES]);
void scratch_remove(const char *path); /* "" is fine */
