"""Frames of pandas, polars and Arrow: read, refused by name, and built again with any dtype."""

from __future__ import annotations

import datetime
import decimal
import itertools

import numpy as np
import pytest
import tensorflow_probability as tfp
from support.siblings import slow
from support.toy import adam

import tfp_dpvi as dpvi
from tfp_dpvi.data import Binary, Categorical, Continuous, Date, Integer, Layout, Schema
from tfp_dpvi.data.records import by_column, make_records

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pa = pytest.importorskip("pyarrow")

DECIMAL = decimal.Decimal("1.25")
DAY = datetime.date(2020, 1, 1)


def numpy_dtypes():
    names = ["bool", "int8", "int64", "uint8", "uint64", "float16", "float32", "float64", "O"]
    names += ["M8[s]", "M8[ns]", "m8[s]", "complex128"]
    yield from (("dict", np.dtype(name)) for name in [*names, "U", "S"])
    yield from (("pandas", np.dtype(name)) for name in names)


def pandas_dtypes():
    names = ["Int8", "Int64", "UInt8", "UInt64", "Float32", "Float64", "boolean", "string", "str"]
    names += ["category", "Sparse[int64, 0]", "Sparse[bool, False]", "Sparse[float64, nan]"]
    names += ["interval[int64, right]", "interval[float64, left]", "period[M]"]
    names += ["datetime64[ns, UTC]"]
    yield from (pd.api.types.pandas_dtype(name) for name in names)
    yield pd.StringDtype("python")
    yield pd.CategoricalDtype(ordered=True)
    yield pd.SparseDtype("float32", 0.0)


def arrow_types():
    yield from (pa.bool_(), pa.int8(), pa.int64(), pa.uint8(), pa.uint64(), pa.float16())
    yield from (pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.binary())
    yield from (pa.string_view(), pa.date32(), pa.date64(), pa.time32("s"), pa.duration("s"))
    yield from (pa.timestamp("s"), pa.timestamp("ns"), pa.timestamp("ns", "UTC"))
    yield from (pa.decimal128(3, 0), pa.decimal128(20, 2), pa.decimal256(40, 0))
    yield from (pa.dictionary(pa.int32(), pa.string()), pa.dictionary(pa.int8(), pa.int64()))
    yield from (pa.list_(pa.int64()), pa.struct([("a", pa.int64())]))


def polars_dtypes():
    yield from (pl.Boolean(), pl.Int8(), pl.Int64(), pl.Int128(), pl.UInt8(), pl.UInt64())
    yield from (pl.Float32(), pl.Float64(), pl.String(), pl.Categorical(), pl.Enum(["b", "a"]))
    yield from (pl.Date(), pl.Datetime("ms"), pl.Datetime("ns"), pl.Datetime("us", "UTC"))
    yield from (pl.Duration("us"), pl.Time(), pl.Decimal(3, 0), pl.Decimal(20, 2), pl.Binary())
    yield from (pl.List(pl.Int8()), pl.Array(pl.Int8(), 2), pl.Struct({"a": pl.Int8()}))
    yield from (pl.Null(), pl.Object())


def columns():
    for missing in (False, True):
        for lower, upper in ((0, 100), (0, 300), (-5, 5), (-1, 2**40)):
            yield Integer(lower, upper, missing=missing)
        yield Continuous(0.0, 1e5, missing=missing)
        yield Continuous(1e6, 1e6 + 1e-3, missing=missing)
        for lower, upper in (("2020-01-01", "2021-01-01"), ("1600-01-01", "2400-01-01")):
            yield Date(lower, upper, missing=missing)
        yield Date("2020-01-01", "2020-01-02", unit="s", missing=missing)
        yield Binary(missing=missing)
        for categories in (
            ["a", "b"],
            ["1", "2"],
            [1, 2],
            [-1, 2**40],
            [2**62 + 1, 2**62 + 2],
            [True, False],
            [0.5, 1.5],
            [1, "a"],
            ["a\0", "a"],
        ):
            yield Categorical(categories, missing=missing)


