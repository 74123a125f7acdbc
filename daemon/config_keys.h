/* config_keys: THE table of configuration keys: type, range, default, unit and reason of each, and the forms of values.
 * Who adds a key adds a field to struct config, a row here, and regenerates conf/spillway.conf. */
#pragma once
#include "config.h"

enum config_type {
    CONFIG_INT,      /* int */
    CONFIG_BOOL,     /* bool: true, false */
    CONFIG_BYTES,    /* uint64_t: a whole number with KiB, MiB, GiB, TiB or none */
    CONFIG_DURATION, /* int64_t milliseconds: a whole number with ms, s, min or h */
    CONFIG_STRING,   /* char * */
    CONFIG_WORD,     /* int: index of the word */
    CONFIG_MODE,     /* int: octal permission bits */
};

struct config_key {
    const char *section, *name;
    enum config_type type;
    size_t offset;            /* in struct config */
    const char *fallback;     /* the built-in value as text */
    uint64_t min, max;        /* numbers; a string's bytes */
    int multiple;             /* numbers are multiples of this; 0: any */
    const char *const *words; /* CONFIG_WORD: allowed values, ends with NULL */
    bool at_run_time;         /* may change on reload */
    const char *unit, *doc;   /* unit NULL: none */
};

extern const struct config_key config_keys[];
extern const int config_n_keys;

/* NULL if there is no such key. */
const struct config_key *config_key_find(const char *section, const char *name);
/* A known key whose name is close to this one, or that has this name in another section; NULL if none is close. */
const struct config_key *config_key_near(const char *section, const char *name);
/* A known section close to this name, or NULL. */
const char *config_section_near(const char *section);
bool config_section_is_known(const char *section);

/* Puts the value that the text says into the key's field. -EINVAL: it is none, the field is as before; -ENOMEM. */
int config_value_read(const struct config_key *key, const char *text, struct config *config);
/* Writes the field's value in the form that config_value_read reads. */
void config_value_write(const struct config_key *key, const struct config *config, struct text *out);
bool config_value_equal(const struct config_key *key, const struct config *a, const struct config *b);
void config_value_copy(const struct config_key *key, const struct config *from, struct config *to); /* no strings */
/* What the key allows, as words: "a whole number from 1 to 512". */
void config_value_allowed(const struct config_key *key, char *ret_words, size_t n);

/* Takes the pairs of one file's text over the values that are there. For config_load and for tests of the form. */
int config_take_text(struct config *config, const char *file, const char *bytes, size_t n, struct report *report);
