"""Likelihoods, priors and records that the paired clip must take, set aside or refuse.

Nothing hangs or is lost.
"""

import contextlib
import logging

import numpy as np
import pytest
from support.siblings import slow

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated import requirements
from tfp_dpvi.calibrated.clip import ClippedAway
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.requirements import CannotPairError
from tfp_dpvi.data import make_records
from tfp_dpvi.gradients import Clip
from tfp_dpvi.gradients.joint import Released

tfd = tfp.distributions
NUM = 60


def prior():
    return tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), 3)})


def compiled(model, **settings):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(
        0.05, l2_norm_clip=1.0, noise_multiplier=2.0, **settings
    )
    model.compile(optimizer, delta=1e-5, jit_compile=False, accountant="rdp")
    return model


def refused(caplog):
    return [
        record.getMessage() for record in caplog.records if "does not apply" in record.getMessage()
    ]


def test_a_record_that_makes_the_likelihood_nan_counts_nothing_and_does_not_hang():
    """TFP's Poisson sampler never ends at a rate that is NaN, here of a negative exposure."""

    def likelihood(params, x):
        assert x.shape.as_list()[1] == 4  # A tensor.
        return tfd.Poisson(log_rate=tf.math.log(x[:, 0]) + tf.linalg.matvec(x[:, 1:], params["w"]))

    generator = np.random.default_rng(0)
    x = np.concatenate([np.ones((NUM, 1)), generator.normal(size=(NUM, 3))], axis=1).astype(
        "float32"
    )
    x[7, 0] = -1.0
    model = compiled(dpvi.DPVI(prior, likelihood))
    model.fit(
        x, generator.poisson(1.0, NUM).astype("float32"), batch_size=NUM, epochs=10, verbose=0
    )
    assert model.calibration.pairing is not None
    assert np.isfinite(model.posterior.sample(5)["w"]).all()


@pytest.mark.slow  # As a likelihood that is NaN, above.
def test_a_record_whose_logits_overflow_counts_nothing():
    """TensorFlow draws a class that there is not, whose density it then refuses."""

    def likelihood(params, x):
        return tfd.Categorical(logits=x * params["w"] * tf.constant([1.0, 10.0, -10.0]))

    generator = np.random.default_rng(0)
    x = generator.normal(size=(NUM, 3)).astype("float32")
    x[3] = 3e38
    model = compiled(dpvi.DPVI(prior, likelihood))
    model.fit(
        x, generator.integers(0, 3, NUM).astype("int32"), batch_size=NUM, epochs=10, verbose=0
    )
    assert model.calibration.pairing is not None
    assert np.isfinite(model.posterior.sample(5)["w"]).all()


@pytest.mark.parametrize(
    "weights",
    [
        lambda tau: tfd.Independent(tfd.Normal(tf.zeros(3), tau), 1),
        slow(lambda tau: tfd.MultivariateNormalDiag(tf.zeros(3), tau * tf.ones(3))),
    ],
)
def test_a_prior_that_draws_one_value_at_a_time_is_clipped_flat(weights, caplog):
    def one_at_a_time():
        return tfd.JointDistributionNamed({"tau": tfd.HalfNormal(1.0), "w": weights})

    def likelihood(params, x):
        return tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0)

    x = np.ones((NUM, 3), "float32")
    model = compiled(dpvi.DPVI(one_at_a_time, likelihood))
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.fit(x, x[:, 0], batch_size=NUM, epochs=10, verbose=0)
    (sentence,) = refused(caplog)
    assert "tfd.Sample" in sentence
    assert model.posterior is model.surrogate_posterior


def likelihood_of_one(params, x):
    return tfd.Normal(tf.linalg.matvec(x, params["w"]), 1.0)


def test_batches_before_compile_and_an_optimizer_without_one_length(caplog):
    x = np.ones((NUM, 3), "float32")
    model = dpvi.DPVI(prior, likelihood_of_one)
    data = model.make_data(x, x[:, 0], batch_size=NUM)
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        assert not compiled(model, clipping="normalized").mechanism(data).joint
    (sentence,) = refused(caplog)
    assert "normalized" in sentence
    assert len(compiled(model).mechanism(model.make_data(x, x[:, 0], batch_size=NUM)).joint) == 2


def test_a_short_fit_says_so_and_set_weights_drops_the_posterior(caplog):
    x = np.ones((NUM, 3), "float32")
    model = compiled(dpvi.DPVI(prior, likelihood_of_one))
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.fit(x, x[:, 0], batch_size=NUM, epochs=3, verbose=0)
    assert any("too short" in record.getMessage() for record in caplog.records)
    assert model.posterior is model.surrogate_posterior
    model.fit(x, x[:, 0], batch_size=NUM, epochs=20, verbose=0)
    assert model.posterior is not model.surrogate_posterior
    model.set_weights(model.get_weights())
    assert model.posterior is model.surrogate_posterior


