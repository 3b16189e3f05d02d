"""`benchmarks/effects.py`: its records are as it says, and its verdicts can fail."""

import effects
import numpy as np
import pytest

from tfp_dpvi.calibrated import centred_fit, whitening
from tfp_dpvi.regressions.families import make_prior
from tfp_dpvi.regressions.fit import described

pytest.importorskip("formulae")


@pytest.mark.parametrize("name", effects.CASES)
def test_a_truth_has_the_names_of_the_summary(name):
    design, parts = described(*effects.asked(name))
    data, truth = effects.data_set(name, 0)
    draws = make_prior(**parts.prior).sample(2, seed=[0, 1])
    found = parts.in_units({key: np.asarray(part) for key, part in draws.items()}, design)
    assert set(found) == set(truth)
    assert len(design.rows(data).common) == effects.CASES[name].num


def test_effects_of_levels_correlate_as_the_case_says():
    """Over 40 sets of 30 levels each: five standard errors of a correlation are 0.14."""
    for name, wanted in (("slopes-normal-0", 0.0), ("slopes-bernoulli-0.6", 0.6)):
        truths = [effects.data_set(name, number)[1] for number in range(40)]
        intercepts, slopes = (
            [[truth[f"{kind}|ward[{level}]"] for level in effects.WARDS] for truth in truths]
            for kind in ("1", "age")
        )
        found = np.corrcoef(np.ravel(intercepts), np.ravel(slopes))[0, 1]
        assert found == pytest.approx(wanted, abs=0.14)
        assert np.std(slopes) == pytest.approx(truths[0]["sd(age|ward)"], rel=0.1)


def test_records_have_the_true_slopes_and_steps():
    """Least squares of one set: a false alarm in five standard errors."""
    data, truth = effects.data_set("slopes-normal-0.6", 1)
    away = []
    for level in effects.WARDS:
        own = data["ward"] == level
        slope, error = np.polyfit(data["age"][own], data["outcome"][own], 1, cov=True)
        wanted = truth["age"] + truth[f"age|ward[{level}]"]
        away.append((slope[0] - wanted) / np.sqrt(error[0, 0]))
    assert np.abs(away).max() < 5.0
    assert np.std(away) < 1.6
    data, truth = effects.data_set("monotone-poisson", 1)
    columns = [data["school"] == level for level in effects.SCHOOLS[1:]]
    x = np.column_stack([np.ones(effects.NUM_RECORDS), data["age"], *columns])
    coefficients = np.zeros(x.shape[1])
    for _ in range(30):
        mean = np.exp(x @ coefficients)
        curvature = x.T @ (mean[:, None] * x)
        coefficients += np.linalg.solve(curvature, x.T @ (data["outcome"] - mean))
    shares = [truth[f"share(mo(school)[{level}])"] for level in effects.SCHOOLS[1:]]
    rises = truth["mo(school)"] * np.cumsum(shares)
    wanted = np.array([truth["Intercept"], truth["age"], *rises])
    errors = np.sqrt(np.diag(np.linalg.inv(curvature)))
    assert np.abs((coefficients - wanted) / errors).max() < 5.0


def row(inside, warned=False):
    """A fit of two levels' slopes and a correlation, of which the slopes hold the truth or not."""
    ends = [0.0, -1.0, 1.0, 0.1] if inside else [0.0, 0.5, 1.0, 0.7]
    figures = {"age|ward[a]": ends, "age|ward[b]": ends, "cor(1, age|ward)": [0.0, -1.0, 1.0, 0.0]}
    return {
        "figures": figures,
        "warnings": ["wrong"] if warned else [],
        "failed": False,
        "seconds": 1.0,
    }


def test_a_cell_is_judged_by_its_coverage():
    """Levels of a set go together: the error is that of 16 sets, not of 32 intervals."""
    rows = [row(inside=number < 4, warned=number < 3) for number in range(16)]
    cell = effects.summarised("slopes-normal-0", 1.0, rows)
    slopes, correlation = (
        cell["numbers"][kind] for kind in ("slopes of levels", "cor(1, age|ward)")
    )
    assert (slopes["coverage"], slopes["too_high"], slopes["too_low"]) == (0.25, 0.75, 0.0)
    assert slopes["coverage_error"] == pytest.approx(np.sqrt(0.25 * 0.75 / 15), abs=1e-3)
    assert not slopes["is_calibrated"]
    assert correlation["is_calibrated"]
    assert correlation["width"] == [2.0, 2.0, 2.0]
    assert cell["warned"] == 3
    assert effects.table([cell]).count("\n") == 4


def test_a_cell_is_beside_the_posterior_without_privacy():
    """Half as wide, and a fifth of the width below: in its deviations 0.2 * 2 * 1.645."""
    narrow = {label: [0.0, -0.5, 0.5, 0.0] for label in row(inside=True)["figures"]}
    wide = row(inside=True)
    wide["figures"] = {label: [0.0, -1.0, 1.0, -0.2] for label in narrow}
    cell = effects.summarised("slopes-normal-0", 1.0, [wide] * 3, [{"figures": narrow}] * 3)
    slopes = cell["numbers"]["slopes of levels"]
    assert (slopes["width_over"], slopes["coverage_without_privacy"]) == (2.0, 1.0)
    assert slopes["mean_from_it_in_its_sd"] == pytest.approx(-0.658)


