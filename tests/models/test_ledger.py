"""Models and the ledger: several fits and models add up, a ledger-wide budget is hard (contract C6)."""

from __future__ import annotations

import contextlib
import threading

import dp_accounting
import numpy as np
import pytest
from support.siblings import slow
from support.toy import adam, records, sgd, toy, weights

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.privacy import BudgetExhaustedError, FixedSizeSampling, UnsupportedPairError

X, Y = records()


def make_model(ledger=None, noise=3.0, **kwargs):
    return toy(noise, ledger=ledger, **kwargs)


def with_target(ledger, epsilon):
    return toy(epsilon=epsilon, ledger=ledger)


def fit(model, **kwargs):
    return model.fit(X, Y, **{"batch_size": 50, "epochs": 2, "verbose": 0, **kwargs})


def test_models_that_share_a_ledger_add_up():
    ledger = dpvi.PrivacyLedger()
    first, second = make_model(ledger), make_model(ledger, noise=2.0)
    fit(first)
    alone = first.privacy_report().epsilon
    history = fit(second)
    event = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(z)), 8
            )
            for z in (3.0, 2.0)
        ]
    )
    both = dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)
    assert alone < both
    assert second.privacy_report().epsilon == pytest.approx(both, rel=1e-3)
    assert first.privacy_report().epsilon == second.privacy_report().epsilon
    assert history.history["epsilon"][-1] == pytest.approx(both, rel=1e-3)


def test_a_lifetime_target_counts_what_other_models_spent():
    ledger = dpvi.PrivacyLedger()
    fit(make_model(ledger))
    model = with_target(ledger, 2.0)
    fit(model)
    assert 1.98 <= model.privacy_report().epsilon <= 2.0


def test_training_stops_before_the_step_that_would_overspend(caplog):
    probe = make_model()
    fit(probe, steps_per_epoch=1, epochs=5)
    ledger = dpvi.PrivacyLedger(
        budget_epsilon=probe.privacy_report().epsilon * 1.0001, budget_delta=1e-5
    )
    model = make_model(ledger, steps_per_execution=4)
    history = fit(model, steps_per_epoch=20)
    assert ledger.num_releases == 5
    assert int(model.optimizer.iterations) == 5
    assert model.privacy_report().epsilon <= ledger.budget[0]
    assert len(history.history["epsilon"]) == 1
    assert np.isfinite(model.predict(X)).all()
    assert "budget allows no more" in caplog.text
    with pytest.raises(BudgetExhaustedError, match="budget"):
        fit(model)
    assert ledger.num_releases == 5


def test_a_ledger_on_disk_survives_the_process_of_one_model(tmp_path):
    path = tmp_path / "ledger"
    with dpvi.PrivacyLedger(path, dataset_id="patients") as ledger:
        fit(make_model(ledger))
    with dpvi.PrivacyLedger(path, dataset_id="patients") as ledger:
        assert ledger.num_releases == 8
        model = make_model(ledger)
        fit(model)
        assert ledger.num_releases == 16
        assert "patients" in str(model.privacy_report())


def test_another_ledger_cannot_replace_one_in_use():
    model = make_model()
    fit(model)
    with pytest.raises(ValueError, match="ledger"):
        model.compile(adam(1.0), delta=1e-5, ledger=dpvi.PrivacyLedger())
    assert model.privacy_ledger.num_releases == 8


def test_seeded_models_do_not_pass_for_one_another():
    # The same seed and plan on another model is another release, and is charged.
    ledger = dpvi.PrivacyLedger()
    for _ in range(2):
        fit(make_model(ledger, seed=7))
    assert ledger.num_releases == 16
    assert ledger.seeded


def test_batches_of_a_fixed_size_are_priced_under_replace_one():
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    model = make_model(neighboring_relation=relation, accountant="rdp")
    fit(model, sampling="fixed_size")
    assert model.privacy_plan.sampling == FixedSizeSampling(200, 50)
    assert model.privacy_report().epsilon > 0
    with pytest.raises(UnsupportedPairError, match="fixed_size"):
        fit(make_model(), sampling="fixed_size")
    with pytest.raises(ValueError, match="num_records"):
        fit(make_model(), sampling="fixed_size", num_records=300)
    with pytest.raises(ValueError, match="sampling"):
        fit(make_model(), sampling="shuffle")


