"""keras.io, "Collaborative filtering for movie recommendations", with ratings that are made up."""

import keras
from records import ratings

layers = keras.layers
(x_train, y_train), (x_test, y_test) = ratings()

user, film = layers.Input([1], dtype="int64"), layers.Input([1], dtype="int64")
user_vector = layers.Flatten()(layers.Embedding(500, 8)(user))
film_vector = layers.Flatten()(layers.Embedding(200, 8)(film))
user_bias = layers.Flatten()(layers.Embedding(500, 1)(user))
film_bias = layers.Flatten()(layers.Embedding(200, 1)(film))
alike = layers.Dot(axes=1)([user_vector, film_vector])
outputs = layers.Activation("sigmoid")(layers.Add()([alike, user_bias, film_bias]))

model = keras.Model([user, film], outputs)
adam = keras.optimizers.Adam(0.005)
loss = "binary_crossentropy"
model.compile(adam, loss, metrics=["mae"])
model.fit([x_train[:, :1], x_train[:, 1:]], y_train, batch_size=128, epochs=8, verbose=2)
score = model.evaluate([x_test[:, :1], x_test[:, 1:]], y_test, verbose=0)[1]
print(f"mean absolute error {score:.3f}")
