"""What `diagnose` needs to explain wrong gradients, computed only when there are some.

Contributions of shards and microbatches are reference gradients with the labels of all other tokens left out: the loss
is a sum over tokens, so they add up to the whole. (Where a mesh axis splits the sequence, the tokens of a shard are
those whose *loss* lies there. Before the last attention that is not what the shard contributes, and the hypothesis does
not fit; copies that differ still tell. Nor do a router's own losses stop at tokens that do not count.)

Shapes: B batch, S sequence.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxpar.base.plan import Plan
from jaxpar.base.sharding import Placement, placements
from jaxpar.models import Params
from jaxpar.parallel.zigzag import chunk_order, inverse, reordered
from jaxpar.train.state import param_shapes
from jaxpar.verify.copies import copies_by_axis
from jaxpar.verify.losses_and_gradients import Answer, Case, Rows, in_model_order, one_device, parameter_order
from jaxpar.verify.mistakes import Contribution, Evidence, Finding, diagnose
from jaxpar.verify.reference_ops import ReferenceOps

Reference = Callable[[Params, Rows], Answer]
_TABLE, _HEAD = "embed.tokens", "head.table"


class Wrong(NamedTuple):
    """A parameter whose gradient differs.

    Attributes:
      name: the parameter.
      layers: the layers that differ, or None where it is not stacked.
      finding: how.
    """

    name: str
    layers: tuple[int, ...] | None
    finding: Finding


def explain(
    case: Case, tolerances: dict[str, float], loss_ok: bool, got: Answer, want: Answer, one: Reference,
    say: Callable[[str], None],
) -> list[Wrong]:  # fmt: skip
    """How each wrong gradient differs, in the order of the model.

    Args:
      case: what was run.
      tolerances: the parameters that differ, and the root mean square that a layer may be off by.
      loss_ok: whether the loss agrees; if so nothing that changes the forward pass is tried.
      got, want: the answer under the plan, and the float32 reference.
      one: the reference, to be run on other batches: `one(params, batch)`.
      say: called with a line as each phase begins.
    """
    plan = case.plan("float32")
    parts = _parts(case, plan, one, say)
    altered: dict[tuple[str, str], Answer] = {}
    stacked = {placement.name for placement in _placements(case, plan) if placement.axes[0] == "layers"}
    found = []
    for name in parameter_order(case.model):
        if name not in tolerances:
            continue
        evidence = _evidence(case, plan, name, got, want, parts)
        layers = None
        if name in stacked:
            off = [_off(*arrays) for arrays in zip(evidence.got, evidence.want, strict=True)]
            layers = tuple(layer for layer, rms in enumerate(off) if not rms <= tolerances[name])
        finding = _diagnose(evidence, layers)
        if not loss_ok and not finding.fits:
            if not altered:
                say("differs: the loss does too, so other attention masks are tried")
                altered = dict(_altered(case, one))
            values = {key: answer.grads[name][0] for key, answer in altered.items()}
            finding = _diagnose(dataclasses.replace(evidence, altered=values), layers)
        if name == _TABLE and case.config.model.tied_head and (not finding.fits or finding.kind == "copies"):
            finding = _diagnose_uses(case, plan, evidence, say) or finding
        found.append(Wrong(name, layers, finding))
    return found


def _evidence(
    case: Case, plan: Plan, name: str, got: Answer, want: Answer, parts: Sequence[tuple[str, str, Answer]]
) -> Evidence:
    """What is known of one parameter before any other model is run."""
    wanted, layers = want.grads[name][0], case.model.config.layers
    by_axis = copies_by_axis(got.arrays[name], plan.mesh)
    axes = next(placement.axes for placement in _placements(case, plan) if placement.name == name)
    sizes = {axis: size for axis, size in plan.mesh.shape.items() if size > 1}
    return Evidence(
        got=max(got.grads[name], key=lambda copy: _off(copy, wanted)),
        want=wanted,
        sizes=sizes | _other_sizes(case, plan),
        split=[plan.mesh_axes(axis) for axis in axes],
        axis_sizes=sizes,
        parts=[Contribution(label, kind, answer.grads[name][0]) for label, kind, answer in parts],
        copies={axis: in_model_order(name, found, plan, layers) for axis, found in by_axis.items()},
    )


def _parts(case: Case, plan: Plan, one: Reference, say: Callable[[str], None]) -> list[tuple[str, str, Answer]]:
    """Name, kind and reference gradients of each shard and microbatch by itself."""
    groups = list(_groups(case, plan))
    say(f"differs: the gradients of {len(groups)} shards and microbatches by themselves")
    return [(name, kind, one(case.params, _only(case.batch, chosen))) for name, kind, chosen in groups]


def _diagnose_uses(case: Case, plan: Plan, evidence: Evidence, say: Callable[[str], None]) -> Finding | None:
    """A tied table's gradient is the sum of two, as embedding and as output head: is one of them wrong, and how?

    A model with a head of its own, equal to the embedding, gives the two apart.
    """
    say("differs: the tied table's two uses apart")
    model = dataclasses.replace(case.config.model, tied_head=False)
    params = case.params | {"head": case.params["head"] | {"table": case.params["embed"]["tokens"]}}
    untied = dataclasses.replace(case, params=params)
    one = one_device(untied, "float32", exact=True, model=model)
    whole, parts = one(params, case.batch), _parts(untied, plan, one, lambda line: None)
    names = {_TABLE: "embedding", _HEAD: "output head"}
    for name, use in names.items():
        (other,) = names.keys() - {name}
        rest = whole.grads[other][0]
        finding = diagnose(
            dataclasses.replace(
                evidence,
                got=evidence.got - rest,
                want=whole.grads[name][0],
                parts=[Contribution(label, kind, answer.grads[name][0]) for label, kind, answer in parts],
                altered={},
                copies={axis: copies - rest for axis, copies in evidence.copies.items()},
            )
        )
        if finding.fits and finding.kind != "copies":
            return finding._replace(says=f"{finding.says} (of its use as {use}; the other is right)")
    return None


def nearest_to_loss(wrong: list[Wrong]) -> str:
    """The wrong gradient that a backward pass meets first: what is wrong there is passed on to the others."""
    parts = ("embed", "blocks", "head")

    def place(at: int) -> tuple[int, int, int]:
        return parts.index(wrong[at].name.split(".")[0]), max(wrong[at].layers or [0]), at

    last = wrong[max(range(len(wrong)), key=place)]
    return last.name + (f" of layer {max(last.layers)}" if last.layers else "")


def _diagnose(evidence: Evidence, layers: tuple[int, ...] | None) -> Finding:
    """Of a stacked parameter only the layers that differ are diagnosed, and the finding names them if not all do.

    Where nothing fits them together the last is tried alone: a mistake there is passed on to those before it.
    """
    if not layers:
        return diagnose(evidence)
    together = diagnose(_of_layers(evidence, layers))
    if together.fits or len(layers) == 1:
        if len(layers) == len(evidence.want):
            return together
        only = f"layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}"
        return together._replace(says=f"{together.says} (in {only} only)")
    last = diagnose(_of_layers(evidence, layers[-1:]))
    if not last.fits:
        return together
    return last._replace(says=f"{last.says} (in layer {layers[-1]}; those before it differ otherwise)")


def _of_layers(evidence: Evidence, layers: tuple[int, ...]) -> Evidence:
    pick = np.asarray(layers)
    return dataclasses.replace(
        evidence,
        got=evidence.got[pick],
        want=evidence.want[pick],
        parts=[part._replace(value=part.value[pick]) for part in evidence.parts],
        altered={key: value[pick] for key, value in evidence.altered.items()},
        copies={axis: value[:, pick] for axis, value in evidence.copies.items()},
    )


def _placements(case: Case, plan: Plan) -> list[Placement]:
    return placements(param_shapes(case.model, plan), case.model.axes, plan)


def _off(got: np.ndarray, want: np.ndarray) -> float:
    """Root mean square of the difference; infinite for NaN."""
    rms = float(np.sqrt(np.mean(np.square(got.astype(np.float64) - want))))
    return rms if math.isfinite(rms) else math.inf


def _other_sizes(case: Case, plan: Plan) -> dict[str, int]:
    """Numbers besides the mesh axes that a gradient may be wrong by."""
    model, train = case.config.model, case.config.train
    sizes = {
        "accumulation": train.accumulation,
        "microbatches": plan.pipeline.microbatches if plan.size("stage") > 1 else 1,
        "query heads per kv head": model.heads // (model.kv_heads or model.heads),
        "tokens that count": int(np.sum(case.batch["labels"] >= 0)),
    }
    return {name: size for name, size in sizes.items() if size > 1}


def _groups(case: Case, plan: Plan) -> Iterator[tuple[str, str, np.ndarray]]:
    """Name and kind (see `Part`) of each shard and microbatch, and a mask [B, S] of its tokens."""
    shape, accumulation = case.batch["tokens"].shape, case.config.train.accumulation
    held = plan.sharding(("batch", "seq")).devices_indices_map(shape)

    def tokens_of(devices: np.ndarray) -> np.ndarray:
        mask = np.zeros(shape, bool)
        for device in devices.ravel():
            mask[held[device]] = True
        return np.asarray(reordered(jnp.asarray(mask), inverse(chunk_order(plan, plan.context.strategy)), 1))

    together = (*plan.mesh_axes("batch"), *plan.mesh_axes("seq"))
    for axis in together:
        for at in range(plan.mesh.shape[axis]):
            yield (
                f"shard {at} of {axis}",
                "sum",
                tokens_of(plan.mesh.devices.take(at, plan.mesh.axis_names.index(axis))),
            )
    if len(together) > 1:
        alone = {device.id: tokens_of(np.asarray([device])) for device in plan.mesh.devices.ravel()}
        different = {mask.tobytes(): mask for mask in alone.values()}
        for at, mask in enumerate(different.values()):
            yield f"shard {at} of {' x '.join(together)}", "sum", mask
    rows = np.broadcast_to(np.arange(shape[0])[:, None], shape)
    # As `step.gradients` deals them out, and of what is left a pipeline.
    piped = plan.pipeline.microbatches if plan.size("stage") > 1 else 1
    for at in range(piped if piped > 1 else 0):
        yield f"microbatch {at} of the pipeline", "microbatch", rows // accumulation % piped == at
    for at in range(accumulation if accumulation > 1 else 0):
        yield f"microbatch {at}", "microbatch", rows % accumulation == at
        yield f"microbatch {at} (of consecutive rows)", "microbatch", rows // (shape[0] // accumulation) == at


def _only(batch: Rows, chosen: np.ndarray) -> Rows:
    """The batch with the labels of all other tokens left out."""
    return batch | {"labels": np.where(chosen, batch["labels"], -1).astype(np.int32)}


def _altered(case: Case, one: Reference) -> Iterator[tuple[tuple[str, str], Answer]]:
    """What the reference would give with another attention mask, by kind and description."""
    if "segments" in case.batch:
        for name, what in (
            ("segments", "a token sees the documents packed before its own"),
            ("positions", "positions do not restart with each document"),
        ):
            yield ("documents", what), one(case.params, {key: rows for key, rows in case.batch.items() if key != name})
    for offset, blind, what in (
        (1, "mean", "a token sees the one after it"),
        (-1, "mean", "a token does not see itself and the first sees all"),
        (-1, "zero", "a token does not see itself and the first sees none"),
    ):
        ops = partial(ReferenceOps, offset=offset, blind=blind)
        yield ("mask", what), one_device(case, "float32", exact=True, ops=ops)(case.params, case.batch)
