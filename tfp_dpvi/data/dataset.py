"""Batches of a `tf.data.Dataset` with a declared sampling scheme."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf, without_values
from tfp_dpvi.data.records import Calls, Key, Records
from tfp_dpvi.privacy import EachRecordOncePerEpoch, PoissonSampling, SamplingScheme
from tfp_dpvi.sampling import DeclaredBatchSampler, Sampler

_ONCE, _POISSON = "each_record_once_per_epoch", "poisson"


_RECIPES = (
    "Pass arrays, which fit samples itself, or, for records that do not fit in memory, "
    "fit(dpvi.data.Copied(dataset)); or declare how these batches were drawn:\n"
    "fit(dataset, num_records=N, "
    'steps_per_epoch=T, sampling="poisson", sampling_probability=q), or '
    'sampling="each_record_once_per_epoch" under compile(neighboring_relation="replace_one"). '
    "Shuffling is not Poisson sampling."
)


class DatasetData:
    """Batches that the user draws, one for each step. See `Data`.

    ```python
    >>> batches = tf.data.Dataset.from_tensor_slices(tf.zeros([20, 2])).batch(5)
    >>> data = DatasetData(
    ...     batches, "each_record_once_per_epoch", None, 20, 4, None, np.dtype("float32")
    ... )
    >>> data.batch_size
    5.0

    ```

    Args:
      dataset: Its elements are x, (x,), (x, y) or (x, y, sample_weight) with a leading batch
        dimension of any size.
      sampling: "each_record_once_per_epoch" declares that an epoch's batches are disjoint and that
        no record's batch depends on the records' values (priced without amplification, under
        replace-one). "poisson" declares that each batch holds each record independently with
        `probability`, drawn anew for every step.
      probability: The probability of "poisson"; None otherwise.
      num_records: The public N.
      steps_per_epoch: The public number of batches of an epoch.
      physical_batch_size: The rows of a compiled step; None for a few more than a batch has on
        average.
      dtype: The model's float type.

    Raises:
      ValueError: A declaration is missing or incomplete; the message says how to declare it.
    """

    resumable: bool = False

    def __init__(
        self,
        dataset: tf.data.Dataset,
        sampling: str | None,
        probability: float | None,
        num_records: int | None,
        steps_per_epoch: int | None,
        physical_batch_size: int | None,
        dtype: np.dtype,
    ) -> None:
        if sampling not in (_POISSON, _ONCE):
            raise ValueError(
                f"x is a {type(dataset).__name__}, and sampling={check.shown(sampling)} declares "
                f"no scheme. {_RECIPES}"
            )
        if num_records is None or steps_per_epoch is None:
            missing = "num_records" if num_records is None else "steps_per_epoch"
            raise ValueError(
                f"{missing} is missing: a dataset does not tell it, and the accounting needs it. "
                f"{_RECIPES}"
            )
        self._scheme = _declared_scheme(sampling, probability, steps_per_epoch)
        if sampling != "poisson" and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                f"sampling={check.shown(sampling)} needs a finite dataset: leave out repeat()."
            )
        self.num_records, self.steps_per_epoch = num_records, steps_per_epoch
        self.batch_size = (
            num_records / steps_per_epoch if probability is None else probability * num_records
        )
        self._dataset, self._dtype = dataset, dtype
        self._rows = physical_batch_size or math.ceil(1.3 * self.batch_size) + 8
        self._iterator: Iterator[Any] | None = None
        self._used = 0
        self.records = self._zeros()
        self.sampler: Sampler = DeclaredBatchSampler(self._rows, self._scheme, self._rows)
        self.tensors = tf.nest.map_structure(
            lambda part: tf.zeros([self._rows, *part.shape[1:]], part.dtype), self.records.tensors()
        )
        self.tensors["mask"] = tf.zeros([self._rows], tf.bool)

    def calls(self, steps: int, key: Key, first: int, compiled: bool) -> Calls:
        """See `Data`."""
        del key, first, compiled
        for _ in range(steps):
            tensors, rows = self._padded(self._next())
            yield 1, DeclaredBatchSampler(rows, self._scheme, self._rows), tensors

    def _next(self) -> tf.Tensor:
        """Returns the next batch.

        With "each_record_once_per_epoch", each epoch starts a new pass.
        """
        endless = isinstance(self._scheme, PoissonSampling)
        if self._iterator is None or (not endless and self._used == self.steps_per_epoch):
            self._iterator, self._used = iter(self._dataset), 0
        try:
            with without_values("The dataset failed"):
                batch = next(self._iterator)
        except StopIteration:
            wanted = (
                "endless: a batch used twice is no new sample"
                if endless
                else f"of {self.steps_per_epoch} batches"
            )
            raise ValueError(
                f"The dataset ended after {self._used} batches; as declared it is {wanted}. The "
                "step that found this has been charged and drew no noise. Make the dataset yield "
                "as many batches as fit runs."
            ) from None
        self._used += 1
        return batch

    def _kind(self, dtype: tf.DType) -> tf.DType:
        """Returns the dtype that the model sees."""
        return tf.as_dtype(self._dtype) if dtype.is_floating or dtype.is_bool else dtype

    def _padded(self, element: tf.Tensor) -> tuple[dict[str, tf.Tensor], int]:
        """Returns the batch with its mask, and the number of its rows.

        It is padded to a multiple of the physical size: few shapes, no record dropped.
        """
        named = tf.nest.map_structure(
            lambda part: tf.cast(part, self._kind(part.dtype)), _named(element)
        )
        sizes = {int(part.shape[0]) for part in tf.nest.flatten(named)}
        if len(sizes) != 1:
            # The numbers are not shown: a sample's size is secret.
            raise ValueError("A batch of the dataset has parts of different lengths.")
        size = sizes.pop()
        rows = max(1, math.ceil(size / self._rows)) * self._rows

        def pad(part: tf.Tensor) -> tf.Tensor:
            return tf.pad(part, [[0, rows - size]] + [[0, 0]] * (part.shape.rank - 1))

        padded = tf.nest.map_structure(pad, named)
        padded["mask"] = tf.range(rows) < size
        return padded, rows

    def _zeros(self) -> Records:
        """Returns one record of zeros with the dataset's shapes and dtypes.

        It serves to check the model without drawing a batch.
        """

        def zeros(spec: tf.TensorSpec) -> np.ndarray:
            if spec.shape.rank is None or spec.shape.rank == 0 or None in spec.shape.as_list()[1:]:
                raise ValueError(
                    f"The dataset's elements have shape {spec.shape}: use dataset.batch(...) and "
                    "fixed record shapes."
                )
            return np.zeros([1, *spec.shape.as_list()[1:]], self._kind(spec.dtype).as_numpy_dtype)

        named = tf.nest.map_structure(zeros, _named(self._dataset.element_spec))
        return Records(named["x"], named.get("y"), named.get("sample_weight"), 1)


def _named(element: Structure) -> dict[str, Structure]:
    parts = element if isinstance(element, tuple) else (element,)
    if not 1 <= len(parts) <= 3:
        raise ValueError(
            f"The dataset's elements have {len(parts)} parts; use x, (x, y) or (x, y, "
            "sample_weight)."
        )
    return dict(zip(("x", "y", "sample_weight"), parts, strict=False))


def _declared_scheme(
    sampling: str, probability: float | None, steps_per_epoch: int
) -> SamplingScheme:
    if sampling == "poisson":
        if probability is None:
            raise ValueError(
                'sampling="poisson" with a dataset needs sampling_probability=, the inclusion '
                "probability."
            )
        return PoissonSampling(probability)
    if probability is not None:
        raise ValueError(
            f'sampling_probability={check.shown(probability)} belongs to sampling="poisson"; leave '
            "it out."
        )
    return EachRecordOncePerEpoch(steps_per_epoch)
