"""Keys and noise (C10): fresh by default, repeatable with a seed, never stored."""

import os
import re

import numpy as np
import pytest
from support import statistics
from support.cases import normal
from support.steps import Indicator, fit_indicator

import tfp_dpvi as dpvi
from tfp_dpvi import _random, keras
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.gradients import Clip, ClippedSum
from tfp_dpvi.optimizers import DPKerasAdamOptimizer, privatize
from tfp_dpvi.sampling import PoissonSampler

tfd = tfp.distributions
WIDTH = 512
ZEROS = np.zeros((20, WIDTH), "float32")


def _noise(model, steps=4):
    """Releases of records that contribute zero: noise alone."""
    return fit_indicator(model, ZEROS, batch_size=5, steps=steps)


def _unrelated(a, b, what):
    assert not np.any(a == b) or np.mean(a == b) < 0.01, f"{what}: equal entries"
    statistics.uncorrelated(a, b, what)


def test_two_fits_draw_different_noise():
    """C10: of one model, and of two. False alarms: 5e-9 (5 p-values)."""
    model = Indicator(WIDTH)
    first, second, other = _noise(model), _noise(model), _noise(Indicator(WIDTH))
    _unrelated(first, second, "two fits of a model")
    _unrelated(first, other, "two models")
    for step in range(3):
        _unrelated(first[step], first[step + 1], "steps of a fit")


def test_global_seeds_change_nothing():
    """C10: noise after tf.random.set_seed (and Keras's, NumPy's and Python's) is as fresh as ever. False alarms: 3e-9."""
    drawn = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        tf.random.set_seed(7)
        drawn.append(_noise(Indicator(WIDTH)))
    _unrelated(*drawn, "fits after the same global seed")
    model = Indicator(WIDTH)
    for _ in range(2):
        tf.random.set_seed(7)
        drawn.append(_noise(model))
    _unrelated(drawn[2], drawn[3], "fits of a model after the same global seed")
    _unrelated(drawn[0], drawn[2], "fits after the same global seed")


def _regression(seed):
    prior = tfd.JointDistributionNamed({"w": normal(2, 1.0, np.float32)})
    return dpvi.DPVI(
        prior,
        lambda params, x: tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0),
        seed=seed,
        clipping="flat",
    )


X = np.random.default_rng(0).normal(size=(60, 2)).astype("float32")


def _fitted(seed, steps_per_execution):
    model = Indicator(2, seed=seed)
    model.compile(
        DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0),
        steps_per_execution=steps_per_execution,
    )
    model.fit(X, batch_size=6, epochs=5, verbose=0)
    return model.v.numpy()


def test_a_seed_repeats_a_run():
    """C10: to rounding, whatever the number of steps in one call; another seed, or none, gives another run."""
    first = _fitted(3, 1)
    for steps_per_execution in (1, 50, 7):
        np.testing.assert_allclose(_fitted(3, steps_per_execution), first, rtol=1e-5)
    assert np.all(_fitted(4, 50) != first)
    assert np.all(_fitted(None, 50) != first)


def test_a_seed_does_not_repeat_noise_within_a_model():
    """C10: a second seeded fit goes on where the first ended; a model of the same seed repeats both. False alarms: 2e-9."""
    model, again = Indicator(WIDTH, seed=3), Indicator(WIDTH, seed=3)
    first, second = _noise(model), _noise(model)
    _unrelated(first, second, "two seeded fits")
    _unrelated(first[1:], second[:-1], "two seeded fits, a step apart")
    both = _noise(again, steps=8)
    np.testing.assert_allclose(both, np.concatenate([first, second]), atol=1e-5)


def test_a_seeded_run_is_reported_as_not_private():
    """C10: the report says so."""
    model = Indicator(8, seed=3)
    fit_indicator(model, np.zeros((20, 8), "float32"), batch_size=5, steps=2)
    assert "seeded: not private" in str(model.privacy_report(delta=1e-5))


# ---------------------------------------------------------------------- keys


