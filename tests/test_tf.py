"""TensorFlow and Keras 2 on either stack: what is in force, what is refused, and the private APIs that are used."""

from __future__ import annotations

import contextlib
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.logs import no_fallback

import tfp_dpvi as dpvi
from tfp_dpvi import _tf, keras
from tfp_dpvi.optimizers import as_dp_optimizer

tfd = tfp.distributions
pytestmark = pytest.mark.smoke

IS_CURRENT = keras.__name__.startswith("tf_keras")
CPU = pathlib.Path("/proc/cpuinfo").read_text() if sys.platform == "linux" else ""

#: Ranks, and arguments of `tf.nn.convolution`.
CONVOLUTIONS = [
    pytest.param(1, {"padding": "SAME"}, marks=pytest.mark.slow),
    (2, {"padding": "SAME", "strides": 2}),
    pytest.param(2, {"padding": "VALID", "dilations": 2}, marks=pytest.mark.slow),
    pytest.param(2, {"padding": "SAME", "dilations": 2}, marks=pytest.mark.slow),
    pytest.param(3, {"padding": "VALID"}, marks=pytest.mark.slow),
    pytest.param(3, {"padding": "SAME", "strides": 2}, marks=pytest.mark.slow),
]


def test_keras_is_the_one_that_tfp_uses():
    assert issubclass(tfp.layers.DistributionLambda, keras.layers.Layer)
    assert dpvi.keras is keras
    assert not hasattr(keras, "ops")  # Keras 3 has it.


@pytest.mark.skipif(not IS_CURRENT, reason="TensorFlow 2.15 has no Keras 3")
class TestKeras3:
    """Each object of Keras 3 is refused by name, before anything is spent."""

    @pytest.fixture
    def keras_3(self):
        import keras as keras_3

        assert keras_3.__version__.startswith("3.")
        return keras_3

    def refused(self, *kinds):
        return pytest.raises(
            TypeError,
            match=rf"({'|'.join(kinds)})\(\.\.\.\) is an object of Keras 3(.|\n)*dpvi\.keras",
        )

    @pytest.mark.parametrize("part", ["encoder", "decoder"])
    def test_networks_of_a_vae(self, keras_3, part):
        parts = {
            "encoder": keras.Sequential([keras.layers.Dense(2), tfp.layers.IndependentNormal(1)]),
            "decoder": keras.Sequential([keras.layers.Dense(2), tfp.layers.IndependentNormal(1)]),
        }
        parts[part] = keras_3.Sequential([keras_3.layers.Dense(2)])
        with self.refused("Sequential"):
            dpvi.DPVAE(**parts, prior=tfd.MultivariateNormalDiag(tf.zeros(1)))

    def test_a_layer_inside_a_function(self, keras_3):
        layer = keras_3.layers.Dense(2)
        decoder = keras.Sequential([keras.layers.Dense(2), tfp.layers.IndependentNormal(1)])
        with self.refused("Dense"):
            dpvi.DPVAE(
                lambda x: tfd.MultivariateNormalDiag(layer(x)),
                decoder,
                tfd.MultivariateNormalDiag(tf.zeros(2)),
            )

    @pytest.mark.parametrize(
        "wrap", [lambda layer: layer, lambda layer: [layer], lambda layer: {"a": layer}]
    )
    def test_a_layer_of_a_model(self, keras_3, wrap):
        class Model(dpvi.DPModel):
            def __init__(self):
                super().__init__()
                self.dense = wrap(keras_3.layers.Dense(1))

        with self.refused("Dense"):
            Model()

    def test_optimizers_metrics_and_callbacks(self, keras_3):
        with self.refused("Adam"):
            as_dp_optimizer(keras_3.optimizers.Adam(), l2_norm_clip=1.0)
        model = dpvi.DPVI(
            tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0), clipping="flat"
        )
        optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
        with self.refused("MeanSquaredError"):
            model.compile(optimizer, validation_metrics=[keras_3.metrics.MeanSquaredError()])
        model.compile(optimizer)
        x = np.ones(10, np.float32)
        with self.refused("TerminateOnNaN"):
            model.fit(x, x, batch_size=5, callbacks=[keras_3.callbacks.TerminateOnNaN()])
        assert model.privacy_ledger.num_releases == 0


