"""Survey weights at hospitals: what a weight can move, what is computed from weights, and what is refused."""

import math

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated.scored import ScoredLikelihood
from tfp_dpvi.federated import (
    Hospital,
    MessageError,
    RegressionStudy,
    Study,
    Synchronous,
    Task,
    TrustedSum,
    rehearse_study,
    simulate,
)
from tfp_dpvi.federated.calibrated import combine
from tfp_dpvi.federated.deployment import worker
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.sums import NUM_RELEASES, SiteSums
from tfp_dpvi.federated.weights import MOST_HELD
from tfp_dpvi.federated.window import WindowRelease, shares_of
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

NUM = 40
MOST = 20.0
QUIET = 1e-9
RELATION = PrivacyPlan(FullBatch(), 1.0, 1).neighboring_relation


def records(num=NUM, seed=0):
    """Inputs, outcomes, and weights that depend on outcomes."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 2)).astype("float32")
    x[:, 0] = 1.0
    y = (x[:, 1] + rng.logistic(size=num) > 0).astype("int32")
    weights = np.clip(np.exp(1.5 + np.where(y == 1, -1.0, 0.8) + rng.normal(size=num)), 1.0, MOST)
    return x, y, weights


def prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 3.0), 2)})


def logistic(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def make_study(**settings):
    x, y, _ = records(4)
    given = {"example": (x, y), "calibrated": True, "local_steps": 2, "max_weight": MOST}
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=2.0)
    return Study(prior(), logistic, optimizer, **{**given, **settings})


@pytest.fixture(scope="module")
def study():
    return make_study()


@pytest.fixture(scope="module")
def refiner(study):
    return Refiner(study)


def task_of(study, *, last=True, number=3):
    at = study.terms.prior
    return Task(study.terms.identity, "a", f"r{number}{last}", number, at, at, last=last)


def window_of(refiner, x, y, weights, noise=QUIET):
    """The last phase of a hospital, with the same twins each time."""
    data = refiner.data(x, y, NUM, weights=weights)
    release = WindowRelease(refiner.window, data, RELATION, None, 7)
    release.mechanism = release.mechanism.with_noise(noise)
    refiner.window._num_steps = 0
    return release


def sums_of(study, refiner, *records, noise=QUIET):
    return window_of(refiner, *records, noise=noise).sums(task_of(study))


def step_of(refiner, tensors, data):
    """The clipped sum of one step of the rounds, without noise."""
    gradient = refiner.mechanism(data, RELATION).gradient.draw(tf.constant([1, 2], tf.int64))
    total, _ = gradient.clipped_sum(tensors, tf.fill([NUM], True), tf.constant([3, 4], tf.int64))
    return total.tensors[0].numpy()


def changed(tensors, x, y, weight):
    """Records whose fourth one is another, past every check."""
    changes = {"x": x, "y": y, "sample_weight": weight}
    return {
        name: tf.tensor_scatter_nd_update(part, [[3]], tf.constant([changes[name]], part.dtype))
        for name, part in tensors.items()
    }


def hospital_of(study, refiner, **settings):
    x, y, weights = records()
    given = {"name": "a", "epsilon": 1.0, "rounds": 2, "seed": 1, "weights": weights}
    return Hospital(study, x, y, refiner=refiner, **{**given, **settings})


# ------------------------------------------------------------------------------------------ sums


def test_the_unit_of_weights_has_no_meaning(study, refiner):
    x, y, weights = records()
    other = make_study(max_weight=4.0 * MOST)
    both = [
        sums_of(study, refiner, x, y, weights).halves,
        sums_of(other, Refiner(other), x, y, 4.0 * weights).halves,
    ]
    assert {"variance", "weights"} < both[0].keys() == study.point.shapes.keys()
    for name, part in both[0].items():
        np.testing.assert_array_equal(part, both[1][name], err_msg=name)


def test_a_weight_counts_as_so_many_records(study, refiner):
    """A record of weight 10 is two of weight 5, where the clip cuts neither."""
    x, y, _ = records(NUM // 2)
    once = sums_of(study, refiner, x, y, np.full(NUM // 2, 10.0))
    twice = sums_of(study, refiner, np.tile(x, (2, 1)), np.tile(y, 2), np.full(NUM, 5.0))
    np.testing.assert_allclose(once.mean("score"), twice.mean("score"), rtol=1e-4, atol=1e-4)
    # The sums of w, w^2, what is cut and what is kept.
    assert once.mean("weights")[0] == pytest.approx(NUM / 4.0, rel=1e-5)
    assert once.mean("weights")[1] == pytest.approx(2.0 * twice.mean("weights")[1], rel=1e-5)
    assert once.mean("weights")[2] == pytest.approx(0.0, abs=1e-6)


def test_equal_weights_are_none(study, refiner):
    """In the rounds those of a quarter of the largest; in the last phase all, up to the clip."""
    x, y, _ = records()
    plain = make_study(max_weight=None)
    # Else a step would be at another draw.
    plain.information = study.information
    own = Refiner(plain)
    steps = []
    for shared, weights in ((refiner, np.full(NUM, MOST / MOST_HELD)), (own, None)):
        data = shared.data(x, y, NUM, weights=weights)
        shared.family.start(
            study.terms.prior,
            study.terms.prior,
            shared.mechanism(data, RELATION).with_noise(QUIET),
            0,
        )
        steps.append(step_of(shared, data.tensors, data))
    np.testing.assert_array_equal(*steps)
    posteriors = []
    for made, shared, weights in ((study, refiner, np.full(NUM, 7.0)), (plain, own, None)):
        sums = sums_of(made, shared, x, y, weights, noise=0.05)
        posteriors.append(
            combine(made.point, made.terms.prior.mean, {"a": sums}).calibrated.mixture
        )
    mean, sd = posteriors[1].mean, np.sqrt(np.diag(posteriors[1].covariance))
    assert np.abs((posteriors[0].mean - mean) / sd).max() < 0.5
    np.testing.assert_allclose(np.sqrt(np.diag(posteriors[0].covariance)) / sd, 1.0, atol=0.3)


# ------------------------------------------------------------------------------------------ privacy

ROWS = [(1.0, 1e3), (1e3, -1e3), (1.0, 0.5), (-1e30, 1e30)]
WEIGHTS = [0.0, 1e-30, 1.0, MOST_HELD, 1e30, -1.0, math.inf, math.nan]


def check_sums(study, refiner):
    """One record replaced, whatever its weight, moves the release by what is stated at most."""

    def value(release, tensors):
        release._tensors, refiner.window._num_steps = tensors, 0
        sums = release.sums(task_of(study))
        parts = [np.ravel(part[0]) / sums.deviations[name] for name, part in sums.halves.items()]
        # A half is the mean of two releases: its noise is smaller, so that this is larger.
        return np.concatenate(parts) * QUIET / math.sqrt(NUM_RELEASES / 2)

    release = window_of(refiner, *records())
    tensors, stated, moved = release._tensors, release.mechanism.sensitivity, []
    start = value(release, tensors)
    without = value(release, changed(tensors, (3e38, 3e38), 0, 1.0))
    for number, weight in enumerate(WEIGHTS):
        for row in ROWS[: 4 if weight >= 1.0 else 1]:
            after = value(release, changed(tensors, row, number % 2, weight))
            assert np.isfinite(after).all()
            moved.append(np.linalg.norm(after - without))
            assert moved[-1] <= stated.add_or_remove * (1 + 1e-5), "presence"
            assert np.linalg.norm(after - start) <= stated.replace * (1 + 1e-5), "replacement"
    return max(moved) / stated.add_or_remove


def test_replay_of_sums_on_neighbours_with_any_weights(study, refiner):
    assert check_sums(study, refiner) > 0.5, "the statement is nearly attained"


def test_replay_finds_scores_of_three_times_the_clip(study, monkeypatch):
    honest = ScoredLikelihood.scores

    def after(self, *arguments):
        scores = honest(self, *arguments)
        longer = 3.0 * scores.centred.psi
        return scores._replace(centred=scores.centred._replace(psi=longer))

    monkeypatch.setattr(ScoredLikelihood, "scores", after)
    with pytest.raises(AssertionError, match=r"presence|replacement"):
        check_sums(study, Refiner(study))


def test_replay_of_rounds_on_neighbours_with_any_weights(study, refiner):
    """The loss is weighted before the clip (contract 2)."""
    data = refiner.data(*records()[:2], NUM, weights=records()[2])
    mechanism = refiner.mechanism(data, RELATION).with_noise(QUIET)
    refiner.family.start(study.terms.prior, study.terms.prior, mechanism, 0)
    without = step_of(refiner, changed(data.tensors, (3e38, 3e38), 0, 1.0), data)
    moved = []
    for weight in WEIGHTS:
        for row in ROWS[:2]:
            after = step_of(refiner, changed(data.tensors, row, 0, weight), data)
            moved.append(np.linalg.norm(after - without))
            assert moved[-1] <= study.terms.clip * (1 + 1e-4)
    assert max(moved) > 0.9 * study.terms.clip


# ------------------------------------------------------------------------------------------ a study


def census(x, y, weights):
    """The logistic fit without privacy."""
    theta, x = np.zeros(2), np.float64(x)
    for _ in range(20):
        mean = 1.0 / (1.0 + np.exp(-x @ theta))
        slope = (x * (weights * mean * (1.0 - mean))[:, None]).T @ x
        theta = theta + np.linalg.solve(slope, x.T @ (weights * (y - mean)))
    return theta


def sandwich(theta, x, y, weights):
    """The standard deviation of the fit's intercept over samples."""
    x = np.float64(x)
    mean = 1.0 / (1.0 + np.exp(-x @ theta))
    slope = (x * (weights * mean * (1.0 - mean))[:, None]).T @ x
    scores = x * (weights * (y - mean))[:, None]
    inverse = np.linalg.inv(slope)
    return math.sqrt((inverse @ scores.T @ scores @ inverse)[0, 0])


