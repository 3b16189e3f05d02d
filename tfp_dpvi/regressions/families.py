"""Families of outcomes: their priors on the schema's scale, and their likelihoods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.data.columns import Binary, Categorical, Column, Integer, Numeric
from tfp_dpvi.regressions.design import Design

tfd: Any = tfp.distributions

Params = Mapping[str, Any]
Inputs = Mapping[str, Any]

# Prior standard deviations, on standardised columns: those of rstanarm for a linear predictor on
# the outcome's scale, and narrower ones where the predictor is a logarithm or a logit.
_WIDE = 2.5
_OF_LOGARITHM = 1.0


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of outcomes.

    ```python
    >>> FAMILIES["poisson"].link
    'log'

    ```

    Attributes:
      name: Its name.
      link: What the linear predictor is.
      spread: The prior standard deviation of coefficients of standardised columns, over the
        outcome's scale.
      outcome: Which columns can be outcomes.
      needs: The same in words.
      has_scale: Whether the linear predictor has the outcome's units.
      others: `others(column)` -> priors of further parameters.
      likelihood: `likelihood(params, predictor)` -> distribution of the outcomes.
    """

    name: str
    link: str
    spread: float
    outcome: Callable[[Column], bool]
    needs: str
    has_scale: bool
    others: Callable[[Column], dict[str, Any]]
    likelihood: Callable[[Params, Any], Any]

    def location_and_scale(self, column: Column) -> tuple[float, float]:
        """Returns the prior median of the predictor at typical inputs, and its unit.

        Args:
          column: The outcome's description.
        """
        if self.has_scale and isinstance(column, Numeric):
            return column.location_and_scale
        if self.link == "log" and isinstance(column, Numeric):
            return math.log(max(column.location_and_scale[0], 1e-2)), 1.0
        return 0.0, 1.0

    def num_predictors(self, column: Column) -> int:
        """Returns the number of linear predictors: of categories all but the first have one."""
        return column.num_levels - 1 if self.name == "categorical" else 1

    def prior(
        self, design: Design, column: Column, given: Mapping[str, tuple[float, float]]
    ) -> dict[str, Any]:
        """Returns the priors of all parameters, those of coefficients on standardised columns.

        Args:
          design: The design.
          column: The outcome's description.
          given: Means and standard deviations of coefficients in the user's units, by label; that of
            "Intercept" at typical inputs.
        """
        location, unit = self.location_and_scale(column)
        num = self.num_predictors(column)
        shape = [] if num == 1 else [num]
        priors: dict[str, Any] = {}
        if design.has_intercept and self.name != "ordinal":
            spread = _WIDE * unit
            mean, sd = given.get("Intercept", (location, spread))
            priors["Intercept"] = _normal(np.full(shape, mean), np.full(shape, sd))
        if design.labels:
            means = np.zeros(len(design.labels))
            sds = np.full(len(design.labels), self.spread * unit)
            for place, label in enumerate(design.labels):
                if label in given:
                    means[place], sds[place] = np.array(given[label]) * design.scale[place]
            if num > 1:
                means, sds = (np.repeat(part[:, None], num, axis=1) for part in (means, sds))
            priors["slopes"] = _normal(means, sds)
        for number, group in enumerate(design.groups):
            priors[f"sd_{number}"] = tfd.HalfNormal(np.float32(unit))
            priors[f"effects_{number}"] = _effects(number, len(group.levels))
        return {**priors, **self.others(column)}

    def predictor(self, design: Design, column: Column, params: Params, x: Inputs) -> Any:
        """Returns the linear predictor of a batch of records.

        Args:
          design: The design.
          column: The outcome's description.
          params: One draw of the parameters.
          x: `Design.inputs` of n records.

        Returns:
          Shape [n], or [n, C - 1] for several predictors.
        """
        several = self.num_predictors(column) > 1
        total = tf.zeros_like(x["x"][:, 0]) if design.labels else tf.zeros([tf.shape(x["x"])[0]])
        if "offset" in x:
            total += x["offset"]
        if several:
            total = total[:, None]
        if "Intercept" in params:
            total += params["Intercept"]
        if "slopes" in params:
            slopes = params["slopes"]
            product = tf.linalg.matmul if several else tf.linalg.matvec
            total += product(x["x"], slopes)
        for number in range(len(design.groups)):
            effects = tf.gather(params[f"effects_{number}"], x[f"level_{number}"])
            total += effects * x[f"times_{number}"]
        return total


