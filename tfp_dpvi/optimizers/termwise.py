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
from tfp_dpvi.privacy import TermwiseNoise, termwise_noise


class TermwiseOptimizer(DPOptimizer):
    """The mixin that `make_termwise_optimizer_class` adds to a DP-Keras optimizer."""

    batch_l2_norm_clip: float
    num_partitions: int
    noise: str

    def __init__(
        self,
        *args: Any,
        batch_l2_norm_clip: float,
        num_partitions: int,
        noise: str = "blocks",
        **kwargs: Any,
    ) -> None:
        if (
            kwargs.pop("split", "paper") != "paper" and noise == "split"
        ):  # Files of earlier versions have it.
            raise ValueError(
                "split='optimal' costs as much as noise='blocks', with more draws: use that."
            )
        super().__init__(*args, **kwargs)
        fix = "the two clips determine the terms' relative noise; for runs that are not private pass large ones"
        check.positive("l2_norm_clip", self.l2_norm_clip, fix)
        self.batch_l2_norm_clip = check.positive("batch_l2_norm_clip", batch_l2_norm_clip, fix)
        self.num_partitions = check.count("num_partitions", num_partitions, 1)
        self.noise = check.one_of("noise", noise, ("blocks", "single", "split"))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        names = ("batch_l2_norm_clip", "num_partitions", "noise")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    def noise_for(self, **of_step: Any) -> TermwiseNoise:
        """Returns the noise and sensitivity of the sum of both terms; the other arguments of `privacy.termwise_noise`."""
        names = ("l2_norm_clip", "batch_l2_norm_clip", "num_partitions")
        return termwise_noise(
            self.noise, **{name: getattr(self, name) for name in names}, **of_step
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
        with the least total variance; "single" uses one scale for all; "split" draws noise for each
        term, with equal shares of the budget, as in the paper.
      **kwargs: as for the DPKeras class.

    #### Formal guarantee

    One Gaussian release of `sum of clipped records + (B / b) sum of clipped groups`, accounted for as a whole, then
    post-processing. One record moves one group's gradient by at most 2 C2 (not C2, as the paper says).
    """


@functools.cache
def make_termwise_optimizer_class(keras_optimizer_class: type) -> type:
    """Returns a subclass of a Keras optimizer class named `TermwiseDPKeras<Name>Optimizer`, else raises `TypeError`."""
    base = make_dp_optimizer_class(keras_optimizer_class)
    name = f"TermwiseDPKeras{keras_optimizer_class.__name__}Optimizer"
    body = {"__doc__": _DOC.format(name=keras_optimizer_class.__name__), "__module__": __name__}
    return register_keras_serializable("tfp_dpvi", name)(
        type(name, (TermwiseOptimizer, base), body)
    )


TermwiseDPKerasSGDOptimizer = make_termwise_optimizer_class(keras.optimizers.SGD)
TermwiseDPKerasAdamOptimizer = make_termwise_optimizer_class(keras.optimizers.Adam)
TermwiseDPKerasAdagradOptimizer = make_termwise_optimizer_class(keras.optimizers.Adagrad)
