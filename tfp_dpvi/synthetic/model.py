"""`TableModel`: the model behind `Synthesizer`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _random, serialization, surrogates
from tfp_dpvi._tf import (
    Optimizer,
    Structure,
    function_of_model,
    keras,
    register_keras_serializable,
    tf,
    tfd,
)
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.bayes.predictive import PosteriorPredictive, over_draws, posterior_draws
from tfp_dpvi.data import Records
from tfp_dpvi.data.schema import Layout, Schema
from tfp_dpvi.data.shapes import input_specs
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.models import exporting
from tfp_dpvi.models.base import DPModel
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan
from tfp_dpvi.synthetic.estimates import Estimates
from tfp_dpvi.synthetic.grouping import Merged, merged_categories
from tfp_dpvi.synthetic.mixture import Params, Segments, make_likelihood, starting_point
from tfp_dpvi.synthetic.pairs import NoisyPairs
from tfp_dpvi.synthetic.rules import Rule
from tfp_dpvi.training.budget import PrivacyTarget

_RATE = 0.1

# Mixtures of which `sample` draws from the mean: each start ends at another one.
_STARTS = 4


@dataclasses.dataclass(frozen=True, eq=False)
class _Parts:
    """The model's values in a plain object, so that Keras tracks only the surrogate's variables."""

    bayesian_model: BayesianModel
    surrogate: tfd.Distribution
    make_prior: Callable[[], tfd.Distribution]


@register_keras_serializable("tfp_dpvi", "TableModel")
class TableModel(DPModel):
    """A mixture model of coded records, whose surrogate posterior is fitted to noisy counts.

    It is a `DPModel` because it is saved in one `.keras` file with its ledger, which needs a Keras
    class, and for `DPModel`'s report and export. It has no private step: nothing is fitted to
    records, and it has no optimizer.

    Args:
      table: The schema with the model's levels; the name is that of saved files.
      prior: Function without arguments that returns the prior, as `make_prior` with its arguments.
      surrogate_posterior: A trainable distribution over the prior's parameters, or "mean_field".
      target: The column that synthetic records should predict, or None.
      rules: What synthetic records keep, see `Synthesizer`.
      layout: `Layout.to_config` of the fitted data, or None before a fit.
      released: `NoisyPairs.to_config` of the released counts, or None before a fit.
      probable: The mixture that `Synthesizer.sample` draws from, or None before a fit.
      seed: See `DPModel`.
    """

    num_predictive_draws = 200

    def __init__(
        self,
        table: Schema,
        prior: Callable[[], tfd.Distribution],
        surrogate_posterior: tfd.Distribution | str,
        *,
        target: str | None = None,
        rules: Sequence[Rule] = (),
        layout: dict[str, Any] | None = None,
        released: dict[str, Any] | None = None,
        probable: Params | None = None,
        seed: int | None = None,
    ) -> None:
        model = BayesianModel(prior(), make_likelihood(table))
        super().__init__(seed=seed, name="synthesizer", dtype=model.dtype.name)
        surrogate = surrogates.build(surrogate_posterior, model.prior, seed=seed)
        self._parts = _Parts(model, surrogate, prior)
        self._privacy_target: PrivacyTarget | None = None
        # The variables instead of the distribution, whose TFP caches weight files cannot save.
        self._surrogate_variables = list(surrogate.trainable_variables)
        self.seed = seed
        self.schema = table
        self.target = target
        self.rules = tuple(rules)
        self.layout = None if layout is None else Layout.from_config(layout)
        # Files of 0.3 and before have none.
        self.released = None if released is None else NoisyPairs.from_config(released, table)
        # Files of 0.5 and before have none.
        self.probable = None if probable is None else _checked(probable, table)
        self.built = True

    # ------------------------------------------------------------------ saving

    def get_config(self) -> dict[str, Any]:
        """Returns the public description and the ledger."""
        # The initial values are left out: loaded weights replace them.
        parts = {
            "table": self.schema,
            "rules": self.rules,
            "layout": None if self.layout is None else self.layout.to_config(),
            "released": None if self.released is None else self.released.to_config(),
            "probable": self.probable
            and {
                # As float64, whose text has three digits.
                name: part.astype(np.float64).round(3)
                for name, part in self.probable.items()
            },
            "prior": self._parts.make_prior,
            "surrogate_posterior": "mean_field",
        }
        return {
            **super().get_config(),
            "target": self.target,
            "parts": {name: serialization.encode(part, name) for name, part in parts.items()},
        }

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns the privacy target, JSON-ready; None before a fit."""
        target = self.privacy_target
        if target is None:
            return None
        return {
            "epsilon": target.epsilon,
            "delta": target.delta,
            "noise_multiplier": target.noise,
            "accountant": target.accountant,
            "neighboring_relation": target.neighboring_relation.name,
        }

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """The privacy settings of the `Synthesizer`, or None before a fit."""
        return self._privacy_target

    def set_privacy(self, target: PrivacyTarget, ledger: PrivacyLedger | None = None) -> None:
        """Sets the privacy settings, which other models take in `compile`.

        Args:
          target: The settings.
          ledger: The ledger of later releases; None keeps the one that the model has.

        Raises:
          ValueError: The model has releases in another ledger.
        """
        self.set_ledger(ledger)
        self._privacy_target = target

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Sets the privacy target from `get_compile_config`, or from that of a file of 0.2."""
        # In 0.2 the noise multiplier was that of an optimizer.
        noisy = config["optimizer"]["config"] if "optimizer" in config else config
        self.set_privacy(
            PrivacyTarget(
                epsilon=config["epsilon"],
                delta=config["delta"],
                noise=noisy["noise_multiplier"],
                accountant=config["accountant"],
                neighboring_relation=NeighboringRelation[config["neighboring_relation"]],
            )
        )

    # ------------------------------------------------------------------ learning

    def check_optimizer(self, optimizer: Optimizer) -> NoReturn:
        """Raises: the model learns from counts, without an optimizer."""
        raise ValueError(
            f"optimizer={type(optimizer).__name__}: a Synthesizer's model has none: call "
            "Synthesizer.fit. To learn by gradients, use\n"
            'DPVI(make_prior(schema, 24), make_likelihood(schema), clipping="flat").'
        )

    def describe(self, schema: Schema, layout: Layout, released: NoisyPairs) -> None:
        """Sets what a fit released about the columns.

        Args:
          schema: The schema with the chosen levels, of the same number as before.
          layout: The public layout of the data.
          released: The noisy counts.

        Raises:
          ValueError: The schema has other numbers of levels.
        """
        if Segments.of(schema).sizes != Segments.of(self.schema).sizes:
            raise ValueError("schema has other numbers of levels than the model's.")
        self.schema = schema
        self.layout = layout
        self.released = released

    def _most_probable(self, released: NoisyPairs, steps: int) -> Params:
        """Returns the mean of most probable mixtures from several starts, as one mixture.

        Draws from it are nearer to the table than those from the mean-field posterior, whose widths
        of rare levels' logits move the levels' shares.
        """
        num = self.prior.event_shape["weights"][0]
        seeds = np.random.default_rng(self.seed).integers(2**31, size=_STARTS)
        starts = [
            starting_point(self.schema, num, target=self.target, seed=int(seed)) for seed in seeds
        ]
        params = {
            name: tf.Variable(np.stack([start[name] for start in starts])) for name in starts[0]
        }

        def loss(step: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
            del step, key
            here = {name: tf.convert_to_tensor(value) for name, value in params.items()}
            return -tf.reduce_sum(self.prior.log_prob(here) + released.log_likelihood(here))

        _minimize(loss, list(params.values()), steps, None)
        weights = tf.nn.log_softmax(params["weights"]).numpy().ravel()
        levels = params["levels"].numpy().reshape([len(weights), -1])
        return {"weights": weights.round(3), "levels": levels.round(3)}

    def learn(self, released: NoisyPairs, plan: PrivacyPlan, *, steps: int, declared: bool) -> None:
        """Fits the surrogate to the posterior given released counts: post-processing, at no cost.

        Args:
          released: The noisy counts.
          plan: The plan of their release.
          steps: The number of steps of variational inference.
          declared: Whether the number of records was declared, or is that of the data.
        """
        surrogate = self.surrogate_posterior

        def loss(step: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
            seed = _random.tfp_seed(_random.fold_in(key, step))
            params, log_q = surrogate.experimental_sample_and_log_prob(seed=seed)
            return log_q - self.prior.log_prob(params) - released.log_likelihood(params)

        former, probable = self.get_weights(), self._most_probable(released, steps)
        try:
            _minimize(loss, self.trainable_variables, steps, self.seed)
        except BaseException:
            self.set_weights(former)
            raise
        self.probable = probable
        codes = np.zeros([1, released.pairs.segments.num_columns], np.int32)
        inputs = input_specs(Records(codes, None, None, 1))
        self.record_release(plan, inputs, released.num_records, declared=declared)

    # ------------------------------------------------------------------ the learned model

    @property
    def bayesian_model(self) -> BayesianModel:
        """The prior and the likelihood of one coded record."""
        return self._parts.bayesian_model

    @property
    def prior(self) -> tfd.Distribution:
        """The TFP prior."""
        return self.bayesian_model.prior

    @property
    def likelihood(self) -> Callable[..., tfd.Distribution]:
        """The likelihood of one coded record, a function of parameters."""
        return self.bayesian_model.likelihood

    @property
    def generative(self) -> bool:
        """True: the likelihood generates whole records."""
        return self.bayesian_model.generative

    @property
    def surrogate_posterior(self) -> tfd.Distribution:
        """The trainable distribution over the prior's parameters."""
        return self._parts.surrogate

    @property
    def posterior(self) -> tfd.Distribution:
        """The posterior given the noisy counts: the surrogate."""
        return self.surrogate_posterior

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `DPModel`."""
        sentences = [
            "the posterior includes the noise, but assumes independent parameters (mean field) and "
            "independent counts: for many columns its intervals are too narrow."
        ]
        few = [name for name, column in self.schema.columns.items() if getattr(column, "few", 0)]
        if few:
            sentences.append(
                f"the standard deviation of {', '.join(map(repr, few))} is that of a few records: "
                "about a hundred of them have much of the variance, which noisy counts do not tell."
            )
        sentences += [
            f"{merged.num} of the {merged.of} categories of {name!r}, with {merged.share:.0%} of "
            "the records, are merged: what tells them apart is lost."
            for name, merged in self.merged.items()
        ]
        if self.released is not None:
            sentences += Estimates(self.schema, self.released).far
        return tuple(sentences)

    @property
    def merged(self) -> dict[str, Merged]:
        """The categories that a fit merged, by column."""
        if self.released is None:
            return {}
        found = {
            name: merged_categories(column, self.released.column(place))
            for place, (name, column) in enumerate(self.schema.columns.items())
        }
        return {name: merged for name, merged in found.items() if merged is not None}

    def distribution_at(self, params: Structure, x: Structure | None = None) -> tfd.Distribution:
        """See `BayesianModel.distribution_at`."""
        return self.bayesian_model.distribution_at(params, x)

    def posterior_sample(self, num: int | None = None, *, seed: int | None = None) -> Structure:
        """Returns draws from the posterior: post-processing, at no cost.

        Args:
          num: The number of draws, by default `num_predictive_draws`.
          seed: Makes the draws repeatable.

        Returns:
          A structure like the prior's, with the draws in the first dimension.
        """
        return posterior_draws(self.posterior, num or self.num_predictive_draws, seed)

    def predictive(
        self, *, num_draws: int | None = None, seed: int | None = 0
    ) -> PosteriorPredictive:
        """Returns the posterior predictive distribution of one coded record.

        Args:
          num_draws: The number of posterior draws, by default `num_predictive_draws`.
          seed: The seed of these draws, fixed so that results repeat.
        """
        num = num_draws or self.num_predictive_draws
        return PosteriorPredictive(self.likelihood, self.posterior_sample(num, seed=seed), num)

    def sample_predictive(self, num: int, *, seed: int | None = None) -> np.ndarray:
        """Returns coded synthetic records, each from a posterior draw that is picked at random.

        So do exported functions. `Synthesizer.sample` draws from `probable` instead, which is
        nearer to the table.

        Args:
          num: The number of records.
          seed: Makes the records repeatable.

        Returns:
          int32 array of shape [num, columns], -1 for missing values.
        """
        keys = _random.split(tf.constant(_random.new_key(seed)), 2)
        predictive = self.predictive(seed=int(keys[0][0]))
        return predictive.sample(num, seed=_random.tfp_seed(keys[1])).numpy()

    def test_losses(self, x: Structure, y: Structure | None = None) -> tf.Tensor:
        """Returns negative log predictive densities of coded records.

        Args:
          x: Integer tensor of shape [n, columns].
          y: None: the model is of whole records.

        Returns:
          float32 tensor of shape [n].
        """
        del y
        draws = self.posterior_sample(seed=0)
        logs = over_draws(lambda params: self.bayesian_model.log_prob(params, x), draws)
        num = tf.cast(self.num_predictive_draws, logs.dtype)
        return tf.math.log(num) - tf.reduce_logsumexp(logs, axis=0)

    def call(self, inputs: Structure) -> NoReturn:
        """Raises: the model generates whole records and predicts nothing from them."""
        raise ValueError(
            "predict: this model generates whole records and predicts nothing from x. Use "
            "predictive() for the\ndistribution, or predictive().log_prob(codes) for scores."
        )

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `DPModel`."""
        return exporting.posterior_signatures(
            self.bayesian_model,
            inputs,
            posterior=lambda: self.posterior,
            predict=self.call,
            losses=self.test_losses,
            num_draws=self.num_predictive_draws,
        )


