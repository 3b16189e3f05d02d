"""What a redesign must not move: clipped sums, noise multipliers, figures of reports, saved files.

`python tests/support/references.py figures FOLDER` writes the figures of this stack, `... files FOLDER` the saved files.
What lies in `tests/references` was written by commit 2eb4729. Nothing here looks behind the public face.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import dp_accounting
import numpy as np
import tensorflow as tf
import tensorflow_probability as tfp
from dp_accounting import NeighboringRelation

import tfp_dpvi as dpvi
from tfp_dpvi import _random, surrogates

tfd, tfpl, keras = tfp.distributions, tfp.layers, dpvi.keras

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "references"
STACK = "tf215" if tf.__version__.startswith("2.15.") else "current"
N, WIDTH, CODES = 12, 3, 2
_RNG = np.random.default_rng(16)
X = _RNG.normal(size=(N, WIDTH)).astype("float32")
Y = (X.sum(axis=1) + 0.5).astype("float32")
BITS = (X[:, 0] > 0).astype("int32")
WEIGHTS = np.array([0.0, 0.5, 1.0, 3.0] * 3, "float32")
IMAGES = _RNG.uniform(size=(N, 6, 6, 1)).astype("float32")


# ---------------------------------------------------------------------- models, under names that files can hold


@keras.utils.register_keras_serializable("references", "Line")
class Line(dpvi.DPModel):
    """Two layers and a prior on their weights."""

    def __init__(self, kind="float32", **kwargs):
        super().__init__(dtype=kind, **kwargs)
        self.kind = kind
        self.hidden = keras.layers.Dense(2, activation="tanh", dtype=kind)
        self.out = keras.layers.Dense(1, dtype=kind)

    def call(self, x):
        return self.out(self.hidden(x))

    def record_loss(self, x, y):
        return tf.square(self(tf.cast(x, self.kind)[None])[0, 0] - tf.cast(y, self.kind))

    def data_independent_loss(self, num_records):
        return (
            tf.add_n([tf.reduce_sum(tf.square(v)) for v in self.trainable_variables]) / num_records
        )

    def get_config(self):
        return {**super().get_config(), "kind": self.kind}


@dpvi.register("references_prior")
def prior(dtype="float64"):
    zero, one = np.zeros([], dtype), np.ones([], dtype)
    return tfd.JointDistributionNamed(
        {"w": tfd.Sample(tfd.Normal(zero, 2 * one), WIDTH), "b": tfd.Normal(zero, one)}
    )


@dpvi.register("references_likelihood")
def likelihood(params, x):
    return tfd.Bernoulli(logits=tf.linalg.matvec(x, params["w"]) + params["b"])


@dpvi.register("references_encoder")
def encoder():
    return keras.Sequential(
        [
            keras.layers.Input([WIDTH]),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.Dense(2 * CODES),
            tfpl.DistributionLambda(
                lambda t: tfd.MultivariateNormalDiag(t[..., :2], tf.nn.softplus(t[..., 2:]))
            ),
        ]
    )


@dpvi.register("references_decoder")
def decoder():
    return keras.Sequential(
        [
            keras.layers.Input([CODES]),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.Dense(WIDTH),
            tfpl.DistributionLambda(lambda t: tfd.MultivariateNormalDiag(t, tf.ones_like(t))),
        ]
    )


@dpvi.register("references_codes")
def codes(dtype="float32"):
    return tfd.MultivariateNormalDiag(np.zeros(CODES, dtype), np.ones(CODES, dtype))


@dpvi.register("references_wave")
def wave(groups_codes):
    """A regularizer that draws nothing."""
    samples = groups_codes.samples
    return tf.reduce_sum(groups_codes.weights[:, None] * tf.sin(3.0 * samples + 1.0))


def scattered(model, seed=1):
    """Fixed starts, whatever initialisers draw."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_variables:
        variable.assign(
            (0.4 * rng.normal(size=variable.shape)).astype(variable.dtype.as_numpy_dtype)
        )
    return model


