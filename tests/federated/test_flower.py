"""The loop on Flower: a grid in this process whose nodes run the real ClientApp, and nodes that fail, lie and disappear."""

import os
import threading
import time
import types
from multiprocessing.connection import Listener

import numpy as np
import pytest
from support.federation import ExactWorker, answer, prior_of, regression

flwr = pytest.importorskip("flwr", reason="Flower is not installed (the extra `federated`)")

from flwr.app import Context, Error, Message, RecordDict  # noqa: E402

from tfp_dpvi.federated import Factor, Server, StudyTerms, Synchronous, Task  # noqa: E402
from tfp_dpvi.federated.deployment import flower  # noqa: E402
from tfp_dpvi.federated.deployment.flower import FlowerRun, client_app  # noqa: E402
from tfp_dpvi.federated.deployment.proxy import WorkerError, ask  # noqa: E402

TERMS = StudyTerms("on Flower", prior_of(3, full_rank=True))


@pytest.fixture(autouse=True)
def identity():
    """Flower sets this in the processes that it starts; versions before 1.40 have no such thing."""
    try:
        from flwr.supercore.task_identity import TaskIdentity
    except ImportError:
        return
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1


class Grid:
    """A grid of nodes that answer at once, in this process."""

    def __init__(self, nodes):
        self.nodes, self.replies, self.count = dict(nodes), {}, 0

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        identities = []
        for message in messages:
            self.count += 1
            identity = f"m{self.count}"
            message.metadata._message_id = identity  # As the real grid does.
            message.metadata._run_id = 1
            reply = self.nodes[message.metadata.dst_node_id](message)
            if reply is not None:
                self.replies[identity] = reply
            identities.append(identity)
        return identities

    def pull_messages(self, message_ids):
        return [self.replies.pop(one) for one in message_ids if one in self.replies]


def node(number, name, worker, *, fails=lambda task: False, silent=lambda task: False):
    """A node with the library's ClientApp; `fails` answers with Flower's error, `silent` with nothing."""

    latest = {}

    def handed(message):  # As a hospital, which repeats a reply that the server waits for.
        task = Task.from_bytes(message, TERMS)
        if not latest.keys() & {task.request, *task.unanswered}:
            latest.clear()
            latest[task.request] = answer(task, worker.refine(task))
        return next(iter(latest.values()))

    app = client_app(lambda context: (name, handed))
    context = Context(run_id=1, node_id=number, node_config={}, state=RecordDict(), run_config={})

    def run(message):
        if message.metadata.message_type == "train":
            task = Task.from_bytes(message.content["tfp_dpvi"]["message"], TERMS)
            if silent(task):
                return None
            if fails(task):
                reply = Message(Error(code=0, reason="the process was killed"), reply_to=message)
                reply.metadata._src_node_id = number
                return reply
        reply = app(message, context)
        reply.metadata._src_node_id = number
        return reply

    return run


def workers(num=3):
    x, y = regression(num)
    flat = x.reshape(-1, 3)
    return [ExactWorker(*both) for both in zip(x, y, strict=True)], np.eye(3) / 4.0 + flat.T @ flat


def play(nodes, *, rounds=1, num=None, **settings):
    server = Server(TERMS, None, Synchronous(rounds=rounds, damping=1.0))
    trusting = {"pause": 0.01, "roster": "trust_on_first_use"}
    run = FlowerRun(Grid(nodes), server, poll=0.001, **{**trusting, **settings})
    run.wait_for(len(nodes) if num is None else num, at_most=20.0)
    run.play()
    return server


def test_the_pooled_posterior_over_flower():
    made, precision = workers()
    server = play({n: node(n, f"h{n}", one) for n, one in enumerate(made, 1)})
    np.testing.assert_allclose(server.posterior.precision, precision, rtol=1e-9)
    assert server.refused == []


def test_a_node_that_fails_or_falls_silent_costs_a_round_of_its_own():
    """One wait; the others' changes are taken, its factor stays, and it comes back."""
    made, precision = workers()
    nodes = {
        1: node(1, "h1", made[0]),
        2: node(2, "h2", made[1], fails=lambda task: task.number == 0),
        3: node(3, "h3", made[2], silent=lambda task: task.number == 0),
    }
    server = play(nodes, rounds=3, timeout=0.2)
    assert server.history[0].hospitals == ("h1",)
    assert not server.history[0].factors["h2"].precision.any()
    assert set(server.history[1].hospitals) == {"h1", "h2", "h3"}
    np.testing.assert_allclose(server.posterior.precision, precision, rtol=1e-9)


