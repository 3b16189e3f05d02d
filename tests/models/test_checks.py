"""`DPVI.check` and `fit(checks=)`: the ledger, refusals, persons, held-out records, files."""

import logging
import types

import numpy as np
import pytest
from support.toy import adam

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.checking import Bins
from tfp_dpvi.checking.outcomes import Predictor
from tfp_dpvi.models.checking import warn_of_total
from tfp_dpvi.privacy import FullBatch, PrivacyPlan
from tfp_dpvi.training.budget import PrivacyTarget

NUM = 300
EDGES = {1: [0.0]}


@dpvi.register("checks_prior")
def make_prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 2.0), 2)})


@dpvi.register("checks_counts")
def counts(params, x):
    return tfd.Poisson(log_rate=tf.linalg.matvec(x, params["w"]))


def labels(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]), dtype=tf.float32)


def data(num=NUM, seed=0):
    rng = np.random.default_rng(seed)
    x = np.stack([np.ones(num), rng.normal(size=num)], axis=1).astype("float32")
    return x, rng.poisson(np.exp(0.3 + 0.5 * x[:, 1])).astype("float32")


def fitted(likelihood=counts, *, optimizer=True, seed=1, **how):
    """A model after a short fit, of which only the shapes of checks matter."""
    model = dpvi.DPVI(make_prior, likelihood, clipping="flat", seed=seed)
    settings = {"optimizer": adam()} if optimizer else {}
    model.compile(**settings, epsilon=1.0, delta=1e-5, jit_compile=False)
    x, y = data()
    y = np.minimum(y, 1.0) if likelihood is labels else y
    model.fit(x, y, **{"batch_size": 100, "epochs": 1, "verbose": 0, **how})
    return model, x, y


@pytest.fixture(scope="module")
def plain():
    return fitted()


@pytest.fixture(scope="module")
def scored():
    """A fit with a calibrated posterior, with checks for a share of its budget."""
    model = dpvi.DPVI(make_prior, counts)
    model.compile(adam(), epsilon=8.0, delta=1e-5, jit_compile=False)
    x, y = data()
    settings = {"batch_size": NUM, "epochs": 40, "verbose": 0}
    model.fit(x, y, checks=0.25, check_columns=EDGES, **settings)
    return model, x, y


def test_one_call_spends_once(scored):
    """C6: the check's release comes first in the ledger, the fit's noise takes what is left."""
    model, _, _ = scored
    first, second = model.privacy_ledger.entries
    assert "checks of the model" in first.plan.purpose
    assert first.plan.epsilon(1e-5) == pytest.approx(2.0, rel=2e-3)
    assert second.plan.purpose is None
    assert model.privacy_ledger.epsilon(1e-5) <= 8.0
    assert model.privacy_ledger.epsilon(1e-5) > 7.95
    assert model.privacy_ledger.unconfirmed_steps == 0
    checks = model.private_checks
    assert [test.name for test in checks.tests] == ["PIT values", "residuals by 1"]
    assert checks.epsilon == 2.0
    assert not any("surrogate" in note for note in checks.notes)
    assert checks.variance_factor >= 1.0
    assert (checks.score.low, checks.score.high) == (-10.0, 0.0)
    assert checks.score.mean == pytest.approx(-1.7, abs=0.5)


def test_the_table_has_free_and_paid_checks(scored):
    model, _, _ = scored
    before = model.num_releases
    table = model.check_table()
    costs = {row.name: row.cost for row in table.rows}
    free = ("distance", "halves", "mismatch", "overdispersion", "ranks", "width", "shift")
    assert all(costs[name] == "free" for name in free)
    assert costs["PIT values"] == "epsilon 2"
    assert all(row.sees and row.blind for row in table.rows)
    assert "PIT values: sees" in str(table)
    assert table._repr_html_().count("<tr>") == len(table.rows) + 1
    assert model.num_releases == before