def line(kind="float32"):
    model = Line(kind)
    model(tf.zeros([1, WIDTH], kind))
    return scattered(model)


def full_rank(prior):
    """TFP's builder, with which the figures were frozen; `dpvi.surrogates.full_rank` has another form."""
    bijector = prior.experimental_default_event_space_bijector()
    start = tf.nest.map_structure(tf.zeros_like, bijector.inverse(prior.sample(seed=(0, 0))))
    zero, one = np.float64(0.0), np.float64(1.0)
    base = tf.nest.map_structure(
        lambda part: tfd.Sample(surrogates._Normal(zero, one), sample_shape=part.shape), start
    )
    parts = iter([tf.reshape(part, [-1]) for part in tf.nest.flatten(start)])
    return tfp.experimental.vi.build_affine_surrogate_posterior_from_base_distribution(
        base,
        operators="tril",
        bijector=bijector,
        initial_unconstrained_loc_fn=lambda shape, dtype, seed=None: next(parts),
        seed=_random.tfp_seed(_random.new_key(3)),
        name="full_rank",
    )


def vi(surrogate="mean_field", **kwargs):
    surrogate = full_rank if surrogate == "full_rank" else surrogate
    return scattered(dpvi.DPVI(prior, likelihood, surrogate, seed=3, **kwargs, clipping="flat"))


def certain_vi(**kwargs):
    """A posterior without spread: its draws do not depend on the seed, so the sum can be had by hand."""
    flat = tfd.Sample(tfd.Normal(np.zeros([], "float64"), 2.0), WIDTH)
    surrogate = tfd.VectorDeterministic(tf.Variable(np.zeros(WIDTH)))
    how = lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w))  # noqa: E731
    return scattered(dpvi.DPVI(flat, how, surrogate, num_draws=2, **kwargs, clipping="flat"))


def certain_vae(dtype="float64", *, images=False, **kwargs):
    """Codes without spread, as above."""
    make = keras.layers
    if images:
        first = [
            make.Input([6, 6, 1], dtype=dtype),
            make.Conv2D(2, 3, 2, activation="relu", dtype=dtype),
            make.Flatten(),
        ]
        last = [
            make.Dense(9, dtype=dtype),
            make.Reshape([3, 3, 1]),
            make.Conv2DTranspose(1, 3, 2, "same", dtype=dtype),
        ]
        shape = [6, 6, 1]
    else:
        first, last, shape = (
            [make.Input([WIDTH], dtype=dtype)],
            [make.Dense(WIDTH, dtype=dtype)],
            [WIDTH],
        )
    inward = keras.Sequential([*first, make.Dense(CODES, dtype=dtype)])
    outward = keras.Sequential(
        [make.Input([CODES], dtype=dtype), make.Dense(4, activation="tanh", dtype=dtype), *last]
    )

    def encode(x):
        return tfd.VectorDeterministic(inward(x))

    def decode(z):
        mean = outward(z)
        return tfd.Independent(tfd.Normal(mean, tf.ones([], mean.dtype)), len(shape))

    return scattered(dpvi.DPVAE(encode, decode, codes(dtype), kl="monte_carlo", **kwargs))


def vae(**kwargs):
    return scattered(dpvi.DPVAE(encoder, decoder, codes, seed=3, **kwargs))


# ---------------------------------------------------------------------- clipped sums


def sgd(clip, clipping="flat"):
    return dpvi.optimizers.DPKerasSGDOptimizer(
        learning_rate=1.0, l2_norm_clip=clip, noise_multiplier=0.0, clipping=clipping
    )


def termwise(clip, groups_clip, parts):
    return dpvi.optimizers.TermwiseDPKerasSGDOptimizer(
        learning_rate=1.0,
        l2_norm_clip=clip,
        batch_l2_norm_clip=groups_clip,
        num_partitions=parts,
        noise_multiplier=0.0,
    )


