"""Typical values of columns that hospitals agree on, from noisy counts of each.

A study scales columns by their typical values. Where nothing but bounds is public, each hospital
counts its records between these, with noise, before there is a study; sums of the counts show where
values lie at all hospitals together.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi.data import Schema
from tfp_dpvi.data.columns import Numeric
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.privacy import NeighboringRelation, PrivacyLedger
from tfp_dpvi.regressions.checking import numbers_within
from tfp_dpvi.regressions.measured import (
    Measurable,
    Terms,
    checked_shares,
    described_by,
    num_counts,
    planned,
    undescribed,
    unresolved,
)

if TYPE_CHECKING:
    from tfp_dpvi.data.schema import Described, TableData

_LOG = logging.getLogger("tfp_dpvi")

# Numbers of a message are smaller, so that their sums are finite.
_MOST = 1e15


@dataclasses.dataclass(frozen=True, eq=False)
class ColumnCounts:
    """Noisy counts of a hospital's columns between their public bounds; public themselves.

    Args:
      hospital: Its name.
      schema: The columns that were counted, as `Schema.to_json` has them.
      counts: The noisy counts of each by its name, in eighths of the bounds, in eighths of these,
        and so on.
      deviation: The standard deviation of the noise on each count.
      num_records: The public number of records, or of persons, that were counted.

    Raises:
      TypeError, ValueError: A value is not finite, or of another shape.
    """

    hospital: str
    schema: str
    counts: Mapping[str, np.ndarray]
    deviation: float
    num_records: int

    def __post_init__(self) -> None:
        put = object.__setattr__
        check.text("hospital", self.hospital, "pass the hospital's name")
        put(self, "num_records", check.count("num_records", self.num_records, 1))
        put(self, "deviation", check.positive("deviation", self.deviation))
        columns = Schema.from_json(self.schema).columns
        check.fields("counts", self.counts, needed=columns, known=columns)
        counts = {name: np.asarray(self.counts[name], np.float64) for name in columns}
        put(self, "counts", counts)
        if max(self.num_records, self.deviation) > _MOST:
            raise ValueError(f"num_records and deviation must be below {_MOST:g}.")
        for name, column in columns.items():
            if not isinstance(column, Numeric) or counts[name].shape != (num_counts(column),):
                raise ValueError(f"counts of {name!a:.99} have another shape than its bounds ask.")
            # Also false for what is not a number.
            if not np.all(np.abs(counts[name]) < _MOST):
                raise ValueError(f"counts of {name!a:.99} are not finite, or above {_MOST:g}.")

    def to_json(self) -> str:
        """Returns the counts as text, to be sent to the other hospitals."""
        fields = dataclasses.asdict(self)
        fields["counts"] = {name: part.tolist() for name, part in fields["counts"].items()}
        return json.dumps(fields)

    @classmethod
    def from_json(cls, text: str) -> ColumnCounts:
        """Reads what `to_json` wrote.

        Args:
          text: The text, from whomever.

        Raises:
          ValueError: It is no such text, or its values cannot be.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        try:
            fields = check.fields("counts", json.loads(text), needed=names, known=names)
            return cls(**fields)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"no counts of columns: {check.first_line(error)}") from None

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the counts to a file.

        Args:
          path: The file, which must not exist: counts are paid for once.

        Raises:
          FileExistsError: It exists.
        """
        with pathlib.Path(path).open("x") as file:
            file.write(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ColumnCounts:
        """Reads a file of `save`.

        Args:
          path: The file.

        Raises:
          ValueError: As of `from_json`.
        """
        return cls.from_json(pathlib.Path(path).read_text())


def count_columns(
    schema: Described,
    data: TableData,
    *,
    name: str,
    epsilon: float,
    ledger: PrivacyLedger,
    num_hospitals: int,
    delta: float = 1e-5,
    columns: Sequence[str] | None = None,
    share: float | None = None,
    num_records: int | None = None,
    unit_ids: Identifiers = None,
    neighboring_relation: NeighboringRelation | str = "add_or_remove_one",
    outside: str = "refuse",
    seed: int | None = None,
) -> ColumnCounts:
    """Releases noisy counts of a hospital's columns, from which typical values follow.

    Args:
      schema: The public description of the columns, the same at every hospital.
      data: The hospital's records, one row each.
      name: The hospital's name.
      epsilon: The most that these records may ever cost, as of `Hospital`.
      ledger: The hospital's ledger, which the study will use too.
      num_hospitals: About how many hospitals count; the more, the less each has to spend.
      delta: The delta of epsilon.
      columns: The columns; None for the numbers of which the schema has bounds alone.
      share: The share of epsilon and delta to spend; None for the least of .02 to .5 at which an
        eighth of the records of all hospitals, or from .3 on half of them, stands out of the noise.
      num_records: The public number of records; by default the exact one is taken as public. With
        `unit_ids`, of persons.
      unit_ids: The person of each row: one row of each, at random, is counted.
      neighboring_relation: As of `Hospital`.
      outside: "refuse", or "clip" for numbers outside of their bounds.
      seed: Makes the release repeatable, and *not private*.

    Returns:
      The counts, to be shown to everybody.

    Raises:
      TypeError: The ledger is none.
      ValueError: Columns and data do not fit, there is nothing to count, or noise would hide it;
        no privacy was spent.

    #### Formal guarantee

    One Gaussian release, charged before its noise is drawn, which counts towards the hospital's
    epsilon as any other on its ledger: see `Measurement`. Who computes typical values from counts
    touches no record.

    ```python
    >>> import numpy as np
    >>> import tfp_dpvi as dpvi
    >>> schema = {"age": {"type": "continuous", "lower": 0.0, "upper": 1000.0}}
    >>> rng = np.random.default_rng(0)
    >>> tables = {name: {"age": rng.normal(50.0, 9.0, 4000)} for name in ("berlin", "munich")}
    >>> budget = {"epsilon": 1.0, "num_hospitals": 2, "seed": 0}  # A seed is not private.
    >>> counts = [
    ...     count_columns(schema, table, name=name, ledger=dpvi.PrivacyLedger(), **budget)
    ...     for name, table in tables.items()
    ... ]
    >>> [round(value) for value in described_together(schema, counts).columns["age"].typical]
    [49, 12]

    ```
    """
    schema = Schema.of(schema)
    check.text("name", name, "pass the hospital's name")
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of columns, such as [{columns!a:.99}].")
    names = tuple(dict.fromkeys(undescribed(schema) if columns is None else columns))
    if not names:
        raise ValueError(
            "columns is empty, or schema has typical values of all numbers: nothing is to count."
        )
    check.one_of("outside", outside, ("refuse", "clip"))
    for column in names:
        check.one_of("columns", column, schema.names)
        numbers_within(schema, column, data, outside)
    if not isinstance(ledger, PrivacyLedger):
        raise TypeError(f"ledger must be a dpvi.PrivacyLedger, got {check.shown(ledger)}.")
    if seed is not None:
        check.count("seed", seed)
    terms = Terms(
        check.epsilon(epsilon),
        check.delta(delta),
        0 if num_records is None else check.count("num_records", num_records, 1),
        seed=seed,
        num_hospitals=check.count("num_hospitals", num_hospitals, 1),
        relation=check.relation(neighboring_relation),
    )
    records = Measurable(data, ledger, unit_ids)
    release, arrays = planned(schema, names, checked_shares(share, records), records, terms)
    if share is None and not release.can_show:
        raise ValueError(
            f"num_records={release.num_records} are too few for counts at epsilon={epsilon:g}: "
            "leave them to larger hospitals,\nor declare typical=[mean, sd] in the schema."
        )
    release.check_affordable()
    counts = dict(zip(names, release.counts(arrays), strict=True))
    counted = schema.part(names).to_json()
    return ColumnCounts(name, counted, counts, release.deviation, release.num_records)


def described_together(schema: Described, counts: Sequence[ColumnCounts]) -> Schema:
    """Returns a schema with the typical values that hospitals' counts show together.

    It touches no record, and warns of columns whose typical values are still not known.

    Args:
      schema: The public description of the columns, as the hospitals had it.
      counts: Those of each hospital, all of the same columns.

    Returns:
      The schema: every hospital that has the same counts gets the same one.

    Raises:
      ValueError: There are none, two are of one hospital, or a hospital's columns or bounds differ.
    """
    schema = Schema.of(schema)
    if not counts or not all(isinstance(each, ColumnCounts) for each in counts):
        raise ValueError("counts has no counts, or others: pass what `count_columns` returned.")
    counts = sorted(counts, key=lambda each: each.hospital)
    hospitals = [each.hospital for each in counts]
    if len(set(hospitals)) < len(hospitals):
        raise ValueError("counts has a hospital twice: pass one release of each.")
    names = list(counts[0].counts)
    text = schema.part(names).to_json() if set(names) <= set(schema.names) else ""
    if other := [each.hospital for each in counts if each.schema != text]:
        raise ValueError(
            f"counts of {other!a:.99} are of other columns or bounds than the schema: agree on one."
        )
    total = {name: np.sum([each.counts[name] for each in counts], axis=0) for name in names}
    deviation = math.sqrt(sum(each.deviation**2 for each in counts))
    num_records = sum(each.num_records for each in counts)
    found = described_by(schema, total, deviation, num_records)
    hidden = set(unresolved(found, names))
    kept = {name: schema.columns[name] for name in hidden}
    described = Schema({**found.columns, **kept})
    if unknown := [name for name in names if name in undescribed(described)]:
        _LOG.warning(
            "Counts do not show where values of %s lie: declare typical=[mean, sd], or narrower "
            "bounds.",
            ", ".join(unknown),
        )
    return described
