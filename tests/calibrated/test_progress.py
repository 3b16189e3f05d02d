"""The first steps: from a vague scale to the records, and no step that is noise alone."""

from unittest import mock

import numpy as np
import pytest
from support import scoring as fits

from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.calibrated.progress import Caution, Progress, Search
from tfp_dpvi.calibrated.scoring import Scoring

SIZE, NOISE = 10, 0.04
SCALES = np.arange(SIZE) == 0
FAR, FLAT = 1e4, 1200


def seen(*pulls, noise=NOISE):
    """A search after scores of the scale, the first coordinate; the others have none."""
    search = Search(SCALES, NOISE)
    for pull in pulls:
        search.judge(Progress(np.eye(SIZE)[0] * pull, np.zeros(SIZE), noise))
    return search


def test_a_score_that_stays_is_followed_in_ever_longer_steps_alone():
    for number in range(1, 6):
        search = seen(*[-0.22] * number)
        np.testing.assert_array_equal(search.steps, min(2 ** (number - 1), 8) * np.eye(SIZE)[0])
        assert search.is_on


def test_a_step_whose_score_turned_is_no_longer_than_half_of_the_last_one():
    search = seen(-0.22, -0.22, -0.22)
    newton = np.where(np.arange(SIZE) == 0, -1.0, 0.5)
    low, high = search.bounds(newton)
    # Four Newton steps are planned, after two.
    assert (low[0], high[0]) == (-6.0, 1.0)
    np.testing.assert_array_equal([low[1:], high[1:]], np.zeros([2, SIZE - 1]))


def test_a_scale_that_is_too_small_is_not_searched():
    """Its score is many times that of one which is too large, and locations that are off have one
    like it: with s of persons' intercepts .5 a search went from .53 to 6.8, and did not come back."""
    assert not seen(3.0).is_on
    assert not seen(0.5).is_on
    # A precision that is too small has the score of a scale that is too large.
    assert seen(0.22).steps[0] == 1.0


def test_a_score_that_turns_or_vanishes_ends_the_search():
    assert not seen(-0.22, -0.22, 0.5).is_on
    assert not seen(-0.22, 0.01, 0.01, 0.01).is_on
    # Less clear than at first, it goes on.
    assert seen(-0.22, -0.08).steps[0] == 2.0


def test_a_score_on_its_way_that_the_noise_hides_is_looked_at_again():
    """One of four sds is below 1.5 by chance in .6 % of calls: one search of 16 ended half-way."""
    search = seen(-0.22, -0.02)
    assert search.is_on
    assert not search.steps.any()
    assert seen(-0.22, -0.02, -0.16).steps[0] == 2.0


def test_scores_that_the_noise_hides_are_averaged_before_the_search_ends():
    hidden = 2.5 * NOISE
    assert [seen(*[hidden] * num).steps[0] for num in (1, 2, 3)] == [0.0, 0.0, 1.0]
    nothing = [seen(*[0.0] * num).is_on for num in (1, 2, 3)]
    assert nothing == [True, True, False]


def test_noise_alone_moves_nothing():
    """Ten scales in 500 searches of 3 calls, at 4 sds: one moves by chance in all.

    Poisson at 1e-5: at most 9. With three sds for a call instead some 40 would.
    """
    generator = np.random.default_rng(0)
    moved = 0
    for _ in range(500):
        search = Search(np.ones(SIZE, bool), NOISE)
        while search.is_on and not search.steps.any():
            pull = NOISE * generator.normal(size=SIZE)
            search.judge(Progress(pull, np.zeros(SIZE), NOISE))
        moved += bool(search.steps.any())
    assert moved <= 9


def test_nothing_but_a_scale_begins_a_search():
    search = Search(SCALES, NOISE)
    for _ in range(3):
        assert search.is_on
        search.judge(Progress(np.where(SCALES, 0.0, 1.0), np.zeros(SIZE), NOISE))
    assert not search.is_on
    assert not Search(SCALES, 2.0 * NOISE).is_on, "the noise would hide it"
    assert not Search(np.zeros(SIZE, bool), NOISE).is_on


