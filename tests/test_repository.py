"""What imports and a first fit print, and the environment's pins."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import tarfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = pathlib.Path(__file__).resolve().parents[1]
CONSTRAINTS = sorted((ROOT / "constraints").glob("*.txt"))

STACKS = ("current", "tf215")

# -------------------------------------------------------------------------------- imports


def _of_python(text):
    """Lines without those that TensorFlow's C++ writes by itself, some whatever TF_CPP_MIN_LOG_LEVEL says."""
    native = re.compile(
        r"(\d{4}-\d\d-\d\d \S+ )?[IWE]\d{4} |WARNING: All log messages before absl::|To enable the following"
    )
    return [line for line in text.splitlines() if not native.match(line)]


def _python(code):
    quiet_by_itself = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TF_CPP_MIN_LOG_LEVEL", "TF_USE_LEGACY_KERAS")
    }
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
model = DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0), clipping="flat")  # Else a sentence on 20 steps.
model.compile(optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0), epsilon=1.0, delta=1e-5, jit_compile=True)
x = np.ones(100, np.float32)
model.fit(x, x, batch_size=10, epochs=2, verbose=0)
import os
assert "TF_USE_LEGACY_KERAS" not in os.environ  # It would choose the Keras of everybody else's models too.
"""


@pytest.mark.smoke
@pytest.mark.parametrize(
    "code",
    [
        pytest.param("import tfp_dpvi", id="face"),
        pytest.param(FIRST_FIT, id="fit", marks=pytest.mark.slow),
    ],
)
def test_imports_and_a_first_fit_are_quiet(code):
    """Of the model too, which is what a first fit imports first; nor do they set an environment variable."""
    result = _python(code)
    assert (result.returncode, result.stdout, _of_python(result.stderr)) == (0, "", [])


def test_privacy_needs_no_tensorflow():
    result = _python("import sys, tfp_dpvi.privacy; print('tensorflow' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr


# -------------------------------------------------------------------------------- the environment


def _pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _text(name):
    return (ROOT / name).read_text(encoding="utf-8")


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
    stacks = {
        stack: [_python_of(path) for path in CONSTRAINTS if path.name.startswith(stack)]
        for stack in STACKS
    }
    assert stacks == {"current": ["3.10", "3.11", "3.12", "3.13"], "tf215": ["3.10", "3.11"]}
    project = _pyproject()["project"]
    assert project["requires-python"] == ">=3.10,<3.14"
    named = [
        line.rsplit(" ", 1)[1]
        for line in project["classifiers"]
        if line.startswith("Programming Language")
    ]
    assert named == ["3", "3.10", "3.11", "3.12", "3.13"]


def test_the_version_is_in_one_place():
    """Elsewhere it is read: by setuptools without an import, and by conda-build."""
    import tfp_dpvi

    pyproject = _pyproject()
    assert pyproject["project"]["dynamic"] == ["version"]
    assert "version" not in pyproject["project"]
    dynamic = pyproject["tool"]["setuptools"]["dynamic"]
    assert dynamic == {"version": {"attr": "tfp_dpvi.__version__"}}
    from setuptools.config.expand import read_attr

    assert read_attr("tfp_dpvi.__version__", root_dir=ROOT) == tfp_dpvi.__version__
    pattern = re.search(r"regex_pattern='(.+)'", _text("packaging/conda/meta.yaml"))[1]
    assert re.search(pattern, _text("tfp_dpvi/__init__.py"))[1] == tfp_dpvi.__version__
    assert "\nversion" not in _text("CITATION.cff")


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.stem)
def test_pins_satisfy_pyproject(path):
    project = _pyproject()["project"]
    extras = project["optional-dependencies"]
    python = {"python_version": _python_of(path)}
    pins = _pins(path)
    assert "tfp-dpvi" not in pins
    old = extras["tensorflow-privacy"] if path.name.startswith("tf215") else []
    for line in [
        *project["dependencies"],
        *extras["examples"],
        *extras["dev"],
        *extras["gpu"],
        *old,
    ]:
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
    for name in (
        "tensorflow",
        "tensorflow-probability",
        "tf-keras",
        "tensorflow-privacy",
        "dp-accounting",
        "numpy",
    ):
        if name in pins:
            assert version(name) == pins[name]


def test_optional_packages_stay_optional():
    names = {Requirement(line).name for line in _pyproject()["project"]["dependencies"]}
    assert not names & {"pandas", "matplotlib", "scikit-learn"}


def test_no_machine_is_named():
    """Nothing in the repository points at a folder of somebody's machine."""
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split()
    absolute = re.compile(r"(?<![\w.~/])/(home|root|Users|work|tmp|opt)/\w")
    for name in tracked:
        path = ROOT / name
        if path.suffix in (".py", ".md", ".toml", ".txt", ".json", ".yml", "") and path.is_file():
            found = absolute.search(path.read_text(encoding="utf-8", errors="ignore"))
            assert not found, f"{name} names {found[0]}"


