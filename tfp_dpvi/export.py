"""Exports a SavedModel of functions of released values, with its privacy report and a model card.

The SavedModel is a new `tf.Module` with the traced functions and the variables that they read. It
holds no Keras model, optimizer, ledger, key or record.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import tempfile
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import PrivacyReport

__all__ = ["ExportedFunction"]

REPORT = os.path.join("assets.extra", "privacy_report.json")
CARD = "README.md"
SERVED = "serving_default"  # The default signature of TensorFlow Serving and Keras's TFSMLayer.
_EXAMPLES = {"num": "100", "seed": "[1, 2]"}


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """One signature of an export.

    ```python
    >>> inputs = {"x": tf.TensorSpec([None], tf.float32)}
    >>> double = ExportedFunction("double", lambda x: {"twice": 2.0 * x}, inputs, "Doubles x.")
    >>> double.function(x=tf.ones([2]))["twice"].numpy().tolist()
    [2.0, 2.0]

    ```

    Attributes:
      name: The name of the signature.
      function: Takes tensors by keyword, and returns tensors by name.
      inputs: The spec of each keyword, with None for the number of records.
      meaning: One sentence for the model card.
      tables: The lookup tables that the function reads.
    """

    name: str
    function: Callable[..., dict[str, tf.Tensor]]
    inputs: dict[str, tf.TensorSpec]
    meaning: str
    tables: tuple[Any, ...] = ()


def write(
    path: str | os.PathLike[str],
    functions: Sequence[ExportedFunction],
    report: PrivacyReport,
    *,
    title: str,
    overwrite: bool = False,
    texts: Mapping[str, str] | None = None,
) -> None:
    """Writes an export atomically to a new or empty folder, or over an earlier export.

    Args:
      path: The folder.
      functions: The signatures of the SavedModel.
      report: The privacy report of the released values.
      title: The title of the model card.
      overwrite: True replaces an earlier export.
      texts: Other texts by the names of their files beside the report.

    Raises:
      ValueError: The path is not writable or not free; nothing is changed.

    #### Formal guarantee

    The folder is a function of `functions`, the variables that they read, the report and the texts.
    """
    target = pathlib.Path(path).absolute()
    _check_free(target, overwrite)
    module = _module(functions)
    # The data set's name in the ledger is the curator's, not public.
    report = dataclasses.replace(report, dataset_id=None)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The folder is on the same disk, for an atomic rename.
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as beside:
            new = pathlib.Path(beside, "model")
            earlier = pathlib.Path(beside, "earlier")
            signatures = {exported.name: getattr(module, exported.name) for exported in functions}
            signatures[SERVED] = signatures[_served(functions)]
            tf.saved_model.save(module, str(new), signatures=signatures)
            (new / REPORT).parent.mkdir(exist_ok=True)
            (new / REPORT).write_text(
                json.dumps(report.to_json(), indent=2, sort_keys=True) + "\n", encoding="utf-8"
            )
            for name, text in (texts or {}).items():
                (new / REPORT).with_name(name).write_text(text, encoding="utf-8")
            (new / CARD).write_text(
                _card(title, functions, module, report, target.name), encoding="utf-8"
            )
            if overwrite and target.exists():
                target.rename(earlier)
            try:
                new.rename(target)
            except OSError:
                if earlier.exists():
                    earlier.rename(target)
                raise
    except AssertionError as error:
        raise ValueError(
            "export: the model reads a resource that is no variable, such as a lookup table of a "
            f"function; an export cannot save it. {check.plainly(error)}"
        ) from error
    except (OSError, tf.errors.OpError) as error:
        raise ValueError(
            f"path={str(target)!r} cannot be written ({error}): pass a writable folder."
        ) from error


# ------------------------------------------------------------------ the SavedModel


def _module(functions: Sequence[ExportedFunction]) -> tf.Module:
    """Returns a new module with the traced functions and the variables that they read."""
    module = tf.Module(name="export")
    traced = {exported.name: _traced(exported) for exported in functions}
    variables = {
        variable.ref(): variable
        for function in traced.values()
        for variable in function.graph.variables
    }
    module.released = list(variables.values())
    module.tables = [table for exported in functions for table in exported.tables]
    for name, function in traced.items():
        setattr(module, name, function)
    return module


def _traced(exported: ExportedFunction) -> tf.types.experimental.ConcreteFunction:
    specs = {
        name: tf.TensorSpec(spec.shape, spec.dtype, name=name)
        for name, spec in exported.inputs.items()
    }
    try:
        return tf.function(exported.function, autograph=False).get_concrete_function(**specs)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
        shown = ", ".join(f"{name} of {_describe(spec)}" for name, spec in specs.items())
        raise ValueError(
            f"export: {exported.name} cannot be traced for {shown}: {type(error).__name__}: "
            f"{error}.\n"
            "Take shapes that depend on the number of records from tf.shape(x), not from x.shape."
        ) from error


def _check_free(target: pathlib.Path, overwrite: bool) -> None:
    is_folder = target.is_dir() and not target.is_symlink()
    if not os.path.lexists(target) or (is_folder and not any(target.iterdir())):
        return
    if not (is_folder and (target / "saved_model.pb").is_file() and (target / REPORT).is_file()):
        raise ValueError(
            f"path={str(target)!r} exists and is no export: pass another path. Nothing was changed."
        )
    if not overwrite:
        raise ValueError(
            f"path={str(target)!r} holds an earlier export: pass another path, or overwrite=True."
        )


# ------------------------------------------------------------------ the model card


def _served(functions: Sequence[ExportedFunction]) -> str:
    names = [exported.name for exported in functions]
    return "predict" if "predict" in names else names[0]


def _describe(spec: tf.TensorSpec) -> str:
    shape = ", ".join("n" if size is None else str(size) for size in spec.shape)
    dtype = tf.as_dtype(spec.dtype).name
    return f"{dtype} [{shape}]" if spec.shape.rank else f"{dtype} scalar"


def _card(
    title: str,
    functions: Sequence[ExportedFunction],
    module: tf.Module,
    report: PrivacyReport,
    folder: str,
) -> str:
    example = ", ".join(f"{name}={_EXAMPLES.get(name, name)}" for name in functions[0].inputs)
    lines = [
        f"# {title}",
        "",
        "A TensorFlow SavedModel. It needs TensorFlow alone:",
        "",
        "```python",
        "import tensorflow as tf",
        f'model = tf.saved_model.load("{folder}")',
        f"model.{functions[0].name}({example})",
        "```",
        "",
        "| function | arguments | returns |",
        "| --- | --- | --- |",
    ]
    for exported in functions:
        arguments = ", ".join(
            f"`{name}`: {_describe(spec)}" for name, spec in exported.inputs.items()
        )
        outputs = getattr(module, exported.name).structured_outputs
        returned = ", ".join(
            f"`{name}`: {_describe(spec)}" for name, spec in sorted(outputs.items())
        )
        lines.append(f"| `{exported.name}` | {arguments} | {returned} |")
    lines.append("")
    for exported in functions:
        meaning = f"* `{exported.name}`: {exported.meaning}"
        lines += textwrap.wrap(meaning, 118, subsequent_indent="  ")
    lines += [
        "",
        f"Each is also a signature for TensorFlow Serving; `{SERVED}` is `{_served(functions)}`. "
        "Pass arguments by keyword. The",
        "folder holds only released values: no record, key or optimizer state. Using it spends "
        "no privacy budget.",
        "",
        "## Privacy report",
        "",
        f"As JSON in `{REPORT.replace(os.sep, '/')}`.",
        "",
        "```text",
        str(report),
        "```",
        "",
    ]
    return "\n".join(lines)
