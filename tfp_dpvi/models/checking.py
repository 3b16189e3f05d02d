"""Private checks of a model: planned and validated first, charged, then released."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel
from tfp_dpvi.calibrated.posterior import Calibrated
from tfp_dpvi.callbacks import PrivateBackupAndRestore
from tfp_dpvi.checking.declared import Columns, Declared, declare, kind_of_outcome
from tfp_dpvi.checking.judge import judge
from tfp_dpvi.checking.null import Estimate, variance_factor
from tfp_dpvi.checking.outcomes import Predictor, draws_of
from tfp_dpvi.checking.release import Release, Subjects, contributions
from tfp_dpvi.checking.result import PrivateChecks
from tfp_dpvi.data import make_records, make_units
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.models import arguments
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.training.account import Account
from tfp_dpvi.training.budget import PrivacyTarget

LOG = logging.getLogger("tfp_dpvi")
_NUM_DRAWS = 4096
_PERSONS = ("unit_ids", "max_rows_per_unit", "rows_beyond", "validate")


class CheckedModel(Protocol):
    """The parts of a compiled model that its checks read."""

    @property
    def bayesian_model(self) -> BayesianModel:
        """Prior and likelihood."""

    @property
    def posterior(self) -> tfd.Distribution:
        """The posterior."""

    @property
    def record_dtype(self) -> np.dtype:
        """The float type that records are cast to."""

    @property
    def privacy_ledger(self) -> PrivacyLedger:
        """The model's ledger."""

    @property
    def privacy_account(self) -> Account:
        """The number of records of the fit."""

    @property
    def privacy_target(self) -> PrivacyTarget | None:
        """The settings of `compile`."""

    @property
    def is_fitting(self) -> bool:
        """True while `fit` runs."""


def refuse_before_fit(model: CheckedModel) -> None:
    """Raises `RuntimeError` unless a model is compiled and fitted, and no fit runs.

    Args:
      model: The model.
    """
    compiled_target(model, "DPVI.check")
    if model.is_fitting:
        raise RuntimeError(
            "DPVI.check was called while fit runs: call it after fit has returned; this call spent "
            "no privacy."
        )
    if model.privacy_account.inputs is None:
        raise RuntimeError("DPVI.check was called before fit: call fit first.")


def compiled_target(model: CheckedModel, call: str) -> PrivacyTarget:
    """Returns the privacy settings of `compile`, or raises `RuntimeError` before it.

    Args:
      model: The model.
      call: What was called, for the message.
    """
    target = model.privacy_target
    if target is None:
        raise RuntimeError(f"{call} was called before compile: call compile and fit first.")
    return target


@dataclasses.dataclass(frozen=True, eq=False)
class CheckSettings:
    """The arguments of `DPVI.check` that say what is checked.

    Attributes:
      columns: See `DPVI.check`.
      score_range: See `DPVI.check`.
      level: See `DPVI.check`.
    """

    columns: Columns | None = None
    score_range: Sequence[float] | None = None
    level: float = 0.05

    def declared(
        self, model: BayesianModel, posterior: tfd.Distribution, subjects: Subjects
    ) -> Declared:
        """Returns what is checked, from public values.

        Args:
          model: Prior and likelihood.
          posterior: The posterior, or the prior before a fit.
          subjects: The records, of which shapes and bins are read.
        """
        outcome = kind_of_outcome(model, posterior, subjects.x)
        return declare(outcome, subjects.x, self.columns, self.score_range, self.level)


def subjects_of(
    model: CheckedModel,
    x: Structure,
    y: Structure | None,
    *,
    seed: int | None,
    unit_ids: Identifiers = None,
    max_rows_per_unit: int | None = None,
    rows_beyond: str = "random",
    validate: bool = True,
) -> Subjects:
    """Returns the checked records, row by row.

    Args:
      model: The model.
      x: As in `fit`, in memory.
      y: As in `fit`.
      seed: The model's seed.
      unit_ids: As in `fit`.
      max_rows_per_unit: As in `fit`.
      rows_beyond: As in `fit`.
      validate: As in `fit`.

    Raises:
      ValueError, TypeError: These are no records of arrays with one outcome each.
    """
    if arguments.is_batches(x):
        raise ValueError(
            f"x is a {type(x).__name__}, and a check reads all records once: pass arrays."
        )
    if model.bayesian_model.generative or y is None:
        raise ValueError(
            "check is of outcomes y given x: a model of whole records has none. Compare margins of "
            "sample_predictive with public ones."
            if model.bayesian_model.generative
            else "y is missing: checks are of outcomes y given x."
        )
    rows = make_records(x, y, None, dtype=model.record_dtype, validate=validate)
    outcomes = rows.y
    if not isinstance(outcomes, np.ndarray) or outcomes.ndim != 1:
        raise ValueError(
            "y must have shape [N], one number a record, to be ranked among predicted ones: "
            "y[:, 0], for instance."
        )
    if unit_ids is None:
        if max_rows_per_unit is not None:
            raise ValueError("max_rows_per_unit needs unit_ids: pass the person of each row.")
        return Subjects(rows.x, outcomes)
    units = make_units(unit_ids, rows.num, max_rows_per_unit, rows_beyond, seed=seed)
    return Subjects(rows.x, outcomes, units)


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedCheck:
    """A check whose arguments are right, and whose noise is known; it is not charged yet.

    Attributes:
      declared: What is checked.
      default_range: Whether log scores have the default range, which the fit determines.
      subjects: The records.
      release: The release's plan.
      ledger: The ledger that is charged.
      epsilon: The release's own cost.
      delta: Its delta.
      budgets: Pairs of epsilon and delta that limit the ledger's total, besides its own.
    """

    declared: Declared
    default_range: bool
    subjects: Subjects
    release: Release
    ledger: PrivacyLedger
    epsilon: float
    delta: float
    budgets: tuple[tuple[float, float], ...] = ()


