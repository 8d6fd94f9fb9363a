"""GPT-2, LLaMA (Mistral and Mixtral too), Qwen, Gemma, BERT and ModernBERT in Flax NNX:
`jaxpar.models`.
"""

if __name__ != "jaxpar.models":
    raise ImportError(
        f"imported as {__name__!r}: that makes a second copy of the models; use `import "
        "jaxpar.models`"
    )

from jaxpar.models.embed import Embed
from jaxpar.models.families import FAMILIES
from jaxpar.models.head import Head
from jaxpar.models.model import Batch, Model
from jaxpar.models.own_model import AnyModel, OwnModel, in_parts, nnx_model
from jaxpar.models.parts import BlockPart, EmbedPart, HeadOutput, HeadPart, Params
from jaxpar.models.transformer import Block

__all__ = [
    "FAMILIES",
    "AnyModel",
    "Batch",
    "Block",
    "BlockPart",
    "Embed",
    "EmbedPart",
    "Head",
    "HeadOutput",
    "HeadPart",
    "Model",
    "OwnModel",
    "Params",
    "in_parts",
    "nnx_model",
]
