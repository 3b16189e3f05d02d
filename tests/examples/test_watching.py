"""`examples/watching.py` at a small size, without a browser."""

from __future__ import annotations

import importlib.util
import json
import os
import pathlib

import pytest

pytestmark = pytest.mark.skipif(
    not pathlib.Path(os.environ.get("TFP_DPVI_DATA", ""), "adult").is_dir(),
    reason="no real data: TFP_DPVI_DATA names no folder with them",
)


def test_quick_run(tmp_path, capsys):
    path = pathlib.Path(__file__).parents[2] / "examples" / "watching.py"
    spec = importlib.util.spec_from_file_location("examples_watching", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(["--quick", "--logs", str(tmp_path / "logs"), "--output", str(tmp_path)])
    assert capsys.readouterr().out.splitlines()[-1].startswith("watching: epsilon 0.99")
    saved = json.loads((tmp_path / "tensorboard.json").read_text())
    assert len(saved["history"]["private_elbo"]) == 3
    assert saved["privacy_report"]["epsilon"] <= 1.0
    assert list((tmp_path / "logs").glob("events*"))
