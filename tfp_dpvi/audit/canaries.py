"""Canaries: records whose clipped contribution to a step is large and known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.audit.observed import ObservedStep, Setting
from tfp_dpvi.data import make_records
from tfp_dpvi.models import DPModel

# Factors by which records are enlarged.
_SCALES = (1.0, 30.0, -30.0, 1e3, -1e3)
# The large entry of a vector that is zero otherwise, and the most entries of such a vector.
_UNIT = 1e3
_MOST_UNITS = 128
# Weights of candidates, in turn.
_WEIGHTS = (1.0, 100.0)
# Steps over which a record's contribution is measured.
_STEPS = 16
# The most candidates.
_MOST = 512

Rows = dict[str, Any]
"""Records as arrays under "x", "y" and "sample_weight"; a missing part has no key."""


def rows_of(model: DPModel, x: Structure, y: Structure | None, weight: np.ndarray | None) -> Rows:
    """Returns records as arrays with the dtypes that `fit` gives them.

    Args:
      model: A compiled model.
      x: Records as for `fit`.
      y: Outcomes as for `fit`.
      weight: Weights as for `fit`.
    """
    records = make_records(x, y, weight, dtype=model.record_dtype, validate=False)
    return tf.nest.map_structure(lambda part: part.numpy(), records.tensors())


def convert_rows(model: DPModel, name: str, records: dict[str, Any]) -> Rows:
    """Returns the records of an argument with the dtypes that `fit` gives them.

    Args:
      model: A compiled model.
      name: The name of the argument, for messages.
      records: Records under "x", "y" and "sample_weight".

    Raises:
      ValueError: There is no x, or a part that `fit` does not know.
    """
    if "x" not in records or set(records) - {"x", "y", "sample_weight"}:
        raise ValueError(
            f"{name} has the keys {sorted(records)}: pass x and, as for fit, y and sample_weight."
        )
    return rows_of(model, records["x"], records.get("y"), records.get("sample_weight"))


def join_rows(rows: Rows, more: Rows) -> Rows:
    """Returns records followed by others of the same structure.

    Args:
      rows: The first records.
      more: Those that follow.
    """
    return tf.nest.map_structure(lambda a, b: np.concatenate([a, b]), rows, more)


def select_rows(rows: Rows, indices: Sequence[int] | np.ndarray) -> Rows:
    """Returns some of the records.

    Args:
      rows: The records.
      indices: The places of those to return.
    """
    return tf.nest.map_structure(lambda part: part[np.asarray(indices)], rows)


def candidates(rows: Rows) -> Rows:
    """Returns extreme records, each with several labels.

    They are a few of the records, enlarged, and vectors with a single large entry.
    """
    num = len(tf.nest.flatten(rows)[0])
    base = np.linspace(0, num - 1, min(num, 4)).astype(int)
    labels = _distinct(rows["y"]) if "y" in rows else np.array([0])
    x = tf.nest.map_structure(
        lambda part: np.concatenate([_scaled(part[base], scale) for scale in _SCALES]), rows["x"]
    )
    units = _units(rows["x"])
    if units is not None:
        x = np.concatenate([x, units])
    count = len(tf.nest.flatten(x)[0])
    own, label = np.divmod(np.arange(count * len(labels)), len(labels))
    extreme: Rows = {"x": tf.nest.map_structure(lambda part: part[own], x)}
    if "y" in rows:
        extreme["y"] = tf.nest.map_structure(lambda part: part[labels[label]], rows["y"])
    if "sample_weight" in rows:
        dtype = rows["sample_weight"].dtype
        extreme["sample_weight"] = np.resize(np.array(_WEIGHTS, dtype), len(own))
    places = np.linspace(0, len(own) - 1, min(len(own), _MOST)).astype(int)
    return select_rows(extreme, np.unique(places))


def _scaled(part: np.ndarray, scale: float) -> np.ndarray:
    return (part * part.dtype.type(scale)) if part.dtype.kind == "f" else part


def _units(x: Structure) -> np.ndarray | None:
    """Returns vectors with a single large entry of either sign, if records are short vectors."""
    if (
        not isinstance(x, np.ndarray)
        or x.ndim != 2
        or x.dtype.kind != "f"
        or x.shape[1] > _MOST_UNITS
    ):
        return None
    eye = np.eye(x.shape[1], dtype=x.dtype) * x.dtype.type(_UNIT)
    return np.concatenate([eye, -eye])


def _distinct(y: Structure) -> np.ndarray:
    """Returns the places of a few different labels: the least, the middle and the largest."""
    first = tf.nest.flatten(y)[0]
    size = first.reshape(len(first), -1).sum(axis=1)
    order = np.argsort(size, kind="stable")
    places = order[[0, len(order) // 2, -1]]
    _, unique = np.unique(size[places], return_index=True)
    return places[unique]


@dataclasses.dataclass(frozen=True, eq=False)
class Contributions:
    """The contributions of each of several records to a step's sums.

    Attributes:
      rows: The n records.
      means: Their mean contributions over steps in which they add anything, of shape [n, D], in the
        units of `ObservedStep.values`.
      shares: The shares of such steps, of shape [n].
    """

    rows: Rows
    means: np.ndarray
    shares: np.ndarray

    @property
    def norms(self) -> np.ndarray:
        """The l2 norms of the mean contributions over all steps, [n]."""
        return self.shares * np.linalg.norm(self.means, axis=1)

    def strongest(self) -> int:
        """Returns the record with the largest mean contribution."""
        return int(np.argmax(self.norms))

    def farthest_from(self, record: int) -> int:
        """Returns the record whose mean contribution lies farthest from that of another."""
        mean = self.shares[:, None] * self.means
        return int(np.argmax(np.linalg.norm(mean - mean[record], axis=1)))

    def apart(self, most: int) -> list[int]:
        """Returns up to `most` records with large and nearly orthogonal contributions.

        Those with the largest come first.
        """
        rest = self.shares[:, None] * self.means
        least = 0.5 * float(np.max(np.linalg.norm(rest, axis=1), initial=0.0))
        chosen: list[int] = []
        while len(chosen) < most:
            norms = np.linalg.norm(rest, axis=1)
            best = int(np.argmax(norms))
            if not norms[best] > least:
                break
            chosen.append(best)
            direction = rest[best] / norms[best]
            rest = rest - np.outer(rest @ direction, direction)
        return chosen


def as_persons(rows: Rows, most: int | None) -> Rows:
    """Returns persons that each have as many copies of a record as a person may have rows.

    Args:
      rows: The records.
      most: The largest number of rows of a person; None where a record is a row.
    """
    num = len(tf.nest.flatten(rows)[0])
    return rows if most is None else select_rows(rows, np.repeat(np.arange(num), most))


def contributions(
    model: DPModel, rows: Rows, key: np.ndarray, *, num_records: int, **settings: Setting
) -> Contributions:
    """Measures what each record adds to the sums of a step by itself, over a few steps.

    Args:
      model: A compiled model.
      rows: The records; with `max_rows_per_unit`, each is all rows of a person.
      key: The key of the steps, int64 of shape [2].
      num_records: The number of records N of the plan.
      **settings: `max_weight` and `max_rows_per_unit`, as in `DPVI.fit`.
    """
    num = len(tf.nest.flatten(rows)[0])
    most = settings.get("max_rows_per_unit")
    if most is not None:
        settings["unit_ids"] = np.repeat(np.arange(num), most)
    whole = as_persons(rows, most)
    step = ObservedStep(
        model,
        whole["x"],
        whole.get("y"),
        whole.get("sample_weight"),
        num_steps=None,
        num_records=num_records,
        batch_size=num_records,
        **settings,
    )
    means, shares = [], []
    for record in range(num):
        keep = step.keeping(np.repeat(np.arange(num) == record, most or 1))
        added = np.nan_to_num(step.all_values(key, _STEPS, noise=0.0, keep=keep))
        norms = np.linalg.norm(added, axis=1)
        sampled = norms > 0.5 * np.max(norms)
        means.append(added[sampled].mean(axis=0) if sampled.any() else np.zeros(added.shape[1]))
        shares.append(float(sampled.mean()))
    return Contributions(rows, np.stack(means), np.array(shares))
