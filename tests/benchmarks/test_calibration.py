"""Pooling of runs in `benchmarks/calibration.py`."""

import numpy as np
import pytest
from calibration import pooled


def summary(sets, flat, revision):
    """Of coverages by data set, as `run` makes it."""

    def kind(values):
        error = np.std(values, ddof=1) / np.sqrt(len(values))
        return {
            "num": len(values),
            "coverage": np.mean(values),
            "error": error,
            "bias": 2.0,
            "by_coordinate": [0.5, np.mean(values)],
        }

    paired = kind(sets)
    found = {
        "cell": "a",
        "num": len(sets),
        "seconds": 1.0,
        "revision": revision,
        "warned": {"paired": np.mean(sets)},
    }
    if len(flat):
        paired["same_crps"] = np.mean(sets[: len(flat)])
        found["flat, clip pilot"] = kind(flat)
    return {**found, "paired": paired}


def test_two_runs_are_one_of_their_data_sets():
    sets = np.random.default_rng(0).uniform(size=30)
    flat = sets / 2.0
    one = pooled(summary(sets[:10], flat[:4], "a"), summary(sets[10:], flat[10:18], "b"))
    whole = summary(sets, flat, "a, b")
    for name in ("num", "coverage", "error", "bias", "by_coordinate"):
        assert one["paired"][name] == pytest.approx(whole["paired"][name], abs=2e-5), name
    assert one["flat, clip pilot"]["num"] == 12
    assert one["paired"]["same_crps"] == pytest.approx(np.mean([*sets[:4], *sets[10:18]]), abs=2e-5)
    assert (one["num"], one["revision"], one["seconds"]) == (30, "a, b", 2.0)
    assert one["warned"]["paired"] == pytest.approx(np.mean(sets))


def test_a_run_without_flat_clipping_leaves_its_figures():
    sets = np.linspace(0.0, 1.0, 20)
    one = pooled(summary(sets[:10], sets[:4], "a"), summary(sets[10:], [], "a"))
    assert one["flat, clip pilot"]["num"] == 4
    assert one["paired"]["same_crps"] == pytest.approx(np.mean(sets[:4]))
    assert one["revision"] == "a"