@dataclasses.dataclass(frozen=True)
class Sum:
    """A model, its optimizer and its records, whose first step without noise shows the clipped sum.

    Attributes:
      make: the model, at fixed weights.
      optimizer: SGD at rate 1 without noise.
      data: arguments of `fit`.
      by_hand: (model, one record's place) -> its loss; None where draws come from the seed.
      rtol: of the largest entry of the sum: 1e-6, and float32's own rounding of weights and sums where it is that.
      compiled: further arguments of `compile`.
    """

    make: Callable[[], Any]
    optimizer: Callable[[], Any]
    data: dict[str, Any]
    by_hand: Callable[[Any, int], Any] | None = None
    rtol: float = 1e-6
    compiled: dict[str, Any] = dataclasses.field(default_factory=dict)


def of_line(model, i):
    return model.record_loss(tf.constant(X[i]), tf.constant(Y[i]))


def weighted(model, i):
    return WEIGHTS[i] * of_line(model, i)


def of_vi(model, i):
    weights = model.trainable_variables[0]
    logit = tf.reduce_sum(weights * X[i].astype("float64"))
    return tf.math.softplus(logit) - float(BITS[i]) * logit


def of_vae(records):
    def loss(model, i):
        x = tf.constant(records[i : i + 1].astype(model.prior.dtype.as_numpy_dtype))
        z = model.encode(x).loc
        return -(model.decode(z).log_prob(x) + model.prior.log_prob(z))[0]

    return loss


XY, ALONE, PICTURES = {"x": X, "y": Y}, {"x": X}, {"x": IMAGES}
FLOAT32 = 4e-6
SUMS = {
    "record flat": Sum(line, lambda: sgd(0.7), XY, of_line, FLOAT32),
    "record flat, float64": Sum(lambda: line("float64"), lambda: sgd(0.7), XY, of_line),
    "record per_layer": Sum(line, lambda: sgd(0.7, "per_layer"), XY, of_line, FLOAT32),
    "record normalized": Sum(line, lambda: sgd(0.7, "normalized"), XY, of_line, FLOAT32),
    "record, sample_weight": Sum(line, lambda: sgd(0.7), {**XY, "sample_weight": WEIGHTS}, weighted, FLOAT32),
    "record, in pieces": Sum(line, lambda: sgd(0.7), XY, of_line, FLOAT32, {"physical_batch_size": 5}),
    "vi aligned, certain": Sum(certain_vi, lambda: sgd(0.3), {"x": X, "y": BITS}, of_vi),
    "vi vectorized, certain": Sum(lambda: certain_vi(gradients="vectorized"), lambda: sgd(0.3), {"x": X, "y": BITS}, of_vi),
    "vi aligned, mean_field": Sum(vi, lambda: sgd(0.3), {"x": X, "y": BITS}),
    "vi aligned, full_rank": Sum(lambda: vi("full_rank"), lambda: sgd(0.3), {"x": X, "y": BITS}),
    "vi vectorized, mean_field": Sum(lambda: vi(gradients="vectorized"), lambda: sgd(0.3), {"x": X, "y": BITS}),
    "vi vectorized, full_rank": Sum(lambda: vi("full_rank", gradients="vectorized"), lambda: sgd(0.3), {"x": X, "y": BITS}),
    "vae ghost, certain": Sum(certain_vae, lambda: sgd(0.5), ALONE, of_vae(X)),
    "vae ghost, certain, float32": Sum(lambda: certain_vae("float32"), lambda: sgd(0.5), ALONE, of_vae(X), FLOAT32),
    "vae vectorized, certain": Sum(lambda: certain_vae(gradients="vectorized"), lambda: sgd(0.5), ALONE, of_vae(X)),
    "vae ghost, convolution": Sum(lambda: certain_vae(images=True), lambda: sgd(0.5), PICTURES, of_vae(IMAGES)),
    "vae vectorized, convolution": Sum(
        lambda: certain_vae(images=True, gradients="vectorized"), lambda: sgd(0.5), PICTURES, of_vae(IMAGES)
    ),
    "vae ghost": Sum(vae, lambda: sgd(0.5), ALONE, None, FLOAT32),
    "vae termwise, one group": Sum(
        lambda: certain_vae(batch_regularizer=wave), lambda: termwise(0.5, 0.6, 1), ALONE, of_vae(X)
    ),
    "vae termwise": Sum(lambda: vae(batch_regularizer=wave), lambda: termwise(0.5, 0.6, 3), ALONE, None, FLOAT32),
}  # fmt: skip


