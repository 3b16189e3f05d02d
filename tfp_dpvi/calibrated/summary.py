"""A table of the posterior, from released values alone."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import Coordinates, entry_names
from tfp_dpvi.calibrated.mixture import Checks
from tfp_dpvi.calibrated.posterior import Calibrated


@dataclasses.dataclass(frozen=True)
class PosteriorSummary:
    """Summary statistics of each parameter; `print` it, or use `columns`.

    Columns are "mean", "sd", "5%", "50%", "95%" in a parameter's own support, and for a calibrated posterior the shares of its
    variance on the real line: "noise", "data" and "prior" (NaN for entries that are no coordinate of their own).
    """

    names: list[str]  # Of the parameters' entries, such as "w[0]".
    columns: dict[str, np.ndarray]
    checks: Checks | None  # None if the posterior is the raw surrogate.
    fitted: bool = True

    def __str__(self) -> str:
        width = max(len(name) for name in self.names)
        lines = [" " * width + "".join(f"{name:>10}" for name in self.columns)]
        for number, name in enumerate(self.names):
            lines.append(
                f"{name:<{width}}"
                + "".join(f"{values[number]:10.3g}" for values in self.columns.values())
            )
        one = self.checks
        if one is None and not self.fitted:
            lines.append(
                "No fit is recorded: unless weights were loaded, these are starting values."
            )
        elif one is None:
            lines.append(
                "Not calibrated: the spread includes neither the added noise nor the bias of clipping."
            )
        else:
            limit = f"no limit, as the bend is {one.bend:.2g}" if one.bend <= 1.0 else "limit 1.3"
            lines.append(
                f"Distance {one.distance:.2f} ({limit}), halves p = {one.halves:.2g}, kappa {one.kappa:.2f}, curvature "
                f"signal {one.curvature_signal:.1f}."
            )
            lines += [f"WARNING: {sentence}." for sentence in one.warnings]
        return "\n".join(lines)


def summarise(
    draws: Structure, coordinates: Coordinates, calibrated: Calibrated | None, fitted: bool
) -> PosteriorSummary:
    """Returns the table of posterior draws."""
    parts = [part.numpy() for part in tf.nest.flatten(draws)]
    names = entry_names(tf.nest.map_structure(lambda part: part[0], draws))
    values = np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)
    quantiles = np.quantile(values, [0.05, 0.5, 0.95], axis=0)
    columns = {"mean": values.mean(axis=0), "sd": values.std(axis=0)}
    columns.update(zip(("5%", "50%", "95%"), quantiles, strict=True))
    if calibrated is not None:
        own = np.full((len(names), 3), np.nan)
        if coordinates.sizes == [
            part[0].size for part in parts
        ]:  # Not for a simplex, for instance.
            own = calibrated.shares
        columns.update(zip(("noise", "data", "prior"), own.T, strict=True))
    return PosteriorSummary(
        names, columns, None if calibrated is None else calibrated.checks, fitted
    )
