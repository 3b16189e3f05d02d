"""A secure aggregation that a consortium trusts, and the noise that hospitals agree on for it."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from dp_accounting import DpEvent

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy import PrivacyPlan, SumPrices, price_sum
from tfp_dpvi.privacy.summed import num_counted

_FLOWERS = ("flower", "flwr", "secagg")


@dataclasses.dataclass(frozen=True)
class TrustedSum:
    """A consortium's declaration that sums of the last phase are only ever seen added up.

    Each hospital then adds a share of the noise. This library has no secure aggregation: the
    declaration is about one that the hospitals have, see `Aggregation`. Without it they need none.

    Args:
      num_hospitals: The public number of hospitals.
      by: Who or what adds up, in words for reports: "the registry's trust office".
      epsilon: The epsilon for which the noise is agreed on: at `SHARE` of it, as squared mu, the
        sums cost a hospital this against the curious ones.
      delta: Its delta.
      curious: How many hospitals may pool what they know, see `price_sum`. At least each one knows
        its own noise and reads the posterior.
      missing: How many hospitals the sum may lack. Their noise is then lacking too, so that all
        others add more. At 0 there is no sum without everybody's.

    Raises:
      ValueError: A number is out of its range, no hospital's noise is left to count on, or the
        aggregation is Flower's own, on which no guarantee can rest.
      TypeError: `by` is no text.

    #### Formal guarantee

    See `price_sum`: it rests on the aggregation, on `num_hospitals - curious - missing` hospitals
    that add their noise, the hospital itself among them, and on one sum alone being seen.

    ```python
    >>> trust = TrustedSum(5, by="the registry's trust office", epsilon=1.0)
    >>> trust.num_counted
    4
    >>> try:
    ...     TrustedSum(5, by="Flower's SecAgg+", epsilon=1.0)
    ... except ValueError as error:
    ...     print(str(error).split(":")[0])
    by="Flower's SecAgg+" is no guarantee

    ```
    """

    num_hospitals: int
    by: str
    epsilon: float
    delta: float = 1e-5
    curious: int = 1
    missing: int = 0

    def __post_init__(self) -> None:
        num_counted(self.num_hospitals, self.curious, self.missing)
        check.text("by", self.by, "say who adds up")
        check.epsilon(self.epsilon)
        check.delta(self.delta)
        if any(name in self.by.lower() for name in _FLOWERS):
            raise ValueError(
                f"by={self.by!a:.99} is no guarantee: whoever submits a run to Flower chooses the "
                "code that masks, its server hands out the keys,\nand masks have 32-bit seeds. "
                "Leave trusted_sum out: then no guarantee rests on what adds up."
            )

    @property
    def num_counted(self) -> int:
        """The number of messages whose noise the guarantee counts on."""
        return num_counted(self.num_hospitals, self.curious, self.missing)

    def prices(
        self, plan: PrivacyPlan, delta: float, prior_events: Sequence[DpEvent] = ()
    ) -> SumPrices:
        """Returns what a hospital's sums cost, see `price_sum`.

        Args:
          plan: The plan of the sums, with the noise of one message.
          delta: The delta of the prices.
          prior_events: The hospital's other releases.
        """
        return price_sum(
            plan,
            delta,
            num_hospitals=self.num_hospitals,
            curious=self.curious,
            missing=self.missing,
            prior_events=prior_events,
        )

    def agree(self, draft: PrivacyPlan, share: float) -> AgreedSum:
        """Returns the noise that all hospitals add at least.

        Args:
          draft: The plan of the sums of any hospital, whose noise is not read.
          share: The share of the budget that is for the sums, as squared mu.
        """
        counted = draft.replace(summed_over=self.num_counted)
        plan = counted.calibrated(self.epsilon, self.delta).with_noise_over(math.sqrt(share))
        return AgreedSum.from_text(AgreedSum(self, plan).to_text())


@dataclasses.dataclass(frozen=True)
class AgreedSum:
    """A trusted sum with the noise that a study's hospitals have agreed on; a term of the study.

    Attributes:
      trust: The declaration.
      plan: The plan of each hospital's sums with the least noise of its message, priced by the
        total.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch
    >>> trust = TrustedSum(5, by="the registry's trust office", epsilon=1.0)
    >>> agreed = trust.agree(PrivacyPlan(FullBatch(), 1.0, num_releases=4), share=1.0)
    >>> round(agreed.prices.coalition, 2), round(agreed.prices.message, 2)
    (1.0, 2.15)

    ```
    """

    trust: TrustedSum
    plan: PrivacyPlan

    @property
    def prices(self) -> SumPrices:
        """The price of the sums alone, without the rounds."""
        return self.trust.prices(self.plan, self.trust.delta)

    @property
    def in_words(self) -> str:
        """A sentence for everybody who takes part, with all prices."""
        trust = self.trust
        return (
            f"The sums of the last phase are only seen added up, on trust in {trust.by}: each "
            f"hospital adds a share of the noise, and {trust.num_counted} shares are counted on. "
            f"Besides the rounds they cost each hospital {self.prices.in_words}."
        )

    def to_text(self) -> str:
        """Returns a text for the terms of a study, the same on all machines."""
        both = {"trust": dataclasses.asdict(self.trust), "plan": self.plan.to_json()}
        # Machines may differ in last digits.
        rounded = json.loads(json.dumps(both), parse_float=_rounded)
        return json.dumps(rounded, sort_keys=True)

    @classmethod
    def from_text(cls, text: str) -> AgreedSum:
        """Reads what `to_text` returned.

        Args:
          text: The text.

        Raises:
          TypeError, ValueError: It is none.
        """
        names = ("trust", "plan")
        fields = check.fields("trusted_sum", json.loads(text), needed=names, known=names)
        parts = [field.name for field in dataclasses.fields(TrustedSum)]
        trust = check.fields("trust", fields["trust"], needed=parts, known=parts)
        return cls(TrustedSum(**trust), PrivacyPlan.from_json(fields["plan"]))


def _rounded(text: str) -> float:
    return float(f"{float(text):.12g}")
