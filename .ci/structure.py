"""Checks the structure of `tfp_dpvi` from its source alone, prints the figures and draws the packages.

    python .ci/structure.py            the table of figures, and what is over a limit; status 1 where something is
    python .ci/structure.py --write    writes the drawing into docs/architecture.md

`tests/test_structure.py` runs the same checks, and follows one record through a real `fit`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import pathlib
import re
import sys
from collections.abc import Callable, Iterator

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "tfp_dpvi"
DRAWING = ROOT / "docs" / "architecture.md"
MARKS = ("<!-- drawing: begin, written by .ci/structure.py -->", "<!-- drawing: end -->")

# Each package or module of the top level imports from those before it only.
ORDER = (
    "_deprecation",
    "_validate",
    "privacy",
    "_tf",
    "_random",
    "_keystream",
    "serialization",
    "divergences",
    "surrogates",
    "local",
    "sampling",
    "gradients",
    "ghost",
    "optimizers",
    "metrics",
    "callbacks",
    "data",
    "bayes",
    "training",
    "preprocessing",
    "export",
    "calibrated",
    "models",
    "networks",
    "synthetic",
    "audit",
    "federated",
)
# Rooms below that are none of a room's business all the same: these know nothing of privacy.
STRANGERS = {
    "divergences": ("privacy",),
    "local": ("privacy",),
    "surrogates": ("privacy",),
    "_tf": ("privacy",),
    "_random": ("privacy",),
    "_keystream": ("privacy",),
}
# Private attributes of libraries that are neither TensorFlow nor Keras.
OF_OTHERS = {
    "_dp_sum_query": "TensorFlow Privacy, whose optimizers are recognised by their attributes",
    "_l2_norm_clip": "TensorFlow Privacy",
    "_noise_multiplier": "TensorFlow Privacy",
    "_num_microbatches": "TensorFlow Privacy",
    "_stddev": "TensorFlow Privacy",
    "_rdp": "dp_accounting",
    "_mmap": "numpy.memmap",
}
TENSORFLOW = ("tensorflow", "tensorflow_probability", "keras", "tf_keras")

LIMITS = {
    "lines of the longest file": 600,
    "lines of the longest function": 80,
    "`Any` and `object` annotations": 249,
    "files that name l2_norm_clip": 7,
    "files that name noise_multiplier": 9,  # TensorBoard shows it.
    "functions that read l2_norm_clip": 0,
    "functions that read noise_multiplier": 3,  # Of the optimizer, of a calibrated plan, and TensorBoard.
    "files on a record's path": 8,  # The last one adds all noise.
    "imports against the order": 0,
    "circles": 0,
    "private names across packages": 0,
    "private names of TensorFlow and Keras": 0,
    "words against the style": 0,
}
# See "Words" in CONTRIBUTING.md: docstrings begin with verbs or noun phrases, and use terms of the field.
OPENINGS = ("What", "Whether", "Of", "As", "How", "Where", "Why")
IMAGES = re.compile(
    r"\b(the books|begun|ways? out|made[- ]up|somebody|nobody|is had|out of sight|(nothing|no steps) (was|were) (spent|granted))\b",
    re.IGNORECASE,
)

# The files that compute between a record and the update of `DPVI`, in order; a test follows them in the traced graphs.
RECORD_PATH = (
    "training/distribution.py",
    "bayes/model.py",
    "gradients/vmap.py",
    "gradients/clip.py",
    "training/mechanism.py",
    "gradients/reparameterized.py",
    "optimizers/dp_keras.py",
    "_random.py",
)


@dataclasses.dataclass(frozen=True, eq=False)
class Module:
    """A source file.

    Attributes:
      path: relative to the package, with slashes.
      name: as imported.
      lines: of text.
      tree: its syntax.
    """

    path: str
    name: str
    lines: list[str]
    tree: ast.Module

    @functools.cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the tree, walked once for all figures."""
        return list(ast.walk(self.tree))

    @property
    def room(self) -> str:
        """The package or module of the top level that it belongs to; empty for the package's own face."""
        return self.name.split(".")[1] if "." in self.name else ""

    def at(self, line: int) -> str:
        """Returns where something is, for a report."""
        return f"{self.path}:{line}"


Finding = tuple[str, str]
"""Where, and what."""


def modules(package: pathlib.Path = PACKAGE) -> list[Module]:
    """Reads every source file of a package."""
    found = []
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found.append(
            Module(path.relative_to(package).as_posix(), name, text.splitlines(), ast.parse(text))
        )
    return found


# ------------------------------------------------------------------ imports


@functools.cache
def imports(module: Module) -> list[tuple[int, str, str | None]]:
    """Returns line, module and name of each import, lazy ones too; the name is None for `import module`."""
    return list(_imports(module))


