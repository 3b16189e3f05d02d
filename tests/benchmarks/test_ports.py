"""`benchmarks/ports.py`: the page's differences are those of the programs, and the programs run."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys

import ports
import pytest


def applied(text, lines):
    """Returns a text with a difference applied, as `patch` does."""
    old, new, place = text.splitlines(), [], 0
    for line in lines:
        hunk = re.fullmatch(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,\d+)? @@", line)
        if hunk:
            # A hunk that takes no line out names the line before it.
            start = int(hunk[1]) - (hunk[2] != "0")
            new += old[place:start]
            place = start
        elif line[0] == "-":
            assert old[place] == line[1:]
            place += 1
        else:
            assert line[0] == "+"
            new.append(line[1:])
    return "\n".join([*new, *old[place:]]) + "\n"


def on_the_page(name):
    page = ports.PAGE.read_text(encoding="utf-8")
    section = page.partition(f"<!-- {name}: begin -->")[2].partition(f"<!-- {name}: end -->")[0]
    return re.search(r"```diff\n(.*?)\n```", section, flags=re.DOTALL)[1].splitlines()


@pytest.mark.parametrize("name", ports.PORTS)
def test_a_tutorial_with_the_pages_difference_is_its_private_version(name):
    lines = on_the_page(name)
    assert sum(line[0] in "+-" for line in lines) <= 10
    plain = (ports.FOLDER / f"{name}.py").read_text(encoding="utf-8")
    private = (ports.FOLDER / f"{name}_private.py").read_text(encoding="utf-8")
    assert applied(plain, lines) == private
    assert "tfp_dpvi" not in plain


def test_the_page_is_written_from_the_results():
    """Each port has a row, and is measured at the epsilon that the page states."""
    page, found = ports.PAGE.read_text(encoding="utf-8"), ports.results()
    assert list(found["rows"]) == list(ports.PORTS)
    assert found["settings"]["quick"] is None
    assert ports.written(page, found["rows"]) == page
    for row in found["rows"].values():
        assert 1.9 < row["private"]["epsilon"] <= 2.0
        assert row["private"]["delta"] == 1e-5


def test_no_program_is_left_out():
    programs = {path.stem for path in ports.FOLDER.glob("*.py")} - {"records"}
    assert programs == {f"{name}{end}" for name in ports.PORTS for end in ("", "_private")}


def run(names, tmp_path):
    """Runs ports at a small size, in a process of their own: it imports both versions of Keras."""
    script = pathlib.Path(ports.__file__)
    output = tmp_path / "ports.json"
    arguments = [sys.executable, str(script), "--quick", "--output", str(output), "--only", *names]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())["rows"]


def check_row(row):
    assert row["plain"]["records"] == row["private"]["records"] == ports.QUICK["records"]
    assert 1.9 < row["private"]["epsilon"] <= 2.0
    assert row["private"]["processor_ms_a_step"] > 0


def test_a_port_of_this_processs_keras_runs(tmp_path, monkeypatch):
    """It needs no process of its own, whose imports would be most of the time."""
    pytest.importorskip("tf_keras")
    monkeypatch.setattr(sys, "path", [*sys.path])
    output = tmp_path / "ports.json"
    rows = ports.main(["--quick", "--output", str(output), "--only", "tfp_regression"])
    assert json.loads(output.read_text())["rows"] == rows
    check_row(rows["tfp_regression"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tfp_regression", "film_ratings", "text_classification"])
def test_a_port_of_made_up_records_runs(name, tmp_path):
    pytest.importorskip("tf_keras")
    check_row(run([name], tmp_path)[name])


@pytest.mark.slow
@pytest.mark.skipif(
    not pathlib.Path(os.environ.get("TFP_DPVI_DATA", ""), "mnist").is_dir(),
    reason="no real data: TFP_DPVI_DATA names no folder with them",
)
def test_all_ports_of_public_records_run(tmp_path):
    pytest.importorskip("tf_keras")
    names = [name for name in ports.PORTS if ports.PORTS[name].records.endswith(("MNIST", "Adult"))]
    rows = run(names, tmp_path)
    assert sorted(rows) == sorted(names)
    assert all(1.9 < row["private"]["epsilon"] <= 2.0 for row in rows.values())
