"""The house rules, read from the source: imports point down, and what models and library may not mention."""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from jaxpar.mesh import MESH_AXES
from jaxpar.models import FAMILIES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
LAYERS = {
    6: "cli commands",
    5: "train restore generate evaluate convert show bench step verify verdict verified answers evidence rehearse "
    "calibrate bench_rehearse play auto budget ledger bench_overlap bench_attention bench_fusions bench_pipeline "
    "bench_commands bench_gpu bench_pieces bench_torch",
    4: "data tokenizer checkpoint optim moments update metrics report picture mask_picture "
    "layer_picture schedule_picture doctor communication footprint assign rehearsal diagnose shrink arguments effects",
    3: "models pipeline",
    2: "parallel experts batches loss plain",
    1: "remat offload hlo network planned masks kernels ring_attention zigzag collectives collective_matmul "
    "context grouped",
    0: "errors activations config mesh sharding hardware runtime processes targets jax_compat meshes configs",
}
LAYER = {room: layer for layer, rooms in LAYERS.items() for room in rooms.split()}


def module_of(file: Path) -> str:
    """`jaxpar.models.gpt2` for models/gpt2.py, as installed; a package for its `__init__.py`."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "jaxpar" else ("jaxpar", *parts)
    return ".".join(parts).removesuffix(".__init__")


ROOMS = [ROOT / folder for folder in ("jaxpar", "models", "meshes", "configs")]
FILES = {module_of(file): file for room in ROOMS for file in sorted(room.rglob("*.py"))}
TREES = {module: ast.parse(file.read_text(encoding="utf-8"), str(file)) for module, file in FILES.items()}
FACADE = "jaxpar"  # jaxpar/__init__.py, which re-exports
MODULES = [module for module in FILES if module != FACADE]

every_module = pytest.mark.parametrize("module", MODULES)


def room(module: str) -> str:
    """`models` for jaxpar.models.gpt2."""
    return module.split(".")[1]


def imports(module: str) -> Iterator[str]:
    """Every module that a module imports, inside functions too; ours in full, others by their first word."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in FILES else node.module for name in inner]
        else:
            continue
        yield from (name if name in FILES else name.split(".")[0] for name in names)


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "jaxpar"}


def test_the_table(capsys):
    with capsys.disabled():
        print()
        for layer, rooms in LAYERS.items():
            print(f"  {layer}: {' '.join(rooms.split())}")
    assert {room(module) for module in MODULES} == set(LAYER), "a module without a layer, or a layer without its module"


@every_module
def test_imports_point_down_or_to_siblings(module):
    for other in ours(module):
        assert other != FACADE, f"{module} imports the re-exports of jaxpar: import from the module itself"
        assert LAYER[room(other)] <= LAYER[room(module)], f"{module} imports {other}, which is above it"


def test_imports_have_no_cycles():
    order = list(TopologicalSorter({module: ours(module) - {module} for module in MODULES}).static_order())
    assert set(order) == set(MODULES)


def test_the_facade_imports_the_bottom_layer_only():
    assert {LAYER[room(module)] for module in ours(FACADE)} == {0}


@pytest.mark.parametrize("module", [module for module in MODULES if LAYER.get(room(module)) == 0])
def test_the_bottom_layer_needs_jax_and_the_standard_library_only(module):
    assert set(imports(module)) - ours(module) <= {"jax", *sys.stdlib_module_names}


def strings(tree: ast.AST) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) == "models"])
def test_models_never_name_a_mesh_axis(module):
    assert not strings(TREES[module]) & set(MESH_AXES)


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) != "models"])
def test_the_library_never_asks_which_model_it_runs(module):
    questions = [node for node in ast.walk(TREES[module]) if isinstance(node, ast.Compare | ast.Match)]
    assert not set().union(*map(strings, questions)) & set(FAMILIES)


@pytest.mark.parametrize("module", FILES)
def test_no_state_is_shared_through_globals(module):
    for node in ast.walk(TREES[module]):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno} has a global statement"
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        assert name not in ("set_mesh", "use_mesh"), f"{module}:{node.lineno} sets the mesh for everyone"
