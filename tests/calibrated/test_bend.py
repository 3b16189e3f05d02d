"""The likelihood's third order: against binomial outcomes, whose density with noise is a sum."""

import dataclasses

import numpy as np
import pytest
import scipy.special
import scipy.stats

from tfp_dpvi._tf import tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated import bend
from tfp_dpvi.calibrated.bend import LinearScore, bent, third_order
from tfp_dpvi.calibrated.checks import Checks
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.moved import MovedScores
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.scoring import Scoring
from tfp_dpvi.data import make_records

NUM = 60
PLACE = 1.1
# Ones among the outcomes.
ONES = 43
PRIOR_SD = 2.0
CHANCE = scipy.special.expit(PLACE)
KINDS = {
    "bernoulli": lambda params, x: tfd.Bernoulli(logits=x[:, 0] * params["w"]),
    # Of too many values for all of them: they are drawn.
    "binomial": lambda params, x: tfd.Binomial(10.0, logits=x[:, 0] * params["w"]),
}


@dataclasses.dataclass
class Case:
    """A released score of equal records, whose number of ones says all."""

    scores: MovedScores
    linear: LinearScore
    whitening: np.ndarray
    away: np.ndarray

    @property
    def draws(self):
        return self.linear.place + self.away[:, None]

    @property
    def normal(self):
        linear = self.linear
        residual = linear.score - self.away[:, None] * linear.slopes[0, 0]
        return -(residual[:, 0] ** 2) / linear.covariances[0, 0, 0] / 2.0


def case(noise, kind="bernoulli", whitening=0.1):
    """With `noise` times the variance of data as the noise's; scores are too short to be cut."""
    trials = 10 if kind == "binomial" else 1
    prior = tfd.JointDistributionNamed({"w": tfd.Normal(0.0, PRIOR_SD)})
    model = BayesianModel(prior, KINDS[kind])
    x = np.ones([300, 1], np.float32)
    y = np.array([0, 1], np.int32 if trials == 1 else np.float32)
    records = make_records(x[:2], y, None, dtype=model.dtype, validate=True)
    scoring = Scoring(Pairing(model, records, log_scales=True), x, may_widen=False)
    whitening = np.array([[whitening / trials**0.5]])
    scores = MovedScores(scoring.likelihood, 2**14)
    scores.start(np.array([PLACE]), whitening)
    psi = scores.psi[:, 0]
    data = NUM / trials * float(scores.weights @ psi**2)
    unit = np.sqrt(data / (NUM * CHANCE * (1.0 - CHANCE)))
    slope = NUM * CHANCE * (1.0 - CHANCE) * unit * whitening[0, 0]
    linear = LinearScore(
        np.array([PLACE]) / whitening[0, 0],
        np.array([unit * (ONES - NUM * CHANCE)]),
        np.array([[[slope]]]),
        np.array([[[data * (1.0 + noise)]]]),
        data,
        NUM / trials,
    )
    sd = np.sqrt(data * (1.0 + noise)) / slope
    middle = linear.score[0] / slope
    return Case(scores, linear, whitening, middle + sd * np.linspace(-1.5, 1.5, 31)), unit


def exact(found, unit, noise):
    """The log density of the score at each of the draws."""
    chances = scipy.special.expit(found.draws[:, 0] * found.whitening[0, 0])
    if noise == 0.0:
        return ONES * np.log(chances) + (NUM - ONES) * np.log1p(-chances)
    sd = np.sqrt(found.linear.covariances[0, 0, 0] * noise / (1.0 + noise))
    ones = np.arange(NUM + 1)
    logs = scipy.stats.norm.logpdf(found.linear.score[0], unit * (ones - NUM * CHANCE), sd)
    counts = scipy.stats.binom.logpmf(ones, NUM, chances[:, None])
    return scipy.special.logsumexp(logs + counts, axis=1)


def lacking(values):
    """Returns how far values are from a constant."""
    return np.ptp(values) / 2.0


def off(found, unit, noise, linear=None):
    """How much is left of the difference to the exact density, and how much there was."""
    wanted = exact(found, unit, noise) - found.normal
    linear = found.linear if linear is None else linear
    third = third_order(found.scores, linear, found.whitening, found.draws)
    return lacking(wanted - third) / lacking(wanted), lacking(wanted)


@pytest.mark.parametrize("noise", [0.0, 1.0, 6.0])
def test_the_third_order_is_that_of_binomial_outcomes_with_noise(noise):
    found, unit = case(noise)
    left, before = off(found, unit, noise)
    assert before > 0.1
    assert left < 0.06


def test_drawn_outcomes_give_about_the_same():
    found, unit = case(1.0, "binomial")
    assert off(found, unit, 1.0)[0] < 0.3


def test_what_is_wrong_is_seen():
    found, unit = case(6.0)
    linear = found.linear
    for wrong in (
        # The noise is left out, and records count twice.
        linear._replace(covariances=linear.covariances / 7.0),
        linear._replace(num=2.0 * linear.num),
    ):
        assert off(found, unit, 6.0, wrong)[0] > 0.3