def _effects(number: int, num_levels: int) -> Callable[..., Any]:
    """Returns the prior of a group's effects, given their standard deviation."""
    name = f"sd_{number}"

    def prior(**above: Any) -> Any:
        (scale,) = above.values()
        return tfd.Sample(tfd.Normal(0.0, scale), num_levels)

    # A joint distribution reads the names of arguments.
    namespace: dict[str, Any] = {"prior": prior}
    source = f"lambda {name}: prior({name}={name})"
    function: Callable[..., Any] = eval(source, namespace)
    return function


def _normal(means: np.ndarray, sds: np.ndarray) -> Any:
    normal = tfd.Normal(means.astype(np.float32), sds.astype(np.float32))
    return tfd.Independent(normal, means.ndim) if means.ndim else normal


def _scale(column: Column) -> dict[str, Any]:
    unit = column.location_and_scale[1] if isinstance(column, Numeric) else 1.0
    return {"sigma": tfd.LogNormal(np.float32(math.log(unit)), 1.0)}


def _cutpoints(column: Column) -> dict[str, Any]:
    gaps = tfd.Sample(tfd.LogNormal(0.0, 1.0), column.num_levels - 2)
    first = {"first_cutpoint": tfd.Normal(-1.0, _WIDE)}
    return first if column.num_levels == 2 else {**first, "gaps": gaps}


def cutpoints(params: Params) -> Any:
    """Returns the increasing thresholds of an ordinal outcome, shape [..., C - 1].

    Args:
      params: Draws with "first_cutpoint" and, for more than two levels, "gaps".
    """
    first = params["first_cutpoint"][..., None]
    if "gaps" not in params:
        return first
    return tf.concat([first, first + tf.cumsum(params["gaps"], axis=-1)], axis=-1)


def _categories(predictor: Any) -> Any:
    return tf.concat([tf.zeros_like(predictor[..., :1]), predictor], axis=-1)


def _is_count(column: Column) -> bool:
    return isinstance(column, Integer) and column.lower >= 0.0


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family(
            "normal",
            "identity",
            _WIDE,
            lambda column: isinstance(column, Numeric),
            "Continuous or Integer",
            True,
            _scale,
            lambda params, eta: tfd.Normal(eta, params["sigma"]),
        ),
        Family(
            "bernoulli",
            "logit",
            _WIDE,
            lambda column: isinstance(column, Binary),
            "Binary",
            False,
            lambda column: {},
            lambda params, eta: tfd.Bernoulli(logits=eta, dtype=tf.float32),
        ),
        Family(
            "poisson",
            "log",
            _OF_LOGARITHM,
            _is_count,
            "Integer with a lower bound of 0 or more",
            False,
            lambda column: {},
            lambda params, eta: tfd.Poisson(log_rate=eta),
        ),
        Family(
            "negative_binomial",
            "log",
            _OF_LOGARITHM,
            _is_count,
            "Integer with a lower bound of 0 or more",
            False,
            lambda column: {"size": tfd.LogNormal(0.5, 1.0)},
            lambda params, eta: tfd.NegativeBinomial(
                params["size"] * tf.ones_like(eta), logits=eta - tf.math.log(params["size"])
            ),
        ),
        Family(
            "categorical",
            "softmax",
            _WIDE,
            lambda column: isinstance(column, Categorical),
            "Categorical",
            False,
            lambda column: {},
            lambda params, eta: tfd.Categorical(logits=_categories(eta), dtype=tf.float32),
        ),
        Family(
            "ordinal",
            "cumulative logit",
            _WIDE,
            lambda column: isinstance(column, Categorical),
            "Categorical",
            False,
            _cutpoints,
            lambda params, eta: tfd.OrderedLogistic(cutpoints(params), eta, dtype=tf.float32),
        ),
    )
}
