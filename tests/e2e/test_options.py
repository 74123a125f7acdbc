"""What the daemon's options print, and where values come from."""
import re
import subprocess

import pytest


@pytest.fixture
def spillwayd(request):
    program = request.config.getoption("--spillwayd")

    def run(*args):
        return subprocess.run([program, *map(str, args)], capture_output=True, text=True, timeout=60)

    return run


def printed(output):
    """section.key -> (value, origin)"""
    values, section = {}, None
    for line in output.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line:
            key, value, origin = re.fullmatch(r"(\w+) = (.*?) +# (.*)", line).groups()
            values[f"{section}.{key}"] = value, origin
    return values


def test_version_and_help_are_on_the_output_and_end_well(spillwayd):
    ended = spillwayd("--version")
    assert ended.returncode == 0 and re.fullmatch(r"spillwayd \d+\.\d+\.\d+\n", ended.stdout) and not ended.stderr
    ended = spillwayd("--help")
    assert ended.returncode == 0 and "usage: spillwayd" in ended.stdout and not ended.stderr
    for option in "--config", "--set", "--check", "--print-config", "--plan", "--version":
        assert option in ended.stdout


def test_unknown_options_and_arguments_are_refused(spillwayd):
    for args in (["--chekc"], ["-x"], ["serve"], ["--set"], ["--config"], ["--check=yes"], ["--check", "file.conf"]):
        ended = spillwayd(*args)
        assert ended.returncode == 78 and "--help" in ended.stderr and not ended.stdout, args
    ended = spillwayd("--set", "sched.max_seqs")
    assert ended.returncode == 78 and "sched.max_seqs" in ended.stderr
    ended = spillwayd("--set", "sched.max_sqs=4")
    assert ended.returncode == 78 and "max_seqs" in ended.stderr, "a suggestion"
    ended = spillwayd(*["--set", "sched.max_seqs=4"] * 65)
    assert ended.returncode == 78 and "64" in ended.stderr


def test_check_is_silent_when_all_is_well_and_does_not_serve(spillwayd, tmp_path):
    ended = spillwayd("--check", "--set", f"server.socket={tmp_path}/s", "--set", "model.backend=cpu",
                      "--set", "limits.max_context=4096", "--set", "sched.max_seqs=4")
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    assert not (tmp_path / "s").exists()


def test_check_judges_syntax_values_model_and_memory(spillwayd, tmp_path):
    conf = tmp_path / "c.conf"
    for text, words in (("[sched]\nmax_seqs = 4\nmax_seqs = 5\n", "c.conf:3"), ("max_seqs = 4\n", "c.conf:1"),
                        ("[kv]\ndevice_bytes = 1GiBB\n", "c.conf:2"), ("[nowhere]\nkey = 1\n", "c.conf:1")):
        conf.write_text(text)
        ended = spillwayd("--check", "--config", conf)
        assert ended.returncode == 78 and words in ended.stderr and not ended.stdout, text
    ended = spillwayd("--check", "--config", tmp_path / "none.conf")
    assert ended.returncode == 78 and "none.conf" in ended.stderr
    ended = spillwayd("--check", "--set", "model.path=/nonexistent")
    assert ended.returncode == 77 and "--set: model.path = '/nonexistent': No such file" in ended.stderr
    conf.write_text(f"[draft]\npath = {conf}\n")
    ended = spillwayd("--check", "--config", conf)
    assert ended.returncode == 77 and f"{conf}:2: draft.path = '{conf}': Not a directory" in ended.stderr
    ended = spillwayd("--check", "--set", "model.backend=cpu", "--set", "kv.device_bytes=1MiB")
    assert ended.returncode == 77 and "kv.device_bytes" in ended.stderr


