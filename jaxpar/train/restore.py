"""Loads the weights of any folder on any mesh: a run's, Hugging Face's or PEFT's; and converts one
into the other.
"""

from __future__ import annotations

import time
from collections.abc import Container
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxpar.base.config import (
    Config,
    DataConfig,
    Lora,
    ModelConfig,
    PrecisionConfig,
    TrainConfig,
)
from jaxpar.base.config.optimizer import AdamW, OptimizerConfig
from jaxpar.base.config.sparsity import Sparsity
from jaxpar.base.errors import UserError, read_json, require_kinds, short, with_urls
from jaxpar.base.layout.mesh import MeshSpec
from jaxpar.base.layout.plan import Plan
from jaxpar.base.process.together import number_from_first, run_together, told_by_first
from jaxpar.base.toml import flatten
from jaxpar.data.special_tokens import MODEL_CONFIG, TOKENIZER
from jaxpar.models import AnyModel, Model, Params, in_parts
from jaxpar.models.hf import import_hf, model_config_from_hf, peft
from jaxpar.models.hf.compressed import export_compressed
from jaxpar.models.hf.export import export_hf
from jaxpar.models.hidden import PROJECTIONS
from jaxpar.models.lora import has_old_names, with_new_names, with_old_names
from jaxpar.models.views import base_config, fold_views
from jaxpar.parallel.host_memory import on_device
from jaxpar.parallel.pipeline import stored_order
from jaxpar.train.experiment import Experiment
from jaxpar.train.optimizer import Optimizer
from jaxpar.train.optimizer.given_optimizer import GIVEN
from jaxpar.train.plans import make_experiment, with_projections
from jaxpar.train.runs.bucket_runs import folder_here
from jaxpar.train.runs.checkpoints import Checkpoints, warn
from jaxpar.train.runs.in_use import in_use
from jaxpar.train.runs.manifest import DamagedCheckpoint
from jaxpar.train.runs.own_tokenizer import carry_tokenizer, export_tokenizer, exported_ids
from jaxpar.train.runs.run_folder import (
    compare_run,
    finished_steps,
    is_run,
    keep_config,
    read_run_config,
)
from jaxpar.train.runs.run_identity import require_tokenizer_files, run_identity
from jaxpar.train.runs.run_lock import locked
from jaxpar.train.runs.steps import CHECKPOINTS
from jaxpar.train.runs.training_checkpoints import TrainingCheckpoints
from jaxpar.train.step import (
    TrainState,
    evaluation_params,
    init_state,
    reorder_state,
    state_shapes,
    state_shardings,
)

STEP = "step"
ORDER = "layer_order"
FROZEN = "frozen"
PARTS = "parts"
OPTIMIZER = "optimizer"
OPTIMIZER_FINGERPRINT = "optimizer_fingerprint"
TEACHER = "teacher"
_BESIDE_KINDS = {
    STEP: int | None,
    "iterator": dict[str, Any] | None,
    "training_tokens": int | None,
    ORDER: list[int] | None,
    FROZEN: int | None,
    PARTS: dict[str, str] | None,
    OPTIMIZER: str | None,
    OPTIMIZER_FINGERPRINT: dict[str, str] | None,
    TEACHER: str | None,
}
# What a config may set freely although its weights come from another: how the model runs, not what
# its weights mean.
_FREE = {
    "vocab_multiple",
    "dropout",
    "init_std",
    "scan_layers",
    "max_seq_len",
    *(f"lora.{key}" for key in vars(Lora())),
    *(f"sparsity.{key}" for key in vars(Sparsity())),
}


def load_run(folder: Path, step: int, experiment: Experiment) -> tuple[int, Params]:
    """Load the parameters of a run's checkpoint. The optimizer's state is not read.

    A checkpoint that is damaged is left out, and said, and the one that is chosen without it is
    taken. While it is read it is marked, so that a run that trains beside keeps it; where that
    run has removed it all the same, another is taken.

    Args:
      folder: the run folder.
      step: the step of the checkpoint; 0 = the best, or the newest where none was evaluated.
      experiment: its model, on a plan of any mesh.

    Returns:
      The step, and the parameters on the mesh.

    Raises:
      DamagedCheckpoint: the checkpoint of `step` is damaged, or all are.
      UserError: there is no such checkpoint, or it cannot be read.
    """
    checkpoints = Checkpoints(folder / CHECKPOINTS)
    damaged = set[int]()
    for _ in range(_TRIES):
        chosen = number_from_first(run_together(lambda: _choose(checkpoints, step, damaged)))
        with in_use(folder, chosen):
            problem = _find_damage(checkpoints, chosen)
            if problem is None:
                try:
                    state, _ = restore_state(checkpoints, chosen, experiment, whole=False)
                    return chosen, state.params
                except DamagedCheckpoint as error:
                    # Of several processes all would have to find this.
                    if jax.process_count() > 1:
                        raise
                    problem = error
        if told_by_first(_is_removed(folder, chosen)):
            warn(f"the run in {folder} has removed step {chosen} meanwhile")
        elif step:
            raise problem
        else:
            damaged.add(chosen)
            warn(f"warning: {problem}: it is left out")
    raise UserError(
        f"a run removes the checkpoints of {folder} faster than they are read: try again"
    )


