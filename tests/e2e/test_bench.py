"""The benchmarks of the store and of a device run, and what they say of themselves is possible. No figure is judged here: machines differ."""
import json
import subprocess
from pathlib import Path

import pytest

TINY = Path(__file__).resolve().parents[2] / "share/tiny"


@pytest.fixture
def bench(request, tmp_path):
    """bench(group, option, value, ...) runs it on a small scale and returns its figures."""

    def run(group, *options):
        path = tmp_path / "figures.json"
        program, daemon = (request.config.getoption(name) for name in ("--spillway-bench", "--spillwayd"))
        done = subprocess.run([program, group, "--spillwayd", daemon, "--json", path, *options], capture_output=True,
                              text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(path.read_text()), done.stdout

    return run


def test_figures_of_the_store(bench):
    figures, table = bench("kv", "--repeats", "1", "--seconds", "1", "--entries", "20000", "--tokens", "512")
    assert [disk["shape"] for disk in figures["disk"]] == ["27B, bf16", "tiny pair"]
    for disk in figures["disk"]:
        assert disk["bytes"] >= disk["kept_bytes"] > 100 << 20
        assert disk["bytes"] <= disk["written_bytes"] <= 1.2 * disk["kept_bytes"]
        for way in disk["write"], disk["read"]:
            assert way["bytes_per_s"] > 0 and way["plain_bytes_per_s"] > 0 and way["depth"] > 0
    assert figures["lookup"]["entries"] >= 20000
    assert [row["tokens"] for row in figures["lookup"]["prompts"]] == [2048, 8192, 32768]
    assert all(0 < row[tier]["p50"] <= row[tier]["p99"] for row in figures["lookup"]["prompts"]
               for tier in ("device_us", "disk_us"))
    assert figures["prefix"]["tokens"] == 512 and figures["prefix"]["bytes"] > 1 << 20
    assert figures["steps"]["idle"]["n"] > 0 and figures["steps"]["writing"]["n"] > 0
    assert figures["steps"]["written_bytes_per_s"] > 0
    assert "27B" in table and "p99" in table


def test_a_trace_is_the_same_with_and_without_tiers(bench):
    figures, table = bench("trace", "--chats", "3", "--turns", "3", "--seconds", "1")
    for run in figures["tiers"], figures["device"]:
        assert run["answers"] == 9
        assert run["device"] + run["host"] + run["disk"] <= run["prompt_tokens"]
        assert 0 < run["seen_before"] < run["prompt_tokens"]
    assert figures["tiers"]["prompt_tokens"] == figures["device"]["prompt_tokens"]
    assert figures["tiers"]["saved_bytes"] > 0 and figures["device"]["saved_bytes"] == 0
    assert figures["device"]["host"] + figures["device"]["disk"] == 0
    assert "with tiers" in table and "device alone" in table


# What a pass of the tiny pair reads, counted anew from its config.json files: bf16 weights once, K/V of the context, states.


def state_bytes(c):
    heads, value_dim = c["linear_num_value_heads"], c["linear_num_value_heads"] * 128
    conv_dim = 2 * c["linear_num_key_heads"] * 128 + value_dim
    return c["layer_types"].count("linear_attention") * (heads * 128 * 128 * 4 + 3 * conv_dim * 2)


def target_bytes(c, context, n_seqs=1, n_states=3, has_head=True):
    hidden, full, linear = c["hidden_size"], *(c["layer_types"].count(k) for k in ("full_attention", "linear_attention"))
    heads, kv = c["num_attention_heads"] * 256, c["num_key_value_heads"] * 256
    value_dim = c["linear_num_value_heads"] * 128
    conv_dim = 2 * c["linear_num_key_heads"] * 128 + value_dim
    weights = (full * hidden * (2 * heads + 2 * kv + heads)
               + linear * hidden * (conv_dim + value_dim + 2 * c["linear_num_value_heads"] + value_dim)
               + (full + linear) * 3 * hidden * c["intermediate_size"] + has_head * c["vocab_size"] * hidden)
    return 2 * weights + n_seqs * (full * 2 * kv * 2 * context + n_states * state_bytes(c))


def draft_bytes(c, context, n_seqs=1):
    hidden, heads, kv = c["hidden_size"], c["num_attention_heads"] * 128, c["num_key_value_heads"] * 128
    taps = len(c["dflash_config"]["target_layer_ids"])
    weights = (taps * hidden * hidden + c["vocab_size"] * hidden
               + c["num_hidden_layers"] * hidden * (2 * heads + 2 * kv + 3 * c["intermediate_size"]))
    seen = sum(context if kind == "full_attention" else min(context, c["sliding_window"]) for kind in c["layer_types"])
    return 2 * weights + n_seqs * seen * 2 * kv * 2


@pytest.fixture
def device_figures(bench):
    """device_figures(case, option, value, ...) by name, context and batch; each is plausible."""

    def run(case, *options, shape="tiny"):
        figures, table = bench("cuda", "--backend", "cpu", "--model-shape", shape, "--repeats", "1", "--cases", case,
                               *options)
        measured = figures["ceilings"]["measured"]
        assert all(rate > 0 for rate in measured.values()) and len(measured) == 4
        for figure in figures["figures"]:
            assert figure["name"] in table and figure["seconds"] > 0 and figure["share"] > 0, figure
            assert figure["share"] == pytest.approx(figure["floor_s"] / figure["seconds"], rel=0.01, abs=1e-4)
            if figure["group"] in ("pass", "cycle"):
                assert figure["floor_s"] == pytest.approx(max(figure["bytes"] / measured["read_bytes_per_s"],
                                                              figure["ops"] / measured["matrix_ops_per_s"]), rel=0.01)
        return {(f["name"], f["context"], f["batch"]): f for f in figures["figures"] if f["group"] != "ceilings"}

    return run


def config(kind):
    return json.loads((TINY / kind / "config.json").read_text())


def test_passes_are_held_against_the_bytes_of_their_shape(device_figures):
    figures, c = device_figures("pass", "--context", "64,192"), config("target")
    for context in 64, 192:
        assert figures["one token", context, 1]["bytes"] == target_bytes(c, context)
        assert figures["16 rows", context, 1]["bytes"] == target_bytes(c, context)
        assert figures["a chunk of 256 rows", context, 1]["bytes"] == target_bytes(c, context, 1, 2, False)
        assert figures["16 rows", context, 1]["ops"] > 15 * figures["one token", context, 1]["ops"]
    assert figures["a prompt of 512 tokens", 0, 1]["bytes"] == sum(target_bytes(c, at, 1, 2, False) for at in (0, 256))
    assert len(figures) == 7


def test_cycles_draft_verify_and_commit(device_figures):
    figures = device_figures("cycle", "--context", "320", "--batch", "1,3", "--accept", "6.9")
    target, draft = config("target"), config("draft")
    for batch in 1, 3:
        few, all_, simulated = (figures[f"cycle, {name}", 320, batch]
                                for name in ("drafts as they fall", "every draft stands", "simulated 6.9 tokens"))
        assert 1 <= few["tokens_per_cycle"] < all_["tokens_per_cycle"] == 16
        commit_s = all_.get("commit_us_per_row", 0) * 1e-6
        assert simulated["seconds"] == pytest.approx(few["seconds"] + (6.9 - few["tokens_per_cycle"]) * commit_s, rel=1e-3)
        assert simulated["tokens_per_s"] == pytest.approx(6.9 * batch / simulated["seconds"], rel=1e-3)
        assert few["bytes"] == target_bytes(target, 320, batch) + draft_bytes(draft, 320, batch)
    assert figures["draft pass alone", 320, 1]["bytes"] == draft_bytes(draft, 320)
    assert figures["verify pass, all rows committed", 320, 1]["bytes"] == target_bytes(target, 320)


def test_a_mixture_reads_the_experts_that_its_rows_chose(device_figures):
    figures = device_figures("pass,cycle", "--context", "64", shape="tiny-moe")
    one, block = figures["one token", 64, 1], figures["16 rows", 64, 1]
    few, all_ = figures["cycle, drafts as they fall", 64, 1], figures["cycle, every draft stands", 64, 1]
    assert one["experts_per_layer"] == 4 < block["experts_per_layer"] <= 32
    expert = 4 * 3 * 256 * 128 * 2  # on each of four layers
    assert block["bytes"] - one["bytes"] == pytest.approx((block["experts_per_layer"] - 4) * expert, rel=1e-3)
    # Where one id alone may be chosen, all rows but their positions are alike.
    assert few["experts_per_layer"] > all_["experts_per_layer"] >= 4
    assert few["bytes"] - all_["bytes"] == pytest.approx(
        (few["experts_per_layer"] - all_["experts_per_layer"]) * expert, rel=1e-3)


def test_copies_and_decoding_beside_them(device_figures):
    figures, c = device_figures("copies", "--context", "128", "--tokens", "2560"), config("target")
    pages = 2560 * 2 * 2 * c["num_key_value_heads"] * 256 * 2
    assert figures["spill, one batch on its way", 2560, 1]["bytes"] == pages
    for name in "one batch on its way", "two batches on their way":
        assert figures[f"restore, {name}", 2560, 1]["bytes"] == pages + state_bytes(c)
    assert figures["restore, layer by layer", 2560, 1]["piece_KiB"] == 64
    idle = figures["decode, no copies beside it", 128, 1]
    for kind in "spill", "restore":
        beside = figures[f"decode, {kind} beside it", 128, 1]
        assert beside["bytes"] == idle["bytes"] == target_bytes(c, 128) and beside["p99_ms"] >= beside["seconds"] * 1e3
        assert beside["p50_ratio"] == pytest.approx(beside["seconds"] / idle["seconds"], rel=0.01)
        assert beside["copies_GB_per_s"] > 0 and beside["copies_share"] > 0


def test_half_of_a_context_comes_over_the_link_and_changes_no_bit(device_figures):
    figures, c = device_figures("streamed", "--context", "64,4096"), config("target")
    for rows in "one token, half of its pages below", "16 rows, half of their pages below":
        figure = figures[rows, 4096, 1]
        assert figure["has_same_bits"] == 1 and 0 <= figure["late_fences"] <= 1 and figure["resident_ms"] > 0
        assert figure["bytes"] == 2048 * c["layer_types"].count("full_attention") * 2 * c["num_key_value_heads"] * 256 * 2


def test_ceilings_and_matrices_of_a_device(device_figures):
    figures = device_figures("ceilings,matrices")
    assert len(figures) == 8
    assert figures["0.8B down 1024 x 3584, 16 rows", 0, 0]["bytes"] == 1024 * 3584 * 2


@pytest.mark.parametrize("options", [("--cases", "pass,speed"), ("--model-shape", "qwen3.5-5b"), ("--context", "0"),
                                     ("--batch", "1,,2"), ("--accept", "17"), ("--backend", "abacus")])
def test_what_cannot_be_measured_is_refused_by_name(request, options):
    program = request.config.getoption("--spillway-bench")
    done = subprocess.run([program, "cuda", "--backend", "cpu", *options], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and " ".join(options) in done.stderr
