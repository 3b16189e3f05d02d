"""`BayesianModel`: a prior and a likelihood as one frozen value."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable

import numpy as np

from tfp_dpvi import surrogates
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.bayes.units import flat_rows, unit_distribution
from tfp_dpvi.data import UnitRows

LIKELIHOOD_ERRORS = (
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    NotImplementedError,
)
"""Exceptions of a user's function that does not fit its data.

TensorFlow's shape errors are `ValueError`s.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class BayesianModel:
    """A prior over parameters and a likelihood of records given them.

    It holds no record, no variable that is trained and nothing of privacy.

    Args:
      prior: TFP distribution over the parameters, joint or single. Its float dtype is the model's.
      likelihood: `likelihood(params, x)` -> TFP distribution of `y` for a batch of n records, whose
        `log_prob` has shape [n]; or `likelihood(params)` -> TFP distribution of one whole record.
        `params` is one draw of the prior's structure.

    Raises:
      ValueError: The likelihood takes neither one nor two arguments.

    ```python
    >>> from tfp_dpvi._tf import tf, tfd
    >>> mean = BayesianModel(tfd.Normal(0.0, 1.0), lambda params: tfd.Normal(params, 1.0))
    >>> mean.generative
    True
    >>> mean.log_prob(0.0, tf.constant([0.0, 1.0])).shape
    TensorShape([2])

    ```
    """

    prior: tfd.Distribution
    likelihood: Callable[..., tfd.Distribution]

    def __post_init__(self) -> None:
        # Computed here, since it raises for a likelihood of other arguments.
        _ = self.generative

    @functools.cached_property
    def generative(self) -> bool:
        """True if the likelihood generates whole records, `likelihood(params)`."""
        return _takes_params_alone(self.likelihood)

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """The float type of parameters and records."""
        return np.dtype(surrogates.float_dtype(self.prior).as_numpy_dtype)

    def distribution_at(self, params: Structure, x: Structure | None) -> tfd.Distribution:
        """Returns the likelihood's distribution at parameters.

        Args:
          params: One value of the prior's structure.
          x: A batch of records; ignored by a model of whole records, whose distribution is of one.
            Of persons with several rows, a `UnitRows`; outcomes are then of whole persons.

        Raises:
          TypeError: The likelihood returned something else.
        """
        if isinstance(x, UnitRows):
            return unit_distribution(self.distribution_at(params, flat_rows(x.rows)), x)
        distribution = self.likelihood(params) if self.generative else self.likelihood(params, x)
        if not isinstance(distribution, tfd.Distribution):
            raise TypeError(
                f"likelihood returned {type(distribution).__name__}; "
                "it must return a TFP distribution."
            )
        return _mappable(distribution)

    def log_prob(self, params: Structure, x: Structure, y: Structure | None = None) -> tf.Tensor:
        """Returns the log-likelihoods of a batch of n records, shape [n].

        Args:
          params: A single value of the prior's structure.
          x: The batch, a structure of tensors with the records in the first dimension.
          y: The outcomes, or None for a model of whole records.
        """
        distribution = self.distribution_at(params, x)
        return distribution.log_prob(as_event(x if y is None else y, distribution))

    def record_log_prob(self, params: Structure, record: dict[str, Structure]) -> tf.Tensor:
        """Returns the log-likelihood of a single record, a scalar.

        Args:
          params: A single value of the prior's structure.
          record: Its parts under "x" and "y", without a batch dimension.
        """
        batch = tf.nest.map_structure(lambda part: part[None], record)
        return self.log_prob(params, batch["x"], batch.get("y"))[0]

    def record_loss(self, params: Structure, record: dict[str, Structure]) -> tf.Tensor:
        """Returns the negative log-likelihood of a single record, times its weight if it has one.

        Args:
          params: A single value of the prior's structure.
          record: Its parts under "x", "y" and "sample_weight", without a batch dimension.
        """
        loss = -self.record_log_prob(params, record)
        return loss * record["sample_weight"] if "sample_weight" in record else loss


def as_event(value: Structure, distribution: tfd.Distribution) -> Structure:
    """Casts observations as Keras users expect.

    Integers become floats for continuous outcomes, and bools become numbers.

    Args:
      value: The observations.
      distribution: The distribution whose dtypes they should have.
    """

    def cast(part: tf.Tensor, kind: tf.DType) -> tf.Tensor:
        kind = tf.as_dtype(kind)
        is_number = part.dtype.is_integer and kind.is_floating
        return tf.cast(part, kind) if part.dtype.is_bool or is_number else part

    if isinstance(value, dict) and isinstance(distribution.dtype, dict):
        return {name: cast(part, distribution.dtype[name]) for name, part in value.items()}
    if tf.is_tensor(value) and not tf.nest.is_nested(distribution.dtype):
        return cast(value, distribution.dtype)
    return value


def _mappable(distribution: tfd.Distribution) -> tfd.Distribution:
    """Returns a state space model that filters without a loop, and others unchanged.

    The gradient of the Kalman filter's loop over time cannot be mapped over records.
    """
    is_space = isinstance(distribution, tfd.LinearGaussianStateSpaceModel)
    if not is_space or distribution.parameters.get("experimental_parallelize"):
        return distribution
    return distribution.copy(experimental_parallelize=True)


def _takes_params_alone(likelihood: Callable[..., tfd.Distribution]) -> bool:
    """Returns whether a likelihood takes `params` and not `(params, x)`."""
    parameters = inspect.signature(likelihood).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    num = sum(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )
    if num not in (1, 2):
        raise ValueError(
            f"likelihood takes {num} arguments: "
            "define likelihood(params, x), or likelihood(params)."
        )
    return num == 1
