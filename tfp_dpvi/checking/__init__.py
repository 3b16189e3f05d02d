"""Private checks of a fitted model, in one release, beside the free ones.

Read the files in this order. Each imports from those before it only.

* `blocks` bounds what one record adds to a sum; `declared` says which sums a check has, before
  anything is charged; `outcomes` ranks a record's outcome among predicted ones; `release` adds up
  and adds noise.
* `pictures` draws what was released, and `result` holds it; `null` bounds how much it varies if the
  model is right; `judge` tests it, and puts it into words. `free` has all checks in one table.

`tfp_dpvi.models.checking` charges a model's ledger for them.
"""

from tfp_dpvi.checking.declared import Bins
from tfp_dpvi.checking.free import CheckRow, CheckTable
from tfp_dpvi.checking.result import CheckTest, MeanScore, PrivateChecks, Profile

__all__ = [
    "Bins",
    "CheckRow",
    "CheckTable",
    "CheckTest",
    "MeanScore",
    "PrivateChecks",
    "Profile",
]
