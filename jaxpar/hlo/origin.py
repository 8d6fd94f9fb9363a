"""The origin of a task is the model's named scopes, the phase (forward or backward), and the line
of Python.

jax writes a path such as
`jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/block/mlp/dot_general`. The last word
is the operation, and some words are jax's own wrappers. jax.checkpoint puts `rematted_computation`
on the path of what the backward runs again, that is, what is recomputed. The backward itself has
`transpose(...)`, and the rest is forward.
"""

from __future__ import annotations

import importlib.util
import re
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, takewhile
from pathlib import Path

import jax

from jaxpar.hlo.program.module import Frame, Instruction, Module
from jaxpar.hlo.program.opcodes import words
from jaxpar.hlo.program.tasks import Loop, Node, Origin, Phase, Task, Wait

PackageDirs = Sequence[tuple[str, str]]
"""(directory, name shown) pairs, the most telling first: ("/home/me/jaxpar/models", "models").
`OWN` stands for all files that belong to no installed package, nor to Python, nor to this library:
those of somebody else's program."""
OWN = ("", "")
_HELPERS = ("models/linears.py:",)
"""Lines through which all linears of a model go, which tell none of them from another."""
_INSTALLED = ("/site-packages/", "/dist-packages/")

_WRAPPERS = words(
    "while body cond closed_call eval_jaxpr checkpoint rematted_computation remat "
    "custom_vjp_call custom_jvp_call"
    " core_call pjit jit shard_map custom_partitioning scan"
)
_TRANSFORM = re.compile(r"(\w+)\((.*)\)$")
_SCOPE = re.compile(r"[A-Za-z_][\w\-. ]*$")
_BRANCH = re.compile(r"branch_\d+_fun$")
_MADE = ("copy", "control", "host_copy")
"""Kinds of tasks that the compiler makes itself; it may give one the line of another
instruction.
"""
UPDATE = "update"
"""The scope of the optimizer's part of a step."""
# the scopes of a pipeline's ticks, which enclose those of the model
_TICKS = words("forward backward")


def default_dirs() -> PackageDirs:
    """Return the directories of the models and of the library, as they are installed here."""
    found = []
    for module, shown in (("jaxpar.models", "models"), ("jaxpar", "jaxpar")):
        spec = importlib.util.find_spec(module)
        found += (
            [(folder, shown) for folder in (spec.submodule_search_locations or ())] if spec else []
        )
    return tuple(found)


def origin_of(module: Module, instruction: Instruction, dirs: PackageDirs) -> Origin:
    """Find the scope, line and phase of one instruction; they are empty where the compiler kept
    nothing.

    A fusion has the path of its last operation, but its work may be elsewhere: a fusion around a
    matmul belongs where the matmul does. A fusion without metadata takes the place of what it
    wraps.

    Args:
      module: the module, whose tables have the stack frames.
      instruction: the instruction.
      dirs: (directory, name shown) pairs in which a stack frame counts as a source line, the most
        telling first.

    Returns:
      The place in the model.
    """
    instruction = _telling(module, instruction)
    scope, phase = decode(instruction.op_name)
    source = source_line(module.stack(instruction), dirs)
    return Origin(scope, source, phase, told="/" in instruction.op_name)


def _telling(module: Module, instruction: Instruction) -> Instruction:
    """Find the first matmul an instruction calls, else itself; if it has no path, the root or the
    last that has one.
    """
    if instruction.called:
        inner = module.computations.get(instruction.called[0])
    else:
        inner = None
    if inner is None or instruction.base not in ("fusion", "call", "async"):
        return instruction
    called = [_telling(module, one) for one in inner.instructions.values()]
    named = [one for one in called if "/" in one.op_name]
    matmuls = [one for one in named if one.opcode in ("dot", "convolution")]
    if matmuls or instruction.op_name:
        return next(iter(matmuls), instruction)
    return next(
        (one for one in named if one.name == inner.root), named[-1] if named else instruction
    )


