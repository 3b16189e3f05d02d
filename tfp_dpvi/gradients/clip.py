"""Clipping of per-example gradients, and the clipped sum with its sensitivity."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import Sensitivity

Scheme = Callable[[Sequence[tf.Tensor], tf.Tensor, Sequence[str]], Sequence[tf.Tensor]]
"""`scheme(squared_norms, bound, layers)` returns a factor for each part of a gradient.

Norms and factors are scalars of one example. The gradient multiplied by the factors must have a
joint norm of at most the bound.
"""

CLIPPINGS: dict[str, Scheme] = {}
"""Schemes by name; see `register_clipping`."""

_SMALLEST = 1e-12  # Far below this bound, float32 would flush noise to zero.
_STABILITY = 0.01
# Machine epsilon of TensorFloat-32 matrix products, which round their factors.
_TENSOR_FLOAT_32 = 2.0**-10


def register_clipping(name: str, scheme: Scheme) -> None:
    """Registers a clipping scheme, which optimizers then take as `clipping=name`.

    Args:
      name: The name, which no other scheme has.
      scheme: The function, see `Scheme`. If the gradient exceeds the bound with its factors, they
        are scaled down to it.

    Raises:
      ValueError: The name is taken.
    """
    if name in CLIPPINGS:
        raise ValueError(f"name={name!r} is registered already: choose another.")
    CLIPPINGS[name] = scheme


@dataclasses.dataclass(frozen=True)
class Clip:
    """A bound C on the l2 norm of one example's gradient, and the scheme that enforces it.

    The schemes are:

    * "flat": one factor min(1, C / norm) for all parts (Abadi et al. 2016).
    * "per_layer": each of L layers is clipped to C / sqrt(L) by itself (McMahan et al. 2018,
      arXiv:1812.06210).
    * "normalized": the factor C / (norm + 0.01), which gives small gradients the weight of large
      ones (Bu et al. 2022, arXiv:2206.07136).
    * a name that `register_clipping` knows.

    ```python
    >>> import tensorflow as tf
    >>> clip = Clip(1.0)
    >>> clip.factors([tf.constant([0.25, 4.0])])[0].numpy().tolist()
    [1.0, 0.5]
    >>> Clip(float("inf")).is_off
    True

    ```

    Attributes:
      bound: C > 0. `math.inf` switches clipping off, and privacy with it.
      clipping: The name of the scheme.

    #### Formal guarantee

    A gradient scaled by `factors` has a joint norm of at most C under each scheme, so the
    sensitivity is the same. If matrix products round their factors (TensorFloat-32), the bound is C
    less that rounding.

    Raises:
      ValueError: The bound is not positive, the scheme is unknown, or it needs a finite bound.
    """

    bound: float
    clipping: str = "flat"

    def __post_init__(self) -> None:
        bound = self.bound
        check.one_of("clipping", self.clipping, CLIPPINGS)
        if tf.is_tensor(bound):
            return
        if (
            not isinstance(bound, numbers.Real)
            or isinstance(bound, bool)
            or not float(bound) >= _SMALLEST
        ):
            raise ValueError(
                f"l2_norm_clip must be a positive number, got {check.shown(bound)}: start with 1.0 "
                "(math.inf for runs that are not private)."
            )
        object.__setattr__(self, "bound", float(bound))
        if self.is_off and self.clipping != "flat":
            raise ValueError(
                f"clipping={self.clipping!r} needs a finite l2_norm_clip, got {check.shown(bound)}."
            )

    @property
    def finite_bound(self) -> float | None:
        """C, or None if the clip is off."""
        return None if self.is_off else self.bound

    @property
    def is_off(self) -> bool:
        """True for an infinite bound: nothing is clipped, and no noise makes the sum private."""
        return math.isinf(self.bound)

    @property
    def unit(self) -> float:
        """The bound, or 1 if the clip is off: the unit of sums released with the gradient."""
        return 1.0 if self.is_off else self.bound

    def factors(
        self, squared_norms: Sequence[tf.Tensor], layers: Sequence[str] | None = None
    ) -> list[tf.Tensor]:
        """Returns the factor of each part of a gradient; finite where the norms are.

        Args:
          squared_norms: The squared l2 norms of the parts, float tensors of one shape (over
            examples).
          layers: The name of each part's layer; None if each part is a layer of its own.

        Returns:
          One float tensor for each part, of the shape of its norms.
        """
        dtype = squared_norms[0].dtype
        bound = exactly(self.bound, dtype)
        if product_epsilon(dtype) == _TENSOR_FLOAT_32:
            bound *= 1.0 - 2.0 * _TENSOR_FLOAT_32
        layers = [str(number) for number in range(len(squared_norms))] if layers is None else layers
        scheme = CLIPPINGS[self.clipping]
        if scheme in _BUILT_IN:
            return list(scheme(squared_norms, bound, layers))
        # The scheme sees one example at a time, so that no factor depends on another's norm. A
        # factor that is not finite is replaced.
        factors = tf.vectorized_map(
            lambda own: list(scheme(own, bound, layers)), list(squared_norms)
        )
        factors = [
            tf.where(tf.math.is_finite(factor), factor, tf.zeros_like(factor)) for factor in factors
        ]
        joint = tf.sqrt(
            tf.add_n([tf.square(f) * s for f, s in zip(factors, squared_norms, strict=True)])
        )
        return [factor * _down_to(bound, joint) for factor in factors]


def _down_to(bound: tf.Tensor, norm: tf.Tensor) -> tf.Tensor:
    return tf.where(norm > bound, bound / norm, tf.ones_like(norm))


def _flat(
    squared_norms: Sequence[tf.Tensor], bound: tf.Tensor, layers: Sequence[str]
) -> list[tf.Tensor]:
    return [_down_to(bound, tf.sqrt(tf.add_n(squared_norms)))] * len(layers)


def _per_layer(
    squared_norms: Sequence[tf.Tensor], bound: tf.Tensor, layers: Sequence[str]
) -> list[tf.Tensor]:
    parts: dict[str, list[tf.Tensor]] = {}
    for layer, square in zip(layers, squared_norms, strict=True):
        parts.setdefault(layer, []).append(square)
    share = bound / len(parts) ** 0.5
    factors = {
        layer: _down_to(share, tf.sqrt(tf.add_n(squares))) for layer, squares in parts.items()
    }
    return [factors[layer] for layer in layers]


def _normalized(
    squared_norms: Sequence[tf.Tensor], bound: tf.Tensor, layers: Sequence[str]
) -> list[tf.Tensor]:
    return [bound / (tf.sqrt(tf.add_n(squared_norms)) + _STABILITY)] * len(layers)


_BUILT_IN = (_flat, _per_layer, _normalized)
register_clipping("flat", _flat)
register_clipping("per_layer", _per_layer)
register_clipping("normalized", _normalized)


@dataclasses.dataclass(frozen=True)
class ClippedSum:
    """A sum of per-example gradients, each clipped, before noise.

    ```python
    >>> import tensorflow as tf
    >>> ClippedSum([tf.constant([0.5, -0.2])], Clip(1.0)).sensitivity.replace
    2.0

    An engine may clip layers apart and give each its own noise, in units of which it then states
    the sensitivity. Here each of two parts moves by at most 0.6 and 0.8 clips, that is by one of
    its own noise scales:

    >>> parts = [tf.constant([0.5, -0.2]), tf.constant([0.7])]
    >>> both = Sensitivity(add_or_remove=2**0.5, replace=2 * 2**0.5)
    >>> total = ClippedSum(parts, Clip(1.0), both, noise_scales=[0.6, 0.8], num_joint=0)
    >>> len(total.tensors) - total.num_joint  # Joint releases would follow the gradient's parts.
    2

    ```

    Attributes:
      tensors: One tensor for each variable, in the order and the shapes of the variables.
      clip: The bound C on one example's joint l2 norm over all tensors.
      sensitivity: A and D in units of C, of the tensors divided by `noise_scales`.
      noise_scales: The noise of each tensor over `noise_multiplier * C`; None for 1.
      num_joint: The number of joint releases: the last of the tensors, which are no part of the
        gradient.

    #### Formal guarantee

    For data sets S and S' that differ by the presence of one record, and equal randomness,
    `||sum(S) - sum(S')|| <= sensitivity.add_or_remove * C` in exact arithmetic, whatever the record
    holds.

    Raises:
      ValueError: A tensor is neither float32 nor float64.
    """

    tensors: Sequence[tf.Tensor]
    clip: Clip
    sensitivity: Sensitivity = dataclasses.field(default_factory=Sensitivity)
    noise_scales: Sequence[float] | None = None
    num_joint: int = 0

    def __post_init__(self) -> None:
        refuse_low_precision(self.tensors)


def refuse_low_precision(tensors: Sequence[tf.Tensor]) -> None:
    """Raises `ValueError` for tensors that are neither float32 nor float64.

    Sums in float16 round by many clips.
    """
    for dtype in (tf.as_dtype(part.dtype) for part in tensors):
        if dtype not in (tf.float32, tf.float64):
            raise ValueError(
                f"A gradient has dtype {dtype.name}, and one record would move a sum by many "
                "clips (docs/sharp_edges.md): use only float32 or float64."
            )


def layer_names(variables: Sequence[tf.Variable]) -> list[str]:
    """Returns the layer of each Keras variable, as the variable's name says.

    A name without a layer stands for a layer of its own, whose name is the variable's number.
    """
    names = [variable.name for variable in variables]
    return [
        name.rsplit("/", 1)[0] if "/" in name else f"{number}" for number, name in enumerate(names)
    ]


def select_finite(
    gradient: Sequence[tf.Tensor], keep: tf.Tensor
) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Replaces a record's gradient by zeros if it has a NaN or Inf (contract 8).

    Args:
      gradient: The parts of the gradient of one record.
      keep: Scalar bool; False replaces the gradient in any case.

    Returns:
      The gradient or zeros, *selected*, never multiplied (0 x NaN is NaN); and a scalar bool, True
      if the gradient was kept.
    """
    for part in gradient:
        keep = keep & tf.reduce_all(tf.math.is_finite(part))
    return [tf.where(keep, part, tf.zeros_like(part)) for part in gradient], keep


