"""Several replicas: one sum, one noise, one ledger (contracts C1, C4, C6, C10). In processes with two logical CPUs."""

from __future__ import annotations

import json
import os
import pathlib
import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import scipy.stats
from support import tapes

import tfp_dpvi as dpvi
from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.sampling import FullBatchSampler, PoissonSampler
from tfp_dpvi.sampling.poisson import poisson_gaps
from tfp_dpvi.training import distribution

COMMON = """
import functools, json, os, sys
import numpy as np
import tfp_dpvi as dpvi
from support import internals, tapes
from support.steps import Indicator
from support.toy import Toy
from tfp_dpvi._tf import tf, tfp
tfd = tfp.distributions
X = np.random.default_rng(0).normal(size=[200, 3]).astype("float32")
Y = (X[:, 0] > 0).astype("int32")
keras = dpvi.keras

def two_cpus():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])

def dpvi_model(seed):
    prior = tfd.Sample(tfd.Normal(0.0, 1.0), 3)
    return dpvi.DPVI(prior, lambda w, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, w)), seed=seed, clipping="flat")

def vae_model(seed):
    layers = keras.layers
    keras.utils.set_random_seed(1)
    encoder = keras.Sequential([layers.Input([3]), layers.Dense(4),
        tfp.layers.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t[..., :2], 1e-6), 1))])
    decoder = keras.Sequential([layers.Input([2]), layers.Dense(3),
        tfp.layers.DistributionLambda(lambda t: tfd.Independent(tfd.Normal(t, 1.0), 1))])
    return dpvi.DPVAE(encoder, decoder, tfd.Independent(tfd.Normal(tf.zeros(2), 1.0), 1), seed=seed)

def sgd(noise, clip=0.5, rate=0.1):
    return dpvi.optimizers.DPKerasSGDOptimizer(l2_norm_clip=clip, noise_multiplier=noise, learning_rate=rate)

def weights(model):
    return np.concatenate([v.numpy().ravel() for v in model.trainable_variables])
"""


ROOT = pathlib.Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TF_USE_LEGACY_KERAS": "1",
}
"""Without Keras 3, whose import takes two seconds."""


