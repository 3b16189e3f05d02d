"""Trials of what `fit` will call later, before any privacy is spent: callbacks and checkpoints."""

from __future__ import annotations

import copy
import dis
import inspect
import itertools
import os
import tempfile
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Callback, keras, learning_rate_variable, tf
from tfp_dpvi.metrics import RELEASED

_LIBRARIES = ("keras.", "tf_keras.", "tfp_dpvi.", "tensorflow.", "tensorflow_probability.")
_HOOKS = ("epoch_begin", "epoch_end", "batch_end", "train_batch_end", "train_end")
_SUBSCRIPTS = ("BINARY_SUBSCR", "STORE_SUBSCR")
# Epochs of a learning rate's schedule that are tried.
_MOST_EPOCHS = 1000


def refuse_what_is_none(callbacks: Sequence[Any]) -> None:
    """Raises `TypeError` for what is no callback, such as a class.

    Args:
      callbacks: The user's callbacks.
    """
    for callback in callbacks:
        if isinstance(callback, Callback):
            continue
        fix = "pass an object"
        if isinstance(callback, type):
            fix = f"pass {callback.__name__}(...)"
        elif callable(callback):
            fix = "wrap it in dpvi.keras.callbacks.LambdaCallback(on_epoch_end=...)"
        name = getattr(callback, "__name__", type(callback).__name__)
        raise TypeError(f"callbacks: {name} is no Keras callback: {fix}.")


def try_callbacks(
    callbacks: Sequence[Callback],
    optimizer: Any,
    *,
    of_steps: Collection[str],
    of_validation: Collection[str],
    each_epoch: bool,
    last_epoch: bool,
    epochs: range,
    save: Callable[[str], None],
) -> None:
    """Raises if a callback would fail, or do nothing, once steps have run.

    Args:
      callbacks: The user's callbacks.
      optimizer: The model's optimizer.
      of_steps: The names that logs of steps have.
      of_validation: The names that logs of validation records have, none without them.
      each_epoch: Whether each epoch has those.
      last_epoch: Whether the last one has them.
      epochs: The numbers of the fit's epochs.
      save: Writes the model to a path.

    Raises:
      TypeError, ValueError: What the callback does, and what to do instead. Nothing is spent.
    """
    sets_rate = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
    rates = {"lr"} if any(isinstance(each, sets_rate) for each in callbacks) else set()
    shown = {*of_steps, *of_validation, *rates}
    added = {text for each in callbacks if not _is_of_library(each) for text in _texts(each)}
    rate = learning_rate_variable(optimizer)
    # What logs of each epoch have: an epoch without its validation has the rest.
    always = shown if each_epoch else {*of_steps, *rates}
    at_end = shown if last_epoch else always
    for callback in callbacks:
        kind = type(callback).__name__
        _refuse_other_arguments(callback)
        monitor = getattr(callback, "monitor", None)
        if isinstance(monitor, str) and _watches(callback) and monitor not in {*shown, *added}:
            raise ValueError(_never_shown(f"{kind}(monitor={monitor!r}) watches what", shown))
        known = {"epoch": always | added, "train": at_end | added, "batch": of_steps}
        _refuse_missing_logs(callback, known, shown | added)
        if isinstance(callback, sets_rate) and not isinstance(rate, tf.Variable):
            raise ValueError(
                f"callbacks: {kind} sets the learning rate, but optimizer has a schedule, "
                f"{type(rate).__name__}, which would undo that: pass a number as learning_rate, "
                "or leave out one of them."
            )
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            _try_schedule(callback.schedule, rate, epochs)
        elif isinstance(callback, keras.callbacks.CSVLogger):
            _try_to_write("CSVLogger's filename", callback.filename, makes_folder=False)
        elif isinstance(callback, keras.callbacks.TensorBoard):
            _try_to_write("TensorBoard's log_dir", callback.log_dir, is_folder=True)
        elif isinstance(callback, keras.callbacks.ModelCheckpoint):
            _try_checkpoint(callback, of_steps, always, save)


def _watches(callback: Callback) -> bool:
    """Returns whether a callback uses its `monitor`, as a checkpoint of the best epoch does."""
    kinds = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
    best = getattr(callback, "save_best_only", False)
    return isinstance(callback, kinds) or bool(best)


def _never_shown(what: str, shown: Collection[str]) -> str:
    names = ", ".join(map(repr, sorted(shown)))
    return (
        f"callbacks: {what} this fit never shows; it shows {names}. Exact training losses "
        "and metrics are not private.\nUse a privatised one, "
        'compile(metrics=[dpvi.metrics.PrivateELBO(low=, high=)]) and "private_elbo", or '
        '"val_loss" with public validation_data.'
    )


# ---------------------------------------------------------------------- functions of the user