def test_draws_of_the_curvature_are_those_that_the_parameters_make_likely():
    """Far out it is the flat one that explains the score; the mean one would tilt by far more."""
    linear = case(1.0)[0].linear
    both = linear._replace(
        slopes=linear.slopes * np.array([0.2, 1.8])[:, None, None],
        covariances=np.repeat(linear.covariances, 2, axis=0),
    )
    away = np.linspace(-8.0, 8.0, 9)[:, None] / linear.slopes[0, 0, 0]
    away *= np.sqrt(linear.covariances[0, 0, 0])

    def log_density(score):
        residuals = score - away[:, 0] * both.slopes[:, :, 0]
        logs = -(residuals**2) / linear.covariances[0, 0, 0] / 2.0
        # With a flat prior both are equally likely given the score.
        return scipy.special.logsumexp(logs + np.log(both.slopes[:, :, 0]), axis=0)

    step = 1e-4
    slope = log_density(linear.score[0] + step) - log_density(linear.score[0] - step)
    np.testing.assert_allclose(both.tilts(away)[:, 0], -slope / (2.0 * step), rtol=1e-5)


def test_the_posterior_moves_to_its_exact_mean():
    """With a flat prior, but for a fifth of the way there."""
    noise = 1.0
    found, unit = case(noise)
    sd = np.ptp(found.away) / 3.0
    middle = found.away.mean()
    grid = middle + sd * np.linspace(-4.0, 4.0, 801)
    density = np.exp(exact(dataclasses.replace(found, away=grid), unit, noise))
    wanted = np.sum(grid * density) / np.sum(density)
    place = found.linear.place[0] * found.whitening[0, 0]
    factor = found.whitening[0, 0]
    before = Mixture(np.array([[place + factor * middle]]), np.array([[[factor * sd]]]))
    generator = np.random.default_rng(0)
    after, _ = bent(before, np.array([0]), found.scores, found.linear, found.whitening, generator)
    way = wanted - middle
    assert abs(way) > 0.15 * sd
    assert (after.mean[0] - place) / factor - middle == pytest.approx(way, rel=0.2)


def test_many_records_are_near_normal():
    """And few are not, or those of which noise leaves little; but too much noise hides it."""
    linear = case(1.0)[0].linear
    precise = linear.covariances[0] / linear.slopes[0] ** 2
    square = linear.slopes[0, 0, 0]
    linear = linear._replace(square=square)
    many = linear._replace(
        num=1000.0 * linear.num, slopes=1000.0 * linear.slopes, square=1000.0 * square
    )
    assert not many.has_third_order(precise / 1000.0)
    assert many.has_third_order(precise / 10.0)
    few = linear._replace(num=2.0)
    assert few.has_third_order(precise)
    hidden = few.slopes * np.array([0.5, 1.5])[:, None, None]
    assert not few.is_hidden
    assert few._replace(slopes=hidden).is_hidden
    assert few._replace(slopes=-hidden).is_hidden


@pytest.mark.parametrize("fault", ["unlike", "not a number"])
def test_a_posterior_stays_where_its_third_order_is_not_known(fault, monkeypatch):
    found, _ = case(1.0)
    linear = found.linear
    before = Mixture(found.draws[:1] * found.whitening, np.array([[[0.3]]]))
    arguments = found.whitening, np.random.default_rng(0)
    index = np.array([0])
    assert bent(before, index, found.scores, linear, *arguments)[0] is not before
    if fault == "unlike":
        linear = linear._replace(square=2.0 * linear.square)
    else:
        monkeypatch.setattr(bend, "third_order", lambda *_: np.array([0.0, np.nan]))
    assert bent(before, index, found.scores, linear, *arguments) == (before, np.inf)


def test_a_posterior_moves_by_a_standard_deviation_and_a_half_at_most(monkeypatch):
    """Where the third order is larger than the second one, it says the direction alone."""
    found, _ = case(1.0)
    before = Mixture(found.draws[:1] * found.whitening, np.array([[[0.3]]]))

    def large(scores, linear, whitening, draws):
        return 40.0 * (draws[:, 0] - draws[:, 0].mean())

    monkeypatch.setattr(bend, "third_order", large)
    generator = np.random.default_rng(0)
    arguments = np.array([0]), found.scores, found.linear, found.whitening, generator
    after, distance = bent(before, *arguments)
    assert (after.locs - before.locs)[0, 0] == pytest.approx(1.5 * 0.3, rel=0.05)
    # Of 4,096 draws of a line that is 40 times as steep as the posterior's own unit.
    assert distance == pytest.approx(40.0 * 0.3 / found.whitening[0, 0], rel=0.05)


@pytest.mark.parametrize(
    ("distance", "said"),
    [
        (np.nan, ""),
        (0.0, ""),
        (1.4, ""),
        (4.3, "up to 4.3 standard"),
        (np.inf, "cannot be computed"),
    ],
)
def test_a_third_order_that_is_cut_or_hidden_is_noted(distance, said):
    checks = Checks(0.0, 1.0, 1.0, 9.0, third_order=distance)
    assert not checks.warnings
    assert said in " ".join(checks.notes)
    assert bool(checks.notes) == bool(said)
    again = Checks.from_array(checks.to_array().tolist())
    assert again.notes == checks.notes


def test_outcomes_that_are_impossible_have_no_weight():
    """Of two outcomes one is left: its score alone is tilted."""
    scores = case(0.0)[0].scores
    away = np.array([[200.0]])
    tilt = np.array([[3.0]])
    one = scores.psi.max()
    np.testing.assert_allclose(scores.tilted(away, tilt), np.expm1(3.0 * one), rtol=1e-4)
