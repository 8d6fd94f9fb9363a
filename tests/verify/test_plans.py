"""`verify` over every parallelism and overlap, alone and combined: all give the gradients of one
device.

The fast suite takes plans drawn at random; each of the listed ones has a row in the table of
docs/verified.md.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiers import a_third
from verified_tables import print_table

from jaxpar.base.config import Config, override
from jaxpar.verify.of_config import checks as verify

MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"model.family": "gpt2", "model.heads": 8},
    "llama": {
        "model.family": "llama",
        "model.heads": 8,
        "model.kv_heads": 4,
        "model.tied_head": False,
        "memory.policy": "full",
        "train.label_smoothing": 0.1,
    },
    "moe": {
        "model.family": "llama",
        "model.heads": 8,
        "model.kv_heads": 8,
        "model.experts": 8,
        "train.balance_loss": 0.1,
        "train.router_z_loss": 0.05,
    },
}
COMMON = {"model.vocab_size": 250, "model.scan_layers": False, "train.batch": 48}
BFLOAT16 = {"precision.compute": "bfloat16"}
PACKED = {"data.pack": True}
THRICE = {"train.accumulation": 3}
ODD = {"model.layers": 5}


def config_of(
    model: str,
    mesh: dict[str, int],
    changes: dict[str, Any],
) -> Config:
    sizes = {f"mesh.{axis}": size for axis, size in mesh.items()}
    return override(Config(), COMMON | MODELS[model] | sizes | changes)


def overlap(
    gather: str,
    scatter: str = "",
    domino: str = "off",
    **sites: str,
) -> dict[str, Any]:
    forms = {"gather": gather, "scatter": scatter or gather, "domino": domino} | sites
    return {f"overlap.{name}": form for name, form in forms.items()}


def heads(H: int, K: int = 0) -> dict[str, Any]:
    return {"model.heads": H, "model.kv_heads": K, "model.embed": 16 * H}


DOMINO = overlap("xla", domino="on")
HALVED = overlap("xla", domino="sequence")
WINDOWS = {"model.masks": ("causal", "window(5)")}
PARALLEL = {"model.sublayers": "parallel", "model.activation": "relu2"}
ZERO1 = {"rules.state_embed": ("data",), "rules.embed": ()}
SPLIT_IN_ALL = {
    "rules.heads": (),
    "rules.kv_heads": (),
    "rules.attention_seq": ("context", "tensor"),
}
MIXED = overlap("ring", "bidirectional", heads_gather="xla", mlp_scatter="ring")


def strategy(name: str) -> dict[str, Any]:
    return {"context.strategy": name}


PLANS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    # Every model on meshes of one to three axes.
    *((model, {"data": 8}, PACKED) for model in MODELS),
    *((model, {"fsdp": 8}, ODD) for model in MODELS),
    *((model, {"tensor": 8}, {}) for model in MODELS),
    *((model, {"fsdp": 4, "tensor": 2}, THRICE | BFLOAT16) for model in MODELS),
    *((model, {"data": 2, "fsdp": 2, "tensor": 2}, PACKED | THRICE) for model in MODELS),
    # ZeRO-1, and HSDP with the state in quarters and in eighths.
    *((model, {"data": 8}, ZERO1 | ODD) for model in MODELS),
    *((model, {"data": 4, "tensor": 2}, ZERO1 | THRICE) for model in MODELS),
    ("gpt2", {"data": 2, "fsdp": 4}, {"model.tied_head": False}),
    *((model, {"data": 2, "fsdp": 4}, {"rules.state_embed": ("fsdp", "data")}) for model in MODELS),
    # Forms of overlap.
    *(
        ("llama", {"fsdp": 4, "tensor": 2}, forms)
        for forms in (overlap("ring"), overlap("bidirectional"), MIXED)
    ),
    *(
        ("llama", {"data": 2, "tensor": 4}, forms | PACKED)
        for forms in (
            overlap("ring"),
            overlap("bidirectional"),
            overlap("ring", "xla"),
            overlap("xla", "ring"),
            overlap("bidirectional", "ring"),
            MIXED,
        )
    ),
    *(
        ("llama", {"tensor": 8}, forms | ODD)
        for forms in (overlap("ring"), overlap("bidirectional"), MIXED)
    ),
    *(
        ("gpt2", {"fsdp": 2, "tensor": 4}, form | THRICE)
        for form in (overlap("ring"), overlap("bidirectional"), MIXED)
    ),
    # Domino, alone and with rings.
    *((model, {"data": 2, "tensor": 4}, DOMINO | PACKED | BFLOAT16) for model in MODELS),
    *(
        (model, {"fsdp": 4, "tensor": 2}, overlap("ring", "bidirectional", "on") | THRICE)
        for model in MODELS
    ),
    ("llama", {"data": 8}, DOMINO | ZERO1),
    (
        "llama",
        {"context": 2, "fsdp": 2, "tensor": 2},
        overlap("xla", "ring", "on") | PACKED,
    ),
    # Halves of each sequence.
    ("gpt2", {"data": 2, "tensor": 4}, HALVED | PACKED | BFLOAT16),
    ("llama", {"fsdp": 2, "tensor": 4}, HALVED | PACKED | THRICE | WINDOWS),
    ("llama", {"tensor": 8}, overlap("ring", "bidirectional", "sequence") | heads(8, 2)),
    ("llama", {"data": 8}, HALVED | ZERO1),
    # Attention beside the MLP.
    ("gpt2", {"data": 2, "tensor": 4}, overlap("ring", "bidirectional") | PARALLEL | THRICE),
    ("llama", {"fsdp": 4, "tensor": 2}, HALVED | PARALLEL | PACKED),
    ("llama", {"context": 2, "tensor": 4}, heads(2, 1) | PARALLEL),
    # More tensor devices than heads, or than kv heads.
    ("llama", {"tensor": 8}, heads(8, 2) | overlap("ring")),
    (
        "llama",
        {"fsdp": 2, "tensor": 4},
        heads(12, 6) | PACKED | BFLOAT16,
    ),
    ("llama", {"data": 2, "tensor": 4}, heads(8, 1) | DOMINO),
    ("llama", {"tensor": 8}, heads(4, 4) | overlap("bidirectional") | PACKED),
    ("llama", {"tensor": 8}, heads(4, 1)),
    ("llama", {"data": 2, "tensor": 4}, heads(6, 3) | THRICE),
    ("llama", {"context": 2, "tensor": 4}, heads(8, 2) | PACKED),
    ("llama", {"context": 2, "tensor": 4}, heads(2, 1)),
    ("gpt2", {"tensor": 8}, heads(4) | ODD),
    ("gpt2", {"fsdp": 2, "tensor": 4}, heads(6)),
    ("moe", {"expert": 2, "tensor": 4}, heads(8, 2)),
    # Context parallelism.
    *(("llama", {"context": 8}, strategy(name) | heads(16, 8)) for name in ("ring", "ulysses")),
    *(
        ("llama", {"context": 4, "tensor": 2}, strategy(name) | PACKED | BFLOAT16)
        for name in ("ring", "ulysses")
    ),
    *(("gpt2", {"data": 2, "context": 4}, strategy(name) | ODD) for name in ("ring", "ulysses")),
    *(
        (
            "llama",
            {"fsdp": 4, "context": 2},
            strategy(name) | {"model.masks": ("window(90)",)} | PACKED,
        )
        for name in ("ring", "ulysses")
    ),
    (
        "llama",
        {"data": 2, "context": 2, "tensor": 2},
        {"rules.embed": ("fsdp", "context")} | THRICE,
    ),
    ("llama", {"context": 2, "tensor": 4}, SPLIT_IN_ALL | PACKED),
    ("gpt2", {"context": 2, "tensor": 4}, overlap("bidirectional") | strategy("ulysses")),
    (
        "llama",
        {"context": 2, "fsdp": 2, "tensor": 2},
        MIXED | {"model.masks": ("window(50)", "causal")},
    ),
    # Experts, with everything else.
    *(("moe", {"expert": size, "fsdp": 8 // size}, PACKED) for size in (2, 4, 8)),
    (
        "moe",
        {"expert": 2, "fsdp": 2, "tensor": 2},
        overlap("ring") | THRICE,
    ),
    ("moe", {"expert": 4, "tensor": 2}, DOMINO),
    ("moe", {"expert": 2, "context": 2, "data": 2}, ZERO1 | PACKED),
    ("moe", {"expert": 2, "context": 2, "tensor": 2}, ODD),
    (
        "moe",
        {"expert": 2, "context": 4},
        strategy("ulysses") | {"model.experts_per_token": 3},
    ),
    ("moe", {"expert": 2, "data": 4}, {"memory.policy": "full"} | THRICE),
]


def words(
    mesh: dict[str, int],
    changes: dict[str, Any],
) -> tuple[str, str]:
    """A plan in a table's cells."""
    parts = [
        f"{name.partition('.')[2]} {_value(value)}"
        for name, value in changes.items()
        if value not in ("off", "xla")
    ]
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items()), ", ".join(parts)


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(value) or "none"
    return str(value).lower()


