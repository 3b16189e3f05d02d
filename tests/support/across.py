"""One stack writes a model, its ledger and its export, the other reads them: `python across.py write FOLDER`.

Prints what it found as JSON. Not a test: `test_across_stacks.py` runs it by the Python of either stack.
"""

from __future__ import annotations

import json
import sys

import numpy as np

X = np.random.default_rng(0).normal(size=(100, 2)).astype(np.float32)
Y = X.sum(axis=1)


def parts():
    import tensorflow as tf
    import tensorflow_probability as tfp

    import tfp_dpvi as dpvi

    tfd = tfp.distributions

    @dpvi.register("across_prior")
    def prior():
        return tfd.Sample(tfd.Normal(0.0, 1.0), 2)

    @dpvi.register("across_likelihood")
    def likelihood(weights, x):
        return tfd.Normal(tf.linalg.matvec(x, weights), 1.0)

    return dpvi, prior, likelihood


def fit(dpvi, model, folder):
    optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    ledger = dpvi.PrivacyLedger(f"{folder}/ledger")
    model.compile(optimizer, epsilon=1.0, delta=1e-5, planned_epochs=2, ledger=ledger)
    model.fit(X, Y, batch_size=20, epochs=1, verbose=0)
    return found(model)


def found(model):
    report = model.privacy_report()
    return {
        "epsilon": report.epsilon,
        "releases": report.num_releases,
        "predict": model.predict(X[:5]).tolist(),
    }


def write(folder):
    dpvi, prior, likelihood = parts()
    model = dpvi.DPVI(prior, likelihood, clipping="flat")
    result = fit(dpvi, model, folder)
    model.save(f"{folder}/model.keras")
    model.export(f"{folder}/export")
    return result


def read(folder):
    dpvi, _, _ = parts()
    model = dpvi.load_model(f"{folder}/model.keras")
    return {"loaded": found(model), "fitted": fit(dpvi, model, folder)}


def alone(folder):
    import tensorflow as tf

    predict = tf.saved_model.load(f"{folder}/export").predict
    assert "tensorflow_probability" not in sys.modules
    return {
        "predict": predict(x=tf.constant(X[:5]))["mean"].numpy().tolist(),
        "tensorflow": tf.__version__,
    }


if __name__ == "__main__":
    print(json.dumps({"write": write, "read": read, "alone": alone}[sys.argv[1]](sys.argv[2])))
