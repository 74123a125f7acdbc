/* vault_folder: the files that the folder has before the disk is opened: which size segments have, how many there are, and
 * which files go because they can be of no use. Blocks; for open. */
#include <errno.h>
#include <string.h>

#include "vault_internal.h"

enum {
    SIZES = 8,         /* of segments: FORMAT_SEGMENT_BYTES_MIN << 0 .. 7 */
    FEWEST = 8,        /* segments with which a store works well enough to keep their size */
    MOST = 4096,       /* the same */
    NUMBER_MAX = 65536 /* of a file that is kept: what is beyond came from elsewhere */
};

struct survey {
    struct kv_vault *vault;
    uint32_t n[SIZES], last[SIZES]; /* files of that size; the highest number of one */
    uint64_t n_slots[SIZES];        /* in them */
};

static uint64_t bytes_of(int size) {
    return (uint64_t)FORMAT_SEGMENT_BYTES_MIN << size;
}

/* SIZES: none of these. */
static int size_of(uint64_t bytes) {
    int size = 0;

    while (size < SIZES && bytes_of(size) != bytes)
        size++;
    return size;
}

enum whose { OURS, NOBODYS, OTHERS };

/* ret_head: of one of ours. */
static enum whose whose_is(const struct kv_vault *vault, uint32_t segment, uint64_t *ret_bytes,
                           struct format_segment *ret_head) {
    uint8_t block[FORMAT_BLOCK_BYTES];
    int r = disk_segment_peek(vault->options.folder, segment, block, sizeof block, ret_bytes);

    if (r != 0)
        return OTHERS;
    r = format_segment_read(block, ret_head);
    if (r == FORMAT_E_FREE || r == FORMAT_E_BAD)
        return NOBODYS;
    return r == 0 && memcmp(ret_head->store_id, vault->options.store_id, sizeof ret_head->store_id) == 0 ? OURS
                                                                                                         : OTHERS;
}

static void count(void *user, const char *name) {
    struct survey *survey = user;
    struct format_segment head;
    uint32_t segment;
    uint64_t bytes;
    int size;

    if (!disk_segment_parse(name, &segment) || segment >= NUMBER_MAX ||
        whose_is(survey->vault, segment, &bytes, &head) != OURS)
        return;
    size = size_of(bytes);
    if (size == SIZES)
        return;
    survey->n[size]++;
    survey->n_slots[size] += (head.segment_bytes - head.first_offset) / head.slot_bytes;
    if (survey->last[size] < segment)
        survey->last[size] = segment;
}

static void remove_useless(void *user, const char *name) {
    const struct kv_vault *vault = user;
    struct format_segment head;
    uint32_t segment;
    uint64_t bytes;

    if (disk_segment_parse(name, &segment) && whose_is(vault, segment, &bytes, &head) != OTHERS &&
        (bytes != vault->segment_bytes || segment >= vault->n_segments_max))
        disk_folder_remove(vault->options.folder, name); /* or it stays, and its number is left alone */
}

int vault_survey(struct kv_vault *vault) {
    uint64_t disk_bytes = vault->options.disk_bytes;
    struct survey survey = {.vault = vault};
    int r, kept = size_of(segment_bytes_for(disk_bytes));

    disk_folder_clean(vault->options.folder); /* a file that a crash left half made would take space beyond the cap */
    r = disk_folder_list(vault->options.folder, count, &survey);
    if (r != 0)
        return r;
    for (int size = 0; size < SIZES; size++)
        if (survey.n[size] * bytes_of(size) > survey.n[kept] * bytes_of(kept) &&
            disk_bytes / bytes_of(size) >= FEWEST && disk_bytes / bytes_of(size) <= MOST)
            kept = size;
    vault->segment_bytes = (uint32_t)bytes_of(kept);
    vault->n_slots_found = survey.n_slots[kept];
    vault->n_segments_max = (uint32_t)(disk_bytes / vault->segment_bytes);
    if (vault->n_segments_max > 0 && survey.n[kept] > 0 && survey.last[kept] >= vault->n_segments_max)
        vault->n_segments_max = survey.last[kept] + 1; /* until those beyond the cap are gone */
    return vault->n_segments_max > 0 ? disk_folder_list(vault->options.folder, remove_useless, vault) : -EINVAL;
}

static void mark(void *user, const char *name) {
    struct kv_vault *vault = user;
    uint32_t segment;

    if (disk_segment_parse(name, &segment) && segment < vault->n_segments_max &&
        !disk_segment_exists(vault->disk, segment))
        segment_found_foreign(vault->segments, segment);
}

int vault_mark_strangers(struct kv_vault *vault) {
    return disk_folder_list(vault->options.folder, mark, vault);
}
