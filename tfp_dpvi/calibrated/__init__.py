"""The calibrated posterior: from released values to a distribution that includes the noise.

Read the files in this order. Each imports from those before it only.

* `twins` simulates an outcome for each record; `clip` clips the difference of a record's and its
  twin's scores, and releases it with its curvature; `requirements` says to which models this
  applies; `pairing` does it for one model.
* `window` averages the released values; `hmc` samples; `curvature` draws the curvature given its
  noisy release; `mixture` computes the posterior.
* `centred` clips scores about a centre, in coordinates that `whitening` computes; `scores` finds
  the scores of a record's possible outcomes, `scoring` makes steps, `centred_fit` the posterior.
* `checks` says whether to trust the posterior.
* `simulation` and `nonlinear` improve it by simulated records at public inputs.
* `posterior` puts these together; `state` keeps the result for a model; `pilots` chooses the
  settings of a fit; `summary` prints the result.
"""

from tfp_dpvi.calibrated.clip import (
    ClippedAway,
    Curvature,
    curvature_releases,
    paired,
)
from tfp_dpvi.calibrated.pilots import Pilot, pilot

__all__ = [
    "ClippedAway",
    "Curvature",
    "Pilot",
    "curvature_releases",
    "paired",
    "pilot",
]
