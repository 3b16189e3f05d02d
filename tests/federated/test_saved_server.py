"""A server that is killed at any moment and continues from its folder, and hospitals that answer late."""

import json

import numpy as np
import pytest
from support.federation import ExactWorker, answer, prior_of, regression

from tfp_dpvi.federated import (
    Asynchronous,
    Factor,
    Sequential,
    Server,
    SiteSums,
    StudyTerms,
    Synchronous,
    Task,
)

TERMS = StudyTerms("saved", prior_of(3, full_rank=False))


class PaidWorker:
    """An exact hospital that counts what it pays, and repeats its latest reply for nothing."""

    def __init__(self, x, y):
        self.exact, self.paid, self.latest = ExactWorker(x, y), 0, ("", b"")

    def answer(self, message):
        task = Task.from_bytes(message, TERMS)
        if self.latest[0] not in (task.request, *task.unanswered):
            self.paid += 1
            self.latest = (task.request, answer(task, self.exact.refine(task)))
        return self.latest[1]


def hospitals(num=3):
    x, y = regression(num)
    return {f"h{number}": PaidWorker(*both) for number, both in enumerate(zip(x, y, strict=True))}


class KilledError(Exception):
    """The server's process ends here."""


def play(server, workers, kill_at=None):
    """Runs a study; the server is killed after that many calls of its methods."""
    calls = 0

    def alive():
        nonlocal calls
        calls += 1
        if calls == kill_at:
            raise KilledError

    while not server.finished:
        for task in server.due():
            alive()
            reply = workers[task.hospital].answer(task.to_bytes())
            alive()
            assert server.receive(task.hospital, reply), server.refused
            alive()
    return server


SCHEDULES = [kind(rounds=4) for kind in (Synchronous, Sequential, Asynchronous)]
NAMES = ["h0", "h1", "h2"]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_killed_at_every_moment_nothing_paid_for_is_lost(schedule, tmp_path):
    """Every reply that a hospital has paid for is in the result, and the result is the same."""
    whole = play(Server(TERMS, NAMES, schedule), hospitals())
    for moment in range(1, 3 * 3 * 4 + 1):
        folder, workers = tmp_path / str(moment), hospitals()
        with pytest.raises(KilledError):
            play(Server(TERMS, NAMES, schedule, folder=folder), workers, kill_at=moment)
        server = play(Server.load(folder, TERMS), workers)
        assert [one.paid for one in workers.values()] == [4, 4, 4], moment
        assert len(server.history) == len(whole.history)
        np.testing.assert_array_equal(server.posterior.shift, whole.posterior.shift)
        np.testing.assert_array_equal(
            server.history[1].posterior.mean, whole.history[1].posterior.mean
        )


def test_killed_again_and_again(tmp_path):
    whole, workers = play(Server(TERMS, NAMES, SCHEDULES[0]), hospitals()), hospitals()
    server, kills = Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path), 0
    while not server.finished:
        try:
            play(server, workers, kill_at=4)
        except KilledError:
            kills += 1
            server = Server.load(tmp_path, TERMS)
    assert kills >= 8
    assert [one.paid for one in workers.values()] == [4, 4, 4]
    np.testing.assert_array_equal(server.posterior.precision, whole.posterior.precision)


def test_what_is_saved_is_all_that_a_server_knows(tmp_path):
    server, workers = Server(TERMS, ["h0", "h1", "h2", "h3"], SCHEDULES[0]), hospitals(4)
    for number in range(2):
        for task in server.due():
            if (number, task.hospital) == (1, "h1"):
                server.give_up(task.request)
            elif (number, task.hospital) == (1, "h2"):
                server.receive("h2", answer(task, None, reason="no budget"))
            elif task.hospital == "h3":
                server.receive("h3", answer(task, Factor.one(3, full_rank=False), epsilon=np.inf))
            else:
                server.receive(task.hospital, workers[task.hospital].answer(task.to_bytes()))
    server.receive("h0", b"nonsense")
    server.save(tmp_path)
    again = Server.load(tmp_path, TERMS)
    for name in ("epsilon", "randomness", "retired", "refused", "schedule", "caveats"):
        assert getattr(again, name) == getattr(server, name), name
    for one, other in zip(server.history, again.history, strict=True):
        assert (one.number, one.hospitals, one.change, one.guard, one.epsilon, one.seconds) == (
            (other.number, other.hospitals, other.change, other.guard, other.epsilon, other.seconds)
        )
        assert one.factors.keys() == other.factors.keys()
    (first, *_), (second, *_) = server.due(), again.due()
    assert (first.number, first.hospital, first.unanswered) == (
        (second.number, second.hospital, second.unanswered)
    )


