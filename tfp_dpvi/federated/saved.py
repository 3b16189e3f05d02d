"""The state of a server as files: all of it public, and replaced at once.

A folder has `state.json` and `update-00001.json` for each update of the posterior.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.member import Member
from tfp_dpvi.federated.messages import StudyTerms
from tfp_dpvi.federated.schedules import Asynchronous, Schedule, Sequential, Synchronous
from tfp_dpvi.privacy.sensitivity import Json

_FORMAT = 3
_SCHEDULES = {kind.__name__: kind for kind in (Schedule, Synchronous, Sequential, Asynchronous)}


@dataclasses.dataclass(frozen=True)
class Round:
    """One update of the posterior; public.

    Args:
      number: Number of the update, from 1.
      hospitals: Names of those whose changes were taken.
      change: Euclidean norm of the change of the posterior's natural parameters.
      guard: The smallest share of a change that was taken, see `guards`.
      epsilon: Epsilon that each hospital reports.
      evaluation: The value of the public evaluation, if there is one.
      posterior: The posterior after the update.
      factors: The hospitals' factors after the update.
      seconds: Time since the last update.
      limited: The share that was taken of each change of which less than all was.

    ```python
    >>> import numpy as np
    >>> prior = Factor.normal(np.zeros(1), np.ones(1))
    >>> update = Round(
    ...     1, ("berlin",), 0.0, 0.5, {"berlin": 0.4}, None, prior, {}, 2.5, limited={"berlin": 0.5}
    ... )
    >>> update.epsilon["berlin"]
    0.4

    ```
    """

    number: int
    hospitals: tuple[str, ...]
    change: float
    guard: float
    epsilon: dict[str, float]
    evaluation: float | None
    posterior: Factor
    factors: dict[str, Factor]
    seconds: float
    limited: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class State:
    """All that a server knows beside its terms and its history.

    Args:
      study: The identity of the terms.
      schedule: When to ask whom.
      prior: The prior, or the factor that stands for it at present.
      place: The posterior at whose mean the sums of the last phase are; None before that phase.
      refused: Messages that were refused, and why.
      hospitals: What the server knows of each, in the order in which they joined.

    ```python
    >>> import numpy as np
    >>> prior = Factor.normal(np.zeros(1), np.ones(1))
    >>> hospitals = {"berlin": Member(Factor.one(1, full_rank=False))}
    >>> state = State("identity", Synchronous(), prior, None, [], hospitals)
    >>> state.hospitals["berlin"].num_tasks
    0

    ```
    """

    study: str
    schedule: Schedule
    prior: Factor
    place: Factor | None
    refused: list[str]
    hospitals: dict[str, Member]


class Store:
    """The folder of one study, which one server writes at a time.

    Args:
      folder: Its path.

    ```python
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Store(folder).exists
    False

    ```
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = pathlib.Path(folder)
        self._path = self._folder / "state.json"
        self._seen: tuple[int, int, int] | None = None
        self._written = 0  # Updates that are in files.

    @property
    def exists(self) -> bool:
        """True if the folder holds a study."""
        return self._path.exists()

    def write(self, state: State, history: list[Round]) -> None:
        """Writes new updates, and replaces the state at once.

        Args:
          state: The state.
          history: All updates so far.

        Raises:
          RuntimeError: Another server has written since.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._seen is not None and self._seen != self._stamp():
            raise RuntimeError(
                f"the study in {str(self._folder)!r} has changed: another server continues it; "
                "end one of them."
            )
        for update in history[self._written :]:
            replace_file(self._update(update.number), _to_json(update))
        self._written = len(history)
        schedule = {"kind": type(state.schedule).__name__, **dataclasses.asdict(state.schedule)}
        kept = {"format": _FORMAT, "updates": len(history), **vars(state), "schedule": schedule}
        replace_file(self._path, _to_json(kept))
        self._seen = self._stamp()

    def read(self, terms: StudyTerms) -> tuple[State, list[Round]]:
        """Returns what was written last.

        Args:
          terms: Terms of the study.

        Raises:
          ValueError: The folder holds no study, or that of other terms.
        """
        if not self.exists:
            raise ValueError(f"folder={str(self._folder)!r} holds no study: pass that of a Server.")
        self._seen = self._stamp()
        try:
            fields = json.loads(self._path.read_text(encoding="utf-8"))
            fields = check.fields("the state", fields, needed=["format"])
            if fields.pop("format") != _FORMAT:
                raise ValueError(
                    "it is of another version of this library; end the study with that one, or "
                    "start anew in another folder."
                )
            known = [*_names(State), "updates"]
            fields = check.fields("the state", fields, needed=known, known=known)
            terms.check_same(fields["study"])
            updates = range(1, fields.pop("updates") + 1)
            history = [_round(json.loads(self._update(n).read_text("utf-8"))) for n in updates]
            state = _state(fields, terms)
        except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
            raise ValueError(
                f"{str(self._path)!r} is no state of this study: {check.first_line(error)}"
            ) from None
        self._written = len(history)
        return state, history

    def _update(self, number: int) -> pathlib.Path:
        return self._folder / f"update-{number:05d}.json"

    def _stamp(self) -> tuple[int, int, int] | None:
        """Returns what tells one written state from another."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size


def _names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def _to_json(value: Round | Json) -> str:
    def plain(part: np.ndarray | Factor | Member | Round) -> Json | list[float]:
        return part.tolist() if isinstance(part, np.ndarray) else dataclasses.asdict(part)

    return json.dumps(value, default=plain)


def replace_file(path: pathlib.Path, text: str) -> None:
    """Writes a file so that a reader, also after a crash, finds the old one or the new one.

    Args:
      path: Path of the file.
      text: What it will hold.
    """
    new = path.with_suffix(".new")
    with open(new, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def _factors(fields: check.Unchecked) -> dict[str, Factor]:
    return {name: Factor(**value) for name, value in check.fields("factors", fields).items()}


def _state(fields: Json, terms: StudyTerms) -> State:
    schedule, place = dict(fields["schedule"]), fields["place"]
    refused = fields["refused"]
    if not isinstance(refused, list) or not all(isinstance(text, str) for text in refused):
        raise TypeError("refused is no list of texts.")
    hospitals = check.fields("hospitals", fields["hospitals"])
    return State(
        study=fields["study"],
        schedule=_SCHEDULES[schedule.pop("kind")](**schedule),
        prior=Factor(**fields["prior"]),
        place=None if place is None else Factor(**place),
        refused=refused,
        hospitals={name: Member.from_json(value, terms) for name, value in hospitals.items()},
    )


def _round(fields: Json) -> Round:
    names = _names(Round)
    fields = check.fields("an update", fields, needed=names, known=names)
    read = {
        "hospitals": tuple(fields["hospitals"]),
        "posterior": Factor(**fields["posterior"]),
        "factors": _factors(fields["factors"]),
    }
    return Round(**{**fields, **read})
