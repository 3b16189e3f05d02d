"""Ranks among predicted outcomes: uniform, of mean zero and of the stated variance if the model is right."""

import numpy as np
import pytest
from scipy import stats

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.checking.outcomes import Predictor

NUM = 4000
RATES = np.linspace(0.2, 3.0, NUM).astype("float32")
PRIOR = tfd.Normal(0.0, 1.0)
# The posterior of these tests knows the parameter.
DRAWS = tf.zeros([99])

FAMILIES = {
    "normal": lambda w, x: tfd.Normal(w + x, 0.5 * x),
    "poisson": lambda w, x: tfd.Poisson(x + w),
    "bernoulli": lambda w, x: tfd.Bernoulli(probs=x / 4.0 + w, dtype=tf.float32),
}


def scored(family, y=None, **how):
    model = BayesianModel(PRIOR, FAMILIES[family])
    if y is None:
        y = FAMILIES[family](0.0, tf.constant(RATES)).sample(seed=[3, 4]).numpy()
    predictor = Predictor(model, is_binary=family == "bernoulli")
    return predictor(DRAWS, RATES, y, _random.new_key(how.get("seed", 1))), y


@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_right_model(family):
    """False alarm: 1e-3 for each of three statements."""
    scores, y = scored(family)
    assert scores.usable.all()
    assert stats.kstest(scores.pit, "uniform").pvalue > 1e-3
    z = scores.residual.mean() / (scores.residual.std() / np.sqrt(NUM))
    assert abs(z) < 3.3
    assert scores.variance.mean() / 3.0 == pytest.approx(np.mean(scores.residual**2), rel=0.08)
    exact = FAMILIES[family](0.0, tf.constant(RATES)).log_prob(y).numpy()
    np.testing.assert_allclose(scores.log_score, exact, atol=1e-4)


def test_a_binary_residual_is_the_outcome_less_its_probability():
    scores, y = scored("bernoulli")
    np.testing.assert_allclose(scores.probability, RATES / 4.0, atol=1e-6)
    away = scores.residual - (y - RATES / 4.0)
    assert abs(away).max() < 0.25  # Of 99 draws.
    assert abs(away.mean()) < 0.005


def test_strange_records_count_for_nothing_and_change_no_other():
    """C8: NaN outcomes, and outcomes and inputs far away; the others keep their numbers."""
    before, y = scored("poisson")
    y = y.copy()
    y[[0, 5]] = np.nan, np.inf
    x = RATES.copy()
    x[[7, 8]] = np.nan, 1e30
    predictor = Predictor(BayesianModel(PRIOR, FAMILIES["poisson"]), is_binary=False)
    after = predictor(DRAWS, x, y, _random.new_key(1))
    assert not after.usable[[0, 7, 8]].any()
    others = np.delete(np.arange(NUM), [0, 5, 7, 8])
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(old[others], new[others])
        assert np.isfinite(new[after.usable]).all() or np.isneginf(new).any()


def test_parts_of_many_records_have_their_own_random_numbers(monkeypatch):
    from tfp_dpvi.checking import outcomes

    monkeypatch.setattr(outcomes, "_AT_ONCE", 1500)
    scores, _ = scored("normal", y=np.full(NUM, 1.0, "float32"))
    assert len(scores.pit) == NUM
    assert stats.kstest(scored("normal")[0].pit, "uniform").pvalue > 1e-3
