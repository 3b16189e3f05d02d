"""`Synthesizer`: a private synthetic copy of a table."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _random, serialization, surrogates
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import register_keras_serializable, tf, tfd
from tfp_dpvi.gradients import ClippedGradient, ClippedSum, PerExample, StepGradient, StepSpec
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.optimizers import DPKerasAdamOptimizer
from tfp_dpvi.privacy import PrivacyLedger, PrivacyReport
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.synthetic import (
    Layout,
    Segments,
    Table,
    TableData,
    make_likelihood,
    make_prior,
    starting_point,
    table_clipped_sum,
)


@register_keras_serializable("tfp_dpvi", "TableModel")
class TableModel(DPVI):
    """`DPVI` of a table's coded records, whose steps never form a record's gradient: see `table_clipped_sum`.

    Where that formula does not hold (several draws, other gradients or clippings, sample weights) it is `DPVI`. The guarantee is
    `DPVI`'s: the sum of clipped gradients is the same.
    """

    def __init__(
        self,
        table: Table,
        prior: tfd.Distribution | Callable[[], tfd.Distribution],
        surrogate_posterior: tfd.Distribution | str,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            prior, make_likelihood(table), surrogate_posterior, clipping="flat", seed=seed, name="synthesizer"
        )
        self._segments = Segments.of(table)
        self._table = table

    def get_config(self) -> dict[str, Any]:
        """Returns the description, which is public, and the ledger."""
        # The starting point is left out: weights are loaded over it.
        parts = {"table": self._table, "prior": self._model.given["prior"], "surrogate_posterior": "mean_field"}
        return {
            **super(DPVI, self).get_config(),
            "parts": {name: serialization.encode(part, name) for name, part in parts.items()},
        }

    @property
    def _has_formula(self) -> bool:
        return self.gradients == "aligned" and self.num_draws == 1 and self.optimizer.clipping == "flat"

    @property
    def batch_needs(self) -> BatchNeeds:
        """Memory that the formula needs of a physical batch."""
        if not self._has_formula:
            return super().batch_needs
        floats = 4 * (sum(self._segments.sizes) + self.prior.event_shape["weights"][0])
        return BatchNeeds(bytes_each=4 * floats, batchwise=True)

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns `DPVI`'s clipped gradient, by the formula where that holds."""
        general = super().clipped_gradient(spec)
        if not self._has_formula:
            return general

        def draw(key: tf.Tensor) -> StepGradient:
            step = general.draw(key)
            params = tf.nest.pack_sequence_as(self.prior.dtype, step.released)

            def clipped_sum(
                records: dict[str, tf.Tensor], mask: tf.Tensor, own: tf.Tensor
            ) -> tuple[ClippedSum, PerExample]:
                if "sample_weight" in records:
                    return step.clipped_sum(records, mask, own)
                return table_clipped_sum(self._segments, params, records["x"], mask, general.clip)

            return dataclasses.replace(step, clipped_sum=clipped_sum)

        return dataclasses.replace(general, draw=draw, batchwise=True, identity=("formula", general.identity))


_OPTIMIZER = {"l2_norm_clip": 1.0, "learning_rate": 0.1, "use_ema": True, "ema_momentum": 0.97}


