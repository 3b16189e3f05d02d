"""Hospital effects: integrated over as closed forms and sums over grids say, and in a study's posterior."""

import numpy as np
import pytest
from scipy import stats

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated.mixture import exact_mixture
from tfp_dpvi.calibrated.whitening import NormalPrior
from tfp_dpvi.federated import SiteSums, Study
from tfp_dpvi.federated.calibrated import combine
from tfp_dpvi.federated.effects import MOST_LOCAL, HospitalEffects, Local, SiteLikelihoods

WHITENING = np.array([[0.7, 0.0], [0.2, 0.5]])
POINT = np.array([0.3, -0.2])
PRIOR = NormalPrior(np.array([0.1, 0.0]), np.diag([1.0, 0.5]))
LOCAL = Local(("b",), np.array([0]), np.array([0.8]))


def likelihoods(num_hospitals=4, size=2, draws=1, seed=0):
    """Normal likelihoods of each hospital's parameters in theta, and the same in whitened coordinates."""
    rng = np.random.default_rng(seed)
    roots = rng.normal(size=(num_hospitals, draws, size, size)) + 2.0 * np.eye(size)
    own = roots @ np.swapaxes(roots, 2, 3)
    centres = 0.7 * rng.normal(size=(num_hospitals, 1, size))
    linear = np.einsum("mkij,mkj->mki", own, np.broadcast_to(centres, own.shape[:3]))
    # theta = W^T phi, and everything is about the public point.
    there = linear - np.einsum("mkij,j->mki", own, POINT)
    squares = np.einsum("mki,mkij,mkj->mk", there, np.linalg.inv(own), there)
    whitened = SiteLikelihoods(
        WHITENING @ own @ WHITENING.T, there @ WHITENING.T, squares, np.zeros_like(own[:, 0])
    )
    return own, linear, whitened


def effects_of(whitened, local=LOCAL):
    phi = np.linalg.solve(WHITENING.T, POINT)
    return HospitalEffects(local, whitened, WHITENING, phi, PRIOR)


def by_grid(own, linear, num=801):
    """Moments of tau, of the shared parameters and of the first hospital's effect, by sums over tau."""
    grid = np.linspace(1e-4, 6.0, num)
    logs, means, seconds, firsts = [], [], [], []
    for tau in grid:
        # Hospital m says N(centre, covariance) of theta + b e_0.
        precision, right = PRIOR.precision.copy(), PRIOR.precision @ PRIOR.mean
        log, pieces = 0.0, []
        for part, pull in zip(own[:, 0], linear[:, 0], strict=True):
            covariance = np.linalg.inv(part)
            centre = covariance @ pull
            wide = covariance + np.diag([tau**2, 0.0])
            pieces.append((centre, wide))
            precision = precision + np.linalg.inv(wide)
            right = right + np.linalg.solve(wide, centre)
        mean = np.linalg.solve(precision, right)
        # The evidence by Bayes' formula at the prior's mean.
        log = stats.multivariate_normal.logpdf(
            PRIOR.mean, PRIOR.mean, np.linalg.inv(PRIOR.precision)
        ) - stats.multivariate_normal.logpdf(PRIOR.mean, mean, np.linalg.inv(precision))
        log += sum(stats.multivariate_normal.logpdf(c, PRIOR.mean, v) for c, v in pieces)
        logs.append(log + stats.halfnorm.logpdf(tau, scale=LOCAL.scales[0]))
        means.append(mean)
        seconds.append(np.linalg.inv(precision) + np.outer(mean, mean))
        centre, wide = pieces[0]
        firsts.append(tau**2 * np.linalg.solve(wide, centre - mean)[0])
    weights = np.exp(np.array(logs) - max(logs))
    weights /= weights.sum()
    mean = weights @ np.array(means)
    covariance = np.einsum("n,nij->ij", weights, np.array(seconds)) - np.outer(mean, mean)
    tau = weights @ grid
    return {
        "tau": np.array([tau, np.sqrt(weights @ (grid - tau) ** 2)]),
        "mean": mean,
        "covariance": covariance,
        "effect": weights @ np.array(firsts),
    }