_TRIES = 100
_REMOVAL_SECONDS = 2.0
"""Within this time the files of a step that a run removes are gone."""


def _find_damage(checkpoints: Checkpoints, step: int) -> DamagedCheckpoint | None:
    """Compare a step, and the tokenizer beside the checkpoints, with what was saved. All processes
    find the same.

    Raises:
      UserError: the tokenizer is another.
    """

    def compare() -> DamagedCheckpoint | None:
        if jax.process_index() != 0:
            return None
        try:
            manifest = checkpoints.require_whole(step)
        except DamagedCheckpoint as error:
            return error
        require_tokenizer_files(checkpoints.folder.parent, manifest, warn)
        return None

    problem = run_together(compare)
    if not told_by_first(problem is not None):
        return None
    return problem or DamagedCheckpoint(f"the first process finds step {step} damaged")


def _choose(checkpoints: Checkpoints, step: int, damaged: Container[int]) -> int:
    """Return the step that is asked for, or the best of those that are not damaged, or the newest.

    Raises:
      UserError: there is none.
    """
    steps = checkpoints.steps()
    if step and step not in steps:
        raise UserError(
            f"{checkpoints.folder} has no step {step}: it has {', '.join(map(str, steps))}"
        )
    if step:
        return step
    left = [one for one in steps if one not in damaged]
    if not left:
        what = "checkpoint that is whole" if steps else "finished checkpoint"
        raise UserError(f"{checkpoints.folder} has no {what}")
    best = checkpoints.best(without=damaged)
    return left[-1] if best is None else best


def _is_removed(folder: Path, step: int) -> bool:
    """Whether a checkpoint goes away, as one that a run is removing does soon."""
    until = time.monotonic() + _REMOVAL_SECONDS
    while step in finished_steps(folder):
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True


def restore_state(
    checkpoints: Checkpoints, step: int, experiment: Experiment, whole: bool = True
) -> tuple[TrainState[jax.Array], dict[str, Any]]:
    """Restore the training state of a checkpoint.

    Args:
      checkpoints: those of the run.
      step: that of the checkpoint.
      experiment: the run's model, on a plan of any mesh.
      whole: whether all of the state is read; if not, then its parameters alone.

    Returns:
      The state on the mesh, and what was saved beside it. Parameters that are frozen are loaded
      from `train.init`.

    Raises:
      UserError: the checkpoint or the frozen weights cannot be read, they are of a model of other
        parts, the whole state is of an optimizer that a program gave and here it is the config's
        (or the other way round), or the frozen weights are no longer the run's.
    """
    config = experiment.config
    model = experiment.model
    data = _read_beside(checkpoints, step, config.model.layers)
    place = checkpoints.folder / str(step)
    _require_parts(model, data.get(PARTS) or {}, place)
    if whole:
        _require_optimizer(experiment.optimizer, data.get(OPTIMIZER), place)
    averages = experiment.optimizer.averages(experiment.state.opt_state)
    if not whole and not averages:
        _require_no_average(checkpoints, step)
    state: TrainState[Any] = _restore_trained(
        checkpoints, step, experiment, data, whole or averages
    )
    if whole:
        _require_step(checkpoints, step, int(jax.device_get(state.step)))
    if config.model.lora.rank:
        state = state._replace(params=_with_frozen(experiment, state.params, data))
    if averages and not whole:
        state = TrainState((), evaluation_params(model, state, experiment.optimizer), ())
    return state, data


def _with_frozen(experiment: Experiment, trained: Params, data: dict[str, Any]) -> Params:
    """Return the parameters with those that are frozen beside LoRA, which `train.init` has."""
    config = experiment.config
    model = experiment.model
    source = folder_here(config.train.init)
    frozen = init_state(model, config, experiment.plan, load_params(source, experiment)).params
    if fingerprint(model, frozen) != data.get(FROZEN):
        raise UserError(
            f"{source} has other weights now than those that this run trains LoRA beside: bring "
            "them back"
        )
    return model.merge(frozen, trained)


