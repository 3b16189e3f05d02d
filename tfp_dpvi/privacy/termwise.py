"""Noise for sums of a sample-wise and a batch-wise term.

A loss with a term that is no sum over records (MMD or KL on the codes of a batch) has two
gradients. The sum over records g_sample clips each record to the bound C_r (`l2_norm_clip`). The
sum over b groups g_batch clips each group to the bound C_g (`batch_l2_norm_clip`), and is nonzero
only in the *encoder* coordinates. Every step releases S = g_sample + (B / b) g_batch + noise,
divided by the public batch size B.

**Sensitivity of S.** In units of C_r, let the group shift be h = 2 C_g B / (C_r b). Adding a record
adds u with |u_e|^2 + |u_d|^2 <= 1 (e: encoder, d: the rest) to the first sum. It also replaces
*one* group's gradient, a vector of norm <= C_g, by another, so that it moves the second sum by at
most h: the sensitivity of the batch-wise term is 2 C_g, not C_g. A replacement does the same with 2
in place of 1. Divided by the noise's standard deviations, z C_r rho_e and z C_r, the change is at
most A / z, or D / z for a replacement, where

    A^2 = max over |u_e|^2 + |u_d|^2 <= 1 of (|u_e| + h)^2 / rho_e^2 + |u_d|^2.

A and D are a `Sensitivity` of a `PrivacyPlan`, whose noise multiplier z is relative to C_r.

**Cost of the schemes.** This is the total variance times A^2 (z is proportional to A at equal
epsilon), with n_e encoder coordinates of n:

    single   rho_e = 1                       n (1 + h)^2
    split    rho_e^2 = 1 + h^2               2 (n + n_e h^2)
    blocks   rho_e^2 = 1 + h sqrt(n / n_e)   (sqrt(n) + h sqrt(n_e))^2

Two draws cost at least as much as blocks: for rho_e^2 >= 1 + h, one draw of that size has the A of
two jointly released draws whose sum it is. The paper's split, tau = 2 C_g B / (C_r b), has
A = sqrt(2). This is our reading of the factor kappa of about 2 in Takahashi et al. 2020
(arXiv:2006.11204), with the corrected sensitivity.
"""

import dataclasses
import math

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.sensitivity import Sensitivity


def block_sensitivity(batch_shift: float, encoder_scale: float, *, radius: float = 1.0) -> float:
    """Returns the sensitivity of the whitened sum, A or D of the module's documentation.

    Args:
      batch_shift: h, the sensitivity of the batch-wise term in units of `l2_norm_clip`; at least 0.
      encoder_scale: rho_e, the noise's standard deviation on the encoder coordinates over
        z * `l2_norm_clip`.
      radius: The radius of the ball of a record's change: 1 for A, 2 for D.

    ```python
    >>> block_sensitivity(1.0, 1.0), block_sensitivity(1.0, 1.0, radius=2.0)
    (2.0, 3.0)

    ```
    """
    h = check.non_negative("batch_shift", batch_shift)
    e = check.positive("encoder_scale", encoder_scale)
    r = check.positive("radius", radius)
    # Both terms increase, so that the maximum is on the sphere. With t = |u_e| and s = e^2 - 1 it
    # is that of
    #     F(t) = (t + h)^2 / (1 + s) + r^2 - t^2  on [0, r],   F'(t) / 2 = (h - s t) / (1 + s).
    # If s r <= h, F increases up to t = r, with the value (r + h)^2 / (1 + s). Otherwise its
    # maximum r^2 + h^2 / s is at t = h / s.
    s = (e - 1.0) * (e + 1.0)
    if s * r <= h:
        return (r + h) / e
    return math.hypot(r, h / math.sqrt(s))


