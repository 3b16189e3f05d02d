"""Levels chosen by a private histogram.

They are quantile bins, bins of single frequent values, and merged rare categories. Numbers are
counted in a tree with 16 branches over their finest bins, at every depth, which finds frequent
values at any scale of a wide column. Everything after the noise is post-processing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np

from tfp_dpvi.data.columns import MISSING, Categorical, Column, Numeric
from tfp_dpvi.data.schema import Schema
from tfp_dpvi.synthetic import tails

_BRANCHES = 16

# Levels, at most, that divide wide ends into parts of falling mass, one for each five levels; an
# end is wide if it is so many times as wide as most levels.
_TAIL_LEVELS = 3
_WIDE = 4.0

# Levels of an end that is far, relative to its distance from the median, at doubled distances.
_FAR_LEVELS = 2
_DOUBLED = 4.0

# A level of an end, where half of its mass is, reaches at least so many times as far.
_FARTHER = 1.2

# Records, in number, of which much of a column's variance may come, and how much that is. Draws of
# a column's end tell it to a tenth.
_FEW_RECORDS = 100.0
_MUCH = 0.4

# Counts, in standard deviations of the noise: from the first, a node's children are examined; from
# the second, if the node holds 0, a bound or a declared spike, where heaps are likely; and from the
# third, a child is separated from its neighbours.
_SPLIT = 4.0
_LIKELY = 2.5
_SEEN = 2.0

# Relative to a level's records, how far they depart from a smooth distribution: rounded values and
# heaps do. Without it counts of inner levels, which are the largest, would decide how far the
# outer ones reach.
_DEPARTURE = 0.1

# Standard deviations by which counts within an end's levels contradict its distribution.
_UNLIKE = 3.0

# Standard deviations of the noise that the count of a tail exceeds if it is fitted.
_CLEAR = 4.0

# Number of levels below which one may normally have most records.
_FEW = 5

Cell = tuple[int, int, float]
"""The finest levels from the first number up to the second, and their estimated records."""


@dataclasses.dataclass(frozen=True)
class Grouped(Column):
    """A column with grouped finest levels.

    ```python
    >>> import numpy as np
    >>> from tfp_dpvi.synthetic import Categorical, group
    >>> column = Categorical(["a", "b", "c"], max_levels=2)
    >>> grouped = group(column, [np.array([1.0, 9.0, 2.0])], 0.0)
    >>> grouped.groups
    (1, 0, 1)
    >>> grouped.encode("ward", np.array(["a", "b", "c"])).tolist()
    [1, 0, 1]

    ```

    Attributes:
      column: The column with the levels that are grouped, from which samples are drawn.
      of: The user's description.
      groups: The group of each of these levels.
      shares: The probability of each of these levels within its group, for samples.
      ends: The distributions at the ends of a column of numbers, fitted to counts.
      falling: Those of ends whose counts are no more than noise: they fall from what is beside.
      few: Whether much of its variance comes from about a hundred records.
      noise: The standard deviation of the noise of the counts that the shares come from.
    """

    column: Column
    of: Column
    groups: tuple[int, ...]
    shares: tuple[float, ...]
    ends: tuple[tails.Tail, ...] = ()
    falling: tuple[tails.Tail, ...] = ()
    few: bool = False
    noise: float = 0.0

    @property
    def num_levels(self) -> int:
        """The number of groups."""
        return max(self.groups) + 1

    @property
    def description(self) -> Column:
        """The user's description."""
        return self.of

    def levels_of(self, name: str, values: np.ndarray) -> np.ndarray:
        """See `Column.levels_of`."""
        return np.array(self.groups, np.int32)[self.column.levels_of(name, values)]

    def from_finest(self, levels: np.ndarray) -> np.ndarray:
        """Returns the groups of finest levels: exactly those that `encode` gives for their values.

        A grouped bin is a union of finest bins, whose edges it takes over without arithmetic.

        Args:
          levels: Integer array of shape [n]: levels of `description.finest`, -1 for missing.

        Returns:
          int32 array of shape [n], -1 for missing.
        """
        finest, kept = self.of.finest, levels
        if isinstance(self.column, Numeric) and isinstance(finest, Numeric):
            starts = np.searchsorted(finest.edges, self.column.edges[:-1])
            kept = np.searchsorted(starts, levels, side="right") - 1
        return np.where(levels == MISSING, MISSING, np.array(self.groups, np.int32)[kept])

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns values of levels drawn by their shares.

        Args:
          levels: Integer array of shape [n] of groups.
          generator: The source of the draws.

        Returns:
          Array of shape [n].
        """
        groups, shares = np.array(self.groups), np.array(self.shares)
        order = np.argsort(groups, kind="stable")
        # Each group's shares sum to 1: group g ends at g + 1.
        ends = np.cumsum(shares[order])
        places = np.searchsorted(ends, levels + generator.random(len(levels)), side="right")
        first = np.searchsorted(groups[order], levels, side="left")
        last = np.searchsorted(groups[order], levels, side="right") - 1
        cells = order[np.clip(places, first, last)]
        drawn = self.column.values(cells, generator)
        if not isinstance(self.column, Numeric):
            return drawn
        edges = self.limits
        for end in (*self.ends, *self.falling):
            low, high = end.limits(*edges)
            inside = low >= end.threshold if end.is_upper else high <= end.threshold
            rows = np.flatnonzero(inside[levels] & ~np.isin(cells, end.heaps))
            place = int(generator.integers(len(end.draws)))
            begins, stops = low[levels[rows]], high[levels[rows]]
            numbers = end.values(begins, stops, generator.random(len(rows)), place)
            step = self.column.step
            if step:
                numbers = np.clip(np.floor(numbers), begins, stops - step).astype(np.int64)
            else:
                numbers = np.minimum(numbers, np.nextafter(stops, begins))
            drawn[rows] = numbers.astype(drawn.dtype)
        return drawn

    @property
    def limits(self) -> tuple[np.ndarray, np.ndarray]:
        """Lower and upper edges of the groups of a column of numbers, float64 [groups] each."""
        assert isinstance(self.column, Numeric)
        edges = self.column.edges
        first = np.searchsorted(np.array(self.groups), np.arange(self.num_levels))
        starts = edges[:-1][first]
        return starts, np.append(starts[1:], edges[-1])


def with_ends(
    column: Grouped, counts: np.ndarray, coarse: float, fine: float, generator: np.random.Generator
) -> Grouped:
    """Returns a column of numbers with distributions at its ends: post-processing.

    Args:
      column: The column.
      counts: Released counts of its levels, float64 [levels].
      coarse: The standard deviation of the noise of the histograms that chose the levels.
      fine: That of the counts.
      generator: The source of posterior draws.
    """
    low, high = column.limits
    assert isinstance(column.column, Numeric)
    single = np.array([column.column.next_after(float(a)) for a in low]) >= high
    ends = []
    for is_upper in (False, True):
        order = np.arange(column.num_levels) if is_upper else np.arange(column.num_levels)[::-1]
        # At a bound that is a spike lies what is cut, in a level of its own beyond the end.
        order = order[: len(order) - int(np.argmin(single[order[::-1]]))]
        num = tails.outermost(counts[order], single[order])
        # Beyond a higher threshold the distribution is nearer, if as many counts still tell it.
        clear = counts >= _CLEAR * fine
        found = (
            _end(column, np.sort(order[-some:]), is_upper, counts, coarse, fine, generator)
            for some in range(num, tails.LEAST - 1, -1)
            if some == num or np.count_nonzero(clear[order[-some:]]) >= tails.LEAST
        )
        ends += next(filter(None, found), [])
    fitted = dataclasses.replace(column, ends=tuple(ends))
    fitted = _with_faint(fitted, counts, coarse, fine, single)
    return dataclasses.replace(fitted, few=_depends_on_few(fitted, counts, generator))


def _with_faint(
    column: Grouped, counts: np.ndarray, coarse: float, fine: float, single: np.ndarray
) -> Grouped:
    """Returns a column whose ends have no values where the counts are no more than noise."""
    low, high = column.limits
    assert isinstance(column.column, Numeric)
    fitted = {end.is_upper: end for end in column.ends}
    falling = []
    masses = np.array(column.shares) * np.maximum(counts, 0.0)[np.array(column.groups)]
    heaped = _narrow(column) & (masses > _clear_heaps(column, coarse))
    for part in tails.ends_of(counts, fine, low, high, single, column.ends):
        cells = np.isin(np.array(column.groups), np.arange(part.begin, part.stop))
        if not part.is_faint and np.count_nonzero(cells) > 1:
            continue
        begin, stop = float(low[part.begin]), float(high[part.stop - 1])
        if part.is_upper in fitted:
            end = fitted[part.is_upper]
            fitted[part.is_upper] = dataclasses.replace(end, joined=(begin, stop))
            continue
        inside = slice(part.begin, part.stop)
        merged = np.concatenate([counts[: part.begin], [counts[inside].sum()], counts[part.stop :]])
        widths = np.append(np.delete(low, np.arange(part.begin + 1, part.stop)), high[-1])
        step = column.column.step
        density = tails.beside(merged, np.diff(widths), part.begin, step, part.is_upper)
        heaps = np.flatnonzero(cells & heaped)
        count = float(counts[inside].sum() - masses[heaps].sum())
        end = tails.falling(part.is_upper, begin, stop, count, density)
        falling.append(dataclasses.replace(end, heaps=tuple(map(int, heaps))))
    return dataclasses.replace(column, ends=tuple(fitted.values()), falling=tuple(falling))


def _narrow(column: Grouped) -> np.ndarray:
    """Returns which cells are one of the finest bins, bool [cells].

    Neighbours whose counts are noise are one wide cell, whose noise adds up: it is no heap.
    """
    num = column.description.finest.num_levels
    narrow: np.ndarray = np.round(num * _cell_widths(column)) == 1
    return narrow


def _cell_widths(column: Grouped) -> np.ndarray:
    """Returns the shares of a column's finest bins that are in cells, float64 [cells]."""
    finest = column.description.finest
    assert isinstance(column.column, Numeric)
    assert isinstance(finest, Numeric)
    places = np.searchsorted(finest.edges, column.column.edges)
    widths: np.ndarray = np.diff(places) / places[-1]
    return widths