def test_a_state_is_replaced_at_once(tmp_path, monkeypatch):
    """A kill while it is written leaves the one before."""
    server = Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    before = (tmp_path / "state.json").read_bytes()
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(KilledError))
    with pytest.raises(KilledError):
        server.due()
    assert (tmp_path / "state.json").read_bytes() == before
    monkeypatch.undo()
    assert len(Server.load(tmp_path, TERMS).due()) == 3


def test_two_servers_do_not_continue_one_study(tmp_path):
    first = Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    second = Server.load(tmp_path, TERMS)
    second.due()
    with pytest.raises(RuntimeError, match="another server continues it"):
        first.due()
    with pytest.raises(ValueError, match=r"holds a study.*Server\.load"):
        Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda path: path.write_text("{"), "is no state"),
        (lambda path: path.write_text("{}"), "is no state"),
        (lambda path: path.unlink(), "holds no study"),
        (lambda path: path.write_text(path.read_text().replace('"h1"', "1")), "is no state"),
    ],
)
def test_a_state_that_is_none_is_refused(tmp_path, spoil, says):
    Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    spoil(tmp_path / "state.json")
    with pytest.raises(ValueError, match=says) as error:
        Server.load(tmp_path, TERMS)
    assert str(error.value).count("\n") <= 1


def test_a_state_of_another_study_is_refused(tmp_path):
    Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    other = StudyTerms("saved", prior_of(3, full_rank=False), local_steps=7)
    with pytest.raises(ValueError, match="local_steps"):
        Server.load(tmp_path, other)


# ------------------------------------------------------------------------------------------ late replies


def slow_study(schedule, *, slow="h2", late_by=1, num=3):
    """Plays a study in which one hospital's replies come `late_by` rounds after their request was given up."""
    workers, server = hospitals(num), Server(TERMS, [f"h{n}" for n in range(num)], schedule)
    under_way = []
    while not server.finished:
        for task in server.due():
            reply = workers[task.hospital].answer(task.to_bytes())
            if task.hospital == slow:
                server.give_up(task.request)
                under_way.append(reply)
            else:
                assert server.receive(task.hospital, reply), server.refused
        if len(under_way) > late_by:
            server.receive(slow, under_way.pop(0))
    for reply in under_way:
        server.receive(slow, reply)
    return server, workers


@pytest.mark.parametrize("late_by", [0, 1, 2])
def test_what_a_slow_hospital_pays_for_is_taken(late_by):
    """Each reply is, though it comes after its request was given up: the hospital never pays for two at once."""
    server, workers = slow_study(Synchronous(rounds=6, damping=0.5), late_by=late_by)
    taken = sum("h2" in update.hospitals for update in server.history)
    assert workers["h2"].paid == taken >= 2
    assert server.factors["h2"].precision.min() > 10.0
    assert server.refused == []


def test_a_reply_that_is_neither_the_latest_nor_unanswered_is_refused():
    server, workers = Server(TERMS, ["h0"], Synchronous(rounds=3)), hospitals(1)
    (task,) = server.due()
    reply = workers["h0"].answer(task.to_bytes())
    assert server.receive("h0", reply)
    assert not server.receive("h0", reply)
    (second,) = server.due()
    assert second.unanswered == ()
    assert server.receive("h0", workers["h0"].answer(second.to_bytes()))
    for request in ("f" * 32, task.request):
        assert not server.receive("h0", reply.replace(task.request.encode(), request.encode()))
    assert len(server.history) == 2
    assert len(server.refused) == 2


