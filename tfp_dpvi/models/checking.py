"""Private checks of a model: planned and validated first, charged, then released."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS
from tfp_dpvi.calibrated.posterior import Calibrated
from tfp_dpvi.checking.declared import Declared, declare, kind_of_outcome
from tfp_dpvi.checking.judge import judge
from tfp_dpvi.checking.null import Estimate, variance_factor
from tfp_dpvi.checking.outcomes import Predictor, draws_of
from tfp_dpvi.checking.release import Release, Subjects, contributions
from tfp_dpvi.checking.result import PrivateChecks
from tfp_dpvi.data import make_records, make_units
from tfp_dpvi.models import arguments
from tfp_dpvi.privacy import PrivacyLedger

LOG = logging.getLogger("tfp_dpvi")
_NUM_DRAWS = 4096
_SPENT_MORE = 1.0 + 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class CheckSettings:
    """The arguments of `DPVI.check` that say what is checked.

    Attributes:
      columns: See `DPVI.check`.
      score_range: See `DPVI.check`.
      level: See `DPVI.check`.
    """

    columns: Mapping[Any, Any] | None = None
    score_range: Sequence[float] | None = None
    level: float = 0.05

    def declared(self, model: Any, posterior: Any, subjects: Subjects) -> Declared:
        """Returns what is checked, from public values.

        Args:
          model: The `BayesianModel`.
          posterior: The posterior, or the prior before a fit.
          subjects: The records, of which shapes and bins are read.
        """
        outcome = kind_of_outcome(model, posterior, subjects.x)
        return declare(outcome, subjects.x, self.columns, self.score_range, self.level)


def subjects_of(
    model: Any,
    x: Structure,
    y: Structure | None,
    *,
    seed: int | None,
    unit_ids: Any = None,
    max_rows_per_unit: int | None = None,
    rows_beyond: str = "random",
    validate: bool = True,
) -> Subjects:
    """Returns the checked records, row by row.

    Args:
      model: The `DPVI`.
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
    if y is None:
        raise ValueError("y is missing: checks are of outcomes y given x.")
    rows = make_records(x, y, None, dtype=model.record_dtype, validate=validate)
    if np.ndim(rows.y) != 1 or tf.nest.is_nested(rows.y):
        raise ValueError(
            "y must have shape [N], one number a record, to be ranked among predicted ones: "
            "y[:, 0], for instance."
        )
    if unit_ids is None:
        if max_rows_per_unit is not None:
            raise ValueError("max_rows_per_unit needs unit_ids: pass the person of each row.")
        return Subjects(rows.x, rows.y)
    units = make_units(unit_ids, rows.num, max_rows_per_unit, rows_beyond, seed=seed)
    return Subjects(rows.x, rows.y, units)


@dataclasses.dataclass(frozen=True, eq=False)
class PlannedCheck:
    """A check whose arguments are right, and whose noise is known; nothing is spent.

    Attributes:
      settings: What is checked.
      subjects: The records.
      release: The release's plan.
      ledger: The ledger that is charged.
      epsilon: The release's own cost.
      delta: Its delta.
    """

    settings: CheckSettings
    subjects: Subjects
    release: Release
    ledger: PrivacyLedger
    epsilon: float
    delta: float

    def reserve(self, budgets: Sequence[tuple[float, float]] = ()) -> int:
        """Charges the ledger, and returns the reservation.

        Args:
          budgets: Pairs of epsilon and delta that limit the ledger's total, besides its own.
        """
        seeded = self.release.seed is not None
        return self.ledger.reserve(self.release.plan, 1, seeded=seeded, budgets=budgets)


