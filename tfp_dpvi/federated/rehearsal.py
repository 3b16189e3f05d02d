"""`rehearse_study`: what a study will give, from simulated records, before any hospital spends."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras, tf
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.federated.calibrated import StudyPosterior
from tfp_dpvi.federated.hospital import Hospital
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.federated.server import Schedule, Synchronous
from tfp_dpvi.federated.simulation import simulate
from tfp_dpvi.federated.study import Study
from tfp_dpvi.rehearsal.result import Rehearsal
from tfp_dpvi.rehearsal.simulated import Inputs, Subject, subject_of
from tfp_dpvi.rehearsal.store import Row

_LEAST_FITS = 2
_NUM_DRAWS = 4000
_NUM_INPUTS = 2000


def rehearse_study(
    study: Study,
    hospitals: Sequence[tuple[int, float]],
    inputs: Structure | Inputs | None = None,
    *,
    delta: float,
    schedule: Schedule | None = None,
    truth: Any = None,
    effects: Mapping[str, float] | None = None,
    num: int = 20,
    level: float = 0.9,
    seed: int = 0,
    verbose: int = 1,
) -> Rehearsal:
    """Says what a study's calibrated posterior will give: width, bias, coverage, power, warnings.

    Data sets are simulated, divided among hospitals of these sizes, and a whole study is played for
    each, with the noise that hospitals would add. It reads no private record.

    Args:
      study: The study, with its last phase.
      hospitals: For each hospital its number of records and its epsilon.
      inputs: As of `dpvi.rehearse`; None for whole records, and for a study with a schema: invented
        records of it.
      delta: The delta of each epsilon.
      schedule: By default `Synchronous()`.
      truth: As of `dpvi.rehearse`: true shared parameters by name; others are drawn from the prior.
      effects: True standard deviations of the effects by the names of the study's local
        coordinates; those that are not named are drawn from their priors.
      num: The number of data sets.
      level: The probability of the intervals, which are central.
      seed: The seed of data sets and noise.
      verbose: 0 for no progress bar.

    Returns:
      The `Rehearsal`, at the number of all records and the largest epsilon; of the shared
      parameters and, named "sd of b", of the effects' standard deviations.

    Raises:
      ValueError: The study has no last phase, or an argument does not fit.

    ```python
    >>> from tfp_dpvi._tf import tfd
    >>> from tfp_dpvi.optimizers import InformationOptimizer
    >>> study = Study(
    ...     tfd.Normal(0.0, 1.0),
    ...     lambda w, x: tfd.Normal(w * x, 1.0),
    ...     InformationOptimizer(l2_norm_clip=1.0),
    ... )
    >>> rehearse_study(study, [(200, 1.0), (300, 1.0)], np.zeros(9, np.float32), delta=1e-5)
    Traceback (most recent call last):
    ...
    ValueError: study has no last phase to rehearse: nothing says what records are like: pass a
    schema, or an example.

    ```

    #### Formal guarantee

    A function of its arguments, which are public.
    """
    if study.point is None:
        raise ValueError(
            f"study has no last phase to rehearse: {study.not_calibrated.rstrip('.')}."
        )
    if study.max_rows_per_unit is not None:
        raise ValueError("study protects persons of several rows, which are not simulated yet.")
    if study.max_weight is not None:
        raise ValueError(
            "study has survey weights, which are not simulated: rehearse it without max_weight."
        )
    if not hospitals:
        raise ValueError("hospitals is empty: pass (num_records, epsilon) of each.")
    sizes = [check.count("num_records", size, 1) for size, _ in hospitals]
    budgets = [check.epsilon(budget) for _, budget in hospitals]
    num = check.count("num", num, _LEAST_FITS)
    level = check.probability("level", level)
    fits = _Studies(study, study.point.scoring, inputs, truth, effects or {}, level=level)
    schedule = Synchronous() if schedule is None else schedule
    # Simulated records are arrays of the model already, and outcomes may be beyond any bounds.
    study = copy.copy(study)
    study.columns = None
    refiner = Refiner(study)
    bar = keras.utils.Progbar(num, verbose=1 if verbose else 0, unit_name="study")
    rows = []
    for number in range(num):
        drawn = fits.draw(sizes, seed, number)
        taking_part = [
            Hospital(
                study,
                *records,
                name=f"hospital {place}",
                epsilon=budget,
                delta=delta,
                rounds=schedule.rounds,
                seed=int(_words(seed, number, place, 1)[0]),
                refiner=refiner,
                trusts_sum=study.agreed_sum is not None,
            )
            for place, (records, budget) in enumerate(zip(drawn.records, budgets, strict=True))
        ]
        history = simulate(study, taking_part, schedule=schedule, verbose=0, seed=seed + number)
        rows.append(fits.row(drawn.truth, history.calibrated))
        bar.update(number + 1)
    total, largest = sum(sizes), max(budgets)
    return Rehearsal(
        fits.names,
        (total,),
        (largest,),
        check.delta(delta),
        level,
        seed,
        fits.fixed,
        {(total, largest): rows},
    )


def _words(*numbers: int) -> np.ndarray:
    """Returns a seed of TFP for some numbers, int32 [2]."""
    return np.random.default_rng(numbers).integers(2**31, size=2).astype(np.int32)


class _Drawn(NamedTuple):
    """A simulated data set: each hospital's x and y, and the true values, shape [P]."""

    records: list[tuple[Structure, np.ndarray | None]]
    truth: np.ndarray


