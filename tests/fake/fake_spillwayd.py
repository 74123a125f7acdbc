"""A stand-in for spillwayd: speaks the protocol's version 1 on a Unix socket and makes its answers up.

gen.start answers with the words of the last message, one delta each. FakeServer's fields bend it: refusals, silence, slow
words, progress events, raw bytes instead of an answer. For tests in the same process:

    with FakeServer(path) as server: ...

Alone: fake_spillwayd.py SOCKET [DELAY_S]
"""
import os
import socket
import struct
import sys
import threading
import time

import msgpack

REASONING = "Let me see. "
MODEL = {"name": "fake", "n_vocab": 256, "n_context": 4096, "fingerprint": "5f0c", "backend": "cpu",
         "draft": {"name": "fake-draft", "block": 16}}


class Refusal(Exception):
    def __init__(self, code, message, **data):
        super().__init__(code)
        self.error = {"code": code, "message": message, "data": data or None}


def pack(message):
    return msgpack.packb(message, use_bin_type=True)


def ids_of(text):
    return list(text.encode())


class Connection:
    """One client; a thread of its own."""

    def __init__(self, server, sock):
        self.server, self.sock = server, sock
        self.lock = threading.Lock()
        self.greeted = False
        self.cancelled = set()
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        self.uid = struct.unpack("3i", credentials)[1]

    def send(self, message):
        with self.lock:
            self.sock.sendall(message if isinstance(message, bytes) else pack(message))

    def serve(self):
        unpacker = msgpack.Unpacker(raw=False, strict_map_key=False)
        try:
            while data := self.sock.recv(65536):
                unpacker.feed(data)
                for message in unpacker:
                    self.take(message)
        except OSError:
            pass
        finally:
            self.sock.close()

    def take(self, message):
        _, request_id, method, params = message
        self.server.requests.append((method, params))
        if method in self.server.raw:
            self.send(self.server.raw[method])
            if self.server.close_after_raw:
                self.sock.shutdown(socket.SHUT_RDWR)
        elif method not in self.server.silent:
            threading.Thread(target=self.answer, args=(request_id, method, params), daemon=True).start()
        if method == "hello": # handled in order: what follows in the same packet has been greeted
            self.greeted = True

    def answer(self, request_id, method, params):
        try:
            if method != "hello" and not self.greeted:
                raise Refusal("FORBIDDEN", "the first request must be hello")
            if method in self.server.refusals:
                raise Refusal(*self.server.refusals[method])
            handler = getattr(self, "on_" + method.replace(".", "_"), None)
            if handler is None:
                raise Refusal("UNKNOWN_METHOD", f"there is no method {method}")
            result = handler(request_id, params)
            self.send([1, request_id, None, result])
        except Refusal as refusal:
            self.send([1, request_id, refusal.error, None])
        except OSError:
            pass

    # ---- methods

    def on_hello(self, _, params):
        if params.get("version") != 1:
            raise Refusal("BAD_PARAM", "version is 1")
        return {"version": 1, "features": ["sessions"], "limits": {"frame_bytes": 16 << 20, "requests": 256, "context": 4096},
                "model": MODEL if self.server.ready else None, "uid": self.uid}

    def on_server_health(self, *_):
        ready = self.server.ready
        return {"live": True, "ready": ready, "progressing": True, "phase": "serving" if ready else "loading",
                "percent": 100 if ready else 40}

    def on_server_stats(self, *_):
        self.server.n_stats += 1
        return {"requests": {"done": 10 * self.server.n_stats, "running": 0}, "uptime_s": 1.5}

    def on_model_info(self, *_):
        return MODEL

    def on_text_tokenize(self, _, params):
        return {"ids": ids_of(params["text"])}

    def on_text_detokenize(self, _, params):
        return {"text": bytes(params["ids"]).decode(errors="replace")}

    def on_chat_render(self, _, params):
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in params["messages"])
        return {"text": text, "ids": ids_of(text), "cached": {"device": 0, "host": 0, "disk": 0}}

    def on_gen_cancel(self, _, params):
        self.cancelled.add(params.get("id"))
        return {}

    def on_gen_list(self, *_):
        return {"gens": [{"gen": 7, "id": 2, "state": "decode", "n_prompt": 12, "n_completion": 3}]}

    def on_gen_start(self, request_id, params):
        texts = [params[k] for k in ("prompt", "prompt_ids", "messages") if k in params]
        if len(texts) != 1:
            raise Refusal("BAD_PARAM", "exactly one of prompt, prompt_ids, messages", got=len(texts))
        if "session" in params and params["session"] not in self.server.sessions:
            raise Refusal("NOT_FOUND", f"there is no session {params['session']}")
        text = params["messages"][-1]["content"] if "messages" in params else str(texts[0])
        cached = {"device": 0, "host": 0, "disk": 0}
        seq = iter(range(1 << 30))

        def event(kind, **fields):
            if params.get("stream", True) or kind not in ("delta", "tool_call"):
                self.send([2, "gen.event", {"id": request_id, "seq": next(seq), "type": kind, **fields}])

        event("accepted", n_prompt=len(text), cached=cached, queue=0)
        for i in range(self.server.n_progress):
            event("progress", done=(i + 1) * 1000, total=self.server.n_progress * 1000)
            time.sleep(self.server.delay_s)
        reasoning = REASONING if params.get("thinking") else ""
        if reasoning:
            event("delta", text=reasoning, channel="reasoning")
        words, finish_reason, said = text.split(), "stop", []
        limit = params.get("max_tokens", len(words))
        for word in words[:limit]:
            if request_id in self.cancelled:
                finish_reason = "cancelled"
                break
            said.append(word)
            event("delta", text=word + " ", channel="content")
            time.sleep(self.server.delay_s)
        else:
            if limit < len(words):
                finish_reason = "length"
        content, n = " ".join(said), len(said)
        message = {"content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if params.get("tools"):
            call = {"name": params["tools"][0]["function"]["name"], "arguments": {"word": text}}
            event("tool_call", **call)
            message["tool_calls"] = [call]
            finish_reason = "tool_calls"
        if self.server.notice:
            event("notice", reason=self.server.notice)
        return {"text": content, "message": message, "finish_reason": self.server.finish_reason or finish_reason,
                "usage": {"prompt": len(text), "completion": n, "reasoning": 0, "cached": cached, "recomputed": 0,
                          "draft": {"steps": n // 4, "proposed": 15 * (n // 4), "accepted": 3 * (n // 4)}},
                "timings": {"queue_ms": 0.1, "restore_ms": 0.0, "prefill_ms": 2.0, "decode_ms": 10.0 * n,
                            "ttft_ms": 2.5}}

    # ---- sessions: a dict name -> what session.info tells, without the name

    def session(self, params):
        try:
            return self.server.sessions[params["name"]]
        except KeyError:
            raise Refusal("NOT_FOUND", f"there is no session {params.get('name')}") from None

    def on_session_open(self, request_id, params):
        self.server.sessions.setdefault(params["name"], {
            "n_tokens": 0, "cached": {"device": 0, "host": 0, "disk": 0}, "pinned": False, "durable": False})
        return self.on_session_info(request_id, params)

    def on_session_close(self, _, params):
        self.session(params)
        del self.server.sessions[params["name"]]
        return {}

    def on_session_list(self, *_):
        return {"sessions": [{"name": name, **session} for name, session in sorted(self.server.sessions.items())]}

    def on_session_info(self, _, params):
        return {"name": params["name"], **self.session(params)}

    def on_session_fork(self, request_id, params):
        copy = {**self.session(params), "n_tokens": params.get("at", 0)}
        self.server.sessions[params["new_name"]] = copy
        return self.on_session_info(request_id, {"name": params["new_name"]})

    def on_session_pin(self, request_id, params):
        self.session(params)["pinned"] = True
        return self.on_session_info(request_id, params)

    def on_session_unpin(self, request_id, params):
        self.session(params)["pinned"] = False
        return self.on_session_info(request_id, params)

    on_session_resume = on_session_info

    def on_session_park(self, _, params):
        return {"tokens": self.session(params)["n_tokens"], "bytes": 4096, "tier": "disk", "durable": True}

    # ---- cache and server

    def on_cache_stats(self, *_):
        return {"tiers": {tier: {"pages": n, "bytes": n * 4096} for n, tier in enumerate(("device", "host", "disk"))}}

    def on_cache_lookup(self, _, params):
        return {"device": len(params["prompt_ids"]) // 64 * 64, "host": 0, "disk": 0}

    def on_cache_evict(self, _, params):
        if params["tier"] not in ("device", "host", "disk"):
            raise Refusal("BAD_PARAM", "tier is device, host or disk")
        return {"pages": 1, "bytes": params.get("bytes", 4096)}

    def on_cache_verify(self, *_):
        return {"checked": 3, "damaged": 0, "unread": 0}

    def on_cache_flush(self, *_):
        return {"saved": 2, "bytes": 8192}

    def on_cache_purge(self, _, params):
        return {"device": 4096, "host": 0, "disk": params.get("uid", 0), "left": 0}

    def on_server_metrics(self, *_):
        return {"text": "# TYPE spillway_requests_total counter\nspillway_requests_total 12\n"}

    def on_server_reload(self, *_):
        return {"changed": ["log.level"], "needs_restart": []}

    def on_server_drain(self, *_):
        return {"running": 0}


class FakeServer:
    def __init__(self, path):
        self.path = str(path)
        self.ready = True
        self.delay_s = 0.0        # after each word and each progress event
        self.n_progress = 0       # progress events before the first word
        self.finish_reason = None # instead of the true one
        self.notice = None        # reason of a notice event
        self.refusals = {}        # method: (code, message)
        self.silent = set()       # methods that get no answer
        self.raw = {}             # method: bytes that are sent instead of an answer
        self.close_after_raw = True
        self.requests = []        # (method, params) as they came
        self.sessions = {}
        self.n_stats = 0
        self.connections = []

    def __enter__(self):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(self.path)
        self.listener.listen(64)
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def accept(self):
        try:
            while True:
                connection = Connection(self, self.listener.accept()[0])
                self.connections.append(connection)
                threading.Thread(target=connection.serve, daemon=True).start()
        except OSError:
            pass

    def __exit__(self, *_):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        for connection in self.connections:
            try:
                connection.sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        os.unlink(self.path)

    def last(self, method):
        """The params of the newest request of this method."""
        return next(params for name, params in reversed(self.requests) if name == method)


if __name__ == "__main__":
    with FakeServer(sys.argv[1]) as alone:
        alone.delay_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.1
        threading.Event().wait()
