"""The paired clip: its sums against NumPy, its mean at the truth, its releases on neighbours."""

import functools

import numpy as np
import pytest
import scipy.stats
from support import statistics
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated.clip import NUM_BLOCKS, curvature_releases, paired
from tfp_dpvi.gradients import Clip, Released, joint_sensitivity
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.privacy import Sensitivity

tfd = tfp.distributions
THETA, CLIP = np.array([0.5, -0.2]), 0.8


def line(record, theta):
    """Half the squared error of a line through the origin, for the record and its twin."""
    mean = tf.reduce_sum(record["x"] * theta)
    return tf.square(record["y"] - mean) / 2, tf.square(record["simulated"] - mean) / 2


@functools.cache
def compiled(clip):
    """Compiled: records with their twins, mask -> gradient, matrix and scale."""

    def simulate(records, key):
        del key
        return records["twin"], records["can_be_used"]

    step = paired(line, simulate, tf.constant(THETA), Clip(clip))

    @tf.function(autograph=False)
    def run(records, mask):
        clipped, each = step.clipped_sum(records, mask, tf.zeros([2], tf.int64))
        return clipped.tensors[0], *(one.sum_of(each) for one in curvature_releases(2, Clip(clip)))

    return run


def sums_of(x, y, twins, mask, clip=CLIP, can_be_used=None):
    records = {"x": tf.constant(x), "y": tf.constant(y), "twin": tf.constant(twins)}
    everyone = np.ones(len(mask), bool)
    records["can_be_used"] = tf.constant(everyone if can_be_used is None else can_be_used)
    gradient, matrix, away = compiled(clip)(records, tf.constant(mask))
    return gradient.numpy(), [matrix.numpy(), away.numpy()]


def pairs(num=6, seed=0):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(num, 2)), generator.normal(size=num), generator.normal(size=num)


def by_hand(x, y, twins, clip=CLIP):
    delta = -(y - twins)[:, None] * x  # The gradient of half a square is minus the score.
    norms = np.linalg.norm(delta, axis=1)
    psi = delta * np.minimum(1.0, clip / norms)[:, None]
    away = np.minimum(np.sum(psi * delta, axis=1), 3 * clip**2)
    return psi, psi.T @ psi / 2, away.sum() / 2


@pytest.mark.parametrize("clip", [0.3, 0.8, 100.0])
def test_sums_are_those_of_numpy(clip):
    x, y, twins = pairs()
    gradient, (matrix, away) = sums_of(x, y, twins, np.ones(6, bool), clip)
    psi, expected, total = by_hand(x, y, twins, clip)
    np.testing.assert_allclose(gradient, psi.sum(axis=0), rtol=1e-9)
    np.testing.assert_allclose(matrix, expected, rtol=1e-9)
    np.testing.assert_allclose(away, total, rtol=1e-9)


@pytest.mark.parametrize("bad", ["record", "twin", "mask", "unusable"])
def test_a_bad_record_a_bad_twin_and_padding_count_for_nothing(bad):
    x, y, twins = pairs()
    mask = np.ones(6, bool)
    {"record": y, "twin": twins}.get(bad, np.zeros(6))[2] = np.nan
    mask[2] = bad != "mask"
    others = np.arange(6) != 2
    can_be_used = others if bad == "unusable" else None
    found, (matrix, away) = sums_of(x, y, twins, mask, can_be_used=can_be_used)
    psi, expected, total = by_hand(x[others], y[others], twins[others])
    np.testing.assert_allclose(found, psi.sum(axis=0), rtol=1e-9)
    np.testing.assert_allclose(matrix, expected, rtol=1e-9)
    np.testing.assert_allclose(away, total, rtol=1e-9)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_neighbours_move_all_releases_by_no_more_than_is_stated(scale):
    """C3: each release by its own A and D; all together, over their noise, by the joint ones."""
    clip = Clip(CLIP)
    releases = curvature_releases(2, clip)
    joint = joint_sensitivity(releases, Sensitivity())
    for seed in range(10):
        x, y, twins = pairs(seed=seed)
        x[0], x[1] = scale * x[0], scale * x[1]
        mask = np.arange(6) != 0
        full, without = sums_of(x, y, twins, np.ones(6, bool)), sums_of(x, y, twins, mask)
        x2, y2, twins2 = x.copy(), y.copy(), twins.copy()
        x2[0], y2[0], twins2[0] = [-x[0][1], x[0][0]], -y[0], -twins[0]
        replaced = sums_of(x2, y2, twins2, np.ones(6, bool))
        for other, attribute, own in ((without, "add_or_remove", 1.0), (replaced, "replace", 2.0)):
            moved = [np.linalg.norm(full[0] - other[0]) / (own * CLIP)]
            distances = [np.linalg.norm(full[0] - other[0]) / CLIP]
            for one, a, b in zip(releases, full[1], other[1], strict=True):
                moved.append(np.linalg.norm(a - b) / getattr(one.sensitivity, attribute))
                distances.append(
                    np.linalg.norm(a - b) / (one.noise_ratio * one.sensitivity.add_or_remove)
                )
            assert max(moved) <= 1 + 1e-9
            assert np.linalg.norm(distances) <= getattr(joint, attribute) * (1 + 1e-9)


