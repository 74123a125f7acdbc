"""Whoever cancels, leaves or does not read gives everything back soon, others notice nothing, and each request has exactly
one response with its events in order before it (raw.py watches that in every test)."""
import asyncio
import os
import random
import time

from raw import Gone, Raw, Refused
from test_abuse import at_rest

SEED = int(os.environ.get("RELEASE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
LONG = {"ignore_eos": True, "temperature": 0}
SMALL_BUFFERS = {"server.output_high": "64KiB", "server.output_low": "16KiB"}
PLANS = 3  # within so many everything is back


def run(coroutine, seconds=240):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


async def wait_for_text(raw, request_id):
    while not any(event["type"] == "delta" for event in raw.events[request_id]):
        await asyncio.sleep(0.005)


async def gauges_of(raw):
    lines = (line.rsplit(" ", 1) for line in (await raw.call("server.metrics"))["text"].splitlines() if line[0] != "#")
    return {name: float(value) for name, value in lines}


async def one_gen(raw):
    gens = (await raw.call("gen.list"))["gens"]
    return gens[0] if len(gens) == 1 else None


# ---- cancel and disconnect


def n_steps(gauges):
    return sum(gauges[f'spillway_steps_total{{part="{part}"}}'] for part in ("prefill", "cycle"))


def leave_while_another_runs(daemon, leave):
    """The other one keeps steps coming, and has the tokens it has alone."""
    one = daemon()
    other = {**LONG, "prompt": "Once upon a time", "max_tokens": 500, "return_ids": True}
    late = []

    async def check():
        async with await Raw.open(one.socket) as runner, await Raw.open(one.socket) as watcher:
            alone = (await runner.call("gen.start", **other))["ids"]
            for kind in ("prefill", "decode") * 3:
                running = await runner.start("gen.start", **other)
                await wait_for_text(runner, running)
                raw = await Raw.open(one.socket)
                prompt_ids = [random.Random(SEED).randrange(300, 4000)] * (6000 if kind == "prefill" else 40)
                leaving = await raw.start("gen.start", **LONG, prompt_ids=prompt_ids, cache="bypass")
                if kind == "decode":
                    await wait_for_text(raw, leaving)
                else:
                    while (await gauges_of(watcher))["spillway_running_seqs"] < 2:
                        pass
                await leave(raw, leaving)
                left, back = None, None
                while back is None:
                    gauges = await gauges_of(watcher)
                    if left is None and not any(g["n_prompt"] == len(prompt_ids)
                                                for g in (await watcher.call("gen.list"))["gens"]):
                        left = n_steps(gauges)
                    if left is not None and gauges["spillway_preempted_seqs"] == 0:  # nor any that leaves
                        back = n_steps(gauges)
                late.append(back - left)
                assert (await runner.answer(running))["ids"] == alone
                await raw.close()
            end = time.monotonic() + 5
            while (why := at_rest(await gauges_of(watcher))) and time.monotonic() < end:
                await asyncio.sleep(0.02)
            assert why is None, why
        # A plan has up to three passes, and the gauges are asked for between plans.
        assert max(late) <= PLANS * 2, f"steps until everything was back: {late}"

    run(check())


def test_cancel_gives_everything_back_within_three_plans(daemon):
    async def cancel(raw, request_id):
        assert await raw.call("gen.cancel", id=request_id) == {}
        assert (await raw.answer(request_id))["finish_reason"] == "cancelled"

    leave_while_another_runs(daemon, cancel)


def test_disconnect_gives_everything_back_within_three_plans(daemon):
    async def disconnect(raw, _):
        await raw.close()

    leave_while_another_runs(daemon, disconnect)


# ---- slow readers


def test_a_slow_reader_is_parked_and_goes_on_where_it_was(daemon):
    one = daemon(**SMALL_BUFFERS, **{"server.slow_timeout": "1h"})
    params = {**LONG, "prompt": "Once upon a time", "max_tokens": 700, "logprobs": 20, "return_ids": True}

    async def check():
        async with await Raw.open(one.socket) as slow, await Raw.open(one.socket) as other:
            alone = await other.call("gen.start", **params)
            request_id = await slow.start("gen.start", **params)
            await wait_for_text(slow, request_id)
            slow.stop_reading()
            while (await one_gen(other))["state"] != "parked":
                await asyncio.sleep(0.01)
            await other.call("gen.start", **LONG, prompt="so", max_tokens=20)  # plans on their way are home
            n = (await one_gen(other))["n_tokens"]
            assert (await other.call("gen.start", **LONG, prompt="it", max_tokens=100))["finish_reason"] == "length"
            gen = await one_gen(other)
            assert gen["state"] == "parked" and gen["n_tokens"] == n < 700
            slow.go_on_reading()
            result = await slow.answer(request_id)
            assert result["ids"] == alone["ids"] and result["text"] == alone["text"] == slow.text(request_id)

    run(check())


def test_a_slow_reader_is_cancelled_after_slow_timeout(daemon):
    one = daemon(**SMALL_BUFFERS, **{"server.slow_timeout": "1s"})

    async def check():
        async with await Raw.open(one.socket) as slow, await Raw.open(one.socket) as other:
            request_id = await slow.start("gen.start", **LONG, prompt="Once upon a time", logprobs=20)
            await wait_for_text(slow, request_id)
            slow.stop_reading()
            begin = time.monotonic()
            while (await other.call("gen.list"))["gens"]:
                await asyncio.sleep(0.01)
            assert time.monotonic() - begin > 0.9
            slow.go_on_reading()  # before it is closed, after the same time again
            result = await slow.answer(request_id)
            assert result["finish_reason"] == "slow_client"
            assert slow.text(request_id) == result["text"] != ""
            assert (await slow.call("gen.start", **LONG, prompt="a", max_tokens=1))["finish_reason"] == "length"

    run(check())


def test_who_never_reads_is_closed(daemon):
    one = daemon(**SMALL_BUFFERS, **{"server.slow_timeout": "200ms"})

    async def check():
        async with await Raw.open(one.socket) as other:
            n = len(os.listdir(f"/proc/{one.pid}/fd"))
            slow = await Raw.open(one.socket)
            request_id = await slow.start("gen.start", **LONG, prompt="Once upon a time", logprobs=20)
            slow.stop_reading()
            while (await other.call("gen.list"))["gens"] or one.n_fds() > n:
                await asyncio.sleep(0.02)
            slow.go_on_reading()
            await slow.ended.wait()
            assert not slow.broken and request_id
            await slow.close()
            assert (await gauges_of(other))["spillway_slow_clients_total"] == 1

    run(check())


# ---- one response each


def test_whatever_happens_each_request_has_one_response(daemon, long):
    """Random requests, cancels, pauses and deadlines on several connections; one of them ends in the middle."""
    print(f"RELEASE_SEED={SEED}")
    one = daemon(**SMALL_BUFFERS, **{"sched.queue_max": 6, "server.slow_timeout": "300ms", "sched.max_seqs": 4})
    n_rounds, reasons = 400 if long else 20, {}

    async def client(dice, is_cut):
        raw = await Raw.open(one.socket)
        ids = []
        for _ in range(n_rounds):
            what = dice.random()
            if what < 0.5:
                params = {"prompt": "so it goes " * dice.choice([1, 20, 100, 400]), "stream": dice.random() < 0.8,
                          "max_tokens": dice.choice([1, 3, 20, 200]), "temperature": dice.choice([0, 1])}
                if dice.random() < 0.3:
                    params["deadline_ms"] = dice.randrange(1, 400)
                if dice.random() < 0.3:
                    params["logprobs"] = 20
                if dice.random() < 0.2:
                    params["stop"] = ["e", "it"]
                ids.append(await raw.start("gen.start", **params))
            elif what < 0.7 and ids:
                await raw.start("gen.cancel", id=dice.choice(ids))
            elif what < 0.8:
                await raw.start("server.metrics")
            elif what < 0.9:
                raw.stop_reading()
            else:
                raw.go_on_reading()
            await asyncio.sleep(dice.random() * 0.05)
        if is_cut:
            await raw.close()
        raw.go_on_reading()
        for request_id in list(raw.waiting):
            try:
                result = await raw.answer(request_id)
                reason = result.get("finish_reason", "short")
            except Refused as error:
                reason = error.code
            except Gone:
                reason = "gone"
            reasons[reason] = reasons.get(reason, 0) + 1
        await asyncio.sleep(0.2)  # nothing comes after the last response
        await raw.close()
        assert not raw.broken, raw.broken

    async def check():
        dice = random.Random(SEED)
        await asyncio.gather(*(client(random.Random(dice.random()), i == 0) for i in range(6)))
        async with await Raw.open(one.socket) as raw:
            end = time.monotonic() + 10
            while (why := at_rest(await gauges_of(raw))) and time.monotonic() < end:
                await asyncio.sleep(0.05)
            assert why is None, why

    run(check(), 600)
    print(reasons)
