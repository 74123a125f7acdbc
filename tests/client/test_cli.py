"""The program spillway against the fake daemon: what it sends, prints and exits with, also on a terminal."""
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import time

import msgpack
import pytest

# command: what it takes, the method and the parameters that it must send
CALLS = [
    (["sessions"], "session.list", {}),
    (["session", "open", "s"], "session.open", {"name": "s"}),
    (["session", "close", "old"], "session.close", {"name": "old"}),
    (["session", "info", "old"], "session.info", {"name": "old"}),
    (["session", "park", "old"], "session.park", {"name": "old"}),
    (["session", "resume", "old"], "session.resume", {"name": "old"}),
    (["session", "resume", "old", "--wait"], "session.resume", {"name": "old", "wait": True}),
    (["session", "fork", "old", "new", "--at", "64"], "session.fork", {"name": "old", "new_name": "new", "at": 64}),
    (["session", "pin", "old"], "session.pin", {"name": "old"}),
    (["session", "unpin", "old"], "session.unpin", {"name": "old"}),
    (["cache", "stats"], "cache.stats", {}),
    (["cache", "lookup", "ab", "--prefetch"], "cache.lookup", {"prompt_ids": [97, 98], "prefetch": True}),
    (["cache", "evict", "device", "--all"], "cache.evict", {"tier": "device", "all": True}),
    (["cache", "evict", "host", "--bytes", "64MiB"], "cache.evict", {"tier": "host", "bytes": 64 << 20}),
    (["cache", "verify"], "cache.verify", {}),
    (["cache", "flush"], "cache.flush", {}),
    (["cache", "purge"], "cache.purge", {}),
    (["cache", "purge", "--uid", "7"], "cache.purge", {"uid": 7}),
    (["status"], "server.health", {}),
    (["stats"], "server.stats", {}),
    (["stats", "--metrics"], "server.metrics", {}),
    (["gens"], "gen.list", {}),
    (["cancel", "7"], "gen.cancel", {"gen": 7}),
    (["reload"], "server.reload", {}),
    (["drain"], "server.drain", {}),
    (["tokenize", "ab", "--markup"], "text.tokenize", {"text": "ab", "markup": True}),
]


def open_session(server, name):
    server.sessions[name] = {"n_tokens": 9, "cached": {"device": 0, "host": 0, "disk": 0}, "pinned": False, "durable": True}


@pytest.mark.parametrize("args, method, params", CALLS, ids=[" ".join(args) for args, _, _ in CALLS])
def test_a_command_is_a_method(server, spillway, args, method, params):
    open_session(server, "old")
    for_people = spillway(*args)
    open_session(server, "old")
    for_programs = spillway("--json", *args)
    assert (for_people.code, for_people.err) == (0, "")
    assert server.last(method) == params
    assert server.requests[0] == ("hello", {"version": 1})
    assert for_programs.code == 0 and isinstance(for_programs.json(), dict)
    assert for_programs.out.count("\n") == 1


def commands(spillway):
    return re.findall(r"^  ([a-z]+(?: [a-z]+)?)  ", spillway("--help").out, re.MULTILINE)


def test_every_command_has_help(spillway):
    assert len(commands(spillway)) == 26
    for command in commands(spillway):
        run = spillway(*command.split(), "--help")
        assert run.code == 0 and run.out.startswith(f"usage: spillway {command} ") and "--json" in run.out


# ---- exit codes and errors


def test_a_refusal_exits_with_1_and_tells_code_and_message(server, spillway):
    run = spillway("session", "info", "none")
    assert (run.code, run.out) == (1, "") and "NOT_FOUND: there is no session none" in run.err
    run = spillway("session", "info", "none", "--json")
    assert run.code == 1 and run.json()["error"]["code"] == "NOT_FOUND"
    server.refusals["gen.start"] = ("BUSY", "the queue is full")
    assert spillway("complete", "x", "--json").json()["error"]["message"] == "the queue is full"


@pytest.mark.parametrize("args", [
    [], ["nonsense"], ["session"], ["session", "nonsense"], ["status", "extra"], ["session", "info"], ["status", "--nonsense"],
    ["complete", "x", "--max-tokens"], ["complete", "x", "--max-tokens", "many"], ["complete", "x", "--temperature", "warm"],
    ["complete", "x", "--logit-bias", "5"], ["complete", "x", "--deadline", "-1"], ["complete", "x", "--file", "y"],
    ["complete", "--file", "/nonexistent"], ["complete", "x", "--tools", "/dev/null"], ["cache", "evict", "host", "--bytes", "1MB"],
    ["cache", "lookup"], ["--nonsense", "status"], ["complete", b"\xff\xfe"],
])
def test_wrong_use_exits_with_2_and_sends_nothing(server, spillway, args):
    command = [a if isinstance(a, str) else os.fsdecode(a) for a in args]
    run = spillway(*command)
    assert run.code == 2 and run.err and not server.requests


