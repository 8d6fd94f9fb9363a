"""Settings without an effect: each that may have none is a case here, and only what the user gave is
refused.
"""

from pathlib import Path
from typing import Any

import pytest

from jaxpar.base.config import RESOLVED, Config, load_config, override
from jaxpar.base.config.unused_settings import idle_keys
from jaxpar.base.errors import UserError
from jaxpar.base.field_marks import Idle, marks_of
from jaxpar.base.toml import flatten, presets, to_toml
from jaxpar.cli.arguments import config_args
from jaxpar.cli.commands import TrainArgs

# Another value of a key, what makes it idle, and what makes it matter.
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "data.path": ("a.txt", {}, {"data.source": "text"}),
    "data.mixture": (("a.txt 1",), {}, {"data.source": "text"}),
    "data.column": ("body", {"data.source": "arrayrecord"}, {"data.source": "parquet"}),
    "data.streaming": (True, {"data.source": "parquet"}, {"data.source": "hf"}),
    "data.shuffle_window": (9, {"data.source": "hf"}, {"data.streaming": True}),
    "data.seed": (9, {"data.source": "parquet"}, {"data.shuffle_window": 9}),
    "data.loss_on": ("all", {"data.source": "text"}, {"data.source": "chat"}),
    "data.template_args": (("a=1",), {"data.source": "text"}, {"data.source": "chat"}),
    "data.template_date": ("2026-01-31", {"data.source": "text"}, {"data.source": "chat"}),
    "data.stride": (1, {"data.source": "chat"}, {"data.source": "tokens"}),
    "data.mask_rate": (0.3, {"data.objective": "next"}, {"data.objective": "masked"}),
    "data.mask_whole_words": (True, {"data.objective": "next"}, {"data.objective": "masked"}),
    "data.mask_token": (9, {"data.objective": "next"}, {"data.objective": "masked"}),
    "train.spike_window": (9, {}, {"train.on_spike": "stop"}),
    "train.spike_deviations": (9.0, {}, {"train.on_spike": "stop"}),
    "train.max_bad_in_a_row": (9, {"train.on_spike": "stop"}, {"train.on_nonfinite": "skip"}),
    "train.max_bad_steps": (9, {}, {"train.on_spike": "rollback"}),
    "checkpoint.local_every": (10, {}, {"checkpoint.local": "fast"}),
    "checkpoint.local": ("fast", {"checkpoint.every": 50}, {"checkpoint.every": 0}),
    "mesh.join_seconds": (10, {}, {"mesh.distributed": True}),
    "train.check_replicas": (10, {}, {"mesh.data": 2}),
    "data.max_bytes": (1, {"data.source": "text"}, {"data.source": "stdlib"}),
    "data.tokenizer": ("chars", {"data.source": "tokens"}, {"data.tokenizer": "a.json"}),
    "data.bos": (True, {"data.tokenizer": "bytes"}, {"data.tokenizer": "a.json"}),
    "data.val_fraction": (0.2, {"data.val_path": "b.txt"}, {"data.val_path": ""}),
    "train.eval_every": (5, {"data.val_fraction": 0.0}, {"data.val_path": "b.txt"}),
    "train.eval_batches": (5, {"data.val_fraction": 0.0}, {"data.val_fraction": 0.1}),
    "train.final_eval_batches": (5, {"data.val_fraction": 0.0}, {"data.val_fraction": 0.1}),
    "train.min_learning_rate_ratio": (
        0.0,
        {"train.schedule": "constant"},
        {"train.schedule": "cosine"},
    ),
    "train.decay_steps": (5, {"train.schedule": "constant"}, {"train.schedule": "wsd"}),
    "train.label_smoothing": (
        0.1,
        {"distill.teacher": "runs/a", "distill.alpha": 1.0},
        {"distill.teacher": ""},
    ),
    "distill.step": (5, {}, {"distill.teacher": "runs/a"}),
    "distill.alpha": (0.1, {}, {"distill.teacher": "runs/a"}),
    "distill.temperature": (2.0, {}, {"distill.teacher": "runs/a"}),
    "distill.top_k": (5, {}, {"distill.teacher": "runs/a"}),
    "distill.hidden": (["last"], {}, {"distill.teacher": "runs/a", "distill.hidden_width": 8}),
    "distill.hidden_width": (
        8,
        {"distill.teacher": "runs/a"},
        {"distill.teacher": "runs/a", "distill.hidden": ["last"]},
    ),
    "distill.hidden_weight": (
        2.0,
        {"distill.teacher": "runs/a"},
        {
            "distill.teacher": "runs/a",
            "distill.hidden": ["last"],
            "distill.hidden_width": 8,
        },
    ),
    "distill.mesh.data": (2, {}, {"distill.teacher": "runs/a"}),
    "distill.mesh.fsdp": (2, {}, {"distill.teacher": "runs/a"}),
    "distill.mesh.context": (2, {}, {"distill.teacher": "runs/a"}),
    "distill.mesh.expert": (2, {}, {"distill.teacher": "runs/a"}),
    "distill.mesh.tensor": (2, {}, {"distill.teacher": "runs/a"}),
    "model.lora.alpha": (8.0, {}, {"model.lora.rank": 4}),
    "model.lora.targets": (["q"], {}, {"model.lora.rank": 4}),
    "model.sparsity.targets": (["q"], {}, {"model.sparsity.form": "2:4"}),
    "model.sparsity.block": ((2, 2), {}, {"model.sparsity.form": "2:4"}),
    "model.sparsity.pattern": ("cyclic", {}, {"model.sparsity.form": "2:4"}),
    "model.sparsity.decay": (0.1, {}, {"model.sparsity.form": "2:4"}),
    **{
        f"pruning.{key}": (value, {}, {"pruning.method": "rigl"})
        for key, value in {
            "sparsity": 0.5,
            "distribution": "erdos_renyi",
            "sparsity_by_depth": (0.5,),
            "targets": ["q"],
            "begin": 1,
            "end": 9,
            "every": 2,
            "regrow": 0.1,
        }.items()
    },
    "train.seed": (1, {"train.init": "runs/a"}, {"model.dropout": 0.1}),
    "model.init_std": (0.1, {"train.init": "runs/a"}, {"train.init": ""}),
    "model.experts_per_token": (1, {}, {"model.experts": 4}),
    "model.shared_experts": (1, {}, {"model.experts": 4}),
    "model.router": ("expert_choice", {}, {"model.experts": 4}),
    "train.balance_loss": (0.1, {}, {"model.experts": 4}),
    "train.router_z_loss": (0.1, {}, {"model.experts": 4}),
    "rules.experts": (("expert", "tensor"), {}, {"model.experts": 4}),
    "model.rope_low_freq_factor": (2.0, {}, {"model.rope_factor": 8.0}),
    "model.rope_high_freq_factor": (2.0, {}, {"model.rope_factor": 8.0}),
    "model.rope_original_seq_len": (2, {}, {"model.rope_factor": 8.0}),
    "model.rope_scaling": ("linear", {}, {"model.rope_factor": 8.0}),
    "model.rope_local_theta": (100.0, {}, {"model.masks": ("window(9)", "causal")}),
    "overlap.gather": ("ring", {"mesh.context": 2}, {"mesh.tensor": 2}),
    "overlap.scatter": ("auto", {}, {"mesh.tensor": -1}),
    "overlap.heads_gather": ("ring", {}, {"mesh.dcn.tensor": 2}),
    "overlap.heads_scatter": ("ring", {}, {"mesh.tensor": 2}),
    "overlap.mlp_gather": ("ring", {}, {"mesh.fsdp": 2, "rules.residual_seq": ("fsdp",)}),
    "overlap.mlp_scatter": ("ring", {}, {"mesh.tensor": 2}),
    # more devices than the four heads
    "context.strategy": ("ulysses", {"mesh.tensor": 4}, {"mesh.tensor": 8}),
    "pipeline.schedule": ("gpipe", {}, {"mesh.stage": 2}),
    "pipeline.microbatches": (4, {}, {"mesh.dcn.stage": 2}),
    "pipeline.virtual": (2, {}, {"mesh.data": 2, "rules.stage": ("data",)}),
    "pipeline.layers": ((1, 3), {}, {"mesh.stage": -1}),
    "pipeline.stash": ("stage", {}, {"mesh.stage": 2}),
    "memory.policy": ("full", {"memory.budget": "auto"}, {"memory.budget": ""}),
    "memory.keep.up": ("save", {"memory.budget": "auto"}, {"memory.budget": ""}),
    "memory.may": ((), {}, {"memory.budget": "1GiB"}),
    "memory.offload_anyway": (True, {}, {"memory.keep.block_input": "offload"}),
    "precision.gradients": ("bfloat16", {}, {"train.accumulation": 2}),
    "memory.optimizer": (
        "offload",
        {"optimizer.name": "sgd", "optimizer.sgd.momentum": 0.0},
        {"optimizer.sgd.momentum": 0.9},
    ),
}


