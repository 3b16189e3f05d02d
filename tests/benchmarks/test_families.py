"""`benchmarks/families.py`: its cells are those of the families, and its verdicts can fail."""

import json

import families
import numpy as np
import pytest
from support.regressions import OUTCOMES, SLOPES, asked, simulated

from tfp_dpvi.regressions.fit import described
from tfp_dpvi.regressions.outcomes import FAMILIES
from tfp_dpvi.rehearsal.result import Rehearsal

pytest.importorskip("formulae")


def rehearsed(inside, warned):
    """A rehearsal of 12 fits of two numbers, of which so many intervals hold both."""
    row = {"truth": [0.0, 0.0], "mean": [0.1, 0.1], "sd": [1.0, 1.0], "failed": False}
    row |= {"doubtful": [], "outside": 0.0, "warnings": [], "seconds": 1.0}
    rows = [
        {
            **row,
            "low": [-1.0 if number < inside else 0.5] * 2,
            "high": [1.0] * 2,
            "warnings": ["wrong"] if number < warned else [],
        }
        for number in range(12)
    ]
    fixed = {"a": 0.0, "b": 0.0}
    return Rehearsal(("a", "b"), (500,), (1.0,), 1e-5, 0.9, 0, fixed, {(500, 1.0): rows})


def test_a_cell_is_judged_by_its_coverage_and_its_warnings():
    right = families.cell(rehearsed(11, 0), 500, 1.0)
    assert (right["coverage"], right["is_calibrated"], right["is_quiet"]) == (0.9167, True, True)
    wrong = families.cell(rehearsed(3, 2), 500, 1.0)
    assert (wrong["coverage"], wrong["is_calibrated"], wrong["is_quiet"]) == (0.25, False, False)
    assert json.loads(json.dumps([right, wrong])) == [right, wrong]
    # Both numbers of a set go together: the error is that of 12 sets, not of 24 intervals.
    assert wrong["coverage_error"] == pytest.approx(np.sqrt(0.25 * 0.75 / 11), abs=1e-3)


@pytest.mark.parametrize("name", families.FAMILIES)
def test_cells_are_those_of_the_tests_of_maximum_likelihood(name):
    formula, _, schema, rows = families.asked(name)
    design, parts = described(formula, name, schema)
    assert (formula, families.SLOPES) == (asked(name)[0], SLOPES)
    outcome = design.schema.columns["y"]
    assert type(outcome) is type(OUTCOMES[name])
    assert getattr(outcome, "upper", None) == getattr(OUTCOMES[name], "upper", None)
    assert getattr(outcome, "categories", None) == getattr(OUTCOMES[name], "categories", None)
    names = set(parts.names_of_model(design))
    if name == "ordinal":
        names = names - {"Intercept", "gaps"} | {"threshold[no|low]", "threshold[low|high]"}
    assert set(families.truth(name)) == names
    assert len(design.rows(rows).common) == families.NUM_ROWS


def test_every_family_has_a_cell():
    assert set(families.FAMILIES) == set(FAMILIES)


def test_the_score_of_a_levels_cell_is_0_at_50_years_and_45000_dollars():
    """Each level has the score of the tests: of "high" it is the other one's with minus."""
    truth = families.truth("categorical")
    for start, sign in (("low: ", 1.0), ("high: ", -1.0)):
        score = truth[start + "Intercept"] + 50 * truth[start + "age"]
        assert score + 45000 * truth[start + "income"] == pytest.approx(0.0, abs=1e-12)
        assert truth[start + "age"] == sign * SLOPES["age"]
    ordinal = families.truth("ordinal")
    score = 50 * ordinal["age"] + 45000 * ordinal["income"]
    assert ordinal["threshold[no|low]"] - score == pytest.approx(-0.5)
    assert ordinal["threshold[low|high]"] - score == pytest.approx(1.0)


@pytest.mark.parametrize("name", families.CENSORED)
def test_a_third_of_the_outcomes_of_a_censored_cell_are_censored(name):
    formula, family, schema, rows = families.asked(name)
    design, parts = described(formula, family, schema)
    limits = design.rows(rows).limits[:, 0]
    np.testing.assert_array_equal(limits, rows["until"])
    assert parts.layout.censored == "right"
    outcomes = simulated(family, num=families.NUM_ROWS)["y"]
    assert 0.2 < np.mean(outcomes >= limits) < 0.5
