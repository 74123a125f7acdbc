/* What the kernel says of the disk and of the time: a device that takes nothing but multiples of 16 KiB, a network file
 * system, a wall clock that jumps, a machine that slept. The linker sends the store's calls here (--wrap in meson.build). */
#include "vault_rig.h"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <time.h>

enum { COARSE = 16 << 10, YEAR_S = 365 * 24 * 3600 };
#define HOUR_US ((uint64_t)3600 * 1000000)

static struct {
    bool is_coarse;
    uint32_t n_calls, n_rejected; /* direct reads and writes */
    long magic;                   /* of the file system; 0: what it is */
    time_t wall_s;                /* 0: what it is */
} kernel;

/* The linker chose these names. NOLINTBEGIN(bugprone-reserved-identifier) */
int __real_statx(int fd, const char *path, int flags, unsigned mask, struct statx *ret_status);
int __real_fstatfs64(int fd, struct statfs *ret_status);
ssize_t __real_pread64(int fd, void *buffer, size_t bytes, off_t offset);
ssize_t __real_pwrite64(int fd, const void *buffer, size_t bytes, off_t offset);
time_t __real_time(time_t *ret_time);
int __wrap_statx(int fd, const char *path, int flags, unsigned mask, struct statx *ret_status);
int __wrap_fstatfs64(int fd, struct statfs *ret_status);
ssize_t __wrap_pread64(int fd, void *buffer, size_t bytes, off_t offset);
ssize_t __wrap_pwrite64(int fd, const void *buffer, size_t bytes, off_t offset);
time_t __wrap_time(time_t *ret_time);
/* NOLINTEND(bugprone-reserved-identifier) */

int __wrap_statx(int fd, const char *path, int flags, unsigned mask, struct statx *ret_status) {
    int r = __real_statx(fd, path, flags, mask, ret_status);

    if (r == 0 && kernel.is_coarse && (mask & STATX_DIOALIGN) != 0) {
        ret_status->stx_mask |= STATX_DIOALIGN;
        ret_status->stx_dio_mem_align = 512;
        ret_status->stx_dio_offset_align = COARSE;
    }
    return r;
}

int __wrap_fstatfs64(int fd, struct statfs *ret_status) {
    int r = __real_fstatfs64(fd, ret_status);

    if (r == 0 && kernel.magic != 0)
        ret_status->f_type = kernel.magic;
    return r;
}

