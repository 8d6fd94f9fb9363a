"""Block-sparse matmuls: each kernel, interpreted, against the definition in float64; compiled for
chips that are not here.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiers import needs_cuda, needs_libtpu, some

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.errors import UserError
from jaxpar.hlo.program.tasks import walk
from jaxpar.hlo.read import read_program
from jaxpar.kernels import block_sparse
from jaxpar.kernels.block_sparse import tpu, triton
from jaxpar.kernels.block_sparse.blocks import cut_into_tiles
from jaxpar.kernels.masks import BlockSparse, Causal, Window
from jaxpar.rehearse.targets import load_target

UNIT = 8
"""The sides of tiles of the TPU's kernels where they are interpreted."""
KERNELS = {
    "tpu": (tpu, {"unit": UNIT, "interpret": True}),
    "gpu": (triton, {"interpret": True}),
}
TOLERANCE = {"float32": 1e-5, "bfloat16": 2e-2}
"""Relative to the largest entry: products are summed in float32 over some hundred terms, and an
answer in bfloat16 has 8 bits."""


class Case(NamedTuple):
    """A product of `rows` rows with a matrix of so many blocks."""

    rows: int
    map_MN: Any
    block: tuple[int, int] = (16, 16)
    dtype: str = "float32"

    def __str__(self) -> str:
        M, N = self.map_MN.shape
        return f"{self.rows} by {M}x{N} of {self.block[0]}x{self.block[1]} {self.dtype}"


def random_map(M: int, N: int, density: float) -> Any:
    return np.random.default_rng(M * N).random((M, N)) < density


def with_empty_lines() -> Any:
    """A map in which a row, a column and the last of each are empty."""
    found = random_map(5, 4, 0.6)
    found[[1, 4]] = False
    found[:, [0, 3]] = False
    return found


CASES = [
    Case(37, random_map(3, 5, 0.4), (16, 32)),
    Case(130, with_empty_lines()),
    Case(64, random_map(4, 4, 0.3), (32, 16), "bfloat16"),
    Case(1, np.ones((2, 3), bool)),
    Case(20, np.zeros((2, 3), bool)),
    Case(33, np.asarray(block_sparse.block_map(Causal(), (4, 4), (1, 1)))),
]


class Inputs(NamedTuple):
    x: Any
    weight: Any
    dy: Any


def inputs(case: Case) -> Inputs:
    """Random arrays; the blocks that are not kept are not numbers, so that a kernel that reads one
    is found out.
    """
    M, N = case.map_MN.shape
    shape = M * case.block[0], N * case.block[1]
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (case.rows, shape[0]))
    weight = np.array(jax.random.normal(keys[1], shape))
    weight[~np.kron(case.map_MN, np.ones(case.block, bool))] = np.nan
    dy = jax.random.normal(keys[2], (case.rows, shape[1]))
    return Inputs(*(jnp.asarray(array, case.dtype) for array in (x, weight, dy)))


def definition(case: Case, given: Inputs) -> tuple[Any, Any, Any]:
    """The product and the gradients of x and of the matrix, in float64."""
    x, weight, dy = (np.asarray(array, np.float64) for array in given)
    kept = np.kron(case.map_MN, np.ones(case.block, bool))
    weight = np.where(kept, weight, 0)
    return x @ weight, dy @ weight.T, np.where(kept, x.T @ dy, 0)


def assert_close(found: Any, wanted: Any, dtype: str) -> None:
    scale = max(float(np.max(np.abs(wanted))), 1.0)
    np.testing.assert_allclose(
        np.asarray(found, np.float64), wanted, rtol=0, atol=TOLERANCE[dtype] * scale
    )


