"""The last phase of a study: sums at one public point, what they cost, and the posterior that they make."""

import dataclasses
import json
import math
import threading
import time

import numpy as np
import pytest
from support.federation import answer

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated.scored import ScoredLikelihood
from tfp_dpvi.data import Continuous, Schema
from tfp_dpvi.federated import (
    Factor,
    Hospital,
    MessageError,
    Reply,
    Server,
    SiteSums,
    Study,
    StudyTerms,
    Synchronous,
    Task,
    simulate,
)
from tfp_dpvi.federated import hospital as hospitals
from tfp_dpvi.federated.calibrated import combine
from tfp_dpvi.federated.columns import Columns
from tfp_dpvi.federated.deployment.proxy import ask
from tfp_dpvi.federated.deployment.worker import serve
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.sums import NUM_RELEASES, total_of
from tfp_dpvi.federated.window import SHARE, WindowRelease
from tfp_dpvi.privacy import FullBatch, PoissonSampling, PrivacyPlan
from tfp_dpvi.privacy.plan import calibrate_together

NUM = 40
QUIET = 1e-9


def logistic_prior(width=2):
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), width)})


def logistic(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def linear_prior():
    return tfd.JointDistributionNamed(
        {"s": tfd.LogNormal(0.0, 0.5), "w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)}
    )


def linear(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"])


def records(num=NUM, seed=0, family="logistic"):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 2)).astype("float32")
    score = x @ np.array([1.0, -0.5])
    if family == "linear":
        return x, (score + 0.7 * rng.normal(size=num)).astype("float32")
    return x, (rng.random(num) < 1.0 / (1.0 + np.exp(-score))).astype("int32")


def make_study(family="logistic", **settings):
    prior, likelihood = {
        "logistic": (logistic_prior(), logistic),
        "linear": (linear_prior(), linear),
    }[family]
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0)
    given = {"example": records(4, family=family), "calibrated": True, "local_steps": 2}
    return Study(prior, likelihood, optimizer, **{**given, **settings})


@pytest.fixture(scope="module")
def study():
    return make_study()


@pytest.fixture(scope="module")
def refiner(study):
    return Refiner(study)


@pytest.fixture(scope="module", params=["logistic", "linear"])
def any_study(request, study, refiner):
    if request.param == "logistic":
        return request.param, study, refiner
    made = make_study(request.param)
    return request.param, made, Refiner(made)


def make_hospital(study, refiner, **settings):
    given = {"name": "a", "epsilon": 1.0, "rounds": 3, "seed": 1}
    return Hospital(study, *records(), refiner=refiner, **{**given, **settings})


def task_of(study, request="r", *, last=True, number=3, hospital="a"):
    prior = study.terms.prior
    return Task(study.terms.identity, hospital, request, number, prior, prior, last=last)


# ------------------------------------------------------------------------------------------ sensitivity


def released(refiner, study, x, y, scale=QUIET):
    """The sums of a hospital at a public point, all but without noise, and the mechanism."""
    data = refiner.data(x, y, NUM)
    relation = PrivacyPlan(FullBatch(), 1.0, 1).neighboring_relation
    release = WindowRelease(refiner.window, data, relation, None, 7)
    release.mechanism = release.mechanism.with_noise(scale)
    refiner.window._num_steps = 0  # The same twins for all neighbours.
    return release.sums(task_of(study)), release.mechanism


def in_units(sums, mechanism):
    """All released values of a half as one vector, each over its noise; in units of the clip."""
    parts = [
        np.ravel(sums.halves[name][0]) / deviation * QUIET
        for name, deviation in sums.deviations.items()
    ]
    # A half is the mean of two releases: its noise is smaller, so that this is larger.
    return np.concatenate(parts) / math.sqrt(NUM_RELEASES / 2)


