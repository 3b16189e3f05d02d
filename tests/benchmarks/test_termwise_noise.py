"""`benchmarks/termwise_noise.py`: the default costs no more than any other scheme."""

from __future__ import annotations

import importlib.util
import json
import pathlib


def test_the_default_scheme_costs_least(tmp_path, capsys):
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "termwise_noise.py"
    spec = importlib.util.spec_from_file_location("benchmarks_termwise_noise", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.main(["--output", str(tmp_path)])
    printed = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert printed == json.loads((tmp_path / "termwise_noise.json").read_text())
    costs = printed["cost"]
    assert set(costs) == {"blocks", "single", "split"}
    assert set(costs["blocks"].values()) == {1.0}
    assert all(cost >= 1 - 1e-9 for row in costs.values() for cost in row.values())
    assert all(cost > 1.1 for cost in costs["single"].values())
