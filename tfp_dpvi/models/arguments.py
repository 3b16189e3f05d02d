"""Checks and converts the arguments of `fit`, before any privacy is spent."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import (
    Metric,
    Optimizer,
    Structure,
    adapted_layers,
    keras,
    layers_of,
    refuse_keras_3,
    tf,
)
from tfp_dpvi.data import (
    ArrayData,
    Data,
    DatasetData,
    Records,
    RecordSource,
    StreamedData,
    make_records,
    make_units,
)
from tfp_dpvi.data.files import FileRecords, open_files
from tfp_dpvi.data.frames import Native
from tfp_dpvi.data.records import by_column, check_max_weight, refuse_weights, several_inputs
from tfp_dpvi.data.shapes import input_specs
from tfp_dpvi.data.streaming import PersonSource, RowBatches, wants_stream
from tfp_dpvi.data.units import Identifiers, Units
from tfp_dpvi.models.hooks import Hooks
from tfp_dpvi.optimizers import ScoringOptimizer, TermwiseOptimizer
from tfp_dpvi.sampling.choose import SHARDS, make_sampler
from tfp_dpvi.training.distribution import Workers

Validation: TypeAlias = tuple[Structure | None, ...] | tf.data.Dataset | keras.utils.Sequence

LOG = logging.getLogger("tfp_dpvi")
_DEFAULT_BATCH_SIZE = 256

# Keras's default, which is ignored, and the reason why others are refused.
_REFUSED = {
    "shuffle": (True, "records are sampled at random in every step; leave it out."),
    "class_weight": (
        None,
        "pass sample_weight=[class_weight[label] for label in y], which is applied before the "
        "clip.",
    ),
    "workers": (1, "records are no generator; leave it out."),
    "use_multiprocessing": (False, "records are no generator; leave it out."),
    "max_queue_size": (10, "records are no generator; leave it out."),
    "validation_steps": (None, "all of validation_data is used; leave it out."),
}


def refuse(arguments: Mapping[str, object]) -> None:
    """Raises for unsupported arguments of Keras's `fit` and for unknown ones."""
    for name, value in arguments.items():
        if name == "validation_split":  # See `records_and_validation`.
            continue
        if name not in _REFUSED:
            raise TypeError(f"fit got an unexpected keyword argument {name!r}.")
        default, why = _REFUSED[name]
        if value != default:
            raise ValueError(f"{name}={check.shown(value)} is not supported: {why}")


def refuse_incomplete(
    model: Any,
    optimizer: Any,
    given: Mapping[str, Any],
    others: Sequence[tuple[str, str]] = (),
) -> None:
    """Raises one error for all that `compile` lacks, if that is more than one thing.

    Args:
      model: The model.
      optimizer: The argument of `compile`.
      given: Its other arguments, by name, as far as a call that works has them.
      others: What else a model lacks: pairs of what to do and a setting that works, or "".

    Raises:
      ValueError: Two or more arguments are missing or do not belong there.
    """
    of_tensorflow_privacy = hasattr(optimizer, "_dp_sum_query")
    clips = of_tensorflow_privacy or hasattr(optimizer, "l2_norm_clip")
    noise = (given.get("noise_multiplier"), getattr(optimizer, "noise_multiplier", None))
    has_noise = of_tensorflow_privacy or any(value is not None for value in noise)
    epsilon = given.get("epsilon")
    needs_optimizer = optimizer is None and not _has_default(model)
    takes_clip = needs_optimizer or (optimizer is not None and not clips)
    needs_clip = takes_clip and given.get("l2_norm_clip") is None
    needs_epsilon = epsilon is None and not has_noise
    needs_delta = given.get("delta") is None and (epsilon is not None or not has_noise)
    # An optimizer with its clip, or a budget with its delta, is one thing.
    if len(others) + (needs_optimizer or needs_clip) + (needs_epsilon or needs_delta) < 2:
        return
    wanted = (
        (needs_optimizer, ("pass an optimizer", "")),
        *((True, other) for other in others),
        (needs_clip, ("pass l2_norm_clip=, the bound on a gradient", "l2_norm_clip=1.0")),
        (needs_epsilon, ("pass epsilon=, the privacy budget", "epsilon=1.0")),
        (needs_delta, ("pass delta=, far below 1 / N", "delta=1e-5")),
    )
    problems = [problem for is_wanted, problem in wanted if is_wanted]
    first = ["'adam'"] if needs_optimizer else [] if optimizer is None else ["optimizer"]
    shown = [repr(optimizer)] if isinstance(optimizer, str) else first
    kept = [
        f"{name}={value!r}" if isinstance(value, str | int | float) else f"{name}={name}"
        for name, value in given.items()
        if value is not None
    ]
    settings = [setting for _, setting in problems if setting]
    raise ValueError(
        f"compile: {'; '.join(problem for problem, _ in problems)}. For instance\n"
        f"compile({', '.join([*shown, *kept, *settings])})"
    )