def check_replay(family, study, refiner):
    """One record replaced, and one that counts for nothing in its place, move the release as stated at most."""
    x, y = records(family=family)
    full, mechanism = released(refiner, study, x, y)
    start = in_units(full, mechanism)
    stated = mechanism.sensitivity
    rows = [(1e3, -1e3), (0.0, 0.0), (-1e30, 1e30)]
    outcomes = [0, 1] if family == "logistic" else [-1e6, 0.0, 1e30]
    gone = x.copy()
    gone[3] = 3e38  # Its score is not finite.
    without = in_units(released(refiner, study, gone, y)[0], mechanism)
    moved = []
    for row in rows:
        for outcome in outcomes:
            others = x.copy(), y.copy()
            others[0][3], others[1][3] = row, outcome
            after = in_units(released(refiner, study, *others)[0], mechanism)
            assert np.isfinite(after).all()
            moved.append(np.linalg.norm(after - without))
            assert moved[-1] <= stated.add_or_remove * (1 + 1e-5), "presence"
            assert np.linalg.norm(after - start) <= stated.replace * (1 + 1e-5), "replacement"
    return max(moved) / stated.add_or_remove


def test_replay_on_neighbours(any_study):
    assert check_replay(*any_study) > 0.5, "the statement is nearly attained"


def test_replay_finds_a_planted_fault(any_study, monkeypatch):
    """Records whose scores are three times as long as the clip."""
    family, study, _ = any_study
    honest = ScoredLikelihood.scores

    def longer(self, *arguments):
        scores = honest(self, *arguments)
        centred = scores.centred._replace(psi=3.0 * scores.centred.psi)
        return scores._replace(centred=centred)

    monkeypatch.setattr(ScoredLikelihood, "scores", longer)
    with pytest.raises(AssertionError):
        check_replay(family, study, Refiner(study))


def test_sums_of_hospitals_are_those_of_all_records(study, refiner):
    """Outcomes of few values have no twins, so that sums without noise are equal."""
    x, y = records(2 * NUM)
    parts = [released(refiner, study, x[rows::2], y[rows::2])[0] for rows in range(2)]
    data = refiner.data(x, y, None)
    relation = PrivacyPlan(FullBatch(), 1.0, 1).neighboring_relation
    pooled = WindowRelease(refiner.window, data, relation, None, 7)
    pooled.mechanism = pooled.mechanism.with_noise(QUIET)
    together = pooled.sums(task_of(study))
    total = total_of(parts)
    assert total.num_records == together.num_records == 2 * NUM
    for name, part in together.halves.items():
        np.testing.assert_allclose(total.halves[name], part, rtol=2e-4, atol=2e-4)
        assert total.deviations[name] == pytest.approx(math.sqrt(2.0) * parts[0].deviations[name])
    assert np.array_equal(parts[0].whitening, together.whitening)


def test_the_noise_is_that_which_is_stated(study, refiner):
    """Scores of two noisy releases differ from those without noise by what `deviations` says."""
    x, y = records()
    exact, _ = released(refiner, study, x, y)
    away = []
    for seed in range(16):
        data = refiner.data(x, y, NUM)
        relation = PrivacyPlan(FullBatch(), 1.0, 1).neighboring_relation
        release = WindowRelease(refiner.window, data, relation, None, seed)
        release.mechanism = release.mechanism.with_noise(5.0)
        sums = release.sums(task_of(study))
        away.append(
            [
                np.ravel(sums.halves[name] - exact.halves[name]) / sums.deviations[name]
                for name in ("score", "scale", "excess")
            ]
        )
    for part in zip(*away, strict=True):
        values = np.concatenate(part)
        # 7 standard errors of a standard deviation.
        assert abs(values.std() - 1.0) < 7.0 / math.sqrt(2 * len(values)), values.std()


# ------------------------------------------------------------------------------------------ what it costs