def test_a_step_at_the_end_of_the_support_is_left_out():
    """A logit of 18 is a probability of 1 in float32, whose logit is infinite."""

    def likelihood(params, x):
        return tfd.Bernoulli(probs=params * tf.ones_like(x[:, 0]), dtype=tf.float32)

    x = np.ones((NUM, 1), "float32")
    model = compiled(dpvi.DPVI(lambda: tfd.Uniform(0.0, 1.0), likelihood))
    model.make_data(x, x[:, 0], batch_size=NUM)
    assert model.calibration.pairing is not None
    step, total = (tf.constant(3), tf.constant(12)), tf.zeros([20], tf.float64)
    for theta, kept in ((0.5, 1), (np.inf, 0)):
        released = Released(tf.ones([]), (tf.ones([1]),), *step, tf.zeros([]), tf.constant([theta]))
        assert np.count_nonzero(ClippedAway(Clip(1.0), 1.0).accumulate(total, released)) == kept


@pytest.mark.slow
@pytest.mark.parametrize(("momentum", "warned"), [(0.99, True), (0.8, False)])
def test_an_average_of_iterates_that_remembers_its_start_is_warned_of(momentum, warned, caplog):
    x = np.ones((NUM, 3), "float32")
    model = compiled(dpvi.DPVI(prior, likelihood_of_one), use_ema=True, ema_momentum=momentum)
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.fit(x, x[:, 0], batch_size=NUM, epochs=20, verbose=0)
    assert any("use_ema" in record.getMessage() for record in caplog.records) == warned


def at_zero(x):
    return x[:, 0]


MIXING = {
    "first": lambda x: at_zero(x) - x[0, 0],
    "last": lambda x: at_zero(x) - x[-1, 0],
    "middle": lambda x: at_zero(x) - x[tf.shape(x)[0] // 2, 0],
    "cumulative sum": lambda x: tf.cumsum(at_zero(x), reverse=True),
    "next": lambda x: tf.concat([x[1:, 0], x[-1:, 0]], axis=0),
    "largest": lambda x: at_zero(x) / tf.reduce_max(tf.abs(x)),
    "rank": lambda x: tf.cast(tf.argsort(tf.argsort(at_zero(x))), tf.float32),
    "threshold": lambda x: tf.where(tf.reduce_max(tf.abs(x)) > 1e6, 2.0, 1.0) * at_zero(x),
    "sign": lambda x: tf.where(tf.reduce_min(x[-2:]) < 0.0, 2.0, 1.0) * at_zero(x),
    "number": lambda x: at_zero(x) * tf.cast(tf.shape(x)[0], tf.float32),
    "missing": lambda x: at_zero(x) * tf.where(tf.reduce_any(tf.math.is_nan(x)), 2.0, 1.0),
    "imputed": lambda x: tf.where(
        tf.math.is_nan(at_zero(x)), tf.experimental.numpy.nanmean(at_zero(x)), at_zero(x)
    ),
    "outliers": lambda x: tf.where(at_zero(x) > 1e2, tf.reduce_min(x), at_zero(x)),
}


@pytest.mark.parametrize(
    "mixing",
    [
        name if name in ("number", "threshold", "sign", "missing", "imputed") else slow(name)
        for name in MIXING
    ],
)
def test_a_likelihood_whose_rows_depend_on_each_other_is_not_paired(mixing, caplog):
    """One record moved the sum by 20 clips. Its row alone is the other way to see it."""

    def likelihood(params, x):
        return tfd.Normal(params["w"][0] * MIXING[mixing](x), 1.0)

    x = np.ones((NUM, 2), "float32")
    model = compiled(dpvi.DPVI(prior, likelihood))
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.make_data(x, x[:, 0], batch_size=NUM)
    (sentence,) = refused(caplog)
    assert "depends on other records" in sentence
    assert model.calibration.pairing is None


def of_row(x):
    """The number of the row that an index names, from the third on."""
    named = tf.minimum(x["group"], tf.size(x["group"]) - 1)
    return tf.where(x["group"] > 1, tf.gather(x["a"], named), x["a"])


GROUPED = {
    "row": of_row,
    "largest": lambda x: x["a"] * tf.where(tf.reduce_max(x["group"]) > 3, 2.0, 1.0),
    "smallest": lambda x: x["a"] * tf.where(tf.reduce_min(x["group"]) < 0, 2.0, 1.0),
}


@pytest.mark.parametrize("mixing", ["row", slow("largest"), "smallest"])
def test_integers_through_which_rows_depend_on_each_other_are_seen(mixing, caplog):
    def likelihood(params, x):
        return tfd.Normal(params["w"][0] * GROUPED[mixing](x), 1.0)

    x = {"a": np.ones(NUM, "float32"), "group": np.zeros(NUM, "int32")}
    model = compiled(dpvi.DPVI(prior, likelihood))
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.make_data(x, x["a"], batch_size=NUM)
    (sentence,) = refused(caplog)
    assert "depends on other records" in sentence


@pytest.mark.parametrize("dtype", ["int32", slow("uint8"), slow("bool")])
def test_integers_that_are_categories_are_paired(dtype, caplog):
    """Two of them: TensorFlow refuses others as indices."""

    def likelihood(params, x):
        return tfd.Normal(tf.gather(params["w"][:2], tf.cast(x["group"], tf.int32)) + x["a"], 1.0)

    x = {"a": np.ones(NUM, "float32"), "group": np.zeros(NUM, dtype)}
    model = compiled(dpvi.DPVI(prior, likelihood))
    model.make_data(x, x["a"], batch_size=NUM)
    assert model.calibration.pairing is not None


def test_assertions_hide_no_dependence(caplog):
    def likelihood(params, x):
        scale = tf.where(tf.reduce_min(x) < -1e3, 2.0, 1.0)
        return tfd.Gamma(tf.exp(params["w"][0]), x[:, 0] * scale, validate_args=True)

    x = np.ones((NUM, 1), "float32")
    model = compiled(dpvi.DPVI(prior, likelihood))
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        model.make_data(x, x[:, 0], batch_size=NUM)
    assert "depends on other records" in refused(caplog)[0]


@pytest.mark.parametrize("mixes", [False, True])
def test_rows_are_tried_under_a_vague_prior_whose_draws_overflow(mixes):
    """A standard deviation of 100 on a logarithm, as in BUGS, was refused for its own draws."""

    def counts(params, x):
        centred = x - tf.reduce_mean(x, axis=0) if mixes else x
        return tfd.Poisson(log_rate=tf.linalg.matvec(centred, params["w"]))

    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 100.0), 2)})
    records = make_records(
        np.ones([4, 2], "float32"), np.ones(4, "float32"), None, dtype=np.float32, validate=False
    )
    found = contextlib.nullcontext()
    if mixes:
        found = pytest.raises(CannotPairError, match="depends on other records")
    with found:
        Pairing(BayesianModel(prior, counts), records, log_scales=True)


