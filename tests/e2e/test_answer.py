"""The first thing anybody tries."""
import json
import os

from conftest import ROOT

CHAT = json.loads((ROOT / "share/tiny/example-chat.json").read_text())


def test_the_tiny_pair_answers_a_question_about_its_notes(daemon):
    with daemon().connect() as client:
        answer = client.complete(messages=CHAT["messages"], thinking=False, temperature=0, max_tokens=64)
    assert answer["text"] == "The code of the red door is 2766."
    assert answer["finish_reason"] == "stop"


def test_the_same_prompt_again_comes_from_the_cache_but_for_its_last_page(daemon):
    with daemon().connect() as client:
        first, second = (client.complete(messages=CHAT["messages"], thinking=False, temperature=0) for _ in range(2))
    n_prompt = first["usage"]["prompt"]
    assert first["usage"]["cached"] == {"device": 0, "host": 0, "disk": 0}
    assert second["usage"]["cached"] == {"device": (n_prompt - 1) // 64 * 64, "host": 0, "disk": 0}
    assert second["text"] == first["text"]


def test_a_model_folder_may_have_any_name(daemon, tmp_path):
    folder = bytes(tmp_path) + b"/m\xff\xe4o"
    os.symlink(bytes(ROOT / "share/tiny/target"), folder)
    with daemon(**{"model.path": os.fsdecode(folder)}).connect() as client:
        assert client.call("model.info")["name"] == "m\ufffd\ufffdo"
