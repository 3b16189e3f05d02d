"""Many coefficients: the diagonal of the curvature, and what shows that correlations are wrong."""

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi
from tests.support import scoring as fits
from tfp_dpvi import audit
from tfp_dpvi.calibrated import diagonal
from tfp_dpvi.calibrated.diagonal import CentredDiagonal, cap, probes, releases_of, squares_of
from tfp_dpvi.gradients import Clip
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.optimizers import ScoringOptimizer

tfd = tfp.distributions

SIZE = 60


def adversarial(generator, size):
    """Rows with outer products of trace at most 1: along axes, along probes, and anywhere."""
    rows = np.concatenate(
        [
            np.eye(size)[:5],
            probes(size)[:5],
            generator.normal(size=(200, size)),
            generator.standard_cauchy(size=(200, size)),
        ]
    )
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[:, None].astype("float32")


@pytest.mark.parametrize("size", [51, 200])
def test_no_record_and_no_replacement_exceeds_what_is_stated(size):
    """Contracts 3 and 8. A record along an axis, or along a probe, reaches the bound."""
    squares = squares_of(tf.constant(adversarial(np.random.default_rng(0), size)), 1.0).numpy()
    stated = CentredDiagonal(size, Clip(1.0)).sensitivity
    norms = np.linalg.norm(squares, axis=1)
    assert np.max(norms) <= stated.add_or_remove * (1.0 + 1e-6)
    assert np.max(norms) > 0.999 * stated.add_or_remove
    assert np.min(squares) >= 0.0
    away = np.linalg.norm(squares[:, None] - squares, axis=2)
    assert np.max(away) <= stated.replace * (1.0 + 1e-6)
    assert np.max(away) > 0.99 * stated.replace


def test_without_the_cap_a_record_would_pass_the_bound():
    """The mutation that the test above finds."""
    rows = adversarial(np.random.default_rng(0), SIZE)[:, 0]
    squares = np.concatenate([rows, rows @ probes(SIZE).T], axis=1) ** 2
    assert np.max(np.linalg.norm(squares, axis=1)) > 2.0 * cap(SIZE)


def test_sums_are_those_of_the_records():
    generator = np.random.default_rng(1)
    rows = (generator.normal(size=(7, 2, SIZE)) / np.sqrt(2.0 * SIZE)).astype("float32")
    release = releases_of(SIZE, Clip(2.0))[0]
    extra = {"rows": tf.constant(rows)}
    each = PerExample(tf.zeros([7]), tf.zeros([7], tf.bool), tf.ones([7], tf.bool), extra=extra)
    both = np.concatenate([rows, rows @ probes(SIZE).T], axis=2)
    # At a clip of 2 nothing is cut.
    np.testing.assert_allclose(
        release.sum_of(each), np.sum(both.astype("float64") ** 2, axis=(0, 1)), rtol=1e-5
    )
    assert release.shape == (SIZE + diagonal.NUM_PROBES,)
    assert len(releases_of(diagonal.MOST_DENSE, Clip(1.0))[0].shape) == 2


def test_probes_are_public_and_orthonormal():
    directions = probes(SIZE)
    np.testing.assert_allclose(directions @ directions.T, np.eye(len(directions)), atol=1e-12)
    np.testing.assert_array_equal(directions, probes.__wrapped__(SIZE))


def test_mismatch_is_the_spread_of_eigenvalues_and_rarely_a_false_alarm():
    """At most 1 % of false alarms: more than 24 in 1,000 have a probability of 4e-5."""
    generator = np.random.default_rng(2)
    size, variances = 200, np.full(diagonal.NUM_PROBES, 4.0)
    expected = np.full(diagonal.NUM_PROBES, 100.0)
    alarms = [
        diagonal.mismatch(expected + 2.0 * generator.normal(size=len(expected)), expected, variances, size) > 0.0
        for _ in range(1000)
    ]  # fmt: skip
    assert np.sum(alarms) <= 24
    values = np.exp(0.7 * generator.normal(size=size))
    matrix = np.diag(100.0 * values / values.mean())
    turn = np.linalg.qr(generator.normal(size=(size, size)))[0]
    along = probes(size) @ turn
    released = np.einsum("pi,ij,pj->p", along, matrix, along)
    # 32 squares estimate a mean square within a factor of two, at six standard deviations.
    measured = diagonal.mismatch(released, expected, variances, size)
    assert measured == pytest.approx(np.std(values) / np.mean(values), rel=0.6)


