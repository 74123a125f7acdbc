/* What a person reads of a configuration. */
#include "config.h"

#include <stdio.h>
#include <string.h>

#include "config_keys.h"

/* "\n[section]\n" before the first key of each section. */
static void add_section(struct text *out, int i) {
    if (i > 0 && strcmp(config_keys[i].section, config_keys[i - 1].section) == 0)
        return;
    text_add_string(out, i > 0 ? "\n[" : "[");
    text_add_string(out, config_keys[i].section);
    text_add_string(out, "]\n");
}

void config_print(const struct config *config, struct text *out) {
    for (int i = 0; i < config_n_keys; i++) {
        size_t begin;

        add_section(out, i);
        begin = out->n;
        text_add_string(out, config_keys[i].name);
        text_add_string(out, " = ");
        config_value_write(&config_keys[i], config, out);
        do
            text_add_string(out, " ");
        while (out->error == 0 && out->n < begin + 40);
        text_add_string(out, "# ");
        text_add_string(out, config->origin[i]);
        text_add_string(out, "\n");
    }
}

/* Each line of the doc as a comment. */
static void add_doc(struct text *out, const char *doc) {
    while (*doc) {
        size_t n = strcspn(doc, "\n");

        text_add_string(out, "# ");
        text_add(out, doc, n);
        text_add_string(out, "\n");
        doc += n + (doc[n] == '\n');
    }
}

static const char installed_share[] = "/usr/share/spillway"; /* conf/meson.build puts the real one there */
static const char template_head[] =
    "# spillwayd reads this file with --config, then conf.d/*.conf beside it in the order of their names, then --set\n"
    "# section.key=value; what comes later wins. Unknown keys, bad values and a key set twice in one file are errors.\n"
    "# Sizes take KiB MiB GiB TiB, durations ms s min h. A line #key = value is a comment that shows the built-in "
    "value.\n"
    "# spillwayd --check judges a configuration, --print-config shows every value and its origin, --plan the memory.\n"
    "# Keys marked with * are read again on SIGHUP; the others need a restart.\n\n";

/* The built-in paths lead into the folder of the build, so an installed daemon is told where the installed pair is. */
static void add_fallback(struct text *out, const struct config_key *key) {
    bool shared = strncmp(key->fallback, SHARE "/", strlen(SHARE "/")) == 0;

    text_add_string(out, shared ? "" : "#");
    text_add_string(out, key->name);
    text_add_string(out, key->fallback[0] ? " = " : " =");
    text_add_string(out, shared ? installed_share : "");
    text_add_string(out, shared ? key->fallback + strlen(SHARE) : key->fallback);
    text_add_string(out, "\n");
}

void config_print_template(struct text *out) {
    char words[256];

    text_add_string(out, template_head);
    for (int i = 0; i < config_n_keys; i++) {
        const struct config_key *key = &config_keys[i];

        add_section(out, i);
        text_add_string(out, "\n");
        add_doc(out, key->doc);
        text_add_string(out, key->at_run_time ? "# * " : "# ");
        if (key->unit) {
            text_add_string(out, key->unit);
            text_add_string(out, ": ");
        }
        config_value_allowed(key, words, sizeof words);
        text_add_string(out, words);
        text_add_string(out, "\n");
        add_fallback(out, key);
    }
}
