"""Runs the Python blocks of a page, in a temporary folder: `run_readme.py README.md`."""

import os
import pathlib
import re
import sys
import tempfile

page = pathlib.Path(sys.argv[1]).resolve()
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    for block in re.findall(
        r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL
    ):
        exec(compile(block, f"<{page.name}>", "exec"), {"__name__": "__main__"})

import tfp_dpvi  # noqa: E402

assert (
    page.parent not in pathlib.Path(tfp_dpvi.__file__).resolve().parents
    or "site-packages" in tfp_dpvi.__file__
), f"ran from the source tree: {tfp_dpvi.__file__}"
