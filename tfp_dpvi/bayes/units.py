"""The likelihood of a person with several rows, from that of rows."""

from __future__ import annotations

from tfp_dpvi._tf import NotReparameterized, Structure, tf, tfd
from tfp_dpvi.data import UnitRows
from tfp_dpvi.local import UnitLatent

PERSONS_ASSUME = (
    "the posterior assumes that a person's covariates and number of rows were fixed before the "
    "outcomes: an earlier outcome among the covariates biases it (the privacy is not affected)."
)
"""A caveat of posteriors of persons with several rows."""


def flat_rows(rows: Structure) -> Structure:
    """Returns what n persons' m rows have, of shape [n, m, ...], as that of n m rows."""
    return tf.nest.map_structure(
        lambda part: tf.reshape(part, [_times(part.shape), *part.shape[2:]]), rows
    )


def _times(shape: tf.TensorShape) -> int:
    return -1 if shape[0] is None else shape[0] * shape[1]


def unit_distribution(rows: tfd.Distribution, x: UnitRows) -> tfd.Distribution:
    """Returns the distribution of the outcomes of n persons.

    Rows of a person are independent given the parameters, unless they share a latent.

    Args:
      rows: The distribution of outcomes of `flat_rows`, with the batch shape [n m].
      x: The persons' inputs.

    Returns:
      A distribution with the batch shape [n] and the event shape [m, ...].
    """
    if isinstance(rows, UnitLatent):
        return rows.of_units(x.mask)
    return RowsOfUnit(rows, x.mask)


def row_distribution(distribution: tfd.Distribution) -> tfd.Distribution:
    """Returns the distribution of rows of a `RowsOfUnit`, and others as they are."""
    return distribution.rows if isinstance(distribution, RowsOfUnit) else distribution


class RowsOfUnit(NotReparameterized):
    """Outcomes of the rows of n persons, independent given the parameters.

    ```python
    >>> rows = tfd.Normal(tf.zeros([4]), 1.0)  # Two persons, of two rows and of one.
    >>> persons = RowsOfUnit(rows, tf.constant([[True, True], [True, False]]))
    >>> persons.batch_shape, persons.event_shape
    (TensorShape([2]), TensorShape([2]))
    >>> persons.log_prob(tf.zeros([2, 2])).numpy().round(2).tolist()
    [-1.840000033378601, -0.9200000166893005]

    ```

    Args:
      rows: The distribution of n m outcomes.
      mask: Bool of shape [n, m], False for rows that count for nothing.
      name: The name of the ops.
    """

    def __init__(
        self, rows: tfd.Distribution, mask: tf.Tensor, *, name: str = "RowsOfUnit"
    ) -> None:
        parameters = dict(locals())
        self.rows = rows
        self._mask = tf.convert_to_tensor(mask)
        super().__init__(rows.dtype, parameters, name)

    def _batch_shape(self) -> tf.TensorShape:
        return self._mask.shape[:1]

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.shape(self._mask)[:1]

    def _event_shape(self) -> tf.TensorShape:
        return self._mask.shape[1:].concatenate(self.rows.event_shape)

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.concat([tf.shape(self._mask)[1:], self.rows.event_shape_tensor()], axis=0)

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        event = self.rows.event_shape
        logs = self.rows.log_prob(tf.reshape(value, [-1, *event]))
        logs = tf.reshape(logs, tf.shape(self._mask))
        return tf.reduce_sum(tf.where(self._mask, logs, tf.zeros_like(logs)), axis=1)

    def _sample_n(self, n: tf.Tensor | int, seed: tf.Tensor | None = None) -> Structure:
        drawn = self.rows.sample(n, seed=seed)
        shape = tf.concat([[n], tf.shape(self._mask), self.rows.event_shape_tensor()], axis=0)
        return tf.reshape(drawn, shape)
