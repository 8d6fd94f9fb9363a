"""Everything that the library takes of JAX without a public name, as this jax has it: on a new one,
run this first.

A failure here names what was moved or renamed. Mend `jaxpar/base/jax_compat`, and nothing else.
"""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend import core
from jax.sharding import PartitionSpec as P
from tiers import needs_libtpu

from jaxpar.base import jax_compat
from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.compiler import once_options, program_options
from jaxpar.base.errors import UserError
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.dispatch import choose
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.masks import Causal
from jaxpar.rehearse.targets import load_target

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def primitives(jaxpr: Any) -> Iterator[str]:
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if isinstance(inner, core.Jaxpr | core.ClosedJaxpr):
                    yield from primitives(getattr(inner, "jaxpr", inner))


def traced(function: Callable[..., Any]) -> set[str]:
    return set(primitives(jax.make_jaxpr(function)(X).jaxpr))


# Private modules.


def test_the_cuda_plugins_versions_are_where_they_were() -> None:
    from jax._src.lib import cuda_versions  # None without the plugin

    assert cuda_versions is None or callable(cuda_versions.cudnn_get_version)
    assert jax_compat.cudnn_version() >= 0


def test_a_moved_module_breaks_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax._src.lib

    monkeypatch.delattr(jax._src.lib, "cuda_versions")
    assert jax_compat.cudnn_version() == 0


