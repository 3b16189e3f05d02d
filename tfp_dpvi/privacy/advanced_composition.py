"""The accounting of the 2017 paper before the moments accountant, for comparison with its figures.

Jälkö, Dikmen and Honkela 2017 (arXiv:1610.08749), equations 7 and 8: each step is a Gaussian
mechanism by the classical bound, its guarantee is amplified by subsampling, and the steps are
composed by advanced composition (Dwork and Roth 2014, theorem 3.20). PLD is far tighter.

The code that the authors released (github.com/DPBayes/DPVI-code, `act`) has log(1.25 / delta') where
the theorem has log(1 / delta'): 1.2 % more epsilon at delta' = 1e-4. `composition_constant=1.25`
gives its figures. The paper's sigma is over 2 C and its guarantee is for replacing a record: its
epsilon is `2 * jalko2017_epsilon(2 * sigma, q, T, delta / 2)` (for the delta of such a conversion see
`group_privacy`: half is too much).
"""

import math

from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi.privacy import _validation as check
from tfp_dpvi.privacy import analytic_gaussian
from tfp_dpvi.privacy._events import count_releases
from tfp_dpvi.privacy.errors import UnsupportedPairError

#: The share of delta that composition itself uses up, as in the authors' experiments.
COMPOSITION_SHARE = 0.2


def jalko2017_epsilon(
    noise_multiplier: float,
    sampling_probability: float,
    num_releases: int,
    delta: float,
    composition_delta: float | None = None,
    composition_constant: float = 1.0,
) -> float:
    """Returns the total epsilon of the paper's advanced composition.

    With delta' = `composition_delta` and delta_0 = (delta - delta') / (q T):
    epsilon_0 = sqrt(2 log(1.25 / delta_0)) / z, the classical Gaussian bound;
    epsilon_1 = log(1 + q (e^{epsilon_0} - 1)), amplification, with delta_1 = q delta_0;
    epsilon = sqrt(2 T log(c / delta')) epsilon_1 + T epsilon_1 (e^{epsilon_1} - 1), with c = 1.

    The figure is a guarantee only where the classical bound holds; `AdvancedCompositionAccountant`
    checks that, this function does not.

    Args:
      noise_multiplier: z, standard deviation over the sensitivity.
      sampling_probability: q.
      num_releases: T.
      delta: the total delta.
      composition_delta: delta', by default a fifth of `delta`.
      composition_constant: c, at least 1: 1 as in the theorem, 1.25 as in the authors' code.
    """
    delta = check.delta(delta)
    z = check.positive("noise_multiplier", noise_multiplier)
    q = check.probability("sampling_probability", sampling_probability)
    releases = check.count("num_releases", num_releases, 1)
    slack = COMPOSITION_SHARE * delta if composition_delta is None else check.delta(composition_delta)
    if slack >= delta:
        raise ValueError(f"composition_delta={slack} must be below delta={delta}; pass a part of it.")
    constant = check.positive("composition_constant", composition_constant)
    if constant < 1.0:
        raise ValueError(f"composition_constant={constant} must be at least 1; the theorem's is 1.")
    delta_0 = _step_delta(q, releases, delta, slack)
    epsilon_0 = math.sqrt(2.0 * math.log(1.25 / delta_0)) / z
    if epsilon_0 > 700.0:
        return math.inf
    epsilon_1 = math.log1p(q * math.expm1(epsilon_0))
    return (
        math.sqrt(2.0 * releases * math.log(constant / slack)) * epsilon_1
        + releases * epsilon_1 * math.expm1(epsilon_1)
        if epsilon_1 < 300.0
        else math.inf
    )


def _step_delta(q: float, releases: int, delta: float, slack: float) -> float:
    return min(0.999, (delta - slack) / (q * releases))


def classical_bound_holds(noise_multiplier: float, q: float, num_releases: int, delta: float) -> bool:
    """Returns whether the classical Gaussian bound of each step is true, by the closed form.

    Its textbook proof needs epsilon_0 <= 1; the paper's settings often exceed that, so the claim is
    checked against the exact delta of the Gaussian mechanism.
    """
    delta_0 = _step_delta(q, num_releases, delta, COMPOSITION_SHARE * delta)
    epsilon_0 = math.sqrt(2.0 * math.log(1.25 / delta_0)) / noise_multiplier
    return analytic_gaussian.gaussian_delta(epsilon_0, 1.0 / noise_multiplier) <= delta_0


def total_epsilon(event: DpEvent, delta: float, relation: NeighboringRelation) -> float:
    """Returns the epsilon of an event with releases of one kind, infinity where the bound fails.

    Raises:
      UnsupportedPairError: for releases of several kinds, or Poisson sampling under replace-one.
    """
    counts = count_releases(event)
    if counts.non_private:
        return math.inf
    kinds = len(counts.gaussian) + len(counts.poisson)
    if kinds == 0 and not counts.fixed_size:
        return 0.0
    if kinds != 1 or counts.fixed_size:
        raise UnsupportedPairError(
            "accountant='advanced_composition' prices releases of one kind only, by Poisson sampling or "
            "on all records; use accountant='pld' for a mixture."
        )
    if counts.poisson:
        if relation is not NeighboringRelation.ADD_OR_REMOVE_ONE:
            raise UnsupportedPairError(
                "accountant='advanced_composition' has no price for Poisson sampling under replace-one; use 'pld'."
            )
        (((q, z), n),) = counts.poisson.items()
    else:
        ((z, n),) = counts.gaussian.items()
        q, z = 1.0, z / (2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0)
    if not classical_bound_holds(z, q, n, delta):
        return math.inf
    return jalko2017_epsilon(z, q, n, delta)