def _has_default(model: Any) -> bool:
    """Returns whether a model has an optimizer of its own."""
    try:
        model.default_optimizer(None)
    except ValueError:
        return False
    return True


def refuse_termwise(optimizer: Optimizer) -> None:
    """Raises `ValueError` for an optimizer with a clip for groups of records.

    Args:
      optimizer: A DP-Keras optimizer.
    """
    if isinstance(optimizer, TermwiseOptimizer):
        raise ValueError(
            f"optimizer={type(optimizer).__name__} has a clip for groups of records, but this "
            "model has no batch-wise term: use a DPKeras optimizer, or "
            "DPVAE(batch_regularizer=...)."
        )


def refuse_scoring_steps(optimizer: Optimizer) -> None:
    """Raises `ValueError` for the optimizer of scoring steps, for models that make none.

    Args:
      optimizer: A DP-Keras optimizer.
    """
    if isinstance(optimizer, ScoringOptimizer):
        raise ValueError(
            "optimizer=ScoringOptimizer is for a DPVI, whose steps it applies as they are: pass "
            "another one,\nsuch as DPKerasAdamOptimizer(l2_norm_clip=1.0)."
        )


def check_counts(**counts: int | None) -> None:
    """Raises `ValueError` or `TypeError` unless each is None or an integer of at least 1."""
    for name, value in counts.items():
        if value is not None:
            check.count(name, value, 1)


