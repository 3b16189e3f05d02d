"""The report and the epsilon curve."""

import dataclasses
import itertools
import json
import math
import re
import time

import dp_accounting
import pytest
from dp_accounting import NeighboringRelation, pld, rdp
from scipy import optimize, special
from support.joint import GaussianPart, JointGaussian
from support.stack import PRICES_POISSON_REPLACE_ONE, needs_poisson_replace_one

from tfp_dpvi.privacy import (
    EachRecordOncePerEpoch,
    EpsilonCurve,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyLedger,
    PrivacyPlan,
    PrivacyReport,
    Sensitivity,
    termwise_noise,
)
from tfp_dpvi.privacy.report import down, up

PLAN = PrivacyPlan(PoissonSampling(0.01), 1.0, 1000, l2_norm_clip=1.5, num_records=10_000)


def _report(ledger=None, **kwargs):
    if ledger is None:
        ledger = PrivacyLedger(dataset_id="survey 2024")
        ledger.confirm(ledger.reserve(PLAN, 1000))
    kwargs.setdefault("delta", 1e-6)
    kwargs.setdefault("num_records", 10_000)
    return PrivacyReport.from_ledger(ledger, **kwargs)


def flat(report):
    return " ".join(str(report).split())


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
    assert [up(value, 3) for value in (1.2300000001, 1.23, 0.0, 99.95, math.inf)] == [
        "1.24",
        "1.23",
        "0",
        "100",
        "inf",
    ]
    assert [down(value, 3) for value in (1.2399, 1.24, 0.0, 99.95)] == ["1.23", "1.24", "0", "99.9"]


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
    ledger.reserve(PLAN, 10, seeded=True)
    assert _report(ledger).seeded


def test_warnings():
    assert "tenth of one over their number" in " ".join(str(_report(delta=1e-4)).split())
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(noise_multiplier=0.5), 1000)
    assert any("too large to protect" in w for w in _report(ledger).warnings)


def test_unconfirmed_steps_are_told():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN, 30)
    assert "30 were reserved but not confirmed" in " ".join(str(_report(ledger)).split())


def test_the_schema_is_said_where_there_is_one():
    report = dataclasses.replace(_report(), schema="age: 17 to 90 years\nsex: binary")
    title = "Taken to be public, whatever the records say:"
    assert title not in str(_report())
    assert f"{title}\n  * age: 17 to 90 years.\n  * sex: binary." in str(report)
    assert report.to_json()["schema"] == report.schema
    assert _report().to_json()["schema"] is None


def test_declared_records():
    assert "10,000: it is assumed to be public and was declared" in flat(
        _report(num_records_declared=True)
    )
    assert "counted from the data" in flat(_report(num_records_declared=False))
    assert "counted from" not in flat(_report())  # What cannot be known is not said.
    assert _report().to_json()["num_records_declared"] is None


def test_add_or_remove_one_does_not_cover_attributes():
    """By group privacy a replacement costs (2 epsilon, (1 + exp(epsilon)) delta); replace_one covers it."""
    added, replaced = (
        PrivacyReport.from_ledger(PrivacyLedger(), delta=1e-6, neighboring_relation=relation)
        for relation in ("add_or_remove_one", "replace_one")
    )
    assert "single attributes" in flat(added)
    assert "(2 epsilon, (1 + exp(epsilon)) delta)" in flat(added)
    assert "single attributes" not in flat(replaced)
    assert all(replaced.to_json()["not_covered"])


def test_the_number_of_records_is_in_the_plans():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN, 10)
    ledger.reserve(PLAN.replace(num_records=12_000), 10)
    report = _report(ledger, num_records=None, delta=9e-6)
    assert report.num_records == 12_000
    assert any("large for 12000 records" in warning for warning in report.warnings)
    assert _report(ledger, num_records=9).num_records == 9
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(num_records=None), 10)
    assert "unknown here" in flat(_report(ledger, num_records=None))


def test_the_ledger_s_own_budget_is_in_the_report():
    ledger = PrivacyLedger(budget_epsilon=4.0, budget_delta=1e-7)
    ledger.reserve(PLAN, 100)
    report = _report(ledger, budget_epsilon=2.0)
    spent = PLAN.replace(num_releases=100).epsilon(1e-7)
    assert report.to_json()["ledger_budget"] == {
        "epsilon": 4.0,
        "delta": 1e-7,
        "adaptive": False,
        "spent": spent,
    }
    left = float(
        re.search(
            r"Ledger's budget: 4 at delta 1e-07 for all fits and models, (\S+) left", flat(report)
        )[1]
    )
    assert 0.99 * (4.0 - spent) <= left <= 4.0 - spent
    assert "Budget: 2 in total" in flat(report)
    assert "Ledger's budget" not in flat(_report())


