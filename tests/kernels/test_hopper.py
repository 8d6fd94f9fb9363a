"""The Hopper kernels, interpreted on CPU against the answer in float64, and compiled for an H100 that is not here.

What jax's interpreter runs is the kernel: warpgroups as threads, copies, barriers, the ring, with memory that starts as
NaN and a detector of races. Only `Block.product` takes another way there, a plain dot in place of wgmma. So a mask, an
index or a barrier that is wrong is found here; what a wgmma is given, on hardware only.
"""

from __future__ import annotations

import importlib.util
import shutil
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import MASKS, Case, answer, assert_right, inputs, of_pair
from jax._src.pallas.mosaic.interpret import thread_map
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.extend.core import jaxprs_in_params
from jax.sharding import SingleDeviceSharding
from tiers import needs_cuda

from jaxpar.kernels.attention import hopper
from jaxpar.kernels.attention.call import Call
from jaxpar.kernels.attention.hopper_block import Visit
from jaxpar.kernels.masks import BigBird, BlockSparse, Causal, Mask, Segments, Window
from jaxpar.rehearse.targets import load_target

needs_ptxas = pytest.mark.skipif(
    shutil.which("ptxas") is None and importlib.util.find_spec("nvidia.cuda_nvcc") is None,
    reason="no ptxas: install CUDA's, or pip install nvidia-cuda-nvcc-cu12",
)
SHARED_MEMORY = 232448  # bytes that a block may have on an H100


