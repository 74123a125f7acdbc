"""How an answer ends, and what it then says of itself. Every answer is also checked by ask.py: counts, ids, text, deltas."""
import pytest

from ask import ask_all, ask_events, generate_error
from conftest import ROOT
from tiny_pair import TinyPair

TINY = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
COUNT = TINY.prompts[6]          # "28, 29, 30, ... 46.": 75 tokens and the stop id, in passes that accept many drafts
COUNT_TEXT = TINY.cases[6]["text"].removesuffix("<|im_end|>")
EOS = TINY.cases[6]["output_ids"][-1]
DRAFTING = {"draft.fallback": "false"}


@pytest.fixture(scope="module")
def client(kept_daemon):
    with kept_daemon(**DRAFTING).connect() as one:
        yield one


@pytest.fixture(scope="module")
def whole(client):
    answer = ask_all(client, [{"prompt_ids": COUNT, "temperature": 0}])[0]
    assert answer["text"] == COUNT_TEXT and answer["ids"][-1] == EOS and answer["finish_reason"] == "stop"
    assert answer["usage"]["draft"]["steps"] < 12 # so each pass writes many tokens
    return answer


def count(client, **params):
    """The streamed answer, the same without events, and the same without drafts: all alike."""
    answer, events = ask_events(client, prompt_ids=COUNT, temperature=0, **params)
    request = {"prompt_ids": COUNT, "temperature": 0, **params}
    for other in ask_all(client, [request, {**request, "speculate": False}]):
        for key in ("text", "message", "ids", "finish_reason", "stop_match", "logprobs"):
            assert other.get(key) == answer.get(key), key
    return answer, events


@pytest.mark.parametrize("stop", (["31"], ["5, 36"], ["40, 41, 42"], ["9, 3", "38"], ["46."], ["28"], ["zzz", ", 3"]), ids=str)
def test_a_stop_string_ends_it_wherever_it_lies_in_a_block(client, whole, stop):
    answer, events = count(client, stop=stop)
    at, match = min((COUNT_TEXT.find(string), string) for string in stop if string in COUNT_TEXT)
    assert answer["finish_reason"] == "stop_string" and answer["stop_match"] == match
    assert answer["text"] == COUNT_TEXT[:at]
    n = len(answer["ids"])
    assert answer["ids"] == whole["ids"][:n]
    # The match is complete with its last token, not before: no token too many.
    texts = [client.call("text.detokenize", {"ids": whole["ids"][:k]})["text"] for k in (n - 1, n)]
    assert [match in text for text in texts] == [False, True]


def test_a_stop_string_that_does_not_come_changes_nothing(client, whole):
    answer, events = count(client, stop=["46, 47", ". 46", "never"])
    assert answer["finish_reason"] == "stop" and answer["text"] == COUNT_TEXT and answer["ids"] == whole["ids"]


def test_every_max_tokens_gives_the_beginning(client, whole):
    lengths = (1, 2, 3, 15, 16, 17, 18, 40, 75, 76, 77)
    answers = ask_all(client, [{"prompt_ids": COUNT, "temperature": 0, "max_tokens": n} for n in lengths])
    for n, answer in zip(lengths, answers):
        assert answer["ids"] == whole["ids"][:n]
        assert answer["finish_reason"] == ("length" if n < 76 else "stop")
        assert COUNT_TEXT.startswith(answer["text"])
    assert answers[0]["usage"]["draft"] == {"steps": 0, "proposed": 0, "accepted": 0}


def test_any_stop_id_ends_it_and_is_no_text(client, whole):
    for at in (0, 1, 2, 20, 33):
        stop_id = whole["ids"][at]
        n = whole["ids"].index(stop_id) + 1
        answer, _ = count(client, stop_ids=[stop_id, 7])
        assert answer["finish_reason"] == "stop" and answer["ids"] == whole["ids"][:n]
        assert answer["text"] == client.call("text.detokenize", {"ids": whole["ids"][:n - 1]})["text"]


