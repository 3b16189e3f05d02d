"""Schemas, mixture models and samples of tables with mixed columns.

Read the files in this order. Each imports from those before it only.

* `releases` charges noisy counts and releases them. `tails` has distributions at the ends of
  columns of numbers; `grouping` chooses levels by private histograms.
* `mixture` is a table's prior and likelihood; `pairs` counts pairs of columns, and triples with a
  target, and says how likely noisy counts are.
* `levels` has values of levels, `moments` their means and covariances, `quantiles` their
  distribution function, `estimates` what follows from these without the model.
* `rules` are kept by synthetic records; `reading` takes a table or its parts; `model` is what is
  fitted and saved; `rubin` combines analyses of several synthetic tables.
* `planning` says how much of a fit is noise; `synthesizer` is `tfp_dpvi.Synthesizer`.
"""

from tfp_dpvi import _deprecation
from tfp_dpvi.data.columns import MISSING, Binary, Categorical, Column, Continuous, Integer
from tfp_dpvi.data.dates import Date
from tfp_dpvi.data.schema import Layout, Schema
from tfp_dpvi.synthetic.estimates import Estimate, Estimates
from tfp_dpvi.synthetic.grouping import Grouped, group, histograms
from tfp_dpvi.synthetic.mixture import (
    Segments,
    TableMixture,
    make_likelihood,
    make_prior,
    starting_point,
)
from tfp_dpvi.synthetic.pairs import NoisyPairs, Pairs
from tfp_dpvi.synthetic.planning import TablePlan
from tfp_dpvi.synthetic.rubin import RubinEstimate, rubin
from tfp_dpvi.synthetic.rules import AtMost, Equal, OnlyWhere, Rule
from tfp_dpvi.synthetic.synthesizer import Synthesizer

__all__ = [
    "MISSING",
    "AtMost",
    "Binary",
    "Categorical",
    "Column",
    "Continuous",
    "Date",
    "Equal",
    "Estimate",
    "Estimates",
    "Grouped",
    "Integer",
    "Layout",
    "NoisyPairs",
    "OnlyWhere",
    "Pairs",
    "RubinEstimate",
    "Rule",
    "Schema",
    "Segments",
    "Synthesizer",
    "TableMixture",
    "TablePlan",
    "group",
    "histograms",
    "make_likelihood",
    "make_prior",
    "rubin",
    "starting_point",
]

Table = Schema
"""The name of `Schema` in 0.2, which stays."""

__getattr__ = _deprecation.old_names(__name__)
