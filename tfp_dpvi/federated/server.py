"""The server: a prior, a factor of each hospital, and their product, which is the posterior. It sees no record."""

from __future__ import annotations

import dataclasses
import logging
import time
import uuid
from collections.abc import Callable, Iterable

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor, guard, product
from tfp_dpvi.federated.messages import MessageError, Reply, Task
from tfp_dpvi.federated.schedules import Asynchronous, Schedule
from tfp_dpvi.federated.terms import Terms

_LOG = logging.getLogger("tfp_dpvi")


@dataclasses.dataclass(frozen=True)
class Round:
    """The result of one update of the posterior; public.

    Attributes:
      number: the update's, from 1.
      hospitals: whose changes were taken.
      change: Euclidean norm of the change of the posterior's natural parameters.
      guard: the factor f of `guard`.
      epsilon: what each hospital has stated to have spent so far.
      evaluation: what the study's public evaluation says of the posterior, or None.
      posterior: after the update.
      factors: of all hospitals, after the update.
      seconds: since the last update.
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

    A driver (`simulate`, or `serve` on Flower) sends what `due` returns, and hands over what comes back. Tasks and replies are
    bytes, so that both go through the same checks.

    Args:
      terms: of the study.
      hospitals: their names, in the order of a sequential schedule.
      schedule: for instance `Synchronous(rounds=10)`.
      evaluate: posterior -> number to show after each update, of public data alone.
      refine_prior: (cavity, present factor) -> factor that stands for a prior that is not normal; it touches no record.

    #### Formal guarantee

    None of its own, and none is needed: what it holds is a function of what hospitals released. It can ask a hospital for as
    much as that hospital's own budget allows and no more.
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
        self._evaluate, self._refine_prior = evaluate, refine_prior
        self._prior = terms.prior
        self._factors: dict[str, Factor] = {}
        self._asked: dict[str, int] = {}
        self._sent: dict[str, tuple[str, int]] = {}  # Request -> hospital, number of updates when it was sent.
        self._held: dict[str, tuple[Factor, int]] = {}
        self._retired: dict[str, str] = {}
        self.epsilon: dict[str, float] = {}
        self.history: list[Round] = []
        self.refused: list[str] = []
        self._since = time.monotonic()
        for hospital in hospitals:
            self.join(hospital)

    # ------------------------------------------------------------------ what it holds

    @property
    def factors(self) -> dict[str, Factor]:
        """The hospitals' factors."""
        return dict(self._factors)

    @property
    def prior(self) -> Factor:
        """The prior, or the factor that stands for it at present."""
        return self._prior

    @property
    def posterior(self) -> Factor:
        """The product of prior and factors: computed from them, so that it cannot be anything else."""
        return product([self._prior, *self._factors.values()])

    @property
    def retired(self) -> dict[str, str]:
        """Hospitals that declined, and why; their factors stay."""
        return dict(self._retired)

    @property
    def finished(self) -> bool:
        """True if no task is due and no request is open."""
        return not self._sent and not self._waiting()

    def join(self, hospital: str) -> None:
        """Takes a hospital into the study, at factor 1; one that left comes back to its factor."""
        check.text("hospital", hospital, "pass a hospital's name")
        if hospital not in self._factors:
            self._asked[hospital] = self._round() if self._active() else 0
            self._factors[hospital] = Factor.one(self.terms.prior.num, full_rank=self.terms.prior.full_rank)

    # ------------------------------------------------------------------ tasks

    def _active(self) -> list[str]:
        return [one for one in self._factors if one not in self._retired]

    def _round(self) -> int:
        """The round under way: what the last of the hospitals has been asked for."""
        return min((self._asked[one] for one in self._active()), default=self.schedule.rounds)

    def _waiting(self) -> list[str]:
        """Those that may be asked next."""
        busy = {hospital for hospital, _ in self._sent.values()}
        most = (
            self.schedule.rounds
            if isinstance(self.schedule, Asynchronous)
            else min(self._round() + 1, self.schedule.rounds)
        )
        return [one for one in self._active() if one not in busy and self._asked[one] < most]

    def due(self) -> list[Task]:
        """Returns the tasks to send now; each is counted as sent."""
        tasks, posterior = [], self.posterior
        for hospital in self.schedule.group(self._waiting(), len(self._sent)):
            task = Task(
                study=self.terms.identity,
                hospital=hospital,
                request=uuid.uuid4().hex,
                number=self._asked[hospital],
                posterior=posterior,
                cavity=posterior / self._factors[hospital],
            )
            self._asked[hospital] += 1
            self._sent[task.request] = (hospital, len(self.history))
            tasks.append(task)
        return tasks

    # ------------------------------------------------------------------ replies

    def receive(self, sender: str, message: bytes) -> bool:
        """Takes a message; one that is refused changes nothing, and is named in `refused`.

        Args:
          sender: the hospital whose key the transport has verified.
          message: bytes of a `Reply`.

        Returns:
          Whether it was taken.
        """
        try:
            reply = Reply.from_bytes(message, self.terms)
            version = self._check(sender, reply)
        except MessageError as error:
            self.refused.append(f"{sender}: {error}")
            _LOG.warning("A message of %s is refused: %s", sender, error)
            return False
        del self._sent[reply.request]
        self.epsilon[sender] = reply.epsilon
        if reply.change is None:
            _LOG.warning("%s declines: %s", sender, reply.reason)
            self._retired[sender] = reply.reason
        else:
            self._held[sender] = (reply.change ** self.schedule.share(reply.number), version)
        self._settle()
        return True

    def _check(self, sender: str, reply: Reply) -> int:
        if sender not in self._factors:
            raise MessageError(f"hospital {sender!r} is not in the study.")
        if reply.hospital != sender:
            raise MessageError(f"it is signed {reply.hospital!r}, and {sender!r} sent it.")
        if reply.request not in self._sent:
            raise MessageError(f"request {reply.request!r} is not open: it was answered, given up, or never sent.")
        hospital, version = self._sent[reply.request]
        if hospital != sender:
            raise MessageError(f"request {reply.request!r} went to another hospital.")
        if reply.number != self._asked[sender] - 1:
            raise MessageError(f"number={reply.number} is not that of the request.")
        stale = len(self.history) - version
        if isinstance(self.schedule, Asynchronous) and stale > self.schedule.most_stale:
            del self._sent[reply.request]
            self.epsilon[sender] = reply.epsilon
            raise MessageError(f"{stale} changes came before it, and most_stale={self.schedule.most_stale}.")
        return version

    def give_up(self, request: str) -> None:
        """Ends the wait for a request: the hospital's factor stays, and it is asked again in the next round."""
        if self._sent.pop(request, None) is not None:
            self._settle()

    def _settle(self) -> None:
        """Applies the changes that are held, once nobody is waited for."""
        if not self._held or (self._sent and not isinstance(self.schedule, Asynchronous)):
            return
        changes = {hospital: change for hospital, (change, _) in self._held.items()}
        self._held = {}
        before = self.posterior
        together = product(list(changes.values()))
        f = guard(before, together, self.terms.floor)
        for hospital, change in changes.items():
            self._factors[hospital] *= change**f
        self._settle_prior()
        after, now = self.posterior, time.monotonic()
        value = None if self._evaluate is None else float(self._evaluate(after))
        self.history.append(
            Round(
                number=len(self.history) + 1,
                hospitals=tuple(changes),
                change=(after / before).norm,
                guard=f,
                epsilon=dict(self.epsilon),
                evaluation=value,
                posterior=after,
                factors=self.factors,
                seconds=now - self._since,
            )
        )
        self._since = now

    def _settle_prior(self) -> None:
        """Refines the factor that stands for a prior which is not normal: site 0, at no cost."""
        if self._refine_prior is None:
            return
        posterior = self.posterior
        change = self._refine_prior(posterior / self._prior, self._prior) / self._prior
        self._prior *= change ** guard(posterior, change, self.terms.floor)
