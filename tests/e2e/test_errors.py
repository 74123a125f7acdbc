"""Error codes and finish reasons, each by what the protocol says brings it about. BAD_FRAME is in test_abuse.py, slow_client
and cancelled in test_release.py, error in test_stuck.py. CORRUPT in test_sessions_durable.py."""
import asyncio
import os
import resource
import signal
import socket
import subprocess
import time

import msgpack
import pytest

from conftest import ROOT
from raw import Raw, Refused

WORD = "ab" * 1_100_000  # cutting it up takes 16 times its bytes: more than malloc may have kept of what was freed
LONG = {"prompt": "Once upon a time", "ignore_eos": True}


def run(coroutine, seconds=120):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def refusal(raw, method, **params):
    with pytest.raises(Refused) as caught:
        await raw.call(method, **params)
    return caught.value


async def wait_for_text(raw, request_id):
    while not any(event["type"] == "delta" for event in raw.events[request_id]):
        await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def one(kept_daemon):
    return kept_daemon()


# ---- codes


def test_bad_param_names_the_param(one):
    async def check():
        async with await Raw.open(one.socket) as raw:
            assert "top_p" in (await refusal(raw, "gen.start", prompt="a", top_p=1.5)).message
            for params in ({}, {"prompt": "a", "prompt_ids": [1]}, {"prompt": ""}, {"prompt_ids": [1 << 30]},
                           {"prompt": "a", "colour": 1}, {"prompt": 5}, {"prompt": "a", "max_tokens": 0},
                           {"messages": [{"role": "nobody", "content": "x"}]}, {"prompt": "a", "logit_bias": {"x": 1}}):
                assert (await refusal(raw, "gen.start", **params)).code == "BAD_PARAM", params
            assert (await refusal(raw, "text.detokenize", ids=[1 << 30])).code == "BAD_PARAM"
            n_vocab = (await raw.call("model.info"))["n_vocab"]
            error = await refusal(raw, "gen.start", messages=[{"role": "user", "contents": "x"}])
            assert error.code == "BAD_PARAM" and 'messages[0]: there is no key "contents"' in error.message
            error = await refusal(raw, "chat.render", messages=[{"role": "usr", "content": "x"}])
            assert error.code == "BAD_PARAM" and 'messages[0].role: is "usr"; it must be system, user' in error.message
            error = await refusal(raw, "gen.start", prompt="a", stop_ids=[n_vocab - 1, n_vocab])
            assert error.code == "BAD_PARAM"
            assert f"stop_ids: id {n_vocab}; this model's ids are 0..{n_vocab - 1}" in error.message
            assert (await raw.call("gen.start", prompt="a", max_tokens=1))["finish_reason"] == "length"

    run(check())


def test_unknown_method_suggests_one(one):
    async def check():
        async with await Raw.open(one.socket) as raw:
            error = await refusal(raw, "gen.strat", prompt="a")
            assert error.code == "UNKNOWN_METHOD" and "gen.start" in error.message
            error = await refusal(raw, "gen.start\0", prompt="a")  # never taken for the name before the zero
            assert error.code == "UNKNOWN_METHOD" and 'no method "gen.start?"' in error.message
            error = await refusal(raw, "a\n\0b")
            assert error.code == "UNKNOWN_METHOD" and 'no method "a??b"' in error.message

    run(check())


def test_context_length_has_the_numbers(one):
    async def check():
        async with await Raw.open(one.socket) as raw:
            n_context = (await raw.call("model.info"))["n_context"]
            error = await refusal(raw, "gen.start", prompt_ids=[5] * n_context)
            assert error.code == "CONTEXT_LENGTH" and error.data == {"n_prompt": n_context, "n_context": n_context}

    run(check())


def test_forbidden_before_hello(one):
    async def check():
        async with await Raw.open(one.socket, hello=False) as raw:
            assert (await refusal(raw, "model.info")).code == "FORBIDDEN"
            await raw.call("hello", version=1)
            await raw.call("model.info")

    run(check())


