"""C7: with the private channel cut, an extreme record changes nothing that leaves `fit` by default.

Two neighbouring data sets are fitted from the same keys. Every clipped sum is replaced by zeros before the noise is added, so
whatever still differs between the two runs came past the mechanism. Compiled with XLA, whose sums have one order: TensorFlow's
own `AddN` of three or more terms adds up in an order that depends on which thread was first.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
import logging
import pathlib
import re
import zipfile
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.optimizers import dp_keras

tfd = tfp.distributions
NUM = 60
CANARY = np.float32(71942.53)
X = np.random.default_rng(0).normal(size=(NUM, 2)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
privatize = dp_keras.privatize


@dpvi.register("canary_prior")
def prior():
    return tfd.Sample(tfd.Normal(0.0, 1.0), 2)


@dpvi.register("canary_likelihood")
def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params))


def cut(clipped, **kwargs):
    nothing = [tf.zeros_like(part) for part in clipped.tensors]
    return privatize(dataclasses.replace(clipped, tensors=nothing), **kwargs)


NEIGHBOURS = {
    "without it": (X[:-1], Y[:-1]),
    "with it": (np.concatenate([X[:-1], [[CANARY, -CANARY]]]).astype("float32"), Y),
}


class Events(keras.callbacks.Callback):
    """Whatever Keras tells callbacks."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((batch, dict(logs)))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((epoch, dict(logs)))


def published(
    directory: pathlib.Path,
    which: str,
    clipping: str = "flat",
    jit_compile: bool = True,
    **settings,
) -> dict:
    """Everything that a fit with all callbacks leaves behind, channel by channel, without the clock."""
    x, y = NEIGHBOURS[which]
    directory.mkdir()
    model = dpvi.DPVI(prior, likelihood, seed=5, name="ward", clipping=clipping)
    ledger = dpvi.PrivacyLedger(directory / "ledger", dataset_id="ward")
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=1.0, noise_multiplier=2.0, learning_rate=0.1
    )
    metrics = [dpvi.metrics.PrivateELBO(-5.0, 0.0), dpvi.metrics.PrivateClippedFraction()]
    model.compile(
        optimizer, delta=1e-5, metrics=metrics, ledger=ledger, jit_compile=jit_compile, **settings
    )
    events = Events()
    callbacks = [
        dpvi.callbacks.PrivacyTensorBoard(directory / "board"),
        dpvi.callbacks.PrivateBackupAndRestore(directory / "backup", delete_checkpoint=False),
        keras.callbacks.CSVLogger(str(directory / "log.csv")),
        keras.callbacks.ModelCheckpoint(str(directory / "best.weights.h5"), monitor="private_elbo", mode="max", save_weights_only=True),
        keras.callbacks.ReduceLROnPlateau(monitor="private_elbo", patience=1, mode="max"),
        keras.callbacks.EarlyStopping(monitor="private_elbo", patience=2, mode="max"),
        events,
    ]  # fmt: skip
    printed, logged = io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(logged)
    logging.getLogger().addHandler(handler)
    try:
        with (
            contextlib.redirect_stdout(printed),
            mock.patch.object(dp_keras, "privatize", cut),
            internals.runs_named("ward"),
        ):
            history = model.fit(
                x, y, batch_size=20, epochs=4, num_records=NUM, verbose=2, callbacks=callbacks
            )
    finally:
        logging.getLogger().removeHandler(handler)
    model.save(directory / "model.keras")
    model.export(directory / "exported")
    entries = [
        {**vars(entry), "plan": entry.plan.to_json(), "since": None} for entry in ledger.entries
    ]
    charged = {
        "dataset_id": ledger.dataset_id,
        "num_releases": ledger.num_releases,
        "exposures": ledger.exposures,
        "entries": entries,
    }
    ledger.close()
    board = EventAccumulator(str(directory / "board"), size_guidance={"tensors": 0}).Reload()
    with np.load(directory / "backup" / "fit.npz") as backup:
        backed_up = {name: backup[name].tolist() for name in backup.files}
    meta = json.loads(backed_up.pop("meta"))
    del meta[
        "ledger"
    ]  # Its random identity, and its version, which counts reservations: they go by the clock.
    with (directory / "log.csv").open() as file:
        rows = list(csv.reader(file))
    with zipfile.ZipFile(directory / "model.keras") as archive:
        config = json.loads(archive.read("config.json"))
    variables = str(directory / "exported" / "variables" / "variables")
    exported = {
        name: tf.train.load_variable(variables, name)
        for name, _ in tf.train.list_variables(variables)
    }
    return {
        "printed": re.sub(r"\d+(\.\d+)?(us|ms|s)(/\w+)?", "", printed.getvalue()),
        "logged": logged.getvalue(),
        "history": history.history,
        "callbacks": events.seen,
        "board": {
            tag: [tf.make_ndarray(one.tensor_proto).tolist() for one in board.Tensors(tag)]
            for tag in board.Tags()["tensors"]
        },
        "backup": (meta, backed_up),
        "csv": rows,
        "report": model.privacy_report().to_json(),
        "ledger": charged,
        "config": {k: v for k, v in config["config"].items() if k != "tfp_dpvi_account"},
        "plan": config["config"]["tfp_dpvi_account"]["plan"],
        "posterior": model.posterior.sample(3, seed=(0, 1)).numpy().tolist(),
        "weights": [value.tolist() for value in model.get_weights()],
        "card": (directory / "exported" / "README.md").read_text(),
        "exported": {
            name: value.tolist() for name, value in exported.items() if not isinstance(value, bytes)
        },
    }


