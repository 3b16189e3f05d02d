"""What a sampler must do to be accounted for as Poisson (contract C4)."""

import dataclasses
import math

import numpy as np
import scipy.stats

from support import statistics
from tfp_dpvi._tf import tf


@dataclasses.dataclass(frozen=True)
class Draws:
    """Batches of a sampler: index and number of the batch of each visited record, and visits of each batch."""

    index: np.ndarray
    batch: np.ndarray
    visits: np.ndarray
    num: int

    @property
    def sizes(self):
        return np.bincount(self.batch, minlength=self.num)


def capacity(sampler, probability):
    """Visits that a batch exceeds with a probability of less than 1e-15."""
    mean = sampler.num_available * probability
    most = min(sampler.num_available, mean + 10 * math.sqrt(mean) + 40)
    return math.ceil(most / sampler.physical_batch_size) + 1


def drawer(sampler, max_visits, *, jit_compile=True):
    """A compiled function (keys [K, 2]) -> (indices [K, cap], -1 where masked; visits [K])."""
    size = sampler.physical_batch_size

    def visit(carry, indices, mask):
        seen, visits = carry
        at = size * tf.minimum(visits, max_visits - 1) + tf.range(size)
        return tf.tensor_scatter_nd_update(
            seen, at[:, None], tf.where(mask, indices, -1)
        ), visits + 1

    def one(key):
        return sampler.for_each_batch(
            key, visit, (tf.fill([max_visits * size], tf.constant(-1, tf.int64)), tf.constant(0))
        )

    def many(keys):
        signature = (tf.TensorSpec([max_visits * size], tf.int64), tf.TensorSpec([], tf.int32))
        return tf.map_fn(one, keys, fn_output_signature=signature)

    return tf.function(many, jit_compile=jit_compile, autograph=False)


def make_keys(num):
    return tf.random.stateless_uniform(
        [num, 2], statistics.fresh_key(), minval=None, maxval=None, dtype=tf.int64
    )


def draw(sampler, probability, num, *, jit_compile=True, keys=None):
    max_visits = capacity(sampler, probability)
    keys = make_keys(num) if keys is None else keys
    seen, visits = drawer(sampler, max_visits, jit_compile=jit_compile)(keys)
    seen, visits = seen.numpy(), visits.numpy()
    assert visits.max() <= max_visits, "a batch is longer than any Poisson batch"
    batch, place = np.nonzero(seen >= 0)
    return Draws(seen[batch, place], batch, visits, num)


def check_poisson(sampler, probability, num, *, jit_compile=True):
    """C4: batches of a sampler are independent Bernoulli(q) inclusions of N records: exact sizes, rates and pairs.

    Looks at fewer than 15 p-values.
    """
    count = sampler.num_available
    draws = draw(sampler, probability, num, jit_compile=jit_compile)
    assert draws.index.min() >= 0
    assert draws.index.max() < count, "a record beyond the last"
    order = np.lexsort((draws.index, draws.batch))
    index, batch = draws.index[order], draws.batch[order]
    assert not np.any((np.diff(index) == 0) & (np.diff(batch) == 0)), "a record twice in one batch"
    statistics.binomial_sizes(draws.sizes, count, probability, "batch sizes against the Binomial")

    # Rates: all records alone if there are few, else in equal bins, and the two ends by themselves.
    bins = min(count, 1000)
    edges = (np.arange(bins + 1) * count) // bins
    widths = np.diff(edges)
    included = np.histogram(index, edges)[0]
    variance = num * widths * probability * (1 - probability)
    score = np.sum((included - num * widths * probability) ** 2 / variance)
    if variance.min() > 20:
        statistics.plausible(scipy.stats.chi2.sf(score, bins), "inclusion rates")
    span = max(1, math.ceil(20 / (num * probability)))
    for name, inside in [
        ("first", index < span),
        ("last", index >= count - span),
        ("second", (index >= span) & (index < 2 * span)),
    ]:
        p_value = scipy.stats.binomtest(int(inside.sum()), num * span, probability).pvalue
        statistics.plausible(p_value, f"inclusion rate of the {name} {span} records")

    # Pairs: neighbours at distance 1 to 3 occur together at rate q^2, the halves' sizes are uncorrelated.
    for lag in (1, 2, 3):
        together = 0
        for ahead in range(1, lag + 1):
            same = batch[ahead:] == batch[:-ahead]
            together += np.sum(same & (index[ahead:] - index[:-ahead] == lag))
        pairs, q = count - lag, probability
        mean = num * pairs * q**2
        overlaps = 2 * max(0, pairs - lag)
        variance = num * (pairs * q**2 * (1 - q**2) + overlaps * (q**3 - q**4))
        if mean > 1000:
            statistics.standard_score(
                (together - mean) / math.sqrt(variance), f"pairs of records {lag} apart"
            )
        else:
            low, high = (
                scipy.stats.poisson.cdf(together, mean),
                scipy.stats.poisson.sf(together - 1, mean),
            )
            statistics.plausible(2 * min(low, high), f"pairs of records {lag} apart")
    first_half = np.bincount(batch[index < count // 2], minlength=num) - count // 2 * probability
    second_half = (
        np.bincount(batch[index >= count // 2], minlength=num) - (count - count // 2) * probability
    )
    statistics.uncorrelated(first_half, second_half, "sizes of the halves of a batch")
    statistics.uncorrelated(
        draws.sizes[1:] - count * q, draws.sizes[:-1] - count * q, "sizes of consecutive batches"
    )
    return draws
