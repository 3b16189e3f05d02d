"""The calibrated posterior: from released values to a distribution whose spread includes the noise.

Read the files in this order: `twins` and `pairing` simulate an outcome for each record; `clip` bounds
the difference and releases it with its curvature; `window` averages what was released; `curvature`
and `mixture` compute the posterior; `simulation` and `nonlinear` improve it by simulated records;
`parameters` checks it; `posterior` puts these together, `pilots` chooses the settings, and `summary`
prints the result.
"""

from tfp_dpvi.calibrated.clip import (
    NUM_BLOCKS,
    ClippedAway,
    Curvature,
    curvature_releases,
    paired,
)
from tfp_dpvi.calibrated.pilots import Pilot, pilot

__all__ = [
    "NUM_BLOCKS",
    "ClippedAway",
    "Curvature",
    "Pilot",
    "curvature_releases",
    "paired",
    "pilot",
]
