"""client/python/spillway.py against the fake daemon. The same claims of Client and AsyncClient."""
import asyncio
import socket
import threading

import msgpack
import pytest
import spillway

MESSAGES = [{"role": "user", "content": "one two three"}]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 20))


def test_events_then_the_result(server):
    server.n_progress, server.notice = 2, "why"
    with spillway.Client(server.path) as client:
        generation = client.generate(messages=MESSAGES, thinking=True)
        events = list(generation)
        assert [e["type"] for e in events] == ["accepted"] + ["progress"] * 2 + ["delta"] * 4 + ["notice"]
        assert [e["seq"] for e in events] == list(range(8))
        assert generation.result()["message"] == {"content": "one two three", "reasoning": "Let me see. "}
        assert server.last("gen.start") == {"messages": MESSAGES, "thinking": True}


def test_async_events_then_the_result(server):
    async def body():
        async with spillway.AsyncClient(server.path) as client:
            async with client.generate("one two") as generation:
                assert [text async for text in generation.texts()] == ["one ", "two "]
                assert (await generation.result())["finish_reason"] == "stop"
            assert (await client.complete("one", max_tokens=5))["text"] == "one"
            assert server.last("gen.start") == {"prompt": "one", "max_tokens": 5, "stream": False}
    run(body())


def test_every_method_has_a_name(server):
    with spillway.Client(server.path) as client:
        assert client.hello["version"] == 1
        assert client.text_tokenize(text="ab") == {"ids": [97, 98]}
        client.session_open(name="s")
        assert client.session_list()["sessions"][0]["name"] == "s"
        assert client.server_health()["ready"]


@pytest.mark.parametrize("code", [error.code for error in spillway.DaemonError.__subclasses__()])
def test_every_code_is_a_type(server, code):
    server.refusals["gen.start"] = (code, "no")
    with spillway.Client(server.path) as client:
        with pytest.raises(spillway.DaemonError, match=f"{code}: no") as caught:
            client.complete("x")
        assert type(caught.value) is not spillway.DaemonError and caught.value.code == code
        assert client.server_health()["live"]  # the connection is as good as before


def test_an_unknown_code_is_a_daemon_error(server):
    server.refusals["gen.start"] = ("NEWS", "of a later version")
    with spillway.Client(server.path) as client, pytest.raises(spillway.DaemonError) as caught:
        client.complete("x")
    assert caught.value.code == "NEWS"


def test_data_of_an_error_is_kept(server):
    with spillway.Client(server.path) as client, pytest.raises(spillway.BadParam) as caught:
        client.complete("x", prompt_ids=[1])
    assert caught.value.data == {"got": 2}


def test_cancel_ends_with_a_result(server):
    server.delay_s = 0.02
    with spillway.Client(server.path) as client:
        generation = client.generate(" ".join(["word"] * 500))
        for i, _ in enumerate(generation.texts()):
            if i == 2:
                generation.cancel()
        assert generation.result()["finish_reason"] == "cancelled"


def test_leaving_early_cancels_and_the_connection_goes_on(server):
    server.delay_s = 0.02
    with spillway.Client(server.path) as client:
        with client.generate(" ".join(["word"] * 500)) as generation:
            next(generation)
        assert client.server_health()["live"]
        assert server.last("gen.cancel") == {"id": generation.id}


def test_leaving_early_cancels_in_asyncio_too(server):
    server.delay_s = 0.02

    async def body():
        async with spillway.AsyncClient(server.path) as client:
            with pytest.raises(KeyError):
                async with client.generate(" ".join(["word"] * 500)) as generation:
                    await generation.__anext__()
                    raise KeyError
            assert (await client.server_health())["live"]
            assert server.last("gen.cancel")
    run(body())


def test_generations_run_side_by_side(server):
    server.delay_s = 0.01
    with spillway.Client(server.path) as client:
        first, second = client.generate("a b c"), client.generate("d e")
        assert second.result()["text"] == "d e"
        assert "".join(first.texts()) == "a b c "

    async def body():
        async with spillway.AsyncClient(server.path) as client:
            results = await asyncio.gather(*(client.complete(f"n {i}") for i in range(20)))
            assert [r["text"] for r in results] == [f"n {i}" for i in range(20)]
    run(body())


