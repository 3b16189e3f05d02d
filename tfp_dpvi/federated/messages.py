"""Messages between a server and its hospitals, and the terms that both agree on beforehand.

A message is a line of JSON followed by float64 numbers, of a size that the terms fix. Nothing is unpickled.
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

_MAGIC = b"tfp_dpvi federated 1\n"
_MOST_HEADER = 4096
_MOST_BRACKETS = 100  # In a header: deep nesting would exhaust Python's stack.
_MOST_TEXT = 300
_DTYPE = "<f8"


@dataclasses.dataclass(frozen=True)
class Terms:
    """The public numbers of a study: all that its server needs.

    Attributes:
      name: of the study.
      prior: the prior over the unconstrained parameters, or the normal that stands for one which is not normal there.
      local_steps: private steps of a hospital in one round.
      privacy: "worker" or "messages": where the noise is added.
      most_change: the largest norm of a hospital's change that the server takes, of all natural parameters together.
      setup: a digest of the model and of the hospitals' settings, so that studies are not mixed up.
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
        check.one_of("privacy", self.privacy, ("worker", "messages"))

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
        return len(_MAGIC) + _MOST_HEADER + 2 * _size(self.prior)

    def _to_json(self, **settings: Any) -> str:
        return json.dumps(dataclasses.asdict(self), default=np.ndarray.tolist, **settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the terms to a file, for a server and hospitals elsewhere."""
        pathlib.Path(path).write_text(self._to_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Terms:
        """Reads what `save` wrote."""
        held = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        return cls(**{**held, "prior": Factor(**held["prior"])})


class MessageError(ValueError):
    """Raised for a message that is refused; the receiver's state is unchanged."""


def need(holds: bool, otherwise: str) -> None:
    """Raises `MessageError` with the sentence `otherwise` unless a condition holds."""
    if not holds:
        raise MessageError(otherwise)


@dataclasses.dataclass(frozen=True)
class _Message:
    study: str
    hospital: str
    request: str
    number: int

    def _pack(self, kind: str, factors: list[Factor], **more: str) -> bytes:
        common = {field.name: getattr(self, field.name) for field in dataclasses.fields(_Message)}
        shapes = [[list(one.shift.shape), list(one.precision.shape)] for one in factors]
        header = {"kind": kind, **common, **more, "dtype": _DTYPE, "shapes": shapes}
        numbers = [part.astype(_DTYPE).tobytes() for one in factors for part in (one.shift, one.precision)]
        return b"".join([_MAGIC, json.dumps(header).encode(), b"\n", *numbers])


@dataclasses.dataclass(frozen=True)
class Task(_Message):
    """A server's request that a hospital refine its factor.

    Attributes:
      study: the identity of the terms.
      hospital: its name.
      request: a name that the server gives once; the latest request, if repeated, is answered alike and charged once.
      number: how often the hospital was asked before.
      posterior: the present posterior.
      cavity: the posterior without the hospital's own factor; it may be improper.
    """

    posterior: Factor
    cavity: Factor

    def to_bytes(self) -> bytes:
        """Returns the message."""
        return self._pack("task", [self.posterior, self.cavity])

    @classmethod
    def from_bytes(cls, message: bytes, terms: Terms) -> Task:
        """Reads a message; raises `MessageError`."""
        header, factors = _unpack("task", message, terms)
        need(len(factors) == 2, f"a task has a posterior and a cavity, and this message {len(factors)} factors.")
        need(factors[0].proper, "the posterior of the task is no normal distribution.")
        return cls(*_common(header), *factors)


@dataclasses.dataclass(frozen=True)
class Reply(_Message):
    """A hospital's answer to a task, whose first four attributes it repeats.

    Attributes:
      change: the factor by which to multiply the hospital's factor and the posterior, before damping; None if it declines.
      epsilon: what the hospital states to have spent so far; infinite where nothing is private.
      delta: of its epsilon.
      reason: why it declines.
    """

    change: Factor | None
    epsilon: float = math.inf
    delta: float = 0.0
    reason: str = ""

    def to_bytes(self) -> bytes:
        """Returns the message."""
        stated = {"epsilon": repr(float(self.epsilon)), "delta": repr(float(self.delta))}
        factors = [] if self.change is None else [self.change]
        return self._pack("reply", factors, **stated, reason=self.reason[:_MOST_TEXT])

    @classmethod
    def from_bytes(cls, message: bytes, terms: Terms) -> Reply:
        """Reads a message; raises `MessageError`."""
        header, factors = _unpack("reply", message, terms)
        need(len(factors) <= 1, f"a reply has one change or none, and this message {len(factors)} factors.")
        reason = header.get("reason", "")
        need(isinstance(reason, str) and len(reason) <= _MOST_TEXT, "reason is not a short text.")
        epsilon, delta = _number(header, "epsilon"), _number(header, "delta")
        change, most = factors[0] if factors else None, terms.most_change
        if change is not None:
            norm = change.norm
            need(norm <= most, f"the change has norm {norm:.4g}, and the study takes at most most_change={most:g}.")
        return cls(*_common(header), change, epsilon, delta, reason)


def _number(header: dict[str, Any], name: str) -> float:
    try:
        value = float(header[name])
    except (KeyError, TypeError, ValueError, OverflowError):
        raise MessageError(f"{name} is not a number.") from None
    need(value >= 0.0, f"{name}={value} must be at least 0.")
    return value


def _common(header: dict[str, Any]) -> tuple[str, str, str, int]:
    return header["study"], header["hospital"], header["request"], header["number"]


def _unpack(kind: str, message: bytes, terms: Terms) -> tuple[dict[str, Any], list[Factor]]:
    """Returns a message's header, its common fields checked, and its factors."""
    need(isinstance(message, bytes), f"the message is a {type(message).__name__}, not bytes.")
    need(
        len(message) <= terms.most_bytes,
        f"the message has {len(message)} bytes, the study's at most {terms.most_bytes}.",
    )
    need(message.startswith(_MAGIC), "the message is not of this library's format, version 1.")
    line, _, numbers = message[len(_MAGIC) :].partition(b"\n")
    header: Any = None
    if line.count(b"[") + line.count(b"{") <= _MOST_BRACKETS:
        with contextlib.suppress(ValueError):
            header = json.loads(line[:_MOST_HEADER])
    need(isinstance(header, dict) and header.get("kind") == kind, f"the message is no {kind}.")
    study, number, dtype = header.get("study"), header.get("number"), header.get("dtype")
    need(study == terms.identity, f"study={study!r:.99} is not this one ({terms.identity}).")
    for name in ("hospital", "request"):
        text = header.get(name)
        need(isinstance(text, str) and text.isprintable() and len(text) <= _MOST_TEXT, f"{name} is not a short text.")
    need(type(number) is int and number >= 0, f"number={number!r:.99} is not a count.")
    need(dtype == _DTYPE, f"dtype={dtype!r:.99} is not {_DTYPE!r}.")
    return header, _factors(numbers, header.get("shapes"), terms.prior)


def _size(factor: Factor) -> int:
    return 8 * (factor.shift.size + factor.precision.size)


def _factors(numbers: bytes, shapes: object, prior: Factor) -> list[Factor]:
    wanted, size = [list(prior.shift.shape), list(prior.precision.shape)], _size(prior)
    if not isinstance(shapes, list) or any(each != wanted for each in shapes):
        raise MessageError(f"shapes={shapes!r:.200} are not those of the study's factors, {wanted}.")
    stated = size * len(shapes)
    need(
        len(numbers) == stated,
        f"the message holds {len(numbers)} bytes of numbers; {len(shapes)} factors take {stated}.",
    )
    values = np.frombuffer(numbers, _DTYPE).reshape(len(shapes), size // 8)
    try:
        return [Factor(row[: prior.num], row[prior.num :].reshape(prior.precision.shape)) for row in values]
    except ValueError as error:
        raise MessageError(str(error)) from None
