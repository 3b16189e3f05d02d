"""Pictures of a regression, with matplotlib."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi.data import Column
from tfp_dpvi.data.columns import Numeric

if TYPE_CHECKING:
    import pandas

_MOST_ROWS = 40


def forest(
    posterior: Mapping[str, np.ndarray], outcome: str, ax: Any = None, hidden: Collection[str] = ()
) -> Any:
    """Draws the 94 % and 50 % intervals of coefficients, each in its own units.

    Args:
      posterior: Draws by the names of coefficients.
      outcome: The outcome, for the label.
      ax: Axes, or None for new ones.
      hidden: Names to leave out, unless that leaves nothing.
    """
    import matplotlib.pyplot as plt

    names = [name for name in posterior if name not in hidden][:_MOST_ROWS]
    names = names or list(posterior)
    ax = ax or plt.subplots(figsize=(6.5, 0.6 + 0.3 * len(names)), layout="constrained")[1]
    for place, name in enumerate(reversed(names)):
        ends = np.quantile(posterior[name], [0.03, 0.25, 0.75, 0.97])
        ax.plot(ends[[0, 3]], [place, place], color="C0", lw=1.2)
        ax.plot(ends[1:3], [place, place], color="C0", lw=4.0)
    ax.axvline(0.0, color="0.7", lw=0.8, zorder=0)
    ax.set_yticks(range(len(names)), reversed(names))
    ax.set_xlabel(f"coefficient for {outcome}: 50 % and 94 % intervals")
    return ax


def effect(table: pandas.DataFrame, column: Column, outcome: str, ax: Any = None) -> Any:
    """Draws expected outcomes over a covariate, with a band.

    Args:
      table: The covariate's values in the first column, then predictions.
      column: The covariate's description.
      outcome: The outcome, for the label.
      ax: Axes, or None for new ones.
    """
    import matplotlib.pyplot as plt

    name = table.columns[0]
    ax = ax or plt.subplots(figsize=(5.0, 3.4), layout="constrained")[1]
    values = table[name].to_numpy()
    levels = [other for other in table.columns[1:] if f"{other} low" in table.columns]
    shown = [(level, level, f"{level} low", f"{level} high") for level in levels]
    shown = shown or [("", "mean", "mean_low", "mean_high")]
    for label, mean, low, high in shown:
        if isinstance(column, Numeric):
            (line,) = ax.plot(values, table[mean], label=label)
            ax.fill_between(values, table[low], table[high], alpha=0.2, color=line.get_color())
            continue
        errors = [table[mean] - table[low], table[high] - table[mean]]
        ax.errorbar([str(value) for value in values], table[mean], errors, fmt="o", label=label)
    if levels:
        ax.legend()
    unit = f" ({column.unit})" if column.unit else ""
    ax.set_xlabel(f"{name}{unit}")
    ax.set_ylabel("probability" if levels else f"expected {outcome}")
    return ax
