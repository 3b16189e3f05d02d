"""`DPVAE`: private variational autoencoders of Keras layers and TFP distributions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _random, serialization
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import (
    Layer,
    Optimizer,
    Structure,
    layers_of,
    register_keras_serializable,
    tf,
    tfd,
    without_values,
)
from tfp_dpvi.bayes.predictive import mean_of
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.ghost import UnsupportedLayerError
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec
from tfp_dpvi.models import arguments
from tfp_dpvi.networks import latents, refusals
from tfp_dpvi.networks.annealing import LiveWeight, Weight
from tfp_dpvi.networks.autoencoder import Autoencoder
from tfp_dpvi.networks.exporting import autoencoder_signatures
from tfp_dpvi.networks.group_terms import GroupTerms, Regularizer
from tfp_dpvi.networks.latents import Network, Prior
from tfp_dpvi.networks.layered import NUM_SYNTHETIC, LayeredModel
from tfp_dpvi.optimizers import TermwiseOptimizer
from tfp_dpvi.sampling import BatchNeeds


@register_keras_serializable("tfp_dpvi", "DPVAE")
class DPVAE(LayeredModel):
    """A variational autoencoder with a latent draw for each record, trained with privacy.

    Minimises the mean over records of `-E_q log p(x | z) + beta KL(q(z | x) || prior)`. A record's
    whole term is clipped, since its latent variable is its own. The networks' weights are released;
    draws and posteriors of records are not.

    After `fit(x, y)` it is a model of p(x | y): encoder and decoder, and the prior if it is a
    function, then also take y. Keras models and layers get one list, `encoder([x, y])`, plain
    functions two arguments.

    `docs/guides/vae_researcher.md` shows both, learned priors and two levels of latent variables.

    Args:
      encoder: Keras model, layer, or function of layers, `x -> TFP distribution` with batch shape
        [n] and the prior's event shape, reparameterised; or, as for `decoder` and `prior`, a
        function without arguments that builds it (to save it).
      decoder: Likewise `z -> TFP distribution` of records: `log_prob(x)` has shape [n] for z of
        shape [n, ...].
      prior: TFP distribution of one record's latent variable; its trainable variables are learned
        by clipped gradients. Or `dpvi.divergences.VampPrior`; or a Keras model, layer or function,
        `y -> TFP distribution` with batch shape [n].
      beta: Weight of the KL term (Higgins et al. 2017): a number, to which `model.beta` may be
        assigned while a fit runs; a scalar variable; or a Keras schedule of the number of steps.
      num_draws: Latent draws for each record and step; the loss is averaged over them before the
        clip.
      batch_regularizer: `Codes -> scalar`, a term of each random group of records, such as those of
        `tfp_dpvi.divergences`; needs a `TermwiseDPKeras` optimizer.
      regularizer_weight: Weight of this term.
      num_prior_samples: Number of draws from the prior for the regularizer, default the expected
        size of a group.
      gradients: "ghost" computes norms and sums from layers' inputs and output gradients,
        "vectorized" materializes every record's gradient; "auto" is "ghost". All give the same
        results up to rounding.
      kl: "analytic", "monte_carlo" (at the same draws), or "auto": analytic if TFP has it, Monte
        Carlo for a prior with trainable variables.
      seed: See `DPModel`.
      name: Name of the model.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> from tfp_dpvi._tf import tf, tfd
    >>> encoder_layer, decoder_layer = dpvi.keras.layers.Dense(2), dpvi.keras.layers.Dense(5)
    >>> model = dpvi.DPVAE(
    ...     encoder=lambda x: tfd.Independent(tfd.Normal(encoder_layer(x), 1.0), 1),
    ...     decoder=lambda z: tfd.Independent(tfd.Bernoulli(logits=decoder_layer(z)), 1),
    ...     prior=tfd.Independent(tfd.Normal(tf.zeros([2]), 1.0), 1),
    ... )
    >>> optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    >>> model.compile(optimizer, epsilon=2.0, delta=1e-5)
    >>> model.fit(x, batch_size=256, epochs=20)  # doctest: +SKIP
    >>> model.encode(tf.zeros([3, 5])).event_shape
    TensorShape([2])

    ```

    #### Formal guarantee

    As for `DPModel`, if a record's loss depends on no other record. Known layers that mix records
    are refused, and every model is checked once after `compile`, on synthetic records against
    TensorFlow's own gradients, before privacy is spent.
    """

    def __init__(
        self,
        encoder: Callable[..., Any],
        decoder: Callable[..., Any],
        prior: tfd.Distribution | Callable[[], tfd.Distribution],
        *,
        beta: Weight = 1.0,
        num_draws: int = 1,
        batch_regularizer: Regularizer | None = None,
        regularizer_weight: float = 1.0,
        num_prior_samples: int | None = None,
        gradients: str = "auto",
        kl: str = "auto",
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        saved = {
            "encoder": encoder,
            "decoder": decoder,
            "prior": prior,
            "batch_regularizer": batch_regularizer,
        }
        encoder = encoder() if serialization.is_factory(encoder) else encoder
        decoder = decoder() if serialization.is_factory(decoder) else decoder
        refusals.check_callable("encoder", encoder)
        refusals.check_callable("decoder", decoder)
        if batch_regularizer is not None:
            refusals.check_callable("batch_regularizer", batch_regularizer)
        arguments.check_counts(num_draws=num_draws or 0, num_prior_samples=num_prior_samples)
        weight = LiveWeight("beta", beta)
        regularizer_weight = check.non_negative("regularizer_weight", regularizer_weight)
        check.one_of("gradients", gradients, ("auto", "ghost", "vectorized"))
        check.one_of("kl", kl, ("auto", "analytic", "monte_carlo"))
        prior, learned = latents.resolve_prior(prior, encoder)
        fixed = isinstance(prior, tfd.Distribution) and not learned
        if batch_regularizer is not None and not fixed:
            raise ValueError(
                "batch_regularizer compares codes with one fixed prior, but this prior is learned "
                "or depends on y: pass a TFP distribution without trainable variables."
            )
        if learned and kl == "analytic":
            raise ValueError("kl='analytic' is not available for a learned prior: leave it out.")

        dtype = latents.float_type(prior)
        super().__init__(seed=seed, name=name, dtype=dtype)
        layers = [*layers_of(encoder), *layers_of(decoder)]
        density = latents.LearnedDensity(prior, learned, layers) if learned else None
        autoencoder = Autoencoder(encoder, decoder, prior, density, kl=kl, dtype=dtype)
        self._parts = _Parts(autoencoder, batch_regularizer, weight, saved)
        # Tracked by Keras, so that weights are saved for all kinds of callables.
        self._encoder_layers = latents.outermost_layers(encoder)
        self._decoder_layers = latents.outermost_layers(decoder)
        if density is not None:
            self._prior_layers = [density]
        else:
            self._prior_layers = [] if fixed else latents.outermost_layers(prior)
        self.num_draws = num_draws
        self.kl = kl
        self.gradients = gradients
        self.regularizer_weight = regularizer_weight
        self.num_prior_samples = num_prior_samples

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a number as beta is used from the next call of steps on."""
        if name != "beta":
            super().__setattr__(name, value)
        elif self._parts.weight.takes(value):
            self._parts.weight.assign(value)
        else:
            self.refuse_while_running(name, value)
            self._parts.weight = LiveWeight(name, value)
            self.drop_traces()

    @property
    def beta(self) -> float | tf.Tensor:
        """The weight of the KL term now; a tensor while a function is traced."""
        return self._parts.weight.value(self._step) if tf.executing_eagerly() else self._beta()

    def _beta(self) -> tf.Tensor:
        return self._parts.weight.tensor(self._step)

    @property
    def _step(self) -> tf.Variable | int:
        return 0 if self.optimizer is None else self.optimizer.iterations

    @property
    def encoder(self) -> Network:
        """The encoder that was passed to the constructor."""
        return self._parts.autoencoder.encoder

    @property
    def decoder(self) -> Network:
        """The decoder that was passed to the constructor."""
        return self._parts.autoencoder.decoder

    @property
    def prior(self) -> Prior:
        """The TFP prior, or a function of y that returns it."""
        return self._parts.autoencoder.prior

    @property
    def batch_regularizer(self) -> Regularizer | None:
        """The term of each group of records, or None."""
        return self._parts.regularizer

    @property
    def autoencoder(self) -> Autoencoder:
        """Encoder, decoder and prior with the present settings, without optimizer and ledger."""
        return dataclasses.replace(self._parts.autoencoder, beta=self.beta, kl=self.kl)

    @property
    def _live(self) -> Autoencoder:
        """Returns the same, with a beta that is read whenever a graph runs."""
        return dataclasses.replace(self._parts.autoencoder, beta=self._beta, kl=self.kl)

    def get_config(self) -> dict[str, Any]:
        """See `DPModel.get_config`.

        Parts must be registered functions or Keras models without Lambda layers.
        """
        parts = {name: serialization.encode(part, name) for name, part in self._parts.saved.items()}
        names = ("num_draws", "regularizer_weight", "num_prior_samples", "gradients", "kl")
        settings = {name: getattr(self, name) for name in names}
        beta = self._parts.weight.config()
        return {**super().get_config(), "beta": beta, **settings, "parts": parts}

    # ------------------------------------------------------------------ the learned model

    def encode(self, x: Structure, y: Structure | None = None) -> tfd.Distribution:
        """Returns the distribution of records' latent variables.

        The encoding of a private record is *not private*.

        Args:
          x: A batch of n records.
          y: What the records are conditioned on, for a model of p(x | y).

        Returns:
          A TFP distribution with batch shape [n].

        Raises:
          ValueError: y is missing, or passed to a model that was fitted without y.
        """
        return self.autoencoder.encode(x, y)

    def decode(self, z: tf.Tensor, y: Structure | None = None) -> tfd.Distribution:
        """Returns the distribution of records given their latent variables.

        Args:
          z: float [n, ...], latent values.
          y: What the records are conditioned on, for a model of p(x | y).

        Returns:
          A TFP distribution with batch shape [n].

        Raises:
          ValueError: y is missing, or passed to a model that was fitted without y.
        """
        return self.autoencoder.decode(z, y)

    def elbo(
        self, x: Structure, y: Structure | None = None, *, num_draws: int = 1, seed: int | None = 0
    ) -> np.ndarray:
        """Returns evidence lower bounds of records, with the model's beta.

        Exact values of these records: *not private* unless the records are public.

        Args:
          x: n records, as for `fit`.
          y: What the records are conditioned on, for a model of p(x | y).
          num_draws: Latent draws of each record, over which its bound is averaged.
          seed: Determines the draws; None for other draws in each call.

        Returns:
          float [n], in nats.

        Raises:
          ValueError: y is missing, or passed to a model that was fitted without y.
        """
        autoencoder = self.autoencoder
        key = tf.constant(_random.new_key(seed))
        autoencoder.check_y(y)
        inputs = self.as_inputs((x,) if y is None else (x, y))
        with without_values("elbo failed"):
            return autoencoder.elbo(key, num_draws, *inputs)

    def predict(
        self,
        x: Structure,
        batch_size: int | None = None,
        verbose: int | str = 0,
        steps: int | None = None,
        *,
        y: Structure | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Returns reconstructions, as `reconstruct`.

        Args:
          x: n records, in any form that `fit` or Keras takes.
          batch_size: Records in one call; does not change the result.
          verbose: 1 shows a progress bar.
          steps: As in Keras.
          y: What the records are conditioned on, for a model of p(x | y).
          **kwargs: Other arguments of `dpvi.keras.Model.predict`.

        Raises:
          ValueError: y is missing, or passed to a model that was fitted without y.
        """
        self.autoencoder.check_y(y)
        return super().predict(x if y is None else (x, y), batch_size, verbose, steps, **kwargs)

    def reconstruct(self, x: Structure, y: Structure | None = None) -> np.ndarray:
        """Returns means of the decoder's distribution at the encoder's means.

        Args:
          x: n records, in any form that `fit` or Keras takes.
          y: What the records are conditioned on, for a model of p(x | y).

        Returns:
          An array of the records' shape.

        Raises:
          ValueError: y is missing, or passed to a model that was fitted without y.
        """
        return self.predict(x, y=y)

    def sample_predictive(
        self, num: int, *, y: Structure | None = None, seed: int | None = None, mean: bool = False
    ) -> Structure:
        """Returns synthetic records: decoded draws from the prior.

        This is post-processing of released weights, at no further cost.

        Args:
          num: Number of records.
          y: What to condition on, for a model that was fitted with y: one row for each record, or
            one for all.
          seed: Makes the draws repeatable.
          mean: Whether to return the decoder's means (grey values of images) instead of draws from
            its distribution.

        Returns:
          An array of shape [num, ...].

        Raises:
          ValueError: A number below 1, or a missing, needless or wrong y.
        """
        arguments.check_counts(num=num or 0)
        autoencoder = self.autoencoder
        autoencoder.check_y(y)
        if y is not None:
            y = self.as_inputs(y, "y")
            num_rows = int(tf.nest.flatten(y)[0].shape[0])
            if num_rows not in (1, num):
                raise ValueError(
                    f"y has {num_rows} rows, but num={num}: pass one row for each record, or one "
                    "for all."
                )
        keys = _random.split(tf.constant(_random.new_key(seed)), 2)
        distribution = autoencoder.synthetic_distribution(num, y, _random.tfp_seed(keys[0]))
        if mean:
            records = mean_of(distribution)
        else:
            records = distribution.sample(seed=_random.tfp_seed(keys[1]))
        return tf.nest.map_structure(lambda part: part.numpy(), records)

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `DPModel`."""
        return autoencoder_signatures(self.autoencoder, inputs)

    def call(self, inputs: Structure, training: bool | None = None) -> tf.Tensor:
        """Returns reconstructions: means of the decoder's distribution at the encoder's means.

        Args:
          inputs: A batch of records x, or the pair (x, y) for a model of p(x | y).
          training: Has no effect.
        """
        del training
        autoencoder = self.autoencoder
        x, y = inputs if autoencoder.conditional else (inputs, None)
        return autoencoder.reconstruct(x, y)

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """See `dpvi.keras.Model.summary`; the prior determines the decoder's input shape."""
        prior = self.prior
        encoder_built = getattr(self.encoder, "built", False)
        decoder_built = getattr(self.decoder, "built", True)
        if isinstance(prior, tfd.Distribution) and encoder_built and not decoder_built:
            self.decode(prior.sample(1, seed=(0, 0)))
        super().summary(*args, **kwargs)

    # ------------------------------------------------------------------ evaluation

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns the negative bounds of a batch of records.

        Args:
          x: A batch of n records.
          y: What they are conditioned on, for a model of p(x | y); else ignored.

        Returns:
          float [n], in nats.
        """
        autoencoder = self._live
        y = y if autoencoder.conditional else None
        autoencoder.check_y(y)
        return autoencoder.terms(x, tf.constant(_random.new_key(0)), y=y).losses

    def compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """See `Hooks.compared`: records and their reconstructions."""
        return x, self((x, y) if self.autoencoder.conditional else x)

    # ------------------------------------------------------------------ the step

    def watched_layers(self) -> Sequence[Layer]:
        """See `LayeredModel`."""
        return self._parts.autoencoder.layers

    @property
    def loss_settings(self) -> Hashable:
        """See `LayeredModel`."""
        return self.gradients, self.num_draws, id(self._parts.weight), self.kl

    def batch_losses(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """See `LayeredModel`."""
        return self._losses_of(self._live, records, key, training)

    def losses_to_check(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """See `LayeredModel`: with all terms, also where beta begins at zero."""
        whole = dataclasses.replace(self._live, beta=1.0)
        return self._losses_of(whole, records, key, training)

    def _losses_of(
        self,
        autoencoder: Autoencoder,
        records: dict[str, Structure],
        key: tf.Tensor,
        training: bool,
    ) -> tf.Tensor:
        y = records.get("y")
        terms = autoencoder.terms(records["x"], key, self.num_draws, y=y, training=training)
        return terms.losses

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient of records' bounds, and of groups' terms if any."""
        general, layers = super().clipped_gradient(spec), self.layer_gradients
        terms = self.group_terms(spec)
        if terms is None or layers is None:
            return general

        def draw(key: tf.Tensor) -> StepGradient:
            clipped_sum = functools.partial(terms.clipped_sum, layers, general.clip)
            return dataclasses.replace(general.draw(key), clipped_sum=clipped_sum)

        return dataclasses.replace(
            general,
            draw=draw,
            sensitivity=terms.noise.sensitivity,
            noise_scales=terms.noise_scales,
            identity=(general.identity, terms.identity),
        )

    def group_terms(self, spec: StepSpec) -> GroupTerms | None:
        """Returns the terms of records and of groups; None without a `batch_regularizer`."""
        if self.batch_regularizer is None:
            return None
        optimizer, variables = self.optimizer, self.trainable_variables
        in_encoder = {
            variable.ref()
            for layer in self._encoder_layers
            for variable in layer.trainable_variables
        }
        reached = [variable.ref() in in_encoder for variable in variables]
        sizes = np.array([int(np.prod(variable.shape)) for variable in variables])
        num_encoder = int(sizes[reached].sum())
        group_size = spec.expected_batch_size / optimizer.num_partitions
        return GroupTerms(
            autoencoder=self._live,
            regularizer=self.batch_regularizer,
            weight=self.regularizer_weight,
            num_prior_samples=self.num_prior_samples or max(8, round(group_size)),
            num_draws=self.num_draws,
            num_groups=optimizer.num_partitions,
            clip=Clip(optimizer.batch_l2_norm_clip),
            noise=optimizer.noise_for(
                expected_batch_size=spec.expected_batch_size,
                num_encoder=num_encoder,
                num_rest=int(sizes.sum()) - num_encoder,
            ),
            variables=variables,
            reached=reached,
            expected_batch_size=spec.expected_batch_size,
            static=self.static_shapes,
        )

    @property
    def takes_persons(self) -> bool:
        """See `Hooks.takes_persons`: groups of a regularizer are of rows."""
        return self.batch_regularizer is None

    @property
    def batch_needs(self) -> BatchNeeds:
        """The needs of both networks per physical batch."""
        needs, layers = super().batch_needs, self.layer_gradients
        density = self._parts.autoencoder.density
        # Variables with a gradient of their own for each record.
        materialized: Sequence[tf.Variable] = ()
        if layers and layers.mapped:
            materialized = self.trainable_variables
        elif density is not None:
            materialized = density.reads
        sizes = [int(np.prod(variable.shape)) * variable.dtype.size for variable in materialized]
        return dataclasses.replace(
            needs,
            bytes_each=needs.bytes_each + 4 * sum(sizes),
            whole=self.batch_regularizer is not None,
        )

    # ------------------------------------------------------------------ checks

    def prepare(self, records: Records) -> None:
        """Creates the variables and checks both networks on zeros."""
        autoencoder = self.autoencoder
        autoencoder.check_y(records.y)
        inputs = (records.x,) if records.y is None else (records.x, records.y)
        _, read = latents.variables_read(
            lambda: autoencoder.check_shapes(*zeros_like(inputs, NUM_SYNTHETIC)),
            self.distribute_strategy,
        )
        refusals.check_tracked(read, [*self.variables, *self._parts.weight.variables])
        self._parts.autoencoder = dataclasses.replace(
            autoencoder, conditional=records.y is not None
        )
        super().prepare(records)

    def check_records(self, records: Records) -> None:
        """See `LayeredModel`."""
        if self.batch_regularizer is not None:
            refusals.check_separate(self._encoder_layers, self._decoder_layers)
        super().check_records(records)

    def check_layers(self, records: dict[str, Structure]) -> LayerGradients | None:
        """See `LayeredModel`."""
        try:
            return super().check_layers(records)
        except UnsupportedLayerError as error:
            reason = check.plainly(error)
            raise ValueError(f"This model cannot be made private as it is. {reason}") from error

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """See `DPModel`."""
        refusals.check_clips(optimizer, self.batch_regularizer)

    # ------------------------------------------------------------------ reports

    @property
    def weight_groups(self) -> dict[str, Sequence[tf.Variable]]:
        """See `DPModel`."""
        parts = {
            "encoder": self._encoder_layers,
            "decoder": self._decoder_layers,
            "prior": self._prior_layers,
        }
        variables = {
            name: [variable for layer in layers for variable in layer.trainable_variables]
            for name, layers in parts.items()
        }
        return {name: weights for name, weights in variables.items() if weights}

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `DPModel`."""
        encoding = (
            "the encoding of a record is that record's own: the guarantee covers the networks, not "
            "their outputs for it."
        )
        optimizer = self.optimizer
        if not isinstance(optimizer, TermwiseOptimizer):
            return (encoding,)
        groups = (
            "each release is the sum of records' clipped gradients and of those of "
            f"{optimizer.num_partitions} random groups, clipped to "
            f"{optimizer.batch_l2_norm_clip:g}; one record moves a group's by up to twice that, "
            "and the price has both."
        )
        return encoding, groups


@dataclasses.dataclass(eq=False)
class _Parts:
    """The parts that are hidden from Keras, which tracks only the networks' layers."""

    autoencoder: Autoencoder
    regularizer: Regularizer | None
    weight: LiveWeight
    saved: dict[str, Any]  # The constructor's arguments.
