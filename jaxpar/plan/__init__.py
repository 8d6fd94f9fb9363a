"""This package chooses the forms of overlap and what to keep, offload and recompute, and predicts
the bytes and time that they take.

`resolve` settles a config's `overlap = auto` and its `memory.budget`, for the devices at hand or
for a target; `memory_account` predicts where the bytes of its step are.

Its rooms, in the order in which they are read: `candidate` is a choice of plan, and `closed_form`
says what one costs without tracing it. `figures` are those of a rehearsal, and `engine` is the
search that all others go through. `communication` lists what a plan sends, and `memory_account`
where its bytes are. `choose_remat` finds the fastest way to treat activations within some bytes;
`choose_overlap` and `choose_order` try forms and orders of a step. `budget_space` has the plans
among which a memory budget decides, and `budget` settles it, and overlap, as `resolve`. `settings`
are named changes of a config, `rehearsal_cache` remembers rehearsals, and `compositions` says how
settings go together. `layout_search` finds the fastest plan of a config on a target.
"""

from jaxpar.plan.budget import resolve, resolve_and_compile
from jaxpar.plan.layout_search import Answer, search
from jaxpar.plan.memory_account import MemoryPart, memory_account

__all__ = [
    "Answer",
    "MemoryPart",
    "memory_account",
    "resolve",
    "resolve_and_compile",
    "search",
]
