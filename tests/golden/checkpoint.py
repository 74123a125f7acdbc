"""A checkpoint folder: config.json and safetensors files, as float32 arrays by name (integers stay integers). Reads any,
writes small ones for tests."""
import json
import struct
from pathlib import Path

import numpy as np

import rounding

SCALE_BLOCK = 128


def _decode(raw, dtype):
    if dtype == "BF16":
        return rounding.bf16_from_bits(np.frombuffer(raw, "<u2"))
    if dtype == "F8_E4M3":
        return rounding.e4m3_from_bits(np.frombuffer(raw, "u1"))
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    return np.frombuffer(raw, {"F32": "<f4", "I32": "<i4", "I64": "<i8"}[dtype])


def read_safetensors(path):
    """{name: array} of one file: u64 header length, JSON header, data."""
    data = Path(path).read_bytes()
    (header_bytes,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + header_bytes])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + header_bytes:]
    return {name: _decode(body[slice(*entry["data_offsets"])], entry["dtype"]).reshape(entry["shape"])
            for name, entry in header.items()}


def _dequantise(tensors):
    """Folds each `X_scale_inv` into X: despite its name it multiplies, one value per 128x128 block."""
    for name in [n for n in tensors if n.endswith("_scale_inv")]:
        scale = tensors.pop(name)
        weight_name = name[:-len("_scale_inv")]
        rows, cols = tensors[weight_name].shape
        full = scale.repeat(SCALE_BLOCK, 0)[:rows].repeat(SCALE_BLOCK, 1)[:, :cols]
        tensors[weight_name] = tensors[weight_name] * full
    return tensors


def _fuse_experts(tensors):
    """Experts that lie apart, as in FP8 checkpoints, become the two stacks of the others: gate rows over up rows, and down."""
    tail = ".experts.0.gate_proj.weight"
    for mlp in [n[:-len(tail)] for n in tensors if n.endswith(tail)]:
        n = 0
        parts = {part: [] for part in ("gate_proj", "up_proj", "down_proj")}
        while f"{mlp}.experts.{n}.gate_proj.weight" in tensors:
            for part, experts in parts.items():
                experts.append(tensors.pop(f"{mlp}.experts.{n}.{part}.weight"))
            n += 1
        tensors[f"{mlp}.experts.gate_up_proj"] = np.concatenate([parts["gate_proj"], parts["up_proj"]], axis=1)
        tensors[f"{mlp}.experts.down_proj"] = np.stack(parts["down_proj"])
    return tensors


class Checkpoint:
    def __init__(self, folder):
        folder = Path(folder)
        self.config = json.loads((folder / "config.json").read_text())
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        else:
            files = ["model.safetensors"]
        self.tensors = {}
        for name in files:
            self.tensors.update(read_safetensors(folder / name))
        _fuse_experts(_dequantise(self.tensors))

    def __getitem__(self, name):
        return self.tensors[name]

    def get(self, name):
        return self.tensors.get(name)


def _quantise(matrix):
    """e4m3 bits, and the scale per block by which they multiply."""
    rows, cols = matrix.shape
    n_rows, n_cols = -(-rows // SCALE_BLOCK), -(-cols // SCALE_BLOCK)
    padded = np.zeros((n_rows * SCALE_BLOCK, n_cols * SCALE_BLOCK), np.float32)
    padded[:rows, :cols] = np.abs(matrix)
    scale = padded.reshape(n_rows, SCALE_BLOCK, n_cols, SCALE_BLOCK).max((1, 3)) / rounding.E4M3_MAX
    return rounding.e4m3_bits(matrix / scale.repeat(SCALE_BLOCK, 0)[:rows].repeat(SCALE_BLOCK, 1)[:, :cols]), scale


def write_checkpoint(folder, config, tensors):
    """tensors: {name: (dtype, float array)} with dtype BF16, F32 or F8_E4M3; the last gets its `_scale_inv` beside it."""
    stored = {}
    for name, (dtype, array) in tensors.items():
        if dtype == "F8_E4M3":
            bits, scale = _quantise(array)
            stored[name] = (dtype, bits)
            stored[name + "_scale_inv"] = ("F32", scale)
        else:
            stored[name] = (dtype, rounding.bf16_bits(array) if dtype == "BF16" else rounding.f32(array))
    header, at = {}, 0
    for name, (dtype, array) in stored.items():
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": [at, at + array.nbytes]}
        at += array.nbytes
    text = json.dumps(header).encode()
    folder = Path(folder)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, array in stored.values():
            file.write(array.tobytes())
    (folder / "config.json").write_text(json.dumps(config, indent=1))
