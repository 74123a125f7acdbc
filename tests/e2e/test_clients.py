"""The clients and the daemon agree: every command and every method, with their parameters and what comes back."""
import json
import subprocess

import pytest
import spillway
from conftest import ROOT

CHAT = ROOT / "share/tiny/example-chat.json"
QUESTION = ["--messages", str(CHAT), "--no-thinking", "--temperature", "0", "--max-tokens", "64"]
ANSWER = "The code of the red door is 2766."


@pytest.fixture
def cli(request, daemon):
    """Runs the program against one daemon; `code` is what it must exit with."""
    one = daemon()

    def run(*args, code=0, stdin=""):
        command = [request.config.getoption("--spillway"), "--socket", one.socket, *args]
        done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, done.stderr
        return done

    run.daemon = one
    return run


def test_complete_streams_the_answer_and_tells_its_accept_length(cli):
    done = cli("complete", *QUESTION, "--stats")
    assert done.stdout == ANSWER
    assert "accept length" in done.stderr and "tokens/s" in done.stderr
    result = json.loads(cli("complete", *QUESTION, "--json", "--return-ids", "--logprobs", "2").stdout)
    assert result["text"] == ANSWER and len(result["ids"]) == result["usage"]["completion"] == len(result["logprobs"])
    lines = [json.loads(line) for line in cli("complete", *QUESTION, "--events").stdout.splitlines()]
    assert "".join(line["text"] for line in lines if line.get("type") == "delta") == ANSWER
    assert lines[0]["type"] == "accepted" and lines[-1]["finish_reason"] == "stop"


def test_options_of_a_generation_are_taken(cli):
    done = cli("complete", "The sea", "--max-tokens", "9", "--temperature", "0.9", "--top-p", "0.9", "--top-k", "40", "--min-p",
               "0.01", "--repetition-penalty", "1.05", "--presence-penalty", "0.1", "--frequency-penalty", "0.1", "--logit-bias",
               "300=-5", "--seed", "7", "--stop", "never ever", "--stop-id", "4000", "--ignore-eos", "--priority", "1",
               "--deadline", "60", "--no-speculate", "--cache", "bypass", "--markup", "--json")
    result = json.loads(done.stdout)
    assert result["finish_reason"] == "length" and result["usage"]["draft"]["proposed"] == 0


def test_chat_goes_on_in_a_session_of_the_daemon(cli):
    notes = json.loads(CHAT.read_text())["messages"][0]["content"]
    chat = ["chat", "--session", "notes", "--system", notes, "--no-thinking", "--temperature", "0", "--max-tokens", "40"]
    first = cli(*chat, stdin="What is the code of the red door?\n")
    second = cli(*chat, stdin="What is the code of the blue tower?\n")
    assert first.stdout == ANSWER + "\n" and "1904" in second.stdout
    assert json.loads(cli("session", "info", "notes", "--json").stdout)["n_tokens"] > 100


def test_commands_of_sessions(cli):
    cli("session", "open", "a")
    cli("complete", *QUESTION, "--session", "a")
    n_tokens = json.loads(cli("session", "info", "a", "--json").stdout)["n_tokens"]
    cli("session", "fork", "a", "b")
    assert json.loads(cli("session", "fork", "a", "c", "--at", "70", "--json").stdout)["n_tokens"] == 70
    sessions = {s["name"]: s["n_tokens"] for s in json.loads(cli("sessions", "--json").stdout)["sessions"]}
    assert sessions == {"a": n_tokens, "b": n_tokens, "c": 70}
    for verb in ("pin", "unpin", "resume"):
        cli("session", verb, "a")
    assert json.loads(cli("session", "park", "a", "--json").stdout)["tier"] == "none"
    cli("session", "resume", "a", "--wait")
    cli("session", "close", "b")
    assert cli("sessions").stdout.startswith("name  ")
    assert "NOT_FOUND" in cli("session", "info", "b", code=1).stderr


def test_commands_of_the_cache_and_of_texts(cli):
    cli("complete", *QUESTION)
    text = cli("render", str(CHAT)).stdout
    ids = json.loads(cli("tokenize", "--markup", text).stdout)
    rendered = json.loads(cli("render", "--json", str(CHAT)).stdout)
    assert rendered["text"] == text and rendered["ids"] == ids and rendered["cached"]["device"] == 64
    assert json.loads(cli("cache", "lookup", "--markup", text, "--json").stdout)["device"] == 64
    assert json.loads(cli("cache", "stats", "--json").stdout)["tiers"]["device"]["pages"] >= 1
    assert json.loads(cli("cache", "evict", "device", "--all", "--json").stdout)["pages"] >= 1
    assert json.loads(cli("cache", "lookup", "--markup", text, "--json").stdout)["device"] == 0
    cli("cache", "verify")
    cli("cache", "flush")
    cli("complete", *QUESTION)
    assert json.loads(cli("cache", "purge", "--json").stdout)["device"] > 0


def test_commands_of_the_daemon(cli):
    assert json.loads(cli("status", "--wait", "60", "--json").stdout)["health"]["ready"]
    assert json.loads(cli("stats", "--json").stdout)["requests"]["running"] == 0
    assert cli("stats", "--watch", "--count", "2", "--interval", "0.1").stdout.count("uptime_ms") == 2
    assert "# TYPE spillway_" in cli("stats", "--metrics").stdout
    assert json.loads(cli("gens", "--json").stdout) == {"gens": []}
    assert "NOT_FOUND" in cli("cancel", "99", code=1).stderr
    with cli.daemon.connect() as client:  # another connection ends what this one runs
        generation = client.generate("The sea", max_tokens=20000, ignore_eos=True)
        next(generation)
        number = json.loads(cli("gens", "--json").stdout)["gens"][0]["gen"]
        cli("cancel", str(number))
        assert generation.result()["finish_reason"] == "cancelled"
    checks = {c["check"]: c["verdict"] for c in json.loads(cli("doctor", "--json").stdout)["checks"]}
    assert all(checks[name] == "ok" for name in ("socket", "permission", "connection", "version", "health"))
    cli("reload")
    cli("drain")
    assert cli.daemon.process.wait(timeout=60) == 0


# method: parameters with which it must do its work
METHODS = {
    "text.tokenize": {"text": "a"}, "text.detokenize": {"ids": [1]}, "chat.render": {"messages": [{"role": "user", "content": "x"}]},
    "session.open": {"name": "s"}, "session.info": {"name": "s"}, "session.resume": {"name": "s"}, "session.pin": {"name": "s"},
    "session.unpin": {"name": "s"}, "session.park": {"name": "s"}, "session.fork": {"name": "s", "new_name": "t"}, "session.close": {"name": "t"},
    "cache.lookup": {"prompt_ids": [1], "prefetch": True}, "cache.evict": {"tier": "device", "all": True},
    "server.log_level": {"level": "info"},
}
REFUSED = {"gen.cancel": ({"id": 99}, spillway.NotFound)}


def test_the_python_client_has_every_method(daemon):
    one = daemon()
    with one.connect() as client:
        with pytest.raises(spillway.UnknownMethod):
            client.call("no.such")
        for method in sorted(spillway._METHODS, key=lambda m: (m == "server.drain", m != "session.open", m == "session.close", m)):
            params, error = REFUSED.get(method, (METHODS.get(method, {}), None))
            call = getattr(client, method.replace(".", "_"))
            if error:
                with pytest.raises(error):
                    call(**params)
            else:
                assert isinstance(call(**params), dict)
    assert one.process.wait(timeout=60) == 0  # it was told to drain
