"""The records of a fit, checked before anything is spent."""

from tfp_dpvi.data.dataset import DatasetData
from tfp_dpvi.data.records import ArrayData, Data, Records, by_column, make_records
from tfp_dpvi.data.streaming import RecordSource, RowBatches, StreamedData, wants_stream

__all__ = [
    "ArrayData",
    "Data",
    "DatasetData",
    "RecordSource",
    "Records",
    "RowBatches",
    "StreamedData",
    "by_column",
    "make_records",
    "wants_stream",
]
