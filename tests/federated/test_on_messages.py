"""Privacy on messages: replay on neighbours, noise that does not count on other hospitals', and a refusal where it would drown the signal."""

import math

import numpy as np
import pytest
import scipy.stats

import tfp_dpvi as dpvi
from tfp_dpvi import _keystream, _random
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.federated import Factor, MessageHospital, Study, Task, on_messages
from tfp_dpvi.federated.on_messages import MessageRelease, assign, divide, shard_size
from tfp_dpvi.federated.refiner import Refiner
from tfp_dpvi.privacy import Sensitivity

tfd = tfp.distributions
CLIP = 5.0


def make_study(**settings):
    prior = tfd.JointDistributionNamed({"w": tfd.Sample(tfd.Normal(0.0, 2.0), 2)})
    silent = dpvi.optimizers.DPKerasAdamOptimizer(
        l2_norm_clip=math.inf, noise_multiplier=0.0, learning_rate=0.1
    )
    settings = {
        "num_shards": 100,
        "num_hospitals": 10,
        "local_steps": 4,
        "message_clip": CLIP,
        **settings,
    }
    return Study(
        prior,
        lambda p, x: tfd.Bernoulli(logits=tf.linalg.matvec(x, p["w"])),
        silent,
        privacy="messages",
        **settings,
    )


@pytest.fixture(scope="module")
def made():
    study = make_study(num_shards=2, num_hospitals=10**4)
    return study, Refiner(study)


def records(num=20, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, 2)).astype("float32")
    return x, (x[:, 0] > 0).astype("int32")


def task_of(study):
    prior = study.terms.prior
    return Task(study.terms.identity, "a", "r", 0, prior, prior)


def test_a_plan_of_one_message_a_round(made):
    """C3: A = D = 2C, full batches, a release for each round; epsilon is that of the hospital's own noise."""
    study, refiner = made
    one = MessageHospital(study, *records(), name="a", epsilon=1.0, rounds=3, refiner=refiner)
    assert (one._plan.sensitivity, one._plan.num_releases) == (Sensitivity(2.0, 2.0), 3)
    assert one._plan.epsilon(1e-5) <= 1.0
    one.refine(task_of(study))
    assert one.ledger.num_releases == 1
    assert one.spent >= one.ledger.epsilon(1e-5)
    # A closed form that is not this code: delta of one Gaussian release of sensitivity 2C.
    mu = 2.0 * CLIP / one._plan.deviation * math.sqrt(3.0)
    delta = scipy.stats.norm.cdf(mu / 2 - 1 / mu) - math.e * scipy.stats.norm.cdf(-mu / 2 - 1 / mu)
    assert 0.95e-5 <= delta <= 1.0e-5


def test_neighbours_on_messages(made):
    """C3: a record that is removed, or replaced, moves the sum of a message by at most 2C; the others stay where they are."""
    study, refiner = made
    x, y = records()
    moved = []

    def sums(x, y, keep):
        """The message before noise, with the draws of a seed: equal for equal arguments."""
        refiner._num_steps = 0
        one = MessageHospital(study, x, y, name="a", epsilon=1.0, rounds=1, refiner=refiner, seed=3)
        size = shard_size(len(x), 2)
        shards = np.arange(len(x)) % 2  # As they fell; the same for neighbours.
        parts = divide(x, y, np.where(keep, shards, -1), 2, size)
        release = one._release
        release.parts = [refiner.data(p["x"], p["y"], size, p["weight"]).tensors for p in parts]
        return release.clipped_sum(task_of(study))

    everyone = np.ones(len(x), bool)
    full = sums(x, y, everyone)
    for at in (0, 7):
        without, other = everyone.copy(), x.copy()
        without[at] = False
        other[at] = [-9.0, 9.0]
        for neighbour in (sums(x, y, without), sums(other, 1 - y, everyone)):
            moved.append((neighbour / full).norm)
    assert max(moved) <= 2.0 * CLIP * (1 + 1e-6)
    assert min(moved) > 1e-3