def flat(parts):
    return np.concatenate([np.asarray(part, np.float64).ravel() for part in parts])


def change(case):
    """The first step's change of the weights, and the model: -(clipped sum) / (q N) minus the exact gradient."""
    model, replaced = case.make(), []
    before = [v.numpy() for v in model.trainable_variables]
    model.compile(case.optimizer(), delta=1e-5, jit_compile=False, **case.compiled)
    model.fit(**case.data, batch_size=N, epochs=1, verbose=0)
    for variable, start in zip(model.trainable_variables, before, strict=True):
        replaced.append(variable.numpy().astype("float64") - start)
        variable.assign(start)
    return flat(replaced), model


def change_by_hand(case, model):
    """The same by TensorFlow's gradient of one record after another, clipped in NumPy."""
    variables, optimizer = model.trainable_variables, model.optimizer
    total = np.zeros(sum(int(np.prod(v.shape)) for v in variables))
    for i in range(N):
        parts = gradient(lambda i=i: case.by_hand(model, i), variables)
        if (
            getattr(model, "gradients", None) == "aligned"
        ):  # By the draws, together, and pulled back: each is the variable.
            each = np.tile(flat(parts) / model.num_draws, (model.num_draws, 1))
            total += shortened(each, optimizer.l2_norm_clip).sum(axis=0)
        else:
            total += clipped(parts, variables, optimizer)
    if getattr(model, "batch_regularizer", None) is not None:
        assert optimizer.num_partitions == 1
        parts = gradient(lambda: wave(everybody(model)), variables)
        total += N * shortened(flat(parts), optimizer.batch_l2_norm_clip)
    return -total / N - exact(model)


def gradient(loss, variables):
    with tf.GradientTape() as tape:
        value = loss()
    return [
        np.asarray(g, np.float64)
        for g in tape.gradient(value, variables, unconnected_gradients="zero")
    ]


def shortened(vector, clip):
    return vector * min(1.0, clip / max(np.linalg.norm(vector), 1e-300))


def clipped(parts, variables, optimizer):
    """Flat, per layer as the variables' names say, or normalized."""
    whole, clip = flat(parts), optimizer.l2_norm_clip
    if optimizer.clipping == "normalized":
        return whole * clip / (np.linalg.norm(whole) + 0.01)
    if optimizer.clipping == "per_layer":  # Record by record, each variable is a layer of its own.
        return np.concatenate(
            [shortened(part.ravel(), clip / math.sqrt(len(variables))) for part in parts]
        )
    return shortened(whole, clip)


def everybody(model):
    samples = model.encode(tf.constant(X, model.prior.dtype)).loc
    return collections.namedtuple("Codes", "samples weights")(samples, tf.ones(N, samples.dtype))


def exact(model):
    variables = model.trainable_variables
    if isinstance(model, Line):
        return flat(gradient(lambda: model.data_independent_loss(N), variables))
    if isinstance(model, dpvi.DPVI):
        return flat(gradient(lambda: -model.prior.log_prob(variables[0]) / N, variables))
    return 0.0


# ---------------------------------------------------------------------- noise multipliers


