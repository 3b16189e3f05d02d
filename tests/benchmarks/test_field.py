"""`benchmarks/field.py`: the release of second moments, and the table's figures."""

import field
import numpy as np
import pytest


class Cell:
    epsilon = 1.0


def test_no_row_moves_the_moments_by_more_than_the_bound():
    """Noise of a factor off would cover another length, whose square the noise is in units of."""
    rows = np.random.default_rng(0).normal(size=(50, 3))
    far = np.concatenate([rows, [[30.0, -40.0, 0.0]]])
    released = [
        field.gaussian_moments(part, 2.0, Cell(), np.random.default_rng(1)) for part in (rows, far)
    ]
    (before, sd), (after, same) = released
    assert sd == same
    assert np.linalg.norm(after - before) == pytest.approx(2.0**2)


def test_the_noise_is_that_of_an_orthonormal_basis():
    """Over 2,000 draws a standard deviation is within 8 %, five standard errors."""
    generator = np.random.default_rng(0)
    drawn, sds = zip(
        *[field.gaussian_moments(np.zeros((1, 2)), 1.5, Cell(), generator) for _ in range(2000)],
        strict=True,
    )
    found = np.std(drawn, axis=0) / sds[0]
    np.testing.assert_allclose(found, [[1.0, 0.5**0.5], [0.5**0.5, 1.0]], rtol=0.08)


def test_the_quadratic_approximates_the_log_likelihood():
    slope, curvature = field.quadratic()
    s = np.linspace(-3.0, 3.0, 31)
    away = -np.logaddexp(0.0, -s) - slope * s - curvature * s**2
    assert slope == pytest.approx(0.5)
    assert np.ptp(away) < 0.2


def test_the_table_says_what_has_no_intervals():
    point = {"cell": "logistic5-1000-1.0", "method": "a point", "error": [1.0], "crps": [2.0]}
    point["seconds"] = 3.0
    covered = {"covered": [True, False], "width": [1.0, 3.0], "error": [1.0, 1.0]}
    sets = [point, point] + [
        {"cell": "logistic5-1000-1.0", "method": "intervals", "crps": [0.5], **covered}
    ] * 2
    table = field.table(field.summarise(sets))
    assert "| logistic5, 1,000 | a point | none | none | 1.00 | 2.00 | 3.0 |" in table
    assert "| intervals | 0.50 ± 0.00 | 2.00 | 1.00 | 0.50 |" in table
