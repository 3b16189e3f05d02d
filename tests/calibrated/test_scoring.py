"""Scoring steps: what a record can do to them, their coordinates, and the fits that they make."""

import dataclasses
import functools
from unittest import mock

import numpy as np
import pytest
import scipy.linalg
import scipy.stats
from support import internals, statistics
from support import scoring as fits
from support.replay import SPECIAL
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.calibrated.centred import WIDER
from tfp_dpvi.calibrated.mixture import LinearLikelihood
from tfp_dpvi.calibrated.ranks import OutcomeRanks
from tfp_dpvi.gradients import StepSpec
from tfp_dpvi.optimizers import ScoringOptimizer

tfd = tfp.distributions


def as_float(array):
    return np.asarray(array, "float32")


def joint(**parts):
    return tfd.JointDistributionNamed(parts)


def normals(num):
    return tfd.Sample(tfd.Normal(0.0, 1.0), num)


# ---------------------------------------------------------------------- what a record can do


def three_classes(params, x):
    logits = tf.linalg.matmul(x, tf.reshape(params["w"], [2, 2]))
    return tfd.Categorical(logits=tf.pad(logits, [[0, 0], [1, 0]]), dtype=tf.float32)


LIKELIHOODS = {
    "bernoulli": (
        joint(w=normals(2)),
        lambda params, x: tfd.Bernoulli(
            logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32
        ),
    ),
    "categorical": (joint(w=normals(4)), three_classes),
    "ordinal": (
        joint(w=normals(2)),
        lambda params, x: tfd.OrderedLogistic(
            [-1.0, 0.5], tf.linalg.matvec(x, params["w"]), dtype=tf.float32
        ),
    ),
    "poisson": (
        joint(w=normals(2)),
        lambda params, x: tfd.Poisson(log_rate=tf.linalg.matvec(x, params["w"])),
    ),
    "normal": (
        joint(s=tfd.HalfNormal(1.0), w=normals(2)),
        lambda params, x: tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"]),
    ),
}  # fmt: skip
NUM = 12
VALUES = (0.0, 1.0, 2.0, 5.0, 7.0, 0.5, -1.0, 1e30, np.nan, np.inf)


def ordinary(seed=0):
    """Records that each of the likelihoods can have."""
    generator = np.random.default_rng(seed)
    return as_float(generator.normal(size=(NUM, 2))), as_float(generator.integers(2, size=NUM))


def adversarial():
    """Records of special values, of directions of any length, and of outcomes that are none."""
    generator = np.random.default_rng(0)
    ends = [*SPECIAL, 1.2e19, -1.6e19, 30.0, 88.0, 89.0, 700.0]
    grid = np.array([(a, b) for a in ends for b in (*ends[::5], 0.7)])
    lengths = 10.0 ** np.linspace(-30, 30, 121)[:, None]
    # Where squares of scores are nearly infinite.
    lengths = np.concatenate([lengths, 10.0 ** np.linspace(18.5, 19.5, 200)[:, None]])
    with np.errstate(over="ignore"):
        x = as_float(np.concatenate([grid, lengths * generator.normal(size=(len(lengths), 2))]))
    outcomes = np.array([*VALUES, *ends, 4.0, -4.0])
    y = as_float(outcomes[generator.integers(len(outcomes), size=len(x))])
    y[::3] = generator.integers(2, size=len(y[::3]))
    # Finite scores whose distances are infinite, if twins are on the other side.
    near = np.sqrt(np.finfo("float32").max) * np.linspace(0.1, 0.3, 2000)[:, None] * [1.0, 0.0]
    return np.concatenate([x, as_float(near)]), np.concatenate([y, as_float(np.full(2000, 4.0))])


@functools.cache
def sums_of_batch(name):
    """Compiled: x, y, mask -> the clipped sum and each record's values, at fixed random numbers.

    It comes with the scoring steps.
    """
    prior, likelihood = LIKELIHOODS[name]
    x, y = ordinary()
    scoring = fits.scoring_of(prior, likelihood, x, y, x)
    gradient = scoring.gradient(StepSpec(float(NUM), NUM))

    @tf.function(autograph=False)
    def run(x, y, mask):
        step = gradient.draw(tf.constant([1, 2], tf.int64))
        total, each = step.clipped_sum({"x": x, "y": y}, mask, tf.constant([5, 6], tf.int64))
        return total.tensors, each

    return run, scoring


