/* secret: what names a store and what nobody else knows of it. One small file of the store's folder, made with the store and
 * never changed: without it the names of all pages are lost, and with it they can be found. Blocks: for start-up. */
#pragma once
#include "disk_folder.h"
#include "format.h"

enum {
    SECRET_E_DAMAGED = 1, /* not what was written: the pages in the folder cannot be found any more */
    SECRET_E_UNSAFE = 2,  /* a link, no file, or not readable by us alone: others may know it */
};

struct secret {
    uint8_t store_id[FORMAT_STORE_ID_BYTES];
    uint8_t bytes[KV_KEY_BYTES]; /* seeds the page keys; see key.h */
};

/* Reads it, or makes one of random bytes if there is none: ret_is_new, durable when this returns. SECRET_E_*: nothing was
 * changed; with the file removed the folder gets a new secret and what it holds is another store's. */
int secret_load(const struct disk_folder *folder, struct secret *ret_secret, bool *ret_is_new);
