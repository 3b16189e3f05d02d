"""The study of calibrated federations: divisions of records, and means over sets."""

import federated_calibration as study
import numpy as np
import pytest


@pytest.mark.parametrize("division", ["even", "size", "label"])
def test_divisions_hold_every_record_once_and_sizes_do_not_depend_on_it(division):
    cell = study.Cell(5, division, 1000)
    sizes = []
    for seed in range(2):
        _, y, _ = study.records(1000, seed)
        parts = study.divided(y, cell, seed)
        assert sorted(np.concatenate(parts)) == list(range(1000))
        sizes.append([len(part) for part in parts])
        means = [y[part].mean() for part in parts]
        if division == "label":
            assert means[0] < 0.25
            assert means[-1] > 0.75
        else:
            assert np.ptp(means) < 0.4
    assert sizes[0] == sizes[1]
    assert (max(sizes[0]) > 5 * min(sizes[0])) == (division == "size")


def test_epsilons_go_by_hospital():
    cell = study.Cell(5, "even", 1000, study.UNLIKE)
    assert [cell.epsilon(number) for number in range(5)] == [0.3, 1.0, 1.0, 1.0, 3.0]
    assert {study.Cell(3, "even", 1000).epsilon(number) for number in range(3)} == {1.0}
    assert len({cell.name for cell in study.CELLS}) == len(study.CELLS)


def test_means_over_sets(tmp_path):
    row = dict.fromkeys(
        ("not_private", "width", "over_bound", "rounds_width", "seconds", "combine_seconds"), 1.5
    )
    rows = [
        {**row, "coverage": 1.0, "rounds_coverage": 0.5, "warned": False, "p_unlike": 0.5},
        {**row, "coverage": 0.5, "rounds_coverage": 0.5, "warned": True, "p_unlike": 1e-9},
    ]
    found = study.summary(rows)
    assert (found["coverage"], found["coverage_error"]) == (0.75, 0.25)
    assert (found["coverage_without_warning"], found["warned"]) == (1.0, 0.5)
    assert found["found_unlike"] == 0.5
    study.draw([{"cell": "one", **found}], tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_cells_with_effects():
    cell = study.Cell(3, "even", 600, effects=2.0)
    x, y, parts, truth, effects = study.with_effects(cell, 0)
    assert sorted(np.concatenate(parts)) == list(range(600))
    assert len({len(part) for part in parts}) == 1
    shares = [y[part].mean() for part in parts]
    assert np.argmax(shares) == np.argmax(effects)
    slopes, sds = study.without_privacy(x, y, parts)
    assert (np.abs(slopes - truth[1:]) < 4.5 * sds).all()
    names = ("coverage", "width", "intercept", "sd", "own", "pooled_coverage", "pooled_intercept")
    row = dict.fromkeys((*names, "seconds", "combine_seconds"), 0.5)
    row |= {"sd_interval": [0.1, 0.7], "warned": False, "p_unlike": 0.5, "pooled_p_unlike": 1e-9}
    found = study.summary([row, {**row, "own": 1.0, "sd_interval": [0.3, 0.9]}])
    assert found["own"] == 0.75
    assert found["sd_median_interval"] == pytest.approx([0.2, 0.8])
    assert (found["found_unlike"], found["pooled_found_unlike"]) == (0.0, 1.0)
