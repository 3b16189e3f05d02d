"""Each abstraction of the house, from outside the package: one class (or function) and one registration."""

import dataclasses
import threading
from typing import ClassVar

import dp_accounting
import numpy as np
import pytest
from support import statistics
from support.steps import Indicator

import tfp_dpvi as dpvi
from tfp_dpvi import gradients, privacy, sampling, training
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import JointRelease
from tfp_dpvi.optimizers import DPKerasSGDOptimizer

WIDTH, CLIP = 3, 0.5


# ---------------------------------------------------------------------- a joint release of shape [d, d]


class Scatter(JointRelease):
    """The sum of outer products of clipped gradients, `psi psi^T / 2`: A = C^2 / 2, D = C^2 / sqrt(2) in Frobenius norm."""

    name, shape, noise_ratio = "scatter", (WIDTH, WIDTH), 2.0
    sensitivity = privacy.Sensitivity(CLIP**2 / 2, CLIP**2 / 2**0.5)

    def sum_of(self, per_example):
        (psi,) = per_example.gradients
        return tf.einsum("ni,nj->ij", psi, psi) / 2

    def initial(self):
        zeros = tf.zeros(self.shape, tf.float64)
        return {"sum": zeros, "squares": zeros, "steps": tf.zeros([], tf.int64)}

    def accumulate(self, total, released):
        in_window = tf.cast(released.step >= 2, tf.float64)  # The first two steps are burn-in.
        mean = in_window * tf.cast(released.mean, tf.float64)
        return {
            "sum": total["sum"] + mean,
            "squares": total["squares"] + mean**2,
            "steps": total["steps"] + tf.cast(in_window, tf.int64),
        }


def fit_with(metrics, noise, x, steps=5, **settings):
    model = Indicator(WIDTH)
    model.compile(
        DPKerasSGDOptimizer(0.0, l2_norm_clip=CLIP, noise_multiplier=noise),
        metrics=metrics,
        **settings,
    )
    model.fit(x, batch_size=len(x), epochs=1, steps_per_epoch=steps, verbose=0)
    return model


@pytest.mark.parametrize("jit_compile", [False, True])
def test_a_matrix_is_released_with_the_gradient_and_accumulated(jit_compile):
    """Without noise the window's sum is the sum over records of clipped outer products, steps 2, 3 and 4."""
    x = np.random.default_rng(0).normal(size=(20, WIDTH)).astype("float32")
    model = fit_with([Scatter()], 0.0, x, jit_compile=jit_compile)
    psi = -x * np.minimum(1.0, CLIP / np.linalg.norm(x, axis=1, keepdims=True))
    found = model.accumulated["scatter"]
    assert int(found["steps"]) == 3
    np.testing.assert_allclose(found["sum"], 3 * (psi.T @ psi / 2) / 20, rtol=1e-5)


def check_noise_of_the_matrix(stated_ratio):
    x, z, steps = np.zeros((10, WIDTH), "float32"), 3.0, 1002
    model = fit_with([Scatter()], z, x, steps=steps)
    scores = (
        model.accumulated["scatter"]["squares"].numpy() / (stated_ratio * z * CLIP**2 / 2 / 10) ** 2
    )
    statistics.standard_score((scores.sum() - 9000) / np.sqrt(2 * 9000), "noise of the matrix")
    return model.privacy_plan, model.privacy_report(1e-5)


def test_the_matrix_has_its_own_noise_and_its_price():
    """C1, C4: noise of ratio x z x A on every entry, and one price for both releases. False alarms: 1e-9 (one p-value)."""
    plan, report = check_noise_of_the_matrix(2.0)
    joint = 1 / np.sqrt(1 / 3.0**2 + 1 / (2.0 * 3.0) ** 2)  # Both in units of their own A.
    events = dp_accounting.SelfComposedDpEvent(
        dp_accounting.GaussianDpEvent(joint), plan.num_releases
    )
    accountant = dp_accounting.pld.PLDAccountant(value_discretization_interval=1e-3)
    assert plan.epsilon(1e-5) == pytest.approx(
        accountant.compose(events).get_epsilon(1e-5), rel=2e-3
    )
    assert "scatter" in str(report)


def test_ten_percent_less_noise_on_the_matrix_would_be_caught():
    with pytest.raises(AssertionError, match="noise of the matrix"):
        check_noise_of_the_matrix(2.2)


# ---------------------------------------------------------------------- a privatised metric


class Longest(dpvi.metrics.PrivateMetric):
    def __init__(self):
        super().__init__(0.0, 1.0, name="longest")

    def record_values(self, per_example):
        return tf.reduce_max(tf.abs(per_example.gradients[0]), axis=1)


def test_a_metric_of_clipped_gradients_is_one_method():
    x = np.eye(WIDTH, dtype="float32")
    model = Indicator(WIDTH)
    model.compile(DPKerasSGDOptimizer(l2_norm_clip=CLIP, noise_multiplier=0.0), metrics=[Longest()])
    history = model.fit(x, batch_size=3, epochs=1, verbose=0).history
    assert history["longest"] == [pytest.approx(CLIP)]


