"""What `fit` and `compile` promise: the budget, the plan, what is shown, and what may be passed."""

from __future__ import annotations

import gc
import weakref

import dp_accounting
import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from support.siblings import slow
from support.toy import Toy, adam, records

import tfp_dpvi as dpvi
from tfp_dpvi import keras
from tfp_dpvi.privacy import BudgetExhaustedError, FullBatch, PoissonSampling, PrivacyPlan

tfd = tfp.distributions

X, Y = records()
TARGET = {"epsilon": 1.0, "delta": 1e-5, "jit_compile": False}
QUIET = {"delta": 1e-5, "jit_compile": False}


def logistic(**kwargs):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), sample_shape=3)})

    def likelihood(params, x):
        return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]))

    return dpvi.DPVI(prior, likelihood, **kwargs, clipping="flat")


def test_a_fit_lets_go_of_the_graphs_of_models_before():
    """TFP's cache of bijections kept all of them, 12 MB a fit."""
    graphs = []

    def traced(x):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return tfp.bijectors.Exp().forward(x)

    tf.function(traced).get_concrete_function(tf.TensorSpec([]))
    kept = []
    for fit in (lambda: None, lambda: fitted(noise=1.0)):
        fit()
        gc.collect()
        kept.append(graphs[0]() is not None)
    assert kept == [True, False]


def fitted(fit=None, model=None, *, noise=None, **compile_arguments):
    """To a target, or with a noise multiplier, which need not be looked for."""
    model = model or Toy()
    model.compile(
        optimizer=adam(noise), **{**(TARGET if noise is None else QUIET), **compile_arguments}
    )
    history = model.fit(X, Y, **{"batch_size": 50, "epochs": 2, "verbose": 0, **(fit or {})})
    return model, history


def values(model):
    return [v.numpy().copy() for v in model.trainable_variables]


# ---------------------------------------------------------------------- the budget (C6)


@pytest.fixture(scope="module")
def calibrated():
    """To epsilon 1; left as it is."""
    return fitted()


@pytest.fixture(scope="module")
def seeded():
    """With a noise multiplier and a seed; left as it is."""
    return fitted(model=Toy(seed=3), noise=3.0)


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_calibrated_fit_spends_its_target_and_not_more(accountant, calibrated):
    model, history = calibrated if accountant == "pld" else fitted(accountant=accountant)
    spent = model.privacy_report().epsilon
    assert 0.99 <= spent <= 1.0
    assert history.history["epsilon"][-1] == pytest.approx(spent, rel=1e-9)
    assert history.history["epsilon"][0] < history.history["epsilon"][1]


def test_the_spent_epsilon_is_that_of_the_event_by_dp_accounting(calibrated):
    model, _ = calibrated
    plan = model.privacy_plan
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(
            0.25, dp_accounting.GaussianDpEvent(plan.noise_multiplier)
        ),
        8,
    )
    accountant = dp_accounting.pld.PLDAccountant().compose(event)
    assert model.privacy_report().epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert model.privacy_ledger.num_releases == 8


def test_nothing_is_left_for_a_second_fit(calibrated):
    model, _ = calibrated
    before, releases = values(model), model.privacy_ledger.num_releases
    with pytest.raises(BudgetExhaustedError, match="planned_epochs"):
        model.fit(X, Y, batch_size=50, epochs=1, verbose=0)
    assert model.privacy_ledger.num_releases == releases
    for was, now in zip(before, values(model), strict=True):
        np.testing.assert_array_equal(was, now)


def test_compiling_again_does_not_reset_the_books():
    model, _ = fitted(accountant="rdp")
    model.compile(optimizer=adam(), accountant="rdp", **TARGET)
    with pytest.raises(BudgetExhaustedError):
        model.fit(X, Y, batch_size=50, verbose=0)
    model.compile(optimizer=adam(), accountant="rdp", **{**TARGET, "epsilon": 2.0})
    model.fit(X, Y, batch_size=50, epochs=2, verbose=0)
    assert 1.98 <= model.privacy_report().epsilon <= 2.0
    assert model.privacy_ledger.num_releases == 16