def test_choosing_later_settings_by_earlier_results_is_not_covered():
    assert "settings of a later fit" in flat(_report())
    assert any("2.04e-5" in item for item in _report().to_json()["not_covered"])


# --- an auditor with the text alone ---


def _events(text):
    """The events that a report prints, read by a parser that knows dp_accounting alone."""
    found = []
    for label in re.finditer(r"Event(?:, part \d+)?: ", text):
        rest = text[label.end() :]
        depth = list(itertools.accumulate({"(": 1, ")": -1}.get(sign, 0) for sign in rest))
        end = next(place for place in range(1, len(rest)) if depth[place] == 0 < depth[place - 1])
        names = {
            name: getattr(dp_accounting, name)
            for name in dir(dp_accounting)
            if name.endswith("DpEvent")
        }
        found.append(eval(rest[: end + 1], {"__builtins__": {}}, names))
    return found


def _recomputed(text):
    """Epsilon, mu and advantage from the text of a report, without this package."""
    delta = float(re.search(r"Epsilon spent: \S+ at delta (\S+)", text)[1])
    relation = NeighboringRelation[
        re.search(r"Adjacency: (.*?) Epsilon", text)[1].upper().replace(" ", "_")
    ]
    accounting = re.search(r"Accounting: (.*?) Releases", text)[1]
    events = _events(text)
    if "advanced composition" in accounting:
        (event,) = events
        q = getattr(event.event, "sampling_probability", 1.0)
        z = getattr(event.event, "event", event.event).noise_multiplier
        inner, last = 0.8 * delta / (q * event.count), 0.2 * delta
        one = math.log1p(q * math.expm1(math.sqrt(2 * math.log(1.25 / inner)) / z))
        return math.sqrt(
            2 * event.count * math.log(1 / last)
        ) * one + event.count * one * math.expm1(one)
    if "RdpAccountant" in accounting:
        accountant = rdp.RdpAccountant(neighboring_relation=relation)
    else:
        assert "PLDAccountant" in accounting
        grid = re.search(r"on a grid of (\S+),", accounting)
        accountant = pld.PLDAccountant(relation, 1e-4 if grid is None else float(grid[1]))
    for event in events:
        accountant.compose(event)
    epsilon = accountant.get_epsilon(delta)
    epsilons = [epsilon * part / 15 for part in range(16)]
    deltas = [accountant.get_delta(part) for part in epsilons]
    advantage = min(
        (math.expm1(part) + 2 * least) / (math.exp(part) + 1)
        for part, least in zip(epsilons, deltas, strict=True)
    )
    if "delta at epsilon 0" in text:
        assert advantage == pytest.approx(deltas[0], rel=1e-9)
    mus = [
        optimize.brentq(lambda mu: _gaussian_delta(part, mu) - least, 1e-9, 50.0)  # noqa: B023
        for part, least in zip(epsilons, deltas, strict=True)
    ]
    # A curve of Renyi divergences is loose at small epsilons; its advantage bounds mu there too.
    smallest = max(mus[-1], 2 * special.ndtri(0.5 + 0.5 * advantage))
    return epsilon, advantage, (smallest if "Rdp" in accounting else max(mus), max(mus))


def _gaussian_delta(epsilon, mu):
    lower = special.ndtr(-epsilon / mu - mu / 2)
    return special.ndtr(-epsilon / mu + mu / 2) - math.exp(epsilon) * lower


def _termwise(scheme):
    noise = termwise_noise(
        scheme,
        l2_norm_clip=1.0,
        batch_l2_norm_clip=0.05,
        expected_batch_size=100.0,
        num_partitions=20,
        num_encoder=300,
        num_rest=700,
    )
    return noise.sensitivity


def _with_metrics(plan):
    joint = JointGaussian(
        (
            GaussianPart("gradient", 1.0, plan.sensitivity),
            GaussianPart("elbo", 3.0, Sensitivity(1.0, 2.0)),
        )
    )
    sensitivity = Sensitivity(
        1.0 / joint.noise_multiplier, joint.sensitivity.replace / joint.noise_multiplier
    )
    return plan.replace(sensitivity=sensitivity, metrics=("elbo",))


