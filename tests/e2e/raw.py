"""One connection to the daemon on the level of messages and bytes. It may break every rule itself; it holds the daemon
to all of its own: each request gets exactly one response, events come in order, belong to a running generation and
never follow its response."""
import asyncio
import collections
import socket

import msgpack

READ_BYTES = 64 << 10


class Refused(Exception):
    def __init__(self, error):
        super().__init__(f"{error['code']}: {error['message']}")
        self.code, self.message, self.data = error["code"], error["message"], error["data"]


class Gone(Exception):
    """The connection is over, and the request without an answer."""


class Raw:
    """async with await Raw.open(path) as raw: ..."""

    @classmethod
    async def open(cls, path, hello=True, receive_bytes=None):
        self = cls()
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.setblocking(False)
        while True:
            try:
                sock.connect(path)
                break
            except BlockingIOError:  # the backlog is full
                await asyncio.sleep(0.01)
        self.sock, self.loop = sock, asyncio.get_running_loop()
        self.unpacker = msgpack.Unpacker(raw=False, max_buffer_size=1 << 30, strict_map_key=True)
        self.last_id = 0
        self.waiting = {}  # id: future of the response
        self.events = collections.defaultdict(list)
        self.unasked = []  # errors with id 0
        self.n_answers = 0
        self.broken = []  # rules that the daemon broke
        self.may_read = asyncio.Event()
        self.may_read.set()
        self.ended = asyncio.Event()
        self.reader = asyncio.create_task(self._read())
        if hello:
            await self.call("hello", version=1)
        return self

    async def __aenter__(self):
        return self

    async def __aexit__(self, kind, *_):
        await self.close()
        if kind is None:
            assert not self.broken, self.broken

    async def close(self):
        self.reader.cancel()
        await asyncio.gather(self.reader, return_exceptions=True)
        self._end()
        self.sock.close()

    def stop_reading(self):
        self.may_read.clear()

    def go_on_reading(self):
        self.may_read.set()

    # ---- sending

    async def send(self, data):
        await self.loop.sock_sendall(self.sock, data)

    def pack(self, method, params):
        """The id, and the bytes of a request that is waited for from now on."""
        self.last_id += 1
        self.waiting[self.last_id] = self.loop.create_future()
        if self.ended.is_set():
            self._end()
        return self.last_id, msgpack.packb([0, self.last_id, method, params])

    async def start(self, method, **params):
        request_id, data = self.pack(method, params)
        await self.send(data)
        return request_id

    async def answer(self, request_id):
        """The result; Refused or Gone."""
        try:
            return await self.waiting_or_done(request_id)
        finally:
            self.waiting.pop(request_id, None)

    def waiting_or_done(self, request_id):
        return self.waiting[request_id]

    async def call(self, method, **params):
        return await self.answer(await self.start(method, **params))

    # ---- receiving

    async def _read(self):
        try:
            while True:
                await self.may_read.wait()
                data = await self.loop.sock_recv(self.sock, READ_BYTES)
                if not data:
                    break
                self.unpacker.feed(data)
                for message in self.unpacker:
                    self._take(message)
        except ConnectionError:
            pass
        self._end()

    def _end(self):
        self.ended.set()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(Gone())
                future.exception()  # nobody need look at it

    def _rule(self, holds, what):
        if not holds:
            self.broken.append(what)

    def _take(self, message):
        if message[0] == 1:
            _, request_id, error, result = message
            self._rule((error is None) != (result is None), f"not one of error and result: {message}")
            future = self.waiting.get(request_id)
            if future is None or future.done():
                if error and error["code"] in ("BAD_FRAME", "BUSY"):
                    self.unasked.append(error)
                else:
                    self._rule(False, f"a response to no open request: {message}")
                return
            self.n_answers += 1
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(Refused(error))
                future.exception()
        else:
            kind, method, event = message
            self._rule(kind == 2 and method == "gen.event", f"neither response nor event: {message}")
            future = self.waiting.get(event["id"])
            self._rule(future is not None and not future.done(), f"an event without a running request: {event}")
            self._rule(event["seq"] == len(self.events[event["id"]]), f"an event out of order: {event}")
            self.events[event["id"]].append(event)

    def text(self, request_id):
        return "".join(e["text"] for e in self.events[request_id] if e["type"] == "delta" and e["channel"] == "content")
