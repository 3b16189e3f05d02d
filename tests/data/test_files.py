"""Records in files: copied once in bounded memory, or mapped where they lie; the same records as in memory."""

from __future__ import annotations

import gc
import os
import sys

import numpy as np
import pytest
from support import internals
from support.siblings import slow
from support.toy import records, toy, weights

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf
from tfp_dpvi.data import files, streaming

N = 300
X, Y = records(N)
QUIET = {"batch_size": 30, "epochs": 1, "steps_per_epoch": 4, "verbose": 0}


@pytest.fixture
def hdf5(tmp_path):
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "records.h5"
    with h5py.File(path, "w") as file:
        file["x"], file["group/y"] = X, Y
        file.create_dataset("chunked", data=X, chunks=(50, 3), compression="gzip")
        file.create_dataset("texts", data=np.array([b"a"] * N))
    return path


@pytest.fixture
def parquet(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    lists = arrow.FixedSizeListArray.from_arrays(arrow.array(X.ravel()), 3)
    holes = arrow.array([None, *[1.0] * (N - 1)])
    columns = {name: X[:, place] for place, name in enumerate("abc")}
    table = arrow.table({**columns, "y": Y, "l": lists, "n": holes, "s": ["a"] * N})
    arrow.parquet.write_table(table, tmp_path / "records.parquet", row_group_size=70)
    return tmp_path / "records.parquet"


def fitted(x, y=None, **options):
    model = toy(1.0, seed=3)
    model.fit(x, y, **{**QUIET, **options})
    return weights(model)


def in_memory():
    return fitted(X, Y)


def test_a_fit_of_parquet_files_is_that_of_arrays(parquet):
    source = dpvi.data.Parquet(parquet, x=["a", "b", "c"], y="y", verbose=0)
    np.testing.assert_allclose(fitted(source, stream=True), in_memory(), rtol=1e-5)


@pytest.mark.parametrize("x", ["x", slow("chunked")])
def test_a_fit_of_an_hdf5_file_is_that_of_arrays(hdf5, x):
    source = dpvi.data.HDF5(hdf5, x=x, y="group/y", verbose=0)
    np.testing.assert_allclose(fitted(source, stream=True), in_memory(), rtol=1e-5)


def test_predict_and_evaluate_take_files_too(parquet):
    model = toy(1.0)
    source = dpvi.data.Parquet(parquet, x="l", y="y", verbose=0)
    np.testing.assert_allclose(model.predict(source), model.predict(X), rtol=1e-5)
    assert model.evaluate(source, verbose=0) == pytest.approx(model.evaluate(X, Y, verbose=0))


def test_an_uncompressed_hdf5_dataset_is_mapped_where_it_lies(hdf5):
    h5py = pytest.importorskip("h5py")
    source = dpvi.data.HDF5(hdf5, x={"a": "x"}, y="group/y", verbose=0)
    assert isinstance(source.x["a"], np.memmap)
    assert os.fspath(source.x["a"].filename) == os.fspath(hdf5)
    with h5py.File(hdf5) as file:
        assert files.mapped_hdf5(file["chunked"]) is None
        assert files.mapped_hdf5(file["texts"]) is None
        np.testing.assert_array_equal(files.mapped_hdf5(file["x"]), X)


def test_a_parquet_file_is_copied_in_bounded_memory(tmp_path, monkeypatch):
    """Arrow would hold the whole file, unless it is told not to."""
    arrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    values = np.random.default_rng(0).normal(size=2**20)
    arrow.parquet.write_table(
        arrow.table({"a": values}), tmp_path / "a.parquet", row_group_size=2**14
    )
    monkeypatch.setattr(files, "_AT_ONCE", 2**16)
    source = dpvi.data.Parquet(tmp_path / "a.parquet", x="a", dtype="float64", verbose=0)
    before = arrow.total_allocated_bytes()
    held, num = [], 0
    for batch in source._batches():
        num += len(batch["x"])
        held.append(arrow.total_allocated_bytes() - before)
    assert num == len(values)
    assert max(held) < values.nbytes / 2


def test_columns_of_folders_and_filters_are_read(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    dataset = pytest.importorskip("pyarrow.dataset")
    table = arrow.table({"a": np.arange(6.0), "g": [0, 0, 1, 1, 2, 2]})
    folders = dataset.partitioning(arrow.schema([("g", arrow.int64())]), flavor="hive")
    dataset.write_dataset(table, tmp_path, format="parquet", partitioning=folders)
    files_of_folders = dataset.dataset(tmp_path, format="parquet", partitioning="hive")
    filtered = files_of_folders.filter(dataset.field("a") > 3)
    for source, rows in (
        (files_of_folders, [[0, 0], [1, 0], [2, 1], [3, 1], [4, 2], [5, 2]]),
        (filtered, [[4, 2], [5, 2]]),
        (dataset.dataset(table.slice(5)), [[5, 2]]),
    ):
        assert dpvi.data.Parquet(source, x=["a", "g"], verbose=0).x.tolist() == rows


def test_columns_keep_their_kinds(parquet):
    source = dpvi.data.Parquet([parquet, parquet], x={"m": ["b", "a"], "l": "l"}, y="y", verbose=0)
    assert source.x["m"].dtype == source.x["l"].dtype == np.float32
    assert source.y.dtype == np.int32
    np.testing.assert_array_equal(source.x["m"][N:], X[:, [1, 0]])
    np.testing.assert_array_equal(source.x["l"][:N], X)
    wide = dpvi.data.Parquet(parquet, x=["a", "y"], dtype="float64", verbose=0)
    assert wide.x.dtype == np.float64
    assert wide.y is None


def test_a_copy_is_kept_in_a_folder_and_used_again(parquet, tmp_path, monkeypatch):
    folder = tmp_path / "copy"
    arguments = {"x": ["a", "b", "c"], "y": "y", "folder": folder, "verbose": 0}
    first = dpvi.data.Parquet(parquet, **arguments)
    np.testing.assert_array_equal(first.x, X)
    assert os.stat(folder / "x.npy").st_mode & 0o077 == 0
    np.testing.assert_array_equal(np.load(folder / "x.npy"), X)
    monkeypatch.setattr(dpvi.data.Parquet, "_batches", None)  # It is not read again.
    np.testing.assert_array_equal(dpvi.data.Parquet(parquet, **arguments).x, X)
    os.utime(parquet, ns=(1, 1))
    with pytest.raises(ValueError, match="files that have changed since"):
        _ = dpvi.data.Parquet(parquet, **arguments).x


def test_a_copy_of_some_rows_is_not_used_for_others(parquet, tmp_path):
    """A dataset that is filtered has the files of all rows, and so has one of some row groups."""
    dataset = pytest.importorskip("pyarrow.dataset")
    whole = dataset.dataset(parquet)
    (file,) = whole.get_fragments()
    groups = [
        dataset.FileSystemDataset(
            [file.subset(row_group_ids=[number])], whole.schema, whole.format, whole.filesystem
        )
        for number in range(2)
    ]
    labels = [whole.filter(dataset.field("y") == label) for label in range(2)]
    for number, (kept, other) in enumerate((labels, groups, (whole, groups[0]))):
        arguments = {"x": "a", "folder": tmp_path / f"copy{number}", "verbose": 0}
        _ = dpvi.data.Parquet(kept, **arguments).x
        with pytest.raises(ValueError, match="a copy of other records"):
            _ = dpvi.data.Parquet(other, **arguments).x


def test_a_temporary_copy_ends_with_its_object(parquet):
    source = dpvi.data.Parquet(parquet, x="a", verbose=0)
    folder = os.path.dirname(source.x.filename)
    assert os.path.exists(folder)
    del source
    gc.collect()
    assert not os.path.exists(folder)


def test_the_bar_says_how_much_space_a_copy_takes(parquet, capsys):
    _ = dpvi.data.Parquet(parquet, x=["a", "b", "c"], y="y").x
    shown = capsys.readouterr().out
    assert f"({N} records, 0.00 GB), once." in shown
    assert f"{N}/{N}" in shown


def test_too_little_space_is_said_before_anything_is_copied(parquet, monkeypatch, tmp_path):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(files.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="pass folder= on a larger disk"):
        _ = dpvi.data.Parquet(parquet, x="a", folder=tmp_path / "copy", verbose=0).x
    assert list((tmp_path / "copy").iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": ["a", "zz"]}, "there is no column 'zz'"),
        ({"x": "s"}, "column 's' has type string"),
        ({"x": ["l"]}, "column 'l' has type"),
        ({"x": ["a", "a"]}, "different names"),
        ({"x": []}, "different names"),
        ({"x": "n"}, "column 'n' has missing values"),
        ({"x": "a", "dtype": "float16"}, "dtype"),
    ],
)
def test_columns_that_are_no_records_are_refused(parquet, arguments, words):
    with pytest.raises(ValueError, match=words) as caught:
        _ = dpvi.data.Parquet(parquet, verbose=0, **arguments).x
    assert str(caught.value).count("\n") <= 1


def test_files_that_are_no_records_are_refused(hdf5, tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "text.parquet").write_text("text")
    with pytest.raises(ValueError, match="cannot be read as parquet"):
        dpvi.data.Parquet(tmp_path / "text.parquet", x="a")
    with pytest.raises(ValueError, match="cannot be read as HDF5"):
        dpvi.data.HDF5(tmp_path / "text.parquet", x="a")
    for name, words in (("nowhere", "no dataset"), ("group", "no dataset"), ("texts", "numeric")):
        with pytest.raises(ValueError, match=words):
            dpvi.data.HDF5(hdf5, x=name)
    with pytest.raises(ValueError, match="y and sample_weight are part of x"):
        toy(1.0).fit(dpvi.data.HDF5(hdf5, x="x", y="group/y"), Y, verbose=0)


def test_batches_of_a_dataset_are_copied_once_in_their_order(tmp_path):
    """TFRecord files, or whatever else TensorFlow reads."""
    with tf.io.TFRecordWriter(str(tmp_path / "records")) as writer:
        for row, label in zip(X, Y, strict=True):
            writer.write(np.append(row, np.float32(label)).tobytes())

    def parse(record):
        values = tf.ensure_shape(tf.io.decode_raw(record, tf.float32), [4])
        return values[:3], tf.cast(values[3], tf.int32)

    dataset = tf.data.TFRecordDataset(str(tmp_path / "records")).map(parse).batch(64)
    source = dpvi.data.Copied(dataset, verbose=0)
    np.testing.assert_array_equal(source.x, X)
    np.testing.assert_array_equal(source.y, Y)
    for bad, words in (
        (dataset.repeat(), "endless"),
        (dataset.unbatch(), "batch"),
        (dataset.take(0), "no records"),
    ):
        with pytest.raises(ValueError, match=words):
            _ = dpvi.data.Copied(bad, verbose=0).x


def test_lazy_arrays_are_copied_by_whole_chunks(hdf5, monkeypatch, caplog):
    h5py = pytest.importorskip("h5py")
    with h5py.File(hdf5) as file:
        monkeypatch.setattr(files, "_AT_ONCE", 12 * 70)
        source = dpvi.data.Copied(file["chunked"], Y, verbose=0)
        sizes = [len(batch["x"]) for batch in source._batches()]
        assert sizes == [100, 100, 100]
        np.testing.assert_array_equal(source.x, X)
        fitted(file["chunked"], Y, stream=True)
    assert "x or y is stored in chunks (Dataset of h5py)" in caplog.text
    assert "dpvi.data.Copied(x, y) copies the records once" in caplog.text


@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much is in memory")
def test_rows_of_a_large_file_are_read_in_bounded_memory(tmp_path, monkeypatch):
    """Linux maps megabytes around each row that is in its cache: a batch would map the whole file."""
    monkeypatch.setattr(streaming, "_MOST_HELD", 2**22)
    monkeypatch.setattr(streaming, "_PIECE", 4)
    x = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", "float32", (2**16, 256))
    x[::1000] = 1.0
    x.flush()
    del x
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = streaming.RecordSource(mapped, None, None, np.dtype("float32"))
    before = streaming._bytes_of_files()
    rows = source.take(np.arange(0, 2**16, 250), 263)["x"]
    assert rows[::4].all()
    assert not rows[1::4].any()
    assert streaming._bytes_of_files() - before < 2**24  # Of 2**26.


def test_pages_that_were_read_are_given_back(tmp_path, monkeypatch):
    """They would count as memory of the process: in time the whole file."""
    given = []
    advise = streaming.RecordSource._release
    monkeypatch.setattr(streaming, "_MOST_HELD", -(2**40))
    monkeypatch.setattr(streaming.RecordSource, "_release", lambda self: given.append(advise(self)))
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    np.testing.assert_allclose(fitted(mapped, Y, stream=True), in_memory(), rtol=1e-5)
    assert given
    changed = np.load(tmp_path / "x.npy", mmap_mode="c")
    changed[:] = 0.0
    source = streaming.RecordSource(changed, None, None, np.dtype("float32"))
    source._release()  # It would lose the changes of this kind of map.
    assert not np.asarray(changed).any()
    assert not internals.is_lazy(changed)
