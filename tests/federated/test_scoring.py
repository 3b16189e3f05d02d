"""Steps by information: hospitals of unlike records settle, few or many, with and without noise."""

import dataclasses
import functools

import numpy as np
import pytest
from support.federation import ScoringWorker, play, prior_of

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated import Hospital, Server, Study, StudyTerms, Synchronous, simulate
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

WIDTH, CLIP = 4, 2.0
SPLITS = ("even", "by size", "by label")


def records(num=3000, seed=0):
    rng = np.random.default_rng(seed)
    x = np.concatenate([np.ones((num, 1)), rng.normal(size=(num, WIDTH - 1))], axis=1)
    y = rng.random(num) < 1.0 / (1.0 + np.exp(-x @ [-1.0, 0.8, -0.5, 0.3]))
    return x, y.astype(np.int32)


def divided(y, division, num, rng):
    """Returns the hospital of each record."""
    first = np.arange(num) < max(1, num // 2)
    if division == "even":
        return rng.permutation(np.arange(len(y)) % num)
    if division == "by size":  # 9 times as many in the first half.
        share = np.where(first, 9.0, 1.0)
        return rng.choice(num, size=len(y), p=share / share.sum())
    likely = np.where(first, 0.95 / first.sum(), 0.05 / (~first).sum())
    other = np.where(first, 0.05 / first.sum(), 0.95 / (~first).sum())
    draws = [rng.choice(num, size=len(y), p=p) for p in (likely, other)]
    return np.where(y == 1, *draws)


def log_likelihood(factor, x, y):
    logits = x @ factor.sample(200, np.random.default_rng(1)).T
    signed = np.where(y[:, None] == 1, logits, -logits)
    return float(np.log(np.exp(-np.logaddexp(0.0, -signed)).mean(1)).mean())


@functools.cache
def noise_multiplier(epsilon, releases):
    return PrivacyPlan.calibrate(
        epsilon=epsilon, delta=1e-5, sampling=FullBatch(), num_releases=releases
    ).noise_multiplier


def study_end(division, num, epsilon, kind=ScoringWorker, seed=0, schedule=None, steps=10):
    """Returns the test log-likelihood at the end of a study, and its server."""
    x, y = records(seed=seed)
    x_test, y_test = records(seed=seed + 100)
    rng, schedule = np.random.default_rng(seed), schedule or Synchronous()
    where = divided(y, division, num, rng) if num > 1 else np.zeros(len(y), int)
    terms = StudyTerms("private", prior_of(WIDTH, full_rank=False))
    noise = 0.0 if epsilon is None else noise_multiplier(epsilon, steps * schedule.rounds)
    settings = {
        "noise": noise,
        "rng": rng,
        "bound": np.sqrt(2.0) * terms.prior.stddev,
        "clip": CLIP,
        "steps": steps,
    }
    workers = {f"h{h}": kind(x[where == h], y[where == h], **settings) for h in range(num)}
    server = play(Server(terms, workers, schedule), workers, terms)
    return log_likelihood(server.posterior, x_test, y_test), server


@functools.cache
def pooled_end(epsilon):
    return study_end("even", 1, epsilon)[0]


@pytest.mark.parametrize("num", [2, 3, 5, 10, 20])
@pytest.mark.parametrize("division", SPLITS)
@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_few_or_many_hospitals_reach_the_pooled_fit(epsilon, division, num):
    """Seeded. Its test log-likelihood is within 0.01 nats of one hospital's with all records."""
    pooled, found = pooled_end(epsilon), study_end(division, num, epsilon)[0]
    assert abs(found - pooled) <= 0.01
    assert pooled > -0.62


def test_more_and_shorter_rounds_end_there_too():
    """With Adam's steps 40 rounds of 5 ended far from the pooled fit, and worse with every round."""
    schedule = Synchronous(rounds=40)
    found, server = study_end("by label", 2, None, schedule=schedule, steps=5)
    assert abs(found - pooled_end(None)) <= 0.005
    assert server.caveats == ()


def test_a_study_that_still_goes_on_in_one_direction_says_so(caplog):
    """A damping too small for its rounds: each moves a mean by less than a standard deviation."""
    _, server = study_end(
        "by label", 2, None, schedule=Synchronous(rounds=12, damping=0.05), steps=20
    )
    (said,) = [part for part in server.caveats if "went on in one direction" in part]
    assert "InformationOptimizer" in said
    server.terms = dataclasses.replace(
        server.terms, settings={"optimizer": '{"class_name": "InformationOptimizer"}'}
    )
    assert not any("InformationOptimizer" in part for part in server.caveats), "it is in use"
    assert "went on in one direction" in caplog.text


@pytest.mark.parametrize("epsilon", [None, 1.0])
def test_a_study_that_has_settled_does_not(epsilon):
    for num in (2, 5):
        for division in SPLITS:
            _, server = study_end(division, num, epsilon)
            assert not any("in one direction" in sentence for sentence in server.caveats)


# ------------------------------------------------------------------------------------------ TensorFlow's


def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def make_study(**settings):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 2.0), WIDTH)})
    optimizer = dpvi.optimizers.InformationOptimizer(**{"l2_norm_clip": CLIP, **settings})
    return Study(prior, likelihood, optimizer)