def test_planned_epochs_keep_budget_for_later_fits():
    model, _ = fitted(planned_epochs=4, accountant="rdp")
    first = model.privacy_plan
    assert 0.5 < model.privacy_report().epsilon < 0.9
    model.fit(X, Y, batch_size=50, epochs=2, verbose=0)
    assert 0.99 <= model.privacy_report().epsilon <= 1.0
    assert model.privacy_plan.noise_multiplier == pytest.approx(first.noise_multiplier, rel=0.01)
    with pytest.raises(BudgetExhaustedError):
        model.fit(X, Y, batch_size=50, verbose=0)


def test_a_fit_longer_than_planned_is_refused():
    model = Toy()
    model.compile(optimizer=adam(), planned_epochs=4, **TARGET)
    with pytest.raises(ValueError, match="planned_epochs=4"):
        model.fit(X, Y, batch_size=50, epochs=5, verbose=0)
    assert model.privacy_ledger.num_releases == 0


def test_an_early_stop_leaves_the_rest():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 0

    model, history = fitted({"epochs": 4, "callbacks": [Stop()]}, accountant="rdp")
    assert len(history.history["epsilon"]) == 1
    assert model.privacy_ledger.num_releases == 4
    spent = model.privacy_report().epsilon
    assert spent == pytest.approx(history.history["epsilon"][0], rel=1e-3)
    assert spent < 0.8
    model.fit(X, Y, batch_size=50, epochs=2, verbose=0)
    assert 0.99 <= model.privacy_report().epsilon <= 1.0


def test_with_a_noise_multiplier_fits_add():
    model = Toy()
    model.compile(optimizer=adam(3.0), **QUIET)
    model.fit(X, Y, batch_size=50, epochs=1, verbose=0)
    once = model.privacy_report().epsilon
    model.fit(X, Y, batch_size=50, epochs=1, verbose=0)
    twice = model.privacy_report().epsilon
    plan = PrivacyPlan(sampling=PoissonSampling(0.25), noise_multiplier=3.0, num_releases=8)
    assert once < twice < 2 * once
    assert twice == pytest.approx(plan.epsilon(1e-5), rel=1e-3)


def test_an_interrupted_step_has_been_paid_for():
    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyboardInterrupt

    model = Toy()
    model.compile(optimizer=adam(), **TARGET)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, Y, batch_size=50, epochs=2, verbose=0, callbacks=[Break()])
    assert model.privacy_ledger.num_releases == 4
    assert model.privacy_report().epsilon > 0.4


# ---------------------------------------------------------------------- the plan (C1, C4)


def test_a_batch_of_all_records_is_accounted_for_as_such():
    model, _ = fitted({"batch_size": 200})
    assert isinstance(model.privacy_plan.sampling, FullBatch)
    assert model.privacy_plan.num_releases == 2
    sigma = model.privacy_plan.noise_multiplier / np.sqrt(2)
    accountant = dp_accounting.pld.PLDAccountant().compose(dp_accounting.GaussianDpEvent(sigma))
    assert model.privacy_report().epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_a_declared_number_of_records_replaces_the_true_one_everywhere():
    model, _ = fitted({"num_records": 400})
    assert model.privacy_plan.sampling == PoissonSampling(50 / 400)
    assert model.privacy_plan.num_releases == 2 * 8
    assert "400" in str(model.privacy_report())
    assert "200" not in str(model.privacy_report())


def test_steps_per_epoch_counts_releases():
    model, _ = fitted({"steps_per_epoch": 7, "epochs": 3, "initial_epoch": 1})
    assert model.privacy_ledger.num_releases == 14
    assert 0.99 <= model.privacy_report().epsilon <= 1.0


