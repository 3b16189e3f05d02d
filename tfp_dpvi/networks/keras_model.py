"""`DPKerasModel`: private training of a Keras model with a Keras loss, at the speed of ghost clipping."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

from tfp_dpvi import _tf, serialization
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Layer, Structure, keras, layers_of, tf
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.ghost import LayerGradients, UnsupportedLayerError
from tfp_dpvi.gradients import JointRelease
from tfp_dpvi.models.fitting import LOG
from tfp_dpvi.networks.layered import NUM_SYNTHETIC, LayeredModel

Loss: TypeAlias = str | keras.losses.Loss | Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
_ACCURACIES = {
    "sparsecategorical": keras.metrics.SparseCategoricalAccuracy,
    "categorical": keras.metrics.CategoricalAccuracy,
    "binary": keras.metrics.BinaryAccuracy,
}


@_tf.register_keras_serializable("tfp_dpvi", "DPKerasModel")
class DPKerasModel(LayeredModel):
    """A Keras model that predicts y from x, trained with a Keras loss and differential privacy.

    ```python
    network = dpvi.keras.Sequential([dpvi.keras.layers.Dense(32, "relu"), dpvi.keras.layers.Dense(10)])
    model = dpvi.DPKerasModel(network)
    model.compile(
        dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0),
        loss=dpvi.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],  # For `evaluate` and validation data, not for training records.
        epsilon=2.0,
        delta=1e-5,
    )
    model.fit(x, y, batch_size=256, epochs=20)
    model.evaluate(x_test, y_test)
    ```

    Norms and sums of per-example gradients come from layers' inputs and output gradients. For a network that does not allow
    this (`add_loss`, a variable used outside its layer, layers over axis 0), per-example gradients are computed with
    `tf.vectorized_map`, which takes more time and memory; a warning is logged.

    Args:
      network: Keras model or layer with one output, whose first dimension is that of x; or a function without arguments that
        builds it (needed to save a model with Lambda layers, see `dpvi.register`).
      gradients: "ghost", "vectorized" (per-example gradients), or "auto": "ghost" if the layers allow it.
      seed: see `DPModel`.
      name: name of the model.

    #### Formal guarantee

    As for `DPModel`, if an example's loss depends on no other example. Known layers that mix examples are refused. With
    "ghost", network and loss are checked once after `compile`, on synthetic records against TensorFlow's own gradients, before
    privacy is spent; "vectorized" isolates examples by construction. Weight regularizers depend on no record and are exact.
    """

    def __init__(
        self,
        network: Layer | Callable[[], Layer],
        *,
        gradients: str = "auto",
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        built = network() if serialization.is_factory(network) else network
        _tf.refuse_keras_3("network", built)
        if not isinstance(built, Layer):
            raise TypeError(
                "network must be a Keras model or layer, or a function that builds one; got "
                f"{check.shown(network)}."
            )
        check.one_of("gradients", gradients, ("auto", "ghost", "vectorized"))
        super().__init__(seed=seed, name=name, dtype=built.dtype)
        self.network, self.gradients = built, gradients
        self._training = _Training(network)

    def get_config(self) -> dict[str, Any]:
        """See `DPModel.get_config`; the network must be a registered function, or have no Lambda layers."""
        parts = {"network": serialization.encode(self._training.given, "network")}
        return {**super().get_config(), "gradients": self.gradients, "parts": parts}

    # ------------------------------------------------------------------ compile

    def compile(
        self, optimizer: Any = None, loss: Loss | None = None, metrics: Any = None, **settings: Any
    ) -> None:
        """See `DPModel.compile`.

        The loss is a Keras loss, by name or as an object or function: `loss(y, outputs)` of shape [n, ...], one for each example.
        It is averaged over further axes, never over examples, regardless of its `reduction`. Privatised metrics are shown for
        training records, Keras metrics only by `evaluate` and for validation data.
        """
        _tf.refuse_keras_3("loss", loss)
        if loss is None or isinstance(loss, list | tuple | dict):
            raise ValueError(
                f"loss={check.shown(loss)}: pass one Keras loss, such as "
                "'sparse_categorical_crossentropy'."
            )
        training = _Training(self._training.given, loss, keras.losses.get(loss))
        given = (
            list(metrics)
            if isinstance(metrics, list | tuple)
            else []
            if metrics is None
            else [metrics]
        )
        shown = [training.metric(each) for each in given if not isinstance(each, JointRelease)]
        settings["validation_metrics"] = [*shown, *(settings.pop("validation_metrics", None) or ())]
        super().compile(
            optimizer,
            metrics=[each for each in given if isinstance(each, JointRelease)],
            **settings,
        )
        self._training = training

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns the arguments of `compile`, JSON-ready; None before `compile`."""
        config = super().get_compile_config()
        return (
            None
            if config is None
            else {**config, "loss": keras.utils.serialize_keras_object(self._training.loss)}
        )

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """See `DPModel`."""
        super().compile_from_config(
            {**config, "loss": keras.utils.deserialize_keras_object(config["loss"])}
        )

    # ------------------------------------------------------------------ the loss

    def call(self, x: Structure) -> tf.Tensor:
        """Returns the network's output."""
        return self.network(x)

    def _example_losses(self, x: Structure, y: tf.Tensor) -> tf.Tensor:
        outputs = self.network(x)
        if not tf.is_tensor(outputs) or not tf.is_tensor(y):
            raise ValueError(
                "network and y: several outputs or targets are not supported; use one of each."
            )
        return self._training.losses(y, outputs)

    @property
    def _layers_watched(self) -> Sequence[Layer]:
        return layers_of(self.network)

    @property
    def _settings(self) -> Hashable:
        return self.gradients

    def _batch_losses(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        del key
        return _tf.in_mode(
            lambda: self._example_losses(records["x"], records["y"]), training=training
        )

    def record_loss(self, x: Structure, y: tf.Tensor | None = None) -> tf.Tensor:
        """Returns the loss of one record."""
        return self._example_losses(*tf.nest.map_structure(lambda part: part[None], (x, y)))[0]

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns the losses of a batch of records, shape [n]."""
        losses = self._batch_losses({"x": x, "y": y}, tf.zeros([2], tf.int64), training=False)
        _tf.clear_losses(self)
        return losses

    def losses_of_record(self) -> list[tf.Tensor]:
        """See `DPModel`; without weight regularizers."""
        return [loss for layer in layers_of(self.network) for loss in _tf.losses_added(layer)]

    # ------------------------------------------------------------------ checks

    def prepare(self, records: Records) -> None:
        """Creates the variables and checks network and loss on zeros."""
        if records.y is None:
            raise ValueError("y is missing: a DPKerasModel learns to predict it. Call fit(x, y).")
        for num in (
            NUM_SYNTHETIC,
            1,
        ):  # Both: a `Sequential` without input shape is rebuilt for another number.
            made = [zeros_like(part, num) for part in (records.x, records.y)]
            try:
                if self._training.loss is None:  # A loaded model, which is compiled later.
                    self(made[0])
                else:
                    self.test_losses(*made)
            except (*LIKELIHOOD_ERRORS, tf.errors.InvalidArgumentError) as error:
                shapes = [
                    f"{part.dtype.name}{part.shape.as_list()}" for part in tf.nest.flatten(made)
                ]
                raise ValueError(
                    f"network or loss failed on x, y = {', '.join(shapes)}: {type(error).__name__}: {error}"
                ) from error
        super().prepare(records)

    def _trial(self, made: dict[str, Structure]) -> LayerGradients | None:
        try:
            return None if self.gradients == "vectorized" else super()._trial(made)
        except UnsupportedLayerError as error:
            if self.gradients == "ghost":
                raise ValueError(
                    f"gradients='ghost' does not support this network; use 'auto'. {error}"
                ) from error
            LOG.warning(
                "Per-example gradients are computed with tf.vectorized_map, which takes longer: %s",
                error,
            )
            return None
        finally:
            _tf.clear_losses(self)


# ---------------------------------------------------------------------------- per-example Keras losses


@dataclasses.dataclass(eq=False)
class _Training:
    """Arguments of the constructor and of `compile`, hidden from Keras."""

    given: Layer | Callable[[], Layer]  # The constructor's `network`.
    loss: Loss | None = None  # The argument of `compile`.
    found: Any = None  # Keras's object or function of that name.

    def losses(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each example, shape [n], without the reduction of a Keras loss."""
        known, is_object = None, isinstance(self.found, keras.losses.Loss)
        kinds = (
            keras.losses.SparseCategoricalCrossentropy,
            keras.losses.sparse_categorical_crossentropy,
        )
        if isinstance(self.found, kinds[0]) or self.found is kinds[1]:
            # A label out of range makes its record's loss NaN, so that it contributes zero instead of raising (contract C8).
            labels = tf.cast(y, tf.int64)
            known = (labels >= 0) & (labels < outputs.shape[-1])
            ignored = self.found.get_config().get("ignore_class") if is_object else None
            known = known if ignored is None else known | (labels == ignored)
            y = tf.where(known, labels, tf.zeros_like(labels))
        # As Keras does: [n] and [n, 1] would broadcast to [n, n].
        if y.shape.rank == outputs.shape.rank - 1 and outputs.shape[-1] == 1:
            y = y[..., None]
        elif y.shape.rank == outputs.shape.rank + 1 and y.shape[-1] == 1:
            y = y[..., 0]
        losses = (self.found.call if is_object else self.found)(y, outputs)
        if losses.shape.rank == 0:
            raise ValueError(
                "loss returned a scalar for a batch: return one value for each example, not their mean."
            )
        num = tf.shape(outputs)[0]
        losses = tf.reduce_mean(tf.reshape(losses, [num, -1]), axis=1)
        if known is None:
            return losses
        known = tf.reduce_all(tf.reshape(known, [num, -1]), axis=1)
        return tf.where(known, losses, tf.constant(float("nan"), losses.dtype))

    def metric(self, given: Any) -> Any:
        """Returns a Keras metric; "accuracy" is the accuracy that matches the loss."""
        if given not in ("accuracy", "acc"):
            return given
        name = getattr(self.found, "__name__", type(self.found).__name__).replace("_", "").lower()
        for start, kind in _ACCURACIES.items():
            if name.startswith(start):
                return kind(name=given)
        raise ValueError(
            f"metrics={check.shown(given)} is not defined for loss={check.shown(self.loss)}: pass, "
            "say, 'binary_accuracy'."
        )
