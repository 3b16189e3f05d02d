"""Clipped sums for models of Keras layers, without per-example gradients in memory.

Each layer's inputs are recorded in one forward pass of a batch, and one backward pass gives the
gradients at the layers' outputs. Norms and weighted sums of per-example gradients follow from both
("ghost clipping"; Goodfellow 2015, arXiv:1510.01799, Li et al. 2021, arXiv:2110.05679), by the same
pass and the same draws (contract 5).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np

from tfp_dpvi._tf import (
    Layer,
    Structure,
    calls_seen,
    keras,
    losses_added,
    own_weights,
    refuse_late_functions,
    tf,
)
from tfp_dpvi.ghost.contributions import Contribution, Groups, combined, total
from tfp_dpvi.ghost.rules import (
    RULES,
    ByRecord,
    Probed,
    UnsupportedLayerError,
    Whole,
    is_batch_normalization,
    refuse_mixing,
)
from tfp_dpvi.ghost.vectorized import by_map, is_composite, smallest_enclosing
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, ClippedSum, layer_names
from tfp_dpvi.gradients.isolation import refuse_writes

_Result = TypeVar("_Result")
_TOLERANCE = {"float32": 1e-4, "float64": 1e-8}
_TOO_LARGE = 0.05
_CATEGORY = 100  # An integer other than the usual 0 and 1.
# Fraction of the largest of all gradients below which a difference is rounding: an attention's key
# bias has gradient zero.
_FLOOR = 0.01
# The same as `DIRECT_COST` for a step of a vectorized recurrent layer, and for vectorized
# gradients, measured by `benchmarks/layers.py`.
_STEP_COST, _HELD_COST = 9.0, 60.0
_OUTSIDE = (
    "Either records influence each other, or the variable is used outside its layer: use it only "
    "in that layer's call."
)
_LOOSE = (
    "The bound on the norm is loose and would clip too much: use gradients='vectorized' for this "
    "model."
)


@dataclasses.dataclass(frozen=True)
class LayerGradients:
    """Computes the per-example gradients of a model's layers.

    `checked` sets the attributes after `mapped`.

    ```python
    >>> layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    >>> layer.build([None, 2])
    >>> gradients = LayerGradients([layer], layer.trainable_variables)
    >>> x = tf.constant([[3.0, 4.0], [0.1, 0.0]])  # The gradients of the two outputs.
    >>> passed = gradients.run(lambda: layer(x)[:, 0], num_records=2)
    >>> total, _ = passed.clipped_sum(passed.result, tf.constant([True, True]), Clip(1.0))
    >>> [f"{part:.1f}" for part in total.tensors[0][:, 0]]
    ['0.7', '0.8']

    ```

    Attributes:
      layers: The layers, sublayers included (`layers_of`).
      variables: The variables to differentiate by.
      mapped: True materializes all gradients by `tf.vectorized_map`; only embeddings use a rule.
      rows_each: The rows per record for each call of a layer, in order; None to infer them from a
        static number of records.
      composites: Layers besides recurrent ones that are vectorized as a whole with their sublayers.
      bytes_each: The approximate memory of one record in a pass.
      slow: Layers without a rule, whose per-example gradients are materialized.
      slowdown: The approximate time of a step relative to one without privacy.
    """

    layers: Sequence[Layer]
    variables: Sequence[tf.Variable]
    mapped: bool = False
    rows_each: tuple[int, ...] | None = None
    composites: tuple[Layer, ...] = ()
    bytes_each: int = 0
    slow: tuple[Layer, ...] = ()
    slowdown: float = 1.0

    @property
    def note(self) -> str | None:
        """Returns a sentence about the layers that make a step slow, or None."""
        if not self.slow:
            return None
        names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in self.slow)
        return (
            f"There is no rule for the gradient norms of {names}: their per-example gradients are "
            f"computed and stored. A step takes about {self.slowdown:.1f} times as long as "
            "without privacy (an estimate). docs/layers.md lists the fast layers."
        )

    def run(
        self,
        function: Callable[[], _Result],
        num_records: int | None = None,
        watch: Sequence[tf.Variable] = (),
    ) -> Pass[_Result]:
        """Calls a function once and records its layers' calls.

        Args:
          function: The forward pass.
          num_records: The number of records of the batch; None if it is not static.
          watch: Variables that the pass's tape also watches.

        Raises:
          UnsupportedLayerError: A layer cannot be split by record.
        """
        new: Pass[_Result] = Pass(self, num_records)
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        layers = [
            layer for layer in self.layers if new.weights(layer) or is_batch_normalization(layer)
        ]
        with new.tape, calls_seen(layers, new.watched):
            new.tape.watch(watch)
            try:
                with refuse_late_functions(self.layers):
                    new.result = function()
            except UnsupportedLayerError as error:
                # Keras adds sentences of its own to a layer's error: leave them out.
                raise (new.refusal or error) from None
            adding = next((layer for layer in self.layers if losses_added(layer)), None)
            if adding is not None:
                raise UnsupportedLayerError(
                    f"{adding.name} ({type(adding).__name__}) uses add_loss or an activity "
                    "regularizer, which cannot be split by record.\n"
                    "Add the term to the distribution or the prior, or write a DPModel with "
                    "record_loss.",
                    adding=adding,
                )
        refuse_writes(graph, known)
        return new

    def checked(
        self,
        function: Callable[[Structure], tf.Tensor],
        x: Structure,
        still: Callable[[Structure], tf.Tensor] | None = None,
    ) -> LayerGradients:
        """Checks the layers on synthetic records.

        A layer whose sublayers cannot be separated (they run in a loop, or their variables are used
        elsewhere) is vectorized over records as a whole, or an enclosing layer is. Per-example
        gradients are compared with TensorFlow's own. Then a record in the middle is replaced by NaN
        and by huge numbers, which must not change the others' losses and gradients. This finds
        layers that mix records, reorder rows or use a variable elsewhere, unless they do so for
        none of the synthetic records: it is a check and no proof.

        Args:
          function: Maps a batch of records to losses of shape [n]; deterministic except for layers
            that draw.
          x: Structure of tensors of synthetic records, [n, ...] with n of at least 3.
          still: The same function in inference mode, where no layer draws; also checked if a layer
            draws.

        Returns:
          A copy with the attributes that this sets.

        Raises:
          UnsupportedLayerError: Gradients differ, or records influence each other.
        """
        gradients, first = self, None
        while True:
            try:
                return gradients._compared(function, x, still)
            except ValueError as error:
                first = first or error
                layer = getattr(error, "layer", None)
                known = gradients.composites
                new = None if layer is None else smallest_enclosing(layer, self.layers, known)
                if new is None:
                    raise first from (None if error is first else error)
                gradients = dataclasses.replace(gradients, composites=(*known, new))

    def _compared(
        self,
        function: Callable[[Structure], tf.Tensor],
        x: Structure,
        still: Callable[[Structure], tf.Tensor] | None,
    ) -> LayerGradients:
        num_records = int(tf.nest.flatten(x)[0].shape[0])
        passes: list[Pass[tf.Tensor]] = []

        def compare() -> tuple[tf.Tensor, list[list[tf.Tensor]]]:
            passed = self.run(lambda: function(x), num_records, watch=self.variables)
            passes.append(passed)
            odd = tf.reduce_any(~tf.math.is_finite(passed.result))
            return odd, _differences(passed, num_records)

        # A concrete function: TensorFlow would warn of many traces if several models are made.
        odd, rows = tf.function(compare, autograph=False).get_concrete_function()()
        if odd:
            raise UnsupportedLayerError(
                "The loss of synthetic records between 0 and 1 is not finite."
            )
        tolerance = _TOLERANCE[self.variables[0].dtype.name]
        for variable, differences in zip(self.variables, rows, strict=True):
            self._refuse_differences(variable, [float(part) for part in differences], tolerance)
        passed = passes[0]
        num_bytes = sum(
            (probe.shape.num_elements() or 0) * probe.dtype.size for probe in passed.probes
        )
        slow_calls = [call for call in passed.calls if call.slow]
        learned = dataclasses.replace(
            self,
            rows_each=tuple(passed.rows_each),
            bytes_each=num_bytes // num_records + 8 * sum(call.size for call in slow_calls),
            slowdown=passed.slowdown,
            slow=tuple(dict.fromkeys(call.layer for call in slow_calls)),
        )
        if _check_independence(learned, function, x, tolerance) and still is not None:
            _check_independence(learned, still, x, tolerance)
        return learned

    def _refuse_differences(
        self, variable: tf.Variable, differences: Sequence[float], tolerance: float
    ) -> None:
        """Raises if the gradients of a variable differ from TensorFlow's, see `_differences`."""
        sums, too_small = differences[:2]
        too_large, scale = differences[2:]
        right = sums < tolerance and too_small < tolerance and too_large < _TOO_LARGE
        if (scale == 0 or right) and np.isfinite(scale):
            return
        owners = [
            layer for layer in self.layers if any(own is variable for own in own_weights(layer))
        ]
        why = _LOOSE if too_large >= _TOO_LARGE and sums < tolerance else _OUTSIDE
        raise UnsupportedLayerError(
            f"The per-example gradients of {variable.name} do not follow from its layer's inputs "
            f"and outputs: on synthetic records their sum has a relative error of {sums:.2g}, and "
            f"the largest squared norm is too small by {max(too_small, 0.0):.2g} and too large by "
            f"{max(too_large, 0.0):.2g} (allowed: {tolerance:g}, {tolerance:g} and "
            f"{_TOO_LARGE:g}).\n{why}",
            owners[0] if owners else None,
        )


