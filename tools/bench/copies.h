/* copies: page images between pinned memory and the device: how near they come to the link, and what they do to who decodes
 * meanwhile, at the least of the contexts. */
#pragma once

struct rig;
struct rig_shape;

int copies_measure(struct rig *rig, const struct rig_shape *shape); /* 0, or negative errno */
