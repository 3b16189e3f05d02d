"""Noise for sums of a sample-wise and a batch-wise term (design section 5.3).

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
price (section 5.5) gives two draws of which it is the sum, and the optimum lies there. Blocks need n_e fewer normals.
"""

import dataclasses
import math
from collections.abc import Callable

from dp_accounting import NeighboringRelation

from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy.sampling_schemes import SamplingScheme
from tfp_dpvi.privacy.sensitivity import Sensitivity

_SPLITS = ("optimal", "paper")


def block_sensitivity(
    batch_shift: float, encoder_scale: float, rest_scale: float = 1.0, *, radius: float = 1.0
) -> float:
    """Returns the most that one record moves the whitened sum: exact, in closed form.

    max over |u_e|^2 + |u_d|^2 <= radius^2 of
    sqrt((|u_e| + batch_shift)^2 / encoder_scale^2 + |u_d|^2 / rest_scale^2).

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
    # F' > 0 up to t = h / s, if s > 0, and everywhere otherwise. So either h / s >= r and the maximum is the end
    # point t = r, the record's whole gradient on the encoder, F = (r + h)^2 / (1 + s); or it is the interior
    # t = h / s, where F = h^2 (1 + s) / s^2 + r^2 - h^2 / s^2 = r^2 + h^2 / s.
    s = ((e - d) / d) * ((e + d) / d)
    if s * r <= h:
        return (r + h) / e
    return math.hypot(r, h / math.sqrt(s)) / d


def split_sensitivity(batch_shift: float, batch_scale: float, *, radius: float = 1.0) -> float:
    """Returns what two draws, jointly released, are priced at (section 5.5): sqrt(radius^2 + (h / tau)^2).

    Args:
      batch_shift: h, the most that the batch-wise term moves, in units of `l2_norm_clip`; at least 0.
      batch_scale: tau, standard deviation of the batch-wise term's own draw over z * `l2_norm_clip`.
      radius: 1 for presence (A), 2 for replacement (D).
    """
    h, tau = check.non_negative("batch_shift", batch_shift), check.positive("batch_scale", batch_scale)
    return math.hypot(check.positive("radius", radius), h / tau)


@dataclasses.dataclass(frozen=True)
class TermwiseNoise:
    """How large the noise on each block is, and what it costs.

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

    def __post_init__(self) -> None:
        object.__setattr__(self, "encoder_scale", check.positive("encoder_scale", self.encoder_scale))
        object.__setattr__(self, "rest_scale", check.positive("rest_scale", self.rest_scale))
        if not isinstance(self.sensitivity, Sensitivity):
            raise TypeError(
                f"sensitivity={self.sensitivity!r} is not a Sensitivity; pass Sensitivity(add_or_remove=..., replace=...)."
            )

    def total_variance(self, num_encoder: int, num_rest: int) -> float:
        """Returns the noise's variance summed over all coordinates, in units of (z * `l2_norm_clip`)^2."""
        num_encoder, num_rest = _dimensions(num_encoder, num_rest)
        return num_encoder * self.encoder_scale**2 + num_rest * self.rest_scale**2

    def variance_at_equal_privacy(
        self,
        num_encoder: int,
        num_rest: int,
        *,
        sampling: SamplingScheme | None = None,
        neighboring_relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> float:
        """Returns the total variance that a fixed epsilon costs, up to a factor that all schemes share.

        At equal epsilon z is proportional to what the plan prices, A or D / 2
        (`SamplingScheme.unit_sensitivity`), so this is `total_variance` times its square.

        Args:
          num_encoder: n_e, number of encoder coordinates, at least 1.
          num_rest: n_d, number of other coordinates.
          sampling: how the plan's records are drawn; None for Poisson.
          neighboring_relation: the plan's adjacency.
        """
        unit = _unit_sensitivity(self.sensitivity, sampling, neighboring_relation)
        return self.total_variance(num_encoder, num_rest) * unit**2

    def describe(self) -> str:
        """Returns one sentence for a person who is not a programmer."""
        kind = _DESCRIPTIONS.get(self.scheme, self.scheme)
        return (
            f"{kind}: its standard deviation is noise_multiplier x l2_norm_clip times {self.encoder_scale:.4g} on the "
            f"encoder's coordinates and times {self.rest_scale:.4g} on the others; divided by these two scales, the sum "
            f"moves by at most {self.sensitivity.add_or_remove:.4g} x l2_norm_clip with one record's presence and "
            f"{self.sensitivity.replace:.4g} x l2_norm_clip with its replacement"
        )


_DESCRIPTIONS = {
    "blocks": "noise in two blocks of the least total variance",
    "single": "one size of noise for all coordinates",
    "split_optimal": "two draws of noise, one for each term, split for the least total variance",
    "split_paper": "two draws of noise, one for each term, at equal shares of the privacy budget",
}


@dataclasses.dataclass(frozen=True)
class _Setting:
    """What a scheme may look at: h, the part of h that is priced, and n / n_e."""

    batch_shift: float
    priced_shift: float
    num_over_encoder: float


def _in_blocks(name: str, setting: _Setting, encoder_scale: float) -> TermwiseNoise:
    a, d = (block_sensitivity(setting.batch_shift, encoder_scale, radius=r) for r in (1.0, 2.0))
    return TermwiseNoise(encoder_scale, 1.0, Sensitivity(a, d), name)


def _in_two_draws(name: str, setting: _Setting, batch_scale: float) -> TermwiseNoise:
    a, d = (split_sensitivity(setting.batch_shift, batch_scale, radius=r) for r in (1.0, 2.0))
    return TermwiseNoise(math.hypot(1.0, batch_scale), 1.0, Sensitivity(a, d), name)


def _best_batch_variance(setting: _Setting) -> float:
    # Where A is priced, the cost is (n_e (1 + s) + n_d) A^2 with s = rho_e^2 - 1. For s < h, where A = (1 + h) / rho_e,
    # it falls in s. Above, and for two draws with s = tau^2 everywhere, it is (n + n_e s) (1 + h^2 / s)
    # = n + n_e h^2 + n_e s + n h^2 / s, least at s = h sqrt(n / n_e) >= h. Where D / 2 is priced, radius and shift
    # are halved together, (D / 2)^2 = max of (t + h / 2)^2 / rho_e^2 + 1 - t^2: the same with h / 2 for h.
    return setting.priced_shift * math.sqrt(setting.num_over_encoder)


def _blocks(setting: _Setting) -> TermwiseNoise:
    # Without a rest every rho_e costs the same, z being free: the plain meaning of z decides.
    excess = _best_batch_variance(setting) if setting.num_over_encoder > 1.0 else 0.0
    return _in_blocks("blocks", setting, math.sqrt(1.0 + excess))


def _single(setting: _Setting) -> TermwiseNoise:
    return _in_blocks("single", setting, 1.0)


def _split_optimal(setting: _Setting) -> TermwiseNoise:
    return _in_two_draws("split_optimal", setting, math.sqrt(_best_batch_variance(setting)))


def _split_paper(setting: _Setting) -> TermwiseNoise:
    return _in_two_draws("split_paper", setting, setting.batch_shift)


_SCHEMES: dict[str, Callable[[_Setting], TermwiseNoise]] = {
    "blocks": _blocks,
    "single": _single,
    "split_optimal": _split_optimal,
    "split_paper": _split_paper,
}


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
    * `"split"`: two draws, of standard deviation z C1 on g_sample and z C1 tau on (B / b) g_batch, priced as
      released both (section 5.5) though only their sum is used. `split="optimal"` takes the tau of least total
      variance at equal privacy. `split="paper"` divides the budget equally, tau = 2 C2 B / (C1 b), so that both draws
      have one multiplier over their own sensitivities and A = sqrt(2). That is the plain reading of the factor kappa
      of about 2 (in variance) in Takahashi et al. 2020 (arXiv:2006.11204), with the sensitivity of the batch-wise
      term corrected to 2 C2; it could not be checked against the paper's text. It is there to compare with.

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
        priced (`SamplingScheme.unit_sensitivity`), which moves the optimum. The guarantee does not depend on it.
      neighboring_relation: the plan's adjacency, for the same purpose.

    Raises:
      TypeError, ValueError: naming the argument, its value and the fix.
    """
    name = _scheme_name(scheme, split)
    c1 = check.positive("l2_norm_clip", l2_norm_clip)
    c2 = check.positive("batch_l2_norm_clip", batch_l2_norm_clip)
    batch = check.positive("expected_batch_size", expected_batch_size)
    partitions = check.count("num_partitions", num_partitions, 1)
    if partitions > batch:
        raise ValueError(
            f"num_partitions={partitions} exceeds expected_batch_size={batch:g}: most groups would be empty. "
            "Take fewer partitions, or a larger batch."
        )
    encoder, rest = _dimensions(num_encoder, num_rest)
    shift = 2.0 * (c2 / c1) * (batch / partitions)
    if not 0.0 < shift <= 1e12:
        raise ValueError(
            f"batch_l2_norm_clip={c2:g} moves the sum by {shift:g} times l2_norm_clip={c1:g}, which is out of range; "
            "bring the two clips closer together."
        )
    # A alone for D = A: 1 where A is priced, 1 / 2 where D / 2 is.
    priced = shift * _unit_sensitivity(Sensitivity(1.0, 1.0), sampling, neighboring_relation)
    return _SCHEMES[name](_Setting(shift, priced, (encoder + rest) / encoder))


def _scheme_name(scheme: str, split: str) -> str:
    known = ("blocks", "single", "split")
    if scheme not in known:
        raise ValueError(f"scheme={scheme!r} is unknown; pass one of {', '.join(map(repr, known))}.")
    if split not in _SPLITS:
        raise ValueError(f"split={split!r} is unknown; pass one of {', '.join(map(repr, _SPLITS))}.")
    return f"split_{split}" if scheme == "split" else scheme


def _dimensions(num_encoder: int, num_rest: int) -> tuple[int, int]:
    return check.count("num_encoder", num_encoder, 1), check.count("num_rest", num_rest)


def _unit_sensitivity(
    sensitivity: Sensitivity, sampling: SamplingScheme | None, neighboring_relation: NeighboringRelation
) -> float:
    relation = check.relation(neighboring_relation)
    if sampling is None:
        return sensitivity.add_or_remove  # As PoissonSampling under both adjacencies; its rate does not matter.
    if not isinstance(sampling, SamplingScheme):
        raise TypeError(
            f"sampling={sampling!r} is not a sampling scheme; pass the plan's, for example FullBatch(), or None for Poisson."
        )
    return sampling.unit_sensitivity(sensitivity, relation)
