"""The base of models of Keras layers, whose gradients come from the layers' inputs and outputs."""

from __future__ import annotations

import abc
import dataclasses
import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Layer, Structure, loss_functions, tf, without_assertions
from tfp_dpvi.bayes.units import flat_rows
from tfp_dpvi.data import Records, UnitRows
from tfp_dpvi.data.shapes import synthetic
from tfp_dpvi.ghost.contributions import Groups
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import ClippedGradient, ClippedSum, PerExample, StepGradient, StepSpec
from tfp_dpvi.models import base
from tfp_dpvi.models.fitting import LOG
from tfp_dpvi.sampling import BatchNeeds

#: Synthetic records to check a model on; 1 would hide a shape that broadcasts.
NUM_SYNTHETIC = 3


@dataclasses.dataclass(eq=False)
class _Checks:
    """The checks of the layers since `compile`, hidden from Keras.

    Attributes:
      always_xla: Whether `compile` asked for XLA.
      results: The layers' gradients by the kind of records, the latest kind last.
    """

    always_xla: bool = False
    results: dict[Hashable, LayerGradients | None] = dataclasses.field(default_factory=dict)


class LayeredModel(base.DPModel):
    """A model whose per-example gradients come from its layers. See `DPVAE` and `DPKerasModel`."""

    gradients: str
    takes_texts: bool = True

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._checks = _Checks()

    # ------------------------------------------------------------------ methods to override

    @abc.abstractmethod
    def watched_layers(self) -> Sequence[Layer]:
        """Returns the layers, sublayers included."""

    @abc.abstractmethod
    def batch_losses(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """Returns the losses of a batch of records, shape [n].

        Args:
          records: A batch {"x": ...}, with "y" if there is one.
          key: int64 [2], determines the model's own draws.
          training: Whether layers run in training mode.
        """

    def losses_to_check(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """Returns losses as `batch_losses`, with every term that training may have.

        Args:
          records: As for `batch_losses`.
          key: As for `batch_losses`.
          training: As for `batch_losses`.
        """
        return self.batch_losses(records, key, training)

    @property
    def loss_settings(self) -> Hashable:
        """The settings that losses depend on, besides records and variables."""
        return ()

    def check_layers(self, records: dict[str, Structure]) -> LayerGradients | None:
        """Returns the layers' gradients, checked; None for vectorized per-example gradients.

        Args:
          records: A batch of synthetic records {"x": ...}, with "y" if there is one.

        Raises:
          UnsupportedLayerError: The gradients cannot be computed from the layers.
        """
        key = tf.constant([1, 2], tf.int64)
        layers = LayerGradients(
            self.watched_layers(), self.trainable_variables, mapped=self.gradients == "vectorized"
        )
        losses: Callable[..., tf.Tensor] = without_assertions()(
            functools.partial(self.losses_to_check, key=key)
        )
        in_training = functools.partial(losses, training=True)
        in_inference = functools.partial(losses, training=False)
        layers = layers.checked(in_training, records, in_inference)
        if layers.note:
            LOG.log(logging.WARNING if layers.slowdown >= 1.5 else logging.INFO, "%s", layers.note)
        return layers

    # ------------------------------------------------------------------ the step

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `DPModel.compile`. The next fit checks the layers again."""
        super().compile(*args, **kwargs)
        self._checks = _Checks(always_xla=bool(kwargs.get("jit_compile")))

    def data_independent_loss(self, num_records: int) -> tf.Tensor | None:
        """Returns weight regularizers, which depend on no record (contract 2)."""
        penalties = [
            penalty() for layer in self.watched_layers() for penalty in loss_functions(layer)
        ]
        return tf.add_n(penalties) if penalties else None

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient of records' losses."""
        layers = self.layer_gradients
        if layers is None:
            return super().clipped_gradient(spec)
        variables, clip = self.trainable_variables, self.clip

        def clipped_sum(
            records: dict[str, tf.Tensor], mask: tf.Tensor, key: tf.Tensor
        ) -> tuple[ClippedSum, PerExample]:
            rows, persons = _rows_of(records, mask)
            layers_pass = layers.run(lambda: self.batch_losses(rows, key, training=True))
            weights = records.get("sample_weight")
            return layers_pass.clipped_sum(
                layers_pass.result, mask, clip, weights=weights, persons=persons
            )

        def draw(key: tf.Tensor) -> StepGradient:
            del key  # All draws are per record.
            return StepGradient(clipped_sum, variables, **self.exact_terms(spec.num_records))

        # Products of large matrices are faster without XLA on CPUs, and need no padding.
        identity = ("layers", id(layers), self.loss_settings)
        return ClippedGradient(draw, clip, batchwise=True, gains_from_xla=False, identity=identity)

    @property
    def batch_needs(self) -> BatchNeeds:
        """The layers' needs per physical batch."""
        layers = self.layer_gradients
        if layers is None:
            return super().batch_needs
        return BatchNeeds(4 * layers.bytes_each, batchwise=True, static=self.static_shapes)

    @property
    def takes_persons(self) -> bool:
        """See `Hooks.takes_persons`: gradients of rows are summed by person before the clip."""
        return True

    @property
    def static_shapes(self) -> bool:
        """True if every batch has the same shape: without compilation, and always with XLA."""
        return bool(self.run_eagerly) or self._checks.always_xla

    @property
    def layer_gradients(self) -> LayerGradients | None:
        """The layers' gradients, as last checked; None for vectorized per-example gradients."""
        if not self._checks.results:
            raise RuntimeError(
                "The layers have not been checked since compile: call make_data again."
            )
        return next(reversed(self._checks.results.values()))

    def check_records(self, records: Records) -> None:
        """Checks the layers on synthetic records before privacy is spent.

        Layers are checked once after `compile`, for each shape of records.
        """
        rng = np.random.default_rng(0)
        parts = {"x": records.x} | ({} if records.y is None else {"y": records.y})
        most = 1
        if isinstance(records.x, UnitRows):
            parts["x"] = records.x.rows
            # A row of each person, of which shapes and dtypes are read.
            parts = tf.nest.map_structure(lambda part: part[:, 0], parts)
            most = records.x.mask.shape[1]
        batch = tf.nest.map_structure(
            lambda part: tf.constant(synthetic(part, NUM_SYNTHETIC, rng)), parts
        )
        shapes = tf.nest.map_structure(lambda part: (part.shape, part.dtype), batch)
        identity = (repr(shapes), most, self.loss_settings)
        results = self._checks.results
        if identity in results:
            results[identity] = results.pop(identity)
            return
        layers = self.check_layers(batch)
        if layers is not None:
            layers = dataclasses.replace(layers, bytes_each=layers.bytes_each * most)
        results[identity] = layers


def _rows_of(
    records: dict[str, Structure], mask: tf.Tensor
) -> tuple[dict[str, Structure], Groups | None]:
    """Returns the rows of a batch, and whose they are; None where a record is a row.

    Args:
      records: The batch.
      mask: Bool [n], False for padding.
    """
    x = records["x"]
    if not isinstance(x, UnitRows):
        return records, None
    parts = {name: part for name, part in records.items() if name == "y"} | {"x": x.rows}
    rows = {name: flat_rows(part) for name, part in parts.items()}
    present = x.mask & mask[:, None]
    num, most = tf.shape(mask)[0], x.mask.shape[1]
    places = tf.range(num)[:, None]
    members = places * most + tf.range(most)
    group = tf.reshape(tf.where(present, places, num), [-1])
    return rows, Groups(num, group, members, present, most)