def test_plans_that_share_a_budget():
    steps = PrivacyPlan(PoissonSampling(0.2), 1.0, 50)
    last = PrivacyPlan(FullBatch(), 3.0, 4)
    earlier = [PrivacyPlan(FullBatch(), 20.0, 1).dp_event]
    both = calibrate_together([steps, last], epsilon=1.0, delta=1e-5, prior_events=earlier)
    assert both[1].noise_multiplier / both[0].noise_multiplier == pytest.approx(3.0)
    total = both[1].epsilon(1e-5, [*earlier, both[0].dp_event])
    assert 0.99 < total <= 1.0
    with pytest.raises(ValueError, match="must have noise"):
        calibrate_together([last.replace(noise_multiplier=0.0)], epsilon=1.0, delta=1e-5)
    spent = [PrivacyPlan(FullBatch(), 1.0, 1).dp_event]
    with pytest.raises(dpvi.privacy.BudgetExhaustedError, match="used up"):
        calibrate_together([last], epsilon=1.0, delta=1e-5, prior_events=spent)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_rounds_and_sums_cost_the_budget_together(study, refiner, relation):
    one = make_hospital(study, refiner, neighboring_relation=relation)
    for number in range(3):
        one.answer(task_of(study, f"r{number}", last=False, number=number).to_bytes())
    after_rounds = one.spent
    reply = Reply.from_bytes(one.answer(task_of(study).to_bytes()), study.terms)
    assert reply.change is None
    assert reply.sums.num_records == NUM
    assert reply.epsilon == pytest.approx(one.spent)
    assert 0.99 < one.spent <= 1.0
    assert len(one.ledger.entries) == 2
    # All releases are on all records: squared multipliers add up.
    rounds, last = one._plan, one._sums_plan
    parts = [
        plan.num_releases
        * (plan.sampling.unit_sensitivity(plan.sensitivity, plan.neighboring_relation) ** 2)
        / plan.noise_multiplier**2
        for plan in (rounds, last)
    ]
    assert parts[1] / sum(parts) == pytest.approx(SHARE, rel=1e-6)
    assert after_rounds < 0.7
    assert "calibrated posterior" in str(one.privacy_report())


def test_a_place_without_information_is_held():
    """Else sums of another place would be taken for those of this one."""

    point = make_study(public_inputs=records(600)[0]).point
    far = np.array([8e5, 1e5])
    theta, _ = point.hold(far)
    assert not np.trace(point.scoring.likelihood.moments_at(theta, np.eye(2)).information)
    np.testing.assert_allclose(point.scoring.theta.numpy(), theta)


def test_sums_are_given_once(study, refiner):
    one = make_hospital(study, refiner)
    first = one.answer(task_of(study, "first").to_bytes())
    assert one.answer(task_of(study, "first").to_bytes()) == first, "a request repeated"
    spent = one.spent
    declined = Reply.from_bytes(one.answer(task_of(study, "second").to_bytes()), study.terms)
    assert declined.sums is None
    assert "gives its sums once" in declined.reason
    assert one.spent == spent


def test_sums_are_charged_before_they_are_computed(study, refiner, monkeypatch):
    """A hospital that is killed while it computes has paid, and never releases them a second time."""
    one = make_hospital(study, refiner)
    seen = []

    def die(self, task):
        del self, task
        seen.append(one.ledger.num_releases)
        raise KeyboardInterrupt

    monkeypatch.setattr(hospitals.WindowRelease, "sums", die)
    with pytest.raises(KeyboardInterrupt):
        one.answer(task_of(study).to_bytes())
    assert seen == [NUM_RELEASES]
    monkeypatch.undo()
    again = make_hospital(study, refiner, ledger=one.ledger)
    reply = Reply.from_bytes(again.answer(task_of(study, "again").to_bytes()), study.terms)
    assert reply.sums is None
    assert again.ledger.num_releases == NUM_RELEASES


def test_a_hospital_that_is_killed_after_it_kept_its_reply_loses_nothing(study, refiner, tmp_path):
    kept = {"last_reply": tmp_path / "a.reply"}
    with dpvi.PrivacyLedger(tmp_path / "a.ledger") as ledger:
        one = make_hospital(study, refiner, ledger=ledger, **kept)
        one.answer(task_of(study, "r0", last=False, number=0).to_bytes())
        lost = one.answer(task_of(study, "sums").to_bytes())
        spent = one.spent
        again = make_hospital(study, refiner, ledger=ledger, **kept)
        # The server asks anew, and says which request it waits for.
        asked = dataclasses.replace(task_of(study, "anew"), unanswered=("sums",))
        assert again.answer(asked.to_bytes()) == lost
        assert again.spent == spent
        assert (again._plan.noise_multiplier, again._sums_plan.noise_multiplier) == (
            one._plan.noise_multiplier,
            one._sums_plan.noise_multiplier,
        )


def test_a_budget_that_is_spent_elsewhere_declines_and_says_nothing_of_it(study, refiner):
    one = make_hospital(study, refiner)
    other = PrivacyPlan(FullBatch(), 3.0, 1)
    one.ledger.reserve(other, 1)
    reply = Reply.from_bytes(one.answer(task_of(study).to_bytes()), study.terms)
    assert reply.sums is None
    assert "does not allow" in reply.reason
    assert one.ledger.num_releases == 1


