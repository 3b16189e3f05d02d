"""Old names of modules, functions and arguments, which work for one minor version.

Each use of one warns and names the new one.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import os
import pathlib
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")

_LIBRARY = f"{pathlib.Path(__file__).parent}{os.sep}"
_GHOST = ("RULES", "UnsupportedLayerError", "Whole")
_ISOLATION = ("depends_on", "refuse_dynamic_shapes", "refuse_writes", "strictly")
_PAIRED = ("ClippedAway", "Curvature", "curvature_releases", "paired")

#: Modules that moved in 0.3; their old paths go in 0.4.
MODULES = {
    f"tfp_dpvi.{old}": f"tfp_dpvi.{new}"
    for old, new in {
        "federated.access": "federated.deployment.access",
        "federated.flower": "federated.deployment.flower",
        "federated.local": "federated.refiner",
        "federated.proxy": "federated.deployment.proxy",
        "federated.worker": "federated.deployment.worker",
        "gradients.factors": "ghost.contributions",
        "gradients.ghost": "ghost.layers",
        "gradients.groups": "ghost.groups",
        "gradients.layers": "ghost.rules",
        "gradients.paired": "calibrated.clip",
        "gradients.units": "ghost.vectorized",
        "models.autoencoder": "networks.autoencoder",
        "models.bend": "calibrated.nonlinear",
        "models.calibrated": "calibrated.state",
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
        "privacy.report_text": "privacy.report",
        "synthetic.columns": "data.columns",
        "synthetic.dates": "data.dates",
        "synthetic.table": "data.schema",
    }.items()
}

#: Classes with a new name in 0.3, by the places under which saved files know them.
CLASSES = {"tfp_dpvi.data.schema:Table": "tfp_dpvi.data.schema:Schema"}

#: Methods of `DPModel`, `DPVAE` and `DPKerasModel` that subclasses of 0.2 may override.
HOOKS = {
    "_batch_losses": "batch_losses",
    "_compared": "compared",
    "_layers_watched": "watched_layers",
}

#: Names that moved in 0.3, by the module that had them: the new one, and ":" with a new name.
NAMES: dict[str, dict[str, str]] = {
    "tfp_dpvi.data": {
        "RowBatches": "tfp_dpvi.data.streaming",
        "TableData": "tfp_dpvi.data.schema",
        "by_column": "tfp_dpvi.data.records",
        "wants_stream": "tfp_dpvi.data.streaming",
    },
    "tfp_dpvi.federated": {"Terms": "tfp_dpvi.federated:StudyTerms"},
    "tfp_dpvi.gradients": {
        **dict.fromkeys(_GHOST, "tfp_dpvi.ghost"),
        **dict.fromkeys(_PAIRED, "tfp_dpvi.calibrated"),
        **dict.fromkeys(_ISOLATION, "tfp_dpvi.gradients.isolation"),
        **dict.fromkeys(("LayerGradients", "Pass"), "tfp_dpvi.ghost.layers"),
        "CLIPPINGS": "tfp_dpvi.gradients.clip",
        "NUM_BLOCKS": "tfp_dpvi.calibrated.clip",
        "joint_release": "tfp_dpvi.gradients.joint",
        "layers_of": "tfp_dpvi._tf",
        "select_finite": "tfp_dpvi.gradients.clip",
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
    "tfp_dpvi.privacy": {"plan_counts": "tfp_dpvi.privacy.plan"},
    "tfp_dpvi.sampling": {
        "make_sampler": "tfp_dpvi.sampling.choose",
        "poisson_gaps": "tfp_dpvi.sampling.poisson",
    },
    "tfp_dpvi.synthetic": {
        "TableData": "tfp_dpvi.data.schema",
        "crowded": "tfp_dpvi.synthetic.grouping",
        "depths": "tfp_dpvi.synthetic.grouping",
    },
    "tfp_dpvi.synthetic.table": {"Table": "tfp_dpvi.data:Schema"},
    "tfp_dpvi.training": {
        "make_steps": "tfp_dpvi.training.step",
        "private_step": "tfp_dpvi.training.step",
    },
}


def old_names(module: str) -> Callable[[str], Any]:
    """Returns the `__getattr__` of a module with old names."""
    return functools.partial(renamed, module)


def renamed(module: str, name: str) -> Any:
    """Returns what a module's old name stands for, with a warning.

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
    package, new_name = new.split(":") if ":" in new else (new, name)
    warn(f"{module}.{name}", f"{package}.{new_name}")
    return getattr(importlib.import_module(package), new_name)


def renamed_argument(old: str, new: str) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Returns a decorator of functions with a renamed argument.

    The decorated function accepts the old keyword with a warning.

    Args:
      old: The old keyword.
      new: The argument's name in the decorated function.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            # Without the old keyword, or with both, Python says what is wrong.
            if old in kwargs and new not in kwargs:
                warn(f"{name}({old}=)", f"{name}({new}=)")
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def current_place(place: str) -> str:
    """Returns today's "module:name" of a class or function that a saved file names by its place."""
    module = place.partition(":")[0]
    place = f"{MODULES.get(module, module)}:{place.partition(':')[2]}"
    return CLASSES.get(place, place)


def import_named(text: str) -> None:
    """Imports the library's modules that a file names, which registers their classes.

    Of old modules it imports today's. Who loads a file cannot change the paths in it, so that there
    is no warning.

    Args:
      text: The file's JSON.
    """
    for name in {*re.findall(r'"(tfp_dpvi(?:\.(?!__)\w+)+)"', text)}:
        with contextlib.suppress(ImportError):
            importlib.import_module(MODULES.get(name, name))


def warn(old: str, new: str) -> None:
    """Warns that a name is old, at the first line above that is not this library's.

    Args:
      old: The old name, as the caller wrote it.
      new: Today's name.
    """
    stack = [frame for frame, _ in traceback.walk_stack(None)]
    callers = (frame for frame in stack if not _is_ours(frame.f_code.co_filename))
    frame = next(callers, stack[-1])
    warnings.warn_explicit(
        f"{old} is now {new}; the old name goes in version 0.4.",
        FutureWarning,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_ours(filename: str) -> bool:
    """Returns whether a file is of this library, or of Python's import system."""
    return filename.startswith((_LIBRARY, "<frozen importlib")) or filename == importlib.__file__


class _OldModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds this library's own old module paths, after every other finder.

    No other name is its business.
    """

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
        warn(module.__name__, new.__name__)
        public = {name: part for name, part in vars(new).items() if not name.startswith("__")}
        module.__dict__.update(public)
        module.__dict__["__getattr__"] = old_names(module.__name__)

    def get_code(self, fullname: str) -> types.CodeType:
        """Returns code that runs the new module, for `python -m` with its old path."""
        new = MODULES[fullname]
        warn(fullname, new)
        source = f"import runpy\nrunpy.run_module({new!r}, run_name='__main__', alter_sys=True)"
        return compile(source, f"<{fullname}>", "exec")


def install() -> None:
    """Lets old module paths be imported; called once, by the package."""
    sys.meta_path.append(_OldModules())
