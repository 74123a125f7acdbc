/* park: sessions are put down and taken up again. */
#include "methods_internal.h"

void session_park(const struct call *call) {
    if (session_named(call, true))
        refuse(call, PROTO_NO_SPACE, "there is no tier below the device to park it in; it stays where it is");
}

void session_resume(const struct call *call) {
    session_info(call);
}
