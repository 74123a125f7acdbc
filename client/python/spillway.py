"""Client of spillwayd over its Unix socket, protocol version 1 (docs/protocol.md). One file; needs python3-msgpack.

    with Client() as client:
        for event in client.generate(messages=[{"role": "user", "content": "Hello"}], max_tokens=64):
            if event["type"] == "delta":
                print(event["text"], end="", flush=True)

    async with AsyncClient() as client:
        async with client.generate(prompt="Once") as generation:
            async for text in generation.texts():
                ...
            print((await generation.result())["usage"])

Parameters, events and results are the maps of the protocol. Times are seconds; None waits for ever. A request that the
daemon refuses raises the DaemonError of its code and leaves the connection as it was; a ConnectionLost ends it. A Client
belongs to one thread at a time, an AsyncClient to one event loop. Events of a generation that nobody reads are kept, so
read them or leave its `with`, which cancels it.
"""
import asyncio
import collections
import os
import socket
import time

import msgpack

__all__ = ["Client", "AsyncClient", "Generation", "AsyncGeneration", "SpillwayError", "ConnectError", "ConnectionLost",
           "ProtocolError", "TimedOut", "DaemonError", "BadFrame", "BadParam", "UnknownMethod", "ContextLength", "Busy",
           "Quota", "NotFound", "Forbidden", "Cancelled", "SlowClient", "ShuttingDown", "NoSpace", "Corrupt",
           "ModelNotReady", "Deadline", "Internal"]

PROTOCOL = 1
DEFAULT_SOCKET = "/run/spillway/spillway.sock"
FRAME_BYTES_MAX = 16 << 20
RECEIVE_BYTES = 64 << 10


# ---- errors


class SpillwayError(Exception):
    """Everything that this module raises, but TypeError for a wrong call."""


class ConnectError(SpillwayError):
    """No connection: no socket, no permission, nobody listens, or no hello in time."""


class ConnectionLost(SpillwayError):
    """The connection is over."""


class ProtocolError(ConnectionLost):
    """The daemon sent what version 1 does not allow."""


class TimedOut(SpillwayError):
    """No answer in time. The connection stays, and a late answer is dropped."""


class DaemonError(SpillwayError):
    """The daemon refused: its code, message and data (None or a map)."""

    code = None

    def __init__(self, code, message, data=None):
        super().__init__(f"{code}: {message}")
        self.code, self.message, self.data = code, message, data


class BadFrame(DaemonError):
    code = "BAD_FRAME"


class BadParam(DaemonError):
    code = "BAD_PARAM"


class UnknownMethod(DaemonError):
    code = "UNKNOWN_METHOD"


class ContextLength(DaemonError):
    code = "CONTEXT_LENGTH"


class Busy(DaemonError):
    code = "BUSY"


class Quota(DaemonError):
    code = "QUOTA"


class NotFound(DaemonError):
    code = "NOT_FOUND"


class Forbidden(DaemonError):
    code = "FORBIDDEN"


class Cancelled(DaemonError):
    code = "CANCELLED"


class SlowClient(DaemonError):
    code = "SLOW_CLIENT"


class ShuttingDown(DaemonError):
    code = "SHUTTING_DOWN"


class NoSpace(DaemonError):
    code = "NO_SPACE"


class Corrupt(DaemonError):
    code = "CORRUPT"


class ModelNotReady(DaemonError):
    code = "MODEL_NOT_READY"


class Deadline(DaemonError):
    code = "DEADLINE"


class Internal(DaemonError):
    code = "INTERNAL"


_ERROR_OF = {error.code: error for error in DaemonError.__subclasses__()}


def _daemon_error(error):
    code, message = error.get("code"), error.get("message")
    if not isinstance(code, str) or not isinstance(message, str):
        raise ProtocolError("an error without code and message")
    return _ERROR_OF.get(code, DaemonError)(code, message, error.get("data"))


# ---- messages, without input and output