def test_no_connection_exits_with_3(server, spillway, tmp_path):
    run = spillway("--socket", tmp_path / "none", "status", "--json")
    assert run.code == 3 and run.json()["error"]["code"] == "CONNECT" and "is spillwayd running" in run.err
    server.silent.add("hello")
    assert spillway("status", "--timeout", "0.2").code == 3


def test_no_answer_in_time_is_an_error(server, spillway):
    server.silent.add("server.stats")
    run = spillway("stats", "--timeout", "0.2")
    assert run.code == 1 and "TIMEOUT" in run.err
    server.silent.add("gen.start")
    assert "TIMEOUT" in spillway("complete", "x", "--timeout", "0.2").err


def test_the_socket_may_come_from_the_environment(request, server):
    run = subprocess.run([request.config.getoption("--spillway"), "status"], capture_output=True, text=True, check=False,
                         timeout=30, env={"SPILLWAY_SOCKET": server.path})
    assert run.returncode == 0 and server.path in run.stdout


def test_a_daemon_that_dies_is_an_error(server, spillway):
    server.raw["gen.start"] = b"\x94\x01"
    run = spillway("complete", "x")
    assert run.code == 1 and "CLOSED" in run.err


# ---- complete


def test_complete_prints_the_answer_and_nothing_else(spillway):
    run = spillway("complete", "one two")
    assert (run.code, run.out, run.err) == (0, "one two ", "")


def test_every_option_becomes_its_parameter(server, spillway, tmp_path):
    (tmp_path / "tools").write_text('[{"type": "function", "function": {"name": "f"}}]')
    run = spillway("complete", "x", "--max-tokens", 5, "--temperature", 0, "--top-p", 0.5, "--top-k", 20, "--min-p", 0.1,
                   "--repetition-penalty", 1.1, "--presence-penalty", 0.5, "--frequency-penalty", 0.25, "--logit-bias",
                   "7=-2.5", "--logit-bias", "8=1", "--seed", 42, "--stop", "a", "--stop", "b", "--stop-id", 3,
                   "--ignore-eos", "--no-thinking", "--tools", tmp_path / "tools", "--priority", -1, "--deadline", 1.5,
                   "--no-speculate", "--cache", "no_store", "--markup", "--logprobs", 3, "--return-ids", "--json")
    assert run.code == 0
    assert server.last("gen.start") == {
        "prompt": "x", "max_tokens": 5, "temperature": 0.0, "top_p": 0.5, "top_k": 20, "min_p": 0.1,
        "repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.25, "logit_bias": {"7": -2.5, "8": 1.0},
        "seed": 42, "stop": ["a", "b"], "stop_ids": [3], "ignore_eos": True, "thinking": False,
        "tools": [{"type": "function", "function": {"name": "f"}}], "priority": -1, "deadline_ms": 1500,
        "speculate": False, "cache": "no_store", "markup": True, "logprobs": 3, "return_ids": True, "stream": False}
    assert run.json()["message"]["tool_calls"] == [{"name": "f", "arguments": {"word": "x"}}]


def test_a_prompt_comes_from_standard_input_files_messages_or_ids(server, spillway, tmp_path):
    for name, text in (("text", "from a file"), ("messages", '[{"role": "user", "content": "from a list"}]'),
                       ("map", '{"messages": [{"role": "user", "content": "from a map"}], "thinking": true, "tools": null, '
                        '"add_generation_prompt": true}'),
                       ("ids", "[1, 2]")):
        (tmp_path / name).write_text(text)
    assert spillway("complete", stdin="from a pipe").out == "from a pipe "
    assert spillway("complete", "--file", tmp_path / "text").out == "from a file "
    assert spillway("complete", "--messages", tmp_path / "messages").out == "from a list "
    assert spillway("complete", "--messages", tmp_path / "map", "--reasoning").out == "Let me see. \nfrom a map "
    assert sorted(server.last("gen.start")) == ["messages", "thinking"]
    assert spillway("complete", "--ids", tmp_path / "ids").code == 0
    assert server.last("gen.start") == {"prompt_ids": [1, 2]}
    assert spillway("complete", "a word", "--chat").out == "a word "
    assert server.last("gen.start") == {"messages": [{"role": "user", "content": "a word"}]}


def test_render_takes_messages_as_a_list_or_a_map(server, spillway, tmp_path):
    messages = [{"role": "user", "content": "x"}]
    (tmp_path / "map").write_text(json.dumps({"messages": messages, "tools": None, "thinking": True}))
    assert spillway("render", tmp_path / "map", "--no-thinking").out == "<|im_start|>user\nx<|im_end|>\n"
    assert server.last("chat.render") == {"messages": messages, "thinking": False}
    assert spillway("render", "--json", "--no-generation-prompt", stdin=json.dumps(messages)).json()["cached"]
    assert server.last("chat.render") == {"messages": messages, "add_generation_prompt": False}


