"""Priors that impose structure on the codes.

All but `VampPrior` have public constants as parameters (contract 2).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Derived, Structure, tf, tfd


def sparse_prior(
    dim: int,
    sparsity: float = 0.8,
    spike_scale: float = 0.05,
    slab_scale: float = 1.0,
    dtype: tf.DType = tf.float32,
    *,
    name: str = "sparse_prior",
) -> tfd.Distribution:
    """Builds a spike-and-slab prior of independent dimensions.

    Each is close to zero with probability `sparsity`: `sparsity N(0, spike_scale^2) + (1 -
    sparsity) N(0, slab_scale^2)`. The defaults are those of the code of Mathieu et al. (2019,
    "Disentangling disentanglement in variational autoencoders", arXiv:1812.02833) on Fashion-MNIST,
    where `sparsity` is gamma.

    ```python
    >>> sparse_prior(3).event_shape
    TensorShape([3])
    >>> prior = sparse_prior(1, sparsity=0.5, spike_scale=0.1, slab_scale=2.0)
    >>> round(float(prior.variance()[0]), 3)  # The mean of 0.01 and 4.
    2.005

    ```

    Args:
      dim: The number of dimensions.
      sparsity: The weight of the narrow normal, in [0, 1].
      spike_scale: The standard deviation of the narrow normal.
      slab_scale: The standard deviation of the wide normal.
      dtype: The float type of the samples.
      name: The name of the distribution.

    Returns:
      A TFP distribution with event shape [dim]. Its samples are not reparameterised.
    """
    dim = check.count("dim", dim, 1)
    sparsity = check.real(
        "sparsity", sparsity, "pass a probability in [0, 1], the weight of the narrow normal"
    )
    if not 0.0 <= sparsity <= 1.0:
        raise ValueError(
            f"sparsity={sparsity!r} must lie in [0, 1]: it is the weight of the narrow normal."
        )
    spike_scale = check.positive("spike_scale", spike_scale)
    slab_scale = check.positive("slab_scale", slab_scale)
    kind = tf.as_dtype(dtype)
    mixture = tfd.MixtureSameFamily(
        tfd.Categorical(probs=tf.constant([[sparsity, 1 - sparsity]] * dim, kind)),
        tfd.Normal(tf.zeros([], kind), tf.constant([[spike_scale, slab_scale]] * dim, kind)),
    )
    return tfd.Independent(mixture, reinterpreted_batch_ndims=1, name=name)


def clustered_prior(
    locs: npt.ArrayLike,
    scale: npt.ArrayLike,
    probs: npt.ArrayLike | None = None,
    *,
    dtype: tf.DType | None = None,
    name: str = "clustered_prior",
) -> tfd.Distribution:
    """Builds a mixture of normals, one for each cluster that the codes should form.

    Their covariances are diagonal. The four clusters of the pinwheel in the code of Mathieu et al.
    (2019, arXiv:1812.02833) are

    ```python
    >>> pinwheel = clustered_prior([[0, -1], [0, 1], [1, 0], [-1, 0]], scale=0.03**0.5)
    >>> pinwheel.event_shape
    TensorShape([2])

    ```

    Args:
      locs: Float [k, d], the centres.
      scale: Standard deviations, positive: a scalar, [d], [k, 1] or [k, d].
      probs: Float [k], the clusters' probabilities; None for equal ones.
      dtype: The dtype of the samples; None for that of `locs` if it is a floating array or tensor,
        else float32.
      name: The name of the distribution.

    Returns:
      A TFP distribution with event shape [d]. Its samples are not reparameterised.
    """
    if dtype is None:
        own = getattr(locs, "dtype", None)
        dtype = own if own is not None and tf.as_dtype(own).is_floating else tf.float32
    kind = tf.as_dtype(dtype)
    centres = np.asarray(locs, np.float64)
    if centres.ndim != 2 or 0 in centres.shape or not np.isfinite(centres).all():
        raise ValueError(
            f"locs={locs!r} must be finite numbers of shape [clusters, dimensions], as [[0., "
            "-1.], [0., 1.]]."
        )
    try:
        scales = np.broadcast_to(np.asarray(scale, np.float64), centres.shape)
    except ValueError:
        raise ValueError(
            f"scale={scale!r} must be a scalar, [d], [k, 1] or [k, d] for {centres.shape} locs."
        ) from None
    if not (np.isfinite(scales) & (scales > 0)).all():
        raise ValueError(
            f"scale={scale!r} must be positive and finite: the clusters' standard deviations."
        )
    clusters = len(centres)
    weights = np.full(clusters, 1 / clusters) if probs is None else np.asarray(probs, np.float64)
    if (
        weights.shape != (clusters,)
        or not (weights >= 0).all()
        or not math.isclose(weights.sum(), 1.0, rel_tol=1e-5)
    ):
        raise ValueError(
            f"probs={probs!r} must be {clusters} probabilities that sum to 1. Divide weights by "
            "their sum."
        )
    return tfd.MixtureSameFamily(
        tfd.Categorical(probs=tf.constant(weights, kind)),
        tfd.MultivariateNormalDiag(tf.constant(centres, kind), tf.constant(scales, kind)),
        name=name,
    )


@dataclasses.dataclass(frozen=True)
class VampPrior:
    """The mixture of an encoder's posteriors at learned pseudo-inputs, as the prior of a `DPVAE`.

    It is `p(z) = 1/K sum_k q(z | u_k)` (Tomczak and Welling 2018, "VAE with a VampPrior",
    arXiv:1705.07120). The gradients of pseudo-inputs and encoder are clipped like all others.

    ```python
    >>> def encoder(x):
    ...     return tfd.MultivariateNormalDiag(x, tf.ones_like(x))
    >>> prior = VampPrior(np.zeros([5, 2])).of(encoder, "float32")
    >>> len(prior.trainable_variables), prior.event_shape
    (1, TensorShape([2]))

    ```

    Args:
      pseudo_inputs: Initial u_k, K rows of the records' shape: array, or dict or tuple of arrays.
        Public values, never records. Floats are learned; integers are fixed.
      y: The same for y, if the encoder takes it.
    """

    pseudo_inputs: Structure
    y: Structure | None = None

    def of(self, encoder: Callable[..., tfd.Distribution], dtype: str) -> tfd.Distribution:
        """Returns the prior over an encoder's codes.

        It has new variables for the pseudo-inputs.

        Args:
          encoder: Maps pseudo-inputs to a TFP distribution of batch shape [K].
          dtype: The float type of the pseudo-inputs.
        """

        def start(value: Structure) -> Structure:
            if isinstance(value, dict):
                return {name: start(part) for name, part in value.items()}
            if isinstance(value, tuple):
                return tuple(map(start, value))
            # A list of numbers is one array.
            array = np.asarray(value)
            if array.dtype.kind != "f":
                return array
            return tf.Variable(array.astype(dtype), name="pseudo_inputs")

        inputs = (self.pseudo_inputs,) if self.y is None else (self.pseudo_inputs, self.y)
        return _Vamp(encoder, start(inputs))


class _Vamp(Derived):
    """The mixture of `encoder(*inputs)`."""

    def __init__(
        self, encoder: Callable[..., tfd.Distribution], inputs: Structure, name: str = "VampPrior"
    ) -> None:
        parameters = dict(locals())
        self._encoder, self._inputs = encoder, inputs
        shapes = tf.nest.map_structure(lambda part: part.shape, inputs)
        rows = tf.nest.flatten(inputs)[0].shape[0]
        try:
            posteriors = self._posteriors()
        except (TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
            raise ValueError(
                f"prior: the encoder failed on VampPrior's pseudo_inputs, {shapes}: {error}"
            ) from error
        is_distribution = isinstance(posteriors, tfd.Distribution)
        if not is_distribution or posteriors.batch_shape.as_list() != [rows]:
            raise ValueError(
                f"prior: the encoder returned {posteriors!r} for VampPrior's pseudo_inputs of "
                f"shape {shapes}; it must return a TFP distribution of batch shape [{rows}]."
            )
        self._rows = rows
        super().__init__(posteriors, parameters, name)

    def _posteriors(self) -> tfd.Distribution:
        return self._encoder(*tf.nest.map_structure(tf.convert_to_tensor, self._inputs))

    def _mixture(self) -> tfd.Distribution:
        equal = tfd.Categorical(logits=tf.zeros([self._rows], self.dtype))
        return tfd.MixtureSameFamily(equal, self._posteriors())

    def _batch_shape(self) -> tf.TensorShape:
        return tf.TensorShape([])

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        return self._mixture().log_prob(value)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        return self._mixture().sample(n, seed=seed)
