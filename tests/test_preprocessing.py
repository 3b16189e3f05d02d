"""`PrivateStandardize`: what it releases, at what sensitivity, with what noise, and what the books say (C1, C3, C6, C8).

Statistical checks compare p-values with `statistics.ALPHA` = 1e-9; there are fewer than 30 here, so that a run raises a
false alarm with a probability below 3e-8.
"""

from __future__ import annotations

import json
import math
from unittest import mock

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import statistics

import tfp_dpvi as dpvi
from tfp_dpvi import _random, preprocessing
from tfp_dpvi._tf import keras, tf
from tfp_dpvi.preprocessing import PrivateStandardize, moment_sums
from tfp_dpvi.privacy import BudgetExhaustedError, UnsupportedPairError

LOWER, UPPER = np.array([-1.0, 0.0, 10.0]), np.array([1.0, 5.0, 30.0])
ADD = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE


def records(num=5000, seed=0):
    u = np.random.default_rng(seed).beta([2.0, 1.0, 5.0], [2.0, 3.0, 5.0], size=(num, 3))
    return LOWER + (UPPER - LOWER) * u


def layer(**kwargs):
    return PrivateStandardize(LOWER, UPPER, **kwargs)


# ---------------------------------------------------------------------- what is released


def contribution(record):
    return moment_sums(np.array([record], float), LOWER, UPPER)


def check_replay(sums):
    """C3: on corners, middles, far outside and at random, presence moves the sums by <= sqrt(3), replacement by 2 sqrt(3)."""
    generator = np.random.default_rng(5)
    grid = [
        np.array(c)
        for c in np.stack(
            np.meshgrid(*zip(LOWER, (LOWER + UPPER) / 2, UPPER, strict=True)), -1
        ).reshape(-1, 3)
    ]
    grid += [np.full(3, value) for value in (1e300, -1e300, math.inf, -math.inf, math.nan)]
    grid += list(generator.uniform(LOWER, UPPER, (200, 3))) + list(
        generator.normal(0, 100, (50, 3))
    )
    base = records(50)
    empty = sums(base, LOWER, UPPER)
    moved = np.array([sums(np.vstack([base, record]), LOWER, UPPER) for record in grid]) - empty
    presence = np.linalg.norm(moved, axis=1)
    assert presence.max() <= math.sqrt(3) + 1e-9
    assert presence.max() >= math.sqrt(3) - 1e-9, (
        "the bound is not reached: the noise could be smaller"
    )
    replaced = np.linalg.norm(moved[:, None] - moved[None], axis=-1)
    assert replaced.max() <= 2 * math.sqrt(3) + 1e-9
    assert replaced.max() >= 2 * math.sqrt(3) - 1e-9


def test_neighbours_move_the_sums_by_what_is_stated():
    check_replay(moment_sums)


@settings(max_examples=200)
@given(st.lists(st.floats(allow_nan=True, width=64), min_size=3, max_size=3))
def test_any_record_is_within_the_bound(record):
    assert np.linalg.norm(contribution(record)) <= math.sqrt(3) + 1e-9


def test_the_sums_are_those_of_u_and_its_square_less_one():
    x = records(200)
    u = 2 * (x - LOWER) / (UPPER - LOWER) - 1
    expected = np.concatenate([u.sum(0), (u**2 - 1).sum(0)])
    np.testing.assert_allclose(moment_sums(x, LOWER, UPPER), expected, atol=1e-9)
    with mock.patch.object(preprocessing, "_CHUNK", 7):
        np.testing.assert_allclose(moment_sums(x, LOWER, UPPER), expected, atol=1e-9)


def test_a_record_with_nan_contributes_exactly_zero():
    """C8."""
    for place in range(3):
        bad = LOWER.copy()
        bad[place] = np.nan
        np.testing.assert_array_equal(contribution(bad), np.zeros(6))
    with_bad = np.vstack([records(20), bad])
    np.testing.assert_array_equal(
        moment_sums(with_bad, LOWER, UPPER), moment_sums(records(20), LOWER, UPPER)
    )
    np.testing.assert_array_equal(
        contribution([math.inf, -math.inf, math.inf]), contribution([1, 0, 30])
    )


