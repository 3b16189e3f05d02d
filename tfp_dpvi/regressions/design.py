"""Design rows: each is a function of one record and the schema alone.

formulae parses a formula and fixes all that it would take from a table (levels, knots, means) on
invented records of the schema. Private records are evaluated afterwards, with operators that act on
each value by itself.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data import Binary, Categorical, Column, Date, Integer, Schema
from tfp_dpvi.data.columns import Numeric, converted, is_missing
from tfp_dpvi.regressions.correlated import correlated_effects
from tfp_dpvi.regressions.responses import (
    MODULES,
    UFUNCS,
    Argument,
    Call,
    calls_of,
    comparisons_of,
    is_of_one_value,
    is_read_otherwise,
    limit_of,
    response_of,
    trials_of,
    ufunc_of,
)
from tfp_dpvi.regressions.transforms import TRANSFORMS, in_words, set_typical

if TYPE_CHECKING:
    import pandas
    from scipy import sparse

    from tfp_dpvi.data.schema import TableData

NUM_REFERENCE = 4000
"""Invented records from which levels, knots, locations and scales are taken."""

MOST_LEVELS = 500
"""Levels of an integer column that a formula may take as categories."""

MISSING_LEVEL = "missing"

CATEGORIES = ("C", "T", "S")
MONOTONE = "mo"
PLAIN = ("I", "offset")
_QUOTED = re.compile(r"`.*?`|'.*?'|\".*?\"")
_BARS = re.compile(rf"({_QUOTED.pattern})|\|\|")
# Columns without typical values may vary so many times less than a quarter of the bounds' distance.
_WIDENING = 4.0
# Of invented numbers, the share that is moved; to the lower bound, the typical value, the upper
# one; and the least distance that is left, times that before.
_MOVED = 0.75
_TOWARDS = (0.6, 0.2, 0.2)
_NEAREST = 0.01
# Missing covariates that are invented for the reference.
_SHARE_MISSING = 0.1
_FUNCTIONS = "a function of NumPy of each value (np.log), or " + ", ".join(
    (*PLAIN, *CATEGORIES, MONOTONE, *TRANSFORMS)
)


@dataclasses.dataclass(frozen=True)
class Rows:
    """Design rows of records.

    Attributes:
      common: Columns in the units of the formula, without an intercept, float64 [n, p].
      offset: Sum of the offsets, float64 [n].
      groups: Columns of group effects, on the model's scale, float32 [n, all levels].
      trials: Numbers of trials, float32 [n, 1], or [n, 0] without any.
      limits: The limits of censored outcomes, in the outcome's units, float64 [n, 1], or [n, 0]
        without any.
    """

    common: np.ndarray
    offset: np.ndarray
    groups: np.ndarray
    trials: np.ndarray
    limits: np.ndarray


@dataclasses.dataclass(frozen=True)
class Group:
    """Effects of the levels of a group: intercepts, or slopes of a term.

    Attributes:
      name: Its name, such as "1|county" or "age|county".
      labels: The names of its coefficients.
      location: What is subtracted from the term of slopes, if the group has intercepts as well.
      scale: What the term is divided by.
    """

    name: str
    labels: tuple[str, ...]
    location: float = 0.0
    scale: float = 1.0

    @property
    def is_slope(self) -> bool:
        """True if effects are slopes of a term, and not intercepts."""
        return not self.name.startswith("1|")

    @property
    def intercepts(self) -> str:
        """The name of the same group's intercepts."""
        return f"1|{self.name.rpartition('|')[2]}"


