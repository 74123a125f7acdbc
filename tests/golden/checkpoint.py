"""A checkpoint folder: config.json and safetensors files, as float32 arrays by name (integers stay integers)."""
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
        _dequantise(self.tensors)

    def __getitem__(self, name):
        return self.tensors[name]

    def get(self, name):
        return self.tensors.get(name)
