"""What comes from outside, altered: a clear error or the right value, nothing else, and nothing is ever unpickled."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import pathlib
import sqlite3
import zipfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import strategies as st
from support import references
from support.alterations import (
    OF_BYTES,
    OF_JSON,
    VALUES,
    alter_bytes,
    alter_json,
    for_many,
    is_clear,
)
from support.federation import prior_of

import tfp_dpvi as dpvi
from tfp_dpvi import serialization
from tfp_dpvi.callbacks import Backup
from tfp_dpvi.federated import Factor, MessageError, Reply, StudyTerms, Task
from tfp_dpvi.privacy import (
    EachRecordOncePerEpoch,
    FixedSizeSampling,
    FullBatch,
    LedgerError,
    PoissonSampling,
    PrivacyLedger,
    PrivacyPlan,
)

PACKAGE = pathlib.Path(dpvi.__file__).parent


def same(a, b):
    """Whether two JSON values are equal, with their kinds; NaN is itself, and a large integer the nearest float."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float) and isinstance(b, int):
        return a == float(b)
    return a == b or (a != a and b != b)


REFUSED = object()


def read_by(call, *errors):
    """Returns what a call reads, or REFUSED after one of these errors, which must be clear."""
    try:
        return call()
    except errors as error:
        clear, text = is_clear(error), repr(error)
    assert clear, text
    return REFUSED


# ---------------------------------------------------------------------- plans

PLANS = [
    PrivacyPlan(PoissonSampling(0.01), 1.5, 100, l2_norm_clip=0.5, num_records=1000),
    PrivacyPlan(FullBatch(), 2.0, 3, "replace_one", purpose="means of 3 columns"),
    PrivacyPlan(EachRecordOncePerEpoch(10), 5.0, 100, "replace_one", metrics=("accuracy",)),
    PrivacyPlan(FixedSizeSampling(100, 10), 2.0, 10, "replace_one", accountant="rdp"),
]


@for_many(150, 30_000, number=st.integers(0, len(PLANS) - 1), alterations=OF_JSON)
def test_an_altered_plan(number, alterations):
    data = alter_json(PLANS[number].to_json(), alterations)
    plan = read_by(lambda: PrivacyPlan.from_json(data), TypeError, ValueError)
    if plan is REFUSED:
        return
    assert plan.event_of(plan.num_releases) is not None
    again = plan.to_json()
    for name, value in data.items():
        if name == "gradient_sensitivity" or (name not in again and not value):
            continue  # Of earlier versions, or left out of what `to_json` writes.
        assert same(again[name], value), name
    assert PrivacyPlan.from_json(json.loads(json.dumps(again))) == plan


@for_many(20, 2_000, data=VALUES)
def test_what_is_no_plan_at_all(data):
    with pytest.raises((TypeError, ValueError)) as caught:
        PrivacyPlan.from_json(data)
    assert is_clear(caught.value)


# ---------------------------------------------------------------------- messages of a federation

TERMS = {
    full: StudyTerms("study", prior_of(2, full_rank=full), most_change=1e4)
    for full in (True, False)
}
MESSAGES = {
    (Task, full): Task(
        terms.identity, "a", "r", 1, terms.prior, terms.prior / Factor.one(2, full_rank=full)
    )
    for full, terms in TERMS.items()
} | {
    (Reply, full): Reply(
        terms.identity, "a", "r", 1, Factor.one(2, full_rank=full) * terms.prior, 0.5, 1e-5, "why"
    )
    for full, terms in TERMS.items()
}
KIND_OF_MESSAGE = st.sampled_from(list(MESSAGES))


def is_read_right(kind, message, terms):
    """Whether a message is refused by `MessageError`, or read as what its JSON says."""
    read = read_by(lambda: kind.from_bytes(message, terms), MessageError)
    if read is REFUSED:
        return True
    said, again = json.loads(message), json.loads(read.to_bytes())
    for name in ("posterior", "cavity", "change"):
        if said.get(name) is not None:
            for part, numbers in said[name].items():
                np.testing.assert_array_equal(again[name].pop(part), numbers)
            assert not again[name]
            del said[name], again[name]
    return same(said, again)


@for_many(150, 20_000, which=KIND_OF_MESSAGE, alterations=OF_JSON)
def test_an_altered_message(which, alterations):
    kind, full_rank = which
    data = alter_json(json.loads(MESSAGES[which].to_bytes()), alterations)
    assert is_read_right(kind, json.dumps(data).encode(), TERMS[full_rank])


