"""Named scopes, phases and source lines, from jax's paths and stack frames."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from jaxpar.hlo.origin import decode, default_dirs, inherit, origin_of, source_line
from jaxpar.hlo.origin.line import OWN
from jaxpar.hlo.program.module import Frame
from jaxpar.hlo.program.parse import parse_module
from jaxpar.hlo.program.tasks import Collective, Loop, Node, Origin, Task, Wait, walk
from jaxpar.hlo.read import read_program
from jaxpar.models import linears
from jaxpar.parallel import collectives

DIRS = (("/repo/models", "models"), ("/repo/jaxpar", "jaxpar"))
CALL = "jit(step)/transpose(jvp())/while/body/closed_call"
TICK = "jit(step)/shard_map/while/body/closed_call"


@pytest.mark.parametrize(
    ("path", "scope", "phase"),
    [
        ("jit(step)/jvp(loss)/dot_general", "loss", "forward"),
        (
            "jit(step)/jvp()/while/body/closed_call/block/attention/dot_general",
            "block/attention",
            "forward",
        ),
        (f"{CALL}/checkpoint/block/mlp/dot_general", "block/mlp", "backward"),
        (
            f"{CALL}/checkpoint/rematted_computation/block/mlp/dot_general",
            "block/mlp",
            "recomputed",
        ),
        (
            "jit(step)/transpose(jvp())/while/body/eval_jaxpr/checkpoint/block/mlp/mul",
            "block/mlp",
            "backward",
        ),
        ("jit(step)/transpose(jvp(loss))/dot_general", "loss", "backward"),
        ("jit(step)/transpose(jvp(embed))/shard_map/jit(_where)/select_n", "embed", "backward"),
        ("jit(step)/jvp(checkpoint)/block/attention/jit(silu)/mul", "block/attention", "forward"),
        (
            "jit(step)/transpose(jvp(checkpoint))/rematted_computation/block/mlp/mul",
            "block/mlp",
            "recomputed",
        ),
        (
            f"{CALL}/checkpoint/block/attention/BSKGh,BTKh->BKGST/dot_general",
            "block/attention",
            "backward",
        ),
        ("jit(step)/update/mul", "update", "update"),
        ("jit(step)/update/mul;jit(step)", "update", "update"),
        ("jit(step)/while/body/closed_call/jvp(loss)/add", "loss", "forward"),
        ("jit(step)/block/attention/pow", "block/attention", "forward"),
        ("jit(step)/jvp()/while/body/jit(dynamic_index_in_dim)/dynamic_slice", "", "forward"),
        ("jit(step)/transpose(jvp())/while", "", "backward"),
        ("jit(step)/cond/branch_1_fun/block/mul", "block", "forward"),
        ("jit(step)/jvp()/block/core/splash/splash/pallas_call", "block/core", "forward"),
        ("jit(step)/splash/splash/pallas_call", "", "other"),
        # of a user's own program
        ("jit(f)/jvp(layer)/layer/attention/dot_general", "layer/layer/attention", "forward"),
        ("jit(f)/transpose(jvp(layer))/layer/mul", "layer/layer", "backward"),
        ("jit(f)/layer/layer/core/splash/splash/pallas_call", "layer/layer/core", "forward"),
        ("jit(f)/forward/dot_general", "forward", "forward"),
        ("jit(f)/backward/dot_general", "backward", "forward"),
        ("jit(f)/transpose(jvp(forward))/mlp/mul", "forward/mlp", "backward"),
        ("jit(step)/add", "", "other"),
        ("convert.4", "", "other"),
        ("", "", "other"),
    ],
)
def test_paths(path: str, scope: str, phase: str) -> None:
    assert decode(path) == (scope, phase)


@pytest.mark.parametrize(
    ("path", "scope", "phase"),
    [
        ("forward_tick/embed/shard_map/all_gather", "embed", "forward"),
        ("forward_tick/while/body/closed_call/block/mlp/dot_general", "block/mlp", "forward"),
        ("forward_tick/while/body/closed_call/jvp(block)/mlp/dot_general", "block/mlp", "forward"),
        ("forward_tick/jvp(loss)/dot_general", "loss", "forward"),
        ("forward_tick/transpose(jvp(head))/mul", "head", "backward"),
        ("forward_tick/cond/branch_1_fun/jvp(loss)/dot_general", "loss", "forward"),
        ("forward_tick/send/shard_map/ppermute", "send", "forward"),
        ("forward_tick/add", "", "forward"),
        (
            "backward_tick/while/body/closed_call/jvp(block)/mlp/dot_general",
            "block/mlp",
            "recomputed",
        ),
        (
            "backward_tick/while/body/transpose(jvp(jvp()))/rematted_computation/block/mlp/mul",
            "block/mlp",
            "recomputed",
        ),
        (
            "backward_tick/while/body/transpose(jvp(jvp()))/block/mlp/dot_general",
            "block/mlp",
            "backward",
        ),
        ("backward_tick/transpose(backward_tick)/jvp(embed)/scatter-add", "embed", "backward"),
    ],
)
def test_in_a_pipelines_ticks_the_scopes_are_the_models(path: str, scope: str, phase: str) -> None:
    assert decode(f"{TICK}/{path}") == (scope, phase)


def test_operations_made_one_have_the_scope_that_they_share() -> None:
    inside = "jit(step)/jvp()/while/body/closed_call/block"
    assert decode(f"{inside}/(attention/mul:attention/convert:mlp/mul)") == ("block", "forward")
    assert decode(f"{inside}/(attention/mul:attention/dot)") == ("block/attention", "forward")
    assert decode("jit(step)/(transpose(jvp(embed))/mul:transpose(jvp(loss))/mul)") == (
        "",
        "backward",
    )


def test_the_innermost_line_of_a_model_comes_before_the_librarys() -> None:
    frames = [
        Frame("/site-packages/optax/base.py", 9, 0),
        Frame("/repo/jaxpar/parallel/linear.py", 104, 0),
        Frame("/repo/models/layers.py", 55, 0),
        Frame("/repo/models/llama.py", 66, 0),
    ]
    assert source_line(frames, DIRS) == "models/layers.py:55"
    assert source_line(frames[:2], DIRS) == "jaxpar/parallel/linear.py:104"
    assert source_line(frames[:1], DIRS) == ""
    # a block of one's own, which the model calls, is more telling than the call
    block = Frame("/home/me/palm.py", 12, 0)
    script = Frame("/home/me/palm.py", 99, 0)
    assert source_line([*frames[:2], block, *frames[2:], script], DIRS) == "palm.py:12"
    assert source_line([*frames, script], DIRS) == "models/layers.py:55"
    assert source_line([Frame("/repo/models_of_mine/x.py", 1, 0)], DIRS) == ""


def test_a_line_is_told_where_the_working_directory_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = [Frame(f"{tmp_path}/mine/block.py", 12, 0)]
    everything = (*DIRS, OWN)
    monkeypatch.chdir(tmp_path)
    assert source_line(own, everything) == "mine/block.py:12"

    def deleted() -> Path:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(Path, "cwd", deleted)
    assert source_line(own, everything) == "block.py:12"


def test_the_room_that_all_linears_go_through_is_passed_over() -> None:
    through = Frame(str(Path(linears.__file__)), 80, 0)
    folder = Path(linears.__file__).parent
    block = Frame(str(folder / "transformer.py"), 258, 0)
    library = Frame(str(Path(collectives.__file__)), 104, 0)
    dirs = default_dirs()
    assert source_line([library, through, block], dirs) == "models/transformer.py:258"
    assert source_line([library, through], dirs) == "models/linears.py:80"
    # a block of one's own that calls it is told by its own line
    mine = Frame("/home/me/palm.py", 12, 0)
    around = Frame(str(folder / "model.py"), 330, 0)
    assert source_line([library, through, mine, around], dirs) == "palm.py:12"


def test_models_and_the_library_are_found_where_they_are_installed() -> None:
    import jaxpar.models

    dirs = default_dirs()
    assert [shown for _, shown in dirs] == ["models", "jaxpar"]
    file = str(jaxpar.models.__file__)
    assert source_line([Frame(file, 3, 0)], dirs) == "models/__init__.py:3"


def test_a_fusion_without_metadata_is_taken_for_what_it_wraps() -> None:
    module = parse_module("""HloModule m

