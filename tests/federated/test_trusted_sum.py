"""Sums that are only seen added up: what hospitals add, what each observer is told, and who is refused."""

import dataclasses
import sys
import types

import numpy as np
import pytest
from support.federation import answer

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.federated import (
    Aggregation,
    AgreedSum,
    Hospital,
    MessageError,
    Reply,
    Server,
    Study,
    StudyTerms,
    Synchronous,
    Task,
    TrustedSum,
    rehearse_study,
    simulate,
    write_status,
)
from tfp_dpvi.federated.deployment import worker
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.privacy import BudgetExhaustedError, FullBatch, PrivacyLedger, PrivacyPlan

DELTA = 1e-5
NAMES = ("berlin", "munich", "paris")


def records(seed=0, num=40):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 1)).astype("float32")
    return x, (x[:, 0] + rng.logistic(size=num) > 0).astype("int32")


def make_study(**settings):
    given = {
        "local_steps": 2,
        "example": records(num=4),
        "trusted_sum": TrustedSum(3, by="the trust office", epsilon=1.0),
    }
    return Study(
        tfd.Sample(tfd.Normal(0.0, 1.0), 1),
        lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)),
        dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0),
        **{**given, **settings},
    )


@pytest.fixture(scope="module")
def study():
    return make_study()


@pytest.fixture(scope="module")
def refiner(study):
    return Refiner(study)


def hospital_of(study, refiner, name="berlin", **settings):
    given = {"epsilon": 1.0, "rounds": 2, "seed": NAMES.index(name), "trusts_sum": True}
    own = records(seed=NAMES.index(name))
    return Hospital(study, *own, name=name, refiner=refiner, **{**given, **settings})


def aggregation_of(study):
    return Aggregation(study.terms, study.terms.prior, NAMES)


# ------------------------------------------------------------------------------------------ noise and price


def test_the_noise_is_the_share_that_all_hospitals_agree_on(study, refiner):
    hospital = hospital_of(study, refiner)
    agreed = study.agreed_sum.plan
    assert hospital._sums_plan.noise_over(agreed) == 1.0
    assert hospital._window.mechanism.noise_multiplier == agreed.noise_multiplier
    # The sensitivity that the study knows is that of the release itself.
    draft = hospital._window.draft
    assert agreed.sensitivity.add_or_remove == pytest.approx(draft.sensitivity.add_or_remove)
    assert agreed.sensitivity.replace == pytest.approx(draft.sensitivity.replace)
    # Two of three count: the variance of two messages is that of one at the same price.
    whole = draft.calibrated(1.0, DELTA).noise_multiplier
    assert agreed.noise_multiplier == pytest.approx(
        whole / np.sqrt(2.0) / np.sqrt(2.0 / 3.0), rel=3e-3
    )


def test_who_trusts_is_charged_for_the_sum_and_shown_both_prices(study, refiner):
    hospital = hospital_of(study, refiner)
    prices = hospital.sum_prices
    assert prices.sum_alone < prices.coalition <= 1.0 < prices.message
    # Rounds take what the sums leave.
    assert prices.coalition > 0.99
    by_hand = [hospital._plan.dp_event, hospital._sums_plan.of_message().dp_event]
    nothing = hospital._plan.replace(num_releases=0)
    assert prices.message == pytest.approx(nothing.epsilon(DELTA, by_hand), rel=1e-9)


def test_who_does_not_trust_is_charged_for_its_message_and_adds_no_less(study, refiner):
    hospital = hospital_of(study, refiner, trusts_sum=False)
    assert hospital._sums_plan.summed_over is None
    assert hospital._sums_plan.noise_over(study.agreed_sum.plan) > 1.0
    assert 0.99 < hospital.sum_prices.message <= 1.0
    assert hospital.sum_prices.coalition <= hospital.sum_prices.message
    rich = hospital_of(study, refiner, trusts_sum=False, epsilon=30.0)
    assert rich._sums_plan.noise_over(study.agreed_sum.plan) == 1.0


