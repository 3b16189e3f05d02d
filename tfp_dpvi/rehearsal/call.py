"""`rehearse`: private fits of simulated data sets, before a fit of private ones."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras, tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.models import DPVI
from tfp_dpvi.optimizers import ScoringOptimizer
from tfp_dpvi.privacy import NeighboringRelation
from tfp_dpvi.rehearsal.replicates import Method, Replicate, Replicates, centred
from tfp_dpvi.rehearsal.result import Rehearsal
from tfp_dpvi.rehearsal.simulated import Inputs, Subject, subject_of
from tfp_dpvi.rehearsal.store import Row, Store, check_folder

_NUM_DRAWS = 4000
# Fits of one size from which on XLA saves more time than it takes.
_WORTH_XLA = 50
_LEAST_FITS = 2
_DIGEST_RECORDS = 64


def rehearse(
    model: DPVI,
    inputs: Structure | Inputs | None = None,
    *,
    num_records: int | Sequence[int],
    epsilon: float | Sequence[float],
    delta: float,
    truth: Any = None,
    num: int = 100,
    public_inputs: Structure | None = None,
    level: float = 0.9,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    verbose: int = 1,
) -> Rehearsal:
    """Says what private fits of a model will give: width, bias, coverage, power and warnings.

    Data sets are simulated from the prior, or from given true parameters, and each is fitted as
    `compile(epsilon=, delta=)` and `fit` would fit it, with the noise that they would add. It reads
    no private record, and costs no privacy. The model is not changed.

    A rehearsal knows what it is given: private inputs that are unlike `inputs`, or a likelihood
    that is wrong, give other intervals. A fit's own warnings say so.

    Args:
      model: The model; compiled or not, but not with an optimizer.
      inputs: Public or invented inputs like the private ones, a structure of arrays whose rows are
        drawn with replacement; or a function `inputs(num, seed)` that returns such arrays, for
        instance from `Schema.simulate`. None for a model of whole records.
      num_records: The number of records of the planned fit, or several of them.
      epsilon: The budget of the fit, or several of them.
      delta: Its delta.
      truth: True parameters by name, such as {"w[0]": 0.3} or {"w": [0.3, 0.0]}: the effect whose
        power is asked for. What is not named is drawn from the prior, for each data set anew.
      num: The number of data sets for each number of records and epsilon; the same data sets and
        noise serve all epsilons.
      public_inputs: What `fit` will be given as `public_inputs`.
      level: The probability of the intervals, which are central.
      seed: The seed of data sets and noise.
      path: A file for the results of each fit. If it exists, only what it lacks is run: a
        rehearsal that was interrupted goes on, and one with more data sets adds to it.
      verbose: 0 for no progress bar.

    Returns:
      The `Rehearsal`: its table, curves and picture.

    Raises:
      ValueError: An argument does not fit, or the file is of another rehearsal.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> from tfp_dpvi._tf import tf, tfd
    >>> model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
    >>> dpvi.rehearse(model, num_records=500, epsilon=1.0, delta=1e-5)
    Traceback (most recent call last):
    ...
    ValueError: inputs are missing: pass public or invented inputs, or inputs(num, seed).

    ```

    #### Formal guarantee

    A function of its arguments, which are public.
    """
    if not isinstance(model, DPVI):
        raise TypeError(
            f"model={check.shown(model)} is no DPVI: build one, or rehearse_regression."
        )
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and not isinstance(optimizer, ScoringOptimizer):
        raise ValueError(
            "model was compiled with an optimizer, whose fits are not rehearsed: leave it out of "
            "compile, or see dpvi.pilot."
        )
    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if model.privacy_target is not None:
        relation = model.privacy_target.neighboring_relation
    coordinates = Coordinates(model.prior, log_scales=True)
    subject = subject_of(
        model.bayesian_model,
        inputs,
        public_inputs,
        truth,
        (coordinates.names, coordinates.sizes),
    )
    plan = RehearsalPlan.checked(
        num_records, epsilon, delta, num=num, level=level, seed=seed, relation=relation
    )
    return run(subject, plan, path, verbose)


@dataclasses.dataclass(frozen=True)
class RehearsalPlan:
    """The settings of a rehearsal, checked.

    Attributes:
      num_records: Numbers of records, increasing.
      epsilon: Epsilons, increasing.
      delta: The delta of all fits.
      num: The number of data sets.
      level: The probability of intervals.
      seed: The seed.
      relation: The neighboring relation.
    """

    num_records: tuple[int, ...]
    epsilon: tuple[float, ...]
    delta: float
    num: int
    level: float
    seed: int
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE

    @classmethod
    def checked(
        cls,
        num_records: int | Sequence[int],
        epsilon: float | Sequence[float],
        delta: float,
        *,
        num: int,
        level: float,
        seed: int,
        relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE,
    ) -> RehearsalPlan:
        """Returns the settings.

        Args:
          num_records: One or several numbers of records.
          epsilon: One or several epsilons.
          delta: The delta.
          num: The number of data sets.
          level: The probability of intervals.
          seed: The seed.
          relation: The neighboring relation.

        Raises:
          TypeError, ValueError: A setting is out of its range.
        """
        sizes = [*num_records] if isinstance(num_records, Iterable) else [num_records]
        budgets = [*epsilon] if isinstance(epsilon, Iterable) else [epsilon]
        if not sizes or not budgets:
            raise ValueError("num_records and epsilon must have at least one number each.")
        level = check.probability("level", level)
        if level == 1.0:
            raise ValueError("level=1.0 has no finite interval: pass, for example, 0.9.")
        return cls(
            num_records=tuple(sorted({check.count("num_records", size, 1) for size in sizes})),
            epsilon=tuple(sorted({check.epsilon(budget) for budget in budgets})),
            delta=check.delta(delta),
            num=check.count("num", num, _LEAST_FITS),
            level=level,
            seed=check.count("seed", seed),
            relation=relation,
        )


def run(
    subject: Subject, plan: RehearsalPlan, path: str | os.PathLike[str] | None, verbose: int
) -> Rehearsal:
    """Runs the fits that a file lacks, and returns the rehearsal.

    Args:
      subject: What is rehearsed.
      plan: The settings.
      path: The file, or None.
      verbose: 0 for no progress bar.

    Raises:
      ValueError: The file is of another rehearsal, or the model cannot be fitted.
    """
    check_folder(path)
    store = Store(path, _header(subject, plan))
    cells = [(size, epsilon) for size in plan.num_records for epsilon in plan.epsilon]
    missing = {
        cell: [number for number in range(plan.num) if store.get(*cell, number) is None]
        for cell in cells
    }
    total = len(cells) * plan.num
    done = total - sum(map(len, missing.values()))
    bar = keras.utils.Progbar(total, verbose=1 if verbose else 0, unit_name="fit")
    try:
        for size in plan.num_records:
            own = {epsilon: set(missing[size, epsilon]) for epsilon in plan.epsilon}
            if not any(own.values()):
                continue
            fits = _Fits(subject, plan, size)
            for number in range(plan.num):
                wanted = [epsilon for epsilon in plan.epsilon if number in own[epsilon]]
                for epsilon, row in fits.rows(number, wanted):
                    store.add(size, epsilon, number, row)
                    done += 1
                    bar.update(done)
    finally:
        store.write()
    rows = {cell: store.rows(*cell, plan.num) for cell in cells}
    return Rehearsal(
        subject.names,
        plan.num_records,
        plan.epsilon,
        plan.delta,
        plan.level,
        plan.seed,
        dict(subject.fixed),
        rows,
    )


class _Fits:
    """Fits of data sets with one number of records, by one compiled step.

    Args:
      subject: What is rehearsed.
      plan: The settings.
      num_records: The number of records.
    """

    def __init__(self, subject: Subject, plan: RehearsalPlan, num_records: int) -> None:
        self._subject = subject
        self._plan = plan
        self._num_records = num_records
        like = subject.simulate(num_records, plan.seed, 0)
        self._method: Method = centred(
            subject.model.prior,
            subject.model.likelihood,
            like.x,
            like.y,
            subject.public_inputs,
            epsilon=plan.epsilon[0],
            delta=plan.delta,
            neighboring_relation=plan.relation,
        )
        num = plan.num * len(plan.epsilon)
        self._fits = Replicates(self._method, num_draws=_NUM_DRAWS, use_xla=num >= _WORTH_XLA)
        self._mechanisms = {
            epsilon: self._method.priced(
                epsilon, plan.delta, subject.ledger(num_records, epsilon, plan.delta)
            )
            for epsilon in plan.epsilon
        }

    def rows(self, number: int, epsilons: list[float]) -> Iterator[tuple[float, Row]]:
        """Yields the rows of a data set, with the same noise for each epsilon but for its size.

        Args:
          number: The number of the data set.
          epsilons: The epsilons.
        """
        if not epsilons:
            return
        data = self._subject.simulate(self._num_records, self._plan.seed, number)
        words = (self._plan.seed, number, self._num_records, 3)
        seed = int(np.random.default_rng(words).integers(2**31))
        for epsilon in epsilons:
            fit = self._fits.fit(data.x, data.y, seed, self._mechanisms[epsilon])
            row = {
                "truth": data.truth.tolist(),
                "outside": data.outside,
                **self._figures(fit),
            }
            yield epsilon, row

    def _figures(self, fit: Replicate) -> Row:
        """Returns what a fit says of each number, JSON-ready."""
        draws = self._in_units(fit.draws)
        tail = (1.0 - self._plan.level) / 2.0
        low, high = np.quantile(draws, [tail, 1.0 - tail], axis=0)
        figures = {"mean": draws.mean(axis=0), "sd": draws.std(axis=0), "low": low, "high": high}
        failed = fit.calibrated is None or not all(
            np.isfinite(part).all() for part in figures.values()
        )
        row: Row = {name: part.tolist() for name, part in figures.items()}
        if failed:
            row = {name: [0.0] * len(self._subject.names) for name in figures}
        doubtful = np.zeros(len(self._subject.names), bool)
        checks = None if fit.calibrated is None else fit.calibrated.checks
        if checks is not None and checks.parameters is not None:
            inner = self._subject.inner
            doubtful = np.where(inner >= 0, checks.parameters.doubtful[inner], False)
        names = () if checks is None or checks.parameters is None else checks.parameters.names
        known = (*names, *self._subject.names)
        sentences = [_stem(self._subject.in_words(each), known) for each in fit.warnings]
        return {
            **row,
            "failed": bool(failed),
            "doubtful": np.flatnonzero(doubtful).tolist(),
            "warnings": sentences,
            "seconds": round(fit.seconds, 3),
        }

    def _in_units(self, draws: np.ndarray) -> np.ndarray:
        """Returns draws of the reported numbers [S, P], from draws of coordinates."""
        coordinates = self._fits.coordinates
        parts = tf.split(tf.constant(draws, coordinates.dtype), coordinates.sizes, axis=-1)
        return self._subject.named(coordinates.constrain(parts))


def _stem(sentence: str, names: Sequence[str]) -> str:
    """Returns a warning without its numbers, remedy and parameters, to be counted."""
    stem = re.split(r" \(|[:;]", sentence)[0]
    for name in sorted(names, key=len, reverse=True):
        stem = re.sub(rf"(?<!\w){re.escape(name)}(?![\w\[])", "a parameter", stem)
    stem = re.sub(r"(a parameter, )+(a parameter|\d+ more)", "a parameter", stem)
    return re.sub(r"(up to )?\d[\d.,]*", "some", stem)


def _header(subject: Subject, plan: RehearsalPlan) -> dict[str, Any]:
    """Returns what all fits of a file have in common, JSON-ready."""
    return {
        "tensorflow": tf.__version__,
        "seed": plan.seed,
        "delta": plan.delta,
        "level": plan.level,
        "neighboring_relation": plan.relation.name.lower(),
        "names": list(subject.names),
        "truth": dict(subject.fixed),
        "model, inputs or bounds": _digest(subject, plan),
    }


def _digest(subject: Subject, plan: RehearsalPlan) -> str:
    """Returns a digest of what a model simulates, and of its public inputs."""
    data = subject.simulate(_DIGEST_RECORDS, plan.seed, 0)
    prior = Coordinates(subject.model.prior).prior_draws(8)
    digest = hashlib.sha256()
    for part in tf.nest.flatten((data.x, data.y, data.truth, prior, subject.public_inputs)):
        if part is not None:
            array = np.asarray(part)
            kept = np.round(array, 4) if array.dtype.kind == "f" else array
            digest.update(f"{kept.shape} {kept.tolist()}".encode())
    digest.update(f"{subject.bounds} {subject.clips}".encode())
    return digest.hexdigest()[:32]
