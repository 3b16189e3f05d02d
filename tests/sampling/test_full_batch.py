"""Full batches: every record exactly once in every step (C4)."""

import numpy as np
import pytest
from support.poisson import drawer, make_keys

from tfp_dpvi.privacy import FullBatch
from tfp_dpvi.sampling import FullBatchSampler


@pytest.mark.parametrize("jit_compile", [True, False])
@pytest.mark.parametrize(
    ("count", "physical"),
    [
        (1, None),
        (10, None),
        pytest.param(10, 3, marks=pytest.mark.smoke),
        (10, 5),
        (7, 100),
        (257, 16),
    ],
)
def test_every_record_is_visited_exactly_once(count, physical, jit_compile):
    """C3, C4: A and D count each record once; none is dropped where the physical size does not divide N."""
    sampler = FullBatchSampler(count, physical)
    size = sampler.physical_batch_size
    assert size == min(physical or count, count)
    seen, visits = drawer(sampler, -(-count // size), jit_compile=jit_compile)(make_keys(3))
    assert (visits.numpy() == -(-count // size)).all()
    for batch in seen.numpy():
        np.testing.assert_array_equal(np.sort(batch[batch >= 0]), np.arange(count))


def test_the_sampler_says_what_it_does():
    """C4: full batches are not amplified."""
    assert FullBatchSampler(10, 3).scheme == FullBatch()


@pytest.mark.parametrize("arguments", [(0,), (10, 0)])
def test_bad_counts_are_refused(arguments):
    """C8: the message names the argument."""
    with pytest.raises(ValueError, match=r"num_available|physical_batch_size"):
        FullBatchSampler(*arguments)
