"""GPT-2's training step in PyTorch, as a process of its own that `jaxpar bench gpu` talks to.

It imports nothing of jax, whose CUDA libraries are others. Sizes come as JSON on the command line; then a number of
steps a line, answered when they are done by a line of JSON, or by what is `missing`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any


def main() -> None:
    """Take as many steps as each line asks for, until the other side is gone."""
    run, asked = None, json.loads(sys.argv[1])
    for line in sys.stdin:
        try:
            import torch  # pyright: ignore[reportMissingImports]
        except ImportError:
            return print(json.dumps({"missing": "torch is not installed"}))
        cuda = torch.cuda.is_available()
        if not (cuda or asked["small"]):
            return print(json.dumps({"missing": f"torch {torch.__version__} sees no GPU"}))
        run = run or training(torch, asked, "cuda" if cuda else "cpu")
        loss, peak = run(int(line)), torch.cuda.max_memory_allocated() / 2**30 if cuda else None
        by = f"torch {torch.__version__}" + ", torch.compile" * cuda
        print(json.dumps({"by": by, "loss": loss, "peak, GiB": peak}), flush=True)
    return None


def training(torch: Any, asked: dict[str, Any], device: str) -> Callable[[int], float]:
    """`run(n)` takes n steps on the same random tokens and gives the last one's loss, which it waits for.

    torch.compile, fused AdamW, bfloat16 by autocast, PyTorch's own attention; on a CPU nothing is compiled.
    """
    nn, D, S = torch.nn, asked["embed"], asked["seq_len"]
    torch.set_float32_matmul_precision("high")  # TF32 where a matmul is left in float32

    class GPT2(nn.Module):
        """Its loss on one batch; blocks are PyTorch's, normed first."""

        def __init__(self) -> None:
            super().__init__()
            gelu = partial(nn.functional.gelu, approximate="tanh")
            block = nn.TransformerEncoderLayer(
                D, asked["heads"], asked["mlp"], 0.0, gelu, batch_first=True, norm_first=True
            )
            self.blocks = nn.TransformerEncoder(block, asked["layers"], nn.LayerNorm(D), enable_nested_tensor=False)
            self.tokens, self.places = nn.Embedding(asked["vocab_size"], D), nn.Embedding(S, D)
            for table in (self.tokens, self.places):
                nn.init.normal_(table.weight, std=0.02)
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(S))

        def forward(self, ids: Any) -> Any:
            x = self.tokens(ids[:, :-1]) + self.places.weight
            scores = self.blocks(x, self.mask, is_causal=True) @ self.tokens.weight.T
            return nn.functional.cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())

    asked["vocab_size"] += -asked["vocab_size"] % asked["vocab_multiple"]
    model = GPT2().to(device)
    loss_of = torch.compile(model) if device == "cuda" else model
    betas = asked["beta1"], asked["beta2"]
    adamw = torch.optim.AdamW(
        model.parameters(), asked["learning_rate"], betas, asked["eps"], asked["weight_decay"], fused=device == "cuda"
    )
    ids = torch.randint(asked["vocab_size"], (asked["batch"], S + 1), device=device)

    def run(n: int) -> float:
        for _ in range(n):
            with torch.autocast(device, torch.bfloat16):
                loss = loss_of(ids)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), asked["clip_norm"])
            adamw.step()
            adamw.zero_grad(set_to_none=True)
        return loss.item()

    return run


if __name__ == "__main__":
    main()
