"""The distance that an optimizer can move a parameter, from its public settings."""

from __future__ import annotations

import math

import numpy as np

from tfp_dpvi._tf import keras, learning_rate_variable
from tfp_dpvi.optimizers.dp_keras import DPOptimizer

# The largest number of steps at which a schedule is read.
_MOST_PLACES = 100


def largest_move(optimizer: DPOptimizer, num_steps: int) -> float:
    """Returns about how far an optimizer moves one entry of a variable in a fit.

    It is the distance if all steps agree. Adam and its relatives move by about the learning rate in
    each step, for any gradient. SGD moves by the rate times the mean gradient, which the clip
    bounds. A learning rate that a callback changes is not seen.

    Args:
      optimizer: A DP-Keras optimizer.
      num_steps: The number of steps of the fit.

    Returns:
      The sum of the lengths of these steps and of those that the optimizer has made; NaN if the
      learning rate is 0, which a callback may change.

    ```python
    >>> from tfp_dpvi.optimizers import DPKerasAdamOptimizer
    >>> round(largest_move(DPKerasAdamOptimizer(0.01, l2_norm_clip=1.0), num_steps=500), 3)
    5.0

    ```
    """
    rate = learning_rate_variable(optimizer)
    # A fit continues earlier ones.
    num_steps += int(optimizer.iterations.numpy())
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        places = np.linspace(0, num_steps, min(num_steps, _MOST_PLACES), endpoint=False)
        mean_rate = float(np.mean([float(rate(int(place))) for place in places]))
    else:
        mean_rate = float(rate.numpy())
    # A callback may set the rate later.
    if mean_rate == 0.0:
        return math.nan
    total = mean_rate * num_steps
    if isinstance(optimizer, keras.optimizers.SGD):
        # A gradient moves a variable in all later steps, with momentum 1 by as much in each.
        fading = max(1.0 - optimizer.momentum, 1.0 / max(num_steps, 1))
        total *= optimizer.clip.bound / fading
    return total
