"""A table as a TFP mixture: public prior and likelihood of one coded record.

Each of K components is a product over columns of distributions over levels. A missing value is left out of the product;
missingness has its own Bernoulli distribution. Components share only their prior.

All parameters lie on the real line: a probability vector is the softmax of logits whose exponentials are Gamma, which is a
Dirichlet distribution without its simplex. Records' gradients in the parameters are therefore bounded (in logits, by the
difference of two probability vectors), and can be clipped there and pulled back ("aligned" gradients of `DPVI`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import NotReparameterized, tf, tfd, tfp
from tfp_dpvi.data.columns import MISSING
from tfp_dpvi.data.schema import Table

Params = dict[str, tf.Tensor]
"""A draw from `make_prior`, or tensors of the same structure."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """The layout of the columns' levels in a row of the table of log-probabilities."""

    sizes: tuple[
        int, ...
    ]  # Levels of each column, then 2 (present, missing) for each column that may miss values.
    maybe_missing: tuple[int, ...]  # Indices of these columns.

    @classmethod
    def of(cls, table: Table) -> Segments:
        """Returns the segments of a table."""
        columns = tuple(table.columns.values())
        maybe_missing = tuple(place for place, column in enumerate(columns) if column.missing)
        return cls(
            (*(column.num_levels for column in columns), *(2 for _ in maybe_missing)), maybe_missing
        )

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self.sizes) - len(self.maybe_missing)


def make_prior(
    table: Table, num_components: int, *, concentration: float = 1.0
) -> tfd.Distribution:
    """Builds the public prior over the parameters of a mixture of K components, with symmetric Dirichlet priors.

    A TFP `JointDistributionNamed` of float32: "weights" [K] and "levels" [K, levels], logits up to a constant.
    """
    num = check.count("num_components", num_components, 1)
    logits = tfd.ExpGamma(
        np.float32(check.positive("concentration", concentration)), np.float32(1.0)
    )
    shapes = {"weights": [num], "levels": [num, sum(Segments.of(table).sizes)]}
    return tfd.JointDistributionNamed(
        {name: tfd.Sample(logits, shape) for name, shape in shapes.items()}
    )


def make_likelihood(table: Table) -> Callable[[Params], TableMixture]:
    """Returns the likelihood: maps parameters, structured like `make_prior`'s, to the `TableMixture` of one coded record."""
    segments = Segments.of(table)

    def likelihood(params: Params) -> TableMixture:
        return TableMixture(params["weights"], log_table_of(segments, params), segments)

    return likelihood


