#include "session_files.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base.h"

enum { NAME_CHARS = 2 * KV_KEY_BYTES };

enum state { CLEAN, QUEUED, OUT, FAILED };

struct file_name {
    char text[NAME_CHARS + 1];
};

struct session_file {
    struct session_files *files;
    struct session_file *prev, *next;  /* of all */
    struct session_file *next_in_line; /* QUEUED */
    struct file_name name;
    enum state state;
    bool is_removed; /* its session is gone */
    bool has_failed; /* the last time it was tried */
    bool is_lost;    /* what was put last could not even be kept */
    uint8_t *bytes;  /* owned: to be written; NULL: nothing newer than what is out */
    size_t n_bytes;
    uint64_t round; /* of what was put last */
    struct session_wait *waits;
};

struct session_files {
    struct session_files_options options;
    struct session_file *first; /* of all */
    struct session_file *line, **line_end;
    struct kv_hasher *hasher;
    uint64_t last_round, retry_us;
    uint32_t n_have_failed;
    struct session_files_stats stats;

    /* The one that is out; the worker's from submit to done. */
    struct kv_work_item item;
    struct session_file *out;
    uint8_t *out_bytes; /* NULL: it is removed */
    size_t n_out_bytes;
    uint64_t out_round;
    int out_result;
};

/* ---- names ---------------------------------------------------------------------------------------------------------- */

/* Keyed, so that a listing of the folder tells nothing; chained like a page of tokens, so that nobody can make a second
 * name for the file of another user. */
static int name_of(struct kv_hasher *hasher, const struct session_names *names, uint32_t uid, struct span name,
                   struct file_name *ret_name) {
    int32_t page[PAGE_TOKENS] = {0};
    uint8_t scope[KV_KEY_BYTES] = {0};
    struct kv_key key;
    int r;

    static_assert(SESSION_RECORD_NAME_BYTES_MAX <= sizeof page, "a name has no zeros, so filling up is one to one");
    memcpy(scope, names->vocabulary, sizeof names->vocabulary);
    memcpy(page, name.bytes, name.n);
    r = kv_key_root(names->secret, scope, uid, &key);
    if (r == 0)
        r = kv_key_chain(hasher, &key, page, 1, &key);
    for (int i = 0; r == 0 && i < KV_KEY_BYTES; i++)
        snprintf(ret_name->text + 2 * i, 3, "%02x", key.bytes[i]);
    return r;
}

int session_files_name(const struct session_names *names, uint32_t uid, struct span name,
                       char ret_name[SESSION_FILES_NAME_BYTES]) {
    struct kv_hasher *hasher;
    struct file_name file;
    int r = kv_hasher_new(&hasher);

    if (r != 0)
        return r;
    r = name_of(hasher, names, uid, name, &file);
    if (r == 0)
        snprintf(ret_name, SESSION_FILES_NAME_BYTES, "%s", file.text);
    kv_hasher_free(hasher);
    return r;
}

static bool is_file_name(const char *name) {
    return strlen(name) == NAME_CHARS && strspn(name, "0123456789abcdef") == NAME_CHARS;
}

/* ---- life ----------------------------------------------------------------------------------------------------------- */

static void on_write(struct kv_work_item *item);
static void on_written(struct kv_work_item *item);

int session_files_open(const struct session_files_options *options, struct session_files **ret_files) {
    struct session_files *files = calloc(1, sizeof *files);
    int r;

    if (!files)
        return -ENOMEM;
    files->options = *options;
    files->line_end = &files->line;
    files->item = (struct kv_work_item){.run = on_write, .done = on_written};
    r = kv_hasher_new(&files->hasher);
    if (r != 0) {
        free(files);
        return r;
    }
    *ret_files = files;
    return 0;
}

static void file_free(struct session_files *files, struct session_file *file) {
    if (file->next)
        file->next->prev = file->prev;
    if (file->prev)
        file->prev->next = file->next;
    else
        files->first = file->next;
    files->stats.n_files--;
    files->n_have_failed -= file->has_failed;
    free(file->bytes);
    free(file);
}

void session_files_close(struct session_files *files) {
    if (!files)
        return;
    assert(!files->out);
    for (struct session_file *file = files->first, *next; file; file = next) {
        next = file->next;
        free(file->bytes);
        free(file);
    }
    kv_hasher_free(files->hasher);
    explicit_bzero(&files->options.names, sizeof files->options.names);
    free(files);
}

int session_files_add(struct session_files *files, uint32_t uid, struct span name, struct session_file **ret_file) {
    struct session_file *file = calloc(1, sizeof *file);
    int r;

    if (!file)
        return -ENOMEM;
    r = name_of(files->hasher, &files->options.names, uid, name, &file->name);
    if (r != 0) {
        free(file);
        return r;
    }
    file->files = files;
    file->next = files->first;
    if (file->next)
        file->next->prev = file;
    files->first = file;
    files->stats.n_files++;
    *ret_file = file;
    return 0;
}

