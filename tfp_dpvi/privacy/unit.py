"""`PersonUnit`: persons with several rows as the unit of privacy."""

import dataclasses

from tfp_dpvi import _validate as check
from tfp_dpvi.privacy.sensitivity import Json

ROWS_BEYOND = ("random", "first")


@dataclasses.dataclass(frozen=True)
class PersonUnit:
    """A person with at most m rows as the unit of privacy: what is public about it.

    Attributes:
      max_rows: The public number m. How many rows were left out is not known here.
      rows_beyond: "random" if m rows of a person with more are chosen at random, by a choice that
        depends on no other person; "first" if they are the first m.

    ```python
    >>> print(PersonUnit(5, rows_beyond="random").in_words)
    at most 5 rows of each person; of persons with more, 5 chosen at random

    ```
    """

    max_rows: int
    rows_beyond: str = "random"

    def __post_init__(self) -> None:
        check.count("max_rows", self.max_rows, 1)
        check.one_of("rows_beyond", self.rows_beyond, ROWS_BEYOND)

    @property
    def in_words(self) -> str:
        """Which rows of a person take part."""
        rows = "1 row" if self.max_rows == 1 else f"{self.max_rows} rows"
        chosen = f"{self.max_rows} chosen at random"
        kept = chosen if self.rows_beyond == "random" else f"the first {self.max_rows}"
        return f"at most {rows} of each person; of persons with more, {kept}"

    @classmethod
    def from_json(cls, data: Json) -> "PersonUnit":
        """Rebuilds a unit from the dictionary of its attributes.

        Args:
          data: A JSON object with both attributes.

        Raises:
          ValueError, TypeError: It is none.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**check.fields("person", data, needed=names, known=names))
