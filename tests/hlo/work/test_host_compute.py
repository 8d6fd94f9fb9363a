"""What the host computes, read from a program's text: JAX's `compute_on("device_host")`."""

from jaxpar.hlo.program.tasks import Task, Wait
from jaxpar.hlo.read import read_program

# As XLA:GPU writes it (jax 0.10.2): the first operand lies on the device, and so does one result.
PROGRAM = """
HloModule step, is_scheduled=true

%update (p: f32[1000], g: f32[1000]) -> (f32[1000], f32[1000]) {
  %p = f32[1000]{0} parameter(0)
  %g = f32[1000]{0} parameter(1)
  %product = f32[1000]{0} multiply(%p, %g)
  %sum = f32[1000]{0} add(%product, %g)
  ROOT %both = (f32[1000]{0}, f32[1000]{0}) tuple(%product, %sum)
}, execution_thread="host"

ENTRY %main (a: f32[1000], b: f32[1000]) -> f32[1000] {
  %a = f32[1000]{0} parameter(0)
  %b = f32[1000]{0:S(5)} parameter(1)
  %s = ((f32[1000]{0}, f32[1000]{0:S(5)}), (f32[1000]{0}, f32[1000]{0:S(5)}), u32[]) \
custom-call-start(%a, %b), async_execution_thread="host", custom_call_target="HostExecute", \
called_computations={%update}
  %done = (f32[1000]{0}, f32[1000]{0:S(5)}) custom-call-done(%s)
  ROOT %new = f32[1000]{0} get-tuple-element(%done), index=0
}
"""


def test_a_call_of_the_host_is_work_of_the_host():
    start, wait = read_program(PROGRAM).nodes
    assert isinstance(start, Task) and isinstance(wait, Wait) and wait.task == 0
    assert start.kind == "host_compute" and start.asynchronous
    assert start.flops == 2000  # a product and a sum of 1,000 entries
    assert start.bytes == 4 * 4000  # two operands and two results, each once
    assert start.link_bytes == 2 * 4000  # one of each lies on the device


LOOP = """
%round (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  ROOT %y = f32[1000]{0} multiply(%x, %x)
}

%go (z: f32[1000]) -> pred[] {
  %z = f32[1000]{0} parameter(0)
  ROOT %yes = pred[] constant(true)
}
"""


def test_the_body_of_a_loop_of_the_host_counts_once():
    begin, update = PROGRAM.split("%update (p", 1)
    looped = update.replace("multiply(%p, %g)", "while(%p), condition=%go, body=%round", 1)
    start, _ = read_program(f"{begin}{LOOP.strip()}\n\n%update (p{looped}").nodes
    assert start.flops == 2000
