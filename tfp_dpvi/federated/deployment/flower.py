"""Partitioned variational inference on Flower, by its Message API alone.

It has a loop for a ServerApp and a thin ClientApp. Neither imports TensorFlow. Flower carries
bytes, which `messages` checks on both sides. No guarantee rests on Flower: not on its secure
aggregation, nor on its modules for differential privacy.

No guarantee rests on the app either. Flower runs whatever app is submitted as the SuperNode's user,
so records and ledger belong to another user, that of the worker
(`tfp_dpvi.federated.deployment.worker`).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple

from tfp_dpvi.federated.deployment.proxy import RefusedError, ask
from tfp_dpvi.federated.messages import MOST_TEXT, MessageError, Task
from tfp_dpvi.federated.server import Server

# No telemetry and no update checks; read when Flower and Ray are imported.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    from flwr.app import ConfigRecord, Context, Message, RecordDict
    from flwr.clientapp import ClientApp
except ImportError as error:
    raise ImportError(
        "federated learning on Flower needs it: pip install 'tfp-dpvi[federated]'."
    ) from error

_LOG = logging.getLogger("tfp_dpvi")
_RECORD, _FIELD = "tfp_dpvi", "message"
_REFUSAL = "refusal"  # The field of a sentence in a reply's place.
_LOOK = 2.0  # Seconds between looks for new nodes.
_LATE = 10.0  # Timeouts after which a reply is no longer looked for.
_LATEST_NAME = 30.0  # Seconds within which a new node must say its name.

#: The roster that believes what a node says the first time.
TRUST: Final = "trust_on_first_use"

Answer = Callable[[bytes], bytes]


def client_app(answer: Callable[[Context], tuple[str, Answer]] | None = None) -> ClientApp:
    """Returns a ClientApp that hands tasks to the hospital's worker.

    Flower starts a process for each message, so the hospital lives in another. A node's settings
    name both: `flower-supernode --node-config 'hospital="berlin" worker="/run/dpvi/berlin.sock"'`.

    Args:
      answer: Maps a context to the name of the hospital and a function from bytes to bytes; for
        simulations, without workers.
    """
    app, read = ClientApp(), _worker_of_node if answer is None else answer

    @app.query()
    def name(message: Message, context: Context) -> Message:
        return Message(_content(read(context)[0].encode()), reply_to=message)

    @app.train()
    def refine(message: Message, context: Context) -> Message:
        try:
            content = _content(read(context)[1](_bytes_of(message)))
        except (RefusedError, MessageError) as error:  # The server must hear why.
            content = _content(str(error)[:MOST_TEXT].encode(), _REFUSAL)
        return Message(content, reply_to=message)

    return app


def _worker_of_node(context: Context) -> tuple[str, Answer]:
    settings = context.node_config
    if not {"hospital", "worker"} <= settings.keys():
        raise ValueError('start the node with --node-config \'hospital="..." worker="..."\'.')
    return str(settings["hospital"]), lambda message: ask(str(settings["worker"]), message)


def _content(message: bytes, field: str = _FIELD) -> RecordDict:
    return RecordDict({_RECORD: ConfigRecord({field: message})})


def _bytes_of(message: Message, field: str = _FIELD) -> bytes:
    """Returns the bytes that a message carries in a field.

    They are empty, which is refused everywhere, if it is of another kind.
    """
    record = message.content.get(_RECORD) if message.has_content() else None
    value = record.get(field) if isinstance(record, ConfigRecord) else None
    return value if isinstance(value, bytes) else b""


class FlowerRun:
    """Runs a `Server` over a Flower grid.

    Args:
      grid: The grid of the ServerApp.
      server: The study's server, made with None for its hospitals, or with those of the roster.
      roster: Maps node ids to hospitals, fixed beforehand. With node keys a node's id is that of
        its key; `flwr supernode register` prints it. Or "trust_on_first_use", for rehearsals: a
        node's own word counts the first time, and a name never moves to another node.
      timeout: Seconds after which a node that has not answered is given up for the round. Its reply
        is still taken if it comes within ten times as long.
      poll: Seconds between looks for replies.
      pause: Seconds that all nodes wait when one fails, and that a task waits for a node which has
        not joined: else an outage of all would use up the rounds at once. Once the rounds are over
        the task of a hospital that has answered before waits until `timeout`, and a node that
        fails is asked again.

    Raises:
      ValueError: The roster is neither a mapping nor the name of the rule.
    """

    def __init__(
        self,
        grid: Any,
        server: Server,
        *,
        roster: Mapping[int, str] | Literal["trust_on_first_use"],
        timeout: float = 600.0,
        poll: float = 0.1,
        pause: float = 5.0,
    ) -> None:
        # None is refused too: it once meant what "trust_on_first_use" says.
        if roster != TRUST and not isinstance(roster, Mapping):
            raise ValueError(f"roster={roster!r}: pass {{node id: hospital}}, or {TRUST!r}.")
        self._grid, self.server = grid, server
        self._roster = roster if isinstance(roster, Mapping) else None
        self._timeout, self._poll = timeout, poll
        self._pause = pause
        self.nodes: dict[str, int] = {}  # The node id of each hospital that has joined.
        self._left_out: set[int] = set()
        # By request, with the end of the wait for its node.
        self._unsent: dict[str, tuple[Task, float]] = {}
        self._open: dict[str, _Sent] = {}  # By message id.
        self._late: dict[str, _Sent] = {}  # Given up for their round; replies are still welcome.
        self._next_look = 0.0

    def wait_for(self, num_hospitals: int, *, at_most: float = 600.0) -> None:
        """Waits until so many hospitals have joined.

        Args:
          num_hospitals: Number of hospitals.
          at_most: Seconds to wait.

        Raises:
          TimeoutError: Fewer have joined by then.
        """
        until = time.monotonic() + at_most
        while len(self.nodes) < num_hospitals:
            if time.monotonic() > until:
                raise TimeoutError(
                    f"{len(self.nodes)} of {num_hospitals} hospitals joined within {at_most:g} s."
                )
            self._step()

    def play(self, show: Callable[[Server], None] | None = None) -> None:
        """Runs the study to its end; `show` is called after each update of the posterior."""
        seen = len(self.server.history)
        while not self.server.finished:
            for task in self.server.due():
                # One that has answered before may have paid for what it is asked, and kept it.
                is_owed = self.server.is_closing and task.hospital in self.server.epsilon
                waits = self._timeout if is_owed else self._pause
                self._unsent[task.request] = task, time.monotonic() + waits
            self._step()
            if show is not None and len(self.server.history) > seen:
                show(self.server)
            seen = len(self.server.history)

    def _push(
        self, node: int, kind: str, message: bytes, timeout: float, task: Task | None = None
    ) -> None:
        lives = _LATE * timeout + 60.0
        sent = Message(_content(message), dst_node_id=node, message_type=kind, ttl=lives)
        (identity,) = self._grid.push_messages([sent])
        self._open[identity] = _Sent(node, time.monotonic() + timeout, task)

    def _step(self) -> None:
        """Asks for new names, sends what is due, takes what has come, gives up what is overdue."""
        self._look()
        self._send()
        sent = {**self._late, **self._open}
        now = time.monotonic()  # What comes later is not overdue yet.
        replies = list(self._grid.pull_messages(list(sent))) if sent else []
        for reply in replies:
            identity = reply.metadata.reply_to_message_id
            self._open.pop(identity, None)
            self._late.pop(identity, None)
            self._take(sent[identity], reply)
        for identity, overdue in list(self._open.items()):
            if now > overdue.deadline:
                self._take(self._open.pop(identity), None)
                self._late[identity] = overdue
        for identity, late in list(self._late.items()):
            if late.task is None or now > late.deadline + (_LATE - 1) * self._timeout:
                del self._late[identity]
        if not replies:
            time.sleep(self._poll)

    def _look(self) -> None:
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + _LOOK
            known = {
                *self.nodes.values(),
                *self._left_out,
                *(sent.node for sent in self._open.values()),
            }
            for node in set(self._grid.get_node_ids()) - known:
                self._push(node, "query", b"", _LATEST_NAME)

    def _send(self) -> None:
        """Sends tasks to the nodes that are here; gives up those that have waited too long."""
        for task, deadline in list(self._unsent.values()):
            node = self.nodes.get(task.hospital)
            is_awaited = self.server.awaits(task.request)  # Not if its hospital was dropped.
            if is_awaited and node is None and time.monotonic() < deadline:
                continue
            del self._unsent[task.request]
            if is_awaited and node is not None:
                self._push(node, "train", task.to_bytes(), self._timeout, task)
            else:
                self.server.give_up(task.request)

    def _take(self, sent: _Sent, reply: Message | None) -> None:
        """Takes a node's reply, or None for a node that is overdue."""
        if reply is None:
            _LOG.warning("Node %d has not answered in time.", sent.node)
        elif reply.has_error():  # Of the node, or of the SuperLink for a node that it cannot reach.
            _LOG.warning("Node %d failed: %s", sent.node, reply.error.reason)
            time.sleep(self._pause)
            left = sent.deadline - time.monotonic()
            # No other waits for it, and it may have paid for what it is asked, and kept it.
            task = sent.task if self.server.is_closing and left > 0.0 else None
            if task is not None and self.server.awaits(task.request):
                self._push(sent.node, "train", task.to_bytes(), left, task)
                return
        elif reply.metadata.src_node_id != sent.node:
            _LOG.warning("A reply to node %d came from another.", sent.node)
        elif sent.task is None:
            self._join(sent.node, _bytes_of(reply).decode(errors="replace"))
        elif refusal := _bytes_of(reply, _REFUSAL).decode(errors="replace"):
            self.server.refuse(sent.task.hospital, f"it refuses the task: {refusal}")
            time.sleep(self._pause)
        elif not self.server.receive(sent.task.hospital, _bytes_of(reply)):
            time.sleep(self._poll)
        if sent.task is not None and not self._is_asked(sent.task):
            self.server.give_up(sent.task.request)  # A refused reply is not repeated.

    def _is_asked(self, task: Task) -> bool:
        """Returns whether another message asks for the same."""
        open_tasks = (sent.task for sent in self._open.values())
        return any(other is not None and other.request == task.request for other in open_tasks)

    def _join(self, node: int, name: str) -> None:
        wanted = name if self._roster is None else self._roster.get(node)
        if (
            wanted != name
            or name in self.nodes
            or not (name.isprintable() and name.strip())
            or len(name) > 200
        ):
            _LOG.warning(
                "Node %d says that it is %r, which it is not: it is left out.", node, name[:200]
            )
            self._left_out.add(node)
        else:
            self.nodes[name] = node
            self.server.join(name)


class _Sent(NamedTuple):
    node: int
    deadline: float
    task: Task | None  # None for a question for the node's name.
