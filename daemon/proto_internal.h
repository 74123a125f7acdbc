/* proto_internal: what the files of proto share. */
#pragma once
#include "proto.h"

struct msgpack_object;

/* One param of a request as the table wants it, into the request's arena. The report speaks of the param only; its
 * reader knows the method. 0 or PROTO_E_REFUSED; -ENOMEM also if the arena's limit is met. */
int proto_param_decode(const struct proto_param *param, const struct msgpack_object *object, struct value_arena *arena,
                       struct param_value *ret_value, struct report *report);

/* What the rows of the table cannot say: params that exclude or need each other. */
int proto_check_rules(const struct request *request, struct report *report);

int proto_gen_fill(struct request *request); /* request->gen from request->values; 0 or -ENOMEM */

/* The value of a param of the request's method. */
const struct param_value *proto_value(const struct request *request, const char *name);

/* The one of n names, `stride` bytes apart, that the word was probably meant to be, or NULL. */
const char *proto_suggest(struct span word, const void *names, uint32_t n, size_t stride);

enum { PROTO_N_GEN_START_PARAMS = 27, PROTO_N_GEN_START_FIELDS = 8 };
extern const struct proto_param proto_gen_start_params[PROTO_N_GEN_START_PARAMS];
extern const struct proto_field proto_gen_start_fields[PROTO_N_GEN_START_FIELDS];
