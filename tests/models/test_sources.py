"""Records that are read from where they are stored: the same batches as from memory, and clear errors (C4, C6)."""

from __future__ import annotations

import h5py
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.siblings import slow
from support.toy import adam, records, toy, weights

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.data import RecordSource
from tfp_dpvi.data.records import by_column

tfd = tfp.distributions
N, D = 300, 3
X, Y = records(N, D)


class Rows:
    """A source that is no array; remembers what it was asked for."""

    def __init__(self, array, length=None, fail_after=None):
        self.array, self.length, self.fail_after = array, length or len(array), fail_after
        self.asked = []

    def __len__(self):
        return self.length

    def __getitem__(self, indices):
        self.asked.append(np.array(indices))
        if self.fail_after is not None and len(self.asked) > self.fail_after:
            raise OSError("the disk is gone")
        return self.array[indices]


class Lazy(Rows):
    """An array of another library, which NumPy can read whole: as those of h5py, zarr or dask."""

    whole = 0

    @property
    def shape(self):
        return self.array.shape

    @property
    def dtype(self):
        return self.array.dtype

    @property
    def nbytes(self):
        return self.array.nbytes

    def __array__(self, dtype=None, copy=None):
        self.whole += 1
        return np.array(self.array, dtype)


def memmap(tmp_path, array, name="x"):
    mapped = np.memmap(tmp_path / name, dtype=array.dtype, mode="w+", shape=array.shape)
    mapped[:] = array
    mapped.flush()
    return np.memmap(tmp_path / name, dtype=array.dtype, mode="r", shape=array.shape)


def model(seed=3, **kwargs):
    return toy(1.0, seed=seed, **kwargs)


SLOWLY = [
    ("poisson", True, 7),
    ("fixed_size", True, 7),
    ("poisson", True, None),
    ("fixed_size", True, None),
    ("fixed_size", False, None),
    ("poisson", False, 7),
]


@pytest.mark.parametrize(
    ("sampling", "jit_compile", "physical"),
    [("poisson", False, None)] + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOWLY],
)
def test_streamed_equals_resident_in_seeded_mode(tmp_path, jit_compile, sampling, physical):
    """Step for step the same batches in the same order, so the same sums to rounding."""
    relation = dpvi.privacy.NeighboringRelation.REPLACE_ONE if sampling == "fixed_size" else None
    more = {} if relation is None else {"neighboring_relation": relation, "accountant": "rdp"}
    common = {
        "batch_size": 20,
        "epochs": 1,
        "steps_per_epoch": 12,
        "sampling": sampling,
        "verbose": 0,
    }
    ends = []
    for x in (X, memmap(tmp_path, X), Rows(X)):
        made = model(
            jit_compile=jit_compile, physical_batch_size=physical, steps_per_execution=4, **more
        )
        made.fit(x, Y, stream=None if x is X else True, **common)
        ends.append(weights(made))
        assert made.privacy_ledger.num_releases == 12
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ends[2], ends[1])


def test_streamed_equals_resident_where_a_step_is_eager():
    """Its draws are then made without XLA, and so are the host's."""
    ends = []
    for stream in (None, True):
        made = model(run_eagerly=True, steps_per_execution=4)
        made.fit(X, Y, stream=stream, batch_size=20, epochs=1, steps_per_epoch=4, verbose=0)
        ends.append(weights(made))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_vae_of_a_source_equals_one_of_arrays():
    """Integer records, and a model that takes a batch at once."""
    data = np.random.default_rng(1).integers(0, 256, [80, 6]).astype("uint8")
    layers = keras.layers
    ends = []
    for x in (data, Rows(data)):
        keras.utils.set_random_seed(0)
        encoder = keras.Sequential(
            [
                layers.Input([6], dtype="uint8"),
                layers.Rescaling(1 / 255.0),
                layers.Dense(4),
                tfp.layers.DistributionLambda(
                    lambda t: tfd.Independent(tfd.Normal(t[..., :2], tf.exp(t[..., 2:])), 1)
                ),
            ]
        )
        decoder = keras.Sequential(
            [
                layers.Input([2]),
                layers.Dense(6),
                tfp.layers.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, 100.0), 1)),
            ]
        )
        made = dpvi.DPVAE(
            encoder, decoder, tfd.Independent(tfd.Normal(tf.zeros(2), 1.0), 1), seed=5
        )
        made.compile(adam(1.0), delta=1e-5, jit_compile=False)
        made.fit(x, batch_size=10, epochs=1, verbose=0)
        ends.append(weights(made))
    np.testing.assert_allclose(ends[1], ends[0], rtol=1e-4, atol=1e-6)


