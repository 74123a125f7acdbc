"""Clients that break every rule beside clients that keep them: those get their tokens, and the daemon gets all back."""
import asyncio
import os
import random
import time

import msgpack
import pytest

from raw import Gone, Raw, Refused

SEED = int(os.environ.get("ABUSE_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 31)
FRAME_BYTES = 256 << 10
SETTINGS = {"limits.frame_bytes": "256KiB", "server.output_high": "64KiB", "server.output_low": "16KiB",
            "limits.connections": 512, "sched.queue_max": 4096}


def well_behaved_requests():
    """What is asked, without streaming or with: different lengths, prefixes that are shared, greedy and sampled."""
    requests = []
    for i in range(10):
        notes = " ".join(f"The code of the {color} {thing} is {1000 + 37 * i + 11 * n}."
                         for n, (color, thing) in enumerate([("blue", "tower"), ("red", "door"), ("silver", "garden")]))
        question = ["What is the code of the red door?", "What is the code of the silver garden?"][i % 2]
        requests.append({"messages": [{"role": "system", "content": "Read the notes and answer.\n\n" + notes},
                                      {"role": "user", "content": question}],
                         "thinking": False, "max_tokens": 32, "return_ids": True,
                         "temperature": 0 if i % 3 else 0.8, "seed": i})
    requests.append({"prompt": "Notes: " + "the red door is blue. " * 40, "max_tokens": 24, "return_ids": True,
                     "temperature": 0, "ignore_eos": True})
    return requests


# ---- garbage: the daemon answers each with exactly one BAD_FRAME and closes


def nested(depth):
    return msgpack.packb([0, 9, "gen.start", {}])[:-1] + b"\x81\xa1a" + b"\x91" * depth + b"\xc0"


GARBAGE = {
    "never used byte": b"\xc1",
    "text": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "no array": msgpack.packb({"a": 1}),
    "a response": msgpack.packb([1, 1, None, {}]),
    "a notification": msgpack.packb([2, "gen.event", {}]),
    "too short": msgpack.packb([0, 7, "server.health"]),
    "too long": msgpack.packb([0, 7, "server.health", {}, 1]),
    "a kind of its own": msgpack.packb([3, 7, "server.health", {}]),
    "an id that is none": msgpack.packb([0, -1, "server.health", {}]),
    "a large id": msgpack.packb([0, 1 << 32, "server.health", {}]),
    "a method that is none": msgpack.packb([0, 7, 5, {}]),
    "params that are none": msgpack.packb([0, 7, "server.health", []]),
    "a key that is none": msgpack.packb([0, 7, "server.health", {1: 2}]),
    "a key twice": b"\x94\x00\x07\xadserver.health\x82\xa1a\x01\xa1a\x01",
    "no UTF-8": b"\x94\x00\x07\xadserver.health\x81\xa1a\xa2\xff\xfe",
    "an extension": b"\x94\x00\x07\xadserver.health\x81\xa1a\xd4\x01\x00",
    "nested": nested(16),
    "nested far": nested(5000),
    "a huge array": b"\xdd\xff\xff\xff\xff",
    "a huge map": b"\x94\x00\x07\xadserver.health\xdf\xff\xff\xff\xff",
    "a huge string": b"\x94\x00\x07\xdb\xff\xff\xff\xff",
    "a large frame": msgpack.packb([0, 7, "text.tokenize", {"text": "x" * (FRAME_BYTES + 1)}]),
}
CUT = {  # and then no more comes
    "half a header": b"\x94\x00",
    "half a string": b"\x94\x00\x07\xadserver",
    "half a map": b"\x94\x00\x07\xadserver.health\x82\xa1a",
    "half a large frame": msgpack.packb([0, 7, "text.tokenize", {"text": "x" * (FRAME_BYTES - 100)}])[:-1000],
}


async def expect_bad_frame(raw, what):
    """One BAD_FRAME and the end."""
    try:
        await asyncio.wait_for(raw.ended.wait(), 60)
    except asyncio.TimeoutError:
        raise AssertionError(f"{what}: the connection stays open") from None
    bad = [e for e in raw.unasked if e["code"] == "BAD_FRAME"]
    for future in raw.waiting.values():
        if isinstance(future.exception(), Refused) and future.exception().code == "BAD_FRAME":
            bad.append(future.exception())
    assert len(bad) == 1 and len(raw.unasked) <= 1, f"{what}: {bad} {raw.unasked}"


async def send_garbage(raw, data, is_cut=False):
    try:
        await raw.send(data)
        if is_cut:
            raw.sock.shutdown(1)  # nothing follows
    except (BrokenPipeError, ConnectionResetError):
        pass  # closed before all was taken


# ---- at rest


def at_rest(gauges):
    pools = {name: value for name, value in gauges.items() if "_slots{" in name}
    for group in ("target_full", "target_state", "draft_full", "draft_sliding"):
        slots, free, indexed, pinned = (pools[f'spillway_pool_{kind}slots{{group="{group}"}}']
                                        for kind in ("", "free_", "indexed_", "pinned_"))
        if free + indexed != slots or pinned != 0:
            return f"{group}: {slots:.0f} slots, {free:.0f} free, {indexed:.0f} indexed, {pinned:.0f} pinned"
    for name in ("running_seqs", "queued_requests", "preempted_seqs"):
        if gauges["spillway_" + name] != 0:
            return f"{name}: {gauges['spillway_' + name]:.0f}"
    return None


def wait_at_rest(one, n_fds, seconds=10):
    """All pages, seqs, places and descriptors are back."""
    end = time.monotonic() + seconds
    while True:
        gauges = one.metrics()
        why = at_rest(gauges)
        if why is None and one.n_fds() != n_fds:
            why = f"{one.n_fds()} descriptors, {n_fds} before"
        if why is None or time.monotonic() > end:
            assert why is None, why
            return gauges
        time.sleep(0.05)


# ---- who does what


class Crowd:
    def __init__(self, path, alone, seed):
        self.path, self.alone = path, alone
        self.random = random.Random(seed)
        self.n_garbage = self.n_right = self.n_messages = 0

    async def ask(self, raw, stream=True):
        i = self.random.randrange(len(self.alone))
        params, expected = self.alone[i]
        request_id = await raw.start("gen.start", **params, stream=stream)
        result = await raw.answer(request_id)
        assert result["ids"] == expected["ids"], f"request {i}: {result}\nalone: {expected}"
        assert result["text"] == expected["text"] and result["finish_reason"] == expected["finish_reason"]
        if stream:
            assert raw.text(request_id) == result["text"]
            ids = [n for e in raw.events[request_id] if e["type"] == "delta" for n in e.get("ids", [])]
            assert ids == result["ids"]
        else:
            assert not raw.events[request_id]
        self.n_right += 1

    async def good(self):
        async with await Raw.open(self.path) as raw:
            for _ in range(3):
                await self.ask(raw, stream=self.random.random() < 0.7)
                await asyncio.sleep(self.random.random() * 0.1)
        self.n_messages += raw.n_answers

    async def good_in_parallel(self):
        async with await Raw.open(self.path) as raw:
            await asyncio.gather(*(self.ask(raw) for _ in range(3)))

    def long_one(self):
        return {"prompt": f"{self.random.random()} " + "so it goes " * self.random.randrange(1, 60),
                "ignore_eos": True, "max_tokens": 150, "logprobs": self.random.choice([0, 5])}

    async def vanish(self):
        for _ in range(3):
            raw = await Raw.open(self.path)
            for _ in range(self.random.randrange(1, 4)):
                await raw.start("gen.start", **self.long_one())
            await asyncio.sleep(self.random.random() * 0.5)
            await raw.close()

    async def cancel(self):
        async with await Raw.open(self.path) as raw:
            for _ in range(3):
                request_id = await raw.start("gen.start", **self.long_one())
                await asyncio.sleep(self.random.random() * 0.3)
                asked = await asyncio.gather(*(raw.call("gen.cancel", id=request_id) for _ in range(2)),
                                             return_exceptions=True)
                assert all(a == {} or a.code == "NOT_FOUND" for a in asked), asked
                result = await raw.answer(request_id)
                assert result["finish_reason"] in ("cancelled", "length"), result

    async def garbage(self, also_work):
        what = self.random.choice(list(GARBAGE) + list(CUT))
        data = GARBAGE.get(what) or CUT[what]
        raw = await Raw.open(self.path, hello=self.random.random() < 0.8)
        if also_work and raw.last_id:
            await raw.start("gen.start", **self.long_one())
            await asyncio.sleep(self.random.random() * 0.2)
        self.n_garbage += 1
        await send_garbage(raw, data + (b"" if what in CUT else self.random.randbytes(self.random.randrange(300))),
                           what in CUT)
        await expect_bad_frame(raw, what)
        await raw.close()

    async def half_frame(self):
        """Half a message, and gone; or a message byte by byte, which is right."""
        raw = await Raw.open(self.path)
        _, data = raw.pack("gen.start", {"prompt": "half", "max_tokens": 4})
        cut = self.random.randrange(1, len(data))
        await raw.send(data[:cut])
        await asyncio.sleep(self.random.random() * 0.3)
        if self.random.random() < 0.5:
            self.n_garbage += 1  # it gets a BAD_FRAME that nobody reads
            await raw.close()
            return
        for i in range(cut, len(data)):
            await raw.send(data[i:i + 1])
            await asyncio.sleep(0.002)
        await raw.answer(raw.last_id)
        await raw.close()

    async def slow(self):
        """Reads, but late."""
        async with await Raw.open(self.path) as raw:
            params, expected = self.random.choice(self.alone)
            ids = []
            for _ in range(8):
                raw.stop_reading()
                ids.append(await raw.start("gen.start", **params, logprobs=20))
            for _ in range(10):
                await raw.start("server.metrics")
            await asyncio.sleep(0.5 + self.random.random())
            raw.go_on_reading()
            for request_id in ids:
                result = await raw.answer(request_id)
                assert result["ids"] == expected["ids"], result

    async def flood(self):
        """Many requests at once, wrong ones among them; each gets its answer."""
        async with await Raw.open(self.path) as raw:
            batch = b""
            for i in range(300):
                method, params = self.random.choice([
                    ("server.health", {}), ("text.tokenize", {"text": "so it goes " * 20}), ("gen.list", {}),
                    ("gen.cancel", {"id": 1 << 20}), ("no.method", {}), ("text.tokenize", {}),
                    ("gen.start", {"prompt": "x", "max_tokens": 1, "stream": False}), ("gen.start", {"prompt": ""}),
                    ("session.info", {"name": "nobody's"}), ("text.tokenize", {"text": "a", "more": 1})])
                batch += raw.pack(method, params)[1]
            await raw.send(batch)
            answers = await asyncio.gather(*list(raw.waiting.values()), return_exceptions=True)
            codes = {a.code for a in answers if isinstance(a, Exception)}
            assert len(answers) >= 300 and codes <= {"NOT_FOUND", "UNKNOWN_METHOD", "BAD_PARAM", "BUSY"}, codes

    async def run(self, n_clients):
        bad = [self.vanish, self.cancel, lambda: self.garbage(False), lambda: self.garbage(True), self.half_frame,
               self.slow, self.flood]
        good = [self.good, self.good, self.good_in_parallel]
        clients = [(good[i // 2 % len(good)] if i % 2 else bad[i // 2 % len(bad)])() for i in range(n_clients)]
        await asyncio.gather(*clients)


def alone(one):
    with one.connect() as client:
        return [(params, client.generate(**params).result()) for params in well_behaved_requests()]


def test_half_of_the_clients_misbehave_and_the_others_get_their_tokens(daemon, long):
    print(f"ABUSE_SEED={SEED}")
    one = daemon(**SETTINGS)
    results = alone(one)
    n_fds, rss = one.n_fds(), one.rss_bytes()
    crowd = Crowd(one.socket, results, SEED)
    begin = time.monotonic()
    asyncio.run(crowd.run(200 if long else 28))
    gauges = wait_at_rest(one, n_fds)
    print(f"{200 if long else 28} clients, {crowd.n_right} right answers, {crowd.n_garbage} garbage, "
          f"{time.monotonic() - begin:.1f} s, {rss >> 10} -> {one.rss_bytes() >> 10} KiB")
    assert gauges["spillway_bad_frames_total"] == crowd.n_garbage
    assert "level=error" not in one.log()


@pytest.mark.parametrize("what", [*GARBAGE, *CUT])
def test_garbage_gets_one_bad_frame_and_a_closed_connection(daemon_at_rest, what):
    one, n_fds = daemon_at_rest

    async def run():
        for hello in (True, False):
            raw = await Raw.open(one.socket, hello=hello)
            await send_garbage(raw, GARBAGE.get(what) or CUT[what], what in CUT)
            await expect_bad_frame(raw, what)
            await raw.close()

    asyncio.run(run())
    wait_at_rest(one, n_fds)


@pytest.fixture(scope="module")
def daemon_at_rest(kept_daemon):
    one = kept_daemon(**SETTINGS)
    with one.connect():
        pass
    time.sleep(0.1)
    return one, one.n_fds()