def frame_of(container, dtype):
    if container == "dict":
        return {"a": np.zeros(0, dtype)}
    if container == "polars":
        return pl.DataFrame({"a": pl.Series([], dtype=dtype)})
    if container == "pyarrow":
        return pa.table({"a": pa.array([], type=dtype)})
    return pd.DataFrame({"a": pd.Series([], dtype=dtype)})


DTYPES = [
    *numpy_dtypes(),
    *(("pandas", dtype) for dtype in pandas_dtypes()),
    *(("pandas of arrow", pd.ArrowDtype(dtype)) for dtype in arrow_types()),
    *(("polars", dtype) for dtype in polars_dtypes()),
    *(("pyarrow", dtype) for dtype in arrow_types()),
]


@pytest.mark.parametrize("every", [False, slow(True)])
@pytest.mark.parametrize("container", ["dict", "pandas", "pandas of arrow", "polars", "pyarrow"])
def test_every_dtype_is_right_or_refused_before_anything_is_spent(container, every):
    """All levels, and a missing value, come back as they were, of the dtype, also once saved."""
    right = refused = 0
    dtypes = [dtype for kind, dtype in DTYPES if kind == container]
    pairs = itertools.product(enumerate(dtypes), enumerate(columns()))
    for (row, dtype), (number, column) in pairs:
        # Each kind of column once for each dtype, in turn with missing values and without.
        if (row + number) % 2 and not every:
            continue
        schema, frame = Schema({"a": column}), frame_of(container, dtype)
        try:
            layout = Layout.of(frame, schema)
        except ValueError as error:
            said = str(error)
            layout = None
        if layout is None:
            assert "column 'a'" in said
            assert len(said.splitlines()) <= 2
            refused += 1
            continue
        right += 1
        layout = Layout.from_config(layout.to_config())
        fine = schema.finest
        num = fine.columns["a"].num_levels
        levels = sorted({*range(min(num, 20)), num - 1} | ({-1} if column.missing else set()))
        codes = np.array(levels)[:, None]
        made = fine.decode(codes, layout, np.random.default_rng(0))
        found = fine.encode(made)
        where = f"{dtype} {column}"
        # The finest levels of real numbers are finer than half floats.
        half = any(name in str(layout.to_config()) for name in ("f2", "halffloat"))
        if not (isinstance(column, Continuous) and half):
            np.testing.assert_array_equal(found, codes, err_msg=where)
        assert Layout.of(made, schema).to_config() == layout.to_config(), where
    assert len(list(columns())) % 4 == 2, "missing values and none must take turns"
    assert right > 20
    assert refused > 20


YEAR_OF_2020 = Date("2020-01-01", "2021-01-01")


