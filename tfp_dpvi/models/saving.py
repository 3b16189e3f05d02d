"""Saves and loads a model as a `.keras` file, with compile settings and ledger; functions are saved by name."""

from __future__ import annotations

import inspect
import os
import pathlib
import re
import uuid
import zipfile
import zlib
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import serialization
from tfp_dpvi._tf import ExportedModel, Model, keras, steps_per_execution, tf
from tfp_dpvi.data import Records
from tfp_dpvi.optimizers import make_dp_optimizer_class, make_termwise_optimizer_class
from tfp_dpvi.privacy import LedgerError, PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.fit import Progress, State

_VERSION = 1
_SETTINGS = (
    "epsilon", "delta", "planned_epochs", "accountant", "physical_batch_size", "jit_compile", "unsafe_training_metrics",
    "randomness",
)  # fmt: skip


class SavedModel(ExportedModel):
    """The part of `DPModel` that saves and loads. `_dp` holds all privacy-related state."""

    _dp: State

    def get_config(self) -> dict[str, Any]:
        """Returns the constructor's arguments and the ledger. A subclass adds the arguments of its own `__init__`.

        The seed is left out, since it determines the key.

        Raises:
          ValueError: arguments of the class are missing.
        """
        parameters = inspect.signature(type(self).__init__).parameters
        named = "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        own = type(self).get_config.__qualname__.split(".")[0] == "SavedModel"
        needed = [
            p.name
            for p in list(parameters.values())[1:]
            if p.default is p.empty and p.kind not in (2, 4)
        ]
        if own and needed:
            raise ValueError(
                f"{type(self).__name__} needs the arguments {', '.join(needed)}, which would not be saved: override "
                "get_config\nto return {**super().get_config(), ...} with them."
            )
        state = self._dp
        spent = {
            "version": _VERSION,
            "ledger": state.ledger.to_config(),
            "steps_run": state.progress.steps,
            "epochs_run": state.progress.epochs,
            "num_records": state.num_records,
            "num_records_declared": state.num_records_declared,
            "plan": None if state.plan is None else state.plan.to_json(),
            "inputs": None
            if state.inputs is None
            else serialization.encode(state.inputs, "inputs"),
        }
        return {**({"name": self.name} if named else {}), "books": spent}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> Model:
        """Returns a model with the same arguments and ledger, and new weights until they are loaded."""
        config = dict(config)
        spent, parts = config.pop("books", None), config.pop("parts", {})
        if (
            "num_predictive_draws" in config
        ):  # A `DPVI`; files older than the paired clip use the flat one.
            config.setdefault("clipping", "flat")
        model = cls(
            **config,
            **{name: serialization.decode(part, custom_objects) for name, part in parts.items()},
        )
        if spent is None:
            return model
        if spent["version"] != _VERSION:
            raise ValueError(
                f"The file has version {spent['version']!r} of the privacy state; this code reads {_VERSION}.\n"
                "Use the tfp_dpvi that wrote it, or a newer one."
            )
        state = model._dp
        state.ledger = PrivacyLedger.from_config(spent["ledger"])
        state.progress = Progress(spent["steps_run"], spent["epochs_run"])
        state.num_records, state.num_records_declared = (
            spent["num_records"],
            spent["num_records_declared"],
        )
        state.plan = None if spent["plan"] is None else PrivacyPlan.from_json(spent["plan"])
        if spent["inputs"] is not None:
            state.inputs = serialization.decode(spent["inputs"])
            zeros = lambda spec: np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype)  # noqa: E731
            made = tf.nest.map_structure(zeros, state.inputs)
            records = Records(made["x"], made.get("y"), None, 1)
            # In a graph, where layers may still lack the statistics that the file has (`PrivateStandardize`).
            tf.function(lambda: model.prepare(records), autograph=False).get_concrete_function()
        return model

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns the arguments of `compile`, JSON-ready; None before `compile`."""
        state = self._dp
        if state.target is None:
            return None
        written = keras.utils.serialize_keras_object
        return {
            **{name: getattr(state.target, name) for name in _SETTINGS},
            "neighboring_relation": state.target.neighboring_relation.name,
            "optimizer": written(self.optimizer),
            "metrics": [written(one) for one in state.private_metrics],
            "validation_metrics": [written(one) for one in state.validation_metrics],
            "steps_per_execution": int(steps_per_execution(self).numpy())
            if state.steps_per_execution_is_set
            else None,
            "run_eagerly": bool(self.run_eagerly),
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles with saved arguments and creates the optimizer's variables, which `load_model` sets."""
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
            config[name] = [read(one) for one in config.pop(name, ())] or None
        config["neighboring_relation"] = NeighboringRelation[config["neighboring_relation"]]
        plan = self._dp.plan
        self.compile(read(config.pop("optimizer")), **config)
        self._dp.plan = plan
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Saves as Keras does, after resetting metrics: they may hold exact losses of evaluated records."""
        for metric in self.metrics:
            metric.reset_state()
        super().save_own_variables(store)

    def save(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        save_format: str | None = None,
    ) -> None:
        """Saves model, compile settings, optimizer state and ledger in one `.keras` file; see `dpvi.keras.Model.save`.

        `dpvi.load_model` or `dpvi.keras.models.load_model` restores it, with the privacy spent on these data: see
        `PrivacyLedger.from_config`. Priors, likelihoods and other functions are saved by name: see `dpvi.register`. The file
        has no record, key or seed: a loaded model continues with fresh noise.

        Raises:
          ValueError: another format, a path that is not writable, or a part that cannot be saved, such as a lambda; an
            earlier file is unchanged.
        """
        path = os.fspath(filepath)
        if save_format not in (None, "keras") or not path.endswith(".keras"):
            raise ValueError(
                f"filepath={path!r}, save_format={save_format!r}: a model with its ledger is saved in Keras's own format, "
                'save("model.keras"). Use export(path) for a SavedModel, and save_weights for weights alone.'
            )
        if not overwrite and os.path.lexists(path):
            raise ValueError(
                f"filepath={path!r} exists and overwrite=False: pass another name. Nothing was changed."
            )
        self.get_config()  # Raises before anything is written.
        target = pathlib.Path(path).absolute()
        temporary = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}.keras")
        try:
            temporary.touch()
        except OSError as error:
            raise ValueError(
                f"filepath={str(target)!r} cannot be written ({error}): pass a writable path."
            ) from error
        try:
            super().save(str(temporary))
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)


def load_model(
    filepath: str | os.PathLike[str],
    custom_objects: dict[str, Any] | None = None,
    compile: bool = True,
) -> Model:
    """Loads a model that `save` wrote, as `dpvi.keras.models.load_model` does, with clear errors for damaged files.

    Load only files that you trust: nothing is unpickled, but Keras imports the modules whose classes a
    file names.

    A ledger on disk is opened again, see `PrivacyLedger.from_config`. `custom_objects` are functions and classes by name, if
    they are not registered (`dpvi.register`).

    Raises:
      ValueError: no file, or not a complete `.keras` file (no ledger is opened then); or one with contents that `save` never
        writes.
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
    except (
        zipfile.BadZipFile,
        EOFError,
        OSError,
        NotImplementedError,
        RuntimeError,
        zlib.error,
    ) as error:
        raise ValueError(
            f"filepath={path!r} is not a complete .keras file ({error}; {os.path.getsize(path)} bytes): it is truncated, altered "
            "or in another format. Use another copy, or fit again; the ledger keeps the spending."
        ) from error
    try:
        model = keras.models.load_model(path, custom_objects=custom_objects, compile=compile)
    except (ImportError, MemoryError, tf.errors.ResourceExhaustedError):  # Not of the file.
        raise
    except Exception as error:  # Keras, h5py and TensorFlow read whatever a file says.
        text = str(error)
        if isinstance(error, LedgerError | TypeError | ValueError) and len(text.splitlines()) <= 2:
            raise
        what = f"{type(error).__name__}: {' '.join(text.split()):.200}"
        raise ValueError(
            f"filepath={path!r} cannot be loaded ({what}).\nIt was altered, or written by another version: use another copy, "
            "or fit again; the ledger keeps the spending."
        ) from error
    if not isinstance(model, Model):  # Keras returns whatever a file describes.
        raise ValueError(f"filepath={path!r} holds no model: it was altered. Use another copy.")
    return model


def variables_of(model: Model) -> list[tf.Variable]:
    """Returns all variables that a step reads and writes."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = {
        variable.ref(): variable
        for variable in [*model.trainable_variables, *model.non_trainable_variables]
    }
    for metric in model.metrics:  # They may hold exact losses of evaluated records.
        for variable in metric.variables:
            held.pop(variable.ref(), None)
    return [*held.values(), *model.optimizer.variables]
