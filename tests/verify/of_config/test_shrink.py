"""The small model keeps what matters of the large one, and the small mesh every axis of the
large one.
"""

from __future__ import annotations

import math
from typing import Any

import pytest

from jaxpar.base.config import Config, load_config, override, rules_of
from jaxpar.base.errors import UserError
from jaxpar.base.hardware import load_mesh_preset
from jaxpar.base.layout.mesh import DcnSpec, MeshSpec, devices_needed, total_sizes
from jaxpar.base.layout.plan import Context
from jaxpar.base.toml import flatten, presets
from jaxpar.models.masks import reach
from jaxpar.verify.of_config.setup import fit_mesh, mesh_note, simulated_devices
from jaxpar.verify.of_config.shrink import shrink
from jaxpar.verify.of_config.shrink_rules import LEAST, RULES, Least
from jaxpar.verify.of_config.sizes import asked_sizes, odd_multiple, pieces


def sizes(mesh: MeshSpec | None) -> dict[str, int]:
    """The axes above 1, slices included."""
    assert mesh is not None
    return {axis: size for axis, size in total_sizes(mesh).items() if size > 1}


FITS = [
    (
        MeshSpec(fsdp=4, tensor=2),
        8,
        {"fsdp": 4, "tensor": 2},
    ),
    (MeshSpec(fsdp=3), 8, {"fsdp": 3}),
    (
        MeshSpec(data=-1, tensor=2),
        8,
        {"data": 4, "tensor": 2},
    ),
    (MeshSpec(data=-1), 1, {}),
    (
        MeshSpec(fsdp=16, tensor=4),
        8,
        {"fsdp": 4, "tensor": 2},
    ),
    (
        MeshSpec(fsdp=16, tensor=4),
        4,
        {"fsdp": 2, "tensor": 2},
    ),
    (MeshSpec(fsdp=256), 8, {"fsdp": 8}),
    (
        MeshSpec(data=3, fsdp=3),
        8,
        {"data": 2, "fsdp": 2},
    ),
    (
        MeshSpec(data=-1, fsdp=16),
        8,
        {"data": 4, "fsdp": 2},
    ),
    (
        MeshSpec(fsdp=16, dcn=DcnSpec(data=4)),
        8,
        {"fsdp": 4, "data": 2},
    ),
    (
        MeshSpec(fsdp=16, tensor=2, dcn=DcnSpec(fsdp=4)),
        8,
        {"fsdp": 4, "tensor": 2},
    ),
    (
        MeshSpec(stage=2, data=2, fsdp=2, tensor=2),
        16,
        {"stage": 2, "data": 2, "fsdp": 2, "tensor": 2},
    ),
]


@pytest.mark.parametrize(("mesh", "devices", "want"), FITS)
def test_a_mesh_is_kept_or_made_smaller_along_each_axis(
    mesh: MeshSpec, devices: int, want: dict[str, int]
) -> None:
    fitted = fit_mesh(mesh, devices)
    assert sizes(fitted) == want
    assert fitted is not None
    assert devices_needed(fitted) <= devices
    assert -1 not in vars(fitted).values()


def test_slices_of_a_mesh_made_smaller_are_part_of_their_axis() -> None:
    folded = fit_mesh(MeshSpec(fsdp=16, dcn=DcnSpec(fsdp=4)), 2)
    assert folded is not None
    assert (folded.dcn, folded.fsdp) == (DcnSpec(), 2)


def test_too_few_devices_for_two_along_each_axis_is_none() -> None:
    assert fit_mesh(MeshSpec(fsdp=16, tensor=4), 2) is None
    assert fit_mesh(MeshSpec(fsdp=16), 1) is None


def test_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(UserError, match=r"mesh\.data is 0"):
        fit_mesh(MeshSpec(data=0), 8)
    with pytest.raises(UserError, match="what is left"):
        fit_mesh(MeshSpec(data=-1, fsdp=-1), 8)


