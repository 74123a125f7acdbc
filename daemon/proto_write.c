#include "proto.h"
#include "wire.h"

enum { MESSAGE_RESPONSE = 1, MESSAGE_NOTIFICATION = 2 };

void proto_result_begin(struct wire_out *out, uint32_t id) {
    wire_array(out, 4);
    wire_uint(out, MESSAGE_RESPONSE);
    wire_uint(out, id);
    wire_nil(out);
}

void proto_error(struct wire_out *out, uint32_t id, enum proto_code code, const char *message) {
    proto_error_data(out, id, code, message, NULL, 0);
}

void proto_error_data(struct wire_out *out, uint32_t id, enum proto_code code, const char *message,
                      const struct proto_number *data, uint32_t n_data) {
    wire_array(out, 4);
    wire_uint(out, MESSAGE_RESPONSE);
    wire_uint(out, id);
    wire_map(out, 3);
    wire_key(out, "code");
    wire_cstr(out, proto_code_name(code));
    wire_key(out, "message");
    wire_lossy(out, span_of(message)); /* a report may cut a foreign name inside a character */
    wire_key(out, "data");
    wire_map(out, n_data);
    for (uint32_t i = 0; i < n_data; i++) {
        wire_key(out, data[i].key);
        wire_int(out, data[i].number);
    }
    wire_nil(out);
}

void proto_event_begin(struct wire_out *out, const char *method) {
    wire_array(out, 3);
    wire_uint(out, MESSAGE_NOTIFICATION);
    wire_cstr(out, method);
}

void proto_gen_event_begin(struct wire_out *out, uint32_t id, uint64_t seq, const char *type, uint32_t n_more) {
    proto_event_begin(out, "gen.event");
    wire_map(out, 3 + n_more);
    wire_key(out, "id");
    wire_uint(out, id);
    wire_key(out, "seq");
    wire_uint(out, seq);
    wire_key(out, "type");
    wire_cstr(out, type);
}
