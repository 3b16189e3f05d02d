"""The model with which a hospital refines its factor: `DPVI`, with a cavity in the prior's place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi._tf import Structure, tf, tfd, tfp
from tfp_dpvi.data import Data
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.messages import Task
from tfp_dpvi.federated.study import Study
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec
from tfp_dpvi.models import DPVI
from tfp_dpvi.training import Mechanism, initial_state, new_key
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.step import Steps

_MOST_SHARE = 0.98  # Of the largest standard deviation there is, where a fit may start.


class LocalModel(DPVI):
    """Minimises `sum_i -E_q log p(record_i | z) + KL(q || cavity)` over normals q of the study's family.

    The cavity may be improper. Its numbers are in variables, so that a step is traced once for all rounds.

    Args:
      study: the study.
      seed: see `DPModel`.

    #### Formal guarantee

    That of `DPVI`: the records' terms are clipped one by one; the rest touches no record (contract C2).
    """

    def __init__(self, study: Study, *, seed: int | None = None) -> None:
        family = _Family(study)
        super().__init__(
            study.prior, study.likelihood, lambda prior: family.distribution, clipping=study.clipping, seed=seed
        )
        self._federated = _Hidden(family)

    def start(self, posterior: Factor, cavity: Factor) -> None:
        """Puts the surrogate at a posterior, and the cavity in the prior's place."""
        self._federated.family.start(posterior, cavity)

    def result(self) -> Factor:
        """Returns the surrogate."""
        return self._federated.family.factor()

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns that of `DPVI`, with the cavity's divergence in closed form."""
        theirs, family = super().clipped_gradient(spec), self._federated.family
        variables = self.trainable_variables

        def draw(key: tf.Tensor) -> StepGradient:
            gradient = theirs.draw(key)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                divergence = family.divergence() / spec.num_records
            exact = tape.gradient(divergence, variables, unconnected_gradients="zero")
            return dataclasses.replace(gradient, data_independent=exact, data_independent_loss=divergence)

        # Nothing is released beside the gradient: the posterior is the surrogate.
        return dataclasses.replace(theirs, draw=draw, joint=(), identity=("cavity", theirs.identity))


class Refiner:
    """Runs the local steps of a study: one traced step for all rounds, and for all hospitals of one process and one size.

    Args:
      study: the study.
      seed: see `DPModel`.
    """

    def __init__(self, study: Study, seed: int | None = None) -> None:
        self.study, self._lock = study, threading.Lock()
        self._model = LocalModel(study, seed=seed)
        self._optimizer = type(study.optimizer).from_config(study.optimizer.get_config())
        self.private = math.isfinite(self._optimizer.clip.bound)  # Without a clip nothing is, and nobody is charged.
        epsilon = 1.0 if self.private else None  # Each hospital calibrates to its own.
        self._model.compile(self._optimizer, epsilon=epsilon, delta=1e-5, jit_compile=False)
        self._compiled = CompiledSteps(
            self._optimizer, tf.distribute.get_strategy(), jit_compile=False, run_eagerly=False
        )
        self._compiled.begin(self._model.trainable_variables, planned_steps=0, gains_from_xla=False)
        self._seed, self._done = seed, 0
        self._fresh: list[np.ndarray] = []
        self._traced: list[Steps] = []

    @property
    def num_traces(self) -> int:
        """How many steps were traced."""
        return len(self._traced)

    def data(
        self, x: Structure, y: Structure | None, num_records: int | None, weight: np.ndarray | None = None
    ) -> Data:
        """Returns records, checked, with their sampler."""
        batch_size = (
            self.study.batch_size or num_records or len(tf.nest.flatten(x)[0])
        )  # The declared number hides the exact one.
        return self._model.make_data(x, y, weight, batch_size=batch_size, num_records=num_records)

    def mechanism(self, data: Data, relation: NeighboringRelation) -> Mechanism:
        """Returns the release of one step, without its noise."""
        return dataclasses.replace(self._model.mechanism(data), neighboring_relation=relation)

    def steps_for(self, mechanism: Mechanism, tensors: dict[str, tf.Tensor]) -> Steps:
        """Returns the traced steps; raises `ValueError` where they cannot be traced."""
        steps = self._compiled.steps_for(mechanism, tensors)
        if all(one is not steps for one in self._traced):
            self._traced.append(steps)
        if not self._fresh:
            self._fresh = [variable.numpy() for variable in self._optimizer.variables]
        return steps

    def refine(self, task: Task, cavity: Factor, mechanism: Mechanism, tensors: dict[str, tf.Tensor]) -> Factor:
        """Runs a round's steps from the task's posterior against a cavity, with the optimizer as new; returns the change."""
        number = self.study.terms.local_steps
        with self._lock:
            steps = self.steps_for(mechanism, tensors)
            self._model.start(task.posterior, cavity)
            for variable, value in zip(self._optimizer.variables, self._fresh, strict=True):
                variable.assign(value)
            state = initial_state(mechanism, self._done, number)
            self._done += number  # A fresh key for every round; of a seed's one key, no number comes twice.
            key = tf.constant(new_key(self._seed))
            steps(state, tf.constant(number, tf.int64), tensors, key, mechanism.noise)
            # A fit that ran away changes nothing: without noise of its own, a record could decide whether there is an answer (C8).
            with contextlib.suppress(ValueError), np.errstate(all="ignore"):
                return self._model.result() / task.posterior
            return Factor.one(task.posterior.num, full_rank=task.posterior.full_rank)


