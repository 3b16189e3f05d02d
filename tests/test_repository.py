"""The house of DESIGN section 3, and the environment's pins."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfp_dpvi"
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))

STACKS = ("current", "tf215")

# Rooms from the top of the house to the bottom. A room may import from its own row and from below.
HOUSE = [
    ["models"],
    ["callbacks", "metrics", "export", "synthetic", "preprocessing"],
    ["optimizers"],
    ["gradients"],
    ["sampling"],
    ["surrogates", "divergences"],
    ["privacy"],
    ["datasets"],
]
# Rooms below that a room may not know all the same.
FORBIDDEN = {
    "gradients": {"datasets"},
    "sampling": {"datasets"},
    "surrogates": {"privacy", "datasets"},
    "divergences": {"privacy", "datasets"},
    "privacy": {"datasets"},
}
RANK = {room: rank for rank, row in enumerate(HOUSE) for room in row}


# -------------------------------------------------------------------------------- the house


def _floor(room):
    """Private modules such as `_keras` lie below everything."""
    return len(HOUSE) if room.startswith("_") else RANK[room]


def _may_import(room, other):
    if room == other:
        return True
    return _floor(room) <= _floor(other) and other not in FORBIDDEN.get(room, ())


def _package_files(package=PACKAGE):
    """Every file but the package's face, which may show whatever is in the house."""
    return [path for path in sorted(package.rglob("*.py")) if path != package / "__init__.py"]


def _module(path, package=PACKAGE):
    parts = (package.name, *path.relative_to(package).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _room(module):
    return module.split(".")[1] if "." in module else ""


def _imports(tree, path, package=PACKAGE):
    """Yields (line, module, name) of each import; name is None for `import module`."""
    here = _module(path, package).split(".")
    if path.name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, module, alias.name
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else None
            called = node.func.id if isinstance(node.func, ast.Name) else called
            name = node.args[0]
            if (
                called in ("import_module", "__import__")
                and isinstance(name, ast.Constant)
                and isinstance(name.value, str)
            ):
                yield node.lineno, name.value, None


def _lines_for_types_only(tree):
    """Lines under `if TYPE_CHECKING:`; at run time they make no circle."""
    return {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
    }


def _house_defects(package=PACKAGE):
    defects = []
    graph = {}
    modules = {_module(path, package) for path in _package_files(package)}
    for path in _package_files(package):
        module = _module(path, package)
        room = _room(module)
        if not room.startswith("_") and room not in RANK:
            defects.append(f"{module}: no such room in DESIGN section 3")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        edges = graph.setdefault(module, set())
        types_only = _lines_for_types_only(tree)

        def defect(line, problem, module=module):
            defects.append(f"{module}, line {line}: {problem}")

        for line, target, name in _imports(tree, path, package):
            full = f"{target}.{name}" if name else target
            top = target.split(".")[0]
            if top == package.name:
                other = _room(full if target == package.name else target)
                if name == "__version__":
                    continue
                if not other or (not other.startswith("_") and other not in RANK):
                    defect(line, f"imports {full} from the package's face, which is above it")
                elif not _may_import(room, other):
                    defect(line, f"imports {full}: {room} may not know {other}")
                if line not in types_only:
                    edges.add(full if full in modules else target)
            if top == "tensorflow_privacy":
                defect(line, "the package does not import TensorFlow Privacy")
            if room != "_tf" and (
                top in ("keras", "tf_keras") or f"{full}.".startswith(("tensorflow.keras.", "tensorflow.python.keras."))
            ):
                defect(line, "Keras comes from tfp_dpvi._tf only")
            if room == "privacy" and (
                top in ("tensorflow", "tensorflow_probability", "keras", "tf_keras")
                or f"{full}.".startswith(f"{package.name}._keras.")
            ):
                defect(line, "privacy/ must not import TensorFlow")
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr == "keras"
                and isinstance(node.value, ast.Name)
                and node.value.id in ("tf", "tensorflow")
                and room != "_tf"
            ):
                defect(node.lineno, "tf.keras is named in tfp_dpvi._tf only")
    defects.extend(f"circle: {' -> '.join(circle)}" for circle in _circles(graph))
    return defects


