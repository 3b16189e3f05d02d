"""`DPVAE`: private variational autoencoders of Keras layers and TFP distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tfp_dpvi import _random, serialization, surrogates
from tfp_dpvi._tf import refuse_keras_3, register_keras_serializable, tf, tfp
from tfp_dpvi.divergences import Codes
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import (
    ClippedSum,
    Pass,
    RecordStatistics,
    groups,
    layers_of,
    refuse_mixing,
)
from tfp_dpvi.models import base, exporting, planning
from tfp_dpvi.models.layer_trial import LayerTrial
from tfp_dpvi.models.loop import StepGradients
from tfp_dpvi.models.predictive import mean_of
from tfp_dpvi.models.records import Records, make_records
from tfp_dpvi.optimizers import TermwiseOptimizer
from tfp_dpvi.privacy import SamplingScheme, Sensitivity

tfd = tfp.distributions

_TRIED = 3  # Records made up to try a model on; not 1, which would hide a shape that broadcasts.


@register_keras_serializable("tfp_dpvi", "DPVAE")
class DPVAE(base.DPModel):
    """A variational autoencoder with a latent draw for each record, learned under differential privacy.

    Minimises the mean over records of `-E_q log p(x | z) + beta KL(q(z | x) || prior)`. A record's whole term is clipped, as
    its latent variable is its own; draws and posteriors of records are never released, the two networks' weights are.

    ```python
    encoder = dpvi.keras.Sequential([..., dpvi.keras.layers.Dense(2 * d),
        tfp.layers.DistributionLambda(lambda t: tfd.MultivariateNormalDiag(t[..., :d], tf.nn.softplus(t[..., d:])))])
    decoder = dpvi.keras.Sequential([..., tfp.layers.IndependentBernoulli([28, 28])])
    prior = tfd.MultivariateNormalDiag(tf.zeros(d), tf.ones(d))
    model = dpvi.DPVAE(encoder, decoder, prior)
    ```

    Args:
      encoder: Keras model, layer, or function of such, `x -> TFP distribution` with batch shape [n] and the prior's event
        shape, reparameterised. To save the model, a registered function without arguments that builds it; see
        `dpvi.register`. The same holds for `decoder` and `prior`.
      decoder: likewise `z -> TFP distribution` of records: `log_prob(x)` has shape [n] for z of shape [n, ...].
      prior: TFP distribution of one record's latent variable, without trainable variables.
      beta: weight of the KL term (Higgins et al. 2017).
      num_draws: latent draws for each record and step; its loss is averaged over them before the clip.
      batch_regularizer: `Codes -> scalar`, a term of each random group of records, such as those of
        `tfp_dpvi.divergences`; needs a `TermwiseDPKeras` optimizer.
      regularizer_weight: what the term is multiplied by.
      num_prior_samples: draws from the prior that the regularizer is given, default the expected size of a group.
      gradients: "ghost" has norms and sums from layers' inputs and output gradients, "vectorized" holds every record's
        gradient; "auto" is "ghost". The same figures, to rounding.
      kl: "analytic", "monte_carlo" (at the same draws), or "auto", the first where TFP has it.
      seed: see `DPModel`.
      name: name of the model.

    Raises:
      ValueError, TypeError: an argument that does not fit; the message says what to do.

    #### Formal guarantee

    That of `DPModel`, if a record's loss depends on no other record. Layers that mix records are refused where they are
    known, and every model is tried on made-up records against TensorFlow's own gradients before anything is spent.
    """

    def __init__(
        self,
        encoder: Any,
        decoder: Any,
        prior: Any,
        *,
        beta: float = 1.0,
        num_draws: int = 1,
        batch_regularizer: Callable[[Codes], Any] | None = None,
        regularizer_weight: float = 1.0,
        num_prior_samples: int | None = None,
        gradients: str = "auto",
        kl: str = "auto",
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        given = {"encoder": encoder, "decoder": decoder, "prior": prior, "batch_regularizer": batch_regularizer}
        encoder, decoder, prior = (
            part() if serialization.is_factory(part) else part for part in (encoder, decoder, prior)
        )
        if not isinstance(prior, tfd.Distribution):
            raise TypeError(
                f"prior must be a TFP distribution, got {prior!r}; for instance tfd.MultivariateNormalDiag(tf.zeros(d), "
                "tf.ones(d))."
            )
        if prior.trainable_variables:
            raise ValueError(
                f"prior has trainable variables ({prior.trainable_variables[0].name}): they would be learned past the clip. "
                "Use a fixed prior."
            )
        for argument, value in (("encoder", encoder), ("decoder", decoder), ("batch_regularizer", batch_regularizer)):
            refuse_keras_3(argument, value)
            if not callable(value) and not (value is None and argument == "batch_regularizer"):
                raise TypeError(f"{argument} must be a Keras model or another callable, got {value!r}.")
        for argument, count in (("num_draws", num_draws), ("num_prior_samples", num_prior_samples)):
            if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
                raise ValueError(f"{argument} must be an integer >= 1, got {count!r}.")
        for argument, weight in (("beta", beta), ("regularizer_weight", regularizer_weight)):
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
                raise ValueError(f"{argument} must be a finite number >= 0, got {weight!r}.")
        if gradients not in ("auto", "ghost", "vectorized"):
            raise ValueError(f'gradients must be "auto", "ghost" or "vectorized", got {gradients!r}.')
        if kl not in ("auto", "analytic", "monte_carlo"):
            raise ValueError(f'kl must be "auto", "analytic" or "monte_carlo", got {kl!r}.')
        dtype = surrogates.float_dtype(prior)
        super().__init__(seed=seed, name=name, dtype=dtype.name)
        parts = _Parts(encoder, decoder, prior, batch_regularizer, dtype, [*layers_of(encoder), *layers_of(decoder)])
        parts.given = given
        refuse_mixing(parts.layers)
        self._parts_of_model = parts
        # Tracked by Keras, so that weights are saved, whatever the two callables are.
        self._encoder_layers, self._decoder_layers = _outermost(encoder), _outermost(decoder)
        self.beta, self.num_draws, self.kl, self.gradients = float(beta), num_draws, kl, gradients
        self.regularizer_weight, self.num_prior_samples = float(regularizer_weight), num_prior_samples
        self._trial = LayerTrial()
        self._expected: float | None = None
        self._priced: tuple[Any, ...] = ()
        self._prior_samples: int | None = None
        self._noise_of_terms: tuple[Sensitivity, tuple[float, ...] | None] = (Sensitivity(), None)

    @property
    def encoder(self) -> Any:
        """The encoder, as given."""
        return self._parts_of_model.encoder

    @property
    def decoder(self) -> Any:
        """The decoder, as given."""
        return self._parts_of_model.decoder

    @property
    def prior(self) -> Any:
        """The TFP prior."""
        return self._parts_of_model.prior

    @property
    def batch_regularizer(self) -> Callable[[Codes], Any] | None:
        """The term of each group of records, or None."""
        return self._parts_of_model.regularizer

    def get_config(self) -> dict[str, Any]:
        """See `DPModel.get_config`.

        Raises:
          ValueError: a part is neither a registered function nor a Keras model without Lambda layers (as TFP's distribution
            layers are); see `dpvi.register`.
        """
        parts = {name: serialization.encode(part, name) for name, part in self._parts_of_model.given.items()}
        names = ("beta", "num_draws", "regularizer_weight", "num_prior_samples", "gradients", "kl")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}, "parts": parts}

    # ------------------------------------------------------------------ the loss

    def encode(self, x: Any) -> Any:
        """The latent variables' distribution for a batch of records: a TFP distribution with batch shape [n].

        What it says of a record is that record's own: encode only what you may show.
        """
        return self._distribution("encoder", self.encoder(self._tensors(x)))

    def decode(self, z: Any) -> Any:
        """The records' distribution for latent values of shape [n, ...]: a TFP distribution with batch shape [n]."""
        return self._distribution("decoder", self.decoder(tf.convert_to_tensor(z, self._parts_of_model.dtype)))

    def _distribution(self, part: str, value: Any) -> Any:
        if not isinstance(value, tfd.Distribution):
            raise TypeError(
                f"{part} returned {type(value).__name__}; it must return a TFP distribution. End it in a TFP layer, for "
                "instance tfp.layers.DistributionLambda or tfp.layers.IndependentBernoulli."
            )
        return value

    def _terms(self, x: Any, key: Any, num_draws: int, training: bool = False) -> _Terms:
        """Losses of a batch of records, from `num_draws` draws for each."""
        posterior = self._distribution("encoder", _called(self.encoder, x, training))
        draws = posterior.sample(num_draws, seed=_random.tfp_seed(key))  # [S, n, ...]
        samples = tf.einsum("sn...->ns...", draws) if num_draws > 1 else tf.expand_dims(draws[0], 1)
        event = samples.shape[2:]
        # All draws of one record side by side: its rows in the decoder follow each other.
        codes = tf.reshape(samples, [-1, *event])
        conditional = self._distribution("decoder", _called(self.decoder, codes, training))
        repeated = x if num_draws == 1 else tf.nest.map_structure(lambda part: tf.repeat(part, num_draws, axis=0), x)
        log_prob = conditional.log_prob(_as_event(repeated, conditional))
        log_prob = tf.reduce_mean(tf.reshape(log_prob, [-1, num_draws]), axis=1)
        return _Terms(-log_prob + self.beta * self._divergence(posterior, draws), samples[:, 0], posterior)

    def _divergence(self, posterior: Any, draws: Any) -> Any:
        """KL(q(z | x) || prior) of each record."""
        if self.kl != "monte_carlo":
            try:
                return tfd.kl_divergence(posterior, self.prior)
            except NotImplementedError:
                if self.kl == "analytic":
                    raise
        return tf.reduce_mean(posterior.log_prob(draws) - self.prior.log_prob(draws), axis=0)

    # ------------------------------------------------------------------ the step

    def step_gradients(self, key: Any, num_records: int) -> StepGradients:
        """How a batch is clipped, and the exact gradient of weight regularizers.

        Args:
          key: unused: draws belong to records.
          num_records: unused.
        """
        del key, num_records
        variables = self.trainable_variables
        layers = self._parts_of_model.layers
        penalties = [penalty for layer in layers for penalty in layer._callable_losses]
        exact, total = None, None
        if penalties:  # Keras's weight regularizers look at weights alone (contract C2).
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                total = tf.add_n([penalty() for penalty in penalties])
            exact = tape.gradient(total, variables, unconnected_gradients="zero")
        return StepGradients(None, variables, exact, clip_batch=self._clip_batch, data_independent_loss=total)

    def _clip_batch(self, records: Any, mask: Any, key: Any) -> tuple[ClippedSum, RecordStatistics]:
        gradients = self._trial.gradients()
        optimizer = self.optimizer
        x = records["x"]
        by_group = self.batch_regularizer is not None
        draw_key, group_key, prior_key = _random.split(key, 3) if by_group else (key, None, None)
        assignment = groups.assign(group_key, tf.shape(mask)[0], optimizer.num_partitions) if by_group else None

        def forward() -> tuple[_Terms, Any]:
            terms = self._terms(x, draw_key, self.num_draws, training=True)
            return terms, self._group_terms(terms, assignment, mask, prior_key) if by_group else None

        one = gradients.run(forward)
        terms, value = one.result
        clipped, statistics = one.clipped_sum(
            terms.losses,
            mask,
            l2_norm_clip=optimizer.l2_norm_clip,
            clipping=optimizer.clipping,
            weights=records.get("sample_weight"),
        )
        if by_group:
            clipped = self._with_groups(one, value, clipped, assignment, mask)
        return clipped, statistics

    def _group_terms(self, terms: _Terms, assignment: Any, mask: Any, prior_key: Any) -> Any:
        """The sum of the regularizer's values for groups, each from its own records' codes alone.

        One group's value has no part in the gradient by another's codes, so the sum serves for all of them.
        """
        num = self.optimizer.num_partitions

        def body(group: Any, total: Any) -> tuple[Any, Any]:
            return group + 1, total + self._group_term(group, terms, assignment, mask, prior_key)

        # A loop of the graph, not of Python: 64 groups would take a minute to trace.
        start = (tf.constant(0), tf.zeros([], terms.samples.dtype))
        return tf.while_loop(lambda group, _: group < num, body, start, maximum_iterations=num, parallel_iterations=1)[
            1
        ]

    def _group_term(self, group: Any, terms: _Terms, assignment: Any, mask: Any, prior_key: Any) -> Any:
        regularizer, prior = self.batch_regularizer, self.prior
        assert regularizer is not None
        assert self._prior_samples is not None
        chosen = (assignment == group) & mask
        samples = prior.sample(self._prior_samples, seed=_random.tfp_seed(_random.fold_in(prior_key, group)))
        if self._static:
            # All rows, at a fixed shape, with nothing of other groups' records in theirs.
            weights = tf.cast(chosen, terms.samples.dtype)
            shown = tf.where(chosen[:, None], terms.samples, tf.zeros_like(terms.samples))
            posterior = groups.distribution_where(terms.posterior, chosen, terms.samples.shape[0])
            codes = Codes(shown, weights, posterior, prior, samples)
        else:
            rows = tf.where(chosen)[:, 0]
            posterior = groups.rows_of_distribution(terms.posterior, rows, terms.samples.shape[0])
            own = tf.gather(terms.samples, rows)
            codes = Codes(own, tf.ones([tf.size(rows)], own.dtype), posterior, prior, samples)
        value = tf.convert_to_tensor(regularizer(codes))
        if value.shape.rank != 0:
            raise ValueError(
                f"batch_regularizer returned shape {value.shape}; it must return a scalar for a group of records. Reduce "
                "it, for instance with tf.reduce_sum."
            )
        return tf.cast(value, terms.samples.dtype) * self.regularizer_weight

    def _with_groups(self, one: Pass, value: Any, clipped: ClippedSum, assignment: Any, mask: Any) -> ClippedSum:
        """The sum of both terms, for one division by the expected batch size."""
        optimizer, variables = self.optimizer, self.trainable_variables
        assert self._expected is not None
        parts = one.contributions(value, tf.ones_like(value))
        reached = [part if yes else None for part, yes in zip(parts, self._reaches(), strict=True)]
        sums = groups.clipped_group_sum(
            reached,
            variables,
            assignment,
            mask,
            num_groups=optimizer.num_partitions,
            l2_norm_clip=optimizer.batch_l2_norm_clip,
            expected_batch_size=self._expected,
            static=self._static,
        )
        sensitivity, scales = self._noise_of_terms
        factor = self._expected / optimizer.num_partitions
        # Subtracted, not added: TensorFlow 2.15 would join this sum and the loop's into one with a temporary variable, and the
        # second call of the compiled step then fails (AlreadyExistsError at AddOpsRewrite_.../tmp_var).
        tensors = [
            part - tf.constant(-factor, part.dtype) * more for part, more in zip(clipped.tensors, sums, strict=True)
        ]
        return ClippedSum(tensors, clipped.l2_norm_clip, sensitivity, scales)

    def _reaches(self) -> tuple[bool, ...]:
        """Which variables the batch-wise term depends on: the encoder's."""
        of_encoder = {variable.ref() for layer in self._encoder_layers for variable in layer.trainable_variables}
        return tuple(variable.ref() in of_encoder for variable in self.trainable_variables)

    @property
    def step_identity(self) -> tuple[Any, ...]:
        """The settings that a traced step holds."""
        return (
            self.gradients,
            self.num_draws,
            self.beta,
            self.kl,
            self.regularizer_weight,
            self._prior_samples,
            self._trial.changes,
        )

    @property
    def gains_from_xla(self) -> bool:
        """False: products of large matrices are faster without XLA on CPUs, and need no padding."""
        return False

    @property
    def _static(self) -> bool:
        settings = self._dp.settings
        wanted = None if settings is None else settings.jit_compile
        return bool(self.run_eagerly) or bool(wanted)

    @property
    def _batch_needs(self) -> planning.BatchNeeds:
        gradients = self._trial.known()
        each = gradients.bytes_each
        if gradients.mapped:
            each += sum(int(np.prod(v.shape)) * v.dtype.size for v in self.trainable_variables)
        return planning.BatchNeeds(4 * each, self.batch_regularizer is not None, self._static)

    def _check_optimizer(self, optimizer: Any) -> None:
        termwise = isinstance(optimizer, TermwiseOptimizer)
        if termwise and self.batch_regularizer is None:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has batch_l2_norm_clip={optimizer.batch_l2_norm_clip} for a batch-wise "
                "term, and this model has none: give DPVAE(batch_regularizer=...), or use a DPKeras optimizer."
            )
        if self.batch_regularizer is not None and not termwise:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} clips by record, and this model has a batch_regularizer: one record "
                "moves the regularizer's gradient by every other record of its batch, so the sum's sensitivity would grow "
                "with the batch size B, O(B) in place of O(1). Use dpvi.optimizers.TermwiseDPKerasAdamOptimizer("
                "l2_norm_clip=, batch_l2_norm_clip=, num_partitions=), which clips the term by groups."
            )

    def _noise(
        self, sampling: SamplingScheme, expected_batch_size: float
    ) -> tuple[Sensitivity, tuple[float, ...] | None]:
        self._expected = expected_batch_size
        if self.batch_regularizer is None:
            return Sensitivity(), None
        optimizer, settings = self.optimizer, self._dp.settings
        assert settings is not None
        reached = self._reaches()
        sizes = [int(np.prod(variable.shape)) for variable in self.trainable_variables]
        noise = optimizer.noise_for(
            expected_batch_size=expected_batch_size,
            num_encoder=sum(size for size, yes in zip(sizes, reached, strict=True) if yes),
            num_rest=sum(size for size, yes in zip(sizes, reached, strict=True) if not yes),
            sampling=sampling,
            neighboring_relation=settings.neighboring_relation,
        )
        self._prior_samples = self.num_prior_samples or max(8, round(expected_batch_size / optimizer.num_partitions))
        scales = tuple(noise.encoder_scale if yes else noise.rest_scale for yes in reached)
        self._noise_of_terms = (noise.sensitivity, scales)
        self._priced = self._terms_settings
        return self._noise_of_terms

    @property
    def _terms_settings(self) -> tuple[Any, ...]:
        optimizer = self.optimizer
        return (optimizer.l2_norm_clip, optimizer.batch_l2_norm_clip, optimizer.num_partitions, id(optimizer))

    def _check_unchanged(self) -> None:
        if self.batch_regularizer is not None and self._priced != self._terms_settings:
            raise RuntimeError(
                f"l2_norm_clip, batch_l2_norm_clip, num_partitions = {self._terms_settings[:3]}: they were {self._priced[:3]} when "
                "this fit was priced, and noise and sensitivity follow from them. Change them between fits."
            )

    # ------------------------------------------------------------------ checks

    @property
    def _record_dtype(self) -> Any:
        return self._parts_of_model.dtype.as_numpy_dtype

    @property
    def _caveats(self) -> tuple[str, ...]:
        found = [
            "the encoding of a record is that record's own: the guarantee covers the networks, not their outputs for it."
        ]
        optimizer = self.optimizer
        if self.batch_regularizer is not None and isinstance(optimizer, TermwiseOptimizer):
            found.append(
                f"each release is the sum of records' clipped gradients and of those of {optimizer.num_partitions} random groups, "
                f"clipped to {optimizer.batch_l2_norm_clip:g}; one record moves a group's by up to twice that, and both are priced."
            )
        return tuple(found)

    def _prepare(self, records: Records) -> None:
        if records.y is not None:
            raise ValueError("y was given, but a DPVAE learns from records x alone: call fit(x).")
        x = tf.nest.map_structure(lambda part: tf.zeros([_TRIED, *part.shape[1:]], part.dtype), records.x)
        self._check_shapes(x)
        super()._prepare(records)

    def _check_shapes(self, x: Any) -> None:
        """Runs both networks on zeros: variables are made, and mistakes are named."""
        prior = self.prior
        posterior = self._tried("encoder", lambda: self.encode(x), x)
        if posterior.batch_shape.as_list() != [_TRIED] or posterior.event_shape != prior.event_shape:
            raise ValueError(
                f"encoder returned a distribution of batch shape {posterior.batch_shape} and event shape "
                f"{posterior.event_shape} for {_TRIED} records; it must be [{_TRIED}] and the prior's {prior.event_shape}. "
                "tfd.Independent(..., 1) makes the last batch dimension part of the event."
            )
        if posterior.reparameterization_type != tfd.FULLY_REPARAMETERIZED:
            raise ValueError(
                f"encoder returned {posterior.name!r}, which is not reparameterised: gradients do not pass through its draws. "
                "Use a normal, a logistic or another continuous distribution."
            )
        z = tf.zeros([_TRIED, *prior.event_shape], self._parts_of_model.dtype)
        conditional = self._tried("decoder", lambda: self.decode(z), z)
        log_prob = self._tried("decoder", lambda: conditional.log_prob(_as_event(x, conditional)), z)
        if log_prob.shape.as_list() != [_TRIED]:
            raise ValueError(
                f"decoder returned a distribution whose log_prob has shape {log_prob.shape.as_list()} for {_TRIED} records; it "
                f"must be [{_TRIED}]: one record is one event. Its event shape is {conditional.event_shape}."
            )

    def _tried(self, part: str, function: Callable[[], Any], given: Any) -> Any:
        try:
            return function()
        except (*base.LIKELIHOOD_ERRORS, tf.errors.InvalidArgumentError) as error:
            if str(error).startswith((f"{part} returned", "prior")):
                raise
            shapes = tf.nest.map_structure(lambda value: f"{value.dtype.name}{value.shape.as_list()}", given)
            raise ValueError(f"{part} failed on {shapes}: {type(error).__name__}: {error}") from error

    def _check_data(self, records: Records, in_memory: bool = False) -> None:
        """Tries the layers on made-up records, before anything is spent."""
        if self.batch_regularizer is not None:
            self._check_reach()
        rng = np.random.default_rng(0)

        def made_up(part: Any) -> Any:
            if np.dtype(part.dtype).kind == "f":
                return tf.constant(rng.uniform(size=[_TRIED, *part.shape[1:]]), part.dtype)
            return tf.zeros([_TRIED, *part.shape[1:]], part.dtype)

        key = tf.constant([1, 2], tf.int64)
        with self.distribute_strategy.scope():
            # Streamed batches may change their shapes, eager steps are Python's each time, and strategies trace when they like.
            anew = (
                tf.distribute.has_strategy() or self.run_eagerly or tf.config.functions_run_eagerly() or not in_memory
            )
        self._trial.check(
            self._parts_of_model.layers,
            self.trainable_variables,
            lambda part: self._terms(part, key, self.num_draws, training=True).losses,
            tf.nest.map_structure(made_up, records.x),
            settings=(self.gradients, self.num_draws, self.beta, self.kl),
            mapped=self.gradients == "vectorized",
            may_wait=not anew,
        )

    def _check_reach(self) -> None:
        both = {id(layer) for layer in self._encoder_layers} & {id(layer) for layer in self._decoder_layers}
        if both:
            raise ValueError(
                "encoder and decoder share layers, and a batch_regularizer is given: which parameters its gradient reaches "
                "decides the noise. Use layers of their own for each."
            )

    # ------------------------------------------------------------------ what is learned

    def elbo(self, x: Any, *, num_draws: int = 1, seed: int | None = 0) -> Any:
        """Evidence lower bounds of given records, float array of shape [n] (nats, with the model's beta).

        Exact values of these records, so *not private* unless they are public.

        Args:
          x: records as for `fit`.
          num_draws: latent draws to average over.
          seed: of the draws.
        """
        key = tf.constant(_random.new_key(seed))
        inputs = self._inputs(x)
        num = int(tf.nest.flatten(inputs)[0].shape[0])
        one = tf.function(
            lambda part, k: self._terms(part, k, num_draws).losses, autograph=False, reduce_retracing=True
        )
        found = []
        for start in range(0, num, 1024):
            part = tf.nest.map_structure(lambda value, at=start: value[at : at + 1024], inputs)
            found.append(-one(part, _random.fold_in(key, start)).numpy())
        return np.concatenate(found)

    def reconstruct(self, x: Any) -> Any:
        """Means of the decoder's distribution at the encoder's means: array of the records' shape."""
        return self.predict(x)

    def sample_predictive(self, num: int, *, seed: int | None = None, mean: bool = False) -> Any:
        """Synthetic records: draws from the prior, decoded. Post-processing of released weights, at no further cost.

        Args:
          num: how many.
          seed: makes the draws repeatable.
          mean: give the decoder's means (grey values of images) in place of draws from its distribution.

        Returns:
          Array of shape [num, ...].
        """
        if isinstance(num, bool) or not isinstance(num, int) or num < 1:
            raise ValueError(f"num must be an integer >= 1, got {num!r}: it is the number of records to draw.")
        keys = _random.split(tf.constant(_random.new_key(seed)), 2)
        z = self.prior.sample(num, seed=_random.tfp_seed(keys[0]))
        conditional = self.decode(z)
        drawn = mean_of(conditional) if mean else conditional.sample(seed=_random.tfp_seed(keys[1]))
        return tf.nest.map_structure(lambda part: part.numpy(), drawn)

    def _export_functions(self, inputs: dict[str, Any]) -> list[ExportedFunction]:
        return exporting.of_autoencoder(self, inputs)

    def call(self, inputs: Any, training: Any = None) -> Any:
        """Reconstruction: the mean of the decoder's distribution at the mean of the encoder's."""
        del training
        posterior = self._distribution("encoder", self.encoder(inputs))
        return mean_of(self._distribution("decoder", self.decoder(mean_of(posterior))))

    def predict_step(self, data: Any) -> Any:
        """One batch of `predict`."""
        x = data[0] if isinstance(data, tuple) and len(data) == 1 else data
        return self(x, training=False)

    def predict(self, x: Any, batch_size: int | None = None, verbose: Any = 0, **kwargs: Any) -> Any:
        """Reconstructions of records: array of their shape; see `reconstruct`."""
        return super().predict(self._inputs(x), batch_size=batch_size or 1024, verbose=verbose, **kwargs)

    def test_step(self, data: Any) -> dict[str, Any]:
        """One batch of `evaluate`: mean negative ELBO as `loss`, and validation metrics of reconstructions."""
        x, y, weight = (*data, None, None)[:3] if isinstance(data, tuple) else (data, None, None)
        del y
        losses = self._terms(x, tf.constant(_random.new_key(0)), 1).losses
        self._dp.loss_metric.update_state(losses, sample_weight=weight)
        results = {self._loss_name: self._dp.loss_metric.result()}
        if self._dp.validation_metrics:
            reconstruction = self(x)
            for metric in self._dp.validation_metrics:
                metric.update_state(x, reconstruction, sample_weight=weight)
                results[f"unsafe_{metric.name}" if self._dp.unsafe_validation else metric.name] = metric.result()
        return results

    def _tensors(self, x: Any) -> Any:
        return tf.nest.map_structure(tf.convert_to_tensor, x)

    def _inputs(self, x: Any) -> Any:
        checked = make_records(x, None, None, dtype=self._record_dtype, validate=False).x
        return tf.nest.map_structure(tf.convert_to_tensor, checked)


