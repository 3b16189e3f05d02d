"""The calibrated posterior: from released values to a distribution that includes the noise.

Read the files in this order. Each imports from those before it only.

* `twins` simulates an outcome for each record; `clip` clips the difference of a record's and its
  twin's scores, and releases it with its curvature; `requirements` says to which models this
  applies; `pairing` does it for one model.
* `window` averages the released values; `hmc` samples; `columns` draws the curvature if few columns
  are unlike the public ones, and `curvature` does so given a noisy release in general; `mixture`
  computes the posterior from these draws; `conflict` says whether the prior contradicts them, and
  `checks` whether to trust it.
* `simulation` and `nonlinear` improve it by simulated records at public inputs; `posterior` puts
  these together; `summary` prints the result; `state` keeps it for a model; `pilots` chooses the
  settings of a fit.

A fit without an optimizer makes scoring steps instead:

* `centred` clips scores about a centre. `diagonal`, `wider`, `ranks` and `weights` are released
  beside them: for many parameters, under a wider clip, of where outcomes lie, of survey weights.
* `scores` finds the scores of a record's possible outcomes; `whitening` computes coordinates;
  `balance` weights public inputs like private ones; `scored` is a likelihood with its scores, and
  their moments at public inputs, and `moved` what they are if outcomes follow other parameters.
* `steps` is one step; `start` and `progress` say where steps begin and how long they are; `scoring`
  makes a fit of them.
* `bend` moves the posterior by the third order of the likelihood; `jumps` refuses likelihoods
  whose scores do not show a parameter; `straight` says where scores are linear if not in the
  coordinates, and `expected` where none are; `centred_fit` computes the posterior.
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