def test_the_statements_are_reached_and_not_merely_bounds():
    """A long record has |psi| = C, |psi psi'| / 2 = C^2 / 2 and 1.5 C^2: the bounds are met."""
    x, y, twins = np.array([[1e3, 0.0]]), np.array([1e3]), np.array([0.0])
    gradient, (matrix, away) = sums_of(x, y, twins, np.ones(1, bool))
    assert np.linalg.norm(gradient) == pytest.approx(CLIP)
    assert np.linalg.norm(matrix) == pytest.approx(CLIP**2 / 2)
    assert away == pytest.approx(1.5 * CLIP**2)
    a, b = curvature_releases(2, Clip(CLIP))
    assert (a.sensitivity.add_or_remove, b.sensitivity.add_or_remove) == (
        CLIP**2 / 2,
        1.5 * CLIP**2,
    )
    assert a.sensitivity.replace == pytest.approx(CLIP**2 / np.sqrt(2))
    assert curvature_releases(1, Clip(CLIP))[0].sensitivity.replace == CLIP**2 / 2


def test_shares_of_the_budget():
    """The curvature takes 10 % and the scale 2 % of 1 / z^2.

    The joint multiplier is the gradient's times sqrt(0.88).
    """
    joint = joint_sensitivity(curvature_releases(7, Clip(2.0)), Sensitivity())
    assert 1 / joint.add_or_remove == pytest.approx(np.sqrt(0.88))


def test_blocks_hold_symmetric_averages_of_what_is_released():
    matrix_release, scale_release = curvature_releases(2, Clip(CLIP))
    totals, scales = matrix_release.initial(), scale_release.initial()
    noisy = np.array([[1.0, 2.0], [4.0, 3.0]])
    for step in range(2 * NUM_BLOCKS):
        number, planned = tf.constant(step, tf.int64), tf.constant(2 * NUM_BLOCKS, tf.int64)
        common = {"gradient": [tf.constant([1.0, step])], "step": number, "num_steps": planned}
        common["data_independent_loss"], common["public"] = tf.zeros([]), tf.constant([0.5, -0.5])
        totals = matrix_release.accumulate(totals, Released(mean=tf.constant(noisy), **common))
        scales = scale_release.accumulate(scales, Released(mean=tf.constant(2.0), **common))
    np.testing.assert_array_equal(totals["steps"], 2.0)
    np.testing.assert_allclose(totals["matrix"][3], [[2.0, 6.0], [6.0, 6.0]])
    np.testing.assert_allclose(totals["gradient"][3], [2.0, 6 + 7])
    np.testing.assert_allclose(totals["theta"][3], [1.0, -1.0])
    np.testing.assert_array_equal(scales, 4.0)


# ---------------------------------------------------------------------- at the truth

NUM = 30_000


