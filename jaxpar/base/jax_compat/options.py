"""Options of the compilers, each with what it is for and its measured effect.

They are options of one compilation, not environment variables: nothing depends on what was imported
first, and `rehearse` compiles with those that `train` uses. Values are Python's booleans and
numbers: XLA refuses the text "true" for an option of a GPU. `docs/benchmarks.md` has the commands
and the figures.

A version of a compiler may rename an option or take it away. So a default is written in all the
spellings that were seen, and `base/default_options.py` asks the compiler at hand which it takes.
Seen with jax 0.10.2, libtpu 0.0.42.1 and jax-cuda12-plugin 0.10.2, and with jax 0.12.0.1, libtpu
0.0.50.1 and jax-cuda12-plugin 0.12.0.1.
"""

from __future__ import annotations

from typing import NamedTuple

from jax.sharding import Mesh

Option = bool | int | float | str
Options = dict[str, Option]
Spelling = tuple[tuple[str, Option], ...]
"""Names with their values, as one version of a compiler takes them together."""


class DefaultOption(NamedTuple):
    """An option that programs of a platform are compiled with by default."""

    purpose: str
    """What it does, as a line says where the compiler at hand does not take it."""
    spellings: tuple[Spelling, ...]
    """What is asked of the compilers, the newest first: the first that one takes counts. An empty
    one says that nothing is lost where the others are not taken."""
    several: bool = True
    """Whether it is for programs on several devices alone."""

    @property
    def name(self) -> str:
        """Its newest name."""
        return self.spellings[0][0][0]


NO_CUDA_GRAPHS = "xla_gpu_enable_command_buffer"
"""An option that is set to nothing, so that there are no CUDA graphs: their kernels bear no
instruction's name.
"""
SCOPED_VMEM = "xla_tpu_scoped_vmem_limit_kib"


def _plain(name: str, value: Option, purpose: str, several: bool = True) -> DefaultOption:
    return DefaultOption(purpose, (((name, value),),), several)


def _pipelined(kind: str, purpose: str) -> DefaultOption:
    """A GPU's collectives of a loop's body, moved into another turn.

    Until jax 0.11 it is a boolean, from 0.12 on a mode of three: off, on and explicit.
    """
    before = (f"xla_gpu_enable_pipelined_{kind}", True)
    return DefaultOption(purpose, ((_pipelining(kind, "ON"),), (before,)))


def _pipelining(kind: str, mode: str) -> tuple[str, Option]:
    return f"xla_gpu_pipeline_{kind}", f"COLLECTIVE_PIPELINING_MODE_{mode}"


_DISABLED_PASSES = "xla_disable_hlo_passes"

DEFAULT_OPTIONS: dict[str, tuple[DefaultOption, ...]] = {
    "tpu": (
        # Values that are only ever read as bfloat16 are rewritten to be bfloat16, and this reaches
        # back through the loop over layers to the float32 parameters. Without it LLaMA-3 8B on 64
        # v5p takes 0.16 GiB less, and its step 0.1 % less time.
        _plain(
            "xla_jf_bf16_propagation",
            False,
            "keeps no bfloat16 copy of all float32 parameters",
            several=False,
        ),
        _plain("xla_tpu_enable_async_collective_fusion", True, "runs collectives beside fusions"),
        _plain(
            "xla_tpu_enable_async_collective_fusion_multiple_steps",
            True,
            "runs a collective beside several fusions",
        ),
        _plain("xla_tpu_overlap_compute_collective_tc", True, "runs collectives beside matmuls"),
    ),
    # Without these a data-parallel sum is started and waited for at once. LLaMA-3 8B over fsdp=8 on
    # 8 H100 waits 36 ms a step for collectives in place of 50 and takes 675 ms in place of 702;
    # GPT-2 124M over data=8 waits 0.8 in place of 2.6 and takes 28.8 in place of 30.7 (rehearsed,
    # not run). Smaller thresholds of combining are no better beside these. To pipeline the
    # all-gathers too holds another layer's weights: with jax 0.10 that gained on 8 H100 alone, and
    # XLA computed more again where memory is nearly full; with 0.12 eight H100 take 661 ms in place
    # of 748 and LLaMA-3 70B on 64 takes 5.58 s in place of 6.22, so there it is asked for.
    "gpu": (
        _plain("xla_gpu_enable_latency_hiding_scheduler", True, "puts collectives beside compute"),
        _pipelined("reduce_scatter", "takes a layer's reduce-scatters into the next layer's turn"),
        _pipelined("all_reduce", "takes a layer's all-reduces into the next layer's turn"),
        DefaultOption(
            "takes a layer's all-gathers into the turn before it",
            ((_pipelining("all_gather", "ON"),), ()),
        ),
        _plain(
            "xla_gpu_enable_while_loop_double_buffering",
            True,
            "has turns of a loop alternate between two sets of buffers, which saves copies",
        ),
        # XLA:GPU's scheduler hides nothing in a program that takes more than 0.95 of 0.8 of the
        # memory, and a pool of ours has 0.9 of it (`base.hardware.GPU_POOL`), which is 1.12 of
        # that 0.8. LLaMA-3 8B on 16 H100 with data=2 x fsdp=8 and `dots` takes 69.6 of 71.2 GiB
        # and 6.19 s in place of 69.5 and 6.46, of which it waits 0.46 s in place of 0.74
        # (rehearsed, not run).
        _plain(
            "xla_gpu_memory_limit_slop_factor",
            112,
            "puts collectives beside compute where memory is nearly full too",
        ),
        # XLA:GPU counts memory before it schedules, finds twice what a scanned step takes, and
        # computes again in vain: LLaMA 3.2 1B on 8 H100 with fsdp=8 and `dots` takes 1.49 s and
        # with it off 1.35, with data=8 and six activations kept by name 1.63 s and 68.5 GiB, off
        # 1.29 s and 68.0 GiB; LLaMA-3 8B on 16 takes 6.46 s in place of 8.55 (rehearsed, not run).
        # What is computed again is the plan's choice.
        _plain(
            _DISABLED_PASSES,
            "rematerialization",
            "computes nothing again but what the plan says",
        ),
    ),
}
"""The options of each platform's programs."""