def test_hospitals_of_other_relations_are_priced_by_their_own(study, refiner):
    agreed = study.agreed_sum.plan
    with pytest.raises(BudgetExhaustedError, match=r"the sums alone[^\n]*\n.*larger epsilon"):
        hospital_of(study, refiner, neighboring_relation="replace_one")
    other = hospital_of(study, refiner, neighboring_relation="replace_one", epsilon=3.0)
    assert other._sums_plan.noise_over(agreed) == 1.0
    assert 1.0 < other.sum_prices.coalition <= 3.0


@pytest.mark.parametrize("missing", [0, 1])
def test_hospitals_that_may_be_missing_cost_noise(study, missing):
    trust = TrustedSum(3, by="the trust office", epsilon=1.0, missing=missing)
    noise = trust.agree(study.point.draft, 1.0).plan
    one = dataclasses.replace(trust, num_hospitals=3 - missing, missing=0)
    assert noise == one.agree(study.point.draft, 1.0).plan


# ------------------------------------------------------------------------------------------ messages


def test_the_aggregation_alone_gets_sums_once(study, refiner):
    ledger = PrivacyLedger()
    hospital = hospital_of(study, refiner, ledger=ledger)
    aggregation = aggregation_of(study)
    task = next(task for task in aggregation.due() if task.hospital == "berlin").to_bytes()
    with pytest.raises(MessageError, match="neither a server nor Flower"):
        hospital.answer(task)
    assert worker._reply(hospital, task).startswith(b"-the sums of this study")
    in_rounds = Task(study.terms.identity, "berlin", "r", 0, *[study.terms.prior] * 2)
    with pytest.raises(MessageError, match="no aggregation's"):
        hospital.answer_sum(in_rounds.to_bytes())
    assert hospital.spent == 0.0
    reply = hospital.answer_sum(task)
    spent = hospital.spent
    assert hospital.answer_sum(task) == reply
    assert hospital.spent == spent == Reply.from_bytes(reply, study.terms).epsilon
    assert spent == hospital._sums_plan.epsilon(DELTA)
    # A server that names the aggregation's request gets a reply of its own.
    request = Task.from_bytes(task, study.terms).request
    asked = dataclasses.replace(in_rounds, request="r", unanswered=(request,))
    assert Reply.from_bytes(hospital.answer(asked.to_bytes()), study.terms).sums is None
    second = dataclasses.replace(Task.from_bytes(task, study.terms), request="again")
    declined = Reply.from_bytes(hospital.answer_sum(second.to_bytes()), study.terms)
    assert declined.sums is None
    assert "once" in declined.reason
    assert hospital_of(study, refiner, ledger=ledger).sum_prices == hospital.sum_prices


def test_a_hospital_that_comes_back_without_budget_declines(study, refiner):
    ledger = PrivacyLedger()
    first = hospital_of(study, refiner, ledger=ledger)
    prior = study.terms.prior
    round_task = Task(study.terms.identity, "berlin", "r", 0, prior, prior)
    assert first.answer(round_task.to_bytes())
    elsewhere = PrivacyPlan(FullBatch(), 2.0, 1)
    with ledger.reserved(elsewhere):
        pass
    back = hospital_of(study, refiner, ledger=ledger)
    assert back._plan == first._plan
    task = Task(study.terms.identity, "berlin", "sum", 0, prior, prior, last=True)
    declined = Reply.from_bytes(back.answer_sum(task.to_bytes()), study.terms)
    assert declined.sums is None
    assert "the budget does not allow them" in declined.reason
    aggregation = aggregation_of(study)
    (asked, *_) = aggregation.due()
    reply = answer(asked, None, reason=declined.reason)
    assert not aggregation.receive("berlin", reply)
    assert "the budget does not allow them" in aggregation.refused[0]