def _is_unlike(excess: np.ndarray, expected: np.ndarray, widths: np.ndarray, coarse: float) -> bool:
    """Returns whether cells of an end have other records than its distribution says.

    The counts of levels may agree where one of them has a gap and a second group beyond it.

    Args:
      excess: By how much cells have more records, the outermost first, float64 [cells].
      expected: The records that they should have.
      widths: Their widths, as shares of the column's.
      coarse: The standard deviation of the noise of the histograms that chose the levels.
    """
    # As many nodes of the tree, at most, have counts of what is beyond.
    nodes = 1.0 + _BRANCHES * np.cumsum(widths)
    variances = coarse**2 * nodes + np.cumsum(expected)
    return bool(np.any(abs(np.cumsum(excess)) > _UNLIKE * np.sqrt(variances)))


def _clear_heaps(column: Grouped, coarse: float) -> np.ndarray:
    """Returns by how many records a heap exceeds what is expected of its cell, float64 [cells].

    Args:
      column: The column.
      coarse: The standard deviation of the noise of the histograms that chose the levels.
    """
    numbers, described = column.column, column.description
    assert isinstance(numbers, Numeric)
    assert isinstance(described, Numeric)
    starts = numbers.edges[:-1]
    likely = np.isin(starts, np.array(described.special))
    ends = np.array([numbers.next_after(float(start)) for start in starts])
    likely &= ends >= numbers.edges[1:]
    return np.where(likely, _LIKELY, _SPLIT) * coarse


