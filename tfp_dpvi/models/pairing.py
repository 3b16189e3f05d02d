"""The paired clip of a model: checks that its likelihood allows it, and simulates each record's twin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, map_apart, tf, tfd
from tfp_dpvi.data import Records
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec, curvature_releases, paired
from tfp_dpvi.models.base import LIKELIHOOD_ERRORS
from tfp_dpvi.models.coordinates import Coordinates

if TYPE_CHECKING:
    from tfp_dpvi.models.dpvi import DPVI

MOST_COORDINATES = 50  # That a likelihood reads. For more, noise dominates their curvature matrix.

_NUM_TRIED = 5
_REFUSALS = (*LIKELIHOOD_ERRORS, tf.errors.OpError)


class CannotPairError(Exception):
    """Raised with the reason if the paired clip does not apply."""


class Pairing:
    """The paired clip of one model: the prior's parts that its likelihood reads, their coordinates, and its simulation.

    Raises `CannotPairError` if the paired clip does not apply to records of these shapes and dtypes.
    """

    def __init__(self, model: DPVI, records: Records) -> None:
        if model.gradients != "aligned":
            raise CannotPairError(
                f"gradients={model.gradients!r} clips gradients in the surrogate's variables"
            )
        if model.num_draws != 1:
            raise CannotPairError(f"num_draws={model.num_draws} averages before the clip")
        if records.sample_weight is not None:
            raise CannotPairError("sample_weight would change the curvature of pairs")
        self._model, self._stand_in = model, records.x
        try:
            self.coordinates = Coordinates(model.prior)
            broadcasts = self.coordinates.broadcasts()
        except ValueError as error:
            raise CannotPairError("the prior has no map to the real line") from error
        if not broadcasts:
            raise CannotPairError(
                "the prior does not draw several values at once (use tfd.Sample for repeated parts)"
            )
        self.reached = self._find_reached(records)
        ends = np.cumsum([0, *self.coordinates.sizes])
        self.index = np.concatenate(
            [np.arange(ends[part], ends[part + 1]) for part in self.reached]
        )
        if len(self.index) > MOST_COORDINATES:
            raise CannotPairError(
                f"the likelihood reads {len(self.index)} parameters, more than {MOST_COORDINATES}"
            )
        if records.y is not None:
            self._check_rows(records)

    def gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient of pairs, with the jointly released curvature."""
        model = self._model
        variables, clip = model.trainable_variables, model.clip

        def draw(key: tf.Tensor) -> StepGradient:
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(variables)
                seed = _random.tfp_seed(_random.fold_in(key, 0))
                params, log_q = model.surrogate_posterior.experimental_sample_and_log_prob(
                    seed=seed
                )
                divergence = (log_q - model.prior.log_prob(params)) / spec.num_records
                parts = self.coordinates.flatten(params)
                theta = tf.concat([parts[part] for part in self.reached], axis=0)
            exact = tape.gradient(divergence, variables, unconnected_gradients="zero")

            def simulate(records: dict[str, Structure], key: tf.Tensor) -> Structure:
                # A record at which the likelihood is NaN gets another's twin; its own score is not finite.
                own = [_finite(part) for part in parts]
                x = tf.nest.map_structure(_finite, records["x"])
                likely = self._likelihood(own, _finite(theta), x)
                if "y" in records and _rejects(likely):
                    bad = tf.math.is_nan(likely.log_prob(as_event(records["y"], likely)))
                    x = tf.nest.map_structure(
                        lambda part, other: tf.where(
                            tf.reshape(bad, [-1] + [1] * (part.shape.rank - 1)), other, part
                        ),
                        x,
                        self._stand_in,
                    )
                    likely = self._likelihood(own, _finite(theta), x)
                return _simulated(likely, records, _random.tfp_seed(key))

            def losses(
                record: dict[str, Structure], theta: tf.Tensor
            ) -> tuple[tf.Tensor, tf.Tensor]:
                one = tf.nest.map_structure(lambda part: part[None], record)
                distribution = self._likelihood(parts, theta, one["x"])
                observed = one["y"] if "y" in one else one["x"]
                own = distribution.log_prob(as_event(observed, distribution))
                return -own[0], -distribution.log_prob(one["simulated"])[0]

            def pull_back(released: list[tf.Tensor]) -> list[tf.Tensor]:
                return tape.gradient(
                    [theta], variables, output_gradients=released, unconnected_gradients="zero"
                )

            terms = {"data_independent": exact, "data_independent_loss": divergence}
            return paired(losses, simulate, theta, clip, pull_back=pull_back, **terms)

        releases = curvature_releases(len(self.index), clip)
        return ClippedGradient(draw, clip, joint=releases, identity=("paired", self.reached))

    def pairs(self, vector: tf.Tensor, x: Structure, seeds: tf.Tensor) -> tuple[Structure, ...]:
        """Returns pairs of simulated records: both outcomes, `deltas`, and both log densities of shape [n].

        Models of whole records use only the number of the inputs `x`. Two seeds: int32, shape [2, 2].
        """
        rows = {"x": x} if self._model.generative else {"x": x, "y": ()}
        distribution = self._distribution(vector, x)
        pairs = [_simulated(distribution, rows, seed) for seed in tf.unstack(seeds)]
        return (
            *pairs,
            self.deltas(vector, x, pairs),
            *(distribution.log_prob(twin) for twin in pairs),
        )

    def deltas(self, vector: tf.Tensor, x: Structure, pairs: Sequence[Structure]) -> tf.Tensor:
        """Returns the differences of the scores of pairs of outcomes, shape [n, d]."""
        parts = tf.split(vector, self.coordinates.sizes)
        theta = tf.concat([parts[part] for part in self.reached], axis=0)

        def delta(record: Sequence[Structure]) -> tf.Tensor:
            one, *both = tf.nest.map_structure(lambda part: part[None], record)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(theta)
                here = self._likelihood(parts, theta, one)
                difference = here.log_prob(both[0])[0] - here.log_prob(both[1])[0]
            return tape.gradient(difference, theta, unconnected_gradients="zero")

        return map_apart(delta, (x, *pairs))

    def log_probs(
        self, vector: tf.Tensor, x: Structure, pairs: Sequence[Structure]
    ) -> list[tf.Tensor]:
        """Returns log densities, shape [n], for each of several outcomes of n records."""
        distribution = self._distribution(vector, x)
        return [distribution.log_prob(outcomes) for outcomes in pairs]

    def _distribution(self, vector: tf.Tensor, x: Structure) -> tfd.Distribution:
        return self._model.distribution_at(
            self.coordinates.constrain(tf.split(vector, self.coordinates.sizes)), x
        )

    def _likelihood(
        self, parts: list[tf.Tensor], theta: tf.Tensor, x: Structure
    ) -> tfd.Distribution:
        """Returns the likelihood with `theta` for the parts that it reads."""
        replaced = list(parts)
        sizes = [self.coordinates.sizes[part] for part in self.reached]
        for part, vector in zip(self.reached, tf.split(theta, sizes), strict=True):
            replaced[part] = vector
        return self._model.distribution_at(self.coordinates.constrain(replaced), x)

    def _find_reached(self, records: Records) -> tuple[int, ...]:
        """Returns the parts that the likelihood reads, by tracing a simulation and a density on the records' shapes."""
        found: list[tuple[int, ...]] = []

        def probe(x: Structure, y: Structure | None) -> tf.Tensor:
            parts = self.coordinates.flatten(self._model.prior.sample(seed=tf.constant([0, 0])))
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(parts)
                distribution = self._model.distribution_at(self.coordinates.constrain(parts), x)
                observed = as_event(x if y is None else y, distribution)
                log_prob = distribution.log_prob(observed)
            gradient = tape.gradient(log_prob, parts)
            found.append(tuple(number for number, part in enumerate(gradient) if part is not None))
            rows = {"x": x} if y is None else {"x": x, "y": y}
            twin = _simulated(distribution, rows, tf.constant([0, 0]))
            shapes = [
                [one.shape.as_list() for one in tf.nest.flatten(each)] for each in (twin, observed)
            ]
            if shapes[0] != shapes[1]:
                raise ValueError("it draws shapes {} for records of shapes {}".format(*shapes))
            return log_prob

        try:
            tf.function(probe, autograph=False).get_concrete_function(*specs_of(records, 3))
        except LIKELIHOOD_ERRORS as error:
            raise CannotPairError(f"the likelihood does not simulate records ({error})") from error
        if not found[-1]:
            raise CannotPairError("the likelihood reads no parameter")
        return found[-1]

    def _check_rows(self, records: Records) -> None:
        """Refuses a likelihood whose twins depend on other records of the batch, by a check on synthetic records."""
        generator = np.random.default_rng(0)
        params = self._model.prior.sample(seed=tf.constant([0, 1]))
        x = tf.nest.map_structure(lambda part: synthetic(part, _NUM_TRIED, generator), records.x)
        y = tf.nest.map_structure(
            lambda part: tf.zeros([_NUM_TRIED, *part.shape[1:]], part.dtype), records.y
        )

        def twins(
            x: Structure,
        ) -> list[np.ndarray] | None:  # None if the likelihood refuses the inputs.
            try:
                distribution = self._model.distribution_at(
                    params, tf.nest.map_structure(tf.constant, x)
                )
                if (
                    _rejects(distribution)
                    and np.isnan(distribution.log_prob(as_event(y, distribution))).any()
                ):
                    return None
                return [
                    np.asarray(part)
                    for part in tf.nest.flatten(distribution.sample(seed=tf.constant([0, 2])))
                ]
            except _REFUSALS:
                return None

        before, *moved = [
            twins(one) for one in (x, *(_moved(x, value, generator) for value in (None, 1e4, -1e4)))
        ]
        after = [one for one in moved if one is not None]
        finite = all(part.dtype.kind != "f" or np.isfinite(part).all() for part in before or ())
        if before is None or not after or not finite:
            raise CannotPairError(
                "the likelihood has no finite draws at synthetic inputs, to check its rows"
            )
        if any(
            not np.array_equal(a[1:], b[1:])
            for one in after
            for a, b in zip(before, one, strict=True)
        ):
            raise CannotPairError("the twin of one record depends on other records of the batch")
        self._stand_in = tf.nest.map_structure(lambda part: part[0], x)


