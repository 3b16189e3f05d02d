"""Records' gradients through shared reparameterised draws, and the two places where they can be clipped.

With draws `theta = f(xi, eta)` shared by a batch, a record's gradient by the surrogate's variables xi is the
vector-Jacobian product of f with its gradient by theta. It can be pulled back record by record before the clip, or
*aligned* (Jälkö, Prediger, Honkela, Kaski 2022, arXiv:2210.15961): the theta-gradients are clipped, summed and released
once, and the noisy sum is pulled back, which is post-processing. Then the noise has as many coordinates as theta (not
those of locations and scales, nor of a full covariance), and what it does to location and scale agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, map_apart, tf
from tfp_dpvi.gradients.clip import Clip, select_finite
from tfp_dpvi.gradients.step import StepGradient, mapped

_FEW = 64
"""Coordinates of the draws up to which a Jacobian costs less than pulling back every record of a batch."""

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
      record_loss: record -> scalar loss, reading `draws`.
      draws: flat list of float tensors, computed under `tape`.
      tape: persistent `tf.GradientTape` that watched `variables` while the draws were made.
      variables: the surrogate's variables.
      clip: the clip of a record's gradient.
      aligned: clip the gradients by `draws` instead of those by `variables`.
      **exact: other attributes of `StepGradient`.

    #### Formal guarantee

    `pull_back` reads the draws and the variables, no record: what it returns is post-processing of what it is given.
    """

    def pull_back(by_draws: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        return tape.gradient(draws, variables, output_gradients=by_draws, unconnected_gradients="zero")

    by_jacobian = None if aligned else _by_jacobian(pull_back, draws, variables)

    def record_gradient(record: Structure, keep: tf.Tensor) -> tuple[tf.Tensor, Sequence[tf.Tensor]]:
        with tf.GradientTape(watch_accessed_variables=False) as inner:
            inner.watch(draws)
            loss = record_loss(record)
        by_draws = inner.gradient(loss, draws, unconnected_gradients="zero")
        if aligned:
            return loss, by_draws
        if by_jacobian is not None:
            # A NaN or Inf reaches all of this record's gradient, 0 x Inf being NaN, and nothing of another's: `clipped_sum`
            # finds it there. To look for it here would make XLA compute the gradient twice.
            return loss, by_jacobian(by_draws)
        # Selected before the pull-back, which may lose a NaN on its way (C8).
        by_draws, _ = select_finite(by_draws, keep & tf.math.is_finite(loss))
        return loss, pull_back(by_draws)

    if aligned:
        return mapped(record_gradient, draws, clip, pull_back=pull_back, **exact)
    return mapped(record_gradient, variables, clip, **exact)


def _by_jacobian(pull_back: PullBack, draws: Sequence[tf.Tensor], variables: Sequence[tf.Variable]) -> PullBack | None:
    """Returns `pull_back` as a product with the draws' Jacobian, where they are few: made once a step, not for every record.

    Gradients of the draws must be linear in what is pulled back, as all but contrived ones are.
    """
    if not draws or not all(part.shape.is_fully_defined() for part in [*draws, *variables]):
        return None
    sizes = [int(np.prod(part.shape)) for part in draws]
    if sum(sizes) > _FEW or any(part.dtype != draws[0].dtype for part in [*draws, *variables]):
        return None

    def of_coordinate(unit: tf.Tensor) -> tf.Tensor:
        parts = zip(tf.split(unit, sizes), draws, strict=True)
        return tf.concat(
            [tf.reshape(one, [-1]) for one in pull_back([tf.reshape(p, d.shape) for p, d in parts])], axis=0
        )

    jacobian = map_apart(of_coordinate, tf.eye(sum(sizes), dtype=draws[0].dtype))

    def product(by_draws: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        flat = tf.concat([tf.reshape(part, [-1]) for part in by_draws], axis=0)
        parts = tf.split(tf.linalg.matvec(jacobian, flat, transpose_a=True), [int(np.prod(v.shape)) for v in variables])
        return [tf.reshape(part, variable.shape) for part, variable in zip(parts, variables, strict=True)]

    return product
