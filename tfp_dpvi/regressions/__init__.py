"""The front door: a formula, a data set, a schema and an epsilon."""

from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.fit import regression
from tfp_dpvi.regressions.result import Regression

__all__ = ["Design", "Regression", "regression"]
