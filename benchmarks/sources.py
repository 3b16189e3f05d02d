"""Records in files beside the same records in memory: throughput of a private fit, the copy's time, peak memory.

    python benchmarks/sources.py [--records 1000000] [--output docs/figures/sources.json]
    python benchmarks/sources.py --large 50000000     instead a fit of so many rows of Parquet, in a process of its own
    python benchmarks/sources.py --quick              few records and steps, to see that it runs
    python benchmarks/sources.py --write              only writes the tables into docs/guides/large_files.md

Records are 32 floats and a class; the model is a network with two layers of 128, the batch 1,024. Throughput: all sources take
turns in one process. Memory: the peak of a process that fits one source, beside one whose records are ten batches in memory. The
page cache is warm: files were just written. The JSON file keeps what is not run again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np

WIDTH, BATCH = 32, 1024
ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guides" / "large_files.md"
RESULTS = ROOT / "docs" / "figures" / "sources.json"
PIECE = 2**20  # Rows that are written at a time.
WEIGHED = ("ten batches in memory", "in memory", "memory map", "HDF5, chunks, gzip", "Parquet")


# ---------------------------------------------------------------------- files


def rows(start: int, stop: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns made-up records [n, width] and classes [n]."""
    rng = np.random.default_rng(start)
    x = rng.standard_normal((stop - start, width), dtype="float32")
    return x, (x[:, 0] > 0.0).astype("int32")


def write_parquet(path: pathlib.Path, num: int, width: int) -> None:
    """Writes records in row groups, in bounded memory."""
    import pyarrow as arrow
    import pyarrow.parquet

    names = [f"c{column}" for column in range(width)]
    kinds = [(name, arrow.float32()) for name in names]
    schema = arrow.schema([*kinds, ("y", arrow.int32())])
    with arrow.parquet.ParquetWriter(path, schema, use_dictionary=False) as writer:
        for start in range(0, num, PIECE):
            x, y = rows(start, min(start + PIECE, num), width)
            arrays = [np.ascontiguousarray(column) for column in x.T]
            writer.write_table(arrow.table([*arrays, y], schema=schema), row_group_size=2**17)


