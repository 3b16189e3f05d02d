"""`DPVAE`: private variational autoencoders of Keras layers and TFP distributions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfp_dpvi import _random, _registry, surrogates
from tfp_dpvi._tf import (
    Optimizer,
    Structure,
    expects_training,
    layers_within,
    loss_functions,
    refuse_keras_3,
    register_keras_serializable,
    tf,
    tfp,
)
from tfp_dpvi.data import Records, make_records
from tfp_dpvi.divergences import Codes
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import (
    Clip,
    ClippedGradient,
    ClippedSum,
    LayerGradients,
    PerExample,
    StepGradient,
    StepSpec,
    UnsupportedLayerError,
    layers_of,
    refuse_mixing,
)
from tfp_dpvi.models import base, exporting
from tfp_dpvi.models.fitting import LOG
from tfp_dpvi.models.group_terms import GroupTerms, Terms
from tfp_dpvi.models.predictive import mean_of
from tfp_dpvi.optimizers import TermwiseOptimizer
from tfp_dpvi.privacy import Sensitivity
from tfp_dpvi.sampling import BatchNeeds

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
        encoder, decoder, prior = (part() if _registry.is_factory(part) else part for part in (encoder, decoder, prior))
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
        self._parts_of_model.tried = []

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
        parts = {name: _registry.encode(part, name) for name, part in self._parts_of_model.given.items()}
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

    def _terms(self, x: Structure, key: tf.Tensor, num_draws: int, training: bool = False) -> Terms:
        """Returns the losses of a batch of records, from `num_draws` draws for each."""
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
        return Terms(-log_prob + self.beta * self._divergence(posterior, draws), samples[:, 0], posterior)

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

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient of records' bounds, and of groups' terms where there is a `batch_regularizer`.

        Args:
          spec: the public numbers of a step; the noise of both terms follows from them.
        """
        variables, clip, layers = self.trainable_variables, self.clip, self._layer_gradients
        settings = (self.gradients, self.num_draws, self.beta, self.kl)
        regularizer = self.batch_regularizer
        groups_of_step = None if regularizer is None else self._groups(spec, regularizer)

        def clipped_sum(
            records: dict[str, tf.Tensor], mask: tf.Tensor, key: tf.Tensor
        ) -> tuple[ClippedSum, PerExample]:
            if groups_of_step is None:
                one = layers.run(lambda: self._terms(records["x"], key, self.num_draws, training=True))
                return one.clipped_sum(one.result.losses, mask, clip, weights=records.get("sample_weight"))
            return groups_of_step.clipped_sum(layers, clip, records, mask, key, self.num_draws)

        def draw(key: tf.Tensor) -> StepGradient:
            del key  # Draws belong to records.
            penalties = [penalty for layer in self._parts_of_model.layers for penalty in loss_functions(layer)]
            if not penalties:
                return StepGradient(clipped_sum, variables)
            with tf.GradientTape(
                watch_accessed_variables=False
            ) as tape:  # Weight regularizers touch no record (contract C2).
                tape.watch(variables)
                total = tf.add_n([penalty() for penalty in penalties])
            exact = tape.gradient(total, variables, unconnected_gradients="zero")
            return StepGradient(clipped_sum, variables, data_independent=exact, data_independent_loss=total)

        return ClippedGradient(
            draw,
            clip,
            sensitivity=Sensitivity() if groups_of_step is None else groups_of_step.noise.sensitivity,
            noise_scales=None if groups_of_step is None else groups_of_step.noise_scales,
            batchwise=True,
            gains_from_xla=False,  # Products of large matrices are faster without XLA on CPUs, and need no padding.
            identity=(*settings, self._static, id(layers), None if groups_of_step is None else groups_of_step.identity),
        )

    def _groups(self, spec: StepSpec, regularizer: Callable[[Codes], tf.Tensor]) -> GroupTerms:
        """Returns the batch-wise term of a step, with the noise that both terms need."""
        optimizer = self.optimizer
        reached = self._reaches()
        sizes = [int(np.prod(variable.shape)) for variable in self.trainable_variables]
        noise = optimizer.noise_for(
            expected_batch_size=spec.expected_batch_size,
            num_encoder=sum(size for size, yes in zip(sizes, reached, strict=True) if yes),
            num_rest=sum(size for size, yes in zip(sizes, reached, strict=True) if not yes),
            sampling=spec.sampling,
            neighboring_relation=spec.neighboring_relation,
        )
        num_groups = optimizer.num_partitions
        return GroupTerms(
            terms=self._terms,
            regularizer=regularizer,
            weight=self.regularizer_weight,
            prior=self.prior,
            num_prior_samples=self.num_prior_samples or max(8, round(spec.expected_batch_size / num_groups)),
            variables=self.trainable_variables,
            reached=reached,
            num_groups=num_groups,
            clip=Clip(optimizer.batch_l2_norm_clip),
            expected_batch_size=spec.expected_batch_size,
            noise=noise,
            static=self._static,
        )

    def _reaches(self) -> tuple[bool, ...]:
        """Which variables the batch-wise term depends on: the encoder's."""
        of_encoder = {variable.ref() for layer in self._encoder_layers for variable in layer.trainable_variables}
        return tuple(variable.ref() in of_encoder for variable in self.trainable_variables)

    @property
    def _static(self) -> bool:
        target = self._dp.target
        wanted = None if target is None else target.jit_compile
        return bool(self.run_eagerly) or bool(wanted)

    @property
    def batch_needs(self) -> BatchNeeds:
        """What both networks ask of a physical batch."""
        gradients = self._layer_gradients
        each = gradients.bytes_each
        if gradients.mapped:
            each += sum(int(np.prod(v.shape)) * v.dtype.size for v in self.trainable_variables)
        return BatchNeeds(4 * each, batchwise=True, whole=self.batch_regularizer is not None, static=self._static)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """See `DPModel`."""
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

    # ------------------------------------------------------------------ checks

    @property
    def record_dtype(self) -> np.dtype:
        """See `DPModel`."""
        return self._parts_of_model.dtype.as_numpy_dtype

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `DPModel`."""
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

    def prepare(self, records: Records) -> None:
        """Makes the variables, and tries both networks on zeros."""
        if records.y is not None:
            raise ValueError("y was given, but a DPVAE learns from records x alone: call fit(x).")
        x = tf.nest.map_structure(lambda part: tf.zeros([_TRIED, *part.shape[1:]], part.dtype), records.x)
        self._check_shapes(x)
        super().prepare(records)

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

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """See `DPModel.compile`. Layers are tried again at the next fit."""
        super().compile(*args, **kwargs)
        self._parts_of_model.tried.clear()

    @property
    def _layer_gradients(self) -> LayerGradients:
        """How the layers' gradients are computed, as the last trial found."""
        return self._parts_of_model.tried[-1][1]

    def check_records(self, records: Records) -> None:
        """Tries the layers on synthetic records, before anything is spent: once after `compile`, for each shape."""
        if self.batch_regularizer is not None:
            self._check_reach()
        rng = np.random.default_rng(0)

        def synthetic(part: np.ndarray) -> tf.Tensor:
            if np.dtype(part.dtype).kind == "f":
                return tf.constant(rng.uniform(size=[_TRIED, *part.shape[1:]]), part.dtype)
            return tf.zeros([_TRIED, *part.shape[1:]], part.dtype)

        x = tf.nest.map_structure(synthetic, records.x)
        shapes = [(tuple(part.shape), part.dtype) for part in tf.nest.flatten(x)]
        identity = (shapes, self.gradients, self.num_draws, self.beta, self.kl)
        known = [found for found in self._parts_of_model.tried if found[0] == identity]
        if known:
            self._parts_of_model.tried = [found for found in self._parts_of_model.tried if found[0] != identity] + known
            return
        key = tf.constant([1, 2], tf.int64)
        layers = LayerGradients(
            self._parts_of_model.layers, self.trainable_variables, mapped=self.gradients == "vectorized"
        )
        try:
            checked = layers.checked(lambda part: self._terms(part, key, self.num_draws, training=True).losses, x)
        except UnsupportedLayerError as error:
            raise ValueError(f"This model cannot be made private as it is. {error}") from error
        for note in checked.notes:
            LOG.info("%s", note)
        self._parts_of_model.tried.append((identity, checked))

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

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `DPModel`."""
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
        checked = make_records(x, None, None, dtype=self.record_dtype, validate=False).x
        return tf.nest.map_structure(tf.convert_to_tensor, checked)


class _Parts:
    """Encoder, decoder and prior, out of sight of Keras, which tracks the layers alone."""

    def __init__(self, encoder: Any, decoder: Any, prior: Any, regularizer: Any, dtype: Any, layers: list[Any]) -> None:
        self.encoder, self.decoder, self.prior, self.regularizer = encoder, decoder, prior, regularizer
        self.dtype = dtype
        self.given: dict[str, Any] = {}
        self.tried: list[tuple[Any, LayerGradients]] = []
        self.layers = list({id(layer): layer for layer in layers}.values())


def _called(part: Callable[..., Any], inputs: Structure, training: bool) -> Any:
    """Returns a network's output, in training mode where it has one (dropout)."""
    return part(inputs, training=training) if expects_training(part) else part(inputs)


def _outermost(part: Any) -> list[Any]:
    layers = layers_of(part)
    inner = {id(sub) for layer in layers for sub in layers_within(layer, include_self=False)}
    return [layer for layer in layers if id(layer) not in inner]


def _as_event(x: Any, distribution: Any) -> Any:
    """Integer records of a distribution over floats as floats."""
    if tf.is_tensor(x) and x.dtype.is_integer and tf.as_dtype(distribution.dtype).is_floating:
        return tf.cast(x, distribution.dtype)
    return x