def test_only_drawn_rows_are_read_and_no_step_is_traced_anew():
    source = Rows(X)
    made = model(seed=None, jit_compile=False)
    made.fit(source, Y, batch_size=20, epochs=3, steps_per_epoch=20, verbose=0)
    sizes = [len(indices) for indices in source.asked[1:]]  # The first asks for a row's shape.
    assert len(sizes) == 60
    assert len(set(sizes)) > 5
    assert (
        60 * 20 - 7 * (60 * 20) ** 0.5 < sum(sizes) < 60 * 20 + 7 * (60 * 20) ** 0.5
    )  # p < 1e-11.
    assert all(np.all(np.diff(indices) > 0) for indices in source.asked[1:])
    (loop,) = internals.traced_steps(made)
    assert loop.experimental_get_tracing_count() == 1


def test_the_plan_is_that_of_arrays():
    plans = []
    for x in (X, Rows(X)):
        made = model()
        made.fit(x, Y, batch_size=20, epochs=1, num_records=310, verbose=0)
        plans.append(made.privacy_plan)
    assert plans[0] == plans[1]


def test_large_memory_maps_are_streamed_and_small_ones_loaded(tmp_path, monkeypatch):
    mapped = memmap(tmp_path, X)
    assert not internals.wants_stream(mapped, Y, None)
    monkeypatch.setattr(*internals.RESIDENT_BYTES, 1000)
    assert internals.wants_stream(mapped, Y, None)
    assert not internals.wants_stream(mapped, Y, False)
    assert internals.wants_stream({"a": Rows(X)}, None, None)


def test_a_lazy_array_is_streamed_and_never_read_whole():
    options = {"batch_size": 20, "steps_per_epoch": 3, "verbose": 0}
    resident, streamed = model(), model()
    resident.fit(X, Y, **options)
    x, y = Lazy(X), Lazy(Y)
    streamed.fit(x, y, stream=True, **options)
    assert (x.whole, y.whole) == (0, 0)
    assert len(x.asked) == 4
    np.testing.assert_allclose(weights(streamed), weights(resident), rtol=1e-5, atol=1e-6)


def test_an_array_that_does_not_say_its_shape_is_not_read_whole_either():
    class Shapeless(Rows):
        def __array__(self, dtype=None, copy=None):
            raise AssertionError("read whole")

    x = Shapeless(X)
    assert internals.is_lazy(x)
    for stream in (None, True):
        data = model().make_data(x, Y, batch_size=20, stream=stream)
        assert data.records.x.shape == (1, D)
    assert len(x.asked) == 2


@pytest.mark.parametrize(
    ("stream", "limit", "whole"), [(None, 1000, 0), (None, 2**31, 1), (False, 1000, 1)]
)
def test_a_large_lazy_array_is_streamed_by_default(stream, limit, whole, monkeypatch):
    """As a memory map is; a smaller one is read once and then is an array."""
    monkeypatch.setattr(*internals.RESIDENT_BYTES, limit)
    x = Lazy(X)
    model().make_data(x, Y, batch_size=20, stream=stream)
    assert x.whole == whole
    assert len(x.asked) == 1 - whole


def test_an_hdf5_dataset_is_streamed(tmp_path, monkeypatch):
    """It takes only increasing indices, so that batches of a fixed size are read in that order."""

    def read_whole(*args, **kwargs):
        raise AssertionError("the dataset was read whole")

    with h5py.File(tmp_path / "records.h5", "w") as file:
        data = file.create_dataset("x", data=X)
        monkeypatch.setattr(h5py.Dataset, "__array__", read_whole)
        made = model(
            neighboring_relation=dpvi.privacy.NeighboringRelation.REPLACE_ONE, accountant="rdp"
        )
        made.fit(
            data, Y, batch_size=20, steps_per_epoch=3, sampling="fixed_size", stream=True, verbose=0
        )
    assert made.privacy_ledger.num_releases == 3


