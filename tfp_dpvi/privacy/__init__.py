"""Privacy accounting: plans, accountants, calibration, the ledger and the report.

Pure Python on dp_accounting, NumPy and SciPy: nothing here imports TensorFlow.
"""

from dp_accounting import NeighboringRelation

from tfp_dpvi.privacy.curve import EpsilonCurve
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.ledger import LedgerEntry, PrivacyLedger
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.report import PrivacyReport
from tfp_dpvi.privacy.sampling_schemes import (
    FullBatch,
    PoissonSampling,
    SamplingScheme,
    scheme_from_json,
)
from tfp_dpvi.privacy.sensitivity import Sensitivity

__all__ = [
    "BudgetExhaustedError",
    "EpsilonCurve",
    "FullBatch",
    "LedgerEntry",
    "LedgerError",
    "NeighboringRelation",
    "PoissonSampling",
    "PrivacyLedger",
    "PrivacyPlan",
    "PrivacyReport",
    "SamplingScheme",
    "Sensitivity",
    "UnsupportedPairError",
    "scheme_from_json",
]
