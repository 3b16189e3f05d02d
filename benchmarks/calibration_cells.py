"""The models, inputs and sizes of the calibration study.

A cell is a model, a number of records and an epsilon, such as `logistic5-1000-0.3`. The prior of
each model is one that a user might take, and the true parameters are drawn from it.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

tfd = tfp.distributions

Draw = Callable[[np.random.Generator, int], Any]
"""`draw(generator, size)` returns inputs of `size` records."""


@dataclasses.dataclass(frozen=True)
class Model:
    """A model with inputs.

    Attributes:
      make: Returns the prior and the likelihood.
      inputs: Draws the private inputs.
      public: Draws the public ones.
      sizes: The numbers of records.
      epsilons: The epsilons.
      outcomes: Draws outcomes that do not follow the likelihood,
        `outcomes(params, x, generator)`; or None.
    """

    make: Callable[[], tuple[Any, Any]]
    inputs: Draw
    public: Draw
    sizes: tuple[int, ...] = (5000,)
    epsilons: tuple[float, ...] = (1.0, 3.0)
    outcomes: Callable[[Any, Any, np.random.Generator], np.ndarray] | None = None


# ---------------------------------------------------------------------- models


def eta(params, x):
    return params["b"] + tf.linalg.matvec(x, params["w"])


def coefficients(width, scale=1.0, intercept=(0.0, 1.0)):
    """Returns the priors of an intercept and of `width - 1` slopes."""
    return {"b": tfd.Normal(*intercept), "w": tfd.Sample(tfd.Normal(0.0, scale), width - 1)}


def bernoulli(params, x):
    return tfd.Bernoulli(logits=eta(params, x), dtype=tf.float32)


def logistic(width, scale=1.0, intercept=None):
    prior = coefficients(width, scale, (0.0, scale if intercept is None else intercept))
    return tfd.JointDistributionNamed(prior), bernoulli


def rare(width):
    """A few per cent of ones."""
    return tfd.JointDistributionNamed(coefficients(width, 0.5, (-3.5, 0.5))), bernoulli


def linear(width, unit=1.0, intercept=1.0, noise=(0.0, 0.5)):
    """A linear regression whose outcomes are measured in units of 1 / `unit`."""
    prior = {
        **coefficients(width, unit, (0.0, intercept * unit)),
        "s": tfd.LogNormal(noise[0] + math.log(unit), noise[1]),
    }
    return tfd.JointDistributionNamed(prior), lambda p, x: tfd.Normal(eta(p, x), p["s"])


def student_t(width):
    prior = {**coefficients(width), "s": tfd.LogNormal(0.0, 0.5)}
    return tfd.JointDistributionNamed(prior), lambda p, x: tfd.StudentT(4.0, eta(p, x), p["s"])


def gamma(width):
    prior = {**coefficients(width, 0.5), "k": tfd.LogNormal(0.5, 0.5)}

    def likelihood(params, x):
        return tfd.Gamma(params["k"], params["k"] * tf.exp(-eta(params, x)))

    return tfd.JointDistributionNamed(prior), likelihood


def weibull(width):
    """The prior of the shape is not normal in any coordinates."""
    prior = {**coefficients(width, 0.5), "k": tfd.Gamma(4.0, 2.0)}
    return tfd.JointDistributionNamed(prior), lambda p, x: tfd.Weibull(p["k"], tf.exp(eta(p, x)))


def multinomial(width, classes):
    normal = tfd.Normal(0.0, 1.0)
    prior = {
        "b": tfd.Sample(normal, classes - 1),
        "w": tfd.Sample(normal, [width, classes - 1]),
    }

    def likelihood(params, x):
        logits = params["b"] + tf.linalg.matmul(x, params["w"])
        return tfd.Categorical(logits=tf.concat([tf.zeros_like(logits[:, :1]), logits], axis=-1))

    return tfd.JointDistributionNamed(prior), likelihood


def probit(width):
    prior = tfd.JointDistributionNamed(coefficients(width))
    return prior, lambda p, x: tfd.ProbitBernoulli(probits=eta(p, x), dtype=tf.float32)


def poisson(width):
    prior = tfd.JointDistributionNamed(coefficients(width, 0.3, (1.0, 0.5)))
    return prior, lambda p, x: tfd.Poisson(log_rate=eta(p, x))


def negative_binomial(width):
    prior = {**coefficients(width, 0.3, (1.0, 0.5)), "r": tfd.LogNormal(1.0, 0.5)}

    def likelihood(params, x):
        return tfd.NegativeBinomial(params["r"], logits=eta(params, x) - tf.math.log(params["r"]))

    return tfd.JointDistributionNamed(prior), likelihood


def hierarchical(groups, width):
    prior = tfd.JointDistributionNamed(
        {
            "mu": tfd.Normal(0.0, 1.0),
            "tau": tfd.LogNormal(-0.5, 0.5),
            "u": lambda mu, tau: tfd.Sample(tfd.Normal(mu, tau), groups),
            "w": tfd.Sample(tfd.Normal(0.0, 1.0), width),
        }
    )

    def likelihood(params, x):
        logits = tf.gather(params["u"], x["group"]) + tf.linalg.matvec(x["x"], params["w"])
        return tfd.Bernoulli(logits=logits, dtype=tf.float32)

    return prior, likelihood


def two_way(rows, columns):
    """Effects of two factors, whose levels' sums the likelihood does not tell from the intercept."""
    prior = {
        "b": tfd.Normal(0.0, 1.0),
        "u": tfd.Sample(tfd.Normal(0.0, 0.7), rows),
        "v": tfd.Sample(tfd.Normal(0.0, 0.7), columns),
    }

    def likelihood(params, x):
        effects = tf.gather(params["u"], x["row"]) + tf.gather(params["v"], x["column"])
        return tfd.Bernoulli(logits=params["b"] + effects, dtype=tf.float32)

    return tfd.JointDistributionNamed(prior), likelihood


