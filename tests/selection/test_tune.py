"""`dpvi.tune`: charged once, before the first trial, for all of them, and silent about the losers."""

from __future__ import annotations

import logging
import random

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    FullBatch,
    NeighboringRelation,
    PrivacyLedger,
    PrivacyPlan,
    RandomTrials,
)
from tfp_dpvi.selection import tuning as module
from tfp_dpvi.selection.tuning import Tuned, _check_spent, _Trials, num_trials

RANGE = (-4.0, 0.0)
BUDGET = {"epsilon": 3.0, "delta": 1e-5}
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE


def model_of(scale):
    return dpvi.DPVI(
        tfd.Normal(0.0, scale), lambda w, x: tfd.Bernoulli(logits=w * x, dtype=tf.float32)
    )


def records():
    generator = np.random.default_rng(0)
    x = generator.normal(size=2000).astype("float32")
    return x, (generator.random(2000) < 1.0 / (1.0 + np.exp(-2.0 * x))).astype("float32")


class _Model:
    def __init__(self, ledger):
        self.ledger = ledger

    def record_release(self, plan, inputs, num_records, *, declared):
        assert plan.purpose == self.ledger.entries[-1].plan.purpose
        assert not declared
        assert sorted(inputs) == ["x", "y"]
        assert num_records == len(records()[0])


@pytest.fixture(autouse=True)
def _without_a_model(monkeypatch, request):
    """What follows a made-up trial has no fitted model; the slow test has real ones."""
    if "relation" not in request.fixturenames:
        monkeypatch.setattr(module, "_charged_to", lambda ledger, *others: _Model(ledger))


def made_up(scores):
    """Trials in the place of real ones, with a score by the name of the candidate."""

    def run(self, name, number):
        del self, number
        logging.getLogger("tfp_dpvi").warning("the fit of %s says something", name)
        score = scores[name]
        return None if score is None else Tuned(name, None, score, 0.01)

    return run


def tuned(ledger, models=("wide", "narrow"), **changes):
    candidates = {name: model_of(number + 1.0) for number, name in enumerate(models)}
    settings = {"score_range": RANGE, "ledger": ledger, **BUDGET, **changes}
    return dpvi.tune(candidates, *records(), **settings)


def test_it_is_charged_once_within_the_budget_and_says_nothing_of_the_others(monkeypatch, caplog):
    monkeypatch.setattr(_Trials, "run", made_up({"wide": -0.5, "narrow": -0.6}))
    ledger = PrivacyLedger()
    with ledger.reserved(PrivacyPlan(FullBatch(), 10.0, 1)):
        pass
    with caplog.at_level(logging.INFO, logger="tfp_dpvi"):
        chosen = tuned(ledger, mean_trials=20.0)
    assert not caplog.records
    assert ledger.num_releases == 2
    assert 2.9 < ledger.epsilon(1e-5) <= 3.0
    # With 20 trials on average, that neither is "wide" has a probability below 1/10.
    assert chosen.name in ("wide", "narrow")
    assert chosen.model.ledger is ledger
    assert ledger.entries[-1].plan.sampling.name == "random_trials"


@pytest.mark.slow
def test_the_largest_score_is_chosen_and_failed_trials_never_are(monkeypatch):
    monkeypatch.setattr(_Trials, "run", made_up({"wide": -0.5, "narrow": None}))
    names = {tuned(PrivacyLedger(), mean_trials=50.0, seed=seed).name for seed in range(1, 4)}
    assert names == {"wide"}
    monkeypatch.setattr(_Trials, "run", made_up({"wide": None, "narrow": None}))
    ledger = PrivacyLedger()
    with pytest.raises(RuntimeError, match="every trial failed"):
        tuned(ledger)
    assert ledger.num_releases == 1


def test_an_interrupted_choice_stays_charged(monkeypatch):
    def interrupted(self, name, number):
        raise KeyboardInterrupt

    monkeypatch.setattr(_Trials, "run", interrupted)
    ledger = PrivacyLedger()
    with pytest.raises(KeyboardInterrupt):
        tuned(ledger)
    assert ledger.num_releases == ledger.unconfirmed_steps == 1


def test_the_number_of_trials_is_geometric():
    generator = random.Random(1)
    counts = np.bincount([num_trials(5.0, generator) for _ in range(20_000)], minlength=4)
    expected = 20_000 * 0.2 * 0.8 ** np.arange(3)
    assert counts[0] == 0
    # Binomial counts, beyond six standard deviations: 2e-9 each.
    assert (np.abs(counts[1:4] - expected) < 6.0 * np.sqrt(expected)).all()


def test_a_fit_that_releases_more_than_its_part_is_found():
    """Planted: noise of .9 of what was charged for, and a release without any."""
    ledger = PrivacyLedger()
    with ledger.reserved(PrivacyPlan(FullBatch(), 10.0, 4)):
        pass
    _check_spent(ledger, 5.0, ADD)
    with pytest.raises(AssertionError, match="not what was charged for"):
        _check_spent(ledger, 5.0 / 0.9, ADD)
    with ledger.reserved(PrivacyPlan(FullBatch(), 0.0, 1)):
        pass
    with pytest.raises(AssertionError, match="not what was charged for"):
        _check_spent(ledger, 5.0, ADD)


def test_fit_and_score_compose_to_the_trial_that_is_priced():
    plan = PrivacyPlan(RandomTrials(3.0), 7.0, 1, accountant="rdp")
    trials = _Trials({}, (None, None), plan, RANGE, 1e-5, None, None, None)
    precision = trials.fit_multiplier**-2 + trials.score_multiplier**-2
    assert precision == pytest.approx(7.0**-2)


def test_what_does_not_fit_is_refused_and_free():
    fixed = PrivacyLedger(budget_epsilon=50.0, budget_delta=1e-5)
    with pytest.raises(ValueError, match="budget is for settings that were fixed in advance"):
        tuned(fixed)
    assert fixed.num_releases == 0
    compiled = model_of(1.0)
    compiled.compile(**BUDGET)
    settings = {"score_range": RANGE, **BUDGET}
    with pytest.raises(ValueError, match="is compiled or fitted"):
        dpvi.tune({"a": compiled}, *records(), **settings)
    ledger = PrivacyLedger()
    for changes in ({"score_range": (1.0, 0.0)}, {"mean_trials": 0.5}, {"epsilon": -1.0}):
        with pytest.raises(ValueError, match="must"):
            tuned(ledger, **changes)
    assert ledger.num_releases == 0


@pytest.mark.slow
@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_real_trials_give_a_model_whose_report_is_of_the_tuning(relation):
    ledger = PrivacyLedger(budget_epsilon=4.0, budget_delta=1e-5, budget_adaptive=True)
    public = np.random.default_rng(1).normal(size=500).astype("float32")
    chosen = tuned(
        ledger,
        mean_trials=2.0,
        public_inputs=public,
        neighboring_relation=relation,
        seed=5,
    )
    assert ledger.num_releases == 1
    report = chosen.model.privacy_report()
    assert report.epsilon == pytest.approx(ledger.epsilon(1e-5))
    assert "random number of trials" in " ".join(str(report).split())
    mean = chosen.model.posterior_summary().columns["mean"][0]
    assert 1.0 < mean < 3.0
    assert chosen.model.posterior_summary().checks is not None
    # Nothing is left for another fit.
    with pytest.raises(BudgetExhaustedError):
        chosen.model.fit(*records(), public_inputs=public, verbose=0)
    assert -1.0 < chosen.score < 0.0
