"""The commands, and what they print: results on stdout, all else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import dis
import inspect
import json
import math
import pathlib
import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from tfp_dpvi.cli.files import read_schema, read_table, write_table
from tfp_dpvi.privacy import BudgetExhaustedError, LedgerError, PrivacyLedger
from tfp_dpvi.privacy import __main__ as privacy

if TYPE_CHECKING:
    from tfp_dpvi.regressions import Regression

# Exit codes, which the guide lists.
DONE = 0
FAULT = 1
REFUSED = 2
EXHAUSTED = 3

_OF_PRIVACY = ("plan", "show")


def _parser() -> argparse.ArgumentParser:
    """Returns the parser of `tfp-dpvi`, without the arguments of `plan` and `show`."""
    parser = argparse.ArgumentParser(
        prog="tfp-dpvi",
        description="Private regressions and synthetic tables. No record is printed anywhere.",
        epilog="exit codes: 0 done, 1 fault, 2 refused and nothing spent, 3 budget exhausted",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("plan", help="the privacy cost of a fit, without data", add_help=False)
    commands.add_parser("show", help="the privacy report of a ledger file", add_help=False)
    _add_fit(commands.add_parser("fit", help="a private regression of a table"))
    _add_synthesize(commands.add_parser("synthesize", help="a private synthetic copy of a table"))
    _add_rehearse(commands.add_parser("rehearse", help="what a fit would give, without data"))
    report = commands.add_parser("report", help="the report of what `fit` or `synthesize` wrote")
    report.add_argument("folder", help="the --out of that command")
    report.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="a .csv, .parquet, .arrow or .feather file of records")
    _add_formula(parser)
    parser.add_argument(
        "--priors", nargs="+", default=[], metavar="NAME=MEAN,SD", help="in the data's units"
    )
    _add_budget(parser)
    parser.add_argument("--weights", metavar="COLUMN", help="survey weights")
    parser.add_argument(
        "--checks", type=float, metavar="SHARE", help="of epsilon, for a check of the fitted model"
    )
    parser.add_argument("--unit", help="the column of persons, to protect these instead of rows")
    parser.add_argument("--max-rows-per-unit", type=int, metavar="M", help="rows of a person used")
    parser.add_argument(
        "--measured",
        nargs="*",
        metavar="COLUMN",
        help="release typical values of these first, or of none; by default of those without any",
    )
    parser.add_argument(
        "--public-data", metavar="FILE", help="public records with columns like the private ones"
    )
    _add_output(parser)


def _add_formula(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--formula", required=True, help='such as "visits ~ age + (1 | county)"')
    parser.add_argument("--family", required=True, help='such as "normal" or "poisson"')
    _add_schema(parser)
    parser.add_argument("--missing", choices=["indicator"], help="what missing covariates become")
    parser.add_argument("--outside", choices=["refuse", "clip"], default="refuse")
    parser.add_argument(
        "--constants",
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="public numbers that the formula names, lists as knots=40,60",
    )


def _add_schema(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schema", required=True, help="a .json or .yaml file: what is public")


def _add_budget(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epsilon", type=float, required=True, help="the total on the ledger")
    parser.add_argument("--delta", type=float, required=True, help="well below 1 / records")
    # In memory it would be forgotten with the process, and the next fit would start anew.
    parser.add_argument("--ledger", required=True, help="the file that keeps what was spent")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="a new or empty folder for the results")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_synthesize(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("data", help="a .csv, .parquet, .arrow or .feather file of records")
    _add_schema(parser)
    _add_budget(parser)
    parser.add_argument("--target", help="the column that the records should predict")
    parser.add_argument("--sets", type=int, default=1, help="how many tables to sample")
    parser.add_argument("--rows", type=int, help="records of each, by default as many as in data")
    _add_output(parser)


def _add_rehearse(parser: argparse.ArgumentParser) -> None:
    _add_formula(parser)
    parser.add_argument("--records", type=int, nargs="+", required=True, metavar="N")
    parser.add_argument("--epsilon", type=float, nargs="+", required=True)
    parser.add_argument("--delta", type=float, required=True)
    parser.add_argument(
        "--truth", nargs="+", default=[], metavar="NAME=VALUE", help="effects, in the data's units"
    )
    parser.add_argument("--num", type=int, default=100, help="simulated data sets of each")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
      arguments: The arguments, by default those of the process.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in _OF_PRIVACY:
        return privacy.main(arguments)
    options = _parser().parse_args(arguments)
    run = {"fit": _fit, "synthesize": _synthesize, "rehearse": _rehearse, "report": _report}
    try:
        with _results_alone():
            text, values = run[options.command](options)
    except BudgetExhaustedError as error:
        return _failed(error, EXHAUSTED)
    except Exception as error:
        if _is_refusal(error):
            return _failed(error, REFUSED)
        print(f"error: {type(error).__name__}: please report it.", file=sys.stderr)
        return FAULT
    print(json.dumps(values) if options.json else text)
    return DONE


def _failed(error: Exception, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code


def _is_refusal(error: Exception) -> bool:
    """Returns whether an error's text is this library's, or the system's about a file.

    The text of another library's may quote a record.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return True
    refusals = (LedgerError, OSError, TypeError, ValueError, ImportError)
    *_, trace = _traces(error)
    if not (isinstance(error, refusals) and _is_ours(trace.tb_frame)):
        return False
    # A function written in C raises from the line that calls it, without the instruction.
    return trace.tb_frame.f_code.co_code[trace.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _traces(error: Exception) -> Iterator[types.TracebackType]:
    """Yields an error's places, the one that raised it last."""
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def _is_ours(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == "tfp_dpvi"


@contextlib.contextmanager
def _results_alone() -> Iterator[None]:
    """Sends progress and warnings to stderr, so that stdout has the result alone."""

    def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        del place, more
        frame = inspect.currentframe()
        frame = None if frame is None else frame.f_back
        while frame is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        known = frame is not None and _is_ours(frame)
        print(f"warning: {message if known else category.__name__}", file=sys.stderr)

    with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def _folder(path: str) -> pathlib.Path:
    """Returns a new or empty folder."""
    folder = pathlib.Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"--out {path!r} is not empty: name a new folder, so that nothing is lost."
        )
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _fit(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Fits a regression and writes its files."""
    from tfp_dpvi.regressions import regression

    schema = read_schema(options.schema)
    data = read_table(options.data, schema)
    public_data = options.public_data and read_table(options.public_data, schema)
    folder = _folder(options.out)
    print(f"fitting {options.formula}", file=sys.stderr)
    result = regression(
        options.formula,
        data,
        options.family,
        schema,
        epsilon=options.epsilon,
        delta=options.delta,
        ledger=PrivacyLedger(options.ledger),
        missing=options.missing,
        outside=options.outside,
        constants=_numbers("--constants", options.constants, "knots=40,60"),
        priors=_numbers("--priors", options.priors, "age=0,0.1"),
        weights=options.weights,
        checks=options.checks,
        measured=options.measured,
        unit=options.unit,
        max_rows_per_unit=options.max_rows_per_unit,
        public_data=public_data,
        verbose=int(sys.stderr.isatty()),
    )
    result.save(folder / "regression.zip")
    summary = result.summary()
    summary.to_csv(folder / "summary.csv")
    return _written(folder, str(result), result.report(), _values(result))


def _numbers(option: str, pairs: Sequence[str], example: str) -> dict[str, float | list[float]]:
    """Returns the number of each NAME=NUMBER, or the list of NAME=NUMBER,[NUMBER ...], by name."""
    found: dict[str, float | list[float]] = {}
    for pair in pairs:
        name = pair.rpartition("=")[0]
        values = pair.rpartition("=")[2]
        try:
            numbers = [float(value) for value in values.removesuffix(",").split(",")]
        except ValueError:
            raise ValueError(f"{option} {pair!r}: {values!r} is no number.") from None
        if not name:
            raise ValueError(f"{option} {pair!r} must be NAME=VALUE, such as {example}.")
        found[name] = numbers if "," in values else numbers[0]
    return found


def _values(result: Regression) -> dict[str, Any]:
    """Returns a regression's table, warnings and privacy as plain values."""
    rows = {
        str(name): {str(column): _plain(value) for column, value in row.items()}
        for name, row in result.summary().iterrows()
    }
    return {
        "coefficients": rows,
        "warnings": result.warnings,
        "privacy": result.privacy_report().to_json(),
    }


def _plain(value: float) -> float | None:
    """Returns a number that JSON has, None for another."""
    return float(value) if math.isfinite(value) else None


def _written(
    folder: pathlib.Path, shown: str, report: str, values: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Writes report and values, and returns what is printed."""
    (folder / "report.txt").write_text(report + "\n", encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    names = sorted(path.name for path in folder.iterdir())
    return f"{shown}\n\nwritten to {folder}: {', '.join(names)}", values


def _synthesize(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Fits a synthesizer and writes its tables."""
    from tfp_dpvi.synthetic import Synthesizer

    schema = read_schema(options.schema)
    data = read_table(options.data, schema)
    synthesizer = Synthesizer(schema, target=options.target)
    folder = _folder(options.out)
    print("fitting", file=sys.stderr)
    synthesizer.fit(
        data[[name for name in data.columns if name in schema.columns]],
        epsilon=options.epsilon,
        delta=options.delta,
        ledger=PrivacyLedger(options.ledger),
    )
    synthesizer.save(folder / "synthesizer.keras")
    sets = synthesizer.sample_many(options.sets, options.rows)
    for number, table in enumerate(sets, 1):
        write_table(table, folder / f"table-{number}.csv")
    report = synthesizer.privacy_report()
    values = {"tables": len(sets), "rows": len(sets[0]), "privacy": report.to_json()}
    return _written(folder, str(report), str(report), values)


def _rehearse(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Rehearses a regression."""
    from tfp_dpvi.rehearsal import rehearse_regression

    truth = cast("dict[str, float]", _numbers("--truth", options.truth, "age=0.02"))
    rehearsal = rehearse_regression(
        options.formula,
        options.family,
        read_schema(options.schema),
        num_records=options.records,
        epsilon=options.epsilon,
        delta=options.delta,
        truth=truth or None,
        num=options.num,
        missing=options.missing,
        outside=options.outside,
        constants=_numbers("--constants", options.constants, "knots=40,60"),
        verbose=int(sys.stderr.isatty()),
    )
    table = rehearsal.table()
    rows = [
        {name: _plain(value) if isinstance(value, float) else value for name, value in row.items()}
        for row in json.loads(table.to_json(orient="records"))
    ]
    return str(rehearsal), {"rehearsal": rows}


def _report(options: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """Returns what an earlier command wrote: no model is loaded."""
    folder = pathlib.Path(options.folder)
    report, values = folder / "report.txt", folder / "result.json"
    if not (report.is_file() and values.is_file()):
        raise ValueError(f"{options.folder!r} has no report: pass the --out of fit or synthesize.")
    return report.read_text(encoding="utf-8").rstrip(), json.loads(values.read_text("utf-8"))
