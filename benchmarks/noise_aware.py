"""Noise-aware DPVI (Alrawajfeh, Jälkö and Honkela, arXiv:2410.19371) and our posteriors on the same simulated data sets.

    python benchmarks/noise_aware.py [--cells logistic5-5000-1.0 ...] [--num 40] [--output docs/figures/noise_aware.json]

Sources: the paper's abstract, and the authors' public code, github.com/DPBayes/noise-aware-dpvi at 50de639: `noise_aware_dpsgd.py`
(private descent, priors, both inferences), `model.py` (loss, models of the trace, Laplace approximation), the settings in
`coverage_experiment.py` and `adult_uci_experiments.py`, `coverage_tools.py` (posterior draws). The rest of the paper was not used. This
script is a new implementation of the formulas of that code:

* Private descent on a mean-field normal's means and scales (softplus of rho), 10,000 steps, Poisson batches of a tenth, 10 draws of
  the parameters a step, shared by its records; the gradients in rho times a fixed factor; one flat clip over both; the learning rate
  sqrt(2) over sqrt(steps x variational parameters) x noise x clip. Parameters and noisy gradients of all steps are kept.
* The trace after the first fifth: g_t ~ N(q H (phi_t - phi*), noise^2 + s^2) with a diagonal H = softplus(a). Priors: phi* about the
  trace's mean with scale 1; a about the absolute slope of gradients on parameters, with the slope's standard error; s standard normal.
* The posterior: draws of phi* = (mu*, rho*), then of the parameters from N(mu*, softplus(rho*)^2), for every coordinate alone.

Differences: the authors sample with NumPyro's NUTS, 1,000 + 4,000 draws, or use Laplace's approximation. Their model has one factor per
coordinate, and phi* is normal given a and s: here draws are exact up to a fine grid in (a, s), from sums over the trace, so the seconds
are not those of NUTS. Their approximation starts Adam where the gradient in s is zero, so s stays zero: here too, and the mode is found in
one dimension instead of by 100,000 steps. They calibrate with Opacus's PRV accountant under add-or-remove, here `PrivacyPlan.calibrate`.
Gradients are in closed form. Priors and likelihoods are those of the cells.

Their clips and factors are for other data. Here steps (also fewer than theirs), clip, factor and learning rate (its multiple of the
above) come from a small grid, by the truth of ten data sets of the same cell from other seeds: once those of the smallest CRPS, once
those of the narrowest intervals among settings that cover at least 0.85 there (else of the best coverage). Such tuning is impossible for a
user and favours the peer. The paired posterior has `dpvi.pilot`'s settings, the centred one has none. Results of the grid are stored in
the file and reused.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import pathlib
import platform
import subprocess
import time
from typing import Any, NamedTuple

import numpy as np
from calibration import DELTA
from calibration_cells import parse
from intervals import QUANTILE, NonPrivate, crps, interval
from replicates import by_pilot
from scipy import optimize
from scipy.special import expit as sigmoid

from tfp_dpvi._tf import tf
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan
from tfp_dpvi.rehearsal.replicates import Replicates, centred

RATE, MONTE_CARLO, BURN_IN, POSTERIOR_DRAWS = 0.1, 10, 0.2, 4000
STEPS, CLIPS, FACTORS, SPEEDS = (
    (300, 1000, 10_000),
    (2.0, 4.0, 8.0, 16.0),
    (20.0, 100.0),
    (1.0, 4.0),
)
CELLS = ("logistic5-5000-1.0", "logistic5-1000-1.0", "linear-5000-1.0")
PILOT_SEED, NUM_PILOTS = 1001, 10


def softplus(value):
    return np.logaddexp(0.0, value)


class Logistic:
    """Intercept and weights, standard normal: gradients of the minus log likelihood and of the minus log prior.

    The first are of records [B] at draws theta [K, d], averaged over the draws with equal weights and with those given.
    """

    def __init__(self, width):
        self.width, self.start = width, np.zeros(width)

    def likelihood(self, theta, weights, x, y):
        residual = sigmoid(x @ theta.T) - y[:, None]
        return residual.mean(axis=1)[:, None] * x, residual @ (weights / len(theta)) * x

    def prior(self, theta):
        return theta


class Linear(Logistic):
    """Intercept, log of the noise scale, which is N(0, 0.5), and weights."""

    def likelihood(self, theta, weights, x, y):
        inverse = np.exp(-theta[:, 1])
        residual = (x @ np.delete(theta, 1, axis=1).T - y[:, None]) * inverse
        of_log = 1.0 - residual**2
        residual *= inverse
        plain = np.insert(residual.mean(axis=1)[:, None] * x, 1, of_log.mean(axis=1), axis=1)
        weights = weights / len(theta)
        others = residual @ np.delete(weights, 1, axis=1) * x
        return plain, np.insert(others, 1, of_log @ weights[:, 1], axis=1)

    def prior(self, theta):
        return theta / np.where(np.arange(self.width) == 1, 0.25, 1.0)


class Trace(NamedTuple):
    """Parameters and noisy gradients of every step, [T, 2d], means before scales; `noise` is the gradients' known noise, [2d]."""

    parameters: np.ndarray
    gradients: np.ndarray
    noise: np.ndarray

    def after_burn_in(self):
        begin = int(BURN_IN * len(self.parameters))
        return Trace(self.parameters[begin:], self.gradients[begin:], self.noise)