def test_the_posterior_is_that_of_sums_over_a_grid():
    own, linear, whitened = likelihoods()
    effects = effects_of(whitened)
    generator = np.random.default_rng(1)
    draws = effects.draw(generator, 2000)
    wanted = by_grid(own, linear)
    tau = np.array([draws.sds.mean(), draws.sds.std()])
    np.testing.assert_allclose(tau, wanted["tau"], rtol=0.03)
    precision = PRIOR.whitened(WHITENING)
    mixture = exact_mixture(
        draws.likelihood, precision, precision @ np.linalg.solve(WHITENING.T, PRIOR.mean)
    )
    np.testing.assert_allclose(WHITENING.T @ mixture.mean, wanted["mean"], atol=0.01)
    covariance = WHITENING.T @ mixture.covariance @ WHITENING
    np.testing.assert_allclose(covariance, wanted["covariance"], rtol=0.05, atol=0.002)
    picks = np.arange(2000)
    own_effects = effects.sample(mixture.draws_of(picks, generator), draws, picks, generator)
    assert own_effects.shape == (4, 2000, 1)
    assert abs(own_effects[0].mean() - wanted["effect"]) < 0.05


def test_without_spread_the_likelihoods_are_multiplied():
    _, _, whitened = likelihoods()
    shared = effects_of(whitened)._shared(np.full((1, 1), 1e-6), 0)
    np.testing.assert_allclose(
        shared.precisions[0], whitened.precisions[:, 0].sum(axis=0), rtol=1e-9
    )
    np.testing.assert_allclose(shared.linear[0], whitened.linear[:, 0].sum(axis=0), rtol=1e-9)


def test_several_effects_are_found_by_draws_near_them():
    """Two of 12 hospitals' coordinates, sds .5 and .05, under priors of scale 3."""
    rng = np.random.default_rng(3)
    own = np.tile(400.0 * np.eye(2), (12, 1, 1, 1))
    away = rng.normal(size=(12, 2))
    away = (away - away.mean(axis=0)) / away.std(axis=0)
    centres = POINT + away * np.hypot([0.5, 0.05], 0.05)
    there = 400.0 * (centres - POINT)[:, None]
    whitened = SiteLikelihoods(
        WHITENING @ own @ WHITENING.T, there @ WHITENING.T, np.zeros((12, 1)), own[:, 0]
    )
    local = Local(("b", "w"), np.array([0, 1]), np.array([3.0, 3.0]))
    draws = effects_of(whitened, local).draw(np.random.default_rng(0), 200)
    low, high = np.quantile(draws.sds, [0.05, 0.95], axis=0)
    assert low[0] < 0.5 < high[0]
    assert low[1] < 0.05 < high[1]
    assert len(np.unique(draws.sds[:, 0])) > 60, "weights do not rest on a few draws"
    assert high[1] < 0.2


def test_q_leaves_effects_aside():
    """Its mean over 400 sets is its degrees; effects of any size do not count, other differences do."""
    rng = np.random.default_rng(2)
    precision = 50.0 * np.eye(2)
    values = []
    for shift in (0.0, 1.0):
        found = []
        for _ in range(400):
            centres = POINT + rng.normal(size=(5, 2)) / np.sqrt(50.0)
            centres[:, 0] += 9.0 * rng.normal(size=5)
            centres[0, 1] += shift
            there = precision[0, 0] * (centres - POINT)
            whitened = SiteLikelihoods(
                np.tile(WHITENING @ precision @ WHITENING.T, (5, 1, 1, 1)),
                (there @ WHITENING.T)[:, None],
                np.sum(there**2, axis=1)[:, None] / 50.0,
                np.zeros((5, 2, 2)),
            )
            statistic, degrees = effects_of(whitened).misfit()
            found.append(statistic)
        values.append(np.mean(found))
    assert degrees == 4
    # A standard error of a mean of 400 chi-squares of 4 degrees is .14.
    assert abs(values[0] - 4.0) < 0.7
    assert values[1] > 20.0


@pytest.mark.parametrize(
    ("local", "says"),
    [
        ({"v": None}, "local names 'v'"),
        ({"w": -1.0}, "positive number"),
        ({"w": float("inf")}, "positive number"),
        ({}, f"1 to {MOST_LOCAL}"),
        ({"w": None}, f"1 to {MOST_LOCAL}"),
    ],
)
def test_names_that_are_none_are_refused(local, says):
    names = ["b", *(f"w[{place}]" for place in range(7))]
    if set(local) == {"w"} and local["w"] is not None:
        names = names[:3]
    with pytest.raises(ValueError, match=says) as caught:
        Local.of_names(local, names, np.ones(len(names)))
    assert str(caught.value).count("\n") <= 1


