"""`regression`: a formula, a data set, a schema and an epsilon give a private posterior."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data import Schema, frames
from tfp_dpvi.data.columns import Numeric, converted
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.models import DPVI
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.regressions import words
from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.families import (
    COEFFICIENT_SD,
    FAMILIES,
    INTERCEPT_SD,
    Layout,
    Outcome,
    check_outcome,
    likelihood,
    make_prior,
    outcome_of,
)
from tfp_dpvi.regressions.measured import measure
from tfp_dpvi.regressions.result import Parts, Regression

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

# Invented records whose rows set the coordinates of scoring steps, or so many a coefficient.
_NUM_PUBLIC = 2000
_PUBLIC_EACH = 16
# Coefficients, levels of groups and scales that scoring steps can learn.
MOST_COEFFICIENTS = 512
_SEED_PUBLIC = 7


def regression(
    formula: str,
    data: TableData,
    family: str,
    schema: Schema | Mapping[str, Any],
    *,
    epsilon: float,
    delta: float,
    priors: Mapping[str, Any] | None = None,
    ledger: PrivacyLedger | None = None,
    missing: str | None = None,
    outside: str = "refuse",
    constants: Mapping[str, Any] | None = None,
    measured: Sequence[str] = (),
    share: float = 0.1,
    num_records: int | None = None,
    seed: int | None = None,
    unit: str | None = None,
    max_rows_per_unit: int | None = None,
    weights: str | None = None,
) -> Regression:
    """Fits a Bayesian regression with differential privacy; there is nothing to tune.

    Args:
      formula: "outcome ~ terms" as in R and Bambi, read by formulae: common effects, interactions
        (`a * b`), `offset(x)`, functions of NumPy of each value, `poly`, `bs`, `cr`, and group
        effects `(1 | g)`. Levels, knots, means and scales are the schema's.
      data: A data set with the formula's columns, one row a record; others are ignored.
      family: "normal", "bernoulli", "poisson", "negative_binomial", "categorical" or "ordinal".
      schema: The public description of the columns, a `Schema` or what `Schema.from_dict` takes.
      epsilon: The privacy loss of all releases on the ledger after this fit: without a ledger, or
        with a new one, that of the fit.
      delta: Its delta, below one over the number of records.
      priors: Priors by the names of terms, coefficients or "Intercept": a pair of mean and standard
        deviation, or a `tfd.Normal`, in the units of the formula. That of "Intercept" is for
        records at the typical values of the covariates. Others are normal with mean 0 and standard
        deviation 2.5 (ordinal: 1) for columns scaled to a typical deviation of 1, and outcomes
        likewise in a normal family, as rstanarm's.
      ledger: A `PrivacyLedger`, for instance on disk; by default one in memory.
      missing: None, or "indicator" for columns that may have missing values: these take the typical
        value, or a level of their own, and an indicator column is added.
      outside: "refuse", or "clip" for numbers outside of their bounds.
      constants: Public numbers or lists that the formula names, such as knots.
      measured: Columns whose typical values or shares are not public: these are released first, in
        the same ledger, for `share` of epsilon and delta.
      share: See `measured`.
      num_records: The public number of records; by default the exact one is taken as public.
      seed: Makes the noise repeatable, and the result *not private*.
      unit: The column of persons, to protect persons with several rows instead of rows: integers
        or texts, which need no schema and never leave. `(1 | unit)` in the formula gives each
        person an intercept, which is integrated out; without it, rows of a person are taken as
        independent given the covariates. `num_records` then counts persons.
      max_rows_per_unit: With `unit`, the public largest number of rows of a person that are used,
        chosen at random.
      weights: The column of survey weights, described in the schema, whose `upper` is the public
        largest weight. The estimates are then those of the same regression on the whole
        population, also if weights depend on outcomes. With `unit`, a person has one weight.

    Returns:
      The fitted `Regression`.

    Raises:
      ImportError: formulae is not installed.
      ValueError: Formula, schema and data do not fit; no privacy was spent.

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
    check.one_of("family", family, FAMILIES)
    if not isinstance(schema, Schema):
        schema = Schema.from_dict(schema)
    fixed, has_unit_effect = _without_unit(formula, unit)
    design = Design(fixed, schema, missing=missing, outside=outside, constants=constants)
    column = schema.columns[design.outcome]
    check_outcome(family, design.outcome, column)
    _check_family(family, design, has_unit_effect)
    persons = _persons(data, design, unit, max_rows_per_unit, measured)
    person = unit or "" if has_unit_effect else ""
    parts = _parts(design, family, priors or {}, person)
    _check_size(parts)
    settings = {**persons, **_weights(schema, weights, data, outside)}
    y = _outcome_values(design, family, parts.outcome, data)
    rows = design.rows(data)
    if measured:
        # All else was checked: what comes spends privacy.
        part = check.probability("share", share)
        _check_left(ledger, epsilon, delta, part)
        schema, ledger = measure(
            design.schema,
            measured,
            data,
            ledger,
            epsilon=epsilon * part,
            delta=delta * part,
            num_records=num_records,
            seed=seed,
        )
        design = Design(formula, schema, missing=missing, outside=outside, constants=constants)
        parts = dataclasses.replace(
            _parts(design, family, priors or {}, person), measured=tuple(measured), share=part
        )
        y = _outcome_values(design, family, parts.outcome, data)
        rows = design.rows(data)
    model = DPVI(
        functools.partial(make_prior, **parts.prior),
        functools.partial(likelihood, **parts.likelihood),
        seed=seed,
    )
    model.compile(epsilon=epsilon, delta=delta, ledger=ledger)
    x = parts.inputs(rows)
    parts = dataclasses.replace(
        parts, weights=weights or "", max_weight=settings.get("max_weight", 0.0)
    )
    num_public = max(_NUM_PUBLIC, _PUBLIC_EACH * parts.num_coefficients)
    public = parts.inputs(design.rows(design.simulated(num_public, _SEED_PUBLIC)))
    if persons:
        settings["public_unit_ids"] = _public_persons(len(public), persons["max_rows_per_unit"])
    with words.own_log():
        model.fit(x, y, public_inputs=public, num_records=num_records, verbose=0, **settings)
    result = Regression(design, parts, model)
    for sentence in result.warnings:
        words.LOG.warning("Do not trust the intervals of %s: %s.", formula, sentence)
    return result