def sampled(num, seed):
    """A sample of which outcomes of 1 are seen six times as often."""
    x, y, _ = records(4 * num, seed)
    weights = np.where(y == 1, 2.0, 12.0)
    chosen = np.random.default_rng(seed).random(len(y)) < 2.0 / weights
    return x[chosen][:num], y[chosen][:num], weights[chosen][:num]


def test_a_weighted_study_finds_the_population():
    records_of = {name: sampled(1500, 20 + place) for place, name in enumerate("ab")}
    x, y, weights = (np.concatenate(part) for part in zip(*records_of.values(), strict=True))
    whole, seen = census(x, y, weights), census(x, y, np.ones(len(y)))
    assert abs(whole[0] - seen[0]) > 1.0, "inclusion depends on outcomes"
    own = make_study(local_steps=5)
    history = simulate(
        own, records_of, epsilon=8.0, schedule=Synchronous(rounds=6), verbose=0, seed=1
    )
    assert history.refused == []
    posterior = history.calibrated
    mixture, checks = posterior.calibrated.mixture, posterior.calibrated.checks
    sd = np.sqrt(np.diag(mixture.covariance))
    assert np.abs((mixture.mean - whole) / sd).max() < 3.0
    assert abs(mixture.mean[0] - seen[0]) > 6.0 * sd[0]
    assert posterior.warnings == []
    assert checks.weight_variation == pytest.approx(weights.var() / weights.mean() ** 2, rel=0.3)
    assert "design effect" in str(posterior.summary())
    assert history.calibrated.heterogeneity.p_value > 0.01
    assert "survey weights" in str(history.reports["a"])
    assert list(posterior.without("a").sums) == ["b"]
    with pytest.raises(ValueError, match="weights='precision' with max_weight"):
        own.calibrated_posterior(history, weights="precision")


