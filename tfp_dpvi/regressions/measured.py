"""Typical values and shares of columns, released from the records for a share of the budget.

Numbers are counted in eighths of their bounds, in eighths of these, and so on. The mean of a column
that varies over a hundredth of its bounds would be lost in noise as wide as these bounds; in which
eighth most values lie is not, and each eighth shows the next ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy import stats

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import tf
from tfp_dpvi.data import Binary, Categorical, Column, Schema
from tfp_dpvi.data.columns import Numeric, converted, is_missing
from tfp_dpvi.data.units import Identifiers, make_units
from tfp_dpvi.privacy import NeighboringRelation, PersonUnit, PrivacyLedger
from tfp_dpvi.privacy.plan import plan_counts

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import TableData

# Parts of each part, and how often bounds are parted.
_PARTS = 8
_DEPTH = 4
# A part has values if its count is above so many standard deviations of the noise.
_CLEAR = 4.0
# The share of a budget is the least of these at which parts with this share of the records are
# clear. From the third number on it is enough if half of the records are, without which columns
# are not measured unasked: the fit needs the rest.
SHARES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
_SEEN = 0.13
_MUCH = 0.3
_LEAST_SEEN = 0.5
# The largest share that may be asked for.
MOST_SHARE = 0.9
# A share of a level is at least this one over the number of levels: noise can make it negative.
_LEAST_SHARE = 0.05
# Typical values are so far from the bounds, over their distance, and deviations at most so many
# times what values between these can have.
_INSIDE = 0.0005
_MOST_SPREAD = 0.9
_LEAST_SPREAD = 1e-5
# The share of the records in the parts that are seen, as far as noise lets it be known.
_VISIBLE = (0.5, 0.99)
# A deviation below so many finest parts may be that of values on both sides of an edge.
_RESOLVED = 0.65


def undescribed(schema: Schema) -> tuple[str, ...]:
    """Returns the columns of numbers of which bounds alone are declared."""
    return tuple(
        name
        for name, column in schema.columns.items()
        if isinstance(column, Numeric) and column.typical is None
    )


def unresolved(schema: Schema, names: Sequence[str]) -> tuple[str, ...]:
    """Returns columns whose released values are in one finest part, or in two beside each other.

    Their deviation may be far less than the release says.

    Args:
      schema: The description of the columns, with released typical values.
      names: The columns that were measured.
    """
    return tuple(name for name in names if _is_unresolved(schema.columns[name]))


def _is_unresolved(column: Column) -> bool:
    if not isinstance(column, Numeric) or column.typical is None:
        return False
    edges = _Tree.of(column).edges
    place = int(np.searchsorted(edges[1:-1], column.location, side="right"))
    width = edges[place + 1] - edges[place]
    # A part of one whole number hides nothing.
    return bool(width > column.step and column.deviation < _RESOLVED * width)


def check_measured(schema: Schema, names: Sequence[str]) -> None:
    """Raises unless columns can be measured.

    Args:
      schema: The description of the columns.
      names: The columns.

    Raises:
      ValueError: A column is not known, or has levels and may be missing.
    """
    if unknown := [name for name in names if name not in schema.columns]:
        raise ValueError(
            f"measured has {unknown}, which the formula does not use: it has "
            f"{', '.join(schema.names)}."
        )
    columns = {name: schema.columns[name] for name in names}
    levels = [name for name, column in columns.items() if not isinstance(column, Numeric)]
    if absent := [name for name in levels if columns[name].missing]:
        raise ValueError(
            f"measured has {absent}, whose levels may be missing: declare shares in the schema."
        )


def with_typical(column: Numeric, mean: float, deviation: float) -> Numeric:
    """Returns a column with typical values, moved to what its bounds allow.

    Args:
      column: The column.
      mean: The mean of its values.
      deviation: Their standard deviation.
    """
    width = column.upper - column.lower
    inner = column.lower + _INSIDE * width, column.upper - _INSIDE * width
    middle = float(np.clip(mean, *inner))
    most = _MOST_SPREAD * math.sqrt((middle - column.lower) * (column.upper - middle))
    least = _LEAST_SPREAD * width
    return dataclasses.replace(column, typical=(middle, float(np.clip(deviation, least, most))))


class Terms(NamedTuple):
    """Public values for which a release of typical values is planned.

    Attributes:
      epsilon: The epsilon of which it takes a share.
      delta: The delta.
      num_records: The public number of records, or of persons.
      person: What is public of a person, of whom one row is counted; None for records.
      seed: Makes the release repeatable and *not private*.
      num_hospitals: How many hospitals of about so many records add up their counts.
      relation: The relation of data sets that the guarantee compares.
    """

    epsilon: float
    delta: float
    num_records: int
    person: PersonUnit | None = None
    seed: int | None = None
    num_hospitals: int = 1
    relation: NeighboringRelation = NeighboringRelation.ADD_OR_REMOVE_ONE


class Measurement:
    """A release of typical values and shares: one Gaussian mechanism, planned before it is made.

    Args:
      schema: The description of the columns.
      names: The columns to measure.
      ledger: The ledger.
      share: The release's share of epsilon and delta, by its own cost alone.
      terms: What it is planned for.

    Attributes:
      share: The share.
      ledger: The ledger.

    #### Formal guarantee

    A record adds a vector of non-negative numbers whose l2 norm is at most sqrt(columns): for each
    column one count among the levels, or one for each parting, over the root of their number. See
    `plan_counts`; what follows the release is post-processing.
    """

    def __init__(
        self,
        schema: Schema,
        names: Sequence[str],
        ledger: PrivacyLedger,
        share: float,
        terms: Terms,
    ) -> None:
        self.share = share
        self.ledger = ledger
        self._schema, self._names = schema, names
        self._terms = terms
        columns = "1 column" if len(names) == 1 else f"{len(names)} columns"
        purpose = f"typical values of {columns}, by counts between public bounds"
        (plan,) = plan_counts(
            [(purpose, math.sqrt(len(names)), 1.0)],
            epsilon=terms.epsilon * share,
            delta=terms.delta * share,
            num_records=terms.num_records,
            neighboring_relation=terms.relation,
        )
        randomness = "secure" if terms.seed is None else ""
        self._plan = plan.replace(randomness=randomness, person=terms.person)

    @classmethod
    def chosen(
        cls,
        schema: Schema,
        names: Sequence[str],
        ledger: PrivacyLedger,
        shares: Sequence[float],
        terms: Terms,
    ) -> Measurement:
        """Returns the release with the least share that shows enough, or with the largest.

        Args:
          schema: As in the class.
          names: As in the class.
          ledger: As in the class.
          shares: Shares to choose from, increasing.
          terms: As in the class.
        """
        for share in shares:
            release = cls(schema, names, ledger, share, terms)
            if release.seen < (_SEEN if share < _MUCH else _LEAST_SEEN):
                break
        return release

    def charge(self) -> None:
        """Charges the ledger, as `release` does before it draws noise."""
        with self.ledger.reserved(self._plan, seeded=self._terms.seed is not None):
            pass

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise on each count."""
        return self._plan.deviation

    @property
    def num_records(self) -> int:
        """The public number of records, or of persons, that are counted."""
        return self._terms.num_records

    @property
    def is_affordable(self) -> bool:
        """True if the ledger leaves something of the budget for the fit."""
        return self._spent < (1.0 - self.share) * self._terms.epsilon

    @property
    def _spent(self) -> float:
        return self.ledger.epsilon(self._terms.delta) if self.ledger.num_releases else 0.0

    def check_affordable(self) -> None:
        """Raises `ValueError` if the ledger leaves nothing of the budget for the fit."""
        if not self.is_affordable:
            raise ValueError(
                f"epsilon={self._terms.epsilon:g} is the total of the ledger, of which "
                f"{self._spent:.3g} was spent: too little is left to measure columns and to fit."
            )

    @property
    def can_show(self) -> bool:
        """True if columns are worth being measured unasked."""
        return self.seen < _LEAST_SEEN

    @property
    def seen(self) -> float:
        """The least share of the records that is clear in one part."""
        # Noise of so many hospitals adds up as its variances do.
        num = self._terms.num_records * math.sqrt(self._terms.num_hospitals)
        return _CLEAR * math.sqrt(_DEPTH) * self.deviation / num

    def release(self, arrays: dict[str, np.ndarray]) -> Schema:
        """Returns the schema with released typical values, after charging the ledger.

        Args:
          arrays: The columns' values, which were checked, one for each record or person.
        """
        counts = dict(zip(self._names, self.counts(arrays), strict=True))
        return described_by(self._schema, counts, self.deviation, self._terms.num_records)

    def counts(self, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
        """Returns the noisy counts of each column, after charging the ledger.

        Args:
          arrays: As in `release`.
        """
        columns = [self._schema.columns[name] for name in self._names]
        counts = [
            _Tree.of(column).counts(name, column, arrays[name])
            for name, column in zip(self._names, columns, strict=True)
        ]
        key = _random.noise_key(sum(map(len, counts)), self._terms.seed)
        exact = [tf.constant(part, tf.float64) for part in counts]
        self.charge()
        noisy = _random.add_noise(key, exact, [self.deviation] * len(exact))
        return [part.numpy() for part in noisy]


def described_by(
    schema: Schema, counts: Mapping[str, np.ndarray], deviation: float, num_records: int
) -> Schema:
    """Returns a schema with the typical values that noisy counts show.

    Args:
      schema: The description of the columns.
      counts: Each column's noisy counts by its name, as `Measurement.counts` has them, or sums of
        these.
      deviation: The standard deviation of their noise.
      num_records: The public number of records that were counted.
    """
    columns = dict(schema.columns)
    for name, noisy in counts.items():
        tree = _Tree.of(columns[name])
        columns[name] = tree.described(columns[name], noisy, deviation, num_records)
    return Schema(columns)


def num_counts(column: Column) -> int:
    """Returns how many counts a column of numbers has.

    Args:
      column: The column.
    """
    tree = _Tree.of(column)
    return sum(_PARTS**level for level in range(1, tree.depth + 1))


class Measurable(NamedTuple):
    """The records to measure, and the ledger that pays.

    Attributes:
      data: A data set with the columns, one row a record.
      ledger: The ledger, or None for a new one in memory.
      unit_ids: Identifiers of persons, or None.
    """

    data: TableData
    ledger: PrivacyLedger | None
    unit_ids: Identifiers = None

    def arrays(
        self, schema: Schema, names: Sequence[str], seed: int | None
    ) -> tuple[dict[str, np.ndarray], PersonUnit | None]:
        """Returns columns' values, one for each record or person, and what is public of a person.

        Args:
          schema: The description of the columns.
          names: The columns.
          seed: Makes the choice of persons' rows repeatable.
        """
        arrays = schema.part(names).arrays(self.data)
        if self.unit_ids is None:
            return arrays, None
        # A person is counted as one row, chosen at random.
        units = make_units(self.unit_ids, len(arrays[names[0]]), 1, seed=seed)
        grouped = {name: units.group_array(values) for name, values in arrays.items()}
        return grouped, units.person


class Released(NamedTuple):
    """A schema with released typical values.

    Attributes:
      names: The columns that were measured.
      share: The share of the budget that was spent.
      schema: The schema.
      ledger: The ledger that paid.
    """

    names: tuple[str, ...]
    share: float
    schema: Schema
    ledger: PrivacyLedger


def measured_schema(
    schema: Schema,
    names: Sequence[str] | None,
    share: float | None,
    records: Measurable,
    terms: Terms,
) -> Released | None:
    """Releases typical values of columns, or of those of which bounds alone are known.

    Args:
      schema: The description of the columns.
      names: The columns, or None for those of bounds alone, if so many records can show them.
      share: The share of the budget, or None for as much as the number of records asks for.
      records: The records.
      terms: Those of the whole fit; 0 records for the exact number.

    Returns:
      None if no column is measured: nothing was released.

    Raises:
      ValueError: Columns cannot be measured, or too little is left for the fit.
      TypeError: The ledger is not a ledger.
    """
    columns = tuple(dict.fromkeys(undescribed(schema) if names is None else names))
    check_measured(schema, columns)
    shares = checked_shares(share, records)
    if not columns:
        return None
    measurement, arrays = planned(schema, columns, shares, records, terms)
    if names is None and not (measurement.can_show and measurement.is_affordable):
        return None
    measurement.check_affordable()
    return Released(columns, measurement.share, measurement.release(arrays), measurement.ledger)


def checked_shares(share: float | None, records: Measurable) -> tuple[float, ...]:
    """Returns shares of the budget to choose from, increasing.

    Args:
      share: The only one; None for all.
      records: The records, with what is to pay.

    Raises:
      ValueError: A share is no share, or too large.
      TypeError: The ledger is not a ledger.
    """
    shares = SHARES if share is None else (check.probability("share", share),)
    if shares[-1] > MOST_SHARE:
        raise ValueError(
            f"share={check.shown(share)} leaves too little for the fit: pass at most "
            f"{MOST_SHARE:g}, or None."
        )
    if not isinstance(records.ledger, PrivacyLedger | None):
        raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(records.ledger)}.")
    return shares


