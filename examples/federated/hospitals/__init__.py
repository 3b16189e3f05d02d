"""A Flower app of several hospitals; see docs/guides/consortium.md."""
