"""A SavedModel of functions of released values alone, beside its privacy report and a model card.

What is saved is made anew: a `tf.Module` with the traced functions and copies of the variables that they read. The Keras
model is not in it, and with it neither optimizer, ledger, key nor record.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import PrivacyReport

REPORT = os.path.join("assets.extra", "privacy_report.json")
CARD = "README.md"


@dataclasses.dataclass(frozen=True)
class ExportedFunction:
    """One signature.

    Attributes:
      name: of the signature.
      function: takes tensors by keyword, gives a dict of tensors.
      inputs: `tf.TensorSpec` for each keyword, with None for the number of records.
      meaning: what it computes, one sentence for the model card.
      example: the arguments of a call in the model card, for instance "x=x".
    """

    name: str
    function: Callable[..., dict[str, Any]]
    inputs: dict[str, Any]
    meaning: str
    example: str


def flat_names(structure: Any, single: str) -> list[str]:
    """A name for each part of a structure, in the order of `tf.nest.flatten`: keys, fields, or numbered.

    Names are Python identifiers, as arguments go by keyword: "hours-per-week" becomes "hours_per_week".

    Args:
      structure: of anything.
      single: the name of what is no structure; the prefix of parts without names.
    """

    def named(part: Any, name: str) -> Iterator[str]:
        if hasattr(part, "_fields"):
            part = part._asdict()
            keys = list(part)
        elif isinstance(part, dict) or (hasattr(part, "keys") and hasattr(part, "__getitem__")):
            keys = sorted(part)
        elif isinstance(part, (list, tuple)) and not isinstance(part, tf.TensorShape):
            for place, inner in enumerate(part):
                yield from named(inner, f"{name}_{place}")
            return
        else:
            yield name
            return
        for key in keys:
            yield from named(part[key], str(key) if name == single else f"{name}_{key}")

    names: list[str] = []
    for name in named(structure, single):
        identifier = re.sub(r"\W", "_", name, flags=re.ASCII)
        identifier = f"{single}_{identifier}" if not identifier[:1].isalpha() else identifier
        while identifier in names:
            identifier += "_"
        names.append(identifier)
    return names


def write(
    path: str | os.PathLike[str],
    functions: Sequence[ExportedFunction],
    report: PrivacyReport,
    *,
    title: str,
    overwrite: bool = False,
) -> None:
    """Writes the folder, whole or not at all.

    Args:
      path: a folder that does not exist yet, or an empty one.
      functions: the signatures.
      report: of the training; the data set's name in the ledger is left out.
      title: of the model card.
      overwrite: replace an earlier export; anything else is never replaced.

    Raises:
      ValueError: the path cannot be written, or something is there; nothing changed.

    #### Formal guarantee

    The folder is a function of the given functions, the variables that they read, and the report.
    """
    target = pathlib.Path(path).absolute()
    _check_free(target, overwrite)
    module = _module(functions)
    # The ledger's name for the data set is the curator's.
    report = dataclasses.replace(report, dataset_id=None)
    with _beside(target) as made:
        try:
            tf.saved_model.save(
                module, str(made), signatures={one.name: getattr(module, one.name) for one in functions}
            )
        except AssertionError as error:
            raise ValueError(
                "export: the model reads something beside variables, such as a lookup table, and an export holds released "
                f"variables alone. {error}"
            ) from error
        except (OSError, tf.errors.OpError) as error:
            raise ValueError(
                f"path={str(target)!r} cannot be written ({error}): give a folder that can. Nothing was changed."
            ) from error
        _write_text(made / REPORT, json.dumps(report.to_json(), indent=2, sort_keys=True) + "\n")
        _write_text(made / CARD, _card(title, functions, module, report, target.name))
        _check_free(target, overwrite)
        _move(made, target)


# ------------------------------------------------------------------ what is saved


def _module(functions: Sequence[ExportedFunction]) -> Any:
    """A new module of traced functions and the variables that these read, and nothing else."""
    module = tf.Module(name="export")
    traced = {one.name: _traced(one) for one in functions}
    variables = {variable.ref(): variable for one in traced.values() for variable in one.graph.variables}
    module.released = list(variables.values())
    for name, function in traced.items():
        setattr(module, name, function)
    return module


def _traced(one: ExportedFunction) -> Any:
    specs = {name: tf.TensorSpec(spec.shape, spec.dtype, name=name) for name, spec in one.inputs.items()}
    try:
        return tf.function(one.function, autograph=False).get_concrete_function(**specs)
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError) as error:
        shown = ", ".join(f"{name} of {_describe(spec)}" for name, spec in specs.items())
        raise ValueError(
            f"export: {one.name} cannot be traced for {shown}: {type(error).__name__}: {error}. Shapes that depend on the "
            "number of records must come from tf.shape(x), not from x.shape."
        ) from error


# ------------------------------------------------------------------ where it goes


def _check_free(target: pathlib.Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if target.is_dir() and not target.is_symlink():
        if not any(target.iterdir()):
            return
        if (target / "saved_model.pb").is_file() and (target / REPORT).is_file():
            if overwrite:
                return
            raise ValueError(
                f"path={str(target)!r} holds an earlier export: give another path, or overwrite=True to replace it. Nothing "
                "was changed."
            )
    raise ValueError(
        f"path={str(target)!r} exists and is no export of a model: give a path where nothing is yet. Nothing was changed."
    )


@contextlib.contextmanager
def _beside(target: pathlib.Path) -> Iterator[pathlib.Path]:
    """A new folder next to the target, on the same disk, so that it can take its name; gone afterwards."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = pathlib.Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise ValueError(
            f"path={str(target)!r} cannot be written ({error.strerror or error}): give a folder that can. Nothing was changed."
        ) from error
    try:
        yield temporary / "model"
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _move(made: pathlib.Path, target: pathlib.Path) -> None:
    """The new folder under its name, and an earlier one away; at no moment is there half of one."""
    earlier = made.parent / "earlier"
    if os.path.lexists(target):
        os.rename(target, earlier)
    try:
        os.rename(made, target)
    except OSError:
        if earlier.exists():
            os.rename(earlier, target)
        raise


