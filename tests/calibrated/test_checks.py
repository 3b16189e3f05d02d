"""Checks of single parameters: each warning appears where it is due, with the name, only there."""

import dataclasses

import numpy as np
import pytest
from scipy import stats
from support.siblings import slow

from tfp_dpvi.calibrated import checks as lib
from tfp_dpvi.calibrated.checks import (
    Checks,
    ParameterChecks,
    extents,
    narrowing,
    scales,
    widths,
)
from tfp_dpvi.calibrated.curvature import CurvaturePrior
from tfp_dpvi.calibrated.mixture import Mixture
from tfp_dpvi.calibrated.window import Window

NAMES = ["a", "b", "sigma"]
# Of intercept, slope and the logarithm of a scale: 1,200 records, outcomes of deviation 0.9.
INFORMATION = np.array([1480.0, 1480.0, 2400.0])


def checks(**rows):
    """Diagnostics with everything as it should be, besides `rows`."""
    return ParameterChecks(NAMES, **{name: np.ones(3) for name in FIELDS} | rows)


FIELDS = ("reaches", "narrowing", "width", "shift", "shift_z", "extent", "pull", "pull_z", "tail")


@pytest.mark.parametrize(
    ("name", "limit", "word"),
    [
        ("reaches", lib.MOST_REACHES, "reach"),
        ("narrowing", lib.MOST_NARROWING, "too narrow"),
        ("width", lib.MOST_WIDTH, "as wide as the prior"),
        ("extent", lib.MOST_EXTENT, "as far from the last steps"),
        ("tail", lib.MOST_TAIL, "a few extreme public inputs"),
    ],
)
def test_each_check_warns_above_its_limit_and_names_the_parameters(name, limit, word):
    assert checks().warnings == []
    assert checks(**{name: np.array([0.99 * limit, np.nan, 0.0])}).warnings == []
    (sentence,) = checks(**{name: np.array([0.0, 1.01 * limit, np.nan])}).warnings
    assert word in sentence
    assert " of b is " in sentence
    (sentence,) = checks(**{name: np.array([2.0 * limit, 4321.0 * limit, 0.0])}).warnings
    assert f" of a, b is up to {4321.0 * limit:,.0f} times" in sentence


TRAINED = Checks(0.1, 0.9, 1.0, 9.0, lack_of_fit=0.1, lack_of_fit_z=0.5, ranks=0.9)


def failed(**values):
    """The beginnings of the warnings of a fit with some values of its checks."""
    changed = dataclasses.replace(TRAINED, **values)
    return [sentence.partition(":")[0].partition("(")[0] for sentence in changed.warnings]


def test_a_shift_warns_if_it_is_large_and_no_chance():
    def shifted(shift, z):
        rows = checks(shift=np.array([0.9, np.nan, shift]), shift_z=np.array([9.0, np.nan, z]))
        return failed(parameters=rows)

    # Six tests, two parameters with a score: 0.03 / 6 / 2 is 3.02 standard deviations.
    assert shifted(-3.0, -3.0) == []
    assert shifted(-0.9, -9.0) == []
    (sentence,) = shifted(-3.0, -3.1)
    assert sentence.startswith("the estimate of sigma is 3 posterior standard deviations from")


def test_a_lack_of_fit_that_noise_hides_is_noted():
    known = {"distance": 0.1, "halves": 0.5, "kappa": 1.0, "curvature_signal": 9.0}
    # A standard deviation of .2, or of .02; without ranks, outcomes have few values.
    hidden = Checks(**known, lack_of_fit=-0.1, lack_of_fit_z=-0.5, ranks=0.4)
    (note,) = hidden.notes
    assert "1.6 times as much would not be seen" in note
    for changes in ({"lack_of_fit_z": -5.0}, {"ranks": np.nan}):
        assert not dataclasses.replace(hidden, **changes).notes


