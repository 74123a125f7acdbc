"""What the tests share: the program under test, the data folders, the comparison. Missing program or data is a failure."""
from pathlib import Path

import pytest

from probe import Probe
from tiny_pair import TinyPair

HERE = Path(__file__).resolve().parent


def pytest_addoption(parser):
    parser.addoption("--probe", help="path of spillway-probe")
    parser.addoption("--tokenize-dump", help="path of tokenize_dump")
    parser.addoption("--source-root", default=HERE.parent.parent, type=Path, help="top folder of the sources")
    parser.addoption("--long", action="store_true", help="generate at full length in every mode")


@pytest.fixture(scope="session")
def golden(pytestconfig):
    """Folder of the small checkpoints and their reference outputs."""
    return pytestconfig.getoption("--source-root") / "tests" / "golden"


@pytest.fixture(scope="session")
def tiny(pytestconfig, golden):
    return TinyPair(pytestconfig.getoption("--source-root") / "share" / "tiny", golden / "tiny-pair.json")


@pytest.fixture(scope="session")
def probe(pytestconfig):
    path = pytestconfig.getoption("--probe")
    if not path or not Path(path).is_file():
        pytest.fail(f"no spillway-probe at {path}: give --probe PATH")
    return Probe(Path(path).resolve())
