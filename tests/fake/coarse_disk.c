/* coarse_disk: loaded before a program's libraries, it makes every file's disk one that takes direct I/O in multiples of 16 KiB
 * only, as the program asks for it. */
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { COARSE = 16 << 10 };

/* The C library chose the names of its own parameters: NOLINTNEXTLINE(readability-inconsistent-declaration-parameter-name) */
__attribute__((visibility("default"))) int statx(int fd, const char *restrict path, int flags, unsigned mask,
                                                 struct statx *restrict ret_status) {
    int r = (int)syscall(SYS_statx, fd, path, flags, mask, ret_status);

    if (r == 0 && (mask & STATX_DIOALIGN) != 0) {
        ret_status->stx_mask |= STATX_DIOALIGN;
        ret_status->stx_dio_mem_align = 512;
        ret_status->stx_dio_offset_align = COARSE;
    }
    return r;
}
