"""Regression by a formula, a table and an epsilon."""

from tfp_dpvi.regressions.design import Design, GroupEffect
from tfp_dpvi.regressions.families import FAMILIES, Family
from tfp_dpvi.regressions.fit import Regression, regression

__all__ = ["FAMILIES", "Design", "Family", "GroupEffect", "Regression", "regression"]
