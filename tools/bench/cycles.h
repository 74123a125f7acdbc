/* cycles: one whole DFlash cycle as the daemon runs it: draft, verify, accept, commit, draft context. With random weights
 * hardly a draft stands; where one id alone may be chosen all of them do. Both are measured: what a cycle costs for the
 * tokens it commits (states and draft context of those rows) lies between them. No restore point is written. */
#pragma once

struct rig;
struct rig_shape;

int cycles_measure(struct rig *rig, const struct rig_shape *shape); /* 0, or negative errno */
