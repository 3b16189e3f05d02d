"""From the arguments of `fit` to records, a feed and public numbers; everything bad is refused here, before it costs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from tfp_dpvi._tf import tf
from tfp_dpvi.models import planning, workers
from tfp_dpvi.models.feeds import ArrayFeed, DatasetFeed
from tfp_dpvi.models.records import Records, by_column, make_records
from tfp_dpvi.models.sources import RecordSource, SourceFeed, wants_stream

_DEFAULT_BATCH_SIZE = 256

_WAYS_OUT = {
    "shuffle": "records are sampled at random in every step; leave it out.",
    "validation_split": "it would show exact losses of private records; split yourself and give validation_data=.",
    "class_weight": "give sample_weight=, which acts inside the clip.",
    "validation_steps": "all of validation_data is used; leave it out.",
}


@dataclasses.dataclass(frozen=True)
class Given:
    """What a fit learns from.

    Attributes:
      feed: where each step's records come from.
      traced: the sampler that the step is traced with.
      tensors: tensors of the shapes that it is traced with.
      records: the records, or stand-ins of their shapes for those that stay where they are.
      num_records: the public N.
      batch_size: the expected batch size, the public denominator q N.
      steps_per_epoch: likewise public.
    """

    feed: ArrayFeed | DatasetFeed | SourceFeed
    traced: Any
    tensors: Any
    records: Records
    num_records: int
    batch_size: float
    steps_per_epoch: int


def of_dataset(
    model: Any,
    dataset: Any,
    *,
    sampling: str | None,
    sampling_probability: float | None,
    num_records: int | None,
    steps_per_epoch: int | None,
) -> Given:
    """A user's batches, with their declaration of how they were drawn.

    Raises:
      TypeError, ValueError: undeclared, or not for this model.
    """
    if workers.several(model.distribute_strategy):
        raise ValueError(
            "x is a dataset, and several workers train: each would draw batches of its own and take its share of "
            "another one, so that a record could be in a step, or in an epoch, more than once. Pass the same arrays "
            "on every worker."
        )
    feed = DatasetFeed(
        dataset,
        sampling=sampling,
        probability=sampling_probability,
        num_records=num_records,
        steps_per_epoch=steps_per_epoch,
        physical_batch_size=model._dp.settings.physical_batch_size,
        dtype=model._record_dtype,
    )
    assert num_records is not None
    assert steps_per_epoch is not None
    with model.distribute_strategy.scope():
        model._prepare(feed.probe)
    model._check_data(feed.probe)
    if model._batch_needs is not None and model._batch_needs.whole:
        raise ValueError(
            "x is a dataset, and this model has a batch_regularizer, whose groups are drawn from batches that fit "
            "samples by itself. Pass arrays."
        )
    return Given(
        feed, feed.sampler, feed.probe_tensors, feed.probe, num_records, feed.expected_batch_size, steps_per_epoch
    )


def of_arrays(
    model: Any,
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    sampling: str | None,
    num_records: int | None,
    steps_per_epoch: int | None,
    validate: bool,
    stream: bool | None,
) -> Given:
    """Records that `fit` samples from by itself.

    Raises:
      TypeError, ValueError: not records, or not for this model.
    """
    state = model._dp
    x, y = by_column("x", x), by_column("y", y)
    source = None
    if wants_stream((x, y), stream):
        source = RecordSource(x, y, sample_weight, model._record_dtype)
        records = source.probe
    else:
        records = make_records(x, y, sample_weight, dtype=model._record_dtype, validate=validate)
    with model.distribute_strategy.scope():
        model._prepare(records)
    model._check_data(records, in_memory=source is None)
    available = records.num if source is None else source.num
    public_num = available if num_records is None else int(num_records)
    batch_size = min(_DEFAULT_BATCH_SIZE, public_num) if batch_size is None else int(batch_size)
    if workers.several(model.distribute_strategy):
        compared = records if source is None else source.some()
        workers.check_same_records(
            model.distribute_strategy, compared, available, public_num, batch_size, state.steps_run
        )
    sampler = planning.make_sampler(
        sampling or "poisson",
        available,
        public_num,
        batch_size,
        state.settings.physical_batch_size,
        model.trainable_variables,
        model._batch_needs,
    )
    expected = float(min(batch_size, public_num))
    steps = steps_per_epoch or math.ceil(public_num / batch_size)
    if source is None:
        feed = ArrayFeed(records, sampler)
        return Given(feed, sampler, feed.tensors, records, public_num, expected, steps)
    streamed = SourceFeed(source, sampler)
    return Given(streamed, streamed.given, streamed.probe_tensors, records, public_num, expected, steps)


def check_validation(data: Any, public: bool, unsafe: bool, dtype: Any) -> Any:
    """`validation_data` as a tuple of tensors, or None.

    Raises:
      ValueError: private and not declared unsafe, or of another form.
    """
    if data is None:
        return None
    if not (public or unsafe):
        raise ValueError(
            "validation_data: exact validation losses (and early stopping on them) are unpriced releases of those "
            "records. Say validation_is_public=True if the records are public, or unsafe_validation=True to accept "
            "that they are not protected."
        )
    if not isinstance(data, tuple) or len(data) not in (2, 3):
        raise ValueError(
            f"validation_data must be (x, y) or (x, y, sample_weight), got {type(data).__name__}; for a model "
            "without y give (x, None)."
        )
    x, y, weight = (*data, None) if len(data) == 2 else data
    checked = make_records(x, y, weight, dtype=dtype, validate=True)
    parts = [checked.x, checked.y, checked.sample_weight]
    while parts[-1] is None:
        parts.pop()
    return tuple(tf.nest.map_structure(tf.convert_to_tensor, part) for part in parts)


def refuse(arguments: dict[str, Any]) -> None:
    """Raises for arguments of Keras's `fit` that have no place here, with the way out, and for unknown ones."""
    for name, value in arguments.items():
        if name in _WAYS_OUT:
            raise ValueError(f"{name}={value!r} is not supported: {_WAYS_OUT[name]}")
        raise TypeError(f"fit got an unexpected keyword argument {name!r}.")
