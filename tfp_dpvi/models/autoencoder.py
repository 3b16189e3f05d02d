"""The networks of a variational autoencoder, and what they say of records: all of `DPVAE` but its private step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Layer, Structure, in_mode, layers_within, tf, tfp
from tfp_dpvi.data import Records
from tfp_dpvi.divergences import Codes
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import LayerGradients, layers_of
from tfp_dpvi.models import arguments, base, exporting
from tfp_dpvi.models.group_terms import Terms
from tfp_dpvi.models.pairing import as_event
from tfp_dpvi.models.predictive import mean_of

tfd: Any = tfp.distributions

TRIED = 3  # Synthetic records to try a model on; not 1, which would hide a shape that broadcasts.


class Autoencoder(base.DistributionModel):
    """Encoder, decoder and prior. See `DPVAE`."""

    _parts_of_model: Parts
    beta: float
    kl: str

    @property
    def encoder(self) -> Callable[..., tfd.Distribution]:
        """The encoder, as given."""
        return self._parts_of_model.encoder

    @property
    def decoder(self) -> Callable[..., tfd.Distribution]:
        """The decoder, as given."""
        return self._parts_of_model.decoder

    @property
    def prior(self) -> tfd.Distribution:
        """The TFP prior."""
        return self._parts_of_model.prior

    @property
    def batch_regularizer(self) -> Callable[[Codes], tf.Tensor] | None:
        """The term of each group of records, or None."""
        return self._parts_of_model.regularizer

    # ------------------------------------------------------------------ the loss

    def encode(self, x: Structure) -> tfd.Distribution:
        """The latent variables' distribution for a batch of records: a TFP distribution with batch shape [n].

        What it says of a record is that record's own: encode only what you may show.
        """
        return self._distribution("encoder", self.encoder(tf.nest.map_structure(tf.convert_to_tensor, x)))

    def decode(self, z: tf.Tensor) -> tfd.Distribution:
        """The records' distribution for latent values of shape [n, ...]: a TFP distribution with batch shape [n]."""
        return self._distribution("decoder", self.decoder(tf.convert_to_tensor(z, self.dtype)))

    def _distribution(self, part: str, value: tfd.Distribution) -> tfd.Distribution:
        if not isinstance(value, tfd.Distribution):
            raise TypeError(
                f"{part} returned {type(value).__name__}; it must return a TFP distribution. End it in a TFP layer, for "
                "instance tfp.layers.DistributionLambda or tfp.layers.IndependentBernoulli."
            )
        return value

    def _terms(self, x: Structure, key: tf.Tensor, num_draws: int, training: bool = False) -> Terms:
        """Returns the losses of a batch of records, from `num_draws` draws for each."""
        posterior = self._distribution("encoder", in_mode(lambda: self.encoder(x), training=training))
        draws = posterior.sample(num_draws, seed=_random.tfp_seed(key))  # [S, n, ...]
        samples = tf.einsum("sn...->ns...", draws) if num_draws > 1 else tf.expand_dims(draws[0], 1)
        event = samples.shape[2:]
        # All draws of one record side by side: its rows in the decoder follow each other.
        codes = tf.reshape(samples, [-1, *event])
        conditional = self._distribution("decoder", in_mode(lambda: self.decoder(codes), training=training))
        repeated = x if num_draws == 1 else tf.nest.map_structure(lambda part: tf.repeat(part, num_draws, axis=0), x)
        log_prob = conditional.log_prob(as_event(repeated, conditional))
        log_prob = tf.reduce_mean(tf.reshape(log_prob, [-1, num_draws]), axis=1)
        return Terms(-log_prob + self.beta * self._divergence(posterior, draws), samples[:, 0], posterior)

    def _divergence(self, posterior: tfd.Distribution, draws: tf.Tensor) -> tf.Tensor:
        """KL(q(z | x) || prior) of each record."""
        if self.kl != "monte_carlo":
            try:
                return tfd.kl_divergence(posterior, self.prior)
            except NotImplementedError:
                if self.kl == "analytic":
                    raise
        return tf.reduce_mean(posterior.log_prob(draws) - self.prior.log_prob(draws), axis=0)

    def prepare(self, records: Records) -> None:
        """Makes the variables, and tries both networks on zeros."""
        if records.y is not None:
            raise ValueError("y was given, but a DPVAE learns from records x alone: call fit(x).")
        x = tf.nest.map_structure(lambda part: tf.zeros([TRIED, *part.shape[1:]], part.dtype), records.x)
        self._check_shapes(x)
        super().prepare(records)

    def _check_shapes(self, x: Structure) -> None:
        """Runs both networks on zeros: variables are made, and mistakes are named."""
        prior = self.prior
        posterior = self._tried("encoder", lambda: self.encode(x), x)
        if posterior.batch_shape.as_list() != [TRIED] or posterior.event_shape != prior.event_shape:
            raise ValueError(
                f"encoder returned a distribution of batch shape {posterior.batch_shape} and event shape "
                f"{posterior.event_shape} for {TRIED} records; it must be [{TRIED}] and the prior's {prior.event_shape}. "
                "tfd.Independent(..., 1) makes the last batch dimension part of the event."
            )
        if posterior.reparameterization_type != tfd.FULLY_REPARAMETERIZED:
            raise ValueError(
                f"encoder returned {posterior.name!r}, which is not reparameterised: gradients do not pass through its draws. "
                "Use a normal, a logistic or another continuous distribution."
            )
        z = tf.zeros([TRIED, *prior.event_shape], self.dtype)
        conditional = self._tried("decoder", lambda: self.decode(z), z)
        log_prob = self._tried("decoder", lambda: conditional.log_prob(as_event(x, conditional)), z)
        if log_prob.shape.as_list() != [TRIED]:
            raise ValueError(
                f"decoder returned a distribution whose log_prob has shape {log_prob.shape.as_list()} for {TRIED} records; it "
                f"must be [{TRIED}]: one record is one event. Its event shape is {conditional.event_shape}."
            )

    def _tried(self, part: str, function: Callable[[], tf.Tensor], given: Structure) -> tf.Tensor:
        try:
            return function()
        except (*base.LIKELIHOOD_ERRORS, tf.errors.InvalidArgumentError) as error:
            if str(error).startswith((f"{part} returned", "prior")):
                raise
            shapes = tf.nest.map_structure(lambda value: f"{value.dtype.name}{value.shape.as_list()}", given)
            raise ValueError(f"{part} failed on {shapes}: {type(error).__name__}: {error}") from error

    # ------------------------------------------------------------------ what is learned

    def elbo(self, x: Structure, *, num_draws: int = 1, seed: int | None = 0) -> np.ndarray:
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

    def reconstruct(self, x: Structure) -> np.ndarray:
        """Means of the decoder's distribution at the encoder's means: array of the records' shape."""
        return self.predict(x)

    def sample_predictive(self, num: int, *, seed: int | None = None, mean: bool = False) -> Structure:
        """Synthetic records: draws from the prior, decoded. Post-processing of released weights, at no further cost.

        Args:
          num: how many.
          seed: makes the draws repeatable.
          mean: give the decoder's means (grey values of images) in place of draws from its distribution.

        Returns:
          Array of shape [num, ...].
        """
        arguments.check_counts(num=num or 0)
        keys = _random.split(tf.constant(_random.new_key(seed)), 2)
        z = self.prior.sample(num, seed=_random.tfp_seed(keys[0]))
        conditional = self.decode(z)
        drawn = mean_of(conditional) if mean else conditional.sample(seed=_random.tfp_seed(keys[1]))
        return tf.nest.map_structure(lambda part: part.numpy(), drawn)

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `DPModel`."""
        return exporting.of_autoencoder(self, inputs)

    def call(self, inputs: Structure, training: bool | None = None) -> tf.Tensor:
        """Reconstruction: the mean of the decoder's distribution at the mean of the encoder's."""
        del training
        posterior = self._distribution("encoder", self.encoder(inputs))
        return mean_of(self._distribution("decoder", self.decoder(mean_of(posterior))))

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """As in Keras; the prior tells the shape of what is decoded."""
        if getattr(self.encoder, "built", False) and not getattr(self.decoder, "built", True):
            self.decode(self.prior.sample(1, seed=(0, 0)))
        super().summary(*args, **kwargs)

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns negative bounds."""
        del y
        return self._terms(x, tf.constant(_random.new_key(0)), 1).losses

    def _compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """Returns records and their reconstructions."""
        del y
        return x, self(x)


@dataclasses.dataclass(eq=False)
class Parts:
    """Encoder, decoder and prior, out of sight of Keras, which tracks the layers alone."""

    encoder: Callable[..., tfd.Distribution]
    decoder: Callable[..., tfd.Distribution]
    prior: tfd.Distribution
    regularizer: Callable[[Codes], tf.Tensor] | None
    given: dict[str, Any]  # As the constructor was.
    layers: Sequence[Layer]
    tried: list[tuple[Hashable, LayerGradients]] = dataclasses.field(default_factory=list)


def outermost(part: Callable[..., tfd.Distribution]) -> list[Layer]:
    """Returns the layers of a network that are in no other of its layers."""
    layers = layers_of(part)
    inner = {id(sub) for layer in layers for sub in layers_within(layer, include_self=False)}
    return [layer for layer in layers if id(layer) not in inner]
