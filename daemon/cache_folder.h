/* cache_folder: kv.disk_path, what outlives the process: the secret, the segments of pages, the records of sessions. Owns
 * the lock that keeps a second daemon out. Knows neither pages nor sessions. */
#pragma once
#include "report.h"
#include "secret.h"

struct cache_folder {
    struct disk_folder root;               /* locked */
    struct disk_folder segments, sessions; /* in it */
    struct secret secret;
    bool is_new; /* the secret was made now: what the folder held before cannot be found */
};

enum { CACHE_FOLDER_E_LOCKED = 1 /* another daemon has it; it may go */ };

/* Makes what is missing, but for folders above `path`. Blocks: for the start. CACHE_FOLDER_E_LOCKED, -EINVAL for what must
 * be changed by hand, or -errno, each with a line that says what to do. */
int cache_folder_open(const char *path, struct cache_folder *ret_folder, struct report *report);
/* Whether the folder itself could be opened; a daemon may have it. Makes nothing and locks nothing; refuses as above. */
int cache_folder_look(const char *path, struct report *report);
void cache_folder_close(struct cache_folder *folder); /* fine for a zeroed one */
