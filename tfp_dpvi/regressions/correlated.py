"""Correlations of a group's intercepts and slopes: in formulas, a priori, and among effects."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, cast

import numpy as np
from scipy import special

from tfp_dpvi._tf import tf, tfd, tfp
from tfp_dpvi.regressions.responses import Argument

Blocks = Sequence[Sequence[int]]
"""Places of the group effects that are correlated with each other, for each group."""

_BAR = "PIPE"


class Token(Protocol):
    """A word or sign of a formula, as formulae's scanner reads it.

    Attributes:
      kind: Its kind.
    """

    kind: str


class Operation(Argument, Protocol):
    """Two parts of a formula, with an operator between them.

    Attributes:
      left: The first part.
      operator: The operator.
      right: The second part.
    """

    left: Argument
    operator: Token
    right: Argument


def correlated_effects(
    tree: Argument,
    tokens: Sequence[Token],
    formula: str,
    resolved: Callable[[Argument], Argument],
) -> list[list[str]]:
    """Returns the names of the effects that are correlated with each other, for each group.

    formulae has neither two bars nor correlations: (x || g) is (x | g) to it.

    Args:
      tree: The formula, with each || as |, as formulae's parser returns it.
      tokens: What the parser read.
      formula: The formula, without what is in quotes.
      resolved: Returns formulae's terms of a part of the tree.

    Raises:
      ValueError: A term has several bars, or an effect with correlations is in two terms.
    """
    bars = [token for token in tokens if token.kind == _BAR]
    written = zip(bars, re.findall(r"\|\|?", formula), strict=True)
    single = [bar for bar, text in written if text == "|"]
    blocks: list[list[str]] = []
    effects: list[str] = []
    for node in _with_bars(tree):
        if any(_with_bars([node.left, node.right])):
            raise ValueError(
                "formula has a group term with several bars, (a | b | c): write (a | b:c) for "
                "levels that are combinations."
            )
        terms = resolved(node)
        names = dict.fromkeys(term.name for term in getattr(terms, "group_terms", [terms]))
        effects += names
        by_group: dict[str, list[str]] = {}
        for name in names if any(node.operator is bar for bar in single) else ():
            by_group.setdefault(name.rpartition("|")[2], []).append(name)
        blocks += [block for block in by_group.values() if len(block) > 1]
    if repeated := [name for block in blocks for name in block if effects.count(name) > 1]:
        raise ValueError(
            f"formula has {repeated[0]!r} in two group terms, one of them with correlations: write "
            "one term, (a + b | g), or two bars, (a || g)."
        )
    return blocks


def _with_bars(part: Argument | list[Argument]) -> Iterator[Operation]:
    """Yields the parts of a formula that are group terms."""
    if getattr(getattr(part, "operator", None), "kind", "") == _BAR:
        yield cast(Operation, part)
    for inner in part if isinstance(part, list) else getattr(part, "__dict__", {}).values():
        yield from _with_bars(inner)


def places_of(blocks: Sequence[Sequence[str]], names: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the places of correlated effects among all group effects.

    Args:
      blocks: The names of effects that are correlated with each other.
      names: Those of all group effects.

    Raises:
      ValueError: An effect is not among them, as formulae leaves out what is multiplied.
    """
    if lost := [name for block in blocks for name in block if name not in names]:
        raise ValueError(
            f"formula multiplies the group term of {lost[0]!a:.99}: add it, as in + (x | g)."
        )
    return tuple(tuple(map(names.index, block)) for block in blocks)


def pairs(size: int) -> list[tuple[int, int]]:
    """Returns the pairs of effects of a block, in the order of their partial correlations.

    Args:
      size: The number of effects.
    """
    return [(first, second) for second in range(size) for first in range(second)]


def correlation_prior(blocks: Blocks) -> tfd.Distribution:
    """Returns the prior of partial correlations, as inverse hyperbolic tangents.

    A correlation matrix has the LKJ prior of shape 1, uniform over all of them, as in brms and
    rstanarm. Its partial correlations, each given the effects before both, are then independent
    with beta distributions (Lewandowski, Kurowicka and Joe 2009), and that of two effects is
    uniform from -1 to 1: its inverse hyperbolic tangent is logistic. Of more effects those with
    other shapes are logistic with their variance, so that the prior is nearly that.

    Args:
      blocks: See `Blocks`.
    """
    shapes = [1.0 + (len(block) - 2 - j) / 2.0 for block in blocks for j, _ in pairs(len(block))]
    scales = np.sqrt(1.5 * special.polygamma(1, shapes)) / math.pi
    logistic = tfd.Logistic(np.zeros(len(shapes), np.float32), scales.astype(np.float32))
    return tfd.Independent(logistic, reinterpreted_batch_ndims=1)


def factors(partial: tf.Tensor, blocks: Blocks) -> list[list[list[tf.Tensor]]]:
    """Returns the rows of a lower factor of each correlation matrix, whose entries are [...].

    Args:
      partial: Inverse hyperbolic tangents of partial correlations, [..., number].
      blocks: See `Blocks`.
    """
    each = iter(tf.unstack(partial, axis=-1))
    result = []
    for block in blocks:
        rows = []
        for number in range(len(block)):
            left = tf.ones_like(partial[..., 0])
            row = []
            for _ in range(number):
                z = next(each)
                row.append(left * tf.tanh(z))
                # The root of 1 - tanh², which does not cancel.
                left = left / tf.cosh(z)
            rows.append([*row, left])
        result.append(rows)
    return result


