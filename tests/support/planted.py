"""Faults planted in the step that `fit` runs, for the audits to find, and the models that they are planted in."""

from __future__ import annotations

import contextlib

import numpy as np

import tfp_dpvi as dpvi
from support import broken, internals
from support.subject import Subject
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.gradients import clipped_sum
from tfp_dpvi.sampling import PoissonSampler

tfd = tfp.distributions
WIDTH = 8
CLIP = 0.5


class Linear(dpvi.DPModel):
    """A linear loss: a record's gradient is the record, so that a canary's clipped gradient is known."""

    def __init__(self, width=WIDTH, **kwargs):
        super().__init__(**kwargs)
        self.v = self.add_weight("v", [width], initializer="zeros")
        self.mean = self.add_weight("mean", [width], initializer="zeros", trainable=False)
        self.built = True

    def record_loss(self, x):
        return tf.reduce_sum(self.v * x)


def linear(noise=1.0, width=WIDTH, **settings):
    model = Linear(width)
    model.compile(sgd(noise), **settings)
    return model


def sgd(noise):
    return dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=CLIP, noise_multiplier=noise)


def small_records(num=30, width=WIDTH, seed=0):
    """Records whose gradients are within the clip."""
    rng = np.random.default_rng(seed)
    return (0.1 * rng.normal(size=(num, width)) / np.sqrt(width)).astype("float32")


def logistic(noise=1.0, clipping="paired", **settings):
    """A posterior with the paired clip, whose step has joint releases and twins."""
    model = dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 2),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params)),
        clipping=clipping,
        gradients=settings.pop("gradients", "aligned"),
    )
    model.compile(sgd(noise), **settings)
    return model


def labelled(num=20, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 2)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")


# ---------------------------------------------------------------------- what one record can do


@contextlib.contextmanager
def sums(function):
    with Subject(clipped_sum=function).installed():
        yield


@contextlib.contextmanager
def tracked_mean(model):
    """The running mean of a batch normalisation, which the step keeps beside what it releases."""

    def tracking(record_gradient, records, mask, clip):
        model.mean.assign(0.9 * model.mean + 0.1 * tf.reduce_mean(records["x"], axis=0))
        return clipped_sum(record_gradient, records, mask, clip)

    with sums(tracking), internals.writes_allowed():
        yield


@contextlib.contextmanager
def neighbours_twin():
    """Each record's twin is that of the next record of the batch."""
    with internals.twins_changed(lambda twin: tf.roll(twin, 1, axis=0)):
        yield


@contextlib.contextmanager
def joint_unclipped():
    """The curvature is that of the gradients before the clip."""

    def unclipped(record_gradient, records, mask, clip):
        value, examples = clipped_sum(record_gradient, records, mask, clip)
        norms = examples.norms[:, None]
        longer = [
            part * tf.maximum(tf.ones_like(norms), norms / clip.bound)
            for part in examples.gradients
        ]
        return value, examples._replace(gradients=longer)

    with internals.paired_sums(unclipped):
        yield


# ---------------------------------------------------------------------- sampling


class TwiceTheRate(PoissonSampler):
    """Samples at twice the rate that it states."""

    def for_each_batch(self, key, body, initial):
        sampler = PoissonSampler(self.num_available, 2 * self.probability, self.num_available)
        return sampler.for_each_batch(key, body, initial)


@contextlib.contextmanager
def rate_doubled():
    with Subject(poisson=TwiceTheRate).installed():
        yield


REPLAYED = {
    "no clip": lambda model: sums(broken.no_clip),
    "clip after the sum": lambda model: sums(broken.clip_after_sum),
    "a record multiplied by zero": lambda model: sums(broken.multiplied_by_zero),
    "a tracked mean": tracked_mean,
}
"""Faults of `linear()` that a replay finds."""

REPLAYED_PAIRS = {
    "a twin of the next record": neighbours_twin,
    "an unclipped joint release": joint_unclipped,
}
"""Faults of `logistic()` that a replay finds."""