# ---------------------------------------------------------------------- a sampler with a scheme of its own


@dataclasses.dataclass(frozen=True)
class EveryOther(privacy.FullBatch):
    """All records of one half, fixed in advance, in every step: priced like full batches."""

    name: ClassVar[str] = "every_other"

    def describe(self):
        return "every other record, fixed in advance, in every step"


class EveryOtherSampler(sampling.Sampler):
    def __init__(self, num_available, num_records, batch_size, physical_batch_size):
        self.num_available, self.physical_batch_size = num_available, (num_available + 1) // 2

    scheme = EveryOther()

    @property
    def identity(self):
        return ("every_other", self.num_available)

    def for_each_batch(self, key, body, initial):
        indices = tf.range(0, self.num_available, 2, dtype=tf.int64)
        return body(initial, indices, tf.ones_like(indices, tf.bool))


sampling.register_sampler("every_other", EveryOtherSampler)


def test_a_sampler_is_one_class_and_one_registration():
    model = Indicator(4)
    model.compile(DPKerasSGDOptimizer(1.0, l2_norm_clip=1.0, noise_multiplier=0.0))
    model.fit(
        np.eye(4, dtype="float32"),
        batch_size=2,
        epochs=1,
        steps_per_epoch=1,
        sampling="every_other",
        verbose=0,
    )
    np.testing.assert_allclose(model.v, [0.5, 0.0, 0.5, 0.0])
    assert model.privacy_plan.sampling == EveryOther()
    assert "every other record" in str(model.privacy_report(1e-5))
    assert model.privacy_ledger.entries[0].plan == model.privacy_plan.replace(num_releases=1)


# ---------------------------------------------------------------------- a clipping scheme


def _half(squared_norms, bound, layers):
    norm = tf.sqrt(tf.add_n(squared_norms))
    return [0.5 * tf.where(norm > bound, bound / norm, tf.ones_like(norm))] * len(layers)


gradients.register_clipping("half", _half)


def _too_long(squared_norms, bound, layers):
    return [tf.fill(tf.shape(squared_norms[0]), tf.cast(7.0, squared_norms[0].dtype))] * len(layers)


gradients.register_clipping("too_long", _too_long)


@pytest.mark.parametrize(("clipping", "length"), [("half", 0.5), ("too_long", 1.0)])
def test_a_clipping_scheme_is_one_function_and_one_registration(clipping, length):
    """C3: whatever the scheme says, no gradient is longer than the bound."""
    model = Indicator(2)
    model.compile(
        DPKerasSGDOptimizer(1.0, l2_norm_clip=1.0, noise_multiplier=0.0, clipping=clipping)
    )
    model.fit(np.array([[30.0, 40.0]], "float32"), batch_size=1, epochs=1, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(model.v), length, rtol=1e-6)


def _by_the_longest(squared_norms, bound, layers):
    longest = tf.sqrt(tf.reduce_max(tf.add_n(squared_norms)))
    return [bound / longest] * len(layers)


def _no_number(squared_norms, bound, layers):
    return [tf.where(norms > 100.0, np.nan, 1.0) for norms in squared_norms]


gradients.register_clipping("by_the_longest", _by_the_longest)
gradients.register_clipping("no_number", _no_number)


@pytest.mark.parametrize(
    ("clipping", "weights"), [("by_the_longest", [1.0, 1.0]), ("no_number", [0.0, 0.5])]
)
def test_a_scheme_sees_one_example_and_its_mistakes_are_bounded(clipping, weights):
    """C3, C8: a factor that would depend on other records, or is no number, moves nobody else's gradient."""
    clip = gradients.Clip(1.0, clipping)
    (factors,) = clip.factors([tf.constant([900.0, 0.25])])
    np.testing.assert_allclose(factors * [30.0, 0.5], weights, rtol=1e-6)


# ---------------------------------------------------------------------- what is refused of them


class Writes(Scatter):
    def __init__(self):
        self.held = tf.Variable(0.0)

    def sum_of(self, per_example):
        self.held.assign_add(tf.reduce_sum(per_example.losses))
        return super().sum_of(per_example)


class WrongShape(Scatter):
    def sum_of(self, per_example):
        return tf.reduce_sum(per_example.losses)


@pytest.mark.parametrize(
    ("release", "words"), [(Writes, "writes to a variable"), (WrongShape, "its stated shape")]
)
def test_a_joint_release_that_is_not_as_stated_is_refused(release, words):
    with pytest.raises(ValueError, match=words):
        fit_with([release()], 1.0, np.zeros((10, WIDTH), "float32"))


