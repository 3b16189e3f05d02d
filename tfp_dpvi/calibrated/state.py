"""The state of a model with `clipping="paired"`, besides its surrogate."""

from __future__ import annotations

import dataclasses
import logging
import math

import numpy as np

from tfp_dpvi._tf import Structure, tfd
from tfp_dpvi.bayes.model import BayesianModel
from tfp_dpvi.calibrated.pairing import Pairing
from tfp_dpvi.calibrated.posterior import FAILURES, Calibrated, Calibrator
from tfp_dpvi.calibrated.requirements import CannotPairError, check_settings
from tfp_dpvi.calibrated.simulation import PairSimulator
from tfp_dpvi.calibrated.window import fit_window
from tfp_dpvi.data import Records, UnitRows
from tfp_dpvi.data.shapes import specs_of
from tfp_dpvi.gradients import Clip
from tfp_dpvi.training import Mechanism

LOG = logging.getLogger("tfp_dpvi")


@dataclasses.dataclass(frozen=True)
class _Decision:
    """The decision, once for a kind of records, whether the paired clip applies.

    Attributes:
      kind: The records' shapes and the model's settings; None before the first fit.
      calibrator: The computation of posteriors, or None if the paired clip does not apply.
    """

    kind: tuple[str, bool, str, int] | None = None
    calibrator: Calibrator | None = None


@dataclasses.dataclass(frozen=True)
class _Computed:
    """A posterior, beside the released values that it was computed from.

    Attributes:
      released: The accumulators of a fit, or None before the first one.
      posterior: Their posterior, or None if they give none.
    """

    released: dict[str, Structure] | None = None
    posterior: Calibrated | None = None


