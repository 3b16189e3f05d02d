"""TensorFlow Privacy, `mnist_lr_tutorial.py` without its flag `dpsgd`: logistic regression in Keras."""

from tfp_dpvi import DPKerasModel, keras
import numpy as np
from records import mnist

layers = keras.layers
(x_train, y_train), (x_test, y_test) = mnist()


def bounded(x, norm=8.0):
    """Returns rows whose norm is at most `norm`."""
    x = x.reshape(len(x), -1)
    return x * np.minimum(1.0, norm / np.linalg.norm(x, axis=1, keepdims=True))


model = keras.Sequential([layers.Input([784]), layers.Dense(10)])
sgd = keras.optimizers.SGD(0.8)
model = DPKerasModel(model)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(sgd, loss, metrics=["accuracy"], l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(bounded(x_train), y_train, batch_size=500, epochs=6, verbose=2)
score = model.evaluate(bounded(x_test), y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
