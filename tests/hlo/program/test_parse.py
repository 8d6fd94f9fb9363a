"""Reading the text: shapes, instructions, stack frames, what may surprise, and how fast it is."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jaxpar.base.errors import UserError
from jaxpar.hlo.program.module import Instruction, Module, Shape
from jaxpar.hlo.program.parse import parse_module, parse_shape
from jaxpar.hlo.program.text import fields, split

DATA = Path(__file__).parents[1] / "data" / "hlo"
EXCERPTS = sorted(path.stem for path in DATA.glob("*.txt"))


def module_of(body: str, header: str = "is_scheduled=true", tables: str = "") -> Module:
    return parse_module(
        f"HloModule test, {header}\n{tables}\nENTRY %main () -> () {{\n{body}\n}}\n"
    )


def instruction(line: str) -> Instruction:
    module = module_of(f"  {line}")
    return next(iter(module.computations["main"].instructions.values()))


def test_what_looks_like_a_comment_in_quotes_is_none() -> None:
    found = fields('a="x/*y*/z \\"/*", b=/*index=1*/2, c={"/*", 3/*four*/}')
    assert found == {"a": 'x/*y*/z "/*', "b": "2", "c": '{"/*", 3}'}


@pytest.mark.parametrize(
    ("text", "dtype", "dims", "space", "size"),
    [
        ("f32[]", "f32", (), 0, 4),
        ("bf16[2,3]{1,0}", "bf16", (2, 3), 0, 12),
        ("bf16[1,8192,4096]{2,1,0:T(8,128)(2,1)S(1)}", "bf16", (1, 8192, 4096), 1, 2**26),
        ("pred[8192]{0:T(1024)(128)(4,1)}", "pred", (8192,), 0, 8192),
        ("u32[]{:S(2)}", "u32", (), 2, 4),
        ("s4[3]{0:T(128)E(4)}", "s4", (3,), 0, 2),
        ("f8e4m3fn[16]{0}", "f8e4m3fn", (16,), 0, 16),
        ("c64[2]", "c64", (2,), 0, 16),
        ("f32[<=8,2]{1,0}", "f32", (8, 2), 0, 64),
        ("f32[4,0]{1,0}", "f32", (4, 0), 0, 0),
        ("token[]", "token", (), 0, 0),
    ],
)
def test_shape(
    text: str,
    dtype: str,
    dims: tuple[int, ...],
    space: int,
    size: int,
) -> None:
    shape = parse_shape(text)
    assert (shape.dtype, shape.dims, shape.space, shape.bytes) == (dtype, dims, space, size)


def test_tuples_have_parts_leaves_and_the_sum_of_their_bytes() -> None:
    shape = parse_shape("((f32[2]{0}, s32[]), bf16[4]{0:T(128)}, /*index=2*/u32[]{:S(2)})")
    assert [str(part) for part in shape.parts] == ["(f32[2], s32[])", "bf16[4]", "u32[]"]
    assert [leaf.dtype for leaf in shape.leaves()] == ["f32", "s32", "bf16", "u32"]
    assert (shape.bytes, shape.elements) == (8 + 4 + 8 + 4, 2 + 1 + 4 + 1)
    assert parse_shape("()") == Shape("tuple")


def test_tiles() -> None:
    assert not parse_shape("f32[2,3]{0,1}").tiled
    assert parse_shape("f32[2,3]{0,1:T(8,128)}").tiled


def test_split_keeps_brackets_and_quotes_together() -> None:
    assert split('a={1,2}, b="x, {y", /*c*/c=(1, 2), d') == [
        "a={1,2}",
        'b="x, {y"',
        "c=(1, 2)",
        "d",
    ]
    assert split("") == []


def test_an_instruction() -> None:
    found = instruction(
        "%all-gather.4 = (f32[8]{0}, bf16[4,2]{1,0}) all-gather(%a.1, /*index=1*/%b), "
        "channel_id=1, "
        "replica_groups={{0,1},{2,3}}, dimensions={0,1}, use_global_device_ids=true, "
        "metadata={op_name=\"jit(step)/jvp(loss)/batch[\\'x\\']/dot\" stack_frame_id=7}, "
        'backend_config={"a":{"b":[1,2]}}'
    )
    assert (found.name, found.opcode, found.operands) == (
        "all-gather.4",
        "all-gather",
        ("a.1", "b"),
    )
    assert found.attributes["replica_groups"] == "{{0,1},{2,3}}"
    assert found.attributes["backend_config"] == '{"a":{"b":[1,2]}}'
    assert found.numbers("dimensions") == (0, 1) and found.numbers("absent") == ()
    assert found.op_name == "jit(step)/jvp(loss)/batch['x']/dot"
    assert found.metadata["stack_frame_id"] == "7"


def test_operands_with_shapes_and_names_without_percent_signs() -> None:
    found = instruction("add.1 = f32[2]{0} add(f32[2]{0} x, f32[2]{0} %y.2)")
    assert (found.name, found.operands) == ("add.1", ("x", "y.2"))


def test_called_computations_in_order() -> None:
    loop = instruction("%w = (s32[]) while(%t), condition=%cond.1, body=%body.2")
    assert loop.called == ("cond.1", "body.2")
    assert instruction(
        "%c = f32[] conditional(%p, %a, %b), branch_computations={%x, %y}"
    ).called == ("x", "y")
    assert instruction("%f = f32[] fusion(%p), kind=kLoop, calls=%fused").called == ("fused",)


def test_constants_parameters_and_literals_over_several_lines() -> None:
    module = module_of(
        "  %c = s32[] constant(32)\n"
        "  %t = s32[2,2]{1,0} constant({\n    { 1, 2 },\n    { 3, 4 }\n  })\n"
        "  ROOT %p = f32[2]{0} parameter(0)"
    )
    entry = module.computations["main"]
    assert entry.instructions["c"].literal == "32"
    assert entry.instructions["t"].literal.replace(" ", "") == "{{1,2},{3,4}}"
    assert (entry.parameters, entry.root, list(entry.instructions)) == (
        ("p",),
        "p",
        ["c", "t", "p"],
    )


def test_a_brace_at_the_start_of_a_line_need_not_end_the_computation() -> None:
    """A Pallas kernel's own notes are printed over several lines."""
    module = parse_module((DATA / "tpu_kernel.txt").read_text())
    entry = module.computations[module.entry]
    kernel = entry.instructions["splash_mha_fwd_residuals.1"]
    assert kernel.target == "tpu_custom_call"
    assert "xprof_metadata" in kernel.attributes["frontend_attributes"]
    assert entry.root == "fusion"


