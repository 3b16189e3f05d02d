"""The front door: a formula, a data set, a schema and an epsilon.

Read the files in this order. Each imports from those before it only.

* `responses` reads a formula's outcome, `transforms` says of which values columns are centred and
  scaled, and `correlated` which effects of a group are correlated; `design` turns records into
  design rows by the formula and the schema.
* `counts` and `censored` are distributions that TFP lacks; `outcomes` has the families, and
  `families` a model's prior and likelihood.
* `checking` reads outcomes and bins of columns; `measured` releases typical values that are not
  public; `parts` describes a model as plain values, and its parameters in the formula's units.
* `population` computes estimates of a population, `serving` an export, `words` warnings and `plots`
  pictures: `result` has them all. `fit` is `regression`.
"""

from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.fit import regression
from tfp_dpvi.regressions.result import Regression

__all__ = ["Design", "Regression", "regression"]
