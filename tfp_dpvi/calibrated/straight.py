"""Values of parameters in which scores are linear, where they are not in the coordinates.

A share near 0 has a logit far down, where the likelihood hardly changes any more; but in the share
itself it is nearly normal. The released score and its slope at a point say the same of both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import numpy as np

from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.pairing import Pairing

Values = Callable[[tf.Tensor], tf.Tensor]
Likelihood = Callable[..., tfd.Distribution]

_MARK = "linear_values"
_NUM_DRAWS = 256


def linear_in(
    part: str, values: Callable[..., Values | None]
) -> Callable[[Likelihood], Likelihood]:
    """Decorates a likelihood whose scores are linear in values of a part of its parameters.

    Args:
      part: The name of the part, which has no constraint.
      values: Takes what a `functools.partial` of the likelihood fixes, and returns a function from
        the part's entries, shape [n, p], to as many values, or None if they are these themselves.
    """

    def mark(likelihood: Likelihood) -> Likelihood:
        vars(likelihood)[_MARK] = part, values
        return likelihood

    return mark


@dataclasses.dataclass(frozen=True)
class Straight:
    """A map of coordinates that makes scores linear, and is the identity to first order at a point.

    Attributes:
      values: See `linear_in`.
      place: The places of the part among the coordinates that the likelihood reads, shape [p].
      point: The part at the point, shape [p].
      unit: The unit of each of these coordinates, shape [p].
    """

    values: Values
    place: np.ndarray
    point: np.ndarray
    unit: np.ndarray

    @classmethod
    def of_pairing(cls, pairing: Pairing, theta: np.ndarray, unit: np.ndarray) -> Straight | None:
        """Returns the map of a model's likelihood, or None if it says nothing of its scores.

        Args:
          pairing: The model, whose likelihood may be a `functools.partial` of a decorated one.
          theta: The point at which scores are taken, in these units, shape [d].
          unit: The units of the coordinates that the likelihood reads, shape [d].
        """
        likelihood = pairing.model.likelihood
        keywords: dict[str, Structure] = {}
        while isinstance(likelihood, functools.partial):
            keywords = {**likelihood.keywords, **keywords}
            likelihood = likelihood.func
        part, values_of = getattr(likelihood, _MARK, ("", None))
        values = None if values_of is None else values_of(**keywords)
        if values is None:
            return None
        names = [pairing.coordinates.names[number] for number in pairing.index]
        place = np.flatnonzero([name.partition("[")[0] == part for name in names])
        return cls(values, place, theta[place], unit[place])

    def applies_to(self, linear: Mixture, index: np.ndarray) -> bool:
        """Returns whether no value may change its sign, where coordinates would hardly matter.

        Args:
          linear: The posterior for a linear score.
          index: The coordinates that the likelihood reads, shape [d].
        """
        read = linear.sample(_NUM_DRAWS, np.random.default_rng(0))[:, index[self.place]]
        values, _ = self._at(read)
        changes = np.any(values != read * self.unit, axis=0)
        signs = np.sign(values[:, changes])
        return bool(np.all(signs == signs[0]))

    def __call__(self, read: np.ndarray) -> tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]:
        """Returns points in which scores are linear, and the map of gradients back from there.

        Args:
          read: Coordinates that the likelihood reads, shape [n, d].
        """
        values, slopes = self._at(read[:, self.place])
        start, inverse = self._start
        moved = read.copy()
        moved[:, self.place] = self.point + (values - start) @ inverse.T
        slopes = inverse @ slopes

        def pull_back(gradient: np.ndarray) -> np.ndarray:
            pulled = gradient.copy()
            pulled[:, self.place] = np.einsum("nji,nj->ni", slopes, gradient[:, self.place])
            return pulled

        return moved, pull_back

    @functools.cached_property
    def _start(self) -> tuple[np.ndarray, np.ndarray]:
        """The values at the point, shape [p], and the inverse of their slopes there."""
        values, slopes = self._at(self.point[None])
        return values[0], np.linalg.inv(slopes[0])

    def _at(self, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns values [n, p] and their slopes [n, p, p]."""
        values, slopes = self._traced(tf.constant(part))
        return values.numpy(), slopes.numpy()

    @functools.cached_property
    def _traced(self) -> Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]:
        def at(part: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                tape.watch(part)
                values = self.values(part * self.unit)
            return values, tape.batch_jacobian(values, part)

        signature = [tf.TensorSpec([None, len(self.place)], tf.float64)]
        traced: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]] = tf.function(
            at, input_signature=signature, autograph=False
        )
        return traced
