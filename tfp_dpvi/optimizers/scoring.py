"""The optimizer of scoring steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfp_dpvi._tf import Subtract, forget_variables, register_keras_serializable, tf
from tfp_dpvi.optimizers.dp_keras import make_dp_optimizer_class


@register_keras_serializable("tfp_dpvi", "ScoringOptimizer")
class ScoringOptimizer(make_dp_optimizer_class(Subtract)):  # type: ignore[misc]
    """Applies scoring steps as they are: a model computes them in coordinates of its own.

    Clip and learning rate are 1, since scores are whitened: see `tfp_dpvi.calibrated.scoring`.
    `DPVI.compile` without an optimizer uses it.

    Args:
      noise_multiplier: The noise's standard deviation over the clip; None for
        `compile(epsilon=, delta=)` to calibrate it.
      **kwargs: Of a saved configuration; not used.

    ```python
    >>> ScoringOptimizer().clip.bound
    1.0

    ```

    #### Formal guarantee

    That of `DPKerasSGDOptimizer`.
    """

    def __init__(self, noise_multiplier: float | None = None, **kwargs: Any) -> None:
        del kwargs
        super().__init__(l2_norm_clip=1.0, noise_multiplier=noise_multiplier)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Takes the variables of the next fit, which exist only once its records are known.

        Args:
          var_list: The variables.
        """
        forget_variables(self)
        super().build(var_list)
