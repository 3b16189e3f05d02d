"""A hospital's local steps: variational inference with a cavity in the prior's place."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import threading
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _keystream, _random, surrogates
from tfp_dpvi import _validate as check
from tfp_dpvi._keystream import SECURE, Keystream, Tapes
from tfp_dpvi._tf import Structure, tf, tfd, tfp
from tfp_dpvi.bayes import checks
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.pairing import CannotPairError, Pairing
from tfp_dpvi.data import ArrayData, Data, Records, make_records, make_units
from tfp_dpvi.data.records import by_column
from tfp_dpvi.data.shapes import specs_of
from tfp_dpvi.data.streaming import is_source
from tfp_dpvi.data.units import Identifiers
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.scoring import ScoringSteps
from tfp_dpvi.federated.study import Study
from tfp_dpvi.federated.weights import given_weights, with_weights
from tfp_dpvi.federated.window import WindowSteps
from tfp_dpvi.gradients import Clip, ClippedGradient, StepGradient, StepSpec, through_draws
from tfp_dpvi.optimizers import DPOptimizer
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.sampling.choose import make_sampler
from tfp_dpvi.training import CompiledSteps, Mechanism, initial_state, new_key
from tfp_dpvi.training.compiled import KEY

_LOG = logging.getLogger("tfp_dpvi")

# Of the largest standard deviation there is, where a fit may start.
_MOST_SHARE = 0.98


class Family:
    """Normals q over the unconstrained parameters, and the cavity of a fit.

    The normal's variables are trainable, the cavity's are not.

    Mean-field standard deviations stay below sqrt(2) times the prior's, so that precisions stay
    above half of the prior's. A full-rank fit may pass that floor; the server's guard then takes
    less of its change.

    Args:
      study: The study, whose prior, family and largest initial standard deviation are used.
    """

    def __init__(self, study: Study) -> None:
        prior, dtype = study.terms.prior, study.coordinates.dtype
        self._full_rank, self._largest_start = study.full_rank, study.initial_stddev
        self._bound = (np.sqrt(2.0) * prior.stddev).astype(dtype.as_numpy_dtype)
        self._shift = tf.Variable(tf.zeros(prior.shift.shape, dtype), trainable=False)
        self._precision = tf.Variable(tf.zeros(prior.precision.shape, dtype), trainable=False)
        self._loc = tf.Variable(tf.zeros([prior.num], dtype), name="loc")
        if self._full_rank:
            start: Any = np.eye(prior.num, dtype=self._bound.dtype)
            to_scale, kind = tfp.bijectors.FillScaleTriL(), tfd.MultivariateNormalTriL
        else:
            start = self._bound / 2.0
            below = [tfp.bijectors.Scale(self._bound), tfp.bijectors.Sigmoid()]
            to_scale, kind = tfp.bijectors.Chain(below), tfd.MultivariateNormalDiag
        self._scale = tfp.util.TransformedVariable(start, to_scale, name="scale")
        self.distribution = tfd.TransformedDistribution(
            kind(self._loc, self._scale), study.coordinates.bijector, name="surrogate"
        )

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """Trainable variables of the normal."""
        return list(self.distribution.trainable_variables)

    def start(self, posterior: Factor, cavity: Factor) -> None:
        """Sets the cavity and the normal.

        Args:
          posterior: Where the normal starts, with standard deviations of at most the study's
            `initial_stddev`.
          cavity: What takes the prior's place; it may be improper.

        Raises:
          numpy.linalg.LinAlgError: The posterior is nearly singular.
        """
        self._shift.assign(cavity.shift)
        self._precision.assign(cavity.precision)
        self._loc.assign(posterior.mean)
        largest = np.minimum(self._largest_start, _MOST_SHARE * self._bound)
        shrink = np.minimum(1.0, largest / posterior.stddev)
        if self._full_rank:
            scale = shrink[:, np.newaxis] * np.linalg.cholesky(posterior.covariance)
        else:
            scale = shrink * posterior.stddev
        self._scale.assign(tf.constant(scale, self._loc.dtype))

    def factor(self) -> Factor:
        """Returns the normal; raises `ValueError` if it is not finite."""
        loc = self._loc.numpy().astype(np.float64)
        scale = tf.convert_to_tensor(self._scale).numpy().astype(np.float64)
        return Factor.normal(loc, scale @ scale.T if self._full_rank else scale**2)

    def divergence(self) -> tf.Tensor:
        """Returns KL(q || cavity) up to a constant, a scalar."""
        loc = tf.convert_to_tensor(self._loc)
        scale = tf.convert_to_tensor(self._scale)
        precision = tf.convert_to_tensor(self._precision)
        if self._full_rank:
            scale_term = tf.reduce_sum(scale * tf.matmul(precision, scale))
            loc_term = tf.reduce_sum(loc * tf.linalg.matvec(precision, loc))
            diagonal = tf.linalg.diag_part(scale)
        else:
            scale_term = tf.reduce_sum(precision * scale**2)
            loc_term = tf.reduce_sum(precision * loc**2)
            diagonal = scale
        linear = tf.reduce_sum(self._shift * loc)
        return (scale_term + loc_term) / 2.0 - linear - tf.reduce_sum(tf.math.log(diagonal))


class Refiner:
    """Runs the local steps of a study: one traced step serves all rounds.

    It also serves all hospitals of one process whose records have the same number and shapes. It
    holds no seed: each round's noise is that of the hospital which asks for it.

    A step minimises `sum_i -E_q log p(record_i | z) + KL(q || cavity)` over normals q of the
    study's family. The cavity is held in variables, so that rounds share a trace.

    Args:
      study: The study.

    Raises:
      ValueError: The study's optimizer has a clip and a noise multiplier.

    #### Formal guarantee

    Records enter a step through a sum of gradients alone, each clipped by itself; the divergence
    from the cavity touches no record (contract 2). The step adds the noise of its mechanism.
    """

    def __init__(self, study: Study) -> None:
        self.study, self._lock = study, threading.Lock()
        self.family = ScoringSteps(study) if study.by_information else Family(study)
        surrogates.build(self.family.distribution, study.prior)  # Refuses what has no gradient.
        self._optimizer: DPOptimizer = type(study.optimizer).from_config(
            study.optimizer.get_config()
        )
        # Without a clip nothing is private, and nothing is charged.
        self.private = not self._optimizer.clip.is_off
        if self.private:
            _refuse_noise(self._optimizer)
        self._optimizer.build(self.family.variables)
        self._fresh = [variable.numpy() for variable in self._optimizer.variables]
        self.compiled = CompiledSteps(
            self._optimizer, tf.distribute.get_strategy(), jit_compile=False, run_eagerly=False
        )
        self.compiled.begin(self.family.variables, planned_steps=0, gains_from_xla=False)
        self._num_steps = 0
        self._num_words: dict[Hashable, int] = {}  # Of a step, by the mechanism's identity.
        self._pairings: dict[str, Pairing | None] = {}  # By the records' shapes.
        self.window = None if study.point is None else WindowSteps(study.point)

    def data(
        self,
        x: Structure,
        y: Structure | None,
        num_records: int | None,
        weight: np.ndarray | None = None,
        *,
        weights: np.ndarray | None = None,
        unit_ids: Identifiers = None,
        rows_beyond: str = "random",
        seed: int | None = None,
    ) -> ArrayData:
        """Returns records, checked, with their sampler.

        Args:
          x: Arrays or a table of n records, in memory.
          y: Their outcomes; None for a likelihood of whole records.
          num_records: The public number of records, which hides the exact one; None for n.
          weight: Weight of each record of a shard, shape [n]; by default 1.
          weights: Survey weights, in a study that has them.
          unit_ids: The person of each row, in a study of persons.
          rows_beyond: Which rows of persons with more are used, see `DPModel.fit`.
          seed: That of their choice; None for the operating system's.

        Raises:
          TypeError: A part has no numbers.
          ValueError: The records do not fit the likelihood, or are not in memory.
        """
        model, columns = self.study.bayesian_model, self.study.columns
        weights = given_weights(self.study.max_weight, self.study.column_of_weights(x), weights)
        if columns is not None:
            x, y = columns.arrays(x, y)
        x, y = by_column("x", x), by_column("y", y)
        if any(isinstance(part, tf.data.Dataset) or is_source(part) for part in _leaves(x, y)):
            raise ValueError(
                "x or y is read from its source row by row, and a hospital holds its records: "
                "pass arrays."
            )
        records = make_records(x, y, weight, dtype=model.dtype, validate=True)
        _check_like(records, self.study.example)
        if weights is not None:
            records = with_weights(records, weights, self.study.max_weight, model.dtype)
        if (unit_ids is None) != (self.study.max_rows_per_unit is None):
            raise ValueError(
                "unit_ids is missing, the person of each row: the study protects persons."
                if unit_ids is None
                else "unit_ids: the study protects single rows; make it with max_rows_per_unit."
            )
        rows = records
        if unit_ids is not None:
            most = self.study.max_rows_per_unit
            units = make_units(unit_ids, rows.num, most, rows_beyond, seed=seed)
            rows.refuse_earlier_outcomes(units)
            records = rows.by_person(units)
        _check_records(model, rows, records)
        num_public = (
            records.num if num_records is None else check.count("num_records", num_records, 1)
        )
        batch_size = min(self.study.batch_size or num_public, num_public)
        bytes_each = sum(
            variable.shape.num_elements() * variable.dtype.size
            for variable in self.family.variables
        )
        sampler = make_sampler(
            "poisson",
            num_available=records.num,
            num_records=num_public,
            batch_size=batch_size,
            physical_batch_size=None,
            needs=BatchNeeds(bytes_each),
        )
        steps = math.ceil(num_public / batch_size)
        return ArrayData(records, sampler, num_public, float(batch_size), steps)

    def mechanism(
        self, data: Data, relation: NeighboringRelation, randomness: str | None = None
    ) -> Mechanism:
        """Returns the release of one step.

        Args:
          data: Records from `data`.
          relation: The neighboring relation of the hospital.
          randomness: None or "secure", see `Hospital`.

        Returns:
          The mechanism, whose noise a private hospital calibrates.
        """
        spec = StepSpec(data.batch_size, data.num_records)
        return Mechanism(
            data.sampler,
            self._clipped_gradient(spec, data.records),
            data.batch_size,
            data.num_records,
            None if self.private else 0.0,
            neighboring_relation=relation,
            randomness=randomness or "",
            person=data.records.person,
        )

    def _clipped_gradient(self, spec: StepSpec, records: Records) -> ClippedGradient:
        """Returns the clipped gradient of the records' terms, with the cavity's divergence."""
        clip, family = self._optimizer.clip, self.family
        if isinstance(family, ScoringSteps):
            return family.clipped_gradient(spec, clip)
        variables = family.variables
        surrogate, pairing = family.distribution, self._pairing(records, clip)
        if pairing is None:
            terms = _flat_gradient(self.study.bayesian_model, surrogate, variables, clip)
        else:
            terms = pairing.gradient(spec, surrogate, variables, clip)

        def draw(key: tf.Tensor) -> StepGradient:
            gradient = terms.draw(key)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                divergence = family.divergence() / spec.num_records
            exact = tape.gradient(divergence, variables, unconnected_gradients="zero")
            return dataclasses.replace(
                gradient, data_independent=exact, data_independent_loss=divergence
            )

        # Nothing is released beside the gradient: the posterior is the surrogate.
        identity = ("cavity", terms.identity)
        return dataclasses.replace(terms, draw=draw, joint=(), identity=identity)

    def _pairing(self, records: Records, clip: Clip) -> Pairing | None:
        """Returns the paired clip, or None for the flat one.

        It warns, once for each kind of records, where the paired clip does not apply.
        """
        if self.study.clipping != "paired":
            return None
        kind = f"{specs_of(records, 1)} {records.sample_weight is None}"
        if kind not in self._pairings:
            self._pairings[kind] = None
            try:
                if clip.clipping != "flat":
                    raise CannotPairError(
                        f"the optimizer's clipping={clip.clipping!r} is not one length for all"
                    )
                self._pairings[kind] = Pairing(self.study.bayesian_model, records)
            except CannotPairError as reason:
                _LOG.warning('clipping="paired" does not apply: %s. "flat" is used.', reason)
        return self._pairings[kind]

    def trace(self, mechanism: Mechanism, tensors: dict[str, tf.Tensor]) -> None:
        """Traces a round's steps, so that errors occur before anything is charged.

        Args:
          mechanism: The release of one step.
          tensors: The records, as in `Data.tensors`.
        """
        self.compiled.steps_for(mechanism, tensors, _kind_of_key(self._tapes(mechanism)))

    def _tapes(self, mechanism: Mechanism) -> Tapes | None:
        """Returns the tapes of a round, under a key of their own.

        There are none (None) for the default generators.
        """
        if mechanism.randomness != SECURE:
            return None
        if mechanism.identity not in self._num_words:
            self._num_words[mechanism.identity] = mechanism.num_words()
        words = self._num_words[mechanism.identity]
        return Tapes(Keystream(_keystream.new_key(), words), self.study.terms.local_steps)

    def refine(
        self,
        posterior: Factor,
        cavity: Factor,
        mechanism: Mechanism,
        tensors: dict[str, tf.Tensor],
        seed: int | None,
        number: int = 0,
    ) -> Factor:
        """Runs a round's steps, with the optimizer as new.

        Args:
          posterior: Where they start.
          cavity: What takes the prior's place; it may be improper.
          mechanism: The release of one step, with its noise.
          tensors: The records, as in `Data.tensors`.
          seed: The hospital's; None for a key from the operating system.
          number: How often the hospital was asked before.

        Returns:
          The factor by which the posterior changed. A diverged fit returns no change, so that
          whether there is a reply does not depend on the records (contract 8).
        """
        with self._lock:
            tapes, num_steps = self._tapes(mechanism), self.study.terms.local_steps
            steps = self.compiled.steps_for(mechanism, tensors, _kind_of_key(tapes))
            no_change = Factor.one(posterior.num, full_rank=posterior.full_rank)
            try:
                if isinstance(self.family, ScoringSteps):
                    self.family.start(posterior, cavity, mechanism, number)
                else:
                    self.family.start(posterior, cavity)
            except np.linalg.LinAlgError:  # A nearly singular posterior, whatever the records are.
                return no_change
            for variable, value in zip(self._optimizer.variables, self._fresh, strict=True):
                variable.assign(value)
            # A fresh key for every round; of a seed's one key, no number comes twice.
            first = self._num_steps
            self._num_steps += num_steps
            state = initial_state(mechanism, first, num_steps)
            with contextlib.nullcontext() if tapes is None else contextlib.closing(tapes):
                if tapes is None:
                    calls = iter([(num_steps, tf.constant(new_key(seed)))])
                else:
                    calls = tapes.calls(first, num_steps)
                for num, key in calls:
                    count = tf.constant(num, tf.int64)
                    state = steps(state, count, tensors, key, mechanism.noise)
            with contextlib.suppress(ValueError), np.errstate(all="ignore"):
                return self.family.factor() / posterior
            return no_change


def _flat_gradient(
    model: BayesianModel,
    surrogate: tfd.Distribution,
    variables: Sequence[tf.Variable],
    clip: Clip,
) -> ClippedGradient:
    """Returns the clipped gradient of the records' terms at one draw of the parameters a step.

    Gradients are clipped in the parameters, and their noisy sum is pulled back to the variables
    (Jälkö et al. 2022, arXiv:2210.15961).
    """

    def draw(key: tf.Tensor) -> StepGradient:
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(variables)
            params = surrogate.sample(seed=_random.tfp_seed(_random.fold_in(key, 0)))

        record_loss = functools.partial(model.record_loss, params)
        parts = tf.nest.flatten(params)
        return through_draws(record_loss, parts, tape, variables, clip, aligned=True)

    return ClippedGradient(draw, clip, identity=("flat",))


def _refuse_noise(optimizer: DPOptimizer) -> None:
    """Refuses an optimizer with a clip and noise of its own, which no hospital has calibrated."""
    try:
        optimizer.refuse_other_noise(None)
    except ValueError:
        raise ValueError(
            "optimizer of the study has a clip and a noise_multiplier, but each hospital "
            "calibrates its noise: leave noise_multiplier out."
        ) from None


def _check_records(model: BayesianModel, rows: Records, records: Records) -> None:
    """Finds mistakes before privacy is spent, on the records' shapes and, last, on outcomes.

    Args:
      model: Prior and likelihood.
      rows: The rows.
      records: The same, or the persons that they are of.
    """
    if model.generative == (records.y is not None):
        takes = "(params), for whole records" if model.generative else "(params, x), for y"
        fix = "leave y out" if model.generative else "pass y"
        raise ValueError(f"y does not fit the study: its likelihood takes {takes}; {fix}.")
    if model.generative and records.person is not None:
        raise ValueError(
            "unit_ids with a model of whole records: a person's rows are modelled by "
            "likelihood(params, x); leave them and max_rows_per_unit out."
        )
    checks.check_no_locals(model.prior, records)
    checks.check_units(model, records)
    checks.check_likelihood(model, records)
    checks.check_labels(model, rows)


def _check_like(records: Records, example: tuple[Structure, Structure | None] | None) -> None:
    """Refuses records of other columns or shapes than the study's example, if it has one."""
    if example is None:
        return
    for name, own, public in zip("xy", (records.x, records.y), example, strict=True):
        wanted = None if public is None else by_column(name, public)
        shapes = [
            tf.nest.map_structure(lambda part: tuple(np.shape(part)[1:]), value)
            for value in (own, wanted)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{name} has records of shape {shapes[0]}, and the study's example {shapes[1]}: "
                "pass its columns, in its order."
            )


def _leaves(*structures: Structure | None) -> list[Any]:
    """Returns the arrays of several structures."""
    return [part for part in tf.nest.flatten(structures) if part is not None]


def _kind_of_key(tapes: Tapes | None) -> tf.TensorSpec:
    return KEY if tapes is None else tapes.spec