# ---------------------------------------------------------------------- inputs


def normals(scales, mean=0.0):
    def draw(generator, size):
        return (mean + generator.normal(size=(size, len(scales))) * scales).astype("float32")

    return draw


def autoregressive(width, correlation=0.9):
    """Columns of variance 1, neighbours with this correlation."""

    def draw(generator, size):
        columns = generator.normal(size=(size, width))
        for place in range(1, width):
            fresh = math.sqrt(1.0 - correlation**2) * columns[:, place]
            columns[:, place] = correlation * columns[:, place - 1] + fresh
        return columns.astype("float32")

    return draw


def collinear(generator, size):
    """Three columns, the first of them once more, and a constant."""
    columns = generator.normal(size=(size, 3))
    constant = np.ones([size, 1])
    return np.concatenate([columns, columns[:, :1], constant], axis=1).astype("float32")


def dummies(shares):
    """Dummies of all levels but the first, and two normal columns."""

    def draw(generator, size):
        levels = generator.choice(len(shares), p=shares / np.sum(shares), size=size)
        indicators = np.eye(len(shares))[levels][:, 1:]
        columns = generator.normal(size=(size, 2))
        return np.concatenate([indicators, columns], axis=1).astype("float32")

    return draw


def lognormals(width):
    """Skewed columns."""
    return lambda generator, size: np.exp(generator.normal(size=(size, width))).astype("float32")


def half_normals(width):
    """What a user may take for skewed columns."""
    return lambda generator, size: np.abs(generator.normal(size=(size, width))).astype("float32")


def with_outliers(width, share=0.01, times=10.0):
    """Normal columns, of which some records' are far out."""

    def draw(generator, size):
        far = np.where(generator.random(size) < share, times, 1.0)
        return (far[:, None] * generator.normal(size=(size, width))).astype("float32")

    return draw


def with_groups(groups, width):
    def draw(generator, size):
        x = generator.normal(size=(size, width)).astype("float32")
        return {"group": generator.integers(groups, size=size).astype("int32"), "x": x}

    return draw


def with_value(share, width):
    """Normal columns after one of zeros and ones, of which this share are ones."""

    def draw(generator, size):
        x = generator.normal(size=(size, width))
        x[:, 0] = generator.random(size) < share
        return x.astype("float32")

    return draw


def with_pair(correlation, width):
    """Normal columns of which the first two have a correlation."""

    def draw(generator, size):
        x = generator.normal(size=(size, width))
        x[:, 0] = correlation * x[:, 1] + np.sqrt(1.0 - correlation**2) * x[:, 0]
        return x.astype("float32")

    return draw


def with_factors(rows, columns):
    def draw(generator, size):
        return {
            "row": generator.integers(rows, size=size).astype("int32"),
            "column": generator.integers(columns, size=size).astype("int32"),
        }

    return draw


def overdispersed(size):
    """Counts with the mean of `poisson`, negative binomial of this size."""

    def draw(params, x, generator):
        mean = np.exp(eta(params, x).numpy().astype("float64"))
        return generator.poisson(generator.gamma(size, mean / size)).astype("float32")

    return draw


def zero_inflated(share):
    """Counts with the mean of `poisson`, of which some are zero whatever the inputs."""

    def draw(params, x, generator):
        mean = np.exp(eta(params, x).numpy().astype("float64")) / (1.0 - share)
        counts = generator.poisson(mean)
        return np.where(generator.random(len(mean)) < share, 0, counts).astype("float32")

    return draw


def heteroscedastic(params, x, generator):
    """Outcomes of `linear` whose scale grows with the first column, of the same mean square."""
    mean = eta(params, x).numpy().astype("float64")
    scale = params["s"].numpy() * np.exp(0.5 * np.asarray(x)[:, 0] - 0.25)
    return (mean + scale * generator.normal(size=len(mean))).astype("float32")


# ---------------------------------------------------------------------- cells

FOUR = np.ones(4)
NINETEEN = np.ones(19)
SCALED = np.array([3.0, 1.0, 0.3, 0.1])
RARE_LEVELS = np.array([0.5, 0.25, 0.12, 0.06, 0.03, 0.02, 0.012, 0.008])
UNCENTRED = normals(10.0 * FOUR, 50.0)
EPSILONS = (0.3, 1.0, 3.0)


