"""`examples/synthetic_adult.py` at a small size."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import pathlib
import re

import numpy as np
import pytest

from tfp_dpvi.data import Binary, Categorical, Schema

pytest.importorskip("matplotlib")

pytestmark = pytest.mark.skipif(
    not pathlib.Path(os.environ.get("TFP_DPVI_DATA", ""), "adult").is_dir(),
    reason="no real data: TFP_DPVI_DATA names no folder with them",
)


@pytest.fixture(scope="module")
def example():
    path = pathlib.Path(__file__).parents[2] / "examples" / "synthetic_adult.py"
    spec = importlib.util.spec_from_file_location("synthetic_adult", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_quick_run(example, tmp_path, capsys):
    """No accuracy is promised of so few steps: only that it runs, stays within its budget, and says what it did."""
    result = example.main(["--quick", "--output", str(tmp_path)])
    last = capsys.readouterr().out.strip().splitlines()[-1]
    found = re.fullmatch(
        r"synthetic_adult: private (0\.\d{4}) non-private (0\.\d{4}) real (0\.\d{4}) epsilon (\d\.\d{4}) delta 1e-05 "
        r"seconds (\d+\.\d)",
        last,
    )
    assert found, last
    saved = json.loads((tmp_path / "synthetic_adult.json").read_text())
    for text, name in zip(
        found.groups(), ("private", "non_private", "real", "epsilon"), strict=False
    ):
        assert float(text) == pytest.approx(saved[name], abs=5.1e-5)
    assert 0.99 <= saved["epsilon"] <= 1.0
    assert saved["real"] > 0.83
    assert 0.5 < saved["private"] < 0.87
    assert saved["majority"] == pytest.approx(0.7638, abs=1e-4)
    distances = saved["total_variation"]
    assert distances["private"]["marginals"] < 0.25
    assert distances["columns shuffled"]["marginals"] == 0.0
    assert distances["columns shuffled"]["triples"] > distances["columns shuffled"]["pairs"] > 0.0
    (rows,) = saved["estimates"]
    assert rows["over 50K"]["real"] == pytest.approx(
        np.mean(example.load()[1][example.LABEL][:8000])
    )
    assert all(np.isfinite(row["interval"]).all() for row in rows.values())
    for name in ("marginals.png", "pairs.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert result["private"] == saved["private"]


def test_the_description_fits_all_records_and_comes_from_the_code_book(example):
    schema, train, test = example.load()
    assert len(train["age"]) == 32561
    assert len(test["age"]) == 16281
    for data in (train, test):
        assert schema.encode(data).shape[1] == 13
    missing = {
        name: int(np.sum(schema.encode(train)[:, place] < 0))
        for place, name in enumerate(schema.names)
    }
    assert {name: num for name, num in missing.items() if num} == {
        "workclass": 1836,
        "occupation": 1843,
        "native-country": 583,
    }
    assert sum(train[example.LABEL]) == 7841


def test_triples_see_a_dependence_that_pairs_do_not(example):
    """The third column says whether the others agree; it is missing where they do not."""
    schema = Schema(
        {"a": Binary(), "b": Binary(), "agree": Categorical(["yes", "never"], missing=True)}
    )
    a, b, other = np.array(list(itertools.product([False, True], repeat=3))).T

    def table(agree):
        return {"a": a, "b": b, "agree": np.where(agree, "yes", None)}

    dependent, independent = table(a == b), table(other)
    zero = {"marginals": 0.0, "worst_marginal": 0.0, "pairs": 0.0}
    assert example.likeness(schema, dependent, dependent) == {**zero, "triples": 0.0}
    assert example.likeness(schema, dependent, independent) == {**zero, "triples": 0.5}
    assert example.joint_shares(schema, dependent, 3)["a", "b", "agree"].shape == (3, 3, 3)
