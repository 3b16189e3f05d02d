"""`benchmarks/sources.py`: all files have the same records, and the guide's table is that of the JSON file."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import sources


def test_the_guides_table_is_written_from_the_results():
    """Parquet and HDF5 stream at half of the speed in memory or more, within 1.5 times a batch's memory."""
    found = json.loads(sources.RESULTS.read_text(encoding="utf-8"))
    page = sources.PAGE.read_text(encoding="utf-8")
    assert sources.written(page, found) == page
    rows = found["rows"]
    resident = np.median(rows["in memory"]["records_a_second"])
    base = rows["ten batches in memory"]["peak_mb"]
    for name in ("HDF5, one piece", "HDF5, chunks, gzip", "Parquet"):
        assert np.median(rows[name]["records_a_second"]) >= 0.5 * resident
    for name in ("memory map", "HDF5, chunks, gzip", "Parquet"):
        assert rows[name]["peak_mb"] <= 1.5 * base
    large = found["sets"]
    assert large["rows"] == 50_000_000
    assert large["copy_gb"] > 2.0
    # Pages of the file do not count: the operating system takes them back.
    assert max(large["peak_of_copy_mb"], large["not_of_files_mb"]) < 2e3


@pytest.mark.slow
def test_all_files_have_the_same_records(tmp_path, monkeypatch):
    pytest.importorskip("h5py")
    pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr(sources, "PIECE", 700)
    sources.write_files(tmp_path, 1500)
    x, y = sources.sources(tmp_path)["in memory"]()
    assert x.shape == (1500, sources.WIDTH)
    for name, make in sources.sources(tmp_path).items():
        if name not in ("in memory", "ten batches in memory", "memory map"):
            (records,) = make()
            np.testing.assert_array_equal(records.x, x, err_msg=name)
            np.testing.assert_array_equal(records.y, y, err_msg=name)


@pytest.mark.slow
def test_a_large_file_is_fitted_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "sources.json"
    os.makedirs(tmp_path / "files")
    arguments = ["--large", "3000", "--columns", "3", "--steps", "2", "--output", str(output)]
    result = sources.main([*arguments, "--folder", str(tmp_path / "files")])
    assert result["sets"]["rows"] == 3000
    assert result["sets"]["epsilon"] > 0
    assert not os.listdir(tmp_path / "files")
