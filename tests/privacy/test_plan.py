"""PrivacyPlan: events, prices, conventions, calibration, JSON, and refusals."""

import json
import math
import time

import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from support.gaussian_oracle import delta_of, gaussian_epsilon
from support.stack import (
    POISSON_RELATIONS,
    PRICED_POISSON_RELATIONS,
    PRICES_POISSON_REPLACE_ONE,
    needs_poisson_replace_one,
)

from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    EachRecordOncePerEpoch,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyPlan,
    Sensitivity,
    UnsupportedPairError,
    calibration,
    get_accountant,
)
from tfp_dpvi.privacy.budgets import EpsilonBudget

RELATIONS = ["add_or_remove_one", "replace_one"]
POISSON = PoissonSampling(0.01)


def test_events():
    plan = PrivacyPlan(POISSON, 1.5, 10)
    single = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.5))
    assert plan.event_of(1) == single
    assert plan.dp_event == dp_accounting.SelfComposedDpEvent(single, 10)
    full = plan.replace(sampling=FullBatch())
    assert full.dp_event == dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(1.5), 10
    )
    assert isinstance(plan.event_of(0), dp_accounting.NoOpDpEvent)
    fixed = PrivacyPlan(FixedSizeSampling(100, 7), 1.5, 3, "replace_one", accountant="rdp")
    assert fixed.event_of(1) == dp_accounting.SampledWithoutReplacementDpEvent(
        100, 7, dp_accounting.GaussianDpEvent(1.5)
    )


def test_nested_events_are_counted():
    single = dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(1.5))
    nested = dp_accounting.SelfComposedDpEvent(
        dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(single, 5), single]), 7
    )
    for name in ("pld", "rdp"):
        price = get_accountant(name).epsilon(nested, 1e-5, NeighboringRelation.ADD_OR_REMOVE_ONE)
        assert price == PrivacyPlan(POISSON, 1.5, 42, accountant=name).epsilon(1e-5)


@pytest.mark.parametrize(
    "event",
    [
        dp_accounting.LaplaceDpEvent(1.0),
        dp_accounting.UnsupportedDpEvent(),
        dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0)),
        dp_accounting.PoissonSampledDpEvent(
            0.1, dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(3.0)])
        ),
    ],
)
def test_events_that_cannot_be_priced_are_refused(event):
    for name in ("pld", "rdp"):
        with pytest.raises(UnsupportedPairError, match=r"priced"):
            get_accountant(name).epsilon(event, 1e-5, NeighboringRelation.ADD_OR_REMOVE_ONE)


@needs_poisson_replace_one
def test_swapping_the_sampler_changes_event_and_price():
    """The event is the scheme's (C4): batches dealt once per epoch reported as Poisson would look far too cheap."""
    schemes = [POISSON, FullBatch(), EachRecordOncePerEpoch(100), PoissonSampling(0.011)]
    plans = [PrivacyPlan(s, 2.0, 1000, "replace_one") for s in schemes]
    assert len({p.dp_event for p in plans}) == 4
    poisson, full, dealt, _ = (p.epsilon(1e-5) for p in plans)
    assert 10 * poisson < dealt < full
    assert dealt == PrivacyPlan(FullBatch(), 2.0, 10, "replace_one").epsilon(1e-5)


@pytest.mark.parametrize("z", [0.7, 2.0, 4.0, 30.0])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_the_multiplier_is_over_the_clip_under_every_adjacency(z, accountant):
    """One Gaussian release in closed form: sensitivity C for presence, 2 C for a replacement (the design's trap)."""
    for relation, distance in zip(RELATIONS, (1.0, 2.0), strict=True):
        exact = gaussian_epsilon(1e-5, distance / z)
        # Poisson sampling at probability 1 takes every record: (q = 1) N(A) against N(-A) is 2 A apart.
        for sampling in (FullBatch(), PoissonSampling(1.0)):
            found = PrivacyPlan(sampling, z, 1, relation, accountant=accountant).epsilon(1e-5)
            if accountant == "pld":
                assert found == pytest.approx(exact, rel=1e-9)
            else:
                assert exact <= found <= 1.25 * exact


def test_the_design_s_trap_in_figures():
    """z = 4, delta 1e-5: 1.993 (z over C), where other conventions say 0.926 or 1.013."""
    assert PrivacyPlan(FullBatch(), 4.0, 1, "replace_one").epsilon(1e-5) == pytest.approx(
        1.993, abs=5e-4
    )
    assert PrivacyPlan(FullBatch(), 4.0, 1).epsilon(1e-5) == pytest.approx(0.926, abs=5e-4)
    rdp = PrivacyPlan(FullBatch(), 4.0, 1, "replace_one", accountant="rdp").epsilon(1e-5)
    assert 1.993 < rdp < 2.3