def starting_point(
    table: Table,
    num_components: int,
    *,
    target: str | None = None,
    spread: float = 0.5,
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """Draws initial parameters, without records: equal components would stay equal.

    Over the levels of a target, which synthetic records will be used to predict, the components are spread: each starts with
    odds of e^4 for its own level. Other logits have the standard deviation `spread`.
    """
    segments = Segments.of(table)
    levels = np.random.default_rng(seed).normal(0.0, spread, [num_components, sum(segments.sizes)])
    if target is not None:
        if target not in table.columns:
            raise ValueError(
                f"target={check.shown(target)} is no column of the table: "
                f"{', '.join(map(repr, table.names))}."
            )
        place = table.names.index(target)
        begin, size = sum(segments.sizes[:place]), segments.sizes[place]
        levels[:, begin : begin + size] = 4.0 * np.eye(size)[np.arange(num_components) % size]
    return {"weights": np.zeros(num_components, np.float32), "levels": levels.astype(np.float32)}


def log_table_of(segments: Segments, params: Params) -> tf.Tensor:
    """Returns log-probabilities of every level in every component: [K, levels], normalised within each segment."""
    parts = tf.split(params["levels"], segments.sizes, axis=-1)
    return tf.concat([tf.nn.log_softmax(part) for part in parts], axis=-1)


class TableMixture(tfd.MixtureSameFamily):
    """The distribution of one coded record: int32 events of shape [columns], -1 for missing values.

    A `tfd.MixtureSameFamily` of products over columns: logits [K], and log-probabilities of levels [K, levels].
    """

    def __init__(
        self,
        logits: tf.Tensor,
        log_table: tf.Tensor,
        segments: Segments,
        *,
        name: str = "TableMixture",
    ) -> None:
        parameters = dict(locals())
        super().__init__(tfd.Categorical(logits=logits), _Product(log_table, segments), name=name)
        self._parameters = parameters

    @classmethod
    def _parameter_properties(
        cls, dtype: tf.DType, num_classes: int | None = None
    ) -> dict[str, tfp.util.ParameterProperties]:
        del dtype, num_classes
        properties = tfp.util.ParameterProperties
        return {"logits": properties(event_ndims=1), "log_table": properties(event_ndims=2)}

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        # Draws each record's component first: the parent class would sample from all components.
        pick_seed, seed = tfp.random.split_seed(seed, n=2)
        picked = self.mixture_distribution.sample(n, seed=pick_seed)
        product = self.components_distribution
        return _Product(tf.gather(product.log_table, picked), product.segments).sample(seed=seed)


class _Product(NotReparameterized):
    """Independent columns, for a batch of tables of log-probabilities [..., levels]."""

    def __init__(self, log_table: tf.Tensor, segments: Segments, *, name: str = "Product") -> None:
        parameters = dict(locals())
        self.log_table = tf.convert_to_tensor(log_table)
        self.segments = segments
        super().__init__(tf.int32, parameters, name)

    def _batch_shape(self) -> tf.TensorShape:
        return self.log_table.shape[:-1]

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.shape(self.log_table)[:-1]

    def _event_shape(self) -> tf.TensorShape:
        return tf.TensorShape([self.segments.num_columns])

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        chosen = self.chosen(tf.cast(value, tf.int32))
        if self.log_table.shape.rank == 2 and chosen.shape.rank and chosen.shape[-2] == 1:
            # A mixture evaluates the same record in each component: one matrix product.
            return tf.matmul(chosen, self.log_table, transpose_b=True)[..., 0, :]
        return tf.reduce_sum(chosen * self.log_table, axis=-1)

    def chosen(self, codes: tf.Tensor) -> tf.Tensor:
        """Returns ones at a record's levels, [..., levels]; none in a column with a missing value."""
        kinds = tf.unstack(codes, num=self.segments.num_columns, axis=-1)
        kinds += [
            tf.cast(kinds[place] == MISSING, tf.int32) for place in self.segments.maybe_missing
        ]
        dtype = self.log_table.dtype
        # The one-hot code of -1 is all zeros.
        ones = [
            tf.one_hot(kind, size, dtype=dtype)
            for kind, size in zip(kinds, self.segments.sizes, strict=True)
        ]
        return tf.concat(ones, axis=-1)

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor) -> tf.Tensor:
        segments = self.segments
        shape = tf.concat([[n], self.batch_shape_tensor(), [len(segments.sizes)]], axis=0)
        uniform = tf.random.stateless_uniform(
            shape,
            seed=tfp.random.sanitize_seed(seed),
            dtype=self.log_table.dtype,
            alg=_random.ALGORITHM,
        )
        picked = []
        for place, part in enumerate(tf.split(self.log_table, segments.sizes, axis=-1)):
            below = tf.cumsum(tf.exp(part), axis=-1)[..., :-1]
            picked.append(
                tf.reduce_sum(tf.cast(uniform[..., place, tf.newaxis] >= below, tf.int32), axis=-1)
            )
        codes, absent = picked[: segments.num_columns], picked[segments.num_columns :]
        for place, gone in zip(segments.maybe_missing, absent, strict=True):
            codes[place] = tf.where(gone == 1, MISSING, codes[place])
        return tf.stack(codes, axis=-1)