@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        (MeshSpec(), 1),
        (MeshSpec(fsdp=4), 4),
        (MeshSpec(fsdp=16), 16),
        (MeshSpec(fsdp=32), 8),
        (MeshSpec(fsdp=-1), 8),
        (MeshSpec(fsdp=-1, tensor=8), 16),
        (MeshSpec(stage=4, data=4, fsdp=4, tensor=4), 16),
        (
            MeshSpec(stage=4, data=4, fsdp=4, context=4, tensor=4),
            32,
        ),
        (
            MeshSpec(
                stage=4,
                data=4,
                fsdp=4,
                context=4,
                expert=4,
                tensor=4,
            ),
            64,
        ),
    ],
)
def test_enough_devices_are_simulated(mesh: MeshSpec, count: int) -> None:
    assert simulated_devices(mesh) == count
    fitted = fit_mesh(mesh, count)
    assert fitted is not None
    assert {
        axis for axis, size in vars(mesh).items() if axis != "dcn" and size in (-1, 4, 8, 16, 32)
    } == set(sizes(fitted))


def test_a_smaller_mesh_is_said_loudly() -> None:
    asked = MeshSpec(fsdp=16, tensor=4)
    assert mesh_note(asked, MeshSpec(fsdp=4, tensor=2), 8).startswith(
        "SMALLER MESH: fsdp=16 x tensor=4 needs 64 devices and 8 are here, so this verifies "
        "fsdp=4 x tensor=2"
    )
    assert mesh_note(MeshSpec(fsdp=-1), MeshSpec(fsdp=8), 8) == "mesh fsdp=-1 is fsdp=8 here"
    assert mesh_note(MeshSpec(fsdp=8), MeshSpec(fsdp=8), 8) == ""


