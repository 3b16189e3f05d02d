"""The methods by which a private model differs from others, in one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tfp_dpvi._tf import Optimizer, Structure, tf
from tfp_dpvi.data import Records
from tfp_dpvi.export import ExportedFunction
from tfp_dpvi.gradients import ClippedGradient, StepSpec
from tfp_dpvi.sampling import BatchNeeds
from tfp_dpvi.training import Mechanism


class Hooks(Protocol):
    """The methods by which a private model differs from others.

    `DPModel` has a default for each. A model of one's own overrides `record_loss` and perhaps
    `data_independent_loss`; the other hooks are for families of models, as `DPVI` and `DPVAE` are.

    #### Formal guarantee

    Only `record_loss`, `test_losses`, `compared` and `check_labels` see values of records, and of
    these only what passes through the clip of `clipped_gradient` is released. A hook that returns
    something else computed from records breaks the guarantee.
    """

    # ------------------------------------------------------------------ the loss

    def record_loss(self, x: Structure, y: Structure | None = None) -> tf.Tensor:
        """Returns the loss of one record, a scalar.

        Args:
          x: The record's part of `fit`'s x, without a batch dimension.
          y: Likewise of y, or None.
        """

    def data_independent_loss(self, num_records: int) -> tf.Tensor | None:
        """Returns loss terms of no record, neither clipped nor noised (contract 2), or None."""

    def losses_of_record(self) -> list[tf.Tensor]:
        """Returns the losses that layers added in the latest call of `record_loss`."""

    def clipped_gradient(self, spec: StepSpec) -> ClippedGradient:
        """Returns the clipped gradient with its sensitivity (contract 3) for a step's size."""

    @property
    def batch_needs(self) -> BatchNeeds:
        """The memory and the form that the clipped gradient needs of a physical batch."""

    @property
    def record_dtype(self) -> np.dtype:
        """The float type that records are cast to."""

    @property
    def takes_texts(self) -> bool:
        """True if x may have texts, which layers look up in public vocabularies."""

    @property
    def takes_persons(self) -> bool:
        """True if a record may be a person with several rows: an x that is a `UnitRows`."""

    # ------------------------------------------------------------------ before a fit

    def prepare(self, records: Records) -> None:
        """Creates the variables for records of these shapes and dtypes, without reading values."""

    def check_records(self, records: Records) -> None:
        """Raises if records of these shapes and dtypes do not fit the model."""

    def check_labels(self, records: Records) -> None:
        """Raises if values have probability zero under the model.

        This is the curator's check of the data, outside the guarantee.
        """

    def default_optimizer(self, noise_multiplier: float | None) -> Optimizer:
        """Returns the optimizer of `compile` without one, or raises `ValueError`.

        Args:
          noise_multiplier: Its noise, or None for `compile` to calibrate it.
        """

    def learned_variables(self) -> Sequence[tf.Variable]:
        """Returns the variables that steps update."""

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Raises if an optimizer does not fit the model; called by `compile`."""

    def before_fit(self, num_steps: int) -> None:
        """Runs before a fit of so many steps spends privacy."""

    # ------------------------------------------------------------------ during and after a fit

    def boundaries(self, num_steps: int) -> Sequence[int]:
        """Returns the numbers of steps of a fit after which `advance` is called.

        Args:
          num_steps: The number of steps that the fit plans.
        """

    def advance(
        self, step: int, num_steps: int, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> None:
        """Changes variables of the step, from released values, between two steps of a fit.

        Args:
          step: The number of steps that ran.
          num_steps: The number that the fit plans.
          accumulated: The accumulators over released values, by name.
          mechanism: What released them.
        """

    def drop_predictions(self) -> None:
        """Drops traced predictions that hold values of a fit as constants.

        Runs before and after a fit.
        """

    def fault_of_variables(self, thorough: bool) -> str | None:
        """Returns a reason to stop training, from released values, or None.

        Args:
          thorough: Whether to run slower checks too.
        """

    def released_logs(
        self, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> dict[str, float]:
        """Returns logs from a fit's accumulators over released values.

        Args:
          accumulated: The accumulators, by the name of the joint release.
          mechanism: What released them.
        """

    def after_fit(self) -> None:
        """Runs after a fit, also after one that failed."""

    # ------------------------------------------------------------------ what is learned

    def test_losses(self, x: Structure, y: Structure | None) -> tf.Tensor:
        """Returns the losses of a batch of records for `evaluate`, shape [n].

        Args:
          x: A batch of records.
          y: Their outcomes, or None.
        """

    def compared(self, x: Structure, y: Structure | None) -> tuple[Structure, tf.Tensor]:
        """Returns target and prediction of a batch, for validation metrics.

        Args:
          x: A batch of records.
          y: Their outcomes, or None.
        """

    @property
    def weight_groups(self) -> dict[str, Sequence[tf.Variable]]:
        """The trainable variables by part of the model, for TensorBoard."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """Sentences for the privacy report."""

    def export_functions(self, inputs: dict[str, Any]) -> list[ExportedFunction]:
        """Returns the signatures of `export` for `tf.TensorSpec`s of x and, if any, y."""