def test_no_record_decides_whether_there_is_an_answer():
    """C8: a fit whose gradients no clip bounds runs away; its shard then changes nothing, and the other shards stay as they are."""
    silent = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=math.inf, noise_multiplier=0.0, learning_rate=0.5
    )
    prior = tfd.JointDistributionNamed({"w": tfd.Normal(0.0, 2.0)})
    study = Study(
        prior, lambda p: tfd.Normal(p["w"], 1.0), silent, privacy="messages",
        num_shards=2, num_hospitals=10**4, local_steps=4, message_clip=CLIP,
    )  # fmt: skip
    x, refiner, others = np.zeros(20, "float32"), Refiner(study), []
    for value in (0.0, 1e12, 3e38):  # Also where the squares of float32 overflow.
        x[0] = value
        one = MessageHospital(study, x, name="a", epsilon=1.0, rounds=1, refiner=refiner, seed=1)
        assert one._release.clipped_sum(task_of(study)).norm <= 2.0 * CLIP
        assert one.refine(task_of(study)).change is not None
        refiner._num_steps, prior = 0, study.terms.prior
        tensors = refiner.data(**other_shard(x), num_records=20).tensors
        others.append(refiner.refine(prior, prior, one._release.mechanism, tensors, 1).shift)
    np.testing.assert_array_equal(others[1:], others[:1] * 2)


def other_shard(x):
    """Returns the shard without the first record, which pads it with weight 0."""
    return divide(x, None, np.arange(20) % 2, 2, 20)[1]


def test_the_bound_of_a_message_is_reached():
    """Two clipped changes of opposite directions lie 2C apart: a plan for C would be half of the truth."""
    up = Factor(np.array([9.0, 0.0]), np.zeros(2))
    clipped = [change ** (CLIP / change.norm) for change in (up, up**-1.0)]
    assert (clipped[0] / clipped[1]).norm == pytest.approx(2.0 * CLIP)


class CountsOnOthers(MessageRelease):
    """A mutation: noise divided by the square root of M, as if a server saw the sum alone."""

    def change(self, task):
        total = self.clipped_sum(task)
        return total * (super().change(task) / total) ** (1.0 / math.sqrt(10))


def noise_of(release, made, monkeypatch, shape=(500,)):
    """Returns the stated deviation and the noise of one message, on shifts and on precisions of a given shape."""
    (study, refiner), total = made, Factor(np.ones(shape[0]), np.zeros(shape))
    monkeypatch.setattr(release, "clipped_sum", lambda self, task: total)
    monkeypatch.setattr(on_messages, "MessageRelease", release)
    one = MessageHospital(study, *records(), name="a", epsilon=1.0, rounds=1, refiner=refiner)
    message = one._release.change(task_of(study))
    return one._plan.deviation, message.shift - 1.0, message.precision


def test_the_noise_of_a_message_is_all_of_what_the_plan_says(made, monkeypatch):
    """Each part's variance within exact chi-square quantiles: false alarms 1e-9 x 2."""
    deviation, *noise = noise_of(MessageRelease, made, monkeypatch)
    low, high = scipy.stats.chi2.ppf([5e-10, 1 - 5e-10], 500) / 500
    ratios = np.array([np.mean(part**2) / deviation**2 for part in noise])
    assert np.all((low <= ratios) & (ratios <= high)), ratios
    _, *broken = noise_of(CountsOnOthers, made, monkeypatch)
    assert all(np.mean(part**2) / deviation**2 < low for part in broken), "the mutation is caught"


def test_noise_is_fresh_where_a_message_is_made_again_from_the_same_state(made, monkeypatch):
    """C10: a forked copy of a hospital has the counters of its twin, and noise of its own."""
    study, refiner = made
    monkeypatch.setattr(
        MessageRelease, "clipped_sum", lambda self, task: Factor(np.ones(2), np.zeros(2))
    )
    one, shifts = (
        MessageHospital(study, *records(), name="a", epsilon=1.0, rounds=1, refiner=refiner),
        [],
    )
    for _ in range(2):
        one._release._messages = 0
        shifts.append(one._release.change(task_of(study)).shift)
    assert np.all(shifts[0] != shifts[1])