def make_data(
    model: Any,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    num_records: int | None = None,
    sampling: str | None = None,
    sampling_probability: float | None = None,
    steps_per_epoch: int | None = None,
    physical_batch_size: int | None = None,
    validate: bool = True,
    stream: bool | None = None,
    unit_ids: Identifiers = None,
    max_rows_per_unit: int | None = None,
    rows_beyond: str = "random",
    max_weight: float | None = None,
    seed: int | None = None,
) -> Data:
    """Returns the records of a fit with their sampler, after checks of the model on their shapes.

    Args:
      model: The model, whose variables are created.
      x: As in `DPModel.fit`.
      y: As in `DPModel.fit`.
      sample_weight: As in `DPModel.fit`.
      batch_size: The expected batch size B.
      num_records: The public number of records N.
      sampling: "poisson", "fixed_size", "poisson_of_shards", or a dataset's declared sampling.
      sampling_probability: For a dataset of Poisson batches.
      steps_per_epoch: By default ceil(N / B).
      physical_batch_size: The number of records whose gradients are in memory at a time.
      validate: Whether to refuse values that are not finite or impossible under the model.
      stream: Whether to read rows from their source as steps draw them.
      unit_ids: As in `DPModel.fit`.
      max_rows_per_unit: As in `DPModel.fit`.
      rows_beyond: As in `DPModel.fit`.
      max_weight: As in `DPModel.fit`.
      seed: The model's seed, for the choice of rows.

    Raises:
      TypeError, ValueError: An argument that does not fit; no privacy was spent.
    """
    if x is None:
        raise ValueError("x is missing: pass the records, fit(x, y) or fit(x).")
    check_counts(batch_size=batch_size, num_records=num_records, steps_per_epoch=steps_per_epoch)
    _refuse_other_order(x, y, sample_weight, unit_ids)
    opened, sample_weight = open_files(several_inputs(x, y), y, sample_weight)
    x, y = opened
    asked = (unit_ids, max_rows_per_unit, rows_beyond, seed)
    _check_takes_weights(model, x, max_weight)
    if isinstance(x, tf.data.Dataset):
        _persons(model, True, *asked)
        if sampling is not None and any(
            part is not None for part in (y, sample_weight, batch_size)
        ):
            raise ValueError(
                "y, sample_weight and batch_size are part of the dataset: pass only x."
            )
        public = (sampling, sampling_probability, num_records, steps_per_epoch, physical_batch_size)
        data = DatasetData(x, *public, model.record_dtype)
        _prepare(model, data.records, data.records, sampled=False)
        return data
    _refuse_batches(x, sampling_probability)
    x, y = by_column("x", x, model.takes_texts), by_column("y", y)
    sample_weight = by_column("sample_weight", sample_weight)
    streams = wants_stream((x, y), stream)
    in_shards = sampling == SHARDS
    persons = _persons(model, in_shards or (streams and sample_weight is not None), *asked)
    source = RecordSource(x, y, sample_weight, model.record_dtype) if streams else None
    workers = Workers(model.distribute_strategy)
    rows = workers.agree_on(
        lambda: _records(model, source, x, y, sample_weight, max_weight, validate)
    )
    stored: RecordSource | PersonSource | None = source
    records = rows
    if persons is not None:
        stored, records = _by_person(model, source, rows, persons, validate)
    available = stored.num if stored else records.num
    _prepare(model, rows, records)
    place, total = workers.shards(available) if in_shards else ((0, 1), available)
    num_records = int(num_records or total)
    batch_size = int(batch_size or min(_DEFAULT_BATCH_SIZE, num_records))
    counts = (total, num_records, batch_size, steps_per_epoch, in_shards, input_specs(rows))
    workers.check_same(
        *counts,
        arrays=lambda: [] if in_shards else (source.some() if source else records).arrays(),
    )
    if validate and source is None:
        workers.agree_on(lambda: model.check_labels(rows))
    sampler = make_sampler(
        sampling or "poisson",
        num_available=available,
        num_records=num_records,
        batch_size=batch_size,
        physical_batch_size=physical_batch_size,
        needs=model.batch_needs,
    )
    sampler.place = place
    steps = steps_per_epoch or math.ceil(num_records / batch_size)
    settings = (sampler, num_records, float(min(batch_size, num_records)), steps)
    return StreamedData(stored, *settings) if stored else ArrayData(records, *settings)


def _check_takes_weights(model: Any, x: Structure, max_weight: float | None) -> None:
    if max_weight is None:
        return
    if not getattr(model, "takes_max_weight", False):
        raise ValueError(
            f"max_weight={check.shown(max_weight)} is for weights with calibrated intervals, of a "
            "DPVI compiled without an optimizer: leave it out."
        )
    if isinstance(x, tf.data.Dataset):
        raise ValueError("max_weight with a dataset is not supported: pass arrays.")


def _records(
    model: Hooks,
    source: RecordSource | None,
    x: Structure,
    y: Structure | None,
    sample_weight: np.ndarray | None,
    max_weight: float | None,
    validate: bool,
) -> Records:
    """Returns the records, or of a source one of zeros."""
    if source is not None:
        most = check_max_weight(max_weight, sample_weight)
        if validate and sample_weight is not None:
            refuse_weights(np.asarray(sample_weight, model.record_dtype), most)
        return dataclasses.replace(source.probe, max_weight=most)
    dtype, texts = model.record_dtype, model.takes_texts
    return make_records(
        x, y, sample_weight, dtype=dtype, validate=validate, max_weight=max_weight, texts=texts
    )


def _refuse_batches(x: Any, sampling_probability: float | None) -> None:
    """Raises for batches that another object draws, and for a declaration of such."""
    if is_batches(x):
        raise TypeError(
            f"x is a {type(x).__name__}, which draws its own batches: pass the underlying arrays, "
            "which fit samples itself,\n"
            "or a tf.data.Dataset of the batches (see from_generator) with sampling= to declare "
            "how they were drawn."
        )
    if sampling_probability is not None:
        raise ValueError(
            f"sampling_probability={check.shown(sampling_probability)} is for datasets: leave it "
            "out."
        )