def test_a_worker_gives_its_sums_over_its_socket(study, refiner, tmp_path):
    """The proxy that Flower's client app calls, and the worker, carry them as they carry changes."""
    one = make_hospital(study, refiner)
    path = tmp_path / "a.sock"
    thread = threading.Thread(target=serve, args=(one, path), kwargs={"requests": 1}, daemon=True)
    thread.start()
    while not path.exists():
        time.sleep(0.01)
    reply = Reply.from_bytes(ask(path, task_of(study).to_bytes()), study.terms)
    thread.join(30.0)
    assert reply.sums.num_records == NUM
    assert one.ledger.num_releases == NUM_RELEASES


# ------------------------------------------------------------------------------------------ the server


def sums_of(num=100, sd=10.0, score=(0.0, 0.0), whitening=None):
    halves = {
        "score": np.tile(score, (2, 1)),
        "matrix": np.tile(num * np.eye(2) / 2.0, (2, 1, 1)),
        "scale": np.full(2, float(num)),
        "excess": np.zeros(2),
    }
    noise = {"score": sd, "matrix": 2.0 * sd, "scale": 4.0 * sd, "excess": 4.0 * sd}
    return SiteSums(num, np.eye(2) if whitening is None else whitening, halves, noise)


SHAPES = {"score": (2,), "matrix": (2, 2), "scale": (), "excess": ()}
TERMS = StudyTerms("t", Factor.normal(np.zeros(2), np.ones(2)), sums=SHAPES)
CHANGE = Factor(np.ones(2), np.ones(2))


def reach_last_phase(server):
    for task in server.due():
        assert not task.last
        assert server.receive(task.hospital, answer(task, CHANGE))
    return {task.hospital: task for task in server.due()}


def one_round(names, **settings):
    return Server(TERMS, names, Synchronous(rounds=1, damping=1.0), **settings)


def test_a_server_asks_for_sums_at_one_point_after_the_rounds():
    server = one_round(["a", "b"])
    tasks = reach_last_phase(server)
    assert all(task.last for task in tasks.values())
    assert len({tuple(task.posterior.mean) for task in tasks.values()}) == 1
    np.testing.assert_array_equal(tasks["a"].posterior.mean, server.posterior.mean)
    for name, task in tasks.items():
        assert not server.finished
        sent = Task.from_bytes(task.to_bytes(), TERMS)
        assert server.receive(name, answer(sent, None, sums=sums_of()))
    assert server.finished
    assert server.sums.keys() == {"a", "b"}
    assert not server.caveats or "no sums" not in server.caveats[0]


def test_a_study_without_the_phase_ends_with_its_rounds():
    plain = dataclasses.replace(TERMS, sums={})
    server = Server(plain, ["a"], Synchronous(rounds=1, damping=1.0))
    (task,) = server.due()
    assert server.receive("a", answer(task, CHANGE))
    assert server.finished
    assert server.place is None
    with pytest.raises(MessageError, match="no last phase"):
        Task.from_bytes(dataclasses.replace(task, last=True).to_bytes(), plain)


@pytest.mark.parametrize(
    ("sums", "says"),
    [
        (lambda: sums_of(whitening=2.0 * np.eye(2)), "other coordinates"),
        (lambda: sums_of(score=(1e4, 0.0)), "more than 100 records"),
        (lambda: sums_of(num=300), "has declared others"),
        (lambda: None, None),
    ],
)
def test_sums_that_cannot_be_are_refused(sums, says):
    terms = dataclasses.replace(TERMS, clip=1.0)
    server = Server(
        terms, ["a", "b"], Synchronous(rounds=1, damping=1.0), num_records={"a": 100, "b": 100}
    )
    tasks = reach_last_phase(server)
    assert server.receive("a", answer(tasks["a"], None, sums=sums_of()))
    given = sums()
    reply = answer(tasks["b"], CHANGE if given is None else None, sums=given)
    assert not server.receive("b", reply)
    assert (says or "sums were asked for") in server.refused[-1]
    assert "b" not in server.sums


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"halves": {}}, "lacks the fields"),
        ({"whitening": [[1.0]]}, "shapes"),
        ({"deviations": {**sums_of().deviations, "score": -1.0}}, "score=-1.0"),
        ({"deviations": {**sums_of().deviations, "score": math.nan}}, "score is NaN"),
        ({"num_records": 0}, "num_records=0"),
        (
            {
                "halves": {
                    **sums_of().halves,
                    "matrix": np.tile([[1.0, 2.0], [3.0, 4.0]], (2, 1, 1)),
                }
            },
            "not symmetric",
        ),
        ({"halves": {**sums_of().halves, "score": np.full((2, 2), math.inf)}}, "not finite"),
    ],
)
def test_sums_that_are_none_are_refused(change, says):
    fields = {**dataclasses.asdict(sums_of()), **change}
    value = json.loads(json.dumps(fields, default=np.ndarray.tolist))
    with pytest.raises((TypeError, ValueError), match=says):
        SiteSums.from_json(value, SHAPES)


