"""Broken copies of the private step's parts. Each loses the guarantee, or the promised result, in one way."""

import dataclasses

import numpy as np

from support.internals import StepGradients, step_gradients
from support.subject import REAL
from tfp_dpvi import optimizers
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import ClippedSum, PerExample, clipped_sum
from tfp_dpvi.gradients.clip import select_finite
from tfp_dpvi.sampling import PoissonSampler
from tfp_dpvi.sampling.poisson import poisson_gaps


def _changed(**parts):
    return dataclasses.replace(REAL, **parts)


def clip_record(clip, gradient):
    """One gradient at a joint norm of at most the bound, all parts alike."""
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(part)) for part in gradient]))
    factor = tf.minimum(
        tf.ones_like(norm), tf.cast(clip.bound, norm.dtype) / tf.maximum(norm, 1e-30)
    )
    return [part * factor for part in gradient]


# ---------------------------------------------------------------------- noise


def no_noise(clipped, *, noise_multiplier, **kwargs):
    return optimizers.privatize(clipped, noise_multiplier=0.0 * noise_multiplier, **kwargs)


def half_noise(clipped, *, noise_multiplier, **kwargs):
    return optimizers.privatize(clipped, noise_multiplier=0.5 * noise_multiplier, **kwargs)


def slightly_less_noise(clipped, *, noise_multiplier, **kwargs):
    return optimizers.privatize(clipped, noise_multiplier=0.985 * noise_multiplier, **kwargs)


def repeated_noise(clipped, *, key, **kwargs):
    return optimizers.privatize(clipped, key=tf.zeros_like(key), **kwargs)


def noise_shared_by_variables(
    clipped, *, key, noise_multiplier, expected_batch_size, data_independent, **kwargs
):
    quiet = optimizers.privatize(
        clipped,
        key=key,
        noise_multiplier=0.0,
        expected_batch_size=expected_batch_size,
        data_independent=data_independent,
        **kwargs,
    )
    longest = max(int(np.prod(part.shape)) for part in clipped.tensors)
    noise = tf.random.stateless_normal([longest], key, dtype=quiet.tensors[0].dtype)
    deviation = tf.cast(noise_multiplier, noise.dtype) * clipped.clip.bound / expected_batch_size
    return optimizers.PrivatizedGradients(
        [p + deviation * tf.reshape(noise[: int(np.prod(p.shape))], p.shape) for p in quiet.tensors]
    )


def realised_denominator(sampler):
    """Needs the sampler, whose realised size it divides by."""

    def privatize(clipped, *, expected_batch_size, **kwargs):
        del expected_batch_size
        size = tf.maximum(tf.cast(sampler.size, tf.float32), 1.0)
        return optimizers.privatize(clipped, expected_batch_size=size, **kwargs)

    return privatize


def exact_term_lost(clipped, *, data_independent, **kwargs):
    del data_independent
    return optimizers.privatize(clipped, **kwargs)


NOISE = {
    "no noise": no_noise,
    "noise / 2": half_noise,
    "noise 1.5 % too small": slightly_less_noise,
    "exact term lost": exact_term_lost,
}
STALE_NOISE = {
    "noise repeated between steps": repeated_noise,
    "noise shared by variables": noise_shared_by_variables,
}


# ---------------------------------------------------------------------- sums


def _mapped(record_gradient, records, mask, one):
    def each(record_and_mask):
        record, keep = record_and_mask
        loss, gradient = record_gradient(record, keep)
        selected, keep = select_finite(gradient, keep & tf.math.is_finite(loss))
        return tf.where(keep, loss, tf.zeros_like(loss)), one(selected)

    return tf.vectorized_map(each, (records, mask))


def _seen(losses):
    return PerExample(losses, tf.zeros_like(losses, tf.bool), tf.ones_like(losses, tf.bool))


def _sums(parts):
    return [tf.reduce_sum(part, axis=0) for part in parts]


def no_clip(record_gradient, records, mask, clip):
    losses, parts = _mapped(record_gradient, records, mask, list)
    return ClippedSum(_sums(parts), clip), _seen(losses)


def clip_after_sum(record_gradient, records, mask, clip):
    losses, parts = _mapped(record_gradient, records, mask, list)
    return ClippedSum(clip_record(clip, _sums(parts)), clip), _seen(losses)


def clip_each_part(record_gradient, records, mask, clip):
    def one(parts):
        return [clip_record(clip, [part])[0] for part in parts]

    losses, parts = _mapped(record_gradient, records, mask, one)
    return ClippedSum(_sums(parts), clip), _seen(losses)


def mean_for_sum(record_gradient, records, mask, clip):
    value, statistics = clipped_sum(record_gradient, records, mask, clip)
    size = tf.maximum(tf.reduce_sum(tf.cast(mask, statistics.losses.dtype)), 1.0)
    return ClippedSum([part / size for part in value.tensors], clip), statistics


def weight_after_clip(record_gradient, records, mask, clip):
    bare = {name: part for name, part in records.items() if name != "sample_weight"}

    def each(inputs):
        record, keep, weight = inputs
        loss, gradient = record_gradient(record, keep)
        selected, keep = select_finite(gradient, keep & tf.math.is_finite(loss))
        return tf.where(keep, loss, tf.zeros_like(loss)), [
            weight * p for p in clip_record(clip, selected)
        ]

    losses, parts = tf.vectorized_map(each, (bare, mask, records["sample_weight"]))
    return ClippedSum(_sums(parts), clip), _seen(losses)