@pytest.mark.parametrize("jit_compile", [False, True])
def test_every_bit_of_a_key_counts(jit_compile):
    """C10: noise, samples and new keys follow from all 128 bits, also where XLA compiles."""
    sampler = PoissonSampler(200, 0.3, 200)

    def use(key):
        noise = privatize(
            ClippedSum([tf.zeros([4])], Clip(1.0)),
            noise_multiplier=1.0,
            key=key,
            expected_batch_size=1.0,
        ).tensors[0]
        taken = sampler.for_each_batch(
            key,
            lambda carry, indices, mask: carry + tf.cast(mask, tf.int64) * indices,
            tf.zeros(200, tf.int64),
        )
        return noise, taken, tf.stack(_random.split(key, 2))

    def flipped(bits):
        return tf.map_fn(
            lambda bit: use(tf.bitwise.bitwise_xor(root, bit)),
            bits,
            fn_output_signature=(tf.float32, tf.int64, tf.int64),
        )

    root = tf.constant(_random.new_key())
    one_bit = [np.array([1 << i, 0], np.uint64) for i in range(64)] + [
        np.array([0, 1 << i], np.uint64) for i in range(64)
    ]
    bits = np.stack([np.zeros(2, np.uint64), *one_bit]).astype(np.int64)
    for outcomes in tf.function(flipped, jit_compile=jit_compile, autograph=False)(
        tf.constant(bits)
    ):
        rows = outcomes.numpy().reshape(129, -1)
        assert len(np.unique(rows, axis=0)) == 129, "two keys that differ by one bit give the same"


def test_keys_come_from_the_operating_system(monkeypatch):
    """C10: 16 bytes of os.urandom by default."""
    asked = []

    def urandom(num):
        asked.append(num)
        return bytes(range(num))

    monkeypatch.setattr(_random, "os", os)  # Not the stream of `conftest.py`.
    monkeypatch.setattr(os, "urandom", urandom)
    assert _random.new_key().tobytes() == bytes(range(16))
    assert asked == [16]
    assert (
        _random.new_key(5).tobytes() == _random.new_key(5).tobytes() != _random.new_key(6).tobytes()
    )


def test_steps_families_and_splits_have_distinct_keys():
    """C10: no two of the first 2000 steps' keys coincide, in a step or between steps."""
    root = tf.constant(_random.new_key())
    keys = tf.function(
        lambda: tf.map_fn(
            lambda step: tf.stack(_random.split(_random.fold_in(root, step), 3)),
            tf.range(2000, dtype=tf.int64),
            fn_output_signature=tf.int64,
        )
    )()
    assert len(np.unique(keys.numpy().reshape(-1, 2), axis=0)) == 6000


def test_no_file_holds_a_key(tmp_path, monkeypatch):
    """C10: neither weights, checkpoints nor a SavedModel of the posterior hold the root key, or any generator's state."""
    made = []
    genuine = _random.new_key

    def spied(seed=None):
        made.append(genuine(seed))
        return made[-1]

    monkeypatch.setattr(_random, "new_key", spied)
    model = Indicator(2)
    model.compile(DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0), delta=1e-5)
    board = dpvi.callbacks.PrivacyTensorBoard(tmp_path / "log")
    model.fit(X, batch_size=6, epochs=2, verbose=0, callbacks=[board])
    assert made
    model.save_weights(tmp_path / "weights.h5")
    model.save_weights(tmp_path / "weights")
    tf.train.Checkpoint(model=model).save(str(tmp_path / "checkpoint"))
    posterior = _regression(None)
    posterior.compile(DPKerasAdamOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0), delta=1e-5)
    posterior.fit(X, X[:, 0], batch_size=6, epochs=1, verbose=0)
    posterior.save_weights(tmp_path / "posterior.h5")
    holder = tf.Module()
    holder.variables_of_models = (
        model.variables + posterior.variables + posterior.trainable_variables
    )
    tf.saved_model.save(holder, str(tmp_path / "saved"))
    assert len(made) >= 3, "keys of the fits have been seen"
    for prefix in ("weights", "checkpoint-1", "saved/variables/variables"):
        for name, shape in tf.train.list_variables(str(tmp_path / prefix)):
            assert not re.search(r"key|seed|rng|generator|random", name.lower()), name
            if shape == [2] and "OBJECT" not in name:
                value = tf.train.load_variable(str(tmp_path / prefix), name)
                assert not any(np.array_equal(value, key) for key in made)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 8
    halves = {half.tobytes() for key in made for half in key}
    text = {str(half).encode() for key in made for half in key}
    for path in files:
        data = path.read_bytes()
        assert not any(part in data or part[::-1] in data for part in halves), path.name
        assert not any(part in data for part in text), path.name
    integers = [
        v.name
        for m in (model, posterior)
        for v in m.variables + m.optimizer.variables
        if v.dtype.is_integer
    ]
    assert all(re.search(r"iter", name) for name in integers), integers


@pytest.mark.parametrize("name", ["posterior.h5", "posterior"])
def test_a_posterior_survives_its_weight_file(tmp_path, name):
    """C10's other half: a weight file without keys still holds the posterior."""
    model, other = _regression(None), _regression(None)
    for variable in model.trainable_variables:
        variable.assign(variable + 0.5)
    model.save_weights(tmp_path / name)
    other.load_weights(tmp_path / name)
    for ours, theirs in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_array_equal(ours, theirs)
