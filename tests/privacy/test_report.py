"""The report and the epsilon curve."""

import json
import math
import time

import pytest
from support.stack import needs_poisson_replace_one

from tfp_dpvi.privacy import EpsilonCurve, FullBatch, PoissonSampling, PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.privacy.report import round_up

PLAN = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000, l2_norm_clip=1.5, num_records=10_000)


def _report(ledger=None, **kwargs):
    if ledger is None:
        ledger = PrivacyLedger(dataset_id="survey 2024")
        ledger.confirm(ledger.reserve(PLAN, 1000))
    kwargs.setdefault("delta", 1e-6)
    kwargs.setdefault("num_records", 10_000)
    return PrivacyReport.from_ledger(ledger, **kwargs)


def test_the_text_says_what_an_officer_needs():
    text = str(_report(budget_epsilon=5.0, caveats=("unsafe training metrics were shown",)))
    flat = " ".join(text.split())
    for phrase in (
        "(2.13, 1e-06)-differentially private",
        "Unit of privacy: one record",
        "added or removed",
        "Epsilon spent: 2.13 at delta 1e-06",
        "5 in total, 2.87 left",
        "privacy loss distributions",
        "1,000 noisy sums",
        "Poisson sampling",
        "clipped to length 1.5",
        "every checkpoint",
        "standardise the columns",
        "search for settings",
        "10,000",
        "floating-point",
        "pseudo-random",
        "running time",
        "prior",
        "survey 2024",
        "unsafe training metrics were shown",
    ):
        assert phrase in flat, phrase
    assert "WARNING" not in text
    assert max(map(len, text.splitlines())) <= 100


def test_digits_are_rounded_to_the_safe_side():
    report = _report(budget_epsilon=5.0)
    shown = float(str(report).split("Epsilon spent:")[1].split()[0])
    assert report.epsilon <= shown <= report.epsilon * 1.005 + 0.005
    left = float(str(report).split("in total,")[1].split()[0])
    assert left <= report.budget_left
    assert round_up(1.2300000001) == 1.24
    assert round_up(1.23) == 1.23
    assert round_up(0.0) == 0.0
    assert round_up(math.inf) == math.inf
    assert round_up(99.95) == 100.0


def test_nothing_released():
    report = _report(PrivacyLedger())
    assert report.epsilon == 0.0
    assert "Nothing has been released" in str(report)


def test_no_noise_is_not_private():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(noise_multiplier=0.0), 10)
    report = _report(ledger)
    assert not report.private
    assert "NOT PRIVATE" in str(report)
    assert "differentially private:" not in str(report)
    assert report.to_json()["epsilon"] == "inf"
    json.dumps(report.to_json(), allow_nan=False)


def test_seeded_is_not_private():
    report = _report(seeded=True)
    assert "seeded: not private" in str(report)
    assert not report.private
    ledger = PrivacyLedger()
    ledger.reserve(PLAN, 10, seed=1, first_step=0)
    assert _report(ledger).seeded


def test_warnings():
    assert "tenth of one over their number" in " ".join(str(_report(delta=1e-4)).split())
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(noise_multiplier=0.5), 1000)
    assert any("above 10" in w for w in _report(ledger).warnings)


def test_unconfirmed_steps_are_told():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN, 30)
    assert "30 were reserved and not confirmed" in " ".join(str(_report(ledger)).split())


def test_declared_records():
    assert "declared by hand" in " ".join(str(_report(num_records_declared=True)).split())
    assert "counted from the data" in " ".join(str(_report()).split())
    assert "unknown here" in " ".join(str(_report(num_records=None)).split())


@needs_poisson_replace_one
def test_several_fits_are_listed():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(neighboring_relation="replace_one"), 10)
    ledger.reserve(PrivacyPlan(FullBatch(), 20.0, 1, "replace_one"), 5)
    text = str(_report(ledger))
    assert "part 1" in text
    assert "part 2" in text
    assert "replaced by any other" in " ".join(text.split())


def test_json():
    data = json.loads(json.dumps(_report(budget_epsilon=5.0, caveats=("x",)).to_json(), allow_nan=False))
    assert data["schema_version"] == 1
    assert data["epsilon"] == PLAN.epsilon(1e-6)
    assert data["neighboring_relation"] == "add_or_remove_one"
    assert data["releases"][0]["noise_multiplier"] == 1.0
    assert data["releases"][0]["sampling"] == {"name": "poisson", "probability": 0.01}
    assert data["private"] is True
    assert data["caveats"] == ["x"]
    assert data["budget_left"] == 5.0 - data["epsilon"]
    assert data["covered"]
    assert data["not_covered"]


@pytest.mark.parametrize("bad", [{"delta": 0.0}, {"caveats": "one"}, {"num_records": 0}, {"budget_epsilon": -1.0}])
def test_bad_arguments(bad):
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        _report(**bad)


# --- the curve ---


def test_the_curve_is_quick_to_make_and_to_read():
    plan = PrivacyPlan(PoissonSampling(256 / 48842), 1.0, 100_000)
    epsilon = plan.epsilon(1e-5)
    start = time.process_time()
    curve = EpsilonCurve(plan, (), 1e-5, checkpoints=range(0, 100_001, 191))
    assert time.process_time() - start < 3.0  # under 1 s on an idle machine
    assert curve(100_000) == epsilon
    start = time.process_time()
    for step in range(0, 100_000, 100):
        curve(step)
    assert (time.process_time() - start) / 1000 < 1e-4


def test_checkpoints_are_close_to_exact():
    curve = EpsilonCurve(PLAN, (), 1e-5, checkpoints=[100, 500, 900])
    for step in (100, 500, 900):
        exact = PLAN.replace(num_releases=step).epsilon(1e-5)
        assert exact <= curve(step) <= 1.002 * exact


@pytest.mark.parametrize("accountant", ["pld", "rdp", "advanced_composition"])
@pytest.mark.parametrize("sampling", [PoissonSampling(0.02), FullBatch()])
def test_curves_of_every_accountant(accountant, sampling):
    plan = PrivacyPlan(sampling, 5.0, 50, accountant=accountant)
    curve = EpsilonCurve(plan, (), 1e-5)
    for step in range(1, 51):
        assert curve(step) >= plan.replace(num_releases=step).epsilon(1e-5) * (1 - 1e-7)
    assert curve(0) >= 0.0
    assert curve(50) == plan.epsilon(1e-5)


def test_curves_without_noise_and_without_steps():
    assert EpsilonCurve(PLAN.replace(noise_multiplier=0.0), (), 1e-5)(1) == math.inf
    prior = [PLAN.dp_event]
    empty = EpsilonCurve(PLAN.replace(num_releases=0), prior, 1e-5)
    assert empty(0) == pytest.approx(PLAN.epsilon(1e-5))


def test_steps_beyond_the_plan_are_refused():
    curve = EpsilonCurve(PLAN.replace(num_releases=10), (), 1e-5)
    for step in (-1, 11):
        with pytest.raises(ValueError, match="step"):
            curve(step)
