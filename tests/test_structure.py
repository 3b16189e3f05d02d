"""The structure of the package: what `.ci/structure.py` measures, and the path of one record through a real `fit`."""

import ast
import functools
import importlib.util
import pathlib
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfp_dpvi"
WIDTH = (
    13  # The last dimension of the records that are followed, and of nothing else in their model.
)

_spec = importlib.util.spec_from_file_location("structure", ROOT / ".ci" / "structure.py")
structure = importlib.util.module_from_spec(_spec)
sys.modules["structure"] = structure  # Dataclasses look their module up.
_spec.loader.exec_module(structure)


@functools.cache
def found():
    return structure.modules()


@functools.cache
def figures():
    return structure.measure(found())


@pytest.mark.parametrize("figure", structure.LIMITS)
def test_the_figure_is_within_its_limit(figure):
    value, places = figures()[figure]
    shown = "\n".join(f"  {place}  {what}" for place, what in places)
    assert value <= structure.LIMITS[figure], (
        f"{figure}: {value}, limit {structure.LIMITS[figure]}\n{shown}"
    )


def test_the_drawing_is_current():
    page = structure.DRAWING.read_text(encoding="utf-8")
    current = structure.with_drawing(page, structure.draw(found()))
    assert page == current, "run: python .ci/structure.py --write"


def test_the_page_names_files_that_exist():
    """The table of `docs/architecture.md` sends a stranger to modules of the package."""
    page = structure.DRAWING.read_text(encoding="utf-8")
    named = {word.split("`")[0] for word in page.split("`tfp_dpvi/")[1:]}
    assert len(named) >= 8
    assert [name for name in sorted(named) if not (PACKAGE / name).exists()] == []


def test_every_package_has_a_row_on_the_page():
    page = structure.DRAWING.read_text(encoding="utf-8")
    packages = [path.parent.name for path in PACKAGE.glob("*/__init__.py")]
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert len(packages) >= 15
    assert [name for name in sorted(packages) if f"`{name}/`" not in rows] == []


# -------------------------------------------------------------------------------- the checks see what they should


def _read(folder, files):
    for name, text in files.items():
        (folder / "tfp_dpvi" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "tfp_dpvi" / name).write_text(text)
    return structure.modules(folder / "tfp_dpvi")


def test_words_are_seen(tmp_path):
    source = '"""What it is."""\n\n\ndef f():\n    """Returns 1."""\n    return 1  # Made up.\n'
    assert len(structure.wordy(_read(tmp_path, {"__init__.py": "", "a.py": source}))) == 2


def _shown(findings):
    return "\n".join(f"{place}: {what}" for place, what in findings)


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"privacy/plan.py": "from tfp_dpvi import models"},
            "privacy imports tfp_dpvi.models, which is not below",
        ),
        ({"privacy/plan.py": "from tfp_dpvi.models.dpvi import DPVI"}, "which is not below it"),
        (
            {"privacy/plan.py": "def f():\n    from ..sampling import poisson"},
            "privacy/plan.py:2: privacy imports",
        ),
        (
            {"privacy/plan.py": "def f():\n    import tensorflow as tf"},
            "imports tensorflow: take tf",
        ),
        ({"privacy/plan.py": "from tfp_dpvi._tf import tf"}, "which is not below it"),
        ({"privacy/plan.py": "from tfp_dpvi import _tf"}, "which is not below it"),
        ({"surrogates.py": "import tfp_dpvi.privacy"}, "surrogates imports tfp_dpvi.privacy"),
        ({"optimizers/a.py": "from tfp_dpvi.training import fit"}, "which is not below it"),
        (
            {"models/dpvi.py": "from tfp_dpvi import DPVI"},
            "tfp_dpvi.DPVI, which has no place in ORDER",
        ),
        ({"_random.py": "from tfp_dpvi import sampling"}, "_random imports tfp_dpvi.sampling"),
        ({"models/dpvi.py": "import tensorflow_privacy"}, "imports TensorFlow Privacy"),
        (
            {
                "optimizers/adapter.py": "import importlib\nimportlib.import_module('tensorflow_privacy')"
            },
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
        (
            {
                "models/a.py": "from tfp_dpvi.models.b import y",
                "models/b.py": "if TYPE_CHECKING:\n    from tfp_dpvi.models.a import x",
            },
            "2 modules: tfp_dpvi.models.a -> tfp_dpvi.models.b -> tfp_dpvi.models.a",
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
            "privacy/calibration.py": "from tfp_dpvi.privacy import noise",
            "privacy/noise.py": "",
            "_tf.py": "import tensorflow as tf\nkeras = tf.keras",
        },
    )
    assert structure.against_order(found) == []
    assert structure.circles(found) == []


