"""Clipped sums for models of Keras layers, from one forward pass and without per-record gradients in memory.

Layers are watched while a batch goes through them. One backward pass gives the gradient at each layer's output; norms
and weighted sums of per-record gradients follow from inputs and these ("ghost clipping"; Goodfellow 2015,
arXiv:1510.01799, Li et al. 2021, arXiv:2110.05679). Both come from the same pass and the same draws (contract C5).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi._keras import tf
from tfp_dpvi.gradients.capture import Capture
from tfp_dpvi.gradients.clipping import ClippedSum, clip_factors, layer_names
from tfp_dpvi.gradients.contributions import Contribution, total
from tfp_dpvi.gradients.layer_rules import UnsupportedLayerError
from tfp_dpvi.gradients.side_effects import refuse_writes
from tfp_dpvi.gradients.statistics import RecordStatistics
from tfp_dpvi.gradients.trial import Trial


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
        one = self.run(lambda: function(x), num_records)
        rows_each, bytes_each = tuple(one.capture.rows_each), one.num_bytes // num_records
        learned = dataclasses.replace(self, rows_each=rows_each, bytes_each=bytes_each)
        trial = Trial(learned.run, function, self.variables, x, one.result.dtype)
        trial.check()
        return dataclasses.replace(learned, notes=tuple(dict.fromkeys(trial.notes)))


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
