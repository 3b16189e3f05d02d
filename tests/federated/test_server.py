"""The server with exact hospitals: the pooled posterior, schedules, and two broken servers that the same checks catch."""

import dataclasses
import logging
import subprocess
import sys

import numpy as np
import pytest
from support.federation import ExactWorker, answer, federation, play, prior_of, regression

from tfp_dpvi.federated import (
    Asynchronous,
    Factor,
    Sequential,
    Server,
    StudyTerms,
    Synchronous,
    Task,
)


def distance(server, pooled):
    """The largest difference of natural parameters, relative to the pooled ones."""
    left = server.posterior / pooled
    return max(
        np.abs(left.shift).max() / np.abs(pooled.shift).max(),
        np.abs(left.precision).max() / np.abs(pooled.precision).max(),
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_pooled_posterior_after_one_synchronous_round(seed):
    """Conjugate, full rank, exact workers, damping 1: to 1e-9."""
    server, _, pooled = federation(seed=seed)
    assert distance(server, pooled) <= 1e-9
    np.testing.assert_allclose(server.posterior.mean, pooled.mean, rtol=1e-9)
    assert len(server.history) == 1
    assert server.history[0].guard == 1.0


@pytest.mark.parametrize(
    "schedule", [Sequential(rounds=1, damping=1.0), Asynchronous(rounds=1, damping=1.0)]
)
def test_the_other_schedules_come_to_the_same(schedule):
    server, _, pooled = federation(schedule=schedule)
    assert distance(server, pooled) <= 1e-9


def test_mean_field_hospitals_agree_after_five_rounds():
    """Five hospitals: within 0.02 standard deviations of the pooled mean-field posterior, which has the same mean."""
    server, _, pooled = federation(full_rank=False, schedule=Synchronous(rounds=5, damping=1.0))
    exact = Factor(pooled.mean * np.diag(pooled.precision), np.diag(pooled.precision))
    assert np.abs((server.posterior.mean - exact.mean) / exact.stddev).max() <= 0.02
    np.testing.assert_allclose(server.posterior.stddev, exact.stddev, rtol=0.02)


def test_damping_takes_its_share_of_the_way():
    server, terms, pooled = federation(schedule=Synchronous(rounds=3, damping=0.5, decay=0.64))
    left = (1 - 0.5) * (1 - 0.4) * (1 - 0.32)
    expected = pooled.precision - left * (pooled.precision - terms.prior.precision)
    np.testing.assert_allclose(server.posterior.precision, expected, rtol=1e-9)


class OwnFactorStays(Server):
    """A mutation: the cavity still has the hospital's own factor in it."""

    def due(self):
        return [
            Task(t.study, t.hospital, t.request, t.number, t.posterior, cavity=t.posterior)
            for t in super().due()
        ]


class DampedTwice(Server):
    """A mutation: damping is applied to the change, and to the sum once more."""

    def _settle(self):
        for name, change in self._held().items():
            again = change ** self.schedule.share(0)
            self._members[name] = dataclasses.replace(self._members[name], held=again)
        super()._settle()


@pytest.mark.parametrize("broken", [OwnFactorStays, DampedTwice])
def test_a_mutation_is_caught(broken):
    schedule = Synchronous(rounds=2, damping=0.5)
    (server, _, _), (sound, _, pooled) = (
        federation(broken, schedule=schedule),
        federation(schedule=schedule),
    )
    expected = pooled.precision - 0.25 * (pooled.precision - np.eye(3) / 4.0)
    np.testing.assert_allclose(sound.posterior.precision, expected, rtol=1e-9)
    assert np.abs(server.posterior.precision / expected - 1.0).max() > 0.05


def test_posterior_is_always_prior_times_factors():
    """Checks it for arbitrary changes, and with a guard that bites."""
    rng = np.random.default_rng(0)
    terms = StudyTerms("wild", prior_of(3, full_rank=True))

    class Wild:
        def refine(self, task):
            matrix = 3.0 * rng.normal(size=(3, 3))
            return Factor(rng.normal(size=3), matrix + matrix.T)

    names = [f"h{number}" for number in range(4)]
    server = play(
        Server(terms, names, Asynchronous(rounds=20, damping=1.0)),
        dict.fromkeys(names, Wild()),
        terms,
    )
    assert len(server.history) == 80
    assert min(round.guard for round in server.history) < 1.0
    for round in server.history:
        total = terms.prior
        for factor in round.factors.values():
            total = total * factor
        np.testing.assert_array_equal(total.precision, round.posterior.precision)
        assert round.posterior.exceeds(terms.floor)


def test_a_lost_hospital_costs_one_wait_and_a_late_one_starts_at_one():
    """The others go on, its factor stays, it comes back to it; the late joiner's factor is 1 and it is asked from then on."""
    x, y = regression(4)
    workers = {
        f"h{number}": ExactWorker(*both) for number, both in enumerate(zip(x, y, strict=True))
    }
    terms = StudyTerms("lossy", prior_of(3, full_rank=True))
    server = Server(terms, ["h0", "h1", "h2"], Synchronous(rounds=4, damping=1.0))
    for number in range(4):
        tasks = server.due()
        assert {task.number for task in tasks} == {number}
        kept = server.factors["h1"]
        for task in tasks:
            if (number, task.hospital) == (1, "h1"):
                server.give_up(task.request)
            else:
                assert server.receive(
                    task.hospital, answer(task, workers[task.hospital].refine(task))
                )
        if number == 1:
            np.testing.assert_array_equal(server.factors["h1"].precision, kept.precision)
            assert server.history[-1].hospitals == ("h0", "h2")
            server.join("h3")
            assert not server.factors["h3"].precision.any()
    assert server.finished
    flat = x.reshape(-1, 3)
    np.testing.assert_allclose(
        server.posterior.precision, np.eye(3) / 4.0 + flat.T @ flat, rtol=1e-9
    )


def test_sequential_asks_one_at_a_time():
    terms = StudyTerms("order", prior_of(3, full_rank=True))
    one = Factor.one(3, full_rank=True)
    server, order = Server(terms, ["a", "b"], Sequential(rounds=2)), []
    while not server.finished:
        (task,) = server.due()
        assert server.due() == []
        order.append(task.hospital)
        server.receive(task.hospital, answer(task, one))
    assert order == ["a", "b", "a", "b"]


def test_an_asynchronous_study_keeps_the_rounds_of_a_hospital_that_is_away():
    """Its node may report a failure at once, again and again: it is asked at most `most_ahead` times more than the others."""
    terms, one = StudyTerms("away", prior_of(3, full_rank=True)), Factor.one(3, full_rank=True)
    server, asked = Server(terms, ["away", "here"], Asynchronous(rounds=9)), {"away": 0, "here": 0}
    while asked["here"] < 6:
        for task in (tasks := server.due()):
            asked[task.hospital] += 1
            if task.hospital == "here":
                here = task
            else:
                server.give_up(task.request)
        assert asked["away"] <= asked["here"] + 2
        assert tasks or server.receive("here", answer(here, one))


def test_a_quick_hospital_waits_for_one_that_answers_slowly_but_not_for_one_that_is_away():
    """Else the slow ones' last changes come when the quick ones' rounds are over, and no one corrects them."""
    terms, one = StudyTerms("ahead", prior_of(3, full_rank=True)), Factor.one(3, full_rank=True)
    server = Server(terms, ["slow", "quick"], Asynchronous(rounds=9, most_ahead=2))
    slow, quick = server.due()
    for _ in range(2):
        assert server.receive("quick", answer(quick, one))
        (quick,) = server.due()
    assert server.receive("quick", answer(quick, one))
    assert server.due() == []
    assert server.receive("slow", answer(slow, one))
    (slow,), (quick,) = server.due(), server.due()
    assert (slow.number, quick.number) == (1, 3)
    server.give_up(slow.request)
    assert [task.hospital for task in server.due()] == [
        "slow"
    ]  # It is behind, so that it is asked again at once.
    for _ in range(5):
        assert server.receive("quick", answer(quick, one))
        quick = next(task for task in server.due() if task.hospital == "quick")
    assert quick.number == 8
    slow = server._members["slow"].unanswered[-1].request
    assert server.receive("quick", answer(quick, one))
    server.give_up(slow)
    # At the end nobody waits for its other rounds; it is asked for the one that it may have kept.
    for _ in range(3):
        (again,) = server.due()
        assert again.request == slow
        server.give_up(slow)
    assert server.finished


def test_however_many_hospitals_there_are_no_change_of_one_that_answers_is_refused():
    terms, one = StudyTerms("many", prior_of(3, full_rank=True)), Factor.one(3, full_rank=True)
    server, order = (
        Server(terms, [f"h{number}" for number in range(200)], Asynchronous(rounds=2)),
        [],
    )
    while not server.finished:
        order += server.due()
        task = order.pop(0)
        assert server.receive(task.hospital, answer(task, one))
    assert len(server.history) == 400


def test_a_hospital_that_joins_starts_in_the_round_of_those_that_answer():
    terms, one = StudyTerms("joins", prior_of(3, full_rank=True)), Factor.one(3, full_rank=True)
    server = Server(terms, ["gone", "here"], Asynchronous(rounds=9))
    gone, here = server.due()
    server.give_up(gone.request)
    for _ in range(4):
        assert server.receive("here", answer(here, one))
        here = next(task for task in server.due() if task.hospital == "here")
    server.join("new")
    assert next(task for task in server.due() if task.hospital == "new").number == 5


def test_a_hospital_that_declines_is_not_asked_again():
    terms = StudyTerms("short", prior_of(3, full_rank=True))
    server = Server(terms, ["a", "b"], Synchronous(rounds=3))
    a, b = server.due()
    assert server.receive("a", answer(a, None, reason="the budget is spent"))
    assert server.receive("b", answer(b, Factor.one(3, full_rank=True)))
    assert [task.hospital for task in server.due()] == ["b"]
    assert server.retired == {"a": "the budget is spent"}


def test_the_prior_is_refined_for_free():
    """A prior that is not normal is a factor of its own, which the server replaces after each update."""
    terms = StudyTerms("site", prior_of(3, full_rank=False))
    wanted = Factor(np.ones(3), np.full(3, 0.3))
    server = Server(
        terms, ["a"], Synchronous(rounds=1), refine_prior=lambda cavity, present: wanted
    )
    (task,) = server.due()
    server.receive("a", answer(task, Factor.one(3, full_rank=False)))
    np.testing.assert_allclose(server.prior.precision, wanted.precision)
    np.testing.assert_allclose(server.posterior.shift, wanted.shift)


UNSETTLED = "the posterior may not have settled"


def moved_by(changes, schedule):
    """Returns a server whose hospitals send these changes, in posterior standard deviations.

    Every hospital first contributes the same precision. Each later change is
    `(shift, factor of the precision)`, sent in turn.
    """
    prior = Factor(np.zeros(2), np.full(2, 1e-6))
    terms = StudyTerms("moves", prior, most_change=1e9)
    server = Server(terms, ["a", "b"], schedule)
    for number, task in enumerate(turns(server)):
        if number < 2:
            change = Factor(np.zeros(2), np.full(2, 50.0))  # Together: a standard deviation of 0.1.
        else:
            shift, factor = changes[number - 2]
            present = server.posterior.precision
            change = Factor(shift * np.sqrt(present), (factor - 1.0) * present)
        assert server.receive(task.hospital, answer(task, change)), server.refused
    return server


def turns(server):
    """Yields the tasks of a study to its end, in the order in which they were sent."""
    sent = []
    while not server.finished:
        sent += server.due()
        yield sent.pop(0)


SCHEDULES = [
    kind(rounds=3, damping=1.0, decay=1.0) for kind in (Synchronous, Sequential, Asynchronous)
]
STAYS = (0.0, 1.0)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ([(5.0, 1.0), STAYS, STAYS, STAYS], None),  # Not in the last round.
        (
            [STAYS, STAYS, (0.6, 1.0), (0.6, 1.0)],
            "still moved a mean by 1.2 of its standard deviations",
        ),
        ([STAYS, STAYS, (0.3, 1.0), (0.3, 1.0)], None),
        ([STAYS, STAYS, (1.5, 1.0), (-1.5, 1.0)], None),  # The updates of one round cancel.
        ([STAYS, STAYS, (0.0, 9.0), STAYS], "still changed a standard deviation by a factor of 3"),
        ([STAYS, STAYS, STAYS, (0.0, 0.9)], None),
    ],
)
def test_a_study_that_still_moves_at_its_end_says_so(schedule, changes, says, caplog):
    """In the log and in `caveats`, by one update of every hospital, in every schedule's order."""
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        server = moved_by(changes, schedule)
    logged = [record.getMessage() for record in caplog.records]
    assert logged == list(server.caveats)
    assert len(logged) == (says is not None)
    assert says is None or (UNSETTLED in logged[0] and says in logged[0])