# ---------------------------------------------------------------------- private APIs: each fails once its reason is gone


def a_model():
    model = keras.Sequential(
        [keras.layers.Dense(2, kernel_regularizer="l2"), keras.layers.Dropout(0.5)]
    )
    model(tf.ones([1, 3]))
    return model


class TestKeras:
    def test_no_hooks_on_calls(self):
        """`calls_seen`: a layer's `call` is replaced for one trace, and as it was afterwards."""
        assert not [
            name
            for name in dir(keras.layers.Layer)
            if "hook" in name and ("call" in name or "forward" in name)
        ]
        layer, seen = keras.layers.Dense(2), []

        def wrap(layer, original):
            return lambda *args, **kwargs: seen.append(layer.name) or original(*args, **kwargs)

        def fails():
            with _tf.calls_seen([layer], wrap):
                layer(tf.ones([1, 3]))
                raise KeyError

        with pytest.raises(KeyError):
            fails()
        layer(tf.ones([1, 3]))
        assert seen == [layer.name]
        assert "call" not in vars(layer)

    def test_no_public_word_in_a_saved_model(self, tmp_path):
        """`refuses_saved_model`: TensorFlow's `save` asks none of the methods by which a Keras model is written."""

        class Own(_tf.Model):
            def call(self, x):
                return x

            def save(self, *args, **kwargs):
                raise KeyError

            export = get_config = get_compile_config = save

        model = Own()
        model(tf.ones([1, 2]))
        tf.saved_model.save(model, str(tmp_path / "model"))

        @_tf.refuses_saved_model
        class Exported(_tf.Model):
            def call(self, x):
                return x

        model = Exported()
        model(tf.ones([1, 2]))
        with pytest.raises(ValueError, match=r"model\.export\(path\)"):
            tf.saved_model.save(model, str(tmp_path / "other"))

    def test_no_public_order_of_layers(self):
        """`layers_within`: `submodules` has layers that Keras does not track, such as those in an untracked attribute."""
        model = a_model()
        object.__setattr__(model, "hidden", keras.layers.Dense(1))
        public = [part for part in model.submodules if isinstance(part, keras.layers.Layer)]
        found = _tf.layers_within(model)
        assert found[0] is model
        assert found[-2:] == model.layers
        assert any(part is model.hidden for part in public)
        assert not any(part is model.hidden for part in found)
        assert _tf.layers_within(model, include_self=False) == found[1:]

    def test_no_public_weights_of_a_layers_own(self):
        """`own_weights`: `trainable_weights` has sublayers' weights too."""
        model = a_model()
        assert len(model.trainable_weights) == 2
        assert _tf.own_weights(model) == []
        assert len(_tf.own_weights(model.layers[0])) == 2
        model.layers[0].trainable = False
        assert _tf.own_weights(model.layers[0]) == []

    def test_no_public_losses_of_inputs_alone(self):
        """`losses_added`, `loss_functions`: `losses` mixes regularizers of weights with what `add_loss` holds."""
        layer = keras.layers.Dense(2, kernel_regularizer="l2", activity_regularizer="l2")

        @tf.function
        def both():
            layer(tf.ones([1, 3]))
            return len(layer.losses), len(_tf.losses_added(layer)), len(_tf.loss_functions(layer))

        assert [int(part) for part in both()] == [2, 1, 1]

    def test_layers_inherit_training(self):
        """`in_mode`: in the modes there are, nested layers too, but for those that are told."""
        drop = keras.layers.Dropout(1.0 - 1e-6)
        nested = keras.Sequential([keras.Sequential([drop])])

        def both():
            return float(nested(tf.ones([1]))[0]), float(drop(tf.ones([1]), training=False)[0])

        assert _tf.in_mode(both, training=True) == (0.0, 1.0)
        assert _tf.in_mode(both, training=False) == (1.0, 1.0)
        with pytest.raises(KeyError) as caught:
            _tf.in_mode(lambda: {}["name"], training=True)
        assert caught.value.args == ("name",)

    def test_a_broadcast_hides_parameters(self):
        d = tfd.Independent(tfd.Normal(tf.zeros([4, 3]), 1.0), 1)
        assert _tf.with_full_parameters(d).distribution.scale.shape == [4, 1]
        assert not hasattr(tfd.BatchBroadcast(tfd.Normal(0.0, 1.0), with_shape=[4]), "scale")

    def test_a_schedule_hides_behind_its_value(self):
        """`learning_rate_variable`: `learning_rate` gives a schedule's present value."""
        schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.5)
        optimizer = keras.optimizers.SGD(schedule)
        optimizer.build([tf.Variable(1.0)])
        assert _tf.learning_rate_variable(optimizer) is schedule
        assert optimizer.learning_rate is not schedule

    def test_no_public_way_to_forget_losses(self):
        """`clear_losses`."""
        assert not hasattr(keras.layers.Layer, "clear_losses")