# ---------------------------------------------------------------------------- rounding


def exactly(number: float | tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Casts a number exactly; `tf.cast` rounds a Python float to float32 first.

    Args:
      number: A Python number, or a tensor.
      dtype: The float type of the result.
    """
    return tf.cast(number, dtype) if tf.is_tensor(number) else tf.constant(number, dtype)


def product_epsilon(dtype: tf.DType) -> float:
    """Returns the relative rounding of matrix products of a float type.

    It depends on the current settings of TensorFlow, which may use TensorFloat-32.
    """
    rounds = dtype == tf.float32 and tf.config.experimental.tensor_float_32_execution_enabled()
    if rounds and tf.config.list_physical_devices("GPU"):
        return _TENSOR_FLOAT_32
    return float(np.finfo(dtype.as_numpy_dtype).eps)


def rounding_of_pairs(terms: float | tf.Tensor, dtype: tf.DType) -> float | tf.Tensor:
    """Returns a bound on the rounding of a sum of products of Gram entries.

    Args:
      terms: The number of products.
      dtype: The float type of the entries.

    Returns:
      The bound, relative to the squared sum of the row norms.
    """
    # Products are added in float32 even if TensorFloat-32 rounds their factors.
    added = terms * float(np.finfo(dtype.as_numpy_dtype).eps)
    return added + 4.0 * _TENSOR_FLOAT_32 if product_epsilon(dtype) == _TENSOR_FLOAT_32 else added


def tiny(dtype: tf.DType) -> float:
    """Returns the smallest normal number: TensorFlow flushes smaller ones to zero."""
    return float(np.finfo(dtype.as_numpy_dtype).tiny)