@pytest.fixture(scope="module")
def linear():
    """A model that was fitted to arrays."""
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), D)
    made = dpvi.DPVI(
        prior, lambda w, x: tfd.Normal(tf.linalg.matvec(x, w), 1.0), seed=1, clipping="flat"
    )
    made.compile(adam(1.0), delta=1e-5, jit_compile=False)
    made.fit(X, Y.astype("float32"), batch_size=50, verbose=0)
    return made


@pytest.mark.parametrize("kind", ["source", "lazy", "memmap"])
def test_what_is_too_large_is_predicted_and_evaluated_by_batches(
    kind, linear, tmp_path, monkeypatch
):
    """With what `fit` streams by default; Keras would read a memory map whole."""
    make = {"source": Rows, "lazy": Lazy, "memmap": lambda rows: memmap(tmp_path, rows)}[kind]
    made, y = linear, Y.astype("float32")
    options = {"sample_weight": np.linspace(0.0, 2.0, N), "verbose": 0}
    predicted, evaluated = made.predict(X), made.evaluate(X, y, **options)

    monkeypatch.setattr(*internals.RESIDENT_BYTES, 1000)
    read = []
    take = RecordSource.take
    monkeypatch.setattr(
        RecordSource,
        "take",
        lambda self, indices, rows: read.append(rows) or take(self, indices, rows),
    )
    x = make(X)
    np.testing.assert_allclose(made.predict(x, 64), predicted, rtol=1e-5)
    assert made.evaluate(x, y, 64, **options) == pytest.approx(evaluated, rel=1e-5)
    assert max(read) == 64
    assert sum(read) >= 2 * N
    assert getattr(x, "whole", 0) == 0
    with pytest.raises(ValueError, match=r"x has shape \[1\], but the model was fitted"):
        made.predict(Rows(X[:, 0]))


def test_columns_of_sources_are_predicted_and_evaluated_by_batches():
    layers = [keras.layers.Lambda(lambda x: x["a"]), keras.layers.Dense(1)]
    made = dpvi.DPKerasModel(keras.Sequential(layers))
    made.compile(adam(1.0), loss="mean_squared_error", delta=1e-5, jit_compile=False)
    y, x = Y.astype("float32"), {"a": Rows(X)}
    np.testing.assert_allclose(made.predict(x, 64), made.predict({"a": X}), rtol=1e-5)
    evaluated = made.evaluate({"a": X}, y, verbose=0)
    assert made.evaluate(x, y, 64, verbose=0) == pytest.approx(evaluated, rel=1e-5)


def test_an_hdf5_group_is_a_dict_of_its_datasets(tmp_path):
    """Its length is the number of datasets, which are no records."""
    with h5py.File(tmp_path / "records.h5", "w") as file:
        file.create_dataset("columns/a", data=Y)
        file.create_dataset("b", data=Y)
        found = by_column("x", file)
        assert isinstance(found["b"], h5py.Dataset)
        assert len(found["columns"]["a"]) == N


@pytest.mark.parametrize("kind", ["series", "tensor", "variable", "scalar"])
def test_what_holds_its_values_in_memory_is_no_lazy_array(kind):
    """A pandas column is indexed by labels, not by rows; tensors are in memory."""
    values = {
        "series": pytest.importorskip("pandas").Series(Y, index=np.arange(N)[::-1]),
        "tensor": tf.constant(Y),
        "variable": tf.Variable(Y),
        "scalar": np.float32(1.0),
    }
    assert not internals.is_lazy(values[kind])


