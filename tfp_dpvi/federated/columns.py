"""The columns that hospitals of a study share: their order, bounds and units."""

from __future__ import annotations

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure
from tfp_dpvi.data import Binary, Continuous, Integer, Schema, frames
from tfp_dpvi.data.columns import Numeric

Rows = tuple[np.ndarray, np.ndarray | None]
_EXAMPLES = 4


class Columns:
    """Turns a hospital's table into the arrays of a study, and checks it against a schema.

    Args:
      schema: The columns, in the order in which the likelihood gets them.
      outcome: Name of the column that is y; None for whole records.

    Raises:
      TypeError, ValueError: A column is neither a number nor binary, or the outcome is none of
        them.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.data import Binary, Continuous, Schema
    >>> schema = Schema({"height": Continuous(0.4, 2.5, bins=4), "smokes": Binary()})
    >>> columns = Columns(schema, "smokes")
    >>> x, y = columns.arrays({"smokes": np.array([1, 0]), "height": np.array([1.8, 1.6])}, None)
    >>> x.shape, y.tolist()
    ((2, 1), [1, 0])
    >>> try:
    ...     columns.arrays({"smokes": np.array([1]), "height": np.array([180.0])}, None)
    ... except ValueError as error:
    ...     print(error)
    x has values of 'height' outside its public bounds, 0.4 to 2.5: are they in other units?
    Convert them, or set values outside to the bounds.

    ```
    """

    def __init__(self, schema: Schema, outcome: str | None) -> None:
        if not isinstance(schema, Schema):
            raise TypeError(
                f"schema={check.shown(schema)} is no Schema; pass data.Schema({{...}})."
            )
        for name, column in schema.columns.items():
            if not isinstance(column, Continuous | Integer | Binary):
                raise ValueError(
                    f"schema: column {name!r} is a {type(column).__name__}; code it as Binary "
                    "columns, one for each level but the first."
                )
        if outcome is not None:
            check.one_of("outcome", outcome, schema.names)
        self.schema, self.outcome = schema, outcome
        self.outside = "refuse"
        self.inputs = tuple(name for name in schema.names if name != outcome)

    def arrays(self, x: Structure, y: Structure | None) -> Rows:
        """Returns x [n, columns] and y [n] of a hospital's records.

        Args:
          x: A table with exactly these columns in any order, the outcome's among them unless y is
            given; or an array of the inputs in the schema's order.
          y: The outcomes; None if they are a column of x.

        Raises:
          ValueError: A column is missing or unknown, or has values outside its bounds. The error
            shows none of them.
        """
        if isinstance(x, dict) or frames.container_of(x) is not None:
            part = self.schema if y is None else self.schema.part(self.inputs)
            part.check_names(x)
            arrays = part.arrays(x)
        else:
            array = np.asarray(x)
            if array.ndim != 2 or array.shape[1] != len(self.inputs):
                raise ValueError(
                    f"x has shape {array.shape}, and the study's schema {len(self.inputs)} inputs: "
                    f"pass a table with the columns {', '.join(self.inputs)}."
                )
            arrays = {name: array[:, place] for place, name in enumerate(self.inputs)}
        if y is not None and self.outcome is not None:
            arrays[self.outcome] = np.asarray(y)
        if self.outcome is not None and self.outcome not in arrays:
            raise ValueError(f"y is missing: pass it, or a table with the column {self.outcome!r}.")
        numbers = {name: self._checked(name, values) for name, values in arrays.items()}
        inputs = np.stack([numbers[name] for name in self.inputs], axis=1)
        return inputs, None if self.outcome is None else numbers[self.outcome]

    def _checked(self, name: str, values: np.ndarray) -> np.ndarray:
        """Returns a column as numbers within its bounds; a missing value stays one."""
        column = self.schema.columns[name]
        try:
            numbers = np.asarray(values).astype(np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"x: column {name!r} has values that are no numbers.") from None
        low, high = (column.lower, column.upper) if isinstance(column, Numeric) else (0.0, 1.0)
        within = np.isnan(numbers) | ((numbers >= low) & (numbers <= high))
        if not within.all():
            raise ValueError(
                f"x has values of {name!r} outside its public bounds, {low:g} to {high:g}: are "
                "they in other units?\nConvert them, or set values outside to the bounds."
            )
        whole = isinstance(column, Binary | Integer)
        if whole and (numbers[~np.isnan(numbers)] % 1.0).any():
            raise ValueError(f"x has values of {name!r} that are not whole numbers, as it is.")
        is_outcome = name == self.outcome and whole and not np.isnan(numbers).any()
        return numbers.astype(np.int32 if is_outcome else np.float32)

    def public_inputs(self, num: int) -> np.ndarray:
        """Returns invented inputs of the columns' centres and spreads, float32 [num, columns].

        Args:
          num: The number of rows.
        """
        generator = np.random.default_rng(0)
        inputs: list[np.ndarray] = []
        for name in self.inputs:
            column = self.schema.columns[name]
            values = generator.normal(size=num)
            if isinstance(column, Numeric):
                values = column.location + column.deviation * values
                inputs.append(np.clip(values, column.lower, column.upper))
            else:
                inputs.append(values > 0.0)
        return np.stack(inputs, axis=1).astype(np.float32)

    def example(self) -> Rows:
        """Returns invented records: the same on every machine."""
        numbers = {}
        for place, (name, column) in enumerate(self.schema.columns.items()):
            wave = np.cos(1.0 + place + 2.0 * np.arange(_EXAMPLES))
            if not isinstance(column, Numeric):
                numbers[name] = (wave > 0.0).astype(np.float64)
                continue
            values = np.clip(column.location + wave * column.deviation, column.lower, column.upper)
            numbers[name] = np.round(values) if isinstance(column, Integer) else values
        x, y = {name: numbers[name] for name in self.inputs}, None
        if self.outcome is not None:
            y = numbers[self.outcome]
        return self.arrays(x, y)
