"""Sampling schemes: how the records behind a release were drawn, and the event that follows from it (contract C4).

The TensorFlow samplers return one of these from `.scheme`; the accounting prices nothing that does not come from here.
"""

import abc
import dataclasses
from typing import ClassVar

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.errors import UnsupportedPairError
from tfp_dpvi.privacy.sensitivity import Json, Sensitivity

_REGISTRY: dict[str, type["SamplingScheme"]] = {}
_REPLACE = NeighboringRelation.REPLACE_ONE


@dataclasses.dataclass(frozen=True)
class SamplingScheme(abc.ABC):
    """The way the records behind releases are drawn. To add one, subclass with a `name`: frozen, with JSON-ready fields."""

    name: ClassVar[str] = ""
    #: For the report, with the fields in braces.
    sentence: ClassVar[str] = ""
    #: Whether releases of several fits cost the same as as many releases of one fit.
    fits_merge: ClassVar[bool] = True
    #: The adjacencies under which `dp_event` says what a release costs.
    relations: ClassVar[tuple[NeighboringRelation, ...]] = (NeighboringRelation.ADD_OR_REMOVE_ONE, _REPLACE)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _REGISTRY[cls.name] = cls

    @abc.abstractmethod
    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns the event of `num_releases` (at least 1) consecutive releases of `mechanism`, each on its own sample."""

    def describe(self) -> str:
        """Returns one sentence for a person who is not a programmer."""
        return self.sentence.format(**dataclasses.asdict(self))

    def check_relation(self, relation: NeighboringRelation) -> None:
        """Refuses an adjacency that is not among `relations` with an `UnsupportedPairError`."""
        if relation not in self.relations:
            raise UnsupportedPairError(
                f"sampling={self.name!r} has no price under {relation.name.lower()}; use "
                f"{' or '.join(r.name.lower() for r in self.relations)}, which compile takes as neighboring_relation=."
            )

    def unit_sensitivity(self, sensitivity: Sensitivity, relation: NeighboringRelation) -> float:
        """Returns what the noise multiplier of the event is measured against: without subsampling A, or half of D.

        Under replace-one an event of multiplier m compares N(0, m^2) with N(2, m^2); see `accountants`.
        """
        return sensitivity.replace / 2.0 if relation is _REPLACE else sensitivity.add_or_remove

    def to_json(self) -> Json:
        """Returns a JSON-ready dictionary with the scheme's name and its fields."""
        return {"name": self.name, **dataclasses.asdict(self)}


def scheme_from_json(data: Json) -> SamplingScheme:
    """Rebuilds a scheme from `to_json`; raises `ValueError` for a name that this version does not know."""
    fields = dict(data)
    name = fields.pop("name", None)
    if name not in _REGISTRY:
        raise ValueError(f"sampling name={name!r} is unknown; known: {sorted(_REGISTRY)}.")
    return _REGISTRY[str(name)](**fields)


def _repeated(event: DpEvent, count: int) -> DpEvent:
    return event if count == 1 else dp_accounting.SelfComposedDpEvent(event, count)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingScheme):
    """Each record enters each batch independently with probability q, expected batch size over `num_records`, in (0, 1]."""

    probability: float
    name: ClassVar[str] = "poisson"
    sentence: ClassVar[str] = (
        "Poisson sampling: every record takes part in every step independently, with probability {probability:.6g}"
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "probability", check.probability("probability", self.probability))

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns `PoissonSampledDpEvent(q, mechanism)`, self-composed."""
        return _repeated(dp_accounting.PoissonSampledDpEvent(self.probability, mechanism), num_releases)

    def unit_sensitivity(self, sensitivity: Sensitivity, relation: NeighboringRelation) -> float:
        """Returns A under both adjacencies: a record and its replacement both matter against absence, whatever D is."""
        del relation
        return sensitivity.add_or_remove


@dataclasses.dataclass(frozen=True)
class FullBatch(SamplingScheme):
    """Every record takes part in every release; nothing is amplified."""

    name: ClassVar[str] = "full_batch"
    sentence: ClassVar[str] = "full batches: every record takes part in every step"

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns the mechanism itself, self-composed."""
        return _repeated(mechanism, num_releases)


@dataclasses.dataclass(frozen=True)
class FixedSizeSampling(SamplingScheme):
    """Each batch is a uniformly random subset of fixed size of `num_records`, drawn afresh for every release."""

    num_records: int
    batch_size: int
    name: ClassVar[str] = "fixed_size"
    sentence: ClassVar[str] = (
        "fixed-size sampling: every step draws {batch_size:,} of the {num_records:,} records at random, without replacement"
    )
    relations: ClassVar[tuple[NeighboringRelation, ...]] = (_REPLACE,)

    def __post_init__(self) -> None:
        records = check.count("num_records", self.num_records, 1)
        batch = check.count("batch_size", self.batch_size, 1)
        if batch > records:
            raise ValueError(f"batch_size={batch} exceeds num_records={records}; use FullBatch() for all records.")
        object.__setattr__(self, "num_records", records)
        object.__setattr__(self, "batch_size", batch)

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns `SampledWithoutReplacementDpEvent(N, batch_size, mechanism)`, self-composed."""
        event = dp_accounting.SampledWithoutReplacementDpEvent(self.num_records, self.batch_size, mechanism)
        return _repeated(event, num_releases)


@dataclasses.dataclass(frozen=True)
class EachRecordOncePerEpoch(SamplingScheme):
    """A user's own batches in which each record occurs at most once per epoch: no amplification.

    Declaring it states that the batches of an epoch are disjoint, and that the batch which a record falls into does not
    depend on the records' values. It is priced under replace-one only: where one record more or less moves others to other
    batches, as in `dataset.batch(B)`, adding or removing one changes many releases.

    Formal guarantee: within an epoch of `steps_per_epoch` releases a record touches one only, so a begun epoch costs as much
    as one release on all records (parallel composition), however the batches were shuffled.
    """

    steps_per_epoch: int
    name: ClassVar[str] = "each_record_once_per_epoch"
    sentence: ClassVar[str] = (
        "the user's own batches, declared to hold each record at most once per epoch of {steps_per_epoch:,} steps, in a batch "
        "that does not depend on the records' values; priced without amplification by sampling"
    )
    fits_merge: ClassVar[bool] = False
    relations: ClassVar[tuple[NeighboringRelation, ...]] = (_REPLACE,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps_per_epoch", check.count("steps_per_epoch", self.steps_per_epoch, 1))

    def dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns one mechanism per epoch begun: any record may be in one of its releases."""
        return _repeated(mechanism, -(-num_releases // self.steps_per_epoch))