def _persons(
    model: Any,
    apart: bool,
    unit_ids: Identifiers,
    max_rows: int | None,
    rows_beyond: str,
    seed: int | None,
) -> Callable[[int], Units] | None:
    """Returns what groups so many rows by person, after checks; None without `unit_ids`."""
    if unit_ids is None and max_rows is not None:
        raise ValueError(
            "max_rows_per_unit without unit_ids: pass the person of each row, or leave it out."
        )
    if unit_ids is None:
        return None
    if not model.takes_persons:
        raise ValueError(
            f"unit_ids: this {type(model).__name__} has a clipped gradient of single rows, and "
            "would take them for persons.\nUse DPVI, leave out batch_regularizer, or join each "
            "person's rows into one record yourself."
        )
    if apart:
        raise ValueError(
            "unit_ids: a dataset's batches, shards, and streamed records with weights cannot be "
            "grouped by person; pass arrays, or a stream without weights."
        )
    return lambda num: make_units(unit_ids, num, max_rows, rows_beyond, seed=seed)


def _by_person(
    model: Hooks,
    source: RecordSource | None,
    rows: Records,
    persons: Callable[[int], Units],
    validate: bool,
) -> tuple[PersonSource | None, Records]:
    """Returns the source of persons, if rows have one, and their records."""
    if source is not None:
        stored = PersonSource(source, persons(source.num))
        return stored, stored.probe
    units = persons(rows.num)
    if validate and getattr(model, "simulates_outcomes", False):
        rows.refuse_earlier_outcomes(units)
    return None, rows.by_person(units)


@contextlib.contextmanager
def _without_dumps() -> Iterator[None]:
    """Shortens errors of a user's layers that TensorFlow or Keras has made many lines of."""
    try:
        yield
    except Exception as error:
        if len(str(error).strip().splitlines()) <= 2:
            raise
        raise ValueError(
            f"The model failed on synthetic records, {type(error).__name__}: {check.plainly(error)}"
            "\nThe full error stands above this one; no privacy was spent."
        ) from error


def _prepare(model: Any, rows: Records, records: Records, sampled: bool = True) -> None:
    """Creates the model's variables, and checks that the records fit it; rows may be persons'."""
    with _without_dumps():
        with model.distribute_strategy.scope():
            model.prepare(rows)
        model.check_records(records)
    # A likelihood's layers are not the model's own.
    layers = [model, *layers_of(getattr(model, "likelihood", None))]
    if adapted := adapted_layers(layers):
        names = ", ".join(f"{layer.name} ({type(layer).__name__})" for layer in adapted)
        LOG.warning(
            "Layers that read data by adapt: %s. What they read is in the model without noise: "
            "adapt to public data alone,\nor pass a public mean= and variance= or vocabulary=; "
            "PrivateStandardize adapts to private records.",
            names,
        )
    replicas, whole = model.distribute_strategy.num_replicas_in_sync, model.batch_needs.whole
    if replicas > 1 and whole:
        raise ValueError(
            f"The model has a batch_regularizer, whose groups need a whole batch, but {replicas} "
            "replicas split each batch: fit it outside the strategy's scope."
        )
    if not sampled and (whole or Workers(model.distribute_strategy).several):
        what = "this model has a batch_regularizer" if whole else "several workers train"
        raise ValueError(
            f"x is a dataset, and {what}: fit must sample the batches itself. Pass arrays."
        )


def _refuse_other_order(*parts: check.Unchecked) -> None:
    """Refuses parts of records in pandas whose labels are the same in another order."""
    labels: list[Native] = [
        index for part in parts if hasattr(index := getattr(part, "index", None), "equals")
    ]
    if any(not each.equals(labels[0]) and set(each) == set(labels[0]) for each in labels):
        raise ValueError(
            "x, y, sample_weight and unit_ids go by the place of their rows, and indices with the "
            "same labels are in different orders:\npass y.loc[x.index], or to_numpy() of each if "
            "their rows belong together."
        )


def is_batches(data: object) -> bool:
    """Returns whether `data` yields batches: a dataset, a Keras `Sequence` or a generator."""
    return isinstance(data, tf.data.Dataset | keras.utils.Sequence | Iterator)


