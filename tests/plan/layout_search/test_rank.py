"""The order of plans by the closed forms."""

from __future__ import annotations

from jaxpar.base.config import load_config
from jaxpar.plan.candidate import ONE_DEVICE
from jaxpar.plan.layout_search.facts import facts_of
from jaxpar.plan.layout_search.find import closed_forms
from jaxpar.plan.layout_search.layouts import Layout
from jaxpar.plan.layout_search.memory_choices import ladder_of
from jaxpar.plan.layout_search.rank import rank
from jaxpar.plan.layout_search.refine import refine
from jaxpar.plan.layout_search.request import make_request
from jaxpar.rehearse.targets import load_target

MESHES = [Layout((1, 1, 64, 1, 1, 1), ONE_DEVICE), Layout((1, 1, 32, 1, 1, 2), ONE_DEVICE)]


def test_a_mesh_is_judged_by_what_it_can_keep_and_not_by_a_policy_alone() -> None:
    """Under a policy fsdp=64 is slower on v5e than with tensor=2, and activation by activation it
    is faster.
    """
    request = make_request(load_config("llama3_8b"), load_target("v5e-64"), sequences=64)
    facts = facts_of(request)
    ladder = ladder_of(request, facts.has_moments, may_offload=False)
    price = closed_forms(request)
    together = rank(request, facts, MESHES, ladder, price).plans[0]
    for mesh in MESHES:
        alone = rank(request, facts, [mesh], ladder, price).plans[0]
        refined = refine(alone, request, price, request.budget, may_offload=False)
        assert together.seconds <= refined.seconds