@pytest.fixture(autouse=True)
def once_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter compiles a block anew for each of its threads and each place of the grid: once is enough."""
    compiled: dict[int, Any] = {}
    lock = threading.Lock()

    def run(jaxpr: Any, consts: Any, *args: Any) -> None:
        with lock:
            if id(jaxpr) not in compiled:
                of_block = jax.jit(lambda consts, *args: jax.core.eval_jaxpr(jaxpr, consts, *args))
                compiled[id(jaxpr)] = jaxpr, of_block.lower(consts, *args).compile()
        compiled[id(jaxpr)][1](consts, *args)

    monkeypatch.setattr(thread_map, "_run_jaxpr", run)
    yield
    interpreter.reset_gpu_interpret_mode_state()


def assert_served(case: Case, **options: Any) -> None:
    given = inputs(case)
    found = of_pair(hopper.forward, hopper.backward, case, given, interpret=True, **options)
    assert not interpreter.get_races().races_found
    assert_right(found, answer(case, given), case.dtype)


def of_mask(mask: str) -> Case:
    """Two blocks of strips, two tiles in the ring or four, two heads of one kv head."""
    return Case(mask, 1, 256, 256, 2, 1, 64, "bfloat16", block=128)


QUICK = ["causal", "causal_late", "window_documents", "documents_or_blocks"]


@pytest.mark.parametrize("mask", QUICK)
def test_masks(mask: str) -> None:
    assert_served(of_mask(mask))


@pytest.mark.long
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask not in QUICK])
def test_other_masks(mask: str) -> None:
    assert_served(of_mask(mask))


@pytest.mark.parametrize(
    "case",
    [
        Case("causal_end", 2, 50, 75, 4, 2, 80, "bfloat16"),  # odd sizes, of which a tile is mostly past the end
        Case("full", 1, 1, 200, 2, 2, 128, "bfloat16"),  # one query, as in generation
        Case("two_documents", 2, 200, 130, 3, 1, 32, "bfloat16", 5.0),
    ],
    ids=str,
)
def test_sizes(case: Case) -> None:
    assert_served(case)


@pytest.mark.long
@pytest.mark.parametrize(
    "case",
    [
        Case("causal", 1, 320, 320, 8, 1, 128, "bfloat16"),
        Case("causal_bigbird", 1, 256, 256, 2, 2, 96, "bfloat16", 5.0, block=64),  # one strip to a block
        Case("window_documents", 3, 130, 257, 4, 2, 64, "bfloat16", 5.0),
        Case("full", 1, 130, 300, 2, 2, 64, "bfloat16"),
        Case("unsorted", 2, 257, 100, 2, 1, 128, "bfloat16"),
        Case("causal_end", 1, 130, 192, 2, 1, 256, "bfloat16"),  # dk and dv apart
        Case("window_documents", 1, 130, 130, 1, 1, 192, "bfloat16", 5.0),
    ],
    ids=str,
)
def test_other_sizes(case: Case) -> None:
    assert_served(case)


def test_float32_is_given_where_asked_for() -> None:
    """Of gradients too: their rounding is what a ring of steps would add up."""
    case = of_mask("causal")
    given = inputs(case)
    found = of_pair(hopper.forward, hopper.backward, case, given, interpret=True, out_dtype=jnp.float32)
    assert {x.dtype.name for x in found[:5]} == {"float32"}
    assert_right(found, answer(case, given), "bfloat16")


def test_traced_places_and_keys_elsewhere() -> None:
    """A step of a ring: later queries, earlier keys, and lse and delta over more keys than these."""
    case = Case("window", 1, 256, 256, 2, 1, 64, "bfloat16")
    given, mask = inputs(case), Causal() & Window(300)
    whole = Case("window", 1, 256, 512, 2, 1, 64, "bfloat16")
    more = inputs(whole)._replace(q=given.q, mask=Causal(256) & Window(300 - 256))
    want = answer(whole, more)

    @jax.jit
    def step(place: Any, k: Any, v: Any) -> Any:
        call = Call(q_start=jnp.int32(256), k_start=place, interpret=True, out_dtype=jnp.float32)
        out, lse = hopper.forward(more.q, k, v, mask, call)
        delta = jnp.einsum("bshd,bshd->bhs", more.dout.astype(jnp.float32), want.out) - more.dlse
        gradients = hopper.backward(more.q, k, v, more.dout, jnp.float32(want.lse), delta, mask, call)
        return out, lse, *gradients

    keys = [(jnp.int32(start), more.k[:, start : start + 256], more.v[:, start : start + 256]) for start in (0, 256)]
    halves = [step(*half) for half in keys]
    lse = np.logaddexp(halves[0][1], halves[1][1])
    np.testing.assert_allclose(lse, want.lse, rtol=1e-5, atol=1e-5)
    shares = [np.exp(half[1] - lse).swapaxes(1, 2)[..., None] for half in halves]
    out = sum(share * half[0] for share, half in zip(shares, halves, strict=True))
    np.testing.assert_allclose(out, want.out, atol=2**-7 * want.size)
    dq = halves[0][2] + halves[1][2]
    dk, dv = (np.concatenate([half[n] for half in halves], axis=1) for n in (3, 4))
    for ours, theirs in ((dq, want.dq), (dk, want.dk), (dv, want.dv)):
        np.testing.assert_allclose(ours, theirs, atol=2**-6 * np.max(np.abs(theirs)))


def test_a_race_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are read before they are said to be there: the detector that the tests above rely on finds it."""
    wait = Visit.wait
    monkeypatch.setattr(Visit, "wait", lambda visit, stage: None if stage else wait(visit, stage))
    given = inputs(Case("full", 1, 128, 256, 1, 1, 64, "bfloat16"))
    jax.block_until_ready(hopper.forward(given.q, given.k, given.v, given.mask, Call(interpret=True)))
    assert interpreter.get_races().races_found


@pytest.mark.quick
@pytest.mark.parametrize(
    ("h", "dtype", "mask", "why"),
    [
        (64, "float32", Causal(), "float32 is not bfloat16"),
        (320, "bfloat16", Causal(), "head_dim 320 is more than 256"),
        (256, "bfloat16", Causal(), ""),
        (64, "bfloat16", BlockSparse(np.eye(8), 32, 32), "tiles of 64 x 64 cut the blocks"),
        (64, "bfloat16", BlockSparse(np.eye(8), 64, 64), ""),
        (80, "bfloat16", Causal(), ""),
    ],
)
def test_refusals(h: int, dtype: str, mask: Mask, why: str) -> None:
    refused = hopper.refusal((1, 256, 2, h), (1, 256, 2, h), dtype, mask)
    assert why in refused and bool(why) == bool(refused)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("capability", "cuda", "why"), [("8.0", 13000, "not Hopper's"), ("9.0", 12080, "miscompiles"), ("9.0", 13000, "")]
)
def test_gpus_that_cannot(capability: str, cuda: int, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(compute_capability=capability)])
    monkeypatch.setattr("jax._src.lib.cuda_versions", SimpleNamespace(cuda_runtime_get_version=lambda: cuda))
    refused = hopper.refusal((1, 256, 2, 64), (1, 256, 2, 64), "bfloat16", Causal())
    assert why in refused and bool(why) == bool(refused)


