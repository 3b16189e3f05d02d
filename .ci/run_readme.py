"""Runs the Python blocks of pages in order, each page in a temporary folder of its own.

    run_readme.py README.md docs/regression.md

The blocks of a page share their names, as if somebody pasted one after another. The package must be
an installed one.
"""

import os
import pathlib
import re
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]

for page in [pathlib.Path(path).resolve() for path in sys.argv[1:]]:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    names = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for block in blocks:
            exec(compile(block, f"<{page.name}>", "exec"), names)
        os.chdir(ROOT)

import tfp_dpvi  # noqa: E402

assert (
    ROOT not in pathlib.Path(tfp_dpvi.__file__).resolve().parents
    or "site-packages" in tfp_dpvi.__file__
), f"ran from the source tree: {tfp_dpvi.__file__}"
