"""Registered functions, and JSON for values that contain them.

`model.save` writes priors and likelihoods so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tfp_dpvi import _deprecation
from tfp_dpvi._tf import Layer, keras, layers_within, register_keras_serializable, tf
from tfp_dpvi._validate import Unchecked, fields, shown

__all__ = ["register"]

_LIBRARY = __name__.split(".")[0]
#: Where values and functions are that files may name: none of these reads files, or imports or
#: calls what it is told to.
_NAMED_IN_FILES = tuple(
    f"{_LIBRARY}.{part}"
    for part in (
        "divergences",
        "surrogates",
        "synthetic.grouping",
        "synthetic.mixture",
        "synthetic.rules",
        "synthetic.tails",
        "data.columns",
        "data.dates",
        "data.schema",
        "regressions.families",
    )
)
_FIX = (
    'Write it as a function with @dpvi.register("my_name") above it, and pass the function (with '
    "arguments: a "
    "functools.partial)."
)
_Function = TypeVar("_Function")

Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


def register(name: str) -> Callable[[_Function], _Function]:
    """Registers a function, so that a model built with it can be saved and loaded.

    `docs/guides/in_keras.md` shows it. The file has names, unique in your program, and arguments; a
    process that loads it must have registered the same names (usually by importing the same
    module), or pass `custom_objects`. `dpvi.keras.utils.register_keras_serializable` is equivalent.

    ```python
    >>> @register("doubled")
    ... def doubled(x):
    ...     return 2 * x
    >>> decode(encode(doubled, "likelihood")) is doubled
    True

    ```

    A rule's class is registered likewise, above `@dataclasses.dataclass(frozen=True)`: see
    `dpvi.synthetic.Rule`.

    Args:
      name: The name.

    Returns:
      A decorator, which returns the function.

    Raises:
      TypeError: The name is no string, or empty.
    """
    if not (isinstance(name, str) and name):
        raise TypeError(f'register takes a name, got {name!r}: use @dpvi.register("my_name").')
    return register_keras_serializable("dpvi", name)


def encode(value: Any, argument: str) -> Json:
    """Returns a value as plain JSON, the inverse of `decode`.

    Supports numbers, strings, arrays, registered functions and `functools.partial` of them,
    functions and frozen values of this library, Keras layers and `tf.TensorSpec`; and lists, tuples
    and dicts of these.

    Args:
      value: The value.
      argument: The argument that has it, for messages.

    Raises:
      ValueError: The value is not supported.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        sequence = "tuple" if isinstance(value, tuple) else "list"
        return {
            sequence: [encode(part, f"{argument}[{place}]") for place, part in enumerate(value)]
        }
    if isinstance(value, dict):
        return {
            "dict": [
                [encode(key, argument), encode(part, f"{argument}[{key!r}]")]
                for key, part in value.items()
            ]
        }
    if isinstance(value, np.ndarray) or (isinstance(value, tf.Tensor) and hasattr(value, "numpy")):
        array = np.asarray(value)
        return {"array": array.tolist(), "dtype": array.dtype.name}
    if isinstance(value, tf.TensorSpec):
        return {"spec": value.shape.as_list(), "dtype": value.dtype.name}
    if isinstance(value, functools.partial):
        return {
            "partial": encode(value.func, argument),
            "args": [encode(part, f"an argument of {argument}") for part in value.args],
            "kwargs": {
                key: encode(part, f"{key} of {argument}") for key, part in value.keywords.items()
            },
        }
    if isinstance(value, Layer):
        layers = layers_within(value)
        if functional := [layer for layer in layers if isinstance(layer, keras.layers.Lambda)]:
            raise ValueError(
                f"{argument} has the layer {functional[0].name!r} "
                f"({type(functional[0]).__name__}) with a Python function, whose byte code would "
                f"run on loading.\nPass {argument} as a function without arguments that builds "
                "the model, with "
                '@dpvi.register("my_name") above it.'
            )
        return {"keras": keras.utils.serialize_keras_object(value)}
    kind = type(value)
    registered = keras.utils.get_registered_name(kind)
    known = keras.utils.get_registered_object(registered) is kind
    if dataclasses.is_dataclass(value) and (known or _of_library(kind)):
        held = {
            field.name: getattr(value, field.name)
            for field in dataclasses.fields(value)
            if field.init
        }
        place = {"value": f"{kind.__module__}:{kind.__qualname__}"}
        return {
            **({"registered": registered} if known else place),
            "fields": {name: encode(part, f"{name} of {argument}") for name, part in held.items()},
        }
    if isinstance(value, types.FunctionType):
        registered = keras.utils.get_registered_name(value)
        if keras.utils.get_registered_object(registered) is value:
            return {"function": registered}
        if _of_library(value) and value.__qualname__.isidentifier():
            return {"library": f"{value.__module__}:{value.__qualname__}"}
        raise ValueError(
            f"{argument} is {value.__qualname__!r}, a function without a registered name. {_FIX}"
        )
    # The message shows the type alone: what the value holds may be records.
    raise ValueError(f"{argument} is {shown(value)}, an object that cannot be saved. {_FIX}")