@pytest.mark.parametrize("steps", [slow(1), 3, slow(100)])
def test_steps_per_execution_changes_no_count(steps):
    model, history = fitted({"steps_per_epoch": 7}, steps_per_execution=steps, noise=3.0)
    assert model.privacy_ledger.num_releases == 14
    assert int(model.optimizer.iterations) == 14
    assert history.history["epsilon"][-1] == pytest.approx(model.privacy_report().epsilon, rel=1e-9)


def test_replace_one_costs_more_with_full_batches():
    relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    model, _ = fitted({"batch_size": 200}, neighboring_relation=relation)
    other, _ = fitted({"batch_size": 200})
    assert model.privacy_plan.noise_multiplier == pytest.approx(
        2 * other.privacy_plan.noise_multiplier, rel=0.02
    )
    assert "replace" in str(model.privacy_report())


def test_fits_under_two_adjacencies_do_not_compose():
    model, _ = fitted({"batch_size": 200})
    model.compile(
        optimizer=adam(),
        epsilon=3.0,
        **QUIET,
        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
    )
    with pytest.raises(ValueError, match=r"(?i)adjacenc|neighbo"):
        model.fit(X, Y, batch_size=200, verbose=0)
    assert model.privacy_ledger.num_releases == 2


# ---------------------------------------------------------------------- what is shown (C7)


def test_history_shows_epsilon_alone(capsys):
    model, history = fitted({"verbose": 1}, noise=3.0)
    assert set(history.history) == {"epsilon"}
    shown = capsys.readouterr().out
    assert "epsilon: " in shown
    assert "loss" not in shown
    assert not internals.holds_a_fit(model)  # Neither key nor records.


@pytest.mark.slow  # Of the toy below; of DPVI's predictions in `test_habits.py`.
def test_public_validation_data_give_a_loss_and_metrics():
    model, history = fitted(
        {"validation_data": (X[:64], Y[:64]), "validation_is_public": True},
        logistic(),
        validation_metrics=["mae"],
        noise=3.0,
    )
    assert set(history.history) == {"epsilon", "val_loss", "val_mean_absolute_error"}
    by_hand = -np.mean(model.predictive(X[:64]).log_prob(Y[:64]))
    assert history.history["val_loss"][-1] == pytest.approx(by_hand, rel=1e-4)
    mae = np.mean(np.abs(model.predict(X[:64]) - Y[:64]))
    assert history.history["val_mean_absolute_error"][-1] == pytest.approx(mae, rel=1e-4)
    assert "NOT PRIVATE" not in str(model.privacy_report())


def test_losses_of_validation_are_traced_once():
    """The check before the fit, its epochs and a later `evaluate` share one trace; as many as 16 records took three."""
    traced = []

    class Counting(Toy):
        def test_losses(self, x, y):
            traced.append(x.shape)
            return super().test_losses(x, y)

    model, _ = fitted(
        {"validation_data": (X[:64], Y[:64]), "validation_is_public": True}, Counting(), noise=3.0
    )
    model.evaluate(X, Y, verbose=0)
    assert len(traced) == 1


def test_unsafe_training_metrics_are_named_so_and_reported():
    model, history = fitted(
        {"batch_size": 200, "epochs": 3}, unsafe_training_metrics=True, noise=3.0
    )
    assert set(history.history) == {"epsilon", "unsafe_loss"}
    assert 0.1 < history.history["unsafe_loss"][-1] < 2.0
    report = model.privacy_report()
    assert not report.private
    assert report.to_json()["private"] is False
    assert any("unsafe_training_metrics" in warning for warning in report.to_json()["warnings"])
    assert "unsafe_training_metrics" in str(report)
    assert "The results are" not in str(report)


def test_a_run_without_noise_says_that_it_is_not_private():
    model = Toy()
    model.compile(optimizer=adam(0.0, clip=float("inf")), **QUIET)
    history = model.fit(X, Y, batch_size=50, verbose=0)
    assert history.history["epsilon"] == [float("inf")]
    assert "NOT PRIVATE" in str(model.privacy_report())


def test_a_seeded_run_says_so(seeded):
    model, _ = seeded
    assert "seeded: not private" in str(model.privacy_report())


