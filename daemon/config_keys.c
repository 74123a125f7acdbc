#include "config_keys.h"

#include <assert.h>
#include <limits.h>
#include <stddef.h>
#include <string.h>

#include "base.h"
#include "config_parse.h"

#define KIB (UINT64_C(1) << 10)
#define MIB (UINT64_C(1) << 20)
#define GIB (UINT64_C(1) << 30)
#define TIB (UINT64_C(1) << 40)

enum { PATH_BYTES_MAX = 4000, SOCKET_BYTES_MAX = 107 /* sun_path holds 108 with its zero */ };

static const char *const backend_words[] = {"auto", "cpu", "cuda", NULL};
static const char *const numeric_words[] = {"fast", "bf16", "reference", NULL};
static const char *const load_words[] = {"safetensors", "dummy", NULL};
static const char *const causal_words[] = {"auto", "yes", "no", NULL};
static const char *const dtype_words[] = {"auto", "f32", "bf16", "fp16", "e4m3", NULL};
static const char *const restore_words[] = {"auto", "always", "never", NULL};
static const char *const level_words[] = {"error", "warn", "info", "debug", NULL};

#define FIELD(field) .offset = offsetof(struct config, field)

const struct config_key config_keys[] = {
    {"server", "socket", CONFIG_STRING, FIELD(server.socket), "/run/spillway/spillway.sock", 1, SOCKET_BYTES_MAX,
     .unit = "path", .doc = "Where clients connect. Not used when the service manager hands over a socket."},
    {"server", "socket_mode", CONFIG_MODE, FIELD(server.socket_mode), "0660", 0600, 0777, .unit = "permission bits",
     .doc = "Who may connect: write permission is what counts. 0660 lets in the group of the daemon."},
    {"server", "backlog", CONFIG_INT, FIELD(server.backlog), "128", 1, 4096, .unit = "connections",
     .doc = "How many connections may wait to be accepted; the kernel refuses more."},
    {"server", "drain_timeout", CONFIG_DURATION, FIELD(server.drain_timeout_ms), "30s", 0, 86400000,
     .at_run_time = true, .unit = "duration",
     .doc =
         "How long running requests may go on after SIGTERM or server.drain. What is left then ends with the finish\n"
         "reason shutdown. With a disk tier the last quarter of it, 5s at most, is for putting sessions on disk. The\n"
         "service manager's stop timeout must be longer."},
    {"server", "slow_timeout", CONFIG_DURATION, FIELD(server.slow_timeout_ms), "30s", 100, 3600000, .unit = "duration",
     .doc =
         "How long a client may leave more than output_high unread. Its requests are parked meanwhile and cancelled\n"
         "with the finish reason slow_client after it."},
    {"server", "output_high", CONFIG_BYTES, FIELD(server.output_high), "1MiB", 64 * KIB, 256 * MIB, .unit = "bytes",
     .doc = "Unread output of one connection above which its requests are parked and its socket is no longer read."},
    {"server", "output_low", CONFIG_BYTES, FIELD(server.output_low), "256KiB", 0, 256 * MIB, .unit = "bytes",
     .doc = "Unread output at which a parked connection goes on. Less than output_high, so that it does not flap."},

    {"model", "path", CONFIG_STRING, FIELD(model.path), SHARE "/tiny/target", 1, PATH_BYTES_MAX, .unit = "path",
     .doc = "Folder of the model: config.json, tokenizer.json and safetensors of a published Qwen3.5 checkpoint. The\n"
            "built-in one is a tiny model that shows that everything works and knows little."},
    {"model", "backend", CONFIG_WORD, FIELD(model.backend), "auto", .words = backend_words,
     .doc = "Which device computes. auto: a GPU if this build knows it and one is there, else the CPU. A GPU that is\n"
            "asked for and missing is an error, never a silent change to the CPU."},
    {"model", "numeric", CONFIG_WORD, FIELD(model.numeric), "fast", .words = numeric_words,
     .doc = "Rounding on the CPU. fast: fp32 with bf16 inputs of matrix products. bf16: rounds where the GPU does, "
            "slowly,\n"
            "to compare with it. reference: everything in fp32, slowly."},
    {"model", "threads", CONFIG_INT, FIELD(model.threads), "0", 0, 1024, .unit = "threads",
     .doc = "Threads that compute on the CPU. 0: one for each physical core. Results do not depend on it."},
    {"model", "load_format", CONFIG_WORD, FIELD(model.load_format), "safetensors", .words = load_words,
     .doc = "dummy makes up random weights for the config.json files alone: for measuring, the text means nothing."},

    {"draft", "path", CONFIG_STRING, FIELD(draft.path), SHARE "/tiny/draft", 0, PATH_BYTES_MAX, .unit = "path",
     .doc = "Folder of the DFlash drafter trained for this model. Empty: none, one token a pass. Where model.path is "
            "given\n"
            "and this is not, there is none: the built-in drafter fits the built-in model alone."},
    {"draft", "block_size", CONFIG_INT, FIELD(draft.block_size), "0", 0, 16, .unit = "rows",
     .doc = "Rows of a block: one known token and what is drafted after it, all verified in one pass. 0: what the "
            "drafter\n"
            "was trained for, which is also the most."},
    {"draft", "causal", CONFIG_WORD, FIELD(draft.causal), "auto", .words = causal_words,
     .doc =
         "Whether rows of a block see only earlier rows, in the drafter's sliding layers. auto: what its config.json\n"
         "says, else yes. Only for checkpoints whose config.json is wrong."},
    {"draft", "fallback", CONFIG_BOOL, FIELD(draft.fallback), "true",
     .doc =
         "Whether a request whose drafts are mostly rejected goes on without them, and tries again later. What a pass\n"
         "with drafts costs beside one without is measured at start. The text is the same either way."},

    {"kv", "device_bytes", CONFIG_BYTES, FIELD(kv.device_bytes), "1GiB", MIB, 64 * TIB, .unit = "bytes",
     .doc = "Device memory for everything that grows with tokens and sequences: pages of all groups, live states, "
            "restore\n"
            "points. Weights and work buffers come on top. --plan prints what becomes of it."},
    {"kv", "host_bytes", CONFIG_BYTES, FIELD(kv.host_bytes), "0", 0, 64 * TIB, .unit = "bytes",
     .doc =
         "Host memory that keeps what leaves the device, and the pages of a sequence that is longer than the device\n"
         "holds: they are read from there in every step. 0: none."},
    {"kv", "disk_path", CONFIG_STRING, FIELD(kv.disk_path), "", 0, PATH_BYTES_MAX, .unit = "path",
     .doc =
         "Folder that keeps what leaves host memory, and sessions over restarts. It is made with mode 0700 if only "
         "its\n"
         "last part is missing; one daemon at a time may use it, and it must be on a local file system. Empty: none."},
    {"kv", "disk_bytes", CONFIG_BYTES, FIELD(kv.disk_bytes), "0", 0, 1024 * TIB, .unit = "bytes",
     .doc =
         "How much of the disk may be filled: 0 for no disk tier, else 256MiB or more. kv.disk_path says where; what\n"
         "goes there passes through kv.host_bytes, which must not be 0 then."},
    {"kv", "dtype", CONFIG_WORD, FIELD(kv.dtype), "auto", .words = dtype_words,
     .doc = "Element type of the model's keys and values. auto: bf16, and f32 where model.numeric is reference. f32 "
            "exists\n"
            "on the CPU only. e4m3 holds twice the tokens of bf16 and is less exact."},
    {"kv", "draft_dtype", CONFIG_WORD, FIELD(kv.draft_dtype), "auto", .words = dtype_words,
     .doc = "The same for the drafter; it can change how much of a draft is accepted, never the text."},
    {"kv", "restore", CONFIG_WORD, FIELD(kv.restore), "auto", .words = restore_words,
     .doc = "Whether pages of lower tiers are read back (always), computed again (never), or what is faster (auto)."},
    {"kv", "disk_min_tokens", CONFIG_INT, FIELD(kv.disk_min_tokens), "2048", 0, 1 << 24, .unit = "tokens",
     .doc = "Shorter prefixes are not written to disk, unless a session is parked: computing them again is as fast."},
    {"kv", "disk_write_bytes_per_day", CONFIG_BYTES, FIELD(kv.disk_write_bytes_per_day), "0", 0, 1024 * TIB,
     .unit = "bytes",
     .doc =
         "What a day may write to the disk, so that it lasts; unused bytes of a day are not saved up. Beyond it only\n"
         "parked sessions and the end of the daemon write. 0: no limit."},
    {"kv", "disk_timeout", CONFIG_DURATION, FIELD(kv.disk_timeout_ms), "10s", 100, 3600000, .unit = "duration",
     .doc = "How long one read or write may take. What is later counts as failed: its pages are computed again, and a\n"
            "disk that goes on like that is left alone for a while."},
    {"kv", "restore_points", CONFIG_INT, FIELD(kv.restore_points), "8", 0, 256, .unit = "states",
     .doc = "How many restore points one sequence may keep: the places from which a later request with the same "
            "beginning\n"
            "goes on. 0: every request computes its whole prompt."},
    {"kv", "shared_prefixes", CONFIG_BOOL, FIELD(kv.shared_prefixes), "false",
     .doc = "Whether requests of different users may reuse each other's prefixes. Times then tell a user what others "
            "have\n"
            "asked; with false, each user has a cache of his own."},
    {"kv", "share_per_uid", CONFIG_INT, FIELD(kv.share_per_uid), "25", 0, 100, .unit = "percent",
     .doc =
         "What each user keeps of the pages and restore points of a tier, whatever others do: so much of it, and no "
         "more\n"
         "than an equal part if there are many users. What a user has beyond it leaves for others as it grows old. 0:\n"
         "nobody keeps anything. On the device it is who leaves first; a running request takes what it needs. The "
         "pinned\n"
         "sessions of one user hold no more than so much of the device; with 0, half of it, which is what those of all "
         "hold."},
    {"kv", "scrub_bytes_per_second", CONFIG_BYTES, FIELD(kv.scrub_bytes_per_second), "4MiB", 0, GIB, .unit = "bytes",
     .doc = "While nobody asks for anything, so much of what lies on disk and in host memory is read and held against "
            "its\n"
            "checksums, each page once a day at most; what is damaged is forgotten before it is asked for. 0: none."},
    {"kv", "warm_up", CONFIG_INT, FIELD(kv.warm_up), "25", 0, 100, .unit = "percent",
     .doc =
         "How much of host memory is filled from disk after a start, with the prefixes that were written last, while\n"
         "nobody asks for anything. 0: each prefix is read when it is asked for."},

    {"sched", "max_seqs", CONFIG_INT, FIELD(sched.max_seqs), "32", 1, 1024, .unit = "sequences",
     .doc =
         "How many requests run at a time; others wait. Lowered with a notice if their states would take more than a\n"
         "quarter of kv.device_bytes."},
    {"sched", "max_batch_tokens", CONFIG_INT, FIELD(sched.max_batch_tokens), "512", 64, 65536, .multiple = 64,
     .unit = "tokens", .doc = "Prompt tokens of one pass, over all sequences. Sizes the work buffers."},
    {"sched", "prefill_chunk", CONFIG_INT, FIELD(sched.prefill_chunk), "512", 64, 65536, .multiple = 64,
     .unit = "tokens",
     .doc = "Prompt tokens of one sequence in one pass. Smaller: running answers pause less while a long prompt comes "
            "in;\n"
            "larger: the prompt is done earlier. Results do not depend on it."},
    {"sched", "queue_max", CONFIG_INT, FIELD(sched.queue_max), "256", 0, 65536, .at_run_time = true, .unit = "requests",
     .doc = "How many requests may wait for one of the places of max_seqs; more are refused with BUSY. 0: none may."},

    {"limits", "max_context", CONFIG_INT, FIELD(limits.max_context), "0", 0, 1 << 24, .unit = "tokens",
     .doc = "Longest prompt and answer together. 0: what the model was made for, or less if kv.device_bytes and\n"
            "kv.host_bytes together cannot hold one such sequence. A number that cannot be held is refused at start."},
    {"limits", "connections", CONFIG_INT, FIELD(limits.connections), "256", 1, 16384, .unit = "connections",
     .doc = "Open connections of all clients; more are answered with BUSY and closed. Each takes a descriptor."},
    {"limits", "requests", CONFIG_INT, FIELD(limits.requests), "64", 1, 4096, .unit = "requests",
     .doc = "Unanswered requests of one connection, after which its socket is not read until one is answered."},
    {"limits", "requests_per_uid", CONFIG_INT, FIELD(limits.requests_per_uid), "0", 0, 65536, .at_run_time = true,
     .unit = "requests",
     .doc = "Running and waiting generations of one user; more are refused with QUOTA. 0: no limit."},
    {"limits", "sessions_per_uid", CONFIG_INT, FIELD(limits.sessions_per_uid), "256", 0, 65536, .at_run_time = true,
     .unit = "sessions", .doc = "Open sessions of one user; more are refused with QUOTA."},
    {"limits", "session_tokens_per_uid", CONFIG_INT, FIELD(limits.session_tokens_per_uid), "16777216", 0, 1 << 30,
     .at_run_time = true, .unit = "tokens",
     .doc = "Tokens of all sessions of one user together; a turn or fork that would begin above it is refused with "
            "QUOTA.\n"
            "0: no limit."},
    {"limits", "frame_bytes", CONFIG_BYTES, FIELD(limits.frame_bytes), "16MiB", 64 * KIB, 256 * MIB, .unit = "bytes",
     .doc = "Longest message of a client. A longer one is answered with BAD_FRAME and its connection closed."},
    {"limits", "pending_bytes", CONFIG_BYTES, FIELD(limits.pending_bytes), "512MiB", MIB, 64 * GIB, .at_run_time = true,
     .unit = "bytes",
     .doc =
         "Memory of all generations' requests together, running and waiting; more are refused with BUSY. One request\n"
         "alone is always taken."},

    {"log", "level", CONFIG_WORD, FIELD(log.level), "info", .words = level_words, .at_run_time = true,
     .doc = "The least important lines that are written. info has one line for each finished request; none ever holds\n"
            "text of a prompt or an answer."},
};
const int config_n_keys = ARRAY_LEN(config_keys);
static_assert(ARRAY_LEN(config_keys) <= CONFIG_KEYS_MAX, "struct config has an origin for every key");

