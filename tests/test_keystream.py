"""Words of AES-256 in counter mode (C10): the standard's vectors, no word twice, samples and noise from them."""

from __future__ import annotations

import builtins
import itertools

import numpy as np
import pytest
import scipy.stats
from support import statistics, tapes

from tfp_dpvi import _keystream, _random
from tfp_dpvi._keystream import Keystream, Tapes
from tfp_dpvi._tf import tf
from tfp_dpvi.sampling import PoissonSampler
from tfp_dpvi.sampling.fixed_size import FixedSizeSampler, distinct_indices
from tfp_dpvi.sampling.poisson import poisson_gaps


@pytest.mark.smoke
def test_the_vectors_of_the_standard():
    """NIST SP 800-38A, F.5.5, CTR-AES256.Encrypt: the keystream is the exclusive or of both texts."""
    key = "603deb1015ca71be2b73aef0857d77811f352c073b6108d72d9810a30914dff4"
    counter = "f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"
    plain = (
        "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
        "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
    )
    encrypted = (
        "601ec313775789a5b7a7f504bbf3d228f443e3ca4d62b59aca84e990cacaf5c5"
        "2b0930daa23de94ce87017ba2d84988ddfc9c58db67aada613c2dd08457941a6"
    )
    words = np.empty(8, np.uint64)
    # In two parts, which follow one another.
    _keystream.fill(bytes.fromhex(key), int(counter, 16), [words[:2], words[2:]])
    expected = int(plain, 16) ^ int(encrypted, 16)
    assert int.from_bytes(words.tobytes(), "big") == expected


def test_rows_are_those_of_single_blocks_and_share_none():
    """Whatever tape a step is in; in two streams of a key. Rows longer than a piece of the cipher's input too."""
    stream, long = Keystream(tapes.KEY, 5), Keystream(tapes.KEY, 9000)
    assert stream.num_words == 6
    for num, first in itertools.product((1, 3, 4), (0, 1, 7)):
        tape = stream.rows(first, num)
        for step in range(first, first + num):
            np.testing.assert_array_equal(tape[step % num], tapes.row(step, 5))
    np.testing.assert_array_equal(long.rows(2, 2)[0], tapes.row(2, 9000))
    other = stream.beside(9)
    np.testing.assert_array_equal(other.rows(3, 1)[0], tapes.row(3, 9, stream=1))
    both = np.concatenate([stream.rows(0, 500).ravel(), other.rows(0, 500).ravel()])
    assert len(np.unique(both)) == len(both)


def test_tapes_have_each_step_once_whatever_calls_ask_for():
    """Ragged calls, single steps and many; one static shape, no more bytes than stated, and no thread left."""
    made = Tapes(Keystream(tapes.KEY, 8), 4)
    step = 0
    for steps in (4, 4, 3, 9, 1, 1, 1, 1, 1, 4):
        for few, tape in made.calls(step, steps):
            assert made.spec.is_compatible_with(tape)
            for _ in range(few):
                np.testing.assert_array_equal(tape.numpy()[step % 4], tapes.row(step, 8))
                step += 1
    assert step == 29
    made.close()
    made.close()
    assert Tapes(Keystream(tapes.KEY, 2**20), 50).spec.shape.as_list() == [4, 2**20]
    assert Tapes(Keystream(tapes.KEY, 2**24), 50).spec.shape.as_list() == [1, 2**24]


def test_without_the_package_one_line_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def without(name, *args):
        if name.startswith("cryptography"):
            raise ImportError(name)
        return imported(name, *args)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"^.*'secure'.*pip install 'tfp-dpvi\[secure\]'\.$"):
        Keystream(tapes.KEY, 2)


# ---------------------------------------------------------------------- samples


def samples(sampler, keys):
    """How often each record is in the sample of each key, int64 [number of keys, N]."""

    def visit(carry, indices, mask):
        shown = tf.where(mask, indices, sampler.num_available)
        return tf.tensor_scatter_nd_add(carry, shown[:, None], tf.ones_like(shown))

    def of_key(key):
        zeros = tf.zeros([sampler.num_available + 1], tf.int64)
        return sampler.for_each_batch(key, visit, zeros)[:-1]

    @tf.function(autograph=False)
    def of_keys(keys):
        return tf.map_fn(of_key, keys, fn_output_signature=tf.int64, parallel_iterations=1)

    return of_keys(keys).numpy()


def test_poisson_inclusions_have_their_frequencies():
    """Sizes, and each record's count, over 3,000 steps. False alarms: 2e-9 (2 p-values)."""
    sampler = PoissonSampler(40, 0.2)
    words = Keystream(_keystream.new_key(), sampler.num_words).rows(0, 3000)
    found = samples(sampler, words[:, : sampler.num_words])
    assert found.max() == 1
    statistics.binomial_sizes(found.sum(axis=1), 40, 0.2, "sizes of samples")
    counts, expected = found.sum(axis=0), 3000 * 0.2
    score = ((counts - expected) ** 2).sum() / (expected * 0.8)
    law = scipy.stats.chi2(40)
    statistics.plausible(2 * min(law.sf(score), law.cdf(score)), "records' counts")


