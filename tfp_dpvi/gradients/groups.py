"""The batch-wise term: random groups of records, one clipped gradient each (DESIGN section 5.3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tfp_dpvi import _random
from tfp_dpvi._keras import tf, tfp
from tfp_dpvi.gradients.clipping import clip_record, select_finite
from tfp_dpvi.gradients.contributions import Contribution


def assign(key: Any, num: Any, num_groups: int) -> Any:
    """Groups of `num` records: independent and uniform, int32 of shape [num].

    #### Formal guarantee

    A record's group depends on no other record, so adding or removing one leaves the others where they are. (Dealing out a
    shuffled batch would move them, and with them every group's gradient.)
    """
    return tf.random.stateless_uniform([num], seed=key, maxval=num_groups, dtype=tf.int32, alg=_random.ALGORITHM)


def _changed(distribution: Any, of_rows: Callable[[Any], Any], num: Any) -> Any:
    """The distribution with all parameters changed that have `num` rows."""
    plain = getattr(distribution, "tensor_distribution", distribution)  # What a TFP layer returns wraps it.
    try:
        composite = tfp.experimental.as_composite(plain)
    except (TypeError, NotImplementedError, ValueError) as error:
        raise TypeError(
            f"The encoder's distribution {plain.name!r} cannot be taken apart by record ({error}): with a batch_regularizer "
            "use one of TFP's own distributions."
        ) from error
    leaves = tf.nest.flatten(composite, expand_composites=True)
    changed = [of_rows(leaf) if leaf.shape.rank and leaf.shape[0] == num else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(composite, changed, expand_composites=True)


def rows_of_distribution(distribution: Any, rows: Any, num: Any) -> Any:
    """The batch members `rows` of a TFP distribution with `num` of them (None: as many as there are) in its first dimension.

    Raises:
      TypeError: a distribution that TFP cannot take apart.
    """
    return _changed(distribution, lambda leaf: tf.gather(leaf, rows), num)


def distribution_where(distribution: Any, chosen: Any, num: Any) -> Any:
    """The same distribution with ones as parameters of all batch members that are not chosen.

    Nothing of theirs is in it then, nor a NaN, which would pass through zeros.

    Raises:
      TypeError: a distribution that TFP cannot take apart.
    """

    def select(leaf: Any) -> Any:
        keep = tf.reshape(chosen, [-1] + [1] * (leaf.shape.rank - 1))
        return tf.where(keep, leaf, tf.ones_like(leaf))

    return _changed(distribution, select, num)


def clipped_group_sum(
    parts: Sequence[Contribution | None],
    variables: Sequence[Any],
    groups: Any,
    mask: Any,
    *,
    num_groups: int,
    l2_norm_clip: float,
    static: bool,
) -> list[Any]:
    """Sum over groups of their gradients, each clipped.

    Args:
      parts: for each variable what the records contribute to its group's gradient, or None.
      variables: the variables.
      groups: int32 tensor of shape [n].
      mask: bool tensor of shape [n]; False marks padding.
      num_groups: b.
      l2_norm_clip: the bound C2.
      static: keep shapes fixed, as XLA needs it, at b times the work.

    #### Formal guarantee

    Each group contributes a vector of l2 norm at most C2, computed before it is clipped, and zero if it is empty or holds
    NaN or Inf. If row i of `parts` depends on the records of its own group alone, one record's presence moves the sum by at
    most 2 C2, and so does its replacement within the group.
    """
    used = [(number, part) for number, part in enumerate(parts) if part is not None]

    def gradient_of(group: Any) -> list[Any]:
        chosen = (groups == group) & mask
        if static:
            weights = tf.cast(chosen, variables[0].dtype)
            return [part.weighted_sum(weights) for _, part in used]
        rows = tf.where(chosen)[:, 0]
        return [part.rows(rows).weighted_sum(tf.ones([tf.size(rows)], variables[0].dtype)) for _, part in used]

    def body(group: Any, sums: Any) -> tuple[Any, Any]:
        gradient, _ = select_finite(gradient_of(group), tf.constant(True))
        clipped = clip_record(gradient, l2_norm_clip)
        return group + 1, [total + part for total, part in zip(sums, clipped, strict=True)]

    zeros = [tf.zeros(variables[number].shape, variables[number].dtype) for number, _ in used]
    if used:
        start = (tf.constant(0), zeros)
        zeros = tf.while_loop(lambda group, _: group < num_groups, body, start, parallel_iterations=1)[1]
    sums = [tf.zeros(variable.shape, variable.dtype) for variable in variables]
    for (number, _), total in zip(used, zeros, strict=True):
        sums[number] = total
    return sums
