"""What each model of this folder is put through: simulated records, a private fit, one without noise, and the exact posterior.

    python examples/models/radon.py [--num 10000] [--epsilon 1] [--delta 1e-5] [--seed 2026] [--output outputs/models]

A model is a module with `prior()`, `likelihood(params, x)` or `likelihood(params)`, and `inputs(num, generator)`: public or
synthetic inputs, or None for likelihoods of whole records. Optional are `surrogate(prior)`, `CLIPPING`,
`NUM_SYNTHETIC`, how many inputs the pilot gets, and `closed_form(x, y)`, draws from the exact posterior; the default is Hamiltonian
Monte Carlo. Truths are drawn from the prior.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import types
from typing import Any

import numpy as np

import tfp_dpvi as dpvi  # isort: skip  (first, so that TensorFlow loads quietly)
import tensorflow as tf
import tensorflow_probability as tfp
from scipy import optimize

Family = types.ModuleType
LEVEL = 0.99


def simulate(family: Family, num: int, seed: int) -> tuple[Any, Any, Any]:
    """Returns x, y and the true parameters; y is None for likelihoods of whole records."""
    generator = np.random.default_rng(seed)
    seeds = tf.constant(generator.integers(2**31, size=(2, 2)), tf.int32)
    truth, x = family.prior().sample(seed=seeds[0]), family.inputs(num, generator)
    drawn = (
        family.likelihood(truth).sample(num, seeds[1])
        if x is None
        else family.likelihood(truth, x).sample(seed=seeds[1])
    )
    drawn = tf.nest.map_structure(lambda part: part.numpy(), drawn)
    return (drawn, None, truth) if x is None else (x, drawn, truth)


def made_up(family: Family) -> Any:
    """Returns synthetic inputs that resemble the private ones, or None."""
    return family.inputs(getattr(family, "NUM_SYNTHETIC", 1000), np.random.default_rng(7))


def make_model(family: Family, clipping: str | None = None) -> dpvi.DPVI:
    """Returns the model, with the paired clip unless the module has `CLIPPING`."""
    surrogate = getattr(family, "surrogate", "mean_field")
    clipping = clipping or getattr(family, "CLIPPING", "paired")
    return dpvi.DPVI(family.prior(), family.likelihood, surrogate, clipping=clipping)


def fit_private(
    family: Family, x: Any, y: Any, num: int, epsilon: float, delta: float
) -> dpvi.DPVI:
    """Fits with the settings of a pilot, which uses only synthetic records."""
    model = make_model(family)
    pilot = dpvi.pilot(model, made_up(family), num_records=num, epsilon=epsilon, delta=delta)
    model.compile(pilot.optimizer(num), epsilon=epsilon, delta=delta)
    model.fit(x, y, **pilot.fit_settings, verbose=0)
    return model


def fit_without_noise(
    family: Family, x: Any, y: Any, num: int, steps: int = 600, rate: float = 0.1
) -> dpvi.DPVI:
    """Fits without clip and noise, on full batches: *not private*."""
    model = make_model(family, clipping="flat")
    falling = dpvi.keras.optimizers.schedules.CosineDecay(rate, steps, 0.01)
    model.compile(
        dpvi.optimizers.DPKerasAdamOptimizer(falling, l2_norm_clip=math.inf, noise_multiplier=0.0)
    )
    model.fit(x, y, batch_size=num, steps_per_epoch=steps, verbose=0)
    return model


class LogPosterior:
    """The exact log posterior density of the parameters as a vector on the real line."""

    def __init__(self, family: Family, x: Any, y: Any) -> None:
        self._family, self._x, self._y = family, x, y
        self._prior = family.prior()
        self._to_support = self._prior.experimental_default_event_space_bijector()
        self._like = self._to_support.inverse(self._prior.sample(seed=[0, 0]))
        self._sizes = [math.prod(part.shape) for part in tf.nest.flatten(self._like)]
        self.value_and_gradient = tf.function(
            lambda one: tfp.math.value_and_gradient(self, one), autograph=False
        )

    def unconstrain(self, draws: Any) -> np.ndarray:
        parts = [
            tf.reshape(part, [-1, size])
            for part, size in zip(self._flat(draws), self._sizes, strict=True)
        ]
        return tf.concat(parts, axis=-1).numpy()

    def _flat(self, draws: Any) -> list[tf.Tensor]:
        return tf.nest.flatten(self._to_support.inverse(draws))

    def constrain(self, vectors: tf.Tensor) -> Any:
        return self._to_support.forward(self._parts(vectors))

    def _parts(self, vectors: tf.Tensor) -> Any:
        parts = tf.split(vectors, self._sizes, axis=-1)
        shaped = [
            tf.reshape(part, [*vectors.shape[:-1], *like.shape])
            for part, like in zip(parts, tf.nest.flatten(self._like), strict=True)
        ]
        return tf.nest.pack_sequence_as(self._like, shaped)

    def __call__(self, vector: tf.Tensor) -> tf.Tensor:
        parts = self._parts(vector)
        params = self._to_support.forward(parts)
        ranks = tf.nest.map_structure(lambda part: part.shape.rank, self._like)
        volume = self._to_support.forward_log_det_jacobian(parts, ranks)
        given = () if self._y is None else (self._x,)
        observed = self._x if self._y is None else self._y
        records = tf.reduce_sum(self._family.likelihood(params, *given).log_prob(observed))
        return self._prior.log_prob(params) + volume + records


def exact_draws(family: Family, x: Any, y: Any, start: Any, **settings: int) -> Any:
    """Returns draws from the exact posterior, by the closed form if there is one, else by `chain_draws`."""
    return (
        family.closed_form(x, y)
        if hasattr(family, "closed_form")
        else chain_draws(family, x, y, start, **settings)
    )


def chain_draws(
    family: Family, x: Any, y: Any, start: Any, *, num_steps: int = 400, num_chains: int = 4
) -> Any:
    """Returns draws of Hamiltonian Monte Carlo, whitened by the Laplace approximation.

    Args:
      family: the model.
      x: records.
      y: likewise.
      start: draws near the posterior; the search for the mode starts at their mean.
      num_steps: steps of each chain, after half as many for burn-in.
      num_chains: number of chains.
    """
    target = LogPosterior(family, x, y)

    def negative(vector: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        value, gradient = target.value_and_gradient(tf.constant(vector, tf.float32))
        return -value.numpy().astype("float64"), -gradient.numpy().astype("float64")

    first = target.unconstrain(start).mean(axis=0)
    mode = optimize.minimize(negative, first, jac=True, method="BFGS", options={"maxiter": 100}).x
    shifts = 1e-2 * np.eye(len(mode))
    hessian = np.stack(
        [(negative(mode + one)[1] - negative(mode - one)[1]) / 2e-2 for one in shifts]
    )
    values, vectors = np.linalg.eigh((hessian + hessian.T) / 2)
    root = (vectors / np.sqrt(np.maximum(values, 1e-3 * values.max()))).astype("float32")
    middle = tf.constant(mode, tf.float32)

    @tf.function(autograph=False)
    def chains(seed: tf.Tensor) -> tf.Tensor:
        def log_prob(points: tf.Tensor) -> tf.Tensor:
            return tf.vectorized_map(target, middle + tf.matmul(points, root, transpose_b=True))

        kernel = tfp.mcmc.HamiltonianMonteCarlo(
            log_prob, step_size=1.3 * len(mode) ** -0.25, num_leapfrog_steps=3
        )
        kernel = tfp.mcmc.SimpleStepSizeAdaptation(kernel, num_adaptation_steps=num_steps // 3)
        points = tf.random.stateless_normal([num_chains, len(mode)], seed)
        return tfp.mcmc.sample_chain(
            num_steps,
            points,
            kernel=kernel,
            num_burnin_steps=num_steps // 2,
            trace_fn=None,
            seed=seed,
        )

    found = tf.reshape(chains(tf.constant([0, 1])), [-1, len(mode)])
    return target.constrain(middle + tf.matmul(found, root, transpose_b=True))


def flat(draws: Any) -> np.ndarray:
    """Returns draws of all parameters' entries, shape [S, P]."""
    return np.concatenate(
        [np.reshape(part, (len(part), -1)) for part in tf.nest.flatten(draws)], axis=1
    )


