"""Noise for sums of a sample-wise and a batch-wise term.

A loss with a term that is no sum over records (MMD or KL on the codes of a batch) has two gradients: the sum over records
g_sample, each record clipped to C1, and the sum over b groups g_batch, each group clipped to C2, which is nonzero only in the
*encoder* coordinates. Every step releases S = g_sample + (B / b) g_batch + noise, divided by the public batch size B.

**Sensitivity of S.** In units of C1, with the group shift h = 2 C2 B / (C1 b): adding a record adds u with
|u_e|^2 + |u_d|^2 <= 1 (e: encoder, d: the rest) to the first sum and replaces *one* group's gradient, a vector of norm <= C2,
by another, so it moves the second sum by at most h: the sensitivity of the batch-wise term is 2 C2, not C2. A replacement does
the same with 2 in place of 1. Divided by the noise's standard deviations, z C1 rho_e and z C1, the change is at most A / z, or
D / z for a replacement, where

    A^2 = max over |u_e|^2 + |u_d|^2 <= 1 of (|u_e| + h)^2 / rho_e^2 + |u_d|^2.

A and D are a `Sensitivity` of a `PrivacyPlan`, whose noise multiplier z is relative to C1 as usual.

**Cost of the schemes**, total variance times A^2 (z is proportional to A at equal epsilon), with n_e encoder coordinates of n:

    single   rho_e = 1                       n (1 + h)^2
    split    rho_e^2 = 1 + h^2               2 (n + n_e h^2)
    blocks   rho_e^2 = 1 + h sqrt(n / n_e)   (sqrt(n) + h sqrt(n_e))^2

Two draws cost at least as much as blocks: for rho_e^2 >= 1 + h, one draw of that size has the A of two jointly released draws
whose sum it is. The paper's split, tau = 2 C2 B / (C1 b), has A = sqrt(2): our reading of the factor kappa of about 2 in
Takahashi et al. 2020 (arXiv:2006.11204), with the corrected sensitivity.
"""

import dataclasses
import math

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.sensitivity import Sensitivity


def block_sensitivity(batch_shift: float, encoder_scale: float, *, radius: float = 1.0) -> float:
    """Returns the sensitivity of the whitened sum: A of the module docstring, for the ball of `radius`.

    Args:
      batch_shift: h, sensitivity of the batch-wise term in units of `l2_norm_clip`; at least 0.
      encoder_scale: rho_e, standard deviation on the encoder coordinates over z * `l2_norm_clip`.
      radius: 1 for A, 2 for D.
    """
    h = check.non_negative("batch_shift", batch_shift)
    e, r = check.positive("encoder_scale", encoder_scale), check.positive("radius", radius)
    # Both terms increase, so the maximum is on the sphere: with t = |u_e| and s = e^2 - 1 it is
    #     F(t) = (t + h)^2 / (1 + s) + r^2 - t^2  on [0, r],   F'(t) / 2 = (h - s t) / (1 + s).
    # If s r <= h, F increases up to t = r, with the value (r + h)^2 / (1 + s); else its maximum is at t = h / s: r^2 + h^2 / s.
    s = (e - 1.0) * (e + 1.0)
    if s * r <= h:
        return (r + h) / e
    return math.hypot(r, h / math.sqrt(s))


@dataclasses.dataclass(frozen=True)
class TermwiseNoise:
    """The noise scale of each block, and the resulting sensitivity.

    Formal guarantee: let records be assigned to groups uniformly and independently of each other; let each group's gradient be
    a function of that group's records alone (zero if it is empty), clipped to C2, and each record's gradient be clipped to C1
    over all coordinates. Then S (module docstring) plus independent Gaussian noise of standard deviation z C1 `encoder_scale`
    on the encoder coordinates and z C1 on the rest is a Gaussian mechanism with noise multiplier z and
    `sensitivity`, as of a `PrivacyPlan` with both.

    Attributes:
      encoder_scale: rho_e, the noise's standard deviation on the encoder coordinates over z * `l2_norm_clip`.
      sensitivity: A and D of the noise-whitened sum, in units of `l2_norm_clip`.
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

    Args:
      scheme: "blocks", one draw whose scale on the encoder minimises the total variance at equal privacy; "single", one draw
        with one scale; "split", two draws with equal shares of the budget, as in the paper: of standard deviation z C1 on
        g_sample and z C1 tau on (B / b) g_batch, accounted for as a joint release although only
        their sum is used. Variances are compared at equal A; the guarantee holds for every sampling scheme and relation.
      l2_norm_clip: C1, the clip of each record's gradient.
      batch_l2_norm_clip: C2, the clip of each group's gradient.
      expected_batch_size: B, public; the expected number of records in a batch.
      num_partitions: b, the number of groups, at most `expected_batch_size`.
      num_encoder: n_e, the number of coordinates that the batch-wise term reaches, at least 1.
      num_rest: n_d, the number of all others.
    """
    check.one_of("scheme", scheme, ("blocks", "single", "split"))
    num_encoder = check.count("num_encoder", num_encoder, 1)
    over_encoder = (num_encoder + check.count("num_rest", num_rest)) / num_encoder
    shift = _batch_shift(l2_norm_clip, batch_l2_norm_clip, expected_batch_size, num_partitions)
    # The cost is (n_e (1 + s) + n_d) A^2 with s = rho_e^2 - 1. For s < h, with A = (1 + h) / rho_e, it decreases
    # in s. Above, it is (n + n_e s) (1 + h^2 / s)
    # = n + n_e h^2 + n_e s + n h^2 / s, with its minimum at s = h sqrt(n / n_e) >= h.
    if scheme == "split":
        # Of two jointly released draws, of which the second, with tau = h, moves by at most 1.
        return TermwiseNoise(
            math.hypot(1.0, shift), Sensitivity(math.hypot(1.0, 1.0), math.hypot(2.0, 1.0))
        )
    # Without a rest every rho_e costs the same, since z adapts: use the usual meaning of z.
    scale = (
        math.sqrt(1.0 + shift * math.sqrt(over_encoder))
        if scheme == "blocks" and over_encoder > 1.0
        else 1.0
    )
    a, d = (block_sensitivity(shift, scale, radius=r) for r in (1.0, 2.0))
    return TermwiseNoise(scale, Sensitivity(a, d))


def _batch_shift(
    l2_norm_clip: float, batch_l2_norm_clip: float, expected_batch_size: float, partitions: int
) -> float:
    c1 = check.positive("l2_norm_clip", l2_norm_clip)
    c2 = check.positive("batch_l2_norm_clip", batch_l2_norm_clip)
    batch = check.positive("expected_batch_size", expected_batch_size)
    partitions = check.count("num_partitions", partitions, 1)
    if partitions > batch:
        raise ValueError(
            f"num_partitions={partitions} exceeds expected_batch_size={batch:g}; use fewer, or a larger batch."
        )
    shift = 2.0 * (c2 / c1) * (batch / partitions)
    if not 0.0 < shift <= 1e12:
        raise ValueError(
            f"batch_l2_norm_clip={c2:g} and l2_norm_clip={c1:g} are too far apart; bring the two clips closer together."
        )
    return shift