def _differences(passed: Pass[tf.Tensor], num_records: int) -> list[list[tf.Tensor]]:
    """Compares a weighted sum and norms with those of TensorFlow's per-example gradients.

    Returns:
      Four scalars for each variable: the error of the sum, how much a squared norm is too small and
        too large, relative to the variable's largest or to a small fraction of the largest of all;
        and the largest entry.
    """
    variables, losses = passed.gradients.variables, passed.result
    weights = tf.cast(tf.range(1.0, num_records + 1.0) / num_records, losses.dtype)
    by_layers = passed.contributions(losses, tf.ones_like(losses))
    each = [
        passed.tape.gradient(losses, variables, output_gradients=only, unconnected_gradients="zero")
        for only in tf.unstack(tf.eye(num_records, dtype=losses.dtype))
    ]
    values = [
        tf.stack([tf.convert_to_tensor(gradient[number]) for gradient in each])
        for number in range(len(variables))
    ]
    squares = [
        tf.reduce_sum(tf.reshape(tf.square(part), [num_records, -1]), axis=1) for part in values
    ]
    largest = tf.reduce_max([tf.reduce_max(tf.abs(part)) for part in values])
    longest = tf.reduce_max(tf.add_n(squares))
    rows = []
    for part, value, square in zip(by_layers, values, squares, strict=True):
        wanted = tf.tensordot(weights, value, axes=1)
        mine = tf.zeros_like(wanted) if part is None else part.weighted_sum(weights)
        squared = tf.zeros_like(square) if part is None else part.squared_norms()
        scale = tf.reduce_max(tf.abs(value))
        size = tf.maximum(scale, _FLOOR * largest)
        norm = tf.maximum(tf.reduce_max(square), _FLOOR * longest)
        too_small = tf.reduce_max(square - squared) / norm
        too_large = tf.reduce_max(squared - square) / norm
        rows.append([tf.reduce_max(tf.abs(mine - wanted)) / size, too_small, too_large, scale])
    return rows


