"""keras.io, "Text classification from scratch", with docstrings: of NumPy and SciPy, or of Python?"""

from tfp_dpvi import DPKerasModel, keras
import numpy as np
import records

layers = keras.layers
(texts, y_train), (texts_test, y_test) = records.docstrings()

vectorize = layers.TextVectorization(max_tokens=2000, output_sequence_length=40)
vectorize.set_vocabulary(records.public_words(1998))
x_train, x_test = np.asarray(vectorize(texts)), np.asarray(vectorize(texts_test))

model = keras.Sequential(
    [
        layers.Input([40], dtype="int64"),
        layers.Embedding(2000, 32),
        layers.Dropout(0.2),
        layers.Conv1D(32, 7, strides=3, activation="relu"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(32, activation="relu"),
        layers.Dropout(0.2),
        layers.Dense(1, activation="sigmoid"),
    ]
)
model, adam = DPKerasModel(model), keras.optimizers.Adam(0.02)
loss = "binary_crossentropy"
model.compile(adam, loss, metrics=["accuracy"], l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(x_train, y_train, batch_size=1024, epochs=30, verbose=2)
score = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