BASE = "class A:"
DERIVED = "from tfp_dpvi.models.a import A\nclass B(A):"


@pytest.mark.parametrize(
    ("files", "across", "foreign"),
    [
        (
            {"models/a.py": "from tfp_dpvi.privacy._rdp import x", "privacy/_rdp.py": ""},
            "privacy._rdp",
            None,
        ),
        ({"models/a.py": "from tfp_dpvi.privacy.plan import _x"}, "privacy.plan._x", None),
        (
            {"models/a.py": "model._dp", "training/b.py": "class C:\n    _dp: int"},
            "uses _dp, of training/b.py",
            None,
        ),
        (
            {"models/a.py": "getattr(model, '_dp')", "training/b.py": "self._dp = 1"},
            "uses _dp, of training/b.py",
            None,
        ),
        ({"models/a.py": "layer._flatten_layers()"}, None, "uses ._flatten_layers"),
        (
            {"models/a.py": "from tensorflow.python.ops import pfor"},
            None,
            "imports tensorflow.python",
        ),
        (
            {"models/a.py": "def _f(self):\n    pass", "models/b.py": "a._f()"},
            "models/b.py:1: uses _f, of models/a.py",
            None,
        ),
        ({"models/a.py": "from tfp_dpvi.models.b import _x"}, "imports tfp_dpvi.models.b._x", None),
        (
            {
                "models/a.py": f"{BASE}\n    def g(self):\n        self._x()",
                "models/b.py": f"{DERIVED}\n    def _x(self):\n        pass",
            },
            "models/a.py:3: uses _x, of models/b.py",
            None,
        ),
        (
            {
                "models/a.py": f"{BASE}\n    _x = 1",
                "models/b.py": f"{DERIVED}\n    def _x(self):\n        pass",
            },
            "models/b.py:2: overrides _x, of models/a.py",
            None,
        ),
        (
            {
                "models/a.py": f"{BASE}\n    _x = 1",
                "models/b.py": "_x = 2\n" + f"{DERIVED}\n    def g(self):\n        self._x",
            },
            "models/b.py:5: uses _x, of models/a.py",
            None,
        ),
        (
            {"models/a.py": "vars(m)['_dp']", "models/b.py": "class C:\n    _dp = 1"},
            "uses _dp, of models/b.py",
            None,
        ),
        (
            {
                "models/a.py": f"{BASE}\n    _x = 1\n\nclass B(A):\n    def g(self):\n        self._x"
            },
            None,
            None,
        ),
        (
            {
                "models/a.py": "from tfp_dpvi import _tf\nfrom tfp_dpvi.models import _b",
                "models/_b.py": "",
                "_tf.py": "l._inputs",
            },
            None,
            None,
        ),
    ],
)
def test_a_private_name_of_another_file_is_seen(tmp_path, files, across, foreign):
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
    [module, other] = _read(
        tmp_path, {"models/a.py": text, "models/b.py": "run(clip=3)\n'clip'\nplan.clip = 2"}
    )
    assert structure.vague_types(module) == 3
    lengths = {
        name: node.end_lineno - node.lineno + 1 for name, node, _ in structure.functions(module)
    }
    assert lengths == {"Plan.price": 5, "Plan.price.inner": 2}
    assert [place for place, _ in structure.naming_files([module, other], "clip")] == [
        "models/a.py",
        "models/b.py",
    ]
    assert [what for _, what in structure.readers([module, other], "clip")] == [
        "Plan.price.inner reads .clip"
    ]


def test_what_any_hides_is_counted(tmp_path):
    alias = "tfd: Any = tfp.distributions\ndef f(p: tfd.Normal):\n    return tfd.Gamma(p)"
    bare = "tfd = tfp.distributions\ntfd.Normal(0.0, 1.0)"
    [first, second] = _read(tmp_path, {"models/a.py": alias, "models/b.py": bare})
    assert structure.vague_types(first) == 3
    assert structure.vague_types(second) == 1


def test_a_ladder_is_read_across_files_and_other_names(tmp_path):
    found = _read(
        tmp_path,
        {
            "_tf.py": "import tf_keras as keras\nModel = keras.Model\nclass Exported(Model):\n    pass",
            "models/__init__.py": "from tfp_dpvi.models.a import DPModel as Base",
            "models/a.py": "from tfp_dpvi import _tf\nRoot = _tf.Exported\nclass DPModel(Root):\n    pass",
            "models/dpvi.py": "from tfp_dpvi import models\nclass DPVI(models.Base):\n    pass",
        },
    )
    names = [name for _, name in structure.rungs(found, "DPVI")]
    assert names == ["DPVI", "DPModel", "Exported", "Model"]