def _end(
    column: Grouped,
    levels: np.ndarray,
    is_upper: bool,
    counts: np.ndarray,
    coarse: float,
    fine: float,
    generator: np.random.Generator,
) -> list[tails.Tail]:
    """Returns the distribution of an end, if one is near the counts and most is no heap."""
    low, high = column.limits
    assert isinstance(column.column, Numeric)
    edges = column.column.edges
    cells = np.flatnonzero(np.isin(np.array(column.groups), levels))
    owners = np.array(column.groups)[cells]
    masses = np.array(column.shares)[cells] * np.maximum(counts[owners], 0.0)
    threshold = float(low[levels[0]] if is_upper else high[levels[-1]])
    bound = float(high[levels[-1]] if is_upper else low[levels[0]])
    is_last = bound in (edges[0], edges[-1])
    end = tails.Tail(is_upper, threshold, (), bound=bound)
    narrow, clear = _narrow(column)[cells], _clear_heaps(column, coarse)[cells]
    shares = _cell_widths(column)[cells]
    heap = np.zeros(len(cells), bool)
    for _ in range(2):
        without = counts[levels] - np.array([masses[heap & (owners == k)].sum() for k in levels])
        outward = np.arange(len(levels)) if is_upper else np.arange(len(levels))[::-1]
        bounds = np.append(low[levels], high[levels[-1]])
        excesses = np.sort(end.excesses(bounds))
        variances = (
            fine**2
            + np.maximum(without, 1.0)
            + (_DEPARTURE * np.maximum(without, 0.0)) ** 2
            + coarse**2 * np.array([np.any(heap & (owners == k)) for k in levels])
        )
        if without.sum() <= _CLEAR * fine * np.sqrt(len(levels)):
            return []
        fitted = tails.fit(
            excesses, without[outward], variances[outward], generator, may_be_cut=is_last
        )
        if fitted is None:
            return []
        draws, piled = fitted
        shape, scale = np.median(np.array(draws), axis=0)
        reached = tails.survival(np.maximum(end.excesses(edges), 0.0), shape, scale)
        beyond = tails.survival(end.excesses(np.array(bound)), shape, scale)
        total = float(without.sum()) / max(1.0 - float(beyond), 1e-9)
        expected = total * np.abs(reached[cells] - reached[cells + 1])
        heap = narrow & (masses - expected > clear)
        outermost = slice(None, None, -1 if is_upper else 1)
        excess = np.where(heap, 0.0, masses - expected)[outermost]
        if _is_unlike(excess, expected[outermost], shares[outermost], coarse):
            return []
        heaps = tuple(map(int, cells[heap]))
        end = dataclasses.replace(end, draws=tuple(draws), heaps=heaps, piled=tuple(piled))
    return [end]


