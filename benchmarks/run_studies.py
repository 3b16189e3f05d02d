"""Runs the studies of docs/studies.md, cell by cell, without existing rows.

    python benchmarks/run_studies.py [mixture hierarchical bars families] [--cells NAME ...] [--num N] [--jobs 2] [--full] [--write]

A cell is one setting of a study; its file has a row for each seed. Two long cells run only with `--full`. At the end each
study draws its pictures and prints its table; `--write` writes both into the pages of docs/.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import importlib
import os
import pathlib
import subprocess
import sys
import time

from studies import cells

STUDIES = ("families", "mixture", "hierarchical", "bars")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)}; default all")
    parser.add_argument("--cells", nargs="*", help="only these")
    parser.add_argument("--num", type=int, help="at most so many seeds of each cell")
    parser.add_argument(
        "--jobs", type=int, default=2, help="processes at once; 0 runs the cells in this one"
    )
    parser.add_argument("--full", action="store_true", help="the long cells too")
    parser.add_argument("--report", action="store_true", help="only draw and print what is there")
    parser.add_argument(
        "--write", action="store_true", help="write tables and pictures into docs/ too"
    )
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/studies"))
    options = parser.parse_args(arguments)
    chosen = {
        name: importlib.import_module(f"studies.{name}") for name in options.studies or STUDIES
    }
    known = {cell.name for study in chosen.values() for cell in study.CELLS}
    if unknown := {*(options.cells or ())} - known:
        parser.error(f"--cells: {sorted(unknown)} are none of {sorted(known)}")
    todo = []
    for name, study in chosen.items():
        for cell in study.CELLS:
            wanted = not options.cells or cell.name in options.cells
            if wanted and not options.report and (options.full or not cell.full):
                path, num = (
                    options.out / name / f"{cell.name}.json",
                    min(cell.num, options.num or cell.num),
                )
                if len(cells.load(path)) < num:
                    todo.append((name, cell, path, num))
    begun, done = time.perf_counter(), 0

    def made(task: tuple[str, cells.Cell, pathlib.Path, int]) -> str | None:
        nonlocal done
        name, cell, path, num = task
        if (
            options.jobs
        ):  # In a process of its own: traces and constants of many models fill the memory.
            command = [
                sys.executable,
                __file__,
                name,
                "--cells",
                cell.name,
                f"--num={num}",
                "--jobs=0",
                "--full",
            ]
            environment = {"OPENBLAS_NUM_THREADS": "1", **os.environ}
            result = subprocess.run(
                [*command, f"--out={options.out}"],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            problem = (
                None
                if result.returncode == 0
                else f"{name}/{cell.name} failed:\n{result.stderr[-3000:]}"
            )
        else:
            cells.run(cell, path, num)
            problem = None
        done += 1
        minutes = (time.perf_counter() - begun) / 60
        print(f"{done}/{len(todo)} {name}/{cell.name}: {minutes:.1f} minutes so far", flush=True)
        return problem

    with concurrent.futures.ThreadPoolExecutor(max(1, options.jobs)) as pool:
        problems = [problem for problem in pool.map(made, todo) if problem]
    if options.jobs or options.report:
        for name, study in chosen.items():
            if (options.out / name).exists():
                for (page, block), text in study.report(options.out / name).items():
                    print(f"\n{page}, {block}:\n\n{text}")
                    if options.write:
                        cells.write_block(pathlib.Path(page), block, text)
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
