"""keras.io, "Structured data classification from scratch", with Adult: incomes above 50,000 dollars."""

from tfp_dpvi import DPKerasModel, keras
from records import CATEGORIES, NUMBERS, adult

layers = keras.layers
(x_train, y_train), (x_test, y_test) = adult()

inputs, features = {}, []
for name in NUMBERS:
    inputs[name] = layers.Input([1], name=name)
    normalize = layers.Normalization(mean=NUMBERS[name][0], variance=NUMBERS[name][1])
    features.append(normalize(inputs[name]))
for name, num in CATEGORIES.items():
    inputs[name] = layers.Input([1], name=name, dtype="int64")
    lookup = layers.IntegerLookup(vocabulary=list(range(num)), output_mode="one_hot")
    features.append(lookup(inputs[name]))
hidden = layers.Dense(32, "relu")(layers.Concatenate()(features))
outputs = layers.Dense(1, "sigmoid")(layers.Dropout(0.5)(hidden))

model = keras.Model(inputs, outputs)
model = DPKerasModel(model)
loss = "binary_crossentropy"
model.compile("adam", loss, metrics=["accuracy"], l2_norm_clip=1.0, epsilon=2.0, delta=1e-5)
model.fit(x_train, y_train, batch_size=512, epochs=10, verbose=2)
score = model.evaluate(x_test, y_test, verbose=0)[1]
print(f"accuracy {score:.3f}")