def specs_of(records: Records, num: int) -> Structure:
    """Returns shapes and dtypes of x and y of `num` records."""
    return tf.nest.map_structure(
        lambda part: None if part is None else tf.TensorSpec([num, *part.shape[1:]], part.dtype),
        (records.x, records.y),
    )


def synthetic(part: np.ndarray, num: int, generator: np.random.Generator) -> np.ndarray:
    """Returns records of numbers in [0, 1), also valid rates and proportions, or of two categories, which all have."""
    shape = (num, *part.shape[1:])
    drawn = (
        generator.uniform(size=shape) if part.dtype.kind == "f" else generator.integers(0, 2, shape)
    )
    return drawn.astype(part.dtype)


def _moved(records: Structure, value: float | None, generator: np.random.Generator) -> Structure:
    """Returns the records with the first one replaced: its floats are `value`, or new numbers in [0, 1)."""

    def move(part: np.ndarray) -> np.ndarray:
        part, floats = part.copy(), part.dtype.kind == "f"
        if value is None:
            part[0] = generator.uniform(size=part.shape[1:]) if floats else 1 - part[0]
        elif floats:
            part[0] = value
        return part

    return tf.nest.map_structure(move, records)


def _rejects(distribution: tfd.Distribution) -> bool:
    """Returns whether the sampler may not terminate at NaN parameters (rejection) or read out of range (tables)."""
    kinds = tf.nest.flatten(distribution.reparameterization_type)
    return any(kind != tfd.FULLY_REPARAMETERIZED for kind in kinds)


