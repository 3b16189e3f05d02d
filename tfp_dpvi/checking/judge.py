"""From the noisy sums to tests and words: post-processing of the release."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.polynomial import legendre
from scipy import stats

from tfp_dpvi.checking.declared import (
    CONFIDENCE,
    CONFIDENCE_WEIGHT,
    COUNT_WEIGHT,
    NUM_PIT,
    PROBABILITIES,
    SCORE_WEIGHT,
    Bins,
    CheckedOutcome,
    Declared,
)
from tfp_dpvi.checking.result import CheckTest, MeanScore, PrivateChecks, Profile

# Smooth contrasts of the histogram: location, spread, skewness, tails.
_ORDERS = 4
# Beyond it the fit's noise hides all but gross faults.
_MUCH_NOISE = 4.0
# Probabilities near 0 less those near 1.
_ENDS = np.array([1.0, 1.0, 0.0, 0.0, -1.0, -1.0])
# A contrast counts as the reason of a test that failed from so many deviations on.
_CLEAR = 2.0


@dataclasses.dataclass(frozen=True)
class Judged:
    """A test before the levels of all are shared out.

    Attributes:
      name: What is tested.
      p_value: Its p-value.
      words: What it would say.
      profile: The released values behind it.
    """

    name: str
    p_value: float
    words: str
    profile: Profile


def judge(
    declared: Declared,
    released: np.ndarray,
    *,
    deviation: float,
    factor: float,
    num_records: int,
    epsilon: float,
    delta: float,
    notes: Sequence[str] = (),
) -> PrivateChecks:
    """Returns the checks from the noisy sums.

    Args:
      declared: What was checked.
      released: The noisy sums, shape [k].
      deviation: The standard deviation of their noise.
      factor: See `variance_factor`.
      num_records: The public number of records.
      epsilon: What the release cost by itself.
      delta: Its delta.
      notes: Sentences on what limits the tests.
    """
    sums = iter(_split(declared, released))
    outcome = declared.outcome
    if outcome.is_binary:
        found = [_reliability(next(sums), next(sums), next(sums), deviation, factor)]
    else:
        found = [_histogram(next(sums), num_records, deviation, factor, outcome)]
    for name, bins in declared.columns.items():
        found.append(_residuals(name, bins, next(sums), next(sums), deviation, factor))
    low, high = declared.score_range
    half = (high - low) / 2.0 / (SCORE_WEIGHT * num_records)
    score = MeanScore((low + high) / 2.0 + half * float(next(sums)[0]), half * deviation, low, high)
    if factor > _MUCH_NOISE:
        notes = [
            *notes,
            "noise or prior moved the estimate so far that only gross faults can be told from it: "
            "take a larger epsilon for the fit",
        ]
    return PrivateChecks(
        tests=tuple(_holm(found, declared.level)),
        profiles=tuple(each.profile for each in found),
        score=score,
        level=declared.level,
        epsilon=epsilon,
        delta=delta,
        num_records=num_records,
        variance_factor=factor,
        notes=tuple(notes),
    )


def _split(declared: Declared, released: np.ndarray) -> Iterator[np.ndarray]:
    first = 0
    for block in declared.blocks:
        yield released[first : first + len(block.matrix)]
        first += len(block.matrix)


def _holm(found: Sequence[Judged], level: float) -> list[CheckTest]:
    """Returns the tests with p-values for all of them together (Holm 1979)."""
    order = np.argsort([each.p_value for each in found], kind="stable")
    adjusted = np.empty(len(found))
    largest = 0.0
    for rank, place in enumerate(order):
        largest = max(largest, min(1.0, (len(found) - rank) * found[place].p_value))
        adjusted[place] = largest
    return [
        CheckTest(each.name, each.p_value, float(p), bool(p <= level), each.words)
        for each, p in zip(found, adjusted, strict=True)
    ]


# ------------------------------------------------------------------ PIT values


def _histogram(
    sums: np.ndarray, num_records: int, deviation: float, factor: float, outcome: CheckedOutcome
) -> Judged:
    """Returns Neyman's smooth test of the PIT histogram, with noise."""
    expected = num_records / NUM_PIT
    # What noise added along the sum of all bins says nothing.
    sums = sums - sums.mean()
    variance = factor * expected + deviation**2
    z = smooth_contrasts(NUM_PIT) @ sums / np.sqrt(variance)
    p_value = float(stats.chi2.sf(z @ z, len(z)))
    edges = np.arange(NUM_PIT + 1) / NUM_PIT
    labels = [f"{low:.1f}-{high:.1f}" for low, high in itertools.pairwise(edges)]
    spread = np.full(NUM_PIT, np.sqrt(variance * (1.0 - 1.0 / NUM_PIT)) / expected)
    profile = Profile("PIT", labels, sums / expected, spread)
    return Judged("PIT values", p_value, _words_of_histogram(z, outcome), profile)


