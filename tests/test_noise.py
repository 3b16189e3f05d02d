"""One function adds all noise (contract C10): what is released passes it, and nothing else draws any."""

from __future__ import annotations

import ast
import functools
import pathlib
import sys

import numpy as np
import pytest
import tensorflow as tf
import tensorflow_probability as tfp
from support.toy import Toy, records, sgd

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi.checking import Bins
from tfp_dpvi.checking.declared import CheckedOutcome, Declared
from tfp_dpvi.checking.release import Release
from tfp_dpvi.federated import Factor, Hospital, MessageHospital, Study, Task
from tfp_dpvi.regressions.measured import Measurement, Terms
from tfp_dpvi.synthetic.releases import CountReleases
from tfp_dpvi.training.budget import PrivacyTarget

tfd = tfp.distributions
PACKAGE = pathlib.Path(dpvi.__file__).parent

# Files that draw normals for another purpose than the noise of a release, and which.
OTHER_NORMALS = {
    "federated/columns.py": "invented inputs in place of public ones",
    "regressions/correlated.py": "draws of a group's effects from their prior",
    "federated/effects.py": "draws of the effects that released sums leave",
    "federated/rehearsal.py": "effects of simulated hospitals",
    "federated/factors.py": "draws of a posterior that is known",
    "federated/scoring.py": "draws of a posterior at which a step is taken",
    "federated/study.py": "public directions that try the prior",
    "calibrated/posterior.py": "places of a released path, and draws of a posterior",
    "calibrated/columns.py": "draws of the curvature",
    "calibrated/curvature.py": "draws of the curvature",
    "calibrated/diagonal.py": "public directions",
    "calibrated/whitening.py": "draws of scales given their release",
    "_unit_latents.py": "outcomes of persons that a model simulates",
    "regressions/population.py": "outcomes of a public population that the posterior predicts",
    "regressions/result.py": "outcomes that the posterior predicts",
    "calibrated/centred_fit.py": "standard inputs in place of public ones",
    "calibrated/hmc.py": "the momenta of HMC",
    "calibrated/mixture.py": "draws of a posterior",
    "surrogates.py": "reparameterised draws of a surrogate",
    "synthetic/mixture.py": "starting values",
}
NORMALS = {"normal", "standard_normal", "stateless_normal", "multivariate_normal", "laplace"}


def drawing_files(package=PACKAGE):
    """Files that call a function of such a name, `Factor.normal` (a constructor) left out."""
    names = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in NORMALS
                and getattr(node.func.value, "id", "") != "Factor"
            ):
                names.add(path.relative_to(package).as_posix())
    return names


def test_no_other_file_draws_noise():
    assert drawing_files() == set(OTHER_NORMALS)


def test_a_file_that_adds_noise_of_its_own_is_seen(tmp_path):
    (tmp_path / "leak.py").write_text("def f(total, rng):\n    return total + rng.normal()\n")
    assert drawing_files(tmp_path) == {"leak.py"}


# ---------------------------------------------------------------- every release passes `add_noise`


def gradients(shift, **how):
    """Two steps of SGD, and a metric released with them."""
    model = Toy()
    model.compile(sgd(1.0), delta=1e-5, metrics=[dpvi.metrics.PrivateELBO(-5.0, 0.0)], **how)
    x, y = records(60)
    history = model.fit(x + shift, y, batch_size=20, epochs=1, verbose=0).history
    return [model.w.numpy(), *(np.array(value) for value in history.values())]


def pairs(shift):
    """A calibrated posterior's scores and curvature."""
    prior = tfd.JointDistributionNamed({"w": tfd.Normal(0.0, 1.0)})
    model = dpvi.DPVI(prior, lambda params, x: tfd.Normal(params["w"] * x, 1.0), seed=1)
    model.compile(sgd(1.0), delta=1e-5, jit_compile=False)
    x = np.linspace(-1.0, 1.0, 60).astype("float32")
    model.fit(x, x + shift, batch_size=60, sampling="fixed_size", epochs=3, verbose=0)
    released = tf.nest.flatten(model.accumulated)
    return [value.numpy() for value in [*model.trainable_variables, *released]]


