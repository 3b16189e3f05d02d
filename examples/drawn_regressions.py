"""Twelve regressions that were drawn from a list, each one call, beside fits without privacy.

    python examples/drawn_regressions.py [--only NAME ...] [--lifelines FOLDER] [--output docs/figures/regressions]

`CANDIDATES` was written down, and twelve of it drawn with `SEED`, before any of them was fitted. All twelve stay in the
results, whatever they say. Data come with statsmodels, scikit-learn and lifelines, which need not be importable: `--lifelines` is
the folder of its package. Bounds of schemas are round numbers from what the columns mean; typical values are not declared.
Writes `drawn.json`, `drawn.txt` and `drawn.png`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.resources
import importlib.util
import json
import pathlib
import platform
import subprocess
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
from regressions import BINARY, cancer, diabetes, fitted, number, ordered, statsmodels_table, whole
from scipy import optimize, special, stats

import tfp_dpvi as dpvi

SEED = 20261127
NUM = 12
EPSILON = 1.0
DELTA = 1e-6


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A regression of the list.

    Attributes:
      data: The name of one of `DATA`.
      formula: The formula.
      family: The family.
    """

    data: str
    formula: str
    family: str


CANDIDATES = {
    "log_visits": Candidate("randhie", "np.log1p(mdvis) ~ xage + female + logc + disea", "normal"),
    "hospital": Candidate("randhie", "inpatient ~ xage + female + logc + disea", "bernoulli"),
    "admissions": Candidate("randhie", "totadm ~ xage + female + disea", "poisson"),
    "mental_health": Candidate("randhie", "mhi ~ xage + female + income + disea", "normal"),
    "dollars": Candidate("spenders", "meddol ~ xage + female + logc + disea", "lognormal"),
    "visits_inflated": Candidate(
        "randhie", "mdvis ~ xage + female + logc + disea", "zero_inflated_negative_binomial"
    ),
    "religious": Candidate("fair", "religious ~ age + educ + rate_marriage", "ordinal"),
    "education": Candidate("fair", "educ ~ age + religious + children", "normal"),
    "years_married": Candidate("fair", "yrs_married ~ age + religious + educ", "normal"),
    "affairs": Candidate(
        "fair_pt", "naffairs ~ sex + nmarried + rate_marriage", "negative_binomial"
    ),
    "any_affair": Candidate("fair_pt", "any ~ sex + age + nmarried + rate_marriage", "bernoulli"),
    "vote": Candidate("anes96", "vote ~ PID + age + educ + income", "bernoulli"),
    "party": Candidate("anes96", "PID ~ age + educ + income + selfLR", "ordinal"),
    "left_right": Candidate("anes96", "selfLR ~ age + educ + income", "normal"),
    "schools": Candidate("star98", "p(NABOVE, pupils) ~ LOWINC + PERASIAN + PTRATIO", "binomial"),
    "diabetes_student": Candidate("diabetes", "target ~ bmi + bp + s5", "student"),
    "cancer_worst": Candidate(
        "cancer", "target ~ worst_radius + worst_texture + worst_smoothness", "bernoulli"
    ),
    "wine": Candidate("wine", "cultivar ~ alcohol + color_intensity + hue", "categorical"),
    "cd4": Candidate("actg175", "cd420 ~ cd40 + age + wtkg + treat", "normal"),
    "cd4_log": Candidate("actg175", "cd420 ~ cd40 + treat + symptom", "lognormal"),
    "aids": Candidate("actg175", "cens ~ treat + age + karnof + cd40", "bernoulli"),
    "nodes": Candidate("gbsg2", "pnodes ~ age + tsize + horTh", "negative_binomial"),
    "grade": Candidate("gbsg2", "tgrade ~ tsize + pnodes + age", "ordinal"),
    "tumour": Candidate("gbsg2", "tsize ~ age + pnodes", "gamma"),
    "kidney": Candidate("kidney", "death ~ age + male + black", "bernoulli"),
    "rearrest": Candidate("rossi", "censored(week, 53) ~ fin + age + prio", "weibull"),
    "arrest": Candidate("rossi", "arrest ~ fin + age + prio + mar", "bernoulli"),
    "senators": Candidate("senators", "censored(days, until) ~ decade + liberal", "weibull"),
    "senators_constant": Candidate(
        "senators", "censored(days, until) ~ decade + liberal", "exponential"
    ),
    "governments": Candidate("dd", "censored(duration, until) ~ democratic", "lognormal"),
    "flights": Candidate("modechoice", "air ~ hinc + psize", "bernoulli"),
}


def drawn() -> list[str]:
    """Returns the names of the twelve, in the order of the list."""
    chosen = np.random.default_rng(SEED).choice(len(CANDIDATES), NUM, replace=False)
    return [name for place, name in enumerate(CANDIDATES) if place in chosen]
