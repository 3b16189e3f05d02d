"""The one place where tests look behind the public face of models: what is rebuilt there is followed here, in no other file."""

from __future__ import annotations

import contextlib
import logging
import os
from unittest import mock

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._keras import tf
from tfp_dpvi.models import loop, planning, run, sources
from tfp_dpvi.models.loop import LoopSettings, StepGradients, make_loop
from tfp_dpvi.models.predictive import PosteriorPredictive
from tfp_dpvi.models.records import make_records
from tfp_dpvi.models.synthesizer import TableModel
from tfp_dpvi.optimizers import noise
from tfp_dpvi.privacy import Sensitivity

__all__ = ["LOG", "PosteriorPredictive", "StepGradients", "TableModel"]

LOG = logging.getLogger("tfp_dpvi")


# ---------------------------------------------------------------------- the step


def step_of(step_gradients, variables, optimizer, sampler, *, expected_batch_size, num_records, jit_compile=False):
    """The traced step of `fit` by itself: `run(key, first step, number of steps, noise multiplier, records)`."""
    settings = LoopSettings(
        sampler=sampler,
        expected_batch_size=expected_batch_size,
        num_records=num_records,
        sensitivity=Sensitivity(),
        jit_compile=jit_compile,
        run_eagerly=False,
    )
    traced = make_loop(step_gradients, variables, optimizer, settings)

    def run_steps(key, step, num_steps, multiplier, records):
        counts = [tf.constant(number, tf.int64) for number in (step, num_steps)]
        return traced(tf.constant(key, tf.int64), *counts, tf.constant(multiplier, tf.float64), records)

    return run_steps


def step_gradients(model, key, num_records):
    return model.step_gradients(key, num_records)


@contextlib.contextmanager
def installed(clipped_sum, privatize, poisson):
    """Puts a step's parts where `fit` takes them from."""
    with (
        mock.patch.object(loop, "clipped_sum", clipped_sum),
        mock.patch.object(noise, "privatize", privatize),
        mock.patch.object(planning, "PoissonSampler", poisson),
    ):
        yield


@contextlib.contextmanager
def without_the_look_at_xla():
    """What XLA made of a step is not looked at for shapes that vary."""
    with mock.patch.object(run, "refuse_dynamic_shapes"):
        yield


def traced_steps(model):
    """The compiled functions that a model's fits have made since `compile`; None for one that XLA refused."""
    return list(model._dp.loops.values())


def steps_by_xla(model):
    """Of each step that was made or tried: whether by XLA."""
    return [key[-3] for key in model._dp.loops]


def mark_executions(path):
    """From now on each step of each fit in this process leaves a "b" in a file before it runs, and an "e" after it."""
    marks = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    make = run.PrivateRun._loop

    def marking(self, sampler, tensors):
        inner = make(self, sampler, tensors)

        def execute(key, first, steps, *rest):
            os.write(marks, b"b" * int(steps))
            result = inner(key, first, steps, *rest)
            os.write(marks, b"e" * int(steps))
            return result

        return execute

    run.PrivateRun._loop = marking


# ---------------------------------------------------------------------- models


def prepare(model, x, y=None):
    """Makes a model's variables, as `fit` does before its first step."""
    model._prepare(make_records(x, y, None, dtype=np.asarray(x).dtype, validate=False))


def check_and_price(model, x, sampling, expected_batch_size):
    """All that `fit` does before it plans."""
    records = make_records(x, None, None, dtype=x.dtype, validate=False)
    model._prepare(records)
    model._check_data(records)
    model._noise(sampling, expected_batch_size)


def clip_batch(model, records, mask, key):
    """The clipped sum of a VAE's batch, a tensor for each variable."""
    return list(model._clip_batch(records, mask, key)[0].tensors)


def terms_of(model, x, key, num_draws=1):
    """A VAE's losses, draws and posterior for a batch of records."""
    return model._terms(x, key, num_draws)


def layer_gradients(model):
    """What a VAE takes norms and sums of gradients from."""
    return model._trial.known()


def noise_of_terms(model):
    """Sensitivity and noise scales that a term-wise model was priced for."""
    return model._noise_of_terms


def num_prior_samples(model):
    return model._prior_samples


def settings_of(model):
    """What `compile` was told about privacy, or None."""
    return model._dp.settings


def validation_metrics_of(model):
    return [metric.name for metric in model._dp.validation_metrics]


def seed_of(model):
    return model._dp.seed


def given_to(model):
    """What the constructor was given, by name."""
    return model._model.given


def is_generative(model):
    return model._model.generative


def holds_a_fit(model):
    """Whether a model still has what its last fit ran on."""
    return model._dp.train_function is not None or model.train_function is not None


def name_the_run(model, name):
    """In place of a random name."""
    model._dp.identity = name


def most_releases(model, plan):
    """How many of a plan's releases the budgets have room for."""
    return planning.most_releases(model._dp, plan)


# ---------------------------------------------------------------------- records and keys


def wants_stream(x, y, stream):
    return sources.wants_stream((x, y), stream)


RESIDENT_BYTES = (sources, "RESIDENT_BYTES")  # To be patched.


def keys_of_step(seed, number):
    """Sampling, draw, visits and noise key of a seeded model's step."""
    return _random.keys_of_step(tf.constant(_random.new_key(seed)), number)
