"""Squared maximum mean discrepancies between two weighted sets of points."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.divergences.codes import points, present_rows, row_weights, shares

SCALES: tuple[float, ...] = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
"""Squared length scales of the inverse multiquadratic kernels in the code of Mathieu et al.

(2019).
"""


def check_scales(scales: float | Iterable[float]) -> tuple[float, ...]:
    """Returns the scales as floats.

    Raises:
      TypeError: A scale is no number.
      ValueError: A scale is not positive, or there is none.
    """
    numbers = scales if isinstance(scales, Iterable) else (scales,)
    values = tuple(check.positive("scales", number) for number in numbers)
    if not values:
        raise ValueError(f"scales={scales!r} is empty; pass positive numbers, such as {SCALES}.")
    return values


def _squared_discrepancy(
    inner: Callable[[tf.Tensor, tf.Tensor, tf.Tensor, tf.Tensor], tf.Tensor],
    x: tf.Tensor,
    y: tf.Tensor,
    x_weights: tf.Tensor | None,
    y_weights: tf.Tensor | None,
) -> tf.Tensor:
    """Returns the squared distance of the mean embeddings of x and y.

    It follows from the inner product of two weighted embeddings.
    """
    x_weights = row_weights(x_weights, x, "x_weights")
    y_weights = row_weights(y_weights, y, "y_weights")
    x_shares, x_present = shares(x_weights)
    y_shares, y_present = shares(y_weights)
    x, y = present_rows(x, x_weights), present_rows(y, y_weights)
    value = (
        inner(x_shares, x, x_shares, x)
        - 2 * inner(x_shares, x, y_shares, y)
        + inner(y_shares, y, y_shares, y)
    )
    # Rounding must not make the square negative; the gradient is unchanged.
    value += tf.stop_gradient(tf.nn.relu(-value))
    return tf.where(x_present & y_present, value, tf.zeros_like(value))


def mmd(
    x: tf.Tensor,
    y: tf.Tensor,
    kernel: tfp.math.psd_kernels.PositiveSemidefiniteKernel | None = None,
    *,
    x_weights: tf.Tensor | None = None,
    y_weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """Computes the squared maximum mean discrepancy of two weighted sets of points.

    With shares a_i = x_weights_i / sum(x_weights) and b_j alike, it is `sum_ij a_i a_j k(x_i, x_j)
    - 2 sum_ij a_i b_j k(x_i, y_j) + sum_ij b_i b_j k(y_i, y_j)`, the V-statistic of Gretton et al.
    (2012, "A kernel two-sample test", equation 5). It is never negative and defined for a single
    point, and biased upwards: for points of one distribution its mean is (1/n + 1/m) (E k(x, x) - E
    k(x, x')). Time and memory are O((n + m)^2).

    ```python
    >>> x = tf.constant([[0.0], [1.0]])
    >>> float(mmd(x, x))
    0.0
    >>> twice = tf.constant([[0.0], [1.0], [1.0]])  # The same as weights of 1 and 2.
    >>> abs(float(mmd(twice, x, y_weights=tf.constant([1.0, 2.0])))) < 1e-6
    True

    ```

    Args:
      x: Float [n, d].
      y: Float [m, d], of the same dtype.
      kernel: A kernel of `tfp.math.psd_kernels` on vectors; a batch of kernels counts as their sum.
        None for the sum of the inverse multiquadratics C / (C + |a - b|^2) with C = 2 d s for s in
        `SCALES` (Tolstikhin et al. 2018, "Wasserstein auto-encoders", section 4 and code, for a
        unit normal prior).
      x_weights: Float [n], not negative; None for equal weights. Rows of weight zero do not matter,
        even if NaN.
      y_weights: Float [m], as `x_weights`.

    Returns:
      A scalar >= 0 of the points' dtype; exactly 0, with zero gradient, if either side has no
      weight.

    Raises:
      TypeError: The kernel is none of `tfp.math.psd_kernels` on vectors.
      ValueError: Shapes or dtypes do not match.
    """
    x = points(x, "x")
    y = points(y, "y", like=x)
    if kernel is None:
        # Squared length scales grow with the dimension, as squared distances do.
        dimensions = tf.cast(tf.shape(x)[1], x.dtype)
        lengths = tf.sqrt(tf.constant(SCALES, x.dtype) * dimensions)
        kernel = tfp.math.psd_kernels.RationalQuadratic(
            length_scale=lengths, scale_mixture_rate=tf.ones([], x.dtype)
        )
    if (
        not isinstance(kernel, tfp.math.psd_kernels.PositiveSemidefiniteKernel)
        or kernel.feature_ndims != 1
    ):
        raise TypeError(f"kernel={kernel!r} must be a kernel of tfp.math.psd_kernels on vectors.")

    def inner(a: tf.Tensor, left: tf.Tensor, b: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(a * tf.linalg.matvec(kernel.matrix(left, right), b))

    return _squared_discrepancy(inner, x, y, x_weights, y_weights)


def dimensionwise_mmd(
    x: tf.Tensor,
    y: tf.Tensor,
    scales: float | Iterable[float] = SCALES,
    *,
    x_weights: tf.Tensor | None = None,
    y_weights: tf.Tensor | None = None,
) -> tf.Tensor:
    """Sums one-dimensional squared maximum mean discrepancies over the dimensions.

    It compares marginals only, for priors with independent dimensions. The kernel on each axis is
    the sum of the inverse multiquadratics 2s / (2s + (a - b)^2) over s in `scales`, as in the code
    of Mathieu et al. (2019, arXiv:1812.02833); their estimate is the U-statistic, this one the
    V-statistic (see `mmd`). Takahashi et al. (2020, arXiv:2006.11204) train the same with term-wise
    gradients. Time and memory are O((n + m)^2 d).

    ```python
    >>> x = tf.constant([[0.0, 0.0], [1.0, 9.0]])
    >>> wide = [10.0 * scale for scale in SCALES]  # For codes of a wide prior.
    >>> float(dimensionwise_mmd(x, tf.gather(x, [1, 0]), wide))
    0.0

    ```

    Args:
      x: Float [n, d].
      y: Float [m, d], of the same dtype.
      scales: Squared length scales of the kernels.
      x_weights: Float [n], not negative; None for equal weights. Rows of weight zero do not matter,
        even if NaN.
      y_weights: Float [m], as `x_weights`.

    Returns:
      A scalar >= 0 of the points' dtype; exactly 0, with zero gradient, if either side has no
      weight.

    Raises:
      TypeError: A scale is no number.
      ValueError: Shapes or dtypes do not match, or a scale is not positive.
    """
    scales = check_scales(scales)
    x = points(x, "x")
    y = points(y, "y", like=x)

    def inner(a: tf.Tensor, left: tf.Tensor, b: tf.Tensor, right: tf.Tensor) -> tf.Tensor:
        squares = tf.math.squared_difference(left[:, tf.newaxis, :], right[tf.newaxis, :, :])
        # The form 1 / (1 + ..) keeps one [n, m, d] tensor for the gradient, s / (s + ..) two.
        kernel = tf.add_n([tf.math.reciprocal(1 + squares / (2 * scale)) for scale in scales])
        return tf.einsum("i,ijd,j->", a, kernel, b)

    return _squared_discrepancy(inner, x, y, x_weights, y_weights)
