"""Noise for sums of a sample-wise and a batch-wise term.

A loss with a term that is no sum over records (MMD or KL on the codes of a batch) has two gradients: the sum
over records g_sample, each record clipped to C1, and the sum over b groups g_batch, each group clipped to C2,
which reaches the *encoder* coordinates only. Every step releases

    S = g_sample + (B / b) g_batch + noise,       divided afterwards by the public batch size B.

**How far one record moves S.** In units of C1, with the group shift h = 2 C2 B / (C1 b): a record's presence adds
u with |u_e|^2 + |u_d|^2 <= 1 (e: encoder, d: the rest) to the first sum and turns *one* group's gradient from a
vector of norm <= C2 into another, so it moves the second sum by at most h: the sensitivity of the batch-wise term
is 2 C2, not C2. A replacement does the same with 2 in place of 1. Divided by the noise's standard deviations
z C1 rho_e and z C1 rho_d, the movement is at most A / z, or D / z for a replacement, where

    A^2 = max over |u_e|^2 + |u_d|^2 <= 1 of (|u_e| + h)^2 / rho_e^2 + |u_d|^2 / rho_d^2.

A and D are a `Sensitivity`; `PrivacyPlan` prices S with them, its noise multiplier z being over C1 as always.

**What the schemes cost.** z is proportional to A at equal epsilon, so a scheme is judged by its total variance
times A^2. With n_e encoder coordinates, n in all, and where A is what is priced:

    single         rho_e = 1                          n (1 + h)^2
    split, paper   rho_e^2 = 1 + h^2                  2 (n + n_e h^2)
    split, optimal rho_e^2 = 1 + h sqrt(n / n_e)      (sqrt(n) + h sqrt(n_e))^2
    blocks         rho_e^2 = 1 + h sqrt(n / n_e)      (sqrt(n) + h sqrt(n_e))^2

Blocks and the optimal split tie exactly: wherever rho_e^2 >= 1 + h, one draw of that size has the A that the joint
price gives two draws of which it is the sum, and the optimum lies there. Blocks need n_e fewer normals.

The paper's split, tau = 2 C2 B / (C1 b), gives both draws one multiplier over their own sensitivities, and A = sqrt(2). That
is the plain reading of the factor kappa of about 2 (in variance) in Takahashi et al. 2020 (arXiv:2006.11204), with the
sensitivity of the batch-wise term corrected to 2 C2; it could not be checked against the paper's text.
"""

import dataclasses
import math

from dp_accounting import NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.sampling import SamplingScheme
from tfp_dpvi.privacy.sensitivity import Sensitivity

_SCHEMES = ("blocks", "single", "split")
_SPLITS = ("optimal", "paper")


def block_sensitivity(
    batch_shift: float, encoder_scale: float, rest_scale: float = 1.0, *, radius: float = 1.0
) -> float:
    """Returns the most that one record moves the whitened sum: A of the module docstring, for the ball of `radius`.

    Args:
      batch_shift: h, the most that the batch-wise term moves, in units of `l2_norm_clip`; at least 0.
      encoder_scale: rho_e, standard deviation on the encoder coordinates over z * `l2_norm_clip`.
      rest_scale: rho_d, the same on the rest.
      radius: 1 for presence (A), 2 for replacement (D).
    """
    h = check.non_negative("batch_shift", batch_shift)
    e, d = check.positive("encoder_scale", encoder_scale), check.positive("rest_scale", rest_scale)
    r = check.positive("radius", radius)
    # Both terms grow, so the maximum lies on the sphere: with t = |u_e|, s = (e / d)^2 - 1 and all times d^2 it is
    #     F(t) = (t + h)^2 / (1 + s) + r^2 - t^2  on [0, r],   F'(t) / 2 = (h - s t) / (1 + s).
    # Either s r <= h, F grows up to t = r and is (r + h)^2 / (1 + s) there; or it is largest at t = h / s: r^2 + h^2 / s.
    s = ((e - d) / d) * ((e + d) / d)
    if s * r <= h:
        return (r + h) / e
    return math.hypot(r, h / math.sqrt(s)) / d


def split_sensitivity(batch_shift: float, batch_scale: float, *, radius: float = 1.0) -> float:
    """Returns what two draws, jointly released, are priced at: sqrt(radius^2 + (h / tau)^2).

    Args:
      batch_shift: h, as in `block_sensitivity`.
      batch_scale: tau, standard deviation of the batch-wise term's own draw over z * `l2_norm_clip`.
      radius: 1 for presence (A), 2 for replacement (D).
    """
    h, tau = check.non_negative("batch_shift", batch_shift), check.positive("batch_scale", batch_scale)
    return math.hypot(check.positive("radius", radius), h / tau)


@dataclasses.dataclass(frozen=True)
class TermwiseNoise:
    """The size of the noise on each block, and its cost.

    Formal guarantee: let records fall into `num_partitions` groups independently and uniformly, whoever else
    is present; let each group's gradient be a function of that group's records alone (zero where it is empty),
    clipped to `batch_l2_norm_clip`, and each record's gradient be clipped to `l2_norm_clip` over all
    coordinates. Then S (module docstring) plus independent Gaussian noise of standard deviation
    z * `l2_norm_clip` * `encoder_scale` on the encoder coordinates and z * `l2_norm_clip` * `rest_scale` on the
    rest is a Gaussian mechanism of noise multiplier z and `sensitivity`: that of a `PrivacyPlan` with both.

    Attributes:
      encoder_scale: rho_e, the noise's standard deviation on the encoder coordinates over z * `l2_norm_clip`.
      rest_scale: rho_d, the same on the rest; 1, so that z means what it always means.
      sensitivity: A and D of the noise-whitened sum, in units of `l2_norm_clip`.
      scheme: "blocks", "single", "split_optimal" or "split_paper".
    """

    encoder_scale: float
    rest_scale: float
    sensitivity: Sensitivity
    scheme: str


