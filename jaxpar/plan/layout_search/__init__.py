"""This package finds the fastest plan of a config on a target: the mesh, what is kept, recomputed
and offloaded, the microbatches and the forms of overlap.

`search` is the whole of it, and `jaxpar plan` its command.

Its rooms, in the order in which they are read: `infeasible` says why a plan cannot run. `request`
is what is asked, and `facts` what must be known of the model for it. `layouts` are the meshes
with their batchings, `memory_choices` the ladder of what each keeps, and `rank` puts them in
order by the closed forms. `refine` tries further choices on the best, and `contenders` are what
rehearsals choose from. `worker` rehearses one config in a process of its own, and `processes`
several. `answer` is what comes out, and `explain` says why the others lost. `find` puts these
together, `config_file` writes a config with the reasons, and `other_targets` searches on several
targets.
"""

from jaxpar.plan.layout_search.answer import Answer, Changed, Found, Lost
from jaxpar.plan.layout_search.find import search
from jaxpar.plan.layout_search.infeasible import Infeasible
from jaxpar.plan.layout_search.request import Request

__all__ = [
    "Answer",
    "Changed",
    "Found",
    "Infeasible",
    "Lost",
    "Request",
    "search",
]