%fused (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0)
  %n = f32[2]{0} negate(%a), metadata={op_name="jit(step)/jvp(head)/neg"}
  ROOT %b = f32[2]{0} bitcast(%n)
}

ENTRY %main (a: f32[2]) -> f32[2] {
  %a = f32[2]{0} parameter(0), metadata={op_name="state.params['x']"}
  ROOT %f = f32[2]{0} fusion(%a), kind=kLoop, calls=%fused
}
""")
    entry = module.computations["main"]
    assert origin_of(module, entry.instructions["f"], DIRS) == Origin("head", "", "forward")
    assert origin_of(module, entry.instructions["a"], DIRS) == Origin()


# Places for what the compiler made: from the nearest neighbour that has one.

MLP = Origin("block/mlp", "models/llama.py:77", "forward")
HEAD = Origin("head", "models/llama.py:94", "backward")
NOWHERE = Origin()


def task(
    origin: Origin,
    *depends: int,
    kind: str = "copy",
    flops: float = 0.0,
) -> Task:
    return Task("t", "copy", kind, origin, depends, flops)  # pyright: ignore[reportArgumentType]


def origins(*nodes: Node, around: Origin = NOWHERE) -> list[Origin | None]:
    found = inherit(list(nodes), around)
    return [None if isinstance(node, Wait) else node.origin for node in found]


def test_a_copy_belongs_to_what_it_feeds() -> None:
    assert origins(task(HEAD), task(NOWHERE, 0), task(MLP, 1))[1] == MLP


def test_through_a_chain_of_copies() -> None:
    assert origins(task(NOWHERE), task(NOWHERE, 0), task(MLP, 1)) == [MLP, MLP, MLP]


def test_else_to_what_feeds_it() -> None:
    assert origins(task(HEAD), task(NOWHERE, 0)) == [HEAD, HEAD]


def test_a_matmul_belongs_to_the_latest_of_its_operands() -> None:
    gradient = Origin("block/mlp", "models/llama.py:81", "backward")
    assert (
        origins(task(MLP), task(gradient), task(NOWHERE, 0, 1, kind="matmul"), task(MLP, 2))[2]
        == gradient
    )
    assert origins(task(NOWHERE, kind="matmul"), task(MLP, 0))[0] == MLP


def test_a_matmul_belongs_to_the_neighbour_in_the_innermost_scope() -> None:
    core = Origin("block/attention/core", "models/llama.py:74", "forward")
    assert (
        origins(task(HEAD), task(NOWHERE, 0, kind="matmul"), task(MLP, 1), task(core, 1))[1] == core
    )
    assert (
        origins(task(core), task(MLP), task(NOWHERE, 0, 1, kind="matmul"), task(MLP, 2))[2] == core
    )


def test_a_sum_belongs_to_its_summands() -> None:
    """XLA:TPU makes fusions of its own of reduce-scatters. What they feed collects the gradients of
    all layers, at the line of the scan over them.
    """
    collected = Origin("", "models/layers.py:49", "backward", told=True)
    scattered = Collective("reduce-scatter", ((0, 1),), 8, "f32")
    summed = replace(task(NOWHERE, 0, kind="collective"), collective=scattered)
    assert origins(task(MLP), summed, task(collected, 1)) == [MLP, MLP, collected]
    gathered = replace(summed, collective=replace(scattered, kind="all-gather"))
    assert origins(task(MLP), gathered, task(HEAD, 1)) == [MLP, HEAD, HEAD]


def test_waits_are_passed_over() -> None:
    assert origins(task(NOWHERE), Wait("w", 0), task(MLP, 0)) == [MLP, None, MLP]


def test_a_line_of_its_own_is_kept_by_what_the_compiler_made() -> None:
    copied = Origin("", "models/model.py:114")
    found = origins(task(copied), task(MLP, 0), task(HEAD, 0))
    assert found[0] == Origin("block/mlp", "models/model.py:114", "forward")


def test_bookkeeping_gives_nothing_and_a_loop_gives_what_is_left() -> None:
    """The loop that it feeds or rests on, else the one around it."""
    assert origins(task(NOWHERE), task(MLP, 0, kind="control"))[0] == NOWHERE
    assert origins(task(NOWHERE), around=HEAD)[0] == HEAD
    backward = Origin("", "models/model.py:134", "backward")
    loop = Loop("while", 2, (task(MLP),), (0,), backward)
    assert origins(task(NOWHERE), loop)[0] == backward
    assert origins(loop, task(NOWHERE, 0))[1] == backward
    assert origins(task(NOWHERE), loop, task(MLP, 0))[0] == MLP


@pytest.mark.parametrize("source", ["loss.py:9", ""], ids=["a line", "no line"])
@pytest.mark.parametrize("kind", ["matmul", "fusion", "kernel", "collective", "copy"])
def test_what_the_program_places_in_no_scope_takes_no_neighbours(kind: str, source: str) -> None:
    """A program without scopes, or a loss beside a model's. A program that lies in an installed
    package has no line that is shown, and is the user's all the same.
    """
    for phase in ("backward", "other"):
        plain = Origin("", source, phase, told=True)  # pyright: ignore[reportArgumentType]
        given = task(MLP), task(plain, 0, kind=kind), task(HEAD, 1)
        assert origins(*given, around=HEAD) == [MLP, plain, HEAD]


def test_a_copy_that_feeds_what_is_in_no_scope_is_in_none() -> None:
    plain = Origin("", "loss.py:9", "forward", told=True)
    assert origins(task(MLP), task(NOWHERE, 0), task(plain, 1))[1] == plain


STRANGER = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: bf16[64,64], w: bf16[64,64]) -> bf16[64,64] {
  %x = bf16[64,64]{1,0} parameter(0)
  %w = bf16[64,64]{1,0} parameter(1)
  %seen = bf16[64,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/jvp(core)/attention_forward/pallas_call"}
  %copy.1 = bf16[64,64]{0,1} copy(%seen)
  %dot = bf16[64,64]{1,0} dot(%copy.1, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/jvp()/dot_general"}
  %gelu = bf16[64,64]{1,0} tanh(%dot), metadata={op_name="jit(step)/jvp()/tanh"}
  %copy.2 = bf16[64,64]{0,1} copy(%gelu), metadata={op_name="jit(step)/jvp()/transpose"}
  ROOT %again = bf16[64,64]{1,0} custom-call(%copy.2), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/jvp(core)/attention_forward/pallas_call"}
}
"""
"""A user's MLP between two attentions of this library, as a program without its source lines."""


def test_a_users_mlp_is_not_taken_for_the_attention_beside_it() -> None:
    program = read_program(STRANGER, DIRS)
    scopes = {one.name: one.origin.scope for one, _ in walk(program.nodes)}
    assert scopes == {
        "seen": "core/attention_forward",
        "copy.1": "",
        "dot": "",
        "gelu": "",
        "copy.2": "",
        "again": "core/attention_forward",
    }
