"""Coverage of 90 % intervals of private fits, on simulated data sets with parameters drawn from the prior.

    python benchmarks/calibration.py [--cells NAME ...] [--num 200] [--jobs 2] [--out FOLDER]

A cell is a model, a number of records and an epsilon. All cells use the same settings: clip and batches from `dpvi.pilot` with
synthetic inputs. Each cell writes a JSON file; if it exists, only missing data sets are run. The last line is a summary as JSON.
"""

import argparse
import concurrent.futures
import json
import math
import pathlib
import platform
import subprocess
import sys
import time

import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp

import tfp_dpvi as dpvi
from tfp_dpvi.bayes.coordinates import Coordinates
from tfp_dpvi.calibrated.posterior import Calibrator
from tfp_dpvi.privacy import PrivacyLedger

tfd = tfp.distributions
DELTA, LEVEL, NUM_DRAWS = 1e-5, 0.9, 1000
NUM_TEST, NUM_PREDICTIVE = 2000, 200  # Records and draws of a test log-likelihood.


def eta(params, x):
    return params["b"] + tf.linalg.matvec(x, params["w"])


def coefficients(width, scale=1.0, intercept=(0.0, 1.0)):
    return {"b": tfd.Normal(*intercept), "w": tfd.Sample(tfd.Normal(0.0, scale), width - 1)}


def logistic(width, scale=1.0):
    prior = tfd.JointDistributionNamed(coefficients(width, scale, (0.0, scale)))
    return prior, lambda params, x: tfd.Bernoulli(logits=eta(params, x), dtype=tf.float32)


def rare(width):
    """A few per cent of ones."""
    prior = tfd.JointDistributionNamed(coefficients(width, 0.5, (-3.5, 0.5)))
    return prior, lambda params, x: tfd.Bernoulli(logits=eta(params, x), dtype=tf.float32)


def linear(width):
    prior = tfd.JointDistributionNamed({**coefficients(width), "s": tfd.LogNormal(0.0, 0.5)})
    return prior, lambda params, x: tfd.Normal(eta(params, x), params["s"])


def poisson(width):
    prior = tfd.JointDistributionNamed(coefficients(width, 0.3, (1.0, 0.5)))
    return prior, lambda params, x: tfd.Poisson(log_rate=eta(params, x))


def negative_binomial(width):
    prior = tfd.JointDistributionNamed(
        {**coefficients(width, 0.3, (1.0, 0.5)), "r": tfd.LogNormal(1.0, 0.5)}
    )

    def likelihood(params, x):
        return tfd.NegativeBinomial(params["r"], logits=eta(params, x) - tf.math.log(params["r"]))

    return prior, likelihood


def hierarchical(groups, width):
    prior = tfd.JointDistributionNamed(
        {
            "mu": tfd.Normal(0.0, 1.0),
            "tau": tfd.LogNormal(-0.5, 0.5),
            "u": lambda mu, tau: tfd.Sample(tfd.Normal(mu, tau), groups),
            "w": tfd.Sample(tfd.Normal(0.0, 1.0), width),
        }
    )

    def likelihood(params, x):
        logits = tf.gather(params["u"], x["group"]) + tf.linalg.matvec(x["x"], params["w"])
        return tfd.Bernoulli(logits=logits, dtype=tf.float32)

    return prior, likelihood


def normals(scales):
    def draw(generator, size):
        return (generator.normal(size=(size, len(scales))) * scales).astype("float32")

    return draw


def with_groups(groups, width):
    def draw(generator, size):
        x = generator.normal(size=(size, width)).astype("float32")
        return {"group": generator.integers(groups, size=size).astype("int32"), "x": x}

    return draw


