"""What the installed versions can do, and how tests say that they need it."""

import pytest

from tfp_dpvi.privacy import accountants

PRICES_POISSON_REPLACE_ONE = accountants.PRICES_POISSON_REPLACE_ONE

needs_poisson_replace_one = pytest.mark.skipif(
    not PRICES_POISSON_REPLACE_ONE,
    reason="dp-accounting before 0.5 (TensorFlow Privacy pins 0.4.3) has no price for Poisson sampling under replace-one",
)

#: Both adjacencies as parameters of a test of Poisson sampling.
POISSON_RELATIONS = [
    "add_or_remove_one",
    pytest.param("replace_one", marks=needs_poisson_replace_one),
]

#: The adjacencies under which Poisson sampling has a price here, for hypothesis.
PRICED_POISSON_RELATIONS = [
    "add_or_remove_one",
    *(["replace_one"] if PRICES_POISSON_REPLACE_ONE else []),
]