def test_a_sample_beyond_the_tape_goes_on_with_the_spare_key():
    """Words that include every record exhaust the tape; then records are drawn by the key in its last two words.

    Without a fallback the same words would be read again, and all records included.
    """
    sampler = PoissonSampler(400, 0.05, 16)
    room = (sampler.num_words - 2) // 16
    tape = np.zeros(sampler.num_words, np.uint64)
    tape[-2:] = 12, 34
    (found,) = samples(sampler, tape[None])
    expected, last, number = np.zeros(401), room * 16 - 1, room
    expected[: room * 16] = 1
    while last < 399:
        gaps = poisson_gaps(tf.constant([12, 34], tf.int64), [16], 0.05, 400, number)
        indices = last + np.cumsum(gaps.numpy())
        expected[indices[indices < 400]] = 1
        last, number = indices[-1], number + 1
    np.testing.assert_array_equal(found, expected[:400])
    assert 0 < 400 - found.sum() < 400


@pytest.mark.parametrize(("num", "probability"), [(50, 0.3), (10_000, 0.02), (10**9, 1e-6)])
def test_a_tape_is_as_long_as_samples_are_but_for_1e_15(num, probability):
    """By the exact binomial tail, for the default physical batch and a small one."""
    for sampler in (PoissonSampler(num, probability), PoissonSampler(num, probability, 7)):
        # A sample of n records takes n + 1 gaps, unless it is all of them.
        most = sampler.num_words - 2 - 1
        assert most >= num or scipy.stats.binom.sf(most, num, probability) < 1e-15


def test_fixed_size_samples_are_the_words_remainders_or_largest():
    """Against NumPy; a tape with too few distinct integers is followed by draws of the spare key."""
    generator = np.random.default_rng(1)
    for num, count in ((1000, 20), (30, 20)):
        sampler = FixedSizeSampler(num, count)
        tape = generator.integers(0, 2**64, sampler.num_words, np.uint64)
        if 4 * count >= num:
            expected = np.argsort(-tapes.uniforms(tape[:-2]))[:count]
        else:
            values = ((tape[:-2] >> np.uint64(1)) % np.uint64(num)).astype(int)
            expected = list(dict.fromkeys(values.tolist()))[:count]
        np.testing.assert_array_equal(distinct_indices(tf.constant(tape), num, count), expected)
    tape = tf.fill([FixedSizeSampler(1000, 20).num_words], tf.constant(77, tf.uint64))
    assert len(np.unique(distinct_indices(tape, 1000, 20))) == 20


# ---------------------------------------------------------------------- noise


@pytest.mark.parametrize("num", [2000, 100_001])
def test_noise_of_a_tape_is_normal_and_on_the_grid(num):
    """Deviation 2, of few coordinates and of many; halves are uncorrelated. False alarms: 6e-9 (6 p-values)."""
    tape = Keystream(_keystream.new_key(), num).rows(5, 1)[0]
    (noisy,) = _random.add_noise(tf.constant(tape), [tf.zeros([num], tf.float64)], [2.0])
    noise = noisy.numpy() / 2.0
    statistics.standard_normal(noise, "noise")
    statistics.uncorrelated(noise[: num // 2], noise[-(num // 2) :], "halves of the noise")
    statistics.standard_deviation(noise, 1.0, "noise", within=0.02 if num > 10_000 else 0.15)
    np.testing.assert_array_equal(noise * 2**12, np.round(noise * 2**12))
    short = tf.constant(tape[: num - num % 2 - 2])
    with pytest.raises(ValueError, match="too short"):  # Instead of words used twice.
        _random.add_noise(short, [tf.zeros([num])], [2.0])


def test_many_coordinates_take_the_words_in_order():
    """Above 2^14 coordinates, as below: pair i of the noise is of words i and i + half."""
    num = 2**14
    tape = np.random.default_rng(2).integers(0, 2**64, num, np.uint64)
    other = tape.copy()
    other[[5, num // 2 + 9]] ^= np.uint64(2**60)
    noise, moved = (
        _random.add_noise(tf.constant(words), [tf.zeros([num], tf.float64)], [1.0])[0].numpy()
        for words in (tape, other)
    )
    changed = np.flatnonzero(noise != moved)
    np.testing.assert_array_equal(changed, [5, 9, 5 + num // 2, 9 + num // 2])


def test_noise_of_single_releases_is_the_operating_systems(monkeypatch):
    """Without a seed: as many words as coordinates, made even, none of them expanded from a key."""
    asked = []
    monkeypatch.setattr(_random, "entropy", lambda num: asked.append(num) or bytes(range(num)))
    tape = _random.noise_key(5)
    assert asked == [48]
    assert tape.numpy().tobytes() == bytes(range(48))
    assert not _random.is_tape(_random.noise_key(5, seed=1))
