"""Families of outcomes, a class each: what an outcome may be, its parameters and distribution."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.data import Binary, Categorical, Column, Integer
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.regressions.counts import Hurdle, ZeroInflated

Own = Mapping[str, tf.Tensor]
"""A family's own parameters by name, of shapes that broadcast with the scores'."""

TYPICAL = {"sigma": 1.0, "alpha": 1.0, "nu": 10.0, "kappa": 10.0, "zero": 0.2}
"""Values of families' own parameters, on the model's scale, for records that are invented."""

# Scores beyond it are those of no record: expected outcomes would overflow.
_MOST_LOG_MEAN = 34.0
# The same of logits, whose probabilities are not to be 0.
_MOST_LOGIT = 15.0
# Shape and rate of kappa among trials, a priori: between 6 and 130 in nine of ten cases.
_KAPPA = (1.5, 0.03)
# Of the upper bound of a positive outcome, the least that its lower one counts as.
_LEAST_SHARE = 1e-4
# Typical shares of successes that a schema's typical values may say.
_SHARES = (0.02, 0.98)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The way in which an outcome enters a model.

    Attributes:
      family: The family's name.
      levels: Number of levels of a categorical or ordinal outcome, else 0.
      location: What the model subtracts from an outcome that is scaled; otherwise the prior mean of
        the intercept on the scale of the link.
      scale: What it divides such an outcome by; otherwise 1.
      cuts: Prior means of an ordinal outcome's thresholds.
    """

    family: str
    levels: int = 0
    location: float = 0.0
    scale: float = 1.0
    cuts: tuple[float, ...] = ()

    @property
    def blocks(self) -> int:
        """The number of scores of a record: of categories, one for each level but the first."""
        return self.levels - 1 if self.family == "categorical" else 1


class Family(abc.ABC):
    """A kind of outcomes, and their distribution given a linear score.

    Attributes:
      name: The name in `regression(family=)`.
      link: The link between score and expected outcome, in words.
      needs: The descriptions that its outcome may have, in words.
      remedy: What helps where the family does not fit, in the words of a formula.
      has_trials: Whether outcomes are successes among trials.
      can_be_censored: Whether outcomes may be known up to a limit alone.
      is_scaled: Whether the outcome is divided by its typical deviation, as in a linear model.
      coefficient_sd: The default prior's standard deviation of a coefficient whose column has
        standard deviation 1.
    """

    name: ClassVar[str]
    link: ClassVar[str]
    needs: ClassVar[str]
    remedy: ClassVar[str] = "add terms, such as interactions or bs(x, df=4)"
    has_trials: ClassVar[bool] = False
    can_be_censored: ClassVar[bool] = False
    is_scaled: ClassVar[bool] = False
    coefficient_sd: ClassVar[float] = 2.5

    @abc.abstractmethod
    def fits(self, column: Column) -> bool:
        """Returns whether a column may be the outcome.

        Args:
          column: Its description.
        """

    def typical(self, column: Numeric) -> float:
        """Returns the typical value of a numeric outcome.

        Args:
          column: Its description.
        """
        return column.location

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """Returns how an outcome enters a model, from public values.

        Args:
          column: The outcome's description.
          location: Typical value of a numeric outcome, as the formula has it.
          scale: Its typical standard deviation.
        """
        del column, scale
        return Outcome(self.name, location=float(np.log(max(location, 1e-30))))

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """Returns the priors of the parameters that are not the score's.

        Args:
          outcome: How the outcome enters.
        """
        del outcome
        return {}

    def num_own(self, outcome: Outcome) -> int:
        """Returns the number of these parameters.

        Args:
          outcome: How the outcome enters.
        """
        priors = self.own(outcome).values()
        return sum(int(np.prod(prior.event_shape.as_list())) for prior in priors)

    @abc.abstractmethod
    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """Returns the distribution of outcomes.

        Args:
          score: Linear scores, of any shape; of a categorical outcome with its levels last.
          own: The parameters that are not the score's.
          outcome: How the outcome enters.
        """

    def in_units(self, own: dict[str, np.ndarray], unit: float) -> dict[str, np.ndarray]:
        """Returns draws of single parameters of its own in the units of the formula.

        Args:
          own: Draws by name, in the first dimension.
          unit: The outcome's scale.
        """
        del unit
        return own

    def choices(self, unit: float) -> list[str]:
        """Returns the priors of its own parameters in words.

        Args:
          unit: The outcome's scale.
        """
        del unit
        return []


