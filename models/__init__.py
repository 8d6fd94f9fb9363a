"""GPT-2, LLaMA (Mistral and Mixtral too), Qwen, Gemma, BERT and ModernBERT in Flax NNX:
`jaxpar.models`.

In the order in which to read:

1. The definitions. `families` has the differences between families, `part_protocols` the protocols
   by which the library calls a part, and `parameters` the declaration of a parameter.
2. The parts that all families share: `embed`, `transformer` (the block), `query_layer` and `head`.
   Under a block are `norms`, `positions`, `masks` with `mask_words`, and `linears`, by which it
   reads its weights, with LoRA's pairs (`lora`) and sparse forms (`sparsity`).
3. The whole model. `split` takes a part apart into a graph and arrays, `layers` runs layers one
   after another, `forward` runs a model up to its head, and `loss` the rest; `hidden` has the loss
   of a teacher's hidden states. `fresh_parameters` makes the arrays and `counts` counts them.
   `Model` (`model`) puts it all together; `own_model` is a whole model of one's own.
4. Results that are made from a model: `views` (its parameters as they multiply), `top_k` (a
   teacher's answers), and Hugging Face's folders (`hf`).
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
from jaxpar.models.part_protocols import BlockPart, EmbedPart, HeadOutput, HeadPart, Params
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
