"""Old public names and module paths.

Each works for one minor version, with a warning that names the new one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import sys
import types
import warnings
from collections.abc import Sequence
from typing import Any

_GHOST = ("LayerGradients", "Pass", "RULES", "UnsupportedLayerError", "Whole")
_PAIRED = ("NUM_BLOCKS", "ClippedAway", "Curvature", "curvature_releases", "paired")

#: Modules that moved in 0.3; their old paths go in 0.4.
MODULES = {
    f"tfp_dpvi.{old}": f"tfp_dpvi.{new}"
    for old, new in {
        "gradients.factors": "ghost.contributions",
        "gradients.ghost": "ghost.layers",
        "gradients.groups": "ghost.groups",
        "gradients.layers": "ghost.rules",
        "gradients.paired": "calibrated.clip",
        "gradients.units": "ghost.vectorized",
        "models.autoencoder": "networks.autoencoder",
        "models.bend": "calibrated.nonlinear",
        "models.calibrated": "calibrated.posterior",
        "models.coordinates": "bayes.coordinates",
        "models.dpvae": "networks.dpvae",
        "models.group_terms": "networks.group_terms",
        "models.inference_data": "bayes.inference_data",
        "models.keras_model": "networks.keras_model",
        "models.latents": "networks.latents",
        "models.layered": "networks.layered",
        "models.pairing": "calibrated.pairing",
        "models.predictive": "bayes.predictive",
        "models.simulation": "calibrated.simulation",
        "models.spread": "bayes.divergence",
        "models.summary": "calibrated.summary",
        "models.synthesizer": "synthetic.synthesizer",
        "models.table": "synthetic.model",
        "models.trial": "bayes.checks",
        "posterior": "calibrated",
        "posterior.curvature": "calibrated.curvature",
        "posterior.mixture": "calibrated.mixture",
        "posterior.window": "calibrated.window",
        "synthetic.columns": "data.columns",
        "synthetic.dates": "data.dates",
        "synthetic.table": "data.schema",
    }.items()
}

#: Names that moved in 0.3, by the module that had them.
NAMES: dict[str, dict[str, str]] = {
    "tfp_dpvi.gradients": {
        **dict.fromkeys(_GHOST, "tfp_dpvi.ghost"),
        **dict.fromkeys(_PAIRED, "tfp_dpvi.calibrated"),
        "layers_of": "tfp_dpvi._tf",
    },
    "tfp_dpvi.gradients.layers": {"layers_of": "tfp_dpvi._tf"},
    "tfp_dpvi.models": {
        "DPVAE": "tfp_dpvi.networks",
        "DPKerasModel": "tfp_dpvi.networks",
        "Pilot": "tfp_dpvi.calibrated",
        "PosteriorPredictive": "tfp_dpvi.bayes",
        "Synthesizer": "tfp_dpvi.synthetic",
        "pilot": "tfp_dpvi.calibrated",
    },
    "tfp_dpvi.models.simulation": dict.fromkeys(("Pilot", "pilot"), "tfp_dpvi.calibrated"),
}


def renamed(module: str, name: str) -> Any:
    """Returns what a module's old name stands for, with a warning; for a module's `__getattr__`.

    Args:
      module: The module that was asked, its `__name__`.
      name: The attribute that it lacks.

    Raises:
      AttributeError: The module never had this name.
    """
    new = NAMES.get(module, {}).get(name)
    if new is None and f"{module}.{name}" in MODULES:
        return importlib.import_module(f"{module}.{name}")
    if new is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    _warn(f"{module}.{name}", f"{new}.{name}")
    return getattr(importlib.import_module(new), name)


def _warn(old: str, new: str) -> None:
    """Warns at the line that used the old name, whatever Python's import system does in between."""
    frame = inspect.currentframe()
    assert frame is not None  # CPython has frames.
    while frame.f_back is not None and (
        frame.f_code.co_filename == __file__
        or frame.f_code.co_name == "__getattr__"
        or "importlib" in frame.f_code.co_filename
    ):
        frame = frame.f_back
    warnings.warn_explicit(
        f"{old} is now {new}; the old name goes in version 0.4.",
        FutureWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds this library's own old module paths, after every other finder, and nothing else."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        if fullname not in MODULES:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=fullname.count(".") == 1)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return types.ModuleType(spec.name, f"The old path of `{MODULES[spec.name]}`.")

    def exec_module(self, module: types.ModuleType) -> None:
        new = importlib.import_module(MODULES[module.__name__])
        _warn(module.__name__, new.__name__)
        public = {name: part for name, part in vars(new).items() if not name.startswith("__")}
        module.__dict__.update(public)
        module.__dict__["__getattr__"] = functools.partial(renamed, module.__name__)


def install() -> None:
    """Lets old module paths be imported; called once, by the package."""
    sys.meta_path.append(_OldModules())
