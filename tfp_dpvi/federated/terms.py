"""The public terms of a study as numbers alone: all that its server needs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import pathlib

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor

WAYS = ("worker", "messages")


@dataclasses.dataclass(frozen=True)
class Terms:
    """What hospitals and server agree on before a study; public.

    Attributes:
      name: of the study.
      prior: the prior over the unconstrained parameters, or the normal that stands for one which is not normal there.
      local_steps: private steps of a hospital in one round.
      privacy: "worker" or "messages": where the noise is added.
      most_change: the largest norm of a hospital's change that the server takes, of all natural parameters together.
      setup: a digest of the model and of the hospitals' settings, so that nobody mixes two studies up.
    """

    name: str
    prior: Factor
    local_steps: int = 20
    privacy: str = "worker"
    most_change: float = 1e7
    setup: str = ""

    def __post_init__(self) -> None:
        check.text("name", self.name, "pass the name of the study")
        if not self.prior.proper:
            raise ValueError("prior is no normal distribution: its precision must be positive definite.")
        object.__setattr__(self, "local_steps", check.count("local_steps", self.local_steps, 1))
        object.__setattr__(self, "most_change", check.positive("most_change", self.most_change))
        check.one_of("privacy", self.privacy, WAYS)

    @property
    def floor(self) -> np.ndarray:
        """Half of the prior's precision: the posterior's stays above it, whatever the factors say."""
        return self.prior.precision / 2.0

    @property
    def identity(self) -> str:
        """A digest of the terms, which every message carries."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()[:32]

    def to_json(self) -> dict[str, object]:
        """Returns a JSON-ready dictionary."""
        prior = {"shift": self.prior.shift.tolist(), "precision": self.prior.precision.tolist()}
        return {**{field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, "prior": prior}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the terms, for a server and for hospitals elsewhere."""
        pathlib.Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Terms:
        """Reads what `save` wrote."""
        held = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return cls(**{**held, "prior": Factor(**held["prior"])})
