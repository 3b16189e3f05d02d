"""The studies of docs/studies.md that `benchmarks/run_studies.py` runs."""

import pathlib
import sys

# Their models and data are those of the examples, whose folders come last.
_EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"
sys.path += [str(_EXAMPLES), str(_EXAMPLES / "models")]
