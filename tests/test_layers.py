"""The house rules, read from the source: imports point down, and what models and library may not
mention.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.models import FAMILIES

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
OF_CONFIG = "of_config"
"""The one file of each core that is for configs, or folder."""
CORES = ("verify", "rehearse")
STANDS_UNDER = dict.fromkeys(CORES, "models")
"""Cores serve any function: but for `of_config` they stand, with what they load, under this wing
of the list, and need none of what it needs.
"""
OF_MODELS = ("flax", "optax", "orbax", "grain")
"""The packages that models, data and training need, and no core."""
LIBRARY = ("kernels", "hlo", *CORES)
"""Wings that a stranger imports for one thing: each loads what lies below it and no more."""


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

FOLDERS = [
    module
    for module in MODULES
    if len(module.split(".")) > 2 and FILES[module].name == "__init__.py"
]
"""A wing that is long has folders, each of which is read by itself; so has a folder that is long."""

every_module = pytest.mark.parametrize("module", MODULES)


def room(module: str) -> str:
    """`models` for jaxpar.models.families."""
    return module.split(".")[1]


def imported_by(node: ast.AST, module: str) -> Iterator[str]:
    """What an import statement of a module names; ours in full, others by their first word."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"{module} has a relative import"
        inner = [f"{node.module}.{alias.name}" for alias in node.names]
        names = [name if name in FILES else str(node.module) for name in inner]
    else:
        return
    yield from (name if name in FILES else name.split(".")[0] for name in names)


def imports(module: str) -> Iterator[str]:
    """Every module that a module imports, inside functions too."""
    for node in ast.walk(TREES[module]):
        yield from imported_by(node, module)


