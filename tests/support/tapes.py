"""Secure steps in NumPy: words from AES of single blocks, sample and noise from the words, after the documentation."""

from __future__ import annotations

import math

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from tfp_dpvi.sampling import PoissonSampler

KEY = bytes(range(100, 132))


def row(step, num_words, stream=0, key=KEY):
    """The words of a step: whole blocks, so an even number, at the counters that follow those of earlier steps."""
    num_blocks = math.ceil(num_words / 2)
    counters = range(step * num_blocks, (step + 1) * num_blocks)
    counters = b"".join(((stream << 64) + counter).to_bytes(16, "big") for counter in counters)
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(counters), "<u8")


def uniforms(words):
    return (words >> np.uint64(12)).astype(np.float64) * 2.0**-52


def poisson_sample(words, num, probability):
    """Of words without the two of the spare key."""
    skipped = np.floor(np.log1p(-uniforms(words)) / math.log1p(-probability))
    last = np.cumsum(skipped + 1.0) - 1.0
    assert last[-1] >= num, "the words do not suffice"
    return last[last < num].astype(int)


def normals(words):
    """Box and Muller's, an even number of them."""
    first, second = uniforms(words).reshape(2, -1)
    radius, angle = np.sqrt(-2.0 * np.log1p(-first)), 2.0 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])


def releases_of_unit_records(
    steps, num, probability, deviation, *, first=0, streamed=False, key=KEY
):
    """Minus the noisy sums of steps, whose records' gradients are minus the `num` unit vectors: [steps, num]."""
    words = PoissonSampler(num, probability).num_words
    sizes = [2 if streamed else words, 2, 2, num + num % 2]
    sums = np.zeros([steps, num])
    for step in range(steps):
        sampling, _, _, noise = np.split(
            row(first + step, sum(sizes), key=key), np.cumsum(sizes)[:-1]
        )
        if streamed:
            sampling = row(first + step, words + 4, stream=1, key=key)[:words]
        sums[step, poisson_sample(sampling[:-2], num, probability)] += 1.0
        sums[step] -= deviation * normals(noise)[:num]
    return sums