def adapted(x, multiplier, num=None, **kwargs):
    made = layer(dtype="float64", min_scale=1e-9)
    made.adapt(x, noise_multiplier=multiplier, num_records=num, **kwargs)
    return made


def test_without_noise_they_are_the_exact_statistics():
    x = records()
    made = adapted(x, 0.0)
    np.testing.assert_allclose(made.mean, x.mean(0), rtol=1e-9)
    np.testing.assert_allclose(made.scale, x.std(0), rtol=1e-9)
    standard = made(x).numpy()
    np.testing.assert_allclose(standard.mean(0), 0, atol=1e-9)
    np.testing.assert_allclose(standard.std(0), 1, rtol=1e-9)


def check_released(multiplier=20.0, size=30):
    """The noise is z sqrt(d) over the *public* N in each of the 2 d coordinates, independent, whatever the number of records."""
    public = 100_000
    sums = moment_sums(records(size), LOWER, UPPER)
    noises = []
    for number in range(16):
        key = _random.fold_in(statistics.fresh_key(), number).numpy()
        # One call draws for a wide table, of which this one's columns are a part: the noise is drawn alike for all.
        noises.append(preprocessing.privatize_moments(np.zeros(2 * 4200), multiplier, key))
    noise = np.concatenate(noises)
    statistics.standard_deviation(noise, multiplier, "noise of the moments", within=0.02)
    statistics.standard_normal(noise / multiplier, "noise of the moments")
    statistics.uncorrelated(noise[:-1], noise[1:], "neighbouring coordinates")
    # And through `adapt`: means of a declared N, by hand from the same sums.
    statistic = []
    for _ in range(30):
        made = adapted(records(size), multiplier, num=public)
        u = 2 * (made.mean - LOWER) / (UPPER - LOWER) - 1
        statistic.append((u - sums[:3] / public) * public / (multiplier * math.sqrt(3)))
    statistic = np.array(statistic)
    statistics.plausible(
        2 * min(_chi2(statistic)), "noise of the means over the public number of records"
    )


def _chi2(values):
    import scipy.stats

    squares, num = np.sum(values**2), values.size
    return scipy.stats.chi2.sf(squares, num), scipy.stats.chi2.cdf(squares, num)


def test_noise_is_as_stated():
    check_released()


def test_two_layers_draw_different_noise_and_a_seed_repeats_it():
    """C10."""
    x = records(100)
    tf.random.set_seed(0)
    one = adapted(x, 1.0).mean
    tf.random.set_seed(0)
    assert np.all(one != adapted(x, 1.0).mean)
    np.testing.assert_array_equal(adapted(x, 1.0, seed=3).mean, adapted(x, 1.0, seed=3).mean)


def test_the_scale_is_floored():
    """A constant column, and a noise that hides every variance, give finite scales."""
    x = np.full((1000, 3), 5.0) * [0, 1, 2]
    made = PrivateStandardize(LOWER, UPPER, min_scale=0.05)
    made.adapt(x, noise_multiplier=0.0)
    np.testing.assert_allclose(made.scale, 0.05 * (UPPER - LOWER) / 2, rtol=1e-5)
    for _ in range(5):
        made.adapt(x, noise_multiplier=1e5)
        assert np.all(made.scale > 0)
        assert np.all(made.scale <= (UPPER - LOWER) / 2 * 1.001)
        assert np.all((made.mean >= LOWER) & (made.mean <= UPPER))
        assert np.isfinite(made(x)).all()


# ---------------------------------------------------------------------- the tests are tested


REAL_PRIVATIZE = preprocessing.privatize_moments


def _half_noise(sums, deviation, key):
    return REAL_PRIVATIZE(sums, deviation / 2, key)


def _truncated_to_the_first(sums, deviation, key):
    return np.where(
        np.arange(len(sums)) < len(sums) / 2, REAL_PRIVATIZE(sums, deviation, key), sums
    )


@pytest.mark.parametrize("broken", [_half_noise, _truncated_to_the_first])
def test_wrong_noise_is_caught(broken):
    with (
        mock.patch.object(preprocessing, "privatize_moments", broken),
        pytest.raises(AssertionError, match=r"standard deviation|p = "),
    ):
        check_released()


