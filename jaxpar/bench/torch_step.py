"""A `transformers` model that trains in PyTorch, in a process of its own to which
`jaxpar.bench.measure` talks.

It imports nothing of jax, which uses other CUDA libraries. The command line says as JSON what to
do. Each line of input is then a number of steps, answered when they are done by a line of JSON,
which may say what is `missing`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

OPTIMIZERS = {
    "adamw": "AdamW",
    "adam": "Adam",
    "sgd": "SGD",
    "adafactor": "Adafactor",
    "muon": "Muon",
}
"""The names of torch.optim by those of `optimizer.name`; PyTorch has no other."""


def main() -> None:
    """Take as many steps as each line of input asks for, until the other side is gone."""
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
        kind = OPTIMIZERS[asked["optimizer"]]
        if not hasattr(torch.optim, kind):
            said = {"missing": f"torch {torch.__version__} has no torch.optim.{kind}"}
            return print(json.dumps(said))
        run = run or training(torch, transformers, asked, "cuda" if cuda else "cpu")
        said = run(int(line))
        if cuda:
            peak = torch.cuda.max_memory_allocated() / 2**30
        else:
            peak = None
        how = "compiled" if cuda else "eager"
        by = f"transformers, torch {torch.__version__}, {how}, {kind}"
        print(json.dumps({"by": by, "peak, GiB": peak, **said}), flush=True)
    return None


def training(
    torch: Any, transformers: Any, asked: dict[str, Any], device: str
) -> Callable[[int], dict[str, float]]:
    """Make `run(n)`, which takes n steps on the same random tokens and returns the last `loss`,
    which it waits for.

    On a GPU it uses torch.compile, PyTorch's own attention and fused optimizers where it has them.
    Autocast gives the config's precision.

    Args:
      asked: what the command line said.
      device: where PyTorch computes, "cpu" or "cuda".
    """
    train = asked["train"]
    shape = asked["model"]
    cuda = device == "cuda"
    torch.set_float32_matmul_precision("high")  # a matmul left in float32 uses TF32, as in XLA
    config = transformers.AutoConfig.for_model(shape.pop("model_type"), **shape)
    for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "attention_dropout"):
        if hasattr(config, name):
            setattr(config, name, asked["dropout"])
    attention = "sdpa" if cuda else "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(
        device
    )
    forward = torch.compile(model) if cuda else model
    optimizers = optimizers_of(torch, model, asked, cuda)
    size = train["batch"], asked["seq_len"] + 1
    ids = (
        torch.from_numpy(
            np.random.default_rng(0).integers(
                0,
                asked["vocab_size"],
                size,
                np.int32,
            )
        )
        .long()
        .to(device)
    )
    half = asked["compute"] == "bfloat16"

    def run(n: int) -> dict[str, float]:
        last = math.nan
        for _ in range(n):
            with torch.autocast(device, torch.bfloat16, enabled=half):
                scores = forward(ids[:, :-1]).logits
                loss = torch.nn.functional.cross_entropy(
                    scores.flatten(0, 1),
                    ids[:, 1:].flatten(),
                )
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), train["clip_norm"] or float("inf"))
            for optimizer in optimizers:
                optimizer.step()
            model.zero_grad(set_to_none=True)
            last = loss.detach()
        return {"loss": float(last)}

    return run


def optimizers_of(torch: Any, model: Any, asked: dict[str, Any], cuda: bool) -> list[Any]:
    """Make the optimizers of PyTorch that do what the config's does, each for its parameters.

    They read and write the same arrays, and take as long; PyTorch's decay is of all parameters, and
    its Adafactor and Muon differ in details from those of optax.

    Args:
      model: the model whose parameters they update.
      asked: what the command line said: `optimizer` is its name, `settings` are its numbers.
      cuda: whether it runs on a GPU.
    """
    name = asked["optimizer"]
    chosen = asked["settings"]
    rate = asked["train"]["learning_rate"]
    decay = chosen.get("weight_decay", 0.0)

    def adam(kind: Any, params: Any) -> Any:
        betas = (chosen["beta1"], chosen["beta2"])
        return kind(params, rate, betas, chosen["eps"], weight_decay=decay, fused=cuda)

    params = list(model.parameters())
    if name == "adamw":
        return [adam(torch.optim.AdamW, params)]
    if name == "adam":
        return [adam(torch.optim.Adam, params)]
    if name == "sgd":
        momentum = {"momentum": chosen["momentum"], "nesterov": chosen["nesterov"]}
        return [torch.optim.SGD(params, rate, weight_decay=decay, fused=cuda, **momentum)]
    if name == "adafactor":
        return [torch.optim.Adafactor(params, rate, -chosen["decay_rate"], weight_decay=decay)]
    tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    hidden = [one for one in params if one.ndim == 2 and id(one) not in tables]
    taken = {id(one) for one in hidden}
    muon = torch.optim.Muon(
        hidden,
        rate,
        decay,
        chosen["momentum"],
        chosen["nesterov"],
        ns_steps=chosen["iterations"],
        adjust_lr_fn="match_rms_adamw" if chosen["rms"] else "original",
    )
    return [muon, adam(torch.optim.AdamW, [one for one in params if id(one) not in taken])]


if __name__ == "__main__":
    main()
