"""Saves and loads a model as a `.keras` file, with compile settings and ledger.

Functions are saved by name.
"""

from __future__ import annotations

import contextvars
import inspect
import os
import pathlib
import re
import uuid
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

from dp_accounting import NeighboringRelation

from tfp_dpvi import _deprecation, serialization
from tfp_dpvi._tf import (
    Model,
    Structure,
    keras,
    steps_per_execution,
    tf,
    variables_among,
)
from tfp_dpvi.data import Records
from tfp_dpvi.models.state import Compiled
from tfp_dpvi.optimizers import make_dp_optimizer_class, make_termwise_optimizer_class
from tfp_dpvi.privacy import LedgerError, PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.account import Account, Progress

_VERSION = 1
SAVED_KEY = "tfp_dpvi_account"
"""The key of the account in a model's configuration, which no argument of a user has."""

OLD_KEY = "books"
"""The key in files of 0.2 and before."""
_SETTINGS = (
    "epsilon",
    "delta",
    "planned_epochs",
    "accountant",
    "physical_batch_size",
    "jit_compile",
    "unsafe_training_metrics",
    "randomness",
)
IS_WRITING = contextvars.ContextVar("is_writing", default=False)
"""Whether a model is being saved."""


def settings_of_class(model: Model, overrides_config: bool) -> dict[str, str]:
    """Returns the constructor's arguments that every model has: its name, if the class takes one.

    Args:
      model: The model.
      overrides_config: Whether its class adds the arguments of its own `__init__`.

    Raises:
      ValueError: Arguments of the class are missing.
    """
    parameters = inspect.signature(type(model).__init__).parameters
    named = "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    needed = [
        p.name
        for p in list(parameters.values())[1:]
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed and not overrides_config:
        raise ValueError(
            f"{type(model).__name__} needs the arguments {', '.join(needed)}, which would not be "
            "saved: override "
            "get_config\nto return {**super().get_config(), ...} with them."
        )
    return {"name": model.name} if named else {}


def write_account(account: Account) -> dict[str, Any]:
    """Returns the privacy spent as plain values, for `read_account`."""
    return {
        "version": _VERSION,
        "ledger": account.ledger.to_config(),
        "steps_run": account.progress.steps,
        "epochs_run": account.progress.epochs,
        "num_records": account.num_records,
        "num_records_declared": account.num_records_declared,
        "plan": None if account.plan is None else account.plan.to_json(),
        "inputs": None
        if account.inputs is None
        else serialization.encode(account.inputs, "inputs"),
    }


def read_account(spent: dict[str, Any]) -> Account:
    """Returns the account that `write_account` wrote; raises `ValueError` for another version."""
    if spent["version"] != _VERSION:
        raise ValueError(
            f"The file has version {spent['version']!r} of the privacy state; this code reads "
            f"{_VERSION}.\n"
            "Use the tfp_dpvi that wrote it, or a newer one."
        )
    plan, inputs = spent["plan"], spent["inputs"]
    return Account(
        ledger=PrivacyLedger.from_config(spent["ledger"]),
        progress=Progress(spent["steps_run"], spent["epochs_run"]),
        plan=None if plan is None else PrivacyPlan.from_json(plan),
        inputs=None if inputs is None else serialization.decode(inputs),
        num_records=spent["num_records"],
        num_records_declared=spent["num_records_declared"],
    )


def prepare_from_specs(model: Model, inputs: dict[str, Structure]) -> None:
    """Creates a loaded model's variables.

    Args:
      model: The model, whose weights are loaded later.
      inputs: The specs of an account.
    """
    zeros = tf.nest.map_structure(
        lambda spec: tf.zeros([1, *spec.shape[1:]], spec.dtype).numpy(), inputs
    )
    records = Records(zeros["x"], zeros.get("y"), None, 1)
    # In a graph, where layers may still lack the statistics that the file has
    # (`PrivateStandardize`).
    tf.function(lambda: model.prepare(records), autograph=False).get_concrete_function()


def write_settings(model: Model, compiled: Compiled) -> dict[str, Any]:
    """Returns the arguments of `compile`, JSON-ready.

    Args:
      model: The compiled model.
      compiled: Its settings.
    """
    written, target = keras.utils.serialize_keras_object, compiled.target
    steps = int(steps_per_execution(model).numpy())
    return {
        **{name: getattr(target, name) for name in _SETTINGS},
        "neighboring_relation": target.neighboring_relation.name,
        "optimizer": written(model.optimizer),
        "metrics": [written(metric) for metric in compiled.private_metrics],
        "validation_metrics": [written(metric) for metric in compiled.validation_metrics],
        "steps_per_execution": steps if compiled.steps_per_execution_is_set else None,
        "run_eagerly": bool(model.run_eagerly),
    }


