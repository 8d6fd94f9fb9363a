"""A trained model from the folder of a run or of Hugging Face, loaded to be used on the devices at
hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from jaxpar.base.config import Config, ModelConfig
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import has_bfloat16
from jaxpar.base.layout.mesh import MeshSpec, make_mesh
from jaxpar.base.layout.plan import Plan
from jaxpar.base.process.runtime import start
from jaxpar.data.chat.answers import ConversationWriter, open_writer
from jaxpar.data.vocabulary.special_tokens import TOKENIZER
from jaxpar.data.vocabulary.tokenizer import BytesTokenizer, Tokenizer, load_tokenizer
from jaxpar.models import Model
from jaxpar.models.hf import peft
from jaxpar.models.views import base_config
from jaxpar.train.experiment import Experiment
from jaxpar.train.generation.generator import Generator, decode_plan
from jaxpar.train.restore import adapters_of, folder_config, load_params
from jaxpar.train.runs.bucket import folder_here
from jaxpar.train.runs.folder.run_folder import is_run, read_run_config

Dtype = Literal["auto", "float32", "bfloat16"]


class Trained(NamedTuple):
    """A model that is ready to generate; `folder` has the files that say how its tokens are read;
    `tokenizer` may be None.
    """

    folder: Path
    config: Config
    generator: Generator
    tokenizer: Tokenizer | None

    def writer(self) -> ConversationWriter:
        """Open the folder's chat template, with the config's names and date for it; a UserError
        where there is none, or it cannot be opened with these.
        """
        data = self.config.data
        return open_writer(self.folder / TOKENIZER, data.template_args, data.template_date)


def open_trained(
    folder: str | Path,
    mesh: MeshSpec | None = None,
    dtype: Dtype = "auto",
    step: int = 0,
    template_args: Sequence[str] = (),
    template_date: str = "",
    model: Model | None = None,
) -> Trained:
    """Load the model of a folder, ready to generate.

    Args:
      folder: a run folder, a folder with a Hugging Face checkpoint, or a folder with an adapter of
        PEFT, or the URL of one in a bucket. LoRA is merged.
      mesh: the mesh, or only its platform; `decode_mesh` chooses the axes where none is given.
      dtype: the compute dtype. `auto` is a run's own; for Hugging Face float32 on CPUs and on GPUs
        that have no bfloat16 (a T4), and bfloat16 elsewhere.
      step: the checkpoint of a run; 0 = the best, or the newest where none was evaluated.
      template_args: the names that the chat template reads besides messages, as
        `data.template_args`; the names of a run stand before them.
      model: the model, where it has parts of a program's own; its sizes are the folder's.
      template_date: the date that the chat template writes as today's, as in 2026-01-31; empty =
        today's, for a run too.

    Raises:
      UserError: the folder is neither, its checkpoint or tokenizer cannot be read, its tokenizer
        has more tokens than the model, the run's objective is not the next token, or the mesh does
        not fit.
    """
    folder = folder_here(folder)
    try:
        config = check(read_config(folder), training=False)
    except UserError as error:
        raise error if str(folder) in str(error) else UserError(f"{folder}: {error}") from error
    if step and not is_run(folder):
        raise UserError(
            f"--step has no effect: {folder} is no run folder, so it has one checkpoint"
        )
    if config.data.objective == "masked":
        raise UserError(
            f"{folder} was trained with data.objective=masked, to say what corrupted tokens were "
            "and not what follows: it does not generate, `jaxpar eval` gives its loss"
        )
    data = replace(
        config.data,
        template_args=(*config.data.template_args, *template_args),
        template_date=template_date,
    )
    config = replace(config, model=base_config(config.model), data=data)
    words = _words_folder(folder)
    tokenizer = folder_tokenizer(words, config)
    if model is None:
        model = Model(config.model)
    elif not model.has_blocks:
        raise UserError(
            f"{model.config.family} has no cache of keys and values: a whole model of one's own "
            "generates by its own means (jaxpar.train.restore.load_run reads its parameters)"
        )
    else:
        model = model.with_config(config.model)
    mesh = mesh or MeshSpec()
    devices = start(mesh)
    if replace(mesh, platform="auto", distributed=False) == MeshSpec():
        found = decode_mesh(config.model, len(devices))
        mesh = replace(mesh, data=found.data, tensor=found.tensor)
    if mesh.context > 1:
        raise UserError(
            f"mesh.context={mesh.context} splits sequences, and here none is split: use mesh.data"
        )
    if dtype == "auto":
        half = not is_run(folder) and devices[0].platform != "cpu" and has_bfloat16(devices[0])
        if half:
            dtype = "bfloat16"
        else:
            dtype = config.precision.compute
    plan = decode_plan(
        Plan(make_mesh(mesh, devices), config.rules, compute=dtype, params=dtype), config.model
    )
    experiment = Experiment(replace(config, mesh=mesh), model, plan)
    params = load_params(folder, experiment, step)
    return Trained(words, config, Generator(model, params, plan, consume=True), tokenizer)


def read_config(folder: Path) -> Config:
    """Read the config of a run, or make one with the model and the tokenizer of a Hugging Face
    folder; a UserError where the folder is neither.
    """
    if is_run(folder):
        return read_run_config(folder)
    names = ("config.json", peft.CONFIG)
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        raise UserError(
            f"{folder} has neither config.toml, as a run folder, nor config.json, as one of "
            "Hugging Face"
        )
    return folder_config(folder, _words_folder(folder))


def _words_folder(folder: Path) -> Path:
    """Find the folder that has the tokenizer: for an adapter without one, the folder of its base
    model.
    """
    folders = adapters_of(folder)
    return next((there for there in folders if (there / TOKENIZER).exists()), folders[-1])


def decode_mesh(model: ModelConfig, devices: int) -> MeshSpec:
    """Choose a mesh: as many devices along tensor as divide heads, kv heads and the MLP, and the
    rest along data.
    """
    sizes = (devices, model.heads, model.kv_head_count, model.mlp, model.vocab_multiple)
    tensor = max(n for n in range(1, devices + 1) if all(size % n == 0 for size in sizes))
    return MeshSpec(data=devices // tensor, tensor=tensor)


def folder_tokenizer(folder: Path, config: Config) -> Tokenizer | None:
    """Load the tokenizer of a folder; a UserError where it cannot be read, or has more tokens than
    the model.
    """
    if not (folder / TOKENIZER).exists():
        if is_run(folder) and config.data.tokenizer == "bytes":
            return BytesTokenizer()
        return None
    tokenizer = load_tokenizer(folder / TOKENIZER, config.model.vocab_size, config.data.bos)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{folder / TOKENIZER} has {tokenizer.vocab_size} tokens, and the model "
            f"{config.model.vocab_size}: it is "
            "another model's, so take the file that came with this one"
        )
    return tokenizer


def require_tokenizer(trained: Trained) -> Tokenizer:
    """Return the tokenizer of a model; a UserError where there is none."""
    if trained.tokenizer is None:
        raise UserError(
            f"{trained.folder} has no {TOKENIZER}, which turns text into token ids: put it there"
        )
    return trained.tokenizer
