"""Runs the notebooks of this folder in place: `make notebooks`."""

from __future__ import annotations

import pathlib

import nbclient
import nbformat

for path in sorted(pathlib.Path(__file__).parent.glob("*.ipynb")):
    notebook = nbformat.read(path, as_version=4)
    nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": path.parent}}
    ).execute()
    for cell in (
        notebook.cells
    ):  # Without TensorFlow's messages and times of execution, which differ between runs.
        cell.metadata.clear()
        if "outputs" in cell:
            cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path)
    print(path)
