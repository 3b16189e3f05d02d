"""Where a step's records come from: arrays on the device, or a dataset whose maker declares how it was sampled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfp_dpvi._tf import tf
from tfp_dpvi.models.records import Records
from tfp_dpvi.models.settings import check_count
from tfp_dpvi.privacy import EachRecordOncePerEpoch, PoissonSampling, SamplingScheme
from tfp_dpvi.sampling import GivenBatchSampler, Sampler

WAYS_OUT = (
    "records must be drawn at random to be accounted for, and shuffling is not Poisson sampling. Two ways out: pass "
    "arrays, and fit draws exact Poisson batches by itself; or declare how the dataset's batches were drawn, with "
    'fit(dataset, num_records=N, steps_per_epoch=T, sampling="each_record_once_per_epoch"), which states that an epoch\'s '
    "batches are disjoint and that no record's batch depends on the records' values (priced without amplification, under "
    'replace-one), or sampling="poisson", sampling_probability=q, which states that each batch holds each record '
    "independently with probability q, drawn anew for every step."
)


class ArrayFeed:
    """All records at once; the sampler inside the step draws from them.

    Args:
      records: what `fit` was given.
      sampler: draws from them.
    """

    def __init__(self, records: Records, sampler: Sampler) -> None:
        self.sampler = sampler
        self.tensors = records.tensors()

    def calls(self, steps: int, key: Any, first: int, compiled: bool) -> Iterator[tuple[int, Sampler, Any]]:
        """One call for all steps, which draw their records from the key themselves."""
        del key, first, compiled
        yield steps, self.sampler, self.tensors


class DatasetFeed:
    """Batches of a `tf.data.Dataset` whose maker declares how they were drawn; each is one step.

    Args:
      dataset: elements x, (x,), (x, y) or (x, y, sample_weight) with a leading batch dimension of any size.
      sampling: "each_record_once_per_epoch" or "poisson".
      probability: the inclusion probability, for "poisson".
      num_records: the public number of records N.
      steps_per_epoch: batches in one pass.
      physical_batch_size: rows in memory at a time, or None.
      dtype: NumPy float type of the model.

    Raises:
      ValueError: not declared, or a declaration that is incomplete; the message has the ways out.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        sampling: str | None,
        probability: float | None,
        num_records: int | None,
        steps_per_epoch: int | None,
        physical_batch_size: int | None,
        dtype: Any,
    ) -> None:
        if sampling is None:
            raise ValueError(f"x is a {type(dataset).__name__} without a declared sampling scheme: {WAYS_OUT}")
        if sampling not in ("poisson", "each_record_once_per_epoch"):
            raise ValueError(f"sampling={sampling!r} cannot be declared of a dataset: {WAYS_OUT}")
        for name, value in (("num_records", num_records), ("steps_per_epoch", steps_per_epoch)):
            if value is None:
                raise ValueError(
                    f"{name} is missing: a dataset does not tell it, and the accounting needs it. {WAYS_OUT}"
                )
            check_count(name, value)
        assert num_records is not None
        assert steps_per_epoch is not None
        self.scheme: SamplingScheme
        if sampling == "poisson":
            if probability is None:
                raise ValueError(
                    'sampling="poisson" of a dataset needs sampling_probability=, the inclusion probability.'
                )
            self.scheme = PoissonSampling(probability)
            self.expected_batch_size = probability * num_records
        else:
            if probability is not None:
                raise ValueError(f'sampling_probability={probability!r} belongs to sampling="poisson"; leave it out.')
            self.scheme = EachRecordOncePerEpoch(steps_per_epoch)
            self.expected_batch_size = num_records / steps_per_epoch
        if sampling != "poisson" and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                'sampling="each_record_once_per_epoch" of an endless dataset: a pass must end for records to be in it once. '
                "Leave out repeat(); fit makes a pass for each epoch."
            )
        self._dataset = dataset
        self._dtype = dtype
        self._repeats = sampling == "poisson"
        self._steps_per_epoch = steps_per_epoch
        self._rows = physical_batch_size or math.ceil(1.3 * self.expected_batch_size) + 8
        self._iterator: Any = None
        self._used = 0
        self.probe = self._probe()
        self.sampler = self._sampler(self._rows)

    def calls(self, steps: int, key: Any, first: int, compiled: bool) -> Iterator[tuple[int, Sampler, Any]]:
        """One call for each batch."""
        del key, first, compiled
        for _ in range(steps):
            tensors, rows = self._padded(self._next())
            yield 1, self._sampler(rows), tensors

    def _sampler(self, rows: int) -> GivenBatchSampler:
        return GivenBatchSampler(rows, self.scheme, self._rows)

    def _next(self) -> Any:
        """The next batch; where records are in one batch of an epoch, each epoch is a pass of its own."""
        if self._iterator is None or (not self._repeats and self._used == self._steps_per_epoch):
            self._iterator, self._used = iter(self._dataset), 0
        try:
            batch = next(self._iterator)
        except StopIteration:
            wanted = (
                "endless: a batch used twice is no new sample"
                if self._repeats
                else f"of {self._steps_per_epoch} batches"
            )
            raise ValueError(
                f"The dataset ended after {self._used} batches; as declared it is {wanted}. The step that found this has been "
                "charged and drew no noise. Have the dataset draw as many batches as fit is to run."
            ) from None
        self._used += 1
        return batch

    def _named(self, element: Any) -> dict[str, Any]:
        parts = element if isinstance(element, tuple) else (element,)
        if not 1 <= len(parts) <= 3:
            raise ValueError(
                f"The dataset's elements have {len(parts)} parts; give x, (x, y) or (x, y, sample_weight)."
            )
        named = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
        return tf.nest.map_structure(
            lambda part: tf.cast(part, self._dtype) if part.dtype.is_floating or part.dtype.is_bool else part, named
        )

    def _padded(self, element: Any) -> tuple[Any, int]:
        """The batch and a mask, padded to a multiple of the physical size: few shapes, and no record dropped."""
        named = self._named(element)
        sizes = {int(part.shape[0]) for part in tf.nest.flatten(named)}
        if len(sizes) != 1:
            raise ValueError(f"A batch of the dataset has parts of different lengths: {sorted(sizes)}.")
        size = sizes.pop()
        rows = max(1, math.ceil(size / self._rows)) * self._rows

        def pad(part: Any) -> Any:
            return tf.pad(part, [[0, rows - size]] + [[0, 0]] * (part.shape.rank - 1))

        padded = tf.nest.map_structure(pad, named)
        padded["mask"] = tf.range(rows) < size
        return padded, rows

    def _probe(self) -> Records:
        """Records of the dataset's shapes and dtypes, all zero, to check the model on without drawing a batch."""

        def zeros(spec: Any) -> Any:
            if spec.shape.rank is None or spec.shape.rank == 0 or None in spec.shape.as_list()[1:]:
                raise ValueError(
                    f"The dataset's elements have shape {spec.shape}; each needs a batch dimension and known others. Use "
                    "dataset.batch(...) and fixed record shapes."
                )
            kind = spec.dtype.as_numpy_dtype
            floating = spec.dtype.is_floating or spec.dtype.is_bool
            return np.zeros([1, *spec.shape.as_list()[1:]], self._dtype if floating else kind)

        element = tf.nest.map_structure(zeros, self._dataset.element_spec)
        parts = element if isinstance(element, tuple) else (element,)
        named = dict(zip(("x", "y", "sample_weight"), parts, strict=False))
        return Records(named["x"], named.get("y"), named.get("sample_weight"), 1)

    @property
    def probe_tensors(self) -> Any:
        """A padded batch without a record, to trace the step with."""
        tensors = tf.nest.map_structure(
            lambda part: tf.zeros([self._rows, *part.shape[1:]], part.dtype), self.probe.tensors()
        )
        tensors["mask"] = tf.zeros([self._rows], tf.bool)
        return tensors
