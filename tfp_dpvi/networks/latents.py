"""The prior of a `DPVAE`: fixed, learned, or a network of y."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi import serialization, surrogates
from tfp_dpvi._tf import Layer, in_mode, keras, layers_of, refuse_keras_3, tf, tfd
from tfp_dpvi.divergences import VampPrior
from tfp_dpvi.ghost import Whole

Prior = Any
"""A TFP distribution, or a function of y that returns one with a batch member for each row."""


class LearnedDensity(Whole):
    """`log p(z)` of a prior with trainable variables, as a layer of z, so that their gradients are clipped per record.

    `reads` are the trainable variables that the density reads, some of which the networks' layers may own.
    """

    def __init__(
        self, prior: tfd.Distribution, reads: Sequence[tf.Variable], others: Sequence[Layer]
    ) -> None:
        super().__init__(name="learned_prior", dtype=surrogates.float_dtype(prior).name)
        theirs = {variable.ref() for layer in others if layer.built for variable in layer.weights}
        self.own = [
            variable for variable in reads if variable.ref() not in theirs
        ]  # Tracked by Keras, and saved.
        self._density, self.reads = prior.log_prob, tuple(reads)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns log-densities, shape [n], of codes [n, ...]."""
        return self._density(inputs)


def made_of(
    given: Prior, encoder: Callable[..., tfd.Distribution]
) -> tuple[Prior, tuple[tf.Variable, ...]]:
    """Returns the prior from the constructor's argument, and the trainable variables that its density reads.

    Raises:
      TypeError: neither a distribution nor a function.
      ValueError: a distribution computed from variables' values, which would keep their initial values.
    """
    refuse_keras_3("prior", given)

    def build() -> Prior:
        made = given() if serialization.is_factory(given) else given
        vamp = isinstance(made, VampPrior)
        return made.of(lambda *pair: called(encoder, *pair), float_type(encoder)) if vamp else made

    prior, read_while_built = read_by(build)
    if not isinstance(prior, tfd.Distribution):
        if callable(prior):
            return prior, ()
        raise TypeError(f"prior must be a TFP distribution, got {check.shown(prior)}.")
    surrogates.float_dtype(prior)
    _, read = read_by(lambda: prior.log_prob(prior.sample(2, seed=tf.constant([0, 1]))))
    known = {variable.ref() for variable in read}
    for variable in read_while_built:
        if variable.ref() not in known:
            raise ValueError(
                f"prior is built from the initial value of the variable {variable.name} and would not follow its updates. Pass the\n"
                "variable itself to the distribution (tfp.util.TransformedVariable, DeferredTensor), or use "
                "dpvi.divergences.VampPrior."
            )
    if unread := [
        variable.name for variable in prior.trainable_variables if variable.ref() not in known
    ]:
        raise ValueError(
            f"prior has the trainable variable {unread[0]}, which its density does not read and which could not be learned. Remove "
            "it, or create it with trainable=False."
        )
    frozen = {
        variable.ref() for layer in layers_of(prior) for variable in layer.non_trainable_weights
    }
    return prior, tuple(variable for variable in read if variable.ref() not in frozen)


def read_by(
    function: Callable[[], Any], strategy: tf.distribute.Strategy | None = None
) -> tuple[Any, tuple[tf.Variable, ...]]:
    """Returns a function's result and the trainable variables that it reads, as distributed variables on several replicas."""
    with tf.GradientTape() as tape:
        result = function()
    container = (strategy or tf.distribute.get_strategy()).extended.value_container
    found = {variable.ref(): variable for variable in map(container, tape.watched_variables())}
    return result, tuple(found.values())


def float_type(part: Callable[..., tfd.Distribution]) -> str:
    """Returns the float type of a distribution or of a network's layers."""
    if isinstance(part, tfd.Distribution):
        return surrogates.float_dtype(part).name
    kinds = [
        layer.dtype
        for layer in layers_of(part)
        if layer.dtype and tf.as_dtype(layer.dtype).is_floating
    ]
    return kinds[0] if kinds else keras.backend.floatx()


def called(part: Callable[..., Any], first: Any, y: Any = None, training: bool = False) -> Any:
    """Returns a network's output, in training mode if `training` (dropout).

    With y, functions get two arguments, and Keras models and layers one list, as for several inputs, unless their `call` takes
    two.
    """
    inputs = [first] if y is None else [first, y]
    if y is not None and isinstance(part, Layer):
        needed = [
            one
            for one in inspect.signature(part.call).parameters.values()
            if one.default is one.empty
        ]
        inputs = (
            inputs if sum(one.kind is one.POSITIONAL_OR_KEYWORD for one in needed) > 1 else [inputs]
        )
    return in_mode(lambda: part(*inputs), training=training)
