/* cycles: one whole DFlash cycle as the daemon runs it: draft, verify, accept, commit, draft context. With random weights
 * few drafts stand; where one id alone may be chosen, all do. There a cycle is also measured that ends with its first token:
 * the difference is what the other rows cost to commit, their states and their draft context, and that is added for
 * a simulated number of tokens. No restore point is written. */
#pragma once

struct rig;
struct rig_shape;

int cycles_measure(struct rig *rig, const struct rig_shape *shape); /* 0, or negative errno */
