"""The paired clip of one model: the parameters that its likelihood reads, and pairs of records."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import Structure, map_apart, tf, tfd
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import LIKELIHOOD_ERRORS, BayesianModel, as_event
from tfp_dpvi.bayes.units import row_distribution
from tfp_dpvi.calibrated.clip import curvature_releases, paired
from tfp_dpvi.calibrated.requirements import CannotPairError, check_rows
from tfp_dpvi.calibrated.twins import simulate_twins, with_zeros
from tfp_dpvi.data import Records
from tfp_dpvi.data.shapes import specs_of
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec
from tfp_dpvi.gradients.isolation import compares, depends_on
from tfp_dpvi.local import Variational

# That a likelihood reads. For more, noise dominates their curvature matrix.
MOST_COORDINATES = 50
# With the centred clip, which releases the diagonal of the curvature of many.
MOST_CENTRED = 512


class Pairing:
    """The paired clip of one model: the parameters that its likelihood reads, and its simulation.

    Args:
      model: Prior and likelihood.
      records: Records whose shapes and dtypes are read.
      log_scales: Whether positive parameters have logarithms as coordinates, see `Coordinates`.

    Raises:
      CannotPairError: The paired clip does not apply to records of these shapes and dtypes.

    Attributes:
      coordinates: The prior's parameters on the real line.
      parameters_read: Numbers of the prior's parts that the likelihood reads.
      index: The coordinates of these parts, shape [d].
      is_bound: Whether the likelihood's density is a lower bound, so that its gradient is no score
        and intervals are not calibrated.
      may_jump: Whether the likelihood compares or rounds what depends on a parameter.
    """

    def __init__(self, model: BayesianModel, records: Records, *, log_scales: bool = False) -> None:
        if records.sample_weight is not None and not log_scales:
            raise CannotPairError("sample_weight would change the curvature of pairs")
        self._model = model
        self.is_bound = self.may_jump = False
        try:
            self.coordinates = Coordinates(model.prior, log_scales=log_scales)
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
        most = MOST_CENTRED if log_scales else MOST_COORDINATES
        if len(self.index) > most:
            beyond = "" if log_scales else f" (compile without an optimizer takes {MOST_CENTRED})"
            raise CannotPairError(
                f"the likelihood reads {len(self.index)} parameters, more than {most}{beyond}"
            )
        if records.y is not None:
            check_rows(model, self.coordinates, records)

    @property
    def generative(self) -> bool:
        """Returns whether records have no inputs: see `BayesianModel.generative`."""
        return self._model.generative

    @property
    def model(self) -> BayesianModel:
        """Prior and likelihood."""
        return self._model

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
                finite_parts = [with_zeros(part) for part in parts]
                x = tf.nest.map_structure(with_zeros, records["x"])
                likelihood = self._likelihood(finite_parts, with_zeros(theta), x)
                return simulate_twins(likelihood, {**records, "x": x}, _random.tfp_seed(key))

            def losses(
                record: dict[str, Structure], theta: tf.Tensor
            ) -> tuple[tf.Tensor, tf.Tensor]:
                batch = tf.nest.map_structure(lambda part: part[None], record)
                distribution = self._likelihood(parts, theta, batch["x"])
                event = as_event(batch["y"] if "y" in batch else batch["x"], distribution)
                observed = distribution.log_prob(event)[0]
                twin = distribution.log_prob(batch["simulated"])[0]
                return -observed, -twin

            def pull_back(released: list[tf.Tensor]) -> list[tf.Tensor]:
                return tape.gradient(
                    [theta], variables, output_gradients=released, unconnected_gradients="zero"
                )

            terms = {"data_independent": exact, "data_independent_loss": divergence}
            return paired(losses, simulate, theta, clip, pull_back=pull_back, **terms)

        releases = curvature_releases(len(self.index), clip)
        identity = ("paired", self.parameters_read)
        return ClippedGradient(draw, clip, joint=releases, identity=identity)

    def pairs(self, vector: tf.Tensor, x: Structure, seeds: tf.Tensor) -> tuple[Structure, ...]:
        """Returns pairs of simulated records.

        Args:
          vector: The parameters' coordinates, shape [D].
          x: Inputs of n records; models of whole records use only their number.
          seeds: Two seeds, int32, shape [2, 2].

        Returns:
          Both outcomes, `deltas`, and both log densities of shape [n], which are NaN where an
          outcome cannot be used.
        """
        distribution = self.distribution(vector, x)
        drawn = [self.simulate(distribution, x, seed) for seed in tf.unstack(seeds)]
        pairs = [twins for twins, _ in drawn]
        log_probs = [
            tf.where(usable, distribution.log_prob(twins), math.nan) for twins, usable in drawn
        ]
        return (*pairs, self.deltas(vector, x, pairs), *log_probs)

    def deltas(self, vector: tf.Tensor, x: Structure, pairs: Sequence[Structure]) -> tf.Tensor:
        """Returns the differences of the scores of pairs of outcomes.

        Args:
          vector: The parameters' coordinates, shape [D].
          x: Inputs of n records.
          pairs: Both outcomes of each.

        Returns:
          Tensor of shape [n, d].
        """
        parts, theta = tf.split(vector, self.coordinates.sizes), self.read(vector)

        def delta(record: Sequence[Structure]) -> tf.Tensor:
            inputs, *both = tf.nest.map_structure(lambda part: part[None], record)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(theta)
                distribution = self._likelihood(parts, theta, inputs)
                logs = [distribution.log_prob(outcome)[0] for outcome in both]
                difference = logs[0] - logs[1]
            return tape.gradient(difference, theta, unconnected_gradients="zero")

        return map_apart(delta, (x, *pairs))

    def log_probs(
        self, vector: tf.Tensor, x: Structure, pairs: Sequence[Structure]
    ) -> list[tf.Tensor]:
        """Returns log densities of several outcomes of each record.

        Args:
          vector: The parameters' coordinates, shape [D].
          x: Inputs of n records.
          pairs: Outcomes of the n records, as often as needed.

        Returns:
          A tensor of shape [n] for each.
        """
        distribution = self.distribution(vector, x)
        return [distribution.log_prob(outcomes) for outcomes in pairs]

    def distribution(self, vector: tf.Tensor, x: Structure) -> tfd.Distribution:
        """Returns the likelihood at parameters.

        Args:
          vector: The parameters' coordinates, shape [D].
          x: Inputs of n records.
        """
        return self._model.distribution_at(
            self.coordinates.constrain(tf.split(vector, self.coordinates.sizes)), x
        )

    def simulate(
        self, distribution: tfd.Distribution, x: Structure, seed: tf.Tensor
    ) -> tuple[Structure, tf.Tensor]:
        """Returns an outcome of each record, and whether it can be used, bool of shape [n].

        Args:
          distribution: The likelihood at x.
          x: Inputs of n records; models of whole records use only their number.
          seed: int32, shape [2].
        """
        rows = {"x": x} if self.generative else {"x": x, "y": ()}
        return simulate_twins(distribution, rows, seed)

    def records(self, x: Structure, outcomes: Structure) -> dict[str, Structure]:
        """Returns records under the keys "x" and, if they have inputs, "y".

        Args:
          x: Inputs, which whole records have none of.
          outcomes: Their outcomes, or the whole records.
        """
        return {"x": outcomes} if self.generative else {"x": x, "y": outcomes}

    def read(self, vector: tf.Tensor) -> tf.Tensor:
        """Returns the coordinates that the likelihood reads, shape [d], of all, shape [D]."""
        parts = tf.split(vector, self.coordinates.sizes)
        return tf.concat([parts[part] for part in self.parameters_read], axis=0)

    def likelihood(self, vector: tf.Tensor, theta: tf.Tensor, x: Structure) -> tfd.Distribution:
        """Returns the likelihood at parameters of which some are replaced.

        Args:
          vector: The parameters' coordinates, shape [D].
          theta: The coordinates that the likelihood reads, shape [d].
          x: Inputs of n records.
        """
        return self._likelihood(tf.split(vector, self.coordinates.sizes), theta, x)

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
        """Returns the parts that the likelihood reads, from a trace on the records' shapes.

        The trace simulates records and computes their density.
        """
        traced: list[tuple[int, ...]] = []
        unreached: list[str] = []

        def probe(x: Structure, y: Structure | None) -> tf.Tensor:
            parts = self.coordinates.flatten(self._model.prior.sample(seed=tf.constant([0, 0])))
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(parts)
                distribution = self._model.distribution_at(self.coordinates.constrain(parts), x)
                self.is_bound = isinstance(row_distribution(distribution), Variational)
                observed = as_event(x if y is None else y, distribution)
                log_prob = distribution.log_prob(observed)
            gradient = tape.gradient(log_prob, parts)
            self.may_jump = compares({part.op.name for part in parts}, log_prob.op)
            unreached.extend(
                _names_of(self.coordinates, number)
                for number, (part, slope) in enumerate(zip(parts, gradient, strict=True))
                if slope is None and depends_on({part.op.name}, log_prob.op)
            )
            traced.append(tuple(number for number, part in enumerate(gradient) if part is not None))
            rows = {"x": x} if y is None else {"x": x, "y": y}
            twin, _ = simulate_twins(distribution, rows, tf.constant([0, 0]))
            shapes = [
                [part.shape.as_list() for part in tf.nest.flatten(outcome)]
                for outcome in (twin, observed)
            ]
            if shapes[0] != shapes[1]:
                raise ValueError("it draws shapes {} for records of shapes {}".format(*shapes))
            return log_prob

        try:
            tf.function(probe, autograph=False).get_concrete_function(*specs_of(records, 3))
        except LIKELIHOOD_ERRORS as error:
            raise CannotPairError(f"the likelihood does not simulate records ({error})") from error
        if unreached:
            raise CannotPairError(
                f"no gradient reaches {unreached[0]}, which changes the likelihood (by tf.where, "
                "tf.cast, tf.round or tf.stop_gradient): sum it out, or make the change smooth"
            )
        if not traced[-1]:
            raise CannotPairError("the likelihood reads no parameter")
        return traced[-1]


def _names_of(coordinates: Coordinates, number: int) -> str:
    """Returns the name of a part of the prior, without the indices of its entries."""
    first = sum(coordinates.sizes[:number])
    return coordinates.names[first].partition("[")[0]
