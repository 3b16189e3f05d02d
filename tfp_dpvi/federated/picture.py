"""A picture of a study: factors over rounds."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from tfp_dpvi.federated.server import Round

_MOST = 6  # Parameters that are shown.


def draw(rounds: Sequence[Round], path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
    """Draws the posterior and each hospital's factor over updates; see `History.plot`."""
    try:
        from matplotlib import figure
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib.") from error
    if not rounds:
        raise ValueError("rounds is empty: no update of the posterior was made.")
    page = figure.Figure(figsize=(11, 7), layout="constrained")
    parameters, factors, epsilon, evaluation = page.subplots(2, 2).flat
    updates = np.array([one.number for one in rounds])
    means, spreads = (np.array([getattr(one.posterior, each) for one in rounds]) for each in ("mean", "stddev"))
    for at in range(min(_MOST, means.shape[1])):
        label = names[at] if names else f"z[{at}]"
        parameters.errorbar(updates + 0.06 * at, means[:, at], spreads[:, at], label=label, capsize=2)
    for hospital in rounds[-1].factors:
        having = [one for one in rounds if hospital in one.factors]
        found = [one.factors[hospital] for one in having]
        total = [np.trace(factor.precision) if factor.full_rank else factor.precision.sum() for factor in found]
        factors.plot([one.number for one in having], total, label=hospital)
        epsilon.plot(updates, [one.epsilon.get(hospital, 0.0) for one in rounds], label=hospital)
    evaluation.plot(updates, [one.guard for one in rounds], "k:", label="guard")
    if rounds[-1].evaluation is not None:
        evaluation.twinx().plot(updates, [one.evaluation for one in rounds], label="evaluation")
    parameters.set(title="posterior: mean and standard deviation", xlabel="update")
    factors.set(title="total precision of each hospital's factor", xlabel="update")
    epsilon.set(title="epsilon that each hospital states", xlabel="update")
    evaluation.set(title="guard (dotted) and public evaluation", xlabel="update")
    parameters.legend(fontsize="small")
    factors.legend(fontsize="small")
    page.savefig(path, dpi=110)
