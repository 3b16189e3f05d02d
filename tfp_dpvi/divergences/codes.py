"""What a batch-wise regulariser is handed, and the checks and weights that all divergences share."""

from __future__ import annotations

import dataclasses
from typing import Any

from tfp_dpvi._tf import tf


def points(value: Any, name: str, *, like: Any = None) -> Any:
    """`value` as a float tensor [n, d]; with `like`, of the same dtype and d. Errors name the argument."""
    value = tf.convert_to_tensor(value, dtype_hint=None if like is None else like.dtype)
    if not value.dtype.is_floating:
        raise ValueError(f"{name} has dtype {value.dtype.name}: codes are float32 or float64. Cast it with tf.cast.")
    if value.shape.rank != 2:
        raise ValueError(
            f"{name} has shape {value.shape}: it must be [number of points, number of dimensions]. Reshape it, for "
            f"instance with {name}[:, tf.newaxis] for points on a line."
        )
    if like is not None and value.dtype != like.dtype:
        raise ValueError(
            f"{name} has dtype {value.dtype.name}, the points it is compared with {like.dtype.name}: cast one."
        )
    if like is not None and not value.shape[1:].is_compatible_with(like.shape[1:]):
        raise ValueError(
            f"{name} has shape {value.shape}, the points it is compared with {like.shape}: both need the same number of "
            "dimensions (the last axis)."
        )
    return value


def row_weights(value: Any, rows: Any, name: str) -> Any:
    """`value` as weights [n] of the rows of `rows` [n, ...]; all ones for None."""
    if value is None:
        return tf.ones(tf.shape(rows)[:1], rows.dtype)
    value = tf.convert_to_tensor(value, dtype_hint=rows.dtype)
    if value.dtype != rows.dtype:
        raise ValueError(f"{name} has dtype {value.dtype.name}, its rows {rows.dtype.name}: cast it with tf.cast.")
    if value.shape.rank != 1 or not value.shape.is_compatible_with(rows.shape[:1]):
        raise ValueError(
            f"{name} has shape {value.shape}, its rows {rows.shape}: it needs one weight per row (1 in the group, 0 not)."
        )
    return value


def shares(weights: Any) -> tuple[Any, Any]:
    """Weights scaled to sum to one, and whether there is any weight at all; without any, the shares are zeros."""
    total = tf.reduce_sum(weights)
    present = total > 0
    return weights / tf.where(present, total, tf.ones_like(total)), present


def present_rows(rows: Any, weights: Any) -> Any:
    """`rows`, zeros where the weight is zero: selected, since zero times a NaN would be NaN."""
    return tf.where(weights[:, tf.newaxis] > 0, rows, tf.zeros_like(rows))


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """The codes of one group of records, as a batch-wise regulariser `regularizer(codes) -> scalar` sees them.

    Shapes are static. Which records belong to the group is said by weights, so that a group of any size, an empty one
    too, has the same shapes. Arrays become tensors. A regulariser must be finite, with finite gradients, whatever the weights.

    Attributes:
      samples: float [n, d], one reparameterised draw from each row's posterior. Rows of weight zero hold zeros.
      weights: float [n], 1 for rows in the group and 0 for rows that are not (padding, or other groups).
      posterior: TFP distribution with batch shape [n] and event shape [d], q(z | x_i) of each row. Parameters of rows of
        weight zero may be NaN: select among log-probabilities with `tf.where`, never multiply by the weights. (The
        gradient reaching those rows' own parameters is then zero times NaN; the model selects it away.)
      prior: TFP distribution with event shape [d].
      prior_samples: float [m, d], fresh draws from the prior.

    Raises:
      ValueError: shapes or dtypes that do not fit together.
    """

    samples: Any
    weights: Any
    posterior: Any
    prior: Any
    prior_samples: Any

    def __post_init__(self) -> None:
        samples = points(self.samples, "samples")
        object.__setattr__(self, "samples", samples)
        object.__setattr__(self, "weights", row_weights(self.weights, samples, "weights"))
        object.__setattr__(self, "prior_samples", points(self.prior_samples, "prior_samples", like=samples))
        rows, event = samples.shape[:1], samples.shape[1:]
        for name, distribution, batch in (
            ("posterior", self.posterior, rows),
            ("prior", self.prior, tf.TensorShape([])),
        ):
            check_distribution(distribution, name, batch, event, samples.dtype)


def check_distribution(distribution: Any, name: str, batch: Any, event: Any, dtype: Any) -> None:
    """Raises unless `distribution` is one of TFP's with these static shapes and this dtype."""
    if isinstance(distribution, type) or not all(hasattr(distribution, part) for part in ("log_prob", "event_shape")):
        raise TypeError(f"{name} must be a TFP distribution, got {distribution!r}.")
    if not isinstance(distribution.event_shape, tf.TensorShape):
        raise ValueError(
            f"{name} {distribution.name!r} has parts (event shape {distribution.event_shape}): codes are one vector, so join "
            "the parts, for instance with tfd.Blockwise."
        )
    if not (distribution.batch_shape.is_compatible_with(batch) and distribution.event_shape.is_compatible_with(event)):
        raise ValueError(
            f"{name} {distribution.name!r} has batch shape {distribution.batch_shape} and event shape "
            f"{distribution.event_shape}; it needs {batch} and {event}. tfd.Independent(..., 1) makes the last batch axis "
            "part of the event."
        )
    if tf.as_dtype(distribution.dtype) != dtype:
        raise ValueError(
            f"{name} {distribution.name!r} has dtype {tf.as_dtype(distribution.dtype).name}, the codes {dtype.name}: build "
            "both in the same."
        )
