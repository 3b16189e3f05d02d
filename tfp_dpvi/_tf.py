"""TensorFlow, TensorFlow Probability and Keras 2, with their private APIs.

One function wraps each private API that the library uses and says why it is needed;
`tests/test_tf.py` fails once it no longer is.

TensorFlow 2.15 ships Keras 2 as `tf.keras`. In later versions `tf.keras` is Keras 3, and Keras 2 is
the package `tf_keras`, which TensorFlow Probability uses too. `TF_USE_LEGACY_KERAS` is never set
here: it would affect other code of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

if TYPE_CHECKING:
    import tf_keras as keras
    from tensorflow_probability import distributions as tfd
    from tf_keras import Model
    from tf_keras.callbacks import Callback
    from tf_keras.layers import Layer
    from tf_keras.metrics import Metric
    from tf_keras.optimizers import Optimizer
    from tf_keras.optimizers.legacy import Optimizer as LegacyOptimizer
else:
    keras = tf.keras if tf.__version__.startswith("2.15.") else importlib.import_module("tf_keras")
    Callback = keras.callbacks.Callback
    Layer = keras.layers.Layer
    Metric = keras.metrics.Metric
    Model = keras.Model
    Optimizer = keras.optimizers.Optimizer
    LegacyOptimizer = keras.optimizers.legacy.Optimizer
    tfd = tfp.distributions
register_keras_serializable = keras.utils.register_keras_serializable

Structure: TypeAlias = tf.Tensor | Sequence[Any] | Mapping[str, Any]
"""Tensors in a nest, as `tf.nest` takes them."""
_Element = TypeVar("_Element")
_Result = TypeVar("_Result")


def refuse_keras_3(name: str, value: object) -> None:
    """Refuses layers, models and other objects of Keras 3.

    Args:
      name: The argument, for messages.
      value: The object, or a list or dictionary of objects.

    Raises:
      TypeError: An object belongs to Keras 3.
    """
    if not Layer.__module__.startswith("tf_keras."):
        # Keras 2 is the package `keras` here.
        return
    parts: Iterable[object] = [value]
    if isinstance(value, dict | list | tuple):
        parts = value.values() if isinstance(value, dict) else value
    for part in parts:
        if any(kind.__module__.startswith("keras.") for kind in type(part).__mro__):
            raise TypeError(
                f"{name}={type(part).__name__}(...) is an object of Keras 3, which TensorFlow "
                "Probability cannot use. Build it from dpvi.keras\n"
                "(Keras 2), or set the environment variable TF_USE_LEGACY_KERAS=1 before "
                "TensorFlow is imported."
            )


# ---------------------------------------------------------------------------- Keras 2


def layers_within(layer: Layer, *, include_self: bool = True) -> list[Layer]:
    """Returns a layer and its sublayers at any depth, in Keras's tracking order.

    `tf.Module.submodules` also holds layers that Keras does not track, in another order.

    Args:
      layer: The layer.
      include_self: False leaves out the layer itself.
    """
    return list(layer._flatten_layers(include_self=include_self))


def own_weights(layer: Layer) -> list[tf.Variable]:
    """Returns the trainable variables that a layer created, without its sublayers'."""
    return list(layer._trainable_weights) if layer.trainable else []


def variables_among(weights: Iterable[tf.Variable]) -> list[tf.Variable]:
    """Returns the variables among a layer's weights: an adapted vocabulary is a table."""
    return [weight for weight in weights if isinstance(weight, tf.Variable)]


def adapted_layers(layers: Iterable[Layer]) -> list[Layer]:
    """Returns the preprocessing layers within layers that have read data by Keras's `adapt`."""
    kind = keras.layers.experimental.preprocessing.PreprocessingLayer
    within = {id(each): each for layer in layers for each in layers_within(layer)}
    return [each for each in within.values() if isinstance(each, kind) and each.is_adapted]


def losses_added(layer: Layer) -> list[tf.Tensor]:
    """Returns the tensors that `add_loss` received in the latest call.

    For a functional model they are those received when it was built. `losses` would also compute
    weight regularizers.
    """
    return list(layer._eager_losses or layer._losses)


