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
from collections.abc import Mapping
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.sums import Shapes, SiteSums, num_numbers
from tfp_dpvi.federated.trusted import AgreedSum

MOST_TEXT = 300
TRUSTED_SUM = "trusted_sum"  # The setting that says who adds up, see `AgreedSum`.
MOST_UNANSWERED = 20
_REQUEST = 64  # Characters of the name of a request.
_MOST_OTHER = 4096  # Bytes besides numbers.
_PER_NUMBER = 27  # Bytes of a float64 in JSON, its comma included.


@dataclasses.dataclass(frozen=True)
class StudyTerms:
    """The public numbers of a study: all that its server needs.

    Args:
      name: Name of the study.
      prior: The prior over the unconstrained parameters, or the normal that stands for one which is
        not normal there.
      local_steps: Private steps of a hospital in one round.
      privacy: "worker" or "messages": where the noise is added.
      most_change: The largest norm of a change that the server takes, of all natural parameters
        together.
      setup: What else hospitals have agreed on, in words.
      settings: The hospitals' settings by name, as texts.
      schema: The columns of their records, their bounds and units, in JSON; see `Schema.to_json`.
      likelihood: Log densities that the study's likelihood has at fixed public inputs.
      clip: The bound on the norm of a record's gradient; None where there is none.
      start_precision: The precision of each coordinate that a hospital's steps start from, if that
        is not the posterior's.
      sums: The shapes of the sums that each hospital releases once, after the rounds, for the
        calibrated posterior; see `SiteSums`. Empty without that phase.

    Terms are compared by content: what another study has otherwise is refused, and named.

    Raises:
      TypeError: A term has a value of another type.
      ValueError: A term is out of its range, or the prior's precision is not positive definite.

    ```python
    >>> import numpy as np
    >>> terms = StudyTerms(
    ...     "heights",
    ...     Factor.normal(np.zeros(2), np.ones(2)),
    ...     local_steps=10,
    ...     most_change=1e4,
    ...     setup="normal heights, clip 1",
    ...     clip=1.0,
    ...     start_precision=100.0,
    ... )
    >>> terms.floor
    array([0.5, 0.5])

    ```
    """

    name: str
    prior: Factor
    local_steps: int = 10
    privacy: str = "worker"
    most_change: float = 1e7
    setup: str = ""
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    schema: str = ""
    likelihood: tuple[float, ...] = ()
    clip: float | None = None
    start_precision: float = 0.0
    sums: Shapes = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        check.text("name", self.name, "pass the name of the study")
        if not self.prior.proper:
            raise ValueError(
                "prior is no normal distribution: its precision must be positive definite."
            )
        object.__setattr__(self, "local_steps", check.count("local_steps", self.local_steps, 1))
        object.__setattr__(self, "most_change", check.positive("most_change", self.most_change))
        check.one_of("privacy", self.privacy, ("worker", "messages"))
        for name in ("setup", "schema"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name}={getattr(self, name)!a:.99} is no text; pass a string.")
        settings = self.settings if isinstance(self.settings, Mapping) else {"": None}
        if not all(isinstance(part, str) for pair in settings.items() for part in pair):
            raise TypeError(f"settings={self.settings!a:.99} must be a dict of texts.")
        object.__setattr__(self, "settings", dict(settings))
        if self.clip is not None:
            object.__setattr__(self, "clip", check.positive("clip", self.clip))
        start = check.non_negative("start_precision", self.start_precision, "pass a precision")
        object.__setattr__(self, "start_precision", start)
        values = tuple(check.real("likelihood", value, "numbers") for value in self.likelihood)
        object.__setattr__(self, "likelihood", values)
        object.__setattr__(self, "sums", _shapes(self.sums))
        if self.agreed_sum is not None and not self.sums:
            raise ValueError("settings have a trusted sum without sums; write them with `save`.")

    @property
    def floor(self) -> np.ndarray:
        """Half of the prior's precision; the posterior's stays above it."""
        return self.prior.precision / 2.0

    @property
    def identity(self) -> str:
        """The digest of each term, which every message carries, and the likelihood's values."""
        parts = {name: getattr(self, name) for name in _fields_of(StudyTerms)}
        parts |= {f"settings.{name}": value for name, value in parts.pop("settings").items()}
        values = parts.pop("likelihood")
        texts = {name: _digest(value) for name, value in parts.items()}
        texts["likelihood"] = ",".join(f"{value:.6g}" for value in values)
        return " ".join(f"{name}:{text}" for name, text in texts.items())

    @property
    def digest(self) -> str:
        """A short digest of all terms, for names."""
        return _digest(self.identity)[:8]

    def check_same(self, identity: check.Unchecked) -> None:
        """Checks that another study has these terms.

        The likelihood's values may differ by what machines and versions round.

        Args:
          identity: That of the other study's terms, from whomever.

        Raises:
          MessageError: It differs; the error names the terms that do.
        """
        if not isinstance(identity, str) or len(identity) > _MOST_OTHER:
            raise MessageError(f"study={identity!r:.99} is not this one: it is no text.")
        own, other = (dict(_pairs(text)) for text in (self.identity, identity))
        names = [*own, *(name for name in other if name not in own)]
        differing = [name for name in names if not _agree(name, own.get(name), other.get(name))]
        if differing:
            shown = ascii(", ".join(differing))[1:-1]
            raise MessageError(
                f"study={identity[:21]!a} is not this one: it has another {shown:.200}; "
                "agree on one file of terms."
            )

    @property
    def agreed_sum(self) -> AgreedSum | None:
        """The noise agreed on for a trusted sum of the last phase, or None without one."""
        text = self.settings.get(TRUSTED_SUM)
        return None if text is None else AgreedSum.from_text(text)

    @property
    def most_bytes(self) -> int:
        """Bytes of the longest message."""
        numbers = 2 * (self.prior.shift.size + self.prior.precision.size)
        return _MOST_OTHER + _PER_NUMBER * (numbers + num_numbers(self.sums))

    def _to_json(self, **settings: Any) -> str:
        return json.dumps(dataclasses.asdict(self), default=np.ndarray.tolist, **settings)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the terms to a file, for a server and hospitals elsewhere."""
        pathlib.Path(path).write_text(self._to_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> StudyTerms:
        """Reads what `save` wrote.

        Args:
          path: Path of the file.

        Returns:
          The terms.

        Raises:
          TypeError: A term has a value of another type.
          ValueError: The file is no JSON, or a term is missing, unknown or out of its range.
        """
        try:
            fields = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
        except RecursionError:
            raise ValueError(
                f"{os.fspath(path)!r} holds no terms: it is nested too deeply."
            ) from None
        terms, parts = _fields_of(cls), _fields_of(Factor)
        fields = check.fields("the file of terms", fields, needed=terms, known=terms)
        prior = check.fields("prior", fields["prior"], needed=parts, known=parts)
        if not isinstance(fields["likelihood"], list):
            raise ValueError("likelihood is no list of numbers; write the terms with `save`.")
        return cls(**{**fields, "prior": Factor(**prior)})


def _shapes(value: check.Unchecked) -> Shapes:
    """Returns shapes by name, checked."""
    shapes = check.fields("sums", value)
    if shapes and not {"score", "matrix"} <= shapes.keys():
        raise ValueError("sums lack a score or a matrix; write the terms with `save`.")
    known = {}
    for name, shape in shapes.items():
        if not isinstance(shape, list | tuple):
            raise TypeError(f"sums has no shape of {name!a:.99}; write the terms with `save`.")
        known[name] = tuple(check.count("sums", length) for length in shape)
    return known


def _digest(value: check.Unchecked) -> str:
    plain = dataclasses.asdict(value) if isinstance(value, Factor) else value
    text = json.dumps(plain, default=np.ndarray.tolist, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pairs(identity: str) -> list[tuple[str, str]]:
    """Returns the names and texts of an identity."""
    return [
        (name, text) for name, _, text in (part.rpartition(":") for part in identity.split(" "))
    ]


def _agree(name: str, own: str | None, other: str | None) -> bool:
    """Returns whether two studies agree in a term."""
    if name != "likelihood" or not own or not other:
        return own == other
    try:
        one, two = (np.array(text.split(","), np.float64) for text in (own, other))
    except ValueError:
        return False
    return one.shape == two.shape and bool(np.allclose(one, two, rtol=1e-3, atol=1e-3))


class MessageError(ValueError):
    """Raised for a message that is refused; the receiver's state is unchanged.

    ```python
    >>> import numpy as np
    >>> terms = StudyTerms("heights", Factor.normal(np.zeros(2), np.ones(2)))
    >>> try:
    ...     Task.from_bytes(b"hello", terms)
    ... except MessageError as error:
    ...     print(error)
    the message is no Task in JSON.

    ```
    """


def need(holds: bool, otherwise: str) -> None:
    """Raises `MessageError` unless a condition holds.

    Args:
      holds: The condition.
      otherwise: The error's sentence.
    """
    if not holds:
        raise MessageError(otherwise)


@dataclasses.dataclass(frozen=True)
class _Message:
    """Fields that a reply repeats from its task.

    The server gives each request a name once. The latest one, if repeated, is answered alike and
    charged once.
    """

    study: str  # The identity of the terms.
    hospital: str
    request: str
    number: int  # How often the hospital was asked before.

    def to_bytes(self) -> bytes:
        """Returns the message."""
        fields = {"kind": type(self).__name__, **dataclasses.asdict(self)}
        return json.dumps(fields, default=np.ndarray.tolist).encode()


@dataclasses.dataclass(frozen=True)
class Task(_Message):
    """A server's request that a hospital refine its factor.

    Args:
      study: The identity of the study's terms.
      hospital: Name of the hospital.
      request: Name of the request, which the server gives once.
      number: How often the hospital was asked before.
      posterior: The present posterior, which is proper.
      cavity: The posterior without the hospital's own factor; it may be improper.
      unanswered: Names of earlier requests to the hospital that it did not answer in time. If it
        has made a reply to one of them, that is its answer, for which it has paid.
      last: Whether the hospital is asked for its sums at the mean of `posterior`, after the rounds.

    ```python
    >>> import numpy as np
    >>> terms = StudyTerms("heights", Factor.normal(np.zeros(2), np.ones(2)))
    >>> both = {"posterior": terms.prior, "cavity": terms.prior}
    >>> task = Task(terms.identity, "berlin", "request 2", 1, **both, unanswered=("request 1",))
    >>> Task.from_bytes(task.to_bytes(), terms).hospital
    'berlin'

    ```
    """

    posterior: Factor
    cavity: Factor
    unanswered: tuple[str, ...] = ()
    last: bool = False

    @classmethod
    def from_bytes(cls, message: bytes, terms: StudyTerms) -> Task:
        """Reads a message.

        Args:
          message: As of `to_bytes`, from whomever.
          terms: Those of the receiver's study.

        Raises:
          MessageError: The message is no task of this study.
        """
        fields = _read(cls, message, terms)
        for name in ("posterior", "cavity"):
            fields[name] = _factor(name, fields[name], terms.prior)
        earlier = fields["unanswered"]
        need(
            isinstance(earlier, list)
            and len(earlier) <= MOST_UNANSWERED
            and all(isinstance(name, str) and len(name) <= _REQUEST for name in earlier),
            f"unanswered is no list of at most {MOST_UNANSWERED} names of requests.",
        )
        fields["unanswered"] = tuple(earlier)
        last = fields["last"]
        need(isinstance(last, bool), f"last={last!r:.99} is neither true nor false.")
        need(not last or bool(terms.sums), "the study has no last phase: it is not calibrated.")
        task = cls(**fields)
        need(task.posterior.proper, "the posterior of the task is no normal distribution.")
        return task


@dataclasses.dataclass(frozen=True)
class Reply(_Message):
    """A hospital's answer to a task, whose first four attributes it repeats.

    Args:
      study: The identity of the study's terms.
      hospital: Name of the hospital.
      request: Name of the request.
      number: How often the hospital was asked before.
      change: The factor by which to multiply the hospital's own and the posterior, before damping;
        None if the hospital declines, or is asked for its sums.
      epsilon: Epsilon that the hospital reports for this study; infinite where nothing is private.
      delta: Delta of that epsilon.
      reason: Why the hospital declines.
      randomness: "secure" if the hospital states that its noise is a cryptographic generator's.
      rounds_left: Rounds that the hospital still allows; None for any number.
      sums: The sums of the last phase, or None.

    ```python
    >>> import numpy as np
    >>> terms = StudyTerms("heights", Factor.normal(np.zeros(2), np.ones(2)))
    >>> change = Factor(shift=np.ones(2), precision=np.ones(2))
    >>> stated = {"epsilon": 0.4, "delta": 1e-5}
    >>> reply = Reply(terms.identity, "berlin", "request 1", 0, change, **stated, rounds_left=19)
    >>> Reply.from_bytes(reply.to_bytes(), terms).epsilon
    0.4
    >>> declined = Reply(terms.identity, "berlin", "request 2", 1, None, reason="no budget is left")
    >>> Reply.from_bytes(declined.to_bytes(), terms).reason
    'no budget is left'

    ```
    """

    change: Factor | None
    epsilon: float = math.inf
    delta: float = 0.0
    reason: str = ""
    randomness: str = ""
    rounds_left: int | None = None
    sums: SiteSums | None = None

    @classmethod
    def from_bytes(cls, message: bytes, terms: StudyTerms) -> Reply:
        """Reads a message.

        Args:
          message: As of `to_bytes`, from whomever.
          terms: Those of the receiver's study.

        Raises:
          MessageError: The message is no reply of this study, or its change is too large.
        """
        fields = _read(cls, message, terms)
        for name in ("epsilon", "delta"):
            value = fields[name]
            need(
                isinstance(value, float) and value >= 0.0,
                f"{name}={value!r:.99} is not a number of at least 0.",
            )
        left = fields["rounds_left"]
        need(
            left is None or (type(left) is int and left >= 0),
            f"rounds_left={left!r:.99} is not a count.",
        )
        randomness = fields["randomness"]
        need(
            randomness in ("", "secure"),
            f"randomness={randomness!r:.99} is neither empty nor 'secure'.",
        )
        if fields["change"] is not None:
            change = fields["change"] = _factor("change", fields["change"], terms.prior)
            need(
                change.norm <= terms.most_change,
                f"the change has norm {change.norm:.4g}, and the study takes at most "
                f"most_change={terms.most_change:g}.",
            )
        if fields["sums"] is not None:
            need(bool(terms.sums), "it has sums, and the study is not calibrated.")
            need(fields["change"] is None, "it has both a change and sums.")
            try:
                fields["sums"] = SiteSums.from_json(fields["sums"], terms.sums)
            except (TypeError, ValueError, OverflowError) as error:
                raise MessageError(f"sums are refused: {check.first_line(error)}") from None
        return cls(**fields)


def _fields_of(kind: type[Any]) -> list[str]:
    """Returns the names of a dataclass's fields."""
    return [field.name for field in dataclasses.fields(kind)]


