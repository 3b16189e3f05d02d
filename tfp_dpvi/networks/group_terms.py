"""The batch-wise term of a `DPVAE`: a regularizer of random groups of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from tfp_dpvi import _random
from tfp_dpvi._tf import tf
from tfp_dpvi.divergences import Codes
from tfp_dpvi.ghost import groups
from tfp_dpvi.ghost.layers import LayerGradients
from tfp_dpvi.gradients import Clip, ClippedSum, PerExample
from tfp_dpvi.networks.autoencoder import Autoencoder, RecordTerms
from tfp_dpvi.privacy import TermwiseNoise

Regularizer: TypeAlias = Callable[[Codes], tf.Tensor]
"""The term of a random group of records, a scalar function of their codes."""


@dataclasses.dataclass(frozen=True, eq=False)
class GroupTerms:
    """The sum of clipped gradients of records and of groups in a step, with its noise scales.

    Args:
      autoencoder: The networks, with a fixed prior.
      regularizer: `Codes -> scalar`, the term of each group.
      weight: Weight of this term.
      num_prior_samples: Number of draws from the prior for each group's term.
      num_draws: Latent draws for each record.
      num_groups: Number b of groups.
      clip: Bound on the norm of a group's gradient.
      noise: Sensitivity of the sum of both terms, and the scales of its noise.
      variables: The trainable variables.
      reached: For each variable, whether the regularizer's gradient reaches it.
      expected_batch_size: The mean number of records in a step.
      static: Whether shapes are kept static for XLA, at b times the work.
    """

    autoencoder: Autoencoder
    regularizer: Regularizer
    weight: float
    num_prior_samples: int
    num_draws: int
    num_groups: int
    clip: Clip
    noise: TermwiseNoise
    variables: Sequence[tf.Variable]
    reached: Sequence[bool]
    expected_batch_size: float
    static: bool

    @property
    def noise_scales(self) -> tuple[float, ...]:
        """For each variable, the standard deviation of its noise in units of the records' noise.

        That is `noise_multiplier` times the records' clip.
        """
        return tuple(self.noise.encoder_scale if reached else 1.0 for reached in self.reached)

    @property
    def identity(self) -> Hashable:
        """A hashable value; equal values trace the same step."""
        term = (id(self.regularizer), self.weight, self.num_prior_samples)
        return *term, self.num_groups, self.clip, self.noise, self.static

    def clipped_sum(
        self,
        layers: LayerGradients,
        record_clip: Clip,
        records: dict[str, tf.Tensor],
        mask: tf.Tensor,
        key: tf.Tensor,
    ) -> tuple[ClippedSum, PerExample]:
        """Returns the sum of both terms, before the division by the expected batch size.

        Args:
          layers: The checked layers, whose per-record gradients are summed.
          record_clip: Bound on the norm of a record's gradient.
          records: A batch {"x": ...}, with "y" and "sample_weight" if there are any.
          mask: bool [n], False for padding.
          key: int64 [2], determines the draws and the groups.
        """
        keys = _random.split(key, 3)
        draw_key, group_key = keys[0], keys[1]
        prior_key = keys[2]
        assignment = groups.assign(group_key, tf.shape(mask)[0], self.num_groups)

        def forward() -> tuple[RecordTerms, tf.Tensor]:
            terms = self.autoencoder.terms(
                records["x"], draw_key, self.num_draws, y=records.get("y"), training=True
            )
            return terms, self._sum_over_groups(terms, assignment, mask, prior_key)

        layers_pass = layers.run(forward)
        terms, group_values = layers_pass.result
        record_sum, per_example = layers_pass.clipped_sum(
            terms.losses, mask, record_clip, weights=records.get("sample_weight")
        )
        contributions = layers_pass.contributions(group_values, tf.ones_like(group_values))
        group_sum = groups.clipped_group_sum(
            [
                part if reached else None
                for part, reached in zip(contributions, self.reached, strict=True)
            ],
            self.variables,
            assignment,
            mask,
            num_groups=self.num_groups,
            group_clip=self.clip,
            expected_batch_size=self.expected_batch_size,
            static=self.static,
        )
        factor = self.expected_batch_size / self.num_groups
        # Subtracted, not added: TensorFlow 2.15 would merge this sum and the loop's with a
        # temporary variable, and the second call of the compiled step would fail
        # (AlreadyExistsError at AddOpsRewrite_.../tmp_var).
        both = [
            part - tf.constant(-factor, part.dtype) * more
            for part, more in zip(record_sum.tensors, group_sum, strict=True)
        ]
        released = ClippedSum(both, record_clip, self.noise.sensitivity, self.noise_scales)
        return released, per_example

    def _sum_over_groups(
        self, terms: RecordTerms, assignment: tf.Tensor, mask: tf.Tensor, prior_key: tf.Tensor
    ) -> tf.Tensor:
        """Returns the sum of the regularizer's values, each a function of its own records' codes.

        The gradient of the sum in a group's codes is that of the group's own value.
        """

        def body(group: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            chosen = (assignment == group) & mask
            value = self._group_value(terms, chosen, _random.fold_in(prior_key, group))
            return group + 1, total + value

        # A graph loop: tracing 64 groups in Python would take a minute.
        start = (tf.constant(0), tf.zeros([], terms.samples.dtype))
        _, total = tf.while_loop(
            lambda group, _: group < self.num_groups,
            body,
            start,
            maximum_iterations=self.num_groups,
            parallel_iterations=1,
        )
        return total

    def _group_value(self, terms: RecordTerms, chosen: tf.Tensor, key: tf.Tensor) -> tf.Tensor:
        """Returns the weighted regularizer of one group, the records where `chosen` [n] is True."""
        prior = self.autoencoder.prior_at(None)
        prior_samples = prior.sample(self.num_prior_samples, seed=_random.tfp_seed(key))
        num_rows = terms.samples.shape[0]
        if self.static:
            # All rows, for a static shape; those of other groups' records are replaced.
            weights = tf.cast(chosen, terms.samples.dtype)
            samples = tf.where(chosen[:, None], terms.samples, tf.zeros_like(terms.samples))
            posterior = groups.with_rows(
                terms.posterior, lambda part: _select(chosen, part), num_rows
            )
        else:
            rows = tf.where(chosen)[:, 0]
            posterior = groups.with_rows(
                terms.posterior, lambda part: tf.gather(part, rows), num_rows
            )
            samples = tf.gather(terms.samples, rows)
            weights = tf.ones([tf.size(rows)], samples.dtype)
        codes = Codes(samples, weights, posterior, prior, prior_samples)
        value = tf.convert_to_tensor(self.regularizer(codes))
        if value.shape.rank != 0:
            raise ValueError(
                f"batch_regularizer returned shape {value.shape}; it must return a scalar for a "
                "group."
            )
        return tf.cast(value, terms.samples.dtype) * self.weight


def _select(chosen: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """Replaces rows that are not chosen by ones: a product with zero would keep their NaN."""
    keep = tf.reshape(chosen, [-1] + [1] * (part.shape.rank - 1))
    return tf.where(keep, part, tf.ones_like(part))
