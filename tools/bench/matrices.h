/* matrices: single matrices at the layer shapes of Qwen3.5, from one row to a prefill chunk. */
#pragma once

struct rig;

int matrices_measure(struct rig *rig); /* 0, or negative errno */
