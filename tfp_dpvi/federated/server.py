"""The server: it holds a prior and a factor of each hospital, and no record.

The product of prior and factors is the posterior.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Cap, Factor, drift, guard, guards, movement, product
from tfp_dpvi.federated.messages import (
    MOST_TEXT,
    MOST_UNANSWERED,
    MessageError,
    Reply,
    StudyTerms,
    Task,
    need,
)
from tfp_dpvi.federated.saved import Round, State, Store
from tfp_dpvi.federated.schedules import Asynchronous, Schedule, Sequential, Synchronous
from tfp_dpvi.federated.sums import SiteSums

__all__ = ["Asynchronous", "Round", "Schedule", "Sequential", "Server", "Synchronous"]

_LOG = logging.getLogger("tfp_dpvi")
# Standard deviations of a mean by which a last round may move a posterior, and the factor by which
# it may change a standard deviation.
_MOST_MOVED = 1.0
_MOST_STRETCHED = 2.0
# How often a hospital that does not answer is asked for its sums.
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
      hospitals: Their names, in the order of a sequential schedule.
      schedule: When to ask whom, for instance `Synchronous(rounds=10)`.
      evaluate: Maps a posterior to a number to show after each update, from public data alone.
      refine_prior: Maps a cavity and the present factor to the factor that stands for a prior which
        is not normal; it touches no record.
      num_records: The number of records that each hospital has declared. A change that goes beyond
        what so many records can say is scaled down, and its hospital is named: see `Cap`.
      folder: Folder in which the server keeps its state, all of it public; None for memory.

    Raises:
      ValueError: The folder holds a study already, which `load` continues; or `num_records` is
        given, and the study has no clip.

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
        num_records: Mapping[str, int] | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self.terms, self.schedule = terms, schedule
        self.prior = terms.prior  # Or the factor that stands for it at present.
        self.factors: dict[str, Factor] = {}
        self.epsilon: dict[str, float] = {}  # Epsilon that each hospital reports.
        self.randomness: dict[str, str] = {}  # The generator that each reports; see `Reply`.
        self.rounds_left: dict[str, int] = {}  # Rounds that each still allows.
        self.retired: dict[str, str] = {}  # Hospitals that declined, and why; their factors stay.
        self.refused: list[str] = []  # Messages, and why.
        self.history: list[Round] = []
        self.sums: dict[str, SiteSums] = {}  # Of each hospital, in the last phase.
        self.place: Factor | None = None  # At whose mean they are; set when that phase begins.
        self._evaluate, self._refine_prior = evaluate, refine_prior
        self._asked: dict[str, int] = {}
        self._unanswered: dict[str, list[Task]] = {}  # Tasks whose replies are still welcome.
        self._open: dict[str, str] = {}  # Hospital -> request that is under way.
        self._again: set[str] = set()  # Hospitals whose request was under way when it was saved.
        self._answered: dict[str, str] = {}  # The request that each hospital answered last.
        self._held: dict[str, Factor] = {}
        self._capped: dict[str, float] = {}  # Shares of held changes that a cap has left.
        self._silent: set[str] = set()  # Hospitals whose last request was given up.
        self._refusing: set[str] = set()  # Hospitals whose message after it was refused.
        self._since = time.monotonic()
        self._store: Store | None = None
        self._caps = _caps(terms, num_records or {})
        for hospital in hospitals:
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
    def posterior(self) -> Factor:
        """The product of prior and factors."""
        return product([self.prior, *self.factors.values()])

    @property
    def finished(self) -> bool:
        """True if no task is due and no request is open."""
        return not self._open and not self._next()

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences to read before `posterior`, from public values; they are logged at the end.

        One is there if the last round still moved the posterior. A round is an update of each
        hospital that still answers, in whatever order the schedule asks. It may move a mean by one
        standard deviation of the posterior, and change a standard deviation by a factor of two.
        One is there if a mean goes on in one direction and has more than a standard deviation to
        go: hospitals of unlike records have not agreed yet. One is there if
        the study ended below its quorum, or if a hospital allows fewer rounds than it has.
        """
        sentences = []
        active = self._active()
        if len(active) < self.schedule.quorum:
            sentences.append(
                f"{len(active)} hospitals of a quorum of {self.schedule.quorum} still take part: "
                "the study ended before its last round."
            )
        for name, left in self.rounds_left.items():
            if name in active and left < self.schedule.rounds - self._asked[name]:
                further = self.schedule.rounds - self._asked[name]
                sentences.append(
                    f"{name} allows {left} further rounds of {further}: agree on one number."
                )
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
        faults = []
        if moved > _MOST_MOVED:
            faults.append(f"moved a mean by {moved:.2g} of its standard deviations")
        if stretched > _MOST_STRETCHED:
            faults.append(f"changed a standard deviation by a factor of {stretched:.2g}")
        if faults:
            sentences.append(
                f"the last round of updates still {' and '.join(faults)}: the posterior may not "
                f"have settled, or is narrower than the noise\nfor privacy. {remedy}"
            )
        step = 1 if self.schedule.waits and not self.schedule.one_by_one else len(active) or 1
        ends = [update.posterior for update in self.history][::-1][::step][::-1]
        gone = drift([self.terms.prior, *ends])
        if gone:
            sentences.append(
                "over the last half of the rounds a mean went on in one direction, by "
                f"{gone:.2g} of its standard deviations:\nit has not settled. Use more rounds, "
                "a larger damping, or InformationOptimizer."
            )
        return tuple(sentences)

    def _before_last_round(self) -> Factor:
        """Returns the posterior before the last updates of all hospitals that still answer."""
        answering = set(self._answering() or self.factors)
        missing = {name for update in self.history for name in update.hospitals} & answering
        for place in range(len(self.history) - 1, -1, -1):
            missing -= set(self.history[place].hospitals)
            if not missing:
                break
        return self.history[place - 1].posterior if place else self.terms.prior

    # ------------------------------------------------------------------ whom to ask

    def join(self, hospital: str) -> None:
        """Takes a hospital into the study, at factor 1 and in the present round.

        A hospital that left comes back to its factor.
        """
        check.text("hospital", hospital, "pass a hospital's name")
        if hospital in self.retired and hospital not in self.factors:
            _LOG.warning("%s was dropped, and does not come back.", hospital)
        elif hospital not in self.factors:
            rounds = [self._asked[name] for name in self._answering()]
            self._asked[hospital] = min(rounds, default=0)
            prior = self.terms.prior
            self.factors[hospital] = Factor.one(prior.num, full_rank=prior.full_rank)
            self._save()

    def _active(self) -> list[str]:
        """Returns the hospitals that have not declined."""
        return [name for name in self.factors if name not in self.retired]

    def _answering(self) -> list[str]:
        """Returns the hospitals that answered last time, or all that take part if none did."""
        active = self._active()
        return [name for name in active if name not in self._silent] or active

    def _is_present(self, hospital: str) -> bool:
        """Returns whether a hospital has ever answered, and answered its last request."""
        return hospital in self.epsilon and hospital not in self._silent

    def _is_waiting(self) -> bool:
        """Returns whether fewer hospitals than the quorum are present."""
        return sum(map(self._is_present, self._active())) < self.schedule.quorum

    def _can_repeat(self, hospital: str) -> bool:
        """Returns whether a hospital's last task is unanswered, and was not refused."""
        return bool(self._unanswered.get(hospital)) and hospital not in self._refusing

    def _next(self) -> list[str]:
        """Returns the hospitals to ask now."""
        if self._again:
            return [name for name in self.factors if name in self._again]
        return (self._next_in_rounds() if self.place is None else []) or self._next_for_sums()

    def _next_for_sums(self) -> list[str]:
        """Returns the hospitals to ask for their sums: once all rounds are over."""
        active = self._active()
        is_first = self.place is None
        if not self.terms.sums or not self.history or (self._open and is_first):
            return []
        if self.terms.agreed_sum is not None:  # They are for an `Aggregation` alone.
            return []
        if is_first and (len(active) < self.schedule.quorum or self._is_waiting()):
            return []
        return [
            name
            for name in active
            if name not in self.sums
            and name not in self._open
            and sum(task.last for task in self._unanswered.get(name, [])) < _MOST_ASKED
        ]

    def _next_in_rounds(self) -> list[str]:
        """Returns the hospitals to ask for a change now."""
        active, last = self._active(), self.schedule.rounds
        waiting = self._is_waiting()
        if len(active) < self.schedule.quorum or (self._open and (self.schedule.waits or waiting)):
            return []
        free = [name for name in active if name not in self._open and name not in self._held]
        if waiting:  # Only for those that are missing, and again with the same request.
            absent = [name for name in free if not self._is_present(name)]
            ready = [name for name in absent if self._can_repeat(name) or self._asked[name] < last]
        else:
            answering = self._answering()
            first = min(self._asked[name] for name in answering)
            # The study ends without a hospital that is away.
            if first >= last and self._open.keys().isdisjoint(answering):
                return []
            until = min(last, first + self.schedule.most_ahead)
            ready = [name for name in free if self._asked[name] < until]
        return sorted(ready, key=self._asked.__getitem__)[:1] if self.schedule.one_by_one else ready

    def due(self) -> list[Task]:
        """Returns the tasks to send now; each counts as sent."""
        names = self._next()
        if names and not self._again and self.place is None and not self._next_in_rounds():
            self.place = self.posterior
        tasks = [self._task(hospital) for hospital in names]
        self._again = set()
        self._open.update({task.hospital: task.request for task in tasks})
        if tasks:
            self._save()
        return tasks

    def _task(self, hospital: str) -> Task:
        """Returns the last task if it is to be repeated, else a new one."""
        tasks = self._unanswered.setdefault(hospital, [])
        last = self.place is not None
        repeats = not last and self._is_waiting() and self._can_repeat(hospital)
        if hospital in self._again or repeats:
            return tasks[-1]
        posterior = self.posterior if self.place is None else self.place
        task = Task(
            self.terms.identity,
            hospital,
            uuid.uuid4().hex,
            self._asked[hospital],
            posterior,
            cavity=posterior if last else posterior / self.factors[hospital],
            unanswered=tuple(earlier.request for earlier in tasks),
            last=last,
        )
        self._asked[hospital] += 1
        self._refusing.discard(hospital)
        self._unanswered[hospital] = [*tasks, task][-MOST_UNANSWERED:]
        return task

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
            need(
                reply.hospital == sender,
                f"it is signed {reply.hospital!r}, and {sender!r} sent it.",
            )
            tasks = {task.request: task for task in self._unanswered.get(sender, [])}
            if self._answered.get(sender) == reply.request:
                return False  # A repeated one, as slow hospitals send.
            known = {task.request for several in self._unanswered.values() for task in several}
            need(
                reply.request in tasks or reply.request not in known,
                f"request {reply.request!r} went to another hospital.",
            )
            need(
                reply.request in tasks,
                f"request {reply.request!r} is not open: it was answered, or never sent.",
            )
            need(
                reply.number == tasks[reply.request].number,
                f"number={reply.number} is not that of the request.",
            )
            self._check_sums(sender, tasks[reply.request], reply)
        except MessageError as error:
            self.refuse(sender, str(error))
            return False
        if sender not in self.epsilon:
            self._compare_rounds(reply)
        self.epsilon[sender], self.randomness[sender] = reply.epsilon, reply.randomness
        if reply.rounds_left is not None:
            self.rounds_left[sender] = reply.rounds_left
        if reply.sums is not None:
            self.sums[sender] = reply.sums
        elif reply.change is None:
            _LOG.warning("%s declines: %s", sender, reply.reason)
            self.retired[sender] = reply.reason
        else:
            self._held[sender] = self._within_cap(sender, tasks[reply.request], reply.change)
            self._held[sender] **= self.schedule.share(reply.number)
        self._silent.discard(sender)
        self._refusing.discard(sender)
        self._unanswered[sender] = []
        self._answered[sender] = reply.request
        self._open.pop(sender, None)
        self._end_request()
        return True

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

    def _within_cap(self, hospital: str, task: Task, change: Factor) -> Factor:
        """Returns the part of a change that the hospital's declared records can account for."""
        cap = self._caps.get(hospital)
        if cap is None:
            return change
        share = cap.share(task.cavity, task.posterior / task.cavity, change)
        if share < 1.0:
            self._capped[hospital] = share
        return change**share

    def _compare_rounds(self, reply: Reply) -> None:
        """Warns where a hospital, which answers for the first time, allows other rounds."""
        planned = self.schedule.rounds - reply.number
        allowed = planned if reply.rounds_left is None else reply.rounds_left + 1
        if reply.change is not None and allowed != planned:
            more = (
                "its noise is for more rounds than there are"
                if allowed > planned
                else ("it leaves before the end")
            )
            _LOG.warning(
                "%s allows %d rounds and the study has %d: %s. Agree on one number.",
                reply.hospital, allowed, planned, more,
            )  # fmt: skip

    def refuse(self, hospital: str, reason: str) -> None:
        """Notes a hospital's message that was refused, or its refusal of a task.

        Its request is not repeated: the next one is new.

        Args:
          hospital: Name of the hospital.
          reason: A sentence; of untrusted text the first 300 printable characters are kept.
        """
        kept = "".join(letter if letter.isprintable() else " " for letter in reason)[:MOST_TEXT]
        self.refused.append(f"{hospital}: {kept}")
        self._refusing.add(hospital)
        _LOG.warning("A message of %s is refused: %s", hospital, kept)

    def give_up(self, request: str) -> None:
        """Waits no longer for an answer; one that comes later is still taken.

        The hospital's factor stays, and it is asked again in the next round.
        """
        for hospital in [name for name, under_way in self._open.items() if under_way == request]:
            self._silent.add(hospital)
            del self._open[hospital]
            self._end_request()

    def _end_request(self) -> None:
        """Applies the changes that are held, if all who were waited for have answered."""
        if (
            self._held
            and not (self._open and self.schedule.waits)
            and not self._again
            and not self._is_waiting()
        ):
            self._settle()
        self._save()
        if self.finished:
            for sentence in self.caveats:
                _LOG.warning("%s", sentence)

    def _settle(self) -> None:
        """Applies the changes that are held."""
        changes, before = self._held, self.posterior
        self._held = {}
        shares = guards(before, changes, self.factors, self.terms.floor)
        for hospital, change in changes.items():
            self.factors[hospital] *= change ** shares[hospital]
        taken = {name: share * self._capped.get(name, 1.0) for name, share in shares.items()}
        limited = {name: share for name, share in taken.items() if share < 1.0}
        self._capped = {}
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
        update = Round(
            number=len(self.history) + 1,
            hospitals=hospitals,
            change=(after / before).norm,
            guard=share,
            epsilon=dict(self.epsilon),
            evaluation=None if self._evaluate is None else float(self._evaluate(after)),
            posterior=after,
            factors=dict(self.factors),
            seconds=now - self._since,
            limited=limited,
        )
        self.history.append(update)
        self._since = now

    # ------------------------------------------------------------------ without a hospital

    def _others(self, hospital: str) -> dict[str, Factor]:
        """Returns the others' factors, weakened if they are improper without this one's."""
        if hospital not in self.factors:
            raise ValueError(
                f"hospital={hospital!a} is not in the study: pass one of {sorted(self.factors)}."
            )
        others = {name: factor for name, factor in self.factors.items() if name != hospital}
        if not others:
            return {}
        share = guard(self.prior, product(list(others.values())), self.terms.floor)
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

        What it has spent stays spent. Its further messages are refused.

        Args:
          hospital: Name of the hospital.

        Raises:
          ValueError: It is not in the study.
        """
        before = self.posterior
        self.factors = self._others(hospital)
        self.retired[hospital] = "it was dropped."
        kept_by_name = (self._open, self._unanswered, self._held, self._capped, self._asked)
        for kept in (*kept_by_name, self.sums):
            kept.pop(hospital, None)
        self._again.discard(hospital)
        self._note(before, (), 1.0, {})
        self._end_request()

    # ------------------------------------------------------------------ its state

    def _state(self) -> State:
        """Returns all that a server knows beside its terms and its history."""
        return State(
            study=self.terms.identity,
            schedule=self.schedule,
            prior=self.prior,
            factors=self.factors,
            epsilon=self.epsilon,
            randomness=self.randomness,
            rounds_left=self.rounds_left,
            retired=self.retired,
            refused=self.refused,
            asked=self._asked,
            unanswered=self._unanswered,
            under_way=sorted({*self._open, *self._again}),
            held=self._held,
            capped=self._capped,
            silent=sorted(self._silent),
            refusing=sorted(self._refusing),
            place=self.place,
            sums=self.sums,
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
            [],
            schedule or state.schedule,
            evaluate=evaluate,
            refine_prior=refine_prior,
            num_records=num_records,
        )
        names = ("prior", "factors", "epsilon", "randomness", "rounds_left", "retired", "refused")
        for name in names:
            setattr(server, name, getattr(state, name))
        server.history = history
        server.place, server.sums = state.place, state.sums
        server._asked, server._unanswered = state.asked, state.unanswered
        server._held, server._again = state.held, set(state.under_way)
        server._capped = state.capped
        server._silent, server._refusing = set(state.silent), set(state.refusing)
        server._store = store
        return server


def _caps(terms: StudyTerms, num_records: Mapping[str, int]) -> dict[str, Cap]:
    """Returns the cap of each hospital that has declared its number of records."""
    if num_records and terms.clip is None:
        raise ValueError("num_records needs a study with a clip, by which a record says so much.")
    numbers = {name: check.count("num_records", num, 1) for name, num in num_records.items()}
    clip, start = terms.clip or 0.0, terms.start_precision
    return {name: Cap(num, clip, start) for name, num in numbers.items()}