def test_sums_of_weights_may_be_seen_added_up_alone():
    trust = TrustedSum(2, by="the trust office", epsilon=1.0)
    own = make_study(trusted_sum=trust)
    given = {"a": records(seed=1), "b": records(seed=2)}
    history = simulate(own, given, epsilon=2.0, schedule=Synchronous(rounds=1), verbose=0, seed=1)
    assert history.refused == []
    (total,) = history.sums.values()
    assert total.halves["weights"].shape == (2, 4)


def test_a_person_has_one_weight():
    own = make_study(max_rows_per_unit=2)
    x, y, weights = records()
    ids = np.repeat(np.arange(NUM // 2), 2)
    given = {"unit_ids": ids, "epsilon": 1.0, "name": "a"}
    with pytest.raises(ValueError, match="differ between rows of one person"):
        Hospital(own, x, y, weights=weights, **given)
    data = Refiner(own).data(x, y, None, weights=np.repeat(weights[::2], 2), unit_ids=ids)
    held = data.tensors["sample_weight"].numpy()
    np.testing.assert_allclose(held, weights[::2] * MOST_HELD / MOST, rtol=1e-6)


# ------------------------------------------------------------------------------------------ effects


EFFECTS = (-0.9, -0.5, -0.2, 0.2, 0.5, 0.9)


def unlike(place, effect):
    """A hospital's records: its own intercept, and weights of its own size that depend on outcomes."""
    rng = np.random.default_rng(30 + place)
    x = np.stack([np.ones(4000), rng.normal(size=4000)], axis=1).astype("float32")
    y = (0.8 * x[:, 1] + effect + rng.logistic(size=4000) > 0).astype("int32")
    weights = np.where(y == 1, 0.3, 1.0) * (18.0 if place % 2 else 5.0)
    chosen = rng.random(4000) < weights.min() / weights
    return x[chosen][:1500], y[chosen][:1500], weights[chosen][:1500]


def effects_of(study, near, weighted, num=6):
    """The posterior of hospitals with effects, from sums at a point."""
    refiner, near = Refiner(study), np.array(near)
    sums = {}
    for place, effect in enumerate(EFFECTS[:num]):
        x, y, weights = unlike(place, effect)
        data = refiner.data(x, y, None, weights=weighted(weights))
        release = WindowRelease(refiner.window, data, RELATION, None, place)
        mechanism = release.mechanism.with_noise(0.5)
        sums[f"h{place}"] = refiner.window.sums(near, mechanism, data.tensors, place)
    return combine(study.point, near, sums, local=study.local)


def test_a_hospital_whose_weights_noise_hides_takes_none_of_the_others_shares():
    def site(num, mean, noise):
        halves = {"weights": np.tile(num * np.array([mean, mean**2, 0.0, 1.0]), (2, 1))}
        return SiteSums(num, np.eye(1), halves, {"weights": noise})

    slopes, squares = shares_of([site(900, 0.1, 1.0), site(900, 0.4, 1.0), site(20, 0.4, 90.0)])
    assert slopes[1] / slopes[0] == pytest.approx(4.0)
    assert squares[1] / squares[0] == pytest.approx(16.0)
    assert slopes[2] / slopes[0] == pytest.approx(20 / 900 * 0.25 / 0.1)
    alone, _ = shares_of([site(100, 0.1, 900.0), site(300, 0.4, 900.0)])
    assert alone.tolist() == [0.25, 0.75]


def test_hospitals_whose_weights_noise_hides_are_named(study, refiner):
    """Catches a name that is left out, one too many, and effects that are off in silence."""
    x, y, weights = records()
    own = make_study(local=["w[0]"])
    near = study.terms.prior.mean
    for others, says in (
        (weights, "as the other hospitals' are"),
        (1e-9 * weights, "all were equal"),
    ):
        sums = {
            name: sums_of(study, refiner, x, y, part, noise=0.3)
            for name, part in (("a", others), ("b", others), ("c", 1e-9 * weights))
        }
        names = "c" if others is weights else "a, b, c"
        plain, local = (combine(made.point, near, sums, local=made.local) for made in (study, own))
        (note,) = (each for each in plain.notes if "survey weights" in each)
        assert f"weights of {names} are" in note
        assert says in note
        assert "the test for unlike hospitals" in note
        (fault,) = (each for each in local.faults if "survey weights" in each)
        assert f"weights of {names} are" in fault
        assert "effects there may be off" in fault
        assert "survey weights" not in str(local.notes)


def test_effects_of_weighted_hospitals_are_those_of_their_own_weighted_fits():
    posterior = effects_of(make_study(local={"w[0]": 1.0}), [0.1, 0.7], lambda weights: weights)
    for place, effect in enumerate(EFFECTS):
        exact = census(*unlike(place, effect))
        found = np.asarray(posterior.at(f"h{place}")["w"])
        assert abs(found.mean(axis=0)[0] - exact[0]) < 0.15
        # Of sums of weights, not of their squares, or of records, it is .86 to 1.78.
        assert 0.8 < found.std(axis=0)[0] / sandwich(exact, *unlike(place, effect)) < 1.2
    low, high = np.quantile(posterior.draws(4000).sds["w[0]"], [0.05, 0.95])
    assert low < np.std(EFFECTS) < high
    assert posterior.heterogeneity.p_value > 0.01


def test_equal_weights_give_the_effects_that_none_give():
    # Seen are more outcomes of 1.
    near, none = [0.8, 0.8], make_study(local=["w[0]"], max_weight=None)
    plain = effects_of(none, near, lambda weights: None, 4)
    weighted = effects_of(make_study(local=["w[0]"]), near, lambda weights: 0 * weights + MOST, 4)
    for name in plain.sums:
        one, other = (np.asarray(each.at(name)["w"]) for each in (plain, weighted))
        assert np.abs((one.mean(axis=0) - other.mean(axis=0)) / one.std(axis=0)).max() < 0.5
        np.testing.assert_allclose(one.std(axis=0), other.std(axis=0), rtol=0.3)


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        (None, "weights are missing: the study has max_weight=20"),
        (np.ones(3), "weights must be one array of shape"),
        (np.full(NUM, -7.25), "weights has negative entries in 40 rows"),
        (np.full(NUM, np.inf), "weights has NaN or infinite entries"),
        (np.full(NUM, 27.25), "weights is above max_weight=20"),
        (np.zeros(NUM), "weights is 0 for all records"),
        (np.array(["7.25"] * NUM), "weights"),
    ],
)
def test_weights_that_do_not_fit_are_refused(study, refiner, weights, says):
    ledger = dpvi.PrivacyLedger()
    with pytest.raises((ValueError, TypeError), match=says) as caught:
        hospital_of(study, refiner, weights=weights, ledger=ledger)
    assert str(caught.value).count("\n") <= 1
    assert "7.25" not in str(caught.value)
    assert len(ledger.entries) == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_weight": 0.0}, "max_weight=0.0"),
        ({"max_weight": math.inf}, "max_weight=inf"),
        (
            {"privacy": "messages", "message_clip": 1.0, "calibrated": None},
            "max_weight with privacy",
        ),
    ],
)
def test_studies_that_have_no_weights_refuse_the_term(settings, says):
    with pytest.raises(ValueError, match=says) as caught:
        make_study(**settings)
    assert str(caught.value).count("\n") <= 1


