"""`DPVAE`: private variational autoencoders of Keras layers and TFP distributions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi import serialization
from tfp_dpvi._tf import (
    Layer,
    Optimizer,
    Structure,
    layers_of,
    refuse_keras_3,
    register_keras_serializable,
    tf,
    tfp,
)
from tfp_dpvi.data import Records
from tfp_dpvi.divergences import Codes
from tfp_dpvi.ghost import LayerGradients, UnsupportedLayerError
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec
from tfp_dpvi.models import arguments
from tfp_dpvi.networks import latents
from tfp_dpvi.networks.autoencoder import Autoencoder, Parts, outermost
from tfp_dpvi.networks.group_terms import GroupTerms
from tfp_dpvi.optimizers import TermwiseOptimizer
from tfp_dpvi.sampling import BatchNeeds

tfd: Any = tfp.distributions


@register_keras_serializable("tfp_dpvi", "DPVAE")
class DPVAE(Autoencoder):
    """A variational autoencoder with a latent draw for each record, trained with differential privacy.

    Minimises the mean over records of `-E_q log p(x | z) + beta KL(q(z | x) || prior)`. A record's whole term is clipped, since
    its latent variable is its own. The networks' weights are released; draws and posteriors of records are not. After
    `fit(x, y)` it is a model of p(x | y): encoder and decoder, and the prior if it is a function, then also take y. Keras models
    and layers get one list, `encoder([x, y])`, plain functions two arguments.

    `docs/guides/vae_researcher.md` shows both, learned priors and two levels of latent variables.

    Args:
      encoder: Keras model, layer, or function of layers, `x -> TFP distribution` with batch shape [n] and the prior's event
        shape, reparameterised; or, as for `decoder` and `prior`, a function without arguments that builds it (to save it).
      decoder: likewise `z -> TFP distribution` of records: `log_prob(x)` has shape [n] for z of shape [n, ...].
      prior: TFP distribution of one record's latent variable; its trainable variables are learned by clipped gradients. Or
        `dpvi.divergences.VampPrior`; or a Keras model, layer or function, `y -> TFP distribution` with batch shape [n].
      beta: weight of the KL term (Higgins et al. 2017).
      num_draws: latent draws for each record and step; the loss is averaged over them before the clip.
      batch_regularizer: `Codes -> scalar`, a term of each random group of records, such as those of
        `tfp_dpvi.divergences`; needs a `TermwiseDPKeras` optimizer.
      regularizer_weight: weight of this term.
      num_prior_samples: number of draws from the prior for the regularizer, default the expected size of a group.
      gradients: "ghost" computes norms and sums from layers' inputs and output gradients, "vectorized" materializes every
        record's gradient; "auto" is "ghost". All give the same results up to rounding.
      kl: "analytic", "monte_carlo" (at the same draws), or "auto": analytic if TFP has it, Monte Carlo for a prior with
        trainable variables.
      seed: see `DPModel`.
      name: name of the model.

    #### Formal guarantee

    As for `DPModel`, if a record's loss depends on no other record. Known layers that mix records are refused, and every model
    is checked once after `compile`, on synthetic records against TensorFlow's own gradients, before privacy is spent.
    """

    def __init__(
        self,
        encoder: Callable[..., Any],
        decoder: Callable[..., Any],
        prior: tfd.Distribution | Callable[[], tfd.Distribution],
        *,
        beta: float = 1.0,
        num_draws: int = 1,
        batch_regularizer: Callable[[Codes], tf.Tensor] | None = None,
        regularizer_weight: float = 1.0,
        num_prior_samples: int | None = None,
        gradients: str = "auto",
        kl: str = "auto",
        seed: int | None = None,
        name: str | None = None,
    ) -> None:
        given = {
            "encoder": encoder,
            "decoder": decoder,
            "prior": prior,
            "batch_regularizer": batch_regularizer,
        }
        encoder, decoder = (
            part() if serialization.is_factory(part) else part for part in (encoder, decoder)
        )
        parts = {"encoder": encoder, "decoder": decoder}
        parts |= {} if batch_regularizer is None else {"batch_regularizer": batch_regularizer}
        for argument, value in parts.items():
            refuse_keras_3(argument, value)
            if not callable(value):
                raise TypeError(
                    f"{argument} must be a Keras model or another callable, got "
                    f"{check.shown(value)}."
                )
        arguments.check_counts(num_draws=num_draws or 0, num_prior_samples=num_prior_samples)
        beta = check.non_negative("beta", beta)
        regularizer_weight = check.non_negative("regularizer_weight", regularizer_weight)
        check.one_of("gradients", gradients, ("auto", "ghost", "vectorized"))
        check.one_of("kl", kl, ("auto", "analytic", "monte_carlo"))
        prior, learned = latents.made_of(prior, encoder)
        fixed = isinstance(prior, tfd.Distribution) and not learned
        if batch_regularizer is not None and not fixed:
            raise ValueError(
                "batch_regularizer compares codes with one fixed prior, but this prior is learned or depends on y: pass a TFP "
                "distribution without trainable variables."
            )
        if learned and kl == "analytic":
            raise ValueError("kl='analytic' is not available for a learned prior: leave it out.")
        super().__init__(seed=seed, name=name, dtype=latents.float_type(prior))
        others = [*layers_of(encoder), *layers_of(decoder)]
        density = latents.LearnedDensity(prior, learned, others) if learned else None
        self._parts_of_model = Parts(encoder, decoder, prior, density, batch_regularizer, given)
        # Tracked by Keras, so that weights are saved for all kinds of callables.
        self._encoder_layers, self._decoder_layers = outermost(encoder), outermost(decoder)
        self._prior_layers = [density] if density else [] if fixed else outermost(prior)
        self.beta, self.num_draws, self.kl, self.gradients = beta, num_draws, kl, gradients
        self.regularizer_weight, self.num_prior_samples = regularizer_weight, num_prior_samples

    def get_config(self) -> dict[str, Any]:
        """See `DPModel.get_config`; parts must be registered functions or Keras models without Lambda layers."""
        parts = {
            name: serialization.encode(part, name)
            for name, part in self._parts_of_model.given.items()
        }
        names = ("beta", "num_draws", "regularizer_weight", "num_prior_samples", "gradients", "kl")
        return {
            **super().get_config(),
            **{name: getattr(self, name) for name in names},
            "parts": parts,
        }

    # ------------------------------------------------------------------ the step

    @property
    def _layers_watched(self) -> Sequence[Layer]:
        return self._parts_of_model.layers

    @property
    def _settings(self) -> Hashable:
        return self.gradients, self.num_draws, self.beta, self.kl

    def _batch_losses(
        self, records: dict[str, Structure], key: tf.Tensor, training: bool
    ) -> tf.Tensor:
        return self._terms(
            records["x"], key, self.num_draws, training=training, y=records.get("y")
        ).losses

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient of records' bounds, and of groups' terms if there is a `batch_regularizer`."""
        general, layers = super().clipped_gradient(spec), self._layer_gradients
        if self.batch_regularizer is None or layers is None:
            return general
        groups = GroupTerms(self, spec)

        def draw(key: tf.Tensor) -> StepGradient:
            summed = functools.partial(groups.clipped_sum, layers, general.clip)
            return dataclasses.replace(general.draw(key), clipped_sum=summed)

        return dataclasses.replace(
            general,
            draw=draw,
            sensitivity=groups.noise.sensitivity,
            noise_scales=groups.noise_scales,
            identity=(general.identity, groups.identity),
        )

    @property
    def batch_needs(self) -> BatchNeeds:
        """The needs of both networks per physical batch."""
        needs, layers, density = (
            super().batch_needs,
            self._layer_gradients,
            self._parts_of_model.density,
        )
        mapped = (
            self.trainable_variables
            if layers and layers.mapped
            else density.reads
            if density
            else ()
        )
        size = needs.bytes_each + 4 * sum(int(np.prod(v.shape)) * v.dtype.size for v in mapped)
        return dataclasses.replace(needs, bytes_each=size, whole=self.batch_regularizer is not None)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """See `DPModel`."""
        termwise = isinstance(optimizer, TermwiseOptimizer)
        if termwise and self.batch_regularizer is None:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} has batch_l2_norm_clip={optimizer.batch_l2_norm_clip} for a batch-wise "
                "term, but this model has none: use DPVAE(batch_regularizer=...), or a DPKeras optimizer."
            )
        if self.batch_regularizer is not None and not termwise:
            raise ValueError(
                f"optimizer={type(optimizer).__name__} clips by record: a batch_regularizer's sensitivity would be O(B), B being the "
                "batch size, instead of O(1). Use dpvi.optimizers.TermwiseDPKerasAdamOptimizer, which clips it by groups."
            )

    # ------------------------------------------------------------------ checks

    @property
    def weight_groups(self) -> dict[str, Sequence[tf.Variable]]:
        """See `DPModel`."""
        parts = {
            "encoder": self._encoder_layers,
            "decoder": self._decoder_layers,
            "prior": self._prior_layers,
        }
        found = {
            name: [v for layer in layers for v in layer.trainable_variables]
            for name, layers in parts.items()
        }
        return {name: variables for name, variables in found.items() if variables}

    @property
    def caveats(self) -> tuple[str, ...]:
        """See `DPModel`."""
        own = "the encoding of a record is that record's own: the guarantee covers the networks, not their outputs for it."
        optimizer = self.optimizer
        if not isinstance(optimizer, TermwiseOptimizer):
            return (own,)
        return own, (
            f"each release is the sum of records' clipped gradients and of those of {optimizer.num_partitions} random groups, "
            f"clipped to {optimizer.batch_l2_norm_clip:g}; one record moves a group's by up to twice that, and the price has both."
        )

    def check_records(self, records: Records) -> None:
        """See `LayeredModel`."""
        ours, theirs = (
            {id(layer) for layer in layers}
            for layers in (self._encoder_layers, self._decoder_layers)
        )
        if self.batch_regularizer is not None and ours & theirs:
            raise ValueError(
                "encoder and decoder share layers, which a batch_regularizer does not allow: its noise depends on the parameters "
                "that its gradient reaches. Use separate layers for each."
            )
        super().check_records(records)

    def _trial(self, made: dict[str, Structure]) -> LayerGradients | None:
        try:
            return super()._trial(made)
        except UnsupportedLayerError as error:
            raise ValueError(f"This model cannot be made private as it is. {error}") from error
