"""Simulated data sets of a rehearsal: parameters, inputs and outcomes, from public values alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, tf, tfd
from tfp_dpvi.bayes.coordinates import entry_names
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.privacy import PrivacyLedger

Inputs = Callable[[int, int], Structure]
"""`inputs(num, seed)` returns the inputs of some records, a structure of arrays."""

_MOST_NAMED = 8


class DataSet(NamedTuple):
    """A simulated data set.

    Attributes:
      x: The inputs; for a model of whole records, the records.
      y: The outcomes, or None for a model of whole records.
      truth: The true values of the named numbers, shape [P].
      outside: The share of outcomes outside of the public bounds.
    """

    x: Structure
    y: np.ndarray | None
    truth: np.ndarray
    outside: float


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """A model, how its data are simulated, and the numbers that a rehearsal reports.

    Attributes:
      model: Prior and likelihood.
      names: Names of the P numbers that are reported.
      inputs: Makes inputs; None for a model of whole records.
      public_inputs: As in `DPVI.fit`.
      draw: `draw(seed)` returns true parameters, for a seed of TFP.
      named: Returns the numbers [S, P] of draws, which run over the first dimension.
      fixed: True values that every data set has, by name.
      inner: The place of the coordinate of each number among the model's, -1 for none, shape [P].
      bounds: The ends of the outcomes that records can have, or None.
      clips: Whether outcomes beyond these are clipped, or counted.
      in_words: Returns a warning in the user's words.
      ledger: `ledger(num_records, epsilon, delta)` returns what is released before a fit.
    """

    model: BayesianModel
    names: tuple[str, ...]
    inputs: Inputs | None
    public_inputs: Structure | None
    draw: Callable[[np.ndarray], Structure]
    named: Callable[[Structure], np.ndarray]
    fixed: Mapping[str, float]
    inner: np.ndarray
    bounds: tuple[float, float] | None = None
    clips: bool = False
    in_words: Callable[[str], str] = str
    ledger: Callable[[int, float, float], PrivacyLedger] = lambda *cell: PrivacyLedger()

    def simulate(self, num_records: int, seed: int, number: int) -> DataSet:
        """Returns a data set.

        Args:
          num_records: The number of records.
          seed: The seed of all data sets.
          number: The number of the data set, from 0.

        Raises:
          ValueError: Outcomes overflow.
        """
        # The truth is the same for every number of records.
        params = self.draw(_seeds(seed, number, 0))
        truth = self.named(tf.nest.map_structure(lambda part: part[None], params))[0]
        outcome_seed = tf.constant(_seeds(seed, number, num_records, 1), tf.int32)
        if self.inputs is None:
            whole = self.model.distribution_at(params, None).sample(num_records, seed=outcome_seed)
            return DataSet(tf.nest.map_structure(np.asarray, whole), None, truth, 0.0)
        x = self.inputs(num_records, int(_seeds(seed, number, num_records, 2)[0]))
        inputs = tf.nest.map_structure(tf.convert_to_tensor, x)
        y = self.model.distribution_at(params, inputs).sample(seed=outcome_seed).numpy()
        if y.dtype.kind == "f" and not np.isfinite(y).all():
            raise ValueError(
                "truth: the prior and likelihood simulate outcomes that are not finite: pass a "
                "truth, or narrower priors."
            )
        outside = 0.0
        if self.bounds is not None:
            clipped = np.clip(y, *self.bounds).astype(y.dtype)
            outside = float(np.mean(clipped != y))
            y = clipped if self.clips else y
        return DataSet(x, y, truth, outside)


def _seeds(*words: int) -> np.ndarray:
    """Returns a seed of TFP for some numbers, int32 [2]."""
    return np.random.default_rng(words).integers(2**31, size=2).astype(np.int32)


# ---------------------------------------------------------------------- a model's own parameters


def make_inputs(inputs: Structure | Inputs) -> Inputs:
    """Returns a function that makes inputs: a given one, or one that draws rows of public inputs.

    Args:
      inputs: `inputs(num, seed)`, or public inputs, a structure of arrays of n rows.

    Raises:
      ValueError: The arrays have no rows, or not the same number of them.
    """
    if callable(inputs):
        return inputs
    arrays = tf.nest.map_structure(np.asarray, inputs)
    lengths = {len(part) if part.ndim else 0 for part in tf.nest.flatten(arrays)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            "inputs must be arrays with the same number of rows, at least 1, or a function "
            "inputs(num, seed) that returns such."
        )
    (available,) = lengths

    def drawn(num: int, seed: int) -> Structure:
        rows = np.random.default_rng(seed).integers(available, size=num)
        return tf.nest.map_structure(lambda part: part[rows], arrays)

    return drawn


def parameter_names(prior: tfd.Distribution) -> tuple[str, ...]:
    """Returns the names of a prior's numbers, such as "w[0]"."""
    return tuple(entry_names(prior.sample(seed=tf.constant([0, 0], tf.int32))))


def numbers_of(draws: Structure) -> np.ndarray:
    """Returns the numbers of draws, which run over the first dimension, float64 [S, P]."""
    parts = [np.asarray(part, np.float64) for part in tf.nest.flatten(draws)]
    return np.concatenate([part.reshape(len(part), -1) for part in parts], axis=1)


