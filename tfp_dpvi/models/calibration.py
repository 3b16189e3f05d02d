"""The paired clip and the calibrated posterior of one `DPVI`: whether they apply, and what they have come to."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from tfp_dpvi._tf import Structure
from tfp_dpvi.data import Records
from tfp_dpvi.gradients import Clip
from tfp_dpvi.models.calibrated import FAILURES, Calibrated, Calibrator, window_in
from tfp_dpvi.models.coordinates import Coordinates
from tfp_dpvi.models.pairing import CannotPairError, Pairing
from tfp_dpvi.training import Mechanism

if TYPE_CHECKING:
    from tfp_dpvi.models.dpvi import DPVI
    from tfp_dpvi.models.simulation import PairSimulator

LOG = logging.getLogger("tfp_dpvi")


class Calibration:
    """Holds what a model with `clipping="paired"` needs beside its surrogate.

    Args:
      model: the model.

    Attributes:
      pairing: the paired clip, or None where it does not apply.
      simulator: of a pilot, or None.
    """

    def __init__(self, model: DPVI) -> None:
        self._model = model
        self.pairing: Pairing | None = None
        self.simulator: PairSimulator | None = None
        self._kind: object = None
        self._calibrator: Calibrator | None = None
        self._loaded: Calibrated | None = None
        self._made: tuple[object, Calibrated | None] = (None, None)

    def prepare(self, records: Records, specs: Structure) -> None:
        """Finds out, once for each kind of records, whether the paired clip applies; says so where it does not.

        Args:
          records: one or more, for their shapes.
          specs: their shapes and dtypes.
        """
        kind = (str(specs), records.sample_weight is None)
        if kind == self._kind:
            return
        self._kind, self._calibrator, self.pairing = None, None, None
        try:
            self.pairing = Pairing(self._model, records)
        except CannotPairError as reason:
            self._refuse(str(reason))
        self._kind = kind

    def pairing_for(self, clip: Clip) -> Pairing | None:
        """Returns the paired clip where it applies to the records of `prepare` and to the optimizer's clip, else None."""
        if self.pairing is not None and clip.clipping != "flat":
            self.pairing = self._kind = None
            self._refuse(f"the optimizer's clipping={clip.clipping!r} is not one length for all")
        return self.pairing

    @staticmethod
    def _refuse(reason: str) -> None:
        LOG.warning('clipping="paired" does not apply: %s. The posterior is the raw surrogate, not calibrated.', reason)

    def posterior(self, accumulated: dict[str, Structure], mechanism: Mechanism | None) -> Calibrated | None:
        """Returns the calibrated posterior of the last fit, or of the file that the model was loaded from; None without one.

        Args:
          accumulated: the last fit's accumulators.
          mechanism: of the last fit, or None before the first.
        """
        if mechanism is None:
            return self._loaded
        if self._made[0] is not accumulated:
            if "curvature" not in accumulated or self.pairing is None:
                return None
            if self._calibrator is None:
                self._calibrator = Calibrator(self.pairing, self._model.surrogate_posterior, self.simulator)
            found = self._found(accumulated, mechanism)
            self._made = (accumulated, found)
            for sentence in [] if found is None else found.checks.warnings:
                LOG.warning("Do not trust the posterior's intervals: %s.", sentence)
        return self._made[1]

    def _found(self, accumulated: dict[str, Structure], mechanism: Mechanism) -> Calibrated | None:
        assert self._calibrator is not None
        try:
            found = self._calibrator(accumulated, mechanism)
        except FAILURES as error:
            LOG.warning("The released values give no posterior (%s): `posterior` is the raw surrogate.", error)
            return None
        if found is None:
            LOG.warning("The fit was too short for a calibrated posterior: `posterior` is the raw surrogate.")
        return found

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Takes a posterior from `Calibrated.to_arrays`, or none, in place of the last fit's."""
        model = self._model
        model._dp.accumulated, model._dp.mechanism = {}, None
        model.predict_function = model.test_function = None
        self._loaded = Calibrated.from_arrays(arrays, Coordinates(self._model.prior)) if arrays else None

    def use(self, simulator: PairSimulator) -> None:
        """Takes a pilot's simulator, for the posteriors of later fits."""
        self.simulator, self._calibrator = simulator, None

    @staticmethod
    def logs(accumulated: dict[str, Structure], mechanism: Mechanism) -> dict[str, float]:
        """Returns kappa, and the curvature's length over that of its noise, once there is a window."""
        if "curvature" not in accumulated:
            return {}
        window = window_in(accumulated, mechanism)
        return {} if window is None else {"kappa": window.kappa, "curvature_signal": window.curvature_signal}
