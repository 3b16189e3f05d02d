"""The networks of a variational autoencoder and its functions: all of `DPVAE` except the private step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import (
    Layer,
    Structure,
    function_of_model,
    layers_of,
    layers_within,
    tf,
    tfp,
    without_values,
)
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, as_event
from tfp_dpvi.bayes.predictive import mean_of
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.divergences import Codes
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.models import arguments
from tfp_dpvi.networks.exporting import of_autoencoder
from tfp_dpvi.networks.group_terms import Terms
from tfp_dpvi.networks.latents import LearnedDensity, Prior, called, read_by
from tfp_dpvi.networks.layered import NUM_SYNTHETIC, LayeredModel

tfd: Any = tfp.distributions


class Autoencoder(LayeredModel):
    """Encoder, decoder and prior. See `DPVAE`."""

    _parts_of_model: Parts
    beta: float
    kl: str

    @property
    def encoder(self) -> Callable[..., tfd.Distribution]:
        """The encoder that was passed to the constructor."""
        return self._parts_of_model.encoder

    @property
    def decoder(self) -> Callable[..., tfd.Distribution]:
        """The decoder that was passed to the constructor."""
        return self._parts_of_model.decoder

    @property
    def prior(self) -> Prior:
        """The TFP prior, or a function of y that returns it."""
        return self._parts_of_model.prior

    @property
    def batch_regularizer(self) -> Callable[[Codes], tf.Tensor] | None:
        """The term of each group of records, or None."""
        return self._parts_of_model.regularizer

    # ------------------------------------------------------------------ the loss

    def encode(self, x: Structure, y: Structure | None = None) -> tfd.Distribution:
        """Returns the latent variables' distribution for a batch of records: a TFP distribution with batch shape [n].

        The encoding of a private record is *not private*.
        """
        self._check_y(y)
        x, y = tf.nest.map_structure(tf.convert_to_tensor, x), _tensors(y)
        return self._distribution("encoder", called(self.encoder, x, y))

    def decode(self, z: tf.Tensor, y: Structure | None = None) -> tfd.Distribution:
        """Returns the records' distribution for latent values of shape [n, ...]: a TFP distribution with batch shape [n]."""
        self._check_y(y)
        return self._distribution(
            "decoder", called(self.decoder, tf.convert_to_tensor(z, self.dtype), _tensors(y))
        )

    def _prior_given(self, y: Structure | None, training: bool = False) -> tfd.Distribution:
        """Returns the prior of a batch of records: with batch shape [n] if it depends on y, else []."""
        if isinstance(self.prior, tfd.Distribution):
            return self.prior
        if y is None:
            raise ValueError(
                f"prior={self.prior!r} is a function of y, but y is missing: call fit(x, y)."
            )
        return self._distribution("prior", called(self.prior, y, training=training))

    def _check_y(self, y: Structure | None) -> None:
        """Raises if y is missing, or passed to a model that was fitted without y."""
        conditional = self._parts_of_model.conditional
        if conditional and y is None:
            raise ValueError(
                "y is missing: this model was fitted with y. Pass y=, as in fit(x, y)."
            )
        if conditional is False and y is not None:
            raise ValueError("y was passed, but this model was fitted without y: leave it out.")

    def _distribution(self, part: str, value: tfd.Distribution) -> tfd.Distribution:
        if not isinstance(value, tfd.Distribution):
            raise TypeError(
                f"{part} returned {type(value).__name__}; it must return a TFP distribution. End it in a TFP layer."
            )
        return value

    def _terms(
        self,
        x: Structure,
        key: tf.Tensor,
        num_draws: int,
        training: bool = False,
        y: Structure | None = None,
    ) -> Terms:
        """Returns the losses of a batch of records, from `num_draws` draws per record."""
        posterior = self._distribution("encoder", called(self.encoder, x, y, training))
        draws = posterior.sample(num_draws, seed=_random.tfp_seed(key))  # [S, n, ...]
        samples = tf.einsum("sn...->ns...", draws) if num_draws > 1 else tf.expand_dims(draws[0], 1)
        # A record's draws are consecutive rows of the decoder's input.
        codes = tf.reshape(samples, [-1, *samples.shape[2:]])
        x_each, y_each = (x, y) if num_draws == 1 else _repeated((x, y), num_draws)
        conditional = self._distribution("decoder", called(self.decoder, codes, y_each, training))
        log_prob = conditional.log_prob(as_event(x_each, conditional))
        log_prob = tf.reduce_mean(tf.reshape(log_prob, [-1, num_draws]), axis=1)
        if (density := self._parts_of_model.density) is None:
            divergence = self._divergence(posterior, draws, self._prior_given(y, training))
        else:
            log_prior = tf.reshape(density(codes), [-1, num_draws])
            divergence = tf.reduce_mean(posterior.log_prob(draws), axis=0) - tf.reduce_mean(
                log_prior, axis=1
            )
        return Terms(-log_prob + self.beta * divergence, samples[:, 0], posterior)

    def _divergence(
        self, posterior: tfd.Distribution, draws: tf.Tensor, prior: tfd.Distribution
    ) -> tf.Tensor:
        """Returns KL(q(z | x) || prior) of each record."""
        if self.kl != "monte_carlo":
            try:
                return tfd.kl_divergence(posterior, prior)
            except NotImplementedError:
                if self.kl == "analytic":
                    raise
        return tf.reduce_mean(posterior.log_prob(draws) - prior.log_prob(draws), axis=0)

    def prepare(self, records: Records) -> None:
        """Creates the variables and checks both networks on zeros."""
        self._check_y(records.y)
        given = (records.x,) if records.y is None else (records.x, records.y)
        _, read = read_by(
            lambda: self._check_shapes(*zeros_like(given, NUM_SYNTHETIC)),
            self.distribute_strategy,
        )
        held = {variable.ref() for variable in self.variables}
        if loose := [variable.name for variable in read if variable.ref() not in held]:
            raise ValueError(
                f"A network reads the variable {loose[0]}, which belongs to none of its layers and would not be learned. Create it "
                "with a layer's add_weight, or with trainable=False."
            )
        self._parts_of_model.conditional = records.y is not None
        super().prepare(records)

    def _check_shapes(self, x: Structure, y: Structure | None = None) -> None:
        """Runs the networks on zeros, which creates variables, and checks the results' shapes."""
        prior = self._result_of("prior", lambda: self._prior_given(y), y)
        if prior is not self.prior and prior.batch_shape.as_list() != [NUM_SYNTHETIC]:
            raise ValueError(
                f"prior returned a distribution of batch shape {prior.batch_shape} for {NUM_SYNTHETIC} records; it must be [{NUM_SYNTHETIC}]: one "
                "for each row of y. tfd.Independent(..., 1) makes the last batch dimension part of the event."
            )
        posterior = self._result_of("encoder", lambda: self.encode(x, y), x, y)
        if (
            posterior.batch_shape.as_list() != [NUM_SYNTHETIC]
            or posterior.event_shape != prior.event_shape
        ):
            raise ValueError(
                f"encoder returned a distribution of batch shape {posterior.batch_shape} and event shape "
                f"{posterior.event_shape} for {NUM_SYNTHETIC} records; it must be [{NUM_SYNTHETIC}] and the prior's {prior.event_shape}. "
                "tfd.Independent(..., 1) makes the last batch dimension part of the event."
            )
        if posterior.reparameterization_type != tfd.FULLY_REPARAMETERIZED:
            raise ValueError(
                f"encoder returned {posterior.name!r}, which is not reparameterised: use a normal or a logistic."
            )
        z = tf.zeros([NUM_SYNTHETIC, *prior.event_shape], self.dtype)
        conditional = self._result_of("decoder", lambda: self.decode(z, y), z, y)
        log_prob = self._result_of(
            "decoder", lambda: conditional.log_prob(as_event(x, conditional)), z, y
        )
        if log_prob.shape.as_list() != [NUM_SYNTHETIC]:
            raise ValueError(
                f"decoder returned a distribution whose log_prob has shape {log_prob.shape.as_list()} for {NUM_SYNTHETIC} records; it "
                f"must be [{NUM_SYNTHETIC}]: one record is one event. Its event shape is {conditional.event_shape}."
            )

    def _result_of(
        self,
        part: str,
        function: Callable[[], tf.Tensor],
        given: Structure,
        y: Structure | None = None,
    ) -> tf.Tensor:
        try:
            return function()
        except (*LIKELIHOOD_ERRORS, tf.errors.InvalidArgumentError) as error:
            if str(error).startswith((f"{part} returned", "prior")):
                raise
            given = given if y is None else (given, y)
            shapes = tf.nest.map_structure(
                lambda value: f"{value.dtype.name}{value.shape.as_list()}", given
            )
            pair = "(x, y)" if part == "encoder" else "(z, y)"
            more = (
                f" With y, the {part} takes {pair}; for records without y call fit(x)."
                if y is not None
                else ""
            )
            raise ValueError(
                f"{part} failed on {shapes}: {type(error).__name__}: {error}{more}"
            ) from error

    # ------------------------------------------------------------------ the learned model

    def elbo(
        self, x: Structure, y: Structure | None = None, *, num_draws: int = 1, seed: int | None = 0
    ) -> np.ndarray:
        """Returns evidence lower bounds of records, a float array of shape [n] (in nats, with the model's beta).

        Exact values of these records, from `num_draws` latent draws: *not private* unless the records are public.
        """
        key = tf.constant(_random.new_key(seed))
        self._check_y(y)
        inputs = self.as_inputs((x,) if y is None else (x, y))
        num = int(tf.nest.flatten(inputs)[0].shape[0])

        def bounds(part: tuple[Structure, ...], key: tf.Tensor) -> tf.Tensor:
            return -self._terms(part[0], key, num_draws, y=part[1] if part[1:] else None).losses

        one = function_of_model(bounds, reduce_retracing=True)
        starts = range(0, num, 1024)
        parts = [
            tf.nest.map_structure(lambda value, at=at: value[at : at + 1024], inputs)
            for at in starts
        ]
        pairs = zip(parts, starts, strict=True)
        with without_values("elbo failed"):
            return np.concatenate(
                [one(part, _random.fold_in(key, start)).numpy() for part, start in pairs]
            )

    def predict(
        self,
        x: Structure,
        batch_size: int | None = None,
        verbose: int | str = 0,
        *,
        y: Structure | None = None,
        **kwargs: Any,
    ) -> np.ndarray:
        """Returns reconstructions: see `reconstruct`, and `DPVI.predict` for the other arguments."""
        self._check_y(y)
        return super().predict(x if y is None else (x, y), batch_size, verbose, **kwargs)

    def reconstruct(self, x: Structure, y: Structure | None = None) -> np.ndarray:
        """Returns means of the decoder's distribution at the encoder's means: array of the records' shape."""
        return self.predict(x, y=y)

    def sample_predictive(
        self, num: int, *, y: Structure | None = None, seed: int | None = None, mean: bool = False
    ) -> Structure:
        """Returns synthetic records: decoded draws from the prior. Post-processing of released weights, at no further cost.

        Array of shape [num, ...]. A model that was fitted with y takes y to condition on: one row for each record, or one for
        all. `mean` returns the decoder's means (grey values of images) instead of draws from its distribution.
        """
        arguments.check_counts(num=num or 0)
        self._check_y(y)
        if y is not None:
            y = self.as_inputs(y, "y")
            if (rows := int(tf.nest.flatten(y)[0].shape[0])) not in (1, num):
                raise ValueError(
                    f"y has {rows} rows, but num={num}: pass one row for each record, or one for all."
                )
        keys = _random.split(tf.constant(_random.new_key(seed)), 2)
        conditional = self._generated(num, y, _random.tfp_seed(keys[0]))
        drawn = mean_of(conditional) if mean else conditional.sample(seed=_random.tfp_seed(keys[1]))
        return tf.nest.map_structure(lambda part: part.numpy(), drawn)

    def _generated(
        self, num: tf.Tensor | int, y: Structure | None, seed: tf.Tensor
    ) -> tfd.Distribution:
        """Returns the distribution of `num` synthetic records, at draws from the prior."""
        if y is not None:
            y = tf.nest.map_structure(lambda part: tf.broadcast_to(part, [num, *part.shape[1:]]), y)
        prior = self._prior_given(y)
        return self.decode(prior.sample(*(() if prior.batch_shape.rank else (num,)), seed=seed), y)

    def export_functions(self, inputs: dict[str, tf.TensorSpec]) -> list[ExportedFunction]:
        """See `DPModel`."""
        return of_autoencoder(self, inputs)

    def call(self, inputs: Structure, training: bool | None = None) -> tf.Tensor:
        """Returns reconstructions: means of the decoder's distribution at the encoder's means."""
        del training
        x, y = inputs if self._parts_of_model.conditional else (inputs, None)
        return mean_of(self.decode(mean_of(self.encode(x, y)), y))

    def summary(self, *args: Any, **kwargs: Any) -> None:
        """Prints Keras's summary; the prior determines the decoder's input shape."""
        fixed = isinstance(self.prior, tfd.Distribution)
        if (
            fixed
            and getattr(self.encoder, "built", False)
            and not getattr(self.decoder, "built", True)
        ):
            self.decode(self.prior.sample(1, seed=(0, 0)))
        super().summary(*args, **kwargs)

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns negative bounds."""
        y = y if self._parts_of_model.conditional else None
        self._check_y(y)
        return self._terms(x, tf.constant(_random.new_key(0)), 1, y=y).losses

    def compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """See `Hooks.compared`: records and their reconstructions."""
        return x, self((x, y) if self._parts_of_model.conditional else x)


@dataclasses.dataclass(eq=False)
class Parts:
    """The networks, hidden from Keras, which tracks only their layers."""

    encoder: Callable[..., tfd.Distribution]
    decoder: Callable[..., tfd.Distribution]
    prior: Prior
    density: LearnedDensity | None  # For a prior with trainable variables.
    regularizer: Callable[[Codes], tf.Tensor] | None
    given: dict[str, Any]  # The constructor's arguments.
    conditional: bool | None = None  # Whether records have a y; None before the first.

    @property
    def layers(self) -> list[Layer]:
        """Returns all layers, including those that others create on their first call, as attention does."""
        parts = [self.encoder, self.decoder, self.prior, *([self.density] if self.density else [])]
        return list({id(layer): layer for part in parts for layer in layers_of(part)}.values())


def _repeated(structure: Structure, num: int) -> Structure:
    return tf.nest.map_structure(
        lambda part: None if part is None else tf.repeat(part, num, axis=0), structure
    )


def _tensors(y: Structure | None) -> Structure | None:
    return None if y is None else tf.nest.map_structure(tf.convert_to_tensor, y)


def outermost(part: Callable[..., tfd.Distribution]) -> list[Layer]:
    """Returns the layers of a network that are no other layer's sublayers."""
    layers = layers_of(part)
    inner = {id(sub) for layer in layers for sub in layers_within(layer, include_self=False)}
    return [layer for layer in layers if id(layer) not in inner]