@pytest.mark.parametrize("name", ["slopes-normal-0.6", "slopes-bernoulli-0.6"])
def test_the_posterior_without_privacy_is_that_of_a_mixed_model(name):
    """Lines of levels are shrunk: nearer to the truth, and narrower, than each level's own."""
    data, _ = effects.data_set(name, 0)
    found = effects.without_privacy(name, 0)["figures"]
    unit = effects.OUTCOMES[effects.CASES[name][0]][1] / 12.0
    estimates, covariances = effects.lines_of_levels(name, data)
    own = np.array([found[f"age in {level}"] for level in effects.WARDS])
    errors = unit * np.sqrt(covariances[:, 1, 1])
    widths = (own[:, 2] - own[:, 1]) / (2.0 * 1.645)
    assert np.all((widths > 0.6 * errors) & (widths < errors))
    away = np.mean((own[:, 3] - own[:, 0]) ** 2)
    assert away < np.mean((unit * estimates[:, 1] - own[:, 0]) ** 2)
    # Four posterior deviations: a false alarm in 1e4.
    for label in ("age", "Intercept", "sd(1|ward)", "sd(age|ward)", "cor(1, age|ward)"):
        true, low, high, mean = found[label]
        assert abs(mean - true) < 4.0 * (high - low) / 3.29


def test_fits_that_are_there_are_not_made_again(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(effects.harness, "code_hash", lambda: "this")
    monkeypatch.setattr(effects, "Fits", lambda name: made.append(name) or Model())

    class Model:
        def row(self, name, number, epsilon):
            made.append((name, number, epsilon))
            return row(inside=True)

    for alone in ("without_privacy", "steps_without_privacy"):
        monkeypatch.setattr(effects, alone, lambda name, number: row(inside=True))
    names = ["slopes-normal-0", "slopes-normal-0.6"]
    effects.study(names, [1.0], 2, tmp_path)
    # One model serves both correlations, and the first sets come first.
    assert made[:3] == [names[0], (names[0], 0, 1.0), (names[1], 0, 1.0)]
    assert len(made) == 5
    cells = effects.study(names, [1.0], 3, tmp_path)
    assert len(made) == 8
    assert [cell["sets"] for cell in cells] == [3, 3]
    monkeypatch.setattr(effects.harness, "code_hash", lambda: "other")
    with pytest.raises(SystemExit, match="another library"):
        effects.study(names, [1.0], 2, tmp_path)


def test_drawn_shares_differ_between_sets_and_are_those_of_the_prior():
    """Catches the fixed steps, and a set's truth that is not its records'."""
    name = "monotone-normal-drawn"
    truths = [effects.data_set(name, number)[1] for number in range(60)]
    shares = np.array(
        [[each[f"share(mo(school)[{level}])"] for level in effects.STEPS] for each in truths]
    )
    np.testing.assert_allclose(shares.sum(axis=1), 1.0)
    # Of logarithms of shares with a uniform prior, pi^2 / 3: five standard errors.
    assert np.var(np.log(shares[:, 0] / shares[:, 3])) == pytest.approx(np.pi**2 / 3.0, rel=0.9)
    np.testing.assert_allclose(shares.mean(axis=0), 0.25, atol=5.0 * 0.19 / np.sqrt(60))
    data, truth = effects.data_set(name, 0)
    middle = [data["outcome"][data["school"] == level].mean() for level in effects.SCHOOLS]
    rises = truth["mo(school)"] * np.cumsum([0.0, *shares[0]])
    assert np.abs(np.array(middle) - middle[0] - rises).max() < 5.0 * 1e4 / np.sqrt(300)


@pytest.mark.parametrize("name", ["monotone-normal", "monotone-poisson"])
def test_the_posterior_of_steps_without_privacy_is_between_least_squares_and_the_prior(name):
    """A clear share as its estimate says, a small one above 0, and truths within four deviations."""
    found = effects.steps_without_privacy(name, 0)["figures"]
    for true, low, high, mean in found.values():
        assert low < mean < high
        assert abs(mean - true) < 4.0 * (high - low) / 3.29
    shares = [found[f"share(mo(school)[{level}])"] for level in effects.STEPS]
    assert sum(share[3] for share in shares) == pytest.approx(1.0, abs=1e-3)
    assert 0.0 < shares[2][1] < shares[2][3] < 0.15
    data, _ = effects.data_set(name, 0)
    if name == "monotone-normal":
        last, first = (data["outcome"][data["school"] == effects.SCHOOLS[at]] for at in (4, 0))
        error = 1e4 * np.hypot(len(last) ** -0.5, len(first) ** -0.5)
        _, low, high, mean = found["mo(school)"]
        assert (high - low) / 3.29 == pytest.approx(error, rel=0.15)
        assert abs(mean - (last.mean() - first.mean())) < error


@pytest.mark.slow
def test_few_records_of_each_group_make_no_common_slope_too_near_to_0(monkeypatch):
    """Forty records a group, hardly any noise: beside the posterior without privacy.

    Of four sets the mean is within two of its standard errors, .15; without the third order and
    with variances of the capped matrix's shape it is a deviation off.
    """
    name = "slopes-bernoulli-few"
    monkeypatch.setitem(effects.CASES, name, effects.CASES[name]._replace(num=1200, seed=500))
    fits = effects.Fits(name)

    def off(number):
        found = fits.row(name, number, 1000.0)["figures"]["age"]
        wanted = effects.without_privacy(name, number)["figures"]["age"]
        return (found[3] - wanted[3]) / ((wanted[2] - wanted[1]) / (2.0 * 1.645))

    assert abs(np.mean([off(number) for number in range(4)])) < 0.35
    monkeypatch.setattr(centred_fit, "bent", lambda mixture, *others: mixture)
    monkeypatch.setattr(whitening, "shaped", lambda matrices, *others: matrices)
    assert np.mean([off(number) for number in range(2)]) < -0.6
