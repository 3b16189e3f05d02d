"""`audit.lower_bound`: near the truth on clean steps, above the claim on faulty ones."""

import numpy as np
import pytest
from support import broken, planted
from support.subject import Subject

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi.audit import canaries

SURE = 1.0 - 1e-9  # A false alarm of a test here: 1e-9, as elsewhere.


def test_a_full_step_gives_away_nearly_what_it_claims():
    """mu = 1: from 1500 runs, at least three quarters of epsilon at 95 %. The ledger and the variables do not change."""
    model = planted.linear(1.0)
    result = audit.lower_bound(model, planted.small_records(), num_runs=2000)
    assert result.claimed == pytest.approx(4.377, abs=0.01)  # Balle and Wang 2018.
    assert 0.75 * result.claimed < result.epsilon
    assert 0.9 < result.epsilon_of_any < 2.0
    assert result.reach == pytest.approx(1.0, abs=1e-4)
    assert result.delta == 1e-5
    text = str(result)
    assert "no contradiction of the claim of 4.38" in text
    assert "the result is not private itself" in text
    assert model.num_releases == 0
    assert not model.v.numpy().any()
    figure = pytest.importorskip("matplotlib.figure").Figure()
    axes = result.plot(figure.subplots())
    assert "does not contradict" in axes.get_title()
    assert len(axes.patches) == 80


def test_half_the_noise_is_found():
    """And only half the noise: the true epsilon is 10.0, and the bound lies between."""
    with Subject(privatize=broken.half_noise).installed():
        result = audit.lower_bound(
            planted.linear(1.0), planted.small_records(), num_runs=2000, confidence=SURE
        )
    assert result.contradicted
    assert result.claimed < result.epsilon < 10.0
    assert "CONTRADICTS" in str(result)


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_secure_steps_are_attacked(factor):
    """C10: words of AES hide as much as they should, and half the noise is found."""
    privatize = dpvi.optimizers.privatize if factor == 1.0 else broken.half_noise
    with Subject(privatize=privatize).installed():
        model = planted.linear(1.0, randomness="secure")
        result = audit.lower_bound(model, planted.small_records(), num_runs=2000, confidence=SURE)
    assert result.contradicted == (factor < 1.0)
    assert result.epsilon > 0.3 * result.claimed


@pytest.mark.slow
@pytest.mark.parametrize("clean", [True, False])
def test_one_run(clean):
    """Many canaries in one run show that there is no noise; with it, they show nothing beyond the claim."""
    model = planted.linear(2.0, width=64)
    x = planted.small_records(20, width=64)
    with Subject(privatize=dpvi.optimizers.privatize if clean else broken.no_noise).installed():
        result = audit.lower_bound(model, x, method="one_run", confidence=SURE if clean else 0.95)
    assert result.guesses.canaries == 64
    assert result.guesses.guesses == 32
    assert result.contradicted != clean
    assert clean or result.guesses.correct == 32
    assert "one run, 64 canaries" in str(result)


@pytest.mark.slow
def test_several_sampled_steps():
    """A clean plan of sampled steps is not contradicted, and the bound comes near it; a rate twice the claim is found."""
    x, how = planted.small_records(), {"batch_size": 6, "num_steps": 2, "num_runs": 4000}
    result = audit.lower_bound(planted.linear(0.5), x, **how)
    assert 0.3 * result.claimed < result.epsilon
    assert not audit.lower_bound(planted.linear(0.5), x, **how, confidence=SURE).contradicted
    with planted.rate_doubled():
        twice = audit.lower_bound(planted.linear(0.5), x, **how, confidence=SURE)
    assert twice.contradicted
    assert twice.epsilon > twice.claimed == result.claimed


@pytest.mark.slow
@pytest.mark.parametrize("sampling", ["poisson", "fixed_size"])
def test_replacement(sampling):
    """Under replace-one a canary stands in the place of its opposite."""
    model = planted.linear(
        4.0,
        neighboring_relation="replace_one",
        accountant="rdp" if sampling == "fixed_size" else "pld",
    )
    how = {} if sampling == "poisson" else {"sampling": sampling, "batch_size": 20}
    result = audit.lower_bound(model, planted.small_records(), num_runs=4000, **how)
    assert result.reach == pytest.approx(1.0, abs=1e-3)
    assert not result.contradicted
    # Of 200 simulated audits at this mu, the worst bound was .39 of the claim.
    assert result.epsilon > (0.35 if sampling == "poisson" else 0.1) * result.claimed
    with pytest.raises(ValueError, match="add_or_remove_one"):
        audit.lower_bound(model, planted.small_records(), method="one_run")


@pytest.mark.slow
def test_pairs_with_their_joint_releases():
    """The canary reaches the clip only where its twin differs; an unclipped curvature tells all."""
    x, y = planted.labelled()
    model = planted.logistic(1.0)
    result = audit.lower_bound(model, x, y, num_runs=4000)
    assert 0.15 * result.claimed < result.epsilon
    with planted.joint_unclipped():
        result = audit.lower_bound(model, x, y, num_runs=2000, confidence=SURE)
    assert result.contradicted


@pytest.mark.slow
def test_the_claim_is_that_of_the_report():
    """Of a fitted model, with the noise that `fit` found; before a fit, the noise is that of the audited steps."""
    x, y = planted.labelled(30)
    columns = {"a": x[:, 0], "b": x[:, 1]}  # As a table's.
    model = dpvi.DPVI(
        planted.tfd.Sample(planted.tfd.Normal(0.0, 1.0), 2),
        lambda params, x: planted.tfd.Bernoulli(logits=x["a"] * params[0] + x["b"] * params[1]),
        clipping="flat",
    )
    model.compile(planted.sgd(None), epsilon=1.0, delta=1e-6)
    how = {"batch_size": 10, "num_steps": 6, "num_runs": 100}
    before = audit.lower_bound(model, columns, y, **how)
    assert before.claimed == pytest.approx(1.0, rel=0.002)
    assert before.delta == 1e-6
    model.fit(columns, y, batch_size=10, epochs=2, verbose=0)
    assert audit.lower_bound(model, columns, y, **how).claimed == model.privacy_report().epsilon
    assert model.num_releases == 6


def test_canaries_are_strong_and_apart():
    """Vectors with one large entry are Dirac canaries of a linear loss: 8 orthogonal ones at the clip."""
    model, x = planted.linear(), planted.small_records()
    rows = canaries.rows_of(model, x, None, None)
    made = canaries.candidates(rows)
    assert len(made["x"]) == 4 * 5 + 2 * planted.WIDTH
    added = canaries.Contributions(
        made, made["x"] / np.linalg.norm(made["x"], axis=1, keepdims=True), np.ones(len(made["x"]))
    )
    chosen = added.apart(100)
    assert len(chosen) == planted.WIDTH
    gram = added.means[chosen] @ added.means[chosen].T
    assert np.abs(gram - np.eye(planted.WIDTH)).max() < 0.9
    first = added.strongest()
    assert added.means[added.farthest_from(first)] @ added.means[first] < -0.999


def test_refusals():
    model, x = planted.linear(), planted.small_records(5)
    for arguments, message in (
        ({"method": "both"}, "method"),
        ({"confidence": 1.0}, "confidence=1.0"),
        ({"canaries": {"z": x}}, "canaries has the keys"),
        ({"canaries": {"x": 0.0 * x}}, "none of them moves a sum"),
    ):
        with pytest.raises(ValueError, match=message):
            audit.lower_bound(model, x, **arguments)