def plans():
    """Arguments of `PrivacyPlan.calibrate` by name; those that this stack has no price for are left out."""
    kinds, replace = dpvi.privacy, NeighboringRelation.REPLACE_ONE
    poisson, full, fixed = kinds.PoissonSampling, kinds.FullBatch, kinds.FixedSizeSampling
    both_terms, with_metric = (
        kinds.Sensitivity(1.8, 2.9),
        kinds.Sensitivity(math.sqrt(1.01), math.sqrt(4.04)),
    )
    before = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(2.0)), 50
    )
    found = {
        "poisson": {"sampling": poisson(0.01), "epsilon": 1.0, "num_releases": 1000},
        "poisson, few": {"sampling": poisson(0.25), "epsilon": 4.0, "num_releases": 20},
        "poisson, small epsilon": {"sampling": poisson(0.005), "epsilon": 0.1, "num_releases": 2000},
        "poisson, rdp": {"sampling": poisson(0.02), "epsilon": 2.0, "num_releases": 500, "accountant": "rdp"},
        "poisson, after others": {"sampling": poisson(0.02), "epsilon": 2.0, "num_releases": 100, "prior_events": [before]},
        "full batch": {"sampling": full(), "epsilon": 1.0, "num_releases": 100},
        "full batch, replace": {"sampling": full(), "epsilon": 0.5, "num_releases": 50, "neighboring_relation": replace},
        "fixed size": {"sampling": fixed(1000, 50), "epsilon": 1.0, "num_releases": 200, "neighboring_relation": replace, "accountant": "rdp"},
        "fixed size, many": {"sampling": fixed(50_000, 250), "epsilon": 3.0, "num_releases": 4000, "neighboring_relation": replace, "accountant": "rdp"},
        "termwise": {"sampling": poisson(0.01), "epsilon": 1.0, "num_releases": 500, "sensitivity": both_terms},
        "termwise, full batch, replace": {"sampling": full(), "epsilon": 2.0, "num_releases": 30, "sensitivity": both_terms, "neighboring_relation": replace},
        "with a metric": {"sampling": poisson(0.05), "epsilon": 1.0, "num_releases": 200, "sensitivity": with_metric},
        "poisson, replace": {"sampling": poisson(0.01), "epsilon": 1.0, "num_releases": 1000, "neighboring_relation": replace},
        "termwise, replace": {"sampling": poisson(0.02), "epsilon": 3.0, "num_releases": 200, "sensitivity": both_terms, "neighboring_relation": replace},
    }  # fmt: skip
    if STACK == "tf215":
        found = {name: plan for name, plan in found.items() if name not in UNPRICED}
    return found


UNPRICED = ("poisson, replace", "termwise, replace")  # By dp_accounting 0.4.3.


def calibrated(plan):
    return dpvi.PrivacyPlan.calibrate(delta=1e-5, **plan).noise_multiplier


# ---------------------------------------------------------------------- reports


def adam(noise_multiplier, **kwargs):
    return dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=0.7, learning_rate=0.05, noise_multiplier=noise_multiplier, **kwargs
    )


def poisson_with_metric():
    model = line()
    ledger = dpvi.PrivacyLedger(budget_epsilon=9.0, budget_delta=1e-6, dataset_id="references")
    metrics = [dpvi.metrics.PrivateELBO(low=-3.0, high=0.0)]
    model.compile(adam(2.0), delta=1e-5, ledger=ledger, metrics=metrics, jit_compile=False)
    model.fit(X, Y, batch_size=3, epochs=2, num_records=15, verbose=0)
    model.compile(adam(3.0), delta=1e-5, metrics=metrics, jit_compile=False)
    model.fit(X, Y, batch_size=N, epochs=1, num_records=N, verbose=0)
    return model


def full_batch_replaced():
    model = line("float64")
    model.compile(
        adam(4.0),
        delta=1e-6,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
        jit_compile=False,
    )
    model.fit(X, Y, batch_size=N, epochs=3, verbose=0)
    return model


def fixed_size():
    model = line()
    model.compile(
        adam(3.0),
        delta=1e-5,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
        accountant="rdp",
        jit_compile=False,
    )
    model.fit(X, Y, batch_size=4, epochs=2, sampling="fixed_size", verbose=0)
    return model