def test_what_neither_ranks_nor_shift_are_sure_of_they_are_together():
    """0.01 and 0.02 are above 0.03 / 6, and 0.0019 by Fisher's method is not."""
    rows = checks(shift=np.array([0.9, np.nan, 3.0]), shift_z=np.array([0.0, np.nan, 2.81]))
    alone = failed(parameters=rows)
    together = failed(parameters=rows, ranks=0.02)
    assert alone == []
    assert [sentence.split()[1] for sentence in together] == ["likelihood", "estimate"]
    product = 0.02 * 4.0 * stats.norm.sf(2.81)
    found = dataclasses.replace(TRAINED, parameters=rows, ranks=0.02).p_values["both"]
    assert found == pytest.approx(stats.combine_pvalues([0.02, product / 0.02]).pvalue)


def test_a_pull_warns_if_it_is_large_and_no_chance():
    def pulled(pull, z):
        rows = checks(pull=np.array([0.9, np.nan, pull]), pull_z=np.array([9.0, np.nan, z]))
        return dataclasses.replace(TRAINED, parameters=rows).warnings

    assert pulled(-3.0, -3.0) == []
    assert pulled(-0.9, -9.0) == []
    (sentence,) = pulled(-3.0, -3.1)
    assert "that of sigma is 3 posterior standard deviations from where the records" in sentence


def test_tests_share_their_false_alarms_by_holms_procedure():
    """Three apply here: 0.01 for the least p-value, 0.015 and 0.03 for the next ones."""
    halves, lack, ranks = (
        "the two halves of the window differ ",
        "the likelihood does not fit",
        "the likelihood has the wrong shape",
    )
    assert failed() == []
    assert failed(halves=0.011) == []
    assert failed(halves=0.009) == [halves]
    assert failed(ranks=0.009) == [ranks]
    # z of 2.57 is p = 0.0102, z of 2.58 is 0.0099; the second least needs 0.015.
    assert failed(lack_of_fit_z=-2.57) == []
    assert failed(lack_of_fit_z=-2.58) == [lack]
    assert failed(lack_of_fit_z=-2.58, lack_of_fit=0.01) == []
    assert failed(halves=0.009, ranks=0.014) == [halves, ranks]
    assert failed(halves=0.011, ranks=0.014) == []
    # The paired clip has one test, at its own level.
    assert failed(halves=0.002, lack_of_fit=np.nan, lack_of_fit_z=np.nan, ranks=np.nan) == []


def test_advice_is_about_the_training_first_and_then_about_the_likelihood():
    """Parameters that are off make any likelihood look wrong, for instance a Bernoulli."""

    def advice(**values):
        return dataclasses.replace(TRAINED, **values).warnings[-1].partition("; ")[2]

    more = {"lack_of_fit": 0.5, "lack_of_fit_z": 9.0}
    assert "NegativeBinomial" in advice(**more)
    assert "vary less" in advice(lack_of_fit=-0.5, lack_of_fit_z=-9.0)
    for unsettled in ({"distance": 2.0}, {"halves": 1e-4}):
        assert "mend that first" in advice(**more, **unsettled)
        assert "mend that first" in advice(ranks=1e-4, **unsettled)
    assert "logarithm" in advice(ranks=1e-4)


def test_tests_warn_of_at_most_their_share_where_all_is_well():
    """10,000 fits with uniform p-values: 3 % and a standard error of .17 %, limit four of them."""
    generator = np.random.default_rng(0)
    alarms = sum(
        bool(failed(halves=uniform[0], ranks=uniform[1], lack_of_fit_z=stats.norm.ppf(uniform[2])))
        for uniform in generator.uniform(size=(10_000, 3))
    )
    assert 0.023 < alarms / 10_000 < 0.037


