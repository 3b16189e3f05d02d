"""Which sampling scheme can be priced under which adjacency, and by which accountants."""

from dp_accounting import NeighboringRelation

from tfp_dpvi.privacy.errors import UnsupportedPairError

_ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
_REPLACE = NeighboringRelation.REPLACE_ONE

#: (scheme name, adjacency) -> accountants that price the pair. Whatever is missing is refused.
SUPPORTED: dict[tuple[str, NeighboringRelation], tuple[str, ...]] = {
    ("poisson", _ADD): ("pld", "rdp", "advanced_composition"),
    ("poisson", _REPLACE): ("pld", "rdp"),
    ("full_batch", _ADD): ("pld", "rdp", "advanced_composition"),
    ("full_batch", _REPLACE): ("pld", "rdp", "advanced_composition"),
    ("fixed_size", _REPLACE): ("rdp",),
    # Not under add-or-remove: in dataset.batch(B), a record more or less moves all later ones to other batches.
    ("each_record_once_per_epoch", _REPLACE): ("pld", "rdp", "advanced_composition"),
}


def table() -> str:
    """Returns the table of supported pairs as text."""
    rows = ["  sampling                      neighboring_relation  accountants"]
    for (name, relation), accountants in SUPPORTED.items():
        rows.append(f"  {name:<28}  {relation.name.lower():<20}  {', '.join(accountants)}")
    return "\n".join(rows)


def check_supported(name: str, relation: NeighboringRelation, accountant: str) -> None:
    """Refuses a pair that has no price.

    Raises:
      UnsupportedPairError: with the table of supported pairs.
    """
    if accountant not in SUPPORTED.get((name, relation), ()):
        raise UnsupportedPairError(
            f"sampling={name!r} under neighboring_relation={relation.name} cannot be priced by "
            f"accountant={accountant!r}. Choose one of the supported pairs:\n{table()}"
        )