@pytest.mark.parametrize("name", ["DPVI", "DPVAE"])
def test_the_ladder_from_the_source_is_pythons(name):
    import tfp_dpvi as dpvi
    from tfp_dpvi._tf import keras

    ladder = getattr(dpvi, name).__mro__
    own = [rung.__name__ for rung in ladder if rung.__module__.startswith("tfp_dpvi.")]
    assert keras.Model in ladder
    assert sorted([*own, "Model"]) == sorted(rung for _, rung in structure.rungs(found(), name))


def test_fields_that_change_are_counted(tmp_path):
    text = """
@dataclasses.dataclass
class Progress:
    steps: int = 0
    kind: ClassVar[str] = "x"
class Account(Progress):
    def __init__(self):
        self.made = self.outside = 1
    def f(self):
        self.inside = 2
@dataclasses.dataclass(frozen=True)
class Plan:
    steps: int
"""
    files = {"training/fit.py": text, "models/a.py": "def f(account):\n    account.outside = 3"}
    counted = structure.mutable_fields(_read(tmp_path, files))
    assert [(number, what) for number, _, what in counted] == [
        (3, "Account: inside, outside, steps"),
        (1, "Progress: steps"),
        (0, "Plan: "),
    ]


@pytest.mark.parametrize(
    ("line", "asks"),
    [
        ("return math.isinf(model.clip.bound)", True),
        ("return np.isfinite(self.l2_norm_clip)", True),
        ("return self.bound == float('inf')", True),
        ("limit = model.clip.bound\n    return limit < math.inf", True),
        ("noise, limit = 1.0, float(model.clip.bound)\n    return math.isinf(limit)", True),
        ("return math.isinf(epsilon)", False),
        ("return np.isfinite(clipped)", False),
        ("return model.clip.is_off", False),
    ],
)
def test_a_question_about_the_clip_is_seen(tmp_path, line, asks):
    found = _read(tmp_path, {"models/a.py": f"def f(self):\n    {line}"})
    assert bool(structure.tests_of_the_clip(found)) is asks
    assert bool(structure.asking_files(found)) is (asks or "is_off" in line)


def test_air_is_measured(tmp_path):
    text = """
def public(a, b):
    "Adds. Args are numbers."
    (a, (b, c)) = x
    a, b = x
    def inner(a, b):
        pass
class Own:
    def method(self, a, *, b):
        '''Adds.

        Args:
          a: one number.
          b: another.
        '''
    def other(self, a, b):
        "See `Base.other`."
    def _private(self, a, b):
        pass
"""
    found = _read(tmp_path, {"models/a.py": text, "models/b.py": f"# {'x' * 99}\n# {'x' * 98}"})
    assert structure.without_args(found) == [("models/a.py:2", "public")]
    assert structure.crowded_assignments(found) == [("models/a.py:4", "(a, (b, c))")]
    assert structure.wide_lines(found) == [("models/b.py:1", "101 columns")]
    assert [structure.statements(module) for module in found] == [10, 0]


def test_asserts_that_something_is_not_none_are_seen(tmp_path):
    text = "def f(a, b):\n    assert a is not None\n    assert b > 0 and not a is None\n    assert a == b"
    found = _read(tmp_path, {"models/a.py": text})
    assert structure.asserted_values(found) == [
        ("models/a.py:2", "a is not None"),
        ("models/a.py:3", "a is None"),
    ]


def test_names_and_options_without_an_example_are_seen(tmp_path):
    files = {
        "models/__init__.py": "from tfp_dpvi.models.a import DPVI, shown\n__all__ = ['DPVI', 'shown']",
        "models/a.py": """
class Base:
    def __init__(self, prior, draws=1, *, seed=None, clip):
        pass
class DPVI(Base):
    pass
def shown(model, rare=2):
    pass
""",
        "metrics.py": "def public():\n    pass\ndef _hidden():\n    pass",
        "sampling/__init__.py": "from tfp_dpvi.sampling.a import ran, told\n__all__ = ['ran', 'told']",
        "sampling/a.py": """
def ran(size=1, other=2):
    '''Example, unlike told(other=1):
    >>> ran(size=3)
    'told other='
    '''
def told():
    pass
""",
    }
    shown = "shown(model), with `draws` or DPVIs(seed=1); rare is said in passing"
    places = structure.unshown(_read(tmp_path, files), shown)
    assert [what for _, what in places] == [
        "tfp_dpvi.metrics.public",
        "tfp_dpvi.models.DPVI",
        "tfp_dpvi.models.shown(rare=)",
        "tfp_dpvi.sampling.ran(other=)",
        "tfp_dpvi.sampling.told",
    ]


