"""A published step as a config of ours on a target, with what is not the same.

The words are MaxText's, in which most of the rows are written; docs/coming_from.md has the same
table for a reader. Nothing here knows a row: what a row says decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.base.config import Config, load_config, override
from jaxpar.base.config.checks import check
from jaxpar.base.errors import UserError, short
from jaxpar.base.hardware import CHIPS
from jaxpar.base.layout.mesh import MESH_AXES
from jaxpar.base.toml import presets, read_tables
from jaxpar.bench.foresight.families import Known, NoFamily, known_model
from jaxpar.bench.foresight.remat import ACTIONS, EVERYTHING, POLICIES, TENSORS, kept_activations
from jaxpar.bench.foresight.rows import PublishedRow
from jaxpar.models.families import FAMILIES, Family
from jaxpar.rehearse.targets import Target, load_target

Changes = dict[str, Any]
"""New values of a config by dotted key."""


class NotBuilt(UserError):
    """A refusal of a row that jaxpar has no step for: a family, a chip or a precision that it
    lacks, or a setting that was not published.
    """


@dataclass(frozen=True)
class Translation:
    """The step of ours that stands for a published one.

    Attributes:
      config: every setting.
      target: where it ran.
      differences: what is not the same, a line each.
    """

    config: Config
    target: Target
    differences: tuple[str, ...]


def translate(row: PublishedRow) -> Translation:
    """Make the config and the target of a published step.

    Raises:
      NotBuilt: there is no such step here; the message says why.
      UserError: a value of the row contradicts another, or is none that is known.
    """
    target = target_of(row)
    differences = list[str]()
    if row.words["config"]:
        config = _own_config(row)
    else:
        config = override(Config(), _changes(row, target, differences))
    try:
        return Translation(check(config), target, tuple(differences))
    except UserError as error:
        raise UserError(f"{row.place}, {row.name}: {error}") from error


def target_of(row: PublishedRow) -> Target:
    """Find the target of a row: its chips, in slices or nodes, of the shape that it says.

    Raises:
      NotBuilt: there is no such chip.
      UserError: no slice has so many chips.
    """
    chip = row.chip.lower()
    chips = row.numbers["chips"]
    slices = row.numbers["slices"] or 1
    if chip not in presets(CHIPS):
        raise NotBuilt(f"no chip {short(row.chip)} is known: there are {', '.join(presets(CHIPS))}")
    if chips % slices:
        raise row.refuse("slices", slices, f"it does not divide the {chips} chips")
    try:
        if load_target(_first_target(chip)).platform == "cuda":
            machine = row.words["machine"]
            return load_target(f"{chip}x{chips}" + (f"@{machine}" if machine else ""))
        several = f"x{slices}" if slices > 1 else ""
        target = load_target(f"{chip}-{chips // slices}{several}")
        shape = row.words["topology_shape"].rpartition(":")[2]
        if shape and shape != target.topology and slices == 1:
            of_shape = load_target(f"{chip}:{shape}")
            if of_shape.hardware.chips != chips:
                raise row.refuse("topology_shape", shape, f"it has not {chips} chips")
            return of_shape
        return target
    except UserError as error:
        raise UserError(f"{row.place}, {row.name}: {error}") from error


def _first_target(chip: str) -> str:
    """The name of a target of this chip that there is, whether it is a GPU or a TPU."""
    for name in (f"{chip}x1", f"{chip}-4"):
        try:
            load_target(name)
        except UserError:
            continue
        return name
    raise NotBuilt(f"no target has the chip {chip}")


def _own_config(row: PublishedRow) -> Config:
    """Make the config of a row of ours: `gpt2_124m train.batch=8`."""
    name, *words = row.words["config"].split()
    changes = Changes()
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise row.refuse("config", word, "write a preset, and key=value for what is changed")
        changes[key] = _value(value)
    try:
        return override(load_config(name), changes)
    except UserError as error:
        raise UserError(f"{row.place}, {row.name}: config: {error}") from error


def _value(text: str) -> Any:
    try:
        return read_tables(f"value = {text}", "")["value"]
    except UserError:
        return text


def _changes(row: PublishedRow, target: Target, differences: list[str]) -> Changes:
    """Collect the settings of a row that is written in MaxText's words; what is not the same is
    added to `differences`.
    """
    keys = row.keys
    _require_precision(row, keys)
    sizes = _sizes(row, keys)
    try:
        known = known_model(row.words["model"], keys, sizes)
    except NoFamily as refused:
        raise NotBuilt(str(refused)) from refused
    differences += known.differences
    family = FAMILIES[known.family]
    changes = _model(row, known, sizes, keys)
    experts = changes.get("model.experts", 0)
    changes |= _mesh(row, target, keys, differences)
    changes |= _batch(row, target, keys)
    changes |= _memory(row, family, experts, keys, differences)
    changes |= _numbers(row, keys, differences)
    changes["kernels.attention"] = _attention(row, differences)
    differences += _unlike(keys, experts)
    return changes


def _require_precision(row: PublishedRow, keys: Mapping[str, str]) -> None:
    quantization = row.words["quantization"] or keys.get("quantization", "")
    if keys.get("int8_training", "").lower() == "true":
        quantization = "int8"
    if quantization.lower() not in ("", "none"):
        raise NotBuilt(f"matmuls in {quantization}: none here are narrower than bfloat16")


# The model.

SIZES = {
    "layers": "base_num_decoder_layers",
    "embed": "base_emb_dim",
    "heads": "base_num_query_heads",
    "kv_heads": "base_num_kv_heads",
    "head_dim": "head_dim",
    "mlp": "base_mlp_dim",
    "vocab": "vocab_size",
    "seq_len": "max_target_length",
}
"""The columns of a model's sizes, and the key that says the same where the column is empty."""


