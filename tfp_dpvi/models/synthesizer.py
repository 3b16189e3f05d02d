"""`Synthesizer`: a private synthetic copy of a table."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from tfp_dpvi import _random, serialization, surrogates
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import register_keras_serializable, tf
from tfp_dpvi.gradients import ClippedGradient, ClippedSum, PerExample, StepGradient, StepSpec
from tfp_dpvi.models import saving
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.optimizers import DPKerasAdamOptimizer
from tfp_dpvi.privacy import PrivacyLedger, PrivacyReport
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.synthetic import Layout, Segments, Table, make_likelihood, make_prior, starting_point, table_clipped_sum


@register_keras_serializable("tfp_dpvi", "TableModel")
class TableModel(DPVI):
    """`DPVI` of a table's coded records, whose steps never form a record's gradient: see `table_clipped_sum`.

    Where its formula does not hold (several draws, gradients by the surrogate's variables, other clippings, weights of
    records) it does what `DPVI` does.

    Args:
      table: the description.
      prior: `make_prior` of it, or a function without arguments that makes it (needed to save the model).
      surrogate_posterior: as for `DPVI`.
      seed: as for `DPVI`.

    #### Formal guarantee

    As `DPVI`'s: the sum of clipped gradients is the same.
    """

    def __init__(self, table: Table, prior: Any, surrogate_posterior: Any, *, seed: int | None = None) -> None:
        super().__init__(prior, make_likelihood(table), surrogate_posterior, seed=seed, name="synthesizer")
        self._segments = Segments.of(table)
        self._table = table

    def get_config(self) -> dict[str, Any]:
        """The description, which is public, and the books."""
        # The starting point is left out: weights are loaded over it.
        parts = {"table": self._table, "prior": self._model.given["prior"], "surrogate_posterior": "mean_field"}
        return {
            **saving.base_config(self),
            "parts": {name: serialization.encode(part, name) for name, part in parts.items()},
        }

    @property
    def _has_formula(self) -> bool:
        return self.gradients == "aligned" and self.num_draws == 1 and self.optimizer.clipping == "flat"

    @property
    def batch_needs(self) -> BatchNeeds:
        """What the formula asks of a physical batch."""
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


class Synthesizer:
    """Learns a described table as a mixture, privately, and samples synthetic tables from it.

    ```python
    table = dpvi.synthetic.Table({"age": dpvi.synthetic.Integer(17, 90), "sex": dpvi.synthetic.Binary()})
    synthesizer = dpvi.Synthesizer(table).fit(frame, epsilon=1.0, delta=1e-5)
    synthetic = synthesizer.sample()          # a DataFrame with the same columns and dtypes
    sets = synthesizer.sample_many(10)        # for dpvi.synthetic.rubin
    ```

    The model is `DPVI` (`.model`) on `dpvi.synthetic.make_prior` and `make_likelihood`. Its defaults are constants that
    were chosen on public data (Adult, 13 columns); no record of yours is looked at to choose anything.

    Args:
      table: the public description.
      num_components: K; components that the budget cannot afford stay small or alike.
      target: a column that the synthetic records are to predict: components start out dealt over its levels. None for none.
      concentration: of the Dirichlet priors.
      seed: makes start, noise and fit repeatable and hence *not private*; see `DPModel`.

    Raises:
      ValueError, TypeError: a bad argument.

    #### Formal guarantee

    What `fit` learns is released as `DPVI` says; see `privacy_report()`. Sampling is post-processing at no further cost,
    for any number of sets. Names, order and dtypes of columns and the number of records (unless `num_records` is
    declared) are taken as public; checking the values against the description is the curator's, outside the guarantee.
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
        data: Any,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        neighboring_relation: Any = None,
        accountant: str = "pld",
        batch_size: int | None = None,
        steps: int = 200,
        l2_norm_clip: float = 1.0,
        learning_rate: float = 0.1,
        ema_momentum: float = 0.97,
        verbose: Any = 0,
    ) -> Synthesizer:
        """Learns from private records.

        Args:
          data: pandas DataFrame, or dict of one-dimensional arrays, with exactly the described columns.
          epsilon: lifetime total for these data, given with `delta`; what the ledger holds already counts.
          delta: see `epsilon`.
          noise_multiplier: instead of epsilon, see `DPModel.compile`; 0 switches privacy off, as the report says.
          ledger: the data's `PrivacyLedger`; by default one of its own.
          num_records: the public number of records, by default `len(data)`.
          neighboring_relation: of `dp_accounting`; by default the ledger's, or ADD_OR_REMOVE_ONE in an empty one.
          accountant: "pld" or "rdp".
          batch_size: expected batch size; by default all records in every step, which few steps make affordable.
          steps: number of steps.
          l2_norm_clip: bound on a record's gradient, `math.inf` only without noise.
          learning_rate: Adam's.
          ema_momentum: of the average of iterates that is kept at the end; it removes most of what noise adds to the last.
          verbose: as in Keras.

        Returns:
          Itself.

        Raises:
          ValueError, TypeError: data that do not fit the description, or bad arguments; nothing was spent.
          BudgetExhaustedError: nothing is left; nothing was run.
        """
        codes = self.table.encode(data)
        layout = Layout.of(data, self.table)
        num = len(codes) if num_records is None else check.count("num_records", num_records, 1)
        steps = check.count("steps", steps, 1)
        if neighboring_relation is None:
            books = self.model.privacy_ledger if ledger is None else ledger
            neighboring_relation = getattr(books, "neighboring_relation", None) or "add_or_remove_one"
        optimizer = DPKerasAdamOptimizer(
            l2_norm_clip=l2_norm_clip,
            noise_multiplier=noise_multiplier,
            learning_rate=learning_rate,
            use_ema=True,
            ema_momentum=ema_momentum,
        )
        self.model.compile(
            optimizer,
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            neighboring_relation=check.relation(neighboring_relation),
            accountant=accountant,
        )
        # Shown as ten epochs where that divides the steps.
        epochs = math.gcd(steps, 10)
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

    def sample(self, num: int | None = None, *, seed: int | None = None) -> Any:
        """One synthetic table, from one draw of the posterior.

        Args:
          num: number of records, by default the public number that was learned from.
          seed: makes it repeatable. That costs no privacy: the model has been released.

        Returns:
          DataFrame or dict of arrays, as `fit` was given, with the same columns and dtypes.

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

    def sample_many(self, num_sets: int, num: int | None = None, *, seed: int | None = None) -> list[Any]:
        """Synthetic tables for multiple imputation, each from its own draw of the posterior: see `dpvi.synthetic.rubin`.

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
        """See `DPModel.privacy_report`."""
        return self.model.privacy_report(delta)
