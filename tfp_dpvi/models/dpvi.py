"""`DPVI`: a private posterior for any TFP prior and likelihood."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _random, serialization, surrogates
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Optimizer, Structure, register_keras_serializable, tf, tfp
from tfp_dpvi.bayes import checks, inference_data
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.divergence import DivergenceCheck
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.bayes.predictive import (
    PosteriorPredictive,
    mean_of,
    over_draws,
    over_draws_of_step,
    posterior_draws,
)
from tfp_dpvi.bayes.units import PERSONS_ASSUME
from tfp_dpvi.calibrated.centred_fit import LEAST_STEPS, NUM_STEPS, CentredFit
from tfp_dpvi.calibrated.posterior import Calibrated
from tfp_dpvi.calibrated.state import Calibration
from tfp_dpvi.calibrated.summary import PosteriorSummary, summarise
from tfp_dpvi.checking.declared import Columns
from tfp_dpvi.checking.free import CheckTable, free_rows, private_rows
from tfp_dpvi.checking.result import PrivateChecks
from tfp_dpvi.data import Records, make_records, make_units
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec, through_draws
from tfp_dpvi.models import arguments, base, checking, exporting, scored
from tfp_dpvi.models.checking import CheckSettings
from tfp_dpvi.optimizers import ScoringOptimizer, largest_move
from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan
from tfp_dpvi.training import Mechanism

tfd: Any = tfp.distributions
LOG = logging.getLogger("tfp_dpvi")
_SAVED = "posterior_"
_SAVED_CHECKS = "private_checks"
# In nats, and of epochs: what a converged fit still gains, and what shows it.
_MOST_FALL = 1.0
_LEAST_QUARTER = 5
# A batch size that includes every record.
_ALL = 2**62
# To price a private mean of log densities, in nats: their range when clipped, and the mean's error.
_LOO_RANGE = 10.0
_LOO_ERROR = 0.05


@register_keras_serializable("tfp_dpvi", "DPVI")
class DPVI(base.DPModel):
    """Differentially private variational inference: a posterior for any TFP prior and likelihood.

    The method is that of Jälkö, Dikmen and Honkela (2017), arXiv:1610.08749. It minimises
    `(1/N) [sum_i -E_q log p(record_i | params) + KL(q || prior)]` over the surrogate posterior q.
    The gradients of the records' terms are clipped, summed and released with noise; the KL term
    depends on no record and is added exactly.

    Args:
      prior: public TFP distribution over the parameters, joint or single, or a function without
        arguments that returns it (needed to save the model, see `dpvi.register`). Its float dtype
        is the model's.
      likelihood: `likelihood(params, x)` -> TFP distribution of `y`; or `likelihood(params)` -> TFP
        distribution of a whole record, for `fit(x)`. `params` is one draw of the prior's structure,
        `x` a batch of records; the distribution's `log_prob` of n records has shape [n].
      surrogate_posterior: "mean_field", "full_rank", "asvi", a trainable TFP distribution over the
        parameters, or a function of the prior that returns one.
      gradients: "aligned" (default) releases the records' clipped gradients in the parameters and
        pulls the noisy sum back to the surrogate's variables (Jälkö et al. 2022, arXiv:2210.15961);
        "vectorized" releases those in the variables, as in the 2017 paper. The guarantee is the
        same at the same clip and noise multiplier.
      clipping: "paired" (default) clips the difference of a record's gradient and that of a record
        simulated by the likelihood, which has mean zero at the true parameters for every clip; it
        gives a calibrated `posterior`. If it does not apply, `fit` warns and uses "flat", which
        clips the record's own gradient and biases the posterior.
      num_draws: Monte Carlo draws of the parameters in each step, shared by its records and
        averaged before the clip. More than one rules out `clipping="paired"`, and `fit` says so.
      num_predictive_draws: posterior draws in `predict`, `predictive` and `evaluate`.
      seed: see `DPModel`.
      name: name of the model.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> from tfp_dpvi._tf import tf, tfd
    >>> model = dpvi.DPVI(
    ...     tfd.Sample(tfd.Normal(0.0, 4.0), 2),
    ...     lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)),
    ...     num_predictive_draws=1000,
    ... )
    >>> model.compile("adam", l2_norm_clip=1.0, epsilon=1.0, delta=1e-5)
    >>> model.posterior.event_shape
    TensorShape([2])

    ```

    #### Formal guarantee

    As for `DPModel`. A record's term affects the released values only through the clipped sum.
    Norms and gradients use the same draws (contract 5), independent of the records given the
    released variables; a twin depends on its record's x alone.
    """

    def __init__(
        self,
        prior: tfd.Distribution | Callable[[], tfd.Distribution],
        likelihood: Callable[..., Any],
        surrogate_posterior: str
        | tfd.Distribution
        | Callable[..., tfd.Distribution] = "mean_field",
        *,
        gradients: str = "aligned",
        clipping: str = "paired",
        num_draws: int = 1,
        num_predictive_draws: int = 200,
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        arguments_of_init = {
            "prior": prior,
            "likelihood": likelihood,
            "surrogate_posterior": surrogate_posterior,
        }
        if not isinstance(prior, tfd.Distribution) and serialization.is_factory(prior):
            prior = prior()
        if not isinstance(prior, tfd.Distribution):
            raise TypeError(f"prior must be a TFP distribution, got {check.shown(prior)}.")
        if not callable(likelihood):
            raise TypeError(
                "likelihood must be a callable (params, x) -> TFP distribution, got "
                f"{check.shown(likelihood)}."
            )
        arguments.check_counts(
            num_draws=num_draws or 0, num_predictive_draws=num_predictive_draws or 0
        )
        check.one_of("gradients", gradients, ("aligned", "vectorized"))
        check.one_of("clipping", clipping, ("flat", "paired"))
        super().__init__(seed=seed, name=name, dtype=surrogates.float_dtype(prior).name)
        surrogate = surrogates.build(surrogate_posterior, prior, seed=seed)
        bayesian_model = BayesianModel(prior, likelihood)
        calibration = Calibration(bayesian_model, surrogate)
        centred = CentredFit(bayesian_model)
        self._model = ModelParts(bayesian_model, surrogate, calibration, centred, arguments_of_init)
        # The variables instead of the distribution, whose TFP caches weight files cannot save.
        self._surrogate_variables = list(surrogate.trainable_variables)
        self.gradients = gradients
        self.clipping = clipping
        self.num_draws = num_draws
        self.num_predictive_draws = num_predictive_draws
        self._public_inputs: Structure | None = None
        self._private_checks: PrivateChecks | None = None
        self.built = True

    @property
    def prior(self) -> tfd.Distribution:
        """The TFP prior."""
        return self._model.bayesian_model.prior

    @property
    def likelihood(self) -> Callable[..., Any]:
        """The likelihood callable."""
        return self._model.bayesian_model.likelihood

    @property
    def bayesian_model(self) -> BayesianModel:
        """Prior and likelihood, without surrogate, optimizer and ledger."""
        return self._model.bayesian_model

    @property
    def surrogate_posterior(self) -> tfd.Distribution:
        """The learned surrogate: a trainable TFP distribution over the prior's parameters.

        Scoring steps leave it as it was.
        """
        if self._scores and self.fit_releases is not None and not self.is_fitting:
            scored.warn_of_untrained("surrogate_posterior")
        return self._model.surrogate

    def get_config(self) -> dict[str, Any]:
        """See `DPModel.get_config`.

        Prior, likelihood and surrogate must be registered functions (`dpvi.register`).
        """
        parts = {
            name: serialization.encode(part, name) for name, part in self._model.arguments.items()
        }
        names = ("gradients", "clipping", "num_draws", "num_predictive_draws")
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names},
            "parts": parts,
        }

    @classmethod
    def complete_config(cls, config: dict[str, Any]) -> dict[str, Any]:
        """See `DPModel.complete_config`: files from before the paired clip have the flat one."""
        return {"clipping": "flat", **config}

    # ------------------------------------------------------------------ fit

    def default_optimizer(self, noise_multiplier: float | None) -> Optimizer:
        """See `Hooks.default_optimizer`: scoring steps, which choose their coordinates and clip."""
        scored.refuse_settings(self)
        return ScoringOptimizer(noise_multiplier)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """See `Hooks.check_optimizer`: scoring steps have no use for some settings."""
        if not isinstance(optimizer, ScoringOptimizer):
            super().check_optimizer(optimizer)
            return
        scored.refuse_settings(self)
        scored.warn_of_surrogate(self._model.arguments["surrogate_posterior"])

    @property
    def _scores(self) -> bool:
        """Returns whether the model learns by scoring steps."""
        return isinstance(getattr(self, "optimizer", None), ScoringOptimizer)

    @property
    def has_scored(self) -> bool:
        """Returns whether scoring steps are prepared for the last kind of records."""
        return self._model.centred.scoring is not None

    def fit(
        self,
        x: Structure | None = None,
        y: Structure | None = None,
        *,
        public_inputs: Structure | None = None,
        public_unit_ids: Identifiers = None,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps_per_epoch: int | None = None,
        num_records: int | None = None,
        checks: float | None = None,
        check_columns: Columns | None = None,
        **settings: Any,
    ) -> Any:
        """Trains on private records, see `DPModel.fit`.

        After `compile` without an optimizer there is nothing to choose: a fit makes 160 scoring
        steps over all records, unless `batch_size` or `epochs` are passed.

        Args:
          x: As for `DPModel.fit`.
          y: As for `DPModel.fit`.
          public_inputs: Public or invented records of x that resemble the private ones, for the
            coordinates of scoring steps; they hold for later fits too. Without them, standard
            normal ones are taken: with right ones the intervals are narrower.
          public_unit_ids: The person of each row of `public_inputs`, if `unit_ids` are passed:
            public persons should have as many rows as private ones. Without public inputs, 1 to m
            rows are taken, each number as often.
          batch_size: As for `DPModel.fit`.
          epochs: As for `DPModel.fit`.
          steps_per_epoch: As for `DPModel.fit`.
          num_records: As for `DPModel.fit`.
          checks: The share of the epsilon of `compile` for a private check of the fitted model,
            such as 0.1: it is charged before the fit, which takes what is left, and
            `private_checks` has the result. None for no check.
          check_columns: With `checks`, the `columns` of `check`.
          **settings: Other arguments of `DPModel.fit`.

        Returns:
          As `DPModel.fit`.
        """
        if public_inputs is not None and not self._scores:
            raise ValueError(
                "public_inputs are for scoring steps, of compile without an optimizer: leave "
                "them out, or pass them to dpvi.pilot."
            )
        if self._scores:
            num_replicas = self.distribute_strategy.num_replicas_in_sync
            scored.refuse_callbacks(settings.get("callbacks"), num_replicas)
            if settings.get("validation_data") is not None:
                raise ValueError(
                    "validation_data: the posterior of scoring steps exists after the fit: leave "
                    "it out, and call evaluate then."
                )
        is_open = batch_size is None and epochs is None and steps_per_epoch is None
        # A dataset has its own batches.
        if self._scores and is_open and not isinstance(x, tf.data.Dataset):
            batch_size = num_records or _ALL
            steps_per_epoch = NUM_STEPS
        self._public_inputs = self._public_persons(public_inputs, public_unit_ids, settings)
        planned = checking.plan_within_fit(
            self, x, y, checks, check_columns, num_records, settings, self.key_seed
        )
        self._private_checks = None
        with contextlib.ExitStack() as stack:
            release = None
            if planned is not None:
                release = stack.enter_context(checking.charged(self, planned))
            history = super().fit(
                x,
                y,
                batch_size=batch_size,
                epochs=1 if epochs is None else epochs,
                steps_per_epoch=steps_per_epoch,
                num_records=num_records,
                **settings,
            )
            if release is not None:
                self._private_checks = release(self._calibrated())
        self._warn_of_slow_convergence(history.history.get("loss", []))
        return history

    def check(
        self,
        x: Structure,
        y: Structure,
        *,
        epsilon: float,
        columns: Columns | None = None,
        score_range: Sequence[float] | None = None,
        level: float = 0.05,
        delta: float | None = None,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        unit_ids: Identifiers = None,
        max_rows_per_unit: int | None = None,
        rows_beyond: str = "random",
        validate: bool = True,
    ) -> PrivateChecks:
        """Releases private checks of the fitted model: one Gaussian release, with its tests.

        It releases a histogram of PIT values under the posterior predictive (of outcomes 0 and 1 a
        reliability curve), mean residuals by bins of declared columns, and the mean log score.
        `docs/guides/checks.md` says what each can see. `check_table` shows the checks that are
        free: read those first.

        Args:
          x: The private records of the fit, as arrays; or others of their own `ledger`.
          y: Their outcomes, one number a record, shape [N].
          epsilon: The cost of this release alone, which the ledger adds to the others.
          columns: Columns of x and the public edges of bins, `{"age": [30, 50, 70]}`: by the
            key of a dict, or the number of a column of an array. Each makes all noise larger:
            declare one or two. Other columns as `dpvi.checking.Bins`.
          score_range: The public range, in nats, that log scores are clipped to: by default (-10,
            0) for discrete outcomes, and 8 nats below to 4 above what the fit expects for others.
          level: The probability that any test fails although the model is right, at most.
          delta: By default that of `compile`.
          ledger: By default the model's. Another one says that the records are not those of the
            fit, for instance held-out ones.
          num_records: The public number of records; by default that which `fit` declared, or the
            exact one.
          unit_ids: As in `fit`: a person then counts once, with the mean of the person's rows.
          max_rows_per_unit: As in `fit`.
          rows_beyond: As in `fit`.
          validate: As in `fit`.

        Returns:
          The released values with tests, a verdict in words and a picture; `private_checks` keeps
          it.

        Raises:
          RuntimeError: The model is not fitted.
          ValueError, TypeError, BudgetExhaustedError, UnsupportedPairError: As in `fit`; no privacy
            was spent.

        #### Formal guarantee

        A record contributes one vector, of l2 norm at most A whatever it holds; A follows from the
        number of bins. Their sum gets noise of standard deviation z A, and the ledger is charged
        ahead (contract 6). A contribution depends on released values, public arguments and its own
        record (or person) alone.
        """
        checking.refuse_before_fit(self)
        subjects = checking.subjects_of(
            self,
            x,
            y,
            seed=self.key_seed,
            unit_ids=unit_ids,
            max_rows_per_unit=max_rows_per_unit,
            rows_beyond=rows_beyond,
            validate=validate,
        )
        self.as_inputs(tf.nest.map_structure(lambda part: part[:1], subjects.x))
        planned = checking.plan_check(
            self,
            CheckSettings(columns, score_range, level),
            subjects,
            posterior=self.posterior,
            epsilon=epsilon,
            delta=delta,
            ledger=ledger,
            num_records=num_records,
            seed=self.key_seed,
        )
        with checking.charged(self, planned) as release:
            checks = self._private_checks = release(self._calibrated())
        checking.warn_of_total(self, planned.ledger)
        return checks

    @property
    def private_checks(self) -> PrivateChecks | None:
        """The last private checks of this fit, of `check` or `fit(checks=)`; None without any."""
        return self._private_checks

    def check_table(self) -> CheckTable:
        """Returns all checks in one table, those of released values before those of `check`.

        It costs no privacy.
        """
        calibrated = self._calibrated()
        free = free_rows(None if calibrated is None else calibrated.checks)
        return CheckTable((*free, *private_rows(self._private_checks)))

    def _public_persons(
        self,
        public_inputs: Structure | None,
        public_unit_ids: Identifiers,
        settings: dict[str, Any],
    ) -> Structure | None:
        """Returns public inputs as `fit` takes the private ones: of persons, or of rows."""
        persons = settings.get("unit_ids") is not None
        if persons and public_inputs is not None and public_unit_ids is None:
            raise ValueError(
                "public_unit_ids is missing: with unit_ids, pass the person of each row of "
                "public_inputs, whose numbers of rows set the coordinates."
            )
        if public_unit_ids is None:
            return public_inputs
        if public_inputs is None or not persons:
            raise ValueError(
                "public_unit_ids need public_inputs, and unit_ids for x: pass all three or leave "
                "it out."
            )
        rows = make_records(public_inputs, None, None, dtype=self.record_dtype, validate=True)
        units = make_units(
            public_unit_ids,
            rows.num,
            settings.get("max_rows_per_unit"),
            settings.get("rows_beyond", "random"),
            seed=0,
            name="public_unit_ids",
        )
        return units.group_inputs(rows.x)

    def _warn_of_slow_convergence(self, losses: Sequence[float]) -> None:
        """Warns, after a fit without noise, if the sum of all records' losses was still falling."""
        num_records = self.privacy_account.num_records
        quarter = len(losses) // 4
        if num_records is None or quarter < _LEAST_QUARTER:
            return
        fell, error = checks.fall(np.asarray(losses[-quarter:]) * num_records)
        if fell > max(_MOST_FALL, 3.0 * error):
            LOG.warning(
                "The fit has not converged: over its last %d epochs the total loss of %d records "
                "fell by %.3g nats. Take more epochs, or a higher learning rate.",
                quarter,
                num_records,
                fell,
            )

    def learned_variables(self) -> Sequence[tf.Variable]:
        """See `Hooks.learned_variables`."""
        scoring = self._model.centred.scoring
        return [scoring.theta] if self._scores and scoring else super().learned_variables()

    def boundaries(self, num_steps: int) -> Sequence[int]:
        """See `Hooks.boundaries`."""
        scoring = self._model.centred.scoring
        return scoring.boundaries(num_steps) if self._scores and scoring else ()

    def advance(
        self, step: int, num_steps: int, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> None:
        """See `Hooks.advance`."""
        scoring = self._model.centred.scoring
        if scoring is not None:
            scoring.advance(step, num_steps, accumulated, mechanism)

    # ------------------------------------------------------------------ the step

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """See `Hooks.clipped_gradient`: of the evidence bound, at draws that a step shares."""
        scoring = self._model.centred.scoring
        if self._scores and scoring is not None:
            return scoring.gradient(spec)
        pairing = self.calibration.pairing_for(self.clip) if self.clipping == "paired" else None
        if pairing is not None:
            return pairing.gradient(
                spec, self.surrogate_posterior, self.trainable_variables, self.clip
            )
        variables, clip = self.trainable_variables, self.clip
        surrogate, model = self.surrogate_posterior, self.bayesian_model
        aligned, num_draws = self.gradients == "aligned", self.num_draws
        together = num_draws > 1 and self._model.draws_together

        def draw(key: tf.Tensor) -> StepGradient:
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as outer:
                outer.watch(variables)
                draws, log_q = surrogates.draws_and_log_probs(
                    surrogate, num_draws, key, together=together
                )
                divergence = (
                    tf.reduce_mean(log_q - over_draws_of_step(model.prior.log_prob, draws))
                    / spec.num_records
                )
            exact = outer.gradient(divergence, variables, unconnected_gradients="zero")

            def record_loss(record: dict[str, tf.Tensor]) -> tf.Tensor:
                def log_prob(params: Structure) -> tf.Tensor:
                    return model.record_log_prob(params, record)

                loss = -tf.reduce_mean(over_draws_of_step(log_prob, draws))
                return loss * record["sample_weight"] if "sample_weight" in record else loss

            parts = tf.nest.flatten(draws)
            terms = {"data_independent": exact, "data_independent_loss": divergence}
            return through_draws(
                record_loss, parts, outer, variables, clip, aligned=aligned, **terms
            )

        return ClippedGradient(draw, clip, identity=(aligned, num_draws))

    def distribution_at(self, params: Structure, x: Structure | None) -> tfd.Distribution:
        """Returns the likelihood's distribution at parameters: see `BayesianModel.distribution_at`.

        Args:
          params: One value of the prior's structure.
          x: A batch of records, or None for a model of whole records.
        """
        return self.bayesian_model.distribution_at(params, x)

    def check_records(self, records: Records) -> None:
        """See `Hooks.check_records`: traces the likelihood on the records' shapes."""
        if self.generative and records.person is not None:
            raise ValueError(
                "unit_ids with a model of whole records: a person's rows are modelled by "
                "likelihood(params, x), and fit(x, y)."
            )
        if self.generative and records.y is not None:
            raise ValueError(
                "y was passed, but the likelihood takes only (params), for whole records: call "
                "fit(x)."
            )
        if not self.generative and records.y is None:
            raise ValueError(
                "y is missing: the likelihood takes (params, x) and returns a distribution of y. "
                "Call fit(x, y), or define "
                "likelihood(params), a distribution of whole records, for fit(x)."
            )
        checks.check_no_locals(self.prior, records)
        checks.check_units(self.bayesian_model, records)
        checks.check_likelihood(self.bayesian_model, records)
        if self._scores:
            inputs = scored.inputs_for(self, self._public_inputs, records)
            self._model.centred.prepare(records, inputs)
            scored.note_inputs(self, self._public_inputs, inputs)
        elif self.clipping == "paired":
            self.calibration.prepare(records, self.gradients, self.num_draws)

    def drop_predictions(self) -> None:
        """See `DPModel`: they hold the calibrated posterior."""
        self.predict_function = self.test_function = None

    def load_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Loads weights as Keras does.

        The calibrated posterior belongs to other weights, and goes. A `.weights.h5` file has its
        own.

        Args:
          filepath: A file or checkpoint that `save_weights` wrote.
          *args: As in Keras.
          **kwargs: As in Keras.
        """
        if not str(filepath).endswith((".weights.h5", ".keras")):
            self._replace_posterior({})
        return super().load_weights(filepath, *args, **kwargs)

    def fault_of_variables(self, thorough: bool) -> str | None:
        """See `DPModel`; a surrogate much wider than the prior also counts as diverged."""
        fault = super().fault_of_variables(thorough)
        checks_surrogate = thorough and not self._scores
        return self._model.divergence_check.fault() if checks_surrogate and fault is None else fault

    def check_labels(self, records: Records) -> None:
        """See `Hooks.check_labels`: outcomes outside the support, as far as TFP detects them."""
        checks.check_labels(self.bayesian_model, records)

    # ------------------------------------------------------------------ the learned model

    @property
    def takes_persons(self) -> bool:
        """See `Hooks.takes_persons`."""
        return True

    @property
    def simulates_outcomes(self) -> bool:
        """True if a step draws outcomes of a record given its x, as twins are."""
        return self._scores or self.clipping == "paired"

    @property
    def takes_max_weight(self) -> bool:
        """True if weights have a public bound, so that intervals are calibrated with them."""
        return self._scores

    @property
    def generative(self) -> bool:
        """True if the likelihood generates whole records, `likelihood(params)`."""
        return self.bayesian_model.generative

    @property
    def posterior(self) -> tfd.Distribution:
        """The posterior over the prior's structure.

        After a fit with the paired clip it is the calibrated one, and else the surrogate; with
        scoring steps, which leave the surrogate as it was, the prior. The calibrated one includes
        the noise in its spread, and the clip does not bias its mean. It costs no privacy.
        """
        calibrated = self._calibrated()
        if calibrated is not None:
            return calibrated.distribution
        if not self._scores:
            return self._model.surrogate
        scored.warn_of_untrained("posterior")
        return self.prior

    @property
    def calibration(self) -> Calibration:
        """The state of the paired clip."""
        return self._model.calibration

    def before_fit(self, num_steps: int) -> None:
        """Warns of a prior far wider than this fit can move a parameter."""
        if self._scores and num_steps < LEAST_STEPS:
            raise ValueError(
                f"epochs: {num_steps} steps are too few for scoring steps, which need "
                f"{LEAST_STEPS}: leave batch_size and epochs out, or pass more epochs."
            )
        if self._scores:
            self._model.centred.begin()
        elif self.clipping == "paired":
            self.calibration.begin(largest_move(self.optimizer, num_steps))

    def after_fit(self) -> None:
        """Computes the posterior here, instead of in the graph of the first prediction."""
        self._calibrated()

    def _calibrated(self) -> Calibrated | None:
        if self.is_fitting:  # A fit that will replace the posterior.
            return None
        released = self.fit_releases
        if released is None:
            return self.calibration.loaded
        if "lack_of_fit" in released.accumulated:
            return self._model.centred.posterior(released.accumulated, released.mechanism)
        return self.calibration.posterior(released.accumulated, released.mechanism)

    def posterior_summary(self, *, num_draws: int = 4000, seed: int = 0) -> PosteriorSummary:
        """Returns a table of `posterior`.

        It has means, standard deviations, quantiles, and for a calibrated posterior the shares of
        noise, data and prior in each variance.

        Args:
          num_draws: The number of draws that the table is computed from.
          seed: Their seed.
        """
        draws = posterior_draws(self.posterior, num_draws, seed)
        account = self.privacy_account
        fitted = account.plan is not None or account.progress.steps > 0
        calibrated = self._calibrated()
        log_scales = calibrated is not None and calibrated.log_scales
        coordinates = Coordinates(self.prior, log_scales=log_scales)
        return summarise(draws, coordinates, calibrated, fitted)

    def released_logs(
        self, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> dict[str, float]:
        """See `DPModel`."""
        return {} if self._scores else self.calibration.logs(accumulated, mechanism)

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Saves the surrogate's variables, as Keras does, and the calibrated posterior."""
        super().save_own_variables(store)
        calibrated = self._calibrated()
        for name, array in ({} if calibrated is None else calibrated.to_arrays()).items():
            store[_SAVED + name] = array
        if self._private_checks is not None:
            text = json.dumps(self._private_checks.to_dict())
            store[_SAVED_CHECKS] = np.frombuffer(text.encode(), np.uint8)

    def load_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Loads the variables of `save_own_variables`."""
        # An HDF5 group iterates over nothing else.
        arrays = {name: np.array(store[name]) for name in store.keys()}  # noqa: SIM118
        saved = {
            name.removeprefix(_SAVED): arrays.pop(name)
            for name in [*arrays]
            if name.startswith(_SAVED)
        }
        text = arrays.pop(_SAVED_CHECKS, None)
        super().load_own_variables(arrays)
        self._replace_posterior(saved)
        if text is not None:
            self._private_checks = PrivateChecks.from_dict(json.loads(text.tobytes()))

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Sets the weights.

        Outside a fit it also drops the calibrated posterior, which belongs to other weights, and
        the next scoring steps start where the first did.
        """
        super().set_weights(weights)
        if not self.is_fitting:
            self._replace_posterior({})

    def _replace_posterior(self, arrays: dict[str, np.ndarray]) -> None:
        """Replaces the last fit's posterior by one from `Calibrated.to_arrays`, or by none."""
        self.forget_releases()
        self._private_checks = None
        self.predict_function = self.test_function = None
        self.calibration.load(arrays)
        self._model.centred.start_anew()

    @property
    def weight_groups(self) -> dict[str, Sequence[tf.Variable]]:
        """See `DPModel`."""
        return {"surrogate_posterior": self.trainable_variables}

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `DPModel`."""
        plan = self.privacy_plan
        persons = plan is not None and plan.person is not None and plan.person.max_rows > 1
        return (*((PERSONS_ASSUME,) if persons else ()), *self._caveats_of_posterior())

    def _caveats_of_posterior(self) -> tuple[str, ...]:
        calibrated = self._calibrated()
        if calibrated is not None:
            warnings = (
                f"do not trust the posterior's intervals: {sentence}."
                for sentence in calibrated.checks.warnings
            )
            notes = (f"{note}." for note in calibrated.checks.notes)
            return (*warnings, *notes)
        return (
            "the posterior's spread includes neither the noise that was added for privacy nor the "
            "bias of clipping, and at small budgets the records inform it little: its intervals "
            "are not calibrated.",
        )

    def posterior_sample(self, num: int | None = None, *, seed: int | None = None) -> Structure:
        """Returns draws from `posterior`: post-processing, at no cost.

        Args:
          num: The number of draws, by default `num_predictive_draws`.
          seed: Makes the draws repeatable.

        Returns:
          The prior's structure, with the draws in the first dimension.
        """
        return posterior_draws(self.posterior, num or self.num_predictive_draws, seed)

    def predictive(
        self, x: Structure | None = None, *, num_draws: int | None = None, seed: int | None = 0
    ) -> PosteriorPredictive:
        """Returns the posterior predictive distribution for new records, or of a whole record.

        Args:
          x: n new records, or None for a model of whole records.
          num_draws: The number of posterior draws, by default `num_predictive_draws`.
          seed: Seed of the draws; fixed by default, so that predictions repeat.

        Returns:
          A TFP mixture over the draws with batch shape [n], or that of one record. It depends on
          released values and `x` alone.

        Raises:
          ValueError: `x` for a model of whole records, or none for another.
        """
        inputs = self._inputs_of(x)
        num = num_draws or self.num_predictive_draws
        draws = posterior_draws(self.posterior, num, seed)
        return PosteriorPredictive(lambda params: self.distribution_at(params, inputs), draws, num)

    def _inputs_of(self, x: Structure | None) -> Structure | None:
        """Returns new records as tensors, or None for a model of whole records."""
        if (x is None) != self.generative:
            raise ValueError(
                "x was passed, but this model generates whole records: leave it out."
                if self.generative
                else "x is missing: this model predicts y from x. Pass records, as in "
                "predictive(x), for instance public ones."
            )
        return None if x is None else self.as_inputs(x)

    def prior_predictive(
        self, x: Structure | None = None, num: int = 500, *, seed: int | None = 0
    ) -> Structure:
        """Returns draws from the prior predictive distribution, to check the prior before `fit`.

        Args:
          x: n public records, or None for a model of whole records.
          num: The number of draws, each with its own parameters.
          seed: Seed of the draws.

        Returns:
          Array of shape [num, n, ...] ([num, ...] for one whole record each), or a structure of
          arrays like the likelihood's events.
        """
        arguments.check_counts(num=num or 0)
        inputs = self._inputs_of(x)
        draws = posterior_draws(self.prior, num, seed)
        return inference_data.outcomes(self.bayesian_model, draws, num, inputs, seed)

    def to_inference_data(
        self,
        x_public: Structure | None = None,
        y_public: Structure | None = None,
        *,
        unsafe_records: tuple[Structure, ...] | None = None,
        num_draws: int = 1000,
        seed: int = 0,
    ) -> inference_data.InferenceData:
        """Returns the posterior for ArviZ (extra `arviz`).

        It is an `InferenceData`, or of ArviZ 1 an `xarray.DataTree`.

        It serves summaries, plots and model comparison. Its groups are posterior, prior,
        posterior_predictive and prior_predictive (for `x_public`, or whole records); with public
        outcomes also observed_data and log_likelihood, for `az.plot_ppc` and `az.loo`. Draws are
        independent, in four chains.

        Args:
          x_public: records that you declare public, or synthetic inputs.
          y_public: their outcomes, which you declare public; a model of whole records takes only
            `x_public`.
          unsafe_records: private records, (x, y) or (x,), whose exact log-likelihoods become the
            group log_likelihood. They are *not private*, and the ledger records it.
          num_draws: number of draws from each of prior and posterior.
          seed: seed of the draws.

        #### Formal guarantee

        Without `unsafe_records`, a function of released values and of records declared public, at
        no further cost.
        """
        model = self.bayesian_model
        inference_data.import_arviz()  # Raises before the ledger records an exposure.
        inference_data.check_public(model, x_public, y_public, unsafe_records)
        inputs = None if self.generative or x_public is None else self._inputs_of(x_public)
        if unsafe_records is not None:
            self.privacy_ledger.record_exposure(
                "exact log-likelihoods of private records were shown "
                "(to_inference_data, unsafe_records)."
            )
        return inference_data.to_inference_data(
            model, self.posterior, inputs, x_public, y_public, unsafe_records, num_draws, seed
        )

    def loo(
        self, x_public: Structure | None = None, y_public: Structure | None = None, **settings: Any
    ) -> Any:
        """Returns ArviZ's PSIS-LOO (`az.loo`) of public records, which must be among the fit's.

        Args:
          x_public: As in `to_inference_data`.
          y_public: As in `to_inference_data`.
          **settings: Other arguments of `to_inference_data`.

        Raises:
          ValueError: No public records; the message says what private ones would cost.
        """
        observed = x_public if self.generative else y_public
        if observed is None and "unsafe_records" not in settings:
            num, delta = self.privacy_account.num_records or 1000, self.privacy_delta or 1e-5
            public = "x_public" if self.generative else "x_public, y_public"
            price = PrivacyPlan(FullBatch(), _LOO_ERROR * num / _LOO_RANGE, 1).epsilon(delta)
            raise ValueError(
                "loo: PSIS-LOO shows exact log densities of records, which no epsilon covers: pass "
                f"public ones, loo({public}).\nOnly the mean of {num} private ones, clipped to a "
                f"range of {_LOO_RANGE:g} nats, with a standard error of {_LOO_ERROR:g}, would "
                f"cost epsilon {price:.2g} at delta {delta:g}."
            )
        data = self.to_inference_data(x_public, y_public, **settings)
        return inference_data.import_arviz().loo(data)

    def sample_predictive(self, num: int, *, seed: int | None = None) -> Structure:
        """Returns synthetic records of a generative model: post-processing, at no further cost.

        Each record uses one of `num_predictive_draws` posterior draws, picked at random.

        Args:
          num: The number of records.
          seed: Makes the draws repeatable.

        Returns:
          Array of shape [num, ...], or a structure of arrays.

        Raises:
          ValueError: The model predicts y from x.
        """
        arguments.check_counts(num=num or 0)
        if not self.generative:
            raise ValueError(
                "sample_predictive: this model predicts y from x and generates no whole records. "
                "Use predictive(x).sample() for outcomes, or define likelihood(params), a "
                "distribution of whole records."
            )
        keys = _random.split(tf.constant(_random.new_key(seed)), 2)
        drawn = self.predictive(seed=int(keys[0][0])).sample(num, seed=_random.tfp_seed(keys[1]))
        return tf.nest.map_structure(lambda part: part.numpy(), drawn)

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

    def call(self, inputs: Structure, training: bool | None = None) -> tf.Tensor:
        """Returns the posterior predictive mean of a batch of records.

        Args:
          inputs: n records.
          training: As in Keras; changes nothing.

        Returns:
          Tensor of shape [n, ...]; class probabilities for categorical likelihoods.
        """
        del training
        if self.generative:
            raise ValueError(
                "predict: this model generates whole records and predicts nothing from x. Use "
                "predictive() for the distribution, or predictive().log_prob(x) for scores."
            )
        draws = posterior_draws(self.posterior, self.num_predictive_draws, 0)
        means = over_draws(lambda params: mean_of(self.distribution_at(params, inputs)), draws)
        return tf.reduce_mean(means, axis=0)

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """See `Hooks.test_losses`: negative log predictive densities."""
        draws = posterior_draws(self.posterior, self.num_predictive_draws, 0)
        logs = over_draws(lambda params: self.bayesian_model.log_prob(params, x, y), draws)
        return tf.math.log(tf.cast(self.num_predictive_draws, logs.dtype)) - tf.reduce_logsumexp(
            logs, axis=0
        )


@dataclasses.dataclass(eq=False)
class ModelParts:
    """Bayesian model and surrogate, hidden from Keras, which tracks only variables."""

    bayesian_model: BayesianModel
    surrogate: tfd.Distribution
    calibration: Calibration
    centred: CentredFit
    arguments: dict[str, Any]  # Of the constructor.

    @functools.cached_property
    def draws_together(self) -> bool:
        """Returns whether the surrogate draws several values at once."""
        return surrogates.draws_together(self.surrogate)

    @functools.cached_property
    def divergence_check(self) -> DivergenceCheck:
        """The check of whether the surrogate has diverged."""
        return DivergenceCheck(self.bayesian_model.prior, self.surrogate)
