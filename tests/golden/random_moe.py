"""A MoE checkpoint of random weights in FP8 with sizes that are no powers of two: three of sixteen experts, experts apart."""
import numpy as np

from checkpoint import write_checkpoint

HIDDEN, N_EXPERTS, TOP_K, WIDTH, SHARED_WIDTH, VOCAB = 192, 16, 3, 64, 192, 512
N_HEADS, N_KV_HEADS, HEAD_DIM = 2, 1, 256
N_K_HEADS, N_V_HEADS, GDN_DIM, TAPS = 2, 4, 128, 4
LAYERS = ("linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention")

CONFIG = {
    "architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "dtype": "bfloat16",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "num_hidden_layers": len(LAYERS), "layer_types": list(LAYERS),
    "num_attention_heads": N_HEADS, "num_key_value_heads": N_KV_HEADS, "head_dim": HEAD_DIM, "attention_bias": False,
    "linear_num_key_heads": N_K_HEADS, "linear_num_value_heads": N_V_HEADS, "linear_key_head_dim": GDN_DIM,
    "linear_value_head_dim": GDN_DIM, "linear_conv_kernel_dim": TAPS, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "num_experts": N_EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": WIDTH,
    "shared_expert_intermediate_size": SHARED_WIDTH, "tie_word_embeddings": False, "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}, "eos_token_id": 1,
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                            "weight_block_size": [128, 128]},
}


class Maker:
    """Collects tensors; the spread of each kind is that of the stored reference checkpoints (make_golden.py)."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.tensors = {}

    def matrix(self, name, n_rows, n_cols, dtype="F8_E4M3"):
        self.tensors[name + ".weight"] = dtype, self.rng.normal(0, 1.6 / n_cols**0.5, (n_rows, n_cols))

    def vector(self, name, n, mean=0.0, spread=0.1, dtype="BF16"):
        self.tensors[name] = dtype, self.rng.normal(mean, spread, n)

    def gated(self, name, width):
        self.matrix(name + "gate_proj", width, HIDDEN)
        self.matrix(name + "up_proj", width, HIDDEN)
        self.matrix(name + "down_proj", HIDDEN, width)

    def full_attention(self, name):
        self.matrix(name + "q_proj", 2 * N_HEADS * HEAD_DIM, HIDDEN)
        self.matrix(name + "k_proj", N_KV_HEADS * HEAD_DIM, HIDDEN)
        self.matrix(name + "v_proj", N_KV_HEADS * HEAD_DIM, HIDDEN)
        self.matrix(name + "o_proj", HIDDEN, N_HEADS * HEAD_DIM)
        self.vector(name + "q_norm.weight", HEAD_DIM)
        self.vector(name + "k_norm.weight", HEAD_DIM)

    def delta_net(self, name):
        conv_dim = (2 * N_K_HEADS + N_V_HEADS) * GDN_DIM
        self.matrix(name + "in_proj_qkv", conv_dim, HIDDEN)
        self.matrix(name + "in_proj_z", N_V_HEADS * GDN_DIM, HIDDEN)
        self.matrix(name + "in_proj_a", N_V_HEADS, HIDDEN, "BF16")
        self.matrix(name + "in_proj_b", N_V_HEADS, HIDDEN, "BF16")
        self.matrix(name + "out_proj", HIDDEN, N_V_HEADS * GDN_DIM)
        self.tensors[name + "conv1d.weight"] = "BF16", self.rng.normal(0, 0.4, (conv_dim, 1, TAPS))
        self.tensors[name + "A_log"] = "F32", np.log(self.rng.uniform(0.05, 8, N_V_HEADS))
        self.vector(name + "dt_bias", N_V_HEADS, -1.0, 0.5)
        self.vector(name + "norm.weight", GDN_DIM, 1.0, dtype="F32")

    def experts(self, name):
        self.matrix(name + "gate", N_EXPERTS, HIDDEN, "BF16")
        self.matrix(name + "shared_expert_gate", 1, HIDDEN, "BF16")
        self.gated(name + "shared_expert.", SHARED_WIDTH)
        for expert in range(N_EXPERTS):
            self.gated(f"{name}experts.{expert}.", WIDTH)


def write_random_moe(folder, seed):
    maker = Maker(seed)
    maker.tensors["model.embed_tokens.weight"] = "BF16", maker.rng.normal(0, 1, (VOCAB, HIDDEN))
    maker.matrix("lm_head", VOCAB, HIDDEN, "BF16")
    maker.vector("model.norm.weight", HIDDEN)
    for i, kind in enumerate(LAYERS):
        layer = f"model.layers.{i}."
        maker.vector(layer + "input_layernorm.weight", HIDDEN)
        maker.vector(layer + "post_attention_layernorm.weight", HIDDEN)
        if kind == "full_attention":
            maker.full_attention(layer + "self_attn.")
        else:
            maker.delta_net(layer + "linear_attn.")
        maker.experts(layer + "mlp.")
    write_checkpoint(folder, CONFIG, maker.tensors)
