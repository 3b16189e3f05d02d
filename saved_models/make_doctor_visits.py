"""Makes `saved_models/doctor_visits`: a private regression of persons with several years each, exported.

The RAND Health Insurance Experiment (1974 to 1982; bundled with statsmodels) gave families insurance at random, with a share of
the bills that they paid themselves. A row is a year of a person, and a person is what is protected, with up to five rows.

    python saved_models/make_doctor_visits.py [FOLDER]
"""

from __future__ import annotations

import importlib.resources
import pathlib
import sys

import numpy as np

import tfp_dpvi as dpvi  # isort: skip  (first, so that TensorFlow loads quietly)
import pandas as pd
import tensorflow as tf

FORMULA = "visited ~ pays + age + female + health + (1 | person)"
HEALTH = ["excellent", "good", "fair or poor"]
SCHEMA = {
    "visited": {"type": "binary", "share": 0.7},
    "pays": {"type": "integer", "lower": 0, "upper": 100, "typical": [40, 40], "unit": "per cent"},
    "age": {"type": "continuous", "lower": 0, "upper": 65, "unit": "years"},
    "female": {"type": "binary"},
    "health": {"type": "categorical", "categories": HEALTH},
}


def load() -> pd.DataFrame:
    """Returns a row for each year of a person."""
    folder = importlib.resources.files("statsmodels") / "datasets/randhie/src"
    with (folder / "randhie.csv").open() as file:
        years = pd.read_csv(file)
    unwell = (years["hlthf"] + years["hlthp"]) > 0
    return pd.DataFrame(
        {
            "person": years["zper"],
            "visited": (years["mdvis"] > 0).astype(int),
            "pays": years["coins"],
            "age": years["xage"],
            "female": years["female"],
            "health": np.select([unwell, years["hlthg"] > 0], HEALTH[::-1][:2], HEALTH[0]),
        }
    )


def learn(years: pd.DataFrame) -> dpvi.Regression:
    """Returns the regression, (1, 1e-6)-differentially private for each person."""
    return dpvi.regression(
        FORMULA,
        years,
        "bernoulli",
        SCHEMA,
        unit="person",
        max_rows_per_unit=5,
        epsilon=1.0,
        delta=1e-6,
    )


def largest_difference(result: dpvi.Regression, folder: pathlib.Path) -> float:
    """Returns how far predictions of the export are from the model's, at invented persons."""
    new = pd.DataFrame({"pays": [0, 25, 50, 95], "age": [3.5, 30.0, 45.0, 60.0]})
    new["female"], new["health"] = [0, 1, 1, 0], [*HEALTH, HEALTH[0]]
    numbers = {
        name: tf.constant(new[name].to_numpy("float32")) for name in ("pays", "age", "female")
    }
    numbers["health"] = tf.constant(new["health"].tolist())
    served = tf.saved_model.load(str(folder)).predict(**numbers)
    wanted = result.predict(new)
    return max(np.abs(served[name].numpy() - wanted[name]).max() for name in served)


def main() -> None:
    """Learns, exports, compares and prints the report."""
    folder = (
        pathlib.Path(sys.argv[1])
        if len(sys.argv) > 1
        else pathlib.Path(__file__).parent / "doctor_visits"
    )
    result = learn(load())
    result.export(folder, overwrite=True)
    print(
        f"{folder}: predictions differ from the model's by {largest_difference(result, folder):.1g}"
    )
    print(result.report())


if __name__ == "__main__":
    main()
