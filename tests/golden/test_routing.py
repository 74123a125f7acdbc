"""The experts a program chooses, and what `fast` makes of them.

A router's near-tie may fall the other way in 16-bit inputs. Such a row computes another function, and through keys, values
and states of the layers behind it so does every later row of its seq. Two comparisons stay honest: over the rows that no
flip has touched, and over all rows with a model that is told the program's choice.
"""
from dataclasses import dataclass

import numpy as np
import pytest

from cases import FAST, FAST_LIMIT, REFERENCE, expected
from compare import assert_close
from random_moe import write_random_moe
from scalar_model import Target

N_SEQS, N_TOKENS, VOCAB = 16, 32, 512


def same_experts(a, b):
    """[L, T]: whether both chose the same set; the order within it says nothing."""
    return (np.sort(a, axis=2) == np.sort(b, axis=2)).all(2)


def untouched_rows(alike):
    """[T] of [L, T]: rows that chose alike in every layer, with no flip in an earlier row that they read. Behind the last
    layer nothing reads other rows, so a flip there stays in its own."""
    flipped_before = np.cumsum(~alike[:-1].all(0)) - ~alike[:-1].all(0)
    return alike.all(0) & (flipped_before == 0)


@dataclass
class Case:
    folder: object
    target: Target
    seqs: list  # of ids
    passes: list  # what the scalar model makes of each
    rows_min: float  # share of rows that flips must leave: a comparison of nothing proves nothing


@pytest.fixture(scope="module", params=["moe-a", "random-fp8"])
def case(request, golden, tmp_path_factory):
    rng = np.random.default_rng(1)
    seqs = [rng.integers(2, VOCAB, N_TOKENS) for _ in range(N_SEQS)]
    if request.param == "random-fp8":
        folder = tmp_path_factory.mktemp("random-fp8")
        write_random_moe(folder, seed=1)
        target = Target(folder)
        return Case(folder, target, seqs, [target.run(ids) for ids in seqs], rows_min=0.2)
    stored = expected(golden, "moe-a")
    seqs.append(stored["input_ids"])
    target = Target(golden / "moe-a")
    passes = [target.run(ids) for ids in seqs]
    passes[-1].logits, passes[-1].hidden[:-1] = stored["logits"], stored["hidden_states"]  # of the reference itself
    return Case(golden / "moe-a", target, seqs, passes, rows_min=0.5)


def run(probe, case, mode):
    return [probe.arrays(ids, ("logits", "hidden", "routing"), model=case.folder, **mode.options) for ids in case.seqs]


def assert_near(logits, hidden):
    """Lists of (got, expected): [n, V], and [L, n, H] of every layer."""
    for what, pairs, axis in (("logits", logits, 0), ("hidden states", hidden, 1)):
        got, want = (np.concatenate(arrays, axis) for arrays in zip(*pairs))
        assert_close(got, want, FAST_LIMIT, what)


def test_rows_behind_a_flip_do_not_count():
    alike = np.ones((3, 6), bool)
    assert untouched_rows(alike).all()
    alike[2, 1] = False  # the last layer: its own row alone
    assert untouched_rows(alike).tolist() == [True, False, True, True, True, True]
    alike[1, 3] = False
    assert untouched_rows(alike).tolist() == [True, False, True, False, False, False]
    alike[0, 0] = False
    assert not untouched_rows(alike).any()


def test_reference_numerics_route_alike(probe, case):
    for got, want in zip(run(probe, case, REFERENCE), case.passes):
        assert got["routing"].dtype == np.int32
        np.testing.assert_array_equal(got["routing"], want.routing)


@pytest.mark.parametrize("mode", FAST, ids=str)
def test_fast_numerics_stay_near_where_no_flip_reaches(probe, case, mode):
    logits, hidden, flips, choices, kept, n_rows = [], [], 0, 0, 0, 0
    for got, want in zip(run(probe, case, mode), case.passes):
        alike = same_experts(got["routing"], want.routing)
        rows = untouched_rows(alike)
        logits.append((got["logits"][rows], want.logits[rows]))
        hidden.append((got["hidden"][:, rows], want.hidden[:-1, rows]))
        flips, choices, kept, n_rows = flips + (~alike).sum(), choices + alike.size, kept + rows.sum(), n_rows + rows.size
    print(f"routing flips: {flips} of {choices}; {kept} of {n_rows} rows untouched (at least {case.rows_min:.0%})")
    assert kept >= case.rows_min * n_rows
    assert_near(logits, hidden)


@pytest.mark.parametrize("mode", FAST, ids=str)
def test_fast_numerics_stay_near_in_all_rows_given_their_experts(probe, case, mode):
    logits, hidden = [], []
    for ids, got in zip(case.seqs, run(probe, case, mode)):
        want = case.target.run(ids, forced=got["routing"])
        logits.append((got["logits"], want.logits))
        hidden.append((got["hidden"], want.hidden[:-1]))
    assert_near(logits, hidden)
