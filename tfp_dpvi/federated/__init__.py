"""One posterior of several hospitals that keep their records: differentially private partitioned variational inference.

Names load on first use: factors, messages, schedules and the server need no TensorFlow, and a server imports none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfp_dpvi.federated.factors import Factor, guard, product
    from tfp_dpvi.federated.hospital import Hospital
    from tfp_dpvi.federated.messages import MessageError, Reply, Task
    from tfp_dpvi.federated.on_messages import MessageHospital
    from tfp_dpvi.federated.schedules import Asynchronous, Schedule, Sequential, Synchronous
    from tfp_dpvi.federated.server import Round, Server
    from tfp_dpvi.federated.simulation import History, hospital_of, simulate
    from tfp_dpvi.federated.study import Study
    from tfp_dpvi.federated.terms import Terms

_NAMES = {
    "Asynchronous": "schedules",
    "Factor": "factors",
    "History": "simulation",
    "Hospital": "hospital",
    "MessageError": "messages",
    "MessageHospital": "on_messages",
    "Reply": "messages",
    "Round": "server",
    "Schedule": "schedules",
    "Sequential": "schedules",
    "Server": "server",
    "Study": "study",
    "Synchronous": "schedules",
    "Task": "messages",
    "Terms": "terms",
    "guard": "factors",
    "hospital_of": "simulation",
    "product": "factors",
    "simulate": "simulation",
}

__all__ = [
    "Asynchronous",
    "Factor",
    "History",
    "Hospital",
    "MessageError",
    "MessageHospital",
    "Reply",
    "Round",
    "Schedule",
    "Sequential",
    "Server",
    "Study",
    "Synchronous",
    "Task",
    "Terms",
    "guard",
    "hospital_of",
    "product",
    "simulate",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