@pytest.mark.parametrize(
    ("values", "column", "words"),
    [
        (pd.array([1, None], dtype="Int64"), Continuous(0, 300, missing=True), "as Integer"),
        (pd.array([1, 2], dtype="Int8"), Integer(0, 1000), "may have 1000"),
        (pd.arrays.SparseArray([True, False]), Binary(missing=True), "cannot hold missing"),
        (np.array(["2020-01-01"] * 2, "M8[ns]"), Date("1600-01-01", "2020-01-01"), "1600-01-01"),
        (pd.Series([20200101, 20200102]), YEAR_OF_2020, "to_datetime"),
        (pl.Series([DECIMAL] * 2), Continuous(0, 3), "cast it to float64"),
        (pl.Series([[1], [2]]), Categorical([1, 2]), r"List\(Int64\)"),
        (pl.Series([{"a": 1}] * 2), Categorical([1, 2]), "Struct"),
        (pl.Series([datetime.timedelta(1)] * 2), Continuous(0, 3), "Duration"),
        (pl.Series([1, 2], dtype=pl.UInt8), Integer(-1, 9), "may have -1"),
        (pl.Series(["a"] * 2, dtype=pl.Enum(["a"])), Categorical(["a", 1]), "the category 1:"),
        (
            pd.array([None] * 2, dtype=pd.ArrowDtype(pa.null())),
            Integer(0, 1, missing=True),
            "dtype of the values that it may have",
        ),
        (pl.Series([None] * 2), Categorical([1, 2], missing=True), "dtype Null, which has no"),
        (pd.Series([1, 2]), Categorical(["1", "2"]), "does not hold the category '1'"),
        (pd.Series(pd.period_range("2020-01", periods=2, freq="M")), YEAR_OF_2020, "to_timestamp"),
        (
            pd.Series([DECIMAL, DECIMAL], dtype=pd.ArrowDtype(pa.decimal256(7, 2))),
            Continuous(0, 9),
            "cast it to float64",
        ),
    ],
)
def test_what_a_dtype_does_not_hold_is_refused_with_nothing_spent(values, column, words):
    frames = {"pandas": pd.DataFrame, "polars": pl.DataFrame}
    frame = frames["polars" if isinstance(values, pl.Series) else "pandas"]({"a": values})
    ledger = dpvi.PrivacyLedger()
    with pytest.raises(ValueError, match=words) as caught:
        dpvi.Synthesizer(Schema({"a": column}), 1).fit(
            frame, epsilon=1.0, delta=1e-5, ledger=ledger
        )
    assert "column 'a'" in str(caught.value)
    assert ledger.num_releases == 0


def table():
    return {
        "age": np.array([20, 30, 40], "int16"),
        "dose": np.array([0.5, 1.5, 2.5], "float32"),
        "ill": np.array([True, False, True]),
    }


