"""Common code of the benchmarks: interleaved repetitions, ratios with their spread, and a description of the machine."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import io
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

# Benchmarks read the data sets of the examples, whose folder comes last: both have a vae.py.
sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "examples"))


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and all values."""
    values = list(values)
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "all": values,
    }


def cpu_name() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), ""
    )


def machine() -> dict[str, Any]:
    return {
        "platform": platform.platform(),
        "processor": cpu_name(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
    }


HAS_TENSORFLOW_PRIVACY = importlib.util.find_spec("tensorflow_privacy") is not None
"""Its rows need TensorFlow 2.15: `make bench STACK=tf215`."""


def command(script: str, arguments: Sequence[str]) -> str:
    """The command to print beside the results; paths of this machine become relative to the repository."""
    root = pathlib.Path(__file__).resolve().parent.parent
    return " ".join(
        [f"python benchmarks/{script}", *(one.replace(f"{root}/", "") for one in arguments)]
    )


def versions(**packages: str) -> dict[str, str]:
    """Of Python and of those installed of the packages `key="distribution"`."""
    found = {"python": platform.python_version()}
    for key, name in packages.items():
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[key] = metadata.version(name)
    return found


def commit(checkout: pathlib.Path = pathlib.Path(__file__).parent) -> str:
    """The short hash of a checkout, with "-dirty" for changes that are not committed."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude", "*"],
        capture_output=True,
        text=True,
        check=False,
        cwd=checkout,
    )
    return described.stdout.strip()


def code_hash(sources: dict[str, str] | None = None) -> str:
    """Names the code that figures are of: ten digits, whatever its comments and docstrings say.

    Results of several sittings are one study as long as it is the same.

    Args:
      sources: Texts by path; None for `tfp_dpvi` of this checkout, as it is at the first call.
    """
    return _hash_of_checkout() if sources is None else _hash_of(sources)


@functools.cache
def _hash_of_checkout() -> str:
    """Parses the whole package, which takes seconds: once a process."""
    root = pathlib.Path(__file__).resolve().parents[1]
    files = (root / "tfp_dpvi").rglob("*.py")
    return _hash_of({file.relative_to(root).as_posix(): file.read_text() for file in files})


def _hash_of(sources: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(sources):
        tree = ast.parse(sources[path])
        for node in ast.walk(tree):
            documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            if documented and ast.get_docstring(node, clean=False) is not None:
                node.body = node.body[1:]
        digest.update(f"{path}\n{ast.dump(tree)}\n".encode())
    return digest.hexdigest()[:10]


def code_of(revision: str) -> str | None:
    """Returns the `code_hash` of a revision; None if this repository does not have it."""
    root = pathlib.Path(__file__).resolve().parents[1]
    archive = subprocess.run(
        ["git", "archive", revision, "tfp_dpvi"], capture_output=True, check=False, cwd=root
    )
    if archive.returncode:
        return None
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        return code_hash(
            {
                name: file.read().decode()
                for name in files.getnames()
                if name.endswith(".py") and (file := files.extractfile(name)) is not None
            }
        )


@dataclasses.dataclass
class Runner:
    """One way of doing a case.

    Attributes:
      run: `steps -> seconds for them`, without compiling; called with 0 first, which compiles.
      steps: how many a repetition times.
      repetitions: at most so many; None for all.
    """

    run: Callable[[int], float]
    steps: int
    repetitions: int | None = None


def write_study(
    script: str,
    output: pathlib.Path,
    arguments: Sequence[str] | None,
    settings: dict[str, Any],
    rows: Any,
    sets: Any,
) -> None:
    """Writes a study's rows and data sets as JSON, with where and how they came to be.

    Args:
      script: The script's name.
      output: The JSON file.
      arguments: The script's arguments, by default those of the process.
      settings: Of the study.
      rows: Its summary.
      sets: Its single data sets.
    """
    result = {
        "command": command(script, sys.argv[1:] if arguments is None else arguments),
        "commit": commit(),
        "code": code_hash(),
        "machine": machine(),
        "versions": versions(tensorflow="tensorflow", tfp="tensorflow-probability"),
        "settings": settings,
        "rows": rows,
        "sets": sets,
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=1, default=float) + "\n")


def write_cells(
    folder: pathlib.Path, name: str, cells: Sequence[Any], settings: dict[str, Any], table: str
) -> None:
    """Writes a study's cells as JSON, with where they came to be, and as a table.

    Args:
      folder: The folder.
      name: The files' name without its ending.
      cells: Of each cell its figures.
      settings: Of the study.
      table: The same in Markdown.
    """
    about = {
        "machine": machine(),
        "versions": versions(tensorflow="tensorflow", numpy="numpy", scipy="scipy"),
        "commit": commit(),
        "code": code_hash(),
    }
    result = {"cells": cells, **settings, **about}
    (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (folder / f"{name}.txt").write_text(table)


def interleaved(
    makers: dict[str, Callable[[], Runner]],
    repetitions: int,
    *,
    seconds: float = float("inf"),
    name: str = "",
) -> tuple[dict[str, list[float]], dict[str, float], dict[str, str]]:
    """Measures seconds per step of each program in rounds, so that a busy period affects all of them.

    Args:
      makers: one for each program; those that fail are left out and reported.
      repetitions: number of rounds.
      seconds: no round starts later than this.
      name: the case's name, for printing.

    Returns:
      Seconds per step by program; seconds of the first call, with tracing and compiling; failures and their reasons.
    """
    times: dict[str, list[float]] = {}
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    runners: dict[str, Runner] = {}

    def tried(way: str, function: Callable[[], Any]) -> Any:
        try:
            return function()
        except Exception as error:
            failed[way] = f"{type(error).__name__}: {str(error)[:400]}"
            print(f"{name}, {way} failed:\n{traceback.format_exc()}", flush=True)
            return None

    began = time.perf_counter()
    for way, make in makers.items():

        def begin(way: str = way, make: Callable[[], Runner] = make) -> bool:
            runner = make()
            start = time.perf_counter()
            runner.run(0)
            first[way] = time.perf_counter() - start
            runners[way] = runner
            return True

        tried(way, begin)
    for repetition in range(repetitions):
        if repetition and time.perf_counter() - began > seconds:
            break
        for way, runner in list(runners.items()):
            if runner.repetitions is not None and repetition >= runner.repetitions:
                continue
            value = tried(way, lambda runner=runner: runner.run(runner.steps))
            if value is None:
                del runners[way]
            else:
                times.setdefault(way, []).append(value / max(1, runner.steps))
    shown = ", ".join(
        f"{way} {1e3 * statistics.median(values):.4g}" for way, values in times.items()
    )
    print(f"{name}: {shown} ms a step; load {os.getloadavg()[0]:.1f}", flush=True)
    return times, first, failed


def ratio(times: dict[str, list[float]], over: str, under: str) -> dict[str, Any] | None:
    """Ratio of medians over the rounds that have both, with the rounds' own ratios; None without such a round."""
    rounds = list(zip(times.get(over, []), times.get(under, []), strict=False))
    if not rounds:
        return None
    value = statistics.median(a for a, _ in rounds) / statistics.median(b for _, b in rounds)
    return {"ratio": value, "rounds": spread([a / b for a, b in rounds])}


class Peer:
    """A child process in a separate environment, which answers JSON requests, one per line.

    Args:
      python: its interpreter.
      script: what it runs.
      *arguments: the script's.
    """

    def __init__(self, python: str, script: pathlib.Path, *arguments: str) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self._child = subprocess.Popen(
            [python, str(script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self.versions = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise RuntimeError(f"The peer ended with status {self._child.wait()}.")
        return json.loads(line)

    def seconds(self, steps: int, **case: Any) -> float:
        """Runs so many steps of a case; with 0 one, to compile."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({**case, "steps": max(1, steps)}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(f"The peer ended with status {self._child.wait()}.") from None
        answer = self._answer()
        if not answer["finite"]:
            raise RuntimeError(f"{case}: the result is not finite.")
        return float(answer["seconds"])

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError), self._child:
            self._child.communicate(timeout=60)
