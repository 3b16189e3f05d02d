"""Records as checked structures of arrays, one record per row."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import Keystream
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.data import frames
from tfp_dpvi.data.units import Units
from tfp_dpvi.privacy import PersonUnit
from tfp_dpvi.sampling import Sampler

Calls = Iterator[tuple[int, Sampler, dict[str, tf.Tensor]]]
"""`(number of steps, sampler, tensors)` of each call of the compiled loop."""


Key: TypeAlias = tf.Tensor | Keystream
"""A fit's key: int64 tensor of shape [2], or the key that expands to the words of its steps."""

# Pairs of a person's rows by which outcomes are found among inputs, and entries that are compared.
_LEAST_PAIRS = 30
_MOST_PAIRS = 10_000
_MOST_ENTRIES = 4_000_000
# Of these pairs, how many must have another outcome than most have.
_LEAST_OTHERS = 5

# Correlations of a monotone function of outcomes, and of a linear one in float32.
_ALIKE = 0.5
_EQUAL = 1.0 - 1e-6

# Far below it, and above its inverse, weights over the largest one are no numbers in float32.
_LEAST_MAX_WEIGHT = 1e-30


@dataclasses.dataclass(frozen=True)
class Records:
    """Arrays with a common first dimension, which runs over records.

    ```python
    >>> records = make_records(
    ...     np.zeros([3, 2]), None, None, dtype=np.dtype("float32"), validate=True
    ... )
    >>> records
    Records(num=3)
    >>> records.tensors()["x"].dtype
    tf.float32
    >>> cities = {"city": np.array(["Oslo", "Rome"])}
    >>> make_records(
    ...     cities, None, None, dtype=np.dtype("float32"), validate=True, texts=True
    ... ).tensors()["x"]["city"].dtype
    tf.string

    ```

    Attributes:
      x: An array, or a dict or tuple of arrays; float arrays have the model's dtype.
      y: As `x`, or None.
      sample_weight: Float [num], or None.
      num: The number of records.
      units: Which rows are whose, if a record is a person with several rows; else None.
      max_weight: The public largest weight, if one is declared; else None.
    """

    x: Structure = dataclasses.field(repr=False)
    y: Structure | None = dataclasses.field(repr=False)
    sample_weight: np.ndarray | None = dataclasses.field(repr=False)
    num: int
    units: Units | None = dataclasses.field(default=None, repr=False)
    max_weight: float | None = dataclasses.field(default=None, repr=False)

    @property
    def person(self) -> PersonUnit | None:
        """The public facts of a person, if a record is one; else None."""
        return None if self.units is None else self.units.person

    def by_person(self, units: Units) -> Records:
        """Returns records of persons, with an x of `Units.group_inputs` and a y of shape [n, m].

        Args:
          units: Which of these rows are whose.

        Raises:
          ValueError: Rows of a person have unlike weights, or rows have weights without a largest
            one, or several outcomes.
        """
        weight = self.sample_weight
        weight = None if weight is None else self._weights_of_units(weight, units)
        if self.y is not None and tf.nest.is_nested(self.y):
            raise ValueError("unit_ids: y must be one array; stack outcomes into shape [N, k].")
        x = units.group_inputs(self.x)
        y = None if self.y is None else units.group_array(self.y)
        return Records(x, y, weight, len(units.places), units, self.max_weight)

    def refuse_earlier_outcomes(self, units: Units) -> None:
        """Raises if a column of x is the outcome of another row of the same person.

        Twins are drawn given all of x, which then shows the records' own outcomes: estimates would
        be wrong, in silence. It is the curator's check of the values, outside the guarantee, and
        sees what is a function of the row before or after, in the order of the rows. Where outcomes
        do not change within a person, that is a function of the row's own one, and said to be it.

        Args:
          units: Which of these rows are whose.

        Raises:
          ValueError: There is such a column.
        """
        if self.y is None or tf.nest.is_nested(self.y):
            return
        outcomes = np.asarray(self.y).reshape([self.num, -1])
        for name, part in _named("x", self.x):
            if part.dtype.kind not in "biuf":
                continue
            columns = part.reshape([self.num, -1])
            num = max(_LEAST_PAIRS, min(_MOST_PAIRS, _MOST_ENTRIES // max(columns.shape[1], 1)))
            later = np.flatnonzero(units.before >= 0)[:num]
            earlier = units.before[later]
            for rows, others in ((later, earlier), (earlier, later)):
                found = _first_function(columns[rows], outcomes[others])
                if found is not None:
                    which = name if part.ndim == 1 else f"{name}[:, {found}]"
                    # Both are the same where outcomes do not change within a person.
                    if _first_function(columns[rows, found][:, None], outcomes[rows]) is not None:
                        raise ValueError(
                            f"{which} is the outcome itself, or a function of it: nothing would be "
                            "left to estimate.\nLeave it out."
                        )
                    raise ValueError(
                        f"{which} is the outcome of the person's row before or after, which is "
                        "drawn with the others: estimates would be wrong.\nLeave it out, or "
                        "compile a DPVI(..., clipping='flat') with an optimizer, which draws none."
                    )

    def _weights_of_units(self, weight: np.ndarray, units: Units) -> np.ndarray:
        """Returns the weight of each person, shape [n], that of all its rows."""
        if self.max_weight is None:
            raise ValueError(
                "sample_weight with unit_ids: a weight of single rows has no meaning for a person. "
                "Leave one of them out, or pass max_weight for weights of persons."
            )
        weights: np.ndarray = weight[units.places]
        if (weights != weights[:, :1]).any():
            raise ValueError(
                "weights differ between rows of one person: a person, household or cluster has "
                "one. Give all of its rows the same."
            )
        first: np.ndarray = weights[:, 0]
        return first

    def arrays(self) -> list[np.ndarray]:
        """Returns all arrays, one after another."""
        return [
            part
            for part in tf.nest.flatten((self.x, self.y, self.sample_weight))
            if part is not None
        ]

    def tensors(self) -> dict[str, tf.Tensor]:
        """Returns tensors under the keys "x", "y" and "sample_weight".

        A missing part has no key. Persons have the public number of places: rounding of a norm
        depends on it, and with the longest one's a person would change those of all others.
        """
        parts = {"x": self.x, "y": self.y, "sample_weight": self.sample_weight}
        present = {key: part for key, part in parts.items() if part is not None}
        return tf.nest.map_structure(tf.convert_to_tensor, present)


class Data(Protocol):
    """The records of a fit: in memory, streamed, or batches of a dataset.

    ```python
    >>> from tfp_dpvi.sampling import FullBatchSampler
    >>> def total_steps(data: Data) -> int:
    ...     calls = data.calls(3, tf.zeros([2], tf.int64), first=0, compiled=False)
    ...     return sum(steps for steps, _, _ in calls)
    >>> records = make_records(
    ...     np.zeros([8, 2]), None, None, dtype=np.dtype("float32"), validate=True
    ... )
    >>> total_steps(ArrayData(records, FullBatchSampler(8), 8, 8.0, 1))
    3

    ```

    Attributes:
      sampler: Selects each step's records inside the step; the accounting uses its scheme.
      tensors: Tensors of the shapes that the step is traced with.
      records: The records; if they are streamed, one zero record of their shapes.
      num_records: The public N.
      batch_size: The expected number of records of a step, the public denominator qN.
      steps_per_epoch: The public number of steps of an epoch.
      resumable: True if an interrupted fit may draw from the same records again.
    """

    sampler: Sampler
    tensors: dict[str, tf.Tensor]
    records: Records
    num_records: int
    batch_size: float
    steps_per_epoch: int
    resumable: bool

    def calls(self, steps: int, key: Key, first: int, compiled: bool) -> Calls:
        """Yields one call of the compiled loop after another.

        Args:
          steps: The number of steps that the calls take together.
          key: The fit's key.
          first: The number of the first step.
          compiled: True if XLA compiles the loop: TensorFlow's generators then give other numbers.
        """


@dataclasses.dataclass
class ArrayData:
    """Records in the device's memory; the sampler inside the step draws from them. See `Data`.

    ```python
    >>> from tfp_dpvi.sampling import PoissonSampler
    >>> records = make_records(
    ...     np.zeros([8, 2]), None, None, dtype=np.dtype("float32"), validate=True
    ... )
    >>> data = ArrayData(records, PoissonSampler(8, 0.5, 8), 8, 4.0, 2)
    >>> data.tensors["x"].shape
    TensorShape([8, 2])

    ```
    """

    records: Records
    sampler: Sampler
    num_records: int
    batch_size: float
    steps_per_epoch: int
    resumable = True

    def __post_init__(self) -> None:
        self.tensors = self.records.tensors()

    def calls(self, steps: int, key: Key, first: int, compiled: bool) -> Calls:
        """See `Data`. All steps are one call."""
        del key, first, compiled
        yield steps, self.sampler, self.tensors


# By an attribute that they alone have: what NumPy would read as something else.
_UNREADABLE = (
    (
        "tocsr",
        "a scipy sparse matrix, and a step needs dense rows: pass {0}.toarray(). If that does not "
        "fit in memory,\npass an object with __len__ whose source[indices] returns dense rows "
        "(x[indices].toarray()).",
    ),
    (
        "harden_mask",
        "a masked array, whose mask would be lost: pass {0}.filled(0.0), and the mask beside it.",
    ),
    ("dense_shape", "a SparseTensor, and a step needs dense rows: pass tf.sparse.to_dense({0})."),
    (
        "row_splits",
        "a RaggedTensor, and rows need one shape: pass {0}.to_tensor(), and the lengths beside it.",
    ),
)


def make_records(
    x: Structure,
    y: Structure | None,
    sample_weight: np.ndarray | None,
    *,
    dtype: np.dtype,
    validate: bool,
    max_weight: float | None = None,
    texts: bool = False,
) -> Records:
    """Returns the arguments of `fit`, checked and converted.

    Args:
      x: An array, a dict or tuple of arrays, or a table with named columns (treated as a dict of
        them), one record per row.
      y: As `x`, or None.
      sample_weight: Numbers of shape [N], or None.
      dtype: The float type to which float arrays are cast. Integer arrays and bool columns are
        kept.
      validate: True refuses NaN and Inf: the curator's check of the values, outside the guarantee.
      max_weight: The public largest weight, or None.
      texts: Whether x may have texts, for layers that look them up.

    Raises:
      TypeError: A type has no rows to sample (a generator, a `tf.data.Dataset`), or its dtype is
        not numeric.
      ValueError: Lengths differ, there are no records, values are not finite, or a weight is
        negative or above the largest one.
    """
    x = _arrays("x", x, dtype, validate, texts=texts)
    y = None if y is None else _arrays("y", y, dtype, validate)
    num = common_length({"x": x} if y is None else {"x": x, "y": y})
    max_weight = check_max_weight(max_weight, sample_weight)
    if sample_weight is not None:
        sample_weight = _arrays("sample_weight", sample_weight, dtype, validate=False)
        sample_weight = check_weights(sample_weight, num).astype(dtype)
        if validate:
            refuse_weights(sample_weight, max_weight)
    return Records(x, y, sample_weight, num, max_weight=max_weight)


def check_max_weight(max_weight: float | None, sample_weight: Any) -> float | None:
    """Returns the largest weight, a positive number, or None.

    Args:
      max_weight: The argument.
      sample_weight: The weights, or None.

    Raises:
      TypeError, ValueError: It is no such number, or there are no weights.
    """
    if max_weight is None:
        return None
    if sample_weight is None:
        raise ValueError(
            f"max_weight={check.shown(max_weight)} without sample_weight: pass the weight of each "
            "record, or leave it out."
        )
    most = check.positive("max_weight", max_weight)
    if not _LEAST_MAX_WEIGHT <= most <= 1.0 / _LEAST_MAX_WEIGHT:
        raise ValueError(
            f"max_weight={check.shown(max_weight)} is beyond what float32 can divide by: give all "
            "weights in another unit, which changes no estimate."
        )
    return most


def refuse_weights(
    weights: np.ndarray, max_weight: float | None, name: str = "sample_weight"
) -> None:
    """Raises for weights that no record can have: the curator's check, outside the guarantee.

    Args:
      weights: Float [n].
      max_weight: The public largest weight, or None.
      name: The argument, for messages.

    Raises:
      ValueError: A weight is not finite, negative or above the largest one; or all are 0, where
        there is a largest one.
    """
    if not (finite := np.isfinite(weights)).all():
        raise ValueError(
            f"{name} has NaN or infinite entries in {check.rows(~finite)}: fill them, or leave "
            "these records out by a public rule."
        )
    if (negative := weights < 0.0).any():
        raise ValueError(
            f"{name} has negative entries in {check.rows(negative)}: weights must be >= 0."
        )
    if (above := weights > weights.dtype.type(max_weight or np.inf)).any():
        raise ValueError(
            f"{name} is above max_weight={max_weight:g} in {check.rows(above)}: declare a larger "
            "max_weight, or trim the weights by a public rule."
        )
    if max_weight is not None and not weights.any():
        raise ValueError(f"{name} is 0 for all records: no record would count.")


def several_inputs(x: Any, y: Any) -> Any:
    """Returns a list of arrays, Keras's way to pass several inputs, as a tuple of them.

    A list of rows is returned unchanged, and so is anything else.

    Args:
      x: The records.
      y: Their outcomes, whose number tells inputs from rows; None without them.

    Raises:
      ValueError: The list may be either.
    """
    if (
        not (isinstance(x, list) and x and hasattr(y, "__len__"))
        or not all(getattr(part, "shape", None) for part in x)
        or any(part.shape[0] != len(y) for part in x)
    ):
        return x
    if len(x) == len(y):
        raise ValueError(
            f"x is a list of {len(x)} arrays with {len(x)} rows each: pass a tuple of inputs, "
            "tuple(x), or an array of records, np.stack(x)."
        )
    return tuple(x)


def by_column(name: str, value: Any, texts: bool = False) -> Any:
    """Converts frames to dicts of their columns, and columns of frames to arrays.

    A frame of pandas, polars or Arrow, an HDF5 group and the like are tables; other values are
    returned unchanged.

    Args:
      name: The argument, for messages.
      value: The table, or a structure of tables, columns and arrays.
      texts: Whether columns may have texts.

    Raises:
      TypeError: The value is a sparse matrix or a lazy frame, or a column has no numbers.
      ValueError: The names of the columns are no strings, or not unique.
    """
    for attribute, words in _UNREADABLE:
        if hasattr(value, attribute):
            raise TypeError(f"{name} is {words.format(name)}")
    if isinstance(value, Mapping):
        return {key: by_column(f"{name}[{key!r}]", part, texts) for key, part in value.items()}
    if type(value) is tuple:
        return tuple(by_column(f"{name}[{place}]", part, texts) for place, part in enumerate(value))
    if (column := frames.as_series(value)) is not None:
        return frames.array_of(name, column, texts)
    if frames.container_of(value) is None:
        return value
    names = frames.names_of(value)
    if not all(isinstance(column, str) for column in names) or len(set(names)) < len(names):
        raise ValueError(
            f"{name} is a table whose columns do not all have unique strings as names: rename "
            f"them, or pass {name}.to_numpy()."
        )
    columns = frames.columns_of(value).items()
    return {key: frames.array_of(f"{name}[{key!r}]", column, texts) for key, column in columns}


def _arrays(
    name: str,
    value: Any,
    dtype: Any,
    validate: bool,
    column: bool = False,
    texts: bool = False,
) -> Any:
    value = by_column(name, value, texts)
    if isinstance(value, dict | tuple):
        if not value:
            raise ValueError(f"{name} is an empty {type(value).__name__}: pass at least one array.")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        arrays = {
            key: _arrays(f"{name}[{key!r}]", part, dtype, validate, isinstance(value, dict), texts)
            for key, part in items
        }
        return arrays if isinstance(value, dict) else tuple(arrays.values())
    try:
        array = np.asarray(value)
    except ValueError:
        # Its entries have several lengths.
        raise ValueError(
            f"{name} is a list with entries of different lengths: pass one array, or a tuple or "
            "dict of arrays."
        ) from None
    if array.dtype.kind in "USO" and array.ndim and _are_texts(array):
        if texts:
            return array.astype(str).astype(object)
        raise TypeError(
            f"{name} has texts (dtype {check.dtype_name(array.dtype)}), which are not numeric: "
            "code categories as integers. (x of a DPKerasModel may have texts, if its network "
            "begins with a StringLookup, Hashing or TextVectorization.)"
        )
    if array.dtype.kind == "O" and any(isinstance(entry, str | bytes) for entry in array.flat):
        raise TypeError(
            f"{name} has texts beside other values, such as None (dtype object): fill missing "
            "texts, for instance with '', or code all values as numbers."
        )
    if array.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} has dtype {check.dtype_name(array.dtype)}, which is not numeric: use "
            f"{name}.astype('float32'), or code "
            "categories as integers."
        )
    if array.ndim == 0:
        raise ValueError(
            f"{name} is a scalar: it needs a first dimension with one entry for each record."
        )
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):
            array = array.astype(dtype, copy=False)
        if validate and not (finite := np.isfinite(array)).all():
            raise ValueError(
                f"{name} has values that are NaN or infinite in {np.dtype(dtype).name}, in "
                f"{check.rows(~finite)}: impute, mask "
                "or rescale them; with fit(validate=False)\nsuch records contribute nothing. (This "
                "check looks at the data and is outside the guarantee.)"
            )
    elif array.dtype.kind == "b" and not column:
        array = array.astype(dtype)
    return array