@dataclasses.dataclass(frozen=True)
class _Terms:
    """Losses [n], the first draw of each record's latent variable, and the latents' distribution."""

    losses: Any
    samples: Any
    posterior: Any


class _Parts:
    """Encoder, decoder and prior, out of sight of Keras, which tracks the layers alone."""

    def __init__(self, encoder: Any, decoder: Any, prior: Any, regularizer: Any, dtype: Any, layers: list[Any]) -> None:
        self.encoder, self.decoder, self.prior, self.regularizer = encoder, decoder, prior, regularizer
        self.dtype = dtype
        self.given: dict[str, Any] = {}
        self.layers = list({id(layer): layer for layer in layers}.values())


def _called(part: Any, inputs: Any, training: bool) -> Any:
    """A network's output, in training mode where it has one (dropout)."""
    return part(inputs, training=training) if getattr(part, "_expects_training_arg", False) else part(inputs)


def _outermost(part: Any) -> list[Any]:
    layers = layers_of(part)
    inner = {id(sub) for layer in layers for sub in layer._flatten_layers(include_self=False)}
    return [layer for layer in layers if id(layer) not in inner]


def _as_event(x: Any, distribution: Any) -> Any:
    """Integer records of a distribution over floats as floats."""
    if tf.is_tensor(x) and x.dtype.is_integer and tf.as_dtype(distribution.dtype).is_floating:
        return tf.cast(x, distribution.dtype)
    return x
