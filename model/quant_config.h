/* quant_config: what quantization_config says. One scheme is implemented: e4m3 weights with a scale per 128x128 block.
 * Internal to the config readers. */
#pragma once
#include "config_file.h"

/* False without the key; any other scheme is refused by name. Which tensors are quantised, the tensors say. */
bool quant_config_is_fp8(const struct config_object *o);
