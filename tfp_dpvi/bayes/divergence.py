"""Detects a diverging surrogate posterior from released variables alone."""

from __future__ import annotations

import numpy as np

from tfp_dpvi._tf import function_of_model, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.predictive import posterior_draws

_TIMES_WIDER, _LEAST = (
    10.0,
    3.0,
)  # No posterior's standard deviation on the real line is so many times the prior's.


class Spread:
    """Compares a surrogate's standard deviations with the prior's on the real line, if TFP has a bijector to it.

    Says nothing of a prior that does not draw several values at once.
    """

    def __init__(self, prior: tfd.Distribution, surrogate: tfd.Distribution) -> None:
        self._known = np.zeros(0)
        try:
            coordinates = Coordinates(prior)
        except ValueError:
            return
        if not coordinates.broadcasts():
            return
        self._known = coordinates.prior_draws(256).std(axis=0)

        def draws() -> tf.Tensor:
            parts = posterior_draws(surrogate, 64, tf.constant([0, 1]))
            return tf.concat(coordinates.flatten_batch(parts), axis=-1)

        self._draws = function_of_model(draws)

    def fault(self) -> str | None:
        """Returns a description of the divergence, or None."""
        if not len(self._known):
            return None
        deviations = self._draws().numpy().astype(np.float64).std(axis=0)
        ratio = float(np.max(np.where(deviations <= _LEAST, 0.0, deviations / self._known)))
        if ratio <= _TIMES_WIDER:  # False for NaN, from draws that overflow.
            return None
        return f"the surrogate posterior is {ratio:.3g} times as wide as the prior, and diverges"
