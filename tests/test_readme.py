"""The README's code runs as it stands."""

from __future__ import annotations

import pathlib
import re

import pytest

pytestmark = pytest.mark.smoke

README = pathlib.Path(__file__).resolve().parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


def test_there_is_code_to_run():
    assert BLOCKS
    assert "dpvi.regression" in BLOCKS[0]


@pytest.mark.parametrize("block", BLOCKS)
def test_the_block_runs_verbatim(block, tmp_path, monkeypatch, capsys):
    for name in ("formulae", "pandas", "statsmodels"):
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block, str(README), "exec"), names)
    result = names["result"]
    assert 0.99 <= result.model.privacy_report().epsilon <= 1.0
    assert repr(result) in capsys.readouterr().out
    table = result.summary()
    # Without privacy -0.147 and 0.015; six deviations, of which noise is a part.
    assert abs(table.loc["logc", "mean"] + 0.147) < 6.0 * table.loc["logc", "sd"] < 0.3
