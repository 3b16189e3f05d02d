"""Rehearsals: private fits of simulated records, before a fit of private ones.

* `replicates` fits one model to many data sets by one compiled step.
* `simulated` makes the data sets; `store` keeps the rows of fits in a file; `result` shows them.
* `call` is `rehearse` for a model, `formula` for a regression.
"""

from tfp_dpvi.rehearsal.call import rehearse
from tfp_dpvi.rehearsal.formula import rehearse_regression
from tfp_dpvi.rehearsal.result import Needed, Rehearsal

__all__ = ["Needed", "Rehearsal", "rehearse", "rehearse_regression"]
