"""The Gaussian mechanism, and Keras optimizers that refuse gradients that were not privatised."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

from tfp_dpvi import _random
from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Optimizer, keras, refuse_setting, register_keras_serializable, tf
from tfp_dpvi.gradients import Clip, ClippedSum, exactly

_Base: Any = object  # The mixin precedes a Keras class, see `make_dp_optimizer_class`.


@dataclasses.dataclass(frozen=True)
class PrivatizedGradients:
    """Noisy gradients, one tensor per variable, ready for one `apply_gradients`."""

    tensors: Sequence[tf.Tensor]
    joint: Sequence[
        tf.Tensor
    ] = ()  # Noisy means of the joint releases, see `ClippedSum.num_joint`.
    mean: Sequence[tf.Tensor] = ()  # The gradient's noisy mean, before `pull_back` and exact terms.


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
    """Returns `pull_back((sum + z C Z) / (q N)) + exact` (contracts C1 and C2).

    Args:
      clipped: the sum of clipped gradients, and its sensitivity.
      noise_multiplier: z >= 0, the noise's standard deviation over the bound C of `clipped`.
      key: int64 tensor of shape [2], or a tape of words; used once (see `add_noise`).
      expected_batch_size: the public denominator qN, never the realised batch size, which is secret.
      pull_back: maps the gradient's noisy mean to one tensor for each variable, without reading
        records; None for the identity.
      data_independent: the exact gradient of the terms that depend on no record, added without clip
        and noise.
      dtype: float32 or float64, of the results; by default that of the sum. Sums in float64 keep
        their precision until the noise is in.

    Returns:
      The noisy gradients of the variables, and the noisy means that they are made of.

    #### Formal guarantee

    One Gaussian release of `clipped`: standard deviation `z C` in every coordinate (times the part's
    `noise_scales`), independent across coordinates and keys, rounded to a grid of at most 2^-12
    standard deviations (see `add_noise`), followed by post-processing. An empty batch is a release
    too, of noise alone.
    """
    dtype = dtype or clipped.tensors[0].dtype
    multiplier = exactly(noise_multiplier, tf.float64)
    scales = clipped.noise_scales or [1.0] * len(clipped.tensors)
    deviations = [
        # Selected: zero noise with an infinite clip (both off) must not give 0 x Inf.
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
    """Raised if an optimizer gets a gradient without clip and noise, or one that was applied before."""


class _Hidden:
    """State of an optimizer in a plain object, which Keras does not track."""

    minted: Sequence[Any] | None = None  # The gradients that it may apply once.
    held: frozenset[str] | None = None  # Names of the settings that a running fit has read.


class DPOptimizer(_Base):
    """The mixin that `make_dp_optimizer_class` adds to a Keras optimizer."""

    l2_norm_clip: float  # The bound C on the l2 norm of one record's gradient.
    noise_multiplier: (
        float | None
    )  # Noise standard deviation over C; None for `compile` to calibrate it.
    clipping: str  # See `tfp_dpvi.gradients.Clip`.

    def __init__(
        self,
        *args: Any,
        l2_norm_clip: float,
        noise_multiplier: float | None = None,
        clipping: str = "flat",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.l2_norm_clip, self.clipping = l2_norm_clip, clipping
        self.l2_norm_clip = self.clip.bound
        self.noise_multiplier = None
        if noise_multiplier is not None:
            fix = "pass the noise's standard deviation over l2_norm_clip, or None to calibrate it"
            self.noise_multiplier = check.non_negative("noise_multiplier", noise_multiplier, fix)
        if math.isinf(self.l2_norm_clip) and self.noise_multiplier != 0:
            raise ValueError(
                f"l2_norm_clip={l2_norm_clip!r} needs noise_multiplier=0 (got {noise_multiplier!r}); or pass a finite l2_norm_clip."
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
        **settings: Any,
    ) -> PrivatizedGradients:
        """Adds noise to a clipped sum. This optimizer may apply the result once.

        Arguments and guarantee are those of `tfp_dpvi.optimizers.privatize`; `noise_multiplier` defaults to the optimizer's.
        Raises `ValueError` if the sum was clipped to another bound, or there is no noise multiplier.
        """
        if clipped.clip.bound != self.l2_norm_clip:
            raise ValueError(
                f"clipped has the bound {clipped.clip.bound}, but the optimizer's l2_norm_clip is {self.l2_norm_clip}: clip to "
                "optimizer.clip."
            )
        if noise_multiplier is None:
            noise_multiplier = self.noise_multiplier
        if noise_multiplier is None:
            raise ValueError(
                "noise_multiplier is None: pass one to the optimizer, or let compile(epsilon=, delta=) calibrate it."
            )
        private = privatize(clipped, noise_multiplier=noise_multiplier, **settings)
        self._hidden.minted = tuple(private.tensors)
        return private

    def _check_minted(self, gradients: Sequence[tf.Tensor]) -> None:
        minted, self._hidden.minted = self._hidden.minted, None
        if minted is None or list(map(id, minted)) != list(map(id, gradients)):
            raise UnprivatizedGradientError(
                "apply_gradients: the gradients are not those that optimizer.privatize returned last. Apply all of them once, "
                "unchanged and in order; those of a tape are not private."
            )

    def apply_gradients(
        self, grads_and_vars: Iterable[tuple[tf.Tensor, tf.Variable]], *args: Any, **kwargs: Any
    ) -> tf.Variable:
        """Makes one Keras update with the gradients of the last `privatize`; else raises `UnprivatizedGradientError`."""
        pairs = list(grads_and_vars)
        self._check_minted([gradient for gradient, _ in pairs])
        return super().apply_gradients(pairs, *args, **kwargs)

    def minimize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises: it would apply a gradient without per-record clip and noise."""
        raise UnprivatizedGradientError(
            f"{type(self).__name__}.minimize: a gradient of a batch's loss cannot be made private. Use DPVI or DPModel.fit, or "
            "ledger.reserve, gradients.clipped_sum, optimizer.privatize and optimizer.apply_gradients, in this order."
        )

    compute_gradients = minimize

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        privacy = {
            name: getattr(self, name) for name in ("l2_norm_clip", "noise_multiplier", "clipping")
        }
        return {**super().get_config(), **privacy}


