"""Hamiltonian Monte Carlo on whitened densities: it draws the curvature and the posterior."""

from __future__ import annotations

import math

import numpy as np

from tfp_dpvi.bayes.coordinates import LogDensity

_ACCEPTANCE = 0.8
# Now and then steps are short: a chain that starts where the density falls steeply, as logarithms
# of a half-normal variable do, would else reject all of them and stay in the tail.
_SHORT_EACH = 5
_SHORT = 0.1


def hamiltonian(
    log_density: LogDensity,
    start: np.ndarray,
    generator: np.random.Generator,
    *,
    num_steps: int,
    num_leapfrogs: int,
    keep: int = 1,
) -> np.ndarray:
    """Runs chains of Hamiltonian Monte Carlo on a whitened density.

    The step size is adapted to a mean acceptance of 0.8 in the first half of the steps, and fixed
    in the second, from which the states come.

    Args:
      log_density: Returns values and gradients at n points, each for its own chain.
      start: The chains' first states, shape [n, d].
      generator: The source of random numbers.
      num_steps: The number of proposals.
      num_leapfrogs: The number of leapfrog steps in each.
      keep: How many states of each chain are returned.

    Returns:
      States of shape [keep, n, d].
    """
    x = start
    # Proposals that overflow are rejected below.
    with np.errstate(over="ignore", invalid="ignore"):
        value, gradient = log_density(start)
    kept: list[np.ndarray] = []
    size = 1.2 / max(start.shape[1], 1) ** 0.25
    for turn in range(num_steps):
        momentum = generator.normal(size=x.shape)
        proposal, slope = x, gradient
        length = size * generator.uniform(0.8, 1.2)
        if turn % _SHORT_EACH == _SHORT_EACH - 1:
            length *= _SHORT
        with np.errstate(over="ignore", invalid="ignore"):
            p = momentum + length / 2.0 * slope
            for leap in range(num_leapfrogs):
                proposal = proposal + length * p
                proposed_value, slope = log_density(proposal)
                p = p + length * (slope if leap < num_leapfrogs - 1 else slope / 2.0)
            kinetic = (np.sum(momentum**2, axis=1) - np.sum(p**2, axis=1)) / 2.0
            change = proposed_value - value + kinetic
        change = np.where(np.isfinite(change), change, -math.inf)
        accepted = np.log(generator.uniform(size=len(x))) < change
        x = np.where(accepted[:, None], proposal, x)
        gradient = np.where(accepted[:, None], slope, gradient)
        value = np.where(accepted, proposed_value, value)
        if turn < num_steps // 2:
            acceptance = np.mean(np.minimum(1.0, np.exp(np.minimum(change, 0.0))))
            size *= math.exp(0.5 * (acceptance - _ACCEPTANCE))
        elif (num_steps - 1 - turn) % max(1, num_steps // (2 * keep)) == 0:
            kept.append(x)
    return np.stack(kept[-keep:])
