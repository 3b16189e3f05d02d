"""A hospital: holds its records, refines its factor when asked, and pays for every step from its own budget."""

from __future__ import annotations

import contextlib
import functools
import math
import threading

from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import check_randomness
from tfp_dpvi._tf import Structure
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.local import Refiner
from tfp_dpvi.federated.messages import MOST_TEXT, Reply, Task, need
from tfp_dpvi.federated.study import Study
from tfp_dpvi.privacy import BudgetExhaustedError, PrivacyLedger, PrivacyPlan, PrivacyReport

CAVEATS = (
    "a person with records in two hospitals of the study is protected by each hospital's epsilon apart: both together cost "
    "their sum.",
    "public by agreement: that this hospital takes part, in which rounds and how fast it answers, and its number of records.",
    "the posterior's spread does not include the noise that was added for privacy, nor what clipping distorts: do not read "
    "its intervals as calibrated.",
)


class Hospital:
    """One hospital of a study, with privacy inside its own process: noise in every step.

    Args:
      study: the study, which is public.
      x: records, as for `DPVI.fit`.
      y: likewise.
      name: of the hospital.
      epsilon: the most that these records may ever cost, over everything in the ledger; None: not private, for comparisons.
      delta: of epsilon.
      rounds: how many rounds this hospital allows, whatever a server asks for. The noise is calibrated to them once.
      ledger: a `PrivacyLedger` on disk, so that what was spent outlives the process; by default one in memory.
      num_records: the public number of records, by default that of `x`.
      neighboring_relation: see `DPModel.compile`.
      seed: see `DPModel`: repeatable, hence not private.
      randomness: as of `DPModel.compile`: None, or "secure" for noise and samples of the local steps
        from a cryptographic generator. Plan, report and replies say so.
      refiner: shared by the hospitals of one process, which saves traces.

    #### Formal guarantee

    Let neighbouring data sets differ in one record of this hospital. Whatever a server or another hospital sends, all replies
    together are (epsilon, delta)-differentially private, at epsilon of `spent`, at most the one given: each step is a Gaussian
    release of a clipped sum, charged before it runs, and tasks are functions of earlier replies (adaptive composition). No
    setting of privacy is taken from a message.
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
        rounds: int = 10,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        neighboring_relation: NeighboringRelation | str = "add_or_remove_one",
        seed: int | None = None,
        randomness: str | None = None,
        refiner: Refiner | None = None,
    ) -> None:
        check_randomness(randomness, seed, "the hospital")
        self._randomness = randomness
        self.study, self.name = study, check.text("name", name, "pass the hospital's name")
        self.epsilon = None if epsilon is None else check.epsilon(epsilon)
        self.delta, self.rounds = check.delta(delta), check.count("rounds", rounds, 1)
        self.ledger = PrivacyLedger() if ledger is None else ledger
        self._relation, self._seed = check.relation(neighboring_relation), seed
        self._lock = threading.Lock()
        self._last: dict[str, bytes] = {}
        self.num_calibrations = 0
        self._refiner = Refiner(study, seed) if refiner is None else refiner
        self._prepare(x, y, num_records)

    # ------------------------------------------------------------------ once

    def _prepare(self, x: Structure, y: Structure | None, num_records: int | None) -> None:
        """Checks the records, calibrates, and traces the step."""
        if self._refiner.private != (self.epsilon is not None):
            raise ValueError(
                f"epsilon={self.epsilon!r} does not go with the study's optimizer: pass epsilon, a finite "
                "l2_norm_clip and no noise_multiplier;\n"
                "or, without privacy, epsilon=None, l2_norm_clip=math.inf and noise_multiplier=0."
            )
        data = self._refiner.data(x, y, num_records)
        self.num_records, self._tensors = data.num_records, data.tensors
        draft = self._refiner.mechanism(data, self._relation, self._randomness)
        self._calibrate(draft.plan(self.rounds * self.study.terms.local_steps))
        self._mechanism = draft.with_noise_of(self._plan) if self.epsilon is not None else draft
        self._refiner.trace(self._mechanism, self._tensors)

    def _calibrate(self, draft: PrivacyPlan) -> None:
        """Makes the lifetime plan of this hospital in this study: with the ledger's noise if it comes back, else calibrated."""
        purpose = (
            f"releases for the study {self.study.terms.name!r} ({self.study.terms.identity[:8]})"
        )
        self._releases, self._plan = (
            draft.num_releases // self.rounds,
            draft.replace(purpose=purpose),
        )
        if self.epsilon is None:
            return
        held = [one.plan for one in self.ledger.entries if _kind(one.plan) == _kind(self._plan)]
        if held:
            own = {"num_releases": draft.num_releases, "randomness": draft.randomness}
            self._plan = held[0].replace(**own)
        else:
            self.num_calibrations += (
                1  # Without names, so that hospitals of one simulation share what is computed.
            )
            plan = _calibrated(
                draft.replace(num_records=None),
                self.epsilon,
                self.delta,
                tuple(self.ledger.events()),
            )
            self._plan = plan.replace(purpose=purpose, num_records=draft.num_records)

    # ------------------------------------------------------------------ in each round

    def answer(self, message: bytes) -> bytes:
        """Returns the reply to a task, both as bytes; the latest task, if repeated, is answered alike and charged once.

        Raises `MessageError` if the message is refused; no privacy was spent.
        """
        task = Task.from_bytes(message, self.study.terms)
        need(
            task.hospital == self.name,
            f"the task is for {task.hospital!r}, and this is {self.name!r}.",
        )
        with self._lock:
            if task.request not in self._last:
                self._last = {task.request: self.refine(task).to_bytes()}
            return self._last[task.request]

    def refine(self, task: Task) -> Reply:
        """Refines the factor against a task's cavity; declines, before any work, where the budget does not allow it."""
        change, reason = None, ""
        try:
            with self._round():
                change = self._change(task)
        except BudgetExhaustedError as error:
            reason = f"the budget of {self.name} is spent: {check.first_line(error)}"[:MOST_TEXT]
        repeated = (task.study, self.name, task.request, task.number)
        how = "" if self.epsilon is None else self._plan.randomness
        return Reply(*repeated, change, self.spent, self.delta, reason, how)

    def _round(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that charges one round before its body runs."""
        if self.epsilon is None:
            return contextlib.nullcontext()
        if not self.rounds_left:
            raise BudgetExhaustedError(f"all {self.rounds} rounds that it allows are charged.")
        plan, budget = (
            self._plan.replace(num_releases=self.rounds_left * self._releases),
            (self.epsilon, self.delta),
        )
        return self.ledger.reserved(
            plan, self._releases, seeded=self._seed is not None, budgets=[budget]
        )

    def _change(self, task: Task) -> Factor:
        return self._refiner.refine(task.posterior, task.cavity, self._mechanism, self._tensors)

    # ------------------------------------------------------------------ what was spent

    @property
    def spent(self) -> float:
        """Epsilon of everything in the ledger so far, at `delta`."""
        return math.inf if self.epsilon is None else self.ledger.epsilon(self.delta)

    @property
    def rounds_left(self) -> int:
        """Rounds that this hospital still allows, as far as its budget allows them too."""
        # Whichever generator a round's noise came from.
        any_of = {"num_releases": 1, "randomness": ""}
        one = self._plan.replace(**any_of)
        same = (entry for entry in self.ledger.entries if entry.plan.replace(**any_of) == one)
        charged = sum(entry.steps for entry in same)
        return max(0, self.rounds - charged // self._releases)

    def privacy_report(self) -> PrivacyReport:
        """Returns the ledger's report, with the caveats of a study."""
        return PrivacyReport.from_ledger(
            self.ledger,
            delta=self.delta,
            budget_epsilon=self.epsilon,
            num_records=self.num_records,
            seeded=self._seed is not None,
            caveats=CAVEATS,
        )


@functools.lru_cache(maxsize=64)
def _calibrated(
    plan: PrivacyPlan, epsilon: float, delta: float, events: tuple[DpEvent, ...]
) -> PrivacyPlan:
    return plan.calibrated(epsilon, delta, events)


def _kind(plan: PrivacyPlan) -> tuple[object, ...]:
    """Returns the parts of a plan that a hospital which comes back must find again: neither noise nor number of releases."""
    return (
        plan.purpose,
        plan.sampling,
        plan.neighboring_relation,
        plan.sensitivity,
        plan.accountant,
        plan.num_records,
    )
