"""`examples/quickstart.py`: the last line, the file, the picture and the report agree."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import re

import pandas as pd
import pytest

pytestmark = pytest.mark.smoke

EXAMPLES = pathlib.Path(__file__).parents[2] / "examples"
for name in ("formulae", "matplotlib", "statsmodels"):
    pytest.importorskip(name)

LAST_LINE = (
    r"quickstart: (\d+) people epsilon (\d+\.\d{4}) delta (\d\S*) inside (\d) of 7 "
    r"seconds (\d+\.\d)"
)


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("quickstart", EXAMPLES / "quickstart.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_main_job_end_to_end(example, tmp_path, capsys):
    """At epsilon 3 at least 5 of 7 means without privacy are inside; with a guess at `diseases` 15 fits had 7 each."""
    result = example.main(["--epsilon", "3", "--delta", "1e-5", "--output", str(tmp_path)])
    output = capsys.readouterr().out
    found = re.fullmatch(LAST_LINE, output.strip().splitlines()[-1])
    assert found, output[-300:]
    saved = json.loads((tmp_path / "quickstart.json").read_text())
    assert result == saved
    assert int(found[1]) == saved["records"] == 5912
    assert float(found[2]) == pytest.approx(saved["epsilon"], abs=5.1e-5)
    assert 2.97 <= saved["epsilon"] <= 3.0
    assert int(found[4]) == saved["inside"] >= 5
    for name, row in saved["coefficients"].items():
        assert row["low"] < row["mean"] < row["high"]
        assert name in output
    assert saved["coefficients"].keys() - {"Intercept"} == example.CHANGES.keys()
    assert "differentially private" in output
    assert (tmp_path / "quickstart.png").read_bytes().startswith(b"\x89PNG")


def test_a_record_is_a_person_and_the_schema_allows_it(example):
    people = example.load()
    assert len(people) == 5912
    assert not people.isna().any().any()
    assert people["visited"].mean() == pytest.approx(0.701, abs=0.001)
    for name, described in example.SCHEMA.items():
        if described["type"] == "continuous":
            assert people[name].between(described["lower"], described["upper"]).all(), name
    assert isinstance(people["health"].dtype, pd.CategoricalDtype)