class Synthesizer:
    """Learns a described table as a mixture, privately, and samples synthetic tables from it.

    ```python
    table = dpvi.synthetic.Table({"age": dpvi.synthetic.Integer(17, 90), "sex": dpvi.synthetic.Binary()})
    synthesizer = dpvi.Synthesizer(table).fit(frame, epsilon=1.0, delta=1e-5)
    synthetic = synthesizer.sample()          # a DataFrame with the same columns and dtypes
    sets = synthesizer.sample_many(10)        # for dpvi.synthetic.rubin
    ```

    The model is `DPVI` (`.model`) on `dpvi.synthetic.make_prior` and `make_likelihood`. Its defaults are constants, chosen
    on public data (Adult, 13 columns).

    Args:
      table: the public description.
      num_components: K; components that the budget cannot afford stay small or alike.
      target: a column that the synthetic records are to predict: components start out dealt over its levels. None for none.
      concentration: of the Dirichlet priors.
      seed: makes start, noise and fit repeatable and hence *not private*; see `DPModel`.

    Raises:
      ValueError, TypeError: a bad argument.

    #### Formal guarantee

    As `DPVI`'s; sampling is post-processing. Names, order and dtypes of columns and the number of records (unless
    `num_records` is declared) are taken as public; checking values against the description is outside the guarantee.
    """

    def __init__(
        self,
        table: Table,
        num_components: int = 24,
        *,
        target: str | None = None,
        concentration: float = 1.0,
        seed: int | None = None,
    ) -> None:
        if not isinstance(table, Table):
            raise TypeError(f"table must be a dpvi.synthetic.Table, got {table!r}.")
        self.table = table
        self.num_components = check.count("num_components", num_components, 1)
        prior = make_prior(table, self.num_components, concentration=concentration)
        start = starting_point(table, self.num_components, target=target, seed=seed)
        surrogate = surrogates.mean_field(prior, initial_loc=start, initial_scale=0.05)
        # Gradients by the parameters ("aligned"): these are logits, by which a record's gradient is bounded.
        made = functools.partial(make_prior, table, self.num_components, concentration=concentration)
        self.model = TableModel(table, made, surrogate, seed=seed)
        self._layout: Layout | None = None
        self._num_records: int | None = None

    def fit(
        self,
        data: TableData,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        batch_size: int | None = None,
        steps: int = 200,
        verbose: int | str = 0,
        neighboring_relation: NeighboringRelation | str | None = None,
        accountant: str = "pld",
        **optimizer: Any,
    ) -> Synthesizer:
        """Learns from private records; returns itself.

        Args:
          data: pandas DataFrame, or dict of one-dimensional arrays, with exactly the described columns.
          epsilon: lifetime total for these data, given with `delta`; what the ledger holds already counts.
          delta: see `epsilon`.
          ledger: the data's `PrivacyLedger`; by default one of its own.
          num_records: the public number of records, by default `len(data)`.
          batch_size: expected batch size; by default all records in every step, which few steps make affordable.
          steps: number of steps.
          verbose: as in Keras.
          neighboring_relation: as in `DPModel.compile`, but by default the ledger's.
          accountant: as in `DPModel.compile`.
          **optimizer: for `DPKerasAdamOptimizer`, over `l2_norm_clip=1.0`, `learning_rate=0.1`, `use_ema=True` and
            `ema_momentum=0.97` (the average of iterates loses most of the noise); `noise_multiplier` in place of `epsilon`.

        Raises:
          ValueError, TypeError, BudgetExhaustedError: as in `DPModel.fit`; nothing was spent.
        """
        codes = self.table.encode(data)
        layout = Layout.of(data, self.table)
        num = len(codes) if num_records is None else check.count("num_records", num_records, 1)
        steps = check.count("steps", steps, 1)
        held = getattr(self.model.privacy_ledger if ledger is None else ledger, "neighboring_relation", None)
        self.model.compile(
            DPKerasAdamOptimizer(**{**_OPTIMIZER, **optimizer}),
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            neighboring_relation=check.relation(neighboring_relation or held or "add_or_remove_one"),
            accountant=accountant,
        )
        epochs = math.gcd(steps, 10)  # Shown as ten where that divides the steps.
        self.model.fit(
            codes,
            batch_size=num if batch_size is None else batch_size,
            num_records=num_records,
            epochs=epochs,
            steps_per_epoch=steps // epochs,
            verbose=verbose,
        )
        self._layout, self._num_records = layout, num
        return self

    def sample(self, num: int | None = None, *, seed: int | None = None) -> TableData:
        """Draws one synthetic table from one draw of the posterior, with the columns and dtypes that `fit` was given.

        Args:
          num: number of records, by default the public number that was learned from.
          seed: makes it repeatable. That costs no privacy: the model has been released.

        Raises:
          RuntimeError: not fitted.
        """
        if self._layout is None or self._num_records is None:
            raise RuntimeError("Synthesizer.sample before fit: call fit(data, epsilon=..., delta=...) first.")
        num = self._num_records if num is None else check.count("num", num, 1)
        generator = np.random.default_rng(seed)
        draw_seed, sample_seed = (int(part) for part in generator.integers(2**63, size=2))
        draws = self.model.posterior_sample(1, seed=draw_seed)
        mixture = self.model.likelihood(tf.nest.map_structure(lambda part: part[0], draws))
        codes = mixture.sample(num, seed=_random.tfp_seed(_random.new_key(sample_seed))).numpy()
        return self.table.decode(codes, self._layout, generator)

    def sample_many(self, num_sets: int, num: int | None = None, *, seed: int | None = None) -> list[TableData]:
        """Draws synthetic tables for multiple imputation, each from its own draw of the posterior: see `dpvi.synthetic.rubin`.

        Args:
          num_sets: m.
          num: number of records of each.
          seed: makes them repeatable.

        Raises:
          RuntimeError: not fitted.
        """
        seeds = np.random.default_rng(seed).integers(2**63, size=check.count("num_sets", num_sets, 1))
        return [self.sample(num, seed=int(one)) for one in seeds]

    def privacy_report(self, delta: float | None = None) -> PrivacyReport:
        """Returns the model's report; see `DPModel.privacy_report`."""
        return self.model.privacy_report(delta)