def _check_family(family: str, design: Design, has_unit_effect: bool) -> None:
    if design.has_transformed_outcome and family != "normal":
        raise ValueError(
            f'formula transforms the outcome, which family={family!r} does not allow: use "normal".'
        )
    if family == "categorical" and (design.groups or has_unit_effect):
        raise ValueError('family="categorical" has no group effects: use common ones, + g.')


def _persons(
    data: TableData, design: Design, unit: str | None, most: int | None, measured: Sequence[str]
) -> dict[str, Any]:
    """Returns the arguments of a fit that say whose rows are whose; none without persons."""
    if unit is None:
        if most is not None:
            raise ValueError(
                f"max_rows_per_unit={check.shown(most)} needs unit=: name the column of persons."
            )
        return {}
    ids = _column(data, unit)
    if unit in design.schema.columns:
        raise ValueError(
            f"unit={unit!r} is also a covariate of the formula: use (1 | {unit}) for an intercept "
            "of each person."
        )
    if measured:
        raise ValueError(
            f"measured={list(measured)} releases values of rows, and unit={unit!r} protects "
            "persons: declare typical values in the schema."
        )
    return {"unit_ids": ids, "max_rows_per_unit": check.count("max_rows_per_unit", most or 0, 1)}


def _weights(schema: Schema, name: str | None, data: TableData, outside: str) -> dict[str, Any]:
    """Returns the arguments of a fit that say what records weigh; none without weights."""
    if name is None:
        return {}
    column = schema.columns.get(name)
    if not isinstance(column, Numeric) or column.missing or column.lower < 0.0 or column.upper <= 0:
        raise ValueError(
            f"weights={check.shown(name)} needs a column that the schema describes as Continuous "
            "or Integer, with lower=0 or more and without missing=True: its upper is public."
        )
    values = _numbers_within(schema, name, data, outside)
    return {"sample_weight": values.astype(np.float32), "max_weight": float(column.upper)}


def _numbers_within(schema: Schema, name: str, data: TableData, outside: str) -> np.ndarray:
    """Returns the numbers of a column, within its bounds or moved to them, float64 [n]."""
    column: Any = schema.columns[name]
    values = schema.part([name]).arrays(data)[name]
    numbers, strange = converted(column.to_numbers, values)
    if outside == "clip":
        values = np.where(strange | np.isnan(numbers), values, column.clipped(numbers))
    column.encode(name, values)
    return np.asarray(values, np.float64)