def check_record_bounds(each, ranking, what):
    """What contract 3 states of each record, and zeros of those that do not count."""
    slack = 1.0 + 1e-5
    psi = np.asarray(each.gradients[0], np.float64)
    rows, scale, lack_of_fit, ranks, wider = (
        np.asarray(each.extra[name], np.float64)
        for name in ("rows", "scale", "lack_of_fit", "ranks", "wider")
    )
    assert np.linalg.norm(psi, axis=1).max() <= slack, what
    assert np.sum(rows**2, axis=(1, 2)).max() <= slack, what
    assert scale.min() >= 0.0, what
    assert scale.max() <= 3.0 * slack, what
    assert np.abs(lack_of_fit).max() <= slack, what
    if ranks.shape[1]:  # None where outcomes are enumerated.
        stated = OutcomeRanks(ranking).sensitivity.add_or_remove
        assert np.linalg.norm(ranks, axis=1).max() <= stated * slack, what
    assert np.linalg.norm(wider, axis=1).max() <= WIDER * slack, what
    dropped = ~each.kept.numpy()
    for part in (psi, rows, scale, lack_of_fit, ranks, wider, each.losses.numpy()):
        assert np.isfinite(part).all(), what
        np.testing.assert_array_equal(part[dropped], 0.0, err_msg=what)


QUICK = ("bernoulli", "categorical", "normal")


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in LIKELIHOODS])
@pytest.mark.parametrize("theta", [0.0, 0.3])
def test_no_record_passes_the_bounds(name, theta):
    """Among them NaN and infinities, scores whose squares are nearly infinite, and padding.

    Where all parameters are zero, records of any length have ordinary twins.
    """
    x, y = adversarial()
    run, scoring = sums_of_batch(name)
    scoring.theta.assign(tf.fill(scoring.theta.shape, theta))
    mask = np.arange(len(x)) % 11 != 0
    (total,), each = run(x, y, mask)
    check_record_bounds(each, scoring.likelihood.ranking, name)
    assert np.isfinite(total).all()
    kept = each.kept.numpy()
    assert not kept[~mask].any()
    assert not kept[np.isnan(x).any(axis=1) | np.isnan(y)].any()
    assert 30 < kept.sum() < len(x) - 30
    longest = np.linalg.norm(each.gradients[0], axis=1).max()
    assert longest > 0.99


@pytest.mark.parametrize("name", [name if name in QUICK else slow(name) for name in LIKELIHOODS])
def test_an_outcome_that_is_no_value_of_the_likelihood_counts_for_nothing(name):
    """Exactly: the sums are those without the record."""
    x, y = ordinary()
    run, _ = sums_of_batch(name)
    none = {
        "bernoulli": [5.0, 0.5, -1.0, 2.0, np.nan, np.inf],
        "categorical": [7.0, 3.0, 0.5, -1.0, np.nan, np.inf],
        "ordinal": [7.0, 3.0, 0.5, -1.0, np.nan, np.inf],
        "poisson": [np.nan, np.inf],
        "normal": [np.nan, np.inf],
    }[name]
    mask = np.ones(NUM, bool)
    mask[3] = False
    without = tf.nest.flatten(run(x, y, mask))
    mask[3] = True
    for value in none:
        y[3] = value
        for part, reference in zip(tf.nest.flatten(run(x, y, mask)), without, strict=True):
            np.testing.assert_array_equal(part, reference, err_msg=str(value))


def mean_at_truth(name):
    """psi of records that the likelihood draws, at the parameters that it drew them at."""
    prior, likelihood = LIKELIHOODS[name]
    size = 4000
    x = tf.constant(as_float(np.random.default_rng(0).normal(size=(size, 2))))
    scoring = fits.scoring_of(prior, likelihood, x.numpy(), as_float(np.ones(size)), x.numpy())
    scoring.theta.assign(tf.linspace(-0.4, 0.6, scoring.size))
    gradient = scoring.gradient(StepSpec(float(size), size))

    @tf.function(autograph=False)
    def run(key):
        seed = tf.cast(key, tf.int32)
        y = scoring.pairing.distribution(scoring.vector(), x).sample(seed=seed)
        step = gradient.draw(key)
        _, each = step.clipped_sum({"x": x, "y": y}, tf.fill([size], True), key + 1)
        return each.gradients[0], each.extra["lack_of_fit"], each.extra["ranks"]

    parts = [run(statistics.fresh_key()) for _ in range(5)]
    return (np.concatenate(part).astype(float) for part in zip(*parts, strict=True))