@pytest.fixture(scope="module", params=[pytest.param("paired", marks=pytest.mark.slow), "flat"])
def both(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("canary")
    return directory, {
        which: published(directory / which.replace(" ", "_"), which, request.param)
        for which in NEIGHBOURS
    }


def test_every_channel_was_read(both):
    """Otherwise the next test would compare nothing."""
    _, runs = both
    run = runs["with it"]
    assert "private_elbo" in run["printed"]
    assert len(run["history"]["private_elbo"]) >= 3
    assert len(run["callbacks"]) >= 6  # Each epoch's execution and its end.
    assert {"surrogate_posterior/loc", "privacy/epsilon_spent", "privacy/private_elbo"} <= set(
        run["board"]
    )
    assert len(run["csv"]) == 1 + len(run["history"]["epsilon"])
    assert (
        len(run["exported"]) >= 2 or "kappa" in run["history"]
    )  # A calibrated posterior has no variables.
    assert len(run["posterior"]) == 3
    assert run["ledger"]["num_releases"] >= 3


def test_an_extreme_record_changes_nothing_past_the_mechanism(both):
    _, runs = both
    one, other = runs.values()
    for channel in one:
        assert one[channel] == other[channel], channel


def test_the_canary_is_in_no_file(both):
    directory, _ = both
    files = [path for path in directory.rglob("*") if path.is_file()]
    assert len(files) > 15
    forms = [
        CANARY.tobytes(),
        np.float64(CANARY).tobytes(),
        repr(float(CANARY)).encode(),
        b"71942.5",
    ]
    for path in files:
        raw = path.read_bytes()
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                raw = b"".join(archive.read(name) for name in archive.namelist())
        assert not any(form in raw for form in forms), path


def test_a_channel_past_the_mechanism_is_caught(tmp_path):
    """The opt-in does leak, in every log, and is marked as such in TensorBoard and in the report."""
    settings = {"unsafe_training_metrics": True, "jit_compile": False}
    runs = {
        which: published(tmp_path / which.replace(" ", "_"), which, **settings)
        for which in NEIGHBOURS
    }
    one, other = runs.values()
    for channel in ("printed", "history", "callbacks", "board", "csv"):
        assert one[channel] != other[channel], channel
    for channel in ("weights", "exported", "backup", "plan"):
        assert one[channel] == other[channel], channel
    assert one["board"]["non_private/unsafe_loss"] != other["board"]["non_private/unsafe_loss"]
    assert any("NOT PRIVATE" in warning for warning in one["report"]["warnings"])
