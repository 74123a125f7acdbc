"""What was computed once is not computed again: prefixes, conversations, sessions. The counts in `usage` are exact."""
import os

import pytest
import spillway

from ask import ask_all, ask_events, generate_error
from conftest import ROOT
from tiny_pair import TinyPair

TINY = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
LONG = TINY.prompts[4] + TINY.prompts[9] # 744 ids
ROOMY = {"kv.device_bytes": "512MiB"}    # nothing is evicted
DRAFTING = {**ROOMY, "draft.fallback": "false"}
EVERY = pytest.mark.parametrize("speculate", (True, False), ids=("drafts", "plain"))


def down(n):
    return n // 64 * 64


def prompt_of(n, mark):
    """n ids that share no page with those of another mark."""
    return [1000 + mark, *LONG[1:n]]


def ask(client, **params):
    return ask_all(client, [{"temperature": 0, "max_tokens": 4, **params}])[0]


def cached(answer):
    assert answer["usage"]["cached"]["host"] == answer["usage"]["cached"]["disk"] == 0
    return answer["usage"]["cached"]["device"]


def test_a_repeated_prompt_is_cached_but_for_its_last_page(daemon):
    with daemon(**ROOMY).connect() as client:
        for mark, n in enumerate(n for k in (1, 2, 3, 7) for n in (64 * k - 1, 64 * k, 64 * k + 1)):
            ids = prompt_of(n, mark)
            first, second = ask(client, prompt_ids=ids), ask(client, prompt_ids=ids)
            assert (cached(first), cached(second)) == (0, down(n - 1)), n
            assert first["usage"]["recomputed"] == second["usage"]["recomputed"] == 0
            assert second["ids"] == first["ids"]
            assert client.call("cache.lookup", {"prompt_ids": ids})["device"] == down(n - 1)


def test_what_may_not_be_stored_or_used_is_not(daemon):
    ids = prompt_of(200, 0)
    with daemon(**ROOMY).connect() as client:
        for cache in ("bypass", "no_store"):
            assert cached(ask(client, prompt_ids=ids, cache=cache)) == 0
            assert client.call("cache.lookup", {"prompt_ids": ids})["device"] == 0
        assert cached(ask(client, prompt_ids=ids)) == 0
        assert cached(ask(client, prompt_ids=ids, cache="bypass")) == 0
        assert cached(ask(client, prompt_ids=ids, cache="no_store")) == 192


@EVERY
def test_a_longer_prompt_goes_on_from_the_end_of_the_answer(daemon, speculate):
    """The answer's pages and the restore point at its last multiple of 64: all tokens but the last one are computed."""
    with daemon(**DRAFTING).connect() as client:
        for mark, (n, n_answer) in enumerate(((100, 40), (60, 5), (60, 4), (64, 1), (128, 9), (120, 73), (120, 72), (30, 140))):
            ids = prompt_of(n, mark)
            params = {"ignore_eos": True, "speculate": speculate}
            first = ask(client, prompt_ids=ids, max_tokens=n_answer, **params)
            ids += first["ids"] + LONG[:70]
            second = ask(client, prompt_ids=ids, max_tokens=20, **params)
            assert cached(second) == down(n + n_answer - 1), (n, n_answer)
            assert second["ids"] == ask(client, prompt_ids=ids, max_tokens=20, cache="bypass", **params)["ids"]


def test_a_stopped_answer_leaves_a_prefix_too(daemon):
    with daemon(**DRAFTING).connect() as client:
        ids = prompt_of(100, 0)
        whole = ask(client, prompt_ids=ids, max_tokens=60, ignore_eos=True)
        ids = prompt_of(100, 1)
        first = ask(client, prompt_ids=ids, max_tokens=60, stop_ids=[whole["ids"][45]], ignore_eos=True)
        n = 100 + len(first["ids"])
        second = ask(client, prompt_ids=ids + first["ids"] + LONG[:70])
    assert first["finish_reason"] == "stop"
    assert cached(second) == down(n - 1)


def test_a_branch_found_once_is_a_restore_point_afterwards(daemon):
    """Three prompts share 200 ids. The first leaves restore points elsewhere; the second finds pages to 192 but no state
    there, computes them again and leaves one; the third goes on from it."""
    with daemon(**ROOMY).connect() as client:
        answers = [ask(client, prompt_ids=LONG[:200] + [i] * 150) for i in (7, 8, 9)]
    assert [cached(answer) for answer in answers] == [0, 0, 192]
    assert [answer["usage"]["recomputed"] for answer in answers] == [0, 192, 0]


def test_accepted_says_what_usage_says(daemon):
    with daemon(**ROOMY).connect() as client:
        for n_cached in (0, 256):
            answer, events = ask_events(client, prompt_ids=prompt_of(300, 0), temperature=0, max_tokens=30)
            assert cached(answer) == n_cached
            assert [event["done"] for event in events if event["type"] == "progress"][-1] == 300


# ---- conversations


def rendered(client, messages):
    return client.call("chat.render", {"messages": messages, "thinking": False})["ids"]


def test_the_next_turn_goes_on_where_the_last_answer_begins(daemon):
    """The template writes an earlier answer without its reasoning, so the prompts part in the head of its turn; also
    where that lies across a multiple of 64 and the first prompt ends behind it."""
    lies_across = 0
    with daemon(**ROOMY).connect() as client:
        for n_words in range(45, 115):
            messages = [{"role": "system", "content": f"Number {n_words}. Read the notes."},
                        {"role": "user", "content": "red" + " door" * n_words}]
            ids = rendered(client, messages)
            if 10 < len(ids) % 64 < 60: # the head is far from a multiple of 64
                continue
            first = ask(client, messages=messages, thinking=False)
            messages += [{"role": "assistant", "content": first["text"]},
                         {"role": "user", "content": "And the blue one?"}]
            n_same = len(os.path.commonprefix([ids + first["ids"], rendered(client, messages)]))
            lies_across += down(n_same) < down(len(ids) - 1)
            assert cached(ask(client, messages=messages, thinking=False)) == down(n_same), n_words
    assert lies_across > 1