def loss_functions(layer: Layer) -> list[Callable[[], tf.Tensor]]:
    """Returns the losses that depend on weights alone, such as regularizers."""
    return list(layer._callable_losses)


@contextlib.contextmanager
def refuse_late_functions(layers: Sequence[Layer]) -> Iterator[None]:
    """Refuses a layer's call that adds a loss as a function, while active.

    Keras would keep the function, and call it after its tensors are gone.
    """
    known = [len(layer._callable_losses) for layer in layers]
    yield
    for layer, num in zip(layers, known, strict=True):
        if len(layer._callable_losses) > num:
            raise ValueError(
                f"{layer.name} ({type(layer).__name__}) calls add_loss with a function within its "
                "call: pass the tensor.\n"
                "A penalty on weights may be a function if add_loss is called once, outside of "
                "call."
            )


def clear_losses(layer: Layer) -> None:
    """Drops the losses of a layer and its sublayers, as Keras does only in `__call__`."""
    layer._clear_losses()


@contextlib.contextmanager
def without_values(what: str) -> Iterator[None]:
    """Replaces TensorFlow's errors by errors of the same class whose messages show no values.

    TensorFlow prints indices that are out of range, labels, and the tensors of failed assertions.
    The original error is the new one's `__context__`, which tracebacks leave out.

    Args:
      what: What failed, the beginning of the message.
    """
    try:
        yield
    except tf.errors.OpError as error:
        # These show shapes and dtypes alone.
        if isinstance(error, tf.errors.ResourceExhaustedError | tf.errors.UnimplementedError):
            raise
        kind = tf.errors.UnknownError if type(error) is tf.errors.OpError else type(error)
        text = (
            f"{what} ({type(error).__name__}). TensorFlow's message may show values of records "
            "and is left out:\nit is this error's __context__. Likely causes are an index or a "
            "label out of range, and a failed assertion."
        )
        raise kind(None, None, text) from None


class _Outer(Layer):
    """A layer that calls a function: layers inherit `training` from the layer that calls them."""

    def call(
        self, function: Callable[[], _Result], training: bool | None = None
    ) -> tuple[_Result | None, Exception | None]:
        try:
            return function(), None
        except Exception as error:
            # Keras would add a message about this layer.
            return None, error


def in_mode(function: Callable[[], _Result], *, training: bool) -> _Result:
    """Calls a function with its Keras layers in training or inference mode.

    Layers to which it passes `training=` itself follow that.

    Args:
      function: Takes no arguments.
      training: True for training mode.

    Returns:
      The result of the function.
    """
    outer = _Outer(name="training" if training else "inference")
    result, error = outer(function, training=training)
    if error is not None:
        raise error
    return result


def is_graph_of_layers(layer: Layer) -> bool:
    """Returns whether a model only calls its layers: it is Sequential or functional."""
    return isinstance(layer, keras.Sequential) or bool(getattr(layer, "_is_graph_network", False))


