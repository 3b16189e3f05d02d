"""Warnings at the front door name what its user can set, and nothing else."""

import dataclasses
import logging
import re

import numpy as np
import pytest

from tfp_dpvi.calibrated.checks import Checks, ParameterChecks

pytest.importorskip("formulae")

from tfp_dpvi.regressions import words
from tfp_dpvi.regressions.outcomes import FAMILIES

NAMES = {"age": "coefficients[1]", "ward[B]": "coefficients[12]", "alpha": "alpha"}
# What a user of a formula has not got.
FOREIGN = re.compile(
    r"tfd|epochs|public_inputs|public inputs|clip|learning rate|optimizer|window|likelihood|"
    r"coefficients\[|terms of x|scale that depends|batch|steps next"
)
UNKNOWN = np.full(3, np.nan)
TRAINED = {"distance": 0.1, "halves": 0.5, "kappa": 1.0, "curvature_signal": 9.0}
FAILED = {
    "distance": Checks(**{**TRAINED, "distance": 3.0, "lack_of_fit": 0.0}),
    "halves": Checks(**{**TRAINED, "halves": 1e-9, "lack_of_fit": 0.0}),
    "kappa": Checks(**{**TRAINED, "kappa": 2.5, "lack_of_fit": 0.0}),
    "mismatch": Checks(**TRAINED, mismatch=0.7, lack_of_fit=0.0),
    "correlations": Checks(**TRAINED, hidden=3.0, apart=1.0, lack_of_fit=0.0),
    "lack of fit": Checks(**TRAINED, lack_of_fit=0.31, lack_of_fit_z=8.0),
    "ranks": Checks(**TRAINED, lack_of_fit=0.0, lack_of_fit_z=0.0, ranks=1e-7),
    "cut": Checks(**TRAINED, lack_of_fit=0.0, weight_variation=0.5, cut=0.03, cut_noise=0.004),
    "weights": Checks(**TRAINED, lack_of_fit=0.0, cut=0.1, cut_noise=0.3),
    **{
        name: Checks(
            **TRAINED,
            lack_of_fit=0.0,
            parameters=ParameterChecks(
                **{
                    **{field.name: UNKNOWN for field in dataclasses.fields(ParameterChecks)},
                    "names": ["alpha", "coefficients[1]", "coefficients[12]"],
                    name: np.array([1, 2, 3]),
                }
            ),
        )
        for name in ("width", "extent", "tail")
    },
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("failed", FAILED)
def test_each_warning_is_in_the_words_of_a_formula(failed, family):
    (sentence,) = FAILED[failed].warnings
    found = words.in_own_words(sentence, family, NAMES)
    assert found != sentence
    assert not FOREIGN.search(found), found
    assert "{" not in found


def test_names_and_figures_stay():
    width, fit = (FAILED[name].warnings[0] for name in ("width", "lack of fit"))
    assert "age, ward[B] is up to 3 times" in words.in_own_words(width, "normal", NAMES)
    found = words.in_own_words(fit, "poisson", NAMES)
    assert "1.31 times" in found
    assert "z = 8.0" in found
    assert 'family="negative_binomial"' in found


def test_persons_without_an_intercept_are_told_of_it():
    """Student-t outcomes would not mend what rows of a person have in common."""
    (sentence,) = FAILED["lack of fit"].warnings
    found = words.in_own_words(sentence, "normal", NAMES, may_be_alike=True)
    assert "(1 | unit); or try family=" in found


def test_a_warning_that_is_not_known_is_still_said():
    found = words.in_own_words("new: coefficients[1] is odd", "normal", NAMES)
    assert found == "new: age is odd"


def test_the_log_has_the_doors_words_alone(caplog):
    with caplog.at_level(logging.WARNING, "tfp_dpvi"):
        with words.own_log():
            words.LOG.warning("Do not trust the posterior's intervals: %s.", "tfd")
            words.LOG.warning("Disk is full.")
        words.LOG.warning("Do not trust the posterior's intervals: %s.", "after")
    assert [record.getMessage()[:12] for record in caplog.records] == [
        "Disk is full",
        "Do not trust",
    ]
