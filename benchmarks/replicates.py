"""What Adam does with the settings of `dpvi.pilot`, as replicates of one compiled step.

`tfp_dpvi.rehearsal.replicates` has the rest: fits of one model to many simulated data sets.

```python
method = by_pilot("paired", prior, likelihood, x, y, public_inputs, epsilon=1.0, delta=1e-5)
replicates = Replicates(method)
fits = [replicates.fit(x, y, seed) for seed, (x, y) in enumerate(data_sets)]
fits[0].draws.shape, fits[0].warnings
```
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import tfp_dpvi as dpvi
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.calibrated.posterior import Calibrated
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.rehearsal.replicates import Method, Released
from tfp_dpvi.training import Mechanism

# Warnings are counted, not logged, for each replicate.
_LOG = logging.getLogger("tfp_dpvi")


def by_pilot(
    clipping: str,
    prior: Any,
    likelihood: Any,
    x: Structure,
    y: Structure,
    public_inputs: Structure,
    *,
    epsilon: float,
    delta: float,
    clip: float | None = None,
) -> Method:
    """Returns what Adam does with clip, rate and batches from `dpvi.pilot`.

    Args:
      clipping: "paired" or "flat", as in `DPVI`.
      prior: As in `DPVI`.
      likelihood: As in `DPVI`.
      x: Inputs whose shapes and dtypes are those of all data sets.
      y: Outcomes, in the same way.
      public_inputs: The pilot's inputs.
      epsilon: The budget of a fit.
      delta: Its delta.
      clip: Another clip than the pilot's.
    """
    model = dpvi.DPVI(prior, likelihood, clipping=clipping)
    num = len(tf.nest.flatten(x)[0])
    pilot = dpvi.pilot(model, public_inputs, num_records=num, epsilon=epsilon, delta=delta)
    if clip is not None:
        pilot = dataclasses.replace(pilot, l2_norm_clip=clip)
    model.compile(pilot.adam(num), epsilon=epsilon, delta=delta)
    data = model.make_data(x, y, batch_size=pilot.batch_size)
    num_steps = pilot.epochs * data.steps_per_epoch
    model.before_fit(num_steps)
    mechanism = _calibrated(model.mechanism(data), epsilon, delta, num_steps)

    def posterior(released: Released, mechanism: Mechanism) -> Calibrated | None:
        level = _LOG.level
        _LOG.setLevel(logging.ERROR)
        try:
            return model.calibration.posterior(released, mechanism)
        finally:
            _LOG.setLevel(level)

    def uncalibrated(num: int, seed: int) -> Structure:
        return model.surrogate_posterior.sample(num, seed=tf.constant([0, seed], tf.int32))

    return Method(
        model.bayesian_model,
        mechanism,
        model.optimizer,
        model.trainable_variables,
        num_steps,
        posterior,
        uncalibrated,
        settings={"clip": pilot.l2_norm_clip, "batch_size": pilot.batch_size},
    )


def _calibrated(mechanism: Mechanism, epsilon: float, delta: float, num_steps: int) -> Mechanism:
    """Returns the mechanism with the noise of a first fit within a budget."""
    return mechanism.calibrated(
        PrivacyLedger(), epsilon=epsilon, delta=delta, num_releases=num_steps
    )
