"""Sampling schemes as values: the object that samples emits the event (contract C4).

A scheme says how the records of one release were drawn. The TensorFlow samplers return one of these
from `.scheme`; the accounting prices nothing that does not come from here.
"""

import abc
import dataclasses
from typing import Any, ClassVar

import dp_accounting
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy.sensitivity import Sensitivity

_REGISTRY: dict[str, type["SamplingScheme"]] = {}


@dataclasses.dataclass(frozen=True)
class SamplingScheme(abc.ABC):
    """How the records behind one release are drawn. Subclasses are frozen values."""

    name: ClassVar[str] = ""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        _REGISTRY[cls.name] = cls

    @abc.abstractmethod
    def dp_event(self, mechanism: DpEvent) -> DpEvent:
        """Returns the event of one release of `mechanism` on one sample."""

    @abc.abstractmethod
    def describe(self) -> str:
        """Returns one sentence for a person who is not a programmer."""

    def composed_dp_event(self, mechanism: DpEvent, num_releases: int) -> DpEvent:
        """Returns the event of `num_releases` consecutive releases."""
        if num_releases == 0:
            return dp_accounting.NoOpDpEvent()
        event = self.dp_event(mechanism)
        if num_releases == 1:
            return event
        return dp_accounting.SelfComposedDpEvent(event, num_releases)

    def unit_sensitivity(self, sensitivity: Sensitivity, relation: NeighboringRelation) -> float:
        """Returns what the noise multiplier of the event is measured against.

        Events follow the convention of dp_accounting >= 0.6: under add-or-remove-one a Gaussian
        event of multiplier m compares N(0, m^2) with N(1, m^2), under replace-one with N(2, m^2).
        Without subsampling the geometry is therefore A, or half of D.
        """
        if relation is NeighboringRelation.REPLACE_ONE:
            return sensitivity.replace / 2.0
        return sensitivity.add_or_remove

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON-ready dictionary with the scheme's name and its fields."""
        return {"name": self.name, **dataclasses.asdict(self)}


def scheme_from_json(data: dict[str, Any]) -> SamplingScheme:
    """Rebuilds a scheme from `to_json`.

    Raises:
      ValueError: for a name that this version does not know.
    """
    fields = dict(data)
    name = fields.pop("name", None)
    if name not in _REGISTRY:
        raise ValueError(f"sampling name={name!r} is unknown; known: {sorted(_REGISTRY)}.")
    return _REGISTRY[name](**fields)


@dataclasses.dataclass(frozen=True)
class PoissonSampling(SamplingScheme):
    """Each record enters each batch independently with the same probability.

    Attributes:
      probability: the inclusion probability q, expected batch size over `num_records`, in (0, 1].
    """

    probability: float
    name: ClassVar[str] = "poisson"

    def __post_init__(self) -> None:
        object.__setattr__(self, "probability", check.probability("probability", self.probability))

    def dp_event(self, mechanism: DpEvent) -> DpEvent:
        """Returns `PoissonSampledDpEvent(q, mechanism)`."""
        return dp_accounting.PoissonSampledDpEvent(self.probability, mechanism)

    def unit_sensitivity(self, sensitivity: Sensitivity, relation: NeighboringRelation) -> float:
        """Returns A under both adjacencies.

        Under replace-one the dominating pair is (1-q) N(0) + q N(A) against (1-q) N(0) + q N(-A):
        the record and its replacement both matter against absence. D/2 would be wrong where D < 2A.
        """
        del relation
        return sensitivity.add_or_remove

    def describe(self) -> str:
        """Returns one sentence for a person who is not a programmer."""
        return (
            "Poisson sampling: every record takes part in every step independently, "
            f"with probability {self.probability:.6g}"
        )


@dataclasses.dataclass(frozen=True)
class FullBatch(SamplingScheme):
    """Every record takes part in every release; nothing is amplified."""

    name: ClassVar[str] = "full_batch"

    def dp_event(self, mechanism: DpEvent) -> DpEvent:
        """Returns the mechanism itself."""
        return mechanism

    def describe(self) -> str:
        """Returns one sentence for a person who is not a programmer."""
        return "full batches: every record takes part in every step"
