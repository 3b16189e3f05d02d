"""`rehearse_regression`: what `dpvi.regression` will give, from a schema and without data."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.data import Schema
from tfp_dpvi.data.columns import Numeric, is_missing
from tfp_dpvi.privacy import PrivacyLedger
from tfp_dpvi.regressions.correlated import partial_correlations
from tfp_dpvi.regressions.design import Design
from tfp_dpvi.regressions.families import likelihood, make_prior
from tfp_dpvi.regressions.fit import described, public_inputs
from tfp_dpvi.regressions.measured import SHARES, Measurement, Terms, undescribed, with_typical
from tfp_dpvi.regressions.outcomes import TYPICAL
from tfp_dpvi.regressions.parts import Parts
from tfp_dpvi.regressions.words import in_own_words
from tfp_dpvi.rehearsal.call import RehearsalPlan, run
from tfp_dpvi.rehearsal.result import Rehearsal
from tfp_dpvi.rehearsal.simulated import Inputs, Subject, Truth, make_inputs

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

# The median of a half-normal distribution of scale 1.
_HALF_NORMAL_MEDIAN = 0.6745
_MOST_NAMED = 12
# Records whose columns' typical values a fit would release.
_NUM_TYPICAL = 4096


def rehearse_regression(
    formula: str,
    family: str,
    schema: Schema | Mapping[str, Any],
    *,
    num_records: int | Sequence[int],
    epsilon: float | Sequence[float],
    delta: float,
    truth: Mapping[str, float] | None = None,
    num: int = 100,
    public_data: TableData | None = None,
    priors: Mapping[str, Any] | None = None,
    missing: str | None = None,
    outside: str = "refuse",
    constants: Mapping[str, Any] | None = None,
    level: float = 0.94,
    seed: int = 0,
    path: str | os.PathLike[str] | None = None,
    verbose: int = 1,
) -> Rehearsal:
    """Says what `dpvi.regression` will give, before it sees a record: the power analysis.

    Invented records of the schema get outcomes of the family, from given coefficients or from the
    priors, and `regression` fits them. It reads no private record, and costs no privacy.

    The schema's columns are independent, and have their typical values: where private columns are
    correlated, intervals are wider. `public_data` has columns that are like them.

    Args:
      formula: As in `regression`.
      family: As in `regression`.
      schema: As in `regression`; its typical values and shares matter most here.
      num_records: The number of records of the planned fit, or several of them.
      epsilon: The budget of the fit, or several of them.
      delta: Its delta.
      truth: True values by the names of `Regression.summary`, in the units of the formula: the
        effect whose power is asked for, such as {"age": 0.02}. Coefficients that are not named are
        at their prior means, the intercept and "sigma" at the typical values, "alpha" at 1, "nu"
        and "kappa" at 10, "zero" at 0.2, and levels of groups are drawn. None draws everything from
        the priors, which are wide: such data sets are often unlike any real ones.
      num: The number of data sets for each number of records and epsilon.
      public_data: A data set with public or invented covariates, whose rows are drawn with
        replacement; None for invented records of the schema.
      priors: As in `regression`.
      missing: As in `regression`.
      outside: As in `regression`.
      constants: As in `regression`.
      level: The probability of the intervals, which are central.
      seed: The seed of data sets and noise.
      path: A file for the results of each fit, as in `rehearse`.
      verbose: 0 for no progress bar.

    Returns:
      The `Rehearsal`, in the units of the formula.

    Raises:
      ImportError: formulae is not installed.
      ValueError: An argument does not fit, or the file is of another rehearsal.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> schema = {
    ...     "visits": {"type": "integer", "lower": 0, "upper": 60},
    ...     "age": {"type": "integer", "lower": 18, "upper": 90},
    ... }
    >>> budget = {"epsilon": 1.0, "delta": 1e-5}
    >>> dpvi.rehearse_regression(
    ...     "visits ~ age", "poisson", schema, num_records=900, truth={"sex": 0.1}, **budget
    ... )
    Traceback (most recent call last):
    ...
    ValueError: truth names 'sex', which the regression has not: use Intercept, age.

    ```

    #### Formal guarantee

    A function of its arguments, which are public.
    """
    settings: dict[str, Any] = {"missing": missing, "outside": outside, "constants": constants}
    plan = RehearsalPlan.checked(num_records, epsilon, delta, num=num, level=level, seed=seed)
    design, parts = described(formula, family, schema, priors, None, **settings)
    before = _Before(design.schema, plan)
    in_family = functools.partial(
        _subject, truth=truth, public_data=public_data, clips=outside == "clip"
    )
    subject = in_family(design, parts)
    if before.is_made:
        # The fit would have typical values of these data sets.
        values = design.simulated(_NUM_TYPICAL, plan.seed) if public_data is None else public_data
        known = dict(design.schema.part(tuple(design.covariates)).arrays(values))
        if truth is not None and not design.has_transformed_outcome:
            outcomes = subject.simulate(_NUM_TYPICAL, plan.seed, 0).y
            known[design.outcome] = _outcomes_in_units(np.asarray(outcomes), design, parts)
        design, parts = described(formula, family, before.schema(known), priors, None, **settings)
        subject = dataclasses.replace(in_family(design, parts), ledger=before.ledger)
    return run(subject, plan, path, verbose)


def _subject(
    design: Design,
    parts: Parts,
    *,
    truth: Mapping[str, float] | None,
    public_data: TableData | None,
    clips: bool,
) -> Subject:
    """Returns what is rehearsed: the model, its data sets, and what a regression reports."""
    prior = make_prior(**parts.prior)
    model = BayesianModel(prior, functools.partial(likelihood, **parts.likelihood))
    draw = Truth(prior, None if truth is None else _on_model_scale(truth, design, parts))
    names = _names_in_units(design, parts)

    def named(draws: Structure) -> np.ndarray:
        in_units = parts.in_units(_arrays(draws), design)
        return np.stack([in_units[name] for name in names], axis=1)

    def inputs(size: int, seed: int) -> np.ndarray:
        return parts.inputs(design.rows(design.simulated(size, seed)))

    coordinates = Coordinates(prior, log_scales=True)
    places = {name: place for place, name in enumerate(coordinates.names)}
    inner = parts.names_of_model(design)
    return Subject(
        model=model,
        names=names,
        inputs=inputs if public_data is None else _rows_of(public_data, design, parts),
        public_inputs=public_inputs(design, parts),
        draw=draw,
        named=named,
        fixed=_fixed(draw, named, names),
        inner=np.array([places.get(inner.get(name, ""), -1) for name in names]),
        bounds=_bounds(design, parts),
        clips=clips,
        in_words=functools.partial(
            in_own_words, family=parts.family, names=inner, is_censored=design.limit is not None
        ),
    )


def _outcomes_in_units(outcomes: np.ndarray, design: Design, parts: Parts) -> np.ndarray:
    """Returns simulated outcomes of the model as the records' column has them."""
    column = design.schema.columns[design.outcome]
    if isinstance(column, Numeric) and parts.family == "ordinal":
        return outcomes + column.lower
    scaled = parts.kind.is_scaled
    return parts.outcome.location + parts.outcome.scale * outcomes if scaled else outcomes


class _Before:
    """The release of typical values before a fit, of columns of which bounds alone are known.

    Args:
      schema: The description of the columns.
      plan: The settings.

    Attributes:
      is_made: Whether it is made for each number of records and epsilon.
    """

    def __init__(self, schema: Schema, plan: RehearsalPlan) -> None:
        self._schema, self._columns = schema, undescribed(schema)
        cells = itertools.product(plan.num_records, plan.epsilon)
        self.is_made = bool(self._columns) and all(
            self._measurement(PrivacyLedger(), *cell, plan.delta).can_show for cell in cells
        )

    def ledger(self, num_records: int, epsilon: float, delta: float) -> PrivacyLedger:
        """Returns a ledger with what is released before a fit.

        Args:
          num_records: The number of records.
          epsilon: The epsilon of both.
          delta: Its delta.
        """
        ledger = PrivacyLedger()
        if self.is_made:
            self._measurement(ledger, num_records, epsilon, delta).charge()
        return ledger

    def schema(self, values: Mapping[str, np.ndarray]) -> Schema:
        """Returns the schema with typical values of numbers.

        Args:
          values: Values of columns, as data sets have them; others stay as they are.
        """
        columns = dict(self._schema.columns)
        for name in self._columns:
            column = columns[name]
            if name in values and isinstance(column, Numeric):
                array = np.asarray(values[name])
                numbers = column.to_numbers(array[~is_missing(array)])
                columns[name] = with_typical(column, float(numbers.mean()), float(numbers.std()))
        return Schema(columns)

    def _measurement(
        self, ledger: PrivacyLedger, num_records: int, epsilon: float, delta: float
    ) -> Measurement:
        terms = Terms(epsilon, delta, num_records)
        return Measurement.chosen(self._schema, self._columns, ledger, SHARES, terms)


def _names_in_units(design: Design, parts: Parts) -> tuple[str, ...]:
    """Returns the names of all numbers that a regression reports."""
    example = make_prior(**parts.prior).sample(1, seed=tf.constant([0, 1], tf.int32))
    return tuple(parts.in_units(_arrays(example), design))


def _arrays(draws: Structure) -> dict[str, np.ndarray]:
    return {name: np.asarray(part, np.float64) for name, part in dict(draws).items()}


def _rows_of(data: TableData, design: Design, parts: Parts) -> Inputs:
    """Returns a function that draws design rows of a public data set."""
    return make_inputs(parts.inputs(design.rows(data)))


def _fixed(draw: Truth, named: Any, names: Sequence[str]) -> dict[str, float]:
    """Returns the numbers that are the same in every draw, by name."""
    if not draw.fixed:
        return {}
    first, second = (
        named(tf.nest.map_structure(lambda part: part[None], draw(np.array([0, seed]))))[0]
        for seed in (1, 2)
    )
    same = np.isclose(first, second, rtol=1e-6, atol=0.0)
    return {name: float(first[place]) for place, name in enumerate(names) if same[place]}


def _bounds(design: Design, parts: Parts) -> tuple[float, float] | None:
    """Returns the ends of outcomes on the model's scale, or None where the family has its own."""
    column = design.schema.columns[design.outcome]
    if not isinstance(column, Numeric) or parts.family == "ordinal":
        return None
    ends = np.array([column.lower, column.upper], np.float64)
    if parts.kind.is_scaled:
        ends = (design.transformed_outcome(ends) - parts.outcome.location) / parts.outcome.scale
    low, high = sorted(ends.tolist())
    return low, high


def _on_model_scale(
    truth: Mapping[str, float], design: Design, parts: Parts
) -> dict[str, np.ndarray]:
    """Returns true parameters of the model, from values in the units of the formula.

    Args:
      truth: The values by name.
      design: The design.
      parts: The model's description.

    Raises:
      ValueError: A name is unknown, or a value is no finite number.
    """
    names = parts.names_of_model(design)
    # Shares of a monotone effect are functions of several parameters.
    reported = _names_in_units(design, parts)
    known = [name for name in reported if name in names or name.startswith("threshold[")]
    if not isinstance(truth, Mapping) or not truth:
        raise ValueError("truth must be a dict such as {'age': 0.02}, or None.")
    if unknown := [name for name in truth if name not in known]:
        raise ValueError(
            f"truth names {unknown[0]!r}, which the regression has not: use "
            f"{', '.join(known[:_MOST_NAMED])}."
        )
    values = {
        name: check.real(f"truth[{name!r}]", value, "pass a finite number")
        for name, value in truth.items()
    }
    if infinite := [name for name, value in values.items() if not np.isfinite(value)]:
        raise ValueError(f"truth[{infinite[0]!r}] must be finite.")
    unit = parts.outcome.scale
    given = _typical(parts)
    scale, location = np.array(parts.scale), np.array(parts.location)
    num = parts.layout.num_common
    for name, value in values.items():
        inner, place = _split(names.get(name, ""))
        if inner == "coefficients":
            given["coefficients"][place] = value * scale[place % num] / unit
        elif inner == "group":
            group = design.groups[parts.layout.group_index[place]]
            given[names[name]] = np.array(value * group.scale / unit)
        elif inner == "group_sd":
            given["group_sd"][place] = value * design.groups[place].scale / unit
        elif inner in TYPICAL:
            given[inner] = np.array(value / (unit if inner == "sigma" else 1.0))
    if cors := [values.get(name, 0.0) for name in parts.correlations(design)]:
        given["group_cor"] = partial_correlations(cors, parts.layout.correlated)
    slopes = given.get("coefficients", np.zeros(0)).reshape(-1, max(num, 1)) * unit
    shift = slopes @ (location / scale) if num else np.zeros(len(given.get("intercept", [0.0])))
    for name, value in values.items():
        if names.get(name, "").startswith("intercept"):
            place = _split(names[name])[1]
            given["intercept"][place] = (value - parts.base + shift[place]) / unit
    cuts = [values.get(name) for name in known if name.startswith("threshold[")]
    if any(cut is not None for cut in cuts):
        _set_thresholds(given, cuts, float(shift[0]))
    if parts.family != "categorical" and "intercept" in given:
        given["intercept"] = given["intercept"][0]
    return given


def _split(name: str) -> tuple[str, int]:
    """Returns a parameter and the number of its entry, of a name such as "coefficients[2]"."""
    parameter, *entry = name.rstrip("]").split("[")
    return parameter, int(entry[0]) if entry else 0


def _set_thresholds(given: dict[str, np.ndarray], cuts: list[float | None], shift: float) -> None:
    """Sets an ordinal outcome's first threshold and distances."""
    present = np.array([cut for cut in cuts if cut is not None], np.float64)
    if len(present) < len(cuts) or (np.diff(present) <= 0.0).any():
        raise ValueError("truth must have all thresholds, in increasing order, or none of them.")
    given["threshold"] = np.array(present[0] - shift)
    if len(present) > 1:
        given["gaps"] = np.diff(present)


def _typical(parts: Parts) -> dict[str, np.ndarray]:
    """Returns parameters that a truth need not name, on the model's scale."""
    layout, outcome = parts.layout, parts.outcome
    given: dict[str, np.ndarray] = {}
    if layout.num_common:
        means = np.array([mean for mean, _ in parts.coefficients], np.float64)
        given["coefficients"] = np.tile(means, outcome.blocks)
    if parts.family == "ordinal":
        given["threshold"] = np.array(parts.intercept[0])
        if outcome.levels > 2:
            given["gaps"] = np.diff(np.array(outcome.cuts, np.float64))
    elif layout.has_intercept:
        given["intercept"] = np.full(outcome.blocks, parts.intercept[0], np.float64)
    own = parts.kind.own(outcome)
    given.update({name: np.array(TYPICAL[name]) for name in own if name in TYPICAL})
    if layout.group_sizes:
        given["group_sd"] = np.full(len(layout.group_sizes), _HALF_NORMAL_MEDIAN)
    return given