FOUR, SCALED = np.ones(4), np.array([3.0, 1.0, 0.3, 0.1])
# name: model, its inputs, the public ones.
MODELS = {
    "logistic5": (lambda: logistic(5), normals(FOUR), normals(FOUR)),
    "logistic20": (lambda: logistic(20), normals(np.ones(19)), normals(np.ones(19))),
    "linear": (lambda: linear(5), normals(FOUR), normals(FOUR)),
    "poisson": (lambda: poisson(5), normals(FOUR), normals(FOUR)),
    "negbin": (lambda: negative_binomial(5), normals(FOUR), normals(FOUR)),
    "vague5": (lambda: logistic(5, 4.0), normals(FOUR), normals(FOUR)),
    "scaled5": (lambda: logistic(5), normals(SCALED), normals(SCALED)),
    "wrong5": (lambda: logistic(5), normals(SCALED), normals(FOUR)),
    "rare20": (lambda: rare(20), normals(np.ones(19)), normals(np.ones(19))),
    "groups": (lambda: hierarchical(20, 3), with_groups(20, 3), with_groups(20, 3)),
}
SIZES = {
    "logistic5": (1000, 5000, 20_000),
    "logistic20": (5000, 20_000),
    "rare20": (20_000,),
    "groups": (20_000,),
}
ONE = ("vague5", "scaled5", "wrong5", "rare20", "groups")  # At epsilon 1 only.
CELLS = [
    f"{model}-{size}-{eps}"
    for model in MODELS
    for size in SIZES.get(model, (5000,))
    for eps in ((1.0,) if model in ONE else (0.3, 1.0, 3.0))
]


class NonPrivate:
    """The posterior without privacy, by its Laplace approximation on the real line: N is in the thousands."""

    def __init__(self, prior, likelihood, coordinates):
        self.coordinates = coordinates

        @tf.function(autograph=False)
        def derivatives(vector, x, y):
            with tf.GradientTape(persistent=True) as outer:
                outer.watch(vector)
                with tf.GradientTape() as inner:
                    inner.watch(vector)
                    params = coordinates.constrain(tf.split(vector, coordinates.sizes))
                    value = coordinates.log_prior(vector) + tf.reduce_sum(
                        likelihood(params, x).log_prob(y)
                    )
                gradient = inner.gradient(value, vector)
            return value, gradient, outer.jacobian(gradient, vector)

        self.derivatives = derivatives

    def fit(self, start, x, y):
        vector = start.astype("float64")
        for _ in range(30):
            _, gradient, hessian = self.derivatives(tf.constant(vector, tf.float32), x, y)
            step = np.linalg.solve(-hessian.numpy().astype("float64"), gradient.numpy())
            vector = vector + step * min(1.0, 1.0 / np.abs(step).max())
            if np.abs(step).max() < 1e-4:
                break
        return vector, np.sqrt(np.diag(np.linalg.inv(-hessian.numpy().astype("float64"))))


def crps(draws, truth):
    """Of draws of shape [S, d]."""
    ordered = np.sort(draws, axis=0)
    ranks = np.arange(1, len(draws) + 1)[:, None]
    spread = np.sum((2 * ranks - len(draws) - 1) * ordered, axis=0) / len(draws) ** 2
    return np.mean(np.abs(draws - truth), axis=0) - spread


class Fits:
    """Private fits of one model to several data sets, traced once."""

    def __init__(self, make, clipping, x_public, num_records, epsilon, x, y, clip=None):
        self.model = dpvi.DPVI(*make(), clipping=clipping)
        self.pilot = dpvi.pilot(
            self.model, x_public, num_records=num_records, epsilon=epsilon, delta=DELTA
        )
        clip = clip or self.pilot.l2_norm_clip
        self.settings = dict(self.pilot.fit_settings, verbose=0)

        def compiled(noise, accountant):
            optimizer = self.pilot.optimizer(num_records, noise_multiplier=noise)
            optimizer.l2_norm_clip = clip
            xla = make is not MODELS["negbin"][0]  # TensorFlow draws no gammas under XLA.
            self.model.compile(optimizer, jit_compile=xla, accountant=accountant)

        compiled(1.0, "pld")
        data = self.model.make_data(x, y, batch_size=self.pilot.batch_size)
        steps = self.pilot.epochs * data.steps_per_epoch
        calibrated = self.model.mechanism(data).calibrated(
            PrivacyLedger(), epsilon=epsilon, delta=DELTA, num_releases=steps
        )
        self.noise = calibrated.noise_multiplier
        compiled(
            self.noise, "rdp"
        )  # Faster, for the noise is set: this ledger grows with every data set.
        self.start, self.without = self.model.get_weights(), None

    def draws(self, x, y, coordinates):
        self.model.set_weights(self.start)
        for variable in self.model.optimizer.variables:
            if variable.shape.rank or "iteration" in variable.name:
                variable.assign(tf.zeros_like(variable))
        self.model.fit(x, y, **self.settings)
        begun = time.perf_counter()
        drawn = self.model.posterior.sample(NUM_DRAWS, seed=1)
        took = time.perf_counter() - begun
        return flat_draws(drawn, coordinates), took

    def draws_without_inputs(self, coordinates):
        """Of the posterior of the same fit where the pilot's inputs are not known: no simulation, no bend."""
        model, dp = self.model, self.model._dp
        if self.without is None:
            self.without = Calibrator(model.calibration.pairing, model.surrogate_posterior, None)
        found = self.without(dp.accumulated, dp.mechanism)
        return flat_draws(found.distribution.sample(NUM_DRAWS, seed=1), coordinates), bool(
            found.checks.warnings
        )


