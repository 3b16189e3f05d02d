"""Private variational inference in JAX, the way d3p does it: `vmap`ped gradients in a compiled loop.

Runs in an environment of its own (`benchmarks/peers/jax.txt`) as a child of `benchmarks/suite.py`. It reads one JSON
object a line, {"case": name, "steps": int, ...settings}, and answers with one: {"seconds": ..., "finite": true}. Data are
random numbers of the right shapes; nothing here is about accuracy.

Like the library's, every step draws an exact Poisson batch (partial sums of geometric gaps, in pieces of a static size),
shared draws of the parameters or local ones of the codes, clips each record's gradient, adds fresh normals and makes one
Adam update; `lax.fori_loop` runs the steps. Unlike the library's, its normals are float32 with tails to about 5.4, and
gradients are by the variational parameters, as in d3p.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CLIP, NOISE_MULTIPLIER, LEARNING_RATE = 1.0, 1.0, 1e-3
tree = jax.tree_util


def normals_like(key: Any, like: Any) -> Any:
    leaves, definition = tree.tree_flatten(like)
    keys = jax.random.split(key, len(leaves))
    drawn = [
        jax.random.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves, strict=True)
    ]
    return tree.tree_unflatten(definition, drawn)


def adam(params: Any, moments: Any, gradient: Any, step: Any) -> tuple[Any, Any]:
    first, second = moments
    first = tree.tree_map(lambda m, g: 0.9 * m + 0.1 * g, first, gradient)
    second = tree.tree_map(lambda v, g: 0.999 * v + 0.001 * g * g, second, gradient)
    t = step.astype(jnp.float32) + 1.0
    rate = LEARNING_RATE * jnp.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    params = tree.tree_map(
        lambda p, m, v: p - rate * m / (jnp.sqrt(v) + 1e-7), params, first, second
    )
    return params, (first, second)


def training(
    clipped_sum: Callable[..., Any], exact: Callable[..., Any] | None, data: Any, batch_size: int
) -> Callable[..., Any]:
    """`train(params, steps, key)`: `clipped_sum(params, batch, mask, draw_key, piece_key)` and an exact gradient."""
    num = len(tree.tree_leaves(data)[0])
    probability = batch_size / num
    physical = min(num, math.ceil(batch_size + 3.0 * math.sqrt(batch_size)) + 4)
    scale = 1.0 / math.log1p(-probability)

    def one_step(step: Any, carry: Any, key: Any, data: Any) -> Any:
        params, moments = carry
        sample_key, draw_key, piece_key, noise_key = jax.random.split(
            jax.random.fold_in(key, step), 4
        )

        def piece(state: Any) -> Any:
            last, number, total = state
            uniform = jax.random.uniform(
                jax.random.fold_in(sample_key, number), [physical], jnp.float64
            )
            gaps = jnp.minimum(jnp.floor(jnp.log1p(-uniform) * scale), num).astype(jnp.int64) + 1
            indices = last + jnp.cumsum(gaps)
            mask = indices < num
            batch = tree.tree_map(lambda part: part[jnp.minimum(indices, num - 1)], data)
            part = clipped_sum(params, batch, mask, draw_key, jax.random.fold_in(piece_key, number))
            return indices[-1], number + 1, tree.tree_map(jnp.add, total, part)

        zeros = tree.tree_map(jnp.zeros_like, params)
        total = lax.while_loop(
            lambda state: state[0] < num - 1, piece, (jnp.int64(-1), jnp.int32(0), zeros)
        )[2]
        noise = normals_like(noise_key, total)
        gradient = tree.tree_map(
            lambda s, z: (s + NOISE_MULTIPLIER * CLIP * z) / batch_size, total, noise
        )
        if exact is not None:
            gradient = tree.tree_map(jnp.add, gradient, exact(params, draw_key))
        return adam(params, moments, gradient, step)

    @jax.jit
    def train(params: Any, steps: Any, key: Any, data: Any) -> Any:
        zeros = tree.tree_map(jnp.zeros_like, params)
        start = (params, (zeros, zeros))
        return lax.fori_loop(0, steps, lambda t, carry: one_step(t, carry, key, data), start)[0]

    return lambda params, steps, key: train(params, steps, key, data)


def by_vmap(record_loss: Callable[..., Any]) -> Callable[..., Any]:
    """The sum of clipped gradients of `record_loss(params, record, draw_key, record_key)`."""

    def clipped_sum(params: Any, batch: Any, mask: Any, draw_key: Any, piece_key: Any) -> Any:
        keys = jax.random.split(piece_key, len(mask))

        def one(record: Any, keep: Any, record_key: Any) -> Any:
            gradient = jax.grad(record_loss)(params, record, draw_key, record_key)
            norm = jnp.sqrt(sum(jnp.sum(part**2) for part in tree.tree_leaves(gradient)))
            factor = jnp.where(keep, jnp.minimum(1.0, CLIP / norm), 0.0)
            return tree.tree_map(lambda part: part * factor, gradient)

        return tree.tree_map(lambda part: part.sum(0), jax.vmap(one)(batch, mask, keys))

    return clipped_sum


# ---------------------------------------------------------------------- mean-field models


def mean_field(
    num: int, log_likelihood: Callable[..., Any], log_prior: Callable[..., Any], num_records: int
) -> Any:
    """Losses for a mean-field normal over `num` unconstrained parameters, one draw shared by a batch."""

    def draw(params: Any, key: Any) -> Any:
        scale = jax.nn.softplus(params["raw_scale"])
        return params["loc"] + scale * jax.random.normal(key, [num], jnp.float32), scale

    def record_loss(params: Any, record: Any, draw_key: Any, record_key: Any) -> Any:
        del record_key
        return -log_likelihood(draw(params, draw_key)[0], record)

    def divergence(params: Any, key: Any) -> Any:
        theta, scale = draw(params, key)
        log_q = -jnp.sum(jnp.log(scale))  # The rest does not depend on the parameters.
        return (log_q - log_prior(theta)) / num_records

    params = {"loc": jnp.zeros([num], jnp.float32), "raw_scale": jnp.full([num], -4.0, jnp.float32)}
    return params, by_vmap(record_loss), jax.grad(divergence)


def logistic_regression(
    num_records: int = 40_000, num_features: int = 100, batch_size: int = 200
) -> Any:
    rng = np.random.default_rng(0)
    data = {
        "x": jnp.asarray(rng.normal(size=[num_records, num_features]), jnp.float32),
        "y": jnp.asarray(rng.integers(2, size=num_records), jnp.float32),
    }

    def log_likelihood(theta: Any, record: Any) -> Any:
        logit = record["x"] @ theta
        return record["y"] * logit - jax.nn.softplus(logit)

    parts = mean_field(
        num_features, log_likelihood, lambda theta: -0.5 * jnp.sum(theta**2) / 16.0, num_records
    )
    return parts[0], training(parts[1], parts[2], data, batch_size)


def gaussian_mixture(num_records: int = 2000, batch_size: int = 200) -> Any:
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.normal(size=[num_records, 2]), jnp.float32)

    def constrained(theta: Any) -> Any:
        logits = jnp.concatenate([theta[:4], jnp.zeros(1, jnp.float32)])
        return jax.nn.log_softmax(logits), theta[4:14].reshape(5, 2), theta[14:]

    def log_likelihood(theta: Any, record: Any) -> Any:
        log_weights, means, log_variances = constrained(theta)
        squares = jnp.sum((record - means) ** 2, axis=1)
        return jax.nn.logsumexp(
            log_weights - 0.5 * squares * jnp.exp(-log_variances) - log_variances
        )

    def log_prior(theta: Any) -> Any:
        log_weights, means, log_variances = constrained(theta)
        inverse_gamma = -2.0 * log_variances - jnp.exp(-log_variances) + log_variances
        return jnp.sum(log_weights) - 0.5 * jnp.sum(means**2) / 16.0 + jnp.sum(inverse_gamma)

    parts = mean_field(19, log_likelihood, log_prior, num_records)
    return parts[0], training(parts[1], parts[2], data, batch_size)


def hierarchical(num_records: int = 5000, batch_size: int = 250) -> Any:
    rng = np.random.default_rng(0)
    data = {
        "features": jnp.asarray(rng.normal(size=[num_records, 5]), jnp.float32),
        "group": jnp.asarray(rng.integers(20, size=num_records), jnp.int32),
        "y": jnp.asarray(rng.integers(2, size=num_records), jnp.float32),
    }
    z = jnp.asarray(rng.normal(size=[20, 3]), jnp.float32)

    def parts_of(theta: Any) -> Any:
        return theta[:15].reshape(5, 3), jax.nn.softplus(theta[15:20]), theta[20:].reshape(20, 5)

    def log_likelihood(theta: Any, record: Any) -> Any:
        logit = jnp.sum(parts_of(theta)[2][record["group"]] * record["features"])
        return record["y"] * logit - jax.nn.softplus(logit)

    def log_prior(theta: Any) -> Any:
        matrix, spread, weights = parts_of(theta)
        residuals = (weights - z @ matrix.T) / spread
        scales = -0.5 * jnp.sum(spread**2) + jnp.sum(jax.nn.log_sigmoid(theta[15:20]))
        return (
            -0.5 * jnp.sum(matrix**2)
            + scales
            - 0.5 * jnp.sum(residuals**2)
            - 20 * jnp.sum(jnp.log(spread))
        )

    parts = mean_field(120, log_likelihood, log_prior, num_records)
    return parts[0], training(parts[1], parts[2], data, batch_size)


# ---------------------------------------------------------------------- the VAE


def vae(num_records: int = 60_000, batch_size: int = 128, ghost: bool = False) -> Any:
    """784-400-50-400-784; `ghost` takes norms from what lies between layers (Goodfellow 2015), not from gradients."""
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.uniform(size=[num_records, 784]), jnp.float32)
    sizes = [(784, 400), (400, 100), (50, 400), (400, 784)]
    params = [
        (
            jnp.asarray(rng.normal(size=size) / math.sqrt(size[0]), jnp.float32),
            jnp.zeros(size[1], jnp.float32),
        )
        for size in sizes
    ]

    def forward(params: Any, x: Any, epsilon: Any, probes: Any = (0.0, 0.0, 0.0, 0.0)) -> Any:
        """-ELBO of each record, and what goes into each layer; `probes` are added to what comes out."""
        inputs = [x]

        def dense(number: int, a: Any) -> Any:
            w, b = params[number]
            return a @ w + b + probes[number]

        inputs.append(jax.nn.relu(dense(0, x)))
        out = dense(1, inputs[-1])
        loc, scale = out[..., :50], jax.nn.softplus(out[..., 50:])
        inputs.append(loc + scale * epsilon)
        inputs.append(jax.nn.relu(dense(2, inputs[-1])))
        logits = dense(3, inputs[-1])
        log_likelihood = jnp.sum(x * logits - jax.nn.softplus(logits), axis=-1)
        kl = jnp.sum(0.5 * (scale**2 + loc**2 - 1) - jnp.log(scale), axis=-1)
        return kl - log_likelihood, inputs

    def record_loss(params: Any, record: Any, draw_key: Any, record_key: Any) -> Any:
        del draw_key
        return forward(params, record, jax.random.normal(record_key, [50], jnp.float32))[0]

    def ghost_sum(params: Any, batch: Any, mask: Any, draw_key: Any, piece_key: Any) -> Any:
        del draw_key
        epsilon = jax.random.normal(piece_key, [len(batch), 50], jnp.float32)
        probes = [jnp.zeros([len(batch), size[1]], jnp.float32) for size in sizes]

        def total(probes: Any) -> Any:
            losses, inputs = forward(params, batch, epsilon, probes)
            return losses.sum(), inputs

        outs, inputs = jax.grad(total, has_aux=True)(probes)
        squares = sum(
            jnp.sum(g**2, axis=1) * (jnp.sum(a**2, axis=1) + 1.0)
            for a, g in zip(inputs, outs, strict=True)
        )
        factors = jnp.where(mask, jnp.minimum(1.0, CLIP / jnp.sqrt(squares)), 0.0)[:, None]
        return [
            (a.T @ (g * factors), (g * factors).sum(0)) for a, g in zip(inputs, outs, strict=True)
        ]

    return params, training(ghost_sum if ghost else by_vmap(record_loss), None, data, batch_size)


CASES = {
    "logistic_regression": logistic_regression,
    "gaussian_mixture": gaussian_mixture,
    "hierarchical": hierarchical,
    "vae": vae,
}


def main() -> None:
    jax.config.update("jax_enable_x64", True)
    made: dict[str, Any] = {}
    print(json.dumps({"jax": jax.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        steps = request.pop("steps")
        name = json.dumps(request, sort_keys=True)
        if name not in made:
            case = CASES[request.pop("case")]
            made[name] = case(**request)
        params, train = made[name]
        begin = time.perf_counter()
        result = jax.block_until_ready(train(params, steps, jax.random.PRNGKey(steps)))
        seconds = time.perf_counter() - begin
        finite = all(bool(jnp.all(jnp.isfinite(part))) for part in tree.tree_leaves(result))
        print(json.dumps({"seconds": seconds, "finite": finite}), flush=True)


if __name__ == "__main__":
    main()
