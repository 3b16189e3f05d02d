"""A federation of real processes to kill: a server with a folder, and a worker and a node of each hospital.

The server runs the library's `FlowerRun`, a node its `client_app`, a worker its `main` or `serve`. Stand-ins for Flower carry
the messages over Unix sockets. A process is forked off one that has imported TensorFlow and has started no thread of it. It
is killed from outside, or kills itself at one of its own moments: before a file is written, with half of it written, before it
is in its place, and after; before and after a charge, and before a message leaves.

A worker notes each reply that it is about to keep, and each that it is about to send, in single writes to its log.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import hashlib
import importlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
import types
import uuid
from multiprocessing.connection import Client, Listener

import numpy as np

import tfp_dpvi as dpvi
from support.federation import prior_of
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated import (
    Asynchronous,
    Factor,
    Hospital,
    Sequential,
    Server,
    SiteSums,
    Study,
    StudyTerms,
    Synchronous,
)
from tfp_dpvi.federated.deployment import worker
from tfp_dpvi.federated.sums import NUM_RELEASES
from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan

SCHEDULES = {kind.__name__: kind for kind in (Synchronous, Sequential, Asynchronous)}
DELTA = 1e-5
_PARENT_DEATH = 1  # Of `prctl`, on Linux.
WIDTH = 2
STEPS = 2
# Seconds that a server waits after a node's failure, and for a reply; 5 and 600 in earnest.
PAUSE = 0.05
TIMEOUT = 60.0


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a study is like.

    `allowed` are the rounds that each hospital allows; `make` is the function of this module that makes the study, or empty
    for hospitals in NumPy, which start at once.
    """

    schedule: str
    rounds: int
    quorum: int
    allowed: int
    make: str = ""
    epsilon: float = 1.0
    hospitals: tuple[str, ...] = ("h0", "h1", "h2")

    @classmethod
    def read(cls, directory):
        fields = json.loads((directory / "settings.json").read_text())
        return cls(**{**fields, "hospitals": tuple(fields["hospitals"])})

    def write(self, directory):
        (directory / "settings.json").write_text(json.dumps(dataclasses.asdict(self)))


# ------------------------------------------------------------------------------------------ moments to die


class Fate:
    """Kills this process when it has passed so many moments; never for 0."""

    def __init__(self, moments):
        self.left = moments

    def __call__(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, owner, name, before=lambda *args: None):
        """Puts a moment before and after each call of a function; `before` sees its arguments."""
        real = getattr(owner, name)

        def call(*args, **kwargs):
            before(*args)
            self()
            result = real(*args, **kwargs)
            self()
            return result

        setattr(owner, name, call)

    def in_writes(self, before=lambda *args: None):
        """Puts moments into each file's replacement; in one of them half of the file is written."""
        real = os.fsync

        def fsync(descriptor):
            if self.left == 1:
                os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            self()
            real(descriptor)

        os.fsync = fsync
        self.around(os, "replace", before)


# ------------------------------------------------------------------------------------------ what is used of Flower


class Message:
    """A message, as far as the library uses Flower's."""

    def __init__(self, content=None, *, reply_to=None, error=None, **metadata):
        self.content, self.error = content, error
        self.metadata = types.SimpleNamespace(**metadata)

    def has_content(self):
        return self.content is not None

    def has_error(self):
        return self.error is not None


class ConfigRecord(dict):
    pass


class RecordDict(dict):
    pass


class ClientApp:
    """Calls the function that is registered for a message's type."""

    def __init__(self):
        self.functions = {}

    def __call__(self, message, context):
        return self.functions[message.metadata.message_type](message, context)

    def query(self):
        return lambda function: self.functions.setdefault("query", function)

    def train(self):
        return lambda function: self.functions.setdefault("train", function)


