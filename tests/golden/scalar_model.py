"""The target network written plainly from its specification: one pass over a whole list of ids, no cache, no chunks."""
from dataclasses import dataclass

import numpy as np

import rounding
from checkpoint import Checkpoint
from scalar_ops import (Points, Rope, add_residual, attention, f64, linear, rms_norm, sigmoid, silu, softmax, swiglu)

L2_EPS = 1e-6


@dataclass
class Pass:
    logits: np.ndarray    # [T, V]
    hidden: np.ndarray    # [L + 1, T, H]: embeddings, then the residual stream after each layer
    routing: np.ndarray   # [L, T, k] chosen experts by falling probability; k = 0 for dense models


class Target:
    def __init__(self, folder, numeric="reference", kv_dtype="f32"):
        self.points = Points.of(numeric, kv_dtype)
        self.weights = Checkpoint(folder)
        self.config = self.weights.config.get("text_config", self.weights.config)
        nested = "text_config" in self.weights.config
        self.prefix = "model.language_model." if nested else "model."
        self.eps = self.config["rms_norm_eps"]
        rope = self.config["rope_parameters"]
        self.rope = Rope(int(self.config["head_dim"] * rope["partial_rotary_factor"]), rope["rope_theta"])

    # ---- what the drafter borrows

    def embed(self, ids):
        return self.points.act(self.weights[self.prefix + "embed_tokens.weight"][ids])

    def head(self, h):
        """Logits of rows that went through the final norm and are rounded already."""
        matrix = self.weights.get("lm_head.weight")
        if matrix is None:
            matrix = self.weights[self.prefix + "embed_tokens.weight"]
        return linear(h, matrix)

    # ---- the network

    def run(self, ids, forced=None):
        """forced [L, T, k]: experts to take in place of those that this model would choose."""
        x = self.embed(ids)
        hidden, routing = [x], []
        for i, kind in enumerate(self.config["layer_types"]):
            layer = f"{self.prefix}layers.{i}."
            mixer = self._full_attention if kind == "full_attention" else self._delta_net
            x = add_residual(self.points, x, mixer(layer, self._norm(x, layer + "input_layernorm.weight")))
            h = self._norm(x, layer + "post_attention_layernorm.weight")
            if "num_experts" in self.config:
                y, chosen = self._experts(layer + "mlp.", h, None if forced is None else forced[i])
            else:
                y, chosen = self._mlp(layer + "mlp.", h), np.zeros((len(ids), 0), np.int32)
            x = add_residual(self.points, x, y)
            hidden.append(x)
            routing.append(chosen)
        logits = self.head(self._norm(x, self.prefix + "norm.weight"))
        return Pass(logits, np.stack(hidden), np.stack(routing))

    def _norm(self, x, name):
        return self.points.act(rms_norm(x, 1 + f64(self.weights[name]), self.eps))

    def _linear(self, h, name):
        return linear(h, self.weights[name])

    def _full_attention(self, layer, h):
        act, kv, c = self.points.act, self.points.kv, self.config
        name = layer + "self_attn."
        n_tokens, dim = len(h), c["head_dim"]
        positions = np.arange(n_tokens)
        query_gate = act(self._linear(h, name + "q_proj.weight")).reshape(n_tokens, c["num_attention_heads"], 2 * dim)
        k = act(self._linear(h, name + "k_proj.weight")).reshape(n_tokens, c["num_key_value_heads"], dim)
        v = act(self._linear(h, name + "v_proj.weight")).reshape(n_tokens, c["num_key_value_heads"], dim)
        q, gate = query_gate[..., :dim], query_gate[..., dim:]
        q = act(self.rope(self._head_norm(q, name + "q_norm.weight"), positions))
        k = kv(self.rope(self._head_norm(k, name + "k_norm.weight"), positions))
        causal = positions[None, :] <= positions[:, None]
        out = act(attention(q, k, kv(v), causal) * sigmoid(gate))
        return self._linear(out.reshape(n_tokens, -1), name + "o_proj.weight")

    def _head_norm(self, x, name):
        return rms_norm(x, 1 + f64(self.weights[name]), self.eps)

    def _delta_net(self, layer, h):
        act, c = self.points.act, self.config
        name = layer + "linear_attn."
        n_tokens, n_k, n_v = len(h), c["linear_num_key_heads"], c["linear_num_value_heads"]
        dim_k, dim_v = c["linear_key_head_dim"], c["linear_value_head_dim"]
        z = act(self._linear(h, name + "in_proj_z.weight")).reshape(n_tokens, n_v, dim_v)
        b, a = self._linear(h, name + "in_proj_b.weight"), self._linear(h, name + "in_proj_a.weight")
        mixed = self._conv(act(self._linear(h, name + "in_proj_qkv.weight")), name + "conv1d.weight")
        q, k, v = np.split(mixed, [n_k * dim_k, 2 * n_k * dim_k], axis=1)
        q = l2_norm(q.reshape(n_tokens, n_k, dim_k)) / np.sqrt(dim_k)
        k = l2_norm(k.reshape(n_tokens, n_k, dim_k))
        beta = rounding.f32(sigmoid(b))
        rate = f64(rounding.f32(-np.exp(f64(self.weights[name + "A_log"]))))
        g = rounding.f32(rate * softplus(a + f64(self.weights[name + "dt_bias"])))
        group = n_v // n_k
        o = act(delta_rule(q.repeat(group, 1), k.repeat(group, 1), v.reshape(n_tokens, n_v, dim_v), g, beta))
        gate = {"silu": silu, "swish": silu, "sigmoid": sigmoid}[c.get("output_gate_type", "silu")]
        y = act(rms_norm(o, self.weights[name + "norm.weight"], self.eps) * gate(z))
        return self._linear(y.reshape(n_tokens, -1), name + "out_proj.weight")

    def _conv(self, m, name):
        """Causal depthwise convolution from an empty past, then SiLU. The last tap multiplies the current token."""
        w = f64(self.weights[name])[:, 0, :]
        taps = w.shape[1]
        past = np.concatenate([np.zeros((taps - 1, m.shape[1])), f64(m)])
        total = sum(w[:, j] * past[j:j + len(m)] for j in range(taps))
        return self.points.act(silu(total))

    def _mlp(self, name, h):
        w = self.weights
        inner = swiglu(self.points, h, w[name + "gate_proj.weight"], w[name + "up_proj.weight"])
        return self._linear(inner, name + "down_proj.weight")

    def _experts(self, name, h, forced):
        c, w = self.config, self.weights
        p = softmax(f64(self._linear(h, name + "gate.weight")))
        chosen = forced
        if forced is None:
            chosen = np.argsort(-p, axis=1, kind="stable")[:, :c["num_experts_per_tok"]]
        share = np.take_along_axis(p, chosen, 1)
        share /= share.sum(1, keepdims=True)
        y = np.zeros(h.shape)
        for t, row in enumerate(h):
            for expert, part in zip(chosen[t], share[t]):
                gate, up = np.split(w[name + "experts.gate_up_proj"][expert], 2)
                inner = swiglu(self.points, row, gate, up)
                y[t] += part * f64(linear(inner, w[name + "experts.down_proj"][expert]))
        y += sigmoid(self._linear(h, name + "shared_expert_gate.weight")) * self._mlp(name + "shared_expert.", h)
        return y, chosen.astype(np.int32)


def l2_norm(x):
    x = f64(x)
    return x / np.sqrt((x * x).sum(-1, keepdims=True) + L2_EPS)


def softplus(x):
    return np.where(x > 20, x, np.log1p(np.exp(np.minimum(x, 20))))


def delta_rule(q, k, v, g, beta):
    """Gated delta rule from an empty state, token by token. S [heads, Dv, Dk] is stored as float32 after every token, and
    the query reads what was stored."""
    n_tokens, n_heads, dim_v = v.shape
    state = np.zeros((n_heads, dim_v, k.shape[2]), np.float32)
    out = np.empty((n_tokens, n_heads, dim_v))
    for t in range(n_tokens):
        decayed = np.exp(f64(g[t]))[:, None, None] * state
        read = np.einsum("hvk,hk->hv", decayed, k[t])
        update = f64(beta[t])[:, None] * (v[t] - read)
        state = rounding.f32(decayed + update[:, :, None] * k[t][:, None, :])
        out[t] = np.einsum("hvk,hk->hv", f64(state), q[t])
    return out
