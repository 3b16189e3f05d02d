"""Log densities of families of outcomes, by SciPy."""

import numpy as np
from scipy import special, stats


def log_zero(zero, counted, is_zero):
    """Log densities of counts with zeros of their own, from those of the others."""
    inflated = np.logaddexp(np.log(zero), np.log1p(-zero) + counted)
    return np.where(is_zero, inflated, np.log1p(-zero) + counted)


def log_counts(y, score, own):
    size = np.exp(-own[0])
    return stats.nbinom.logpmf(y, size, size / (size + np.exp(score)))


def log_hurdle(y, score, zero):
    above = stats.poisson.logpmf(np.maximum(y, 1), np.exp(score)) - np.log(
        -np.expm1(-np.exp(score))
    )
    return np.where(y == 0, np.log(zero), np.log1p(-zero) + above)


def log_censored(times, y, limit):
    """Log densities of outcomes min(T, limit), of a distribution of SciPy."""
    # A logarithm of a probability that vanished would end a search.
    return np.where(y < limit, times.logpdf(y), np.maximum(times.logsf(limit), -1e4))


# Distributions of times by score and unbounded parameters of the family, of which there are so many.
TIMES = {
    "weibull": (
        1,
        lambda e, p: stats.weibull_min(
            np.exp(p[0]), 0, np.exp(e) / special.gamma(1.0 + np.exp(-p[0]))
        ),
    ),
    "lognormal": (1, lambda e, p: stats.lognorm(np.exp(p[0]), 0, np.exp(e))),
    "gamma": (1, lambda e, p: stats.gamma(np.exp(p[0]), 0, np.exp(e - p[0]))),
    "exponential": (0, lambda e, p: stats.expon(0, np.exp(e))),
}

# Log densities by outcome, score and unbounded parameters of the family, of which there are so many.
BY_SCIPY = {
    "student": (2, lambda y, e, p: stats.t.logpdf(y, np.exp(p[1]), e, np.exp(p[0]))),
    "lognormal": (1, lambda y, e, p: stats.lognorm.logpdf(y, np.exp(p[0]), 0, np.exp(e))),
    "gamma": (1, lambda y, e, p: stats.gamma.logpdf(y, np.exp(p[0]), 0, np.exp(e - p[0]))),
    "weibull": (
        1,
        lambda y, e, p: stats.weibull_min.logpdf(
            y, np.exp(p[0]), 0, np.exp(e) / special.gamma(1.0 + np.exp(-p[0]))
        ),
    ),
    "exponential": (0, lambda y, e, p: stats.expon.logpdf(y, 0, np.exp(e))),
    "beta": (
        1,
        lambda y, e, p: stats.beta.logpdf(
            y, np.exp(p[0]) * special.expit(e), np.exp(p[0]) * special.expit(-e)
        ),
    ),
    "zero_inflated_poisson": (
        1,
        lambda y, e, p: log_zero(special.expit(p[0]), stats.poisson.logpmf(y, np.exp(e)), y == 0),
    ),
    "zero_inflated_negative_binomial": (
        2,
        lambda y, e, p: log_zero(special.expit(p[1]), log_counts(y, e, p), y == 0),
    ),
    "hurdle_poisson": (1, lambda y, e, p: log_hurdle(y, e, special.expit(p[0]))),
}