def for_types_only(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`, whose imports never run."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports_that_run(node: ast.AST, module: str) -> Iterator[str]:
    """What a module imports when it is loaded, or later when one of its functions runs."""
    for child in ast.iter_child_nodes(node):
        if not for_types_only(child):
            yield from imported_by(child, module)
            yield from imports_that_run(child, module)


def of_config(module: str) -> bool:
    return OF_CONFIG in module.split(".")


def reached_from(wing: str) -> dict[str, str]:
    """Every module that a wing comes to by imports, lazy ones too, each with who imports it. A
    module's packages are loaded before it, so they count. `of_config` is a door of its own.
    """
    start = f"jaxpar.{wing}"
    reached = {start: "a user's program"}
    waiting = [start]
    while waiting:
        module = waiting.pop()
        if module not in FILES:
            continue
        names = list(imports_that_run(TREES[module], module))
        packages = [name.rpartition(".")[0] for name in [module, *names]]
        for name in [*names, *packages]:
            if name not in reached and name not in ("", FACADE) and not of_config(name):
                reached[name] = module
                waiting.append(name)
    return reached


def may_load(wing: str) -> set[str]:
    """The wings that a wing may load: itself, and those on the lines below its place."""
    place = FLOOR[STANDS_UNDER.get(wing, wing)]
    return {wing} | {other for other, line in FLOOR.items() if line < place}


def ours(module: str) -> set[str]:
    return {name for name in imports(module) if name.split(".")[0] == "jaxpar"}


def folder_of(module: str) -> str | None:
    """`jaxpar.train.step` for jaxpar.train.step.state, of folders in each other the innermost; none
    for a room beside the folders.
    """
    inside = [folder for folder in FOLDERS if f"{module}.".startswith(f"{folder}.")]
    return max(inside, key=len, default=None)


def len_of(folder: str) -> int:
    """The lines of a folder."""
    return sum(
        len(FILES[module].read_text("utf-8").splitlines())
        for module in MODULES
        if folder_of(module) == folder
    )


def test_the_table(capsys):
    lines = {
        wing: sum(len(FILES[m].read_text("utf-8").splitlines()) for m in MODULES if room(m) == wing)
        for wing in FLOOR
    }
    with capsys.disabled():
        print()
        for wings in WINGS.strip().split("\n"):
            print("  " + "   ".join(f"{wing} {lines[wing]:,}" for wing in wings.split()))
        for folder in FOLDERS:
            print(f"  {folder.removeprefix('jaxpar.')} {len_of(folder):,}")
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


def test_the_folders_of_a_wing_need_each_other_in_one_direction():
    needed: dict[str, set[str]] = {folder: set() for folder in FOLDERS}
    for module in MODULES:
        folder = folder_of(module)
        if folder:
            others = {folder_of(other) for other in ours(module)} - {None, folder}
            needed[folder] |= {str(other) for other in others if other is not None}
    order = list(TopologicalSorter(needed).static_order())
    assert set(order) == set(FOLDERS)


def rooms_in(folder: str) -> set[str]:
    """The modules and the folders that lie in a wing or a folder."""
    below = [module for module in MODULES if module.startswith(f"{folder}.")]
    return {module.removeprefix(f"{folder}.").split(".")[0] for module in below}


def room_in(folder: str, module: str) -> str:
    """`runs` for jaxpar.train.runs.folder.steps in jaxpar.train; empty where it does not lie there."""
    if not module.startswith(f"{folder}."):
        return ""
    return module.removeprefix(f"{folder}.").split(".")[0]


@pytest.mark.parametrize("folder", [*(f"jaxpar.{wing}" for wing in FLOOR), *FOLDERS])
def test_the_rooms_of_a_wing_or_folder_need_each_other_in_one_direction(folder):
    """Folders, each with all that lies in it, and the rooms beside them."""
    needed: dict[str, set[str]] = {name: set() for name in rooms_in(folder)}
    for module in MODULES:
        name = room_in(folder, module)
        if name:
            needed[name] |= {room_in(folder, other) for other in ours(module)} - {"", name}
    order = list(TopologicalSorter(needed).static_order())
    assert set(order) == set(needed)


@pytest.mark.parametrize("folder", [*(f"jaxpar.{wing}" for wing in FLOOR), *FOLDERS])
def test_a_wing_or_folder_names_every_room_in_it(folder):
    said = ast.get_docstring(TREES[folder]) or ""
    assert said, f"{folder} does not say what it is for"
    unnamed = [name for name in sorted(rooms_in(folder)) if f"`{name}`" not in said]
    assert not unnamed, f"{folder}/__init__.py leaves out of its order {unnamed}"


@pytest.mark.parametrize("wing", FLOOR)
def test_a_wing_comes_to_nothing_above_it(wing):
    reached = reached_from(wing)
    allowed = may_load(wing)
    for module, importer in reached.items():
        if module in FILES:
            assert room(module) in allowed, f"{importer} imports {module}: {wing} may not load it"
        elif wing in LIBRARY:
            assert module not in OF_MODELS, f"{importer} imports {module}: {wing} serves without"


@pytest.mark.slow
@pytest.mark.parametrize("wing", LIBRARY)
def test_the_import_of_a_wing_loads_nothing_above_it(wing):
    """The same, as Python does it."""
    script = f"import sys, jaxpar.{wing}; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    wings = {room(name) for name in loaded if name.startswith("jaxpar.")}
    assert wing in wings
    assert wings <= may_load(wing)
    assert not {name.split(".")[0] for name in loaded} & set(OF_MODELS)


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) in CORES])
def test_verify_and_rehearse_know_configs_and_models_in_one_file(module):
    if of_config(module):
        return
    named = {
        alias.name
        for node in ast.walk(TREES[module])
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module == "jaxpar.base.config" or str(node.module).startswith("jaxpar.models")
    }
    assert not named, f"{module} knows configs or models"


def test_the_facade_imports_nothing_before_it_is_asked_for():
    imported = {node.module for node in TREES[FACADE].body if isinstance(node, ast.ImportFrom)}
    assert imported == {"importlib", "typing"}


@pytest.mark.parametrize("module", [module for module in MODULES if room(module) == "base"])
def test_the_bottom_wing_needs_jax_and_the_console_only(module):
    assert set(imports(module)) - ours(module) <= {
        "jax",
        "numpy",
        "rich",
        # what opens paths that are URLs
        *(
            ("filelock", "fsspec", "huggingface_hub")
            if module.startswith("jaxpar.base.storage.")
            else ()
        ),
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
