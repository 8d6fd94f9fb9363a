"""What is in memory when: of small programs whose answer is counted by hand."""

from __future__ import annotations

import pytest

from jaxpar.hlo.live import live_arrays
from jaxpar.hlo.program.parse import parse_module, parse_shape

K = 4 * 1024
"""The bytes of f32[1024]."""


def bytes_at(entry: str, header: str = "", before: str = "") -> list[int]:
    text = f"HloModule test, is_scheduled=true{header}\n\n{before}\nENTRY %main () -> f32[] {{\n"
    return live_arrays(parse_module(f"{text}{entry}}}\n")).bytes_at()


def test_an_array_is_there_from_its_making_to_its_last_use():
    """An argument all the time, a constant never, and a matmul's result beside its operands."""
    found = bytes_at("""
  %x = f32[1024] parameter(0)
  %c = f32[1024] constant({...})
  %a = f32[1024] reverse(%x), dimensions={0}
  %b = f32[2048] concatenate(%a, %c), dimensions={0}
  ROOT %r = f32[1024] slice(%b), slice={[0:1024]}
""")
    assert found == [2 * K, 4 * K, 4 * K]


def test_a_result_takes_the_place_of_an_operand_that_ends_there():
    """Where its elements are read one by one; a reversal reads others."""
    chain = """
  %x = f32[1024] parameter(0)
  %a = f32[1024] reverse(%x), dimensions={{0}}
  %b = f32[1024] {made}
  ROOT %r = f32[1024] reverse(%b), dimensions={{0}}
"""
    assert bytes_at(chain.format(made="exponential(%a)")) == [2 * K, 2 * K, 3 * K]
    assert bytes_at(chain.format(made="reverse(%a), dimensions={0}")) == [2 * K, 3 * K, 3 * K]


def test_a_donated_argument_is_the_result():
    header = ", input_output_alias={ {}: (0, {}, may-alias) }"
    entry = """
  %x = f32[1024] parameter(0)
  ROOT %a = f32[1024] reverse(%x), dimensions={0}
"""
    assert bytes_at(entry) == [2 * K]
    assert bytes_at(entry, header) == [K]


LOOP = """
%body (p: (s32[], f32[4,1024])) -> (s32[], f32[4,1024]) {
  %p = (s32[], f32[4,1024]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %stack = f32[4,1024] get-tuple-element(%p), index=1
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %row = f32[1,1024] broadcast(%i), dimensions={}
  %zero = s32[] constant(0)
  %filled = f32[4,1024] dynamic-update-slice(%stack, %row, %i, %zero)
  ROOT %t = (s32[], f32[4,1024]) tuple(%next, %filled)
}

%cond (p: (s32[], f32[4,1024])) -> pred[] {
  %p = (s32[], f32[4,1024]) parameter(0)
  ROOT %go = pred[] constant(true)
}
"""


def test_a_loop_changes_its_state_in_place():
    """A stack that is filled row by row is there once, also through the loop."""
    found = bytes_at(
        """
  %zero = f32[] parameter(0)
  %n = s32[] parameter(1)
  %empty = f32[4,1024] broadcast(%zero), dimensions={}
  %state = (s32[], f32[4,1024]) tuple(%n, %empty)
  %loop = (s32[], f32[4,1024]) while(%state), condition=%cond, body=%body
  %stack = f32[4,1024] get-tuple-element(%loop), index=1
  ROOT %r = f32[1024] slice(%stack), slice={[0:1]}
""",
        before=LOOP,
    )
    assert max(found) == 4 * K + K + 8  # the stack, a row and two scalars


def test_a_loop_may_be_the_last_of_a_program():
    found = bytes_at(
        """
  %n = s32[] parameter(0)
  %empty = f32[4,1024] parameter(1)
  %state = (s32[], f32[4,1024]) tuple(%n, %empty)
  ROOT %loop = (s32[], f32[4,1024]) while(%state), condition=%cond, body=%body
""",
        before=LOOP,
    )
    assert max(found) == 4 * K + K + 4


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[3,100]{1,0:T(8,128)}", 8 * 128 * 4),
        ("bf16[2,3,100]{2,1,0:T(8,128)(2,1)}", 2 * 8 * 128 * 2),
        ("f32[3,100]{0,1:T(8,128)}", 104 * 128 * 4),
        ("f32[]{:T(128)}", 4),
        ("f32[3,100]{1,0}", 1200),
    ],
)
def test_tiles_are_filled_up(shape, size):
    assert parse_shape(shape).stored_bytes == size