@pytest.mark.parametrize("size", [7, *map(slow, (1, 50, 1000))])
def test_physical_batches_change_no_number(size):
    results = []
    for physical in (None, size):
        model = make_model(seed=3, physical_batch_size=physical)
        fit(
            model, batch_size=200
        )  # Full batches: the same records in the same steps, whatever the pieces.
        results.append((model.privacy_report().epsilon, weights(model)))
    assert results[0][0] == results[1][0]
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # A lifetime target is quick.
def test_a_target_holds_while_another_model_uses_the_ledger():
    ledger = dpvi.PrivacyLedger()
    first, second = with_target(ledger, 1.0), make_model(ledger, noise=4.0)

    class Meanwhile(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                fit(second, epochs=1)

    history = fit(first, epochs=6, callbacks=[Meanwhile()])
    assert ledger.epsilon(1e-5) <= 1.0
    assert ledger.num_releases < 4 + 24
    assert history.history["epsilon"][-1] >= ledger.epsilon(1e-5) * (1 - 1e-9)


def test_fixed_size_batches_under_a_ledgers_budget():
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    ledger = dpvi.PrivacyLedger(budget_epsilon=50.0, budget_delta=1e-5)
    model = make_model(ledger, neighboring_relation=relation, accountant="rdp")
    fit(model, sampling="fixed_size")
    assert ledger.num_releases == 8


@pytest.mark.parametrize(
    ("compile_with", "fit_with", "named"),
    [
        ({"unsafe_training_metrics": True}, {}, "unsafe_training_metrics"),
        ({}, {"validation_data": (X[:20], Y[:20]), "unsafe_validation": True}, "unsafe_validation"),
    ],
)
def test_what_was_shown_is_in_the_ledger_and_in_every_later_report(
    tmp_path, compile_with, fit_with, named
):
    path = tmp_path / "ledger"
    ledger = dpvi.PrivacyLedger(path)
    model = make_model(ledger, **compile_with)
    with pytest.raises(ValueError, match="batch_size"):
        fit(model, batch_size=0, **fit_with)
    assert ledger.exposures == ()  # Nothing was shown: nothing is held against the data.
    fit(model, **fit_with)
    fit(model, **fit_with)
    assert len(ledger.exposures) == 1
    assert named in ledger.exposures[0]
    ledger.close()
    with dpvi.PrivacyLedger(path) as again:
        report = make_model(again).privacy_report()  # Another model, as after a restart.
        assert not report.private
        assert any(named in warning for warning in report.warnings)


def test_what_is_shown_is_written_down_before_it_is_shown(monkeypatch):
    ledger = dpvi.PrivacyLedger()
    monkeypatch.setattr(
        ledger, "record_exposure", lambda text: (_ for _ in ()).throw(OSError("disk full"))
    )
    seen = []
    with pytest.raises(OSError, match="disk full"):
        fit(
            make_model(ledger, unsafe_training_metrics=True),
            callbacks=[
                keras.callbacks.LambdaCallback(on_batch_end=lambda batch, logs: seen.append(logs))
            ],
        )
    assert seen == []
    assert ledger.num_releases == 0


@pytest.mark.slow  # Of the ledger alone: `test_ledger_crash.py`.
def test_two_threads_with_one_budget_spend_it_once():
    """C6: each model planned for the whole of it before the other began; together they spent 1.2 of 1."""
    ledger = dpvi.PrivacyLedger()
    planned = threading.Barrier(2)

    class StartTogether(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            planned.wait(60)

    def train():
        model = toy(ledger=ledger, optimizer=sgd(), steps_per_execution=2)
        with contextlib.suppress(BudgetExhaustedError):
            fit(model, epochs=4, callbacks=[StartTogether()])

    threads = [threading.Thread(target=train) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 0.5 < ledger.epsilon(1e-5) <= 1.0


def test_an_older_file_of_a_model_does_not_bring_its_budget_back(tmp_path, caplog):
    """Saved, fitted on, deleted, loaded: this process knows what was spent since. Another one cannot, and says so."""
    model = make_saved(tmp_path)
    fit(model, epochs=1)
    del model
    loaded = dpvi.load_model(tmp_path / "model.keras")
    assert loaded.privacy_ledger.num_releases == 8
    assert not any("continued from a file" in caveat for caveat in loaded.privacy_report().caveats)
    config = loaded.privacy_ledger.to_config()
    elsewhere = dpvi.PrivacyLedger.from_config({**config, "ledger_id": "of another process"})
    assert elsewhere.num_releases == 8
    assert "continued from a file" in caplog.text
    assert "continued from a file" in elsewhere.caveats[0]


def make_saved(tmp_path):
    model = toy(3.0)
    fit(model, epochs=1)
    model.save(tmp_path / "model.keras")
    return model
