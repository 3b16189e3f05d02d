"""The optimizers of scoring steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tfp_dpvi import _validate as check
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
      with_inputs: Whether the model has had public inputs, which its file does not keep.

    ```python
    >>> ScoringOptimizer().clip.bound
    1.0
    >>> ScoringOptimizer(with_inputs=True).get_config()
    {'noise_multiplier': None, 'with_inputs': True}

    ```

    #### Formal guarantee

    That of `DPKerasSGDOptimizer`.
    """

    def __init__(self, noise_multiplier: float | None = None, with_inputs: bool = False) -> None:
        super().__init__(l2_norm_clip=1.0, noise_multiplier=noise_multiplier)
        self.with_inputs = with_inputs

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {"noise_multiplier": self.noise_multiplier, "with_inputs": self.with_inputs}

    def __setattr__(self, name: str, value: check.Unchecked) -> None:
        """Sets an attribute, but no learning rate, which the steps would ignore."""
        if name in ("learning_rate", "lr"):
            raise AttributeError(f"{name}: scoring steps have none, and nothing to choose.")
        super().__setattr__(name, value)

    def build(self, var_list: Sequence[tf.Variable]) -> None:
        """Takes the variables of the next fit, which exist only once its records are known.

        Args:
          var_list: The variables.
        """
        forget_variables(self)
        super().build(var_list)


@register_keras_serializable("tfp_dpvi", "InformationOptimizer")
class InformationOptimizer(make_dp_optimizer_class(Subtract)):  # type: ignore[misc]
    """Makes the local steps of a federated study as long as the information says.

    There is no learning rate: see `tfp_dpvi.federated.scoring`. For mean-field studies.

    Args:
      l2_norm_clip: C > 0, the bound on the l2 norm of one record's score.
      noise_multiplier: As of the other optimizers: None for hospitals to calibrate it, 0 without
        privacy.
      information: The information of one record about one coordinate that is expected before
        anything is known, a public number; too large a one makes first steps shorter. By default
        half of C^2 over the number of coordinates. It is needed without a clip.
      **kwargs: Of a saved configuration; not used.

    Raises:
      ValueError: The clip is off and there is no `information`, or one is not positive.

    ```python
    >>> InformationOptimizer(l2_norm_clip=2.0).clip.bound
    2.0

    ```

    #### Formal guarantee

    That of `DPKerasSGDOptimizer`.
    """

    def __init__(
        self,
        l2_norm_clip: float,
        noise_multiplier: float | None = None,
        information: float | None = None,
        **kwargs: Any,
    ) -> None:
        kept = {"clipping": kwargs.get("clipping", "flat")}
        super().__init__(l2_norm_clip=l2_norm_clip, noise_multiplier=noise_multiplier, **kept)
        if information is None and self.clip.finite_bound is None:
            raise ValueError(
                "information is needed where no clip bounds it: pass that of a record."
            )
        self.information = (
            None if information is None else check.positive("information", information)
        )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments."""
        return {**super().get_config(), "information": self.information}
