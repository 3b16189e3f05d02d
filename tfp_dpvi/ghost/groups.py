"""The batch-wise term: random groups of records with one clipped gradient each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.ghost.contributions import Contribution, Direct, Groups, total
from tfp_dpvi.gradients.base import take_apart
from tfp_dpvi.gradients.clip import Clip


def assign(key: tf.Tensor, num: tf.Tensor, num_groups: int) -> tf.Tensor:
    """Draws independent uniform groups for `num` records: int32 of shape [num].

    #### Formal guarantee

    A record's group is a draw of its own, so adding or removing a record does not change the law of
    the others' groups. (Splitting a shuffled batch would, and with them every group's gradient.) It
    takes the draws of different places of a batch as independent: a record more moves the places of
    those after it.
    """
    return tf.random.stateless_uniform(
        [num], seed=key, maxval=num_groups, dtype=tf.int32, alg=_random.ALGORITHM
    )


def with_rows(
    distribution: tfd.Distribution, of_rows: Callable[[tf.Tensor], tf.Tensor], num: int | None
) -> tfd.Distribution:
    """Applies `of_rows` to a distribution's parameters that have `num` rows (None if unknown); errors of `take_apart`."""
    parts, joined = take_apart(distribution)
    return joined(
        [of_rows(part) if part.shape.rank and part.shape[0] == num else part for part in parts]
    )


def members_of(
    groups: tf.Tensor, mask: tf.Tensor, num_groups: int, expected_batch_size: float
) -> Groups:
    """Returns the `Groups` of an assignment [n]; `mask` is False for padding, which belongs to no group."""
    of_each = tf.where(mask, groups, num_groups)
    ordered = tf.argsort(of_each, stable=True)
    sizes = tf.math.unsorted_segment_sum(tf.ones_like(groups), of_each, num_groups + 1)[:num_groups]
    place = tf.range(tf.reduce_max(sizes))
    present = place < sizes[:, None]
    starts = tf.cumsum(sizes, exclusive=True)
    members = tf.gather(ordered, tf.where(present, starts[:, None] + place, 0))
    return Groups(num_groups, of_each, members, present, expected_batch_size / num_groups)


def clipped_group_sum(
    parts: Sequence[Contribution | None],
    variables: Sequence[tf.Variable],
    groups: tf.Tensor,
    mask: tf.Tensor,
    *,
    num_groups: int,
    clip: Clip,
    expected_batch_size: float,
    static: bool,
) -> list[tf.Tensor]:
    """Sums the clipped gradients of groups.

    `parts` are, for each variable, the records' contributions to their group's gradient, or None;
    `groups` int32 of shape [n]; `mask` bool of shape [n], False for padding; `clip` the bound C2.
    `expected_batch_size` serves to choose the cheaper form; `static` keeps shapes static for XLA,
    at b times the work.

    #### Formal guarantee

    Each group contributes a vector of l2 norm at most C2 up to rounding, and zero if it is empty or
    the bound on its norm is NaN or Inf. If row i of `parts` depends only on the records of its
    group, adding or removing one record moves the sum by at most 2 C2, and so does replacing it
    within the group.
    """
    used = [part for part in parts if part is not None]
    found: Iterator[tf.Tensor] = iter(())
    if static and used:
        found = iter(_loop_over_groups(used, groups, mask, num_groups, clip, variables[0].dtype))
    elif used:
        members = members_of(groups, mask, num_groups, expected_batch_size)
        of_groups = [part.of_groups(members) for part in used]
        found = iter(total(of_groups, *_factors(clip, of_groups)))
    zeros = (tf.zeros(variable.shape, variable.dtype) for variable in variables)
    return [zero if part is None else next(found) for zero, part in zip(zeros, parts, strict=True)]


def _factors(clip: Clip, of_groups: Sequence[Contribution]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns each variable's factors, 0 for a group whose norm is not finite, and which norms are finite."""
    squares = [part.squared_norms() for part in of_groups]
    finite = tf.math.is_finite(tf.add_n(squares))
    return [
        tf.where(finite, factor, tf.zeros_like(factor)) for factor in clip.factors(squares)
    ], finite


def _loop_over_groups(
    parts: Sequence[Contribution],
    groups: tf.Tensor,
    mask: tf.Tensor,
    num_groups: int,
    clip: Clip,
    dtype: tf.DType,
) -> list[tf.Tensor]:
    def body(group: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        weights = tf.cast((groups == group) & mask, dtype)
        own = [Direct(part.shape, part.weighted_sum(weights)[None]) for part in parts]
        factors, _ = _factors(clip, own)
        clipped = [part.weighted_sum(factor) for part, factor in zip(own, factors, strict=True)]
        return group + 1, [before + part for before, part in zip(sums, clipped, strict=True)]

    start = [tf.zeros(part.shape, dtype) for part in parts]
    return tf.while_loop(
        lambda group, _: group < num_groups, body, (tf.constant(0), start), parallel_iterations=1
    )[1]
