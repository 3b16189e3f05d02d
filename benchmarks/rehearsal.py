"""Does a rehearsal predict what happens? Its widths and coverage beside real fits on other seeds.

    python benchmarks/rehearsal.py [--families NAME ...] [--num 200] [--quick] [--out FOLDER]

Each family is a model of the calibration study with one truth from its prior. `dpvi.rehearse` says
which width and coverage 90 % intervals will have; then `DPVI.fit` fits data sets of other seeds with
fresh noise. `--quick` is 12 of each. Both go on where they stopped. `--time` measures 100 rehearsals
of 5 coefficients at N = 5,000 after the first trace. The last line is a summary as JSON.
"""

import argparse
import json
import pathlib
import time

import calibration_cells
import harness
import numpy as np
import tensorflow as tf

import tfp_dpvi as dpvi
from tfp_dpvi.rehearsal.simulated import numbers_of, parameter_names

DELTA = 1e-5
EPSILON = 1.0
FAMILIES = (
    *("logistic5", "poisson", "linear", "negbin", "student_t"),
    *("gamma", "weibull", "multinomial", "probit", "ar10"),
)
QUICK = 12
NUM_PUBLIC = 1000
SEED = 11


def make(name):
    """Returns a family's model, inputs, public inputs and truth."""
    kind = calibration_cells.MODELS[name]
    prior, likelihood = kind.make()
    names = parameter_names(prior)
    drawn = prior.sample(seed=tf.constant([SEED, 0], tf.int32))
    values = numbers_of(tf.nest.map_structure(lambda part: part[None], drawn))[0]
    truth = dict(zip(names, values.tolist(), strict=True))

    def inputs(num, seed):
        return kind.inputs(np.random.default_rng(seed), num)

    public = kind.public(np.random.default_rng(7), NUM_PUBLIC)
    return dpvi.DPVI(prior, likelihood), inputs, public, truth


def real(name, size, number):
    """Returns the ends of a real fit's intervals of a data set that no rehearsal has."""
    model, inputs, public, truth = make(name)
    x = inputs(size, 500_000 + number)
    values = [np.float32(value) for value in truth.values()]
    params = _packed(model.prior, values)
    y = model.likelihood(params, x).sample(seed=tf.constant([number, 77], tf.int32)).numpy()
    model.compile(epsilon=EPSILON, delta=DELTA)
    begun = time.perf_counter()
    model.fit(x, y, public_inputs=public, verbose=0)
    columns = model.posterior_summary().columns
    return {
        "low": columns["5%"].tolist(),
        "high": columns["95%"].tolist(),
        "warned": bool(model.posterior_summary().checks.warnings),
        "seconds": round(time.perf_counter() - begun, 2),
    }


def _packed(prior, values):
    like = prior.sample(seed=tf.constant([0, 0], tf.int32))
    parts, first = [], 0
    for part in tf.nest.flatten(like):
        size = int(np.prod(part.shape))
        parts.append(tf.reshape(tf.constant(values[first : first + size]), part.shape))
        first += size
    return tf.nest.pack_sequence_as(like, parts)


def study(name, size, num, folder):
    """Returns a family's figures, after running what its files lack."""
    model, inputs, public, truth = make(name)
    rehearsal = dpvi.rehearse(
        model,
        inputs,
        num_records=size,
        epsilon=EPSILON,
        delta=DELTA,
        truth=truth,
        num=num,
        public_inputs=public,
        path=folder / f"{name}-rehearsed.json",
        verbose=0,
    )
    path = folder / f"{name}-real.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    for number in range(num):
        if str(number) not in rows:
            rows[str(number)] = real(name, size, number)
            path.write_text(json.dumps(rows))
    low, high = (np.array([rows[str(n)][end] for n in range(num)]) for end in ("low", "high"))
    values = np.array([*truth.values()])
    columns = rehearsal.columns(size, EPSILON)
    width = np.median(high - low, axis=0)
    coverage = ((low <= values) & (values <= high)).mean(axis=0)
    variance = np.maximum(coverage * (1.0 - coverage), 0.09) / num
    spread = np.sqrt(variance + columns["coverage_error"] ** 2)
    return {
        "family": name,
        "records": size,
        "num": num,
        "names": list(rehearsal.names),
        "width_rehearsed": columns["width"].tolist(),
        "width_real": width.tolist(),
        "width_ratio": np.round(width / columns["width"], 4).tolist(),
        "coverage_rehearsed": columns["coverage"].tolist(),
        "coverage_real": coverage.tolist(),
        "coverage_z": np.round((coverage - columns["coverage"]) / spread, 2).tolist(),
        "warned_rehearsed": rehearsal.warned(size, EPSILON),
        "warned_real": float(np.mean([rows[str(n)]["warned"] for n in range(num)])),
    }


def seconds(num=100):
    """Returns the time of rehearsals after the first trace, 5 coefficients and N 5,000."""
    found = {}
    for name in ("logistic5", "linear", "poisson"):
        model, inputs, public, truth = make(name)
        begun = []

        def timed(size, seed, begun=begun, inputs=inputs):
            begun.append(time.perf_counter())
            return inputs(size, seed)

        dpvi.rehearse(
            model,
            timed,
            num_records=5000,
            epsilon=EPSILON,
            delta=DELTA,
            truth=truth,
            num=num + 1,
            public_inputs=public,
            verbose=0,
        )
        # The digest, the shapes, and the first data set, which is traced, come before.
        found[name] = round(time.perf_counter() - begun[3], 1)
    return found


def draw(rows, path):
    """Ratios of real to predicted widths, a point for each parameter."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.5, 0.4 * len(rows) + 1.5), layout="constrained")
    for place, row in enumerate(rows[::-1]):
        for axis, key in zip(axes, ("width_ratio", "coverage_z"), strict=True):
            axis.plot(row[key], [place] * len(row[key]), "o", color="C0", alpha=0.7)
    axes[0].axvspan(0.95, 1.05, color="0.9", zorder=0)
    axes[1].axvspan(-2.0, 2.0, color="0.9", zorder=0)
    axes[0].set_yticks(range(len(rows)), [row["family"] for row in rows[::-1]])
    axes[1].set_yticks([])
    axes[0].set_xlabel("median width of real fits over the rehearsed one")
    axes[1].set_xlabel("coverage, real less rehearsed, in standard errors")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--families", nargs="*", default=FAMILIES)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--records", type=int, default=5000)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} fits of each")
    parser.add_argument("--time", action="store_true", help="only the time of 100 rehearsals")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("docs/figures/rehearsal"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    about = {
        "machine": harness.machine(),
        "versions": harness.versions(tensorflow="tensorflow", numpy="numpy"),
        "commit": harness.commit(),
        "code": harness.code_hash(),
    }
    if arguments.time:
        result = {"seconds": seconds(), **about}
        (arguments.out / "time.json").write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result))
        return
    num = QUICK if arguments.quick else arguments.num
    folder = arguments.out / "fits"
    folder.mkdir(exist_ok=True)
    rows = []
    for name in arguments.families:
        rows.append(study(name, arguments.records, num, folder))
        print(json.dumps(rows[-1]), flush=True)
        (arguments.out / "rehearsal.json").write_text(
            json.dumps({"families": rows, **about}, indent=1) + "\n"
        )
        draw(rows, arguments.out / "rehearsal.png")
    print(json.dumps({row["family"]: row["width_ratio"] for row in rows}))


if __name__ == "__main__":
    main()