_DOC = """`tf.keras.optimizers.{name}` on privatised gradients.

    Args:
      *args: as for the Keras class.
      l2_norm_clip: bound C > 0 on the l2 norm of one record's gradient.
      noise_multiplier: noise standard deviation over C; None for `compile(epsilon=, delta=)` to calibrate it.
      clipping: "flat", "per_layer" or "normalized", see `tfp_dpvi.gradients.Clip`. The guarantee is the same for each.
      **kwargs: as for the Keras class. Its `clipnorm`, `weight_decay` and `use_ema` act after the noise and cost no
        privacy.

    Raises:
      ValueError, TypeError: a clip that is not positive, or a noise multiplier that is not finite and at least 0.

    #### Formal guarantee

    Only gradients that `privatize` returned are applied: a Gaussian release of a clipped sum, then post-processing.
    """


@functools.cache
def make_dp_optimizer_class(keras_optimizer_class: type) -> type:
    """Returns a DP optimizer class over any Keras optimizer class (not a legacy one), the same for the same argument.

    It is a subclass named `DPKeras<Name>Optimizer`, whose constructor takes `l2_norm_clip`, `noise_multiplier` (None: to be
    calibrated) and `clipping` as keyword arguments, besides those of the Keras class. Raises `TypeError` for other arguments.
    """
    if not (
        isinstance(keras_optimizer_class, type) and issubclass(keras_optimizer_class, Optimizer)
    ):
        raise TypeError(
            f"keras_optimizer_class must be a (not legacy) subclass of keras.optimizers.Optimizer, got {keras_optimizer_class!r}."
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