def planned(
    schema: Schema,
    names: Sequence[str],
    shares: Sequence[float],
    records: Measurable,
    terms: Terms,
) -> tuple[Measurement, dict[str, np.ndarray]]:
    """Returns a release that is planned and not made, and the values that it counts.

    Args:
      schema: The description of the columns.
      names: The columns.
      shares: Of which the least is taken that shows enough, or the last.
      records: The records.
      terms: Those of the whole fit; 0 records for the exact number.
    """
    arrays, person = records.arrays(schema, names, terms.seed)
    num_records = terms.num_records or len(arrays[names[0]])
    ledger = PrivacyLedger() if records.ledger is None else records.ledger
    terms = terms._replace(num_records=num_records, person=person)
    return Measurement.chosen(schema, names, ledger, shares, terms), arrays


class _Cell(NamedTuple):
    """A part of the bounds, by the level and its place there, and how many records it has."""

    level: int
    place: int
    num: float


class _Tree(NamedTuple):
    """The counts of a column: of its levels, or of parts of its bounds and of parts of these.

    Attributes:
      edges: The edges of the finest parts, float64 [leaves + 1]; empty for levels.
      depth: How often bounds are parted; 1 for levels.
    """

    edges: np.ndarray
    depth: int

    @classmethod
    def of(cls, column: Column) -> _Tree:
        """Returns the counts that a column needs."""
        if not isinstance(column, Numeric):
            return cls(np.zeros(0), 1)
        edges = dataclasses.replace(column, bins=_PARTS**_DEPTH, spikes=()).edges
        return cls(edges, max(1, math.ceil(math.log(len(edges) - 1, _PARTS) - 1e-9)))

    def counts(self, name: str, column: Column, values: np.ndarray) -> np.ndarray:
        """Returns the exact counts, *not private*, over the root of the depth."""
        if not isinstance(column, Numeric):
            num = 2 if isinstance(column, Binary) else column.num_levels
            return np.bincount(column.encode(name, values), minlength=num).astype(np.float64)
        # A record whose value is missing adds nothing; one beyond the bounds was refused before,
        # or is clipped.
        present = values[~is_missing(values)]
        numbers = column.clipped(converted(column.to_numbers, present)[0])
        leaves = np.searchsorted(self.edges[1:-1], numbers, side="right")
        parts = [
            np.bincount(leaves // _PARTS ** (self.depth - level), minlength=_PARTS**level)
            for level in range(1, self.depth + 1)
        ]
        return np.concatenate(parts) / math.sqrt(self.depth)

    def described(
        self, column: Column, noisy: np.ndarray, deviation: float, num_records: int
    ) -> Column:
        """Returns the column with typical values, or as it is where noise hides all of them.

        Args:
          column: The column.
          noisy: Its noisy counts.
          deviation: The standard deviation of their noise.
          num_records: The public number of records.
        """
        if isinstance(column, Binary):
            share = noisy[1] / max(noisy.sum(), 1.0)
            kept = float(np.clip(share, _LEAST_SHARE / 2.0, 1.0 - _LEAST_SHARE / 2.0))
            return dataclasses.replace(column, share=kept)
        if isinstance(column, Categorical):
            shares = np.maximum(noisy / max(noisy.sum(), 1.0), _LEAST_SHARE / len(noisy))
            return dataclasses.replace(column, shares=(shares / shares.sum()).tolist())
        assert isinstance(column, Numeric)
        root = math.sqrt(self.depth)
        levels = np.split(root * noisy, np.cumsum(_PARTS ** np.arange(1, self.depth)))
        if column.missing:
            num_records = max(1, round(levels[0].sum()))
        cells = self._cells(levels, root * deviation, num_records)
        if not cells or self._is_spike(cells, root * deviation, num_records):
            return column
        ends = np.array([self._ends(cell.level, cell.place) for cell in cells])
        shares = np.array([cell.num for cell in cells])
        seen = float(np.clip(shares.sum() / num_records, *_VISIBLE))
        shares /= shares.sum()
        # The last number of a part is before its upper edge.
        centres = ends.mean(axis=1) - column.step / 2.0
        mean = float(shares @ centres)
        # Values of a cell are taken as spread evenly.
        spread = shares @ ((centres - mean) ** 2 + np.diff(ends, axis=1)[:, 0] ** 2 / 12.0)
        # What noise hides lies in the tails, as of a normal distribution whose middle is seen.
        edge = stats.norm.ppf((1.0 + seen) / 2.0)
        spread /= 1.0 - 2.0 * edge * stats.norm.pdf(edge) / seen
        return with_typical(column, mean, math.sqrt(spread))

    def _ends(self, level: int, place: int) -> tuple[float, float]:
        """Returns the ends of a part, on a level of which the finest is `depth`."""
        width = _PARTS ** (self.depth - level)
        ends = np.minimum([place * width, (place + 1) * width], len(self.edges) - 1)
        first, second = self.edges[ends]
        return float(first), float(second)

    def _is_spike(self, cells: list[_Cell], noise: float, num_records: int) -> bool:
        """Returns whether one finest part alone is seen, beside which others may be anywhere."""
        single = len(cells) == 1 and cells[0].level == self.depth
        return single and cells[0].num < num_records - noise

    def _cells(self, levels: list[np.ndarray], noise: float, num_records: int) -> list[_Cell]:
        """Returns the smallest parts that are seen to have values.

        What a part has beside its seen parts is in the other ones, if it is clear.

        Args:
          levels: Noisy counts, level by level.
          noise: The standard deviation of each.
          num_records: The public number of records.
        """
        cells: list[_Cell] = []
        waiting = [_Cell(0, 0, float(num_records))]
        while waiting:
            part = waiting.pop()
            level, place = part.level, part.place
            inner = np.arange(_PARTS * place, _PARTS * (place + 1))
            counts = levels[level][inner] if level < self.depth else np.zeros(0)
            seen = counts > _CLEAR * noise
            if not seen.any():
                cells += [part] if level else []
                continue
            left = part.num - counts[seen].sum()
            if left > _CLEAR * noise * math.sqrt(1.0 + seen.sum()):
                others = [int(each) for each in inner[~seen] if np.ptp(self._ends(level + 1, each))]
                cells += [_Cell(level + 1, each, left / len(others)) for each in others]
            waiting += [
                _Cell(level + 1, int(each), float(num))
                for each, num in zip(inner[seen], counts[seen], strict=True)
            ]
        return cells
