"""A study's last phase at a hospital: one private release of its sums at a public point."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Sequence

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _keystream
from tfp_dpvi._keystream import SECURE, Keystream, Tapes
from tfp_dpvi._tf import Structure, tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.centred_fit import checked_inputs, standard_inputs, standard_persons
from tfp_dpvi.calibrated.clip import NUM_BLOCKS
from tfp_dpvi.calibrated.diagonal import num_inputs
from tfp_dpvi.calibrated.moved import MovedScores
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.requirements import CannotPairError
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.calibrated.weights import ReleasedWeights
from tfp_dpvi.calibrated.whitening import ReleasedSums
from tfp_dpvi.data import ArrayData, UnitRows, make_records, make_units
from tfp_dpvi.data.records import by_column
from tfp_dpvi.data.shapes import zeros_like
from tfp_dpvi.federated.messages import Task
from tfp_dpvi.federated.sums import NUM_RELEASES, Shapes, SiteSums
from tfp_dpvi.gradients import StepSpec
from tfp_dpvi.gradients.joint import joint_sensitivity
from tfp_dpvi.optimizers.scoring import ScoringOptimizer
from tfp_dpvi.privacy import FullBatch, PrivacyPlan
from tfp_dpvi.sampling import FullBatchSampler
from tfp_dpvi.training import CompiledSteps, Mechanism, initial_state, new_key
from tfp_dpvi.training.compiled import KEY

# Of the budget, as squared mu of Gaussian differential privacy: the rest is for the rounds.
SHARE = 2.0 / 3.0
# Records by which the prior counts in the coordinates, the same for all hospitals.
_NUM_RECORDS = 1000
# Records at a time.
_PHYSICAL = 1024
# Sums that some models alone have.
_SOMETIMES = ("ranks", "variance", "weights")
# Steps of a round never have such numbers, so that no draw of a seed's key occurs twice.
_FIRST = 2**40


class CannotCalibrateError(ValueError):
    """Raised where a study's model has no last phase.

    ```python
    >>> issubclass(CannotCalibrateError, ValueError)
    True

    ```
    """


class PublicPoint:
    """The sums that a study releases in its last phase, and where.

    Args:
      model: Prior and likelihood.
      coordinates: The study's coordinates.
      example: `(x, y)` of a few public or invented records.
      public_inputs: Public inputs like the hospitals', or None for standard ones.
      max_rows_per_unit: The most rows of a person, if records are persons; else None.
      max_weight: The largest weight that hospitals' records hold; None without weights.

    Attributes:
      scoring: Scores, coordinates and moments at the public inputs.
      shapes: The shapes of the sums, by name.
      draft: The plan of the sums of any hospital that protects records against their presence,
        before its noise is calibrated.

    Raises:
      CannotCalibrateError: The centred clip does not apply to the model.
      ValueError: The public inputs do not fit, or carry no information.
    """

    def __init__(
        self,
        model: BayesianModel,
        coordinates: Coordinates,
        example: tuple[Structure, Structure | None],
        public_inputs: Structure | None,
        *,
        max_rows_per_unit: int | None = None,
        max_weight: float | None = None,
    ) -> None:
        x, y = (by_column(name, part) for name, part in zip("xy", example, strict=True))
        records = make_records(x, y, None, dtype=model.dtype, validate=True)
        if max_rows_per_unit is not None:
            alone = make_units(np.arange(records.num), records.num, max_rows_per_unit, "first")
            records = records.by_person(alone)
        try:
            pairing = Pairing(model, records, log_scales=True)
        except CannotPairError as reason:
            raise CannotCalibrateError(f"{reason}") from reason
        if pairing.is_bound:
            raise CannotCalibrateError("the likelihood's density is a bound, not exact")
        self._from_study = coordinates
        size = len(pairing.index)
        # Of whole records only the number is read.
        inputs = zeros_like(records.x, num_inputs(size))
        if not model.generative:
            if public_inputs is not None and max_rows_per_unit is not None:
                public_inputs = _as_persons(public_inputs, model.dtype, max_rows_per_unit)
            inputs = _inputs_like(records.x, public_inputs, model.dtype, size)
        self.scoring = Scoring(pairing, inputs, max_weight, may_widen=False)
        if not self.scoring.is_informed():
            raise CannotCalibrateError(
                "the likelihood has no finite information at the public inputs and the prior's mean"
            )
        gradient = self.scoring.gradient(StepSpec(1.0, 1))
        self.draft = PrivacyPlan(
            FullBatch(),
            1.0,
            NUM_RELEASES,
            sensitivity=joint_sensitivity(gradient.joint, gradient.sensitivity),
        )
        joint = {release.name: release.shape for release in gradient.joint}
        shapes = {
            "score": (self.scoring.size,),
            "matrix": tuple(joint["curvature"]),
            "scale": (),
            "excess": (),
        }
        shapes |= {name: tuple(joint[name]) for name in _SOMETIMES if name in joint}
        self.shapes: Shapes = shapes

    @functools.cached_property
    def moved(self) -> MovedScores:
        """Expected scores at a point, of outcomes that follow other parameters."""
        return MovedScores(self.scoring.likelihood)

    def hold(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Fixes parameters and coordinates at a public point.

        Args:
          mean: The study's unconstrained parameters, shape [D].

        Returns:
          The coordinates that the likelihood reads, shape [d], and W, shape [d, d].
        """
        pairing = self.scoring.pairing
        params = self._from_study.bijector.forward(tf.constant(mean, self._from_study.dtype))
        theta = pairing.coordinates.flatten_one(params)[pairing.index]
        return theta, self.scoring.hold(theta, _NUM_RECORDS)

    def see_weights(self, total: SiteSums) -> None:
        """Gives the public inputs weights like those of records, as far as sums say.

        It is post-processing, after `hold`; without weights it does nothing.

        Args:
          total: The sums of all hospitals.
        """
        released, likelihood = released_weights(total), self.scoring.likelihood
        if released is not None:
            likelihood.scale = likelihood.scale.with_shares_of(released)


