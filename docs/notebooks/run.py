"""Runs notebooks of this folder in place: `make notebooks`.

python docs/notebooks/run.py [NAME ...]    # Without names, all of them.
"""

from __future__ import annotations

import os
import pathlib
import sys
import time

import nbclient
import nbformat

# More threads only wait for one another on small matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
FOLDER = pathlib.Path(__file__).parent

for path in sorted(FOLDER.glob("*.ipynb")):
    if sys.argv[1:] and path.stem not in sys.argv[1:]:
        continue
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in notebook.cells:
        # Without TensorFlow's messages and times of execution, which differ between runs.
        cell.metadata.clear()
        if "outputs" in cell:
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
    size = path.stat().st_size / 1000
    print(f"{path.name}: {time.perf_counter() - begin:.0f} s, {size:.0f} kB", flush=True)
