"""`regression`: a formula, a data set, a schema and an epsilon give a private posterior."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data import Schema, make_records, make_units
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.data.records import check_max_weight, refuse_weights
from tfp_dpvi.data.schema import Described
from tfp_dpvi.models import DPVI
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.regressions import words
from tfp_dpvi.regressions.checking import (
    column_bins,
    identifiers,
    numbers_within,
    outcome_values,
)
from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.families import (
    INTERCEPT_SD,
    SHARE_SD,
    Layout,
    check_outcome,
    likelihood,
    make_prior,
)
from tfp_dpvi.regressions.measured import Measurable, Terms, measured_schema
from tfp_dpvi.regressions.outcomes import FAMILIES, OTHER_NAMES
from tfp_dpvi.regressions.parts import Parts
from tfp_dpvi.regressions.result import Regression

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

# Invented records whose rows set the coordinates of scoring steps, or so many a coefficient.
_NUM_PUBLIC = 2048
# Of those among which some resemble private records that others do not.
_NUM_NEAR = 14336
_PUBLIC_EACH = 16
# Coefficients, levels of groups and scales that scoring steps can learn.
MOST_COEFFICIENTS = 512
# Public records that are passed: at least so many, or so many a coefficient.
_LEAST_PUBLIC = 100
_LEAST_PUBLIC_EACH = 5
_SEED_PUBLIC = 7
_SEED_NEAR = 8


def regression(
    formula: str,
    data: TableData,
    family: str,
    schema: Described,
    *,
    epsilon: float,
    delta: float,
    priors: Mapping[str, Any] | None = None,
    ledger: PrivacyLedger | None = None,
    missing: str | None = None,
    outside: str = "refuse",
    constants: Mapping[str, Any] | None = None,
    measured: Sequence[str] | None = None,
    share: float | None = None,
    num_records: int | None = None,
    seed: int | None = None,
    unit: str | None = None,
    max_rows_per_unit: int | None = None,
    checks: float | None = None,
    check_columns: Sequence[str] | None = None,
    weights: str | None = None,
    public_data: TableData | None = None,
    verbose: int = 0,
) -> Regression:
    """Fits a Bayesian regression with differential privacy; there is nothing to tune.

    Args:
      formula: "outcome ~ terms" as in R and Bambi, read by formulae: common effects, interactions
        (`a * b`), `offset(x)`, functions of NumPy of each value, `poly`, `bs`, `cr`, and group
        effects `(1 | g)` and slopes `(x | g)`; `mo(x)` of ordered levels, as brms', goes up or down
        alone: "mo(x)" is the difference of the last level from the first one, "share(mo(x)[a])"
        what the step up to a has of it. Levels, knots, means and scales are the schema's.
        Effects of a level are correlated in `(x | g)`, and independent in `(x || g)`; with slopes,
        its intercept is that where x has its typical value, and so is "cor(1, x|g)".
        The outcome of "binomial" and "beta_binomial" is `p(y, n)`: successes among trials, where n
        is a column or a public number. `censored(y, limit)` is an outcome that is not seen from a
        limit on, a column or a public number, and `censored(y, limit, "left")` one that is not seen
        below it. Each record needs its limit, independent of its outcome given the covariates.
      data: A data set with the formula's columns, one row a record; others are ignored.
      family: "normal", "student", "lognormal", "gamma", "weibull", "exponential", "beta",
        "bernoulli", "binomial", "beta_binomial", "poisson", "negative_binomial",
        "zero_inflated_poisson", "zero_inflated_negative_binomial", "hurdle_poisson", "categorical"
        or "ordinal"; or Bambi's or brms' name of one of these, such as "gaussian".
      schema: The public description of the columns, a `Schema` or what `Schema.from_dict` takes.
      epsilon: The privacy loss of all releases on the ledger after this fit: without a ledger, or
        with a new one, that of the fit.
      delta: Its delta, below one over the number of records.
      priors: Priors by the names of terms, coefficients or "Intercept": a pair of mean and standard
        deviation, or a `tfd.Normal`, in the units of the formula. That of "Intercept" is for
        records at the typical values of the covariates. Others are normal with mean 0 and standard
        deviation 2.5 (ordinal: 1) for columns scaled to a typical deviation of 1, and outcomes
        likewise in the normal and student families, as rstanarm's. They are up to four times as
        wide for columns without typical values, whose bounds may be far apart.
      ledger: A `PrivacyLedger`, for instance on disk; by default one in memory.
      missing: None, or "indicator" for columns that may have missing values: these take the typical
        value, or a level of their own, and an indicator column is added.
      outside: "refuse", or "clip" for numbers outside of their bounds.
      constants: Public numbers or lists that the formula names, such as knots.
      measured: Columns whose typical values or shares are not public: these are released first, in
        the same ledger, for `share` of epsilon and delta. None for the numbers of which the schema
        has bounds alone, if so many records can show them; () for no column.
      share: See `measured`; None for as much as the number of records asks for, .02 to .5.
      num_records: The public number of records; by default the exact one is taken as public.
      seed: Makes the noise repeatable, and the result *not private*.
      unit: The column of persons, to protect persons with several rows instead of rows: integers
        or texts, which need no schema and never leave. `(1 | unit)` in the formula gives each
        person an intercept, which is integrated out; without it, rows of a person are taken as
        independent given the covariates. `num_records` then counts persons.
      max_rows_per_unit: With `unit`, the public largest number of rows of a person that are used,
        chosen at random.
      checks: The share of epsilon for a private check of the fitted model, such as 0.1; its result
        is `private_checks`. None for no check.
      check_columns: With `checks`, the covariates whose residuals are released, by bins that follow
        from the schema; by default all numbers. Each makes the check's noise larger.
      weights: The column of survey weights, described in the schema, whose `upper` is the public
        largest weight. The estimates are then those of the same regression on the whole
        population, also if weights depend on outcomes. With `unit`, a person has one weight.
      public_data: A public data set whose covariates are scaled and correlated like the private
        ones, such as an earlier wave: where noise hides how columns are correlated, intervals rest
        on it. None for invented records of the schema, whose columns are independent.
      verbose: As in Keras; 1 shows a bar of the fit's steps.

    Returns:
      The fitted `Regression`.

    Raises:
      ImportError: formulae is not installed.
      ValueError: Formula, schema and data do not fit; no privacy was spent. A fit that stops for
        another reason after typical values were released has spent their share.

    ```python
    >>> import numpy as np
    >>> import tfp_dpvi as dpvi
    >>> schema = {
    ...     "visits": {"type": "integer", "lower": 0, "upper": 60},
    ...     "age": {"type": "integer", "lower": 18, "upper": 90},
    ... }
    >>> dpvi.regression("visits ~ 0", {}, "poisson", schema, epsilon=1.0, delta=1e-5)
    Traceback (most recent call last):
    ...
    ValueError: formula has no terms: write, for instance, y ~ 1 + x.

    ```

    #### Formal guarantee

    The result is (epsilon, delta)-differentially private as `DPVI.fit`: each record's design row is
    a function of that record and the schema alone. That values outside of the schema are refused
    depends on the records, and is not covered; `outside="clip"` avoids it for numbers.
    """
    schema = Schema.of(schema)
    check.epsilon(epsilon)
    check.delta(delta)
    _check_settings(num_records, seed, measured)
    described_by = {"missing": missing, "outside": outside, "constants": constants}
    design, parts = described(formula, family, schema, priors, unit, **described_by)
    persons = _persons(data, design, unit, max_rows_per_unit)
    _refuse_as_weights(weights, unit, design.outcome)
    settings = {**persons, **({} if weights is None else _weights(schema, weights, data, outside))}
    y = outcome_values(design, parts.family, parts.outcome, data)
    if not len(y):
        raise ValueError("data has no rows: pass at least one record.")
    rows = design.rows(data)
    checked = _checked(design, checks, check_columns, data)
    if persons and design.labels:
        named = dict(zip(design.labels, rows.common.T, strict=True))
        made = make_records(named, y, None, dtype=np.dtype(np.float64), validate=False)
        made.refuse_earlier_outcomes(make_units(persons["unit_ids"], made.num, 1))
    num_public = _num_public(public_data, design, parts, max_rows_per_unit)
    # All else was checked: what comes spends privacy.
    terms = Terms(epsilon, delta, num_records or 0, seed=seed)
    records = Measurable(data, ledger, persons.get("unit_ids"))
    found = measured_schema(design.schema, measured, share, records, terms)
    if found is not None:
        ledger = found.ledger
        design, parts = described(formula, family, found.schema, priors, unit, **described_by)
        parts = dataclasses.replace(parts, measured=found.names, share=found.share)
        y = outcome_values(design, parts.family, parts.outcome, data)
        rows = design.rows(data)
        checked = _checked(design, checks, check_columns, data)
    model = DPVI(
        functools.partial(make_prior, **parts.prior),
        functools.partial(likelihood, **parts.likelihood),
        seed=seed,
    )
    model.compile(epsilon=epsilon, delta=delta, ledger=ledger)
    x = parts.inputs(rows)
    parts = dataclasses.replace(
        parts,
        weights=weights or "",
        max_weight=settings.get("max_weight", 0.0),
        num_public=num_public,
    )
    public = public_inputs(design, parts, public_data)
    if persons:
        settings["public_unit_ids"] = _public_persons(len(public), persons["max_rows_per_unit"])
    with words.own_log():
        given = {"num_records": num_records, "verbose": verbose, **checked, **settings}
        model.fit(x, y, public_inputs=public, **given)
    result = Regression(design, parts, model)
    for sentence in result.warnings:
        words.LOG.warning("Do not trust the intervals of %s: %s.", formula, sentence)
    return result


def _check_settings(
    num_records: int | None, seed: int | None, measured: Sequence[str] | None
) -> None:
    """Raises for arguments of wrong types or signs."""
    if num_records is not None:
        check.count("num_records", num_records, 1)
    if seed is not None:
        check.count("seed", seed)
    if isinstance(measured, str) or not isinstance(measured, Iterable | None):
        name = measured if isinstance(measured, str) else "age"
        raise TypeError(f"measured must be a list of columns, such as [{name!r}].")


def described(
    formula: str,
    family: str,
    schema: Described,
    priors: Mapping[str, Any] | None = None,
    unit: str | None = None,
    **settings: Any,
) -> tuple[Design, Parts]:
    """Returns the design of a formula and the model's description, which no record decides.

    Args:
      formula: As in `regression`.
      family: As in `regression`.
      schema: As in `regression`.
      priors: As in `regression`.
      unit: As in `regression`.
      **settings: Other arguments of `Design`.

    Raises:
      ValueError: They do not fit each other.
    """
    check.one_of("family", family, (*FAMILIES, *OTHER_NAMES))
    family = OTHER_NAMES.get(family, family)
    schema = Schema.of(schema)
    fixed, has_unit_effect = _without_unit(formula, unit)
    design = Design(fixed, schema, **settings)
    column = schema.columns[design.outcome]
    _check_limit(design, family)
    check_outcome(FAMILIES[family], design.outcome, column)
    if FAMILIES[family].has_trials != (design.trials is not None):
        raise ValueError(
            'family="binomial" or "beta_binomial" and an outcome p(y, n) need each other: formula '
            f"has {design.formula.partition('~')[0].strip()}, and family is {family!r}."
        )
    if design.has_transformed_outcome and not FAMILIES[family].is_scaled:
        raise ValueError(
            f'formula transforms the outcome, which family={family!r} does not allow: use "normal".'
        )
    if family == "categorical" and (design.groups or has_unit_effect):
        raise ValueError('family="categorical" has no group effects: use common ones, + g.')
    parts = _parts(design, family, priors or {}, unit or "" if has_unit_effect else "")
    _check_names(design, parts)
    _check_size(parts)
    return design, parts


def _check_names(design: Design, parts: Parts) -> None:
    """Raises if a table of the result would have two rows of one name."""
    for name in (*design.covariates, *design.labels):
        if name in ("Intercept", *parts.own_names):
            raise ValueError(
                f"formula has the column {name!r}, and family={parts.family!r} a parameter of this "
                "name: rename the column."
            )


def _check_limit(design: Design, family: str) -> None:
    """Raises if outcomes are censored that the family cannot have."""
    if design.limit is None:
        return
    kind, limit = FAMILIES[family], design.limit.at
    if not kind.can_be_censored:
        able = ", ".join(name for name, each in FAMILIES.items() if each.can_be_censored)
        raise ValueError(
            f"family={family!r} has no censored outcomes, and the formula has "
            f"{design.formula.partition('~')[0].strip()}: use one of {able}."
        )
    column = design.schema.columns.get(str(limit))
    least = column.lower if isinstance(column, Numeric) else float(limit)
    if not kind.is_scaled and least <= 0.0:
        raise ValueError(
            f"formula has limits from {least:g} on, and family={family!r} needs limits above 0: "
            "leave out by a rule records that were not followed, and describe the limit with "
            "lower above 0."
        )


def public_inputs(design: Design, parts: Parts, public_data: TableData | None = None) -> np.ndarray:
    """Returns inputs that set the coordinates of scoring steps, invented or of public records.

    Args:
      design: The design of the formula.
      parts: The model's description.
      public_data: Public records, or None for invented ones of the schema.
    """
    if public_data is not None:
        rows = parts.inputs(design.rows(public_data))
        # Moments are those of the first ones, and data sets are often sorted.
        return np.random.default_rng(_SEED_PUBLIC).permutation(rows)
    num = max(_NUM_PUBLIC, _PUBLIC_EACH * parts.num_coefficients)
    records = design.simulated(num, _SEED_PUBLIC)
    near = design.simulated(_NUM_NEAR, _SEED_NEAR, near=True)
    joined = {name: np.concatenate([records[name], near[name]]) for name in records}
    return parts.inputs(design.rows(joined))


def _num_public(
    public_data: TableData | None, design: Design, parts: Parts, most: int | None
) -> int:
    """Returns the number of public records, checked before anything is spent; 0 for none.

    What does not vary in them would be taken as known: intervals of its effect were too narrow.
    """
    if public_data is None:
        return 0
    if not (design.labels or design.groups):
        raise ValueError("public_data is for covariates, and formula has none: leave it out.")
    try:
        rows = design.rows(public_data)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"public_data: {error}") from error
    num = len(rows.common)
    count = num if most is None else len(np.unique(_public_persons(num, most)))
    least = max(_LEAST_PUBLIC, _LEAST_PUBLIC_EACH * parts.num_coefficients)
    if count < least:
        of = "rows" if most is None else f"persons of up to {most} rows"
        raise ValueError(
            f"public_data has {count} {of}: pass at least {least} for these terms, or leave it out."
        )
    columns = zip(design.labels, rows.common.T, strict=True)
    same = [label for label, column in columns if np.ptp(column) == 0.0]
    if same or not np.any(rows.groups, axis=0).all():
        what = f"{same[0]!r} is the same in all rows" if same else "a level of a group has no row"
        raise ValueError(f"public_data: {what}. Pass records in which all terms vary, or none.")
    return num


def _persons(data: TableData, design: Design, unit: str | None, most: int | None) -> dict[str, Any]:
    """Returns the arguments of a fit that say whose rows are whose; none without persons."""
    if unit is None:
        if most is not None:
            raise ValueError(
                f"max_rows_per_unit={check.shown(most)} needs unit=: name the column of persons."
            )
        return {}
    ids = identifiers(data, unit)
    if unit in design.schema.columns:
        raise ValueError(
            f"unit={unit!r} is also a covariate of the formula: use (1 | {unit}) for an intercept "
            "of each person."
        )
    if most is None:
        raise ValueError(
            f"unit={unit!r} needs max_rows_per_unit=: the public largest number of rows of a "
            "person that are used."
        )
    return {"unit_ids": ids, "max_rows_per_unit": check.count("max_rows_per_unit", most, 1)}


def _checked(
    design: Design, share: float | None, names: Sequence[str] | None, data: TableData
) -> dict[str, Any]:
    """Returns the arguments of a fit that say what is checked; none without checks."""
    if share is None:
        if names is not None:
            raise ValueError("check_columns needs checks=, the share of epsilon for them.")
        return {}
    if check.probability("checks", share) == 1.0:
        raise ValueError("checks=1 would leave nothing for the fit: pass a share such as 0.1.")
    return {"checks": share, "check_columns": column_bins(design, names, data)}


def weight_column(schema: Schema, name: str) -> Numeric:
    """Returns the description of a column of weights, whose upper is the largest one.

    Args:
      schema: The public description of the columns.
      name: The column.

    Raises:
      ValueError: It describes no weights.
    """
    column = schema.columns.get(name) if isinstance(name, str) else None
    if not isinstance(column, Numeric) or column.missing or column.lower < 0.0 or column.upper <= 0:
        raise ValueError(
            f"weights={check.shown(name)} needs a column that the schema describes as Continuous "
            "or Integer, with lower=0 or more and without missing=True: its upper is public."
        )
    return column


def _refuse_as_weights(weights: str | None, unit: str | None, outcome: str) -> None:
    if isinstance(weights, str) and weights in (unit, outcome):
        raise ValueError(
            f"weights={check.shown(weights)} is the outcome or the unit: pass the column of survey "
            "weights, or none."
        )


def _weights(schema: Schema, name: str, data: TableData, outside: str) -> dict[str, Any]:
    """Returns the arguments of a fit that say what records weigh."""
    column = weight_column(schema, name)
    values = numbers_within(schema, name, data, outside).astype(np.float32)
    most = check_max_weight(float(column.upper), values)
    # As `fit` will, but before columns are measured.
    refuse_weights(values, most)
    return {"sample_weight": values, "max_weight": most}


def _check_size(parts: Parts) -> None:
    if parts.num_coefficients > MOST_COEFFICIENTS:
        raise ValueError(
            f"formula has {parts.num_coefficients} coefficients, levels of groups included, more "
            f"than {MOST_COEFFICIENTS}: merge levels in the schema, or leave out terms."
        )


def _without_unit(formula: str, unit: str | None) -> tuple[str, bool]:
    """Returns the formula without an intercept of each person, and whether it had one."""
    if unit is None or not isinstance(formula, str):
        return formula, False
    check.text("unit", unit, "pass the name of a column")
    term = rf"\(\s*1\s*\|\|?\s*`?{re.escape(unit)}`?\s*\)"
    fixed = re.sub(rf"\+\s*{term}|{term}\s*\+|{term}", "", formula)
    if re.search(rf"\|[^)]*(?<!\w){re.escape(unit)}(?!\w)", fixed):
        raise ValueError(
            f"formula has other effects of persons, unit={unit!r}, than (1 | {unit}), which alone "
            "can be fitted: leave them out."
        )
    if fixed.rstrip().endswith("~"):
        fixed += " 1"
    return fixed.strip(), fixed != formula


def _public_persons(num_rows: int, most: int) -> np.ndarray:
    """Returns the person of each of some invented rows: as many have 1 row as 2, up to m."""
    cycle = np.repeat(np.arange(most), np.arange(1, most + 1))
    rounds = np.arange(num_rows) // len(cycle)
    return np.resize(cycle, num_rows) + most * rounds


def _parts(design: Design, family: str, priors: Mapping[str, Any], person: str = "") -> Parts:
    """Returns the model's description as plain values."""
    column, kind = design.schema.columns[design.outcome], FAMILIES[family]
    location, scale = 0.0, 1.0
    if isinstance(column, Numeric):
        location, scale = kind.typical(column), column.deviation
        if design.has_transformed_outcome:
            simulated = np.asarray(design.schema.simulate(4000)[design.outcome], np.float64)
            simulated = design.transformed_outcome(simulated)
            simulated = simulated[np.isfinite(simulated)]
            location, scale = float(simulated.mean()), float(simulated.std())
    if design.trials is not None:
        location = _typical_share(design)
    distance = 0.0
    if kind.is_scaled and not design.has_intercept:
        # The coefficients alone say where outcomes lie, which may be far from 0.
        distance, location = abs(location) / scale, 0.0
    outcome = kind.outcome(column, location, scale)
    has_intercept = design.has_intercept and family != "ordinal"
    layout = Layout(
        len(design.labels),
        has_intercept,
        tuple(len(group.labels) for group in design.groups),
        person,
        has_trials=design.trials is not None,
        censored="" if design.limit is None else design.limit.side,
        monotone=tuple(design.monotone.values()),
        correlated=design.correlated,
    )
    unit = outcome.scale
    given, intercept = _priors(design, priors, unit, math.hypot(kind.coefficient_sd, distance))
    if intercept is None:
        # Records may lie elsewhere than at the middle of bounds that are wider than they need be.
        sds = np.array([sd for _, sd in given])
        elsewhere = [sds[changed].max(initial=0.0) for changed in design.wide]
        deviation = math.hypot(INTERCEPT_SD, *elsewhere)
        intercept = (0.0 if kind.is_scaled else outcome.location, deviation)
    elif not (design.has_intercept or family == "ordinal"):
        raise ValueError("priors has 'Intercept', and the formula none: leave it out.")
    elif kind.is_scaled:
        intercept = ((intercept[0] - outcome.location) / unit, intercept[1] / unit)
    return Parts(
        family=family,
        outcome=outcome,
        layout=layout,
        coefficients=tuple(given),
        intercept=intercept,
        location=tuple(design.location.tolist()),
        scale=tuple(design.scale.tolist()),
    )


