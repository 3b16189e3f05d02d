"""Models with a mean-field posterior over few parameters, where what a step costs besides arithmetic decides."""

from __future__ import annotations

import functools
import importlib.util
import pathlib
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import vae
from harness import HAS_TENSORFLOW_PRIVACY, Peer, Runner

import tfp_dpvi as dpvi
from tfp_dpvi._tf import keras, tf, tfp

tfd = tfp.distributions
CLIP, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.0, 1e-3
PER_CALL = 500
Makers = dict[str, Callable[[], Runner]]


def example(name: str) -> Any:
    """A script of `examples/`, for its model."""
    path = pathlib.Path(__file__).resolve().parents[2] / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"examples_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def private(
    make: Callable[[], Any],
    data: tuple[Any, ...],
    batch_size: int,
    steps: int,
    per_call: int,
    jit_compile: bool = True,
    randomness: str | None = None,
) -> Runner:
    """`make()` gives an uncompiled model of this library."""
    model = make()
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=CLIP, noise_multiplier=NOISE_MULTIPLIER, learning_rate=LEARNING_RATE
    )
    # XLA as it would be by default for a run of more than a thousand steps.
    model.compile(
        optimizer, steps_per_execution=per_call, jit_compile=jit_compile, randomness=randomness
    )
    run, _ = vae.timed(model, per_call, *data, batch_size=batch_size)
    return Runner(lambda wanted: 1e-3 * run(wanted) * max(1, wanted), steps)


class MeanField(keras.Model):
    """Logistic regression with a mean-field posterior and no privacy, as a Keras model with a `train_step`."""

    def __init__(self, x: Any, y: Any, batch_size: int) -> None:
        super().__init__()
        self.records, self.batch_size = (tf.constant(x), tf.constant(y, tf.float32)), batch_size
        self.loc = self.add_weight("loc", [x.shape[1]], initializer="zeros")
        self.raw_scale = self.add_weight(
            "raw_scale", [x.shape[1]], initializer=keras.initializers.Constant(-4.0)
        )

    def train_step(self, data: Any) -> dict[str, Any]:
        del data  # Keras's counting of steps.
        num = len(self.records[1])
        indices = tf.random.uniform([self.batch_size], maxval=num, dtype=tf.int32)
        x, y = (tf.gather(part, indices) for part in self.records)
        with tf.GradientTape() as tape:
            posterior = tfd.MultivariateNormalDiag(self.loc, tf.math.softplus(self.raw_scale))
            prior = tfd.MultivariateNormalDiag(
                tf.zeros_like(self.loc), 4.0 * tf.ones_like(self.loc)
            )
            logits = tf.linalg.matvec(x, posterior.sample())
            fit = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(y, logits))
            loss = fit + tfd.kl_divergence(posterior, prior) / num
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def not_private(
    x: Any, y: Any, batch_size: int, steps: int, per_call: int, jit_compile: bool | None
) -> Runner:
    model = MeanField(x, y, batch_size)
    model.compile(
        keras.optimizers.Adam(LEARNING_RATE), steps_per_execution=per_call, jit_compile=jit_compile
    )
    run, _ = vae.timed(model, per_call, tf.data.Dataset.range(1).repeat())
    return Runner(lambda wanted: 1e-3 * run(wanted) * max(1, wanted), steps)