@pytest.mark.parametrize("name", presets("jaxpar.configs"))
@pytest.mark.parametrize(
    "mesh",
    [
        MeshSpec(fsdp=4, tensor=2),
        MeshSpec(tensor=8),
        MeshSpec(data=2, context=2, tensor=2),
    ],
)
def test_every_preset_shrinks_to_what_its_mesh_divides(name: str, mesh: MeshSpec) -> None:
    config = load_config(name)
    small, note = shrink(config, mesh)
    model = small.model
    whole = config.model
    split = total_sizes(mesh)

    def divides(axis: Any, size: int) -> bool:
        return size % pieces(axis, small.rules, split) == 0

    kv_heads = model.kv_heads or model.heads
    assert (
        divides("heads", model.heads)
        and divides("kv_heads", kv_heads)
        and divides("mlp", model.mlp)
    )
    assert divides("embed", model.embed) and divides("seq", small.data.seq_len)
    assert divides("residual_seq", small.data.seq_len) and divides("vocab", model.vocab_multiple)
    assert divides("experts", model.experts) and model.experts <= whole.experts
    assert divides("batch", small.train.batch // small.train.accumulation)
    assert model.heads // kv_heads == whole.heads // (whole.kv_heads or whole.heads)
    assert abs(model.mlp / model.embed / (whole.mlp / whole.embed) - 1) < 0.3
    assert model.embed < 400
    assert (model.vocab_size % model.vocab_multiple == 0) == (
        whole.vocab_size % whole.vocab_multiple == 0
    )
    kept = ("family", "tied_head", "norm_eps", "rope_theta", "rope_factor", "scan_layers")
    assert [getattr(model, key) for key in kept] == [getattr(whole, key) for key in kept]
    assert (small.rules, small.memory, small.precision, small.mesh) == (
        config.rules,
        config.memory,
        config.precision,
        mesh,
    )
    # whole groups of several kinds of layers, and what is left over
    layers = {"gemma2_9b": 6, "gemma3_1b": 5, "modernbert_base": 7}.get(name, 2)
    assert (model.layers, small.train.accumulation) == (layers, min(config.train.accumulation, 4))
    assert (small.train.steps, small.data.source) == (Config().train.steps, Config().data.source)
    assert note.startswith("model shrunk: model.")


def test_the_table_of_rules_has_every_setting_that_becomes_small() -> None:
    named = [rule.setting for rule in RULES]
    assert len(set(named)) == len(named)
    assert set(named) <= set(flatten(Config()))
    reset = ("data.", "train.", "mesh.", "checkpoint.", "metrics.")
    for name in presets("jaxpar.configs"):
        config = load_config(name)
        after = flatten(shrink(config, MeshSpec(stage=2, tensor=2))[0])
        changed = {key for key, value in flatten(config).items() if after[key] != value}
        assert {key for key in changed if not key.startswith(reset)} <= set(named)


# Heads and kv heads on tensor devices, then on those that are here.
FEW_HEADS = [
    ((8, 2), 8, 8, (8, 2)),
    ((4, 4), 8, 8, (2, 2)),
    ((4, 1), 8, 8, (4, 1)),
    ((6, 3), 4, 4, (6, 3)),
    ((12, 6), 4, 4, (12, 6)),
    ((16, 1), 8, 8, (16, 1)),
    ((64, 8), 16, 2, (24, 3)),  # two devices divide every even number of kv heads
    # and four any 3 K that they divide: six query heads a kv head, not three
    ((12, 4), 12, 4, (12, 2)),
    ((32, 8), 64, 8, (12, 3)),
    ((5, 0), 8, 2, (3, 3)),
    ((32, 8), 8, 8, (32, 8)),
    ((32, 8), 4, 2, (8, 2)),
]


@pytest.mark.parametrize(("whole", "tensor", "here", "want"), FEW_HEADS)
def test_more_devices_than_heads_stay_so(
    whole: Any, tensor: int, here: int, want: tuple[int, int]
) -> None:
    changes = {
        "model.heads": whole[0],
        "model.kv_heads": whole[1],
        "model.head_dim": 8,
        "mesh.tensor": tensor,
    }
    config = override(Config(), changes | {"model.family": "llama"})
    small, _ = shrink(config, MeshSpec(tensor=here))
    heads = small.model.heads
    kv_heads = small.model.kv_heads or small.model.heads
    assert (heads, kv_heads) == want
    assert small.rules == config.rules, "the plan fits them again"
    fitted = rules_of(small, total_sizes(small.mesh))
    assert fitted == rules_of(config, asked_sizes(config.mesh, small.mesh))
    assert heads % pieces("heads", fitted, {"tensor": here, "context": 1}) == 0


def test_a_mesh_axis_of_what_is_left_counts_as_it_is_here() -> None:
    config = override(Config(), {"mesh.tensor": -1, "mesh.dcn.data": 2})
    assert asked_sizes(config.mesh, MeshSpec(tensor=4)) == total_sizes(MeshSpec(data=2, tensor=4))


def test_heads_that_lie_otherwise_on_so_few_devices_are_refused() -> None:
    """Six heads on eight devices are split further than there are; on two no heads are."""
    changes = {"model.family": "llama", "model.heads": 6, "model.kv_heads": 3, "mesh.tensor": 8}
    config = override(Config(), changes)
    small = fit_mesh(config.mesh, 2)
    assert small is not None
    with pytest.raises(UserError, match=r"the 2 devices .*the 8"):
        shrink(config, small)


def test_what_is_turned_off_is_said() -> None:
    config = override(Config(), {"model.dropout": 0.1, "train.accumulation": 40, "train.batch": 80})
    small, note = shrink(config, MeshSpec())
    assert (small.model.dropout, small.train.accumulation, small.train.batch) == (0.0, 4, 8)
    assert "model.dropout 0.1 -> 0" in note and "train.accumulation 40 -> 4" in note


@pytest.mark.parametrize(
    ("experts", "chosen", "mesh", "want"),
    [
        (8, 2, {}, 3),
        (8, 2, {"expert": 2}, 4),
        (8, 2, {"expert": 8}, 8),
        (64, 6, {"expert": 4}, 8),
        (3, 2, {"expert": 2}, 4),
        (2, 2, {}, 2),
    ],
)
def test_experts_are_two_a_device_where_that_is_fewer(
    experts: int, chosen: int, mesh: dict[str, int], want: int
) -> None:
    changes = {"model.experts": experts, "model.experts_per_token": chosen, "model.family": "llama"}
    changes |= {"train.balance_loss": 0.1, "train.router_z_loss": 0.2}
    changes |= {"train.label_smoothing": 0.3}
    small, _ = shrink(override(Config(), changes), MeshSpec(**mesh))
    assert (small.model.experts, small.model.experts_per_token) == (want, chosen)
    assert (small.train.balance_loss, small.train.router_z_loss) == (0.1, 0.2)
    assert small.train.label_smoothing == 0.3


def test_packing_and_a_longer_position_table_are_kept() -> None:
    small, _ = shrink(
        override(Config(), {"data.pack": True, "data.seq_len": 512}),
        MeshSpec(),
    )
    assert small.data.pack
    assert small.model.max_seq_len > small.data.seq_len
    small, _ = shrink(override(Config(), {"data.seq_len": 1024}), MeshSpec())
    assert small.model.max_seq_len == small.data.seq_len


@pytest.mark.parametrize("least", LEAST)
def test_a_sequence_and_a_head_stay_as_large_as_an_op_needs(least: Least) -> None:
    small, _ = shrink(
        override(Config(), {"data.seq_len": 1024}), MeshSpec(tensor=2, context=2), least
    )
    assert least.seq_len <= small.data.seq_len < 3 * least.seq_len
    assert small.data.seq_len % math.lcm(4, least.block) == 0
    assert least.head_dim <= small.model.head_dim <= least.head_dim + 2


def test_mesh_presets_fit_eight_devices() -> None:
    for name in presets("jaxpar.meshes"):
        spec = load_mesh_preset(name)[0]
        fitted = fit_mesh(spec, simulated_devices(spec))
        assert set(sizes(fitted)) >= {axis for axis, size in total_sizes(spec).items() if size > 1}


def test_odd_multiples() -> None:
    assert [
        odd_multiple(*pair) for pair in ((12, 1), (12, 2), (12, 4), (12, 8), (24, 8), (25, 8))
    ] == [
        13,
        14,
        12,
        24,
        24,
        40,
    ]


@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize("context", [2, 4, 8])
def test_a_split_sequence_stays_one(strategy: str, context: int) -> None:
    """Three tokens a chunk; heads that Ulysses can deal out, kv heads too where it could; a window
    that matters.
    """
    keys = {
        "context.strategy": strategy,
        "model.masks": ("window(40)",),
        "data.seq_len": 1024,
        "model.heads": 16,
    }
    small, _ = shrink(
        override(Config(), keys | {"model.kv_heads": 8}),
        MeshSpec(context=context),
    )
    model = small.model
    chunks = context if strategy == "ulysses" else 2 * context
    assert small.data.seq_len % chunks == 0
    assert small.data.seq_len >= 3 * chunks
    assert model.heads == 2 * model.kv_heads
    assert strategy != "ulysses" or model.kv_heads % context == 0
    assert small.data.seq_len / 4 < reach(model.masks[0], small.data.seq_len) < small.data.seq_len
    assert small.context == Context(strategy)  # pyright: ignore[reportArgumentType]


def test_heads_that_ulysses_shares_out_in_groups_stay_so() -> None:
    """Sixteen devices share out eight heads: on eight devices there are fewer heads too."""
    keys = {"context.strategy": "ulysses", "model.heads": 8, "data.seq_len": 1024}
    asked = override(Config(), keys | {"mesh.context": 16})
    small, _ = shrink(asked, MeshSpec(context=8))
    assert small.model.heads % 8 != 0