def test_a_posterior_reaches_as_far_as_its_mean_and_its_width_beyond_linear_scores():
    """A scale: a record's information on its logarithm is 2, so scores are linear over 0.35."""
    information = np.array([[2.0]])

    def extent(away, sd, prior_sd=1.1, information=information):
        mixture = Mixture(np.array([[0.0]]), np.array([[[sd]]]))
        return extents(np.array([away]), mixture, information, np.array([prior_sd]))[0]

    linear = 0.5 / np.sqrt(2.0)
    np.testing.assert_allclose(extent(-0.5, 0.0), 0.5 / linear)
    np.testing.assert_allclose(extent(0.0, 0.2), 0.2 / linear)
    np.testing.assert_allclose(extent(0.3, 0.4), 0.5 / linear)
    # A thousand records at epsilon 1 leave a width of 1.3 times their own.
    assert extent(0.0, 1.3 / np.sqrt(2.0 * 1000)) < 0.1 * lib.MOST_EXTENT
    # A posterior which is about the prior is right, however far scores are linear.
    assert np.isnan(extent(-0.5, 1.05))
    # Along one coordinate others may change: those of correlated columns are not known alone.
    correlated = np.array([[1.0, 0.9], [0.9, 1.0]])
    mixture = Mixture(np.zeros((1, 2)), np.eye(2)[None])
    factors = extents(np.zeros(2), mixture, correlated, np.full(2, 9.0))
    np.testing.assert_allclose(factors, 2.0 * np.sqrt(1.0 - 0.81))


@pytest.mark.parametrize(("num", "absent"), [(3, "shift"), (6, "pull")])
def test_checks_of_an_earlier_version_lack_later_ones(num, absent):
    saved = checks().to_array()[:num]
    loaded = ParameterChecks.from_array(NAMES, saved)
    np.testing.assert_array_equal(loaded.to_array()[:num], saved)
    assert np.isnan(getattr(loaded, absent)).all()
    assert loaded.warnings == []


def test_many_parameters_are_counted():
    values = np.full(9, 100.0)
    many = ParameterChecks([f"w[{number}]" for number in range(9)], *[values] * len(FIELDS))
    assert all(" of w[0], w[1], w[2], 6 more is " in sentence for sentence in many.warnings)


def test_scales_are_those_of_a_normal_distribution_and_exist_for_a_cauchy():
    """65,536 draws: a standard error of 0.5 %; the limit is six of them."""
    generator = np.random.default_rng(0)
    draws = np.stack([3.0 * generator.normal(size=2**16), generator.standard_cauchy(2**16)], axis=1)
    np.testing.assert_allclose(scales(draws), [3.0, 1.0 / 0.6745], rtol=0.03)
    infinite = np.full((9, 1), -np.inf)
    assert np.isnan(scales(infinite)).all()
    assert np.isnan(widths(infinite, infinite)).all()


DISTRIBUTIONS = {
    "normal": lambda generator, shape: generator.normal(size=shape),
    "skew": lambda generator, shape: np.log(generator.gamma(0.5, size=shape)),
    "cauchy": lambda generator, shape: generator.standard_cauchy(shape),
}


def chains(draw, generator, size):
    """Draws as a posterior's, of which every fourth is new."""
    return np.repeat(draw(generator, (128, size)), 4, axis=0)


@pytest.mark.parametrize("size", [1, 20, slow(100)])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_a_posterior_that_is_the_prior_is_rarely_called_wider(kind, size):
    """At most 3 %, whatever the number of parameters.

    20 more of 400 are 5.8 standard errors of a rate at that limit.
    """
    generator, draw = np.random.default_rng(0), DISTRIBUTIONS[kind]
    priors = [draw(generator, (4096, size)) for _ in range(4)]
    wider = sum(
        np.any(widths(priors[number % 4], chains(draw, generator, size)) > lib.MOST_WIDTH)
        for number in range(400)
    )
    assert wider <= 400 * lib.MOST_FALSE + 20