def _imports(module: Module) -> Iterator[tuple[int, str, str | None]]:
    here = module.name.split(".")
    here = here if module.path.endswith("__init__.py") else here[:-1]
    for node in module.nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, source, alias.name
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "attr", getattr(node.func, "id", None))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value, None


def _own_imports(module: Module, package: str) -> Iterator[tuple[int, str, str]]:
    """Yields line, full name and room of each import from the same package."""
    for line, source, name in imports(module):
        full = f"{source}.{name}" if name else source
        if source.split(".")[0] == package and full != f"{package}.__version__":
            yield line, full, full.split(".")[1] if "." in full else ""


def against_order(found: list[Module]) -> list[Finding]:
    """Returns imports of what is not below, from the package's face, or of a library that only `_tf.py` imports."""
    package, rank = found[0].name.split(".")[0], {room: place for place, room in enumerate(ORDER)}
    wrong = []
    for module in found:
        if not module.room:
            continue
        if module.room not in rank:
            wrong.append((module.at(1), f"{module.room} has no place in ORDER"))
            continue
        for line, full, other in _own_imports(module, package):
            if other not in rank:
                wrong.append((module.at(line), f"imports {full}, which has no place in ORDER"))
            elif rank[other] > rank[module.room] or other in STRANGERS.get(module.room, ()):
                wrong.append(
                    (module.at(line), f"{module.room} imports {full}, which is not below it")
                )
        for line, source, name in imports(module):
            full = f"{source}.{name or ''}"
            if source.split(".")[0] == "tensorflow_privacy":
                wrong.append((module.at(line), "imports TensorFlow Privacy, which is not needed"))
            elif source.split(".")[0] in TENSORFLOW and module.room != "_tf":
                wrong.append(
                    (
                        module.at(line),
                        f"imports {full.rstrip('.')}: take tf, tfp and keras from tfp_dpvi._tf",
                    )
                )
        for node in module.nodes:
            if (
                module.room != "_tf"
                and isinstance(node, ast.Attribute)
                and ast.unparse(node) == "tf.keras"
            ):
                wrong.append(
                    (module.at(node.lineno), "names tf.keras: take keras from tfp_dpvi._tf")
                )
    return wrong


def circles(found: list[Module]) -> list[Finding]:
    """Returns modules that import one another, those under TYPE_CHECKING left out."""
    package, names = found[0].name.split(".")[0], {module.name for module in found}
    graph: dict[str, set[str]] = {}
    for module in found:
        hidden = {
            line
            for node in module.nodes
            if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
            for statement in node.body
            for line in range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        }
        own = (
            (line, full)
            for line, full, _ in _own_imports(module, package)
            if module.room and line not in hidden
        )
        graph[module.name] = {
            full if full in names else full.rpartition(".")[0] for _, full in own
        } - {module.name}
    done: set[str] = set()
    wrong: list[Finding] = []

    def visit(name: str, trail: tuple[str, ...]) -> None:
        if name in trail:
            wrong.append((name, " -> ".join((*trail[trail.index(name) :], name))))
        elif name not in done:
            for other in sorted(graph.get(name, ())):
                visit(other, (*trail, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())
    return wrong


# ------------------------------------------------------------------ private names


def _is_private(name: str) -> bool:
    return (
        name.startswith("_")
        and not name.startswith("__")
        and name not in ("_", "_fields", "_asdict", "_replace")
    )


def _private_uses(module: Module) -> Iterator[tuple[int, str]]:
    """Yields line and name of each private attribute that is read or written, `getattr` included."""
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and _is_private(node.attr):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in (
            "getattr",
            "setattr",
            "hasattr",
        ):
            for part in node.args[1:2]:
                if (
                    isinstance(part, ast.Constant)
                    and isinstance(part.value, str)
                    and _is_private(part.value)
                ):
                    yield node.lineno, part.value


def _private_definitions(module: Module) -> Iterator[str]:
    """Yields functions, classes, fields and module-level names, and what is assigned to `self`."""
    for node in module.nodes:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and ast.unparse(node.value) == "self"
        ):
            yield node.attr


