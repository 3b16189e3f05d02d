"""Design matrices in which a record's row is a function of that record and the schema alone."""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data import Schema
from tfp_dpvi.data.columns import Binary, Categorical, Column, Numeric

# Records that stand for the schema: transforms take their parameters from these, not from the data.
_NUM_REFERENCE = 2048
_NUM_CHECKED = 3
# Functions of one record's value, and formulae's transforms, whose parameters are the reference's.
_MATHS = [
    "abs",
    "cos",
    "exp",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "sin",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "maximum",
    "minimum",
    "where",
]
_TRANSFORMS = [
    "B",
    "C",
    "I",
    "S",
    "T",
    "binary",
    "bs",
    "center",
    "cr",
    "offset",
    "poly",
    "scale",
    "standardize",
]
_CALL = re.compile(r"([A-Za-z_][\w.]*)\s*\(")


@dataclasses.dataclass(frozen=True)
class GroupEffect:
    """Effects of the levels of a column, as `(1 | county)` or `(age | county)`.

    ```python
    >>> GroupEffect("1|county", "county", ("A", "B"), 1.0).name
    '1|county'

    ```

    Attributes:
      name: The term.
      column: The column whose levels have effects.
      levels: Its levels, from the schema.
      scale: The scale of what the effects multiply: 1 for an intercept.
    """

    name: str
    column: str
    levels: tuple[str, ...]
    scale: float


