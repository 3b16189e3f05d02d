"""Messages between a server and its hospitals, and the terms that both agree on beforehand.

A message is a JSON object of the fields of `Task` or `Reply`, of a size that the terms limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor

MOST_TEXT = 300
_MOST_OTHER = 4096  # Bytes besides numbers.
_PER_NUMBER = 27  # Bytes of a float64 in JSON, its comma included.


@dataclasses.dataclass(frozen=True)
class Terms:
    """The public numbers of a study: all that its server needs."""

    name: str
    prior: Factor  # Over the unconstrained parameters; or the normal that stands for a prior which is not normal there.
    local_steps: int = 20  # Private steps of a hospital in one round.
    privacy: str = "worker"  # Or "messages": where the noise is added.
    most_change: float = 1e7  # The largest norm of a change that the server takes, of all natural parameters together.
    setup: str = ""  # A digest of the model and of the hospitals' settings, so that studies are not mixed up.

    def __post_init__(self) -> None:
        check.text("name", self.name, "pass the name of the study")
        if not self.prior.proper:
            raise ValueError(
                "prior is no normal distribution: its precision must be positive definite."
            )
        object.__setattr__(self, "local_steps", check.count("local_steps", self.local_steps, 1))
        object.__setattr__(self, "most_change", check.positive("most_change", self.most_change))
        check.one_of("privacy", self.privacy, ("worker", "messages"))
        if not isinstance(self.setup, str):
            raise TypeError(f"setup={self.setup!a:.99} is no digest; pass a string.")

    @property
    def floor(self) -> np.ndarray:
        """Half of the prior's precision; the posterior's stays above it."""
        return self.prior.precision / 2.0

    @property
    def identity(self) -> str:
        """A digest of the terms, which every message carries."""
        return hashlib.sha256(self._to_json(sort_keys=True).encode()).hexdigest()[:32]

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest message."""
        return _MOST_OTHER + 2 * _PER_NUMBER * (self.prior.shift.size + self.prior.precision.size)

    def _to_json(self, **settings: Any) -> str:
        return json.dumps(dataclasses.asdict(self), default=np.ndarray.tolist, **settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the terms to a file, for a server and hospitals elsewhere."""
        pathlib.Path(path).write_text(self._to_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Terms:
        """Reads what `save` wrote.

        Args:
          path: the file.

        Returns:
          The terms.

        Raises:
          TypeError: a term has a value of another type.
          ValueError: no JSON, or a term is missing, unknown or out of its range.
        """
        try:
            held = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError(
                f"{os.fspath(path)!r} holds no terms: it is nested too deeply."
            ) from None
        terms, parts = (
            [field.name for field in dataclasses.fields(kind)] for kind in (cls, Factor)
        )
        held = check.fields("the file of terms", held, needed=terms, known=terms)
        prior = check.fields("prior", held["prior"], needed=parts, known=parts)
        return cls(**{**held, "prior": Factor(**prior)})


class MessageError(ValueError):
    """Raised for a message that is refused; the receiver's state is unchanged."""


def need(holds: bool, otherwise: str) -> None:
    """Raises `MessageError` with the sentence `otherwise` unless a condition holds."""
    if not holds:
        raise MessageError(otherwise)


@dataclasses.dataclass(frozen=True)
class _Message:
    study: str  # The identity of the terms.
    hospital: str
    request: str  # A name that the server gives once; the latest, if repeated, is answered alike and charged once.
    number: int  # How often the hospital was asked before.

    def to_bytes(self) -> bytes:
        """Returns the message."""
        fields = {"kind": type(self).__name__, **dataclasses.asdict(self)}
        return json.dumps(fields, default=np.ndarray.tolist).encode()


@dataclasses.dataclass(frozen=True)
class Task(_Message):
    """A server's request that a hospital refine its factor against a cavity, which may be improper."""

    posterior: Factor
    cavity: Factor  # The posterior without the hospital's own factor.

    @classmethod
    def from_bytes(cls, message: bytes, terms: Terms) -> Task:
        """Reads a message; raises `MessageError`."""
        fields = _read(cls, message, terms)
        task = cls(
            **fields
            | {name: _factor(name, fields[name], terms.prior) for name in ("posterior", "cavity")}
        )
        need(task.posterior.proper, "the posterior of the task is no normal distribution.")
        return task


@dataclasses.dataclass(frozen=True)
class Reply(_Message):
    """A hospital's answer to a task, whose first four attributes it repeats."""

    change: (
        Factor | None
    )  # By which to multiply its factor and the posterior, before damping; None if it declines.
    epsilon: float = (
        math.inf
    )  # What it states to have spent so far; infinite where nothing is private.
    delta: float = 0.0
    reason: str = ""  # Why it declines.
    randomness: str = ""  # "secure" if it states that its noise is a cryptographic generator's.

    @classmethod
    def from_bytes(cls, message: bytes, terms: Terms) -> Reply:
        """Reads a message; raises `MessageError`."""
        fields = _read(cls, message, terms)
        for name in ("epsilon", "delta"):
            value = fields[name]
            need(
                isinstance(value, float) and value >= 0.0,
                f"{name}={value!r:.99} is not a number of at least 0.",
            )
        how = fields["randomness"]
        need(how in ("", "secure"), f"randomness={how!r:.99} is neither empty nor 'secure'.")
        if fields["change"] is not None:
            change = fields["change"] = _factor("change", fields["change"], terms.prior)
            most_change = terms.most_change
            need(
                change.norm <= most_change,
                f"the change has norm {change.norm:.4g}, and the study takes at most {most_change=:g}.",
            )
        return cls(**fields)


def _read(kind: type[_Message], message: bytes, terms: Terms) -> dict[str, Any]:
    """Returns a message's fields, all but numbers and factors checked."""
    most = terms.most_bytes
    need(isinstance(message, bytes), f"the message is a {type(message).__name__}, not bytes.")
    need(len(message) <= most, f"the message has {len(message)} bytes, the study's at most {most}.")
    fields: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(message)
    wanted = {"kind", *(field.name for field in dataclasses.fields(kind))}
    name = kind.__name__
    need(
        isinstance(fields, dict) and fields.pop("kind", None) == name,
        f"the message is no {name} in JSON.",
    )
    need(
        fields.keys() == wanted - {"kind"},
        f"the {name} has the fields {sorted(fields)!r:.200}, not {sorted(wanted)}.",
    )
    study, number = fields["study"], fields["number"]
    need(study == terms.identity, f"study={study!r:.99} is not this one ({terms.identity}).")
    for name in fields.keys() & {"hospital", "request", "reason"}:
        text = fields[name]
        need(
            isinstance(text, str) and text.isprintable() and len(text) <= MOST_TEXT,
            f"{name} is not a short text.",
        )
    need(type(number) is int and number >= 0, f"number={number!r:.99} is not a count.")
    return fields


def _factor(name: str, value: Any, prior: Factor) -> Factor:
    try:
        parts = [field.name for field in dataclasses.fields(Factor)]
        factor = Factor(**check.fields(name, value, needed=parts, known=parts))
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{name} is no factor: {check.first_line(error)}") from None
    shapes = [[one.shift.shape, one.precision.shape] for one in (factor, prior)]
    need(
        shapes[0] == shapes[1],
        f"{name} has shapes {shapes[0]}, and the study's factors {shapes[1]}.",
    )
    return factor
