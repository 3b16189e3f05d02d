"""The walk in docs/architecture.md: each line names a function that a fit with the default settings runs."""

from __future__ import annotations

import importlib.util
import pathlib
import re
import sys

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tfd

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = pathlib.Path(dpvi.__file__).parent
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


CURVATURE = ("calibrated/curvature.py", "draw_curvature")


def steps(title):
    """File and function of each line of a walk."""
    section = PAGE.split(f"### {title}\n")[1].split("\n#")[0]
    return re.findall(r"^\| `([\w/.]+)` \| `(\w+)` \|", section, flags=re.MULTILINE)


@pytest.fixture(scope="module")
def calls():
    """Files and functions of the package in the order of their first call, in a fit and a summary."""
    first = {}

    def look(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            file = pathlib.Path(frame.f_code.co_filename).relative_to(PACKAGE).as_posix()
            first.setdefault((file, frame.f_code.co_name), len(first))

    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    model.compile("sgd", l2_norm_clip=1.0, noise_multiplier=1.0, jit_compile=False)
    x = np.ones(20, np.float32)
    before = sys.getprofile()
    sys.setprofile(look)
    try:
        model.fit(x, x, batch_size=5, epochs=3, verbose=0)
        model.posterior_summary()
    finally:
        sys.setprofile(before)
    return first


@pytest.mark.parametrize("title", ["One record", "One released value"])
def test_every_step_of_the_walk_is_taken(calls, title):
    assert len(steps(title)) >= 8
    assert [step for step in steps(title) if step not in calls] == []


def test_released_values_go_down_the_page(calls):
    """From the curvature on: what comes before also runs for the logs of an epoch."""
    computed = [step for step in steps("One released value") if step[0].startswith("calibrated")]
    order = [calls[step] for step in computed[computed.index(CURVATURE) :]]
    assert order == sorted(order)


def test_no_room_of_the_posterior_is_left_out(calls):
    """Files of `calibrated/` that run in a fit without a pilot are on the page."""
    named = {file for title in ("One record", "One released value") for file, _ in steps(title)}
    helpers = {"calibrated/requirements.py", "calibrated/hmc.py"}
    run = {file for file, _ in calls if file.startswith("calibrated/")}
    assert run - helpers - named == set()


def test_a_records_files_are_those_of_the_figure():
    spec = importlib.util.spec_from_file_location("structure", ROOT / ".ci" / "structure.py")
    structure = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = structure
    try:
        spec.loader.exec_module(structure)
    finally:
        del sys.modules[spec.name]
    assert [file for file, _ in steps("One record")] == list(structure.RECORD_PATH)