class TestTensorFlow:
    def test_only_the_extension_knows_of_workers(self):
        """`in_multi_worker_mode`."""
        strategy = tf.distribute.get_strategy()
        assert _tf.in_multi_worker_mode(strategy) is False
        assert not any("multi_worker" in name for name in dir(strategy))

    def test_an_operation_shows_neither_the_names_of_its_arguments_nor_lets_them_change(self):
        """`argument_names`, `replace_inputs`."""

        @tf.function
        def inner(log_rate):
            return tf.exp(log_rate)

        @tf.function
        def outer(x):
            y = inner(x)
            calls = [op for op in x.graph.get_operations() if op.type == "PartitionedCall"]
            assert [_tf.argument_names(op) for op in calls] == [["log_rate"]]
            assert _tf.argument_names(x.op) == []
            _tf.replace_inputs(calls[0], [tf.zeros_like(x)])
            return y

        assert outer(tf.constant(5.0)) == 1.0
        assert not [name for name in dir(tf.Operation) if "update" in name and name[0] != "_"]

    def test_called_functions_are_not_shown(self):
        """`operations_since`: `get_operations` stops at calls, loops and conditionals."""

        @tf.function
        def outer(x):
            return tf.while_loop(
                lambda x: x < 9.0,
                lambda x: tf.cond(x > 3.0, lambda: x + tf.exp(x), lambda: 2.0 * x),
                [x],
            )

        graph = outer.get_concrete_function(tf.TensorSpec([])).graph
        assert "Exp" not in {op.type for op in graph.get_operations()}
        kinds = [op.type for op in _tf.operations_since(graph, 0)]
        assert kinds.count("Exp") == 1
        known = len(graph.get_operations())
        assert not list(_tf.operations_since(graph, known))
        assert not list(_tf.operations_since(None, 0))

    @pytest.mark.parametrize("where", ["at once", "in a function", "in a loop"])
    def test_tensorflows_map_mixes_segments(self, where):
        """`map_apart`: with TensorFlow's own an id that is too large lands in another record's segments, or stops it all."""
        ids = tf.constant([[0, 4, 1], [2, 2, 5], [0, 1, 9]])
        add = lambda ids: tf.math.unsorted_segment_sum(tf.ones([3]), ids, 4)  # noqa: E731
        ways = {
            "at once": add,
            "in a function": tf.function(add, autograph=False),
            "in a loop": lambda ids: tf.while_loop(
                lambda i, _: i < 2,
                lambda i, total: (i + 1, total + add(ids) / 2.0),
                (0, tf.zeros([4])),
            )[1],
        }
        wanted = [[1, 1, 0, 0], [0, 0, 2, 0], [1, 1, 0, 0]]
        np.testing.assert_array_equal(_tf.map_apart(ways[where], ids), wanted)
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            assert (tf.vectorized_map(ways[where], ids).numpy() != wanted).any()

    @pytest.mark.skipif(not IS_CURRENT, reason="the fault is of TensorFlow 2.21")
    @pytest.mark.parametrize("ours", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_tensorflows_map_of_products_reads_other_memory(self, ours):
        """`map_apart`: a product of places and a kernel is right, and TensorFlow's own is wrong or ends the process."""
        if not ours and "avx512f" not in CPU:
            pytest.skip("the fault is of oneDNN with AVX-512")
        code = f"""
import numpy as np, tensorflow as tf
from tfp_dpvi import _tf
x, kernel = (np.random.default_rng(0).normal(size=s).astype("f") for s in ((32, 1, 10, 8), (8, 6)))

def one(x):
    with tf.GradientTape() as tape:
        tape.watch(variable)
        loss = tf.reduce_sum(tf.nn.relu(tf.matmul(x, variable)))
    return tape.gradient(loss, variable)

variable = tf.constant(kernel)
wanted = np.einsum("nitd,nitk->ndk", x, x @ kernel > 0)
for _ in range(20):
    found = tf.function(lambda: {"_tf.map_apart" if ours else "tf.vectorized_map"}(one, tf.constant(x)))()
    assert np.abs(found - wanted).max() < 1e-4
"""
        env = {
            **os.environ,
            "TF_ENABLE_ONEDNN_OPTS": "1",
            "TF_USE_LEGACY_KERAS": "1",
        }  # Without importing Keras 3.
        ended = subprocess.run(
            [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
        )
        assert (ended.returncode == 0) == ours, ended.stderr[-500:]

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            ((10, 8), (1, 8, 6)),
            ((1, 10, 8), (8, 6)),
            ((2, 1, 10, 8), (3, 8, 6)),
            ((2, 4, 8), (2, 8, 6)),
        ],
    )
    def test_mapped_products_are_numpys(self, first, second):
        parts = [np.random.default_rng(1).normal(size=[5, *shape]) for shape in (first, second)]
        for mapped in ([True, True], [True, False], [False, True]):
            each = [
                tf.constant(part) if is_mapped else np.repeat(part[:1], 5, 0)
                for part, is_mapped in zip(parts, mapped, strict=True)
            ]
            x, y = each
            for turned in (False, True):

                def one(number, x=x, y=y, mapped=mapped, turned=turned):
                    x, y = (
                        part[number] if m else tf.constant(part[0])
                        for part, m in zip((x, y), mapped, strict=True)
                    )
                    # The transposed product of transposed factors.
                    return (
                        tf.matmul(tf.linalg.matrix_transpose(x), y, transpose_a=True)
                        if turned
                        else tf.matmul(x, y)
                    )

                found = _tf.map_apart(one, tf.range(5))
                wanted = [np.matmul(x[i], y[i]) for i in range(5)]
                np.testing.assert_allclose(found, wanted, rtol=1e-10)

    @pytest.mark.parametrize("dtype", ["float32", "float64"])
    def test_zeros_around_a_tensor_are_zeros_under_xla(self, dtype):
        """`tf.pad` itself had garbage there in 2 to 20 of 20 calls with float64."""
        around = [[0, 0], [0, 0], [1, 1], [0, 1], [0, 0]]
        value = np.random.default_rng(0).normal(size=[5, 2, 9, 8, 4]).astype(dtype)
        padded = tf.function(lambda x: _tf.pad(x, around), jit_compile=True)
        for _ in range(20):
            np.testing.assert_array_equal(padded(tf.constant(value)), np.pad(value, around))

    @pytest.mark.parametrize("mapped", ["images", "kernels", "both"])
    @pytest.mark.parametrize(("rank", "how"), CONVOLUTIONS)
    def test_mapped_convolutions_are_those_of_each_element(self, rank, how, mapped):
        rng = np.random.default_rng(1)
        images = tf.constant(rng.normal(size=[*[3, 2, 6, 5, 4][: rank + 2], 2]))
        kernels = tf.constant(rng.normal(size=[*[3, 3, 2, 2][: rank + 1], 2, 3]))

        def one(number):
            image, kernel = (
                part[number if mapped in (name, "both") else 0]
                for name, part in (("images", images), ("kernels", kernels))
            )
            with tf.GradientTape() as tape:
                tape.watch((image, kernel))
                result = tf.nn.convolution(image, kernel, **how)
                loss = tf.reduce_sum(tf.sin(result))
            return [result, *tape.gradient(loss, (image, kernel))]

        alone = tf.function(lambda: [one(number) for number in range(3)], autograph=False)()
        for compiled in (False, True):
            whole = tf.function(lambda: _tf.map_apart(one, tf.range(3)), autograph=False)
            whole = tf.function(whole, jit_compile=True, autograph=False) if compiled else whole
            with no_fallback():
                found = whole()
            for part, wanted in zip(found, zip(*alone, strict=True), strict=True):
                np.testing.assert_allclose(part, tf.stack(wanted), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("how", ["NHWC", "NCHW"])
    def test_mapped_convolutions_of_groups_are_those_of_slices(self, how):
        """Channels first, which TensorFlow does not have on CPUs, and groups, whose loop failed there."""
        rng = np.random.default_rng(1)
        images, kernels = rng.normal(size=[3, 2, 6, 5, 4]), rng.normal(size=[3, 3, 2, 2, 6])

        def by_slices(image, kernel):
            pairs = zip(tf.split(image, 2, axis=-1), tf.split(kernel, 2, axis=-1), strict=True)
            return tf.concat([tf.nn.conv2d(*pair, 2, "SAME") for pair in pairs], axis=-1)

        def at_once(image, kernel):
            if how == "NHWC":
                return tf.nn.conv2d(image, kernel, 2, "SAME")
            image = tf.transpose(image, [0, 3, 1, 2])
            result = tf.nn.conv2d(image, kernel, 2, "SAME", data_format=how)
            return tf.transpose(result, [0, 2, 3, 1])

        def gradients(function, image, kernel):
            with tf.GradientTape() as tape:
                tape.watch((image, kernel))
                result = function(image, kernel)
                loss = tf.reduce_sum(tf.sin(result))
            return [result, *tape.gradient(loss, (image, kernel))]

        pairs = tuple(map(tf.constant, (images, kernels)))
        with no_fallback():
            found = _tf.map_apart(lambda pair: gradients(at_once, *pair), pairs)
        wanted = [gradients(by_slices, *pair) for pair in zip(*pairs, strict=True)]
        for part, each in zip(found, zip(*wanted, strict=True), strict=True):
            np.testing.assert_allclose(part, tf.stack(each), rtol=1e-9, atol=1e-12)

    @pytest.mark.skipif(not IS_CURRENT, reason="the loop is that of TensorFlow 2.21")
    def test_tensorflows_map_of_convolutions_is_a_loop(self):
        """`map_apart`: TensorFlow's own says that it is one."""
        kernel = tf.ones([1, 1, 1, 1])

        def one(image):
            with tf.GradientTape() as tape:
                tape.watch(kernel)
                loss = tf.reduce_sum(tf.nn.conv2d(image, kernel, 1, "SAME"))
            return tape.gradient(loss, kernel)

        with pytest.raises(AssertionError, match="while_loop"), no_fallback():
            tf.vectorized_map(one, tf.ones([2, 1, 3, 3, 1]))

    def test_the_map_leaves_nothing_behind(self):
        """Nothing process-wide is changed, within `map_apart` or after it."""
        from tensorflow.python.ops.parallel_for import pfor

        before = dict(pfor._pfor_converter_registry)

        def one(ids):
            assert pfor._pfor_converter_registry == before
            return tf.math.unsorted_segment_sum(tf.ones([3]), ids, 4)

        _tf.map_apart(one, tf.zeros([2, 3], tf.int32))
        assert pfor._pfor_converter_registry == before


@pytest.mark.parametrize("compiled", [tf.function, _tf.function_of_model])
def test_a_closure_made_anew_for_each_model_is_not_warned_of(compiled, caplog):
    """`function_of_model` is needed as long as TensorFlow counts the traces of all of them together."""
    with caplog.at_level("WARNING", logger="tensorflow"):
        for number in range(7):
            compiled(lambda x, number=number: x + number)(tf.constant(1))
    assert ("retracing" in caplog.text) == (compiled is tf.function)