FRAMES = {
    "pandas": lambda: pd.DataFrame(table()),
    "nullable": lambda: pd.DataFrame(table()).convert_dtypes(),
    "arrow-backed": lambda: pd.DataFrame(table()).convert_dtypes(dtype_backend="pyarrow"),
    "sparse": lambda: pd.DataFrame(
        {name: pd.arrays.SparseArray(part) for name, part in table().items()}
    ),
    "polars": lambda: pl.DataFrame(table()),
    "pyarrow": lambda: pa.table(table()),
    "batch": lambda: pa.RecordBatch.from_pydict(table()),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_frame_is_the_dict_of_its_columns(kind):
    frame = FRAMES[kind]()
    found = make_records(frame, None, None, dtype=np.dtype("float32"), validate=True).x
    assert list(found) == ["age", "dose", "ill"]
    for name, expected in table().items():
        np.testing.assert_array_equal(found[name], expected)
        assert found[name].dtype.kind == expected.dtype.kind
    schema = Schema({"age": Integer(0, 99), "dose": Continuous(0, 3), "ill": Binary()})
    np.testing.assert_array_equal(schema.encode(frame), schema.encode(table()))


@pytest.mark.parametrize(
    "column",
    [
        pl.Series([1.0, 2.0]),
        pa.chunked_array([[1.0], [2.0]]),
        pa.array([1.0, 2.0]),
        pd.Series([1.0, 2.0], index=[5, 3]),
        pd.Series([1.0, 2.0], dtype="Float32"),
    ],
)
def test_a_column_is_an_array(column):
    for value, place in (({"y": column}, "y"), ((column,), 0), ([column][0], slice(None))):
        np.testing.assert_array_equal(by_column("y", value)[place], [1.0, 2.0])


@pytest.mark.parametrize(
    ("frame", "error", "words"),
    [
        (pl.LazyFrame({"a": [1]}), TypeError, r"collect\(\)"),
        (pd.DataFrame([[1, 2]], columns=["a", "a"]), ValueError, "unique"),
        (pa.table([pa.array([1]), pa.array([2])], ["a", "a"]), ValueError, "unique"),
        (pl.DataFrame({"a": [[1]]}), TypeError, r"x\['a'\] has dtype List"),
        (pl.DataFrame({"a": [{"b": 1}]}), TypeError, r"x\['a'\] has dtype Struct"),
        (pl.DataFrame({"a": pl.Series([[1]], dtype=pl.Array(pl.Int8, 1))}), TypeError, "Array"),
        (pl.DataFrame({"a": [DECIMAL]}), TypeError, "Decimal"),
        (pl.DataFrame({"a": [datetime.datetime(2020, 1, 1)]}), TypeError, "Datetime"),
        (pd.DataFrame({"a": pd.Categorical(["secret"])}), TypeError, "Categorical"),
        (pa.table({"a": pa.array([1, None]).dictionary_encode()}), TypeError, "Categorical"),
        (pa.table({"a": pa.array([True, None])}), ValueError, "NaN"),
        (pl.DataFrame({"a": [1, None]}), ValueError, "NaN"),
    ],
)
def test_what_is_no_number_is_refused_by_name(frame, error, words):
    with pytest.raises(error, match=words) as caught:
        make_records(frame, None, None, dtype=np.dtype("float32"), validate=True)
    assert "secret" not in str(caught.value)


def test_missing_values_of_arrow_dictionaries_are_missing():
    """narwhals reads them as the first category."""
    frame = pa.table({"a": pa.array(["b", None, "a"]).dictionary_encode()})
    codes = Schema({"a": Categorical(["a", "b"], missing=True)}).encode(frame)
    assert codes.ravel().tolist() == [1, -1, 0]


@pytest.mark.parametrize("kind", ["polars", "pyarrow"])
def test_synthetic_tables_are_frames_of_the_same_kind_also_when_loaded(kind, tmp_path):
    words = pl.Series(["x", None, "y"] * 30, dtype=pl.Categorical)
    days = pl.Series([DAY, None, DAY] * 30)
    frame = pl.DataFrame(
        {"word": words, "day": days, "number": pl.Series([1, 2, 3] * 30, dtype=pl.UInt8)}
    )
    frame = frame.to_arrow() if kind == "pyarrow" else frame
    schema = Schema(
        {
            "word": Categorical(["x", "y"], missing=True),
            "day": Date("2020-01-01", "2020-01-09", missing=True),
            "number": Integer(0, 9),
        }
    )
    synthesizer = dpvi.Synthesizer(schema, 2).fit(frame, noise_multiplier=0.1, delta=1e-5, steps=2)
    made = synthesizer.sample(20, seed=1)
    assert type(made) is type(frame)
    assert made.schema == frame.schema
    synthesizer.save(tmp_path / "a.keras")
    assert dpvi.Synthesizer.load(tmp_path / "a.keras").sample(20, seed=1).equals(made)


@pytest.mark.parametrize("kind", ["polars", "pyarrow"])
def test_a_model_takes_frames_as_it_takes_pandas(kind):
    """Names reach the likelihood; predictions and losses are those of the same columns as arrays."""
    tfd = tfp.distributions
    generator = np.random.default_rng(0)
    arrays = {name: generator.normal(size=60).astype("float32") for name in ("age", "dose")}
    y = (arrays["age"] - arrays["dose"]).astype("float32")
    frame = pl.DataFrame(arrays) if kind == "polars" else pa.table(arrays)
    outcome = pl.Series(y) if kind == "polars" else pa.chunked_array([y])
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 2),
        lambda w, x: tfd.Normal(w[0] * x["age"] + w[1] * x["dose"], 1.0),
        clipping="flat",
    )
    model.compile(adam(1.0), delta=1e-5, jit_compile=False)
    model.fit(frame, outcome, batch_size=30, verbose=0)
    np.testing.assert_allclose(model.predict(frame), model.predict(arrays), rtol=1e-6)
    losses = [model.evaluate(x, of, verbose=0) for x, of in ((frame, outcome), (arrays, y))]
    np.testing.assert_allclose(*losses, rtol=1e-6)
    predictive = [model.predictive(x).mean() for x in (frame, arrays)]
    np.testing.assert_allclose(*predictive, rtol=1e-6)
    with pytest.raises(ValueError, match="fitted to columns"):
        model.predict(np.zeros((3, 2), "float32"))
