"""The tests are tested: each broken copy of the private step fails the check that guards it, and the real one passes.

A check that fails by chance fails a broken copy too, so these tests raise no false alarms of their own beyond those of
the checks on the real step (1e-7 in all). Where a statistical check must fail, it does so by tens of standard errors.
"""

import numpy as np
import pytest
from support import broken
from support.cases import shared_model
from support.poisson import check_poisson
from support.replay import check_raw_replay
from support.steps import FirstRecords, Steps, check_fresh_noise, check_noise
from support.subject import REAL, Subject
from support.sums import check_sums

from tfp_dpvi.sampling import PoissonSampler


def shared_out(names, *easier):
    """Those that are found sooner than a quick one of the same check are slow."""
    return [
        pytest.param(name, marks=pytest.mark.slow) if name in easier else name for name in names
    ]


def _sums(subject):
    check_sums("bernoulli", shared_model("bernoulli", "mean_field", np.float64), subject=subject)


def _sampler(sampler_class):
    check_poisson(sampler_class(100, 0.2, 5), 0.2, 20_000)


@pytest.mark.parametrize("name", shared_out(broken.NOISE, "no noise", "noise / 2"))
def test_wrong_noise_is_caught(name):
    """C1, C2."""
    with pytest.raises(AssertionError, match=r"standard deviation|p = |released mean"):
        check_noise(Steps(Subject(privatize=broken.NOISE[name])))


def test_a_realised_denominator_is_caught():
    """C1."""
    steps = Steps()
    object.__setattr__(
        steps, "subject", Subject(privatize=broken.realised_denominator(steps.sampler))
    )
    with pytest.raises(AssertionError, match=r"released mean|standard deviation|p = "):
        check_noise(steps)
    assert isinstance(steps.sampler, FirstRecords)


def test_a_mean_for_a_sum_is_caught_in_the_step():
    """C1."""
    with pytest.raises(AssertionError, match="released mean"):
        check_noise(Steps(Subject(clipped_sum=broken.mean_for_sum)))


@pytest.mark.parametrize("name", broken.STALE_NOISE)
def test_stale_noise_is_caught(name):
    """C10."""
    with pytest.raises(AssertionError, match=r"noise of .* p = "):
        check_fresh_noise(Steps(Subject(privatize=broken.STALE_NOISE[name])))


@pytest.mark.parametrize("name", shared_out(broken.STEPS, "mean for sum"))
def test_wrong_sums_are_caught(name):
    """C1, C2, C5."""
    with pytest.raises(AssertionError, match=r"off by|exact gradient"):
        _sums(broken.STEPS[name])


@pytest.mark.parametrize("name", broken.SENSITIVITY)
def test_an_understated_sensitivity_is_caught(name):
    """C3, C8."""
    with pytest.raises(AssertionError, match=r"moves the sum|presence|not finite|exactly zero"):
        check_raw_replay(Subject(clipped_sum=broken.SENSITIVITY[name]))


@pytest.mark.parametrize(
    "name", shared_out(broken.SAMPLERS, "truncated batches", "last record lost")
)
def test_batches_that_are_not_poisson_are_caught(name):
    """C4."""
    with pytest.raises(AssertionError, match="p = "):
        _sampler(broken.SAMPLERS[name])


def test_the_real_step_passes():
    """C1 to C5, C8, C10: the same checks, at the same sizes. False alarms: 4e-8 (38 p-values)."""
    check_noise(Steps(REAL))
    check_fresh_noise(Steps(REAL))
    _sums(REAL)
    check_raw_replay(REAL)
    _sampler(PoissonSampler)
