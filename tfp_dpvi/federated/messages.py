"""Messages between a server and its hospitals: a line of JSON and float64 numbers of a size that the study fixes.

Nothing is unpickled, and nothing is read that is longer than the study says.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any, ClassVar

import numpy as np

from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.terms import Terms

_MAGIC = b"tfp_dpvi federated 1\n"
_MOST_HEADER = 4096
_DTYPE = "<f8"


class MessageError(ValueError):
    """A message is refused; the receiver's state is unchanged."""


@dataclasses.dataclass(frozen=True)
class Task:
    """Asks a hospital to refine its factor.

    Attributes:
      study: the identity of the terms.
      hospital: to whom.
      request: a name that the server gives once; a request that is repeated is answered alike and charged once.
      number: how often the hospital was asked before.
      posterior: the present posterior.
      cavity: the posterior without the hospital's own factor; it may be improper.
    """

    kind: ClassVar[str] = "task"
    study: str
    hospital: str
    request: str
    number: int
    posterior: Factor
    cavity: Factor

    def to_bytes(self) -> bytes:
        """Returns the message."""
        return _pack(self, [self.posterior, self.cavity])

    @classmethod
    def from_bytes(cls, message: bytes, terms: Terms) -> Task:
        """Reads a message; raises `MessageError`."""
        header, factors = _unpack(message, cls.kind, terms)
        if len(factors) != 2:
            raise MessageError(f"a task has a posterior and a cavity, and this message {len(factors)} factors.")
        if not factors[0].proper:
            raise MessageError("the posterior of the task is no normal distribution.")
        return cls(*_named(header), posterior=factors[0], cavity=factors[1])


@dataclasses.dataclass(frozen=True)
class Reply:
    """A hospital's answer to a task.

    Attributes:
      study: see `Task`, and so are `hospital`, `request` and `number`.
      hospital: from whom.
      request: that of the task.
      number: that of the task.
      change: what the hospital's factor and the posterior are to be multiplied by, before damping; None: declined.
      epsilon: what the hospital states to have spent so far; infinite where nothing is private.
      delta: of its epsilon.
      reason: why it declines.
    """

    kind: ClassVar[str] = "reply"
    study: str
    hospital: str
    request: str
    number: int
    change: Factor | None
    epsilon: float = math.inf
    delta: float = 0.0
    reason: str = ""

    def to_bytes(self) -> bytes:
        """Returns the message."""
        more = {"epsilon": repr(float(self.epsilon)), "delta": repr(float(self.delta)), "reason": self.reason[:300]}
        return _pack(self, [] if self.change is None else [self.change], **more)

    @classmethod
    def from_bytes(cls, message: bytes, terms: Terms) -> Reply:
        """Reads a message; raises `MessageError`."""
        header, factors = _unpack(message, cls.kind, terms)
        if len(factors) > 1:
            raise MessageError(f"a reply has one change or none, and this message {len(factors)} factors.")
        reason = header.get("reason", "")
        if not isinstance(reason, str) or len(reason) > 300:
            raise MessageError("reason is not a short text.")
        epsilon, delta = _number(header, "epsilon"), _number(header, "delta")
        change = factors[0] if factors else None
        if change is not None and change.norm > terms.most_change:
            raise MessageError(
                f"the change has norm {change.norm:.4g}, and the study takes at most most_change={terms.most_change:g}."
            )
        return cls(*_named(header), change, epsilon, delta, reason)


def _number(header: dict[str, Any], name: str) -> float:
    try:
        value = float(header[name])
    except (KeyError, TypeError, ValueError):
        raise MessageError(f"{name} is not a number.") from None
    if not value >= 0.0:
        raise MessageError(f"{name}={value} must be at least 0.")
    return value


def _named(header: dict[str, Any]) -> tuple[str, str, str, int]:
    return header["study"], header["hospital"], header["request"], header["number"]


def _pack(message: Task | Reply, factors: list[Factor], **more: str) -> bytes:
    header = {
        "kind": message.kind,
        "study": message.study,
        "hospital": message.hospital,
        "request": message.request,
        "number": message.number,
        "dtype": _DTYPE,
        "shapes": [[*map(list, (one.shift.shape, one.precision.shape))] for one in factors],
        **more,
    }
    parts = [part for one in factors for part in (one.shift, one.precision)]
    line = json.dumps(header).encode() + b"\n"
    return _MAGIC + line + b"".join(part.astype(_DTYPE).tobytes() for part in parts)


def _unpack(message: bytes, kind: str, terms: Terms) -> tuple[dict[str, Any], list[Factor]]:
    prior = terms.prior
    size = 8 * (prior.shift.size + prior.precision.size)
    most = len(_MAGIC) + _MOST_HEADER + 2 * size
    if not isinstance(message, bytes):
        raise MessageError(f"the message is a {type(message).__name__}, not bytes.")
    if len(message) > most:
        raise MessageError(f"the message has {len(message)} bytes; the study's have at most {most}.")
    if not message.startswith(_MAGIC):
        raise MessageError("the message is not of this library's format, version 1.")
    end = message.find(b"\n", len(_MAGIC), len(_MAGIC) + _MOST_HEADER)
    try:
        header = json.loads(message[len(_MAGIC) : end]) if end > 0 else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("kind") != kind:
        raise MessageError(f"the message is no {kind}.")
    if header.get("study") != terms.identity:
        raise MessageError(f"study={header.get('study')!r} is not this one ({terms.identity}).")
    for name in ("hospital", "request"):
        if not isinstance(header.get(name), str) or not header[name].isprintable() or len(header[name]) > 200:
            raise MessageError(f"{name} is not a short text.")
    if type(header.get("number")) is not int or header["number"] < 0:
        raise MessageError(f"number={header.get('number')!r} is not a count.")
    if header.get("dtype") != _DTYPE:
        raise MessageError(f"dtype={header.get('dtype')!r} is not {_DTYPE!r}.")
    return header, _factors(message[end + 1 :], header.get("shapes"), prior, size)


def _factors(numbers: bytes, shapes: object, prior: Factor, size: int) -> list[Factor]:
    wanted = [list(prior.shift.shape), list(prior.precision.shape)]
    if not isinstance(shapes, list) or any(each != wanted for each in shapes):
        raise MessageError(f"shapes={shapes!r:.200} are not those of the study's factors, {wanted}.")
    if len(numbers) != size * len(shapes):
        raise MessageError(
            f"the message holds {len(numbers)} bytes of numbers; {len(shapes)} factors take {size * len(shapes)}."
        )
    found = []
    for start in range(0, len(numbers), size):
        values = np.frombuffer(numbers, _DTYPE, count=size // 8, offset=start)
        shift, precision = values[: prior.num], values[prior.num :].reshape(prior.precision.shape)
        try:
            found.append(Factor(shift, precision))
        except ValueError as error:
            raise MessageError(str(error)) from None
    return found