def _checked(probable: Params, table: Schema) -> Params:
    """Returns a mixture's parameters from a file as float32, if they are of these columns."""
    weights, levels = (np.asarray(probable[name], np.float32) for name in ("weights", "levels"))
    if levels.shape != (len(weights), sum(Segments.of(table).sizes)) or not (
        np.isfinite(levels).all() and np.isfinite(weights).all()
    ):
        raise ValueError(
            "The file's mixture is not that of its columns: it was altered. Use another copy."
        )
    return {"weights": weights, "levels": levels}


def _minimize(
    loss: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    variables: list[tf.Variable],
    steps: int,
    seed: int | None,
) -> None:
    """Minimizes a function of a step's number and a key, without records."""
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(_RATE, steps))
    optimizer.build(variables)

    def update(step: tf.Tensor, key: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            value = loss(step, key)
        gradients = zip(tape.gradient(value, variables), variables, strict=True)
        optimizer.apply_gradients(gradients, skip_gradients_aggregation=True)
        return step + 1, key

    # `tfp.vi.fit_surrogate_posterior` would trace the step twice.
    @function_of_model
    def run(key: tf.Tensor) -> None:
        tf.while_loop(
            lambda step, _: step < steps, update, (tf.constant(0), key), parallel_iterations=1
        )

    run(tf.constant(_random.new_key(seed)))
