"""Keras 2 on either stack: what is in force, what is refused, and environments that cannot work."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi
from tfp_dpvi import _tf, keras
from tfp_dpvi.optimizers import as_dp_optimizer

tfd = tfp.distributions
pytestmark = pytest.mark.smoke

IS_CURRENT = keras.__name__.startswith("tf_keras")


def test_keras_is_the_one_that_tfp_uses():
    assert issubclass(tfp.layers.DistributionLambda, keras.layers.Layer)
    assert dpvi.keras is keras
    assert not hasattr(keras, "ops")  # Keras 3 has it.


def test_the_environment_variable_is_left_alone():
    code = "import os, tfp_dpvi; tfp_dpvi.keras; print(os.environ.get('TF_USE_LEGACY_KERAS'))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "None"


@pytest.mark.parametrize(
    ("tensorflow", "numpy", "named"),
    [
        ("2.14.1", "1.26.4", "TensorFlow 2.14.1"),
        ("2.16.2", "1.26.4", "TensorFlow 2.16.2"),
        ("2.17.0", "1.26.4", "TensorFlow 2.17.0"),
        ("2.21.0", "2.4.0", "NumPy 2.4.0"),
    ],
)
def test_versions_that_cannot_work_get_a_sentence(tensorflow, numpy, named):
    with pytest.raises(ImportError, match=f"does not run on {named}") as caught:
        _tf._check_versions(tensorflow, numpy)
    assert len(str(caught.value).splitlines()) == 2
    _tf._check_versions("2.15.1", "1.26.4")
    _tf._check_versions("2.21.0", "2.3.5")


@pytest.mark.skipif(not IS_CURRENT, reason="TensorFlow 2.15 has Keras 2 itself")
def test_without_tf_keras_the_import_says_what_to_install():
    code = "import sys; sys.modules['tf_keras'] = None; import tfp_dpvi; tfp_dpvi.DPVI"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'tf_keras==2." in found.stderr
    assert "ImportError: tfp_dpvi needs Keras 2" in found.stderr


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
            TypeError, match=rf"({'|'.join(kinds)})\(\.\.\.\) is an object of Keras 3(.|\n)*dpvi\.keras"
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
            dpvi.DPVAE(lambda x: tfd.MultivariateNormalDiag(layer(x)), decoder, tfd.MultivariateNormalDiag(tf.zeros(2)))

    @pytest.mark.parametrize("wrap", [lambda layer: layer, lambda layer: [layer], lambda layer: {"a": layer}])
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
        model = dpvi.DPVI(tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0))
        optimizer = dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
        with self.refused("MeanSquaredError"):
            model.compile(optimizer, validation_metrics=[keras_3.metrics.MeanSquaredError()])
        model.compile(optimizer)
        x = np.ones(10, np.float32)
        with self.refused("TerminateOnNaN"):
            model.fit(x, x, batch_size=5, callbacks=[keras_3.callbacks.TerminateOnNaN()])
        assert model.privacy_ledger.num_releases == 0