/* ---- writing -------------------------------------------------------------------------------------------------------- */

/* In a worker. */
static void on_write(struct kv_work_item *item) {
    struct session_files *files = container_of(item, struct session_files, item);
    const struct disk_folder *folder = files->options.folder;
    const char *name = files->out->name.text; /* never changes */

    if (files->out_bytes)
        files->out_result = disk_folder_replace(folder, name, files->out_bytes, files->n_out_bytes);
    else
        files->out_result = disk_folder_remove(folder, name);
    if (files->out_result == -ENOENT && !files->out_bytes) /* it never got there */
        files->out_result = 0;
}

static void start_next(struct session_files *files);

static void enqueue(struct session_files *files, struct session_file *file) {
    if (file->state == QUEUED || file->state == OUT) /* who is out looks again when it is home */
        return;
    file->state = QUEUED;
    file->next_in_line = NULL;
    *files->line_end = file;
    files->line_end = &file->next_in_line;
}

static void retry_failed(struct session_files *files) {
    files->retry_us = 0;
    for (struct session_file *file = files->first; file; file = file->next)
        if (file->state == FAILED)
            enqueue(files, file);
}

/* Those who wait for this round, or an earlier one. */
static void tell(struct session_file *file, uint64_t round, int result) {
    struct session_wait **at = &file->waits;

    while (*at) {
        struct session_wait *wait = *at;

        if (wait->round > round) {
            at = &wait->next;
            continue;
        }
        *at = wait->next;
        wait->done(wait, result);
    }
}

static void retry_later(struct session_files *files) {
    if (files->retry_us == 0)
        files->retry_us = files->options.now_us() + files->options.retry_us;
}

/* What works for one is worth a try for the others. */
static void note_result(struct session_files *files, struct session_file *file, int result) {
    bool was_in_trouble = files->n_have_failed > 0;

    files->n_have_failed += (result != 0) - file->has_failed;
    file->has_failed = result != 0;
    file->state = result == 0 ? CLEAN : FAILED;
    if (was_in_trouble != (files->n_have_failed > 0))
        files->options.on_trouble(files->options.user, result);
    if (result != 0)
        retry_later(files);
    else if (files->n_have_failed > 0)
        retry_failed(files);
}

/* What was not written is to be written again, unless there is something newer. */
static void keep_bytes(struct session_files *files, struct session_file *file) {
    if (file->bytes || file->is_removed) {
        free(files->out_bytes);
        return;
    }
    file->bytes = files->out_bytes;
    file->n_bytes = files->n_out_bytes;
}

static void take_home(struct session_files *files) {
    struct session_file *file = files->out;
    bool was_removal = !files->out_bytes;
    int result = files->out_result;

    if (result == 0) {
        files->stats.n_written += !was_removal;
        files->stats.n_removed += was_removal;
        files->stats.bytes += files->n_out_bytes;
        free(files->out_bytes);
    } else {
        files->stats.n_failed++;
        files->stats.error = result;
        keep_bytes(files, file);
    }
    files->out = NULL;
    files->out_bytes = NULL;
    note_result(files, file, result);
    if (file->round > files->out_round) /* put or removed meanwhile */
        enqueue(files, file);
    tell(file, files->out_round, result);
    if (file->state == CLEAN && was_removal)
        file_free(files, file);
}

static void on_written(struct kv_work_item *item) {
    struct session_files *files = container_of(item, struct session_files, item);

    take_home(files);
    start_next(files);
}

static void start_next(struct session_files *files) {
    struct session_file *file = files->line;
    struct kv_work *work = &files->options.work;

    if (files->out || !file)
        return;
    files->out = file;
    files->out_bytes = file->bytes;
    files->n_out_bytes = file->bytes ? file->n_bytes : 0;
    files->out_round = file->round;
    if (work->submit(work->user, &files->item) != 0) { /* nobody takes work now: it stays first in line */
        files->out = NULL;
        files->out_bytes = NULL;
        retry_later(files);
        return;
    }
    file->state = OUT;
    file->bytes = NULL;
    files->line = file->next_in_line;
    if (!files->line)
        files->line_end = &files->line;
}

static void change(struct session_files *files, struct session_file *file) {
    file->round = ++files->last_round;
    enqueue(files, file);
    start_next(files);
}