@pytest.mark.parametrize("mixes", [False, True])
def test_rounded_densities_of_huge_counts_say_nothing_of_other_rows(mixes):
    """Rates of e^16 at a draw of the prior: alone and in a batch, densities differed by rounding."""

    def counts(params, x):
        score = params["w"][0] + x[:, 0] * params["w"][1]
        size = tf.cast(tf.shape(x)[0], tf.float32)
        # A density that reads the size of the batch alone is seen by no move of a row.
        score = score + tf.math.log(size) if mixes else score
        rates = score[:, None] + np.linspace(-1.0, 1.0, 9, dtype=np.float32)
        return tfd.MixtureSameFamily(tfd.Categorical(logits=[0.0] * 9), tfd.Poisson(log_rate=rates))

    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(15.0, 0.1), 2)})
    records = make_records(
        np.ones([4, 2], "float32"), np.ones(4, "float32"), None, dtype=np.float32, validate=False
    )
    with pytest.raises(CannotPairError, match="moderate"):
        Pairing(BayesianModel(prior, counts), records, log_scales=True)
    vague = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 20.0), 2)})
    found = contextlib.nullcontext()
    if mixes:
        found = pytest.raises(CannotPairError, match="depends on other records")
    with found:
        Pairing(BayesianModel(vague, counts), records, log_scales=True)


def test_rows_are_tried_where_their_densities_say_something():
    """Under a vague prior all rates may be 0, and no density shows on which records they depend."""

    def counts(params, x):
        rate = tf.exp(tf.linalg.matvec(x, params["w"]))
        return tfd.Poisson(rate=rate * tf.nn.softmax(x[:, 0] * params["w"][1]))

    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1e4), 2)})
    records = make_records(
        np.ones([4, 2], "float32"), np.ones(4, "float32"), None, dtype=np.float32, validate=False
    )
    with pytest.raises(CannotPairError):
        Pairing(BayesianModel(prior, counts), records, log_scales=True)


def test_the_last_digit_makes_no_row_depend_on_another():
    """It depends on where a tensor lies in memory: one fit in ten was refused on a busy machine."""
    before = [np.float32([-3.8167496, np.nan, 2.0]), np.array([True, True, False])]
    after = [np.float32([-3.8167493, np.nan, 3.0]), np.array([True, True, True])]
    assert requirements._same_rows(before, after, np.array([True, True, False]))
    assert not requirements._same_rows(before, after, np.array([True, True, True]))
    assert not requirements._same_rows(before[1:], after[1:], np.array([True, False, True]))


def test_ordinary_rows_are_moved_and_one_try_sees_it(monkeypatch):
    """Moves drew the values of x again: nothing moved, and every share of the prior was tried."""
    tried = []
    honest = requirements._rows_are_apart

    def watched(trials, x):
        tried.append(honest(trials, x))
        return tried[-1]

    monkeypatch.setattr(requirements, "_rows_are_apart", watched)
    model = BayesianModel(prior(), lambda params, x: tfd.Normal(params["w"][0] * x, 1.0))
    x = np.zeros(4, "float32")
    Pairing(model, make_records(x, x, None, dtype=model.dtype, validate=True))
    assert tried == [True]
