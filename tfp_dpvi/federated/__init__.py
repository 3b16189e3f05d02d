"""One posterior of several hospitals that keep their records: differentially private partitioned variational inference.

Names load on first use: factors, messages, schedules and the server need no TensorFlow, and a server imports none.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tfp_dpvi.federated.factors import Factor, guard, product
    from tfp_dpvi.federated.messages import MessageError, Reply, Task
    from tfp_dpvi.federated.schedules import Asynchronous, Schedule, Sequential, Synchronous
    from tfp_dpvi.federated.server import Round, Server
    from tfp_dpvi.federated.terms import Terms

_NAMES = {
    "Asynchronous": "schedules",
    "Factor": "factors",
    "MessageError": "messages",
    "Reply": "messages",
    "Round": "server",
    "Schedule": "schedules",
    "Sequential": "schedules",
    "Server": "server",
    "Synchronous": "schedules",
    "Task": "messages",
    "Terms": "terms",
    "guard": "factors",
    "product": "factors",
}

__all__ = [
    "Asynchronous",
    "Factor",
    "MessageError",
    "Reply",
    "Round",
    "Schedule",
    "Sequential",
    "Server",
    "Synchronous",
    "Task",
    "Terms",
    "guard",
    "product",
]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
