"""A user's own dataset needs a declared sampling scheme, and is priced by it (contract C4)."""

from __future__ import annotations

import random

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.toy import Toy, records, sgd
from support.toy import weights as values

import tfp_dpvi as dpvi
from tfp_dpvi.privacy import (
    EachRecordOncePerEpoch,
    FullBatch,
    PoissonSampling,
    PrivacyPlan,
    UnsupportedPairError,
)

tfd = tfp.distributions

X, Y = records()
ONCE = {"sampling": "each_record_once_per_epoch", "num_records": 200, "steps_per_epoch": 4}


REPLACE = dp_accounting.NeighboringRelation.REPLACE_ONE
ADD = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def make_model(noise=3.0, clip=1.0, relation=REPLACE, model=None, **settings):
    model = Toy() if model is None else model
    how = sgd(noise, clip=clip, rate=0.5)
    model.compile(how, delta=1e-5, neighboring_relation=relation, jit_compile=False, **settings)
    return model


def logistic():
    return dpvi.DPVI(
        tfd.Sample(tfd.Normal(0.0, 1.0), 3),
        lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params)),
        seed=1,
        clipping="flat",
    )


def batches(size=50):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(size)


def test_each_record_once_costs_one_release_an_epoch():
    model = make_model()
    model.fit(batches(), epochs=3, verbose=0, **ONCE)
    assert model.privacy_plan.sampling == EachRecordOncePerEpoch(4)
    assert model.privacy_ledger.num_releases == 12
    same = PrivacyPlan(
        sampling=FullBatch(), noise_multiplier=3.0, num_releases=3, neighboring_relation=REPLACE
    )
    assert model.privacy_report().epsilon == pytest.approx(same.epsilon(1e-5), rel=1e-6)


def test_declared_poisson_batches_cost_what_poisson_batches_cost():
    def draw():
        rng = np.random.default_rng(random.getrandbits(32))
        while True:
            chosen = rng.random(200) < 0.25
            yield X[chosen], Y[chosen]

    spec = (tf.TensorSpec([None, 3], tf.float32), tf.TensorSpec([None], tf.int32))
    dataset = tf.data.Dataset.from_generator(draw, output_signature=spec)
    model = make_model(relation=ADD)
    model.fit(
        dataset, epochs=2, verbose=0, **{**ONCE, "sampling": "poisson"}, sampling_probability=0.25
    )
    assert model.privacy_plan.sampling == PoissonSampling(0.25)
    assert model.privacy_plan.num_releases == 8


@pytest.mark.parametrize(("make", "size"), [(lambda: Toy(seed=1), 50), (logistic, 67)])
def test_a_step_on_a_given_batch_is_the_step_on_those_records(make, size):
    # Without noise and clip, one pass over given batches equals full-batch steps on each batch's records.
    steps = -(-200 // size)
    given = make_model(0.0, float("inf"), model=make())
    given.fit(batches(size), verbose=0, **{**ONCE, "steps_per_epoch": steps})
    by_hand = make_model(0.0, float("inf"), model=make())
    for start in range(0, 200, size):
        weight = np.ones(len(X[start : start + size]))
        # The same public denominators: N / steps for the sum, N for the prior.
        scale = len(weight) / (200 / steps)
        one_step(
            by_hand, X[start : start + size], Y[start : start + size], weight * scale, start // size
        )
    np.testing.assert_allclose(values(given), values(by_hand), rtol=1e-5, atol=1e-6)


def one_step(model, x, y, weight, number):
    """A full-batch step on these records with the keys of step `number` and the prior's weight of N = 200."""
    draw_key = internals.keys_of_step(1, number)[1]
    gradients = internals.step_gradients(model, draw_key, 200)
    records = {
        "x": tf.constant(x),
        "y": tf.constant(y),
        "sample_weight": tf.constant(weight / len(x), tf.float32),
    }
    mask = tf.ones([len(x)], tf.bool)
    clipped, _ = dpvi.gradients.clipped_sum(
        gradients.record_gradient, records, mask, dpvi.gradients.Clip(float("inf"))
    )
    private = model.optimizer.privatize(
        clipped,
        key=draw_key,
        expected_batch_size=1.0,
        pull_back=gradients.pull_back,
        data_independent=gradients.data_independent,
    )
    model.optimizer.apply_gradients(zip(private.tensors, model.trainable_variables, strict=True))


def test_batches_far_above_the_physical_size_drop_no_record():
    results = []
    for physical in (None, 7):
        model = make_model(0.0, float("inf"), physical_batch_size=physical)
        model.fit(batches(200), verbose=0, **{**ONCE, "steps_per_epoch": 1})
        results.append(values(model))
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": None}, ["declares no scheme", "declare how"]),
        ({"sampling": "shuffle"}, ["shuffle", "declare how"]),
        ({"sampling": "poisson"}, ["sampling_probability"]),
        ({"sampling_probability": 0.5}, ["sampling_probability"]),
        ({"num_records": None}, ["num_records"]),
        ({"steps_per_epoch": None}, ["steps_per_epoch"]),
        ({"batch_size": 50}, ["batch_size"]),
        ({"y": Y}, ["y"]),
    ],
)
def test_an_incomplete_declaration_spends_nothing(changes, words):
    model = make_model()
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the words are checked below
        model.fit(batches(), verbose=0, **{**ONCE, **changes})
    for word in words:
        assert word in str(caught.value)
    assert model.privacy_ledger.num_releases == 0


def test_a_short_dataset_is_told_and_charged():
    model = make_model()
    with pytest.raises(ValueError, match="ended after 4"):
        model.fit(batches(), verbose=0, **{**ONCE, "steps_per_epoch": 5})
    assert model.privacy_ledger.num_releases == 5


def test_each_record_once_has_no_price_under_add_or_remove():
    # In dataset.batch(B) one record more moves all later ones: sums of many steps change.
    model = make_model(relation=ADD)
    with pytest.raises(UnsupportedPairError, match="each_record_once_per_epoch"):
        model.fit(batches(), verbose=0, **ONCE)
    assert model.privacy_ledger.num_releases == 0


def test_poisson_batches_are_not_used_twice():
    model = make_model(relation=ADD)
    with pytest.raises(ValueError, match="used twice"):
        model.fit(
            batches(),
            verbose=0,
            **{**ONCE, "sampling": "poisson", "steps_per_epoch": 9},
            sampling_probability=0.25,
        )


def test_an_endless_pass_is_refused():
    with pytest.raises(ValueError, match="needs a finite dataset"):
        make_model().fit(batches().repeat(), verbose=0, **ONCE)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one"])
def test_what_the_message_recommends_works(relation):
    model = make_model(relation=relation)
    with pytest.raises(ValueError, match="declare how") as caught:
        model.fit(batches(), verbose=0)
    message = str(caught.value)
    assert model.num_releases == 0
    assert len(message.splitlines()) <= 2
    recipe = message.split("fit(dataset, ")[1].split("), or")[0]
    settings = eval(f"dict({recipe})", {"N": 200, "T": 4, "q": 0.25})
    model.fit(batches().repeat().take(4), verbose=0, **settings)
    if f'neighboring_relation="{relation}"' in message:
        make_model(relation=relation).fit(batches(), verbose=0, **ONCE)
