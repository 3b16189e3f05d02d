"""The records of a fit, checked before anything is spent, and the public schema of columns.

Read the files in this order. Each imports from those before it only.

* `frames` alone knows pandas, polars and Arrow. `columns` and `dates` say what is public about a
  column, `describe` as plain values; `schema` is of a whole data set.
* `units` groups rows by person; `records` are checked arrays in memory, and `shapes` has stand-ins
  for them.
* `dataset` has batches of a declared sampling; `files` are larger than memory; `streaming` reads
  rows as steps draw them.
"""

from tfp_dpvi import _deprecation
from tfp_dpvi.data.columns import MISSING, Binary, Categorical, Column, Continuous, Integer
from tfp_dpvi.data.dataset import DatasetData
from tfp_dpvi.data.dates import Date
from tfp_dpvi.data.files import HDF5, Copied, FileRecords, Parquet
from tfp_dpvi.data.records import ArrayData, Data, Records, make_records
from tfp_dpvi.data.schema import Layout, Schema
from tfp_dpvi.data.streaming import RecordSource, StreamedData
from tfp_dpvi.data.units import UnitRows, Units, make_units

__all__ = [
    "HDF5",
    "MISSING",
    "ArrayData",
    "Binary",
    "Categorical",
    "Column",
    "Continuous",
    "Copied",
    "Data",
    "DatasetData",
    "Date",
    "FileRecords",
    "Integer",
    "Layout",
    "Parquet",
    "RecordSource",
    "Records",
    "Schema",
    "StreamedData",
    "UnitRows",
    "Units",
    "make_records",
    "make_units",
]

__getattr__ = _deprecation.old_names(__name__)