def _check_independence(
    gradients: LayerGradients,
    function: Callable[[Structure], tf.Tensor],
    x: Structure,
    tolerance: float,
) -> bool:
    """Raises if one record's values change others' losses or gradients, or theirs change its own.

    Returns:
      True if layers draw, which hides an influence.
    """
    twice = tf.nest.map_structure(lambda part: tf.concat([part, part], axis=0), x)
    num = int(tf.nest.flatten(twice)[0].shape[0])
    others = np.arange(num) != num // 2

    def measures(batch: Structure, keep: tf.Tensor) -> list[tf.Tensor]:
        passed = gradients.run(lambda: function(batch))
        weights = tf.cast(keep, passed.result.dtype)
        parts = [part for part in passed.contributions(passed.result, weights) if part is not None]
        norms = [tf.boolean_mask(part.squared_norms(), keep) for part in parts]
        return [
            tf.boolean_mask(passed.result, keep),
            *norms,
            *[part.weighted_sum(weights) for part in parts],
        ]

    # Traced for any number of rows, as in training.
    signature = tf.nest.map_structure(
        lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), twice
    )
    traced = tf.function(
        measures, input_signature=[signature, tf.TensorSpec([None], tf.bool)], autograph=False
    )
    # A missing number may be replaced by the batch's mean: then the others change the record.
    alike = tf.nest.map_structure(lambda part: tf.repeat(part[:1], num, axis=0), twice)

    def replaced(
        value: float, category: int, batch: Structure = twice, keep: np.ndarray = others
    ) -> list[np.ndarray]:
        def change(part: tf.Tensor) -> tf.Tensor:
            if part.dtype == tf.string:
                entry = tf.constant(str(category))
            else:
                entry = tf.cast(category if part.dtype.is_integer else value, part.dtype)
            other = tf.fill(part[:1].shape, entry)
            return tf.concat([part[: num // 2], other, part[num // 2 + 1 :]], axis=0)

        return [part.numpy() for part in traced(tf.nest.map_structure(change, batch), keep)]

    def moved(before: np.ndarray, now: np.ndarray) -> bool:
        return bool(before.size) and bool(
            np.abs(now - before).max() > tolerance * np.abs(before).max()
        )

    base = replaced(0.5, 0)
    # A layer's draws change values by more than rounding, which varies between threads.
    draws = any(map(moved, base, replaced(0.5, 0)))
    for value, category in zip(
        (math.nan, math.inf, 1e6, -1e6, 0.5), (1, 1, 1, 1, _CATEGORY), strict=True
    ):
        try:
            after = replaced(value, category)
            own, again = (replaced(value, category, batch, ~others) for batch in (twice, alike))
        except tf.errors.InvalidArgumentError:
            # The integer may be out of range.
            if category == _CATEGORY:
                continue
            raise
        for before, now in zip(base + own, after + again, strict=True):
            if np.isfinite(before).all() and (
                not np.isfinite(now).all() or (not draws and moved(before, now))
            ):
                # The change is NaN if the values become NaN.
                by = np.abs(now - before).max() / np.abs(before).max()
                raise UnsupportedLayerError(
                    f"Losses or gradients of synthetic records change (by {by:.2g} of the "
                    f"largest) with other records of their batch, of which one is {value:g} "
                    f"(integers {category}): a layer lets records influence each other, for "
                    "instance by an operation over axis 0 or over the whole batch.\n"
                    "One record would move all gradients, and no clip would bound its influence. "
                    "Use the other axes."
                )
    return draws


@dataclasses.dataclass(frozen=True)
class _Call:
    """A recorded call of a layer.

    Attributes:
      layer: The layer.
      probed: Its forward pass.
      rows: The rows of its probes; None if their number is not static.
      size: The entries of its variables; 0 for an embedding, which uses single rows.
      places: The positions of a sequence or pixels, each of which uses the variables once.
      slow: True without a rule: its gradients are vectorized and materialized.
    """

    layer: Layer
    probed: Probed
    rows: int | None
    size: int
    places: int
    slow: bool


class Pass(Generic[_Result]):
    """One forward pass of a batch with the recorded calls of its trainable layers.

    `LayerGradients.run` makes it.

    ```python
    >>> layer = keras.layers.Dense(3)
    >>> layer.build([None, 2])
    >>> gradients = LayerGradients([layer], layer.trainable_variables)
    >>> passed = gradients.run(lambda: layer(tf.ones([4, 2])), num_records=4)
    >>> passed.rows_each
    [1]

    ```

    Attributes:
      result: The result of the function that was called.
      tape: A persistent tape that watched the probes of the calls.
      calls: The recorded calls, in order.
    """

    result: _Result

    def __init__(self, gradients: LayerGradients, num_records: int | None) -> None:
        self.gradients = gradients
        self.tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        self.refusal: UnsupportedLayerError | None = None
        self._num_records = num_records
        self.calls: list[_Call] = []
        self._inside = False  # True while a composite layer is being called.
        self._graph = tf.compat.v1.get_default_graph()

    def weights(self, layer: Layer) -> list[tf.Variable]:
        """Returns the variables whose gradients a call of this layer accounts for."""
        if isinstance(layer, Whole):
            return list(layer.reads)
        return layer.trainable_weights if self._is_composite(layer) else own_weights(layer)

    def _is_composite(self, layer: Layer) -> bool:
        return is_composite(layer) or any(known is layer for known in self.gradients.composites)

    def watched(self, layer: Layer, original: Callable[..., Structure]) -> Callable[..., Structure]:
        """Returns a layer's call, recorded.

        Args:
          layer: The layer.
          original: Its own call.
        """
        mapped = self.gradients.mapped

        def call(inputs: Structure, *args: Structure, **kwargs: Structure) -> Structure:
            # In another graph, Keras infers shapes, or the layer is called inside a function or
            # loop of its own.
            if self._inside or tf.compat.v1.get_default_graph() is not self._graph:
                return original(inputs, *args, **kwargs)
            refuse_mixing(layer, kwargs.get("training"))
            variables = self.weights(layer)
            if not variables:
                return original(inputs, *args, **kwargs)
            # Embeddings use their rule always: their own forward pass raises for an id out of
            # range, which would reveal a record.
            by_rule = not mapped or type(layer) is keras.layers.Embedding
            rule = RULES.get(type(layer)) if by_rule else None
            plain = not args and all(value is None for value in kwargs.values())
            usable = rule is not None and plain and layer.compute_dtype == layer.variable_dtype
            probed = rule(layer, original, inputs) if rule is not None and usable else None
            slow = probed is None and not mapped
            if probed is None:
                self._inside = self._is_composite(layer)
                try:
                    probed = by_map(layer, variables, original, inputs, args, kwargs)
                except UnsupportedLayerError as error:
                    self.refusal = error
                    raise
                finally:
                    self._inside = False
            self.tape.watch(probed.probes)
            parts = [*tf.nest.flatten(inputs), *probed.probes]
            shapes = [part.shape for part in parts if tf.is_tensor(part)]
            places = max(shape[1:-1].num_elements() or 1 for shape in shapes)
            is_table = isinstance(layer, keras.layers.Embedding)
            size = 0 if is_table else sum(variable.shape.num_elements() for variable in variables)
            self.calls.append(_Call(layer, probed, probed.probes[0].shape[0], size, places, slow))
            return probed.finish()

        return call

    @property
    def rows_each(self) -> list[int]:
        """Returns the rows per record of each call."""
        known = self.gradients.rows_each
        if known is not None:
            if len(known) != len(self.calls):
                raise UnsupportedLayerError(
                    f"The layers were called {len(self.calls)} times, but {len(known)} when "
                    "checked: call the same in every pass."
                )
            return list(known)
        num = self._num_records
        rows_each = []
        for call in self.calls:
            if num is None or call.rows is None or call.rows % num:
                raise UnsupportedLayerError(
                    f"{call.layer.name} got {call.rows} rows for {num} records: the first "
                    "dimension of a layer's inputs must run over records, with the same number "
                    "of rows for each.",
                    call.layer,
                )
            rows_each.append(call.rows // num)
        return rows_each

    @property
    def slowdown(self) -> float:
        """Returns the approximate time of a step relative to one without privacy.

        Forward and backward cost three passes of multiply-adds. A vectorized layer runs both once
        more, and materialized gradients are written and read.
        """
        plain, more = 1.0, 0.0
        for call, rows in zip(self.calls, self.rows_each, strict=True):
            passes = 3.0 * call.size * call.places * rows
            copies = call.size * (
                _STEP_COST * call.places if is_composite(call.layer) else _HELD_COST
            )
            plain, more = plain + passes, more + (passes + copies if call.slow else 0.0)
        return 1.0 + more / plain

    @property
    def probes(self) -> list[tf.Tensor]:
        """Returns the tensors of all calls to differentiate by."""
        return [probe for call in self.calls for probe in call.probed.probes]

    def contributions(self, values: tf.Tensor, weights: tf.Tensor) -> list[Contribution | None]:
        """Returns the records' contributions to the gradient of `sum(weights * values)`.

        Args:
          values: Float [n, ...], computed in this pass.
          weights: A tensor of the same shape.

        Returns:
          A contribution for each variable; None where the pass does not use it.
        """
        gradients = self.tape.gradient(
            values, self.probes, output_gradients=weights, unconnected_gradients="zero"
        )
        at_probes = iter(gradients)
        parts: dict[tf.Variable, list[Contribution]] = {
            variable.ref(): [] for variable in self.gradients.variables
        }
        for call, rows in zip(self.calls, self.rows_each, strict=True):
            own = [next(at_probes) for _ in call.probed.probes]
            for variable, part in call.probed.contributions(own, ByRecord(rows)):
                parts.setdefault(variable.ref(), []).append(part)
        by_variable = [parts[variable.ref()] for variable in self.gradients.variables]
        return [combined(uses) if uses else None for uses in by_variable]

    def clipped_sum(
        self,
        losses: tf.Tensor,
        mask: tf.Tensor,
        clip: Clip,
        *,
        weights: tf.Tensor | None = None,
        persons: Groups | None = None,
    ) -> tuple[ClippedSum, PerExample]:
        """Sums the clipped per-record gradients.

        Args:
          losses: Float [n], computed in this pass, loss i from record i alone.
          mask: Bool [n], False for padding.
          clip: The bound C on one record's gradient, and its scheme.
          weights: Float [n], which multiply the losses before the clip; None for ones.
          persons: Whose rows these are, if a record is a person: losses are then of rows, and the
            mask is of persons.

        Returns:
          The `ClippedSum`, and exact values of single records (*not private*).

        #### Formal guarantee

        That of `clipped_sum` of `gradients.vmap`, for losses that depend on one record each, as
        `LayerGradients.checked` checks.
        """
        weights = tf.ones_like(losses) if weights is None else weights
        values = losses * weights
        values = values if persons is None else persons.sums(values)
        keep = mask & tf.math.is_finite(values)
        rows = keep
        if persons is not None:
            # Rows of no person come last.
            rows = tf.gather(tf.concat([keep, [False]], axis=0), persons.group)
        variables = self.gradients.variables
        parts = self.contributions(losses, tf.where(rows, weights, tf.zeros_like(weights)))
        if persons is not None:
            parts = [None if part is None else part.by_groups(persons) for part in parts]
        used = {
            variable.ref(): part
            for variable, part in zip(variables, parts, strict=True)
            if part is not None
        }
        squares = [part.squared_norms() for part in used.values()]
        finite = tf.math.is_finite(tf.add_n(squares))
        keep &= finite
        factors = clip.factors(squares, layer_names([reference.deref() for reference in used]))
        examples = PerExample.of(values, factors, keep)
        factors = [tf.where(keep, factor, tf.zeros_like(factor)) for factor in factors]
        sums = dict(zip(used, total(list(used.values()), factors, finite), strict=True))
        tensors = [
            sums.get(variable.ref(), tf.zeros(variable.shape, variable.dtype))
            for variable in variables
        ]
        return ClippedSum(tensors, clip), examples