def test_an_unknown_opcode_and_attribute_are_kept() -> None:
    found = instruction('%x = f32[2]{0} frobnicate-start(%a), wibble={1,{2,3}}, wobble="yes, no"')
    assert (found.opcode, found.base, found.operands) == ("frobnicate-start", "frobnicate", ("a",))
    assert found.attributes == {"wibble": "{1,{2,3}}", "wobble": "yes, no"}


TABLES = """
FileNames
1 "/repo/models/llama.py"
2 "/repo/jaxpar/parallel/linear.py"

FunctionNames
1 "Block.__call__"
2 "column_linear"

FileLocations
1 {file_name_id=1 function_name_id=1 line=66 end_line=66 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=104 end_line=104 column=1 end_column=2}

StackFrames
"""


@pytest.mark.parametrize(
    "rows", ["1 {%s=1 %s=1}\n2 {%s=2 %s=2}\n", "1 {%s=1 %s=0}\n2 {%s=2 %s=1}\n"]
)
def test_stack_frames_whichever_way_the_parents_are_counted(rows: str) -> None:
    tables = TABLES + rows % (("file_location_id", "parent_frame_id") * 2)
    module = module_of("  ROOT %x = f32[] add(%a, %b), metadata={stack_frame_id=2}", tables=tables)
    frames = module.stack(module.computations["main"].instructions["x"])
    assert [(frame.file, frame.line) for frame in frames] == [
        ("/repo/jaxpar/parallel/linear.py", 104),
        ("/repo/models/llama.py", 66),
    ]


def test_no_metadata_no_frames() -> None:
    module = module_of("  ROOT %x = f32[] add(%a, %b)")
    assert module.stack(module.computations["main"].instructions["x"]) == []


def test_devices_and_platform() -> None:
    assert (
        module_of("  ROOT %x = f32[2]{0} parameter(0)", "replica_count=2, num_partitions=8").devices
        == 16
    )
    assert module_of("  ROOT %x = f32[2]{0} parameter(0)").devices == 1
    assert module_of("  ROOT %x = f32[2]{0:T(128)} parameter(0)").tiled
    assert not module_of("  ROOT %x = f32[2]{0} parameter(0)").tiled


@pytest.mark.parametrize(
    "text",
    ["", "not hlo at all", "HloModule m\n\n%f () -> f32[] {\n  ROOT %c = f32[] constant(1)\n}\n"],
)
def test_what_is_no_compiled_module(text: str) -> None:
    with pytest.raises(UserError):
        parse_module(text)


@pytest.mark.parametrize("name", EXCERPTS)
def test_excerpts_of_real_programs_are_read_whole(name: str) -> None:
    text = (DATA / f"{name}.txt").read_text()
    module = parse_module(text)
    lines = [line for line in text.splitlines() if line.startswith("  ") and " = " in line]
    found = [
        i for computation in module.computations.values() for i in computation.instructions.values()
    ]
    assert len(found) == len(lines)
    for computation in module.computations.values():
        for each in computation.instructions.values():
            assert all(operand in computation.instructions for operand in each.operands), each.name
            assert all(called in module.computations for called in each.called), each.name


def test_two_megabytes_take_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DATA / "tpu_windowed_loop.txt").read_text()
    head, _, entry = text.partition("ENTRY ")
    first, _, rest = head.partition("\n")
    copies = 2_000_000 // len(rest)
    many = "\n".join(rest.replace(".clone", f".clone_{n}") for n in range(copies))
    start = time.perf_counter()
    module = parse_module(f"{first}\n{many}\nENTRY {entry}")
    for computation in module.computations.values():
        for each in computation.instructions.values():
            assert each.attributes is not None and each.called is not None
    seconds = time.perf_counter() - start
    with capsys.disabled():
        print(f"\n{len(many) / 1e6:.1f} MB read in {seconds:.2f} s")
    assert len(module.computations) > copies
    assert seconds < 5
