"""Tables and schemas of files, for the command line."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING

from tfp_dpvi.data import Categorical, Schema

if TYPE_CHECKING:
    import pandas

_TABLES = (".csv", ".parquet", ".arrow", ".feather")


def read_schema(path: str) -> Schema:
    """Returns the schema of a JSON or YAML file.

    Args:
      path: The file's path, by whose suffix it is read.

    Raises:
      ValueError: The file is neither, or describes no columns.
    """
    text = pathlib.Path(path).read_text(encoding="utf-8")
    suffix = pathlib.Path(path).suffix.lower()
    if suffix == ".json":
        return Schema.from_json(text)
    if suffix in (".yaml", ".yml"):
        return Schema.from_yaml(text)
    raise ValueError(f"--schema {path!r} is no .json, .yaml or .yml file.")


def read_table(path: str, schema: Schema) -> pandas.DataFrame:
    """Returns the private records of a CSV, Parquet or Arrow file.

    Of a CSV file, columns whose categories are texts are read as texts, so that a ward "007" stays
    one.

    Args:
      path: The file's path, by whose suffix it is read.
      schema: The public description of its columns.

    Raises:
      ValueError: The file is of another kind, or cannot be read.
      FileNotFoundError: There is no such file.
    """
    suffix = pathlib.Path(path).suffix.lower()
    if suffix not in _TABLES:
        raise ValueError(f"data {path!r} is no {', '.join(_TABLES)} file: convert it to one.")
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"data {path!r} is no file.")
    import pandas

    texts = {
        name: str
        for name, column in schema.columns.items()
        if isinstance(column, Categorical)
        and any(isinstance(category, str) for category in column.categories)
    }
    try:
        if suffix == ".csv":
            return pandas.read_csv(path, dtype=texts)
        return pandas.read_parquet(path) if suffix == ".parquet" else pandas.read_feather(path)
    except ImportError:
        raise ValueError(f"data {path!r} needs pyarrow: pip install pyarrow.") from None
    except Exception as error:  # The library's sentence may quote a record.
        raise ValueError(
            f"data {path!r} cannot be read as a table ({type(error).__name__})."
        ) from None


def write_table(table: pandas.DataFrame, path: pathlib.Path) -> None:
    """Writes released records as CSV or Parquet.

    Args:
      table: The records.
      path: The file's path, by whose suffix it is written.
    """
    if path.suffix == ".parquet":
        table.to_parquet(path, index=False)
    else:
        table.to_csv(path, index=False)
