#include "rope_config.h"
#include <math.h>
#include <string.h>

/* A rope base is at least 1 by its meaning (wave lengths grow); the largest in use is below 1e9. */
#define THETA_MIN 1.0
#define THETA_MAX 1e15

static void refuse_type(const struct config_object *o, const char *key) {
    static const char *const supported[] = {"default", NULL};

    config_one_of(o, key, supported, "rope type");
}

/* False: no such key here. */
static bool number(const struct config_object *o, const char *key, double min, double max, double *ret) {
    if (!config_get(o, key))
        return false;
    *ret = config_real(o, key, min, max, min);
    return true;
}

/* Any of the four places; reports name the place by its prefix. */
static bool search(const struct config_object *places, int n_places, const struct config_object *per_type, int n_types,
                   const char *key, double min, double max, double *ret) {
    double first = 0, other = 0;
    int n_found = 0;

    if (number(&places[0], key, min, max, ret))
        return true;
    for (int i = 0; i < n_types; i++) {
        if (!number(&per_type[i], key, min, max, n_found ? &other : &first))
            continue;
        if (n_found++ && other != first)
            config_refuse(places[0].file, "%s%s is %g, but %g for another layer type: one value for all is supported",
                          per_type[i].prefix, key, other, first);
    }
    if (n_found) {
        *ret = first;
        return true;
    }
    for (int i = 1; i < n_places; i++)
        if (number(&places[i], key, min, max, ret))
            return true;
    return false;
}

struct rope_config rope_config_read(const struct config_object *o, const char *const *types, int head_dim,
                                    double partial_fallback) {
    struct config_object places[3] = {config_child(o, "rope_parameters", "rope_parameters."), *o,
                                      config_child(o, "rope_scaling", "rope_scaling.")};
    struct config_object per_type[2] = {{0}};
    struct rope_config rope = {0};
    double partial = partial_fallback;
    int n_types = 0;

    for (; types[n_types] && n_types < 2; n_types++)
        per_type[n_types] =
            config_child(&places[0], types[n_types],
                         strcmp(types[n_types], "full_attention") == 0 ? "rope_parameters.full_attention."
                                                                       : "rope_parameters.sliding_attention.");
    refuse_type(o, "rope_type");
    for (int i = 0; i < 3; i += 2) {
        refuse_type(&places[i], "rope_type");
        refuse_type(&places[i], "type"); /* its older spelling */
    }
    for (int i = 0; i < n_types; i++) {
        refuse_type(&per_type[i], "rope_type");
        refuse_type(&per_type[i], "type");
    }
    rope.has_theta = search(places, 3, per_type, n_types, "rope_theta", THETA_MIN, THETA_MAX, &rope.theta);
    search(places, 3, per_type, n_types, "partial_rotary_factor", 0, 1, &partial);
    rope.rotary_dim = (int)(head_dim * partial);
    if (rope.rotary_dim < 2 || rope.rotary_dim % 2 != 0)
        config_refuse(o->file, "partial_rotary_factor %g of head_dim %d gives %d rotary dimensions, not an even number",
                      partial, head_dim, rope.rotary_dim);
    return rope;
}