@pytest.mark.parametrize("name", [name if name == "normal" else slow(name) for name in LIKELIHOODS])
def test_at_the_truth_a_model_has_the_mean_zero(name):
    """Of psi, the lack of fit and ranks. 15 p-values against 1e-9: false alarms below 2e-8."""
    psi, lack_of_fit, ranks = mean_at_truth(name)
    total = psi.sum(axis=0)
    square = total @ np.linalg.solve(psi.T @ psi, total)
    statistics.plausible(scipy.stats.chi2.sf(square, len(total)), "psi")
    score = np.sqrt(len(psi)) * lack_of_fit.mean() / lack_of_fit.std()
    statistics.standard_score(score, "lack of fit")
    total = ranks.sum(axis=0)
    square = total @ np.linalg.pinv(ranks.T @ ranks, rcond=1e-6) @ total
    statistics.plausible(scipy.stats.chi2.sf(square, max(1, len(total) - 1)), "ranks")


def compiled(prior, likelihood, noise=1.0, **settings):
    """A model without an optimizer of its own, whose fits need no calibrated noise."""
    model = dpvi.DPVI(prior, likelihood, **settings)
    model.compile(ScoringOptimizer(noise), delta=1e-5, jit_compile=False, accountant="rdp")
    return model


@pytest.mark.parametrize(
    "name", ["bernoulli", "normal", *map(slow, ("categorical", "poisson", "ordinal"))]
)
def test_neighbours_move_all_releases_by_no_more_than_is_stated(name):
    """C3, C8: each release by its own A and D; all together, over their noise, by the joint ones."""
    model = compiled(*LIKELIHOODS[name])
    x, y = ordinary()
    others, outcomes = adversarial()
    neighbours = {"x": others[:-2000:9], "y": outcomes[:-2000:9]}
    result = audit.replay(model, x, y, neighbours=neighbours, at=(0, 5), seed=3, num_steps=1)
    assert result.holds, result
    with_twins = ["ranks"] if name in ("normal", "poisson") else []
    assert [each.name for each in result.sums] == [
        "gradient", "curvature", "scale", "lack_of_fit", *with_twins, "together",
    ]  # fmt: skip
    assert result.sums[0].presence > 0.99
    assert result.attained > 0.9


# ---------------------------------------------------------------------- in other units

ROWS = 1000


@dataclasses.dataclass(frozen=True)
class Units:
    """Columns x become `scale x + shift`, and outcomes y `outcome y + origin`."""

    scale: tuple[float, float] = (1.0, 1.0)
    shift: tuple[float, float] = (0.0, 0.0)
    outcome: float = 1.0
    origin: float = 0.0

    def matrix(self, num):
        """Returns M of the parameters that say the same: M beta, and `origin` more on intercepts.

        Args:
          num: The number of linear predictors, the first of beta are their intercepts.
        """
        eye = np.eye(num)
        slopes = [[eye / scale for scale in self.scale], np.divide(self.shift, self.scale)]
        below = scipy.linalg.block_diag(*slopes[0])
        right = np.concatenate([-away * eye for away in slopes[1]], axis=1)
        zeros = np.zeros((2 * num, num))
        return self.outcome * np.block([[eye, right], [zeros, below]])


def predictor(params, x):
    return params["beta"][0] + tf.linalg.matvec(x, params["beta"][1:])


def classes(params, x):
    slopes = tf.reshape(params["beta"][2:], [2, 2])
    logits = params["beta"][:2] + tf.linalg.matmul(x, slopes)
    return tfd.Categorical(logits=tf.pad(logits, [[0, 0], [1, 0]]), dtype=x.dtype)


def gammas(params, x):
    concentration = params["other"] * tf.ones_like(x[:, 0])
    return tfd.Gamma(concentration, concentration * tf.exp(-predictor(params, x)))


def negative_binomials(params, x):
    size = params["other"] * tf.ones_like(x[:, 0])
    return tfd.NegativeBinomial(size, logits=predictor(params, x) - tf.math.log(size))


@dataclasses.dataclass(frozen=True)
class Family:
    """A likelihood, whose outcomes are drawn from a generator and predictors.

    Attributes:
      likelihood: See `DPVI`; with the units as a third argument.
      outcomes: `outcomes(generator, predictors)`.
      other: What the parameter besides the predictors' is: "scale", "shape" or nothing.
      num: The number of predictors.
      is_located: Whether outcomes have an origin and a unit.
      has_rate: Whether outcomes at large predictors are infinite: then a prior must not allow these
        at the synthetic inputs of order 1 that a likelihood is checked at.
    """

    likelihood: object
    outcomes: object
    other: str = ""
    num: int = 1
    is_located: bool = False
    has_rate: bool = False


