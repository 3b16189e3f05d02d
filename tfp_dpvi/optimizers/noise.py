"""The Gaussian mechanism on a clipped sum."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import ClippedSum, exactly


@dataclasses.dataclass(frozen=True)
class PrivatizedGradients:
    """Noisy gradients, one tensor per variable, ready for one `apply_gradients`.

    Attributes:
      tensors: the gradients.
      joint: noisy means of the joint releases, see `ClippedSum.num_joint`.
      mean: the gradient's noisy mean, before `pull_back` and exact terms.
    """

    tensors: Sequence[tf.Tensor]
    joint: Sequence[tf.Tensor] = ()
    mean: Sequence[tf.Tensor] = ()


def privatize(
    clipped: ClippedSum,
    *,
    noise_multiplier: tf.Tensor,
    key: tf.Tensor,
    expected_batch_size: float,
    pull_back: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
    data_independent: Sequence[tf.Tensor] | None = None,
) -> PrivatizedGradients:
    """`pull_back((sum + z C Z) / (q N)) + exact`: contracts C1 and C2.

    Args:
      clipped: the clipped sum, with its bound C.
      noise_multiplier: z >= 0, the noise's standard deviation over C; a number or a scalar tensor.
      key: int64 tensor of shape [2], used once.
      expected_batch_size: the public denominator qN; never the realised batch size, which is secret.
      pull_back: turns the gradient's noisy mean into one tensor for each variable, without looking at records; None: it is that.
      data_independent: exact gradient of the terms that touch no record, added without clip or noise.

    Returns:
      Privatised gradients, one for each variable.

    #### Formal guarantee

    One Gaussian release of `clipped`: standard deviation `z C` in every coordinate (times the part's `noise_scales`),
    independent across coordinates and keys, followed by post-processing. An empty batch is noise alone, and a release like any other.
    """
    dtype = clipped.tensors[0].dtype
    noise = _random.normals(key, [part.shape.as_list() for part in clipped.tensors], dtype)
    multiplier = tf.cast(noise_multiplier, dtype)
    released = []
    for part, draw, scale in zip(clipped.tensors, noise, clipped.noise_scales or [1.0] * len(noise), strict=True):
        deviation = multiplier * exactly(clipped.clip.l2_norm_clip * scale, dtype)
        # Selected, since zero noise on an infinite clip (both off) must give no noise and not 0 x Inf.
        deviation = tf.where(multiplier > 0, deviation, tf.zeros_like(deviation))
        released.append((part + deviation * draw) / exactly(expected_batch_size, dtype))
    num = len(released) - clipped.num_joint
    mean, joint = released[:num], released[num:]
    released = mean
    if pull_back is not None:
        released = list(pull_back(released))
    if data_independent is not None:
        released = [part + exact for part, exact in zip(released, data_independent, strict=True)]
    return PrivatizedGradients(released, joint, mean)
