"""A model as a `.keras` file: arguments by name, compile settings, and books that are not forgotten."""

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
from tfp_dpvi._tf import Model, keras, layers_within, steps_per_execution, tf
from tfp_dpvi.data import Records
from tfp_dpvi.models.state import State
from tfp_dpvi.optimizers import make_dp_optimizer_class, make_termwise_optimizer_class
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.fit import Progress

_VERSION = 1
_SETTINGS = ("epsilon", "delta", "planned_epochs", "accountant", "physical_batch_size", "jit_compile")


# ------------------------------------------------------------------ the model


def base_config(model: Model) -> dict[str, Any]:
    """Name and books; raises where the class's other arguments would be missing when it is loaded."""
    parameters = inspect.signature(type(model).__init__).parameters
    named = "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    own = type(model).get_config.__qualname__.split(".")[0] == "SavedModel"
    needed = [p.name for p in list(parameters.values())[1:] if p.default is p.empty and p.kind not in (2, 4)]
    if own and needed:
        raise ValueError(
            f"{type(model).__name__} needs the arguments {', '.join(needed)}, which a file would not hold: override get_config "
            "to return {**super().get_config(), ...} with them."
        )
    state = model._dp
    books = {
        "version": _VERSION,
        "ledger": state.ledger.to_config(),
        "fits": state.progress.fits,
        "steps_run": state.progress.steps,
        "epochs_run": state.progress.epochs,
        "num_records": state.num_records,
        "num_records_declared": state.num_records_declared,
        "plan": None if state.plan is None else state.plan.to_json(),
        "inputs": None if state.inputs is None else serialization.encode(state.inputs, "inputs"),
    }
    return {**({"name": model.name} if named else {}), "books": books}


def from_config(cls: type, config: dict[str, Any], custom_objects: dict[str, Any] | None) -> Model:
    """The model, its variables made and its books opened."""
    config = dict(config)
    books, parts = config.pop("books", None), config.pop("parts", {})
    model = cls(**config, **{name: serialization.decode(part, custom_objects) for name, part in parts.items()})
    if books is None:
        return model
    if books["version"] != _VERSION:
        raise ValueError(
            f"The file has version {books['version']!r} of a model's books; this code reads {_VERSION}. Use the tfp_dpvi that "
            "wrote it, or a newer one."
        )
    state = model._dp
    state.ledger = PrivacyLedger.from_config(books["ledger"])
    # `state.identity` stays new: two processes may load one file, and their fits are not the same.
    state.progress = Progress(books["fits"], books["steps_run"], books["epochs_run"])
    state.num_records, state.num_records_declared = books["num_records"], books["num_records_declared"]
    state.plan = None if books["plan"] is None else PrivacyPlan.from_json(books["plan"])
    if books["inputs"] is not None:
        state.inputs = serialization.decode(books["inputs"])
        model.prepare(_no_records(state.inputs))
    return model


def _no_records(inputs: dict[str, tf.TensorSpec]) -> Records:
    def zeros(spec: tf.TensorSpec) -> np.ndarray:
        return np.zeros([1, *spec.shape[1:]], spec.dtype.as_numpy_dtype)

    made = {name: tf.nest.map_structure(zeros, spec) for name, spec in inputs.items()}
    return Records(made["x"], made.get("y"), None, 1)


# ------------------------------------------------------------------ compile


def compile_config(model: Model) -> dict[str, Any] | None:
    """The arguments of `compile`, JSON-ready; None before it."""
    state = model._dp
    if state.target is None:
        return None
    return {
        **{name: getattr(state.target, name) for name in _SETTINGS},
        "neighboring_relation": state.target.neighboring_relation.name,
        "unsafe_training_metrics": state.target.unsafe_training_metrics,
        "optimizer": keras.utils.serialize_keras_object(model.optimizer),
        "metrics": [keras.utils.serialize_keras_object(one) for one in state.private_metrics],
        "validation_metrics": [keras.utils.serialize_keras_object(one) for one in state.validation_metrics],
        "steps_per_execution": int(steps_per_execution(model).numpy()) if state.steps_per_execution_is_set else None,
        "run_eagerly": bool(model.run_eagerly),
    }


def compile_from_config(model: Model, config: dict[str, Any]) -> None:
    """Compiles with them."""
    config = dict(config)
    _make_class(config["optimizer"].get("registered_name") or "")
    optimizer = keras.utils.deserialize_keras_object(config.pop("optimizer"))
    metrics = [keras.utils.deserialize_keras_object(one) for one in config.pop("validation_metrics")]
    private = [keras.utils.deserialize_keras_object(one) for one in config.pop("metrics", ())]
    relation = NeighboringRelation[config.pop("neighboring_relation")]
    plan = model._dp.plan
    config.update(metrics=private or None, validation_metrics=metrics or None, neighboring_relation=relation)
    model.compile(optimizer, **config)
    model._dp.plan = plan
    if model.built:
        model.optimizer.build(model.trainable_variables)


def _make_class(registered_name: str) -> None:
    """Classes over Keras optimizers are made when first asked for; a file may name one that this process has not made."""
    match = re.fullmatch(r"tfp_dpvi>(Termwise)?DPKeras(\w+)Optimizer", registered_name)
    base = getattr(keras.optimizers, match[2], None) if match else None
    if match and base is not None:
        (make_termwise_optimizer_class if match[1] else make_dp_optimizer_class)(base)


# ------------------------------------------------------------------ the file


