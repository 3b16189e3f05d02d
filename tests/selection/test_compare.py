"""`dpvi.compare`: its contributions are bounded, its figures right, and what it refuses is free."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.selection.comparison import _comparison
from tfp_dpvi.selection.scores import clip_of, contributions, log_scores

RANGE = (-4.0, 0.0)
DELTA = 1e-5


# ---------------------------------------------------------------------- the sum


def extreme_scores(num_models):
    values = (-1e30, -5.0, -4.0, -2.0, -0.1, 0.0, 7.0, np.inf, -np.inf, np.nan)
    return np.array(list(itertools.product(values, repeat=num_models)))


def moves_more(rows, num_models, factor=1.0):
    """Whether neighbours' sums differ by more than is stated, with some factor on the bound."""
    bound = factor * clip_of(num_models) * (1.0 + 1e-12)
    apart = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    return bool(np.linalg.norm(rows, axis=1).max() > bound or apart.max() > 2.0 * bound)


@pytest.mark.parametrize("num_models", [1, 2, 3])
@pytest.mark.parametrize("largest", [4.0, 0.3])
def test_replay_on_neighbours_no_record_moves_the_sum_by_more_than_is_stated(num_models, largest):
    rows = contributions(extreme_scores(num_models), RANGE, largest)
    assert np.isfinite(rows).all()
    assert not moves_more(rows, num_models)


def test_planted_factors_are_found():
    scores = extreme_scores(3)
    # The clip of one model for three.
    assert moves_more(contributions(scores, RANGE, 0.3), 3, factor=1.0 / math.sqrt(3.0))
    # Differences that are not clipped, and squares without the centre.
    loose = contributions(scores, RANGE, 0.3)
    loose[:, 1:3] *= 1.5
    assert moves_more(loose, 3)
    off_centre = contributions(scores, RANGE, 0.3)
    off_centre[:, 3:] += 1.0
    assert moves_more(off_centre, 3)


def test_a_record_that_is_not_finite_counts_for_nothing():
    scores = np.array([[-1.0, -2.0], [np.nan, -1.0]])
    rows = contributions(scores, RANGE, 4.0)
    assert rows[1].tolist() == [0.0, 0.0, 0.0]
    assert rows[0].tolist() == [0.5, -0.25, 0.0625 - 1.0]


def test_the_figures_are_those_of_the_scores_without_noise():
    generator = np.random.default_rng(0)
    scores = -np.abs(generator.normal(1.0, 0.3, [5000, 1])) + generator.normal(0.0, 0.2, [5000, 2])
    scores = np.clip(scores, *RANGE)
    rows = contributions(scores, RANGE, 4.0)
    found = _comparison(("a", "b"), rows.sum(axis=0), 1e-9, 5000, RANGE, 4.0)
    np.testing.assert_allclose(found.score, scores.mean(axis=0), rtol=1e-9)
    d = scores[:, 1] - scores[:, 0]
    assert found.difference[1] == pytest.approx(d.mean())
    assert found.sampling_sd[1] == pytest.approx(d.std() / math.sqrt(5000), rel=1e-6)


# ---------------------------------------------------------------------- the call


def fitted(scale, ledger, seed):
    x, y = records()
    model = dpvi.DPVI(
        tfd.Normal(0.0, scale),
        lambda w, x: tfd.Bernoulli(logits=w * x, dtype=tf.float32),
        clipping="flat",
        seed=seed,
    )
    model.compile("sgd", l2_norm_clip=1.0, noise_multiplier=20.0, delta=DELTA, ledger=ledger)
    model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    return model


def records():
    generator = np.random.default_rng(0)
    x = generator.normal(size=2000).astype("float32")
    return x, (generator.random(2000) < 1.0 / (1.0 + np.exp(-2.0 * x))).astype("float32")


@pytest.fixture(scope="module")
def models():
    """A model that starts near the truth is not needed: wide and narrow surrogates differ."""
    ledger = PrivacyLedger()
    return {"wide": fitted(3.0, ledger, 1), "narrow": fitted(0.01, ledger, 2)}


def test_it_releases_scores_with_their_noise_and_charges_the_ledger_once(models):
    x, y = records()
    ledger = models["wide"].privacy_ledger
    before = ledger.num_releases
    result = dpvi.compare(models, x, y, score_range=RANGE, epsilon=2.0, delta=DELTA, seed=3)
    exact = np.clip(log_scores([*models.values()], x, y), *RANGE)
    # Six standard deviations of the noise: 2e-9.
    assert abs(result.score[0] - exact[:, 0].mean()) < 6.0 * result.noise_sd[0]
    away = result.difference[1] - (exact[:, 1] - exact[:, 0]).mean()
    assert abs(away) < 6.0 * result.noise_sd[1]
    assert ledger.num_releases == before + 1
    entry = ledger.entries[-1]
    assert entry.plan.epsilon(DELTA) == pytest.approx(2.0, rel=3e-3)
    assert entry.plan.purpose == "mean log scores of 2 models"
    assert entry.seeded
    assert "Mean log scores of 2,000 records" in str(result)
    assert result.table().loc["narrow", "difference"] == result.difference[1]


def test_what_does_not_fit_is_refused_and_free(models):
    x, y = records()
    ledger = models["wide"].privacy_ledger
    before = ledger.num_releases
    fixed = PrivacyLedger(budget_epsilon=50.0, budget_delta=DELTA)
    budgeted = {"a": fitted(1.0, fixed, 1)}
    budgeted["b"] = budgeted["a"]
    new = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    settings = {"score_range": RANGE, "epsilon": 1.0, "delta": DELTA}
    cases = [
        ({"a": models["wide"]}, {}, "at least two fitted models"),
        ({**models, "new": new}, {}, "is not fitted"),
        ({**models, "other": fitted(1.0, PrivacyLedger(), 4)}, {}, "different ledgers"),
        (budgeted, {}, "budget is for settings that were fixed in advance"),
        (models, {"score_range": (0.0, 0.0)}, "must increase and be finite"),
        (models, {"score_range": 3.0}, "must be two numbers"),
        (models, {"largest_difference": 0.0}, "largest_difference=0.0 must be greater"),
        (models, {"epsilon": 0.0}, "epsilon=0.0 must be greater"),
    ]
    for given, changes, message in cases:
        with pytest.raises(ValueError, match=message) as raised:
            dpvi.compare(given, x, y, **{**settings, **changes})
        assert len(str(raised.value).splitlines()) <= 2
    assert ledger.num_releases == before
