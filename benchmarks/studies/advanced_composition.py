"""Advanced composition as in the 2017 paper, for comparison with its values. Importing it registers its accountant.

Jälkö, Dikmen and Honkela 2017 (arXiv:1610.08749), equations 7 and 8: each step is a Gaussian mechanism by the classical
bound, its guarantee is amplified by subsampling, and the steps are composed by advanced composition (Dwork and Roth 2014,
theorem 3.20). PLD is far tighter.

The authors' code (github.com/DPBayes/DPVI-code, `act`) has log(1.25 / delta') instead of the theorem's log(1 / delta'):
`composition_constant=1.25` gives its values. The paper's sigma is relative to 2 C and its guarantee is for replacing a record:
its epsilon is `2 * jalko2017_epsilon(2 * sigma, q, T, delta / 2)`. (Half of delta is too much: (epsilon / 2, delta') under
add-or-remove-one gives (epsilon, (1 + e^{epsilon / 2}) delta') under replace-one.)
"""

import math

from dp_accounting import DpEvent, NeighboringRelation

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.accountants import (
    ACCOUNTANTS,
    Accountant,
    Releases,
    poisson_replace_refusal,
)
from tfp_dpvi.privacy.tradeoff import gaussian_delta

#: The fraction of delta for composition, as in the authors' experiments.
COMPOSITION_SHARE = 0.2


def jalko2017_epsilon(
    z: float,
    sampling_probability: float,
    num_releases: int,
    delta: float,
    composition_constant: float = 1.0,
) -> float:
    """Returns the total epsilon of the paper's advanced composition; a guarantee only if the classical bound holds.

    For T releases of multiplier z at rate q, delta' = delta / 5, delta_0 = (delta - delta') / (q T) and the constant c >= 1:
    epsilon_0 = sqrt(2 log(1.25 / delta_0)) / z, the classical Gaussian bound;
    epsilon_1 = log(1 + q (e^{epsilon_0} - 1)), amplification, with delta_1 = q delta_0;
    epsilon = sqrt(2 T log(c / delta')) epsilon_1 + T epsilon_1 (e^{epsilon_1} - 1).
    """
    delta = check.delta(delta)
    z = check.positive("z", z)
    q = check.probability("sampling_probability", sampling_probability)
    releases = check.count("num_releases", num_releases, 1)
    constant = check.positive("composition_constant", composition_constant)
    if constant < 1.0:
        raise ValueError(f"composition_constant={constant} must be at least 1; the theorem's is 1.")
    epsilon_0, _ = _of_one_step(z, q, releases, delta)
    epsilon_1 = math.log1p(q * math.expm1(epsilon_0)) if epsilon_0 < 700.0 else math.inf
    if epsilon_1 > 300.0:
        return math.inf
    spread = (
        math.sqrt(2.0 * releases * math.log(constant / (COMPOSITION_SHARE * delta))) * epsilon_1
    )
    return spread + releases * epsilon_1 * math.expm1(epsilon_1)


def _of_one_step(z: float, q: float, num_releases: int, delta: float) -> tuple[float, float]:
    """Returns epsilon_0 and delta_0."""
    delta_0 = min(0.999, (1.0 - COMPOSITION_SHARE) * delta / (q * num_releases))
    return math.sqrt(2.0 * math.log(1.25 / delta_0)) / z, delta_0


class AdvancedCompositionAccountant(Accountant):
    """Advanced composition with amplification as in the 2017 paper; for comparison only."""

    name = "advanced_composition"
    over_replacement = True

    def refusal(self, releases: Releases, replace: bool) -> tuple[str, str] | None:
        """Refuses fixed-size samples, Poisson samples under replace-one, and releases of several kinds."""
        if releases.fixed_size:
            return "fixed-size sampling", "use accountant='rdp' and replace_one"
        if releases.poisson and replace:
            return poisson_replace_refusal()
        if len(releases.full) + len(releases.poisson) > 1:
            return "releases of several kinds", "use accountant='pld'"
        return None

    def epsilon(
        self, event: DpEvent, delta: float, relation: NeighboringRelation, *, coarser: int = 0
    ) -> float:
        """Returns epsilon by equations 7 and 8 of the paper, infinity if their bound fails."""
        del coarser
        delta = check.delta(delta)
        releases = self.releases(event, relation)
        if not releases.private:
            return math.inf
        unit = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
        kinds = {(q, z / unit): n for (q, z), n in releases.full.items()} | releases.poisson
        for (q, z), n in kinds.items():  # One at most.
            # The classical bound needs epsilon_0 <= 1, which the paper's settings often exceed: check by the closed form.
            epsilon_0, delta_0 = _of_one_step(z, q, n, delta)
            return (
                jalko2017_epsilon(z, q, n, delta)
                if gaussian_delta(epsilon_0, 1.0 / z) <= delta_0
                else math.inf
            )
        return 0.0


ACCOUNTANTS[AdvancedCompositionAccountant.name] = AdvancedCompositionAccountant()