def flower():
    """Imports the library's code for Flower on the stand-ins above; in a process of its own alone."""
    app, client = types.ModuleType("flwr.app"), types.ModuleType("flwr.clientapp")
    for kind in (ConfigRecord, Message, RecordDict):
        setattr(app, kind.__name__, kind)
    app.Context, client.ClientApp = types.SimpleNamespace, ClientApp
    parts = {"flwr": types.ModuleType("flwr"), "flwr.app": app, "flwr.clientapp": client}
    sys.modules.update(parts)
    sys.modules.pop("tfp_dpvi.federated.deployment.flower", None)
    return importlib.import_module("tfp_dpvi.federated.deployment.flower")


def content_of(text, field="message"):
    return RecordDict({"tfp_dpvi": ConfigRecord({field: text})})


class Grid:
    """Takes messages to nodes and back, each over a connection of its own; what breaks is an error."""

    def __init__(self, nodes):
        self.nodes, self.open = nodes, {}

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        identities = []
        for message in messages:
            node, connection = message.metadata.dst_node_id, None
            with contextlib.suppress(OSError):
                connection = Client(str(self.nodes[node]), "AF_UNIX")
                kind = message.metadata.message_type.encode()
                connection.send_bytes(kind + b" " + message.content["tfp_dpvi"]["message"])
            identities.append(uuid.uuid4().hex)
            self.open[identities[-1]] = node, connection
        return identities

    def pull_messages(self, message_ids):
        return [reply for identity in message_ids for reply in self.replies(identity)]

    def replies(self, identity):
        """Yields the reply to a message, or its error, once."""
        if identity not in self.open:
            return
        node, connection = self.open[identity]
        kind, text = b"error", b"it cannot be reached"
        with contextlib.suppress(OSError, EOFError):
            if connection is not None:
                if not connection.poll(0):
                    return
                kind, _, text = connection.recv_bytes().partition(b" ")
        del self.open[identity]
        error = types.SimpleNamespace(reason=text.decode()) if kind == b"error" else None
        content = None if error else content_of(text, kind.decode())
        yield Message(content, error=error, src_node_id=node, reply_to_message_id=identity)


# ------------------------------------------------------------------------------------------ the processes


def run_server(directory, fate):
    settings, module = Settings.read(directory), flower()
    module._LOOK = 0.05  # Seconds between looks for new nodes.
    fate.in_writes()
    terms, folder = StudyTerms.load(directory / "terms.json"), directory / "server"
    wanted = len(settings.hospitals)
    if (folder / "state.json").exists():
        wanted = settings.quorum  # A node may have gone with the server.
        server = Server.load(folder, terms)
    else:
        kind = SCHEDULES[settings.schedule]
        schedule = kind(rounds=settings.rounds, quorum=settings.quorum)
        server = Server(terms, None, schedule, folder=folder)
    names = dict(enumerate(settings.hospitals, 1))
    grid = Grid({number: directory / f"{name}.node" for number, name in names.items()})
    seconds = {"timeout": TIMEOUT, "poll": 0.002, "pause": PAUSE}
    run = module.FlowerRun(grid, server, roster=names, **seconds)
    run.wait_for(wanted)
    run.play()


def run_node(directory, fate, name):
    app, path = flower().client_app(), directory / f"{name}.node"
    config = {"hospital": name, "worker": str(directory / f"{name}.sock")}
    context = types.SimpleNamespace(node_config=config)
    path.unlink(missing_ok=True)
    with Listener(str(path), "AF_UNIX", backlog=16) as listener:
        while True:
            with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
                kind, _, text = connection.recv_bytes().partition(b" ")
                fate()
                connection.send_bytes(relayed(app, context, kind.decode(), text))
                fate()


def relayed(app, context, kind, text):
    """Returns a node's answer; as in Flower, what an app raises is an error for the server."""
    try:
        reply = app(Message(content_of(text), message_type=kind), context)
    except Exception as error:
        return b"error " + str(error).encode()
    ((field, value),) = reply.content["tfp_dpvi"].items()
    return field.encode() + b" " + value