def descend(target, x, y, noise_multiplier, steps, clip, factor, speed, generator):
    """The authors' private descent."""
    width, num = target.width, len(x)
    scales = np.repeat([1.0, factor], width)
    noise = clip * noise_multiplier / scales
    rates = (
        speed * math.sqrt(2.0) * scales / (math.sqrt(steps * 2 * width) * noise_multiplier * clip)
    )
    phi = np.concatenate([target.start, np.full(width, -6.0)])
    trace = Trace(np.empty((steps, 2 * width)), np.empty((steps, 2 * width)), noise)
    for step in range(steps):
        trace.parameters[step] = phi
        chosen = np.flatnonzero(generator.random(num, np.float32) < RATE)
        draws = generator.normal(size=(MONTE_CARLO, width))
        scale, slope = softplus(phi[width:]), sigmoid(phi[width:])
        theta = phi[:width] + scale * draws
        in_means, in_scales = target.likelihood(theta, draws, x[chosen], y[chosen])
        prior = target.prior(theta) / num
        in_means += prior.mean(axis=0)
        in_scales += (prior * draws).mean(axis=0) - 1.0 / (scale * num)
        each = np.concatenate([in_means, in_scales * slope], axis=1) * scales
        each *= np.minimum(1.0, clip / np.linalg.norm(each, axis=1))[:, None]
        trace.gradients[step] = each.sum(axis=0) / scales + noise * generator.normal(size=2 * width)
        phi = phi - rates * trace.gradients[step]
    return trace


