"""Cases of `benchmarks/suite.py`: for each a function that gives one maker of a `Runner` for every way of doing it."""