def private_names(found: list[Module]) -> tuple[list[Finding], list[Finding]]:
    """Returns uses of another package's private names, and of TensorFlow's or Keras's.

    A name belongs to the folder that defines it, so `tfp_dpvi._tf` is everybody's within `tfp_dpvi`, and
    `tfp_dpvi.privacy._rdp` that of `privacy` alone.
    """
    package = found[0].name.split(".")[0]
    defined: dict[str, set[str]] = {}
    for module in found:
        defined.setdefault(module.room, set()).update(
            filter(_is_private, _private_definitions(module))
        )
    across, foreign = [], []
    for module in found:
        for line, source, name in imports(module):
            parts = f"{source}.{name}".split(".") if name else source.split(".")
            if parts[0] == package:
                hidden = [part for part in parts[2:] if _is_private(part)]
                if hidden and parts[1] != module.room:
                    across.append((module.at(line), f"imports {'.'.join(parts)}"))
            elif module.room != "_tf" and (
                parts[:2] == ["tensorflow", "python"] or any(map(_is_private, parts))
            ):
                foreign.append((module.at(line), f"imports {'.'.join(parts)}"))
        for line, name in _private_uses(module):
            if name in defined[module.room] or module.room == "_tf" or name in OF_OTHERS:
                continue
            owners = [room for room, names in defined.items() if name in names]
            place = module.at(line)
            if owners:
                across.append((place, f"uses .{name}, of {' or '.join(owners)}"))
            else:
                foreign.append((place, f"uses .{name}"))
    return across, foreign


# ------------------------------------------------------------------ sizes and names


@functools.cache
def functions(
    module: Module,
) -> list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, list[ast.AST]]]:
    """Returns every function: its qualified name, itself, and its nodes that lie in no function within it."""

    def walk(
        node: ast.AST, prefix: str, owner: list[ast.AST]
    ) -> Iterator[tuple[str, ast.FunctionDef, list[ast.AST]]]:
        for child in ast.iter_child_nodes(node):
            owner.append(child)
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                own: list[ast.AST] = []
                yield from walk(child, f"{prefix}{child.name}.", own)
                yield f"{prefix}{child.name}", child, own
            else:
                yield from walk(
                    child,
                    f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix,
                    owner,
                )

    return list(walk(module.tree, "", []))


def _length(node: ast.AST) -> int:
    """Counts the lines of a function without its docstring, which for a public one has shapes, errors and the guarantee."""
    first = node.body[0]  # type: ignore[attr-defined]
    said = (
        isinstance(first, ast.Expr)
        and isinstance(first.value, ast.Constant)
        and isinstance(first.value.value, str)
    )
    docstring = (first.end_lineno or 0) - first.lineno + 1 if said else 0
    return (node.end_lineno or 0) - node.lineno + 1 - docstring  # type: ignore[attr-defined]


def code_lines(module: Module) -> int:
    """Counts lines that are not blank, nor comments, nor docstrings."""
    quoted: set[int] = set()
    for node in module.nodes:
        first = (
            node.body[0]
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body
            else None
        )
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            quoted |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    plain = (line for number, line in enumerate(module.lines, 1) if number not in quoted)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in plain)


def vague_types(module: Module) -> int:
    """Counts every `Any` outside import lines, and every `object` in an annotation."""
    count = 0
    for node in module.nodes:
        count += isinstance(node, ast.Name) and node.id == "Any"
        notes = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        for note in filter(None, notes):
            count += sum(
                isinstance(part, ast.Name) and part.id == "object" for part in ast.walk(note)
            )
    return count


def naming_files(found: list[Module], wanted: str) -> list[Finding]:
    """Returns files in which a name is an identifier, argument, attribute, keyword or field."""

    def names(node: ast.AST) -> bool:
        return wanted in (getattr(node, field, None) for field in ("id", "arg", "attr", "name"))

    return [(module.path, wanted) for module in found if any(map(names, module.nodes))]


def readers(found: list[Module], wanted: str) -> list[Finding]:
    """Returns functions outside `privacy` that read a value's attribute to compute with it.

    An object's own methods (`self.noise_multiplier`) and the configurations that are saved are left out; so is `privacy`,
    which prices and reports what it is told.
    """
    result = []
    for module in found:
        for name, function, nodes in functions(module):
            reads = any(
                isinstance(node, ast.Attribute) and node.attr == wanted and isinstance(node.ctx, ast.Load)
                and ast.unparse(node.value) != "self"
                for node in nodes
            )  # fmt: skip
            if reads and module.room != "privacy" and not name.endswith("get_config"):
                result.append((module.at(function.lineno), f"{name} reads .{wanted}"))
    return result


def wordy(found: list[Module]) -> list[Finding]:
    """Returns docstrings that open with one of `OPENINGS`, and lines with one of `IMAGES`."""
    wrong = []
    for module in found:
        for node in module.nodes:
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or "-").split()[0]
                if first.rstrip(",.:") in OPENINGS:
                    wrong.append(
                        (module.at(getattr(node, "lineno", 1)), f"the docstring opens with {first}")
                    )
        for number, line in enumerate(module.lines, 1):
            if found_image := IMAGES.search(line):
                wrong.append((module.at(number), f"has {found_image[0]!r}"))
    return wrong