def _sizes(row: PublishedRow, keys: Mapping[str, str]) -> dict[str, int]:
    found = dict[str, int]()
    for column, key in SIZES.items():
        found[column] = row.numbers[column] or _whole(row, keys, key, 0)
        if not found[column] and column not in ("kv_heads", "head_dim"):
            raise row.refuse(column, "", f"write it, or {key} in maxtext_keys")
    return found


def _whole(row: PublishedRow, keys: Mapping[str, str], key: str, otherwise: int) -> int:
    """Read the whole number of a key, -1 or more."""
    text = keys.get(key, str(otherwise))
    try:
        number = float(text)
        whole = int(number)
    except (ValueError, OverflowError):
        number, whole = 0.5, 0
    if whole != number or whole < -1:
        raise row.refuse(f"maxtext_keys, {key}", text, "write a whole number")
    return whole


def _model(
    row: PublishedRow, known: Known, sizes: Mapping[str, int], keys: Mapping[str, str]
) -> Changes:
    positions = sizes["seq_len"]
    if FAMILIES[known.family].positions == "learned":
        positions = max(positions, _whole(row, keys, "trainable_position_size", 0))
    changes: Changes = {
        "model.family": known.family,
        "model.layers": sizes["layers"],
        "model.embed": sizes["embed"],
        "model.heads": sizes["heads"],
        "model.kv_heads": sizes["kv_heads"],
        "model.head_dim": sizes["head_dim"],
        "model.mlp": sizes["mlp"],
        "model.vocab_size": sizes["vocab"],
        "model.max_seq_len": positions,
        "model.tied_head": False,
        "data.seq_len": sizes["seq_len"],
    }
    changes |= known.changes
    if "logits_via_embedding" in keys:
        changes["model.tied_head"] = keys["logits_via_embedding"].lower() == "true"
    if "num_experts" in keys and _whole(row, keys, "num_experts", 0) > 1:
        changes["model.experts"] = _whole(row, keys, "num_experts", 0)
        changes["model.experts_per_token"] = _whole(row, keys, "num_experts_per_tok", 1)
    changes["model.scan_layers"] = keys.get("scan_layers", "true").lower() != "false"
    return changes


# The mesh and the batch.

AXES = {
    "data": "data",
    "fsdp": "fsdp",
    "fsdp_transpose": "fsdp",
    "sequence": "context",
    "context": "context",
    "tensor": "tensor",
    "tensor_sequence": "tensor",
    "tensor_transpose": "tensor",
    "expert": "expert",
    "pipeline": "stage",
}
"""The mesh axes of MaxText, and which of ours each becomes a part of."""
UNLIKE_AXES = {
    "fsdp_transpose": "a second axis splits parameters along their other dim there; here one axis "
    "splits them along embed",
    "sequence": "the sequence is split between the linears there; here in attention too",
    "tensor_transpose": "embed is split over the tensor axis there; here heads and mlp are",
    "context": "keys and values are gathered for context parallelism there; here they go round a "
    "ring",
}
"""What an axis does otherwise, where it has more than one device."""