@for_many(150, 20_000, which=KIND_OF_MESSAGE, alterations=OF_BYTES)
def test_a_message_with_altered_bytes(which, alterations):
    kind, full_rank = which
    message = alter_bytes(MESSAGES[which].to_bytes(), alterations)
    assert is_read_right(kind, message, TERMS[full_rank])


@for_many(50, 5_000, full_rank=st.booleans(), alterations=OF_JSON)
def test_altered_terms(tmp_path_factory, full_rank, alterations):
    path = tmp_path_factory.getbasetemp() / "terms.json"
    TERMS[full_rank].save(path)
    data = alter_json(json.loads(path.read_text()), alterations)
    path.write_text(json.dumps(data))
    terms = read_by(lambda: StudyTerms.load(path), TypeError, ValueError)
    if terms is REFUSED:
        return
    terms.save(path)
    again = json.loads(path.read_text())
    for name in ("shift", "precision"):
        np.testing.assert_allclose(
            again["prior"].pop(name), data["prior"].pop(name), rtol=1e-7, atol=1e-7
        )
    assert same(again, data)


# ---------------------------------------------------------------------- ledgers


@pytest.fixture(scope="module")
def ledger_path(tmp_path_factory):
    """A ledger's file with something in each table."""
    path = tmp_path_factory.mktemp("ledger") / "books"
    with PrivacyLedger(path, dataset_id="survey", budget_epsilon=9.0, budget_delta=1e-5) as ledger:
        ledger.confirm(ledger.reserve(PrivacyPlan(FullBatch(), 40.0, 100), 7), steps_run=5)
        ledger.reserve(PrivacyPlan(PoissonSampling(0.01), 4.0, 100), 3)
        ledger.record_exposure("exact losses were shown")
    return path


@pytest.fixture(scope="module")
def ledger_contents(ledger_path):
    return open_and_look(ledger_path)[1]


def contents_of(ledger):
    return ledger.budget, ledger.entries, ledger.unconfirmed_steps, ledger.exposures


def open_and_look(path, read_only=True):
    with PrivacyLedger(path, read_only=read_only) as ledger:
        return ledger, contents_of(ledger)


@for_many(60, 10_000, alterations=OF_BYTES, used=st.booleans())
def test_a_ledger_with_altered_bytes(
    ledger_path, ledger_contents, tmp_path_factory, alterations, used
):
    """Most bytes of a file are zeros that nothing reads: every second case alters one that is none."""
    data = ledger_path.read_bytes()
    if used:
        places = [at for at, byte in enumerate(data) if byte]
        alterations = [
            (action, (places[int(where * len(places))] + 0.5) / len(data), new)
            for action, where, new in alterations
        ]
    path = tmp_path_factory.getbasetemp() / "altered"
    damaged = alter_bytes(data, alterations)
    path.write_bytes(damaged)
    found = read_by(lambda: open_and_look(path)[1], LedgerError)
    assert found in (REFUSED, ledger_contents)
    assert path.read_bytes() == damaged


COLUMNS = [
    (table, column)
    for table, columns in {
        "ledger": ("format", "ledger_id", "dataset_id", "version", "continued", "digest"),
        "plans": ("id", "plan"),
        "charges": ("id", "plan", "run", "seeded", "writer", "steps", "since"),
        "reservations": ("id", "charge", "steps", "steps_run"),
        "budgets": ("id", "epsilon", "delta", "renyi_order"),
        "exposures": ("id", "text"),
    }.items()
    for column in columns
]
SQL_VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=8), st.binary(max_size=8),
    st.sampled_from([0, 1, 2, 3, 4, 5, 2.0, "1", "{}", "[]", "null", "[" * 10_000, b"\xff"]),
)  # fmt: skip


@for_many(
    40,
    5_000,
    place=st.sampled_from(COLUMNS),
    value=SQL_VALUES,
    row=st.integers(0, 2),
    sealed=st.booleans(),
)
def test_a_ledger_with_altered_rows(
    ledger_path, ledger_contents, tmp_path_factory, place, value, row, sealed
):
    """Of this format; and of the one before digests, whose values are at least possible ones."""
    path = tmp_path_factory.getbasetemp() / "altered"
    path.write_bytes(ledger_path.read_bytes())
    table, column = place
    with contextlib.closing(sqlite3.connect(path)) as client, client:
        client.execute("PRAGMA ignore_check_constraints = ON")
        if not sealed:
            client.execute("ALTER TABLE ledger DROP COLUMN digest")
            client.execute("UPDATE ledger SET format = 3")
        with contextlib.suppress(sqlite3.Error, OverflowError):
            client.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (value, row))
    for read_only in (True, False):
        read = read_by(lambda read_only=read_only: open_and_look(path, read_only), LedgerError)
        if read is not REFUSED:
            ledger, found = read
            assert not sealed or found == ledger_contents
            assert all(entry.steps > 0 for entry in ledger.entries)
            json.dumps(ledger.mark())
            assert ledger.dp_event is not None