def _inputs_like(
    x: Structure, public_inputs: Structure | None, dtype: np.dtype, size: int
) -> Structure:
    """Returns public inputs of a record's shapes."""
    num = num_inputs(size)
    if public_inputs is None:
        generator = np.random.default_rng(0)
        try:
            if isinstance(x, UnitRows):
                return standard_persons(x, num)
            return tf.nest.map_structure(lambda part: standard_inputs(part, num, generator), x)
        except ValueError:
            raise CannotCalibrateError(
                "x has integers, whose values are not known before: pass public_inputs"
            ) from None
    return checked_inputs(public_inputs, x, dtype=dtype, size=size, of="the example")


def _as_persons(public_inputs: Structure, dtype: np.dtype, most: int) -> Structure:
    """Returns rows as persons, of whom as many have 1 row as 2, up to the most."""
    inputs = by_column("public_inputs", public_inputs)
    rows = make_records(inputs, None, None, dtype=dtype, validate=True)
    cycle = np.repeat(np.arange(most), np.arange(1, most + 1))
    numbers = np.resize(cycle, rows.num) + most * (np.arange(rows.num) // len(cycle))
    return rows.by_person(make_units(numbers, rows.num, most, "first")).x


class WindowSteps:
    """Runs the last phase of the hospitals of one process.

    Hospitals whose records have the same number and shapes share a trace.

    Args:
      point: The sums, and the public inputs.

    #### Formal guarantee

    A release is that of its mechanism: the clipped sum of centred scores at a public point, with
    its joint releases, on all records. Nothing moves between the releases.
    """

    def __init__(self, point: PublicPoint) -> None:
        self._point, self._lock = point, threading.Lock()
        self._compiled = CompiledSteps(
            ScoringOptimizer(None),
            tf.distribute.get_strategy(),
            jit_compile=False,
            run_eagerly=False,
        )
        self._compiled.begin([point.scoring.theta], planned_steps=0, gains_from_xla=False)
        self._num_steps = _FIRST

    def mechanism(
        self, data: ArrayData, relation: NeighboringRelation, randomness: str | None
    ) -> Mechanism:
        """Returns the release of a hospital, without its noise.

        Args:
          data: The hospital's records.
          relation: Its neighboring relation.
          randomness: None or "secure", see `Hospital`.
        """
        num = data.num_records
        spec = StepSpec(float(num), num)
        return Mechanism(
            FullBatchSampler(data.records.num, min(_PHYSICAL, data.records.num)),
            self._point.scoring.gradient(spec),
            float(num),
            num,
            neighboring_relation=relation,
            randomness=randomness or "",
            person=data.records.person,
        )

    def trace(self, mechanism: Mechanism, tensors: dict[str, tf.Tensor]) -> None:
        """Traces the releases, so that errors occur before anything is charged.

        Args:
          mechanism: The release.
          tensors: The records, as in `Data.tensors`.
        """
        with self._lock:
            secure = mechanism.randomness == SECURE
            key = self._tapes(mechanism).spec if secure else KEY
            self._compiled.steps_for(mechanism, tensors, key)

    def _tapes(self, mechanism: Mechanism) -> Tapes:
        words = mechanism.num_words()
        return Tapes(Keystream(_keystream.new_key(), words), NUM_RELEASES)

    def sums(
        self,
        mean: np.ndarray,
        mechanism: Mechanism,
        tensors: dict[str, tf.Tensor],
        seed: int | None,
    ) -> SiteSums:
        """Returns the released sums at a public point; they are charged.

        Args:
          mean: The study's unconstrained parameters, shape [D].
          mechanism: The release, with its noise.
          tensors: The records, as in `Data.tensors`.
          seed: The hospital's; None for a key from the operating system.
        """
        with self._lock:
            _, whitening = self._point.hold(mean)
            first = self._num_steps
            self._num_steps += NUM_RELEASES
            state = initial_state(mechanism, first, NUM_RELEASES)
            is_secure = mechanism.randomness == SECURE
            tapes = self._tapes(mechanism) if is_secure else None
            with contextlib.nullcontext() if tapes is None else contextlib.closing(tapes):
                if tapes is None:
                    calls = iter([(NUM_RELEASES, tf.constant(new_key(seed)))])
                    key = KEY
                else:
                    calls, key = tapes.calls(first, NUM_RELEASES), tapes.spec
                steps = self._compiled.steps_for(mechanism, tensors, key)
                for num, words in calls:
                    count = tf.constant(num, tf.int64)
                    state = steps(state, count, tensors, words, mechanism.noise)
        names = (release.name for release in mechanism.joint)
        accumulated = {
            name: tf.nest.map_structure(np.asarray, part)
            for name, part in zip(names, state.accumulated, strict=True)
        }
        spread = self._point.scoring.likelihood.scale.spread
        return _site_sums(accumulated, mechanism, whitening, spread)


def _site_sums(
    accumulated: dict[str, Structure],
    mechanism: Mechanism,
    whitening: np.ndarray,
    spread: float,
) -> SiteSums:
    """Returns the mean released sums of both halves."""
    blocks = np.arange(NUM_RELEASES) * NUM_BLOCKS // NUM_RELEASES
    cut = NUM_RELEASES // 2
    first, second = (
        ReleasedSums.of_blocks(accumulated, mechanism, used, spread)
        for used in (blocks[:cut], blocks[cut:])
    )
    names = ["score", "matrix", "scale", "excess"]
    names += [name for name in ("ranks", "variance") if len(getattr(first, name))]
    halves = {
        name: np.stack([np.asarray(getattr(side, name)) for side in (first, second)])
        for name in names
    }
    deviations = {name: getattr(first, f"{name}_sd") for name in names}
    num = mechanism.num_records
    if first.weights is not None and second.weights is not None:
        sides = (first.weights, second.weights)
        halves["weights"] = num * np.array(
            [[side.mean, side.square, side.cut, side.kept] for side in sides]
        )
        deviations["weights"] = num * first.weights.noise
    return SiteSums(num, whitening, halves, deviations)


class WindowRelease:
    """A hospital's release of the last phase.

    Args:
      steps: Runs it.
      data: The hospital's records.
      relation: Its neighboring relation.
      randomness: None or "secure", see `Hospital`.
      seed: The hospital's.

    Attributes:
      draft: The plan of the releases, before its noise is calibrated.
    """

    def __init__(
        self,
        steps: WindowSteps,
        data: ArrayData,
        relation: NeighboringRelation,
        randomness: str | None,
        seed: int | None,
    ) -> None:
        self._steps = steps
        self._tensors = data.tensors
        self._seed = seed
        self.mechanism = steps.mechanism(data, relation, randomness)
        self.draft = self.mechanism.plan(NUM_RELEASES)

    def begin(self, plan: PrivacyPlan) -> None:
        """Takes the calibrated plan, and traces the releases."""
        self.mechanism = self.mechanism.with_noise_of(plan)
        self._steps.trace(self.mechanism, self._tensors)

    def sums(self, task: Task) -> SiteSums:
        """Returns the released sums at the mean of a task's posterior; they are charged."""
        return self._steps.sums(task.posterior.mean, self.mechanism, self._tensors, self._seed)


def released_weights(sums: SiteSums) -> ReleasedWeights | None:
    """Returns what sums say of records' weights over the largest one; None without weights.

    Args:
      sums: The sums of one or several hospitals.
    """
    if "weights" not in sums.halves:
        return None
    means = (sums.mean("weights") / sums.num_records).tolist()
    noise = sums.deviation("weights") / sums.num_records
    return ReleasedWeights(means[0], means[1], means[2], means[3], noise)


def hides_weights(sums: SiteSums) -> bool:
    """Returns whether there are weights whose mean is no more than noise."""
    released = released_weights(sums)
    return released is not None and not released.is_known


def shares_of(sites: Sequence[SiteSums]) -> tuple[np.ndarray, np.ndarray]:
    """Returns hospitals' shares of all records, or of their weights and of these squared; [M].

    Where noise hides a hospital's weights, they are taken to be as the others'.

    Args:
      sites: The sums of each hospital.
    """
    records = np.array([site.num_records for site in sites], np.float64)
    moments = np.full([len(sites), 2], np.nan)
    for place, part in enumerate(map(released_weights, sites)):
        if part is not None and part.is_known:
            moments[place] = part.mean, max(part.square, part.mean**2)
    is_known = np.isfinite(moments[:, 0])
    others = moments[is_known].mean(axis=0) if is_known.any() else np.ones(2)
    means, squares = np.where(is_known[:, None], moments, others).T
    sums, square_sums = records * means, records * squares
    return sums / sums.sum(), square_sums / square_sums.sum()


def released_sums(sums: SiteSums, theta: np.ndarray, half: int | None = None) -> ReleasedSums:
    """Returns sums as those of a single site's window.

    Args:
      sums: The sums of one or several hospitals.
      theta: The public point, shape [d].
      half: The number of a half; None for both.
    """
    values = {
        name: sums.mean(name) if half is None else part[half] for name, part in sums.halves.items()
    }
    sd = sums.deviation if half is None else sums.deviations.__getitem__
    return ReleasedSums(
        num_steps=NUM_RELEASES if half is None else NUM_RELEASES // 2,
        theta=theta,
        score=values["score"],
        matrix=values["matrix"],
        scale=float(values["scale"]),
        excess=float(values["excess"]),
        ranks=values.get("ranks", np.zeros(0)),
        wider=np.zeros(0),
        score_sd=sd("score"),
        matrix_sd=sd("matrix"),
        scale_sd=sd("scale"),
        excess_sd=sd("excess"),
        ranks_sd=sd("ranks") if "ranks" in values else float("nan"),
        wider_sd=float("nan"),
        sampling_rate=1.0,
        variance=values.get("variance", np.zeros(0)),
        variance_sd=sd("variance") if "variance" in values else float("nan"),
        weights=released_weights(sums),
    )
