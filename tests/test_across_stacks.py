"""What one stack saves the other opens: a `.keras` file, a ledger, and an export with TensorFlow alone.

`make smoke STACK=tf215` names the Python of the current stack in TFP_DPVI_OTHER_STACK, where it has been made.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

OTHER = os.environ.get("TFP_DPVI_OTHER_STACK", "")
ROOT = pathlib.Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.smoke,
    pytest.mark.skipif(
        not OTHER, reason="TFP_DPVI_OTHER_STACK does not name the Python of the other stack"
    ),
]


def run(python, *arguments):
    found = subprocess.run(
        [python, str(ROOT / "tests" / "support" / "across.py"), *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout.splitlines()[-1])


@pytest.mark.parametrize("way", ["here to there", "there to here"])
def test_files_of_one_stack_open_on_the_other(way, tmp_path):
    one, other = (sys.executable, OTHER) if way == "here to there" else (OTHER, sys.executable)
    written = run(one, "write", tmp_path)
    read = run(other, "read", tmp_path)
    assert read["loaded"]["releases"] == written["releases"] == 5
    assert read["loaded"]["epsilon"] == pytest.approx(written["epsilon"], rel=1e-3)
    np.testing.assert_allclose(read["loaded"]["predict"], written["predict"], rtol=1e-5)
    # The ledger goes on where it was, and the budget of 1 holds over both stacks.
    assert read["fitted"]["releases"] == 10
    assert written["epsilon"] < read["fitted"]["epsilon"] <= 1.0
    alone = run(other, "alone", tmp_path)
    np.testing.assert_allclose(alone["predict"], written["predict"], rtol=1e-5)
