"""Regressions without privacy by Bambi and NUTS, on data that `benchmarks/field.py` wrote, in an environment of its own.

    python benchmarks/peers/bambi_peer.py FILE.npz FAMILY DRAWS.npy

FILE has `x`, shape [n, d], without a column of ones, and `y`, shape [n]. FAMILY is "bernoulli" or "gaussian". The priors are those of
the cells: standard normal coefficients, and a lognormal(0, 0.5) standard deviation. Writes draws of the intercept, the logarithm of the
standard deviation if there is one, and the coefficients, shape [draws, numbers].
Requirements: bambi.txt.
"""

import logging
import sys
import warnings

import bambi
import numpy as np
import pandas as pd


def main() -> None:
    path, family, output = sys.argv[1:]
    warnings.filterwarnings("ignore")
    logging.getLogger("pymc").setLevel(logging.ERROR)
    data = np.load(path)
    names = [f"x{number}" for number in range(data["x"].shape[1])]
    table = pd.DataFrame(data["x"].astype(float), columns=names)
    table["y"] = data["y"].astype(float if family == "gaussian" else int)
    priors = {name: bambi.Prior("Normal", mu=0.0, sigma=1.0) for name in ("Intercept", *names)}
    if family == "gaussian":
        priors["sigma"] = bambi.Prior("LogNormal", mu=0.0, sigma=0.5)
    model = bambi.Model(
        f"y ~ {' + '.join(names)}",
        table,
        family=family,
        priors=priors,
        # The intercept's prior is that of a record whose covariates are 0.
        center_predictors=False,
    )
    fit = model.fit(draws=1000, tune=1000, chains=2, cores=1, random_seed=1, progressbar=False)
    posterior = fit["posterior"] if hasattr(fit, "children") else fit.posterior
    columns = {name: np.asarray(posterior[name]).reshape(-1) for name in posterior.data_vars}
    scale = [np.log(columns["sigma"])] if family == "gaussian" else []
    found = [columns["Intercept"], *scale, *(columns[name] for name in names)]
    np.save(output, np.stack(found, axis=1))


if __name__ == "__main__":
    main()