def _typical_share(design: Design) -> float:
    """Returns the typical share of successes if both columns' typical values are declared."""
    successes, trials = (design.schema.columns.get(str(n)) for n in (design.outcome, design.trials))
    assert isinstance(successes, Numeric)
    if successes.typical is None:
        return 0.5
    if isinstance(trials, Numeric):
        return 0.5 if trials.typical is None else successes.location / max(trials.location, 1.0)
    return successes.location / int(design.trials or 1)


def _priors(
    design: Design, priors: Mapping[str, Any], unit: float, deviation: float
) -> tuple[list[tuple[float, float]], tuple[float, float] | None]:
    """Returns means and deviations of coefficients on the model's scale, and the intercept's."""
    if not isinstance(priors, Mapping):
        raise TypeError("priors must be a dict, such as {'age': (0, 0.1)}.")
    steps = [label for span in design.monotone.values() for label in design.labels[slice(*span)]]
    labels = [label for label in design.labels if label not in steps]
    known = list(dict.fromkeys([*design.terms, *labels, "Intercept"]))
    if unknown := [name for name in priors if name not in known]:
        raise ValueError(f"priors has {unknown}, which are no terms: use {', '.join(known)}.")
    pairs = {name: _pair(name, prior) for name, prior in priors.items()}
    result = [(0.0, deviation * widening) for widening in design.widening.tolist()]
    for name, place in design.terms.items():
        for number in range(place.start, place.stop):
            pair = pairs.get(design.labels[number], pairs.get(name))
            if pair is not None:
                factor = design.scale[number] / unit
                result[number] = (pair[0] * factor, pair[1] * factor)
    for start, stop in design.monotone.values():
        result[start + 1 : stop] = [(0.0, SHARE_SD)] * (stop - start - 1)
    return result, pairs.get("Intercept")


def _pair(name: str, prior: Any) -> tuple[float, float]:
    if hasattr(prior, "loc") and type(prior).__name__ == "Normal":
        prior = (prior.loc, prior.scale)
    try:
        mean, deviation = (float(value) for value in prior)
    except (TypeError, ValueError):
        raise ValueError(
            f"priors[{name!r}] must be a mean and a standard deviation, such as (0, 1), or a "
            f"tfd.Normal of numbers: got {check.shown(prior)}."
        ) from None
    if not (np.isfinite(mean) and 0.0 < deviation < np.inf):
        raise ValueError(f"priors[{name!r}] needs a finite mean and a positive deviation.")
    return mean, deviation