def _circles(graph):
    done, circles = set(), []

    def visit(module, trail):
        if module in trail:
            circles.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for other in sorted(graph.get(module, ())):
                if other != module:
                    visit(other, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return circles


def test_imports_run_down_the_house():
    assert _house_defects() == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"privacy/plan.py": "from tfp_dpvi import models"}, "privacy may not know models"),
        ({"privacy/plan.py": "from tfp_dpvi.models.dpvi import DPVI"}, "may not know models"),
        ({"privacy/plan.py": "from ..sampling import poisson"}, "may not know sampling"),
        ({"privacy/plan.py": "def f():\n    import tensorflow as tf"}, "not import TensorFlow"),
        ({"privacy/plan.py": "from tfp_dpvi._tf import tf"}, "not import TensorFlow"),
        ({"privacy/plan.py": "from tfp_dpvi import _keras"}, "not import TensorFlow"),
        ({"surrogates.py": "import tfp_dpvi.privacy"}, "surrogates may not know privacy"),
        ({"models/dpvi.py": "from tfp_dpvi import DPVI"}, "from the package's face"),
        ({"_random.py": "from tfp_dpvi import sampling"}, "_random may not know sampling"),
        ({"models/dpvi.py": "import tensorflow_privacy"}, "does not import TensorFlow Privacy"),
        (
            {"optimizers/adapter.py": "import importlib\nimportlib.import_module('tensorflow_privacy')"},
            "does not import TensorFlow Privacy",
        ),
        ({"models/dpvi.py": "import tensorflow as tf\ntf.keras.Model"}, "tf.keras is named"),
        ({"models/dpvi.py": "from tensorflow import keras"}, "Keras comes from"),
        ({"models/dpvi.py": "import keras"}, "Keras comes from"),
        ({"helpers.py": ""}, "no such room"),
        (
            {
                "models/a.py": "from tfp_dpvi.models import b",
                "models/b.py": "def f():\n    from tfp_dpvi.models.a import x",
            },
            "circle: tfp_dpvi.models.a -> tfp_dpvi.models.b -> tfp_dpvi.models.a",
        ),
        (
            {
                "models/__init__.py": "from tfp_dpvi.models.a import x",
                "models/a.py": "from tfp_dpvi.models import x",
            },
            "circle: tfp_dpvi.models -> tfp_dpvi.models.a -> tfp_dpvi.models",
        ),
    ],
)
def test_the_check_of_the_house_sees_a_defect(tmp_path, files, problem):
    package = tmp_path / "tfp_dpvi"
    for name, text in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert problem in "\n".join(_house_defects(package))


def test_the_check_of_the_house_lets_the_right_things_through(tmp_path):
    package = tmp_path / "tfp_dpvi"
    for name, text in {
        "__init__.py": "from tfp_dpvi.models import DPVI",
        "models/__init__.py": "from tfp_dpvi.models.dpvi import DPVI",
        "models/dpvi.py": "from tfp_dpvi import __version__, privacy\nfrom tfp_dpvi._tf import tf",
        "privacy/__init__.py": "from tfp_dpvi.privacy.plan import Plan",
        "privacy/plan.py": "from tfp_dpvi.privacy import calibration",
        "privacy/calibration.py": "if TYPE_CHECKING:\n    from tfp_dpvi.privacy.plan import Plan",
        "_tf.py": "import tensorflow as tf\nkeras = tf.keras",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    assert _house_defects(package) == []


# -------------------------------------------------------------------------------- imports


def _of_python(text):
    """Lines without those that TensorFlow's C++ writes by itself, some whatever TF_CPP_MIN_LOG_LEVEL says."""
    native = re.compile(
        r"(\d{4}-\d\d-\d\d \S+ )?[IWE]\d{4} |WARNING: All log messages before absl::|To enable the following"
    )
    return [line for line in text.splitlines() if not native.match(line)]


def _python(code):
    quiet_by_itself = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=quiet_by_itself,
    )