def test_a_matrix_gets_symmetric_noise_of_its_upper_half(made, monkeypatch):
    """Of 528 numbers, neighbours are uncorrelated within 7 standard errors; variances above a quantile of 1e-9."""
    deviation, _, noise = noise_of(MessageRelease, made, monkeypatch, shape=(32, 32))
    np.testing.assert_array_equal(noise, noise.T)
    half = noise[np.triu_indices(32)] / deviation
    assert abs(np.mean(half[1:] * half[:-1])) <= 7.0 / np.sqrt(527)
    for part in (half, np.diag(noise) / deviation):
        assert np.mean(part**2) >= scipy.stats.chi2.ppf(1e-9, len(part)) / len(part)


def test_assignment_to_shards_is_independent_for_each_record():
    """Sizes of two shards of 10 records vary as a binomial: all 5 to 5 has a probability of 0.246^200 < 1e-100."""
    sizes = [int(assign(10, 2).sum()) for _ in range(200)]
    assert len(set(sizes)) > 1, "equal parts: one record more would move others"
    x, y = records(10)
    parts = divide(x, y, np.array([0, 1] * 5), 3, 6)
    assert [part["weight"].sum() for part in parts] == [5, 5, 0]
    np.testing.assert_array_equal(parts[1]["x"][:5], x[1::2])
    assert shard_size(1000, 10) == 188


def test_noise_that_drowns_the_signal_is_refused_with_the_figures(made):
    _, refiner = made
    hopeless = make_study(num_shards=1)
    with pytest.raises(
        ValueError, match=r"noise has length .* C, and 1 shards each make a signal of at most 10 C"
    ):
        MessageHospital(hopeless, *records(), name="a", epsilon=1.0, rounds=10, refiner=refiner)


def test_identifiers_of_persons_are_refused(made):
    """Shards are of single rows: identifiers that are not used would promise what is not kept."""
    study, refiner = made
    given = {"name": "a", "epsilon": 1.0, "refiner": refiner, "unit_ids": np.zeros(20, int)}
    with pytest.raises(ValueError, match="the study protects single rows"):
        MessageHospital(study, *records(), **given)


def test_local_steps_must_be_silent():
    study = make_study()
    study.optimizer = dpvi.optimizers.DPKerasAdamOptimizer(l2_norm_clip=1.0)
    with pytest.raises(ValueError, match=r"math.inf and noise multiplier 0"):
        MessageHospital(study, *records(), name="a", epsilon=1.0)


def test_shards_are_the_operating_systems(monkeypatch):
    """C10: one word for each record; with a seed they repeat."""
    words = np.arange(10, dtype=np.uint64) ** np.uint64(17)
    monkeypatch.setattr(_random, "entropy", lambda num: words.tobytes()[:num])
    np.testing.assert_array_equal(assign(10, 3), words % np.uint64(3))
    np.testing.assert_array_equal(assign(10, 3, seed=4), assign(10, 3, seed=4))


def test_local_steps_behind_a_message_can_be_secure_too(made, monkeypatch):
    """C10: the same words make the same sum, and others another one."""
    study, refiner = made
    monkeypatch.setattr(_random, "entropy", bytes)  # The same shards.
    settings = {"name": "a", "epsilon": 1.0, "rounds": 1, "refiner": refiner}
    one = MessageHospital(study, *records(), randomness="secure", **settings)
    assert one._plan.randomness == "secure"
    sums = []
    for byte in (b"a", b"a", b"b"):
        refiner._num_steps = 0
        monkeypatch.setattr(_keystream, "new_key", lambda byte=byte: 32 * byte)
        sums.append(one._release.clipped_sum(task_of(study)).shift)
    np.testing.assert_array_equal(sums[0], sums[1])
    assert np.all(sums[0] != sums[2])
