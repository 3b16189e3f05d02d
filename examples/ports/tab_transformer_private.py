"""keras.io, "Structured data learning with TabTransformer", with Adult."""

from tfp_dpvi import DPKerasModel, keras
from records import CATEGORIES, adult_matrices

layers = keras.layers
(x_train, y_train), (x_test, y_test) = adult_matrices()

numbers = layers.Input([5])
codes = layers.Input([len(CATEGORIES)], dtype="int64")
features = layers.Embedding(sum(CATEGORIES.values()), 16)(codes)
for _ in range(2):
    attended = layers.MultiHeadAttention(num_heads=4, key_dim=16, dropout=0.2)(features, features)
    attended = layers.LayerNormalization()(layers.Add()([attended, features]))
    forward = layers.Dropout(0.2)(layers.Dense(16, "gelu")(attended))
    features = layers.LayerNormalization()(layers.Add()([forward, attended]))
scaled = layers.Rescaling([1 / 80, 1 / 16, 1 / 99_999, 1 / 4_356, 1 / 99])(numbers)
hidden = layers.Concatenate()([layers.Flatten()(features), scaled])
for units in (64, 32):
    hidden = layers.Dense(units, "selu")(layers.LayerNormalization()(hidden))
    hidden = layers.Dropout(0.2)(hidden)
outputs = layers.Dense(1, "sigmoid")(hidden)

model = keras.Model([numbers, codes], outputs)
model = DPKerasModel(model)
loss = "binary_crossentropy"
model.compile("adam", loss, metrics=["accuracy"], l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(x_train, y_train, batch_size=256, epochs=4, verbose=2)
score = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