def moments(shift):
    layer = dpvi.preprocessing.PrivateStandardize(-3.0, 3.0)
    layer.adapt(records(60)[0] + shift, epsilon=1.0, delta=1e-5)
    return [weight.numpy() for weight in layer.weights]


def counts(shift):
    releases = CountReleases(dpvi.PrivacyLedger(), PrivacyTarget(epsilon=1.0, delta=1e-5))
    (plan,) = releases.plans([("counts", 1.0, 1.0)], 60)
    return [releases.release(np.full([2, 3], shift), plan, 0)]


def checks(shift):
    """Sums that a check of a model releases."""
    columns = {"age": Bins(("young", "old"), np.zeros(60, np.int64))}
    what = Declared(CheckedOutcome(False, True, "Poisson", -1.0), columns, (-10.0, 0.0))
    relation = dpvi.privacy.NeighboringRelation.ADD_OR_REMOVE_ONE
    settings = {"epsilon": 1.0, "delta": 1e-5, "num_records": 60, "relation": relation}
    return [Release.calibrated(what, **settings).noisy_sum(np.full([60, what.num], shift))]


def message(shift, **how):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), [1])})
    silent = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=np.inf, noise_multiplier=0.0, learning_rate=0.1
    )
    study = Study(
        prior,
        lambda params, x: tfd.Normal(x[:, 0] * params["w"][0], 1.0),
        silent,
        privacy="messages",
        message_clip=0.1,
        num_shards=2,
        num_hospitals=10**4,
        local_steps=2,
        batch_size=20,
    )
    x, y = records(60, 1)
    return change_of(
        MessageHospital(study, x + np.float32(shift), y, name="a", epsilon=1.0, rounds=1, **how)
    )


def change_of(hospital):
    start = Factor.normal([0.0], [1.0])
    task = Task(hospital.study.terms.identity, "a", "r", 0, start, start)
    change = hospital.refine(task).change
    return [change.shift, change.precision]


def local_steps(shift, **how):
    """A round of a hospital, with noise in its steps."""
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), [1])})
    likelihood = lambda params, x: tfd.Normal(x[:, 0] * params["w"][0], 1.0)  # noqa: E731
    study = Study(prior, likelihood, sgd(), local_steps=2, batch_size=20)
    x, y = records(60, 1)
    settings = {"name": "a", "epsilon": 1.0, "rounds": 1, "seed": None if how else 1, **how}
    return change_of(Hospital(study, x + np.float32(shift), y, **settings))


def last_phase(shift, **how):
    """The sums that a hospital releases after a study's rounds."""
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 1.0), [1])})
    likelihood = lambda params, x: tfd.Normal(x[:, 0] * params["w"][0], 1.0)  # noqa: E731
    x, y = records(60, 1)
    optimizer = dpvi.optimizers.InformationOptimizer(l2_norm_clip=1.0)
    study = Study(
        prior, likelihood, optimizer, local_steps=2, calibrated=True, example=(x[:4], y[:4])
    )
    settings = {"name": "a", "epsilon": 1.0, "rounds": 1, "seed": None if how else 1, **how}
    hospital = Hospital(study, x + np.float32(shift), y, **settings)
    start = study.terms.prior
    last = Task(study.terms.identity, "a", "r", 1, start, start, last=True)
    return list(hospital.refine(last).sums.halves.values())


def scores(shift):
    """Mean log scores of two models, whose releases so far are of no records."""
    x = np.linspace(-1.0, 1.0, 60).astype("float32")
    ledger = dpvi.PrivacyLedger()
    models = {}
    plan = dpvi.PrivacyPlan(dpvi.privacy.FullBatch(), 9.0, 1)
    inputs = {"x": tf.TensorSpec([None]), "y": tf.TensorSpec([None])}
    for name in ("a", "b"):
        model = dpvi.DPVI(
            tfd.Normal(0.0, 1.0), lambda w, x: tfd.Normal(w * x, 1.0), seed=len(models)
        )
        model.compile(epsilon=3.0, delta=1e-5, ledger=ledger)
        model.record_release(plan, inputs, 60, declared=True)
        models[name] = model
    with ledger.reserved(plan):
        pass
    budget = {"epsilon": 1.0, "delta": 1e-5}
    result = dpvi.compare(models, x, x + np.float32(shift), score_range=(-9.0, 0.0), **budget)
    return [result.score, result.difference, result.noise_sd, result.sampling_sd]


