"""The optimizer of a pilot: scoring steps from its inputs, or Adam where they do not apply."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.data import Binary, Categorical, Integer, Schema
from tfp_dpvi.optimizers import DPKerasAdamOptimizer, ScoringOptimizer

TARGET = {"epsilon": 8.0, "delta": 1e-5}
NUM = 400
KERAS = dpvi.keras.callbacks


def slope(params, x):
    return tfd.Normal(params * x, 1.0)


def model_of(like=slope, **settings):
    return dpvi.DPVI(tfd.Normal(0.0, 1.0), like, seed=3, **settings)


def records(scale=1.0):
    generator = np.random.default_rng(0)
    x = scale * generator.normal(size=NUM).astype("float32")
    return x, (0.5 * x + generator.normal(size=NUM)).astype("float32")


def test_the_steps_are_those_of_compile_without_an_optimizer():
    """The pilot's inputs take the place of public ones: the same posterior to the last digit."""
    x, y = records()
    with_pilot, without = model_of(), model_of()
    settings = dpvi.pilot(with_pilot, x[:100], num_records=NUM, **TARGET)
    with_pilot.compile(settings.optimizer(NUM), **TARGET)
    without.compile(**TARGET)
    steps = {"batch_size": NUM, "steps_per_epoch": 60, "verbose": 0}
    with_pilot.fit(x, y, **steps)
    without.fit(x, y, public_inputs=x[:100], **steps)
    draws = [model.posterior_sample(200, seed=0).numpy() for model in (with_pilot, without)]
    np.testing.assert_array_equal(*draws)


def test_units_of_ten_thousands_are_no_hindrance():
    """A parameter of size 5e3 under a prior of sd 1e4, which Adam would not reach in 300 steps."""
    x, y = records()
    model = dpvi.DPVI(tfd.Normal(0.0, 1e4), lambda params, x: tfd.Normal(params * x, 1e4))
    settings = dpvi.pilot(model, x, num_records=NUM, **TARGET)
    model.compile(settings.optimizer(NUM), **TARGET)
    model.fit(x, 1e4 * y, **settings.fit_settings, verbose=0)
    draws = model.posterior_sample(1000, seed=0).numpy()
    exact = 1e4 * np.sum(x * y) / np.sum(x**2)
    # The posterior's sd without noise is 1e4 / sqrt(NUM) = 500.
    assert abs(draws.mean() - exact) < 4.0 * draws.std()
    assert 400.0 < draws.std() < 1500.0
    assert not model.posterior_summary().checks.warnings


def test_the_optimizer_follows_from_the_models_clip():
    x, _ = records()
    for clipping, kind in (("paired", ScoringOptimizer), ("flat", DPKerasAdamOptimizer)):
        settings = dpvi.pilot(model_of(clipping=clipping), x, num_records=NUM, **TARGET)
        optimizer = settings.optimizer(NUM, noise_multiplier=2.0)
        assert isinstance(optimizer, kind)
        assert optimizer.noise_multiplier == 2.0
        assert settings.adam(NUM).l2_norm_clip == settings.l2_norm_clip


@pytest.mark.slow  # Six seconds of tracing.
def test_a_latent_whose_density_is_a_bound_has_adam():
    x, _ = records()

    def bounded(params, x):
        return dpvi.local.Variational(
            tfd.Normal(0.0, 1.0), lambda z: tfd.Normal(params * x + z, 1.0)
        )

    settings = dpvi.pilot(model_of(bounded), x, num_records=NUM, **TARGET)
    assert not settings.scores
    assert isinstance(settings.optimizer(NUM), DPKerasAdamOptimizer)


def test_persons_after_a_pilot_of_rows_are_refused():
    x, y = records()
    model = model_of()
    settings = dpvi.pilot(model, x, num_records=NUM, **TARGET)
    model.compile(settings.optimizer(NUM), **TARGET)
    ids = np.arange(NUM) // 2
    with pytest.raises(ValueError, match="unit_ids after dpvi"):
        model.fit(x, y, unit_ids=ids, max_rows_per_unit=2, verbose=0)
    assert model.num_releases == 0


@pytest.mark.parametrize(
    "settings", [{"clipping": "flat"}, {"gradients": "vectorized"}, {"num_draws": 2}]
)
def test_settings_of_an_optimizer_are_refused_without_one(settings):
    """Scoring steps would ignore them in silence."""
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.* is for an optimizer"):
        model_of(**settings).compile(**TARGET)


