"""Private columns of another scale than the public ones, as where nobody passes public inputs."""

import numpy as np
import pytest
from support.scoring import Fits

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated import curvature
from tfp_dpvi.calibrated.columns import FewUnlike
from tfp_dpvi.calibrated.scoring import FitCoordinates, Scoring, _magnified
from tfp_dpvi.calibrated.whitening import whitening_of

NUM, SLOPES = 3000, np.array([3.0, -2.0, 1.0])
PRIOR = {
    "a": tfd.Normal(0.0, 50.0),
    "b": tfd.Sample(tfd.Normal(0.0, 50.0), 3),
    "sigma": tfd.HalfNormal(300.0),
}


def line(params, x):
    return tfd.Normal(params["a"] + tf.linalg.matvec(x, params["b"]), params["sigma"])


def records(mean, sd, seed):
    generator = np.random.default_rng(seed)
    x = mean + sd * generator.normal(size=(NUM, 3))
    y = 20.0 + x @ SLOPES + 2.0 * generator.normal(size=NUM)
    return x.astype("float32"), y.astype("float32")


@pytest.fixture(scope="module")
def fits():
    public = np.random.default_rng(9).normal(size=(1000, 3)).astype("float32")
    prior = tfd.JointDistributionNamed(PRIOR)
    return Fits(prior, line, *records(0.0, 1.0, 0), public)


@pytest.mark.parametrize(("mean", "sd"), [(0.0, 3.0), (5.0, 1.0), (5.0, 3.0)])
def test_columns_of_another_scale_are_learned(fits, mean, sd):
    """Fits ended 2 to 4 posterior sds off, with intervals 2 to 14 times as wide as without noise."""
    # Of twelve seeds one ended 1.9 sds off, and said so.
    x, y = records(mean, sd, seed=8)
    posterior = fits.posterior(fits.run(x, y, seed=8))
    assert posterior.checks.distance < 1.3
    spread = posterior.distribution.sample(1000, seed=[1, 2])["b"].numpy().std(axis=0)
    exact = 2.0 / (sd * np.sqrt(NUM))
    assert (spread < 2.0 * exact).all()


def test_outcomes_that_public_inputs_make_rare_leave_intervals_their_width():
    """At public inputs, eight deviations off, an outcome of 0 has a chance of .04."""
    generator = np.random.default_rng(3)
    num = 5000
    z = generator.normal(size=num)
    x = (z - 8.0).astype("float32")[:, None]
    y = (generator.random(num) < 1.0 / (1.0 + np.exp(-0.4 * z))).astype("int32")
    prior = {"a": tfd.Normal(0.0, 2.5), "b": tfd.Sample(tfd.Normal(0.0, 2.5), 1)}
    fits = Fits(
        tfd.JointDistributionNamed(prior),
        lambda p, x: tfd.Bernoulli(logits=p["a"] + tf.linalg.matvec(x, p["b"])),
        x,
        y,
        generator.normal(size=(1000, 1)).astype("float32"),
    )
    share = 1.0 / (1.0 + np.exp(-0.4 * z))
    design = np.column_stack([np.ones(num), x[:, 0]])
    exact = np.linalg.inv((design * (share * (1.0 - share))[:, None]).T @ design)[1, 1] ** 0.5
    widths = [
        fits.posterior(fits.run(x, y, seed=seed))
        .distribution.sample(2000, seed=[1, 2])["b"]
        .numpy()
        .std()
        for seed in range(4)
    ]
    # It was .56 of the width without privacy. Of ten seeds the mean was .98, and the standard
    # deviation .11: a false alarm is 3.3 standard errors off.
    assert np.mean(widths) > 0.8 * exact


def test_a_shift_of_a_column_changes_the_intercept(fits, monkeypatch):
    """In whitened coordinates sigma comes first, then the intercept."""
    accumulated = fits.run(*records(0.0, 1.0, 1), seed=1)
    seen = []

    def few_unlike(*arguments, **settings):
        seen.append(settings["intercept"])
        return FewUnlike(*arguments, **settings)

    monkeypatch.setattr(curvature, "FewUnlike", few_unlike)
    fits.posterior(accumulated)
    assert seen
    assert set(seen) == {1}


def test_coordinates_are_believed_as_far_as_the_noise_that_formed_them(fits):
    """Else a window whose noise hides a direction takes it to have as much information as others."""
    scoring, blocks = fits.scoring, np.arange(5, 20)
    accumulated = fits.run(*records(5.0, 3.0, 8), seed=8)

    def degrees(noise):
        scoring._coordinates = FitCoordinates(np.eye(5) * 0.01, False, noise)
        seen = scoring._look(accumulated, fits.mechanism, blocks, weigh=False).seen
        return seen._prior.alike

    whitening, trusted, noise = scoring._coordinates
    assert not trusted
    assert 0.0 < noise < 1.0
    # Of 8 d, no more than 2 / noise^2.
    assert [degrees(noise) for noise in (0.0, 0.1, 0.4, 3.0)] == [(40.0,), (40.0,), (12.0,), (1.0,)]
    scoring._coordinates = FitCoordinates(whitening, trusted, noise)


def accumulated_of(fits, monkeypatch, far):
    """Of a fit whose releases are far so many times."""
    honest, left = Scoring._use_releases, [True] * far

    def use_releases(self, *arguments):
        honest(self, *arguments)
        return bool(left and left.pop())

    monkeypatch.setattr(Scoring, "_use_releases", use_releases)
    return fits.run(*records(0.0, 1.0, 1), seed=1)


@pytest.mark.parametrize(("far", "steps"), [(0, 120), (2, 88), (9, 72)])
def test_the_window_begins_later_while_releases_are_far(fits, monkeypatch, far, steps):
    accumulated = accumulated_of(fits, monkeypatch, far)
    curvatures, _ = fits.scoring.window(accumulated, fits.mechanism)
    assert curvatures.window.num_steps == steps


def test_a_fit_that_is_stopped_on_its_way_has_a_posterior(fits, monkeypatch):
    """By a budget or a callback after 10 of 20 blocks: the window would have begun with the 12th."""
    accumulated = accumulated_of(fits, monkeypatch, far=9)
    ran = (np.arange(20) < 10).astype("float64")

    def until_then(part):
        return tf.einsum("i,i...->i...", tf.cast(ran, part.dtype), part)

    stopped = tf.nest.map_structure(until_then, accumulated)
    curvatures, _ = fits.scoring.window(stopped, fits.mechanism)
    assert curvatures.window.num_steps == 8


def test_directions_are_magnified_as_far_as_noise_asks_for():
    """Magnified further, the few records that have a rare value would be cut by the clip."""
    rotation = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    shares = np.array([0.01, 0.5, 3.0])
    information = rotation * shares @ rotation.T / 3.0
    relative = whitening_of(_magnified(information, 0.1), np.arange(3))
    seen = np.linalg.eigvalsh(relative @ information @ relative.T * 3.0)
    np.testing.assert_allclose(seen, [0.1, 0.5, 1.0], rtol=1e-6)
    relative = whitening_of(_magnified(information, 1.0), np.arange(3))
    np.testing.assert_allclose(3.0 * relative @ information @ relative.T, np.eye(3), atol=1e-6)