def test_the_right_sensitivity_prices_each_pair():
    """Term-wise clipping has D < 2 A: full batches pay D, Poisson pays A on both sides, never D / 2 (C3)."""
    uneven = Sensitivity(add_or_remove=3.0, replace=4.0)
    add = PrivacyPlan(FullBatch(), 6.0, 5, sensitivity=uneven)
    assert add.epsilon(1e-5) == PrivacyPlan(FullBatch(), 2.0, 5).epsilon(1e-5)
    replace = add.replace(neighboring_relation="replace_one")
    assert replace.epsilon(1e-5) == pytest.approx(
        gaussian_epsilon(1e-5, 4.0 / 6.0 * math.sqrt(5)), rel=1e-9
    )
    for name in PRICED_POISSON_RELATIONS:
        poisson = PrivacyPlan(PoissonSampling(0.1), 6.0, 5, name, sensitivity=uneven)
        assert poisson.epsilon(1e-5) == PrivacyPlan(PoissonSampling(0.1), 2.0, 5, name).epsilon(
            1e-5
        )
        assert poisson.epsilon(1e-5) > PrivacyPlan(PoissonSampling(0.1), 3.0, 5, name).epsilon(1e-5)
    fixed = PrivacyPlan(FixedSizeSampling(100, 5), 6.0, 5, "replace_one", uneven, "rdp")
    assert fixed.epsilon(1e-5) == PrivacyPlan(
        FixedSizeSampling(100, 5), 3.0, 5, "replace_one", accountant="rdp"
    ).epsilon(1e-5)


def test_replacing_costs_more_than_removing_and_less_than_the_group_bound():
    for sampling in (POISSON, FullBatch()) if PRICES_POISSON_REPLACE_ONE else (FullBatch(),):
        add = PrivacyPlan(sampling, 3.0, 100)
        replace = add.replace(neighboring_relation="replace_one")
        half, delta = 0.5 * replace.epsilon(1e-5), 1e-5
        assert replace.epsilon(delta) > add.epsilon(delta)
        # (eps/2, d) for presence gives (eps, (1 + e^{eps/2}) d) for replacement, so the tight figure is below.
        assert (1 + math.exp(half)) * delta_of(add, half) >= delta * (1 - 1e-9)


def test_no_noise_is_infinite_not_an_error():
    for relation in RELATIONS:
        for sampling in (POISSON, FullBatch()):
            for accountant in ("pld", "rdp"):
                priced = accountant == "pld" and PRICES_POISSON_REPLACE_ONE
                if sampling is POISSON and relation == "replace_one" and not priced:
                    continue
                plan = PrivacyPlan(sampling, 0.0, 10, relation, accountant=accountant)
                assert plan.epsilon(1e-5) == math.inf
                assert plan.replace(num_releases=0).epsilon(1e-5) == 0.0


@pytest.mark.parametrize("relation", POISSON_RELATIONS)
@pytest.mark.parametrize(
    ("epsilon", "probability", "releases"),
    [
        (1.0, 256 / 39073, 3000),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                (0.1, 0.01, 2000),
                (1.0, 0.01, 100_000),
                (1.0, 1e-4, 100_000),
                (1.0, 0.001, 10),
            ]
        ),
        (8.0, 0.05, 100_000),
        (0.25, 0.3, 50),
        (3.0, 0.02, 1),
    ],
)
def test_calibration_is_conservative_and_close(relation, epsilon, probability, releases):
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=1e-5,
        sampling=PoissonSampling(probability),
        num_releases=releases,
        neighboring_relation=relation,
    )
    assert 0.99 * epsilon <= plan.epsilon(1e-5) <= epsilon
    less = plan.replace(noise_multiplier=plan.noise_multiplier * 0.99)
    assert less.epsilon(1e-5) > epsilon * 0.998


@pytest.mark.parametrize("sampling", [POISSON, FullBatch(), EachRecordOncePerEpoch(50)])
def test_calibration_by_rdp(sampling):
    relation = (
        "replace_one" if isinstance(sampling, EachRecordOncePerEpoch) else "add_or_remove_one"
    )
    plan = PrivacyPlan.calibrate(
        epsilon=2.0,
        delta=1e-5,
        sampling=sampling,
        num_releases=200,
        accountant="rdp",
        neighboring_relation=relation,
    )
    assert 0.99 * 2.0 <= plan.epsilon(1e-5) <= 2.0


