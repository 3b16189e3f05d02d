"""Exceptions of the privacy accounting."""


class BudgetExhaustedError(RuntimeError):
    """Raised if the privacy budget does not allow a call, which then spends no privacy."""


class UnsupportedPairError(ValueError):
    """Raised if no sound accounting is known for a sampling scheme, neighboring relation and accountant."""


class LedgerError(RuntimeError):
    """Raised if a privacy ledger cannot be read, locked or written, or a call contradicts its contents."""
