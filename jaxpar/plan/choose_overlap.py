"""The choice of `overlap auto`: each form of a block's collective matmuls is tried, and the fastest
kept.

A few blocks, forward and backward, are compiled in one form after another. For a target that is not
here their timeline counts, on the devices at hand their time. One site after another takes the form
that is fastest there while the others stay as they are, and at the end the block is tried on two
halves of the batch, or of each sequence. The closed forms do not tell forms apart, so that all are
tried (`jaxpar.plan.engine.rounds`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.base.compiled_for import compiling_for
from jaxpar.base.compiler import step_options
from jaxpar.base.errors import Say
from jaxpar.base.layout.plan import Overlap
from jaxpar.models import Model, Params, in_parts
from jaxpar.parallel.collectives import further_split
from jaxpar.parallel.domino import Places
from jaxpar.parallel.linear import GATHERED, STORED
from jaxpar.parallel.linear.ring_matmul import ring_forms
from jaxpar.parallel.zigzag import TOKENS
from jaxpar.plan.engine import one_by_one, try_rounds
from jaxpar.rehearse.targets import Target
from jaxpar.rehearse.timeline import simulate
from jaxpar.train.experiment import Experiment
from jaxpar.train.experiments import sequences_have_halves, with_config
from jaxpar.train.step import gradient_axes

LAYERS = 4
"""The number of blocks in the program that is tried: a block's collectives also hide behind its
neighbours.
"""
SITES = ("mlp_scatter", "heads_scatter", "mlp_gather", "heads_gather")
_CALLS = 10  # the number of timed calls where devices are at hand

BlockArguments = tuple[Params, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]


def choose_overlap(
    experiment: Experiment,
    target: Target | None = None,
    say: Say = lambda line: None,
) -> Experiment:
    """Replace every `auto` in an experiment's overlap by what is found fastest.

    Args:
      experiment: its plan is on the devices of the target, if there is one.
      target: the target whose compiler says how long a form takes; None = the devices are at hand,
        and timed.
      say: is called with a line for each form that is tried.

    Returns:
      The experiment with that overlap; the one given where nothing was open.

    Raises:
      UserError: the compiler refuses an option, or the mesh does not divide what a form splits.
    """
    config = experiment.config
    if not config.overlap.is_open:
        return experiment
    if experiment.model.has_blocks:
        overlap = _fastest(time_forms(experiment, target, say))
    else:
        overlap = config.overlap.without_auto()
    say(f"overlap auto: {words(overlap)}")
    return with_config(experiment, dataclasses.replace(config, overlap=overlap))


def time_forms(
    experiment: Experiment, target: Target | None, say: Say = lambda line: None
) -> dict[Overlap, float]:
    """Try forms on the way to the best, and return the seconds of a block, forward and backward, in
    each.

    What is open in the config's overlap is tried. The forms come in the order of the trials; the
    first is `xla` wherever it may be chosen.

    Args:
      experiment: its plan is on the devices of the target, if there is one.
      target: the target whose compiler says how long a form takes; None = the devices are at hand,
        and timed.
      say: is called with a line for each form that is tried.
    """
    seconds: dict[Overlap, float] = {}

    def attempt(overlap: Overlap) -> float:
        formed = dataclasses.replace(experiment.plan, overlap=overlap)
        took = trial(dataclasses.replace(experiment, plan=formed), target)
        say(f"overlap auto: {words(overlap)}: {1e3 * took:.2f} ms a block")
        return took

    return try_rounds(_rounds(experiment, seconds), one_by_one(attempt), seconds)


def _rounds(experiment: Experiment, seconds: Mapping[Overlap, float]) -> Iterator[list[Overlap]]:
    """Yield the forms to try: those of one site after another, and then those of Domino.

    Args:
      seconds: what was tried, by which the next ones are chosen.
    """
    config = experiment.config
    plan = experiment.plan
    first = config.overlap.without_auto()
    yield [first]
    asked = vars(config.overlap)
    rings = bool(further_split(STORED, GATHERED, plan))
    for site in SITES if rings else ():
        if asked[site] == "same" and asked[site.rpartition("_")[2]] == "auto":
            best = _fastest(seconds)
            yield [dataclasses.replace(best, **{site: form}) for form in ring_forms()]
    rows = experiment.sequences // plan.size("batch")
    if config.overlap.domino == "auto" and config.model.dropout == 0:
        domino = dataclasses.replace(first, domino="on").for_rows(rows).domino
        if domino == "on" or sequences_have_halves(experiment):
            yield [dataclasses.replace(one, domino=domino) for one in (first, _fastest(seconds))]


def _fastest(seconds: Mapping[Overlap, float]) -> Overlap:
    return min(seconds, key=lambda overlap: seconds[overlap])


def words(overlap: Overlap) -> str:
    """Write the forms in one line: `mlp_scatter bidirectional, else xla`.

    Args:
      overlap: forms, none of which is `auto`.
    """
    gather = overlap.gather
    scatter = overlap.scatter
    if scatter == gather:
        common = gather
    else:
        common = f"gather {gather}, scatter {scatter}"
    sites = [
        f"{site} {getattr(overlap, site)}" for site in SITES if getattr(overlap, site) != "same"
    ]
    text = ", ".join([*sites, f"else {common}"] if sites else [common])
    if overlap.domino == "on":
        return f"domino, {text}"
    if overlap.cuts_sequence:
        return f"domino on halves of a sequence, {text}"
    return text


def trial(experiment: Experiment, target: Target | None) -> float:
    """Measure the seconds of a block, forward and backward, in the plan's form: played for a
    target, or timed on devices.

    Args:
      experiment: its plan has the form.
      target: the target whose compiler says how long it takes; None = it is timed, on all
        processes, and the first one's seconds are returned.
    """
    sizes = experiment.config.model
    layers = min(LAYERS, sizes.layers)
    few = in_parts(experiment.model, "overlap auto").with_config(
        dataclasses.replace(sizes, layers=layers, dropout=0.0)
    )
    platforms = None if target is None else (target.platform,)
    with compiling_for(experiment.plan.mesh.devices.flat[0]):
        traced, arguments = _blocks(few, experiment)
        lowered = traced.lower(lowering_platforms=platforms)
    compiled = lowered.compile()
    if target is None:
        seconds = _time(compiled, arguments) / layers
        return float(multihost_utils.broadcast_one_to_all(np.float64(seconds)))
    text = compiled.as_text() or ""
    return simulate(text, experiment.plan.mesh, target).seconds / layers


def _blocks(model: Model, experiment: Experiment) -> tuple[jax.stages.Traced, BlockArguments]:
    """Trace the gradient of a stack of blocks, and return it with its arguments' ShapeDtypeStructs:
    parameters, x, positions, dx.
    """
    config = experiment.config
    plan = experiment.plan
    shapes = model.shapes()
    rows = experiment.sequences
    if plan.size("stage") > 1:  # each stage runs them on the same microbatch
        plan = dataclasses.replace(
            plan,
            rules=dataclasses.replace(plan.rules, layers=(), stage=()),
        )
    places = plan.sharding(model.axes, shapes)["blocks"]
    params = jax.tree.map(
        lambda leaf, place: leaf.update(sharding=place),
        shapes["blocks"],
        places,
    )
    S = config.data.seq_len
    D = config.model.embed
    x_BSD = jax.ShapeDtypeStruct(
        (rows, S, D),
        plan.dtype,
        sharding=plan.sharding(STORED),
    )
    positions_BS = jax.ShapeDtypeStruct(
        (rows, S),
        jnp.int32,
        sharding=plan.sharding(TOKENS),
    )
    axes = gradient_axes(model)["blocks"]

    def gradient(
        params: Params, x_BSD: jax.Array, positions_BS: jax.Array, dx_BSD: jax.Array
    ) -> tuple[Params, jax.Array]:
        trained = model.trained({"blocks": params})["blocks"]
        _, pull = jax.vjp(
            lambda part, x: model.blocks(params | part, x, Places(positions_BS), plan)[0],
            trained,
            x_BSD,
        )
        return pull(dx_BSD)

    jitted = jax.jit(
        gradient,
        out_shardings=(
            plan.sharding(axes, model.trained(shapes)["blocks"]),
            plan.sharding(STORED),
        ),
        compiler_options=step_options(plan.mesh, config.compiler.options),
    )
    arguments = (params, x_BSD, positions_BS, x_BSD)
    return jitted.trace(*arguments), arguments


def _time(compiled: jax.stages.Compiled, arguments: BlockArguments) -> float:
    """Time a call: the median of some, in seconds."""

    def ones(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.jit(lambda: jnp.ones(leaf.shape, leaf.dtype), out_shardings=leaf.sharding)()

    arrays = jax.tree.map(ones, arguments)
    seconds = []
    for _ in range(2 + _CALLS):
        began = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds[2:]))