def test_what_is_not_in_the_main_memory_does_not_count():
    """The host's memory is S(5), and a TPU's VMEM S(1); a GPU has what its links read in S(1)."""
    entry = """
  %x = f32[1024]{{0{tiles}}} parameter(0)
  %a = f32[1024]{{0:S({space})}} copy(%x)
  ROOT %r = f32[] reduce(%a)
"""
    assert bytes_at(entry.format(tiles=":T(1024)", space=1)) == [K, K + 4]
    assert bytes_at(entry.format(tiles="", space=5)) == [K, K + 4]
    assert bytes_at(entry.format(tiles="", space=1)) == [2 * K, 2 * K + 4]


def test_a_copy_from_the_hosts_memory_is_there_to_its_last_use():
    """It was taken for what it is a copy of, whose bytes are the host's."""
    found = bytes_at("""
  %x = f32[1024]{0:S(5)} parameter(0)
  %c = (f32[1024], f32[1024]{0:S(5)}, u32[]) copy-start(%x)
  %e = f32[1024] copy-done(%c)
  %a = f32[1024] reverse(%e), dimensions={0}
  %b = f32[2048] concatenate(%a, %e), dimensions={0}
  ROOT %r = f32[1024] slice(%b), slice={[0:1024]}
""")
    assert found == [K + 4, K + 4, 2 * K, 4 * K, 3 * K]


TURNED = """
%turned (p: f32[32,32]) -> f32[32,32] {
  %p = f32[32,32]{1,0} parameter(0)
  ROOT %q = f32[32,32]{0,1} copy(%p)
}

%flat (p: f32[32,32]) -> f32[1024] {
  %p = f32[32,32]{1,0} parameter(0)
  %q = f32[32,32]{1,0} negate(%p)
  ROOT %r = f32[1024]{0} bitcast(%q)
}

%there_and_back (p: f32[32,32]) -> f32[32,32] {
  %p = f32[32,32]{1,0} parameter(0)
  %q = f32[32,32]{0,1} copy(%p)
  ROOT %r = f32[32,32]{1,0} copy(%q)
}
"""


@pytest.mark.parametrize(
    ("made", "shared"),
    [
        ("f32[32,32]{1,0} copy(%a)", True),
        ("f32[32,32]{0,1} copy(%a)", False),
        ("f32[32,32]{0,1} fusion(%a), kind=kLoop, calls=%turned", False),
        ("f32[32,32]{1,0} fusion(%a), kind=kLoop, calls=%there_and_back", False),
        ("f32[1024]{0} fusion(%a), kind=kLoop, calls=%flat", True),
    ],
)
def test_a_result_in_another_layout_takes_no_operands_place(made, shared):
    """XLA shares no slot where elements change places; of a sort and a copy it gives 3 MiB, and
    2 MiB were found."""
    entry = f"""
  %x = f32[32,32]{{1,0}} parameter(0)
  %a = f32[32,32]{{1,0}} reverse(%x), dimensions={{0}}
  %b = {made}
  ROOT %r = f32[1] slice(%b), slice={{[0:1]}}
"""
    assert bytes_at(entry, before=TURNED)[1] == (2 if shared else 3) * K


@pytest.mark.parametrize("dependent", ["add-dependency(%a, %token)", "domain(%a)"])
def test_what_only_says_an_order_names_its_array_alone(dependent):
    """Its token was named too, and what stood behind it in a tuple was taken for another array."""
    found = bytes_at(f"""
  %x = f32[1024] parameter(0)
  %token = token[] after-all()
  %a = f32[1024] reverse(%x), dimensions={{0}}
  %b = f32[2048] concatenate(%a, %x), dimensions={{0}}
  %d = f32[1024] {dependent}
  %t = (f32[1024], f32[2048]) tuple(%d, %b)
  %g = f32[2048] get-tuple-element(%t), index=1
  %c = f32[1024] slice(%g), slice={{[0:1024]}}
  ROOT %r = f32[] reduce(%c)
""")
    assert found == [K, 2 * K, 4 * K, 4 * K, 2 * K + 4]


def test_a_result_may_lie_in_a_part_of_a_part_of_an_operand():
    """The second array of part 0 is meant; the array of part 0's number was taken."""
    found = bytes_at("""
  %x = f32[1024] parameter(0)
  %a = f32[1024] reverse(%x), dimensions={0}
  %b = f32[2048] concatenate(%x, %x), dimensions={0}
  %t = (f32[1024], f32[2048]) tuple(%a, %b)
  %u = ((f32[1024], f32[2048]), f32[1024]) tuple(%t, %x)
  %k = f32[2048] custom-call(%u), custom_call_target="k", output_to_operand_aliasing={{}: (0, {0,1})}
  ROOT %r = f32[] reduce(%k)
""")
    assert found == [2 * K, 4 * K, 4 * K, 3 * K + 4]
