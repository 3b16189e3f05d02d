"""Scoring steps: what a record can do to them, their coordinates, and the fits that they make."""

import dataclasses
import functools

import numpy as np
import pytest
import scipy.linalg
from support import scoring as fits
from support.replay import SPECIAL
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi._tf import tf, tfp
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
    return x, y


@functools.cache
def sums_of_batch(name):
    """Compiled: x, y, mask -> the clipped sum and each record's values, at fixed random numbers.

    It comes with the variable of the parameters.
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

    return run, scoring.theta


def check_record_bounds(each, what):
    """What contract 3 states of each record, and zeros of those that do not count."""
    slack = 1.0 + 1e-5
    psi, rows, scale, lack_of_fit = (
        np.asarray(part, np.float64)
        for part in (
            each.gradients[0],
            each.extra["rows"],
            each.extra["scale"],
            each.extra["lack_of_fit"],
        )
    )
    assert np.linalg.norm(psi, axis=1).max() <= slack, what
    assert np.sum(rows**2, axis=(1, 2)).max() <= slack, what
    assert scale.min() >= 0.0, what
    assert scale.max() <= 3.0 * slack, what
    assert np.abs(lack_of_fit).max() <= slack, what
    dropped = ~each.kept.numpy()
    for part in (psi, rows, scale, lack_of_fit, each.losses.numpy()):
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
    run, variable = sums_of_batch(name)
    variable.assign(tf.fill(variable.shape, theta))
    mask = np.arange(len(x)) % 11 != 0
    (total,), each = run(x, y, mask)
    check_record_bounds(each, name)
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


def compiled(prior, likelihood, noise=1.0, **settings):
    """A model without an optimizer of its own, whose fits need no calibrated noise."""
    model = dpvi.DPVI(prior, likelihood, **settings)
    model.compile(ScoringOptimizer(noise), delta=1e-5, jit_compile=False, accountant="rdp")
    return model


@pytest.mark.parametrize(
    "name", ["bernoulli", "categorical", "normal", slow("poisson"), slow("ordinal")]
)
def test_neighbours_move_all_releases_by_no_more_than_is_stated(name):
    """C3, C8: each release by its own A and D; all together, over their noise, by the joint ones."""
    model = compiled(*LIKELIHOODS[name])
    x, y = ordinary()
    others, outcomes = adversarial()
    neighbours = {"x": others[::9], "y": outcomes[::9]}
    result = audit.replay(model, x, y, neighbours=neighbours, at=(0, 5), seed=3, num_steps=1)
    assert result.holds, result
    assert [each.name for each in result.sums] == [
        "gradient", "curvature", "scale", "lack_of_fit", "together",
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
      most_shift: The largest shift over a column's sd at which its outcomes stay finite a priori.
    """

    likelihood: object
    outcomes: object
    other: str = ""
    num: int = 1
    is_located: bool = False
    most_shift: float = 100.0


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
        most_shift=5.0,
    ),
    "gamma": Family(
        lambda params, x, _: gammas(params, x),
        lambda generator, eta: np.exp(eta) / 2.0 * generator.gamma(2.0, size=ROWS),
        "shape",
        most_shift=5.0,
    ),
    "negative binomial": Family(
        lambda params, x, _: negative_binomials(params, x),
        lambda generator, eta: generator.poisson(
            np.exp(eta) / 2.0 * generator.gamma(2.0, size=ROWS)
        ),
        "shape",
        most_shift=5.0,
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
    return tf.nest.map_structure(np.asarray, accumulated), fit.posterior(accumulated)


def quick_families(*names):
    return [name if name in names else slow(name) for name in FAMILIES]


@pytest.mark.parametrize("name", quick_families("logit", "normal"))
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
    for a, b in zip(tf.nest.flatten(accumulated), tf.nest.flatten(moved), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(posterior.mixture.locs * unit, other.mixture.locs)
    np.testing.assert_array_equal(posterior.mixture.scales * unit[:, None], other.mixture.scales)
    np.testing.assert_array_equal(posterior.shares, other.shares)
    assert str(posterior.checks) == str(other.checks)
