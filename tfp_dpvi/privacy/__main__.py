"""The command line: `python -m tfp_dpvi.privacy plan` and `... show LEDGER`."""

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from tfp_dpvi.privacy import planner
from tfp_dpvi.privacy.accountants import ACCOUNTANTS
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError
from tfp_dpvi.privacy.ledger import PrivacyLedger
from tfp_dpvi.privacy.report import PrivacyReport


def _count(text: str) -> int:
    """Returns a whole number from text such as "100000" or "1e5"."""
    for number in (int, float):
        with contextlib.suppress(ValueError, OverflowError):
            if float(value := number(text)).is_integer():
                return int(value)
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a whole number; pass, for example, 100000 or 1e5"
    )


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser of the command line, with the commands `plan` and `show`."""
    parser = argparse.ArgumentParser(
        prog="python -m tfp_dpvi.privacy", description="Plans and reports of differential privacy."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="the privacy cost of a fit, without data")
    records: dict[str, Any] = {"dest": "num_records", "type": _count, "metavar": "N"}
    plan.add_argument("--records", required=True, help="public number of records", **records)
    plan.add_argument(
        "--batch-size", type=_count, required=True, metavar="B", help="expected batch size"
    )
    length = plan.add_mutually_exclusive_group(required=True)
    length.add_argument(
        "--epochs", type=_count, metavar="E", help="passes over the records, ceil(N / B) steps each"
    )
    length.add_argument("--steps", type=_count, metavar="T", help="number of steps")
    strength = plan.add_mutually_exclusive_group(required=True)
    strength.add_argument("--epsilon", type=float, help="calibrate the noise to this epsilon")
    strength.add_argument(
        "--noise-multiplier", type=float, help="noise over l2_norm_clip; prints its epsilon"
    )
    plan.add_argument(
        "--delta", type=float, required=True, help="well below 1 / N, for example 1e-5"
    )
    relations = ["add_or_remove_one", "replace_one"]
    plan.add_argument(
        "--neighboring",
        dest="neighboring_relation",
        default=relations[0],
        choices=relations,
        help="adjacency",
    )
    plan.add_argument(
        "--accountant",
        choices=sorted(ACCOUNTANTS),
        help="by default pld, and rdp for --sampling fixed_size",
    )
    plan.add_argument("--sampling", default="poisson", choices=planner.SAMPLINGS)
    plan.add_argument("--json", action="store_true", help="print one JSON object")
    show = commands.add_parser(
        "show", help="the privacy report of a ledger file, also while it is in use"
    )
    show.add_argument("ledger", metavar="FILE")
    show.add_argument("--delta", type=float, required=True)
    show.add_argument(
        "--records", help="number of records, by default that of the plans", **records
    )
    show.add_argument(
        "--accountant", choices=sorted(ACCOUNTANTS), help="by default that of the plans"
    )
    show.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = build_parser().parse_args(arguments)
    try:
        answer = _answer(options)
    except (BudgetExhaustedError, LedgerError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(answer.to_json()) if options.json else answer)
    return 0


def _answer(options: argparse.Namespace) -> planner.PrivacyOutlook | PrivacyReport:
    arguments = {
        name: value
        for name, value in vars(options).items()
        if name not in ("json", "command", "ledger")
    }
    if options.command == "show":
        return PrivacyReport.from_ledger(PrivacyLedger(options.ledger, read_only=True), **arguments)
    return planner.plan_privacy(**arguments)


if __name__ == "__main__":
    sys.exit(main())
