"""Sessions are put down to the lowest tier there is, and taken up again, with the same tokens; the cache's methods."""
import asyncio
import contextlib
import os
import random
import signal
import threading
import time

import pytest

import spillway
from conftest import ROOT
from manager import manager  # noqa: F401
from raw import Raw, Refused
from tiny_pair import TinyPair

PAIR = TinyPair(ROOT / "share/tiny", ROOT / "tests/golden/tiny-pair.json")
TEXT = [token for prompt in PAIR.prompts for token in prompt]
NOTHING = {"device": 0, "host": 0, "disk": 0}
PAGE_BYTES = (128 + 64) << 10  # of target_full and draft_full
LONG = {"limits.max_context": 32768}  # what write_on needs


@pytest.fixture
def disk(tmp_path):
    return {"kv.disk_path": tmp_path / "kv", "kv.disk_bytes": "256MiB", "kv.host_bytes": "64MiB", "kv.restore": "always",
            "kv.disk_min_tokens": 64, "kv.warm_up": 0}


def turn(client, name, ids, n=24, **params):
    return client.call("gen.start", {"prompt_ids": ids, "session": name, "max_tokens": n, "temperature": 0, "stream": False,
                                     "ignore_eos": True, "return_ids": True, **params})


def session(client, name):
    return client.call("session.info", {"name": name})


def begin(client, name, n_prompt=500):
    """A session with one turn. Returns its tokens that a next turn need not compute."""
    client.call("session.open", {"name": name})
    turn(client, name, TEXT[:n_prompt])
    return (session(client, name)["n_tokens"]) // 64 * 64


def write_on(client, name):
    """More than any device writes within seconds."""
    return client.generate(prompt_ids=TEXT[:50], session=name, max_tokens=30000, temperature=0, ignore_eos=True,
                           speculate=False)


def down(info):
    return info["cached"]["host"] + info["cached"]["disk"]


def evict(client, tier):
    return client.call("cache.evict", {"tier": tier, "all": True})


def test_a_parked_session_leaves_the_device_and_comes_back_over_a_restart(daemon, disk):
    with daemon().connect() as client:
        begin(client, "a")
        plain = turn(client, "a", TEXT[900:1000])
    one = daemon(**disk)
    with one.connect() as client:
        b = begin(client, "a")
        parked = client.call("session.park", {"name": "a"})
        assert parked["tokens"] >= b - 64 and parked["bytes"] > 0
        assert (parked["tier"], parked["durable"]) == ("disk", True)
        info = session(client, "a")
        assert info["parked"] and info["durable"] and info["cached"]["device"] == 0
        assert down(info) == parked["tokens"] == info["restore_point"]
    one.process.send_signal(signal.SIGKILL)
    one.stop(-signal.SIGKILL)
    with daemon(**disk).connect() as client:
        info = session(client, "a")
        assert info["parked"] and info["n_tokens"] == 524
        wait_until(lambda: session(client, "a")["cached"]["disk"] == parked["tokens"])
        resumed = client.call("session.resume", {"name": "a", "wait": True})
        assert resumed["cached"] == {**NOTHING, "device": parked["tokens"]} and not resumed["parked"]
        again = turn(client, "a", TEXT[900:1000])
        assert again["usage"]["cached"]["device"] == parked["tokens"]
        assert again["ids"] == plain["ids"]


def test_a_session_longer_than_host_memory_is_parked_through_it(daemon, disk):
    settings = {**disk, "kv.host_bytes": "16MiB", "limits.max_context": 8192}
    ids = (TEXT * 4)[:6000]
    with daemon(**settings).connect() as client:
        client.call("session.open", {"name": "long"})
        turn(client, "long", ids)
        parked = client.call("session.park", {"name": "long"})
        host = client.call("cache.stats")["tiers"]["host"]
        assert host["bytes"] < parked["tokens"] // 64 * PAGE_BYTES  # so it cannot have held all of it at once
        assert (parked["tier"], parked["durable"]) == ("disk", True) and parked["tokens"] >= 6000 - 64
        evict(client, "host")
        answer = turn(client, "long", TEXT[:40])
        assert answer["usage"]["cached"]["disk"] == parked["tokens"] and answer["usage"]["recomputed"] == 0
    with daemon().connect() as client:
        client.call("session.open", {"name": "long"})
        turn(client, "long", ids)
        assert turn(client, "long", TEXT[:40])["ids"] == answer["ids"]


