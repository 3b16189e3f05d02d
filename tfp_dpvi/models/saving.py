"""A model as a `.keras` file: arguments by name, compile settings, and a ledger that is not forgotten."""

from __future__ import annotations

import contextlib
import inspect
import os
import pathlib
import re
import uuid
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import serialization
from tfp_dpvi._tf import ExportedModel, Model, keras, steps_per_execution, tf
from tfp_dpvi.data import Records
from tfp_dpvi.optimizers import make_dp_optimizer_class, make_termwise_optimizer_class
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.fit import Progress, State

_VERSION = 1
_SETTINGS = (
    "epsilon", "delta", "planned_epochs", "accountant", "physical_batch_size", "jit_compile", "unsafe_training_metrics",
)  # fmt: skip


class SavedModel(ExportedModel):
    """The part of `DPModel` that is saved and loaded. `_dp` holds everything that concerns privacy."""

    _dp: State

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that the model was built with, and its ledger. A subclass adds those of its own `__init__`.

        The seed is left out: it is as good as the key.

        Raises:
          ValueError: the class's other arguments would be missing when it is loaded.
        """
        parameters = inspect.signature(type(self).__init__).parameters
        named = "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        own = type(self).get_config.__qualname__.split(".")[0] == "SavedModel"
        needed = [p.name for p in list(parameters.values())[1:] if p.default is p.empty and p.kind not in (2, 4)]
        if own and needed:
            raise ValueError(
                f"{type(self).__name__} needs the arguments {', '.join(needed)}, which a file would not hold: override "
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
            "inputs": None if state.inputs is None else serialization.encode(state.inputs, "inputs"),
        }
        return {**({"name": self.name} if named else {}), "books": spent}

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Model:
        """Returns a model with the same arguments and ledger; weights are its own until they are loaded."""
        config = dict(config)
        spent, parts = config.pop("books", None), config.pop("parts", {})
        if "num_predictive_draws" in config:  # A `DPVI`; those from before there was a paired clip have the flat one.
            config.setdefault("clipping", "flat")
        model = cls(**config, **{name: serialization.decode(part, custom_objects) for name, part in parts.items()})
        if spent is None:
            return model
        if spent["version"] != _VERSION:
            raise ValueError(
                f"The file has version {spent['version']!r} of what a model keeps beside its weights; this code reads "
                f"{_VERSION}.\nUse the tfp_dpvi that wrote it, or a newer one."
            )
        state = model._dp
        state.ledger = PrivacyLedger.from_config(spent["ledger"])
        state.progress = Progress(spent["steps_run"], spent["epochs_run"])
        state.num_records, state.num_records_declared = spent["num_records"], spent["num_records_declared"]
        state.plan = None if spent["plan"] is None else PrivacyPlan.from_json(spent["plan"])
        if spent["inputs"] is not None:
            state.inputs = serialization.decode(spent["inputs"])
            model.prepare(_no_records(state.inputs))
        return model

    def get_compile_config(self) -> dict[str, Any] | None:
        """Returns the arguments of `compile`, JSON-ready; None before it."""
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
            "steps_per_execution": int(steps_per_execution(self).numpy()) if state.steps_per_execution_is_set else None,
            "run_eagerly": bool(self.run_eagerly),
        }

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as before, and makes the optimizer's variables, for `load_model` to fill."""
        config, read = dict(config), keras.utils.deserialize_keras_object
        _make_class(config["optimizer"].get("registered_name") or "")
        for name in ("metrics", "validation_metrics"):
            config[name] = [read(one) for one in config.pop(name, ())] or None
        config["neighboring_relation"] = NeighboringRelation[config["neighboring_relation"]]
        plan = self._dp.plan
        self.compile(read(config.pop("optimizer")), **config)
        self._dp.plan = plan
        if self.built:
            self.optimizer.build(self.trainable_variables)

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """Saves as Keras does, after emptying metrics: they may hold exact losses of the records last evaluated."""
        for metric in self.metrics:
            metric.reset_state()
        super().save_own_variables(store)

    def save(
        self, filepath: str | os.PathLike[str], overwrite: bool = True, save_format: str | None = None, **kwargs: Any
    ) -> None:
        """Saves model, compile settings, optimizer state and ledger in one `.keras` file; see `dpvi.keras.Model.save`.

        `dpvi.load_model` or `dpvi.keras.models.load_model` brings it back, with what these data have spent: see
        `PrivacyLedger.from_config`. Priors, likelihoods and other functions are saved by name: see `dpvi.register`. The file
        holds no record and no key; of a seeded run it does not hold the seed, so a loaded model goes on with fresh noise.

        Args:
          filepath: ends in ".keras".
          overwrite: False refuses an existing file.
          save_format: None or "keras"; for a SavedModel see `export`.
          **kwargs: none.

        Raises:
          ValueError: another format, a file that cannot be written, or a part that cannot be saved, such as a lambda; an
            earlier file stays as it was.
        """
        path = os.fspath(filepath)
        if kwargs:
            raise TypeError(f"save got an unexpected keyword argument {next(iter(kwargs))!r}.")
        if save_format not in (None, "keras") or not path.endswith(".keras"):
            raise ValueError(
                f"filepath={path!r}, save_format={save_format!r}: a model with its ledger is saved in Keras's own format, "
                'save("model.keras"). For a SavedModel without it there is export(path), and for weights alone save_weights.'
            )
        if not overwrite and os.path.lexists(path):
            raise ValueError(f"filepath={path!r} exists and overwrite=False: give another name. Nothing was changed.")
        self.get_config()  # What it refuses, it refuses before anything is written.
        with _replaced(path) as temporary:
            super().save(temporary)


