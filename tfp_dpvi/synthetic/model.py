"""`TableModel`: the model behind `Synthesizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _random, serialization
from tfp_dpvi._tf import function_of_model, keras, register_keras_serializable, tf, tfd
from tfp_dpvi.data import Records
from tfp_dpvi.data.schema import Layout, Table
from tfp_dpvi.data.shapes import input_specs
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyPlan, plan_counts
from tfp_dpvi.privacy.budgets import EpsilonBudget
from tfp_dpvi.privacy.plan import compose
from tfp_dpvi.synthetic.mixture import Segments, make_likelihood
from tfp_dpvi.synthetic.pairs import NoisyPairs

_RATE = 0.1


@register_keras_serializable("tfp_dpvi", "TableModel")
class TableModel(DPVI):
    """A `DPVI` of a table's coded records, whose surrogate is fitted to noisy counts."""

    def __init__(
        self,
        table: Table,
        prior: tfd.Distribution | Callable[[], tfd.Distribution],
        surrogate_posterior: tfd.Distribution | str,
        *,
        target: str | None = None,
        layout: dict[str, Any] | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(
            prior,
            make_likelihood(table),
            surrogate_posterior,
            clipping="flat",
            seed=seed,
            name="synthesizer",
        )
        self._segments = Segments.of(table)
        self.table, self.target = table, target  # With the model's levels.
        self.layout = (
            None if layout is None else Layout.from_config(layout)
        )  # Of synthetic tables, after a fit.

    def get_config(self) -> dict[str, Any]:
        """Returns the public description and the ledger."""
        # The initial values are left out: loaded weights replace them.
        parts = {
            "table": self.table,
            "layout": None if self.layout is None else self.layout.to_config(),
            "prior": self._model.arguments["prior"],
            "surrogate_posterior": "mean_field",
        }
        return {
            **super(DPVI, self).get_config(),
            "target": self.target,
            "parts": {name: serialization.encode(part, name) for name, part in parts.items()},
        }

    def describe(self, table: Table, layout: Layout) -> None:
        """Sets the released levels, of the same number as before, and the public layout."""
        assert Segments.of(table).sizes == self._segments.sizes
        self.table, self.layout = table, layout

    def plans(
        self, releases: Sequence[tuple[str, float, float]], num_records: int
    ) -> list[PrivacyPlan]:
        """Returns the plans of releases (purpose, norm, share of the budget), in addition to all that is in the ledger."""
        target, ledger = self.privacy_target, self.privacy_ledger
        assert target is not None
        plans = plan_counts(
            releases,
            noise=target.noise,
            epsilon=target.epsilon,
            delta=target.delta,
            prior_events=ledger.events(),
            neighboring_relation=target.neighboring_relation,
            accountant=target.accountant,
            num_records=num_records,
        )
        if (
            ledger.budget is not None and ledger.renyi_filter is None and len(plans) > 1
        ):  # Before the first is charged.
            budget = EpsilonBudget(*ledger.budget)
            every = compose(
                [*ledger.events(), *(plan.dp_event for plan in plans[:-1])], plans[-1].dp_event
            )
            if not budget.allows(every, target.neighboring_relation):
                raise BudgetExhaustedError(
                    f"{budget}, the ledger's own, does not allow this fit: lower epsilon."
                )
        secure = self._dp.seed is None  # See `release`.
        return [plan.replace(randomness="secure" if secure else "") for plan in plans]

    def release(self, counts: np.ndarray, plan: PrivacyPlan, number: int) -> np.ndarray:
        """Reserves a fit's release of this number (contract C6), and returns counts of any shape with noise."""
        state = self._dp
        assert state.target is not None
        key = _random.noise_key(counts.size, state.seed, number)
        with state.account.ledger.reserved(
            plan, seeded=state.seed is not None, budgets=state.target.budgets
        ):
            exact = tf.constant(counts, tf.float64)
            (noisy,) = _random.add_noise(key, [exact], [plan.deviation])
            return noisy.numpy()

    def learn(self, released: NoisyPairs, plan: PrivacyPlan, *, steps: int, declared: bool) -> None:
        """Fits the surrogate to the posterior given released counts: post-processing, at no cost."""
        state = self._dp
        optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(_RATE, steps))
        surrogate, variables = self.surrogate_posterior, self.trainable_variables
        optimizer.build(variables)

        def one(step: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                seed = _random.tfp_seed(_random.fold_in(key, step))
                params, log_q = surrogate.experimental_sample_and_log_prob(seed=seed)
                loss = log_q - self.prior.log_prob(params) - released.log_likelihood(params)
            optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return step + 1, key

        @function_of_model
        def run(
            key: tf.Tensor,
        ) -> None:  # `tfp.vi.fit_surrogate_posterior` would trace the step twice.
            tf.while_loop(
                lambda step, _: step < steps, one, (tf.constant(0), key), parallel_iterations=1
            )

        run(tf.constant(_random.new_key(state.seed)))
        account = state.account
        account.plan = plan
        account.num_records = released.num_records
        account.num_records_declared = declared
        account.inputs = input_specs(
            Records(np.zeros([1, self._segments.num_columns], np.int32), None, None, 1)
        )
        self.predict_function = self.test_function = None

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `DPModel`."""
        return (
            "the posterior includes the noise, but assumes independent parameters (mean field) and independent counts: for many "
            "columns its intervals are too narrow.",
        )