class Design:
    """A formula with a schema: what the model reads of a record.

    Every transform takes its parameters (means, knots, levels) from records that the schema
    simulates, so that a record's row depends on no other record.

    ```python
    >>> from tfp_dpvi.data import Binary, Integer, Schema
    >>> schema = Schema({"visits": Integer(0, 99), "age": Integer(17, 90), "smokes": Binary()})
    >>> Design("visits ~ age + smokes", schema).labels
    ('age', 'smokes')

    ```

    Args:
      formula: A formula as Bambi reads it, for instance "visits ~ age + sex + (1 | county)".
      schema: The public description of all its columns.

    Raises:
      ValueError: The formula is none, names a column that is not in the schema, or has a function
        that may read several records.

    Attributes:
      formula: The formula.
      outcome: The outcome's column.
      schema: The descriptions of the formula's columns.
      labels: The names of the coefficients, without the intercept.
      has_intercept: Whether there is an intercept.
      groups: The effects of groups.
      location: Public typical values of the design's columns, shape [p]; 0 for indicators.
      scale: Public typical distances from them, shape [p]; 1 for indicators.
    """

    def __init__(self, formula: str, schema: Schema) -> None:
        self.formula = formula
        _check_functions(formula)
        formulae = _formulae()
        try:
            description = formulae.model_description(formula)
        except Exception as error:
            raise ValueError(
                f"formula={check.shown(formula)} cannot be read: {_first_line(error)}"
            ) from error
        if description.response is None:
            raise ValueError(
                f"formula={check.shown(formula)} has no outcome: write it before ~, as in y ~ x."
            )
        names = sorted(description.var_names)
        if unknown := [name for name in names if name not in schema.columns]:
            raise ValueError(
                f"formula: {', '.join(map(repr, unknown))} is not in the schema: describe it, or "
                "leave it out."
            )
        self.outcome = description.response.term.name
        if self.outcome not in schema.columns:
            raise ValueError(
                f"formula: the outcome {self.outcome!r} must be a column: transform it in the data "
                "and describe it so in the schema."
            )
        self.schema = Schema({name: schema.columns[name] for name in names})
        for name, column in self.schema.columns.items():
            _check_column(name, column.description, is_outcome=name == self.outcome)
        self._inputs = Schema(
            {name: self.schema.columns[name] for name in names if name != self.outcome}
            or {self.outcome: self.schema.columns[self.outcome]}
        )
        reference = self._frame(self._reference(), self.schema)
        space = {name: getattr(np, name) for name in _MATHS}
        right = formula.split("~", 1)[1]
        try:
            self._matrices = formulae.design_matrices(
                right, reference, na_action="error", extra_namespace=space
            )
        except Exception as error:
            raise ValueError(
                f"formula={check.shown(formula)} cannot be evaluated: {_first_line(error)}"
            ) from error
        self._terms = self._common_terms()
        self.has_intercept = self._has_intercept()
        self.labels = self._labels()
        self.groups = self._groups()
        matrix = self._matrix(reference)
        is_indicator = np.all((matrix == 0.0) | (matrix == 1.0), axis=0)
        spread = matrix.std(axis=0)
        shift = np.where(is_indicator | (not self.has_intercept), 0.0, matrix.mean(axis=0))
        self.location = shift
        self.scale = np.where(is_indicator | (spread == 0.0), 1.0, spread)
        self._check_rows()

    # ------------------------------------------------------------------ records

    def inputs(self, data: Any) -> dict[str, np.ndarray]:
        """Returns what the model reads of records, in public units.

        Args:
          data: A frame of pandas, polars or Arrow, or a dict of arrays, with the formula's columns.

        Returns:
          "x", float32 of shape [n, p], standardised by `location` and `scale`; "offset" of shape
          [n]; and for each of `groups` its levels' numbers and the values that effects multiply.

        Raises:
          ValueError: A column is absent, or has a value that its description does not allow.
        """
        return self._inputs_of(self._frame(data, self._inputs))

    def outcomes(self, data: Any) -> np.ndarray:
        """Returns the outcomes as numbers: levels of a categorical one, float32 of shape [n].

        Args:
          data: As for `inputs`.
        """
        column = Schema({self.outcome: self.schema.columns[self.outcome]})
        values = self._frame(data, column)[self.outcome]
        if hasattr(values, "cat"):
            values = values.cat.codes
        return values.to_numpy().astype(np.float32)

    def public_inputs(self) -> dict[str, np.ndarray]:
        """Returns `inputs` of records that the schema simulates."""
        return self._inputs_of(self._frame(self._reference(), self._inputs))

    def _reference(self) -> dict[str, np.ndarray]:
        """Returns simulated records, and all levels and bounds among them."""
        records = self.schema.simulate(_NUM_REFERENCE)
        for name, column in self.schema.columns.items():
            extremes = _extremes(column.description)
            records[name][: len(extremes)] = extremes
        return records

    def _frame(self, data: Any, schema: Schema) -> Any:
        """Returns the columns of a schema as a pandas frame: numbers as float64, levels as theirs."""
        pandas = importlib.import_module("pandas")
        arrays = {name: _column_of(data, name) for name in schema.names}
        codes = schema.encode(arrays)
        frame = {}
        for place, (name, column) in enumerate(schema.columns.items()):
            described = column.description
            if isinstance(described, Categorical):
                levels = [str(level) for level in described.categories]
                frame[name] = pandas.Categorical.from_codes(codes[:, place], levels)
            elif isinstance(described, Binary):
                frame[name] = codes[:, place].astype(np.float64)
            else:
                frame[name] = np.asarray(arrays[name], np.float64)
        return pandas.DataFrame(frame)

    def _inputs_of(self, frame: Any) -> dict[str, np.ndarray]:
        matrix = (self._matrix(frame) - self.location) / self.scale
        if not np.isfinite(matrix).all():
            raise ValueError(
                f"formula={check.shown(self.formula)} gives values that are not finite: bounds of "
                "the schema must be within the domain of its functions."
            )
        inputs = {"x": matrix.astype(np.float32)}
        offset = self._offset(frame)
        if offset is not None:
            inputs["offset"] = offset.astype(np.float32)
        for number, group in enumerate(self.groups):
            inputs[f"level_{number}"] = frame[group.column].cat.codes.to_numpy().astype(np.int32)
            inputs[f"times_{number}"] = self._times(number, frame)
        return inputs

    # ------------------------------------------------------------------ parts of the formula

    def _common_terms(self) -> list[Any]:
        common = self._matrices.common
        return [] if common is None else list(common.terms.values())

    def _has_intercept(self) -> bool:
        return any(term.kind == "intercept" for term in self._terms)

    def _slopes(self) -> list[Any]:
        return [term for term in self._terms if term.kind not in ("intercept", "offset")]

    def _labels(self) -> tuple[str, ...]:
        return tuple(label for term in self._slopes() for label in term.labels)

    def _matrix(self, frame: Any) -> np.ndarray:
        """Returns the design's columns, float64 of shape [n, p], without the intercept."""
        columns = [np.zeros([len(frame), 0])]
        for term in self._slopes():
            columns.append(np.asarray(term.eval_new_data(frame), float).reshape(len(frame), -1))
        return np.concatenate(columns, axis=1)

    def _offset(self, frame: Any) -> np.ndarray | None:
        offsets = [term for term in self._terms if term.kind == "offset"]
        if not offsets:
            return None
        parts = [np.asarray(term.eval_new_data(frame), float).reshape(-1) for term in offsets]
        total: np.ndarray = np.sum([np.broadcast_to(part, len(frame)) for part in parts], axis=0)
        return total

    def _groups(self) -> tuple[GroupEffect, ...]:
        group = self._matrices.group
        effects = []
        for name, term in {} if group is None else group.terms.items():
            column = term.factor.name
            described = (
                self.schema.columns[column].description if column in self.schema.columns else None
            )
            if not isinstance(described, Categorical):
                raise ValueError(
                    f"formula: the groups of ({name}) must be a column that is Categorical."
                )
            values = np.asarray(term.expr.data, float).reshape(_NUM_REFERENCE, -1)
            if values.shape[1] != 1:
                raise ValueError(
                    f"formula: ({name}) has several columns: write one numeric column before |."
                )
            scale = 1.0 if np.all(np.isin(values, (0.0, 1.0))) else float(values.std())
            levels = tuple(str(level) for level in described.categories)
            effects.append(GroupEffect(name, column, levels, scale))
        return tuple(effects)

    def _times(self, number: int, frame: Any) -> np.ndarray:
        """Returns what a group's effects multiply, float32 of shape [n]."""
        group = self.groups[number]
        expression = self._matrices.group.terms[group.name].expr
        if group.name.split("|")[0].strip() == "1":
            return np.ones(len(frame), np.float32)
        values = np.asarray(expression.eval_new_data(frame), float).reshape(len(frame))
        return (values / group.scale).astype(np.float32)

    def _check_rows(self) -> None:
        """Checks that single records have the rows that they have in a table."""
        frame = self._frame(self._reference(), self._inputs)
        whole = self._inputs_of(frame)
        for place in range(_NUM_CHECKED):
            row = self._inputs_of(frame.iloc[[-1 - place]].reset_index(drop=True))
            for name, part in row.items():
                if not np.allclose(part[0], whole[name][-1 - place], rtol=1e-5, atol=1e-5):
                    raise ValueError(
                        f"formula={check.shown(self.formula)}: a record's row depends on other "
                        "records: use functions of single values."
                    )


