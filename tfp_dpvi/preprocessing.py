"""Private preprocessing: standardises columns with privately released statistics.

Bounds are public. Means and variances are not: exact ones would be a leak that no epsilon covers.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from dp_accounting import NeighboringRelation

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Layer, register_keras_serializable, tf
from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan, Sensitivity

__all__ = ["PrivateStandardize"]

_CHUNK = 2**16  # Records in memory at a time, for arrays on disk.


@register_keras_serializable("tfp_dpvi", "PrivateStandardize")
class PrivateStandardize(Layer):
    """Clips to public bounds, then standardises with privately released statistics.

    The statistics are means and standard deviations; `docs/guides/analyst.md` shows the layer with
    a ledger.

    ```python
    >>> x = np.array([[0.2], [0.4], [0.9]])
    >>> layer = PrivateStandardize(lower=0.0, upper=1.0, min_scale=0.1)
    >>> layer.adapt(x, noise_multiplier=2.0)
    >>> layer(x).shape
    TensorShape([3, 1])

    ```

    Args:
      lower: The lower bounds, a number for all features or one for each. Do not compute them from
        the records.
      upper: The upper bounds, as `lower`.
      min_scale: The smallest standard deviation to divide by, as a fraction of half the distance of
        the bounds.
      **kwargs: Arguments of `Layer`.

    Raises:
      ValueError: A bound is not finite, or not below its counterpart; or `min_scale` is not in (0,
        1].

    #### Formal guarantee

    See `adapt`. Saved files have the released statistics and the public arguments, but no record,
    key or ledger.
    """

    def __init__(
        self, lower: npt.ArrayLike, upper: npt.ArrayLike, *, min_scale: float = 0.01, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        shown = f"lower={check.shown(lower)} and upper={check.shown(upper)}"
        try:
            low, high = map(
                np.array,
                np.broadcast_arrays(np.asarray(lower, np.float64), np.asarray(upper, np.float64)),
            )
        except (TypeError, ValueError):
            raise ValueError(
                f"{shown} must be numbers, one for all features or one for each."
            ) from None
        if (
            low.ndim > 1
            or low.size == 0
            or not (low < high).all()
            or not np.isfinite(high - low).all()
        ):
            raise ValueError(f"{shown} must be finite, with lower below upper for every feature.")
        self.lower, self.upper = low, high
        self.min_scale = check.positive("min_scale", min_scale)
        if self.min_scale > 1.0:
            raise ValueError(
                f"min_scale={check.shown(min_scale)} must be at most 1, half the distance of the "
                "bounds."
            )
        self._ledger: PrivacyLedger | None = None

    @property
    def ledger(self) -> PrivacyLedger | None:
        """The ledger that `adapt` charged, for `compile(ledger=)`.

        None before `adapt` and after loading.
        """
        return self._ledger

    @property
    def is_adapted(self) -> bool:
        """True once the statistics have been released (or loaded)."""
        return bool(self.built and np.isfinite(self._mean.numpy()).all())

    @property
    def mean(self) -> np.ndarray:
        """Released means of the clipped features, shape [features], in their own units."""
        self._check_adapted()
        return self._mean.numpy()

    @property
    def scale(self) -> np.ndarray:
        """Released standard deviations of the clipped features, in their own units.

        Of shape [features].
        """
        self._check_adapted()
        return self._scale.numpy()

    def build(self, input_shape: tf.TensorShape) -> None:
        """Creates the weights, NaN until `adapt` sets them."""
        shape = tf.TensorShape(input_shape)
        _check_width("inputs", shape, self.lower)
        if not shape.rank or shape[-1] is None:
            raise ValueError(
                f"inputs has shape {shape}: the last dimension, the number of features, must be "
                "known."
            )
        start = tf.constant_initializer(math.nan)
        self._mean, self._scale = (
            self.add_weight(name, [shape[-1]], self.dtype, start, trainable=False)
            for name in ("mean", "scale")
        )
        super().build(input_shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        """Returns `(clip(inputs) - mean) / scale`; keeps NaN.

        Args:
          inputs: Numbers of shape [..., features].

        Returns:
          A float tensor of the inputs' shape.

        Raises:
          ValueError: The layer is called eagerly before `adapt`. (In a graph the result is NaN.)
        """
        if tf.executing_eagerly():
            self._check_adapted()
        x = tf.cast(inputs, self.compute_dtype)
        _check_width("inputs", x.shape, self.lower)
        # `tf.clip_by_value` replaces NaN by a bound under XLA: a bad record must remain NaN
        # (contract 8).
        low, high = (tf.constant(bound, x.dtype) for bound in (self.lower, self.upper))
        clipped = tf.where(x < low, low, tf.where(x > high, high, x))
        return (clipped - tf.cast(self._mean, x.dtype)) / tf.cast(self._scale, x.dtype)

    def get_config(self) -> dict[str, Any]:
        """Returns the public arguments."""
        bounds = {"lower": self.lower.tolist(), "upper": self.upper.tolist()}
        return {**super().get_config(), **bounds, "min_scale": self.min_scale}

    def adapt(
        self,
        x: npt.ArrayLike,
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise_multiplier: float | None = None,
        ledger: PrivacyLedger | None = None,
        num_records: int | None = None,
        neighboring_relation: NeighboringRelation | str | None = None,
        accountant: str = "pld",
        seed: int | None = None,
    ) -> None:
        """Releases means and variances of the clipped features, and charges the ledger.

        It is one Gaussian mechanism: with u a record mapped to [-1, 1] by the bounds, the sums of u
        and of u^2 - 1 are released as one vector.

        Args:
          x: The private records, array of shape [N, features]. A record with a NaN contributes
            exactly zero; an infinite value is clipped to the bound.
          epsilon: The cost of this release alone, with `delta`. The ledger composes it with other
            releases.
          delta: See `epsilon`.
          noise_multiplier: Instead of `epsilon` and `delta`, the noise's standard deviation over
            sqrt(features).
          ledger: The ledger to charge; by default that of an earlier `adapt`, or a new one in
            memory.
          num_records: The public number of records N, by default `len(x)`. It divides the sums
            (contract 1).
          neighboring_relation: By default the ledger's, or add-or-remove-one in an empty one.
          accountant: "pld" or "rdp".
          seed: Makes the release repeatable and hence *not private*; the report says so.

        Raises:
          ValueError, TypeError, BudgetExhaustedError, UnsupportedPairError: As in `fit`; no privacy
            was spent.

        #### Formal guarantee

        With d features, adding or removing a record moves the released vector by at most A =
        sqrt(d), replacing it by at most D = 2 sqrt(d): per feature `u^2 + (u^2 - 1)^2 <= 1` on [-1,
        1], and `(u - v)^2 (1 + (u + v)^2) <= 4`. Noise of standard deviation z sqrt(d) is added to
        each of its 2 d coordinates, after the ledger is charged (contract 6).
        """
        records = np.asanyarray(x)  # Keeps a memmap.
        if isinstance(records, np.ma.MaskedArray) or records.dtype.kind not in "biuf":
            raise TypeError(
                f"x is {type(records).__name__} of dtype {check.dtype_name(records.dtype)}: pass "
                "numbers, NaN if missing."
            )
        if records.ndim != 2 or 0 in records.shape:
            raise ValueError(
                f"x has shape {list(records.shape)}; it must be [records, features], both at "
                "least 1."
            )
        width = records.shape[1]
        _check_width("x", tf.TensorShape(records.shape), self.lower)
        if self.built and self._mean.shape != [width]:
            raise ValueError(
                f"x has {width} features, but this layer was built for {self._mean.shape[0]}: use "
                "another."
            )
        num = len(records) if num_records is None else check.count("num_records", num_records, 1)
        if not isinstance(ledger, PrivacyLedger | None):
            raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
        ledger = ledger or self._ledger or PrivacyLedger()
        relation = neighboring_relation or ledger.neighboring_relation or "add_or_remove_one"
        price = {"epsilon": epsilon, "delta": delta, "noise_multiplier": noise_multiplier}
        chosen = {name: value for name, value in price.items() if value is not None}
        if chosen.keys() not in ({"epsilon", "delta"}, {"noise_multiplier"}):
            shown = ", ".join(f"{name}={check.shown(value)}" for name, value in price.items())
            raise ValueError(f"{shown}: pass epsilon and delta, or only noise_multiplier.")
        plan = _plan(width, num, check.relation(relation), accountant, **chosen)
        plan = plan.replace(randomness="secure" if seed is None else "")
        key = _random.noise_key(2 * width, None if seed is None else check.count("seed", seed))
        lower, upper = (np.broadcast_to(bound, [width]) for bound in (self.lower, self.upper))
        sums = moment_sums(records, lower, upper)
        if not self.built:
            self.build(tf.TensorShape([None, width]))
        reservation = ledger.reserve(plan, 1, seeded=seed is not None)
        self._ledger = ledger
        noisy = privatize_moments(sums, plan.deviation, key)
        mean, scale = _statistics(noisy, plan.deviation, num, self.min_scale)
        self._mean.assign((lower + upper) / 2 + (upper - lower) / 2 * mean)
        self._scale.assign((upper - lower) / 2 * scale)
        ledger.confirm(reservation)

    def _check_adapted(self) -> None:
        if not self.is_adapted:
            raise ValueError(
                f"{self.name} has no statistics yet: call adapt(x, ...) first, or load its weights."
            )


def _plan(
    width: int,
    num_records: int,
    relation: NeighboringRelation,
    accountant: str,
    **price: float | None,
) -> PrivacyPlan:
    """Returns the plan of the release.

    `price` has an epsilon and a delta, or a noise multiplier.
    """
    release: dict[str, Any] = {
        "sampling": FullBatch(),
        "num_releases": 1,
        "neighboring_relation": relation,
        "sensitivity": Sensitivity(1.0, 2.0),  # In units of the clip, sqrt(width).
        "accountant": accountant,
        "l2_norm_clip": math.sqrt(width),
        "num_records": num_records,
        **price,
    }
    plan = PrivacyPlan.calibrate(**release) if "epsilon" in price else PrivacyPlan(**release)
    columns = "1 column" if width == 1 else f"{width} columns"
    return plan.replace(
        purpose=f"means and variances of {columns} clipped to public bounds, for standardising"
    )


def moment_sums(records: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> np.ndarray:
    """Returns the sums of (u, u^2 - 1), *not private*.

    Here u is a record, clipped and mapped to [-1, 1].

    Args:
      records: Numbers of shape [N, features].
      lower: Float64 [features], the lower bounds.
      upper: Float64 [features], the upper bounds.

    Returns:
      Float64 [2 features].

    #### Formal guarantee

    A record contributes a vector of l2 norm at most sqrt(features), and exactly zero if it has a
    NaN; two records' contributions differ by at most 2 sqrt(features). A contribution depends on no
    other record.
    """
    total = np.zeros(2 * len(lower))
    for begin in range(0, len(records), _CHUNK):
        chunk = np.asarray(records[begin : begin + _CHUNK], np.float64)
        chunk = chunk[~np.isnan(chunk).any(axis=1)]
        # The outer clip is needed: the rounding of the division could leave [-1, 1].
        u = np.clip((np.clip(chunk, lower, upper) - lower) / (upper - lower) * 2.0 - 1.0, -1.0, 1.0)
        total += np.concatenate([u.sum(axis=0), (u * u - 1.0).sum(axis=0)])
    return total


def privatize_moments(sums: np.ndarray, deviation: float, key: tf.Tensor) -> np.ndarray:
    """Returns `moment_sums` with independent Gaussian noise on every coordinate.

    Args:
      sums: The exact sums, float64 [2 features].
      deviation: The standard deviation of the noise.
      key: The key of the noise, used once; see `tfp_dpvi._random`.
    """
    (noisy,) = _random.add_noise(key, [tf.constant(sums, tf.float64)], [deviation])
    return noisy.numpy()


def _statistics(
    noisy: np.ndarray, deviation: float, num: int, min_scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns means and standard deviations of u, from noisy sums and public values.

    Both have shape [features].
    """
    first, second = np.split(noisy / num, 2)
    mean = np.clip(first, -1.0, 1.0)
    variance = np.clip(second + 1.0, 0.0, 1.0) - mean**2
    floor = max(min_scale**2, min(1.0, deviation / num))
    return mean, np.sqrt(np.clip(variance, floor, 1.0))


def _check_width(name: str, shape: tf.TensorShape, lower: np.ndarray) -> None:
    if (
        lower.ndim
        and shape.rank is not None
        and (shape.rank < 1 or shape[-1] not in (None, len(lower)))
    ):
        raise ValueError(f"{name} has shape {shape}, but the bounds are for {len(lower)} features.")
