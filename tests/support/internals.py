"""The one place where tests look behind the public face of models: what is rebuilt there is followed here, in no other file."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import sys
import weakref
from typing import Any
from unittest import mock

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.bayes.predictive import PosteriorPredictive
from tfp_dpvi.calibrated import pairing
from tfp_dpvi.data import make_records, streaming
from tfp_dpvi.gradients import Clip, ClippedGradient, StepSpec, mapped, vmap
from tfp_dpvi.gradients import step as step_lib
from tfp_dpvi.models import fitting
from tfp_dpvi.optimizers import dp_keras
from tfp_dpvi.sampling import choose
from tfp_dpvi.synthetic.synthesizer import TableModel
from tfp_dpvi.training import Mechanism, compiled, initial_state
from tfp_dpvi.training import mechanism as mechanism_lib
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.step import make_steps

__all__ = ["LOG", "PosteriorPredictive", "StepGradients", "TableModel"]

LOG = logging.getLogger("tfp_dpvi")


# ---------------------------------------------------------------------- the step


@dataclasses.dataclass(frozen=True)
class StepGradients:
    """One record's gradient, the shapes of the sum, the exact gradient and the way back, as tests make them."""

    record_gradient: Any
    released: Any
    data_independent: Any = None
    pull_back: Any = None


def step_of(
    of_step, variables, optimizer, sampler, *, expected_batch_size, num_records, jit_compile=False
):
    """The traced step of `fit` by itself: `run(key, first step, number of steps, noise multiplier, records)`.

    Args:
      of_step: a model, or `(key, num_records) -> StepGradients`.
    """
    clip = Clip(optimizer.l2_norm_clip, optimizer.clipping)
    spec = StepSpec(expected_batch_size, num_records)

    def draw(key):
        made = of_step(key, num_records)
        exact = {"data_independent": made.data_independent, "pull_back": made.pull_back}
        return mapped(made.record_gradient, made.released, clip, **exact)

    if hasattr(of_step, "clipped_gradient"):
        with _with_clip(of_step, clip):
            gradient = of_step.clipped_gradient(spec)
    else:
        gradient = ClippedGradient(draw, clip)
    mechanism = Mechanism(sampler, gradient, expected_batch_size, num_records, unsafe_loss=True)
    steps = make_steps(mechanism, optimizer, variables, jit_compile=jit_compile)

    def run_steps(key, step, num_steps, multiplier, records):
        state = initial_state(mechanism, step)._replace(accumulated=())
        multiplier = tf.constant(multiplier, tf.float64)
        return steps(
            state, tf.constant(num_steps, tf.int64), records, tf.constant(key, tf.int64), multiplier
        )

    return run_steps


@contextlib.contextmanager
def _with_clip(model, clip):
    if model.optimizer is not None:
        yield
        return
    with mock.patch.object(type(model), "clip", clip):
        yield


def clipped_gradient(model, num_records=100, expected_batch_size=10.0):
    with _with_clip(model, Clip(1.0)):
        return model.clipped_gradient(StepSpec(expected_batch_size, num_records))


def step_gradients(model, key, num_records):
    """A step's gradient once its draws are made, also of a model that was not compiled."""
    return clipped_gradient(model, num_records).draw(key)


@contextlib.contextmanager
def installed(clipped_sum, privatize, poisson):
    """Puts a step's parts where `fit` takes them from."""
    with (
        mock.patch.object(step_lib, "clipped_sum", clipped_sum),
        mock.patch.object(dp_keras, "privatize", privatize),
        mock.patch.object(choose, "PoissonSampler", poisson),
    ):
        yield


@contextlib.contextmanager
def writes_allowed():
    """A loss may write to variables."""
    with (
        mock.patch.object(vmap, "refuse_writes"),
        mock.patch.object(mechanism_lib, "refuse_writes"),
    ):
        yield


@contextlib.contextmanager
def twins_changed(change):
    """The simulated twins of a batch pass through a function, behind the check that rows do not mix."""
    simulated = pairing.simulate_twins

    def changed(*args):
        twins, usable = simulated(*args)
        return change(twins), usable

    unchecked = mock.patch.object(pairing, "check_rows", return_value=None)
    with unchecked, mock.patch.object(pairing, "simulate_twins", changed):
        yield


@contextlib.contextmanager
def paired_sums(clipped_sum):
    """Puts a clipped sum where the paired clip takes it from."""
    module = sys.modules["tfp_dpvi.calibrated.clip"]  # The package has a function of that name.
    with mock.patch.object(module, "clipped_sum", clipped_sum):
        yield


@contextlib.contextmanager
def draws_changed(draws):
    """The standard normals of a step's noise are `draws(key, num)`; the sums still lie on the grid."""
    with mock.patch.object(_random, "_few_normals", draws):
        yield


@contextlib.contextmanager
def keys_changed(changed):
    """A step's keys are `changed(keys_of_step, key, step)`."""
    real = _random.keys_of_step

    def keys(key, step, num_sampling=0):
        return changed(lambda *of_step: real(*of_step, num_sampling), key, step)

    with mock.patch.object(_random, "keys_of_step", keys):
        yield