def test_missing_noise_is_caught():
    def no_noise(sums, deviation, key):
        return sums

    with (
        mock.patch.object(preprocessing, "privatize_moments", no_noise),
        pytest.raises(AssertionError, match="p = "),
    ):
        check_released()


def test_dividing_by_the_true_number_is_caught():
    """C1: `len(x)` is 30 where 100,000 was declared."""

    def by_the_true_number(noisy, deviation, num, min_scale):
        return real(noisy, deviation, 30, min_scale)

    real = preprocessing._statistics
    with (
        mock.patch.object(preprocessing, "_statistics", by_the_true_number),
        pytest.raises(AssertionError, match="p = "),
    ):
        check_released()


def test_sums_without_a_clip_or_a_shift_are_caught():
    def unclipped(x, lower, upper):
        u = (np.nan_to_num(x, posinf=0, neginf=0) - lower) / (upper - lower) * 2 - 1
        return np.concatenate([u.sum(0), (u**2 - 1).sum(0)])

    def unshifted(x, lower, upper):
        sums = moment_sums(x, lower, upper)
        return sums + np.repeat([0, np.sum(~np.isnan(x).any(1))], 3)

    for sums in (unclipped, unshifted):
        with np.errstate(all="ignore"), pytest.raises(AssertionError):
            check_replay(sums)


# ---------------------------------------------------------------------- the books


@pytest.mark.parametrize("relation", [ADD, REPLACE])
def test_it_costs_what_was_asked(relation):
    made = layer()
    made.adapt(records(), epsilon=0.2, delta=1e-6, neighboring_relation=relation)
    assert 0.199 <= made.ledger.epsilon(1e-6) <= 0.2
    (entry,) = made.ledger.entries
    assert entry.steps == 1
    assert entry.plan.l2_norm_clip == math.sqrt(3)
    assert entry.plan.neighboring_relation is relation
    # By hand: one Gaussian of standard deviation z over a shift of A = 1, or D = 2, clips.
    event = dp_accounting.GaussianDpEvent(
        entry.plan.noise_multiplier / (1 if relation is ADD else 2)
    )
    accountant = dp_accounting.pld.PLDAccountant(ADD).compose(event)
    assert accountant.get_epsilon(1e-6) == pytest.approx(0.2, rel=0.01)


def test_it_adds_up_with_a_fit_and_the_report_lists_it():
    tfd = __import__("tensorflow_probability").distributions
    x = records(500)
    made = layer()
    made.adapt(x, epsilon=0.3, delta=1e-5)
    before = made.ledger.epsilon(1e-5)
    model = dpvi.DPVI(
        tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 3)}),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"])),
        clipping="flat",
    )
    model.compile(
        dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0),
        epsilon=1.0,
        delta=1e-5,
        ledger=made.ledger,
    )
    report = model.privacy_report()
    assert report.epsilon == before
    model.fit(made(x).numpy(), (x[:, 0] > 0).astype("int32"), batch_size=500, epochs=3, verbose=0)
    report = model.privacy_report()
    assert before < 0.99 <= report.epsilon <= 1.0
    assert report.num_releases == 4
    text = " ".join(str(report).split())
    purpose = "means and variances of 3 columns clipped to public bounds, for standardising"
    assert f"part 1: {purpose}; full batches" in text
    assert f"{purpose}, which were released with noise and are included." in text
    assert "3 steps; full batches" in text
    assert "statistics computed on the records outside this ledger" in text  # Still true of others.
    saved = json.loads(json.dumps(report.to_json()))
    assert saved["releases"][0]["purpose"] == purpose
    assert "purpose" not in saved["releases"][1]
    assert any(purpose in line for line in saved["covered"])


def test_a_model_without_it_reports_as_before():
    ledger = dpvi.PrivacyLedger()
    ledger.reserve(dpvi.PrivacyPlan(dpvi.privacy.FullBatch(), 5.0, 1), 1)
    report = dpvi.PrivacyReport.from_ledger(ledger, delta=1e-5)
    assert "released with noise and are included" not in str(report)
    assert "purpose" not in ledger.entries[0].plan.to_json()