# ------------------------------------------------------------------------------------------ quorum


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_below_the_quorum_a_study_waits(schedule, caplog):
    """The log says so; no update is made and no hospital is asked for new noise until enough are back."""
    schedule = type(schedule)(rounds=4, quorum=2)
    server, workers = Server(TERMS, NAMES, schedule), hospitals()
    away = set()

    def turn():
        for task in server.due():
            if task.hospital in away:
                server.give_up(task.request)
            else:
                server.receive(task.hospital, workers[task.hospital].answer(task.to_bytes()))

    for _ in range(3):
        turn()
    updates = len(server.history)
    assert updates >= 1
    assert "waits" not in caplog.text
    away.update(("h1", "h2"))
    for _ in range(6):  # Until both are known to be away.
        turn()
    updates, paid = len(server.history), workers["h0"].paid
    for _ in range(20):
        turn()
        assert not server.finished
    assert (len(server.history), workers["h0"].paid) == (updates, paid)
    assert (
        "h1 is asked again, since fewer than quorum=2 hospitals answer: the study waits."
        in caplog.text
    )
    away.clear()
    while not server.finished:
        turn()
    assert len(server.history) > updates
    taken = {name: sum(name in update.hospitals for update in server.history) for name in NAMES}
    assert taken == {name: one.paid for name, one in workers.items()}
    assert all(3 <= times <= 4 for times in taken.values())


def test_an_outage_of_all_uses_up_no_round():
    server, workers = Server(TERMS, NAMES, Synchronous(rounds=2)), hospitals()
    requests = set()
    for _ in range(10):
        for task in server.due():
            requests.add(task.request)
            server.give_up(task.request)
    assert len(requests) == 3
    play(server, workers)
    assert len(server.history) == 2


def sums_of(task):
    """A reply with sums; the last phase needs nothing more."""
    halves = {"score": np.zeros((2, 3)), "matrix": np.zeros((2, 3, 3))}
    return answer(task, None, sums=SiteSums(60, np.eye(3), halves, dict.fromkeys(halves, 1.0)))


def in_last_phase(quorum):
    """Returns a server of two hospitals and its first tasks of the last phase."""
    terms = StudyTerms("sums", TERMS.prior, sums={"score": (3,), "matrix": (3, 3)})
    server = Server(terms, ["h0", "h1"], Synchronous(rounds=1, quorum=quorum))
    for task in server.due():
        server.receive(task.hospital, answer(task, Factor(np.zeros(3), np.ones(3))))
    tasks = server.due()
    assert all(task.last for task in tasks)
    return server, tasks


@pytest.mark.parametrize(("quorum", "away"), [(1, ("h0", "h1")), (2, ("h1",))])
def test_below_the_quorum_the_last_phase_waits(quorum, away):
    """With the same request: a hospital that has paid for its sums and kept them can still give them."""
    server, tasks = in_last_phase(quorum)
    requests = set()
    for _ in range(10):
        for task in tasks:
            if task.hospital in away:
                requests.add(task.request)
                server.give_up(task.request)
            else:
                assert server.receive(task.hospital, sums_of(task))
        tasks = server.due()
        assert not server.finished
    assert len(requests) == len(away)
    for task in tasks:
        assert server.receive(task.hospital, sums_of(task))
    assert server.finished
    assert server.sums.keys() == {"h0", "h1"}


def asked_in_vain(quorum, other_answers):
    """Runs a last phase in which one hospital is silent; returns how often that one was asked."""
    server, tasks = in_last_phase(quorum)
    asked = 0
    while tasks:
        for task in tasks:
            if task.hospital == "h0":
                server.receive("h0", other_answers(task))
            else:
                asked += 1
                server.give_up(task.request)
        tasks = server.due()
    assert server.finished
    return asked


def test_at_its_quorum_the_last_phase_asks_three_times():
    assert asked_in_vain(1, sums_of) == 3


def test_a_last_phase_whose_quorum_cannot_be_reached_ends():
    """One declines for good, so that nobody waits for the other one for ever."""

    def declines(task):
        return answer(task, None, reason="they are charged already")

    assert 3 <= asked_in_vain(2, declines) <= 4


def test_a_study_whose_quorum_cannot_be_reached_ends_and_says_so():
    server = Server(TERMS, NAMES, Synchronous(rounds=4, quorum=3))
    for task in server.due():
        server.receive(task.hospital, answer(task, Factor(np.zeros(3), np.ones(3))))
    a, b, c = server.due()
    server.receive(a.hospital, answer(a, None, reason="no budget"))
    for task in (b, c):
        server.receive(task.hospital, answer(task, Factor(np.zeros(3), np.ones(3))))
    assert server.finished
    assert server.history[-1].hospitals == (b.hospital, c.hospital)  # They have paid.
    assert "2 hospitals of a quorum of 3" in " ".join(server.caveats)


