"""Everything in a step can run on a GPU: every operation of the traced loop has a kernel there, or is compiled by XLA.

TensorFlow's Linux build registers its CUDA kernels whether or not a GPU is there, so this is read off the traced graphs.
"""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support import internals
from tensorflow.python.framework import kernels

import tfp_dpvi as dpvi
from tfp_dpvi import keras

tfd, tfpl, layers = tfp.distributions, tfp.layers, keras.layers
X = np.random.default_rng(0).uniform(size=[40, 6]).astype("float32")

#: Of the graph itself: no device computes them.
STRUCTURE = {"Placeholder", "NoOp", "Const", "_Arg", "_Retval"}


def fits(kernel, node):
    """Whether a registered kernel is for the types of a node."""
    for constraint in kernel.constraint:
        value = node.attr[constraint.name]
        kinds = [value.type] if value.WhichOneof("value") == "type" else list(value.list.type)
        if any(kind not in constraint.allowed_values.list.type for kind in kinds):
            return False
    return True


def without_a_gpu_kernel(definition, devices=("GPU", "DEFAULT")):
    """Operations, as {op: types}, that nothing could place on a GPU; those that XLA compiles are left out."""
    compiled = set()
    functions = {function.signature.name: function for function in definition.library.function}

    def called_from(nodes):
        for node in nodes:
            for value in node.attr.values():
                for name in [value.func.name, *(f.name for f in value.list.func)]:
                    if name in functions and name not in compiled:
                        compiled.add(name)
                        called_from(functions[name].node_def)

    for name, function in functions.items():
        if function.attr["_XlaMustCompile"].b:
            compiled.add(name)
            called_from(function.node_def)
    missing: dict[str, list[str]] = {}
    nodes = list(definition.node)
    for name, function in functions.items():
        if name not in compiled:
            nodes += function.node_def
    for node in nodes:
        if node.op in STRUCTURE or node.op in functions or node.attr["_XlaMustCompile"].b:
            continue
        registered = kernels.get_registered_kernels_for_op(node.op).kernel
        if not any(kernel.device_type in devices and fits(kernel, node) for kernel in registered):
            missing[node.op] = sorted(
                {
                    tf.as_dtype(value.type).name
                    for value in node.attr.values()
                    if value.WhichOneof("value") == "type"
                }
            )
    return missing


def graphs(model):
    """Definitions of the loops that a fit of this model traced."""
    found = [
        concrete.graph.as_graph_def()
        for loop in internals.traced_steps(model)
        for concrete in loop._list_all_concrete_functions()
    ]
    assert found
    return found


def logistic(**kwargs):
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 6)
    model = dpvi.DPVI(
        prior, lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)), **kwargs, clipping="flat"
    )
    return model, (X, (X[:, 0] > 0.5).astype("int32"))


def autoencoder(**kwargs):
    encoder = keras.Sequential(
        [
            layers.Input([6]),
            layers.Dense(5, "tanh"),
            layers.Dense(4),
            tfpl.DistributionLambda(
                lambda t: tfd.Independent(
                    tfd.Normal(t[..., :2], 0.1 + tf.nn.softplus(t[..., 2:])), 1
                )
            ),
        ]
    )
    decoder = keras.Sequential(
        [
            layers.Input([2]),
            layers.Dense(5, "tanh"),
            layers.Dense(6),
            tfpl.DistributionLambda(
                lambda t: tfd.Independent(tfd.Bernoulli(logits=t, dtype=t.dtype), 1)
            ),
        ]
    )
    return dpvi.DPVAE(
        encoder, decoder, tfd.Independent(tfd.Normal(tf.zeros(2), 1.0), 1), **kwargs
    ), (X,)


def termwise():
    return autoencoder(
        batch_regularizer=lambda codes: dpvi.divergences.mmd(codes.samples, codes.prior_samples)
    )


CASES = {
    "mean field": lambda: logistic(),
    "full rank, two draws": lambda: logistic(surrogate_posterior="full_rank", num_draws=2),
    "autoencoder": autoencoder,
    "one record at a time": lambda: autoencoder(gradients="vectorized"),
    "term-wise": termwise,
}


FAST = ("mean field",)
#: pfor splits int32 seeds, which has a kernel on CPUs alone: on a GPU this one is compiled.
ONLY_COMPILED = ("one record at a time",)
COMBINATIONS = [
    pytest.param(case, jit, marks=[] if case in FAST and not jit else pytest.mark.slow)
    for case in CASES
    for jit in (False, True)
    if jit or case not in ONLY_COMPILED
]


@pytest.mark.parametrize(("case", "jit_compile"), COMBINATIONS)
def test_every_operation_has_a_gpu_kernel(case, jit_compile):
    model, data = CASES[case]()
    metrics = [dpvi.metrics.PrivateELBO(-20.0, 0.0)] if case == "mean field" else None
    make = dpvi.optimizers.DPKerasAdamOptimizer
    extra = {}
    if case == "term-wise":
        make = dpvi.optimizers.TermwiseDPKerasAdamOptimizer
        extra = {"batch_l2_norm_clip": 0.1, "num_partitions": 2}
    optimizer = make(l2_norm_clip=1.0, noise_multiplier=1.0, learning_rate=0.01, **extra)
    model.compile(optimizer, delta=1e-5, jit_compile=jit_compile, metrics=metrics)
    model.fit(*data, batch_size=10, epochs=1, steps_per_epoch=2, verbose=0)
    for definition in graphs(model):
        # A compiled loop is compiled as a whole.
        devices = ("GPU", "DEFAULT", *["XLA_GPU_JIT"] * jit_compile)
        assert without_a_gpu_kernel(definition, devices) == {}


def test_the_check_sees_an_operation_without_one():
    @tf.function(autograph=False)
    def plain(x):
        return tf.strings.length(tf.strings.as_string(x))

    @tf.function(autograph=False, jit_compile=True)
    def compiled(x):
        return tf.sort(x)

    missing = without_a_gpu_kernel(
        plain.get_concrete_function(tf.TensorSpec([2])).graph.as_graph_def()
    )
    assert set(missing) == {"AsString", "StringLength"}
    outer = tf.function(lambda x: compiled(x) + 1.0, autograph=False)
    assert (
        without_a_gpu_kernel(outer.get_concrete_function(tf.TensorSpec([2])).graph.as_graph_def())
        == {}
    )
