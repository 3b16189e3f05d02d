"""Ways to clip one record's gradient, and the value that carries a clipped sum with its sensitivity."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import Sensitivity


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """A sum of per-record gradients, each clipped, before noise.

    Attributes:
      tensors: one tensor per variable, in the variables' order and shapes.
      l2_norm_clip: the bound C on one record's joint l2 norm over all tensors.
      sensitivity: how far one record can move the sum, in units of `l2_norm_clip`: its presence against its absence
        (A) and its replacement by another (D).
      noise_scales: for each tensor, the standard deviation that its noise is to have over `noise_multiplier *
        l2_norm_clip`; None: 1 for all. `sensitivity` is that of the tensors divided by these.
      num_metrics: how many of the last tensors are no gradient but sums of bounded values to be shown.

    #### Formal guarantee

    For data sets S and S' that differ by the presence of one record, and equal randomness,
    `||sum(S) - sum(S')|| <= sensitivity.add_or_remove * l2_norm_clip` in exact arithmetic, whatever the record holds.

    Raises:
      ValueError: a tensor is of another type than float32 and float64.
    """

    tensors: Sequence[Any]
    l2_norm_clip: float
    sensitivity: Sensitivity = dataclasses.field(default_factory=Sensitivity)
    noise_scales: Sequence[float] | None = None
    num_metrics: int = 0

    def __post_init__(self) -> None:
        refuse_low_precision(self.tensors)


def refuse_low_precision(tensors: Sequence[Any]) -> None:
    """Raises `ValueError` for tensors that are neither float32 nor float64: sums in float16 round by many clips."""
    for part in tensors:
        dtype = tf.as_dtype(part.dtype)
        if dtype not in (tf.float32, tf.float64):
            raise ValueError(
                f"A gradient is of dtype {dtype.name}, whose rounding lets one record move a sum by many clips: use float32 and "
                "float64 alone,\nfor variables and draws."
            )


CLIPPINGS = ("flat", "per_layer", "normalized")

_STABILITY = 0.01

_TENSOR_FLOAT_32 = 2.0**-10
"""Machine epsilon of matrix products on GPUs that round their factors."""


def layer_names(variables: Sequence[Any]) -> list[str]:
    """For each Keras variable the layer that it belongs to, as its name says; itself if the name says nothing."""
    names = [variable.name for variable in variables]
    return [name.rsplit("/", 1)[0] if "/" in name else f"{number}" for number, name in enumerate(names)]


def clip_factors(
    squared_norms: Sequence[Any], l2_norm_clip: float, clipping: str = "flat", layers: Sequence[str] | None = None
) -> list[Any]:
    """What to multiply each part of a record's gradient by, so that its joint l2 norm is at most `l2_norm_clip`.

    Args:
      squared_norms: for each part its squared l2 norm, float tensors of one shape (over records).
      l2_norm_clip: the bound C.
      clipping: "flat", one factor min(1, C / norm) for all parts (Abadi et al. 2016); "per_layer", each of L layers is
        clipped to C / sqrt(L) by itself (McMahan et al. 2018, arXiv:1812.06210); "normalized", C / (norm + 0.01), which
        gives small gradients the weight of large ones (Bu et al. 2022, arXiv:2206.07136).
      layers: for each part a name of its layer; None: each part is its own.

    Returns:
      For each part a tensor of factors; they are finite where the norms are.

    #### Formal guarantee

    The scaled gradient's joint norm is at most C under each of these, so the sensitivity is the same. Where products of
    matrices, by which the sums are made, round their factors (TensorFloat-32), the bound is C less that rounding.
    """
    if product_epsilon(squared_norms[0].dtype) == _TENSOR_FLOAT_32:
        l2_norm_clip = l2_norm_clip * (1.0 - 2.0 * _TENSOR_FLOAT_32)
    if clipping == "per_layer":
        layers = [str(number) for number in range(len(squared_norms))] if layers is None else layers
        sums = {
            layer: tf.add_n([s for s, of in zip(squared_norms, layers, strict=True) if of == layer]) for layer in layers
        }
        bound = l2_norm_clip / len(sums) ** 0.5
        factors = {layer: _down_to(bound, tf.sqrt(total)) for layer, total in sums.items()}
        return [factors[layer] for layer in layers]
    norm = tf.sqrt(tf.add_n(squared_norms))
    if clipping == "normalized":
        factor = exactly(l2_norm_clip, norm.dtype) / (norm + _STABILITY)
    else:
        factor = _down_to(l2_norm_clip, norm)
    return [factor] * len(squared_norms)


def exactly(number: Any, dtype: Any) -> Any:
    """`tf.cast` of a Python float rounds it to float32 on the way."""
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def product_epsilon(dtype: Any) -> float:
    """Relative rounding of matrix products of this float type, here and now."""
    rounds = dtype == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled()
    if rounds and tf.config.list_physical_devices("GPU"):
        return _TENSOR_FLOAT_32
    return float(np.finfo(dtype.as_numpy_dtype).eps)


def rounding_of_pairs(terms: Any, dtype: Any) -> Any:
    """Relative rounding of a sum of products of two entries of Gram matrices, over the sum of the rows' lengths, squared.

    Args:
      terms: how many numbers are added up, in all sums together.
      dtype: float type; sums of float32 are of float32 also where the factors are rounded to TensorFloat-32.
    """
    added = terms * float(np.finfo(dtype.as_numpy_dtype).eps)
    return added + 4.0 * _TENSOR_FLOAT_32 if product_epsilon(dtype) == _TENSOR_FLOAT_32 else added


def _down_to(bound: float, norm: Any) -> Any:
    bound = exactly(bound, norm.dtype)
    return tf.where(norm > bound, bound / norm, tf.ones_like(norm))


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


def clip_record(gradient: Sequence[Any], l2_norm_clip: float, clipping: str = "flat") -> list[Any]:
    """Scales one record's gradient to a joint l2 norm of at most `l2_norm_clip`.

    The norm is taken of the gradient over its largest entry, so that finite gradients whose squares overflow are
    clipped like any other. (`tf.linalg.global_norm` has no vectorised form under `tf.vectorized_map`.)

    Args:
      gradient: finite float tensors, the parts of one record's gradient.
      l2_norm_clip: positive; `math.inf` leaves the gradient as it is.
      clipping: see `clip_factors`; each part is a layer of its own.
    """
    if clipping == "per_layer":
        bound = l2_norm_clip / len(gradient) ** 0.5
        return [clip_record([part], bound)[0] for part in gradient]
    largest = tf.reduce_max(tf.stack([tf.reduce_max(tf.abs(part)) for part in gradient]))
    unit = tf.where(largest > 0, largest, tf.ones_like(largest))
    parts = [part / unit for part in gradient]
    root = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in parts]))
    clip = exactly(l2_norm_clip, root.dtype)
    # Not `part * (clip / norm)`: of a huge norm that scale is denormal, so rounded coarsely (over the bound) or to zero.
    if clipping == "normalized":
        scale = clip / (root + _STABILITY / unit)
    else:
        scale = tf.where(unit * root > clip, clip / root, unit)
    return [part * scale for part in parts]