def test_calibration_of_fixed_size_batches():
    plan = PrivacyPlan.calibrate(
        epsilon=1.0,
        delta=1e-5,
        sampling=FixedSizeSampling(10_000, 100),
        num_releases=500,
        neighboring_relation="replace_one",
        accountant="rdp",
    )
    assert 0.99 <= plan.epsilon(1e-5) <= 1.0


@pytest.mark.parametrize("relation", POISSON_RELATIONS)
def test_calibration_after_prior_events(relation):
    prior = [
        PrivacyPlan(PoissonSampling(0.02), 1.5, 100, relation).dp_event,
        PrivacyPlan(FullBatch(), 40.0, 3, relation).dp_event,
    ]
    plan = PrivacyPlan.calibrate(
        epsilon=2.0,
        delta=1e-5,
        sampling=POISSON,
        num_releases=500,
        neighboring_relation=relation,
        prior_events=prior,
    )
    assert 1.98 <= plan.epsilon(1e-5, prior) <= 2.0
    assert plan.epsilon(1e-5) < 2.0
    with pytest.raises(BudgetExhaustedError, match=r"used up.*spent no privacy"):
        PrivacyPlan.calibrate(
            epsilon=0.2,
            delta=1e-5,
            sampling=POISSON,
            num_releases=1,
            neighboring_relation=relation,
            prior_events=prior,
        )


def test_a_nearly_spent_budget_still_uses_what_is_left():
    prior = [PrivacyPlan(POISSON, 1.0, 1000).dp_event]
    spent = PrivacyPlan(POISSON, 1.0, 1000).epsilon(1e-5)
    target = spent * 1.002
    plan = PrivacyPlan.calibrate(
        epsilon=target, delta=1e-5, sampling=POISSON, num_releases=10, prior_events=prior
    )
    total = plan.epsilon(1e-5, prior)
    assert spent < total <= target
    assert plan.replace(noise_multiplier=plan.noise_multiplier * 0.98).epsilon(1e-5, prior) > target


def test_calibration_is_fast():
    """Under 1 s on 2 cores for T up to 1e5; the bound here leaves room for a busy machine."""
    start = time.process_time()
    PrivacyPlan.calibrate(
        epsilon=1.0, delta=1e-5, sampling=PoissonSampling(256 / 48842), num_releases=100_000
    )
    assert time.process_time() - start < 3.0


@pytest.mark.parametrize("accountant", [pytest.param("pld", marks=pytest.mark.slow), "rdp"])
def test_calibration_of_the_number_of_releases(accountant):
    budget, plan = EpsilonBudget(3.0, 1e-5), PrivacyPlan(POISSON, 4.0, 10**5, accountant=accountant)
    most = budget.most_releases(plan, [])
    assert most > 10
    assert plan.replace(num_releases=most).epsilon(1e-5) <= 3.0
    assert plan.replace(num_releases=most + 1).epsilon(1e-5) > 3.0
    prior = [PrivacyPlan(FullBatch(), 10.0, 1).dp_event]
    assert 0 < budget.most_releases(plan, prior) < most
    assert budget.most_releases(plan.replace(num_releases=7), []) == 7
    assert EpsilonBudget(1e-9, 1e-9).most_releases(plan, []) == 0


def test_largest_count_needs_few_evaluations():
    calls = []

    def epsilon_of(n):
        calls.append(n)
        return 0.01 * math.sqrt(n)

    assert calibration.largest_count(epsilon_of, 1.0, 10**7) == 10_000
    assert len(calls) < 40
    assert calibration.largest_count(lambda n: 0.0, 1.0, 10**7) == 10**7
    assert calibration.largest_count(lambda n: 2.0, 1.0, 10**7) == 0


def test_json_round_trip_in_full():
    plan = PrivacyPlan(
        FixedSizeSampling(1000, 10),
        1.25,
        7,
        "replace_one",
        Sensitivity(2.0, 3.0),
        "rdp",
        l2_norm_clip=0.5,
        num_records=1000,
    )
    assert PrivacyPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    older = {
        **plan.to_json(),
        "metrics": ["elbo"],
        "gradient_sensitivity": {"add_or_remove": 1.0, "replace": 2.0},
    }
    assert PrivacyPlan.from_json(older) == plan.replace(metrics=("elbo",))
    newer = {**plan.to_json(), "schema_version": 99}
    with pytest.raises(ValueError, match="schema_version"):
        PrivacyPlan.from_json(newer)
    unknown = plan.to_json()
    unknown["sampling"]["name"] = "telepathy"
    with pytest.raises(ValueError, match="telepathy"):
        PrivacyPlan.from_json(unknown)


