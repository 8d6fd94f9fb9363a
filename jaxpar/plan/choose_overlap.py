"""`overlap auto` tries each form of a block's collective matmuls and keeps the fastest.

A few blocks, forward and backward, are compiled in one form after another. For a target that is not here their timeline
counts, on the devices at hand their time. One site after another takes the form that is fastest there while the others
stay as they are, and at the end the block is tried on two halves of the batch. Choices are kept by shape, axis size and
chip.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.config import Config
from jaxpar.base.errors import UserError
from jaxpar.base.jax_compat import compiler_options
from jaxpar.base.plan import Form, Overlap, Plan
from jaxpar.base.runtime import cache_folder, compiler_flags, versions, write_whole
from jaxpar.base.toml import from_dict
from jaxpar.models import Model, Params
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.parallel.token_order import TOKENS
from jaxpar.rehearse.simulate import simulate
from jaxpar.rehearse.targets import Target
from jaxpar.train.plans import make_plan
from jaxpar.train.state import gradient_axes

LAYERS = 4
"""The number of blocks in the program that is tried: a block's collectives also hide behind its neighbours."""
SITES = ("mlp_scatter", "heads_scatter", "mlp_gather", "heads_gather")
_CALLS = 10  # the number of timed calls where devices are at hand

Say = Callable[[str], None]
BlockArguments = tuple[Params, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


class Trial(NamedTuple):
    """The forms that were tried, and the seconds of one block in them, forward and backward."""

    overlap: Overlap
    seconds: float


def is_open(overlap: Overlap) -> bool:
    """Whether something is left to choose."""
    return "auto" in vars(overlap).values()


def choose_overlap(config: Config, target: Target | None = None, say: Say = lambda line: None) -> Config:
    """Replace every `auto` in a config's overlap by what was found fastest, now or on an earlier day.

    Args:
      config: an experiment whose mesh fits the target.
      target: the target to choose for; None = the devices at hand, which are timed.
      say: is called with a line for each form that is tried.
    """
    if not is_open(config.overlap):
        return config
    plan = open_plan(config, None if target is None else target.devices())
    key = _key(config, plan, target)
    overlap = _choice_of_first_process(_parse_choice(_read_choices().get(key)))
    if overlap is None:
        overlap = fastest_trial(time_forms(config, plan, target, say)).overlap
        _keep(key, overlap, say)
    say(f"overlap auto: {words(overlap)}")
    return dataclasses.replace(config, overlap=overlap)


def open_plan(config: Config, devices: list[jax.Device] | None = None) -> Plan:
    """Call `make_plan` with the open forms settled: its checks may trace a block, which needs every form."""
    plan = make_plan(dataclasses.replace(config, overlap=without_auto(config.overlap)), devices)
    return dataclasses.replace(plan, overlap=config.overlap)


def time_forms(config: Config, plan: Plan, target: Target | None, say: Say = lambda line: None) -> list[Trial]:
    """Try forms on the way to the best and return all in that order; the first is `xla` wherever it may be chosen.

    Args:
      config: the experiment; what is open in its overlap is tried.
      plan: the plan of the config.
      target: as for `choose_overlap`.
      say: is called with a line for each trial.
    """
    trials: list[Trial] = []

    def take(overlap: Overlap) -> Trial:
        found = next((trial for trial in trials if trial.overlap == overlap), None)
        if found is None:
            found = trial(config, dataclasses.replace(plan, overlap=overlap), target)
            trials.append(found)
            say(f"overlap auto: {words(overlap)}: {1e3 * found.seconds:.2f} ms a block")
        return found

    fastest = take(without_auto(config.overlap))
    for candidates in _steps(config, plan):
        for change in candidates:
            fastest = fastest_trial([fastest, take(dataclasses.replace(fastest.overlap, **change))])
    if config.overlap.domino == "auto" and _can_halve(config, plan):
        take(dataclasses.replace(trials[0].overlap, domino="on"))
        take(dataclasses.replace(fastest.overlap, domino="on"))
    return trials


def fastest_trial(trials: Sequence[Trial]) -> Trial:
    """The trial that takes the fewest seconds."""
    return min(trials, key=lambda trial: trial.seconds)


def _steps(config: Config, plan: Plan) -> Iterator[list[dict[str, Form]]]:
    """The changes to try for each site that is open; there are none where no ring can run."""
    if not further_split(STORED, GATHERED, plan):
        return
    for site in SITES:
        move = site.rpartition("_")[2]
        if getattr(config.overlap, site) == "same" and getattr(config.overlap, move) == "auto":
            yield [{site: "ring"}, {site: "bidirectional"}]


def without_auto(overlap: Overlap) -> Overlap:
    """Replace `auto` by `xla` and by no Domino, from which the search starts."""
    return dataclasses.replace(
        overlap,
        gather="xla" if overlap.gather == "auto" else overlap.gather,
        scatter="xla" if overlap.scatter == "auto" else overlap.scatter,
        domino="off" if overlap.domino == "auto" else overlap.domino,
    )


def _can_halve(config: Config, plan: Plan) -> bool:
    """Whether Domino can run at all."""
    rows = config.train.batch // config.train.accumulation // plan.size("batch")
    return rows % 2 == 0 and config.model.dropout == 0


def words(overlap: Overlap) -> str:
    """Write the forms in one line: `mlp_scatter bidirectional, else xla`."""
    common = overlap.gather
    if overlap.scatter != overlap.gather:
        common = f"gather {overlap.gather}, scatter {overlap.scatter}"
    sites = [f"{site} {getattr(overlap, site)}" for site in SITES if getattr(overlap, site) != "same"]
    text = ", ".join([*sites, f"else {common}"] if sites else [common])
    return f"domino, {text}" if overlap.domino == "on" else text


# One trial.


def trial(config: Config, plan: Plan, target: Target | None) -> Trial:
    """Try some blocks, forward and backward, in the plan's form: played for a target, or timed on its devices."""
    layers = min(LAYERS, config.model.layers)
    model = Model(dataclasses.replace(config.model, layers=layers, dropout=0.0))
    traced, arguments = _blocks(model, config, plan)
    if target is None:
        seconds = _time(traced.lower().compile(), arguments) / layers
        return Trial(plan.overlap, float(multihost_utils.broadcast_one_to_all(np.float64(seconds))))
    compiled = traced.lower(lowering_platforms=(target.platform,)).compile()
    return Trial(plan.overlap, simulate(compiled.as_text() or "", plan.mesh, target).timeline.seconds / layers)


def _blocks(model: Model, config: Config, plan: Plan) -> tuple[jax.stages.Traced, BlockArguments]:
    """The traced gradient of a stack of blocks, and its arguments' ShapeDtypeStructs: parameters, x, positions, dx."""
    shapes, rows = model.shapes(), config.train.batch // config.train.accumulation
    if plan.size("stage") > 1:  # each stage runs them on the same microbatch
        plan, rows = (
            dataclasses.replace(plan, rules=dataclasses.replace(plan.rules, layers=(), stage=())),
            rows // plan.pipeline.microbatches,
        )
    params = jax.tree.map(
        lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place),
        shapes["blocks"],
        plan.sharding(model.axes, shapes)["blocks"],
    )
    S, D = config.data.seq_len, config.model.embed
    x_BSD = jax.ShapeDtypeStruct((rows, S, D), plan.dtype, sharding=plan.sharding(STORED))
    positions_BS = jax.ShapeDtypeStruct((rows, S), jnp.int32, sharding=plan.sharding(TOKENS))
    axes = gradient_axes(model)["blocks"]

    def gradient(
        params: Params, x_BSD: jax.Array, positions_BS: jax.Array, dx_BSD: jax.Array
    ) -> tuple[Params, jax.Array]:
        trained = model.trained({"blocks": params})["blocks"]
        _, pull = jax.vjp(lambda part, x: model.blocks(params | part, x, positions_BS, None, plan)[0], trained, x_BSD)
        return pull(dx_BSD)

    jitted = jax.jit(
        gradient,
        out_shardings=(plan.sharding(axes, model.trained(shapes)["blocks"]), plan.sharding(STORED)),
        compiler_options=compiler_options(plan.mesh),
    )
    arguments = (params, x_BSD, positions_BS, x_BSD)
    return jitted.trace(*arguments), arguments


