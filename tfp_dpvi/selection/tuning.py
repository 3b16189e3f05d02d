"""`tune`: one of several models, chosen by a random number of private trials that are paid for."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import random
from collections.abc import Iterator, Mapping

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.calibrated.centred_fit import CentredFit
from tfp_dpvi.data.shapes import input_specs
from tfp_dpvi.models import DPVI
from tfp_dpvi.privacy import (
    FullBatch,
    NeighboringRelation,
    PrivacyLedger,
    PrivacyPlan,
    RandomTrials,
)
from tfp_dpvi.privacy.accountants import Releases
from tfp_dpvi.selection.scores import (
    checked_range,
    contributions,
    log_scores,
    noisy_sum,
    records_of,
    refuse_fixed_budget,
)

LOG = logging.getLogger("tfp_dpvi")
# Of a trial's Gaussian precision, the part of its score.
_SHARE_OF_SCORE = 0.1
_ACCOUNTANT = "rdp"


@dataclasses.dataclass(frozen=True, eq=False)
class Tuned:
    """The model that `tune` chose, as its own trial fitted it.

    Attributes:
      name: Its name.
      model: The model with the posterior of its trial. Its ledger is that of the tuning, and so is
        its privacy report.
      score: Its released mean log score in nats, which is the largest of several noisy ones and
        hence too large.
      noise_sd: The standard deviation of the noise on it.

    ```python
    >>> Tuned("narrow", None, -0.61, 0.02).name
    'narrow'

    ```
    """

    name: str
    model: DPVI
    score: float
    noise_sd: float

    @property
    def posterior(self) -> tfd.Distribution:
        """The posterior of the chosen model."""
        return self.model.posterior


def tune(
    models: Mapping[str, DPVI],
    x: Structure,
    y: Structure | None = None,
    *,
    score_range: tuple[float, float],
    epsilon: float,
    delta: float,
    mean_trials: float = 8.0,
    ledger: PrivacyLedger | None = None,
    public_inputs: Structure | None = None,
    num_records: int | None = None,
    neighboring_relation: str = "add_or_remove_one",
    seed: int | None = None,
) -> Tuned:
    """Chooses one of several models by private trials, and charges the ledger for the choice.

    A trial picks a model at random, fits it privately and releases a mean log score. After each
    trial it stops with probability 1 / `mean_trials`. Only the trial with the largest score is
    shown: neither the others nor their number, which no log or progress bar may tell. A model that
    cannot be fitted is never chosen, and not named either. First ask a rehearsal, which costs
    nothing: see `rehearse`.

    Args:
      models: Models that are neither compiled nor fitted, by name: the candidates.
      x: The private records, or their inputs, as for `fit`.
      y: The outcomes, or None for models of whole records.
      score_range: A public range of a record's log score, to which scores are clipped.
      epsilon: The privacy loss of all releases on the ledger after this call.
      delta: Its delta.
      mean_trials: The mean number of trials, at least 1: a few times the number of models.
      ledger: A `PrivacyLedger`; by default one in memory.
      public_inputs: As in `DPVI.fit`, for all models.
      num_records: The public number of records; by default the exact one is taken as public.
      neighboring_relation: As in `DPModel.compile`.
      seed: Makes the choice repeatable, and the result *not private*.

    Returns:
      The `Tuned` model.

    Raises:
      ValueError: An argument does not fit, or the ledger has a budget that is for settings fixed in
        advance; no privacy was spent.
      BudgetExhaustedError: The budget does not allow it; no privacy was spent.
      RuntimeError: Every trial failed; the privacy is spent.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> dpvi.tune({}, [0.0], score_range=(-5.0, 0.0), epsilon=1.0, delta=1e-5)
    Traceback (most recent call last):
    ...
    ValueError: models must be a dict of at least one model, such as {"narrow": a, "wide": b}.

    ```

    #### Formal guarantee

    `RandomTrials`: each trial is a Gaussian mechanism with the noise multiplier of the plan, a fit
    and its score composed, whatever model it picks. The ledger is charged before the first trial.
    Not covered: how long the call takes, which shows about how many trials there were, and that
    values outside of a likelihood's support are refused, as in `fit`.
    """
    candidates = _checked(models)
    relation = check.relation(neighboring_relation)
    ledger = ledger or PrivacyLedger()
    if not isinstance(ledger, PrivacyLedger):
        raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
    refuse_fixed_budget(ledger, "tune")
    score_range = checked_range(score_range)
    inputs, num = _check_records(candidates, x, y, num_records, public_inputs)
    plan = PrivacyPlan.calibrate(
        epsilon=epsilon,
        delta=delta,
        prior_events=ledger.events(),
        sampling=RandomTrials(mean_trials),
        num_releases=1,
        neighboring_relation=relation,
        accountant=_ACCOUNTANT,
        num_records=num,
        purpose=f"the best of random fits of {len(candidates)} models, by mean log score",
        randomness="secure" if seed is None else "",
    )
    generator = random.SystemRandom() if seed is None else random.Random(seed)
    trials = _Trials(candidates, (x, y), plan, score_range, delta, public_inputs, num_records, seed)
    best: Tuned | None = None
    with ledger.reserved(plan, seeded=seed is not None, budgets=[(epsilon, delta)]), _silent():
        for number in range(num_trials(mean_trials, generator)):
            tried = trials.run(generator.choice([*candidates]), number)
            if tried is not None and (best is None or tried.score > best.score):
                best = tried
    if best is None:
        raise RuntimeError(
            "tune: every trial failed to fit, and the privacy is spent: check the models with a "
            "rehearsal."
        )
    # A trial's own ledger has its part alone, which would understate what was spent.
    model = _charged_to(ledger, best.model, plan, (epsilon, delta))
    model.record_release(plan, inputs, num, declared=num_records is not None)
    return dataclasses.replace(best, model=model)


def _charged_to(
    ledger: PrivacyLedger,
    fitted: DPVI,
    plan: PrivacyPlan,
    budget: tuple[float, float],
) -> DPVI:
    """Returns a model with the posterior of a fitted one, and with the ledger of the tuning.

    Args:
      ledger: The ledger.
      fitted: The fitted model.
      plan: The plan of the tuning.
      budget: Its epsilon and delta.
    """
    model = DPVI(fitted.prior, fitted.likelihood, num_predictive_draws=fitted.num_predictive_draws)
    epsilon, delta = budget
    model.compile(
        epsilon=epsilon,
        delta=delta,
        ledger=ledger,
        neighboring_relation=plan.neighboring_relation,
        accountant=_ACCOUNTANT,
    )
    store: dict[str, np.ndarray] = {}
    fitted.save_own_variables(store)
    model.load_own_variables({name: np.asarray(values) for name, values in store.items()})
    return model


def num_trials(mean: float, generator: random.Random) -> int:
    """Returns a geometric number of trials, at least 1.

    Args:
      mean: Its mean.
      generator: The source of the number, which no record determines.
    """
    number = 1
    while generator.random() >= 1.0 / mean:
        number += 1
    return number


@dataclasses.dataclass(frozen=True, eq=False)
class _Trials:
    """Private trials: each is one Gaussian mechanism of the plan's noise multiplier.

    Attributes:
      models: The candidates.
      records: The private x and y.
      plan: The plan of the tuning.
      score_range: The range of log scores.
      delta: The delta.
      public_inputs: As in `tune`.
      num_records: As in `tune`.
      seed: As in `tune`.
    """

    models: Mapping[str, DPVI]
    records: tuple[Structure, Structure | None]
    plan: PrivacyPlan
    score_range: tuple[float, float]
    delta: float
    public_inputs: Structure | None
    num_records: int | None
    seed: int | None

    @property
    def _multiplier(self) -> float:
        """Returns the standard deviation of a trial's noise over its sensitivity."""
        ((*_, multiplier),) = Releases(self.plan.dp_event).selected
        return multiplier

    @property
    def fit_multiplier(self) -> float:
        """The noise multiplier of the Gaussian mechanism that all steps of a fit are."""
        return self._multiplier / math.sqrt(1.0 - _SHARE_OF_SCORE)

    @property
    def score_multiplier(self) -> float:
        """The noise multiplier of the Gaussian mechanism that the score is."""
        return self._multiplier / math.sqrt(_SHARE_OF_SCORE)

    def run(self, name: str, number: int) -> Tuned | None:
        """Returns a fit with its score; None if it failed, which then cannot be chosen.

        Args:
          name: The name of a candidate.
          number: The number of the trial, which its seed depends on if there is one.
        """
        x, y = self.records
        source = self.models[name]
        seed = None if self.seed is None else 1000 * self.seed + number
        model = DPVI(
            source.prior,
            source.likelihood,
            num_predictive_draws=source.num_predictive_draws,
            seed=seed,
        )
        relation = self.plan.neighboring_relation
        budget = PrivacyPlan(
            FullBatch(),
            self.fit_multiplier,
            1,
            neighboring_relation=relation,
            accountant=_ACCOUNTANT,
        ).epsilon(self.delta)
        model.compile(
            epsilon=budget,
            delta=self.delta,
            neighboring_relation=relation,
            accountant=_ACCOUNTANT,
        )
        try:
            model.fit(
                x,
                y,
                public_inputs=self.public_inputs,
                num_records=self.num_records,
                verbose=0,
            )
        except (ValueError, RuntimeError, ArithmeticError, tf.errors.OpError):
            return None
        _check_spent(model.privacy_ledger, self.fit_multiplier, relation)
        score, noise_sd = self._score(model, number)
        return Tuned(name, model, score, noise_sd)

    def _score(self, model: DPVI, number: int) -> tuple[float, float]:
        """Returns a noisy mean log score, and the standard deviation of its noise."""
        low, high = self.score_range
        x, y = self.records
        rows = contributions(log_scores([model], x, y), self.score_range, high - low)
        key = _random.noise_key(1, self.seed, number)
        (total,) = noisy_sum(rows, self.score_multiplier, key)
        num = self.plan.num_records or len(rows)
        half = (high - low) / 2.0
        return low + half * (float(total) / num + 1.0), half * self.score_multiplier / num


def _check_spent(ledger: PrivacyLedger, multiplier: float, relation: NeighboringRelation) -> None:
    """Raises `AssertionError` if a fit released more than its part of a trial."""
    spent = Releases(ledger.dp_event)
    is_gaussian = spent.private and not (spent.poisson or spent.fixed_size or spent.selected)
    if not is_gaussian or spent.full_multiplier < multiplier * (1.0 - 1e-9):
        raise AssertionError(f"a trial's fit is not what was charged for under {relation.name}")


def _checked(models: Mapping[str, DPVI]) -> dict[str, DPVI]:
    """Returns the candidates, after checks of them."""
    are_models = isinstance(models, Mapping) and all(
        isinstance(model, DPVI) for model in models.values()
    )
    if not are_models or not models:
        raise ValueError(
            'models must be a dict of at least one model, such as {"narrow": a, "wide": b}.'
        )
    for name, model in models.items():
        check.text("models", name, "use names that reveal nothing")
        if model.num_releases or getattr(model, "optimizer", None) is not None:
            raise ValueError(
                f"models[{name!r}] is compiled or fitted: pass a new one, which tune compiles."
            )
    return dict(models)


def _check_records(
    models: Mapping[str, DPVI],
    x: Structure,
    y: Structure | None,
    num_records: int | None,
    public_inputs: Structure | None,
) -> tuple[dict[str, Structure], int]:
    """Returns the records' specs and public number, after each model has checked them."""
    inputs: dict[str, Structure] = {}
    num = 0
    for source in models.values():
        model = DPVI(source.prior, source.likelihood)
        model.compile(epsilon=1.0, delta=1e-5)
        records = records_of(model, x, y)
        fit = CentredFit(model.bayesian_model)
        fit.prepare(records, public_inputs)
        fit.begin()
        inputs = input_specs(records)
        num = records.num if num_records is None else num_records
    return inputs, check.count("num_records", num, 1)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keeps everything that trials say out of the log: it would be released."""

    def nothing(record: logging.LogRecord) -> bool:
        return False

    LOG.addFilter(nothing)
    try:
        yield
    finally:
        LOG.removeFilter(nothing)
