"""Properties that must hold for every setting (hypothesis)."""

import json

import dp_accounting
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from support.stack import PRICED_POISSON_RELATIONS, needs_poisson_replace_one

from tfp_dpvi.privacy import (
    EachRecordOncePerEpoch,
    EpsilonCurve,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    PrivacyPlan,
    Sensitivity,
    get_accountant,
)

RELATION = st.sampled_from(PRICED_POISSON_RELATIONS)
NOISE = st.floats(0.6, 20.0)
PROBABILITY = st.floats(1e-4, 1.0)
RELEASES = st.integers(1, 300)
DELTA = st.floats(1e-9, 1e-2)
# Rounding of the Fourier transform; the grid itself keeps order exactly.
SLACK = 1e-7


def for_all(*strategies):
    """A test of a few examples, and a slow one of many."""

    def decorate(check):
        def run(examples):
            settings(max_examples=examples)(given(*strategies)(check))()

        run.__name__, run.__doc__ = check.__name__, check.__doc__
        return pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.slow)])(
            run
        )

    return decorate


def _sampling(probability):
    return FullBatch() if probability > 0.95 else PoissonSampling(probability)


@for_all(RELATION, NOISE, PROBABILITY, RELEASES, DELTA, st.floats(1.0, 3.0))
def test_epsilon_falls_with_noise(relation, noise, probability, releases, delta, factor):
    plan = PrivacyPlan(_sampling(probability), noise, releases, relation)
    more = plan.replace(noise_multiplier=noise * factor)
    assert more.epsilon(delta) <= plan.epsilon(delta) * (1 + SLACK) + SLACK


@for_all(RELATION, NOISE, st.floats(1e-4, 1.0), st.floats(1e-4, 1.0), RELEASES, DELTA)
def test_epsilon_grows_with_the_sampling_probability(relation, noise, p1, p2, releases, delta):
    low, high = (
        PrivacyPlan(PoissonSampling(p), noise, releases, relation).epsilon(delta)
        for p in sorted((p1, p2))
    )
    assert low <= high * (1 + 1e-5) + SLACK  # at p = 1 the closed form replaces the grid


@for_all(RELATION, NOISE, PROBABILITY, RELEASES, RELEASES, DELTA)
def test_epsilon_grows_with_releases(relation, noise, probability, n1, n2, delta):
    plan = PrivacyPlan(_sampling(probability), noise, 1, relation)
    low, high = (plan.replace(num_releases=n).epsilon(delta) for n in sorted((n1, n2)))
    assert low <= high * (1 + SLACK) + SLACK


@for_all(RELATION, NOISE, PROBABILITY, RELEASES, DELTA, DELTA)
def test_epsilon_falls_with_delta(relation, noise, probability, releases, d1, d2):
    plan = PrivacyPlan(_sampling(probability), noise, releases, relation)
    small, large = sorted((d1, d2))
    assert plan.epsilon(large) <= plan.epsilon(small)


@needs_poisson_replace_one
@for_all(RELATION, NOISE, PROBABILITY, RELEASES, DELTA)
def test_replacing_costs_at_least_as_much_as_removing(
    relation, noise, probability, releases, delta
):
    plan = PrivacyPlan(_sampling(probability), noise, releases)
    replace = plan.replace(neighboring_relation="replace_one")
    assert plan.epsilon(delta) <= replace.epsilon(delta) * (1 + SLACK) + SLACK


