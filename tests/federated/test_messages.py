"""Bad messages: each is refused in a sentence, and nothing changes at the server."""

import json
import pickle

import numpy as np
import pytest
from support.federation import answer, prior_of

from tfp_dpvi.federated import Factor, MessageError, Reply, Server, StudyTerms, Synchronous, Task

TERMS = StudyTerms("study", prior_of(3, full_rank=True), most_change=1e4)
ONE = Factor.one(3, full_rank=True)


def asked():
    server = Server(TERMS, ["a", "b"], Synchronous(rounds=2))
    return server, *server.due()


def edited(message, **changes):
    """Returns a message with fields changed; MISSING takes a field away."""
    fields = {**json.loads(message), **changes}
    return json.dumps(
        {name: value for name, value in fields.items() if value is not MISSING}
    ).encode()


def with_number(message, place, value):
    """Returns a message with one number of its change replaced: of the shift, then of the precision, row by row."""
    change = json.loads(message)["change"]
    numbers = [*change["shift"], *np.ravel(change["precision"])]
    numbers[place] = value
    return edited(
        message,
        change={"shift": numbers[:3], "precision": np.reshape(numbers[3:], [3, 3]).tolist()},
    )


def nested(depth):
    return [nested(depth - 1)] if depth else []


def a_change(shift, precision):
    return lambda m: edited(m, change={"shift": shift, "precision": precision})


MISSING = object()
BAD = {
    "NaN in the shift": (lambda m: with_number(m, 0, np.nan), "not finite"),
    "infinity in the precision": (lambda m: with_number(m, 5, np.inf), "not finite"),
    "not symmetric": (lambda m: with_number(m, 4, 7.0), "not symmetric"),
    "wrong shape": (a_change([0.0] * 2, [[0.0] * 2] * 2), "and the study's factors"),
    "another family": (a_change([0.0] * 3, [0.0] * 3), "and the study's factors"),
    "a ragged matrix": (a_change([0.0] * 3, [[0.0], [0.0] * 2, [0.0] * 3]), "no factor"),
    "numbers beyond floats": (a_change([10**400] * 3, [[0.0] * 3] * 3), "no factor"),
    "objects for numbers": (a_change([{}] * 3, [[0.0] * 3] * 3), "no factor"),
    "half a factor": (lambda m: edited(m, change={"shift": [0.0] * 3}), "no factor"),
    "a list for a factor": (lambda m: edited(m, change=[0.0] * 3), "no factor"),
    "a deeply nested factor": (a_change(nested(300), [[0.0] * 3] * 3), "no factor"),
    "truncated": (lambda m: m[:-1], "is no Reply"),
    "one byte more": (lambda m: m + b"\0", "is no Reply"),
    "oversized": (lambda m: m + bytes(10**6), "at most"),
    "pickled": (lambda m: pickle.dumps({"change": np.zeros(3)}), "is no Reply"),
    "endless brackets": (lambda m: b"[" * 4000, "is no Reply"),
    "no text": (lambda m: m.decode("latin-1"), "not bytes"),
    "empty": (lambda m: b"", "is no Reply"),
    "a task": (lambda m: edited(m, kind="Task"), "is no Reply"),
    "a list": (lambda m: b"[1]", "is no Reply"),
    "no UTF-8": (lambda m: b"\xff\xfe", "is no Reply"),
    "a field more": (lambda m: edited(m, more=1), "has the fields"),
    "another study": (lambda m: edited(m, study="0" * 32), "is not this one"),
    "epsilon missing": (lambda m: edited(m, epsilon=MISSING), "has the fields"),
    "epsilon NaN": (lambda m: edited(m, epsilon=np.nan), "not a number of at least 0"),
    "epsilon negative": (lambda m: edited(m, epsilon=-1.0), "not a number of at least 0"),
    "epsilon beyond floats": (lambda m: edited(m, epsilon=10**400), "not a number of at least 0"),
    "epsilon a list": (lambda m: edited(m, epsilon=[1.0]), "not a number of at least 0"),
    "another generator": (lambda m: edited(m, randomness="quantum"), "neither empty nor 'secure'"),
    "a generator that is no text": (
        lambda m: edited(m, randomness=[]),
        "neither empty nor 'secure'",
    ),
    "a reason that is no text": (lambda m: edited(m, reason=7), "reason"),
    "a long reason": (lambda m: edited(m, reason="x" * 301), "reason"),
    "no number": (lambda m: edited(m, number=True), "not a count"),
    "a negative number": (lambda m: edited(m, number=-1), "not a count"),
    "number null": (lambda m: edited(m, number=None), "not a count"),
    "a number with a fraction": (lambda m: edited(m, number=0.5), "not a count"),
    "another round": (lambda m: edited(m, number=1), "not that of the request"),
    "an unknown hospital": (lambda m: edited(m, hospital="c"), "is signed 'c'"),
    "a name of control characters": (lambda m: edited(m, hospital="a\x1b[2J"), "not a short text"),
    "hospital null": (lambda m: edited(m, hospital=None), "hospital is not a short text"),
    "hospital a number": (lambda m: edited(m, hospital=1), "hospital is not a short text"),
    "a long request": (lambda m: edited(m, request="f" * 301), "request is not a short text"),
    "study null": (lambda m: edited(m, study=None), "is not this one"),
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
    np.testing.assert_allclose(server.factors["a"].precision, 0.3 * np.eye(3))
    server.due()
    assert not server.receive("a", answer(a, change)), "of the last round"
    np.testing.assert_allclose(server.factors["a"].precision, 0.3 * np.eye(3))


def test_a_valid_change_beyond_the_public_cap_is_refused():
    server, a, _ = asked()
    huge = Factor(np.zeros(3), 1e4 * np.eye(3))
    assert not server.receive("a", answer(a, huge))
    assert "has norm 1.732e+04, and the study takes at most most_change=10000" in server.refused[0]
    assert server.receive("a", answer(a, huge**0.5))


def test_messages_come_back_as_they_were():
    _, a, _ = asked()
    again = Task.from_bytes(a.to_bytes(), TERMS)
    assert (again.study, again.hospital, again.request, again.number) == (
        a.study,
        "a",
        a.request,
        0,
    )
    np.testing.assert_array_equal(again.cavity.precision, a.cavity.precision)
    reply = Reply.from_bytes(answer(a, None, reason="spent"), TERMS)
    assert (reply.change, reply.reason, reply.epsilon, reply.delta) == (None, "spent", 1.0, 1e-5)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda t: edited(t.to_bytes(), cavity=MISSING), "has the fields"),
        (lambda t: Task(t.study, "a", "r", 0, ONE, ONE).to_bytes(), "no normal distribution"),
        (lambda t: answer(t, ONE), "is no Task"),
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
    again = StudyTerms.load(tmp_path / "terms.json")
    assert again.identity == TERMS.identity
    assert StudyTerms("other", TERMS.prior).identity != TERMS.identity


def test_a_file_that_lacks_a_term_is_refused(tmp_path):
    path = tmp_path / "terms.json"
    TERMS.save(path)
    fields = json.loads(path.read_text())
    for name in fields:
        path.write_text(json.dumps({key: fields[key] for key in fields if key != name}))
        with pytest.raises(ValueError, match=rf"lacks the fields \['{name}'\]"):
            StudyTerms.load(path)