class Sums:
    """What the model of the trace needs of it, a coordinate a place, and its priors.

    Args:
      trace: without its burn-in.
      rate: records of a batch over all.
    """

    def __init__(self, trace, rate=RATE):
        self.rate, self.noise, self.num = rate, trace.noise, len(trace.parameters)
        self.center, self.mean = trace.parameters.mean(axis=0), trace.gradients.mean(axis=0)
        moved, left = trace.parameters - self.center, trace.gradients - self.mean
        self.squares, self.products = np.sum(moved**2, axis=0), np.sum(moved * left, axis=0)
        self.left = np.sum(left**2, axis=0)
        self.a = np.abs(self.products / self.squares) / rate
        self.a_sd = trace.noise / (np.sqrt(self.squares) * rate)

    def log_density(self, place, a, s):
        """Of a and s at one coordinate, the optimum integrated out, and the optimum's conditional mean and standard deviation."""
        rate, num, mean = self.rate, self.num, self.mean[place]
        slope, variance = rate * softplus(a), self.noise[place] ** 2 + s**2
        spread = (
            self.left[place] - 2.0 * slope * self.products[place] + slope**2 * self.squares[place]
        )
        marginal = variance / num + slope**2
        value = -0.5 * (
            (num - 1) * np.log(variance) + spread / variance + np.log(marginal) + mean**2 / marginal
        )
        value = value - 0.5 * (((a - self.a[place]) / self.a_sd[place]) ** 2 + s**2)
        precision = 1.0 + num * slope**2 / variance
        return (
            value,
            self.center[place] - num * slope * mean / variance / precision,
            1.0 / np.sqrt(precision),
        )

    def draws(self, num, generator):
        """Draws of the optimum [num, 2d] and of the diagonal of H."""
        found = [self._draws(place, num, generator) for place in range(len(self.center))]
        optimum, curvature = zip(*found, strict=True)
        return np.stack(optimum, axis=-1), np.stack(curvature, axis=-1)

    def _draws(self, place, num, generator, points=241):
        most = math.sqrt(max(0.0, self.left[place] / self.num - self.noise[place] ** 2)) + 8.0
        box = [
            self.a[place] + 12.0 * self.a_sd[place] * np.array([-1.0, 1.0]),
            np.array([0.0, most]),
        ]
        for _ in range(4):  # Closer and closer to where the density is.
            axes = [low + (high - low) * (np.arange(points) + 0.5) / points for low, high in box]
            value = self.log_density(place, axes[0][:, None], axes[1][None, :])[0]
            seen = value > value.max() - 20.0
            cells = [(high - low) / points for low, high in box]
            inside = [np.flatnonzero(seen.any(axis=1)), np.flatnonzero(seen.any(axis=0))]
            box = [
                np.array([max(low, axis[rows[0]] - cell), min(high, axis[rows[-1]] + cell)])
                for (low, high), axis, rows, cell in zip(box, axes, inside, cells, strict=True)
            ]
        weights = np.exp(value - value.max()).ravel()
        rows = np.unravel_index(
            generator.choice(weights.size, num, p=weights / weights.sum()), value.shape
        )
        a, s = (
            axis[row] + cell * (generator.random(num) - 0.5)
            for axis, row, cell in zip(axes, rows, cells, strict=True)
        )
        _, mean, sd = self.log_density(place, a, s)
        return mean + sd * generator.normal(size=num), softplus(a)

    def laplace(self):
        """The authors' Laplace approximation: the optimum's mode and standard deviation, [2d] each."""
        return np.transpose([self._laplace(place) for place in range(len(self.center))])

    def _laplace(self, place):
        rate, num, mean, variance = self.rate, self.num, self.mean[place], self.noise[place] ** 2
        products, squares = self.products[place], self.squares[place]

        def away(h):  # The trace's mean minus the optimum's mode.
            return num * rate * h * mean / variance / (1.0 + num * (rate * h) ** 2 / variance)

        def objective(a):
            h = softplus(a)
            slope, c = rate * h, away(h)
            fit = (num * (mean - slope * c) ** 2 - 2.0 * slope * products + slope**2 * squares) / (
                2.0 * variance
            )
            # Once for every step, as in the authors' code.
            return (
                fit
                + num * softplus(-h)
                + 0.5 * ((a - self.a[place]) / self.a_sd[place]) ** 2
                + 0.5 * c**2
            )

        reach = 12.0 * self.a_sd[place] + 20.0
        a = optimize.minimize_scalar(
            objective,
            bounds=(self.a[place] - reach, self.a[place] + reach),
            method="bounded",
            options={"xatol": 1e-8},
        ).x
        h, first, second = softplus(a), sigmoid(a), sigmoid(a) * sigmoid(-a)
        c = away(h)
        rest = mean - rate * h * c
        by_h = (
            rate**2 * h * squares - num * rate * c * rest - rate * products
        ) / variance - num * sigmoid(-h)
        by_h_twice = rate**2 * (num * c**2 + squares) / variance + num * sigmoid(h) * sigmoid(-h)
        hessian = [
            num * (rate * h) ** 2 / variance + 1.0,
            num * rate * first * (rest - rate * h * c) / variance,
            by_h_twice * first**2 + by_h * second + 1.0 / self.a_sd[place] ** 2,
        ]
        return self.center[place] - c, 1.0 / math.sqrt(hessian[0] - hessian[1] ** 2 / hessian[2])


