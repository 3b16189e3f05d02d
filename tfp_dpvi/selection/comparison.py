"""`compare`: private mean log scores of fitted models, and their differences with their noise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure
from tfp_dpvi.models import DPVI
from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan
from tfp_dpvi.privacy.accountants import Releases
from tfp_dpvi.selection.scores import (
    SENSITIVITY,
    checked_range,
    clip_of,
    contributions,
    log_scores,
    noisy_sum,
    records_of,
    refuse_fixed_budget,
)

if TYPE_CHECKING:
    import pandas

# From so many standard deviations on a difference is called one.
_CLEAR = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class Comparison:
    """Released mean log scores of models, in nats per record; `print` shows them.

    Attributes:
      names: The names of the K models, the reference first.
      score: Their mean log scores, clipped to the public range, shape [K].
      difference: Those less the reference's, shape [K], 0 for the reference itself.
      noise_sd: The standard deviation of the noise on each difference; for the reference, on its
        score.
      sampling_sd: The standard error of each difference from the records, as far as released.
      num_records: The public number N of records.

    ```python
    >>> import numpy as np
    >>> zero, some = np.array([0.0, 0.1]), np.array([0.01, 0.02])
    >>> result = Comparison(("a", "b"), zero - 1.0, zero, some, some, 1000)
    >>> result.best, result.is_clear
    ('b', True)

    ```
    """

    names: tuple[str, ...]
    score: np.ndarray
    difference: np.ndarray
    noise_sd: np.ndarray
    sampling_sd: np.ndarray
    num_records: int

    @property
    def sd(self) -> np.ndarray:
        """Standard deviations of the differences, of noise and records together, shape [K]."""
        return np.hypot(self.noise_sd, self.sampling_sd)

    @property
    def best(self) -> str:
        """The model with the largest score. Choosing it costs no more: the scores are released."""
        return self.names[int(np.argmax(self.difference))]

    @property
    def is_clear(self) -> bool:
        """True if the best model is two standard deviations better than the reference.

        If it is the reference, it must be that much better than every other.
        """
        place = int(np.argmax(self.difference))
        if place:
            return bool(self.difference[place] > _CLEAR * self.sd[place])
        return bool((self.difference[1:] < -_CLEAR * self.sd[1:]).all())

    def table(self) -> pandas.DataFrame:
        """Returns a pandas DataFrame with a row for each model.

        Returns:
          "score", "difference", "noise_sd", "sampling_sd", and "better", the probability that the
          model has a larger mean score than the reference, NaN for the reference.
        """
        import pandas

        better = stats.norm.cdf(self.difference / self.sd)
        better[0] = math.nan
        columns = {
            "score": self.score,
            "difference": self.difference,
            "noise_sd": self.noise_sd,
            "sampling_sd": self.sampling_sd,
            "better": better,
        }
        return pandas.DataFrame(columns, index=list(self.names))

    def __str__(self) -> str:
        width = max(map(len, self.names))
        lines = [f"Mean log scores of {self.num_records:,} records, in nats, with their noise:"]
        for place, name in enumerate(self.names):
            lines.append(
                f"{name:<{width}}{self.score[place]:10.4f}   difference "
                f"{self.difference[place]:+.4f} +- {self.sd[place]:.4f} (noise "
                f"{self.noise_sd[place]:.4f})"
                if place
                else f"{name:<{width}}{self.score[place]:10.4f}   the reference (noise "
                f"{self.noise_sd[place]:.4f})"
            )
        verdict = f"{self.best} has the largest score."
        if not self.is_clear:
            verdict = (
                f"No model is clearly better: {self.best} has the largest score by chance or not."
            )
        return "\n".join([*lines, verdict])

    def __repr__(self) -> str:
        return str(self)


def compare(
    models: Mapping[str, DPVI],
    x: Structure,
    y: Structure | None = None,
    *,
    score_range: tuple[float, float],
    epsilon: float,
    delta: float,
    largest_difference: float | None = None,
    num_records: int | None = None,
    seed: int | None = None,
) -> Comparison:
    """Compares fitted models by mean log scores of private records, by one release.

    The models are fitted, and their fits are in one ledger, which this release is charged to.
    Choosing the best by the released scores is then free. On the records of the fits a model with d
    parameters more has a score that is about d / N nats too large: compare on other records where
    that matters.

    Args:
      models: Fitted models by name, all with the same ledger; the first is the reference.
      x: Private records, or their inputs, as for `fit`.
      y: The outcomes, or None for models of whole records.
      score_range: A public range of a record's log score, such as (-5.0, 0.0) for outcomes of few
        values; scores are clipped to it.
      epsilon: The cost of this release alone, with `delta`. The ledger composes it with others.
      delta: See `epsilon`.
      largest_difference: A public bound to which the differences of log scores from the reference's
        are clipped, in nats: a smaller one has less noise. By default that of the range.
      num_records: The public number of records; by default the exact one is taken as public.
      seed: Makes the noise repeatable, and the release *not private*.

    Returns:
      The `Comparison`.

    Raises:
      ValueError: An argument does not fit, the models have several ledgers, or the ledger has a
        budget that is for settings fixed in advance; no privacy was spent.
      BudgetExhaustedError: An adaptive budget does not allow the release; no privacy was spent.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> dpvi.compare({}, [0.0], score_range=(-5.0, 0.0), epsilon=0.1, delta=1e-5)
    Traceback (most recent call last):
    ...
    ValueError: models must be a dict of at least two fitted models, such as {"a": a, "b": b}.

    ```

    #### Formal guarantee

    One Gaussian mechanism, see `contributions` in `tfp_dpvi.selection.scores`. The models, and
    which of them are compared, may depend on earlier releases.
    """
    ledger = _ledger_of(models)
    refuse_fixed_budget(ledger, "compare")
    low, high = checked_range(score_range)
    largest = high - low
    if largest_difference is not None:
        largest = min(largest, check.positive("largest_difference", largest_difference))
    first = next(iter(models.values()))
    available = records_of(first, x, y).num
    num = available if num_records is None else check.count("num_records", num_records, 1)
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=delta,
        sampling=FullBatch(),
        num_releases=1,
        sensitivity=SENSITIVITY,
        neighboring_relation=ledger.neighboring_relation,
        num_records=num,
        purpose=f"mean log scores of {len(models)} models",
    )
    secure = "secure" if seed is None else ""
    plan = plan.replace(randomness=secure)
    # Contributions are bounded by the clip, and the plan is in units of it.
    deviation = clip_of(len(models)) * Releases(plan.dp_event).full_multiplier
    width = 2 * len(models) - 1
    key = _random.noise_key(width, None if seed is None else check.count("seed", seed))
    rows = contributions(log_scores([*models.values()], x, y), (low, high), largest)
    reservation = ledger.reserve(plan, 1, seeded=seed is not None)
    released = noisy_sum(rows, deviation, key)
    ledger.confirm(reservation)
    return _comparison(tuple(models), released, deviation, num, (low, high), largest)


def _ledger_of(models: Mapping[str, DPVI]) -> PrivacyLedger:
    """Returns the ledger that all models share, after checks of them."""
    are_models = isinstance(models, Mapping) and all(
        isinstance(model, DPVI) for model in models.values()
    )
    if not are_models or len(models) < 2:
        raise ValueError(
            'models must be a dict of at least two fitted models, such as {"a": a, "b": b}.'
        )
    for name, model in models.items():
        check.text("models", name, "use names that reveal nothing")
        if model.privacy_account.plan is None:
            raise ValueError(f"models[{name!r}] is not fitted: call fit first.")
        if model.privacy_account.plan.person is not None:
            raise ValueError(
                f"models[{name!r}] protects persons, and scores are of rows: fit rows, or leave it "
                "out."
            )
    ledgers = [model.privacy_ledger for model in models.values()]
    paths = {ledger.path for ledger in ledgers}
    if any(ledger is not ledgers[0] for ledger in ledgers) and (len(paths) > 1 or None in paths):
        raise ValueError(
            "models have their releases in different ledgers, which do not compose: pass one "
            "ledger= to compile for all of them."
        )
    return ledgers[0]


def _comparison(
    names: tuple[str, ...],
    released: np.ndarray,
    deviation: float,
    num: int,
    score_range: tuple[float, float],
    largest: float,
) -> Comparison:
    """Returns scores in nats from the noisy sum and public values."""
    low, high = score_range
    others = len(names) - 1
    half = (high - low) / 2.0
    level = float(np.clip(released[0] / num, -1.0, 1.0))
    reference = low + half * (level + 1.0)
    mean = np.clip(released[1 : 1 + others] / num, -1.0, 1.0)
    square = np.clip(released[1 + others :] / num + 1.0, 0.0, 1.0)
    # Noise may leave no variance: at least what the noise could hide.
    floor = min(deviation / num, 1.0)
    variance = np.clip(square - mean**2, floor, 1.0)
    noise = np.full(others, largest * deviation / num)
    difference = np.concatenate([[0.0], largest * mean])
    return Comparison(
        names,
        reference + difference,
        difference,
        np.concatenate([[half * deviation / num], noise]),
        np.concatenate([[0.0], largest * np.sqrt(variance / num)]),
        num,
    )
