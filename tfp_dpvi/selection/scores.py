"""Mean log scores of fitted models: bounded contributions of records, and one noisy sum of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, function_of_model, tf, without_values
from tfp_dpvi.data import Records
from tfp_dpvi.models import DPVI
from tfp_dpvi.privacy import PrivacyLedger, Sensitivity

_CHUNK = 4096

SENSITIVITY = Sensitivity(1.0, 2.0)
"""What a record's presence and replacement move the sum by, in units of `clip_of`."""


def clip_of(num_models: int) -> float:
    """Returns the bound on the l2 norm of a record's contribution.

    Args:
      num_models: The number K of models.
    """
    return math.sqrt(num_models)


def checked_range(score_range: tuple[float, float]) -> tuple[float, float]:
    """Returns the public range of log scores.

    Args:
      score_range: Its ends.

    Raises:
      ValueError: They are no two finite numbers in order.
    """
    fix = "pass public ends of a record's log score, such as (-5.0, 0.0)"
    if not isinstance(score_range, tuple | list) or len(score_range) != 2:
        raise ValueError(f"score_range={check.shown(score_range)} must be two numbers; {fix}.")
    low, high = (check.real("score_range", end, fix) for end in score_range)
    if not -math.inf < low < high < math.inf:
        raise ValueError(f"score_range=({low}, {high}) must increase and be finite; {fix}.")
    return low, high


def records_of(model: DPVI, x: Structure, y: Structure | None) -> Records:
    """Returns a model's checked records, in memory.

    Args:
      model: A compiled model.
      x: The records, or their inputs.
      y: The outcomes, or None for models of whole records.

    Raises:
      TypeError: They are no arrays.
    """
    if isinstance(x, tf.data.Dataset):
        raise TypeError("x is a dataset, whose records are not scored: pass arrays.")
    return model.make_data(x, y, batch_size=1).records


def log_scores(models: Sequence[DPVI], x: Structure, y: Structure | None) -> np.ndarray:
    """Returns the log predictive density of each record under each model, *not private*.

    Args:
      models: K fitted models.
      x: The records, or their inputs.
      y: The outcomes, or None for models of whole records.

    Returns:
      Float64 of shape [N, K]; NaN where a model has none.
    """
    columns = []
    for model in models:
        records = records_of(model, x, y)
        inputs = tf.nest.map_structure(np.asarray, records.x)
        outcomes = None if y is None else tf.nest.map_structure(np.asarray, records.y)
        scored = function_of_model(model.test_losses, reduce_retracing=True)
        parts = []
        for begin in range(0, records.num, _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            chunk, labels = (
                tf.nest.map_structure(lambda part, rows=rows: tf.constant(part[rows]), each)
                for each in (inputs, outcomes)
            )
            with without_values("Scores of records failed, and are charged"):
                parts.append(-scored(chunk, labels).numpy().astype(np.float64))
        columns.append(np.concatenate(parts))
    return np.stack(columns, axis=1)


def contributions(
    scores: np.ndarray, score_range: tuple[float, float], largest_difference: float
) -> np.ndarray:
    """Returns what each record adds to the sum: u, and for each further model d and d^2 - 1.

    Here u is the first model's clipped log score, mapped to [-1, 1], and d is the difference of
    another's from it, over the largest one and clipped to [-1, 1].

    Args:
      scores: Log scores of shape [N, K].
      score_range: The public range of log scores.
      largest_difference: That of the differences.

    Returns:
      Float64 of shape [N, 2 K - 1].

    #### Formal guarantee

    A row is a function of one record, of norm at most sqrt(K): |u| <= 1 and d^2 + (d^2 - 1)^2 <= 1.
    Two rows are at most 2 sqrt(K) apart. The row of a record with a NaN is zero.
    """
    low, high = score_range
    kept = ~np.isnan(scores).any(axis=1)
    clipped = np.clip(np.where(kept[:, None], scores, low), low, high)
    level = np.clip((clipped[:, :1] - low) / (high - low) * 2.0 - 1.0, -1.0, 1.0)
    d = np.clip((clipped[:, 1:] - clipped[:, :1]) / largest_difference, -1.0, 1.0)
    rows = np.concatenate([level, d, d * d - 1.0], axis=1)
    return np.where(kept[:, None], rows, 0.0)


def noisy_sum(rows: np.ndarray, deviation: float, key: tf.Tensor) -> np.ndarray:
    """Returns the sum of contributions with Gaussian noise on every coordinate.

    Args:
      rows: `contributions`, shape [N, m].
      deviation: The noise's standard deviation.
      key: The key of the noise, used once; see `tfp_dpvi._random`.
    """
    total = tf.constant(rows.sum(axis=0), tf.float64)
    (noisy,) = _random.add_noise(key, [total], [deviation])
    result: np.ndarray = noisy.numpy()
    return result


def refuse_fixed_budget(ledger: PrivacyLedger, call: str) -> None:
    """Raises for a ledger whose budget does not cover settings that follow from earlier results.

    Args:
      ledger: The ledger.
      call: The name of the call, for the message.

    Raises:
      ValueError: The ledger has a budget that is not adaptive.
    """
    if ledger.budget is not None and ledger.renyi_filter is None:
        raise ValueError(
            f"{call}: the ledger's budget is for settings that were fixed in advance, and what is "
            "chosen from results is not.\nUse dpvi.PrivacyLedger(budget_adaptive=True, ...)."
        )
