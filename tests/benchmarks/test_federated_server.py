"""The seconds of a server: what is timed is a whole study, and hospitals are not."""

import time

import federated_server as server
import pytest


def test_a_study_is_played_whole_and_again_from_the_same_replies():
    """Catches replies that a later server refuses, and sums that no hospital is asked for."""
    row = server.measure(2, 2, 2)
    assert (row["replies"], row["sums"]) == (2 * (server.ROUNDS + 1), 2)
    whole = (
        row["study"]["wall"] + row["messages"]["first"]["wall"] + row["posterior"]["first"]["wall"]
    )
    assert row["first_study"]["wall"] == pytest.approx(whole)
    assert row["messages"]["least"]["cpu"] > 0.0


def test_hospitals_are_not_timed():
    study = server.study_of(1)

    def refuse(task, message):
        time.sleep(0.6)
        reply = server.Reply(
            task.study, task.hospital, task.request, task.number, None, reason="no"
        )
        return reply.to_bytes()

    _, seconds = server.played(study, {"a": refuse})
    assert seconds.wall < 0.5


def test_a_reply_that_is_refused_ends_it():
    with pytest.raises(SystemExit, match="took no reply of a"):
        server.played(server.study_of(1), {"a": lambda task, message: b"{}"})


def test_the_first_call_is_apart():
    seconds = [server.Seconds(9.0, 8.0), server.Seconds(1.0, 3.0), server.Seconds(2.0, 1.0)]
    found = server.summarised(seconds)
    assert found["first"] == {"wall": 9.0, "cpu": 8.0}
    assert found["least"] == {"wall": 1.0, "cpu": 1.0}
    assert found["median"] == {"wall": 1.5, "cpu": 2.0}
