"""PrivateBackupAndRestore: an interrupted fit goes on from its last epoch, and the books are right (C6, C7, C10)."""

from __future__ import annotations

import contextlib
import json
import os
import shutil

import numpy as np
import pytest
import tensorflow as tf
from support.toy import Toy, adam, records, toy, weights

import tfp_dpvi as dpvi
from tfp_dpvi import _random, keras
from tfp_dpvi.callbacks import PrivateBackupAndRestore

X, Y = records(100)
EPOCHS, STEPS = 4, 5


class Interrupted(Exception):
    pass


class InterruptAfter(keras.callbacks.Callback):
    """Stops like a kill does, for all that the fit can do about it: after some executions of two steps."""

    def __init__(self, executions):
        super().__init__()
        self.left = executions

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise Interrupted


def make(ledger, *, noise=None, rate=0.05, clip=1.0, **settings):
    return toy(
        noise,
        optimizer=adam(noise, clip=clip, rate=rate),
        ledger=ledger,
        **{"steps_per_execution": 2, **settings},
    )


def fit(model, directory, stop=None, epochs=EPOCHS, batch_size=20, callbacks=(), **kwargs):
    backup = PrivateBackupAndRestore(directory, **kwargs)
    stopping = [InterruptAfter(stop)] if stop else []
    return model.fit(
        X,
        Y,
        batch_size=batch_size,
        epochs=epochs,
        verbose=0,
        callbacks=[backup, *callbacks, *stopping],
    )


def interrupted(ledger, directory, stops, **kwargs):
    for stop in stops:
        with pytest.raises(Interrupted):
            fit(make(ledger, **kwargs), directory, stop)


@pytest.fixture
def ledger(tmp_path):
    with dpvi.PrivacyLedger(tmp_path / "ledger", dataset_id="records") as opened:
        yield opened


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A fit that stopped in its second epoch: its ledger and its backup."""
    directory = tmp_path_factory.mktemp("stopped")
    with dpvi.PrivacyLedger(directory / "ledger", dataset_id="records") as opened:
        interrupted(opened, directory / "backup", [4])
    return directory


@pytest.fixture
def ledger_of_stopped(stopped, tmp_path):
    """The same, to go on from, in this test's own directory."""
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    with dpvi.PrivacyLedger(tmp_path / "ledger", dataset_id="records") as opened:
        yield opened


# ------------------------------------------------------------------ going on


class HalveRate(keras.callbacks.Callback):
    """A change at an epoch's end, as `ReduceLROnPlateau` makes."""

    def on_epoch_end(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate / 2)


