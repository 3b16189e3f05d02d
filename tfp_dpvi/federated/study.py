"""`Study`: the model that hospitals share, and its posterior as a TFP distribution."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import scipy.optimize

from tfp_dpvi import _validate as check
from tfp_dpvi import surrogates
from tfp_dpvi._tf import Structure, function_of_model, keras, tf, tfd
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.terms import Terms
from tfp_dpvi.models.coordinates import Coordinates
from tfp_dpvi.models.predictive import PosteriorPredictive, as_graph
from tfp_dpvi.optimizers import DPOptimizer
from tfp_dpvi.posterior import gaussian_prior

FAMILIES = ("mean_field", "full_rank")
_PRIOR_DRAWS = 4000
_SITE_DRAWS = 128


class Study:
    """A model that several hospitals fit together: prior and likelihood as of `DPVI`, and how they work; all of it public.

    Args:
      prior: TFP distribution over the parameters; the same at every hospital.
      likelihood: see `DPVI`.
      optimizer: a DP-Keras optimizer with the clip, such as `DPKerasAdamOptimizer(...)`: how hospitals refine their
        factors. Each makes one of its own from its configuration, and starts it afresh in each round.
      name: of the study.
      family: "mean_field" or "full_rank": independent normals, or a normal with all covariances, over the unconstrained
        parameters.
      local_steps: steps of a hospital in each round.
      batch_size: expected number of records in a step; None takes all records in every step.
      initial_stddev: the largest standard deviation that a hospital starts from. Large ones make first gradients that are
        clipped at random points of the prior.
      clipping: "flat" or "paired", see `DPVI`. Either way the posterior is the raw surrogate.
      privacy: "worker" (default): noise in every step of a hospital; "messages": noise on its messages alone, which needs
        many hospitals or shards.
      message_clip: with privacy="messages": the bound C on the norm of one shard's change.
      num_shards: with privacy="messages": into how many parts a hospital divides its records at random.
      num_hospitals: with privacy="messages": how many take part, by which hospitals judge whether noise drowns the signal.
      most_change: see `Terms`.

    Attributes:
      terms: the numbers that a server needs.
      normal_prior: whether the prior is a normal of the family over the unconstrained parameters. If not, a factor stands for
        it that the server refines, see `refine_prior`.
    """

    def __init__(
        self,
        prior: tfd.Distribution,
        likelihood: Callable[..., Any],
        optimizer: DPOptimizer,
        *,
        name: str = "study",
        family: str = "mean_field",
        local_steps: int = 20,
        batch_size: int | None = None,
        initial_stddev: float = 0.1,
        clipping: str = "flat",
        privacy: str = "worker",
        message_clip: float | None = None,
        num_shards: int = 1,
        num_hospitals: int = 1,
        most_change: float = 1e7,
    ) -> None:
        check.one_of("family", family, FAMILIES)
        check.one_of("clipping", clipping, ("flat", "paired"))
        self.prior, self.likelihood, self.family, self.clipping = prior, likelihood, family, clipping
        self.optimizer = optimizer
        if not isinstance(optimizer, DPOptimizer):
            raise TypeError(
                f"optimizer={self.optimizer!r} is no DP-Keras optimizer; pass for instance DPKerasAdamOptimizer."
            )
        self.batch_size = None if batch_size is None else check.count("batch_size", batch_size, 1)
        self.initial_stddev = check.positive("initial_stddev", initial_stddev)
        self.num_shards = check.count("num_shards", num_shards, 1)
        self.num_hospitals = check.count("num_hospitals", num_hospitals, 1)
        if (message_clip is None) == (privacy == "messages"):
            raise ValueError(
                f"message_clip={message_clip!r} with privacy={privacy!r}: it goes with 'messages' alone; pass both."
            )
        self.message_clip = None if message_clip is None else check.positive("message_clip", message_clip)
        self.coordinates = Coordinates(prior)
        stands_for, self.normal_prior = self._prior_factor()
        self.terms = Terms(
            name, stands_for, local_steps, privacy=privacy, most_change=most_change, setup=self._digest()
        )

    @property
    def full_rank(self) -> bool:
        """True if precisions are matrices."""
        return self.family == "full_rank"

    def _digest(self) -> str:
        """Returns a digest of the settings that hospitals must share; functions go by their names."""
        optimizer = [type(self.optimizer).__name__, keras.utils.serialize_keras_object(self.optimizer)]
        names = ("family", "clipping", "batch_size", "initial_stddev", "message_clip", "num_shards")
        settings = [getattr(self.likelihood, "__qualname__", ""), optimizer, *(getattr(self, each) for each in names)]
        return hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]

    # ------------------------------------------------------------------ the prior

    def _prior_factor(self) -> tuple[Factor, bool]:
        """Returns the prior over the unconstrained parameters; or a normal of its mean and variances, and False."""
        draws = self.coordinates.prior_draws(_PRIOR_DRAWS)
        found = gaussian_prior(self._log_prior, draws)
        if found is not None:
            precision = _rounded(found[0], np.abs(found[0]).max())
            diagonal = np.diag(precision)
            shift = _rounded(found[1], np.sqrt(diagonal))
            independent = not (precision - np.diag(diagonal)).any()
            if independent or self.full_rank:
                return Factor(shift, precision if self.full_rank else diagonal), True
        mean, variances = _rounded(draws.mean(0), draws.std(0)), _rounded(draws.var(0), draws.var(0))
        return Factor.normal(mean, np.diag(variances) if self.full_rank else variances), False

    def _log_prior(self, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns log density and its gradient at points [n, d]."""
        value, gradient = self._traced_log_prior(tf.constant(points, self.coordinates.dtype))
        return value.numpy().astype(np.float64), gradient.numpy().astype(np.float64)

    @functools.cached_property
    def _traced_log_prior(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        def with_gradient(points: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(points)
                value = self.coordinates.log_prior(points)
            return value, tape.gradient(value, points)

        return function_of_model(with_gradient, reduce_retracing=True)

    # ------------------------------------------------------------------ what is learned

    def posterior(self, factor: Factor) -> tfd.Distribution:
        """Returns a factor, such as `history.posterior`, as a TFP distribution over the prior's structure."""
        dtype = surrogates.float_dtype(self.prior).as_numpy_dtype
        if self.full_rank:
            base = tfd.MultivariateNormalTriL(
                factor.mean.astype(dtype), np.linalg.cholesky(factor.covariance).astype(dtype)
            )
        else:
            base = tfd.MultivariateNormalDiag(factor.mean.astype(dtype), factor.stddev.astype(dtype))
        return tfd.TransformedDistribution(base, self.coordinates.bijector, name="posterior")

    def draws(self, factor: Factor, num: int, seed: int = 0) -> Structure:
        """Returns draws of the parameters from a factor, in the prior's structure, each part of shape [num, ...]."""
        z = factor.sample(num, np.random.default_rng(seed))
        parts = tf.split(tf.constant(z, self.coordinates.dtype), self.coordinates.sizes, axis=-1)
        return as_graph(lambda: self.coordinates.constrain(parts))

    def predictive(self, factor: Factor, x: Structure, *, num_draws: int = 200, seed: int = 0) -> PosteriorPredictive:
        """Returns the posterior predictive distribution at public inputs `x`, from draws."""
        draws = self.draws(factor, num_draws, seed)
        return PosteriorPredictive(lambda params: self.likelihood(params, x), draws, num_draws)

    def mean_log_likelihood(self, factor: Factor, x: Structure, y: Structure, *, num_draws: int = 200) -> float:
        """Returns the mean posterior predictive log density of public records, for `simulate(evaluate=)`."""
        return float(tf.reduce_mean(self.predictive(factor, x, num_draws=num_draws).log_prob(y)))

    # ------------------------------------------------------------------ the prior's own factor

    def refine_prior(self, cavity: Factor, present: Factor) -> Factor:
        """Returns the factor that stands for a prior which is not normal, refined: site 0, which touches no record.

        Minimises KL(q || prior x cavity) over the family, with fixed draws, from `cavity * present`.
        """
        start = cavity * present
        root = np.linalg.cholesky(start.covariance) if self.full_rank else np.diag(start.stddev)
        noise = np.random.default_rng(0).normal(size=(_SITE_DRAWS, start.num))
        noise = np.concatenate([noise, -noise])
        rows, columns = np.tril_indices(start.num) if self.full_rank else (np.arange(start.num),) * 2
        diagonal = rows == columns
        precision = cavity.precision if self.full_rank else np.diag(cavity.precision)

        def unpack(vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            """Returns mean and lower root: of the start's units, so that 0 is the start."""
            lower = np.zeros((start.num, start.num))
            lower[rows, columns] = np.where(
                diagonal, np.exp(np.clip(vector[start.num :], -9.0, 9.0)), vector[start.num :]
            )
            return start.mean + root @ vector[: start.num], root @ lower

        def objective(vector: np.ndarray) -> tuple[float, np.ndarray]:
            mean, scale = unpack(vector)
            values, gradients = self._log_prior(mean + noise @ scale.T)
            by_mean = precision @ mean - cavity.shift - gradients.mean(0)
            by_scale = precision @ scale - gradients.T @ noise / len(noise)
            logs = np.log(np.diag(scale)).sum()
            value = -values.mean() - logs + 0.5 * np.sum(scale * (precision @ scale))
            value += 0.5 * mean @ precision @ mean - cavity.shift @ mean
            by_lower = (root.T @ by_scale)[rows, columns]
            by_lower = np.where(diagonal, by_lower * np.exp(np.clip(vector[start.num :], -9.0, 9.0)) - 1.0, by_lower)
            return float(value), np.concatenate([root.T @ by_mean, by_lower])

        found = scipy.optimize.minimize(
            objective, np.zeros(start.num + len(rows)), jac=True, method="L-BFGS-B", options={"maxiter": 200}
        )
        mean, scale = unpack(found.x)
        best = Factor.normal(mean, scale @ scale.T if self.full_rank else np.diag(scale) ** 2)
        return best / cavity


def _rounded(values: np.ndarray, unit: np.ndarray | float) -> np.ndarray:
    """Returns numbers at nearly float32's precision, zeros as zeros: on all machines the same."""
    kept = np.where(np.abs(values) < 1e-5 * unit, 0.0, values)
    rounded: np.ndarray = np.vectorize(lambda value: float(f"{value:.6g}"))(kept)
    return rounded