def both_terms():
    model = dpvi.DPVAE(encoder, decoder, codes, batch_regularizer=wave)
    how = dpvi.optimizers.TermwiseDPKerasAdamOptimizer(
        l2_norm_clip=0.7, batch_l2_norm_clip=0.4, num_partitions=2, noise_multiplier=2.5
    )
    model.compile(how, delta=1e-5, jit_compile=False)
    model.fit(X, batch_size=4, epochs=2, verbose=0)
    return model


REPORTS = {
    "poisson, then full batches, with a metric": poisson_with_metric,
    "full batches under replace-one": full_batch_replaced,
    "fixed size": fixed_size,
    "two terms": both_terms,
}


def figures(value, place=""):
    """Every number of a JSON value by its place; words may be chosen anew."""
    if isinstance(value, dict):
        return {
            k: v for key, part in value.items() for k, v in figures(part, f"{place}/{key}").items()
        }
    if isinstance(value, list | tuple):
        return {
            k: v
            for number, part in enumerate(value)
            for k, v in figures(part, f"{place}/{number}").items()
        }
    named = isinstance(value, bool | int | float) and not place.endswith("schema_version")
    return {place: value} if named else {}


# ---------------------------------------------------------------------- saved files


FILES = ("line", "vi", "vae", "termwise")
LEDGER, MODEL_OF_LEDGER = "books.ledger", "of_the_ledger.keras"


def data_of(name):
    return {"line": (X, Y), "vi": (X, BITS), "vae": (X,), "termwise": (X,)}[name]


def fitted(name):
    model = {
        "line": line,
        "vi": lambda: dpvi.DPVI(prior, likelihood, num_predictive_draws=5, clipping="flat"),
        "vae": lambda: dpvi.DPVAE(encoder, decoder, codes, beta=0.5),
        "termwise": lambda: dpvi.DPVAE(encoder, decoder, codes, batch_regularizer=wave),
    }[name]()
    how = adam(3.0)
    if name == "termwise":
        how = dpvi.optimizers.TermwiseDPKerasAdamOptimizer(
            l2_norm_clip=0.7, batch_l2_norm_clip=0.4, num_partitions=2, noise_multiplier=2.5
        )
    model.compile(how, delta=1e-5, jit_compile=False)
    model.fit(*data_of(name), batch_size=4, epochs=1, verbose=0)
    return model


def facts(model):
    """What a loaded model must still say."""
    return {
        "weights": flat(v.numpy() for v in model.trainable_variables).tolist(),
        "optimizer": flat(v.numpy() for v in model.optimizer.variables).tolist(),
        "figures": figures(model.privacy_report().to_json()),
    }


def write_files(folder):
    found = {}
    for name in FILES:
        model = fitted(name)
        model.save(folder / f"{name}.keras")
        found[name] = facts(model)
    with tempfile.TemporaryDirectory() as elsewhere:
        path = pathlib.Path(elsewhere) / LEDGER
        with dpvi.PrivacyLedger(
            path, dataset_id="references", budget_epsilon=9.0, budget_delta=1e-5
        ) as ledger:
            model = line()
            model.compile(adam(3.0), delta=1e-5, ledger=ledger, jit_compile=False)
            model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
            model.save(folder / MODEL_OF_LEDGER)
            found[LEDGER] = facts(model)
        (folder / LEDGER).write_bytes(path.read_bytes())
    (folder / "files.json").write_text(json.dumps(found, indent=1) + "\n")


def write_figures(folder):
    found = {
        "sums": {name: change(case)[0].tolist() for name, case in SUMS.items()},
        "noise": {name: calibrated(plan) for name, plan in plans().items()},
        "reports": {
            name: figures(make().privacy_report().to_json()) for name, make in REPORTS.items()
        },
    }
    (folder / f"{STACK}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    {"figures": write_figures, "files": write_files}[sys.argv[1]](pathlib.Path(sys.argv[2]))
