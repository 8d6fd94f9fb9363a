"""Host memory for activations and arguments: which devices have it, which versions are known to
offload wrongly, and a check of the gradients on this device.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend.mlir import ir

from jaxpar.base.errors import Say, UserError
from jaxpar.base.layout.sharding import PyTree

HOST = "pinned_host"
# The two programs do the same in the same order; a compiler that fuses them differently may round
# by a few ulps.
_TOLERANCE = 1e-5


KNOWN_BAD = {
    (
        "gpu",
        "0.11.0",
    ): "scan residuals in host memory give silently wrong gradients (openxla/xla#46231)"
}
"""The known faults of offloading, by platform and version of jaxlib, in words."""


def known_problem(platform: str, jaxlib: str) -> str:
    """Look up what is known to go wrong with offloaded activations.

    Args:
      platform: `cpu`, `gpu` or `tpu`.
      jaxlib: the version of jaxlib, as it states it itself.

    Returns:
      The problem in words; empty = nothing is known.
    """
    what = KNOWN_BAD.get((platform, jaxlib))
    if what:
        return f"jaxlib {jaxlib} on {platform.upper()}: {what}"
    return ""


def check_offload(what: str, device: jax.Device, anyway: bool) -> None:
    """Refuse to offload where it cannot be done, or where it is known to give wrong results.

    Args:
      what: the setting that asks for it, with which a message begins.
      device: a device of the plan, which may be absent.
      anyway: whether to do it even where it is known to be wrong.

    Raises:
      UserError: the version is known to be wrong, or the device has no host memory.
    """
    bad = known_problem(device.platform, version("jaxlib"))
    if bad and not anyway:
        raise UserError(
            f"{what}: {bad}. Install another jaxlib, or leave it on the device; "
            "memory.offload_anyway=True has it all "
            "the same, after a check of a small gradient"
        )
    kinds = memory_kinds(device)
    if kinds and HOST not in kinds:
        raise UserError(
            f"{what}: {device.device_kind} has no host memory that a program can use ({HOST}), "
            "only "
            f"{', '.join(kinds)}: save it, or recompute it"
        )


def on_host(x: jax.Array) -> jax.Array:
    """Move an array of a traced function to host memory; if it is there already, it stays."""
    return jax.device_put(x, jax.memory.Space.Host)


def on_device(x: jax.Array) -> jax.Array:
    """Move an array of a traced function to the device; if it is there already, it stays."""
    if in_host_memory(x):
        return jax.device_put(x, jax.memory.Space.Device)
    return x


def in_host_memory(x: jax.Array) -> bool:
    """Return whether an array of a traced function lies in host memory."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def compile_absent(
    lowered: jax.stages.Lowered, options: Mapping[str, Any] | None = None
) -> jax.stages.Compiled:
    """Compile a lowered program for devices that may be absent.

    JAX's cache of programs cannot read those of an absent GPU again: they are compiled anew, and
    JAX's warning, which nobody could mend, is left out.

    Args:
      options: options of the compiler, beside those of the jitted function.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        return lowered.compile(dict(options) if options else None)


def lower_for(
    jitted: jax.stages.Wrapped,
    arguments: PyTree,
    host: PyTree,
    platform: str,
    keywords: Mapping[str, PyTree] | None = None,
) -> tuple[jax.stages.Traced, jax.stages.Lowered]:
    """Trace and lower a jitted function for devices that may be absent, with some of its arguments
    in host memory.

    An absent GPU knows no kinds of memory, and its shardings forget them, so they are written into
    the lowered program.

    Args:
      jitted: the function, which uses all of its arguments where some lie in host memory.
      arguments: the function's arguments, a tuple of trees of ShapeDtypeStructs with shardings.
      host: a tree of the form of `arguments` that says of each whether it lies in host memory.
      platform: the platform to lower for: `cpu`, `cuda` or `tpu`.
      keywords: arguments that the function takes by name; none of them lies in host memory.

    Returns:
      The traced function and the lowered program.
    """
    leaves = jax.tree.leaves(arguments)
    flags = jax.tree.leaves(host)
    forgotten = any(
        flag and leaf.sharding.memory_kind != HOST for leaf, flag in zip(leaves, flags, strict=True)
    )

    # a shape; in host memory an abstract value
    def there(leaf: jax.ShapeDtypeStruct, flag: bool) -> Any:
        if not (flag and forgotten):
            return leaf
        return jax.make_jaxpr(on_host)(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)).out_avals[0]

    traced = jitted.trace(
        *jax.tree.map(there, arguments, host),
        **(keywords or {}),
    )
    lowered = traced.lower(lowering_platforms=(platform,))
    if not forgotten:
        return traced, lowered
    module: Any = lowered.compiler_ir("stablehlo")
    (main,) = (op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
    attributes = [{item.name: item.attr for item in of_argument} for of_argument in main.arg_attrs]
    assert len(attributes) == len(flags), "an argument that is not used would shift those after it"
    with module.context:
        kind: dict[str, ir.Attribute] = {"mhlo.memory_kind": ir.StringAttr.get(HOST)}
        noted = (own | kind if flag else own for own, flag in zip(attributes, flags, strict=True))
        main.arg_attrs = ir.ArrayAttr.get([ir.DictAttr.get(own) for own in noted])
    return traced, lowered


def memory_kinds(device: jax.Device) -> list[str]:
    """List the kinds of memory that a program on this device can use; none where the device does
    not say.
    """
    try:
        return sorted(memory.kind for memory in device.addressable_memories())
    except Exception:  # the device is absent, and clients raise different errors
        return []


def require_right_gradients(device: jax.Device, say: Say) -> None:
    """Compare the gradient of a small offloaded scan with the plain one on this device.

    Args:
      device: a device that is here.
      say: is told in one line that the two gradients are the same.

    Raises:
      UserError: the two gradients differ.
    """
    error = gradient_error(device)
    where = f"{device.device_kind}, jaxlib {version('jaxlib')}"
    if not error <= _TOLERANCE:
        raise UserError(
            f"offloading gives wrong gradients here ({where}): a small scan's is off by "
            f"{error:.1e} of its size with "
            "its activations in host memory. Install another jaxlib, or offload nothing"
        )
    say(
        "offload: a small scan's gradient is the same with its activations in host memory "
        f"({where})"
    )


def gradient_error(device: jax.Device) -> float:
    """Measure how far a small scan's gradient is off with its activations in host memory.

    Args:
      device: a device that is here.

    Returns:
      The largest difference from the gradient without offloading, relative to the largest entry of
      that gradient; infinity where the difference is not a number.
    """
    rng = np.random.default_rng(0)
    arrays = (rng.standard_normal(shape, np.float32) for shape in ((5, 64, 64), (8, 64)))
    weights_LDD, x_BD = (jax.device_put(x, device) for x in arrays)

    def gradient(policy: Callable[..., Any] | None) -> np.ndarray:
        def body(
            x_BD: jax.Array,
            weight_DD: jax.Array,
        ) -> tuple[jax.Array, None]:
            return jnp.tanh(checkpoint_name(x_BD, "x") @ weight_DD / 8), None

        def loss(weights_LDD: jax.Array) -> jax.Array:
            y_BD, _ = jax.lax.scan(
                jax.checkpoint(body, policy=policy),
                x_BD,
                weights_LDD,
            )
            return jnp.sum(jnp.square(y_BD))

        return np.asarray(jax.jit(jax.grad(loss))(weights_LDD))

    offloaded = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst=HOST,
    )
    with jax.default_matmul_precision("highest"):
        plain = gradient(None)
        found = gradient(offloaded)
    error = np.max(np.abs(found - plain)) / np.max(np.abs(plain))
    if np.isfinite(error):
        return float(error)
    return float("inf")
