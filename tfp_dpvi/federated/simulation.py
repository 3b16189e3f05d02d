"""`simulate`: a whole study in one process."""

from __future__ import annotations

import dataclasses
import heapq
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, keras
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.local import Refiner
from tfp_dpvi.federated.on_messages import MessageHospital
from tfp_dpvi.federated.picture import draw
from tfp_dpvi.federated.schedules import Asynchronous, Schedule, Synchronous
from tfp_dpvi.federated.server import Round, Server
from tfp_dpvi.federated.study import Study
from tfp_dpvi.privacy import PrivacyReport

Records = tuple[Structure, Structure | None]


@dataclasses.dataclass(frozen=True)
class History:
    """The result of a study; public, except for the reports, which belong to the hospitals.

    Attributes:
      rounds: one entry for each update of the posterior.
      posterior: the last one's factor; `study.posterior` makes a TFP distribution of it.
      epsilon: what each hospital states to have spent.
      retired: hospitals that declined, and why.
      refused: messages that the server refused.
      reports: a privacy report for each private hospital.
    """

    rounds: list[Round]
    posterior: Factor
    epsilon: dict[str, float]
    retired: dict[str, str]
    refused: list[str]
    reports: dict[str, PrivacyReport]

    def plot(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        """Draws the factors over rounds, the guard, epsilon and the public evaluation; needs matplotlib.

        Args:
          path: of the picture.
          names: of the parameters.
        """
        draw(self.rounds, path, names)


def hospital_of(study: Study, x: Structure, y: Structure | None = None, **settings: Any) -> Hospital:
    """Returns a hospital of the study's way of privacy; arguments as of `Hospital`."""
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

    Returns:
      A `History`.
    """
    schedule = Synchronous() if schedule is None else schedule
    named = (
        hospitals if isinstance(hospitals, Mapping) else {f"hospital {n + 1}": one for n, one in enumerate(hospitals)}
    )
    refiner, made = Refiner(study, seed), {}
    for name, one in named.items():
        if isinstance(one, Hospital):
            made[one.name] = one
        else:
            settings = {"epsilon": epsilon, "delta": delta, "rounds": schedule.rounds, "refiner": refiner, "seed": seed}
            made[name] = hospital_of(study, *one, name=name, **settings)
    refine_prior = None if study.normal_prior else study.refine_prior
    server = Server(study.terms, made, schedule, evaluate=evaluate, refine_prior=refine_prior)
    _play(server, made, _bar(schedule, len(made), verbose), np.random.default_rng(seed))
    reports = {name: one.privacy_report() for name, one in made.items() if one.epsilon is not None}
    return History(server.history, server.posterior, server.epsilon, server.retired, server.refused, reports)


def _play(
    server: Server, hospitals: dict[str, Hospital], show: Callable[[Server], None], rng: np.random.Generator
) -> None:
    """Runs a study to its end. Asynchronous hospitals take random times, each about its own mean."""
    together = not isinstance(server.schedule, Asynchronous)
    pace = {name: rng.uniform(0.5, 2.0) for name in hospitals}
    under_way: list[tuple[float, int, str, bytes, str]] = []
    clock, count = 0.0, 0
    while not server.finished:
        for task in server.due():
            takes = 0.0 if together else pace[task.hospital] * rng.exponential()
            heapq.heappush(under_way, (clock + takes, count, task.hospital, task.to_bytes(), task.request))
            count += 1
        clock, _, name, message, request = heapq.heappop(under_way)
        server.receive(name, hospitals[name].answer(message))
        server.give_up(request)  # If it was refused: nobody answers twice here.
        show(server)


def _bar(schedule: Schedule, num_hospitals: int, verbose: int) -> Callable[[Server], None]:
    if not verbose:
        return lambda server: None
    bar = keras.utils.Progbar(
        schedule.rounds * num_hospitals, unit_name="reply", stateful_metrics=["epsilon", "evaluation", "guard"]
    )
    done = [0]

    def show(server: Server) -> None:
        done[0] += 1
        shown = [("epsilon", max(server.epsilon.values(), default=0.0))]
        if server.history:
            last = server.history[-1]
            shown.append(("guard", last.guard))
            shown += [] if last.evaluation is None else [("evaluation", last.evaluation)]
        bar.update(done[0], shown, finalize=server.finished)

    return show