def _are_texts(array: np.ndarray) -> bool:
    """Returns whether all entries are texts."""
    return array.dtype.kind in "US" or all(isinstance(entry, str | bytes) for entry in array.flat)


def check_weights(sample_weight: Any, num: int, name: str = "sample_weight") -> np.ndarray:
    """Returns the weights as an array.

    Args:
      sample_weight: The weights.
      num: The number of records.
      name: The argument, for messages.

    Raises:
      TypeError: The weights are not numeric.
      ValueError: There is not one weight for each record.
    """
    if np.shape(sample_weight) != (num,):
        raise ValueError(
            f"{name} must be one array of shape [{num}], one weight for each record, got shape "
            f"{np.shape(sample_weight)}."
        )
    weights = np.asarray(sample_weight)
    if weights.dtype.kind not in "biuf":
        raise TypeError(
            f"{name} has dtype {check.dtype_name(weights.dtype)}, which is not numeric: pass "
            "numbers."
        )
    return weights


def common_length(parts: dict[str, Any]) -> int:
    """Returns the length of all parts of records.

    Raises:
      ValueError: Lengths differ, or the parts are empty.
    """
    lengths: dict[str, int] = {}
    for name, structure in parts.items():
        for path, array in _named(name, structure):
            lengths[path] = len(array) if hasattr(array, "__len__") else array.shape[0]
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{path} has {length}" for path, length in lengths.items())
        raise ValueError(f"Lengths differ: {listed}. Every array needs one row for each record.")
    num = next(iter(lengths.values()))
    if num == 0:
        raise ValueError("x holds no records: pass at least one.")
    return num


