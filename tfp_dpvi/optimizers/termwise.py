"""Optimizers for a loss of two terms: one for each record, one for each random group of records.

Takahashi et al. 2020, "Differentially Private Variational Autoencoders with Term-wise Gradient Aggregation"
(arXiv:2006.11204), with the corrected sensitivity of the batch-wise term: a record that joins a group replaces one vector
of norm at most C2 by another, a change of up to 2 C2.
"""

from __future__ import annotations

import functools
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import keras, register_keras_serializable
from tfp_dpvi.optimizers.dp_keras import DPOptimizer, make_dp_optimizer_class
from tfp_dpvi.privacy import NeighboringRelation, SamplingScheme, TermwiseNoise, termwise_noise

NOISE_SCHEMES = ("blocks", "single", "split")


class TermwiseOptimizer(DPOptimizer):
    """The mixin that `make_termwise_optimizer_class` adds to a DP-Keras optimizer.

    Attributes:
      batch_l2_norm_clip: bound C2 on the l2 norm of one group's gradient.
      num_partitions: number b of groups, to which the records of a batch are assigned independently and uniformly.
      noise: "blocks", "single" or "split".
      split: "optimal" or "paper": the division of the budget for noise="split".
    """

    batch_l2_norm_clip: float
    num_partitions: int
    noise: str
    split: str

    def __init__(
        self,
        *args: Any,
        batch_l2_norm_clip: float,
        num_partitions: int,
        noise: str = "blocks",
        split: str = "optimal",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        fix = "the two clips determine the terms' relative noise; for runs that are not private pass large ones"
        check.positive("l2_norm_clip", self.l2_norm_clip, fix)
        self.batch_l2_norm_clip = check.positive("batch_l2_norm_clip", batch_l2_norm_clip, fix)
        self.num_partitions = check.count("num_partitions", num_partitions, 1)
        self.noise = check.one_of("noise", noise, NOISE_SCHEMES)
        self.split = check.one_of("split", split, ("optimal", "paper"))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        names = ("batch_l2_norm_clip", "num_partitions", "noise", "split")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    def noise_for(
        self,
        *,
        expected_batch_size: float,
        num_encoder: int,
        num_rest: int,
        sampling: SamplingScheme,
        neighboring_relation: NeighboringRelation,
    ) -> TermwiseNoise:
        """Returns the noise and sensitivity of the sum of both terms; see `tfp_dpvi.privacy.termwise_noise`.

        Raises:
          ValueError: `num_partitions` exceeds the expected batch size.
        """
        return termwise_noise(
            self.noise,
            l2_norm_clip=self.l2_norm_clip,
            batch_l2_norm_clip=self.batch_l2_norm_clip,
            expected_batch_size=expected_batch_size,
            num_partitions=self.num_partitions,
            num_encoder=num_encoder,
            num_rest=num_rest,
            split=self.split,
            sampling=sampling,
            neighboring_relation=neighboring_relation,
        )


_DOC = """`dpvi.keras.optimizers.{name}` on privatised gradients of two terms.

    Args:
      *args: as for the Keras class.
      l2_norm_clip: bound C1 on the l2 norm of one record's gradient.
      batch_l2_norm_clip: bound C2 on the l2 norm of one group's gradient of the batch-wise term.
      num_partitions: number b of groups; at most the expected batch size.
      noise_multiplier: noise standard deviation over C1 (of the parameters that the batch-wise term does not reach);
        None for `compile(epsilon=, delta=)` to calibrate it.
      noise: "blocks" (default) uses two noise scales, for the parameters that the batch-wise term reaches and for the others,
        with the least total variance; "single" uses one scale for all; "split" draws noise for each term.
      split: the division of the budget for "split": "optimal", or "paper", equal for both terms.
      **kwargs: as for the DPKeras class.

    #### Formal guarantee

    One Gaussian release of `sum of clipped records + (B / b) sum of clipped groups`, accounted for as a whole, then
    post-processing. One record moves one group's gradient by at most 2 C2 (not C2, as the paper says).
    """


@functools.cache
def make_termwise_optimizer_class(keras_optimizer_class: type) -> type:
    """Returns a term-wise DP optimizer class over any Keras optimizer class.

    Args:
      keras_optimizer_class: a subclass of `dpvi.keras.optimizers.Optimizer`.

    Returns:
      A subclass named `TermwiseDPKeras<Name>Optimizer`; see `TermwiseDPKerasAdamOptimizer`.

    Raises:
      TypeError: not such a class.
    """
    base = make_dp_optimizer_class(keras_optimizer_class)
    name = f"TermwiseDPKeras{keras_optimizer_class.__name__}Optimizer"
    body = {"__doc__": _DOC.format(name=keras_optimizer_class.__name__), "__module__": __name__}
    return register_keras_serializable("tfp_dpvi", name)(type(name, (TermwiseOptimizer, base), body))


TermwiseDPKerasSGDOptimizer = make_termwise_optimizer_class(keras.optimizers.SGD)
TermwiseDPKerasAdamOptimizer = make_termwise_optimizer_class(keras.optimizers.Adam)
TermwiseDPKerasAdagradOptimizer = make_termwise_optimizer_class(keras.optimizers.Adagrad)
