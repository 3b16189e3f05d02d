"""A table as a TFP mixture: public prior and likelihood of one coded record.

Each of K components is a product over columns of distributions over levels. A missing value is left
out of the product; missingness has its own Bernoulli distribution. Components share only their
prior.

All parameters lie on the real line: a probability vector is the softmax of logits whose
exponentials are Gamma, which is a Dirichlet distribution without its simplex. Records' gradients in
the parameters are therefore bounded (in logits, by the difference of two probability vectors), and
can be clipped there and pulled back ("aligned" gradients of `DPVI`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from tfp_dpvi import _deprecation, _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import NotReparameterized, tf, tfd, tfp
from tfp_dpvi.data.columns import MISSING
from tfp_dpvi.data.schema import Schema

Params = dict[str, tf.Tensor]
"""A draw from `make_prior`, or tensors of the same structure."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """The layout of the columns' levels in a row of the table of log-probabilities.

    ```python
    >>> from tfp_dpvi.synthetic import Binary, Categorical, Schema, Segments
    >>> schema = Schema({"ward": Categorical(["A", "B", "C"], missing=True), "ill": Binary()})
    >>> Segments.of(schema)
    Segments(sizes=(3, 2, 2), maybe_missing=(0,))

    ```

    Attributes:
      sizes: Levels of each column, then 2 (present, missing) for each column that may miss values.
      maybe_missing: Indices of these columns.
    """

    sizes: tuple[int, ...]
    maybe_missing: tuple[int, ...]

    @classmethod
    @_deprecation.renamed_argument("table", "schema")
    def of(cls, schema: Schema) -> Segments:
        """Returns the segments of a schema."""
        columns = tuple(schema.columns.values())
        maybe_missing = tuple(place for place, column in enumerate(columns) if column.missing)
        sizes = [column.num_levels for column in columns] + [2] * len(maybe_missing)
        return cls(tuple(sizes), maybe_missing)

    @property
    def num_columns(self) -> int:
        """The number of columns."""
        return len(self.sizes) - len(self.maybe_missing)


@_deprecation.renamed_argument("table", "schema")
def make_prior(
    schema: Schema, num_components: int, *, concentration: float = 1.0
) -> tfd.Distribution:
    """Builds the public prior over a mixture's parameters: symmetric Dirichlet distributions.

    ```python
    >>> from tfp_dpvi.synthetic import Binary, Schema
    >>> prior = make_prior(Schema({"ill": Binary()}), num_components=4, concentration=0.5)
    >>> {name: shape.as_list() for name, shape in prior.event_shape.items()}
    {'weights': [4], 'levels': [4, 2]}

    ```

    Args:
      schema: The public description of the columns.
      num_components: The number K of components.
      concentration: The concentration of every Dirichlet distribution.

    Returns:
      A TFP `JointDistributionNamed` of float32: "weights" [K] and "levels" [K, levels], logits up
      to a constant.
    """
    num = check.count("num_components", num_components, 1)
    logits = tfd.ExpGamma(
        np.float32(check.positive("concentration", concentration)), np.float32(1.0)
    )
    shapes = {"weights": [num], "levels": [num, sum(Segments.of(schema).sizes)]}
    return tfd.JointDistributionNamed(
        {name: tfd.Sample(logits, shape) for name, shape in shapes.items()}
    )


@_deprecation.renamed_argument("table", "schema")
def make_likelihood(schema: Schema) -> Callable[[Params], TableMixture]:
    """Returns the likelihood of one coded record: a function from parameters to a `TableMixture`.

    The parameters are structured like draws from `make_prior`.
    """
    segments = Segments.of(schema)

    def likelihood(params: Params) -> TableMixture:
        return TableMixture(params["weights"], log_table_of(segments, params), segments)

    return likelihood


@_deprecation.renamed_argument("table", "schema")
def starting_point(
    schema: Schema,
    num_components: int,
    *,
    target: str | None = None,
    spread: float = 0.5,
    seed: int | None = None,
) -> dict[str, np.ndarray]:
    """Draws initial parameters, without records: equal components would stay equal.

    Args:
      schema: The public description of the columns.
      num_components: The number K of components.
      target: A column that synthetic records will be used to predict, or None. Over its levels, the
        components are spread: each starts with odds of e^4 for its own level.
      spread: The standard deviation of the other logits.
      seed: Makes the draws repeatable.

    Returns:
      float32 arrays "weights" [K] and "levels" [K, levels].

    Raises:
      ValueError: The target is no column of the schema.
    """
    segments = Segments.of(schema)
    levels = np.random.default_rng(seed).normal(0.0, spread, [num_components, sum(segments.sizes)])
    if target is not None:
        if target not in schema.columns:
            raise ValueError(
                f"target={check.shown(target)} is no column of the schema: "
                f"{', '.join(map(repr, schema.names))}."
            )
        place = schema.names.index(target)
        begin, size = sum(segments.sizes[:place]), segments.sizes[place]
        levels[:, begin : begin + size] = 4.0 * np.eye(size)[np.arange(num_components) % size]
    return {"weights": np.zeros(num_components, np.float32), "levels": levels.astype(np.float32)}


def log_table_of(segments: Segments, params: Params) -> tf.Tensor:
    """Returns log-probabilities of every level in every component.

    Args:
      segments: The segments of a row, in each of which the probabilities sum to 1.
      params: Parameters of the mixture.

    Returns:
      float32 tensor of shape [K, levels].
    """
    parts = tf.split(params["levels"], segments.sizes, axis=-1)
    return tf.concat([tf.nn.log_softmax(part) for part in parts], axis=-1)


class TableMixture(tfd.MixtureSameFamily):
    """The distribution of one coded record: int32 events of shape [columns], -1 for missing values.

    It is a `tfd.MixtureSameFamily` of products over columns.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Binary, Schema, make_likelihood
    >>> mixture = make_likelihood(Schema({"ill": Binary()}))(
    ...     {"weights": np.zeros(1, "float32"), "levels": np.array([[0.0, np.log(3.0)]], "float32")}
    ... )
    >>> mixture.prob([[0], [1]]).numpy().round(2).tolist()
    [0.25, 0.75]

    ```

    Args:
      logits: Log-probabilities of the components up to a constant, of shape [K].
      log_table: Log-probabilities of the levels, of shape [K, levels].
      segments: The layout of a row of `log_table`.
      name: The name of the distribution.
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
        """Returns ones at records' levels, [..., levels]; none in a column with a missing value."""
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
