"""The loss of a config after a few steps on real text: of its small form, on one simulated device.

What a config computes is kept: its family, the words of its masks, its objective, its optimizer and
schedule, the dtypes that it stores. Matmuls are in float32, because a CPU multiplies bfloat16
slowly. Its sizes are not kept, and its layout is not needed, because a layout never changes the
answer. So configs that differ in the layout alone have one loss, which is trained once.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from jaxpar.base.config import (
    CheckpointConfig,
    CompilerConfig,
    Config,
    DataConfig,
    KernelsConfig,
    MemoryConfig,
    MetricsConfig,
    ModelConfig,
    TrainConfig,
)
from jaxpar.base.config.checks import check
from jaxpar.base.errors import Say, UserError
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Context, Overlap, Pipeline
from jaxpar.base.layout.sharding import ShardingRules
from jaxpar.models.masks import shrink_mask
from jaxpar.plan.rehearsal_cache import digest_of
from jaxpar.train import run
from jaxpar.train.metrics import read_metrics

SEQ_LEN = 256
EMBED = 128
HEAD_DIM = 32
MOST_LAYERS = 2
BATCH = 8
RATE = 3e-3
_BYTES = 256
_TEXT_BYTES = 2_000_000
_EVALUATED = 20


def loss_after(
    config: Config,
    steps: int,
    folder: Path,
    say: Say = lambda line: None,
) -> float:
    """Train the small form of a config, or read its loss where that was trained before.

    Args:
      folder: where the runs are, in a folder each, and beside it what they print, `DIGEST.log`.
      say: is called with a line where one is trained.

    Returns:
      The validation loss after the last step, in nats a token (a byte).

    Raises:
      UserError: the small form is refused, or its loss is not finite.
      KeyboardInterrupt: the run was interrupted; it goes on where it was.
    """
    small = small_form(config, steps)
    place = folder / digest_of(small)
    folder.mkdir(parents=True, exist_ok=True)
    rows = read_metrics(place) if (place / "metrics.jsonl").exists() else []
    if not _losses(rows, steps):
        say(f"training {steps} steps of the small form, in {place}")
        log = folder / f"{place.name}.log"
        with open(log, "a", encoding="utf-8") as opened, contextlib.redirect_stdout(opened):
            if run(small, place).interrupted:
                raise KeyboardInterrupt  # which run has turned into an end in good order
        rows = read_metrics(place)
    losses = _losses(rows, steps)
    if not losses or not math.isfinite(losses[-1]):
        raise UserError(f"the run in {place} has no loss at its end: remove it to train it anew")
    return losses[-1]


def _losses(rows: Sequence[Mapping[str, float]], step: int) -> list[float]:
    """List the validation losses after a step among the rows of a run."""
    return [row["val_loss"] for row in rows if "val_loss" in row and row["step"] == step]


def small_form(config: Config, steps: int) -> Config:
    """Make the small form of a config, which a CPU trains.

    At most 2 layers of 128, heads of 32 in groups as large as the config's, an MLP in the same
    proportion; at least twice as many experts as a token has; 8 sequences of 256 bytes of the text
    of this Python's standard library; the config's schedule from 3e-3. Masks are shrunk as `verify`
    does. A batch of several microbatches has two.

    Raises:
      UserError: there is none, as where a mask has no small form.
    """
    train = config.train
    kept = (
        "seed",
        "schedule",
        "clip_norm",
        "z_loss",
        "label_smoothing",
        "balance_loss",
        "router_z_loss",
    )
    data = config.data
    small = replace(
        config,
        model=_small_model(config),
        data=DataConfig(
            seq_len=SEQ_LEN,
            max_bytes=_TEXT_BYTES,
            pack=data.pack,
            objective=data.objective,
            mask_rate=data.mask_rate,
            mask_whole_words=data.mask_whole_words,
        ),
        train=TrainConfig(
            **{name: getattr(train, name) for name in kept},
            steps=steps,
            batch=BATCH,
            accumulation=min(train.accumulation, 2),
            learning_rate=RATE,
            warmup_steps=steps // 10,
            eval_every=0,
            eval_batches=_EVALUATED,
            final_eval_batches=_EVALUATED,
        ),
        mesh=MeshSpec(platform="cpu"),
        rules=ShardingRules(),
        overlap=Overlap(),
        context=Context(),
        pipeline=Pipeline(),
        memory=MemoryConfig(),
        precision=replace(config.precision, compute="float32"),
        kernels=KernelsConfig(),
        compiler=CompilerConfig(),
        checkpoint=CheckpointConfig(every=0),
        metrics=MetricsConfig(),
    )
    return check(small)


def _small_model(config: Config) -> ModelConfig:
    """Make the model with few layers and narrow dims, in the proportions of the config's."""
    model = config.model
    kinds = model.kinds
    layers = kinds * max(1, min(model.layers, MOST_LAYERS) // kinds)
    heads = EMBED // HEAD_DIM
    group = min(heads, model.heads // model.kv_head_count)
    while heads % group:
        group -= 1
    mlp = max(64, round(EMBED * model.mlp / model.embed / 64) * 64)
    masks = tuple(shrink_mask(word, config.data.seq_len, SEQ_LEN) for word in model.masks)
    return replace(
        model,
        vocab_size=_BYTES + int(config.data.objective == "masked"),  # the mask is one more id
        layers=layers,
        embed=EMBED,
        heads=heads,
        kv_heads=heads // group if model.kv_heads else 0,
        head_dim=HEAD_DIM if model.head_dim else 0,
        mlp=mlp,
        experts=min(model.experts, max(4, 2 * model.experts_per_token)),
        max_seq_len=SEQ_LEN,
        masks=masks,
        scan_layers=False,
    )
