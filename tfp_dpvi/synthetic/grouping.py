"""Levels chosen by a private histogram: quantile bins, bins of single frequent values, and merged rare categories.

Numbers are counted in a tree with 16 branches over their finest bins, at every depth, which finds frequent values at any
scale of a wide column. Everything after the noise is post-processing.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np

from tfp_dpvi.data.columns import Categorical, Column, Numeric

_BRANCHES = 16
_SPLIT = 4.0  # Counts, in standard deviations of the noise, from which a node's children are examined, ...
_LIKELY = 2.5  # ... if the node holds 0, a bound or a declared spike, where heaps are likely, ...
_SEEN = 2.0  # ... and from which a child is separated from its neighbours.
_FEW = 5  # Number of levels below which one may normally have most records.

Cell = tuple[int, int, float]
"""The finest levels from the first number up to the second, and the estimated number of records in them."""


@dataclasses.dataclass(frozen=True)
class Grouped(Column):
    """A column with grouped finest levels."""

    column: Column  # With the finest levels, which samples have.
    of: Column  # The user's description.
    groups: tuple[int, ...]  # The group of each finest level.
    shares: tuple[float, ...]  # The probability of each finest level within its group, for samples.

    @property
    def num_levels(self) -> int:
        """The number of groups."""
        return max(self.groups) + 1

    @property
    def description(self) -> Column:
        """The user's description."""
        return self.of

    def _levels(self, name: str, values: np.ndarray) -> np.ndarray:
        return np.array(self.groups, np.int32)[self.column._levels(name, values)]

    def values(self, levels: np.ndarray, generator: np.random.Generator) -> np.ndarray:
        """Returns values of finest levels drawn by their shares."""
        groups, shares = np.array(self.groups), np.array(self.shares)
        order = np.argsort(groups, kind="stable")
        ends = np.cumsum(shares[order])  # Each group's shares sum to 1: group g ends at g + 1.
        places = np.searchsorted(ends, levels + generator.random(len(levels)), side="right")
        first = np.searchsorted(groups[order], levels, side="left")
        last = np.searchsorted(groups[order], levels, side="right") - 1
        return self.column.values(order[np.clip(places, first, last)], generator)


def crowded(column: Column, masses: np.ndarray) -> tuple[float, float] | None:
    """Returns the ends of a bin with more than half of the records, among many bins, that is no single value; or None.

    `masses` are released counts of the column's levels.
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
    """Returns the number of histograms that count a record of an open column: the squared norm of its counts."""
    assert column.fine is not None
    if isinstance(column, Categorical):
        return 1
    return max(1, math.ceil(math.log(column.fine.num_levels, _BRANCHES) - 1e-9))


def histograms(column: Column, levels: np.ndarray) -> list[np.ndarray]:
    """Counts finest levels, of `column.fine`, in a tree: float64 vectors from coarse to fine, *not private*.

    A missing value, -1, is not counted.

    #### Formal guarantee

    A record adds 1 to at most one entry of each vector, and nothing else.
    """
    assert column.fine is not None
    here, num, depth = levels[levels >= 0], column.fine.num_levels, depths(column)
    widths = (
        [1]
        if isinstance(column, Categorical)
        else [_BRANCHES ** (depth - 1 - d) for d in range(depth)]
    )
    return [
        np.bincount(here // width, minlength=-(-num // width)).astype(np.float64)
        for width in widths
    ]


def group(column: Column, counts: list[np.ndarray], deviation: float) -> Grouped:
    """Chooses an open column's declared number of levels by noisy `histograms`; all zeros with 0.0 for no information."""
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
    found, num = counts[rare], int(rare.sum())
    seen = np.where(found > _SEEN * deviation, found, 0.0)
    by_noise = num * deviation * math.exp(-0.5 * _SEEN**2) / math.sqrt(2.0 * math.pi)
    sure = max(float(seen.sum()) - by_noise, 0.0)
    masses[rare] = (
        seen * sure / max(float(seen.sum()), 1e-9) + max(float(found.sum()) - sure, deviation) / num
    )
    return _grouped(column, column, groups, masses, np.ones(column.num_levels))


def _cells(
    tree: list[np.ndarray], sd: float, likely: np.ndarray, depth: int, node: int, mass: float
) -> list[Cell]:
    """Returns the cells that are distinguished below a node; indistinct neighbours are one cell."""
    width = _BRANCHES ** (len(tree) - 1 - depth)
    children = range(
        node * _BRANCHES if depth else 0, min((node + 1) * _BRANCHES, len(tree[depth]))
    )
    found = {child: float(tree[depth][child]) for child in children}
    seen = {child: count for child, count in found.items() if count > _SEEN * sd}
    total, rest = sum(seen.values()), len(found) - len(seen)
    scale = mass / total if total > mass or (total > 0.0 and rest == 0) else 1.0
    share = max(mass - scale * total, 0.0) / max(rest, 1)
    cells: list[Cell] = []
    for child in children:
        low, high = child * width, min((child + 1) * width, len(tree[-1]))
        if child not in seen:
            if child - 1 in found and child - 1 not in seen:
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
    """Divides cells into levels of about equal mass; returns the cells and each level's end among them."""
    pieces: list[list[Cell]] = [[]]
    for cell in cells:
        for part in _cut(cell, alone):
            single = part[1] - part[0] == 1 and part[0] in alone
            if pieces[-1] and (single or pieces[-1][-1][0] in alone):
                pieces.append([])
            pieces[-1].append(part)
    while len(pieces) < levels:
        able = [place for place, piece in enumerate(pieces) if piece[-1][1] - piece[0][0] > 1]
        place = max(
            able,
            key=lambda one: (
                sum(mass for _, _, mass in pieces[one]),
                pieces[one][-1][1] - pieces[one][0][0],
            ),
        )
        pieces[place : place + 1] = _halves(pieces[place])
    return [cell for piece in pieces for cell in piece], np.cumsum([len(piece) for piece in pieces])


def _cut(cell: Cell, alone: set[int]) -> list[Cell]:
    """Splits a cell at the finest levels that need their own cells."""
    low, high, mass = cell
    marks = sorted(
        {low, high} | {edge for one in alone if low <= one < high for edge in (one, one + 1)}
    )
    return [(a, b, mass * (b - a) / (high - low)) for a, b in itertools.pairwise(marks)]


def _halves(piece: list[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Splits a level into halves of about equal mass; a single cell in its middle."""
    if len(piece) == 1:
        low, high, mass = piece[0]
        middle = (low + high) // 2
        part = mass * (middle - low) / (high - low)
        return [(low, middle, part)], [(middle, high, mass - part)]
    sums = np.cumsum([mass for _, _, mass in piece])[:-1]
    place = int(np.argmin(np.abs(sums - sum(mass for _, _, mass in piece) / 2.0))) + 1
    return piece[:place], piece[place:]