def multiplied_by_zero(record_gradient, records, mask, clip):
    def each(record_and_mask):
        record, keep = record_and_mask
        loss, gradient = record_gradient(record, keep)
        for part in gradient:
            keep = keep & tf.reduce_all(tf.math.is_finite(part))
        return loss, [tf.cast(keep, part.dtype) * part for part in clip_record(clip, gradient)]

    losses, parts = tf.vectorized_map(each, (records, mask))
    return ClippedSum(_sums(parts), clip), _seen(losses)


def bad_losses_kept(record_gradient, records, mask, clip):
    def blind(record, keep):
        loss, gradient = record_gradient(record, keep)
        return tf.zeros_like(loss), gradient

    return clipped_sum(blind, records, mask, clip)


def mask_ignored(record_gradient, records, mask, clip):
    return clipped_sum(record_gradient, records, tf.ones_like(mask), clip)


SUMS = {
    "clip after the sum": clip_after_sum,
    "mean for sum": mean_for_sum,
    "weight applied after the clip": weight_after_clip,
    "padding counted": mask_ignored,
}
SENSITIVITY = {
    "no clip": no_clip,
    "each variable clipped for itself": clip_each_part,
    "NaN multiplied by zero instead of selected": multiplied_by_zero,
    "records of bad loss kept": bad_losses_kept,
}


def _kl_inside(model, key, num_records):
    step = step_gradients(model, key, num_records)
    if step.pull_back is not None:
        return step

    def record_gradient(record, keep):
        loss, gradient = step.record_gradient(record, keep)
        return loss, [
            part + exact for part, exact in zip(gradient, step.data_independent, strict=True)
        ]

    return StepGradients(record_gradient, step.released, None, step.pull_back)


def _second_draw(model, key, num_records):
    """Each record's gradient by one set of draws after that by another."""
    norms, step = (
        step_gradients(model, key + 1, num_records),
        step_gradients(model, key, num_records),
    )

    def record_gradient(record, keep):
        loss, gradient = step.record_gradient(record, keep)
        return loss, [*norms.record_gradient(record, keep)[1], *gradient]

    return StepGradients(record_gradient, step.released, step.data_independent, step.pull_back)


def _norms_of_first_half(record_gradient, records, mask, clip):
    def one(parts):
        half = len(parts) // 2
        norm = tf.sqrt(tf.add_n([tf.reduce_sum(part**2) for part in parts[:half]]))
        scale = tf.where(norm > clip.bound, clip.bound / norm, tf.ones_like(norm))
        return [part * scale for part in parts[half:]]

    losses, parts = _mapped(record_gradient, records, mask, one)
    return ClippedSum(_sums(parts), clip), _seen(losses)


STEPS = {
    **{name: _changed(clipped_sum=part) for name, part in SUMS.items()},
    "KL inside the clip": _changed(step_gradients=_kl_inside),
    "a second draw between norm and gradient": _changed(
        step_gradients=_second_draw, clipped_sum=_norms_of_first_half
    ),
}


# ---------------------------------------------------------------------- sampling


class Shuffled(PoissonSampler):
    """Batches of a fixed size from a random order, said to be Poisson."""

    def for_each_batch(self, key, visit, initial):
        size = round(self.num_available * self.probability)
        order = tf.argsort(
            tf.random.stateless_uniform([self.num_available], key, dtype=tf.float64)
        )[:size]
        pad = -size % self.physical_batch_size
        indices = tf.cast(tf.pad(order, [[0, pad]]), tf.int64)
        carry = initial
        for start in range(0, size, self.physical_batch_size):
            places = tf.range(start, start + self.physical_batch_size)
            carry = visit(carry, indices[start : start + self.physical_batch_size], places < size)
        return carry


class Truncated(PoissonSampler):
    """The first physical batch, at 1.2 times the mean; what is sampled beyond it is dropped."""

    def __init__(self, num_available, probability, physical_batch_size=None):
        del physical_batch_size
        super().__init__(num_available, probability, round(1.2 * num_available * probability))

    def for_each_batch(self, key, visit, initial):
        gaps = poisson_gaps(key, [self.physical_batch_size], self.probability, self.num_available)
        indices = tf.cumsum(gaps) - 1
        return visit(
            initial, tf.minimum(indices, self.num_available - 1), indices < self.num_available
        )


class LastLost(PoissonSampler):
    """The last record never takes part."""

    def for_each_batch(self, key, visit, initial):
        def shorter(carry, indices, mask):
            return visit(carry, indices, mask & (indices < self.num_available - 1))

        return super().for_each_batch(key, shorter, initial)


class GapsRepeated(PoissonSampler):
    """Every physical batch has the gaps of the first."""

    def for_each_batch(self, key, visit, initial):
        gaps = poisson_gaps(key, [self.physical_batch_size], self.probability, self.num_available)

        def body(last, carry):
            indices = last + tf.cumsum(gaps)
            carry = visit(
                carry, tf.minimum(indices, self.num_available - 1), indices < self.num_available
            )
            return indices[-1], carry

        start = (tf.constant(-1, tf.int64), initial)
        return tf.while_loop(lambda last, _: last < self.num_available - 1, body, start)[1]


class RateTooHigh(PoissonSampler):
    """Samples at a rate 3 % above the one it states."""

    def for_each_batch(self, key, visit, initial):
        return PoissonSampler(
            self.num_available, 1.03 * self.probability, self.physical_batch_size
        ).for_each_batch(key, visit, initial)


SAMPLERS = {
    "shuffled batches": Shuffled,
    "truncated batches": Truncated,
    "last record lost": LastLost,
    "gaps repeated": GapsRepeated,
    "rate 3 % too high": RateTooHigh,
}