ADD, REPLACE = "add_or_remove_one", "replace_one"
POISSON = PoissonSampling(256 / 48842)
PRICED = {
    "poisson": [PrivacyPlan(POISSON, 1.41234567, 3820, l2_norm_clip=1.0)],
    "little noise, coarse grid": [PrivacyPlan(PoissonSampling(0.01), 0.7, 100)],
    "poisson, rdp": [PrivacyPlan(POISSON, 1.41234567, 3820, accountant="rdp")],
    "full batch": [PrivacyPlan(FullBatch(), 31.4159265, 200, l2_norm_clip=0.5)],
    "full batch, rdp, replace": [
        PrivacyPlan(FullBatch(), 31.4159265, 200, REPLACE, accountant="rdp")
    ],
    "fixed size": [
        PrivacyPlan(FixedSizeSampling(5000, 100), 5.4321, 400, REPLACE, accountant="rdp")
    ],
    "once per epoch, rdp": [
        PrivacyPlan(EachRecordOncePerEpoch(20), 11.1, 95, REPLACE, accountant="rdp")
    ],
    "term-wise, single draw": [
        PrivacyPlan(POISSON, 9.0, 3820, sensitivity=_termwise("single"), l2_norm_clip=1.0)
    ],
    "term-wise, blocks": [
        PrivacyPlan(POISSON, 9.0, 3820, sensitivity=_termwise("blocks"), l2_norm_clip=1.0)
    ],
    "metrics": [_with_metrics(PrivacyPlan(POISSON, 1.5, 1000))],
    "term-wise and metrics": [
        _with_metrics(PrivacyPlan(POISSON, 9.0, 1000, sensitivity=_termwise("blocks")))
    ],
    "two plans": [
        PrivacyPlan(POISSON, 1.5, 500),
        PrivacyPlan(FullBatch(), 40.0, 30, purpose="means of 3 columns"),
    ],
}
IN_2C = (
    {  # dp_accounting 0.4.3's PLDAccountant has no replace-one, or another convention for it.
        "poisson, replace": [PrivacyPlan(POISSON, 1.41234567, 3820, REPLACE)],
        "full batch, replace": [PrivacyPlan(FullBatch(), 31.4159265, 200, REPLACE)],
        "once per epoch": [PrivacyPlan(EachRecordOncePerEpoch(20), 11.1, 95, REPLACE)],
        "term-wise, blocks, replace": [
            PrivacyPlan(POISSON, 9.0, 3820, REPLACE, _termwise("blocks"))
        ],
        "term-wise, full batch, replace": [
            PrivacyPlan(FullBatch(), 90.0, 40, REPLACE, _termwise("blocks"))
        ],
        "two plans, replace": [
            PrivacyPlan(POISSON, 1.5, 500, REPLACE),
            PrivacyPlan(EachRecordOncePerEpoch(20), 30.0, 95, REPLACE),
        ],
    }
    if PRICES_POISSON_REPLACE_ONE
    else {}
)


SLOW = (
    "fixed size",
)  # dp_accounting takes ten seconds; its figures are compared in test_reference.py too.


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in (*PRICED, *IN_2C)]
)
def test_the_figures_can_be_recomputed_from_the_text(name):
    """Every kind of plan: sampling, noise, sensitivity, number of releases, accountant and grid are all in it."""
    ledger = PrivacyLedger()
    for number, plan in enumerate((PRICED | IN_2C)[name]):
        ledger.reserve(plan, plan.num_releases, run=f"{number}")
    report = PrivacyReport.from_ledger(ledger, delta=1e-5)
    again, advantage, mus = _recomputed(flat(report))
    assert again == pytest.approx(report.epsilon, rel=1e-3)
    assert advantage == pytest.approx(report.advantage, rel=2e-3)
    assert 0.999 * mus[0] <= report.mu <= 1.003 * mus[1]
    for figure, said in (("mu", r"Gaussian DP: mu (\S+):"), ("advantage", r"Advantage: (\S+)")):
        value = getattr(report, figure)
        assert value <= float(re.search(said, flat(report))[1]) <= 1.011 * value
    right = float(re.search(r"right at most (\S+) times in 100", flat(report))[1])
    assert 50 * (1 + report.advantage) <= right <= 50 * (1 + report.advantage) + 0.1
    shown = float(re.search(r"Epsilon spent: (\S+)", flat(report))[1])
    assert report.epsilon <= shown <= 1.011 * again
    assert [run["dp_event"] for run in report.to_json()["releases"]] == [
        text.strip()
        for text in re.findall(
            r"Event(?:, part \d+)?: (.*?)(?= How, part| Covered by| Metrics:)", flat(report)
        )
    ]
    assert max(map(len, str(report).splitlines())) <= 100


