"""The structure of the package: what `.ci/structure.py` measures, and the path of one record through a real `fit`."""

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfp_dpvi"
WIDTH = 13  # The last dimension of the records that are followed, and of nothing else in their model.

_spec = importlib.util.spec_from_file_location("structure", ROOT / ".ci" / "structure.py")
structure = importlib.util.module_from_spec(_spec)
sys.modules["structure"] = structure  # Dataclasses look their module up.
_spec.loader.exec_module(structure)


@functools.cache
def figures():
    return structure.measure(structure.modules())


@pytest.mark.parametrize("figure", structure.LIMITS)
def test_the_figure_is_within_its_limit(figure):
    value, places = figures()[figure]
    shown = "\n".join(f"  {place}  {what}" for place, what in places)
    assert value <= structure.LIMITS[figure], f"{figure}: {value}, limit {structure.LIMITS[figure]}\n{shown}"


def test_the_drawing_is_current():
    page = structure.DRAWING.read_text(encoding="utf-8")
    current = structure.with_drawing(page, structure.draw(structure.modules()))
    assert page == current, "run: python .ci/structure.py --write"


def test_the_page_names_files_that_exist():
    """The table of `docs/architecture.md` sends a stranger to modules of the package."""
    page = structure.DRAWING.read_text(encoding="utf-8")
    named = {word.split("`")[0] for word in page.split("`tfp_dpvi/")[1:]}
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (PACKAGE / name).exists()] == []


# -------------------------------------------------------------------------------- the checks see what they should


def _read(folder, files):
    for name, text in files.items():
        (folder / "tfp_dpvi" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tfp_dpvi" / name).write_text(text)
    return structure.modules(folder / "tfp_dpvi")


def _shown(findings):
    return "\n".join(f"{place}: {what}" for place, what in findings)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"privacy/plan.py": "from tfp_dpvi import models"}, "privacy imports tfp_dpvi.models, which is not below"),
        ({"privacy/plan.py": "from tfp_dpvi.models.dpvi import DPVI"}, "which is not below it"),
        ({"privacy/plan.py": "def f():\n    from ..sampling import poisson"}, "privacy/plan.py:2: privacy imports"),
        ({"privacy/plan.py": "def f():\n    import tensorflow as tf"}, "imports tensorflow: take tf"),
        ({"privacy/plan.py": "from tfp_dpvi._tf import tf"}, "which is not below it"),
        ({"privacy/plan.py": "from tfp_dpvi import _tf"}, "which is not below it"),
        ({"surrogates.py": "import tfp_dpvi.privacy"}, "surrogates imports tfp_dpvi.privacy"),
        ({"optimizers/a.py": "from tfp_dpvi.training import fit"}, "which is not below it"),
        ({"models/dpvi.py": "from tfp_dpvi import DPVI"}, "tfp_dpvi.DPVI, which has no place in ORDER"),
        ({"_random.py": "from tfp_dpvi import sampling"}, "_random imports tfp_dpvi.sampling"),
        ({"models/dpvi.py": "import tensorflow_privacy"}, "imports TensorFlow Privacy"),
        (
            {"optimizers/adapter.py": "import importlib\nimportlib.import_module('tensorflow_privacy')"},
            "imports TensorFlow Privacy",
        ),
        ({"models/dpvi.py": "from tfp_dpvi._tf import tf\ntf.keras.Model"}, "names tf.keras"),
        ({"models/dpvi.py": "from tensorflow import keras"}, "imports tensorflow.keras"),
        ({"models/dpvi.py": "import keras"}, "imports keras: take"),
        ({"helpers.py": ""}, "helpers has no place in ORDER"),
    ],
)
def test_an_import_against_the_order_is_seen(tmp_path, files, problem):
    assert problem in _shown(structure.against_order(_read(tmp_path, files)))


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {
                "models/a.py": "from tfp_dpvi.models import b",
                "models/b.py": "def f():\n    from tfp_dpvi.models.a import x",
            },
            "tfp_dpvi.models.a -> tfp_dpvi.models.b -> tfp_dpvi.models.a",
        ),
        (
            {
                "models/__init__.py": "from tfp_dpvi.models.a import x",
                "models/a.py": "from tfp_dpvi.models import x",
            },
            "tfp_dpvi.models -> tfp_dpvi.models.a -> tfp_dpvi.models",
        ),
    ],
)
def test_a_circle_is_seen(tmp_path, files, problem):
    assert problem in _shown(structure.circles(_read(tmp_path, files)))


def test_the_right_imports_pass(tmp_path):
    found = _read(
        tmp_path,
        {
            "__init__.py": "from tfp_dpvi.models import DPVI",
            "models/__init__.py": "from tfp_dpvi.models.dpvi import DPVI",
            "models/dpvi.py": "from tfp_dpvi import __version__, privacy\nfrom tfp_dpvi._tf import tf",
            "privacy/__init__.py": "from tfp_dpvi.privacy.plan import Plan",
            "privacy/plan.py": "from tfp_dpvi.privacy import calibration",
            "privacy/calibration.py": "if TYPE_CHECKING:\n    from tfp_dpvi.privacy.plan import Plan",
            "_tf.py": "import tensorflow as tf\nkeras = tf.keras",
        },
    )
    assert structure.against_order(found) == []
    assert structure.circles(found) == []


