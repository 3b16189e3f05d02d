"""The study of posteriordb: its references, its judgement, and that it says when it has no data."""

import json

import numpy as np
import posteriordb
import pytest


def test_without_a_copy_it_says_so_and_fits_nothing(monkeypatch, capsys, tmp_path):
    monkeypatch.delenv("POSTERIORDB", raising=False)
    posteriordb.main(["--out", str(tmp_path / "figures.json")])
    assert capsys.readouterr().out == "POSTERIORDB is not set: nothing to fit.\n"
    assert not list(tmp_path.iterdir())


def test_each_posterior_has_a_reference_for_each_of_its_names():
    references = json.loads(posteriordb.REFERENCES.read_text())
    assert set(references) == set(posteriordb.CASES)
    for name, case in posteriordb.CASES.items():
        known = references[name]
        assert len(known["mean"]) == len(known["sd"]) == len(case.names), name
        assert np.min(known["sd"]) > 0.0, name


def test_a_mean_outside_of_the_interval_is_named():
    case = posteriordb.CASES["kidiq-kidscore_momiq"]
    known = {"mean": [26.0, 0.61, 18.3], "sd": [6.0, 0.059, 0.62]}
    fitted = {
        "warnings": [],
        "mean": {"b0": 26.0 + 2.5 * 12.0, "b[0]": 0.61 - 2.7 * 0.1, "sigma": 18.3},
        "sd": {"b0": 12.0, "b[0]": 0.1, "sigma": 0.62},
    }
    found = posteriordb.judged(case, fitted, known)
    assert found["outside"] == ["b[0]"]
    assert found["distances"] == {"b0": 2.5, "b[0]": -2.7, "sigma": 0.0}
    assert found["ratios"]["b0"] == pytest.approx(2.0)
    assert posteriordb.judged(case, {"refused": "no"}, known) == {"refused": "no"}
