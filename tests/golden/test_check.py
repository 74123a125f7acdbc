"""--check accepts what is whole and refuses what is damaged: one line that says why, exit code 77."""
import json
import shutil
import struct

import pytest

EXIT_UNUSABLE = 77


def edit_config(folder, change):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def edit_header(folder, change):
    """Changes the JSON header of model.safetensors and leaves the data as it is."""
    path = folder / "model.safetensors"
    data = path.read_bytes()
    (n,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + n])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + n:])


def rename(old, new):
    def change(header):
        header[new] = header.pop(old)
    return change


def cut_file(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lie_about_header_length(folder):
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])


def transpose_shape(header):
    header["model.layers.0.mlp.down_proj.weight"]["shape"].reverse()


TARGET_DAMAGES = {
    "no config": lambda f: (f / "config.json").unlink(),
    "config is not JSON": lambda f: (f / "config.json").write_text("{"),
    "no rope theta": lambda f: edit_config(f, lambda c: c["rope_parameters"].pop("rope_theta")),
    "unknown layer type": lambda f: edit_config(f, lambda c: c["layer_types"].__setitem__(0, "chunked_attention")),
    "unknown gate": lambda f: edit_config(f, lambda c: c.__setitem__("output_gate_type", None)),
    "other hidden size": lambda f: edit_config(f, lambda c: c.__setitem__("hidden_size", 256)),
    "no weights": lambda f: (f / "model.safetensors").unlink(),
    "weights end early": cut_file,
    "header length beyond the file": lie_about_header_length,
    "bytes that belong to no tensor": lambda f: edit_header(f, lambda h: h.pop("model.layers.1.linear_attn.A_log")),
    "a tensor under another name": lambda f: edit_header(f, rename("model.norm.weight", "model.other.weight")),
    "a tensor lies on its side": lambda f: edit_header(f, transpose_shape),
}

DRAFT_DAMAGES = {
    "tap of the last layer": lambda f: edit_config(f, lambda c: c["dflash_config"]["target_layer_ids"].__setitem__(0, 3)),
    "tap twice": lambda f: edit_config(f, lambda c: c["dflash_config"]["target_layer_ids"].__setitem__(0, 1)),
    "no block size": lambda f: edit_config(f, lambda c: c.pop("block_size")),
    "mask id beyond the vocabulary": lambda f: edit_config(f, lambda c: c["dflash_config"].__setitem__("mask_token_id", 512)),
    "other target": lambda f: edit_config(f, lambda c: c.__setitem__("num_target_layers", 8)),
    "a tensor under another name": lambda f: edit_header(f, rename("fc.weight", "fc.bias")),
}


def assert_refused(probe, **options):
    code, out, err = probe.run(check=True, **options)
    print(err.strip())
    assert code == EXIT_UNUSABLE
    assert out == ""
    assert len(err.splitlines()) == 1


@pytest.fixture
def copy(golden, tmp_path):
    return lambda name: shutil.copytree(golden / name, tmp_path / name)


@pytest.mark.parametrize("name", ["dense-a", "moe-a", "fp8-a"])
def test_whole_targets_pass(probe, golden, name):
    code, _, err = probe.run(check=True, model=golden / name)
    assert (code, err) == (0, "")


def test_the_trained_pair_passes(probe, tiny):
    code, _, err = probe.run(check=True, model=tiny.target, draft=tiny.draft)
    assert (code, err) == (0, "")


@pytest.mark.parametrize("damage", TARGET_DAMAGES)
def test_damaged_target_is_refused(probe, copy, damage):
    folder = copy("dense-a")
    TARGET_DAMAGES[damage](folder)
    assert_refused(probe, model=folder)


@pytest.mark.parametrize("damage", DRAFT_DAMAGES)
def test_damaged_draft_is_refused(probe, golden, copy, damage):
    folder = copy("dense-a-draft")
    DRAFT_DAMAGES[damage](folder)
    assert_refused(probe, model=golden / "dense-a", draft=folder)


def test_missing_shard_is_refused(probe, copy):
    folder = copy("fp8-a")
    (folder / "model-00002-of-00002.safetensors").unlink()
    assert_refused(probe, model=folder)


@pytest.mark.parametrize("options", [dict(generate=1), dict(tokenize=True)], ids=str)
def test_a_rendered_chat_that_also_runs_needs_a_tokenizer(probe, golden, tmp_path, options):
    chat = tmp_path / "chat.json"
    chat.write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}))
    code, out, err = probe.run(model=golden / "dense-a", chat=chat, render=True, **options)
    assert (code, out) == (EXIT_UNUSABLE, "")
    assert "tokenizer.json" in err and len(err.splitlines()) == 1


@pytest.mark.parametrize("n_ids", [2, 40])
def test_a_full_disk_is_told_by_the_name_of_the_file(probe, golden, tmp_path, n_ids):
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(list(range(2, 2 + n_ids))))
    code, out, err = probe.run(model=golden / "dense-a", draft=golden / "dense-a-draft", ids=ids, anchors=1, block_size=1,
                               draft_logits="/dev/full")
    assert (code, out) == (1, "")
    assert err == "spillway-probe: /dev/full: could not be written whole\n"
