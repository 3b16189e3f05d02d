"""Records of right regressions in awkward units, for each family."""

import numpy as np
import pandas as pd

from tfp_dpvi.data import Binary, Categorical, Continuous, Integer, Schema

NUM = 2000
FORMULA = "y ~ age + income + sex + ward"
COLUMNS = {
    "age": Integer(18, 90, unit="years"),
    "income": Continuous(1000.0, 300000.0, typical=(45000.0, 30000.0), unit="dollars"),
    "ward": Categorical(["A", "B", "C"]),
    "sex": Binary(),
}
SLOPES = {"age": 0.02, "income": 8e-6, "sex": 0.3, "ward[B]": 0.4, "ward[C]": -0.6}
WORDS = ["no", "low", "high"]
OUTCOMES = {
    "normal": Continuous(-50000.0, 150000.0),
    "bernoulli": Binary(),
    "binomial": Integer(0, 40),
    "beta_binomial": Integer(0, 40),
    "poisson": Integer(0, 300, typical=(3.0, 3.0)),
    "negative_binomial": Integer(0, 900, typical=(3.0, 5.0)),
    "categorical": Categorical(WORDS),
    "ordinal": Categorical(WORDS),
    "student": Continuous(-500000.0, 500000.0, typical=(30000.0, 12000.0)),
    "lognormal": Continuous(10.0, 1e7, typical=(40000.0, 40000.0)),
    "gamma": Continuous(1e-6, 1000.0, typical=(3.0, 3.0)),
    "weibull": Continuous(1e-6, 1000.0, typical=(3.0, 3.0)),
    "exponential": Continuous(1e-6, 1000.0, typical=(3.0, 3.0)),
    "beta": Continuous(1e-6, 1.0 - 1e-6),
    "zero_inflated_poisson": Integer(0, 300, typical=(3.0, 3.0)),
    "zero_inflated_negative_binomial": Integer(0, 900, typical=(3.0, 5.0)),
    "hurdle_poisson": Integer(0, 300, typical=(3.0, 3.0)),
}


def asked(family):
    """Returns the formula and the schema of a family; binomial outcomes have their trials in n."""
    columns = {"y": OUTCOMES[family], **COLUMNS}
    if family not in ("binomial", "beta_binomial"):
        return FORMULA, Schema(columns)
    return FORMULA.replace("y ~", "p(y, n) ~"), Schema({**columns, "n": Integer(0, 40)})


def simulated(family, seed=1, num=NUM):
    """Records of a right model: uncentred, in dollars, with a level that one in 20 has."""
    rng = np.random.default_rng(seed)
    data = {
        "age": np.round(np.clip(rng.normal(52.0, 14.0, num), 18.0, 90.0)),
        "income": np.clip(rng.lognormal(10.6, 0.6, num), 1000.0, 300000.0),
        "ward": rng.choice(["A", "B", "C"], num, p=[0.75, 0.2, 0.05]),
        "sex": rng.integers(0, 2, num),
    }
    shift = pd.Series(data["ward"]).map({"A": 0.0, "B": 0.4, "C": -0.6}).to_numpy()
    score = 0.02 * (data["age"] - 50.0) + 8e-6 * (data["income"] - 45000.0)
    score += 0.3 * data["sex"] + shift
    mean = np.exp(0.5 + score)
    share = 1.0 / (1.0 + np.exp(-score))
    kept = rng.random(num) < 0.8
    if family in ("binomial", "beta_binomial"):
        data["n"] = rng.integers(0, 21, num)
    data["y"] = {
        "normal": lambda: 30000.0 + 8000.0 * score + 9000.0 * rng.normal(size=num),
        "bernoulli": lambda: (rng.random(num) < 1.0 / (1.0 + np.exp(-score))).astype(int),
        "binomial": lambda: rng.binomial(data["n"], share),
        "beta_binomial": lambda: rng.binomial(data["n"], rng.beta(8.0 * share, 8.0 - 8.0 * share)),
        "poisson": lambda: rng.poisson(mean),
        "negative_binomial": lambda: rng.poisson(rng.gamma(1.0, mean)),
        "categorical": lambda: np.array(WORDS)[
            (np.stack([0.0 * score, score, -score], axis=1) + rng.gumbel(size=(num, 3))).argmax(1)
        ],
        "ordinal": lambda: np.array(WORDS)[
            np.digitize(score + rng.logistic(size=num), [-0.5, 1.0])
        ],
        "student": lambda: 30000.0 + 8000.0 * score + 6000.0 * rng.standard_t(4.0, size=num),
        "lognormal": lambda: np.exp(10.0 + score + 0.7 * rng.normal(size=num)),
        "gamma": lambda: np.maximum(rng.gamma(2.0, mean / 2.0), 1e-6),
        "weibull": lambda: np.maximum(mean * rng.weibull(1.5, num) / 0.9027453, 1e-6),
        "exponential": lambda: np.maximum(rng.exponential(mean), 1e-6),
        "beta": lambda: np.clip(rng.beta(8.0 * share, 8.0 - 8.0 * share), 1e-6, 1.0 - 1e-6),
        "zero_inflated_poisson": lambda: kept * rng.poisson(mean),
        "zero_inflated_negative_binomial": lambda: kept * rng.poisson(rng.gamma(1.0, mean)),
        "hurdle_poisson": lambda: kept * above_zero(rng, mean),
    }[family]()
    return data


def above_zero(rng, mean):
    """Counts of Poisson distributions given that they are not 0."""
    counts = rng.poisson(mean)
    while (counts == 0).any():
        counts = np.where(counts == 0, rng.poisson(mean), counts)
    return counts
