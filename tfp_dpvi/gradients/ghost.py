"""Clipped sums for models of Keras layers, from one forward pass and without per-record gradients in memory.

Layers are watched while a batch goes through them. One backward pass gives the gradient at each layer's output; norms
and weighted sums of per-record gradients follow from inputs and these ("ghost clipping"; Goodfellow 2015,
arXiv:1510.01799, Li et al. 2021, arXiv:2110.05679). Both come from the same pass and the same draws (contract C5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.gradients.capture import Capture
from tfp_dpvi.gradients.clipping import ClippedSum, clip_factors, layer_names
from tfp_dpvi.gradients.contributions import Contribution, total
from tfp_dpvi.gradients.layer_rules import UnsupportedLayerError
from tfp_dpvi.gradients.side_effects import refuse_writes
from tfp_dpvi.gradients.statistics import RecordStatistics


@dataclasses.dataclass(frozen=True)
class LayerGradients:
    """Which layers and variables, and how their per-record gradients are had.

    Attributes:
      layers: Keras layers, sublayers included.
      variables: what the gradient is by.
      mapped: hold every layer's per-record gradients, by `tf.vectorized_map`, and use no rule.
      rows_each: see `Capture`; set by `checked`.
      bytes_each: memory that a record takes in a pass, roughly; set by `checked`.
      notes: sentences about layers without a rule; set by `checked`.
    """

    layers: Sequence[Any]
    variables: Sequence[Any]
    mapped: bool = False
    rows_each: tuple[int, ...] | None = None
    bytes_each: int = 0
    notes: tuple[str, ...] = ()

    def run(self, function: Callable[[], Any], num_records: int | None = None, watch: Sequence[Any] = ()) -> Pass:
        """Runs `function` and watches it.

        Args:
          function: returns a structure of tensors; it is called once.
          num_records: how many records it works on, if that is known while tracing.
          watch: what else the pass's tape is to watch.
        """
        tape = tf.GradientTape(persistent=True, watch_accessed_variables=False)
        capture = Capture(self.layers, tape, rows_each=self.rows_each, num_records=num_records, mapped=self.mapped)
        graph = tf.compat.v1.get_default_graph()
        known = len(graph.get_operations())
        with tape, capture.watching():
            tape.watch(watch)
            result = function()
            if any(layer._losses or layer._eager_losses for layer in self.layers):
                raise UnsupportedLayerError(
                    "A layer uses add_loss or an activity regularizer, which cannot be told apart by record in a batch. Add "
                    "the term to the distribution or the prior, or write a DPModel with record_loss."
                )
        refuse_writes(graph, known)
        return Pass(self, tape, capture, result)

    def checked(self, function: Callable[[Any], Any], x: Any) -> LayerGradients:
        """Tries the layers on made-up records.

        Gradients by single records are compared with TensorFlow's own; and a record in the middle is replaced by NaN and by
        huge numbers, which must leave the others' losses and gradients as they were. What mixes records, reorders rows or
        uses a variable out of sight is found, unless it acts on none of the records tried: this is a check and no proof.

        Args:
          function: from a batch of records to losses of shape [n], the same for the same batch but for layers that draw.
          x: structure of tensors of made-up records, [n, ...] with n of at least 3.

        Returns:
          This, with what was learned about the layers.

        Raises:
          UnsupportedLayerError: gradients differ, or records influence each other.
        """
        num_records = int(tf.nest.flatten(x)[0].shape[0])
        found: dict[str, Any] = {}

        def compare() -> Any:
            one = self.run(lambda: function(x), num_records, watch=self.variables)
            found["pass"] = one
            weights = tf.range(1.0, num_records + 1.0) / num_records
            weights = tf.cast(weights, one.result.dtype)
            rows = []
            by_layers = one.contributions(one.result, tf.ones_like(one.result))
            each = [
                one.tape.gradient(one.result, self.variables, output_gradients=only, unconnected_gradients="zero")
                for only in tf.unstack(tf.eye(num_records, dtype=one.result.dtype))
            ]
            for number, part in enumerate(by_layers):
                values = tf.stack([tf.convert_to_tensor(gradient[number]) for gradient in each])
                squares = tf.reduce_sum(tf.reshape(tf.square(values), [num_records, -1]), axis=1)
                total = tf.tensordot(weights, values, axes=1)
                if part is None:
                    mine, squared = tf.zeros_like(total), tf.zeros_like(squares)
                else:
                    mine, squared = part.weighted_sum(weights), part.squared_norms()
                scale = tf.reduce_max(tf.abs(values))
                too_small = tf.reduce_max(squares - squared) / tf.reduce_max(squares)
                too_large = tf.reduce_max(squared - squares) / tf.reduce_max(squares)
                rows.append([tf.reduce_max(tf.abs(mine - total)) / scale, too_small, too_large, scale])
            return tf.reduce_any(~tf.math.is_finite(one.result)), rows

        # By its concrete function: TensorFlow warns of many traces where several models are made.
        odd, rows = tf.function(compare, autograph=False).get_concrete_function()()
        tolerance = _TOLERANCE[self.variables[0].dtype.name]
        if odd:
            raise UnsupportedLayerError("The loss of made-up records between 0 and 1 is not finite.")
        for variable, (sums, too_small, too_large, scale) in zip(self.variables, rows, strict=True):
            right = float(sums) < tolerance and float(too_small) < tolerance and float(too_large) < 0.05
            if (float(scale) > 0 and not right) or not np.isfinite(float(scale)):
                raise UnsupportedLayerError(
                    f"The gradients of {variable.name} by single records are not what its layer's inputs and outputs say "
                    "(tried on made-up records): records influence each other, or the variable is used outside its layer."
                )
        one = found["pass"]
        learned = dataclasses.replace(
            self,
            rows_each=tuple(one.capture.rows_each),
            bytes_each=one.num_bytes // num_records,
            notes=tuple(dict.fromkeys(one.capture.notes)),
        )
        learned._check_independence(function, x, tolerance)
        return learned

    def _check_independence(self, function: Callable[[Any], Any], x: Any, tolerance: float) -> None:
        """Raises if losses or gradients of others change when one record's values do."""
        twice = tf.nest.map_structure(lambda part: tf.concat([part, part], axis=0), x)
        num = int(tf.nest.flatten(twice)[0].shape[0])
        others = np.arange(num) != num // 2

        def measures(batch: Any) -> tuple[Any, list[Any]]:
            one = self.run(lambda: function(batch))
            keep = tf.constant(others)
            weights = tf.cast(keep, one.result.dtype)
            parts = [part for part in one.contributions(one.result, weights) if part is not None]
            norms = [tf.boolean_mask(part.squared_norms(), keep) for part in parts]
            return tf.boolean_mask(one.result, keep), [*norms, *[part.weighted_sum(weights) for part in parts]]

        signature = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), twice)
        traced = tf.function(
            measures, input_signature=[signature], autograph=False
        )  # With as many rows as training has.

        def replaced(value: float) -> list[np.ndarray]:
            def change(part: Any) -> Any:
                if part.dtype.is_integer:
                    other = tf.ones_like(part[:1])  # 0 elsewhere: any two categories.
                else:
                    other = tf.fill(part[:1].shape, tf.constant(value, part.dtype))
                return tf.concat([part[: num // 2], other, part[num // 2 + 1 :]], axis=0)

            losses, gradients = traced(tf.nest.map_structure(change, twice))
            return [losses.numpy(), *[gradient.numpy() for gradient in gradients]]

        def moved(before: np.ndarray, now: np.ndarray) -> bool:
            return bool(before.size) and bool(np.abs(now - before).max() > tolerance * np.abs(before).max())

        base = replaced(0.5)
        # A layer's own draws move more than rounding does, which threads make differ as well.
        draws = any(map(moved, base, replaced(0.5)))
        for value in (float("nan"), 1e6, -1e6):
            for before, now in zip(base, replaced(value), strict=True):
                if not np.isfinite(now).all() or (not draws and moved(before, now)):
                    raise UnsupportedLayerError(
                        f"Losses or gradients of made-up records change when another record of their batch becomes {value:g}: "
                        "a layer lets records influence each other, for instance by an operation over axis 0 or over the "
                        "whole batch. One record would move all gradients, and no clip would bound its influence. Work along "
                        "the other axes."
                    )


_TOLERANCE = {"float32": 1e-4, "float64": 1e-8}


class Pass:
    """One forward pass of a batch, watched.

    Attributes:
      result: what the function returned.
    """

    def __init__(self, gradients: LayerGradients, tape: Any, capture: Capture, result: Any) -> None:
        self.gradients, self.tape, self.capture, self.result = gradients, tape, capture, result

    @property
    def num_bytes(self) -> int:
        """Size of the tensors between layers, where their shapes are known."""
        return sum((probe.shape.num_elements() or 0) * probe.dtype.size for probe in self.capture.probes)

    def contributions(self, values: Any, weights: Any) -> list[Contribution | None]:
        """For each variable what the records contribute to the gradient of `sum(weights * values)`.

        Args:
          values: tensor computed in this pass.
          weights: of the same shape.
        """
        probes = self.capture.probes
        at_probes = self.tape.gradient(values, probes, output_gradients=weights, unconnected_gradients="zero")
        found = {variable.ref(): part for variable, part in self.capture.contributions(at_probes)}
        return [found.get(variable.ref()) for variable in self.gradients.variables]

    def clipped_sum(
        self, losses: Any, mask: Any, *, l2_norm_clip: float, clipping: str = "flat", weights: Any = None
    ) -> tuple[ClippedSum, RecordStatistics]:
        """The sum over records of their gradients, each clipped.

        Args:
          losses: of shape [n], computed in this pass; loss i depends on record i alone.
          mask: bool tensor of shape [n]; False marks padding.
          l2_norm_clip: the bound C.
          clipping: see `clip_factors`.
          weights: float tensor of shape [n] that multiplies the losses before the clip, or None.

        Returns:
          The `ClippedSum`, and the records' losses and whether they were clipped (*not private* as they are).

        #### Formal guarantee

        As for `clipped_sum` of `gradients.vectorized`, for losses that depend on one record each (`LayerGradients.checked`
        tries that): a record contributes a vector of l2 norm at most C up to rounding, and exactly zero if it is masked
        or its loss or its gradient's squared norm is NaN or Inf. Hence A = C and D = 2C.
        """
        weights = tf.ones_like(losses) if weights is None else weights
        keep = mask & tf.math.is_finite(losses * weights)
        variables = self.gradients.variables
        parts = self.contributions(losses, tf.where(keep, weights, tf.zeros_like(weights)))
        used = [(variable, part) for variable, part in zip(variables, parts, strict=True) if part is not None]
        squares = [part.squared_norms() for _, part in used]
        finite = tf.math.is_finite(tf.add_n(squares))
        keep &= finite
        factors = clip_factors(squares, l2_norm_clip, clipping, layer_names([variable for variable, _ in used]))
        statistics = RecordStatistics.of(losses * weights, factors, keep)
        factors = [tf.where(keep, factor, tf.zeros_like(factor)) for factor in factors]

        totals = total([part for _, part in used], factors, finite)
        sums = {variable.ref(): part for (variable, _), part in zip(used, totals, strict=True)}
        tensors = [sums.get(variable.ref(), tf.zeros(variable.shape, variable.dtype)) for variable in variables]
        return ClippedSum(tensors, l2_norm_clip), statistics
