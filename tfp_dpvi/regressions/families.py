"""Families of outcomes: what the outcome may be, its prior parts and its distribution."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfp_dpvi import local
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.data import Binary, Categorical, Column, Integer
from tfp_dpvi.data.columns import Numeric

FAMILIES = ("normal", "bernoulli", "poisson", "negative_binomial", "categorical", "ordinal")

LINKS = {
    "normal": "identity",
    "bernoulli": "logit",
    "poisson": "log",
    "negative_binomial": "log",
    "categorical": "logit of each level against the first",
    "ordinal": "cumulative logit",
}

NUM_POINTS = 15
"""The values of a person's intercept over which it is summed out."""

INTERCEPT_SD = 2.5
"""The default prior's standard deviation of an intercept, on the model's scale."""

# Steps of ordinal fits with five levels diverge from a start as wide as 2.5.
COEFFICIENT_SD = {family: 1.0 if family == "ordinal" else 2.5 for family in FAMILIES}
"""The default prior's standard deviation of a coefficient whose column has standard deviation 1."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The way in which an outcome enters a model.

    Attributes:
      family: One of `FAMILIES`.
      levels: Number of levels of a categorical or ordinal outcome, else 0.
      location: What the model subtracts from a normal outcome; otherwise the prior mean of the
        intercept on the scale of the link.
      scale: What it divides a normal outcome by; otherwise 1.
      cuts: Prior means of an ordinal outcome's thresholds.
    """

    family: str
    levels: int = 0
    location: float = 0.0
    scale: float = 1.0
    cuts: tuple[float, ...] = ()


def check_outcome(family: str, name: str, column: Column) -> None:
    """Raises for an outcome that a family cannot have.

    Args:
      family: One of `FAMILIES`.
      name: The outcome's name.
      column: Its description.

    Raises:
      ValueError: The column does not fit.
    """
    kinds: tuple[type, ...]
    kinds, needed = {
        "normal": ((Numeric,), "Continuous or Integer"),
        "bernoulli": ((Binary, Categorical), "Binary, or Categorical with two levels"),
        "poisson": ((Integer,), "Integer with lower=0 or more"),
        "negative_binomial": ((Integer,), "Integer with lower=0 or more"),
        "categorical": ((Categorical,), "Categorical"),
        "ordinal": ((Categorical, Integer), "Categorical with levels in order, or Integer"),
    }[family]
    fits = isinstance(column, kinds)
    if family in ("poisson", "negative_binomial"):
        fits = fits and isinstance(column, Numeric) and column.lower >= 0
    if family == "bernoulli" and isinstance(column, Categorical):
        fits = column.num_levels == 2
    if not fits:
        raise ValueError(
            f"family={family!r} needs the outcome {name!r} described as {needed}; the schema says "
            f"{type(column).__name__}."
        )
    if column.missing:
        raise ValueError(
            f"the outcome {name!r} may be missing: leave such records out by a rule that is part "
            "of the study, and describe it without missing=True."
        )


def outcome_of(family: str, column: Column, location: float, scale: float) -> Outcome:
    """Returns how an outcome enters a model, from public values.

    Args:
      family: One of `FAMILIES`.
      column: The outcome's description.
      location: Typical value of a numeric outcome, as the formula has it.
      scale: Its typical standard deviation.
    """
    if family == "normal":
        return Outcome(family, location=location, scale=scale)
    if family in ("poisson", "negative_binomial"):
        return Outcome(family, location=float(np.log(max(location, 0.1))))
    shares = _shares(column)
    if family == "bernoulli":
        return Outcome(family, location=float(np.log(shares[1] / shares[0])))
    if family == "categorical":
        return Outcome(family, levels=len(shares))
    below = np.clip(np.cumsum(shares)[:-1], 1e-3, 1.0 - 1e-3)
    cuts = tuple(float(cut) for cut in np.log(below / (1.0 - below)))
    return Outcome(family, levels=len(shares), location=cuts[0], cuts=cuts)


def _shares(column: Column) -> np.ndarray:
    if isinstance(column, Binary):
        return np.array([1.0 - column.share, column.share])
    if isinstance(column, Categorical):
        return column.frequencies
    if isinstance(column, Integer):
        num = int(column.upper) - int(column.lower) + 1
        return np.full(num, 1.0 / num)
    raise TypeError(type(column))


def outcome_levels(column: Column) -> list[str]:
    """Returns the names of an outcome's levels.

    Args:
      column: Its description, Categorical or Integer.
    """
    if isinstance(column, Categorical):
        return [str(category) for category in column.categories]
    if isinstance(column, Numeric):
        return [str(value) for value in range(int(column.lower), int(column.upper) + 1)]
    return ["0", "1"]