def _finite(part: tf.Tensor) -> tf.Tensor:
    return (
        tf.where(tf.math.is_finite(part), part, tf.zeros_like(part))
        if part.dtype.is_floating
        else part
    )


def as_event(value: Structure, distribution: tfd.Distribution) -> Structure:
    """Casts integer observations of a continuous distribution to floats, as Keras users expect, and bools to numbers."""

    def cast(part: tf.Tensor, kind: tf.DType) -> tf.Tensor:
        kind = tf.as_dtype(kind)
        return (
            tf.cast(part, kind)
            if part.dtype.is_bool or (part.dtype.is_integer and kind.is_floating)
            else part
        )

    if isinstance(value, dict) and isinstance(distribution.dtype, dict):
        return {name: cast(part, distribution.dtype[name]) for name, part in value.items()}
    return (
        cast(value, distribution.dtype)
        if tf.is_tensor(value) and not tf.nest.is_nested(distribution.dtype)
        else value
    )


def _simulated(
    distribution: tfd.Distribution, records: dict[str, Structure], seed: tf.Tensor
) -> Structure:
    """Returns one twin for each record, without gradients."""
    if "y" in records:
        twin = distribution.sample(seed=seed)
    else:
        first = tf.nest.flatten(records["x"])[0]
        twin = distribution.sample(first.shape[0] or tf.shape(first)[0], seed=seed)
    return tf.nest.map_structure(tf.stop_gradient, twin)
