/* fingerprint: one digest of everything that may change a token: contents of the checkpoint's files, the tokenizer, element
 * types of the caches, the numeric mode, the backend with its kernels and layouts. Not paths, names, times or sizes of
 * pools. Pages and states of one fingerprint are of no use under another. */
#pragma once
#include "digest.h"
#include "key.h"
#include "model.h"

/* Reads every file of the target's folder that the model was made from. Blocks; takes as long as reading them does. -EIO
 * and kin with a line. The drafter is not part of it: it cannot change a token. */
int fingerprint_read(const struct model_options *options, const char *backend, const struct backend_caps *caps,
                     uint8_t ret_bytes[KV_KEY_BYTES], struct report *report);

/* The same for the drafter, which guards its own pages alone; zero without one. */
int fingerprint_read_drafter(const struct model_options *options, uint8_t ret_bytes[KV_DIGEST_BYTES],
                             struct report *report);

/* What token ids are ids of: two models with the same one read each other's token lists. */
int fingerprint_read_vocabulary(const char *target_folder, uint8_t ret_bytes[KV_DIGEST_BYTES], struct report *report);