def at_the_end(schedule, *, comes_back):
    """Plays a study without a last phase; h1 has paid for its last change and keeps it until it is asked so often."""
    schedule = type(schedule)(rounds=2)
    server, workers = Server(TERMS, NAMES, schedule), hospitals()
    kept, asked = {}, 0
    while tasks := server.due():
        for task in tasks:
            reply = workers[task.hospital].answer(task.to_bytes())
            if task.hospital != "h1" or task.number < schedule.rounds - 1:
                server.receive(task.hospital, reply)
                continue
            asked += 1
            assert kept.setdefault(task.request, reply) == reply
            if asked == comes_back:
                assert server.receive("h1", reply)
            else:
                server.give_up(task.request)
    assert server.finished
    assert len(kept) == 1
    return server, asked


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_what_a_silent_hospital_has_kept_is_asked_for_again_at_the_end(schedule):
    server, asked = at_the_end(schedule, comes_back=4)
    assert asked == 4
    assert sum("h1" in update.hospitals for update in server.history) == 2
    assert "has not answered" not in " ".join(server.caveats)


def one_of_two(answers, *, rounds=1, quorum=2):
    """Returns a server of two hospitals, of which h0 answers a round that h1 does not."""
    server = Server(TERMS, ["h0", "h1"], Synchronous(rounds=rounds, quorum=quorum, damping=1.0))
    first, second = server.due()
    server.receive("h0", answer(first, Factor(np.zeros(3), np.ones(3))))
    answers(server, second)
    return server


def test_what_is_held_is_taken_where_a_quorum_is_missed_by_a_refusal():
    def refuses(server, task):
        server.give_up(task.request)
        server.refuse("h1", "it refuses the task: other data")

    server = one_of_two(refuses)
    assert server.finished
    assert [update.hospitals for update in server.history] == [("h0",)]
    assert "fewer hospitals than a quorum of 2 answered" in " ".join(server.caveats)


def test_what_is_held_is_taken_with_a_smaller_quorum(tmp_path):
    server = one_of_two(lambda server, task: server.give_up(task.request))
    for _ in range(9):  # It waits, with the same request.
        (task,) = server.due()
        server.give_up(task.request)
    server.save(tmp_path)
    saved = (tmp_path / "state.json").read_bytes()
    again = Server.load(tmp_path, TERMS, schedule=Synchronous(rounds=1, quorum=1, damping=1.0))
    assert (tmp_path / "state.json").read_bytes() == saved, "to look at a study changes nothing"
    assert [update.hospitals for update in again.history] == [("h0",)]
    # Of the wait no request counts as one of those at the end.
    assert [again.due() and again.give_up(task.request) for _ in range(4)] == [None] * 3 + [[]]


def test_a_study_whose_last_phase_never_comes_asks_again_too():
    terms = StudyTerms("sums", TERMS.prior, sums={"score": (3,), "matrix": (3, 3)})
    server = Server(terms, NAMES, Synchronous(rounds=1, quorum=3))
    a, b, c = server.due()
    server.receive(a.hospital, answer(a, Factor(np.zeros(3), np.ones(3))))
    server.give_up(b.request)
    server.receive(c.hospital, answer(c, None, reason="no budget"))
    (again,) = server.due()
    assert again == b
    server.receive(b.hospital, answer(b, Factor(np.zeros(3), np.ones(3))))
    assert server.finished
    assert [update.hospitals for update in server.history] == [(a.hospital,), (b.hospital,)]


def test_a_sequential_study_waits_for_no_hospital_alone():
    """The first one never answers."""
    server = Server(TERMS, ["dead", "back"], Sequential(rounds=1))
    for _ in range(5):
        for task in server.due():
            server.give_up(task.request)
    assert {task.hospital for task in server.due()} == {"dead", "back"}


@pytest.mark.parametrize("gives_up", [True, False])
def test_a_hospital_that_answers_at_the_end_is_asked_for_nothing_new(gives_up):
    """It was rounds behind, and its last request is given up or not: nobody is left to correct what it would say."""
    server = Server(TERMS, ["slow", "quick"], Asynchronous(rounds=4))
    slow, quick = server.due()
    server.give_up(slow.request)
    while not server.is_closing:
        for task in [quick, *server.due()]:
            if task.hospital == "quick":
                server.receive("quick", answer(task, Factor(np.zeros(3), np.ones(3))))
            elif task.number < 3 or gives_up:
                server.give_up(task.request)
    again = server._members["slow"].unanswered[-1]
    if gives_up:
        assert server.due() == [again]
    assert server.receive("slow", answer(again, Factor(np.zeros(3), np.ones(3))))
    assert server.finished
    assert server.history[-1].hospitals == ("slow",)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_a_hospital_that_stays_away_at_the_end_is_named(schedule, tmp_path):
    server, asked = at_the_end(schedule, comes_back=0)
    assert asked == 1 + 3
    said = "h1 has not answered its last request: a change that it has paid for may be missing."
    assert said in server.caveats
    server.save(tmp_path)
    again = Server.load(tmp_path, TERMS)
    assert again.due() == []
    assert again.finished