def test_weights_are_a_term(study):
    plain = make_study(max_weight=None)
    with pytest.raises(MessageError, match="max_weight"):
        study.terms.check_same(plain.terms.identity)
    with pytest.raises(ValueError, match="weights: the study has none; make it with max_weight"):
        hospital_of(plain, Refiner(plain))
    # Weights are small beside the largest one: steps that expect more of records are short.
    assert study.information == plain.information / MOST_HELD
    with pytest.raises(ValueError, match="rehearse it without max_weight"):
        rehearse_study(study, [(100, 1.0)], delta=1e-5, num=20)


# ------------------------------------------------------------------------------------------ formulas

SCHEMA = {
    "ill": {"type": "binary"},
    "age": {"type": "continuous", "lower": 18.0, "upper": 90.0, "typical": [50.0, 15.0]},
    "w": {"type": "continuous", "lower": 0.0, "upper": MOST},
}


def table(weights):
    x, y, _ = records()
    return {"age": 50.0 + 10.0 * x[:, 1], "ill": y, "w": weights}


def test_a_formula_takes_the_weights_from_a_column(tmp_path):
    own = RegressionStudy("ill ~ age", "bernoulli", SCHEMA, weights="w", local_steps=2)
    assert own.max_weight == MOST
    assert own.not_calibrated == ""
    weights = records()[2]
    refiner = Refiner(own)
    data = refiner.data(table(weights), None, None)
    held = data.tensors["sample_weight"].numpy()
    np.testing.assert_allclose(held, weights * MOST_HELD / MOST, rtol=1e-6)
    with pytest.raises(ValueError, match="weights are a column of x"):
        refiner.data(table(weights), None, None, weights=weights)
    with pytest.raises(ValueError, match="'w'") as caught:
        refiner.data(table(np.full(NUM, 27.25)), None, None)
    assert "27.25" not in str(caught.value)
    path = tmp_path / "table.csv"
    rows = zip(*table(weights).values(), strict=True)
    path.write_text("age,ill,w\n" + "\n".join(",".join(map(str, row)) for row in rows))
    read = worker.read_records(str(path), own)[0]
    assert sorted(read) == ["age", "ill", "w"]
    other = RegressionStudy("ill ~ age", "bernoulli", SCHEMA, local_steps=2)
    with pytest.raises(MessageError, match="weights"):
        own.terms.check_same(other.terms.identity)
    with pytest.raises(ValueError, match="weights='age2' needs a column"):
        RegressionStudy("ill ~ age", "bernoulli", SCHEMA, weights="age2")
