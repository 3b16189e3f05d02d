"""Private checks of a fitted model, in one release, beside the free ones."""

from tfp_dpvi.checking.declared import Bins
from tfp_dpvi.checking.free import CheckRow, CheckTable
from tfp_dpvi.checking.result import CheckTest, MeanScore, PrivateChecks, Profile

__all__ = [
    "Bins",
    "CheckRow",
    "CheckTable",
    "CheckTest",
    "MeanScore",
    "PrivateChecks",
    "Profile",
]