def _check_left(ledger: PrivacyLedger | None, epsilon: float, delta: float, share: float) -> None:
    spent = 0.0 if ledger is None or not ledger.num_releases else ledger.epsilon(delta)
    if spent >= (1.0 - share) * epsilon:
        raise ValueError(
            f"epsilon={epsilon:g} is the total of the ledger, of which {spent:.3g} was spent: too "
            "little is left to measure columns and to fit."
        )


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
    term = rf"\(\s*1\s*\|\s*`?{re.escape(unit)}`?\s*\)"
    fixed = re.sub(rf"\+\s*{term}|{term}\s*\+|{term}", "", formula)
    if fixed.rstrip().endswith("~"):
        fixed += " 1"
    return fixed.strip(), fixed != formula


def _column(data: TableData, name: str) -> Identifiers:
    """Returns a column of identifiers, as it is."""
    is_frame = frames.container_of(data) is not None
    columns = frames.columns_of(data) if is_frame else data
    if name not in columns:
        raise ValueError(f"unit={check.shown(name)} is no column of data.")
    return columns[name]


def _public_persons(num_rows: int, most: int) -> np.ndarray:
    """Returns the person of each of some invented rows: as many have 1 row as 2, up to m."""
    cycle = np.repeat(np.arange(most), np.arange(1, most + 1))
    rounds = np.arange(num_rows) // len(cycle)
    return np.resize(cycle, num_rows) + most * rounds


def _parts(design: Design, family: str, priors: Mapping[str, Any], person: str = "") -> Parts:
    """Returns the model's description as plain values."""
    column = design.schema.columns[design.outcome]
    location, scale = 0.0, 1.0
    if isinstance(column, Numeric):
        location, scale = column.location, column.deviation
        if design.has_transformed_outcome:
            simulated = np.asarray(design.schema.simulate(4000)[design.outcome], np.float64)
            simulated = design.transformed_outcome(simulated)
            simulated = simulated[np.isfinite(simulated)]
            location, scale = float(simulated.mean()), float(simulated.std())
    outcome = outcome_of(family, column, location, scale)
    sizes = tuple(len(group.labels) for group in design.groups)
    layout = Layout(len(design.labels), design.has_intercept and family != "ordinal", sizes, person)
    unit = outcome.scale if family == "normal" else 1.0
    given, intercept = _priors(design, priors, unit, COEFFICIENT_SD[family])
    centre = 0.0 if family in ("normal", "categorical") else outcome.location
    if intercept is None:
        intercept = (centre, INTERCEPT_SD)
    elif family == "normal":
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


def _priors(
    design: Design, priors: Mapping[str, Any], unit: float, deviation: float
) -> tuple[list[tuple[float, float]], tuple[float, float] | None]:
    """Returns means and deviations of coefficients on the model's scale, and the intercept's."""
    known = [*design.terms, *design.labels, "Intercept"]
    if unknown := [name for name in priors if name not in known]:
        raise ValueError(f"priors has {unknown}, which are no terms: use {', '.join(known)}.")
    pairs = {name: _pair(name, prior) for name, prior in priors.items()}
    result = [(0.0, deviation)] * len(design.labels)
    for name, place in design.terms.items():
        for number in range(place.start, place.stop):
            pair = pairs.get(design.labels[number], pairs.get(name))
            if pair is not None:
                factor = design.scale[number] / unit
                result[number] = (pair[0] * factor, pair[1] * factor)
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


def _outcome_values(design: Design, family: str, outcome: Outcome, data: TableData) -> np.ndarray:
    name = design.outcome
    column = design.schema.columns[name]
    if not isinstance(column, Numeric):
        values = design.schema.part([name]).arrays(data)[name]
        return column.encode(name, values).astype(np.float32)
    numbers = _numbers_within(design.schema, name, data, design.outside)
    if family == "ordinal":
        return (numbers - column.lower).astype(np.float32)
    if family == "normal":
        numbers = design.transformed_outcome(numbers)
        if not np.isfinite(numbers).all():
            raise ValueError(
                f"the outcome {design.outcome_text} is not finite in "
                f"{check.rows(~np.isfinite(numbers))}: use np.log1p, or other bounds."
            )
        numbers = (numbers - outcome.location) / outcome.scale
    return numbers.astype(np.float32)