def test_a_hospital_that_is_refused_every_time_does_not_keep_a_study_for_ever():
    server, asked = Server(TERMS, ["h0"], Synchronous(rounds=3)), 0
    while not server.finished:
        for task in server.due():
            asked += 1
            assert not server.receive("h0", answer(task, Factor(np.zeros(3), np.full(3, 1e9))))
            server.give_up(task.request)
    assert asked == 3
    assert len(server.refused) == 3


@pytest.mark.parametrize("quorum", [0, -1, 1.5, True])
def test_a_bad_quorum_is_refused(quorum):
    with pytest.raises((TypeError, ValueError), match="quorum"):
        Synchronous(quorum=quorum)


def test_a_state_is_json_that_a_person_can_read(tmp_path):
    server = play(Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path), hospitals())
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["updates"] == len(server.history) == len(list(tmp_path.glob("update-*.json")))
    assert state["hospitals"].keys() == set(NAMES)
    assert all(hospital["num_tasks"] == 4 for hospital in state["hospitals"].values())


# ------------------------------------------------------------------------------------------ after a restart


def test_a_reply_that_comes_before_what_was_under_way_is_sent_again(tmp_path):
    """Its hospital is asked no more in this round, and the others are."""
    workers = hospitals()
    tasks = Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path).due()
    server = Server.load(tmp_path, TERMS)
    assert server.receive("h0", workers["h0"].answer(tasks[0].to_bytes()))
    assert not server.history
    assert [task.request for task in server.due()] == [task.request for task in tasks[1:]]
    for task in tasks[1:]:
        assert server.receive(task.hospital, workers[task.hospital].answer(task.to_bytes()))
    assert server.history[0].hospitals == ("h0", "h1", "h2")


def test_a_reply_that_is_repeated_after_a_restart_is_no_fault(tmp_path):
    server = Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    (task, *_) = server.due()
    reply = hospitals()["h0"].answer(task.to_bytes())
    assert server.receive("h0", reply)
    again = Server.load(tmp_path, TERMS)
    assert not again.receive("h0", reply)
    assert again.refused == []


def test_a_hospital_that_was_dropped_stays_so_in_the_file(tmp_path):
    server = Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    for task in server.due():
        server.receive(task.hospital, answer(task, Factor(np.zeros(3), np.ones(3))))
    server.drop("h1")
    kept = json.loads((tmp_path / "state.json").read_text())["hospitals"]["h1"]
    assert kept["factor"]["precision"] == [0.0] * 3
    again = Server.load(tmp_path, TERMS)
    again.join("h1")
    assert list(again.factors) == ["h0", "h2"]
    assert again.epsilon == server.epsilon == dict.fromkeys(NAMES, 1.0)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "another version of this library; end the study with that one"),
        ({"hospitals": {"h0": {}}}, "a hospital lacks the fields"),
        ({"hospitals": []}, "hospitals is no JSON object"),
        ({"refused": "text"}, "refused is no list of texts"),
    ],
)
def test_a_state_of_other_fields_is_refused_in_words(tmp_path, change, says):
    Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    path = tmp_path / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ValueError, match=f"is no state of this study: .*{says}") as error:
        Server.load(tmp_path, TERMS)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_tasks", "3"), ("epsilon", "1"), ("held", [1.0]), ("unanswered", [{}]), ("retired", 1)],
)
def test_a_hospital_whose_state_is_none_is_refused(tmp_path, field, value):
    Server(TERMS, NAMES, SCHEDULES[0], folder=tmp_path)
    path = tmp_path / "state.json"
    state = json.loads(path.read_text())
    state["hospitals"]["h1"][field] = value
    path.write_text(json.dumps(state))
    with pytest.raises(ValueError, match="is no state of this study"):
        Server.load(tmp_path, TERMS)
