/* chat_call: the text of one tool call, as the model writes it between <tool_call> and </tool_call>, to a name and
 * arguments. Pure. The text has no types, so the tool's JSON schema gives them. */
#pragma once
#include <stdbool.h>

#include "text.h"

struct value;
struct value_arena;

enum { CHAT_CALL_PARAMETERS_MAX = 256 };
enum { CHAT_CALL_E_MALFORMED = 1 }; /* also: more than the arena or CHAT_CALL_PARAMETERS_MAX holds */

/*  <function=NAME>
 *  <parameter=KEY>
 *  VALUE
 *  </parameter>
 *  </function>
 *
 * One newline after a parameter's head and one before its end belong to the format, all else to the value. A value ends
 * at the first </parameter> behind which the next parameter or the end of the function follows, so it may itself
 * contain that tag. Anything but white space elsewhere, and a parameter named twice, is malformed.
 *
 * `tools` (may be NULL) is the request's list, each tool a map with name and parameters or such a map under `function`.
 * A value whose schema allows null, boolean, integer, number, object or array, and that reads as one of these (true and
 * True, null and None, JSON for the rest), becomes that; otherwise, and without a schema, it stays a string. Of several
 * allowed types (a list of types, anyOf, oneOf, enum) string comes last. $ref is not followed. A tool that is not in
 * the list is no error here: the client knows what it offered.
 *
 * *ret_name points into body, *ret_arguments is a map in the arena. */
int chat_call_parse(struct value_arena *arena, struct span body, const struct value *tools, struct span *ret_name,
                    struct value *ret_arguments);

/* The body ends, white space aside, behind a closing tag of a parameter or function. */
bool chat_call_is_closed(struct span body);
