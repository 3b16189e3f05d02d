"""The base of models of Keras layers: checks the layers, and computes gradients from their inputs and output gradients."""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Layer, Structure, loss_functions, tf, without_assertions
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import synthetic
from tfp_dpvi.ghost import LayerGradients
from tfp_dpvi.gradients import ClippedGradient, ClippedSum, PerExample, StepGradient, StepSpec
from tfp_dpvi.models import base
from tfp_dpvi.models.fitting import LOG
from tfp_dpvi.sampling import BatchNeeds

NUM_SYNTHETIC = 3  # Synthetic records to check a model on; 1 would hide a shape that broadcasts.


@dataclasses.dataclass(eq=False)
class _Trials:
    """Kinds of records that the layers were checked on since `compile`, most recent last; hidden from Keras."""

    found: list[tuple[Hashable, LayerGradients | None]] = dataclasses.field(default_factory=list)


class LayeredModel(base.DPModel):
    """A model whose per-example gradients come from its layers. See `DPVAE` and `DPKerasModel`."""

    gradients: str

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._trials = _Trials()

    @property
    @abc.abstractmethod
    def _layers_watched(self) -> Sequence[Layer]:
        """The layers, sublayers included."""

    @abc.abstractmethod
    def _batch_losses(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """Returns the losses of a batch of records, shape [n]."""

    @property
    def _settings(self) -> Hashable:
        """The settings that losses depend on, besides records and variables."""
        return ()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `DPModel.compile`. The next fit checks the layers again."""
        super().compile(*args, **kwargs)
        self._trials = _Trials()

    def data_independent_loss(self, num_records: int) -> tf.Tensor | None:
        """Returns weight regularizers, which depend on no record (contract C2)."""
        penalties = [
            penalty() for layer in self._layers_watched for penalty in loss_functions(layer)
        ]
        return tf.add_n(penalties) if penalties else None

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient of records' losses."""
        layers = self._layer_gradients
        if layers is None:
            return super().clipped_gradient(spec)
        variables, clip = self.trainable_variables, self.clip

        def clipped_sum(
            records: dict[str, tf.Tensor], mask: tf.Tensor, key: tf.Tensor
        ) -> tuple[ClippedSum, PerExample]:
            one = layers.run(lambda: self._batch_losses(records, key, training=True))
            return one.clipped_sum(one.result, mask, clip, weights=records.get("sample_weight"))

        def draw(key: tf.Tensor) -> StepGradient:
            del key  # All draws are per record.
            return StepGradient(clipped_sum, variables, **self.exact_terms(spec.num_records))

        # Products of large matrices are faster without XLA on CPUs, and need no padding.
        identity = ("layers", id(layers), self._settings)
        return ClippedGradient(draw, clip, batchwise=True, gains_from_xla=False, identity=identity)

    @property
    def batch_needs(self) -> BatchNeeds:
        """The layers' needs per physical batch."""
        layers = self._layer_gradients
        if layers is None:
            return super().batch_needs
        return BatchNeeds(4 * layers.bytes_each, batchwise=True, static=self._static)

    @property
    def _static(self) -> bool:
        target = self.privacy_target
        return bool(self.run_eagerly) or bool(target is not None and target.jit_compile)

    @property
    def _layer_gradients(self) -> LayerGradients | None:
        """The layers' gradients, as last checked; None for vectorized per-example gradients."""
        if not self._trials.found:
            raise RuntimeError(
                "The layers have not been checked since compile: call make_data again."
            )
        return self._trials.found[-1][1]

    def check_records(self, records: Records) -> None:
        """Checks the layers on synthetic records before privacy is spent: once after `compile`, for each shape."""
        rng = np.random.default_rng(0)
        given = {"x": records.x} | ({} if records.y is None else {"y": records.y})
        made = tf.nest.map_structure(
            lambda part: tf.constant(synthetic(part, NUM_SYNTHETIC, rng)), given
        )
        identity = (
            repr(tf.nest.map_structure(lambda part: (part.shape, part.dtype), made)),
            self._settings,
        )
        found = self._trials.found
        found.sort(key=lambda one: one[0] == identity)
        if not found or found[-1][0] != identity:
            found.append((identity, self._trial(made)))

    def _trial(self, made: dict[str, Structure]) -> LayerGradients | None:
        """Returns the layers' checked gradients; raises `UnsupportedLayerError` if they cannot be computed."""
        key = tf.constant([1, 2], tf.int64)
        layers = LayerGradients(
            self._layers_watched, self.trainable_variables, mapped=self.gradients == "vectorized"
        )
        losses: Any = without_assertions()(functools.partial(self._batch_losses, key=key))
        trained, still = (
            functools.partial(losses, training=training) for training in (True, False)
        )
        layers = layers.checked(trained, made, still)
        if layers.note:
            LOG.log(logging.WARNING if layers.slowdown >= 1.5 else logging.INFO, "%s", layers.note)
        return layers