def read_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Returns keyword arguments of `compile` from what `write_settings` returned."""
    config, read = dict(config), keras.utils.deserialize_keras_object
    # Classes of DP optimizers are created on first use.
    kind = re.fullmatch(
        r"tfp_dpvi>(Termwise)?DPKeras(\w+)Optimizer",
        config["optimizer"]["registered_name"] or "",
    )
    if kind and hasattr(keras.optimizers, kind[2]):
        make = make_termwise_optimizer_class if kind[1] else make_dp_optimizer_class
        make(getattr(keras.optimizers, kind[2]))
    for name in ("metrics", "validation_metrics"):
        config[name] = [read(metric) for metric in config.pop(name, ())] or None
    config["neighboring_relation"] = NeighboringRelation[config["neighboring_relation"]]
    config["optimizer"] = read(config["optimizer"])
    return config


def save(
    path: str | os.PathLike[str],
    write: Callable[[str], None],
    *,
    overwrite: bool,
    save_format: str | None,
) -> None:
    """Writes a `.keras` file atomically.

    Args:
      path: The file's path.
      write: Writes the model to a path in the same folder.
      overwrite: Whether to replace an earlier file.
      save_format: None or "keras".

    Raises:
      ValueError: Another format, or a path that is taken or not writable; an earlier file is
        unchanged.
    """
    path = os.fspath(path)
    if save_format not in (None, "keras") or not path.endswith(".keras"):
        raise ValueError(
            f"filepath={path!r}, save_format={save_format!r}: a model with its ledger is saved in "
            "Keras's own format, "
            'save("model.keras"). Use export(path) for a SavedModel, and save_weights for weights '
            "alone."
        )
    if not overwrite and os.path.lexists(path):
        raise ValueError(
            f"filepath={path!r} exists and overwrite=False: pass another name. Nothing was changed."
        )
    target = pathlib.Path(path).absolute()
    temporary = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}.keras")
    try:
        temporary.touch()
    except OSError as error:
        raise ValueError(
            f"filepath={str(target)!r} cannot be written ({error}): pass a writable path."
        ) from error
    token = IS_WRITING.set(True)
    try:
        write(str(temporary))
        os.replace(temporary, target)
    finally:
        IS_WRITING.reset(token)
        temporary.unlink(missing_ok=True)


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
) -> Model:
    """Loads a model that `save` wrote, with clear errors for damaged files.

    Otherwise as `dpvi.keras.models.load_model`.

    Load only files that you trust: nothing is unpickled, but Keras imports the modules whose
    classes a file names.

    A ledger on disk is opened again, see `PrivacyLedger.from_config`.

    Args:
      filepath: The path of a `.keras` file.
      custom_objects: Functions and classes by name, if they are not registered (`dpvi.register`).
      compile: Whether to compile the model with the settings of the file.

    Returns:
      The model, whose next fit draws fresh noise.

    Raises:
      ValueError: no file, or not a complete `.keras` file (no ledger is opened then); or one with
        contents that `save` never writes.
      TypeError: likewise, or a class that is not registered.
      LedgerError: its ledger is damaged, or is not the model's.
    """
    path = os.fspath(filepath)
    if not os.path.isfile(path) or not path.endswith(".keras"):
        raise ValueError(
            f"filepath={path!r} is no .keras file: pass the path of a file that model.save wrote."
        )
    try:
        with zipfile.ZipFile(path) as archive:
            if (
                damaged := archive.testzip()
            ) is not None or "config.json" not in archive.namelist():
                raise zipfile.BadZipFile(f"{damaged or 'config.json'} was altered")
            config = archive.read("config.json").decode(errors="replace")
    except (
        zipfile.BadZipFile,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
        zlib.error,
    ) as error:
        raise ValueError(
            f"filepath={path!r} is not a complete .keras file ({error}; {os.path.getsize(path)} "
            "bytes): it is truncated, altered "
            "or in another format. Use another copy, or fit again; the ledger keeps the spending."
        ) from error
    try:
        _deprecation.import_named(config)
        model = keras.models.load_model(path, custom_objects=custom_objects, compile=compile)
    except (ImportError, MemoryError, tf.errors.ResourceExhaustedError):  # Not of the file.
        raise
    except Exception as error:  # Keras, h5py and TensorFlow read whatever a file says.
        text = str(error)
        if isinstance(error, LedgerError | TypeError | ValueError) and len(text.splitlines()) <= 2:
            raise
        what = f"{type(error).__name__}: {' '.join(text.split()):.200}"
        raise ValueError(
            f"filepath={path!r} cannot be loaded ({what}).\nIt was altered, or written by another "
            "version: use another copy, "
            "or fit again; the ledger keeps the spending."
        ) from error
    if not isinstance(model, Model):  # Keras returns whatever a file describes.
        raise ValueError(f"filepath={path!r} holds no model: it was altered. Use another copy.")
    return model


def variables_of(model: Model) -> list[tf.Variable]:
    """Returns all variables that a step reads and writes."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.learned_variables())
    weights = variables_among([*model.trainable_variables, *model.non_trainable_variables])
    held = {variable.ref(): variable for variable in weights}
    for metric in model.metrics:  # They may hold exact losses of evaluated records.
        for variable in metric.variables:
            held.pop(variable.ref(), None)
    return [*held.values(), *model.optimizer.variables]
