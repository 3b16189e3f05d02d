"""Keras models whose `fit` is differentially private.

Read the files in this order. Each imports from those before it only.

* `hooks` lists all that a model may say for itself, and `state` all that it remembers.
* `arguments` checks what `fit` is given, and `tried` what it will call later; `saving` writes
  files, `evaluation` is of records outside of the training data, `exporting` of what is exported.
* `fitting` plans a fit and runs it; `base` is `DPModel`, which puts these together.
* `checking` makes private checks, `scored` refuses what scoring steps ignore; `dpvi` is `DPVI`.
"""

from tfp_dpvi import _deprecation
from tfp_dpvi.models.base import DPModel
from tfp_dpvi.models.dpvi import DPVI
from tfp_dpvi.models.saving import load_model

__all__ = ["DPVI", "DPModel", "load_model"]

__getattr__ = _deprecation.old_names(__name__)
