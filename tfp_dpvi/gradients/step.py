"""The interface of clipped-gradient engines, which state their sensitivity before anything is traced (contract C3)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, ClippedSum
from tfp_dpvi.gradients.joint import JointRelease
from tfp_dpvi.gradients.vmap import RecordGradient, clipped_sum
from tfp_dpvi.privacy import NeighboringRelation, SamplingScheme, Sensitivity


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The public numbers of a step, which a clipped gradient may depend on.

    Attributes:
      sampling: the sampling scheme.
      expected_batch_size: the public denominator qN.
      num_records: the public N.
      neighboring_relation: the relation of neighbouring data sets.
    """

    sampling: SamplingScheme
    expected_batch_size: float
    num_records: int
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE


@dataclasses.dataclass(frozen=True)
class StepGradient:
    """The gradient of one step, given its Monte Carlo draws.

    Attributes:
      clipped_sum: `(records, mask, key) -> (ClippedSum, PerExample)` of a physical batch. The key is for per-record draws.
      released: tensors with the shapes and dtypes of the sum's parts.
      data_independent: exact gradient of the terms without records, one tensor for each variable, or None.
      pull_back: maps the noisy mean to one tensor for each variable, without reading records; None for the identity.
      data_independent_loss: the scalar whose gradient is `data_independent`, or None.
      record_gradient: one record's loss and gradient before the clip, for engines that have it.
      public: tensors that depend on no record, for the accumulators of joint releases.
    """

    clipped_sum: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[ClippedSum, PerExample]]
    released: Sequence[tf.Tensor]
    data_independent: Sequence[tf.Tensor] | None = None
    pull_back: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None
    data_independent_loss: tf.Tensor | None = None
    record_gradient: RecordGradient | None = None
    public: Structure = ()


def mapped(record_gradient: RecordGradient, released: Sequence[tf.Tensor], clip: Clip, **exact: Any) -> StepGradient:
    """Returns a step's gradient by vectorizing one record's gradient over the batch, see `clipped_sum`.

    `released` are tensors of the gradient's shapes and dtypes, `exact` other attributes of `StepGradient`.
    """

    def of_batch(records: Structure, mask: tf.Tensor, key: tf.Tensor) -> tuple[ClippedSum, PerExample]:
        del key
        return clipped_sum(record_gradient, records, mask, clip)

    return StepGradient(of_batch, released, record_gradient=record_gradient, **exact)


@dataclasses.dataclass(frozen=True)
class ClippedGradient:
    """A model's clipped gradient, returned by `DPModel.clipped_gradient`.

    Attributes:
      draw: `key -> StepGradient`, makes the Monte Carlo draws shared by a step's records; traced once.
      clip: the bound C on the l2 norm of one record's gradient.
      sensitivity: sensitivity of the sum to one record, in units of the clip.
      noise_scales: for each part of the sum the standard deviation of its noise over `noise_multiplier * l2_norm_clip`;
        None for 1.
      joint: releases with the gradient besides the metrics of `compile`.
      batchwise: whether it works on a physical batch at once instead of record by record. Without XLA, padding is removed.
      gains_from_xla: whether long runs are compiled with XLA unless `compile(jit_compile=)` says otherwise.
      identity: hashable; equal values trace the same `draw`.

    #### Formal guarantee

    The result of `draw` states the same sensitivity, which every step checks while it is traced.
    """

    draw: Callable[[tf.Tensor], StepGradient]
    clip: Clip
    sensitivity: Sensitivity = dataclasses.field(default_factory=Sensitivity)
    noise_scales: tuple[float, ...] | None = None
    joint: tuple[JointRelease, ...] = ()
    batchwise: bool = False
    gains_from_xla: bool = True
    identity: Hashable = ()