def in_batches(
    model: Any,
    x: Structure | None,
    y: Structure | None,
    sample_weight: np.ndarray | None,
    batch_size: int | None,
) -> RowBatches | None:
    """Returns records that `fit` would stream by default as batches; None for all others.

    Args:
      model: The model.
      x: As in `DPModel.fit`.
      y: As in `DPModel.fit`.
      sample_weight: Weights, shape [n], or None.
      batch_size: The number of rows of a batch, by default 1024.
    """
    if is_batches(x):
        return None
    x, y = by_column("x", x, model.takes_texts), by_column("y", y)
    if not wants_stream((x, y), None):
        return None
    source = RecordSource(x, y, sample_weight, model.record_dtype)
    return RowBatches(source, batch_size or 1024)


def check_like(x: Structure, specs: Structure, name: str) -> None:
    """Raises `ValueError` unless new records have the structure and shapes of the fit's.

    Args:
      x: The new records, arrays.
      specs: `tf.TensorSpec`s of the fit's records.
      name: "x" or "y", for the message.
    """
    if isinstance(x, dict) != isinstance(specs, dict):
        ours, theirs = ("columns", "one array") if isinstance(x, dict) else ("one array", "columns")
        fix = f"{name}.to_numpy()" if isinstance(x, dict) else "a dict or table of the same columns"
        raise ValueError(f"{name} has {ours}, but the model was fitted to {theirs}: pass {fix}.")
    for part, spec in zip(tf.nest.flatten(x), tf.nest.flatten(specs), strict=False):
        if spec.shape.rank is not None and part.ndim == spec.shape.rank - 1:
            raise ValueError(
                f"{name} has shape {list(part.shape)}, but the model was fitted to records of "
                f"shape {spec.shape[1:].as_list()}: pass a batch, for instance {name}[None] for "
                "one record."
            )


def records_and_validation(
    model: Any,
    records: tuple[Any, Any, Any],
    validation_data: Any,
    others: Mapping[str, Any],
    declared: tuple[bool, bool],
    persons: bool,
) -> tuple[tuple[Any, Any, Any], Validation | None]:
    """Returns the records to train on, and the validation data as Keras takes them.

    Args:
      model: The model.
      records: x, y and sample_weight.
      validation_data: As in `DPModel.fit`.
      others: Other arguments of `fit`, perhaps with `validation_split`, the fraction of the records
        to validate with instead.
      declared: Whether the validation records are public, and whether their exact losses may be
        shown as unsafe.
      persons: Whether records are persons with several rows.

    Raises:
      ValueError, TypeError: As `split_validation` and `check_validation`.
    """
    if fraction := others.get("validation_split", 0.0):
        if validation_data is not None or persons:
            raise ValueError(
                "validation_split with validation_data or unit_ids: pass validation_data alone."
            )
        records, validation_data = split_validation(model, fraction, records, any(declared))
    dtype, texts = model.record_dtype, model.takes_texts
    checked = check_validation(validation_data, *declared, dtype, persons=persons, texts=texts)
    return records, checked


def split_validation(
    model: Any, fraction: Any, records: tuple[Any, Any, Any], declared: bool
) -> tuple[tuple[Any, Any, Any], tuple[Any, ...]]:
    """Returns the first records for training, and the last ones for validation, as Keras splits.

    Args:
      model: The model.
      fraction: The fraction of validation records.
      records: x, y and sample_weight, arrays or frames; y and weights may be None.
      declared: Whether the validation records are public, or their losses are shown as unsafe.

    Raises:
      ValueError, TypeError: Losses of private records would be shown, or the records cannot be
        split.
    """
    x, y = records[:2]
    sample_weight = records[2]
    fraction = check.probability("validation_split", fraction)
    if not declared:
        raise ValueError(
            f"validation_split={fraction:g} would show exact losses of a part of x. If that part "
            "is public pass validation_is_public=True,\nor unsafe_validation=True to accept it; "
            "else pass public validation_data, or watch a privatised metric."
        )
    if is_batches(x) or isinstance(x, FileRecords):
        raise TypeError(
            f"validation_split needs arrays, and x is a {type(x).__name__}: pass validation_data."
        )
    x, y = by_column("x", several_inputs(x, y), model.takes_texts), by_column("y", y)
    parts: tuple[Any, ...] = (x, y, by_column("sample_weight", sample_weight))
    parts = tuple(np.asarray(part) if isinstance(part, list) else part for part in parts)
    num = len(tf.nest.flatten(parts[0])[0])
    first = math.floor(num * (1.0 - fraction))
    if not 0 < first < num:
        raise ValueError(
            f"validation_split={fraction:g} of {num} records leaves none to train or to validate."
        )

    def rows(part: Any, start: int, stop: int) -> Any:
        return tf.nest.map_structure(lambda leaf: None if leaf is None else leaf[start:stop], part)

    train, held = rows(parts, 0, first), rows(parts, first, num)
    return train, held[:2] if held[2] is None else held


