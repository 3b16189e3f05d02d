"""One table of all checks: those of values that the fit released anyway, and the private ones."""

from __future__ import annotations

import dataclasses
import html
import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi.calibrated import checks as limits
from tfp_dpvi.calibrated.checks import Checks, ParameterChecks
from tfp_dpvi.checking.result import PrivateChecks

_FREE = "free"


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """One check: what it found, and what it can and cannot see.

    ```python
    >>> row = CheckRow("halves", "p = 0.4", "p >= 0.001", True, "drift", "a slow one", "free")
    >>> row.verdict
    'ok'

    ```

    Attributes:
      name: The check.
      value: What it found, as text.
      limit: What it should be, as text.
      passed: Whether it is; None where the check does not apply.
      sees: The faults that it can see.
      blind: Those that it cannot.
      cost: "free", or the epsilon of the release.
    """

    name: str
    value: str
    limit: str
    passed: bool | None
    sees: str
    blind: str
    cost: str

    @property
    def verdict(self) -> str:
        """The verdict "ok", "FAILED" or "not applicable"."""
        return {True: "ok", False: "FAILED", None: "not applicable"}[self.passed]


@dataclasses.dataclass(frozen=True)
class CheckTable:
    """All checks of a fitted model; `print` it, or read `rows`.

    ```python
    >>> row = CheckRow("halves", "p = 0.4", "p >= 0.001", True, "drift", "a slow one", "free")
    >>> print(CheckTable((row,)))
    check   found    should be   verdict  cost
    halves  p = 0.4  p >= 0.001  ok       free
    <BLANKLINE>
    halves: sees drift; not a slow one.

    ```

    Attributes:
      rows: The checks, the free ones first.
    """

    rows: Sequence[CheckRow]

    @property
    def failed(self) -> list[str]:
        """The names of the checks that failed."""
        return [row.name for row in self.rows if row.passed is False]

    def __str__(self) -> str:
        cells = [("check", "found", "should be", "verdict", "cost")]
        cells += [(row.name, row.value, row.limit, row.verdict, row.cost) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
        seen = [f"{row.name}: sees {row.sees}; not {row.blind}." for row in self.rows]
        return "\n".join([*lines, "", *seen])

    def _repr_html_(self) -> str:
        names = ("name", "value", "limit", "verdict", "sees", "blind", "cost")
        head = "".join(
            f"<th>{name}</th>"
            for name in ("check", "found", "should be", "verdict", "sees", "not", "cost")
        )
        body = "".join(
            "<tr>"
            + "".join(f"<td>{html.escape(str(getattr(row, name)))}</td>" for name in names)
            + "</tr>"
            for row in self.rows
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def free_rows(checks: Checks | None) -> list[CheckRow]:
    """Returns the checks of released values.

    Args:
      checks: Those of a calibrated posterior, or None for a raw surrogate.
    """
    if checks is None:
        return [
            CheckRow(
                "posterior",
                "the raw surrogate",
                "calibrated",
                False,
                "that intervals include neither noise nor the bias of clipping",
                "whether the likelihood fits",
                _FREE,
            )
        ]
    rows = [*_of_training(checks), *_of_likelihood(checks)]
    return [*rows, *([] if checks.parameters is None else _of_parameters(checks.parameters))]


def private_rows(checks: PrivateChecks | None) -> list[CheckRow]:
    """Returns the tests of a private release, none without one.

    Args:
      checks: The release.
    """
    if checks is None:
        return []
    cost = f"epsilon {checks.epsilon:.3g}"
    return [
        CheckRow(
            test.name,
            f"p = {test.adjusted:.2g}",
            f"p > {checks.level:g}",
            not test.failed,
            *_PRIVATE.get(test.name, _RESIDUALS),
            cost,
        )
        for test in checks.tests
    ]


_PRIVATE = {
    "PIT values": (
        "outcomes that lie elsewhere than predicted over all records: spread, tails, skewness",
        "faults that cancel over records, such as a bent effect or a wrong interaction",
    ),
    "reliability": (
        "wrong probabilities: mislabelled outcomes, effects that level off, missing terms",
        "faults among records of equal predicted probability",
    ),
}
_RESIDUALS = (
    "an effect of the column that is missing, bent or interrupted",
    "faults in columns that were not declared, or with equal means in each bin",
)


def _row(
    name: str, value: float, shown: str, limit: str, passed: bool, sees: str, blind: str
) -> CheckRow:
    """Returns a free check; one whose value is NaN does not apply."""
    if math.isnan(value):
        return CheckRow(name, "-", limit, None, sees, blind, _FREE)
    return CheckRow(name, shown, limit, bool(passed), sees, blind, _FREE)


def _together(checks: Checks) -> str:
    """Returns the limit of tests that share their false alarms."""
    return f"p, Holm's {checks.level:.2g}"


def _of_training(checks: Checks) -> list[CheckRow]:
    """Returns the checks of whether the fit has settled and its clip and inputs were right."""
    # A pilot's small bend makes the distance harmless.
    is_near = checks.distance <= limits.MOST_DISTANCE or checks.bend <= limits.MOST_BEND
    return [
        _row(
            "distance",
            checks.distance,
            f"{checks.distance:.2g} sd",
            f"<= {limits.MOST_DISTANCE:g} sd",
            is_near,
            "training that did not reach the posterior's mean",
            "a posterior that is wrong itself",
        ),
        _row(
            "halves",
            checks.halves,
            f"p = {checks.halves:.2g}",
            _together(checks),
            "halves" not in checks.failed,
            "drift within the last steps",
            "a drift that is slower than the noise",
        ),
        _row(
            "kappa",
            checks.kappa,
            f"{checks.kappa:.2g}",
            f"< {limits.MOST_KAPPA_SEEN:g}",
            checks.kappa < limits.MOST_KAPPA_SEEN,
            "a clip that cuts most scores",
            "whether what it cuts differs from the rest",
        ),
        _row(
            "mismatch",
            checks.mismatch,
            f"{checks.mismatch:.2g}",
            f"<= {limits.MOST_MISMATCH:g}",
            checks.mismatch <= limits.MOST_MISMATCH,
            "private inputs unlike the public ones",
            "whether the likelihood fits",
        ),
        CheckRow(
            "curvature signal",
            f"{checks.curvature_signal:.2g}",
            "no limit",
            True,
            "how far the curvature is above its noise",
            "errors of the model",
            _FREE,
        ),
        _row(
            "bend",
            checks.bend,
            f"{checks.bend:.2g} sd",
            f"<= {limits.MOST_BEND:g} sd, or see distance",
            is_near,
            "how much a score that is not linear moves the mean",
            "anything without a pilot",
        ),
    ]


def _of_likelihood(checks: Checks) -> list[CheckRow]:
    """Returns the checks of the likelihood."""
    return [
        _row(
            "overdispersion",
            checks.lack_of_fit_z,
            f"{1.0 + checks.lack_of_fit:.2f} times, z = {checks.lack_of_fit_z:.1f}",
            f"within {limits.MOST_LACK_OF_FIT:g} of 1, or {_together(checks)}",
            "lack_of_fit" not in checks.failed
            or abs(checks.lack_of_fit) <= limits.MOST_LACK_OF_FIT,
            "scores that vary more or less than the likelihood says, as of overdispersed counts",
            "what a fitted scale absorbs, and missing terms",
        ),
        _row(
            "ranks",
            checks.ranks,
            f"p = {checks.ranks:.2g}",
            _together(checks),
            "ranks" not in checks.failed,
            "skewness, tails and peak that a fitted scale absorbs",
            "outcomes of few values, and missing terms",
        ),
    ]


def _of_parameters(checks: ParameterChecks) -> list[CheckRow]:
    """Returns the checks of single parameters, of each the worst one."""
    return [
        _worst(
            "reach",
            checks.names,
            checks.reaches,
            limits.MOST_REACHES,
            "a prior that is far wider than the steps can go",
            "a prior that is too narrow",
        ),
        _worst(
            "narrowing",
            checks.names,
            checks.narrowing,
            limits.MOST_NARROWING,
            "intervals that an assumed curvature narrows",
            "a wrong curvature that the noise hides",
        ),
        _worst(
            "width",
            checks.names,
            checks.width,
            limits.MOST_WIDTH,
            "posteriors wider than the prior",
            "posteriors that are too narrow",
        ),
        _worst(
            "extent",
            checks.names,
            checks.extent,
            limits.MOST_EXTENT,
            "posteriors that reach beyond where scores are linear: few records, or a far start",
            "a wrong likelihood",
        ),
        _worst(
            "shift",
            checks.names,
            checks.clear("shift"),
            limits.MOST_SHIFT,
            "estimates that the tails would move under a wider clip",
            "a fault in the bulk of the outcomes",
        ),
        _worst(
            "pull",
            checks.names,
            checks.clear("pull"),
            limits.MOST_PULL,
            "a prior that contradicts the records and moves the estimate",
            "a prior that few records or much noise cannot contradict",
        ),
        _worst(
            "tail",
            checks.names,
            checks.tail,
            limits.MOST_TAIL,
            "information that a few extreme public inputs have, and private ones may lack",
            "public inputs of which many are too extreme: see mismatch",
        ),
    ]


def _worst(
    name: str, names: Sequence[str], values: np.ndarray, limit: float, sees: str, blind: str
) -> CheckRow:
    """Returns the largest value among parameters, with the parameter's name."""
    if np.isnan(values).all():
        return _row(name, math.nan, "", f"<= {limit:g}", True, sees, blind)
    place = int(np.nanargmax(values))
    largest = float(values[place])
    shown = f"{largest:.2g} ({names[place]})"
    return _row(name, largest, shown, f"<= {limit:g}", largest <= limit, sees, blind)
