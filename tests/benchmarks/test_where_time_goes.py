"""Steps with a part taken out: what is timed is what is said, and the library is whole again afterwards."""

from __future__ import annotations

import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")

import where_time_goes

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.sampling import PoissonSampler


def test_parts_are_taken_out_and_put_back():
    kept = (_random.add_noise, PoissonSampler.for_each_batch, dpvi.optimizers.DPKerasAdamOptimizer)
    with where_time_goes.without(where_time_goes.PARTS):
        (same,) = _random.add_noise(tf.constant([1, 2], tf.int64), [tf.zeros([50])], [1.0])
        assert not same.numpy().any()
        sampler = PoissonSampler(100, 0.1, 4)
        indices = sampler.for_each_batch(None, lambda carry, rows, mask: rows[mask], None)
        np.testing.assert_array_equal(indices, range(10))
        assert dpvi.optimizers.DPKerasAdamOptimizer is dpvi.optimizers.DPKerasSGDOptimizer
    assert kept == (
        _random.add_noise,
        PoissonSampler.for_each_batch,
        dpvi.optimizers.DPKerasAdamOptimizer,
    )


def test_costs_are_differences_within_rounds():
    times = {
        "whole": [10.0, 20.0, 12.0],
        "without noise": [7.0, 17.0, 9.0],
        "without sampling": [9.0, 19.0, 11.0],
        "without Adam": [8.0, 18.0, 10.0],
        "without all three": [4.0, 5.0, 6.0],
    }
    (row,) = where_time_goes.table({"case": times}).values()
    assert row == {
        "whole": 12e3,
        "noise": 3e3,
        "sampling": 1e3,
        "Adam": 2e3,
        "clipped gradient and update": 5e3,
        "JAX, whole": None,
    }


@pytest.mark.slow
def test_quick_run(tmp_path):
    where_time_goes.main(["--quick", "--output", str(tmp_path)])
    found = json.loads((tmp_path / "profile.json").read_text())
    assert set(found["first_fit_seconds"]) == {"VAE", "convolutional VAE"}
    assert all(row["whole"] > 0 for row in found["milliseconds_per_step"].values())
    assert (tmp_path / "profile.png").exists()
