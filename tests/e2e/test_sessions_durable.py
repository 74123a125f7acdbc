"""Sessions outlive the daemon: by their records, written after each turn, however the daemon ends."""
import os
import shutil
import signal
import subprocess
import time

import pytest

import spillway

TURNS = ["The code of the red door is 2766. Remember it.", "Count to ten.", "What is the code of the red door?"]


@pytest.fixture
def disk(tmp_path):
    """Settings of a disk tier in a folder that does not exist yet."""
    return {"kv.disk_path": tmp_path / "kv", "kv.disk_bytes": "256MiB", "kv.host_bytes": "64MiB"}


def talk(client, name, turn, **params):
    answer = client.call("gen.start", {"messages": [{"role": "user", "content": turn}], "session": name, "temperature": 0,
                                       "max_tokens": 24, "stream": False, "return_ids": True, **params})
    return answer["ids"]


def records(disk):
    return sorted((disk["kv.disk_path"] / "sessions").iterdir())


def wait_until(claim, seconds=20):
    end = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < end
        time.sleep(0.02)


def kill(one):
    one.process.send_signal(signal.SIGKILL)
    one.stop(-signal.SIGKILL)


def only_tokens(info):
    return {key: info[key] for key in ("name", "n_tokens", "pinned", "parked")}


def test_a_conversation_goes_on_after_restart_and_kill_with_the_same_tokens(daemon, disk):
    with daemon().connect() as client:
        client.call("session.open", {"name": "plain"})
        plain = [talk(client, "plain", turn) for turn in TURNS]
    for end in (lambda one: one.stop(), kill):
        name = f"s{end.__name__}"
        for i, turn in enumerate(TURNS):
            one = daemon(**disk)
            with one.connect() as client:
                info = client.call("session.open", {"name": name})
                assert info["durable"] is True
                assert (info["n_tokens"] > 0) == (i > 0)
                assert talk(client, name, turn) == plain[i]
                before = client.call("session.info", {"name": name})
                wait_until(lambda: client.call("cache.flush") is not None and not unwritten(one))
            end(one)
        one = daemon(**disk)
        with one.connect() as client:
            assert only_tokens(client.call("session.info", {"name": name})) == only_tokens(before)
        one.stop()


def unwritten(one):
    return one.metrics()["spillway_sessions_unwritten"]


def test_what_is_older_than_two_seconds_is_there_after_a_kill(daemon, disk):
    """Not a flush, only time."""
    one = daemon(**disk)
    with one.connect() as client:
        for i in range(20):
            client.call("session.open", {"name": f"s{i}"})
            talk(client, f"s{i}", TURNS[i % 3], max_tokens=1 + i)
        client.call("session.fork", {"name": "s3", "new_name": "fork", "at": 10})
        client.call("session.close", {"name": "s4"})
        client.call("session.pin", {"name": "s5"})
        before = {s["name"]: only_tokens(s) for s in client.call("session.list")["sessions"]}
        time.sleep(2)
    kill(one)
    with daemon(**disk).connect() as client:
        after = {s["name"]: only_tokens(s) for s in client.call("session.list")["sessions"]}
    assert after == before and after["s5"]["pinned"] and after["fork"]["n_tokens"] == 10 and "s4" not in after


def test_kill_during_turns_loses_no_older_turn(daemon, disk, long):
    n_tokens, seed = {}, 1
    for _ in range(20 if long else 3):
        one = daemon(**disk)
        with one.connect() as client:
            for s in client.call("session.list")["sessions"]:
                assert s["n_tokens"] >= n_tokens[s["name"]][0], s
            names = {s["name"] for s in client.call("session.list")["sessions"]}
            assert {name for name, (_, at) in n_tokens.items() if at} <= names
            end = time.monotonic() + 2.5
            turns = []  # (when its response came, name, tokens)
            while time.monotonic() < end:
                seed = seed * 69069 + 1
                name = f"s{seed >> 8 & 3}"
                client.call("session.open", {"name": name})
                talk(client, name, "Go on.", max_tokens=2)
                turns.append((time.monotonic(), name, client.call("session.info", {"name": name})["n_tokens"]))
            kill(one)
            for at, name, n in turns:
                if at < end - 2:
                    n_tokens[name] = (n, True)
                else:
                    n_tokens.setdefault(name, (0, False))


def test_sessions_of_two_users_stay_apart(daemon, disk, other_user):
    one = daemon(**disk, **{"server.socket_mode": "0666"})
    with one.connect() as mine:
        theirs = other_user(one)
        for client, turn in (mine, TURNS[0]), (theirs, TURNS[1]):
            client.call("session.open", {"name": "notes"})
            talk(client, "notes", turn)
        expected = [client.call("session.info", {"name": "notes"})["n_tokens"] for client in (mine, theirs)]
        theirs.call("session.open", {"name": "secret plans"})
    one.stop()
    assert len(records(disk)) == 3
    for path in records(disk):
        assert len(path.name) == 64 and path.stat().st_mode & 0o777 == 0o600
    assert disk["kv.disk_path"].stat().st_mode & 0o777 == 0o700
    one = daemon(**disk, **{"server.socket_mode": "0666"})
    with one.connect() as mine:
        theirs = other_user(one)
        assert [c.call("session.info", {"name": "notes"})["n_tokens"] for c in (mine, theirs)] == expected
        assert [len(c.call("session.list")["sessions"]) for c in (mine, theirs)] == [1, 2]
        with pytest.raises(spillway.NotFound):
            mine.call("session.info", {"name": "secret plans"})
        mine.call("session.close", {"name": "notes"})
        assert theirs.call("session.info", {"name": "notes"})["n_tokens"] == expected[1]
    assert len(records(disk)) == 2


