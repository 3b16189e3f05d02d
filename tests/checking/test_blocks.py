"""Contributions keep their bounds whatever a record holds, and sums of them are exact."""

import numpy as np
import pytest

from tfp_dpvi.checking.blocks import GRID, Block, on_grid, sensitivity_of
from tfp_dpvi.checking.declared import Bins, CheckedOutcome, Declared

STRANGE = np.array([np.nan, np.inf, -np.inf, 1e300, -1e300, 0.3, -1.0, 1.0])


def declared(*, is_binary, num_columns=2):
    outcome = CheckedOutcome(is_binary, is_binary, "Normal", -1.0)
    columns = {f"c{i}": Bins.of_numbers("c", np.zeros(4), [0.0, 1.0]) for i in range(num_columns)}
    return Declared(outcome, columns, (-10.0, 0.0))


@pytest.mark.parametrize("is_binary", [False, True])
def test_no_record_moves_the_release_by_more_than_it_states(is_binary):
    """C3: random and strange records of all blocks; the statement is attained."""
    what = declared(is_binary=is_binary)
    rng = np.random.default_rng(0)
    parts = []
    for block in what.blocks:
        size = block.matrix.shape[1]
        values = np.concatenate([STRANGE, rng.choice([-1.0, 1.0], 2000)])
        codes = np.concatenate([np.full(len(STRANGE), 10**6), rng.integers(-2, size + 2, 2000)])
        parts.append(block.contribution(codes, values))
    rows = on_grid(np.concatenate(parts, axis=1))
    stated = what.sensitivity
    lengths = np.linalg.norm(rows, axis=1)
    assert lengths.max() <= stated.add_or_remove
    assert lengths.max() > 0.999 * stated.add_or_remove
    apart = np.linalg.norm(rows[:400, None] - rows[None], axis=2)
    assert apart.max() <= stated.replace
    assert apart.max() > 0.95 * stated.replace


def test_a_replacement_is_at_least_a_presence():
    """A record that counts for nothing may take another one's place."""
    block = Block("counts", np.array([[1.0, 1.0]]), signed=False)
    assert block.replacement == block.presence == 1.0


def test_sums_are_exact_in_any_order():
    """Multiples of the grid: a record leaves the sum exactly as it came."""
    rows = on_grid(np.random.default_rng(1).normal(size=[100_000, 2]))
    assert np.array_equal(rows.sum(axis=0), rows[::-1].sum(axis=0))
    assert np.array_equal(rows.sum(axis=0) - rows[7], np.delete(rows, 7, axis=0).sum(axis=0))
    assert np.abs(on_grid(np.array([0.7, -0.7]))).max() <= 0.7
    assert on_grid(np.array([1.5 * GRID, -1.5 * GRID])).tolist() == [GRID, -GRID]


def test_every_block_counts():
    one, two = declared(is_binary=True, num_columns=1), declared(is_binary=True)
    assert two.sensitivity.add_or_remove > one.sensitivity.add_or_remove
    alone = sensitivity_of(one.blocks[:1])
    assert alone.add_or_remove == pytest.approx(one.blocks[0].presence)
