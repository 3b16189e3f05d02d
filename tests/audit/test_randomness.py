"""`audit.randomness`: clean steps pass, wrong noise and samples are found."""

import hashlib

import numpy as np
import pytest
import scipy.stats
from support import broken, planted, tapes
from support.siblings import slow
from support.steps import Indicator
from support.subject import Subject

from tfp_dpvi import audit
from tfp_dpvi.audit import draws
from tfp_dpvi.audit.observed import ObservedStep

FEW = {"batch_size": 8, "num_steps": 400}


def test_a_clean_step_passes():
    """False alarm: 1e-6. All tests are there, and the ledger is not charged."""
    model = planted.linear()
    result = audit.randomness(model, planted.small_records(), **FEW)
    assert result.holds, result
    assert len(result.p_values) == 14
    assert min(p for _, p in result.p_values) > 0.0
    assert "as stated" in str(result)
    assert model.num_releases == 0


def test_wrong_noise_and_samples_are_found():
    """Noise by hand, without a grid and two thirds as large, on shuffled batches: each test that looks at it says so."""
    with Subject(privatize=planted.by_hand(2 / 3), poisson=broken.Shuffled).installed():
        result = audit.randomness(planted.linear(), planted.small_records(), **FEW)
    assert not result.holds
    assert set(result.failures) >= {
        "deviation of the noise of gradient",
        "batch sizes",
        "grid of released values",
    }
    assert "NOT as stated" in str(result)
    assert str(result).count("FAILS") == len(result.failures)


@pytest.mark.parametrize(
    ("num", "steps", "rate"), [slow(30, 1000, 0.27), (5, 300, 0.4), slow(100, 400, 0.01)]
)
def test_p_values_of_samples_are_uniform_or_larger(num, steps, rate):
    """Of Bernoulli inclusions, in 300 simulations: at most 12 % below 5 %. False alarm: below 1e-6 for each."""
    rng = np.random.default_rng(0)
    low = scipy.stats.binom.isf(1e-7, 300, 0.055)
    variance = rate**2 - rate**4 + 2 * (rate**3 - rate**4)
    counts = np.zeros(3)
    for _ in range(300):
        visits = (rng.random((steps, num)) < rate).astype(int)
        counts += [
            draws._dispersion_p_value(visits.sum(axis=1), num, rate) < 0.05,
            draws._dispersion_p_value(visits.sum(axis=0), steps, rate) < 0.05,
            draws._overlap_p_value(visits, rate, variance) < 0.05,
        ]
    assert counts.max() <= low
    assert counts[:2].min() > 0


@pytest.mark.slow
def test_fixed_sizes_pass():
    """False alarm: 1e-6."""
    model = planted.linear(neighboring_relation="replace_one", accountant="rdp")
    result = audit.randomness(model, planted.small_records(), sampling="fixed_size", **FEW)
    assert result.holds, result


def test_p_values_of_shifted_noise_are_uniform_or_larger():
    """In 300 simulations: at most 12 % below 5 %. False alarm: below 1e-6. A stream that is read again is seen."""
    rng = np.random.default_rng(0)
    low = scipy.stats.binom.isf(1e-7, 300, 0.055)
    noise = [[rng.normal(size=(400, 16)) for _ in range(2)] for _ in range(300)]
    assert sum(draws._shifts_p_value(runs) < 0.05 for runs in noise) <= low
    stream = rng.normal(size=400 * 4 + 16)
    overlapping = np.stack([stream[4 * step : 4 * step + 16] for step in range(400)])
    assert draws._shifts_p_value([overlapping, noise[0][0]]) < 1e-9


def test_secure_steps_are_audited_as_they_run():
    """C10: their noise and samples are those of AES, found in NumPy; audits pass, and wrong noise is seen. False alarm: 1e-6."""
    width, steps, key = 30, 5, np.array([3, 4])
    model = Indicator(width)
    model.compile(
        planted.dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0),
        randomness="secure",
    )
    step = ObservedStep(model, np.eye(width, dtype="float32"), batch_size=6)
    secret = hashlib.sha256(key.tobytes()).digest()
    expected = -tapes.releases_of_unit_records(steps, width, 0.2, 1.0, key=secret)
    np.testing.assert_allclose(step.all_values(key, steps), expected, atol=2.0**-12)
    np.testing.assert_allclose(step.all_values(key, 2, first=3), expected[3:], atol=2.0**-12)
    secure = planted.linear(randomness="secure")
    result = audit.randomness(secure, planted.small_records(), **FEW)
    assert result.holds, result
    with Subject(privatize=broken.half_noise).installed():
        assert not audit.randomness(secure, planted.small_records(), **FEW).holds
