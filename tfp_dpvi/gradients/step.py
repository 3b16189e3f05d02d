"""The interface of clipped-gradient engines.

An engine states its sensitivity before anything is traced (contract 3).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, ClippedSum
from tfp_dpvi.gradients.joint import JointRelease
from tfp_dpvi.gradients.vmap import RecordGradient, clipped_sum
from tfp_dpvi.privacy import Sensitivity


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The public numbers of a step, which a clipped gradient may depend on.

    ```python
    >>> StepSpec(expected_batch_size=10.0, num_records=100).num_records
    100

    ```

    Attributes:
      expected_batch_size: The public denominator qN.
      num_records: The public N.
    """

    expected_batch_size: float
    num_records: int


@dataclasses.dataclass(frozen=True)
class StepGradient:
    """The gradient of one step, given its Monte Carlo draws.

    `mapped` builds it from the gradient of one record.

    ```python
    >>> import tensorflow as tf
    >>> def record_gradient(record, keep):
    ...     return tf.square(record), [2.0 * record]
    >>> step = mapped(record_gradient, [tf.zeros([])], Clip(1.0))
    >>> records, key = tf.constant([0.1, 5.0]), tf.zeros([2], tf.int64)
    >>> total, _ = step.clipped_sum(records, tf.constant([True, True]), key)
    >>> print(f"{total.tensors[0]:.1f}")
    1.2

    ```

    Attributes:
      clipped_sum: `clipped_sum(records, mask, key)` returns the clipped sum of a physical batch;
        the key is for per-record draws.
      released: Tensors with the shapes and dtypes of the sum's parts.
      data_independent: The exact gradient of the terms without records, for each variable; or None.
      pull_back: Maps the noisy mean to one tensor for each variable, without reading records; None
        for the identity.
      data_independent_loss: The scalar whose gradient is `data_independent`; or None.
      record_gradient: The gradient of one record before the clip, for engines that have it.
      public: Tensors that depend on no record, for the accumulators of joint releases.
    """

    clipped_sum: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[ClippedSum, PerExample]]
    released: Sequence[tf.Tensor]
    data_independent: Sequence[tf.Tensor] | None = None
    pull_back: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None
    data_independent_loss: tf.Tensor | None = None
    record_gradient: RecordGradient | None = None
    public: Structure = ()


def mapped(
    record_gradient: RecordGradient, released: Sequence[tf.Tensor], clip: Clip, **exact: Any
) -> StepGradient:
    """Returns a step's gradient that maps one record's gradient over the batch.

    Args:
      record_gradient: The loss and the gradient of one record, see `RecordGradient`.
      released: Tensors of the gradient's shapes and dtypes.
      clip: The bound C and its scheme, see `clipped_sum`.
      **exact: Other attributes of `StepGradient`.
    """

    def clipped_sum_of_batch(
        records: Structure, mask: tf.Tensor, key: tf.Tensor
    ) -> tuple[ClippedSum, PerExample]:
        del key
        return clipped_sum(record_gradient, records, mask, clip)

    return StepGradient(clipped_sum_of_batch, released, record_gradient=record_gradient, **exact)


@dataclasses.dataclass(frozen=True)
class ClippedGradient:
    """A model's clipped gradient, which `DPModel.clipped_gradient` returns.

    ```python
    >>> import tensorflow as tf
    >>> def draw(key):  # The records' squared distance from a draw, which they share.
    ...     shared = tf.random.stateless_normal([], key)
    ...     def record_gradient(record, keep):
    ...         return tf.square(record - shared), [2.0 * (shared - record)]
    ...     return mapped(record_gradient, [shared], Clip(1.0))
    >>> ClippedGradient(draw, Clip(1.0)).sensitivity.add_or_remove
    1.0

    This one says that it works on batches as a whole, with half of the noise on its only part:

    >>> gradient = ClippedGradient(
    ...     draw, Clip(1.0), Sensitivity(2.0, 4.0), noise_scales=(0.5,), joint=(), batchwise=True
    ... )

    ```

    Attributes:
      draw: Returns the gradient of a step from a key, with the draws that the step's records share.
        Traced once.
      clip: The bound C and its scheme.
      sensitivity: A and D of the sum, see `ClippedSum`.
      noise_scales: The noise of each part, see `ClippedSum`.
      joint: Releases with the gradient besides the metrics of `compile`.
      batchwise: True if it works on a physical batch at once; without XLA, padding is then removed.
      gains_from_xla: True if long runs are to be compiled with XLA, which `compile(jit_compile=)`
        overrides.
      identity: A hashable value; equal values trace the same `draw`.

    #### Formal guarantee

    The result of `draw` states the same clip, sensitivity and scales, which every step checks while
    it is traced.
    """

    draw: Callable[[tf.Tensor], StepGradient]
    clip: Clip
    sensitivity: Sensitivity = dataclasses.field(default_factory=Sensitivity)
    noise_scales: tuple[float, ...] | None = None
    joint: tuple[JointRelease, ...] = ()
    batchwise: bool = False
    gains_from_xla: bool = True
    identity: Hashable = ()
