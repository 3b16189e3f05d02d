"""The server: it holds a prior and a factor of each hospital, and no record.

The product of prior and factors is the posterior.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Cap, Factor, drift, guard, guards, movement, product
from tfp_dpvi.federated.member import Member
from tfp_dpvi.federated.messages import MOST_TEXT, MessageError, Reply, StudyTerms, Task, need
from tfp_dpvi.federated.saved import Round, State, Store
from tfp_dpvi.federated.schedules import Asynchronous, Schedule, Sequential, Synchronous
from tfp_dpvi.federated.sums import SiteSums

__all__ = ["Asynchronous", "Round", "Schedule", "Sequential", "Server", "Synchronous"]

_LOG = logging.getLogger("tfp_dpvi")
# Standard deviations of a mean by which a last round may move a posterior, and the factor by which
# it may change a standard deviation.
_MOST_MOVED = 1.0
_MOST_STRETCHED = 2.0
# How often a hospital that does not answer is asked for its sums, while the quorum does; and how
# often for the change of its last round, where a study without sums ends.
_MOST_ASKED = 3


class Server:
    """Runs a study: says whom to ask what, checks what comes back, and keeps the factors.

    A driver (`simulate`, or `FlowerRun`) sends what `due` returns and hands replies over, as bytes,
    so that the same checks apply. No guarantee rests on it: all it has is a function of what
    hospitals released, and it cannot make a hospital spend more than that hospital's own budget.

    If the study is calibrated, it asks each hospital once more, after the rounds: for its sums at
    the mean of the posterior, `place`. `Study.calibrated_posterior` makes a posterior of them. Sums
    that hospitals trust to be seen added up alone it neither asks for nor takes: see `Aggregation`.

    With a folder it saves itself before a task leaves and after each reply, so that a server which
    is killed at any moment loses nothing that a hospital has paid for: see `load`.

    Args:
      terms: Terms of the study.
      hospitals: Their names, in the order of a sequential schedule; None if all of them `join`
        later, as they do in a `FlowerRun`.
      schedule: When to ask whom, for instance `Synchronous(rounds=10)`.
      evaluate: Maps a posterior to a number to show after each update, from public data alone.
      refine_prior: Maps a cavity and the present factor to the factor that stands for a prior which
        is not normal; it touches no record.
      num_records: The number of records that each hospital has declared. A change that goes beyond
        what so many records can say is scaled down, and its hospital is named: see `Cap`.
      folder: Folder in which the server keeps its state, all of it public; None for memory.

    Attributes:
      terms: As passed.
      schedule: As passed.
      prior: The prior, or the factor that stands for it at present.
      place: The posterior at whose mean the sums of the last phase are; None before that phase.
      refused: Messages that were refused, and why.
      history: The updates of the posterior.

    Raises:
      TypeError: A name is no text.
      ValueError: The folder holds a study already, which `load` continues; or
        `num_records` is given, and the study has no clip.

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
        hospitals: Iterable[str] | None,
        schedule: Schedule,
        *,
        evaluate: Callable[[Factor], float] | None = None,
        refine_prior: Callable[[Factor, Factor], Factor] | None = None,
        num_records: Mapping[str, int] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.terms, self.schedule = terms, schedule
        self.prior = terms.prior
        self.place: Factor | None = None
        self.refused: list[str] = []
        self.history: list[Round] = []
        self._members: dict[str, Member] = {}  # Those that were dropped too.
        self._caps = _caps(terms, num_records or {})
        self._evaluate, self._refine_prior = evaluate, refine_prior
        self._resends = False  # After `load` and `drop`, until what was under way is sent again.
        self._since = time.monotonic()
        self._store: Store | None = None
        for hospital in _names(hospitals):
            self.join(hospital)
        if folder is not None:
            store = Store(folder)
            if store.exists:
                raise ValueError(
                    f"folder={os.fspath(folder)!r} holds a study: continue it with Server.load, or "
                    "pass another folder."
                )
            self._store = store
            self._save()

    # ------------------------------------------------------------------ what it knows

    @property
    def factors(self) -> dict[str, Factor]:
        """The factor of each hospital; of one that has declined it stays."""
        return {
            name: member.factor for name, member in self._members.items() if not member.is_dropped
        }

    @property
    def posterior(self) -> Factor:
        """The product of prior and factors."""
        return product([self.prior, *self.factors.values()])

    @property
    def epsilon(self) -> dict[str, float]:
        """Epsilon that each hospital reports, once it has answered; also of those dropped."""
        return {
            name: member.epsilon
            for name, member in self._members.items()
            if member.epsilon is not None
        }

    @property
    def randomness(self) -> dict[str, str]:
        """The generator that each hospital reports, once it has answered; see `Reply`."""
        return {name: self._members[name].randomness for name in self.epsilon}

    @property
    def rounds_left(self) -> dict[str, int]:
        """Rounds that each hospital still allows, if it has said so."""
        return {
            name: member.rounds_left
            for name, member in self._members.items()
            if member.rounds_left is not None
        }

    @property
    def retired(self) -> dict[str, str]:
        """Hospitals that declined or were dropped, and why."""
        return {
            name: member.retired
            for name, member in self._members.items()
            if member.retired is not None
        }

    @property
    def sums(self) -> dict[str, SiteSums]:
        """The sums of each hospital, in the last phase."""
        return {
            name: member.sums for name, member in self._members.items() if member.sums is not None
        }

    @property
    def finished(self) -> bool:
        """True if no task is due and no request is open."""
        return not self._under_way() and not self._next()

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences to read before `posterior`, from public values; they are logged at the end.

        One is there if the last round still moved the posterior. A round is an update of each
        hospital that still answers, in whatever order the schedule asks. It may move a mean by one
        standard deviation of the posterior, and change a standard deviation by a factor of two.
        One is there if a mean goes on in one direction and has more than a standard deviation to
        go: hospitals of unlike records have not agreed yet. One is there if
        the study ended below its quorum, or without an answer to a hospital's last request, or if
        a hospital allows fewer rounds than it has.
        """
        sentences = []
        active = self._active()
        if len(active) < self.schedule.quorum:
            sentences.append(
                f"{len(active)} hospitals of a quorum of {self.schedule.quorum} still take part: "
                "the study ended before its last round."
            )
        elif self.finished and self._is_waiting():
            is_early = any(one.num_tasks < self.schedule.rounds for one in active.values())
            sentences.append(
                f"fewer hospitals than a quorum of {self.schedule.quorum} answered their last "
                f"request{': the study ended before its last round' if is_early else ''}."
            )
        if self.finished and self.place is None:
            sentences += [
                f"{name} has not answered its last request: a change that it has paid for may be "
                "missing."
                for name, member in active.items()
                if member.is_silent and member.can_repeat
            ]
        further = {name: self.schedule.rounds - member.num_tasks for name, member in active.items()}
        sentences += [
            f"{name} allows {left} further rounds of {further[name]}: agree on one number."
            for name, left in self.rounds_left.items()
            if name in further and left < further[name]
        ]
        if self.place is not None and self.finished:
            missing = [name for name in self.factors if name not in self.sums]
            if missing:
                sentences.append(
                    f"{', '.join(missing)} gave no sums in the last phase: the calibrated "
                    "posterior is that of the other hospitals' records."
                )
        if not self.history:
            return tuple(sentences)
        moved, stretched = movement(self._before_last_round(), self.history[-1].posterior)
        remedy = (
            "Read the intervals of the calibrated posterior alone."
            if self.sums or self.terms.agreed_sum is not None
            else "Do not trust its intervals; use more rounds, a smaller damping, or more records."
        )
        possible = {
            f"moved a mean by {moved:.2g} of its standard deviations": moved > _MOST_MOVED,
            f"changed a standard deviation by a factor of {stretched:.2g}": (
                stretched > _MOST_STRETCHED
            ),
        }
        faults = [fault for fault, is_there in possible.items() if is_there]
        if faults:
            sentences.append(
                f"the last round of updates still {' and '.join(faults)}: the posterior may not "
                f"have settled, or is narrower than the noise\nfor privacy. {remedy}"
            )
        step = 1 if self.schedule.waits and not self.schedule.one_by_one else len(active) or 1
        ends = [update.posterior for update in self.history][::-1][::step][::-1]
        gone = drift([self.terms.prior, *ends])
        if gone:
            uses = "InformationOptimizer" in self.terms.settings.get("optimizer", "")
            other = "" if uses else ", or InformationOptimizer"
            sentences.append(
                "over the last half of the rounds a mean went on in one direction, by "
                f"{gone:.2g} of its standard deviations:\nit has not settled. Use more rounds, "
                f"or a larger damping{other}."
            )
        return tuple(sentences)

    def _before_last_round(self) -> Factor:
        """Returns the posterior before the last updates of all hospitals that still answer."""
        answering = self._answering() or self.factors
        latest = {
            name: place
            for place, update in enumerate(self.history)
            for name in update.hospitals
            if name in answering
        }
        place = min(latest.values(), default=len(self.history) - 1)
        return self.history[place - 1].posterior if place else self.terms.prior

    # ------------------------------------------------------------------ whom to ask

    def join(self, hospital: str) -> None:
        """Takes a hospital into the study, at factor 1 and in the present round.

        A hospital that left comes back to its factor.
        """
        check.text("hospital", hospital, "pass a hospital's name")
        if hospital not in self._members:
            rounds = [member.num_tasks for member in self._answering().values()]
            prior = self.terms.prior
            self._members[hospital] = Member(
                Factor.one(prior.num, full_rank=prior.full_rank),
                num_tasks=min(rounds, default=0),
            )
            self._save()
        elif self._members[hospital].is_dropped:
            _LOG.warning("%s was dropped, and does not come back.", hospital)

    def _active(self) -> dict[str, Member]:
        """Returns the hospitals that take part."""
        return {name: member for name, member in self._members.items() if member.takes_part}

    def _answering(self) -> dict[str, Member]:
        """Returns the hospitals that answered last time, or all that take part if none did."""
        active = self._active()
        return {name: member for name, member in active.items() if not member.is_silent} or active

    def _under_way(self) -> list[str]:
        """Returns the hospitals whose reply is awaited."""
        return [name for name, member in self._members.items() if member.is_under_way]

    def _is_waiting(self) -> bool:
        """Returns whether fewer hospitals than the quorum are present."""
        return sum(member.is_present for member in self._active().values()) < self.schedule.quorum

    def _may_come_back(self) -> bool:
        """Returns whether the quorum is missed by hospitals that are silent alone."""
        return self._is_waiting() and len(self._active()) >= self.schedule.quorum

    def _next(self) -> list[str]:
        """Returns the hospitals to ask now."""
        if self._resends and self._under_way():
            return self._under_way()
        in_rounds = self._next_in_rounds() if self.place is None else []
        return in_rounds or self._next_for_sums() or self._next_owed()

    def _next_in_rounds(self) -> list[str]:
        """Returns the hospitals to ask for a change now."""
        active, last = self._active(), self.schedule.rounds
        waiting = self._is_waiting()
        if len(active) < self.schedule.quorum or (
            self._under_way() and (self.schedule.waits or waiting)
        ):
            return []
        free = {name: member for name, member in active.items() if member.is_free}
        if waiting:  # Only for those that are missing, and again with the same request.
            ready = [
                name
                for name, member in free.items()
                if not member.is_present and (member.can_repeat or member.num_tasks < last)
            ]
        elif self._rounds_are_over():
            return []
        else:
            first = min(member.num_tasks for member in self._answering().values())
            until = min(last, first + self.schedule.most_ahead)
            ready = [name for name, member in free.items() if member.num_tasks < until]
        least = sorted(ready, key=lambda name: active[name].num_tasks)
        if not self.schedule.one_by_one:
            return ready
        # One that never comes back keeps none of the others waiting.
        repeated = [name for name in least if waiting and active[name].can_repeat]
        return repeated + [name for name in least if name not in repeated][:1]

    def _rounds_are_over(self) -> bool:
        """Returns whether no hospital is asked for a new change any more."""
        if self._is_waiting():
            return not self._may_come_back()
        answering = self._answering().values()
        # One that is away is not waited for.
        return not any(
            member.is_under_way or member.num_tasks < self.schedule.rounds for member in answering
        )

    @property
    def is_closing(self) -> bool:
        """True once no new change is due: hospitals may have kept what they are asked for now."""
        return self.place is not None or (self._rounds_are_over() and not self._has_last_phase())

    def _has_last_phase(self) -> bool:
        """Returns whether hospitals are asked for their sums, now or after the rounds."""
        # Those of a trusted sum are for an `Aggregation` alone.
        has_sums = bool(self.terms.sums and self.history) and self.terms.agreed_sum is None
        return has_sums and (self.place is not None or not self._is_waiting())

    def _next_owed(self) -> list[str]:
        """Returns the hospitals that may have kept the change of their last round, and are away.

        They are asked for it again before a study without a last phase ends: one that was to make
        it makes it now. In a study with a last phase they give it there.
        """
        if self._has_last_phase() or self._under_way() or not self._rounds_are_over():
            return []
        return [
            name
            for name, member in self._active().items()
            if member.is_silent and member.can_repeat and member.num_repeats < _MOST_ASKED
        ]

    def _next_for_sums(self) -> list[str]:
        """Returns the hospitals to ask for their sums: once all rounds are over."""
        if not self._has_last_phase() or (self.place is None and self._under_way()):
            return []
        # One that has kept its sums gives them when it is back: it has paid for them.
        waits = self._may_come_back()
        return [
            name
            for name, member in self._active().items()
            if member.sums is None
            and not member.is_under_way
            and (member.num_asked_for_sums < _MOST_ASKED or (waits and member.can_repeat))
        ]

    def due(self) -> list[Task]:
        """Returns the tasks to send now; each counts as sent."""
        if self.place is None and self._next_for_sums() and not self._next_in_rounds():
            self.place = self.posterior
        tasks, owed = [self._task(hospital) for hospital in self._next()], self._next_owed()
        for task in tasks:
            member = self._members[task.hospital].asked(task)
            is_owed = task.hospital in owed
            self._members[task.hospital] = (
                member.asked_at_the_end(self.schedule.rounds) if is_owed else member
            )
        self._resends = False
        if tasks:
            self._save()
        return tasks

    def _task(self, hospital: str) -> Task:
        """Returns the last task if it is to be sent again, else a new one."""
        member, last = self._members[hospital], self.place is not None
        # After a restart or a drop, one is asked whose reply is awaited.
        if member.is_under_way:
            return member.unanswered[-1]
        if self._may_come_back() and member.can_repeat:
            _LOG.warning(
                "%s is asked again, since fewer than quorum=%d hospitals answer: the study waits. "
                "`drop`, or a smaller quorum, ends the wait.",
                hospital,
                self.schedule.quorum,
            )
            return member.unanswered[-1]
        if hospital in self._next_owed():
            return member.unanswered[-1]
        posterior = self.posterior if self.place is None else self.place
        return Task(
            self.terms.identity,
            hospital,
            uuid.uuid4().hex,
            member.num_tasks,
            posterior,
            cavity=posterior if last else posterior / member.factor,
            unanswered=tuple(earlier.request for earlier in member.unanswered),
            last=last,
        )

    # ------------------------------------------------------------------ what comes back

    def receive(self, sender: str, message: bytes) -> bool:
        """Takes a reply. One that is refused changes no factor and is named in `refused`.

        A reply to a request that was given up is taken as long as the hospital has answered no
        later one.

        Args:
          sender: Name of the hospital whose key the transport has verified.
          message: A `Reply` as bytes.

        Returns:
          Whether the reply was taken.
        """
        try:
            reply = Reply.from_bytes(message, self.terms)
            need(sender in self.factors, f"hospital {sender!r} is not in the study.")
            member = self._members[sender]
            need(
                reply.hospital == sender,
                f"it is signed {reply.hospital!r}, and {sender!r} sent it.",
            )
            if member.answered_request == reply.request:
                return False  # A repeated one, as slow hospitals send.
            task = self._task_of(reply)
            self._check_sums(sender, task, reply)
        except MessageError as error:
            self.refuse(sender, str(error))
            return False
        if member.epsilon is None:
            self._compare_rounds(reply)
        # The others have ended without it: none is left to correct what further rounds would say.
        last = self.schedule.rounds if member.is_silent and self._rounds_are_over() else 0
        num_tasks = max(member.num_tasks, last)
        self._members[sender] = dataclasses.replace(member.answered(reply), num_tasks=num_tasks)
        if reply.change is not None:
            self._hold(task, reply.change)
        elif reply.sums is None:
            _LOG.warning("%s declines: %s", sender, reply.reason)
        self._end_request()
        return True

    def _task_of(self, reply: Reply) -> Task:
        """Returns the task that a reply answers; refuses one that answers none."""
        asked = {
            task.request: task for member in self._members.values() for task in member.unanswered
        }
        request = f"request {reply.request!r}"
        need(reply.request in asked, f"{request} is not open: it was answered, or never sent.")
        task = asked[reply.request]
        need(task.hospital == reply.hospital, f"{request} went to another hospital.")
        need(reply.number == task.number, f"number={reply.number} is not that of the request.")
        return task

    def _check_sums(self, sender: str, task: Task, reply: Reply) -> None:
        """Refuses sums that were not asked for, or that are not like the other hospitals'."""
        sums = reply.sums
        need(sums is None or task.last, "it has sums, and a change was asked for.")
        need(reply.change is None or not task.last, "it has a change, and sums were asked for.")
        if sums is None:
            return
        cap = self._caps.get(sender)
        need(
            cap is None or sums.num_records == cap.num_records,
            f"its sums are of {sums.num_records} records, and it has declared others.",
        )
        for name, other in self.sums.items():
            need(
                sums.agrees(other),
                f"its sums are in other coordinates than those of {name}: agree on one version of "
                "this library, and on the public inputs.",
            )

    def _hold(self, task: Task, change: Factor) -> None:
        """Holds the part of a change that the hospital's declared records can account for."""
        cap, own = self._caps.get(task.hospital), task.posterior / task.cavity
        share = 1.0 if cap is None else cap.share(task.cavity, own, change)
        self._members[task.hospital] = dataclasses.replace(
            self._members[task.hospital],
            held=(change**share) ** self.schedule.share(task.number),
            held_share=share,
        )

    def _compare_rounds(self, reply: Reply) -> None:
        """Warns where a hospital, which answers for the first time, allows other rounds."""
        planned = self.schedule.rounds - reply.number
        allowed = planned if reply.rounds_left is None else reply.rounds_left + 1
        if reply.change is not None and allowed != planned:
            _LOG.warning(
                "%s allows %d rounds and the study has %d: %s. Agree on one number.",
                reply.hospital,
                allowed,
                planned,
                "its noise is for more rounds than there are"
                if allowed > planned
                else "it leaves before the end",
            )

    def refuse(self, hospital: str, reason: str) -> None:
        """Notes a hospital's message that was refused, or its refusal of a task.

        Its request is not repeated: the next one is new.

        Args:
          hospital: Name of the hospital.
          reason: A sentence; of untrusted text the first 300 printable characters are kept.
        """
        kept = "".join(letter if letter.isprintable() else " " for letter in reason)[:MOST_TEXT]
        self.refused.append(f"{hospital}: {kept}")
        if hospital in self._members:
            self._members[hospital] = dataclasses.replace(self._members[hospital], is_refused=True)
        _LOG.warning("A message of %s is refused: %s", hospital, kept)
        self._end_request()

    def awaits(self, request: str) -> bool:
        """Returns whether the answer to a request is awaited, and neither given up nor dropped.

        Args:
          request: Name of the request, `Task.request`.

        ```python
        >>> import numpy as np
        >>> terms = StudyTerms("heights", Factor.normal(np.zeros(1), np.ones(1)))
        >>> server = Server(terms, ["berlin"], Synchronous(rounds=1))
        >>> (task,) = server.due()
        >>> server.awaits(task.request)
        True

        ```
        """
        return any(member.awaits(request) for member in self._members.values())

    def give_up(self, request: str) -> None:
        """Waits no longer for an answer; one that comes later is still taken.

        The hospital's factor stays, and it is asked again in the next round.
        """
        for name, member in self._members.items():
            if member.awaits(request) and not self._resends:
                self._members[name] = dataclasses.replace(
                    member, is_under_way=False, is_silent=True
                )
                self._end_request()

    def _take_held(self) -> None:
        """Applies the changes that are held, if all who were waited for have answered."""
        must_wait = self._under_way() and (self.schedule.waits or self._resends)
        # Where none is waited for any more, what was paid for is taken.
        is_waiting = self._may_come_back() and not self.finished
        if self._held() and not must_wait and not is_waiting:
            self._settle()

    def _end_request(self) -> None:
        """Takes what is held, saves, and says what to read if the study has ended."""
        self._take_held()
        self._save()
        if self.finished:
            for sentence in self.caveats:
                _LOG.warning("%s", sentence)

    def _held(self) -> dict[str, Factor]:
        """Returns the changes that are not in a factor yet."""
        return {
            name: member.held for name, member in self._members.items() if member.held is not None
        }

    def _settle(self) -> None:
        """Applies the changes that are held."""
        changes, before = self._held(), self.posterior
        shares = guards(before, changes, self.factors, self.terms.floor)
        taken = {name: share * self._members[name].held_share for name, share in shares.items()}
        limited = {name: share for name, share in taken.items() if share < 1.0}
        for name, change in changes.items():
            factor = self._members[name].factor * change ** shares[name]
            self._members[name] = dataclasses.replace(self._members[name], factor=factor, held=None)
        for name, share in limited.items():
            _LOG.warning("Only a share of %.3g of the change of %s is taken.", share, name)
        if self._refine_prior is not None:  # Site 0: no record is touched.
            posterior = self.posterior
            change = self._refine_prior(posterior / self.prior, self.prior) / self.prior
            self.prior *= change ** guard(posterior, change, self.terms.floor)
        self._note(before, tuple(changes), min(shares.values()), limited)

    def _note(
        self, before: Factor, hospitals: tuple[str, ...], share: float, limited: dict[str, float]
    ) -> None:
        """Adds an update to the history."""
        after, now = self.posterior, time.monotonic()
        self.history.append(
            Round(
                number=len(self.history) + 1,
                hospitals=hospitals,
                change=(after / before).norm,
                guard=share,
                epsilon=self.epsilon,
                evaluation=None if self._evaluate is None else float(self._evaluate(after)),
                posterior=after,
                factors=self.factors,
                seconds=now - self._since,
                limited=limited,
            )
        )
        self._since = now

    # ------------------------------------------------------------------ without a hospital

    def _others(self, hospital: str) -> dict[str, Factor]:
        """Returns the others' factors, weakened if they are improper without this one's."""
        others = self.factors
        if hospital not in others:
            raise ValueError(
                f"hospital={hospital!a} is not in the study: pass one of {sorted(others)}."
            )
        del others[hospital]
        together = list(others.values())
        share = guard(self.prior, product(together), self.terms.floor) if together else 1.0
        return {name: factor**share for name, factor in others.items()}

    def without(self, hospital: str) -> Factor:
        """Returns the posterior of all hospitals but one, for nothing: who moves it, and whereto.

        The others' factors stand as they are, though they were refined beside this one's.

        Args:
          hospital: Name of the hospital.

        Raises:
          ValueError: It is not in the study.
        """
        return product([self.prior, *self._others(hospital).values()])

    def drop(self, hospital: str) -> None:
        """Takes a hospital and its factor out of the study, for good.

        What it has spent stays spent. Its further messages are refused. Sums of the others that
        were refused because they did not agree with its own are asked for again.

        Args:
          hospital: Name of the hospital.

        Raises:
          ValueError: It is not in the study.
        """
        before = self.posterior
        for name, factor in self._others(hospital).items():
            self._members[name] = dataclasses.replace(self._members[name], factor=factor)
        self._members[hospital] = self._members[hospital].dropped()
        # Sums that were refused beside this hospital's are repeated, and not paid for again.
        for name, member in self._members.items() if self.place is not None else ():
            if member.takes_part and member.unanswered:
                self._members[name] = dataclasses.replace(member, is_under_way=True)
                self._resends = True
        self._note(before, (), 1.0, {})
        self._end_request()

    # ------------------------------------------------------------------ its state

    def _state(self) -> State:
        """Returns all that a server knows beside its terms and its history."""
        return State(
            study=self.terms.identity,
            schedule=self.schedule,
            prior=self.prior,
            place=self.place,
            refused=self.refused,
            hospitals=self._members,
        )

    def _save(self) -> None:
        if self._store is not None:
            self._store.write(self._state(), self.history)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a copy of the state, for `load`; a server with a folder saves itself there.

        Args:
          folder: Path of the folder, which is made if it is not there.
        """
        Store(folder).write(self._state(), self.history)

    @classmethod
    def load(
        cls,
        folder: str | os.PathLike[str],
        terms: StudyTerms,
        *,
        schedule: Schedule | None = None,
        evaluate: Callable[[Factor], float] | None = None,
        refine_prior: Callable[[Factor, Factor], Factor] | None = None,
        num_records: Mapping[str, int] | None = None,
    ) -> Server:
        """Continues the study of a folder, and saves itself there.

        Requests that were under way are due again, unchanged: a hospital that has answered one
        repeats its reply, for which it does not pay again.

        Args:
          folder: Path of the folder.
          terms: Terms of the study.
          schedule: Another schedule from here on; None for that of the folder.
          evaluate: See `Server`.
          refine_prior: See `Server`.
          num_records: See `Server`.

        Raises:
          ValueError: The folder holds no study, or that of other terms.
        """
        store = Store(folder)
        state, history = store.read(terms)
        server = cls(
            terms,
            None,
            schedule or state.schedule,
            evaluate=evaluate,
            refine_prior=refine_prior,
            num_records=num_records,
        )
        server.prior, server.place = state.prior, state.place
        server.refused, server.history = state.refused, history
        server._members, server._store = state.hospitals, store
        server._resends = True
        server._take_held()  # Of a smaller quorum, enough may have answered.
        return server


def _names(hospitals: Iterable[str] | None) -> list[str]:
    """Returns the hospitals' names, checked as a whole; none for None."""
    if isinstance(hospitals, str):
        warnings.warn(
            f"hospitals={hospitals!a:.99} is a text, whose letters are taken as names: pass a list "
            f"of names, such as [{hospitals!a:.99}]; from 0.4 on a text is refused.",
            FutureWarning,
            stacklevel=3,
        )
    names = [] if hospitals is None else list(hospitals)
    if not names and hospitals is not None:
        warnings.warn(
            "hospitals is empty: pass None if all of them join later; from 0.4 on it is refused.",
            FutureWarning,
            stacklevel=3,
        )
    return names


def _caps(terms: StudyTerms, num_records: Mapping[str, int]) -> dict[str, Cap]:
    """Returns the cap of each hospital that has declared its number of records."""
    if num_records and terms.clip is None:
        raise ValueError("num_records needs a study with a clip, by which a record says so much.")
    numbers = {name: check.count("num_records", num, 1) for name, num in num_records.items()}
    return {
        name: Cap(num, terms.clip or 0.0, terms.start_precision) for name, num in numbers.items()
    }