@pytest.mark.parametrize(
    ("x", "y", "options", "words"),
    [
        (Rows(X), Y[:-1], {}, ["Lengths differ", "299"]),
        (Rows(X[:0], length=0), None, {}, ["no records"]),
        (Rows(X), Y, {"stream": False}, ["stream=False"]),
        (Rows(X), Y, {"batch_size": N}, ["batch_size", "arrays"]),
        (Rows(np.array([["a"]] * N)), Y, {}, ["floats, integers or bools"]),
    ],
)
def test_bad_sources_are_refused_before_anything_is_spent(x, y, options, words):
    made = model()
    with pytest.raises(ValueError, match=words[0]) as caught:
        made.fit(x, y, **{"batch_size": 20, "verbose": 0, **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert made.privacy_ledger.num_releases == 0


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (lambda: Rows(X, fail_after=6), ["could not be read", "OSError"]),
        slow(lambda: Rows(X, length=N + 300), ["could not be read", "IndexError"]),
        (lambda: Short(X), ["has 300 rows"]),
    ],
)
def test_a_source_that_fails_stops_the_fit_and_the_ledger_holds_what_ran(source, words):
    made = model(seed=None, steps_per_execution=4)
    x = source()
    before = weights(made) if made.trainable_variables else None
    with pytest.raises(RuntimeError) as caught:
        made.fit(
            x, np.zeros(len(x), "int32"), batch_size=30, epochs=1, steps_per_epoch=40, verbose=0
        )
    assert all(word in str(caught.value) for word in words), str(caught.value)
    charged = made.privacy_ledger.num_releases
    assert charged % 4 == 0
    assert charged >= int(made.optimizer.iterations.numpy())
    assert charged - int(made.optimizer.iterations.numpy()) <= 4
    assert before is None or np.isfinite(weights(made)).all()
    made.fit(X, Y, batch_size=20, epochs=1, verbose=0)  # Usable still.


class Short(Rows):
    """Silently gives fewer rows than asked for."""

    def __getitem__(self, indices):
        return super().__getitem__(indices[: max(1, len(indices) - 1)])


def test_what_is_made_of_a_memory_map_is_in_memory(tmp_path):
    """`astype` and `copy` keep NumPy's class of memory maps, without a map."""
    mapped = memmap(tmp_path, X.astype("float64"))
    for x in (mapped.astype("float32"), mapped.copy()):
        made = model()
        made.fit(
            x,
            Y.tolist(),
            batch_size=20,
            steps_per_epoch=3,
            stream=True,
            verbose=0,
            sample_weight=np.ones(N, int),
        )
        assert made.privacy_ledger.num_releases == 3
    with pytest.raises(ValueError, match="sample_weight"):
        model().fit(mapped, Y, stream=True, sample_weight=np.ones([N, 1]), verbose=0)
    refused = model()
    with pytest.raises(ValueError, match="negative entries in 1 row"):
        refused.fit(mapped, Y, stream=True, sample_weight=np.eye(1, N)[0] * -1.0, verbose=0)
    assert refused.privacy_ledger.num_releases == 0


def test_sources_are_asked_in_increasing_order():
    """As h5py needs it, also for batches of a fixed size."""
    rows = Rows(X)
    made = model(
        neighboring_relation=dpvi.privacy.NeighboringRelation.REPLACE_ONE, accountant="rdp"
    )
    made.fit(rows, Y, batch_size=20, steps_per_epoch=5, sampling="fixed_size", verbose=0)
    assert all((np.diff(asked) > 0).all() for asked in rows.asked)


@pytest.mark.slow
def test_what_xla_refuses_is_tried_once():
    traced = []

    def likelihood(w, x):
        traced.append(1)
        zero = tf.strings.to_number(tf.strings.as_string(tf.stop_gradient(0.0 * w[0])))
        return tfd.Bernoulli(logits=tf.linalg.matvec(x, w) + zero)

    made = dpvi.DPVI(tfd.Sample(tfd.Normal(0.0, 1.0), D), likelihood, clipping="flat")
    made.compile(
        dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0), delta=1e-5
    )

    class Stop(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            self.model.stop_training = True

    made.fit(
        Rows(X), Y, batch_size=20, epochs=100, steps_per_epoch=10, verbose=0, callbacks=[Stop()]
    )
    assert len(traced) <= 4