def test_an_outage_that_every_node_reports_at_once_does_not_use_up_the_rounds():
    made, _ = workers()
    start = time.monotonic()
    down = {"fails": lambda task: time.monotonic() < start + 0.5}
    server = play(
        {n: node(n, f"h{n}", one, **down) for n, one in enumerate(made, 1)}, rounds=5, pause=0.1
    )
    assert server.history[-1].hospitals == ("h1", "h2", "h3")


class SlowGrid(Grid):
    """A grid whose node 3 is slower than the timeout."""

    def __init__(self, nodes, seconds):
        super().__init__(nodes)
        self.seconds, self.ready = seconds, {}

    def push_messages(self, messages):
        identities = super().push_messages(messages)
        for identity, message in zip(identities, messages, strict=True):
            if message.metadata.dst_node_id == 3 and message.metadata.message_type == "train":
                self.ready[identity] = time.monotonic() + self.seconds
        return identities

    def pull_messages(self, message_ids):
        now = time.monotonic()
        return super().pull_messages([one for one in message_ids if self.ready.get(one, 0.0) < now])


def test_a_node_that_is_slower_than_the_timeout_is_taken_later():
    made, _ = workers()
    server = Server(TERMS, None, Synchronous(rounds=4, damping=0.5))
    nodes = {n: node(n, f"h{n}", one) for n, one in enumerate(made, 1)}
    run = FlowerRun(
        SlowGrid(nodes, 0.3), server, roster="trust_on_first_use", timeout=0.2, poll=0.01
    )
    run.wait_for(3, at_most=20.0)
    run.play()
    assert any("h3" in update.hospitals for update in server.history)
    assert server.factors["h3"].precision.any()
    assert server.refused == []


def test_an_error_that_comes_late_does_not_end_the_wait_for_the_repeat():
    """The study waits for its quorum with the same request, which is under way a second time when the first fails."""
    made, _ = workers()
    nodes = {n: node(n, f"h{n}", one) for n, one in enumerate(made, 1)}
    grid, asked = SlowGrid(nodes, 0.3), []

    def is_first(task):
        asked.append(task.request)
        # The second's answer comes within the timeout, and after the first's error.
        grid.seconds = 0.3 if len(asked) == 1 else 0.15
        return len(asked) == 1

    grid.nodes[3] = node(3, "h3", made[2], fails=is_first)
    server = Server(TERMS, None, Synchronous(rounds=1, damping=1.0, quorum=3))
    settings = {"roster": "trust_on_first_use", "poll": 0.001, "pause": 0.001}
    run = FlowerRun(grid, server, timeout=0.2, **settings)
    run.wait_for(3, at_most=20.0)
    run.play()
    assert set(server.history[0].hospitals) == {"h1", "h2", "h3"}
    assert asked == asked[:1] * 2


def test_a_node_that_fails_at_the_end_is_asked_until_the_timeout():
    """Its hospital may have paid for its change and kept it; three failures were over in a moment."""
    made, _ = workers()
    nodes = {n: node(n, f"h{n}", one) for n, one in enumerate(made, 1)}
    asked = []

    def fails(task):
        asked.append(task.request)
        return len(asked) < 8

    nodes[3] = node(3, "h3", made[2], fails=fails)
    server = Server(TERMS, None, Synchronous(rounds=1, damping=1.0))
    run = FlowerRun(
        Grid(nodes), server, roster="trust_on_first_use", timeout=20.0, poll=0.001, pause=0.001
    )
    run.wait_for(3, at_most=20.0)
    run.play()
    assert {name for update in server.history for name in update.hospitals} == {"h1", "h2", "h3"}
    assert asked == asked[:1] * 8


def test_a_hospital_that_is_dropped_before_its_node_joins_is_not_asked(monkeypatch):
    """It would pay for a change that nobody takes."""
    monkeypatch.setattr(flower, "_LOOK", 0.0)
    made, _ = workers()
    server = Server(TERMS, ["h1", "h2", "h3"], Synchronous(rounds=3, damping=1.0))
    grid, asked = Grid({1: node(1, "h1", made[0])}), []

    def drops(task):
        if 3 not in grid.nodes:
            server.drop("h3")
            grid.nodes[3] = node(3, "h3", made[2], silent=asked.append)
        return False

    grid.nodes[2] = node(2, "h2", made[1], silent=drops)
    run = FlowerRun(grid, server, roster="trust_on_first_use", poll=0.001, pause=20.0)
    run.wait_for(2, at_most=20.0)
    run.play()
    assert run.nodes.keys() == {"h1", "h2", "h3"}
    assert len(server.history) == 4  # The drop, and three rounds.
    assert asked == []


