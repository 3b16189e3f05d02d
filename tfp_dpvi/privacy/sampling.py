"""Sampling schemes: how a release's records are drawn, and the resulting event (contract 4).

Each TensorFlow sampler has a scheme as `.scheme`, which is the only source of the accounting's
events.
"""

import abc
import dataclasses
from typing import ClassVar

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.errors import UnsupportedPairError
from tfp_dpvi.privacy.sensitivity import Json, Sensitivity

GEOMETRIC = 1.0
"""The shape of a truncated negative binomial distribution that is geometric."""

_REGISTRY: dict[str, type["SamplingScheme"]] = {}
_REPLACE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class SamplingScheme(abc.ABC):
    """Base class of sampling schemes.

    To add a scheme, define a frozen subclass with a `name` and JSON-ready fields.

    Attributes:
      name: The scheme's name in plans and reports.
      sentence: A sentence for the report, with fields in braces.
      fits_merge: Whether releases of several fits cost the same as equally many of one fit.
      relations: The neighboring relations under which `dp_event` is valid.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, PoissonSampling
    >>> FullBatch().describe()
    'full batches: every record takes part in every step'
    >>> scheme_from_json(PoissonSampling(0.01).to_json())
    PoissonSampling(probability=0.01)

    ```
    """

    name: ClassVar[str] = ""
    sentence: ClassVar[str] = ""
    fits_merge: ClassVar[bool] = True
    relations: ClassVar[tuple[NeighboringRelation, ...]] = (
        NeighboringRelation.ADD_OR_REMOVE_ONE,
        _REPLACE,
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _REGISTRY[cls.name] = cls

    @abc.abstractmethod
    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns the event of consecutive releases of a mechanism, each on its own sample.

        Args:
          mechanism: The event of one release on all records.
          num_releases: The number of releases, at least 1.
        """

    def describe(self) -> str:
        """Returns a sentence for the report."""
        return self.sentence.format(**dataclasses.asdict(self))

    def check_relation(self, relation: NeighboringRelation) -> None:
        """Raises `UnsupportedPairError` for a neighboring relation that is not in `relations`."""
        if relation not in self.relations:
            supported = " or ".join(relation.name.lower() for relation in self.relations)
            raise UnsupportedPairError(
                f"sampling={self.name!r} is not supported under {relation.name.lower()}; use "
                f"{supported}, which compile takes as neighboring_relation=."
            )

    def unit_sensitivity(self, sensitivity: Sensitivity, relation: NeighboringRelation) -> float:
        """Returns the unit of the event's noise multiplier: without subsampling A, or half of D.

        Under replace-one an event of multiplier m compares N(0, m^2) with N(2, m^2); see
        `tfp_dpvi.privacy.accountants`.

        Args:
          sensitivity: A and D, in units of the clip.
          relation: The neighboring relation.
        """
        return sensitivity.replace / 2.0 if relation is _REPLACE else sensitivity.add_or_remove

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary with the scheme's name and its fields."""
        return {"name": self.name, **dataclasses.asdict(self)}


def scheme_from_json(data: Json) -> SamplingScheme:
    """Rebuilds a scheme from `to_json`.

    Raises:
      TypeError: A field has a value of another type.
      ValueError: The name is unknown, a field is missing, unknown or out of its range, or the data
        are no JSON object.
    """
    fields = check.fields("sampling", data)
    name = fields.pop("name", None)
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(f"sampling name={name!a:.99} is unknown; known: {sorted(_REGISTRY)}.")
    needed = [field.name for field in dataclasses.fields(_REGISTRY[name])]
    return _REGISTRY[name](**check.fields("sampling", fields, needed=needed, known=needed))


def _repeated(event: DpEvent, count: int) -> DpEvent:
    return event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingScheme):
    """Each record enters each batch independently with probability q.

    Attributes:
      probability: q, the expected batch size over the number of records, in (0, 1].

    ```python
    >>> PoissonSampling(0.01).describe()[:64]
    'Poisson sampling: every record takes part in every step independ'

    ```
    """

    probability: float
    name: ClassVar[str] = "poisson"
    sentence: ClassVar[str] = (
        "Poisson sampling: every record takes part in every step independently, with probability "
        "{probability:.6g}"
    )

    def __post_init__(self) -> None:
        fix = "pass the expected batch size over the number of records, a number in (0, 1]"
        probability = check.probability("probability", self.probability, fix)
        object.__setattr__(self, "probability", probability)

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """See `SamplingScheme`. Returns `PoissonSampledDpEvent(q, mechanism)`, self-composed."""
        event = dp_accounting.PoissonSampledDpEvent(self.probability, mechanism)
        return _repeated(event, num_releases)

    def unit_sensitivity(self, sensitivity: Sensitivity, relation: NeighboringRelation) -> float:
        """See `SamplingScheme`. Returns A under both relations.

        A record and its replacement are each compared with absence, for every D.
        """
        del relation
        return sensitivity.add_or_remove


