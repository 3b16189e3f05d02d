"""TensorFlow Privacy, `mnist_dpsgd_tutorial_keras.py` without its flag `dpsgd`."""

import keras
from records import mnist

layers = keras.layers
(x_train, y_train), (x_test, y_test) = mnist()

model = keras.Sequential(
    [
        layers.Input([28, 28, 1]),
        layers.Conv2D(16, 8, strides=2, padding="same", activation="relu"),
        layers.MaxPooling2D(2, 1),
        layers.Conv2D(32, 4, strides=2, activation="relu"),
        layers.MaxPooling2D(2, 1),
        layers.Flatten(),
        layers.Dense(32, activation="relu"),
        layers.Dense(10),
    ]
)
sgd = keras.optimizers.SGD(0.15)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(sgd, loss, metrics=["accuracy"])
model.fit(x_train, y_train, batch_size=250, epochs=4, verbose=2)
score = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