@pytest.mark.slow
@pytest.mark.parametrize("plan", a_third(PLANS))
def test_a_plan_of_the_table(plan: Any) -> None:
    found = verified(plan)
    assert found.equal, str(found)


@pytest.mark.long
def test_the_table_of_plans(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the table of docs/verified.md."""
    found = (verify.verify(config_of(*plan), jax.devices()) for plan in PLANS)
    rows = (
        ([plan[0], *words(*plan[1:])], result) for plan, result in zip(PLANS, found, strict=True)
    )
    assert not print_table(["model", "mesh", "with"], rows, capsys)


AXES = ("data", "fsdp", "context", "expert", "tensor")


@st.composite
def plans(draw: st.DrawFn, layers: tuple[int, ...]) -> tuple[str, dict[str, int], dict[str, Any]]:
    """A model of so many layers, a mesh of at most eight devices, and what may be chosen beside."""
    model = draw(st.sampled_from(list(MODELS)))
    mesh: dict[str, int] = {}
    for axis in draw(
        st.permutations([axis for axis in AXES if axis != "expert" or model == "moe"])
    ):
        mesh[axis] = draw(
            st.sampled_from([size for size in (1, 2, 4, 8) if size * math.prod(mesh.values()) <= 8])
        )
    form = st.sampled_from(("xla", "ring", "bidirectional"))
    changes: dict[str, Any] = overlap(
        draw(form),
        draw(form),
        draw(st.sampled_from(("off", "on"))),
    )
    H, K = draw(st.sampled_from(((8, 8), (8, 4), (8, 2), (6, 3), (4, 1))))
    changes |= heads(H, 0 if model == "gpt2" else K)
    shares = H % mesh["tensor"] == 0 and H // mesh["tensor"] % mesh["context"] == 0
    changes |= strategy(draw(st.sampled_from(("ring", *(("ulysses",) if shares else ())))))
    changes |= {
        "data.pack": draw(st.booleans()),
        "train.accumulation": draw(st.sampled_from((1, 3))),
    }
    masks = st.sampled_from((("causal",), ("window(70)",), ("window(70)", "causal")))
    changes |= {"model.layers": draw(st.sampled_from(layers)), "model.masks": draw(masks)}
    changes |= {
        "model.tied_head": draw(st.booleans()),
        "memory.policy": draw(st.sampled_from(("none", "full"))),
    }
    return model, {axis: size for axis, size in mesh.items() if size > 1}, changes


def verified(plan: tuple[str, dict[str, int], dict[str, Any]]) -> verify.Verification:
    return verify.verify(
        config_of(*plan),
        jax.devices()[: math.prod(plan[1].values())],
    )


@pytest.mark.slow
@settings(max_examples=2, suppress_health_check=list(HealthCheck))
@given(plans(layers=(2, 3)))
def test_a_plan_at_random(plan: tuple[str, dict[str, int], dict[str, Any]]) -> None:
    found = verified(plan)
    assert found.equal, str(found)


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=list(HealthCheck))
@given(plans(layers=(4, 5)))
def test_more_plans_at_random(plan: tuple[str, dict[str, int], dict[str, Any]]) -> None:
    found = verified(plan)
    assert found.equal, str(found)
