"""Errors that the accounting raises on purpose."""


class BudgetExhaustedError(RuntimeError):
    """The privacy budget does not allow what was asked; nothing was spent by the refused call."""


class UnsupportedPairError(ValueError):
    """A sampling scheme has no sound price under the asked adjacency and accountant."""


class LedgerError(RuntimeError):
    """A privacy ledger cannot be read, locked or written, or a call contradicts what it holds."""
