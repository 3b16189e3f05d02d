"""A hospital's local fit: `DPVI` with a cavity in the prior's place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
from collections.abc import Hashable
from typing import Any

import numpy as np
from dp_accounting import NeighboringRelation

from tfp_dpvi import _keystream
from tfp_dpvi._keystream import SECURE, Keystream, Tapes
from tfp_dpvi._tf import Structure, tf, tfd, tfp
from tfp_dpvi.data import Data
from tfp_dpvi.federated.factors import Factor
from tfp_dpvi.federated.study import Study
from tfp_dpvi.gradients import ClippedGradient, StepGradient, StepSpec
from tfp_dpvi.models import DPVI
from tfp_dpvi.training import CompiledSteps, Mechanism, initial_state, new_key
from tfp_dpvi.training.compiled import KEY

_MOST_SHARE = 0.98  # Of the largest standard deviation there is, where a fit may start.


class Family:
    """Normals over the unconstrained parameters as trainable variables, and the cavity as constant ones.

    Mean-field standard deviations stay below sqrt(2) times the prior's, so that precisions stay above half of the prior's. A
    full-rank fit may pass that floor; the server's guard then takes less of its change.
    """

    def __init__(self, study: Study) -> None:
        prior, dtype = study.terms.prior, study.coordinates.dtype
        self._full_rank, self._largest_start = study.full_rank, study.initial_stddev
        self._bound = (np.sqrt(2.0) * prior.stddev).astype(dtype.as_numpy_dtype)
        self._shift, self._precision = (
            tf.Variable(tf.zeros(part.shape, dtype), trainable=False)
            for part in (prior.shift, prior.precision)
        )
        self._loc = tf.Variable(tf.zeros([prior.num], dtype), name="loc")
        start: Any = (
            np.eye(prior.num, dtype=self._bound.dtype) if self._full_rank else self._bound / 2.0
        )
        below = tfp.bijectors.Chain([tfp.bijectors.Scale(self._bound), tfp.bijectors.Sigmoid()])
        to_scale = tfp.bijectors.FillScaleTriL() if self._full_rank else below
        self._scale = tfp.util.TransformedVariable(start, to_scale, name="scale")
        kind = tfd.MultivariateNormalTriL if self._full_rank else tfd.MultivariateNormalDiag
        normal = kind(self._loc, self._scale)
        self.distribution = tfd.TransformedDistribution(
            normal, study.coordinates.bijector, name="surrogate"
        )

    def start(self, posterior: Factor, cavity: Factor) -> None:
        """Sets the cavity, and the normal to a posterior with standard deviations of at most the study's `initial_stddev`."""
        self._shift.assign(cavity.shift)
        self._precision.assign(cavity.precision)
        self._loc.assign(posterior.mean)
        largest = np.minimum(self._largest_start, _MOST_SHARE * self._bound)
        shrink = np.minimum(1.0, largest / posterior.stddev)
        root = np.linalg.cholesky(posterior.covariance) if self._full_rank else posterior.stddev
        scale = shrink[:, np.newaxis] * root if self._full_rank else shrink * root
        self._scale.assign(tf.constant(scale, self._loc.dtype))

    def factor(self) -> Factor:
        """Returns the normal; raises `ValueError` if it is not finite."""
        loc, scale = (
            tf.convert_to_tensor(part).numpy().astype(np.float64)
            for part in (self._loc, self._scale)
        )
        return Factor.normal(loc, scale @ scale.T if self._full_rank else scale**2)

    def divergence(self) -> tf.Tensor:
        """Returns KL(q || cavity) up to a constant."""
        loc, scale, precision = (
            tf.convert_to_tensor(part) for part in (self._loc, self._scale, self._precision)
        )
        if self._full_rank:
            spread = tf.reduce_sum(scale * tf.matmul(precision, scale))
            away, diagonal = (
                tf.reduce_sum(loc * tf.linalg.matvec(precision, loc)),
                tf.linalg.diag_part(scale),
            )
        else:
            spread, away, diagonal = (
                tf.reduce_sum(precision * scale**2),
                tf.reduce_sum(precision * loc**2),
                scale,
            )
        return (
            (spread + away) / 2.0
            - tf.reduce_sum(self._shift * loc)
            - tf.reduce_sum(tf.math.log(diagonal))
        )


