/* rope_config: where a config.json keeps the numbers of rotary embeddings. Target and drafter share the places; what an
 * absent number means is theirs. Internal to the config readers. */
#pragma once
#include "config_file.h"

struct rope_config {
    bool has_theta;
    double theta;
    int rotary_dim;
};

/* Each number is taken from the first of: rope_parameters, rope_parameters of a layer type (all `types`, NULL-terminated,
 * must then agree: one table serves all layers), the object itself, rope_scaling. A rope type other than "default" in
 * any of them is refused. */
struct rope_config rope_config_read(const struct config_object *o, const char *const *types, int head_dim,
                                    double partial_fallback);