def wait_until(claim, seconds=30):
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.02)


def ask(client, name, content, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    return client.call("gen.start", {"messages": messages + [{"role": "user", "content": content}], "session": name,
                                     "thinking": False, "temperature": 0, "max_tokens": 48, "stream": False})


FACTS = {"red door": 2766, "blue tower": 1904, "silver garden": 8351, "golden boat": 4410, "brown mill": 7093,
         "grey cellar": 3628, "purple lamp": 9157, "black wagon": 6082, "amber bridge": 5249, "ivory chest": 1837}
FILLER = ["The old man walked slowly down to the river, and nobody asked him why.",
          "She had never seen so many birds in one tree before.",
          "There was a light in the window, but the house was empty.",
          "In the morning the children went out to look for their dog.",
          "He said that he would come back when the rain was over.",
          "A long road led through the fields and over the hills to the sea."]


def notes(client, n_tokens):
    """Few facts among much else."""
    chosen, text, n = random.Random(3), "Read the notes and answer.\n\n", 0
    facts = [f"The code of the {thing} is {code}." for thing, code in FACTS.items()]
    for i, fact in enumerate(facts):
        text += fact + " "
        while n < n_tokens * (i + 1) // len(facts):
            sentence = chosen.choice(FILLER) + " "
            n += len(client.call("text.tokenize", {"text": sentence, "markup": False})["ids"])
            text += sentence
    return text


def test_a_document_of_8k_tokens_is_recalled_over_a_restart_for_the_price_of_reading_its_pages(daemon, disk):
    settings = {**disk, "limits.max_context": 8192}
    one = daemon(**settings)
    with one.connect() as client:
        client.call("session.open", {"name": "doc"})
        first = ask(client, "doc", "Count to ten.", notes(client, 7700))
        assert first["usage"]["prompt"] > 7000
        parked = client.call("session.park", {"name": "doc"})
        assert (parked["tier"], parked["durable"]) == ("disk", True)
    one.stop()
    with daemon(**settings).connect() as client:
        client.call("session.resume", {"name": "doc", "wait": True})
        second = ask(client, "doc", "What is the code of the purple lamp?")
        assert "9157" in second["text"]
        assert second["usage"]["recomputed"] <= 64
        assert sum(second["usage"]["cached"].values()) >= first["usage"]["prompt"] // 64 * 64


def test_a_parked_session_that_lost_pages_does_not_say_that_it_is_durable(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client:
        begin(client, "a")
        parked = client.call("session.park", {"name": "a"})
        before = session(client, "a")
        assert before["durable"] and before["restore_point"] == parked["tokens"] > 0
        for tier in ("host", "disk"):
            client.call("cache.evict", {"tier": tier, "all": True})
        lost = {**before, "durable": False, "cached": NOTHING}
        assert session(client, "a") == lost and client.call("session.list")["sessions"] == [lost]
        client.call("session.pin", {"name": "a"})  # its record is written again: what it was parked with does not change
        assert session(client, "a") == {**lost, "pinned": True}
        assert client.call("session.unpin", {"name": "a"}) == lost
        client.call("cache.flush")
    one.stop()
    with daemon(**disk).connect() as client:
        assert session(client, "a") == lost
        again = client.call("session.park", {"name": "a"})
        assert (again["tokens"], again["tier"], again["durable"]) == (0, "none", False)
        client.call("session.resume", {"name": "a", "wait": True})
        turn(client, "a", TEXT[:10])
        parked = client.call("session.park", {"name": "a"})
        assert parked["durable"] and parked["tokens"] >= before["restore_point"]
        assert session(client, "a")["restore_point"] == parked["tokens"]


def test_without_lower_tiers_parking_says_what_is_computed_again(daemon):
    with daemon().connect() as client:
        begin(client, "a")
        parked = client.call("session.park", {"name": "a"})
        assert {**parked, "bytes": 0} == {"tokens": 0, "bytes": 0, "tier": "none", "durable": False} and parked["bytes"] > 0
        assert session(client, "a")["cached"] == NOTHING
        assert client.call("session.resume", {"name": "a", "wait": True})["cached"] == NOTHING
        assert turn(client, "a", TEXT[:10])["usage"]["cached"] == NOTHING


def test_with_a_host_tier_alone_it_is_parked_there(daemon):
    with daemon(**{"kv.host_bytes": "64MiB", "kv.restore": "always"}).connect() as client:
        b = begin(client, "a")
        parked = client.call("session.park", {"name": "a"})
        assert (parked["tier"], parked["durable"]) == ("host", False) and parked["tokens"] >= b - 64
        assert session(client, "a")["cached"] == {**NOTHING, "host": parked["tokens"]}
        client.call("session.resume", {"name": "a"})
        wait_until(lambda: session(client, "a")["cached"]["device"] == parked["tokens"])


def test_parking_one_leaves_what_others_share(daemon, disk):
    with daemon(**disk).connect() as client:
        begin(client, "a")
        client.call("session.fork", {"name": "a", "new_name": "b"})
        turn(client, "b", TEXT[700:900])
        before = session(client, "b")["cached"]
        client.call("session.park", {"name": "a"})
        assert session(client, "b")["cached"] == before
        client.call("session.pin", {"name": "b"})
        client.call("session.park", {"name": "b"})  # putting down is more than keeping where it is
        info = session(client, "b")
        assert info["cached"]["device"] == 0 and info["pinned"] and down(info) > 0
        client.call("session.resume", {"name": "b", "wait": True})
        evict(client, "device")
        assert session(client, "b")["cached"]["device"] == down(info)  # pinned again


def test_a_session_in_use_is_not_parked(daemon, disk):
    one = daemon(**disk, **LONG)
    with one.connect() as client, one.connect() as other:
        begin(client, "a")
        generation = write_on(other, "a")
        next(e for e in generation if e["type"] == "delta")
        with pytest.raises(spillway.Busy):
            client.call("session.park", {"name": "a"})
        with pytest.raises(spillway.Busy):
            client.call("session.resume", {"name": "a"})
        other.close()
        wait_until(lambda: not client.call("gen.list")["gens"])
        assert client.call("session.park", {"name": "a"})["tier"] == "disk"


def test_who_fetches_while_many_do_is_told_when_to_try_again(daemon, disk):
    one = daemon(**disk)
    names = [str(i) for i in range(96)]
    with one.connect() as client:
        begin(client, "a")
        for name in names:
            client.call("session.fork", {"name": "a", "new_name": name})
        evict(client, "device")

    async def resume_all():
        """In one turn of the loop, which takes no more than 32 messages of a connection."""
        async with await Raw.open(one.socket) as a, await Raw.open(one.socket) as b, await Raw.open(one.socket) as c:
            os.kill(one.pid, signal.SIGSTOP)
            calls = []
            for i, raw in enumerate((a, b, c)):
                packed = [raw.pack("session.resume", {"name": name}) for name in names[i * 32:i * 32 + 32]]
                calls += [(raw, request_id) for request_id, _ in packed]
                await raw.send(b"".join(data for _, data in packed))
            os.kill(one.pid, signal.SIGCONT)
            return await asyncio.gather(*(raw.answer(i) for raw, i in calls), return_exceptions=True)

    refused = [answer for answer in asyncio.run(resume_all()) if isinstance(answer, Refused)]
    assert refused
    for error in refused:
        assert (error.code, error.data) == ("BUSY", {"n_waiting": 64, "retry_ms": 500})
        assert "64 sessions and prompts are fetched or wait" in error.message and "again in 500 ms" in error.message


def test_parked_while_others_generate(daemon, disk):
    one = daemon(**disk)
    ends = []

    def generate():
        with one.connect() as client:
            while not ends:
                client.call("gen.start", {"prompt_ids": TEXT[100:400], "max_tokens": 40, "temperature": 0.8, "stream": False})

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    with one.connect() as client:
        for i in range(5):
            b = begin(client, f"s{i}", 200 + 64 * i)
            parked = client.call("session.park", {"name": f"s{i}"})
            assert parked["tier"] == "disk" and parked["durable"] and parked["tokens"] >= b - 64
    ends.append(True)
    for thread in threads:
        thread.join()


def test_a_client_that_goes_while_its_session_is_parked(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client:
        for i in range(5):
            begin(client, f"s{i}", 400)
            with one.connect(timeout=0.001) as other, contextlib.suppress(spillway.TimedOut):
                other.call("session.park", {"name": f"s{i}"})
            wait_until(lambda: session(client, f"s{i}")["parked"])  # which it is when its record is written, too
            assert session(client, f"s{i}")["cached"]["device"] == 0
            assert turn(client, f"s{i}", TEXT[:5], 1)["usage"]["recomputed"] == 0


# ---- the cache's methods


def test_lookup_fetches_if_it_is_asked_to(daemon, disk):
    with daemon(**disk).connect() as client:
        ids = TEXT[:400]
        client.call("gen.start", {"prompt_ids": ids, "max_tokens": 1, "stream": False})
        evict(client, "device")
        assert client.call("cache.lookup", {"prompt_ids": ids}) == {**NOTHING, "host": 384}
        time.sleep(0.2)
        assert client.call("cache.lookup", {"prompt_ids": ids, "prefetch": True}) == {**NOTHING, "host": 384}
        wait_until(lambda: client.call("cache.lookup", {"prompt_ids": ids})["device"] == 384)


def test_many_prefetches_take_turns(daemon, disk):
    with daemon(**{**disk, "kv.host_bytes": "128MiB"}).connect() as client:
        prompts = [TEXT[37 * i : 37 * i + 330] for i in range(6)]
        for ids in prompts:
            client.call("gen.start", {"prompt_ids": ids, "max_tokens": 1, "stream": False})
        evict(client, "device")
        for ids in prompts:
            client.call("cache.lookup", {"prompt_ids": ids, "prefetch": True})
        wait_until(lambda: all(client.call("cache.lookup", {"prompt_ids": ids})["device"] == 320 for ids in prompts))


def test_evicting_tier_by_tier_loses_nothing_that_the_next_one_keeps(daemon, disk):
    with daemon(**disk).connect() as client:
        ids = TEXT[:400]
        cold = client.call("gen.start", {"prompt_ids": ids, "max_tokens": 16, "temperature": 0, "stream": False, "return_ids": True})
        for tier, left in ("device", {**NOTHING, "host": 384}), ("host", {**NOTHING, "disk": 384}):
            assert evict(client, tier)["bytes"] > 0
            assert client.call("cache.lookup", {"prompt_ids": ids}) == left
        stats = client.call("cache.stats")["tiers"]["disk"]
        assert stats["pages"] >= 6 and 0 < stats["used_bytes"] <= stats["bytes"]
        warm = client.call("gen.start", {"prompt_ids": ids, "max_tokens": 16, "temperature": 0, "stream": False, "return_ids": True})
        assert warm["usage"]["cached"] == {**NOTHING, "disk": 384} and warm["ids"] == cold["ids"]
        assert evict(client, "disk")["bytes"] > 0
        evict(client, "device")
        evict(client, "host")
        evict(client, "disk")
        assert client.call("cache.lookup", {"prompt_ids": ids}) == NOTHING


def test_flush_and_verify_count(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client:
        begin(client, "a")
        flushed = client.call("cache.flush")
        assert flushed["saved"] >= 0
        n = client.call("cache.stats")["tiers"]["disk"]["pages"]
        assert n >= 7
        verified = client.call("cache.verify")
        assert verified["checked"] >= n and (verified["damaged"], verified["unread"]) == (0, 0)
        assert client.call("cache.flush") == {"saved": 0, "bytes": 0}
    with daemon().connect() as client:
        assert client.call("cache.verify") == {"checked": 0, "damaged": 0, "unread": 0}
        assert client.call("cache.flush") == {"saved": 0, "bytes": 0}


def test_purge_takes_one_users_pages_and_no_others(daemon, disk, other_user):
    one = daemon(**disk, **{"server.socket_mode": "0666"})
    with one.connect() as mine:
        theirs = other_user(one)
        for client in mine, theirs:
            begin(client, "a")
            client.call("session.pin", {"name": "a"})
            client.call("session.park", {"name": "a"})
            client.call("session.resume", {"name": "a", "wait": True})
        with pytest.raises(spillway.Forbidden):
            theirs.call("cache.purge", {"uid": 0})
        mine_before = session(mine, "a")
        purged = theirs.call("cache.purge")
        assert purged["device"] > 0 and purged["host"] > 0 and purged["disk"] > 0 and purged["left"] == 0
        assert session(theirs, "a")["cached"] == NOTHING
        assert session(mine, "a")["cached"] == mine_before["cached"]
        assert turn(theirs, "a", TEXT[:10])["usage"]["cached"] == NOTHING
        theirs.call("session.unpin", {"name": "a"})
        assert mine.call("cache.purge", {"uid": 65534})["device"] > 0
        assert session(mine, "a")["cached"] == mine_before["cached"]
        assert mine.call("cache.purge")["left"] == 0
        assert session(mine, "a")["cached"] == NOTHING


def test_purge_waits_for_a_request_that_uses_the_pages(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client, one.connect() as other:
        generation = other.generate(prompt_ids=TEXT[:200], max_tokens=150, temperature=0, ignore_eos=True)
        next(e for e in generation if e["type"] == "delta")
        assert client.call("cache.purge")["left"] == 0
        assert not client.call("gen.list")["gens"]
        assert client.call("cache.lookup", {"prompt_ids": TEXT[:200]}) == NOTHING


def test_a_purged_user_finds_nothing_after_a_restart(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client:
        begin(client, "a")
        client.call("session.park", {"name": "a"})
        client.call("cache.purge")
        client.call("cache.flush")
    one.stop()
    with daemon(**disk).connect() as client:
        client.call("cache.verify")  # waits until all headers are read
        assert session(client, "a")["cached"] == NOTHING and session(client, "a")["n_tokens"] > 500


def test_a_purge_that_was_answered_outlives_a_kill(daemon, disk):
    one = daemon(**disk)
    prompts = [TEXT[100 * i : 100 * i + 700] for i in range(8)]
    with one.connect() as client:
        for ids in prompts:
            client.call("gen.start", {"prompt_ids": ids, "max_tokens": 1, "stream": False})
        client.call("cache.flush")
        assert client.call("cache.stats")["tiers"]["disk"]["pages"] > 40
        client.call("cache.purge")
    one.process.kill()
    one.stop(-signal.SIGKILL)
    with daemon(**disk).connect() as client:
        client.call("cache.verify")
        assert client.call("cache.stats")["tiers"]["disk"]["pages"] == 0
        for ids in prompts:
            assert client.call("cache.lookup", {"prompt_ids": ids}) == NOTHING


# ---- the end of the process


def test_stopping_parks_all_sessions(daemon, disk):
    settings = {**disk, "kv.disk_min_tokens": 100000}  # nothing is written that must not be
    one = daemon(**settings)
    with one.connect() as client:
        b = {name: begin(client, name, 150 + 90 * i) for i, name in enumerate("abcdef")}
        assert client.call("cache.stats")["tiers"]["disk"]["pages"] == 0
    one.stop()
    with daemon(**settings).connect() as client:
        client.call("cache.verify")
        for name in b:
            info = session(client, name)
            assert b[name] - 64 <= info["cached"]["disk"] == info["restore_point"], info


def test_the_manager_hears_what_the_end_takes_its_time_for(daemon, disk, manager):
    systemd = manager()
    one = daemon(env=systemd.env, **disk)
    with one.connect() as client:
        begin(client, "a")
        systemd.listen(0.1)
        one.process.send_signal(signal.SIGTERM)
        systemd.wait(r"EXTEND_TIMEOUT_USEC=60000000")
        systemd.wait(r"STATUS=draining: 1 sessions go to the disk")
    assert one.process.wait(timeout=60) == 0


def test_a_request_that_runs_is_ended_in_time_for_its_session_to_be_parked(daemon, disk):
    settings = {**disk, **LONG, "server.drain_timeout": "4s"}
    one = daemon(**settings)
    with one.connect() as client:
        b = begin(client, "a")
        generation = write_on(client, "a")
        next(e for e in generation if e["type"] == "delta")
        begun = time.monotonic()
        one.process.send_signal(signal.SIGTERM)
        for event in generation:
            pass
        assert generation.result()["finish_reason"] == "shutdown"
    assert one.process.wait(timeout=60) == 0
    assert 2 < time.monotonic() - begun < 8
    with daemon(**settings).connect() as client:
        client.call("cache.verify")
        info = session(client, "a")
        assert info["n_tokens"] > b and info["cached"]["disk"] >= b - 64