def keras_mask(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the mask that Keras attached to a tensor, as some embeddings do, or None."""
    return getattr(tensor, "_keras_mask", None)


def set_keras_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Attaches a mask to a tensor, for Keras layers to read.

    Args:
      tensor: The tensor.
      mask: Bool tensor.
    """
    tensor._keras_mask = mask


@contextlib.contextmanager
def _recurrent_loops() -> Iterator[None]:
    """Makes LSTM and GRU run the generic loop of recurrent layers, while active.

    The function that chooses between a GPU kernel and a loop cannot be vectorized: the gradient of
    its loop stacks tensors of dtype variant, for which `tf.vectorized_map` raises TypeError. A
    layer stores its choice in an instance attribute; a property of the class overrides it.
    """
    kinds = (keras.layers.LSTM, keras.layers.GRU)
    if any("_could_use_gpu_kernel" in vars(kind) for kind in kinds):
        # A map around this one has replaced it already.
        yield
        return
    never = property(
        lambda layer: False, lambda layer, value: vars(layer).update(_could_use_gpu_kernel=value)
    )
    try:
        for kind in kinds:
            kind._could_use_gpu_kernel = never
        yield
    finally:
        for kind in kinds:
            if "_could_use_gpu_kernel" in vars(kind):
                del kind._could_use_gpu_kernel


@contextlib.contextmanager
def calls_seen(
    layers: Sequence[Layer], wrap: Callable[[Layer, Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Replaces the `call` of each layer, while active.

    Keras 2 has no forward hooks, as PyTorch has. Only an attribute of these instances changes, for
    one trace.

    Args:
      layers: The layers.
      wrap: `wrap(layer, call)` returns what stands in for the layer's own call.
    """
    held = [vars(layer).get("call") for layer in layers]
    try:
        for layer in layers:
            # Keras's attribute tracking would save it.
            object.__setattr__(
                layer, "call", tf.autograph.experimental.do_not_convert(wrap(layer, layer.call))
            )
        yield
    finally:
        for layer, call in zip(layers, held, strict=True):
            if call is not None:
                object.__setattr__(layer, "call", call)
            elif "call" in vars(layer):
                object.__delattr__(layer, "call")


_ModelClass = TypeVar("_ModelClass", bound=type)


def refuses_saved_model(cls: _ModelClass) -> _ModelClass:
    """Lets `tf.saved_model.save` refuse a class of Keras models; a class decorator.

    The message points to the model's `export`.

    TensorFlow has no public hook by which a model declares its own SavedModel. Checkpoints of
    weights use the same method and still work.
    """
    inherited = getattr(cls, "_trackable_children")  # noqa: B009  (A type has none for mypy.)

    def children(self: Any, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        if save_type == "savedmodel":
            raise ValueError(
                f"tf.saved_model.save({type(self).__name__}) would save the optimizer and no "
                "privacy report. Use model.export(path) for a\n"
                "SavedModel of the learned functions, or model.save('model.keras') to continue "
                "training later."
            )
        return dict(inherited(self, save_type, **kwargs))

    setattr(cls, "_trackable_children", children)  # noqa: B010
    return cls


def steps_per_execution(model: Model) -> tf.Variable:
    """Returns Keras's variable of the steps per execution; None before `compile`."""
    return model._steps_per_execution


def mapped_file(array: np.ndarray) -> mmap.mmap | None:
    """Returns the memory map behind an array, or None; NumPy exposes only its file's name."""
    return getattr(array, "_mmap", None)


def is_same_plain(before: object, value: object) -> bool:
    """Returns whether two values are equal numbers, strings or None, of one type.

    Other objects may have changed inside, even if they are one and the same.

    Args:
      before: The value that an attribute has.
      value: The value that is assigned.
    """
    plain = isinstance(value, bool | int | float | str | None)
    return plain and type(before) is type(value) and before == value


def refuse_setting(owner: object, name: str, value: object, settings: frozenset[str]) -> None:
    """Refuses to assign a setting that a compiled step has read.

    Assignments of what the object already has change nothing and are allowed, and so are those
    while a function is traced, which are the model's own code.

    Args:
      owner: The object with the setting.
      name: The name of the assigned attribute.
      value: The assigned value.
      settings: The names of the settings in the object; attributes of its class are settings too.

    Raises:
      RuntimeError: The attribute is a setting.
    """
    is_setting = name in settings or (not name.startswith("_") and hasattr(type(owner), name))
    if not is_setting or not tf.executing_eagerly():
        return
    before = getattr(owner, name, None)
    # The same container may have been changed in place, as by `setting += 1`.
    same = before is value and not isinstance(value, np.ndarray | list | dict | set)
    if same or is_same_plain(before, value):
        return
    raise RuntimeError(
        f"{type(owner).__name__}.{name} was assigned while fit runs, whose compiled step has read "
        "it and would ignore the change.\nAssign it between two fits: compile(planned_epochs=) "
        "leaves budget for the next one. (learning_rate may change at any time.)"
    )


def learning_rate_variable(
    optimizer: Optimizer,
) -> tf.Variable | keras.optimizers.schedules.LearningRateSchedule:
    """Returns an optimizer's learning rate or schedule, not a schedule's current value."""
    return optimizer._learning_rate


def in_multi_worker_mode(strategy: tf.distribute.Strategy) -> bool:
    """Returns whether a strategy spans several workers; only its private extension tells."""
    return bool(strategy.extended._in_multi_worker_mode())


# ---------------------------------------------------------------------------- TensorFlow


def with_full_parameters(distribution: tfd.Distribution) -> tfd.Distribution:
    """Broadcasts a distribution's parameters to its batch shape; `BatchBroadcast` hides them."""
    return distribution._broadcast_parameters_with_batch_shape(distribution.batch_shape_tensor())


class NotReparameterized(tfd.Distribution):
    """A distribution whose draws are not reparameterised.

    Args:
      dtype: The dtype of the draws.
      parameters: The arguments of the subclass by name.
      name: The name of the distribution.
    """

    def __init__(self, dtype: tf.DType, parameters: dict[str, Any], name: str) -> None:
        super().__init__(
            dtype=dtype,
            reparameterization_type=tfd.NOT_REPARAMETERIZED,
            validate_args=False,
            allow_nan_stats=True,
            parameters=parameters,
            name=name,
        )


class Derived(NotReparameterized):
    """A `NotReparameterized` of another's dtype and shapes, where a subclass says nothing else."""

    def __init__(self, like: tfd.Distribution, parameters: dict[str, Any], name: str) -> None:
        self._like = like
        super().__init__(like.dtype, parameters, name)

    def _batch_shape(self) -> tf.TensorShape:
        return self._like.batch_shape

    def _batch_shape_tensor(self) -> tf.Tensor:
        return self._like.batch_shape_tensor()

    def _event_shape(self) -> tf.TensorShape:
        return self._like.event_shape

    def _event_shape_tensor(self) -> tf.Tensor:
        return self._like.event_shape_tensor()


def operations_since(graph: tf.Graph, num_known: int) -> Iterator[tf.Operation]:
    """Yields the operations added to a graph, then those of called functions at any depth.

    `Graph.as_graph_def` also shows called functions, but as copies, which `map_apart` cannot use.
    Eager mode yields none.

    Args:
      graph: The graph.
      num_known: The number of operations that it had before.
    """
    if isinstance(graph, tf.Graph):
        yield from _with_called(graph.get_operations()[num_known:])


def operations_within(operation: tf.Operation) -> Iterator[tf.Operation]:
    """Yields an operation, then those of the functions that it calls at any depth."""
    return _with_called([operation])


def _with_called(operations: Sequence[tf.Operation]) -> Iterator[tf.Operation]:
    waiting, seen = list(operations), {""}
    for operation in waiting:  # Grows during the loop.
        yield operation
        for value in operation.node_def.attr.values():
            for callee in [value.func, *value.list.func]:
                function = None if callee.name in seen else _function(operation.graph, callee.name)
                seen.add(callee.name)
                if function is not None:
                    waiting += function.graph.get_operations()


def _function(graph: tf.Graph | None, name: str) -> Any:
    """Returns a function that a graph calls, or None.

    Persistent tapes hide the functions of a branch in the outer graph.
    """
    while isinstance(graph, tf.Graph):
        function = graph._get_function(name)
        if function is not None:
            return function
        graph = getattr(graph, "outer_graph", None)
    return None


def argument_names(operation: tf.Operation) -> list[str]:
    """Returns the names that a called function gives to an operation's inputs.

    An operation that calls none has "" for each. The public signature of a function is not
    reachable from the operation that calls it.
    """
    if operation.type in ("PartitionedCall", "StatefulPartitionedCall"):
        function = operation.graph._get_function(operation.get_attr("f").name)
        if function is not None:
            return [part.op.name for part in function.graph.inputs]
    return [""] * len(operation.inputs)


def replace_inputs(operation: tf.Operation, inputs: Sequence[tf.Tensor]) -> None:
    """Makes an operation of the graph that is being traced read other tensors.

    TFP has no public way to change what a sampler reads within a distribution's `sample`.

    Args:
      operation: The operation.
      inputs: The new tensors, of the same dtypes and shapes.
    """
    for index, (before, after) in enumerate(zip(operation.inputs, inputs, strict=True)):
        if after is not before:
            operation._update_input(index, after)


_CALLING = re.compile("(Stateless)?(If|Case|While)$|(Stateful)?PartitionedCall$")
_RAISING = re.compile("Assert$|CheckNumerics(V2)?$")
# The name of what `tf.debugging.Assert` makes: an If, under a persistent tape in a function.
_GUARD = re.compile(r"AssertGuard(_\d+)?(/(Stateful)?PartitionedCall(_\d+)?)?$")


@contextlib.contextmanager
def without_assertions() -> Iterator[None]:
    """Lets the assertions that are added to the graph meanwhile always hold, as XLA does.

    An assertion that fails ends a fit, and who sees that learns of the record. TensorFlow has no
    public way to leave out the assertions of functions that it traces.

    Raises:
      ValueError: There is one inside of a function, branch or loop, which cannot be changed, or a
        `tf.debugging.check_numerics`.
    """
    graph = tf.compat.v1.get_default_graph()
    num_known = len(graph.get_operations())
    yield
    for operation in graph.get_operations()[num_known:]:
        if operation.type == "Assert" or _GUARD.search(operation.name):
            replace_inputs(operation, [tf.constant(True), *operation.inputs[1:]])
        elif _may_raise(operation):
            raise ValueError(
                "A loss, layer or likelihood has an assertion in a tf.function, branch or loop, or "
                "a check_numerics:\nsome record would end the fit. Take it out "
                "(tf.debugging; validate_args=True of distributions)."
            )


def _may_raise(operation: tf.Operation) -> bool:
    """Returns whether an operation checks values.

    Constant values do not count, nor does a guard that always holds.
    """
    if not (_CALLING.match(operation.type) or _RAISING.match(operation.type)):
        return False
    if "AssertGuard" in operation.name and tf.get_static_value(operation.inputs[0]) is not None:
        return False
    return any(
        _RAISING.match(part.type) and tf.get_static_value(part.inputs[0]) is None
        for part in operations_within(operation)
    )


def function_of_model(function: Callable[..., Any], **options: Any) -> Any:
    """Returns `tf.function(function)` without the warning about frequent retracing.

    The function is a closure that each model creates. TensorFlow counts traces by the closure's
    code, and warned at the fifth model of a process although each traces once.

    Args:
      function: The closure.
      **options: Arguments of `tf.function`.
    """
    compiled = tf.function(function, autograph=False, **options)
    compiled._omit_frequent_tracing_warning = True
    return compiled


class Subtract(Optimizer):
    """Subtracts gradients from variables, as SGD at rate 1 does, without variables of its own."""

    def __init__(self, name: str = "scoring", **kwargs: Any) -> None:
        super().__init__(name=name, **kwargs)
        self._learning_rate = self._build_learning_rate(1.0)

    def update_step(self, gradient: tf.Tensor, variable: tf.Variable) -> None:
        """Subtracts a gradient.

        Args:
          gradient: The gradient.
          variable: The variable.
        """
        variable.assign_sub(gradient)


def forget_variables(optimizer: Optimizer) -> None:
    """Lets an optimizer without slots be built again, for other variables."""
    optimizer._built = False


def forget_bijections() -> None:
    """Empties TFP's cache of what bijectors returned.

    Its entries go with their outputs, but the graph of an output that was traced keeps it for ever,
    and so its model: 12 MB a fit.
    """
    vars(tfp.bijectors.Bijector)["_cache"].clear()


def joint_bijector(
    prior: tfd.JointDistribution,
    bijector_of: Callable[[tfd.Distribution], tfp.bijectors.Bijector],
) -> tfp.bijectors.Bijector:
    """Returns the bijector of a joint distribution's parts, each of which may depend on others.

    Args:
      prior: The joint distribution.
      bijector_of: Returns the bijector of one part.
    """
    from tensorflow_probability.python.distributions import joint_distribution

    return joint_distribution._DefaultJointBijector(prior, bijector_fn=bijector_of)


class UnmappedError(ValueError):
    """Raised for an operation that cannot be mapped over records.

    ```python
    >>> issubclass(UnmappedError, ValueError)
    True

    ```
    """


@contextlib.contextmanager
def _without_dumps(failed: list[str]) -> Iterator[None]:
    """Takes the dumps of operations that cannot be mapped out of TensorFlow's log.

    TensorFlow logs each of them, with all functions that call it, in hundreds of lines.

    Args:
      failed: Gets a short name of each operation.
    """

    def shown(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if "Got error while pfor was converting" in text:
            owner = re.search(r"/([A-Z][A-Za-z]+)\w*/(log_prob|sample)", text)
            kind = re.search(r'op: "(\w+)"', text)
            failed.append(owner.group(1) if owner else kind.group(1) if kind else "an operation")
        # TensorFlow logs the operation once more, with its stack.
        return not failed

    logger = tf.get_logger()
    logger.addFilter(shown)
    try:
        yield
    finally:
        logger.removeFilter(shown)


def pad(value: tf.Tensor, paddings: Sequence[Sequence[int]]) -> tf.Tensor:
    """Returns a tensor with zeros around it, as `tf.pad`.

    On a CPU, XLA of TensorFlow 2.21 at times pads float64 with garbage; its concatenation does not.

    Args:
      value: The tensor.
      paddings: The numbers of zeros before and after, for each axis.
    """
    if value.dtype != tf.float64:
        return tf.pad(value, paddings)
    for axis, (before, after) in enumerate(paddings):
        shape = tf.shape(value)
        sides = [tf.concat([shape[:axis], [num], shape[axis + 1 :]], 0) for num in (before, after)]
        low, high = (tf.zeros(side, value.dtype) for side in sides)
        value = tf.concat([low, value, high], axis)
    return value


def map_apart(function: Callable[[_Element], _Result], elements: _Element) -> _Result:
    """Runs `tf.vectorized_map` such that no element reaches another's values.

    Assertions of the function are left out: see `without_assertions`.

    Three kinds of operations get a converter of ours, which `tf.vectorized_map` prefers to its own:
    see `_convert_segments`, `_convert_product` and `_convert_convolution`.

    Args:
      function: Maps one element to a structure of tensors.
      elements: A structure of tensors, whose first dimension runs over the elements.

    Returns:
      The results, stacked along a new first dimension.
    """
    marked: list[tf.Operation] = []

    def traced(element: _Element) -> _Result:
        graph = tf.compat.v1.get_default_graph()
        num_known = len(graph.get_operations())
        with without_assertions():
            # Converts slices to tensors before their segment sums are searched for.
            result = tf.nest.map_structure(tf.convert_to_tensor, function(element))
        for operation in operations_since(graph, num_known):
            if operation.type in _CONVERTERS and not hasattr(operation, "pfor_converter"):
                operation.pfor_converter = _CONVERTERS[operation.type]
                marked.append(operation)
        return result

    failed: list[str] = []
    try:
        with _recurrent_loops(), _without_dumps(failed):
            return tf.vectorized_map(traced, elements)
    except UnmappedError:
        raise
    except Exception as error:
        if not failed:
            raise
        raise UnmappedError(
            f"TensorFlow cannot map {failed[0]} over records, nor most other loops (tf.scan, "
            "tf.while_loop) with a gradient: write the loop in Python,\nover a fixed number of "
            "steps, for a HiddenMarkovModel the forward algorithm. No privacy was spent."
        ) from error
    finally:
        # Some operations may belong to a function with other callers.
        for operation in marked:
            del operation.pfor_converter


def _convert_segments(inputs: Any) -> Structure:
    """Vectorizes a segment sum, the gradient of `tf.gather`.

    Ids out of range are made negative, which drops them. TensorFlow (2.21, `parallel_for/pfor.py`)
    sums over the segments of all elements after adding the element's number times the number of
    segments to its ids. An id that is too large lands in another element's segments: in a model
    with 4 groups one record with ids up to 80 moved the clipped sum by 41 clips. (XLA accepts such
    ids silently: https://github.com/tensorflow/tensorflow/issues/120245.)
    """
    from tensorflow.python.ops.parallel_for import pfor

    inputs.stack_inputs([0, 1])
    ids = inputs.stacked_input(1)
    known = ids < tf.cast(inputs.unstacked_input(2), ids.dtype)
    inputs.inputs[1] = pfor.wrap(tf.where(known, ids, -tf.ones_like(ids)), True)
    return pfor._pfor_converter_registry[inputs.op_type](inputs)


def _convert_product(inputs: Any) -> Structure:
    """Vectorizes `tf.matmul` without broadcasting a batch of matrices.

    TensorFlow would turn [1, T, d] x [d, k] into [n, 1, T, d] x [d, k], for which oneDNN
    (TensorFlow 2.21 on CPUs) reads and writes out of bounds:
    https://github.com/tensorflow/tensorflow/issues/117700.
    """
    from tensorflow.python.ops.parallel_for import pfor

    first, second = (part.shape[:-2] for part in inputs.op.inputs)
    if (
        inputs.input(0).is_stacked
        and inputs.input(1).is_stacked
        and first.is_fully_defined()
        and first == second
    ):
        return pfor._pfor_converter_registry[inputs.op_type](inputs)
    inputs.expanddim_inputs_for_broadcast()
    x, y = (
        tf.linalg.adjoint(inputs.input(number).t)
        if inputs.get_attr(name)
        else inputs.input(number).t
        for number, name in enumerate(("adj_x", "adj_y"))
    )
    if y.shape.rank == 2:
        return pfor.wrap(tf.tensordot(x, y, 1), True)
    batch = tf.broadcast_dynamic_shape(tf.shape(x)[:-2], tf.shape(y)[:-2])
    x, y = (tf.broadcast_to(part, tf.concat([batch, tf.shape(part)[-2:]], 0)) for part in (x, y))
    return pfor.wrap(tf.matmul(x, y), True)


def _convert_convolution(inputs: Any) -> Structure:
    """Vectorizes a convolution in which each element has its own kernel, or its kernel's gradient.

    TensorFlow (2.21, `parallel_for/pfor.py`) runs a loop over the elements, and says so for each of
    them in its log. A convolution and both its gradients are one product of images, kernels,
    results and, for each axis, of zeros and ones that say which pixel a place of the kernel reads.
    Nothing is padded: compiled by XLA on CPUs, float64 is padded by what lies in memory.
    """
    from tensorflow.python.ops.parallel_for import pfor

    operation, by = inputs.op, re.sub("^Conv.D|V2$", "", inputs.op_type)
    if by != "BackpropFilter" and not inputs.input(1).is_stacked:
        return pfor._pfor_converter_registry[f"Conv2D{by}"](inputs)
    # Images, kernels and results. A gradient's operation has the sizes of what it is by.
    wanted, tensors = {"BackpropInput": 0, "BackpropFilter": 1}.get(by, 2), [*operation.inputs]
    tensors[wanted : wanted + 1] = operation.outputs
    shapes = [part.shape for part in tensors]
    if not all(shape[1:].is_fully_defined() for shape in shapes):
        raise pfor.ConversionNotImplementedError("A convolution's shapes are not known.")
    given = [number for number in range(3) if number != wanted]
    inputs.stack_inputs(given)
    is_last = inputs.get_attr("data_format").endswith(b"C")
    first, channels = (1, shapes[0].rank - 1) if is_last else (2, 1)
    # Each group of the results' channels reads its group of the images' channels.
    groups, grouped = shapes[0][channels] // shapes[1][-2], []
    for shape, axis in zip(shapes, (channels, shapes[1].rank - 1, channels), strict=True):
        sizes = shape.as_list()
        grouped.append([*sizes[1:axis], groups, sizes[axis] // groups, *sizes[axis + 1 :]])
    parts = [_reshaped(inputs.stacked_input(number), grouped[number]) for number in given]
    chosen = ("pih", "qjw", "rkt")[: shapes[0].rank - 2]
    letters = ["".join(part) for part in zip(*chosen, strict=True)]
    names = ["nb" + (letters[2] + "gc" if is_last else "gc" + letters[2]), f"n{letters[1]}cgd"]
    names.append("nb" + (letters[0] + "gd" if is_last else "gd" + letters[0]))
    for axis in range(first, first + shapes[0].rank - 2):
        stride, rate = (inputs.get_attr(name)[axis] for name in ("strides", "dilations"))
        places = np.arange(shapes[1][axis - first])
        read = np.arange(shapes[2][axis])[:, None] * stride + places * rate
        pixels = np.arange(shapes[0][axis])
        before = max(read.max() - pixels.max(), 0) // 2
        parts.append(tf.cast(read[..., None] - before == pixels, parts[0].dtype))
    equation = ",".join([*(names[number] for number in given), *chosen])
    result = tf.einsum(f"{equation}->{names[wanted]}", *parts)
    return pfor.wrap(_reshaped(result, shapes[wanted][1:].as_list()), True)


def _reshaped(tensor: tf.Tensor, sizes: Sequence[int]) -> tf.Tensor:
    """Returns a tensor with other dimensions after its first two."""
    return tf.reshape(tensor, tf.concat([tf.shape(tensor)[:2], sizes], axis=0))


_CONVERTERS = {
    **{f"UnsortedSegment{kind}": _convert_segments for kind in ("Sum", "Max", "Min", "Prod")},
    "BatchMatMulV2": _convert_product,
    **{
        f"Conv{kind}{by}": _convert_convolution
        for kind, version in (("2D", ""), ("3D", "V2"))
        for by in ("", f"BackpropInput{version}", f"BackpropFilter{version}")
    },
}


def layers_of(model: object) -> list[Layer]:
    """Returns the layers of a Keras layer or model, or those that a function refers to."""
    layers_by_id: dict[int, Layer] = {}
    seen: set[int] = set()

    def visit(thing: object, depth: int) -> None:
        if id(thing) in seen or depth > 4:
            return
        seen.add(id(thing))
        refuse_keras_3("layer", thing)
        if isinstance(thing, keras.layers.Layer):
            for layer in layers_within(thing):
                layers_by_id.setdefault(id(layer), layer)
            return
        parts: Iterable[object] = ()
        if isinstance(thing, tf.Module):
            # TFP's objects also hold their arguments: functions, with layers in them.
            is_of_tfp = isinstance(thing, tfd.Distribution | tfp.bijectors.Bijector)
            parts = [*thing.submodules, *(thing.parameters.values() if is_of_tfp else ())]
        elif isinstance(thing, list | tuple):
            parts = thing
        elif isinstance(thing, dict):
            parts = thing.values()
        elif callable(thing):
            parts = _referred_to(thing)
        for part in parts:
            visit(part, depth + 1)

    visit(model, 0)
    return list(layers_by_id.values())


def _referred_to(function: Callable[..., object]) -> list[object]:
    """Returns what a callable's bound arguments, closure, globals and attributes hold."""
    held = [
        getattr(function, name, None)
        for name in ("func", "__self__", "args", "__defaults__", "__wrapped__")
    ]
    for cell in getattr(function, "__closure__", None) or ():
        # A cell may be empty.
        with contextlib.suppress(ValueError):
            held.append(cell.cell_contents)
    code = getattr(function, "__code__", None)
    if code is not None:
        held += [getattr(function, "__globals__", {}).get(name) for name in code.co_names]
    elif hasattr(function, "__dict__") and not isinstance(function, type):
        held.append(vars(function))
    return held