def flat_draws(drawn, coordinates):
    return tf.concat(coordinates.flatten_batch(drawn), axis=-1).numpy().astype("float64")


def log_likelihood(likelihood, coordinates):
    """Returns a function: mean log predictive density of test records, over draws of the parameters."""

    @tf.function(autograph=False)
    def of_each(vectors, x, y):
        def one(vector):
            return likelihood(
                coordinates.constrain(tf.split(vector, coordinates.sizes)), x
            ).log_prob(y)

        return tf.map_fn(one, vectors)

    def mean(draws, x, y):
        logs = of_each(tf.constant(draws[:NUM_PREDICTIVE], tf.float32), x, y)
        return float(tf.reduce_mean(tf.reduce_logsumexp(logs, axis=0))) - math.log(len(logs))

    return mean


def run(cell, num, baseline, seed):
    name, size, epsilon = cell.split("-")
    (make, inputs, public), size, epsilon = MODELS[name], int(size), float(epsilon)
    prior, likelihood = make()
    coordinates = Coordinates(prior)
    generator = np.random.default_rng(seed)

    def outcomes(params, x):
        return (
            likelihood(params, x)
            .sample(seed=tf.constant(generator.integers(2**31, size=2), tf.int32))
            .numpy()
        )

    def records():
        x = inputs(generator, size)
        params = prior.sample(seed=tf.constant(generator.integers(2**31, size=2), tf.int32))
        test = inputs(generator, NUM_TEST)
        truth = tf.concat(coordinates.flatten(params), axis=0).numpy().astype("float64")
        return x, outcomes(params, x), truth, (test, outcomes(params, test))

    x_public = public(np.random.default_rng(7), 1000)
    x, y, *_ = records()
    paired = Fits(make, "paired", x_public, size, epsilon, x, y)
    flat = {
        clip: Fits(make, "flat", x_public, size, epsilon, x, y, clip)
        for clip in ((1.0, None) if baseline else ())
    }
    exact, predictive = (
        NonPrivate(prior, likelihood, coordinates),
        log_likelihood(likelihood, coordinates),
    )
    prior_draws = tf.concat(
        coordinates.flatten_batch(prior.sample(NUM_DRAWS, seed=3)), axis=-1
    ).numpy()
    rows, checks, took, begun = {"paired": [], "no inputs": []}, [], [], time.perf_counter()
    warned = {"paired": [], "no inputs": []}
    rows.update({f"flat, clip {clip or 'pilot'}": [] for clip in flat}, prior=[])
    for number in range(num):
        x, y, truth, test = records()
        mean, sd = exact.fit(truth, x, y)
        every = {"paired": paired.draws(x, y, coordinates)}
        every["no inputs"] = paired.draws_without_inputs(coordinates)
        took.append(every["paired"][1])
        found = paired.model._calibrated()
        warned["paired"].append(bool(found.checks.warnings))
        warned["no inputs"].append(every["no inputs"][1])
        checks.append(
            [
                found.checks.distance,
                found.checks.halves,
                found.checks.kappa,
                found.checks.curvature_signal,
                found.checks.bend,
                found.checks.mismatch,
            ]
        )
        for clip, fits in flat.items() if number < baseline else ():
            every[f"flat, clip {clip or 'pilot'}"] = fits.draws(x, y, coordinates)
        every["prior"] = (prior_draws, 0.0)
        for kind, (draws, _) in every.items():
            low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
            rows[kind].append(
                {
                    "covered": (low <= truth) & (truth <= high),
                    "width": (high - low) / (2 * 1.645 * sd),
                    "crps": crps(draws, truth),
                    "bias": (draws.mean(axis=0) - mean) / draws.std(axis=0),
                    "log_likelihood": predictive(draws, *test),
                }
            )
    summary = {
        "cell": cell,
        "num": num,
        "noise_multiplier": paired.noise,
        "clip": paired.pilot.l2_norm_clip,
        "seconds": time.perf_counter() - begun,
        "posterior_seconds": float(np.median(took)),
        "checks_90": np.quantile(checks, 0.9, axis=0).round(3).tolist(),
        "checks_10": np.quantile(checks, 0.1, axis=0).round(3).tolist(),
        "warned": {kind: float(np.mean(found)) for kind, found in warned.items()},
    }
    for kind, found in rows.items():
        if not found:
            continue
        covered = np.array([row["covered"] for row in found], float)
        by_set = covered.mean(axis=1)
        summary[kind] = {
            "num": len(found),
            "coverage": round(float(by_set.mean()), 4),
            "error": round(float(by_set.std(ddof=1) / math.sqrt(len(found))), 4),
            "by_coordinate": covered.mean(axis=0).round(3).tolist(),
            "width": round(float(np.mean([row["width"].mean() for row in found])), 3),
            "crps": float(np.mean([row["crps"].mean() for row in found])),
            "bias": round(float(np.sqrt(np.mean([row["bias"] ** 2 for row in found]))), 3),
            "log_likelihood": round(float(np.mean([row["log_likelihood"] for row in found])), 5),
        }
        if flat:  # On the data sets that flat clipping was run on.
            same = found[:baseline]
            summary[kind]["same_crps"] = float(np.mean([row["crps"].mean() for row in same]))
            summary[kind]["same_log_likelihood"] = round(
                float(np.mean([row["log_likelihood"] for row in same])), 5
            )
    return summary