def _mesh(
    row: PublishedRow, target: Target, keys: Mapping[str, str], differences: list[str]
) -> Changes:
    """Fill in the axes of -1 as MaxText does (fsdp inside a slice and data across them unless
    another is), and put its axes together to ours.
    """
    stated = [key for key in keys if key.endswith("_parallelism")]
    if target.device_count > 1 and not stated:
        raise NotBuilt("its mesh was not published (ici, dcn or maxtext_keys)")
    changes = Changes()
    across = target.slices
    spans_nodes = any(key.startswith("dcn_") and keys[key] != "1" for key in stated)
    if target.platform == "cuda" and row.numbers["slices"] <= 1 and not spans_nodes:
        across = 1  # the mesh was given as one, over all nodes
    inside = target.device_count // across
    for prefix, total, spare in (("ici", inside, "fsdp"), ("dcn", across, "data")):
        sizes = {axis: _whole(row, keys, f"{prefix}_{axis}_parallelism", 1) for axis in AXES}
        given = f"{prefix}_{spare}_parallelism" in keys
        if not given and -1 not in sizes.values():
            sizes[spare] = -1
        _fill(row, prefix, sizes, total)
        for axis in MESH_AXES:
            size = math.prod(sizes[theirs] for theirs, ours in AXES.items() if ours == axis)
            changes[f"mesh.{axis}" if prefix == "ici" else f"mesh.dcn.{axis}"] = size
        for axis, line in UNLIKE_AXES.items():
            if sizes[axis] > 1:
                differences.append(line)
    if changes["mesh.stage"] * changes["mesh.dcn.stage"] > 1:
        microbatches = _whole(row, keys, "num_pipeline_microbatches", -1)
        changes["pipeline.microbatches"] = max(microbatches, 0)
        differences.append("the pipeline's schedule is 1F1B here")
    return changes


def _fill(row: PublishedRow, prefix: str, sizes: dict[str, int], total: int) -> None:
    """Put what is left of `total` devices into the axis of -1, in place."""
    where = "devices of a slice" if prefix == "ici" else "slices"
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    known = math.prod(size for size in sizes.values() if size != -1)
    found = " x ".join(f"{axis}={size}" for axis, size in sizes.items() if size != 1)
    if len(open_axes) > 1 or known < 1 or total % known:
        raise row.refuse(prefix, found, f"it does not split the {total} {where}")
    if open_axes:
        sizes[open_axes[0]] = total // known
    elif known != total:
        raise row.refuse(prefix, found, f"it is not the {total} {where}")


def _batch(row: PublishedRow, target: Target, keys: Mapping[str, str]) -> Changes:
    accumulation = max(_whole(row, keys, "gradient_accumulation_steps", 1), 1)
    batch = row.numbers["global_batch_seqs"]
    of_devices = row.batch * target.device_count
    if not batch:
        batch = int(of_devices * accumulation)
        if batch != of_devices * accumulation or not batch:
            raise row.refuse(
                "per_device_batch_size", row.batch, "it makes no whole number of sequences"
            )
    elif of_devices and batch not in (of_devices, of_devices * accumulation):
        raise row.refuse(
            "global_batch_seqs",
            batch,
            f"per_device_batch_size={row.batch:g} of {target.device_count} devices are "
            f"{of_devices:g}",
        )
    return {"train.batch": batch, "train.accumulation": accumulation}


# What is kept, in which dtypes, by which kernels.