def test_what_scoring_steps_have_no_use_for_is_refused():
    settings = dpvi.calibrated.Pilot(1.0, 0.1, 0.2, batch_size=100, epochs=60)
    with pytest.raises(TypeError, match="scoring steps have no use_ema"):
        settings.optimizer(NUM, use_ema=True)
    again = ScoringOptimizer.from_config(settings.optimizer(NUM, noise_multiplier=3.0).get_config())
    assert again.noise_multiplier == 3.0


@pytest.mark.parametrize(
    "settings", [{"clipping": "flat"}, {"gradients": "vectorized"}, {"num_draws": 2}]
)
def test_a_pilots_optimizer_refuses_what_its_steps_would_ignore(settings):
    """The optimizer of one model's pilot, in a model with other settings."""
    with pytest.raises(ValueError, match=f"{next(iter(settings))}=.* is for an optimizer"):
        model_of(**settings).compile(ScoringOptimizer(), **TARGET)


def test_networks_refuse_scoring_steps():
    """As SGD with a learning rate of 1, it would train them, and diverge."""
    layers = dpvi.keras.layers
    model = dpvi.DPKerasModel(dpvi.keras.Sequential([layers.Input([1]), layers.Dense(1)]))
    with pytest.raises(ValueError, match="ScoringOptimizer is for a DPVI"):
        model.compile(ScoringOptimizer(), loss="mse", **TARGET)
    normal = tfd.JointDistributionNamed({"w": tfd.Normal(0.0, 1.0)})
    with pytest.raises(TypeError, match="DPKerasAdamOptimizer"):
        dpvi.federated.Study(normal, lambda params, x: slope(params["w"], x), ScoringOptimizer())


def test_a_surrogate_that_scoring_steps_do_not_train_says_so(caplog):
    x, y = records()
    mine = tfd.Normal(tf.Variable(3.0), 0.1)
    model = dpvi.DPVI(tfd.Normal(0.0, 1.0), slope, mine)
    model.compile(**TARGET)
    assert "surrogate_posterior is not trained" in caplog.text
    caplog.clear()
    assert model.surrogate_posterior is mine
    assert not caplog.text
    model.fit(x, y, batch_size=NUM, steps_per_epoch=60, verbose=0)
    assert not caplog.text
    assert model.surrogate_posterior is mine
    assert "scoring steps left it as it was: read `posterior`" in caplog.text


def test_a_posterior_that_is_not_there_says_so(caplog):
    """Other weights drop it; what is left is a surrogate that scoring steps did not train."""
    x, y = records()
    model = model_of()
    model.compile(**TARGET)
    model.fit(x, y, public_inputs=x[:100], batch_size=NUM, steps_per_epoch=60, verbose=0)
    model.posterior_sample(10)
    assert not caplog.text
    scoring = model._model.centred.scoring
    reached = scoring.theta.numpy()
    model.set_weights(model.get_weights())
    model.posterior_sample(10)
    assert "posterior: there is none" in caplog.text
    # A later fit starts where the first one did.
    assert abs(scoring.theta.numpy() - reached).max() > 0.1
    np.testing.assert_allclose(scoring.theta.numpy(), scoring.prior.mean, atol=1e-6)


@pytest.mark.parametrize(
    ("callback", "said"),
    [
        (lambda path: KERAS.LearningRateScheduler(lambda epoch, rate: 0.01), "no learning rate"),
        (lambda path: KERAS.ReduceLROnPlateau("epsilon"), "no learning rate"),
        (
            lambda path: KERAS.ModelCheckpoint(f"{path}/{{epoch}}.weights.h5"),
            "save the model after the fit",
        ),
        (lambda path: KERAS.EarlyStopping("kappa"), "it shows 'epsilon'. "),
    ],
)
def test_callbacks_without_effect_on_scoring_steps_are_refused(callback, said, tmp_path):
    x, y = records()
    model = model_of()
    model.compile(**TARGET)
    with pytest.raises(ValueError, match=said):
        model.fit(x, y, verbose=0, callbacks=[callback(tmp_path)])
    assert model.num_releases == 0


def test_scoring_steps_have_no_learning_rate_to_set():
    model = model_of()
    model.compile(**TARGET)
    with pytest.raises(AttributeError, match="scoring steps have none"):
        model.optimizer.learning_rate = 0.1