FAMILIES = {
    "logit": Family(
        lambda params, x, _: tfd.Bernoulli(logits=predictor(params, x), dtype=x.dtype),
        lambda generator, eta: generator.random(ROWS) < 1.0 / (1.0 + np.exp(-eta)),
    ),
    "probit": Family(
        lambda params, x, _: tfd.ProbitBernoulli(probits=predictor(params, x), dtype=x.dtype),
        lambda generator, eta: generator.normal(size=ROWS) < eta,
    ),
    "categorical": Family(
        lambda params, x, _: classes(params, x),
        lambda generator, eta: generator.integers(3, size=ROWS),
        num=2,
    ),
    "normal": Family(
        lambda params, x, units: tfd.Normal(
            predictor(params, x), tf.cast(0.7 * units.outcome, x.dtype)
        ),
        lambda generator, eta: eta + 0.7 * generator.normal(size=ROWS),
        is_located=True,
    ),
    "student": Family(
        lambda params, x, _: tfd.StudentT(
            tf.cast(4.0, x.dtype), predictor(params, x), params["other"]
        ),
        lambda generator, eta: eta + 0.5 * generator.standard_t(4.0, size=ROWS),
        "scale",
        is_located=True,
    ),
    "poisson": Family(
        lambda params, x, _: tfd.Poisson(log_rate=predictor(params, x)),
        lambda generator, eta: generator.poisson(np.exp(eta)),
        has_rate=True,
    ),
    "gamma": Family(
        lambda params, x, _: gammas(params, x),
        lambda generator, eta: np.exp(eta) / 2.0 * generator.gamma(2.0, size=ROWS),
        "shape",
        has_rate=True,
    ),
    "negative binomial": Family(
        lambda params, x, _: negative_binomials(params, x),
        lambda generator, eta: generator.poisson(
            np.exp(eta) / 2.0 * generator.gamma(2.0, size=ROWS)
        ),
        "shape",
        has_rate=True,
    ),
}


def in_units(name, units, dtype):
    """Prior, likelihood, x, y and public inputs of one family: the same model and data in any units."""
    family = FAMILIES[name]
    generator = np.random.default_rng(1)
    # As float32 has them, so that float64 sees the same.
    x, inputs = (as_float(generator.normal(size=(num, 2))) for num in (ROWS, 300))
    y = as_float(family.outcomes(generator, 0.2 + x @ [0.5, -0.3]))
    if not family.is_located:
        units = dataclasses.replace(units, outcome=1.0, origin=0.0)

    def constant(value):
        return np.asarray(value, dtype)

    sds = np.repeat([2.0, 1.0, 1.0], family.num)
    loc = np.repeat([units.origin, 0.0, 0.0], family.num)
    scale = tf.linalg.LinearOperatorFullMatrix(constant(units.matrix(family.num) * sds))
    parts = {"beta": tfd.MultivariateNormalLinearOperator(constant(loc), scale)}
    if family.other:
        unit = units.outcome if family.other == "scale" else 1.0
        parts["other"] = tfd.LogNormal(constant(np.log(unit)), constant(1.0))
    columns = [
        constant(part * np.asarray(units.scale) + np.asarray(units.shift)) for part in (x, inputs)
    ]
    return (
        joint(**parts),
        lambda params, x: family.likelihood(params, x, units),
        columns[0],
        constant(y * float(units.outcome) + units.origin),
        columns[1],
    )


@functools.cache
def fit_in_units(name, units, dtype="float32"):
    """The accumulators of a fit with one seed, its posterior and its scoring steps."""
    arguments = in_units(name, units, dtype)
    fit = fits.Fits(*arguments)
    accumulated = fit.run(*arguments[2:4], seed=3)
    return dict(tf.nest.map_structure(np.asarray, accumulated)), fit.posterior(accumulated)


def quick_families(*names):
    return [name if name in names else slow(name) for name in FAMILIES]