/* As such a device does with what is direct. */
static bool is_rejected(int fd, size_t bytes, off_t offset) {
    bool is_rejected =
        kernel.is_coarse && (fcntl(fd, F_GETFL) & O_DIRECT) != 0 && ((size_t)offset | bytes) % COARSE != 0;

    kernel.n_calls += kernel.is_coarse && (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    kernel.n_rejected += is_rejected;
    if (is_rejected)
        errno = EINVAL;
    return is_rejected;
}

ssize_t __wrap_pread64(int fd, void *buffer, size_t bytes, off_t offset) {
    return is_rejected(fd, bytes, offset) ? -1 : __real_pread64(fd, buffer, bytes, offset);
}

ssize_t __wrap_pwrite64(int fd, const void *buffer, size_t bytes, off_t offset) {
    return is_rejected(fd, bytes, offset) ? -1 : __real_pwrite64(fd, buffer, bytes, offset);
}

time_t __wrap_time(time_t *ret_time) {
    time_t now = kernel.wall_s != 0 ? kernel.wall_s : __real_time(NULL);

    if (ret_time)
        *ret_time = now;
    return now;
}

static int forget(void **state) {
    (void)state;
    memset(&kernel, 0, sizeof kernel);
    return 0;
}

static void reopen(struct vault_rig *rig) {
    vr_close(rig);
    vr_open(rig);
    vr_settle(rig);
}

/* ---- the disk -------------------------------------------------------------------------------------------------------- */

static void on_verified(struct kv_vault_verify *verify) {
    (void)verify;
}

static void a_device_of_16_kib_gets_nothing_else(void **state) {
    static struct vault_chain chains[40];
    struct kv_vault_verify verify = {.done = on_verified};
    struct vault_rig rig;

    (void)state;
    kernel.is_coarse = true;
    vr_init_in(&rig, "/tmp");
    if (disk_folder_alignment(&rig.folder) == 0) {
        vr_free(&rig);
        skip(); /* nothing is direct here */
    }
    assert_int_equal(disk_folder_alignment(&rig.folder), COARSE);
    rig.options.no_ring = true; /* so that all calls pass here */
    rig.shelf_options.group[KV_TARGET_FULL].payload_bytes = 2 * FORMAT_BLOCK_BYTES;
    rig.options.disk_bytes = 4 * (uint64_t)VR_SEGMENT;
    vr_open_shelf(&rig);
    assert_int_equal(vr_open_vault(&rig), -EINVAL); /* slots that lie anywhere cannot be kept there */
    kv_shelf_close(rig.shelf);
    rig.shelf_options.alignment = COARSE;
    vr_open(&rig);
    for (int i = 0; i < 40; i++) { /* more than it holds */
        vr_chain(&rig, &chains[i], i, 40);
        vr_save(&rig, &chains[i]);
    }
    assert_int_equal(vr_flush(&rig), 0);
    vr_expect_chain(&rig, &chains[39], true);
    reopen(&rig);
    vr_expect_chain(&rig, &chains[39], true);
    assert_int_equal(kv_vault_verify(rig.vault, &verify), 0);
    vr_settle(&rig);
    kv_vault_evict_bytes(rig.vault, 10 * COARSE);
    kv_vault_purge(rig.vault, 1);
    vr_settle(&rig);
    assert_int_equal(vr_flush(&rig), 0);
    assert_true(kernel.n_calls > 40 * 80);
    assert_int_equal(kernel.n_rejected, 0);
    assert_true(vr_stats(&rig).disk.is_direct);
    vr_free(&rig);
}

static void a_network_file_system_is_refused(void **state) {
    static const long magics[] = {
        NFS_SUPER_MAGIC,  SMB_SUPER_MAGIC, 0xff534d42 /* CIFS */, 0xfe534d42 /* SMB2 */, AFS_SUPER_MAGIC,
        CEPH_SUPER_MAGIC, V9FS_MAGIC,      CODA_SUPER_MAGIC};
    static const long local[] = {EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, BTRFS_SUPER_MAGIC, TMPFS_MAGIC,
                                 OVERLAYFS_SUPER_MAGIC};
    char path[] = "/tmp/network-XXXXXX", lock[64];
    struct disk_folder folder;

    (void)state;
    assert_non_null(mkdtemp(path));
    snprintf(lock, sizeof lock, "%s/lock", path);
    for (size_t i = 0; i < ARRAY_LEN(magics); i++) {
        kernel.magic = magics[i];
        assert_int_equal(disk_folder_open(path, &folder), DISK_E_NETWORK);
        assert_int_equal(disk_folder_look(path), DISK_E_NETWORK);
        assert_int_equal(access(lock, F_OK), -1); /* nothing was made there */
    }
    for (size_t i = 0; i < ARRAY_LEN(local); i++) {
        kernel.magic = local[i];
        assert_int_equal(disk_folder_open(path, &folder), 0);
        disk_folder_close(&folder);
    }
    unlink(lock);
    assert_int_equal(rmdir(path), 0);
}

/* ---- time ------------------------------------------------------------------------------------------------------------ */

static void a_wall_clock_that_jumps_changes_nothing(void **state) {
    static const long jumps[] = {0, -YEAR_S, 10L * YEAR_S, 1 /* 1970 */ - 1700000000L};
    static struct vault_chain chains[ARRAY_LEN(jumps)], again;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    vr_open(&rig);
    for (size_t i = 0; i < ARRAY_LEN(jumps); i++) {
        kernel.wall_s = 1700000000 + jumps[i];
        vr_chain(&rig, &chains[i], (int)i, 10);
        vr_save(&rig, &chains[i]);
    }
    for (size_t i = 0; i < ARRAY_LEN(jumps); i++) { /* whenever it is when it starts: all are there */
        kernel.wall_s = 1700000000 + jumps[i];
        reopen(&rig);
        for (size_t k = 0; k < ARRAY_LEN(jumps); k++)
            vr_expect_chain(&rig, &chains[k], true);
    }
    for (size_t i = 0; i < ARRAY_LEN(jumps);
         i++) { /* and they leave as they were used last, whenever they were saved */
        assert_true(vr_is_whole(&rig, &chains[i]));
        kv_vault_evict_bytes(rig.vault, 1);
        assert_false(vr_is_whole(&rig, &chains[i]));
        for (size_t k = i + 1; k < ARRAY_LEN(jumps); k++)
            assert_true(vr_is_whole(&rig, &chains[k]));
        kv_vault_evict_bytes(rig.vault, 20 * (uint64_t)rig.options.group[KV_TARGET_FULL].slot_bytes);
        vr_settle(&rig);
    }
    vr_chain(&rig, &again, 9, 5);
    vr_save(&rig, &again);
    vr_expect_chain(&rig, &again, true);
    vr_free(&rig);
}

/* The clock that is passed in never goes back; it may stand still, or have gone on while the machine slept. */
static void a_machine_that_slept_goes_on(void **state) {
    static struct vault_chain chain, other;
    struct vr_read read;
    struct vault_rig rig;

    (void)state;
    vr_init(&rig);
    rig.options.write_bytes_per_day = 100 * (uint64_t)(VR_PAYLOAD + FORMAT_BLOCK_BYTES);
    vr_use_faults(&rig);
    vr_open(&rig);
    vr_chain(&rig, &chain, 1, 10);
    vr_save(&rig, &chain);
    assert_int_equal(vr_flush(&rig), 0);
    vr_pass(&rig, 1000 * 24 * HOUR_US); /* nothing is out: nothing is late, and no day's bytes pile up */
    assert_int_equal(vr_stats(&rig).budget_bytes, rig.options.write_bytes_per_day);
    vr_expect_chain(&rig, &chain, true);
    vr_empty_shelf(&rig);
    disk_faults_add(rig.faults, DISK_CALL_READ, (struct disk_fault){.is_held = true, .is_deaf = true});
    assert_int_equal(vr_ask_read(&rig, &read, &chain, 3, KV_TARGET_FULL), 0);
    vr_pass(&rig, 8 * HOUR_US); /* with a read on its way: who waits is answered, and what comes late harms nobody */
    assert_int_equal(read.n_done, 1);
    assert_int_equal(read.result, -ETIMEDOUT);
    disk_faults_release(rig.faults);
    vr_quiesce(&rig);
    assert_int_equal(vr_stats(&rig).disk.n_out, 0);
    assert_false(vr_stats(&rig).is_off);
    vr_expect_chain(&rig, &chain, true);
    vr_chain(&rig, &other, 2, 10);
    vr_save(&rig, &other);
    vr_expect_chain(&rig, &other, true);
    assert_int_equal(vr_stats(&rig).n_breaker_opened, 0);
    vr_free(&rig);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(a_device_of_16_kib_gets_nothing_else, forget),
        cmocka_unit_test_setup(a_network_file_system_is_refused, forget),
        cmocka_unit_test_setup(a_wall_clock_that_jumps_changes_nothing, forget),
        cmocka_unit_test_setup(a_machine_that_slept_goes_on, forget),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
