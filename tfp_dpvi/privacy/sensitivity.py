"""The sensitivity of released sums to one record (contract 3)."""

import dataclasses
from typing import Any, TypeAlias

from tfp_dpvi import _validate as check

#: A JSON object, as `json.loads` returns it.
Json: TypeAlias = dict[str, Any]


# Noise in a smaller unit has no float.
_SMALLEST = 1e-100


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """L2 sensitivity of a released sum, in units of `l2_norm_clip`.

    Attributes:
      add_or_remove: A, the sensitivity to adding or removing one record.
      replace: D, the sensitivity to replacing one record by another; never above 2 A.

    Raises:
      ValueError: A number is not positive, or D is above 2 A.

    A plain clip of each record's contribution has the default. A record that adds a non-negative
    vector moves the sum by less when it is replaced:

    ```python
    >>> Sensitivity()
    Sensitivity(add_or_remove=1.0, replace=2.0)
    >>> Sensitivity(add_or_remove=1.0, replace=2.0**0.5).replace
    1.4142135623730951

    ```
    """

    add_or_remove: float = 1.0
    replace: float = 2.0

    def __post_init__(self) -> None:
        a = check.positive("add_or_remove", self.add_or_remove)
        d = check.positive("replace", self.replace)
        if min(a, d) < _SMALLEST:
            raise ValueError(
                f"add_or_remove={a} and replace={d} must be at least {_SMALLEST:g}; pass them in "
                "units of l2_norm_clip."
            )
        if d > 2.0 * a * (1.0 + 1e-9):
            raise ValueError(
                f"replace={self.replace!r} must be at most twice add_or_remove={a}; pass a larger "
                "add_or_remove."
            )
        object.__setattr__(self, "add_or_remove", a)
        object.__setattr__(self, "replace", d)


#: The sensitivity of a plain clip of each record's contribution: A = 1, D = 2.
PER_RECORD_CLIP = Sensitivity()
