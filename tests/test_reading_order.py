"""The order in which a package's page says to read its files: all of them, imports pointing back."""

import ast
import pathlib
import re

import pytest

import tfp_dpvi

ROOT = pathlib.Path(tfp_dpvi.__file__).parent
CLAIM = "Each imports from those before it only."


def page(package):
    return ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""


PACKAGES = [path.parent for path in ROOT.glob("*/__init__.py") if CLAIM in page(path.parent)]


def imports(path, package):
    """Returns the files of the same package that a file imports, whatever for."""
    own = ["tfp_dpvi", package.name]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[:2] == own:
            yield from (node.module.split(".")[2:3] or [name.name for name in node.names])


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_packages_files_can_be_read_in_the_order_of_its_page(package):
    files = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    text = page(package).partition(CLAIM)[2]
    order = [name for name in dict.fromkeys(re.findall(r"`(\w+)`", text)) if name in files]
    assert set(order) == files
    for place, name in enumerate(order):
        later = files & set(imports(package / f"{name}.py", package)) - set(order[:place])
        assert not later, f"{name} imports {later}"


def test_packages_of_many_files_have_such_a_page():
    assert {package.name for package in PACKAGES} >= {"calibrated", "models", "regressions"}