def test_forbidden_for_other_users(daemon):
    """An administrator's method, asked by another uid."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    other = daemon(**{"server.socket_mode": "0666"})
    folder = ROOT / "client/python"
    code = (f"import os, sys; sys.path.insert(0, {str(folder)!r}); import spillway\n"
            "os.setuid(65534)\n"
            f"with spillway.Client({os.path.basename(other.socket)!r}) as client:\n"
            "    try: client.call('server.drain')\n"
            "    except spillway.Forbidden as error: print(error.code)\n"
            "    print(client.complete(prompt='a', max_tokens=1)['finish_reason'])\n")
    home = other.log_path.parent  # the folders above are closed to others, and other tests keep them so
    home.chmod(0o755)
    done = subprocess.run(["/usr/bin/python3", "-B", "-c", code], cwd=home, capture_output=True, text=True, timeout=60)
    assert done.stdout == "FORBIDDEN\nlength\n", done


def test_not_found_for_what_is_not_there(one):
    async def check():
        async with await Raw.open(one.socket) as raw, await Raw.open(one.socket) as other:
            for method, params in (("gen.start", {"prompt": "a", "session": "nobody's"}),
                                   *((f"session.{verb}", {"name": "nobody's"}) for verb in
                                     ("info", "close", "park", "resume", "pin", "unpin")),
                                   ("session.fork", {"name": "nobody's", "new_name": "b"})):
                error = await refusal(raw, method, **params)
                assert error.code == "NOT_FOUND" and 'no session "nobody\'s"' in error.message, method
            request_id = await other.start("gen.start", **LONG)
            await wait_for_text(other, request_id)
            error = await refusal(raw, "gen.cancel", id=request_id)  # another connection's
            assert error.code == "NOT_FOUND" and f"the id {request_id};" in error.message
            error = await refusal(raw, "gen.cancel", gen=1 << 40)
            assert error.code == "NOT_FOUND" and f"the number {1 << 40};" in error.message
            assert await other.call("gen.cancel", id=request_id) == {}
            assert (await other.answer(request_id))["finish_reason"] == "cancelled"

    run(check())


def test_of_two_requests_with_one_id_the_latest_is_cancelled(one):
    unpacker = msgpack.Unpacker()

    with socket.socket(socket.AF_UNIX) as sock:
        def send(request_id, method, **params):
            sock.sendall(msgpack.packb([0, request_id, method, params]))

        def receive(request_id):
            """Error and result of a response."""
            while True:
                for message in unpacker:
                    assert message[:2] == [1, request_id]
                    return message[2:]
                unpacker.feed(sock.recv(1 << 16))

        def numbers(state):
            """Of the two, by age, when all that are left are in this state."""
            while True:
                send(8, "gen.list")
                gens = [gen for gen in receive(8)[1]["gens"] if gen["id"] == 7]
                if all(gen["state"] == state for gen in gens):
                    return sorted(gen["gen"] for gen in gens)
                time.sleep(0.01)

        sock.settimeout(60)
        sock.connect(one.socket)
        send(1, "hello", version=1)
        receive(1)
        send(7, "gen.start", **LONG, stream=False)
        send(7, "gen.start", **LONG, stream=False)
        first, second = numbers("decode")
        send(9, "gen.cancel", id=7)
        answers = {}
        while len(answers) < 2:  # in any order
            for message in unpacker:
                answers[message[1]] = message[2:]
            if len(answers) < 2:
                unpacker.feed(sock.recv(1 << 16))
        assert answers[9] == [None, {}] and answers[7][1]["finish_reason"] == "cancelled"
        assert numbers("decode") == [first] and first < second


def test_busy_when_as_many_wait_as_may(daemon):
    few = daemon(**{"sched.max_seqs": 1, "sched.queue_max": 1, "limits.connections": 2})

    async def check():
        async with await Raw.open(few.socket) as raw, await Raw.open(few.socket):
            ids = [await raw.start("gen.start", **LONG, max_tokens=400)]
            await wait_for_text(raw, ids[0])
            ids.append(await raw.start("gen.start", **LONG))
            error = await refusal(raw, "gen.start", **LONG)
            assert error.code == "BUSY" and error.data["n_waiting"] == 1 and error.data["retry_ms"] > 0
            third = await Raw.open(few.socket, hello=False)
            await third.ended.wait()
            assert [e["code"] for e in third.unasked] == ["BUSY"]
            assert third.unasked[0]["data"] == {"n_max": 2, "retry_ms": 1000}
            assert "limits.connections is 2; try again in 1000 ms" in third.unasked[0]["message"]
            await third.close()
            for request_id in reversed(ids):
                await raw.call("gen.cancel", id=request_id)
            assert [(await raw.answer(i))["finish_reason"] for i in ids] == ["cancelled", "cancelled"]

    run(check())


@pytest.mark.parametrize("n_places, queue_max, n_asked", [(8, 1, 9), (2, 0, 2)])
def test_who_finds_a_place_does_not_wait(daemon, n_places, queue_max, n_asked):
    """All in one write: none of them has its place yet when the next one comes."""
    some = daemon(**{"sched.max_seqs": n_places, "sched.queue_max": queue_max})

    async def check():
        async with await Raw.open(some.socket) as raw:
            packed = [raw.pack("gen.start", LONG) for _ in range(n_asked + 1)]
            await raw.send(b"".join(data for _, data in packed))
            ids = [request_id for request_id, _ in packed]
            with pytest.raises(Refused) as caught:
                await raw.answer(ids.pop())
            assert caught.value.code == "BUSY" and caught.value.data["n_waiting"] == queue_max
            assert f"{queue_max} requests wait" in caught.value.message
            assert f"sched.queue_max is {queue_max}" in caught.value.message
            assert f"again in {caught.value.data['retry_ms']} ms" in caught.value.message
            for request_id in ids[:n_places]:
                await wait_for_text(raw, request_id)
            assert await raw.call("gen.cancel", id=ids[0]) == {}
            await raw.answer(ids[0])
            ids.append(await raw.start("gen.start", **LONG))  # its place is free before its last plan is home
            await wait_for_text(raw, ids[n_places])
            for request_id in ids[1:]:
                await raw.call("gen.cancel", id=request_id)
                assert (await raw.answer(request_id))["finish_reason"] == "cancelled"

    run(check())


def test_busy_when_requests_hold_as_much_memory_as_they_may(daemon):
    few = daemon(**{"sched.max_seqs": 1, "limits.pending_bytes": "1MiB", "limits.requests": 64})

    async def check():
        async with await Raw.open(few.socket) as raw:
            ids = [await raw.start("gen.start", prompt_ids=[1] * 20_000, max_tokens=1) for _ in range(24)]
            last = await refusal(raw, "gen.start", prompt_ids=[1] * 20_000)
            assert last.code == "BUSY" and last.data["pending_bytes"] == 1 << 20 and last.data["retry_ms"] > 0
            refused = [i for i in ids if raw.waiting_or_done(i).done()]
            assert 0 < len(refused) < len(ids)
            for request_id in ids:
                if request_id not in refused:
                    await raw.call("gen.cancel", id=request_id)
                    try:
                        assert (await raw.answer(request_id))["finish_reason"] == "cancelled"
                    except Refused as late:  # on a slow machine its prompt was not looked at yet
                        assert late.code == "CANCELLED"
            assert (await raw.call("gen.start", prompt="a", max_tokens=1))["finish_reason"] == "length"

    run(check())


def test_busy_while_another_request_uses_the_session(one):
    async def check():
        async with await Raw.open(one.socket) as raw:
            await raw.call("session.open", name="s")
            request_id = await raw.start("gen.start", **LONG, session="s")
            await wait_for_text(raw, request_id)
            assert (await refusal(raw, "gen.start", prompt="a", session="s")).code == "BUSY"
            assert (await refusal(raw, "session.close", name="s")).code == "BUSY"
            await raw.call("gen.cancel", id=request_id)
            await raw.answer(request_id)
            await raw.call("session.close", name="s")

    run(check())


def test_quota_when_a_user_has_as_many_as_one_may(daemon):
    few = daemon(**{"limits.requests_per_uid": 1, "limits.sessions_per_uid": 1})

    async def check():
        async with await Raw.open(few.socket) as raw:
            request_id = await raw.start("gen.start", **LONG)
            assert (await refusal(raw, "gen.start", prompt="a")).code == "QUOTA"
            await raw.call("gen.cancel", id=request_id)
            await raw.answer(request_id)
            await raw.call("gen.start", prompt="a", max_tokens=1)
            await raw.call("session.open", name="s")
            assert (await refusal(raw, "session.open", name="t")).code == "QUOTA"

    run(check())


@pytest.mark.parametrize("share, code", [(25, "QUOTA"), (100, "NO_SPACE"), (0, "NO_SPACE")])
def test_no_space_to_pin_in(daemon, share, code):
    small = daemon(**{"kv.device_bytes": "24MiB", "sched.max_seqs": 1, "kv.share_per_uid": share})

    async def check():
        async with await Raw.open(small.socket) as raw:
            n_context = (await raw.call("model.info"))["n_context"]
            await raw.call("session.open", name="s")
            await raw.call("gen.start", prompt_ids=[5] * (n_context * 3 // 5), max_tokens=1, session="s")
            refused = await refusal(raw, "session.pin", name="s")
            assert refused.code == code and f"would hold {n_context * 3 // 5 // 64} and 1 more" in refused.message
            await raw.call("session.open", name="little")
            await raw.call("gen.start", prompt_ids=[6] * 100, max_tokens=1, session="little")
            assert (await raw.call("session.pin", name="little"))["pinned"]

    run(check())


def hold_the_worker(raw, n=60):
    """One worker, and prompts that keep it busy for a while: they are cut into tokens to find that they are too long."""
    return [raw.pack("gen.start", {"prompt": "so it goes " * 30000})[1] for _ in range(n)]


ONE_WORKER = {"env": {"UV_THREADPOOL_SIZE": "1"}}


def test_cancelled_and_deadline_before_admission(daemon):
    one_worker = daemon(**ONE_WORKER)

    async def check():
        async with await Raw.open(one_worker.socket) as busy, await Raw.open(one_worker.socket) as raw:
            for data in hold_the_worker(busy):
                await busy.send(data)
            prompt = "so it goes " * 2000
            late = await raw.start("gen.start", prompt=prompt, deadline_ms=1)
            unwanted = await raw.start("gen.start", prompt=prompt)
            assert await raw.call("gen.cancel", id=unwanted) == {}
            for request_id, code in ((unwanted, "CANCELLED"), (late, "DEADLINE")):
                with pytest.raises(Refused) as caught:
                    await raw.answer(request_id)
                assert caught.value.code == code and not raw.events[request_id]

    run(check())


def test_slow_client_before_admission(daemon):
    one_worker = daemon(**ONE_WORKER, **{"server.slow_timeout": "100ms", "server.output_high": "64KiB",
                                         "server.output_low": "16KiB"})

    async def check():
        async with await Raw.open(one_worker.socket) as busy, await Raw.open(one_worker.socket) as raw:
            for data in hold_the_worker(busy):
                await busy.send(data)
            raw.stop_reading()
            waiting = await raw.start("gen.start", prompt="so it goes " * 2000)
            await raw.send(b"".join(raw.pack("server.metrics", {})[1] for _ in range(40)))
            await asyncio.sleep(0.19)  # once the timeout, not twice
            raw.go_on_reading()
            with pytest.raises(Refused) as caught:
                await raw.answer(waiting)
            assert caught.value.code == "SLOW_CLIENT"

    run(check())


def test_model_not_ready_while_loading(daemon):
    loading = daemon(ready=False)

    async def check():
        while True:
            try:
                raw = await Raw.open(loading.socket)
                break
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(0.001)
        async with raw:
            assert not (await raw.call("server.health"))["ready"]
            assert (await refusal(raw, "model.info")).code == "MODEL_NOT_READY"
            assert (await refusal(raw, "gen.start", prompt="a")).code == "MODEL_NOT_READY"

    run(check())
    loading.wait_ready()


def test_shutting_down_for_what_comes_while_draining(daemon):
    draining = daemon()

    async def check():
        async with await Raw.open(draining.socket) as raw:
            request_id = await raw.start("gen.start", **LONG, max_tokens=600)
            other_id = await raw.start("gen.start", **LONG)
            await wait_for_text(raw, other_id)
            assert (await raw.call("server.health"))["percent"] == 100
            await raw.call("server.drain")
            health = await raw.call("server.health")
            assert (health["phase"], health["percent"], health["ready"]) == ("draining", 0, False)
            await raw.call("gen.cancel", id=other_id)
            await raw.answer(other_id)
            assert (await raw.call("server.health"))["percent"] == 49
            assert (await refusal(raw, "gen.start", prompt="a")).code == "SHUTTING_DOWN"
            assert (await raw.answer(request_id))["finish_reason"] == "length"

    run(check())
    assert draining.process.wait(timeout=30) == 0


def test_internal_without_memory_and_all_is_well_after_it(daemon):
    poor = daemon()
    if poor.has_sanitizer():
        pytest.skip("a sanitizer ends the process when memory is out")

    async def check():
        async with await Raw.open(poor.socket) as raw:
            with open(f"/proc/{poor.pid}/statm") as statm:
                n_bytes = int(statm.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            before = resource.prlimit(poor.pid, resource.RLIMIT_AS, (n_bytes + (10 << 20), resource.RLIM_INFINITY))
            for _ in range(3):
                error = await refusal(raw, "text.tokenize", text=WORD)
                assert error.code == "INTERNAL" and "memory" in error.message
                assert (await raw.call("gen.start", prompt="a", max_tokens=1))["finish_reason"] == "length"
            resource.prlimit(poor.pid, resource.RLIMIT_AS, before)
            assert len((await raw.call("text.tokenize", text=WORD))["ids"]) > 10000

    run(check())


def test_every_error_is_counted(daemon):
    counted = daemon()

    async def check():
        async with await Raw.open(counted.socket) as raw:
            assert (await refusal(raw, "gen.start")).code == "BAD_PARAM"
            assert (await refusal(raw, "server.halth")).code == "UNKNOWN_METHOD"
            assert (await refusal(raw, "session.info", name="nobody's")).code == "NOT_FOUND"
        async with await Raw.open(counted.socket, hello=False) as raw:
            assert (await refusal(raw, "gen.list")).code == "FORBIDDEN"

    run(check())
    metrics = counted.metrics()
    for code in "BAD_PARAM", "UNKNOWN_METHOD", "NOT_FOUND", "FORBIDDEN":
        assert metrics[f'spillway_errors_total{{code="{code}"}}'] == 1, code


# ---- finish reasons


def test_stop_length_and_stop_string(one):
    async def check():
        async with await Raw.open(one.socket) as raw:
            params = {"prompt": "Once upon a time", "temperature": 0, "return_ids": True}
            free = await raw.call("gen.start", **params, max_tokens=20, ignore_eos=True)
            assert free["finish_reason"] == "length" and len(free["ids"]) == 20
            stop = free["ids"][5]
            result = await raw.call("gen.start", **params, max_tokens=20, ignore_eos=True, stop_ids=[stop])
            assert result["finish_reason"] == "stop"
            assert result["ids"] == free["ids"][:free["ids"].index(stop) + 1]
            word = free["text"][10:14]
            result = await raw.call("gen.start", **params, max_tokens=20, ignore_eos=True, stop=["\0", word])
            assert (result["finish_reason"], result["stop_match"]) == ("stop_string", word)
            assert result["text"] == free["text"][:free["text"].index(word)]

    run(check())


def test_drafts_behind_a_stop_string_are_not_counted(one):
    """Each pass gives the drafts it accepted and one token of its own, unless the last one ends before that."""
    async def check():
        async with await Raw.open(one.socket) as raw:
            params = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
            free = await raw.call("gen.start", **params, max_tokens=80)
            for at in range(4, 44, 4):
                result = await raw.call("gen.start", **params, max_tokens=80, stop=[free["text"][at:at + 6]])
                usage = result["usage"]
                assert result["finish_reason"] == "stop_string" and usage["draft"]["accepted"] < usage["completion"]
                own = usage["completion"] - 1 - usage["draft"]["accepted"]
                assert usage["draft"]["steps"] - 1 <= own <= usage["draft"]["steps"], usage

    run(check())


def test_context(daemon):
    small = daemon(**{"limits.max_context": 256})

    async def check():
        async with await Raw.open(small.socket) as raw:
            result = await raw.call("gen.start", prompt_ids=[5] * 200, ignore_eos=True)
            assert result["finish_reason"] == "context"
            assert result["usage"]["prompt"] + result["usage"]["completion"] in (256, 257)
            with pytest.raises(Refused) as caught:
                await raw.call("gen.start", prompt_ids=[5] * 256)
            assert caught.value.code == "CONTEXT_LENGTH"

    run(check())


def test_deadline(one):
    async def check():
        async with await Raw.open(one.socket) as raw:
            result = await raw.call("gen.start", **LONG, deadline_ms=300)
            assert result["finish_reason"] == "deadline"

    run(check())


def test_shutdown_at_the_drain_timeout(daemon):
    draining = daemon(**{"server.drain_timeout": "300ms"})

    async def check():
        async with await Raw.open(draining.socket) as raw:
            request_id = await raw.start("gen.start", **LONG)
            await wait_for_text(raw, request_id)
            draining.process.send_signal(signal.SIGTERM)
            result = await raw.answer(request_id)
            assert result["finish_reason"] == "shutdown"
            assert raw.text(request_id) == result["text"] != ""

    run(check())
    assert draining.process.wait(timeout=30) == 0