# ------------------------------------------------------------------ the table


def measure(found: list[Module]) -> dict[str, tuple[int, list[Finding]]]:
    """Returns each figure of LIMITS, with the places that it counts (or those over the limit)."""
    sizes = sorted(((len(module.lines), module.path) for module in found), reverse=True)
    lengths = sorted(
        (
            (_length(node), module.at(node.lineno), name)
            for module in found
            for name, node, _ in functions(module)
        ),
        reverse=True,
    )
    vague = sorted(((vague_types(module), module.path) for module in found), reverse=True)
    across, foreign = private_names(found)
    longest, function_limit = (
        LIMITS["lines of the longest file"],
        LIMITS["lines of the longest function"],
    )
    figures: dict[str, tuple[int, list[Finding]]] = {
        "lines of the longest file": (
            sizes[0][0],
            [(p, f"{n} lines") for n, p in sizes if n > longest],
        ),
        "lines of the longest function": (
            lengths[0][0] if lengths else 0,
            [
                (place, f"{name} has {size} lines")
                for size, place, name in lengths
                if size > function_limit
            ],
        ),
        "`Any` and `object` annotations": (
            sum(n for n, _ in vague),
            [(p, str(n)) for n, p in vague if n],
        ),
        "files on a record's path": (len(RECORD_PATH), [(path, "") for path in RECORD_PATH]),
    }
    for name in ("l2_norm_clip", "noise_multiplier"):
        figures[f"files that name {name}"] = _counted(naming_files(found, name))
        figures[f"functions that read {name}"] = _counted(readers(found, name))
    figures["imports against the order"] = _counted(against_order(found))
    figures["circles"] = _counted(circles(found))
    figures["private names across packages"] = _counted(across)
    figures["private names of TensorFlow and Keras"] = _counted(foreign)
    figures["words against the style"] = _counted(wordy(found))
    return {name: figures[name] for name in LIMITS}


def _counted(places: list[Finding]) -> tuple[int, list[Finding]]:
    return len(places), places


# ------------------------------------------------------------------ the drawing


def draw(found: list[Module]) -> str:
    """Returns the packages as rows, each above what it imports, with what it imports at first hand."""
    package = found[0].name.split(".")[0]
    below: dict[str, set[str]] = {module.room: set() for module in found if module.room}
    for module in found:
        if module.room:
            below[module.room] |= {other for _, _, other in _own_imports(module, package)} - {
                module.room,
                "",
            }
    reach: Callable[[str], set[str]] = lambda room: below.get(room, set()).union(  # noqa: E731
        *map(reach, below.get(room, ()))
    )
    width = max(map(len, below))
    lines = []
    for room in sorted(
        below, key=lambda room: ORDER.index(room) if room in ORDER else -1, reverse=True
    ):
        direct = below[room] - set().union(*map(reach, below[room]))
        shown = ", ".join(
            sorted(
                direct, key=lambda other: ORDER.index(other) if other in ORDER else -1, reverse=True
            )
        )
        lines.append(f"| {room:<{width}} |" + (f" --> {shown}" if shown else ""))
    rule = f"+{'-' * (width + 2)}+"
    return "\n".join([rule, *lines, rule])


def with_drawing(text: str, drawing: str) -> str:
    """Returns a page with the drawing between its marks."""
    begin, rest = text.split(MARKS[0])
    _, end = rest.split(MARKS[1])
    return f"{begin}{MARKS[0]}\n\n```text\n{drawing}\n```\n\n{MARKS[1]}{end}"


def main() -> int:
    """Prints the table; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--write", action="store_true", help="write the drawing into docs/architecture.md"
    )
    parser.add_argument("--places", action="store_true", help="list the places behind every figure")
    options = parser.parse_args()
    found = modules()
    if options.write:
        DRAWING.write_text(
            with_drawing(DRAWING.read_text(encoding="utf-8"), draw(found)), encoding="utf-8"
        )
    figures = measure(found)
    for name, (value, _) in figures.items():
        print(
            f"{name:<40} {value:>7,}  of {LIMITS[name]:>7,}{'' if value <= LIMITS[name] else '   over'}"
        )
    print(f"{'of the lines, code':<40} {sum(map(code_lines, found)):>7,}")
    for name, (value, places) in figures.items():
        if places and (options.places or value > LIMITS[name]):
            print(f"\n{name}:")
            for place, what in places:
                print(f"  {place}  {what}")
    return int(any(value > LIMITS[name] for name, (value, _) in figures.items()))


if __name__ == "__main__":
    sys.exit(main())
