"""The server and its schedules. It holds a prior and a factor of each hospital, whose product is the posterior, and no record."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterable
from typing import ClassVar

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor, guard, movement, product
from tfp_dpvi.federated.messages import MessageError, Reply, Task, Terms, need

_LOG = logging.getLogger("tfp_dpvi")
_MOST_MOVED = 1.0  # Standard deviations of a mean by which a last round may move a posterior.
_MOST_STRETCHED = 2.0  # The factor by which it may change a standard deviation.


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Base class of schedules."""

    rounds: int = 10  # How often each hospital is asked.
    damping: float = 0.2  # The share of a change that is taken in the first round, in (0, 1].
    decay: float = 1.0  # The share in the last round over that in the first, in (0, 1].
    most_ahead: int = 1  # Rounds ahead of the slowest that answers: how stale a change, how many an absent one loses.
    waits: ClassVar[bool] = (
        True  # Whether changes are applied once every hospital that was asked has answered.
    )
    one_by_one: ClassVar[bool] = False  # Whether one hospital is asked at a time.

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
    """All hospitals refine at once, and their changes are applied together."""


@dataclasses.dataclass(frozen=True)
class Sequential(Schedule):
    """One hospital after another. Undamped it diverges with private hospitals."""

    damping: float = 0.3
    one_by_one: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Asynchronous(Schedule):
    """Each change is applied when it comes. A hospital waits only for one that answers and is `most_ahead` rounds behind."""

    damping: float = 0.4
    decay: float = 0.9**9
    most_ahead: int = 2
    waits: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Round:
    """One update of the posterior; public."""

    number: int  # From 1.
    hospitals: tuple[str, ...]  # Whose changes were taken.
    change: float  # The Euclidean norm of the change of the posterior's natural parameters.
    guard: float  # The factor f of `guard`.
    epsilon: dict[str, float]  # What each hospital has stated to have spent so far.
    evaluation: float | None  # The value of the public evaluation, if there is one.
    posterior: Factor  # After the update, as the hospitals' factors.
    factors: dict[str, Factor]
    seconds: float  # Since the last update.


class Server:
    """Runs a study: says whom to ask what, checks what comes back, and keeps the factors.

    A driver (`simulate`, or `FlowerRun`) sends what `due` returns and hands replies over, as bytes, so that the same checks
    apply. No guarantee rests on it: all it has is a function of what hospitals released, and it cannot make a hospital spend
    more than that hospital's own budget.

    Args:
      terms: of the study.
      hospitals: their names, in the order of a sequential schedule.
      schedule: for instance `Synchronous(rounds=10)`.
      evaluate: posterior -> number to show after each update, of public data alone.
      refine_prior: (cavity, present factor) -> factor that stands for a prior that is not normal; it touches no record.
    """

    def __init__(
        self,
        terms: Terms,
        hospitals: Iterable[str],
        schedule: Schedule,
        *,
        evaluate: Callable[[Factor], float] | None = None,
        refine_prior: Callable[[Factor, Factor], Factor] | None = None,
    ) -> None:
        self.terms, self.schedule = terms, schedule
        self.prior = terms.prior  # Or the factor that stands for it at present.
        self.factors: dict[str, Factor] = {}
        self.epsilon: dict[str, float] = {}  # What each hospital has stated to have spent.
        self.randomness: dict[str, str] = {}  # Likewise, of the generator; see `Reply`.
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
        said = []
        if moved > _MOST_MOVED:
            said.append(f"moved a mean by {moved:.2g} of its standard deviations")
        if stretched > _MOST_STRETCHED:
            said.append(f"changed a standard deviation by a factor of {stretched:.2g}")
        if not said:
            return ()
        return (
            f"the last round of updates still {' and '.join(said)}: the posterior may not have "
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
        """Takes a hospital into the study, at factor 1 and in the present round; one that left comes back to its factor."""
        check.text("hospital", hospital, "pass a hospital's name")
        if hospital not in self.factors:
            self._asked[hospital] = min((self._asked[one] for one in self._answering()), default=0)
            self.factors[hospital] = Factor.one(
                self.terms.prior.num, full_rank=self.terms.prior.full_rank
            )

    def _answering(self) -> list[str]:
        """Returns the hospitals that answered last time, or, if there is none, all that take part."""
        active = [one for one in self.factors if one not in self.retired]
        return [one for one in active if one not in self._silent] or active

    def _next(self) -> list[str]:
        """Returns the hospitals to ask now."""
        busy, answering, last = set(self._open.values()), self._answering(), self.schedule.rounds
        asked = [self._asked[one] for one in answering]
        # The study ends without a hospital that is away.
        over = not asked or (min(asked) >= last and busy.isdisjoint(answering))
        if over or (busy and self.schedule.waits):
            return []
        until = min(last, min(asked) + self.schedule.most_ahead)
        taking_part = [one for one in self.factors if one not in self.retired and one not in busy]
        ready = [one for one in taking_part if self._asked[one] < until]
        return sorted(ready, key=self._asked.__getitem__)[:1] if self.schedule.one_by_one else ready

    def due(self) -> list[Task]:
        """Returns the tasks to send now; each counts as sent."""
        tasks, posterior = [], self.posterior
        for hospital in self._next():
            cavity, request = posterior / self.factors[hospital], uuid.uuid4().hex
            tasks.append(
                Task(
                    self.terms.identity, hospital, request, self._asked[hospital], posterior, cavity
                )
            )
            self._asked[hospital] += 1
            self._open[request] = hospital
        return tasks

    def receive(self, sender: str, message: bytes) -> bool:
        """Takes a `Reply` of the hospital whose key the transport has verified; returns whether it was taken.

        One that is refused changes no factor and is named in `refused`.
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
        """Closes a request without an answer: the hospital's factor stays, and it is asked again next round."""
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
        changes, self._held, before = self._held, {}, self.posterior
        f = guard(before, product(list(changes.values())), self.terms.floor)
        for hospital, change in changes.items():
            self.factors[hospital] *= change**f
        if self._refine_prior is not None:  # Site 0: no record is touched.
            posterior = self.posterior
            change = self._refine_prior(posterior / self.prior, self.prior) / self.prior
            self.prior *= change ** guard(posterior, change, self.terms.floor)
        after, now = self.posterior, time.monotonic()
        value = None if self._evaluate is None else float(self._evaluate(after))
        number, moved, seconds = len(self.history) + 1, (after / before).norm, now - self._since
        held = (dict(self.epsilon), value, after, dict(self.factors), seconds)
        self.history.append(Round(number, tuple(changes), moved, f, *held))
        self._since = now
