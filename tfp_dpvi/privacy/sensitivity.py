"""How far one record can move a clipped sum (contract C3): A for presence, D for replacement."""

import dataclasses

from tfp_dpvi.privacy import _validation as check


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """L2 sensitivity of a released sum, in units of `l2_norm_clip`.

    Whoever clips states it, and a replay test holds them to it. A plain per-record clip has the
    default: a record's presence moves the sum by at most one clip, its replacement by two.

    Attributes:
      add_or_remove: A, the most that a record's presence can move the sum against its absence.
      replace: D, the most that replacing one record by another can move the sum; never above 2 A.

    Raises:
      TypeError, ValueError: where a value is not a positive number, or D exceeds 2 A.
    """

    add_or_remove: float = 1.0
    replace: float = 2.0

    def __post_init__(self) -> None:
        a = check.positive("add_or_remove", self.add_or_remove)
        d = check.positive("replace", self.replace)
        if d > 2.0 * a * (1.0 + 1e-9):
            raise ValueError(
                f"replace={self.replace!r} must be at most twice add_or_remove={a}: a replacement is "
                "one removal and one addition. State the larger add_or_remove."
            )
        object.__setattr__(self, "add_or_remove", a)
        object.__setattr__(self, "replace", d)

    def to_json(self) -> dict[str, float]:
        """Returns a JSON-ready dictionary."""
        return {"add_or_remove": self.add_or_remove, "replace": self.replace}

    @classmethod
    def from_json(cls, data: dict[str, float]) -> "Sensitivity":
        """Rebuilds the value from `to_json`."""
        return cls(add_or_remove=data["add_or_remove"], replace=data["replace"])


#: What a plain clip of each record's contribution has: A = 1, D = 2.
PER_RECORD_CLIP = Sensitivity()