def noise_aware(trace, generator):
    """Draws of the parameters from both posteriors of the authors, and from the last iterate; and the seconds of the first two."""
    width = trace.parameters.shape[1] // 2
    normal = generator.normal(size=(POSTERIOR_DRAWS, width))
    begun = time.perf_counter()
    sums = Sums(trace.after_burn_in())
    optimum, _ = sums.draws(POSTERIOR_DRAWS, generator)
    found = {"noise-aware": optimum[:, :width] + softplus(optimum[:, width:]) * normal}
    took = [time.perf_counter() - begun]
    mode, sd = sums.laplace()
    scale = np.sqrt(sd[:width] ** 2 + softplus(mode[width:]) ** 2)
    found["noise-aware, Laplace"] = mode[:width] + scale * normal
    took.append(time.perf_counter() - begun - took[0])
    last = trace.parameters[-1]
    found["last iterate"] = last[:width] + softplus(last[width:]) * normal
    return found, took


class Cell:
    """Simulated data sets of a cell of `calibration.py`, from one stream of random numbers."""

    def __init__(self, cell):
        model, self.size, self.epsilon = parse(cell)
        self.inputs, self.public = model.inputs, model.public
        self.prior, self.likelihood = model.make()
        self.coordinates = Coordinates(self.prior, log_scales=True)
        is_linear = "linear" in cell
        self.target = (Linear if is_linear else Logistic)(self.coordinates.num)
        budget: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": DELTA,
            "sampling": PoissonSampling(RATE),
        }
        self.noise_multipliers = {
            steps: PrivacyPlan.calibrate(**budget, num_releases=steps).noise_multiplier
            for steps in STEPS
        }

    def sets(self, seed):
        generator = np.random.default_rng(seed)
        while True:
            x = self.inputs(generator, self.size)
            params = self.prior.sample(
                seed=tf.constant(generator.integers(2**31, size=2), tf.int32)
            )
            seeds = tf.constant(generator.integers(2**31, size=2), tf.int32)
            y = self.likelihood(params, x).sample(seed=seeds).numpy()
            yield x, y, self.coordinates.flatten_one(params)

    def trace(self, x, y, settings, generator):
        rows = np.insert(x.astype("float64"), 0, 1.0, axis=1)
        return descend(
            self.target,
            rows,
            y.astype("float64"),
            self.noise_multipliers[settings[0]],
            *settings,
            generator,
        )


def scores(draws, truth, mean, sd):
    """Of draws of one posterior; `mean` and `sd` are of the posterior without privacy."""
    low, high = interval(draws)
    return {
        "covered": (low <= truth) & (truth <= high),
        "width": (high - low) / (2 * QUANTILE * sd),
        "crps": crps(draws[:1000], truth),
        "off": (draws.mean(axis=0) - mean) / sd,
    }


def try_settings(cell, exact, generator):
    """What each setting of the grid comes to on data sets of their own."""
    sets = [
        (x, y, truth, *exact.fit(truth, x, y))
        for x, y, truth in itertools.islice(cell.sets(PILOT_SEED), NUM_PILOTS)
    ]
    tried = []
    for settings in itertools.product(STEPS, CLIPS, FACTORS, SPEEDS):
        found = []
        for x, y, *known in sets:
            draws = noise_aware(cell.trace(x, y, settings, generator), generator)[0]["noise-aware"]
            found.append(scores(draws, *known))
        means = {
            key: round(float(np.mean([row[key] for row in found])), 4)
            for key in ("crps", "covered", "width")
        }
        tried.append({"settings": settings, **means})
        print(tried[-1], flush=True)
    return tried


def chosen(tried):
    """The settings of the least CRPS, and of the narrowest intervals that cover."""
    covering = min(tried, key=lambda one: (max(0.0, 0.85 - one["covered"]), one["width"]))
    best = {"by CRPS": min(tried, key=lambda one: one["crps"]), "by coverage": covering}
    return {kind: tuple(one["settings"]) for kind, one in best.items()}


