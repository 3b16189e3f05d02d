"""Partitioned variational inference on Flower, by its Message API alone: a loop for a ServerApp and a thin ClientApp.

Neither imports TensorFlow. Flower carries bytes; what they mean, and what is refused, `messages` says on both sides. No
guarantee rests on Flower: not on its secure aggregation, nor on its modules for differential privacy.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from tfp_dpvi.federated.proxy import ask
from tfp_dpvi.federated.server import Server

# Nothing is told to anybody about these runs. To be set before Flower and Ray are imported.
for _name, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"),
    ("FLWR_DISABLE_UPDATE_CHECK", "1"),
    ("RAY_USAGE_STATS_ENABLED", "0"),
):
    os.environ.setdefault(_name, _value)

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise ImportError("federated learning on Flower needs it: pip install 'tfp-dpvi[federated]'.") from error

_LOG = logging.getLogger("tfp_dpvi")
_RECORD, _FIELD = "tfp_dpvi", "message"
_LOOK = 2.0  # Seconds between looks for new nodes.

Answer = Callable[[bytes], bytes]


def client_app(answer: Callable[[Context], tuple[str, Answer]] | None = None) -> ClientApp:
    """Returns a ClientApp that hands tasks to the hospital's worker.

    Flower starts a process for each message, which is why this one does next to nothing. A node's settings name its hospital and
    the worker's socket: `flower-supernode --node-config 'hospital="berlin" worker="/run/dpvi/berlin.sock"'`.

    Args:
      answer: context -> (name of the hospital, bytes -> bytes), for nodes without a worker, as in a simulation.
    """
    app, found = ClientApp(), _of_node if answer is None else answer

    @app.query()
    def name(message: Message, context: Context) -> Message:
        return Message(_content(found(context)[0].encode()), reply_to=message)

    @app.train()
    def refine(message: Message, context: Context) -> Message:
        return Message(_content(found(context)[1](_bytes_of(message))), reply_to=message)

    return app


def _of_node(context: Context) -> tuple[str, Answer]:
    settings = context.node_config
    missing = [name for name in ("hospital", "worker") if name not in settings]
    if missing:
        raise ValueError(
            f'node_config lacks {missing}; start the node with --node-config \'hospital="..." worker="..."\'.'
        )
    return str(settings["hospital"]), lambda message: ask(str(settings["worker"]), message)


def _content(message: bytes) -> RecordDict:
    return RecordDict({_RECORD: ConfigRecord({_FIELD: message})})


def _bytes_of(message: Message) -> bytes:
    """Returns what a message carries; empty, which is refused everywhere, if it is not one of ours."""
    record = message.content.get(_RECORD) if message.has_content() else None
    held = record.get(_FIELD) if isinstance(record, ConfigRecord) else None
    return held if isinstance(held, bytes) else b""


class FlowerRun:
    """Runs a `Server` over a Flower grid.

    Args:
      grid: of the ServerApp.
      server: the study's server, without hospitals or with those of the roster.
      roster: node id -> hospital, fixed beforehand; None: a node's own word counts the first time, and a name never moves to
        another node. With node keys a node's id is that of its key.
      timeout: seconds after which a node that has not answered is given up for the round.
      poll: seconds between looks for replies.
    """

    def __init__(
        self,
        grid: Any,
        server: Server,
        *,
        roster: Mapping[int, str] | None = None,
        timeout: float = 600.0,
        poll: float = 0.1,
    ) -> None:
        self._grid, self.server, self._roster = grid, server, roster
        self._timeout, self._poll = timeout, poll
        self.nodes: dict[str, int] = {}
        self._asked: dict[int, float] = {}
        self._open: dict[
            str, tuple[str | None, int, float]
        ] = {}  # Message id -> request (None: a name), node, deadline.
        self._looked = 0.0

    def wait_for(self, num_hospitals: int, *, at_most: float = 600.0) -> None:
        """Waits until so many hospitals have joined; raises `TimeoutError` if they do not."""
        until = time.monotonic() + at_most
        while len(self.nodes) < num_hospitals:
            if time.monotonic() > until:
                raise TimeoutError(f"{len(self.nodes)} of {num_hospitals} hospitals joined within {at_most:g} s.")
            self._step()

    def play(self, show: Callable[[Server], None] | None = None) -> None:
        """Runs the study to its end; `show` is called after each update of the posterior."""
        seen = len(self.server.history)
        while not self.server.finished:
            self._send()
            self._step()
            if show is not None and len(self.server.history) > seen:
                show(self.server)
            seen = len(self.server.history)

    def _send(self) -> None:
        for task in self.server.due():
            node = self.nodes.get(task.hospital)
            if node is None:  # Of the roster, and not here yet.
                self.server.give_up(task.request)
            else:
                self._push(node, "train", task.to_bytes(), task.request, self._timeout)

    def _push(self, node: int, kind: str, message: bytes, request: str | None, timeout: float) -> None:
        content = _content(message)
        (identity,) = self._grid.push_messages(
            [Message(content, dst_node_id=node, message_type=kind, ttl=timeout + 60.0)]
        )
        self._open[identity] = (request, node, time.monotonic() + timeout)

    def _step(self) -> None:
        self._look()
        replies = list(self._grid.pull_messages(list(self._open))) if self._open else []
        for reply in replies:
            request, node, _ = self._open.pop(reply.metadata.reply_to_message_id)
            if reply.metadata.src_node_id != node:
                _LOG.warning("A reply to node %d came from another.", node)
            elif reply.has_error():
                _LOG.warning("Node %d failed: %s", node, reply.error.reason)
            elif request is None:
                self._join(node, _bytes_of(reply))
            else:
                self.server.receive(self._name(node), _bytes_of(reply))
            if request is not None:
                self.server.give_up(request)  # Nobody answers twice: what was refused is over.
        now = time.monotonic()
        for identity, (request, node, deadline) in list(self._open.items()):
            if now > deadline:
                _LOG.warning("Node %d has not answered within %g s.", node, self._timeout)
                del self._open[identity]
                if request is not None:
                    self.server.give_up(request)
        if not replies:
            time.sleep(self._poll)

    def _look(self) -> None:
        """Asks new nodes who they are."""
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        for node in self._grid.get_node_ids():
            if node not in self.nodes.values() and now - self._asked.get(node, -1e9) > 30.0:
                self._asked[node] = now
                self._push(node, "query", b"", None, 30.0)

    def _join(self, node: int, claimed: bytes) -> None:
        name = claimed.decode(errors="replace")
        wanted = name if self._roster is None else self._roster.get(node)
        if wanted != name or name in self.nodes or not (name.isprintable() and name.strip()) or len(name) > 200:
            _LOG.warning("Node %d says that it is %r, which it is not: it is left out.", node, name[:200])
            return
        self.nodes[name] = node
        self.server.join(name)

    def _name(self, node: int) -> str:
        return next(name for name, one in self.nodes.items() if one == node)