def test_a_total_is_shown_once_and_only_of_enough_hospitals(study, refiner):
    aggregation = aggregation_of(study)
    tasks = {task.hospital: task for task in aggregation.due()}
    replies = {
        name: hospital_of(study, refiner, name).answer_sum(task.to_bytes())
        for name, task in tasks.items()
    }
    assert not aggregation.receive("munich", replies["berlin"])
    assert not aggregation.receive("rome", replies["berlin"])
    assert not aggregation.receive("berlin", answer(tasks["berlin"], None, reason="no"))
    assert len(aggregation.refused) == 3
    for name in NAMES[:2]:
        assert aggregation.receive(name, replies[name])
    assert not aggregation.receive("berlin", replies["berlin"])
    assert [task.request for task in aggregation.due()] == [tasks["paris"].request]
    with pytest.raises(ValueError, match="2 hospitals gave their sums, and the noise counts on 3"):
        aggregation.total()
    assert aggregation.sums == {}
    assert aggregation.receive("paris", replies["paris"])
    total = aggregation.total()
    single = [Reply.from_bytes(replies[name], study.terms).sums for name in NAMES]
    np.testing.assert_allclose(total.halves["score"], sum(part.halves["score"] for part in single))
    assert total.deviations["score"] == pytest.approx(single[0].deviations["score"] * 3.0**0.5)
    assert aggregation.sums == {"all hospitals": total}
    assert not aggregation.receive("paris", replies["paris"])
    assert "one alone" in aggregation.refused[-1]
    assert aggregation.due() == []
    assert aggregation.total() is total
    assert aggregation._messages == {}


def test_a_total_lacks_no_more_hospitals_than_were_priced(study, refiner):
    lacking = make_study(trusted_sum=TrustedSum(3, by="the trust office", epsilon=1.0, missing=1))
    aggregation = aggregation_of(lacking)
    names = iter(aggregation.due())
    own = Refiner(lacking)
    for task in (next(names), next(names)):
        hospital = hospital_of(lacking, own, task.hospital)
        # One of two counts: the sum has no more noise than the hospital's own.
        assert hospital.sum_prices.coalition == hospital.sum_prices.message
        assert aggregation.receive(task.hospital, hospital.answer_sum(task.to_bytes()))
    assert aggregation.total().num_records == 80


def test_a_worker_trusts_only_if_its_hospital_says_so(study, monkeypatch, tmp_path):
    x, y = records()
    np.savez(tmp_path / "records.npz", x=x, y=y)
    module = types.ModuleType("the_study")
    module.make = lambda: study
    monkeypatch.setitem(sys.modules, "the_study", module)
    monkeypatch.setattr(sys, "path", list(sys.path))
    served = []
    monkeypatch.setattr(worker, "serve", lambda hospital, *_, **__: served.append(hospital))
    command = ["--study", "the_study:make", "--data", f"{tmp_path / 'records.npz'}"]
    command += ["--name", "berlin", "--epsilon", "1", "--rounds", "2", "--rehearsal"]
    command += ["--socket", f"{tmp_path / 'socket'}"]
    for number, more in enumerate([[], ["--trusts-sum"]]):
        assert worker.main([*command, "--ledger", f"{tmp_path / f'{number}.ledger'}", *more]) == 0
    assert [hospital.trusts_sum for hospital in served] == [False, True]


# ------------------------------------------------------------------------------------------ a whole study


def test_a_study_ends_with_a_total_and_says_both_prices(study):
    history = simulate(
        study,
        {name: records(seed) for seed, name in enumerate(NAMES)},
        epsilon=1.0,
        schedule=Synchronous(rounds=2),
        verbose=0,
        seed=1,
    )
    assert list(history.sums) == ["all hospitals"]
    assert history.calibrated.sums["all hospitals"].num_records == 120
    assert any("whether hospitals are unlike" in note for note in history.calibrated.notes)
    report = history.reports["berlin"]
    assert report.epsilon == pytest.approx(history.epsilon["berlin"])
    assert report.epsilon <= 1.0 < report.message_epsilon
    text = " ".join(str(report).split())
    assert "this hospital trusts the trust office to show the sums" in text
    assert "for who sees the sum of 3 hospitals' messages alone" in text
    assert "a person with records in two hospitals is two records" in text
    with pytest.raises(ValueError, match="weights"):
        study.calibrated_posterior(history, weights="precision")