def _lognormal() -> tfd.Distribution:
    return tfd.LogNormal(np.float32(0.0), np.float32(1.0))


def _zero() -> dict[str, tfd.Distribution]:
    return {"zero": tfd.Beta(np.float32(1.0), np.float32(1.0))}


class _Positive(Family):
    """Outcomes that are positive numbers with a logarithmic link."""

    link = "log"
    needs = "Continuous or Integer with lower above 0"
    can_be_censored = True
    remedy = "model the logarithm, np.log(outcome), with family='student', or add terms"

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Numeric) and column.lower > 0

    def typical(self, column: Numeric) -> float:
        """See `Family.typical`: by default the geometric middle of the bounds.

        The other one of 1 to 1,000,000 is far above most outcomes.
        """
        if column.typical is not None:
            return column.location
        return math.sqrt(max(column.lower, _LEAST_SHARE * column.upper) * column.upper)


class _Counts(Family):
    """Outcomes that are counts with a logarithmic link."""

    link = "log"
    needs = "Integer with lower=0 or more"

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Integer) and column.lower >= 0

    def typical(self, column: Numeric) -> float:
        """See `Family.typical`: by default the geometric middle of the bounds, one added to each.

        From 100, the other one of 0 to 200, few fits came down to counts of which most are 0 or 1.
        """
        if column.typical is not None:
            return column.location
        return math.sqrt((column.lower + 1.0) * (column.upper + 1.0)) - 1.0

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`."""
        return super().outcome(column, max(location, 0.1), scale)


class _Dispersed(_Counts):
    """Counts whose variance is mean + alpha mean^2."""

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        del outcome
        return {"alpha": _lognormal()}

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return ["prior of alpha (variance = mean + alpha mean^2): lognormal(0, 1)"]


class Normal(Family):
    """A linear model."""

    name = "normal"
    link = "identity"
    needs = "Continuous or Integer"
    remedy = 'try family="student", model the logarithm, np.log1p(outcome), or add terms'
    can_be_censored = True
    is_scaled = True

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Numeric)

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`."""
        del column
        return Outcome(self.name, location=location, scale=scale)

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        del outcome
        return {"sigma": tfd.HalfNormal(np.float32(1.0))}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return tfd.Normal(score, own["sigma"])

    def in_units(self, own: dict[str, np.ndarray], unit: float) -> dict[str, np.ndarray]:
        """See `Family.in_units`."""
        return {**own, "sigma": own["sigma"] * unit}

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        return [f"prior of sigma: halfnormal({unit:.3g})"]


class Student(Normal):
    """A linear model whose errors have heavy tails."""

    name = "student"
    remedy = "model the logarithm, np.log1p(outcome), or add terms"
    can_be_censored = False

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        nu = tfd.Gamma(np.float32(2.0), np.float32(0.1))
        return {**super().own(outcome), "nu": nu}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return tfd.StudentT(own["nu"], score, own["sigma"])

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        return [*super().choices(unit), "prior of nu, the degrees of freedom: gamma(2, 0.1)"]


class LogNormal(_Positive):
    """Positive numbers whose logarithm has a linear model."""

    name = "lognormal"
    link = "identity of the mean logarithm"

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        del outcome
        return {"sigma": tfd.HalfNormal(np.float32(1.0))}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return tfd.LogNormal(score, own["sigma"])

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return ["prior of sigma, of logarithms: halfnormal(1)"]


class Gamma(_Positive):
    """Positive numbers with a constant coefficient of variation."""

    name = "gamma"

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        del outcome
        return {"alpha": _lognormal()}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        shape = own["alpha"]
        return tfd.Gamma(shape, log_rate=tf.math.log(shape) - score)

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return ["prior of alpha, the shape: lognormal(0, 1)"]


class Weibull(Gamma):
    """Times whose hazard rises or falls as a power."""

    name = "weibull"

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        shape = own["alpha"]
        return tfd.Weibull(shape, tf.exp(score - tf.math.lgamma(1.0 + 1.0 / shape)))


class Exponential(_Positive):
    """Times whose hazard is the same at every age."""

    name = "exponential"
    remedy = 'try family="weibull" or "gamma", or add terms'

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del own, outcome
        return tfd.Exponential(tf.exp(-score))


class Beta(Family):
    """Shares between 0 and 1."""

    name = "beta"
    link = "logit"
    needs = "Continuous with lower above 0 and upper below 1"

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Numeric) and column.lower > 0.0 and column.upper < 1.0

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`."""
        del column, scale
        return Outcome(self.name, location=float(np.log(location / (1.0 - location))))

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        del outcome
        return {"kappa": tfd.Gamma(np.float32(2.0), np.float32(0.1))}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        kappa = own["kappa"]
        return tfd.Beta(kappa * tf.sigmoid(score), kappa * tf.sigmoid(-score))

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return ["prior of kappa, the sum of the beta's two parameters: gamma(2, 0.1)"]


