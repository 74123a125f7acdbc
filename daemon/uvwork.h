/* uvwork: libuv's thread pool as the store's work interface. */
#pragma once
#include "work.h"

struct uv_loop_s;

/* Submitting is for the loop's thread. */
struct kv_work uvwork_of(struct uv_loop_s *loop);