def at_truth(kind, seed):
    """A model whose surrogate is a point at the truth, and records that it generates."""
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(NUM, 2)).astype("float32")
    w = np.array([0.8, -0.5], "float32")
    if kind == "logistic":
        prior, truth = (
            tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)}),
            {"w": w},
        )

        def likelihood(params, x):
            return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)

    elif kind == "scale":
        prior = tfd.JointDistributionNamed(
            {"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2), "s": tfd.HalfNormal(2.0)}
        )
        truth = {"w": w, "s": np.float32(0.7)}

        def likelihood(params, x):
            return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"])

    else:
        prior, truth = (
            tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)}),
            {"w": w},
        )

        def likelihood(params, x):
            return tfd.Poisson(log_rate=-0.5 + tf.linalg.matvec(x, params["w"]))

    truth = {name: tf.constant(part) for name, part in truth.items()}
    y = likelihood(truth, tf.constant(x)).sample(
        seed=tf.constant(generator.integers(2**31, size=2), tf.int32)
    )

    def surrogate(prior):
        return dpvi.surrogates.mean_field(prior, initial_loc=truth, initial_scale=1e-6)

    return prior, likelihood, surrogate, x, y.numpy().astype("float32")


def score_of_mean(kind, clipping, clip, mutate=None, seed=0):
    """The chi-squared p-value of the clipped sum against mean zero, at the truth."""
    prior, likelihood, surrogate, x, y = at_truth(kind, seed)
    model = dpvi.DPVI(prior, likelihood, surrogate, clipping=clipping)
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(0.0, l2_norm_clip=clip, noise_multiplier=0.0)
    model.compile(optimizer, jit_compile=False)
    mechanism = model.mechanism(model.make_data(x, y, batch_size=NUM))
    records = {"x": tf.constant(x), "y": tf.constant(y)}

    @tf.function(autograph=False)
    def run(key):
        step = mechanism.gradient.draw(key)
        clipped_sum_of = step.clipped_sum if mutate is None else mutate(step, Clip(clip))
        clipped, each = clipped_sum_of(records, tf.ones([NUM], tf.bool), key)
        return clipped.tensors, each.gradients

    total, each = run(statistics.fresh_key())
    total = np.concatenate([np.ravel(part) for part in total]).astype(float)
    rows = np.concatenate([np.reshape(part, [NUM, -1]) for part in each], axis=1).astype(float)
    statistic = total @ np.linalg.solve(rows.T @ rows, total)
    return scipy.stats.chi2.sf(statistic, len(total))


CLIPS = {"logistic": 0.3, "scale": 1.0, "poisson": 0.5}


@pytest.mark.parametrize(
    ("kind", "times"),
    [
        pytest.param("logistic", 1.0, marks=pytest.mark.smoke),
        ("scale", 1.0),
        ("poisson", 5.0),
        slow("logistic", 5.0),
        slow("scale", 5.0),
        slow("poisson", 1.0),
    ],
)
def test_the_sum_has_mean_zero_at_the_truth(kind, times):
    """Six p-values against 1e-9: false alarms below 1e-8."""
    statistics.plausible(
        score_of_mean(kind, "paired", times * CLIPS[kind]), "mean of the paired clip"
    )


@pytest.mark.parametrize("kind", ["scale", "poisson"])
def test_the_flat_clip_has_not(kind):
    assert score_of_mean(kind, "flat", CLIPS[kind]) < statistics.ALPHA


def test_a_clip_after_averaging_several_twins_is_caught():
    """Scores are skewed, and so is their difference from a mean of others: one twin a record."""

    def mutate(step, clip):
        theta = step.public

        def mean_of(records):
            return tf.exp(-0.5 + tf.linalg.matvec(records["x"], theta))

        def several(records, key):
            draws = tf.random.stateless_poisson(
                [8, NUM], tf.cast(key, tf.int32), mean_of(records), tf.float32
            )
            return tf.reduce_mean(draws, axis=0), tf.ones([NUM], tf.bool)

        def losses(record, theta):
            log_rate = -0.5 + tf.reduce_sum(record["x"] * theta)
            return tf.exp(log_rate) - record["y"] * log_rate, tf.exp(log_rate) - record[
                "simulated"
            ] * log_rate

        return paired(losses, several, theta, clip).clipped_sum

    assert score_of_mean("poisson", "paired", 0.5, mutate) < statistics.ALPHA


@pytest.mark.parametrize(
    "release", curvature_releases(2, Clip(1.0)), ids=lambda release: release.name
)
def test_an_engine_that_forms_no_gradients_is_refused(release):
    unformed = PerExample(tf.zeros(3), tf.zeros(3, tf.bool), tf.ones(3, tf.bool))
    with pytest.raises(ValueError, match=f"{release.name} needs each record's gradient"):
        release.sum_of(unformed)