def _formulae() -> Any:
    try:
        return importlib.import_module("formulae")
    except ImportError as error:
        raise ImportError(
            "dpvi.regression needs the package formulae: pip install 'tfp-dpvi[formula]'."
        ) from error


def _check_functions(formula: str) -> None:
    if not isinstance(formula, str) or "~" not in formula:
        raise ValueError(f"formula={check.shown(formula)} must be a text such as 'y ~ x'.")
    allowed = {*_MATHS, *_TRANSFORMS, *(f"np.{name}" for name in _MATHS)}
    for name in _CALL.findall(formula):
        if name not in allowed:
            raise ValueError(
                f"formula: {name}() may read several records: compute the column in the data and "
                f"describe it in the schema, or use one of {', '.join(sorted(_MATHS))}."
            )


def _check_column(name: str, column: Column, is_outcome: bool) -> None:
    if not isinstance(column, Numeric | Categorical | Binary):
        raise ValueError(
            f"schema: {name!r} is {type(column).__name__}, which a formula cannot use: convert it "
            "to a number."
        )
    if column.missing:
        way = "drop such records" if is_outcome else "fill them and add a Binary column"
        raise ValueError(
            f"schema: {name!r} may have missing values: {way}, as a public rule, before the fit."
        )


def _extremes(column: Column) -> Sequence[Any]:
    if isinstance(column, Categorical):
        return column.categories
    if isinstance(column, Numeric):
        return (column.lower, column.upper)
    return (0.0, 1.0)


def _column_of(data: Any, name: str) -> np.ndarray:
    """Returns a column of a frame or a dict."""
    if isinstance(data, Mapping):
        names = list(data)
        column = data.get(name)
    else:
        narwhals = importlib.import_module("narwhals")
        try:
            frame = narwhals.from_native(data, eager_only=True)
        except TypeError:
            raise TypeError(
                "data must be a frame of pandas, polars or Arrow, or a dict of arrays, got "
                f"{type(data).__name__}."
            ) from None
        names = frame.columns
        column = frame[name].to_numpy() if name in names else None
    if column is None:
        raise ValueError(f"data lacks the column {name!r}.")
    return np.asarray(column)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
