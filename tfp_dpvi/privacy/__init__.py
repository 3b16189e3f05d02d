"""Privacy accounting: plans, accountants, calibration, the ledger and the report.

Pure Python with dp_accounting, NumPy and SciPy; does not import TensorFlow.
"""

from dp_accounting import NeighboringRelation

from tfp_dpvi import _deprecation
from tfp_dpvi.privacy.accountants import ACCOUNTANTS, Accountant, get_accountant
from tfp_dpvi.privacy.budgets import RenyiFilter
from tfp_dpvi.privacy.curve import EpsilonCurve
from tfp_dpvi.privacy.errors import BudgetExhaustedError, LedgerError, UnsupportedPairError
from tfp_dpvi.privacy.ledger import LedgerEntry, PrivacyLedger
from tfp_dpvi.privacy.plan import PrivacyPlan
from tfp_dpvi.privacy.report import PrivacyReport
from tfp_dpvi.privacy.sampling import (
    EachRecordOncePerEpoch,
    FixedSizeSampling,
    FullBatch,
    PoissonSampling,
    RandomTrials,
    SamplingScheme,
    scheme_from_json,
)
from tfp_dpvi.privacy.sensitivity import Sensitivity
from tfp_dpvi.privacy.summed import SumPrices, price_sum
from tfp_dpvi.privacy.termwise import (
    TermwiseNoise,
    block_sensitivity,
    termwise_noise,
)
from tfp_dpvi.privacy.tradeoff import AttackBound
from tfp_dpvi.privacy.unit import PersonUnit

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "AttackBound",
    "BudgetExhaustedError",
    "EachRecordOncePerEpoch",
    "EpsilonCurve",
    "FixedSizeSampling",
    "FullBatch",
    "LedgerEntry",
    "LedgerError",
    "NeighboringRelation",
    "PersonUnit",
    "PoissonSampling",
    "PrivacyLedger",
    "PrivacyPlan",
    "PrivacyReport",
    "RandomTrials",
    "RenyiFilter",
    "SamplingScheme",
    "Sensitivity",
    "SumPrices",
    "TermwiseNoise",
    "UnsupportedPairError",
    "block_sensitivity",
    "get_accountant",
    "price_sum",
    "scheme_from_json",
    "termwise_noise",
]

__getattr__ = _deprecation.old_names(__name__)