def test_the_server_neither_asks_for_sums_nor_takes_them(study, tmp_path):
    server = Server(study.terms, NAMES[:1], Synchronous(rounds=1))
    (task,) = server.due()
    assert not task.last
    change = dataclasses.replace(task.posterior, shift=np.ones(1))
    server.receive("berlin", answer(task, change / task.posterior))
    assert server.finished
    assert server.place is None
    assert server.due() == []
    page = tmp_path / "status.html"
    write_status(server, page)
    assert "on trust in the trust office" in page.read_text()
    assert "for who sees one message" in page.read_text()
    with pytest.raises(ValueError, match="Aggregation"):
        study.calibrated_posterior(server)


def test_terms_keep_the_agreement_and_compare_it(study, tmp_path):
    path = tmp_path / "terms.json"
    study.terms.save(path)
    assert StudyTerms.load(path).agreed_sum == study.agreed_sum
    assert AgreedSum.from_text(study.agreed_sum.to_text()) == study.agreed_sum
    other = make_study(trusted_sum=TrustedSum(3, by="the trust office", epsilon=2.0))
    with pytest.raises(MessageError, match=r"settings\.trusted_sum"):
        study.terms.check_same(other.terms.identity)
    assert make_study(trusted_sum=None).terms.agreed_sum is None
    with pytest.raises(ValueError, match="without sums"):
        dataclasses.replace(study.terms, sums={})
    with pytest.raises(ValueError, match="trusted_sum"):
        AgreedSum.from_text("[]")


def test_rehearsals_play_the_trusted_sum(study):
    rehearsal = rehearse_study(
        study,
        [(40, 1.0)] * 3,
        records(num=9)[0],
        delta=DELTA,
        num=2,
        schedule=Synchronous(rounds=1),
    )
    assert not any(row["failed"] for row in rehearsal.rows[(120, 1.0)])


# ------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("by", ["Flower", "flwr SecAggPlusWorkflow", "SecAgg+"])
def test_flowers_own_aggregation_is_no_guarantee(by):
    with pytest.raises(ValueError, match="is no guarantee: whoever submits a run") as error:
        TrustedSum(3, by=by, epsilon=1.0)
    assert str(error.value).count("\n") <= 1


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"num_hospitals": 2, "curious": 1, "missing": 1}, "leave no hospital"),
        ({"epsilon": 0.0}, "epsilon"),
        ({"delta": 1.0}, "delta"),
    ],
)
def test_declarations_that_protect_no_one_are_refused(settings, match):
    given = {"num_hospitals": 3, "by": "the trust office", "epsilon": 1.0}
    with pytest.raises(ValueError, match=match):
        TrustedSum(**{**given, **settings})
    with pytest.raises(TypeError, match="by"):
        TrustedSum(3, by=" ", epsilon=1.0)


def test_studies_without_sums_are_refused(study):
    with pytest.raises(ValueError, match=r"needs the last phase.*calibrated=False"):
        make_study(calibrated=False)
    with pytest.raises(ValueError, match="needs the last phase"):
        make_study(privacy="messages", message_clip=1.0)
    with pytest.raises(ValueError, match="local with trusted_sum"):
        make_study(local=study.point.scoring.pairing.coordinates.names[:1])
    with pytest.raises(TypeError, match="no TrustedSum"):
        make_study(trusted_sum=types.SimpleNamespace(num_hospitals=3))


def test_hospitals_that_do_not_fit_are_refused_before_they_pay(study, refiner):
    ledger = PrivacyLedger()
    plain = make_study(trusted_sum=None)
    with pytest.raises(ValueError, match="needs a study with a trusted_sum"):
        hospital_of(plain, Refiner(plain), ledger=ledger)
    with pytest.raises(ValueError, match="epsilon=None"):
        hospital_of(study, refiner, ledger=ledger, epsilon=None)
    with pytest.raises(BudgetExhaustedError, match="the sums alone"):
        hospital_of(study, refiner, ledger=ledger, epsilon=0.5)
    with pytest.raises(ValueError, match="more than 100 times"):
        hospital_of(study, refiner, ledger=ledger, epsilon=1e-3, trusts_sum=False)
    assert ledger.entries == ()
    with pytest.raises(ValueError, match="2 names"):
        Aggregation(study.terms, study.terms.prior, NAMES[:2])
    with pytest.raises(ValueError, match="no trusted sum"):
        Aggregation(plain.terms, plain.terms.prior, NAMES)
