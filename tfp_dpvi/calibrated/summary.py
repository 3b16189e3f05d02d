"""A table of the posterior, from released values alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import Coordinates, entry_names
from tfp_dpvi.calibrated.checks import MOST_BEND, MOST_DISTANCE, Checks
from tfp_dpvi.calibrated.posterior import Calibrated


@dataclasses.dataclass(frozen=True)
class PosteriorSummary:
    """Summary statistics of each parameter; `print` it, or use `columns`.

    Attributes:
      names: Names of the parameters' entries, such as "w[0]".
      columns: Arrays with a number for each entry. "mean", "sd", "5%", "50%" and "95%" are in a
        parameter's own support. A calibrated posterior has the shares of its variance on the real
        line, "noise", "data" and "prior", NaN for entries that are no coordinate of their own; and
        "N halves" and "eps halves", how many times as many records, or as much epsilon, would halve
        its sd: infinite where none would.
      checks: Diagnostics of the intervals; None if the posterior is the raw surrogate.
      fitted: Whether a fit is recorded.
      sentences: What else to read before the intervals.
      in_words: Says a sentence of the checks in the words of whoever reads it.
    """

    names: list[str]
    columns: dict[str, np.ndarray]
    checks: Checks | None
    fitted: bool = True
    sentences: tuple[str, ...] = ()
    in_words: Callable[[str], str] = str

    def with_rows(
        self, rows: Mapping[str, np.ndarray], sentences: tuple[str, ...]
    ) -> PosteriorSummary:
        """Returns the table with more numbers, and more to read.

        Args:
          rows: Draws of each number by its name, shape [n].
          sentences: What to read before the intervals.
        """
        columns = dict(self.columns)
        if rows:
            more = statistics_of(np.stack(list(rows.values()), axis=1))
            unknown = np.full(len(rows), np.nan)
            columns = {
                name: np.concatenate([values, more.get(name, unknown)])
                for name, values in self.columns.items()
            }
        return dataclasses.replace(
            self, names=[*self.names, *rows], columns=columns, sentences=sentences
        )

    def __str__(self) -> str:
        width = max(len(name) for name in self.names)
        lines = [" " * width + "".join(f"{name:>11}" for name in self.columns)]
        for number, name in enumerate(self.names):
            lines.append(
                f"{name:<{width}}"
                + "".join(f"{values[number]:11.3g}" for values in self.columns.values())
            )
        checks = self.checks
        if checks is None and not self.fitted:
            lines.append(
                "No fit is recorded: unless weights were loaded, these are starting values."
            )
        elif checks is None:
            lines.append(
                "Not calibrated: the spread includes neither the added noise nor the bias of "
                "clipping."
            )
        else:
            limit = f"limit {MOST_DISTANCE:g}"
            if checks.bend <= MOST_BEND:
                limit = f"no limit, as the bend is {checks.bend:.2g}"
            lines.append(
                f"Distance {checks.distance:.2f} ({limit}), halves p = {checks.halves:.2g}, "
                f"kappa {checks.kappa:.2f}, curvature signal {checks.curvature_signal:.1f}."
            )
            lines += [f"{note[0].upper()}{note[1:]}." for note in checks.notes]
            lines += [f"WARNING: {self.in_words(each)}." for each in checks.warnings]
        lines += [f"WARNING: {sentence}." for sentence in self.sentences]
        return "\n".join(lines)


def summarise(
    draws: Structure, coordinates: Coordinates, calibrated: Calibrated | None, fitted: bool
) -> PosteriorSummary:
    """Returns the table of posterior draws.

    Args:
      draws: Draws in the prior's structure, which run over the first dimension.
      coordinates: The prior's coordinates.
      calibrated: The calibrated posterior, or None if they are the surrogate's.
      fitted: Whether a fit is recorded.
    """
    parts = [part.numpy() for part in tf.nest.flatten(draws)]
    names = entry_names(tf.nest.map_structure(lambda part: part[0], draws))
    values = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    columns = statistics_of(values)
    if calibrated is not None:
        # A simplex, for instance, has fewer coordinates than entries.
        is_same = coordinates.sizes == [part[0].size for part in parts]
        shares = calibrated.shares if is_same else np.full((len(names), 3), np.nan)
        columns.update(zip(("noise", "data", "prior"), shares.T, strict=True))
        if calibrated.halving is not None and is_same:
            columns.update(zip(("N halves", "eps halves"), calibrated.halving.T, strict=True))
    checks = None if calibrated is None else calibrated.checks
    return PosteriorSummary(names, columns, checks, fitted)


def statistics_of(values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns mean, standard deviation and quantiles of each number, arrays of shape [P].

    Args:
      values: Draws of the numbers, shape [n, P].
    """
    quantiles = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
    columns = {"mean": values.mean(axis=0), "sd": values.std(axis=0)}
    return {**columns, **dict(zip(("5%", "50%", "95%"), quantiles, strict=True))}
