"""`simulate`: a whole study in one process."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, keras
from tfp_dpvi.federated.aggregation import Aggregation
from tfp_dpvi.federated.calibrated import StudyPosterior
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.messages import Task
from tfp_dpvi.federated.on_messages import MessageHospital
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.server import Round, Schedule, Server, Synchronous
from tfp_dpvi.federated.study import Study
from tfp_dpvi.federated.sums import SiteSums
from tfp_dpvi.privacy import PrivacyReport

_LOG = logging.getLogger("tfp_dpvi")

HospitalRecords = tuple[Structure, Structure | None] | Structure
"""`(x, y)` of a hospital, or `x` alone for a likelihood of whole records."""

_MOST_SHOWN = 6  # Parameters in a picture.


@dataclasses.dataclass(frozen=True)
class History:
    """The result of a study; public, except for the reports, which belong to the hospitals.

    Args:
      rounds: One for each update of the posterior.
      posterior: The last posterior; `study.posterior` makes a TFP distribution of it.
      epsilon: Epsilon that each hospital reports.
      retired: Hospitals that declined, and why.
      refused: Messages that the server refused.
      reports: The report of each private hospital.
      caveats: What to know about the posterior: `Server.caveats`.
      calibrated: The posterior of the last phase, whose spread includes the noise, with its checks;
        None for a study without that phase, or if no hospital gave its sums.
      place: The posterior at whose mean the sums of the last phase are.
      sums: Each hospital's sums; the total alone in a study with a `trusted_sum`.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> from tfp_dpvi.optimizers import DPKerasSGDOptimizer
    >>> study = Study(
    ...     tfd.Normal(0.0, 2.0),
    ...     lambda mean: tfd.Normal(mean, 1.0),
    ...     DPKerasSGDOptimizer(l2_norm_clip=1.0, learning_rate=0.1),
    ...     local_steps=2,
    ... )
    >>> records = {name: (np.zeros(20, np.float32), None) for name in ("berlin", "munich")}
    >>> one_round = Synchronous(rounds=1)
    >>> history = simulate(study, records, epsilon=1.0, schedule=one_round, verbose=0)
    >>> sorted(history.reports), history.refused
    (['berlin', 'munich'], [])

    ```
    """

    rounds: list[Round]
    posterior: Factor
    epsilon: dict[str, float]
    retired: dict[str, str]
    refused: list[str]
    reports: dict[str, PrivacyReport]
    caveats: tuple[str, ...] = ()
    calibrated: StudyPosterior | None = None
    place: Factor | None = None
    sums: dict[str, SiteSums] = dataclasses.field(default_factory=dict)

    def plot(self, path: str | os.PathLike[str], names: Sequence[str] | None = None) -> None:
        """Draws parameters, factors, epsilon, the guard and the evaluation over updates.

        It shows the first six parameters. The caveats, if any, are its title. Needs matplotlib.

        Args:
          path: Path of the picture.
          names: Names of the parameters.

        Raises:
          ValueError: The posterior was never updated.
        """
        _draw(self.rounds, path, names, self.caveats)


def hospital_of(
    study: Study, x: Structure, y: Structure | None = None, **settings: Any
) -> Hospital:
    """Returns a hospital with the study's kind of privacy.

    Args:
      study: The study.
      x: Records in memory.
      y: Their outcomes; None for a likelihood of whole records.
      **settings: Other arguments of `Hospital`.
    """
    kind = MessageHospital if study.terms.privacy == "messages" else Hospital
    return kind(study, x, y, **settings)


def simulate(
    study: Study,
    hospitals: Mapping[str, HospitalRecords | Hospital] | Sequence[HospitalRecords | Hospital],
    *,
    epsilon: float | None = None,
    delta: float = 1e-5,
    schedule: Schedule | None = None,
    evaluate: Callable[[Factor], float] | None = None,
    verbose: int = 1,
    seed: int | None = None,
) -> History:
    """Runs a study in this process.

    It tries settings on simulated or public records before hospitals spend anything.

    Args:
      study: The study.
      hospitals: `(x, y)`, `(x, y, weights)` or a table of each, or a `Hospital` with a budget of
        its own; by name, or in order.
      epsilon: Epsilon of each hospital that is given by its records; None where the study's
        optimizer has no clip, and nothing is private.
      delta: Delta of that epsilon.
      schedule: By default `Synchronous()`.
      evaluate: Maps a posterior factor to a number that is shown after each update, from public
        records alone, for instance `lambda q: study.mean_log_likelihood(q, x_test, y_test)`.
      verbose: 1 for a progress bar.
      seed: None; or an integer for a repeatable, hence not private, run.

    Returns:
      The history.
    """
    schedule = Synchronous() if schedule is None else schedule
    if not isinstance(hospitals, Mapping):
        hospitals = {f"hospital {number}": part for number, part in enumerate(hospitals, 1)}
    settings = {
        "epsilon": epsilon,
        "delta": delta,
        "rounds": schedule.rounds,
        "refiner": Refiner(study),
        "trusts_sum": study.agreed_sum is not None,
    }
    taking_part: dict[str, Hospital] = {}
    for number, (name, part) in enumerate(hospitals.items()):
        if isinstance(part, Hospital):
            taking_part[part.name] = part
        else:
            own = None if seed is None else seed + number
            # A table of whole records comes alone.
            records = part if isinstance(part, tuple | list) else (part,)
            named = dict(zip(("x", "y", "weights"), records, strict=False))
            taking_part[name] = hospital_of(study, **named, name=name, seed=own, **settings)
    refine_prior = None if study.normal_prior else study.refine_prior
    server = Server(
        study.terms, taking_part, schedule, evaluate=evaluate, refine_prior=refine_prior
    )
    _play(server, taking_part, verbose, np.random.default_rng(seed))
    released = server if study.agreed_sum is None else _aggregate(server, taking_part)
    calibrated = study.calibrated_posterior(released) if released.sums else None
    return History(
        rounds=server.history,
        posterior=server.posterior,
        epsilon=server.epsilon | released.epsilon,
        retired=server.retired,
        refused=server.refused,
        reports={
            name: hospital.privacy_report()
            for name, hospital in taking_part.items()
            if hospital.epsilon is not None
        },
        caveats=server.caveats,
        calibrated=calibrated,
        place=released.place,
        sums=dict(released.sums),
    )


def _aggregate(server: Server, hospitals: dict[str, Hospital]) -> Aggregation:
    """Returns the total of the hospitals' sums, or none if too few of them gave theirs."""
    aggregation = Aggregation(server.terms, server.posterior, hospitals)
    for task in aggregation.due():
        reply = hospitals[task.hospital].answer_sum(task.to_bytes())
        aggregation.receive(task.hospital, reply)
    try:
        aggregation.total()
    except ValueError as error:
        _LOG.warning("There is no calibrated posterior: %s", error)
    return aggregation


def _play(
    server: Server, hospitals: dict[str, Hospital], verbose: int, rng: np.random.Generator
) -> None:
    """Runs a study to its end.

    Asynchronous hospitals take exponential times, each with its own mean.
    """
    has_last = bool(server.terms.sums) and server.terms.agreed_sum is None
    num_asked = server.schedule.rounds + has_last
    steps, shown_now = num_asked * len(hospitals), ["epsilon", "guard", "evaluation"]
    bar = keras.utils.Progbar(steps, verbose=verbose, unit_name="reply", stateful_metrics=shown_now)
    speed = {name: rng.uniform(0.5, 2.0) for name in hospitals}
    under_way: list[Task] = []
    answered = 0
    while not server.finished:
        under_way += server.due()
        at = 0
        # Of exponential times, the next to end is each with a probability like its speed.
        if not server.schedule.waits:
            speeds = np.array([speed[task.hospital] for task in under_way])
            at = int(rng.choice(len(under_way), p=speeds / speeds.sum()))
        task = under_way.pop(at)
        server.receive(task.hospital, hospitals[task.hospital].answer(task.to_bytes()))
        server.give_up(task.request)  # A refused reply is not repeated here.
        shown = {"epsilon": max(server.epsilon.values(), default=0.0)}
        if server.history:
            last = server.history[-1]
            shown["guard"] = last.guard
            if last.evaluation is not None:
                shown["evaluation"] = last.evaluation
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
    upper, lower = page.subplots(2, 2)
    parameters, factors = upper
    epsilon, evaluation = lower
    updates = np.array([update.number for update in rounds])
    means = np.array([update.posterior.mean for update in rounds])
    stddevs = np.array([update.posterior.stddev for update in rounds])
    for at in range(min(_MOST_SHOWN, means.shape[1])):
        label = names[at] if names else f"z[{at}]"
        parameters.errorbar(
            updates + 0.06 * at, means[:, at], stddevs[:, at], label=label, capsize=2
        )
    for hospital in rounds[-1].factors:
        joined = [update for update in rounds if hospital in update.factors]
        total = [_total_precision(update.factors[hospital]) for update in joined]
        factors.plot([update.number for update in joined], total, label=hospital)
        spent = [update.epsilon.get(hospital, 0.0) for update in rounds]
        epsilon.plot(updates, spent, label=hospital)
    evaluation.plot(updates, [update.guard for update in rounds], "k:", label="guard")
    if rounds[-1].evaluation is not None:
        values = [update.evaluation for update in rounds]
        evaluation.twinx().plot(updates, values, label="evaluation")
    parameters.set(title="posterior: mean and standard deviation", xlabel="update")
    factors.set(title="total precision of each hospital's factor", xlabel="update")
    epsilon.set(title="epsilon that each hospital reports", xlabel="update")
    evaluation.set(title="guard (dotted) and public evaluation", xlabel="update")
    parameters.legend(fontsize="small")
    factors.legend(fontsize="small")
    if caveats:
        page.suptitle("\n".join(caveats), fontsize="small", color="firebrick")
    page.savefig(path, dpi=110)


def _total_precision(factor: Factor) -> float:
    return float(np.trace(factor.precision) if factor.full_rank else factor.precision.sum())