def by_tfp(x: Any, y: Any, batch_size: int, steps: int) -> Runner:
    """`tfp.vi.fit_surrogate_posterior` on random batches, compiled by XLA."""
    inputs, outcomes, num = tf.constant(x), tf.constant(y, tf.float32), len(y)
    loc = tf.Variable(tf.zeros([x.shape[1]]))
    scale = tfp.util.TransformedVariable(tf.fill([x.shape[1]], 0.02), tfp.bijectors.Softplus())
    posterior = tfd.MultivariateNormalDiag(loc, scale)
    prior = tfd.MultivariateNormalDiag(tf.zeros([x.shape[1]]), 4.0 * tf.ones([x.shape[1]]))

    def target(weights: Any) -> Any:
        indices = tf.random.uniform([batch_size], maxval=num, dtype=tf.int32)
        logits = tf.linalg.matvec(tf.gather(inputs, indices), weights[0])
        log_prob = -tf.nn.sigmoid_cross_entropy_with_logits(tf.gather(outcomes, indices), logits)
        return num * tf.reduce_mean(log_prob)[None] + prior.log_prob(weights)

    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(posterior.trainable_variables)

    @tf.function(autograph=False)
    def fit() -> Any:
        return tfp.vi.fit_surrogate_posterior(
            target, posterior, optimizer, num_steps=steps, sample_size=1
        )

    def run(wanted: int) -> float:
        begin = time.perf_counter()
        fit().numpy()
        return time.perf_counter() - begin

    return Runner(run, steps)


class RecordLosses(keras.losses.Loss):
    """A vector of losses, for TensorFlow Privacy: cross entropy and the KL term that rides along."""

    def __init__(self) -> None:
        super().__init__(reduction=keras.losses.Reduction.NONE)

    def call(self, y_true: Any, y_pred: Any) -> Any:
        labels = tf.cast(tf.reshape(y_true, [-1]), y_pred.dtype)
        return tf.nn.sigmoid_cross_entropy_with_logits(labels, y_pred[:, 0]) + y_pred[:, 1]


class MeanFieldLayer(keras.layers.Layer):
    """Logits of a batch under one draw of normal weights, and the KL term over N, for TensorFlow Privacy."""

    def __init__(self, num_features: int, num_records: int) -> None:
        super().__init__()
        self.num_records = num_records
        self.loc = self.add_weight("loc", [num_features], initializer="zeros")
        self.raw_scale = self.add_weight(
            "raw_scale", [num_features], initializer=keras.initializers.Constant(-4.0)
        )

    def call(self, x: Any) -> Any:
        scale = tf.math.softplus(self.raw_scale)
        weights = self.loc + scale * tf.random.normal(self.loc.shape)
        kl = tf.reduce_sum(np.log(4.0) - tf.math.log(scale) + (scale**2 + self.loc**2) / 32.0 - 0.5)
        logits = tf.linalg.matvec(x, weights)
        return tf.stack([logits, tf.fill(tf.shape(logits), kl / self.num_records)], axis=1)


def tensorflow_privacy(
    kind: str, x: Any, y: Any, batch_size: int, steps: int, per_call: int
) -> Runner:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorflow_privacy.privacy.keras_models import dp_keras_model
        from tensorflow_privacy.privacy.optimizers import (
            dp_optimizer_keras,
            dp_optimizer_keras_vectorized,
        )

    parts = [keras.Input([x.shape[1]]), MeanFieldLayer(x.shape[1], len(y))]
    kwargs = {"l2_norm_clip": CLIP, "noise_multiplier": NOISE_MULTIPLIER}
    if kind == "DPModel":
        model = dp_keras_model.DPSequential(**kwargs, layers=parts, use_xla=False)
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
    else:
        model = keras.Sequential(parts)
        maker = {
            "vectorized": dp_optimizer_keras_vectorized.VectorizedDPKerasAdamOptimizer,
            "DPKerasAdamOptimizer": dp_optimizer_keras.DPKerasAdamOptimizer,
        }[kind]
        optimizer = maker(**kwargs, num_microbatches=batch_size, learning_rate=LEARNING_RATE)
    model.compile(optimizer, loss=RecordLosses(), steps_per_execution=per_call)
    inputs, outcomes = tf.constant(x), tf.constant(y, tf.float32)

    def batch(_: Any) -> tuple[Any, Any]:
        indices = tf.random.uniform([batch_size], maxval=len(y), dtype=tf.int32)
        return tf.gather(inputs, indices), tf.gather(outcomes, indices)

    run, _ = vae.timed(model, per_call, tf.data.Dataset.range(1).repeat().map(batch).prefetch(4))
    return Runner(lambda wanted: 1e-3 * run(wanted) * max(1, wanted), steps, 3)


