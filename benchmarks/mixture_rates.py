"""Learning rates of the paired clip on the mixture of docs/studies.md: how often a fit ends in a wrong mode, at epsilon 1.

    python benchmarks/mixture_rates.py [--num 512] [--output docs/figures/mixture_rates.json]

A copy of the step in NumPy for many simulated data sets at once: clipped differences of scores of records and of their twins,
noise, Adam. Settings and noise are the library's; the arithmetic shares no code with it. It has float64, batches of 400
records instead of 400 expected, and as the fit the mean of the last 70 % of steps, without a correction. Ten minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib

import numpy as np
from studies import mixture

import tfp_dpvi as dpvi
from tfp_dpvi.calibrated.clip import curvature_releases
from tfp_dpvi.gradients import Clip, joint_sensitivity
from tfp_dpvi.privacy import PoissonSampling, PrivacyPlan, Sensitivity

K, D, N = mixture.NUM_COMPONENTS, 2, mixture.NUM_RECORDS
SIZE = K * D + K + K - 1
RATES = (0.025, 0.04, 0.063, 0.1)
SETS_AT_ONCE = 64
START_SCALE = 0.03


def softplus(x):
    return np.logaddexp(0.0, x)


def unpack(vectors):
    """Returns means [B, K, D], precisions, weights and the slopes of precisions [B, K] of vectors [B, SIZE]."""
    means, raw, logits = np.split(vectors, [K * D, K * D + K], axis=1)
    logits = np.concatenate([logits, np.zeros((len(logits), 1))], axis=1)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    slopes = 1 / (1 + np.exp(-raw))
    return (
        means.reshape(-1, K, D),
        softplus(raw),
        weights / weights.sum(axis=1, keepdims=True),
        slopes,
    )


def scores(x, means, precisions, weights, slopes):
    """Returns gradients of records' log densities, shape [B, n, SIZE]."""
    away = x[:, :, None] - means[:, None]
    squares = np.sum(away**2, axis=-1)
    logs = np.log(weights * precisions)[:, None] - squares * precisions[:, None] / 2
    shares = np.exp(logs - logs.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    by_means = (shares * precisions[:, None])[..., None] * away
    by_raw = shares * (1 / precisions[:, None] - squares / 2) * slopes[:, None]
    by_logits = (shares - weights[:, None])[..., : K - 1]
    return np.concatenate([by_means.reshape(*x.shape[:2], K * D), by_raw, by_logits], axis=-1)


def found_centres(settings, deviation, seed):
    """Returns for each of `SETS_AT_ONCE` fits how many true centres have a component within one standard deviation."""
    rng = np.random.default_rng([seed, 11])
    shape = (SETS_AT_ONCE, N)
    data = mixture.CENTRES[rng.integers(K, size=shape)] + math.sqrt(mixture.VARIANCE) * rng.normal(
        size=(*shape, D)
    )
    start = mixture.starting_point()
    raw_precisions = np.log(np.expm1(1 / start["variances"]))
    mean = np.tile(
        np.concatenate([start["means"].ravel(), raw_precisions, np.zeros(K - 1)]), (SETS_AT_ONCE, 1)
    )
    raw_scale = np.full_like(mean, math.log(math.expm1(START_SCALE)))
    clip, batch = settings.l2_norm_clip, settings.batch_size
    steps = settings.epochs * N // batch
    first, second, drawn = np.zeros((2, *mean.shape)), np.zeros((2, *mean.shape)), []
    for step in range(steps):
        noise = rng.normal(size=mean.shape)
        scale = softplus(raw_scale)
        theta = mean + scale * noise
        means, precisions, weights, slopes = parts = unpack(theta)
        rows = np.argpartition(rng.random(shape), batch, axis=1)[:, :batch]
        x = np.take_along_axis(data, rows[..., None], axis=1)
        chosen = (
            np.cumsum(weights, axis=1)[:, None, :-1] < rng.random((SETS_AT_ONCE, batch, 1))
        ).sum(axis=-1)
        spread = 1 / np.sqrt(np.take_along_axis(precisions, chosen, axis=1))
        twins = np.take_along_axis(means, chosen[..., None], axis=1) + spread[
            ..., None
        ] * rng.normal(size=x.shape)
        pairs = scores(x, *parts) - scores(twins, *parts)
        norms = np.linalg.norm(pairs, axis=-1, keepdims=True)
        total = np.sum(pairs * np.minimum(1, clip / np.maximum(norms, 1e-12)), axis=1)
        total += deviation * rng.normal(size=total.shape)
        prior = np.concatenate(
            [-means.reshape(-1, K * D), 1 - 2 * slopes, 1 - K * weights[:, : K - 1]], axis=1
        )
        by_theta = -(total * N / batch + prior)
        by_raw_scale = (by_theta * noise - 1 / scale) / (1 + np.exp(-raw_scale))
        gradient = np.stack([by_theta, by_raw_scale]) / N
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        falling = (1 + math.cos(math.pi * min(1.0, step / (0.4 * steps)))) / 2
        rate = settings.learning_rate * (falling * (1 - settings.last_rate) + settings.last_rate)
        moves = (
            rate
            * first
            / (1 - 0.9 ** (step + 1))
            / (np.sqrt(second / (1 - 0.999 ** (step + 1))) + 1e-7)
        )
        mean, raw_scale = mean - moves[0], raw_scale - moves[1]
        drawn.append(theta[:, : K * D])
    window = np.mean(drawn[int(0.3 * steps) :], axis=0).reshape(-1, K, 1, D)
    return np.sum(
        np.linalg.norm(window - mixture.CENTRES, axis=-1).min(axis=1) < math.sqrt(mixture.VARIANCE),
        axis=1,
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--num", type=int, default=512, help="data sets at each rate, in multiples of 64"
    )
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path("docs/figures/mixture_rates.json")
    )
    options = parser.parse_args(arguments)
    rows = []
    for rate, private in [*((rate, True) for rate in RATES), (RATES[-1], False)]:
        model = mixture.make_model(gradients="aligned", clipping="paired")
        settings = dpvi.pilot(
            model, num_records=N, epsilon=1.0, delta=mixture.DELTA, learning_rate=rate
        )
        plan = PrivacyPlan.calibrate(
            epsilon=1.0,
            delta=mixture.DELTA,
            sampling=PoissonSampling(settings.batch_size / N),
            num_releases=settings.epochs * N // settings.batch_size,
            l2_norm_clip=settings.l2_norm_clip,
            sensitivity=joint_sensitivity(
                curvature_releases(SIZE, Clip(settings.l2_norm_clip)), Sensitivity()
            ),
        )
        deviation = plan.deviation if private else 0.0
        seeds = range(math.ceil(options.num / SETS_AT_ONCE))
        found = np.concatenate([found_centres(settings, deviation, seed) for seed in seeds])
        wrong = int(np.sum(found < K))
        rows.append(
            {"learning_rate": rate, "deviation": deviation, "wrong_mode": wrong, "fits": len(found)}
        )
        print(json.dumps(rows[-1]), flush=True)
    options.output.write_text(json.dumps({"numpy": np.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