def check_path(
    filepath: str | os.PathLike[str], overwrite: bool, save_format: str | None, kwargs: dict[str, Any]
) -> None:
    """Raises unless this is a `.keras` file that may be written."""
    path = os.fspath(filepath)
    if kwargs:
        raise TypeError(f"save got an unexpected keyword argument {next(iter(kwargs))!r}.")
    if save_format not in (None, "keras") or not path.endswith(".keras"):
        raise ValueError(
            f"filepath={path!r}, save_format={save_format!r}: a model with its books is saved in Keras's own format, "
            'save("model.keras"). For a SavedModel without them there is export(path), and for weights alone save_weights.'
        )
    if not overwrite and os.path.lexists(path):
        raise ValueError(f"filepath={path!r} exists and overwrite=False: give another name. Nothing was changed.")


@contextlib.contextmanager
def replaced(filepath: str | os.PathLike[str]) -> Iterator[str]:
    """A new file beside the old one, which takes its place when it is whole."""
    target = pathlib.Path(filepath).absolute()
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


def load_model(
    filepath: str | os.PathLike[str], custom_objects: dict[str, Any] | None = None, compile: bool = True
) -> Model:
    """`dpvi.keras.models.load_model`, which works as well, with clear errors where the file is not whole.

    The classes of this library are registered by its import, which a process that calls this has done.

    Args:
      filepath: what `save` wrote.
      custom_objects: functions and classes by name, where they are not registered (`dpvi.register`).
      compile: False leaves the model without its compile settings.

    Returns:
      The model, with its books: a ledger on disk is opened again, see `PrivacyLedger.from_config`.

    Raises:
      ValueError: no file, or not a whole `.keras` file. Nothing is opened or spent then.
    """
    path = os.fspath(filepath)
    if not os.path.isfile(path) or not path.endswith(".keras"):
        raise ValueError(f"filepath={path!r} is no .keras file: give the path of a file that model.save wrote.")
    problem = None
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
            if damaged is not None:
                problem = f"its part {damaged!r} was altered"
            elif "config.json" not in archive.namelist():
                problem = "it holds no config.json"
    except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, RuntimeError, zlib.error) as error:
        problem = str(error)
    if problem is not None:
        raise ValueError(
            f"filepath={path!r} is not a whole .keras file ({problem}; {os.path.getsize(path)} bytes): it was cut short, altered, or "
            "is in another format. Take another copy, or fit again. What was spent stands in the ledger: nothing was opened "
            "or changed."
        )
    return keras.models.load_model(path, custom_objects=custom_objects, compile=compile)


@contextlib.contextmanager
def loading_weights(model: Model, filepath: str | os.PathLike[str]) -> Iterator[None]:
    """Whatever goes wrong within leaves the variables as they were; a file that cannot be read is named."""
    variables = [*_made(model), *(model.optimizer.variables if model.optimizer is not None else ())]
    held = [variable.numpy() for variable in variables]
    try:
        yield
    except BaseException as error:
        for variable, value in zip(variables, held, strict=True):
            variable.assign(value)
        if not isinstance(error, Exception) or isinstance(
            error, ValueError | TypeError | FileNotFoundError | tf.errors.NotFoundError
        ):
            raise  # They say what is wrong.
        raise ValueError(
            f"filepath={str(filepath)!r} holds no weights that can be read ({type(error).__name__}: {error}): it was cut short, altered, "
            "or is in another format. Take another copy. The model is as it was."
        ) from error


def _made(model: Model) -> list[tf.Variable]:
    """The variables that exist; a part that was not built has none yet, and is filled when it has (checkpoints)."""
    found: list[tf.Variable] = []
    for layer in layers_within(model):  # The model first.
        with contextlib.suppress(ValueError):
            found += layer.variables
    return list({id(variable): variable for variable in found}.values())


def variables_of(model: Model) -> list[tf.Variable]:
    """Returns all variables that a step reads and writes."""
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    held = {variable.ref(): variable for variable in [*model.trainable_variables, *model.non_trainable_variables]}
    for metric in model.metrics:  # They may hold exact losses of records that were evaluated.
        for variable in metric.variables:
            held.pop(variable.ref(), None)
    return [*held.values(), *model.optimizer.variables]


class SavedModel(Model):
    """The part of `DPModel` that is saved and loaded. `_dp` holds everything that concerns privacy."""

    _dp: State

    def get_config(self) -> dict[str, Any]:
        """The arguments that the model was built with, and its books. A subclass adds those of its own `__init__`.

        The seed is left out: it is as good as the key.
        """
        return base_config(self)

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None) -> Model:
        """A model with the same arguments and the same ledger; weights are its own until they are loaded."""
        return from_config(cls, config, custom_objects)

    def get_compile_config(self) -> dict[str, Any] | None:
        """What `compile` was given."""
        return compile_config(self)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles as before; the optimizer's variables are made, for `load_model` to fill."""
        compile_from_config(self, config)

    def save_own_variables(self, store: dict[str, np.ndarray]) -> None:
        """As in Keras, after metrics are emptied: they may hold exact losses of the records last evaluated."""
        for metric in self.metrics:
            metric.reset_state()
        super().save_own_variables(store)

    def load_weights(self, filepath: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """As in Keras; what cannot be loaded leaves the model as it was. Weights come without their books: see `save`.

        Raises:
          ValueError: the file cannot be read, or its weights have other shapes.
        """
        with loading_weights(self, filepath):
            return super().load_weights(filepath, *args, **kwargs)

    def save(
        self, filepath: str | os.PathLike[str], overwrite: bool = True, save_format: str | None = None, **kwargs: Any
    ) -> None:
        """Saves model, compile settings, optimizer state and books in one `.keras` file; see `dpvi.keras.Model.save`.

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
        check_path(filepath, overwrite, save_format, kwargs)
        self.get_config()  # What it refuses, it refuses before anything is written.
        with replaced(filepath) as temporary:
            super().save(temporary)
