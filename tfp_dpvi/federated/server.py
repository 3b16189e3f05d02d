"""The server and its schedules.

It holds a prior and a factor of each hospital, whose product is the posterior, and no record.
"""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import ClassVar

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor, guard, movement, product
from tfp_dpvi.federated.messages import MessageError, Reply, StudyTerms, Task, need

_LOG = logging.getLogger("tfp_dpvi")
# Standard deviations of a mean by which a last round may move a posterior, and the factor by which
# it may change a standard deviation.
_MOST_MOVED = 1.0
_MOST_STRETCHED = 2.0


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base class of schedules.

    Args:
      rounds: How often each hospital is asked.
      damping: The share of a change that is taken in the first round, in (0, 1].
      decay: The share in the last round over that in the first, in (0, 1].
      most_ahead: Rounds ahead of the slowest that answers: how stale a change may be, and how many
        rounds an absent hospital loses.

    Raises:
      TypeError, ValueError: An argument is out of its range.

    ```python
    >>> schedule = Synchronous(rounds=3, damping=0.4, decay=0.25)
    >>> [schedule.share(number) for number in range(3)]
    [0.4, 0.2, 0.1]

    ```
    """

    rounds: int = 10
    damping: float = 0.2
    decay: float = 1.0
    most_ahead: int = 1
    # Whether changes are applied once every hospital that was asked has answered.
    waits: ClassVar[bool] = True
    # Whether one hospital is asked at a time.
    one_by_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check.count("rounds", self.rounds, 1)
        check.count("most_ahead", self.most_ahead, 1)
        for name in ("damping", "decay"):
            if check.positive(name, getattr(self, name)) > 1.0:
                raise ValueError(f"{name}={getattr(self, name)} must be at most 1; pass a share.")

    def share(self, number: int) -> float:
        """Returns the share of a change that is taken in round `number`, from 0."""
        return self.damping * self.decay ** (number / max(1, self.rounds - 1))


class Synchronous(Schedule):
    """All hospitals refine at once, and their changes are applied together.

    ```python
    >>> Synchronous(rounds=5).damping
    0.2

    ```
    """


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """One hospital is asked after another. Undamped, it diverges with private hospitals.

    ```python
    >>> Sequential(rounds=5).damping
    0.3

    ```
    """

    damping: float = 0.3
    one_by_one: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Asynchronous(Schedule):
    """Each change is applied when it comes.

    A hospital waits only for one that answers and is `most_ahead` rounds behind.

    ```python
    >>> Asynchronous(rounds=5).most_ahead
    2

    ```
    """

    damping: float = 0.4
    decay: float = 0.9**9
    most_ahead: int = 2
    waits: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Round:
    """One update of the posterior; public.

    Args:
      number: Number of the update, from 1.
      hospitals: Names of those whose changes were taken.
      change: Euclidean norm of the change of the posterior's natural parameters.
      guard: The share f of `guard`.
      epsilon: Epsilon that each hospital reports.
      evaluation: The value of the public evaluation, if there is one.
      posterior: The posterior after the update.
      factors: The hospitals' factors after the update.
      seconds: Time since the last update.

    ```python
    >>> import numpy as np
    >>> prior = Factor.normal(np.zeros(1), np.ones(1))
    >>> update = Round(1, ("berlin",), 0.0, 1.0, {"berlin": 0.4}, None, prior, {}, 2.5)
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


class Server:
    """Runs a study: says whom to ask what, checks what comes back, and keeps the factors.

    A driver (`simulate`, or `FlowerRun`) sends what `due` returns and hands replies over, as bytes,
    so that the same checks apply. No guarantee rests on it: all it has is a function of what
    hospitals released, and it cannot make a hospital spend more than that hospital's own budget.

    Args:
      terms: Terms of the study.
      hospitals: Their names, in the order of a sequential schedule.
      schedule: When to ask whom, for instance `Synchronous(rounds=10)`.
      evaluate: Maps a posterior to a number to show after each update, from public data alone.
      refine_prior: Maps a cavity and the present factor to the factor that stands for a prior which
        is not normal; it touches no record.

    ```python
    >>> import numpy as np
    >>> terms = StudyTerms("heights", Factor.normal(np.zeros(1), np.ones(1)))
    >>> server = Server(terms, ["berlin"], Synchronous(rounds=1, damping=1.0))
    >>> (task,) = server.due()
    >>> change = Factor(shift=np.array([1.0]), precision=np.array([1.0]))
    >>> reply = Reply(task.study, "berlin", task.request, task.number, change, epsilon=0.4)
    >>> server.receive("berlin", reply.to_bytes())
    True
    >>> float(server.posterior.mean[0])
    0.5

    ```
    """

    def __init__(
        self,
        terms: StudyTerms,
        hospitals: Iterable[str],
        schedule: Schedule,
        *,
        evaluate: Callable[[Factor], float] | None = None,
        refine_prior: Callable[[Factor, Factor], Factor] | None = None,
    ) -> None:
        self.terms, self.schedule = terms, schedule
        self.prior = terms.prior  # Or the factor that stands for it at present.
        self.factors: dict[str, Factor] = {}
        self.epsilon: dict[str, float] = {}  # Epsilon that each hospital reports.
        self.randomness: dict[str, str] = {}  # The generator that each reports; see `Reply`.
        self.retired: dict[str, str] = {}  # Hospitals that declined, and why; their factors stay.
        self.refused: list[str] = []  # Messages, and why.
        self.history: list[Round] = []
        self._evaluate, self._refine_prior = evaluate, refine_prior
        self._asked: dict[str, int] = {}
        self._open: dict[str, str] = {}  # Request -> hospital.
        self._held: dict[str, Factor] = {}
        self._silent: set[str] = set()  # Hospitals whose last request was given up.
        self._since = time.monotonic()
        for hospital in hospitals:
            self.join(hospital)

    @property
    def posterior(self) -> Factor:
        """The product of prior and factors."""
        return product([self.prior, *self.factors.values()])

    @property
    def finished(self) -> bool:
        """True if no task is due and no request is open."""
        return not self._open and not self._next()

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences to read before `posterior`: one if the last round still moved it.

        A round is an update of each hospital that still answers, in whatever order the schedule
        asks. It may move a mean by one standard deviation of the posterior, and change a standard
        deviation by a factor of two. The sentence is logged when the study ends.
        """
        if not self.history:
            return ()
        moved, stretched = movement(self._before_last_round(), self.history[-1].posterior)
        faults = []
        if moved > _MOST_MOVED:
            faults.append(f"moved a mean by {moved:.2g} of its standard deviations")
        if stretched > _MOST_STRETCHED:
            faults.append(f"changed a standard deviation by a factor of {stretched:.2g}")
        if not faults:
            return ()
        return (
            f"the last round of updates still {' and '.join(faults)}: the posterior may not have "
            "settled, or is narrower than the noise\nfor privacy. Do not trust its intervals; use "
            "more rounds, a smaller damping, or more records.",
        )

    def _before_last_round(self) -> Factor:
        """Returns the posterior before the last updates of all hospitals that still answer."""
        answering = set(self._answering() or self.factors)
        missing = {name for update in self.history for name in update.hospitals} & answering
        for place in range(len(self.history) - 1, -1, -1):
            missing -= set(self.history[place].hospitals)
            if not missing:
                break
        return self.history[place - 1].posterior if place else self.terms.prior

    def join(self, hospital: str) -> None:
        """Takes a hospital into the study, at factor 1 and in the present round.

        A hospital that left comes back to its factor.
        """
        check.text("hospital", hospital, "pass a hospital's name")
        if hospital not in self.factors:
            rounds = [self._asked[name] for name in self._answering()]
            self._asked[hospital] = min(rounds, default=0)
            prior = self.terms.prior
            self.factors[hospital] = Factor.one(prior.num, full_rank=prior.full_rank)

    def _answering(self) -> list[str]:
        """Returns the hospitals that answered last time, or all that take part if none did."""
        active = [name for name in self.factors if name not in self.retired]
        return [name for name in active if name not in self._silent] or active

    def _next(self) -> list[str]:
        """Returns the hospitals to ask now."""
        busy, answering = set(self._open.values()), self._answering()
        rounds = [self._asked[name] for name in answering]
        last = self.schedule.rounds
        # The study ends without a hospital that is away.
        over = not rounds or (min(rounds) >= last and busy.isdisjoint(answering))
        if over or (busy and self.schedule.waits):
            return []
        until = min(last, min(rounds) + self.schedule.most_ahead)
        free = [name for name in self.factors if name not in self.retired and name not in busy]
        ready = [name for name in free if self._asked[name] < until]
        return sorted(ready, key=self._asked.__getitem__)[:1] if self.schedule.one_by_one else ready

    def due(self) -> list[Task]:
        """Returns the tasks to send now; each counts as sent."""
        tasks: list[Task] = []
        posterior, study = self.posterior, self.terms.identity
        for hospital in self._next():
            cavity, request = posterior / self.factors[hospital], uuid.uuid4().hex
            tasks.append(Task(study, hospital, request, self._asked[hospital], posterior, cavity))
            self._asked[hospital] += 1
            self._open[request] = hospital
        return tasks

    def receive(self, sender: str, message: bytes) -> bool:
        """Takes a reply. One that is refused changes no factor and is named in `refused`.

        Args:
          sender: Name of the hospital whose key the transport has verified.
          message: A `Reply` as bytes.

        Returns:
          Whether the reply was taken.
        """
        try:
            reply = Reply.from_bytes(message, self.terms)
            need(sender in self.factors, f"hospital {sender!r} is not in the study.")
            need(
                reply.hospital == sender,
                f"it is signed {reply.hospital!r}, and {sender!r} sent it.",
            )
            asked = self._open.get(reply.request)
            need(
                asked is not None,
                f"request {reply.request!r} is not open: it was answered, given up, or never sent.",
            )
            need(asked == sender, f"request {reply.request!r} went to another hospital.")
            need(
                reply.number == self._asked[sender] - 1,
                f"number={reply.number} is not that of the request.",
            )
            self.epsilon[sender], self.randomness[sender] = reply.epsilon, reply.randomness
        except MessageError as error:
            self.refused.append(f"{sender}: {error}")
            _LOG.warning("A message of %s is refused: %s", sender, error)
            return False
        if reply.change is None:
            _LOG.warning("%s declines: %s", sender, reply.reason)
            self.retired[sender] = reply.reason
        else:
            self._held[sender] = reply.change ** self.schedule.share(reply.number)
        self._silent.discard(sender)
        self._close(reply.request)
        return True

    def give_up(self, request: str) -> None:
        """Closes a request without an answer.

        The hospital's factor stays, and it is asked again in the next round.
        """
        if request in self._open:
            self._silent.add(self._open[request])
            self._close(request)

    def _close(self, request: str) -> None:
        del self._open[request]
        if self._held and not (self._open and self.schedule.waits):
            self._settle()
        if self.finished:
            for sentence in self.caveats:
                _LOG.warning("%s", sentence)

    def _settle(self) -> None:
        """Applies the changes that are held."""
        changes, before = self._held, self.posterior
        self._held = {}
        share = guard(before, product(list(changes.values())), self.terms.floor)
        for hospital, change in changes.items():
            self.factors[hospital] *= change**share
        if self._refine_prior is not None:  # Site 0: no record is touched.
            posterior = self.posterior
            change = self._refine_prior(posterior / self.prior, self.prior) / self.prior
            self.prior *= change ** guard(posterior, change, self.terms.floor)
        after, now = self.posterior, time.monotonic()
        update = Round(
            number=len(self.history) + 1,
            hospitals=tuple(changes),
            change=(after / before).norm,
            guard=share,
            epsilon=dict(self.epsilon),
            evaluation=None if self._evaluate is None else float(self._evaluate(after)),
            posterior=after,
            factors=dict(self.factors),
            seconds=now - self._since,
        )
        self.history.append(update)
        self._since = now