class LocalModel(DPVI):
    """Minimises `sum_i -E_q log p(record_i | z) + KL(q || cavity)` over normals q of the study's family.

    The cavity may be improper. It is held in variables, so that a step is traced once for all rounds. The guarantee is that of
    `DPVI`: the records' terms are clipped one by one; the rest touches no record (contract C2).
    """

    def __init__(self, study: Study, *, seed: int | None = None) -> None:
        family = Family(study)
        super().__init__(
            study.prior,
            study.likelihood,
            lambda prior: family.distribution,
            clipping=study.clipping,
            seed=seed,
        )
        self.family = family

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns that of `DPVI`, with the cavity's divergence in closed form."""
        theirs, variables = super().clipped_gradient(spec), self.trainable_variables

        def draw(key: tf.Tensor) -> StepGradient:
            gradient = theirs.draw(key)
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(variables)
                divergence = self.family.divergence() / spec.num_records
            exact = tape.gradient(divergence, variables, unconnected_gradients="zero")
            return dataclasses.replace(
                gradient, data_independent=exact, data_independent_loss=divergence
            )

        # Nothing is released beside the gradient: the posterior is the surrogate.
        return dataclasses.replace(
            theirs, draw=draw, joint=(), identity=("cavity", theirs.identity)
        )


class Refiner:
    """Runs the local steps of a study: one traced step for all rounds, and for all hospitals of one process and one size."""

    def __init__(self, study: Study, seed: int | None = None) -> None:
        self.study, self._seed, self._lock = study, seed, threading.Lock()
        self._model = LocalModel(study, seed=seed)
        self._optimizer = type(study.optimizer).from_config(study.optimizer.get_config())
        self.private = math.isfinite(
            self._optimizer.clip.bound
        )  # Without a clip nothing is, and nothing is charged.
        epsilon = 1.0 if self.private else None  # Each hospital calibrates to its own.
        self._model.compile(self._optimizer, epsilon=epsilon, delta=1e-5, jit_compile=False)
        self._optimizer.build(self._model.trainable_variables)
        self._fresh = [variable.numpy() for variable in self._optimizer.variables]
        self.compiled = CompiledSteps(
            self._optimizer, tf.distribute.get_strategy(), jit_compile=False, run_eagerly=False
        )
        self.compiled.begin(self._model.trainable_variables, planned_steps=0, gains_from_xla=False)
        self._done = 0
        self._num_words: dict[Hashable, int] = {}  # Of a mechanism's step.

    def data(
        self,
        x: Structure,
        y: Structure | None,
        num_records: int | None,
        weight: np.ndarray | None = None,
    ) -> Data:
        """Returns records, checked, with their sampler. A declared `num_records` hides the exact one."""
        batch_size = self.study.batch_size or num_records or len(tf.nest.flatten(x)[0])
        return self._model.make_data(x, y, weight, batch_size=batch_size, num_records=num_records)

    def mechanism(
        self, data: Data, relation: NeighboringRelation, randomness: str | None = None
    ) -> Mechanism:
        """Returns the release of one step, without its noise."""
        own = {"neighboring_relation": relation, "randomness": randomness or ""}
        return dataclasses.replace(self._model.mechanism(data), **own)

    def trace(self, mechanism: Mechanism, tensors: dict[str, tf.Tensor]) -> None:
        """Traces a round's steps, so that errors occur before anything is charged."""
        self.compiled.steps_for(mechanism, tensors, _kind_of_key(self._tapes(mechanism)))

    def _tapes(self, mechanism: Mechanism) -> Tapes | None:
        """Returns the tapes of a round, under a key of their own; None for the default generators."""
        if mechanism.randomness != SECURE:
            return None
        if mechanism.identity not in self._num_words:
            self._num_words[mechanism.identity] = mechanism.num_words()
        words = self._num_words[mechanism.identity]
        return Tapes(Keystream(_keystream.new_key(), words), self.study.terms.local_steps)

    def refine(
        self, posterior: Factor, cavity: Factor, mechanism: Mechanism, tensors: dict[str, tf.Tensor]
    ) -> Factor:
        """Runs a round's steps from a posterior against a cavity, with the optimizer as new; returns the change."""
        with self._lock:
            tapes, number = self._tapes(mechanism), self.study.terms.local_steps
            steps = self.compiled.steps_for(mechanism, tensors, _kind_of_key(tapes))
            nothing = Factor.one(posterior.num, full_rank=posterior.full_rank)
            try:
                self._model.family.start(posterior, cavity)
            except np.linalg.LinAlgError:  # A nearly singular posterior, whatever the records are.
                return nothing
            for variable, value in zip(self._optimizer.variables, self._fresh, strict=True):
                variable.assign(value)
            # A fresh key for every round; of a seed's one key, no number comes twice.
            first, self._done = self._done, self._done + number
            state = initial_state(mechanism, first, number)
            with contextlib.nullcontext() if tapes is None else contextlib.closing(tapes):
                calls = (
                    [(number, tf.constant(new_key(self._seed)))]
                    if tapes is None
                    else tapes.calls(first, number)
                )
                for few, key in calls:
                    num = tf.constant(few, tf.int64)
                    state = steps(state, num, tensors, key, mechanism.noise)
            # A fit that ran away changes nothing: no record may decide whether there is an answer (C8).
            with contextlib.suppress(ValueError), np.errstate(all="ignore"):
                return self._model.family.factor() / posterior
            return nothing


def _kind_of_key(tapes: Tapes | None) -> tf.TensorSpec:
    return KEY if tapes is None else tapes.spec
