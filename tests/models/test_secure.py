"""`compile(randomness="secure")`: noise and samples of every kind of fit are those of the key's words (C4, C10)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from support import internals, planted, tapes, toy
from support.steps import Indicator

import tfp_dpvi as dpvi
from tfp_dpvi import _keystream, _random, preprocessing, training
from tfp_dpvi._tf import tf
from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan, PrivacyReport
from tfp_dpvi.sampling import PoissonSampler

NUM, BATCH, STEPS, NOISE = 30, 6, 5, 1.0
X = np.eye(NUM, dtype="float32")  # A sum of clipped records shows which took part.
OTHER = bytes(32)  # The key of a second fit.


def compiled(**settings):
    model = Indicator(NUM)
    settings = {"jit_compile": False, "randomness": "secure", **settings}
    model.compile(toy.sgd(NOISE, rate=1.0), delta=1e-5, **settings)
    return model


def fitted(model, **settings):
    model.fit(X, batch_size=BATCH, verbose=0, **settings)
    return model


def expected(steps=STEPS, **where):
    """The change of the weights over so many steps: the sum of releases, each on its grid."""
    sums = tapes.releases_of_unit_records(steps, NUM, BATCH / NUM, NOISE, **where)
    return (np.round(sums * 2**12) / 2**12 / BATCH).sum(axis=0)


def check(change, **where):
    np.testing.assert_allclose(change, expected(**where), atol=2e-6)


@pytest.fixture
def fixed(monkeypatch):
    """The key of every fit is that of `support.tapes`."""
    monkeypatch.setattr(_keystream, "new_key", lambda: tapes.KEY)


@pytest.fixture(scope="module")
def twice():
    """A model after two fits by two steps a call, its weights after the first, and draws of TensorFlow's generators."""
    keys, drawn, genuine = iter([tapes.KEY, OTHER]), [], tf.random.stateless_uniform

    def counting(shape, **settings):
        drawn.append(tuple(shape))
        return genuine(shape, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_keystream, "new_key", lambda: next(keys))
        patch.setattr(tf.random, "stateless_uniform", counting)
        model = fitted(compiled(steps_per_execution=2))
        first = model.v.numpy()
        return fitted(model), first, drawn


def test_noise_and_samples_are_those_of_the_words(twice):
    """C4, C10: against NumPy, over a fit, to rounding."""
    _, first, _ = twice
    check(first)


def test_a_second_fit_has_another_key_and_other_steps(twice):
    """C10: the count of steps goes on; nothing holds the first fit's words."""
    model, first, _ = twice
    check(model.v.numpy() - first, first=STEPS, key=OTHER)
    assert not internals.holds_a_fit(model)


def test_a_step_takes_nothing_else_from_tensorflows_generators(twice):
    """Of a model without draws, but for the sampler's spare key, which hardly any step reaches."""
    *_, drawn = twice
    assert set(drawn) == {(PoissonSampler(NUM, BATCH / NUM).physical_batch_size,)}


def test_no_graph_and_no_file_has_key_or_words(twice, tmp_path):
    """C10: the words are arguments. A constant of the graph would be among its bytes."""
    model, *_ = twice
    (step,) = internals.traced_steps(model)
    model.save_weights(tmp_path / "weights.h5")
    held = [graph.as_graph_def().SerializeToString() for graph in internals.graphs_of(step)]
    held.append((tmp_path / "weights.h5").read_bytes())
    assert len(held) >= 2
    words = [word.tobytes() for key in (tapes.KEY, OTHER) for word in tapes.row(0, 80, key=key)]
    for secret in (tapes.KEY[:16], tapes.KEY[16:], *words):
        assert not any(secret in data or secret[::-1] in data for data in held)


