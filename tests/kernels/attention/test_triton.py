"""The Triton kernels, interpreted on the CPU, and compiled for GPUs that are not here.

Poison is NaN: a kernel that touches a tile which it need not visit spreads it, as 0 * NaN is NaN.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import KERNEL_CASES, SIZES, Case, answer, assert_right, inputs, of_pair
from tiers import needs_cuda, some

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.hardware import CHIPS, load_chip
from jaxpar.base.toml import presets
from jaxpar.kernels.attention import dispatch, triton, triton_kernels
from jaxpar.kernels.attention.call import Call, Unserved, reference
from jaxpar.kernels.attention.kernel import AttentionRequest
from jaxpar.kernels.attention.triton_tiles import Tile, TileSizes, tile_sizes_for, tile_sizes_here
from jaxpar.kernels.masks import (
    EMPTY,
    BlockSparse,
    Causal,
    Full,
    Mask,
    Segments,
    Tiles,
    Window,
    bigbird,
    tile_states,
)
from jaxpar.rehearse.targets import load_target

SMALL = TileSizes(
    Tile(16, 32),
    Tile(32, 16),
    Tile(16, 16),
)
forward = partial(triton.forward, sizes=SMALL)
backward = partial(triton.backward, sizes=SMALL)
INTERPRETED = Call(interpret=True)


# Answers.


@pytest.mark.parametrize(
    "case",
    some([*KERNEL_CASES, *SIZES], 9, pytest.mark.long),
    ids=str,
)
def test_the_answer_is_right(case: Case) -> None:
    given = inputs(case)
    assert_right(
        of_pair(forward, backward, case, given, interpret=True), answer(case, given), case.dtype
    )


@pytest.mark.users_flags
@pytest.mark.parametrize("name", ["causal", "window_documents", "dilated_or_prefix"])
def test_parts_of_a_sequence_wherever_they_start(name: str) -> None:
    """Queries of each device against keys of each, places traced, lse that of the whole: merged,
    they are the whole.
    """
    case = Case(name, S=96, T=96, H=4)
    given = inputs(case)
    n = 32
    whole = answer(case, given)
    lse = jnp.asarray(np.maximum(whole.lse, -1e30), jnp.float32)
    delta = jnp.asarray(
        np.einsum("bshd,bshd->bhs", given.dout, whole.out) - given.dlse, jnp.float32
    )

    @jax.jit
    def part(q_start: Any, k_start: Any) -> Any:
        call = Call(q_start=q_start, k_start=k_start, multiple=n, interpret=True)
        q, dout = (jax.lax.dynamic_slice_in_dim(x, q_start, n, 1) for x in (given.q, given.dout))
        k, v = (jax.lax.dynamic_slice_in_dim(x, k_start, n, 1) for x in (given.k, given.v))
        rows = [jax.lax.dynamic_slice_in_dim(x, q_start, n, 2) for x in (lse, delta)]
        mask = given.mask.replaced(lambda leaf: _sliced(leaf, q_start, k_start, n))
        out, part_lse = forward(q, k, v, mask, call)
        share = jnp.exp(part_lse - jnp.maximum(rows[0], -1e29)).swapaxes(1, 2)[..., None]
        return out * share, *backward(q, k, v, dout, *rows, mask, call)

    found = [np.zeros(x.shape) for x in (whole.out, whole.dq, whole.dk, whole.dv)]
    for q_start in range(0, 96, n):
        for k_start in range(0, 96, n):
            for sum_, x, start in zip(
                found, part(q_start, k_start), (q_start, q_start, k_start, k_start), strict=True
            ):
                sum_[:, start : start + n] += x
    for ours, theirs in zip(
        found,
        (whole.out, whole.dq, whole.dk, whole.dv),
        strict=True,
    ):
        np.testing.assert_allclose(
            ours,
            theirs,
            atol=3e-5 * np.max(np.abs(theirs)),
        )


def _sliced(leaf: Mask, q_start: Any, k_start: Any, n: int) -> Mask:
    if not isinstance(leaf, Segments):
        return leaf
    q_ids = jax.lax.dynamic_slice_in_dim(leaf.q_ids, q_start, n, 1)
    return Segments(q_ids, jax.lax.dynamic_slice_in_dim(leaf.kv_ids, k_start, n, 1))


def test_outputs_and_gradients_may_have_another_dtype() -> None:
    case = Case("causal", S=32, T=32, dtype="bfloat16")
    given = inputs(case)
    found = of_pair(forward, backward, case, given, interpret=True, out_dtype=jnp.float32)
    assert {x.dtype for x in found[:5]} == {jnp.dtype(jnp.float32)}
    assert_right(found, answer(case, given), "bfloat16")
    # Not rounded to bfloat16 on the way out: the reference's float32 output of the same inputs is
    # nearer than that.
    exact, _ = reference(
        *(x.astype(jnp.float32) for x in given[:3]),
        Causal(),
    )
    assert np.any(
        np.asarray(found.out)
        != np.asarray(
            found.out.astype(jnp.bfloat16),
            np.float32,
        )
    )
    np.testing.assert_allclose(found.out, exact, atol=2**-7)


def test_the_scale_may_be_another() -> None:
    given = inputs(Case("causal", S=32, T=32))
    ours = forward(
        given.q,
        given.k,
        given.v,
        Causal(),
        Call(scale=0.5, interpret=True),
    )
    theirs = reference(
        given.q,
        given.k,
        given.v,
        Causal(),
        Call(scale=0.5),
    )
    np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)


# Work.


@pytest.mark.parametrize("name", ["window_both", "causal_bigbird", "documents"])
def test_empty_tiles_are_not_visited(name: str) -> None:
    """With tiles of 16 x 16: NaN in all that a row of tiles need not see changes nothing of
    that row.
    """
    size = TileSizes(
        Tile(16, 16),
        Tile(16, 16),
        Tile(16, 16),
    )
    case = Case(
        name,
        B=1,
        S=128,
        T=128,
        H=2,
        K=1,
    )
    given = inputs(case)
    states = np.broadcast_to(tile_states(given.mask, Tiles(128, 128, 16, 16)), (1, 8, 8))[0]

    @jax.jit
    def run(
        q: Any,
        k: Any,
        v: Any,
        dout: Any,
        lse: Any,
        delta: Any,
    ) -> Any:
        out, found = triton.forward(q, k, v, given.mask, INTERPRETED, size)
        lse = jnp.where(jnp.isnan(lse), found, lse)
        return (
            out,
            found,
            *triton.backward(
                q,
                k,
                v,
                dout,
                lse,
                delta,
                given.mask,
                INTERPRETED,
                size,
            ),
        )

    q, k, v, dout, dlse, _ = given
    clean = run(
        q,
        k,
        v,
        dout,
        jnp.full_like(dlse, jnp.nan),
        dlse,
    )
    lse = clean[1]
    empty = 0
    for row in range(8):
        part = slice(row * 16, row * 16 + 16)
        unseen = np.repeat(states[row] == EMPTY, 16)
        out, _, dq, _, _ = run(
            q, k.at[:, unseen].set(jnp.nan), v.at[:, unseen].set(jnp.nan), dout, lse, dlse
        )
        np.testing.assert_array_equal(out[:, part], clean[0][:, part])
        np.testing.assert_array_equal(dq[:, part], clean[2][:, part])
        unseen = np.repeat(states[:, row] == EMPTY, 16)
        poisoned = q.at[:, unseen].set(jnp.nan), k, v, dout.at[:, unseen].set(jnp.nan), lse, dlse
        _, _, _, dk, dv = run(*poisoned)
        np.testing.assert_array_equal(dk[:, part], clean[3][:, part])
        np.testing.assert_array_equal(dv[:, part], clean[4][:, part])
        empty += np.sum(states[row] == EMPTY)
    assert empty >= 16, "a mask without empty tiles proves nothing"


def test_poison_is_seen_where_a_tile_is_visited() -> None:
    given = inputs(Case("full", B=1))
    out, _ = forward(
        given.q,
        given.k,
        given.v.at[:, 40].set(jnp.nan),
        Causal(),
        INTERPRETED,
    )
    assert not np.any(np.isnan(out[:, :32])), "tiles above the diagonal"
    assert np.all(np.isnan(out[:, 32:])), "hidden in a tile that is visited, and seen"


def test_full_tiles_take_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `in_tile` hides everything, only full tiles count: of a mask of blocks, all of them."""
    monkeypatch.setattr(
        triton_kernels,
        "in_tile",
        lambda mask, i, j, ids: (i - j) != (i - j),
    )
    case = Case("blocks", S=96, T=96)
    given = inputs(case)
    assert_right(
        of_pair(forward, backward, case, given, interpret=True), answer(case, given), "float32"
    )
    out, _ = forward(given.q, given.k, given.v, Causal(), INTERPRETED)
    assert np.all(np.asarray(out[:, :16]) == 0), "on the diagonal all is partial"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "HIGHEST"), ("bfloat16", "None")],
)
def test_products_are_summed_in_float32_and_never_in_tf32(dtype: str, precision: str) -> None:
    q, k, v, dout, dlse, _ = inputs(Case("causal", dtype=dtype))
    programs = (
        jax.make_jaxpr(lambda: forward(q, k, v, Causal(), INTERPRETED))(),
        jax.make_jaxpr(lambda: backward(q, k, v, dout, dlse, dlse, Causal(), INTERPRETED))(),
    )
    products = [
        eqn
        for program in programs
        for eqn in _equations(program.jaxpr)
        if "dot" in eqn.primitive.name
    ]
    assert len(products) == 2 * (2 + 3 + 4), "once in full tiles and once in the others"
    for eqn in products:
        assert eqn.outvars[0].aval.dtype == jnp.float32
        assert precision in str(eqn.params["precision"])


