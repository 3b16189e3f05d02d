"""Normals by their natural parameters, in NumPy.

Products add the parameters, quotients subtract them, and a factor may be improper.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

_MOST_HALVINGS = 30
# Posteriors without which no direction is seen, and the share of equal moves in one direction.
_FEW = 5
_STEADY = 0.75
_LARGEST_RATIO = 0.95
# How much more than its records can say a hospital may send: noise, and steps that end early.
_SLACK = 10.0


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """An unnormalised normal `exp(shift . z - z' precision z / 2)` over unconstrained parameters z.

    Args:
      shift: Precision times mean, float64 of shape [d].
      precision: float64 of shape [d] for mean-field, or symmetric [d, d] for full rank. It need not
        be positive.

    Raises:
      ValueError: Shapes do not fit, values are not finite, or a matrix is not symmetric.

    ```python
    >>> import numpy as np
    >>> prior = Factor.normal(mean=np.zeros(1), covariance=np.ones(1))
    >>> posterior = prior * Factor(shift=np.array([3.0]), precision=np.array([2.0]))
    >>> float(posterior.mean[0]), float(posterior.precision[0])
    (1.0, 3.0)

    ```
    """

    shift: np.ndarray
    precision: np.ndarray

    def __post_init__(self) -> None:
        shift, precision = _numbers(self.shift), _numbers(self.precision)
        if shift.ndim != 1 or precision.shape not in (shift.shape, shift.shape * 2):
            raise ValueError(
                f"shift and precision have shapes {shift.shape} and {precision.shape}; "
                "pass [d] and [d], or [d] and [d, d]."
            )
        if not (np.isfinite(shift).all() and np.isfinite(precision).all()):
            raise ValueError("shift or precision is not finite; pass finite numbers.")
        if precision.ndim == 2:
            half = precision / 2.0  # Sums of halves do not overflow.
            # In the entries' own units, which may differ by many orders of magnitude.
            diagonal = np.sqrt(np.abs(np.diag(half)))
            size = np.maximum(np.outer(diagonal, diagonal), np.abs(half))
            if (np.abs(half - half.T) > 1e-8 * np.maximum(size, size.T)).any():
                raise ValueError("precision is not symmetric; pass a symmetric matrix.")
            precision = half + half.T
        for name, array in (("shift", shift), ("precision", precision)):
            array.flags.writeable = False
            object.__setattr__(self, name, array)

    @classmethod
    def one(cls, num: int, *, full_rank: bool) -> Factor:
        """Returns the factor 1, where a hospital starts.

        Args:
          num: Number of parameters d.
          full_rank: Whether the precision is a matrix.
        """
        return cls(np.zeros(num), np.zeros([num] * (2 if full_rank else 1)))

    @classmethod
    def normal(cls, mean: np.ndarray, covariance: np.ndarray) -> Factor:
        """Returns a normal from its moments.

        Args:
          mean: Shape [d].
          covariance: Variances of shape [d], or a matrix of shape [d, d].
        """
        mean, covariance = np.asarray(mean, np.float64), np.asarray(covariance, np.float64)
        if covariance.ndim == 1:
            return cls(mean / covariance, 1.0 / covariance)
        precision = _inverse(covariance)
        return cls(precision @ mean, precision)

    @property
    def num(self) -> int:
        """Number of parameters d."""
        return len(self.shift)

    @property
    def full_rank(self) -> bool:
        """True if the precision is a matrix."""
        return self.precision.ndim == 2

    def __mul__(self, other: Factor) -> Factor:
        return Factor(self.shift + other.shift, self.precision + other.precision)

    def __truediv__(self, other: Factor) -> Factor:
        return Factor(self.shift - other.shift, self.precision - other.precision)

    def __pow__(self, power: float) -> Factor:
        return Factor(power * self.shift, power * self.precision)

    @property
    def norm(self) -> float:
        """Euclidean norm of all natural parameters."""
        parts = np.concatenate([self.shift, self.precision.ravel()])
        largest = float(np.abs(parts).max(initial=0.0))
        # Squares of the numbers themselves may overflow.
        return largest * float(np.linalg.norm(parts / largest)) if largest else 0.0

    def exceeds(self, floor: np.ndarray | float) -> bool:
        """Returns True if the precision minus `floor` is positive definite."""
        rest = self.precision - floor
        if rest.ndim == 1:
            return bool((rest > 0.0).all())
        try:
            np.linalg.cholesky(rest)
        except np.linalg.LinAlgError:
            return False
        return True

    @property
    def proper(self) -> bool:
        """True if the precision is positive definite: a normal distribution."""
        return self.exceeds(0.0)

    @property
    def mean(self) -> np.ndarray:
        """Mean [d] of a proper factor."""
        if self.full_rank:
            return np.asarray(np.linalg.solve(self.precision, self.shift))
        return np.asarray(self.shift / self.precision)

    @property
    def covariance(self) -> np.ndarray:
        """Variances [d] or covariance matrix [d, d] of a proper factor."""
        return _inverse(self.precision) if self.full_rank else 1.0 / self.precision

    @property
    def stddev(self) -> np.ndarray:
        """Standard deviations [d] of a proper factor."""
        variances = np.diagonal(self.covariance) if self.full_rank else self.covariance
        return np.asarray(np.sqrt(variances))

    def sample(self, num: int, rng: np.random.Generator) -> np.ndarray:
        """Returns draws from a proper factor.

        Args:
          num: Number of draws.
          rng: Source of the draws.

        Returns:
          Array of shape [num, d].
        """
        noise = rng.normal(size=(num, self.num))
        if not self.full_rank:
            return self.mean + noise * self.stddev
        # L^-T noise has covariance (L L')^-1 where the precision is L L'.
        return self.mean + np.linalg.solve(np.linalg.cholesky(self.precision).T, noise.T).T


def _numbers(values: np.ndarray) -> np.ndarray:
    """Returns a copy as float64; refuses texts, which NumPy would read as numbers."""
    array = np.array(values)
    if array.dtype.kind not in "fiu":
        raise ValueError("shift or precision is no array of numbers; pass finite numbers.")
    return array.astype(np.float64)


def _inverse(matrix: np.ndarray) -> np.ndarray:
    inverse = np.linalg.inv(matrix)
    return np.asarray((inverse + inverse.T) / 2.0)


def product(factors: list[Factor]) -> Factor:
    """Returns the product of one factor or more."""
    shift = np.sum([factor.shift for factor in factors], 0)
    return Factor(shift, np.sum([factor.precision for factor in factors], 0))


def movement(before: Factor, after: Factor) -> tuple[float, float]:
    """Returns how far one proper factor lies from an earlier one.

    Args:
      before: The earlier factor.
      after: The later one, whose standard deviations are the unit.

    Returns:
      The largest change of a coordinate's mean, in its standard deviations, and the largest
      factor, at least 1, by which a standard deviation grew or shrank.
    """
    means = np.abs(after.mean - before.mean) / after.stddev
    ratios = after.stddev / before.stddev
    return float(means.max()), float(np.maximum(ratios, 1.0 / ratios).max())


def drift(path: Sequence[Factor]) -> float:
    """Returns how far a mean that has not arrived went over the last half of a path.

    Noise moves a mean to and fro: its total move is about the root of the sum of squares of its
    single moves. Moves in one direction are continued as the geometric series that has the sums of
    their halves, and count if more than a standard deviation of it is ahead.

    Args:
      path: Proper factors after whole rounds, the earliest first.

    Returns:
      The largest distance of such a coordinate, in the last standard deviations; 0 if there is
      none, or if the path is too short to tell.
    """
    half = path[len(path) // 2 :]
    if len(half) < _FEW:
        return 0.0
    moves = np.diff([factor.mean for factor in half], axis=0) / half[-1].stddev
    total, size = moves.sum(0), np.sqrt((moves**2).sum(0))
    steady = np.abs(total) > _STEADY * np.sqrt(len(moves)) * size
    last = moves[-(len(moves) // 2) :].sum(0)
    before = moves[: len(moves) // 2].sum(0)
    with np.errstate(all="ignore"):
        ratio = np.clip(np.nan_to_num(last / before), 0.0, _LARGEST_RATIO)
    ahead = np.abs(last) * ratio / (1.0 - ratio)
    return float(np.where(steady & (ahead > 1.0), np.abs(total), 0.0).max())


def guard(posterior: Factor, change: Factor, floor: np.ndarray) -> float:
    """Returns the share of a change that keeps a posterior's precision above a floor.

    All changes of a round are scaled by the same share, so that the posterior stays the product of
    prior and factors.

    Args:
      posterior: The present posterior, whose precision lies above the floor.
      change: The product of the round's changes.
      floor: Half of the prior's precision, of its shape.

    Returns:
      The largest f of 1, 1/2, 1/4, ... at which the precision of `posterior * change ** f` minus
      `floor` is positive definite; 0 if there is none.
    """
    for halvings in range(_MOST_HALVINGS):
        if (posterior * change**0.5**halvings).exceeds(floor):
            return 0.5**halvings
    return 0.0


def guards(
    posterior: Factor,
    changes: Mapping[str, Factor],
    factors: Mapping[str, Factor],
    floor: np.ndarray,
) -> dict[str, float]:
    """Returns the share of each hospital's change that is taken.

    By itself a hospital keeps the posterior's precision above a floor, and takes away at most half
    of the precision that the others and the prior have. If the sum of all K changes goes below the
    floor, each also keeps K times its change above it: their mean then is above the floor, so that
    the sum is, and who takes no precision away keeps its share of 1.

    Args:
      posterior: The present posterior, whose precision lies above the floor.
      changes: The changes of a round, by hospital.
      factors: The present factors, by hospital.
      floor: Half of the prior's precision, of its shape.
    """
    shares = {}
    for name, change in changes.items():
        others = posterior / factors[name]
        half = others.precision / 2.0 if others.proper else floor
        # A factor that has taken its half already may give some back.
        least = half if posterior.exceeds(half) else floor
        shares[name] = min(guard(posterior, change, floor), guard(posterior, change, least))
    if guard(posterior, product([changes[name] ** shares[name] for name in changes]), floor) < 1.0:
        num = float(len(changes))
        for name, change in changes.items():
            shares[name] = min(shares[name], guard(posterior, change**num, floor))
    return shares


@dataclasses.dataclass(frozen=True)
class Cap:
    """The most that records of a bounded gradient can say, whoever sends it.

    N records whose gradients have norms of at most C pull a mean by at most N C in natural
    parameters, and carry information of a trace of about N C^2. Ten times that is allowed.

    Args:
      num_records: The declared number of records N.
      clip: The bound C.
      start_precision: See `StudyTerms`.

    ```python
    >>> import numpy as np
    >>> prior = Factor.normal(np.zeros(1), np.ones(1))
    >>> nothing, liar = Factor.one(1, full_rank=False), Factor(np.array([0.0]), np.array([1e6]))
    >>> Cap(num_records=100, clip=1.0).share(prior, nothing, liar) * 1e6 <= 1000.0
    True

    ```
    """

    num_records: int
    clip: float
    start_precision: float = 0.0

    def share(self, cavity: Factor, own: Factor, change: Factor) -> float:
        """Returns the largest f of 1, 1/2, 1/4, ... with `own * change ** f` within the cap.

        Args:
          cavity: The posterior without the hospital's factor.
          own: The hospital's factor so far.
          change: The change that it sends.

        Returns:
          The share; 0 if there is none.
        """
        return next(
            (0.5**n for n in range(_MOST_HALVINGS) if self._holds(cavity, own * change**0.5**n)),
            0.0,
        )

    def _holds(self, cavity: Factor, own: Factor) -> bool:
        start = self.start_precision * own.num
        most = _SLACK * self.num_records * self.clip**2 + start
        diagonal = np.diagonal(own.precision) if own.full_rank else own.precision
        if np.abs(diagonal).sum() > most:
            return False
        posterior = cavity * own
        if not posterior.proper:
            return True  # The guard's business.
        precision = cavity.precision
        mean = posterior.mean
        pull = (precision @ mean if own.full_rank else precision * mean) - cavity.shift
        return float(np.linalg.norm(pull)) <= _SLACK * self.num_records * self.clip