# ------------------------------------------------------------------------------------------ in a study


def make_study(local=None, **settings):
    prior = tfd.JointDistributionNamed(
        {"b": tfd.Normal(0.0, 1.0), "w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)}
    )
    rng = np.random.default_rng(0)
    example = rng.normal(size=(4, 2)).astype("float32"), np.array([0, 1, 1, 0], np.int32)
    return Study(
        prior,
        lambda params, x: tfd.Bernoulli(logits=params["b"] + tf.linalg.matvec(x, params["w"])),
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0),
        local=local,
        **{"example": example, "calibrated": True, **settings},
    )


@pytest.fixture(scope="module")
def study():
    return make_study(["b"])


def sums_of(study, effects, records=2000, sd=10.0):
    """Sums at the prior's mean of hospitals with these intercepts, drawn from what they should be."""
    generator = np.random.default_rng(4)
    mean = np.zeros(3)
    theta, whitening = study.point.hold(mean)
    moments = study.point.scoring.likelihood.moments_at(theta, whitening)
    sums = {}
    for number, effect in enumerate(effects):
        score = records * moments.slope @ np.linalg.solve(whitening.T, [effect, 0.1, -0.1])
        score = score + np.linalg.cholesky(records * moments.matrix) @ generator.normal(size=3)
        halves = {
            "score": score + sd * generator.normal(size=(2, 3)),
            "matrix": np.tile(records * moments.matrix, (2, 1, 1)),
            "scale": np.full(2, records * moments.scale),
            "excess": np.zeros(2),
        }
        noise = {"score": sd, "matrix": 1e-3 * sd, "scale": 1e-3 * sd, "excess": 100.0}
        sums[f"h{number}"] = SiteSums(records, whitening, halves, noise)
    return sums, mean


def test_a_study_finds_effects_and_without_them_says_that_hospitals_are_unlike(study, caplog):
    effects = 0.4 * stats.norm.ppf((np.arange(8) + 0.5) / 8.0)
    sums, mean = sums_of(study, effects)
    posterior = combine(study.point, mean, sums, local=study.local)
    assert posterior.warnings == []
    assert posterior.notes == ()
    drawn = posterior.draws(4000, seed=1)
    low, high = np.quantile(drawn.sds["b"], [0.05, 0.95])
    assert low < 0.4 < high
    assert low > 0.1
    assert high < 0.9
    for place, name in enumerate(sums):
        assert abs(drawn.effects[name]["b"].mean() - effects[place]) < 0.45
        at = posterior.at(name)
        assert abs(float(np.mean(at["b"])) - effects[place]) < 0.25
        assert at["w"].shape == (4000, 2)
    spread = np.asarray(drawn.parameters["b"]).std()
    assert 0.08 < spread < 0.35, "the mean of eight, each .4 from it"
    shown = str(posterior.summary())
    assert "sd of b" in shown
    assert "b at h3" in shown
    assert "h3" not in str(posterior.without("h3").summary())
    plain = combine(study.point, mean, sums)
    assert np.asarray(plain.draws().parameters["b"]).std() < spread / 2.0
    assert any("Study(local=)" in note for note in plain.notes)
    assert "name the parameters that differ" in str(plain.summary())
    assert "hospitals' records are unlike" in caplog.text
    with pytest.raises(ValueError, match="leave weights out"):
        combine(study.point, mean, sums, weights="precision", local=study.local)


def test_few_hospitals_and_other_differences_are_said(study):
    sums, mean = sums_of(study, [0.1, -0.1])
    few = combine(study.point, mean, sums, local=study.local)
    assert any("prior" in note for note in few.notes)
    assert np.quantile(few.draws().sds["b"], 0.95) > 0.8, "two hospitals leave the prior's width"
    whole = make_study({"w[0]": 0.3})
    assert whole.terms.identity == study.terms.identity, "hospitals need not agree on effects"
    sums, mean = sums_of(whole, [0.6, -0.6, 0.5, -0.5])
    other = combine(whole.point, mean, sums, local=whole.local)
    assert any("unlike beyond w[0]" in note for note in other.notes)


def test_effects_need_the_last_phase_and_names():
    with pytest.raises(ValueError, match="needs the last phase"):
        make_study(["b"], example=None, calibrated=None)
    with pytest.raises(TypeError, match="is a text"):
        make_study("b", example=None, calibrated=None)