def plan_check(
    model: Any,
    settings: CheckSettings,
    subjects: Subjects,
    *,
    posterior: Any,
    epsilon: float,
    delta: float | None,
    ledger: PrivacyLedger | None,
    num_records: int | None,
    seed: int | None,
) -> PlannedCheck:
    """Returns a check whose arguments are right.

    Args:
      model: The compiled `DPVI`.
      settings: What is checked.
      subjects: The records.
      posterior: The posterior, or the prior before a fit.
      epsilon: The release's own cost.
      delta: Its delta, by default that of `compile`.
      ledger: The ledger to charge.
      num_records: The public number of records, or of persons; None for the exact one.
      seed: The model's seed.

    Raises:
      ValueError, TypeError, UnsupportedPairError: An argument is wrong; nothing was spent.
    """
    target = model.privacy_target
    if ledger is not None and not isinstance(ledger, PrivacyLedger):
        raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
    ledger = model.privacy_ledger if ledger is None else ledger
    delta = target.delta if delta is None else delta
    if delta is None:
        raise ValueError("delta is missing: pass delta=1e-5, or delta to compile.")
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
    return PlannedCheck(settings, subjects, release, ledger, float(epsilon), float(delta))


def contributions_to(
    model: Any, planned: PlannedCheck, seed: int | None
) -> tuple[Declared, np.ndarray]:
    """Returns what is checked after the fit, and what records add: exact, *not private*.

    Args:
      model: The fitted `DPVI`.
      planned: The check.
      seed: The model's seed.
    """
    declared = planned.settings.declared(model.bayesian_model, model.posterior, planned.subjects)
    key = _random.new_key(None if seed is None else seed + 1)
    predictor = Predictor(model.bayesian_model, is_binary=declared.outcome.is_binary)
    draws = draws_of(model.posterior, seed)
    rows = contributions(predictor, draws, declared, planned.subjects, key)
    return declared, rows


def release_check(
    model: Any,
    planned: PlannedCheck,
    reservation: int,
    declared: Declared,
    rows: np.ndarray,
    calibrated: Calibrated | None,
) -> PrivateChecks:
    """Adds the noise, closes the reservation, and returns the checks.

    Args:
      model: The fitted `DPVI`.
      planned: The check.
      reservation: Of `PlannedCheck.reserve`.
      declared: What is checked.
      rows: What records add.
      calibrated: The fit's posterior, or None if it is the raw surrogate.
    """
    plan = planned.release.plan
    released = planned.release.add_noise(rows)
    planned.ledger.confirm(reservation)
    fitted, num = model.privacy_account.num_records, plan.num_records or len(rows)
    is_own = is_same_ledger(planned.ledger, model.privacy_ledger)
    factor = variance_factor(
        _estimate(model, calibrated), same_records=is_own, records_ratio=num / (fitted or num)
    )
    notes = []
    if calibrated is None:
        notes.append(
            "the posterior is the raw surrogate, whose spread leaves out the fit's noise and the "
            "bias of its clip: a failed test may be due to these"
        )
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


def is_same_ledger(one: PrivacyLedger, other: PrivacyLedger) -> bool:
    """Returns whether two objects are one ledger: then records are those of the fit."""
    return one is other or (one.path is not None and one.path == other.path)


def _estimate(model: Any, calibrated: Calibrated | None) -> Estimate | None:
    """Returns what the fit released of its precision."""
    if calibrated is None:
        return None
    coordinates = Coordinates(model.prior, log_scales=calibrated.log_scales)
    variance = np.diag(calibrated.mixture.covariance)
    try:
        prior = np.var(coordinates.prior_draws(_NUM_DRAWS), axis=0)
    except (*LIKELIHOOD_ERRORS, tf.errors.OpError):
        # A wide prior, of which the bound takes no credit.
        prior = np.full(len(variance), np.inf)
    return Estimate(calibrated.shares, variance, np.where(np.isnan(prior), np.inf, prior))


def warn_of_total(ledger: PrivacyLedger, epsilon: float | None, delta: float | None) -> None:
    """Warns if a ledger's total is above the total that `compile` set.

    Args:
      ledger: The ledger.
      epsilon: The total of `compile`, or None.
      delta: Its delta.
    """
    if epsilon is None or delta is None:
        return
    total = ledger.epsilon(delta)
    if total > epsilon * _SPENT_MORE:
        LOG.warning(
            "The total of fit and checks is epsilon %.4g, above the %.4g of compile: to stay within "
            "it, use fit(checks=0.1).",
            total,
            epsilon,
        )
