"""One Gaussian release of all checks: bounded contributions, their plan, their noise."""

from __future__ import annotations

import dataclasses

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.checking.blocks import on_grid
from tfp_dpvi.checking.declared import PROBABILITIES, Declared
from tfp_dpvi.checking.outcomes import Predictor, RecordScores
from tfp_dpvi.data import Units
from tfp_dpvi.privacy import PersonUnit, PrivacyPlan, Sensitivity
from tfp_dpvi.privacy.plan import plan_counts

# Numbers of the random keys of a seeded check; the noise has a key of its own.
_NOISE = 1


@dataclasses.dataclass(frozen=True, eq=False)
class Subjects:
    """The private records of a check, row by row.

    Attributes:
      x: Inputs of N rows, arrays.
      y: Their outcomes, shape [N].
      units: Whose rows these are, if a person is the unit of privacy; else None.
    """

    x: Structure
    y: np.ndarray
    units: Units | None = None

    @property
    def num(self) -> int:
        """The number of records, or of persons."""
        return len(self.y) if self.units is None else len(self.units.places)

    @property
    def person(self) -> PersonUnit | None:
        """The public facts of a person, or None."""
        return None if self.units is None else self.units.person


def contributions(
    predictor: Predictor,
    draws: Structure,
    declared: Declared,
    subjects: Subjects,
    key: np.ndarray,
) -> np.ndarray:
    """Returns what each record, or person, adds to the release: exact, hence *not private*.

    Args:
      predictor: Of the model.
      draws: Draws from the posterior of the fit, of `draws_of`.
      declared: What is checked.
      subjects: The records.
      key: Determines all random numbers, int64 [2].

    Returns:
      Float64 of shape [n, numbers of the release].

    #### Formal guarantee

    A row's norm is at most `declared.sensitivity.add_or_remove`, and two rows differ by at most
    `.replace`, whatever the records hold. It depends on its own record and on random numbers that
    are independent of the records. A person's row is the mean of those of the person's rows, whose
    bounds it keeps.
    """
    scores = predictor(draws, subjects.x, np.asarray(subjects.y), key)
    parts = _parts(declared, scores)
    rows = np.concatenate(
        [
            block.contribution(codes, np.where(scores.usable, values, 0.0))
            for block, (codes, values) in zip(declared.blocks, parts, strict=True)
        ],
        axis=1,
    )
    if subjects.units is not None:
        places, mask = subjects.units.places, subjects.units.mask
        shares = mask / mask.sum(axis=1, keepdims=True)
        rows = np.einsum("nm,nmk->nk", shares, rows[places])
    return on_grid(rows)


def _parts(declared: Declared, scores: RecordScores) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns bins and values of the rows in each block."""
    ones = np.ones(len(scores.pit))
    if declared.outcome.is_binary:
        codes = np.searchsorted(PROBABILITIES, scores.probability, side="right")
        parts = [(codes, scores.residual), (codes, ones), (codes, scores.variance)]
    else:
        num = len(declared.blocks[0].matrix)
        parts = [(np.floor(scores.pit * num).astype(np.int64), ones)]
    for bins in declared.columns.values():
        parts += [(bins.codes, scores.residual), (bins.codes, scores.variance)]
    low, high = declared.score_range
    middle, half = (low + high) / 2.0, (high - low) / 2.0
    log_score = (np.clip(scores.log_score, low, high) - middle) / half
    return [*parts, (np.zeros(len(ones), np.int64), log_score)]


@dataclasses.dataclass(frozen=True)
class Release:
    """The plan of a release of checks, and its noise.

    Attributes:
      plan: The plan, for the ledger.
      seed: Makes the release repeatable and hence *not private*; else None.
    """

    plan: PrivacyPlan
    seed: int | None = None

    @classmethod
    def calibrated(
        cls,
        declared: Declared,
        *,
        epsilon: float,
        delta: float,
        num_records: int,
        relation: NeighboringRelation,
        accountant: str = "pld",
        person: PersonUnit | None = None,
        seed: int | None = None,
    ) -> Release:
        """Returns the release whose own cost is (epsilon, delta).

        Args:
          declared: What is checked.
          epsilon: Its cost alone.
          delta: Its delta.
          num_records: The public number of records, or of persons.
          relation: What neighbouring data sets differ in.
          accountant: "pld" or "rdp".
          person: What is public about a person, or None.
          seed: See `Release`.

        #### Formal guarantee

        The sum over all records gets Gaussian noise of the plan's `deviation` on every number: one
        release of a sum of full batch, of the sensitivity that `declared` states.
        """
        stated = declared.sensitivity
        (plan,) = plan_counts(
            [(declared.purpose, stated.add_or_remove, 1.0)],
            noise=1.0,
            neighboring_relation=relation,
            accountant=accountant,
            num_records=num_records,
        )
        plan = plan.replace(
            # Not that of counts, which add no negative numbers.
            sensitivity=Sensitivity(1.0, stated.replace / stated.add_or_remove),
            randomness="secure" if seed is None else "",
            person=person,
        )
        plan = plan.calibrated(epsilon, delta)
        return cls(plan, seed)

    def noisy_sum(self, rows: np.ndarray) -> np.ndarray:
        """Returns the noisy sum of contributions, float64 [k]. The ledger is charged before.

        Args:
          rows: What records add, of `contributions`.
        """
        key = _random.noise_key(rows.shape[1], self.seed, _NOISE)
        total = tf.constant(rows.sum(axis=0), tf.float64)
        (noisy,) = _random.add_noise(key, [total], [self.plan.deviation])
        released: np.ndarray = noisy.numpy()
        return released
