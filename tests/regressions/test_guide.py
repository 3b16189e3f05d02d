"""An analyst pastes the guide, block by block, into a fresh process: no line of it is TFP's."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

for name in ("formulae", "matplotlib", "statsmodels"):
    pytest.importorskip(name)

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "regression.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), flags=re.DOTALL)


def test_no_block_knows_of_tensorflow():
    assert len(BLOCKS) >= 5
    for block in BLOCKS:
        assert not re.search(r"tensorflow|\btfp?\b|\btfd\b|keras|compile|optimizer", block), block


@pytest.mark.slow
def test_the_blocks_run_in_order_in_a_fresh_process(tmp_path):
    """As pasted: in a folder of their own, each after those before it, and quiet but for warnings."""
    script = tmp_path / "pasted.py"
    script.write_text("\n".join(BLOCKS), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "-c", f"exec(compile(open({str(script)!r}).read(), 'pasted', 'exec'))"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    for part in ("what public source", "yrs_married", "noise, data, prior", "family bernoulli"):
        assert part in result.stdout
    assert (tmp_path / "affairs.zip").stat().st_size > 1000
