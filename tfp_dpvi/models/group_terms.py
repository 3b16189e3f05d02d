"""The batch-wise term of a `DPVAE`: a regularizer of random groups of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfp
from tfp_dpvi.divergences import Codes
from tfp_dpvi.gradients import Clip, ClippedSum, LayerGradients, Pass, PerExample, groups
from tfp_dpvi.privacy import TermwiseNoise

tfd: Any = tfp.distributions


@dataclasses.dataclass(frozen=True)
class Terms:
    """Losses of records, shape [n], the first draw of each record's latent variable, and the latents' posterior."""

    losses: tf.Tensor
    samples: tf.Tensor
    posterior: tfd.Distribution


@dataclasses.dataclass(frozen=True)
class GroupTerms:
    """The sum of clipped gradients of records and of groups, with its noise scales.

    `terms(x, key, num_draws, training, y)` returns a batch's losses and codes.
    """

    terms: Callable[..., Terms]
    regularizer: Callable[[Codes], tf.Tensor]
    weight: float  # The regularizer's weight.
    prior: tfd.Distribution
    num_prior_samples: int
    variables: Sequence[tf.Variable]
    reached: tuple[bool, ...]  # Whether the regularizer depends on each variable.
    num_groups: int
    clip: Clip  # For a group's gradient.
    expected_batch_size: float
    noise: TermwiseNoise
    static: bool  # Whether to keep shapes static for XLA.

    @property
    def noise_scales(self) -> tuple[float, ...]:
        """Returns, for each variable, the standard deviation of its noise over `noise_multiplier` times the records' clip."""
        return tuple(self.noise.encoder_scale if yes else self.noise.rest_scale for yes in self.reached)

    @property
    def identity(self) -> Hashable:
        """Returns a hashable value; equal values trace the same step."""
        return (id(self.regularizer), self.weight, self.num_prior_samples, self.num_groups, self.clip, self.noise)

    def clipped_sum(
        self,
        layers: LayerGradients,
        clip: Clip,
        num_draws: int,
        records: dict[str, tf.Tensor],
        mask: tf.Tensor,
        key: tf.Tensor,
    ) -> tuple[ClippedSum, PerExample]:
        """Returns the sum of both terms, before the division by the expected batch size."""
        draw_key, group_key, prior_key = _random.split(key, 3)
        assignment = groups.assign(group_key, tf.shape(mask)[0], self.num_groups)

        def forward() -> tuple[Terms, tf.Tensor]:
            terms = self.terms(records["x"], draw_key, num_draws, training=True, y=records.get("y"))
            return terms, self._value(terms, assignment, mask, prior_key)

        one = layers.run(forward)
        terms, value = one.result
        clipped, per_example = one.clipped_sum(terms.losses, mask, clip, weights=records.get("sample_weight"))
        factor = self.expected_batch_size / self.num_groups
        # Subtracted, not added: TensorFlow 2.15 would merge this sum and the loop's with a temporary variable, and the second
        # call of the compiled step would fail (AlreadyExistsError at AddOpsRewrite_.../tmp_var).
        both = [
            part - tf.constant(-factor, part.dtype) * more
            for part, more in zip(clipped.tensors, self._sums(one, value, assignment, mask), strict=True)
        ]
        return ClippedSum(both, clip, self.noise.sensitivity, self.noise_scales), per_example

    def _sums(self, one: Pass, value: tf.Tensor, assignment: tf.Tensor, mask: tf.Tensor) -> list[tf.Tensor]:
        parts = one.contributions(value, tf.ones_like(value))
        return groups.clipped_group_sum(
            [part if yes else None for part, yes in zip(parts, self.reached, strict=True)],
            self.variables,
            assignment,
            mask,
            num_groups=self.num_groups,
            clip=self.clip,
            expected_batch_size=self.expected_batch_size,
            static=self.static,
        )

    def _value(self, terms: Terms, assignment: tf.Tensor, mask: tf.Tensor, prior_key: tf.Tensor) -> tf.Tensor:
        """Returns the sum of the regularizer's values over groups, each a function of its own records' codes alone.

        The gradient of the sum in a group's codes is that of the group's own value.
        """

        def body(group: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return group + 1, total + self._of_group(group, terms, assignment, mask, prior_key)

        # A graph loop: tracing 64 groups in Python would take a minute.
        num, start = self.num_groups, (tf.constant(0), tf.zeros([], terms.samples.dtype))
        return tf.while_loop(lambda group, _: group < num, body, start, maximum_iterations=num, parallel_iterations=1)[
            1
        ]

    def _of_group(
        self, group: tf.Tensor, terms: Terms, assignment: tf.Tensor, mask: tf.Tensor, prior_key: tf.Tensor
    ) -> tf.Tensor:
        chosen = (assignment == group) & mask
        samples = self.prior.sample(self.num_prior_samples, seed=_random.tfp_seed(_random.fold_in(prior_key, group)))
        if self.static:
            # All rows, for a static shape; those of other groups' records are replaced.
            weights = tf.cast(chosen, terms.samples.dtype)
            shown = tf.where(chosen[:, None], terms.samples, tf.zeros_like(terms.samples))
            posterior = groups.with_rows(terms.posterior, lambda part: _select(chosen, part), terms.samples.shape[0])
            codes = Codes(shown, weights, posterior, self.prior, samples)
        else:
            rows = tf.where(chosen)[:, 0]
            posterior = groups.with_rows(terms.posterior, lambda part: tf.gather(part, rows), terms.samples.shape[0])
            own = tf.gather(terms.samples, rows)
            codes = Codes(own, tf.ones([tf.size(rows)], own.dtype), posterior, self.prior, samples)
        value = tf.convert_to_tensor(self.regularizer(codes))
        if value.shape.rank != 0:
            raise ValueError(
                f"batch_regularizer returned shape {value.shape}; it must return a scalar for a group of records. Use, for "
                "instance, tf.reduce_sum."
            )
        return tf.cast(value, terms.samples.dtype) * self.weight


def _select(chosen: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """Replaces rows that are not chosen by ones: a product with zero would keep their NaN."""
    return tf.where(tf.reshape(chosen, [-1] + [1] * (part.shape.rank - 1)), part, tf.ones_like(part))
