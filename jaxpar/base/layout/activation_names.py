"""The activations of a block that can be kept, offloaded to host memory, or recomputed in the
backward.

A model names each of them once (`jaxpar.parallel.remat.named`). A policy says which are kept, and
`memory.keep` may say otherwise for single ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from jaxpar.base.layout.sharding import LogicalAxis

Action = Literal["save", "offload", "recompute"]
Choice = Literal["policy", "save", "offload", "recompute"]
Policy = Literal["none", "full", "block_inputs", "attention_out", "selective", "dots"]


@dataclass(frozen=True)
class Keep:
    """What becomes of each named activation: `save` keeps it on the device, `offload` keeps it in
    host memory, `recompute` computes it again in the backward, and `policy` does what memory.policy
    says. `jaxpar show` lists the activations of a model with their bytes."""

    block_input: Choice = "policy"
    """The input of a block. A recomputation starts from it, so it can be saved or offloaded
    only.
    """
    attention_norm: Choice = "policy"
    q: Choice = "policy"
    """Queries; like keys, after the rotation where positions are rotary, but before a norm of their
    own.
    """
    k: Choice = "policy"
    v: Choice = "policy"
    attention_out: Choice = "policy"
    """The weighted values before the output projection."""
    attention_lse: Choice = "policy"
    """The log-sum-exp of the scores. With it and `attention_out`, attention is not run again.
    Splash and cuDNN keep it with `attention_out`."""
    attention_proj: Choice = "policy"
    """The output projection of attention, where a norm follows it."""
    mlp_input: Choice = "policy"
    """The residual stream between attention and MLP."""
    mlp_norm: Choice = "policy"
    expert_input: Choice = "policy"
    """The rows that this device's experts were sent."""
    gate: Choice = "policy"
    up: Choice = "policy"
    mlp_hidden: Choice = "policy"
    """The input of the last linear of the MLP."""
    shared_gate: Choice = "policy"
    """As `gate`, of the experts that every token goes to; likewise the next two."""
    shared_up: Choice = "policy"
    shared_mlp_hidden: Choice = "policy"
    mlp_out: Choice = "policy"
    """The output of the MLP, where a norm follows it."""
    expert_out: Choice = "policy"
    """The outputs of the experts, back on the devices of their tokens."""


class Named(NamedTuple):
    """A description of an activation, and the logical axes of its dims."""

    what: str
    axes: tuple[LogicalAxis | None, ...]


_STREAM: tuple[LogicalAxis | None, ...] = ("batch", "residual_seq", None)
_HIDDEN: tuple[LogicalAxis | None, ...] = ("batch", "seq", "mlp")
_Q: tuple[LogicalAxis | None, ...] = ("batch", "attention_seq", "heads", "head_dim")
_KV: tuple[LogicalAxis | None, ...] = ("batch", "attention_seq", "kv_heads", "head_dim")
NAMES: dict[str, Named] = {
    "block_input": Named("residual stream into the block", _STREAM),
    "attention_norm": Named("normed input of attention", _STREAM),
    "q": Named("queries", _Q),
    "k": Named("keys", _KV),
    "v": Named("values", _KV),
    "attention_out": Named("weighted values", _Q),
    "attention_lse": Named("log-sum-exp of attention", ("batch", "attention_seq", "heads", None)),
    "attention_proj": Named("output projection of attention", _STREAM),
    "mlp_input": Named("residual stream into the MLP", _STREAM),
    "mlp_norm": Named("normed input of the MLP", _STREAM),
    "expert_input": Named("rows for the experts", ("batch", "residual_seq", None, None)),
    "gate": Named("gate of the MLP", _HIDDEN),
    "up": Named("up projection of the MLP", _HIDDEN),
    "mlp_hidden": Named("input of the down projection", _HIDDEN),
    "shared_gate": Named("gate of the shared experts", _HIDDEN),
    "shared_up": Named("up projection of the shared experts", _HIDDEN),
    "shared_mlp_hidden": Named("input of the shared down projection", _HIDDEN),
    "mlp_out": Named("output of the MLP", _STREAM),
    "expert_out": Named("answers of the experts", ("batch", "residual_seq", None, None)),
}
"""They stand in the order in which a block makes them. With experts, gate, up and mlp_hidden are
[..., rows, mlp].
"""

_ATTENTION = frozenset({"attention_out", "attention_lse"})
_MATMULS = (
    frozenset({"q", "k", "v", "attention_proj", "mlp_input", "gate", "up", "mlp_out", "expert_out"})
    | frozenset({"shared_gate", "shared_up"})
    | _ATTENTION
)
PRESETS: dict[Policy, frozenset[str]] = {
    "none": frozenset(NAMES),
    "full": frozenset({"block_input"}),
    "block_inputs": frozenset({"block_input", "mlp_input"}),
    "attention_out": frozenset({"block_input"}) | _ATTENTION,
    "selective": frozenset(NAMES) - _ATTENTION,
    "dots": frozenset({"block_input", "expert_input"}) | _MATMULS,
}
"""What each policy saves; the rest is computed again.

`full` is Chen et al. 2016 (arXiv:1604.06174). `selective` computes attention again, and nothing
that a large matmul makes (Korthikanti et al. 2022, arXiv:2205.05198, section 5). `block_inputs`
keeps the inputs of both halves of a block, so that they are computed again one at a time. `dots`
keeps the outputs of matmuls, those of attention among them, and computes norms and activation
functions again. `none` keeps everything, also what has no name.
"""


def actions(policy: Policy, keep: Keep) -> dict[str, Action]:
    """Decide what becomes of every named activation.

    Args:
      policy: the policy, `memory.policy`.
      keep: what is said of single names, `memory.keep`; it goes before the policy.

    Returns:
      The action for each name of `NAMES`.
    """
    found: dict[str, Action] = {
        name: "save" if name in PRESETS[policy] else "recompute" for name in NAMES
    }
    return found | {name: choice for name, choice in vars(keep).items() if choice != "policy"}