# ---------------------------------------------------------------------- the model


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of a model's inputs: common columns, an offset, group columns.

    Attributes:
      num_common: The number of common columns.
      has_intercept: Whether there is an intercept (an ordinal outcome's thresholds are instead).
      group_sizes: The number of columns of each group effect.
      unit: The column of persons if each has an intercept of their own, else "".
    """

    num_common: int
    has_intercept: bool
    group_sizes: tuple[int, ...] = ()
    unit: str = ""

    @property
    def group_index(self) -> list[int]:
        """The number of the group effect of each group column."""
        return [place for place, size in enumerate(self.group_sizes) for _ in range(size)]


def make_prior(
    family: str,
    outcome: dict[str, Any],
    layout: dict[str, Any],
    coefficients: Sequence[Sequence[Any]],
    intercept: Sequence[Any],
    auxiliary: float = 1.0,
) -> tfd.Distribution:
    """Returns the prior of a regression's parameters, on the model's scale.

    Args:
      family: One of `FAMILIES`.
      outcome: Fields of `Outcome`.
      layout: Fields of `Layout`.
      coefficients: Mean and standard deviation of each coefficient.
      intercept: Those of the intercept, or of the first threshold.
      auxiliary: Scale of the prior of group effects' standard deviations, and of the residual's.
    """
    columns = Layout(**{**layout, "group_sizes": tuple(layout["group_sizes"])})
    blocks = outcome["levels"] - 1 if family == "categorical" else 1
    parts: dict[str, Any] = {}
    if columns.num_common:
        means, deviations = np.tile(np.array(coefficients, np.float32), [blocks, 1]).T
        parts["coefficients"] = _independent(tfd.Normal(means, deviations))
    if family == "ordinal":
        parts["threshold"] = tfd.Normal(*np.asarray(intercept, np.float32))
        if outcome["levels"] > 2:
            gaps = np.log(np.diff(np.float32(outcome["cuts"])))
            parts["gaps"] = _independent(tfd.LogNormal(gaps, np.float32(1.0)))
    elif columns.has_intercept:
        normal = tfd.Normal(*np.asarray(intercept, np.float32))
        parts["intercept"] = tfd.Sample(normal, blocks) if family == "categorical" else normal
    if family == "normal":
        parts["sigma"] = tfd.HalfNormal(np.float32(auxiliary))
    if family == "negative_binomial":
        parts["alpha"] = tfd.LogNormal(np.float32(0.0), np.float32(1.0))
    if columns.unit:
        parts["unit_sd"] = tfd.HalfNormal(np.float32(auxiliary))
    if columns.group_sizes:
        num = len(columns.group_sizes)
        index = columns.group_index
        parts["group_sd"] = _independent(tfd.HalfNormal(np.full(num, auxiliary, np.float32)))
        parts["group"] = lambda group_sd: _independent(
            tfd.Normal(np.float32(0.0), tf.gather(group_sd, index, axis=-1))
        )
    return tfd.JointDistributionNamed(parts)


def _independent(distribution: tfd.Distribution) -> tfd.Distribution:
    return tfd.Independent(distribution, reinterpreted_batch_ndims=1)


def likelihood(
    params: dict[str, tf.Tensor],
    x: tf.Tensor,
    *,
    family: str,
    outcome: dict[str, Any],
    layout: dict[str, Any],
) -> tfd.Distribution:
    """Returns the distribution of outcomes.

    Args:
      params: A draw of the prior.
      x: Design rows, float32 [n, columns].
      family: One of `FAMILIES`.
      outcome: Fields of `Outcome`.
      layout: Fields of `Layout`.
    """
    num = layout["num_common"]
    if family == "categorical":
        blocks = outcome["levels"] - 1
        logits = tf.zeros([tf.shape(x)[0], blocks], x.dtype) + x[:, num : num + 1]
        if num:
            matrix = tf.reshape(params["coefficients"], [blocks, num])
            logits += tf.linalg.matmul(x[:, :num], matrix, transpose_b=True)
        if layout["has_intercept"]:
            logits += params["intercept"]
        return tfd.Categorical(logits=tf.pad(logits, [[0, 0], [1, 0]]), dtype=x.dtype)
    score = x[:, num]
    if num:
        score += tf.linalg.matvec(x[:, :num], params["coefficients"])
    if layout["group_sizes"]:
        score += tf.linalg.matvec(x[:, num + 1 :], params["group"])
    if layout["has_intercept"]:
        score += params["intercept"]
    if not layout.get("unit"):
        return _outcomes(params, score, family, outcome)
    if family == "normal":
        return local.unit_normal(score, params["sigma"], params["unit_sd"])
    score = score[:, None]
    return local.unit_quadrature(
        lambda z: _outcomes(params, score + params["unit_sd"] * z, family, outcome),
        num_points=NUM_POINTS,
    )


def _outcomes(
    params: dict[str, tf.Tensor], score: tf.Tensor, family: str, outcome: dict[str, Any]
) -> tfd.Distribution:
    """Returns the distribution of outcomes of a score, of any shape."""
    if family == "ordinal":
        cuts = params["threshold"][None]
        if outcome["levels"] > 2:
            zero = tf.zeros([1], score.dtype)
            cuts = params["threshold"] + tf.concat([zero, tf.cumsum(params["gaps"])], axis=0)
        return tfd.OrderedLogistic(cuts, score, dtype=score.dtype)
    if family == "normal":
        return tfd.Normal(score, params["sigma"])
    if family == "bernoulli":
        return tfd.Bernoulli(logits=score, dtype=score.dtype)
    if family == "poisson":
        return tfd.Poisson(log_rate=score)
    alpha = params["alpha"]
    return tfd.NegativeBinomial(
        1.0 / alpha, logits=score + tf.math.log(alpha), require_integer_total_count=False
    )