def typical_values(shift):
    """Of a column of which bounds alone are known."""
    terms = Terms(epsilon=9.0, delta=1e-5, num_records=600)
    schema = dpvi.data.Schema({"x": dpvi.data.Continuous(0.0, 1e3)})
    release = Measurement(schema, ["x"], dpvi.PrivacyLedger(), 0.5, terms)
    column = release.release({"x": np.linspace(1.0, 90.0, 600) + 100.0 * shift}).columns["x"]
    return column.typical or (0.0, 0.0)


RELEASES = [
    gradients,
    pairs,
    typical_values,
    moments,
    counts,
    checks,
    message,
    local_steps,
    last_phase,
    scores,
]


@pytest.mark.parametrize("release", RELEASES)
def test_without_the_noise_functions_result_nothing_depends_on_records(release, monkeypatch):
    """Its results are replaced by constants: what is released of unlike data is then the same.

    A sum that went past it would show the data.
    """
    calls = []

    def constants(key, sums, deviations, *, dtype=None):
        calls.append(deviations)
        return [tf.fill(part.shape, tf.constant(1.0, dtype or part.dtype)) for part in sums]

    monkeypatch.setattr(_random, "add_noise", constants)
    for both in zip(release(0.0), release(2.0), strict=True):
        np.testing.assert_allclose(*both, rtol=1e-5, atol=1e-8)  # Exact terms may round apart.
    assert calls


# ---------------------------------------------------------------- every one of them has a secure form

# Who makes steps, whose noise `optimizers.privatize` adds, and a release of theirs with words of AES.
# The audits' steps are in `tests/audit`, a loop of one's own in `tests/models/test_secure.py`.
SECURE = {"randomness": "secure"}
STEPS = {
    "training/fit.py": functools.partial(gradients, **SECURE),
    "federated/refiner.py": functools.partial(local_steps, **SECURE),
    "federated/window.py": functools.partial(last_phase, **SECURE),
    "training/compiled.py": None,
    # Of simulated records.
    "rehearsal/replicates.py": None,
    "audit/observed.py": None,
}
# Releases that are no steps always take the operating system's words; the steps behind a message only now.
SINGLE = {
    "preprocessing.py": moments,
    "selection/scores.py": scores,
    "checking/release.py": checks,
    "synthetic/releases.py": counts,
    "regressions/measured.py": typical_values,
    "federated/on_messages.py": functools.partial(message, **SECURE),
}
DRAWERS = {"optimizers/dp_keras.py", *SINGLE}


def calling_files(*names):
    """Files of the package that call a function of one of these names."""
    return {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) in names
    }


def test_nobody_else_adds_noise_or_makes_steps():
    """A new caller needs a release below, which shows that its noise can be a cryptographic generator's."""
    assert calling_files("add_noise") == DRAWERS
    assert calling_files("steps_for", "make_steps") == set(STEPS)


@pytest.mark.parametrize(
    "caller", [name for name, release in {**STEPS, **SINGLE}.items() if release]
)
def test_all_noise_can_be_a_cryptographic_generators(caller, monkeypatch):
    """C10: the function that adds noise gets words of their own, no key that another generator would expand."""
    kinds, genuine = [], _random.add_noise

    def watched(key, *args, **settings):
        place = pathlib.Path(sys._getframe(1).f_code.co_filename)
        kinds.append((place.relative_to(PACKAGE).as_posix(), _random.is_tape(key)))
        return genuine(key, *args, **settings)

    monkeypatch.setattr(_random, "add_noise", watched)
    {**STEPS, **SINGLE}[caller](0.0)
    drawer = caller if caller in SINGLE else "optimizers/dp_keras.py"
    assert drawer in {place for place, _ in kinds}
    assert all(secure for _, secure in kinds), kinds
