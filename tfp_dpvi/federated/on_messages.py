"""Privacy on messages: a hospital computes in the clear and adds noise to what it sends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.federated.factors import Factor, product
from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.messages import Task
from tfp_dpvi.federated.release import ReleaseSettings
from tfp_dpvi.federated.study import Study
from tfp_dpvi.privacy import FullBatch, PrivacyPlan, Sensitivity

# Of the signal.
_MOST_NOISE = 0.5


class MessageHospital(Hospital):
    """One hospital of a study with privacy="messages"; see `Hospital` for the arguments.

    It divides its records at random into the study's shards, refines the factor on each without
    clip or noise, clips the change of each to `message_clip`, and releases their sum with noise. It
    is refused where the noise would drown the signal.

    #### Formal guarantee

    As `Hospital`. Each record falls into a shard by a draw of its own, so that one record more or
    less leaves the others where they are and changes one clipped summand: by at most 2C, for
    presence and replacement alike (it moves the summand, it does not remove it). The noise is that
    of this message alone: what other hospitals add is not counted on.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> from tfp_dpvi.federated import Study
    >>> from tfp_dpvi.optimizers import DPKerasSGDOptimizer
    >>> silent = DPKerasSGDOptimizer(
    ...     l2_norm_clip=math.inf, noise_multiplier=0.0, learning_rate=0.1
    ... )
    >>> study = Study(
    ...     tfd.Normal(0.0, 2.0),
    ...     lambda mean: tfd.Normal(mean, 1.0),
    ...     silent,
    ...     privacy="messages",
    ...     message_clip=1.0,
    ...     num_shards=2,
    ...     num_hospitals=1000,
    ... )
    >>> x = np.zeros(20, np.float32)
    >>> kept = {"last_reply": "berlin.reply"}  # Of an earlier process, if it is there.
    >>> hospital = MessageHospital(study, x, name="berlin", epsilon=1.0, rounds=4, **kept)
    >>> hospital.rounds_left
    4

    ```
    """

    def make_release(
        self,
        settings: ReleaseSettings,
        x: Structure,
        y: Structure | None,
        num_records: int | None,
    ) -> MessageRelease:
        """See `Hospital.make_release`: here with noise on each message."""
        return MessageRelease(settings, x, y, num_records)


class MessageRelease:
    """A `LocalRelease` with noise on the message alone; see `MessageHospital`.

    Args:
      settings: The hospital's settings.
      x: Records in memory.
      y: Their outcomes; None for a likelihood of whole records.
      num_records: The public number of records; None for that of `x`.
    """

    def __init__(
        self,
        settings: ReleaseSettings,
        x: Structure,
        y: Structure | None,
        num_records: int | None,
    ) -> None:
        if settings.refiner.private:
            raise ValueError(
                "privacy='messages' goes with local steps without clip and noise: "
                "give the study an optimizer of clip math.inf and noise multiplier 0."
            )
        self._settings, self._messages = settings, 0
        self._clip = float(settings.study.message_clip or math.inf)
        refiner, num_shards = settings.refiner, settings.study.num_shards
        given = {"unit_ids": settings.unit_ids, "weights": settings.weights}
        records = refiner.data(x, y, num_records, **given).records
        self.num_records = num_records or records.num
        size = shard_size(self.num_records, num_shards)
        numbers = assign(records.num, num_shards, settings.seed)
        shards = divide(records.x, records.y, numbers, num_shards, size)
        parts = [refiner.data(shard["x"], shard["y"], size, shard["weight"]) for shard in shards]
        self.mechanism = refiner.mechanism(parts[0], settings.relation, settings.randomness)
        self.parts = [part.tensors for part in parts]
        self.draft = self._draft()

    def _draft(self) -> PrivacyPlan:
        settings, sensitivity = self._settings, Sensitivity(2.0, 2.0)
        plan = PrivacyPlan(
            FullBatch(), 1.0, settings.rounds, settings.relation, sensitivity, "pld", self._clip
        )
        # See `change`.
        secure = "secure" if settings.seed is None else ""
        return plan.replace(num_records=self.num_records, randomness=secure)

    def begin(self, plan: PrivacyPlan) -> None:
        """See `LocalRelease.begin`."""
        settings, self._deviation = self._settings, plan.deviation
        if settings.epsilon is not None:
            self._check_feasible(settings.study, settings.epsilon)
        settings.refiner.trace(self.mechanism, self.parts[0])

    def _check_feasible(self, study: Study, epsilon: float) -> None:
        prior = study.terms.prior
        num_precisions = prior.num * (prior.num + 1) // 2 if prior.full_rank else prior.num
        length = prior.num + num_precisions
        noise = self._deviation / self._clip * math.sqrt(length * study.num_hospitals)
        signal = study.num_shards * study.num_hospitals
        if noise > _MOST_NOISE * signal:
            raise ValueError(
                f"epsilon={epsilon:g}: the noise has length {noise:.3g} C, and "
                f"{study.num_shards} shards each make a signal of at most {signal} C.\n"
                "The noise may be half of that: use privacy='worker', or more shards."
            )

    def change(self, task: Task) -> Factor:
        """See `LocalRelease.change`."""
        total = self.clipped_sum(task)
        settings = self._settings
        if settings.epsilon is None:
            return total
        # Contract 10: fresh words for every message; of a seed's one key, no number comes twice.
        num = total.shift.size + total.precision.size
        key = _random.noise_key(num, settings.seed, self._messages)
        self._messages += 1
        exact = [tf.constant(part, tf.float64) for part in (total.shift, total.precision)]
        noisy = _random.add_noise(key, exact, [self._deviation] * 2)
        shift, precision = (part.numpy() for part in noisy)
        if total.full_rank:
            # The upper half is what is released: no longer than the matrix, and noisy as a whole.
            precision = np.triu(precision) + np.triu(precision, 1).T
        return Factor(shift, precision)

    def clipped_sum(self, task: Task) -> Factor:
        """Returns the sum over shards of clipped changes, which is not private.

        Each is one against the posterior without that shard's share of the factor.
        """
        settings = self._settings
        cavity = task.posterior / (task.posterior / task.cavity) ** (1.0 / len(self.parts))
        changes = [
            settings.refiner.refine(
                task.posterior, cavity, self.mechanism, part, settings.seed, task.number
            )
            for part in self.parts
        ]
        shares = [min(1.0, self._clip / max(change.norm, 1e-300)) for change in changes]
        return product([change**share for change, share in zip(changes, shares, strict=True)])


def assign(num: int, num_shards: int, seed: int | None = None) -> np.ndarray:
    """Returns a shard for each record, by independent draws.

    In a division into equal parts one record would move others. Shards are equally likely up to
    2^-64 times their number.

    Args:
      num: Number of records n.
      num_shards: Number of shards.
      seed: Makes draws repeatable; by default they are the operating system's.

    Returns:
      Numbers of shards from 0, integers of shape [n].
    """
    if seed is not None:
        return np.random.default_rng(seed).integers(num_shards, size=num)
    words = np.frombuffer(_random.entropy(8 * num), np.uint64)
    return (words % np.uint64(num_shards)).astype(int)


def divide(
    x: Structure, y: Structure | None, shards: np.ndarray, num_shards: int, size: int
) -> list[dict[str, Any]]:
    """Divides records, padded to a public size with records of weight 0.

    Records beyond that size are left out: at the size of `shard_size`, one in 1e14 (more, if fewer
    records are declared).

    Args:
      x: Arrays of n records.
      y: Their outcomes, if any.
      shards: The shard of each record, integers of shape [n]; others than 0 to `num_shards` - 1
        leave a record out.
      num_shards: Number of shards.
      size: Number of rows of each shard.

    Returns:
      "x", "y" and "weight" of each shard.
    """
    parts = []
    for number in range(num_shards):
        rows = np.flatnonzero(shards == number)[:size]
        padded = np.concatenate([rows, np.zeros(size - len(rows), int)])
        weight = (np.arange(size) < len(rows)).astype(np.float32)
        parts.append({"x": _take(x, padded), "y": _take(y, padded), "weight": weight})
    return parts


def _take(records: Structure | None, rows: np.ndarray) -> Structure | None:
    """Returns these rows of a structure of arrays."""
    return tf.nest.map_structure(
        lambda part: None if part is None else np.asarray(part)[rows], records
    )


def shard_size(num_records: int, num_shards: int) -> int:
    """Returns a number of records that a shard hardly ever exceeds, from public numbers alone.

    Args:
      num_records: The public number of records.
      num_shards: Number of shards.
    """
    mean = num_records / num_shards
    return min(num_records, math.ceil(mean + 8.0 * math.sqrt(mean) + 8.0))
