"""A hospital that lies within the public cap: it stops no one, owns no study, is named, and can be dropped."""

import dataclasses

import numpy as np
import pytest
from support.federation import answer

from tfp_dpvi.federated import Factor, Reply, Server, SiteSums, StudyTerms, Synchronous
from tfp_dpvi.federated.factors import Cap

TERMS = StudyTerms("t", Factor(np.zeros(3), np.full(3, 0.25)), clip=2.0)
# What the records of each honest hospital say; there are 320 of them.
TARGET = Factor(np.array([80.0, -40.0, 0.0]), np.full(3, 80.0))
HONEST = ["A", "B", "C"]
NUM = dict.fromkeys([*HONEST, "M"], 320)
rng = np.random.default_rng(0)
LIES = {
    "precision -1e6": Factor(np.zeros(3), np.full(3, -1e6)),
    "-1e6 on one coefficient": Factor(np.zeros(3), np.array([0.0, 0.0, -1e6])),
    "mean 7 at precision 1e6": Factor(np.full(3, 3.5e6), np.full(3, 5e5)),
    "a mean of a million": Factor(np.full(3, 5e6), np.zeros(3)),
}


def run(lie, rounds=10, **settings):
    server = Server(TERMS, [*HONEST, "M"], Synchronous(rounds), **settings)
    while not server.finished:
        for task in server.due():
            own = server.factors[task.hospital]
            change = lie if task.hospital == "M" else TARGET / own
            assert server.receive(task.hospital, answer(task, change)), server.refused
    return server


def alone():
    """The honest hospitals' posterior after the same rounds."""
    server = Server(TERMS, HONEST, Synchronous(10))
    while not server.finished:
        for task in server.due():
            server.receive(task.hospital, answer(task, TARGET / server.factors[task.hospital]))
    return server.posterior


@pytest.mark.parametrize("declared", [None, NUM], ids=["no cap", "cap"])
@pytest.mark.parametrize("name", LIES)
def test_who_takes_precision_away_stops_no_one_else(name, declared):
    server, honest = run(LIES[name], num_records=declared), alone()
    for hospital in HONEST:
        np.testing.assert_allclose(
            server.factors[hospital].precision, honest.precision / 3, rtol=0.01
        )
    # Nobody takes away more than half of the precision that the others have.
    assert server.posterior.exceeds(0.49 * honest.precision)


@pytest.mark.parametrize("name", LIES)
def test_who_says_more_than_its_records_can_is_named_and_does_not_own_the_study(name, caplog):
    server = run(LIES[name], num_records=NUM)
    named = set().union(*(update.limited for update in server.history))
    assert named == {"M"}
    assert "of the change of M" in caplog.text
    cap = 10.0 * 320 * 4.0
    assert np.abs(server.factors["M"].precision).sum() <= cap
    # At most what ten times as many honest records could do: no mean of a million.
    assert np.abs(server.posterior.mean).max() < 30.0
    server.drop("M")
    np.testing.assert_allclose(server.posterior.mean, alone().mean, atol=1e-6)


def test_an_honest_hospital_is_never_limited():
    """Nor where all together take precision away and each alone does not."""
    server = run(TARGET / Factor.one(3, full_rank=False) ** 1.0, num_records=NUM, rounds=3)
    assert all(update.limited == {} for update in server.history)
    terms = StudyTerms("t", Factor(np.zeros(1), np.ones(1)))
    server = Server(terms, ["A", "B"], Synchronous(1, damping=1.0))
    for task, precision in zip(server.due(), (-0.4, -0.4), strict=True):
        server.receive(task.hospital, answer(task, Factor(np.zeros(1), np.array([precision]))))
    assert server.history[0].limited == {"A": 0.5, "B": 0.5}
    assert server.posterior.exceeds(terms.floor)


def test_leaving_one_out_costs_nothing_and_changes_nothing():
    server = run(Factor.one(3, full_rank=False))
    before = server.posterior
    without = server.without("A")
    np.testing.assert_allclose(without.precision, (before / server.factors["A"]).precision)
    np.testing.assert_array_equal(server.posterior.precision, before.precision)
    with pytest.raises(ValueError, match="hospital='Z' is not in the study"):
        server.without("Z")


def test_a_hospital_is_dropped_in_the_middle_of_a_round(tmp_path):
    """The others' round ends without it, its messages are refused, and it does not come back."""
    server = Server(TERMS, ["A", "M"], Synchronous(2), folder=tmp_path)
    a, m = server.due()
    assert server.receive("A", answer(a, TARGET))
    server.drop("M")
    assert [update.hospitals for update in server.history] == [(), ("A",)]
    assert not server.receive("M", answer(m, TARGET))
    assert "'M' is not in the study" in server.refused[0]
    server.join("M")
    assert list(server.factors) == ["A"]
    again = Server.load(tmp_path, TERMS)
    assert list(again.factors) == ["A"]
    (task,) = again.due()
    assert again.receive("A", answer(task, TARGET / again.factors["A"]))
    assert again.finished
    assert again.retired == {"M": "it was dropped."}


def test_the_others_stay_proper_without_one_that_they_need():
    """Factors that are improper by themselves are weakened, all alike."""
    terms = StudyTerms("t", Factor(np.zeros(1), np.ones(1)))
    server = Server(terms, ["A", "B"], Synchronous(1, damping=1.0))
    for name, precision in {"A": 5.0, "B": -2.0}.items():
        factor = Factor(np.zeros(1), np.array([precision]))
        server._members[name] = dataclasses.replace(server._members[name], factor=factor)
    assert server.without("A").exceeds(terms.floor)
    server.drop("A")
    assert float(server.factors["B"].precision[0]) == -0.25


def test_a_cap_needs_a_clip_and_counts():
    free = StudyTerms("t", TERMS.prior)
    with pytest.raises(ValueError, match="num_records needs a study with a clip"):
        Server(free, ["A"], Synchronous(1), num_records={"A": 10})
    with pytest.raises(ValueError, match="num_records"):
        Server(TERMS, ["A"], Synchronous(1), num_records={"A": 0})
    assert Cap(10, 1.0).share(TERMS.prior, Factor.one(3, full_rank=False), TARGET) < 1.0


def test_sums_that_a_liar_had_refused_are_repeated_without_it():
    """Whoever answers first says in which coordinates sums are: dropped, it holds up nobody."""
    terms = StudyTerms(
        "sums", Factor(np.zeros(2), np.ones(2)), sums={"score": (2,), "matrix": (2, 2)}
    )
    server = Server(terms, ["liar", "a", "b"], Synchronous(rounds=1))

    def reply(task):
        halves = {"score": np.zeros((2, 2)), "matrix": np.tile(np.eye(2), (2, 1, 1))}
        whitening = np.eye(2) * (2.0 if task.hospital == "liar" else 1.0)
        sums = SiteSums(50, whitening, halves, {"score": 3.0, "matrix": 6.0})
        says = {"sums": sums} if task.last else {}
        change = None if task.last else Factor(np.ones(2), np.ones(2))
        parts = (task.study, task.hospital, task.request, task.number, change, 1.0, 1e-5)
        server.receive(task.hospital, Reply(*parts, **says).to_bytes())
        server.give_up(task.request)
        return task.request

    asked = []
    while not server.finished:
        asked += [reply(task) for task in server.due()]
    assert list(server.sums) == ["liar"]
    server.drop("liar")
    again = [reply(task) for task in server.due()]
    assert len(again) == 2
    assert set(again) < set(asked), "a hospital would pay for another request"
    assert sorted(server.sums) == ["a", "b"]