def another(value: Any) -> Any:
    """Another value of a setting of an optimizer, in its range."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else value / 2 + 0.01


OWN = "optimizer.own"
"""Of optimizers that a program registers: tests/strangers/test_own_optimizer.py."""
SETTINGS = {
    key: value
    for key, value in flatten(Config()).items()
    if key.startswith("optimizer.") and key not in ("optimizer.name", OWN)
}
CASES |= {
    key: (
        another(value),
        {"optimizer.name": "lion" if ".adam" in key else "adam"},
        {"optimizer.name": key.split(".")[1]},
    )
    for key, value in SETTINGS.items()
}


@pytest.mark.parametrize("key", CASES)
def test_a_key_is_idle_until_what_makes_it_matter(key: str) -> None:
    value, off, on = CASES[key]
    config = override(Config(), {key: value} | off)
    assert key in dict(idle_keys(config))
    assert key not in dict(idle_keys(override(config, on)))


@pytest.mark.parametrize(
    "off", [{"data.source": "hf"}, {"data.mixture": ["a.txt 1"], "data.source": "text"}]
)
def test_nothing_of_documents_or_a_mixture_is_held_out(off: dict[str, Any]) -> None:
    idle = dict(
        idle_keys(override(Config(), {"data.val_fraction": 0.2, "train.eval_every": 5} | off))
    )
    assert "give data.val_path" in idle["data.val_fraction"] and "train.eval_every" in idle
    with_path = {"data.path": "b.txt", "data.mixture": ["a.txt 1"], "data.source": "text"}
    assert "data.path" in dict(idle_keys(override(Config(), with_path)))


def test_every_setting_that_may_have_no_effect_is_a_case() -> None:
    keep = {key for key in flatten(Config()) if key.startswith("memory.keep.")}
    assert marks_of(Config, Idle).keys() - keep - {OWN} == CASES.keys() - keep
    assert not dict(idle_keys(Config()))


def parsed(*words: str) -> Config:
    return config_args("jaxpar train CONFIG", TrainArgs, list(words))[1].config


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "tiny --train.schedule constant --train.min-learning-rate 1e-5",
            "train.min_learning_rate_ratio has no effect",
        ),
        ("tiny --data.path nowhere.txt", "data.path has no effect: data.source is stdlib"),
        ("tiny --data.path=nowhere.txt", "add --data.source text, or tokens"),
        (
            "tiny --pipeline.microbatches 4",
            "pipeline.microbatches has no effect: mesh.stage is 1, no pipeline: add",
        ),
        ("llama3_8b --memory.budget 6GiB --memory.policy full", "memory.budget finds what to keep"),
        (
            "llama3_8b --on h100x8 --overlap.mlp-gather ring",
            "overlap.mlp_gather has no effect",
        ),
    ],
)
def test_a_flag_without_an_effect_is_refused(words: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parsed(*words.split())


@pytest.mark.parametrize("preset", presets("jaxpar.configs"))
def test_a_preset_may_hold_what_a_flag_or_a_mesh_switches_off(preset: str) -> None:
    one = [
        word
        for axis in ("data", "fsdp", "context", "tensor", "stage")
        for word in (f"--mesh.{axis}", "1")
    ]
    assert parsed(preset, "--on", "h100x8").mesh.platform == "gpu"
    alone = parsed(
        preset,
        *one,
        "--data.source",
        "stdlib",
        "--train.schedule",
        "constant",
        "--pipeline.virtual",
        "1",
    )
    assert (alone.mesh.stage, alone.pipeline.virtual) == (1, 1)


def test_of_a_file_what_never_had_an_effect_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[mesh]\nstage = 4\n[pipeline]\nmicrobatches = 8\nvirtual = 1\n[memory.keep]\nup = "save"\n'
    )
    assert parsed(str(file), "--mesh.stage", "1").pipeline.microbatches == 8
    assert parsed(str(file), "--on", "cpu_8").pipeline.microbatches == 8
    file.write_text("[pipeline]\nmicrobatches = 8\n")
    assert parsed(str(file), "--mesh.stage", "4").mesh.stage == 4
    with pytest.raises(
        UserError, match=r"mine\.toml: pipeline\.microbatches has no effect: mesh\.stage is 1"
    ):
        parsed(str(file))


def test_the_config_of_a_run_holds_every_key(tmp_path: Path) -> None:
    """Values for another layout too."""
    config = override(load_config("tiny"), {"pipeline.microbatches": 8, "data.path": "a.txt"})
    (tmp_path / "config.toml").write_text(to_toml(config, RESOLVED))
    assert parsed(str(tmp_path)) == config