def test_a_saved_model_keeps_its_checks(scored, tmp_path):
    model, _, _ = scored
    model.save(tmp_path / "model.keras")
    again = dpvi.load_model(tmp_path / "model.keras")
    assert again.private_checks.to_dict() == model.private_checks.to_dict()
    again.set_weights(again.get_weights())
    assert again.private_checks is None


def test_a_check_is_charged_ahead_and_its_total_is_said(plain, caplog):
    """C6; a total above that of `compile` is an explicit choice, and not a silent one."""
    model, x, y = plain
    before = model.num_releases
    order = []
    reserve, noise = dpvi.PrivacyLedger.reserve, _random.add_noise
    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.WARNING, "tfp_dpvi"):
        patched.setattr(
            dpvi.PrivacyLedger, "reserve", lambda *a, **k: (order.append(1), reserve(*a, **k))[1]
        )
        patched.setattr(_random, "add_noise", lambda *a, **k: (order.append(2), noise(*a, **k))[1])
        result = model.check(x, y, epsilon=0.5, columns=EDGES)
    assert order == [1, 2]
    assert model.num_releases == before + 1
    assert "total of fit and checks is epsilon 1.1" in caplog.text
    assert "raw surrogate" in result.notes[0]
    assert "checks of the model" in str(model.privacy_report())
    assert "raw surrogate" in str(model.check_table())