@pytest.mark.parametrize("name", quick_families("normal"))
def test_powers_of_two_change_no_bit_of_what_is_released(name):
    """Of columns and outcomes: the whole path, its posterior and its checks."""
    family = FAMILIES[name]
    # A logarithm of the scale is rounded elsewhere.
    outcome = 1.0 if family.other == "scale" else 2.0**12
    units = Units((8.0, 2.0**-5), outcome=outcome)
    (accumulated, posterior), (moved, other) = (
        fit_in_units(name, each) for each in (Units(), units)
    )
    unit = np.diag(units.matrix(family.num)) / (1.0 if family.is_located else outcome)
    unit = np.concatenate([unit, np.ones(int(bool(family.other)))])
    moved["curvature"]["theta"] = moved["curvature"]["theta"] / unit
    # Of densities, whose logarithms have a constant of the units, some are tied but for rounding.
    both = [dict(part) for part in (accumulated, moved)]
    np.testing.assert_allclose(*[part.pop("ranks", np.zeros(1)) / ROWS for part in both], atol=0.01)
    accumulated, moved = both
    for a, b in zip(tf.nest.flatten(accumulated), tf.nest.flatten(moved), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(posterior.mixture.locs * unit, other.mixture.locs)
    np.testing.assert_array_equal(posterior.mixture.scales * unit[:, None], other.mixture.scales)
    np.testing.assert_array_equal(posterior.shares, other.shares)
    checks = [dataclasses.replace(each.checks, ranks=0.0) for each in (posterior, other)]
    assert str(checks[0]) == str(checks[1])


def other_units(name):
    """Units that are no powers of two, of columns whose means are 100 and -40 sd from zero."""
    if FAMILIES[name].has_rate:
        return Units((3.7, 0.3), (7.4, -0.3))
    return Units((3.7, 0.013), (370.0, -0.52), outcome=1234.5, origin=9e3)


def whitened_records(name, units):
    """psi and the rows of the curvature's sum, of records of outcomes in float64.

    The coordinates are those of the public inputs, and the parameters at the prior's mean.
    """
    arguments = in_units(name, units, "float64")
    fit = fits.Fits(*arguments)
    fit.scoring.advance(0, 100, {}, fit.mechanism)

    @tf.function(autograph=False)
    def run(x, y):
        step = fit.mechanism.gradient.draw(tf.constant([1, 2], tf.int64))
        mask = tf.fill([ROWS], True)
        _, each = step.clipped_sum({"x": x, "y": y}, mask, tf.constant([5, 6], tf.int64))
        return each.gradients[0], each.extra["rows"]

    return run(*arguments[2:4])


@pytest.mark.parametrize("name", quick_families("normal"))
def test_other_units_change_no_whitened_score(name):
    """W g is the same to 1e-6 in float64, also where columns are 100 sd from zero."""
    results = [whitened_records(name, units) for units in (Units(), other_units(name))]
    for part, moved in zip(*results, strict=True):
        assert np.abs(part).max() > 0.1
        np.testing.assert_allclose(moved, part, atol=1e-6)


@pytest.mark.slow  # Of the same factor: whole fits in powers of two, scores in any units.
@pytest.mark.parametrize("name", FAMILIES)
def test_other_units_change_no_posterior(name):
    """In float32: means within .05 of a standard deviation, these within 3 %, and the warnings."""
    family, units = FAMILIES[name], other_units(name)
    (_, posterior), (_, moved) = (fit_in_units(name, each) for each in (Units(), units))
    assert moved.checks.warnings == posterior.checks.warnings
    size = 3 * family.num
    to_units = np.eye(size + bool(family.other))
    origin = np.zeros(len(to_units))
    if not family.is_located:
        units = dataclasses.replace(units, outcome=1.0, origin=0.0)
    to_units[:size, :size] = units.matrix(family.num)
    origin[: family.num] = units.origin
    if family.other == "scale":
        origin[size] = np.log(units.outcome)
    back = np.linalg.inv(to_units)
    sds = np.sqrt(np.diag(posterior.mixture.covariance))
    means = back @ (moved.mixture.mean - origin)
    np.testing.assert_array_less(np.abs(means - posterior.mixture.mean) / sds, 0.05)
    found = np.sqrt(np.diag(back @ moved.mixture.covariance @ back.T))
    np.testing.assert_allclose(found / sds, 1.0, atol=0.03)


# ---------------------------------------------------------------------- whole fits

IN_DOLLARS, INCOMES = 1e4, 500


def incomes(params, x):
    return tfd.Normal(params["a"] + params["b"] * x, params["sigma"])


def without_noise():
    """Noise on scores and on the curvature is left out of the posterior."""
    real = LinearLikelihood.from_window

    def exact(window, slopes, matrices, index):
        means = [np.repeat(part.mean(0)[None], len(part), axis=0) for part in (slopes, matrices)]
        return real(dataclasses.replace(window, score_sd=1e-6), *means, index)

    return mock.patch.object(LinearLikelihood, "from_window", staticmethod(exact))


@pytest.mark.parametrize("num_sets", [5, slow(16)])
def test_intervals_in_dollars_cover(num_sets):
    """About nine of ten intervals of 90 % do, and truths are not too many sds away.

    If errors are normal and independent, either is a false alarm with a probability of at most
    1e-3. Priors are 200 times as wide as what the records say, and intervals a few times: the
    noise is so large that a column may be unlike the public one, unseen.
    """
    num = 3 * num_sets
    least = scipy.stats.binom.ppf(1e-3, num, 0.9)
    most = scipy.stats.chi2.isf(1e-3, num)
    prior = joint(
        a=tfd.Normal(0.0, 10.0 * IN_DOLLARS),
        b=tfd.Normal(0.0, 10.0 * IN_DOLLARS),
        sigma=tfd.LogNormal(np.float32(np.log(IN_DOLLARS)), 1.0),
    )
    empty = as_float(np.zeros(INCOMES))
    generator = np.random.default_rng(0)
    inputs = as_float(generator.normal(size=300))
    fit = fits.Fits(prior, incomes, empty, empty, inputs, epsilon=0.3)
    covered, squares, faulty, widths = [], [], [], []

    def squared_distances(posterior, truth):
        away = posterior.mixture.mean - truth
        return away**2 / np.diag(posterior.mixture.covariance)

    for number in range(num_sets):
        a, b = IN_DOLLARS * generator.normal(size=2) * [3.0, 1.0]
        sigma = IN_DOLLARS * np.exp(0.3 * generator.normal())
        truth = [a, b, np.log(sigma)]
        x = generator.normal(size=INCOMES)
        y = a + b * x + sigma * generator.normal(size=INCOMES)
        accumulated = fit.run(as_float(x), as_float(y), seed=number)
        posterior = fit.posterior(accumulated)
        low, high = fits.intervals(posterior)
        covered.append((low <= truth) & (truth <= high))
        squares.append(squared_distances(posterior, truth))
        exact = np.array([sigma, sigma, np.sqrt(0.5)]) / np.sqrt(INCOMES)
        widths.append((high - low) / (2.0 * 1.645 * exact))
        with without_noise():
            faulty.append(squared_distances(fit.posterior(accumulated), truth))
    assert np.sum(covered) >= least
    assert np.sum(squares) < most
    assert np.sum(faulty) > most, "a posterior without the noise would pass"
    assert np.median(widths) < 9.0


def test_without_a_budget_the_posterior_is_the_prior_and_no_wider():
    """At epsilon .01 nothing is learned: of a normal prior, and of one on positive numbers."""
    prior = joint(s=tfd.HalfNormal(2.0), w=tfd.Sample(tfd.Normal(1.0, 3.0), 2))

    def likelihood(params, x):
        return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"])

    x = as_float(np.random.default_rng(0).normal(size=(50, 2)))
    y = as_float(x @ [2.0, -1.0])
    fit = fits.Fits(prior, likelihood, x, y, x, epsilon=0.01)
    posterior = fit.posterior(fit.run(x, y, seed=1))
    draws = posterior.distribution.sample(4000, seed=tf.constant([1, 2]))
    others = prior.sample(20_000, seed=tf.constant([3, 4]))
    for name in ("s", "w"):
        low, middle, high = np.quantile(draws[name], [0.05, 0.5, 0.95], axis=0)
        expected = np.quantile(others[name], [0.05, 0.5, 0.95], axis=0)
        width = expected[2] - expected[0]
        np.testing.assert_allclose((high - low) / width, 1.0, atol=0.15)
        np.testing.assert_allclose((middle - expected[1]) / width, 0.0, atol=0.1)
    check_no_test_fails(posterior.checks)


def check_no_test_fails(checks):
    """At most four p-values below 1e-3: false alarms of .4 %. Limits without chance hold."""
    assert min(checks.p_values.values()) > 1e-3
    by_chance = ("the two halves", "the likelihood")
    assert [each for each in checks.warnings if not each.startswith(by_chance)] == []


# ---------------------------------------------------------------------- without an optimizer


@dpvi.register("scoring_prior")
def line_prior():
    return joint(s=tfd.HalfNormal(2.0), w=normals(2))


@dpvi.register("scoring_likelihood")
def line(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), params["s"])