def _depends_on_few(column: Grouped, counts: np.ndarray, generator: np.random.Generator) -> bool:
    masses = np.maximum(counts, 0.0)
    num = masses.sum()
    if not column.ends or num < 10.0 * _FEW_RECORDS:
        return False
    # Each table has one draw of the ends.
    tables = [generator.choice(len(masses), 5000, p=masses / num) for _ in range(10)]
    drawn = np.concatenate([column.values(part, generator) for part in tables]).astype(np.float64)
    squares = np.sort((drawn - drawn.mean()) ** 2)
    top = max(int(len(drawn) * _FEW_RECORDS / num), 1)
    return bool(squares[-top:].sum() > _MUCH * squares.sum())


def grouped_codes(schema: Schema, codes: np.ndarray) -> np.ndarray:
    """Returns records' levels in a schema with grouped columns, from their finest levels.

    Args:
      schema: The schema, whose `Grouped` columns were chosen by histograms.
      codes: int32 array of shape [records, columns]: finest levels of the user's schema.

    Returns:
      int32 array of shape [records, columns].
    """
    columns = [
        column.from_finest(levels) if isinstance(column, Grouped) else levels
        for column, levels in zip(schema.columns.values(), codes.T, strict=True)
    ]
    return np.stack(columns, axis=1)


