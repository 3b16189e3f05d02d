"""The batch-wise term: random groups of records with one clipped gradient each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.ghost.contributions import Contribution, Direct, Groups, total
from tfp_dpvi.gradients.base import take_apart
from tfp_dpvi.gradients.clip import Clip


def assign(key: tf.Tensor, num: tf.Tensor, num_groups: int) -> tf.Tensor:
    """Draws independent uniform groups for records.

    Args:
      key: Int64 [2], used once.
      num: Int32 scalar, the number of records.
      num_groups: The number of groups.

    Returns:
      Int32 of shape [num].

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
    distribution: tfd.Distribution, change: Callable[[tf.Tensor], tf.Tensor], num: int | None
) -> tfd.Distribution:
    """Returns a distribution whose parameters have other rows.

    Args:
      distribution: A TFP distribution.
      change: Maps a parameter to its new rows.
      num: The number of rows of the parameters to change; None if it is unknown. Other parameters
        stay.

    Raises:
      TypeError: TFP does not know the parameters of the distribution.
    """
    parts, joined = take_apart(distribution)
    return joined(
        [change(part) if part.shape.rank and part.shape[0] == num else part for part in parts]
    )


def members_of(
    groups: tf.Tensor, mask: tf.Tensor, num_groups: int, expected_batch_size: float
) -> Groups:
    """Returns the `Groups` of an assignment.

    Args:
      groups: Int32 [n], the group of each record.
      mask: Bool [n], False for padding, which belongs to no group.
      num_groups: The number of groups.
      expected_batch_size: The public number of records that a batch has on average.
    """
    group = tf.where(mask, groups, num_groups)
    ordered = tf.argsort(group, stable=True)
    sizes = tf.math.unsorted_segment_sum(tf.ones_like(groups), group, num_groups + 1)[:num_groups]
    place = tf.range(tf.reduce_max(sizes))
    present = place < sizes[:, None]
    starts = tf.cumsum(sizes, exclusive=True)
    members = tf.gather(ordered, tf.where(present, starts[:, None] + place, 0))
    return Groups(num_groups, group, members, present, expected_batch_size / num_groups)


def clipped_group_sum(
    parts: Sequence[Contribution | None],
    variables: Sequence[tf.Variable],
    groups: tf.Tensor,
    mask: tf.Tensor,
    *,
    num_groups: int,
    group_clip: Clip,
    expected_batch_size: float,
    static: bool,
) -> list[tf.Tensor]:
    """Sums the clipped gradients of groups.

    Args:
      parts: For each variable, the records' contributions to their group's gradient; or None.
      variables: The variables.
      groups: Int32 [n], the group of each record.
      mask: Bool [n], False for padding.
      num_groups: The number of groups b.
      group_clip: The bound on one group's gradient, and its scheme.
      expected_batch_size: The public number of records that a batch has on average. It serves to
        choose the cheaper form.
      static: True keeps shapes static for XLA, at b times the work.

    Returns:
      One tensor for each variable.

    #### Formal guarantee

    Each group contributes a vector of l2 norm at most the bound of `group_clip` up to rounding, and
    zero if it is empty or the bound on its norm is NaN or Inf. If row i of `parts` depends only on
    the records of its group, adding or removing one record moves the sum by at most twice that
    bound, and so does replacing it within the group.
    """
    used = [part for part in parts if part is not None]
    sums: Iterator[tf.Tensor] = iter(())
    if static and used:
        dtype = variables[0].dtype
        sums = iter(_loop_over_groups(used, groups, mask, num_groups, group_clip, dtype))
    elif used:
        members = members_of(groups, mask, num_groups, expected_batch_size)
        by_groups = [part.by_groups(members) for part in used]
        sums = iter(total(by_groups, *_factors(group_clip, by_groups)))
    zeros = (tf.zeros(variable.shape, variable.dtype) for variable in variables)
    return [zero if part is None else next(sums) for zero, part in zip(zeros, parts, strict=True)]


def _factors(group_clip: Clip, parts: Sequence[Contribution]) -> tuple[list[tf.Tensor], tf.Tensor]:
    """Returns each variable's factors, and which groups' norms are finite.

    The factors are 0 for a group whose norm is not finite.
    """
    squares = [part.squared_norms() for part in parts]
    finite = tf.math.is_finite(tf.add_n(squares))
    factors = group_clip.factors(squares)
    return [tf.where(finite, factor, tf.zeros_like(factor)) for factor in factors], finite


def _loop_over_groups(
    parts: Sequence[Contribution],
    groups: tf.Tensor,
    mask: tf.Tensor,
    num_groups: int,
    group_clip: Clip,
    dtype: tf.DType,
) -> list[tf.Tensor]:
    def body(group: tf.Tensor, sums: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        weights = tf.cast((groups == group) & mask, dtype)
        own = [Direct(part.shape, part.weighted_sum(weights)[None]) for part in parts]
        factors, _ = _factors(group_clip, own)
        clipped = [part.weighted_sum(factor) for part, factor in zip(own, factors, strict=True)]
        return group + 1, [before + part for before, part in zip(sums, clipped, strict=True)]

    start = [tf.zeros(part.shape, dtype) for part in parts]
    return tf.while_loop(
        lambda group, _: group < num_groups, body, (tf.constant(0), start), parallel_iterations=1
    )[1]
