"""Tool calls: what the daemon makes of an answer that ends with them.

The tiny pair never calls tools, so its tokenizer is changed: a token of no other use reads as the inside of a call. Biases
choose what greedy decoding says, each token once, as the penalty pushes down what was said.
"""
import json
import shutil

import pytest

from ask import ask_events
from conftest import ROOT

TARGET = ROOT / "share/tiny/target"
INSIDE = "\n<function=open_door>\n<parameter=color>\nred\n</parameter>\n<parameter=times>\n2\n</parameter>\n</function>\n"
CALL = ["<tool_call>", INSIDE, "</tool_call>", "<|im_end|>"]
BIAS = [100, 85, 70, 100]  # the end is far from likely by itself


@pytest.fixture(scope="module")
def caller(kept_daemon, tmp_path_factory):
    """A daemon whose model can be made to call a tool, and its special tokens' ids by text."""
    folder = tmp_path_factory.mktemp("model") / "target"
    shutil.copytree(TARGET, folder)
    path = folder / "tokenizer.json"
    path.chmod(0o644)
    tokenizer = json.loads(path.read_text())
    for token in tokenizer["added_tokens"]:
        if token["content"] == "<tool_response>":
            token["content"] = INSIDE
    path.write_text(json.dumps(tokenizer))
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    return kept_daemon(**{"model.path": folder, "draft.path": ROOT / "share/tiny/draft"}), ids


def ask_for(client, ids, texts, **params):
    bias = {str(ids[text]): BIAS[CALL.index(text)] for text in texts}
    answer, events = ask_events(client, messages=[{"role": "user", "content": "Open the red door."}], thinking=False,
                                temperature=0, repetition_penalty=10, logit_bias=bias, **params)
    return answer, [event for event in events if event["type"] == "tool_call"]


@pytest.mark.parametrize("speculate", [True, False])
def test_a_call_is_an_event_and_the_reason_of_the_end(caller, speculate):
    daemon, ids = caller
    with daemon.connect() as client:
        answer, calls = ask_for(client, ids, CALL, speculate=speculate, max_tokens=16)
    arguments = {"color": "red", "times": "2"}  # without a schema an argument is text
    assert answer["ids"] == [ids[text] for text in CALL]
    assert answer["finish_reason"] == "tool_calls"
    assert answer["text"] == answer["message"]["content"] == ""
    assert answer["message"]["tool_calls"] == [{"name": "open_door", "arguments": arguments}]
    assert [(call["name"], call["arguments"]) for call in calls] == [("open_door", arguments)]


def test_a_call_that_max_tokens_cuts_off_is_text(caller):
    daemon, ids = caller
    with daemon.connect() as client:
        answer, calls = ask_for(client, ids, CALL, max_tokens=2)
    assert answer["finish_reason"] == "length" and not calls and "tool_calls" not in answer["message"]
    assert answer["text"] == "<tool_call>" + INSIDE


def test_after_a_whole_call_max_tokens_is_still_the_reason(caller):
    daemon, ids = caller
    with daemon.connect() as client:
        answer, calls = ask_for(client, ids, CALL[:3], max_tokens=3)
    assert answer["finish_reason"] == "length" and len(calls) == 1 and len(answer["message"]["tool_calls"]) == 1


def test_what_is_no_call_inside_stays_text(caller):
    daemon, ids = caller
    with daemon.connect() as client:
        answer, calls = ask_for(client, ids, ["<tool_call>", "</tool_call>", "<|im_end|>"], max_tokens=16)
    assert answer["finish_reason"] == "stop" and not calls
    assert answer["text"] == "<tool_call></tool_call>"
