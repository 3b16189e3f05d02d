"""`Autoencoder`: encoder, decoder and prior of a variational autoencoder as one frozen value."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Layer, Structure, function_of_model, layers_of, tf, tfd
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, as_event
from tfp_dpvi.bayes.predictive import mean_of
from tfp_dpvi.networks.latents import LearnedDensity, Network, Prior, apply_network

#: Records whose bounds are computed in one call.
_ROWS_PER_CALL = 1024


@dataclasses.dataclass(frozen=True)
class RecordTerms:
    """The terms of a batch of n records in the loss of an autoencoder.

    Attributes:
      losses: float [n], the negative evidence lower bounds, in nats.
      samples: float [n, ...], the first draw of each record's latent variable.
      posterior: TFP distribution of the latent variables, with batch shape [n].
    """

    losses: tf.Tensor
    samples: tf.Tensor
    posterior: tfd.Distribution


@dataclasses.dataclass(frozen=True, eq=False)
class Autoencoder:
    """The networks of a variational autoencoder and the functions that they define.

    It holds no record, and nothing of optimizers and privacy. `DPVAE` trains it.

    Args:
      encoder: `x -> TFP distribution` of latent variables, with batch shape [n].
      decoder: `z -> TFP distribution` of records, with batch shape [n].
      prior: TFP distribution of one record's latent variable, or a function of y that returns one
        with batch shape [n].
      density: The prior's log density as a layer, for a prior with trainable variables; else None.
      beta: Weight of the KL term, or a function that returns it as a tensor.
      kl: "analytic", "monte_carlo", or "auto", which is analytic where TFP has the divergence.
      conditional: Whether records have a y, or None before the first records are known.
      dtype: Float type of the latent variables.

    ```python
    >>> from tfp_dpvi._tf import tf, tfd
    >>> normal = lambda loc: tfd.Independent(tfd.Normal(loc, 1.0), 1)
    >>> autoencoder = Autoencoder(encoder=normal, decoder=normal, prior=normal(tf.zeros([2])))
    >>> x = tf.zeros([3, 2])
    >>> autoencoder.check_shapes(x)
    >>> autoencoder.reconstruct(x).shape
    TensorShape([3, 2])
    >>> autoencoder.terms(x, key=tf.constant([1, 2], tf.int64)).losses.shape
    TensorShape([3])

    ```
    """

    encoder: Network
    decoder: Network
    prior: Prior
    density: LearnedDensity | None = None
    beta: float | Callable[[], tf.Tensor] = 1.0
    kl: str = "auto"
    conditional: bool | None = None
    dtype: str = "float32"

    @property
    def layers(self) -> list[Layer]:
        """All layers, including those that others create on their first call, as attention does."""
        parts = [self.encoder, self.decoder, self.prior]
        parts += [] if self.density is None else [self.density]
        return list({id(layer): layer for part in parts for layer in layers_of(part)}.values())

    # ------------------------------------------------------------------ distributions

    def encode(self, x: Structure, y: Structure | None = None) -> tfd.Distribution:
        """Returns the distribution of records' latent variables, with batch shape [n].

        Args:
          x: A batch of n records.
          y: What the records are conditioned on, if the model is of p(x | y).

        Raises:
          ValueError: y is missing, or passed to a model without y.
          TypeError: The encoder returned something else.
        """
        self.check_y(y)
        x = tf.nest.map_structure(tf.convert_to_tensor, x)
        return _distribution("encoder", apply_network(self.encoder, x, _tensors(y)))

    def decode(self, z: tf.Tensor, y: Structure | None = None) -> tfd.Distribution:
        """Returns the distribution of records given their latent variables, with batch shape [n].

        Args:
          z: float [n, ...], latent values.
          y: As for `encode`.

        Raises:
          ValueError: y is missing, or passed to a model without y.
          TypeError: The decoder returned something else.
        """
        self.check_y(y)
        z = tf.convert_to_tensor(z, self.dtype)
        return _distribution("decoder", apply_network(self.decoder, z, _tensors(y)))

    def prior_at(self, y: Structure | None, training: bool = False) -> tfd.Distribution:
        """Returns the prior of a batch of records.

        Args:
          y: What the n records are conditioned on, or None.
          training: Whether a network of y runs in training mode.

        Returns:
          A TFP distribution with batch shape [n] if the prior depends on y, else [].

        Raises:
          ValueError: The prior is a function of y, but y is missing.
          TypeError: The function returned something else.
        """
        if isinstance(self.prior, tfd.Distribution):
            return self.prior
        if y is None:
            raise ValueError(
                f"prior={self.prior!r} is a function of y, but y is missing: call fit(x, y)."
            )
        return _distribution("prior", apply_network(self.prior, y, training=training))

    def reconstruct(self, x: Structure, y: Structure | None = None) -> Structure:
        """Returns the means of the decoder's distribution at the encoder's means.

        Args:
          x: A batch of n records.
          y: As for `encode`.
        """
        return mean_of(self.decode(mean_of(self.encode(x, y)), y))

    def synthetic_distribution(
        self, num: tf.Tensor | int, y: Structure | None, seed: tf.Tensor
    ) -> tfd.Distribution:
        """Returns the distribution of synthetic records at draws from the prior.

        Args:
          num: Number of records.
          y: What to condition on, with one row for each record or one for all; or None.
          seed: int32 [2], of the draws.

        Returns:
          A TFP distribution with batch shape [num].
        """
        if y is not None:
            y = tf.nest.map_structure(lambda part: tf.broadcast_to(part, [num, *part.shape[1:]]), y)
        prior = self.prior_at(y)
        z = prior.sample(seed=seed) if prior.batch_shape.rank else prior.sample(num, seed=seed)
        return self.decode(z, y)

    # ------------------------------------------------------------------ the loss

    def terms(
        self,
        x: Structure,
        key: tf.Tensor,
        num_draws: int = 1,
        *,
        y: Structure | None = None,
        training: bool = False,
    ) -> RecordTerms:
        """Returns the losses of a batch of records, with the draws that they use.

        Args:
          x: A batch of n records.
          key: int64 [2], determines the draws.
          num_draws: Latent draws of each record, over which its loss is averaged.
          y: What the records are conditioned on, or None.
          training: Whether the networks run in training mode (dropout).
        """
        posterior = _distribution("encoder", apply_network(self.encoder, x, y, training))
        draws = posterior.sample(num_draws, seed=_random.tfp_seed(key))  # [S, n, ...]
        samples = tf.einsum("sn...->ns...", draws) if num_draws > 1 else tf.expand_dims(draws[0], 1)

        # The draws of a record are consecutive rows of the decoder's input.
        codes = tf.reshape(samples, [-1, *samples.shape[2:]])
        x_of_rows, y_of_rows = (x, y) if num_draws == 1 else _repeat_rows((x, y), num_draws)
        conditional = _distribution(
            "decoder", apply_network(self.decoder, codes, y_of_rows, training)
        )
        log_prob = conditional.log_prob(as_event(x_of_rows, conditional))
        log_prob = tf.reduce_mean(tf.reshape(log_prob, [-1, num_draws]), axis=1)

        if self.density is None:
            divergence = self._divergence(posterior, draws, self.prior_at(y, training))
        else:
            log_prior = tf.reshape(self.density(codes), [-1, num_draws])
            log_posterior = tf.reduce_mean(posterior.log_prob(draws), axis=0)
            divergence = log_posterior - tf.reduce_mean(log_prior, axis=1)
        beta = tf.cast(self.beta() if callable(self.beta) else self.beta, divergence.dtype)
        return RecordTerms(-log_prob + beta * divergence, samples[:, 0], posterior)

    def _divergence(
        self, posterior: tfd.Distribution, draws: tf.Tensor, prior: tfd.Distribution
    ) -> tf.Tensor:
        """Returns KL(q(z | x) || prior) of each record, shape [n]."""
        if self.kl != "monte_carlo":
            try:
                return tfd.kl_divergence(posterior, prior)
            except NotImplementedError:
                if self.kl == "analytic":
                    raise
        return tf.reduce_mean(posterior.log_prob(draws) - prior.log_prob(draws), axis=0)

    def elbo(
        self, key: tf.Tensor, num_draws: int, x: Structure, y: Structure | None = None
    ) -> np.ndarray:
        """Returns evidence lower bounds of any number of records, float [n], in nats.

        Args:
          key: int64 [2], determines the draws.
          num_draws: Latent draws of each record, over which its bound is averaged.
          x: n records, in tensors.
          y: What the records are conditioned on, or None.
        """
        records = (x,) if y is None else (x, y)
        num = int(tf.nest.flatten(records)[0].shape[0])

        def bounds(rows: tuple[Structure, ...], key: tf.Tensor) -> tf.Tensor:
            x, y = rows if len(rows) == 2 else (rows[0], None)
            return -self.terms(x, key, num_draws, y=y).losses

        compiled = function_of_model(bounds, reduce_retracing=True)

        def bounds_from(start: int) -> np.ndarray:
            rows = tf.nest.map_structure(lambda part: part[start : start + _ROWS_PER_CALL], records)
            return compiled(rows, _random.fold_in(key, start)).numpy()

        return np.concatenate([bounds_from(start) for start in range(0, num, _ROWS_PER_CALL)])

    # ------------------------------------------------------------------ checks

    def check_y(self, y: Structure | None) -> None:
        """Raises `ValueError` if y is missing, or passed to a model that was fitted without y."""
        if self.conditional and y is None:
            raise ValueError(
                "y is missing: this model was fitted with y. Pass y=, as in fit(x, y)."
            )
        if self.conditional is False and y is not None:
            raise ValueError("y was passed, but this model was fitted without y: leave it out.")

    def check_shapes(self, x: Structure, y: Structure | None = None) -> None:
        """Runs the networks, which creates their variables, and checks the shapes of their results.

        Args:
          x: A batch of n records of zeros, for n above 1: one row would hide a shape that
            broadcasts.
          y: As for `encode`.

        Raises:
          ValueError: A network fails, or its distribution has another shape.
          TypeError: A network returned something else.
        """
        num = int(tf.nest.flatten(x)[0].shape[0])
        prior = self._checked_prior(num, y)
        self._check_posterior(num, prior, x, y)
        self._check_log_prob(num, prior, x, y)

    def _checked_prior(self, num: int, y: Structure | None) -> tfd.Distribution:
        prior = _result_of("prior", lambda: self.prior_at(y), y)
        if prior is not self.prior and prior.batch_shape.as_list() != [num]:
            raise ValueError(
                f"prior returned a distribution of batch shape {prior.batch_shape} for {num} "
                f"records; it must be [{num}]: one for each row of y. "
                "tfd.Independent(..., 1) makes the last batch dimension part of the event."
            )
        return prior

    def _check_posterior(
        self, num: int, prior: tfd.Distribution, x: Structure, y: Structure | None
    ) -> None:
        posterior = _result_of("encoder", lambda: self.encode(x, y), x, y)
        if posterior.batch_shape.as_list() != [num] or posterior.event_shape != prior.event_shape:
            raise ValueError(
                f"encoder returned a distribution of batch shape {posterior.batch_shape} and event "
                f"shape {posterior.event_shape} for {num} records; it must be [{num}] and the "
                f"prior's {prior.event_shape}. "
                "tfd.Independent(..., 1) makes the last batch dimension part of the event."
            )
        if posterior.reparameterization_type != tfd.FULLY_REPARAMETERIZED:
            raise ValueError(
                f"encoder returned {posterior.name!r}, which is not reparameterised: use a normal "
                "or a logistic."
            )

    def _check_log_prob(
        self, num: int, prior: tfd.Distribution, x: Structure, y: Structure | None
    ) -> None:
        z = tf.zeros([num, *prior.event_shape], self.dtype)
        conditional = _result_of("decoder", lambda: self.decode(z, y), z, y)
        log_prob = _result_of(
            "decoder", lambda: conditional.log_prob(as_event(x, conditional)), z, y
        )
        if log_prob.shape.as_list() != [num]:
            raise ValueError(
                f"decoder returned a distribution whose log_prob has shape "
                f"{log_prob.shape.as_list()} for {num} records; it must be [{num}]: one record is "
                f"one event. Its event shape is {conditional.event_shape}."
            )


def _distribution(part: str, value: tfd.Distribution) -> tfd.Distribution:
    if not isinstance(value, tfd.Distribution):
        raise TypeError(
            f"{part} returned {type(value).__name__}; it must return a TFP distribution. End it in "
            "a TFP layer."
        )
    return value


def _result_of(
    part: str, function: Callable[[], tf.Tensor], first: Structure, y: Structure | None = None
) -> tf.Tensor:
    """Returns a network's result; errors name the part and the shapes of its inputs."""
    try:
        return function()
    except (*LIKELIHOOD_ERRORS, tf.errors.InvalidArgumentError) as error:
        if str(error).startswith((f"{part} returned", "prior")):
            raise
        shapes = tf.nest.map_structure(
            lambda value: f"{value.dtype.name}{value.shape.as_list()}",
            first if y is None else (first, y),
        )
        pair = "(x, y)" if part == "encoder" else "(z, y)"
        hint = f" With y, the {part} takes {pair}; for records without y call fit(x)."
        raise ValueError(
            f"{part} failed on {shapes}: {type(error).__name__}: {check.plainly(error)}"
            f"{'' if y is None else hint}"
        ) from error


def _repeat_rows(structure: Structure, num: int) -> Structure:
    return tf.nest.map_structure(
        lambda part: None if part is None else tf.repeat(part, num, axis=0), structure
    )


def _tensors(y: Structure | None) -> Structure | None:
    return None if y is None else tf.nest.map_structure(tf.convert_to_tensor, y)