def test_no_answer_in_time_keeps_the_connection(server):
    server.silent.add("server.stats")
    with spillway.Client(server.path, timeout=0.2) as client:
        with pytest.raises(spillway.TimedOut):
            client.server_stats()
        assert client.server_health()["live"]

    async def body():
        async with spillway.AsyncClient(server.path, timeout=0.2) as client:
            with pytest.raises(spillway.TimedOut):
                await client.server_stats()
            assert (await client.server_health())["live"]
    run(body())


def test_silence_cancels_the_generation(server):
    server.delay_s = 1.0
    with spillway.Client(server.path, silence_timeout=0.2) as client:
        with pytest.raises(spillway.TimedOut):
            client.generate("a b").result()
        assert client.server_health()["live"]
        assert server.last("gen.cancel")


def event(seq, request_id=2):
    return msgpack.packb([2, "gen.event", {"id": request_id, "seq": seq, "type": "delta", "text": "", "channel": "content"}])


@pytest.mark.parametrize("raw, why", [
    (b"\xc1", "no message"),
    (b"\x07", "no array"),
    (b"\x94\x01\x02\xc0\x81\xa1s\xdd\xff\xff\xff\xff", "no message"),
    (b"\x94\x01\x02\xc0\x81\xa1s\xa2\xc3(", "no message"),
    (msgpack.packb([1, 9, None, {}]), "no request"),
    (msgpack.packb([1, 2, None, None]), "exactly one"),
    (msgpack.packb([1, 2, {"code": 1}, None]), "without code"),
    (msgpack.packb([1, 0, {"code": "BAD_FRAME", "message": "too deep"}, None]), "BAD_FRAME: too deep"),
    (event(0) + event(2), "gap"),
    (event(0, 9), "no generation"),
    (msgpack.packb([1, 2, None, {}]) + event(0), "after its answer"),
])
def test_what_is_not_allowed_ends_the_connection(server, raw, why):
    server.raw["gen.start"] = raw
    server.close_after_raw = False
    with spillway.Client(server.path) as client:
        generation = client.generate("x")
        try:
            generation.result()
        except spillway.ProtocolError as error:
            assert why in str(error)
        with pytest.raises(spillway.ProtocolError, match=why):
            client.server_health()

    async def body():
        async with spillway.AsyncClient(server.path) as async_client:
            try:
                await async_client.complete("x")
            except spillway.ProtocolError:
                pass
            with pytest.raises(spillway.ProtocolError, match=why):
                await async_client.server_health()
    run(body())


def test_a_message_longer_than_the_limit_ends_the_connection(server):
    server.raw["gen.start"] = b"\x94\x01\x02\xc0\x81\xa1s\xdb\x10\x00\x00\x00" + bytes(20 << 20)
    server.close_after_raw = False
    with spillway.Client(server.path) as client, pytest.raises(spillway.ProtocolError):
        client.complete("x")


def test_a_daemon_that_goes_away_is_noticed(server):
    server.raw["gen.start"] = b"\x94\x01"
    with spillway.Client(server.path) as client:
        with pytest.raises(spillway.ConnectionLost, match="closed"):
            client.complete("x")
        with pytest.raises(spillway.ConnectionLost):
            client.server_health()

    async def body():
        async with spillway.AsyncClient(server.path) as async_client:
            with pytest.raises(spillway.ConnectionLost, match="closed"):
                await async_client.complete("x")
    run(body())


def test_no_daemon_is_a_connect_error(server, tmp_path):
    server.silent.add("hello")
    for path, options in ((tmp_path / "none", {}), (server.path, {"connect_timeout": 0.2})):
        with pytest.raises(spillway.ConnectError):
            spillway.Client(path, **options)
        with pytest.raises(spillway.ConnectError):
            run(spillway.AsyncClient(path, **options).connect())


def test_answers_in_small_pieces_are_read(tmp_path):
    path = str(tmp_path / "slow")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1)

    def serve():
        connection = listener.accept()[0]
        for request_id in (1, 2):
            connection.recv(4096)
            for byte in msgpack.packb([1, request_id, None, {"version": 1, "text": "wörd"}]):
                connection.send(bytes([byte]))
    threading.Thread(target=serve, daemon=True).start()
    with spillway.Client(path) as client:
        assert client.server_stats()["text"] == "wörd"
    listener.close()


def test_requests_that_are_too_long_are_not_sent(server):
    with spillway.Client(server.path) as client:
        with pytest.raises(ValueError, match="at most"):
            client.complete("x" * (17 << 20))
        assert client.server_health()["live"]