def test_other_conversations_share_the_system_turn(daemon):
    system = {"role": "system", "content": "Read the notes and answer. " + "The code of the red door is 2766. " * 12}
    with daemon(**ROOMY).connect() as client:
        n_system = len(client.call("chat.render", {"messages": [system, {"role": "user", "content": ""}],
                                                   "add_generation_prompt": False})["ids"])
        answers = [ask(client, messages=[system, {"role": "user", "content": text * 40}]) for text in ("door ", "red ")]
    assert n_system > 128
    assert cached(answers[0]) == 0
    assert n_system - 64 - 8 < cached(answers[1]) <= n_system


# ---- sessions


@EVERY
def test_a_session_grows_by_its_turns_and_computes_only_what_is_new(daemon, speculate):
    params = {"temperature": 0, "max_tokens": 40, "speculate": speculate, "session": "notes", "thinking": False}
    turns = ["The code of the red door is 2766. The code of the blue tower is 1904. What is the code of the red door?",
             "Count from 3 to 40.", "What is the code of the blue tower?", "What comes after Friday?"]
    with daemon(**DRAFTING).connect() as client:
        assert client.call("session.open", {"name": "notes"})["n_tokens"] == 0
        n_tokens, history = 0, []
        for text in turns:
            answer = ask(client, messages=[{"role": "user", "content": text}], **params)
            # The last token of an answer was never fed, so no state has it.
            assert cached(answer) == down(max(0, n_tokens - 1)), text
            assert answer["usage"]["recomputed"] == 0
            n_tokens = answer["usage"]["prompt"] + answer["usage"]["completion"]
            info = client.call("session.info", {"name": "notes"})
            assert info["n_tokens"] == n_tokens
            assert info["cached"] == {"device": down(n_tokens - 1), "host": 0, "disk": 0}
            history.append(answer)
        assert [session["name"] for session in client.call("session.list")["sessions"]] == ["notes"]
        client.call("session.close", {"name": "notes"})
        assert generate_error(client, prompt="x", session="notes").code == "NOT_FOUND"
    assert history[0]["text"] == "The code of the red door is 2766."


def test_a_session_writes_what_its_ids_as_a_prompt_write(daemon):
    with daemon(**DRAFTING).connect() as client:
        client.call("session.open", {"name": "s"})
        ids = []
        for i, prompt in enumerate((TINY.prompts[0], TINY.prompts[24], [5], TINY.prompts[6])):
            params = {"max_tokens": 30 + i, "ignore_eos": True}
            ids += prompt
            plain = ask(client, prompt_ids=ids, cache="bypass", speculate=False, **params)
            turn = ask(client, prompt_ids=prompt, session="s", **params)
            assert turn["ids"] == plain["ids"]
            assert turn["usage"]["prompt"] == len(ids)
            ids += turn["ids"]


def test_a_fork_begins_with_what_it_shares(daemon):
    with daemon(**ROOMY).connect() as client:
        client.call("session.open", {"name": "a"})
        first = ask(client, prompt_ids=prompt_of(200, 0), session="a", max_tokens=60, ignore_eos=True)
        whole = client.call("session.fork", {"name": "a", "new_name": "b"})
        part = client.call("session.fork", {"name": "a", "new_name": "c", "at": 200})
        assert (whole["n_tokens"], part["n_tokens"]) == (260, 200)
        assert (whole["cached"]["device"], part["cached"]["device"]) == (256, 192)

        again = prompt_of(200, 0) + first["ids"]
        for name, before in (("b", again), ("c", again[:200]), ("a", again)):
            turn = ask(client, prompt_ids=[9, 8, 7], session=name, max_tokens=20)
            assert cached(turn) == down(len(before)), name
            assert turn["ids"] == ask(client, prompt_ids=before + [9, 8, 7], cache="bypass", max_tokens=20)["ids"]
        counts = {session["name"]: session["n_tokens"] for session in client.call("session.list")["sessions"]}
        assert counts["c"] < counts["a"] == counts["b"]


# ---- users


@pytest.mark.parametrize("shared", (False, True))
def test_users_see_each_others_prefixes_only_if_they_shall(daemon, other_user, shared):
    one = daemon(**ROOMY, **{"server.socket_mode": "0666", "kv.shared_prefixes": str(shared).lower()})
    client, other = one.connect(), other_user(one)
    assert (client.hello["uid"], other.hello["uid"]) == (0, 65534)
    ids = prompt_of(200, 0)
    assert cached(ask(client, prompt_ids=ids)) == 0
    assert other.call("cache.lookup", {"prompt_ids": ids})["device"] == (192 if shared else 0)
    assert cached(ask(other, prompt_ids=ids)) == (192 if shared else 0)
    assert cached(ask(client, prompt_ids=ids)) == 192

    client.call("session.open", {"name": "mine"})
    ask(client, prompt_ids=ids, session="mine")
    assert other.call("session.list")["sessions"] == []
    for method in ("session.info", "session.close", "session.pin"):
        with pytest.raises(spillway.NotFound):
            other.call(method, {"name": "mine"})
    assert generate_error(other, prompt_ids=ids, session="mine").code == "NOT_FOUND"
    client.close()
