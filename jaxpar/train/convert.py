"""Converts a Hugging Face checkpoint to a run folder and back."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import jax

from jaxpar.base.config import Config, DataConfig, check
from jaxpar.base.errors import UserError
from jaxpar.base.mesh import MeshSpec
from jaxpar.base.runtime import start
from jaxpar.models import Model
from jaxpar.models.hf import export_hf, import_hf, model_config_from_hf
from jaxpar.train.checkpoint import Checkpoints
from jaxpar.train.plans import make_plan
from jaxpar.train.restore import beside_state, drop_stages, load_run, require_model
from jaxpar.train.run_folder import TOKENIZER, carry_tokenizer, open_run
from jaxpar.train.state import init_state


def config_of(source: Path, target: Path) -> Config:
    """Return a config with the model of a Hugging Face folder, and with its tokenizer as it will lie in the run folder
    `target`. The rest is default and can be overridden. It has no data, which training asks for."""
    model = model_config_from_hf(source)
    seq_len = min(DataConfig.seq_len, model.max_seq_len)
    data = DataConfig(source="text", tokenizer=str(target / TOKENIZER), seq_len=seq_len)
    return Config(model=model, mesh=MeshSpec(data=-1), data=data)


def import_run(config: Config, source: Path, target: Path) -> None:
    """Make a run folder whose checkpoint at step 0 holds the weights of a Hugging Face folder.

    Raises:
      UserError: the config has another model, the target holds another run or has already trained, or the checkpoint
        is bad (see `import_hf`).
    """
    require_model(model_config_from_hf(source), config.model, source)
    plan, model = make_plan(check(config), start(config.mesh, config.compile.cache)), Model(config.model)
    params = import_hf(source, model, drop_stages(plan))
    open_run(target, config)
    checkpoints = Checkpoints(target / "checkpoints", config.checkpoint)
    if checkpoints.latest() is not None:
        raise UserError(f"{target} has checkpoints already: import into a new run folder")
    carry_tokenizer(source, target)
    checkpoints.save(0, init_state(model, config, plan, params), beside_state(plan, config, None, None), None)
    checkpoints.close()


def export_run(config: Config, source: Path, target: Path, step: int, dtype: Literal["float32", "bfloat16"]) -> int:
    """Write a run's checkpoint and its tokenizer as a Hugging Face folder; return the step that was exported."""
    plan, model = drop_stages(make_plan(check(config), start(config.mesh, config.compile.cache))), Model(config.model)
    step, state = load_run(source, step, config, plan)
    export_hf(state.params, model, target, dtype=dtype)
    if jax.process_index() == 0:
        carry_tokenizer(source, target)
    return step