def test_steps_that_turn_become_shorter_and_a_longer_score_is_gone_back_from():
    def after(*pulls):
        caution = Caution()
        backs = [caution.judge(Progress(np.eye(2)[0] * pull, np.ones(2), NOISE)) for pull in pulls]
        return caution.share, backs[-1]

    assert after(0.5, -0.4) == (0.5, None)
    assert after(0.5, 0.4) == (1.5, None)
    share, back = after(0.5, -0.9)
    assert share == 0.25
    np.testing.assert_array_equal(back, np.ones(2))


def test_the_score_of_a_place_that_was_gone_back_to_is_looked_at_anew():
    """The mean over steps to and fro is short: later scores there were longer, and fits went back for ever."""
    caution = Caution()
    backs = []
    for pull in (0.3, -0.9, 0.9, -0.8, 0.5):
        seen_now = Progress(np.eye(2)[0] * pull, np.full(2, pull), NOISE)
        backs.append(caution.judge(seen_now))
    assert [back is None for back in backs] == [True, False, True, True, True]
    np.testing.assert_array_equal(backs[1], np.full(2, 0.3))


def line(params, x):
    return tfd.Normal(params["a"] + tf.linalg.matvec(x, params["b"]), params["sigma"])


@pytest.mark.parametrize(("far", "first"), [(1e3, 1), (1.0, 0)])
def test_what_a_search_released_is_not_held_against_the_public_inputs(far, first):
    """Private inputs like the public ones were said to be unlike them in one of three fits.

    Its released squares are of several parameters, and what is simulated is of one.
    """
    prior = {"a": tfd.Normal(0.0, far), "b": tfd.Sample(tfd.Normal(0.0, far), 2)}
    prior["sigma"] = tfd.LogNormal(float(np.log(far)), 0.5)
    generator = np.random.default_rng(5)
    x = generator.normal(size=[1000, 2]).astype("float32")
    y = (1.0 + x.sum(axis=1) + generator.normal(size=1000)).astype("float32")
    fit = fits.Fits(tfd.JointDistributionNamed(prior), line, x, y, x)
    with mock.patch.object(
        Scoring, "_see_private_inputs", autospec=True, side_effect=Scoring._see_private_inputs
    ) as see:
        fit.run(x, y, seed=2)
    assert min(call.args[-1] for call in see.call_args_list) == first


@pytest.mark.slow
def test_scales_ten_thousand_times_too_large_are_found():
    """Three data sets; of none is an interval ten times as wide as the exact one.

    Without the search most are, so that the test would see its loss.
    """
    slopes = SIZE - 2
    prior = tfd.JointDistributionNamed(
        {
            "a": tfd.Normal(0.0, FAR),
            "b": tfd.Sample(tfd.Normal(0.0, FAR), slopes),
            "sigma": tfd.HalfNormal(FAR),
        }
    )
    empty = np.zeros([FLAT, slopes], "float32")
    generator = np.random.default_rng(0)
    inputs = generator.normal(size=[1000, slopes]).astype("float32")
    fit = fits.Fits(prior, line, empty, empty[:, 0], inputs)
    truth = np.array([3.0, *[1.0] * slopes, 0.0])
    exact = np.array([1.0, *[1.0] * slopes, np.sqrt(0.5)]) / np.sqrt(FLAT)

    def distances(seed):
        posterior = fit.posterior(fit.run(*records, seed=seed))
        # The prior's parts are in the order of their names.
        sds = np.sqrt(np.diag(posterior.mixture.covariance))
        return (posterior.mixture.mean - truth) / sds, sds / exact

    for seed in range(3):
        x = generator.normal(size=[FLAT, slopes])
        y = 3.0 + x.sum(axis=1) + generator.normal(size=FLAT)
        records = x.astype("float32"), y.astype("float32")
        away, widths = distances(seed)
        assert np.median(widths) < 2.5
        assert np.all(widths < 10.0)
        # 30 z: 2e-5 for one of them, were they normal.
        assert np.all(np.abs(away) < 5.0)
    with mock.patch.object(Search, "judge", lambda self, progress: setattr(self, "is_on", False)):
        assert np.median(distances(seed)[1]) > 10.0
