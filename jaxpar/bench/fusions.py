"""`jaxpar bench fusions`: what a compiler makes of the element-wise parts of a block, and what a kernel could save.

Each part is compiled for a target twice: as XLA fuses it, and with a barrier behind every operation, which no fusion
crosses. Beside both stands the least that any kernel must move, its inputs and outputs once, at the memory's bandwidth.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import Jaxpr, Literal

from jaxpar.base.config import ModelConfig
from jaxpar.base.jax_compat import compiler_options
from jaxpar.base.mesh import MeshSpec, make_mesh
from jaxpar.base.plan import Plan
from jaxpar.base.sharding import replicated
from jaxpar.models.layers import LayerNorm, RMSNorm, rotary_frequencies, rotate
from jaxpar.rehearse.simulate import simulate
from jaxpar.rehearse.targets import load_target

_MODEL = ModelConfig(embed=4096, heads=32, rope_theta=500000.0)  # LLaMA-3-8B, arXiv:2407.21783, table 3
_MLP = 14336


@dataclasses.dataclass(frozen=True)
class FusionBenchArgs:
    """One sequence of LLaMA-3-8B on one of `tensor` devices, compiled for each target."""

    targets: tuple[str, ...] = ("v5e-8", "v5p-8", "v6e-8")
    seq_len: int = 8192
    tensor: int = 4


class FusionRow(NamedTuple):
    """A part on a target. Bytes of device memory and seconds: `fused` by XLA, `alone` = every operation by itself."""

    target: str
    part: str
    direction: str
    least_bytes: int
    least: float
    fused_bytes: int
    fused: float
    alone_bytes: int
    alone: float


def bench_fusions(bench: FusionBenchArgs, say: Callable[[str], None] = lambda line: None) -> list[FusionRow]:
    """The rows, target after target."""
    rows = []
    for name in bench.targets:
        target = load_target(name)
        devices = target.devices()
        plan = Plan(make_mesh(MeshSpec(data=len(devices)), devices))

        def played(function: Callable[..., Any], args: Sequence[Any], plan: Plan = plan, target: Any = target) -> Any:
            placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(plan)) for x in args]
            jitted = jax.jit(function, compiler_options=compiler_options(plan.mesh))
            compiled: Any = jitted.trace(*placed).lower(lowering_platforms=(target.platform,)).compile()
            timeline = simulate(compiled.as_text(), plan.mesh, target).timeline
            return sum(row.task.bytes * row.count for row in timeline.tasks), timeline.seconds

        for part, (function, args) in parts(bench).items():
            for direction, (run, given) in directions(function, args).items():
                least = size(given) + size(jax.eval_shape(run, *given))
                needed = least / target.hardware.hbm_bandwidth
                row = FusionRow(name, part, direction, least, needed, *played(run, given), *played(unfused(run), given))
                say(f"{name}: {part} {direction}: {1e6 * row.fused:.0f} us, of which {1e6 * row.least:.0f} are needed")
                rows.append(row)
    return rows


def parts(bench: FusionBenchArgs) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The functions, and shapes of their arguments on one device: activations bfloat16, parameters float32."""
    S, D, heads = bench.seq_len, _MODEL.embed, _MODEL.heads // bench.tensor
    stream = jax.ShapeDtypeStruct((1, S // bench.tensor, D), jnp.bfloat16)
    queries = jax.ShapeDtypeStruct((1, S, heads, D // _MODEL.heads), jnp.bfloat16)
    hidden = jax.ShapeDtypeStruct((1, S, _MLP // bench.tensor), jnp.bfloat16)
    places = jax.ShapeDtypeStruct((1, S), jnp.int32)

    def norm(kind: Any) -> tuple[Callable[..., Any], Any]:
        abstract = nnx.eval_shape(lambda: kind(_MODEL, nnx.Rngs(0)))
        graph, params = nnx.split(abstract)
        leaves, tree = jax.tree.flatten(params)
        return (lambda x, *leaves: nnx.merge(graph, tree.unflatten(leaves))(x)), leaves

    (rms, rms_params), (layer, layer_params) = norm(RMSNorm), norm(LayerNorm)

    def added(x: Any, y: Any, *leaves: Any) -> Any:
        return x + y, rms(x + y, *leaves)

    return {
        "RMSNorm": (rms, (stream, *rms_params)),
        "LayerNorm": (layer, (stream, *layer_params)),
        "residual, RMSNorm": (added, (stream, stream, *rms_params)),
        "RoPE": (lambda x, places: rotate(x, places, rotary_frequencies(_MODEL)), (queries, places)),
        "SwiGLU": (lambda gate, up: jax.nn.silu(gate) * up, (hidden, hidden)),
    }


def directions(function: Callable[..., Any], args: tuple[Any, ...]) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Forward, and a backward that is given the inputs and makes the rest again."""
    out, tree = jax.tree.flatten(jax.eval_shape(function, *args))
    real = [i for i, x in enumerate(args) if jnp.issubdtype(x.dtype, jnp.floating)]

    def backward(*given: Any) -> Any:
        inputs, douts = given[: len(args)], tree.unflatten(given[len(args) :])

        def of_real(*some: Any) -> Any:
            return function(*(some[real.index(i)] if i in real else x for i, x in enumerate(inputs)))

        return jax.vjp(of_real, *(inputs[i] for i in real))[1](douts)

    return {"forward": (function, args), "backward": (backward, (*args, *out))}


def unfused(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same with a barrier behind every operation."""

    def run(*args: Any) -> Any:
        closed, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        outs = _evaluate(closed.jaxpr, closed.consts, args)
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return run


def _evaluate(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atoms: Sequence[Any]) -> list[Any]:
        return [atom.val if isinstance(atom, Literal) else values[atom] for atom in atoms]

    for equation in jaxpr.eqns:
        inner = next((x for x in map(equation.params.get, ("jaxpr", "call_jaxpr")) if x is not None), None)
        if inner is not None:
            outs = _evaluate(inner.jaxpr, inner.consts, read(equation.invars))
        else:
            found = equation.primitive.bind(*read(equation.invars), **equation.params)
            outs = jax.lax.optimization_barrier(found if equation.primitive.multiple_results else [found])
        values.update(zip(equation.outvars, outs, strict=True))
    return read(jaxpr.outvars)


def size(tree: Any) -> int:
    """Bytes of all arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def fusion_table(rows: Sequence[FusionRow]) -> str:
    """Markdown, microseconds and MB."""
    names = "target", "part", "", "least, MB", "XLA, MB", "alone, MB", "least, us", "XLA, us", "alone, us"
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for row in rows:
        sizes = (f"{x / 1e6:.1f}" for x in (row.least_bytes, row.fused_bytes, row.alone_bytes))
        times = (f"{1e6 * x:.0f}" for x in (row.least, row.fused, row.alone))
        lines.append("| " + " | ".join((row.target, row.part, row.direction, *sizes, *times)) + " |")
    return "\n".join(lines)
