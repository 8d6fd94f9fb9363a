"""The candidate of a config gives that config back."""

import pytest

from jaxpar.base.config import load_config, override
from jaxpar.plan.candidate import Candidate, candidate_of, changes

PLANS = [
    Candidate(),
    Candidate(mesh=(1, 2, 4, 1, 1, 8), dcn=(1, 2, 1, 1, 1, 1), zero=True, policy="full"),
    Candidate(mesh=(4, 1, 2, 1, 1, 1), microbatches=8, schedule="interleaved", virtual=2),
    Candidate(policy="full", keep=(("block_input", "offload"),), optimizer="offload"),
    Candidate(overlap=(("gather", "ring"), ("scatter", "ring")), scan=False, loss_mib=256),
]


@pytest.mark.parametrize("candidate", PLANS)
def test_a_config_with_a_candidates_changes_is_that_candidate(candidate):
    config = override(load_config("llama3_8b"), {"mesh.fsdp": 1, "mesh.tensor": 1})
    assert candidate_of(override(config, changes(candidate))) == candidate


def test_devices_are_those_of_all_slices():
    candidate = Candidate(mesh=(1, 2, 4, 1, 1, 8), dcn=(1, 2, 1, 1, 1, 1))
    assert candidate.devices == 128
    assert candidate.size("data") == 4
