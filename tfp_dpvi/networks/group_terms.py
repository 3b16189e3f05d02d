"""The batch-wise term of a `DPVAE`: a regularizer of random groups of records."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from tfp_dpvi import _random
from tfp_dpvi._tf import tf, tfd
from tfp_dpvi.divergences import Codes
from tfp_dpvi.ghost import LayerGradients, groups
from tfp_dpvi.gradients import Clip, ClippedSum, PerExample, StepSpec
from tfp_dpvi.privacy import TermwiseNoise

if TYPE_CHECKING:
    from tfp_dpvi.networks.dpvae import DPVAE


@dataclasses.dataclass(frozen=True)
class Terms:
    """Losses of records, shape [n], the first draw of each record's latent variable, and the latents' posterior."""

    losses: tf.Tensor
    samples: tf.Tensor
    posterior: tfd.Distribution


class GroupTerms:
    """The sum of clipped gradients of records and of groups in a `DPVAE`'s step, with its noise scales."""

    def __init__(self, model: DPVAE, spec: StepSpec) -> None:
        assert model.batch_regularizer is not None
        optimizer, self._variables = model.optimizer, model.trainable_variables
        self._terms, self._regularizer, self._weight = (
            model._terms,
            model.batch_regularizer,
            model.regularizer_weight,
        )
        self._prior, self._num_draws, self._static = model.prior, model.num_draws, model._static
        self._num_groups, self._clip = optimizer.num_partitions, Clip(optimizer.batch_l2_norm_clip)
        self._expected = spec.expected_batch_size
        self.num_prior_samples = model.num_prior_samples or max(
            8, round(self._expected / self._num_groups)
        )
        of_encoder = {
            variable.ref()
            for layer in model._encoder_layers
            for variable in layer.trainable_variables
        }
        self._reached = [
            variable.ref() in of_encoder for variable in self._variables
        ]  # By the regularizer.
        sizes = np.array([int(np.prod(variable.shape)) for variable in self._variables])
        num_encoder = int(sizes[self._reached].sum())
        self.noise: TermwiseNoise = optimizer.noise_for(
            expected_batch_size=self._expected,
            num_encoder=num_encoder,
            num_rest=int(sizes.sum()) - num_encoder,
        )

    @property
    def noise_scales(self) -> tuple[float, ...]:
        """Returns, for each variable, the standard deviation of its noise over `noise_multiplier` times the records' clip."""
        return tuple(self.noise.encoder_scale if yes else 1.0 for yes in self._reached)

    @property
    def identity(self) -> Hashable:
        """Returns a hashable value; equal values trace the same step."""
        given = id(self._regularizer), self._weight, self.num_prior_samples
        return *given, self._num_groups, self._clip, self.noise, self._static

    def clipped_sum(
        self,
        layers: LayerGradients,
        clip: Clip,
        records: dict[str, tf.Tensor],
        mask: tf.Tensor,
        key: tf.Tensor,
    ) -> tuple[ClippedSum, PerExample]:
        """Returns the sum of both terms, before the division by the expected batch size."""
        draw_key, group_key, prior_key = _random.split(key, 3)
        assignment = groups.assign(group_key, tf.shape(mask)[0], self._num_groups)

        def forward() -> tuple[Terms, tf.Tensor]:
            terms = self._terms(
                records["x"], draw_key, self._num_draws, training=True, y=records.get("y")
            )
            return terms, self._value(terms, assignment, mask, prior_key)

        one = layers.run(forward)
        terms, value = one.result
        clipped, per_example = one.clipped_sum(
            terms.losses, mask, clip, weights=records.get("sample_weight")
        )
        parts = one.contributions(value, tf.ones_like(value))
        sums = groups.clipped_group_sum(
            [part if yes else None for part, yes in zip(parts, self._reached, strict=True)],
            self._variables,
            assignment,
            mask,
            num_groups=self._num_groups,
            clip=self._clip,
            expected_batch_size=self._expected,
            static=self._static,
        )
        factor = self._expected / self._num_groups
        # Subtracted, not added: TensorFlow 2.15 would merge this sum and the loop's with a temporary variable, and the second
        # call of the compiled step would fail (AlreadyExistsError at AddOpsRewrite_.../tmp_var).
        both = [
            part - tf.constant(-factor, part.dtype) * more
            for part, more in zip(clipped.tensors, sums, strict=True)
        ]
        return ClippedSum(both, clip, self.noise.sensitivity, self.noise_scales), per_example

    def _value(
        self, terms: Terms, assignment: tf.Tensor, mask: tf.Tensor, prior_key: tf.Tensor
    ) -> tf.Tensor:
        """Returns the sum of the regularizer's values over groups, each a function of its own records' codes alone.

        The gradient of the sum in a group's codes is that of the group's own value.
        """

        def body(group: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return group + 1, total + self._of_group(group, terms, assignment, mask, prior_key)

        # A graph loop: tracing 64 groups in Python would take a minute.
        num, start = self._num_groups, (tf.constant(0), tf.zeros([], terms.samples.dtype))
        settings = {"maximum_iterations": num, "parallel_iterations": 1}
        return tf.while_loop(lambda group, _: group < num, body, start, **settings)[1]

    def _of_group(
        self,
        group: tf.Tensor,
        terms: Terms,
        assignment: tf.Tensor,
        mask: tf.Tensor,
        prior_key: tf.Tensor,
    ) -> tf.Tensor:
        chosen = (assignment == group) & mask
        samples = self._prior.sample(
            self.num_prior_samples, seed=_random.tfp_seed(_random.fold_in(prior_key, group))
        )
        if self._static:
            # All rows, for a static shape; those of other groups' records are replaced.
            weights = tf.cast(chosen, terms.samples.dtype)
            shown = tf.where(chosen[:, None], terms.samples, tf.zeros_like(terms.samples))
            posterior = groups.with_rows(
                terms.posterior, lambda part: _select(chosen, part), terms.samples.shape[0]
            )
            codes = Codes(shown, weights, posterior, self._prior, samples)
        else:
            rows = tf.where(chosen)[:, 0]
            posterior = groups.with_rows(
                terms.posterior, lambda part: tf.gather(part, rows), terms.samples.shape[0]
            )
            own = tf.gather(terms.samples, rows)
            codes = Codes(own, tf.ones([tf.size(rows)], own.dtype), posterior, self._prior, samples)
        value = tf.convert_to_tensor(self._regularizer(codes))
        if value.shape.rank != 0:
            raise ValueError(
                f"batch_regularizer returned shape {value.shape}; it must return a scalar for a group."
            )
        return tf.cast(value, terms.samples.dtype) * self._weight


def _select(chosen: tf.Tensor, part: tf.Tensor) -> tf.Tensor:
    """Replaces rows that are not chosen by ones: a product with zero would keep their NaN."""
    return tf.where(
        tf.reshape(chosen, [-1] + [1] * (part.shape.rank - 1)), part, tf.ones_like(part)
    )