def test_a_damaged_record_is_told_and_harms_no_other(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client:
        for name in "abc":
            client.call("session.open", {"name": name})
    one.stop()
    first, second, third = records(disk)
    content = bytearray(first.read_bytes())
    content[40] ^= 1
    first.write_bytes(content)
    second.write_bytes(b"")
    one = daemon(**disk)
    with one.connect() as client:
        assert len(client.call("session.list")["sessions"]) == 1
    log = one.log()
    assert f"file=sessions/{first.name} reason=damaged" in log and f"file=sessions/{second.name} reason=damaged" in log
    assert "event=sessions.loaded n=1 damaged=2" in log
    assert first.read_bytes() == content
    with one.connect() as client:
        whole = client.call("session.list")["sessions"][0]["name"]
        for name in set("abc") - {whole}:  # never taken for one that was not there, and never written over
            for method, params in (("session.open", {"name": name}), ("session.info", {"name": name}),
                                   ("session.park", {"name": name}), ("gen.start", {"session": name, "prompt": "x"})):
                with pytest.raises(spillway.Corrupt) as refused:
                    client.call(method, params)
                assert str(disk["kv.disk_path"]) in refused.value.message
                assert f'session "{name}"' in refused.value.message
        assert first.read_bytes() == content
        for name in set("abc") - {whole}:
            client.call("session.close", {"name": name})
            assert client.call("session.open", {"name": name})["n_tokens"] == 0
        wait_until(lambda: records(disk) == [first, second, third])
    one.stop()
    with daemon(**disk).connect() as client:
        assert len(client.call("session.list")["sessions"]) == 3


def test_sessions_of_another_vocabulary_wait_for_their_model(daemon, disk, tmp_path):
    one = daemon(**disk)
    with one.connect() as client:
        client.call("session.open", {"name": "a"})
        talk(client, "a", TURNS[0])
    one.stop()
    source = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + "/share/tiny/target"
    other = tmp_path / "other"
    other.mkdir()
    for file in os.listdir(source):
        content = open(f"{source}/{file}", "rb").read()
        (other / file).write_bytes(content + b"\n" if file == "tokenizer.json" else content)
    one = daemon(**disk, **{"model.path": other})
    with one.connect() as client:
        assert client.call("session.list")["sessions"] == []
        client.call("session.open", {"name": "a"})
    assert "event=sessions.loaded n=0 damaged=0 unreadable=0 foreign=1" in one.log()
    one.stop()
    with daemon(**disk).connect() as client:
        assert client.call("session.info", {"name": "a"})["n_tokens"] > 0


# ---- the folder


def refused(daemon, status, words, **settings):
    one = daemon(ready=False, **settings)
    assert one.process.wait(timeout=60) == status, one.log()
    one.stop(status)
    assert words in one.log(), one.log()


def test_a_second_daemon_does_not_start_on_the_folder(daemon, disk):
    with daemon(**disk).connect() as client:
        client.call("session.open", {"name": "a"})
        refused(daemon, 1, f"kv.disk_path: {disk['kv.disk_path']}: another daemon uses this folder", **disk)
        assert client.call("session.info", {"name": "a"})["durable"] is True


def test_a_folder_that_is_not_safe_is_refused(daemon, disk, tmp_path):
    path = disk["kv.disk_path"]
    refused(daemon, 78, "the folder above it does not exist", **{**disk, "kv.disk_path": tmp_path / "no/kv"})
    path.mkdir(mode=0o755)
    path.chmod(0o755)
    refused(daemon, 78, "with mode 0700", **disk)
    path.chmod(0o700)
    link = tmp_path / "link"
    link.symlink_to(path)
    refused(daemon, 78, "it is a link", **{**disk, "kv.disk_path": link})
    daemon(**disk).stop()
    secret = path / "secret"
    content = secret.read_bytes()
    secret.write_bytes(content[:-1])
    refused(daemon, 78, f"{path}/secret is damaged", **disk)
    secret.write_bytes(content)
    secret.chmod(0o644)
    refused(daemon, 78, "open to others", **disk)
    if os.geteuid() == 0:
        secret.chmod(0o600)
        os.chown(path, 65534, -1)
        refused(daemon, 78, "with mode 0700", **disk)
        os.chown(path, 0, -1)


def test_without_a_disk_tier_sessions_say_that_they_end(daemon, disk):
    for settings in {}, {**disk, "kv.disk_bytes": 0}:
        with daemon(**settings).connect() as client:
            assert client.call("session.open", {"name": "a"})["durable"] is False
    assert not disk["kv.disk_path"].exists()


# ---- a disk that does not take records


@pytest.fixture
def small_disk(tmp_path):
    """A file system of its own, for 400 KiB."""
    path = tmp_path / "mount"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=400k,mode=0700", "none", path], capture_output=True, text=True)
    if made.returncode != 0:
        pytest.skip(f"nothing can be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_costs_durability_only_and_heals(daemon, small_disk):
    settings = {"kv.disk_path": small_disk / "kv", "kv.disk_bytes": "256MiB", "kv.host_bytes": "64MiB"}
    one = daemon(**settings)
    with one.connect() as client:
        client.call("session.open", {"name": "a"})
        assert "event=disk.short" in one.log()  # not even a file of pages
        assert one.metrics()["spillway_disk_room_bytes"] == 0
        talk(client, "a", TURNS[0])
        wait_until(lambda: not unwritten(one))
        with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(4096))
        talk(client, "a", TURNS[1])
        wait_until(lambda: not client.call("session.info", {"name": "a"})["durable"])
        talk(client, "a", TURNS[2])
        n_tokens = client.call("session.info", {"name": "a"})["n_tokens"]
        wait_until(lambda: client.call("server.health")["ready"])
        assert one.log().count("event=sessions.not_durable") == 1
        assert "No space left on device" in one.log()
        assert unwritten(one) == 1
        (small_disk / "filler").unlink()
        client.call("session.open", {"name": "b"})  # what works for one is tried for the others
        wait_until(lambda: client.call("session.info", {"name": "a"})["durable"])
        assert one.log().count("event=sessions.durable") == one.log().count("event=disk.short") == 1
    kill(one)
    one = daemon(**settings)
    with one.connect() as client:
        assert client.call("session.info", {"name": "a"})["n_tokens"] == n_tokens
    one.stop()


def test_a_flush_says_what_the_disk_does_not_take_and_tries_it_again(daemon, small_disk):
    settings = {"kv.disk_path": small_disk / "kv", "kv.disk_bytes": "256MiB", "kv.host_bytes": "64MiB"}
    one = daemon(**settings)
    with one.connect() as client:
        client.call("session.open", {"name": "a"})
        talk(client, "a", TURNS[0])
        assert client.call("cache.flush")["saved"] == 0
        with open(small_disk / "filler", "wb", buffering=0) as filler, pytest.raises(OSError):
            while True:
                filler.write(bytes(4096))
        talk(client, "a", TURNS[1])
        for _ in range(3):
            with pytest.raises(spillway.NoSpace, match="the records of 1 sessions.* No space left on device") as refused:
                client.call("cache.flush")
            assert refused.value.data == {"records": 1, "pages": 0}
        assert one.log().count("event=sessions.not_durable") == 1
        (small_disk / "filler").unlink()
        client.call("cache.flush")
        assert client.call("session.info", {"name": "a"})["durable"] and not unwritten(one)
        n_tokens = client.call("session.info", {"name": "a"})["n_tokens"]
    kill(one)
    with daemon(**settings).connect() as client:
        assert client.call("session.info", {"name": "a"})["n_tokens"] == n_tokens


def test_a_folder_that_vanishes_costs_durability_only(daemon, disk):
    one = daemon(**disk)
    with one.connect() as client:
        for name in "ab":
            client.call("session.open", {"name": name})
        wait_until(lambda: not unwritten(one))
        for record in records(disk):
            record.unlink()
            record.mkdir()
        with pytest.raises(spillway.Internal, match="could not be removed: Is a directory"):
            client.call("session.close", {"name": "b"})
        assert [s["name"] for s in client.call("session.list")["sessions"]] == ["a"]
        shutil.rmtree(disk["kv.disk_path"] / "sessions")
        talk(client, "a", TURNS[0])
        wait_until(lambda: not client.call("session.info", {"name": "a"})["durable"])
        assert one.log().count("event=sessions.not_durable") == 1
        assert talk(client, "a", TURNS[1])
    one.stop()


def test_a_read_only_disk_is_refused_at_the_start(daemon, small_disk):
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    refused(daemon, 1, "Read-only file system", **{"kv.disk_path": small_disk / "kv", "kv.disk_bytes": "256MiB",
                                                    "kv.host_bytes": "64MiB"})


# ---- limits


def test_the_tokens_of_a_users_sessions_are_limited(daemon):
    with daemon(**{"limits.session_tokens_per_uid": 150}).connect() as client:
        client.call("session.open", {"name": "a"})
        talk(client, "a", TURNS[0])
        client.call("session.fork", {"name": "a", "new_name": "b", "at": 10})
        for _ in range(10):
            try:
                talk(client, "a", TURNS[0])
            except spillway.Quota as error:
                assert error.data["session_tokens_per_uid"] == 150 and error.data["n_session_tokens"] > 0
                break
        else:
            raise AssertionError("the sessions grew without a limit")
        with pytest.raises(spillway.Quota, match="session_tokens_per_uid allows 150"):
            client.call("session.fork", {"name": "a", "new_name": "c"})
        client.call("session.close", {"name": "a"})
        assert talk(client, "b", "Hello.")