FIRST_FIT = """
from tfp_dpvi import DPVI, optimizers
import warnings, numpy as np, tensorflow_probability as tfp
warnings.filterwarnings("always", module="tfp_dpvi")
tfd = tfp.distributions
model = DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
model.compile(optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0), epsilon=1.0, delta=1e-5, jit_compile=True)
x = np.ones(100, np.float32)
model.fit(x, x, batch_size=10, epochs=2, verbose=0)
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "code", ["import tfp_dpvi", "from tfp_dpvi import DPVI", FIRST_FIT], ids=["face", "model", "fit"]
)
def test_imports_and_a_first_fit_are_quiet(code):
    result = _python(code)
    assert (result.returncode, result.stdout, _of_python(result.stderr)) == (0, "", [])


def test_privacy_needs_no_tensorflow():
    result = _python("import sys, tfp_dpvi.privacy; print('tensorflow' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


# -------------------------------------------------------------------------------- the environment


def _pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _pins(path):
    lines = [line.split("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    pins = {}
    for line in filter(None, lines):
        match = re.fullmatch(r"([A-Za-z0-9._-]+)==([^\s;]+)", line)
        assert match, f"{path.name}: {line!r} is not a pin"
        name = canonicalize_name(match[1])
        assert name not in pins, f"{path.name}: {name} twice"
        pins[name] = match[2]
    return pins


def _python_of(path):
    return f"3.{path.stem.rpartition('-py3')[2]}"


def test_there_is_a_constraints_file_for_each_stack_and_python():
    """TensorFlow 2.15 has no wheels for Python 3.12 and later."""
    stacks = {stack: [_python_of(path) for path in CONSTRAINTS if path.name.startswith(stack)] for stack in STACKS}
    assert stacks == {"current": ["3.10", "3.11", "3.12", "3.13"], "tf215": ["3.10", "3.11"]}
    project = _pyproject()["project"]
    assert project["requires-python"] == ">=3.10,<3.14"
    named = [line.rsplit(" ", 1)[1] for line in project["classifiers"] if line.startswith("Programming Language")]
    assert named == ["3", "3.10", "3.11", "3.12", "3.13"]


def test_the_version_is_the_same_everywhere():
    import tfp_dpvi

    assert _pyproject()["project"]["version"] == tfp_dpvi.__version__


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_pins_satisfy_pyproject(path):
    project = _pyproject()["project"]
    extras = project["optional-dependencies"]
    python = {"python_version": _python_of(path)}
    pins = _pins(path)
    assert "tfp-dpvi" not in pins
    old = extras["tensorflow-privacy"] if path.name.startswith("tf215") else []
    for line in [*project["dependencies"], *extras["examples"], *extras["dev"], *extras["gpu"], *old]:
        requirement = Requirement(line)
        if requirement.name == project["name"]:
            continue
        if requirement.marker and not requirement.marker.evaluate(python):
            continue
        pin = pins.get(canonicalize_name(requirement.name))
        assert pin, f"{line} has no pin"
        assert requirement.specifier.contains(pin), f"{line} is pinned to {pin}"


def test_this_environment_is_the_pinned_one():
    """What the tests say holds for the versions that ship, so they must run on those."""
    from importlib.metadata import version

    stack = "tf215" if version("tensorflow").startswith("2.15.") else "current"
    pins = _pins(ROOT / "constraints" / f"{stack}-py3{sys.version_info.minor}.txt")
    assert ("tensorflow-privacy" in pins) == (stack == "tf215")
    for name in ("tensorflow", "tensorflow-probability", "tf-keras", "tensorflow-privacy", "dp-accounting", "numpy"):
        if name in pins:
            assert version(name) == pins[name]


def test_optional_packages_stay_optional():
    names = {Requirement(line).name for line in _pyproject()["project"]["dependencies"]}
    assert not names & {"pandas", "matplotlib", "scikit-learn"}


def test_no_machine_is_named():
    """Nothing in the repository points at a folder of somebody's machine."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    absolute = re.compile(r"(?<![\w.~/])/(home|root|Users|work|tmp|opt)/\w")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".yml", "") and path.is_file():
            found = absolute.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert not found, f"{name} names {found[0]}"
