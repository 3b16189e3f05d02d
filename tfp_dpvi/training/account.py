"""The account of a model, saved with it: the privacy that it has spent, and its progress."""

from __future__ import annotations

import dataclasses

from tfp_dpvi._tf import Structure
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan


@dataclasses.dataclass
class Progress:
    """The progress of a model over all its fits.

    Attributes:
      steps: The number of private steps that ran.
      epochs: The number of epochs, a partial last one included.
    """

    steps: int = 0
    epochs: float = 0.0


@dataclasses.dataclass(eq=False)
class Account:
    """The privacy that a model has spent on its data, and what the report says of these.

    It holds no record and no key, and is saved with the model.

    Attributes:
      ledger: All releases from these data.
      progress: The steps and epochs that ran.
      plan: The plan of the last fit, or None before the first.
      inputs: Shapes and dtypes of the records, {"x": ..., "y": ...}, or None before the first fit.
      num_records: The public number of records N, or None before the first fit.
      num_records_declared: True if N was declared, False if it is the number of rows.
    """

    ledger: PrivacyLedger = dataclasses.field(default_factory=PrivacyLedger)
    progress: Progress = dataclasses.field(default_factory=Progress)
    plan: PrivacyPlan | None = None
    inputs: dict[str, Structure] | None = None
    num_records: int | None = None
    num_records_declared: bool = False
