"""Checks of a fitted model: one private release of what its predictions miss, beside the free ones."""

from tfp_dpvi.checking.declared import Bins, CheckedOutcome, Declared, kind_of_outcome
from tfp_dpvi.checking.free import CheckRow, CheckTable, free_rows, private_rows
from tfp_dpvi.checking.null import Estimate, variance_factor
from tfp_dpvi.checking.release import Release, Subjects
from tfp_dpvi.checking.result import CheckTest, MeanScore, PrivateChecks, Profile

__all__ = [
    "Bins",
    "CheckRow",
    "CheckTable",
    "CheckTest",
    "CheckedOutcome",
    "Declared",
    "Estimate",
    "MeanScore",
    "PrivateChecks",
    "Profile",
    "Release",
    "Subjects",
    "free_rows",
    "kind_of_outcome",
    "private_rows",
    "variance_factor",
]