# ---------------------------------------------------------------------- values in saved files

ENCODED = serialization.encode(
    {
        "prior": [1, 2.5, None, "text", True],
        "shape": (np.arange(3.0), dpvi.synthetic.Integer(0, 9)),
        "spec": tf.TensorSpec([None, 3]),
    },
    "value",
)


@for_many(150, 10_000, alterations=OF_JSON)
def test_an_altered_value_of_a_saved_model(alterations):
    data = alter_json(ENCODED, alterations)
    again = read_by(
        lambda: serialization.encode(serialization.decode(data), "value"), TypeError, ValueError
    )
    if again is REFUSED:
        return
    assert serialization.encode(serialization.decode(again), "value") is not None


@pytest.mark.parametrize(
    "place",
    [
        "os:system",
        "tfp_dpvi.models.saving:os.system",
        "tfp_dpvi.serialization:importlib.import_module",
        "tfp_dpvi.serialization:decode.__globals__",
        "tfp_dpvi.serialization:np",
        "tfp_dpvi.privacy.ledger:PrivacyLedger",
        "tfp_dpvi",
        "tfp_dpvi.privacy:",
        "tfp_dpvi.nowhere:f",
        "tfp_dpvi.synthetic.nowhere:f",
        "tfp_dpvi.data.schema:np.load",
        "tfp_dpvi.surrogates:tf.io.write_file",
        "tfp_dpvi.data.columns:abc.ABC",
        "tfp_dpvi.serialization:nothing",
        7,
    ],
)
def test_a_file_names_only_values_and_functions_of_this_library(place, tmp_path):
    """Through modules that the library imports a file could have called any function, while it was read."""
    mark = tmp_path / "mark"
    for config in (
        {"value": place, "fields": {"command": f"touch {mark}"}},
        {"value": place, "fields": {}},
        {"library": place},
        {"partial": {"library": place}, "args": [f"touch {mark}"], "kwargs": {}},
    ):
        if place == "tfp_dpvi.privacy.ledger:PrivacyLedger" and "value" not in config:
            continue
        with pytest.raises(ValueError, match=r"altered|not part"):
            serialization.decode(config)
    assert not mark.exists()


# ---------------------------------------------------------------------- models and backups


def with_config(data, config):
    """Returns a `.keras` file with another `config.json`, and checksums that are right."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            text = json.dumps(config) if name == "config.json" else old.read(name)
            new.writestr(name, text)
    return changed.getvalue()


def loaded(path):
    """Returns a model's settings and weights, or REFUSED."""
    model = read_by(lambda: dpvi.load_model(path), LedgerError, TypeError, ValueError)
    if model is REFUSED:
        return REFUSED
    config = model.get_config()
    del config["tfp_dpvi_account"]["ledger"][
        "version"
    ]  # A ledger in memory grows one with each load.
    return config, model.get_weights()


