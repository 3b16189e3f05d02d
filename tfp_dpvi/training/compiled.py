"""The compiled steps of a model, with XLA if that is faster.

They are traced once for each mechanism and shape of records.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfp_dpvi import _keystream
from tfp_dpvi._keystream import SECURE, Keystream
from tfp_dpvi._tf import Optimizer, learning_rate_variable, tf, without_values
from tfp_dpvi.gradients.isolation import VaryingShapeError, refuse_dynamic_shapes
from tfp_dpvi.training.mechanism import Mechanism
from tfp_dpvi.training.step import Steps, StepState, initial_state, make_steps

_LOG = logging.getLogger("tfp_dpvi")
# XLA takes 2 s to compile and saves about 0.4 ms a step of a small model.
_STEPS_WORTH_COMPILING = 1000

KEY = tf.TensorSpec([2], tf.int64)
"""The shape and dtype of a key that is no tape."""


class CompiledSteps:
    """Compiles and caches the steps of one model.

    Args:
      optimizer: The model's private optimizer.
      strategy: The distribution strategy that the model was built in.
      jit_compile: Whether to compile with XLA; None to choose for each fit.
      run_eagerly: Whether not to compile at all, for debugging.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> from tfp_dpvi._tf import tf
    >>> optimizer = dpvi.optimizers.DPKerasSGDOptimizer(0.1, l2_norm_clip=1.0)
    >>> compiled = CompiledSteps(optimizer, tf.distribute.get_strategy(), None, run_eagerly=False)
    >>> weight = tf.Variable(0.0)
    >>> compiled.begin([weight], planned_steps=100, gains_from_xla=True)
    >>> compiled.differ([weight]), compiled.differ([tf.Variable(0.0)])
    (False, True)

    ```
    """

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: tf.distribute.Strategy,
        jit_compile: bool | None,
        run_eagerly: bool,
    ) -> None:
        self._optimizer = optimizer
        self._strategy = strategy
        self._jit_compile = jit_compile
        self._run_eagerly = run_eagerly
        self._variables: Sequence[tf.Variable] = ()
        # The optimizer's hyperparameters in this fit.
        self._hyperparameters: Hashable = ()
        # By everything that was traced; None where XLA could not compile them.
        self._traced: dict[Hashable, Steps | None] = {}
        # Values of `jit_compile` to try, in this order.
        self._choices: tuple[bool, ...] = (False,)
        self.uses_xla = False

    def begin(
        self, variables: Sequence[tf.Variable], planned_steps: int, gains_from_xla: bool
    ) -> None:
        """Sets a fit's variables, and chooses whether to compile with XLA.

        Args:
          variables: The trainable variables.
          planned_steps: The number of steps that the fit plans.
          gains_from_xla: Whether the model's steps are faster with XLA.

        Raises:
          ValueError: The variables changed since the last fit.
        """
        if self._variables and self.differ(variables):
            raise ValueError(
                "The model's trainable variables changed since its last fit. Call compile again; "
                "no privacy was spent."
            )
        self._variables = list(variables)
        self._hyperparameters = _hyperparameters(self._optimizer)
        with self._strategy.scope():
            worth = (
                gains_from_xla
                and planned_steps >= _STEPS_WORTH_COMPILING
                and not tf.distribute.has_strategy()
            )
        jit_compile = False if self._run_eagerly else self._jit_compile
        if jit_compile is not None:
            self._choices = (jit_compile,)
        else:
            self._choices = (True, False) if worth else (False,)

    def differ(self, variables: Sequence[tf.Variable]) -> bool:
        """Returns whether these are other variables than the fit's."""
        return list(map(id, self._variables)) != list(map(id, variables))

    def forget(self) -> None:
        """Drops the compiled steps, after a change of what they were traced with."""
        self._traced = {}

    def steps_for(
        self,
        mechanism: Mechanism,
        records: dict[str, tf.Tensor],
        key: tf.TensorSpec = KEY,
    ) -> Steps:
        """Returns the compiled steps of a mechanism, traced unless they were before.

        Args:
          mechanism: The mechanism of the fit.
          records: Tensors with the shapes and dtypes of the fit's records, as for `private_step`.
          key: The shape and dtype of the fit's key.

        Raises:
          ValueError: The step cannot be traced, or XLA was requested and cannot compile it.
        """
        shapes = repr(
            tf.nest.map_structure(lambda part: (part.dtype.name, tuple(part.shape)), (records, key))
        )
        # In the scope in which Keras runs it: outside, TensorFlow would trace it again.
        with self._strategy.scope():
            # Any strategy counts, also with one replica.
            strategy = self._strategy if tf.distribute.has_strategy() else None
            for jit_compile in self._choices:
                identity = (mechanism.identity, self._hyperparameters, shapes, jit_compile)
                if identity not in self._traced:
                    self._traced[identity] = self._trace(
                        mechanism, records, key, jit_compile, strategy
                    )
                steps = self._traced[identity]
                if steps is not None:
                    self.uses_xla = jit_compile and strategy is None
                    return _without_values(steps)
        raise AssertionError("unreachable: without XLA the step is traced or raises")

    def _trace(
        self,
        mechanism: Mechanism,
        records: dict[str, tf.Tensor],
        key: tf.TensorSpec,
        jit_compile: bool,
        strategy: tf.distribute.Strategy | None,
    ) -> Steps | None:
        """Traces and compiles the steps without running any; returns None if optional XLA fails."""
        steps = make_steps(
            mechanism,
            self._optimizer,
            self._variables,
            jit_compile=jit_compile,
            run_eagerly=self._run_eagerly,
            strategy=strategy,
        )
        no_steps = (
            initial_state(mechanism),
            tf.constant(0, tf.int64),
            records,
            tf.zeros(key.shape, key.dtype),
            tf.zeros([], tf.float64),
        )
        try:
            steps(*no_steps)
            if jit_compile and strategy is None and not self._run_eagerly:
                refuse_dynamic_shapes(steps, no_steps)
        except (
            tf.errors.InvalidArgumentError,
            tf.errors.UnimplementedError,
            VaryingShapeError,
        ) as error:
            if not jit_compile or self._jit_compile is not None:
                raise
            _LOG.info("The step does not compile under XLA and runs without it: %s", error)
            return None
        return steps


def _without_values(steps: Steps) -> Steps:
    """Returns steps whose errors show no values of records."""

    @functools.wraps(steps)
    def guarded(*arguments: Any) -> StepState:
        with without_values("A step failed, and is charged"):
            return steps(*arguments)

    return guarded


def _hyperparameters(optimizer: Optimizer) -> Hashable:
    """Returns an optimizer's hyperparameters, which a step reads while it is traced.

    The learning rate is a variable, whose value a step reads whenever it runs.
    """
    plain = {
        name: value
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and isinstance(value, bool | int | float | str | None)
    }
    return tuple(plain.items()), id(learning_rate_variable(optimizer))


def make_step(
    mechanism: Mechanism,
    optimizer: Optimizer,
    variables: Sequence[tf.Variable],
    *,
    jit_compile: bool = False,
) -> Callable[[StepState, dict[str, tf.Tensor], tf.Tensor], StepState]:
    """Returns a private step for a custom training loop, see `docs/guides/custom_loop.md`.

    Args:
      mechanism: The mechanism of the steps, with a noise multiplier.
      optimizer: The private optimizer.
      variables: The trainable variables.
      jit_compile: Whether to compile with XLA.

    Returns:
      `step(state, records, key) -> state`. The first state is from `initial_state`; `records` are
      as for `private_step`, for instance the `tensors` of `DPModel.make_data`. The key is from
      `new_key`, or from `secure_key` if the mechanism's randomness is "secure".

    Raises:
      ValueError: The mechanism has no noise multiplier.

    #### Formal guarantee

    As for `private_step`: each call is one release of `mechanism.plan(1)`, which the caller must
    reserve in the ledger first.
    """
    compiled = CompiledSteps(
        optimizer, tf.distribute.get_strategy(), jit_compile, run_eagerly=False
    )
    compiled.begin(variables, planned_steps=0, gains_from_xla=False)
    noise = mechanism.noise
    num_steps = tf.constant(1, tf.int64)

    def step(
        state: StepState, records: dict[str, tf.Tensor], key: tf.Tensor | Keystream
    ) -> StepState:
        if isinstance(key, Keystream) != (mechanism.randomness == SECURE):
            raise ValueError(
                f"key is {type(key).__name__}, but the mechanism has "
                f"randomness={mechanism.randomness!r}: pass "
                "training.secure_key(mechanism) where it is 'secure', and else training.new_key()."
            )
        words = key.rows(int(state.step), 1) if isinstance(key, Keystream) else key
        words = tf.constant(words)
        steps = compiled.steps_for(mechanism, records, tf.TensorSpec(words.shape, words.dtype))
        return steps(state, num_steps, records, words, noise)

    return step


def secure_key(mechanism: Mechanism) -> Keystream:
    """Returns a key for `make_step` with `compile(randomness="secure")`.

    It expands to the words of all steps. Its 256 bits come from the operating system.

    Args:
      mechanism: The mechanism of the steps.

    Raises:
      ImportError: The extra `secure` is not installed.
    """
    return Keystream(_keystream.new_key(), mechanism.num_words())
