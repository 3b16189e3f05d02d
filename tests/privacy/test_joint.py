"""Joint releases (design section 5.5)."""

import math

import numpy as np
import pytest
from support.gaussian_oracle import gaussian_epsilon
from support.joint import GaussianPart, JointGaussian, joint_noise_multiplier

from tfp_dpvi.privacy import (
    FullBatch,
    PoissonSampling,
    PrivacyPlan,
    Sensitivity,
)


def test_full_batch_price_equals_the_composition_of_the_parts():
    parts = [PrivacyPlan(FullBatch(), z, 1).dp_event for z in (3.0, 4.0)]
    joint = PrivacyPlan(FullBatch(), joint_noise_multiplier([3.0, 4.0]), 1)
    rest = PrivacyPlan(FullBatch(), 4.0, 1)
    assert joint.epsilon(1e-5) == pytest.approx(rest.epsilon(1e-5, parts[:1]), rel=1e-9)


def test_one_sample_is_not_two():
    """Two parts on the same Poisson sample cost more than on two samples: the inclusion is shared."""
    joint = PrivacyPlan(PoissonSampling(0.01), joint_noise_multiplier([1.0, 1.0]), 1)
    apart = PrivacyPlan(PoissonSampling(0.01), 1.0, 2)
    assert joint.epsilon(1e-5) > 1.05 * apart.epsilon(1e-5)


def test_parts_in_their_own_units():
    gradient = GaussianPart("gradient", 2.0, Sensitivity(1.0, 2.0))
    metric = GaussianPart("elbo", 300.0, Sensitivity(100.0, 150.0))
    joint = JointGaussian((gradient, metric))
    assert joint.noise_multiplier == pytest.approx(joint_noise_multiplier([2.0, 3.0]))
    # Replacement: distances 2 / 2 and 150 / 300 in units of the noise.
    distance = math.hypot(1.0, 0.5)
    plan = PrivacyPlan(FullBatch(), joint.noise_multiplier, 1, "replace_one", joint.sensitivity)
    assert plan.epsilon(1e-5) == pytest.approx(gaussian_epsilon(1e-5, distance), rel=1e-9)


def test_a_joint_release_replayed():
    """Noise-scaled distances of random neighbours never exceed the statement."""
    rng = np.random.default_rng(0)
    joint = JointGaussian(
        (GaussianPart("a", 2.0, Sensitivity()), GaussianPart("b", 5.0, Sensitivity(3.0, 4.0)))
    )
    for _ in range(200):
        a = rng.standard_normal(3)
        a *= min(1.0, 1.0 / np.linalg.norm(a))
        b = np.clip(rng.standard_normal() * 5, -1.0, 3.0)
        moved = math.hypot(np.linalg.norm(a) / 2.0, abs(b) / 5.0)
        assert moved <= joint.sensitivity.add_or_remove / joint.noise_multiplier * (1 + 1e-12)