def records(num, seed=0):
    generator = np.random.default_rng(seed)
    x = as_float(generator.normal(size=(num, 2)))
    return x, as_float(x @ [0.7, -0.3] + 0.5 * generator.normal(size=num))


def spent(model):
    return model.privacy_ledger.num_releases


def levels(params, x):
    return tfd.Normal(tf.gather(params["w"], x), params["s"])


def test_integers_have_no_standard_inputs():
    x, y = records(200)
    model = dpvi.DPVI(line_prior, levels)
    model.compile(epsilon=1.0, delta=1e-5, accountant="rdp")
    with pytest.raises(ValueError, match="x, or a part of it, has integers"):
        model.fit((x[:, 0] > 0).astype("int32"), y, verbose=0)
    assert spent(model) == 0


def truncated(params):
    return tfd.TruncatedNormal(params["w"][0], params["s"], 0.0, np.inf)


def floored(params, x):
    return tfd.Normal(tf.gather(params["w"], tf.cast(x[:, 0], tf.int32)), params["s"])


@pytest.mark.parametrize(
    ("likelihood", "message"),
    [
        (floored, "^public_inputs: the likelihood fails"),
        (truncated, "^likelihood: it has no finite"),
    ],
)
def test_where_a_fit_cannot_start_is_said(likelihood, message):
    """An index of standard normal numbers, and a density without gradient, which has no x."""
    x, y = records(200)
    model = dpvi.DPVI(line_prior, likelihood)
    model.compile(epsilon=1.0, delta=1e-5, accountant="rdp")
    data = (np.abs(y),) if likelihood is truncated else (np.zeros_like(x), y)
    with pytest.raises(ValueError, match=message) as refusal:
        model.fit(*data, verbose=0)
    assert str(refusal.value).count("\n") == 1
    assert spent(model) == 0


