"""Audits the private step with faults planted in it, and as it is; status 1 if a fault is missed or the clean step fails.

    make audit                                 about two minutes

Each fault is planted in the step that `fit` runs (`tests/support/planted.py`), and the audit that is there for it must
find it. The clean step must pass all audits; it fails by chance with a probability of less than 1e-6.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support import planted  # noqa: E402


def main() -> int:
    """Prints a line for each audit; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verbose", action="store_true", help="print the text of every audit")
    options = parser.parse_args()
    wrong = 0
    for fault in planted.FAULTS:
        wrong += _line(options, fault.name, fault.subject, fault.audit, True, fault.plant)
    for subject, audit in planted.CLEAN:
        wrong += _line(options, "clean", subject, audit, False)
    num = len({fault.name for fault in planted.FAULTS})
    print(f"\n{num} faults, {len(planted.CLEAN)} audits of the clean step: {wrong} wrong")
    return int(wrong > 0)


def _line(options, name, subject, audit, expected, *plant) -> bool:
    start = time.perf_counter()
    text, complains = planted.complaint(subject, audit, *plant)
    verdict = "found" if complains else "passes"
    right = "" if complains == expected else "   WRONG"
    seconds = time.perf_counter() - start
    print(f"{name:<28} {subject:<9} {audit:<12} {verdict:<7} {seconds:5.1f} s{right}", flush=True)
    if options.verbose or right:
        print("    " + text.replace("\n", "\n    "), flush=True)
    return bool(right)


if __name__ == "__main__":
    sys.exit(main())
