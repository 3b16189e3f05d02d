"""`Aggregation`: what a party that hospitals trust does with their sums, which it shows once."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterable

from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.messages import MOST_TEXT, MessageError, Reply, StudyTerms, Task, need
from tfp_dpvi.federated.sums import SiteSums, total_of

_LOG = logging.getLogger("tfp_dpvi")
TOGETHER = "all hospitals"


class Aggregation:
    """Adds up the sums of a study with a `TrustedSum`, after its rounds, and shows the total once.

    It runs where the hospitals' declaration says, and not at the server. It is no cryptography:
    whoever runs it, or reads its memory, sees single messages. `Study.calibrated_posterior` takes
    it in the place of the server.

    Args:
      terms: Terms of the study.
      place: The posterior at whose mean the sums are: `Server.posterior` after the rounds.
      hospitals: The names of all hospitals, as many as agreed on.

    Attributes:
      place: As passed.
      epsilon: Epsilon that each hospital reports, by name.
      refused: Messages that were refused, and why.

    Raises:
      ValueError: The study has no trusted sum, or one of another number of hospitals.

    #### Formal guarantee

    Nothing of a message leaves this object but its stated epsilon and its part of one total, of at
    least as many messages as the declaration counts on; a second total is never made.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi._tf import tf, tfd
    >>> from tfp_dpvi.federated import Hospital, Study, TrustedSum
    >>> from tfp_dpvi.optimizers import InformationOptimizer
    >>> x = np.linspace(-1.0, 1.0, 40, dtype=np.float32)[:, None]
    >>> y = (x[:, 0] > 0).astype("int32")
    >>> study = Study(
    ...     tfd.Sample(tfd.Normal(0.0, 1.0), 1),
    ...     lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)),
    ...     InformationOptimizer(l2_norm_clip=1.0),
    ...     local_steps=2,
    ...     example=(x[:4], y[:4]),
    ...     trusted_sum=TrustedSum(2, by="the trust office", epsilon=2.0, curious=0),
    ... )
    >>> hospitals = {
    ...     name: Hospital(study, x, y, name=name, epsilon=2.0, rounds=2, trusts_sum=True)
    ...     for name in ("berlin", "munich")
    ... }
    >>> aggregation = Aggregation(study.terms, study.terms.prior, hospitals)
    >>> for task in aggregation.due():
    ...     reply = hospitals[task.hospital].answer_sum(task.to_bytes())
    ...     print(aggregation.receive(task.hospital, reply))
    True
    True
    >>> aggregation.total().num_records, list(aggregation.sums)
    (80, ['all hospitals'])

    ```
    """

    def __init__(self, terms: StudyTerms, place: Factor, hospitals: Iterable[str]) -> None:
        agreed = terms.agreed_sum
        if agreed is None:
            raise ValueError("terms have no trusted sum: pass trusted_sum to the Study.")
        names = list(dict.fromkeys(hospitals))
        if len(names) != agreed.trust.num_hospitals:
            raise ValueError(
                f"hospitals has {len(names)} names, and the study's trusted sum is of "
                f"{agreed.trust.num_hospitals}: pass all of them."
            )
        self.terms, self.place = terms, place
        self.epsilon: dict[str, float] = {}
        self.refused: list[str] = []
        self._least = agreed.trust.num_hospitals - agreed.trust.missing
        self._tasks = {name: self._task(name) for name in names}
        self._messages: dict[str, SiteSums] = {}
        self._total: SiteSums | None = None

    def _task(self, hospital: str) -> Task:
        identity, request = self.terms.identity, uuid.uuid4().hex
        return Task(identity, hospital, request, 0, self.place, cavity=self.place, last=True)

    def due(self) -> list[Task]:
        """Returns the tasks of the hospitals that have not answered, the same at each call."""
        if self._total is not None:
            return []
        return [task for name, task in self._tasks.items() if name not in self.epsilon]

    def receive(self, sender: str, message: bytes) -> bool:
        """Takes a hospital's sums; what is refused is named in `refused`.

        Args:
          sender: Name of the hospital whose key the transport has verified.
          message: A `Reply` as bytes, of `Hospital.answer_sum`.

        Returns:
          Whether they were taken.
        """
        try:
            need(self._total is None, "the total was shown, and there is one alone.")
            need(sender in self._tasks, f"hospital {sender!a:.99} is not in the study.")
            reply = Reply.from_bytes(message, self.terms)
            task = self._tasks[sender]
            need(
                (reply.hospital, reply.request) == (sender, task.request),
                "it answers another request, or another hospital's.",
            )
            need(sender not in self.epsilon, "it was answered before.")
            if reply.sums is None:
                raise MessageError(f"it has no sums: {reply.reason}")
            for other in self._messages.values():
                need(
                    reply.sums.agrees(other),
                    "its sums are in other coordinates than another hospital's: agree on one "
                    "version of this library, and on the public inputs.",
                )
        except MessageError as error:
            self.refused.append(f"{sender!a:.99}: {str(error)[:MOST_TEXT]}")
            _LOG.warning("A message to the aggregation is refused: %s", self.refused[-1])
            return False
        self._messages[sender] = reply.sums
        self.epsilon[sender] = reply.epsilon
        return True

    def total(self) -> SiteSums:
        """Returns the sums of all hospitals that have answered; later answers are refused.

        Raises:
          ValueError: Fewer have answered than the noise is counted on; nothing is shown.
        """
        if self._total is None:
            if len(self._messages) < self._least:
                raise ValueError(
                    f"{len(self._messages)} hospitals gave their sums, and the noise counts on "
                    f"{self._least}: wait for them, or agree on more that may be missing."
                )
            # In the order of names, so that rounding does not show who answered first.
            self._total = total_of([self._messages[name] for name in sorted(self._messages)])
            self._messages.clear()
        return self._total

    @property
    def sums(self) -> dict[str, SiteSums]:
        """The total by the name "all hospitals"; empty before `total`."""
        return {} if self._total is None else {TOGETHER: self._total}
