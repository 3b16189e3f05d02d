"""The mixture of a table against NumPy: log-probabilities, samples, the prior, the start.

Fewer than 60 p-values are compared with `statistics.ALPHA` = 1e-9.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.special
import scipy.stats
from support import statistics

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.synthetic import (
    Binary,
    Categorical,
    Continuous,
    Integer,
    Schema,
    make_likelihood,
    make_prior,
    starting_point,
)

K = 3


def make_table():
    return Schema(
        {
            "a": Categorical(["x", "y", "z"], missing=True),
            "b": Continuous(0, 1, bins=[0.3, 0.5, 0.6], missing=True),
            "c": Binary(),
            "d": Integer(0, 9, bins=[1, 5]),
        }
    )


def make_params(seed=0):
    generator = np.random.default_rng(seed)
    return {
        "weights": generator.normal(size=K).astype("float32"),
        "levels": generator.normal(size=[K, 3 + 4 + 2 + 3 + 2 + 2]).astype("float32"),
    }


def tables_by_hand(params):
    """Probabilities: weights [K], and for each column [K, levels + missing]."""
    soft = scipy.special.softmax
    levels = params["levels"].astype(float)
    a, b, c, d, no_a, no_b = np.split(levels, np.cumsum([3, 4, 2, 3, 2]), axis=1)

    def with_missing(shares, absent):
        absent = soft(absent, axis=1)
        return np.concatenate([shares * absent[:, :1], absent[:, 1:]], axis=1)

    a, b, c, d = (soft(part, axis=1) for part in (a, b, c, d))
    columns = [with_missing(a, no_a), with_missing(b, no_b), c, d]
    return soft(params["weights"].astype(float)), columns


def all_records():
    sizes = (3, 4, 2, 3)
    ranges = [[*range(size), -1] if place < 2 else range(size) for place, size in enumerate(sizes)]
    return np.array(list(itertools.product(*ranges)), np.int32)


def probabilities_by_hand(params, records):
    weights, columns = tables_by_hand(params)
    product = np.ones((len(records), K))
    for place, shares in enumerate(columns):
        product *= shares[:, records[:, place]].T  # -1 is the last entry, the missing one.
    return product @ weights


def test_log_prob_is_the_mixtures():
    records, params = all_records(), make_params()
    mixture = make_likelihood(make_table())(params)
    assert mixture.event_shape == [4]
    assert mixture.batch_shape == []
    assert mixture.dtype == tf.int32
    found = np.exp(mixture.log_prob(records))
    np.testing.assert_allclose(found, probabilities_by_hand(params, records), rtol=2e-5)
    assert found.sum() == pytest.approx(1.0, rel=1e-5)  # Missing values included, all there is.


@pytest.mark.parametrize("shape", [(), (5,), (2, 5)])
def test_shapes(shape):
    mixture = make_likelihood(make_table())(make_params())
    drawn = mixture.sample(shape, seed=(1, 2))
    assert drawn.shape == [*shape, 4]
    assert mixture.log_prob(drawn).shape == list(shape)
    assert mixture.components_distribution.log_prob(np.zeros([*shape, 1, 4], "int32")).shape == [
        *shape,
        K,
    ]
    np.testing.assert_allclose(
        mixture.components_distribution.log_prob(np.zeros([7, K, 4], "int32"))[3],
        mixture.components_distribution.log_prob(np.zeros([7, 1, 4], "int32"))[3],
        rtol=1e-6,
    )


def test_samples_have_the_stated_probabilities():
    records, params = all_records(), make_params()
    mixture = make_likelihood(make_table())(params)
    num = 200_000
    drawn = mixture.sample(num, seed=_random.tfp_seed(statistics.fresh_key())).numpy()
    weights = np.array([1000, 100, 10, 1])
    kinds, found = np.unique(drawn @ weights, return_counts=True)
    observed = dict(zip(kinds.tolist(), found.tolist(), strict=True))
    counts = [observed.pop(int(record @ weights), 0) for record in records]
    assert not observed  # Nothing that is no record.
    statistics.fits(counts, num * probabilities_by_hand(params, records), "samples of the mixture")


def test_the_prior_is_dirichlet():
    """Softmax of the logits of one column in one component: Beta margins of a Dirichlet(2, 2, 2)."""
    prior = make_prior(make_table(), K, concentration=2.0)
    draws = prior.sample(4000, seed=_random.tfp_seed(statistics.fresh_key()))
    assert draws["levels"].shape == [4000, K, 16]
    for logits in (draws["weights"], draws["levels"][:, 1, :3]):
        share = scipy.special.softmax(np.asarray(logits, float), axis=-1)[:, 0]
        statistics.plausible(
            scipy.stats.kstest(share, scipy.stats.beta(2, 4).cdf).pvalue, "Dirichlet prior"
        )
    values = tf.nest.map_structure(lambda part: part[0], draws)
    assert prior.log_prob(values).shape == []
    assert {part.dtype for part in tf.nest.flatten(draws)} == {tf.float32}


def test_a_records_gradient_is_bounded():
    """By the logits it is a difference of probability vectors: at most sqrt(2) for each segment, whatever the parameters."""
    likelihood = make_likelihood(make_table())
    records = all_records()
    for scale in (0.1, 1.0, 30.0):
        params = tf.nest.map_structure(lambda part, s=scale: tf.constant(s * part), make_params(4))
        parts = [params["weights"], params["levels"]]

        def one(record, parts=parts, params=params):
            with tf.GradientTape() as tape:
                tape.watch(parts)
                log_prob = likelihood({**params, "weights": parts[0], "levels": parts[1]}).log_prob(
                    record[None]
                )[0]
            return tape.gradient(log_prob, parts)

        gradients = tf.vectorized_map(one, records)
        norms = np.sqrt(
            sum(np.sum(np.square(part.numpy()).reshape(len(records), -1), 1) for part in gradients)
        )
        assert np.isfinite(norms).all()
        assert (
            norms.max() <= np.sqrt(2 * 7) + 1e-4
        )  # Weights, four columns, and two Bernoullis of missing values.


def test_a_missing_value_says_nothing_about_its_column():
    likelihood, params = make_likelihood(make_table()), make_params()
    record = np.array([[-1, 1, 0, 2]], np.int32)
    levels = tf.constant(params["levels"])
    with tf.GradientTape() as tape:
        tape.watch(levels)
        log_prob = likelihood({**params, "levels": levels}).log_prob(record)
    gradient = tape.gradient(log_prob, levels).numpy()
    np.testing.assert_array_equal(gradient[:, :3], 0.0)
    assert np.all(gradient[:, 12:14] != 0.0)


def test_the_start_is_random_and_spread_over_the_target():
    table = make_table()
    one, other = (
        starting_point(table, 6, target="c", seed=1),
        starting_point(table, 6, target="c", seed=1),
    )
    np.testing.assert_array_equal(one["levels"], other["levels"])
    assert np.all(starting_point(table, 6)["levels"] != starting_point(table, 6)["levels"])
    np.testing.assert_array_equal(one["levels"][:, 7:9].argmax(1), [0, 1, 0, 1, 0, 1])
    prior = make_prior(table, 6)
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_array_equal(a.shape, b), dict(one), dict(prior.event_shape)
    )
    with pytest.raises(ValueError, match="target='e'"):
        starting_point(table, 6, target="e")


def test_bad_arguments():
    with pytest.raises(ValueError, match="num_components"):
        make_prior(make_table(), 0)
    with pytest.raises(ValueError, match="concentration"):
        make_prior(make_table(), 2, concentration=0.0)


def test_it_is_a_tfp_mixture():
    mixture = make_likelihood(make_table())(make_params())
    assert isinstance(mixture, tfp.distributions.MixtureSameFamily)
    assert isinstance(mixture.mixture_distribution, tfp.distributions.Categorical)