int session_files_put(struct session_files *files, struct session_file *file, const struct session_record *record) {
    struct session_record mine = *record;
    size_t n = session_record_bytes(record);
    uint8_t *bytes = malloc(n);

    assert(!file->is_removed);
    file->is_lost = !bytes;
    if (!bytes)
        return -ENOMEM;
    memcpy(mine.vocabulary, files->options.names.vocabulary, sizeof mine.vocabulary);
    session_record_write(&mine, bytes);
    free(file->bytes);
    file->bytes = bytes;
    file->n_bytes = n;
    change(files, file);
    return 0;
}

void session_files_wait(struct session_file *file, struct session_wait *wait) {
    assert(file->state == QUEUED || file->state == OUT);
    wait->round = file->round;
    wait->next = file->waits;
    file->waits = wait;
}

void session_files_remove(struct session_files *files, struct session_file *file, struct session_wait *wait) {
    assert(!file->is_removed);
    free(file->bytes);
    file->bytes = NULL;
    file->is_removed = true;
    file->round = ++files->last_round;
    enqueue(files, file);
    if (wait)
        session_files_wait(file, wait);
    start_next(files);
}

/* ---- looking -------------------------------------------------------------------------------------------------------- */

bool session_file_is_durable(const struct session_file *file) {
    bool is_sure = file->state == CLEAN || file->files->n_have_failed == 0;

    return is_sure && !file->is_lost;
}

bool session_file_is_lost(const struct session_file *file) {
    return file->is_lost;
}

bool session_files_is_idle(const struct session_files *files) {
    return !files->out && !files->line;
}

void session_files_retry(struct session_files *files) {
    retry_failed(files);
    start_next(files);
}

uint64_t session_files_tick(struct session_files *files) {
    if (files->retry_us != 0 && files->options.now_us() >= files->retry_us)
        session_files_retry(files);
    return files->retry_us;
}

void session_files_stats(const struct session_files *files, struct session_files_stats *ret_stats) {
    *ret_stats = files->stats;
    ret_stats->n_unwritten = 0;
    for (const struct session_file *file = files->first; file; file = file->next)
        ret_stats->n_unwritten += file->state != CLEAN || file->is_lost;
}

/* ---- at start ------------------------------------------------------------------------------------------------------- */

struct loading {
    const struct disk_folder *folder;
    const struct session_names *names;
    int (*each)(void *user, const struct session_record *record);
    void *user;
    struct session_files_found *found;
    struct kv_hasher *hasher;
    uint8_t *buffer; /* [SESSION_RECORD_BYTES_MAX] */
    int result;
};

static void note_bad(struct loading *l, const char *name, int error) {
    struct session_files_found *found = l->found;
    struct session_files_bad *bad;

    found->n_damaged += error == 0;
    found->n_unreadable += error != 0;
    if (found->n_bad == SESSION_FILES_BAD_MAX)
        return;
    bad = &found->bad[found->n_bad++];
    snprintf(bad->name, sizeof bad->name, "%s", name);
    bad->error = error;
}

static void load_one(void *user, const char *name) {
    struct loading *l = user;
    struct session_record record;
    struct file_name own;
    size_t n;
    int r;

    if (l->result != 0 || !is_file_name(name))
        return;
    r = disk_folder_read(l->folder, name, l->buffer, SESSION_RECORD_BYTES_MAX, &n);
    if (r != 0) {
        note_bad(l, name, r);
        return;
    }
    r = session_record_read(l->buffer, n, &record);
    if (r == SESSION_RECORD_E_FOREIGN ||
        (r == 0 && memcmp(record.vocabulary, l->names->vocabulary, sizeof record.vocabulary) != 0)) {
        l->found->n_foreign++;
        return;
    }
    if (r == 0)
        r = name_of(l->hasher, l->names, record.uid, record.name, &own);
    if (r < 0) {
        l->result = r;
    } else if (r != 0 || strcmp(own.text, name) != 0) { /* also a copy under another name */
        note_bad(l, name, 0);
    } else {
        l->found->n_whole++;
        l->result = l->each(l->user, &record);
    }
}

int session_files_load(const struct disk_folder *folder, const struct session_names *names,
                       int (*each)(void *user, const struct session_record *record), void *user,
                       struct session_files_found *ret_found) {
    struct loading l = {.folder = folder, .names = names, .each = each, .user = user, .found = ret_found};
    int r = kv_hasher_new(&l.hasher);

    *ret_found = (struct session_files_found){0};
    l.buffer = malloc(SESSION_RECORD_BYTES_MAX); /* of which only what is read takes memory */
    if (r == 0 && !l.buffer)
        r = -ENOMEM;
    if (r == 0)
        r = disk_folder_list(folder, load_one, &l);
    if (r == 0)
        r = l.result;
    if (r == 0)
        disk_folder_clean(folder);
    kv_hasher_free(l.hasher);
    free(l.buffer);
    return r;
}
