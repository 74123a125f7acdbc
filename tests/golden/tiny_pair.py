"""The trained pair of share/tiny and what the reference implementation generated with it."""
import json

# Below this gap of the two best logits a float32 reference and we may choose differently.
MARGIN_MIN = 0.002
# The longest reference output: every case either ends with the stop id or has this many tokens.
N_TOKENS = 96


class TinyPair:
    def __init__(self, folder, reference):
        self.target, self.draft = folder / "target", folder / "draft"
        self.cases = json.loads(reference.read_text())["cases"]

    @property
    def prompts(self):
        return [case["prompt_ids"] for case in self.cases]


def device_bytes(mib, n_seqs, backend):
    """kv.device_bytes that hold beside n_seqs running seqs what `mib` hold on the CPU: a card keeps open chunks of them."""
    return (mib << 20) + (0 if backend == "cpu" else n_seqs * 1244160)


def is_decided(case):
    return case["min_logit_margin"] > MARGIN_MIN
