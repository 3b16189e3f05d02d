"""The codes of one group of records, and the checks and weights that all divergences share."""

from __future__ import annotations

import dataclasses

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf, tfd


def points(value: tf.Tensor, name: str, *, like: tf.Tensor | None = None) -> tf.Tensor:
    """Returns points as a float tensor [n, d].

    Args:
      value: Numbers of shape [n, d].
      name: The argument, for messages.
      like: A tensor of the same dtype and d; None for any.

    Raises:
      ValueError: The shape or the dtype is another.
    """
    value = tf.convert_to_tensor(value, dtype_hint=None if like is None else like.dtype)
    if not value.dtype.is_floating or value.shape.rank != 2:
        raise ValueError(
            f"{name} has dtype {value.dtype.name} and shape {value.shape}: it must be float32 or "
            "float64 [number of points, number of dimensions]. Use tf.cast, and for instance "
            f"{name}[:, tf.newaxis]."
        )
    if like is not None and (
        value.dtype != like.dtype or not value.shape[1:].is_compatible_with(like.shape[1:])
    ):
        raise ValueError(
            f"{name} has dtype {value.dtype.name} and shape {value.shape}, its counterpart "
            f"{like.dtype.name} and {like.shape}: both need the same dtype and number of "
            "dimensions."
        )
    return value


def row_weights(value: tf.Tensor | None, rows: tf.Tensor, name: str) -> tf.Tensor:
    """Returns the weights of rows as a tensor [n]; all ones for None.

    Args:
      value: The weights of the rows, [n]; or None.
      rows: The rows, a float tensor [n, ...].
      name: The argument, for messages.

    Raises:
      ValueError: The shape or the dtype is another.
    """
    if value is None:
        return tf.ones(tf.shape(rows)[:1], rows.dtype)
    value = tf.convert_to_tensor(value, dtype_hint=rows.dtype)
    if (
        value.dtype != rows.dtype
        or value.shape.rank != 1
        or not value.shape.is_compatible_with(rows.shape[:1])
    ):
        raise ValueError(
            f"{name} has dtype {value.dtype.name} and shape {value.shape}, its rows "
            f"{rows.dtype.name} and {rows.shape}: it needs one weight per row, of the same dtype."
        )
    return value


def shares(weights: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the weights scaled to sum to one, and whether any is positive.

    If all weights are zero, so are the shares.
    """
    total = tf.reduce_sum(weights)
    present = total > 0
    return weights / tf.where(present, total, tf.ones_like(total)), present


def present_rows(rows: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    """Returns rows with zeros where the weight is zero: selected, since 0 x NaN is NaN.

    Args:
      rows: Float [n, d].
      weights: Float [n].
    """
    return tf.where(weights[:, tf.newaxis] > 0, rows, tf.zeros_like(rows))


@dataclasses.dataclass(frozen=True, eq=False)
class Codes:
    """The codes of one group of records.

    They are the argument of a batch-wise regulariser `regularizer(codes) -> scalar`. Shapes are
    static: weights mark the group's records, and an empty group has the same shapes. A regulariser
    and its gradients must be finite for all weights.

    ```python
    >>> rows, unit = tf.constant([[0.0], [2.0]]), tfd.MultivariateNormalDiag([0.0])
    >>> posterior = tfd.MultivariateNormalDiag(rows, tf.ones([2, 1]))
    >>> codes = Codes(rows, tf.constant([1.0, 0.0]), posterior, unit, tf.zeros([3, 1]))
    >>> float(tf.reduce_sum(codes.weights * codes.samples[:, 0]))  # A regulariser.
    0.0

    ```

    Attributes:
      samples: Float [n, d], one reparameterised draw from each row's posterior. Rows of weight zero
        hold zeros.
      weights: Float [n], 1 for rows in the group and 0 for rows that are not (padding, or other
        groups).
      posterior: A TFP distribution with batch shape [n] and event shape [d], q(z | x_i) of each
        row. Parameters of rows of weight zero may be NaN: select among log-probabilities with
        `tf.where`, never multiply by the weights.
      prior: A TFP distribution with event shape [d].
      prior_samples: Float [m, d], fresh draws from the prior.
    """

    samples: tf.Tensor
    weights: tf.Tensor
    posterior: tfd.Distribution
    prior: tfd.Distribution
    prior_samples: tf.Tensor


def check_distribution(
    distribution: tfd.Distribution,
    name: str,
    batch: tf.TensorShape,
    event: tf.TensorShape,
    dtype: tf.DType,
) -> None:
    """Refuses what is no TFP distribution with these static shapes and this dtype.

    Args:
      distribution: The distribution.
      name: The argument, for messages.
      batch: The batch shape that it must have.
      event: The event shape that it must have.
      dtype: The dtype that it must have.

    Raises:
      TypeError: It is no TFP distribution.
      ValueError: A shape or the dtype is another.
    """
    if not isinstance(distribution, tfd.Distribution):
        raise TypeError(f"{name} must be a TFP distribution, got {check.shown(distribution)}.")
    shapes, kind = (distribution.batch_shape, distribution.event_shape), distribution.dtype
    fits = isinstance(shapes[1], tf.TensorShape) and all(
        map(tf.TensorShape.is_compatible_with, shapes, (batch, event))
    )
    if not fits or tf.as_dtype(kind) != dtype:
        raise ValueError(
            f"{name} {distribution.name!r} has batch shape {shapes[0]}, event shape {shapes[1]} "
            f"and dtype {kind}; it needs {batch}, {event} and {dtype.name}. tfd.Independent(..., "
            "1) moves a batch axis; tfd.Blockwise joins parts."
        )
