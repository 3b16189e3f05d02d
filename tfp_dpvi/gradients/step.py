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
from tfp_dpvi.privacy import Sensitivity


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The public numbers of a step, which a clipped gradient may depend on."""

    expected_batch_size: float  # The public denominator qN.
    num_records: int  # The public N.


@dataclasses.dataclass(frozen=True)
class StepGradient:
    """The gradient of one step, given its Monte Carlo draws.

    `clipped_sum(records, mask, key)` is that of a physical batch; the key is for per-record draws.
    `pull_back` maps the noisy mean to one tensor for each variable, without reading records; None
    for the identity.
    """

    clipped_sum: Callable[[tf.Tensor, tf.Tensor, tf.Tensor], tuple[ClippedSum, PerExample]]
    released: Sequence[tf.Tensor]  # Tensors with the shapes and dtypes of the sum's parts.
    data_independent: Sequence[tf.Tensor] | None = (
        None  # Exact gradient of the terms without records, by variable.
    )
    pull_back: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None
    data_independent_loss: tf.Tensor | None = (
        None  # The scalar whose gradient is `data_independent`.
    )
    record_gradient: RecordGradient | None = None  # Before the clip, for engines that have it.
    # Tensors that depend on no record, for the accumulators of joint releases.
    public: Structure = ()


def mapped(
    record_gradient: RecordGradient, released: Sequence[tf.Tensor], clip: Clip, **exact: Any
) -> StepGradient:
    """Returns a step's gradient by vectorizing one record's gradient over the batch, see `clipped_sum`.

    `released` are tensors of the gradient's shapes and dtypes, `exact` other attributes of
    `StepGradient`.
    """

    def of_batch(
        records: Structure, mask: tf.Tensor, key: tf.Tensor
    ) -> tuple[ClippedSum, PerExample]:
        del key
        return clipped_sum(record_gradient, records, mask, clip)

    return StepGradient(of_batch, released, record_gradient=record_gradient, **exact)


@dataclasses.dataclass(frozen=True)
class ClippedGradient:
    """A model's clipped gradient, returned by `DPModel.clipped_gradient`.

    #### Formal guarantee

    The result of `draw` states the same clip, sensitivity and scales, which every step checks while
    it is traced.
    """

    draw: Callable[
        [tf.Tensor], StepGradient
    ]  # Makes the draws shared by a step's records from a key; traced once.
    clip: Clip
    sensitivity: Sensitivity = dataclasses.field(
        default_factory=Sensitivity
    )  # Of the sum, see `ClippedSum`.
    noise_scales: tuple[float, ...] | None = None
    joint: tuple[
        JointRelease, ...
    ] = ()  # Releases with the gradient besides the metrics of `compile`.
    batchwise: bool = (
        False  # Whether it works on a physical batch at once; without XLA, padding is then removed.
    )
    gains_from_xla: bool = (
        True  # Whether long runs are compiled with XLA; `compile(jit_compile=)` overrides it.
    )
    identity: Hashable = ()  # Equal values trace the same `draw`.