def termwise_noise(
    scheme: str = "blocks",
    *,
    l2_norm_clip: float,
    batch_l2_norm_clip: float,
    expected_batch_size: float,
    num_partitions: int,
    num_encoder: int,
    num_rest: int,
    split: str = "optimal",
    sampling: SamplingScheme | None = None,
    neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
) -> TermwiseNoise:
    """Returns the noise of a scheme; what it guarantees is said at `TermwiseNoise`.

    * `"blocks"`: one draw whose size on the encoder minimises the total variance at equal privacy, exactly.
    * `"single"`: one draw of one size on all coordinates.
    * `"split"`: two draws, of standard deviation z C1 on g_sample and z C1 tau on (B / b) g_batch, priced as released
      both though only their sum is used. `split="optimal"` takes the tau of least total variance at equal
      privacy, `split="paper"` divides the budget equally (module docstring).

    Args:
      scheme: "blocks", "single" or "split".
      l2_norm_clip: C1, the clip of each record's gradient.
      batch_l2_norm_clip: C2, the clip of each group's gradient.
      expected_batch_size: B, public; the expected number of records in a batch.
      num_partitions: b, the number of groups, at most `expected_batch_size`.
      num_encoder: n_e, the number of coordinates that the batch-wise term reaches, at least 1.
      num_rest: n_d, the number of all others.
      split: which two draws, for `scheme="split"` only.
      sampling: how the plan's records are drawn; None for Poisson. With the adjacency it says whether A or D / 2 is
        priced, which moves the optimum. The guarantee does not depend on it.
      neighboring_relation: the plan's adjacency, for the same purpose.
    """
    check.one_of("scheme", scheme, _SCHEMES)
    check.one_of("split", split, _SPLITS)
    num_encoder = check.count("num_encoder", num_encoder, 1)
    over_encoder = (num_encoder + check.count("num_rest", num_rest)) / num_encoder
    shift = _batch_shift(l2_norm_clip, batch_l2_norm_clip, expected_batch_size, num_partitions)
    # A alone for D = A: 1 where A is priced, 1 / 2 where D / 2 is.
    unit = priced_sensitivity(Sensitivity(1.0, 1.0), sampling, neighboring_relation)
    # Where A is priced, the cost is (n_e (1 + s) + n_d) A^2 with s = rho_e^2 - 1. For s < h, where A = (1 + h) / rho_e,
    # it falls in s. Above, and for two draws with s = tau^2 everywhere, it is (n + n_e s) (1 + h^2 / s)
    # = n + n_e h^2 + n_e s + n h^2 / s, least at s = h sqrt(n / n_e) >= h. Where D / 2 is priced, radius and shift
    # are halved together, (D / 2)^2 = max of (t + h / 2)^2 / rho_e^2 + 1 - t^2: the same with h / 2 for h.
    best = shift * unit * math.sqrt(over_encoder)
    if scheme == "split":
        tau = shift if split == "paper" else math.sqrt(best)
        a, d = (split_sensitivity(shift, tau, radius=r) for r in (1.0, 2.0))
        return TermwiseNoise(math.hypot(1.0, tau), 1.0, Sensitivity(a, d), f"split_{split}")
    # Without a rest every rho_e costs the same, z being free: the plain meaning of z decides.
    scale = math.sqrt(1.0 + best) if scheme == "blocks" and over_encoder > 1.0 else 1.0
    a, d = (block_sensitivity(shift, scale, radius=r) for r in (1.0, 2.0))
    return TermwiseNoise(scale, 1.0, Sensitivity(a, d), scheme)


def _batch_shift(l2_norm_clip: float, batch_l2_norm_clip: float, expected_batch_size: float, partitions: int) -> float:
    c1 = check.positive("l2_norm_clip", l2_norm_clip)
    c2 = check.positive("batch_l2_norm_clip", batch_l2_norm_clip)
    batch = check.positive("expected_batch_size", expected_batch_size)
    partitions = check.count("num_partitions", partitions, 1)
    if partitions > batch:
        raise ValueError(
            f"num_partitions={partitions} exceeds expected_batch_size={batch:g}: most groups would be empty. "
            "Take fewer partitions, or a larger batch."
        )
    shift = 2.0 * (c2 / c1) * (batch / partitions)
    if not 0.0 < shift <= 1e12:
        raise ValueError(
            f"batch_l2_norm_clip={c2:g} moves the sum by {shift:g} times l2_norm_clip={c1:g}, which is out of range; "
            "bring the two clips closer together."
        )
    return shift


def priced_sensitivity(
    sensitivity: Sensitivity, sampling: SamplingScheme | None, neighboring_relation: NeighboringRelation
) -> float:
    """Returns A or D / 2, whichever a plan prices, to which z is proportional at equal epsilon; None is Poisson."""
    relation = check.relation(neighboring_relation)
    if not isinstance(sampling, SamplingScheme | None):
        raise TypeError(f"sampling={sampling!r} is not a sampling scheme; pass the plan's, or None for Poisson.")
    return sensitivity.add_or_remove if sampling is None else sampling.unit_sensitivity(sensitivity, relation)