def test_the_last_inputs_hold_for_later_fits():
    """Those of a fit after those of a pilot, and those of a pilot after those of a fit."""
    x, y = records()
    model = model_of()
    dpvi.pilot(model, x, num_records=NUM, **TARGET)
    model.compile(noise_multiplier=5.0, delta=1e-5)
    steps = {"batch_size": NUM, "steps_per_epoch": 60, "verbose": 0}
    model.fit(x, y, public_inputs=10.0 * x, **steps)
    model.fit(x, y, **steps)
    scoring = model._model.centred.scoring
    assert np.std(scoring.likelihood.pool) > 5.0
    dpvi.pilot(model, x, num_records=NUM, **TARGET)
    model.fit(x, y, **steps)
    assert np.std(scoring.likelihood.pool) < 2.0


def test_inputs_hold_for_records_with_weights_too():
    """Steps for another kind of records took x as standard normal, and nothing said so."""
    x, y = records()
    model = model_of()
    model.compile(noise_multiplier=5.0, delta=1e-5)
    steps = {"batch_size": NUM, "steps_per_epoch": 60, "verbose": 0}
    model.fit(x, y, public_inputs=10.0 * x, **steps)
    weights = np.ones(NUM, "float32")
    model.compile(noise_multiplier=5.0, delta=1e-5)
    model.fit(x, y, sample_weight=weights, max_weight=2.0, **steps)
    assert np.std(model._model.centred.scoring.likelihood.pool) > 5.0


def test_inputs_of_a_pilot_are_missed_in_a_file_and_outlive_refused_ones():
    """Without its optimizer, a file did not say that there had been inputs."""
    x, y = records()
    model = model_of()
    dpvi.pilot(model, 10.0 * x, num_records=NUM, **TARGET)
    model.compile(noise_multiplier=5.0, delta=1e-5)
    steps = {"batch_size": NUM, "steps_per_epoch": 60, "verbose": 0}
    with pytest.raises(ValueError, match="public_inputs"):
        model.fit(x, y, public_inputs=np.stack([x, x], axis=1), **steps)
    model.fit(x, y, **steps)
    assert np.std(model._model.centred.scoring.likelihood.pool) > 5.0
    assert model.optimizer.get_config()["with_inputs"]


def test_a_pilot_takes_a_schema_of_the_inputs():
    schema = Schema({"age": Integer(17, 90), "smokes": Binary(share=0.2)})
    invented = np.stack(list(schema.simulate(1000).values()), axis=1).astype("float32")

    def likelihood(params, x):
        return tfd.Normal(tf.linalg.matvec(x / [90.0, 1.0], params), 1.0)

    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 2)
    model, other = (dpvi.DPVI(prior, likelihood, seed=3) for _ in range(2))
    settings = dpvi.pilot(model, schema, num_records=NUM, **TARGET)
    assert settings == dpvi.pilot(other, invented, num_records=NUM, **TARGET)
    with pytest.raises(ValueError, match="'ward', a Categorical: code it as Binary") as refused:
        dpvi.pilot(model, Schema({"ward": Categorical(["a", "b"])}), num_records=NUM, **TARGET)
    assert len(str(refused.value).splitlines()) <= 2


def test_inputs_that_another_model_had_are_missed(caplog):
    """A pilot of one model, and a fit of another: or of one that was saved and loaded."""
    x, y = records()
    settings = dpvi.pilot(model_of(), x, num_records=NUM, **TARGET)
    model = model_of()
    model.compile(settings.optimizer(NUM), **TARGET)
    again = ScoringOptimizer.from_config(model.optimizer.get_config())
    assert again.with_inputs
    model.make_data(x, y, batch_size=NUM)
    assert caplog.text.count("public_inputs are missing") == 1
    with_them = model_of()
    with_them.compile(again, **TARGET)
    caplog.clear()
    dpvi.pilot(with_them, x, num_records=NUM, **TARGET)
    with_them.make_data(x, y, batch_size=NUM)
    assert not caplog.text


def test_a_likelihood_that_fails_at_a_pilots_inputs_says_so():
    x = np.arange(100)
    with pytest.raises(ValueError, match="pilot: the likelihood fails at these x") as caught:
        dpvi.pilot(model_of(), x, num_records=NUM, **TARGET)
    assert "int64" in str(caught.value)
