"""Replay on neighbouring data sets: the measured difference of the sum against the stated sensitivity (C3, C8)."""

import dataclasses
import math

import numpy as np

from support.subject import REAL
from tfp_dpvi._tf import tf
from tfp_dpvi.audit.replayed import rounding, with_row
from tfp_dpvi.gradients import Clip

WIDTH = 5  # Coordinates of a record in the tests of raw vectors.


@dataclasses.dataclass(frozen=True)
class Differences:
    """The effect of one record on a sum, measured on neighbouring records with the same randomness.

    Attributes:
      presence: distance of the sum with the record and without it.
      other_presence: likewise for the record that replaces it.
      replacement: distance of the sums with either record.
      finite: whether all three sums are.
      full, removed, replaced: the sums.
    """

    presence: float
    other_presence: float
    replacement: float
    finite: bool
    full: list
    removed: list
    replaced: list


def distance(parts, others):
    """Returns the joint l2 distance of two sums."""
    squares = [
        float(np.sum(np.square(np.asarray(a, np.float64) - np.asarray(b, np.float64))))
        for a, b in zip(parts, others, strict=True)
    ]
    return math.sqrt(sum(squares))


def differences(sums, records, other, at):
    """Returns how far a sum moves if record `at` is removed, or replaced by record `at` of `other`.

    The removed record is masked at its index, so that all other records keep their random numbers.

    Args:
      sums: `(records, mask) -> parts of the sum`; the same randomness in every call.
      records: structure of arrays with one row for each record.
      other: likewise, with the same shapes.
      at: the index of the record.

    Returns:
      The distances, in the unit of the sum.
    """
    num = len(tf.nest.flatten(records)[0])
    mask = np.ones(num, bool)
    without = mask.copy()
    without[at] = False
    full = sums(records, mask)
    removed = sums(records, without)
    replaced = sums(with_row(records, other, at, at), mask)
    finite = all(bool(np.all(np.isfinite(p))) for p in (*full, *removed, *replaced))
    return Differences(
        distance(full, removed),
        distance(replaced, removed),
        distance(full, replaced),
        finite,
        full,
        removed,
        replaced,
    )


def raw_sums(subject=REAL, *, jit_compile=False):
    """Compiled: records [P, WIDTH], losses [P], mask, clip -> the parts of the clipped sum of the records themselves.

    A record *is* its gradient here, in two parts, so that any gradient there can be is reached.
    """

    def record_gradient(record, keep):
        del keep
        return record["loss"], [record["x"][:2], tf.reshape(record["x"][2:], [3, 1])]

    def compute(x, loss, mask, clip):
        return list(
            subject.clipped_sum(record_gradient, {"x": x, "loss": loss}, mask, Clip(clip))[
                0
            ].tensors
        )

    return tf.function(compute, jit_compile=jit_compile, autograph=False)


def model_sums(model, engine, subject=REAL, *, jit_compile=False):
    """Compiled: key, records, mask, clip -> the clipped sum of a model's records."""

    def compute(key, records, mask, clip):
        model.gradients = engine
        step = subject.step_gradients(model, key, 100)
        return list(subject.clipped_sum(step.record_gradient, records, mask, Clip(clip))[0].tensors)

    return tf.function(compute, jit_compile=jit_compile, autograph=False)


def check_neighbours(sums, records, other, at, clip, sensitivity=(1.0, 2.0)):
    """C3, C8: one record removed and one replaced move a sum by at most A C and D C; bad records count for nothing.

    Args:
      sums: (records, mask, clip) -> parts of the clipped sum; the same randomness in each call.
      records: dict of arrays.
      other: dict of arrays with the same shapes; its record `at` replaces that of `records`.
      at: the index of the record that differs.
      clip: the clip.
      sensitivity: A and D as stated, in clips.
    """
    moved = differences(lambda rows, mask: sums(rows, mask, clip), records, other, at)
    full, removed = moved.full, moved.removed
    allowed = rounding(
        np.asarray(full[0]).dtype, len(records["x"]), sum(np.size(part) for part in full)
    )
    a, d = ((stated + allowed) * clip for stated in sensitivity)
    assert moved.finite, "a sum is not finite"
    assert moved.presence <= a, f"presence moves the sum by {moved.presence / clip:.6g} C"
    assert moved.other_presence <= a, "presence of the replacement"
    assert moved.replacement <= d, f"replacement moves the sum by {moved.replacement / clip:.6g} C"
    for source, parts in ((records, full), (other, moved.replaced)):
        if any(
            not np.all(np.isfinite(part[at])) for part in source.values() if part.dtype.kind == "f"
        ):
            for part, reference in zip(parts, removed, strict=True):
                np.testing.assert_array_equal(
                    part, reference, err_msg="a bad record contributes exactly zero"
                )
    return full, removed


SPECIAL = (
    0.0,
    1.0,
    -1.0,
    1e-3,
    1e30,
    -1e30,
    3e38,
    -3e38,
    1e-42,
    1e-38,
    math.nan,
    math.inf,
    -math.inf,
)


def odd_values(rng, shape, dtype, share=0.3):
    """Ordinary values with huge, tiny and bad ones among them; some records are bad throughout, some ordinary."""
    values = rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, size=shape)
    odd = rng.random(shape) < share * (rng.random((shape[0],) + (1,) * (len(shape) - 1)) < 0.7)
    return np.where(odd, rng.choice(SPECIAL, size=shape), values).astype(dtype)


def check_raw_replay(subject=REAL, *, dtype=np.float32, jit_compile=False, trials=150, seed=0):
    """C3, C8: for any gradients, by seeded random search."""
    rng = np.random.default_rng(seed)
    function = raw_sums(subject, jit_compile=jit_compile)

    def sums(records, mask, clip):
        return [
            part.numpy()
            for part in function(records["x"], records["loss"], mask, np.asarray(clip, dtype))
        ]

    def draw():
        loss = np.where(rng.random(6) < 0.2, rng.choice(SPECIAL, size=6), 1.0).astype(dtype)
        return {"x": odd_values(rng, (6, WIDTH), dtype), "loss": loss}

    for _ in range(trials):
        clip = float(dtype(10.0 ** rng.uniform(-6, 3)))
        check_neighbours(sums, draw(), draw(), int(rng.integers(6)), clip)