def test_check_judges_the_disk_folder_and_changes_nothing(spillwayd, tmp_path):
    def check(path, disk_bytes="256MiB"):
        ended = spillwayd("--check", "--set", "model.backend=cpu", "--set", "limits.max_context=4096",
                          "--set", "sched.max_seqs=4", "--set", "kv.host_bytes=64MiB", "--set", f"kv.disk_path={path}",
                          "--set", f"kv.disk_bytes={disk_bytes}")
        assert not ended.stdout
        return ended.returncode, ended.stderr

    folder, file = tmp_path / "kv", tmp_path / "file"
    assert check(folder) == (0, "")
    assert not folder.exists()
    folder.mkdir(mode=0o700)
    assert check(folder) == (0, "")
    assert not list(folder.iterdir())
    folder.chmod(0o750)
    file.write_text("")
    for path, words in ((folder, "with mode 0700"), (file, "it is a link or no folder"),
                        (tmp_path / "no/kv", "the folder above it does not exist")):
        status, said = check(path)
        assert status == 78 and said.startswith(f"spillwayd: kv.disk_path: {path}: ") and words in said
        assert check(path, disk_bytes=0) == (0, ""), "the tier is off"


def test_later_places_win_and_each_value_says_where_it_is_from(spillwayd, tmp_path):
    conf, folder = tmp_path / "spillway.conf", tmp_path / "conf.d"
    folder.mkdir()
    conf.write_text("[sched]\nmax_seqs = 1\nqueue_max = 11\nprefill_chunk = 64\n[log]\nlevel = debug\n")
    (folder / "10-a.conf").write_text("[sched]\nmax_seqs = 2\nqueue_max = 12\n")
    (folder / "20-b.conf").write_text("[sched]\nmax_seqs = 3\n")
    (folder / "30-c.conf.disabled").write_text("[sched]\nmax_seqs = 99\n")
    (folder / ".40-hidden.conf").write_text("[sched]\nmax_seqs = 98\n")
    args = ["--print-config", "--config", conf, "--set", "log.level=warn", "--set", "log.level=error"]
    ended = spillwayd(*args)
    assert ended.returncode == 0 and not ended.stderr
    values = printed(ended.stdout)
    assert values["log.level"] == ("error", "--set")
    assert values["sched.max_seqs"] == ("3", f"{folder}/20-b.conf:2")
    assert values["sched.queue_max"] == ("12", f"{folder}/10-a.conf:3")
    assert values["sched.prefill_chunk"] == ("64", f"{conf}:4")
    assert values["sched.max_batch_tokens"][1] == "built-in"


def test_an_error_in_a_drop_in_names_it(spillwayd, tmp_path):
    (tmp_path / "conf.d").mkdir()
    (tmp_path / "spillway.conf").write_text("")
    (tmp_path / "conf.d/50-x.conf").write_text("[kv]\n\ndevice_byte = 1GiB\n")
    ended = spillwayd("--check", "--config", tmp_path / "spillway.conf")
    assert ended.returncode == 78 and "conf.d/50-x.conf:3" in ended.stderr and "device_bytes" in ended.stderr


def test_what_is_printed_is_a_configuration_of_the_same_values(spillwayd, tmp_path):
    first = spillwayd("--print-config", "--set", "sched.max_seqs=5", "--set", "kv.device_bytes=96MiB")
    conf = tmp_path / "again.conf"
    conf.write_text(re.sub(r" +# .*", "", first.stdout))
    again = spillwayd("--print-config", "--config", conf)
    assert again.returncode == 0, again.stderr
    assert {key: value for key, (value, _) in printed(again.stdout).items()} == {
        key: value for key, (value, _) in printed(first.stdout).items()}


def test_the_plan_adds_up_to_what_was_given(spillwayd):
    ended = spillwayd("--plan", "--set", "kv.device_bytes=256MiB", "--set", "model.backend=cpu",
                      "--set", "sched.max_seqs=3")
    assert ended.returncode == 0, ended.stderr
    for words in "target_full", "target_state", "draft_full", "draft_sliding", "max_seqs", "max_context":
        assert words in ended.stdout
    assert "kv.device_bytes = 268435456" in ended.stdout
    used = float(re.search(r"together +([\d.]+) MiB", ended.stdout)[1])
    assert 200 < used <= 256
    assert re.search(r"max_seqs +3 ", ended.stdout)
