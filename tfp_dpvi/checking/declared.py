"""The public description of a check, which is complete before anything is charged."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, function_of_model, tf, tfd
from tfp_dpvi._unit_latents import RecordLatent, UnitLatent
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel
from tfp_dpvi.bayes.predictive import posterior_draws
from tfp_dpvi.calibrated.scores import possible_values
from tfp_dpvi.calibrated.twins import draw_apart
from tfp_dpvi.checking.blocks import Block, sensitivity_of
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.privacy import Sensitivity

Columns: TypeAlias = Mapping[Any, Any]
"""Edges of bins by the keys of columns, or `Bins`; see `DPVI.check`."""

NUM_PIT = 10
"""Bins of the histogram of PIT values."""

PROBABILITIES = (0.02, 0.1, 0.5, 0.9, 0.98)
"""Edges of the bins of predicted probabilities of the reliability curve."""

# The contrast of wrong confidence: outcomes 1 too often where they are improbable, and so on.
CONFIDENCE = np.array([1.0, 1.0, -1.0, 1.0, -1.0, -1.0]) / math.sqrt(6.0)
# It is released with so many times less noise than the rest of the curve.
CONFIDENCE_WEIGHT = 4.0
# Of counts and variances, and of the mean log score, over residuals: they need less precision.
COUNT_WEIGHT = 0.2
SCORE_WEIGHT = 0.3
_MOST_BINS = 50
_DISCRETE_RANGE = (-10.0, 0.0)
# Around the expected log density of an outcome, in nats.
_BELOW = 8.0
_ABOVE = 4.0
_NUM_DRAWS = 8
# The probability of values other than 0 and 1, from rounding alone.
_NO_OTHER = 1e-5
_CLASSES = ("Categorical", "Ordered", "Bernoulli")


@dataclasses.dataclass(frozen=True, eq=False)
class Bins:
    """The bin of each record in one column, whose bins are public.

    ```python
    >>> Bins.of_numbers("age", np.array([20.0, 70.0]), [40, 60]).codes.tolist()
    [0, 2]

    ```

    Attributes:
      labels: A public name of each bin, in order.
      codes: The number of each row's bin, shape [N]; private.
      ordered: Whether neighbouring bins are alike, as of numbers.
    """

    labels: Sequence[str]
    codes: np.ndarray
    ordered: bool = True

    def __post_init__(self) -> None:
        if not 2 <= len(self.labels) <= _MOST_BINS:
            raise ValueError(
                f"columns: {len(self.labels)} bins of a column are not 2 to {_MOST_BINS}: pass "
                "other edges, for instance five bins."
            )

    @classmethod
    def of_numbers(cls, name: Any, values: np.ndarray, edges: Sequence[float]) -> Bins:
        """Returns the bins of numbers between public edges.

        Args:
          name: The column, for messages.
          values: Numbers of shape [N].
          edges: Increasing numbers, such as [30, 50, 70] for four bins. Do not compute them from
            the records.

        Raises:
          ValueError: The edges are no increasing finite numbers, or the column has other values.
        """
        try:
            ends = np.asarray(edges, np.float64)
        except (TypeError, ValueError):
            ends = np.full([1], math.nan)
        if ends.ndim != 1 or not len(ends) or not (np.isfinite(ends).all()):
            raise ValueError(
                f"columns[{name!r}] must be a list of finite numbers, the edges of its bins, such "
                "as [30, 50, 70]."
            )
        if (np.diff(ends) <= 0.0).any():
            raise ValueError(f"columns[{name!r}] has edges that do not increase: sort them.")
        values = np.asarray(values)
        if values.ndim != 1 or values.dtype.kind not in "biuf":
            raise ValueError(
                f"columns[{name!r}] must be a column of numbers, one a record, got shape "
                f"{list(values.shape)} of dtype {check.dtype_name(values.dtype)}."
            )
        shown = [f"{edge:.4g}" for edge in ends]
        between = [f"{low} to {high}" for low, high in itertools.pairwise(shown)]
        labels = [f"below {shown[0]}", *between, f"from {shown[-1]}"]
        return cls(labels, np.searchsorted(ends, values, side="right"))


@dataclasses.dataclass(frozen=True)
class CheckedOutcome:
    """The public facts about an outcome.

    Attributes:
      is_binary: Whether it is 0 or 1, with a probability that a reliability curve judges.
      is_discrete: Whether it has integer values.
      name: The name of the likelihood's distribution.
      typical_score: The expected log density at a record of zeros; NaN if it is not finite.
    """

    is_binary: bool
    is_discrete: bool
    name: str
    typical_score: float

    @property
    def is_count(self) -> bool:
        """True for a number of events, and not for a class or level."""
        return (
            self.is_discrete
            and not self.is_binary
            and not any(kind in self.name for kind in _CLASSES)
        )


def kind_of_outcome(
    model: BayesianModel, posterior: tfd.Distribution, x: Structure
) -> CheckedOutcome:
    """Returns what kind of outcome a model has, from public values alone.

    Args:
      model: Prior and likelihood.
      posterior: The posterior, or the prior before a fit.
      x: Inputs of rows, of which only shapes and dtypes are read.

    Raises:
      ValueError: Outcomes are no single numbers, or nothing can be sampled.
    """
    zeros = zeros_like(x, 2)
    draws = posterior_draws(posterior, _NUM_DRAWS, 0)
    facts: dict[str, Any] = {}

    def of_draw(draw: Structure) -> tuple[tf.Tensor, ...]:
        distribution = model.distribution_at(draw, zeros)
        facts["scalar"] = distribution.event_shape.rank == 0
        facts["binary"] = possible_values(distribution) == [0, 1]
        plain = distribution
        while isinstance(plain, RecordLatent | UnitLatent):
            plain = plain.row
        facts["mixed"] = isinstance(plain, tfd.MixtureSameFamily) or plain is not distribution
        facts["name"] = type(distribution).__name__
        drawn, _ = draw_apart(lambda: distribution.sample(seed=tf.constant([1, 2])), (), 2)
        both = [plain.prob(tf.constant(each, plain.dtype)) for each in (0, 1)]
        log_prob = tf.cast(distribution.log_prob(drawn), tf.float64)
        return drawn, log_prob, tf.cast(both[0] + both[1], tf.float64)

    traced = function_of_model(of_draw)
    try:
        pairs = [
            traced(tf.nest.map_structure(lambda part: part[number], draws))  # noqa: B023
            for number in range(_NUM_DRAWS)
        ]
    except (*LIKELIHOOD_ERRORS, tf.errors.OpError) as error:
        raise ValueError(
            "check: the likelihood cannot be sampled, which its PIT values need: "
            f"{check.first_line(error)}"
        ) from error
    if not facts["scalar"]:
        raise ValueError(
            "check: outcomes must be single numbers, and this likelihood has several outputs: fit "
            "and check a model of each."
        )
    drawn = np.array([pair[0].numpy() for pair in pairs], np.float64)
    typical = float(np.mean([pair[1].numpy() for pair in pairs]))
    drawn = drawn[np.isfinite(drawn)]
    if facts["mixed"]:
        # Of Bernoulli outcomes, such as those of persons with an intercept each.
        total = np.array([pair[2].numpy() for pair in pairs])
        facts["binary"] = bool((np.abs(total - 1.0) < _NO_OTHER).all() and (drawn <= 1.0).all())
    is_discrete = bool(len(drawn) and (drawn == np.round(drawn)).all())
    return CheckedOutcome(facts["binary"], is_discrete, facts["name"], typical)


@dataclasses.dataclass(frozen=True, eq=False)
class Declared:
    """The public description of one release of checks, and the sums that it consists of.

    Attributes:
      outcome: The kind of outcome.
      columns: The bins of declared columns, by name.
      score_range: The public range, in nats, to which a record's log score is clipped.
      level: The probability that any of the tests fails although the model is right.
    """

    outcome: CheckedOutcome
    columns: Mapping[str, Bins]
    score_range: tuple[float, float]
    level: float = 0.05

    @functools.cached_property
    def blocks(self) -> tuple[Block, ...]:
        """The sums of the release, in order."""
        size = len(CONFIDENCE)
        blocks = [_reliability(), _counts("records", size), _counts("variances", size)]
        if not self.outcome.is_binary:
            blocks = [Block("pit", np.eye(NUM_PIT) - 1.0 / NUM_PIT, signed=False)]
        for name, bins in self.columns.items():
            num = len(bins.labels)
            blocks += [Block(f"residuals of {name}", np.eye(num), signed=True)]
            blocks += [_counts(f"variances of {name}", num)]
        return (*blocks, Block("log score", np.full([1, 1], SCORE_WEIGHT), signed=True))

    @property
    def sensitivity(self) -> Sensitivity:
        """The l2 sensitivity of the release to a record."""
        return sensitivity_of(self.blocks)

    def after_fit(self, outcome: CheckedOutcome, *, default_range: bool) -> Declared:
        """Returns the same sums, with what the fit has shown of the outcome.

        Args:
          outcome: The kind of outcome, by the posterior.
          default_range: Whether log scores have the default range.
        """
        same = dataclasses.replace(outcome, is_binary=self.outcome.is_binary)
        chosen = _range_of(same, None if default_range else self.score_range)
        return dataclasses.replace(self, outcome=same, score_range=chosen)

    @property
    def num(self) -> int:
        """The number of released numbers."""
        return sum(len(block.matrix) for block in self.blocks)

    @property
    def purpose(self) -> str:
        """The release in words, for ledger and report."""
        first = "a reliability curve" if self.outcome.is_binary else "a histogram of PIT values"
        num = len(self.columns)
        columns = "1 column" if num == 1 else f"{num} columns"
        residuals = f", residuals by bins of {columns}" if num else ""
        return f"checks of the model: {first}{residuals}, and the mean log score"


def _reliability() -> Block:
    size = len(CONFIDENCE)
    along = np.outer(CONFIDENCE, CONFIDENCE)
    matrix = np.eye(size) + (CONFIDENCE_WEIGHT - 1.0) * along
    return Block("reliability", matrix, signed=True)


def _counts(name: str, num: int) -> Block:
    return Block(name, COUNT_WEIGHT * np.eye(num), signed=False)


def declare(
    outcome: CheckedOutcome,
    x: Structure,
    columns: Columns | None,
    score_range: Sequence[float] | None,
    level: float,
) -> Declared:
    """Returns what is checked, from the arguments of `DPVI.check`.

    Args:
      outcome: The kind of outcome.
      x: The inputs of records, row by row.
      columns: Edges of bins by the names of columns of x, or by their numbers; or `Bins`.
      score_range: The ends of the range of log scores, or None for a default.
      level: The level of all tests together.

    Raises:
      ValueError, TypeError: An argument is none of these.
    """
    num_rows = len(tf.nest.flatten(x)[0])
    bins = {}
    for name, edges in ({} if columns is None else _mapping(columns)).items():
        if not isinstance(edges, Bins):
            edges = Bins.of_numbers(name, _column(x, name), edges)
        if np.shape(edges.codes) != (num_rows,):
            raise ValueError(
                f"columns[{name!r}] has bins of shape {list(np.shape(edges.codes))}: pass one for "
                f"each of the {num_rows} rows."
            )
        bins[str(name)] = edges
    chosen = check.probability("level", level)
    return Declared(outcome, bins, _range_of(outcome, score_range), chosen)


def _mapping(columns: Columns) -> Columns:
    if not isinstance(columns, Mapping):
        raise TypeError(
            f"columns={check.shown(columns)} must be a dict of columns and the edges of their "
            "bins, such as {'age': [30, 50, 70]}."
        )
    return columns


def _column(x: Structure, name: Any) -> np.ndarray:
    """Returns a column of the inputs, by the key of a dict or the number of a column."""
    if isinstance(x, dict):
        if name not in x:
            raise ValueError(f"columns has {name!r}, which x has not: it has {', '.join(x)}.")
        return np.asarray(x[name])
    array = np.asarray(x) if not isinstance(x, tuple) else None
    if array is None or array.ndim not in (1, 2) or type(name) is not int:
        raise ValueError(
            f"columns has {name!r}: use a key of a dict x, or a number for a column of an array; "
            "other columns as dpvi.checking.Bins."
        )
    width = 1 if array.ndim == 1 else array.shape[1]
    if not 0 <= name < width:
        raise ValueError(f"columns has {name}, and x has the columns 0 to {width - 1}.")
    return array if array.ndim == 1 else array[:, name]


def _range_of(outcome: CheckedOutcome, score_range: Sequence[float] | None) -> tuple[float, float]:
    if score_range is None and outcome.is_discrete:
        return _DISCRETE_RANGE
    if score_range is None:
        if not math.isfinite(outcome.typical_score):
            raise ValueError(
                "score_range is missing: log densities have no finite mean at a record of zeros. "
                "Pass a public range in nats, such as (-8, 4)."
            )
        middle = round(outcome.typical_score)
        return middle - _BELOW, middle + _ABOVE
    try:
        low, high = (float(end) for end in score_range)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(
            f"score_range={check.shown(score_range)} must be two finite numbers in nats, the lower "
            "one first, such as (-10, 0)."
        )
    return low, high