def plan_check(
    model: CheckedModel,
    settings: CheckSettings,
    subjects: Subjects,
    *,
    posterior: tfd.Distribution,
    epsilon: float,
    delta: float | None = None,
    ledger: PrivacyLedger | None = None,
    num_records: int | None = None,
    seed: int | None = None,
) -> PlannedCheck:
    """Returns a check whose arguments are right.

    Args:
      model: The compiled model.
      settings: What is checked.
      subjects: The records.
      posterior: The posterior, or the prior before a fit.
      epsilon: The release's own cost.
      delta: Its delta, by default that of `compile`.
      ledger: The ledger to charge, by default the model's.
      num_records: The public number of records, or of persons; None for the one that the fit
        declared, or the exact one.
      seed: The model's seed.

    Raises:
      ValueError, TypeError, UnsupportedPairError: An argument is wrong; nothing is charged.
    """
    target, account = compiled_target(model, "DPVI.check"), model.privacy_account
    if ledger is not None and not isinstance(ledger, PrivacyLedger):
        raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
    ledger = model.privacy_ledger if ledger is None else ledger
    delta = target.delta if delta is None else delta
    if delta is None:
        raise ValueError("delta is missing: pass delta=1e-5, or delta to compile.")
    if num_records is None and account.num_records_declared and is_own_ledger(model, ledger):
        num_records = account.num_records
    num = subjects.num if num_records is None else check.count("num_records", num_records, 1)
    declared = settings.declared(model.bayesian_model, posterior, subjects)
    release = Release.calibrated(
        declared,
        epsilon=check.epsilon(epsilon),
        delta=check.delta(delta),
        num_records=num,
        relation=target.neighboring_relation,
        accountant=target.accountant,
        person=subjects.person,
        seed=seed,
    )
    ledger.check_relation(target.neighboring_relation)
    ledger.check_unit(release.plan)
    is_default = settings.score_range is None
    price = (float(epsilon), float(delta))
    return PlannedCheck(declared, is_default, subjects, release, ledger, *price)


def plan_within_fit(
    model: CheckedModel,
    x: Structure,
    y: Structure | None,
    share: float | None,
    columns: Columns | None,
    num_records: int | None,
    settings: dict[str, Any],
    seed: int | None,
) -> PlannedCheck | None:
    """Returns the check of a fit for a share of its budget, or None.

    Args:
      model: The compiled model.
      x: As in `fit`.
      y: As in `fit`.
      share: The share of the epsilon of `compile`, or None for no check.
      columns: See `DPVI.check`.
      num_records: As in `fit`.
      settings: The other arguments of `fit`.
      seed: The model's seed.

    Raises:
      ValueError, TypeError: An argument is wrong; nothing is charged.
    """
    if share is None:
        if columns is not None:
            raise ValueError("check_columns needs checks, the share of epsilon for them.")
        return None
    part = check.probability("checks", share)
    target = compiled_target(model, "fit(checks=)")
    if part == 1.0 or target.epsilon is None:
        raise ValueError(
            f"checks={check.shown(share)} is a share, below 1, of the epsilon of compile: pass "
            "compile(epsilon=, delta=) and checks=0.1, or call check after the fit."
        )
    if settings.get("sample_weight") is not None:
        raise ValueError(
            "checks with sample_weight: predictions are of records, not of weighted ones. Leave "
            "one of them out."
        )
    callbacks = tf.nest.flatten(settings.get("callbacks") or [])
    if any(isinstance(each, PrivateBackupAndRestore) for each in callbacks):
        raise ValueError(
            "checks with PrivateBackupAndRestore: a resumed fit would pay again. Call check after "
            "the fit."
        )
    persons = {name: settings[name] for name in _PERSONS if name in settings}
    planned = plan_check(
        model,
        CheckSettings(columns),
        subjects_of(model, x, y, seed=seed, **persons),
        posterior=model.bayesian_model.prior,
        epsilon=part * target.epsilon,
        num_records=num_records,
        seed=seed,
    )
    return dataclasses.replace(planned, budgets=target.budgets)


