"""Compares a source distribution with the repository: `check_sdist.py dist/*.tar.gz`.

Every file that git tracks is in it, and nothing else but what setuptools writes.
"""

from __future__ import annotations

import pathlib
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def contents(path: pathlib.Path) -> set[str]:
    """Returns the files of a source distribution, without those that setuptools writes."""
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    return {
        name
        for name in names
        if name not in ("PKG-INFO", "setup.cfg") and not name.startswith("tfp_dpvi.egg-info/")
    }


def tracked() -> set[str]:
    """Returns the files that git tracks, or none outside of a checkout."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return set(filter(None, listed.stdout.split("\0")))


def main(path: str) -> int:
    """Prints the differences, and returns 1 if there are some."""
    expected = tracked()
    if not expected:
        print("make: no checkout, so that there is nothing to compare the sdist with")
        return 0
    packed = contents(pathlib.Path(path))
    for name in sorted(expected - packed):
        print(f"missing from the sdist: {name}")
    for name in sorted(packed - expected):
        print(f"in the sdist, but not in the repository: {name}")
    return int(packed != expected)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