# Compiled for an H100 that is not here.


def documents(S: int) -> Mask:
    ids = jnp.zeros((1, S), jnp.int32)
    return Causal() & Segments(ids, ids)


COMPILED = {
    "causal": lambda S: Causal(),
    "window": lambda S: Causal() & Window(1023),
    "documents": documents,
    "bigbird": lambda S: BigBird(S, 3, 2, 3, 0, 128),
}


def assert_compiles(S: int, h: int, mask: Mask, out_dtype: Any = None) -> None:
    """Forward and backward, eight heads of two kv heads; what they take besides arrays is less than their queries."""
    place = SingleDeviceSharding(load_target("h100x1").devices()[0])
    q, k = (jax.ShapeDtypeStruct((1, S, heads, h), jnp.bfloat16, sharding=place) for heads in (8, 2))
    row = jax.ShapeDtypeStruct((1, 8, S), jnp.float32, sharding=place)
    mask = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), mask)
    call = Call(out_dtype=out_dtype)
    for name, pass_, arrays in (
        ("forward", hopper.forward, (q, k, k)),
        ("backward", hopper.backward, (q, k, k, q, row, row)),
    ):
        traced = jax.jit(lambda arrays, mask, pass_=pass_: pass_(*arrays, mask, call)).trace(arrays, mask)
        shared = list(shared_memory(traced.jaxpr))
        compiled = traced.lower(lowering_platforms=("cuda",)).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        print(f"{name} S={S} h={h}: {shared} bytes of shared memory, {temporary / 2**20:.2f} MiB of temporaries")
        assert max(shared) <= SHARED_MEMORY
        assert temporary < S * 8 * h * 2


def shared_memory(jaxpr: Any) -> Iterator[int]:
    """Bytes of each kernel."""
    for equation in jaxpr.eqns:
        rooms = [v.aval for v in getattr(equation.params.get("jaxpr"), "invars", [])]
        if equation.primitive.name == "run_scoped" and any(
            str(getattr(x, "memory_space", "")) == "smem" for x in rooms
        ):
            yield sum(x.size * x.dtype.itemsize for x in rooms if isinstance(x.dtype, np.dtype))
            continue
        for inner in jaxprs_in_params(equation.params):
            yield from shared_memory(inner)


@needs_cuda
@needs_ptxas
def test_compiles() -> None:
    assert_compiles(4096, 128, Causal())


@pytest.mark.long
@needs_cuda
@needs_ptxas
@pytest.mark.parametrize("S", [4096, 131072])
@pytest.mark.parametrize("h", [64, 128])
@pytest.mark.parametrize("mask", COMPILED)
def test_compiles_all(mask: str, h: int, S: int) -> None:
    assert_compiles(S, h, COMPILED[mask](S))


@pytest.mark.long
@needs_cuda
@needs_ptxas
@pytest.mark.parametrize("h", [192, 256])
def test_compiles_with_dk_and_dv_apart(h: int) -> None:
    assert_compiles(4096, h, documents(4096))


@pytest.mark.long
@needs_cuda
@needs_ptxas
def test_compiles_with_float32_out() -> None:
    assert_compiles(4096, 128, documents(4096), jnp.float32)


@pytest.mark.long
@needs_cuda
@needs_ptxas
def test_compiles_with_one_strip_to_a_block() -> None:
    assert_compiles(4096, 64, BigBird(4096, block=64) | Causal() & Window(5))
