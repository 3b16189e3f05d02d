"""Clipped sums against a loop over records, one at a time (C1, C2, C5, C9)."""

import numpy as np
import pytest
from support.cases import CASES, SURROGATES, shared_model
from support.logs import no_fallback
from support.siblings import slow
from support.sums import check_sums

from tfp_dpvi._tf import tf

F32, F64 = np.float32, np.float64
ALL = [(surrogate, case) for surrogate in SURROGATES for case in CASES]
# One variable and a joint distribution: others take long to trace. Full rank in `test_replay.py`.
FAST = [
    ("mean_field", "bernoulli"),
    ("mean_field", "unknown_scale"),
    ("asvi", "bernoulli"),
]


def _check(case, surrogate, dtype, **kwargs):
    with no_fallback():
        check_sums(
            case,
            shared_model(case, surrogate, dtype),
            rtol=1e-5 if dtype is F32 else 1e-10,
            **kwargs,
        )


@pytest.mark.parametrize(
    ("surrogate", "case"),
    [
        pytest.param(*FAST[0], marks=pytest.mark.smoke),
        *FAST[1:],
        *(slow(*pair) for pair in ALL if pair not in FAST),
    ],
)
def test_sums_equal_a_loop_over_records(surrogate, case):
    """C1, C2, C5, C9: in float64, for both engines, weights inside the clip, records left out, no clip to tight clip."""
    _check(case, surrogate, F64)


@pytest.mark.parametrize(
    ("surrogate", "case"),
    [
        ("mean_field", "bernoulli"),
        *(slow(*pair) for pair in ALL[1:]),
    ],
)
def test_three_draws(surrogate, case):
    """C5: a record's gradient is averaged over the draws before its one clip."""
    _check(case, surrogate, F64, num_draws=3)


@pytest.mark.slow  # In float32 below.
@pytest.mark.parametrize(
    ("surrogate", "case"),
    [
        ("mean_field", "unknown_scale"),
        ("asvi", "bernoulli"),
        ("mean_field", "bernoulli"),
        *((s, c) for s, c in ALL if s == "full_rank" or c in ("mixture",)),
    ],
)
def test_under_xla(surrogate, case):
    """C9: the same figures when XLA compiles the sum."""
    _check(case, surrogate, F64, jit_compile=True)


@pytest.mark.parametrize(
    ("surrogate", "case", "jit_compile"),
    [
        pytest.param("mean_field", "unknown_scale", False, marks=pytest.mark.slow),
        pytest.param("mean_field", "mixture", False, marks=pytest.mark.slow),
        pytest.param("mean_field", "bernoulli", True, marks=pytest.mark.smoke),
    ],
)
def test_float32(surrogate, case, jit_compile):
    """C9: float32 to 1e-5."""
    _check(case, surrogate, F32, jit_compile=jit_compile)


def test_without_weights():
    """C2: no weight is a weight of one."""
    _check("bernoulli", "mean_field", F64, weighted=False, masked=())


def test_the_capture_of_fallbacks_can_fail():
    """C9: an operation without a vectorised form is noticed."""

    def mapped(values):
        return tf.vectorized_map(
            lambda v: tf.random.stateless_uniform([], tf.cast(tf.stack([v, v]), tf.int32)), values
        )

    with pytest.raises(AssertionError, match="while_loop"), no_fallback():
        tf.function(mapped, autograph=False)(tf.range(3))