def _require_no_average(checkpoints: Checkpoints, step: int) -> None:
    """Refuse to evaluate the parameters of an optimizer that averages them, where nobody says how.

    Raises:
      UserError: the state is one of `optax.contrib.schedule_free`.
    """
    for name in checkpoints.names(step):
        if name.startswith("opt_state") and name.endswith("weight_sum"):
            raise UserError(
                f"{checkpoints.folder / str(step)} was trained with a schedule-free optimizer that "
                "is not its config's, and what is to be evaluated is its average: give that "
                "optimizer"
            )


def _read_beside(checkpoints: Checkpoints, step: int, layers: int) -> dict[str, Any]:
    """Return what `beside_state` had saved, or raise a UserError where it is damaged."""
    place = f"what is beside the state of {checkpoints.folder / str(step)}"
    data = require_kinds(checkpoints.data(step), _BESIDE_KINDS, place)
    # None in those of earlier versions
    if data.get(STEP) is not None:
        _require_step(checkpoints, step, data[STEP])
    order = data.get(ORDER)
    if order is None:
        return data
    # -1: uneven stages leave a place empty
    layers_there = sorted(layer for layer in order if layer != -1)
    if layers_there != list(range(layers)):
        raise UserError(
            f"{place}: {ORDER} is not the numbers of {layers} layers, found {short(order)}"
        )
    return data


def _require_step(checkpoints: Checkpoints, step: int, found: int) -> None:
    """Refuse a checkpoint whose folder has been given the name of another step."""
    if found != step:
        raise DamagedCheckpoint(
            f"checkpoint {checkpoints.folder / str(step)} is step {found} under another name"
        )


def _require_parts(model: AnyModel, saved: dict[str, str], place: Path) -> None:
    """Refuse a checkpoint of a model with other parts, whose parameters may have the same names."""
    ours = model.own_parts()
    if saved != ours:
        there, here = (
            ", ".join(f"{part}={name}" for part, name in parts.items()) or "the library's own"
            for parts in (saved, ours)
        )
        raise UserError(
            f"{place} is of a model whose parts are {there}, and here they are {here}: give "
            "make_experiment, or open_trained, the model=Model(config.model, ...) that was trained"
        )


def _require_optimizer(optimizer: Optimizer, saved: str | None, place: Path) -> None:
    """Refuse the state of an optimizer that a program gave for the config's, and the reverse: two
    optimizers may keep arrays of the same form. `saved` is None in checkpoints of earlier versions.
    """
    if saved is None or (saved == GIVEN) == (optimizer.name == GIVEN):
        return
    if saved == GIVEN:
        raise UserError(
            f"{place} was trained with an optimizer that a program gave, and here it is "
            f"optimizer.name={optimizer.name}: give make_experiment the optimizer= that it was "
            "trained with"
        )
    raise UserError(
        f"{place} was trained with optimizer.name={saved}, and here an optimizer is given: leave "
        "out optimizer=, or begin another run with train.init"
    )


def _restore_trained(
    checkpoints: Checkpoints,
    step: int,
    experiment: Experiment,
    data: dict[str, Any],
    whole: bool,
) -> TrainState[Any]:
    """Restore what a checkpoint has; where not the `whole` of it is asked for, step and optimizer
    are empty.
    """
    model = experiment.model
    config = experiment.config
    plan = experiment.plan
    optimizer = experiment.optimizer
    layers = config.model.layers
    renamed = model.config.lora.rank > 0 and has_old_names(checkpoints.names(step))

    def read(shapes: TrainState[jax.ShapeDtypeStruct]) -> TrainState[Any]:
        if renamed:
            return with_new_names(read_as_named(with_old_names(shapes)))
        return read_as_named(shapes)

    def read_as_named(shapes: TrainState[jax.ShapeDtypeStruct]) -> TrainState[Any]:
        if whole:
            return checkpoints.restore(step, shapes)
        return TrainState(
            (), checkpoints.restore(step, {"params": shapes.params}, part=True)["params"], ()
        )

    wanted = stored_order(plan, layers)
    saved = data.get(ORDER)
    if saved == (None if wanted is None else list(wanted)):
        return read(saved_part(experiment.state, model))
    # Layers are read in their saved order, over the stages if possible, and then each stage is sent
    # its own.
    there = tuple(saved or range(layers))
    if len(there) % plan.size("layers") == 0:
        rules = plan.rules
    else:
        rules = replace(plan.rules, layers=(), stage=())
    shapes = state_shapes(model, config, replace(plan, rules=rules), there, optimizer)
    found = read(saved_part(shapes, model))
    shardings = saved_part(state_shardings(model, config, plan, optimizer), model)
    move = partial(reorder_state, before=there, after=wanted, model=model, optimizer=optimizer)
    return jax.jit(
        move, out_shardings=shardings if whole else TrainState((), shardings.params, ())
    )(found)