def _write_text(path: pathlib.Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------ the model card


def _describe(spec: Any) -> str:
    shape = ", ".join("n" if size is None else str(size) for size in spec.shape)
    return f"{tf.as_dtype(spec.dtype).name} [{shape}]" if spec.shape.rank else f"{tf.as_dtype(spec.dtype).name} scalar"


def _card(title: str, functions: Sequence[ExportedFunction], module: Any, report: PrivacyReport, folder: str) -> str:
    lines = [
        f"# {title}",
        "",
        "A TensorFlow SavedModel. It needs TensorFlow alone:",
        "",
        "```python",
        "import tensorflow as tf",
        f'model = tf.saved_model.load("{folder}")',
        f"model.{functions[0].name}({functions[0].example})",
        "```",
        "",
        "| function | arguments | returns |",
        "| --- | --- | --- |",
    ]
    for one in functions:
        given = ", ".join(f"`{name}`: {_describe(spec)}" for name, spec in one.inputs.items())
        outputs = getattr(module, one.name).structured_outputs
        returned = ", ".join(f"`{name}`: {_describe(spec)}" for name, spec in sorted(outputs.items()))
        lines.append(f"| `{one.name}` | {given} | {returned} |")
    lines.append("")
    for one in functions:
        lines += textwrap.wrap(f"* `{one.name}`: {one.meaning}", 118, subsequent_indent="  ")
    lines += [
        "",
        "Each is a signature too, for TensorFlow Serving. Arguments go by keyword. The folder holds released values alone: no",
        "record, no key, no state of the optimizer. To use it spends no privacy budget.",
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
