"""keras.io, "Simple MNIST convnet"."""

from tfp_dpvi import DPKerasModel, keras
from records import mnist

layers = keras.layers
(x_train, y_train), (x_test, y_test) = mnist()

model = keras.Sequential(
    [
        layers.Input([28, 28, 1]),
        layers.Conv2D(32, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(64, 3, activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dropout(0.5),
        layers.Dense(10, activation="softmax"),
    ]
)
model = DPKerasModel(model)
loss = "sparse_categorical_crossentropy"
model.compile("adam", loss, metrics=["accuracy"], l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(x_train, y_train, batch_size=400, epochs=5, verbose=2)
score = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