def test_without_a_delta_no_epsilon_is_shown():
    model = Toy()
    model.compile(optimizer=adam(3.0), jit_compile=False)
    history = model.fit(X, Y, batch_size=50, verbose=0)
    assert "epsilon" not in history.history
    with pytest.raises(ValueError, match="delta"):
        model.privacy_report()
    assert model.privacy_report(delta=1e-5).epsilon > 0


def test_the_report_is_json_too(seeded):
    import json

    model, _ = seeded
    report = model.privacy_report().to_json()
    report = json.loads(report) if isinstance(report, str) else json.loads(json.dumps(report))
    assert "schema_version" in report


# ---------------------------------------------------------------------- what may be passed


def test_dicts_and_tuples_of_arrays():
    def likelihood(params, x):
        a, b = x["pair"]
        return tfd.Bernoulli(
            logits=tf.linalg.matvec(a, params) + b + tf.gather(tf.zeros(4), x["group"])
        )

    x = {"pair": (X, X[:, 1]), "group": np.arange(200) % 4}
    model = dpvi.DPVI(tfd.Sample(tfd.Normal(0.0, 1.0), 3), likelihood, clipping="flat")
    model.compile(optimizer=adam(3.0), **QUIET)
    model.fit(x, Y, batch_size=50, verbose=0)
    assert model.predict(x).shape == (200,)
    assert model.predictive(x).log_prob(Y).shape == (200,)


def test_several_outputs():
    def likelihood(params, x):
        return tfd.JointDistributionNamed(
            {
                "class": tfd.Bernoulli(logits=tf.linalg.matvec(x, params)),
                "size": tfd.Normal(x[:, 0], 1.0),
            }
        )

    model = dpvi.DPVI(tfd.Sample(tfd.Normal(0.0, 1.0), 3), likelihood, clipping="flat")
    model.compile(optimizer=adam(3.0), **QUIET)
    model.fit(X, {"class": Y, "size": X[:, 1]}, batch_size=50, verbose=0)
    assert model.privacy_ledger.num_releases == 4


def test_whole_records_without_y():
    model = dpvi.DPVI(tfd.Normal(0.0, 10.0), lambda mean: tfd.Normal(mean, 1.0), clipping="flat")
    model.compile(optimizer=adam(clip=10.0, rate=0.3), epsilon=20.0, **QUIET)
    model.fit(X[:, 0] + 3.0, batch_size=200, epochs=30, verbose=0)
    assert float(
        model.surrogate_posterior.sample(100, seed=(0, 1)).numpy().mean()
    ) == pytest.approx(3.0, abs=0.5)
    assert model.predictive().sample(7).shape == (7,)
    with pytest.raises(ValueError, match="whole records"):
        model.predict(X)


def test_double_precision_runs_through():
    prior = tfd.Sample(tfd.Normal(tf.zeros([], tf.float64), 1.0), 3)
    model = dpvi.DPVI(
        prior, lambda params, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, params)), clipping="flat"
    )
    model.compile(optimizer=adam(3.0), **QUIET)
    model.fit(X.astype("float64"), Y, batch_size=50, verbose=0)
    assert {v.dtype for v in model.trainable_variables} == {tf.float64}
    assert model.predict(X).dtype == np.float64


def test_records_of_weight_zero_have_no_say():
    weight = np.where(np.arange(200) < 100, 1.0, 0.0)
    results = []
    for x in (X, np.concatenate([X[:100], X[100:] + 50.0])):
        model = Toy(seed=5)
        model.compile(optimizer=adam(3.0), **QUIET)
        model.fit(x, Y, batch_size=50, sample_weight=weight, verbose=0)
        results.append(values(model))
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_bad_records_have_no_say_without_the_check():
    results = []
    for bad in (np.nan, [np.inf, -np.inf, np.inf]):
        x = X.copy()
        x[:5] = bad
        model = Toy(seed=5)
        model.compile(optimizer=adam(3.0), **QUIET)
        model.fit(x, Y, batch_size=50, validate=False, verbose=0)
        results.append(np.concatenate([np.ravel(v) for v in values(model)]))
        assert np.isfinite(results[-1]).all()
    np.testing.assert_array_equal(results[0], results[1])


