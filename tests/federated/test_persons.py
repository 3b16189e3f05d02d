"""Persons with several rows at a hospital: what one person can move, and what is refused."""

import math

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated import Hospital, Reply, Study, Synchronous, Task, simulate
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.sums import NUM_RELEASES
from tfp_dpvi.federated.window import WindowRelease
from tfp_dpvi.privacy import FullBatch, PrivacyPlan

MOST = 3
QUIET = 1e-9
RELATION = PrivacyPlan(FullBatch(), 1.0, 1).neighboring_relation


def persons(num=16, seed=0):
    """Inputs, outcomes and identifiers, in no order; some persons have more rows than are used."""
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.repeat(np.arange(num) + 100, rng.integers(1, MOST + 2, num)))
    x = rng.normal(size=(len(ids), 2)).astype("float32")
    return x, (x[:, 0] + rng.logistic(size=len(ids)) > 0).astype("int32"), ids


def prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 2)})


def rows_apart(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))


def intercepts(params, x):
    score = tf.linalg.matvec(x, params["w"])
    return dpvi.local.unit_quadrature(
        lambda z: tfd.Bernoulli(logits=score[:, None] + z), num_points=8
    )


def make_study(likelihood=rows_apart, **settings):
    x, y, _ = persons()
    given = {"max_rows_per_unit": MOST, "example": (x[:4], y[:4]), "calibrated": True}
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0)
    return Study(prior(), likelihood, optimizer, local_steps=2, **{**given, **settings})


@pytest.fixture(scope="module")
def study():
    return make_study()


@pytest.fixture(scope="module")
def refiner(study):
    return Refiner(study)


def released(study, refiner, x, y, ids):
    """All sums of a hospital's last phase over their noise, all but without noise, and the mechanism."""
    data = refiner.data(x, y, 16, unit_ids=ids, rows_beyond="first")
    release = WindowRelease(refiner.window, data, RELATION, None, 7)
    release.mechanism = release.mechanism.with_noise(QUIET)
    refiner.window._num_steps = 0
    at = study.terms.prior
    task = Task(study.terms.identity, "a", "r", 1, at, at, last=True)
    sums = release.sums(task)
    parts = [np.ravel(part[0]) / sums.deviations[name] for name, part in sums.halves.items()]
    return np.concatenate(parts) * QUIET / math.sqrt(NUM_RELEASES / 2), release.mechanism


def check_replay(study, refiner):
    """All rows of a person made extreme, and a person that counts for nothing in its place."""
    x, y, ids = persons()
    start, mechanism = released(study, refiner, x, y, ids)
    stated = mechanism.sensitivity
    own = ids == np.bincount(ids).argmax()
    assert own.sum() > MOST
    gone = x.copy()
    gone[own] = 3e38  # Scores that are not finite.
    without, _ = released(study, refiner, gone, y, ids)
    moved = []
    for row, outcome in (((1e3, -1e3), 0), ((1e3, -1e3), 1), ((5.0, 5.0), 1), ((-1e30, 1e30), 0)):
        others = x.copy(), y.copy()
        others[0][own], others[1][own] = row, outcome
        after, _ = released(study, refiner, *others, ids)
        assert np.isfinite(after).all()
        moved.append(np.linalg.norm(after - without))
        assert moved[-1] <= stated.add_or_remove * (1 + 1e-5), "presence"
        assert np.linalg.norm(after - start) <= stated.replace * (1 + 1e-5), "replacement"
    return max(moved) / stated.add_or_remove


def test_replay_on_neighbours_that_differ_in_a_person(study, refiner):
    assert check_replay(study, refiner) > 0.5, "the statement is nearly attained"


def test_replay_finds_rows_that_are_clipped_one_by_one(study, refiner, monkeypatch):
    honest = refiner.data

    def by_row(x, y, num_records, *, unit_ids, **settings):
        del unit_ids
        alone = np.arange(len(x))
        return honest(x, y, num_records, unit_ids=alone, **settings)

    monkeypatch.setattr(refiner, "data", by_row)
    with pytest.raises(AssertionError, match=r"presence|replacement"):
        check_replay(study, refiner)


def hospital_of(study, refiner, **settings):
    x, y, ids = persons()
    given = {"name": "a", "epsilon": 1.0, "rounds": 2, "seed": 1, "unit_ids": ids}
    return Hospital(study, x, y, refiner=refiner, **{**given, **settings})


def test_a_hospital_counts_persons_and_says_so(study, refiner):
    one = hospital_of(study, refiner)
    assert one.num_records == 16
    at = study.terms.prior
    task = Task(study.terms.identity, "a", "r", 0, at, at)
    assert Reply.from_bytes(one.answer(task.to_bytes()), study.terms).change is not None
    plans = [entry.plan for entry in one.ledger.entries]
    assert [plan.person.max_rows for plan in plans] == [MOST]
    report = str(one.privacy_report())
    assert "at most 3 rows of each person" in report
    assert "number of rows were fixed before" in report


@pytest.mark.slow
def test_latents_of_persons_are_learned_from_persons():
    own = make_study(intercepts)
    history = simulate(
        own, [hospital_of(own, Refiner(own))], schedule=Synchronous(rounds=1), verbose=0, seed=2
    )
    assert history.refused == []
    assert list(history.sums) == ["a"]


def test_latents_of_persons_are_refused_from_rows():
    rows = make_study(intercepts, max_rows_per_unit=None, calibrated=False)
    x, y, _ = persons()
    with pytest.raises(ValueError, match="unit_ids is missing"):
        Hospital(rows, x, y, name="a", epsilon=1.0)


@pytest.mark.parametrize(
    ("in_study", "in_hospital", "says"),
    [
        ({}, {"unit_ids": None}, "unit_ids is missing, the person of each row"),
        ({"max_rows_per_unit": None}, {}, "make it with max_rows_per_unit"),
        ({}, {"unit_ids": np.arange(3)}, "one identifier for each"),
        ({}, {"rows_beyond": "last"}, "rows_beyond='last'"),
    ],
)
def test_what_does_not_fit_is_refused(study, refiner, in_study, in_hospital, says):
    own = make_study(**in_study) if in_study else study
    with pytest.raises(ValueError, match=says) as caught:
        hospital_of(own, Refiner(own) if in_study else refiner, **in_hospital)
    assert str(caught.value).count("\n") <= 1


def test_studies_agree_on_the_unit(study):
    with pytest.raises(dpvi.federated.MessageError, match="max_rows_per_unit"):
        study.terms.check_same(make_study(max_rows_per_unit=2).terms.identity)
    with pytest.raises(ValueError, match="max_rows_per_unit=0"):
        make_study(max_rows_per_unit=0)
    with pytest.raises(ValueError, match="shards are of single records"):
        make_study(privacy="messages", message_clip=1.0, calibrated=None)
