"""A `transformers` model that generates in PyTorch, in a process of its own to which
`jaxpar.bench.generate` talks.

It imports nothing of jax, which uses other CUDA libraries. The command line says as JSON what to
do. Each line of input is then a number of new tokens, answered by a line of JSON with the seconds
of the first and of the others, or with what is `missing`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np


def main() -> None:
    """Generate as many tokens as each line of input asks for, until the other side is gone."""
    run = None
    asked = json.loads(sys.argv[1])
    for line in sys.stdin:
        try:
            import torch  # pyright: ignore[reportMissingImports]
            import transformers  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            return print(json.dumps({"missing": f"{error}: pip install 'jaxpar[parity]'"}))
        cuda = asked["platform"] == "gpu"
        if cuda and not torch.cuda.is_available():
            return print(json.dumps({"missing": f"torch {torch.__version__} sees no GPU"}))
        run = run or generation(torch, transformers, asked, "cuda" if cuda else "cpu")
        by = f"transformers, torch {torch.__version__}"
        print(
            json.dumps({"by": by, **run(int(line))}),
            flush=True,
        )
    return None


def generation(
    torch: Any, transformers: Any, asked: dict[str, Any], device: str
) -> Callable[[int], dict[str, float]]:
    """Make `run(n)`, which continues the same random prompts by n tokens, the likeliest each, and
    returns the seconds until the first, `prefill`, and of the others, `decode`.
    """
    shape = asked["model"]
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    dtype = getattr(torch, asked["compute"])
    model = transformers.AutoModelForCausalLM.from_config(config).to(device, dtype).eval()
    numbers = np.random.default_rng(0).integers(
        0,
        asked["vocab_size"],
        asked["prompt"],
    )
    ids = torch.from_numpy(numbers).to(device)

    def generate(n: int) -> float:
        began = time.perf_counter()
        with torch.no_grad():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n,
                min_new_tokens=n,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=None,
            )
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    def run(n: int) -> dict[str, float]:
        prefill = generate(1)
        return {"prefill": prefill, "decode": generate(n) - prefill}

    return run


if __name__ == "__main__":
    main()
