"""Faults planted in the step that `fit` runs, for the audits to find, and the models that they are planted in."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable

import numpy as np

import tfp_dpvi as dpvi
from support import broken, internals
from support.subject import Subject
from tfp_dpvi import audit, optimizers
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


# ---------------------------------------------------------------------- noise


@contextlib.contextmanager
def noise(function):
    with Subject(privatize=function).installed():
        yield


def _with_draws(draws):
    """Adds noise by hand, from `draws(key, shape)`, to sums that are released without."""

    def privatize(clipped, *, key, noise_multiplier, expected_batch_size, **settings):
        quiet = optimizers.privatize(
            clipped,
            key=key,
            noise_multiplier=0.0,
            expected_batch_size=expected_batch_size,
            **settings,
        )
        deviation = tf.cast(noise_multiplier, tf.float32) * clipped.clip.bound / expected_batch_size
        noisy = [part + deviation * draws(key, part.shape) for part in quiet.mean]
        return dataclasses.replace(quiet, tensors=noisy, mean=noisy)

    return privatize


def by_hand(factor=1.0):
    """Gaussian noise of some factor of the stated deviation, on no grid."""
    return _with_draws(lambda key, shape: factor * tf.random.stateless_normal(shape, key))


def _one_draw_for_all(key, shape):
    return tf.random.stateless_normal([], key) * tf.ones(shape)


def _two_halves(key, shape):
    """Each of two replicas adds its share of the deviation instead of its share of the variance."""
    return sum(0.5 * tf.random.stateless_normal(shape, key + number) for number in range(2))


def _shifted_stream(key, num):
    """Keys of consecutive steps are places of one stream, where the next step begins one value later."""
    place = tf.cast((key[1] // 4) % 8192, tf.int32)
    stream = tf.random.stateless_normal([8192 + num], key * [1, 0], dtype=tf.float64)
    return tf.slice(stream, [place], [num])


@contextlib.contextmanager
def realised_denominator():
    size = tf.Variable(0.0)

    def counting(record_gradient, records, mask, clip):
        size.assign_add(tf.reduce_sum(tf.cast(mask, tf.float32)))
        return clipped_sum(record_gradient, records, mask, clip)

    def privatize(clipped, *, expected_batch_size, **settings):
        del expected_batch_size
        private = optimizers.privatize(
            clipped, expected_batch_size=tf.maximum(size.read_value(), 1.0), **settings
        )
        size.assign(0.0)
        return private

    with Subject(clipped_sum=counting, privatize=privatize).installed():
        yield


def all_records_denominator(clipped, *, expected_batch_size, **settings):
    return optimizers.privatize(clipped, expected_batch_size=30.0, **settings)


@contextlib.contextmanager
def keys(changed):
    """The keys of a step from those that it should have: `changed(keys_of_step, key, step)`."""
    with internals.keys_changed(changed):
        yield


@contextlib.contextmanager
def sampler(sampler_class):
    with Subject(poisson=sampler_class).installed():
        yield


def _noise_twice(keys_of_step, key, step):
    return [*keys_of_step(key, step)[:3], keys_of_step(key, step // 2)[3]]


def _samples_twice(keys_of_step, key, step):
    return [keys_of_step(key, step // 2)[0], *keys_of_step(key, step)[1:]]


# ---------------------------------------------------------------------- all faults


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, the audit that must find it, and the model that it is planted in."""

    name: str
    plant: Callable
    audit: str
    subject: str = "linear"


def _fault(name, audit, plant, subject="linear"):
    return Fault(name, plant, audit, subject)