@contextlib.contextmanager
def charged(
    model: CheckedModel, planned: PlannedCheck
) -> Iterator[Callable[[Calibrated | None], PrivateChecks]]:
    """Charges a check, and refunds it if no noise was drawn for it.

    Args:
      model: The model.
      planned: The check.

    Yields:
      A function from the fit's posterior, None if it is the raw surrogate, to the result.

    Raises:
      BudgetExhaustedError, UnsupportedPairError: As `PrivacyLedger.reserve`.
    """
    release, ledger = planned.release, planned.ledger
    seeded = release.seed is not None
    reservation = ledger.reserve(release.plan, 1, seeded=seeded, budgets=planned.budgets)
    is_drawn = []

    def result(calibrated: Calibrated | None) -> PrivateChecks:
        declared, rows = contributions_to(model, planned)
        is_drawn.append(True)
        released = release.noisy_sum(rows)
        ledger.confirm(reservation)
        return _judged(model, planned, declared, released, calibrated)

    try:
        yield result
    finally:
        if not is_drawn:
            ledger.confirm(reservation, 0)


def contributions_to(model: CheckedModel, planned: PlannedCheck) -> tuple[Declared, np.ndarray]:
    """Returns what is checked after the fit, and what records add: exact, *not private*.

    Args:
      model: The fitted model.
      planned: The check.
    """
    seed = planned.release.seed
    outcome = kind_of_outcome(model.bayesian_model, model.posterior, planned.subjects.x)
    # The sums, and so the sensitivity, are those that were planned.
    declared = planned.declared.after_fit(outcome, default_range=planned.default_range)
    predictor = Predictor(model.bayesian_model, is_binary=declared.outcome.is_binary)
    key = _random.new_key(None if seed is None else seed + 1)
    draws = draws_of(model.posterior, seed)
    return declared, contributions(predictor, draws, declared, planned.subjects, key)


def _judged(
    model: CheckedModel,
    planned: PlannedCheck,
    declared: Declared,
    released: np.ndarray,
    calibrated: Calibrated | None,
) -> PrivateChecks:
    """Returns the tests of released sums."""
    plan = planned.release.plan
    num = plan.num_records or planned.subjects.num
    fitted = model.privacy_account.num_records or num
    factor = variance_factor(
        _estimate(model, calibrated),
        same_records=is_own_ledger(model, planned.ledger),
        records_ratio=num / fitted,
    )
    notes = [] if calibrated is not None else [_NOT_CALIBRATED]
    return judge(
        declared,
        released,
        deviation=plan.deviation,
        factor=factor,
        num_records=num,
        epsilon=planned.epsilon,
        delta=planned.delta,
        notes=notes,
    )


_NOT_CALIBRATED = (
    "the posterior is the raw surrogate, whose spread leaves out the fit's noise and the bias of "
    "its clip: a failed test may be due to these"
)


def is_own_ledger(model: CheckedModel, ledger: PrivacyLedger) -> bool:
    """Returns whether a ledger is the model's, so that records are those of the fit.

    Args:
      model: The model.
      ledger: A ledger, perhaps another object of the same file.
    """
    own = model.privacy_ledger
    return own is ledger or (own.path is not None and own.path == ledger.path)


def _estimate(model: CheckedModel, calibrated: Calibrated | None) -> Estimate | None:
    """Returns what the fit released of its precision."""
    if calibrated is None:
        return None
    coordinates = Coordinates(model.bayesian_model.prior, log_scales=calibrated.log_scales)
    variance = np.diag(calibrated.mixture.covariance)
    try:
        prior = np.var(coordinates.prior_draws(_NUM_DRAWS), axis=0)
    except (*LIKELIHOOD_ERRORS, tf.errors.OpError):
        # As if it were wide, of which the bound takes no credit.
        prior = np.full(len(variance), np.inf)
    return Estimate(calibrated.shares, variance, np.where(np.isnan(prior), np.inf, prior))


def warn_of_total(model: CheckedModel, ledger: PrivacyLedger) -> None:
    """Warns if the total of the model's ledger is above the total that `compile` set.

    Args:
      model: The model.
      ledger: The ledger that a check charged.
    """
    target = model.privacy_target
    if target is None or target.epsilon is None or target.delta is None:
        return
    if not is_own_ledger(model, ledger):
        return
    total = ledger.epsilon(target.delta, target.accountant)
    if total > target.epsilon:
        LOG.warning(
            "The total of fit and checks is epsilon %.4g, above the %.4g of compile: to stay "
            "within it, use fit(checks=0.1).",
            total,
            target.epsilon,
        )