@contextlib.contextmanager
def joint_for_free():
    """The sensitivity that is priced leaves out the joint releases."""
    with mock.patch.object(mechanism_lib, "joint_sensitivity", lambda joint, gradient: gradient):
        yield


@contextlib.contextmanager
def without_the_look_at_xla():
    """What XLA made of a step is not looked at for shapes that vary."""
    with mock.patch.object(compiled, "refuse_dynamic_shapes"):
        yield


def traced_steps(model):
    """The compiled functions that a model's fits have made since `compile`; None for one that XLA refused."""
    return list(model._dp.compiled.steps._traced.values())


def graphs_of(step):
    """Every graph that a compiled function was traced into."""
    return [traced.graph for traced in step._list_all_concrete_functions_for_serialization()]


def steps_by_xla(model):
    """Of each step that was made or tried: whether by XLA."""
    return [jit for *_, jit in model._dp.compiled.steps._traced]


def mark_executions(path):
    """From now on each step of each fit in this process leaves a "b" in a file before it runs, and an "e" after it."""
    marks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    make = CompiledSteps.steps_for

    def marking(self, mechanism, tensors, *key):
        inner = make(self, mechanism, tensors, *key)

        def execute(state, steps, *rest):
            os.write(marks, b"b" * int(steps))
            result = inner(state, steps, *rest)
            os.write(marks, b"e" * int(steps))
            return result

        return execute

    CompiledSteps.steps_for = marking


# ---------------------------------------------------------------------- models


def prepare(model, x, y=None):
    """Makes a model's variables, as `fit` does before its first step."""
    model.prepare(make_records(x, y, None, dtype=np.asarray(x).dtype, validate=False))


def check_and_price(model, x, expected_batch_size, y=None):
    """All that `fit` does before it plans."""
    records = make_records(x, y, None, dtype=x.dtype, validate=False)
    model.prepare(records)
    model.check_records(records)
    _SPECS[model] = expected_batch_size


_SPECS = weakref.WeakKeyDictionary()


def clip_batch(model, records, mask, key):
    """The clipped sum of a VAE's batch, a tensor for each variable."""
    step = clipped_gradient(model, 100, _SPECS.get(model, 20.0)).draw(key)
    return list(step.clipped_sum(records, mask, key)[0].tensors)


def terms_of(model, x, key, num_draws=1, y=None):
    """A VAE's losses, draws and posterior for a batch of records."""
    return model.autoencoder.terms(x, key, num_draws, y=y)


def read_by_prior(model):
    """The trainable variables that a VAE's learned prior reads."""
    density = model.autoencoder.density
    return () if density is None else density.reads


def layers_of_vae(model):
    """The layers that a VAE's gradients and regularizers come from."""
    return model.watched_layers()


def layer_gradients(model):
    """What a VAE takes norms and sums of gradients from."""
    return model.layer_gradients


def noise_of_terms(model):
    """Sensitivity and noise scales of a term-wise model's sum, as its last fit was priced or `check_and_price` said."""
    stated = _groups_of(model)
    return stated.noise.sensitivity, stated.noise_scales


def num_prior_samples(model):
    return _groups_of(model).num_prior_samples


def _groups_of(model):
    plan = model.privacy_plan
    known = None if plan is None else getattr(plan.sampling, "probability", 1.0) * plan.num_records
    return model.group_terms(StepSpec(_SPECS.get(model, known), 100))


def mechanism_of(model):
    """The mechanism of the model's last fit, with its noise."""
    return None if model._dp.released is None else model._dp.released.mechanism


def settings_of(model):
    """What `compile` was told about privacy, or None."""
    return model._dp.target


def validation_metrics_of(model):
    return [metric.name for metric in model._dp.compiled.validation_metrics]


def seed_of(model):
    return model._dp.seed


def given_to(model):
    """What the constructor was given, by name."""
    return model._model.arguments


def is_generative(model):
    return model.generative


def holds_a_fit(model):
    """Whether a model still has what its last fit ran on."""
    return model._dp.running is not None or model.train_function is not None


def runs_named(name):
    """Gives fits this name in their ledger, in place of a random one."""
    return mock.patch.object(fitting, "new_run", return_value=name)


def most_releases(model, plan):
    """How many of a plan's releases the budgets have room for."""
    return model.privacy_ledger.most_releases(plan, model._dp.target.budgets)


def replace_lock(model, lock):
    """The lock that a fit holds becomes another one."""
    model._dp.lock = lock


@contextlib.contextmanager
def as_in_fit(model):
    """What assignments see while `fit` runs, without one."""
    model._dp.running = mock.Mock(steps_ahead=0)
    model._dp.running.learner.settings = frozenset(vars(model))
    try:
        with model.optimizer.settings_held():
            yield
    finally:
        model._dp.running = None


# ---------------------------------------------------------------------- records and keys


def wants_stream(x, y, stream):
    return streaming.wants_stream((x, y), stream)


is_lazy = streaming.is_lazy
RESIDENT_BYTES = (streaming, "RESIDENT_BYTES")  # To be patched.


def keys_of_step(seed, number):
    """Sampling, draw, visits and noise key of a seeded model's step."""
    return _random.keys_of_step(tf.constant(_random.new_key(seed)), number)
