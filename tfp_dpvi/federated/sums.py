"""The sums of a study's last phase: what each hospital releases at one public point.

All hospitals use the same point, coordinates and clip, so that their sums add up to those of one
hospital with all records, and the variances of their noise to that of the total.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from tfp_dpvi import _validate as check

NUM_RELEASES = 4
"""Releases of a hospital in the last phase: twins are drawn anew in each."""

Shapes = Mapping[str, tuple[int, ...]]

# Of the coordinates' largest entry: hospitals compute them on their own machines.
_AGREEMENT = 1e-3
# Standard deviations of the noise, and times the public number of records, which may be rounded.
_MOST_NOISE = 10.0
_MOST_RECORDS = 2.0


@dataclasses.dataclass(frozen=True, eq=False)
class SiteSums:
    """Released sums over all records of a hospital, or of several; public.

    Args:
      num_records: The public number of records.
      whitening: The coordinates W in which scores were clipped to norm 1, shape [d, d].
      halves: Mean sums over each half of the releases by name, of shapes [2, ...]: "score",
        "matrix" (symmetric), "scale", "excess" and "ranks", with weights "variance" (symmetric)
        and "weights" instead of the last. See `ReleasedSums` and `WeightSums`.
      deviations: The standard deviation of the noise on each of them by name; of a matrix, on its
        diagonal.

    Raises:
      TypeError, ValueError: A value is not finite, out of its range, or of another shape.

    ```python
    >>> halves = {"score": np.ones((2, 1)), "matrix": np.ones((2, 1, 1))}
    >>> sums = SiteSums(40, np.eye(1), halves, {"score": 3.0, "matrix": 1.0})
    >>> both = total_of([sums, sums])
    >>> both.num_records, both.mean("score").tolist(), round(both.deviation("score"), 6)
    (80, [2.0], 3.0)

    ```
    """

    num_records: int
    whitening: np.ndarray
    halves: dict[str, np.ndarray]
    deviations: dict[str, float]

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "num_records", check.count("num_records", self.num_records, 1))
        put(self, "whitening", np.asarray(self.whitening, np.float64))
        halves = {name: np.asarray(part, np.float64) for name, part in self.halves.items()}
        put(self, "halves", halves)
        noise = {name: check.positive(name, sd) for name, sd in self.deviations.items()}
        put(self, "deviations", noise)
        if noise.keys() != halves.keys():
            raise ValueError("sums and deviations have other names: pass one for each.")
        for name, part in {"whitening": self.whitening, **halves}.items():
            if not np.isfinite(part).all():
                raise ValueError(f"{name} is not finite.")
        for name in ("matrix", "variance"):
            part = halves.get(name, np.zeros(0))
            if part.ndim == 3 and not np.array_equal(part, np.swapaxes(part, 1, 2)):
                raise ValueError(f"{name} is not symmetric.")

    @classmethod
    def from_json(cls, value: check.Unchecked, shapes: Shapes) -> SiteSums:
        """Reads what a message has.

        Args:
          value: A JSON object, from whomever.
          shapes: The shape of each sum by name.

        Raises:
          TypeError, ValueError, OverflowError: It is no such object, or beyond what so many records
            and the noise can be.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        fields = check.fields("sums", value, needed=names, known=names)
        for name in ("halves", "deviations"):
            check.fields(name, fields[name], needed=shapes, known=shapes)
        sums = cls(**fields)
        (size,) = shapes["score"]
        wanted = {name: (2, *shape) for name, shape in shapes.items()}
        got = {name: part.shape for name, part in sums.halves.items()}
        if got != wanted or sums.whitening.shape != (size, size):
            raise ValueError(f"sums have the shapes {got!r:.200}, and the study's {wanted!r:.200}.")
        length = float(np.linalg.norm(sums.mean("score")))
        noise = sums.deviation("score") * (math.sqrt(size) + _MOST_NOISE)
        if length > _MOST_RECORDS * sums.num_records + noise:
            raise ValueError(
                f"score has length {length:.4g}, more than {sums.num_records} records make."
            )
        return sums

    def mean(self, name: str) -> np.ndarray:
        """Returns a sum, the mean of both halves."""
        mean: np.ndarray = self.halves[name].mean(axis=0)
        return mean

    def deviation(self, name: str) -> float:
        """Returns the standard deviation of the noise on `mean`."""
        return self.deviations[name] / math.sqrt(2.0)

    def agrees(self, other: SiteSums) -> bool:
        """Returns whether other sums are in the same coordinates, up to rounding."""
        most = float(np.abs(self.whitening).max())
        away = float(np.abs(self.whitening - other.whitening).max())
        return away <= _AGREEMENT * most


def total_of(sites: Sequence[SiteSums], weights: Sequence[float] | None = None) -> SiteSums:
    """Returns the sums of several hospitals together.

    Args:
      sites: The sums of each hospital, in the same coordinates.
      weights: A factor for each hospital's sums; None for ones.
    """
    factors = np.ones(len(sites)) if weights is None else np.asarray(weights, np.float64)

    def together(name: str) -> np.ndarray:
        parts = [factor * site.halves[name] for factor, site in zip(factors, sites, strict=True)]
        total: np.ndarray = np.sum(parts, axis=0)
        return total

    names = sites[0].halves
    noise = {
        name: math.hypot(
            *(
                float(factor) * site.deviations[name]
                for factor, site in zip(factors, sites, strict=True)
            )
        )
        for name in names
    }
    return SiteSums(
        num_records=sum(site.num_records for site in sites),
        whitening=sites[0].whitening,
        halves={name: together(name) for name in names},
        deviations=noise,
    )


def num_numbers(shapes: Shapes) -> int:
    """Returns how many numbers a message of such sums has at most; 0 without a last phase."""
    if not shapes:
        return 0
    (size,) = shapes["score"]
    return size**2 + sum(2 * math.prod(shape) + 1 for shape in shapes.values())