@dataclasses.dataclass(frozen=True)
class TermwiseNoise:
    """The noise scale of each block of coordinates, and the resulting sensitivity.

    Attributes:
      encoder_scale: rho_e, the noise's standard deviation on the encoder coordinates over
        z * `l2_norm_clip`.
      sensitivity: A and D of the noise-whitened sum, in units of `l2_norm_clip`.

    #### Formal guarantee

    Let records be assigned to groups uniformly and independently of each other. Let each group's
    gradient be a function of that group's records alone (zero if it is empty), clipped to C_g, and
    each record's gradient be clipped to C_r over all coordinates. Then S (see the module's
    documentation) plus independent Gaussian noise of standard deviation z C_r `encoder_scale` on
    the encoder coordinates and z C_r on the rest is a Gaussian mechanism with noise multiplier z
    and `sensitivity`, as of a `PrivacyPlan` with both.

    ```python
    >>> noise = termwise_noise(
    ...     l2_norm_clip=1.0, batch_l2_norm_clip=0.01, expected_batch_size=100.0,
    ...     num_partitions=4, num_encoder=50, num_rest=150,
    ... )
    >>> round(noise.encoder_scale, 3), round(noise.sensitivity.add_or_remove, 3)
    (1.414, 1.118)

    ```
    """

    encoder_scale: float
    sensitivity: Sensitivity


def termwise_noise(
    scheme: str = "blocks",
    *,
    l2_norm_clip: float,
    batch_l2_norm_clip: float,
    expected_batch_size: float,
    num_partitions: int,
    num_encoder: int,
    num_rest: int,
) -> TermwiseNoise:
    """Returns the noise of a scheme; see `TermwiseNoise` for the guarantee.

    Variances are compared at equal A. The guarantee holds for every sampling scheme and relation.

    Args:
      scheme: "blocks", "single" or "split".

        * "blocks" is one draw whose scale on the encoder minimises the total variance at equal
          privacy.
        * "single" is one draw with one scale.
        * "split" is two draws with equal shares of the budget, as in the paper: of standard
          deviation z C_r on g_sample and z C_r tau on (B / b) g_batch. They are accounted for as
          a joint release although only their sum is used.
      l2_norm_clip: C_r, the clip of each record's gradient.
      batch_l2_norm_clip: C_g, the clip of each group's gradient.
      expected_batch_size: B, the expected number of records in a batch, which is public.
      num_partitions: b, the number of groups, at most `expected_batch_size`.
      num_encoder: n_e, the number of coordinates that the batch-wise term reaches, at least 1.
      num_rest: n_d, the number of all others.

    Raises:
      ValueError: The scheme is unknown, a number is out of its range, or the clips are too far
        apart.
    """
    check.one_of("scheme", scheme, ("blocks", "single", "split"))
    num_encoder = check.count("num_encoder", num_encoder, 1)
    over_encoder = (num_encoder + check.count("num_rest", num_rest)) / num_encoder
    shift = _batch_shift(l2_norm_clip, batch_l2_norm_clip, expected_batch_size, num_partitions)
    if scheme == "split":
        # Of the two jointly released draws the second, with tau = h, moves by at most 1.
        both = Sensitivity(math.hypot(1.0, 1.0), math.hypot(2.0, 1.0))
        return TermwiseNoise(math.hypot(1.0, shift), both)
    # Without a rest every rho_e costs the same, since z adapts. Then z has its usual meaning.
    scale = 1.0
    if scheme == "blocks" and over_encoder > 1.0:
        # The cost is (n_e (1 + s) + n_d) A^2 with s = rho_e^2 - 1. For s < h, with
        # A = (1 + h) / rho_e, it decreases in s. Above, it is (n + n_e s) (1 + h^2 / s)
        # = n + n_e h^2 + n_e s + n h^2 / s, with its minimum at s = h sqrt(n / n_e) >= h.
        scale = math.sqrt(1.0 + shift * math.sqrt(over_encoder))
    a, d = (block_sensitivity(shift, scale, radius=r) for r in (1.0, 2.0))
    return TermwiseNoise(scale, Sensitivity(a, d))


def _batch_shift(
    l2_norm_clip: float, batch_l2_norm_clip: float, expected_batch_size: float, partitions: int
) -> float:
    record_clip = check.positive("l2_norm_clip", l2_norm_clip)
    group_clip = check.positive("batch_l2_norm_clip", batch_l2_norm_clip)
    batch = check.positive("expected_batch_size", expected_batch_size)
    partitions = check.count("num_partitions", partitions, 1)
    if partitions > batch:
        raise ValueError(
            f"num_partitions={partitions} exceeds expected_batch_size={batch:g}; use fewer, or a "
            "larger batch."
        )
    shift = 2.0 * (group_clip / record_clip) * (batch / partitions)
    if not 0.0 < shift <= 1e12:
        raise ValueError(
            f"batch_l2_norm_clip={group_clip:g} and l2_norm_clip={record_clip:g} are too far "
            "apart; bring the two clips closer together."
        )
    return shift