def pooled(old, new):
    """Returns the figures of two runs of a cell as those of one; quantiles of the checks are the second's."""
    nums = np.array([old["num"], new["num"]])
    flats = np.array(
        [run["flat, clip pilot"]["num"] if "flat, clip pilot" in run else 0 for run in (old, new)]
    )
    summary = {**old, **new, "num": int(nums.sum()), "seconds": old["seconds"] + new["seconds"]}
    summary["revision"] = ", ".join(sorted({*old["revision"].split(", "), new["revision"]}))
    both = [old["warned"], new["warned"]]
    summary["warned"] = {
        kind: float(np.average([one[kind] for one in both], weights=nums)) for kind in both[0]
    }
    for kind in [
        kind
        for kind, one in old.items()
        if isinstance(one, dict) and "coverage" in one and kind in new
    ]:
        first, second = old[kind], new[kind]
        n, m = first["num"], second["num"]
        summary[kind] = {**first, "num": n + m}
        for name in [name for name in first if name in second and name != "num"]:
            values = np.array([first[name], second[name]])
            if name == "bias":
                found = np.sqrt(np.average(values**2, weights=[n, m]))
            elif name == "error":
                apart = n * m / (n + m) * (first["coverage"] - second["coverage"]) ** 2
                squares = n * (n - 1) * values[0] ** 2 + m * (m - 1) * values[1] ** 2 + apart
                found = np.sqrt(squares / (n + m - 1) / (n + m))
            else:
                found = np.average(
                    values, axis=0, weights=flats if name.startswith("same") else [n, m]
                )
            summary[kind][name] = found.round(5).tolist()
    return summary