def test_a_server_that_is_killed_continues_in_another_run(tmp_path):
    """The nodes are there all the time, and the new run sends what was under way again."""
    made, precision = workers()
    nodes = {n: node(n, f"h{n}", one) for n, one in enumerate(made, 1)}
    server = Server(TERMS, None, Synchronous(rounds=3, damping=1.0), folder=tmp_path)
    settings = {"roster": "trust_on_first_use", "poll": 0.001, "pause": 0.01}
    run = FlowerRun(Grid(nodes), server, **settings)
    run.wait_for(3, at_most=20.0)
    with pytest.raises(KeyboardInterrupt):
        run.play(lambda server: (_ for _ in ()).throw(KeyboardInterrupt))
    again = Server.load(tmp_path, TERMS)
    assert len(again.history) == 1
    run = FlowerRun(Grid(nodes), again, **settings)
    run.wait_for(3, at_most=20.0)
    run.play()
    assert len(again.history) == 3
    np.testing.assert_allclose(again.posterior.precision, precision, rtol=1e-9)


def test_why_a_hospital_refuses_reaches_the_server():
    """Of a study with other terms, in a sentence that names them."""
    other = StudyTerms("on Flower", prior_of(3, full_rank=True), local_steps=7)

    def refusing(context):
        return "h1", lambda message: Task.from_bytes(message, other)

    app = client_app(refusing)
    context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})

    def run(message):
        reply = app(message, context)
        reply.metadata._src_node_id = 1
        return reply

    server = play({1: run}, rounds=2)
    assert len(server.refused) == 2
    assert "h1: it refuses the task: study=" in server.refused[0]
    assert "another local_steps; agree on one file of terms" in server.refused[0]


def test_nobody_takes_another_name():
    made, _ = workers()
    nodes = {1: node(1, "h1", made[0]), 2: node(2, "h1", made[1]), 3: node(3, "h3", made[2])}
    server = play(nodes, num=2)
    assert set(server.factors) == {"h1", "h3"}
    nodes = {1: node(1, "h1", made[0]), 2: node(2, "h3", made[1])}
    server = play(nodes, num=1, roster={1: "h1", 2: "h2"})
    assert set(server.factors) == {"h1"}


def test_nobody_is_believed_without_a_roster_unless_asked_for():
    """Checks that a node's own word needs a setting, and that a mistyped one is refused."""
    server = Server(TERMS, None, Synchronous(rounds=1))
    with pytest.raises(TypeError, match="roster"):
        FlowerRun(Grid({}), server)
    for roster in ("anybody", None):
        with pytest.raises(ValueError, match=rf"roster={roster!r}: pass \{{node id: hospital\}}"):
            FlowerRun(Grid({}), server, roster=roster)


def test_garbage_of_a_node_is_refused():
    made, _ = workers()

    class Liar:
        def refine(self, task):
            return Factor(np.zeros(3), 1e9 * np.eye(3))

    server = play({1: node(1, "h1", made[0]), 2: node(2, "h2", Liar())})
    assert "most_change" in server.refused[0]
    assert server.history[0].hospitals == ("h1",)


def test_the_client_asks_the_worker_that_its_node_names(tmp_path):
    path = tmp_path / "w.sock"
    listener = Listener(str(path), "AF_UNIX")

    def serve():
        for reply in (b"+done", b"-a sentence"):
            with listener.accept() as connection:
                connection.recv_bytes(100)
                connection.send_bytes(reply)

    threading.Thread(target=serve, daemon=True).start()
    assert ask(path, b"task") == b"done"
    with pytest.raises(WorkerError, match="a sentence"):
        ask(path, b"task")
    listener.close()
    with pytest.raises(WorkerError, match="does not answer"):
        ask(path, b"task")
    context = types.SimpleNamespace(node_config={"hospital": "h"})
    with pytest.raises(ValueError, match="start the node with"):
        flower._worker_of_node(context)


def test_nothing_is_told_to_anybody():
    for name, value in (
        ("FLWR_TELEMETRY_ENABLED", "0"),
        ("FLWR_DISABLE_UPDATE_CHECK", "1"),
        ("RAY_USAGE_STATS_ENABLED", "0"),
    ):
        assert os.environ[name] == value