@for_all(
    RELATION,
    st.lists(st.tuples(PROBABILITY, NOISE, RELEASES), min_size=1, max_size=4),
    DELTA,
    st.randoms(),
)
def test_composition_is_free_of_order_and_grouping(relation, parts, delta, rng):
    events = [PrivacyPlan(_sampling(q), z, n, relation).dp_event for q, z, n in parts]
    again = [PrivacyPlan(_sampling(q), z, n, relation).dp_event for q, z, n in parts]
    rng.shuffle(again)
    split = []
    for q, z, n in parts:
        plan = PrivacyPlan(_sampling(q), z, n, relation)
        split += [plan.event_of(n // 2), plan.event_of(n - n // 2)]
    pld, kind = (
        get_accountant("pld"),
        PrivacyPlan(FullBatch(), 1.0, 1, relation).neighboring_relation,
    )
    whole = pld.epsilon(dp_accounting.ComposedDpEvent(events), delta, kind)
    # Composed in another order, the same events differ in rounding.
    assert pld.epsilon(dp_accounting.ComposedDpEvent(again), delta, kind) == pytest.approx(
        whole, rel=1e-7, abs=1e-9
    )
    assert pld.epsilon(dp_accounting.ComposedDpEvent(split), delta, kind) == whole


@for_all(RELATION, PROBABILITY, RELEASES, st.floats(0.05, 10.0), DELTA)
def test_calibrate_then_evaluate_keeps_the_target(relation, probability, releases, epsilon, delta):
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=delta,
        sampling=_sampling(probability),
        num_releases=releases,
        neighboring_relation=relation,
    )
    assert plan.epsilon(delta) <= epsilon
    # Where delta alone covers a record's chance to be drawn at all, hardly any noise is needed.
    assume(plan.noise_multiplier > 0.02)
    assert (
        plan.epsilon(delta) >= 0.99 * epsilon
        or plan.replace(noise_multiplier=plan.noise_multiplier * 0.99).epsilon(delta) > epsilon
    )


CURVES = st.tuples(
    RELATION,
    NOISE,
    PROBABILITY,
    st.integers(1, 200),
    DELTA,
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
)


def check_curve(setting):
    relation, noise, probability, releases, delta, steps, with_prior = setting
    plan = PrivacyPlan(_sampling(probability), noise, releases, relation)
    prior = [PrivacyPlan(PoissonSampling(0.05), 2.0, 20, relation).dp_event] if with_prior else []
    curve = EpsilonCurve(plan, prior, delta)
    assert curve(releases) == plan.epsilon(delta, prior)
    values = [curve(s) for s in range(releases + 1)]
    assert values == sorted(values)
    for s in steps:
        if s <= releases:
            assert curve(s) >= plan.replace(num_releases=s).epsilon(delta, prior) * (1 - SLACK)


@settings(max_examples=4)
@given(CURVES)
@example(
    (PRICED_POISSON_RELATIONS[-1], 4.0, 1.0, 102, 1e-5, [87], True)
)  # Losses beyond -30 once lost their digits.
def test_the_curve_is_never_below_and_exact_at_the_end(setting):
    check_curve(setting)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=60)
@given(CURVES)
def test_many_curves_are_never_below_and_exact_at_the_end(setting):
    check_curve(setting)


SCHEMES = st.one_of(
    st.builds(PoissonSampling, PROBABILITY),
    st.just(FullBatch()),
    st.builds(EachRecordOncePerEpoch, st.integers(1, 10**6)),
    st.builds(
        lambda n, b: FixedSizeSampling(max(n, b), min(n, b)),
        st.integers(1, 10**9),
        st.integers(1, 10**9),
    ),
)


@settings(max_examples=200)
@given(
    SCHEMES,
    st.floats(0, 1e6),
    st.integers(0, 10**9),
    st.floats(1e-6, 1e6),
    st.floats(0.5, 2),
    st.floats(1e-9, 1e9),
)
def test_json_round_trips(scheme, noise, releases, a, ratio, clip):
    fixed = scheme.name == "fixed_size"
    plan = PrivacyPlan(
        scheme,
        noise,
        releases,
        "add_or_remove_one" if scheme.name in ("poisson", "full_batch") else "replace_one",
        Sensitivity(a, a * ratio),
        "rdp" if fixed else "pld",
        clip,
    )
    assert PrivacyPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
