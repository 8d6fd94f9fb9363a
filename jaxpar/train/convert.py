"""Converts a Hugging Face checkpoint, or an adapter of PEFT, to a run folder and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import jax

from jaxpar.base.config import Config, DataConfig, check
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.runtime import start
from jaxpar.models import Model, peft
from jaxpar.models.hf_export import export_hf
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.plans import make_plan
from jaxpar.train.restore import (
    beside_state,
    drop_stages,
    fingerprint,
    frozen_folder,
    load_params,
    load_run,
    model_of,
    saved_part,
)
from jaxpar.train.run_folder import TOKENIZER, carry_tokenizer, open_run
from jaxpar.train.state import init_state


def config_of(source: Path, target: Path) -> Config:
    """Return a config with the model of a Hugging Face folder or a PEFT adapter, and with its tokenizer as it will lie
    in the run folder `target`. The rest is default and can be overridden. It has no data, which training asks for."""
    model = model_of(source)
    seq_len = min(DataConfig.seq_len, model.max_seq_len)
    data = DataConfig(source="text", tokenizer=str(target / TOKENIZER), seq_len=seq_len)
    return Config(model=model, mesh=MeshSpec(data=-1), data=data)


def import_run(config: Config, source: Path, target: Path) -> None:
    """Make a run folder whose checkpoint at step 0 holds the weights of a Hugging Face folder.

    With LoRA, of a PEFT adapter or of the config, it holds LoRA's matrices alone, and `train.init` names the folder of
    the model.

    Raises:
      UserError: the config has another model, the target holds another run or has already trained, or the checkpoint
        is bad (see `import_hf`).
    """
    if config.model.lora.rank:
        base = frozen_folder(source, config.model.lora)
        config = replace(config, train=replace(config.train, init=str(base)))
    plan, model = make_plan(check(config), start(config.mesh)), Model(config.model)
    state = init_state(model, config, plan, load_params(source, config, plan))
    open_run(target, config)
    checkpoints = Checkpoints(target / "checkpoints", config.checkpoint)
    if checkpoints.latest() is not None:
        raise UserError(f"{target} has checkpoints already: import into a new run folder")
    for folder in (*([peft.base_folder(source)] if peft.is_adapter(source) else []), source):
        carry_tokenizer(folder, target)
    beside = beside_state(plan, config, None, None, fingerprint(model, state.params))
    checkpoints.save(0, saved_part(state, model), beside, None)
    checkpoints.close()


def export_run(
    config: Config, source: Path, target: Path, step: int, dtype: Literal["float32", "bfloat16"], adapter: bool = False
) -> int:
    """Write a run's checkpoint and its tokenizer as a Hugging Face folder; return the step that was exported.

    LoRA's matrices are merged into the others, or as an `adapter` they are all that is written, in PEFT's form.
    """
    if adapter and not config.model.lora.rank:
        raise UserError(f"--adapter: {source} was trained without LoRA, so it has none: leave it out")
    plan, model = drop_stages(make_plan(check(config), start(config.mesh))), Model(config.model)
    step, params = load_run(source, step, config, plan)
    if adapter:
        base = frozen_folder(Path(config.train.init), config.model.lora)
        peft.export_adapter(params, model, target, str(base))
    else:
        export_hf(params, model, target, dtype=dtype)
    if jax.process_index() == 0:
        carry_tokenizer(source, target)
    return step
