"""No message shows a record's value: exceptions with their causes, warnings, logs, output.

Each case gives a public entry point records of which one has a marked value, in a place where something
refuses it or may print it, and searches all that comes out.
"""

from __future__ import annotations

import ast
import contextlib
import logging
import pathlib
import re
import traceback
import types
import warnings

import numpy as np
import pytest
from support.toy import Toy, adam, toy

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi._tf import tf, tfd, tfp
from tfp_dpvi.data import Binary, Categorical, Continuous, Date, Integer, Schema, make_records
from tfp_dpvi.federated import Hospital, Study, Task

NUMBER, TEXT = 4711.25, "HIV positive"
_MARKED = re.compile(r"4[.,]?711|HIV|positive'")
N = 12


class Unhashable:
    """A value that is no category, and shows itself."""

    __hash__ = None

    def __repr__(self):
        return TEXT


class _Collector(logging.Handler):
    def __init__(self):
        super().__init__(1)
        self.lines = []

    def emit(self, record):
        self.lines.append(f"{record.getMessage()} {record.args!r}")


@contextlib.contextmanager
def _logged():
    """Collects all log records, also of loggers that do not propagate."""
    collector = _Collector()
    loggers = [logging.getLogger(name) for name in (None, "tfp_dpvi", "tensorflow", "absl")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(collector)
        logger.setLevel(logging.INFO if logger.name == "tensorflow" else 1)
    try:
        yield collector.lines
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(collector)
            logger.setLevel(level)


def all_that_comes_out(call, capfd):
    """Returns the exception of a call, or None, and all text that it puts out."""
    capfd.readouterr()
    error, result = None, None
    with _logged() as lines, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = call()
        except Exception as caught:
            error = caught
    shown = [] if error is None else traceback.format_exception(error)
    history = repr(getattr(result, "history", ""))
    streams = capfd.readouterr()
    said = [*shown, *lines, *(str(each.message) for each in warned), history, *streams]
    return error, "\n".join(said)


def check_silent(call, capfd, *words):
    """Checks that a call puts out no marked value, and raises an error with these words, if any."""
    error, said = all_that_comes_out(call, capfd)
    assert not _MARKED.search(said), said
    if words:
        assert error is not None
    for word in words:
        assert word in str(error), error


def numbers(shape=(N, 3), dtype="float32", value=NUMBER):
    """Returns records of which the one at index 3 has the marked value."""
    array = np.random.default_rng(0).uniform(size=shape)
    array = array if np.dtype(dtype).kind == "f" else array * 3
    array = array.astype(dtype)
    array[3] = value
    return array


def labels(value=1):
    made = np.arange(N) % 2
    made[3] = value
    return made


def mixed(*others, value=TEXT):
    """Returns objects: the marked value thrice, the others in turn."""
    others = others or (1.0,)
    made = np.array([others[place % len(others)] for place in range(N)], object)
    made[[3, 5, 8]] = [value] * 3
    return made


# ---------------------------------------------------------------------- tables

TABLES = {
    "a number outside its bounds": (Continuous(0, 10), numbers((N,)), ["'c'", "[0, 10]", "1 row"]),
    "infinite": (Continuous(0, 10), numbers((N,), value=np.inf), ["'c'", "1 row"]),
    "a string among numbers": (Continuous(0, 10), mixed(), ["'c'", "numbers", "3 rows"]),
    "a column of strings": (Integer(0, 10), np.array([TEXT] * N), ["'c'", "dtype str"]),
    "an integer that is too large": (Integer(0, 10), mixed(1, value=4711**100), ["3 rows"]),
    "a fraction": (Integer(0, 9999), numbers((N,), "float64"), ["Integer", "12 rows"]),
    "a fraction, once": (Integer(0, 9999), mixed(7, value=NUMBER), ["Integer", "3 rows"]),
    "an unknown category": (Categorical(["a", "b"]), mixed("a"), ["'c'", "3 rows"]),
    "a value that cannot be a category": (
        Categorical(["a", "b"]), mixed("a", value=Unhashable()), ["'c'", "3 rows"],
    ),
    "a word for a bool": (Binary(), mixed(0, 1), ["'c'", "Binary", "3 rows"]),
    "a number for a bool": (Binary(), numbers((N,)), ["'c'", "Binary", "12 rows"]),
    "a word for a date": (Date("2020-01-01", "2021-01-01"), mixed("2020-02-02"), ["dates", "3 rows"]),
    "a date outside": (
        Date("2020-01-01", "2021-01-01"), mixed("2020-02-02", value="4711-01-01"),
        ["[2020-01-01, 2021-01-01]", "3 rows"],
    ),
    "a missing value": (Continuous(0, 9999), mixed(NUMBER, value=None), ["missing", "3 rows"]),
    "a masked array": (Continuous(0, 9), np.ma.masked_equal(numbers((N,)), 0), ["masked"]),
    "two dimensions": (Continuous(0, 9), numbers(), ["shape"]),
    "a dtype as wide as its longest value": (
        Binary(), np.array(["0"] * 3 + ["1" + " " * 4710]), ["'c'", "dtype str", "Binary"],
    ),
    "a dtype of another kind": (Continuous(0, 9999), np.full(N, 4711), ["int64", "Integer"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def synthesizer():
    return dpvi.Synthesizer(Schema({"c": Binary()}), 1)


@pytest.mark.parametrize("case", TABLES)
def test_a_table(case, synthesizer, monkeypatch, capfd):
    column, values, words = TABLES[case]
    monkeypatch.setattr(synthesizer, "schema", Schema({"c": column}))
    check_silent(lambda: synthesizer.fit({"c": values}, epsilon=1.0, delta=1e-5), capfd, *words)
    assert synthesizer.model.privacy_ledger.num_releases == 0


def test_a_table_whose_first_record_became_its_header(capfd):
    """As of a file without a header: only names of the description are shown."""
    pandas = pytest.importorskip("pandas")
    schema = Schema({"c": Binary()})
    frames = {
        "not in the schema": pandas.DataFrame([[1, 2, 0]], columns=[str(NUMBER), TEXT, "c"]),
        "lacks": pandas.DataFrame([[1, 2]], columns=[str(NUMBER), TEXT]),
        "the same name": pandas.DataFrame([[1, 2]], columns=[TEXT, TEXT]),
    }
    for word, frame in frames.items():
        check_silent(lambda frame=frame: schema.encode(frame), capfd, word)
    check_silent(lambda: toy().fit(frames["the same name"], verbose=0), capfd, "names")


# ---------------------------------------------------------------------- arguments of fit


class Rows:
    """A source that is no array."""

    def __init__(self, array, later=None, error=None):
        self.array, self.later, self.error, self.reads = array, later, error, 0

    def __len__(self):
        return len(self.array)

    def __getitem__(self, indices):
        self.reads += 1
        if self.reads > 1 and self.error is not None:
            raise self.error
        return (self.array if self.reads == 1 or self.later is None else self.later)[indices]


def broken_dataset():
    def generate():
        yield np.ones([4, 3], "float32"), np.ones([4], "float32")
        raise ValueError(f"could not convert string to float: {TEXT!r}")

    specs = tf.TensorSpec([None, 3]), tf.TensorSpec([None])
    return tf.data.Dataset.from_generator(generate, output_signature=specs)


GOOD = np.ones([N, 3], "float32")
SAMPLED = {"sampling": "poisson", "sampling_probability": 0.3, "num_records": N}
FITS = {
    "NaN": ({"x": np.where(numbers() > 4000, np.nan, numbers(value=NUMBER))}, ["x", "1 row"]),
    "infinite in float32": ({"x": numbers(dtype="float64", value=4.71125e300)}, ["x", "1 row"]),
    "strings": ({"x": np.array([[TEXT]] * N)}, ["x", "dtype str", "numeric"]),
    "strings as wide as the longest": ({"x": np.array([["x" * 4711]] * N)}, ["dtype str"]),
    "objects": ({"x": mixed()}, ["x", "object"]),
    "lists of several lengths": ({"x": [[NUMBER], [NUMBER, 1.0]]}, ["x is a list"]),
    "a list of numbers and words": ({"x": [NUMBER, TEXT]}, ["x", "dtype str"]),
    "a number": ({"x": NUMBER}, ["x is a scalar"]),
    "a word": ({"x": TEXT}, ["x", "dtype str"]),
    "a negative weight": ({"sample_weight": numbers((N,), value=-NUMBER)}, [">= 0", "1 row"]),
    "words as weights": ({"sample_weight": mixed()}, ["sample_weight", "object"]),
    "records of other lengths": ({"x": numbers((N - 1, 3))}, ["Lengths differ"]),
    "labels as a batch size": ({"batch_size": numbers((N,))}, ["batch_size", "shape (12,)"]),
    "labels as a number of records": ({"num_records": [4711, 3]}, ["num_records", "a list"]),
    "weights of classes": ({"class_weight": {0: NUMBER}}, ["class_weight"]),
    "records as a source of strings": ({"x": Rows(np.array([[TEXT]] * N))}, ["str"]),
    "a source with words as weights": (
        {"x": Rows(GOOD), "sample_weight": np.array([TEXT] * N), "batch_size": 4}, ["sample_weight"],
    ),
    "a source with words in later rows": (
        {"x": Rows(GOOD, np.array([[TEXT] * 3] * N)), "batch_size": 4}, ["Part 0", "str"],
    ),
    "a source with wider rows later": (
        {"x": Rows(GOOD, numbers((N, 5))), "batch_size": 4}, ["Part 0", "shape"],
    ),
    "a source that fails": (
        {"x": Rows(GOOD, error=ValueError(f"not a float: {TEXT!r}")), "batch_size": 4},
        ["Part 0", "ValueError", "__context__"],
    ),
    "a dataset that fails": (
        {"x": broken_dataset(), "y": None, "steps_per_epoch": 3, **SAMPLED}, ["dataset"],
    ),
    "a dataset of strings": (
        {
            "x": tf.data.Dataset.from_tensor_slices(np.array([[TEXT]] * N)).batch(4), "y": None,
            "steps_per_epoch": 3, **SAMPLED,
        },
        [],
    ),
    "validation data": (
        {"validation_data": (mixed(), labels()), "unsafe_validation": True}, ["x", "object"],
    ),
    "what trains": ({"x": numbers(), "verbose": 1}, []),
}  # fmt: skip


@pytest.fixture(scope="module")
def line():
    return toy(1.0)


@pytest.mark.parametrize("case", FITS)
def test_the_records_of_fit(case, line, capfd):
    arguments, words = FITS[case]
    call = {"x": GOOD, "y": labels(), "verbose": 0, **arguments}
    check_silent(lambda: line.fit(**call), capfd, *words)


# ---------------------------------------------------------------------- errors of TensorFlow


class Indexed(Toy):
    """Reads a variable at an index: one that is out of range fails, and TensorFlow prints it."""

    def call(self, x):
        return tf.gather(self.w, x)

    def record_loss(self, x, y=1.0):
        return tf.square(tf.gather(self.w, x) - tf.cast(y, self.w.dtype))


def gathered(params, x):
    return tfd.Normal(tf.gather(params, x), 1.0)


def dpvi_of(likelihood, size=5):
    model = dpvi.DPVI(tfd.Sample(tfd.Normal(0.0, 1.0), size), likelihood, clipping="flat")
    model.compile(adam(1.0), delta=1e-5, jit_compile=False)
    return model


INDICES = numbers((N,), "int64", 4711)
WITHHELD = ["values", "__context__"]


def test_a_step_that_fails(capfd):
    model = Indexed()
    model.compile(adam(1.0), delta=1e-5, jit_compile=False)
    check_silent(lambda: model.fit(INDICES, labels(), verbose=0), capfd, "A step failed", *WITHHELD)
    assert model.privacy_ledger.num_releases == 1


def test_a_prediction_that_fails(capfd):
    model = Indexed()
    model.compile(adam(1.0), delta=1e-5)
    check_silent(lambda: model.predict(INDICES, verbose=0), capfd, "predict failed", *WITHHELD)
    check_silent(lambda: model.evaluate(INDICES, labels(), verbose=0), capfd, *WITHHELD)


def test_predictions_of_a_dpvi(capfd):
    model = dpvi_of(gathered)
    for call in (model.predict, model.predictive, model.to_inference_data):
        check_silent(lambda call=call: call(mixed()), capfd, "x", "object")
    check_silent(lambda: model.loo(mixed(), labels()), capfd, "x", "object")


@pytest.mark.slow
def test_a_fit_of_a_dpvi_that_fails(capfd):
    check_silent(lambda: dpvi_of(gathered).fit(INDICES, numbers((N,)), verbose=0), capfd, *WITHHELD)


def vae():
    """An autoencoder of two categories; an index that its embedding lacks fails."""
    layers, distribution = keras.layers, tfp.layers.DistributionLambda
    normal = distribution(lambda t: tfd.Independent(tfd.Normal(t, 1.0), 1))
    categories = distribution(lambda t: tfd.Independent(tfd.Categorical(t, dtype=tf.int64), 1))
    to_codes = [layers.Embedding(9, 2, input_length=2), layers.Flatten(), layers.Dense(1), normal]
    to_records = [layers.Dense(18), layers.Reshape([2, 9]), categories]
    codes = tfd.Sample(tfd.Normal(0.0, 1.0), 1)
    model = dpvi.DPVAE(keras.Sequential(to_codes), keras.Sequential(to_records), codes)
    model.compile(adam(1.0), delta=1e-5, jit_compile=False)
    return model


@pytest.mark.slow
def test_an_autoencoder(capfd):
    model, x = vae(), numbers((N, 2), "int64", 4711)
    check_silent(lambda: model.fit(mixed(), verbose=0), capfd, "x", "object")
    for call in (lambda: model.fit(x, verbose=0), lambda: model.elbo(x), lambda: model.predict(x)):
        check_silent(call, capfd, *WITHHELD)


# ---------------------------------------------------------------------- other entry points

STANDARDIZED = {
    "words": (mixed(), ["x", "object"]),
    "words in rows": (np.array([[TEXT] * 2] * N), ["x", "dtype str"]),
    "one dimension": (numbers((N,)), ["x has shape"]),
    "other columns": (numbers((N, 5)), ["bounds are for 3"]),
    "a masked array": (np.ma.masked_less(numbers(), 0.5), ["MaskedArray"]),
    "NaN": (np.where(numbers() > 4000, np.nan, numbers()), []),
}


@pytest.mark.parametrize("case", STANDARDIZED)
def test_private_preprocessing(case, capfd):
    x, words = STANDARDIZED[case]
    layer = dpvi.preprocessing.PrivateStandardize([0.0] * 3, [1.0] * 3)
    check_silent(lambda: layer.adapt(x, noise_multiplier=1e4), capfd, *words)


def test_a_pilot(capfd):
    model = dpvi_of(lambda params, x: tfd.Normal(tf.linalg.matvec(x, params), 1.0), 3)
    for x in (mixed(), np.where(numbers() > 4000, np.nan, numbers(value=NUMBER))):
        settings = {"num_records": 100, "epsilon": 1.0, "delta": 1e-5}
        check_silent(lambda x=x, settings=settings: dpvi.pilot(model, x, **settings), capfd, "x")


@pytest.mark.slow
def test_a_hospital(capfd):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    study = Study(tfd.Sample(tfd.Normal(0.0, 1.0), 5), gathered, optimizer, local_steps=1)

    def hospital(x, y):
        return Hospital(study, x, y, name="a", epsilon=1.0, rounds=1)

    for x, y in ((mixed(), labels()), (labels(), mixed()), (INDICES[:3], numbers((N,)))):
        check_silent(lambda x=x, y=y: hospital(x, y), capfd, "")
    prior = study.terms.prior
    task = Task(study.terms.identity, "a", "r", 0, prior, prior).to_bytes()
    check_silent(lambda: hospital(INDICES, numbers((N,))).answer(task), capfd, *WITHHELD)


def test_records_in_the_place_of_other_arguments(capfd):
    """A data set in the place of a description or a setting is named by its type."""
    data = numbers()
    calls = {
        "schema": lambda: dpvi.Synthesizer(data),
        "columns": lambda: Schema(data),
        "column 'c'": lambda: Schema({"c": data}),
        "lower": lambda: dpvi.preprocessing.PrivateStandardize(data, 1.0),
        "upper": lambda: dpvi.preprocessing.PrivateStandardize(0.0, [[TEXT, NUMBER]]),
        "prior": lambda: dpvi.DPVI(data, gathered),
        "likelihood": lambda: dpvi.DPVI(tfd.Normal(0.0, 1.0), data),
        "surrogate_posterior": lambda: dpvi.DPVI(tfd.Normal(0.0, 1.0), gathered, data),
        "network": lambda: dpvi.DPKerasModel(data),
        "encoder": lambda: dpvi.DPVAE(data, data, tfd.Normal(0.0, 1.0)),
        "ledger": lambda: toy(1.0, ledger=data),
        "optimizer": lambda: Toy().compile(data),
        "epsilon": lambda: toy(epsilon=data),
        "delta": lambda: toy(1.0, delta=list(data)),
        "neighboring_relation": lambda: toy(1.0, neighboring_relation=data),
        "metrics": lambda: toy(1.0, metrics=[data]),
        "lower=": lambda: Continuous(data, 1.0),
        "bins": lambda: Continuous(0.0, 1.0, bins=data),
        "categories": lambda: Categorical(np.array([TEXT, TEXT], object)),
    }
    for words, call in calls.items():
        check_silent(call, capfd, words)


def test_what_holds_records_does_not_print_them():
    data = toy(1.0).make_data(numbers(), labels(), batch_size=4)
    records = make_records(numbers(), None, None, dtype=np.float32, validate=True)
    assert not _MARKED.search(f"{data!r} {data} {records!r} {records}")


def _is_without_values(handler):
    """What has the names of columns alone, or puts a part's number before the error that it had."""
    caught = ast.unparse(handler.type) if handler.type else ""
    raised = [ast.unparse(node) for node in handler.body if isinstance(node, ast.Raise)]
    numbered = "raise kind(f'part {number} of data: {error}') from error"
    return caught == "graphlib.CycleError" or raised == [numbered]


def errors_passed_on(source):
    """Returns the lines on which a caught exception is chained, or used for more than its class."""
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or _is_without_values(handler):
            continue
        of_class = set()
        for node in ast.walk(handler):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "type":
                of_class.update(map(id, node.args))
            none = isinstance(node, ast.Raise) and ast.unparse(node.cause or node) == "None"
            if isinstance(node, ast.Raise) and node.exc is not None and not none:
                yield node.lineno
            if isinstance(node, ast.Name) and node.id == handler.name and id(node) not in of_class:
                yield node.lineno


WITH_RECORDS = [
    path
    for part in ("data/*.py", "synthetic/*.py", "preprocessing.py")
    for path in pathlib.Path(dpvi.__file__).parent.glob(part)
    # It reads what a user wrote about columns, and no record.
    if path.name != "describe.py"
]


@pytest.mark.parametrize("path", WITH_RECORDS, ids=lambda path: path.name)
def test_no_error_about_values_is_passed_on(path):
    """Where records are converted and read: errors of NumPy, pandas and a user's source show values."""
    assert list(errors_passed_on(path.read_text())) == []


def test_an_error_that_is_passed_on_is_found():
    raises = (
        "raise ValueError('x') from e",
        "raise ValueError('x')",
        "raise ValueError(e) from None",
    )
    for line in (*raises, "print(e)"):
        assert list(errors_passed_on(f"try: f()\nexcept ValueError as e: {line}"))
    fine = "raise ValueError(type(e).__name__) from None"
    assert not list(errors_passed_on(f"try: f()\nexcept ValueError as e: {fine}"))


def test_the_search_finds_what_it_looks_for(capfd):
    """A message, cause, warning, log record, output or history with the value fails the tests above."""

    def chained():
        try:
            float(TEXT)
        except ValueError as error:
            raise ValueError("x") from error

    def raises():
        raise ValueError(f"{np.array([NUMBER], 'float32')}")

    leaks = [
        chained,
        raises,
        lambda: warnings.warn(TEXT, stacklevel=1),
        lambda: logging.getLogger("tfp_dpvi").debug("%r", {"x": NUMBER}),
        lambda: print(NUMBER),
        lambda: tf.print(NUMBER),
        lambda: types.SimpleNamespace(history={"loss": [NUMBER]}),
    ]
    for leak in leaks:
        assert _MARKED.search(all_that_comes_out(leak, capfd)[1])


def test_a_column_in_the_place_of_its_categories_is_not_shown():
    with pytest.raises(ValueError, match="categories=a list of 3") as caught:
        dpvi.synthetic.Categorical(["HIV positive", "flu", "flu"])
    assert "HIV" not in str(caught.value)