class _Studies:
    """Simulated data sets of a study, and what its posteriors say of them.

    Args:
      study: The study.
      scoring: Its scores.
      inputs: See `rehearse_study`.
      truth: See `rehearse_study`.
      effects: See `rehearse_study`.
      level: The probability of intervals.

    Attributes:
      names: The names of the numbers that are reported.
      fixed: True values that all data sets have, by name.
    """

    def __init__(
        self,
        study: Study,
        scoring: Scoring,
        inputs: Structure | Inputs | None,
        truth: Any,
        effects: Mapping[str, float],
        *,
        level: float,
    ) -> None:
        self._level, self._local = level, study.local
        self._scoring = scoring
        coordinates = self._scoring.pairing.coordinates
        if inputs is None and study.columns is not None and not study.bayesian_model.generative:
            inputs = study.columns.public_inputs(_NUM_INPUTS)
        names = (coordinates.names, coordinates.sizes)
        self._subject: Subject = subject_of(study.bayesian_model, inputs, None, truth, names)
        local = () if study.local is None else study.local.names
        if unknown := [name for name in effects if name not in local]:
            raise ValueError(
                f"effects names {unknown[0]!a:.99}, which is not local: use "
                f"{', '.join(local) or 'Study(local=)'}."
            )
        self._effects = {name: check.positive(name, value) for name, value in effects.items()}
        self.names = (*self._subject.names, *(f"sd of {name}" for name in local))
        own = {f"sd of {name}": value for name, value in self._effects.items()}
        self.fixed = {**self._subject.fixed, **own}

    def draw(self, sizes: Sequence[int], seed: int, number: int) -> _Drawn:
        """Returns a data set.

        Args:
          sizes: Each hospital's number of records.
          seed: The seed of all data sets.
          number: The number of the data set, from 0.
        """
        subject, coordinates = self._subject, self._scoring.pairing.coordinates
        params = subject.draw(_words(seed, number, 0, 0))
        truth = subject.named(tf.nest.map_structure(lambda part: part[None], params))[0]
        generator = np.random.default_rng([seed, number, 2])
        sds = np.zeros(0)
        if self._local is not None:
            prior = self._local.scales * np.abs(generator.normal(size=len(self._local.scales)))
            named = zip(self._local.names, prior, strict=True)
            sds = np.array([self._effects.get(name, value) for name, value in named])
        records = []
        for place, size in enumerate(sizes):
            flat = coordinates.flatten_one(params)
            if self._local is not None:
                read = self._scoring.pairing.index[self._local.index]
                flat[read] += sds * generator.normal(size=len(sds))
            parts = tf.split(tf.constant(flat, coordinates.dtype), coordinates.sizes)
            words = _words(seed, number, place, 3)
            records.append(self._simulate(coordinates.constrain(parts), size, words))
        return _Drawn(records, np.concatenate([truth, sds]))

    def _simulate(
        self, params: Structure, size: int, words: np.ndarray
    ) -> tuple[Structure, np.ndarray | None]:
        """Returns x and y of a hospital with its own parameters."""
        subject = self._subject
        model, seed = subject.model, tf.constant(words, tf.int32)
        if subject.inputs is None:
            whole = model.distribution_at(params, None).sample(size, seed=seed)
            return tf.nest.map_structure(np.asarray, whole), None
        x = subject.inputs(size, int(words[0]))
        inputs = tf.nest.map_structure(tf.convert_to_tensor, x)
        return x, model.distribution_at(params, inputs).sample(seed=seed).numpy()

    def row(self, truth: np.ndarray, posterior: StudyPosterior | None) -> Row:
        """Returns what a posterior says of each number, JSON-ready.

        Args:
          truth: The true values, shape [P].
          posterior: The posterior, or None if there is none.
        """
        shared = {"truth": truth.tolist(), "outside": 0.0, "doubtful": [], "warnings": []}
        if posterior is None:
            zeros = [0.0] * len(truth)
            figures = dict.fromkeys(("mean", "sd", "low", "high"), zeros)
            return {**shared, **figures, "failed": True}
        drawn = posterior.draws(_NUM_DRAWS)
        draws = np.concatenate(
            [self._subject.named(drawn.parameters), *(sd[:, None] for sd in drawn.sds.values())],
            axis=1,
        )
        tail = (1.0 - self._level) / 2.0
        low, high = np.quantile(draws, [tail, 1.0 - tail], axis=0)
        checks = posterior.calibrated.checks.parameters
        inner = self._subject.inner
        doubtful = np.zeros(len(inner), bool)
        if checks is not None:
            doubtful = np.where(inner >= 0, checks.doubtful[inner], False)
        return {
            **shared,
            "mean": draws.mean(axis=0).tolist(),
            "sd": draws.std(axis=0).tolist(),
            "low": low.tolist(),
            "high": high.tolist(),
            "failed": False,
            "doubtful": np.flatnonzero(doubtful).tolist(),
            "warnings": [sentence.split(" (")[0] for sentence in posterior.warnings],
        }
