#include "cuts.h"

#include "backend.h"

static int down(int n) {
    return n - n % PAGE_TOKENS;
}

/* Keeps the list ascending; what is no place for a restore point, or is one already, changes nothing. */
static int add(int *cuts, int n, int n_max, int cut) {
    int i = n;

    if (cut <= 0 || n == n_max)
        return n;
    for (int k = 0; k < n; k++)
        if (cuts[k] == cut)
            return n;
    for (; i > 0 && cuts[i - 1] > cut; i--)
        cuts[i] = cuts[i - 1];
    cuts[i] = cut;
    return n + 1;
}

int cuts_find(const struct cuts_prompt *prompt, int *ret_cuts) {
    int last = down(prompt->n - 1), n = 0;
    int64_t distance = CUTS_SPACING_TOKENS;

    n = add(ret_cuts, n, prompt->n_max, last);
    n = add(ret_cuts, n, prompt->n_max, min_int(last, down(prompt->n_head)));
    n = add(ret_cuts, n, prompt->n_max, min_int(last, down(prompt->n_system)));
    if (down(prompt->n) != last)
        n = add(ret_cuts, n, prompt->n_max, prompt->n);
    for (; last - distance > 0; distance = 2 * distance + CUTS_SPACING_TOKENS)
        n = add(ret_cuts, n, prompt->n_max, down((int)(last - distance)));
    return n;
}
