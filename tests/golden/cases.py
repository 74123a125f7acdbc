"""The small random checkpoints with reference outputs, and the ways in which the program can compute."""
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint import read_safetensors

TARGETS = ("dense-a", "moe-a", "fp8-a")
DRAFTS = ("dense-a-draft", "dense-a-draft-unsorted-bias", "dense-a-draft-sliding")
DRAFT_TARGET = "dense-a"
FAST_LIMIT = 2.5e-2  # relative error of `fast`


@dataclass(frozen=True)
class Mode:
    """One way to compute: a numeric mode, for `fast` on one instruction set."""
    name: str
    options: dict = field(hash=False)

    def __str__(self):
        return self.name


def _cpu_flags():
    return set(next(line for line in open("/proc/cpuinfo") if line.startswith("flags")).split(":")[1].split())


def fast_modes():
    """`fast` on every instruction set that this processor has, the fastest last."""
    flags = _cpu_flags()
    isas = ["scalar"]
    if {"avx2", "fma"} <= flags:
        isas.append("avx2")
    if {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= flags:
        isas.append("avx512bf16")
    return [Mode(f"fast-{isa}", {"numeric": "fast", "isa": isa}) for isa in isas]


REFERENCE = Mode("reference", {"numeric": "reference"})
BF16 = Mode("bf16", {"numeric": "bf16"})
FAST = fast_modes()
MODES = [REFERENCE, BF16, *FAST]


def expected(golden: Path, name):
    return read_safetensors(golden / name / "expected.safetensors")


def draft_blocks(golden: Path, name):
    """{anchor: [B, V] reference logits}"""
    return {int(key.rsplit("_", 1)[1]): value for key, value in expected(golden, name).items()}