def _read(kind: type[_Message], message: bytes, terms: StudyTerms) -> dict[str, Any]:
    """Returns a message's fields, all but numbers and factors checked."""
    most = terms.most_bytes
    need(isinstance(message, bytes), f"the message is a {type(message).__name__}, not bytes.")
    need(len(message) <= most, f"the message has {len(message)} bytes, the study's at most {most}.")
    fields: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(message)
    wanted, name = {"kind", *_fields_of(kind)}, kind.__name__
    need(
        isinstance(fields, dict) and fields.pop("kind", None) == name,
        f"the message is no {name} in JSON.",
    )
    need(
        fields.keys() == wanted - {"kind"},
        f"the {name} has the fields {sorted(fields)!r:.200}, not {sorted(wanted)}.",
    )
    study, number = fields["study"], fields["number"]
    terms.check_same(study)
    for name in fields.keys() & {"hospital", "request", "reason"}:
        text = fields[name]
        need(
            isinstance(text, str) and text.isprintable() and len(text) <= MOST_TEXT,
            f"{name} is not a short text.",
        )
    need(type(number) is int and number >= 0, f"number={number!r:.99} is not a count.")
    return fields


def _factor(name: str, value: Any, prior: Factor) -> Factor:
    """Returns a factor from its JSON object, which must have the prior's shapes."""
    parts = _fields_of(Factor)
    try:
        factor = Factor(**check.fields(name, value, needed=parts, known=parts))
    except (TypeError, ValueError, OverflowError) as error:
        raise MessageError(f"{name} is no factor: {check.first_line(error)}") from None
    shapes = [factor.shift.shape, factor.precision.shape]
    wanted = [prior.shift.shape, prior.precision.shape]
    need(shapes == wanted, f"{name} has shapes {shapes}, and the study's factors {wanted}.")
    # A factor is exactly symmetric, and JSON keeps every digit: another matrix was altered.
    as_sent = np.asarray(value["precision"], np.float64)
    need(np.array_equal(factor.precision, as_sent), f"{name} is not symmetric.")
    return factor