class Calibration:
    """The state of a model with `clipping="paired"`, besides its surrogate.

    Args:
      model: Prior and likelihood.
      surrogate: The model's surrogate.

    Attributes:
      simulator: The pilot's simulator, or None.
      loaded: The posterior from a file, or None.
      has_later_inputs: Whether a fit had public inputs after the pilot.
    """

    def __init__(self, model: BayesianModel, surrogate: tfd.Distribution) -> None:
        self._model = model
        self._surrogate = surrogate
        self.simulator: PairSimulator | None = None
        self.loaded: Calibrated | None = None
        self.has_later_inputs = False
        self._decision = _Decision()
        self._computed = _Computed()
        # Of the last fit.
        self._reach = math.nan

    @property
    def pairing(self) -> Pairing | None:
        """The paired clip, or None if it does not apply."""
        calibrator = self._decision.calibrator
        return None if calibrator is None else calibrator.pairing

    def prepare(self, records: Records, gradients: str, num_draws: int) -> None:
        """Checks, once for each kind of records, whether the paired clip applies.

        It warns if the clip does not apply.

        Args:
          records: The records of a fit.
          gradients: "aligned" or "vectorized", as in `DPVI`.
          num_draws: Draws of the parameters in each step.

        Raises:
          ValueError: The records are persons, and a pilot has simulated rows.
        """
        self.pilot_inputs(records)
        kind = (str(specs_of(records, 1)), records.sample_weight is None, gradients, num_draws)
        if kind == self._decision.kind:
            return
        self._decision = _Decision()
        calibrator = None
        try:
            check_settings(gradients, num_draws)
            pairing = Pairing(self._model, records)
            if pairing.is_bound:
                LOG.warning(
                    "The posterior's intervals are not calibrated: the density of "
                    "dpvi.local.Variational is a bound. dpvi.local.quadrature is exact."
                )
            calibrator = Calibrator(pairing, self._surrogate, self.simulator)
        except CannotPairError as reason:
            _warn_of_refusal(str(reason))
        self._decision = _Decision(kind, calibrator)

    def pilot_inputs(self, records: Records) -> Structure | None:
        """Returns the inputs of `dpvi.pilot`, or None without a pilot or after later inputs.

        Args:
          records: The records of a fit.

        Raises:
          ValueError: The records are persons, and a pilot has simulated rows.
        """
        if self.simulator is None:
            return None
        if isinstance(records.x, UnitRows):
            raise ValueError(
                "unit_ids after dpvi.pilot, which simulated single rows: build the model anew "
                "without a pilot, or compile without an optimizer and pass public_unit_ids."
            )
        return None if self.has_later_inputs else self.simulator.x

    def pairing_for(self, clip: Clip) -> Pairing | None:
        """Returns the paired clip, or None if it does not apply to the last records.

        It does not apply to an optimizer's clip of another scheme than "flat" either: for such a
        one this warns, and the fit then has no calibrated posterior.

        Args:
          clip: The optimizer's clip.
        """
        if self.pairing is not None and clip.clipping != "flat":
            self._decision = _Decision()
            _warn_of_refusal(
                f"the optimizer's clipping={clip.clipping!r} is not one length for all"
            )
        return self.pairing

    def begin(self, reach: float) -> None:
        """Warns, before privacy is spent, of a prior far wider than a fit can move a parameter.

        Args:
          reach: How far the fit can move a parameter.
        """
        self._reach = reach
        calibrator = self._decision.calibrator
        if calibrator is None:
            return
        for sentence in calibrator.parameter_checks(reach).warnings:
            LOG.warning("Before training: %s.", sentence)

    def posterior(
        self, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> Calibrated | None:
        """Returns the calibrated posterior of the last fit; warns of what its checks say.

        Args:
          accumulated: The fit's accumulators over released values, by name.
          mechanism: The mechanism that released them.

        Returns:
          The posterior, or None if there is none.
        """
        if self._computed.released is not accumulated:
            calibrator = self._decision.calibrator
            if "curvature" not in accumulated or calibrator is None:
                return None
            posterior = self._compute(calibrator, accumulated, mechanism)
            self._computed = _Computed(accumulated, posterior)
        return self._computed.posterior

    def _compute(
        self, calibrator: Calibrator, accumulated: dict[str, Structure], mechanism: Mechanism
    ) -> Calibrated | None:
        """Computes the posterior, and warns if there is none or of its checks."""
        try:
            posterior = calibrator(accumulated, mechanism, self._reach)
        except FAILURES as error:
            LOG.warning(
                "The released values give no posterior (%s): `posterior` is the raw surrogate.",
                error,
            )
            return None
        if posterior is None:
            LOG.warning(
                "The fit was too short for a calibrated posterior: `posterior` is the raw "
                "surrogate."
            )
            return None
        for sentence in posterior.checks.warnings:
            LOG.warning("Do not trust the posterior's intervals: %s.", sentence)
        return posterior

    def load(self, arrays: dict[str, np.ndarray]) -> None:
        """Replaces the last fit's posterior by one from `Calibrated.to_arrays`, or by none."""
        self.loaded = None
        if arrays:
            self.loaded = Calibrated.from_arrays(arrays, self._model.prior)

    def use(self, simulator: PairSimulator) -> None:
        """Sets a pilot's simulator for the posteriors of later fits."""
        self.simulator = simulator
        self.has_later_inputs = False
        if self.pairing is not None:
            calibrator = Calibrator(self.pairing, self._surrogate, simulator)
            self._decision = dataclasses.replace(self._decision, calibrator=calibrator)

    @staticmethod
    def logs(accumulated: dict[str, Structure], mechanism: Mechanism) -> dict[str, float]:
        """Returns kappa and the curvature's signal-to-noise ratio, once there is a window.

        Args:
          accumulated: The fit's accumulators over released values, by name.
          mechanism: The mechanism that releases them.
        """
        window = fit_window(accumulated, mechanism) if "curvature" in accumulated else None
        if window is None:
            return {}
        return {"kappa": window.kappa, "curvature_signal": window.curvature_signal}


def _warn_of_refusal(reason: str) -> None:
    LOG.warning(
        'clipping="paired" does not apply: %s. The posterior is the raw surrogate, not calibrated.',
        reason,
    )
