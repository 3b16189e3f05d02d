"""The private state of a model: what is compiled, saved, running and released."""

from __future__ import annotations

import dataclasses
import threading

from tfp_dpvi._tf import Metric, Structure, keras
from tfp_dpvi.gradients import JointRelease
from tfp_dpvi.metrics import EpsilonSpent
from tfp_dpvi.training import Mechanism
from tfp_dpvi.training.account import Account
from tfp_dpvi.training.budget import PrivacyTarget
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.fit import PrivateFit


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """The settings of `compile`: all of them, or a model has none.

    Attributes:
      target: The privacy settings.
      steps: The compiled steps of these settings.
      private_metrics: Metrics that are released with every step.
      validation_metrics: Keras metrics of records outside the training data.
      steps_per_execution_is_set: True if the user chose the number of steps of a call.
    """

    target: PrivacyTarget
    steps: CompiledSteps
    private_metrics: tuple[JointRelease, ...]
    validation_metrics: tuple[Metric, ...]
    steps_per_execution_is_set: bool


@dataclasses.dataclass(frozen=True, eq=False)
class FitReleases:
    """The releases of the last fit besides the weights.

    Attributes:
      accumulated: Accumulators over released values, by the name of the joint release.
      mechanism: The mechanism that released them, with its noise.
    """

    accumulated: dict[str, Structure]
    mechanism: Mechanism


@dataclasses.dataclass(frozen=True, eq=False)
class OwnMetrics:
    """The metrics that every model shows, whatever `compile` sets.

    Attributes:
      epsilon: The epsilon spent.
      loss: The mean loss of evaluated records.
    """

    epsilon: EpsilonSpent = dataclasses.field(default_factory=EpsilonSpent)
    loss: Metric = dataclasses.field(default_factory=lambda: keras.metrics.Mean(name="loss"))


@dataclasses.dataclass(eq=False)
class State:
    """The state of a private model. A plain object, so that no checkpoint holds a key or a ledger.

    Attributes:
      seed: The model's seed, or None for keys from the operating system.
      account: What is saved with the model.
      compiled: What `compile` set, or None before it.
      running: The fit that runs, or None.
      released: What the last fit released, or None before the first.
      unsafe_validation: True while exact losses of private validation records are shown.
      lock: Held by the fit that runs.
      metrics: The metrics that every model shows.
    """

    seed: int | None
    account: Account = dataclasses.field(default_factory=Account)
    compiled: Compiled | None = None
    running: PrivateFit | None = None
    released: FitReleases | None = None
    unsafe_validation: bool = False
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    metrics: OwnMetrics = dataclasses.field(default_factory=OwnMetrics)

    def compiled_for(self, call: str) -> Compiled:
        """Returns what `compile` set.

        Raises:
          RuntimeError: A method, such as "DPVI.fit", was called before `compile`.
        """
        if self.compiled is None:
            raise RuntimeError(f"{call} was called before compile: call compile first.")
        return self.compiled

    @property
    def target(self) -> PrivacyTarget | None:
        """The privacy settings of `compile`, or None before it."""
        return None if self.compiled is None else self.compiled.target

    def refuse_while_fitting(self, call: str) -> None:
        """Raises `RuntimeError` if a fit runs, whose settings cannot change."""
        if self.lock.locked():
            raise self.fit_is_running(call)

    @staticmethod
    def fit_is_running(call: str) -> RuntimeError:
        """Returns the error of a call that must wait for a fit."""
        return RuntimeError(
            f"{call} was called while fit runs, by a callback or in another thread, when the "
            "settings cannot change. Call "
            f"{call} after fit has returned; this call spent no privacy."
        )