# -------------------------------------------------------------------------------- conventions


def test_windows_is_refused_in_a_sentence():
    """After the standard library was imported, which asks the same question."""
    imports = "import importlib.machinery, pathlib, sys, traceback, typing; sys.platform = 'win32'"
    result = _python(f"{imports}\nimport tfp_dpvi")
    assert result.returncode == 1
    assert result.stderr.splitlines()[-2:] == [
        "ImportError: tfp_dpvi does not run on Windows: it makes calls that only Unix systems have.",
        "Use Linux, for instance in a container or in the Windows Subsystem for Linux.",
    ]


def test_the_recipe_needs_what_the_package_needs():
    yaml = pytest.importorskip("yaml")
    text = re.sub(r"{%.*?%}", "", _text("packaging/conda/meta.yaml"), flags=re.DOTALL)
    recipe = yaml.safe_load(text)
    project = _pyproject()["project"]
    lines = [line for line in recipe["requirements"]["run"] if line != "__unix"]
    run = {canonicalize_name(Requirement(line).name): Requirement(line).specifier for line in lines}
    assert str(run.pop("python")) == str(Requirement(f"x{project['requires-python']}").specifier)
    wanted = [Requirement(line) for line in project["dependencies"]]
    assert run == {canonicalize_name(each.name): each.specifier for each in wanted}
    scripts = [f"{name} = {place}" for name, place in project["scripts"].items()]
    assert recipe["build"]["entry_points"] == scripts
    assert recipe["about"]["license"] == project["license"]["text"]


def test_pre_commit_runs_what_lint_runs():
    """By the environment's own versions, so that there is no second list of them."""
    yaml = pytest.importorskip("yaml")
    (repository,) = yaml.safe_load(_text(".pre-commit-config.yaml"))["repos"]
    assert repository["repo"] == "local"
    entries = [hook["entry"].removeprefix(".venv/bin/") for hook in repository["hooks"]]
    lint = _text("Makefile").partition("\nlint: ")[2].partition("\n\n")[0]
    assert entries == re.findall(r"\$\(BIN\)/(.+)", lint)


def test_read_the_docs_builds_what_make_docs_builds():
    yaml = pytest.importorskip("yaml")
    settings = yaml.safe_load(_text(".readthedocs.yaml"))
    assert settings["mkdocs"] == {"configuration": "mkdocs.yml", "fail_on_warning": True}
    assert settings["python"]["install"] == [{"requirements": "docs/requirements.txt"}]
    assert "mkdocs build --strict" in _text("Makefile")


def test_a_citation_says_what_the_project_says():
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load(_text("CITATION.cff"))
    project = _pyproject()["project"]
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == project["license"]["text"]
    assert citation["authors"] == project["authors"]
    assert citation["references"][0]["url"] == project["urls"]["Method"]


def test_the_sdist_is_the_repository(monkeypatch, tmp_path):
    """`make dist` runs the comparison; here it sees a file that is missing, and one too many."""
    spec = importlib.util.spec_from_file_location("check_sdist", ROOT / ".ci" / "check_sdist.py")
    check_sdist = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_sdist)

    def packed(names):
        path = tmp_path / "tfp_dpvi-1.tar.gz"
        with tarfile.open(path, "w:gz") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(f"tfp_dpvi-1/{name}"))
        return check_sdist.main(str(path))

    monkeypatch.setattr(check_sdist, "tracked", lambda: {"README.md", "tests/conftest.py"})
    written = ["PKG-INFO", "setup.cfg", "tfp_dpvi.egg-info/SOURCES.txt"]
    assert packed(["README.md", "tests/conftest.py", *written]) == 0
    assert packed(["README.md", *written]) == 1
    assert packed(["README.md", "tests/conftest.py", "secret.csv"]) == 1