def less_tuned(level: int) -> DefaultOption:
    """On CPU, less of LLVM's optimisation, for programs that run once.

    The initializers of the Shakespeare recipe then take 1.7 s of processor time in place of 5.6, to
    the same bits.

    Args:
      level: how much of it, from 0.
    """
    purpose = "compiles what runs once with less of LLVM's optimisation"
    return _plain("xla_backend_optimization_level", level, purpose, several=False)


def fuse_all_gathers() -> DefaultOption:
    """All-gathers that XLA:TPU runs beside fusions, for the chips whose file says that it is safe.

    The makers of the compiler call it unsafe on all chips but v5e ("incorrect results, hang, SDC"),
    and from libtpu 0.0.50 on it refuses.
    """
    asynchronous = ("xla_enable_async_all_gather", True)
    fused = (UNSAFE_OPTIONS[0], True)
    return DefaultOption("runs all-gathers beside fusions", ((asynchronous, fused),))


UNSAFE_OPTIONS = ("xla_tpu_enable_async_collective_fusion_fuse_all_gather",)
"""Options that their makers call unsafe on chips whose file does not ask for them."""


def sparse_core_all_gathers() -> DefaultOption:
    """All-gathers by a TPU's SparseCores, for the chips that have them.

    LLaMA-3 8B, fsdp=16 x tensor=4, on 64 v5p then waits 97 ms a step for collectives in place of
    150, and takes 476 ms in place of 529 (libtpu 0.0.50.1; rehearsed, not run).
    """
    return _plain(
        "xla_tpu_enable_sparse_core_collective_offload_all_gather",
        True,
        "has SparseCores gather beside the TensorCores' work",
    )


def scoped_vmem(kib: int) -> DefaultOption:
    """The vector memory that one fusion or kernel of a TPU may use.

    Args:
      kib: KiB, from the chip's file in `meshes/chips`.
    """
    return _plain(SCOPED_VMEM, kib, "makes the tiles of matmuls larger", several=False)


# What changes the order of a program, and its fusions.

SCHEDULER_PROFILE = "xla_gpu_pgle_profile_file_or_directory_path"
"""A file of what each instruction takes, by which the GPU's latency-hiding scheduler goes; one that
is not there it passes over in silence."""


def no_profile() -> DefaultOption:
    """The option of the profile, set to none: whether a compiler has it is asked so."""
    return _plain(SCHEDULER_PROFILE, "", "gives the scheduler what each instruction takes")


ORDER_SETTINGS: dict[str, dict[str, DefaultOption]] = {
    "gpu": {
        "gathers pipelined": DefaultOption(  # with jax 0.12 they are so by default
            "takes a layer's all-gathers into the turn before it",
            ((("xla_gpu_enable_pipelined_all_gather", True),), ()),
        ),
        "gathers in their turn": DefaultOption(
            "leaves a layer's all-gathers where they are",
            ((_pipelining("all_gather", "OFF"),), ()),
        ),
        "one set of buffers": _plain(
            "xla_gpu_enable_while_loop_double_buffering", False, "saves a set of buffers"
        ),
        "two collectives at once": _plain(
            "xla_gpu_experimental_parallel_collective_overlap_limit",
            2,
            "lets two collectives run at once",
        ),
    },
}
"""Settings of each platform's scheduler that change the order of a program, by name.
`docs/task_graph.md` has what each gains, and those that change nothing."""
_FUSION_PASSES = {"tpu": "tpu_fusion,tpu_multi_output_fusion", "gpu": "fusion", "cpu": "fusion"}
"""The names of the passes that fuse, which each platform's compiler honours in its own form: on a
GPU `fusion` is a pipeline, and what is left is one operation a kernel."""


def without_fusion(mesh: Mesh) -> Options:
    """The options with which a platform's compiler fuses nothing, to be counted and not to be run.

    Args:
      mesh: the mesh, whose devices may be absent.

    Returns:
      The options by their names.
    """
    return {_DISABLED_PASSES: _FUSION_PASSES[_platform(mesh)]}


def _platform(mesh: Mesh) -> str:
    """`cpu`, `gpu` or `tpu`, of devices that may be absent."""
    platform = mesh.devices.flat[0].platform
    return "gpu" if platform == "cuda" else platform


KNOWN_OPTIONS = (
    SCOPED_VMEM,
    *(
        name
        for default in (
            fuse_all_gathers(),
            sparse_core_all_gathers(),
            *DEFAULT_OPTIONS["tpu"],
            *DEFAULT_OPTIONS["gpu"],
        )
        for spelling in default.spellings
        for name, _ in spelling
    ),
)
"""The names that a misspelt one is compared with: XLA does not list its own."""
TPU_FLAGS = (
    "xla_tpu_",
    "xla_jf_",
    "xla_sc_",
    "xla_mosaic_",
    "xla_enable_async_",
    "xla_latency_hiding_scheduler_",
    "xla_lhs_",
    "xla_should_",
    "xla_max_concurrent_",
)
"""The beginnings of the names of options that the TPU's compiler has alone. The others know each
other's options: XLA:CPU takes `xla_gpu_...`, and none takes a name that is no option."""