@for_many(6, 1_500, alterations=OF_BYTES)
def test_a_saved_model_with_altered_bytes(tmp_path_factory, alterations):
    data = (references.FOLDER / "vi.keras").read_bytes()
    path = tmp_path_factory.getbasetemp() / "altered.keras"
    path.write_bytes(alter_bytes(data, alterations))
    read = loaded(path)
    if read is not REFUSED:
        config, weights = loaded(references.FOLDER / "vi.keras")
        assert read[0] == config
        for ours, theirs in zip(read[1], weights, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@for_many(4, 600, name=st.sampled_from(["vi", "line"]), alterations=OF_JSON)
def test_a_saved_model_with_an_altered_configuration(tmp_path_factory, name, alterations):
    data = (references.FOLDER / f"{name}.keras").read_bytes()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        config = json.loads(archive.read("config.json"))
    path = tmp_path_factory.getbasetemp() / "altered.keras"
    path.write_bytes(with_config(data, alter_json(config, alterations)))
    loaded(path)


META = {
    "epoch": 3,
    "plan": PLANS[0].to_json(),
    "ledger": {"ledger_id": "f" * 32, "version": 7, "dataset_id": "survey"},
    "public": {"optimizer": "SGD", "seeded": False},
    "learning_rate": 0.1,
    "progress": {"steps": 30, "epochs": 3.0},
}


def backup_of(folder, meta):
    callback = dpvi.callbacks.PrivateBackupAndRestore(folder)
    callback.attach(lambda epoch: Backup(meta, [np.arange(6.0).reshape(2, 3), np.array(7)]), 0)
    callback.on_train_begin()
    return callback


@for_many(40, 1_500, alterations=OF_BYTES)
def test_a_backup_with_altered_bytes(tmp_path_factory, alterations):
    callback = backup_of(tmp_path_factory.getbasetemp() / "backup", META)
    before = callback.read()
    (path,) = pathlib.Path(callback.backup_dir).iterdir()
    path.write_bytes(alter_bytes(path.read_bytes(), alterations))
    read = read_by(callback.read, ValueError)
    if read is not REFUSED:
        assert read.meta == before.meta
        for ours, theirs in zip(read.arrays, before.arrays, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@for_many(40, 2_000, alterations=OF_JSON)
def test_a_backup_with_altered_settings(tmp_path_factory, alterations):
    """What is restored from them has the kinds that a fit writes."""
    meta = alter_json(META, alterations)
    callback = backup_of(tmp_path_factory.getbasetemp() / "backup", meta)
    read = read_by(callback.read, ValueError)
    if read is not REFUSED:
        assert PrivacyPlan.from_json(read.meta["plan"]).num_releases >= 0
        assert isinstance(read.meta["epoch"], int)
        assert read.meta["progress"].keys() == META["progress"].keys()
        assert read.meta["ledger"].keys() == META["ledger"].keys()


# ---------------------------------------------------------------------- nothing is unpickled

UNSAFE_MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve", "_pickle"}
UNSAFE_CALLS = {
    "enable_unsafe_deserialization": "Keras runs byte code from files",
    "eval": "it runs text",
    "exec": "it runs text",
    "func_load": "Keras runs byte code from files",
    "read_pickle": "it unpickles",
    "recv": "a connection of multiprocessing unpickles; use recv_bytes",
    "send": "a connection of multiprocessing pickles; use send_bytes",
}


def unsafe_lines(source):
    """Yields what reads or writes pickles, or runs what a file says."""
    for node in ast.walk(ast.parse(source)):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(alias.name for alias in node.names)]
        for module in modules:
            if module.split(".")[0] in UNSAFE_MODULES:
                yield node.lineno, module
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        settings = {word.arg: getattr(word.value, "value", None) for word in node.keywords}
        if name in UNSAFE_CALLS:
            yield node.lineno, UNSAFE_CALLS[name]
        if settings.get("safe_mode", True) is not True:
            yield node.lineno, "safe_mode"
        of_numpy = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "np"
        if of_numpy and name == "load" and settings.get("allow_pickle") is not False:
            yield node.lineno, "np.load without allow_pickle=False"
        if settings.get("allow_pickle", False) is not False:
            yield node.lineno, "allow_pickle"


def test_nothing_is_ever_unpickled():
    files = [*PACKAGE.rglob("*.py"), *(PACKAGE.parent / "examples").rglob("*.py")]
    assert len(files) > 50
    unsafe = {
        (str(path.relative_to(PACKAGE.parent)), *line)
        for path in files
        for line in unsafe_lines(path.read_text(encoding="utf-8"))
    }
    # formulae's method of a parsed formula, whose functions are checked against a list before.
    calls = {each for each in unsafe if each[0] == "tfp_dpvi/regressions/design.py"}
    assert {what for _, _, what in calls} == {"it runs text"}
    assert len(calls) == 1
    assert unsafe == calls


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from joblib import load",
        "from multiprocessing.connection import Client\nClient('x').recv()",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "keras.models.load_model(path, safe_mode=False)",
        "keras.config.enable_unsafe_deserialization()",
        "eval(text)",
        "pandas.read_pickle(path)",
    ],
)
def test_what_would_unpickle_is_found(source):
    assert list(unsafe_lines(source))
    assert not list(unsafe_lines("np.load(path, allow_pickle=False)\nconnection.recv_bytes(9)"))