def run_worker(directory, fate, name):
    settings, ledger = Settings.read(directory), directory / f"{name}.ledger"
    log = os.open(directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(what, reply):
        fields = json.loads(reply)
        if fields["change"] is not None or fields["sums"] is not None:
            digest = hashlib.sha256(reply.strip()).hexdigest()
            entry = {"what": what, "digest": digest, **fields}
            os.write(log, json.dumps(entry).encode() + b"\n")

    def note_kept(new, path):
        if pathlib.Path(path) == reply_of(directory, name):
            note("kept", pathlib.Path(new).read_bytes())

    answer = Hospital.answer

    def noted(self, message):
        reply = answer(self, message)
        note("sent", reply)
        fate()
        return reply

    Hospital.answer = noted
    fate.in_writes(note_kept)
    fate.around(PrivacyLedger, "reserve")
    socket, budget = directory / f"{name}.sock", {"epsilon": settings.epsilon, "delta": DELTA}
    if not settings.make:
        book = {"ledger": PrivacyLedger(ledger), "last_reply": reply_of(directory, name)}
        made = ArrayHospital(name, rounds=settings.allowed, **budget, **book)
        return worker.serve(made, socket)
    more = {"rounds": settings.allowed, "ledger": ledger, "socket": socket, "name": name, **budget}
    options = [part for key, value in more.items() for part in (f"--{key}", str(value))]
    study = f"support.kills:{settings.make}"
    given = ["--study", study, "--data", str(directory / f"{name}.npz"), "--rehearsal"]
    sys.exit(worker.main(given + options))


def write_terms(directory, fate):
    """Writes the terms, and the records of each hospital."""
    settings = Settings.read(directory)
    terms = globals()[settings.make]().terms if settings.make else ARRAY_TERMS
    terms.save(directory / "terms.json")
    for number, name in enumerate(settings.hospitals):
        x, y = records(number)
        np.savez(directory / f"{name}.npz", x=x, y=y)


ROLES = {"server": run_server, "node": run_node, "worker": run_worker, "terms": write_terms}


def reply_of(directory, name):
    return directory / f"{name}.ledger.reply"


# ------------------------------------------------------------------------------------------ studies and hospitals


def records(number, num=60):
    rng = np.random.default_rng(number)
    x = rng.normal(size=(num, WIDTH)).astype("float32")
    return x, (rng.random(num) < 1.0 / (1.0 + np.exp(-x[:, 0]))).astype("int32")


def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def rounds_alone(*, calibrated=False):
    """Returns a study of TensorFlow without a last phase."""
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), WIDTH)})
    settings = {"local_steps": STEPS, "example": records(9, num=4), "calibrated": calibrated}
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0)
    return Study(prior, likelihood, optimizer, name="kills", **settings)


def with_sums():
    """Returns a study of TensorFlow with a last phase."""
    return rounds_alone(calibrated=True)


ARRAY_TERMS = StudyTerms(
    "arrays",
    prior_of(WIDTH, full_rank=False),
    local_steps=STEPS,
    sums={"score": (WIDTH,), "matrix": (WIDTH, WIDTH)},
)


class ArrayRelease:
    """The rounds and the sums of a hospital in NumPy: a likelihood's factor and new noise, for its own tests alone."""

    num_records = 60

    def __init__(self, num_releases):
        self.draft = PrivacyPlan(FullBatch(), 1.0, num_releases)
        self.rng = np.random.default_rng()

    def begin(self, plan):
        self.noise = plan.noise_multiplier

    def change(self, task):
        time.sleep(0.01)  # The local steps.
        shift, precision = self.rng.normal(size=WIDTH), 20.0 + self.rng.random(WIDTH)
        return Factor(shift, precision) / (task.posterior / task.cavity)

    def sums(self, task):
        halves = {"score": self.rng.normal(size=(2, WIDTH)), "matrix": np.zeros((2, WIDTH, WIDTH))}
        return SiteSums(self.num_records, np.eye(WIDTH), halves, dict.fromkeys(halves, 1.0))