def test_fields_are_options_only_of_a_dataclass_that_something_shown_constructs(tmp_path):
    found = _read(
        tmp_path,
        {
            "metrics.py": """
@dataclasses.dataclass
class Plan:
    size: int = 1
@dataclasses.dataclass
class Result:
    value: int = 1
class Metric:
    def __init__(self, name=None):
        pass
"""
        },
    )
    places = structure.unshown(found, "Plan(), which returns a Result, or a Metric")
    assert [what for _, what in places] == [
        "tfp_dpvi.metrics.Plan(size=)",
        "tfp_dpvi.metrics.Metric(name=)",
    ]


def test_the_drawing_shows_what_is_imported_at_first_hand(tmp_path):
    files = {
        "models/a.py": "from tfp_dpvi import _tf, sampling",
        "sampling/a.py": "from tfp_dpvi import _tf",
        "_tf.py": "",
    }
    drawing = structure.draw(_read(tmp_path, files))
    assert drawing.splitlines()[1:-1] == [
        "| models   | --> sampling",
        "| sampling | --> _tf",
        "| _tf      |",
    ]


# -------------------------------------------------------------------------------- the path of a record

HANDS_ON = {
    "Identity",
    "Placeholder",
    "While",
    "StatelessWhile",
    "PartitionedCall",
    "StatefulPartitionedCall",
}


def _graphs(values, depth=0):
    """Yields the graphs of the tensors among some values."""
    for value in values:
        if isinstance(value, (list, tuple)) and depth < 4:
            yield from _graphs(value, depth + 1)
        elif isinstance(value, dict) and depth < 4:
            yield from _graphs(value.values(), depth + 1)
        elif hasattr(value, "op") and hasattr(value, "graph"):
            yield value.graph


def _traced(fit):
    """Runs `fit`; returns the graphs that functions of the package were traced into."""
    graphs = {}

    def look(frame, event, _):
        if event == "return" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            sys.setprofile(None)
            graphs.update((id(graph), graph) for graph in _graphs(frame.f_locals.values()))
            sys.setprofile(look)

    sys.setprofile(look)
    try:
        fit()
    finally:
        sys.setprofile(None)
    return list(graphs.values())


def _is_update(operation):
    return operation.type.startswith(("Assign", "ResourceApply"))


def _files_on_the_path(graph):
    """Files of the package that made an operation between a record and the graph's updates, or its outputs without one.

    Loops and calls count where they compute. So do not `_tf.py`, which stands for TensorFlow, and the files that hand a
    tensor on as it is.
    """
    operations = graph.get_operations()
    after = set()
    for operation in operations:
        is_record = any(part.shape.rank and part.shape[-1] == WIDTH for part in operation.outputs)
        if is_record or any(part.op in after for part in operation.inputs):
            after.add(operation)
    updates = list(filter(_is_update, operations))
    before, rest = set(), updates or [part.op for part in graph.outputs]
    while rest:
        operation = rest.pop()
        if operation not in before:
            before.add(operation)
            rest.extend(part.op for part in operation.inputs)
    files = set()
    for operation in after & before:
        own = [
            frame.filename
            for frame in operation.traceback
            if frame.filename.startswith(str(PACKAGE))
        ]
        if own and operation.type not in HANDS_ON:
            files.add(pathlib.Path(own[-1]).relative_to(PACKAGE).as_posix())
    return files - {"_tf.py"}


def _updates_within_or_around(graph):
    """Returns whether a graph is of the steps: checks trace graphs too, and update nothing."""
    while graph is not None and hasattr(graph, "get_operations"):
        if any(map(_is_update, graph.get_operations())):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def test_one_record_reaches_the_update_through_few_files():
    import tfp_dpvi as dpvi
    from tfp_dpvi._tf import tf, tfp

    tfd = tfp.distributions
    model = dpvi.DPVI(
        tfd.Normal(0.0, 1.0),
        lambda w, x: tfd.Normal(w * tf.reduce_sum(x, axis=-1), 1.0),
    )
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=0.1
    )
    model.compile(optimizer, jit_compile=False)
    x, y = np.ones([20, WIDTH], np.float32), np.ones(20, np.float32)
    graphs = _traced(lambda: model.fit(x, y, batch_size=5, epochs=1, verbose=0))
    files = set().union(*map(_files_on_the_path, filter(_updates_within_or_around, graphs)))
    assert files == set(structure.RECORD_PATH)
    assert len(files) <= structure.LIMITS["files on a record's path"]


def test_the_declared_path_is_of_this_package():
    assert [path for path in structure.RECORD_PATH if not (PACKAGE / path).is_file()] == []
    for path in structure.RECORD_PATH:
        assert any(
            isinstance(node, ast.FunctionDef)
            for node in ast.walk(ast.parse((PACKAGE / path).read_text()))
        )