@lru_cache(maxsize=100_000)
def decode(op_name: str) -> tuple[str, Phase]:
    """Turn jax's path of an operation into its scope and phase.

    An operation outside any derivative is "other" without a scope, and forward with one. In a
    pipeline's ticks the model's scopes are the same, and a forward in the tick of a backward is
    recomputed. Operations that the compiler merged into one,
    `block/(mlp/mul:attention/dot_general)`, have the scope that they share, and the phase of the
    first.

    Args:
      op_name: the path, `jit(step)/transpose(jvp(block))/mlp/dot_general`.

    Returns:
      The scope and the phase, such as `("block/mlp", "backward")`.
    """
    decoded = [_decode_path(pieces) for pieces in _paths(op_name)]
    alike = takewhile(
        lambda level: len(set(level)) == 1,
        zip(
            *(scopes for scopes, _ in decoded),
            strict=False,
        ),
    )
    return "/".join(level[0] for level in alike), decoded[0][1]


def _paths(op_name: str) -> list[list[str]]:
    """Split a path into pieces; there are several paths where operations were merged,
    `block/(mlp/mul:head/dot)`.
    """
    # merged instructions have several paths, of which the first is taken
    pieces = _pieces(op_name.split(";")[0])
    if not pieces[-1].startswith("("):
        return [pieces]
    tails = _pieces(pieces[-1][1:-1], ":")
    return [path for tail in tails for path in _paths("/".join([*pieces[:-1], tail]))]


def _decode_path(pieces: list[str]) -> tuple[list[str], Phase]:
    """Find the scopes and the phase of one path."""
    scopes: list[str] = []
    backward = inside = False
    for piece in pieces[:-1]:
        while match := _TRANSFORM.match(piece):
            backward |= match[1] == "transpose"
            inside |= match[1] == "jvp"
            if match[1] in ("jit", "pjit", "remat", "checkpoint"):
                piece = ""
            else:
                piece = match[2]
        scopes += [
            w
            for w in piece.split("/")
            if _SCOPE.match(w) and w not in _WRAPPERS and not _BRANCH.match(w)
        ]
    outside = next(
        (n for n, name in enumerate(scopes) if name not in _TICKS),
        len(scopes),
    )
    tick = scopes[0] if outside else ""
    scopes = scopes[outside:]
    twice = next(
        (n for n, pair in enumerate(pairwise(scopes)) if pair[0] == pair[1]),
        None,
    )
    scopes = scopes[:twice]  # a Pallas kernel's name, which stands there twice, is not a scope
    if scopes[:1] == [UPDATE]:
        return scopes, "update"
    in_backward = tick not in ("", "forward")
    if "rematted_computation" in pieces or (in_backward and inside and not backward):
        return scopes, "recomputed"
    if backward or in_backward:
        return scopes, "backward"
    return scopes, "forward" if inside or scopes or tick else "other"


def _pieces(path: str, separator: str = "/") -> list[str]:
    """Split a path at the separators that stand in no bracket."""
    pieces = [""]
    depth = 0
    for sign in path:
        depth += (sign == "(") - (sign == ")")
        if sign == separator and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += sign
    return pieces


def source_line(frames: list[Frame], dirs: PackageDirs) -> str:
    """Write the innermost frame in the first directory that has any.

    Where that calls a program of somebody else, as a model calls a block that it was given, the
    innermost frame of that program is written. A room that many parts of a model call is passed
    over for the line that calls it.

    Args:
      frames: those of an instruction, the innermost first.
      dirs: (directory, name shown) pairs, the most telling first.

    Returns:
      The line, `models/transformer.py:72`; empty if no directory has a frame.
    """
    for folder, shown in dirs:
        if (folder, shown) == OWN:
            if own := _own_line(frames, dirs):
                return own
            continue
        inside = [
            (depth, f"{shown}/{Path(frame.file).relative_to(folder).as_posix()}:{frame.line}")
            for depth, frame in enumerate(frames)
            if _inside(frame.file, folder)
        ]
        callers = [(depth, line) for depth, line in inside if not line.startswith(_HELPERS)]
        for depth, line in callers or inside:
            return _own_line(frames[:depth], dirs) or line
    return ""


