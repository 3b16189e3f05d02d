"""`Member`: a hospital as the server of a study knows it, from public values alone."""

from __future__ import annotations

import dataclasses
import json

from tfp_dpvi import _validate as check
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.messages import MOST_UNANSWERED, Reply, StudyTerms, Task
from tfp_dpvi.federated.sums import SiteSums

# The types of saved values that are plain.
_PLAIN = {
    "num_tasks": int,
    "epsilon": float | None,
    "randomness": str,
    "rounds_left": int | None,
    "retired": str | None,
    "is_dropped": bool,
    "num_repeats": int,
    "is_under_way": bool,
    "is_silent": bool,
    "is_refused": bool,
    "answered_request": str,
    "held_share": float,
}


@dataclasses.dataclass(frozen=True)
class Member:
    """The state of one hospital in a study: what it was asked, and what came back.

    All of it is public. A server keeps one for each hospital by its name. An event, such as a task
    that is sent or a reply, replaces the whole value, so that none is half changed.

    Args:
      factor: Its factor, by which the posterior is multiplied.
      num_tasks: How many tasks were made for it; one that is sent again counts once. A hospital
        that joins late starts from those of the others.
      epsilon: Epsilon that it reports; None before its first reply.
      randomness: The generator of its noise, as it reports; see `Reply`.
      rounds_left: Rounds that it still allows; None if it has not said.
      retired: Why it takes no part any longer; None if it does. The factor of a hospital that has
        declined stays.
      is_dropped: Whether it was taken out of the study for good, and its factor with it.
      unanswered: Tasks whose replies are still welcome, the latest at the end.
      num_repeats: How often the latest task was sent again when the study had no other left.
      is_under_way: Whether the reply to the latest task is awaited.
      is_silent: Whether its latest request was given up.
      is_refused: Whether its message after that request was refused.
      answered_request: The request that it answered last.
      held: Its change that is not in the factor yet, damped.
      held_share: The share of that change that a cap has left.
      sums: Its sums of the last phase.

    ```python
    >>> import numpy as np
    >>> terms = StudyTerms("heights", Factor.normal(np.zeros(1), np.ones(1)))
    >>> berlin = Member(Factor.one(1, full_rank=False))
    >>> task = Task(terms.identity, "berlin", "request 1", 0, terms.prior, terms.prior)
    >>> asked = berlin.asked(task)
    >>> asked.awaits("request 1"), asked.can_repeat, asked.is_present
    (True, True, False)
    >>> change = Factor(shift=np.ones(1), precision=np.ones(1))
    >>> reply = Reply(terms.identity, "berlin", "request 1", 0, change, epsilon=0.4)
    >>> answered = asked.answered(reply)
    >>> answered.awaits("request 1"), answered.can_repeat, answered.is_present
    (False, False, True)

    ```
    """

    factor: Factor
    num_tasks: int = 0
    epsilon: float | None = None
    randomness: str = ""
    rounds_left: int | None = None
    retired: str | None = None
    is_dropped: bool = False
    unanswered: tuple[Task, ...] = ()
    num_repeats: int = 0
    is_under_way: bool = False
    is_silent: bool = False
    is_refused: bool = False
    answered_request: str = ""
    held: Factor | None = None
    held_share: float = 1.0
    sums: SiteSums | None = None

    @property
    def takes_part(self) -> bool:
        """True if it has neither declined nor been dropped."""
        return self.retired is None

    @property
    def is_present(self) -> bool:
        """True if it has ever answered, and answered its latest request."""
        return self.epsilon is not None and not self.is_silent

    @property
    def is_free(self) -> bool:
        """True if no reply is awaited and no change is held."""
        return not self.is_under_way and self.held is None

    @property
    def can_repeat(self) -> bool:
        """True if its latest task is unanswered and was not refused, so that it is sent again."""
        return bool(self.unanswered) and not self.is_refused

    @property
    def num_asked_for_sums(self) -> int:
        """Number of its unanswered tasks that ask for sums."""
        return sum(task.last for task in self.unanswered)

    def awaits(self, request: str) -> bool:
        """Returns whether a request is its latest, and the reply is awaited."""
        return self.is_under_way and self.unanswered[-1].request == request

    def asked(self, task: Task) -> Member:
        """Returns it after a task is sent: a new one, or its latest again."""
        if task in self.unanswered:
            return dataclasses.replace(self, is_under_way=True)
        return dataclasses.replace(
            self,
            num_tasks=self.num_tasks + 1,
            unanswered=(*self.unanswered, task)[-MOST_UNANSWERED:],
            num_repeats=0,
            is_under_way=True,
            is_refused=False,
        )

    def asked_at_the_end(self, rounds: int) -> Member:
        """Returns it after its latest task is sent again, when the study has no other left.

        Args:
          rounds: Those of the study, of which none is left for it either.
        """
        return dataclasses.replace(self, num_tasks=rounds, num_repeats=self.num_repeats + 1)

    def answered(self, reply: Reply) -> Member:
        """Returns it after a reply that was checked; no earlier task is open any longer."""
        return dataclasses.replace(
            self,
            epsilon=reply.epsilon,
            randomness=reply.randomness,
            rounds_left=self.rounds_left if reply.rounds_left is None else reply.rounds_left,
            retired=reply.reason if reply.change is None and reply.sums is None else None,
            unanswered=(),
            num_repeats=0,
            is_under_way=False,
            is_silent=False,
            is_refused=False,
            answered_request=reply.request,
            sums=reply.sums,
        )

    def dropped(self) -> Member:
        """Returns it out of the study, where what it has spent stays spent."""
        return Member(
            Factor.one(self.factor.num, full_rank=self.factor.full_rank),
            epsilon=self.epsilon,
            randomness=self.randomness,
            rounds_left=self.rounds_left,
            retired="it was dropped.",
            is_dropped=True,
        )

    @classmethod
    def from_json(cls, value: check.Unchecked, terms: StudyTerms) -> Member:
        """Reads what was saved.

        Args:
          value: A JSON object.
          terms: Terms of the study.

        Raises:
          TypeError, ValueError: It is no such object.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        # It is younger than the others.
        needed = [name for name in names if name != "num_repeats"]
        fields = check.fields("a hospital", value, needed=needed, known=names)
        fields = {"num_repeats": 0, **fields}
        for name, kind in _PLAIN.items():
            if not isinstance(fields[name], kind):
                raise TypeError(f"a hospital has {name}={check.shown(fields[name])}.")
        held, sums = fields["held"], fields["sums"]
        tasks = [json.dumps({"kind": "Task", **task}) for task in fields["unanswered"]]
        read = {
            "factor": Factor(**fields["factor"]),
            "unanswered": tuple(Task.from_bytes(task.encode(), terms) for task in tasks),
            "held": None if held is None else Factor(**held),
            "sums": None if sums is None else SiteSums.from_json(sums, terms.sums),
        }
        return cls(**{**fields, **read})