@dataclasses.dataclass(frozen=True)
class FullBatch(SamplingScheme):
    """Every record takes part in every release, without amplification.

    ```python
    >>> FullBatch().describe()
    'full batches: every record takes part in every step'

    ```
    """

    name: ClassVar[str] = "full_batch"
    sentence: ClassVar[str] = "full batches: every record takes part in every step"

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """See `SamplingScheme`. Returns the mechanism itself, self-composed."""
        return _repeated(mechanism, num_releases)


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(SamplingScheme):
    """Each batch is a uniformly random subset of fixed size, independent for every release.

    Attributes:
      num_records: The exact number of records.
      batch_size: The number of records of a batch, at most `num_records`.

    ```python
    >>> from dp_accounting import GaussianDpEvent
    >>> FixedSizeSampling(1000, 10).dp_event(GaussianDpEvent(1.0), 5).count
    5

    ```
    """

    num_records: int
    batch_size: int
    name: ClassVar[str] = "fixed_size"
    sentence: ClassVar[str] = (
        "fixed-size sampling: every step draws {batch_size:,} of the {num_records:,} records at "
        "random, without replacement"
    )
    relations: ClassVar[tuple[NeighboringRelation, ...]] = (_REPLACE,)

    def __post_init__(self) -> None:
        for name in ("num_records", "batch_size"):
            object.__setattr__(self, name, check.count(name, getattr(self, name), 1))
        if self.batch_size > self.num_records:
            raise ValueError(
                f"batch_size={self.batch_size} exceeds num_records={self.num_records}; use "
                "FullBatch()."
            )

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """See `SamplingScheme`. Returns `SampledWithoutReplacementDpEvent`, self-composed."""
        event = dp_accounting.SampledWithoutReplacementDpEvent(
            self.num_records, self.batch_size, mechanism
        )
        return _repeated(event, num_releases)


@dataclasses.dataclass(frozen=True)
class EachRecordOncePerEpoch(SamplingScheme):
    """A user's own batches in which each record occurs at most once per epoch: no amplification.

    Declaring it states that the batches of an epoch are disjoint, and that a record's batch does
    not depend on the records' values. It is supported only under replace-one: in
    `dataset.batch(B)`, adding or removing a record moves others.

    Attributes:
      steps_per_epoch: The number of steps of an epoch, at least 1.

    #### Formal guarantee

    Within an epoch of `steps_per_epoch` releases a record affects only one of them. So an epoch,
    also a partial one, costs as much as one release on all records (parallel composition), for any
    shuffling.

    ```python
    >>> from dp_accounting import GaussianDpEvent
    >>> EachRecordOncePerEpoch(10).dp_event(GaussianDpEvent(1.0), 25).count
    3

    ```
    """

    steps_per_epoch: int
    name: ClassVar[str] = "each_record_once_per_epoch"
    sentence: ClassVar[str] = (
        "the user's own batches, declared to have each record at most once per epoch of "
        "{steps_per_epoch:,} steps, in a batch that does not depend on the records' values; "
        "without amplification by sampling"
    )
    fits_merge: ClassVar[bool] = False
    relations: ClassVar[tuple[NeighboringRelation, ...]] = (_REPLACE,)

    def __post_init__(self) -> None:
        steps = check.count("steps_per_epoch", self.steps_per_epoch, 1)
        object.__setattr__(self, "steps_per_epoch", steps)

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """See `SamplingScheme`. Returns one mechanism for each full or partial epoch.

        Any record may be in one of an epoch's releases.
        """
        return _repeated(mechanism, -(-num_releases // self.steps_per_epoch))


@dataclasses.dataclass(frozen=True)
class RandomTrials(SamplingScheme):
    """The best of a random number of trials, each on all records; what others gave is not released.

    A release is the whole selection. Its mechanism is one trial with its score, for any choice of
    settings at random. The number of trials is geometric, at least 1, independent of the records,
    and not released either.

    Attributes:
      mean: The mean number of trials, at least 1.

    #### Formal guarantee

    Theorem 2 of Papernot and Steinke 2022 (arXiv:2110.03620) with eta = 1, by dp_accounting's
    `RepeatAndSelectDpEvent`, which only the accountant "rdp" prices.

    ```python
    >>> from dp_accounting import GaussianDpEvent
    >>> RandomTrials(10.0).dp_event(GaussianDpEvent(8.0), 1).mean
    10.0

    ```
    """

    mean: float
    name: ClassVar[str] = "random_trials"
    sentence: ClassVar[str] = (
        "the best of a random number of trials, geometric with mean {mean:g}, each of which reads "
        "every record; nothing of the others is released"
    )

    def __post_init__(self) -> None:
        mean = check.positive("mean", self.mean)
        if mean < 1.0:
            raise ValueError(f"mean={self.mean!r} must be at least 1: pass more trials.")
        object.__setattr__(self, "mean", mean)

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """See `SamplingScheme`. Returns `RepeatAndSelectDpEvent(mechanism, mean, 1)`."""
        selected = dp_accounting.dp_event.RepeatAndSelectDpEvent(mechanism, self.mean, GEOMETRIC)
        return _repeated(selected, num_releases)
