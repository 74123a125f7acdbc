#include "quant_config.h"

bool quant_config_is_fp8(const struct config_object *o) {
    static const char *const methods[] = {"fp8", NULL}, *const formats[] = {"e4m3", NULL},
                             *const schemes[] = {"dynamic", NULL};
    struct config_object q = config_child(o, "quantization_config", "quantization_config.");
    int block[2] = {0};

    if (config_get(o, "compression_config"))
        config_refuse(o->file, "%scompression_config: unsupported quantisation (supported: fp8, blocks of 128x128)",
                      o->prefix);
    if (!q.json)
        return false;
    if (!config_get(&q, "quant_method"))
        config_refuse(o->file, "quantization_config.quant_method is missing");
    config_one_of(&q, "quant_method", methods, "quantisation");
    config_one_of(&q, "fmt", formats, "quantisation format");
    config_one_of(&q, "activation_scheme", schemes, "activation quantisation");
    if (config_ints(&q, "weight_block_size", 2, 1, 1 << 20, block) != 2 || block[0] != 128 || block[1] != 128)
        config_refuse(o->file,
                      "quantization_config.weight_block_size is not [128, 128], the only supported quantisation block");
    return true;
}