def test_what_is_refused_costs_nothing():
    x, y = records(200)
    model = dpvi.DPVI(line_prior, line)
    with pytest.raises(ValueError, match="l2_norm_clip"):
        model.compile(l2_norm_clip=1.0, epsilon=1.0, delta=1e-5)
    model.compile(epsilon=1.0, delta=1e-5, accountant="rdp")
    for arguments, words in (
        ({"batch_size": 200}, "1 steps are too few for scoring steps, which need 60"),
        ({"batch_size": 20, "epochs": 5}, "50 steps are too few"),
        ({"public_inputs": x[:, :1]}, "public_inputs have the shapes and dtypes"),
        ({"public_inputs": {"x": x}}, "public_inputs"),
        ({"sample_weight": y}, "sample_weight"),
    ):
        with pytest.raises(ValueError, match=words):
            model.fit(**{"x": x, "y": y, "verbose": 0, **arguments})
    assert spent(model) == 0
    assert model.privacy_report().epsilon == 0.0
    model.compile("adam", l2_norm_clip=1.0, epsilon=1.0, delta=1e-5)
    with pytest.raises(ValueError, match="public_inputs are for scoring steps"):
        model.fit(x, y, public_inputs=x, verbose=0)
    assert spent(model) == 0


def test_noise_may_be_given_instead_of_a_budget():
    model = dpvi.DPVI(line_prior, line)
    model.compile(noise_multiplier=20.0, delta=1e-5)
    assert isinstance(model.optimizer, ScoringOptimizer)
    assert model.optimizer.noise_multiplier == 20.0


@pytest.fixture(scope="module")
def fitted():
    model = dpvi.DPVI(line_prior, line, seed=1)
    model.compile(epsilon=2.0, delta=1e-5, planned_epochs=2, accountant="rdp")
    x, y = records(600)
    model.fit(x, y, public_inputs=x[:100], verbose=0)
    return model


def test_a_fit_needs_no_settings(fitted):
    """Full batches at half of the budget, and a posterior that holds the truth."""
    assert spent(fitted) == 160
    assert fitted.privacy_plan.metrics == ("curvature", "scale", "lack_of_fit", "ranks", "wider")
    draws = fitted.posterior_sample(4000, seed=0)
    for name, truth in (("w", [0.7, -0.3]), ("s", 0.5)):
        away = (np.mean(draws[name], axis=0) - truth) / np.std(draws[name], axis=0)
        assert np.abs(away).max() < 4.0  # Three parameters: false alarms below 2e-4.
        assert np.max(np.std(draws[name], axis=0)) < 0.3
    summary = fitted.posterior_summary()
    assert summary.names == ["s", "w[0]", "w[1]"]
    check_no_test_fails(summary.checks)
    assert len(fitted.caveats) == len(summary.checks.warnings)