def _memory(
    row: PublishedRow,
    family: Family,
    experts: int,
    keys: Mapping[str, str],
    differences: list[str],
) -> Changes:
    policy = (row.words["remat_policy"] or keys.get("remat_policy", "full")).split("(")[0]
    policy = policy.strip().lower()
    if policy in EVERYTHING:
        return {"memory.policy": "none"}
    if policy not in POLICIES:
        raise row.refuse("remat_policy", policy, f"it is one of none, {', '.join(POLICIES)}")
    tensors = {tensor: keys[tensor] for tensor in TENSORS if tensor in keys}
    for tensor, action in tensors.items():
        if action not in ACTIONS:
            raise row.refuse(f"remat_tensors, {tensor}", action, f"it is one of {list(ACTIONS)}")
    if keys.get("fused_qkv", "").lower() != "true":
        tensors.pop("qkv_proj", None)
    kept = kept_activations(policy, tensors, family.post_norms, family.gated)
    if experts and ("mlpwo" in POLICIES[policy] or "mlpwo" in tensors):
        differences.append("the experts' output is computed again here")
    if "memory.keep.mlp_input" in kept:
        differences.append(
            "attention's last linear is kept there, here the stream that it is added to"
        )
    changes: Changes = {**kept}
    for key, ours in (
        ("optimizer_memory_host_offload", "memory.optimizer"),
        ("parameter_memory_host_offload", "memory.parameters"),
    ):
        if keys.get(key, "").lower() == "true":
            changes[ours] = "offload"
    return changes


def _numbers(row: PublishedRow, keys: Mapping[str, str], differences: list[str]) -> Changes:
    """Collect the dtypes and the optimizer."""
    changes: Changes = {
        "precision.compute": _dtype(row, keys, "dtype", "bfloat16"),
        "precision.params": _dtype(row, keys, "weight_dtype", "float32"),
        "precision.moments": _dtype(row, keys, "mu_dtype", "float32"),
    }
    optimizer = keys.get("opt_type", "adamw").lower()
    if optimizer in ("adamw", "adam_pax", "adam"):
        changes["optimizer.name"] = "adamw"
    elif optimizer in ("sgd", "muon", "adafactor", "lion"):
        changes["optimizer.name"] = optimizer
    else:
        raise NotBuilt(f"no optimizer here is {optimizer}")
    if keys.get("grad_dtype") == "bfloat16":
        differences.append("gradients are summed over devices in bfloat16 there, here in float32")
    return changes


def _dtype(row: PublishedRow, keys: Mapping[str, str], key: str, otherwise: str) -> str:
    found = keys.get(key, otherwise)
    if found in ("", "default"):
        return otherwise
    if found not in ("float32", "bfloat16"):
        raise NotBuilt(f"{key}={short(found)}: jaxpar has float32 and bfloat16")
    return found


def _attention(row: PublishedRow, differences: list[str]) -> str:
    """Choose the kernel: by the definition where theirs has all scores at once, else the library's
    for the chip.
    """
    theirs = row.words["attention"].lower()
    if "dot" in theirs and "product" in theirs:
        differences.append("scores of attention are float32 here")
        return "reference"
    return "auto"


SETTLED = (
    "_parallelism",
    "sa_",
    "tile_",
    "steps",
    "dataset",
    "enable_",
    "log_",
    "learning_rate",
    "output_dir",
    "cost_estimate",
    "allow_split",
)
"""What begins or ends the names of settings that are translated, or that no step shows."""
NAMED = """
model_name per_device_batch_size max_target_length dtype weight_dtype mu_dtype grad_dtype opt_type
remat_policy attention quantization scan_layers hardware use_iota_embed reuse_example_batch
decoder_block mlp_activations logits_via_embedding vocab_size fused_qkv global_parameter_scale scale
int8_training num_experts num_experts_per_tok trainable_position_size capacity_factor
gradient_accumulation_steps num_pipeline_microbatches
optimizer_memory_host_offload parameter_memory_host_offload
"""
"""Settings that are translated, or that no step shows."""


def _unlike(keys: Mapping[str, str], experts: int) -> list[str]:
    """List what MaxText was told beside, of which jaxpar has no like."""
    found = list[str]()
    if any(key.startswith(("sa_", "local_sa_")) for key in keys):
        found.append("the tiles of attention's kernel were chosen by hand there")
    if experts and keys.get("capacity_factor", "-1") not in ("-1", "-1.0"):
        found.append(f"experts drop tokens there (capacity_factor={keys['capacity_factor']})")
    named = {*NAMED.split(), *SIZES.values(), *TENSORS}
    rest = [
        f"{key}={value}"
        for key, value in keys.items()
        if key not in named
        and not any(key.startswith(word) or key.endswith(word) for word in SETTLED)
        and not key.startswith("local_sa_")
    ]
    if rest:
        found.append(f"settings without a like here: {' '.join(rest)}")
    return found