class ArrayHospital(Hospital):
    """The library's hospital with its releases in NumPy."""

    def __init__(self, name, **settings):
        study = types.SimpleNamespace(terms=ARRAY_TERMS, agreed_sum=None)
        super().__init__(study, None, name=name, refiner=object(), **settings)

    def make_release(self, settings, x, y, num_records):
        return ArrayRelease(settings.rounds * STEPS)

    @staticmethod
    def _make_window(settings, release):
        return ArrayRelease(NUM_RELEASES)


# ------------------------------------------------------------------------------------------ to start and to end them


class Forks:
    """Forks processes off this one; `mutate` breaks the library in one of a role."""

    def __init__(self, mutate=lambda role: None):
        self.mutate = mutate

    def start(self, role, name, directory, fate):
        pid = os.fork()
        if pid:
            return pid
        try:
            # None outlives the process that started it.
            with contextlib.suppress(AttributeError):  # Not on Linux.
                ctypes.CDLL(None).prctl(_PARENT_DEATH, signal.SIGKILL)
            errors = os.open(directory / "errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for stream in (1, 2):
                os.dup2(errors, stream)
            sys.stdout = sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
            self.mutate(role)
            ROLES[role](directory, Fate(fate), *([name] if name else []))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def poll(self, pid):
        """Returns how a process has ended, or None."""
        ended, status = os.waitpid(pid, os.WNOHANG)
        return status if ended else None

    def close(self):
        pass


def serve_forks():
    """Forks off this process what its standard input says."""
    forks = Forks()
    for line in sys.stdin:
        order, *given = json.loads(line)
        if order == "start":
            role, name, directory, fate = given
            said = forks.start(role, name, pathlib.Path(directory), fate)
        else:
            said = forks.poll(*given)
        os.write(1, json.dumps(said).encode() + b"\n")


class RemoteForks:
    """Forks processes off one that has imported TensorFlow, and has done nothing else."""

    def __init__(self):
        tests = pathlib.Path(__file__).resolve().parents[1]
        paths = os.pathsep.join(map(str, (tests.parent, tests)))
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from support import kills; kills.serve_forks()"],
            env={**os.environ, "TF_USE_LEGACY_KERAS": "1", "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, *order):
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, role, name, directory, fate):
        return self.ask("start", role, name, str(directory), fate)

    def poll(self, pid):
        return self.ask("poll", pid)

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.process.stdout.close()


class Federation:
    """Runs one study to its end, and kills its processes at random.

    Args:
      directory: of all its files.
      forks: starts processes.
      settings: of the study.
      rng: says whom to kill, when, and how.
      most: kills at most.
    """

    def __init__(self, directory, forks, settings, rng, most):
        directory.mkdir(parents=True)
        settings.write(directory)
        self.directory, self.forks, self.rng, self.most = directory, forks, rng, most
        self.settings = settings
        self.running = {}  # The pid by role and name.
        self.fated = set()
        self.kills = collections.Counter()  # By role and way.
        self.of_workers = collections.Counter()  # By name.
        self.slow = 4.0 if settings.make else 0.1  # Seconds that a worker needs to start.

    def play(self):
        until = time.monotonic() + (1200.0 if self.settings.make else 60.0)
        try:
            self.launch("terms", "")
            self.wait_for("terms", until)
            for role in ("worker", "node"):
                for name in self.settings.hospitals:
                    self.start(role, name)
            self.start("server", "")
            while not self.look():
                assert time.monotonic() < until, self.errors("the study does not end")
                if self.may_kill() and self.is_time():
                    self.kill(self.victim(), "moment")
                time.sleep(0.002)
        finally:
            for pid in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                while self.forks.poll(pid) is None:
                    time.sleep(0.001)
            self.running.clear()

    def wait_for(self, role, until):
        while (status := self.forks.poll(self.running[role, ""])) is None:
            assert time.monotonic() < until, self.errors(f"{role} does not end")
            time.sleep(0.002)
        del self.running[role, ""]
        assert status == 0, self.errors(role)

    def errors(self, why):
        return f"{why}: {(self.directory / 'errors').read_text()[-3000:]}"

    # -------------------------------------------------------------------------------------- kills

    def may_kill(self):
        return sum(self.kills.values()) + len(self.fated) < self.most

    def launch(self, role, name, fate=0):
        self.running[role, name] = self.forks.start(role, name, self.directory, fate)

    def start(self, role, name):
        """Starts a process; every third time it has a moment at which to kill itself, and some are killed at once."""
        fate = self.may_kill() and self.rng.random() < 0.35
        if fate:
            self.fated.add((role, name))
        self.launch(role, name, int(self.rng.integers(1, 13)) if fate else 0)
        self.seen, self.since = self.stamp(), time.monotonic()
        # Now and then one is killed in an outage, before anything goes on.
        self.patience = 0.0 if self.rng.random() < 0.2 else 4.0 * self.slow
        self.delay = float(self.rng.exponential(0.03))
        if self.may_kill() and not fate and self.rng.random() < 0.15:
            time.sleep(self.rng.uniform(0.0, self.slow if role == "worker" else 0.1))
            if self.forks.poll(self.running[role, name]) is None:
                self.kill((role, name), "start")

    def stamp(self):
        """Returns what changes when the study goes on: what workers have kept and sent, and the updates."""
        paths = [self.directory / f"{name}.log" for name in self.settings.hospitals]
        sizes = [path.stat().st_size for path in paths if path.exists()]
        return len([*(self.directory / "server").glob("update-*.json")]), sizes

    def is_time(self):
        """Returns whether to kill: a moment after the study has gone on."""
        now = time.monotonic()
        if self.stamp() == self.seen and now < self.since + self.patience:
            return False
        time.sleep(self.delay)
        return True

    def victim(self):
        role = ("server", "node", "worker")[self.rng.integers(3)]
        return role, "" if role == "server" else str(self.rng.choice(self.settings.hospitals))

    def kill(self, process, way):
        status = self.end(process)
        if process == ("server", "") and status == 0:  # The study had just ended.
            self.done = True
            del self.running[process]
            return
        assert status == signal.SIGKILL, self.errors(f"{process} ended with {status}")
        self.died(process, way)

    def end(self, process):
        """Kills a process, and returns how it has ended."""
        pid = self.running[process]
        os.kill(pid, signal.SIGKILL)
        while (status := self.forks.poll(pid)) is None:
            time.sleep(0.0005)
        return status

    def died(self, process, way):
        """Counts a kill, and starts the process again."""
        role, name = process
        self.fated.discard(process)
        self.kills[role, way] += 1
        if role == "worker":
            self.of_workers[name] += 1
            note_lost(self.directory, name)
        self.start(role, name)

    done = False

    def look(self):
        """Looks for processes that have ended; returns whether the study has."""
        for process, pid in list(self.running.items()):
            if self.running.get(process) != pid:  # It was started again since.
                continue
            status = self.forks.poll(pid)
            if status is None:
                continue
            if process == ("server", "") and status == 0:
                self.done = True
                del self.running[process]
            else:
                assert status == signal.SIGKILL, self.errors(f"{process} ended with {status}")
                self.died(process, "write")
        return self.done


def log_of(directory, name):
    path = directory / f"{name}.log"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def note_lost(directory, name):
    """Notes of a worker that was killed that the reply which it was about to keep is not there."""
    latest = [entry for entry in log_of(directory, name) if entry["what"] != "sent"][-1:]
    path = reply_of(directory, name)
    there = json.loads(path.read_text())["request"] if path.exists() else ""
    if latest and latest[0]["what"] == "kept" and latest[0]["request"] != there:
        with (directory / f"{name}.log").open("a") as file:
            file.write(json.dumps({**latest[0], "what": "lost"}) + "\n")


# ------------------------------------------------------------------------------------------ what must hold


@dataclasses.dataclass
class Books:
    """Rounds and sums of studies: charged, kept by their workers, used by their servers, and what else became of them."""

    charged: int = 0
    kept: int = 0
    used: int = 0
    # Charged, and the worker was killed before it had kept its reply.
    in_window: int = 0

    def __add__(self, other):
        fields = [field.name for field in dataclasses.fields(self)]
        return Books(*(getattr(self, name) + getattr(other, name) for name in fields))


def check_study(federation):
    """Checks a study that has ended: nothing kept is lost or used twice, no budget is passed, no noise is drawn again."""
    directory, settings = federation.directory, federation.settings
    server = Server.load(directory / "server", StudyTerms.load(directory / "terms.json"))
    assert server.finished, "the server's process has ended before its study"
    assert not server.refused, server.refused
    total = Books()
    for name in settings.hospitals:
        kept, charged = kept_replies(directory, name), charged_releases(directory, name, settings)
        used = used_changes(server, name, [entry for entry in kept if entry["change"] is not None])
        sums = [entry["sums"] for entry in kept if entry["sums"] is not None]
        if name in server.sums:
            assert len(sums) == 1, "sums are given once"
            score = sums[0]["halves"]["score"]
            np.testing.assert_array_equal(server.sums[name].halves["score"], score)
            used += 1
        books = Books(charged, len(kept), used, charged - len(kept))
        lost = f"{name} is charged for other rounds than it has kept: {books}"
        assert 0 <= books.in_window <= federation.of_workers[name], lost
        assert used == len(kept), f"kept and not used: {name}, {books}"
        total += books
    return total


def kept_replies(directory, name):
    """Returns the replies that a worker has kept, in order; checks that no other was sent, nor two for one round."""
    log, digests = log_of(directory, name), collections.defaultdict(set)
    lost = {entry["digest"] for entry in log if entry["what"] == "lost"}
    kept = [entry for entry in log if entry["what"] == "kept" and entry["digest"] not in lost]
    sent = [entry for entry in log if entry["what"] == "sent"]
    for entry in sent:
        digests[entry["number"]].add(entry["digest"])
        assert entry["digest"] in {reply["digest"] for reply in kept}, "sent, and not kept"
    assert all(len(both) == 1 for both in digests.values()), "two noise draws for one round"
    return kept


def charged_releases(directory, name, settings):
    """Returns the number of rounds and sums that a ledger has; checks its budget."""
    with PrivacyLedger(directory / f"{name}.ledger", read_only=True) as ledger:
        assert ledger.epsilon(DELTA) <= settings.epsilon * (1.0 + 1e-9)
        steps = collections.Counter()
        for entry in ledger.entries:
            steps[entry.plan.purpose.split()[0]] += entry.steps
    assert steps.keys() <= {"releases", "sums"}
    assert steps["sums"] in (0, NUM_RELEASES)
    assert steps["releases"] % STEPS == 0
    assert steps["releases"] <= settings.allowed * STEPS
    return steps["releases"] // STEPS + steps["sums"] // NUM_RELEASES


def used_changes(server, name, kept):
    """Returns how many changes of a hospital are in the posterior; checks that they are those kept, each once, in order."""
    terms, used = server.terms, 0
    factor = Factor.one(terms.prior.num, full_rank=terms.prior.full_rank)
    for update in server.history:
        if name in update.hospitals:
            assert used < len(kept), "used, and not kept, or twice"
            reply = kept[used]
            share = server.schedule.share(reply["number"]) * update.limited.get(name, 1.0)
            factor *= Factor(**reply["change"]) ** share
            used += 1
        rest = (update.factors[name] / factor).norm
        assert rest <= 1e-6 * (1.0 + factor.norm), "another change than the one that was kept"
    return used