def _own_line(frames: list[Frame], dirs: PackageDirs) -> str:
    """Write the innermost frame of somebody else's program; empty if there is none."""
    known = [*_packages(), *(folder for folder, _ in dirs if folder)]
    for frame in frames:
        installed = any(folder in frame.file for folder in _INSTALLED)  # of another Python, too
        if not installed and not any(_inside(frame.file, folder) for folder in known):
            file = Path(frame.file)
            here = Path.cwd()
            if file.is_relative_to(here):
                shown = file.relative_to(here)
            else:
                shown = file.name
            return f"{shown}:{frame.line}"
    return ""


def _inside(file: str, folder: str) -> bool:
    return file.startswith(folder.rstrip("/") + "/")


@lru_cache(maxsize=1)
def _packages() -> tuple[str, ...]:
    """Return the folders of Python, of the installed packages and of this library."""
    installed = [
        sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")
    ]
    others = [
        str(Path(jax.__file__).parents[1]),
        *(folder for folder, _ in default_dirs()),
    ]
    return tuple(dict.fromkeys([*installed, *others]))


def inherit(nodes: list[Node], around: Origin) -> list[Node]:
    """Give a place to those nodes of a list that the compiler made itself, since they have none of
    their own.

    A copy or slice belongs to what it feeds, else to what feeds it: the nearest such task whose
    place is known. A sum over devices belongs to the latest of its summands: what it feeds may be
    the loop's own collection of gradients, which is no part of the model. A matmul belongs to the
    neighbour in the innermost scope, and among several to the latest of its operands, which in a
    backward is the gradient, not what was saved. What is left belongs to the loop that it feeds or
    depends on, else to the loop `around` it. A line of its own is kept. What the program places
    itself stays there: where that is in no scope, it takes none of a neighbour's.

    Args:
      nodes: the nodes of one list, a program or the body of a loop.
      around: the place of the loop around them.

    Returns:
      The same nodes in the same order, with an origin for every task.
    """
    origins = [_known_origin(node) for node in nodes]
    users: dict[int, list[int]] = defaultdict(list)
    for position, node in enumerate(nodes):
        for maker in () if isinstance(node, Wait) else node.depends:
            users[maker].append(position)

    def known(neighbours: Iterable[int]) -> list[Origin]:
        """The places of neighbours that have one, except bookkeeping on scalars and loops."""
        found = []
        for at in neighbours:
            node = nodes[at]
            origin = origins[at]
            if isinstance(node, Task) and node.kind != "control" and origin is not None:
                found.append(origin)
        return found

    open_tasks = {
        position: node
        for position, node in enumerate(nodes)
        if isinstance(node, Task) and origins[position] is None
    }
    for position in reversed(open_tasks):
        task = open_tasks[position]
        near = known(users[position])
        if near and not _follows_makers(task):
            origins[position] = _beside(near[0], task.origin)
    found = list(nodes)
    for position, task in open_tasks.items():
        origin = origins[position]
        makers = task.depends
        if _follows_makers(task):
            makers = task.depends[::-1]
        if origin is None:
            near = known(makers) + known(users[position])
            if task.kind == "matmul":
                near.sort(key=lambda origin: -origin.scope.count("/"))
            beside = [nodes[at] for at in (*users[position], *makers)]
            loops = [node.origin for node in beside if isinstance(node, Loop)]
            origin = _beside([*near, *loops, around][0], task.origin)
            # a neighbour's place is handed on, but a loop's is everyone's
            origins[position] = origin if near else None
        found[position] = replace(task, origin=origin)
    return found


def _follows_makers(task: Task) -> bool:
    """Whether a task that the compiler made belongs to what feeds it, and not to what it feeds."""
    collective = task.collective
    sums = collective is not None and collective.kind in ("reduce-scatter", "all-reduce")
    return sums or task.kind == "matmul"


def _known_origin(node: Node) -> Origin | None:
    """The place of a task that needs none of a neighbour's; None for others.

    The compiler may give a copy of its own the line of another instruction, and nothing else.
    """
    if not isinstance(node, Task):
        return None
    origin = node.origin
    told = origin.told or origin.scope or (origin.source and node.kind not in _MADE)
    return origin if told else None


def _beside(other: Origin, own: Origin) -> Origin:
    """The place of a neighbour, at a line of its own where it has one."""
    return Origin(other.scope, own.source or other.source, other.phase)
