"""What a likelihood, a prior and records are tried for before anything is spent."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import adam

import tfp_dpvi as dpvi
from tfp_dpvi import keras, surrogates

tfd = tfp.distributions
tfb = tfp.bijectors
X = np.random.default_rng(0).normal(size=(40, 3)).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
PRIOR = tfd.Sample(tfd.Normal(0.0, 1.0), 3)


def dpvi_of(likelihood, prior=PRIOR, **settings):
    model = dpvi.DPVI(prior, likelihood, **{"clipping": "flat", **settings})
    model.compile(adam(2.0), delta=1e-5, jit_compile=False)
    return model


def logistic(w, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, w))


def refuses(model, words, *data, error=ValueError, **settings):
    with pytest.raises(error, match=words) as raised:
        model.fit(*data, verbose=0, **settings)
    assert str(raised.value).count("\n") <= 1
    assert model.num_releases == 0


# ---------------------------------------------------------------------- labels

CASES = {
    "a third class of two": (logistic, Y + 1),
    "a class too many": (lambda w, x: tfd.Categorical(logits=x * w), Y + 2),
    "a negative count": (lambda w, x: tfd.Poisson(log_rate=tf.linalg.matvec(x, w)), Y - 1),
    "an ordinal class too many": (
        lambda w, x: tfd.OrderedLogistic([-1.0, 1.0], tf.linalg.matvec(x, w)),
        Y + 2,
    ),
    "zero of a positive outcome": (
        lambda w, x: tfd.Gamma(2.0, tf.exp(tf.linalg.matvec(x, w))),
        Y - 1.0,
    ),
    "several": (
        lambda w, x: tfd.Independent(tfd.Bernoulli(logits=x * w), 1),
        np.tile(Y[:, None], 3) + 1,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_outside_the_support_are_refused_by_the_curators_check(case):
    likelihood, y = CASES[case]
    model = dpvi_of(likelihood)
    refuses(model, "y holds values outside the support", X, y)


def test_the_check_of_labels_can_be_left_out_and_passes_good_ones():
    model = dpvi_of(logistic)
    model.fit(X, Y, batch_size=40, verbose=0)
    model.check_labels(
        dpvi.data.make_records(X, Y.astype(bool), None, dtype=np.float32, validate=True)
    )
    bad = dpvi.data.make_records(X, Y + 1, None, dtype=np.float32, validate=True)
    with pytest.raises(ValueError, match="validate=False"):
        model.check_labels(bad)
    model.fit(X, Y + 1, batch_size=40, validate=False, verbose=0)


def test_whole_records_are_checked_too():
    model = dpvi_of(lambda w: tfd.Independent(tfd.Bernoulli(logits=w), 1))
    refuses(model, "x holds values outside the support", np.full([40, 3], 2))


# ---------------------------------------------------------------------- layers, latents


def test_layers_in_a_likelihood_are_refused_unless_they_are_frozen():
    dense = keras.layers.Dense(3)
    dense.build([None, 3])
    model = dpvi_of(lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(dense(x), w)))
    refuses(model, "likelihood reads the trainable variable.*\n.*DPModel", X, Y)
    dense.trainable = False
    model.fit(X, Y, batch_size=40, verbose=0)


def test_a_latent_of_each_record_is_refused_with_the_reason():
    prior = tfd.JointDistributionNamed({"w": PRIOR, "z": tfd.Sample(tfd.Normal(0.0, 1.0), 40)})

    def likelihood(params, x):
        shift = tf.gather(params["z"], tf.cast(x["person"], tf.int32))
        return tfd.Bernoulli(logits=tf.linalg.matvec(x["x"], params["w"]) + shift)

    model = dpvi_of(likelihood, prior)
    refuses(
        model,
        "one entry for each of the 40 records.*\n.*dpvi.local",
        {"x": X, "person": np.arange(40)},
        Y,
    )


def test_as_many_coefficients_as_records_are_no_latents():
    model = dpvi_of(logistic, tfd.Sample(tfd.Normal(0.0, 1.0), 40))
    model.check_records(
        dpvi.data.make_records(np.eye(40), Y, None, dtype=np.float32, validate=True)
    )


# ---------------------------------------------------------------------- records of other kinds


def test_sparse_matrices_are_refused_with_what_to_pass():
    from scipy import sparse

    for made in (sparse.csr_matrix(X), sparse.csr_array(X), sparse.coo_matrix(X)):
        refuses(
            dpvi_of(logistic),
            r"x is a scipy sparse matrix.*x.toarray\(\)",
            made,
            Y,
            error=TypeError,
        )


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: np.ma.masked_greater(X, 1.0), r"masked array.*x.filled\(0.0\)"),
        (lambda: tf.sparse.from_dense(X), r"tf.sparse.to_dense\(x\)"),
        (lambda: tf.RaggedTensor.from_tensor(X), r"x.to_tensor\(\)"),
    ],
)
def test_arrays_that_numpy_would_misread_are_refused(made, words):
    """It takes a masked array without its mask."""
    refuses(dpvi_of(logistic), words, made(), Y, error=TypeError)


def test_an_outcome_in_another_order_is_refused():
    """As Keras does, fit takes rows by their place: a table that was sorted fits noise."""
    pd = pytest.importorskip("pandas")
    table, y = pd.DataFrame(X, columns=["a", "b", "c"]), pd.Series(Y)
    refuses(dpvi_of(logistic), r"different orders:\n.*y.loc\[x.index\]", table[::-1], y)
    records = dpvi_of(lambda w, x: tfd.Bernoulli(logits=x["a"] * w[0]))
    records.make_data(table[5:], y[5:], batch_size=5)
    records.make_data(table[5:], y[5:].reset_index(drop=True), batch_size=5)


def test_rows_of_another_width_are_refused_in_a_line():
    model = dpvi_of(logistic)
    model.fit(X, Y, batch_size=40, verbose=0)
    with pytest.raises(ValueError, match="The records do not fit the model: ") as refusal:
        model.predict(X[:, :2])
    assert "\n" not in str(refusal.value)


def test_a_table_for_a_matrix_likelihood_says_what_to_pass():
    pd = pytest.importorskip("pandas")
    table = pd.DataFrame(X, columns=["a", "b", "c"])
    refuses(dpvi_of(logistic), r"x.to_numpy\(\) makes one array", table, Y)
    model = dpvi_of(logistic)
    model.fit(table.to_numpy(), Y, batch_size=40, verbose=0)
    with pytest.raises(ValueError, match=r"pass x.to_numpy\(\)"):
        model.predict(table)
    for call in (model.predict, model.predictive, model.prior_predictive):
        with pytest.raises(ValueError, match=r"x\[None\]"):
            call(X[0])


def test_bool_columns_stay_bool_and_bool_matrices_become_numbers():
    records = dpvi.data.make_records(
        {"smokes": Y > 0, "x": X}, Y > 0, None, dtype=np.float32, validate=True
    )
    assert records.x["smokes"].dtype == bool
    assert records.y.dtype == np.float32
    model = dpvi_of(
        lambda w, x: tfd.Bernoulli(
            logits=tf.where(x["smokes"], w[0], 0.0) + tf.linalg.matvec(x["x"], w)
        )
    )
    model.fit({"smokes": Y > 0, "x": X}, Y > 0, batch_size=40, verbose=0)
    assert model.predict({"smokes": Y > 0, "x": X}).shape == (40,)


# ---------------------------------------------------------------------- priors and surrogates

EYE = np.eye(2, dtype="float32")
DISCRETE = {
    "counts": tfd.Poisson(1.0),
    "a part": tfd.JointDistributionNamed(
        {"w": PRIOR, "k": tfd.Bernoulli(probs=0.5, dtype=tf.float32)}
    ),
    "several": tfd.Sample(tfd.Poisson(1.0), 3),
    "draws": tfd.Empirical(np.ones(5, "float32")),
}


@pytest.mark.parametrize("kind", DISCRETE)
def test_discrete_priors_are_refused(kind):
    with pytest.raises(ValueError, match=r"is discrete, or has a discrete part.*\n"):
        dpvi.DPVI(DISCRETE[kind], logistic)


BATCHED = {
    "alone": lambda: tfd.WishartTriL(df=[4.0, 5.0], scale_tril=EYE),
    "a part": lambda: tfd.JointDistributionNamed(
        {"w": PRIOR, "v": tfd.WishartTriL(df=[4.0, 5.0], scale_tril=EYE)}
    ),
    "normals": lambda: tfd.JointDistributionSequential([tfd.Normal(tf.zeros(3), 1.0)]),
}


@pytest.mark.parametrize("kind", BATCHED)
def test_priors_with_a_batch_are_refused(kind):
    with pytest.raises(ValueError, match=r"has batch shape.*\n.*Independent"):
        dpvi.DPVI(BATCHED[kind](), logistic)
    surrogates.check_prior(
        tfd.Independent(surrogates.WishartTriL(df=[4.0, 5.0], scale_tril=EYE), 1)
    )


def test_a_flow_that_was_never_called_says_how_to_build_it():
    def flow():
        network = tfb.AutoregressiveNetwork(params=2, hidden_units=[4], activation="relu")
        return tfd.TransformedDistribution(
            tfd.Sample(tfd.Normal(0.0, 1.0), 3), tfb.MaskedAutoregressiveFlow(network)
        )

    unbuilt = flow()
    with pytest.raises(
        ValueError, match=r"Build it first:\nsurrogate.log_prob\(surrogate.sample\(\)\)"
    ):
        dpvi.DPVI(PRIOR, logistic, unbuilt)
    unbuilt.log_prob(unbuilt.sample(seed=(1, 2)))
    assert dpvi.DPVI(PRIOR, logistic, unbuilt).trainable_variables
