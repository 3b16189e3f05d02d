"""The optimizer of a pilot: scoring steps from its inputs, or Adam where they do not apply."""

import numpy as np
import pytest

import tfp_dpvi as dpvi
from tfp_dpvi._tf import tfd
from tfp_dpvi.optimizers import DPKerasAdamOptimizer, ScoringOptimizer

TARGET = {"epsilon": 8.0, "delta": 1e-5}
NUM = 400


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
    with pytest.raises(TypeError, match="use_ema"):
        settings.optimizer(NUM, use_ema=True)
    again = ScoringOptimizer.from_config(settings.optimizer(NUM, noise_multiplier=3.0).get_config())
    assert again.noise_multiplier == 3.0
