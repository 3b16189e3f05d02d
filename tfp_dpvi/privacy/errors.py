"""Exceptions of the privacy accounting."""


class BudgetExhaustedError(RuntimeError):
    """Raised if the privacy budget does not allow a call, which then spends no privacy.

    ```python
    >>> from tfp_dpvi.privacy import FullBatch, PrivacyLedger, PrivacyPlan
    >>> ledger = PrivacyLedger(budget_epsilon=0.1, budget_delta=1e-5)
    >>> try:
    ...     ledger.reserve(PrivacyPlan(FullBatch(), noise_multiplier=1.0, num_releases=1), steps=1)
    ... except BudgetExhaustedError as error:
    ...     print(str(error).split(";")[0])
    steps=1: the budget of epsilon 0.1 at delta 1e-05 does not allow them

    ```
    """


class UnsupportedPairError(ValueError):
    """Raised if a sampling scheme, neighboring relation and accountant have no sound accounting.

    ```python
    >>> from tfp_dpvi.privacy import FixedSizeSampling, PrivacyPlan
    >>> try:
    ...     PrivacyPlan(FixedSizeSampling(1000, 10), noise_multiplier=1.0, num_releases=1)
    ... except UnsupportedPairError as error:
    ...     print(str(error).split(";")[0])
    sampling='fixed_size' is not supported under add_or_remove_one

    ```
    """


class LedgerError(RuntimeError):
    """Raised if a privacy ledger cannot be read or written, or a call contradicts its contents.

    ```python
    >>> from tfp_dpvi.privacy import PrivacyLedger
    >>> try:
    ...     PrivacyLedger().confirm(reservation=1)
    ... except LedgerError as error:
    ...     print(str(error).split(",")[0])
    reservation=1 is unknown

    ```
    """
