"""Survey weights with calibrated intervals: what a weighted record can do, and what fits say."""

import contextlib
import functools
from unittest import mock

import numpy as np
import pytest
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated import scored, steps
from tfp_dpvi.optimizers import ScoringOptimizer

tfd = tfp.distributions
MOST = 20.0


def logistic(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


def linear(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["scale"])


def ordinal(params, x):
    return tfd.OrderedLogistic([-1.0, 0.5], tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


def wide(params, x):
    """More coefficients than have a whole matrix."""
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


LIKELIHOODS = {each.__name__: each for each in (logistic, linear, ordinal, wide)}


def prior_of(likelihood):
    parts = {"w": tfd.Sample(tfd.Normal(0.0, 1.0), 60 if likelihood is wide else 2)}
    if likelihood is linear:
        parts["scale"] = tfd.HalfNormal(1.0)
    return tfd.JointDistributionNamed(parts)


def compiled(likelihood, noise=1.0, **settings):
    model = dpvi.DPVI(prior_of(likelihood), likelihood, **settings)
    model.compile(ScoringOptimizer(noise), delta=1e-5, jit_compile=False, accountant="rdp")
    return model


def records(likelihood, num=12, seed=0):
    rng = np.random.default_rng(seed)
    size = 60 if likelihood is wide else 2
    x = rng.normal(size=(num, size)).astype("float32")
    y = (x[:, 0] + rng.logistic(size=num) > 0).astype("float32")
    weights = np.where(y > 0, 1.0, rng.uniform(5.0, MOST, num)).astype("float32")
    return x, y, weights


# ---------------------------------------------------------------------- what a record can do


def replay(name, **settings):
    likelihood = LIKELIHOODS[name]
    x, y, weights = records(likelihood)
    settings = {"max_weight": MOST, "seed": 3, "num_steps": 1, **settings}
    return audit.replay(compiled(likelihood), x, y, weights, **settings)


def adversarial(name):
    """Long and short records under weights of all kinds."""
    kinds = [0.0, 1e-30, 1e-6, 0.3, MOST, 1e3, 1e30, -1.0, np.nan, np.inf]
    rng = np.random.default_rng(1)
    size = records(LIKELIHOODS[name])[0].shape[1]
    lengths = 10.0 ** np.array([-20.0, -2.0, 0.0, 1.0, 5.0, 18.0, 30.0])
    x = np.concatenate([length * rng.normal(size=(len(kinds), size)) for length in lengths])
    y = rng.integers(0, 2, len(x))
    neighbours = {"x": x, "y": y, "sample_weight": np.tile(kinds, len(lengths))}
    with np.errstate(over="ignore"):
        return {key: part.astype("float32") for key, part in neighbours.items()}


@pytest.mark.parametrize("name", ["logistic", "linear", slow("ordinal"), slow("wide")])
def test_neighbours_of_any_weight_move_the_releases_by_no_more_than_is_stated(name):
    result = replay(name, neighbours=adversarial(name), at=(0, 5))
    assert result.holds, result
    assert [each.name for each in result.sums] == [
        "gradient", "curvature", "scale", "lack_of_fit", "variance", "weights", "together",
    ]  # fmt: skip
    assert result.sums[0].presence > 0.99
    assert result.attained > 0.7


def test_an_attack_by_weighted_canaries_stays_within_the_claim():
    """Those it finds move the sums as much as a record can, whatever weight they have."""
    x, y, weights = records(logistic)
    settings = {"max_weight": MOST, "num_runs": 200, "delta": 1e-5, "seed": 3}
    result = audit.lower_bound(compiled(logistic, 1.0), x, y, weights, **settings)
    assert 0.3 < result.epsilon < result.claimed


@contextlib.contextmanager
def weighted_after_the_clip():
    genuine = scored.model_scores

    def faulty(place, rows, mask, key, *, weights=None, **settings):
        scores = genuine(place, rows, mask, key, **settings)
        factor = MOST * weights.weight[:, None] * scores.centred.psi
        return scores._replace(centred=scores.centred._replace(psi=factor))

    with mock.patch.object(scored, "model_scores", faulty):
        yield


@contextlib.contextmanager
def not_cut_to_the_largest_weight():
    def faulty(weight, most):
        return weight / most, tf.fill(tf.shape(weight), True)

    with mock.patch.object(steps, "share_of", faulty):
        yield


@pytest.mark.parametrize("fault", [weighted_after_the_clip, slow(not_cut_to_the_largest_weight)])
def test_a_planted_fault_is_found(fault):
    with fault():
        result = replay("logistic", neighbours=adversarial("logistic"), at=(0,))
    assert not result.holds


def test_a_bad_weight_takes_its_record_out_and_a_large_one_counts_as_the_largest():
    """C8: exactly, in every sum."""
    x, y, weights = records(logistic)
    step = audit.observed.ObservedStep(
        compiled(logistic), x, y, weights, num_steps=None, max_weight=MOST
    )

    def sums(weight, keep=None):
        changed = weights.copy()
        changed[3] = weight
        tensors = {**step.tensors, "sample_weight": tf.constant(changed)}
        return step.all_values(np.array([1, 2]), 1, noise=0.0, keep=keep, tensors=tensors)

    without = sums(1.0, np.arange(len(x)) != 3)
    for bad in (np.nan, np.inf, -1.0):
        np.testing.assert_array_equal(sums(bad), without)
    np.testing.assert_array_equal(sums(MOST), sums(10.0 * MOST))
    assert np.abs(sums(MOST) - sums(1.0)).max() > 0.1


# ---------------------------------------------------------------------- fits


def sample(num=3000, seed=0):
    """Persons with an outcome of 1 are oversampled: inputs, outcomes, weights, census truth."""
    rng = np.random.default_rng(seed)
    x = np.stack([np.ones(8 * num), rng.normal(size=8 * num)], axis=1)
    truth = np.array([-1.0, 0.8])
    y = rng.random(8 * num) < 1.0 / (1.0 + np.exp(-x @ truth))
    weights = np.where(y, 1.5, 15.0)
    chosen = rng.choice(8 * num, num, replace=False, p=1.0 / weights / np.sum(1.0 / weights))
    parts = (x[chosen], y[chosen], weights[chosen])
    return (*(part.astype("float32") for part in parts), truth)


def public():
    rng = np.random.default_rng(5)
    return np.stack([np.ones(400), rng.normal(size=400)], axis=1).astype("float32")


@functools.cache
def fitted(kind, noise=0.0):
    x, y, weights, _ = sample()
    model = compiled(logistic, noise, seed=1)
    settings = {}
    if kind in ("equal", "below"):
        most = 3.0 if kind == "equal" else MOST
        settings = {"sample_weight": np.full(len(x), 3.0), "max_weight": most}
    elif kind == "weighted":
        settings = {"sample_weight": weights, "max_weight": MOST}
    model.fit(x, y, public_inputs=public(), verbose=0, **settings)
    return model


def moments(model):
    summary = model.posterior_summary()
    return summary.columns["mean"], summary.columns["sd"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["equal", "below"])
def test_equal_weights_give_the_posterior_without_weights(kind):
    """Up to what float32 rounds on the way to it."""
    (mean, width), (other_mean, other_width) = (moments(fitted(each)) for each in (kind, "none"))
    np.testing.assert_allclose(width, other_width, rtol=2e-3)
    np.testing.assert_allclose(mean, other_mean, atol=2e-3 * width.min())


def test_equal_weights_below_the_largest_do_not_narrow_intervals():
    """The other way round, than those of maximum likelihood."""
    x = sample()[0]
    mean, width = moments(fitted("below"))
    probability = 1.0 / (1.0 + np.exp(-x @ mean))
    slope = (x * (probability * (1.0 - probability))[:, None]).T @ x
    assert np.all(width > 0.99 * np.sqrt(np.diag(np.linalg.inv(slope))))
    checks = fitted("below").posterior_summary().checks
    assert checks.weight_variation == pytest.approx(0.0, abs=1e-5)
    assert np.isnan(checks.cut)
    assert "all weights are alike" in str(fitted("below").posterior_summary())


def test_a_weighted_fit_is_that_of_the_population():
    """The estimate of weighted maximum likelihood and the sandwich's width; far from that without."""
    x, y, weights, truth = sample()
    theta = np.zeros(2)
    for _ in range(20):
        mean = 1.0 / (1.0 + np.exp(-x @ theta))
        slope = (x * (weights * mean * (1.0 - mean))[:, None]).T @ x
        theta = theta + np.linalg.solve(slope, x.T @ (weights * (y - mean)))
    unweighted = np.zeros(2)
    for _ in range(20):
        chosen = 1.0 / (1.0 + np.exp(-x @ unweighted))
        step = np.linalg.solve((x * (chosen * (1.0 - chosen))[:, None]).T @ x, x.T @ (y - chosen))
        unweighted = unweighted + step
    scores = x * (weights * (y - mean))[:, None]
    sd = np.sqrt(np.diag(np.linalg.inv(slope) @ (scores.T @ scores) @ np.linalg.inv(slope)))
    mean, width = moments(fitted("weighted"))
    np.testing.assert_allclose(mean, theta, atol=0.15 * sd.max())
    np.testing.assert_allclose(width, sd, rtol=0.08)
    assert np.abs(unweighted - truth)[0] > 10.0 * sd[0]
    assert np.all(np.abs(mean - truth) < 5.0 * width)
    checks = fitted("weighted").posterior_summary().checks
    assert checks.weight_variation == pytest.approx(
        np.var(weights) / np.mean(weights) ** 2, rel=0.01
    )
    assert 0.0 <= checks.cut < 0.01
    assert not checks.warnings


@pytest.mark.slow
def test_with_noise_intervals_hold_the_truth_and_the_report_speaks_of_weights():
    model = fitted("weighted", 12.0)
    mean, width = moments(model)
    assert np.all(np.abs(mean - sample()[3]) < 5.0 * width)
    assert np.all(width < 0.5)
    text = " ".join(str(model.privacy_report()).split())
    assert "design effect" in text
    assert "neither the ranks of outcomes nor a wider clip" in text


@pytest.mark.slow
def test_a_weight_of_persons_is_that_of_all_their_rows():
    x, y, weights = records(logistic, 24)
    ids = np.repeat(np.arange(12), 2)
    weights = np.repeat(weights[::2], 2)
    settings = {"unit_ids": ids, "max_rows_per_unit": 2, "max_weight": MOST, "num_steps": 1}
    result = audit.replay(compiled(logistic), x, y, weights, seed=3, **settings)
    assert result.holds, result
    assert result.attained > 0.5


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("weights", "settings", "message"),
    [
        ([1.0] * 12, {}, "max_weight is missing"),
        (None, {"max_weight": 2.0}, "max_weight=2.0 without sample_weight"),
        ([1.0] * 11 + [-1.0], {"max_weight": 2.0}, "negative entries in 1 row"),
        ([1.0] * 11 + [np.inf], {"max_weight": 2.0}, "infinite .* in 1 row"),
        ([1.0] * 10 + [np.nan, np.nan], {"max_weight": 2.0}, "in 2 rows"),
        ([1.0] * 9 + [3.0] * 3, {"max_weight": 2.0}, "above max_weight=2 in 3 rows"),
        ([1.0] * 12, {"max_weight": 0.0}, "max_weight=0.0"),
        ([1.0] * 12, {"max_weight": np.inf}, "max_weight=inf"),
        ([1.0] * 12, {"max_weight": "all"}, "max_weight='all'"),
        ([1.0] * 12, {"max_weight": 1e40}, "max_weight=1e[+]40 is beyond"),
        ([1e-45] * 12, {"max_weight": 1e-45}, "max_weight=1e-45 is beyond"),
        ([0.0] * 12, {"max_weight": 2.0}, "sample_weight is 0 for all records"),
        ([1.0] * 5, {"max_weight": 2.0}, "one weight for each record"),
        (
            [*np.linspace(1.0, 2.0, 12)],
            {"max_weight": 2.0, "unit_ids": np.arange(12) // 2, "max_rows_per_unit": 2},
            "differ between rows of one person",
        ),
    ],
)
def test_a_call_that_is_refused_spends_nothing(weights, settings, message):
    x, y, _ = records(logistic)
    model = compiled(logistic)
    with pytest.raises((ValueError, TypeError), match=message) as error:
        model.fit(x, y, sample_weight=weights, verbose=0, **settings)
    assert len(str(error.value).splitlines()) <= 2
    assert model.num_releases == 0


def test_optimizers_and_datasets_refuse_a_largest_weight():
    x, y, weights = records(logistic)
    model = dpvi.DPVI(prior_of(logistic), logistic)
    model.compile(dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0), epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="compiled without an optimizer"):
        model.fit(x, y, sample_weight=weights, max_weight=MOST, verbose=0)
    data = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(4)
    with pytest.raises(ValueError, match="max_weight with a dataset"):
        compiled(logistic).fit(data, max_weight=MOST, num_records=12, steps_per_epoch=3)
    assert model.num_releases == 0
