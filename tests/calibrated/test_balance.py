"""Public inputs weighted like private ones: which are taken, and when none are."""

import numpy as np
import pytest
from scipy import optimize

from tfp_dpvi.calibrated.balance import balanced_weights, rows_of_weights


def squares(share, num, generator):
    """Squares of a standardised value that a share has, and of two normal columns."""
    has = generator.uniform(size=num) < share
    rare = np.where(has, 1.0 / share, share)
    return np.column_stack([rare, generator.normal(size=(num, 2)) ** 2]), has


def balanced(public, released, noise, before=None):
    """Weights with equal noise on all released values."""
    num = len(public)
    before = np.full(num, 1.0 / num) if before is None else before
    return balanced_weights(public, released, np.full(public.shape[1], noise), before, 6.0)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.8])
def test_a_value_gets_the_share_that_was_released(share):
    generator = np.random.default_rng(0)
    public, has = squares(0.5, 512, generator)
    released = np.array([public[has, 0].mean() * share, 0.0, 0.0])
    released[0] += public[~has, 0].mean() * (1.0 - share)
    released[1:] = public[:, 1:].mean(axis=0)
    rows = rows_of_weights(balanced(public, released, 0.0), 512)
    assert np.mean(has[rows]) == pytest.approx(share, abs=2.0 / 512)
    # What was alike stays alike: a normal column's second moment.
    assert public[rows, 1:].mean(axis=0) == pytest.approx(public[:, 1:].mean(axis=0), rel=0.1)


def test_the_weights_are_the_most_even_ones():
    """Against a general solver of the primal problem: entropy under the constraints."""
    generator = np.random.default_rng(1)
    public = generator.uniform(size=(40, 2))
    wanted, before = np.array([0.6, 0.45]), generator.dirichlet(np.full(40, 5.0))
    found = optimize.minimize(
        lambda weights: np.sum(weights * np.log(np.maximum(weights, 1e-12) / before)),
        np.full(40, 1.0 / 40.0),
        bounds=[(0.0, 1.0)] * 40,
        constraints=[
            {"type": "eq", "fun": lambda weights: weights @ public - wanted},
            {"type": "eq", "fun": lambda weights: weights.sum() - 1.0},
        ],
    ).x
    weights = balanced(public, wanted, 0.0, before)
    assert weights == pytest.approx(found, abs=1e-3)


def test_inputs_are_taken_as_often_as_their_weights_say():
    weights = np.random.default_rng(4).dirichlet(np.full(50, 0.5))
    counts = np.bincount(rows_of_weights(weights, 1000), minlength=50)
    assert np.abs(counts - 1000 * weights).max() < 1.0 + 1e-9


def test_inputs_without_a_weight_get_none():
    public, _ = squares(0.5, 200, np.random.default_rng(5))
    before = np.where(np.arange(200) < 100, 0.01, 0.0)
    weights = balanced(public, public[:100].mean(axis=0) * [1.2, 1.0, 1.0], 0.0, before)
    assert np.all(weights[100:] == 0.0)
    assert weights.sum() == pytest.approx(1.0)


def test_noise_leaves_public_inputs_as_they_are():
    public, _ = squares(0.5, 200, np.random.default_rng(2))
    weights = balanced(public, np.array([3.0, 0.2, 1.0]), 1e4)
    np.testing.assert_allclose(weights, 1.0 / 200, rtol=1e-6)


@pytest.mark.parametrize("released", [[1.0, 1.0, 60.0], [-1.0, -1.0, 0.1]])
def test_what_no_even_weights_have_is_not_taken(released):
    public, _ = squares(0.5, 200, np.random.default_rng(3))
    assert balanced(public, np.array(released), 0.1) is None
    public[3, 1] = np.nan
    assert balanced(public, np.ones(3), 0.1) is None