def crowded(column: Column, masses: np.ndarray) -> tuple[float, float] | None:
    """Returns the ends of a bin, among many, that has more than half of the records.

    Args:
      column: The column.
      masses: Released counts of its levels, float64 [levels], of missing values last if any.

    Returns:
      The bin's lower and upper edge; None if there is no such bin, or it has a single value.
    """
    inner, described = column.column if isinstance(column, Grouped) else column, column.description
    if not (
        isinstance(inner, Numeric)
        and isinstance(described, Numeric)
        and isinstance(described.bins, int)
    ):
        return None
    if column.num_levels < _FEW:
        return None
    level = int(np.argmax(masses[: column.num_levels]))
    members = (
        np.flatnonzero(np.array(column.groups) == level) if isinstance(column, Grouped) else [level]
    )
    low, high = inner.edges[members[0]], inner.edges[members[0] + 1]
    crowd = (
        masses[level] > 0.5 * masses.sum() and len(members) == 1 and inner.next_after(low) < high
    )
    return (low, high) if crowd else None


def depths(column: Column) -> int:
    """Returns the number of histograms that count a record of an open column.

    It is the squared norm of the record's counts.
    """
    if isinstance(column, Categorical):
        return 1
    return max(1, math.ceil(math.log(column.finest.num_levels, _BRANCHES) - 1e-9))


