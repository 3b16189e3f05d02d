"""Tries layers on made-up records: are per-record gradients what the rules say, and do records leave each other alone?

A check and no proof: what acts on none of the records tried is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfp_dpvi._keras import tf
from tfp_dpvi.gradients.layer_rules import UnsupportedLayerError

_TOLERANCE = {"float32": 1e-4, "float64": 1e-8}


class _Measures(NamedTuple):
    """What one batch gives.

    Attributes:
      losses: of shape [n].
      by_rules: for each variable its records' squared gradient norms [n] and the weighted sum of their gradients.
      by_tensorflow: the same from TensorFlow's gradients of one record at a time, and the largest entry of any of them.
    """

    losses: Any
    by_rules: Sequence[tuple[Any, Any]]
    by_tensorflow: Sequence[tuple[Any, Any, Any]]


class Trial:
    """The layers' gradients by a function of made-up records, traced once for all that is asked of them.

    Args:
      run: runs a function of no arguments and watches it, as `LayerGradients.run` does.
      function: from a batch of records to losses of shape [n].
      variables: what gradients are by.
      x: structure of tensors of made-up records, [n, ...].
      dtype: of the losses.
    """

    def __init__(
        self, run: Callable[..., Any], function: Callable[[Any], Any], variables: Sequence[Any], x: Any, dtype: Any
    ) -> None:
        self._run, self._function, self._variables, self._x, self._dtype = run, function, variables, x, dtype
        self.notes: list[str] = []
        rows = tf.TensorSpec([None], dtype)
        signature = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), x)
        # With as many rows as training has. By its concrete function: TensorFlow warns of many traces otherwise.
        traced = tf.function(self._measure, autograph=False)
        try:
            self._traced = traced.get_concrete_function(signature, rows, rows, tf.TensorSpec([], tf.bool))
        except UnsupportedLayerError:
            raise
        except (TypeError, ValueError) as error:
            raise UnsupportedLayerError(
                "The layers, or gradients by single records, cannot be traced for batches whose size is not known beforehand, as "
                f"Poisson samples' is not: {type(error).__name__}: {error}"
            ) from error

    def _measure(self, batch: Any, kept: Any, weights: Any, by_record: Any) -> _Measures:
        one = self._run(lambda: self._function(batch), watch=self._variables)
        by_rules = []
        for variable, part in zip(self._variables, one.contributions(one.result, kept), strict=True):
            nothing = (tf.zeros_like(one.result), tf.zeros(variable.shape, variable.dtype))
            by_rules.append(nothing if part is None else (part.squared_norms(), part.weighted_sum(weights)))
        self.notes = one.capture.notes

        num = tf.size(one.result)

        def add(record: Any, found: Any) -> Any:
            only = tf.one_hot(record, num, dtype=self._dtype)
            gradients = one.tape.gradient(
                one.result, self._variables, output_gradients=only, unconnected_gradients="zero"
            )
            added = []
            for (squares, total, largest), gradient in zip(found, gradients, strict=True):
                gradient = tf.convert_to_tensor(gradient)
                weight = tf.cast(weights[record], gradient.dtype)
                square = tf.cast(only, gradient.dtype) * tf.reduce_sum(tf.square(gradient))
                added.append(
                    (squares + square, total + weight * gradient, tf.maximum(largest, tf.reduce_max(tf.abs(gradient))))
                )
            return record + 1, added

        start = [(tf.zeros([num], v.dtype), tf.zeros(v.shape, v.dtype), tf.zeros([], v.dtype)) for v in self._variables]
        # A loop of the graph: TensorFlow's gradient by one record is traced once, and is not run where it is not asked for.
        _, by_tensorflow = tf.while_loop(
            lambda record, _: record < num, add, (tf.where(by_record, 0, num), start), parallel_iterations=1
        )
        return _Measures(one.result, by_rules, by_tensorflow)

    def _of(self, batch: Any, kept: np.ndarray, weights: np.ndarray, by_record: bool) -> _Measures:
        rows = [tf.constant(part, self._dtype) for part in (kept, weights)]
        return tf.nest.map_structure(np.asarray, self._traced(batch, *rows, tf.constant(by_record)))

    def check(self) -> None:
        """Raises `UnsupportedLayerError` where gradients differ, or where records influence each other."""
        tolerance = _TOLERANCE[self._variables[0].dtype.name]
        self._check_gradients(tolerance)
        self._check_independence(tolerance)

    def _check_gradients(self, tolerance: float) -> None:
        num = int(tf.nest.flatten(self._x)[0].shape[0])
        found = self._of(self._x, np.ones(num), np.arange(1, num + 1) / num, True)
        if not np.isfinite(found.losses).all():
            raise UnsupportedLayerError("The loss of made-up records between 0 and 1 is not finite.")
        for variable, rules, (squares, total, largest) in zip(
            self._variables, found.by_rules, found.by_tensorflow, strict=True
        ):
            squared, mine = rules
            right = largest == 0 or (
                np.abs(mine - total).max() < tolerance * largest
                and (squares - squared).max() < tolerance * squares.max()  # Too small a norm breaks the bound,
                and (squared - squares).max() < 0.05 * squares.max()  # too large a one costs accuracy.
            )
            if not right or not np.isfinite(largest):
                raise UnsupportedLayerError(
                    f"The gradients of {variable.name} by single records are not what its layer's inputs and outputs say "
                    "(tried on made-up records): records influence each other, or the variable is used outside its layer."
                )

    def _check_independence(self, tolerance: float) -> None:
        twice = tf.nest.map_structure(lambda part: tf.concat([part, part], axis=0), self._x)
        num = int(tf.nest.flatten(twice)[0].shape[0])
        others = np.arange(num) != num // 2

        def replaced(value: float) -> list[np.ndarray]:
            def change(part: Any) -> Any:
                if part.dtype.is_integer:
                    other = tf.ones_like(part[:1])  # 0 elsewhere: any two categories.
                else:
                    other = tf.fill(part[:1].shape, tf.constant(value, part.dtype))
                return tf.concat([part[: num // 2], other, part[num // 2 + 1 :]], axis=0)

            found = self._of(tf.nest.map_structure(change, twice), others, others, False)
            norms, sums = zip(*found.by_rules, strict=True)
            return [found.losses[others], *[squares[others] for squares in norms], *sums]

        base, again = replaced(0.5), replaced(0.5)
        draws = any(not np.array_equal(a, b) for a, b in zip(base, again, strict=True))
        for value in (float("nan"), 1e6, -1e6):
            for before, now in zip(base, replaced(value), strict=True):
                same = np.isfinite(now).all()
                if same and not draws and before.size:
                    same = np.abs(now - before).max() <= tolerance * np.abs(before).max()
                if not same:
                    raise UnsupportedLayerError(
                        f"Losses or gradients of made-up records change when another record of their batch becomes {value:g}: "
                        "a layer lets records influence each other, for instance by an operation over axis 0 or over the "
                        "whole batch. One record would move all gradients, and no clip would bound its influence. Work along "
                        "the other axes."
                    )
