"""Jumps of a likelihood: parameters that change it where no gradient shows it.

A threshold in `tf.where` has no gradient, but the other entries of its vector may have one, and
`tf.sign` has the gradient zero. Scores then say that records know nothing of the threshold.
"""

from __future__ import annotations

import numpy as np

from tfp_dpvi._tf import Structure, function_of_model, tf
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS
from tfp_dpvi.calibrated.diagonal import MOST_DENSE
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scored import ScoredLikelihood
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.calibrated.whitening import without_far_draws

# Parameters from the prior, of which half must show a jump: at others there may be none.
_NUM_DRAWS = 4
# Moves, in prior's widths or in what one record leaves unknown, the smaller one.
_SHARES = (0.5, 0.1)
# Mean squared changes of a log density: across a jump they fall as the move does, elsewhere as its
# square.
_LEAST_SHARE = 0.1
# And how many times what scores say.
_MOST_OVER_SCORES = 10.0
_LEAST_CHANGE = 1e-4
# And how many times what a change of the last digits does: at rates of 1e10, of some draws, that is
# nats.
_MOST_OVER_ROUNDING = 10.0
_LAST_DIGITS = 8.0
# In nats, of a record: a single one decides nothing.
_MOST_CHANGE = 3.0


def parameters_that_jump(scoring: Scoring) -> list[str]:
    """Returns the names of parameters that change simulated records' densities by jumps.

    Args:
      scoring: The model and its public inputs. With more than 50 parameters none are tried.

    #### Formal guarantee

    A function of public inputs and simulated outcomes alone.
    """
    pairing = scoring.pairing
    if not pairing.may_jump or scoring.size > MOST_DENSE:
        return []
    draws = without_far_draws(scoring.prior_draws, pairing.coordinates.names)
    widths = 1.0 / np.sqrt(np.diag(scoring.prior.precision))
    changes = function_of_model(_squared_changes)
    counts = np.zeros(scoring.size)
    for theta in draws[:_NUM_DRAWS, pairing.index]:
        try:
            counts += _jumps_at(scoring.likelihood, theta, widths, changes)
        except (*LIKELIHOOD_ERRORS, np.linalg.LinAlgError, tf.errors.OpError):
            continue
    jumping = pairing.index[counts >= _NUM_DRAWS / 2]
    return [pairing.coordinates.names[number] for number in jumping]


def _jumps_at(
    likelihood: ScoredLikelihood,
    theta: np.ndarray,
    widths: np.ndarray,
    changes: tf.types.experimental.PolymorphicFunction,
) -> np.ndarray:
    """Returns which parameters jump at some parameters, bool of shape [d]."""
    information = np.diag(likelihood.moments_at(theta, np.diag(widths)).information)
    information = np.maximum(information, 0.0)
    lengths = 1.0 / np.sqrt(1.0 / widths**2 + information)
    far, near = (_changes_after(likelihood, theta, share * lengths, changes) for share in _SHARES)
    scored = information * np.square(_SHARES[1] * lengths)
    digit = np.finfo(likelihood.pairing.coordinates.dtype.as_numpy_dtype).eps
    digits = _LAST_DIGITS * digit * np.maximum(np.abs(theta), widths)
    rounded = _changes_after(likelihood, theta, digits, changes)
    is_jump: np.ndarray = (
        (near > _LEAST_CHANGE)
        & (near > _MOST_OVER_SCORES * scored)
        & (near > _LEAST_SHARE * far)
        & (near > _MOST_OVER_ROUNDING * rounded)
    )
    return is_jump


def _changes_after(
    likelihood: ScoredLikelihood,
    theta: np.ndarray,
    moves: np.ndarray,
    changes: tf.types.experimental.PolymorphicFunction,
) -> np.ndarray:
    """Returns mean squared changes of log densities after moves of single parameters."""
    places = [likelihood.vector_at(moved) for moved in theta + np.diag(moves)]
    vector = likelihood.vector_at(theta)
    found = changes(likelihood.pairing, vector, tf.stack(places), likelihood.inputs)
    means: np.ndarray = found.numpy().astype(np.float64)
    return means


def _squared_changes(
    pairing: Pairing, vector: tf.Tensor, places: tf.Tensor, x: Structure
) -> tf.Tensor:
    """Returns mean squared changes of simulated records' log densities, shape [d].

    Args:
      pairing: The model's simulation.
      vector: All coordinates, shape [D].
      places: Others, shape [d, D].
      x: Public inputs.
    """
    distribution = pairing.distribution(vector, x)
    outcomes, usable = pairing.simulate(distribution, x, tf.constant([0, 3]))
    before = distribution.log_prob(outcomes)

    def mean_change(place: tf.Tensor) -> tf.Tensor:
        change = tf.abs(pairing.distribution(place, x).log_prob(outcomes) - before)
        kept = usable & tf.math.is_finite(change)
        change = tf.where(kept, tf.minimum(change, _MOST_CHANGE), tf.zeros_like(change))
        return tf.reduce_mean(tf.square(change))

    return tf.map_fn(mean_change, places)
