"""The drafter written plainly from its specification: every block recomputes its whole context from the target's taps."""
import numpy as np

import rounding
from checkpoint import Checkpoint
from scalar_ops import Points, Rope, add_residual, attention, f64, linear, rms_norm, swiglu

CAUSAL_BY_NAME = {"yes": True, "no": False}


def rope_theta(config):
    """rope_parameters, then the top level."""
    return config["rope_parameters"].get("rope_theta", config.get("rope_theta"))


class Draft:
    def __init__(self, folder, target, numeric="reference", kv_dtype="f32", causal="auto", block=None):
        self.points = Points.of(numeric, kv_dtype)
        self.weights = Checkpoint(folder)
        self.config = c = self.weights.config
        self.target = target
        self.eps = c["rms_norm_eps"]
        self.rope = Rope(c["head_dim"], rope_theta(c))
        self.block = block or c["block_size"]
        self.taps = c["dflash_config"]["target_layer_ids"]
        self.mask_id = c["dflash_config"]["mask_token_id"]
        configured = c.get("is_causal", c["dflash_config"].get("causal", True))
        self.sliding_causal = CAUSAL_BY_NAME.get(causal, configured)

    def context(self, hidden):
        """[n_positions, H] context features from the target's residual stream, hidden[i + 1] being layer i's output.
        The float32 sum over the taps grows in the order in which the layers run, not in the order of the list."""
        width = self.config["hidden_size"]
        fc = self.weights["fc.weight"]
        total = np.zeros((hidden.shape[1], width), np.float32)
        for layer in sorted(self.taps):
            i = self.taps.index(layer)
            total = rounding.f32(f64(total) + linear(hidden[layer + 1], fc[:, i * width:(i + 1) * width]))
        return self.points.act(rms_norm(total, self.weights["hidden_norm.weight"], self.eps))

    def logits(self, ids, hidden, anchor):
        """[block, V]: the block whose first row is ids[anchor] at position `anchor`, over the context before it."""
        context = self.context(hidden[:, :anchor])
        rows = np.full(self.block, self.mask_id)
        rows[0] = ids[anchor]
        x = self.target.embed(rows)
        for i, kind in enumerate(self.config["layer_types"]):
            layer = f"layers.{i}."
            h = self._norm(x, layer + "input_layernorm.weight")
            x = add_residual(self.points, x, self._attention(layer + "self_attn.", kind, h, context))
            h = self._norm(x, layer + "post_attention_layernorm.weight")
            x = add_residual(self.points, x, self._mlp(layer + "mlp.", h))
        return self.target.head(self._norm(x, "norm.weight"))

    def visible(self, kind, n_context):
        """[block, n_context + block] by brute force over the visibility table."""
        table = np.zeros((self.block, n_context + self.block), bool)
        for row in range(self.block):
            for key in range(n_context + self.block):
                table[row, key] = self._sees(kind, n_context + row, key, n_context)
        return table

    def _sees(self, kind, query, key, n_context):
        if kind == "full_attention":
            return True
        in_window = query - key < self.config["sliding_window"]
        in_context = key < n_context
        return in_window and (in_context or not self.sliding_causal or key <= query)

    def _norm(self, x, name):
        return self.points.act(rms_norm(x, self.weights[name], self.eps))

    def _project(self, h, name):
        return linear(h, self.weights[name + ".weight"], self.weights.get(name + ".bias"))

    def _key(self, k, name, positions):
        k = k.reshape(len(positions), self.config["num_key_value_heads"], self.config["head_dim"])
        return self.rope(rms_norm(k, self.weights[name + "k_norm.weight"], self.eps), positions)

    def _attention(self, name, kind, h, context):
        act, kv, c = self.points.act, self.points.kv, self.config
        n_context, dim = len(context), c["head_dim"]
        before, here = np.arange(n_context), n_context + np.arange(self.block)
        k_context = kv(self._key(self._project(context, name + "k_proj"), name, before))
        v_context = kv(self._project(context, name + "v_proj"))
        k_block = act(self._key(act(self._project(h, name + "k_proj")), name, here))
        v_block = act(self._project(h, name + "v_proj"))
        q = act(self._project(h, name + "q_proj")).reshape(self.block, c["num_attention_heads"], dim)
        q = act(self.rope(rms_norm(q, self.weights[name + "q_norm.weight"], self.eps), here))
        v = np.concatenate([v_context, v_block]).reshape(-1, c["num_key_value_heads"], dim)
        out = attention(q, np.concatenate([k_context, k_block]), v, self.visible(kind, n_context))
        return self._project(act(out).reshape(self.block, -1), name + "o_proj")

    def _mlp(self, name, h):
        w = self.weights
        inner = swiglu(self.points, h, w[name + "gate_proj.weight"], w[name + "up_proj.weight"])
        return linear(inner, w[name + "down_proj.weight"])