def test_ignore_eos_goes_on_behind_it(client, whole):
    answer, _ = count(client, ignore_eos=True, max_tokens=100)
    assert answer["finish_reason"] == "length" and len(answer["ids"]) == 100
    assert answer["ids"][:76] == whole["ids"]
    answer, _ = count(client, ignore_eos=True, stop_ids=[EOS])
    assert answer["finish_reason"] == "stop" and answer["ids"] == whole["ids"]


def test_logprobs_are_of_each_token_and_the_best_ones_beside_it(client):
    for n_top in (0, 1, 7, 20):
        answer, events = count(client, logprobs=n_top, max_tokens=30)
        for entry in answer["logprobs"]: # greedy: the token is the best one
            assert [entry["id"]] * min(n_top, 1) == [top["id"] for top in entry["top"][:1]]
    assert all("logprobs" in event for event in events if event["type"] == "delta")


@pytest.mark.parametrize("speculate", (True, False), ids=("drafts", "plain"))
def test_the_context_ends_it_exactly_there(daemon, whole, speculate):
    with daemon(**{**DRAFTING, "limits.max_context": 128}).connect() as client:
        params = {"temperature": 0, "ignore_eos": True, "speculate": speculate}
        for n in (76, 100, 111, 112, 113, 126, 127):
            prompt_ids = (COUNT + whole["ids"])[:n]
            answer, _ = ask_events(client, prompt_ids=prompt_ids, **params)
            assert answer["finish_reason"] == "context"
            assert n + len(answer["ids"]) == 128
            same = ask_all(client, [{"prompt_ids": prompt_ids, "max_tokens": 128 - n, **params}])[0]
            assert same["ids"] == answer["ids"]
        error = generate_error(client, prompt_ids=COUNT[:1] * 128)
        assert error.code == "CONTEXT_LENGTH" and error.data == {"n_prompt": 128, "n_context": 128}


def test_reasoning_is_a_channel_of_its_own_and_is_counted(client):
    answer, events = ask_events(client, messages=[{"role": "user", "content": "What is 12 + 13?"}], thinking=True,
                                temperature=0, max_tokens=60)
    think_close = client.call("text.tokenize", {"text": "</think>", "markup": True})["ids"][0]
    assert answer["message"]["reasoning"] and answer["text"].startswith("12 + 13 = ")
    assert answer["usage"]["reasoning"] in (answer["ids"].index(think_close), answer["ids"].index(think_close) + 1)
    channels = [event["channel"] for event in events if event["type"] == "delta"]
    assert channels == sorted(channels, reverse=True) and set(channels) == {"reasoning", "content"}


def test_text_ids_and_messages_of_one_prompt_write_the_same(client):
    messages = [{"role": "user", "content": "Count from 28 to 46."}]
    prompt = client.call("chat.render", {"messages": messages, "thinking": False})
    params = {"temperature": 0, "max_tokens": 40}
    by_text, by_ids, by_messages = ask_all(client, [
        {"prompt": prompt["text"], "markup": True, **params}, {"prompt_ids": prompt["ids"], **params},
        {"messages": messages, "thinking": False, **params}])
    assert by_text["ids"] == by_ids["ids"] == by_messages["ids"]
    assert by_text["text"] == by_ids["text"] == by_messages["text"]


def test_deltas_never_split_a_character(client):
    """Bytes of characters, forced one token at a time by a bias on byte tokens only."""
    ids = sorted({i for text in ("ü", "—", "漢字", "🦡") for i in client.call("text.tokenize", {"text": text})["ids"]})
    assert len(ids) > 6
    answer, events = ask_events(client, prompt_ids=COUNT, temperature=1.0, top_p=1.0, top_k=0, seed=1, max_tokens=60,
                                logit_bias={str(i): 60.0 for i in ids}, ignore_eos=True)
    assert set(answer["ids"]) <= set(ids)
    assert any(ord(c) > 127 and c != "\ufffd" for c in answer["text"])
    assert answer["text"] == client.call("text.detokenize", {"ids": answer["ids"]})["text"]
