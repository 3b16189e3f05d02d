"""Persons with several rows in networks: gradients of layers are summed by person before the clip."""

import numpy as np
import pytest
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi import audit
from tfp_dpvi._tf import tf, tfp

layers = dpvi.keras.layers
tfd = tfp.distributions
CLIP = 0.3
PERSONS = {"max_rows_per_unit": 3, "rows_beyond": "first"}


def persons(num=9, most=5):
    """Identifiers in no order; some persons have more rows than are used."""
    rng = np.random.default_rng(1)
    return rng.permutation(np.repeat(np.arange(num) + 7, rng.integers(1, most + 1, num)))


NETWORKS = {
    "dense": lambda: [layers.Dense(4, "tanh"), layers.Dense(1)],
    "embedding": lambda: [layers.Embedding(500, 3, input_length=5), layers.Flatten(), layers.Dense(1)],
    "small embedding": lambda: [layers.Embedding(4, 3, input_length=5), layers.Flatten(), layers.Dense(1)],
    "recurrent": lambda: [layers.Embedding(500, 3, input_length=5), layers.GRU(3), layers.Dense(1)],
    "convolution": lambda: [
        layers.Reshape([5, 1]), layers.Conv1D(3, 2), layers.Flatten(), layers.Dense(1)
    ],
}  # fmt: skip


def inputs(kind, num):
    rng = np.random.default_rng(2)
    if "embedding" in kind or kind == "recurrent":
        return rng.integers(0, 4, [num, 5])
    return rng.normal(size=[num, 5]).astype("float32")


def compiled(kind, gradients="auto"):
    dpvi.keras.utils.set_random_seed(3)
    model = dpvi.DPKerasModel(dpvi.keras.Sequential(NETWORKS[kind]()), gradients=gradients)
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=CLIP)
    model.compile(optimizer, loss="mse", epsilon=1.0, delta=1e-5)
    return model


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        ("dense", "ghost"),
        ("dense", "vectorized"),
        ("embedding", "ghost"),
        slow("small embedding", "ghost"),
        slow("recurrent", "auto"),
        slow("convolution", "ghost"),
    ],
)
def test_a_persons_gradients_are_summed_before_the_clip(kind, gradients):
    """Against one person at a time by TensorFlow, and the replay; norms of rows alone would differ."""
    ids = persons()
    x = inputs(kind, len(ids))
    y = np.random.default_rng(4).normal(size=len(ids)).astype("float32")
    model = compiled(kind, gradients)
    step = audit.observed.ObservedStep(model, x, y, num_steps=None, unit_ids=ids, **PERSONS)
    found = step.all_values(np.array([1, 2]), 1, noise=0.0)[0]
    expected = 0.0
    for each in np.unique(ids):
        own = np.flatnonzero(ids == each)[:3]
        with tf.GradientTape() as tape:
            output = model.network(x[own])[:, 0]
            loss = tf.reduce_sum(tf.square(output - y[own]))
        gradient = tape.gradient(loss, model.trainable_variables)
        flat = np.concatenate([np.ravel(tf.convert_to_tensor(part)) for part in gradient])
        expected = expected + flat * min(1.0, CLIP / np.linalg.norm(flat))
    np.testing.assert_allclose(found, expected / CLIP, rtol=1e-3, atol=1e-4)
    result = audit.replay(model, x, y, num_steps=1, unit_ids=ids, **PERSONS)
    assert result.holds, result
    assert result.attained > 0.9


def test_a_person_who_leaves_changes_nobody_else():
    """Arrays are made anew without the longest person; `audit.replay` masks it in the same arrays.

    Two rows of each other person nearly cancel, so that their norms are mostly allowance for
    rounding: with as many places as the longest person has rows, the sum moved by 194 clips.
    """
    ids = np.repeat(np.arange(200), 2)
    row = np.random.default_rng(0).normal(size=64).astype("float32")
    y = np.tile(np.float32([10.0, -9.998]), 200)
    sums = []
    for more in (0, 5):
        model = dpvi.DPKerasModel(
            dpvi.keras.Sequential([layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
        )
        optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1e-3)
        model.compile(optimizer, loss="mse", epsilon=1.0, delta=1e-5)
        step = audit.observed.ObservedStep(
            model,
            np.tile(row, [400 + more, 1]),
            np.concatenate([y, np.ones(more, "float32")]),
            num_steps=None,
            unit_ids=np.concatenate([ids, np.full(more, 200)]),
            max_rows_per_unit=5,
            num_records=200,
            batch_size=200,
        )
        sums.append(step.all_values(np.array([1, 2]), 1, noise=0.0)[0])
    moved = np.linalg.norm(sums[1] - sums[0])
    assert 0.9 < moved <= 1.0 + 1e-4


def autoencoder(**settings):
    def normal(size):
        return dpvi.keras.Sequential([
            layers.Dense(2 * size),
            tfp.layers.DistributionLambda(
                lambda t: tfd.MultivariateNormalDiag(t[:, :size], tf.nn.softplus(t[:, size:]) + 0.1)
            ),
        ])  # fmt: skip

    prior = tfd.MultivariateNormalDiag(tf.zeros([2]))
    return dpvi.DPVAE(normal(2), normal(5), prior=prior, **settings)


def test_an_autoencoder_of_persons():
    """All rows of a person within one clip, also with a row that is not finite; and the report says so."""
    ids = persons()
    x = inputs("dense", len(ids))
    model = autoencoder()
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=CLIP)
    model.compile(optimizer, epsilon=1.0, delta=1e-5)
    result = audit.replay(model, x, num_steps=1, unit_ids=ids, **PERSONS)
    assert result.holds, result
    assert result.attained > 0.9
    model.fit(x, unit_ids=ids, verbose=0, **PERSONS)
    assert model.privacy_report().num_records == 9
    assert "one person, with all rows" in " ".join(str(model.privacy_report()).split())


def test_groups_of_rows_are_refused():
    model = autoencoder(batch_regularizer=dpvi.divergences.MMD())
    optimizer = dpvi.optimizers.TermwiseDPKerasSGDOptimizer(
        l2_norm_clip=1.0, batch_l2_norm_clip=1.0, num_partitions=2
    )
    model.compile(optimizer, epsilon=1.0, delta=1e-5)
    ids = persons()
    with pytest.raises(ValueError, match="leave out batch_regularizer"):
        model.fit(inputs("dense", len(ids)), unit_ids=ids, verbose=0, **PERSONS)
    assert model.num_releases == 0
