"""What a private model remembers beside its weights."""

from __future__ import annotations

import threading
import uuid

from tfp_dpvi._tf import Metric, Structure, keras, tf
from tfp_dpvi.gradients import JointRelease
from tfp_dpvi.metrics import EpsilonSpent
from tfp_dpvi.privacy import PrivacyLedger, PrivacyPlan
from tfp_dpvi.training.budget import PrivacyTarget
from tfp_dpvi.training.compiled import CompiledSteps
from tfp_dpvi.training.fit import PrivateFit, Progress
from tfp_dpvi.training.mechanism import Mechanism


class State:
    """Everything of a model that concerns privacy. A plain object, so that no checkpoint holds a key or a ledger."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.fitting = threading.Lock()
        self.ledger = PrivacyLedger()
        self.identity = uuid.uuid4().hex
        self.target: PrivacyTarget | None = None
        self.progress = Progress()
        self.plan: PrivacyPlan | None = None
        self.compiled: CompiledSteps | None = None
        self.running: PrivateFit | None = None
        self.accumulated: dict[str, Structure] = {}
        self.mechanism: Mechanism | None = None
        self.inputs: dict[str, tf.TensorSpec] | None = None
        self.num_records: int | None = None
        self.num_records_declared = False
        self.validation_metrics: list[Metric] = []
        self.private_metrics: tuple[JointRelease, ...] = ()
        self.unsafe_validation = False
        self.steps_per_execution_is_set = False
        self.epsilon_metric = EpsilonSpent()
        self.loss_metric = keras.metrics.Mean(name="loss")
