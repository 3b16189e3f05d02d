"""A training process killed at any moment has spent at least what it released (contract C6), and can go on."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest
from support.trainers import STEPS_PER_EXECUTION, Trainers, check_books, kill_once

FOREVER = """
def train(ledger_path, marks_path):
    mark_steps(marks_path)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=5.0)
    model = make_model(KIND, ledger_path, optimizer=optimizer)
    os.write(1, b"ready %d\\n" % os.getpid())
    model.fit(*data(200), batch_size=20, epochs=10**6, verbose=0)
"""


def kill_many(directory: pathlib.Path, kills: int, seed: int, kind: str) -> int:
    rng = np.random.default_rng(seed)
    lost = 0
    trainers = Trainers(directory, FOREVER.replace("KIND", repr(kind)))
    try:
        for kill in range(1, kills + 1):
            assert kill_once(trainers, float(rng.uniform(0.0, 0.5)), at_start=kill % 10 == 0)
            charged, ended = check_books(directory, kill)
            lost = charged - ended
    finally:
        trainers.close()
    assert charged > STEPS_PER_EXECUTION  # Training went on between the kills.
    return lost


def test_a_kill(tmp_path):
    kill_many(tmp_path, 1, seed=0, kind="logistic")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_kills(tmp_path):
    lost = kill_many(tmp_path, 200, seed=1, kind="posterior")
    print(f"200 kills: {lost} steps charged that had not ended")


# ------------------------------------------------------------------ with PrivateBackupAndRestore

STEPS_PER_EPOCH = 10

RESUMED = """
import json

def train(ledger_path, marks_path, backup, result):
    mark_steps(marks_path)
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=5.0, learning_rate=1.0 / EPOCHS)
    model = make_model(KIND, ledger_path, optimizer=optimizer)
    x, y = data(1000)
    os.write(1, b"ready %d\\n" % os.getpid())
    history = model.fit(
        x, y, batch_size=100, epochs=EPOCHS, verbose=0, callbacks=[dpvi.callbacks.PrivateBackupAndRestore(backup)]
    )
    accuracy = float(np.mean((model.predict(x, verbose=0) > 0.5) == y))
    found = dict(accuracy=accuracy, steps=int(model.optimizer.iterations), epochs=history.epoch)
    with open(result, "w") as file:
        json.dump(found, file)
"""


def kill_and_resume(
    directory: pathlib.Path, kills: int, epochs: int, seed: int, kind: str
) -> tuple[list, list]:
    """Fits that are killed and resumed until `kills` kills are done and a fit has gone on after one; then as many that
    nobody kills. Their results."""
    rng = np.random.default_rng(seed)
    trainers = Trainers(
        directory, RESUMED.replace("EPOCHS", str(epochs)).replace("KIND", repr(kind))
    )
    done, resumed, alone = 0, [], []
    backup, result = directory / "backup", directory / "result"
    try:
        while True:
            left = backup.joinpath("fit.npz").exists()
            went_on = any(len(one["epochs"]) < epochs for one in resumed)
            if done >= kills and went_on and not left:
                break
            if done < kills or not (
                went_on or left
            ):  # A kill may come before the first backup or after the last.
                killed = kill_once(
                    trainers,
                    float(rng.uniform(0.0, 0.6)),
                    backup,
                    result,
                    at_start=bool(rng.uniform() < 0.1),
                )
            else:
                trainers.start(backup, result)
                assert trainers.answer("ended") == 0
                killed = False
            done += killed
            check_books(directory, done)
            if result.exists() and not backup.joinpath("fit.npz").exists():
                resumed.append(json.loads(result.read_text()))
                result.unlink()
        for number in range(max(2, len(resumed))):
            trainers.start(directory / f"backup_{number}", result)
            assert trainers.answer("ended") == 0
            alone.append(json.loads(result.read_text()))
    finally:
        trainers.close()
    return resumed, alone


def check_resumed(resumed: list, alone: list, epochs: int) -> None:
    assert resumed
    for one in resumed:
        # As many steps as without an interruption, and epochs since the last one only.
        assert one["steps"] == epochs * STEPS_PER_EPOCH
        assert one["epochs"] == list(range(epochs - len(one["epochs"]), epochs))
    assert all(one["steps"] == epochs * STEPS_PER_EPOCH for one in alone)
    # Noise 5 on 1,000 separable records: after 600 or 2,000 steps runs of one kind differ by less than 0.02.
    means = [np.mean([one["accuracy"] for one in runs]) for runs in (resumed, alone)]
    assert means[0] == pytest.approx(means[1], abs=0.03)
    assert min(means) > 0.9


@pytest.mark.slow
def test_three_kills_and_a_resumed_fit(tmp_path):
    resumed, alone = kill_and_resume(tmp_path, 3, epochs=60, seed=0, kind="logistic")
    check_resumed(resumed, alone, epochs=60)
    assert any(len(one["epochs"]) < 60 for one in resumed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_hundred_kills_and_resumed_fits(tmp_path):
    resumed, alone = kill_and_resume(tmp_path, 100, epochs=200, seed=1, kind="posterior")
    check_resumed(resumed, alone, epochs=200)
    print(
        f"100 kills in {len(resumed)} fits: accuracy {[one['accuracy'] for one in resumed]}, alone {[one['accuracy'] for one in alone]}"
    )
