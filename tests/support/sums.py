"""Clipped sums against one record at a time (C1, C2, C5)."""

import math

import numpy as np

from support.cases import CASES
from support.subject import REAL
from tfp_dpvi._tf import tf
from tfp_dpvi.gradients import Clip

CLIPS = (0.05, 1.0, 1e4, math.inf)  # Clips all, some and none of the cases' records.
PUBLIC_NUM = 100


def weights(num, dtype):
    return np.array([0.0, 0.5, 1.0, 3.0, 1.0, 2.0, 100.0], dtype)[:num]


def flat(parts):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in parts])


def clip_by_hand(vectors, clip):
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors * np.minimum(1.0, clip / np.maximum(norms, 1e-300))


def sums_function(model, num_draws, subject, jit_compile):
    """Compiled: key, records, mask, clip -> what the step makes of them, and the draws, for the loop by hand."""

    def compute(key, records, mask, clip):
        variables = model.trainable_variables
        sums, exact, pulled = {}, {}, None
        model.num_draws = num_draws
        with tf.GradientTape(persistent=True) as tape:
            model.gradients = "aligned"
            steps = {"aligned": subject.step_gradients(model, key, PUBLIC_NUM)}
            draws = list(steps["aligned"].released)
            params = single_draws(model, draws, num_draws)
            terms = [
                model.surrogate_posterior.log_prob(draw) - model.prior.log_prob(draw)
                for draw in params
            ]
            divergence = tf.add_n(terms) / (num_draws * PUBLIC_NUM)
        model.gradients = "vectorized"
        steps["vectorized"] = subject.step_gradients(model, key, PUBLIC_NUM)
        for engine, step in steps.items():
            clipped, _ = subject.clipped_sum(step.record_gradient, records, mask, Clip(clip))
            sums[engine] = list(clipped.tensors)
            exact[engine] = step.data_independent or [tf.zeros_like(v) for v in variables]
            if step.pull_back is not None:
                pulled = step.pull_back(sums[engine])
        by_hand = {
            "draws": draws,
            "jacobian": [
                tape.jacobian(
                    draw, variables, experimental_use_pfor=False, unconnected_gradients="zero"
                )
                for draw in draws
            ],
            "exact": tape.gradient(divergence, variables, unconnected_gradients="zero"),
        }
        return sums, exact, pulled, by_hand

    return tf.function(compute, jit_compile=jit_compile, autograph=False)


def single_draws(model, draws, num_draws):
    """The parameters of each draw, from tensors with the draws in the first dimension."""
    each = [[part[number] for part in draws] for number in range(num_draws)]
    return [tf.nest.pack_sequence_as(model.prior.dtype, parts) for parts in each]


def gradients_by_hand(case, model, draws, records, num_draws):
    """Gradients by the draws, one record at a time, of log-likelihoods written by hand: float64 [records, draws]."""
    vectors = []
    for i in range(len(records["x"])):
        x, y = records["x"][i], records["y"][i] if "y" in records else None
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(draws)
            params = single_draws(model, draws, num_draws)
            loss = -tf.add_n([case.log_prob(draw, x, y) for draw in params]) / num_draws
            if "sample_weight" in records:
                loss *= records["sample_weight"][i]
        vectors.append(flat(tape.gradient(loss, draws, unconnected_gradients="zero")))
    return np.stack(vectors)


def close(ours, reference, scale, rtol, what):
    """Entries agree to `rtol` of the size of what was added up to make them."""
    error = np.abs(ours - reference)
    assert np.all(np.isfinite(ours)), f"{what} is not finite"
    assert np.all(error <= rtol * scale), f"{what}: off by {np.max(error / scale):.3g} of its terms"


def check_sums(
    name,
    model,
    *,
    subject=REAL,
    num_draws=1,
    weighted=True,
    jit_compile=False,
    rtol=1e-10,
    masked=(2,),
):
    """C1, C2, C5: clipped *sums* of records' own weighted terms equal a loop over records by hand, in both engines."""
    case, dtype = CASES[name], model.trainable_variables[0].dtype.as_numpy_dtype
    records = case.records(np.random.default_rng(3), dtype)
    if weighted:
        records["sample_weight"] = weights(len(records["x"]), dtype)
    mask = np.ones(len(records["x"]), bool)
    mask[list(masked)] = False
    key = tf.constant([11, 12], tf.int64)
    function = sums_function(model, num_draws, subject, jit_compile)
    tensors = tf.nest.map_structure(tf.constant, records)
    by_draws = jacobian = None
    for clip in np.array(CLIPS, dtype):
        sums, exact, pulled, by_hand = function(key, tensors, tf.constant(mask), tf.constant(clip))
        if by_draws is None:
            by_draws = gradients_by_hand(case, model, by_hand["draws"], records, num_draws)[mask]
            jacobian = np.concatenate(
                [
                    np.concatenate(
                        [
                            np.asarray(part, np.float64).reshape(draw.shape.num_elements(), -1)
                            for part in row
                        ],
                        1,
                    )
                    for draw, row in zip(by_hand["draws"], by_hand["jacobian"], strict=True)
                ]
            )
        for engine, vectors in (("aligned", by_draws), ("vectorized", by_draws @ jacobian)):
            norms = np.linalg.norm(vectors, axis=1)
            assert clip != CLIPS[0] or np.sum(norms > clip) >= 3, "the case must clip something"
            contributions = clip_by_hand(vectors, np.float64(clip))
            scale = np.abs(contributions).sum(0) + 0.1 * np.linalg.norm(contributions, axis=1).sum()
            close(
                flat(sums[engine]),
                contributions.sum(0),
                scale,
                rtol,
                f"{engine} sum at clip {clip}",
            )
            reference = flat(by_hand["exact"])
            close(
                flat(exact[engine]),
                reference,
                np.linalg.norm(reference),
                10 * rtol,
                "exact gradient of the KL term",
            )
        reference = clip_by_hand(by_draws, np.float64(clip)).sum(0) @ jacobian
        close(flat(pulled), reference, np.linalg.norm(reference), 10 * rtol, "pulled back sum")