CASES = {
    "XLA": ({"steps_per_execution": 3, "jit_compile": True}, {}),
    "eager": ({"run_eagerly": True}, {}),
    "streams": ({}, {"stream": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_they_are_in_every_kind_of_fit(fixed, case):
    """C4, C10. Streams draw on the host, of a stream of their own; replicas are in `test_distributed.py`."""
    settings, fit = CASES[case]
    model = fitted(compiled(**settings), **fit)
    check(model.v.numpy(), streamed="stream" in fit)


def test_they_are_in_a_loop_of_ones_own(fixed):
    model = compiled()
    data = model.make_data(X, batch_size=BATCH)
    mechanism = model.mechanism(data)
    assert mechanism.plan(1).randomness == "secure"
    step = training.make_step(mechanism, model.optimizer, model.trainable_variables)
    state, key = training.initial_state(mechanism), training.secure_key(mechanism)
    with pytest.raises(ValueError, match=r"^key is ndarray.*training.secure_key\(mechanism\)"):
        step(state, data.tensors, training.new_key())
    for _ in range(STEPS):
        state = step(state, data.tensors, key)
    check(model.v.numpy())
    plain = compiled(randomness=None)
    step = training.make_step(plain.mechanism(data), plain.optimizer, plain.trainable_variables)
    with pytest.raises(ValueError, match=r"^key is Keystream.*training.new_key"):
        step(state, data.tensors, key)


class Altered(_keystream.Keystream):
    """Words of which some are others."""

    places = slice(0)

    def rows(self, first, num):
        tape = super().rows(first, num)
        tape[:, self.places] ^= np.uint64(2**40 + 2**9)
        return tape


def test_the_twins_key_is_the_tapes():
    """C10: words 2 and 3 after the sample's make the twins, anew in each step. Others make draws, sample and noise."""
    model, (x, y) = planted.logistic(randomness="secure", jit_compile=False), planted.labelled()
    data = model.make_data(x, y, batch_size=10)
    mechanism = model.mechanism(data)
    seen = []
    watch = tf.numpy_function

    def keep(twins):
        with tf.control_dependencies([watch(lambda part: seen.append(part.copy()), [twins], [])]):
            return tf.identity(twins)

    own = mechanism.sampler.num_words + 2
    with internals.twins_changed(keep):
        step = training.make_step(mechanism, model.optimizer, model.trainable_variables)
        state = training.initial_state(mechanism)
        before = [variable.numpy() for variable in model.variables]
        twins = []
        for places in (slice(0), slice(0), slice(own, own + 2), slice(own + 2, None)):
            for variable, value in zip(model.variables, before, strict=True):
                variable.assign(value)
            key = Altered(tapes.KEY, mechanism.num_words())
            key.places = places
            seen.clear()
            following = step(state, data.tensors, key)
            step(following, data.tensors, key)
            twins.append([seen[0], seen[-1]])
    plain, again, other_key, other_noise = twins
    np.testing.assert_array_equal(plain, again)
    assert np.any(plain[0] != plain[1])
    assert np.any(plain[0] != other_key[0])
    np.testing.assert_array_equal(plain[0], other_noise[0])


def test_keys_are_256_bits_of_the_operating_system(monkeypatch):
    monkeypatch.setattr(_random, "entropy", lambda num: bytes(range(num)))
    assert _keystream.new_key() == bytes(range(32))


def test_without_words_nothing_is_spent(monkeypatch):
    """Here the package is missing."""

    def missing():
        raise ImportError("randomness='secure' needs the package cryptography")

    monkeypatch.setattr(_keystream, "_ciphers", missing)
    model = compiled()
    with pytest.raises(ImportError, match="needs the package"):
        fitted(model)
    assert model.num_releases == 0


# ---------------------------------------------------------------------- what is said of it


def test_the_plan_says_so_and_older_plans_still_load(twice):
    """Its price is that of the plan that does not; plans without it are written as before."""
    plan = twice[0].privacy_plan
    plain = plan.replace(randomness="")
    written = json.loads(json.dumps(plan.to_json()))
    assert written["randomness"] == "secure"
    assert PrivacyPlan.from_json(written) == plan
    assert "randomness" not in plain.to_json()
    assert PrivacyPlan.from_json(plain.to_json()) == plain
    assert plan.dp_event == plain.dp_event
    with pytest.raises(ValueError, match="randomness='fast' is unknown"):
        plan.replace(randomness="fast")


def test_the_report_says_which_releases_are_secure():
    """All, some or none of them."""
    plain = PrivacyPlan(FullBatch(), 1.0, 1, l2_norm_clip=1.0)
    secure = plain.replace(randomness="secure")

    def text_of(*plans):
        ledger = PrivacyLedger()
        for plan in plans:
            ledger.confirm(ledger.reserve(plan, 1))
        report = PrivacyReport.from_ledger(ledger, delta=1e-5)
        said = [one.get("randomness", "") for one in report.to_json()["releases"]]
        assert said == [plan.randomness for plan in plans]
        return " ".join(str(report).split())

    how = "; noise, and samples that fit drew itself, from a cryptographic generator"
    assumes = "the pseudo-random generator: the proof assumes true randomness."
    every, some, none = text_of(secure), text_of(secure, plain), text_of(plain)
    assert how in every
    assert "pseudo-random" not in every
    assert some.count(how) == 1
    assert f"{assumes} Only the releases that say so" in some
    assert none.endswith(assumes)
    assert "cryptographic" not in none


def test_single_releases_say_so_too():
    """Their noise is the operating system's, unless they are seeded."""
    for seed, said in ((None, "secure"), (3, "")):
        layer = preprocessing.PrivateStandardize(-1.0, 1.0)
        layer.adapt(X, noise_multiplier=1.0, seed=seed)
        assert layer.ledger.entries[0].plan.randomness == said


def test_a_seed_and_other_values_are_refused():
    model = Indicator(NUM, seed=3)
    with pytest.raises(ValueError, match=r"^randomness='secure', but the model has a seed"):
        model.compile(toy.sgd(NOISE), randomness="secure")
    assert model.optimizer is None
    with pytest.raises(ValueError, match="randomness='quantum' is unknown; pass one of 'secure'"):
        compiled(randomness="quantum")


def test_a_saved_model_stays_secure(tmp_path):
    model = toy.toy(1.0, randomness="secure")
    model.save(tmp_path / "model.keras")
    loaded = dpvi.load_model(tmp_path / "model.keras")
    assert internals.settings_of(loaded).randomness == "secure"
