"""What rounding and odd draws do to clips and sums of clipped gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import tfp_dpvi as dpvi
from tfp_dpvi.calibrated.centred import CentredCurvature
from tfp_dpvi.ghost.contributions import Direct, Lookup, Outer
from tfp_dpvi.gradients import Clip, clipped_sum
from tfp_dpvi.gradients.base import PerExample
from tfp_dpvi.gradients.reparameterized import through_draws
from tfp_dpvi.gradients.vmap import sum_of_squares

TF32 = 2.0**-11
"""The most that rounding to TensorFloat-32's ten bits changes a factor by, relatively."""


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "normalized"])
def test_the_clip_leaves_room_for_factors_that_a_gpu_rounds(monkeypatch, clipping):
    """Both factors of a product are rounded up as far as they can be; the contribution stays within the clip."""
    squares = [tf.constant([1e-6, 1.0, 30.0, 1e6]), tf.constant([1e-6, 2.0, 5.0, 1e3])]

    def longest():
        factors = Clip(0.7, clipping).factors(squares)
        scaled = sum(
            f.numpy().astype("float64") ** 2 * s.numpy()
            for f, s in zip(factors, squares, strict=True)
        )
        return np.sqrt(scaled).max() * (1 + TF32) ** 2

    assert longest() > 0.7  # Without a GPU no room is left, and none is needed.
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: ["one"] if kind == "GPU" else []
    )
    assert 0.995 * 0.7 < longest() <= 0.7
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        assert longest() > 0.7
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(True)


@pytest.mark.parametrize("known", [True, False])
def test_records_are_pulled_back_with_a_jacobian_and_without(known):
    """By the variables' own gradient, for draws that a Jacobian serves and for one whose shape is not known."""
    variable = tf.Variable([0.5, -1.5, 2.0])
    weights = tf.constant([[1.0, 2.0, -3.0], [0.0, 0.5, 0.25]])

    @tf.function(autograph=False)
    def found():
        with tf.GradientTape(persistent=True) as tape:
            draw = variable**3
            if not known:
                draw = tf.boolean_mask(draw, variable > -100.0)
        parts = through_draws(
            lambda row: tf.reduce_sum(row * draw),
            [draw],
            tape,
            [variable],
            Clip(1.0),
            aligned=False,
        )
        return [parts.record_gradient(row, tf.constant(True))[1][0] for row in tf.unstack(weights)]

    expected = weights.numpy() * 3 * variable.numpy() ** 2
    np.testing.assert_allclose(np.stack([part.numpy() for part in found()]), expected, rtol=1e-6)


def test_norms_of_pairs_allow_for_rounded_factors_and_not_for_much_more(monkeypatch):
    """Twenty positions of a 784 x 400 kernel, of gradients that point anywhere or cancel; factors rounded up or down at random."""
    rng = np.random.default_rng(3)
    left, right = (rng.normal(size=[5, 20, size]) for size in (784, 400))
    left[1:, 10:], right[1:, 10:] = left[1:, :10], -right[1:, :10] * (1 + 1e-3)

    def squares(left, right):
        return (
            Outer((784, 400), tf.constant(left, tf.float32), tf.constant(right, tf.float32))
            .squared_norms()
            .numpy()
        )

    exact = np.square(np.einsum("ntk,ntd->nkd", left, right)).sum(axis=(1, 2))
    plain = squares(left, right)
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: ["one"] if kind == "GPU" else []
    )
    for _ in range(5):
        rounded = (
            part * (1 + TF32 * rng.choice([-1.0, 1.0], size=part.shape)) for part in (left, right)
        )
        assert (squares(*rounded) >= exact).all()
    assert (plain >= exact).all()
    assert plain[0] < 1.05 * exact[0]
    assert squares(left, right)[0] < 1.25 * exact[0]