def test_relations_by_name_and_numpy_numbers():
    plan = PrivacyPlan(FullBatch(), np.float32(2.0), np.int64(5), "replace_one")
    assert plan.neighboring_relation is NeighboringRelation.REPLACE_ONE
    assert type(plan.noise_multiplier) is float
    assert type(plan.num_releases) is int
    json.dumps(plan.to_json())


UNSUPPORTED = [
    (
        FixedSizeSampling(10, 2),
        "add_or_remove_one",
        "rdp",
        "is not supported under add_or_remove_one; use replace_one",
    ),
    (
        FixedSizeSampling(10, 2),
        "add_or_remove_one",
        "pld",
        "is not supported under add_or_remove_one; use replace_one",
    ),
    (
        FixedSizeSampling(10, 2),
        "replace_one",
        "pld",
        "accountant='pld' does not support fixed-size .*='rdp'",
    ),
    (
        EachRecordOncePerEpoch(10),
        "add_or_remove_one",
        "pld",
        "each_record_once_per_epoch.* use replace_one",
    ),
    (POISSON, "replace_one", "rdp", "'rdp' does not support Poisson"),
]


@pytest.mark.parametrize(("sampling", "relation", "accountant", "message"), UNSUPPORTED)
def test_unsupported_pairs_say_what_to_do(sampling, relation, accountant, message):
    with pytest.raises(UnsupportedPairError, match=message) as caught:
        PrivacyPlan(sampling, 1.0, 1, relation, accountant=accountant)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value)) < 240


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": "poisson"}, "sampling"),
        ({"noise_multiplier": -1.0}, "noise_multiplier"),
        ({"noise_multiplier": float("nan")}, "noise_multiplier"),
        ({"noise_multiplier": math.inf}, "noise_multiplier"),
        ({"noise_multiplier": "1"}, "noise_multiplier"),
        ({"noise_multiplier": True}, "noise_multiplier"),
        ({"noise_multiplier": np.bool_(True)}, "noise_multiplier"),
        ({"num_releases": 1.5}, "num_releases"),
        ({"num_releases": -1}, "num_releases"),
        ({"num_releases": True}, "num_releases"),
        ({"neighboring_relation": "both"}, "neighboring_relation"),
        ({"neighboring_relation": NeighboringRelation.REPLACE_SPECIAL}, "neighboring_relation"),
        ({"neighboring_relation": 1}, "neighboring_relation"),
        ({"sensitivity": 1.0}, "sensitivity"),
        ({"accountant": "magic"}, "accountant"),
        ({"l2_norm_clip": 0.0}, "l2_norm_clip"),
        ({"num_records": 0}, "num_records"),
    ],
)
def test_bad_plans_name_the_argument(changes, message):
    good = PrivacyPlan(POISSON, 1.0, 1)
    with pytest.raises((TypeError, ValueError), match=message):
        good.replace(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"epsilon": None}, "epsilon"),
        ({"epsilon": True}, "epsilon"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": -1e-5}, "delta"),
        ({"delta": "1e-5"}, "delta"),
        ({"delta": 1e-15}, "delta"),
        ({"num_releases": 0}, "num_releases"),
    ],
)
def test_bad_calibrations_name_the_argument(changes, message):
    good = {"epsilon": 1.0, "delta": 1e-5, "sampling": POISSON, "num_releases": 10}
    with pytest.raises((TypeError, ValueError), match=message):
        PrivacyPlan.calibrate(**{**good, **changes})


@pytest.mark.parametrize(
    "bad",
    [
        lambda: PoissonSampling(0.0),
        lambda: PoissonSampling(1.1),
        lambda: PoissonSampling(float("nan")),
        lambda: PoissonSampling(True),
        lambda: PoissonSampling("0.1"),
        lambda: FixedSizeSampling(10, 11),
        lambda: FixedSizeSampling(0, 1),
        lambda: FixedSizeSampling(10, 2.0),
        lambda: EachRecordOncePerEpoch(0),
        lambda: Sensitivity(0.0),
        lambda: Sensitivity(1.0, 2.1),
        lambda: Sensitivity(float("nan"), 1.0),
    ],
)
def test_bad_values_are_refused(bad):
    with pytest.raises((TypeError, ValueError), match=r"pass|at most|use"):
        bad()


def test_schemes_describe_themselves():
    for scheme in (POISSON, FullBatch(), FixedSizeSampling(100, 5), EachRecordOncePerEpoch(4)):
        assert len(scheme.describe()) > 20
        assert scheme.to_json()["name"] == scheme.name