class _Request:
    """One request without an answer, and after that its outcome."""

    def __init__(self, request_id, is_generation):
        self.id, self.is_generation = request_id, is_generation
        self.n_events = 0
        self.events = collections.deque()  # not read yet
        self.done, self.result, self.error = False, None, None
        self.abandoned = False
        self.heard = time.monotonic()
        self.wake = None  # called when there is news; of AsyncClient

    def news(self):
        self.heard = time.monotonic()
        if self.wake:
            self.wake()

    def outcome(self):
        if self.error is not None:
            raise self.error
        return self.result


class _Protocol:
    """Bytes to answers and events, paired with requests."""

    def __init__(self):
        self.unpacker = msgpack.Unpacker(raw=False, max_buffer_size=FRAME_BYTES_MAX + RECEIVE_BYTES, max_ext_len=0)
        self.requests = {}
        self.last_id = 0
        self.lost = None

    def start(self, method, params):
        """The request, and the bytes to send."""
        if self.lost:
            raise self.lost
        self.last_id = self.last_id % 0xFFFFFFFF + 1
        while self.last_id in self.requests:
            self.last_id = self.last_id % 0xFFFFFFFF + 1
        message = msgpack.packb([0, self.last_id, method, params], use_bin_type=True)
        if len(message) > FRAME_BYTES_MAX:
            raise ValueError(f"{method}: a request has at most {FRAME_BYTES_MAX} bytes, this one {len(message)}")
        request = self.requests[self.last_id] = _Request(self.last_id, method == "gen.start")
        return request, message

    def lose(self, error):
        """The connection is over: every request ends with this error."""
        if self.lost is None:
            self.lost = error
            for request in self.requests.values():
                request.done, request.error = True, error
                request.news()
            self.requests.clear()

    def feed(self, data):
        try:
            self.unpacker.feed(data)
            for message in self.unpacker:
                self._take(message)
        except ProtocolError as error:
            self.lose(error)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            self.lose(ProtocolError(f"bytes that are no message: {error or type(error).__name__}"))

    def _take(self, message):
        if not isinstance(message, list) or not message:
            raise ProtocolError("a message that is no array of msgpack-RPC")
        if message[0] == 1 and len(message) == 4:
            self._take_answer(*message[1:])
        elif message[0] == 2 and len(message) == 3 and isinstance(message[2], dict):
            if message[1] == "gen.event":
                self._take_event(message[2])
        else:
            raise ProtocolError("a message that is neither a response nor a notification")

    def _take_answer(self, request_id, error, result):
        if (error is None) == (result is None) or not isinstance(result if error is None else error, dict):
            raise ProtocolError("a response without exactly one error or result map")
        refusal = None if error is None else _daemon_error(error)
        if request_id == 0 and refusal:
            raise ProtocolError(str(refusal))
        request = self.requests.pop(request_id, None)
        if request is None:
            raise ProtocolError("a response to no request, or a second one")
        request.done, request.result, request.error = True, result, refusal
        request.news()

    def _take_event(self, event):
        request = self.requests.get(event.get("id"))
        if request is None or not request.is_generation:
            raise ProtocolError("an event of no generation, or after its answer")
        if event.get("seq") != request.n_events:
            raise ProtocolError("events of a generation with a gap or out of order")
        request.n_events += 1
        if not request.abandoned:
            request.events.append(event)
            request.news()


# Method names with a dot become Python methods with an underscore.
_METHODS = ["model.info", "text.tokenize", "text.detokenize", "chat.render", "gen.list", "gen.cancel", "session.open",
            "session.close", "session.list", "session.info", "session.park", "session.resume", "session.fork",
            "session.pin", "session.unpin", "cache.lookup", "cache.stats", "cache.evict", "cache.verify", "cache.flush", "cache.purge",
            "server.health", "server.stats", "server.metrics", "server.config", "server.reload", "server.drain",
            "server.log_level"]


def _add_methods(cls):
    def make(method):
        def call(self, **params):
            return self.call(method, params)
        call.__name__ = method.replace(".", "_")
        call.__doc__ = f"The method {method}; parameters by name, see docs/protocol.md."
        return call
    for method in _METHODS:
        setattr(cls, method.replace(".", "_"), make(method))
    return cls