def _first_function(columns: np.ndarray, outcomes: np.ndarray) -> int | None:
    """Returns the first column that is a linear or monotone function of an outcome, or None."""
    for outcome in outcomes.T.astype(np.float64):
        ranks, counts = np.unique(outcome, return_inverse=True, return_counts=True)[1:]
        if len(outcome) < _LEAST_PAIRS or len(outcome) - counts.max() < _LEAST_OTHERS:
            continue
        away = columns - columns.mean(axis=0, dtype=np.float64)
        sizes = np.linalg.norm(away, axis=0) * np.linalg.norm(outcome - outcome.mean())
        likeness = np.abs((outcome - outcome.mean()) @ away) / np.where(sizes > 0.0, sizes, np.inf)
        for place in np.flatnonzero(likeness > _ALIKE):
            other = np.unique(columns[:, place], return_inverse=True)[1]
            same = (other == ranks).all() or (other == ranks.max() - ranks).all()
            if likeness[place] > _EQUAL or same:
                return int(place)
    return None


def _named(name: str, structure: Any) -> list[tuple[str, Any]]:
    if not isinstance(structure, dict | tuple):
        return [(name, structure)]
    items = structure.items() if isinstance(structure, dict) else enumerate(structure)
    return [item for key, part in items for item in _named(f"{name}[{key!r}]", part)]
