"""Server, nodes and workers of a federation, killed at random moments: nothing paid for is lost, and no budget is passed."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import time

import numpy as np
import pytest
from support import kills
from support.kills import Books, Federation, Forks, RemoteForks, Settings, check_study

from tfp_dpvi.federated import Hospital, Server, hospital

# Those at whose quorum all hospitals are wait for each; the others go on, and their hospitals allow no further round.
ALL = [
    Settings(kind, rounds=rounds, quorum=3, allowed=40)
    for kind, rounds in [("Synchronous", 6), ("Asynchronous", 3), ("Sequential", 1)]
]
SOME = [
    Settings(kind, rounds=6, quorum=1, allowed=6)
    for kind in ("Synchronous", "Asynchronous", "Sequential")
]


def kill_many(directory, forks, studies, kills, *, seed, most=12, show=lambda text: None):
    """Runs studies until so many kills are done; returns the kills, the books, and the number of studies."""
    rng, done, books = np.random.default_rng(seed), collections.Counter(), Books()
    number = 0
    while sum(done.values()) < kills:
        left = min(most, kills - sum(done.values()))
        settings = studies[number % len(studies)]
        federation = Federation(directory / str(number), forks, settings, rng, left)
        federation.play()
        done += federation.kills
        books += check_study(federation)
        number += 1
        show(f"{number} {settings.schedule} {settings.make} {sum(done.values())} kills, {books}")
    return done, books, number


def test_six_kills(tmp_path):
    study = Settings("Synchronous", rounds=3, quorum=2, allowed=9, hospitals=("h0", "h1"))
    done, books, studies = kill_many(tmp_path, Forks(), [study], 6, seed=0)
    assert sum(done.values()) == 6
    assert books.used == books.kept == 2 * (3 + 1) * studies
    assert books.charged <= books.kept + 6


class KilledOnce(Federation):
    """One process of a study of two hospitals is killed, at one of its moments, and nothing else is."""

    def __init__(self, directory, forks, process, moment):
        study = Settings("Synchronous", rounds=1, quorum=1, allowed=2, hospitals=("h0", "h1"))
        super().__init__(directory / "0", forks, study, None, 0)
        self.process, self.moment = process, moment

    def start(self, role, name):
        if role == "server":  # Once all workers listen, so that none misses the round.
            while not all((self.directory / f"{each}.sock").exists() for each in ("h0", "h1")):
                time.sleep(0.002)
        is_back = bool(self.kills)
        # Longer than three of a server's pauses, as in earnest.
        time.sleep(0.5 if is_back else 0.0)
        self.launch(role, name, self.moment if (role, name) == self.process and not is_back else 0)


@pytest.mark.parametrize(
    ("process", "moment"),
    [
        # It has kept its sums, and they have not left: the last of six moments of its second answer. The other hospital
        # is quorum enough: the server asked three times within a second, and ended without these sums.
        (("worker", "h0"), 12),
        (("server", ""), 10),  # It has saved its start and that both hospitals joined.
    ],
)
def test_what_a_process_that_is_killed_once_leaves_is_taken(tmp_path, process, moment):
    federation = KilledOnce(tmp_path, Forks(), process, moment)
    federation.play()
    assert federation.kills == {(process[0], "write"): 1}
    books = check_study(federation)
    assert books.used == books.charged == 4


class KilledWithANode(KilledOnce):
    """The server's machine takes a node with it, which joins again after more than three of the server's pauses."""

    def start(self, role, name):
        node, path = ("node", "h0"), self.directory / "server" / "state.json"
        if self.kills:
            self.was_last = json.loads(path.read_text())["place"] is not None
            self.end(node)
            saved = path.stat().st_mtime_ns
        super().start(role, name)
        if self.kills:
            while path.stat().st_mtime_ns == saved:  # Until it asks.
                time.sleep(0.002)
            time.sleep(0.5)
            self.launch(*node)


def test_a_node_that_joins_late_in_the_last_phase_is_asked(tmp_path):
    """Its worker has kept its sums: three requests were over before it had joined, and the study ended without them."""
    # Killed when it writes the first sums that came: it awaits those of both hospitals.
    federation = KilledWithANode(tmp_path, Forks(), ("server", ""), 25)
    federation.play()
    assert federation.was_last
    books = check_study(federation)
    assert books.used == books.charged == 4


# ------------------------------------------------------------------------------------------ what the check sees


def charges_nothing(role):
    Hospital._round = lambda self: contextlib.nullcontext()


def keeps_no_reply(role):
    hospital.replace_file = lambda path, text: None


def forgets_its_reply(role):
    Hospital._read_last = lambda self: {}


def sends_before_it_saves(role):
    due = Server.due

    def unsaved(self):
        self._store, store = None, self._store
        tasks = due(self)
        self._store = store
        return tasks

    Server.due = unsaved


def takes_a_reply_twice(role):
    hold = Server._hold
    Server._hold = lambda self, task, change: hold(self, task, change**2.0)


def waits_for_no_sums(role):
    """As it was: three requests are over before a worker that was killed is back."""
    wait = Server._may_come_back
    Server._may_come_back = lambda self: self.place is None and wait(self)
    kills.TIMEOUT = 0.1
    time.sleep(0.5 if role == "worker" else 0.0)


@pytest.mark.parametrize(
    ("mutate", "says"),
    [
        (charges_nothing, "is charged for other rounds than it has kept"),
        (keeps_no_reply, "sent, and not kept"),
        (forgets_its_reply, "two noise draws|kept and not used|another change"),
        (takes_a_reply_twice, "another change"),
    ],
)
def test_the_check_sees_a_broken_library(tmp_path, mutate, says):
    with pytest.raises(AssertionError, match=says):
        kill_many(tmp_path, Forks(mutate), ALL, 60, seed=1)


def test_the_check_sees_a_server_that_sends_before_it_saves(tmp_path):
    """Killed after its tasks have left, it asks anew for rounds that workers have paid for."""
    federation = KilledOnce(tmp_path, Forks(sends_before_it_saves), ("server", ""), 10)
    federation.play()
    with pytest.raises(AssertionError, match="two noise draws for one round"):
        check_study(federation)


@pytest.mark.slow
def test_the_check_sees_a_last_phase_that_does_not_wait(tmp_path):
    """A kill must hit a worker between its sums and their way to the server, which takes many studies."""
    with pytest.raises(AssertionError, match=r"ended before its study|kept and not used"):
        kill_many(tmp_path, Forks(waits_for_no_sums), ALL[2:], 300, seed=1, most=8)


# ------------------------------------------------------------------------------------------ three hundred


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_hundred_kills(tmp_path):
    """Workers that run TensorFlow, with and without the last phase."""
    makes = ("with_sums", "rounds_alone")
    studies = [dataclasses.replace(one, make=make) for one in (*ALL, *SOME) for make in makes]
    forks = RemoteForks()
    try:
        done, books, number = kill_many(tmp_path, forks, studies, 300, seed=2, most=20, show=print)
    finally:
        forks.close()
    roles = collections.Counter()
    for (role, _), times in done.items():
        roles[role] += times
    print(f"{sum(done.values())} kills {dict(roles)} in {number} studies: {books}")
    print({" ".join(kind): times for kind, times in sorted(done.items())})
    assert min(roles.values()) >= 40
    assert books.used >= 150