# ---- synchronous


class Generation:
    """A running gen.start: an iterator of its events, then result(). Leaving its `with` early cancels it."""

    def __init__(self, client, request):
        self._client, self._request = client, request

    @property
    def id(self):
        return self._request.id

    def __iter__(self):
        return self

    def __next__(self):
        request = self._request
        while not request.events and not request.done:
            self._client._receive(request, self._client.silence_timeout)
        if request.events:
            return request.events.popleft()
        request.outcome()
        raise StopIteration

    def texts(self, channel="content"):
        """The text deltas of one channel."""
        return (event["text"] for event in self if event["type"] == "delta" and event["channel"] == channel)

    def result(self):
        """Waits for the answer; events not read before are dropped."""
        for _ in self:
            pass
        return self._request.outcome()

    def cancel(self):
        """Asks for the end. The answer, with finish_reason `cancelled`, still comes."""
        if not self._request.done:
            self._client._start("gen.cancel", {"id": self.id}).abandoned = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if not self._request.done:
            self.cancel()
            self._request.abandoned = True


@_add_methods
class Client:
    """One connection. `path`: None is the daemon's default. `timeout` is of calls; `silence_timeout` is the longest time
    without an event of a generation."""

    def __init__(self, path=None, *, connect_timeout=5.0, timeout=30.0, silence_timeout=None):
        self.timeout, self.silence_timeout = timeout, silence_timeout
        self._protocol = _Protocol()
        path = os.fspath(path or DEFAULT_SOCKET)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(connect_timeout)
            self._socket.connect(path)
            self.hello = self.call("hello", {"version": PROTOCOL}, timeout=connect_timeout)
        except (OSError, TimedOut, ConnectionLost) as error:
            self._socket.close()
            raise ConnectError(f"{path}: {error}") from error
        except BaseException:
            self._socket.close()
            raise

    def close(self):
        """Ends the connection, and in the daemon all that runs on it."""
        self._socket.close()
        self._protocol.lose(ConnectionLost("the client was closed"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def call(self, method, params=None, *, timeout=...):
        """Any method but gen.start: its result."""
        request = self._start(method, params or {})
        while not request.done:
            self._receive(request, self.timeout if timeout is ... else timeout)
        return request.outcome()

    def generate(self, prompt=None, **params):
        """gen.start with these parameters; one of prompt, prompt_ids, messages."""
        if prompt is not None:
            params["prompt"] = prompt
        return Generation(self, self._start("gen.start", params))

    def complete(self, prompt=None, **params):
        """gen.start without events: its result."""
        return self.generate(prompt, **params, stream=False).result()

    def _start(self, method, params):
        request, message = self._protocol.start(method, params)
        try:
            self._socket.settimeout(self.timeout)
            self._socket.sendall(message)
        except OSError as error: # a part may be sent: nothing can follow it
            self._lose(error)
        return request

    def _lose(self, error):
        self._protocol.lose(ConnectionLost(str(error) or type(error).__name__))
        self._socket.close()

    def _receive(self, request, timeout):
        """Takes what comes next, for whichever request."""
        try:
            left = None if timeout is None else request.heard + timeout - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            request.abandoned = True
            if request.is_generation and not request.done:
                self._start("gen.cancel", {"id": request.id}).abandoned = True
            raise TimedOut(f"no answer within {timeout} s") from None
        except OSError as error:
            self._lose(error)
            return
        if data:
            self._protocol.feed(data)
        else:
            self._protocol.lose(ConnectionLost("the daemon closed the connection"))


# ---- asyncio


class AsyncGeneration:
    """As Generation, for `async for` and `async with`."""

    def __init__(self, client, params):
        self._client, self._params, self._request = client, params, None

    async def _begin(self):
        if self._request is None:
            self._request = await self._client._start("gen.start", self._params)
        return self._request

    def __aiter__(self):
        return self

    async def __anext__(self):
        request = await self._begin()
        while not request.events and not request.done:
            await self._client._news(request, self._client.silence_timeout)
        if request.events:
            return request.events.popleft()
        request.outcome()
        raise StopAsyncIteration

    async def texts(self, channel="content"):
        """The text deltas of one channel."""
        async for event in self:
            if event["type"] == "delta" and event["channel"] == channel:
                yield event["text"]

    async def result(self):
        """Waits for the answer; events not read before are dropped."""
        async for _ in self:
            pass
        return self._request.outcome()

    async def cancel(self):
        """Asks for the end. The answer, with finish_reason `cancelled`, still comes."""
        request = await self._begin()
        if not request.done:
            (await self._client._start("gen.cancel", {"id": request.id})).abandoned = True

    async def __aenter__(self):
        await self._begin()
        return self

    async def __aexit__(self, *_):
        if not self._request.done:
            self._request.abandoned = True
            await self.cancel()


@_add_methods
class AsyncClient:
    """As Client, for asyncio; connects in `async with` or connect()."""

    def __init__(self, path=None, *, connect_timeout=5.0, timeout=30.0, silence_timeout=None):
        self.timeout, self.silence_timeout = timeout, silence_timeout
        self._path, self._connect_timeout = os.fspath(path or DEFAULT_SOCKET), connect_timeout
        self._protocol = _Protocol()
        self._reader = self._writer = self._task = self.hello = None

    async def connect(self):
        try:
            self._reader, self._writer = await asyncio.wait_for(asyncio.open_unix_connection(self._path),
                                                                self._connect_timeout)
            self._task = asyncio.create_task(self._read())
            self.hello = await self.call("hello", {"version": PROTOCOL}, timeout=self._connect_timeout)
        except (OSError, asyncio.TimeoutError, TimedOut, ConnectionLost) as error:
            await self.close()
            raise ConnectError(f"{self._path}: {error or type(error).__name__}") from error
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self):
        """Ends the connection, and in the daemon all that runs on it."""
        self._protocol.lose(ConnectionLost("the client was closed"))
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._writer:
            self._writer.close()
            try:
                await self._writer.wait_closed()
            except OSError:
                pass

    async def __aenter__(self):
        return await self.connect()

    async def __aexit__(self, *_):
        await self.close()

    async def call(self, method, params=None, *, timeout=...):
        """Any method but gen.start: its result."""
        request = await self._start(method, params or {})
        while not request.done:
            await self._news(request, self.timeout if timeout is ... else timeout)
        return request.outcome()

    def generate(self, prompt=None, **params):
        """gen.start with these parameters; one of prompt, prompt_ids, messages. Begins with the first await."""
        if prompt is not None:
            params["prompt"] = prompt
        return AsyncGeneration(self, params)

    async def complete(self, prompt=None, **params):
        """gen.start without events: its result."""
        return await self.generate(prompt, **params, stream=False).result()

    async def _start(self, method, params):
        if self._writer is None:
            raise ConnectionLost("not connected: use `async with` or connect()")
        request, message = self._protocol.start(method, params)
        self._writer.write(message)
        try:
            await self._writer.drain()
        except OSError as error:
            self._protocol.lose(ConnectionLost(str(error)))
        return request

    async def _read(self):
        try:
            while not self._protocol.lost and (data := await self._reader.read(RECEIVE_BYTES)):
                self._protocol.feed(data)
            self._protocol.lose(ConnectionLost("the daemon closed the connection"))
        except OSError as error:
            self._protocol.lose(ConnectionLost(str(error)))
        finally:
            self._writer.close()

    async def _news(self, request, timeout):
        """Waits until something came for this request."""
        news = asyncio.Event()
        request.wake = news.set
        left = None if timeout is None else max(0.0, request.heard + timeout - time.monotonic())
        try:
            await asyncio.wait_for(news.wait(), left)
        except asyncio.TimeoutError:
            request.abandoned = True
            if request.is_generation and not request.done:
                (await self._start("gen.cancel", {"id": request.id})).abandoned = True
            raise TimedOut(f"no answer within {timeout} s") from None
        except asyncio.CancelledError:
            if not request.is_generation:
                request.abandoned = True
            raise
        finally:
            request.wake = None
