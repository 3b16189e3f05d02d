"""`price_sum`: epsilon of a hospital's release for who sees its message, and for who sees a sum."""

import dataclasses
from collections.abc import Sequence

from dp_accounting import DpEvent

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.report import shown


@dataclasses.dataclass(frozen=True)
class SumPrices:
    """Epsilon of one hospital's release for three observers, see `price_sum`.

    Attributes:
      sum_alone: Epsilon for who sees the sum of all messages alone.
      coalition: Epsilon for curious hospitals together, which see the sum and know their own noise.
      message: Epsilon for who sees the hospital's message.
      delta: The delta of all three.
      num_present: The number of messages in the sum.
      curious: The number of curious hospitals among their senders.

    ```python
    >>> SumPrices(1.0, 1.13, 2.44, delta=1e-5, num_present=5, curious=1).message
    2.44

    ```
    """

    sum_alone: float
    coalition: float
    message: float
    delta: float
    num_present: int
    curious: int

    @property
    def in_words(self) -> str:
        """All three in a sentence, rounded up."""
        one = "a curious hospital among them, which knows its own noise"
        several = (
            f"{self.curious} curious hospitals among them together, which know their own noise"
        )
        parts = [
            f"{shown(self.sum_alone)} for who sees the sum of {self.num_present} hospitals' "
            "messages alone",
            f"{shown(self.coalition)} for {one if self.curious == 1 else several}",
            f"{shown(self.message)} for who sees one message",
        ]
        if not self.curious:
            del parts[1]
        return f"epsilon {', '.join(parts[:-1])}, and {parts[-1]} (delta {self.delta:g})"


def price_sum(
    plan: PrivacyPlan,
    delta: float,
    *,
    num_hospitals: int,
    curious: int = 1,
    missing: int = 0,
    prior_events: Sequence[DpEvent] = (),
) -> SumPrices:
    """Returns what one hospital's release costs if all hospitals' releases are added up.

    Args:
      plan: The plan of the hospital's own message. Every other hospital must add at least its
        noise, of the same standard deviation on every coordinate.
      delta: The delta of the prices.
      num_hospitals: The public number of hospitals.
      curious: How many of the other hospitals may pool what they know: the sum and the noise that
        they have added. What such a hospital does with its own message does not matter.
      missing: How many messages the sum may lack, with their noise.
      prior_events: The hospital's other releases, which every observer sees as they are.

    Returns:
      The three prices.

    Raises:
      ValueError: A number is out of its range, or no hospital's noise is left to count on.

    #### Formal guarantee

    Neighbouring data sets differ in a record of one hospital, which is not among the curious ones.
    At least `num_hospitals - missing` messages are in the sum, each with independent Gaussian
    noise, which is added before anything leaves a hospital. Given what curious hospitals know,
    the sum is a Gaussian release with the variance of the other messages' noise: at least
    `num_hospitals - missing - curious` times that of the plan. One sum alone may ever be seen: the
    difference of two may be a message. That no message is seen is an assumption, on which `message`
    does not rest.

    Rounding of messages to one grid costs nothing: up to probabilities below 1e-300 at spacings of
    at most a standard deviation over 40, their sum is distributed as the rounding of that Gaussian
    release with independent uniform values added, for Gaussian densities have no Fourier
    coefficients at the grid's frequencies.

    Five hospitals whose sum has the noise of one central release at epsilon 1:

    ```python
    >>> from tfp_dpvi.privacy import FullBatch
    >>> central = PrivacyPlan.calibrate(
    ...     epsilon=1.0, delta=1e-5, sampling=FullBatch(), num_releases=1
    ... )
    >>> share = central.replace(noise_multiplier=central.noise_multiplier / 5**0.5)
    >>> prices = price_sum(share, 1e-5, num_hospitals=5)
    >>> [round(price, 2) for price in (prices.sum_alone, prices.coalition, prices.message)]
    [1.0, 1.13, 2.44]

    ```
    """
    num = num_counted(num_hospitals, curious, missing)
    own = plan.of_message()

    def price(over: int | None) -> float:
        return own.replace(summed_over=over).epsilon(delta, prior_events)

    return SumPrices(
        sum_alone=price(num + curious),
        coalition=price(num),
        message=price(None),
        delta=check.delta(delta),
        num_present=num_hospitals - missing,
        curious=curious,
    )


def num_counted(num_hospitals: int, curious: int, missing: int) -> int:
    """Returns the number of messages whose noise a guarantee may count on; checked.

    Args:
      num_hospitals: The public number of hospitals.
      curious: How many of them may know their own noise and the sum.
      missing: How many messages the sum may lack.

    Raises:
      ValueError: A number is out of its range, or none is left.
    """
    check.count("num_hospitals", num_hospitals, 1)
    check.count("curious", curious)
    check.count("missing", missing)
    left = num_hospitals - curious - missing
    if left < 1:
        raise ValueError(
            f"num_hospitals={num_hospitals}, curious={curious} and missing={missing} leave no "
            "hospital whose noise counts; pass fewer of them."
        )
    return left