def test_eager_steps_are_the_same():
    results = []
    for eager in (False, True):
        model = Toy(seed=5)
        model.compile(optimizer=adam(3.0), run_eagerly=eager, **QUIET)
        model.fit(X, Y, batch_size=50, steps_per_epoch=3, verbose=0)
        results.append(np.concatenate([np.ravel(v) for v in values(model)]))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-4, atol=1e-6)


@pytest.mark.slow  # `test_pairing.py` and `test_distributed.py` fit with averages.
def test_averaged_weights_are_put_in_place_at_the_end():
    model = Toy(seed=5)
    model.compile(optimizer=adam(3.0, use_ema=True, ema_momentum=0.5), **QUIET)
    model.fit(X, Y, batch_size=50, epochs=2, verbose=0)
    other = Toy(seed=5)
    other.compile(optimizer=adam(3.0), **QUIET)
    other.fit(X, Y, batch_size=50, epochs=2, verbose=0)
    assert not np.allclose(values(model)[0], values(other)[0])


# ---------------------------------------------------------------------- DPModel


class Regression(dpvi.DPModel):
    """A plain Keras model: one method says what one record's loss is."""

    def __init__(self, penalty=0.0, **kwargs):
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(1)
        self.penalty = penalty

    def call(self, x):
        out = self.dense(x)
        self.add_loss(self.penalty * tf.reduce_sum(tf.square(out)))
        return out

    def record_loss(self, x, y):
        return tf.square(self(x[None])[0, 0] - tf.cast(y, x.dtype))


def test_a_subclass_says_one_records_loss():
    model = Regression()
    model.compile(optimizer=adam(rate=0.1), epsilon=10.0, accountant="rdp", **QUIET)
    model.fit(X, X[:, 0], batch_size=100, epochs=40, verbose=0)
    kernel = model.dense.kernel.numpy()[:, 0]
    np.testing.assert_allclose(kernel, [1.0, 0.0, 0.0], atol=0.3)
    assert model.privacy_report().epsilon <= 10.0


def test_a_subclass_can_be_evaluated():
    model = Regression()
    model.compile(optimizer=adam(3.0), **QUIET)
    by_hand = np.mean(np.square(model(X).numpy()[:, 0] - X[:, 0]))
    assert model.evaluate(X, X[:, 0], verbose=0, return_dict=True)["loss"] == pytest.approx(
        by_hand, rel=1e-5
    )
    assert model.privacy_ledger.num_releases == 0


def test_add_loss_goes_through_the_clip():
    model = Regression(penalty=1e6)
    model(X[:1])
    gradient = internals.step_gradients(model, tf.constant([1, 2], tf.int64), 200).record_gradient
    records = {"x": tf.constant(X[:20]), "y": tf.constant(X[:20, 0])}
    clipped, _ = dpvi.gradients.clipped_sum(
        gradient, records, tf.ones([20], tf.bool), dpvi.gradients.Clip(0.5)
    )
    assert np.sqrt(sum(np.sum(np.square(t)) for t in clipped.tensors)) <= 20 * 0.5 * (1 + 1e-6)
    plain, _ = dpvi.gradients.clipped_sum(
        internals.step_gradients(model, tf.constant([1, 2], tf.int64), 200).record_gradient,
        records,
        tf.ones([20], tf.bool),
        dpvi.gradients.Clip(float("inf")),
    )
    assert (
        max(np.abs(t).max() for t in plain.tensors) > 1e4
    )  # The penalty is there, before the clip.


def test_a_subclass_that_says_nothing_is_told_so():
    class Silent(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x):
            return self.dense(x)

    model = Silent()
    model.compile(optimizer=adam(), **TARGET)
    with pytest.raises(NotImplementedError, match="record_loss"):
        model.fit(X, Y, verbose=0)
    assert model.privacy_ledger.num_releases == 0