def test_a_hospital_that_stays_away_is_asked_three_times_and_named():
    server = one_round(["a", "b"])
    tasks = reach_last_phase(server)
    assert server.receive("a", answer(tasks["a"], None, sums=sums_of()))
    asked = 1
    server.give_up(tasks["b"].request)
    while not server.finished:
        (task,) = server.due()
        assert task.hospital == "b"
        np.testing.assert_array_equal(task.posterior.mean, tasks["a"].posterior.mean)
        asked += 1
        server.give_up(task.request)
    assert asked == 3
    assert any("b gave no sums" in sentence for sentence in server.caveats)
    # A late answer to the first request still counts.
    assert server.receive("b", answer(tasks["b"], None, sums=sums_of()))
    assert not any("gave no sums" in sentence for sentence in server.caveats)


def test_a_server_that_is_killed_in_the_last_phase_goes_on(tmp_path):
    server = one_round(["a", "b"], folder=tmp_path)
    tasks = reach_last_phase(server)
    assert server.receive("a", answer(tasks["a"], None, sums=sums_of(score=(1.0, 2.0))))
    loaded = Server.load(tmp_path, TERMS)
    np.testing.assert_array_equal(loaded.sums["a"].mean("score"), [1.0, 2.0])
    (again,) = loaded.due()
    assert again.to_bytes() == tasks["b"].to_bytes()
    assert loaded.receive("b", answer(again, None, sums=sums_of()))
    assert loaded.finished
    np.testing.assert_array_equal(loaded.place.mean, server.place.mean)
    loaded.drop("a")
    assert loaded.sums.keys() == {"b"}
    assert loaded.finished


def test_terms_are_kept_with_the_shapes_of_sums(tmp_path):
    TERMS.save(tmp_path / "terms.json")
    assert StudyTerms.load(tmp_path / "terms.json").identity == TERMS.identity
    with pytest.raises(MessageError, match="another sums"):
        TERMS.check_same(dataclasses.replace(TERMS, sums={}).identity)


# ------------------------------------------------------------------------------------------ the posterior


def clipped_root(x, y, whitening, w):
    """Where the sum of centred scores, clipped in these coordinates, is that of the prior: in NumPy."""
    for _ in range(30):
        p = 1.0 / (1.0 + np.exp(-x @ w))
        v = x @ whitening.T
        cut = 1.0 / np.maximum(1.0, np.linalg.norm(v, axis=1) * np.maximum(p, 1.0 - p))
        score = ((y - p) * cut) @ v
        slope = (v * (p * (1.0 - p) * cut)[:, None]).T @ x
        w = w + np.linalg.solve(slope, score)
    return w


