"""The records of a fit, checked before anything is spent, and the public schema of columns."""

from typing import Any

from tfp_dpvi import _deprecation
from tfp_dpvi.data.columns import MISSING, Binary, Categorical, Column, Continuous, Integer
from tfp_dpvi.data.dataset import DatasetData
from tfp_dpvi.data.dates import Date
from tfp_dpvi.data.records import ArrayData, Data, Records, make_records
from tfp_dpvi.data.schema import Layout, Schema
from tfp_dpvi.data.streaming import RecordSource, StreamedData

__all__ = [
    "MISSING",
    "ArrayData",
    "Binary",
    "Categorical",
    "Column",
    "Continuous",
    "Data",
    "DatasetData",
    "Date",
    "Integer",
    "Layout",
    "RecordSource",
    "Records",
    "Schema",
    "StreamedData",
    "make_records",
]


def __getattr__(name: str) -> Any:
    return _deprecation.renamed(__name__, name)
