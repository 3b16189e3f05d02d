"""Public inputs weighted like private ones: which are taken, and when none are."""

import numpy as np
import pytest
from scipy import optimize

from tfp_dpvi.calibrated.balance import balanced_rows


def squares(share, num, generator):
    """Squares of a standardised value that a share has, and of two normal columns."""
    has = generator.uniform(size=num) < share
    rare = np.where(has, 1.0 / share, share)
    return np.column_stack([rare, generator.normal(size=(num, 2)) ** 2]), has


@pytest.mark.parametrize("share", [0.02, 0.1, 0.8])
def test_a_value_gets_the_share_that_was_released(share):
    generator = np.random.default_rng(0)
    public, has = squares(0.5, 512, generator)
    released = np.array([public[has, 0].mean() * share, 0.0, 0.0])
    released[0] += public[~has, 0].mean() * (1.0 - share)
    released[1:] = public[:, 1:].mean(axis=0)
    rows = balanced_rows(public, released, 0.0)
    assert np.mean(has[rows]) == pytest.approx(share, abs=2.0 / 512)
    # What was alike stays alike: a normal column's second moment.
    assert public[rows, 1:].mean(axis=0) == pytest.approx(public[:, 1:].mean(axis=0), rel=0.1)


def test_the_weights_are_the_most_even_ones():
    """Against a general solver of the primal problem: entropy under the constraints."""
    generator = np.random.default_rng(1)
    public = generator.uniform(size=(40, 2))
    wanted = np.array([0.6, 0.45])
    found = optimize.minimize(
        lambda weights: np.sum(weights * np.log(40.0 * np.maximum(weights, 1e-12))),
        np.full(40, 1.0 / 40.0),
        bounds=[(0.0, 1.0)] * 40,
        constraints=[
            {"type": "eq", "fun": lambda weights: weights @ public - wanted},
            {"type": "eq", "fun": lambda weights: weights.sum() - 1.0},
        ],
    ).x
    rows = balanced_rows(np.repeat(public, 200, axis=0), wanted, 0.0)
    weights = np.bincount(rows // 200, minlength=40) / len(rows)
    assert weights == pytest.approx(found, abs=1e-3)


def test_noise_leaves_public_inputs_as_they_are():
    public, _ = squares(0.5, 200, np.random.default_rng(2))
    rows = balanced_rows(public, np.array([3.0, 0.2, 1.0]), 1e4)
    np.testing.assert_array_equal(np.sort(rows), np.arange(200))


@pytest.mark.parametrize("released", [[1.0, 1.0, 60.0], [-1.0, -1.0, 0.1]])
def test_what_no_even_weights_have_is_not_taken(released):
    public, _ = squares(0.5, 200, np.random.default_rng(3))
    assert balanced_rows(public, np.array(released), 0.1) is None
    public[3, 1] = np.nan
    assert balanced_rows(public, np.ones(3), 0.1) is None