/* ---- finding ------------------------------------------------------------------------------------------------------ */

const struct config_key *config_key_find(const char *section, const char *name) {
    for (int i = 0; i < config_n_keys; i++)
        if (strcmp(config_keys[i].section, section) == 0 && strcmp(config_keys[i].name, name) == 0)
            return &config_keys[i];
    return NULL;
}

bool config_section_is_known(const char *section) {
    for (int i = 0; i < config_n_keys; i++)
        if (strcmp(config_keys[i].section, section) == 0)
            return true;
    return false;
}

/* Edit distance of two names (insert, delete, replace). Both are shorter than CONFIG_NAME_MAX + 1 bytes. */
static int distance(const char *a, const char *b) {
    int row[CONFIG_NAME_MAX + 1], n = (int)strlen(b);

    for (int j = 0; j <= n; j++)
        row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int diagonal = row[0];

        row[0] = i;
        for (int j = 1; j <= n; j++) {
            int replaced = diagonal + (a[i - 1] != b[j - 1]);

            diagonal = row[j];
            row[j] = min_int(replaced, min_int(row[j], row[j - 1]) + 1);
        }
    }
    return row[n];
}

/* As many slips as a third of the name may hold still count as close. */
static int slips_allowed(const char *name) {
    return max_int((int)strlen(name) / 3, 1);
}

const struct config_key *config_key_near(const char *section, const char *name) {
    const struct config_key *near = NULL;
    int least = INT_MAX;

    for (int i = 0; i < config_n_keys; i++) {
        int slips = distance(name, config_keys[i].name);
        int score = 2 * slips + (strcmp(config_keys[i].section, section) != 0);

        if (slips <= slips_allowed(name) && score < least) {
            least = score;
            near = &config_keys[i];
        }
    }
    return near;
}

const char *config_section_near(const char *section) {
    const char *near = NULL;
    int least = slips_allowed(section) + 1;

    for (int i = 0; i < config_n_keys; i++) {
        int slips = distance(section, config_keys[i].section);

        if (slips < least) {
            least = slips;
            near = config_keys[i].section;
        }
    }
    return near;
}