def smooth_contrasts(num: int) -> np.ndarray:
    """Returns orthonormal contrasts of bins, of order 1 to 4: location, spread, skewness, tails.

    Args:
      num: The number of bins.

    Returns:
      Shape [4, num]; each is positive at the last bin.
    """
    middles = (np.arange(num) + 0.5) / num * 2.0 - 1.0
    basis = np.linalg.qr(legendre.legvander(middles, _ORDERS))[0][:, 1:].T
    contrasts: np.ndarray = basis * np.sign(basis[:, -1:])
    return contrasts


def _words_of_histogram(z: np.ndarray, outcome: CheckedOutcome) -> str:
    location, spread = z[:2]
    skewness, tails = z[2:]
    largest = int(np.argmax(np.abs(z)))
    what = "counts" if outcome.is_count else "outcomes"
    if tails > _CLEAR and (largest == 3 or spread < 0.0):
        return f"the tails of {what} are heavier than the model says: {_better(outcome)}"
    if spread > _CLEAR and spread >= np.abs(z[2:]).max():
        return f"{what} vary more than the model says: {_better(outcome)}"
    if spread < -_CLEAR and largest == 1:
        return f"{what} vary less than the model says: a family with less spread, or other terms"
    if largest == 2:
        side = "right" if skewness < 0.0 else "left"
        better = "try another family" if outcome.is_discrete else "model the logarithm"
        return f"{what} are more skewed to the {side} than the model says: {better}"
    if largest == 0:
        side = "higher" if location > 0.0 else "lower"
        return f"{what} are {side} than the model says: the fit has not settled, or add terms"
    return f"{what} have another shape than the model says: try another family, or more terms"


# What helps counts of a distribution, by what its name has, in this order.
_OF_COUNTS = {
    "NegativeBinomial": "add terms, or model zeros apart",
    "BetaBinomial": "add terms",
    "Binomial": "try beta-binomial",
}


def _better(outcome: CheckedOutcome) -> str:
    """Returns what allows for more spread or heavier tails, and is not the model's own family."""
    if outcome.is_count:
        better = [words for family, words in _OF_COUNTS.items() if family in outcome.name]
        return better[0] if better else "try negative binomial"
    if outcome.is_discrete or "StudentT" in outcome.name:
        return "add terms"
    return "try StudentT, or a scale that depends on x"


# ------------------------------------------------------------------ residuals by bins


def _residuals(
    name: str,
    bins: Bins,
    sums: np.ndarray,
    variances: np.ndarray,
    deviation: float,
    factor: float,
) -> Judged:
    """Returns the test of residuals by bins of a column."""
    # Three times the variance of the residuals in each bin, as the model says it.
    triple = np.maximum(variances / COUNT_WEIGHT, 1.0)
    variance = factor * triple / 3.0 + deviation**2
    z = sums / np.sqrt(variance)
    p_value = float(stats.chi2.sf(z @ z, len(z)))
    profile = Profile(name, bins.labels, sums / triple, np.sqrt(variance) / triple)
    return Judged(f"residuals by {name}", p_value, _words_of_residuals(name, bins, z), profile)