def run(name, num, seed, done, save):
    cell, generator = Cell(name), np.random.default_rng(seed + 77)
    exact = NonPrivate(BayesianModel(cell.prior, cell.likelihood), cell.coordinates)
    tried = done.get("tried") or try_settings(cell, exact, generator)
    save({"tried": tried})
    settings = chosen(tried)
    sets = cell.sets(seed)
    x, y, _ = next(sets)  # Only for its shapes.
    fitted = (cell.prior, cell.likelihood, x, y, cell.public(np.random.default_rng(7), 1000))
    budget = {"epsilon": cell.epsilon, "delta": DELTA}
    ours = {
        "centred": Replicates(centred(*fitted, **budget)),
        "paired": Replicates(by_pilot("paired", *fitted, **budget)),
    }
    rows: dict[str, list[dict[str, Any]]] = {}
    took: dict[str, list[float]] = {}
    for number in range(num):
        x, y, truth = next(sets)
        known = truth, *exact.fit(truth, x, y)
        every = {}
        for kind, replicates in ours.items():
            fit = replicates.fit(x, y, seed + number)
            every[kind] = fit.draws
            took.setdefault(kind, []).append(fit.posterior_seconds)
        for how, one in settings.items():
            begun = time.perf_counter()
            trace = cell.trace(x, y, one, generator)
            took.setdefault("descent", []).append(time.perf_counter() - begun)
            found, times = noise_aware(trace, generator)
            every.update({f"{kind}, {how}": draws for kind, draws in found.items()})
            for kind, seconds in zip(found, times, strict=False):
                took.setdefault(f"{kind}, {how}", []).append(seconds)
        for kind, draws in every.items():
            rows.setdefault(kind, []).append(scores(draws, *known))
        print(
            number,
            {
                kind: float(np.mean([one["covered"] for one in found]))
                for kind, found in rows.items()
            },
            flush=True,
        )
    summary = {
        "num": num,
        "noise_multiplier": {
            **cell.noise_multipliers,
            **{kind: one.method.mechanism.noise_multiplier for kind, one in ours.items()},
        },
        "settings": {
            how: dict(zip(("steps", "clip", "factor", "speed"), one, strict=True))
            for how, one in settings.items()
        },
        "tried": tried,
        "seconds": {kind: round(float(np.median(values)), 3) for kind, values in took.items()},
    }
    for kind, found in rows.items():
        covered = np.array([row["covered"] for row in found], float)
        by_set = covered.mean(axis=1)
        summary[kind] = {
            "coverage": round(float(by_set.mean()), 4),
            "error": round(float(by_set.std(ddof=1) / math.sqrt(num)), 4),
            "by_coordinate": covered.mean(axis=0).round(3).tolist(),
            "width": round(float(np.mean([row["width"] for row in found])), 3),
            "crps": round(float(np.mean([row["crps"] for row in found])), 5),
            "crps_error": round(
                float(np.std([row["crps"].mean() for row in found], ddof=1) / math.sqrt(num)), 5
            ),
            "mean_off": np.mean([row["off"] for row in found], axis=0).round(2).tolist(),
            "rms_off": round(float(np.sqrt(np.mean([row["off"] ** 2 for row in found]))), 3),
        }
    return summary


def main(given=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--num", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/noise_aware.json")
    )
    arguments = parser.parse_args(given)
    done = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
    versions = {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "revision": subprocess.check_output(
            ["git", "describe", "--always", "--dirty"], text=True
        ).strip(),
    }
    for name in arguments.cells:

        def save(cell, name=name):
            done[name] = cell
            arguments.output.write_text(json.dumps(done, indent=1) + "\n")

        save({**run(name, arguments.num, arguments.seed, done.get(name, {}), save), **versions})
    print(
        "| cell | data sets | posterior | coverage | width | CRPS | seconds |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for name, cell in done.items():
        for kind, found in cell.items():
            if isinstance(found, dict) and "coverage" in found:
                print(
                    f"| {name} | {cell['num']} | {kind} | {found['coverage']:.3f} ± {found['error']:.3f} | "
                    f"{found['width']:.2f} | {found['crps']:.4f} | {cell['seconds'].get(kind, '')} |"
                )
    print(json.dumps(done))


if __name__ == "__main__":
    main()