def made(cell, arguments):
    """Returns a cell's figures: those of its file, and of as many more data sets as that lacks."""
    path = arguments.out / f"{cell}.json"
    old = json.loads(path.read_text()) if path.exists() else None
    have = old["num"] if old else 0
    if have >= arguments.num:
        return old
    if (
        arguments.jobs > 1
    ):  # In a process of its own: traces and constants of many models fill the memory.
        options = [
            f"--{name}={getattr(arguments, name)}" for name in ("num", "baseline", "seed", "out")
        ]
        subprocess.run(
            [sys.executable, __file__, "--jobs=1", "--cells", cell, *options],
            check=True,
            stdout=sys.stderr,
        )
    else:
        versions = {
            "python": platform.python_version(),
            "tensorflow": tf.__version__,
            "machine": platform.processor(),
            "revision": subprocess.check_output(
                ["git", "describe", "--always", "--dirty"], text=True
            ).strip(),
        }
        flat = old["flat, clip pilot"]["num"] if old else 0
        new = {
            **run(
                cell, arguments.num - have, max(0, arguments.baseline - flat), arguments.seed + have
            ),
            **versions,
        }
        path.write_text(json.dumps(pooled(old, new) if old else new, indent=1))
    return json.loads(path.read_text())


def draw(done, path):
    """Coverage with two standard errors, a row a cell."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    kinds = {"paired": "C0", "no inputs": "C2", "flat, clip pilot": "C1", "flat, clip 1.0": "C3"}
    figure, axes = plt.subplots(figsize=(8, 0.28 * len(done) + 1.2), layout="constrained")
    for number, (kind, color) in enumerate(kinds.items()):
        rows = [(place, one[kind]) for place, one in enumerate(done[::-1]) if kind in one]
        axes.errorbar(
            [row["coverage"] for _, row in rows],
            [place + 0.15 * (1.5 - number) for place, _ in rows],
            xerr=[2.0 * row["error"] for _, row in rows],
            fmt="o",
            ms=3.5,
            lw=1.0,
            color=color,
            label={"paired": "paired", "no inputs": "paired, no public inputs"}.get(kind, kind),
        )
    axes.axvline(LEVEL, color="0.6", lw=1, zorder=0)
    axes.set_yticks(range(len(done)), [one["cell"].replace("-", ", ") for one in done[::-1]])
    axes.set_xlim(0.0, 1.0)
    axes.set_xlabel("coverage of 90 % intervals, with two standard errors; rows: model, N, epsilon")
    figure.legend(loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def table(done):
    """The table of `docs/studies.md`."""
    lines = [
        "| model, N, epsilon | data sets | paired | worst | width | CRPS | warned | no public inputs | warned | flat, clip 1 | "
        "flat, pilot's clip | CRPS over its | log-likelihood over its |",
        "| --- " * 13 + "|",
    ]
    for one in done:
        paired, warned = one["paired"], one["warned"]
        warned = (
            warned if isinstance(warned, dict) else {"paired": warned, "no inputs": math.nan}
        )  # Of older files.
        name = one["cell"].split("-")
        name = f"{name[0]}, {int(name[1]):,}, {float(name[2]):g}" + (
            "" if "revision" in one else " †"
        )
        others = [
            f"{one[kind]['coverage']:.2f}, {one[kind]['width']:.2f}" if kind in one else ""
            for kind in ("no inputs", "flat, clip 1.0", "flat, clip pilot")
        ]
        score, gain = "", ""
        if "same_crps" in paired:
            flat = one["flat, clip pilot"]
            score = f"{paired['same_crps'] / flat['crps']:.2f}"
            gain = f"{paired['same_log_likelihood'] - flat['log_likelihood']:+.4f}"
        lines.append(
            f"| {name} | {one['num']} | {paired['coverage']:.3f} ± {paired['error']:.3f} | {min(paired['by_coordinate']):.2f} | "
            f"{paired['width']:.2f} | {paired['crps']:.3f} | {warned['paired']:.2f} | {others[0]} | {warned['no inputs']:.2f} | "
            f"{others[1]} | {others[2]} | {score} | {gain} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cells", nargs="*", default=CELLS)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument(
        "--baseline", type=int, default=40, help="data sets on which flat clipping is run too"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/figures/calibration")
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        done = list(pool.map(lambda cell: made(cell, arguments), arguments.cells))
    draw(done, arguments.out / "coverage.png")
    print(table(done))
    kinds = ("paired", "no inputs", "flat, clip 1.0", "flat, clip pilot", "prior")
    print(
        json.dumps(
            {one["cell"]: {kind: one[kind] for kind in kinds if kind in one} for one in done}
        )
    )


if __name__ == "__main__":
    main()