def saved_part(state: TrainState, model: AnyModel) -> TrainState:
    """Return what a checkpoint has of a state: all but the parameters that are frozen."""
    return state._replace(params=model.trained(state.params))


def fingerprint(model: AnyModel, params: Params) -> int | None:
    """Add up the bits of the frozen parameters, in any layout; None where none is frozen."""
    if not model.config.lora.rank:
        return None
    trained = model.trained(params)["blocks"]
    frozen = params | {
        "blocks": {name: leaf for name, leaf in params["blocks"].items() if name not in trained}
    }
    return sum_of_bits(frozen)


def sum_of_bits(params: Params) -> int:
    """Add up the bits of parameters, in any layout: those of other weights are others."""
    return sum(int(_sum_of_bits(leaf)) for leaf in jax.tree.leaves(params)) % 2**32


@jax.jit
def _sum_of_bits(x: jax.Array) -> jax.Array:
    bits = jax.lax.bitcast_convert_type(on_device(x), f"uint{8 * x.dtype.itemsize}")
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def beside_state(
    experiment: Experiment,
    iterator: Any,
    tokens: int | None,
    frozen: int | None,
    teacher: str | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """Return what is saved beside a state: the data iterator's state, its number of tokens, the
    layers' order, the `fingerprint` of the frozen parameters, the names of parts of one's own, the
    optimizer's name, the fingerprint of one that a program gave, what tells its teacher from
    another, and the step.
    """
    model = experiment.model
    order = stored_order(experiment.plan, model.config.layers)
    return {
        "iterator": iterator,
        "training_tokens": tokens,
        ORDER: order,
        FROZEN: frozen,
        PARTS: model.own_parts(),
        OPTIMIZER: experiment.optimizer.name,
        OPTIMIZER_FINGERPRINT: experiment.optimizer_fingerprint,
        TEACHER: teacher,
        STEP: step,
    }


def model_of(source: Path) -> ModelConfig:
    """Return the model of a run folder, of a Hugging Face folder, or of the folder of a PEFT
    adapter. A UserError says that it is none of these, or that the model is one that is not
    computed here."""
    if is_run(source):
        return read_run_config(source).model
    if not peft.is_adapter(source):
        return model_config_from_hf(source)
    base = base_config(model_of(peft.base_folder(source)))
    return replace(base, lora=peft.lora_of(source, base))


def frozen_folder(source: Path, lora: Lora) -> Path:
    """Return the folder of the weights that stay frozen when LoRA goes on from `source`: where the
    source has the same LoRA, those that it is beside."""
    while lora.rank and model_of(source).lora == lora:
        if peft.is_adapter(source):
            source = peft.base_folder(source)
        else:
            source = folder_here(read_run_config(source).train.init)
    return source.absolute()


def load_params(source: Path, experiment: Experiment, step: int = 0) -> Params:
    """Load the parameters of a model from a folder.

    An adapter of the config's own rank, alpha and targets stays beside its matrices; another is
    merged into them. LoRA that the source does not have begins as PEFT begins it, from
    `train.seed`. Matrices that are as sparse as the config's are read as they are stored; those of
    another form get zeros where they do not multiply.

    Args:
      source: a run folder (see `load_run`), a Hugging Face folder, or that of a PEFT adapter.
      experiment: the model, on any plan.
      step: the checkpoint of a run; 0 = the best, or the newest where none was evaluated.

    Returns:
      The parameters on the plan's mesh, with the model's order of layers, as `init_state` takes
      them.

    Raises:
      UserError: there is no such folder, it is of another model, or its weights cannot be read.
    """
    theirs = model_of(source)
    config = experiment.config
    model = in_parts(experiment.model, f"weights of {source}")
    plan = drop_stages(experiment.plan)
    nonfinite = config.train.allow_nonfinite
    require_model(theirs, config.model, source)
    lora = config.model.lora
    # The projections of a training are its own, and begin anew.
    bare = replace(experiment, plan=plan, model=model.with_projections(None))
    there = _with_views(bare, theirs.lora, theirs.sparsity)
    model_there = in_parts(there.model, f"weights of {source}")
    if is_run(source):
        run = read_run_config(source)  # parameters are read in the dtype in which they were saved
        saved = replace(
            there,
            config=replace(
                there.config, train=run.train, optimizer=run.optimizer, pruning=run.pruning
            ),
            model=with_projections(there.model, run),
            plan=replace(plan, params=run.precision.params, moments=run.precision.moments),
            own_optimizer=None,
        )
        params = load_run(source, step, saved)[1]
        params.pop(PROJECTIONS, None)
    elif peft.is_adapter(source):
        base = load_params(peft.base_folder(source), _with_views(there, Lora(), Sparsity()))
        adapter = peft.import_adapter(source, model_there, plan, nonfinite)
        params = Model.merge(base, adapter)
    else:
        params = import_hf(source, model_there, plan, nonfinite)
    key = jax.random.key(config.train.seed)
    shardings = plan.sharding(model.axes, model.shapes())
    if model.projections is not None:
        own = {PROJECTIONS: shardings[PROJECTIONS]}
        params |= jax.jit(lambda: model.init_projections(key), out_shardings=own)()
    if theirs.lora == lora and theirs.sparsity.keeps_as(config.model.sparsity):
        return params
    params = fold_views(params, model_there)
    if not lora.rank:
        return params
    return Model.merge(
        params,
        jax.jit(lambda: model.trained(model.init(key)), out_shardings=model.trained(shardings))(),
    )


def _with_views(experiment: Experiment, lora: Lora, sparsity: Sparsity) -> Experiment:
    """Return the experiment with the model that has this LoRA, and matrices as sparse."""
    sizes = replace(experiment.config.model, lora=lora, sparsity=sparsity)
    return replace(
        experiment,
        config=replace(experiment.config, model=sizes),
        model=experiment.model.with_config(sizes),
    )


def require_model(theirs: ModelConfig, ours: ModelConfig, source: Path) -> None:
    """Refuse weights of a model other than the config's, with a UserError that says what
    differs.
    """
    there = flatten(theirs)
    here = flatten(ours)
    differing = [key for key in here if here[key] != there[key] and key not in _FREE]
    if differing:
        found = "; ".join(f"{key} is {there[key]} there and {here[key]} here" for key in differing)
        raise UserError(f"{source} is not the model of this config: {found}")


def drop_stages(plan: Plan) -> Plan:
    """Return the plan without stages: layers are in the model's order, as in a file, and each is
    whole on all stages. Its arrays are on the device, where they are read."""
    rules = replace(plan.rules, layers=(), stage=())
    return replace(plan, rules=rules, parameters="device", optimizer="device")


def folder_config(source: Path, target: Path) -> Config:
    """Return a config with the model of a Hugging Face folder or a PEFT adapter, and with the
    tokenizer that lies, or will lie, in the folder `target`. The rest is default and can be
    overridden. It has no data."""
    model = model_of(source)
    seq_len = min(DataConfig.seq_len, model.max_seq_len)
    data = DataConfig(source="text", tokenizer=with_urls(str(target / TOKENIZER)), seq_len=seq_len)
    return Config(model=model, mesh=MeshSpec(data=-1), data=data)


_LONGEST = 8192
"""Tokens of a sequence of a fine-tuning at most, unless asked for: models' contexts are longer than
examples are.
"""


def config_of(source: Path, target: Path, lora: bool = False) -> Config:
    """Return the config of a run that goes on from a Hugging Face folder or a PEFT adapter, as
    fine-tunings are run.

    The rate is 2e-5, as in LLaMA 2's (Touvron et al. 2023, arXiv:2307.09288, section 3.1), and for
    LoRA 2e-4 (Dettmers et al. 2023, arXiv:2305.14314, appendix B). It rises in 3 % of the steps and
    decays to zero; there is no weight decay. Sequences are as long as the model's own, up to 8,192
    tokens. Matmuls are in bfloat16 where the folder's weights are in 16 bits; parameters stay
    float32, since bfloat16 rounds updates of such a rate away.

    Args:
      source: the folder, which `jaxpar.train.restore.import_run` reads.
      target: the run folder, where the tokenizer will lie.
      lora: whether LoRA is asked for; an adapter has it anyway.
    """
    config = folder_config(source, target)
    model = config.model
    train = TrainConfig()
    train = replace(
        train,
        learning_rate=2e-4 if lora or model.lora.rank else 2e-5,
        min_learning_rate_ratio=0.0,
        warmup_steps=3 * train.steps // 100,
    )
    optimizer = OptimizerConfig(adamw=AdamW(beta2=0.999, weight_decay=0.0))
    if _stored_in_16_bits(source):
        compute = "bfloat16"
    else:
        compute = "float32"
    data = replace(config.data, seq_len=min(model.max_seq_len, _LONGEST))
    return replace(
        config,
        train=train,
        optimizer=optimizer,
        data=data,
        precision=PrecisionConfig(compute=compute),
    )


def _stored_in_16_bits(source: Path) -> bool:
    """Whether config.json says that the weights of a folder, or those beside an adapter, are in 16
    bits.
    """
    if peft.is_adapter(source):
        folder = peft.base_folder(source)
    else:
        folder = source
    if is_run(folder):
        return read_run_config(folder).precision.compute == "bfloat16"
    config = read_json(folder / MODEL_CONFIG)
    return config.get("dtype", config.get("torch_dtype")) in ("bfloat16", "float16")


def import_run(config: Config, source: Path, target: Path) -> None:
    """Make a run folder whose checkpoint at step 0 holds the weights of a Hugging Face folder.

    With LoRA, of a PEFT adapter or of the config, it holds LoRA's matrices alone, and `train.init`
    names the folder of the model. A UserError says that the config has another model, that the
    target holds another run or has already trained, or what is wrong with the checkpoint.
    """
    if config.model.lora.rank:
        base = frozen_folder(source, config.model.lora)
        config = replace(config, train=replace(config.train, init=with_urls(str(base))))
    experiment = make_experiment(config)
    require_new_run(target, config)
    keep_import(experiment, load_params(source, experiment), source, target)


def require_new_run(target: Path, config: Config) -> None:
    """Refuse a run folder that has checkpoints, or is that of another experiment.

    Args:
      target: the folder.
      config: the config of the run that it is to be.

    Raises:
      UserError: it is no new run.
    """
    if finished_steps(target):
        raise UserError(f"{target} has checkpoints already: import into a new run folder")
    compare_run(target, config)


def keep_import(experiment: Experiment, params: Params, source: Path, target: Path) -> None:
    """Write a run folder whose checkpoint at step 0 holds parameters, with the tokenizer of the
    folder that they come from.

    Args:
      experiment: that of the new run.
      params: with the model's order of layers.
      source: the folder that they come from.
      target: the run folder.
    """
    model = experiment.model
    config = experiment.config
    state = init_state(model, config, experiment.plan, params)
    with locked(target, warn) as lock:
        keep_config(target, config)
        if jax.process_index() == 0:
            adapter = peft.is_adapter(source)
            if adapter:
                carry_tokenizer(peft.base_folder(source), target)
            carry_tokenizer(source, target, keep=adapter)
        identity = run_identity(target, ())
        checkpoints = TrainingCheckpoints(
            target / CHECKPOINTS, config.checkpoint, identity, warn, lock.require
        )
        beside = beside_state(experiment, None, None, fingerprint(model, state.params), step=0)
        checkpoints.save(0, saved_part(state, model), beside, None)
        checkpoints.close()


def export_run(
    config: Config,
    source: Path,
    target: Path,
    step: int,
    dtype: Literal["float32", "bfloat16"],
    adapter: bool = False,
    compressed: bool = False,
) -> int:
    """Write a run's checkpoint and its tokenizer as a Hugging Face folder; return the step that was
    exported.

    LoRA's matrices are merged into the others, or as an `adapter` they are all that is written, in
    PEFT's form. Sparse matrices are written with their zeros, or `compressed`.
    """
    if adapter and not config.model.lora.rank:
        raise UserError(
            f"--adapter: {source} was trained without LoRA, so it has none: leave it out"
        )
    experiment = make_experiment(config, training=False)
    experiment = replace(experiment, plan=drop_stages(experiment.plan))
    model = in_parts(experiment.model, "an export")
    step, params = load_run(source, step, experiment)
    if adapter:
        base = frozen_folder(folder_here(config.train.init), config.model.lora)
        peft.export_adapter(params, model, target, with_urls(str(base)))
    elif compressed:
        export_compressed(params, model, target, dtype)
    else:
        export_hf(
            params, model, target, dtype=dtype, token_ids=exported_ids(source, config.data.bos)
        )
    if jax.process_index() == 0:
        export_tokenizer(source, target, config.data)
    return step
