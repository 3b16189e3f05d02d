"""The noise of private steps, on batches of chosen sizes (C1) and in whole fits."""

import functools

import numpy as np

import tfp_dpvi as dpvi
from support import internals, statistics
from support.internals import StepGradients
from support.subject import REAL
from tfp_dpvi._tf import keras, tf
from tfp_dpvi.optimizers import DPKerasSGDOptimizer
from tfp_dpvi.sampling import Sampler

EXPECTED = 8.0  # q N
SIZES = (0, 1, 8, 24)
CLIP, MULTIPLIER, EXACT = 0.6, 1.7, 0.25
SHAPES = ([100_000], [2, 81_000], [])
TOTAL = sum(int(np.prod(shape)) for shape in SHAPES)


class FirstRecords(Sampler):
    """Batches of a size that a test sets while the compiled step stays the same."""

    num_available, physical_batch_size = 24, 8
    scheme, identity = None, ("first records",)

    def __init__(self):
        self.size = tf.Variable(0, dtype=tf.int64, trainable=False)

    def for_each_batch(self, key, visit, initial):
        def body(start, carry):
            indices = start + tf.range(8, dtype=tf.int64)
            return start + 8, visit(carry, tf.minimum(indices, 23), indices < self.size)

        begin = (tf.constant(0, tf.int64), initial)
        return tf.while_loop(lambda start, _: start < self.size, body, begin)[1]


class Steps:
    """A compiled step with 262,001 coordinates in three variables, whose records all have the same gradient."""

    def __init__(self, subject=REAL, *, dtype=np.float32, jit_compile=False):
        self.dtype, self.subject = dtype, subject
        self.variables = [tf.Variable(np.zeros(shape, dtype)) for shape in SHAPES]
        self.sampler = FirstRecords()
        optimizer = DPKerasSGDOptimizer(
            learning_rate=1.0, l2_norm_clip=CLIP, noise_multiplier=MULTIPLIER
        )
        optimizer.build(self.variables)
        self.run = internals.step_of(
            self._gradients,
            self.variables,
            optimizer,
            self.sampler,
            expected_batch_size=EXPECTED,
            num_records=1000,
            jit_compile=jit_compile,
        )

    def _gradients(self, key, num_records):
        del key, num_records

        def record_gradient(record, keep):
            del keep
            return record["x"], [tf.fill(shape, record["x"]) for shape in SHAPES]

        exact = [tf.fill(shape, tf.constant(EXACT, self.dtype)) for shape in SHAPES]
        return StepGradients(record_gradient, self.variables, exact)

    def __call__(self, key, step, size, *, multiplier=MULTIPLIER, num_steps=1):
        """What is released over `num_steps` steps: minus the change of the variables, [TOTAL]."""
        for variable in self.variables:
            variable.assign(tf.zeros_like(variable))
        self.sampler.size.assign(size)
        records = {"x": tf.ones([24], self.dtype)}
        with self.subject.installed():
            self.run(key, step, num_steps, multiplier, records)
        return -np.concatenate([variable.numpy().ravel() for variable in self.variables]).astype(
            np.float64
        )

    def noise(self, key, step, size):
        return self(key, step, size) - self(key, step, size, multiplier=0.0)


def check_noise(steps):
    """C1, C2: noise of standard deviation z C / (q N) whatever the realised size, on sum / (q N) plus the exact term."""
    key = statistics.fresh_key()
    expected = MULTIPLIER * CLIP / EXPECTED
    noises = []
    for size in SIZES:
        quiet = steps(key, 0, size, multiplier=0.0)
        # Each record is clipped to C over all coordinates together.
        mean = size * CLIP / np.sqrt(TOTAL) / EXPECTED
        np.testing.assert_allclose(
            quiet, mean + EXACT, rtol=1e-5, err_msg=f"released mean of {size} records"
        )
        noisy = steps(key, 0, size)
        assert np.all(np.isfinite(noisy))
        noises.append(noisy - quiet)
        statistics.standard_deviation(noises[-1], expected, f"noise on {size} records")
    statistics.standard_normal(noises[0] / expected, "noise")
    # Sums lie between the points of the grid, so that the noise of two differs by up to one of it.
    grid = 2.0**-12 * expected
    for size, noise in zip(SIZES, noises, strict=True):
        np.testing.assert_allclose(
            noise, noises[0], atol=grid + 2e-7, err_msg=f"size {size} moves the noise"
        )


def check_fresh_noise(steps):
    """C10: noise is independent between steps, variables and coordinates, and between calls with other keys."""
    key = statistics.fresh_key()
    noises = [steps.noise(key, step, 0) for step in (0, 1, 2, 1000)]
    noises.append(steps.noise(statistics.fresh_key(), 0, 0))
    for i, noise in enumerate(noises):
        for other in noises[:i]:
            statistics.uncorrelated(noise, other, "noise of two steps")
    noise = noises[0]
    statistics.uncorrelated(noise[:100_000], noise[100_000:200_000], "noise of two variables")
    for lag in (1, 2, 3, 4, 64, 1000):
        statistics.uncorrelated(
            noise[lag:100_000], noise[: 100_000 - lag], f"noise of coordinates {lag} apart"
        )
    variance = MULTIPLIER**2 + 0.0
    five = steps(key, 0, 0, num_steps=5) - steps(key, 0, 0, num_steps=5, multiplier=0.0)
    statistics.standard_deviation(
        five, np.sqrt(5 * variance) * CLIP / EXPECTED, "noise of five steps in one call"
    )


@functools.cache
def shared_steps(dtype=np.float32, jit_compile=False):
    return Steps(dtype=dtype, jit_compile=jit_compile)


class Indicator(dpvi.DPModel):
    """A linear loss: a record's gradient is minus the record, so that releases show who took part."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.v = tf.Variable(tf.zeros([width]))

    def record_loss(self, x):
        return -tf.reduce_sum(self.v * x)


class Watch(keras.callbacks.Callback):
    """Changes of the weights in every call of the compiled step."""

    def __init__(self):
        super().__init__()
        self.changes = []

    def on_train_begin(self, logs=None):
        self.last = self.model.v.numpy()

    def on_train_batch_end(self, batch, logs=None):
        now = self.model.v.numpy()
        self.changes.append(now.astype(np.float64) - self.last)
        self.last = now


def fit_indicator(
    model, x, *, batch_size, steps, clip=1.0, multiplier=1.0, num_records=None, **kwargs
):
    """Fits with plain SGD at rate 1: returns the released mean of each step, [steps, width]."""
    compile_kwargs = {"steps_per_execution": 1, **kwargs}
    if model.optimizer is None:
        optimizer = DPKerasSGDOptimizer(
            learning_rate=1.0, l2_norm_clip=clip, noise_multiplier=multiplier
        )
        model.compile(optimizer, **compile_kwargs)
    watch = Watch()
    model.fit(
        x,
        batch_size=batch_size,
        epochs=1,
        steps_per_epoch=steps,
        num_records=num_records,
        verbose=0,
        callbacks=[watch],
    )
    return np.stack(watch.changes)
