/* watch: "when this fd is readable, call that". The only file that meets libuv's poller; whatever finishes later on
 * another thread, in the kernel or on a device arrives through one of these. */
#pragma once

struct uv_loop_s;
struct watch;

/* The fd stays the caller's and must stay open until watch_stop. 0 or a negative errno. */
int watch_start(struct uv_loop_s *loop, int fd, void (*on_readable)(void *user), void *user, struct watch **ret_watch);
/* No call comes after this, also if the fd is readable already. The memory goes with libuv's close callback. NULL is
 * fine. */
void watch_stop(struct watch *watch);

/* Empties an eventfd: the sum of what was written to it since the last call. */
unsigned long long watch_take_count(int eventfd);
