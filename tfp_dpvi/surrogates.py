"""Surrogate posteriors by name, with TensorFlow Probability's builders.

Initial values are public: nothing here reads data.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, function_of_model, joint_bijector, pad, tf, tfd, tfp

__all__ = ["WishartTriL", "asvi", "full_rank", "mean_field"]

_vi, _tfb = tfp.experimental.vi, tfp.bijectors


class _Normal(tfd.Normal):
    """A normal whose seeded draws set the generator's algorithm.

    With TensorFlow's default, which TFP uses, XLA on CPUs mixes the seed again for every number
    (TensorFlow 2.21: 0.66 microseconds each instead of 0.04).
    """

    def _sample_n(self, n: tf.Tensor, seed: tf.Tensor | int | None = None) -> tf.Tensor:
        if not tf.is_tensor(seed):
            return super()._sample_n(n, seed)
        shape = tf.concat([[n], self.batch_shape_tensor()], axis=0)
        draws = tf.random.stateless_normal(shape, seed, dtype=self.dtype, alg=_random.ALGORITHM)
        return draws * self.scale + self.loc


class WishartTriL(tfd.WishartTriL):
    """`tfd.WishartTriL` with a bijector from the real line to all of its support.

    The one of TensorFlow Probability, to 0.25, applies softplus to a factor's diagonal twice, which
    leaves out entries below log 2 = 0.69: no surrogate would reach them.

    ```python
    >>> prior = WishartTriL(5.0, scale_tril=tf.eye(2), input_output_cholesky=True)
    >>> float(event_bijector(prior)(tf.fill([3], -9.0))[0, 0]) < 0.69
    True

    ```
    """

    def _default_event_space_bijector(self) -> tfp.bijectors.Bijector:
        factor = _tfb.FillScaleTriL(
            diag_shift=tf.constant(1e-5, self.dtype), validate_args=self.validate_args
        )
        if self.input_output_cholesky:
            return factor
        return _tfb.Chain([_tfb.CholeskyOuterProduct(), factor])


def float_dtype(prior: tfd.Distribution) -> tf.DType:
    """Returns the one dtype of a prior, float32 or float64: one dtype runs through a model.

    Raises:
      ValueError: The prior has several dtypes, or another.
    """
    kinds = {tf.as_dtype(kind) for kind in tf.nest.flatten(prior.dtype)}
    if len(kinds) != 1 or not next(iter(kinds)).is_floating:
        names = ", ".join(sorted(kind.name for kind in kinds))
        raise ValueError(
            f"prior has parts of dtype {names}; it needs parameters of one floating dtype. "
            "Discrete parameters have no reparameterised surrogate: sum them out, for instance "
            "with tfd.MixtureSameFamily."
        )
    kind = kinds.pop()
    if kind not in (tf.float32, tf.float64):
        raise ValueError(
            f"prior has parts of dtype {kind.name}, whose rounding breaks the clip "
            "(docs/sharp_edges.md): use float32 or float64."
        )
    return kind


def event_bijector(prior: tfd.Distribution) -> tfp.bijectors.Bijector:
    """Returns the map from the real line to a prior's support.

    Raises:
      ValueError: The prior knows none.
    """
    try:
        return prior.experimental_default_event_space_bijector()
    except NotImplementedError as error:
        raise ValueError(
            f"prior {prior.name!r} has no bijector from the real line to its support, so no named "
            "surrogate matches it. Pass a trainable TFP distribution over the same parameters as "
            "surrogate_posterior."
        ) from error


def log_scale_bijector(prior: tfd.Distribution) -> tfp.bijectors.Bijector:
    """Returns `event_bijector`, with exponentials where TFP's default is softplus.

    Raises:
      ValueError: The prior knows none.
    """
    if isinstance(prior, tfd.JointDistribution):
        return joint_bijector(prior, log_scale_bijector)
    single = prior
    while isinstance(single, tfd.Sample | tfd.Independent):
        single = single.distribution
    default = event_bijector(single)
    steps = default.bijectors if isinstance(default, _tfb.Chain) else [default]
    # The inverse of a softplus has the support of an exponential.
    others = [step for step in steps if not isinstance(step, _tfb.Softplus | _tfb.Reciprocal)]
    is_softplus = len(others) < len(steps) and not others
    return _tfb.Exp() if is_softplus else event_bijector(prior)


def _parts(prior: tfd.Distribution) -> Iterator[tfd.Distribution]:
    """Yields the distributions that a prior consists of."""
    if isinstance(prior, tfd.JointDistribution):
        for part in tf.nest.flatten(prior.sample_distributions(seed=(0, 0))[0]):
            yield from _parts(part)
    else:
        yield prior
        inner = getattr(prior, "distribution", None)
        yield from _parts(inner) if isinstance(inner, tfd.Distribution) else ()


def check_prior(prior: tfd.Distribution) -> None:
    """Refuses a prior that is no single continuous distribution without a batch shape.

    Raises:
      ValueError: The prior is discrete, has a batch shape, or one of its parts is not supported.
    """
    float_dtype(prior)
    if any(shape.rank != 0 for shape in _shape_leaves(prior.batch_shape)):
        raise ValueError(
            f"prior {prior.name!r} has batch shape {prior.batch_shape}, and with it a density for "
            "each batch member. Use\n"
            "tfd.Independent(part, 1) for a batch of rank 1, or tfd.Sample(one, shape)."
        )
    for part in _parts(prior):
        if isinstance(part, tfd.WishartLinearOperator) and not isinstance(part, WishartTriL):
            raise ValueError(
                f"prior {prior.name!r} has a {type(part).__name__}, whose bijector in TensorFlow "
                "Probability leaves out factors with a diagonal below 0.69. Use\n"
                "dpvi.surrogates.WishartTriL, which takes the arguments of tfd.WishartTriL."
            )
    try:
        discrete = prior.experimental_default_event_space_bijector() is None
    except NotImplementedError:
        # A custom surrogate may support it.
        return
    except AttributeError:
        # TFP's joint bijector raises so for a part without one.
        discrete = True
    if discrete:
        raise ValueError(
            f"prior {prior.name!r} is discrete, or has a discrete part, which has no gradient. "
            "Sum it out in likelihood, with dpvi.local.enumeration or\n"
            "tfd.MixtureSameFamily; replace tfd.Empirical by a distribution fitted to its draws."
        )


def _start(
    prior: tfd.Distribution,
    bijector: tfp.bijectors.Bijector,
    initial_loc: str | Structure,
    seed: int | None,
) -> Structure:
    """Returns initial values of the parameters on the real line."""
    if not isinstance(initial_loc, str):
        return bijector.inverse(initial_loc)
    check.one_of("initial_loc", initial_loc, ("zeros", "prior"))
    # Keep the draw alive: TFP's caches of joint bijectors print errors if it is deleted before its
    # image.
    draw = prior.sample(seed=_random.tfp_seed(_random.new_key(seed)))
    if initial_loc == "prior":
        return bijector.inverse(draw)
    return tf.nest.map_structure(tf.zeros_like, bijector.inverse(draw))


def mean_field(
    prior: tfd.Distribution,
    *,
    initial_loc: str | Structure = "zeros",
    initial_scale: float = 0.1,
    seed: int | None = None,
    name: str = "mean_field",
) -> tfd.Distribution:
    """Builds independent normals on the unconstrained parameters.

    It calls `build_factored_surrogate_posterior`.

    ```python
    >>> mean_field(tfd.Gamma(2.0, 1.0)).event_shape
    TensorShape([])

    ```

    Args:
      prior: A TFP distribution of the parameters, joint or single.
      initial_loc: "zeros" starts at zero in the unconstrained space; "prior" at a draw from the
        prior, which breaks symmetries as between mixture components; other values are a point in
        the prior's support.
      initial_scale: The initial standard deviation in the unconstrained space.
      seed: Determines the draw of "prior"; None takes one from the operating system.
      name: The name of the distribution.

    Returns:
      A trainable TFP distribution with the structure, event shapes and support of the prior.

    Raises:
      ValueError: The prior has several dtypes, or no map from the real line to its support.
    """
    dtype, bijector = float_dtype(prior), event_bijector(prior)
    start = _start(prior, bijector, initial_loc, seed)
    scale = np.asarray(initial_scale, dtype.as_numpy_dtype)
    initial = tf.nest.map_structure(lambda loc: {"loc": loc, "scale": scale}, start)
    return _vi.build_factored_surrogate_posterior(
        prior.event_shape_tensor(),
        bijector=bijector,
        base_distribution_cls=_Normal,
        initial_parameters=initial,
        dtype=dtype,
        name=name,
    )


def flat_bijector(to_support: tfp.bijectors.Bijector, like: Structure) -> tfp.bijectors.Bijector:
    """Returns the map from a vector of all unconstrained parameters to the parameters.

    Args:
      to_support: The map from the unconstrained parameters.
      like: The unconstrained parameters, whose parts follow one another in the vector.
    """
    shapes = [tuple(part.shape) for part in tf.nest.flatten(like)]
    sizes = [int(np.prod(shape)) for shape in shapes]
    reshaped = [
        _tfb.Reshape(shape, event_shape_in=[size])
        for shape, size in zip(shapes, sizes, strict=True)
    ]
    if not tf.nest.is_nested(like):
        return _tfb.Chain([to_support, reshaped[0]])
    structure = tf.nest.pack_sequence_as(like, list(range(len(shapes))))
    steps = [
        _tfb.Restructure(output_structure=structure),
        _tfb.JointMap(reshaped),
        _tfb.Split(sizes),
    ]
    return _tfb.Chain([to_support, *steps])


def full_rank(
    prior: tfd.Distribution,
    *,
    initial_loc: str | Structure = "zeros",
    initial_scale: float = 0.1,
    seed: int | None = None,
    name: str = "full_rank",
) -> tfd.Distribution:
    """Builds a normal with full covariance over all unconstrained parameters.

    It starts without correlation. Its scale is `diag(s) (I + U / sqrt(d))` with U strictly lower
    triangular: an optimizer's step changes a row relative to its own standard deviation, for every
    d. Separate entries, as in TFP's builder, would add up the noise of d steps.

    ```python
    >>> prior = tfd.Sample(tfd.Normal(0.0, 1.0), 2)
    >>> len(full_rank(prior).trainable_variables)  # Location, scale and correlation.
    3

    ```

    Args:
      prior: A TFP distribution of the parameters, joint or single.
      initial_loc: "zeros" starts at zero in the unconstrained space; "prior" at a draw from the
        prior, which breaks symmetries as between mixture components; other values are a point in
        the prior's support.
      initial_scale: The initial standard deviation in the unconstrained space.
      seed: Determines the draw of "prior"; None takes one from the operating system.
      name: The name of the distribution.

    Returns:
      A trainable TFP distribution with the structure, event shapes and support of the prior.

    Raises:
      ValueError: The prior has several dtypes, or no map from the real line to its support.
    """
    dtype, bijector = float_dtype(prior), event_bijector(prior)
    start = _start(prior, bijector, initial_loc, seed)
    flat = tf.concat([tf.reshape(part, [-1]) for part in tf.nest.flatten(start)], axis=0)
    size = int(flat.shape[0])
    loc = tf.Variable(flat, name=f"{name}_loc")
    scale = tfp.util.TransformedVariable(
        tf.fill([size], tf.constant(initial_scale, dtype)),
        _tfb.Softplus(low=np.finfo(dtype.as_numpy_dtype).eps),
        name=f"{name}_scale",
    )
    root = tf.linalg.LinearOperatorDiag(scale, is_non_singular=True)
    if size > 1:
        lower = tf.Variable(tf.zeros([size * (size - 1) // 2], dtype), name=f"{name}_lower")

        def tril(lower: tf.Variable) -> tf.Tensor:
            below = pad(tfp.math.fill_triangular(lower), [[1, 0], [0, 1]]) / np.sqrt(size)
            return tf.convert_to_tensor(scale)[:, tf.newaxis] * (below + tf.eye(size, dtype=dtype))

        factor = tfp.util.DeferredTensor(lower, tril, shape=[size, size], also_track=scale)
        root = tf.linalg.LinearOperatorLowerTriangular(factor, is_non_singular=True)
    steps = [flat_bijector(bijector, start), _tfb.Shift(loc), _tfb.ScaleMatvecLinearOperator(root)]
    base = tfd.Sample(_Normal(tf.zeros([], dtype), tf.ones([], dtype)), sample_shape=[size])
    return tfd.TransformedDistribution(base, _tfb.Chain(steps), name=name)


def asvi(
    prior: tfd.Distribution, *, seed: int | None = None, name: str = "asvi"
) -> tfd.Distribution:
    """Builds an automatic structured surrogate (ASVI, Ambrogioni et al. 2021).

    It calls `build_asvi_surrogate_posterior`; scales start at 0.1.

    ```python
    >>> prior = tfd.JointDistributionSequential(
    ...     [tfd.Normal(0.0, 1.0), lambda mean: tfd.Normal(mean, 1.0)]
    ... )
    >>> len(asvi(prior, seed=0).trainable_variables)
    8

    ```

    Args:
      prior: A TFP distribution of the parameters, joint or single.
      seed: Determines the initial values; None takes one from the operating system.
      name: The name of the distribution.

    Returns:
      A trainable TFP distribution with the structure, event shapes and support of the prior.

    Raises:
      ValueError: The prior has several dtypes, or TFP's builder does not know it.
    """
    float_dtype(prior)
    try:
        surrogate = _vi.build_asvi_surrogate_posterior(
            prior, initial_prior_weight=0.1, seed=_random.tfp_seed(_random.new_key(seed)), name=name
        )
    except (NotImplementedError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f'surrogate_posterior="asvi" does not match prior {prior.name!r}: TFP says {error}. '
            'Use "mean_field" or "full_rank", or pass a trainable TFP distribution.'
        ) from error
    # TFP's scales start near the prior's, from which a thousand steps do not bring them down to a
    # posterior's.
    for variable in surrogate.trainable_variables:
        if variable.name.startswith("mean_field_parameter") and "_scale" in variable.name:
            start = tfp.math.softplus_inverse(tf.constant(0.1, variable.dtype))
            variable.assign(tf.fill(variable.shape, start))
    return surrogate


BUILDERS: dict[str, Callable[..., tfd.Distribution]] = {
    "mean_field": mean_field,
    "full_rank": full_rank,
    "asvi": asvi,
}


def check_surrogate(surrogate: tfd.Distribution, prior: tfd.Distribution) -> None:
    """Refuses a surrogate that is not trainable, reparameterised and shaped like the prior.

    Args:
      surrogate: The surrogate posterior.
      prior: The prior over the same parameters.

    Raises:
      ValueError: The surrogate does not match.
    """
    if not surrogate.trainable_variables:
        raise ValueError(
            f"surrogate_posterior {surrogate.name!r} has no trainable variables: use "
            "tfp.experimental.vi or tf.Variable parameters. A flow whose networks were never "
            "called? Build it first:\nsurrogate.log_prob(surrogate.sample()), or event_shape= and "
            "conditional_event_shape= of AutoregressiveNetwork."
        )
    if isinstance(surrogate, tfp.experimental.util.DeferredModule):
        # A deferred module builds its distribution anew for each attribute.
        surrogate = surrogate.copy()
    batch_shapes = [tf.TensorShape(shape) for shape in _shape_leaves(surrogate.batch_shape)]
    if any(shape.rank != 0 for shape in batch_shapes):
        raise ValueError(
            f"surrogate_posterior {surrogate.name!r} has batch shape {surrogate.batch_shape}: use "
            "tfd.Independent."
        )
    kinds = tf.nest.flatten(surrogate.reparameterization_type)
    if any(kind != tfd.FULLY_REPARAMETERIZED for kind in kinds):
        raise ValueError(
            f"surrogate_posterior {surrogate.name!r} is not fully reparameterised: use "
            "transformed normals."
        )
    shapes = _shape_leaves(surrogate.event_shape), _shape_leaves(prior.event_shape)
    try:
        tf.nest.assert_same_structure(surrogate.dtype, prior.dtype, check_types=False)
        matching = all(map(tf.TensorShape.is_compatible_with, *shapes))
        if hasattr(surrogate.dtype, "keys") and hasattr(prior.dtype, "keys"):
            matching &= set(surrogate.dtype) == set(prior.dtype)
    except (TypeError, ValueError):
        matching = False
    if not matching:
        raise ValueError(
            f"surrogate_posterior has event shape {surrogate.event_shape}, the prior "
            f"{prior.event_shape}: use the same."
        )
    if float_dtype(surrogate) != float_dtype(prior):
        raise ValueError(
            f"surrogate_posterior has dtype {surrogate.dtype}, the prior {prior.dtype}: a model "
            "has one."
        )


def _shape_leaves(
    structure: tf.TensorShape | Sequence[Structure] | Mapping[str, Structure],
) -> list[tf.TensorShape]:
    """Returns the TensorShapes in a structure; `tf.nest` would flatten them into dimensions."""
    if isinstance(structure, tf.TensorShape):
        return [structure]
    parts = (
        [structure[key] for key in sorted(structure)] if hasattr(structure, "keys") else structure
    )
    return [leaf for part in parts for leaf in _shape_leaves(part)]


def _distinct_names() -> Callable[..., tf.Variable]:
    """Returns a variable creator that numbers repeated names.

    Weight files and TensorBoard identify variables by them.
    """
    seen: collections.Counter[str] = collections.Counter()

    def create(next_creator: Callable[..., tf.Variable], **kwargs: object) -> tf.Variable:
        name = str(kwargs.get("name") or "parameter")
        kwargs["name"] = f"{name}_{seen[name]}" if seen[name] else name
        seen[name] += 1
        return next_creator(**kwargs)

    return create


def build(
    surrogate_posterior: str | tfd.Distribution | Callable[[tfd.Distribution], tfd.Distribution],
    prior: tfd.Distribution,
    *,
    seed: int | None = None,
) -> tfd.Distribution:
    """Returns a trainable, fully reparameterised surrogate posterior that matches the prior.

    Args:
      surrogate_posterior: A name of `BUILDERS`, a trainable TFP distribution, or a function of the
        prior that returns one.
      prior: A TFP distribution of the parameters.
      seed: For the builder of a name.

    Raises:
      TypeError: It is none of these.
      ValueError: The prior is not supported, or the surrogate does not match it.
    """
    check_prior(prior)
    if isinstance(surrogate_posterior, str):
        name = check.one_of("surrogate_posterior", surrogate_posterior, BUILDERS)
        surrogate_posterior = functools.partial(BUILDERS[name], seed=seed)
    if isinstance(surrogate_posterior, (types.FunctionType, functools.partial)):
        with tf.variable_creator_scope(_distinct_names()):
            surrogate_posterior = surrogate_posterior(prior)
    # TFP's builders return deferred modules, which are no `tfd.Distribution`.
    if isinstance(surrogate_posterior, type) or not hasattr(surrogate_posterior, "event_shape"):
        raise TypeError(
            f"surrogate_posterior must be a name ({', '.join(map(repr, BUILDERS))}) or a "
            f"trainable TFP distribution, got {check.shown(surrogate_posterior)}."
        )
    check_surrogate(surrogate_posterior, prior)
    return surrogate_posterior


@contextlib.contextmanager
def without_loop_warnings() -> Iterator[None]:
    """Hides a warning of TFP, while active.

    TFP samples automatically batched surrogates ("asvi") in a loop, with this warning.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Saw Tensor seed")
        yield