def histograms(column: Column, levels: np.ndarray) -> list[np.ndarray]:
    """Counts finest levels in a tree, *not private*.

    Args:
      column: An open column.
      levels: Integer array of shape [n]: levels of `column.finest`, -1 for missing values, which
        are not counted.

    Returns:
      float64 vectors, from coarse to fine.

    #### Formal guarantee

    A record adds 1 to at most one entry of each vector, and nothing else.
    """
    present, depth = levels[levels >= 0], depths(column)
    num_levels = column.finest.num_levels
    widths = (
        [1]
        if isinstance(column, Categorical)
        else [_BRANCHES ** (depth - 1 - d) for d in range(depth)]
    )
    return [
        np.bincount(present // width, minlength=-(-num_levels // width)).astype(np.float64)
        for width in widths
    ]


def group(column: Column, counts: list[np.ndarray], deviation: float) -> Grouped:
    """Chooses an open column's declared number of levels.

    Args:
      column: The open column.
      counts: `histograms` of it with noise; all zeros for no information.
      deviation: The standard deviation of the noise.

    Returns:
      The column with these levels.
    """
    if isinstance(column, Categorical):
        return _with_rare_ones_together(column, counts[0], deviation)
    fine = column.fine
    assert isinstance(column, Numeric)
    assert isinstance(fine, Numeric)
    likely = fine.bins_of(np.array(column.special))
    cells = _cells(counts, deviation, likely, 0, 0, max(float(counts[0].sum()), 1.0))
    alone = {int(place) for place in fine.bins_of(np.array(column.spikes))}
    cells, ends = _divided(cells, alone, column.num_levels, fine.edges, _CLEAR * deviation)
    starts = fine.edges[[low for low, _, _ in cells]]
    groups = np.searchsorted(ends, np.arange(len(cells)), side="right")
    masses = np.array([mass for _, _, mass in cells])
    kept = dataclasses.replace(fine, bins=tuple(float(edge) for edge in starts[1:]))
    sizes = np.array([high - low for low, high, _ in cells], float)
    return dataclasses.replace(
        _grouped(kept, column, groups, masses, sizes), noise=float(deviation)
    )


def _grouped(
    kept: Column, of: Column, groups: np.ndarray, masses: np.ndarray, sizes: np.ndarray
) -> Grouped:
    masses = np.maximum(masses, 0.0)
    totals = np.bincount(groups, masses)
    # A group without records is shared among its members by their sizes.
    masses = np.where(totals[groups] > 0.0, masses, sizes)
    shares = masses / np.bincount(groups, masses)[groups]
    return Grouped(kept, of, tuple(map(int, groups)), tuple(map(float, shares)), missing=of.missing)


def _with_rare_ones_together(column: Categorical, counts: np.ndarray, deviation: float) -> Grouped:
    """Keeps the most frequent categories, and merges the others of each parent."""
    families = column.families
    num_kept = column.max_levels - int(families.max()) - 1
    order = np.argsort(-counts, kind="stable")
    # The least frequent category of each parent stands for its rare ones.
    _, last = np.unique(families[order][::-1], return_index=True)
    is_rest = np.zeros(len(counts), bool)
    is_rest[order[::-1][last]] = True
    frequent = np.sort(order[~is_rest[order]][:num_kept])
    groups = num_kept + families
    groups[frequent] = np.arange(num_kept)
    masses = np.maximum(counts, 0.0)
    for rest in range(num_kept, column.max_levels):
        rare = groups == rest
        masses[rare] = _rare_masses(counts[rare], deviation)
    return _grouped(column, column, groups, masses, np.ones(column.num_levels))


def _rare_masses(counts: np.ndarray, deviation: float) -> np.ndarray:
    """Returns the masses of merged categories.

    Those that stand out share the mass beyond that of noise alone; all share the rest.
    """
    num = len(counts)
    seen = np.where(counts > _SEEN * deviation, counts, 0.0)
    by_noise = num * deviation * math.exp(-0.5 * _SEEN**2) / math.sqrt(2.0 * math.pi)
    sure = max(float(seen.sum()) - by_noise, 0.0)
    rest = max(float(counts.sum()) - sure, deviation)
    masses: np.ndarray = seen * sure / max(float(seen.sum()), 1e-9) + rest / num
    return masses


class Merged(NamedTuple):
    """The categories of a column that a fit merged with others.

    Attributes:
      num: How many they are.
      of: The number of all categories.
      share: The share of the records in them, from noisy counts.
    """

    num: int
    of: int
    share: float


def merged_categories(column: Column, counts: np.ndarray) -> Merged | None:
    """Returns the categories that a fit merged, or None if it merged none.

    Args:
      column: The column with the levels that the fit chose.
      counts: Released counts of its levels, and of missing values last if there may be any.
    """
    if not isinstance(column, Grouped) or not isinstance(column.column, Categorical):
        return None
    sizes = np.bincount(column.groups)
    counts = np.maximum(counts, 0.0)
    inside = float(counts[: len(sizes)][sizes > 1].sum())
    share = inside / max(float(counts.sum()), 1.0)
    return Merged(int(sizes[sizes > 1].sum()), int(sizes.sum()), share)


def _cells(
    tree: list[np.ndarray], sd: float, likely: np.ndarray, depth: int, node: int, mass: float
) -> list[Cell]:
    """Returns the cells that are distinguished below a node; indistinct neighbours are one cell."""
    width = _BRANCHES ** (len(tree) - 1 - depth)
    children = range(
        node * _BRANCHES if depth else 0, min((node + 1) * _BRANCHES, len(tree[depth]))
    )
    counts = {child: float(tree[depth][child]) for child in children}
    seen = {child: count for child, count in counts.items() if count > _SEEN * sd}
    total, rest = sum(seen.values()), len(counts) - len(seen)
    scale = mass / total if total > mass or (total > 0.0 and rest == 0) else 1.0
    share = max(mass - scale * total, 0.0) / max(rest, 1)
    cells: list[Cell] = []
    for child in children:
        low, high = child * width, min((child + 1) * width, len(tree[-1]))
        if child not in seen:
            if child - 1 in counts and child - 1 not in seen:
                cells[-1] = (cells[-1][0], high, cells[-1][2] + share)
            else:
                cells.append((low, high, share))
            continue
        here = scale * seen[child]
        enough = _LIKELY if ((low <= likely) & (likely < high)).any() else _SPLIT
        if width > 1 and here > enough * sd:
            cells += _cells(tree, sd, likely, depth + 1, child, here)
        else:
            cells.append((low, high, here))
    return cells


def _divided(
    cells: list[Cell], alone: set[int], levels: int, edges: np.ndarray, clear: float
) -> tuple[list[Cell], np.ndarray]:
    """Divides cells into levels of about equal mass, and far ends at doubled distances.

    Args:
      cells: The cells.
      alone: Finest levels that have a level of their own.
      levels: The number of levels.
      edges: The edges of the finest levels.
      clear: Records of which parts are more than noise.

    Returns:
      The cells, and each level's end.
    """
    pieces = _pieces(cells, alone, levels, edges)
    if _doubled(pieces, edges, clear) != pieces:
        pieces = _pieces(cells, alone, levels - min(_FAR_LEVELS, levels // 8), edges)
        # Spikes may need more levels of their own than are left.
        for _ in range(levels - len(pieces)):
            pieces = _doubled(pieces, edges, clear)
    pieces = _split(pieces, levels)
    return [cell for piece in pieces for cell in piece], np.cumsum([len(piece) for piece in pieces])


def _pieces(cells: list[Cell], alone: set[int], levels: int, edges: np.ndarray) -> list[list[Cell]]:
    """Divides cells into levels of about equal mass, the last ones in wide ends."""
    pieces: list[list[Cell]] = [[]]
    for cell in cells:
        for part in _cut(cell, alone):
            single = part[1] - part[0] == 1 and part[0] in alone
            if pieces[-1] and (single or pieces[-1][-1][0] in alone):
                pieces.append([])
            pieces[-1].append(part)
    in_ends = min(_TAIL_LEVELS, levels // 5)
    pieces = _split(pieces, levels - in_ends)
    while len(pieces) < levels:
        end = _wide_end(pieces)
        pieces = _split(pieces, len(pieces) + 1) if end is None else _outward(pieces, end, edges)
    return pieces


def _split(pieces: list[list[Cell]], levels: int) -> list[list[Cell]]:
    """Splits levels of the largest mass."""
    pieces = list(pieces)
    while len(pieces) < levels:
        largest = max(_divisible(pieces), key=lambda place: _size(pieces[place]))
        pieces[largest : largest + 1] = _halves(pieces[largest])
    return pieces


def _divisible(pieces: list[list[Cell]]) -> list[int]:
    """Returns the places of levels with more than one value: a spike at a bound is no end."""
    return [place for place, piece in enumerate(pieces) if piece[-1][1] - piece[0][0] > 1]


def _wide_end(pieces: list[list[Cell]]) -> int | None:
    """Returns the place of the wider end, if it is much wider than most levels."""
    divisible = _divisible(pieces)
    widths = [piece[-1][1] - piece[0][0] for piece in pieces]
    widest = max((divisible[0], divisible[-1]), key=lambda place: widths[place])
    return widest if widths[widest] > _WIDE * float(np.median(widths)) else None


def _outward(pieces: list[list[Cell]], end: int, edges: np.ndarray) -> list[list[Cell]]:
    """Splits an end at half of its mass, or at twice its distance from the median if it is nearer.

    Where counts are noise half of the mass may be anywhere, and levels that are cut there would say
    nothing of records that are nearer.
    """
    piece, median = pieces[end], _median(pieces, edges)
    is_upper = end == _divisible(pieces)[-1]
    halves = _halves(piece)
    near = piece[0][0] if is_upper else piece[-1][1]
    middle = halves[0][-1][1]
    cut = _cut_of(piece, is_upper, median, edges)[1]
    farther = abs(edges[middle] - median) >= _FARTHER * abs(edges[near] - median)
    if farther and (middle < cut) == is_upper:
        cut = middle
    return [*pieces[:end], *(_parted(piece, cut) or halves), *pieces[end + 1 :]]


def _median(pieces: list[list[Cell]], edges: np.ndarray) -> float:
    sums = np.cumsum([_size(piece)[0] for piece in pieces])
    middle = pieces[int(np.searchsorted(sums, sums[-1] / 2.0))]
    return float(edges[(middle[0][0] + middle[-1][1]) // 2])


def _cut_of(
    piece: list[Cell], is_upper: bool, median: float, edges: np.ndarray
) -> tuple[float, int]:
    """Returns how many times as far an end reaches, and the finest level at twice its distance.

    An end that reaches less than four times as far has the cut at the geometric mean.
    """
    limits = edges[[piece[0][0], piece[-1][1]]] - median
    near, far = limits if is_upper else limits[::-1]
    reach = float(far / near) if near else 0.0
    if reach <= 1.0:
        return 0.0, piece[-1][1] if is_upper else piece[0][0]
    return reach, int(np.searchsorted(edges, median + min(2.0, math.sqrt(reach)) * near))


def _parted(piece: list[Cell], cut: int) -> list[list[Cell]]:
    """Returns the two parts of a level, of which one cell may be in both; none at its edges."""
    inner: list[Cell] = []
    outer: list[Cell] = []
    for low, high, mass in piece:
        edge = min(max(cut, low), high)
        share = mass * (edge - low) / (high - low)
        inner += [(low, edge, share)] * (edge > low)
        outer += [(edge, high, mass - share)] * (high > edge)
    return [inner, outer] if inner and outer else []


def _size(piece: list[Cell]) -> tuple[float, int]:
    """Returns a level's mass and width, by which levels are compared."""
    return sum(mass for _, _, mass in piece), piece[-1][1] - piece[0][0]


def _cut(cell: Cell, alone: set[int]) -> list[Cell]:
    """Splits a cell at the finest levels that need their own cells."""
    low, high = cell[:2]
    inner = {edge for level in alone if low <= level < high for edge in (level, level + 1)}
    marks = sorted({low, high} | inner)
    return [(a, b, cell[2] * (b - a) / (high - low)) for a, b in itertools.pairwise(marks)]


def _doubled(pieces: list[list[Cell]], edges: np.ndarray, clear: float) -> list[list[Cell]]:
    """Splits the farther end at twice its distance from the median, if it is far and has records.

    By mass alone, all that is far out is one level, of which no count says how far.

    Args:
      pieces: The levels' cells.
      edges: The edges of the finest levels.
      clear: Records of which parts are more than noise.
    """
    median = _median(pieces, edges)
    place, cut = 0, 0
    farthest = _DOUBLED
    divisible = _divisible(pieces)
    for end, is_upper in ((divisible[0], False), (divisible[-1], True)):
        reach, twice = _cut_of(pieces[end], is_upper, median, edges)
        if reach > farthest and _size(pieces[end])[0] > clear:
            place, cut = end, twice
            farthest = reach
    parts = _parted(pieces[place], cut) or [pieces[place]]
    return [*pieces[:place], *parts, *pieces[place + 1 :]]


def _halves(piece: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Splits a level into halves of about equal mass; a single cell in its middle."""
    if len(piece) == 1:
        low, high = piece[0][:2]
        middle = (low + high) // 2
        mass = piece[0][2]
        part = mass * (middle - low) / (high - low)
        return [(low, middle, part)], [(middle, high, mass - part)]
    sums = np.cumsum([mass for _, _, mass in piece])[:-1]
    place = int(np.argmin(np.abs(sums - sum(mass for _, _, mass in piece) / 2.0))) + 1
    return piece[:place], piece[place:]