@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", some(CASES, 3), ids=str)
def test_a_kernel_is_the_definition(case: Case, kernel: str, traced: bool) -> None:
    module, options = KERNELS[kernel]
    given = inputs(case)
    wanted = definition(case, given)
    kept = np.kron(case.map_MN, np.ones(case.block, bool))

    def products(given: Inputs, map_MN: Any) -> Any:
        return (
            module.multiply(given.x, given.weight, map_MN, **options),
            module.multiply(given.dy, given.weight, map_MN, transposed=True, **options),
            module.weight_gradient(given.x, given.dy, map_MN, **options),
        )

    if traced:
        y, dx, dweight = jax.jit(products)(given, jnp.asarray(case.map_MN))
    else:
        y, dx, dweight = jax.jit(partial(products, map_MN=case.map_MN))(given)
    assert y.dtype == dx.dtype == case.dtype and dweight.dtype == jnp.float32
    assert_close(y, wanted[0], case.dtype)
    assert_close(dx, wanted[1], case.dtype)
    assert_close(np.where(kept, dweight, 0), wanted[2], "float32")


@pytest.mark.parametrize(
    ("implementation", "block"), [("pallas_tpu", 128), ("pallas_gpu", 16), ("reference", 8)]
)
@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
def test_gradients_are_those_of_the_masked_matrix(
    implementation: str, block: int, traced: bool
) -> None:
    """Of rows with several leading dims, behind the public function."""
    case = Case(6, random_map(2, 3, 0.5), (block, block))
    given = inputs(case)
    x = given.x.reshape(2, 3, -1)
    dy = given.dy.reshape(2, 3, -1)
    blocks = jnp.asarray(case.map_MN) if traced else case.map_MN

    @jax.jit
    def both(x: Any, weight: Any, blocks_traced: Any) -> Any:
        chosen = blocks_traced if traced else case.map_MN
        of = partial(block_sparse.matmul, implementation=implementation, interpret=True)
        y, back = jax.vjp(lambda x, weight: of(x, weight, chosen), x, weight)
        return y, *back(dy)

    y, dx, dweight = both(x, given.weight, jnp.asarray(blocks))
    wanted = definition(case, given)
    assert_close(y.reshape(6, -1), wanted[0], "float32")
    assert_close(dx.reshape(6, -1), wanted[1], "float32")
    assert_close(dweight, wanted[2], "float32")  # zero, and a number, where blocks are not kept


@pytest.mark.parametrize("by_column", [False, True])
def test_the_tiles_that_are_visited_are_those_that_are_kept(by_column: bool) -> None:
    """Cut finer than the blocks, each once."""
    blocks = with_empty_lines()
    M, N = blocks.shape
    tiles = cut_into_tiles(blocks, (M * 64, N * 32), (16, 16), UNIT)
    assert tiles is not None and (tiles.tile_i, tiles.tile_o) == (16, 16)
    entries_BRW, full_BR, some_BR = tiles.visits(by_column)
    seen = np.zeros((M * 4, N * 2), int)
    for row in range(some_BR.shape[1]):
        for w in range(int(some_BR[0, row])):
            entry = int(entries_BRW[0, row, w])
            seen[(entry, row) if by_column else (row, entry)] += 1
    np.testing.assert_array_equal(seen, np.kron(blocks, np.ones((4, 2), int)))
    np.testing.assert_array_equal(full_BR, some_BR)
    assert tiles.most == np.sum(blocks) * 8


def test_blocks_of_a_mask() -> None:
    found = block_sparse.block_map(BlockSparse(np.eye(3), 8, 4), (24, 12), (8, 4))
    np.testing.assert_array_equal(found, np.eye(3, dtype=bool))
    with pytest.raises(UserError, match="a matrix of 24 x 12"):
        block_sparse.block_map(Causal(), (24, 12), (5, 4))
    with pytest.raises(UserError, match=r"keeps a part of \d+ blocks of 8 x 8"):
        block_sparse.block_map(Causal() & Window(3), (24, 24), (8, 8))


X = jnp.zeros((2, 4, 32))
WEIGHT = jnp.zeros((32, 48))
MAP = np.ones((2, 3), bool)


