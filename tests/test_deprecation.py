"""Old names and module paths work for one version, and say which ones are new."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import pathlib
import re
import subprocess
import sys
import warnings

import pytest

import tfp_dpvi
from tfp_dpvi import _deprecation

NAMES = [
    (package, name, *(new.split(":") if ":" in new else (new, name)))
    for package, names in _deprecation.NAMES.items()
    for name, new in names.items()
]


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    """As in a process that has not asked for an old path yet; what was loaded then is put back."""
    for old in _deprecation.MODULES:
        monkeypatch.delitem(sys.modules, old, raising=False)
        package, _, name = old.rpartition(".")
        if package in sys.modules:
            monkeypatch.delitem(vars(sys.modules[package]), name, raising=False)


@contextlib.contextmanager
def says(old: str, new: str):
    """Checks that one warning is about the old name, at a line of this file, and none about others."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        yield
    messages = [str(warning.message) for warning in seen]
    assert messages.count(f"{old} is now {new}; the old name goes in version 0.4.") == 1
    assert all(old.startswith(message.split(" is now ")[0]) for message in messages)
    assert {warning.category for warning in seen} == {FutureWarning}
    assert {warning.filename for warning in seen} == {__file__}


@pytest.mark.parametrize(
    ("package", "name", "new_package", "new_name"),
    NAMES,
    ids=[f"{package}.{name}" for package, name, *_ in NAMES],
)
def test_an_old_name_is_the_new_object(package, name, new_package, new_name):
    with says(f"{package}.{name}", f"{new_package}.{new_name}"):
        old_object = getattr(importlib.import_module(package), name)
    assert old_object is getattr(importlib.import_module(new_package), new_name)


def test_an_old_argument_is_the_new_one():
    @_deprecation.renamed_argument("old", "new")
    def called(new, other=2):
        return new, other

    name = called.__qualname__
    with says(f"{name}(old=)", f"{name}(new=)"):
        assert called(old=1) == (1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert called(1, other=3) == called(new=1, other=3) == (1, 3)
        with pytest.raises(TypeError, match="unexpected keyword argument 'old'"):
            called(new=1, old=1)


@pytest.mark.parametrize("place", _deprecation.CLASSES.values())
def test_files_find_classes_at_todays_places(place):
    old = [old for old, new in _deprecation.CLASSES.items() if new == place]
    assert {_deprecation.current_place(each) for each in (*old, place)} == {place}
    module, _, name = place.partition(":")
    assert getattr(importlib.import_module(module), name).__module__ == module
    assert _deprecation.current_place("tfp_dpvi.models.bend:x") == "tfp_dpvi.calibrated.nonlinear:x"


@pytest.mark.parametrize(("old", "new"), _deprecation.MODULES.items())
def test_an_old_module_has_what_the_new_one_has(old, new):
    if new.endswith(".flower"):
        pytest.importorskip("flwr")
    module = importlib.import_module(new)
    with says(old, new):
        old_module = importlib.import_module(old)
    names = [name for name in dir(module) if not name.startswith("__")]
    assert [name for name in names if getattr(old_module, name) is not getattr(module, name)] == []
    with pytest.raises(AttributeError, match=f"^module '{old}' has no attribute 'unknown'$"):
        old_module.unknown  # noqa: B018


def test_an_import_statement_warns_at_its_own_line():
    with says("tfp_dpvi.models.bend", "tfp_dpvi.calibrated.nonlinear"):
        import tfp_dpvi.models.bend  # noqa: F401
    with says("tfp_dpvi.models.table", "tfp_dpvi.synthetic.model"):
        from tfp_dpvi.models import table
    assert table.TableModel.__module__ == "tfp_dpvi.synthetic.model"


def test_an_old_module_is_an_attribute_of_its_package():
    with says("tfp_dpvi.gradients.ghost", "tfp_dpvi.ghost.layers"):
        old_module = tfp_dpvi.gradients.ghost
    assert old_module.LayerGradients is tfp_dpvi.ghost.layers.LayerGradients


@pytest.mark.parametrize("package", ["tfp_dpvi", "tfp_dpvi.gradients", "tfp_dpvi.models"])
def test_an_unknown_name_is_an_attribute_error(package):
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'unknown'$"):
        importlib.import_module(package).unknown  # noqa: B018


def test_an_unknown_module_is_not_found():
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'tfp_dpvi\.models\.unknown'$"):
        importlib.import_module("tfp_dpvi.models.unknown")


def test_importing_the_package_warns_of_nothing():
    command = [sys.executable, "-W", "error::FutureWarning", "-c", "import tfp_dpvi.privacy"]
    subprocess.run(command, check=True, capture_output=True)


def test_no_file_of_the_package_uses_an_old_name():
    """So that no new name leads over an old one."""
    old = {*_deprecation.MODULES, *(f"{package}.{name}" for package, name, *_ in NAMES)}
    for path in pathlib.Path(tfp_dpvi.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            source = getattr(node, "module", None)
            paths = [f"{source}.{alias.name}" for alias in getattr(node, "names", ()) if source]
            assert old.isdisjoint([source, *paths]), path


@pytest.mark.parametrize("name", ["table.keras", pytest.param("vae.keras", marks=pytest.mark.slow)])
def test_a_file_of_an_old_version_loads_without_a_warning(name):
    """In a fresh process, where its classes are not known: who loads it cannot change the paths in it."""
    path = pathlib.Path(__file__).parent / "references" / name
    code = (
        "import sys, warnings; warnings.simplefilter('error', FutureWarning)\n"
        "import support.references\n"
        "import tfp_dpvi; tfp_dpvi.load_model(sys.argv[1])"
    )
    command = [sys.executable, "-c", code, str(path)]
    folder = pathlib.Path(__file__).parent
    places = os.pathsep.join(map(str, [folder.parent, folder]))
    # Without importing Keras 3.
    environment = {"PYTHONPATH": places, "TF_USE_LEGACY_KERAS": "1"}
    subprocess.run(command, env={**os.environ, **environment}, check=True)


def test_the_page_quotes_a_warning():
    page = pathlib.Path(tfp_dpvi.__file__).parents[1] / "docs" / "versions.md"
    quoted = re.search(r"^FutureWarning: (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)[1]
    with pytest.warns(FutureWarning, match=f"^{re.escape(quoted)}$"):
        importlib.import_module("tfp_dpvi.models").Synthesizer  # noqa: B018


def test_old_names_have_not_outlived_their_version():
    """From 0.4 on the tables of `_deprecation` are to be emptied of what moved in 0.3."""
    assert tfp_dpvi.__version__.startswith("0.3.")
