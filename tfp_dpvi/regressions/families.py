"""The model of a regression: its prior and likelihood, for each family of outcomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from scipy import linalg

from tfp_dpvi import local
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated.straight import linear_in
from tfp_dpvi.data import Categorical, Column
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.regressions.censored import Censored
from tfp_dpvi.regressions.correlated import CorrelatedEffects, correlation_prior
from tfp_dpvi.regressions.outcomes import FAMILIES, Family, Normal, Outcome

NUM_POINTS = 15
"""How many values a person's intercept is summed out over."""

INTERCEPT_SD = 2.5
"""The default prior's standard deviation of an intercept, on the model's scale."""

SHARE_SD = 1.28
"""The prior's standard deviation of the logits of a monotone effect's shares.

Their logarithms then vary as those of shares with a uniform prior.
"""


def check_outcome(family: Family, name: str, column: Column) -> None:
    """Raises for an outcome that a family cannot have.

    Args:
      family: The family.
      name: The outcome's name.
      column: Its description.

    Raises:
      ValueError: The column does not fit.
    """
    if not family.fits(column):
        raise ValueError(
            f"family={family.name!r} needs the outcome {name!r} described as {family.needs}; the "
            f"schema says {type(column).__name__}."
        )
    if column.missing:
        raise ValueError(
            f"the outcome {name!r} may be missing: leave such records out by a rule that is part "
            "of the study, and describe it without missing=True."
        )


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


@dataclasses.dataclass(frozen=True)
class Layout:
    """The columns of a model's inputs: common columns, an offset, group columns, trials.

    Attributes:
      num_common: The number of common columns.
      has_intercept: Whether there is an intercept (an ordinal outcome's thresholds are instead).
      group_sizes: The number of columns of each group effect.
      unit: The column of persons if each has an intercept of their own, else "".
      has_trials: Whether the last column is the number of trials.
      censored: Where outcomes are not seen beyond a limit, "right" or "left": then the last column
        is the limit, on the model's scale. Else "".
      monotone: First and last common column of each monotone effect, the last one excluded.
      correlated: Places of the group effects that are correlated within a level, for each group.
    """

    num_common: int
    has_intercept: bool
    group_sizes: tuple[int, ...] = ()
    unit: str = ""
    has_trials: bool = False
    censored: str = ""
    monotone: tuple[tuple[int, int], ...] = ()
    correlated: tuple[tuple[int, ...], ...] = ()

    @property
    def group_index(self) -> list[int]:
        """The number of the group effect of each group column."""
        return [place for place, size in enumerate(self.group_sizes) for _ in range(size)]


def slopes(coefficients: tf.Tensor, monotone: Sequence[Sequence[int]]) -> tf.Tensor:
    """Returns the slope of each common column.

    The columns of a monotone effect are one step up each. Its first coefficient is the sum of the
    steps, and the others say, in coordinates that treat all steps alike, which share each has
    (Buerkner and Charpentier 2020, whose shares have a uniform prior and not a logistic normal).

    Args:
      coefficients: Shape [..., p].
      monotone: See `Layout`.
    """
    parts = []
    last = 0
    for start, stop in monotone:
        basis = tf.constant(linalg.helmert(stop - start).T, coefficients.dtype)
        logits = tf.linalg.matvec(basis, coefficients[..., start + 1 : stop])
        total = coefficients[..., start : start + 1]
        parts += [coefficients[..., last:start], total * tf.nn.softmax(logits)]
        last = stop
    return tf.concat([*parts, coefficients[..., last:]], axis=-1) if parts else coefficients


def standard_intercepts() -> tuple[np.ndarray, np.ndarray]:
    """Returns the values of a standard normal intercept that sum it out, and their weights."""
    points, weights = np.polynomial.hermite_e.hermegauss(NUM_POINTS)
    return points, weights / weights.sum()