def test_jax_says_how_many_joined_before_it_has_started(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from jax._src.distributed import global_state

    assert global_state.num_processes == 1
    assert jax_compat.joined_processes() == 1
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(global_state, "num_processes", 3)
    assert jax_compat.joined_processes() == 3
    assert not caplog.messages
    monkeypatch.setattr(jax._src.distributed, "global_state", object())
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.delenv("JAX_NUM_PROCESSES", raising=False)
    assert jax_compat.joined_processes() == 4
    assert "share the simulated devices" in caplog.text


@pytest.mark.slow
def test_processes_give_each_other_bytes_through_jaxs_own_service() -> None:
    from jax._src.distributed import global_state

    assert hasattr(global_state, "client")
    assert jax_compat.coordination_client() is None, "this process has joined no others"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    told = subprocess.run(
        [sys.executable, "-c", _JOINED, f"127.0.0.1:{port}"],
        check=False,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == ["b'two'", "None", "['1/a']", "None"], told.stderr


_JOINED = """
import sys, jax
from jaxpar.base import jax_compat
from jaxpar.base.process.kv_store import Exchange
jax.distributed.initialize(sys.argv[1], 1, 0)
exchange = Exchange(jax_compat.coordination_client(), 0, 1)
exchange.put("here/1/a", b"one")
exchange.put("here/1/a", b"two")
print(exchange.get("here/1/a", 5.0), exchange.get("here/2/a"), list(exchange.below("here/")))
exchange.remove("here/1/")
print(exchange.get("here/1/a", 0.1))
"""


def test_nobody_else_looks_inside_jax() -> None:
    root = Path(__file__).parents[2]
    private = re.compile(r"jax\._src|\bjaxlib\.\w|import jaxlib|--?xla_")
    files = [file for folder in ("jaxpar", "models") for file in (root / folder).rglob("*.py")]
    found = {file.parent for file in files if private.search(file.read_text(encoding="utf-8"))}
    assert found == {root / "jaxpar" / "base" / "jax_compat"}


# Names of primitives.

MOVES: dict[str, tuple[str, Callable[[jax.Array], Any]]] = {
    "all_gather": ("all-gather", lambda x: jax.lax.all_gather(x, "fsdp")),
    "psum_scatter": ("reduce-scatter", lambda x: jax.lax.psum_scatter(x, "fsdp", tiled=True)),
    "psum": ("all-reduce", lambda x: jax.lax.psum(x, "fsdp")),
    "pmax": ("all-reduce", lambda x: jax.lax.pmax(x, "fsdp")),
    "pmin": ("all-reduce", lambda x: jax.lax.pmin(x, "fsdp")),
    "all_to_all": (
        "all-to-all",
        lambda x: jax.lax.all_to_all(x, "fsdp", 0, 1, tiled=True),
    ),
    "ppermute": (
        "ppermute",
        lambda x: jax.lax.ppermute(
            x,
            "fsdp",
            [(0, 1), (1, 0)],
        ),
    ),
}


@pytest.mark.parametrize("checked", [True, False], ids=["varying axes checked", "not checked"])
@pytest.mark.parametrize("move", MOVES)
def test_collectives_are_known_by_name(move: str, checked: bool) -> None:
    kind, function = MOVES[move]
    mesh = make_mesh(MeshSpec(fsdp=2), jax.devices()[:2])
    out = P() if kind == "all-reduce" else P("fsdp")
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P("fsdp"), out_specs=out, check_vma=checked
    )
    found = traced(mapped)
    assert jax_compat.SHARD_MAP in found
    known = {jax_compat.COLLECTIVES[name] for name in found if name in jax_compat.COLLECTIVES}
    assert known == {kind}, found
    left = [
        name
        for name in found - set(jax_compat.COLLECTIVES)
        if not name.startswith(jax_compat.STILL)
    ]
    assert left == [jax_compat.SHARD_MAP], "primitives that are neither"


PLAIN: dict[str, Callable[[jax.Array], Any]] = {
    "SCAN": lambda x: jax.lax.scan(lambda total, row: (total + row, None), x[0], x)[0],
    "WHILE": lambda x: jax.lax.while_loop(
        lambda x: jnp.sum(x) < 9,
        lambda x: x + 1,
        x,
    ),
    "COND": lambda x: jax.lax.cond(
        x[0, 0] > 0,
        jnp.sin,
        jnp.cos,
        x,
    ),
    "NAME": lambda x: checkpoint_name(x, "a name"),
}


@pytest.mark.parametrize("which", PLAIN)
def test_what_a_trace_is_read_by_is_in_it(which: str) -> None:
    names = getattr(jax_compat, which)
    assert traced(PLAIN[which]).intersection(names if isinstance(names, tuple) else (names,))


def test_cudnns_attention_is_known_by_name() -> None:
    from jax._src.cudnn import fused_attention_stablehlo as attention

    assert attention._dot_product_attention_fwd_p_wrapper.name == jax_compat.CUDNN_ATTENTION


# Flags. An unknown one is an error of the compiler's.


def test_the_cpu_compiler_knows_its_options_and_the_gpus() -> None:
    mesh = make_mesh(MeshSpec(), jax.devices()[:1])
    options = {**once_options(mesh), jax_compat.NO_CUDA_GRAPHS: ""}
    assert len(options) == 2
    jax.jit(jnp.sin, compiler_options=options).lower(X).compile()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_of_nobody"):
        jax.jit(jnp.sin, compiler_options={"xla_of_nobody": "1"}).lower(X).compile()


@pytest.mark.parametrize("what", jax_compat.PRIVATE)
def test_what_a_version_may_take_away_is_there_or_a_line_says_what_that_costs(what: str) -> None:
    """A failure of this alone breaks no run, but a part of the library is gone: look for its new
    name."""
    assert not jax_compat.refusal_without(what)
    assert not [line for line in jax_compat.missing() if jax_compat.PRIVATE[what].path in line]


@pytest.fixture
def taken_away(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes one of `PRIVATE` away, as a version of jax would."""

    def take(what: str) -> None:
        of = jax_compat.PRIVATE[what]
        gone = of._replace(module=of.module.replace("jax.", "jax.gone_", 1))
        monkeypatch.setitem(jax_compat.PRIVATE, what, gone)

    return take


def test_nothing_ends_in_a_traceback_where_jax_has_taken_a_module_away(
    taken_away: Callable[[str], None], caplog: pytest.LogCaptureFixture
) -> None:
    for what in jax_compat.PRIVATE:
        taken_away(what)
    assert jax_compat.cudnn_version() == 0
    assert jax_compat.coordination_client() is None
    assert len(jax_compat.missing()) == len(jax_compat.PRIVATE)
    assert "cuDNN counts as not installed" in caplog.text
    with pytest.raises(UserError, match=r"memory.optimizer=host: jax .* has no .*compute_on"):
        jax_compat.compute_in_host_memory(jnp.sin, X)
    with pytest.raises(UserError, match=r"for v5e-4: jax .* has no .*topologies"):
        load_target("v5e-4").devices()


@pytest.mark.parametrize(
    ("platform", "gone"), [("gpu", "pallas_gpu"), ("tpu", "pallas_tpu"), ("tpu", "splash")]
)
def test_attention_takes_others_where_jax_has_no_kernels_any_more(
    platform: str, gone: str, taken_away: Callable[[str], None]
) -> None:
    q = jax.ShapeDtypeStruct((1, 256, 2, 128), jnp.float32)
    request = AttentionRequest(q, q, Causal(), Call(), with_lse=gone != "splash", capability="9.0")
    assert choose(request, platform)[0] == gone
    taken_away(gone)
    name, why = choose(request, platform)
    assert name in ("pallas_tpu", "chunked")
    assert re.search(rf"{gone}: jax .* has no jax.gone_experimental.pallas", why)


def test_a_kernel_that_does_not_lower_is_a_line() -> None:
    """Of a primitive that no lowering of Pallas has; nothing is compiled."""

    def kernel(x_ref: Any, o_ref: Any) -> None:
        o_ref[...] = jnp.sort(x_ref[...])

    device = jax.devices()[0]
    shape = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    sort = pl.pallas_call(kernel, out_shape=shape, compiler_params=pltpu.CompilerParams())
    with (
        pytest.raises(UserError, match=r"^the kernel kernel does not lower for .* with jax ") as of,
        compiling_for(device),
    ):
        jax.jit(sort).trace(shape).lower(lowering_platforms=("tpu",))
    assert "sort" in str(of.value) and "\n" not in str(of.value)
    with pytest.raises(ZeroDivisionError), compiling_for(device):
        jax.jit(lambda x: x / (1 // 0)).trace(shape)


@needs_libtpu
def test_the_tpu_compiler_knows_its_options() -> None:
    mesh = make_mesh(MeshSpec(fsdp=4), load_target("v5e-4").devices())
    options = program_options(mesh)
    assert len(options) > 5
    x = jax.ShapeDtypeStruct(
        (8, 8),
        jnp.float32,
        sharding=jax.NamedSharding(mesh, P("fsdp")),
    )
    jitted = jax.jit(jnp.sin, compiler_options=options)
    jitted.trace(x).lower(lowering_platforms=("tpu",)).compile()