BAD = {
    "columns=3": ({"columns": 3}, "must be a dict of columns"),
    "no such column": ({"columns": {2: [0.0]}}, "x has the columns 0 to 1"),
    "a name": ({"columns": {"age": [0.0]}}, "a number for a column of an array"),
    "edges": ({"columns": {1: [1.0, 0.0]}}, "do not increase"),
    "no edges": ({"columns": {1: []}}, "finite numbers, the edges"),
    "bins": ({"columns": {"a": Bins(("x", "y"), np.zeros(3, int))}}, "one for each of the 300"),
    "range": ({"score_range": (0.0, -1.0)}, "the lower one first"),
    "level": ({"level": 2.0}, "level"),
    "epsilon": ({"epsilon": 0.0}, "epsilon"),
    "delta": ({"delta": 1.0}, "delta"),
    "ledger": ({"ledger": "ledger.sqlite"}, "must be a dpvi.PrivacyLedger"),
    "persons": ({"unit_ids": np.arange(NUM)}, "max_rows_per_unit is missing"),
    "persons and rows": (
        {"unit_ids": np.arange(NUM), "max_rows_per_unit": 1},
        "person",
    ),
    "y": ({"y": np.zeros([NUM, 1])}, "shape \\[N\\]"),
    "x": ({"x": np.zeros([NUM, 3])}, "shape|column"),
    "lengths": ({"y": np.zeros(NUM - 1)}, "Lengths differ"),
    "NaN": ({"y": np.full(NUM, np.nan)}, "NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_before_anything_is_spent(plain, name):
    """The message has at most two lines, and names the argument."""
    model, x, y = plain
    settings, message = BAD[name]
    before = model.privacy_ledger.mark()
    with pytest.raises((ValueError, TypeError), match=message) as error:
        model.check(**{"x": x, "y": y, "epsilon": 0.1, **settings})
    assert len(str(error.value).splitlines()) <= 3
    assert model.privacy_ledger.mark() == before


def test_a_fit_refuses_what_its_checks_cannot_have(plain):
    model, x, y = plain
    before = model.privacy_ledger.mark()
    for settings, message in (
        ({"checks": 1.5}, "checks"),
        ({"checks": 1.0}, "below 1"),
        ({"check_columns": EDGES}, "needs checks"),
        ({"checks": 0.1, "sample_weight": np.ones(NUM)}, "sample_weight"),
        ({"checks": 0.1, "check_columns": {7: [0.0]}}, "columns 0 to 1"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(x, y, batch_size=100, verbose=0, **settings)
    fresh = dpvi.DPVI(make_prior, counts)
    fresh.compile(adam(1.0), delta=1e-5)
    with pytest.raises(ValueError, match="share, below 1, of the epsilon"):
        fresh.fit(x, y, checks=0.1, verbose=0)
    with pytest.raises(RuntimeError, match="before fit"):
        fresh.check(x, y, epsilon=0.1)
    assert model.privacy_ledger.mark() == before
    assert fresh.num_releases == 0


def test_a_fit_that_fails_pays_for_no_check():
    """Neither the check nor a step drew noise: all of it is refunded."""
    model = dpvi.DPVI(make_prior, counts)
    model.compile(adam(), epsilon=1.0, delta=1e-5)
    x, y = data()
    with pytest.raises(ValueError, match="initial_epoch"):
        model.fit(x, y, batch_size=100, checks=0.1, initial_epoch=5, verbose=0)
    assert model.num_releases == 0
    assert model.privacy_ledger.epsilon(1e-5) == 0.0
    assert model.private_checks is None


def test_a_spent_budget_of_the_ledger_refuses_the_check(plain):
    model, x, y = plain
    held_out = dpvi.PrivacyLedger()
    held_out.set_budget(0.1, 1e-5)
    with pytest.raises(dpvi.privacy.BudgetExhaustedError):
        model.check(x, y, epsilon=0.2, ledger=held_out)
    assert held_out.num_releases == 0


def test_the_total_that_is_compared_is_by_the_accountant_of_compile(caplog):
    ledger = dpvi.PrivacyLedger()
    plan = PrivacyPlan(FullBatch(), 4.0, 1)
    ledger.confirm(ledger.reserve(plan, 1))
    # 0.926 by "pld", and 1.013 by "rdp".
    target = PrivacyTarget(epsilon=1.0, delta=1e-5, accountant="rdp")
    model = types.SimpleNamespace(privacy_target=target, privacy_ledger=ledger)
    warn_of_total(model, ledger)
    assert "epsilon 1.013, above the 1 of compile" in caplog.text
    warn_of_total(model, dpvi.PrivacyLedger())
    assert len(caplog.messages) == 1


def test_held_out_records_have_a_ledger_of_their_own(plain):
    """They vary more about the fit than its own records."""
    model, _, _ = plain
    x, y = data(200, seed=9)
    before, ledger = model.num_releases, dpvi.PrivacyLedger()
    result = model.check(x, y, epsilon=1.0, ledger=ledger)
    assert model.num_releases == before
    assert ledger.num_releases == 1
    assert result.num_records == 200
    assert result.variance_factor == pytest.approx(1.0 + 200 / 300)


def test_persons_count_once():
    """A person's rows are averaged; report and ledger speak of persons."""
    ids = np.arange(NUM) // 3
    persons = {"unit_ids": ids, "max_rows_per_unit": 2}
    model, x, y = fitted(labels, checks=0.2, **persons)
    assert model.private_checks.num_records == NUM // 3
    assert model.privacy_ledger.entries[0].plan.person.max_rows == 2
    assert [test.name for test in model.private_checks.tests] == ["reliability"]
    with pytest.raises(dpvi.privacy.UnsupportedPairError):
        model.check(x, y, epsilon=0.1)


def test_a_model_of_whole_records_is_refused():
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda mean: tfd.Normal(mean, 1.0), clipping="flat")
    model.compile(adam(1.0), delta=1e-5, jit_compile=False)
    x = np.zeros(40, "float32")
    model.fit(x, batch_size=40, verbose=0)
    with pytest.raises(ValueError, match="whole records"):
        model.check(x, x, epsilon=0.1)


def test_outcomes_are_predicted_anew(plain):
    """C10: the ledger says that a model is seeded; without a seed, ranks are drawn anew."""
    model, x, y = plain
    assert model.privacy_ledger.seeded
    predictor = Predictor(model.bayesian_model, is_binary=False)
    draws = model.posterior_sample(99, seed=0)
    first, second = (predictor(draws, x, y, _random.new_key()) for _ in range(2))
    assert not np.array_equal(first.pit, second.pit)