class Design:
    """The design of a formula for a schema.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.data import Categorical, Continuous, Integer, Schema
    >>> schema = Schema({
    ...     "visits": Integer(0, 50),
    ...     "age": Continuous(17.0, 90.0),
    ...     "ward": Categorical(["A", "B", "C"]),
    ... })
    >>> design = Design("visits ~ age + ward", schema)
    >>> design.labels
    ('age', 'ward[B]', 'ward[C]')
    >>> knots = {"knots": [40.0]}
    >>> len(Design("visits ~ bs(age, knots=knots)", schema, constants=knots).labels)
    4
    >>> design.rows({"age": np.array([30.0]), "ward": np.array(["C"], object)}).common.tolist()
    [[30.0, 0.0, 1.0]]

    ```

    Args:
      formula: A formula of formulae, "outcome ~ terms".
      schema: The public description of the columns.
      missing: None, or "indicator": a missing covariate takes its typical value, or a level of its
        own, and an indicator column.
      outside: "refuse", or "clip" for covariates outside of their bounds.
      constants: Public numbers or lists that the formula names, such as knots.

    Attributes:
      formula: The formula.
      schema: The description of the formula's columns alone.
      outcome: The name of the outcome's column.
      trials: The column of numbers of trials, or their public number, of an outcome `p(y, n)`; else
        None.
      limit: The limit of an outcome `censored(y, limit)`; else None.
      labels: Names of the common columns.
      terms: Slices of the common columns by the names of terms.
      monotone: The first and the last common column of each monotone effect, by name; the last one
        is excluded.
      groups: The group effects.
      correlated: Places of the group effects that are correlated with each other.
      has_intercept: Whether the formula has an intercept.
      location: What the model subtracts from each common column, float64 [p].
      wide: Which coefficients are of each column of numbers without typical values, bool [w, p].
      widening: By how much wider default priors are, since columns without typical values may vary
        less than their bounds say, float64 [p].
      scale: What it divides them by, float64 [p]: 1 for dummies.

    Raises:
      ImportError: formulae is not installed.
      ValueError: The formula cannot be read, or uses unknown columns or operators that are not
        functions of one record.
    """

    def __init__(
        self,
        formula: str,
        schema: Schema,
        *,
        missing: str | None = None,
        outside: str = "refuse",
        constants: Mapping[str, Any] | None = None,
    ) -> None:
        self.formula = check.text("formula", formula, 'pass "outcome ~ terms"')
        # formulae knows one bar alone.
        self._plain = _BARS.sub(lambda found: found[1] or "|", self.formula)
        if missing not in (None, "indicator"):
            raise ValueError(f'missing={check.shown(missing)} must be None or "indicator".')
        self.outside = check.one_of("outside", outside, ("refuse", "clip"))
        self.missing = missing
        if not isinstance(constants, Mapping | None):
            raise TypeError(
                "constants must be a dict of numbers and lists, such as {'knots': [3]}."
            )
        self.constants = dict(constants or {})
        self._formulae = _import_formulae()
        description = self._parsed()
        self.outcome, self._response = response_of(description)
        self.trials = trials_of(self._response, self.outcome, schema, self.constants)
        self.limit = limit_of(self._response, self.outcome, schema, self.constants)
        names = self._checked_names(description, schema)
        self.schema = schema.part(names)
        self._names = tuple(name for name in names if name != self.outcome)
        self._incomplete = tuple(name for name in self._names if schema.columns[name].missing)
        self._check_incomplete()
        self._matrices = self._evaluated(self._reference())
        self._set_columns()

    # ------------------------------------------------------------------ the formula

    def _parsed(self) -> Any:
        unquoted = _QUOTED.sub("", self._right_side)
        if argument := re.search(r"(\w+)\s*=\s*\[", unquoted):
            raise ValueError(
                f"formula has a list: name it, such as {argument[1]}=k, and pass it as "
                "constants={'k': [...]}."
            )
        if "[" in unquoted:
            # formulae would take all levels of such a column.
            raise ValueError(
                "formula has the level of a covariate, x[level]: write {x == 'level'} for it alone."
            )
        with _errors(self.formula):
            tokens = self._formulae.scanner.Scanner(self._plain).scan()
            parser = self._formulae.parser.Parser(tokens)
            tree = parser.parse()
            if not parser.at_end():
                # formulae would leave out what follows.
                raise ValueError(
                    f"formula has {parser.peek().lexeme} where no term can go on: write arithmetic "
                    "and comparisons in braces, such as {x > 3}."
                )
            if is_read_otherwise(tree):
                raise ValueError(
                    "formula has -a ** b, a ** b ** c or a < b < c, not read as in Python: write "
                    "parentheses, as in {-(a ** b)} and {(a < b) * (b < c)}."
                )
            description = self._formulae.model_description(self._plain)
            self._correlated = correlated_effects(
                tree,
                tokens,
                _QUOTED.sub("", self.formula),
                lambda part: self._formulae.resolver.Resolver(part).resolve(),
            )
            return description

    def _checked_names(self, description: Any, schema: Schema) -> list[str]:
        for name in self.constants:
            if name in (*schema.columns, *MODULES):
                kind = "NumPy" if name in MODULES else "a column"
                raise ValueError(f"constants has {name!r}, which is {kind}: rename it.")
        # A number that stands for a term is a name to formulae.
        used = sorted(map(str, description.var_names - self.constants.keys() - {""}))
        if unknown := [name for name in used if name not in schema.columns]:
            raise ValueError(
                f"formula uses {', '.join(map(repr, unknown))}, which the schema lacks: it has "
                f"{', '.join(schema.names)}."
            )
        terms = [term.name for term in description.common_terms]
        if repeated := {name for name in terms if terms.count(name) > 1} - {"Intercept"}:
            # formulae leaves out parentheses in names, and would keep the last of these terms.
            raise ValueError(
                f"formula has two terms named {min(repeated)}, without parentheses: derive one of "
                "them as a column of its own."
            )
        terms = [*description.common_terms, *description.group_terms]
        if any(self.outcome in getattr(term, "var_names", ()) for term in terms):
            raise ValueError(f"formula has the outcome {self.outcome!r} as a term: leave it out.")
        calls = calls_of(description)
        for call in calls:
            self._check_call(call, schema)
        alone = [term for term in terms if term.name in map(str, calls)]
        offsets = sum(term.name.startswith("offset(") for term in alone)
        if sum(call.callee == "offset" for call in calls) > offsets:
            raise ValueError("formula has an offset within a term: add it alone, + offset(x).")
        for term in terms:
            if re.search(rf"\b{MONOTONE}\(", term.name) and not _is_monotone(term.name):
                raise ValueError(
                    f"formula has {term.name}: {MONOTONE}(x) stands alone, without interactions, "
                    "groups or functions."
                )
        for left, right in comparisons_of(calls):
            _check_comparison(left, right, schema)
            _check_comparison(right, left, schema)
        for term in description.group_terms:
            for part in term.factor.components:
                self._check_categories(str(part.name), schema.columns.get(str(part.name)))
        if dates := [name for name in used if isinstance(schema.columns[name], Date)]:
            raise ValueError(
                f"formula uses the date {dates[0]!r}: derive a number, such as days since a date."
            )
        return [name for name in schema.names if name in used]

    def _check_call(self, call: Call, schema: Schema) -> None:
        name = call.callee
        if name == MONOTONE:
            _check_steps(call, schema)
            return
        if name in CATEGORIES:
            column = str(call.args[0]) if call.args else ""
            self._check_categories(column, schema.columns.get(column))
            if isinstance(schema.columns.get(column), Categorical):
                raise ValueError(
                    f"formula: write {column} instead of {call}: the schema has its levels, and "
                    "the first one is the reference."
                )
            if "levels" in call.kwargs:
                raise ValueError(f"formula: leave out levels of {name}(): the schema has them.")
        elif name not in (*TRANSFORMS, *PLAIN) and ufunc_of(name) is None:
            raise ValueError(f"formula: {name}() is no function of one record: use {_FUNCTIONS}.")
        elif ufunc_of(name) is not None and not is_of_one_value(call):
            raise ValueError(f"formula has {call}: {name}() takes one value and nothing else.")

    def _check_categories(self, name: str, column: Column | None) -> None:
        if isinstance(column, (Categorical, Binary)):
            return
        if isinstance(column, Integer) and column.upper - column.lower < MOST_LEVELS:
            return
        raise ValueError(
            f"formula takes {name!r} as categories, whose levels must be public: describe it as "
            "Categorical in the schema."
        )

    def _check_incomplete(self) -> None:
        if self._incomplete and self.missing is None:
            raise ValueError(
                f"columns {', '.join(self._incomplete)} may have missing values: pass "
                'missing="indicator", or fill them by a public rule and describe them without '
                "missing=True."
            )
        for name in self._incomplete:
            if MISSING_LEVEL in getattr(self.schema.columns[name], "categories", ()):
                raise ValueError(
                    f"column {name!r} has the category {MISSING_LEVEL!r}, which missing values "
                    "would be: rename it, or make missing values it and leave out missing=True."
                )

    # ------------------------------------------------------------------ tables

    def _reference(self) -> pandas.DataFrame:
        """Returns invented records which have all levels, the bounds, and missing values."""
        columns = self.schema.simulate(NUM_REFERENCE)
        generator = np.random.default_rng(1)
        # Every level and bound is there, so that what formulae learns of them is the schema's.
        ends = {name: _levels(column) for name, column in self.schema.columns.items()}
        num = max(len(levels) for levels in ends.values())
        self._ends: dict[str, np.ndarray] = {}
        for name, levels in ends.items():
            padded = [levels[place % len(levels)] for place in range(num)]
            self._ends[name] = np.array(padded, object)
            columns[name] = np.concatenate([self._ends[name], columns[name]])
            if name in self._incomplete:
                absent = generator.random(len(columns[name])) < _SHARE_MISSING
                absent[:num] = False
                columns[name] = columns[name].astype(object)
                columns[name][absent] = None
        return self._frame(columns, self.schema.names)[0]

    def _frame(
        self, arrays: Mapping[str, np.ndarray], names: Sequence[str]
    ) -> tuple[pandas.DataFrame, np.ndarray]:
        """Returns columns as formulae reads them, and indicators of missing values [n, m]."""
        import pandas

        frame = {}
        indicators = []
        for name in names:
            column, values = self.schema.columns[name], arrays[name]
            absent = is_missing(values)
            frame[name] = self._values(name, column, values, absent)
            if name in self._incomplete and not isinstance(column, Categorical):
                indicators.append(absent)
        num = len(arrays[names[0]]) if names else 0
        found = np.stack(indicators, axis=1) if indicators else np.zeros([num, 0])
        return pandas.DataFrame(frame), found.astype(np.float64)

    def _values(self, name: str, column: Column, values: np.ndarray, absent: np.ndarray) -> Any:
        import pandas

        if isinstance(column, Numeric):
            numbers, strange = converted(column.to_numbers, _present(values, absent))
            present = ~absent & ~strange
            if self.outside == "clip":
                numbers[present] = np.clip(numbers[present], column.lower, column.upper)
                values = np.where(present, numbers, values)
            column.encode(name, values)
            numbers = numbers.astype(np.float64)
            numbers[absent] = column.location
            return numbers
        codes = column.encode(name, values)
        if isinstance(column, Categorical):
            levels = list(column.categories)
            if name in self._incomplete:
                levels = [*levels, MISSING_LEVEL]
                codes = np.where(absent, len(levels) - 1, codes)
            return pandas.Categorical.from_codes(codes, categories=levels, ordered=True)
        return np.where(absent, 0, codes).astype(np.float64)

    def _evaluated(self, frame: pandas.DataFrame) -> Any:
        steps = functools.partial(_steps, self.schema)
        environment = self._formulae.environment.Environment(
            [{"np": UFUNCS, "numpy": UFUNCS, **self.constants, MONOTONE: steps}]
        )
        # Of an outcome of two columns formulae would check the invented ones.
        formula = self._right_side if self._has_two_columns else self._plain
        with _errors(self.formula), np.errstate(all="ignore"):
            description = self._formulae.model_description(formula)
            for term in description.common_terms:
                # Terms of a / b share components, whose columns formulae would then confuse.
                term.components = copy.deepcopy(getattr(term, "components", []))
            self._calls = calls_of(description)
            transforms = self._formulae.transforms.TRANSFORMS
            set_typical(self._calls, self.schema, transforms, len(frame) - NUM_REFERENCE)
            return self._formulae.matrices.DesignMatrices(description, frame, environment)

    # ------------------------------------------------------------------ columns

    def _set_columns(self) -> None:
        labels: list[str] = []
        terms: dict[str, slice] = {}
        self._offsets: list[slice] = []
        self._kept: list[int] = []
        common = self._matrices.common
        self.has_intercept = common is not None and "Intercept" in common.terms
        for name, term in common.terms.items() if common is not None else ():
            place = common.slices[name]
            if term.kind == "offset":
                self._offsets.append(place)
            elif name != "Intercept":
                if len(term.labels) != place.stop - place.start:
                    raise ValueError(f"formula has {name}, without a column: raise its degree.")
                terms[name] = slice(len(labels), len(labels) + place.stop - place.start)
                labels += map(_short, self._steps_of(name) or term.labels)
                self._kept += range(place.start, place.stop)
        for name in self._incomplete:
            if not isinstance(self.schema.columns[name], Categorical):
                label = f"{name}[{MISSING_LEVEL}]"
                terms[label] = slice(len(labels), len(labels) + 1)
                labels.append(label)
        self.labels, self.terms = tuple(labels), terms
        self.monotone = {
            name: (place.start, place.stop) for name, place in terms.items() if _is_monotone(name)
        }
        groups = self._matrices.group
        self.groups = tuple(
            Group(name, tuple(map(_short, term.labels)))
            for name, term in (groups.terms.items() if groups is not None else ())
        )
        for group in self.groups:
            if len({label.rpartition("|")[2] for label in group.labels}) < len(group.labels):
                raise ValueError(
                    f"formula has ({group.name}), several slopes of each level: slopes are of one "
                    "number each, (a + b | g), or write an interaction, x:g."
                )
        names = [group.name for group in self.groups]
        self.correlated = tuple(tuple(map(names.index, block)) for block in self._correlated)
        if not labels and not self.has_intercept and not self.groups:
            raise ValueError("formula has no terms: write, for instance, y ~ 1 + x.")
        self._set_scaling()

    def _steps_of(self, term: str) -> list[str]:
        """Returns the labels of a monotone effect's steps, each that up to a level; else none."""
        if not _is_monotone(term):
            return []
        levels = _levels(self.schema.columns[_column_of(term)])
        return [f"{term}[{level}]" for level in levels[1:]]

    @property
    def parameters(self) -> list[str]:
        """Names of the coefficients of the model, [p]: of a monotone effect, its sum and shares."""
        names = list(self.labels)
        for term, (start, stop) in self.monotone.items():
            shares = [f"share {number} of {term}" for number in range(1, stop - start)]
            names[start:stop] = [term, *shares]
        return names

    def _set_scaling(self) -> None:
        # Terms that are not finite at a bound are refused here, before records are read.
        self.rows({name: self._ends[name] for name in self._names or self.schema.names})
        records = self.simulated(NUM_REFERENCE)
        rows = self.rows(records)
        reference = rows.common
        deviations = reference.std(axis=0)
        is_dummy = np.isin(reference, (-1.0, 0.0, 1.0)).all(axis=0)
        self.scale = np.where(is_dummy | (deviations <= 0.0), 1.0, deviations)
        centre = ~is_dummy & self.has_intercept
        self.location = np.where(centre, reference.mean(axis=0), 0.0)
        wide = [name for name in records if is_wide(self.schema.columns[name])]
        changed = [self.rows({**records, name: records[name][::-1]}).common for name in wide]
        are_changed = [np.any(other != reference, axis=0) & ~is_dummy for other in changed]
        self.wide = np.array(are_changed).reshape(len(wide), reference.shape[1])
        self.widening = np.where(self.wide.any(axis=0), _WIDENING, 1.0)
        self.groups = tuple(self._scaled(group, rows) for group in self.groups)

    def _scaled(self, group: Group, rows: Rows) -> Group:
        """Returns a group whose slopes are of a term with typical deviation 1."""
        # Each record has one level, so that the sum over levels is the term.
        term = rows.groups[:, self._matrices.group.slices[group.name]].sum(axis=1, dtype=np.float64)
        if not group.is_slope or np.isin(term, (-1.0, 0.0, 1.0)).all() or not term.std():
            return group
        has_intercepts = group.intercepts in self._matrices.group.slices
        location = float(term.mean()) if has_intercepts else 0.0
        return dataclasses.replace(group, location=location, scale=float(term.std()))

    def _group_columns(self, found: sparse.csc_matrix) -> np.ndarray:
        """Returns columns of group effects on the model's scale, float32 [n, all levels]."""
        slices, columns = self._matrices.group.slices, []
        for group in self.groups:
            part = found[:, slices[group.name]].toarray()
            if group.location:
                part = part - group.location * found[:, slices[group.intercepts]].toarray()
            columns.append((part / group.scale).astype(np.float32))
        return np.concatenate(columns, axis=1)

    def simulated(self, num: int, seed: int = 0, *, near: bool = False) -> dict[str, np.ndarray]:
        """Returns invented records of the covariates, some with missing values.

        Args:
          num: The number of records.
          seed: The seed.
          near: Whether many numbers without typical ones are nearer to one another than bounds
            say: these are often far wider than what lies between them, most of it near one of them.
        """
        records = self.schema.simulate(num, seed)
        generator = np.random.default_rng([seed, 1])
        for name, column in self.schema.columns.items():
            if near and is_wide(column):
                records[name] = _moved_near(column, records[name], generator)
        for name in self._incomplete:
            records[name] = records[name].astype(object)
            records[name][generator.random(num) < _SHARE_MISSING] = None
        return {name: records[name] for name in self._names or self.schema.names}

    def rows(self, data: TableData, *, with_limits: bool = True) -> Rows:
        """Returns the design rows of records, in their order; none is dropped.

        Args:
          data: A data set with the covariates' columns; others are ignored.
          with_limits: Whether limits of censored outcomes are read, which predictions do not need.

        Raises:
          ValueError: A column is absent, or a value is missing or not allowed; or a term is not
            finite, such as the logarithm of 0.
        """
        beside = "" if with_limits else self.limit_column
        names = tuple(name for name in self._names if name != beside)
        if not names:
            columns: Any = getattr(data, "columns", data)
            num = len(data[next(iter(columns))])
            none = np.zeros([num, 0])
            return Rows(
                none,
                np.zeros(num),
                none.astype(np.float32),
                *self._trials_and_limits({}, num, with_limits),
            )
        arrays = self.schema.part(names).arrays(data)
        frame, indicators = self._frame(arrays, names)
        num = len(frame)
        common, groups = self._matrices.common, self._matrices.group
        with _private(self.formula), np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            matrix = np.zeros([num, 0])
            if common is not None:
                matrix = np.asarray(common.evaluate_new_data(frame).design_matrix, np.float64)
            levels = np.zeros([num, 0], np.float32)
            if groups is not None:
                found = groups.evaluate_new_data(frame).design_matrix
                levels = self._group_columns(found.tocsc())
        offset = sum((matrix[:, place].sum(axis=1) for place in self._offsets), np.zeros(num))
        result = np.concatenate([matrix[:, self._kept], indicators], axis=1)
        slopes = [group.name for group in self.groups if group.is_slope]
        terms = [levels[:, groups.slices[name]].sum(axis=1) for name in slopes]
        self._check_finite((*self.labels, "offset", *slopes), (*result.T, offset, *terms))
        return Rows(result, offset, levels, *self._trials_and_limits(frame, num, with_limits))

    def _trials_and_limits(
        self, frame: pandas.DataFrame | dict[str, np.ndarray], num: int, with_limits: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns numbers of trials and limits of outcomes, [n, 1] each, or [n, 0] without any."""
        limit = self.limit.at if self.limit is not None and with_limits else None
        return _beside(frame, num, self.trials).astype(np.float32), _beside(frame, num, limit)

    def _check_finite(self, labels: Sequence[str], columns: Sequence[np.ndarray]) -> None:
        for label, values in zip(labels, columns, strict=True):
            if not np.isfinite(values).all():
                raise ValueError(
                    f"term {label!r} is not finite in {check.rows(~np.isfinite(values))}: choose "
                    "bounds or a term for which it is, such as np.log1p instead of np.log."
                )

    def transformed_outcome(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the outcome as the formula has it, for instance its logarithm.

        Args:
          numbers: The outcome's values, float64 [n].
        """
        if self._response is None or self._has_two_columns:
            return numbers
        import pandas

        frame = pandas.DataFrame({self.outcome: numbers})
        environment = self._matrices.response.term.term.components[0].env
        with _private(self.formula), np.errstate(all="ignore"):
            return np.asarray(self._response.eval(frame, environment), np.float64)

    @property
    def covariates(self) -> dict[str, Column]:
        """The columns that predictions read: all but those of the outcome and its limits."""
        hidden = (self.outcome, self.limit_column)
        return {name: column for name, column in self.schema.columns.items() if name not in hidden}

    @property
    def outcome_text(self) -> str:
        """The outcome as the formula has it; of successes among trials their number."""
        return self.outcome if not self.has_transformed_outcome else str(self._response)

    @property
    def has_transformed_outcome(self) -> bool:
        """True if the outcome is a function of its column."""
        return self._response is not None and not self._has_two_columns

    @property
    def _has_two_columns(self) -> bool:
        """True if it is made of its column and of trials or limits."""
        return self.trials is not None or self.limit is not None

    @property
    def transformed(self) -> list[str]:
        """The centre and unit of what the formula centres or scales, such as center(x): x - 4."""
        return in_words(self._calls)

    @property
    def _right_side(self) -> str:
        return self._plain.partition("~")[2]

    @functools.cached_property
    def limit_column(self) -> str:
        """The column of limits if it is no covariate as well, and else ""."""
        if self.limit is None or not isinstance(self.limit.at, str):
            return ""
        with _errors(self.formula):
            covariates = self._formulae.model_description(self._right_side).var_names
        return "" if self.limit.at in covariates else self.limit.at


# ---------------------------------------------------------------------- helpers


def _is_monotone(term: str) -> bool:
    return re.fullmatch(rf"{MONOTONE}\([^()]*\)", term) is not None


def _column_of(term: str) -> str:
    """Returns the column of a monotone effect."""
    return term[len(MONOTONE) + 1 : -1].strip("`")


def _check_steps(call: Call, schema: Schema) -> None:
    """Refuses monotone effects of what has no ordered public levels."""
    name = getattr(call.args[0], "name", "") if len(call.args) == 1 and not call.kwargs else ""
    column = schema.columns.get(name)
    if not isinstance(column, Categorical | Integer) or len(_levels(column)) < 3:
        raise ValueError(
            f"formula has {call}: {MONOTONE}() takes one column of at least three ordered levels, "
            f"Categorical in the schema, or Integer with at most {MOST_LEVELS} values."
        )
    if column.missing:
        raise ValueError(
            f"formula has {call}, whose column may be missing, and missing values have no place "
            "in the order: fill them by a public rule, and describe it without missing=True."
        )


def _steps(schema: Schema, values: pandas.Series) -> np.ndarray:
    """Returns a column for each level but the first: 1 from that level on, float64 [n, levels - 1].

    Args:
      schema: The description of the column.
      values: The column, categories or integers.
    """
    column = schema.columns[str(values.name)]
    if isinstance(column, Categorical):
        places = np.asarray(values.cat.codes)
    else:
        assert isinstance(column, Integer)
        places = np.asarray(values) - column.lower
    return (places[:, None] >= np.arange(1, len(_levels(column)))).astype(np.float64)


def _check_comparison(side: Argument, other: Argument, schema: Schema) -> None:
    """Refuses comparisons that are false of all records, or in silence of missing ones."""
    name, value = getattr(side, "name", ""), getattr(other, "value", None)
    column = schema.columns.get(name)
    if isinstance(column, Categorical):
        if column.missing:
            raise ValueError(
                f"formula compares {name!r}, which may be missing: write {name}, whose levels "
                "have one for missing values."
            )
        if value is not None and value not in column.categories:
            raise ValueError(
                f"formula compares {name!r} with {other}, which is none of its levels."
            )
    elif column is not None and isinstance(value, str):
        raise ValueError(f"formula compares the numbers {name!r} with the text {other}.")


def _beside(
    frame: pandas.DataFrame | dict[str, np.ndarray], num: int, at: str | float | None
) -> np.ndarray:
    """Returns a column, or a number that is all records', float64 [n, 1]; [n, 0] for None."""
    if at is None:
        return np.zeros([num, 0])
    return np.array(frame[at] if isinstance(at, str) else np.full(num, at), np.float64)[:, None]


def _present(values: np.ndarray, absent: np.ndarray) -> np.ndarray:
    """Returns values as objects, None where they are missing."""
    result = values.astype(object)
    result[absent] = None
    return result


def _short(label: str) -> str:
    """Returns a label with whole numbers as such."""
    return re.sub(r"\[(-?\d+)\.0\]", r"[\1]", label)


def _import_formulae() -> Any:
    try:
        import formulae
        import formulae.environment
    except ImportError:
        raise ImportError(
            "formulas need formulae: pip install 'tfp-dpvi[formula]', or 'formulae>=0.5'."
        ) from None
    return formulae


@contextlib.contextmanager
def _errors(formula: str) -> Iterator[None]:
    """Turns errors of formulae, which may show values, into one line; it prints some, too."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:
        # formulae's own may name its modules.
        is_ours = isinstance(error, ValueError) and str(error).startswith("formula ")
        if is_ours and len(str(error).splitlines()) <= 2:
            raise
        if isinstance(error, AttributeError) and "callee" in str(error):
            raise ValueError(
                "formula has a function of another one before the same function of a column, as in "
                "scale(np.log(x)) + scale(z), which formulae cannot read: write scale(z) first."
            ) from None
        raise ValueError(
            f"formula={formula!r} cannot be evaluated ({type(error).__name__}: "
            f"{check.first_line(error):.150})."
        ) from None


@contextlib.contextmanager
def _private(formula: str) -> Iterator[None]:
    """Turns errors of formulae on records into one line, of which nothing is theirs."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except Exception as error:
        raise ValueError(
            f"formula={formula!r} cannot be evaluated for these records ({type(error).__name__})."
        ) from None


def is_wide(column: Column) -> TypeGuard[Numeric]:
    """Returns whether bounds alone are known of a column of numbers, perhaps much too wide ones."""
    return isinstance(column, Numeric) and column.typical is None


def _moved_near(column: Numeric, values: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Returns values of which most are moved towards a bound or the typical value."""
    num = len(values)
    places = np.array([column.lower, column.location, column.upper])
    towards = places[generator.choice(3, num, p=_TOWARDS)]
    share = np.where(generator.random(num) < _MOVED, _NEAREST ** generator.random(num), 1.0)
    moved = towards + share * (values - towards)
    return np.round(moved) if column.step else moved


def _levels(column: Column) -> list[Any]:
    """Returns all levels of a column, or its bounds."""
    if isinstance(column, Categorical):
        return list(column.categories)
    if isinstance(column, Integer) and column.upper - column.lower < MOST_LEVELS:
        return list(range(int(column.lower), int(column.upper) + 1))
    if isinstance(column, Numeric):
        return [column.lower, column.upper]
    return [0, 1]