def test_with_little_noise_it_is_the_estimate_of_all_records(any_study):
    """Means within .35 standard deviations of the root in NumPy; of numbers, near the exact posterior."""
    family, study, refiner = any_study
    x, y = records(1500, family=family)
    truth = {"w": tf.constant([0.95, -0.45])}
    if family == "linear":
        truth["s"] = tf.constant(0.72)
    mean = study.coordinates.flatten_one(truth)
    place = Factor.normal(mean, np.full(len(mean), 0.01))
    task = dataclasses.replace(task_of(study), posterior=place, cavity=place)
    relation = PrivacyPlan(FullBatch(), 1.0, 1).neighboring_relation
    sums = {}
    for rows in range(3):
        data = refiner.data(x[rows::3], y[rows::3], None)
        release = WindowRelease(refiner.window, data, relation, None, rows)
        release.mechanism = release.mechanism.with_noise(0.05)
        sums[f"hospital {rows}"] = release.sums(task)
    posterior = combine(study.point, mean, sums)
    assert posterior.warnings == []
    draws = posterior.distribution.sample(4000, seed=1)["w"].numpy()
    if family == "linear":
        wanted, inverse, most = np.linalg.lstsq(x, y)[0], np.linalg.inv(x.T @ x) * 0.7**2, 0.9
    else:
        wanted = clipped_root(x, y, next(iter(sums.values())).whitening, np.array([1.0, -0.5]))
        p = 1.0 / (1.0 + np.exp(-x @ wanted))
        inverse, most = np.linalg.inv((x * (p * (1 - p))[:, None]).T @ x), 0.35
    sds = np.sqrt(np.diag(inverse))
    assert np.all(np.abs(draws.mean(0) - wanted) < most * sds), (draws.mean(0) - wanted) / sds
    ratio = draws.std(0) / sds
    assert ratio.min() > 0.9, ratio
    assert ratio.max() < 1.35, ratio
    assert posterior.heterogeneity.p_value > 1e-4
    assert "noise" in str(posterior.summary())
    fewer = posterior.without("hospital 1")
    assert fewer.sums.keys() == {"hospital 0", "hospital 2"}
    wider = fewer.distribution.sample(4000, seed=1)["w"].numpy().std(0) / draws.std(0)
    assert np.all(wider > 1.1), wider
    with pytest.raises(ValueError, match="cannot be left out"):
        posterior.without("nobody")


def test_a_study_in_one_process_has_its_posterior(study):
    x, y = records(400)
    parts = [(x[rows::2], y[rows::2]) for rows in range(2)]
    history = simulate(study, parts, epsilon=3.0, schedule=Synchronous(rounds=2), verbose=0, seed=3)
    assert not history.refused
    assert history.sums.keys() == {"hospital 1", "hospital 2"}
    np.testing.assert_array_equal(history.place.mean, history.posterior.mean)
    assert history.calibrated.distribution.sample(5)["w"].shape == (5, 2)
    assert 0.0 < history.calibrated.calibrated.shares[0, 0] < 1.0
    assert 2.97 < history.epsilon["hospital 1"] <= 3.0
    again = study.calibrated_posterior(history)
    np.testing.assert_array_equal(
        again.calibrated.mixture.locs, history.calibrated.calibrated.mixture.locs
    )


def like_hospitals(study, num_hospitals, generator, *, sds, records=2000, apart=0.0, shift=0.3):
    """Sums drawn from what they should be: score m has mean `A delta` and covariance `B + sd^2 I`.

    With `apart` the hospitals' scores move against one another, as with a division by label.
    """
    mean = np.zeros(2)
    theta, whitening = study.point.hold(mean)
    moments = study.point.scoring.likelihood.moments_at(theta, whitening)
    delta = shift * generator.normal(size=2) * np.sqrt(2.0 / records)
    sums = {}
    for number in range(num_hospitals):
        sd = sds[number % len(sds)]
        score = records * moments.slope @ np.linalg.solve(whitening.T, delta)
        score = score + np.linalg.cholesky(records * moments.matrix) @ generator.normal(size=2)
        score = score + apart * (-1.0) ** number * np.sqrt(records)
        noise = generator.normal(size=(2, 2)) * sd
        matrix = np.tile(records * moments.matrix, (2, 1, 1))
        halves = {
            "score": score + noise,
            "matrix": matrix,
            "scale": np.full(2, records * moments.scale),
            "excess": np.zeros(2),
        }
        deviations = {"score": sd, "matrix": 1e-3 * sd, "scale": 1e-3 * sd, "excess": sd}
        sums[f"h{number}"] = SiteSums(records, whitening, halves, deviations)
    return sums, mean, delta


@pytest.mark.slow
def test_q_is_that_of_chance_for_like_hospitals(study):
    generator = np.random.default_rng(5)
    found = []
    for _ in range(12):
        sums, mean, _ = like_hospitals(study, 4, generator, sds=(40.0, 10.0))
        found.append(combine(study.point, mean, sums).heterogeneity)
    assert {part.degrees for part in found} == {6}
    # A mean of 12 chi-squares of 6 degrees: 6 +- 1 (one standard error).
    assert abs(np.mean([part.statistic for part in found]) - 6.0) < 4.5


