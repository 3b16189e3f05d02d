"""Rules between columns, which synthetic records keep.

A rule is public knowledge, such as that only women are pregnant. Records are drawn from the mixture
model until all rules hold: draws from the model given the rules, which costs no privacy.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import graphlib
from collections.abc import Callable, Hashable, Mapping, Sequence

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi import serialization
from tfp_dpvi.data.columns import Categorical, Numeric, is_missing
from tfp_dpvi.data.dates import Date
from tfp_dpvi.data.schema import Schema, TableData

Drawn = tuple[np.ndarray, np.ndarray]
"""Values of a column and the mask of missing ones, both of shape [n]."""

# Records are drawn at most so many times as often as they are wanted, before a rule is refused.
_MOST_DRAWS = 200
_FIRST_DRAWS = 1000

# Values on which a rule is tried before a fit.
_TRIED = 100


class Rule(abc.ABC):
    """A condition on the values of some columns of a record.

    A rule of your own has `columns` and `holds`, and a name by which files know it:

    ```python
    >>> import dataclasses
    >>> import numpy as np
    >>> import tfp_dpvi as dpvi
    >>> @dpvi.register("adults_smoke")
    ... @dataclasses.dataclass(frozen=True)
    ... class AdultsSmoke(Rule):
    ...     columns = ("age", "smokes")
    ...
    ...     def holds(self, values):
    ...         return (values["age"] >= 18) | (values["smokes"] == 0)
    >>> AdultsSmoke().holds({"age": np.array([9, 30]), "smokes": np.array([1, 1])}).tolist()
    [False, True]

    ```
    """

    @property
    @abc.abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that the rule is about."""

    @abc.abstractmethod
    def holds(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns where the rule holds.

        Args:
          values: Arrays of shape [n] by name, without missing values.

        Returns:
          bool array of shape [n].
        """

    def get_config(self) -> dict[str, Hashable]:
        """Returns the fields, as Keras asks of a registered class."""
        return dict(vars(self))

    @property
    def described(self) -> str:
        """Text for reports."""
        return f"{type(self).__name__} of {', '.join(map(repr, self.columns))}"

    def check(self, schema: Schema) -> None:
        """Checks that the rule is about a schema's columns.

        Args:
          schema: The public description of the columns.

        Raises:
          ValueError: A column is unknown, or is not of a kind that the rule can be about.
        """
        for name in self.columns:
            if name not in schema.columns:
                raise ValueError(f"rules: {name!r} is no column of the schema.")


@dataclasses.dataclass(frozen=True)
class OnlyWhere(Rule):
    """A column has some values only where other columns have given ones.

    ```python
    >>> import numpy as np
    >>> rule = OnlyWhere("pregnant", [1], {"sex": ["F"]})
    >>> values = {"pregnant": np.array([1, 1, 0]), "sex": np.array(["F", "M", "M"])}
    >>> rule.holds(values).tolist()
    [True, False, True]

    ```

    Attributes:
      column: The name of the column.
      values: Its values that need the others: categories, or 0 and 1 of a binary column.
      where: The values of other columns, by name, all of which are needed.
    """

    column: str
    values: Sequence[Hashable]
    where: Mapping[str, Sequence[Hashable]]

    def __post_init__(self) -> None:
        if not isinstance(self.where, Mapping) or not self.where or self.column in self.where:
            raise TypeError(
                f"where={check.shown(self.where)} must be a dict from other columns to lists of "
                'values, such as {"sex": ["F"]}.'
            )
        for name, values in {**self.where, self.column: self.values}.items():
            if isinstance(values, str) or not isinstance(values, Sequence) or not values:
                raise TypeError(f"values of {name!r} must be a list, got {check.shown(values)}.")
        object.__setattr__(self, "values", tuple(self.values))
        object.__setattr__(self, "where", {name: tuple(part) for name, part in self.where.items()})

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Rule.columns`."""
        return self.column, *self.where

    @property
    def described(self) -> str:
        """See `Rule.described`."""
        texts = {
            name: f"{name!r} is {' or '.join(map(str, values))}"
            for name, values in {self.column: self.values, **self.where}.items()
        }
        return f"{texts.pop(self.column)} only where {' and '.join(texts.values())}"

    def check(self, schema: Schema) -> None:
        """See `Rule.check`."""
        super().check(schema)
        for name, values in {self.column: self.values, **self.where}.items():
            column = schema.columns[name]
            if isinstance(column, Numeric):
                raise ValueError(f"rules: {name!r} has numbers; OnlyWhere is about categories.")
            known = set(column.categories) if isinstance(column, Categorical) else {0, 1}
            if unknown := [value for value in values if value not in known]:
                raise ValueError(f"rules: {name!r} never is {unknown[0]!r}; see the schema.")

    def holds(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """See `Rule.holds`."""
        allowed = ~_among(values[self.column], self.values)
        elsewhere = [_among(values[name], given) for name, given in self.where.items()]
        return allowed | np.all(elsewhere, axis=0)


@dataclasses.dataclass(frozen=True)
class AtMost(Rule):
    """A column of numbers or dates is at most another one.

    ```python
    >>> import numpy as np
    >>> rule = AtMost("admitted", "discharged")
    >>> values = {"admitted": np.array([1, 5]), "discharged": np.array([3, 4])}
    >>> rule.holds(values).tolist()
    [True, False]

    ```

    Attributes:
      smaller: The name of the column with the smaller values.
      larger: The name of the other column.
    """

    smaller: str
    larger: str

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Rule.columns`."""
        return self.smaller, self.larger

    @property
    def described(self) -> str:
        """See `Rule.described`."""
        return f"{self.smaller!r} is at most {self.larger!r}"

    def check(self, schema: Schema) -> None:
        """See `Rule.check`."""
        super().check(schema)
        pair = [schema.columns[name] for name in self.columns]
        numbers = all(isinstance(column, Numeric) for column in pair)
        num_dates = sum(isinstance(column, Date) for column in pair)
        if not numbers or num_dates == 1 or self.smaller == self.larger:
            raise ValueError(
                f"rules: {self.smaller!r} and {self.larger!r} must be two columns of numbers, or "
                "two of dates."
            )

    def holds(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """See `Rule.holds`."""
        return np.asarray(values[self.smaller] <= values[self.larger])


@dataclasses.dataclass(frozen=True)
class Equal(Rule):
    """Two columns have the same values: that of the first is copied to the second.

    Where one of them is missing, neither is changed. The fit counts both columns; to describe one
    and to copy it afterwards costs less noise.

    ```python
    >>> import numpy as np
    >>> rule = Equal("born", "birthday")
    >>> rule.holds({"born": np.array([1, 5]), "birthday": np.array([1, 4])}).tolist()
    [True, False]

    ```

    Attributes:
      column: The name of the column that is drawn.
      copy: The name of the column that is a copy of it.
    """

    column: str
    copy: str

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Rule.columns`."""
        return self.column, self.copy

    @property
    def described(self) -> str:
        """See `Rule.described`."""
        return f"{self.copy!r} equals {self.column!r}"

    def check(self, schema: Schema) -> None:
        """See `Rule.check`."""
        super().check(schema)
        one, other = (
            dataclasses.replace(schema.columns[name], missing=False) for name in self.columns
        )
        if one != other or self.column == self.copy:
            raise ValueError(
                f"rules: {self.column!r} and {self.copy!r} must be two columns that are described "
                "alike, but for missing=, to be equal."
            )

    def holds(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """See `Rule.holds`."""
        return np.asarray(values[self.column] == values[self.copy])


def check_rules(rules: Sequence[Rule], schema: Schema) -> None:
    """Checks rules before anything is spent: by themselves, on drawn values, and together.

    Args:
      rules: The rules.
      schema: The public description of the columns.

    Raises:
      TypeError: One is no rule.
      ValueError: A rule is not about the columns, cannot be saved, fails on drawn values, or
        contradicts another one.
    """
    generator = np.random.default_rng(0)
    parts = schema.columns.values()
    codes = [generator.integers(column.num_levels, size=_TRIED) for column in parts]
    drawn = {
        name: values for name, (values, _) in schema.values(np.stack(codes, 1), generator).items()
    }
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(
                f"rules={check.shown(rules)} must be a list of rules, such as "
                'dpvi.synthetic.AtMost("first", "second").'
            )
        rule.check(schema)
        _try(rule, {name: drawn[name] for name in rule.columns})
    copies = [rule.copy for rule in rules if isinstance(rule, Equal)]
    if twice := [name for name in copies if copies.count(name) > 1]:
        raise ValueError(f"rules: {twice[0]!r} is the copy of two Equal: make a chain of them.")
    source = {rule.copy: rule.column for rule in rules if isinstance(rule, Equal)}
    above: dict[str, set[str]] = collections.defaultdict(set)
    for rule in rules:
        if isinstance(rule, AtMost):
            smaller, larger = (_first(name, source) for name in rule.columns)
            above[smaller] |= {larger} - {smaller}
    try:
        graphlib.TopologicalSorter(above).prepare()
    except graphlib.CycleError as error:
        circle = " <= ".join(map(repr, error.args[1][::-1]))
        raise ValueError(
            f"rules: AtMost holds all around {circle}, which hardly any draw keeps: leave one out, "
            "or use Equal alone."
        ) from None


def _first(name: str, source: Mapping[str, str]) -> str:
    """Returns the column of which another one is a copy, by any number of copies."""
    for _ in source:
        name = source.get(name, name)
    return name


def _try(rule: Rule, drawn: Mapping[str, np.ndarray]) -> None:
    """Raises unless a rule can be saved, and says of drawn values, no records, where it holds."""
    name = type(rule).__name__
    try:
        serialization.encode(rule, "rules")
    except ValueError:
        raise ValueError(
            f"rules: {name} could not be saved: make it a frozen dataclass of plain fields, with "
            f'@dpvi.register("{name}") above it.'
        ) from None
    try:
        held = np.asarray(rule.holds(drawn))
    except Exception as error:
        raise ValueError(
            f"rules: {name}.holds fails on drawn values ({type(error).__name__}): try it on those "
            "of schema.simulate(9)."
        ) from None
    if held.dtype != bool or held.shape != (_TRIED,):
        raise ValueError(
            f"rules: {name}.holds must return bools of shape [{_TRIED}], not {held.dtype} of "
            f"{list(held.shape)}."
        )


def _among(values: np.ndarray, given: Sequence[Hashable]) -> np.ndarray:
    return np.fromiter((value in given for value in values.tolist()), bool, len(values))


def keeps(rules: Sequence[Rule], columns: Mapping[str, Drawn]) -> np.ndarray:
    """Returns which records keep all rules.

    A rule says nothing of a record with a missing value in one of its columns.

    Args:
      rules: The rules.
      columns: By name, values and masks of missing ones, all of shape [n].

    Returns:
      bool array of shape [n].
    """
    kept = np.ones(len(next(iter(columns.values()))[0]), bool)
    for rule in rules:
        present = ~np.any([columns[name][1] for name in rule.columns], axis=0)
        values = {name: columns[name][0][present] for name in rule.columns}
        kept[present] &= rule.holds(values)
    return kept


def check_records(rules: Sequence[Rule], schema: Schema, data: TableData) -> None:
    """Checks that records keep all rules, as values are checked against a schema.

    Args:
      rules: The rules.
      schema: The public description of the columns.
      data: The records.

    Raises:
      ValueError: A record does not keep them.
    """
    if not rules:
        return
    arrays = schema.part(list(dict.fromkeys(name for rule in rules for name in rule.columns)))
    columns = {name: (part, is_missing(part)) for name, part in arrays.arrays(data).items()}
    for rule in rules:
        if (broken := ~keeps([rule], columns)).any():
            raise ValueError(
                f"rules: {type(rule).__name__} of {', '.join(map(repr, rule.columns))} does not "
                f"hold in {check.rows(broken)}: correct them, or leave the rule out."
            )


def _copied(rules: Sequence[Rule], columns: dict[str, Drawn]) -> dict[str, Drawn]:
    """Returns columns of which those that equal another one have its values."""
    equal = [rule for rule in rules if isinstance(rule, Equal)]
    # As often as there are copies, so that a chain of them may be in any order.
    for rule in equal * len(equal):
        source, copy = columns[rule.column], columns[rule.copy]
        columns = {**columns, rule.copy: (np.where(source[1], copy[0], source[0]), copy[1])}
    return columns


def drawn_until_kept(
    draw: Callable[[int], dict[str, Drawn]], num: int, rules: Sequence[Rule]
) -> dict[str, Drawn]:
    """Returns records that keep all rules: draws from the model given the rules.

    Args:
      draw: Returns columns of a number of records.
      num: The number of records.
      rules: The rules.

    Raises:
      RuntimeError: Hardly any record of the model keeps them.
    """
    if not rules:
        return draw(num)
    parts: list[dict[str, Drawn]] = []
    found, drawn = 0, 0
    batch = max(num, _FIRST_DRAWS)
    while found < num:
        if drawn >= _MOST_DRAWS * max(num, _FIRST_DRAWS):
            raise RuntimeError(
                f"rules: of {drawn} records of the model, {found} keep them: the released counts "
                "contradict the rules, or drown in noise; take a larger epsilon or fewer rules."
            )
        columns = _copied(rules, draw(batch))
        kept = np.flatnonzero(keeps(rules, columns))
        parts.append({name: (part[kept], gone[kept]) for name, (part, gone) in columns.items()})
        found, drawn = found + len(kept), drawn + batch
    joined = {
        name: tuple(np.concatenate([part[name][place] for part in parts])[:num] for place in (0, 1))
        for name in parts[0]
    }
    return {name: (part, gone) for name, (part, gone) in joined.items()}
