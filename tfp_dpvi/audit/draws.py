"""`randomness`: whether a step's noise and its samples are distributed as its plan states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
from scipy import stats

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure
from tfp_dpvi.audit.observed import ObservedStep, Setting
from tfp_dpvi.models import DPModel
from tfp_dpvi.privacy import FullBatch, PoissonSampling, SamplingScheme

# Values of the noise that are kept for the tests.
_MOST_VALUES = 2**21
# Values that are sorted for the test of their law.
_MOST_SORTED = 100_000
# Multiples of the grid up to which float32 is exact.
_EXACT = 2.0**22
# Pairs from which a sum of products is normal in the far tails.
_FEWEST_PAIRS = 5000
# Units in the last place by which a division may be off.
_ULPS = 2


@dataclasses.dataclass(frozen=True)
class Randomness:
    """The result of `randomness`.

    Attributes:
      p_values: The p-value of each test by its name.
      off_grid: The share of released values that are no multiples of their noise's grid.
      false_alarm: The probability with which correct code fails.
      num_steps: The number of steps of each of the two runs.

    ```python
    >>> result = Randomness((("sampling rate", 1e-9),), 0.0, false_alarm=1e-6, num_steps=1000)
    >>> result.holds, result.failures
    (False, ('sampling rate',))

    ```
    """

    p_values: tuple[tuple[str, float], ...]
    off_grid: float
    false_alarm: float
    num_steps: int

    @property
    def failures(self) -> tuple[str, ...]:
        """The tests that fail."""
        least = self.false_alarm / len(self.p_values)
        failed = [name for name, p_value in self.p_values if not p_value >= least]
        if self.off_grid > 0.0:
            failed.append("grid of released values")
        return tuple(failed)

    @property
    def holds(self) -> bool:
        """True if no test fails."""
        return not self.failures

    def __str__(self) -> str:
        """Returns the result as plain text."""
        verdict = "as stated" if self.holds else "NOT as stated"
        lines = [
            f"Noise and samples of 2 x {self.num_steps} steps are {verdict} "
            f"(false alarms: {self.false_alarm:g}):"
        ]
        for name, p_value in self.p_values:
            mark = "  FAILS" if name in self.failures else ""
            lines.append(f"  {name}: p = {p_value:.3g}{mark}")
        mark = "  FAILS" if self.off_grid > 0.0 else ""
        lines.append(f"  released values off their grid: {100 * self.off_grid:.3g} %{mark}")
        return "\n".join(lines)


def randomness(
    model: DPModel,
    x: Structure,
    y: Structure | None = None,
    sample_weight: np.ndarray | None = None,
    *,
    num_steps: int = 1000,
    false_alarm: float = 1e-6,
    seed: int | None = None,
    **settings: Setting,
) -> Randomness:
    """Tests the noise and the samples of the model's own step against its plan.

    The step runs with noise and, with the same keys, without it. The difference must be Gaussian
    noise of the stated standard deviation in every released value, independent between values,
    steps and runs, and released sums must lie on the grid of their noise. The records that each
    step visits must be those of the stated sampling: as many, at the stated rate, anew in every
    step. Variables and ledger do not change.

    Args:
      model: A compiled model, fitted or not.
      x: Simulated or public records as for `fit`; 30 are enough.
      y: Their outcomes, likewise.
      sample_weight: Their weights, likewise.
      num_steps: The number of steps in each of two runs, which have keys of their own.
      false_alarm: The probability with which correct code fails, divided among the tests.
      seed: The seed of the keys; None for fresh ones.
      **settings: Arguments of `model.make_data`: `batch_size`, `num_records`, `sampling`.

    Returns:
      The p-values, with `holds` and a plain-text form.
    """
    check.count("num_steps", num_steps, 100)
    false_alarm = check.delta(false_alarm)
    step = ObservedStep(model, x, y, sample_weight, num_steps=num_steps, **settings)
    columns = _columns(step, num_steps)
    runs = []
    visits = []
    off_grid = []
    for number in range(2):
        key = _random.new_key(None if seed is None else seed + number)
        noisy_blocks = step.values(key, num_steps)
        exact_blocks = step.values(key, num_steps, noise=0.0)
        noise = []
        for (noisy, visited), (exact, _) in zip(noisy_blocks, exact_blocks, strict=True):
            noise.append((noisy - exact)[:, columns] / step.noise)
            visits.append(visited)
            off_grid.append(_off_grid(step, noisy))
        runs.append(np.concatenate(noise))
    tests = [*_noise_tests(step, runs, columns), *_sampling_tests(step, np.concatenate(visits))]
    return Randomness(tuple(tests), float(np.mean(off_grid)), false_alarm, num_steps)


def _columns(step: ObservedStep, num_steps: int) -> np.ndarray:
    """Returns the released values to keep: all, or the first and the last of them.

    Joint releases come last.
    """
    size = len(step.units)
    most = max(2, _MOST_VALUES // num_steps)
    if size <= most:
        return np.arange(size)
    return np.concatenate([np.arange(most // 2), np.arange(size - most // 2, size)])


# ---------------------------------------------------------------------- noise


def _noise_tests(
    step: ObservedStep, runs: list[np.ndarray], columns: np.ndarray
) -> Iterator[tuple[str, float]]:
    """Yields tests of noise in units of its stated deviation."""
    both = np.concatenate(runs)
    for part in step.parts:
        own = both[:, (columns >= part.columns.start) & (columns < part.columns.stop)]
        yield f"deviation of the noise of {part.name}", _squares_p_value(own)
    values = both.ravel()
    some = values[:: max(1, len(values) // _MOST_SORTED)]
    yield "Gaussian noise", float(stats.kstest(some, "norm").pvalue)
    for lag in (1, 2, 3):
        later = np.concatenate([run[lag:] for run in runs])
        earlier = np.concatenate([run[:-lag] for run in runs])
        yield f"noise of steps {lag} apart", _correlation_p_value(later, earlier)
    yield "noise of two runs", _correlation_p_value(*runs)
    yield "noise of consecutive steps, shifted", _shifts_p_value(runs)
    if both.shape[1] > 1:
        yield "noise of neighbouring values", _correlation_p_value(both[:, 1:], both[:, :-1])
        common = both.sum(axis=1) / math.sqrt(both.shape[1])
        yield "noise common to all values", _squares_p_value(common)


def _squares_p_value(values: np.ndarray) -> float:
    """Returns the p-value of independent standard normals by their sum of squares."""
    law = stats.chi2(values.size)
    total = float(np.sum(np.square(values)))
    return min(1.0, 2.0 * min(float(law.sf(total)), float(law.cdf(total))))


def _correlation_p_value(a: np.ndarray, b: np.ndarray) -> float:
    """Returns the p-value of no correlation between two samples of mean zero.

    It is 0 if either sample is constant zero.
    """
    a = a.ravel()
    b = b.ravel()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return _score_p_value(float(a @ b) / size * math.sqrt(a.size)) if size > 0.0 else 0.0


def _shifts_p_value(runs: list[np.ndarray]) -> float:
    """Returns the p-value of no correlation between a step's values and the next step's elsewhere.

    Streams that overlap show the same noise again, some places further. It is that of the largest
    score over all shifts that have enough pairs for a normal law, times their number.
    """
    width = runs[0].shape[1]
    size = 2 * width
    products = np.zeros(size // 2 + 1, complex)
    for run in runs:
        spectra = np.fft.rfft(run, size, axis=1)
        products += np.sum(np.conj(spectra[:-1]) * spectra[1:], axis=0)
    sums = np.fft.irfft(products, size)
    shifts = np.concatenate([np.arange(width), np.arange(-width, 0)])
    num_pairs = (width - np.abs(shifts)) * sum(len(run) - 1 for run in runs)
    enough = num_pairs >= _FEWEST_PAIRS
    if not enough.any():
        return 1.0
    scores = sums[enough] / np.sqrt(num_pairs[enough])
    return min(1.0, _score_p_value(float(np.max(np.abs(scores)))) * int(enough.sum()))


def _score_p_value(score: float) -> float:
    """Returns the two-sided p-value of a standard normal."""
    return float(2.0 * stats.norm.sf(abs(score)))


def _off_grid(step: ObservedStep, values: np.ndarray) -> float:
    """Returns the share of released values that are no multiple of the grid, up to rounding."""
    batch = step.mechanism.expected_batch_size
    grid = np.array([_random.noise_grid(step.noise * unit) for unit in step.units])
    multiples = np.round(values * step.units / grid)
    released = (values * step.units / batch).astype(step.dtype)
    nearest = (multiples * grid).astype(step.dtype) / np.asarray(batch, step.dtype)
    off = np.abs(released - nearest) > _ULPS * np.spacing(np.abs(nearest))
    return float(np.mean(off & (np.abs(multiples) < _EXACT)))


# ---------------------------------------------------------------------- samples


def _sampling_tests(step: ObservedStep, visits: np.ndarray) -> Iterator[tuple[str, float]]:
    """Yields tests of how often each record was visited in each step, [K, N]."""
    yield "no record twice in a step", float(visits.max() <= 1)
    scheme = step.mechanism.sampler.scheme
    sizes = visits.sum(axis=1)
    steps, num = visits.shape
    if isinstance(scheme, FullBatch):
        yield "every record in every step", float(np.all(visits == 1))
        return
    rate = step.mechanism.expected_batch_size / step.mechanism.num_records
    counts = visits.sum(axis=0)
    if isinstance(scheme, PoissonSampling):
        total = int(visits.sum())
        yield "sampling rate", float(stats.binomtest(total, visits.size, rate).pvalue)
        yield "batch sizes", _dispersion_p_value(sizes, num, rate)
        yield "rate of each record", _dispersion_p_value(counts, steps, rate)
    else:
        yield "batch sizes", float(np.all(sizes == round(num * rate)))
        # Counts of a fixed total vary as those of one record fewer.
        yield "rate of each record", _dispersion_p_value(counts, steps, rate, free=num - 1)
    yield "samples of consecutive steps", _overlap_p_value(visits, rate, _variance(scheme, rate))


def _variance(scheme: SamplingScheme, rate: float) -> float:
    """Returns the variance of whether a record is in two consecutive steps.

    Half of its covariances with the neighbouring pairs of steps are included.
    """
    if isinstance(scheme, PoissonSampling):
        return rate**2 - rate**4 + 2.0 * (rate**3 - rate**4)
    return (rate * (1.0 - rate)) ** 2


def _overlap_p_value(visits: np.ndarray, rate: float, variance: float) -> float:
    """Returns the p-value of the number of visits of a record in two consecutive steps.

    It is that of the wider of two laws: if such visits are rare, their number is not normal.
    """
    together = float(np.sum(visits[1:] * visits[:-1]))
    num_pairs = visits[1:].size
    mean = num_pairs * rate**2
    normal = _score_p_value((together - mean) / math.sqrt(num_pairs * variance))
    law = stats.poisson(mean)
    rare = min(1.0, 2.0 * min(float(law.cdf(together)), float(law.sf(together - 1))))
    return max(normal, rare)


def _dispersion_p_value(
    counts: np.ndarray, trials: int, rate: float, free: int | None = None
) -> float:
    """Returns the p-value of binomial counts by their squared deviations.

    The law of these is close to a gamma law of mean `free` and variance `free * each`.
    """
    variance = trials * rate * (1.0 - rate)
    free = len(counts) if free is None else free
    total = float(np.sum((counts - trials * rate) ** 2)) / variance * free / len(counts)
    each = 2.0 + (1.0 - 6.0 * rate * (1.0 - rate)) / variance
    law = stats.gamma(free / each, scale=each)
    return min(1.0, 2.0 * min(float(law.sf(total)), float(law.cdf(total))))