def test_a_round_is_one_of_the_hospitals_that_still_answer():
    """One that left in the first round does not make the last round as long as the study."""
    terms, moves = (
        StudyTerms("gone", prior_of(3, full_rank=True)),
        Factor(np.ones(3), 99.0 * np.eye(3)),
    )
    stays = Factor.one(3, full_rank=True)
    server = Server(
        terms, ["gone", "here", "spent"], Asynchronous(rounds=6, damping=1.0, decay=1.0)
    )
    for number, task in enumerate(turns(server)):
        if task.hospital == "gone" and number > 2:
            server.give_up(task.request)
        elif task.hospital == "spent" and number > 2:
            server.receive("spent", answer(task, None, reason="the budget is spent"))
        else:
            assert server.receive(task.hospital, answer(task, moves if number < 3 else stays))
    (caveat,) = server.caveats
    assert caveat.startswith("gone has not answered its last request")
    assert {name for one in server.history[-3:] for name in one.hospitals} == {"here"}


def test_a_server_needs_no_tensorflow():
    code = (
        "import sys, numpy as np\n"
        "from tfp_dpvi.federated import Factor, Reply, Server, Synchronous, StudyTerms\n"
        "terms = StudyTerms('s', Factor(np.zeros(2), np.ones(2)))\n"
        "server = Server(terms, ['a'], Synchronous())\n"
        "task, = server.due()\n"
        "reply = Reply(task.study, 'a', task.request, 0, Factor.one(2, full_rank=False), 1.0, 1e-5)\n"
        "assert server.receive('a', reply.to_bytes())\n"
        "assert not [name for name in sys.modules if name.startswith(('tensorflow', 'keras', 'tf_keras', 'flwr'))]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("hospitals", [[], (), {}, iter(())])
def test_a_study_of_no_hospitals_is_warned_of(hospitals):
    """It is finished before it begins, unless they join later, as 0.2 wrote it for Flower."""
    terms = StudyTerms("empty", prior_of(3, full_rank=True))
    with pytest.warns(FutureWarning, match="hospitals is empty: pass None"):
        Server(terms, hospitals, Synchronous())
    server = Server(terms, None, Synchronous())
    server.join("a")
    assert [task.hospital for task in server.due()] == ["a"]


def test_one_text_is_its_letters_for_now_and_says_so():
    terms = StudyTerms("text", prior_of(3, full_rank=True))
    with pytest.warns(FutureWarning, match="hospitals='AB' is a text, whose letters are taken"):
        server = Server(terms, "AB", Synchronous())
    assert [task.hospital for task in server.due()] == ["A", "B"]
    with pytest.raises(TypeError, match="hospital=3"):
        Server(terms, [3], Synchronous())
