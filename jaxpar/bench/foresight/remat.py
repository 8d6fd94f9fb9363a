"""What MaxText keeps for the backward pass, as settings of ours."""

from __future__ import annotations

from collections.abc import Mapping

Kept = dict[str, str]
"""An action of ours, or `policy`, for each name of `memory.keep`."""

ACTIONS = {"device": "save", "offload": "offload", "remat": "recompute"}
"""What becomes of a tensor, by their word and by ours."""
TENSORS: dict[str, tuple[str, ...]] = {
    "decoder_layer_input": ("block_input",),
    "context": ("attention_out", "attention_lse"),
    "query_proj": ("q",),
    "key_proj": ("k",),
    "value_proj": ("v",),
    "qkv_proj": ("q", "k", "v"),
    "out_proj": ("mlp_input",),
    "mlpwi": ("gate", "up"),
    "mlpwi_0": ("gate",),
    "mlpwi_1": ("up",),
    "mlpwo": (),
}
"""Our activations for each tensor of theirs. Where no norm follows, the output of attention's last
linear is kept with the residual stream that it is added to, and the MLP's last output is read by
nobody in the backward.
"""
NORMED = {"out_proj": ("attention_proj",), "mlpwo": ("mlp_out",)}
"""Our activations where a norm follows a sublayer, as in Gemma."""
_QKV = ("query_proj", "key_proj", "value_proj")
_DOTS = (*_QKV, "out_proj", "mlpwi_0", "mlpwi_1", "mlpwo")
POLICIES: dict[str, Mapping[str, str]] = {
    "full": {},
    "custom": {},
    "minimal": dict.fromkeys(_DOTS, "device"),
    "save_dot_with_no_batch_dim": dict.fromkeys(_DOTS, "device"),
    "minimal_flash": dict.fromkeys((*_DOTS, "context"), "device"),
    "minimal_with_context": dict.fromkeys((*_DOTS, "context"), "device"),
    "minimal_offloaded": dict.fromkeys(_DOTS, "offload"),
    "save_dot_except_mlp": dict.fromkeys((*_QKV, "out_proj"), "device"),
    "save_dot_with_context_except_mlp": dict.fromkeys((*_QKV, "context", "out_proj"), "device"),
    "save_dot_except_mlpwi": dict.fromkeys((*_QKV, "out_proj", "mlpwo"), "device"),
    "save_qkv_proj": dict.fromkeys(_QKV, "device"),
    "save_out_proj": {"out_proj": "device"},
    "qkv_proj_offloaded": dict.fromkeys(_QKV, "offload"),
}
"""The tensors that a policy keeps. All but `none` compute the others again."""


def kept_activations(policy: str, tensors: Mapping[str, str], normed: bool, gated: bool) -> Kept:
    """Translate a policy of recomputation.

    Args:
      policy: `remat_policy`, one of `POLICIES`.
      tensors: what becomes of single tensors, which counts where the policy is `custom`.
      normed: whether a norm follows attention and the MLP.
      gated: whether the MLP has a gate.

    Returns:
      The actions of `memory.keep` beside `memory.policy = "full"`.
    """
    said = dict(POLICIES[policy])
    if policy == "custom":
        said |= tensors
    found = Kept()
    for tensor, action in said.items():
        names = (NORMED if normed else {}).get(tensor, TENSORS[tensor])
        if not gated and tensor.startswith("mlpwi"):
            names = ("up",)
        for name in names:
            found[name] = ACTIONS[action]
    if found.get("block_input") in ("save", "recompute"):  # a block's input is kept anyway
        del found["block_input"]
    return {name: action for name, action in found.items() if action != "recompute"}
