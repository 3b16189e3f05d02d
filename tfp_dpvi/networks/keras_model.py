"""`DPKerasModel`: a Keras model with a Keras loss, trained privately by ghost clipping."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _tf, serialization
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Layer, Structure, keras, layers_of, tf, tfd
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, as_event
from tfp_dpvi.bayes.predictive import mean_of
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import synthetic, zeros_like
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.ghost import UnsupportedLayerError
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import JointRelease
from tfp_dpvi.gradients.isolation import depends_on
from tfp_dpvi.models import arguments, exporting
from tfp_dpvi.models.fitting import LOG
from tfp_dpvi.networks import refusals
from tfp_dpvi.networks.layered import NUM_SYNTHETIC, LayeredModel

Loss: TypeAlias = str | keras.losses.Loss | Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
# Losses of a record alone and in a batch differ by less, relatively, in float32.
_SAME_LOSS = 1e-3
_TEXTS = " Texts need a StringLookup, Hashing or TextVectorization first."
_COLUMNS = "\nEach column of a table is an input of its own. To have one input or target pass {}."

_ACCURACIES = {
    "sparsecategorical": keras.metrics.SparseCategoricalAccuracy,
    "categorical": keras.metrics.CategoricalAccuracy,
    "binary": keras.metrics.BinaryAccuracy,
}


@_tf.register_keras_serializable("tfp_dpvi", "DPKerasModel")
class DPKerasModel(LayeredModel):
    """A Keras model that predicts y from x, trained with a Keras loss and differential privacy.

    Norms and sums of per-example gradients come from layers' inputs and output gradients. For a
    network that does not allow this (`add_loss`, a variable used outside its layer, layers over
    axis 0), per-example gradients are computed with `tf.vectorized_map`, which takes more time and
    memory; a warning is logged.

    Args:
      network: Keras model or layer with one output, a tensor or (as of `tfp.layers`) a
        distribution, whose first dimension is that of x; or a
        function without arguments that builds it (needed to save a model with Lambda layers, see
        `dpvi.register`).
      gradients: "ghost", "vectorized" (per-example gradients), or "auto": "ghost" if the layers
        allow it.
      seed: See `DPModel`.
      name: Name of the model.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> layers = dpvi.keras.layers
    >>> network = dpvi.keras.Sequential([layers.Dense(8, "relu"), layers.Dense(3)])
    >>> model = dpvi.DPKerasModel(network)
    >>> model.compile(
    ...     dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0),
    ...     loss=dpvi.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    ...     metrics=["accuracy"],  # For `evaluate` and validation data, not for training records.
    ...     epsilon=2.0,
    ...     delta=1e-5,
    ... )
    >>> model.fit(x, y, batch_size=256, epochs=20)  # doctest: +SKIP
    >>> model.evaluate(x_test, y_test)  # doctest: +SKIP
    >>> model.privacy_budget
    2.0

    ```

    #### Formal guarantee

    As for `DPModel`, if an example's loss depends on no other example. Known layers that mix
    examples are refused. With "ghost", network and loss are checked once after `compile`, on
    synthetic records against TensorFlow's own gradients, before privacy is spent; "vectorized"
    isolates examples by construction. Weight regularizers depend on no record and are exact.
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
        """See `DPModel.get_config`.

        The network must be a registered function, or have no Lambda layers.
        """
        parts = {"network": serialization.encode(self._training.network, "network")}
        return {**super().get_config(), "gradients": self.gradients, "parts": parts}

    # ------------------------------------------------------------------ compile

    def compile(
        self, optimizer: Any = None, loss: Loss | None = None, metrics: Any = None, **settings: Any
    ) -> None:
        """See `DPModel.compile`.

        Args:
          optimizer: As for `DPModel.compile`.
          loss: A Keras loss, by name or as an object or function: `loss(y, outputs)` of shape
            [n, ...], one for each example. It is averaged over further axes, never over examples,
            regardless of its `reduction`. For a network that ends in a distribution,
            `lambda y, distribution: -distribution.log_prob(y)`.
          metrics: Privatised metrics, which are shown for training records, and Keras metrics,
            which are shown only by `evaluate` and for validation data.
          **settings: The other arguments of `DPModel.compile`.

        Raises:
          ValueError: No loss or several, or what `DPModel.compile` refuses.
        """
        _tf.refuse_keras_3("loss", loss)
        refusals.take_no_weights(settings)
        loss = _single("loss", loss)
        names = ("l2_norm_clip", "epsilon", "delta", "noise_multiplier")
        given = {"loss": loss, **{name: settings.get(name) for name in names}}
        missing = [("pass loss=, a Keras loss", "loss='mse'")] if loss is None else []
        arguments.refuse_incomplete(self, optimizer, given, missing)
        if loss is None:
            raise ValueError(
                f"loss={check.shown(loss)}: pass one Keras loss, such as "
                "'sparse_categorical_crossentropy'."
            )
        training = _Training(self._training.network, loss, keras.losses.get(loss))
        metrics = tf.nest.flatten([] if metrics is None else _single("metrics", metrics))
        privatised = [metric for metric in metrics if isinstance(metric, JointRelease)]
        exact = [
            training.metric(metric) for metric in metrics if not isinstance(metric, JointRelease)
        ]
        settings["validation_metrics"] = [*exact, *(settings.pop("validation_metrics", None) or ())]
        super().compile(optimizer, metrics=privatised, **settings)
        self._training = training

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns the arguments of `compile`, JSON-ready; None before `compile`."""
        config = super().get_compile_config()
        if config is None:
            return None
        return {**config, "loss": keras.utils.serialize_keras_object(self._training.loss)}

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """See `DPModel`."""
        loss = keras.utils.deserialize_keras_object(config["loss"])
        super().compile_from_config({**config, "loss": loss})

    # ------------------------------------------------------------------ the loss

    def call(self, x: Structure) -> tf.Tensor:
        """Returns the network's output, a tensor or a distribution."""
        return self.network(x)

    def _example_losses(self, x: Structure, y: tf.Tensor) -> tf.Tensor:
        outputs = self.network(x)
        single = isinstance(outputs, tfd.Distribution) or tf.is_tensor(outputs)
        if not single or not tf.is_tensor(y):
            raise ValueError(
                "network and y: several outputs or targets are not supported; use one of each."
            )
        return self._training.losses(y, outputs)

    def predict_step(self, data: Structure) -> tf.Tensor:
        """Returns the network's outputs for a batch, means where it ends in a distribution.

        Args:
          data: A batch, of which x is used.
        """
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        return _mean(self(x, training=False))

    def compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """See `Hooks.compared`: y and the network's output, or its mean."""
        target, output = super().compared(x, y)
        return target, _mean(output)

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `Hooks.export_functions`."""
        meaning = "the network's output for each record, a mean if it is a distribution."
        predict = exporting.mean_signature(lambda x: _mean(self.call(x)), inputs["x"], meaning)
        layers = layers_of(self.network)
        tables = [layer.lookup_table for layer in layers if hasattr(layer, "lookup_table")]
        return [dataclasses.replace(predict, tables=tuple(tables))]

    def watched_layers(self) -> Sequence[Layer]:
        """See `LayeredModel`."""
        return layers_of(self.network)

    @property
    def loss_settings(self) -> Hashable:
        """See `LayeredModel`."""
        return self.gradients

    def batch_losses(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """See `LayeredModel`."""
        del key  # The network has no draws but those of its layers.
        return _tf.in_mode(
            lambda: self._example_losses(records["x"], records["y"]), training=training
        )

    def record_loss(self, x: Structure, y: tf.Tensor | None = None) -> tf.Tensor:
        """See `DPModel.record_loss`."""
        batch_x, batch_y = tf.nest.map_structure(lambda part: part[None], (x, y))
        return self._example_losses(batch_x, batch_y)[0]

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns the losses of a batch of n records in inference mode.

        Args:
          x: The inputs.
          y: The targets.

        Returns:
          float [n].
        """
        losses = self.batch_losses({"x": x, "y": y}, tf.zeros([2], tf.int64), training=False)
        _tf.clear_losses(self)
        return losses

    def losses_of_record(self) -> list[tf.Tensor]:
        """See `DPModel`; without weight regularizers and other terms of no record."""
        exact = self._training.exact_losses
        return [loss for place, loss in enumerate(self._losses_added()) if place not in exact]

    def data_independent_loss(self, num_records: int) -> tf.Tensor | None:
        """Returns weight regularizers, and what layers add that depends on no record.

        Such are the divergences of `tfp.layers.DenseVariational` and its siblings, computed for
        an input of zeros.
        """
        penalty = super().data_independent_loss(num_records)
        training = self._training
        if not training.exact_losses:
            return penalty
        _tf.in_mode(lambda: self.network(training.zeros), training=True)
        added = [
            loss
            for place, loss in enumerate(self._losses_added())
            if place in training.exact_losses
        ]
        _tf.clear_losses(self)
        return tf.add_n([*added, *([] if penalty is None else [penalty])])

    def _losses_added(self) -> list[tf.Tensor]:
        """Returns the losses that layers added in the latest call, in order."""
        return [loss for layer in layers_of(self.network) for loss in _tf.losses_added(layer)]

    def _find_exact_losses(self, x: Structure) -> frozenset[int]:
        """Returns which of the added losses depend on no record: no path leads there from x."""
        found: list[int] = []

        def traced(x: Structure) -> tf.Tensor:
            names = {part.op.name for part in tf.nest.flatten(x)}
            _tf.in_mode(lambda: self.network(x), training=True)
            for place, loss in enumerate(self._losses_added()):
                if not depends_on(names, loss.op):
                    found.append(place)
            _tf.clear_losses(self)
            return tf.constant(0)

        # Shapes are fixed: a loss that reads the number of rows would depend on it.
        specs = tf.nest.map_structure(lambda part: tf.TensorSpec(part.shape, part.dtype), x)
        tf.function(traced, autograph=False).get_concrete_function(specs)
        return frozenset(found)

    # ------------------------------------------------------------------ checks

    def prepare(self, records: Records) -> None:
        """Creates the variables and checks network and loss on zeros."""
        if records.y is None:
            raise ValueError("y is missing: a DPKerasModel learns to predict it. Call fit(x, y).")
        refusals.check_vectorization(layers_of(self.network))
        # Both numbers: a `Sequential` without input shape is rebuilt for another one.
        for num in (NUM_SYNTHETIC, 1):
            zeros = [zeros_like(part, num) for part in (records.x, records.y)]
            try:
                if self._training.loss is None:
                    self(zeros[0])  # A loaded model is compiled later.
                else:
                    self.test_losses(*zeros)
                self._training.zeros, self._training.exact_losses = (
                    zeros[0],
                    self._find_exact_losses(zeros[0]),
                )
            except (*LIKELIHOOD_ERRORS, tf.errors.OpError) as error:
                leaves = tf.nest.flatten(zeros)
                tables = [
                    f"{name}.to_numpy('float32')"
                    for name, part in (("x", records.x), ("y", records.y))
                    if isinstance(part, dict)
                ]
                hint = _COLUMNS.format(" and ".join(tables)) if tables else ""
                hint = _TEXTS if any(part.dtype == tf.string for part in leaves) else hint
                shapes = [f"{part.dtype.name}{part.shape.as_list()}" for part in leaves]
                raise ValueError(
                    f"network or loss failed on x, y = {', '.join(shapes)}: "
                    f"{type(error).__name__}: {check.plainly(error)}{hint}"
                ) from error
        if self._training.loss is not None:
            self._check_alone(records)
        super().prepare(records)

    def _check_alone(self, records: Records) -> None:
        """Refuses a network or loss whose value for a record depends on the others of its batch.

        Gradients are of single records: it would learn another function than it computes, a loss
        of pairs of records for instance nothing at all.
        """
        generator = np.random.default_rng(0)
        x, y = tf.nest.map_structure(
            lambda part: tf.constant(synthetic(part, NUM_SYNTHETIC, generator)),
            (records.x, records.y),
        )

        def losses(rows: slice) -> np.ndarray:
            part = tf.nest.map_structure(lambda each: each[rows], (x, y))
            return np.asarray(self.test_losses(*part), np.float64)

        try:
            together, again = losses(slice(None)), losses(slice(None))
            alone = np.concatenate([losses(slice(k, k + 1)) for k in range(NUM_SYNTHETIC)])
        except (*LIKELIHOOD_ERRORS, tf.errors.OpError):
            return  # The values do not suit the network, zeros did.
        same = functools.partial(np.allclose, rtol=_SAME_LOSS, atol=_SAME_LOSS)
        if not np.isfinite(together).all() or not same(together, again):
            return  # Draws are those of a place in the batch.
        if not same(together, alone):
            raise ValueError(
                "network or loss: the loss of a record depends on the others of its batch: a layer "
                "or the loss lets\nrecords influence each other, for instance by an operation over "
                "axis 0. Gradients here are of single records."
            )

    def check_layers(self, records: dict[str, Structure]) -> LayerGradients | None:
        """See `LayeredModel`."""
        try:
            return None if self.gradients == "vectorized" else super().check_layers(records)
        except UnsupportedLayerError as error:
            reason = check.plainly(error)
            if error.adding is not None and (
                len(self._training.exact_losses) == len(self._losses_added())
            ):
                reason = (
                    f"{error.adding.name} ({type(error.adding).__name__}) adds a loss in its call. "
                    "It depends on no record, and is not clipped."
                )
            if self.gradients == "ghost":
                raise ValueError(
                    f"gradients='ghost' does not support this network; use 'auto'. {reason}"
                ) from error
            LOG.warning(
                "Per-example gradients are computed with tf.vectorized_map, which takes longer: %s",
                reason,
            )
            return None
        finally:
            _tf.clear_losses(self)


def _single(name: str, value: Any) -> Any:
    """Returns the part of a list or dict by output, of which this model has one."""
    several = isinstance(value, dict) or (name == "loss" and isinstance(value, list | tuple))
    if not several:
        return value
    if len(value) != 1:
        raise ValueError(
            f"{name}={check.shown(value)} is for {len(value)} outputs, and a DPKerasModel has one: "
            "pass one Keras loss, such as 'sparse_categorical_crossentropy', and a list of metrics."
        )
    return next(iter(value.values())) if isinstance(value, dict) else value[0]


def _mean(output: Structure) -> Structure:
    """Returns the mean of a distribution, and other outputs unchanged."""
    if not isinstance(output, tfd.Distribution):
        return output
    try:
        return mean_of(output)
    except NotImplementedError as error:
        raise ValueError(
            f"The network ends in a {type(output).__name__} ({output.name}), whose mean TensorFlow "
            "Probability does not have: use model(x), a distribution, and its quantiles or draws."
        ) from error


# ------------------------------------------------------------------ per-example Keras losses


def _is_of_keras(loss: Any) -> bool:
    """Returns whether a loss is one of Keras's own, which take tensors."""
    kind = loss if hasattr(loss, "__name__") else type(loss)
    return f"{kind.__module__}.".startswith(("keras.", "tf_keras."))


def _outcomes(y: tf.Tensor, distribution: tfd.Distribution) -> tf.Tensor:
    """Returns y with the shape and dtype of a distribution's draws, for its `log_prob`.

    Raises:
      ValueError: It has another shape, which would broadcast over other records.
    """
    shape = distribution.batch_shape.concatenate(distribution.event_shape)
    original = y.shape
    if y.shape.rank == shape.rank - 1 and shape[-1] == 1:
        y = y[..., None]
    elif y.shape.rank == shape.rank + 1 and y.shape[-1] == 1:
        y = y[..., 0]
    if y.shape.rank != shape.rank or not y.shape[1:].is_compatible_with(shape[1:]):
        raise ValueError(
            f"y has shape {original[1:]} a record, but the network's distribution "
            f"{shape[1:]}: make them the same."
        )
    return as_event(y, distribution)


def _by_record(losses: tf.Tensor, num: tf.Tensor) -> tf.Tensor:
    """Returns losses of shape [n, ...] averaged over all but the first axis."""
    if losses.shape.rank == 0:
        raise ValueError(
            "loss returned a scalar for a batch: return a value for each example, not their mean.\n"
            "Keras's own losses do for outputs of shape [n, k], as of Dense(k)."
        )
    return tf.reduce_mean(tf.reshape(losses, [num, -1]), axis=1)


@dataclasses.dataclass(eq=False)
class _Training:
    """Arguments of the constructor and of `compile`, hidden from Keras.

    Attributes:
      network: The constructor's argument.
      loss: The argument of `compile`.
      loss_function: Keras's object or function of that name.
      exact_losses: The numbers of the losses that layers add and that depend on no record.
      zeros: An input of zeros.
    """

    network: Layer | Callable[[], Layer]
    loss: Loss | None = None
    loss_function: Any = None
    exact_losses: frozenset[int] = frozenset()
    zeros: Structure = ()

    def losses(self, y: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
        """Returns the loss of each example, shape [n], without the reduction of a Keras loss."""
        is_object = isinstance(self.loss_function, keras.losses.Loss)
        loss_of = self.loss_function.call if is_object else self.loss_function
        if isinstance(outputs, tfd.Distribution):
            if not _is_of_keras(self.loss_function):
                return _by_record(loss_of(_outcomes(y, outputs), outputs), tf.shape(y)[0])
            # As in TFP: a draw, unless a layer's convert_to_tensor_fn says otherwise.
            outputs = tf.convert_to_tensor(outputs)
        known = None
        if self._is_sparse():
            # A label out of range makes its record's loss NaN, so that it contributes zero instead
            # of raising (contract 8).
            labels = tf.cast(y, tf.int64)
            known = (labels >= 0) & (labels < outputs.shape[-1])
            ignored = self.loss_function.get_config().get("ignore_class") if is_object else None
            known = known if ignored is None else known | (labels == ignored)
            y = tf.where(known, labels, tf.zeros_like(labels))
        # As Keras does: [n] and [n, 1] would broadcast to [n, n].
        if y.shape.rank == outputs.shape.rank - 1 and outputs.shape[-1] == 1:
            y = y[..., None]
        elif y.shape.rank == outputs.shape.rank + 1 and y.shape[-1] == 1:
            y = y[..., 0]
        is_like = y.shape[1:].is_compatible_with(outputs.shape[1:])
        if _is_of_keras(self.loss_function) and known is None and not is_like:
            raise ValueError(
                f"y has shape {y.shape[1:]} a record, but the network's output "
                f"{outputs.shape[1:]}, which would broadcast: make them the same."
            )
        num = tf.shape(outputs)[0]
        losses = _by_record(loss_of(y, outputs), num)
        if known is None:
            return losses
        known = tf.reduce_all(tf.reshape(known, [num, -1]), axis=1)
        return tf.where(known, losses, tf.constant(float("nan"), losses.dtype))

    def _is_sparse(self) -> bool:
        """Returns whether the loss takes integer labels."""
        kind = keras.losses.SparseCategoricalCrossentropy
        function = keras.losses.sparse_categorical_crossentropy
        return isinstance(self.loss_function, kind) or self.loss_function is function

    def metric(self, metric: Any) -> Any:
        """Returns a Keras metric; "accuracy" is the accuracy that matches the loss."""
        if metric not in ("accuracy", "acc"):
            return metric
        name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
        name = name.replace("_", "").lower()
        for start, kind in _ACCURACIES.items():
            if name.startswith(start):
                return kind(name=metric)
        raise ValueError(
            f"metrics={check.shown(metric)} is not defined for loss={check.shown(self.loss)}: "
            "pass, say, 'binary_accuracy'."
        )
