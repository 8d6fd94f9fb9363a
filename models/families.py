"""What sets the families of models apart, one line of a table each; `jaxpar.models.transformer` is what they share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxpar.base.config import ModelConfig
from jaxpar.base.errors import UserError, suggest
from jaxpar.models.layers import LayerNorm, RMSNorm


@dataclass(frozen=True)
class Family:
    """A family of models; `ModelConfig` has the sizes of one model.

    Attributes:
      norm: the norm that is used before attention, before the MLP and before the head.
      positions: `learned` adds a row of a table to the embedding; `rotary` turns q and k (RoPE).
      biases: the linears of a block that add a bias.
      gated: the MLP is SwiGLU (arXiv:2002.05202), and may be split into experts; otherwise it is a GELU.
      grouped: several query heads may share a kv head (arXiv:2305.13245).
    """

    norm: type[LayerNorm] | type[RMSNorm]
    positions: Literal["learned", "rotary"]
    biases: tuple[str, ...]
    gated: bool
    grouped: bool


FAMILIES: dict[str, Family] = {
    # Radford et al. 2019, "Language models are unsupervised multitask learners".
    "gpt2": Family(
        norm=LayerNorm, positions="learned", biases=("q", "k", "v", "out", "up", "down"), gated=False, grouped=False
    ),
    # LLaMA 2 and 3 (arXiv:2307.09288, arXiv:2407.21783); with experts it is Mixtral (arXiv:2401.04088).
    "llama": Family(norm=RMSNorm, positions="rotary", biases=(), gated=True, grouped=True),
}


def family_of(config: ModelConfig) -> Family:
    """Return the family of a model.

    Raises:
      UserError: there is no such family, or the family has no use for some of the sizes.
    """
    name, standard = config.family, ModelConfig()
    if name not in FAMILIES:
        raise UserError(
            f"no model family {name!r}{suggest(name, FAMILIES)}: model.family is one of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    if config.experts and not family.gated:
        raise UserError(f"{name} has no experts, found model.experts={config.experts}: set it to 0")
    if not family.grouped and config.kv_heads not in (0, config.heads):
        raise UserError(f"{name} has no grouped kv heads, found model.kv_heads={config.kv_heads}: set it to 0")
    rope = [field for field in vars(config) if "rope" in field and getattr(config, field) != getattr(standard, field)]
    if family.positions != "rotary" and rope:
        raise UserError(f"{name} has no RoPE: leave {' and '.join(f'model.{field}' for field in rope)} alone")
    return family
