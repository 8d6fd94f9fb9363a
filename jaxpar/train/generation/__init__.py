"""Text from a model: prompts of different lengths in one batch (`generator`), the programs that are
compiled for a shape (`decode_programs`), how a token is drawn (`sampling`), a folder's model, ready
for that (`trained`), prompts as text (`prompts`), and the model of lm-evaluation-harness
(`harness`).
"""

from jaxpar.train.generation.generator import (
    GenerationTimes,
    Generator,
    bucket,
    decode_plan,
    generate,
)

__all__ = [
    "GenerationTimes",
    "Generator",
    "bucket",
    "decode_plan",
    "generate",
]