def _equations(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from _equations(inner)


# What it refuses, and the tiles it takes.


@pytest.mark.parametrize(
    ("h", "dtype", "mask", "why"),
    [
        (64, "float16", Causal(), "float16 is neither float32 nor bfloat16"),
        (8, "float32", Causal(), "head_dim 8 is not between 16 and 256"),
        (512, "bfloat16", Causal(), "head_dim 512 is not between 16 and 256"),
        (
            64,
            "bfloat16",
            bigbird(64, block=8),
            "tiles of less than 16 places: 8 x 8 of BlockSparse",
        ),
        (
            64,
            "bfloat16",
            Causal() & BlockSparse(np.eye(4), 16, 24),
            "tiles of less than 16 places: 16 x 8 of Causal",
        ),
        (80, "bfloat16", Causal() & bigbird(64, block=16), ""),
        (256, "float32", Window(3, 5), ""),
    ],
)
def test_refusals(h: int, dtype: str, mask: Mask, why: str) -> None:
    found = triton.refusal(
        (1, 64, 4, h),
        (1, 64, 2, h),
        dtype,
        mask,
    )
    assert found.startswith(why) and bool(found) == bool(why)


@pytest.mark.parametrize(
    ("capability", "why"),
    [("7.5", "compute capability 7.5 is below 8.0"), ("8.9", ""), ("10.0", "")],
)
def test_gpus_before_ampere_are_refused(
    capability: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU that it is compiled for decides, and that which is here where none is named."""
    one = jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.bfloat16)
    request = AttentionRequest(
        one,
        one,
        Causal(),
        Call(),
        with_lse=False,
        capability=capability,
    )
    assert dispatch.refusal("pallas_gpu", request, "gpu") == why
    assert not why or dispatch.refusal("cudnn", request, "gpu") == why
    assert not why or dispatch.choose(request, "gpu")[0] == "chunked"
    here = {"platform": "gpu", "device_kind": "a GPU", "compute_capability": capability}
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(**here)])
    assert dispatch.refusal("pallas_gpu", request._replace(capability=""), "gpu") == why


def test_tiles_divide_the_blocks_of_a_mask_and_are_no_longer_than_the_sequence() -> None:
    def fitted(
        S: int,
        T: int,
        mask: Mask,
        call: Call = INTERPRETED,
    ) -> tuple[int, int]:
        tile = triton._fit_tile(
            Tile(128, 64, 8, 3),
            S,
            T,
            mask,
            call,
        )
        assert (tile.warps, tile.stages) == (
            8 if tile.block_q * tile.block_k >= 2048 else 4,
            3,
        )
        return tile.block_q, tile.block_k

    assert fitted(4096, 4096, Causal()) == (128, 64)
    assert fitted(1, 40, Causal()) == (16, 64)
    assert fitted(4096, 4096, Causal() & BlockSparse(np.eye(4), 64, 96)) == (64, 32)
    assert fitted(4096, 4096, bigbird(4096, block=256)) == (128, 64)
    assert fitted(4096, 4096, bigbird(4096, block=256), Call(q_start=32, k_start=4096)) == (32, 64)
    assert fitted(
        4096,
        4096,
        bigbird(4096, block=256),
        Call(
            q_start=jnp.int32(0),
            multiple=64,
        ),
    ) == (64, 64)
    with pytest.raises(Unserved, match="less than 16 places: 8 x 64"):
        fitted(4096, 4096, bigbird(4096), Call(q_start=8))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_chip_and_head_dim_has_tiles(dtype: str) -> None:
    for chip in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA L4", "cpu"):
        for h in (32, 64, 80, 128, 192, 256):
            for tile in tile_sizes_for(h, dtype, chip):
                assert min(tile[:2]) >= triton.LEAST
                assert all(block & (block - 1) == 0 for block in tile[:2])
    assert tile_sizes_for(64, "bfloat16", "NVIDIA H100 PCIe") != tile_sizes_for(
        64, "bfloat16", "NVIDIA A100-PCIE-40GB"
    )
    assert tile_sizes_here(64, "bfloat16") == tile_sizes_for(64, "bfloat16", "an unknown chip")


@pytest.mark.parametrize(
    "kind, like",
    [
        ("NVIDIA H800", "h100"),
        ("NVIDIA H20", "h100"),
        ("NVIDIA GH200 480GB", "h100"),
        ("NVIDIA H200 NVL", "h200"),
        ("NVIDIA A800-SXM4-80GB", "a100"),
        ("NVIDIA B300 SXM6 AC", "b200"),
        ("NVIDIA GB200", "b200"),
    ],
)
def test_a_gpu_takes_the_tiles_of_the_chip_file_that_names_it(
    kind: str, like: str, caplog: pytest.LogCaptureFixture
) -> None:
    """H800, H20, A800 and B300 took the small tiles of an unknown GPU."""
    (chip, *_) = load_chip(like).hardware.device_kinds
    for h in (64, 128, 256):
        assert tile_sizes_for(h, "bfloat16", kind) == tile_sizes_for(h, "bfloat16", chip)
        assert tile_sizes_for(h, "bfloat16", kind) != tile_sizes_for(h, "bfloat16", "NVIDIA L4")
    assert not caplog.records


def test_a_gpu_that_no_chip_file_names_takes_small_tiles_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = "NVIDIA R100"
    for h in (64, 128):
        assert tile_sizes_for(h, "bfloat16", unknown) == tile_sizes_for(h, "bfloat16", "NVIDIA L4")
    (record,) = caplog.records
    assert record.message.startswith("attention on NVIDIA R100: no file of meshes/chips names")


def test_no_two_chip_files_name_the_same_gpu() -> None:
    named = [gpu for name in presets(CHIPS) for gpu in load_chip(name).attention.gpus]
    assert len(named) == len(set(named))


# Lowered to Triton, and compiled for GPUs that are not here.


def _traced(
    case: Case,
    device: jax.Device | None = None,
    **options: Any,
) -> Any:
    """Forward and backward of a case, with the tiles of the device."""
    sizes = tile_sizes_for(
        case.h, case.dtype, device.device_kind if device else "NVIDIA H100 80GB HBM3"
    )
    if device:
        sharding = jax.sharding.SingleDeviceSharding(device)
    else:
        sharding = None
    call = Call(softcap=case.softcap, **options)

    def run(given: Any) -> Any:
        q, k, v, dout, dlse, mask = given
        out, lse = triton.forward(q, k, v, mask, call, sizes)
        return out, triton.backward(
            q,
            k,
            v,
            dout,
            lse,
            dlse,
            mask,
            call,
            sizes,
        )

    arrays = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), inputs(case)
    )
    with compiling_for(device or load_target("h100x1").devices()[0]):
        return jax.jit(run).trace(arrays)


@needs_cuda
@pytest.mark.parametrize(
    "case",
    some([*KERNEL_CASES, *SIZES], 12, pytest.mark.long),
    ids=str,
)
def test_everything_has_a_form_in_triton(case: Case) -> None:
    """The interpreter takes what the lowering does not."""
    lowered = _traced(case).lower(lowering_platforms=("cuda",)).as_text()
    assert [lowered.count(f'name = "attention_{kernel}"') for kernel in TileSizes._fields] == [
        1,
        1,
        1,
    ]


@needs_cuda
@pytest.mark.long
@pytest.mark.parametrize("case", [*KERNEL_CASES, *SIZES], ids=str)
def test_everything_compiles(case: Case) -> None:
    """In bfloat16: products of float32, outside the tensor cores, take XLA a minute."""
    (device,) = load_target("h100x1").devices()
    compiled = (
        _traced(case._replace(dtype="bfloat16"), device)
        .lower(lowering_platforms=("cuda",))
        .compile()
    )
    assert compiled.as_text().count('custom_call_target="__gpu$xla.gpu.triton"') == 3


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("mask", ["encoder_documents", "both_ways"])
def test_an_encoder_s_masks_compile_for_an_absent_gpu(mask: str) -> None:
    text = compiled_for("h100", mask, 1024, 64).as_text()
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3


GPU_MASKS: dict[str, Callable[[Any], Mask]] = {
    "causal": lambda ids: Causal(),
    "window": lambda ids: Causal() & Window(1023),
    "documents": lambda ids: Causal() & Segments(ids, ids),
    "encoder_documents": lambda ids: Full() & Segments(ids, ids),
    "both_ways": lambda ids: Window(64, 64),
    "bigbird": lambda ids: Causal() & bigbird(1 << 17, block=128),
}


def compiled_for(
    chip: str, mask: str, S: int, h: int, dump: str = "", dtype: str = "bfloat16"
) -> Any:
    """Forward and backward for one GPU, eight heads and two kv heads."""
    (device,) = load_target(f"{chip}x1").devices()
    sharding = jax.sharding.SingleDeviceSharding(device)
    sizes = tile_sizes_for(h, dtype, device.device_kind)

    def array(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def run(
        q: Any,
        k: Any,
        v: Any,
        dout: Any,
        delta: Any,
        ids: Any,
    ) -> Any:
        of_ids = GPU_MASKS[mask](ids)
        out, lse = triton.forward(q, k, v, of_ids, sizes=sizes)
        return out, *triton.backward(
            q,
            k,
            v,
            dout,
            lse,
            delta,
            of_ids,
            sizes=sizes,
        )

    q = array(1, S, 8, h)
    k = array(1, S, 2, h)
    delta = array(1, 8, S, dtype=jnp.float32)
    ids = array(1, S, dtype=jnp.int32)
    with compiling_for(device):
        lowered = jax.jit(run).trace(q, k, k, q, delta, ids).lower(lowering_platforms=("cuda",))
    return lowered.compile({"xla_dump_to": dump} if dump else None)


@needs_cuda
@pytest.mark.long
@pytest.mark.parametrize("mask", GPU_MASKS)
@pytest.mark.parametrize("h", [64, 128])
@pytest.mark.parametrize("chip", ["a100", "h100"])
def test_kernels_compile_and_fit(
    chip: str, h: int, mask: str, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Shared memory as the program asks for it; registers as ptxas counts them, where there is
    one.
    """
    compiled_for(chip, mask, 4096, h, str(tmp_path))
    (sequence,) = tmp_path.glob("*thunk_sequence.txt")
    found = re.findall(r"(attention_\w+) grid: .*shared_memory: (\d+) bytes", sequence.read_text())
    assert sorted(name for name, _ in found) == [
        "attention_dkv",
        "attention_dq",
        "attention_forward",
    ]
    limit = load_chip(chip).compiler.shared_memory_per_block_optin
    registers = _registers(chip, tmp_path)
    with capsys.disabled():
        for name, used in found:
            print(
                f"\n  {chip} head_dim {h} {mask:9} {name:17} {int(used) // 1024:3} KB "
                f"shared{registers.get(name, '')}",
                end="",
            )
    assert all(int(used) <= limit for _, used in found)


def _registers(chip: str, folder: Path) -> dict[str, str]:
    """What ptxas says of each kernel."""
    if shutil.which("ptxas") is None:
        return {}
    found = {}
    architecture = "sm_" + load_chip(chip).compiler.compute_capability.replace(".", "")
    for file in folder.glob("*.ptx"):
        name = re.search(r"\.entry (attention_\w+)", file.read_text())
        if name:
            command = [
                "ptxas",
                "-v",
                "--gpu-name",
                architecture,
                str(file),
                "-o",
                str(folder / "cubin"),
            ]
            said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
            used = re.findall(r"Used (\d+) registers", said)
            stores = re.findall(r"(\d+) bytes spill stores", said)
            found[name[1]] = f", {used[0]} registers, {stores[0]} bytes spilled"
    return found


@needs_cuda
@pytest.mark.long
@pytest.mark.parametrize("mask", GPU_MASKS)
@pytest.mark.parametrize("chip", ["h100", "a100"])
def test_memory_grows_with_the_sequence_not_its_square(chip: str, mask: str) -> None:
    """Temporaries are the log-sum-exp and, where ids make them, the lists of visits: four bytes a
    tile.
    """
    sizes = tile_sizes_for(128, "bfloat16", load_chip(chip).hardware.device_kinds[0])
    for S in (1 << 14, 1 << 17):
        found = compiled_for(chip, mask, S, 128).memory_analysis()
        lse = 4 * 8 * S
        tiles = sum((S // size.block_q) * (S // size.block_k) for size in sizes)
        print(
            f"{chip} {mask} {S}: {found.temp_size_in_bytes / 2**20:.2f} MiB, log-sum-exp "
            f"{lse / 2**20:.2f}"
        )
        assert (
            found.temp_size_in_bytes
            <= lse + (4 * tiles if mask.endswith("documents") else 0) + 4096
        )
        assert found.temp_size_in_bytes < found.argument_size_in_bytes / 16