# ---------------------------------------------------------------------- through a model


def columns(generator, num, correlation):
    """Columns of variance 1, of which neighbours have a correlation."""
    x = generator.normal(size=(num, SIZE - 1))
    for place in range(1, SIZE - 1):
        x[:, place] *= np.sqrt(1.0 - correlation**2)
        x[:, place] += correlation * x[:, place - 1]
    return x.astype("float32")


def model():
    prior = {"b": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 0.3), SIZE - 1)}

    def likelihood(params, x):
        logits = params["b"] + tf.linalg.matvec(x, params["w"])
        return tfd.Bernoulli(logits=logits, dtype=tf.float32)

    return tfd.JointDistributionNamed(prior), likelihood


def test_neighbours_move_all_releases_by_no_more_than_is_stated():
    """Contracts 3 and 8, through the step."""
    private = dpvi.DPVI(*model())
    private.compile(ScoringOptimizer(1.0), delta=1e-5, jit_compile=False, accountant="rdp")
    generator = np.random.default_rng(3)
    x = columns(generator, 30, 0.0)
    y = generator.integers(2, size=30).astype("float32")
    far = np.concatenate([1e4 * np.eye(SIZE - 1)[:3], generator.standard_cauchy((20, SIZE - 1))])
    neighbours = {"x": far.astype("float32"), "y": generator.integers(2, size=23).astype("float32")}
    result = audit.replay(private, x, y, neighbours=neighbours, at=(0,), seed=4, num_steps=1)
    assert result.holds, result
    assert result.sums[1].name == "curvature"
    assert result.sums[1].presence > 0.99 * result.sums[1].stated


@pytest.mark.slow
def test_right_correlations_cover_and_wrong_ones_are_said():
    """If errors are normal, fewer than 46 of 60 intervals of 90 % cover in one of 1,000 runs."""
    generator = np.random.default_rng(5)
    num = 6000
    weights = np.concatenate([[0.5], 0.3 * generator.normal(size=SIZE - 1)])
    x = columns(generator, num, 0.8)
    logits = weights[0] + x @ weights[1:]
    y = (generator.random(num) < 1.0 / (1.0 + np.exp(-logits))).astype("float32")
    fit = fits.Fits(*model(), x, y, columns(generator, 1000, 0.8), epsilon=3.0)
    posterior = fit.posterior(fit.run(x, y, seed=1))
    low, high = fits.intervals(posterior)
    assert np.sum((low <= weights) & (weights <= high)) >= 46
    assert posterior.checks.warnings == []
    # They say something: the prior's standard deviation is .3.
    assert np.median((high - low)[1:]) < 0.75 * 2.0 * 1.645 * 0.3
    fit.scoring.likelihood.set_inputs(columns(generator, 1000, 0.0))
    wrong = fit.posterior(fit.run(x, y, seed=1))
    assert any("correlations" in sentence for sentence in wrong.checks.warnings)


def test_too_few_public_inputs_are_refused_before_anything_is_spent():
    private = dpvi.DPVI(*model())
    private.compile(epsilon=1.0, delta=1e-5)
    x = columns(np.random.default_rng(6), 100, 0.0)
    with pytest.raises(ValueError, match=r"public_inputs: 100 rows .* pass at least 240"):
        private.fit(x, np.zeros(100, "float32"), public_inputs=x)
    assert private.privacy_ledger.num_releases == 0
