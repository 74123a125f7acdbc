"""The operations that target and drafter share, in float64 from float32 operands, and where their results are rounded.

What a program would keep in memory between two loops is a float32 here too: matrix products, norms of heads before their
rotation, cosines, effective norm factors. BF16 rounding amplifies a difference there into a whole step of the result.
"""
from dataclasses import dataclass
from typing import Callable

import numpy as np

import rounding


@dataclass(frozen=True)
class Points:
    """act rounds a stored activation, kv a cached key or value. All other stored values are float32."""
    act: Callable
    kv: Callable

    @staticmethod
    def of(numeric, kv_dtype):
        act = {"reference": rounding.f32, "bf16": rounding.bf16}[numeric]
        return Points(act, rounding.BY_NAME[kv_dtype])


def f64(x):
    return np.asarray(x, np.float64)


def linear(x, weight, bias=None):
    """x [.., K] times weight [N, K] transposed."""
    y = rounding.f32(f64(x) @ f64(weight).T)
    return y if bias is None else rounding.f32(f64(y) + bias)


def add_residual(points, x, y):
    return points.act(f64(x) + y)


def rms_norm(x, factor, eps):
    """factor: what the normed values are multiplied by, a float32; unrounded."""
    x = f64(x)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + f64(np.float32(eps))) * f64(rounding.f32(factor))


def sigmoid(x):
    return 1 / (1 + np.exp(-f64(x)))


def silu(x):
    return f64(x) * sigmoid(x)


def softmax(x):
    """Over the last axis; entries of -inf get no weight; a row without finite entries yields zeros."""
    top = x.max(-1, keepdims=True)
    e = np.exp(x - np.where(np.isfinite(top), top, 0))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def swiglu(points, h, gate, up):
    return points.act(silu(linear(h, gate)) * linear(h, up))


@dataclass(frozen=True)
class Rope:
    """Rotation of the pairs (i, i + rotary/2) of the first `rotary` dims; frequency and angle are float32 values."""
    rotary: int
    theta: float

    def __call__(self, x, positions):
        """x [T, heads, D], positions [T]; unrounded."""
        half = self.rotary // 2
        inv_freq = rounding.f32(self.theta ** (-np.arange(half, dtype=np.float64) / half))
        angle = f64(rounding.f32(positions)[:, None] * inv_freq)[:, None, :]
        cos, sin = f64(rounding.f32(np.cos(angle))), f64(rounding.f32(np.sin(angle)))
        y = f64(rounding.f32(x))
        a, b = y[..., :half].copy(), y[..., half:self.rotary].copy()
        y[..., :half] = a * cos - b * sin
        y[..., half:self.rotary] = b * cos + a * sin
        return y


def attention(q, k, v, visible):
    """q [T, Hq, D], k and v [S, Hkv, D], visible [T, S] -> [T, Hq, D], unrounded. Query head h reads head h / (Hq/Hkv)."""
    group = q.shape[1] // k.shape[1]
    k, v = f64(k).repeat(group, 1), f64(v).repeat(group, 1)
    scores = np.einsum("thd,shd->hts", f64(q), k) / np.sqrt(q.shape[2])
    weights = softmax(np.where(visible[None], scores, -np.inf))
    return np.einsum("hts,shd->thd", weights, v)