@pytest.mark.parametrize(("epsilon", "within"), [(None, 0.003), (3.0, 0.01)])
def test_a_study_by_label_reaches_what_its_numpy_twin_does(epsilon, within):
    x, y = records(3000)
    where = divided(y, "by label", 2, np.random.default_rng(0))
    silent = {"l2_norm_clip": np.inf, "noise_multiplier": 0.0, "information": 0.25}
    study = make_study(**({} if epsilon else silent))
    hospitals = [(x[where == h].astype(np.float32), y[where == h]) for h in range(2)]
    history = simulate(study, hospitals, epsilon=epsilon, seed=1, verbose=0)
    pooled, server = study_end("by label", 2, None)
    found = log_likelihood(history.posterior, *records(seed=100))
    assert abs(found - pooled) <= within
    if epsilon is None:
        np.testing.assert_allclose(history.posterior.stddev, server.posterior.stddev, rtol=0.3)
        np.testing.assert_allclose(history.posterior.mean, server.posterior.mean, atol=0.06)


def test_a_hospital_pays_for_scoring_steps_as_for_others():
    x, y = records(200)
    study = make_study()
    hospital = Hospital(study, x.astype(np.float32), y, name="a", epsilon=1.0, rounds=2)
    server = Server(study.terms, ["a"], Synchronous(rounds=2))
    while not server.finished:
        for task in server.due():
            assert server.receive("a", hospital.answer(task.to_bytes()))
    assert hospital.ledger.num_releases == 20
    assert 0.99 <= hospital.spent <= 1.0
    assert np.isfinite(server.posterior.mean).all()


def test_records_in_other_numbers_than_declared_and_in_batches():
    x, y = records(200)
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 2.0), WIDTH)})
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=CLIP)
    study = Study(prior, likelihood, optimizer, local_steps=3, batch_size=20)
    hospital = Hospital(
        study, x.astype(np.float32), y, name="a", epsilon=1.0, rounds=1, num_records=210
    )
    (task,) = Server(study.terms, ["a"], Synchronous(rounds=1)).due()
    assert hospital.refine(task).change is not None


def test_what_scoring_steps_do_not_serve_is_refused():
    prior = tfd.Normal(0.0, 2.0)
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0)
    for settings in ({"family": "full_rank"}, {"clipping": "paired"}):
        with pytest.raises(ValueError, match="InformationOptimizer goes with"):
            Study(prior, lambda mean: tfd.Normal(mean, 1.0), optimizer, **settings)
    with pytest.raises(ValueError, match="information is needed"):
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=np.inf, noise_multiplier=0.0)
    with pytest.raises(ValueError, match="information"):
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0, information=-1.0)
    copy = type(optimizer).from_config(optimizer.get_config())
    assert (copy.clip, copy.information) == (optimizer.clip, None)


def test_bad_records_contribute_nothing_and_break_nothing():
    """C8: NaN and infinite scores leave a finite change."""
    x, y = records(50)
    x = x.astype(np.float32)
    x[0], x[1] = 1e38, -1e38
    study = make_study()
    hospital = Hospital(study, x, y, name="a", epsilon=1.0, rounds=1, refiner=Refiner(study))
    (task,) = Server(study.terms, ["a"], Synchronous(rounds=1)).due()
    assert np.isfinite(hospital.refine(task).change.norm)
