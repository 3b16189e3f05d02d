"""What a sampler's step costs over N, and how long calibration takes."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from harness import Runner

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.sampling import PoissonSampler

EXPECTED = 200.0


def _sampler(num: int, steps: int) -> Runner:
    sampler = PoissonSampler(num, EXPECTED / num)

    @tf.function(jit_compile=True, autograph=False)
    def loop(key: Any, steps: Any) -> Any:
        def body(step: Any, total: Any) -> Any:
            def visit(carry: Any, indices: Any, mask: Any) -> Any:
                return carry + tf.reduce_sum(tf.where(mask, indices, 0))

            return step + 1, sampler.for_each_batch(_random.fold_in(key, step), visit, total)

        start = (tf.constant(0, tf.int64), tf.constant(0, tf.int64))
        return tf.while_loop(lambda step, _: step < steps, body, start, parallel_iterations=1)[1]

    def run(wanted: int) -> float:
        begin = time.perf_counter()
        loop(tf.constant(_random.new_key()), tf.constant(wanted, tf.int64)).numpy()
        return time.perf_counter() - begin

    return Runner(run, steps)


def sampler_makers(quick: bool) -> dict[str, Callable[[], Runner]]:
    """Expected batches of 200 from N records: only indices, no data."""
    steps = 10 if quick else 20_000
    return {
        f"N = 10^{power}": lambda power=power: _sampler(10**power, steps) for power in (4, 6, 9, 12)
    }


def calibration_makers(quick: bool) -> dict[str, Callable[[], Runner]]:
    """Noise for epsilon 1 at delta 1e-5, N 48,842, batch 256, 20 epochs; beside dp_accounting's own search."""
    steps = 20 if quick else 3820
    common: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}

    def ours(wanted: int) -> float:
        begin = time.perf_counter()
        sampling = dpvi.privacy.PoissonSampling(256 / 48_842)
        dpvi.PrivacyPlan.calibrate(sampling=sampling, num_releases=steps, **common)
        return time.perf_counter() - begin

    def plain(wanted: int) -> float:
        import dp_accounting
        from dp_accounting.pld import PLDAccountant

        def event(z: float) -> Any:
            one = dp_accounting.PoissonSampledDpEvent(
                256 / 48_842, dp_accounting.GaussianDpEvent(z)
            )
            return dp_accounting.SelfComposedDpEvent(one, steps)

        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dp_accounting.calibrate_dp_mechanism(
                PLDAccountant,
                event,
                1.0,
                1e-5,
                dp_accounting.LowerEndpointAndGuess(0.3, 1.0),
                tol=1e-3,
            )
        return time.perf_counter() - begin

    return {
        "tfp_dpvi": lambda: Runner(ours, 1),
        "dp_accounting's search": lambda: Runner(plain, 1, 3),
    }
