"""Distributions whose latent is integrated out: of a record, or shared by all rows of a person.

`quadrature` returns the distribution of a record. `unit_quadrature` and `unit_normal` return that
of a row; `of_units` is the joint distribution of the outcomes of persons, with which persons are
fitted.
"""

from __future__ import annotations

import math
from typing import Any

from tfp_dpvi._quadrature import Latent
from tfp_dpvi._tf import Derived, Structure, map_apart, tf, tfd, tfp


class _LikeRow(Derived):
    """A distribution like another one, unless a subclass says otherwise.

    Attributes:
      row: The other one. That of a latent at fixed points adds up to 1, which moved points do not.
    """

    def __init__(self, row: tfd.Distribution, parameters: dict[str, Any], name: str) -> None:
        self.row = row
        super().__init__(row, parameters, name)

    def _log_prob(self, value: Structure) -> tf.Tensor:
        return self.row.log_prob(value)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        return self.row.sample(n, seed=seed)

    def _mean(self) -> tf.Tensor:
        return self.row.mean()

    def _variance(self) -> tf.Tensor:
        return self.row.variance()

    def _stddev(self) -> tf.Tensor:
        return self.row.stddev()

    def _covariance(self) -> tf.Tensor:
        return self.row.covariance()

    def _cdf(self, value: Structure) -> tf.Tensor:
        return self.row.cdf(value)

    def _default_event_space_bijector(self) -> tfp.bijectors.Bijector | None:
        return self.row.experimental_default_event_space_bijector()


