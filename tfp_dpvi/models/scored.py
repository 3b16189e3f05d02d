"""Refusals and warnings of a `DPVI` that learns by scoring steps, which ignore some settings."""

from __future__ import annotations

import logging
from typing import Protocol

from tfp_dpvi import _validate as check
from tfp_dpvi._tf import Structure, keras, tf
from tfp_dpvi.calibrated.state import Calibration
from tfp_dpvi.callbacks import PrivateBackupAndRestore
from tfp_dpvi.data import Records
from tfp_dpvi.models.saving import IS_WRITING
from tfp_dpvi.optimizers import ScoringOptimizer

LOG = logging.getLogger("tfp_dpvi")
_SETS_RATE = (keras.callbacks.ReduceLROnPlateau, keras.callbacks.LearningRateScheduler)
_USUAL = {"clipping": "paired", "gradients": "aligned", "num_draws": 1}


class Scored(Protocol):
    """A model that can learn by scoring steps: a `DPVI`."""

    clipping: str
    gradients: str
    num_draws: int
    optimizer: ScoringOptimizer

    @property
    def calibration(self) -> Calibration:
        """The state of the paired clip, which has a pilot's inputs."""

    @property
    def has_scored(self) -> bool:
        """Returns whether scoring steps are prepared."""

    @property
    def generative(self) -> bool:
        """Returns whether records have no inputs."""


def refuse_settings(model: Scored) -> None:
    """Raises `ValueError` for settings of gradients.

    Args:
      model: The model.
    """
    for name, usual in _USUAL.items():
        value = getattr(model, name)
        if value != usual:
            raise ValueError(
                f"{name}={value!r} is for an optimizer: pass one to compile, "
                f"such as\nDPKerasAdamOptimizer(l2_norm_clip=1.0); or leave {name} out."
            )


def warn_of_surrogate(surrogate_posterior: check.Unchecked) -> None:
    """Warns of a surrogate that a user chose, unless by name.

    Args:
      surrogate_posterior: The argument of `DPVI`.
    """
    if not isinstance(surrogate_posterior, str):
        LOG.warning(
            "surrogate_posterior is not trained by scoring steps, which start at the prior's "
            "middle: read `posterior`, or pass an optimizer such as DPKerasAdamOptimizer."
        )


def warn_of_untrained(what: str) -> None:
    """Warns of a surrogate that is read.

    Args:
      what: "surrogate_posterior", after a fit, or "posterior", without one.
    """
    if IS_WRITING.get():  # Keras reads all attributes.
        return
    if what == "surrogate_posterior":
        LOG.warning(
            "surrogate_posterior: scoring steps left it as it was: read `posterior`, or draws "
            "by `posterior_sample`."
        )
    else:
        LOG.warning(
            "posterior: there is none before a fit by scoring steps has ended, or after other "
            "weights were set: this is the prior. Fit, or load a .keras or .weights.h5 file."
        )


def refuse_callbacks(callbacks: check.Unchecked, num_replicas: int) -> None:
    """Raises `ValueError` for callbacks without effect, and for several devices.

    Args:
      callbacks: The user's callbacks, as `fit` takes them.
      num_replicas: The number of devices.
    """
    for each in getattr(callbacks, "callbacks", tf.nest.flatten(callbacks or [])):
        if isinstance(each, PrivateBackupAndRestore):
            raise ValueError(
                "PrivateBackupAndRestore: a backup does not hold the coordinates of scoring steps. "
                "Leave it out: they take seconds; or pass an optimizer to compile."
            )
        if isinstance(each, _SETS_RATE):
            raise ValueError(
                f"callbacks: {type(each).__name__} sets a learning rate, but scoring steps have "
                "no learning rate: leave it out, or pass an optimizer to compile."
            )
        if isinstance(each, keras.callbacks.ModelCheckpoint):
            raise ValueError(
                "callbacks: ModelCheckpoint would save no posterior, which exists after the last "
                "of the scoring steps: leave it out, and save the model after the fit."
            )
    if num_replicas > 1:
        raise ValueError(
            "compile without an optimizer makes steps on one device: build the model outside "
            "of the strategy's scope, or pass an optimizer to compile."
        )


def inputs_for(model: Scored, given: Structure | None, records: Records) -> Structure | None:
    """Returns the public inputs of a fit or of a pilot; None if earlier ones hold, or none.

    It warns if the model has lost its inputs.

    Args:
      model: The model.
      given: The argument of `fit`.
      records: The records of the fit.

    Raises:
      ValueError: The records are persons, and a pilot has simulated rows.
    """
    if given is not None:
        return given
    inputs = model.calibration.pilot_inputs(records)
    has_none = inputs is None and not model.has_scored and not model.generative
    if has_none and model.optimizer.with_inputs:
        LOG.warning(
            "public_inputs are missing: this model lacks those of its pilot or of an earlier fit, "
            "which a file does not keep, and takes x as standard normal. Pass public_inputs, or "
            "call dpvi.pilot on this model."
        )
    return inputs


def note_inputs(model: Scored, given: Structure | None, inputs: Structure | None) -> None:
    """Notes, once they were not refused, that a fit has inputs.

    Args:
      model: The model.
      given: The argument of `fit`.
      inputs: What `inputs_for` returned.
    """
    if given is not None:
        model.calibration.has_later_inputs = True
    if inputs is not None:
        model.optimizer.with_inputs = True
