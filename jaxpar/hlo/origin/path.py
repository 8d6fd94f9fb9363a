"""The scope and phase of an operation, read from the path that jax writes for it.

A path is such as
`jit(step)/transpose(jvp())/while/body/closed_call/checkpoint/block/mlp/dot_general`. The last word
is the operation, and some words are jax's own wrappers. jax.checkpoint puts `rematted_computation`
on the path of what the backward runs again, that is, what is recomputed. The backward itself has
`transpose(...)`, and the rest is forward. What `decode` makes of some:

    jit(step)/jvp(block)/mlp/dot_general                        block/mlp   forward
    jit(step)/transpose(jvp(block))/mlp/dot_general             block/mlp   backward
    .../transpose(jvp())/checkpoint/rematted_computation/block/mlp/dot_general
                                                                block/mlp   recomputed
    jit(step)/update/add                                        update      update
    jit(step)/reduce_sum                                                    other
    block/(mlp/mul:attention/dot_general)                       block       forward
    jit(step)/backward_tick/jvp(block)/mlp/dot_general          block/mlp   recomputed
    jit(step)/jvp(block)/core/splash/splash/pallas_call         block/core  forward

The last but one comes from a pipeline: a forward in the tick of a backward. The last is a kernel,
whose own name stands in its path twice.
"""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import takewhile

from jaxpar.base.taken_share import TAKEN
from jaxpar.hlo.program.opcodes import words
from jaxpar.hlo.program.tasks import Phase

_WRAPPERS = words(
    "while body cond closed_call eval_jaxpr checkpoint rematted_computation remat "
    "custom_vjp_call custom_jvp_call"
    " core_call pjit jit shard_map custom_partitioning scan"
)
_TRANSFORM = re.compile(r"(\w+)\((.*)\)$")
_SCOPE = re.compile(r"[A-Za-z_][\w\-. ]*$")
_NO_SCOPE = re.compile(rf"(branch_\d+_fun|{TAKEN.pattern})$")
UPDATE = "update"
"""The scope of the optimizer's part of a step, in a user's own program too."""
# the scopes of a pipeline's ticks, which enclose those of the model (`parallel.pipeline.ticks`)
_TICKS = words("forward_tick backward_tick")


@lru_cache(maxsize=100_000)
def decode(op_name: str) -> tuple[str, Phase]:
    """Turn jax's path of an operation, such as `jit(step)/jvp(block)/mlp/dot_general`, into its
    scope and phase.

    An operation outside any derivative is "other" without a scope, and forward with one. In a
    pipeline's ticks the model's scopes are the same, and a forward in the tick of a backward is
    recomputed. Operations that the compiler merged into one,
    `block/(mlp/mul:attention/dot_general)`, have the scope that they share, and the phase of the
    first.

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
    """Split a path into pieces; merged operations, `block/(mlp/mul:head/dot)`, give several."""
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
            if _SCOPE.match(w) and w not in _WRAPPERS and not _NO_SCOPE.match(w)
        ]
    outside = next(
        (n for n, name in enumerate(scopes) if name not in _TICKS),
        len(scopes),
    )
    tick = scopes[0] if outside else ""
    scopes = scopes[outside:]
    # a Pallas kernel's name, which stands there twice, is not a scope
    if pieces[-1] == "pallas_call" and len(scopes) > 1 and scopes[-1] == scopes[-2]:
        scopes = scopes[:-2]
    if scopes[:1] == [UPDATE]:
        return scopes, "update"
    in_backward = tick == "backward_tick"
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
