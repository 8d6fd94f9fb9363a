"""The house rules, read from the source: imports point down, and what models and library may not
mention.
"""

import ast
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from jaxpar.base.mesh import MESH_AXES
from jaxpar.models import FAMILIES

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parent.parent
WINGS = """
cli
bench launch
show
plan
verify rehearse
train
models
parallel
data kernels hlo
base meshes configs
"""
"""From the top down: a wing imports from lines below its own only, and those of one line do not
know each other.
"""
FLOOR = {wing: -line for line, wings in enumerate(WINGS.split("\n")) for wing in wings.split()}
CORES = ("verify", "rehearse")
OF_CONFIG = "of_config"
"""The one file of each core that is for configs, or folder."""


def module_of(file: Path) -> str:
    """`jaxpar.models.families` for models/families.py, as installed; a package for its
    `__init__.py`.
    """
    parts = file.relative_to(ROOT).with_suffix("").parts
    if parts[0] != "jaxpar":
        parts = ("jaxpar", *parts)
    return ".".join(parts).removesuffix(".__init__")


ROOMS = [ROOT / folder for folder in ("jaxpar", "models", "meshes", "configs")]
FILES = {module_of(file): file for room in ROOMS for file in sorted(room.rglob("*.py"))}
TREES = {
    module: ast.parse(file.read_text(encoding="utf-8"), str(file)) for module, file in FILES.items()
}
FACADE = "jaxpar"  # jaxpar/__init__.py, which re-exports
MODULES = [module for module in FILES if module != FACADE]

every_module = pytest.mark.parametrize("module", MODULES)


def room(module: str) -> str:
    """`models` for jaxpar.models.families."""
    return module.split(".")[1]


def imports(module: str) -> Iterator[str]:
    """Every module that a module imports, inside functions too; ours in full, others by their first
    word.
    """
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
    lines = {
        wing: sum(len(FILES[m].read_text("utf-8").splitlines()) for m in MODULES if room(m) == wing)
        for wing in FLOOR
    }
    with capsys.disabled():
        print()
        for wings in WINGS.strip().split("\n"):
            print("  " + "   ".join(f"{wing} {lines[wing]:,}" for wing in wings.split()))
    assert {room(module) for module in MODULES} == set(FLOOR), (
        "a wing without a line, or a line without its wing"
    )
    flat = [
        module
        for module in MODULES
        if len(module.split(".")) == 2 and FILES[module].name != "__init__.py"
    ]
    assert not flat, "a module beside the wings"


@every_module
def test_imports_point_strictly_down_or_stay_in_their_wing(module):
    for other in ours(module):
        assert other != FACADE, (
            f"{module} imports the re-exports of jaxpar: import from the module itself"
        )
        if room(other) != room(module):
            assert FLOOR[room(other)] < FLOOR[room(module)], (
                f"{module} imports {other}, which is not below it"
            )
            private = [part for part in other.split(".")[2:] if part.startswith("_")]
            assert not private, f"{module} imports {other}, a private room of another wing"


def test_imports_have_no_cycles():
    order = list(
        TopologicalSorter({module: ours(module) - {module} for module in MODULES}).static_order()
    )
    assert set(order) == set(MODULES)


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in CORES])
def test_verify_and_rehearse_know_configs_and_models_in_one_file(module):
    if OF_CONFIG in module.split("."):
        return
    named = {
        alias.name
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == "jaxpar.base.config" or str(node.module).startswith("jaxpar.models")
    }
    assert not {name for name in named if name[0].isupper()}, f"{module} knows configs or models"


def test_the_facade_imports_nothing_before_it_is_asked_for():
    imported = {node.module for node in TREES[FACADE].body if isinstance(node, ast.ImportFrom)}
    assert imported == {"importlib", "typing"}


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) == "base"])
def test_the_bottom_wing_needs_jax_and_the_console_only(module):
    assert set(imports(module)) - ours(module) <= {
        "jax",
        "numpy",
        "rich",
        *sys.stdlib_module_names,
    }


def strings(tree: ast.AST) -> set[str]:
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) == "models"])
def test_models_never_name_a_mesh_axis(module):
    assert not strings(TREES[module]) & set(MESH_AXES)


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) != "models"])
def test_the_library_never_asks_which_model_it_runs(module):
    questions = [
        node for node in ast.walk(TREES[module]) if isinstance(node, ast.Compare | ast.Match)
    ]
    assert not set().union(*map(strings, questions)) & set(FAMILIES)


@pytest.mark.parametrize("module", FILES)
def test_no_state_is_shared_through_globals(module):
    for node in ast.walk(TREES[module]):
        assert not isinstance(node, ast.Global), f"{module}:{node.lineno} has a global statement"
        if isinstance(node, ast.Call):
            called = node.func
        else:
            called = None
        if isinstance(called, ast.Attribute):
            name = called.attr
        elif isinstance(called, ast.Name):
            name = called.id
        else:
            name = ""
        assert name not in ("set_mesh", "use_mesh"), (
            f"{module}:{node.lineno} sets the mesh for everyone"
        )