def _time(compiled: jax.stages.Compiled, arguments: BlockArguments) -> float:
    """The median of the seconds that a call takes."""

    def ones(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.jit(lambda: jnp.ones(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()

    arrays = jax.tree.map(ones, arguments)
    seconds = []
    for _ in range(2 + _CALLS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[2:]))


# What was chosen before.


def _key(config: Config, plan: Plan, target: Target | None) -> str:
    """The key made of everything that a choice depends on."""
    model = dataclasses.asdict(config.model) | {"layers": 0, "vocab_size": 0, "vocab_multiple": 0, "max_seq_len": 0}
    # The key has the whole plan, so that fields added one day are in it too; its overlap is the one that was asked for.
    how = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan) if field.name != "mesh"}
    facts = {
        "chip": target.name if target else plan.mesh.devices.flat[0].device_kind,
        "mesh": {axis: size for axis, size in plan.mesh.shape.items() if size > 1},
        "plan": how, "model": model,
        "rows": config.train.batch // config.train.accumulation, "seq_len": config.data.seq_len,
        "versions": versions(), "flags": compiler_flags() | compiler_options(plan.mesh),
    }  # fmt: skip
    return json.dumps(facts, sort_keys=True, default=dataclasses.asdict)


def _choices_file() -> Path:
    return cache_folder() / "overlap.json"


def _read_choices() -> dict[str, object]:
    """Read the earlier choices; there are none if the file is unreadable, which costs a search and loses nothing."""
    try:
        kept = json.loads(_choices_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _parse_choice(kept: object) -> Overlap | None:
    """Read a kept choice, or return None if it cannot be run, as another version may have written it."""
    try:
        overlap = from_dict(Overlap, kept, str(_choices_file())) if isinstance(kept, dict) else None
    except (UserError, TypeError):
        return None
    return None if overlap is None or is_open(overlap) else overlap


def _choice_of_first_process(kept: Overlap | None) -> Overlap | None:
    """The choice that the first process has kept: each has its own cache, but all must run the same program."""
    text = np.zeros(1024, np.uint8)
    found = json.dumps(None if kept is None else dataclasses.asdict(kept)).encode()
    text[: len(found)] = np.frombuffer(found, np.uint8)
    first = json.loads(np.asarray(multihost_utils.broadcast_one_to_all(text)).tobytes().rstrip(b"\0"))
    return None if first is None else Overlap(**first)


def _keep(key: str, overlap: Overlap, say: Say) -> None:
    if jax.process_index():
        return
    try:
        write_whole(_choices_file(), json.dumps(_read_choices() | {key: dataclasses.asdict(overlap)}, indent=1))
    except OSError as error:
        say(f"cannot remember this in {_choices_file()} ({error.strerror}): it will be searched for again next time")
