"""Detects a diverging surrogate posterior from released variables alone."""

from __future__ import annotations

import numpy as np

from tfp_dpvi._tf import function_of_model, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.predictive import posterior_draws

# No posterior's standard deviation on the real line is so many times the prior's.
_TIMES_WIDER = 10.0
# Standard deviations up to this one are no divergence, however narrow the prior is.
_LEAST = 3.0


class DivergenceCheck:
    """Compares a surrogate's standard deviations with the prior's, on the real line.

    A surrogate that is many times as wide as the prior has diverged. The check says nothing of a
    prior from whose support TFP has no bijector to the real line, nor of one that does not draw
    several values at once.

    Args:
      prior: The prior over the parameters.
      surrogate: The surrogate posterior, a function of released variables.
    """

    def __init__(self, prior: tfd.Distribution, surrogate: tfd.Distribution) -> None:
        self._prior_deviations = np.zeros(0)
        try:
            coordinates = Coordinates(prior)
        except ValueError:
            return
        if not coordinates.broadcasts():
            return
        self._prior_deviations = coordinates.prior_draws(256).std(axis=0)

        def draws() -> tf.Tensor:
            parts = posterior_draws(surrogate, 64, tf.constant([0, 1]))
            return tf.concat(coordinates.flatten_batch(parts), axis=-1)

        self._draws = function_of_model(draws)

    def fault(self) -> str | None:
        """Returns a description of the divergence, or None."""
        if not len(self._prior_deviations):
            return None
        deviations = self._draws().numpy().astype(np.float64).std(axis=0)
        ratios = np.where(deviations <= _LEAST, 0.0, deviations / self._prior_deviations)
        ratio = float(np.max(ratios))
        # NaN, from draws that overflow, is a divergence too.
        if ratio <= _TIMES_WIDER:
            return None
        return f"the surrogate posterior is {ratio:.3g} times as wide as the prior, and diverges"
