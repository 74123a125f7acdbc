/* proto: THE table of methods, and with it msgpack messages <-> structs. Whatever can be refused by looking at a
 * message alone is refused here: unknown keys, types, ranges, what goes with what. Does no I/O; knows no model, so it
 * cannot know a vocabulary, a context length or a session. docs/protocol.md is printed from these tables. */
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "report.h"
#include "value.h"

struct wire_out;

enum { PROTO_VERSION = 1 };

/* Limits of single params; the table refers to them. Those of a message are in frame.h. */
enum {
    PROTO_NAME_BYTES_MAX = 128, /* of a session's name */
    PROTO_STOP_MAX = 16,
    PROTO_STOP_BYTES_MAX = 256,
    PROTO_STOP_IDS_MAX = 64,
    PROTO_BIAS_MAX = 1024,
    PROTO_LOGPROBS_MAX = 20,
};

/* ---- codes and reasons ---- */

enum proto_code {
    PROTO_BAD_FRAME,
    PROTO_BAD_PARAM,
    PROTO_UNKNOWN_METHOD,
    PROTO_CONTEXT_LENGTH,
    PROTO_BUSY,
    PROTO_QUOTA,
    PROTO_NOT_FOUND,
    PROTO_FORBIDDEN,
    PROTO_CANCELLED,
    PROTO_SLOW_CLIENT,
    PROTO_SHUTTING_DOWN,
    PROTO_NO_SPACE,
    PROTO_CORRUPT,
    PROTO_MODEL_NOT_READY,
    PROTO_DEADLINE,
    PROTO_INTERNAL,
    PROTO_N_CODES,
};

enum proto_finish {
    PROTO_FINISH_STOP,
    PROTO_FINISH_STOP_STRING,
    PROTO_FINISH_LENGTH,
    PROTO_FINISH_CONTEXT,
    PROTO_FINISH_TOOL_CALLS,
    PROTO_FINISH_CANCELLED,
    PROTO_FINISH_DEADLINE,
    PROTO_FINISH_SHUTDOWN,
    PROTO_FINISH_SLOW_CLIENT,
    PROTO_FINISH_ERROR,
    PROTO_N_FINISHES,
};

const char *proto_code_name(enum proto_code code);
const char *proto_finish_name(enum proto_finish finish);

/* ---- the table ---- */

enum method {
    METHOD_HELLO,
    METHOD_MODEL_INFO,
    METHOD_TEXT_TOKENIZE,
    METHOD_TEXT_DETOKENIZE,
    METHOD_CHAT_RENDER,
    METHOD_GEN_START,
    METHOD_GEN_CANCEL,
    METHOD_GEN_LIST,
    METHOD_SESSION_OPEN,
    METHOD_SESSION_CLOSE,
    METHOD_SESSION_LIST,
    METHOD_SESSION_INFO,
    METHOD_SESSION_PARK,
    METHOD_SESSION_RESUME,
    METHOD_SESSION_FORK,
    METHOD_SESSION_PIN,
    METHOD_SESSION_UNPIN,
    METHOD_CACHE_LOOKUP,
    METHOD_CACHE_STATS,
    METHOD_CACHE_EVICT,
    METHOD_CACHE_VERIFY,
    METHOD_CACHE_FLUSH,
    METHOD_CACHE_PURGE,
    METHOD_SERVER_HEALTH,
    METHOD_SERVER_STATS,
    METHOD_SERVER_METRICS,
    METHOD_SERVER_CONFIG,
    METHOD_SERVER_RELOAD,
    METHOD_SERVER_DRAIN,
    METHOD_SERVER_LOG_LEVEL,
    METHOD_N,
};

enum { /* struct proto_method.flags */
       METHOD_BEFORE_HELLO = 1,
       METHOD_WHILE_LOADING = 2, /* also while there is no model yet */
       METHOD_ADMIN = 4,         /* for uid 0 and the daemon's own */
};

enum param_type {
    PARAM_BOOL,
    PARAM_INT,    /* min..max */
    PARAM_UINT64, /* 0 .. 2^64 - 1 */
    PARAM_FLOAT,  /* min..max; integers are fine */
    PARAM_STRING,
    PARAM_NAME,    /* of a session: 1..PROTO_NAME_BYTES_MAX bytes, no control characters */
    PARAM_CHOICE,  /* one of a few strings */
    PARAM_IDS,     /* token ids */
    PARAM_STRINGS, /* each 1..bytes_max bytes */
    PARAM_BIAS,    /* {"token id": min..max} */
    PARAM_MAPS,    /* an array of maps with any content: messages, tools */
};

struct proto_param {
    const char *name;
    enum param_type type;
    bool is_required;
    bool is_above_min;          /* FLOAT: min itself is out */
    double min, max;            /* INT, FLOAT, BIAS */
    uint32_t n_min, n_max;      /* IDS, STRINGS, BIAS: items; n_max 0: as many as a message holds */
    uint32_t bytes_max;         /* STRINGS */
    const char *const *choices; /* CHOICE; ends with NULL */
    const char *default_text, *doc;
};

