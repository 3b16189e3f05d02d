"""keras.io, "Working with RNNs": an LSTM reads an image of MNIST as a series of 28 rows."""

from tfp_dpvi import DPKerasModel, keras
from records import mnist

layers = keras.layers
(x_train, y_train), (x_test, y_test) = mnist()

model = keras.Sequential(
    [
        layers.Input([28, 28]),
        layers.LSTM(64),
        layers.LayerNormalization(),
        layers.Dense(10),
    ]
)
model = DPKerasModel(model)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile("adam", loss, metrics=["accuracy"], l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(x_train[..., 0], y_train, batch_size=400, epochs=4, verbose=2)
score = model.evaluate(x_test[..., 0], y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