def _words_of_residuals(name: str, bins: Bins, z: np.ndarray) -> str:
    largest = int(np.argmax(np.abs(z)))
    side = "higher" if z[largest] > 0.0 else "lower"
    start = f"outcomes with {name} {bins.labels[largest]} are {side} than the model says"
    if not bins.ordered or len(z) < 3:
        return f"{start}: add {name} to the model, or an interaction"
    middles = np.linspace(-1.0, 1.0, len(z))
    basis = np.linalg.qr(np.vander(middles, 3, increasing=True))[0]
    level, slope = np.abs(basis.T @ z)[:2]
    if np.abs(basis[:, 2] @ z) > max(level, slope):
        return f"{start}, and the effect of {name} is bent: add its square or a spline"
    if slope > level:
        return f"{start}, with a trend: add {name} to the model, or an interaction"
    return f"{start}: add terms of {name}, such as a spline or an interaction"


# ------------------------------------------------------------------ reliability


def _reliability(
    sums: np.ndarray,
    counts: np.ndarray,
    variances: np.ndarray,
    deviation: float,
    factor: float,
) -> Judged:
    """Returns the test of the reliability curve: of wrong confidence, and of all bins."""
    size = len(CONFIDENCE)
    # The confidence contrast is released with less noise, which is undone here.
    weight = CONFIDENCE_WEIGHT
    residuals = sums - (1.0 - 1.0 / weight) * CONFIDENCE * (CONFIDENCE @ sums)
    noise = deviation**2 * (np.eye(size) - (1.0 - weight**-2.0) * np.outer(CONFIDENCE, CONFIDENCE))
    number = np.maximum(counts / COUNT_WEIGHT, 1.0)
    # Outcomes are 0 or 1: a bin's probabilities bound their variance too.
    most = number * _largest_variance()
    of_records = np.clip(variances / COUNT_WEIGHT / 3.0, 1.0 / 3.0, np.maximum(most, 1.0))
    variance = noise + factor * np.diag(of_records)
    confidence = float(CONFIDENCE @ residuals / np.sqrt(CONFIDENCE @ variance @ CONFIDENCE))
    whole = float(residuals @ np.linalg.solve(variance, residuals))
    p_values = stats.chi2.sf(whole, size), 2.0 * stats.norm.sf(abs(confidence))
    p_value = min(1.0, 2.0 * float(min(p_values)))
    edges = [0.0, *PROBABILITIES, 1.0]
    labels = [f"{low:g} to {high:g}" for low, high in itertools.pairwise(edges)]
    spread = np.sqrt(np.diag(variance))
    profile = Profile("reliability", labels, residuals / number, spread / number)
    z = residuals / spread
    # The contrast with less noise, if it explains the deviation, says more than the ends alone.
    ends = confidence
    if p_values[0] < p_values[1]:
        ends = float(_ENDS @ residuals / np.sqrt(_ENDS @ variance @ _ENDS))
    return Judged("reliability", p_value, _words_of_reliability(ends, z, labels), profile)


def _largest_variance() -> np.ndarray:
    """Returns the largest variance of an outcome of 0 or 1 in each bin of probabilities."""
    edges = np.array([0.0, *PROBABILITIES, 1.0])
    nearest = np.clip(0.5, edges[:-1], edges[1:])
    variance: np.ndarray = nearest * (1.0 - nearest)
    return variance


def _words_of_reliability(ends: float, z: np.ndarray, labels: Sequence[str]) -> str:
    if ends > _CLEAR:
        return (
            "predicted probabilities are too near to 0 and 1: outcomes may be mislabelled, or "
            "effects level off; add terms, or ask how labels were made"
        )
    if ends < -_CLEAR:
        return "predicted probabilities are too near to a half: add terms, such as interactions"
    largest = int(np.argmax(np.abs(z)))
    side = "more" if z[largest] > 0.0 else "less"
    return (
        f"outcomes are 1 {side} often than predicted where their probability is {labels[largest]}: "
        "add terms, or a spline"
    )