def test_events_are_lines_of_json_with_the_result_last(server, spillway):
    server.notice = "why"
    lines = [json.loads(line) for line in spillway("complete", "a b", "--events").out.splitlines()]
    assert [line.get("type") for line in lines] == ["accepted", "delta", "delta", "notice", None]
    assert lines[-1]["finish_reason"] == "stop"


def test_stats_tell_speed_and_accept_length(spillway):
    run = spillway("complete", " ".join("abcdefgh"), "--stats")  # 2 passes, 6 drafted tokens stood, the last one was the end
    assert "8 tokens, 100.0 tokens/s, accept length 3.50" in run.err


def test_an_answer_that_ended_early_exits_with_1(server, spillway):
    server.finish_reason = "deadline"
    run = spillway("complete", "x")
    assert run.code == 1 and run.out == "x " and "deadline" in run.err
    server.finish_reason = "length"
    assert spillway("complete", "x").code == 0


def test_reasoning_and_notices_stay_out_of_a_pipe(server, spillway):
    server.notice, server.n_progress = "the drafter was switched off", 3
    run = spillway("complete", "x", "--thinking")
    assert run.out == "x " and run.err == "spillway: notice: the drafter was switched off\n"


def test_interrupt_keeps_what_has_come(request, server):
    server.delay_s = 0.05
    process = subprocess.Popen([request.config.getoption("--spillway"), "--socket", server.path, "complete",
                                " ".join(["word"] * 200)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.read(5) == "word "
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 1 and len(out) < 500 and "cancelled" in err


def test_a_second_interrupt_does_not_wait(request, server):
    server.delay_s = 0.05
    server.silent.add("gen.cancel")
    process = subprocess.Popen([request.config.getoption("--spillway"), "--socket", server.path, "complete",
                                " ".join(["word"] * 2000)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(5)
    process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + 5
    while not any(method == "gen.cancel" for method, _ in server.requests):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=10) == 1
    assert "INTERRUPTED" in process.stderr.read()


# ---- chat


def test_chat_keeps_the_history_as_messages(server, spillway):
    run = spillway("chat", "--system", "be brief", "--thinking", stdin="one\ntwo\\\nthree\n\n/clear\nfour\n/quit\nfive\n")
    assert run.code == 0 and run.out == "one \ntwo three \nfour \n" and run.err.count("tokens/s") == 3
    sent = [params["messages"] for method, params in server.requests if method == "gen.start"]
    system = {"role": "system", "content": "be brief"}
    said = {"role": "assistant", "content": "one", "reasoning_content": "Let me see. "}
    assert sent == [
        [system, {"role": "user", "content": "one"}],
        [system, {"role": "user", "content": "one"}, said, {"role": "user", "content": "two\nthree"}],
        [system, {"role": "user", "content": "four"}],
    ]


def test_chat_in_a_session_sends_only_what_is_new(server, spillway):
    assert spillway("chat", "--session", "s", "--system", "be brief", stdin="one\ntwo").code == 0
    sent = [(params["session"], [m["content"] for m in params["messages"]])
            for method, params in server.requests if method == "gen.start"]
    assert sent == [("s", ["be brief", "one"]), ("s", ["two"])]
    server.sessions["s"]["n_tokens"] = 30
    spillway("chat", "--session", "s", "--system", "be brief", stdin="three\n")
    assert [m["content"] for m in server.last("gen.start")["messages"]] == ["three"]


def test_chat_in_a_pipe_ends_with_the_first_error(server, spillway):
    server.refusals["gen.start"] = ("BUSY", "full")
    run = spillway("chat", stdin="one\ntwo\n")
    assert run.code == 1 and run.err.count("BUSY") == 1


def test_chat_prints_results_as_json(spillway):
    lines = spillway("chat", "--json", stdin="one\ntwo\n").out.splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["one", "two"]


# ---- on a terminal


class Terminal:
    """The program with a terminal for all three of its streams."""

    def __init__(self, *command):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.execv(command[0], [str(part) for part in command])
        self.seen = ""

    def expect(self, text, timeout=10):
        """Reads until `text` comes, and returns all before it."""
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            ready = select.select([self.fd], [], [], max(0, deadline - time.monotonic()))[0]
            assert ready, f"no {text!r} in {self.seen!r}"
            try:
                data = os.read(self.fd, 4096)
            except OSError:
                data = b""
            assert data, f"the end, but no {text!r} in {self.seen!r}"
            self.seen += data.decode()
        before, self.seen = self.seen.split(text, 1)
        return before

    def type(self, text):
        os.write(self.fd, text.encode())

    def exit_code(self):
        while True:
            try:
                if not os.read(self.fd, 4096):
                    break
            except OSError:
                break
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal(request, server):
    return lambda *args: Terminal(request.config.getoption("--spillway"), "--socket", server.path, *args)


def test_ctrl_c_ends_the_answer_and_not_the_chat(server, terminal):
    server.delay_s = 0.05
    chat = terminal("chat")
    chat.expect("> ")
    chat.type("\x03")
    chat.expect("(Ctrl-D ends the program.)")
    chat.type(" ".join(["word"] * 100) + "\n")
    chat.expect("word word")  # the echo
    chat.expect("\n")
    chat.expect("word word")
    chat.type("\x03")
    chat.expect("ended by cancelled]")
    chat.expect("> ")
    chat.type("again\n")
    chat.expect("again \r\n[1 tokens")
    chat.type("\x04")
    assert chat.exit_code() == 0


def test_an_error_does_not_end_a_chat_on_a_terminal(server, terminal):
    server.refusals["gen.start"] = ("BUSY", "full")
    chat = terminal("chat")
    chat.type("one\n")
    chat.expect("BUSY: full")
    server.refusals.clear()
    chat.type("two\n")
    chat.expect("[1 tokens")
    assert [m["content"] for m in server.last("gen.start")["messages"]] == ["two"]
    chat.type("/quit\n")
    chat.exit_code()


def test_reasoning_is_dimmed_and_progress_is_drawn_and_erased(server, terminal):
    server.n_progress, server.delay_s = 3, 0.02
    run = terminal("complete", "one", "--thinking")
    assert "1000 of 3000 tokens read" in run.expect("\r\x1b[K\x1b[2mLet me see. \x1b[0m")
    run.expect("one \r\n")
    assert run.exit_code() == 0


def test_control_characters_do_not_reach_a_terminal(terminal):
    run = terminal("complete", "a\x1b]0;title\x07b\u009bc")
    assert "a]0;titlebc \r\n" in run.expect("\r\n") + "\r\n"
    run.exit_code()


# ---- status, stats, doctor


def test_status_waits_until_the_daemon_serves(server, spillway):
    server.ready = False
    run = spillway("status", "--wait", "0.3", "--json")
    assert run.code == 1 and run.json()["health"]["phase"] == "loading"
    assert run.json()["hello"]["model"] is None
    server.ready = True
    assert spillway("status", "--wait", "5").code == 0


def test_stats_are_watched(spillway):
    run = spillway("stats", "--watch", "--count", 3, "--interval", 0.1)
    assert run.code == 0 and run.out.count("requests.done") == 3 and run.out.count("/s") == 2
    lines = spillway("stats", "--watch", "--count", 2, "--interval", 0.1, "--json").out.splitlines()
    assert [json.loads(line)["requests"]["done"] for line in lines] == [40, 50]


def verdicts(run):
    return {check["check"]: check["verdict"] for check in run.json()["checks"]}


def test_doctor_finds_nothing_wrong_with_a_good_daemon(spillway):
    run = spillway("doctor", "--json")
    assert {verdicts(run)[c] for c in ("socket", "permission", "connection", "version", "health")} == {"ok"}
    lines = spillway("doctor").out.splitlines()
    assert lines[0].startswith("ok    socket")
    for line, after in zip(lines, lines[1:] + [""]):  # who complains says what to do
        assert not line.startswith(("warn", "fail")) or "-> " in after


def test_doctor_names_what_is_wrong(server, spillway, tmp_path):
    (tmp_path / "file").touch()
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(tmp_path / "stale"))
    for name, check in (("none", "socket"), ("file", "socket"), ("stale", "connection")):
        run = spillway("--socket", tmp_path / name, "doctor", "--json")
        assert run.code == 3 and verdicts(run)[check] == "fail"
    server.ready = False
    assert verdicts(spillway("doctor", "--json"))["health"] == "warn"
    server.raw["hello"] = msgpack.packb([1, 1, None, {"version": 2}])
    server.close_after_raw = False
    run = spillway("doctor", "--json", "--timeout", "1")
    assert run.code == 1 and verdicts(run)["version"] == "fail"
    server.raw.clear()
    server.silent.add("hello")
    assert verdicts(spillway("doctor", "--json", "--timeout", "0.2"))["connection"] == "fail"


def test_the_example_prints_an_answer(request, server):
    run = subprocess.run([request.config.getoption("--example"), server.path, "one two"], capture_output=True, text=True,
                         timeout=30, check=False)
    assert (run.returncode, run.stdout) == (0, "one two \n2 tokens, finish_reason stop\n")