# ---------------------------------------------------------------------- found in review


def test_predictions_are_whole_before_and_after_a_fit():
    model = Toy()
    model.compile(optimizer=adam(3.0), **QUIET)
    x = np.tile(X, (10, 1))
    assert model.predict(x[:10]).shape == (10,)
    before = model.evaluate(X, Y, verbose=0, batch_size=20)
    model.fit(X, Y, batch_size=4, verbose=0)  # 50 steps in one execution
    assert model.predict(x).shape == (2000,)
    assert model.predict(x, batch_size=100).shape == (2000,)
    after = model.evaluate(X, Y, verbose=0, batch_size=20)
    assert before != after
    assert after == pytest.approx(np.mean(np.square(model.predict(X) - Y)) / 2, rel=1e-4)


def test_the_first_record_is_not_looked_at_to_build_layers():
    class Curious(keras.layers.Layer):
        """Initialises itself from the first input that it sees, as ActNorm does."""

        def build(self, shape):
            self.bias = self.add_weight(name="bias", shape=[int(shape[-1])], initializer="zeros")
            self.seen = None

        def call(self, x):
            if self.seen is None:
                self.seen = np.array(x)
            return x + self.bias

    class Model(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.layer = Curious()

        def call(self, x):
            return self.layer(x)

        def record_loss(self, x, y):
            return tf.reduce_sum(tf.square(self(x[None]))) * tf.cast(y, x.dtype)

    model = Model()
    model.compile(optimizer=adam(3.0), **QUIET)
    model.fit(X + 5.0, Y, batch_size=50, verbose=0)
    np.testing.assert_array_equal(model.layer.seen, np.zeros([1, 3]))


def test_a_public_validation_loss_and_an_unsafe_one_keep_their_names():
    model = Toy()
    model.compile(optimizer=adam(3.0), validation_metrics=["mae"], **QUIET)
    data = {"validation_data": (X[:64], Y[:64]), "batch_size": 50, "verbose": 0}
    fits = []
    for how in (
        {"validation_is_public": True},
        {"unsafe_validation": True},
        {"validation_is_public": True},
    ):
        fits.append(model.fit(X, Y, **data, **how).history)
        loss, mae = (
            np.mean(f(model.predict(X[:64]) - Y[:64])) for f in (lambda e: e**2 / 2, np.abs)
        )
        kind = "unsafe_" if "unsafe_validation" in how else ""
        assert fits[-1][f"val_{kind}loss"] == [pytest.approx(loss, rel=1e-4)]
        assert fits[-1][f"val_{kind}mean_absolute_error"] == [pytest.approx(mae, rel=1e-4)]
        assert len(fits[-1]) == 3
        assert ("NOT PRIVATE" in str(model.privacy_report())) == (len(fits) > 1)
    assert "unsafe_validation" in str(model.privacy_report())


def test_a_clip_is_refused_under_a_fit_and_used_and_reported_from_the_next_one_on():
    """C1, C3: what a fit was priced for is a value of its own, so that a callback cannot change it."""
    ends = []
    for changed in (False, True):
        model = Toy(seed=1)
        model.compile(optimizer=adam(0.0), **QUIET)

        def change(epoch, logs, model=model, changed=changed):
            if epoch == 1 and changed:
                with pytest.raises(RuntimeError, match="l2_norm_clip was assigned while fit runs"):
                    model.optimizer.l2_norm_clip = 0.25

        callback = keras.callbacks.LambdaCallback(on_epoch_begin=change)
        model.fit(X, Y, batch_size=50, epochs=3, verbose=0, callbacks=[callback])
        assert model.privacy_plan.l2_norm_clip == 1.0
        ends.append(values(model))
    np.testing.assert_array_equal(*ends)
    model.optimizer.l2_norm_clip = 0.25
    model.fit(X, Y, batch_size=50, verbose=0)
    assert model.privacy_plan.l2_norm_clip == 0.25
    assert len(internals.traced_steps(model)) == 2
