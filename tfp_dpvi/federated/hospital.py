"""A hospital: it holds its records, refines its factor when asked, and pays for every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
import pathlib
import threading

import numpy as np
from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import check_randomness
from tfp_dpvi._tf import Structure
from tfp_dpvi.bayes.units import PERSONS_ASSUME
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.messages import MOST_TEXT, MessageError, Reply, Task, need
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.release import LocalRelease, ReleaseSettings, StepRelease
from tfp_dpvi.federated.saved import replace_file
from tfp_dpvi.federated.study import Study
from tfp_dpvi.federated.sums import SiteSums
from tfp_dpvi.federated.trusted import AgreedSum
from tfp_dpvi.federated.weights import WEIGHTS_CAVEAT
from tfp_dpvi.federated.window import SHARE, WindowRelease
from tfp_dpvi.privacy import (
    BudgetExhaustedError,
    LedgerError,
    PrivacyLedger,
    PrivacyPlan,
    PrivacyReport,
    SumPrices,
)
from tfp_dpvi.privacy.plan import calibrate_together

_LOG = logging.getLogger("tfp_dpvi")

CAVEATS = (
    "a person with records in two hospitals of the study is protected by each hospital's epsilon "
    "apart: both together cost their sum.",
    "public by agreement: that this hospital takes part, in which rounds and how fast it answers, "
    "and its number of records.",
    "the posterior's spread does not include the noise that was added for privacy, nor what "
    "clipping distorts: do not read its intervals as calibrated.",
)
CALIBRATED_CAVEAT = (
    "the spread of the posterior of the rounds does not include the noise that was added for "
    "privacy: read the intervals of the calibrated posterior, of the last phase, alone."
)
# Purposes of plans.
_ROUNDS, _SUMS = "releases", "sums"
_MOST_OF_AGREED = 100.0
_NOT_HERE = (
    "the sums of this study are for its aggregation alone, which asks by `answer_sum`: neither a "
    "server nor Flower gets them."
)


class Hospital:
    """One hospital of a study, with privacy inside its own process: noise in every step.

    Args:
      study: The study, which is public.
      x: Records in memory, as for `DPVI.fit`.
      y: Their outcomes, likewise; None for a likelihood of whole records.
      name: Name of the hospital.
      epsilon: The most that these records may ever cost, over everything in the ledger. None: not
        private, for comparisons.
      delta: Delta of epsilon.
      rounds: How many rounds this hospital allows, whatever a server asks for. The noise is
        calibrated to them once.
      ledger: A `PrivacyLedger` on disk, so that what was spent outlives the process; by default
        one in memory.
      num_records: The public number of records, by default that of `x`.
      neighboring_relation: See `DPModel.compile`.
      seed: See `DPModel`: repeatable, hence not private. It alone decides whether noise repeats.
      randomness: As of `DPModel.compile`: None, or "secure" for noise and samples of the local
        steps from a cryptographic generator. Plan, report and replies say so.
      refiner: Shared by the hospitals of one process, which saves traces.
      last_reply: File that keeps the latest reply, which this hospital has paid for, so that it is
        repeated after a restart too. It holds nothing but what is sent anyway. None for memory.
      unit_ids: The person of each row, as of `DPModel.fit`, where the study has
        `max_rows_per_unit`: a record is then a person.
      rows_beyond: "random" or "first": which rows of persons with more are used.
      weights: The survey weight of each row, in a study with `max_weight`; they are private.
      trusts_sum: In a study with a `trusted_sum`: whether this hospital trusts that its sums of
        the last phase are seen added up alone, so that epsilon is the price of that. By default it
        does not: it adds as much noise as its own message needs, and at least what is agreed on.

    Raises:
      TypeError, ValueError: An argument does not fit; nothing is spent.

    #### Formal guarantee

    Let neighbouring data sets differ in one record of this hospital, with `unit_ids` in all rows of
    one person, and in its weight. Whatever a server or another
    hospital sends, all replies together are (epsilon, delta)-differentially private, at epsilon of
    `spent`, at most the one given: each step is a Gaussian release of a clipped sum, charged before
    it runs, and tasks are functions of earlier replies (adaptive composition). No setting of
    privacy is taken from a message. The sums of a calibrated study's last phase are one more
    Gaussian release at a public point, made once and charged before it runs; the noise of rounds
    and sums is calibrated to epsilon together, two thirds of the budget being for the sums. With
    `trusts_sum` the sums have the noise that the study agrees on, and all this holds for who sees
    them added up alone, see `price_sum`; `sum_prices` and the report have the price for the others.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi._tf import tfd
    >>> from tfp_dpvi.optimizers import DPKerasSGDOptimizer
    >>> study = Study(
    ...     tfd.Normal(0.0, 2.0),
    ...     lambda mean: tfd.Normal(mean, 1.0),
    ...     DPKerasSGDOptimizer(l2_norm_clip=1.0, learning_rate=0.1),
    ... )
    >>> x = np.zeros(20, np.float32)
    >>> hospital = Hospital(study, x, name="berlin", epsilon=1.0, rounds=4)
    >>> hospital.rounds_left, hospital.spent
    (4, 0.0)

    Hospitals of one process share a refiner, which traces the study's step once:

    >>> refiner = Refiner(study)
    >>> hospitals = [
    ...     Hospital(study, x, name=name, epsilon=1.0, rounds=4, refiner=refiner)
    ...     for name in ("berlin", "munich")
    ... ]

    ```
    """

    def __init__(
        self,
        study: Study,
        x: Structure,
        y: Structure | None = None,
        *,
        name: str,
        epsilon: float | None,
        delta: float = 1e-5,
        rounds: int = 20,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        neighboring_relation: NeighboringRelation | str = "add_or_remove_one",
        seed: int | None = None,
        randomness: str | None = None,
        refiner: Refiner | None = None,
        last_reply: str | os.PathLike[str] | None = None,
        unit_ids: Identifiers = None,
        rows_beyond: str = "random",
        weights: np.ndarray | None = None,
        trusts_sum: bool = False,
    ) -> None:
        check_randomness(randomness, seed, "the hospital")
        self.study, self.name = study, check.text("name", name, "pass the hospital's name")
        self.epsilon = None if epsilon is None else check.epsilon(epsilon)
        self.delta, self.rounds = check.delta(delta), check.count("rounds", rounds, 1)
        self.ledger = PrivacyLedger() if ledger is None else ledger
        relation, self._seeded = check.relation(neighboring_relation), seed is not None
        self._lock = threading.Lock()
        self._last_reply = None if last_reply is None else pathlib.Path(last_reply)
        self._last = self._read_last()  # The latest reply, by its request.
        self._last_sum: dict[str, bytes] = {}  # Never in a file, and never for the server.
        self.num_calibrations = 0
        refiner = Refiner(study) if refiner is None else refiner
        settings = ReleaseSettings(
            study,
            refiner,
            self.epsilon,
            self.rounds,
            relation,
            seed,
            randomness,
            unit_ids,
            rows_beyond,
            weights,
        )
        self._release = self.make_release(settings, x, y, num_records)
        self.num_records = self._release.num_records
        self._window = self._make_window(settings, self._release)
        self._sums_plan: PrivacyPlan | None = None
        self._agreed = study.agreed_sum
        self.trusts_sum = trusts_sum
        if trusts_sum and (self._agreed is None or self._window is None):
            raise ValueError("trusts_sum=True needs a study with a trusted_sum; leave it out.")
        self._calibrate(self._release.draft)
        self._release.begin(self._plan)
        if self._window is not None and self._sums_plan is not None:
            self._window.begin(self._sums_plan)

    # ------------------------------------------------------------------ once

    def make_release(
        self,
        settings: ReleaseSettings,
        x: Structure,
        y: Structure | None,
        num_records: int | None,
    ) -> LocalRelease:
        """Returns the way in which this hospital makes its changes; a subclass may have another.

        Args:
          settings: The hospital's settings.
          x: Records in memory.
          y: Their outcomes; None for a likelihood of whole records.
          num_records: The public number of records; None for that of `x`.
        """
        return StepRelease(settings, x, y, num_records)

    @staticmethod
    def _make_window(settings: ReleaseSettings, release: LocalRelease) -> WindowRelease | None:
        """Returns the release of the last phase, or None without one."""
        steps = settings.refiner.window
        if steps is None or not isinstance(release, StepRelease):
            return None
        return WindowRelease(
            steps, release.data, settings.relation, settings.randomness, settings.seed
        )

    def _calibrate(self, draft: PrivacyPlan) -> None:
        """Makes the lifetime plans of this hospital in this study.

        Their noise is the ledger's if the hospital comes back, else it is calibrated.
        """
        self._num_releases = draft.num_releases // self.rounds
        self._plan = draft.replace(purpose=self._purpose(_ROUNDS))
        epsilon, window = self.epsilon, self._window
        trusted = self._agreed if self.trusts_sum else None
        if epsilon is None:
            return
        plans, fixed = [self._plan], []
        if trusted is not None and window is not None:
            self._sums_plan = self._trusting_plan(trusted, window, epsilon)
            if not self._steps_charged(self._sums_plan):
                fixed.append(self._sums_plan.dp_event)
        elif window is not None:
            plans.append(window.draft.replace(purpose=self._purpose(_SUMS)))
            shares = (1.0 - SHARE, SHARE)
            plans = [plan.for_share(share) for plan, share in zip(plans, shares, strict=True)]
        earlier = self._earlier(self._plan)
        if earlier is not None:
            own = {"num_releases": draft.num_releases, "randomness": draft.randomness}
            self._plan = earlier.replace(**own)
        else:
            self.num_calibrations += 1
            # Without names, so that hospitals of one simulation share what is computed.
            nameless = tuple(plan.replace(num_records=None, purpose=None) for plan in plans)
            events = (*self.ledger.events(), *fixed)
            first = _calibrated(nameless, epsilon, self.delta, events)[0]
            named = {"num_records": draft.num_records, "purpose": self._plan.purpose}
            self._plan = first.replace(**named)
        if window is None or trusted is not None:
            return
        first, last = plans
        # As the rounds' noise, so that a hospital which comes back finds it again.
        known = self._earlier(last) or last.scaled_as(first, self._plan)
        self._sums_plan = self._at_least_agreed(known.replace(num_releases=last.num_releases))

    def _trusting_plan(
        self, agreed: AgreedSum, window: WindowRelease, epsilon: float
    ) -> PrivacyPlan:
        """Returns the plan of sums with the noise agreed on, priced by their total.

        Args:
          agreed: The noise.
          window: The release of the sums.
          epsilon: The most that the records may cost.
        """
        plan = window.draft.replace(
            purpose=self._purpose(_SUMS), summed_over=agreed.trust.num_counted
        )
        plan = plan.with_noise_of(agreed.plan)
        price = plan.epsilon(self.delta, self.ledger.events())
        # One that comes back says so where it is asked, as for rounds that its budget lacks.
        is_new = self._earlier(self._plan) is None and not self._steps_charged(plan)
        if is_new and price >= epsilon:
            raise BudgetExhaustedError(
                f"epsilon={epsilon:g}: with the study's agreed noise the sums alone bring "
                f"these records to {price:.4g}; this call spent no privacy.\n"
                "Pass a larger epsilon, or agree on a trusted_sum with a smaller one."
            )
        return plan

    def _at_least_agreed(self, plan: PrivacyPlan) -> PrivacyPlan:
        """Returns a plan of sums with no less noise than the others count on."""
        if self._agreed is None:
            return plan
        if plan.noise_over(self._agreed.plan) > _MOST_OF_AGREED:
            # A much coarser grid of rounded sums would show low bits of the other hospitals'.
            raise ValueError(
                f"epsilon={self.epsilon:g} makes noise more than {_MOST_OF_AGREED:g} times the "
                "study's agreed one: pass a larger epsilon; this call spent no privacy."
            )
        return plan.with_noise_of(self._agreed.plan, or_more=True)

    def _purpose(self, what: str) -> str:
        terms = self.study.terms
        return f"{what} for the study {terms.name!r} ({terms.digest})"

    def _earlier(self, plan: PrivacyPlan) -> PrivacyPlan | None:
        """Returns the plan of this kind that the ledger has releases of, or None."""
        same = (entry.plan for entry in self.ledger.entries if _kind(entry.plan) == _kind(plan))
        return next(same, None)

    # ------------------------------------------------------------------ in each round

    def answer(self, message: bytes) -> bytes:
        """Answers a task. The latest one, if repeated, is answered alike and charged once.

        A reply that the server still waits for is the answer to the next task too: nothing new is
        charged until it has arrived.

        Args:
          message: A `Task` as bytes.

        Returns:
          A `Reply` as bytes.

        Raises:
          MessageError: The message is refused; no privacy was spent.
        """
        task = self._read_task(message)
        need(not task.last or self._agreed is None, _NOT_HERE)
        with self._lock:
            for request, reply in self._last.items():
                if request in (task.request, *task.unanswered):
                    return reply
            made = self.refine(task)
            self._last = {task.request: made.to_bytes()}
            has_paid = made.change is not None or made.sums is not None
            if self._last_reply is not None and has_paid:
                # Before it is sent: whoever has it can get it again.
                replace_file(self._last_reply, self._last[task.request].decode())
            return self._last[task.request]

    def answer_sum(self, message: bytes) -> bytes:
        """Answers the aggregation of a study with a `trusted_sum`; for no one else.

        The latest task, if repeated, is answered alike, as long as this process lives: the reply is
        in no file.

        Args:
          message: A `Task` of an `Aggregation` as bytes.

        Returns:
          A `Reply` as bytes, which is to reach the aggregation alone.

        Raises:
          MessageError: The message is refused; no privacy was spent.
        """
        task = self._read_task(message)
        need(task.last and self._agreed is not None, "the task is no aggregation's.")
        with self._lock:
            if task.request not in self._last_sum:
                self._last_sum = {task.request: self.refine(task).to_bytes()}
            return self._last_sum[task.request]

    def _read_task(self, message: bytes) -> Task:
        """Returns a task for this hospital."""
        task = Task.from_bytes(message, self.study.terms)
        need(
            task.hospital == self.name,
            f"the task is for {task.hospital!r}, and this is {self.name!r}.",
        )
        return task

    def _read_last(self) -> dict[str, bytes]:
        """Returns the latest reply of an earlier process in this study, by its request."""
        if self._last_reply is None or not self._last_reply.exists():
            return {}
        try:
            message = self._last_reply.read_bytes().rstrip(b"\n")
            reply = Reply.from_bytes(message, self.study.terms)
        except MessageError as error:
            _LOG.warning("last_reply=%s is of another study: %s", self._last_reply, error)
            return {}
        return {reply.request: message} if reply.hospital == self.name else {}

    def refine(self, task: Task) -> Reply:
        """Refines the factor against a task's cavity.

        It declines, before any work, where the budget does not allow a round.
        """
        change: Factor | None = None
        sums: SiteSums | None = None
        reason = ""
        try:
            if task.last:
                sums = self._release_sums(task)
            else:
                with self._round():
                    change = self._release.change(task)
        except BudgetExhaustedError as error:
            # The consortium hears nothing of what else was spent on these records.
            _LOG.info("%s declines: %s", self.name, error)
            reason = self._refusal(last=task.last)[:MOST_TEXT]
        except LedgerError as error:
            _LOG.error("The ledger of %s: %s", self.name, error)
            raise MessageError(
                f"the ledger of {self.name} cannot be used, see its log: nothing was released."
            ) from None
        return Reply(
            task.study,
            self.name,
            task.request,
            task.number,
            change=change,
            epsilon=self.spent_here,
            delta=self.delta,
            reason=reason,
            randomness="" if self.epsilon is None else self._plan.randomness,
            rounds_left=None if self.epsilon is None else self.rounds_left,
            sums=sums,
        )

    def _refusal(self, *, last: bool) -> str:
        """Returns why this hospital declines, in a sentence that says nothing of its budget."""
        if last:
            done = bool(self._steps_charged(self._sums_plan))
            why = "they are charged already" if done else "the budget does not allow them"
            return f"{self.name} gives its sums once: {why}."
        allowed = self._rounds_uncharged > 0
        why = "the budget does not allow another one" if allowed else "all of them are charged"
        return f"{self.name} allows {self.rounds} rounds: {why}."

    def _release_sums(self, task: Task) -> SiteSums:
        """Returns the sums of the last phase, which are charged before they are computed."""
        plan, window = self._sums_plan, self._window
        if plan is None or window is None or self.epsilon is None:
            raise MessageError(f"{self.name} has no last phase: it is not private.")
        if self._steps_charged(plan):
            raise BudgetExhaustedError("the sums are charged.")
        budgets = [(self.epsilon, self.delta)]
        with self.ledger.reserved(plan, seeded=self._seeded, budgets=budgets):
            return window.sums(task)

    def _round(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that charges one round before its body runs."""
        if self.epsilon is None:
            return contextlib.nullcontext()
        left = self._rounds_uncharged
        if not left:
            raise BudgetExhaustedError(f"all {self.rounds} rounds that it allows are charged.")
        plan = self._plan.replace(num_releases=left * self._num_releases)
        budgets = [(self.epsilon, self.delta)]
        return self.ledger.reserved(plan, self._num_releases, seeded=self._seeded, budgets=budgets)

    # ------------------------------------------------------------------ what was spent

    @property
    def spent(self) -> float:
        """Epsilon of everything in the ledger so far, at `delta`."""
        return math.inf if self.epsilon is None else self.ledger.epsilon(self.delta)

    @property
    def spent_here(self) -> float:
        """Epsilon of this study's releases alone, at `delta`: what the consortium is told."""
        if self.epsilon is None:
            return math.inf
        plans = [self._plan, *([] if self._sums_plan is None else [self._sums_plan])]
        charged = [plan.replace(num_releases=self._steps_charged(plan)) for plan in plans]
        *others, last = charged
        return last.epsilon(self.delta, [plan.dp_event for plan in others if plan.num_releases])

    @property
    def sum_prices(self) -> SumPrices | None:
        """The prices of all rounds and the sums in a study with a trusted sum, else None.

        They are those that are planned: for who sees the total, and for who sees a message.
        """
        if self._agreed is None or self._sums_plan is None:
            return None
        rounds = [self._plan.dp_event]
        # Others are counted on for the agreed noise alone, whatever this hospital adds.
        least = self._sums_plan.with_noise_of(self._agreed.plan)
        prices = self._agreed.trust.prices(least, self.delta, rounds)
        message = self._sums_plan.of_message().epsilon(self.delta, rounds)
        return dataclasses.replace(
            prices,
            sum_alone=min(prices.sum_alone, message),
            coalition=min(prices.coalition, message),
            message=message,
        )

    @property
    def rounds_left(self) -> int:
        """Rounds that this hospital still allows, as far as its budget allows them too."""
        left = self._rounds_uncharged
        if self.epsilon is None or not left:
            return left
        plan = self._plan.replace(num_releases=left * self._num_releases)
        most = self.ledger.most_releases(plan, [(self.epsilon, self.delta)])
        return min(left, most // self._num_releases)

    @property
    def _rounds_uncharged(self) -> int:
        """Rounds of those allowed that are not charged, whatever the budget."""
        return max(0, self.rounds - self._charged // self._num_releases)

    @property
    def _charged(self) -> int:
        """Releases of this study's rounds that are in the ledger."""
        return self._steps_charged(self._plan)

    def _steps_charged(self, plan: PrivacyPlan | None) -> int:
        """Returns how many releases of a plan are in the ledger."""
        if plan is None:
            return 0
        # Whichever generator a round's noise came from.
        common = {"num_releases": 1, "randomness": ""}
        step = plan.replace(**common)
        same = (entry for entry in self.ledger.entries if entry.plan.replace(**common) == step)
        return sum(entry.steps for entry in same)

    def privacy_report(self) -> PrivacyReport:
        """Returns the ledger's report, with the caveats and the schema of a study."""
        caveats: tuple[str, ...] = (
            CAVEATS if self._window is None else (*CAVEATS[:-1], CALIBRATED_CAVEAT)
        )
        if (self.study.max_rows_per_unit or 1) > 1:
            caveats = (*caveats, PERSONS_ASSUME)
        if self.study.max_weight is not None:
            caveats = (*caveats, WEIGHTS_CAVEAT.format(most=self.study.max_weight))
        prices = self.sum_prices
        if self._agreed is not None and prices is not None:
            caveats = (*caveats, _trust_caveat(self._agreed, prices, self.trusts_sum))
        return dataclasses.replace(
            PrivacyReport.from_ledger(
                self.ledger,
                delta=self.delta,
                budget_epsilon=self.epsilon,
                num_records=self.num_records,
                seeded=self._seeded,
                caveats=caveats,
            ),
            schema=None if self.study.columns is None else str(self.study.columns.schema),
        )


def _trust_caveat(agreed: AgreedSum, prices: SumPrices, trusts_sum: bool) -> str:
    """Returns a sentence on what a study costs with and without trust in what adds up."""
    by = agreed.trust.by
    charged = (
        f"this hospital trusts {by} to show the sums of the last phase added up alone, once, and "
        f"at least {agreed.trust.num_counted} hospitals, itself among them, to add their noise"
        if trusts_sum
        else f"this hospital does not count on {by}, which adds up the sums of the last phase: it "
        "is charged for its message"
    )
    # Two summands of one total move, which is no composition of two releases.
    twice = (
        " In a total, a person with records in two hospitals is two records: epsilons add up, and "
        "delta grows by a factor of 1 + exp(epsilon)."
        if trusts_sum
        else ""
    )
    return f"{charged}. All rounds and the sums are planned to cost {prices.in_words}.{twice}"


@functools.lru_cache(maxsize=64)
def _calibrated(
    plans: tuple[PrivacyPlan, ...], epsilon: float, delta: float, events: tuple[DpEvent, ...]
) -> list[PrivacyPlan]:
    """Returns plans that share a budget, with their noise."""
    if len(plans) == 1:
        return [plans[0].calibrated(epsilon, delta, events)]
    return calibrate_together(plans, epsilon=epsilon, delta=delta, prior_events=events)


def _kind(plan: PrivacyPlan) -> tuple[object, ...]:
    """Returns the parts of a plan that a hospital which comes back must find again.

    Neither its noise nor its number of releases is among them.
    """
    return (
        plan.purpose,
        plan.sampling,
        plan.neighboring_relation,
        plan.sensitivity,
        plan.accountant,
        plan.num_records,
        plan.person,
        plan.summed_over,
    )
