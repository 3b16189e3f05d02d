"""The Gaussian mechanism, and Keras optimizers that refuse gradients that were not privatised."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Optimizer, keras, refuse_setting, register_keras_serializable, tf
from tfp_dpvi.gradients import Clip, ClippedSum, exactly

# The mixin precedes a Keras class, see `make_dp_optimizer_class`.
_Base: Any = object


@dataclasses.dataclass(frozen=True)
class PrivatizedGradients:
    """Noisy gradients, ready for one `apply_gradients`.

    Attributes:
      tensors: One tensor for each variable.
      joint: The noisy means of the joint releases, see `ClippedSum.num_joint`.
      mean: The gradient's noisy mean, before `pull_back` and exact terms.

    ```python
    >>> from tfp_dpvi._tf import tf
    >>> from tfp_dpvi.gradients import Clip, ClippedSum
    >>> clipped = ClippedSum([tf.constant([3.0, 4.0])], Clip(5.0))
    >>> key = tf.constant([1, 2], tf.int64)  # A key that is not random gives no privacy.
    >>> private = privatize(clipped, noise_multiplier=1.0, key=key, expected_batch_size=10.0)
    >>> private.tensors[0].shape
    TensorShape([2])
    >>> wide = lambda mean: [tf.concat([mean[0], 2.0 * mean[0]], axis=0)]
    >>> private = privatize(
    ...     clipped, noise_multiplier=0.0, key=key, expected_batch_size=10.0, pull_back=wide
    ... )
    >>> [f"{value:.1f}" for value in private.tensors[0]]
    ['0.3', '0.4', '0.6', '0.8']

    ```
    """

    tensors: Sequence[tf.Tensor]
    joint: Sequence[tf.Tensor] = ()
    mean: Sequence[tf.Tensor] = ()


def privatize(
    clipped: ClippedSum,
    *,
    noise_multiplier: tf.Tensor,
    key: tf.Tensor,
    expected_batch_size: float,
    pull_back: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
    data_independent: Sequence[tf.Tensor] | None = None,
    dtype: tf.DType | None = None,
) -> PrivatizedGradients:
    """Returns `pull_back((sum + z C Z) / (q N)) + exact`, where Z is standard Gaussian noise.

    Args:
      clipped: The sum of clipped gradients, and its sensitivity.
      noise_multiplier: z, at least 0: the noise's standard deviation over the bound C of `clipped`.
      key: int64 tensor of shape [2], or a tape of words; used once (see `add_noise`).
      expected_batch_size: The public denominator qN, never the realised batch size, which is
        secret.
      pull_back: Maps the gradient's noisy mean to one tensor for each variable, without reading
        records; None for the identity.
      data_independent: The exact gradient of the terms that depend on no record, one tensor for
        each variable. It is added without clip and noise.
      dtype: float32 or float64, of the results; by default that of the sum. Sums in float64 keep
        their precision until the noise is in.

    Returns:
      The noisy gradients of the variables, and the noisy means behind them (contracts 1 and 2).

    #### Formal guarantee

    This is one Gaussian release of `clipped`, followed by post-processing. The noise has standard
    deviation `z C` in every coordinate (times the part's `noise_scales`), is independent across
    coordinates and keys, and is rounded with the sum to a grid of at most 2^-12 standard deviations
    (see `add_noise`). An empty batch is a release too, of noise alone.
    """
    dtype = dtype or clipped.tensors[0].dtype
    multiplier = exactly(noise_multiplier, tf.float64)
    scales = clipped.noise_scales or [1.0] * len(clipped.tensors)
    deviations = [
        # Zero noise is selected and not multiplied: with an infinite clip (both are off) the
        # product would be 0 x Inf.
        tf.where(
            multiplier == 0.0,
            tf.zeros_like(multiplier),
            multiplier * exactly(clipped.clip.bound * scale, tf.float64),
        )
        for scale in scales
    ]
    noisy = _random.add_noise(key, clipped.tensors, deviations, dtype=dtype)
    denominator = exactly(expected_batch_size, dtype)
    released = [part / denominator for part in noisy]
    num = len(released) - clipped.num_joint
    mean, joint = released[:num], released[num:]
    tensors = mean if pull_back is None else list(pull_back(mean))
    if data_independent is not None:
        tensors = [part + exact for part, exact in zip(tensors, data_independent, strict=True)]
    return PrivatizedGradients(tensors, joint, mean)


class UnprivatizedGradientError(RuntimeError):
    """Raised if an optimizer gets a gradient without clip and noise, or the same gradient twice.

    ```python
    >>> from tfp_dpvi._tf import tf
    >>> from tfp_dpvi.optimizers import DPKerasSGDOptimizer
    >>> optimizer = DPKerasSGDOptimizer(l2_norm_clip=1.0, noise_multiplier=1.0)
    >>> try:
    ...     optimizer.apply_gradients([(tf.ones([2]), tf.Variable(tf.zeros([2])))])
    ... except UnprivatizedGradientError as error:
    ...     print(str(error).split(".")[0])
    apply_gradients: the gradients are not those that optimizer

    ```
    """


class _Hidden:
    """State of an optimizer in a plain object, which Keras does not track.

    Attributes:
      minted: The gradients that the optimizer may apply once; None without any.
      held: The names of the settings that a running fit has read; None without a fit.
    """

    minted: Sequence[tf.Tensor] | None = None
    held: frozenset[str] | None = None


class DPOptimizer(_Base):
    """The mixin that `make_dp_optimizer_class` adds to a Keras optimizer.

    Attributes:
      l2_norm_clip: C, the bound on the l2 norm of one record's gradient.
      noise_multiplier: The noise's standard deviation over C; None for `compile` to calibrate it.
      clipping: The scheme of the clip, see `tfp_dpvi.gradients.Clip`.

    ```python
    >>> from tfp_dpvi.optimizers import DPKerasAdamOptimizer
    >>> optimizer = DPKerasAdamOptimizer(1e-2, l2_norm_clip=0.5)
    >>> isinstance(optimizer, DPOptimizer), optimizer.clip.bound
    (True, 0.5)

    ```
    """

    l2_norm_clip: float
    noise_multiplier: float | None
    clipping: str

    def __init__(
        self,
        *args: Any,
        l2_norm_clip: float,
        noise_multiplier: float | None = None,
        clipping: str = "flat",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.l2_norm_clip = l2_norm_clip
        self.clipping = clipping
        self.l2_norm_clip = self.clip.bound
        self.noise_multiplier = None
        if noise_multiplier is not None:
            fix = "pass the noise's standard deviation over l2_norm_clip, or None to calibrate it"
            self.noise_multiplier = check.non_negative("noise_multiplier", noise_multiplier, fix)
        if self.clip.is_off and self.noise_multiplier != 0:
            raise ValueError(
                f"l2_norm_clip={l2_norm_clip!r} needs noise_multiplier=0 (got "
                f"{noise_multiplier!r}); or pass a finite l2_norm_clip."
            )
        self._hidden = _Hidden()

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute; a setting that steps have read is refused while a fit runs."""
        hidden = self.__dict__.get("_hidden")
        held = None if hidden is None else hidden.held
        schedule = isinstance(value, keras.optimizers.schedules.LearningRateSchedule)
        if held is not None and (schedule or name not in ("learning_rate", "lr")):
            refuse_setting(self, name, value, held)
        super().__setattr__(name, value)

    @contextlib.contextmanager
    def settings_held(self) -> Iterator[None]:
        """Refuses assignments of settings, except of the learning rate, while a fit runs."""
        names = vars(self)
        self._hidden.held = frozenset(name for name in names if not name.startswith("_"))
        try:
            yield
        finally:
            self._hidden.held = None

    def refuse_other_noise(self, planned: float | None) -> None:
        """Raises `ValueError` if the noise multiplier is no longer the one that `compile` read."""
        if self.noise_multiplier != planned:
            raise ValueError(
                f"optimizer.noise_multiplier={self.noise_multiplier} was assigned after compile, "
                f"which read {planned}: call compile again."
            )

    @property
    def clip(self) -> Clip:
        """The clip and its scheme."""
        return Clip(self.l2_norm_clip, self.clipping)

    def privatize(
        self,
        clipped: ClippedSum,
        *,
        noise_multiplier: float | tf.Tensor | None = None,
        key: tf.Tensor,
        expected_batch_size: float,
        pull_back: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]] | None = None,
        data_independent: Sequence[tf.Tensor] | None = None,
        dtype: tf.DType | None = None,
    ) -> PrivatizedGradients:
        """Adds noise to a clipped sum. This optimizer may apply the result once.

        The guarantee is that of `tfp_dpvi.optimizers.privatize`.

        Args:
          clipped: The sum of clipped gradients, and its sensitivity.
          noise_multiplier: The noise's standard deviation over the clip; by default that of the
            optimizer.
          key: int64 tensor of shape [2], or a tape of words; used once.
          expected_batch_size: The public denominator, never the realised batch size.
          pull_back: Maps the gradient's noisy mean to one tensor for each variable.
          data_independent: The exact gradient of the terms that depend on no record.
          dtype: float32 or float64, of the results.

        Returns:
          The noisy gradients, for one `apply_gradients`.

        Raises:
          ValueError: The sum was clipped to another bound, or there is no noise multiplier.
        """
        if clipped.clip.bound != self.l2_norm_clip:
            raise ValueError(
                f"clipped has the bound {clipped.clip.bound}, but the optimizer's l2_norm_clip is "
                f"{self.l2_norm_clip}: clip to optimizer.clip."
            )
        if noise_multiplier is None:
            noise_multiplier = self.noise_multiplier
        if noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is None: pass one to the optimizer, or let "
                "compile(epsilon=, delta=) calibrate it."
            )
        private = privatize(
            clipped,
            noise_multiplier=noise_multiplier,
            key=key,
            expected_batch_size=expected_batch_size,
            pull_back=pull_back,
            data_independent=data_independent,
            dtype=dtype,
        )
        self._hidden.minted = tuple(private.tensors)
        return private

    def _check_minted(self, gradients: Sequence[tf.Tensor]) -> None:
        minted, self._hidden.minted = self._hidden.minted, None
        if minted is None or list(map(id, minted)) != list(map(id, gradients)):
            raise UnprivatizedGradientError(
                "apply_gradients: the gradients are not those that optimizer.privatize returned "
                "last. Apply all of them once, unchanged and in order; those of a tape are not "
                "private."
            )

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[tf.Tensor, tf.Variable]], *args: Any, **kwargs: Any
    ) -> tf.Variable:
        """Makes one Keras update with the gradients of the last `privatize`.

        Args:
          grads_and_vars: Pairs of a gradient and a variable, all of them and in order.
          *args: As for the Keras class.
          **kwargs: As for the Keras class.

        Returns:
          The result of the Keras class, the number of updates.

        Raises:
          UnprivatizedGradientError: The gradients are not those of the last `privatize`, or were
            applied before.
        """
        pairs = list(grads_and_vars)
        self._check_minted([gradient for gradient, _ in pairs])
        return super().apply_gradients(pairs, *args, **kwargs)

    def minimize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses to apply a gradient without per-record clip and noise.

        Args:
          *args: Not used.
          **kwargs: Not used.

        Raises:
          UnprivatizedGradientError: Always.
        """
        raise UnprivatizedGradientError(
            f"{type(self).__name__}.minimize: a gradient of a batch's loss cannot be made private. "
            "Use DPVI or DPModel.fit, or ledger.reserve, gradients.clipped_sum, "
            "optimizer.privatize and optimizer.apply_gradients, in this order."
        )

    compute_gradients = minimize

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        names = ("l2_norm_clip", "noise_multiplier", "clipping")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


_DOC = """`tf.keras.optimizers.{name}` on privatised gradients.

    Args:
      *args: As for the Keras class.
      l2_norm_clip: C > 0, the bound on the l2 norm of one record's gradient.
      noise_multiplier: The noise's standard deviation over C; None for `compile(epsilon=, delta=)`
        to calibrate it.
      clipping: "flat", "per_layer" or "normalized", see `tfp_dpvi.gradients.Clip`. The guarantee is
        the same for each.
      **kwargs: As for the Keras class. Its `clipnorm`, `weight_decay` and `use_ema` act after the
        noise and cost no privacy.

    Raises:
      ValueError, TypeError: The clip is not positive, or the noise multiplier is not finite and at
        least 0.

    #### Formal guarantee

    Only gradients that `privatize` returned are applied: a Gaussian release of a clipped sum, then
    post-processing.

    ```python
    >>> import tfp_dpvi as dpvi
    >>> optimizer_class = dpvi.optimizers.make_dp_optimizer_class(dpvi.keras.optimizers.{name})
    >>> optimizer = optimizer_class(l2_norm_clip=0.5, noise_multiplier=2.0)
    >>> optimizer.clip.bound
    0.5

    ```
    """


@functools.cache
def make_dp_optimizer_class(keras_optimizer_class: type) -> type:
    """Returns a DP optimizer class over any Keras optimizer class, the same for the same argument.

    It is a subclass named `DPKeras<Name>Optimizer`, whose constructor takes `l2_norm_clip`,
    `noise_multiplier` (None: to be calibrated) and `clipping` as keyword arguments, besides those
    of the Keras class.

    Args:
      keras_optimizer_class: A subclass of `keras.optimizers.Optimizer` that is not legacy.

    Raises:
      TypeError: The argument is no such class.

    ```python
    >>> from tfp_dpvi._tf import keras
    >>> make_dp_optimizer_class(keras.optimizers.Nadam).__name__
    'DPKerasNadamOptimizer'

    ```
    """
    is_class = isinstance(keras_optimizer_class, type)
    if not (is_class and issubclass(keras_optimizer_class, Optimizer)):
        raise TypeError(
            "keras_optimizer_class must be a (not legacy) subclass of keras.optimizers.Optimizer, "
            f"got {keras_optimizer_class!r}."
        )
    if issubclass(keras_optimizer_class, DPOptimizer):
        return keras_optimizer_class
    name = f"DPKeras{keras_optimizer_class.__name__}Optimizer"
    body = {"__doc__": _DOC.format(name=keras_optimizer_class.__name__), "__module__": __name__}
    return register_keras_serializable("tfp_dpvi", name)(
        type(name, (DPOptimizer, keras_optimizer_class), body)
    )


DPKerasSGDOptimizer = make_dp_optimizer_class(keras.optimizers.SGD)
DPKerasAdamOptimizer = make_dp_optimizer_class(keras.optimizers.Adam)
DPKerasAdagradOptimizer = make_dp_optimizer_class(keras.optimizers.Adagrad)