def logistic_makers(quick: bool, jax: Peer | None, torch: Peer | None) -> Makers:
    """40,000 records of 100 features, batch 200."""
    num, features, batch_size, steps = (200, 4, 10, 20) if quick else (40_000, 100, 200, 3000)
    per_call = 10 if quick else PER_CALL
    rng = np.random.default_rng(0)
    x = rng.normal(size=[num, features]).astype("float32")
    y = rng.integers(2, size=num).astype("int32")

    def model() -> Any:
        prior = tfd.Sample(tfd.Normal(0.0, 4.0), sample_shape=features)
        return dpvi.DPVI(
            prior,
            lambda weights, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, weights)),
            clipping="flat",
        )

    few, each = (4, 2) if quick else (100, 25)
    makers: Makers = {
        "tfp_dpvi": lambda: private(model, (x, y), batch_size, steps, per_call),
        "tfp_dpvi, secure": lambda: private(
            model, (x, y), batch_size, steps, per_call, randomness="secure"
        ),
        "tfp_dpvi, without XLA": lambda: private(
            model, (x, y), batch_size, steps, per_call, jit_compile=False
        ),
        "Keras, not private": lambda: not_private(x, y, batch_size, steps, per_call, None),
        "Keras, not private, XLA": lambda: not_private(x, y, batch_size, steps, per_call, True),
        "tfp.vi, not private": lambda: by_tfp(x, y, batch_size, steps),
    }
    if HAS_TENSORFLOW_PRIVACY:
        for kind, steps_of, per in (
            ("vectorized", 4 * few, each),
            ("DPModel", 4 * few, each),
            ("DPKerasAdamOptimizer", few // 4, 1),
        ):
            makers[f"TensorFlow Privacy, {kind}"] = functools.partial(
                tensorflow_privacy, kind, x, y, batch_size, steps_of, per
            )
    case = {"num_records": num, "num_features": features, "batch_size": batch_size}
    if jax is not None:
        makers["JAX vmap"] = lambda: Runner(
            lambda n: jax.seconds(n, case="logistic_regression", **case), steps
        )
    if torch is not None:
        makers["Opacus"] = lambda: Runner(
            lambda n: torch.seconds(n, case="logistic_regression", **case), few, 3
        )
    return makers


def mixture_makers(quick: bool, jax: Peer | None) -> Makers:
    """The five-component mixture of `examples/gaussian_mixture.py`, 2,000 x 2, batch 200."""
    module = example("gaussian_mixture")
    num, batch_size, steps, per_call = (100, 10, 20, 10) if quick else (2000, 200, 3000, PER_CALL)
    x, _ = module.simulate(num, 0)
    makers: Makers = {
        "tfp_dpvi": lambda: private(
            lambda: module.make_model(0.03), (x,), batch_size, steps, per_call
        )
    }
    if jax is not None:
        case = {"case": "gaussian_mixture", "num_records": num, "batch_size": batch_size}
        makers["JAX vmap"] = lambda: Runner(lambda n: jax.seconds(n, **case), steps)
    return makers


def hierarchical_makers(quick: bool, jax: Peer | None) -> Makers:
    """The model of `examples/hierarchical_logistic_regression.py`: 5,000 rows, 20 groups, 120 parameters, batch 250."""
    module = example("hierarchical_logistic_regression")
    num, batch_size, steps, per_call = (100, 10, 20, 10) if quick else (5000, 250, 3000, PER_CALL)
    data = module.simulate(num, 0)
    makers: Makers = {
        "tfp_dpvi": lambda: private(
            lambda: module.make_model(data["characteristics"], 0.05),
            data["train"],
            batch_size,
            steps,
            per_call,
        )
    }
    if jax is not None:
        case = {"case": "hierarchical", "num_records": num, "batch_size": batch_size}
        makers["JAX vmap"] = lambda: Runner(lambda n: jax.seconds(n, **case), steps)
    return makers