def write_files(folder: pathlib.Path, num: int) -> None:
    """Writes the same records in every format that this environment has."""
    import h5py
    import pyarrow as arrow
    import pyarrow.feather

    from tfp_dpvi._tf import tf

    parts = [rows(start, min(start + PIECE, num), WIDTH) for start in range(0, num, PIECE)]
    x, y = (np.concatenate(part) for part in zip(*parts, strict=True))
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    with h5py.File(folder / "plain.h5", "w") as file:
        file["x"], file["y"] = x, y
    with h5py.File(folder / "chunked.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(1024, WIDTH), compression="gzip")
        file.create_dataset("y", data=y, chunks=(1024,), compression="gzip")
    write_parquet(folder / "records.parquet", num, WIDTH)
    names = [f"c{column}" for column in range(WIDTH)]
    table = arrow.table([*map(np.ascontiguousarray, x.T), y], names=[*names, "y"])
    arrow.feather.write_feather(table, folder / "records.feather", compression="uncompressed")
    with tf.io.TFRecordWriter(str(folder / "records.tfrecord")) as writer:
        # A record of the file is a thousand rows: one each would take minutes to write.
        for start in range(0, num, 1000):
            rows_of_one = np.column_stack([x[start : start + 1000], y[start : start + 1000]])
            writer.write(rows_of_one.astype("float32").tobytes())


def _tfrecord(path: pathlib.Path) -> Any:
    from tfp_dpvi._tf import tf

    def parse(text: Any) -> Any:
        values = tf.reshape(tf.io.decode_raw(text, tf.float32), [-1, WIDTH + 1])
        return values[:, :WIDTH], tf.cast(values[:, WIDTH], tf.int32)

    return tf.data.TFRecordDataset(str(path)).map(parse)


def sources(folder: pathlib.Path) -> dict[str, Callable[[], Any]]:
    """Returns what makes the arguments of `fit`, by the kind of source."""
    import tfp_dpvi as dpvi

    def mapped(mode: str | None) -> tuple[Any, ...]:
        return tuple(np.load(folder / f"{name}.npy", mmap_mode=mode) for name in "xy")

    columns: dict[str, Any] = {
        "x": [f"c{column}" for column in range(WIDTH)],
        "y": "y",
        "verbose": 0,
    }
    hdf5 = {"x": "x", "y": "y", "verbose": 0}
    makers = {
        "in memory": lambda: mapped(None),
        "ten batches in memory": lambda: tuple(part[: 10 * BATCH] for part in mapped(None)),
        "memory map": lambda: mapped("r"),
        "HDF5, one piece": lambda: (dpvi.data.HDF5(folder / "plain.h5", **hdf5),),
        "HDF5, chunks, gzip": lambda: (dpvi.data.HDF5(folder / "chunked.h5", **hdf5),),
        "Parquet": lambda: (dpvi.data.Parquet(folder / "records.parquet", **columns),),
        "Arrow": lambda: (dpvi.data.Parquet(folder / "records.feather", **columns),),
        "TFRecord": lambda: (dpvi.data.Copied(_tfrecord(folder / "records.tfrecord"), verbose=0),),
    }
    return makers


# ---------------------------------------------------------------------- fits


def network() -> Any:
    """Returns a compiled classifier."""
    import tfp_dpvi as dpvi

    layers = dpvi.keras.layers
    model = dpvi.DPKerasModel(
        dpvi.keras.Sequential(
            [layers.Dense(128, "relu"), layers.Dense(128, "relu"), layers.Dense(1)]
        )
    )
    loss = dpvi.keras.losses.BinaryCrossentropy(from_logits=True)
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
    model.compile(optimizer, loss=loss, delta=1e-6)
    return model


def fit(model: Any, records: tuple[Any, ...], steps: int, stream: bool) -> float:
    """Fits, and returns the seconds that it took."""
    begin = time.perf_counter()
    model.fit(
        *records,
        batch_size=BATCH,
        epochs=1,
        steps_per_epoch=steps,
        verbose=0,
        stream=stream,
        validate=False,
    )
    return time.perf_counter() - begin


def speeds(folder: pathlib.Path, steps: int, rounds: int) -> dict[str, Any]:
    """Returns records a second by source, and the seconds of the copy."""
    makers = sources(folder)
    del makers["ten batches in memory"]
    found: dict[str, Any] = {}
    models, records = {}, {}
    for name, make in makers.items():
        begin = time.perf_counter()
        records[name] = make()
        _ = getattr(records[name][0], "x", None)  # It is copied now.
        found[name] = {"ready_s": time.perf_counter() - begin, "records_a_second": []}
        models[name] = network()
        fit(models[name], records[name], steps, name != "in memory")
    for _ in range(rounds):
        for name, model in models.items():
            seconds = fit(model, records[name], steps, name != "in memory")
            found[name]["records_a_second"].append(BATCH * steps / seconds)
    return found


def memory() -> tuple[float, float]:
    """Returns the peak of this process's resident memory, and of what files do not back now, in MB."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    values = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return int(values["VmHWM"]) / 1e3, int(values["RssAnon"]) / 1e3


def child(arguments: list[str]) -> dict[str, Any]:
    """Runs this script in a process of its own, and returns what it prints last."""
    done = subprocess.run(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def one_source(folder: pathlib.Path, name: str, steps: int) -> dict[str, Any]:
    """Fits one source, and returns the peak of memory since the model was made."""
    records = sources(folder)[name]()
    _ = getattr(records[0], "x", None)
    model = network()
    with contextlib.suppress(OSError):
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
    fit(model, records, steps, "in memory" not in name)
    peak, own = memory()
    return {"peak_mb": peak, "not_of_files_mb": own}


def large(path: pathlib.Path, num: int, width: int, steps: int) -> dict[str, Any]:
    """Fits a large Parquet file, which is copied first; the peak is that of the whole process."""
    import tfp_dpvi as dpvi

    begin = time.perf_counter()
    columns = [f"c{column}" for column in range(width)]
    records = dpvi.data.Parquet(path, x=columns, y="y", folder=path.parent / "copy", verbose=0)
    assert records.x.shape == (num, width)
    copied = time.perf_counter() - begin
    peak_of_copy, _ = memory()
    model = network()
    fit(model, (records,), steps, True)
    seconds = fit(model, (records,), steps, True)
    peak, own = memory()
    return {
        "rows": num,
        "columns": width,
        "parquet_gb": path.stat().st_size / 1e9,
        "copy_gb": (records.x.nbytes + records.y.nbytes) / 1e9,
        "copy_s": copied,
        "peak_of_copy_mb": peak_of_copy,
        "peak_mb": peak,
        "not_of_files_mb": own,
        "records_a_second": BATCH * steps / seconds,
        "epsilon": model.privacy_report().epsilon,
    }


# ---------------------------------------------------------------------- the page


def table(found: dict[str, Any]) -> str:
    """Returns the table of the guide."""
    base = found["ten batches in memory"]["peak_mb"]
    all_of_them = statistics.median(found["in memory"]["records_a_second"])
    lines = [
        "| source | records a second | of those in memory | ready after | peak of memory |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, row in found.items():
        speed = row.get("records_a_second")
        cells = [name, "", "", "", ""]
        if "peak_mb" in row:
            cells[4] = f"{row['peak_mb']:,.0f} MB, {row['peak_mb'] / base:.2f} times"
        if speed:
            rate = statistics.median(speed)
            cells[1:4] = [f"{rate:,.0f}", f"{rate / all_of_them:.2f}", f"{row['ready_s']:.1f} s"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def sentence(large: dict[str, Any]) -> str:
    """Returns what the guide says of the large file.

    Args:
      large: What `--large` has measured.
    """
    return (
        f"{large['rows']:,} rows of {large['columns']} floats and a class, "
        f"{large['parquet_gb']:.1f} GB of Parquet, in a process of their own: copied in "
        f"{large['copy_s']:.0f} s, then fitted at {large['records_a_second']:,.0f} records a second;\n"
        f"the copy's peak of memory was {large['peak_of_copy_mb'] / 1e3:.2f} GB, and the fit's "
        f"{large['peak_mb'] / 1e3:.2f} GB with pages of its {large['copy_gb']:.1f} GB of records,\n"
        f"{large['not_of_files_mb'] / 1e3:.2f} GB without them."
    )


def written(page: str, result: dict[str, Any]) -> str:
    """Returns the page with the table of a result.

    Args:
      page: Its text.
      result: The contents of the JSON file.
    """
    begin, end = "<!-- table: begin -->\n", "\n<!-- table: end -->"
    head, _, rest = page.partition(begin)
    lines = f"{table(result['rows'])}\n\n{sentence(result['sets'])}"
    return f"{head}{begin}\n{lines}\n{end}{rest.partition(end)[2]}"


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Runs, prints and writes; returns the contents of the JSON file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--large", type=int, default=0, metavar="ROWS")
    parser.add_argument("--columns", type=int, default=12, help="of --large")
    parser.add_argument("--folder", type=pathlib.Path, help="where files are written")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--output", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.write:
        result = json.loads(args.output.read_text())
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), result), encoding="utf-8")
        return result
    if args.one:
        path = args.folder / "large.parquet"
        alone = args.one == "large"
        shown = (
            large(path, args.large, args.columns, args.steps)
            if alone
            else one_source(args.folder, args.one, args.steps)
        )
        print(json.dumps(shown))
        return shown
    if args.quick:
        args.records, args.steps, args.rounds = 20_000, 5, 1
    kept = json.loads(args.output.read_text()) if args.output.exists() else {}
    found, rest = kept.get("rows", {}), kept.get("sets")
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="tfp_dpvi_sources_") as name:
        folder = pathlib.Path(name)
        passed = ["--folder", name, "--steps", str(args.steps)]
        if args.large:
            write_parquet(folder / "large.parquet", args.large, args.columns)
            sizes = ["--large", str(args.large), "--columns", str(args.columns)]
            rest = child([*passed, "--one", "large", *sizes])
            print("large", json.dumps(rest), flush=True)
        else:
            write_files(folder, args.records)
            found = {"ten batches in memory": {}, **speeds(folder, args.steps, args.rounds)}
            for source in WEIGHED:
                found[source].update(child([*passed, "--one", source]))
            for source, row in found.items():
                print(source, json.dumps(row), flush=True)
    settings = {"records": args.records, "steps": args.steps, "batch": BATCH, "width": WIDTH}
    settings = kept.get("settings", settings) if args.large else settings
    harness.write_study("sources.py", args.output, argv, settings, found, rest)
    return json.loads(args.output.read_text())


if __name__ == "__main__":
    main()
