"""Nothing waits for an event that does not come."""
import asyncio

import pytest

from conftest import ROOT
from raw import Raw

SECONDS = 240


def within(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, SECONDS))


@pytest.mark.parametrize("n_before", [32, 96])
def test_a_request_behind_as_many_as_one_turn_takes_is_begun_at_once(daemon, n_before):
    one = daemon()

    async def run():
        queue_ms = []
        async with await Raw.open(one.socket) as raw:
            for _ in range(5):
                batch = b"".join(raw.pack("server.health", {})[1] for _ in range(n_before))
                request_id, data = raw.pack("gen.start", {"prompt": "Hello", "max_tokens": 1, "stream": False})
                await raw.send(batch + data)
                queue_ms.append((await raw.answer(request_id))["timings"]["queue_ms"])
        assert sorted(queue_ms)[2] < 30, queue_ms

    within(run())


# Few pages: what a place holds matters.
FULL = {"draft.path": "", "model.path": ROOT / "share/tiny/target", "kv.dtype": "f32"}
TWO_PLACES = {**FULL, "kv.device_bytes": "26MiB", "sched.max_seqs": 2, "kv.restore_points": 0}
ONE_PLACE = {**FULL, "kv.device_bytes": "20MiB", "sched.max_seqs": 1, "kv.restore_points": 2}


async def state_of(raw, n_prompt):
    gens = (await raw.call("gen.list"))["gens"]
    return next((gen["state"] for gen in gens if gen["n_prompt"] == n_prompt), None)


def goes_on(one, slow_params, other_params):
    """One that does not read must not keep place and pages from one that does, and goes on later where it was."""
    async def run():
        async with await Raw.open(one.socket) as slow, await Raw.open(one.socket) as other:
            n_slow = len(slow_params["prompt_ids"])
            alone = [(await other.call("gen.start", **p))["ids"] for p in (slow_params, other_params)]
            slow_id = await slow.start("gen.start", **slow_params)
            while not slow.events[slow_id]:
                await asyncio.sleep(0.02)
            slow.stop_reading()
            while await state_of(other, n_slow) != "parked":
                await asyncio.sleep(0.02)
            result = await other.call("gen.start", **other_params)
            assert result["ids"] == alone[1]
            assert await state_of(other, n_slow) == "parked"
            slow.go_on_reading()
            result = await slow.answer(slow_id)
            assert result["ids"] == alone[0] and result["finish_reason"] == "length"
            assert slow.text(slow_id) == result["text"]
        assert one.metrics()["spillway_preemptions_total"] > 0

    within(run())


PARKS = {"server.output_high": "64KiB", "server.output_low": "16KiB", "server.slow_timeout": "1h"}
PARAMS = {"ignore_eos": True, "temperature": 0, "return_ids": True}


def test_a_seq_goes_on_while_a_parked_one_has_the_place(daemon):
    goes_on(daemon(**PARKS, **{"sched.max_seqs": 1}),
            {**PARAMS, "prompt_ids": [5] * 70, "max_tokens": 600, "logprobs": 20},
            {**PARAMS, "prompt_ids": [7] * 80, "max_tokens": 20})


def test_a_seq_goes_on_while_a_parked_one_has_the_pages(daemon, long):
    if not long:
        pytest.skip("computes long prompts several times; --long")
    one = daemon(**TWO_PLACES, **PARKS)
    with one.connect() as client:
        n_context = client.hello["model"]["n_context"]
    goes_on(one, {**PARAMS, "prompt_ids": [5] * (n_context // 2), "max_tokens": 600, "logprobs": 20},
            {**PARAMS, "prompt_ids": [7] * (n_context // 2 - 200), "max_tokens": 250})


def test_after_one_that_found_no_space_the_next_one_runs(daemon):
    """Pinned sessions hold what it needs; then what is left is as much as before."""
    one = daemon(**ONE_PLACE, **{"kv.share_per_uid": 100})

    async def run():
        async with await Raw.open(one.socket) as raw:
            n_context = (await raw.call("model.info"))["n_context"]
            n_pinned = n_context // 2 // 64 * 64 - 64
            await raw.call("session.open", name="s")
            await raw.call("gen.start", prompt_ids=[5] * (n_pinned + 10), max_tokens=1, session="s")
            pinned = await raw.call("session.pin", name="s")
            print(pinned)
            prompt = [7] * (n_context - n_pinned - 150)
            for _ in range(2):
                result = await raw.call("gen.start", prompt_ids=prompt, ignore_eos=True)
                assert result["finish_reason"] == "error"
                print(result["usage"])
            result = await raw.call("gen.start", prompt_ids=prompt, max_tokens=4, ignore_eos=True)
            assert result["finish_reason"] == "length"
            # one that does not even fit at its beginning
            result = await raw.call("gen.start", prompt_ids=prompt + [9] * 200, max_tokens=4, ignore_eos=True)
            assert result["finish_reason"] == "error"

    within(run())
