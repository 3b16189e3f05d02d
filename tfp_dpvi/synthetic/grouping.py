"""Levels chosen by a private histogram.

They are quantile bins, bins of single frequent values, and merged rare categories. Numbers are
counted in a tree with 16 branches over their finest bins, at every depth, which finds frequent
values at any scale of a wide column. Everything after the noise is post-processing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tfp_dpvi.data.columns import MISSING, Categorical, Column, Numeric
from tfp_dpvi.data.schema import Schema

_BRANCHES = 16

# Counts, in standard deviations of the noise: from the first, a node's children are examined; from
# the second, if the node holds 0, a bound or a declared spike, where heaps are likely; and from the
# third, a child is separated from its neighbours.
_SPLIT = 4.0
_LIKELY = 2.5
_SEEN = 2.0

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
    """

    column: Column
    of: Column
    groups: tuple[int, ...]
    shares: tuple[float, ...]

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
        return self.column.values(order[np.clip(places, first, last)], generator)


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
    cells, ends = _divided(cells, alone, column.num_levels)
    starts = fine.edges[[low for low, _, _ in cells]]
    groups = np.searchsorted(ends, np.arange(len(cells)), side="right")
    masses = np.array([mass for _, _, mass in cells])
    kept = dataclasses.replace(fine, bins=tuple(float(edge) for edge in starts[1:]))
    return _grouped(
        kept, column, groups, masses, np.array([high - low for low, high, _ in cells], float)
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
    most = column.max_levels
    frequent = np.sort(np.argsort(-counts, kind="stable")[: most - 1])
    groups = np.full(column.num_levels, most - 1)
    groups[frequent] = np.arange(most - 1)
    masses, rare = np.maximum(counts, 0.0), groups == most - 1
    # Rare levels that stand out share the mass beyond that of noise alone; all share the rest.
    rare_counts, num = counts[rare], int(rare.sum())
    seen = np.where(rare_counts > _SEEN * deviation, rare_counts, 0.0)
    by_noise = num * deviation * math.exp(-0.5 * _SEEN**2) / math.sqrt(2.0 * math.pi)
    sure = max(float(seen.sum()) - by_noise, 0.0)
    rest = max(float(rare_counts.sum()) - sure, deviation)
    masses[rare] = seen * sure / max(float(seen.sum()), 1e-9) + rest / num
    return _grouped(column, column, groups, masses, np.ones(column.num_levels))


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


def _divided(cells: list[Cell], alone: set[int], levels: int) -> tuple[list[Cell], np.ndarray]:
    """Divides cells into levels of about equal mass; returns the cells and each level's end."""
    pieces: list[list[Cell]] = [[]]
    for cell in cells:
        for part in _cut(cell, alone):
            single = part[1] - part[0] == 1 and part[0] in alone
            if pieces[-1] and (single or pieces[-1][-1][0] in alone):
                pieces.append([])
            pieces[-1].append(part)
    while len(pieces) < levels:
        divisible = [place for place, piece in enumerate(pieces) if piece[-1][1] - piece[0][0] > 1]
        largest = max(divisible, key=lambda place: _size(pieces[place]))
        pieces[largest : largest + 1] = _halves(pieces[largest])
    return [cell for piece in pieces for cell in piece], np.cumsum([len(piece) for piece in pieces])


def _size(piece: list[Cell]) -> tuple[float, int]:
    """Returns a level's mass and width, by which levels are compared."""
    return sum(mass for _, _, mass in piece), piece[-1][1] - piece[0][0]


def _cut(cell: Cell, alone: set[int]) -> list[Cell]:
    """Splits a cell at the finest levels that need their own cells."""
    low, high = cell[:2]
    inner = {edge for level in alone if low <= level < high for edge in (level, level + 1)}
    marks = sorted({low, high} | inner)
    return [(a, b, cell[2] * (b - a) / (high - low)) for a, b in itertools.pairwise(marks)]


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
