"""The curvature of many coefficients: its diagonal, and probes of what correlations say.

The whole matrix has d^2 entries whose noise adds up. Its diagonal in whitened coordinates has a
small norm, hence little noise, but says nothing of correlations. They are those of public inputs.
Squares along public random directions show whether these are right.
"""

from __future__ import annotations

import functools
import math

import numpy as np
from scipy import stats

from tfp_dpvi._tf import tf
from tfp_dpvi.calibrated.centred import CentredCurvature, centred_releases, extra_of
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.clip import Clip, tiny
from tfp_dpvi.gradients.joint import JointRelease
from tfp_dpvi.privacy import Sensitivity

# Above, the curvature is known by its diagonal alone.
MOST_DENSE = 50
# Public directions.
NUM_PROBES = 32
# Public inputs that are used: of few coefficients, and of many times d.
_NUM_INPUTS = 512
_INPUTS_EACH = 16
# Of many coefficients times d: fewer do not show correlations.
_LEAST_EACH = 4
# Times the norm of the squares of a normal direction.
_CAP = 1.5
# At which probability of a false alarm the probes say that correlations are wrong.
_LEVEL = 0.01


@functools.cache
def probes(size: int) -> np.ndarray:
    """Returns public random directions, orthonormal rows of shape [P, d]."""
    normals = np.random.default_rng(0).normal(size=(size, min(NUM_PROBES, size)))
    directions: np.ndarray = np.linalg.qr(normals)[0].T
    return directions


def cap(size: int) -> float:
    """Returns the bound on the norm of a record's squares, over the squared clip."""
    num = size + min(NUM_PROBES, size)
    # Of a normal direction of d coordinates, fourth powers add up to 3 / d.
    return min(math.sqrt(2.0), _CAP * math.sqrt(3.0 * num) / size)


def squares_of(rows: tf.Tensor, bound: float) -> tf.Tensor:
    """Returns the capped squares of records along axes and probes, shape [n, d + P].

    Args:
      rows: `CentredScores.rows`, shape [n, m, d].
      bound: The clip C.
    """
    size = rows.shape[2]
    along = tf.tensordot(rows, tf.constant(probes(size).T, rows.dtype), 1)
    squares = tf.reduce_sum(tf.square(tf.concat([rows, along], axis=2)), axis=1)
    most = cap(size) * bound**2
    norm = tf.sqrt(tf.reduce_sum(tf.square(squares), axis=1, keepdims=True) + tiny(rows.dtype))
    return squares * (most / tf.maximum(norm, most))


class CentredDiagonal(CentredCurvature):
    """The sum of the expected, capped squares of scores; and released sums by blocks of steps.

    Args:
      size: The number d of parameters; the sum has shape [d + P] for P probes.
      clip: The clip C.

    #### Formal guarantee

    A record's term has no negative entry and norm at most `cap(d) C^2`; two such terms differ by at
    most sqrt(2) times as much.
    """

    def __init__(self, size: int, clip: Clip) -> None:
        super().__init__(size, clip)
        self.shape = (size + len(probes(size)),)
        most = cap(size) * clip.unit**2
        self.sensitivity = Sensitivity(most, math.sqrt(2.0) * most)
        self._bound = clip.unit

    def sum_of(self, per_example: PerExample) -> tf.Tensor:
        """See `JointRelease`."""
        squares = squares_of(extra_of(per_example, "rows"), self._bound)
        # A long float32 sum can exceed the sensitivity by rounding.
        return tf.reduce_sum(tf.cast(squares, tf.float64), axis=0)


def num_inputs(size: int) -> int:
    """Returns how many public inputs are used for d parameters."""
    return _NUM_INPUTS if size <= MOST_DENSE else _INPUTS_EACH * size


def least_inputs(size: int) -> int:
    """Returns how many public inputs d parameters need."""
    return 1 if size <= MOST_DENSE else _LEAST_EACH * size


def releases_of(size: int, clip: Clip) -> tuple[JointRelease, ...]:
    """Returns the joint releases of a centred clip: for many coefficients without a matrix.

    Args:
      size: The number d of parameters that the likelihood reads.
      clip: The clip C.
    """
    releases = centred_releases(size, clip)
    return releases if size <= MOST_DENSE else (CentredDiagonal(size, clip), *releases[1:])


def mismatch(released: np.ndarray, expected: np.ndarray, variances: np.ndarray, size: int) -> float:
    """Returns how far correlations are from those of public inputs: 0 if chance may be the reason.

    It is the root mean square by which eigenvalues of the curvature differ from what is assumed,
    relative to their mean. Directions' squares differ by it times sqrt(2 / d).

    Args:
      released: Released squares along the probes, shape [P].
      expected: What public inputs and the released diagonal say, shape [P].
      variances: The variances of the differences, shape [P].
      size: The number d of coefficients.
    """
    away = released - expected
    if stats.chi2.sf(np.sum(away**2 / variances), len(away)) > _LEVEL:
        return 0.0
    beyond = float(np.mean((away**2 - variances) / expected**2))
    return math.sqrt(max(beyond, 0.0) * size / 2.0)