class RecordLatent(_LikeRow):
    """See `tfp_dpvi.local.quadrature`.

    Args:
      row: The mixture over fixed points, whose moments and `cdf` are taken.
      latent: The latent of each record.
      name: The name of the ops.
    """

    def __init__(
        self, row: tfd.MixtureSameFamily, latent: Latent, *, name: str = "RecordLatent"
    ) -> None:
        parameters = dict(locals())
        self._latent = latent
        super().__init__(row, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        event = self.row.event_shape.as_list()
        value = tf.convert_to_tensor(value, dtype_hint=self.dtype)
        shape = tf.shape(value)[: value.shape.rank - len(event)]
        shape = tf.broadcast_dynamic_shape(shape, self.row.batch_shape_tensor())
        value = tf.broadcast_to(value, tf.concat([shape, event], axis=0))
        if self.row.batch_shape.rank == 0:
            flat = tf.reshape(value, [-1, *event])
            # Points of one record: conditional has no batch of records.
            logs = self._log_prob_alone(flat) if flat.shape[0] == 1 else self._mapped(flat)
            return tf.reshape(logs, shape)
        if value.shape.rank > len(event) + 1:
            return tf.map_fn(self._log_prob, value, fn_output_signature=self._latent.dtype)
        return self._latent.integral(
            lambda z: self._latent.given(z).log_prob(value[:, None]), tf.shape(value)[0]
        )

    def _mapped(self, values: tf.Tensor) -> tf.Tensor:
        return map_apart(lambda value: self._log_prob_alone(value[None])[0], values)

    def _log_prob_alone(self, values: tf.Tensor) -> tf.Tensor:
        """Returns the log density of one record, shape [1], of values of shape [1, ...]."""
        return self._latent.integral(lambda z: self._latent.given(z[0]).log_prob(values)[None], 1)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        batch = self.row.batch_shape_tensor()
        shape = tf.concat([batch, [n, self._latent.size]], axis=0)
        z = tf.random.stateless_normal(shape, first, dtype=self._latent.dtype)
        drawn = self._latent.given(z).sample(seed=second)
        if self.row.batch_shape.rank == 0:
            return drawn
        return tf.transpose(drawn, [1, 0, *range(2, drawn.shape.rank)])


class UnitLatent(_LikeRow):
    """The distribution of a row whose latent is shared by all rows of its person.

    By itself it is the row's marginal distribution, as predictions of new persons need it; `fit`
    with `unit_ids` takes all rows of a person together.

    ```python
    >>> from tfp_dpvi.local import unit_normal
    >>> isinstance(unit_normal(tf.zeros([2]), 1.0, 1.0), UnitLatent)
    True

    ```
    """

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        """Returns the joint distribution of the outcomes of n persons.

        Args:
          mask: Bool of shape [n, m], False for rows that count for nothing; the n m rows are those
            of the batch.

        Returns:
          A distribution with batch shape [n] and event shape [m, ...].
        """
        raise NotImplementedError


class IntegratedLatent(UnitLatent):
    """See `tfp_dpvi.local.unit_quadrature`.

    Args:
      row: The distribution of a row by itself.
      latent: The latent of each person.
      name: The name of the ops.
    """

    def __init__(
        self, row: tfd.Distribution, latent: Latent, *, name: str = "IntegratedLatent"
    ) -> None:
        parameters = dict(locals())
        self._latent = latent
        super().__init__(row, parameters, name)

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        """See `UnitLatent`."""
        return _IntegratedOfUnits(self.row, self._latent, mask)


class _OfUnits(Derived):
    """Outcomes of n persons' m rows."""

    def __init__(
        self, like: tfd.Distribution, mask: tf.Tensor, parameters: dict[str, Any], name: str
    ) -> None:
        self._mask = tf.convert_to_tensor(mask)
        super().__init__(like, parameters, name)

    def _batch_shape(self) -> tf.TensorShape:
        return self._mask.shape[:1]

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.shape(self._mask)[:1]

    def _event_shape(self) -> tf.TensorShape:
        return self._mask.shape[1:].concatenate(super()._event_shape())

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.concat([tf.shape(self._mask)[1:], super()._event_shape_tensor()], axis=0)


class _IntegratedOfUnits(_OfUnits):
    """Each person has one value of the latent, for all rows."""

    def __init__(
        self,
        row: tfd.Distribution,
        latent: Latent,
        mask: tf.Tensor,
        *,
        name: str = "IntegratedOfUnits",
    ) -> None:
        parameters = dict(locals())
        self._latent = latent
        super().__init__(row, mask, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        def log_density(z: tf.Tensor) -> tf.Tensor:
            rows = self._rows_given(z)
            if type(rows) is tfd.Bernoulli and rows.logits is not None:
                return self._binary(rows.logits, value)
            logs = rows.log_prob(tf.reshape(value, [-1, 1, *rows.event_shape]))
            logs = tf.reshape(logs, [-1, self._mask.shape[1], z.shape[1]])
            logs = tf.where(self._mask[:, :, None], logs, tf.zeros_like(logs))
            return tf.reduce_sum(logs, axis=1)

        return self._latent.integral(log_density, tf.shape(self._mask)[0])

    def _binary(self, logits: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """Returns persons' log densities of outcomes 0 and 1, [n, P], from logits of [n m, P].

        TFP computes both outcomes' log densities, and weights them: here one is enough.
        """
        logits = tf.reshape(logits, [-1, self._mask.shape[1], logits.shape[1]])
        one = tf.where(self._mask, tf.cast(value, logits.dtype), tf.zeros([], logits.dtype))
        mask = tf.cast(self._mask, logits.dtype)
        sign = mask * (1.0 - 2.0 * tf.cast(one > 0.5, logits.dtype))
        # 0 for what counts for nothing, whose logits may be no numbers.
        against = tf.math.multiply_no_nan(logits, sign[:, :, None])
        logs = math.log(2.0) * tf.reduce_sum(1.0 - mask, axis=1, keepdims=True)
        logs -= tf.reduce_sum(tf.math.softplus(against), axis=1)
        # As in TFP the density is linear in an outcome between 0 and 1.
        return logs + tf.linalg.matmul(tf.minimum(one, 1.0 - one)[:, None], against)[:, 0]

    def _rows_given(self, z: tf.Tensor) -> tfd.Distribution:
        """Returns the distribution of all rows given persons' values, of shape [n, P, d]."""
        shape = [tf.shape(z)[0], self._mask.shape[1], tf.shape(z)[1], z.shape[2]]
        z = tf.reshape(tf.broadcast_to(z[:, None], shape), [-1, *shape[2:]])
        rows = self._latent.given(z)
        if not rows.batch_shape.is_compatible_with([None, z.shape[1]]):
            raise ValueError(
                f"conditional returned batch shape {rows.batch_shape} for z of shape {z.shape}: "
                "each person has\npoints of its own. Use score[:, None] + z for n rows, and "
                "z[..., 0] for the first of several latents."
            )
        return rows

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        shape = [tf.shape(self._mask)[0], n, self._latent.size]
        z = tf.random.stateless_normal(shape, first, dtype=self._latent.dtype)
        rows = self._rows_given(z)
        shape = tf.concat([tf.shape(self._mask), [n], rows.event_shape_tensor()], axis=0)
        drawn = tf.reshape(rows.sample(seed=second), shape)
        return tf.transpose(drawn, [2, 0, 1, *range(3, drawn.shape.rank)])


class NormalLatent(UnitLatent):
    """See `tfp_dpvi.local.unit_normal`."""

    def __init__(
        self, loc: tf.Tensor, scale: tf.Tensor, unit_scale: tf.Tensor, *, name: str = "NormalLatent"
    ) -> None:
        parameters = dict(locals())
        self._scale = scale
        self._unit_scale = unit_scale
        row = tfd.Normal(loc, tf.sqrt(tf.square(scale) + tf.square(unit_scale)))
        super().__init__(row, parameters, name)

    def of_units(self, mask: tf.Tensor) -> tfd.Distribution:
        """See `UnitLatent`."""
        return _NormalOfUnits(self.row, mask, self._scale, self._unit_scale)


class _NormalOfUnits(_OfUnits):
    """Normal outcomes with the covariance `scale^2 I + unit_scale^2` within a person."""

    def __init__(
        self,
        row: tfd.Normal,
        mask: tf.Tensor,
        scale: tf.Tensor,
        unit_scale: tf.Tensor,
        *,
        name: str = "NormalOfUnits",
    ) -> None:
        parameters = dict(locals())
        self._loc = row.loc
        self._scale = tf.convert_to_tensor(scale)
        self._unit_scale = tf.convert_to_tensor(unit_scale)
        super().__init__(row, mask, parameters, name)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        away = value - tf.reshape(self._loc, tf.shape(self._mask))
        away = tf.where(self._mask, away, tf.zeros_like(away))
        num = tf.reduce_sum(tf.cast(self._mask, away.dtype), axis=1)
        within = tf.square(self._scale)
        between = tf.square(self._unit_scale)
        whole = within + num * between
        mean = tf.math.divide_no_nan(tf.reduce_sum(away, axis=1), num)
        # Within and between persons apart: a difference of squares would lose digits.
        rest = tf.where(self._mask, away - mean[:, None], tf.zeros_like(away))
        square = tf.reduce_sum(tf.square(rest), axis=1) / within + num * tf.square(mean) / whole
        logs = num * math.log(2.0 * math.pi) + tf.math.log(whole)
        logs += (num - 1.0) * tf.math.log(within)
        return -0.5 * (square + logs)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> tf.Tensor:
        first, second = tfp.random.split_seed(tfp.random.sanitize_seed(seed), n=2)
        shape = tf.concat([[n], tf.shape(self._mask)], axis=0)
        dtype = self._loc.dtype
        person = tf.random.stateless_normal(shape[:2], first, dtype=dtype)[:, :, None]
        row = tf.random.stateless_normal(shape, second, dtype=dtype)
        loc = tf.reshape(self._loc, tf.shape(self._mask))
        return loc + self._unit_scale * person + self._scale * row
