"""Per-record gradients through shared reparameterised draws, clipped before or after the pull-back.

With draws `theta = f(xi, eta)` shared by a batch, a record's gradient in the surrogate's variables
xi is the vector-Jacobian product of f with its gradient in theta. It can be pulled back record by
record before the clip, or *aligned* (Jälkö, Prediger, Honkela, Kaski 2022, arXiv:2210.15961): the
theta-gradients are clipped, summed and released once, and the noisy sum is pulled back, which is
post-processing. The noise then has as many coordinates as theta (not those of locations and scales,
or of a full covariance), and is consistent between location and scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, map_apart, tf
from tfp_dpvi.gradients.clip import Clip, select_finite
from tfp_dpvi.gradients.step import StepGradient, mapped

# Coordinates of the draws up to which a Jacobian costs less than pulling back every record.
_FEW = 64

PullBack = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def through_draws(
    record_loss: Callable[[tf.Tensor], tf.Tensor],
    draws: Sequence[tf.Tensor],
    tape: tf.GradientTape,
    variables: Sequence[tf.Variable],
    clip: Clip,
    *,
    aligned: bool,
    **exact: Any,
) -> StepGradient:
    """Returns the step's gradient of a loss that depends on variables only through draws.

    Args:
      record_loss: Maps a record to a scalar loss, and reads `draws`.
      draws: A flat list of float tensors, computed under `tape`.
      tape: A persistent tape that watched `variables`.
      variables: The variables to differentiate by.
      clip: The bound C and its scheme.
      aligned: True clips the gradients in `draws` instead of those in `variables`.
      **exact: Other attributes of `StepGradient`.

    #### Formal guarantee

    `pull_back` reads the draws and the variables, but no record: it is post-processing.
    """

    def pull_back(by_draws: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return tape.gradient(
            draws, variables, output_gradients=by_draws, unconnected_gradients="zero"
        )

    by_jacobian = None if aligned else _by_jacobian(pull_back, draws, variables)

    def record_gradient(
        record: Structure, keep: tf.Tensor
    ) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(draws)
            loss = record_loss(record)
        by_draws = inner.gradient(loss, draws, unconnected_gradients="zero")
        if aligned:
            return loss, by_draws
        if by_jacobian is not None:
            # A NaN or Inf spreads to all of this record's gradient (0 x Inf is NaN) and to no
            # other's: `clipped_sum` finds it. A check here would make XLA compute the gradient
            # twice.
            return loss, by_jacobian(by_draws)
        # The selection comes before the pull-back, which may drop a NaN (contract 8).
        by_draws, _ = select_finite(by_draws, keep & tf.math.is_finite(loss))
        return loss, pull_back(by_draws)

    if aligned:
        return mapped(record_gradient, draws, clip, pull_back=pull_back, **exact)
    return mapped(record_gradient, variables, clip, **exact)


def _by_jacobian(
    pull_back: PullBack, draws: Sequence[tf.Tensor], variables: Sequence[tf.Variable]
) -> PullBack | None:
    """Returns `pull_back` as a product with the draws' Jacobian, computed once a step.

    Returns None for many draws.
    """
    if not draws or not all(part.shape.is_fully_defined() for part in [*draws, *variables]):
        return None
    sizes = [int(np.prod(part.shape)) for part in draws]
    if sum(sizes) > _FEW or any(part.dtype != draws[0].dtype for part in [*draws, *variables]):
        return None

    def jacobian_row(unit: tf.Tensor) -> tf.Tensor:
        parts = zip(tf.split(unit, sizes), draws, strict=True)
        by_draws = [tf.reshape(part, draw.shape) for part, draw in parts]
        return tf.concat([tf.reshape(part, [-1]) for part in pull_back(by_draws)], axis=0)

    jacobian = map_apart(jacobian_row, tf.eye(sum(sizes), dtype=draws[0].dtype))

    def product(by_draws: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        flat = tf.concat([tf.reshape(part, [-1]) for part in by_draws], axis=0)
        parts = tf.split(
            tf.linalg.matvec(jacobian, flat, transpose_a=True),
            [int(np.prod(v.shape)) for v in variables],
        )
        return [
            tf.reshape(part, variable.shape)
            for part, variable in zip(parts, variables, strict=True)
        ]

    return product