def decode(config: Any, custom_objects: dict[str, Any] | None = None) -> Any:
    """Returns the value of `encode`.

    It imports and calls nothing but values and functions of this library, registered functions and
    Keras layers.

    Args:
      config: The JSON that `encode` returned.
      custom_objects: Functions and classes by name, if they are not registered.

    Raises:
      TypeError, ValueError: A name is not registered in this process, or `encode` never returns
        such JSON.
    """
    try:
        return _decoded(config, custom_objects)
    except (
        ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError,
    ) as error:  # fmt: skip
        raise ValueError(
            f"The file has a value that cannot be read ({type(error).__name__}): it was altered. "
            "Use another copy."
        ) from error


def _decoded(config: Any, custom_objects: dict[str, Any] | None) -> Any:
    if not isinstance(config, dict):
        return config
    again = functools.partial(_decoded, custom_objects=custom_objects)
    if "list" in config:
        return [again(part) for part in config["list"]]
    if "tuple" in config:
        return tuple(again(part) for part in config["tuple"])
    if "dict" in config:
        return {again(key): again(part) for key, part in config["dict"]}
    if "array" in config:
        dtype = np.dtype(config["dtype"])
        if dtype.hasobject:
            raise ValueError("The file has an array of objects: it was altered. Use another copy.")
        return np.array(config["array"], dtype)
    if "spec" in config:
        return tf.TensorSpec(config["spec"], tf.as_dtype(config["dtype"]))
    if "partial" in config:
        kwargs = {key: again(part) for key, part in config["kwargs"].items()}
        return functools.partial(again(config["partial"]), *map(again, config["args"]), **kwargs)
    if "keras" in config:
        layer = keras.utils.deserialize_keras_object(config["keras"], custom_objects=custom_objects)
        if not isinstance(layer, Layer):  # Keras finds whatever a file names, `os.system` too.
            raise ValueError(
                f"The file has a {type(layer).__name__} where `encode` writes Keras layers: it was "
                "altered. Use another copy."
            )
        return layer
    if "value" in config or "registered" in config:
        if "value" in config:
            kind = _imported(config["value"], dataclasses.is_dataclass)
        else:
            kind = _registered(config["registered"], custom_objects)
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise ValueError(
                f"The file uses {config['registered']!a:.99} as a dataclass, which it is not: it "
                "was altered, or another thing has this name."
            )
        known = [field.name for field in dataclasses.fields(kind) if field.init]
        parts = fields("a value of the file", config["fields"], known=known)
        return kind(**{name: again(part) for name, part in parts.items()})
    if "library" in config:
        return _imported(config["library"], inspect.isfunction)
    return _registered(config["function"], custom_objects)


def _registered(
    name: str, custom_objects: Mapping[str, Callable[..., Unchecked]] | None
) -> Callable[..., Unchecked]:
    """Returns a registered function or class."""
    function: Callable[..., Unchecked] | None
    function = keras.utils.get_registered_object(name, custom_objects=custom_objects)
    function = function or (custom_objects or {}).get(name.split(">")[-1])
    if function is None:
        raise ValueError(
            f"The file uses the registered function {name!r}, which is not registered in this "
            "process: import the module that registers it,\n"
            f"or pass custom_objects={{{name!r}: the_function}} to load_model."
        )
    return function


def is_factory(value: Unchecked) -> bool:
    """Returns whether a value is a function that needs no argument."""
    if not isinstance(value, (types.FunctionType, functools.partial)):
        return False
    parameters = inspect.signature(value).parameters.values()
    return not any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _of_library(kind: type | types.FunctionType) -> bool:
    """Returns whether files may name a class or function by its place."""
    module = str(kind.__module__)
    return any(module == part or module.startswith(f"{part}.") for part in _NAMED_IN_FILES)


def _imported(place: Any, is_kind: Callable[[Any], bool]) -> Any:
    """Returns what `encode` called by its place.

    The thing must be defined there, not only imported there.
    """
    # An earlier version may have written the file.
    place = _deprecation.current_place(str(place))
    module, name = place.split(":", 1)
    is_known = any(module == part or module.startswith(f"{part}.") for part in _NAMED_IN_FILES)
    if is_known and "." not in name:  # Of a module, and no method of a class in it.
        with contextlib.suppress(ImportError, AttributeError):
            named = getattr(importlib.import_module(module), name)
            if is_kind(named) and f"{named.__module__}:{named.__qualname__}" == place:
                return named
    raise ValueError(
        f"The file uses {place!a:.99}, which is not a value or function of {_LIBRARY} that files "
        "may name: it was altered. Use another copy."
    )