def test_the_ledger_on_disk_is_ahead_of_the_release(tmp_path):
    """C6: when the noise is drawn, a reader of the file finds the release there."""
    path = tmp_path / "ledger"
    seen = []

    def watching(sums, deviation, key):
        seen.append(dpvi.PrivacyLedger(path, read_only=True).num_releases)
        raise KeyboardInterrupt

    with dpvi.PrivacyLedger(path) as ledger:
        made = layer()
        with (
            mock.patch.object(preprocessing, "privatize_moments", watching),
            pytest.raises(KeyboardInterrupt),
        ):
            made.adapt(records(), epsilon=0.1, delta=1e-6, ledger=ledger)
        assert seen == [1]
        assert ledger.num_releases == 1  # Stays charged.
        assert made.ledger is ledger
        assert not made.is_adapted
        made.adapt(records(), epsilon=0.1, delta=1e-6)
        assert ledger.num_releases == 2
    with dpvi.PrivacyLedger(path) as ledger:
        assert ledger.num_releases == 2
        assert ledger.entries[0].plan.purpose.startswith("means and variances")


def test_a_seed_is_reported_and_two_columns_under_one_seed_cost_twice():
    made, other = layer(), layer()
    made.adapt(records(), noise_multiplier=5.0, seed=1)
    other.adapt(records(seed=1), noise_multiplier=5.0, seed=1, ledger=made.ledger)
    assert made.ledger.num_releases == 2
    assert dpvi.PrivacyReport.from_ledger(made.ledger, delta=1e-5).seeded


# ---------------------------------------------------------------------- refusals spend nothing


