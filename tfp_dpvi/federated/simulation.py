"""`simulate`: a whole study in one process."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, keras
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.messages import Task
from tfp_dpvi.federated.on_messages import MessageHospital
from tfp_dpvi.federated.server import Round, Schedule, Server, Synchronous
from tfp_dpvi.federated.study import Study
from tfp_dpvi.privacy import PrivacyReport

Records = tuple[Structure, Structure | None]
_MOST_SHOWN = 6  # Parameters in a picture.


@dataclasses.dataclass(frozen=True)
class History:
    """The result of a study; public, except for the reports, which belong to the hospitals."""

    rounds: list[Round]  # One for each update of the posterior.
    posterior: Factor  # The last; `study.posterior` makes a TFP distribution of it.
    epsilon: dict[str, float]  # Of each hospital, as it states.
    retired: dict[str, str]  # Hospitals that declined, and why.
    refused: list[str]  # Messages that the server refused.
    reports: dict[str, PrivacyReport]  # Of each private hospital.
    caveats: tuple[str, ...] = ()  # What to know about the posterior: `Server.caveats`.

    def plot(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        """Draws the first six parameters, each hospital's factor and epsilon, the guard and the evaluation over updates.

        The caveats, if any, are its title. `names` are those of the parameters. Needs matplotlib;
        raises `ValueError` if the posterior was never updated.
        """
        _draw(self.rounds, path, names, self.caveats)


def hospital_of(
    study: Study, x: Structure, y: Structure | None = None, **settings: Any
) -> Hospital:
    """Returns a hospital with the study's kind of privacy; arguments as of `Hospital`."""
    kind = MessageHospital if study.terms.privacy == "messages" else Hospital
    return kind(study, x, y, **settings)


def simulate(
    study: Study,
    hospitals: Mapping[str, Records | Hospital] | Sequence[Records | Hospital],
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    schedule: Schedule | None = None,
    evaluate: Callable[[Factor], float] | None = None,
    verbose: int = 1,
    seed: int | None = None,
) -> History:
    """Runs a study in this process, to try settings on simulated or public records before hospitals spend anything.

    Args:
      study: the study.
      hospitals: `(x, y)` of each, or a `Hospital` with a budget of its own; by name, or in order.
      epsilon: of each hospital that is given by its records; None where the study's optimizer has no clip, and nothing is private.
      delta: likewise.
      schedule: by default `Synchronous()`: ten rounds, damping 0.2.
      evaluate: posterior factor -> number to show after each update, of public records alone, for instance
        `lambda q: study.mean_log_likelihood(q, x_test, y_test)`.
      verbose: 1 for a progress bar.
      seed: None; or an integer for a repeatable, hence not private, run.
    """
    schedule = Synchronous() if schedule is None else schedule
    if not isinstance(hospitals, Mapping):
        hospitals = {f"hospital {number}": one for number, one in enumerate(hospitals, 1)}
    refiner, made = Refiner(study), {}
    settings = {"epsilon": epsilon, "delta": delta, "rounds": schedule.rounds, "refiner": refiner}
    for number, (name, one) in enumerate(hospitals.items()):
        if isinstance(one, Hospital):
            made[one.name] = one
        else:
            own = None if seed is None else seed + number
            made[name] = hospital_of(study, *one, name=name, seed=own, **settings)
    refine_prior = None if study.normal_prior else study.refine_prior
    server = Server(study.terms, made, schedule, evaluate=evaluate, refine_prior=refine_prior)
    _play(server, made, verbose, np.random.default_rng(seed))
    reports = {name: one.privacy_report() for name, one in made.items() if one.epsilon is not None}
    return History(
        server.history,
        server.posterior,
        server.epsilon,
        server.retired,
        server.refused,
        reports,
        server.caveats,
    )


def _play(
    server: Server, hospitals: dict[str, Hospital], verbose: int, rng: np.random.Generator
) -> None:
    """Runs a study to its end. Asynchronous hospitals take exponential times, each with its own mean."""
    steps, shown_now = server.schedule.rounds * len(hospitals), ["epsilon", "guard", "evaluation"]
    bar = keras.utils.Progbar(steps, verbose=verbose, unit_name="reply", stateful_metrics=shown_now)
    speed = {name: rng.uniform(0.5, 2.0) for name in hospitals}
    under_way: list[Task] = []
    answered = 0
    while not server.finished:
        under_way += server.due()
        at = 0
        if (
            not server.schedule.waits
        ):  # Of exponential times the next to end is each with a probability like its speed.
            speeds = np.array([speed[task.hospital] for task in under_way])
            at = int(rng.choice(len(under_way), p=speeds / speeds.sum()))
        task = under_way.pop(at)
        server.receive(task.hospital, hospitals[task.hospital].answer(task.to_bytes()))
        server.give_up(task.request)  # A refused reply is not repeated here.
        shown = {"epsilon": max(server.epsilon.values(), default=0.0)}
        if server.history:
            last = server.history[-1]
            shown |= {"guard": last.guard} | (
                {} if last.evaluation is None else {"evaluation": last.evaluation}
            )
        answered += 1
        bar.update(answered, shown.items(), finalize=server.finished)


def _draw(
    rounds: Sequence[Round],
    path: str | os.PathLike[str],
    names: Sequence[str] | None,
    caveats: Sequence[str],
) -> None:
    from matplotlib import figure

    if not rounds:
        raise ValueError("rounds is empty: no update of the posterior was made.")
    page = figure.Figure(figsize=(11, 7), layout="constrained")
    parameters, factors, epsilon, evaluation = page.subplots(2, 2).flat
    updates = np.array([one.number for one in rounds])
    means, spreads = (
        np.array([getattr(one.posterior, each) for one in rounds]) for each in ("mean", "stddev")
    )
    for at in range(min(_MOST_SHOWN, means.shape[1])):
        label = names[at] if names else f"z[{at}]"
        parameters.errorbar(
            updates + 0.06 * at, means[:, at], spreads[:, at], label=label, capsize=2
        )
    for hospital in rounds[-1].factors:
        having = [one for one in rounds if hospital in one.factors]
        found = [one.factors[hospital] for one in having]
        total = [
            np.trace(factor.precision) if factor.full_rank else factor.precision.sum()
            for factor in found
        ]
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
    if caveats:
        page.suptitle("\n".join(caveats), fontsize="small", color="firebrick")
    page.savefig(path, dpi=110)