FAULTS = [
    _fault("no noise", "lower_bound", lambda model: noise(broken.no_noise)),
    _fault("half the noise", "lower_bound", lambda model: noise(broken.half_noise)),
    _fault("half the noise", "randomness", lambda model: noise(broken.half_noise)),
    _fault("noise of two replicas", "lower_bound", lambda model: noise(_with_draws(_two_halves))),
    _fault("noise of two replicas", "randomness", lambda model: noise(_with_draws(_two_halves))),
    _fault("one draw for all values", "randomness", lambda model: noise(_with_draws(_one_draw_for_all))),
    _fault("noise of a shifted stream", "randomness", lambda model: internals.draws_changed(_shifted_stream)),
    _fault("noise off the grid", "randomness", lambda model: noise(by_hand())),
    _fault("the realised denominator", "randomness", lambda model: realised_denominator()),
    _fault("a wrong denominator", "randomness", lambda model: noise(all_records_denominator)),
    _fault("a fixed key", "randomness", lambda model: keys(lambda real, key, step: real(0 * key, step))),
    _fault("noise used in two steps", "randomness", lambda model: keys(_noise_twice)),
    _fault("a sample used in two steps", "randomness", lambda model: keys(_samples_twice)),
    _fault("shuffled batches", "randomness", lambda model: sampler(broken.Shuffled)),
    _fault("truncated batches", "randomness", lambda model: sampler(broken.Truncated)),
    _fault("the last record lost", "randomness", lambda model: sampler(broken.LastLost)),
    _fault("twice the rate", "randomness", lambda model: rate_doubled()),
    _fault("twice the rate", "lower_bound", lambda model: rate_doubled(), "sampled"),
    _fault("no clip", "replay", lambda model: sums(broken.no_clip)),
    _fault("clip after the sum", "replay", lambda model: sums(broken.clip_after_sum)),
    _fault("a mean for the sum", "replay", lambda model: sums(broken.mean_for_sum)),
    _fault("NaN multiplied by zero", "replay", lambda model: sums(broken.multiplied_by_zero)),
    _fault("the weight after the clip", "replay", lambda model: sums(broken.weight_after_clip), "weighted"),
    _fault("a tracked mean", "replay", tracked_mean),
    _fault("the next record's twin", "replay", lambda model: neighbours_twin(), "pairs"),
    _fault("an unclipped joint release", "replay", lambda model: joint_unclipped(), "pairs"),
    _fault("an unclipped joint release", "lower_bound", lambda model: joint_unclipped(), "pairs"),
    _fault("joint releases not priced", "replay", lambda model: internals.joint_for_free(), "pairs"),
]  # fmt: skip

RISK = 1e-7  # With which an audit of a clean step fails; ten of them stay below 1e-6.
CLEAN = [
    ("linear", "replay"),
    ("linear", "randomness"),
    ("linear", "lower_bound"),
    ("sampled", "lower_bound"),
    ("weighted", "replay"),
    ("pairs", "replay"),
    ("pairs", "randomness"),
    ("pairs", "lower_bound"),
]


def complaint(subject, name, plant=lambda model: contextlib.nullcontext()):
    """Runs an audit of a subject with a planted fault; returns the audit's text, and whether it complains."""
    model = {"pairs": logistic, "sampled": lambda: linear(0.5)}.get(subject, linear)()
    given, how = (small_records(),), {}
    if subject == "pairs":
        given = labelled()
    elif subject == "weighted":
        given = (small_records(), None, np.ones(30, np.float32))
    if name == "randomness":
        how = {"false_alarm": RISK, **({"batch_size": 8} if subject == "linear" else {})}
    elif name == "lower_bound":
        how = {"confidence": 1.0 - RISK, "num_runs": 6000}
        how |= {"batch_size": 8, "num_runs": 3000} if subject == "sampled" else {}
    with plant(model):
        result = getattr(audit, name)(model, *given, **how)
    if name == "lower_bound":
        return str(result), result.contradicted
    # A record that reaches the clip is among those that a replay tries: it must attain the statement.
    weak = name == "replay" and result.attained < 0.99
    return str(result) + ("\nNo record attains the statement." if weak else ""), (
        weak or not result.holds
    )
