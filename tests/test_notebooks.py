"""Every notebook in colab/ defines nothing, is committed without outputs, and runs in a fresh kernel of this Python."""

import ast
import re
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from jupyter_client import AsyncKernelManager
from jupyter_client.kernelspec import KernelSpec
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent.parent / "colab"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


class ThisPython(AsyncKernelManager):
    """A kernel of the interpreter that runs the tests, whatever kernels are registered on this machine."""

    @property
    def kernel_spec(self) -> KernelSpec:
        return KernelSpec(argv=[sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook: NotebookNode, cell_id: str) -> str:
    """What a cell of this id wrote to standard output."""
    (cell,) = (cell for cell in notebook.cells if cell.id == cell_id)
    return "".join(output.text for output in cell.outputs if output.get("name") == "stdout")


def pictures(notebook: NotebookNode) -> set[str]:
    """The ids of the cells that show a PNG."""
    return {cell.id for cell in code(notebook) for output in cell.outputs if "image/png" in output.get("data", {})}


def train_on_a_mesh(notebook: NotebookNode) -> None:
    assert printed(notebook, "install") == ""
    assert "8 x cpu" in printed(notebook, "devices")
    assert "mesh data=2 x fsdp=2 x tensor=2" in printed(notebook, "plan")
    assert "mesh axis fsdp=2 is used twice" in printed(notebook, "wrong")
    split, whole = (
        int(number.replace(",", "")) for number in re.findall(r"([\d,]+) bytes", printed(notebook, "rules"))
    )
    assert whole == 2 * split  # every parameter of LLaMA has an embed dim
    one, other = map(float, re.findall(r"loss ([\d.]+)", printed(notebook, "same")))
    assert one == pytest.approx(other, abs=2e-6)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", printed(notebook, "train"))]
    (entropy,) = re.findall(r"entropy ([\d.]+)", printed(notebook, "data"))
    assert losses[0] == pytest.approx(5.5, abs=0.5)  # log 256, and a tied head guesses the last byte once more
    assert losses[-1] < float(entropy) - 0.3
    assert pictures(notebook) == {"picture", "rules", "loss"}
    assert printed(notebook, "sample").startswith("    def __init__(self")


# What must have come out of each notebook, by file name.
CHECKS: dict[str, Callable[[NotebookNode], None]] = {"01_train_on_a_mesh.ipynb": train_on_a_mesh}


def test_every_notebook_has_a_check():
    assert {path.name for path in NOTEBOOKS} == set(CHECKS)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_valid_and_stripped(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert all(not cell.outputs and cell.execution_count is None for cell in code(notebook))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_defines_nothing(path):
    for cell in code(read(path)):
        source = re.sub(r"^( *)[%!].*$", r"\1pass", cell.source, flags=re.MULTILINE)
        defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
        found = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, defined)]
        assert not found, f"cell {cell.id} of {path.name} defines {found}: put it into jaxpar"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path, tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))  # no start-up files of this machine's user
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    notebook = read(path)
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, kernel_manager_class=ThisPython, timeout=300, resources=where)
    client.execute()
    CHECKS[path.name](notebook)
