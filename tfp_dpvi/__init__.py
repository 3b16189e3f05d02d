"""Differentially private variational inference for TensorFlow Probability models, in Keras.

Names load on first use, so that `import tfp_dpvi.privacy` needs no TensorFlow.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from tfp_dpvi import _deprecation

if TYPE_CHECKING:
    from tfp_dpvi import (
        audit,
        bayes,
        calibrated,
        callbacks,
        checking,
        data,
        divergences,
        export,
        federated,
        ghost,
        gradients,
        local,
        metrics,
        models,
        networks,
        optimizers,
        preprocessing,
        privacy,
        regressions,
        rehearsal,
        sampling,
        selection,
        surrogates,
        synthetic,
        training,
    )
    from tfp_dpvi._tf import keras
    from tfp_dpvi.calibrated import pilot
    from tfp_dpvi.data import Schema
    from tfp_dpvi.models import DPVI, DPModel, load_model
    from tfp_dpvi.networks import DPVAE, DPKerasModel
    from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan, PrivacyReport
    from tfp_dpvi.regressions import Regression, regression
    from tfp_dpvi.rehearsal import Rehearsal, rehearse, rehearse_regression
    from tfp_dpvi.selection import compare, tune
    from tfp_dpvi.serialization import register
    from tfp_dpvi.synthetic import Synthesizer

# The only place of the version: pyproject.toml, the documentation and the recipe read it here.
__version__ = "0.3.0.dev0"

if sys.platform == "win32":
    raise ImportError(
        "tfp_dpvi does not run on Windows: it makes calls that only Unix systems have.\n"
        "Use Linux, for instance in a container or in the Windows Subsystem for Linux."
    )

if "tensorflow" not in sys.modules:
    # On loading, TensorFlow 2.15 writes a screenful of CUDA notices, at error level, on machines
    # without a GPU too. Python exceptions are not affected. To see native messages again, set the
    # variable to 0, 1 or 2.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

_deprecation.install()

_NAMES = {
    "DPKerasModel": "networks",
    "DPModel": "models",
    "DPVAE": "networks",
    "DPVI": "models",
    "PrivacyLedger": "privacy",
    "PrivacyPlan": "privacy",
    "PrivacyReport": "privacy",
    "Regression": "regressions",
    "Rehearsal": "rehearsal",
    "Schema": "data",
    "Synthesizer": "synthetic",
    "compare": "selection",
    "keras": "_tf",
    "load_model": "models",
    "pilot": "calibrated",
    "register": "serialization",
    "regression": "regressions",
    "rehearse": "rehearsal",
    "rehearse_regression": "rehearsal",
    "tune": "selection",
}

__all__ = [
    "DPVAE",
    "DPVI",
    "DPKerasModel",
    "DPModel",
    "PrivacyLedger",
    "PrivacyPlan",
    "PrivacyReport",
    "Regression",
    "Rehearsal",
    "Schema",
    "Synthesizer",
    "__version__",
    "audit",
    "bayes",
    "calibrated",
    "callbacks",
    "checking",
    "compare",
    "data",
    "divergences",
    "export",
    "federated",
    "ghost",
    "gradients",
    "keras",
    "load_model",
    "local",
    "metrics",
    "models",
    "networks",
    "optimizers",
    "pilot",
    "preprocessing",
    "privacy",
    "register",
    "regression",
    "regressions",
    "rehearsal",
    "rehearse",
    "rehearse_regression",
    "sampling",
    "selection",
    "surrogates",
    "synthetic",
    "training",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        globals()[name] = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
        return globals()[name]
    if name in __all__:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