class Bernoulli(Family):
    """Yes or no."""

    name = "bernoulli"
    link = "logit"
    needs = "Binary, or Categorical with two levels"

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        two = isinstance(column, Categorical) and column.num_levels == 2
        return isinstance(column, Binary) or two

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`."""
        del location, scale
        shares = shares_of(column)
        return Outcome(self.name, location=float(np.log(shares[1] / shares[0])))

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del own, outcome
        return tfd.Bernoulli(logits=score, dtype=score.dtype)


class Binomial(Family):
    """Successes among trials, of which each record has a number of its own."""

    name = "binomial"
    link = "logit of the share of successes"
    needs = "Integer with lower=0"
    remedy = (
        'try family="beta_binomial", or add terms, such as (1 | g), interactions or bs(x, df=4)'
    )
    has_trials = True

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Integer) and column.lower == 0

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`; `location` is the typical share of successes."""
        del column, scale
        share = float(np.clip(location, *_SHARES))
        return Outcome(self.name, location=float(np.log(share / (1.0 - share))))

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`; "trials" of `own` is their number."""
        del outcome
        return tfd.Binomial(total_count=own["trials"], logits=score)


class BetaBinomial(Binomial):
    """Successes among trials that vary more than a binomial distribution's.

    The probability of success is a record's own, from a beta distribution about its mean.
    """

    name = "beta_binomial"
    remedy = "add terms, such as (1 | g), interactions or bs(x, df=4)"

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        del outcome
        return {"kappa": tfd.Gamma(*map(np.float32, _KAPPA))}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`; "trials" of `own` is their number."""
        del outcome
        kappa, score = own["kappa"], tf.clip_by_value(score, -_MOST_LOGIT, _MOST_LOGIT)
        return tfd.BetaBinomial(
            own["trials"], kappa * tf.sigmoid(score), kappa * tf.sigmoid(-score)
        )

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return [
            "prior of kappa, by which two trials of a record correlate with 1 / (1 + kappa): "
            "gamma({:g}, {:g})".format(*_KAPPA)
        ]


class Poisson(_Counts):
    """Counts whose variance is their mean."""

    name = "poisson"
    remedy = 'try family="negative_binomial" or "zero_inflated_poisson", or add terms'

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del own, outcome
        return tfd.Poisson(log_rate=tf.minimum(score, _MOST_LOG_MEAN))


class NegativeBinomial(_Dispersed):
    """Counts that vary more than their mean."""

    name = "negative_binomial"
    remedy = (
        'try family="zero_inflated_negative_binomial", add terms, or ask whether there was any, '
        'with family="bernoulli", instead of how many'
    )

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return _negative_binomial(score, own["alpha"])


def _negative_binomial(score: tf.Tensor, alpha: tf.Tensor) -> tfd.Distribution:
    logits = tf.minimum(score, _MOST_LOG_MEAN) + tf.math.log(alpha)
    return tfd.NegativeBinomial(1.0 / alpha, logits=logits, require_integer_total_count=False)


class ZeroInflatedPoisson(_Counts):
    """Counts some of which are 0 whatever the covariates."""

    name = "zero_inflated_poisson"
    link = "log of the mean of the counts that are not 0 by inflation"
    remedy = 'try family="zero_inflated_negative_binomial", or add terms'

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        return {**super().own(outcome), **_zero()}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return ZeroInflated(tfd.Poisson(log_rate=tf.minimum(score, _MOST_LOG_MEAN)), own["zero"])

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        return [
            *super().choices(unit),
            "prior of zero, the share of zeros by inflation: beta(1, 1)",
        ]


class ZeroInflatedNegativeBinomial(_Dispersed):
    """Overdispersed counts some of which are 0 whatever the covariates."""

    name = "zero_inflated_negative_binomial"
    link = ZeroInflatedPoisson.link
    remedy = "add terms"

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`."""
        return {**super().own(outcome), **_zero()}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return ZeroInflated(_negative_binomial(score, own["alpha"]), own["zero"])

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        return [
            *super().choices(unit),
            "prior of zero, the share of zeros by inflation: beta(1, 1)",
        ]


class HurdlePoisson(ZeroInflatedPoisson):
    """Counts whose zeros are a matter of their own, and the others a Poisson's above 0."""

    name = "hurdle_poisson"
    link = "log of the rate of the counts above 0"

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del outcome
        return Hurdle(tf.exp(tf.minimum(score, _MOST_LOG_MEAN)), own["zero"])

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return ["prior of zero, the share of zeros: beta(1, 1)"]