def correlations(partial: np.ndarray, blocks: Blocks) -> np.ndarray:
    """Returns correlations in the order of `pairs`, float64 [S, number].

    Args:
      partial: Draws of `correlation_prior`, [S, number].
      blocks: See `Blocks`.
    """
    columns = [
        sum(a * b for a, b in zip(rows[first], rows[second], strict=False))
        for rows in factors(tf.constant(partial, tf.float64), blocks)
        for first, second in pairs(len(rows))
    ]
    return np.stack([np.asarray(column) for column in columns], axis=-1)


def partial_correlations(values: Sequence[float], blocks: Blocks) -> np.ndarray:
    """Returns what `correlations` takes, of one matrix for each block.

    Args:
      values: Correlations in the order of `pairs`, block after block.
      blocks: See `Blocks`.

    Raises:
      ValueError: There is no such correlation matrix.
    """
    rest = list(values)
    found: list[float] = []
    for block in blocks:
        matrix = np.eye(len(block))
        for first, second in pairs(len(block)):
            matrix[first, second] = matrix[second, first] = rest.pop(0)
        try:
            factor = np.linalg.cholesky(matrix)
        except np.linalg.LinAlgError:
            raise ValueError(
                "truth has correlations that no effects can have together (those not given are 0): "
                "pass values nearer to 0, or all of them."
            ) from None
        for first, second in pairs(len(block)):
            left = math.sqrt(1.0 - np.sum(factor[second, :first] ** 2))
            found.append(math.atanh(factor[second, first] / left))
    return np.array(found)


class CorrelatedEffects(tfd.Distribution):
    """Normal effects of levels, of which some are correlated with others of the same level.

    ```python
    >>> from tfp_dpvi._tf import tf
    >>> effects = CorrelatedEffects(tf.constant([1.0, 2.0]), tf.constant([0.0]), [3, 3], [[0, 1]])
    >>> effects.event_shape.as_list()
    [6]

    ```

    Args:
      sd: The standard deviation of each group effect, [..., effects].
      partial: A draw of `correlation_prior`, [..., number].
      sizes: The number of levels of each group effect.
      blocks: See `Blocks`.
    """

    def __init__(
        self, sd: tf.Tensor, partial: tf.Tensor, sizes: Sequence[int], blocks: Blocks
    ) -> None:
        self.sd = sd
        self.sizes = list(sizes)
        self.blocks = list(zip(blocks, factors(partial, blocks), strict=True))
        super().__init__(
            dtype=sd.dtype,
            reparameterization_type=tfd.FULLY_REPARAMETERIZED,
            validate_args=False,
            allow_nan_stats=True,
            name="CorrelatedEffects",
        )

    def _batch_shape(self) -> tf.TensorShape:
        return self.sd.shape[:-1]

    def _batch_shape_tensor(self) -> tf.Tensor:
        return tf.shape(self.sd)[:-1]

    def _event_shape(self) -> tf.TensorShape:
        return tf.TensorShape([sum(self.sizes)])

    def _event_shape_tensor(self) -> tf.Tensor:
        return tf.constant([sum(self.sizes)])

    def _default_event_space_bijector(self) -> tfp.bijectors.Bijector:
        return tfp.bijectors.Identity()

    @property
    def _scale(self) -> tf.Tensor:
        return tf.repeat(self.sd, self.sizes, axis=-1)

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor | None = None) -> tf.Tensor:
        shape = tf.concat([[n], tf.shape(self._scale)], axis=0)
        seed = tfp.random.sanitize_seed(seed)
        normal = tf.random.stateless_normal(shape, seed, dtype=self.dtype)
        parts = tf.split(normal, self.sizes, axis=-1)
        for block, rows in self.blocks:
            own = [parts[place] for place in block]
            for place, row in zip(block, rows, strict=True):
                products = zip(row, own, strict=False)
                parts[place] = sum(entry[..., None] * part for entry, part in products)
        return tf.concat(parts, axis=-1) * self._scale

    def _log_prob(self, value: tf.Tensor) -> tf.Tensor:
        parts = tf.split(value / self._scale, self.sizes, axis=-1)
        logs = tf.math.log(self.sd) * tf.constant(self.sizes, self.dtype)
        volume = tf.reduce_sum(logs, axis=-1)
        for block, rows in self.blocks:
            for number, (place, row) in enumerate(zip(block, rows, strict=True)):
                # What effects before it say is taken away, so that the rest is independent.
                for before, entry in zip(block[:number], row, strict=False):
                    parts[place] -= entry[..., None] * parts[before]
                parts[place] /= row[-1][..., None]
                volume += self.sizes[place] * tf.math.log(row[-1])
        white = tf.concat(parts, axis=-1)
        normal = tfd.Normal(tf.zeros([], self.dtype), 1.0).log_prob(white)
        return tf.reduce_sum(normal, axis=-1) - volume