def test_q_sees_unlike_hospitals(study):
    generator = np.random.default_rng(5)
    sums, mean, _ = like_hospitals(study, 4, generator, sds=(10.0,), apart=3.0)
    posterior = combine(study.point, mean, sums, weights="precision")
    assert posterior.heterogeneity.p_value < 1e-6
    assert set(posterior.weights.values()) == {1.0}
    assert any("equal weights" in note for note in posterior.notes)
    assert any("are unlike" in note for note in posterior.notes)


@pytest.mark.slow
def test_precision_weights_narrow_and_cover(study):
    """Hospitals with 20 times the noise of others count for less; .9 intervals hold .7 of 16 truths."""
    generator = np.random.default_rng(6)
    inside, ratios = [], []
    for _ in range(8):
        sums, mean, delta = like_hospitals(study, 4, generator, sds=(200.0, 10.0))
        plain = combine(study.point, mean, sums)
        weighted = combine(study.point, mean, sums, weights="precision")
        if set(weighted.weights.values()) == {1.0}:
            continue  # A false alarm of Q.
        assert weighted.weights["h0"] < 0.2 * weighted.weights["h1"]
        mixture = weighted.calibrated.mixture
        sds = np.sqrt(np.diag(mixture.covariance))
        ratios.append(sds / np.sqrt(np.diag(plain.calibrated.mixture.covariance)))
        inside.append(np.abs(mixture.mean - delta) < 1.645 * sds)
    assert len(inside) >= 4
    assert np.mean(ratios) < 0.5
    assert np.mean(inside) >= 0.7


# ------------------------------------------------------------------------------------------ the face


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"example": None}, "pass a schema, or an example"),
        ({"optimizer": "no clip"}, "no clip"),
        ({"example": None, "public_inputs": np.zeros((9, 2), np.float32)}, "pass a schema"),
        ({"public_inputs": np.zeros((9, 3), np.float32)}, "shapes and dtypes"),
        ({"public_inputs": np.zeros((9, 2), np.float32)}, "no finite information"),
    ],
)
def test_what_cannot_be_calibrated_is_refused_in_words(settings, says):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    if settings.pop("optimizer", None):
        optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
            l2_norm_clip=math.inf, noise_multiplier=0.0
        )
    given = {"example": records(4), "calibrated": True, **settings}
    with pytest.raises(ValueError, match=says) as caught:
        Study(logistic_prior(), logistic, optimizer, **given)
    assert str(caught.value).count("\n") <= 1


def test_it_is_on_where_the_model_can():
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    on = Study(logistic_prior(), logistic, optimizer, example=records(4))
    assert on.terms.sums == SHAPES
    off = Study(logistic_prior(), logistic, optimizer)
    assert not off.terms.sums
    assert "schema" in off.not_calibrated
    with pytest.raises(ValueError, match="calibrated=True"):
        off.calibrated_posterior(one_round(["a"]))
    with pytest.raises(ValueError, match="no hospital gave its sums"):
        on.calibrated_posterior(one_round(["a"]))
    narrow = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Gamma(0.001, 0.001), 2)})
    without = Study(narrow, logistic, optimizer, example=records(4))
    assert "use a prior such as LogNormal" in without.not_calibrated
    whole = Study(
        logistic_prior(),
        lambda params: tfd.MultivariateNormalDiag(params["w"]),
        optimizer,
        example=(records(4)[0], None),
    )
    assert whole.terms.sums["ranks"]
    schema = Schema({"a": Continuous(0.0, 100.0, bins=4), "b": Continuous(-1.0, 1.0, bins=4)})
    inputs = Columns(schema, None).public_inputs(200)
    assert inputs.min(0)[0] >= 0.0
    assert abs(inputs[:, 0].mean() - 50.0) < 10.0


def test_public_inputs_are_agreed_on():
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(50, 2)).astype("float32") for _ in range(2)]
    one, other = (make_study(public_inputs=part).terms for part in inputs)
    one.check_same(one.identity)
    with pytest.raises(MessageError, match="public_inputs"):
        one.check_same(other.identity)
