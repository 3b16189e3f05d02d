"""The compiled steps of a model, traced once for each mechanism and shape of records, with XLA if that is faster."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfp_dpvi import _keystream
from tfp_dpvi._keystream import SECURE, Keystream
from tfp_dpvi._tf import Optimizer, learning_rate_variable, tf, without_values
from tfp_dpvi.gradients import VaryingShapeError, refuse_dynamic_shapes
from tfp_dpvi.training.mechanism import Mechanism
from tfp_dpvi.training.step import Steps, StepState, initial_state, make_steps

_LOG = logging.getLogger("tfp_dpvi")
_STEPS_WORTH_COMPILING = (
    1000  # XLA takes 2 s to compile and saves about 0.4 ms a step of a small model.
)


KEY = tf.TensorSpec([2], tf.int64)
"""The kind of key that is no tape."""


class CompiledSteps:
    """Compiles and caches the steps of one model."""

    def __init__(
        self,
        optimizer: Optimizer,
        strategy: tf.distribute.Strategy,
        jit_compile: bool | None,
        run_eagerly: bool,
    ) -> None:
        self._optimizer, self._strategy = optimizer, strategy
        self._wanted, self._run_eagerly = jit_compile, run_eagerly
        self._variables: Sequence[tf.Variable] = ()
        self._settings: Hashable = ()  # Of the optimizer, in this fit.
        self._made: dict[Hashable, Steps | None] = {}
        self._choices: tuple[bool, ...] = (False,)
        self.uses_xla = False

    def begin(
        self, variables: Sequence[tf.Variable], planned_steps: int, gains_from_xla: bool
    ) -> None:
        """Sets a fit's variables, and chooses whether to compile with XLA; raises `ValueError` if the variables changed."""
        if self._variables and self.differ(variables):
            raise ValueError(
                "The model's trainable variables changed since its last fit. Call compile again; no privacy was spent."
            )
        self._variables = list(variables)
        self._settings = _settings_of(self._optimizer)
        with self._strategy.scope():
            worth = (
                gains_from_xla
                and planned_steps >= _STEPS_WORTH_COMPILING
                and not tf.distribute.has_strategy()
            )
        wanted = False if self._run_eagerly else self._wanted
        self._choices = ((True, False) if worth else (False,)) if wanted is None else (wanted,)

    def differ(self, variables: Sequence[tf.Variable]) -> bool:
        """Returns whether these are other variables than the fit's."""
        return [id(one) for one in self._variables] != [id(one) for one in variables]

    def forget(self) -> None:
        """Drops the compiled steps, after a change of what they were traced with."""
        self._made = {}

    def steps_for(
        self,
        mechanism: Mechanism,
        records: dict[str, tf.Tensor],
        key: tf.TensorSpec = KEY,
    ) -> Steps:
        """Returns the compiled steps of a mechanism for records of these shapes and a key of this kind.

        Raises `ValueError` if the step cannot be traced, or XLA was requested and cannot compile it.
        """
        shapes = repr(
            tf.nest.map_structure(lambda part: (part.dtype.name, tuple(part.shape)), (records, key))
        )
        with self._strategy.scope():  # As Keras runs it: outside, TensorFlow would trace it again.
            strategy = (
                self._strategy if tf.distribute.has_strategy() else None
            )  # Also with one replica.
            for jit in self._choices:
                identity = (mechanism.identity, self._settings, shapes, jit)
                if identity not in self._made:
                    self._made[identity] = self._make(mechanism, records, key, jit, strategy)
                made = self._made[identity]
                if made is not None:
                    self.uses_xla = jit and strategy is None
                    return _without_values(made)
        raise AssertionError("unreachable: without XLA the step is traced or raises")

    def _make(
        self,
        mechanism: Mechanism,
        records: dict[str, tf.Tensor],
        key: tf.TensorSpec,
        jit: bool,
        strategy: tf.distribute.Strategy | None,
    ) -> Steps | None:
        """Traces and compiles the steps without running them; returns None if optional XLA fails."""
        how = {"jit_compile": jit, "run_eagerly": self._run_eagerly}
        steps = make_steps(mechanism, self._optimizer, self._variables, strategy=strategy, **how)
        zero = tf.constant(0, tf.int64)
        none = (
            initial_state(mechanism),
            zero,
            records,
            tf.zeros(key.shape, key.dtype),
            tf.zeros([], tf.float64),
        )
        try:
            steps(*none)
            if jit and strategy is None and not self._run_eagerly:
                refuse_dynamic_shapes(steps, none)
        except (
            tf.errors.InvalidArgumentError,
            tf.errors.UnimplementedError,
            VaryingShapeError,
        ) as error:
            if not jit or self._wanted is not None:
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


def _settings_of(optimizer: Optimizer) -> Hashable:
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
    """Returns `step(state, records, key) -> state`, for a custom training loop: see `docs/guides/custom_loop.md`.

    The key is from `new_key`, or from `secure_key` if the mechanism's randomness is "secure".
    `jit_compile` compiles with XLA. Raises `ValueError` if the mechanism has no noise multiplier.

    #### Formal guarantee

    As for `private_step`: each call is one release of `mechanism.plan(1)`, which the caller must reserve in the ledger first.
    """
    compiled = CompiledSteps(
        optimizer, tf.distribute.get_strategy(), jit_compile, run_eagerly=False
    )
    compiled.begin(variables, planned_steps=0, gains_from_xla=False)
    noise, one = mechanism.noise, tf.constant(1, tf.int64)

    def step(
        state: StepState, records: dict[str, tf.Tensor], key: tf.Tensor | Keystream
    ) -> StepState:
        if isinstance(key, Keystream) != (mechanism.randomness == SECURE):
            raise ValueError(
                f"key is {type(key).__name__}, but the mechanism has randomness={mechanism.randomness!r}: "
                "pass training.secure_key(mechanism) where it is 'secure', and else training.new_key()."
            )
        words = key.rows(int(state.step), 1) if isinstance(key, Keystream) else key
        words = tf.constant(words)
        steps = compiled.steps_for(mechanism, records, tf.TensorSpec(words.shape, words.dtype))
        return steps(state, one, records, words, noise)

    return step


def secure_key(mechanism: Mechanism) -> Keystream:
    """Returns a key for `make_step` with `compile(randomness="secure")`, which expands to the steps' words.

    Its 256 bits come from the operating system. Raises `ImportError` without the extra `secure`.
    """
    return Keystream(_keystream.new_key(), mechanism.num_words())
