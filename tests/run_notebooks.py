"""Runs the notebooks of colab/ and keeps in them what they print and draw, which GitHub shows.

    python tests/run_notebooks.py [NAME ...]

Each runs in an empty folder and a fresh kernel of this Python. What is kept has no path of this
machine: the folder is Colab's, `/content`. What goes to standard error (progress, logs) is left
out.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from pathlib import Path

import nbformat
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "colab"
CONTENT = "/content"
"""The folder in which Colab runs a notebook."""


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs this, whatever kernels are registered on this
    machine.
    """

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(
            argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        )


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run a notebook in a folder; its cells get what they print and draw."""
    where = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook,
        kernel_manager_class=ThisPython,
        timeout=900,
        resources=where,
        record_timing=False,
    )
    client.execute()


def keep_outputs(notebook: NotebookNode, folder: Path) -> None:
    """Leave of a run's outputs what every machine would show, with Colab's folder for this."""
    for cell in code(notebook):
        cell.outputs = [one for one in cell.outputs if one.get("name") != "stderr"]
        for output in cell.outputs:
            if "text" in output:
                output.text = output.text.replace(str(folder), CONTENT)
            for kind, data in output.get("data", {}).items():
                if kind.startswith("text/"):
                    output.data[kind] = data.replace(str(folder), CONTENT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="such as 02_train_gpt2; all, where none is given")
    names = parser.parse_args().names
    os.environ.pop("JAX_NUM_CPU_DEVICES", None)
    os.environ["HF_HUB_OFFLINE"] = "1"
    for path in sorted(FOLDER.glob("*.ipynb")):
        if names and path.stem not in names:
            continue
        notebook = read(path)
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            os.environ["IPYTHONDIR"] = str(folder / "ipython")
            os.environ["HF_HOME"] = str(folder / "hub")
            metadata = copy.deepcopy(notebook.metadata)  # which has no version of this Python
            execute(notebook, folder)
            keep_outputs(notebook, folder)
            notebook.metadata = metadata
        nbformat.write(notebook, path)
        print(f"{path.name}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
