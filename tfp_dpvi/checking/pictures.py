"""Pictures of released checks, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

_TITLES = {
    "PIT": ("PIT values", "share over expected, less 1"),
    "reliability": ("reliability", "observed less predicted share"),
}
# Of a normal distribution, the half width of the central 95 %.
_WIDTH = 1.96


def draw(
    panels: Sequence[tuple[str, Sequence[str], np.ndarray, np.ndarray]], axes: Any = None
) -> Any:
    """Draws values by bins, each with the interval that has 95 % if the model is right.

    Args:
      panels: For each picture its name, the labels of the bins, values and standard deviations.
      axes: As many axes as panels, or None for new ones.
    """
    import matplotlib.pyplot as plt

    if axes is None:
        size = (3.6 * len(panels), 3.2)
        axes = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)[1][0]
    for ax, (name, labels, values, deviations) in zip(axes, panels, strict=True):
        title, unit = _TITLES.get(name, (f"residuals by {name}", "mean rank residual"))
        places = np.arange(len(values))
        outside = np.abs(values) > _WIDTH * deviations
        ax.bar(places, 2.0 * _WIDTH * deviations, bottom=-_WIDTH * deviations, color="0.88")
        ax.scatter(places, values, c=np.where(outside, "C3", "C0"), zorder=2)
        ax.axhline(0.0, color="0.5", lw=0.8)
        ax.set_xticks(places, labels, rotation=45, ha="right", fontsize=7)
        ax.set_title(title)
        ax.set_ylabel(f"{unit}; grey: 95 % if right")
    return axes
