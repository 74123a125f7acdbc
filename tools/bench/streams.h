/* streams: a context of which half does not fit on the device: one token and a block of 16 rows while the pages that are
 * missing come over the link, layer by layer (streamer.h), at the longest of the contexts. Their floor is those bytes over
 * the link; the same pass with all pages on the device says that the bits are the same. */
#pragma once

struct rig;
struct rig_shape;

int streams_measure(struct rig *rig, const struct rig_shape *shape); /* 0, or negative errno */
