"""The activations of a block that are worth a decision: kept, kept in host memory, or made again in the backward.

A model names each of them once (`jaxpar.parallel.remat.named`). A policy says which are kept; `memory.keep` says
otherwise for some of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Action = Literal["save", "offload", "recompute"]
Choice = Literal["policy", "save", "offload", "recompute"]
Policy = Literal["none", "full", "block_inputs", "attention_out", "selective", "dots"]


@dataclass(frozen=True)
class Keep:
    """What becomes of each named activation: `save` on the device, `offload` to host memory, `recompute` in the
    backward; `policy` = as memory.policy says. `jaxpar show` lists those that a model has, with their bytes.
    """

    block_input: Choice = "policy"
    """The residual stream as a block gets it. What starts a recomputation: it can be saved or offloaded."""
    attention_norm: Choice = "policy"
    q: Choice = "policy"
    """With k: after the rotation, where positions are rotary."""
    k: Choice = "policy"
    v: Choice = "policy"
    attention_out: Choice = "policy"
    """Weighted values, before the output projection."""
    attention_lse: Choice = "policy"
    """Log-sum-exp of the scores: with `attention_out`, attention is not run again. Splash and cuDNN have it in that."""
    mlp_input: Choice = "policy"
    """The residual stream between attention and MLP."""
    mlp_norm: Choice = "policy"
    expert_input: Choice = "policy"
    """Rows that this device's experts were sent."""
    gate: Choice = "policy"
    up: Choice = "policy"
    mlp_hidden: Choice = "policy"
    """What the last linear of the MLP multiplies."""
    expert_out: Choice = "policy"
    """Answers of the experts, back where the tokens are."""


class Named(NamedTuple):
    """What an activation is, and the logical axes of its dims."""

    what: str
    axes: tuple[str | None, ...]


_STREAM = ("batch", "residual_seq", None)
_HIDDEN = ("batch", "seq", "mlp")
_Q = ("batch", "attention_seq", "heads", "head_dim")
_KV = ("batch", "attention_seq", "kv_heads", "head_dim")
NAMES: dict[str, Named] = {
    "block_input": Named("residual stream into the block", _STREAM),
    "attention_norm": Named("normed input of attention", _STREAM),
    "q": Named("queries", _Q),
    "k": Named("keys", _KV),
    "v": Named("values", _KV),
    "attention_out": Named("weighted values", _Q),
    "attention_lse": Named("log-sum-exp of attention", ("batch", "attention_seq", "heads", None)),
    "mlp_input": Named("residual stream into the MLP", _STREAM),
    "mlp_norm": Named("normed input of the MLP", _STREAM),
    "expert_input": Named("rows for the experts", ("batch", "residual_seq", None, None)),
    "gate": Named("gate of the MLP", _HIDDEN),
    "up": Named("up projection of the MLP", _HIDDEN),
    "mlp_hidden": Named("input of the down projection", _HIDDEN),
    "expert_out": Named("answers of the experts", ("batch", "residual_seq", None, None)),
}
"""In the order in which a block makes them. Of experts gate, up and mlp_hidden are rows [..., rows, mlp]."""

_ATTENTION = frozenset({"attention_out", "attention_lse"})
_MATMULS = frozenset({"q", "k", "v", "mlp_input", "gate", "up", "expert_out"}) | _ATTENTION
PRESETS: dict[Policy, frozenset[str]] = {
    "none": frozenset(NAMES),
    "full": frozenset({"block_input"}),
    "block_inputs": frozenset({"block_input", "mlp_input"}),
    "attention_out": frozenset({"block_input"}) | _ATTENTION,
    "selective": frozenset(NAMES) - _ATTENTION,
    "dots": frozenset({"block_input", "expert_input"}) | _MATMULS,
}
"""What each policy saves; it computes the rest again.

`full` is Chen et al. 2016 (arXiv:1604.06174); `selective` computes attention again and nothing that a large matmul
makes (Korthikanti et al. 2022, arXiv:2205.05198, section 5); `block_inputs` keeps the input of both halves of a block,
so that they are computed again one at a time; `dots` keeps what a matmul made, attention's among them, and computes
norms and activation functions again. `none` keeps everything, what has no name too.
"""


def actions(policy: Policy, keep: Keep) -> dict[str, Action]:
    """What becomes of every name."""
    found: dict[str, Action] = {name: "save" if name in PRESETS[policy] else "recompute" for name in NAMES}
    return found | {name: choice for name, choice in vars(keep).items() if choice != "policy"}


def keeps_all(policy: Policy, keep: Keep) -> bool:
    """Whether nothing is computed again and nothing is offloaded, so that nothing needs a name."""
    return policy == "none" and set(actions(policy, keep).values()) == {"save"}
