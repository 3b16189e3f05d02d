"""Bad messages: each is refused in a sentence, and nothing changes at the server."""

import json
import pickle

import numpy as np
import pytest
from support.federation import answer, prior_of

from tfp_dpvi.federated import Factor, MessageError, Reply, Server, Synchronous, Task, Terms

TERMS = Terms("study", prior_of(3, full_rank=True), most_change=1e4)
ONE = Factor.one(3, full_rank=True)


def asked():
    server = Server(TERMS, ["a", "b"], Synchronous(rounds=2))
    return server, *server.due()


def edited(message, **changes):
    """Returns a message with fields of its header changed; None takes a field away."""
    magic, header, rest = message.split(b"\n", 2)
    fields = {k: v for k, v in {**json.loads(header), **changes}.items() if v is not None}
    return b"\n".join([magic, json.dumps(fields).encode(), rest])


def with_numbers(message, place, value):
    """Returns a message with one of its numbers replaced."""
    size = 8 * (3 + 9)
    numbers = np.frombuffer(message[-size:], "<f8").copy()
    numbers[place] = value
    return message[:-size] + numbers.tobytes()


def nested(depth):
    return [nested(depth - 1)] if depth else []


BAD = {
    "NaN in the shift": (lambda m: with_numbers(m, 0, np.nan), "not finite"),
    "infinity in the precision": (lambda m: with_numbers(m, 5, np.inf), "not finite"),
    "not symmetric": (lambda m: with_numbers(m, 4, 7.0), "not symmetric"),
    "wrong shape": (lambda m: edited(m, shapes=[[[2], [2, 2]]]), "are not those of the study"),
    "another family": (lambda m: edited(m, shapes=[[[3], [3]]]), "are not those of the study"),
    "shapes are no list": (lambda m: edited(m, shapes={"a": 1}), "are not those of the study"),
    "two factors": (lambda m: edited(m, shapes=[[[3], [3, 3]]] * 2), "bytes of numbers"),
    "wrong dtype": (lambda m: edited(m, dtype="<f4"), "dtype='<f4'"),
    "object dtype": (lambda m: edited(m, dtype="|O"), "dtype="),
    "truncated": (lambda m: m[:-1], "bytes of numbers"),
    "one byte more": (lambda m: m + b"\0", "bytes of numbers"),
    "oversized": (lambda m: m + bytes(10**6), "at most"),
    "pickled": (lambda m: pickle.dumps({"change": np.zeros(3)}), "not of this library's format"),
    "pickled numbers": (lambda m: m.split(b"\n", 2)[0] + b"\n" + pickle.dumps(np.zeros(3)), "is no reply"),
    "an endless header": (lambda m: m[:21] + b"[" * 4000, "is no reply"),
    "no text": (lambda m: m.decode("latin-1"), "not bytes"),
    "empty": (lambda m: b"", "not of this library's format"),
    "a task": (lambda m: edited(m, kind="task"), "is no reply"),
    "a header that nests deeply": (lambda m: edited(m, shapes=nested(300)), "is no reply"),
    "a header that is a list": (lambda m: b"\n".join([m.split(b"\n")[0], b"[1]", b""]), "is no reply"),
    "a header that is no text": (lambda m: b"\n".join([m.split(b"\n")[0], b"\xff\xfe", b""]), "is no reply"),
    "another study": (lambda m: edited(m, study="0" * 32), "is not this one"),
    "epsilon missing": (lambda m: edited(m, epsilon=None), "epsilon is not a number"),
    "epsilon NaN": (lambda m: edited(m, epsilon="nan"), "must be at least 0"),
    "epsilon negative": (lambda m: edited(m, epsilon="-1.0"), "must be at least 0"),
    "epsilon beyond floats": (lambda m: edited(m, epsilon=10**400), "epsilon is not a number"),
    "epsilon a list": (lambda m: edited(m, epsilon=[1.0]), "epsilon is not a number"),
    "delta missing": (lambda m: edited(m, delta=None), "delta is not a number"),
    "a reason that is no text": (lambda m: edited(m, reason=7), "reason"),
    "a long reason": (lambda m: edited(m, reason="x" * 301), "reason"),
    "no number": (lambda m: edited(m, number=True), "not a count"),
    "a negative number": (lambda m: edited(m, number=-1), "not a count"),
    "number missing": (lambda m: edited(m, number=None), "not a count"),
    "a number with a fraction": (lambda m: edited(m, number=0.5), "not a count"),
    "another round": (lambda m: edited(m, number=1), "not that of the request"),
    "an unknown hospital": (lambda m: edited(m, hospital="c"), "is signed 'c'"),
    "a name of control characters": (lambda m: edited(m, hospital="a\x1b[2J"), "not a short text"),
    "hospital missing": (lambda m: edited(m, hospital=None), "hospital is not a short text"),
    "hospital a number": (lambda m: edited(m, hospital=1), "hospital is not a short text"),
    "a long request": (lambda m: edited(m, request="f" * 301), "request is not a short text"),
    "study missing": (lambda m: edited(m, study=None), "is not this one"),
    "shapes missing": (lambda m: edited(m, shapes=None), "are not those of the study"),
    "a request never sent": (lambda m: edited(m, request="f" * 32), "is not open"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_reply_is_refused(case):
    make, says = BAD[case]
    server, a, _ = asked()
    before = server.posterior
    good = answer(a, ONE)
    assert not server.receive("a", make(good))
    assert says in server.refused[0]
    assert server.history == []
    np.testing.assert_array_equal(server.posterior.precision, before.precision)
    assert server.receive("a", good), "the good one is still welcome"


def test_nobody_answers_for_another():
    """Unknown senders, a reply under another's name, and another's request."""
    server, a, b = asked()
    assert not server.receive("c", answer(a, ONE))
    assert not server.receive("b", answer(a, ONE))
    stolen = Reply(TERMS.identity, "b", a.request, 0, ONE, 1.0, 1e-5).to_bytes()
    assert not server.receive("b", stolen)
    assert [text.split(": ", 1)[1][:20] for text in server.refused] == [
        "hospital 'c' is not ", "it is signed 'a', an", f"request '{a.request[:11]}",
    ]  # fmt: skip
    assert server.receive("b", answer(b, ONE))


def test_stale_and_duplicate_replies_count_once():
    server, a, b = asked()
    change = ONE * Factor(np.ones(3), np.eye(3))
    assert server.receive("a", answer(a, change))
    assert not server.receive("a", answer(a, change))
    assert server.receive("b", answer(b, ONE))
    np.testing.assert_allclose(server.factors["a"].precision, 0.2 * np.eye(3))
    server.due()
    assert not server.receive("a", answer(a, change)), "of the last round"
    np.testing.assert_allclose(server.factors["a"].precision, 0.2 * np.eye(3))


def test_a_valid_change_beyond_the_public_cap_is_refused():
    server, a, _ = asked()
    huge = Factor(np.zeros(3), 1e4 * np.eye(3))
    assert not server.receive("a", answer(a, huge))
    assert "has norm 1.732e+04, and the study takes at most most_change=10000" in server.refused[0]
    assert server.receive("a", answer(a, huge**0.5))


def test_messages_come_back_as_they_were():
    _, a, _ = asked()
    again = Task.from_bytes(a.to_bytes(), TERMS)
    assert (again.study, again.hospital, again.request, again.number) == (a.study, "a", a.request, 0)
    np.testing.assert_array_equal(again.cavity.precision, a.cavity.precision)
    reply = Reply.from_bytes(answer(a, None, reason="spent"), TERMS)
    assert (reply.change, reply.reason, reply.epsilon, reply.delta) == (None, "spent", 1.0, 1e-5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: edited(t.to_bytes(), shapes=[[[3], [3, 3]]]), "bytes of numbers"),
        (lambda t: Task(t.study, "a", "r", 0, ONE, ONE).to_bytes(), "no normal distribution"),
        (lambda t: answer(t, ONE), "is no task"),
    ],
)
def test_a_bad_task_is_refused(make, says):
    """An improper cavity is welcome, an improper posterior is not."""
    _, a, _ = asked()
    with pytest.raises(MessageError, match=says):
        Task.from_bytes(make(a), TERMS)
    improper = Task(a.study, "a", "r", 0, a.posterior, Factor(np.ones(3), -np.eye(3)))
    assert Task.from_bytes(improper.to_bytes(), TERMS).cavity.precision[0, 0] == -1.0


def test_terms_are_kept_in_a_file(tmp_path):
    TERMS.save(tmp_path / "terms.json")
    again = Terms.load(tmp_path / "terms.json")
    assert again.identity == TERMS.identity
    assert Terms("other", TERMS.prior).identity != TERMS.identity