def same(make, inputs, *sizes, **settings):
    """Returns a model whose public inputs are like the private ones."""
    return Model(make, inputs, inputs, sizes or (5000,), **settings)


# Everything of order 1, and public inputs mostly like the private ones: the first 29 cells.
ORDER_ONE = {
    "logistic5": same(lambda: logistic(5), normals(FOUR), 1000, 5000, 20_000, epsilons=EPSILONS),
    "logistic20": same(lambda: logistic(20), normals(NINETEEN), 5000, 20_000, epsilons=EPSILONS),
    "linear": same(lambda: linear(5), normals(FOUR), epsilons=EPSILONS),
    "poisson": same(lambda: poisson(5), normals(FOUR), epsilons=EPSILONS),
    "negbin": same(lambda: negative_binomial(5), normals(FOUR), epsilons=EPSILONS),
    "vague5": same(lambda: logistic(5, 4.0), normals(FOUR), epsilons=(1.0,)),
    "scaled5": same(lambda: logistic(5), normals(SCALED), epsilons=(1.0,)),
    "wrong5": Model(lambda: logistic(5), normals(SCALED), normals(FOUR), epsilons=(1.0,)),
    "rare20": same(lambda: rare(20), normals(NINETEEN), 20_000, epsilons=(1.0,)),
    "groups": same(lambda: hierarchical(20, 3), with_groups(20, 3), 20_000, epsilons=(1.0,)),
}
# Other units, shifts, correlations, families and frequencies.
OTHER = {
    "linear_dollars": same(lambda: linear(5, 1e4), normals(FOUR)),
    "linear_thousandths": same(lambda: linear(5, 1e-3), normals(FOUR)),
    "uncentred_linear": same(lambda: linear(5, 1.0, 10.0, (1.0, 1.0)), UNCENTRED),
    "uncentred_logistic": same(lambda: logistic(5, 0.03, 3.0), UNCENTRED),
    "ar10": same(lambda: logistic(11), autoregressive(10)),
    "ar30": same(lambda: logistic(31, 0.5), autoregressive(30), 10_000),
    "ar10_independent": Model(lambda: logistic(11), autoregressive(10), normals(np.ones(10))),
    "collinear": same(lambda: logistic(6), collinear),
    "student_t": same(lambda: student_t(5), normals(FOUR)),
    "gamma": same(lambda: gamma(5), normals(FOUR)),
    "weibull": same(lambda: weibull(5), normals(FOUR)),
    "multinomial": same(lambda: multinomial(3, 3), normals(np.ones(3))),
    "probit": same(lambda: probit(5), normals(FOUR)),
    "two_way": same(lambda: two_way(8, 6), with_factors(8, 6)),
    "rare_levels": same(lambda: logistic(10), dummies(RARE_LEVELS)),
    "rare_levels_equal": Model(lambda: logistic(10), dummies(RARE_LEVELS), dummies(np.ones(8))),
    "poisson_size1.5": same(lambda: poisson(5), normals(FOUR), outcomes=overdispersed(1.5)),
    "poisson_size5": same(lambda: poisson(5), normals(FOUR), outcomes=overdispersed(5.0)),
}
# Public inputs or likelihoods that are wrong: intervals cover, or the fit warns.
WRONG = {
    "lognormal": Model(lambda: logistic(6), lognormals(5), half_normals(5)),
    "outliers": Model(lambda: logistic(5), with_outliers(4), normals(FOUR)),
    "outliers_linear": Model(lambda: linear(5), with_outliers(4), normals(FOUR)),
    "wide_linear": Model(lambda: linear(5), normals(3.0 * FOUR), normals(FOUR)),
    "shifted_linear": Model(lambda: linear(5, intercept=10.0), normals(FOUR, 5.0), normals(FOUR)),
    "rare_value": Model(lambda: linear(10), with_value(0.1, 9), with_value(0.5, 9), (1500, 5000)),
    "very_rare": Model(lambda: linear(6), with_value(0.015, 5), with_value(0.5, 5), (20_000,)),
    "unlike_pair": Model(lambda: linear(6), with_pair(0.99, 5), normals(np.ones(5))),
    "ar10_hidden": Model(
        lambda: logistic(11), autoregressive(10), normals(np.ones(10)), (300, 600), (1.0,)
    ),
    "zero_inflated": same(lambda: poisson(5), normals(FOUR), outcomes=zero_inflated(0.2)),
    "heteroscedastic": same(lambda: linear(5), normals(FOUR), outcomes=heteroscedastic),
}
MODELS = {**ORDER_ONE, **OTHER, **WRONG}


def cells_of(models):
    """Returns the names of the cells of models."""
    return [
        f"{name}-{size}-{epsilon}"
        for name, model in models.items()
        for size in model.sizes
        for epsilon in model.epsilons
    ]


CELLS = cells_of(MODELS)


def parse(cell):
    """Returns a cell's model, number of records and epsilon."""
    name, size, epsilon = cell.rsplit("-", 2)
    return MODELS[name], int(size), float(epsilon)
