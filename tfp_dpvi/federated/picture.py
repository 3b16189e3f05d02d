"""A picture of a study: factors over rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from tfp_dpvi.federated.server import Round

_MOST = 6  # Parameters that are shown.


def draw(rounds: Sequence[Round], path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
    """Draws the posterior and each hospital's factor over rounds; raises `ImportError` without matplotlib."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib.") from error
    if not rounds:
        raise ValueError("rounds is empty: no update of the posterior was made.")
    number = np.arange(1, len(rounds) + 1)
    posterior = rounds[-1].posterior
    shown = range(min(_MOST, posterior.num))
    page = figure.Figure(figsize=(11, 7), layout="constrained")
    axes = page.subplots(2, 2)
    means, spreads = (np.array([getattr(one.posterior, each) for one in rounds]) for each in ("mean", "stddev"))
    for one in shown:
        label = names[one] if names else f"z[{one}]"
        axes[0, 0].errorbar(number + 0.06 * one, means[:, one], spreads[:, one], label=label, capsize=2)
    axes[0, 0].set(title="posterior: mean and standard deviation", xlabel="update")
    axes[0, 0].legend(fontsize="small")
    for hospital in rounds[-1].factors:
        has = [(n, one.factors[hospital]) for n, one in zip(number, rounds, strict=True) if hospital in one.factors]
        precision = [np.trace(f.precision) if f.full_rank else f.precision.sum() for _, f in has]
        axes[0, 1].plot([n for n, _ in has], precision, label=hospital)
        axes[1, 0].plot(number, [one.epsilon.get(hospital, 0.0) for one in rounds], label=hospital)
    axes[0, 1].set(title="total precision of each hospital's factor", xlabel="update")
    axes[0, 1].legend(fontsize="small")
    axes[1, 0].set(title="epsilon that each hospital states", xlabel="update")
    values = [np.nan if one.evaluation is None else one.evaluation for one in rounds]
    axes[1, 1].plot(number, [one.guard for one in rounds], "k:", label="guard")
    axes[1, 1].set(title="public evaluation, and the guard", xlabel="update")
    if np.isfinite(values).any():
        other = axes[1, 1].twinx()
        other.plot(number, values, label="evaluation")
        other.set_ylabel("evaluation")
    axes[1, 1].set_ylabel("guard")
    page.savefig(path, dpi=110)
