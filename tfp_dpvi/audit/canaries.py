"""Canaries: records whose clipped contribution to a step is large and known."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.audit.observed import ObservedStep
from tfp_dpvi.data import make_records
from tfp_dpvi.models import DPModel

_SCALES = (1.0, 30.0, -30.0, 1e3, -1e3)
_UNIT = 1e3
_WEIGHTS = (1.0, 100.0)
_STEPS = 16
_MOST_UNITS = 128
_MOST = 512

Rows = dict[str, Any]
"""Arrays under "x", "y" and "sample_weight"; a missing part has no key."""


def rows_of(model: DPModel, x: Structure, y: Structure | None, weight: np.ndarray | None) -> Rows:
    """Returns records as arrays with the types that `fit` gives them."""
    records = make_records(x, y, weight, dtype=model.record_dtype, validate=False)
    return tf.nest.map_structure(lambda part: part.numpy(), records.tensors())


def converted(model: DPModel, name: str, records: dict[str, Any]) -> Rows:
    """Returns the records of an argument `name` with the types that `fit` gives them.

    Raises:
      ValueError: there is no x, or a part that `fit` does not know.
    """
    if "x" not in records or set(records) - {"x", "y", "sample_weight"}:
        raise ValueError(
            f"{name} has the keys {sorted(records)}: pass x and, as for fit, y and sample_weight."
        )
    return rows_of(model, records["x"], records.get("y"), records.get("sample_weight"))


def appended(rows: Rows, more: Rows) -> Rows:
    """Returns two sets of records, one after the other."""
    return tf.nest.map_structure(lambda a, b: np.concatenate([a, b]), rows, more)


def taken(rows: Rows, indices: Sequence[int] | np.ndarray) -> Rows:
    """Returns some of the records."""
    return tf.nest.map_structure(lambda part: part[np.asarray(indices)], rows)


def candidates(rows: Rows) -> Rows:
    """Returns extreme records: a few of the records, enlarged, and vectors with one large entry, each with several labels."""
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
    made: Rows = {"x": tf.nest.map_structure(lambda part: part[own], x)}
    if "y" in rows:
        made["y"] = tf.nest.map_structure(lambda part: part[labels[label]], rows["y"])
    if "sample_weight" in rows:
        dtype = rows["sample_weight"].dtype
        made["sample_weight"] = np.resize(np.array(_WEIGHTS, dtype), len(own))
    return taken(made, np.unique(np.linspace(0, len(own) - 1, min(len(own), _MOST)).astype(int)))


def _scaled(part: np.ndarray, scale: float) -> np.ndarray:
    return (part * part.dtype.type(scale)) if part.dtype.kind == "f" else part


def _units(x: Structure) -> np.ndarray | None:
    """Returns vectors with one large entry of either sign, if records are vectors of moderate length."""
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
      rows: the records.
      means: [n, D], over steps in which a record adds anything, in the units of `ObservedStep.values`.
      shares: [n], the share of such steps.
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
        """Returns up to `most` records whose contributions are large and nearly orthogonal, the largest first."""
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


def contributions(
    model: DPModel, rows: Rows, key: np.ndarray, *, num_records: int
) -> Contributions:
    """Measures what each record adds to the sums of a step by itself, over a few steps."""
    num = len(tf.nest.flatten(rows)[0])
    step = ObservedStep(
        model,
        rows["x"],
        rows.get("y"),
        rows.get("sample_weight"),
        num_steps=None,
        num_records=num_records,
        batch_size=num_records,
    )
    means, shares = [], []
    for record in range(num):
        keep = np.arange(num) == record
        added = np.nan_to_num(step.all_values(key, _STEPS, noise=0.0, keep=keep))
        norms = np.linalg.norm(added, axis=1)
        there = norms > 0.5 * np.max(norms)
        means.append(added[there].mean(axis=0) if there.any() else np.zeros(added.shape[1]))
        shares.append(float(there.mean()))
    return Contributions(rows, np.stack(means), np.array(shares))