def adversarial_batch(exponents, gap=1.0, unit=1.0):
    """Coordinates of records, none above 1, whose running float32 sum moves by far more than 1 with the first of them.

    Each time that one sum has crossed a power of two and the other has not, records of 1.2 of the smaller spacing are
    rounded to 1 of it in the one and to 2 in the other, so that the gap doubles. Sums are of `unit` at a time.
    """
    values, without, full = [1.0], 0.0, 1.0
    for exponent in exponents:
        top, spacing = 2.0**exponent, 2.0 ** (exponent - 24)
        many = int((top - full) // unit)
        values += [unit] * many
        if (rest := top - full - many * unit) > 0:
            values.append(rest)
        without += many * unit + rest
        steps = round((top - without) / spacing)
        values += [1.2 * spacing] * steps
        without, full = top, top + 2 * steps * spacing
    return np.array(values, np.float32), full - without


def test_the_adversary_works_on_a_running_sum():
    """Of 180,000 records added up one by one, one moves the float32 sum by 128 times what it adds."""
    values, gap = adversarial_batch(range(10, 17))
    full, without = (np.cumsum(part, dtype=np.float32)[-1] for part in (values, values[1:]))
    assert full - without == gap == 128.0


@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("width", [5, 5000])
def test_rounding_exceeds_the_sensitivity_by_little_in_the_largest_batches(width, jit_compile):
    """C3 in float32: by less than n 2^-22 clips for n records, as the docs say; the adversary's order gains nothing."""
    values, _ = adversarial_batch(range(10, 17) if width == 5 else range(11, 13))
    num = len(values)

    def sums(mask):
        rows = tf.pad(tf.constant(values)[:, None], [[0, 0], [1, width - 2]])
        record_gradient = lambda record, keep: (tf.reduce_sum(record), [record])  # noqa: E731
        return clipped_sum(record_gradient, rows, mask, Clip(1.0))[0].tensors[0]

    compiled = tf.function(sums, jit_compile=jit_compile, autograph=False)
    full, without = (
        compiled(tf.constant(np.arange(num) >= first)).numpy().astype("float64") for first in (0, 1)
    )
    assert np.linalg.norm(full - without) < 1 + num * 2.0**-22


@pytest.mark.parametrize("jit_compile", [False, True])
def test_rounding_of_products_in_blocks_exceeds_the_sensitivity_by_little(jit_compile):
    """C3 in float32: of the adversary's 180,000 records one moves the sum by its own term; one long product by 0.006 more."""
    values, _ = adversarial_batch(range(10, 17))
    rows = np.zeros([len(values), 16], np.float32)
    rows[:, 0], rows[:, 1] = 0.5, values / 2.0
    compiled = tf.function(sum_of_squares, jit_compile=jit_compile, autograph=False)
    full = compiled(tf.constant(rows)).numpy()
    term = np.outer(rows[0], rows[0])
    rows[0] = 0.0
    assert np.linalg.norm(full - compiled(tf.constant(rows)).numpy() - term) < 0.008 * 0.5


@pytest.mark.parametrize("weighted", [False, True])
def test_rounding_of_the_curvature_is_that_of_blocks_with_weights_and_else_none(weighted):
    """C3 in float32: one long product is refused in both, and products of blocks without weights."""
    values, _ = adversarial_batch(range(10, 17))
    rows = 0.1 * np.random.default_rng(0).normal(size=[len(values), 1, 16]).astype(np.float32)
    rows[:, 0, 0], rows[:, 0, 1] = 0.5, values / 2.0
    curvature = CentredCurvature(16, Clip(1.0))

    def sum_of(rows):
        nothing, extra = tf.zeros([0]), {"rows": tf.constant(rows)}
        if weighted:
            extra["share"] = tf.ones([len(rows)])
        return curvature.sum_of(PerExample(nothing, nothing, nothing, extra=extra)).numpy()

    full, term = sum_of(rows), rows[0].T.astype(np.float64) @ rows[0]
    rows[0] = 0.0
    excess = np.linalg.norm(full - sum_of(rows) - term)
    assert excess < (0.008 * 0.5 if weighted else 1e-9)


def test_products_are_in_float64_where_a_gpu_rounds_their_factors(monkeypatch):
    """And else are the same to a float32 block's rounding, of a whole block and of what it leaves."""
    rows = np.random.default_rng(0).normal(size=(300, 16)).astype(np.float32)
    exact = rows.astype(np.float64).T @ rows.astype(np.float64)
    plain = sum_of_squares(tf.constant(rows)).numpy()
    np.testing.assert_allclose(plain, exact, atol=2e-3)
    assert np.abs(plain - exact).max() > 1e-9  # Blocks are in float32.
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind=None: ["one"] if kind == "GPU" else []
    )
    for each in (rows, rows.astype(np.float64)):
        np.testing.assert_allclose(sum_of_squares(tf.constant(each)), exact, atol=1e-11)


def test_rounding_across_physical_batches_exceeds_the_sensitivity_by_little():
    """C3 in float32: the running sum over the visits of a step is no place for an adversary either."""
    size = 16
    values, gap = adversarial_batch([14], unit=size)
    assert gap == 2.0
    rows = np.zeros([len(values), size, 1], np.float32)
    rows[:, 0, 0] = np.minimum(values, 1.0)
    rows[values > 1.0] = (values[values > 1.0] / size)[:, None, None]
    rows = rows.reshape([-1, 1])

    class Sum(dpvi.DPModel):
        def __init__(self):
            super().__init__()
            self.w = tf.Variable([0.0])
            self.built = True

        def record_loss(self, x):
            return -tf.reduce_sum(self.w * x)

    model = Sum()
    optimizer = dpvi.optimizers.DPKerasSGDOptimizer(
        l2_norm_clip=1.0, noise_multiplier=0.0, learning_rate=len(rows)
    )
    model.compile(optimizer, physical_batch_size=size)
    found = []
    for first in (1.0, 0.0):
        rows[0] = first
        model.w.assign([0.0])
        model.fit(rows, batch_size=len(rows), verbose=0)
        found.append(float(model.w.numpy()[0]))
    assert abs(found[0] - found[1]) < 1 + len(rows) * 2.0**-22


@pytest.mark.parametrize("contribution", ["outer", "direct", "lookup"])
def test_rounding_in_one_matrix_product_of_layers_stays_within_what_the_docs_say(contribution):
    """C3 in float32, for the 1,024 records that `DPVAE` adds up at a time: the worst order known gives 1.6 %."""
    num = 1024
    values = np.full(
        num, 1.2 * 2.0**-15, np.float32
    )  # 512 with the first record and 511 without, then what rounds apart.
    values[1:512] = 1.0
    found = []
    for first in (1.0, 0.0):
        values[0] = first
        column = tf.constant(values)[:, None, None]
        part = {
            "outer": lambda column=column: Outer((1, 1), tf.ones_like(column), column),
            "direct": lambda column=column: Direct((1,), column[:, 0]),
            "lookup": lambda column=column: Lookup((1, 1), tf.zeros([num, 1], tf.int32), column),
        }[contribution]()
        found.append(float(tf.reshape(part.weighted_sum(tf.ones([num])), [])))
    assert abs(found[0] - found[1] - 1.0) < 0.02
