"""Element formats as numpy values: every function takes any float array and returns float32 holding only values of the format.

A float64 input passes through float32 first, as a C program that computes in double and stores a float does.
"""
import numpy as np

E4M3_MAX = np.float32(448)
E4M3_MIN_EXPONENT = -6


def f32(x):
    return np.asarray(x).astype(np.float32)


def bf16(x):
    """To nearest, ties to even. Finite inputs only: a NaN in a reference is an error of the test itself."""
    bits = f32(x).view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    return ((bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)).view(np.float32)


def fp16(x):
    return f32(x).astype(np.float16).astype(np.float32)


def e4m3(x):
    """Saturating at 448: finite values beyond it become 448, never NaN."""
    x = f32(x)
    _, exponent = np.frexp(x)                       # x = m * 2^exponent with m in [0.5, 1)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, E4M3_MIN_EXPONENT) - 3)
    return np.clip(np.rint(x / step) * step, -E4M3_MAX, E4M3_MAX).astype(np.float32)


BY_NAME = {"f32": f32, "bf16": bf16, "fp16": fp16, "e4m3": e4m3}


def bf16_from_bits(bits):
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bf16_bits(x):
    return (bf16(x).view(np.uint32) >> np.uint32(16)).astype("<u2")


def e4m3_bits(x):
    x = e4m3(x)
    codes = np.searchsorted(e4m3_from_bits(np.arange(127, dtype=np.uint8)), np.abs(x)).astype(np.uint8)
    return codes | np.where(np.signbit(x), np.uint8(0x80), np.uint8(0))


def e4m3_from_bits(bits):
    exponent, mantissa = (bits >> 3) & 15, (bits & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent.astype(np.int32) - 7)
    value = np.where(exponent == 0, mantissa * np.float32(2.0**-9), normal)
    value = np.where((bits & 0x7F) == 0x7F, np.nan, value)
    return np.where(bits & 0x80, -value, value).astype(np.float32)
