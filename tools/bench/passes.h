/* passes: the target alone at one shape and several contexts: one token, a block of 16 rows, a prefill chunk, a prompt. */
#pragma once

struct rig;
struct rig_shape;

int passes_measure(struct rig *rig, const struct rig_shape *shape); /* 0, or negative errno */
