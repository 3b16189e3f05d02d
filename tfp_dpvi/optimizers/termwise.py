"""Optimizers for a loss of two terms: one for each record, one for each random group of records.

They are those of Takahashi et al. 2020, "Differentially Private Variational Autoencoders with
Term-wise Gradient Aggregation" (arXiv:2006.11204), with the corrected sensitivity of the batch-wise
term: a record that joins a group replaces one vector of norm at most `batch_l2_norm_clip` by
another, a change of up to twice this clip.
"""

from __future__ import annotations

import functools
from typing import Any

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import keras, register_keras_serializable
from tfp_dpvi.optimizers.dp_keras import DPOptimizer, make_dp_optimizer_class
from tfp_dpvi.privacy import TermwiseNoise, termwise_noise


class TermwiseOptimizer(DPOptimizer):
    """The mixin that `make_termwise_optimizer_class` adds to a DP-Keras optimizer.

    Attributes:
      batch_l2_norm_clip: The bound on the l2 norm of one group's gradient of the batch-wise term.
      num_partitions: The number of groups.
      noise: The scheme of the noise, see `tfp_dpvi.privacy.termwise_noise`.

    ```python
    >>> from tfp_dpvi.optimizers import TermwiseDPKerasAdamOptimizer
    >>> optimizer = TermwiseDPKerasAdamOptimizer(
    ...     l2_norm_clip=1.0, batch_l2_norm_clip=0.01, num_partitions=4
    ... )
    >>> noise = optimizer.noise_for(expected_batch_size=100.0, num_encoder=50, num_rest=150)
    >>> round(noise.sensitivity.add_or_remove, 3)
    1.118

    ```
    """

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
        # Files of earlier versions have this argument.
        if kwargs.pop("split", "paper") != "paper" and noise == "split":
            raise ValueError(
                "split='optimal' costs as much as noise='blocks', with more draws: use that."
            )
        super().__init__(*args, **kwargs)
        fix = (
            "the two clips determine the terms' relative noise; for runs that are not private pass "
            "large ones"
        )
        check.positive("l2_norm_clip", self.l2_norm_clip, fix)
        self.batch_l2_norm_clip = check.positive("batch_l2_norm_clip", batch_l2_norm_clip, fix)
        self.num_partitions = check.count("num_partitions", num_partitions, 1)
        self.noise = check.one_of("noise", noise, ("blocks", "single", "split"))

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        names = ("batch_l2_norm_clip", "num_partitions", "noise")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}

    def noise_for(
        self, *, expected_batch_size: float, num_encoder: int, num_rest: int
    ) -> TermwiseNoise:
        """Returns the noise and sensitivity of the sum of both terms.

        The guarantee is that of `tfp_dpvi.privacy.TermwiseNoise`.

        Args:
          expected_batch_size: The expected number of records in a batch, which is public.
          num_encoder: The number of coordinates that the batch-wise term reaches, at least 1.
          num_rest: The number of all others.
        """
        return termwise_noise(
            self.noise,
            l2_norm_clip=self.l2_norm_clip,
            batch_l2_norm_clip=self.batch_l2_norm_clip,
            expected_batch_size=expected_batch_size,
            num_partitions=self.num_partitions,
            num_encoder=num_encoder,
            num_rest=num_rest,
        )


_DOC = """`dpvi.keras.optimizers.{name}` on privatised gradients of two terms.

    Args:
      *args: As for the Keras class.
      l2_norm_clip: The bound on the l2 norm of one record's gradient.
      batch_l2_norm_clip: The bound on the l2 norm of one group's gradient of the batch-wise term.
      num_partitions: b, the number of groups; at most the expected batch size B.
      noise_multiplier: The noise's standard deviation over `l2_norm_clip`, for the parameters that
        the batch-wise term does not reach; None for `compile(epsilon=, delta=)` to calibrate it.
      noise: "blocks" (default) uses two noise scales, for the parameters that the batch-wise term
        reaches and for the others, with the least total variance. "single" uses one scale for all.
        "split" draws noise for each term, with equal shares of the budget, as in the paper.
      **kwargs: As for the DPKeras class.

    #### Formal guarantee

    This is one Gaussian release of `sum of clipped records + (B / b) sum of clipped groups`,
    accounted for as a whole, then post-processing. One record moves one group's gradient by at most
    twice `batch_l2_norm_clip` (not once, as the paper says).

    ```python
    >>> import tfp_dpvi as dpvi
    >>> make = dpvi.optimizers.make_termwise_optimizer_class(dpvi.keras.optimizers.{name})
    >>> make(l2_norm_clip=1.0, batch_l2_norm_clip=0.01, num_partitions=4).noise
    'blocks'

    ```
    """


@functools.cache
def make_termwise_optimizer_class(keras_optimizer_class: type) -> type:
    """Returns a subclass of a Keras optimizer class, named `TermwiseDPKeras<Name>Optimizer`.

    ```python
    >>> make_termwise_optimizer_class(keras.optimizers.Nadam).__name__
    'TermwiseDPKerasNadamOptimizer'

    ```

    Args:
      keras_optimizer_class: A subclass of `keras.optimizers.Optimizer` that is not legacy.

    Raises:
      TypeError: The argument is no such class.
    """
    base = make_dp_optimizer_class(keras_optimizer_class)
    name = f"TermwiseDPKeras{keras_optimizer_class.__name__}Optimizer"
    body = {"__doc__": _DOC.format(name=keras_optimizer_class.__name__), "__module__": __name__}
    return register_keras_serializable("tfp_dpvi", name)(
        type(name, (TermwiseOptimizer, base), body)
    )


TermwiseDPKerasSGDOptimizer = make_termwise_optimizer_class(keras.optimizers.SGD)
TermwiseDPKerasAdamOptimizer = make_termwise_optimizer_class(keras.optimizers.Adam)
TermwiseDPKerasAdagradOptimizer = make_termwise_optimizer_class(keras.optimizers.Adagrad)