struct proto_field { /* of a result or an event, for the docs */
    const char *name, *type, *doc;
};

struct proto_method {
    const char *name;
    unsigned flags;
    uint32_t n_params, n_fields;
    const struct proto_param *params;
    const struct proto_field *fields;
    const char *doc;
    const char *example_params, *example_result; /* JSON */
};

struct proto_event { /* gen.event {id, seq, type, and these} */
    const char *type;
    uint32_t n_fields;
    const struct proto_field *fields;
    const char *doc, *example; /* JSON of params */
};

struct proto_about {                  /* a code or a reason, for the docs */
    const char *name, *doc, *example; /* JSON of the error or of the result */
};

extern const struct proto_method proto_methods[METHOD_N];
extern const struct proto_event proto_events[];
extern const uint32_t proto_n_events;
extern const struct proto_about proto_codes[PROTO_N_CODES];
extern const struct proto_about proto_finishes[PROTO_N_FINISHES];

/* ---- requests ---- */

struct bias_entry {
    int32_t id;
    float bias;
};

struct param_value { /* as decoded; which member holds says the param's type */
    bool is_set;
    uint32_t n; /* IDS, STRINGS, BIAS */
    union {
        bool boolean;
        int64_t integer;
        uint64_t unsigned_integer;
        double number;
        struct span text; /* STRING, NAME, CHOICE */
        const int32_t *ids;
        const struct span *strings;
        const struct bias_entry *bias;
        const struct value *tree;
    };
};

enum gen_prompt_kind { GEN_PROMPT_TEXT, GEN_PROMPT_IDS, GEN_PROMPT_MESSAGES };
enum gen_cache { GEN_CACHE_USE, GEN_CACHE_NO_STORE, GEN_CACHE_BYPASS };

struct gen_params { /* of gen.start */
    enum gen_prompt_kind prompt_kind;
    struct span prompt;
    bool markup;
    const int32_t *prompt_ids;
    uint32_t n_prompt_ids;
    const struct value *messages, *tools; /* NULL: none */
    int thinking;                         /* -1: not said */
    int64_t max_tokens;                   /* -1: to the end of the context */
    double temperature, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty; /* NAN: not said */
    int64_t top_k;                                                                             /* -1: not said */
    bool has_seed;
    uint64_t seed;
    uint32_t n_bias, n_stop, n_stop_ids;
    const struct bias_entry *bias; /* ids are unique */
    const struct span *stop;
    const int32_t *stop_ids;
    bool ignore_eos;
    int logprobs; /* -1: none */
    bool stream, return_ids, speculate;
    struct span session; /* empty: none */
    int priority;        /* the higher the sooner */
    int64_t deadline_ms; /* from the request's arrival; -1: none */
    enum gen_cache cache;
};

/* One decoded request. On the heap, owns all it points to. */
struct request {
    uint32_t id;
    enum method method;
    struct param_value *values;   /* [proto_methods[method].n_params] */
    const struct gen_params *gen; /* METHOD_GEN_START, else NULL */
    struct value_arena arena;
};

struct proto_refusal {
    uint32_t id;
    enum proto_code code; /* BAD_FRAME: the connection ends */
    struct report report;
};

enum { PROTO_E_REFUSED = 1 };

/* `bytes` are one message as frame_scan() measured it. 0, PROTO_E_REFUSED or -ENOMEM. */
int proto_decode(const char *bytes, size_t n, struct request **ret_request, struct proto_refusal *ret_refusal);
void request_free(struct request *request);
size_t request_bytes(const struct request *request); /* of memory it holds */

/* What the request says about a param of its method; false, and *ret as it was, if it says nothing. Asking for what the
 * table does not have is our own bug. */
bool request_get_bool(const struct request *request, const char *name, bool *ret);
bool request_get_int(const struct request *request, const char *name, int64_t *ret);
bool request_get_float(const struct request *request, const char *name, double *ret);
bool request_get_str(const struct request *request, const char *name, struct span *ret); /* also names and choices */
bool request_get_ids(const struct request *request, const char *name, const int32_t **ret_ids, uint32_t *ret_n);
bool request_get_value(const struct request *request, const char *name, const struct value **ret); /* PARAM_MAPS */

/* ---- messages to clients; each goes into an empty wire_out ---- */

struct proto_number { /* for programs, beside the message for people */
    const char *key;
    int64_t number;
};

void proto_result_begin(struct wire_out *out, uint32_t id); /* the caller writes one map, the result */
void proto_error(struct wire_out *out, uint32_t id, enum proto_code code, const char *message);
void proto_error_data(struct wire_out *out, uint32_t id, enum proto_code code, const char *message,
                      const struct proto_number *data, uint32_t n_data);
void proto_event_begin(struct wire_out *out, const char *method); /* the caller writes one map, the params */

/* gen.event {id, seq, type, ...}: the caller writes n_more pairs. */
void proto_gen_event_begin(struct wire_out *out, uint32_t id, uint64_t seq, const char *type, uint32_t n_more);
