"""Runs spillway-probe. Options are keyword arguments: kv_dtype="bf16" becomes --kv-dtype bf16, True a flag, None nothing."""
import io
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np

TIMEOUT_S = 1500  # of one run; the slowest is the whole long generation in reference numerics


def option_args(options):
    args = []
    for name, value in options.items():
        if value is None:
            continue
        args.append("--" + name.replace("_", "-"))
        if value is not True:
            args.append(",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))
    return args


class Arrays:
    """The npy files of one run: as bytes, for comparing bit by bit, and as arrays."""

    def __init__(self, raw):
        self.raw = raw

    def __getitem__(self, name):
        return np.load(io.BytesIO(self.raw[name]))


class Probe:
    def __init__(self, path):
        self.path = path

    def start(self, **options):
        return subprocess.Popen([str(self.path), *option_args(options)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                text=True)

    def finish(self, process):
        """(exit code, stdout, stderr)"""
        out, err = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, out, err

    def run(self, **options):
        return self.finish(self.start(**options))

    def text(self, **options):
        """stdout of a run that must succeed."""
        return self._checked(self.start(**options))

    def _checked(self, process):
        code, out, err = self.finish(process)
        assert code == 0, f"{' '.join(process.args)}: exit {code}: {err.strip()}"
        return out

    def arrays(self, ids, wanted, **options):
        """wanted: options that name an npy file, such as ("logits", "hidden")."""
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            ids_file = write_json(folder / "ids.json", [int(i) for i in ids])
            files = {name: folder / f"{name}.npy" for name in wanted}
            self.text(ids=ids_file, **files, **options)
            return Arrays({name: path.read_bytes() for name, path in files.items()})

    def start_generate(self, folder, prompts, n, **options):
        """Starts the generation of n tokens for every list of ids; collect with finish_generate."""
        batch = write_json(Path(folder) / "batch.json", prompts)
        output = open(Path(folder) / "output.jsonl", "w+")
        process = subprocess.Popen([str(self.path), *option_args(dict(batch=batch, generate=n, **options))], stdout=output,
                                   stderr=subprocess.PIPE, text=True)
        return process, output

    def finish_generate(self, started):
        process, output = started
        _, err = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, f"{' '.join(process.args)}: exit {process.returncode}: {err.strip()}"
        with output:
            output.seek(0)
            return [json.loads(line) for line in output]

    def generate(self, prompts, n, **options):
        """One result per list of ids: {ids, text, tokens_per_s, steps?}."""
        with tempfile.TemporaryDirectory() as folder:
            return self.finish_generate(self.start_generate(folder, prompts, n, **options))


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path