def run(script: str, tmp_path: pathlib.Path, *arguments: str) -> dict:
    path = tmp_path / "script.py"
    path.write_text(COMMON + textwrap.dedent(script))
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def start_workers(script: str, tmp_path: pathlib.Path, *arguments: str) -> list[subprocess.Popen]:
    """Two processes that run `script` with their number and the arguments, as one cluster on loopback."""
    path = tmp_path / "script.py"
    path.write_text(COMMON + textwrap.dedent(script))
    cluster = {"worker": [f"localhost:{port}" for port in free_ports(2)]}
    children = []
    for index in range(2):
        config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": index}})
        environment = {**os.environ, **ENVIRONMENT, "TF_CONFIG": config}
        children.append(
            subprocess.Popen(
                [sys.executable, "-u", str(path), str(index), *arguments],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return children


FORK = """
# One import for two workers: a fork has what any process has after it, before TensorFlow starts a thread.
folder = sys.argv[2]
child = os.fork()
index = 0 if child else 1
task = {"cluster": json.loads(sys.argv[1]), "task": {"type": "worker", "index": index}}
os.environ["TF_CONFIG"] = json.dumps(task)
sys.stdout = open(f"{folder}/{index}.out", "w")
sys.argv[1] = str(index)
"""
JOIN = """
sys.stdout.close()
os._exit(os.waitpid(child, 0)[1] if child else 0)  # TensorFlow's farewell takes a second each.
"""


def ends_of_forks(script: str, tmp_path: pathlib.Path, *arguments: str) -> list[dict]:
    """What two workers print last, as `ends_of`, where none of them is to be killed."""
    path = tmp_path / "script.py"
    path.write_text(COMMON + FORK + textwrap.dedent(script) + JOIN)
    cluster = json.dumps({"worker": [f"localhost:{port}" for port in free_ports(2)]})
    subprocess.run(
        [sys.executable, str(path), cluster, *arguments],
        env={**os.environ, **ENVIRONMENT},
        timeout=250,
        check=True,
    )
    outputs = [(tmp_path / f"{index}.out").read_text() for index in range(2)]
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def ends_of(children: list[subprocess.Popen]) -> list[dict]:
    """What workers print last, as JSON."""
    ends = []
    for child in children:
        out, err = child.communicate(timeout=250)
        assert child.returncode == 0, err[-3000:]
        ends.append(json.loads(out.splitlines()[-1]))
    return ends


def free_ports(num: int) -> list[int]:
    sockets = [socket.socket() for _ in range(num)]
    for each in sockets:
        each.bind(("localhost", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


# ---------------------------------------------------------------------- replicas of one process: one script

REPLICAS = """
HERE = os.path.dirname(__file__)
strategy = two_cpus()  # Before TensorFlow is used.

def fitted(model, *data, scope=None, jit_compile=False, **fit):
    with scope.scope() if scope else tf.init_scope():
        made = model()
        made.compile(sgd(1.0), delta=1e-5, jit_compile=jit_compile)
    made.fit(*data, verbose=0, **{"batch_size": 31, "epochs": 2, **fit})
    return made

MODELS = {"dpvi": (lambda: dpvi_model(3), (X, Y)), "vae": (lambda: vae_model(3), (X,)), "toy": (lambda: Toy(seed=3), (X, Y))}

class Epochs(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.ends = []
    def on_epoch_end(self, epoch, logs=None):
        self.ends.append({"weights": weights(self.model).tolist(), "releases": self.model.privacy_ledger.num_releases})

def on(kind, scope, jit_compile=False):
    model, data = MODELS[kind]
    epochs = Epochs()
    made = fitted(model, *data, scope=scope, jit_compile=jit_compile, callbacks=[epochs])
    (step,) = internals.traced_steps(made)
    assert step.experimental_get_tracing_count() == 1
    assert made.privacy_ledger.num_releases == 14
    if scope is strategy:
        for variable in made.trainable_variables:
            one, two = (v.numpy() for v in scope.experimental_local_results(variable))
            assert (one == two).all()
    assert epochs.ends[1]["weights"] == weights(made).tolist()
    return epochs.ends

on_no_strategy = functools.cache(lambda kind: on(kind, None))

def one_replica():
    scopes = [tf.distribute.MirroredStrategy(["CPU:0"]), tf.distribute.OneDeviceStrategy("CPU:0")]
    return [on_no_strategy("toy")[1]["weights"], *[on("toy", scope)[1]["weights"] for scope in scopes]]

def two_replicas(kinds=("toy",)):
    ends = {kind: [on_no_strategy(kind), on(kind, strategy, kind == "dpvi")] for kind in kinds}
    return {kind: [epochs[1]["weights"] for epochs in each] for kind, each in ends.items()}

def two_replicas_of_models():
    return two_replicas(("dpvi", "vae"))

class StopInTheThirdEpoch(keras.callbacks.Callback):
    left = 3
    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

def with_callbacks(name, *more):
    with dpvi.PrivacyLedger(f"{HERE}/{name}") as ledger:
        with strategy.scope():
            model = Toy(seed=5)
            model.compile(sgd(1.0), delta=1e-5, ledger=ledger, jit_compile=False)
        callbacks = [dpvi.callbacks.PrivateBackupAndRestore(f"{HERE}/{name}_backup")]
        callbacks.append(dpvi.callbacks.PrivacyTensorBoard(f"{HERE}/{name}_logs"))
        model.fit(X, Y, batch_size=40, epochs=4, verbose=0, callbacks=[*callbacks, *more])
        return [weights(model).tolist(), ledger.num_releases, len(os.listdir(f"{HERE}/{name}_logs"))]

def interrupted():
    ends = [with_callbacks("straight")]
    try:
        with_callbacks("interrupted", StopInTheThirdEpoch())
    except KeyboardInterrupt:
        ends.append(with_callbacks("interrupted"))
    return ends

class Nothing(dpvi.DPModel):
    def __init__(self):
        super().__init__()
        self.v = self.add_weight("v", [15_000], initializer="zeros")

    def record_loss(self, x):
        return 0.0 * x[0] * tf.reduce_sum(self.v)

def noise():
    with strategy.scope():
        model = Nothing()
        model.compile(sgd(2.0, clip=0.5, rate=1.0), delta=1e-5)
    steps = []
    model.fit(X, batch_size=50, epochs=10, steps_per_epoch=1, verbose=0, callbacks=[
        keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: steps.append(model.v.numpy().copy()))])
    noise = np.diff(np.stack([np.zeros(15_000), *steps]), axis=0).ravel() * 50 / (2.0 * 0.5)
    return {"square": float((noise**2).sum()), "num": noise.size}

def outside_the_scope():
    model = Toy()
    model.compile(sgd(1.0), delta=1e-5)
    try:
        with strategy.scope():
            model.fit(X, Y, batch_size=31, verbose=0)
    except RuntimeError as error:  # TensorFlow's own.
        return {"error": str(error), "spent": model.privacy_ledger.num_releases}

class Regression(dpvi.DPModel):
    def __init__(self):
        super().__init__(seed=3)
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")

    def call(self, x):
        return self.dense(x)

    def record_loss(self, x, y):
        return tf.square(self(x[None])[0, 0] - tf.cast(y, tf.float32))

def momenta():
    ends = []
    for scope in (None, strategy):
        with scope.scope() if scope else tf.init_scope():
            model = Regression()
            model.compile(dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=0.5, noise_multiplier=1.0, learning_rate=0.1,
                use_ema=True, ema_momentum=0.9), delta=1e-5, jit_compile=False, steps_per_execution=3)
        model.fit(X, Y, batch_size=31, verbose=0)  # Outside the scope; its layer is built only now.
        ends.append(weights(model).tolist())
    return ends

def secure():
    dpvi._keystream.new_key = lambda: tapes.KEY
    with strategy.scope():
        model = Indicator(30)
        model.compile(sgd(1.0, clip=1.0, rate=1.0), delta=1e-5, jit_compile=False, randomness="secure",
            steps_per_execution=2)
    model.fit(np.eye(30, dtype="float32"), batch_size=6, verbose=0)
    return weights(model).tolist()

def alone():
    made = fitted(*MODELS["toy"][:1], X, Y, epochs=1)
    return {"weights": weights(made).tolist(), "releases": made.privacy_ledger.num_releases}

print(json.dumps({part: globals()[part]() for part in sys.argv[1:]}), flush=True)
os._exit(0)  # TensorFlow's farewell takes a second.
"""


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    parts = "noise", "secure", "outside_the_scope", "alone"
    return run(REPLICAS, tmp_path_factory.mktemp("replicas"), *parts)


@pytest.fixture(scope="module")
def more_replicas(tmp_path_factory):
    parts = "one_replica", "two_replicas", "two_replicas_of_models", "interrupted", "momenta"
    return run(REPLICAS, tmp_path_factory.mktemp("more_replicas"), *parts)


@pytest.mark.slow
def test_a_strategy_of_one_replica_makes_the_same_steps(more_replicas):
    """Bit for bit, and the step is traced once: Keras runs it in the strategy's scope, where it was tried."""
    first, *others = more_replicas["one_replica"]
    assert len(others) == 2
    assert all(other == first for other in others)


@pytest.mark.slow  # Replicas of a calibrated model: `test_calibrated.py`.
def test_two_replicas_make_the_steps_of_one(more_replicas):
    """In seeded mode, noise and all: the same batches, shared out, and one and the same noise."""
    for name, (one, two) in more_replicas["two_replicas"].items():
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_two_replicas_make_the_steps_of_one_with_models(more_replicas):
    for name, (one, two) in more_replicas["two_replicas_of_models"].items():
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_callbacks_work_on_several_replicas(more_replicas):
    """TensorBoard's figures are written, and a seeded fit that was interrupted ends as one that was not."""
    found = more_replicas["interrupted"]
    np.testing.assert_allclose(found[0][0], found[1][0], rtol=1e-4, atol=1e-6)
    assert [releases for _, releases, _ in found] == [20, 25]
    assert [files for *_, files in found] == [1, 2]


def test_noise_is_added_once_a_step(replicas):
    """Its standard deviation over 150,000 draws is z C / (q N) within 1 %: a false alarm in 10^7 runs (chi-square).

    Noise of each replica's own, added up, would be sqrt(2) of it, and averaged 1 / sqrt(2).
    """
    found = replicas["noise"]
    low, high = scipy.stats.chi2(found["num"]).ppf([5e-8, 1 - 5e-8])
    assert low < found["square"] < high
    assert (high / found["num"]) ** 0.5 < 1.01


def test_secure_noise_and_samples_are_those_of_the_words_on_replicas(replicas):
    """C10: as on one device (`test_secure.py`), by NumPy: every replica reads the same words."""
    releases = tapes.releases_of_unit_records(5, 30, 0.2, 1.0)
    expected = (np.round(releases * 2**12) / 2**12 / 6).sum(axis=0)
    np.testing.assert_allclose(replicas["secure"], expected, atol=2e-6)


def test_a_model_built_outside_the_scope_is_refused(replicas):
    found = replicas["outside_the_scope"]
    assert "Strategy scopes" in found["error"]
    assert found["spent"] == 0


@pytest.mark.slow
def test_momenta_and_averages_belong_to_replicas_when_fit_is_outside_the_scope(more_replicas):
    """Also those of layers that are built by `fit`."""
    one, two = more_replicas["momenta"]
    np.testing.assert_allclose(two, one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_replicas_share_the_batches_of_their_own_worker(monkeypatch, num_shards):
    """Of four replicas, in one, two or four workers that each draw a batch: every row has one replica of its worker."""
    replicas = distribution.Replicas(None, jit_compile=False, static=True)
    replicas.num, seen = 4, []
    for number in range(4):
        monkeypatch.setattr(replicas, "number", lambda number=number: tf.constant(number, tf.int64))
        rows, mask = replicas.share(tf.range(10, dtype=tf.int64), tf.fill([10], True), num_shards)
        seen.append(tf.boolean_mask(rows, mask).numpy().tolist())
    each = 4 // num_shards
    for first in range(0, 4, each):
        together = [row for part in seen[first : first + each] for row in part]
        assert sorted(together) == list(range(10))


@pytest.mark.parametrize("batchwise", [False, True])
@pytest.mark.parametrize(
    ("indices", "left_out", "is_gathered"),
    [
        ([0, 1, 2, 3], None, False),
        ([0, 1, 2, 3], 1, True),
        ([0, 1, 3, 2], None, True),
        ([0, 1, 2], None, True),
        ([0, 1, 2, 3, 3], 4, True),
    ],
)
def test_rows_of_a_whole_batch_in_order_are_not_gathered(indices, left_out, is_gathered, batchwise):
    """Of four records; where rows or mask are not known when tracing, or padding may be dropped, they are."""
    replicas = distribution.Replicas(None, jit_compile=False, static=False)
    table = tf.constant([[0], [1], [2], [3]])

    def rows_of(places, mask):
        return replicas.rows({"x": table, "mask": table}, places, mask, batchwise)

    mask = tf.constant([place != left_out for place in range(len(indices))])
    places = tf.constant(indices, tf.int64)
    known = tf.function(
        lambda: rows_of(*map(tf.constant, (indices, mask.numpy()))), autograph=False
    )
    unknown = tf.function(rows_of, autograph=False)
    ways = {
        known.get_concrete_function(): ((), is_gathered),
        unknown.get_concrete_function(places, mask): ((places, mask), True),
    }
    for way, (arguments, gathers) in ways.items():
        kinds = {operation.type for operation in way.graph.get_operations()}
        assert ("GatherV2" in kinds) == gathers
        records, kept = way(*arguments)
        assert records.keys() == {"x"}
        found = tf.boolean_mask(records["x"][:, 0], kept).numpy().tolist()
        assert found == [place for at, place in enumerate(indices) if at != left_out]


@tf.function(autograph=False)
def test_a_full_batch_is_known_to_have_all_rows_in_order_and_is_in_the_steps_graph():
    """Guards tell records from other tensors by their graph."""
    replicas = distribution.Replicas(None, jit_compile=False, static=False)
    table = tf.constant([0, 1, 2, 3, 4])

    def step(carry):
        def check(carry, indices, mask):
            assert not distribution._are_all_in_order(indices, mask, [table, tf.zeros([6])])
            records, _ = replicas.rows({"x": table}, indices, mask, batchwise=True)
            assert records["x"].graph is tf.compat.v1.get_default_graph()
            assert records["x"].op.type == "Identity"
            return carry + 1

        return (FullBatchSampler(5).for_each_batch(None, check, carry),)

    tf.while_loop(lambda carry: carry < 2, step, (0,))


# ---------------------------------------------------------------------- two workers on loopback: one script

TO_THE_END = """
def with_a_ledger_each(epochs):
    with strategy.scope():
        model = Toy()
        ledger = dpvi.PrivacyLedger(f"{folder}/{index}.ledger")
        model.compile(sgd(1.0), delta=1e-5, jit_compile=False, ledger=ledger)
    before = model.privacy_ledger.num_releases
    after_epoch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, _: print("epoch", epoch + 1))
    found = {"error": None}
    try:
        model.fit(X, Y, batch_size=31, epochs=epochs, verbose=0, callbacks=[after_epoch])
    except RuntimeError as error:
        found = {"error": str(error), "cause": type(error.__context__).__name__}
    found.update(spent=model.privacy_ledger.num_releases - before, before=before, weights=weights(model).tolist())
    print(json.dumps(found))

index, folder, epochs = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
strategy = tf.distribute.MultiWorkerMirroredStrategy()
"""

WORKERS = """
path, everything = f"{folder}/books.ledger", sys.argv[4] == "everything"

def made(model=Toy, noise=1.0, clip=0.5, **settings):
    with strategy.scope():
        model = model()
        model.compile(sgd(noise, clip=clip), delta=1e-5, jit_compile=False, **settings)
    return model

def fitted(*arguments, epochs=1, **settings):
    model = made(*arguments, **settings)
    model.fit(X, Y, batch_size=31, epochs=epochs, verbose=0)
    return model

def refused(model, x=X, y=Y, **how):
    before = model.privacy_ledger.num_releases
    try:
        model.fit(x, y, verbose=0, **{"batch_size": 31, **how})
    except Exception as error:
        return [type(error).__name__, str(error), model.privacy_ledger.num_releases - before]

# A ledger of the first worker's own: the second one does not know of its releases.
ledger = dpvi.PrivacyLedger(path) if index == 0 else None
seeded = fitted(lambda: Toy(seed=3), ledger=ledger)
found = {"seeded": weights(seeded).tolist(), "releases": seeded.privacy_ledger.num_releases}
# Without a seed the workers agree on a key of the operating system's.
if everything:
    for name, randomness in ("unseeded", None), ("secure", "secure"):
        ends = [weights(fitted(randomness=randomness)).tolist() for _ in range(2)]
        found[name] = ends

# Batches or records of a worker's own: a record would be in a step twice, or move others between the workers' data.
dataset = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(200).batch(10)
once = {"num_records": 200, "steps_per_epoch": 20, "sampling": "each_record_once_per_epoch", "batch_size": None}
if everything:
    found["dataset"] = refused(made(physical_batch_size=10), dataset, None, **once)
found["other records"] = refused(made(physical_batch_size=10), X + index)

target = found["target"] = 1.2 * seeded.privacy_ledger.epsilon(1e-5)
second = fitted(noise=None, epsilon=target, ledger=ledger)
found["second"], found["weights"] = second.privacy_plan.noise_multiplier, weights(second).tolist()
found["epsilon"] = second.privacy_ledger.epsilon(1e-5)
found["exhausted"] = refused(made(noise=None, epsilon=target, ledger=ledger))

if everything:
    found["other clip"] = refused(made(noise=None, epsilon=5.0, clip=0.5 + index))
    found["other target"] = refused(made(noise=None, epsilon=5.0 + index))
    found["other seed"] = refused(made(lambda: Toy(seed=3 if index else None), noise=None, epsilon=5.0))
    moved = made(noise=None, epsilon=5.0)
    for variable in moved.trainable_variables:
        for part in strategy.experimental_local_results(variable):
            part.assign_add(tf.fill(part.shape, 1.0 * index))
    found["other weights"] = refused(moved)

    budget = dpvi.PrivacyLedger(budget_epsilon=0.8, budget_delta=1e-5) if index == 0 else None
    third = fitted(noise=None, epsilon=1.0, ledger=budget, epochs=2)
    found["third"], found["third weights"] = third.privacy_ledger.num_releases, weights(third).tolist()
print(json.dumps(found))
"""


@pytest.fixture(
    scope="module", params=["quick", pytest.param("everything", marks=pytest.mark.slow)]
)
def workers(request, tmp_path_factory):
    """What each process has found."""
    folder = tmp_path_factory.mktemp("workers")
    return ends_of_forks(TO_THE_END + WORKERS, folder, str(folder), "1", request.param)


def test_two_workers_on_loopback(workers, replicas):
    """MultiWorkerMirroredStrategy: both end with the same weights, those of one device, and one ledger is charged."""
    one, two = workers
    for name in ("seeded", "releases"):
        assert one[name] == two[name]
    assert one["releases"] == replicas["alone"]["releases"]
    np.testing.assert_allclose(one["seeded"], replicas["alone"]["weights"], rtol=1e-4, atol=1e-5)
    for name in {"unseeded", "secure"} & set(one):
        assert one[name] == two[name]
        assert np.abs(np.subtract(*one[name])).max() > 1e-4


def test_workers_with_batches_or_records_of_their_own_are_refused(workers):
    """A record would be in a step twice, or its presence would move others between the workers' data."""
    for found in workers:
        for name, words in {
            "dataset": "several workers",
            "other records": "differ between workers",
        }.items():
            if name == "other records" or name in found:
                kind, message, spent = found[name]
                assert (kind, spent) == ("ValueError", 0)
                assert words in message


def test_workers_with_books_of_their_own_add_one_noise(workers):
    """The first worker's ledger has releases that the other does not know: both take its noise multiplier, and its end.

    With a multiplier each, the two weights' difference would be the noise itself, and the sum known exactly.
    """
    one, two = workers
    for name in ("target", "second", "weights"):
        assert one[name] == two[name], name
    assert 0.98 * one["target"] < one["epsilon"] <= one["target"]
    # The other's books, which lack the seeded fit, would have asked for less noise.
    assert two["epsilon"] < 0.9 * two["target"]
    assert one["exhausted"][0] == "BudgetExhaustedError"
    assert two["exhausted"][0] == "RuntimeError"
    assert "Worker 0 has refused" in two["exhausted"][1]
    assert one["exhausted"][2] == two["exhausted"][2] == 0


def test_a_worker_that_refuses_says_its_own_reason_where_the_others_have_ended(monkeypatch):
    """The others may end as soon as they have heard of it: before the exchange has ended here."""

    def ended(own):
        raise RuntimeError("Another worker has ended.")

    def refusing():
        raise dpvi.privacy.BudgetExhaustedError("The own reason.")

    workers = distribution.Workers(tf.distribute.get_strategy())
    workers.several = True
    monkeypatch.setattr(workers, "_gathered", ended)
    with pytest.raises(dpvi.privacy.BudgetExhaustedError, match="The own reason"):
        workers.agree_on(refusing)
    with pytest.raises(RuntimeError, match="Another worker has ended"):
        workers.agree_on(lambda: 1)


@pytest.mark.parametrize(
    "workers", [pytest.param("everything", marks=pytest.mark.slow)], indirect=True
)
def test_workers_that_differ_are_refused_and_stop_together(workers):
    one, two = workers
    for name in ("third", "third weights"):
        assert one[name] == two[name], name
    for found in workers:
        for name in ("other clip", "other target", "other seed", "other weights"):
            assert found[name][0] == "ValueError", name
            assert "differ between workers" in found[name][1]
            assert found[name][2] == 0
    assert 0 < one["third"] < 14  # Both stop where the first worker's budget ends.


STREAMS = """
path = f"{folder}/{index}.npy"
np.save(path, X)

def fitted(x, stream):
    with strategy.scope():
        model = Toy(seed=3)
        model.compile(sgd(1.0), delta=1e-5, jit_compile=False)
    model.fit(x, Y, batch_size=31, epochs=1, verbose=0, stream=stream)
    return weights(model).tolist(), model.num_releases

mapped = np.load(path, mmap_mode="r")
found = {"streamed": fitted(mapped, True), "in memory": fitted(X, False)}
np.save(f"{folder}/{index} other.npy", X + index)
try:
    fitted(np.load(f"{folder}/{index} other.npy", mmap_mode="r"), True)
except ValueError as error:
    found["other records"] = str(error)
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_workers_stream_files_of_their_own_disks(tmp_path):
    """The same sample, noise and end as in memory; files that differ are refused."""
    one, two = ends_of_forks(TO_THE_END + STREAMS, tmp_path, str(tmp_path), "1")
    assert one["streamed"] == two["streamed"]
    assert one["streamed"][1] == one["in memory"][1] > 0
    np.testing.assert_allclose(one["streamed"][0], one["in memory"][0], rtol=1e-4, atol=1e-5)
    for found in (one, two):
        assert "differ between workers" in found["other records"]


SHARDS = """
# Unit vectors, so that each change of the weights says which records took part: worker 0 has 14 of them, worker 1 has 26,
# and no record has the last 60, whose changes are noise.
steps, noise = 60, 0.05
shards = np.split(np.eye(100, dtype="float32")[:40], [14])
own = shards[index]

def changes(x, stream, seed=3):
    with strategy.scope():
        model = Indicator(100, seed=seed)
        optimizer = sgd(noise, clip=1.0, rate=1.0)
        model.compile(optimizer, delta=1e-5, jit_compile=False, steps_per_execution=1)
    ends = [weights(model)]
    after = keras.callbacks.LambdaCallback(on_train_batch_end=lambda *_: ends.append(weights(model)))
    model.fit(x, batch_size=10, epochs=1, steps_per_epoch=steps, verbose=0, stream=stream, callbacks=[after],
        sampling="poisson_of_shards")
    return np.diff(ends, axis=0), model

def refused(x=own, settings=None, **how):
    with strategy.scope():
        model = Indicator(100)
        model.compile(sgd(noise), delta=1e-5, **(settings or {}))
    try:
        model.fit(x, batch_size=10, verbose=0, **{"sampling": "poisson_of_shards", **how})
    except Exception as error:
        return [type(error).__name__, str(error), model.privacy_ledger.num_releases]

np.save(f"{folder}/{index}.npy", own)
moved, model = changes(own, False)
found = {"changes": moved.tolist(), "plan": model.privacy_plan.to_json(), "releases": model.num_releases}
streamed = changes(np.load(f"{folder}/{index}.npy", mmap_mode="r"), True)[0]
found["streamed"] = float(np.abs(streamed - moved).max())
found["unseeded"] = float(np.abs(changes(own, False, None)[0] - changes(own, False, None)[0]).max())
found["secure"] = refused(settings={"randomness": "secure"})
found["persons"] = refused(unit_ids=np.arange(len(own)), max_rows_per_unit=1)
found["bad"] = refused(np.where(index == 1, np.nan, own))
found["width"] = refused(own[:, : 100 - index])
found["dtype"] = refused(own.astype("int32") if index else own)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return ends_of_forks(TO_THE_END + SHARDS, folder, str(folder), "1")


@pytest.mark.slow
def test_workers_that_read_their_own_shards_release_the_sum_of_their_samples(shards):
    """C1, C3, C4: replayed. Of each shard a Poisson sample of its own at the one rate, summed, and one noise."""
    one, two = shards
    assert (one["changes"], one["plan"]) == (two["changes"], two["plan"])
    assert one["plan"]["num_records"] == 40
    assert one["plan"]["sampling"]["probability"] == 0.25
    assert one["releases"] == two["releases"] == 60
    # The public denominator is 10; plain descent at rate 1 adds minus the mean of minus the records.
    sums = 10.0 * np.array(one["changes"])
    part = np.round(sums[:, :40])
    key = tf.constant(_random.new_key(3))
    for step in range(60):
        sampling = _random.keys_of_step(key, tf.constant(step, tf.int64), 0)[0]
        for place, num in ((0, 14), (1, 26)):
            drawn = rows_of(PoissonSampler(num, 0.25), _random.fold_in(sampling, place))
            expected = np.isin(np.arange(num), drawn)
            assert (part[step, 14 * place : 14 * place + num] == expected).all()
    # Without a key of its own, the second worker would draw the first one's rows.
    assert (part[:, :14] != part[:, 14:28]).any(axis=1).mean() > 0.9
    low, high = scipy.stats.binom(60 * 40, 0.25).ppf([1e-7, 1 - 1e-7])
    assert low < part.sum() < high
    left = np.concatenate([sums[:, 40:], sums[:, :40] - part], axis=None) / 0.05
    low, high = scipy.stats.chi2(left.size).ppf([1e-7, 1 - 1e-7])
    assert low < (left**2).sum() < high


def rows_of(sampler, key):
    """The indices that a sampler draws."""
    size = [sampler.physical_batch_size]
    drawn, last, number = [], -1, 0
    while last < sampler.num_available - 1:
        gaps = poisson_gaps(key, size, sampler.probability, sampler.num_available, number)
        indices = last + np.cumsum(gaps.numpy())
        drawn += [row for row in indices if row < sampler.num_available]
        last, number = indices[-1], number + 1
    return drawn


@pytest.mark.slow
def test_streamed_shards_are_drawn_as_those_in_memory(shards):
    for found in shards:
        assert found["streamed"] < 1e-6
        assert found["unseeded"] > 0.05


@pytest.mark.slow
def test_shards_are_refused_on_all_workers_where_one_cannot_go_on(shards):
    """And before anything is spent."""
    one, two = shards
    for found in shards:
        assert [found[name][2] for name in ("secure", "persons", "bad", "width", "dtype")] == [
            0
        ] * 5
        assert "one tape for all" in found["secure"][1]
        assert "cannot be grouped by person" in found["persons"][1]
        assert "differ between workers" in found["dtype"][1]
    assert "values that are NaN" in two["bad"][1]
    assert "Worker 1 has refused this fit" in one["bad"][1]
    assert "differ between workers" in one["width"][1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_dies(tmp_path, victim):
    """The other stops with an error that says what is spent; both ledgers hold what was begun; all goes on from them."""
    script = TO_THE_END + "with_a_ledger_each(epochs)"
    children, folder = start_workers(script, tmp_path, str(tmp_path), "1000000"), tmp_path
    steps = 7
    lost = children[victim]
    for line in lost.stdout:
        if line == "epoch 5\n":
            break
    lost.kill()
    told = [
        line for line in lost.communicate(timeout=100)[0].splitlines() if line.startswith("epoch")
    ]
    out, err = children[1 - victim].communicate(timeout=200)
    assert children[1 - victim].returncode == 0, err[-3000:]
    *lines, last = out.splitlines()
    survivor = json.loads(last)
    assert survivor["error"].startswith("Another worker has ended or cannot be reached")
    assert f"has {survivor['spent']} releases" in survivor["error"]
    assert survivor["cause"].endswith("Error")
    finished = sum(line.startswith("epoch") for line in lines)
    for number, epochs in ((1 - victim, finished), (victim, 5 + len(told))):
        ledger = dpvi.PrivacyLedger(folder / f"{number}.ledger", read_only=True)
        assert epochs * steps <= ledger.num_releases
        assert ledger.num_releases - ledger.unconfirmed_steps <= (epochs + 1) * steps
    assert np.isfinite(survivor["weights"]).all()
    again = ends_of(start_workers(script, tmp_path, str(folder), "1"))
    assert [one["error"] for one in again] == [None, None]
    assert [one["spent"] for one in again] == [steps, steps]
    assert again[1 - victim]["before"] == survivor["spent"]
    assert again[0]["weights"] == again[1]["weights"]