class CategoricalLevels(Family):
    """One of several levels without order."""

    name = "categorical"
    link = "logit of each level against the first"
    needs = "Categorical"

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Categorical)

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`."""
        del location, scale
        return Outcome(self.name, levels=len(shares_of(column)))

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        del own, outcome
        first = tf.zeros_like(score[..., :1])
        return tfd.Categorical(logits=tf.concat([first, score], axis=-1), dtype=score.dtype)


class Ordinal(Family):
    """One of several levels in order."""

    name = "ordinal"
    link = "cumulative logit"
    needs = "Categorical with levels in order, or Integer"
    remedy = 'try family="categorical", or add terms, such as interactions or bs(x, df=4)'
    # Steps of ordinal fits with five levels diverge from a start as wide as 2.5.
    coefficient_sd = 1.0

    def fits(self, column: Column) -> bool:
        """See `Family.fits`."""
        return isinstance(column, Categorical | Integer)

    def outcome(self, column: Column, location: float, scale: float) -> Outcome:
        """See `Family.outcome`."""
        del location, scale
        shares = shares_of(column)
        below = np.clip(np.cumsum(shares)[:-1], 1e-3, 1.0 - 1e-3)
        cuts = tuple(float(cut) for cut in np.log(below / (1.0 - below)))
        return Outcome(self.name, levels=len(shares), location=cuts[0], cuts=cuts)

    def own(self, outcome: Outcome) -> dict[str, tfd.Distribution]:
        """See `Family.own`: the distances of thresholds; the first one is as an intercept."""
        if outcome.levels <= 2:
            return {}
        gaps = np.log(np.diff(np.array(outcome.cuts, np.float32)))
        return {"gaps": tfd.Independent(tfd.LogNormal(gaps, np.float32(1.0)), 1)}

    def distribution(self, score: tf.Tensor, own: Own, outcome: Outcome) -> tfd.Distribution:
        """See `Family.distribution`."""
        cuts = own["threshold"][..., None]
        if outcome.levels > 2:
            distances = tf.cumsum(own["gaps"], axis=-1)
            cuts += tf.concat([tf.zeros_like(distances[..., :1]), distances], axis=-1)
        return tfd.OrderedLogistic(cuts, score, dtype=score.dtype)

    def in_units(self, own: dict[str, np.ndarray], unit: float) -> dict[str, np.ndarray]:
        """See `Family.in_units`: thresholds have names of their own."""
        del own, unit
        return {}

    def choices(self, unit: float) -> list[str]:
        """See `Family.choices`."""
        del unit
        return ["prior of the distances of thresholds: lognormal(log typical, 1)"]


def shares_of(column: Column) -> np.ndarray:
    """Returns the declared shares of an outcome's levels.

    Args:
      column: Its description.
    """
    if isinstance(column, Binary):
        return np.array([1.0 - column.share, column.share])
    if isinstance(column, Categorical):
        return column.frequencies
    if isinstance(column, Integer):
        num = int(column.upper) - int(column.lower) + 1
        return np.full(num, 1.0 / num)
    raise TypeError(type(column))


FAMILIES: dict[str, Family] = {
    kind.name: kind()
    for kind in (
        Normal,
        Student,
        LogNormal,
        Gamma,
        Weibull,
        Exponential,
        Beta,
        Bernoulli,
        Binomial,
        BetaBinomial,
        Poisson,
        NegativeBinomial,
        ZeroInflatedPoisson,
        ZeroInflatedNegativeBinomial,
        HurdlePoisson,
        CategoricalLevels,
        Ordinal,
    )
}
"""The families by name."""
OTHER_NAMES = {
    "gaussian": "normal",
    "t": "student",
    "negativebinomial": "negative_binomial",
    "negbinomial": "negative_binomial",
    "zero_inflated_negativebinomial": "zero_inflated_negative_binomial",
    "zero_inflated_negbinomial": "zero_inflated_negative_binomial",
    "cumulative": "ordinal",
}
"""What Bambi and brms call the same families."""


def expected(
    family: Family,
    scores: tf.Tensor,
    own: Own,
    outcome: Outcome,
    trials: tf.Tensor | None = None,
) -> tf.Tensor:
    """Returns expected outcomes in the units of the formula, float64 [S, n].

    Of categorical and ordinal outcomes they are the levels' probabilities, [S, n, levels].

    Args:
      family: The family.
      scores: Draws of scores, float64 [S, n, blocks].
      own: Draws of the family's own parameters, in the first dimension.
      outcome: How the outcome enters.
      trials: Numbers of trials, shape [n], of a family that has them.
    """
    distribution = _distribution(family, scores, own, outcome, trials)
    if isinstance(distribution, tfd.Categorical):
        return distribution.probs_parameter()
    if isinstance(distribution, tfd.OrderedLogistic):
        return distribution.categorical_probs()
    unit, base = (outcome.scale, outcome.location) if family.is_scaled else (1.0, 0.0)
    return distribution.mean() * unit + base


def predicted(
    family: Family,
    scores: np.ndarray,
    own: Mapping[str, np.ndarray],
    outcome: Outcome,
    seed: int,
    trials: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns expected outcomes in the units of the formula, and outcomes.

    Of categorical and ordinal outcomes both are the levels' probabilities, levels last.

    Args:
      family: The family.
      scores: Draws of scores, float64 [S, n, blocks].
      own: Draws of the family's own parameters, in the first dimension.
      outcome: How the outcome enters.
      seed: The seed of outcomes.
      trials: Numbers of trials, shape [n], of a family that has them.
    """
    mean = expected(family, scores, own, outcome, trials).numpy()
    if mean.ndim == 3:
        return mean, mean
    unit, base = (outcome.scale, outcome.location) if family.is_scaled else (1.0, 0.0)
    distribution = _distribution(family, scores, own, outcome, trials)
    return mean, distribution.sample(seed=[seed, 1]).numpy() * unit + base


def _distribution(
    family: Family,
    scores: tf.Tensor,
    own: Own,
    outcome: Outcome,
    trials: tf.Tensor | None,
) -> tfd.Distribution:
    parameters = {name: tf.convert_to_tensor(part)[:, None] for name, part in own.items()}
    scores = tf.convert_to_tensor(scores)
    if trials is not None:
        parameters["trials"] = tf.cast(trials, scores.dtype)
    score = scores if isinstance(family, CategoricalLevels) else scores[:, :, 0]
    return family.distribution(score, parameters, outcome)