@pytest.mark.parametrize(
    ("kwargs", "error", "named"),
    [
        ({}, ValueError, "pass epsilon and delta, or"),
        ({"epsilon": 1.0}, ValueError, "delta"),
        (
            {"epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0},
            ValueError,
            "pass epsilon and delta, or",
        ),
        ({"epsilon": -1.0, "delta": 1e-5}, ValueError, "epsilon"),
        ({"epsilon": 1.0, "delta": 2.0}, ValueError, "delta"),
        ({"noise_multiplier": 1.0, "delta": 1e-5}, ValueError, "pass epsilon and delta, or"),
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": 1.0, "num_records": 0}, ValueError, "num_records"),
        ({"noise_multiplier": 1.0, "accountant": "magic"}, ValueError, "accountant"),
        (
            {"noise_multiplier": 1.0, "neighboring_relation": "cousins"},
            ValueError,
            "neighboring_relation",
        ),
        ({"noise_multiplier": 1.0, "ledger": "books"}, TypeError, "ledger"),
        ({"noise_multiplier": 1.0, "seed": "x"}, TypeError, "seed"),
    ],
)
def test_bad_arguments(kwargs, error, named):
    made = layer()
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(error, match=named):
        made.adapt(records(), **{"ledger": ledger, **kwargs})
    assert ledger.num_releases == 0
    assert not made.is_adapted


@pytest.mark.parametrize(
    ("x", "error", "named"),
    [
        (np.zeros((5, 2)), ValueError, "3 features"),
        (np.zeros(5), ValueError, "features"),
        (np.zeros((0, 3)), ValueError, "both at least 1"),
        (np.array([["a", "b", "c"]]), TypeError, "dtype"),
        (np.ma.zeros((5, 3)), TypeError, "MaskedArray"),
    ],
)
def test_bad_records(x, error, named):
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(error, match=named):
        layer().adapt(x, noise_multiplier=1.0, ledger=ledger)
    assert ledger.num_releases == 0


def test_an_exhausted_or_foreign_ledger_refuses():
    small = dpvi.PrivacyLedger(budget_epsilon=0.1, budget_delta=1e-6)
    with pytest.raises(BudgetExhaustedError):
        layer().adapt(records(), epsilon=0.2, delta=1e-6, ledger=small)
    other = dpvi.PrivacyLedger()
    layer().adapt(records(), noise_multiplier=5.0, ledger=other, neighboring_relation=REPLACE)
    with pytest.raises(UnsupportedPairError):
        layer().adapt(records(), noise_multiplier=5.0, ledger=other, neighboring_relation=ADD)
    layer().adapt(records(), noise_multiplier=5.0, ledger=other)  # The ledger's own by default.
    assert (small.num_releases, other.num_releases) == (0, 2)


@pytest.mark.parametrize(
    ("lower", "upper", "named"),
    [
        (1.0, 1.0, "must be finite, with lower below upper"),
        ([0, 0], [1, 1, 1], "one for each"),
        (0.0, math.inf, "must be finite"),
        (math.nan, 1.0, "must be finite"),
        ("a", 1.0, "must be numbers"),
        ([], [], "must be finite"),
    ],
)
def test_bad_bounds(lower, upper, named):
    with pytest.raises(ValueError, match=named):
        PrivateStandardize(lower, upper)


def test_bad_min_scale():
    with pytest.raises(ValueError, match="min_scale"):
        layer(min_scale=0.0)
    with pytest.raises(ValueError, match="min_scale"):
        layer(min_scale=2.0)


# ---------------------------------------------------------------------- a Keras layer


@pytest.mark.parametrize("jit_compile", [False, True])
def test_clipping(jit_compile):
    clip = PrivateStandardize(LOWER, UPPER)
    clip.build([None, 3])
    clip.set_weights([np.zeros(3), np.ones(3)])
    x = np.array([[-5, 2, 40], [0.5, -1, 20], [math.nan, math.inf, -math.inf]], "float32")
    run = tf.function(lambda x: clip(x), jit_compile=jit_compile)
    np.testing.assert_array_equal(run(x), [[-1, 2, 30], [0.5, 0, 20], [math.nan, 5, 10]])
    with pytest.raises(ValueError, match="3 features"):
        clip(np.zeros((2, 4), "float32"))
    assert PrivateStandardize.from_config(clip.get_config()).upper.tolist() == UPPER.tolist()


def test_before_adapt_it_says_so():
    with pytest.raises(ValueError, match="call adapt"):
        layer()(np.zeros((2, 3)))
    model = keras.Sequential([keras.Input([3]), layer()])
    assert np.isnan(model.predict(records(4), verbose=0)).all()


def test_one_bound_serves_all_features_and_integers_are_welcome():
    made = PrivateStandardize(0, 100)
    x = np.random.default_rng(0).integers(0, 100, (1000, 4))
    made.adapt(x, noise_multiplier=0.0)
    np.testing.assert_allclose(made(x).numpy().std(0), 1, rtol=1e-3)
    with pytest.raises(ValueError, match="4"):
        made.adapt(x[:, :2], noise_multiplier=0.0)
    assert made.ledger.num_releases == 1


@pytest.mark.parametrize("suffix", [".keras", "", ".h5"])
def test_saving_keeps_released_statistics_and_nothing_else(tmp_path, suffix):
    made = layer(name="standard")
    made.adapt(records(), epsilon=0.5, delta=1e-5)
    model = keras.Sequential([keras.Input([3]), made, keras.layers.Dense(1)])
    path = tmp_path / f"model{suffix}"
    if suffix == ".h5":
        model.save_weights(path)
        again = keras.Sequential([keras.Input([3]), layer(name="standard"), keras.layers.Dense(1)])
        again.load_weights(path)
    else:
        model.save(path)
        again = keras.models.load_model(path)
    x = records(20, seed=9)
    np.testing.assert_allclose(again.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
    loaded = again.layers[0]
    assert loaded.is_adapted
    assert loaded.ledger is None
    config = made.get_config()
    assert set(config) == {"name", "trainable", "dtype", "lower", "upper", "min_scale"}
    assert [weight.shape.as_list() for weight in made.weights] == [[3], [3]]
    assert made.trainable_weights == []


def test_data_frames_and_memmaps(tmp_path):
    pandas = pytest.importorskip("pandas")
    x = records(300)
    expected = adapted(x, 0.0).mean
    np.testing.assert_array_equal(
        adapted(pandas.DataFrame(x, columns=list("abc")), 0.0).mean, expected
    )
    on_disk = np.memmap(tmp_path / "x", "float64", "w+", shape=x.shape)
    on_disk[:] = x
    np.testing.assert_array_equal(adapted(on_disk, 0.0).mean, expected)