def draws_together(surrogate: tfd.Distribution) -> bool:
    """Returns whether a surrogate draws several values at once.

    The log densities must be those of single values.
    """
    # The number exceeds every dimension, so that shapes do not agree by accident.
    num = 1 + max(
        (size for shape in _shape_leaves(surrogate.event_shape) for size in shape.as_list()),
        default=1,
    )

    @function_of_model
    def log_probs() -> tuple[tf.Tensor, tf.Tensor]:
        with without_loop_warnings():
            draws, log_probs = surrogate.experimental_sample_and_log_prob(
                num, seed=tf.constant([0, 1])
            )
        return log_probs, tf.map_fn(surrogate.log_prob, draws, fn_output_signature=log_probs.dtype)

    try:
        with tf.init_scope():
            together, alone = log_probs()
    except (TypeError, ValueError, NotImplementedError, tf.errors.OpError):
        return False
    return together.shape == (num,) and np.allclose(together, alone, rtol=1e-3, equal_nan=True)


def draws_and_log_probs(
    surrogate: tfd.Distribution, num: int, key: tf.Tensor, *, together: bool
) -> tuple[Structure, tf.Tensor]:
    """Returns reparameterised draws and their log densities.

    Args:
      surrogate: The surrogate posterior.
      num: The number of draws.
      key: Int64 [2], used once.
      together: True draws all at once, which is traced once; see `draws_together`.

    Returns:
      The draws, which run over the first dimension, and their log densities, float [num].
    """
    if together:
        with without_loop_warnings():
            return surrogate.experimental_sample_and_log_prob(
                num, seed=_random.tfp_seed(_random.fold_in(key, 0))
            )
    seeds = [_random.tfp_seed(_random.fold_in(key, number)) for number in range(num)]
    pairs = [surrogate.experimental_sample_and_log_prob(seed=seed) for seed in seeds]
    return tf.nest.map_structure(lambda *parts: tf.stack(parts), *pairs)
