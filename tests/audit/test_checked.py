"""`audit.replay_check`: tight on clean checks, and each planted fault in their release is found."""

from unittest import mock

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.checking import blocks as blocks_lib
from tfp_dpvi.checking import declared, outcomes, release

NUM = 12
X = np.stack([np.ones(NUM), np.linspace(-1.0, 1.0, NUM)], axis=1).astype("float32")
Y = (np.arange(NUM) % 2).astype("float32")
FAMILIES = {
    "counts": lambda w, x: tfd.Poisson(log_rate=tf.linalg.matvec(x, w)),
    "labels": lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w), dtype=tf.float32),
}


def replayed(family="counts", **how):
    model = dpvi.DPVI(tfd.Sample(tfd.Normal(0.0, 1.0), 2), FAMILIES[family])
    model.compile(epsilon=1.0, delta=1e-5)
    return audit.replay_check(model, X, Y, columns={1: [0.0]}, at=(0,), seed=2, **how)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_clean_check_holds_and_attains_its_statement(family):
    """C3: extreme records, NaN among them."""
    result = replayed(family)
    assert result.holds, result
    assert result.attained > 0.99
    first = {"counts": "pit", "labels": "reliability"}[family]
    assert [each.name for each in result.sums][:1] == [first]
    assert result.sums[-1].name == "together"
    assert "holds" in str(result)


def test_persons_are_removed_whole():
    persons = {"unit_ids": np.arange(NUM) // 3, "max_rows_per_unit": 2}
    result = replayed(neighbours=NEIGHBOURS, **persons)
    assert result.holds, result


NEIGHBOURS = {"x": X[[3, 4]], "y": np.array([0.0, 7.0], "float32")}


def summed_persons(predictor, draws, what, subjects, key):
    rows = GENUINE(predictor, draws, what, release.Subjects(subjects.x, subjects.y), key)
    places, mask = subjects.units.places, subjects.units.mask
    return np.einsum("nm,nmk->nk", mask * 1.0, rows[places])


def scaled_by_others(self, codes, values):
    """A contribution over a mean of all records: none is bounded by its own alone."""
    return CONTRIBUTION(self, codes, values) / np.mean(np.abs(values) + 1e-3)


def unclipped(self, codes, values):
    return self.matrix.T[np.clip(codes, 0, self.matrix.shape[1] - 1)] * (3.0 * values[:, None])


GENUINE, CONTRIBUTION = release.contributions, blocks_lib.Block.contribution
FAULTS = {
    "half the sensitivity": lambda: mock.patch.object(
        declared, "sensitivity_of", return_value=dpvi.privacy.Sensitivity(0.5, 0.9)
    ),
    "values are not bounded": lambda: mock.patch.object(
        blocks_lib.Block, "contribution", unclipped
    ),
    "a record changes the others": lambda: mock.patch.object(
        blocks_lib.Block, "contribution", scaled_by_others
    ),
    "ranks among the records": lambda: mock.patch.object(
        outcomes,
        "_among",
        lambda y, *a, **k: AMONG(np.argsort(np.argsort(y)).astype("float64"), *a, **k),
    ),
}
AMONG = outcomes._among


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    with FAULTS[fault]():
        result = replayed(neighbours=NEIGHBOURS)
    assert not result.holds, result
    assert "DOES NOT HOLD" in str(result)


def test_sums_over_a_persons_rows_are_found():
    from tfp_dpvi.audit import checked

    persons = {"unit_ids": np.arange(NUM) // 4, "max_rows_per_unit": 4}
    with mock.patch.object(checked, "contributions", summed_persons):
        assert not replayed(neighbours=NEIGHBOURS, **persons).holds