def test_a_saved_model_has_the_same_posterior(fitted, tmp_path):
    """Its positive parameter is on the logarithm's scale, where TFP's own is another."""
    fitted.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras")
    for model in (fitted, loaded):
        assert isinstance(model.optimizer, ScoringOptimizer)
    drawn = [model.posterior.sample(50, seed=(0, 1)) for model in (fitted, loaded)]
    for name in ("s", "w"):
        np.testing.assert_array_equal(drawn[0][name], drawn[1][name])
    assert str(loaded.posterior_summary()) == str(fitted.posterior_summary())
    assert spent(loaded) == 160


def test_saving_reads_no_surrogate(fitted, tmp_path, caplog):
    """Keras reads all attributes, which warned of a surrogate that nobody had asked for."""
    unfitted = compiled(line_prior, line)
    for number, model in enumerate((fitted, unfitted)):
        model.save(tmp_path / f"{number}.keras")
    assert "surrogate_posterior:" not in caplog.text
    assert "posterior: there is none" not in caplog.text
    assert fitted.surrogate_posterior is not None
    assert caplog.text.count("surrogate_posterior:") == 1


def test_weights_from_elsewhere_have_no_posterior(fitted, tmp_path):
    fitted.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras")
    loaded.set_weights(loaded.get_weights())
    assert loaded.posterior is loaded.prior


def test_fits_go_on_and_may_have_other_records(fitted):
    """From where the last one ended; a public number of records that changed is that of the next."""
    x, y = records(800, seed=1)
    before = fitted.posterior
    fitted.fit(x, y, verbose=0)
    assert spent(fitted) == 320
    assert fitted.privacy_report().epsilon == pytest.approx(2.0, rel=0.01)
    assert internals.mechanism_of(fitted).num_records == 800
    assert fitted.posterior is not before
    draws = fitted.posterior_sample(4000, seed=0)
    away = (np.mean(draws["w"], axis=0) - [0.7, -0.3]) / np.std(draws["w"], axis=0)
    assert np.abs(away).max() < 4.0
    with pytest.raises(dpvi.privacy.BudgetExhaustedError):
        fitted.fit(x, y, verbose=0)


@pytest.mark.slow
def test_batches_give_a_posterior_too():
    """Of a quarter of the records: the sampling adds to the variance.

    One fit in a hundred says that its halves differ; that of seed 1 does.
    """
    model = compiled(line_prior, line, noise=20.0, seed=2)
    x, y = records(800)
    model.fit(x, y, batch_size=200, epochs=40, public_inputs=x[:100], verbose=0)
    assert spent(model) == 160
    draws = model.posterior_sample(4000, seed=0)
    away = (np.mean(draws["w"], axis=0) - [0.7, -0.3]) / np.std(draws["w"], axis=0)
    assert np.abs(away).max() < 4.0
    assert np.max(np.std(draws["w"], axis=0)) < 0.1
    assert model.caveats == ()


@pytest.mark.slow
def test_without_noise_it_is_nearly_the_exact_posterior():
    """A clip of its information's size costs a little; nothing warns."""
    model = compiled(line_prior, line, noise=0.0, seed=1)
    x, y = records(1000)
    model.fit(x, y, public_inputs=x[:300], verbose=0)
    draws = model.posterior_sample(4000, seed=0)
    exact = 0.5 / np.sqrt(1000)
    least_squares = np.linalg.lstsq(x, y, rcond=None)[0]
    np.testing.assert_allclose(np.std(draws["w"], axis=0) / exact, 1.15, atol=0.15)
    away = (np.mean(draws["w"], axis=0) - least_squares) / exact
    assert np.abs(away).max() < 1.5
    assert model.caveats == ()


def test_coordinates_that_cannot_be_formed_do_not_end_a_fit(monkeypatch):
    """Its budget was spent; before the first step nothing is."""
    arguments = in_units("normal", Units(), "float32")
    fit = fits.Fits(*arguments)
    called = []

    def fail(*_, **__):
        called.append(1)
        raise ValueError("array must not contain infs or NaNs")

    monkeypatch.setattr(fit.scoring, "_see_progress", fail)
    posterior = fit.posterior(fit.run(*arguments[2:4], seed=1))
    assert called
    assert np.isfinite(posterior.mixture.mean).all()
    monkeypatch.setattr(fit.scoring, "_begin", fail)
    with pytest.raises(ValueError, match="array"):
        fit.run(*arguments[2:4], seed=1)
