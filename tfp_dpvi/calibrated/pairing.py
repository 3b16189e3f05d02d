"""The paired clip of a model: checks that its likelihood allows it, and simulates each record's twin."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, function_of_model, map_apart, tf, tfd, without_assertions
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel, as_event
from tfp_dpvi.calibrated.clip import curvature_releases, paired
from tfp_dpvi.calibrated.twins import draw_apart
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import specs_of, synthetic
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec

MOST_COORDINATES = 50  # That a likelihood reads. For more, noise dominates their curvature matrix.

_NUM_TRIED = 5
_VALUES = (-0.5, 1e3, -1e3, 1e7, -1e7, 1e30)  # Of a row, to see whether it moves others.
_INTEGERS = (*range(_NUM_TRIED), -1, 100)  # Larger ones may be lengths, which take memory.
_NO_DRAWS = "the likelihood has no finite draws at synthetic inputs, to check its rows"
_REFUSALS = (*LIKELIHOOD_ERRORS, tf.errors.OpError)


class CannotPairError(Exception):
    """Raised with the reason if the paired clip does not apply."""


def check_settings(gradients: str, num_draws: int) -> None:
    """Raises `CannotPairError` if a `DPVI` with these settings cannot clip pairs."""
    if gradients != "aligned":
        raise CannotPairError(
            f"gradients={gradients!r} clips gradients in the surrogate's variables"
        )
    if num_draws != 1:
        raise CannotPairError(f"num_draws={num_draws} averages before the clip")


class Pairing:
    """The paired clip of one model: the prior's parts that its likelihood reads, their coordinates, and its simulation.

    Raises `CannotPairError` if the paired clip does not apply to records of these shapes and dtypes.
    """

    def __init__(self, model: BayesianModel, records: Records) -> None:
        if records.sample_weight is not None:
            raise CannotPairError("sample_weight would change the curvature of pairs")
        self._model = model
        try:
            self.coordinates = Coordinates(model.prior)
            broadcasts = self.coordinates.broadcasts()
        except ValueError as error:
            raise CannotPairError("the prior has no map to the real line") from error
        if not broadcasts:
            raise CannotPairError(
                "the prior does not draw several values at once (use tfd.Sample for repeated parts)"
            )
        self.parameters_read = self._find_parameters_read(records)
        ends = np.cumsum([0, *self.coordinates.sizes])
        self.index = np.concatenate(
            [np.arange(ends[part], ends[part + 1]) for part in self.parameters_read]
        )
        if len(self.index) > MOST_COORDINATES:
            raise CannotPairError(
                f"the likelihood reads {len(self.index)} parameters, more than {MOST_COORDINATES}"
            )
        if records.y is not None:
            self._check_rows(records)

    def gradient(
        self,
        spec: StepSpec,
        surrogate: tfd.Distribution,
        variables: Sequence[tf.Variable],
        clip: Clip,
    ) -> ClippedGradient:
        """Returns the clipped gradient of pairs, with the jointly released curvature.

        Args:
          spec: The public size of a step.
          surrogate: The distribution whose draws the gradients are taken at.
          variables: Its trainable variables.
          clip: The clip of a pair's difference, one length for all coordinates.
        """
        prior = self._model.prior

        def draw(key: tf.Tensor) -> StepGradient:
            with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
                tape.watch(variables)
                seed = _random.tfp_seed(_random.fold_in(key, 0))
                params, log_q = surrogate.experimental_sample_and_log_prob(seed=seed)
                divergence = (log_q - prior.log_prob(params)) / spec.num_records
                parts = self.coordinates.flatten(params)
                theta = tf.concat([parts[part] for part in self.parameters_read], axis=0)
            exact = tape.gradient(divergence, variables, unconnected_gradients="zero")

            def simulate(
                records: dict[str, Structure], key: tf.Tensor
            ) -> tuple[Structure, tf.Tensor]:
                own = [_finite(part) for part in parts]
                x = tf.nest.map_structure(_finite, records["x"])
                likelihood = self._likelihood(own, _finite(theta), x)
                return _simulated(likelihood, {**records, "x": x}, _random.tfp_seed(key))

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
        return ClippedGradient(
            draw, clip, joint=releases, identity=("paired", self.parameters_read)
        )

    def pairs(self, vector: tf.Tensor, x: Structure, seeds: tf.Tensor) -> tuple[Structure, ...]:
        """Returns pairs of simulated records: both outcomes, `deltas`, and both log densities of shape [n].

        The log densities are NaN where an outcome cannot be used.

        Models of whole records use only the number of the inputs `x`. Two seeds: int32, shape [2, 2].
        """
        rows = {"x": x} if self._model.generative else {"x": x, "y": ()}
        distribution = self._distribution(vector, x)
        drawn = [_simulated(distribution, rows, seed) for seed in tf.unstack(seeds)]
        pairs = [twins for twins, _ in drawn]
        log_probs = [
            tf.where(usable, distribution.log_prob(twins), math.nan) for twins, usable in drawn
        ]
        return (*pairs, self.deltas(vector, x, pairs), *log_probs)

    def deltas(self, vector: tf.Tensor, x: Structure, pairs: Sequence[Structure]) -> tf.Tensor:
        """Returns the differences of the scores of pairs of outcomes, shape [n, d]."""
        parts = tf.split(vector, self.coordinates.sizes)
        theta = tf.concat([parts[part] for part in self.parameters_read], axis=0)

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
        sizes = [self.coordinates.sizes[part] for part in self.parameters_read]
        for part, vector in zip(self.parameters_read, tf.split(theta, sizes), strict=True):
            replaced[part] = vector
        return self._model.distribution_at(self.coordinates.constrain(replaced), x)

    def _find_parameters_read(self, records: Records) -> tuple[int, ...]:
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
            twin, _ = _simulated(distribution, rows, tf.constant([0, 0]))
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
        """Refuses a likelihood whose rows depend on other records of the batch, by a check on synthetic records.

        A row's twin and its density must not change if another row does, whichever it is and however
        large, and its density must be that of the record alone.
        """
        generator = np.random.default_rng(0)
        params = self._model.prior.sample(seed=tf.constant([0, 1]))

        @function_of_model
        def run(x: Structure) -> list[tf.Tensor]:
            with without_assertions():
                distribution = self._model.distribution_at(params, x)
                twins, usable = _simulated(distribution, {"x": x, "y": ()}, tf.constant([0, 2]))
                return [distribution.log_prob(twins), usable, *tf.nest.flatten(twins)]

        @function_of_model
        def run_alone(x: Structure, twins: list[tf.Tensor]) -> tf.Tensor:
            like = self._model.distribution_at(params, x).dtype

            def log_prob(row: Structure) -> tf.Tensor:
                own, twin = tf.nest.map_structure(lambda part: part[None], row)
                distribution = self._model.distribution_at(params, own)
                return distribution.log_prob(tf.nest.pack_sequence_as(like, twin))[0]

            return map_apart(log_prob, (x, twins))

        def drawn(x: Structure) -> list[np.ndarray] | None:  # None if the likelihood refuses x.
            try:
                return [part.numpy() for part in run(tf.nest.map_structure(tf.constant, x))]
            except _REFUSALS:
                return None

        def are_alone(x: Structure, found: list[np.ndarray]) -> bool:
            try:
                alone = run_alone(tf.nest.map_structure(tf.constant, x), found[2:]).numpy()
            except tf.errors.OpError:  # A record reads another, which it lacks when alone.
                return False
            return np.allclose(alone, found[0], rtol=1e-3, atol=1e-3)

        x = tf.nest.map_structure(lambda part: synthetic(part, _NUM_TRIED, generator), records.x)
        for number, start in enumerate((x, _numbered(x))):
            before = drawn(start)
            if before is None or not all(map(_is_finite, before)) or not before[1].all():
                if number:  # Its integers may be no categories.
                    return
                raise CannotPairError(_NO_DRAWS)
            if not are_alone(start, before):
                raise CannotPairError(
                    "the density of one record depends on other records of the batch"
                )
            for row in range(_NUM_TRIED):
                others = np.arange(_NUM_TRIED) != row
                for legal, moved in _moves(start, row, generator):
                    after = drawn(moved)
                    if after is None and legal:
                        raise CannotPairError(_NO_DRAWS)
                    if after is not None and not all(
                        np.array_equal(a[others], b[others])
                        for a, b in zip(before, after, strict=True)
                    ):
                        raise CannotPairError(
                            "the twin of one record depends on other records of the batch"
                        )
            if all(part.dtype.kind == "f" for part in tf.nest.flatten(x)):
                return


def _numbered(records: Structure) -> Structure:
    """Returns the records with integers that are the numbers of other rows."""

    def numbered(part: np.ndarray) -> np.ndarray:
        numbers = np.arange(_NUM_TRIED)[::-1].reshape(-1, *[1] * (part.ndim - 1))
        return np.broadcast_to(numbers, part.shape).astype(part.dtype) if _counts(part) else part

    return tf.nest.map_structure(numbered, records)


def _moves(
    records: Structure, row: int, generator: np.random.Generator
) -> Iterator[tuple[bool, Structure]]:
    """Yields the records with one row replaced, by values that it must allow and by extreme ones, and whether it must."""

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

    yield True, move(None, lambda part: True)
    # Floats and integers apart: an index that is out of range would hide what the floats do.
    for value in _VALUES:
        yield False, move(value, lambda part: part.dtype.kind == "f")
    for value in _INTEGERS:
        yield False, move(value, _signed if value < 0 else _counts)


def _signed(part: np.ndarray) -> bool:
    """Returns whether an array holds integers that may be negative."""
    return part.dtype.kind == "i"


def _counts(part: np.ndarray) -> bool:
    """Returns whether an array holds integers; booleans have no other values than the legal ones."""
    return part.dtype.kind in "iu"


def _is_finite(part: np.ndarray) -> bool:
    return part.dtype.kind != "f" or bool(np.isfinite(part).all())


def _finite(part: tf.Tensor) -> tf.Tensor:
    return (
        tf.where(tf.math.is_finite(part), part, tf.zeros_like(part))
        if part.dtype.is_floating
        else part
    )


def _simulated(
    distribution: tfd.Distribution, records: dict[str, Structure], seed: tf.Tensor
) -> tuple[Structure, tf.Tensor]:
    """Returns one twin for each record, without gradients, and whether each can be used, shape [n]."""
    num = tf.nest.flatten(records["x"])[0].shape[0]
    if "y" in records:
        twins, usable = draw_apart(lambda: distribution.sample(seed=seed), records["x"], num)
    else:  # A whole record's twin reads no record.
        twins, usable = draw_apart(lambda: distribution.sample(num, seed=seed), (), num)
    return tf.nest.map_structure(tf.stop_gradient, twins), usable
