"""keras.io, "Working with RNNs": an LSTM reads an image of MNIST as a series of 28 rows."""

import keras
from records import mnist

layers = keras.layers
(x_train, y_train), (x_test, y_test) = mnist()

model = keras.Sequential(
    [
        layers.Input([28, 28]),
        layers.LSTM(64),
        layers.BatchNormalization(),
        layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"])
model.fit(x_train[..., 0], y_train, batch_size=256, epochs=2, verbose=2)
score = model.evaluate(x_test[..., 0], y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