def _is_of_library(callback: Callback) -> bool:
    lambdas = isinstance(callback, keras.callbacks.LambdaCallback)
    return not lambdas and f"{type(callback).__module__}.".startswith(_LIBRARIES)


def _functions(callback: Callback) -> Iterator[tuple[str, types.CodeType]]:
    """Yields the hooks that a user wrote, by name, with their code."""
    if _is_of_library(callback):
        return
    for hook in _HOOKS:
        function = getattr(callback, f"on_{hook}", None)
        code = getattr(getattr(function, "__func__", function), "__code__", None)
        if code is not None and not _of_keras(function):
            yield f"on_{hook}", code


def _of_keras(function: Any) -> bool:
    return f"{getattr(function, '__module__', '')}.".startswith(_LIBRARIES)


def _refuse_other_arguments(callback: Callback) -> None:
    """Raises `TypeError` if a hook does not take what Keras passes: the fit would end there."""
    for hook in (*_HOOKS, "train_begin", "batch_begin", "train_batch_begin"):
        counter = next((f"{name}, " for name in ("epoch", "batch") if name in hook), "")
        # Keras passes the logs of these by name.
        by_name = {"logs": None} if hook.startswith("batch") else {}
        try:
            signature = inspect.signature(getattr(callback, f"on_{hook}"))
        except (TypeError, ValueError):
            continue  # It is not written in Python.
        try:
            signature.bind(*([0] if counter else []), *([] if by_name else [None]), **by_name)
        except TypeError as error:
            raise TypeError(
                f"callbacks: {type(callback).__name__}.on_{hook} does not take what Keras passes "
                f"({error}):\ndefine it with the arguments ({counter}logs=None)."
            ) from None


def _texts(callback: Callback) -> set[str]:
    """Returns the texts that a user's hooks store under: logs that they may add."""
    return {
        key
        for _, code in _functions(callback)
        for key, stored in _subscripts(code, ("logs", "log"))
        if stored
    }


def _refuse_missing_logs(
    callback: Callback, logs: dict[str, Collection[str]], shown: Collection[str]
) -> None:
    """Raises if a user's hook reads logs["loss"] or the like, which would end the fit there.

    Args:
      callback: The callback.
      logs: The names in the logs of each "epoch", of a "batch" and at the end of "train".
      shown: Those of some epoch, which the history has at the end.
    """
    for hook, code in _functions(callback):
        if _catches(code):
            continue
        kind = next((each for each in ("batch", "epoch") if each in hook), "train")
        known = logs[kind]
        argument = code.co_varnames[: code.co_argcount][-1:]
        read = [(key, known) for key in _read(code, argument)]
        past = shown if kind == "train" else known
        read += [(key, past) for key in _read(code, ["history"])]
        for key, names in read:
            if key in names:
                continue
            what = f"{type(callback).__name__}.{hook} reads logs[{key!r}], which"
            if kind != "batch" and key in shown:
                where = "some epochs do" if kind == "epoch" else "the last epoch does"
                raise ValueError(
                    f"callbacks: {what} {where} not show: pass validation_freq=1, or "
                    f"test first, as in `if {key!r} in logs`."
                )
            raise ValueError(_never_shown(what, names))


def _read(code: types.CodeType, names: Collection[str]) -> list[str]:
    """Returns the texts that look like logs and are read from variables, unless code asks first."""
    asked = _asked_for(code)
    return [
        key
        for key, stored in _subscripts(code, names)
        if not stored and key not in asked and (key == "loss" or _looks_logged(key))
    ]


def _catches(code: types.CodeType) -> bool:
    """Returns whether a function handles exceptions, among them that of a missing log."""
    return any(
        each.opname in ("SETUP_FINALLY", "CHECK_EXC_MATCH") for each in dis.get_instructions(code)
    )


def _asks(instructions: Sequence[dis.Instruction], names: Collection[str]) -> bool:
    """Returns whether code tests values as they are, other than of these names: None among them."""
    return any(
        "JUMP" in after.opname
        and "IF" in after.opname
        and before.opname not in ("COMPARE_OP", "CONTAINS_OP")
        and before.argval not in names
        for before, after in itertools.pairwise(instructions)
    )


def _asked_for(code: types.CodeType) -> set[Any]:
    """Returns the texts that a function looks for, as in `"loss" in logs`."""
    instructions = list(dis.get_instructions(code))
    pairs = zip(instructions, instructions[2:], strict=False)
    return {
        first.argval
        for first, last in pairs
        if isinstance(first.argval, str) and last.opname == "CONTAINS_OP"
    }


def _looks_logged(key: str) -> bool:
    return key.startswith("val_") or key.endswith(("loss", "accuracy")) or key == "acc"


