"""The man pages tell every command, option, key and function that there is."""
import re
import subprocess
import sys

import pytest
from conftest import ROOT

MAN = ROOT / "docs" / "man"


def page(name):
    """The source of a page without the escapes of scdoc."""
    return (MAN / name).read_text().replace("\\_", "_").replace("\\*", "*")


def options(text):
    return set(re.findall(r"--[a-z][a-z0-9-]*", text))


def test_every_command_and_option_is_in_the_page(spillway):
    text = page("spillway.1.scd")
    commands = re.findall(r"^  ([a-z]+(?: [a-z]+)?)  ", spillway("--help").out, re.MULTILINE)
    assert len(commands) > 20
    assert [c for c in commands if not re.search(rf"^(\*.*, )?\*{c}\*", text, re.MULTILINE)] == []
    there_are = set().union(*(options(spillway(*c.split(), "--help").out) for c in commands))
    assert there_are - options(text) == set()
    assert options(text) - there_are == {"--version"}


@pytest.mark.parametrize("program, name", [("probe", "spillway-probe.1.scd"), ("daemon", "spillwayd.8.scd")])
def test_every_option_of_the_other_programs_is_in_their_pages(request, program, name):
    run = subprocess.run([request.config.getoption("--" + program), "--help"], capture_output=True, text=True, check=True,
                         timeout=30)
    assert options(run.stdout) | {"--help"} == options(page(name))


def test_every_key_is_in_the_page():
    conf = ROOT / "conf" / "spillway.conf"
    run = subprocess.run([sys.executable, MAN / "conf_keys.py", MAN / "spillway.conf.5.scd.in", conf], capture_output=True,
                         text=True, check=True, timeout=30)
    keys = re.findall(r"^#?(\w+) =", conf.read_text(), re.MULTILINE)
    assert len(keys) > 30
    assert [key for key in keys if f"\n*{key}*" not in run.stdout.replace("\\_", "_")] == []
    assert "@KEYS@" not in run.stdout


def test_every_function_is_in_the_page():
    header = (ROOT / "client" / "spillway_client.h").read_text()
    functions = re.findall(r"^SPILLWAY_API .*?(spillway_\w+)\(", header, re.MULTILINE)
    assert len(functions) == 18
    text = page("libspillway-client.3.scd")
    assert [name for name in functions if name + "(" not in text and name + "*(" not in text] == []


@pytest.mark.parametrize("name", ["spillway.1.scd", "spillwayd.8.scd", "spillway-probe.1.scd", "libspillway-client.3.scd"])
def test_pages_name_pages_that_exist(name):
    ours = {re.sub(r"\.(\d)\.scd(\.in)?$", r"(\1)", path.name) for path in MAN.glob("*.scd*")}
    named = set(re.findall(r"\*([\w.-]+)\*(\(\d\))", page(name)))
    assert {a + b for a, b in named} - ours <= {"systemd(1)", "systemd.socket(5)"}
