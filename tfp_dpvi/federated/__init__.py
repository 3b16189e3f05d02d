"""One posterior of several hospitals that keep their records, by partitioned variational inference.

Each hospital's part is differentially private. Factors, messages, schedules and the server need no
TensorFlow; the other names load it on first use.

Read the files in this order. Each imports from those before it only.

* `factors` are normals that are multiplied; `sums` what hospitals release in the last phase, and
  `trusted` who may add them up; `messages` go between server and hospitals.
* `schedules` says when a server asks whom, `member` what it knows of each hospital, and `saved` how
  that is saved; `server` runs a study, `status` shows it, and `aggregation` adds up sums that are
  only seen together.
* `columns` are what hospitals share of their tables, and `counts` tell their typical values before
  there is a study; `weights` are those of records; `window` releases the sums; `effects` differ
  between hospitals, and `calibrated` is the posterior of the sums. `study` is the model, and
  `formula` that of a regression.
* `scoring` and `refiner` make a hospital's local steps; `release` adds noise in each, `hospital`
  checks and charges, and `on_messages` adds noise to what is sent instead.
* `simulation` plays a study in one process, and `rehearsal` on simulated records. The processes of
  a real one are in `deployment`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tfp_dpvi import _deprecation
from tfp_dpvi.federated.aggregation import Aggregation
from tfp_dpvi.federated.factors import Factor, guard, product
from tfp_dpvi.federated.messages import MessageError, Reply, StudyTerms, Task
from tfp_dpvi.federated.server import Asynchronous, Round, Schedule, Sequential, Server, Synchronous
from tfp_dpvi.federated.status import write_status
from tfp_dpvi.federated.sums import SiteSums
from tfp_dpvi.federated.trusted import AgreedSum, TrustedSum

if TYPE_CHECKING:
    from tfp_dpvi.federated.calibrated import StudyDraws, StudyPosterior
    from tfp_dpvi.federated.counts import ColumnCounts, count_columns, described_together
    from tfp_dpvi.federated.formula import RegressionStudy
    from tfp_dpvi.federated.hospital import Hospital
    from tfp_dpvi.federated.on_messages import MessageHospital
    from tfp_dpvi.federated.rehearsal import rehearse_study
    from tfp_dpvi.federated.simulation import History, hospital_of, simulate
    from tfp_dpvi.federated.study import Study

_LATER = {"Hospital": "hospital", "MessageHospital": "on_messages", "Study": "study"}
_LATER |= {"StudyDraws": "calibrated", "StudyPosterior": "calibrated"}
_LATER |= dict.fromkeys(("ColumnCounts", "count_columns", "described_together"), "counts")
_LATER |= {"RegressionStudy": "formula", "rehearse_study": "rehearsal"}
_LATER |= dict.fromkeys(("History", "hospital_of", "simulate"), "simulation")

__all__ = [
    "Aggregation",
    "AgreedSum",
    "Asynchronous",
    "ColumnCounts",
    "Factor",
    "History",
    "Hospital",
    "MessageError",
    "MessageHospital",
    "RegressionStudy",
    "Reply",
    "Round",
    "Schedule",
    "Sequential",
    "Server",
    "SiteSums",
    "Study",
    "StudyDraws",
    "StudyPosterior",
    "StudyTerms",
    "Synchronous",
    "Task",
    "TrustedSum",
    "count_columns",
    "described_together",
    "guard",
    "hospital_of",
    "product",
    "rehearse_study",
    "simulate",
    "write_status",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        return _deprecation.renamed(__name__, name)
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