@pytest.mark.parametrize(
    ("given", "options", "says"),
    [
        ((X, jnp.zeros((16, 48)), MAP), {}, r"was given \(2, 4, 32\) and \(16, 48\)"),
        ((X, WEIGHT.astype("bfloat16"), MAP), {}, "given float32 and bfl"),
        ((X, WEIGHT, MAP.astype(int)), {}, "an array .M, N. of truth values"),
        ((X, WEIGHT, [[True]]), {}, ".M, N. of truth values"),
        ((X, WEIGHT, np.ones((3, 3), bool)), {}, r"map of \(3, 3\) blocks does not divide"),
        ((X, WEIGHT, np.ones(2, bool)), {}, r"map of \(2,\) blocks does not divide"),
        ((X, WEIGHT, MAP), {"implementation": "cusparse"}, "try one of pallas_gpu, pallas_tpu"),
        ((X, WEIGHT, MAP), {"implementation": "pallas_tpu"}, "on cpu; reference serves"),
        (
            (X, WEIGHT, MAP),
            {"implementation": "pallas_tpu", "platform": "tpu"},
            "blocks of 16 x 16 are no multiples of 128 lanes; reference serves",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_what_is_refused(given: Any, options: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        block_sparse.matmul(*given, **options)


def test_a_kernel_that_cannot_serve_is_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    block_sparse.matmul(X, WEIGHT, np.ones((32, 48), bool), platform="gpu")
    assert "plain XLA on the whole matrix (pallas_gpu: blocks of 1 x 1 are no" in caplog.text


@needs_cuda
def test_a_gpu_older_than_the_kernels_is_served_by_xla(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    (device,) = load_target("t4x1").devices()
    with compiling_for(device):
        jax.eval_shape(lambda x, weight: block_sparse.matmul(x, weight, MAP), X, WEIGHT)
    assert "plain XLA on the whole matrix (pallas_gpu: compute capability 7.5" in caplog.text


# Compiled, for chips that are not here.


ROWS, WIDTH, HEIGHT = 4096, 2048, 4096
"""The rows of x, and the matrix, of which a quarter is kept."""


def kernels_of(target: str, block: int, traced: bool, dtype: str = "bfloat16") -> list[Any]:
    """The kernels of a product and its two gradients, as a rehearsal reads them."""
    device = load_target(target).devices()[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    M = WIDTH // block
    N = HEIGHT // block
    known = np.add.outer(np.arange(M), np.arange(N)) % 4 == 0

    def array(*shape: int, dtype: str = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def step(x: Any, weight: Any, blocks: Any) -> Any:
        def product(x: Any, weight: Any) -> Any:
            chosen = blocks if traced else known
            return block_sparse.matmul(x, weight, chosen, platform=platform)

        y, back = jax.vjp(product, x, weight)
        return y, *back(y)

    platform = "tpu" if device.platform == "tpu" else "gpu"
    lowering = ("tpu",) if platform == "tpu" else ("cuda",)
    given = array(ROWS, WIDTH), array(WIDTH, HEIGHT), array(M, N, dtype="bool")
    with compiling_for(device):
        lowered = jax.jit(step).trace(*given).lower(lowering_platforms=lowering)
    compiled = lowered.compile()
    program = read_program(compiled.as_text())
    return [task for task, _ in walk(program.nodes) if task.kind == "kernel"]


DENSE = 2 * ROWS * WIDTH * HEIGHT
"""The FLOPs of a product with the whole matrix."""


@needs_libtpu
@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
@pytest.mark.parametrize("block", [128, 256, 1024])
def test_it_compiles_for_an_absent_tpu(block: int, traced: bool) -> None:
    """A forward and two backwards, each a quarter of the work where that is known."""
    found = [task.flops for task in kernels_of("v5e-1", block, traced)]
    assert found == [DENSE if traced else DENSE / 4] * 3


@needs_libtpu
def test_it_compiles_for_an_absent_tpu_in_float32() -> None:
    found = [task.flops for task in kernels_of("v6e-1", 256, False, "float32")]
    assert found == [DENSE / 4] * 3


@needs_cuda
@pytest.mark.parametrize("traced", [False, True], ids=["known", "traced"])
@pytest.mark.parametrize("target", ["a100x1", "h100x1"])
def test_it_compiles_for_an_absent_gpu(target: str, traced: bool) -> None:
    found = [task.flops for task in kernels_of(target, 128, traced)]
    assert found == [DENSE if traced else DENSE / 4] * 3
