"""The prior of a `DPVAE`: fixed, learned, or a network of y."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from tfp_dpvi import _validate as check
from tfp_dpvi import serialization, surrogates
from tfp_dpvi._tf import (
    Layer,
    in_mode,
    keras,
    layers_of,
    layers_within,
    refuse_keras_3,
    tf,
    tfd,
    variables_among,
)
from tfp_dpvi.divergences import VampPrior
from tfp_dpvi.ghost import Whole

Network: TypeAlias = Callable[..., tfd.Distribution]
"""A Keras model, layer or function that returns a TFP distribution."""

Prior: TypeAlias = tfd.Distribution | Network
"""A TFP distribution, or a function of y that returns one with a batch member for each row."""


class LearnedDensity(Whole):
    """`log p(z)` of a prior with trainable variables, as a layer of z.

    As a layer's, the gradients of its variables are clipped per record.

    Args:
      prior: The TFP distribution.
      reads: The trainable variables that its density reads, some of which other layers may own.
      others: The layers of the networks.
    """

    def __init__(
        self, prior: tfd.Distribution, reads: Sequence[tf.Variable], others: Sequence[Layer]
    ) -> None:
        super().__init__(name="learned_prior", dtype=surrogates.float_dtype(prior).name)
        built = (layer for layer in others if layer.built)
        known = {variable.ref() for layer in built for variable in variables_among(layer.weights)}
        # Keras tracks and saves them.
        self.own = [variable for variable in reads if variable.ref() not in known]
        self.reads = tuple(reads)
        self._density = prior.log_prob

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns log-densities, shape [n], of codes [n, ...]."""
        return self._density(inputs)


def resolve_prior(prior: Any, encoder: Network) -> tuple[Prior, tuple[tf.Variable, ...]]:
    """Returns the prior and the trainable variables that its density reads.

    Args:
      prior: The argument of `DPVAE`: a TFP distribution, a function without arguments that builds
        it, a `VampPrior`, or a network of y.
      encoder: The encoder, whose distributions of pseudo-inputs a `VampPrior` mixes.

    Raises:
      TypeError: Neither a distribution nor a function.
      ValueError: A distribution computed from variables' values, which would keep their initial
        values; or one with a trainable variable that its density does not read.
    """
    refuse_keras_3("prior", prior)

    def build() -> Prior:
        built = prior() if serialization.is_factory(prior) else prior
        if not isinstance(built, VampPrior):
            return built
        return built.of(lambda *inputs: apply_network(encoder, *inputs), float_type(encoder))

    resolved, read_while_built = variables_read(build)
    if not isinstance(resolved, tfd.Distribution):
        if callable(resolved):
            return resolved, ()
        raise TypeError(f"prior must be a TFP distribution, got {check.shown(resolved)}.")
    surrogates.float_dtype(resolved)  # Raises unless there is one.
    _, read = variables_read(
        lambda: resolved.log_prob(resolved.sample(2, seed=tf.constant([0, 1])))
    )
    _check_variables(resolved, read, read_while_built)
    frozen = {
        variable.ref()
        for layer in layers_of(resolved)
        for variable in variables_among(layer.non_trainable_weights)
    }
    return resolved, tuple(variable for variable in read if variable.ref() not in frozen)


def _check_variables(
    prior: tfd.Distribution, read: Sequence[tf.Variable], read_while_built: Sequence[tf.Variable]
) -> None:
    """Raises `ValueError` for a variable of the prior that could not be learned."""
    known = {variable.ref() for variable in read}
    for variable in read_while_built:
        if variable.ref() not in known:
            raise ValueError(
                f"prior is built from the initial value of the variable {variable.name} and would "
                "not follow its updates. Pass the\n"
                "variable itself to the distribution (tfp.util.TransformedVariable, "
                "DeferredTensor), or use dpvi.divergences.VampPrior."
            )
    for variable in prior.trainable_variables:
        if variable.ref() not in known:
            raise ValueError(
                f"prior has the trainable variable {variable.name}, which its density does not "
                "read and which could not be learned. Remove it, or create it with "
                "trainable=False."
            )


def variables_read(
    function: Callable[[], Any], strategy: tf.distribute.Strategy | None = None
) -> tuple[Any, tuple[tf.Variable, ...]]:
    """Returns a function's result and the trainable variables that it reads.

    Args:
      function: Is called once.
      strategy: On several replicas, that of the model, whose distributed variables are returned.
    """
    with tf.GradientTape() as tape:
        result = function()
    container = (strategy or tf.distribute.get_strategy()).extended.value_container
    variables = {variable.ref(): variable for variable in map(container, tape.watched_variables())}
    return result, tuple(variables.values())


def float_type(part: Prior) -> str:
    """Returns the float type of a distribution or of a network's layers."""
    if isinstance(part, tfd.Distribution):
        return surrogates.float_dtype(part).name
    dtypes = (layer.dtype for layer in layers_of(part) if layer.dtype)
    return next(
        (dtype for dtype in dtypes if tf.as_dtype(dtype).is_floating), keras.backend.floatx()
    )


def outermost_layers(part: Prior) -> list[Layer]:
    """Returns the layers of a network that are no other layer's sublayers."""
    layers = layers_of(part)
    inner = {id(sub) for layer in layers for sub in layers_within(layer, include_self=False)}
    return [layer for layer in layers if id(layer) not in inner]


def apply_network(network: Network, first: Any, y: Any = None, training: bool = False) -> Any:
    """Returns a network's output.

    Args:
      network: A Keras model or layer, or a function of layers.
      first: The first input: records, or latent values.
      y: The second, or None. Functions get two arguments, and Keras models and layers one list, as
        for several inputs, unless their `call` takes two.
      training: Whether layers run in training mode (dropout).
    """
    if y is None:
        inputs = [first]
    elif isinstance(network, Layer) and not _takes_two(network):
        inputs = [[first, y]]
    else:
        inputs = [first, y]
    return in_mode(lambda: network(*inputs), training=training)


def _takes_two(layer: Layer) -> bool:
    """Returns whether a layer's `call` needs more than one positional argument."""
    parameters = inspect.signature(layer.call).parameters.values()
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return sum(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in needed) > 1