def test_names_are_taken_once():
    with pytest.raises(ValueError, match="registered already"):
        sampling.register_sampler("poisson", EveryOtherSampler)
    with pytest.raises(ValueError, match="registered already"):
        gradients.register_clipping("flat", _half)


# ---------------------------------------------------------------------- a training loop of one's own


def test_a_loop_of_ones_own_spends_what_fit_spends():
    """The docstring of `training.make_step`: the same steps as `fit`, charged and stopped by the budget in the same way."""
    x = np.random.default_rng(0).normal(size=(40, WIDTH)).astype("float32")
    ledger = privacy.PrivacyLedger(budget_epsilon=1.0, budget_delta=1e-5)
    model = Indicator(WIDTH, seed=3)
    model.compile(
        DPKerasSGDOptimizer(0.1, l2_norm_clip=CLIP), epsilon=1.0, delta=1e-5, ledger=ledger
    )
    data = model.make_data(x, batch_size=8)
    mechanism = model.mechanism(data).calibrated(ledger, epsilon=1.0, delta=1e-5, num_releases=10)
    step = training.make_step(mechanism, model.optimizer, model.trainable_variables)
    state, key = training.initial_state(mechanism), training.new_key(3)
    for number in range(10):
        with ledger.reserved(mechanism.plan(1)):
            state = step(state, data.tensors, key)
        assert ledger.num_releases == number + 1
    assert 0.97 < ledger.epsilon(1e-5) <= 1.0
    with pytest.raises(privacy.BudgetExhaustedError), ledger.reserved(mechanism.plan(10)):
        raise AssertionError("must not run")

    other = Indicator(WIDTH, seed=3)
    other.compile(DPKerasSGDOptimizer(0.1, l2_norm_clip=CLIP), epsilon=1.0, delta=1e-5)
    other.fit(x, batch_size=8, epochs=2, verbose=0)
    np.testing.assert_allclose(model.v, other.v, rtol=1e-6)
    assert other.privacy_plan.noise_multiplier == pytest.approx(
        mechanism.noise_multiplier, rel=1e-9
    )


def test_a_step_needs_its_noise():
    model = Indicator(WIDTH)
    model.compile(DPKerasSGDOptimizer(0.1, l2_norm_clip=CLIP), epsilon=1.0, delta=1e-5)
    mechanism = model.mechanism(model.make_data(np.zeros((5, WIDTH), "float32"), batch_size=2))
    assert mechanism.sensitivity == privacy.Sensitivity(1.0, 2.0), (
        "stated before anything is traced"
    )
    with pytest.raises(ValueError, match="calibrated"):
        training.make_step(mechanism, model.optimizer, model.trainable_variables)


def step_of(model, x, **settings):
    model.compile(DPKerasSGDOptimizer(1.0, l2_norm_clip=1.0, noise_multiplier=0.0))
    data = model.make_data(x, batch_size=len(x) - 1)
    mechanism = model.mechanism(data)
    step = training.make_step(mechanism, model.optimizer, model.trainable_variables, **settings)
    return data, lambda records: step(
        training.initial_state(mechanism), records, training.new_key()
    )


def test_a_step_takes_the_records_that_it_was_made_for():
    """Fewer rows than the sampler draws from: XLA would put the last record in place of all that are missing."""
    data, step = step_of(Indicator(WIDTH), np.zeros((10, WIDTH), "float32"))
    with pytest.raises(ValueError, match="7 rows"):
        step({"x": data.tensors["x"][:7]})


@pytest.mark.slow  # As `fit`'s in `models/test_varying_shapes.py`.
def test_a_step_by_xla_is_looked_at_like_that_of_fit():
    """Eigenvalues of a batch take as many rounds as the slowest matrix: one record would change the others'."""

    class Eigenvalues(Indicator):
        def record_loss(self, x):
            values = tf.linalg.eigvalsh(tf.reshape(x, [2, 2]) + tf.transpose(tf.reshape(x, [2, 2])))
            return tf.reduce_sum(values) + super().record_loss(x)

    data, step = step_of(Eigenvalues(4), np.ones((10, 4), "float32"), jit_compile=True)
    with pytest.raises(ValueError, match="slowest matrix"):
        step(data.tensors)


def test_two_threads_cannot_fit_one_model():
    model, x = Indicator(WIDTH), np.zeros((10, WIDTH), "float32")
    model.compile(
        DPKerasSGDOptimizer(1.0, l2_norm_clip=1.0, noise_multiplier=1.0), steps_per_execution=1
    )
    refused = []

    class Other(dpvi.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            def fit():
                try:
                    model.fit(x, batch_size=5, verbose=0)
                except RuntimeError as error:
                    refused.append(str(error))

            thread = threading.Thread(target=fit)
            thread.start()
            thread.join()

    model.fit(x, batch_size=5, epochs=1, verbose=0, callbacks=[Other()])
    assert len(refused) == 2
    assert "in another thread" in refused[0]
    assert model.privacy_ledger.num_releases == 2