def test_words_of_a_term_wise_release_say_how_far_one_record_moves_it():
    """From "9 times that bound" alone one computes 0.301 where 0.337 is claimed."""
    plan = PrivacyPlan(POISSON, 9.0, 3820, sensitivity=Sensitivity(1.1, 2.15), l2_norm_clip=1.0)
    ledger = PrivacyLedger()
    ledger.reserve(plan, 3820)
    text = flat(PrivacyReport.from_ledger(ledger, delta=1e-5))
    assert (
        "one record's presence moves what is released by up to 1.1 times that bound, its replacement by up to 2.15"
        in text
    )
    assert "times each part's scale" not in flat(_report())


def test_the_accountant_is_by_default_that_of_the_plans():
    ledger = PrivacyLedger()
    ledger.reserve(
        PrivacyPlan(FixedSizeSampling(5000, 100), 5.0, 400, REPLACE, accountant="rdp"), 400
    )
    assert PrivacyReport.from_ledger(ledger, delta=1e-5).accountant == "rdp"
    assert PrivacyReport.from_ledger(PrivacyLedger(), delta=1e-5).accountant == "pld"


def test_the_advantage_is_of_the_whole_ledger():
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(num_releases=500), 500, run="first")
    ledger.reserve(PLAN.replace(num_releases=500), 500, run="second")
    whole = PLAN.attack_bound(1e-6)
    assert _report(ledger).advantage == pytest.approx(whole.advantage, rel=1e-6)
    assert _report(ledger).mu == pytest.approx(whole.mu, rel=1e-6)


def test_plain_words_are_about_presence_or_about_a_value():
    assert "but whether your record is in these data" in flat(_report())
    ledger = PrivacyLedger()
    ledger.reserve(PrivacyPlan(FullBatch(), 20.0, 1, "replace_one"), 1)
    report = _report(ledger)
    assert "but which of two records is yours" in flat(report)
    assert report.to_json()["plain_words"] == report.plain_words
    assert report.plain_words.rstrip(".") in flat(report)


def test_plain_words_are_left_out_where_they_would_be_false():
    shown = "NOT PRIVATE: exact losses were shown"
    for report in (_report(seeded=True), _report(caveats=(shown,))):
        assert report.to_json()["plain_words"] is None
        assert "times in 100" not in str(report)
    ledger = PrivacyLedger()
    ledger.reserve(PLAN.replace(noise_multiplier=0.0), 10)
    assert _report(ledger).to_json()["mu"] == "inf"
    assert "Advantage" not in str(_report(ledger))
    assert "right at most 50 times in 100" in flat(_report(PrivacyLedger()))


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
    data = json.loads(
        json.dumps(_report(budget_epsilon=5.0, caveats=("x",)).to_json(), allow_nan=False)
    )
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


@pytest.mark.parametrize(
    "bad", [{"delta": 0.0}, {"caveats": "one"}, {"num_records": 0}, {"budget_epsilon": -1.0}]
)
def test_bad_arguments(bad):
    with pytest.raises((TypeError, ValueError), match=next(iter(bad))):
        _report(**bad)


# --- the curve ---


def test_the_curve_is_quick_to_make_and_to_read():
    plan = PrivacyPlan(PoissonSampling(256 / 48842), 1.0, 100_000)
    epsilon = plan.epsilon(1e-5)
    start = time.process_time()
    curve = EpsilonCurve(plan, (), 1e-5, checkpoints=range(0, 100_001, 191))
    found = [curve(step) for step in curve.steps]
    assert found == sorted(found)
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


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("sampling", [PoissonSampling(0.02), FullBatch()])
def test_curves_of_every_accountant(accountant, sampling):
    plan = PrivacyPlan(sampling, 5.0, 50, accountant=accountant)
    curve = EpsilonCurve(plan, (), 1e-5)
    for step in (*range(1, 50, 6), 50):
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