@pytest.mark.parametrize(
    ("files", "across", "foreign"),
    [
        ({"models/a.py": "from tfp_dpvi.privacy._rdp import x", "privacy/_rdp.py": ""}, "privacy._rdp", None),
        ({"models/a.py": "from tfp_dpvi.privacy.plan import _x"}, "privacy.plan._x", None),
        ({"models/a.py": "model._dp", "training/b.py": "class C:\n    _dp: int"}, "uses ._dp, of training", None),
        ({"models/a.py": "getattr(model, '_dp')", "training/b.py": "self._dp = 1"}, "uses ._dp", None),
        ({"models/a.py": "layer._flatten_layers()"}, None, "uses ._flatten_layers"),
        ({"models/a.py": "from tensorflow.python.ops import pfor"}, None, "imports tensorflow.python"),
        ({"models/a.py": "def _f(self):\n    self._x = 1", "models/b.py": "a._f()\nmodel._x"}, None, None),
        (
            {"models/a.py": "from tfp_dpvi import _tf\nfrom tfp_dpvi.models import _b", "_tf.py": "l._inputs"},
            None,
            None,
        ),
    ],
)
def test_a_private_name_of_another_package_is_seen(tmp_path, files, across, foreign):
    found = structure.private_names(_read(tmp_path, files))
    for findings, wanted in zip(found, (across, foreign), strict=True):
        assert (wanted in _shown(findings)) if wanted else findings == []


def test_sizes_names_and_vague_types_are_counted(tmp_path):
    text = '''
class Plan:
    clip: float
    def price(self, x: Any, *rest: dict[str, Any]) -> object:
        """The Any of a docstring, and clip."""
        def inner(plan):
            return plan.clip
        return inner, self.clip, object
'''
    [module, other] = _read(tmp_path, {"models/a.py": text, "models/b.py": "run(clip=3)\n'clip'\nplan.clip = 2"})
    assert structure.vague_types(module) == 3
    lengths = {name: node.end_lineno - node.lineno + 1 for name, node, _ in structure.functions(module)}
    assert lengths == {"Plan.price": 5, "Plan.price.inner": 2}
    assert [place for place, _ in structure.naming_files([module, other], "clip")] == ["models/a.py", "models/b.py"]
    assert [what for _, what in structure.readers([module, other], "clip")] == ["Plan.price.inner reads .clip"]


def test_the_drawing_shows_what_is_imported_at_first_hand(tmp_path):
    files = {
        "models/a.py": "from tfp_dpvi import _tf, sampling",
        "sampling/a.py": "from tfp_dpvi import _tf",
        "_tf.py": "",
    }
    drawing = structure.draw(_read(tmp_path, files))
    assert drawing.splitlines()[1:-1] == ["| models   | --> sampling", "| sampling | --> _tf", "| _tf      |"]


# -------------------------------------------------------------------------------- the path of a record


def _is_of_a_record(value, depth=0):
    """Whether a value is or holds records, or a tensor that was computed from them."""
    from tfp_dpvi._tf import tf

    if isinstance(value, (list, tuple)):
        return depth < 4 and any(_is_of_a_record(part, depth + 1) for part in value)
    if isinstance(value, dict):
        return depth < 4 and any(_is_of_a_record(part, depth + 1) for part in value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return depth < 4 and any(_is_of_a_record(part, depth + 1) for part in vars(value).values())
    if isinstance(value, (np.ndarray, tf.Tensor)) and value.shape[-1:] == (WIDTH,):
        return True
    return isinstance(value, tf.Tensor) and hasattr(value, "op") and _is_computed_from_records(value.op)


@functools.cache
def _is_computed_from_records(op):
    """Whether an operation of a graph reads a tensor with the records' last dimension, directly or not."""
    seen, rest = set(), [op]
    while rest:
        one = rest.pop()
        if any(part.shape.rank and part.shape[-1] == WIDTH for part in (*one.inputs, *one.outputs)):
            return True
        seen.add(one)
        rest.extend(part.op for part in one.inputs if part.op not in seen)
    return False


def _files_on_the_path(fit):
    """Files of the package with a function that gets a record, or what is computed from one, until the update."""
    files, arrived = [], []

    def look(frame, event, _):
        code = frame.f_code
        if event != "call" or arrived or not code.co_filename.startswith(str(PACKAGE)):
            return
        name = pathlib.Path(code.co_filename).relative_to(PACKAGE).as_posix()
        values = [value for key, value in frame.f_locals.items() if key != "self"]
        sys.setprofile(None)
        try:
            if any(map(_is_of_a_record, values)) and name not in files:
                files.append(name)
        finally:
            sys.setprofile(look)
        if code.co_name == "apply_gradients":
            arrived.append(name)

    sys.setprofile(look)
    try:
        fit()
    finally:
        sys.setprofile(None)
    assert arrived, "no update was traced"
    return files


def test_one_record_reaches_the_update_through_few_files():
    import tfp_dpvi as dpvi
    from tfp_dpvi._tf import tf, tfp

    tfd = tfp.distributions
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * tf.reduce_sum(x, axis=-1), 1.0))
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=0.1)
    model.compile(optimizer, jit_compile=False)
    x, y = np.ones([20, WIDTH], np.float32), np.ones(20, np.float32)
    files = _files_on_the_path(lambda: model.fit(x, y, batch_size=5, epochs=1, verbose=0))
    assert any(name.startswith("gradients/") for name in files)
    assert any(name.startswith("optimizers/") for name in files)
    assert set(files) <= set(structure.RECORD_PATH), f"the record goes {' -> '.join(files)}"
    assert len(files) <= structure.LIMITS["files on a record's path"]


def test_the_declared_path_is_of_this_package():
    assert [path for path in structure.RECORD_PATH if not (PACKAGE / path).is_file()] == []
    for path in structure.RECORD_PATH:
        assert any(isinstance(node, ast.FunctionDef) for node in ast.walk(ast.parse((PACKAGE / path).read_text())))