def load_model(
    filepath: str | os.PathLike[str], custom_objects: dict[str, Any] | None = None, compile: bool = True
) -> Model:
    """`dpvi.keras.models.load_model`, which works as well, with clear errors where the file is not whole.

    Args:
      filepath: what `save` wrote.
      custom_objects: functions and classes by name, where they are not registered (`dpvi.register`).
      compile: False leaves the model without its compile settings.

    Returns:
      The model, with its ledger: one on disk is opened again, see `PrivacyLedger.from_config`.

    Raises:
      ValueError: no file, or not a whole `.keras` file. Nothing is opened or spent then.
    """
    path = os.fspath(filepath)
    if not os.path.isfile(path) or not path.endswith(".keras"):
        raise ValueError(f"filepath={path!r} is no .keras file: give the path of a file that model.save wrote.")
    try:
        with zipfile.ZipFile(path) as archive:
            if (damaged := archive.testzip()) is not None or "config.json" not in archive.namelist():
                raise zipfile.BadZipFile(f"{damaged or 'config.json'} was altered")
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise ValueError(
            f"filepath={path!r} is not a whole .keras file ({error}; {os.path.getsize(path)} bytes): it was cut short, altered, or "
            "is in another format. Take another copy, or fit again. What was spent stands in the ledger."
        ) from error
    return keras.models.load_model(path, custom_objects=custom_objects, compile=compile)


def variables_of(model: Model) -> list[tf.Variable]:
    """Returns all variables that a step reads and writes."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = {variable.ref(): variable for variable in [*model.trainable_variables, *model.non_trainable_variables]}
    for metric in model.metrics:  # They may hold exact losses of records that were evaluated.
        for variable in metric.variables:
            held.pop(variable.ref(), None)
    return [*held.values(), *model.optimizer.variables]


def _no_records(inputs: dict[str, tf.TensorSpec]) -> Records:
    made = tf.nest.map_structure(lambda spec: np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype), inputs)
    return Records(made["x"], made.get("y"), None, 1)


def _make_class(registered_name: str) -> None:
    """Makes the class of an optimizer: classes over Keras optimizers are made when first asked for."""
    match = re.fullmatch(r"tfp_dpvi>(Termwise)?DPKeras(\w+)Optimizer", registered_name)
    base = getattr(keras.optimizers, match[2], None) if match else None
    if match and base is not None:
        (make_termwise_optimizer_class if match[1] else make_dp_optimizer_class)(base)


@contextlib.contextmanager
def _replaced(path: str) -> Iterator[str]:
    """Yields a new file beside the old one, and renames it once it is whole."""
    target = pathlib.Path(path).absolute()
    temporary = target.with_name(f".{target.stem}.{uuid.uuid4().hex[:8]}.keras")
    try:
        with open(temporary, "wb"):
            pass
    except OSError as error:
        raise ValueError(f"filepath={str(target)!r} cannot be written ({error}): give a file that can.") from error
    try:
        yield str(temporary)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
