"""Flat clipping of one record's gradient, and the value that carries a clipped sum with its sensitivity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfp_dpvi._keras import tf
from tfp_dpvi.privacy import Sensitivity


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """A sum of per-record gradients, each clipped, before noise.

    Attributes:
      tensors: one tensor per variable, in the variables' order and shapes.
      l2_norm_clip: the bound C on one record's joint l2 norm over all tensors.
      sensitivity: how far one record can move the sum, in units of `l2_norm_clip`: its presence against its absence
        (A) and its replacement by another (D).

    #### Formal guarantee

    For data sets S and S' that differ by the presence of one record, and equal randomness,
    `||sum(S) - sum(S')|| <= sensitivity.add_or_remove * l2_norm_clip` in exact arithmetic, whatever the record holds.
    """

    tensors: Sequence[Any]
    l2_norm_clip: float
    sensitivity: Sensitivity = dataclasses.field(default_factory=Sensitivity)


def select_finite(gradient: Sequence[Any], keep: Any) -> tuple[list[Any], Any]:
    """Zeros in place of a gradient with any NaN or Inf in it, or of one that is not to be kept (contract C8).

    Args:
      gradient: float tensors, the parts of one record's gradient.
      keep: scalar bool tensor.

    Returns:
      The gradient or zeros, *selected*, never multiplied (0 x NaN is NaN); and whether it was kept.
    """
    for part in gradient:
        keep = keep & tf.reduce_all(tf.math.is_finite(part))
    return [tf.where(keep, part, tf.zeros_like(part)) for part in gradient], keep


def clip_record(gradient: Sequence[Any], l2_norm_clip: float) -> list[Any]:
    """Scales one record's gradient to a joint l2 norm of at most `l2_norm_clip`.

    The norm is taken of the gradient over its largest entry, so that finite gradients whose squares overflow are
    clipped like any other. (`tf.linalg.global_norm` has no vectorised form under `tf.vectorized_map`.)

    Args:
      gradient: finite float tensors, the parts of one record's gradient.
      l2_norm_clip: positive; `math.inf` leaves the gradient as it is.
    """
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(part)) for part in gradient]))
    unit = tf.where(largest > 0, largest, tf.ones_like(largest))
    parts = [part / unit for part in gradient]
    root = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in parts]))
    clip = tf.cast(l2_norm_clip, root.dtype)
    # Not `part * (clip / norm)`: of a huge norm that scale is denormal, so rounded coarsely (over the bound) or to zero.
    scale = tf.where(unit * root > clip, clip / root, unit)
    return [part * scale for part in parts]