def _subscripts(code: types.CodeType, names: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yields the constant texts by which variables or attributes of these names are read.

    Args:
      code: The code of a function.
      names: The names.

    Yields:
      The text, and whether a value is stored there.
    """
    instructions = [
        each
        for each in dis.get_instructions(code)
        if each.opname not in ("CACHE", "PRECALL", "COPY", "TO_BOOL") and each.argval != "get"
    ]
    asks = _asks(instructions, names)
    for before, key, after in zip(instructions, instructions[1:], instructions[2:], strict=False):
        indexed = key.opname.startswith("LOAD_CONST") and isinstance(key.argval, str)
        # Two loads may be one instruction, whose last name is the one that is indexed.
        loaded = before.argval[-1] if isinstance(before.argval, tuple) else before.argval
        # As `logs.get("loss")` without a default, whose None nothing would see.
        got = after.opname.startswith("CALL") and after.arg == 1 and not asks
        if indexed and loaded in names and (got or after.opname in _SUBSCRIPTS):
            yield key.argval, after.opname == "STORE_SUBSCR"


def _try_schedule(schedule: Callable[..., Any], rate: Any, epochs: range) -> None:
    """Calls a function of the epoch as `LearningRateScheduler` will, unless it has a state."""
    if getattr(schedule, "__closure__", None) or not isinstance(schedule, types.FunctionType):
        try:
            schedule = copy.deepcopy(schedule)
        except Exception:
            return
        if isinstance(schedule, types.FunctionType | types.MethodType):
            return  # A copy shares what it refers to.
    value = float(tf.convert_to_tensor(rate))
    for epoch in epochs[:_MOST_EPOCHS]:
        try:
            returned = schedule(epoch, value) if _takes_rate(schedule) else schedule(epoch)
        except Exception as error:
            raise ValueError(
                f"callbacks: LearningRateScheduler's schedule fails in epoch {epoch} "
                f"({type(error).__name__}: {check.first_line(error)}): correct it."
            ) from error
        if not isinstance(returned, float | np.floating | tf.Tensor):
            raise ValueError(
                f"callbacks: LearningRateScheduler's schedule returns "
                f"{type(returned).__name__} in epoch {epoch}: return a float."
            )
        value = float(returned)


def _takes_rate(schedule: Callable[..., Any]) -> bool:
    code = getattr(getattr(schedule, "__call__", schedule), "__code__", None)  # noqa: B004
    code = getattr(schedule, "__code__", code)
    num = 1 if code is None else code.co_argcount
    return num - (not isinstance(schedule, types.FunctionType)) > 1


# ---------------------------------------------------------------------- files


def _try_checkpoint(
    callback: keras.callbacks.ModelCheckpoint,
    of_steps: Collection[str],
    shown: Collection[str],
    save: Callable[[str], None],
) -> None:
    by_epoch = callback.save_freq == "epoch"
    logs = dict.fromkeys(shown if by_epoch else of_steps, 0.0)
    numbers = {"epoch": 1} if by_epoch else {"epoch": 1, "batch": 1}
    try:
        path = callback.filepath.format(**numbers, **logs)
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"callbacks: ModelCheckpoint's filepath={callback.filepath!r} needs "
            f"{check.first_line(error)}, which this fit never shows; it shows "
            f"{', '.join(map(repr, sorted({*numbers, *logs})))}."
        ) from None
    _try_to_write("ModelCheckpoint's filepath", path)
    if not callback.save_weights_only:
        with tempfile.TemporaryDirectory() as folder:
            save(os.path.join(folder, os.path.basename(callback.filepath)))


def _try_to_write(what: str, path: Any, makes_folder: bool = True, is_folder: bool = False) -> None:
    """Raises `ValueError` unless a file can be written; nothing is left but the file's folder."""
    path = os.fspath(path)
    if "://" in path:
        return  # Not a file of this machine.
    folder = path if is_folder else os.path.dirname(path) or "."
    try:
        if makes_folder:
            os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        if not is_folder and os.path.exists(path) and not os.access(path, os.W_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise ValueError(
            f"callbacks: {what}={path!r} cannot be written ({error.strerror}): pass a path in a "
            "writable folder."
        ) from None


def logs_of_steps(
    private: Sequence[str], *, has_delta: bool, calibrated: bool, exact: bool, unsafe: bool
) -> set[str]:
    """Returns the names that logs of steps may have.

    Args:
      private: The names of the privatised metrics.
      has_delta: Whether epsilon is shown instead of the number of steps.
      calibrated: Whether the model may release values for a corrected posterior.
      exact: Whether nothing is private: without noise and clip.
      unsafe: Whether exact losses are shown as unsafe.
    """
    names = {"epsilon" if has_delta else "steps", *private, *(RELEASED if calibrated else ())}
    if exact or unsafe:
        names.add("loss" if exact else "unsafe_loss")
    return names