def check_validation(
    data: Any,
    public: bool,
    unsafe: bool,
    dtype: np.dtype,
    *,
    persons: bool = False,
    texts: bool = False,
) -> Validation | None:
    """Returns `validation_data` as Keras takes it, arrays as a tuple of tensors; or None.

    Args:
      data: As in `DPModel.fit`.
      public: Whether the records are declared public.
      unsafe: Whether the user accepts exact losses of private records.
      dtype: The float type that records are cast to.
      persons: Whether the training records are persons with several rows.
      texts: Whether x may have texts.

    Raises:
      ValueError: validation data of persons, private data that are not declared unsafe, or an
        unsupported form.
    """
    if data is None:
        return None
    if persons:
        raise ValueError(
            "validation_data with unit_ids: its rows would be judged one by one, not by person. "
            "Leave it out, and call evaluate on public rows after the fit."
        )
    if not (public or unsafe):
        raise ValueError(
            "validation_data: exact validation losses (and early stopping on them) are unaccounted "
            "releases of those records.\nPass validation_is_public=True if they are public, or "
            "unsafe_validation=True to accept that (docs/sharp_edges.md)."
        )
    unusable = isinstance(data, Iterator)
    if isinstance(data, tf.data.Dataset):
        scalar = any(
            getattr(spec, "shape", [0]) == [] for spec in tf.nest.flatten(data.element_spec)
        )
        unusable = scalar or data.cardinality() == tf.data.INFINITE_CARDINALITY
    if unusable:
        raise ValueError(
            f"validation_data is a {type(data).__name__} of single records, or endless, or "
            "exhausted after one epoch: pass arrays, a finite tf.data.Dataset of batches "
            "(dataset.batch(1024)) or a keras.utils.Sequence."
        )
    if is_batches(data):
        return data
    if not isinstance(data, tuple | list) or len(data) not in (1, 2, 3):
        raise ValueError(
            "validation_data must be (x, y) or (x, y, sample_weight), or a dataset of such "
            f"batches, got {type(data).__name__}; for a model without y pass (x, None)."
        )
    checked = make_records(*(*data, None, None)[:3], dtype=dtype, validate=True, texts=texts)
    parts = [checked.x, checked.y, checked.sample_weight]
    while parts[-1] is None:
        parts.pop()
    return tuple(
        None if part is None else tf.nest.map_structure(tf.convert_to_tensor, part)
        for part in parts
    )


def validation_metrics(metrics: Any) -> list[Metric]:
    """Returns Keras metric objects from objects, functions and names.

    Raises:
      ValueError: A name that is ambiguous or not unique.
    """
    objects = []
    refuse_keras_3("validation_metrics", list(metrics or ()))
    for metric in metrics or ():
        if metric in ("accuracy", "acc"):
            raise ValueError(
                f"validation_metrics={metric!r} is ambiguous: pass binary_accuracy if predict "
                "returns the mean of 0/1 outcomes, or sparse_categorical_accuracy for class "
                "probabilities."
            )
        resolved = keras.metrics.get(metric)
        if not callable(resolved):
            raise ValueError(
                f"metric {check.shown(metric)} is unknown to Keras: pass a name such as 'mae', a "
                "metric object or a function."
            )
        if not isinstance(resolved, Metric):
            name = getattr(resolved, "__name__", "metric")
            resolved = keras.metrics.MeanMetricWrapper(resolved, name=name)
        objects.append(resolved)
    names = [metric.name for metric in objects]
    if len({"loss", "epsilon", *names}) < len(names) + 2:
        raise ValueError(
            f"validation_metrics have the names {names}: pass a unique name=, not loss or epsilon."
        )
    return objects
