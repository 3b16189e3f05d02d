"""Requirements of the paired clip on a model: its settings, and rows that do not mix."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeGuard

import numpy as np

from tfp_dpvi._tf import Structure, function_of_model, map_apart, tf, without_assertions
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel
from tfp_dpvi.calibrated.twins import simulate_twins
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import synthetic

_NUM_TRIED = 5
# Values of a row, to see whether it moves others, or is moved by them.
_VALUES = (-0.5, 1e3, -1e3, 1e7, -1e7, 1e30, math.inf, math.nan)
# Larger ones may be lengths, which take memory.
_INTEGERS = (*range(_NUM_TRIED), -1, 100)
# By so much rounding may change a value, relative or absolute.
_SAME = 1e-3
_NUM_DRAWS = 64
# The density of a count is a difference of terms as large as the count.
_LARGE = 1e3
# Of the distance of parameters from the prior's middle, where rows are tried.
_SHARES = (1.0, 0.1, 0.01, 0.001, 0.0001)
_REFUSALS = (*LIKELIHOOD_ERRORS, tf.errors.OpError)

Trials = tuple[
    Callable[[Structure], list[np.ndarray] | None], Callable[[Structure, list[np.ndarray]], bool]
]


class CannotPairError(Exception):
    """Raised with the reason if the paired clip does not apply."""


def check_settings(gradients: str, num_draws: int) -> None:
    """Checks that a `DPVI` with these settings can clip pairs.

    Args:
      gradients: "aligned" or "vectorized", as in `DPVI`.
      num_draws: Draws of the parameters in each step.

    Raises:
      CannotPairError: It cannot.
    """
    if gradients != "aligned":
        raise CannotPairError(
            f"gradients={gradients!r} clips gradients in the surrogate's variables"
        )
    if num_draws != 1:
        raise CannotPairError(f"num_draws={num_draws} averages before the clip")


def check_rows(model: BayesianModel, coordinates: Coordinates, records: Records) -> None:
    """Checks that no row of the likelihood depends on another record, on synthetic records.

    A row's twin and its density must not change if another row does, whichever it is and whatever
    either holds, and its density must be that of the record alone.

    Args:
      model: Prior and likelihood of outcomes.
      coordinates: Those of its parameters.
      records: Records whose shapes and dtypes are read; their values are not.

    Raises:
      CannotPairError: A row depends on another one, or nothing can be drawn to see it.
    """
    generator = np.random.default_rng(0)
    x = tf.nest.map_structure(lambda part: synthetic(part, _NUM_TRIED, generator), records.x)
    trials_at = _trials(model)
    found = False
    for share in _SHARES:
        seen = _rows_are_apart(trials_at(_parameters(coordinates, share)), x)
        if seen:
            return
        found |= seen is not None
    if not found:
        raise CannotPairError(
            "the likelihood has no finite draws of moderate size at synthetic inputs, to check its "
            "rows"
        )


def _rows_are_apart(trials: Trials, x: Structure) -> bool | None:
    """Checks rows at some parameters.

    Args:
      trials: See `_trials`.
      x: Synthetic inputs.

    Returns:
      Whether a row depends on its own inputs, and so would show it if it did on others'; None if
      there is nothing to draw, or nothing but rounded densities.

    Raises:
      CannotPairError: A row depends on another one.
    """
    # Another seed than that of x, whose values a move would otherwise draw again.
    generator = np.random.default_rng(1)
    draw, is_alone = trials
    seen = False
    for number, start in enumerate((x, _numbered(x))):
        before = draw(start)
        if not _can_be_used(before):
            # The numbers of rows may be no categories.
            return seen if number else None
        if not is_alone(start, before):
            if _are_large(before[2:]):
                return None
            raise CannotPairError("the density of one record depends on other records of the batch")
        for row in range(_NUM_TRIED):
            others = np.arange(_NUM_TRIED) != row
            alike = np.where(others, (row + 2) % _NUM_TRIED, row)
            for legal, moved in _moves(start, row, generator):
                after = draw(moved)
                if after is None and legal:
                    return None
                seen |= legal and not _same_rows(before, after or before, ~others)
                # A missing number may be replaced by a mean: then the others move the row.
                beside = draw(
                    tf.nest.map_structure(functools.partial(np.take, indices=alike, axis=0), moved)
                )
                if after is not None and not (
                    _same_rows(before, after, others)
                    and _same_rows(after, beside or after, ~others)
                ):
                    raise CannotPairError(
                        "the twin of one record depends on other records of the batch"
                    )
        if all(part.dtype.kind == "f" for part in tf.nest.flatten(x)):
            break
    return seen


def _parameters(coordinates: Coordinates, share: float) -> Structure:
    """Returns a draw of the prior, at a share of its distance from the prior's middle.

    At a draw of a vague prior, exponentials of a predictor overflow.
    """
    draws = coordinates.prior_draws(_NUM_DRAWS, seed=(0, 1))
    middle = np.median(draws, axis=0)
    vector = tf.constant(middle + share * (draws[0] - middle), coordinates.dtype)
    return coordinates.constrain(tf.split(vector, coordinates.sizes))


def _can_be_used(drawn: list[np.ndarray] | None) -> TypeGuard[list[np.ndarray]]:
    """Returns whether simulated twins and their densities are finite."""
    return drawn is not None and bool(
        all(part.dtype.kind != "f" or np.isfinite(part).all() for part in drawn) and drawn[1].all()
    )


def _are_large(twins: list[np.ndarray]) -> bool:
    """Returns whether the densities of twins may be rounded, as those of counts of millions are."""
    return any(np.max(np.abs(part), initial=0.0) > _LARGE for part in twins)


def _trials(model: BayesianModel) -> Callable[[Structure], Trials]:
    """Returns a function of parameters, which returns two functions of inputs.

    One simulates twins, one tries each record alone. The first returns log densities, whether each
    twin can be used, and the parts of the twins; or None if the likelihood refuses the inputs. The
    second takes them and returns whether the log densities are those of the records alone.
    """

    @function_of_model
    def run(params: Structure, x: Structure) -> list[tf.Tensor]:
        with without_assertions():
            distribution = model.distribution_at(params, x)
            twins, usable = simulate_twins(distribution, {"x": x, "y": ()}, tf.constant([0, 2]))
            return [distribution.log_prob(twins), usable, *tf.nest.flatten(twins)]

    @function_of_model
    def run_alone(params: Structure, x: Structure, twins: list[tf.Tensor]) -> tf.Tensor:
        like = model.distribution_at(params, x).dtype

        def log_prob(row: Structure) -> tf.Tensor:
            inputs, twin = tf.nest.map_structure(lambda part: part[None], row)
            distribution = model.distribution_at(params, inputs)
            return distribution.log_prob(tf.nest.pack_sequence_as(like, twin))[0]

        return map_apart(log_prob, (x, twins))

    def draw(params: Structure, x: Structure) -> list[np.ndarray] | None:
        try:
            return [part.numpy() for part in run(params, tf.nest.map_structure(tf.constant, x))]
        except _REFUSALS:
            return None

    def is_alone(params: Structure, x: Structure, drawn: list[np.ndarray]) -> bool:
        try:
            alone = run_alone(params, tf.nest.map_structure(tf.constant, x), drawn[2:]).numpy()
        except tf.errors.OpError:
            # A record reads another, which it lacks when alone.
            return False
        return np.allclose(alone, drawn[0], rtol=_SAME, atol=_SAME)

    return lambda params: (
        functools.partial(draw, params),
        functools.partial(is_alone, params),
    )


def _same_rows(before: list[np.ndarray], after: list[np.ndarray], rows: np.ndarray) -> bool:
    """Returns whether arrays agree in all of these rows, but for rounding.

    TensorFlow's last digit depends on where in memory a tensor lies.
    """
    return all(
        np.allclose(a[rows], b[rows], rtol=_SAME, atol=_SAME, equal_nan=True)
        for a, b in zip(before, after, strict=True)
    )


def _numbered(records: Structure) -> Structure:
    """Returns the records with integers that are the numbers of other rows."""

    def numbered(part: np.ndarray) -> np.ndarray:
        numbers = np.arange(_NUM_TRIED)[::-1].reshape(-1, *[1] * (part.ndim - 1))
        return np.broadcast_to(numbers, part.shape).astype(part.dtype) if _counts(part) else part

    return tf.nest.map_structure(numbered, records)


def _moves(
    records: Structure, row: int, generator: np.random.Generator
) -> Iterator[tuple[bool, Structure]]:
    """Yields whether the likelihood must allow the values of a row, and records with these values.

    Rows are replaced by ordinary values, which it must allow, and by extreme ones.
    """

    def move(value: float | None, concerns: Callable[[np.ndarray], bool]) -> Structure:
        def moved(part: np.ndarray) -> np.ndarray:
            part = part.copy()
            if value is not None and concerns(part):
                part[row] = value
            elif value is None and part.dtype.kind == "f":
                part[row] = generator.uniform(size=part.shape[1:])
            elif value is None:
                part[row] = part[row] == 0
            return part

        return tf.nest.map_structure(moved, records)

    kinds = {part.dtype.kind for part in tf.nest.flatten(records)}
    yield True, move(None, lambda part: True)
    # Floats and integers apart: an index that is out of range would hide what the floats do.
    for value in _VALUES if "f" in kinds else ():
        yield False, move(value, lambda part: part.dtype.kind == "f")
    for value in _INTEGERS if kinds & {"i", "u"} else ():
        # Unsigned ones have no negative values, and booleans legal ones only.
        yield False, move(value, (lambda part: part.dtype.kind == "i") if value < 0 else _counts)


def _counts(part: np.ndarray) -> bool:
    """Returns whether an array holds integers; booleans have legal values only."""
    return part.dtype.kind in "iu"