class Truth:
    """True parameters: draws from a prior, some of whose numbers are given.

    What depends on a given parameter in the prior is drawn given it.

    Args:
      prior: The prior.
      truth: Values by the name of a number, such as "w[0]", or of a whole parameter, "w"; or one
        value of a prior of a single parameter; or None.

    Attributes:
      fixed: The given numbers by name.

    Raises:
      ValueError: A name is unknown, or a value has the wrong shape or is not finite.
    """

    def __init__(self, prior: tfd.Distribution, truth: Any) -> None:
        self._prior = prior
        self.names = parameter_names(prior)
        start = prior.sample(seed=tf.constant([0, 0], tf.int32))
        paths = dict(zip(_part_names(start), tf.nest.flatten(start), strict=True))
        given = truth if isinstance(truth, Mapping) else {"parameter": truth}
        self.fixed: dict[str, float] = {}
        for name, value in {} if truth is None else given.items():
            own: tuple[str, ...] = (name,)
            if name in paths:
                own = tuple(each for each in self.names if _is_part(each, name))
            elif name not in self.names:
                shown = ", ".join(self.names[:_MOST_NAMED])
                raise ValueError(f"truth names {name!r}, which is no parameter: use {shown}.")
            values = np.asarray(value, np.float64).reshape(-1)
            if len(values) != len(own) or not np.isfinite(values).all():
                raise ValueError(f"truth[{name!r}] must be {len(own)} finite numbers.")
            self.fixed.update(zip(own, values.tolist(), strict=True))
        if self.fixed:
            self._check_support(self(np.array([0, 1], np.int32)))

    def __call__(self, seed: np.ndarray) -> Structure:
        """Returns true parameters.

        Args:
          seed: A seed of TFP, int32 [2].
        """
        draw = functools.partial(self._prior.sample, seed=tf.constant(seed, tf.int32))
        if not self.fixed:
            return draw()
        if not isinstance(self._prior, tfd.JointDistributionNamed):
            return self._replaced(draw())
        pinned: dict[str, Any] = {}
        # What depends on a whole parameter is drawn before a part of it is replaced.
        for is_chosen in (all, any):
            replaced: dict[str, Any] = dict(self._replaced(draw(**pinned)))
            own = {
                name: [each in self.fixed for each in self.names if _is_part(each, name)]
                for name in replaced
            }
            pinned = {name: replaced[name] for name in replaced if is_chosen(own[name])}
        return draw(**pinned)

    def _replaced(self, drawn: Structure) -> Structure:
        values = numbers_of(tf.nest.map_structure(lambda part: part[None], drawn))[0]
        values = [
            self.fixed.get(name, value) for name, value in zip(self.names, values, strict=True)
        ]
        parts, first = [], 0
        for part in tf.nest.flatten(drawn):
            size = int(np.prod(part.shape))
            parts.append(
                tf.reshape(tf.constant(values[first : first + size], part.dtype), part.shape)
            )
            first += size
        return tf.nest.pack_sequence_as(drawn, parts)

    def _check_support(self, params: Structure) -> None:
        if not np.isfinite(np.asarray(self._prior.log_prob(params))):
            raise ValueError(
                f"truth={self.fixed} is where the prior has no density: pass values that it allows."
            )


def _is_part(name: str, parameter: str) -> bool:
    """Returns whether a name is that of a parameter or of one of its entries."""
    return name == parameter or name.startswith(f"{parameter}[")


def _part_names(structure: Structure) -> list[str]:
    """Returns a name for each part of a structure of tensors, in the order of `tf.nest.flatten`."""
    empty = tf.nest.map_structure(lambda part: tf.zeros([]), structure)
    return entry_names(empty)


def subject_of(
    model: BayesianModel,
    inputs: Structure | Inputs | None,
    public_inputs: Structure | None,
    truth: Any,
    coordinates: tuple[list[str], list[int]],
) -> Subject:
    """Returns what is rehearsed of a model with its own parameters.

    Args:
      model: Prior and likelihood.
      inputs: See `make_inputs`; None for a model of whole records.
      public_inputs: As in `DPVI.fit`.
      truth: See `Truth`.
      coordinates: Names and sizes of the prior's coordinates.

    Raises:
      ValueError: Inputs or truth do not fit the model.
    """
    if (inputs is None) != model.generative:
        raise ValueError(
            "inputs were passed, but the likelihood generates whole records: leave them out."
            if model.generative
            else "inputs are missing: pass public or invented inputs, or inputs(num, seed)."
        )
    draw = Truth(model.prior, truth)
    places = {name: place for place, name in enumerate(coordinates[0])}
    is_same = len(draw.names) == sum(coordinates[1])
    inner = [places.get(name, -1) if is_same else -1 for name in draw.names]
    check.count("parameters", len(draw.names), 1)
    return Subject(
        model=model,
        names=draw.names,
        inputs=None if inputs is None else make_inputs(inputs),
        public_inputs=public_inputs,
        draw=draw,
        named=numbers_of,
        fixed=draw.fixed,
        inner=np.array(inner),
    )