@dataclasses.dataclass(frozen=True)
class _Hidden:
    """Out of sight of Keras, which would track the cavity as weights."""

    family: _Family


class _Family:
    """A normal over the unconstrained parameters whose precision stays above half of the prior's, and the cavity.

    Mean-field standard deviations are a share of the largest there are, which cannot be passed. Where a full-rank fit ends
    below the floor the server's guard takes less of its change.
    """

    def __init__(self, study: Study) -> None:
        prior, dtype = study.terms.prior, study.coordinates.dtype
        self._full_rank, self._most_start, self._dtype = study.full_rank, study.initial_stddev, dtype
        bound = np.sqrt(2.0) * prior.stddev
        self._bound = bound.astype(dtype.as_numpy_dtype)
        self._shift = tf.Variable(tf.zeros([prior.num], dtype), trainable=False, name="cavity_shift")
        self._precision = tf.Variable(tf.zeros(prior.precision.shape, dtype), trainable=False, name="cavity_precision")
        self._loc = tf.Variable(tf.zeros([prior.num], dtype), name="loc")
        base: Any
        if self._full_rank:
            identity = np.eye(prior.num, dtype=dtype.as_numpy_dtype)
            self._scale = tfp.util.TransformedVariable(identity, tfp.bijectors.FillScaleTriL(), name="scale_tril")
            base = tfd.MultivariateNormalTriL(self._loc, self._scale)
        else:
            share = tfp.bijectors.Chain([tfp.bijectors.Scale(self._bound), tfp.bijectors.Sigmoid()])
            self._scale = tfp.util.TransformedVariable(self._bound / 2.0, share, name="scale")
            base = tfd.MultivariateNormalDiag(self._loc, self._scale)
        self.distribution = tfd.TransformedDistribution(base, study.coordinates.bijector, name="surrogate")

    def start(self, posterior: Factor, cavity: Factor) -> None:
        self._shift.assign(tf.constant(cavity.shift, self._dtype))
        self._precision.assign(tf.constant(cavity.precision, self._dtype))
        self._loc.assign(tf.constant(posterior.mean, self._dtype))
        most = np.minimum(self._most_start, _MOST_SHARE * self._bound)
        stddev = posterior.stddev
        shrink = np.minimum(1.0, most / stddev)
        full = self._full_rank
        scale = shrink[:, np.newaxis] * np.linalg.cholesky(posterior.covariance) if full else shrink * stddev
        self._scale.assign(tf.constant(scale, self._dtype))

    def factor(self) -> Factor:
        scale = tf.convert_to_tensor(self._scale).numpy().astype(np.float64)
        return Factor.normal(self._loc.numpy().astype(np.float64), scale @ scale.T if self._full_rank else scale**2)

    def divergence(self) -> tf.Tensor:
        """Returns KL(q || cavity) up to a constant."""
        loc, scale = tf.convert_to_tensor(self._loc), tf.convert_to_tensor(self._scale)
        precision = tf.convert_to_tensor(self._precision)
        linear = tf.reduce_sum(self._shift * loc)
        if not self._full_rank:
            quadratic = tf.reduce_sum(precision * (tf.square(scale) + tf.square(loc)))
            return quadratic / 2.0 - linear - tf.reduce_sum(tf.math.log(scale))
        trace = tf.reduce_sum(scale * tf.linalg.matmul(precision, scale))
        quadratic = trace + tf.reduce_sum(loc * tf.linalg.matvec(precision, loc))
        return quadratic / 2.0 - linear - tf.reduce_sum(tf.math.log(tf.linalg.diag_part(scale)))