@pytest.mark.parametrize("size", [1, 20, 100])
def test_a_posterior_that_is_half_as_wide_again_is_called_wider(size):
    generator, draw = np.random.default_rng(0), DISTRIBUTIONS["normal"]
    prior = draw(generator, (4096, size))
    found = [widths(prior, 1.5 * chains(draw, generator, size)) for _ in range(1000 // size)]
    assert np.mean(np.array(found) > lib.MOST_WIDTH) > 0.8
    np.testing.assert_allclose(widths(prior, 0.5 * prior), 0.5)


# ---------------------------------------------------------------- what the curvature's prior adds


def simulated(information):
    """Returns a simulation's prior with this information, and a ridge as `SimulatedPairs` adds."""
    information = np.atleast_2d(information)
    matrix = np.diag(information[0]) if len(information) == 1 else information
    ridge = 1e-3 * np.trace(matrix) / len(matrix)
    ridged = matrix + ridge * np.eye(len(matrix))
    return CurvaturePrior(ridged, (32.0 * len(matrix),), 0.3, curvature=ridged, ridge=ridge)


def released(matrix, sd, score_sd=12.0):
    """Returns a window with these averages; nothing else of it is read."""
    unread = dict.fromkeys(field.name for field in dataclasses.fields(Window))
    parts = {"matrix": np.asarray(matrix), "matrix_sd": sd, "score_sd": score_sd}
    return Window(**unread | parts | {"simulation": 1.04})


@pytest.mark.parametrize("unit", [1.0, 1e2, 1e4])
def test_the_ridge_counts_in_dollars_and_not_in_ten_thousands_of_them(unit):
    """The prior of a and b has the standard deviation 100,000 dollars, here 1e5 / unit."""
    scale = np.array([unit / 1e4, unit / 1e4, 1.0])
    window = released(np.diag(INFORMATION * scale**2), 60.0)
    precision = np.array([(unit / 1e5) ** 2, (unit / 1e5) ** 2, 1.0])
    times = narrowing(window, simulated(INFORMATION * scale**2), precision, np.ones(3))
    if unit == 1e4:
        assert np.all(times < 1.01)
    else:
        assert np.all(times[:2] > 4.0)


def test_the_ridge_counts_for_inputs_that_are_nearly_collinear():
    """Of a million records: the ridge then says far more than a standard normal prior."""
    matrix = 2e5 * np.array([[1.0, 1.0 - 1e-9], [1.0 - 1e-9, 1.0]])
    window = released(matrix, 60.0)
    assert np.all(narrowing(window, simulated(matrix), np.ones(2), np.ones(2)) > 2.0)
    few = released(matrix / 1e3, 60.0)
    assert np.all(narrowing(few, simulated(matrix / 1e3), np.ones(2), np.ones(2)) < 1.01)


def test_a_release_that_outweighs_the_ridge_is_no_fault():
    information = np.array([1.0, 1.0, 1e6])
    prior = simulated(information)
    for sd, fault in ((60.0, True), (1.0, False), (0.0, False)):
        times = narrowing(released(np.diag(information), sd), prior, np.full(3, 1e-4), np.ones(3))
        assert np.any(times > lib.MOST_NARROWING) == fault


@pytest.mark.parametrize("simulates", [False, True])
def test_a_released_curvature_that_is_noise_where_it_should_not_be_counts(simulates):
    prior = CurvaturePrior.isotropic(3, 1200, 1.5)
    if simulates:
        prior = simulated(np.array([150.0, 150.0, 150.0]))
    relative = np.array([1e-4, 0.9, 0.02])
    window = released(np.diag([4.0, -5.0, 500.0]), 11.0)
    times = narrowing(window, prior, np.ones(3), relative)
    np.testing.assert_allclose(times, [1e4, 1.0, 1.0], rtol=1e-2)
    nothing = released(np.diag([4.0, -5.0, 20.0]), 11.0)  # All of it may be noise.
    np.testing.assert_allclose(narrowing(nothing, prior, np.ones(3), relative), 1.0, rtol=1e-2)
    alike = released(np.diag([400.0, 300.0, 500.0]), 11.0)
    np.testing.assert_allclose(narrowing(alike, prior, np.ones(3), relative), 1.0, rtol=1e-2)


def test_a_small_curvature_that_the_simulation_expects_is_no_fault():
    prior = simulated(np.array([10.0, 400.0, 400.0]))
    window = released(np.diag([4.0, 390.0, 410.0]), 31.0)
    times = narrowing(window, prior, np.ones(3), np.array([0.4, 0.1, 0.1]))
    assert np.all(times < 1.1)