def entries(params: Any) -> np.ndarray:
    """Returns one value of all parameters' entries, shape [P]."""
    return flat(tf.nest.map_structure(lambda part: part[None], params))[0]


def inside(draws: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Returns whether the interval of each entry contains its truth."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
    return (low <= truth) & (truth <= high)


def draw_intervals(
    names: list[str],
    draws: dict[str, np.ndarray],
    truth: np.ndarray,
    title: str,
    path: pathlib.Path,
) -> None:
    """Plots intervals of each entry, one row for each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 1.3 + 0.26 * len(names)), layout="constrained")
    places = np.arange(len(names))[::-1]
    for number, (label, one) in enumerate(draws.items()):
        low, high = np.quantile(one, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        axes.hlines(places + 0.2 * (1 - number), low, high, color=f"C{number}", lw=2.5, label=label)
    axes.plot(truth, places, "k|", ms=9, label="truth")
    axes.set_yticks(places, names)
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)


def write_intervals(
    name: str, names: list[str], draws: dict[str, np.ndarray], truth: np.ndarray, title: str
) -> None:
    """Plots intervals into the folder of the first argument, and writes and prints their figures."""
    folder = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/models")
    folder.mkdir(parents=True, exist_ok=True)
    draw_intervals(names, draws, truth, title, folder / f"{name}.png")
    figures = {
        label: {"mean": one.mean(axis=0).tolist(), "sd": one.std(axis=0).tolist()}
        for label, one in draws.items()
    }
    text = json.dumps({"names": names, "truth": truth.tolist(), **figures}, indent=1)
    (folder / f"{name}.json").write_text(text + "\n")
    print(text)


def compare(family: Family, options: argparse.Namespace) -> dict[str, Any]:
    """Returns entries' names and truth, draws of the three posteriors, and the private model."""
    x, y, truth = simulate(family, options.num, options.seed)
    private = fit_private(family, x, y, options.num, options.epsilon, options.delta)
    without = fit_without_noise(family, x, y, options.num, options.steps).posterior_sample(
        2000, seed=0
    )
    draws = {
        "exact": flat(exact_draws(family, x, y, without, num_steps=options.chain_steps)),
        "without noise": flat(without),
        "private": flat(private.posterior_sample(4000, seed=0)),
    }
    free = np.flatnonzero(draws["exact"].std(axis=0) > 0)  # Not the zeros above a diagonal.
    names, draws = (
        private.posterior_summary().names,
        {kind: one[:, free] for kind, one in draws.items()},
    )
    return {
        "names": [names[place] for place in free],
        "truth": entries(truth)[free],
        "draws": draws,
        "model": private,
    }


def main(family: Family | None = None, arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs one model, by default the module that was called as a script; prints a table and writes picture and figures."""
    family = family or sys.modules["__main__"]
    name = pathlib.Path(str(family.__file__)).stem
    parser = argparse.ArgumentParser(description=family.__doc__)
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--steps", type=int, default=600, help="of the fit without noise")
    parser.add_argument("--chain-steps", type=int, default=400, help="of Hamiltonian Monte Carlo")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("outputs/models"))
    options = parser.parse_args(arguments)
    found = compare(family, options)
    draws, model = found["draws"], found["model"]
    exact, without = draws["exact"], draws["without noise"]
    off = np.abs(without.mean(axis=0) - exact.mean(axis=0)) / exact.std(axis=0)
    print(f"{name}: {options.num:,} simulated records\n\n{model.posterior_summary()}\n")
    print(f"Without noise: means within {off.max():.2f} exact standard deviations.")
    options.output.mkdir(parents=True, exist_ok=True)
    title = f"{name.replace('_', ' ')}: 99 % intervals, {options.num:,} records, epsilon {options.epsilon:g}"
    draw_intervals(found["names"], draws, found["truth"], title, options.output / f"{name}.png")
    result = {
        "num": options.num,
        "epsilon": model.privacy_report().epsilon,
        "delta": options.delta,
        "seed": options.seed,
        "names": found["names"],
        "truth": found["truth"].tolist(),
        "off": off.tolist(),
        "calibrated": model.posterior is not model.surrogate_posterior,
        **{
            kind: {"mean": one.mean(axis=0).tolist(), "sd": one.std(axis=0).tolist()}
            for kind, one in draws.items()
        },
    }
    (options.output / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"Picture and figures: {options.output}/{name}.png, {options.output}/{name}.json")
    return result
