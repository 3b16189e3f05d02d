"""Choices between models that are paid for: private scores of fits, and accounted tuning.

* `scores` releases mean log scores by one Gaussian mechanism.
* `comparison` compares fitted models; `tuning` chooses one of several by a random number of trials.
"""

from tfp_dpvi.selection.comparison import Comparison, compare
from tfp_dpvi.selection.tuning import Tuned, tune

__all__ = ["Comparison", "Tuned", "compare", "tune"]
