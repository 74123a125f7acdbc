"""The benchmarks of the store run, and what they say of themselves is possible. No figure is judged here: machines differ."""
import json
import subprocess

import pytest


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