@pytest.mark.parametrize("as_list", [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_other_callbacks_do_is_in_the_backup(tmp_path, as_list):
    """Wherever it stands among them: else the fit would go on at another learning rate. A seed makes it comparable."""
    found = []
    for name, stop in (("straight", None), ("interrupted", 8)):
        with dpvi.PrivacyLedger(tmp_path / name) as ledger:
            for last in (stop, None) if stop else (None,):
                model = make(ledger, seed=5, noise=2.0)
                stopping = [InterruptAfter(last)] if last else []
                callbacks = [
                    PrivateBackupAndRestore(tmp_path / f"{name}_backup"),
                    HalveRate(),
                    *stopping,
                ]
                if not as_list:
                    callbacks = keras.callbacks.CallbackList(
                        callbacks, add_history=True, model=model
                    )
                    callbacks.set_params({"epochs": EPOCHS, "verbose": 0, "steps": STEPS})
                with pytest.raises(Interrupted) if last else contextlib.nullcontext():
                    model.fit(X, Y, batch_size=20, epochs=EPOCHS, verbose=0, callbacks=callbacks)
            assert ledger.num_releases == EPOCHS * STEPS + (
                4 if stop else 0
            )  # Two executions ran again.
            found.append([v.numpy() for v in [*model.variables, *model.optimizer.variables]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_a_seeded_run_is_charged_again_like_any_other(tmp_path, ledger):
    """A seed makes runs repeatable, and nothing free of charge."""
    interrupted(ledger, tmp_path / "backup", [4], seed=5, noise=2.0)
    assert ledger.num_releases == STEPS + 2
    model = make(ledger, seed=5, noise=2.0)
    fit(model, tmp_path / "backup")
    assert model.optimizer.iterations == EPOCHS * STEPS
    assert ledger.num_releases == EPOCHS * STEPS + 2
    assert ledger.seeded


def test_without_a_seed_redone_steps_are_charged_and_the_budget_holds(tmp_path, ledger):
    interrupted(
        ledger, tmp_path / "backup", [4]
    )  # Two epochs of three executions: one whole, and one execution more.
    assert ledger.num_releases == STEPS + 2
    multiplier = json.loads(str(np.load(tmp_path / "backup" / "fit.npz")["meta"]))["plan"][
        "noise_multiplier"
    ]
    model = make(ledger)
    history = fit(model, tmp_path / "backup")
    assert history.epoch == [1, 2, 3]
    assert (
        ledger.num_releases == EPOCHS * STEPS
    )  # The budget was for 20 releases; two bought nothing.
    assert model.optimizer.iterations == EPOCHS * STEPS - 2
    assert model.privacy_plan.noise_multiplier == multiplier
    assert 0.99 <= history.history["epsilon"][-1] <= 1.0
    assert not os.listdir(tmp_path / "backup")


def test_with_a_noise_multiplier_all_steps_run(tmp_path, ledger):
    interrupted(ledger, tmp_path / "backup", [4, 2], noise=2.0)
    model = make(ledger, noise=2.0)
    fit(model, tmp_path / "backup")
    assert model.optimizer.iterations == EPOCHS * STEPS
    assert ledger.num_releases == EPOCHS * STEPS + 2 + 4


def test_the_noise_after_an_interruption_is_fresh(tmp_path):
    """C10: from one backup, two resumed fits go different ways: no key is in it."""
    ends = []
    with dpvi.PrivacyLedger(tmp_path / "ledger_0") as ledger:
        interrupted(ledger, tmp_path / "backup", [3], noise=2.0, seed=None)
    shutil.copytree(tmp_path / "backup", tmp_path / "kept")
    shutil.copy(tmp_path / "ledger_0", tmp_path / "ledger_1")
    for number in range(2):
        shutil.rmtree(tmp_path / "backup")
        shutil.copytree(tmp_path / "kept", tmp_path / "backup")
        with dpvi.PrivacyLedger(tmp_path / f"ledger_{number}") as ledger:
            model = make(ledger, noise=2.0)
            fit(model, tmp_path / "backup")
            ends.append(weights(model))
    assert np.abs(ends[0] - ends[1]).max() > 1e-4


def test_nothing_left_gives_the_model_of_the_last_epoch(tmp_path, ledger):
    interrupted(
        ledger, tmp_path / "backup", [12]
    )  # The last execution: everything is charged, the last epoch is not over.
    assert ledger.num_releases == EPOCHS * STEPS
    model = make(ledger)
    history = fit(model, tmp_path / "backup")
    assert history.history == {}
    assert history.epoch == []
    assert model.optimizer.iterations == (EPOCHS - 1) * STEPS
    assert model.predict(X, verbose=0).shape == (100,)
    assert ledger.num_releases == EPOCHS * STEPS
    assert (tmp_path / "backup" / "fit.npz").exists()
    assert model.privacy_report().num_records == 100


def test_a_finished_fit_that_kept_its_backup_is_not_run_again(tmp_path, ledger):
    first = make(ledger)
    fit(first, tmp_path / "backup", delete_checkpoint=False)
    again = make(ledger)
    for _ in range(2):
        history = fit(again, tmp_path / "backup", delete_checkpoint=False)
    assert history.epoch == []
    assert ledger.num_releases == EPOCHS * STEPS
    np.testing.assert_array_equal(weights(first), weights(again))


def test_learning_rates_that_callbacks_changed_come_back(tmp_path, ledger):
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2)
    model = make(ledger, noise=2.0, rate=0.08)
    with pytest.raises(Interrupted):
        fit(model, tmp_path / "backup", stop=7, callbacks=[halve])
    again = make(ledger, noise=2.0, rate=0.08)
    fit(again, tmp_path / "backup")
    assert float(again.optimizer.learning_rate) == pytest.approx(
        0.02
    )  # Halved before each of two whole epochs.


# ------------------------------------------------------------------ what is in the file


def test_no_key_no_seed_and_no_record_is_on_disk(tmp_path, ledger):
    seed = 729183645
    interrupted(ledger, tmp_path / "backup", [4], seed=seed)
    content = np.load(tmp_path / "backup" / "fit.npz")
    raw = (
        b"".join(content[name].tobytes() for name in content.files) + str(content["meta"]).encode()
    )
    key = np.asarray(_random.new_key(seed))
    for secret in (
        str(seed).encode(),
        np.int64(seed).tobytes(),
        key.tobytes(),
        key[:1].tobytes(),
        key[1:].tobytes(),
    ):
        assert secret not in raw
    for row in X:
        assert row.tobytes() not in raw


# ------------------------------------------------------------------ refusals: nothing spent, nothing lost


def refused(model, directory, ledger, words, error=ValueError, **kwargs):
    before = ledger.num_releases
    with pytest.raises(error, match=words):
        fit(model, directory, **kwargs)
    assert ledger.num_releases == before


def test_a_ledger_in_memory_is_refused(tmp_path):
    model = make(dpvi.PrivacyLedger())
    refused(model, tmp_path, model.privacy_ledger, "PrivacyLedger")


def test_datasets_are_refused(tmp_path, ledger):
    model = make(ledger)
    dataset = tf.data.Dataset.from_tensors((X[:20], Y[:20])).repeat()
    with pytest.raises(ValueError, match="dataset"):
        model.fit(
            dataset,
            num_records=100,
            steps_per_epoch=5,
            sampling="poisson",
            sampling_probability=0.2,
            callbacks=[PrivateBackupAndRestore(tmp_path)],
        )
    assert ledger.num_releases == 0


def test_two_backups_are_refused(tmp_path, ledger):
    refused(
        make(ledger),
        tmp_path,
        ledger,
        "one in each fit",
        callbacks=[PrivateBackupAndRestore(tmp_path)],
    )


@pytest.mark.parametrize(
    ("settings", "arguments", "words"),
    [
        ({"epsilon": 2.0}, {}, "epsilon"),
        ({"clip": 0.5}, {}, "l2_norm_clip"),
        ({"noise": 3.0}, {}, "noise_multiplier"),
        ({}, {"batch_size": 10}, "sampling"),
        ({"seed": 3}, {}, "seed"),
        ({"accountant": "rdp"}, {}, "accountant"),
    ],
)
def test_another_fit_is_refused(tmp_path, ledger_of_stopped, settings, arguments, words):
    ledger = ledger_of_stopped
    refused(make(ledger, **settings), tmp_path / "backup", ledger, words, **arguments)
    assert (tmp_path / "backup" / "fit.npz").exists()


def test_another_ledger_is_refused(tmp_path, ledger_of_stopped):
    with dpvi.PrivacyLedger(tmp_path / "other", dataset_id="others") as other:
        refused(make(other), tmp_path / "backup", other, "another ledger")
    with dpvi.PrivacyLedger(tmp_path / "empty", dataset_id="records") as empty:
        refused(make(empty), tmp_path / "backup", empty, "another ledger")
    with dpvi.PrivacyLedger(
        tmp_path / "rich", dataset_id="records"
    ) as rich:  # As many releases, and not the same.
        for _ in range(9):
            rich.reserve(ledger_of_stopped.entries[0].plan.replace(noise_multiplier=9.0), 1)
        refused(make(rich), tmp_path / "backup", rich, "another ledger")


def test_a_shorter_fit_is_refused(tmp_path, ledger):
    interrupted(ledger, tmp_path / "backup", [8])
    refused(make(ledger), tmp_path / "backup", ledger, "epochs=1", epochs=1)


class WithIntercept(Toy):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.b = self.add_weight("b", [], initializer="zeros")

    def record_loss(self, x, y):
        return super().record_loss(x, tf.cast(y, self.w.dtype) - self.b)


def test_another_model_is_refused(tmp_path, ledger_of_stopped):
    model = WithIntercept()
    model.compile(adam(), epsilon=1.0, delta=1e-5, ledger=ledger_of_stopped, jit_compile=False)
    refused(model, tmp_path / "backup", ledger_of_stopped, "shapes")


DAMAGES = [lambda raw: raw[: len(raw) // 2], lambda raw: b"", lambda raw: b"x" * 100]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_corrupt_backup_is_named(tmp_path, ledger_of_stopped, damage):
    ledger = ledger_of_stopped
    file = tmp_path / "backup" / "fit.npz"
    file.write_bytes(damage(file.read_bytes()))
    refused(make(ledger), tmp_path / "backup", ledger, "not a readable backup")
    file.unlink()
    fit(make(ledger, epsilon=2.0), tmp_path / "backup")  # The way out that the message names.


def test_a_directory_that_cannot_be_written_spends_nothing(tmp_path, ledger):
    (tmp_path / "file").write_text("in the way")
    refused(make(ledger), tmp_path / "file" / "backup", ledger, "backup_dir")
