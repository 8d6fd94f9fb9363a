"""Names of primitives in traced functions, and how one equation of such a function is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from jax.extend import core

# jax 0.12.0.1 has one type of traced functions, `Jaxpr`, and `ClosedJaxpr` as an unexported name of
# it.
if TYPE_CHECKING:
    ClosedJaxpr: TypeAlias = core.ClosedJaxpr  # pyright: ignore[reportPrivateImportUsage]
else:
    ClosedJaxpr = getattr(core, "ClosedJaxpr", core.Jaxpr)

COLLECTIVES: dict[
    str, Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "ppermute"]
] = {
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "all_gather_reduced": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "unreduced_reduce_scatter": "reduce-scatter",
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "unreduced_psum": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_to_all": "all-to-all",
    "ppermute": "ppermute",
}
STILL = ("axis_index", "pvary", "pcast", "preduced", "vary_unreduced_cast")
"""The beginnings of the names of primitives that name mesh axes and send nothing."""
SCAN = "scan"
WHILE = "while"
COND = "cond"
SHARD_MAP = "shard_map"
NAME = "name"
"""The primitive of `checkpoint_name`."""
CUDNN_ATTENTION = "dot_product_attention_fwd_wrapper"
_CALLED = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
"""Primitives that call a function as it is, and the parameter that has it."""


def called_function(equation: core.JaxprEqn) -> ClosedJaxpr | None:
    """Return the traced function that an equation calls, once and with its own operands; None where
    it calls none, or is a loop, a branch or a `shard_map`.
    """
    parameter = _CALLED.get(equation.primitive.name)
    if parameter is None:
        return None
    called = equation.params.get(parameter)
    return called if isinstance(called, ClosedJaxpr) else None


def run_equation(equation: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    """Run one equation of a traced function, in the context in which it was traced.

    Args:
      operands: the values of what it reads.

    Returns:
      The values of what it makes.
    """
    primitive: Any = equation.primitive
    given = primitive.get_bind_params(equation.params)
    if isinstance(given, tuple):  # jax before 0.10: functions apart, which come first
        functions, parameters = given
    else:
        functions, parameters = (), given
    with equation.ctx.manager:
        made = primitive.bind(*functions, *operands, **parameters)
    return list(made) if primitive.multiple_results else [made]


_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
MIXES_ENTRIES = frozenset((*_CUMULATIVE, "dot_general", "gather", "rev", "scatter", "sort"))
"""Primitives whose results may have the shape of their operands, and of which an entry depends on
other entries than that one of the operands."""