def make_prior(
    family: str,
    outcome: dict[str, Any],
    layout: dict[str, Any],
    coefficients: Sequence[Sequence[Any]],
    intercept: Sequence[Any],
) -> tfd.Distribution:
    """Returns the prior of a regression's parameters, on the model's scale.

    Args:
      family: The name of one of `FAMILIES`.
      outcome: Fields of `Outcome`.
      layout: Fields of `Layout`.
      coefficients: Mean and standard deviation of each coefficient.
      intercept: Those of the intercept, or of the first threshold.
    """
    columns = Layout(**{**layout, "group_sizes": tuple(layout["group_sizes"])})
    enters = Outcome(**outcome)
    parts: dict[str, Any] = {}
    if columns.num_common:
        means, deviations = np.tile(np.array(coefficients, np.float32), [enters.blocks, 1]).T
        parts["coefficients"] = _independent(tfd.Normal(means, deviations))
    if family == "ordinal":
        parts["threshold"] = tfd.Normal(*np.asarray(intercept, np.float32))
    elif columns.has_intercept:
        normal = tfd.Normal(*np.asarray(intercept, np.float32))
        parts["intercept"] = (
            tfd.Sample(normal, enters.blocks) if family == "categorical" else normal
        )
    parts.update(FAMILIES[family].own(enters))
    if columns.unit:
        parts["unit_sd"] = tfd.HalfNormal(np.float32(1.0))
    if columns.group_sizes:
        num = len(columns.group_sizes)
        index = columns.group_index
        parts["group_sd"] = _independent(tfd.HalfNormal(np.ones(num, np.float32)))
        parts["group"] = lambda group_sd: _independent(
            tfd.Normal(np.float32(0.0), tf.gather(group_sd, index, axis=-1))
        )
        if columns.correlated:
            parts["group_cor"] = correlation_prior(columns.correlated)
            parts["group"] = lambda group_sd, group_cor: CorrelatedEffects(
                group_sd, group_cor, columns.group_sizes, columns.correlated
            )
    return tfd.JointDistributionNamed(parts)


def _independent(distribution: tfd.Distribution) -> tfd.Distribution:
    return tfd.Independent(distribution, reinterpreted_batch_ndims=1)


def _steps(*, layout: dict[str, Any], **_: Any) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns the map from coefficients to slopes, if that is not the identity."""
    monotone = layout.get("monotone", ())
    if not monotone:
        return None

    def values(coefficients: tf.Tensor) -> tf.Tensor:
        # A categorical outcome has as many of each as it has levels but one.
        each = tf.reshape(coefficients, [-1, layout["num_common"]])
        return tf.reshape(slopes(each, monotone), tf.shape(coefficients))

    return values


@linear_in("coefficients", _steps)
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
      family: The name of one of `FAMILIES`.
      outcome: Fields of `Outcome`.
      layout: Fields of `Layout`.
    """
    num = layout["num_common"]
    kind, enters = FAMILIES[family], Outcome(**outcome)
    if family == "categorical":
        logits = tf.zeros([tf.shape(x)[0], enters.blocks], x.dtype) + x[:, num : num + 1]
        if num:
            matrix = tf.reshape(params["coefficients"], [enters.blocks, num])
            matrix = slopes(matrix, layout.get("monotone", ()))
            logits += tf.linalg.matmul(x[:, :num], matrix, transpose_b=True)
        if layout["has_intercept"]:
            logits += params["intercept"]
        return kind.distribution(logits, params, enters)
    side = layout.get("censored")
    # With an intercept of each person, scores have its values in a second dimension.
    last = x[:, -1:] if layout.get("unit") else x[:, -1]
    if layout.get("has_trials"):
        params = {**params, "trials": last}
    if side or layout.get("has_trials"):
        x = x[:, :-1]

    def outcomes(score: tf.Tensor) -> tfd.Distribution:
        distribution = kind.distribution(score, params, enters)
        return Censored(distribution, last, side) if side else distribution

    score = x[:, num]
    if num:
        each = slopes(params["coefficients"], layout.get("monotone", ()))
        score += tf.linalg.matvec(x[:, :num], each)
    if layout["group_sizes"]:
        score += tf.linalg.matvec(x[:, num + 1 :], params["group"])
    if layout["has_intercept"]:
        score += params["intercept"]
    if not layout.get("unit"):
        return outcomes(score)
    if type(kind) is Normal and not side:
        return local.unit_normal(score, params["sigma"], params["unit_sd"])
    score = score[:, None]
    return local.unit_quadrature(lambda z: outcomes(score + params["unit_sd"] * z))
